//! Machines that lack something: no driver, no GPU, no peer access, no virtual memory management, no host memory; and
//! jobs whose ranks share one host.

use harness::{Driver, Output, Run};
use serde_json::Value;

#[test]
fn without_any_driver_programs_fail_as_bare() {
    // An empty folder in place of the driver: where the system has one of its own, both runs find that.
    for arguments in ["dlsym /dev/null", "gpa2 /dev/null 0"] {
        let run = Run::program("resolve").args(arguments).driver(Driver::System);
        run.same_under_shim(&[]).is_quiet();
    }
    let linked = Run::program("steps").arg("a:1").driver(Driver::System);
    linked.same_under_shim(&[]);
}

#[test]
fn without_a_gpu_the_driver_says_so_itself() {
    for program in ["steps", "bad_input", "queries"] {
        let run = Run::program(program).sim("2x256MiB").env("CUDA_VISIBLE_DEVICES", "");
        let shim = run.same_under_shim(&[]);
        shim.is_quiet();
    }
}

#[test]
fn visible_devices_bound_the_pool() {
    let run = Run::program("steps").args("a:150 a:150 a:150 u").sim("4x256MiB").env("CUDA_VISIBLE_DEVICES", "2,1");
    let shim = run.shim().env("GPUPOOL_HOST_LIMIT", "1GiB").report().go();
    shim.succeeds();
    // The report counts visible GPUs only, by the ordinals of the program.
    assert_eq!(shim.reported("gpus").as_array().map(Vec::len), Some(2));
}

/// Whether each GPU has ever had a context, by what the contexts on it cost now.
fn with_contexts(output: &Output) -> Vec<bool> {
    let gpus = output.reported("gpus").as_array().cloned().unwrap_or_default();
    gpus.iter().map(|gpu| gpu.get("contexts").and_then(Value::as_u64) != Some(0)).collect()
}

#[test]
fn lending_gpus_get_no_context() {
    let shim = Run::program("steps").args("a:200 a:200 a:200 c:0 c:1 c:2").sim("4x256MiB").shim().report().go();
    shim.succeeds();
    assert_eq!(with_contexts(&shim), [true, false, false, false]);
    let lent = shim.reported("gpus").pointer("/1/vmm").and_then(Value::as_u64);
    assert!(lent.is_some_and(|bytes| bytes > 0), "GPU 1 lent nothing: {lent:?}");
}

#[test]
fn without_peer_access_a_gpu_has_itself_and_the_host() {
    let run = Run::program("steps").args("a:150 a:150 u c:0 c:1").sim("2x256MiB").env("SIMCUDA_LINK", "none");
    let shim = run.env("GPUPOOL_HOST_LIMIT", "512MiB").shim().go();
    shim.succeeds().says("allocate 150: 0").says("block 1: 0 wrong");
    let used = shim.stdout.lines().find(|line| line.starts_with("used:")).unwrap_or("");
    assert!(used.contains(" gpu1 0 "), "{used}");
}

#[test]
fn pcie_links_lend_too() {
    let shim = Run::program("fill_spread").args("200 200").sim("2x256MiB").env("SIMCUDA_LINK", "pcie").shim().go();
    shim.succeeds().says("array 0: 0 wrong by kernel, 0 by copy").says("array 1: 0 wrong by kernel, 0 by copy");
}

#[test]
fn where_host_memory_is_not_permitted_the_pool_goes_on_without_it() {
    let run = Run::program("steps").args("a:150 a:150 a:200 c:0 c:1").sim("2x256MiB").env("SIMCUDA_HOST", "none");
    let shim = run.shim().log().go();
    shim.says("block 0: 0 wrong").says("block 1: 0 wrong").says("allocate 200: 2").warns("host");
    assert!(!shim.events("pool.unavailable").is_empty(), "{:?}", shim.records);
}

#[test]
fn a_driver_that_refuses_to_share_memory_is_asked_for_less_once() {
    // Both properties refused: adapters first, then other processes; then never asked for again.
    let shim = Run::program("steps")
        .args("a:150 a:150 c:0 c:1")
        .sim("2x256MiB")
        .env("SIMCUDA_FAULT", "cuMemCreate:1=801,cuMemCreate:2=801")
        .shim()
        .go();
    shim.succeeds().says("block 1: 0 wrong").warns("can be given this memory").warns("shared with other processes");
    assert_eq!(shim.stderr.matches("refused a property").count(), 2, "{}", shim.stderr);
}

#[test]
fn without_virtual_memory_management_everything_is_the_drivers() {
    let run = Run::program("steps").args("a:100 a:200 f:0").sim("2x256MiB").env("SIMCUDA_VMM", "off");
    let bare = run.clone().go();
    let shim = run.shim().go();
    shim.same_as(&bare).warns("gpupool: ");
}

#[test]
fn ranks_of_one_host_keep_to_their_own_gpu() {
    for variable in ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"] {
        let run = Run::program("steps").args("a:150 a:150 c:0 c:1").sim("4x256MiB").env(variable, "4");
        let shim = run.env("GPUPOOL_HOST_LIMIT", "512MiB").shim().log().report().go();
        shim.succeeds().says("block 1: 0 wrong");
        for other in 1..4 {
            let lent = shim.reported("gpus").pointer(&format!("/{other}/vmm")).and_then(Value::as_u64);
            assert_eq!(lent, Some(0), "{variable}: GPU {other}");
        }
        assert!(shim.reported("hosts").pointer("/0/vmm").and_then(Value::as_u64) > Some(0), "{variable}");
        let said = shim.records.iter().any(|record| record.message.contains(variable));
        assert!(said, "{variable} is not named in the log: {:?}", shim.records);
    }
}

#[test]
fn a_single_rank_and_an_explicit_list_use_other_gpus() {
    for variables in
        [&[("LOCAL_WORLD_SIZE", "1")][..], &[("LOCAL_WORLD_SIZE", "4"), ("GPUPOOL_DEVICES", "0,1,2,3")][..]]
    {
        let run = Run::program("steps").args("a:150 a:150").sim("4x256MiB").shim().report();
        let shim = variables.iter().fold(run, |run, (name, value)| run.env(name, value)).go();
        shim.succeeds();
        let lent = shim.reported("gpus").pointer("/1/vmm").and_then(Value::as_u64);
        assert!(lent > Some(0), "{variables:?}");
    }
}

#[test]
fn gpus_of_different_sizes_lend_what_they_have() {
    let shim = Run::program("fill_spread").args("120 400").sim("1x128MiB,1x512MiB,1x64MiB").shim().go();
    shim.succeeds().says("array 1: 0 wrong by kernel, 0 by copy");
}
