//! Clients that people have: cudarc in Rust, and ctypes, cuda.bindings and numba-cuda in Python. The same output bare and
//! under the shim, and their memory is the pool's.

use harness::{Output, Run};

/// Runs a client both ways on two GPUs and again with so little room that it overflows onto the second.
#[track_caller]
fn same(run: Run) -> Output {
    run.clone().sim("2x2GiB").same_under_shim(&[]).succeeds();
    let shim = run.sim("2x2GiB").shim().log().report().env("GPUPOOL_LIMIT", "0:32MiB,1:1GiB").go();
    shim.succeeds();
    if shim.stdout.contains("wrong") {
        shim.fail("wrong data with blocks over two GPUs");
    }
    assert!(!shim.events("block.allocate").is_empty(), "nothing was pooled: {:?}", shim.records);
    assert!(!shim.events("pool.spill").is_empty(), "nothing overflowed: {:?}", shim.records);
    assert_eq!(shim.reported("violations"), &serde_json::json!([]));
    shim
}

#[test]
fn cudarc() {
    let shim = same(Run::command(env!("CARGO_BIN_EXE_cudarc_client")));
    shim.says("safe interface: right").says("plain calls: right").says("0 bytes: CUDA_ERROR_INVALID_VALUE");
}

#[test]
fn python_ctypes() {
    same(Run::client("ctypes_client.py")).says("block 3 at 50327552: right").says("again: 1").says("absent: False");
}

#[test]
fn python_cuda_bindings() {
    same(Run::client("bindings_client.py"))
        .says("copied: right")
        .says("address range: True 50331648")
        .says("ordinal: 0");
}

#[test]
fn python_numba() {
    same(Run::client("numba_client.py")).says("copied: right").says("4194304 words: right");
}
