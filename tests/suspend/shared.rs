//! Memory that stays since somebody else knows it, while its program is suspended; and the other program.

use super::{MIB, at, ends_well, page, suspended, told};
use harness::{Running, at_work, eventually, goes_on};
use serde_json::Value;

/// What is kept, or what was opened, is as it was.
#[track_caller]
fn is_right(program: &mut Running, order: &str) {
    assert_eq!(program.ask(order), "asked");
    eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
}

/// Causes and texts of GP022 in its log.
pub(super) fn findings(program: &Running) -> Vec<(String, String)> {
    let log = std::fs::read_to_string(program.log()).unwrap();
    let events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let found = events.filter(|event| event["code"] == "GP022");
    found.map(|event| (text(&event["facts"]["cause"]), text(&event["what"]))).collect()
}

#[test]
fn a_block_that_another_process_has_open_stays_and_the_other_one_goes_on_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let start = || suspended("1x1GiB").log().start(None);
    let (mut exporter, mut importer) = (start(), start());
    exporter.ask("keep 64");
    let handle = exporter.ask("give");
    assert_eq!(importer.ask(&format!("open {handle}")), "opened");
    at_work(&mut exporter, 1);
    importer.ask("keep 24");
    for to in ["host", "any", folder.path().to_str().unwrap()] {
        // What another process reads stays where it reads it; the rest leaves.
        let left = told(&exporter, &format!("suspend --to {to}"));
        assert_eq!(left["stayed_bytes"], 64 * MIB, "{to}: {left}");
        assert!(left["bytes"].as_u64() >= Some(20 * MIB), "{to}: {left}");
        is_right(&mut importer, "look");
        let back = told(&exporter, "resume");
        assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&left["bytes"], &0.into()), "{to}");
        goes_on(&mut exporter);
        is_right(&mut exporter, "check");

        // What is another process's is none of what leaves, nor of what stays.
        let left = told(&importer, &format!("suspend --to {to}"));
        assert_eq!((left["bytes"].as_u64(), &left["stayed_bytes"]), (Some(24 * MIB), &0.into()), "{to}: {left}");
        eventually("an empty GPU", || page(&importer).filter(|page| at(page, false) == 0));
        goes_on(&mut exporter);
        is_right(&mut exporter, "check");
        // It waits, as all of it does.
        assert_eq!(importer.ask("look"), "asked");
        assert_eq!(importer.ask("checked"), "-1");
        told(&importer, "resume");
        eventually("a look at it", || (importer.ask("checked") == "0").then_some(()));
        is_right(&mut importer, "check");
    }
    let found = findings(&exporter);
    assert_eq!(found.len(), 1, "once, however often: {found:?}");
    let (cause, what) = &found[0];
    assert_eq!(cause, "pages");
    assert!(what.contains("64.0 MiB stayed on its GPU") && what.contains("another process has it open"), "{what}");
    assert_eq!(findings(&importer), []);
    ends_well(importer);
    ends_well(exporter);
}

/// Of two GPUs that it works on one reaches a third GPU and the other reaches none.
#[test]
fn what_no_gpu_in_reach_takes_stays_where_all_is_to_go_to_others() {
    let folder = tempfile::tempdir().unwrap();
    let matrix = folder.path().join("links");
    std::fs::write(&matrix, "GPU0 GPU1 GPU2\nGPU0 X SYS NV18\nGPU1 SYS X SYS\nGPU2 NV18 SYS X\n").unwrap();
    let run = suspended("3x1GiB").env("SIMCUDA_LINK", format!("matrix:{}", matrix.display()));
    let mut program = run.log().start(None);
    at_work(&mut program, 2);
    let left = told(&program, "suspend --to peers");
    // Where some GPUs have no link the driver serves all but what the program makes itself (mode spill).
    assert_eq!((&left["bytes"], &left["stayed_bytes"]), (&(8 * MIB).into(), &(8 * MIB).into()), "{left}");
    let found = findings(&program);
    assert_eq!(found.iter().map(|(cause, _)| cause.as_str()).collect::<Vec<_>>(), ["no_peer"], "{found:?}");
    let why = "no other GPU can take it: those that the program does not work on do not lend to it or are out of its GPUs' reach; --to host has the host take it";
    assert!(found[0].1.contains(why), "{}", found[0].1);
    told(&program, "resume");
    goes_on(&mut program);
    ends_well(program);
}

/// What the program made itself goes a handle at a time, as far as the host may have it.
#[test]
fn what_the_program_made_itself_stays_where_the_host_may_have_no_more_of_it() {
    let run = suspended("1x1GiB").env("GPUPOOL_HOST_LIMIT", "20MiB");
    let mut program = run.log().start(None);
    assert_eq!(program.ask("make 64"), "made");
    let left = told(&program, "suspend --to host");
    let [bytes, stayed] = ["bytes", "stayed_bytes"].map(|key| left[key].as_u64().unwrap_or(0));
    assert!(bytes > 0 && stayed > 0 && bytes + stayed == 64 * MIB, "{left}");
    let found = findings(&program);
    assert_eq!(found.iter().map(|(cause, _)| cause.as_str()).collect::<Vec<_>>(), ["host_limit"], "{found:?}");
    told(&program, "resume");
    is_right(&mut program, "check");
    program.ask("drop");
    ends_well(program);
}
