//! Children forked from a process that has initialised CUDA (GP006): told about only if they call CUDA.

use crate::case::Case;

#[test]
fn a_forked_child_that_calls_cuda_is_told_where_the_fork_was() {
    let told = Case::program("workers", "use").go();
    told.finds(&["GP006"]).reads("workers");
    assert_eq!(told.place(), "start_worker in workers");
    told.says("worker: cuMemAlloc_v2 answers 3");
}

#[test]
fn multiprocessing_by_fork_is_told_the_line_that_started_the_worker() {
    let told = Case::client("workers.py", "fork use").go();
    told.finds(&["GP006"]).says("worker: cuMemAlloc_v2 3");
    assert_eq!(told.place(), "workers.py:25 in main");
}

/// A pool of workers is one mistake, on stderr and for `--fail-on`.
#[test]
fn children_of_one_line_are_one_finding_with_their_number() {
    let told = Case::program("workers", "use 5").go();
    told.finds(&["GP006"]);
    told.warns("5 children forked by start_worker in ");
}

#[test]
fn a_child_without_cuda_is_no_finding() {
    Case::program("workers", "spare").go().finds_nothing();
    Case::client("workers.py", "fork spare").go().finds_nothing();
}

#[test]
fn a_new_process_is_no_fork() {
    Case::client("workers.py", "spawn spare").go().finds_nothing();
}
