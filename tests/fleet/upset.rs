//! What comes in between while memory goes from one program to another: either is killed, stopped, ends, forks or becomes another one, before the memory has
//! left and while it waits in plain memory of the host.

use super::setup::{gave, held, is_whole, takes};
use super::{MIB, Machine, ends_well};
use gpupool_events::Event;
use gpupool_metrics::Snapshot;
use harness::{Run, Running, Traced, eventually};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Longer than any of this takes, and shorter than anybody waits who is answered by nobody.
const SOON: Duration = Duration::from_secs(25);

impl Machine {
    fn low(&self) -> Run {
        self.neighbour(0, 10)
    }

    /// One of which 240 MiB have left GPU 0, for another one that has 260 MiB there now; they wait for the driver to make memory on the host for them, which it
    /// refuses.
    fn settling(&self) -> (Running, Running) {
        let mut low = self.holder(self.low(), 240);
        refuses_memory(&mut low, true);
        let mut high = self.start(self.neighbour(0, 90));
        takes(&mut high, 260);
        self.until(&high, "its memory", |page| held(page, 0) >= 260 * MIB);
        self.until(&low, "an empty GPU", |page| waits(page, 240));
        (low, high)
    }
}

fn waits(page: &Snapshot, mib: u64) -> bool {
    held(page, 0) < 60 * MIB && page.levels.live_bytes == mib * MIB
}

/// Whether the driver refuses a program all memory from here on.
fn refuses_memory(program: &mut Running, refuses: bool) {
    let calls: Vec<String> = (1..2000).map(|call| format!("cuMemCreate:{call}=2")).collect();
    let calls = if refuses { calls.join(",") } else { String::new() };
    assert_eq!(program.ask(&format!("faults {calls}")), "armed");
}

/// It goes on, with all that it has.
#[track_caller]
fn goes_on(mut low: Running) {
    refuses_memory(&mut low, false);
    let events = is_whole(low);
    let settled = |event: &Event| if let Event::HostSettle(event) = event { event.bytes } else { 0 };
    let settled: u64 = events.iter().map(settled).sum();
    assert!(settled >= 180 * MIB && gave(&events) >= 180 * MIB, "{settled} {}", gave(&events));
}

/// The thread of its agent, which stands.
pub(super) fn agent(program: &Running) -> Traced {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", program.pid())).unwrap().flatten();
    let is_agent = |task: &std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == "gpupool")
    };
    let task = tasks.into_iter().find(is_agent).unwrap().file_name();
    Traced::begin(task.to_str().unwrap().parse().unwrap()).unwrap()
}

/// `act` is done with the one that is asked for memory, when it has begun to give it: what becomes of the other one, and of it.
fn in_the_middle(machine: &Machine, act: impl FnOnce(&mut Running, &mut Running)) -> (Running, Running) {
    let mut low = machine.holder(machine.low(), 240);
    let mut high = machine.holder(machine.neighbour(0, 90), 2);
    let agent = agent(&low);
    high.tell("take 160");
    // It has said that there is some.
    agent.ends_call(libc::SYS_sendmsg, |_| true);
    act(&mut low, &mut high);
    drop(agent);
    (low, high)
}

#[test]
fn a_giver_that_is_killed_in_the_middle_delays_nobody() {
    let machine = Machine::new("2x320MiB");
    let (low, mut high) = in_the_middle(&machine, |low, _| low.signal(libc::SIGKILL));
    let took: u64 = high.ask("check").parse().unwrap();
    assert!(Duration::from_millis(took) < SOON, "{took} ms");
    drop(low);
    // The answers are of what was said before.
    assert_eq!(high.ask("take 60"), "0");
    high.ask("check").parse::<u64>().unwrap();
    is_whole(high);
    is_whole(machine.holder(machine.low(), 4));
    assert_eq!(machine.files(), Vec::<String>::new());
}

#[test]
fn an_asker_whose_door_somebody_removes_before_it_looked_at_it_is_heard_all_the_same() {
    let machine = Machine::new("2x320MiB");
    let low = machine.holder(machine.low(), 240);
    let mut high = machine.holder(machine.neighbour(0, 90), 2);
    let asks = Traced::begin(high.pid() as i32).unwrap();
    high.tell("take 160");
    // It listens, and has not looked yet at what it listens by.
    asks.ends_call(libc::SYS_bind, |_| true);
    let doors: Vec<String> = machine.files().into_iter().filter(|file| file.ends_with(".call")).collect();
    assert_eq!(doors.len(), 1, "{doors:?}");
    std::fs::remove_file(machine.folder.path().join("gpupool").join(&doors[0])).unwrap();
    drop(asks);
    let took: u64 = high.ask("check").parse().unwrap();
    assert!(Duration::from_millis(took) < SOON, "{took} ms");
    is_whole_later(high);
    assert!(gave(&is_whole(low)) >= 100 * MIB);
}

/// One answer is left, of the last question.
#[track_caller]
fn is_whole_later(mut program: Running) -> Vec<Event> {
    assert_eq!(program.ask("check"), "0");
    is_whole(program)
}

#[test]
fn a_giver_that_is_stopped_in_the_middle_delays_nobody_and_has_all_when_it_goes_on() {
    let machine = Machine::new("2x320MiB");
    let (low, mut high) = in_the_middle(&machine, |low, _| low.signal(libc::SIGSTOP));
    let took: u64 = high.ask("check").parse().unwrap();
    assert!(Duration::from_millis(took) < SOON, "{took} ms");
    low.signal(libc::SIGCONT);
    is_whole_later(high);
    is_whole(low);
}

#[test]
fn a_giver_that_ends_or_becomes_another_program_in_the_middle_does_so_and_delays_nobody() {
    for way in ["exit", "exec", "SIGTERM"] {
        let machine = Machine::new("2x320MiB");
        let (mut low, mut high) = in_the_middle(&machine, |low, _| match way {
            "SIGTERM" => low.signal(libc::SIGTERM),
            "exec" => assert_eq!(low.ask(way), "it goes"),
            _ => low.tell(way),
        });
        let took: u64 = high.ask("check").parse().unwrap();
        assert!(Duration::from_millis(took) < SOON, "{way}: {took} ms");
        match way {
            "exec" => {
                takes(&mut low, 20);
                is_whole(low);
            }
            _ => {
                let (status, _folder) = low.end();
                assert_eq!(status.success(), way == "exit", "{way}: {status}");
            }
        }
        is_whole_later(high);
    }
}

#[test]
fn a_giver_that_forks_in_the_middle_gives_what_it_was_to() {
    let machine = Machine::new("2x320MiB");
    let (mut low, mut high) = in_the_middle(&machine, |low, _| low.tell("fork"));
    let took: u64 = high.ask("check").parse().unwrap();
    assert!(Duration::from_millis(took) < SOON, "{took} ms");
    assert_eq!(low.ask("check"), "child ended with 7");
    let page = machine.until(&high, "its memory", |page| page.levels.live_bytes == 162 * MIB);
    assert!(held(&page, 0) >= 160 * MIB, "{page:?}");
    is_whole_later(low);
    is_whole_later(high);
}

/// A program at work frees memory that its GPU may still use, which leaves once that is at rest, before anything that is in use.
#[test]
fn what_a_program_had_freed_goes_before_what_it_uses_and_it_keeps_what_it_is_guaranteed() {
    let machine = Machine::new("1x320MiB");
    let low = machine.low().env("GPUPOOL_FREE", "lazy").env("GPUPOOL_IDLE", "off").env("GPUPOOL_GUARANTEE", "0:100MiB");
    let mut low = machine.start(low);
    for _ in 0..5 {
        takes(&mut low, 40);
    }
    // Who asks knows of it, and waits.
    machine.until(&low, "a page", |page| held(page, 0) >= 200 * MIB);
    let mut high = machine.holder(machine.neighbour(0, 90), 2);
    assert_eq!(low.ask("spin"), "it spins");
    (0..2).for_each(|_| assert_eq!(low.ask("drop"), "dropped"));
    let agent = agent(&low);
    high.tell("take 200");
    agent.ends_call(libc::SYS_sendmsg, |_| true);
    assert_eq!(low.ask("release"), "it ends");
    drop(agent);
    high.ask("check").parse::<u64>().unwrap();
    let page = machine.until(&low, "less than it had", |page| held(page, 0) <= 120 * MIB);
    assert!(held(&page, 0) >= 100 * MIB, "{page:?}");
    is_whole(low);
    is_whole_later(high);
}

#[test]
fn who_is_asked_by_one_that_is_killed_or_stopped_then_goes_on_and_answers_the_next() {
    for signal in [libc::SIGKILL, libc::SIGSTOP] {
        let machine = Machine::new("2x320MiB");
        let (low, high) = in_the_middle(&machine, |_, high| high.signal(signal));
        let mut next = machine.start(machine.neighbour(0, 90));
        let begun = Instant::now();
        takes(&mut next, 100);
        assert!(begun.elapsed() < SOON, "{signal}");
        let page = machine.until(&next, "its memory", |page| page.levels.live_bytes == 100 * MIB);
        assert!(held(&page, 0) >= 100 * MIB, "{page:?}");
        if signal == libc::SIGSTOP {
            let mut high = high;
            high.signal(libc::SIGCONT);
            high.ask("check").parse::<u64>().unwrap();
            is_whole(high);
        }
        is_whole(low);
        is_whole(next);
    }
}

#[test]
fn one_that_is_stopped_or_forks_while_its_memory_settles_goes_on() {
    let machine = Machine::new("1x320MiB");
    let (mut low, mut high) = machine.settling();
    assert_eq!(low.ask("fork"), "child ended with 7");
    low.signal(libc::SIGSTOP);
    // Nobody waits for it, and nothing of what it gave is taken back.
    assert_eq!(high.ask("check"), "0");
    low.signal(libc::SIGCONT);
    goes_on(low);
    is_whole(high);
}

#[test]
fn one_that_ends_or_is_killed_or_becomes_another_program_while_its_memory_settles_does_so() {
    for way in ["exit", "drops all", "exec", "SIGKILL"] {
        let machine = Machine::new("1x320MiB");
        let (mut low, high) = machine.settling();
        let begun = Instant::now();
        match way {
            "SIGKILL" => low.signal(libc::SIGKILL),
            "drops all" => {}
            "exec" => assert_eq!(low.ask(way), "it goes"),
            _ => low.tell(way),
        }
        if way == "exec" {
            takes(&mut low, 20);
            is_whole(low);
        } else {
            let (status, _folder) = low.end();
            assert_eq!(status.success(), way != "SIGKILL", "{way}: {status}");
        }
        assert!(begun.elapsed() < SOON, "{way}: {:?}", begun.elapsed());
        is_whole(high);
        is_whole(machine.holder(machine.low(), 4));
        assert_eq!(machine.files(), Vec::<String>::new(), "{way}");
    }
}

#[test]
fn commands_that_come_while_memory_settles_are_answered_and_lose_nothing() {
    let machine = Machine::new("1x320MiB");
    let folder = tempfile::tempdir().unwrap();
    let (low, high) = machine.settling();
    let pid = low.pid();
    let begun = Instant::now();
    let suspend = format!("suspend --json --to {} {pid}", folder.path().display());
    for command in [suspend.as_str(), &format!("resume --json {pid}"), "undrain --json 0"] {
        let (told, _) = machine.told(command);
        assert!(begun.elapsed() < SOON, "{command}: {told}");
        assert!(waits(&machine.page(&low), 240), "{command}: {told}");
    }
    goes_on(low);
    is_whole(high);
}

#[test]
fn a_program_whose_memory_settles_is_suspended_and_drained_once_it_has() {
    let machine = Machine::new("1x320MiB");
    let folder = tempfile::tempdir().unwrap();
    let (mut low, high) = machine.settling();
    let pid = low.pid();
    refuses_memory(&mut low, false);
    let (told, all) = machine.told(&format!("suspend --json --to {} {pid}", folder.path().display()));
    assert!(all, "{told}");
    let (told, all) = machine.told(&format!("resume --json {pid}"));
    assert!(all, "{told}");
    assert_eq!(low.ask("check"), "0");
    machine.told("drain --json 0");
    machine.until(&low, "an empty GPU", |page| held(page, 0) == 0);
    machine.told("undrain --json 0");
    is_whole(high);
    is_whole(low);
}

/// Whoever drained a GPU and forgot it would find no program that says so.
#[test]
fn a_drained_gpu_is_told_though_no_program_runs() {
    let machine = Machine::new("3x320MiB");
    let said = |arguments: &str| String::from_utf8_lossy(&machine.gpupool(arguments).stdout).into_owned();
    assert!(!said("ps").contains("drained") && !said("doctor").contains("undrain"));
    machine.told("drain --json 2");
    let ps = said("ps");
    assert!(ps.contains("no process runs") && ps.contains(" is drained; gpupool undrain 2 ends that"), "{ps}");
    let doctor = said("doctor");
    assert!(doctor.contains("no program has memory there: 2") && doctor.contains("gpupool undrain 2"), "{doctor}");
    machine.told("undrain --json 2");
    assert!(!said("ps").contains("drained") && !said("doctor").contains("undrain"));
}

/// The threads of a program, and whether each of them waits for something.
fn threads(program: &Running) -> BTreeMap<String, bool> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", program.pid())).unwrap().flatten();
    let waits = |task: &std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
    };
    tasks.map(|task| (task.file_name().to_string_lossy().into_owned(), waits(&task))).collect()
}

#[test]
fn a_context_that_the_giver_ends_in_the_middle_ends_and_its_memory_is_free_for_who_asks() {
    let machine = Machine::new("1x480MiB");
    let low = machine.run().nvml().env("GPUPOOL_PRIORITY", "10").env("SIMCUDA_CONTEXT_MIB", "4");
    let mut low = machine.start(low);
    assert_eq!(low.ask("keep 300"), "kept");
    machine.until(&low, "a page", |page| held(page, 0) >= 300 * MIB);
    let mut high = machine.start(machine.neighbour(0, 90));
    assert_eq!(low.ask("hold cuMemcpyDtoHAsync_v2"), "it will");
    high.tell("take 320");
    eventually("a copy", || (low.ask("stands") == "yes").then_some(()));
    let before = threads(&low);
    assert_eq!(low.ask("destroy"), "asked");
    let ends = |(thread, waits): (&String, &bool)| *waits && !before.contains_key(thread);
    eventually("a call that waits for the copy", || threads(&low).iter().any(ends).then_some(()));
    assert_eq!(low.ask("destroyed"), "no");
    assert_eq!(low.ask("let"), "it does");
    high.ask("check").parse::<u64>().unwrap();
    eventually("its end", || (low.ask("destroyed") == "yes").then_some(()));
    let page = machine.until(&high, "its memory", |page| page.levels.live_bytes == 320 * MIB);
    assert!(held(&page, 0) >= 320 * MIB, "{page:?}");
    is_whole_later(high);
    ends_well(low);
}
