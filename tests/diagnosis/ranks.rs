//! Jobs of several ranks (GP002): each writes its own log, and the report puts them together.

use crate::case::{Case, Told, compare, report};
use crate::normal::normal;

#[track_caller]
fn rank(rank: u32, case: &str) -> Told {
    let run = Case::program("contexts", case).env("LOCAL_RANK", &rank.to_string());
    run.env("LOCAL_WORLD_SIZE", "2").go()
}

#[test]
fn two_ranks_that_work_on_gpu_0_are_one_finding() {
    let (first, second) = (rank(0, "first"), rank(1, "first"));
    first.finds_nothing();
    second.finds(&["GP002"]);
    assert_eq!(second.place(), "compute_on in contexts");
    let merged = report(&[&first, &second]);
    assert_eq!(merged.matches("GP002  ").count(), 1, "{merged}");
    compare("ranks", &normal(&merged, &[&first, &second]));
}

#[test]
fn a_rank_that_only_touches_gpu_0_is_found_in_the_merged_logs() {
    let (first, second) = (rank(0, "first"), rank(1, "stray"));
    second.finds(&["GP001"]);
    let merged = report(&[&first, &second]);
    assert!(merged.contains("GP001  ") && merged.contains("GP002  "), "{merged}");
}

#[test]
fn a_gpu_for_each_rank_is_no_finding() {
    let (first, second) = (rank(0, "first"), rank(1, "one"));
    first.finds_nothing();
    second.finds_nothing();
    let merged = report(&[&first, &second]);
    assert!(merged.contains("\nFindings\n  none\n"), "{merged}");
    // One visible GPU a rank: both are GPU 0 to their programs, and none of ours to blame.
    let own = |rank: &str| {
        let case = Case::program("contexts", "first").env("LOCAL_RANK", rank).env("LOCAL_WORLD_SIZE", "2");
        case.env("CUDA_VISIBLE_DEVICES", rank).go()
    };
    let (first, second) = (own("0"), own("1"));
    first.finds_nothing();
    second.finds_nothing();
    let merged = report(&[&first, &second]);
    assert!(merged.contains("\nFindings\n  none\n"), "{merged}");
}
