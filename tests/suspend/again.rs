//! The plain memory of a suspension is there for the next one, for a while, and as far as nobody lacks it.

use super::{MIB, at, at_work, ends_well, goes_on, page, suspended, told};
use harness::{Running, eventually};
use std::collections::BTreeSet;

/// Where its plain memory of suspensions begins that is so large at least: memory that neither a child nor a core dump has.
fn plain(program: &Running, least: u64) -> BTreeSet<String> {
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", program.pid())).unwrap_or_default();
    let (mut found, mut address, mut bytes) = (BTreeSet::new(), String::new(), 0);
    for line in maps.lines() {
        match line.split_once(' ') {
            Some(("VmFlags:", flags)) if flags.contains("dc") && flags.contains("dd") && bytes >= least => {
                found.insert(address.clone());
            }
            Some(("Rss:", kib)) => bytes = kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) << 10,
            Some((range, _)) if range.contains('-') => {
                range.split('-').next().unwrap_or_default().clone_into(&mut address)
            }
            _ => {}
        }
    }
    found
}

/// Everything leaves, comes back and is as it was.
#[track_caller]
fn there_and_back(program: &mut Running) {
    let left = told(program, "suspend --to host --wait 60s");
    assert!(left["error"].is_null() && left["stayed_bytes"] == 0, "{left}");
    let back = told(program, "resume");
    assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&left["bytes"], &0.into()));
    is_right(program);
}

#[track_caller]
fn is_right(program: &mut Running) {
    program.ask("check");
    eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
}

#[test]
fn the_memory_that_a_program_was_in_is_where_it_goes_the_next_time() {
    let mut program = suspended("1x1GiB").env("GPUPOOL_IDLE", "1h").start(None);
    program.ask("keep 256");
    there_and_back(&mut program);
    let first = plain(&program, 256 * MIB);
    assert_eq!(first.len(), 1, "{first:?}");
    // It is counted, as memory of the host that nobody uses.
    let counted = eventually("a page that says so", || page(&program).filter(|page| at(page, true) >= 256 * MIB));
    assert_eq!(counted.levels.places.rows.iter().filter(|place| place.on_host).map(|place| place.used).sum::<u64>(), 0);
    // More than there is: the rest is new.
    program.ask("drop");
    program.ask("keep 400");
    there_and_back(&mut program);
    let second = plain(&program, 64 * MIB);
    assert!(second.len() == 2 && second.is_superset(&first), "{second:?}, {first:?}");
    // Less, and zero, which is not what lay there before.
    program.ask("drop");
    program.ask("clear 128");
    there_and_back(&mut program);
    let third = plain(&program, 64 * MIB);
    assert!(third.len() == 1 && third.is_subset(&second), "{third:?}, {second:?}");
    // What is counted is what it was in the last time, and not what there ever was.
    program.ask("drop");
    program.ask("clear 8");
    there_and_back(&mut program);
    eventually("a page that says so", || page(&program).filter(|page| at(page, true) < 64 * MIB));
    assert_eq!(program.ask("fork"), "child ended with 7");
    // A program that goes elsewhere has none of it on the host.
    let folder = tempfile::tempdir().unwrap();
    told(&program, &format!("suspend --to {}", folder.path().display()));
    assert_eq!(plain(&program, 64 * MIB), BTreeSet::new());
    told(&program, "resume");
    is_right(&mut program);
    ends_well(program);
}

#[test]
fn the_memory_that_a_program_was_in_goes_as_other_freed_memory_does() {
    let mut program = suspended("1x1GiB").env("GPUPOOL_IDLE", "300ms").log().start(None);
    program.ask("keep 200");
    there_and_back(&mut program);
    eventually("none of it", || plain(&program, 64 * MIB).is_empty().then_some(()));
    eventually("a page that says so", || page(&program).filter(|page| at(page, true) == 0));
    ends_well(program);
    // Nothing stays where freed memory never goes by itself.
    let mut program = suspended("1x1GiB").env("GPUPOOL_IDLE", "off").start(None);
    program.ask("keep 200");
    there_and_back(&mut program);
    assert_eq!(plain(&program, 64 * MIB), BTreeSet::new());
    ends_well(program);
}

#[test]
fn the_memory_that_a_program_was_in_makes_room_for_what_it_has_on_the_host() {
    let mut program = suspended("1x512MiB").env("GPUPOOL_HOST_LIMIT", "300MiB").env("GPUPOOL_IDLE", "1h").start(None);
    at_work(&mut program, 1);
    program.ask("keep 200");
    there_and_back(&mut program);
    assert_eq!(plain(&program, 128 * MIB).len(), 1);
    program.ask("allocate 350");
    eventually("the allocation", || (program.ask("allocated") == "yes").then_some(()));
    assert_eq!(plain(&program, 64 * MIB), BTreeSet::new());
    let page = eventually("it on the host", || page(&program).filter(|page| at(page, true) >= 32 * MIB));
    assert!(at(&page, true) <= 300 * MIB, "{page:?}");
    goes_on(&mut program);
    ends_well(program);
}
