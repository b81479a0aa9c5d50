//! Memory that did not leave with a suspended program (GP022), and a program all of whose memory does.

use crate::case::{Case, Told, compare, report};
use crate::normal::normal;
use harness::library;

fn suspends(host_limit: &str) -> Told {
    let command = library("gpupool").display().to_string();
    let case = Case::program("suspends", "").env("COMMAND", &command).env("GPUPOOL_HOST_LIMIT", host_limit);
    case.env("LOCAL_RANK", "0").env("LOCAL_WORLD_SIZE", "1").go()
}

#[test]
fn memory_that_no_place_has_room_for_is_found_where_a_program_is_suspended() {
    let told = suspends("16MiB");
    told.finds(&["GP022"]);
    assert_eq!(told.findings()[0].facts["cause"], "host_limit");
    let text = normal(&report(&[&told]), &[&told]);
    let lines = text.lines().skip_while(|line| !line.starts_with("  GP022 "));
    let lines: Vec<&str> = lines.take_while(|line| !line.starts_with("    more ")).collect();
    compare("stayed_suspended", &format!("{}\n", lines.join("\n")));
}

#[test]
fn a_program_all_of_whose_memory_leaves_is_no_finding() {
    suspends("1GiB").finds(&[]);
}
