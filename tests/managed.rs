//! Managed memory that stays where it was placed: mode managed, the program's own managed memory on request, and the
//! prefetch before a launch.

use gpupool_events::Event;
use harness::{Driver, Output, Run, driver_without};

/// Two GPUs of which 240 MiB each lend; a context takes 16 of the first.
const TWO: &str = "2x256MiB";

fn stripes(gpus: &str, script: &str) -> Run {
    let run = Run::program("stripes").args(script).sim(gpus).shim();
    run.env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_HOST_LIMIT", "100MiB")
}

fn managed(script: &str) -> Run {
    stripes(TWO, script).env("GPUPOOL_MODE", "managed")
}

/// The lines of one step's kind, without the rest.
fn lines<'a>(output: &'a Output, part: &str) -> Vec<&'a str> {
    output.stdout.lines().filter(|line| line.contains(part)).collect()
}

#[test]
fn stripes_live_where_they_were_placed_and_stay_there() {
    let shim = managed("a:150 a:150 p:0 p:1 r:0 r:1 w:0 w:1 c:0 c:1 h:0 h:1 r:0 r:1").report().go();
    shim.succeeds();
    assert_eq!(lines(&shim, "prefers"), ["block 0 prefers gpu0 150", "block 1 prefers gpu0 74 gpu1 76"]);
    let at = ["block 0 is at gpu0 150", "block 1 is at gpu0 74 gpu1 76"];
    assert_eq!(lines(&shim, "is at"), [at, at].concat(), "before and after they were used");
    assert_eq!(lines(&shim, " wrong"), lines(&shim, ": 0 wrong"));
    assert_eq!(lines(&shim, " wrong").len(), 4);
    assert_eq!(shim.reported("violations"), &serde_json::json!([]));
}

#[test]
fn every_placement_is_followed() {
    for (placement, expected) in [
        ("local-first", ["block 0 prefers gpu0 150", "block 1 prefers gpu0 74 gpu1 240 gpu2 86"]),
        (
            "interleave",
            [
                "block 0 prefers gpu0 32 gpu1 32 gpu2 32 gpu0 32 gpu1 22",
                "block 1 prefers gpu1 32 gpu2 32 gpu0 32 gpu1 32 gpu2 32 gpu0 32 gpu1 32 gpu2 32 gpu0 32 gpu1 32 gpu2 32 \
                 gpu0 32 gpu1 16",
            ],
        ),
        ("most-free", ["block 0 prefers gpu1 150", "block 1 prefers gpu2 240 gpu0 160"]),
    ] {
        let run = stripes("3x256MiB", "a:150 a:400 p:0 p:1 w:0 w:1 c:0 c:1");
        let shim = run.env("GPUPOOL_MODE", "managed").env("GPUPOOL_PLACEMENT", placement).go();
        shim.succeeds().says("block 0: 0 wrong on GPU 0").says("block 1: 0 wrong on GPU 0");
        assert_eq!(lines(&shim, "prefers"), expected, "{placement}");
    }
}

#[test]
fn the_host_takes_what_no_gpu_can_up_to_its_limit() {
    let shim = managed("a:500 p:0 r:0 w:0 c:0 h:0 r:0").log().go();
    shim.succeeds().says("block 0 prefers gpu0 224 gpu1 240 host 36").says("block 0: 0 wrong for the processor");
    assert_eq!(lines(&shim, "is at"), ["block 0 is at gpu0 224 gpu1 240 host 36"; 2]);
    let (peers, host) = shim.event("pool.spill", |event| match event {
        Event::PoolSpill(spill) => Some((spill.on_peers, spill.on_host)),
        _ => None,
    });
    assert_eq!((peers, host), (240 << 20, 36 << 20));
}

#[test]
fn beyond_all_caps_the_driver_is_asked_for_plain_memory() {
    // The context leaves 224 + 240 + 100 MiB; 20 MiB more do not exist for us, but evicting, the driver has them.
    let shim = managed("a:464 a:100 a:20 w:0 w:1 w:2 c:0 c:1 c:2 f:2 f:1 a:100").log().report().go();
    shim.succeeds().says("allocate 20: 0");
    assert_eq!(lines(&shim, " wrong"), lines(&shim, ": 0 wrong"));
    let missing = shim.event("pool.refuse", |event| match event {
        Event::PoolRefuse(refusal) => refusal.missing,
        _ => None,
    });
    assert_eq!(missing, 20 << 20);
    let most = |place: usize| {
        let levels = shim.records.iter().filter_map(|record| match &record.event {
            Event::PoolLevel(level) => Some(level.places[place].used),
            _ => None,
        });
        levels.max().unwrap_or(0) >> 20
    };
    let most = [most(0), most(1), most(2)];
    assert!(most[0] <= 240 && most[1] <= 240 && most[2] <= 100, "MiB at most: {most:?}");
    let served = shim.events("block.allocate").len();
    assert_eq!(served, 3, "what was freed is room again");
}

#[test]
fn a_program_that_caches_is_told_once_and_then_served() {
    let steps = |script: &str, soft: &str| {
        let run = Run::program("steps").args(script).sim(TWO).shim().env("GPUPOOL_MODE", "managed").log();
        run.env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_SOFT_OOM", soft).go()
    };
    let shim = steps("r:150 r:150 c:0 c:1", "on");
    shim.succeeds().prints("allocate 150: 0\nallocate 150: 2\nallocate 150: 0\nblock 0: 0 wrong\nblock 1: 0 wrong\n");
    assert_eq!(shim.events("pool.refuse").len(), 1);
    steps("r:150 r:150", "auto").succeeds().prints("allocate 150: 0\nallocate 150: 0\n");
    // The cache was given back instead: all fits at home.
    let shim = steps("a:150 a:150 f:0 a:150 c:1", "on");
    shim.succeeds().prints("allocate 150: 0\nallocate 150: 2\nfree 0: 0\nallocate 150: 0\nblock 1: 0 wrong\n");
    assert!(shim.events("pool.spill").is_empty());
}

#[test]
fn stream_ordered_memory_that_the_driver_lacks_is_managed() {
    let bare = Run::program("stripes").args("S:200 S:200").sim(TWO).go();
    bare.succeeds().says("allocate 200 in a stream: 2");
    let shim = managed("S:200 S:200 w:0 w:1 c:0 c:1 p:1 F:0 F:1").go();
    shim.succeeds().says("allocate 200 in a stream: 0").says("block 1 prefers gpu1 200");
    shim.says("block 0: 0 wrong on GPU 0").says("block 1: 0 wrong on GPU 0");
    shim.says("free 0 in a stream: 0").says("free 1 in a stream: 0");
}

#[test]
fn limits_of_each_gpu_hold() {
    let shim = managed("a:300 p:0").env("GPUPOOL_LIMIT", "0:64MiB,1:200MiB").go();
    shim.succeeds().says("block 0 prefers gpu0 64 gpu1 200 host 36");
}

#[test]
fn a_limit_holds_for_managed_memory_and_the_program_s_own_handles_together() {
    let run = |script| managed(script).env("GPUPOOL_LIMIT", "0:100MiB").go();
    // Whoever is second finds what is left of the limit, and has the rest elsewhere.
    run("V:60 a:60 p:0").succeeds().says("handle of 60: 0").says("block 0 prefers gpu0 40 gpu1 20");
    run("a:60 V:60 a:60 p:0 p:1").succeeds().says("block 0 prefers gpu0 60").says("block 1 prefers gpu1 60");
}

#[test]
fn memory_info_is_that_of_all_places() {
    let shim = managed("i a:300 i g:1 i").go();
    // With a context on each, each GPU is told of its own memory; the second context takes 16 MiB that nobody placed.
    let expected = ["memory: free 464, total 512", "memory: free 164, total 512", "memory: free 148, total 256"];
    assert_eq!(lines(&shim, "memory"), expected);
    let bare = managed("i").env("GPUPOOL_MEMINFO", "device").go();
    bare.succeeds().says("memory: free 240, total 256");
}

#[test]
fn a_later_context_maps_the_blocks_that_live() {
    let shim = managed("a:150 a:150 x:0 g:1 x:0 x:1 w:0 c:0 r:0 a:50 x:2 p:2").go();
    shim.succeeds().says("block 0: 0 wrong on GPU 1").says("block 2 mapped for 0 1").says("block 2 prefers gpu1 50");
    assert_eq!(
        lines(&shim, "mapped")[..3],
        ["block 0 mapped for 0", "block 0 mapped for 0 1", "block 1 mapped for 0 1"]
    );
    assert_eq!(lines(&shim, "is at"), ["block 0 is at gpu0 150"], "the other GPU used it there");
}

#[test]
fn during_a_capture_nothing_is_advised_and_after_it_all_is() {
    let shim = managed("b a:50 p:0 x:0 r:0 e p:0 x:0 r:0").go();
    shim.succeeds().says("end of the capture: 0");
    assert_eq!(lines(&shim, "prefers"), ["block 0 prefers nowhere 50", "block 0 prefers gpu0 50"]);
    assert_eq!(lines(&shim, "mapped"), ["block 0 mapped for", "block 0 mapped for 0"]);
    assert_eq!(lines(&shim, "is at"), ["block 0 is at nowhere 50", "block 0 is at gpu0 50"]);
}

#[test]
fn frees_are_the_driver_s_and_make_room() {
    let shim = managed("a:150 f:0 f:0 i a:150 p:1 f:1").log().go();
    shim.succeeds().says("free 0: 1").says("memory: free 464, total 512").says("block 1 prefers gpu0 150");
    assert_eq!(shim.events("block.free").len(), 2);
}

#[test]
fn a_free_in_a_stream_frees_too() {
    let bare = Run::program("stripes").args("a:150 F:0 s i").sim(TWO).go();
    bare.succeeds().says("free 0 in a stream: 0");
    let shim = managed("a:150 w:0 F:0 i a:100 f:1 F:1").log().go();
    shim.succeeds().says("free 0 in a stream: 0").says("memory: free 464, total 512").says("free 1 in a stream: 1");
    assert_eq!(shim.events("block.free").len(), 2);
    // In a capture the driver refuses what the capture did not allocate, and the capture goes on.
    let captured = managed("a:150 b F:0 e c:0 i").go();
    captured.succeeds().says("free 0 in a stream: 1").says("end of the capture: 0").says("memory: free 314, total 512");
}

#[test]
fn blocks_go_with_their_context_when_the_driver_frees_them() {
    let shim = managed("a:150 g:1 a:100 d:0 i f:1 f:0 i").go();
    shim.succeeds().says("free 1: 0").says("free 0: 1");
    assert_eq!(lines(&shim, "memory"), ["memory: free 364, total 512", "memory: free 464, total 512"]);
}

#[test]
fn without_prefetch_the_advice_places_what_is_touched() {
    let shim = managed("a:300 p:0 r:0 w:0 r:0").env("GPUPOOL_PREFETCH", "off").go();
    shim.succeeds().says("block 0 prefers gpu0 224 gpu1 76");
    assert_eq!(lines(&shim, "is at"), ["block 0 is at nowhere 300", "block 0 is at gpu0 224 gpu1 76"]);
}

#[test]
fn advice_that_is_refused_is_told_once_and_harms_nothing() {
    let faults = "cuMemAdvise_v2:1=801,cuMemAdvise_v2:2=801,cuMemPrefetchAsync_v2:1=999";
    let shim = managed("a:500 p:0 w:0 c:0").env("SIMCUDA_FAULT", faults).go();
    shim.succeeds().says("block 0 prefers nowhere 464 host 36").says("block 0: 0 wrong on GPU 0");
    shim.warns("cuMemPrefetchAsync of 224.0 MiB for gpu0 was refused (CUDA_ERROR_UNKNOWN (999))");
    let told = shim.stderr.matches("cuMemAdvise of ").count();
    assert_eq!(told, 1, "{}", shim.stderr);
}

#[test]
fn drivers_before_locations_are_advised_by_device() {
    let driver = driver_without(&["cuMemAdvise_v2", "cuMemPrefetchAsync_v2"]).unwrap();
    let shim = managed("a:500 p:0 r:0 x:0 w:0 c:0").driver(Driver::In(driver.path().to_owned())).go();
    shim.succeeds().says("block 0 prefers gpu0 224 gpu1 240 host 36").says("block 0 is at gpu0 224 gpu1 240 host 36");
    shim.says("block 0 mapped for 0").says("block 0: 0 wrong on GPU 0");
}

#[test]
fn drivers_that_do_not_tell_parameters_prefetch_at_allocation() {
    let driver = driver_without(&["cuFuncGetParamInfo"]).unwrap();
    let shim =
        managed("a:300 r:0 w:0 c:0").env("GPUPOOL_PREFETCH", "launch").driver(Driver::In(driver.path().to_owned()));
    let shim = shim.go();
    shim.succeeds().says("block 0 is at gpu0 224 gpu1 76").says("block 0: 0 wrong on GPU 0");
    shim.warns("GPUPOOL_PREFETCH=launch: this driver does not tell the parameters of kernels");
}

#[test]
fn a_refused_allocation_gives_its_room_back() {
    let shim = managed("a:100 a:240 p:1").env("SIMCUDA_FAULT", "cuMemAllocManaged:1=2").log().go();
    shim.succeeds().says("allocate 100: 0").says("block 1 prefers gpu0 124 gpu1 116");
    assert!(!shim.events("pool.fallback").is_empty());
}

#[test]
fn gpus_that_do_not_fault_get_the_pool_and_pcie_peers_do_not_lend() {
    let script = "a:300 w:0 c:0";
    let unfit = managed(script).env("SIMCUDA_CONCURRENT_MANAGED", "off").log().go();
    unfit.succeeds().says("block 0: 0 wrong on GPU 0").warns("no concurrent managed access");
    assert!(!unfit.events("pool.open").is_empty(), "{:?}", unfit.records);
    let pcie = managed("a:300 p:0 w:0 c:0 i").env("SIMCUDA_LINK", "pcie").go();
    pcie.succeeds().says("block 0 prefers gpu0 224 host 76").says("memory: free 0, total 256");
    // Managed memory needs no virtual memory management.
    managed("a:300 p:0").env("SIMCUDA_VMM", "off").go().succeeds().says("block 0 prefers gpu0 224 gpu1 76");
}

#[test]
fn the_program_s_own_managed_memory_is_placed_on_request() {
    let script = "m:300 M:50 m:20 p:0 p:1 p:2 x:0 r:0 w:0 c:0 h:0 f:0 m:100 p:3";
    let bare = stripes(TWO, script).go();
    bare.succeeds().says("block 0 prefers nowhere 300");
    for mode in ["pool", "spill", "managed"] {
        let shim = stripes(TWO, script).env("GPUPOOL_MODE", mode).env("GPUPOOL_MANAGED_ADVICE", "on").go();
        shim.succeeds().says("block 0 is at gpu0 224 gpu1 76").says("block 0 mapped for 0");
        let expected = [
            "block 0 prefers gpu0 224 gpu1 76",
            "block 1 prefers nowhere 50",
            "block 2 prefers gpu1 20",
            "block 3 prefers gpu0 100",
        ];
        assert_eq!(lines(&shim, "prefers"), expected, "{mode}: what is attached to the host is left alone");
        for line in ["block 0: 0 wrong on GPU 0", "block 0: 0 wrong for the processor"] {
            shim.says(line);
            bare.says(line);
        }
    }
}

#[test]
fn eight_threads_never_mix_their_blocks() {
    for gpus in ["2x512MiB", "3x256MiB"] {
        let run = Run::program("churn").sim(gpus).shim().report().env("GPUPOOL_MODE", "managed");
        let run = run.env("GPUPOOL_MIN_SIZE", "1").env("GPUPOOL_HOST_LIMIT", "3GiB").env("GPUPOOL_RESERVE", "64MiB");
        for prefetch in ["alloc", "launch"] {
            let shim = run.clone().env("GPUPOOL_PREFETCH", prefetch).go();
            shim.succeeds().prints("10000 blocks, 0 wrong words\n");
            assert_eq!(shim.reported("violations"), &serde_json::json!([]), "{gpus} {prefetch}");
        }
    }
}

#[test]
fn sharing_a_managed_block_is_the_driver_s_to_refuse_and_the_log_says_so() {
    let run = Run::program("ipc_handles").sim("1x1GiB").shim();
    run.env("GPUPOOL_MODE", "managed").go().warns("cuIpcGetMemHandle: the driver shares no managed memory");
}

/// What the answers to a program's questions differ in, all of it.
#[test]
fn questions_are_answered_as_bare_but_for_whether_it_is_managed() {
    let run = Run::program("queries").sim("1x8GiB");
    let bare = run.clone().go();
    let shim = run.shim().env("GPUPOOL_MODE", "managed").go();
    let differing: Vec<_> = bare.stdout.lines().zip(shim.stdout.lines()).filter(|(bare, shim)| bare != shim).collect();
    assert_eq!(differing.len(), 4, "the four places in blocks of GPUPOOL_MIN_SIZE or more: {differing:?}");
    assert_eq!(shim.succeeds().stdout.replace("managed 1", "managed 0"), bare.stdout);
}

/// What `scripts/gpu-check.sh` measures on real GPUs; here only that the program does what it says.
#[test]
fn the_stripes_program_finds_its_stripes() {
    for arguments in ["64 1", "64 1 context"] {
        let run = Run::program("managed_stripes").args(arguments).sim("2x256MiB").shim();
        let shim = run.env("GPUPOOL_MODE", "managed").env("GPUPOOL_LIMIT", "0:32MiB").go();
        shim.succeeds().says("preferred: gpu0 32 gpu1 32").says("prefetched: gpu0 32 gpu1 32");
        shim.says("mapped for: gpu0 gpu1").says("GPU 0: 0 wrong").says("GPU 1: 0 wrong");
    }
}

/// Every way in which a launch names a block that is on the host; `moved` is where it is afterwards.
fn named_by_launch(moved: &str) -> String {
    let ways = [
        ("not named", "host"),
        ("a pointer", moved),
        ("the last word, as the second parameter", moved),
        ("behind its end", "host"),
        ("a buffer of arguments", moved),
        ("in a structure", moved),
        ("in bytes", moved),
        ("after the module was loaded again", moved),
        ("by a kernel of a library", moved),
        ("cuLaunchKernelEx", moved),
        ("cuLaunchCooperativeKernel", moved),
        ("cuLaunchKernel_ptsz", moved),
        ("in a capture", "host"),
        ("after it", moved),
        ("by many launches", moved),
    ];
    let moved: String = ways.iter().map(|(way, place)| format!("{way}: {place} 8\n")).collect();
    moved
        + "cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL): 400 CUDA_ERROR_INVALID_HANDLE\n\
           cuLaunchKernel(k.fill, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL): 1 CUDA_ERROR_INVALID_VALUE\n"
}

#[test]
fn a_launch_brings_the_blocks_that_it_names_back_to_their_places() {
    let run = Run::program("named_by_launch").sim("2x512MiB").shim().env("GPUPOOL_MODE", "managed");
    run.clone().go().succeeds().prints(&named_by_launch("host"));
    let launch = run.clone().env("GPUPOOL_PREFETCH", "launch");
    launch.clone().arg("until-back").go().succeeds().prints(&named_by_launch("gpu0"));
    // The program's own managed memory, which no mode allocates.
    let own = launch.clone().env("GPUPOOL_MODE", "pool").env("GPUPOOL_MANAGED_ADVICE", "on").args("until-back own");
    own.go().succeeds().prints(&named_by_launch("gpu0"));
    // Nobody hears of launches then; they are looked at all the same.
    let silent = launch.env("GPUPOOL_LOG", "off").arg("until-back").go();
    silent.succeeds().prints(&named_by_launch("gpu0"));
}
