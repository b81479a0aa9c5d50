//! GPUs with errors that NVML tells of: which are left, and which are left alone.

use super::loans::log_of;
use super::setup::{gave, held, is_whole, takes};
use super::{MIB, Machine, at};
use gpupool_metrics::Snapshot;
use harness::{Running, eventually, page_of};
use std::time::Duration;

/// Something happens to a GPU, as NVML tells it, again and again until the program knows: it hears of what comes after its first look.
#[track_caller]
fn happens(machine: &Machine, events: &std::path::Path, line: &str, program: &Running) -> Snapshot {
    use std::io::Write;
    eventually("a closed GPU", || {
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(events).unwrap();
        file.write_all(format!("{line}\n").as_bytes()).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        page_of(machine.folder.path(), program.pid())
            .filter(|page| !page.levels.places.rows.is_empty() && at(page, 1).drained)
    })
}

/// Each kind of such an error, and not for who works there either. Of a row that is to be replaced (63) nobody says that what is in it can be read.
#[test]
fn nothing_is_copied_from_a_gpu_after_a_grave_error_that_nobody_asks_for() {
    let machine = Machine::new("2x512MiB");
    let grave = [48, 63, 64, 74, 79, 94, 95];
    let debtor = |xid: u32| {
        let events = machine.folder.path().join(format!("events-{xid}"));
        std::fs::write(&events, "").unwrap();
        let run = machine.neighbour(0, 50).env("SIMCUDA_EVENTS", &events).env("GPUPOOL_DEVICES", "0,1");
        let program = machine.holder(run.env("GPUPOOL_LIMIT", "0:2MiB"), 20);
        machine.until(&program, "a loan", |page| held(page, 1) >= 18 * MIB);
        (program, events)
    };
    let programs: Vec<_> = grave.into_iter().map(|xid| (xid, debtor(xid))).collect();
    std::thread::scope(|scope| {
        for (xid, (program, events)) in &programs {
            let machine = &machine;
            scope.spawn(move || happens(machine, events, &format!("1 xid {xid}"), program));
        }
    });
    // One that works there and lacks memory.
    let mut owner = machine.start(machine.neighbour(1, 90));
    takes(&mut owner, 440);
    machine.until(&owner, "memory elsewhere", |page| page.levels.live_bytes == 440 * MIB && held(page, 1) < 440 * MIB);
    for (xid, (program, _)) in programs {
        let page = machine.page(&program);
        assert!(held(&page, 1) >= 18 * MIB && at(&page, 1).drained, "{xid}: {page:?}");
        assert_eq!(gave(&is_whole(program)), 0, "{xid}");
    }
    is_whole(owner);
}

#[test]
fn a_gpu_with_rows_to_be_replaced_is_left_and_one_with_a_grave_error_is_left_alone() {
    let machine = Machine::new("2x320MiB");
    let events = machine.folder.path().join("events");
    std::fs::write(&events, "").unwrap();
    let debtor = || {
        let run = machine.neighbour(0, 50).env("SIMCUDA_EVENTS", &events).env("GPUPOOL_DEVICES", "0,1");
        let program = machine.holder(run.env("GPUPOOL_LIMIT", "0:2MiB"), 40);
        machine.until(&program, "a loan", |page| held(page, 1) >= 36 * MIB);
        program
    };
    let mut program = debtor();
    happens(&machine, &events, "1 xid 79", &program);
    takes(&mut program, 40);
    let page = machine.until(&program, "memory elsewhere", |page| page.levels.residence.on_host >= 36 * MIB);
    assert!((36 * MIB..=42 * MIB).contains(&held(&page, 1)), "nothing left it, and nothing went there: {page:?}");
    // Somebody asks for it.
    assert!(machine.told("drain --json 1").1);
    machine.until(&program, "an empty GPU 1", |page| held(page, 1) == 0);
    drop(is_whole(program));
    machine.told("undrain --json 1");

    let program = debtor();
    happens(&machine, &events, "1 remap corrected pending", &program);
    let page = machine.until(&program, "an empty GPU 1", |page| held(page, 1) == 0);
    assert!(at(&page, 1).drained && page.levels.residence.on_host >= 36 * MIB, "{page:?}");
    is_whole(program);
}

/// Rows that are to be replaced come with an Xid as well. Where the errors in them were corrected, all of it can be read.
#[test]
fn a_gpu_is_left_for_rows_that_can_be_read_and_left_alone_for_one_that_cannot() {
    let machine = Machine::new("2x320MiB");
    let recorded = |kind: &str| {
        let events = machine.folder.path().join(format!("events-{kind}"));
        // Such a row was there before: what was in it was lost then.
        std::fs::write(&events, "1 remap uncorrected\n").unwrap();
        let run = machine.neighbour(0, 50).env("SIMCUDA_EVENTS", &events).env("GPUPOOL_DEVICES", "0,1");
        let run = run.env("GPUPOOL_LOG", "gpupool::memory=debug");
        let program = machine.holder(run.env("GPUPOOL_LIMIT", "0:2MiB"), 40);
        machine.until(&program, "a loan", |page| held(page, 1) >= 36 * MIB);
        // What it finds at its first look was there before.
        eventually("a first look", || log_of(&program).contains("errors of GPUs are heard of").then_some(()));
        happens(&machine, &events, &format!("1 xid 63\n1 remap {kind} pending"), &program);
        program
    };
    let program = recorded("corrected");
    machine.until(&program, "an empty GPU 1", |page| held(page, 1) == 0 && page.levels.residence.on_host >= 36 * MIB);
    is_whole(program);
    let mut program = recorded("uncorrected");
    takes(&mut program, 40);
    let page = machine.until(&program, "memory elsewhere", |page| page.levels.residence.on_host >= 36 * MIB);
    assert!((36 * MIB..=42 * MIB).contains(&held(&page, 1)), "nothing left it, and nothing went there: {page:?}");
    is_whole(program);
}
