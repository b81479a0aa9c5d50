//! In which order memory is asked for and given, what is not given, and when it comes back.

use super::setup::{asked, gave, held, is_whole, takes};
use super::{MIB, Machine};
use gpupool_events::{Event, Reader, Record};
use harness::{Running, eventually};
use std::io::BufReader;
use std::os::unix::net::UnixListener;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// For how long what was given stays away at least (README).
const GUARD: f64 = 10.0;

/// Both matter less than who asks, and the one that works there least of all.
#[test]
fn who_only_borrows_gives_before_who_works_there() {
    let machine = Machine::new("2x320MiB");
    let owner = machine.holder(machine.neighbour(1, 5), 120);
    let borrower = machine.neighbour(0, 40).env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_LIMIT", "0:2MiB");
    let borrower = machine.holder(borrower, 140);
    machine.until(&borrower, "a loan", |page| held(page, 1) >= 136 * MIB);
    let mut high = machine.start(machine.neighbour(1, 90));
    takes(&mut high, 100);
    machine.until(&high, "its memory", |page| held(page, 1) >= 100 * MIB);
    assert_eq!(held(&machine.page(&owner), 1), 120 * MIB);
    assert_eq!(gave(&is_whole(owner)), 0);
    assert!(gave(&is_whole(borrower)) >= 60 * MIB);
    is_whole(high);
}

/// When each part of it began to be given, and its bytes.
fn given(program: &Running) -> Vec<(f64, u64)> {
    let Ok(log) = std::fs::File::open(program.log()) else { return Vec::new() };
    let begun = |record: Record| match record.event {
        Event::RecallGive(event) => Some((record.t - event.microseconds as f64 / 1e6, event.freed)),
        _ => None,
    };
    Reader::new(BufReader::new(log)).map_while(Result::ok).filter_map(begun).collect()
}

/// When the last of it began to be given.
fn given_at(program: &Running) -> Option<f64> {
    given(program).last().map(|(begun, _)| *begun)
}

/// Though there is room at once: who has asked for it is there, and may need it again.
#[test]
fn what_was_recalled_stays_away_for_a_while_and_then_comes_back_by_itself() {
    let machine = Machine::new("2x320MiB");
    let low = machine.holder(machine.neighbour(0, 10), 240);
    let mut high = machine.holder(machine.neighbour(0, 90).env("GPUPOOL_IDLE", "100ms"), 160);
    machine.until(&low, "what is left", |page| held(page, 0) <= 142 * MIB && held(page, 1) >= 96 * MIB);
    // One that was killed while it asked has left its door.
    let page = machine.files().into_iter().find(|name| name.starts_with(&format!("{}-", low.pid()))).unwrap();
    let door = machine.folder.path().join("gpupool").join(page.replace(".page", ".call"));
    drop(UnixListener::bind(&door).unwrap());
    (0..8).for_each(|_| assert_eq!(high.ask("drop"), "dropped"));
    machine.until(&high, "an empty GPU", |page| held(page, 0) == 0);
    let page = machine.until(&low, "its memory at home", |page| held(page, 0) >= 240 * MIB);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64();
    let away = now - given_at(&low).expect("a line that says what was given");
    assert!(away >= GUARD && held(&page, 1) == 0, "{away} s: {page:?}");
    is_whole(high);
    is_whole(low);
}

/// Of two that matter the same, one works there and one borrows. However often the one frees its memory and takes it again, the other's leaves once within the guard time: neither
/// what left nor what is new goes there meanwhile. Then it comes back, and leaves once more.
#[test]
fn between_equals_nothing_goes_to_and_fro() {
    let machine = Machine::new("2x320MiB");
    let mut debtor = machine.debtor(240);
    let mut owner = machine.holder(machine.neighbour(1, 50).env("GPUPOOL_IDLE", "100ms"), 200);
    machine.until(&owner, "its memory", |page| held(page, 1) >= 200 * MIB);
    let begun = given_at(&debtor).expect("a line that says what was given");
    // It asked for what it needs, and was never taken for somebody who cannot ask, for whom all would have left.
    assert!(given(&debtor).iter().map(|(_, bytes)| bytes).sum::<u64>() <= 160 * MIB, "{:?}", given(&debtor));
    let drops = |owner: &mut Running| {
        (0..10).for_each(|_| assert_eq!(owner.ask("drop"), "dropped"));
        machine.until(owner, "an empty GPU", |page| held(page, 1) == 0);
    };
    let takes_again = |owner: &mut Running| {
        (0..10).for_each(|_| _ = takes(owner, 20));
        machine.until(owner, "its memory", |page| held(page, 1) >= 200 * MIB);
    };
    for _ in 0..3 {
        drops(&mut owner);
        takes(&mut debtor, 10);
        takes_again(&mut owner);
    }
    drops(&mut owner);
    machine.until(&debtor, "the loan", |page| held(page, 1) >= 200 * MIB);
    takes_again(&mut owner);
    let gifts = given(&debtor);
    let first_again = gifts.iter().find(|(at, _)| *at > begun).expect("what came back left once more").0;
    assert!(first_again - begun >= GUARD, "{gifts:?}");
    is_whole(owner);
    is_whole(debtor);
}

/// Whatever they do meanwhile, and with no host to go to.
#[test]
fn who_matters_most_is_never_refused_while_many_that_matter_less_hold_enough() {
    let machine = Machine::new("1x320MiB");
    let low = |number: u32| machine.start(machine.neighbour(0, 10 + number));
    let mut lower: Vec<Running> = (0..4).map(low).collect();
    lower.iter_mut().for_each(|program| assert_eq!(program.ask("check"), "0", "it has begun"));
    let mut high =
        machine.start(machine.neighbour(0, 90).env("GPUPOOL_HOST_LIMIT", "0").env("GPUPOOL_SOFT_OOM", "off"));
    assert_eq!(high.ask("check"), "0", "it has begun");
    for (number, program) in (1..).zip(&mut lower) {
        takes(program, 50);
        program.tell(&format!("churn 8 {} 120", number * 7919));
    }
    high.tell("churn 6 4711 120");
    let answer = high.ask("check");
    let numbers: Vec<u64> = answer.split(' ').map_while(|number| number.parse().ok()).collect();
    let [rounds, wrong, refused, _] = numbers[..] else { panic!("{answer:?}") };
    assert!(rounds > 0 && (wrong, refused) == (0, 0), "{answer}");
    assert_eq!(high.ask("check"), "0");
    for program in &mut lower {
        let answer = program.ask("check");
        assert_eq!(answer.split(' ').skip(1).take(2).collect::<Vec<_>>(), ["0", "0"], "{answer}");
        assert_eq!(program.ask("check"), "0");
    }
    let events = is_whole(high);
    assert!(asked(&events).iter().any(|(_, freed)| *freed > 0), "nobody was asked: {:?}", asked(&events));
    lower.into_iter().for_each(|program| drop(is_whole(program)));
}

/// The look is to come soon behind a context, and a program opens the driver's files some time before it makes one.
#[test]
fn it_is_looked_more_often_who_comes_while_somebody_begins_to_use_cuda() {
    let machine = Machine::new("2x320MiB");
    let users = machine.folder.path().join("made/sys/module/nvidia_uvm");
    std::fs::create_dir_all(&users).unwrap();
    // Written whole, so that nobody reads half of it.
    let says = |count: &str| {
        std::fs::write(users.join("new"), format!("{count}\n")).unwrap();
        std::fs::rename(users.join("new"), users.join("refcnt")).unwrap();
    };
    says("7");
    let run = machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_LIMIT", "0:2MiB");
    let run = run.preload(harness::Build::library("made_host", "made_host").path());
    let run = run.env("MADE_HOST", machine.folder.path().join("made"));
    let debtor = machine.holder(run, 240);
    machine.until(&debtor, "a loan", |page| held(page, 1) >= 236 * MIB);
    let awaits = || std::fs::read_to_string(debtor.log()).unwrap_or_default().matches("begins to use CUDA").count();
    assert_eq!(awaits(), 0);
    // More again and again, since it compares with what it saw at its first look.
    let mut count = 7;
    eventually("a closer look", || {
        count += 1;
        says(&count.to_string());
        (awaits() > 0).then_some(())
    });
    let mut bare = machine.start(machine.bare(1));
    assert_eq!(bare.ask("check"), "0", "it has begun");
    machine.until(&debtor, "an empty GPU 1", |page| held(page, 1) == 0);
    takes(&mut bare, 300);
    is_whole(debtor);
    assert!(bare.end().0.success());
}

/// What stands on one chunk leaves as a whole, however little of it was asked for.
#[test]
fn a_little_is_given_also_where_many_blocks_stand_on_one_chunk() {
    for gpus in ["1x320MiB", "2x320MiB"] {
        let machine = Machine::new(gpus);
        let mut low = machine.start(machine.neighbour(0, 10));
        // Of freed chunks of 20 MiB.
        (0..12).for_each(|_| _ = takes(&mut low, 20));
        (0..12).for_each(|_| assert_eq!(low.ask("drop"), "dropped"));
        (0..60).for_each(|_| _ = takes(&mut low, 4));
        machine.until(&low, "its memory", |page| held(page, 0) >= 240 * MIB);
        let high = machine.neighbour(0, 90).env("GPUPOOL_HOST_LIMIT", "0").env("GPUPOOL_SOFT_OOM", "off");
        let mut high = machine.start(high.env("GPUPOOL_DEVICES", "0"));
        takes(&mut high, 40);
        for _ in 0..20 {
            takes(&mut high, 4);
        }
        let page = machine.until(&high, "its memory", |page| page.levels.live_bytes == 120 * MIB);
        assert_eq!(held(&page, 0), 120 * MIB, "{page:?}");
        let questions = asked(&is_whole(high));
        assert!(questions.iter().all(|(bytes, freed)| freed >= bytes), "{questions:?}");
        is_whole(low);
    }
}

/// Of more than that as much as is guaranteed, and no more of anybody who matters more.
#[test]
fn a_block_larger_than_what_is_guaranteed_has_as_much_near_as_that() {
    let guaranteed = |machine: &Machine| {
        let high = machine.holder(machine.neighbour(0, 80), 340);
        (high, machine.start(machine.neighbour(0, 20).env("GPUPOOL_GUARANTEE", "100MiB")))
    };
    let machine = Machine::new("1x400MiB");
    let (high, mut low) = guaranteed(&machine);
    takes(&mut low, 150);
    let page = machine.until(&low, "its memory", |page| page.levels.live_bytes == 150 * MIB);
    assert!((98 * MIB..=120 * MIB).contains(&held(&page, 0)), "{page:?}");
    let given = gave(&is_whole(high));
    assert!((50 * MIB..=80 * MIB).contains(&given), "{given}");
    is_whole(low);
    // What lies in one place has nothing of a part.
    let machine = Machine::new("1x400MiB");
    let (high, mut low) = guaranteed(&machine);
    assert_eq!(low.ask("own 150"), "made");
    assert_eq!(gave(&is_whole(high)), 0);
    is_whole(low);
}

/// Of what a program keeps for itself a part may be a chunk, and which chunks go decides how much can.
#[test]
fn what_is_guaranteed_takes_nothing_from_who_matters_more_that_other_chunks_would_give() {
    for sizes in [[60, 110], [110, 60]] {
        let machine = Machine::new("1x200MiB");
        let mut low = machine.start(machine.neighbour(0, 10).env("GPUPOOL_GUARANTEE", "2MiB"));
        for mib in sizes {
            takes(&mut low, mib);
        }
        machine.until(&low, "its memory", |page| held(page, 0) >= 170 * MIB);
        let mut high = machine.start(machine.neighbour(0, 90));
        takes(&mut high, 100);
        let page = machine.until(&high, "its memory", |page| page.levels.live_bytes == 100 * MIB);
        assert_eq!((held(&page, 0), page.levels.residence.on_host), (100 * MIB, 0), "{sizes:?}: {page:?}");
        let page = machine.until(&low, "what is left", |page| page.levels.residence.on_host > 0);
        assert_eq!(held(&page, 0), 60 * MIB, "{sizes:?}: {page:?}");
        is_whole(high);
        is_whole(low);
    }
}

/// As much of a block as may be asked back does not stay because the rest of it may not.
#[test]
fn a_large_block_of_a_program_with_a_guarantee_gives_what_is_beyond_that() {
    let machine = Machine::new("1x400MiB");
    let mut low = machine.start(machine.neighbour(0, 10).env("GPUPOOL_GUARANTEE", "100MiB"));
    takes(&mut low, 340);
    machine.until(&low, "its memory", |page| held(page, 0) >= 340 * MIB);
    let mut high = machine.start(machine.neighbour(0, 90));
    takes(&mut high, 150);
    let page = machine.until(&high, "its memory", |page| page.levels.live_bytes == 150 * MIB);
    assert_eq!((held(&page, 0), page.levels.residence.on_host), (150 * MIB, 0), "{page:?}");
    assert!(held(&machine.page(&low), 0) >= 100 * MIB);
    is_whole(high);
    is_whole(low);
}

/// It was asked, and its kernel ran for longer than anybody waits.
#[test]
fn who_gave_nothing_is_not_told_that_it_did() {
    let machine = Machine::new("1x320MiB");
    let mut low = machine.holder(machine.neighbour(0, 10), 100);
    low.ask("spin");
    let mut high = machine.start(machine.neighbour(0, 90).env("GPUPOOL_RECALL_WAIT", "500ms"));
    takes(&mut high, 220);
    low.ask("release");
    takes(&mut low, 60);
    machine.until(&low, "memory on the host", |page| page.levels.residence.on_host >= 40 * MIB);
    let log = std::fs::read_to_string(low.log()).unwrap();
    assert!(log.contains("no GPU that can lend has room") && !log.contains("was given to another one"), "{log}");
    assert_eq!(gave(&is_whole(low)), 0);
    assert!(!asked(&is_whole(high)).is_empty());
}

/// All that it has would not be enough, and the program would be told OUT_OF_MEMORY all the same.
#[test]
fn a_context_that_has_no_room_in_the_end_takes_nothing_from_anybody_and_says_so() {
    let machine = Machine::new("1x320MiB");
    let low = machine.holder(machine.neighbour(0, 10).env("SIMCUDA_CONTEXT_MIB", "200"), 80);
    machine.until(&low, "what its context takes", |page| page.contexts.rows.iter().any(|it| it.cost > Some(0)));
    // Who has just made a context may have just borrowed as well, of which nobody knows how much.
    eventually("one that has made none for a while", || {
        let up: f64 = std::fs::read_to_string("/proc/uptime").unwrap().split(' ').next()?.parse().ok()?;
        let before = Duration::from_secs_f64(up - 4.0).as_nanos() as u64;
        (!machine.page(&low).took.is_since(before)).then_some(())
    });
    let high = machine.start(machine.neighbour(0, 90).env("SIMCUDA_CONTEXT_MIB", "200"));
    let log = high.log();
    let (status, _folder) = high.ends();
    assert!(!status.success(), "{status}");
    let told = std::fs::read_to_string(&log).unwrap();
    assert!(told.contains("OUT_OF_MEMORY for a context on GPU 0"), "{told}");
    let report = machine.gpupool(&format!("report --oom {}", log.display()));
    let report = String::from_utf8_lossy(&report.stdout).into_owned();
    assert!(report.contains("(a context) on GPU 0"), "{report}");
    assert_eq!(gave(&is_whole(low)), 0);
}

/// Its priority is enough, and it is told of priorities.
#[test]
fn who_is_refused_a_context_is_told_who_was_asked_and_did_not_answer() {
    let machine = Machine::new("1x320MiB");
    let mut low = machine.holder(machine.neighbour(0, 10), 280);
    low.ask("spin");
    let high = machine.neighbour(0, 90).env("SIMCUDA_CONTEXT_MIB", "100").env("GPUPOOL_RECALL_WAIT", "500ms");
    let high = machine.start(high);
    let log = high.log();
    let (status, _folder) = high.ends();
    assert!(!status.success(), "{status}");
    let told = std::fs::read_to_string(&log).unwrap();
    let expected = format!("of those that were asked for room process {} did not answer in time", low.pid());
    assert!(told.contains("OUT_OF_MEMORY for a context on GPU 0") && told.contains(&expected), "{told}");
    low.ask("release");
    is_whole(low);
}
