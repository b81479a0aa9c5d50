//! CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER set when CUDA has read them already (GP005), and in time.

use crate::case::{Case, Told};

const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

#[track_caller]
fn c(arguments: &str) -> Told {
    Case::program("variables", arguments).env(VISIBLE, "2").go()
}

#[track_caller]
fn python(case: &str) -> Told {
    Case::client("variables.py", case).env(VISIBLE, "2").go()
}

/// The fact of the only finding.
#[track_caller]
fn fact(told: &Told, name: &str) -> String {
    let [made] = told.findings()[..] else { told.fail("expected one finding") };
    made.facts.get(name).unwrap_or_else(|| told.fail(&format!("no fact {name}"))).clone()
}

#[test]
fn a_line_of_python_that_comes_too_late_is_named_with_the_one_that_was_first() {
    let told = python("late");
    told.finds(&["GP005"]).reads("variables_python");
    assert_eq!(told.place(), "variables.py:14 in choose");
    assert!(fact(&told, "initialised_by").ends_with("variables.py:10 in start"));
    assert_eq!((fact(&told, "value_then"), fact(&told, "value_now")), ("\"2\"".to_owned(), "\"3\"".to_owned()));
}

#[test]
fn every_way_that_c_has_is_seen() {
    for how in ["setenv", "putenv", "unsetenv"] {
        let told = c(how);
        told.finds(&["GP005"]);
        assert_eq!(told.place(), "choose_gpu in variables", "{how}");
        assert!(fact(&told, "initialised_by").starts_with("start_cuda in "));
        assert_eq!(fact(&told, "value_now"), if how == "unsetenv" { "unset" } else { "\"3\"" });
        assert_eq!(told.events("environment.set").len(), 1, "{how}");
    }
    c("setenv").reads("variables_c");
}

#[test]
fn a_value_written_past_setenv_is_found_at_exit() {
    let told = c("environ");
    told.finds(&["GP005"]).warns("where: unknown");
    assert!(fact(&told, "initialised_by").starts_with("start_cuda in "));
    assert_eq!(fact(&told, "value_now"), "\"3\"");
}

#[test]
fn the_order_of_gpus_is_watched_too() {
    let told = python("order");
    told.finds(&["GP005"]);
    assert_eq!(
        (fact(&told, "variable"), fact(&told, "value_then")),
        ("CUDA_DEVICE_ORDER".to_owned(), "unset".to_owned())
    );
    c("setenv CUDA_DEVICE_ORDER").finds(&["GP005"]);
}

#[test]
fn a_variable_that_is_removed_has_changed() {
    let told = python("removed");
    told.finds(&["GP005"]);
    assert_eq!(fact(&told, "value_now"), "unset");
}

#[test]
fn in_time_or_to_the_same_value_or_another_variable_is_no_finding() {
    for case in ["early", "same", "other"] {
        python(case).finds_nothing();
    }
    c("early").finds_nothing();
    for how in ["setenv", "putenv"] {
        c(&format!("{how} OMP_NUM_THREADS")).finds_nothing();
        // What CUDA read was 3.
        Case::program("variables", how).env(VISIBLE, "3").go().finds_nothing();
    }
}

/// CUDA would have read the same from it.
#[test]
fn another_way_to_write_what_was_in_effect_is_no_finding() {
    for (before, after) in [(Some("3"), " 3"), (Some("0,1"), "0, 1"), (None, "0,1,2,3"), (None, "0,1,2,3,4,5,6,7")] {
        let case = Case::program("variables", &format!("setenv CUDA_VISIBLE_DEVICES {}", after.replace(' ', "_")));
        before.into_iter().fold(case, |case, before| case.env(VISIBLE, before)).go().finds_nothing();
    }
    Case::program("variables", "setenv CUDA_DEVICE_ORDER FASTEST_FIRST").go().finds_nothing();
    for after in ["0,1,2", "1,0,2,3", "none"] {
        Case::program("variables", &format!("setenv CUDA_VISIBLE_DEVICES {after}")).go().finds(&["GP005"]);
    }
    Case::program("variables", "setenv CUDA_DEVICE_ORDER PCI_BUS_ID").go().finds(&["GP005"]);
}

/// Each worker hears of its own GPU, and the parent has what it had.
#[test]
fn a_variable_that_is_set_for_workers_and_taken_back_is_no_finding() {
    let told = c("workers");
    told.finds_nothing();
    assert_eq!(told.events("environment.set").len(), 3, "the log has each change");
    Case::program("variables", "workers").go().finds_nothing();
    python("taken_back").finds_nothing();
}

/// A launcher that uses no GPU itself has nothing to lose by what its variable says in the end.
#[test]
fn a_variable_that_is_set_for_workers_by_a_launcher_without_a_context_is_no_finding() {
    let told = c("launcher");
    told.finds_nothing();
    assert!(told.events("context.create").is_empty());
}
