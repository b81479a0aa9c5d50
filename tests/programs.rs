//! Every program of `tests/programs` that fits on one GPU prints the same bare and under the shim, in every mode.

use harness::{Output, Run, repository};

/// Name, arguments. All fit into 8 GiB.
const PROGRAMS: &[(&str, &str)] = &[
    ("fill_spread", "8 64 130 200"),
    ("pitch", ""),
    ("free_while_running", ""),
    ("leak", "300"),
    ("threads_contexts", ""),
    ("queries", ""),
    ("bad_input", ""),
    ("ipc_refused", ""),
    ("steps", "a:100 a:3 f:0 a:50 c:1 c:2 s f:1 f:2"),
    ("exits", "return"),
    ("forks", "before"),
    ("forks", "after"),
];

/// What differs on purpose, under any mode that serves from the pool, and why.
const DIFFERENT: &[(&str, &str)] = &[("ipc_refused", "pooled memory has no IPC handle until the pool builds one")];

/// Programs whose output on two H200 is kept in `tests/programs/expected`, by file name.
const MEASURED: &[(&str, &str, &str)] = &[
    ("pitch", "pitch", ""),
    ("queries", "queries", ""),
    ("bad_input", "bad_input", ""),
    ("resolver_answers", "resolver_answers", ""),
    ("ipc_refused", "ipc_refused", ""),
    ("free_while_running", "free_while_running", ""),
    ("leak", "leak", "300"),
    ("threads_contexts", "threads_contexts", ""),
    ("fill_spread", "fill_spread", "8 64 130"),
    ("forks_after", "forks", "after"),
    ("exits_atexit", "exits", "atexit"),
    ("exits_late", "exits", "late"),
    ("peers", "peers", ""),
];

#[test]
fn the_simulated_driver_says_what_a_real_one_said() {
    for (file, name, arguments) in MEASURED {
        let path = repository().join(format!("tests/programs/expected/{file}.txt"));
        let real = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Run::program(name).args(arguments).sim("2x8GiB").go().prints(&real);
    }
}

#[track_caller]
fn on_one_gpu(name: &str, arguments: &str, settings: &[&str]) -> Output {
    Run::program(name).args(arguments).sim("1x8GiB").same_under_shim(settings)
}

fn all_alike(settings: &[&str], except: &[&str]) {
    for (name, arguments) in PROGRAMS {
        if !except.contains(name) {
            on_one_gpu(name, arguments, settings);
        }
    }
}

#[test]
fn programs_print_the_same_in_mode_pool() {
    let different: Vec<_> = DIFFERENT.iter().map(|(name, _)| *name).collect();
    all_alike(&[], &different);
}

#[test]
fn programs_print_the_same_when_every_request_is_pooled() {
    let different: Vec<_> = DIFFERENT.iter().map(|(name, _)| *name).collect();
    all_alike(&["GPUPOOL_MIN_SIZE=1"], &different);
}

#[test]
fn programs_print_the_same_in_mode_spill() {
    all_alike(&["GPUPOOL_MODE=spill"], &[]);
}

#[test]
fn programs_print_the_same_in_mode_managed() {
    // `managed.rs` says what the answers to questions differ in.
    all_alike(&["GPUPOOL_MODE=managed"], &["queries", "ipc_refused"]);
}

#[test]
fn programs_print_the_same_in_mode_trace() {
    all_alike(&["GPUPOOL_MODE=trace"], &[]);
}

#[test]
fn programs_print_the_same_in_mode_off() {
    all_alike(&["GPUPOOL_MODE=off"], &[]);
}

#[test]
fn nothing_is_said_on_stderr_while_nothing_is_wrong() {
    for (name, arguments) in [("fill_spread", "8 64"), ("pitch", ""), ("threads_contexts", ""), ("bad_input", "")] {
        on_one_gpu(name, arguments, &[]).is_quiet();
    }
}

#[test]
fn copies_between_two_gpus_are_the_same() {
    let shim = Run::program("peers").sim("2x1GiB").same_under_shim(&[]);
    shim.succeeds().says("peer copy 0 to 1: 0 wrong");
}

#[test]
fn sharing_a_pooled_block_is_refused_and_the_log_says_so() {
    let bare = Run::program("ipc_refused").sim("1x1GiB").go();
    let shim = Run::program("ipc_refused").sim("1x1GiB").shim().log().go();
    shim.succeeds().says("cuIpcGetMemHandle(&handle, block): 1 CUDA_ERROR_INVALID_VALUE");
    shim.says("cuIpcGetMemHandle(&handle, block + 4096): 1 CUDA_ERROR_INVALID_VALUE");
    assert!(!shim.events("ipc.refused").is_empty(), "{:?}", shim.records);
    shim.warns("gpupool: ");
    // Memory below GPUPOOL_MIN_SIZE is the driver's, and what it says of it is passed on.
    let small = |output: &Output| output.stdout.lines().find(|line| line.contains("small")).map(str::to_owned);
    assert_eq!(small(&shim), small(&bare));
}
