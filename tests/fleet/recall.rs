//! Memory that goes from one process to another by priority, from borrowers to those who work on a GPU, and to programs that do not run under gpupool: who gives way to whom.

use super::setup::{asked, gave, held, is_whole, takes, was_there_before};
use super::{MIB, Machine};
use gpupool_events::Event;
use gpupool_metrics::Snapshot;
use harness::{Running, goes_on, page_of};
use serde_json::Value;
use std::time::Duration;

/// What a program has of its own making on a GPU.
fn own(page: &Snapshot, gpu: u32) -> u64 {
    let places = page.levels.places.rows.iter();
    places.filter(|place| place.is_gpu() && place.number == gpu).map(|place| place.own).sum()
}

#[test]
fn memory_of_a_lower_priority_gives_way_to_a_higher_one_and_to_no_other() {
    let machine = Machine::new("2x320MiB");
    let low = machine.holder(machine.neighbour(0, 10), 240);
    let mut high = machine.start(machine.neighbour(0, 90));
    takes(&mut high, 160);
    let page = machine.until(&high, "its memory", |page| held(page, 0) >= 160 * MIB);
    assert_eq!((held(&page, 1), page.levels.residence.on_host), (0, 0), "{page:?}");
    // To another GPU, as long as one has room, and not to the host.
    let page = machine.until(&low, "what is left", |page| held(page, 0) <= 142 * MIB && held(page, 1) >= 96 * MIB);
    assert_eq!((page.levels.live_bytes, page.levels.residence.on_host), (240 * MIB, 0), "{page:?}");
    // An equal one and a lower one get what is free, and no more.
    let others = [machine.holder(machine.neighbour(0, 90), 60), machine.holder(machine.neighbour(0, 5), 60)];
    let page = machine.page(&high);
    assert_eq!(held(&page, 0), 160 * MIB, "{page:?}");
    // What matters more is not asked at all.
    let mut low = low;
    takes(&mut low, 40);
    // GPU 1 has room for that. What has none, lies on the host for a reason that is told.
    let log = |low: &Running| std::fs::read_to_string(low.log()).unwrap();
    let why = "what this program had there was given to another one that does not matter less";
    assert!(!log(&low).contains(why), "{}", log(&low));
    takes(&mut low, 200);
    machine.until(&low, "memory on the host", |page| page.levels.residence.on_host >= 20 * MIB);
    let log = log(&low);
    assert!(log.contains(why) && log.contains("raise GPUPOOL_PRIORITY of this one"), "{log}");
    let events = is_whole(low);
    assert!(asked(&events).iter().all(|(_, freed)| *freed == 0) && gave(&events) >= 96 * MIB, "{:?}", asked(&events));
    let events = is_whole(high);
    assert!(gave(&events) == 0 && asked(&events).iter().any(|(_, freed)| *freed >= 96 * MIB), "{:?}", asked(&events));
    others.into_iter().for_each(|other| drop(is_whole(other)));
}

/// The driver refuses memory on the host at first, as one does that takes longer for it than anybody waits.
#[test]
fn a_gpu_is_free_before_the_driver_has_made_memory_on_the_host_for_what_left_it() {
    let machine = Machine::new("1x320MiB");
    let late: Vec<String> = (13..40).map(|call| format!("cuMemCreate:{call}=2")).collect();
    let low = machine.neighbour(0, 10).env("SIMCUDA_FAULT", late.join(","));
    let low = machine.holder(low, 240);
    let mut high = machine.start(machine.neighbour(0, 90));
    takes(&mut high, 260);
    let page = machine.until(&high, "its memory", |page| held(page, 0) >= 260 * MIB);
    assert_eq!(page.levels.residence.on_host, 0, "{page:?}");
    let page = machine.until(&low, "memory on the host", |page| page.levels.residence.on_host >= 200 * MIB);
    assert_eq!(page.levels.live_bytes, 240 * MIB, "{page:?}");
    let told = machine.gpupool("ps").stdout;
    assert!(String::from_utf8_lossy(&told).contains("far: "), "{}", String::from_utf8_lossy(&told));
    let events = is_whole(low);
    let settled: u64 =
        events.iter().map(|event| if let Event::HostSettle(event) = event { event.bytes } else { 0 }).sum();
    assert!(settled >= 200 * MIB && gave(&events) >= 200 * MIB, "{settled}");
    let ended =
        events.iter().find_map(|event| if let Event::ProcessExit(event) = event { Some(&event.peak) } else { None });
    let of_gpu = ended.unwrap().iter().find(|peak| peak.place == "gpu0").unwrap();
    assert!(of_gpu.limit >= Some(of_gpu.peak_used), "a peak of more than was allowed: {of_gpu:?}");
    is_whole(high);
}

/// Also where they are so new that no page says what they have.
#[test]
fn of_those_who_matter_less_the_least_gives_what_lacks_and_the_others_nothing() {
    let machine = Machine::new("1x400MiB");
    let [mut middle, mut least] = [50, 20].map(|priority| machine.start(machine.neighbour(0, priority)));
    for _ in 0..4 {
        takes(&mut middle, 40);
        takes(&mut least, 40);
    }
    let mut high = machine.start(machine.neighbour(0, 80));
    takes(&mut high, 80);
    machine.until(&high, "its memory near", |page| held(page, 0) == 80 * MIB);
    let [of_middle, of_least] = [is_whole(middle), is_whole(least)].map(|events| -> u64 {
        events.iter().map(|event| if let Event::RecallGive(event) = event { event.freed } else { 0 }).sum()
    });
    assert!(of_middle == 0 && (20 * MIB..=80 * MIB).contains(&of_least), "{of_middle} {of_least}");
    is_whole(high);
}

/// As one does that loads a model: each question costs.
#[test]
fn who_takes_block_after_block_asks_for_more_at_a_time() {
    let machine = Machine::new("1x480MiB");
    let low = machine.holder(machine.neighbour(0, 10), 440);
    let mut high = machine.start(machine.neighbour(0, 90));
    for _ in 0..20 {
        takes(&mut high, 20);
    }
    let page = machine.until(&high, "its memory", |page| page.levels.live_bytes == 400 * MIB);
    assert_eq!((held(&page, 0), page.levels.residence.on_host), (400 * MIB, 0), "{page:?}");
    let given = is_whole(low);
    let events = is_whole(high);
    // Both say the same of each question.
    let given: Vec<u64> = given
        .iter()
        .filter_map(|event| if let Event::RecallGive(event) = event { Some(event.bytes) } else { None })
        .collect();
    let wanted =
        |event: &Event| if let Event::RecallAsk(event) = event { Some(event.bytes + event.ahead) } else { None };
    assert_eq!(events.iter().filter_map(wanted).collect::<Vec<_>>(), given);
    let questions = asked(&events);
    // Each but the first few is for as much again as all before it; on a busy machine some of them come so late that they begin anew.
    assert!(questions.len() <= 15 && questions.iter().max() > questions.first(), "{questions:?}");
}

/// Each call fails now and then on the way to plain memory and to the host.
#[test]
fn a_call_of_the_driver_that_fails_during_a_recall_to_the_host_loses_nothing() {
    let machine = Machine::new("1x320MiB");
    let mut low = machine.holder(machine.neighbour(0, 10), 280);
    let mut all = Vec::new();
    let out = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemcpyDtoHAsync_v2"];
    let back = ["cuMemcpyHtoDAsync_v2", "cuMemHostRegister_v2", "cuStreamCreate", "cuStreamSynchronize"];
    for (at, call) in (0..).zip(out.into_iter().chain(back)) {
        let code = [2, 999][at % 2];
        let faults: Vec<String> = (0..3).map(|time| format!("{call}:{}={code}", 1 + at % 3 + time * 2)).collect();
        assert_eq!(low.ask(&format!("faults {}", faults.join(","))), "armed");
        // Another one each time: who asks again at once asks for more, and has it then.
        let mut high = machine.start(machine.neighbour(0, 90));
        takes(&mut high, 18);
        assert_eq!(low.ask("check"), "0", "{call}");
        all.push(high);
    }
    let near = |high: &Running| held(&machine.until(high, "its memory", |page| page.levels.live_bytes == 18 * MIB), 0);
    let near: u64 = all.iter().map(near).sum();
    assert!(near >= 140 * MIB, "{near}");
    let questions: Vec<_> = all.into_iter().map(|high| asked(&is_whole(high))).collect();
    assert!(questions.iter().filter(|asked| !asked.is_empty()).count() >= 9, "{questions:?}");
    is_whole(low);
}

/// Before it has allocated anything, and where a context takes more than the reserve.
#[test]
fn memory_of_a_lower_priority_gives_way_to_the_context_of_a_higher_one() {
    let machine = Machine::new("2x320MiB");
    let low = machine.holder(machine.neighbour(0, 10), 290);
    let mut high = machine.start(machine.neighbour(0, 90).env("SIMCUDA_CONTEXT_MIB", "100"));
    takes(&mut high, 20);
    let page = machine.until(&high, "its memory", |page| held(page, 0) >= 20 * MIB);
    assert_eq!(held(&page, 1), 0, "{page:?}");
    assert!(gave(&is_whole(low)) >= 70 * MIB);
    is_whole(high);
}

#[test]
fn memory_of_a_programs_own_making_asks_and_gives_way_as_well() {
    let machine = Machine::new("2x320MiB");
    let mut low = machine.start(machine.neighbour(0, 10));
    assert_eq!(low.ask("own 120"), "made");
    assert_eq!(low.ask("own 100"), "made");
    machine.until(&low, "its memory", |page| own(page, 0) >= 220 * MIB);
    let mut high = machine.start(machine.neighbour(0, 90));
    assert_eq!(high.ask("own 160"), "made");
    machine.until(&high, "its memory", |page| own(page, 0) >= 160 * MIB);
    machine.until(&low, "what is left", |page| own(page, 0) <= 120 * MIB);
    is_whole(low);
    is_whole(high);
}

/// What came back from the host is kept there for a while, and counts.
#[test]
fn who_gives_way_again_has_the_room_of_the_host_that_it_had_the_first_time() {
    let machine = Machine::new("1x320MiB");
    let low = machine.holder(machine.neighbour(0, 10).env("GPUPOOL_HOST_LIMIT", "240MiB"), 260);
    for _ in 0..2 {
        machine.until(&low, "all of it near", |page| held(page, 0) >= 260 * MIB);
        let mut high = machine.start(machine.neighbour(0, 90));
        takes(&mut high, 240);
        let page = machine.until(&high, "its memory", |page| page.levels.live_bytes == 240 * MIB);
        assert_eq!((held(&page, 0), page.levels.residence.on_host), (240 * MIB, 0), "{page:?}");
        is_whole(high);
    }
    is_whole(low);
}

#[test]
fn a_loan_is_called_back_by_who_works_there_and_what_is_guaranteed_stays() {
    let machine = Machine::new("2x320MiB");
    let debtor = machine.debtor(240);
    // Of the same priority.
    let owner = machine.holder(machine.neighbour(1, 50).env("GPUPOOL_GUARANTEE", "1:80MiB"), 200);
    machine.until(&owner, "its memory", |page| held(page, 1) >= 200 * MIB && held(page, 0) == 0);
    machine.until(&debtor, "what is left", |page| held(page, 1) <= 100 * MIB);
    // Above all others, and what is guaranteed is left.
    let mut above = machine.start(machine.neighbour(1, 100));
    takes(&mut above, 280);
    let page = machine.until(&owner, "what is left", |page| held(page, 1) < 200 * MIB);
    assert!(held(&page, 1) >= 80 * MIB, "{page:?}");
    drop(is_whole(above));
    // Within what it is guaranteed a program is above all.
    let high = machine.holder(machine.neighbour(0, 90), 280);
    let low = machine.neighbour(0, 1).env("GPUPOOL_GUARANTEE", "0:60MiB");
    let low = machine.holder(low, 60);
    machine.until(&low, "its memory", |page| held(page, 0) >= 60 * MIB);
    for program in [debtor, owner, high, low] {
        is_whole(program);
    }
}

/// Also where that is the middle of a chunk, which moves whole.
#[test]
fn nobody_goes_below_what_it_is_guaranteed() {
    for guarantee in [60, 200] {
        let machine = Machine::new("2x320MiB");
        let low = machine.neighbour(0, 1).env("GPUPOOL_GUARANTEE", format!("0:{guarantee}MiB"));
        let mut low = machine.start(low);
        takes(&mut low, 240);
        machine.until(&low, "its memory", |page| held(page, 0) >= 240 * MIB);
        let mut high = machine.start(machine.neighbour(0, 90));
        takes(&mut high, 240);
        let page = machine.until(&high, "its memory", |page| held(page, 0) + held(page, 1) >= 240 * MIB);
        assert!(held(&page, 0) <= (320 - guarantee) * MIB, "{page:?}");
        assert!(held(&machine.page(&low), 0) >= guarantee * MIB);
        is_whole(low);
        is_whole(high);
    }
}

#[test]
fn a_priority_that_is_changed_counts_from_then_on() {
    let machine = Machine::new("2x320MiB");
    let first = machine.holder(machine.neighbour(0, 50), 240);
    let mut second = machine.holder(machine.neighbour(0, 50), 20);
    takes(&mut second, 80);
    machine.until(&second, "memory elsewhere", |page| held(page, 1) + page.levels.residence.on_host >= 40 * MIB);
    assert_eq!(held(&machine.page(&first), 0), 240 * MIB, "equals do not give way");
    let (told, done) = machine.told(&format!("priority --json {} 60", second.pid()));
    assert!(done && told["changes"][0]["new"] == "60", "{told}");
    takes(&mut second, 80);
    machine.until(&first, "what is left", |page| held(page, 0) < 200 * MIB);
    is_whole(first);
    is_whole(second);
}

/// It does not matter less any more than who got it, for which it would be kept for ten seconds.
#[test]
fn who_comes_to_matter_more_has_what_it_gave_as_soon_as_it_asks() {
    let machine = Machine::new("2x320MiB");
    let mut low = machine.holder(machine.neighbour(0, 20), 240);
    let mut high = machine.start(machine.neighbour(0, 80));
    takes(&mut high, 160);
    let before = machine.until(&low, "what is left", |page| held(page, 0) <= 160 * MIB && held(page, 1) >= 80 * MIB);
    let (told, done) = machine.told(&format!("priority --json {} 95", low.pid()));
    assert!(done && told["changes"][0]["new"] == "95", "{told}");
    takes(&mut low, 60);
    let page = machine.until(&low, "its memory", |page| page.levels.live_bytes == 300 * MIB);
    assert!(held(&page, 0) >= held(&before, 0) + 60 * MIB && page.levels.residence.on_host == 0, "{page:?}");
    assert!(gave(&is_whole(high)) >= 40 * MIB);
    is_whole(low);
}

#[test]
fn a_program_without_gpupool_gets_what_others_only_borrow() {
    let machine = Machine::new("2x320MiB");
    let mut debtor = machine.debtor(240);
    let mut bare = machine.start(machine.bare(1));
    let page = machine.until(&debtor, "an empty GPU 1", |page| held(page, 1) == 0);
    assert_eq!(page.levels.live_bytes, 240 * MIB);
    takes(&mut bare, 300);
    assert_eq!((bare.ask("check"), debtor.ask("check")), ("0".to_owned(), "0".to_owned()));
    // What it goes on to need elsewhere lies elsewhere.
    takes(&mut debtor, 40);
    assert_eq!(held(&machine.page(&debtor), 1), 0);
    assert!(gave(&is_whole(debtor)) >= 236 * MIB);
    let (status, _folder) = bare.end();
    assert!(status.success(), "{status}");
}

/// A page is rung for its process alone, so that what was lent a moment ago may not have been looked at yet.
#[test]
fn a_program_without_gpupool_that_comes_right_after_the_memory_gets_it_as_well() {
    let machine = Machine::new("2x320MiB");
    let low = machine.holder(machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1"), 240);
    let agent = super::upset::agent(&low);
    let mut suspends = machine.command(&format!("suspend --to peers {}", low.pid())).spawn().unwrap();
    // It has said that it is done, and has looked at nothing since.
    agent.ends_call(libc::SYS_sendmsg, |_| machine.page(&low).levels.suspended > 0);
    let mut bare = machine.start(machine.bare(1));
    assert_eq!(bare.ask("check"), "0", "it has begun");
    drop(agent);
    assert!(suspends.wait().unwrap().success());
    let page = machine.until(&low, "an empty GPU 1", |page| held(page, 1) == 0);
    assert!(held(&page, 0) == 0 && page.levels.suspended > 0, "{page:?}");
    takes(&mut bare, 280);
    assert!(machine.told(&format!("resume --json {}", low.pid())).1);
    is_whole(low);
    let (status, _folder) = bare.end();
    assert!(status.success(), "{status}");
}

/// It had what it needed when somebody borrowed the rest, and needs more.
#[test]
fn a_program_without_gpupool_that_was_there_before_the_loan_grows_by_what_is_kept_free() {
    let machine = Machine::new("2x320MiB");
    let mut bare = machine.start(machine.bare(1));
    takes(&mut bare, 20);
    was_there_before(&bare);
    let debtor = machine.debtor(260);
    for round in 1..=5 {
        takes(&mut bare, 16);
        // 16 MiB are free again, beside its context and what it has.
        machine.until(&debtor, "room", |page| held(page, 1) <= (320 - 16 - 4 - 20 - 16 * round) * MIB);
    }
    assert_eq!(bare.ask("check"), "0");
    assert!(gave(&is_whole(debtor)) >= 40 * MIB);
    let (status, _folder) = bare.end();
    assert!(status.success(), "{status}");
}

#[test]
fn many_with_priorities_take_and_drop_at_random_and_lose_nothing() {
    // Longer and with more by GPUPOOL_FLEET_SECONDS and GPUPOOL_FLEET_PROCESSES.
    let number = |name: &str, otherwise: u32| std::env::var(name).map_or(otherwise, |text| text.parse().unwrap());
    let (seconds, count) = (number("GPUPOOL_FLEET_SECONDS", 3), number("GPUPOOL_FLEET_PROCESSES", 5));
    let machine = Machine::new("2x160MiB");
    let program = |number: u32| machine.start(machine.neighbour(number % 2, 10 + number * 80 / count));
    let mut programs: Vec<Running> = (0..count).map(program).collect();
    let mut killed = machine.start(machine.neighbour(0, 40));
    // Whoever comes while others fill its GPU that matter more gets no context there.
    for program in programs.iter_mut().chain([&mut killed]) {
        assert_eq!(program.ask("check"), "0", "it has begun");
    }
    for (number, program) in (1..).zip(&mut programs) {
        program.tell(&format!("churn {seconds} {} 80", number * 7919));
    }
    killed.tell("churn 600 3 80");
    std::thread::sleep(Duration::from_secs(u64::from(seconds) / 2));
    killed.signal(libc::SIGKILL);
    drop(killed);
    for program in &mut programs {
        let answer = program.ask("check");
        let numbers: Vec<u64> = answer.split(' ').map(|number| number.parse().unwrap()).collect();
        let [rounds, wrong, refused, longest] = numbers[..] else { panic!("{answer}") };
        assert!(rounds > 0 && (wrong, refused) == (0, 0) && longest < 30_000, "{answer}");
        assert_eq!(program.ask("check"), "0");
        println!("rounds, wrong words, refusals, longest allocation in ms: {answer}");
    }
    for program in programs {
        let (status, folder) = program.end();
        assert!(status.success(), "{status}");
        let report = std::fs::read_to_string(folder.path().join("report")).unwrap();
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["violations"], serde_json::json!([]), "{report}");
    }
    // The next one that comes removes what the killed one left.
    is_whole(machine.holder(machine.neighbour(0, 50), 4));
    assert_eq!(machine.files(), Vec::<String>::new());
}

#[test]
fn who_works_while_others_take_its_loans_goes_on() {
    let machine = Machine::new("2x320MiB");
    let mut borrower = machine.start(machine.run().env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_LIMIT", "0:4MiB"));
    super::at_work(&mut borrower, 1);
    machine.until(&borrower, "a loan", |page| held(page, 1) >= 16 * MIB);
    let before = page_of(machine.folder.path(), borrower.pid()).unwrap();
    assert!(held(&before, 1) >= 16 * MIB);
    let mut owner = machine.start(machine.neighbour(1, 50));
    takes(&mut owner, 280);
    goes_on(&mut borrower);
    is_whole(owner);
    super::ends_well(borrower);
}
