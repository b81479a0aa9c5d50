//! Freed memory goes home by itself: what NVML says while the program makes no call, what stays for a program that comes back for
//! it, and what forks, captures and exits see of it.

use gpupool_events::{Event, Reader, Record};
use harness::{Run, Running};
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::time::{Duration, Instant};

/// A machine whose processes share two GPUs, with somebody beside the program who asks NVML and nothing else.
struct Machine {
    _folder: tempfile::TempDir,
    run: Run,
    watcher: Running,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("no temporary folder: {e}"));
        let run = Run::program("home").sim("2x2GiB").nvml().env("SIMCUDA_MACHINE", folder.path().join("machine"));
        let watcher = run.clone().start(None);
        Self { _folder: folder, run, watcher }
    }

    /// Another process of this machine, bare.
    fn bare(&self) -> Running {
        begun(self.run.clone())
    }

    /// A program under the shim, whose log is read at its end.
    fn program(&self, settings: &[(&str, &str)]) -> Running {
        let run = settings.iter().fold(self.run.clone(), |run, (name, value)| run.env(name, value));
        begun(run.env("GPUPOOL_HOST_LIMIT", "0").shim().log())
    }

    fn used(&mut self, gpu: u32) -> u64 {
        let said = self.watcher.ask(&format!("used {gpu}"));
        said.parse().unwrap_or_else(|_| panic!("NVML: {said}"))
    }

    /// Asks NVML until so much is used of the first GPU at most. The limit is for memory that never comes home.
    #[track_caller]
    fn until_used(&mut self, mib: u64) {
        let begun = Instant::now();
        loop {
            let used = self.used(0);
            if used <= mib {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{used} MiB are still used, and should be {mib}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn begun(run: Run) -> Running {
    let mut program = run.start(None);
    program.ask("init");
    program
}

fn records(folder: &Path) -> Vec<Record> {
    let log = File::open(folder.join("log.jsonl")).unwrap_or_else(|e| panic!("no log: {e}"));
    Reader::new(BufReader::new(log)).map(|line| line.unwrap_or_else(|e| panic!("the log is damaged: {e}"))).collect()
}

/// What was grown, and what went back and why, over the life of a program that is ended now.
fn told(program: Running) -> (usize, Vec<String>) {
    let (status, folder) = program.end();
    assert!(status.success(), "{status}");
    grown_and_why(&records(folder.path()))
}

fn grown_and_why(records: &[Record]) -> (usize, Vec<String>) {
    let grown = records.iter().filter(|record| matches!(record.event, Event::PoolGrow(_))).count();
    let trims = records.iter().filter_map(|record| match &record.event {
        Event::PoolTrim(trim) => Some(trim.why.clone()),
        _ => None,
    });
    (grown, trims.collect())
}

const SOON: (&str, &str) = ("GPUPOOL_IDLE", "300ms");

#[test]
fn what_nobody_uses_is_free_for_others_without_a_call_of_the_program() {
    for more in [("GPUPOOL_FREE", "strict"), ("GPUPOOL_FREE", "lazy"), ("GPUPOOL_METRICS", "off")] {
        let mut machine = Machine::new();
        let mut program = machine.program(&[SOON, more]);
        let before = machine.used(0);
        // Some blocks go by the pool's lock, and some past it.
        for size in [600, 300, 20, 20] {
            program.ask(&format!("allocate {size}"));
        }
        assert!(machine.used(0) >= before + 940);
        program.ask("free");
        program.ask("free");
        machine.until_used(before + 900);
        program.ask("clear");
        machine.until_used(before);
        // All is as it was for the next block.
        program.ask("allocate 1000");
        assert!(machine.used(0) >= before + 1000);
        let (_, why) = told(program);
        // A time as short as this one is also long enough to have held memory for long.
        assert!(!why.is_empty() && why.iter().all(|why| why == "idle" || why == "fell"), "{why:?}");
    }
}

#[test]
fn what_is_used_again_and_again_stays_and_what_lies_beside_it_goes() {
    let mut machine = Machine::new();
    let mut program = machine.program(&[("GPUPOOL_IDLE", "1500ms")]);
    let before = machine.used(0);
    // The large block's memory is one free run with what the loop uses, and goes although that is never unused.
    program.ask("allocate 200");
    program.ask("allocate 900");
    program.ask("clear");
    program.ask("turns 30 100 100");
    machine.until_used(before + 200 + 150);
    program.ask("clear");
    let (grown, why) = told(program);
    assert_eq!((grown, why.is_empty()), (2, false), "the loop pays for nothing: {why:?}");
}

#[test]
fn a_steady_loop_grows_once() {
    let machine = Machine::new();
    let mut program = machine.program(&[("GPUPOOL_IDLE", "5s")]);
    program.ask("turns 8 400 300");
    assert_eq!(told(program), (2, vec![]));
}

#[test]
fn off_keeps_what_was_freed_and_has_no_thread_for_it() {
    let mut machine = Machine::new();
    let mut keeps = machine.program(&[("GPUPOOL_IDLE", "off")]);
    let mut returns = machine.program(&[SOON]);
    let before = machine.used(0);
    for program in [&mut keeps, &mut returns] {
        program.ask("allocate 300");
        program.ask("clear");
    }
    machine.until_used(before + 300);
    assert_eq!(machine.used(0), before + 300, "one of the two keeps its memory");
    assert_eq!(told(keeps).1, Vec::<String>::new());
    assert_eq!(told(returns).1.len(), 1);
}

#[test]
fn what_was_held_for_long_and_is_freed_goes_before_its_time() {
    let mut machine = Machine::new();
    let mut program = machine.program(&[("GPUPOOL_IDLE", "4s")]);
    let before = machine.used(0);
    for _ in 0..12 {
        program.ask("allocate 100");
    }
    // Held for longer than unused memory stays; how much longer does not matter.
    std::thread::sleep(Duration::from_secs(5));
    program.ask("clear");
    machine.until_used(before);
    assert_eq!(told(program), (12, vec!["fell".to_owned()]));
}

/// How soon what was freed last goes by the agent's own clock, in milliseconds: what it says of its looks from the last one before that free
/// to the one that returned the memory. So it is not the machine's load that is measured.
fn planned(records: &[Record]) -> u64 {
    let is_trim = |record: &Record| matches!(record.event, Event::PoolTrim(_));
    let trim = records.iter().position(is_trim).unwrap_or_else(|| panic!("nothing went: {records:?}"));
    let is_free = |record: &Record| matches!(record.event, Event::BlockFree(_));
    let free = records[..trim].iter().rposition(is_free).unwrap_or_else(|| panic!("nothing was freed: {records:?}"));
    let said = |records: &[Record]| -> Vec<String> {
        let is_look = |text: &str| text.starts_with("looked at what is free");
        records.iter().map(|record| record.message.clone()).filter(|text| is_look(text)).collect()
    };
    let wait = |look: &String| match look.rsplit_once("again in ") {
        Some((_, wait)) => wait.trim_end_matches(" ms").parse().unwrap_or_else(|_| panic!("{look}")),
        // Nobody but the bell would tell of a change.
        None => {
            assert!(look.contains("the bell listens"), "{look}");
            0
        }
    };
    let before = said(&records[..free]).last().map_or(0, wait);
    before + said(&records[free..trim]).iter().map(wait).sum::<u64>()
}

#[test]
fn what_is_freed_by_who_then_rests_goes_within_a_second_however_short_it_was_held() {
    let mut machine = Machine::new();
    for held_until_looked_at in [false, true] {
        let mut program = machine.program(&[("GPUPOOL_IDLE", "1h"), ("GPUPOOL_LOG", "info,gpupool::memory=trace")]);
        let before = machine.used(0);
        program.ask("allocate 100");
        program.ask("allocate 500");
        let log = program.log();
        let has_looked = || std::fs::read_to_string(&log).is_ok_and(|log| log.contains("looked at what is free: 6"));
        while held_until_looked_at && !has_looked() {
            std::thread::sleep(Duration::from_millis(5));
        }
        program.ask("clear");
        machine.until_used(before);
        program.ask("allocate 600");
        let (status, folder) = program.end();
        assert!(status.success(), "{status}");
        let records = records(folder.path());
        assert!(planned(&records) <= 1000, "{} ms: {records:?}", planned(&records));
        assert_eq!(grown_and_why(&records), (3, vec!["fell".to_owned()]));
    }
}

#[test]
fn a_gpu_that_others_fill_gets_what_is_free_there_at_once() {
    let mut machine = Machine::new();
    let mut program = machine.program(&[("GPUPOOL_IDLE", "1h")]);
    // Most of it stays in use.
    program.ask("allocate 400");
    program.ask("allocate 300");
    program.ask("free");
    let mut other = machine.bare();
    let before = machine.used(0);
    // Of 2048 MiB, less than a sixteenth is left, and what is free may have gone before the other's call is back.
    other.ask("allocate 1220");
    machine.until_used(before + 1220 - 300);
    drop(other);
    assert_eq!(told(program).1, ["others"]);
}

#[test]
fn others_get_what_is_free_also_from_a_program_that_took_back_what_had_gone_before_its_time() {
    let mut machine = Machine::new();
    let mut program = machine.program(&[("GPUPOOL_IDLE", "2s")]);
    let before = machine.used(0);
    program.ask("allocate 700");
    // Held for longer than unused memory stays; how much longer does not matter.
    std::thread::sleep(Duration::from_millis(2500));
    program.ask("clear");
    machine.until_used(before);
    program.ask("allocate 400");
    program.ask("allocate 300");
    let mut other = machine.bare();
    other.ask("allocate 1220");
    let full = machine.used(0);
    // Most of it stays in use, so that there is one sign alone.
    program.ask("free");
    machine.until_used(full - 300);
    drop(other);
    assert_eq!(told(program).1, ["fell", "others"]);
}

#[test]
fn nothing_goes_while_a_stream_is_captured() {
    let mut machine = Machine::new();
    let mut captures = machine.program(&[SOON]);
    let mut beside = machine.program(&[SOON]);
    let before = machine.used(0);
    captures.ask("allocate 300");
    captures.ask("capture");
    captures.ask("clear");
    // What another process has freed later is gone first.
    beside.ask("allocate 300");
    beside.ask("clear");
    machine.until_used(before + 300);
    assert_eq!(machine.used(0), before + 300);
    captures.ask("finish");
    machine.until_used(before);
    told(captures);
}

#[test]
fn what_the_driver_does_not_take_back_is_tried_again_and_else_stays_until_somebody_asks() {
    // How often it fails in a row, and MiB that stay then at most.
    for (call, faults, left) in [("cuMemUnmap", 1, 0), ("cuMemRelease", 1, 0), ("cuMemRelease", 6, 600)] {
        let mut machine = Machine::new();
        let fault: Vec<String> = (1..=faults).map(|nth| format!("{call}:{nth}=999")).collect();
        let mut program = machine.program(&[SOON, ("SIMCUDA_FAULT", &fault.join(","))]);
        let before = machine.used(0);
        program.ask("allocate 600");
        program.ask("allocate 300");
        program.ask("clear");
        machine.until_used(before + left);
        if left > 0 {
            assert!(machine.used(0) > before, "{fault:?}");
            program.ask("trim");
            machine.until_used(before);
        }
        program.ask("allocate 1000");
        assert!(machine.used(0) >= before + 1000, "{fault:?}");
        let (_, why) = told(program);
        assert!(why.iter().any(|why| why == "idle" || why == "fell"), "{fault:?}: {why:?}");
    }
}

#[test]
fn a_fault_at_any_call_of_going_home_is_made_good() {
    for code in [999, 2, 600] {
        let mut machine = Machine::new();
        let mut program = machine.program(&[SOON, ("SIMCUDA_STRICT", "on")]);
        let before = machine.used(0);
        let mut calls = 0;
        loop {
            program.ask("allocate 600");
            program.ask("allocate 300");
            assert!(machine.used(0) >= before + 900, "{code} at call {calls}");
            program.ask("clear");
            program.ask(&format!("arm {} {code}", calls + 1));
            machine.until_used(before);
            if program.ask("faults") != "0" {
                break;
            }
            calls += 1;
        }
        assert!(calls >= 6, "memory of two blocks went home with {calls} driver calls");
        assert_eq!(program.ask("violations"), "0");
        told(program);
    }
}

#[test]
fn forks_and_the_end_come_at_any_moment() {
    let machine = Machine::new();
    for _ in 0..4 {
        let mut program = machine.program(&[("GPUPOOL_IDLE", "0")]);
        for _ in 0..20 {
            program.ask("allocate 40");
        }
        program.ask("clear");
        assert_eq!(program.ask("forks 40"), "40 of 40 not initialised");
        for _ in 0..10 {
            program.ask("allocate 70");
        }
        program.ask("clear");
        // Ends while its memory is on its way, or just before or behind that.
        told(program);
    }
}
