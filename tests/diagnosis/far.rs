//! Far memory that is read again and again (GP019), moves that did not pay (GP020) and GPUs that never rest (GP021), each beside a
//! program that nearly does it.

use crate::case::{Case, Told, compare, report};
use crate::normal::normal;

/// Room on the program's GPU for 32 MiB: the array that the kernel reads lies on the next one. Of the arrays that are read in turn, two do
/// where there is room for 28.
fn far(how: &str, times: u32, launches: u32) -> Case {
    let case = Case::program("far", &format!("{how} {times} {launches}"));
    case.env("GPUPOOL_LIMIT", if how == "turns" { "0:28MiB" } else { "0:32MiB" })
        .env("SIMCUDA_CONTEXT_MIB", "0")
        .env("GPUPOOL_RESERVE", "16MiB")
        .env("LOCAL_RANK", "0")
        .env("LOCAL_WORLD_SIZE", "1")
}

#[track_caller]
fn cause(told: &Told) -> String {
    let [made] = told.findings()[..] else { told.fail("expected one finding") };
    made.facts.get("cause").cloned().unwrap_or_default()
}

/// What the report says of a finding, without its figures, which depend on the machine.
fn advice(told: &Told, code: &str) -> String {
    let text = normal(&report(&[told]), &[told]);
    let mut lines = text.lines().skip_while(|line| !line.starts_with(&format!("  {code} ")));
    let title = lines.next().unwrap_or_default();
    let rest = lines.skip_while(|line| !line.starts_with("    where "));
    let rest: Vec<&str> = rest.take_while(|line| !line.starts_with("    more ")).collect();
    format!("{title}\n{}\n", rest.join("\n"))
}

#[test]
fn a_function_that_reads_far_memory_again_and_again_is_named_though_nothing_may_move() {
    let told = far("plain", 3000, 40).go();
    told.finds(&["GP019"]).reads("far");
    assert_eq!((told.place().as_str(), cause(&told).as_str()), ("read_again in far", "off"));
    assert_eq!(told.findings()[0].facts["function"], "sum_again_u32");
}

#[test]
fn far_memory_that_costs_little_is_no_finding() {
    far("plain", 1, 40).go().finds(&[]);
}

#[test]
fn few_launches_are_no_finding() {
    far("plain", 5000, 4).go().finds(&[]);
}

#[test]
fn near_memory_is_no_finding() {
    Case::program("far", "plain 3000 40").go().finds_nothing();
}

#[test]
fn it_is_said_why_it_stayed_although_memory_may_move() {
    let told = far("anchored", 3000, 40).env("GPUPOOL_MOVE", "auto").go();
    told.finds(&["GP019"]);
    assert_eq!(cause(&told), "anchored", "{}", told.stderr);
}

#[test]
fn memory_that_came_near_is_no_finding() {
    let told = far("plain", 3000, 80).env("GPUPOOL_MOVE", "auto").go();
    // On a busy machine rounds may take longer afterwards, which is another finding.
    assert!(!told.findings().iter().any(|made| made.code == "GP019"), "{}", told.stderr);
}

#[test]
fn a_kernel_that_never_ends_is_what_kept_memory_far() {
    let told = far("busy", 3000, 40).env("GPUPOOL_MOVE", "auto").go();
    let codes: Vec<&str> = told.findings().iter().map(|made| made.code.as_str()).collect();
    assert_eq!(codes, ["GP021", "GP019"], "{}", told.stderr);
    let facts = |index: usize| told.findings()[index].facts["cause"].clone();
    assert_eq!((facts(0).as_str(), facts(1).as_str()), ("working", "quiet"));
    let said = "GP021: memory would have come near to GPU 0 and could not, and ";
    // Which of the two depends on how long the kernels took that were seen to end: for so long a launch waits for the next.
    let why = ["work was running on GPU 0, in context 1", "no work was seen to end for "];
    assert!(told.stderr.contains(said) && why.iter().any(|why| told.stderr.contains(why)), "{}", told.stderr);
    compare("never_quiet", &advice(&told, "GP021"));
}

#[test]
fn work_that_may_pass_unseen_is_found_once_and_named_as_the_reason() {
    let told = far("table", 3000, 40).env("GPUPOOL_MOVE", "auto").go();
    let found: Vec<_> = told.findings().iter().map(|made| (made.code.as_str(), made.facts["cause"].as_str())).collect();
    assert_eq!(found, [("GP021", "past"), ("GP019", "process")], "{}", told.stderr);
    let said = told.stderr.matches("memory stays where it is in this process").count();
    assert_eq!(said, 1, "{}", told.stderr);
}

/// A round gains half a millisecond for each array that comes near, and to copy one takes this machine longer.
#[test]
fn moves_that_cost_more_than_they_bring_are_stopped_and_told() {
    let told = far("turns", 20, 60).env("GPUPOOL_MOVE", "auto").go();
    let found: Vec<_> = told.findings().iter().map(|made| (made.code.as_str(), made.facts["cause"].as_str())).collect();
    // Which of the two is seen first depends on the machine.
    let causes: Vec<&str> = found.iter().filter(|found| found.0 == "GP020").map(|found| found.1).collect();
    assert!(
        matches!(causes[..], ["unpaid"] | ["slower"] | ["unpaid", "slower"] | ["slower", "unpaid"]),
        "{}",
        told.stderr
    );
    assert!(
        told.stderr.contains("GP020: moving memory for GPU 0 did not pay and was stopped for now: "),
        "{}",
        told.stderr
    );
    compare("unpaid", &advice(&told, "GP020"));
}
