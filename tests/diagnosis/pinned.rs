//! Pinned memory: rounded up (GP012), growing (GP013), staged twice (GP014), slow (GP015), registered twice (GP016), leaked
//! (GP017) and over the limit (GP018), each beside a program that nearly does it.

use crate::case::{Case, Told, compare, report};
use crate::normal::normal;

fn habit(case: &str) -> Case {
    Case::program("pinned_habits", case)
}

#[track_caller]
fn staging(case: &str) -> Told {
    Case::program("staging", case).go()
}

#[test]
fn data_that_is_pinned_and_staged_again_is_found_in_c() {
    let told = staging("twice");
    told.finds(&["GP014"]).reads("staged");
    assert_eq!(told.place(), "copy_staged in staging");
    staging("registered").finds(&["GP014"]);
}

#[test]
fn copies_that_need_their_buffer_are_no_staging() {
    for case in ["straight", "pageable", "zeros", "used_twice", "back", "seldom"] {
        staging(case).finds_nothing();
    }
}

/// The pattern is computed anew each time, and pinned memory holds it because that was filled with it before.
#[test]
fn a_benchmark_that_sends_the_same_pattern_again_and_again_is_not_blamed() {
    staging("pattern").finds_nothing();
}

/// Two buffers are filled before either is copied; the one whose copy comes later is no source of the other.
#[test]
fn data_that_is_sent_from_both_buffers_is_no_staging() {
    staging("twins").finds_nothing();
}

/// The other memory got its data from the GPU, not from whoever filled the buffer.
#[test]
fn data_that_came_back_from_the_gpu_is_no_source() {
    staging("fetched").finds_nothing();
}

#[test]
fn data_that_was_staged_and_freed_is_found_too() {
    staging("freed").finds(&["GP014"]);
}

#[test]
fn a_benchmark_of_both_ways_to_copy_is_not_blamed() {
    staging("both_ways").finds_nothing();
}

#[test]
fn memory_that_is_also_read_by_rows_or_by_a_kernel_was_not_pinned_for_a_second_buffer_alone() {
    staging("rows").finds_nothing();
    staging("mapped").finds_nothing();
}

#[test]
fn cupy_before_13_is_found_with_its_version_and_the_line() {
    let told = Case::client("staging.py", "").cupy("12.3.0").go();
    told.finds(&["GP014"]).reads("staged_cupy").warns("CuPy 12.3.0").warns("CuPy before 13");
    assert_eq!(told.place(), "staging.py:22 in main");
}

#[test]
fn cupy_13_copies_straight() {
    Case::client("staging.py", "").cupy("13.4.1").go().finds_nothing();
}

#[test]
fn a_loop_that_keeps_every_batch_is_found_while_it_runs() {
    let told = habit("growing").go();
    told.finds(&["GP013"]).reads("growing");
    assert_eq!(told.place(), "keep_every_batch in pinned_habits");
}

#[test]
fn growth_that_ends_or_makes_room_is_none() {
    for case in ["early", "at_once", "replaced"] {
        habit(case).go().finds_nothing();
    }
}

#[test]
fn batches_that_were_never_freed_are_counted_at_the_end() {
    let told = habit("leaked").go();
    told.finds(&["GP017"]).reads("leaked");
    assert_eq!(told.place(), "keep_every_batch in pinned_habits");
}

#[test]
fn what_is_freed_or_little_or_a_set_of_buffers_is_no_leak() {
    for case in ["freed", "little", "kept"] {
        habit(case).go().finds_nothing();
    }
}

/// The driver's own time: with the pool, the second allocation would be ready.
#[test]
fn time_lost_in_pinning_is_measured() {
    let slow = |case| habit(case).env("GPUPOOL_PINNED", "off").env("SIMCUDA_PINNED", "resident").go();
    let told = slow("slow");
    told.finds(&["GP015"]).warns("s to pin memory");
    // How many allocations that took differs from run to run.
    let text = normal(&report(&[&told]), &[&told]);
    let findings = text.split("\n\n").find(|section| section.starts_with("Findings\n"));
    compare("slow", &format!("{}\n", findings.unwrap_or_else(|| told.fail("the report has no findings"))));
    assert_eq!(told.place(), "pin_for in pinned_habits");
    slow("quick").finds_nothing();
}

#[test]
fn memory_that_is_registered_again_is_found_once_a_place() {
    let told = habit("registered").go();
    told.finds(&["GP016"]).reads("registered");
    habit("neighbours").go().finds_nothing();
}

#[test]
fn what_goes_beyond_the_limit_is_said_once() {
    let told = habit("large").env("GPUPOOL_PINNED_LIMIT", "4MiB").go();
    told.finds(&["GP018"]).reads("over_limit");
    habit("large").env("GPUPOOL_PINNED_LIMIT", "8MiB").go().finds_nothing();
}

#[test]
fn what_rounding_up_wastes_is_measured_by_what_copies_reach() {
    let told = habit("rounded").library("torch_cuda").go();
    told.finds(&["GP012"]).reads("rounded").warns("no copy ever reached 56.0 MiB");
    assert_eq!(told.place(), "cached_host_alloc in libtorch_cuda.so");
    for case in ["exact", "nearly"] {
        habit(case).library("torch_cuda").go().finds_nothing();
    }
}
