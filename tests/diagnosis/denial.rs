//! `GPUPOOL_CONTEXTS=deny`: a context elsewhere fails at its source (GP011).

use crate::case::{Case, Told};

#[track_caller]
fn denied(policy: &str, devices: &str) -> Told {
    let case = Case::program("contexts", "denied").env("GPUPOOL_CONTEXTS", policy);
    case.env("GPUPOOL_CONTEXT_DEVICES", devices).differs().go()
}

/// The result of the call on this line of stdout.
#[track_caller]
fn answer(told: &Told, call: &str) -> i32 {
    let line = told.stdout.lines().find_map(|line| line.strip_prefix(call)?.strip_prefix(": "));
    let code = line.and_then(|rest| rest.split(' ').next()?.parse().ok());
    code.unwrap_or_else(|| told.fail(&format!("{call} is not on stdout")))
}

#[test]
fn contexts_on_other_gpus_fail_and_those_on_the_list_are_made() {
    let told = denied("deny", "3");
    told.finds(&["GP011", "GP011"]).reads("denied").says("computed on GPU 3: 0 wrong");
    for (call, expected) in [("cuDevicePrimaryCtxRetain(&own, ", 46), ("cuCtxCreate_v2(&own, 0, ", 46)] {
        assert_eq!(answer(&told, &format!("{call}FIRST)")), expected);
        assert_eq!(answer(&told, &format!("{call}LAST)")), 0);
    }
    assert_eq!(told.events("context.denied").len(), 2);
    let made = told.events("context.create");
    assert!(made.iter().all(|record| record.message.contains("GPU 3")), "{made:?}");
    let site = told.findings()[0].site.clone().unwrap_or_default();
    assert_eq!(site.native.first().and_then(|frame| frame.symbol.as_deref()), Some("main"));
}

#[test]
fn a_python_program_learns_the_line() {
    let case = Case::client("contexts.py", "stray").env("GPUPOOL_CONTEXTS", "deny").env("GPUPOOL_CONTEXT_DEVICES", "3");
    let told = case.fails_with(1).go();
    told.finds(&["GP011"]).warns("cuDevicePrimaryCtxRetain: 46");
    assert_eq!(told.place(), "contexts.py:11 in warm_up");
}

#[test]
fn only_deny_denies_and_only_elsewhere() {
    for (policy, devices) in [("deny", "0,3"), ("warn", "3")] {
        let told = denied(policy, devices);
        assert_eq!(answer(&told, "cuDevicePrimaryCtxRetain(&own, FIRST)"), 0, "{policy} {devices}");
        assert!(told.events("context.denied").is_empty());
        assert!(told.findings().iter().all(|made| made.code != "GP011"));
        let without_effect =
            told.stderr.contains("GPUPOOL_CONTEXT_DEVICES=3: says nothing without GPUPOOL_CONTEXTS=deny");
        assert_eq!(without_effect, policy == "warn", "{}", told.stderr);
    }
}
