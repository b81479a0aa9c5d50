//! Contexts that nobody needed (GP001, GP003, GP004), and those that somebody did.

use crate::case::{Case, Told};

#[track_caller]
fn c(case: &str) -> Told {
    Case::program("contexts", case).go()
}

#[track_caller]
fn python(case: &str) -> Told {
    Case::client("contexts.py", case).go()
}

#[test]
fn a_stray_context_is_traced_to_the_function_that_made_it() {
    let told = c("stray");
    told.finds(&["GP001"]).reads("stray");
    assert_eq!(told.place(), "look_at_first_gpu in contexts");
}

#[test]
fn a_stray_context_is_traced_to_the_line_of_python() {
    let told = python("stray");
    told.finds(&["GP001"]).reads("stray_python");
    assert_eq!(told.place(), "contexts.py:11 in warm_up");
}

#[test]
fn a_python_thread_is_named_by_its_own_line() {
    let told = python("thread");
    told.finds(&["GP001"]);
    assert_eq!(told.place(), "contexts.py:11 in warm_up");
}

#[test]
fn a_native_thread_is_named_by_library_and_function() {
    let told = Case::client("contexts.py", "native").library("background").go();
    told.finds(&["GP001"]).reads("native_thread");
    assert_eq!(told.place(), "decode_images in libbackground.so");
    let told = c("thread");
    told.finds(&["GP001"]);
    assert_eq!(told.place(), "prefetch_worker in contexts");
}

#[test]
fn one_line_that_goes_through_all_gpus_is_one_finding() {
    let told = python("sweep");
    told.finds(&["GP004"]).reads("sweep");
    assert_eq!(told.place(), "contexts.py:20 in sweep");
    let told = c("sweep");
    told.finds(&["GP004"]);
    assert_eq!(told.place(), "look_at_every_gpu in contexts");
}

#[test]
fn enabling_peer_access_is_told_apart() {
    let told = c("peers");
    told.finds(&["GP003"]).reads("peers");
    assert_eq!(told.place(), "reach_first_gpu in contexts");
}

#[test]
fn a_context_for_pinned_memory_says_so() {
    let told = c("pinned");
    told.finds(&["GP001"]).reads("pinned").warns("pinned host allocation");
    assert_eq!(told.place(), "stage_batches in contexts");
}

#[test]
fn what_is_used_is_no_finding() {
    for case in ["one", "first", "late", "all", "working_peers", "pinned_there", "created"] {
        c(case).finds_nothing();
    }
    for case in ["none", "late"] {
        python(case).finds_nothing();
    }
}

#[test]
fn work_that_is_neither_kernel_nor_copy_is_use() {
    for way in ["async", "event", "host_function", "prefetch", "handle", "managed"] {
        c(&format!("only_{way}")).finds_nothing();
    }
}

/// What such a stream is given counts for the context that is current.
#[test]
fn a_context_in_which_a_stream_was_made_is_used_whichever_is_current_later() {
    for case in ["elsewhere", "elsewhere_priority", "only_green"] {
        c(case).finds_nothing();
    }
}

#[test]
fn what_the_driver_refused_is_no_use() {
    c("only_refused").finds(&["GP001"]);
}

/// Contexts on several GPUs that a line made and gave back, one after the other, are never several at a time.
#[test]
fn only_contexts_that_live_at_the_same_time_are_counted_together() {
    c("visit").finds_nothing();
    c("again").finds(&["GP001"]);
    let told = c("visit_while_working");
    told.finds(&["GP001"]);
    assert_eq!(told.place(), "visit_every_gpu in contexts");
}

#[test]
fn without_work_anywhere_no_context_is_called_stray() {
    c("idle").finds_nothing();
}
