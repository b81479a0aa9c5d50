//! Borrowed memory that could not be given back when somebody came to work on its GPU (GP023), and a program all of whose memory leaves.

use crate::case::{Case, Told, compare, report};
use crate::normal::normal;

fn visited(host_limit: &str) -> Told {
    let case = Case::program("visited", "").nvml().env("GPUPOOL_HOST_LIMIT", host_limit);
    let case = case.env("GPUPOOL_LIMIT", "0:16MiB").env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_RECALL_WAIT", "2s");
    case.env("LOCAL_RANK", "0").env("LOCAL_WORLD_SIZE", "1").go()
}

#[test]
fn borrowed_memory_that_no_place_has_room_for_is_found_when_somebody_comes_to_work_on_its_gpu() {
    let told = visited("0");
    told.finds(&["GP023"]);
    assert_eq!(told.findings()[0].device, Some(1));
    let text = normal(&report(&[&told]), &[&told]);
    let lines = text.lines().skip_while(|line| !line.starts_with("  GP023 "));
    let lines: Vec<&str> = lines.take_while(|line| !line.starts_with("    more ")).collect();
    compare("stayed_lent", &format!("{}\n", lines.join("\n")));
}

/// Each place that it was tried at is named, and no line of the program, since none of them brought it about.
#[test]
fn every_place_that_lacks_room_for_borrowed_memory_is_named() {
    let told = visited("1MiB");
    told.finds(&["GP023"]);
    let what = &told.findings()[0].what;
    assert!(what.contains("gpu0 lacks ") && what.contains(", and host0 lacks "), "{what}");
    assert!(told.findings()[0].site.is_none());
}

#[test]
fn a_program_all_of_whose_borrowed_memory_leaves_is_no_finding() {
    visited("1GiB").finds(&[]);
}
