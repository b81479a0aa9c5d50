//! What the pool is for: memory of several GPUs and the host behind one GPU's allocations, with the right data in it.

use gpupool_events::Event;
use harness::{Build, Output, Run};

/// Four small GPUs, whose memory a test can afford to write in full.
const SMALL: &str = "4x256MiB";

fn steps(script: &str) -> Run {
    Run::program("steps").args(script).sim(SMALL).env("GPUPOOL_RESERVE", "16MiB").shim().log()
}

/// Bytes of all spilled blocks on other GPUs and on the host, by the log.
fn spilled(output: &Output) -> (u64, u64) {
    let spills = output.records.iter().filter_map(|record| match &record.event {
        Event::PoolSpill(spill) => Some((spill.on_peers, spill.on_host)),
        _ => None,
    });
    spills.fold((0, 0), |(peers, host), (on_peers, on_host)| (peers + on_peers, host + on_host))
}

#[test]
fn what_does_not_fit_bare_fits_under_the_shim() {
    let bare = Run::program("steps").args("a:150 a:150").sim(SMALL).go();
    bare.succeeds().says("allocate 150: 0").says("allocate 150: 2");
    let shim = steps("a:150 a:150 c:0 c:1").go();
    shim.succeeds().says("block 0: 0 wrong").says("block 1: 0 wrong");
    let (peers, host) = spilled(&shim);
    assert!(peers > 0 && host == 0, "{peers} bytes on peers, {host} on the host");
}

/// Memory that is kept lies where it lay, so that a block that it serves lies elsewhere as well.
#[test]
fn what_lay_elsewhere_is_told_of_freed_memory_that_serves_again_and_of_what_moved() {
    let outside = |how| {
        let run = Run::program("outside").arg(how).sim("2x128MiB").env("SIMCUDA_CONTEXT_MIB", "0");
        let shim =
            run.env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_IDLE", "off").env("GPUPOOL_LOG", "error").shim().go();
        shim.succeeds();
        shim
    };
    let again = outside("again");
    again.prints("800 MiB of 11 blocks, 9 reused\n");
    again.warns("gpupool: 800.0 MiB of all that was allocated lay outside the GPU that asked for it when it was\n");
    let moved = outside("moved");
    moved.prints("0 MiB of 1 blocks, 0 reused\n");
    moved.warns("gpupool: 64.0 MiB in use at the end lay outside the GPU that asked for it, where it moved since\n");
    outside("back").prints("0 MiB of 1 blocks, 0 reused\n").is_quiet();
}

#[test]
fn a_refusal_is_told_with_who_held_what_and_what_would_have_helped() {
    let script = Run::program("steps").args("a:300 a:400 a:401 a:402").sim("2x256MiB");
    let shim = script.env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_HOST_LIMIT", "0").shim().log().go();
    shim.succeeds().says("allocate 300: 0").says("allocate 402: 2");
    let told = shim.records.iter().filter_map(|record| match &record.event {
        Event::OutOfMemory(told) => Some(told),
        _ => None,
    });
    let told: Vec<_> = told.collect();
    let asked: Vec<(u64, u64)> = told.iter().map(|told| (told.number, told.bytes >> 20)).collect();
    assert_eq!(asked, [(1, 400), (2, 401)], "the third is told with the fourth");
    let first = told[0];
    assert!(first.fits < first.bytes && first.site.is_some(), "{first:?}");
    let [holder] = &first.holders[..] else { panic!("{first:?}") };
    assert_eq!((holder.blocks, holder.bytes, holder.guessed), (1, 300 << 20, 0));
    assert!(holder.on_peers > 0 && holder.site.as_ref().is_some_and(|site| !site.is_empty()), "{holder:?}");
    let host = first.remedies.iter().find(|remedy| remedy.setting == "GPUPOOL_HOST_LIMIT");
    let host = host.unwrap_or_else(|| panic!("{:?}", first.remedies));
    // What is said to be enough is.
    let mended = Run::program("steps").args("a:300 a:400").sim("2x256MiB").env("GPUPOOL_RESERVE", "16MiB");
    assert!(host.enough, "{host:?}");
    mended.env("GPUPOOL_HOST_LIMIT", &host.value).shim().go().succeeds().says("allocate 400: 0");
}

/// On a GPU that is only borrowed from, room for a context stays free, whatever the reserve: no block gets that, and no advice counts on it.
#[test]
fn a_refusal_counts_no_room_that_is_kept_for_a_context() {
    let run = |script: &str| {
        let run = Run::program("steps").args(script).sim("2x256MiB").machine().nvml();
        let run = run.env("SIMCUDA_CONTEXT_MIB", "20");
        run.env("GPUPOOL_RESERVE", "8MiB").env("GPUPOOL_HOST_LIMIT", "0").shim().log()
    };
    let refused = run("a:300 a:400").go();
    let told = refused.event("memory.out", |event| match event {
        Event::OutOfMemory(told) => Some(told.clone()),
        _ => None,
    });
    let lender = told.places.iter().find(|place| place.place == "gpu1").unwrap();
    assert_eq!((lender.for_context >> 20, lender.reserve >> 20), (24, 8), "{lender:?}");
    // What is said to have fit does, in the pool and not only in the driver.
    let fits = told.fits >> 21 << 21;
    let served = run(&format!("a:300 b:{fits}")).go();
    served.succeeds().says(&format!("allocate {fits} bytes: 0"));
    assert!(served.events("pool.refuse").is_empty() && served.events("memory.out").is_empty(), "{fits}");
}

#[test]
fn arrays_over_several_gpus_hold_their_data() {
    let shim = Run::program("fill_spread").args("200 64 200 130").sim(SMALL).shim().log().report().go();
    shim.succeeds();
    check_fill(&shim, 4);
    assert_eq!(shim.reported("violations"), &serde_json::json!([]));
    let (peers, host) = spilled(&shim);
    assert!(peers > 300 << 20 && host == 0, "{peers} bytes on peers, {host} on the host");
}

/// Every check of `fill_spread` found no wrong word.
#[track_caller]
fn check_fill(output: &Output, arrays: usize) {
    for array in 0..arrays {
        output.says(&format!("array {array}: 0 wrong by kernel, 0 by copy"));
        output.says(&format!("array {array}: memset of the middle has right edges, head 0 wrong"));
    }
    for array in 1..arrays {
        output.says(&format!("array {} after a copy of array {array}: 0 wrong", array - 1));
    }
}

#[test]
fn one_array_larger_than_any_gpu_holds_its_data() {
    let shim = Run::program("fill_spread").args("700 32").sim(SMALL).shim().log().go();
    shim.succeeds();
    check_fill(&shim, 2);
    let (peers, host) = spilled(&shim);
    assert!(peers > 450 << 20 && host == 0, "{peers} bytes on peers, {host} on the host");
}

#[test]
fn the_host_takes_what_no_gpu_can() {
    let run = Run::program("fill_spread").args("600 150").sim("2x256MiB").env("GPUPOOL_HOST_LIMIT", "600MiB");
    let shim = run.shim().log().go();
    shim.succeeds();
    check_fill(&shim, 2);
    // Said once, however many blocks lie there, and with what can be done about it.
    shim.warns("are in the host's memory").warns("GPUPOOL_HOST_LIMIT=0");
    assert_eq!(shim.stderr.matches("in the host's memory").count(), 1, "{}", shim.stderr);
    let (peers, host) = spilled(&shim);
    assert!(peers > 150 << 20 && host > 200 << 20, "{peers} bytes on peers, {host} on the host");
}

/// Addresses are reserved for all that the places may hold: more than the machine has is more than there are.
#[test]
fn the_pool_works_where_the_host_may_lend_more_than_there_is() {
    let shim = Run::program("steps").args("a:32 b:20971520").sim("1x64MiB").env("GPUPOOL_RESERVE", "16MiB");
    let shim = shim.env("GPUPOOL_HOST_LIMIT", "40TiB").shim().log().go();
    shim.succeeds();
    assert_eq!(spilled(&shim), (0, 20 << 20), "{}", shim.stderr);
}

#[test]
fn a_limit_that_the_user_set_is_named_where_it_sends_memory_to_the_host() {
    let run = || Run::program("steps").args("a:32 a:20").sim("2x256MiB").env("GPUPOOL_HOST_LIMIT", "100MiB");
    let limited = run().env("GPUPOOL_LIMIT", "24MiB").shim().go();
    limited.succeeds().warns("no GPU that can lend has room within GPUPOOL_LIMIT").warns("raise GPUPOOL_LIMIT");
    assert!(!limited.stderr.contains("to get OUT_OF_MEMORY"), "{}", limited.stderr);
    // What the advice says comes true: nothing is on the host, and the program has its memory.
    let followed = run().env("GPUPOOL_LIMIT", "24MiB").env("GPUPOOL_HOST_LIMIT", "0").shim().go();
    followed.same_as(&limited);
    assert!(!followed.stderr.contains("in the host's memory"), "{}", followed.stderr);
}

#[test]
fn a_reserve_that_sends_memory_to_the_host_is_named() {
    let run = || Run::program("steps").args("a:32 a:20").sim("1x256MiB").env("GPUPOOL_HOST_LIMIT", "100MiB").shim();
    let shim = run().env("GPUPOOL_RESERVE", "240MiB").go();
    shim.succeeds().warns("no GPU that can lend has room beyond GPUPOOL_RESERVE").warns("lower GPUPOOL_RESERVE");
    let followed = run().env("GPUPOOL_RESERVE", "16MiB").go();
    followed.same_as(&shim);
    assert!(!followed.stderr.contains("in the host's memory"), "{}", followed.stderr);
}

#[test]
fn no_more_of_a_block_is_said_to_be_on_the_host_than_was_asked_for() {
    let odd = 20 * (1 << 20) + 3;
    let shim = Run::program("steps").args(&format!("a:32 b:{odd}")).sim("1x64MiB").env("GPUPOOL_RESERVE", "16MiB");
    let shim = shim.env("GPUPOOL_HOST_LIMIT", "100MiB").shim().log().go();
    shim.succeeds().warns("20.0 MiB of the 20.0 MiB just allocated for GPU 0 are in the host's memory");
    let told =
        shim.records.iter().map(|record| record.message.as_str()).find(|text| text.contains("did not fit there"));
    assert_eq!(told, Some("20.0 MiB for GPU 0 did not fit there: 0 B are on other GPUs, 20.0 MiB on the host"));
}

#[test]
fn every_placement_keeps_the_data_right() {
    for placement in ["local-first", "interleave", "most-free"] {
        let shim = Run::program("fill_spread")
            .args("100 170 64")
            .sim("3x256MiB")
            .env("GPUPOOL_PLACEMENT", placement)
            .shim()
            .go();
        shim.succeeds();
        check_fill(&shim, 3);
    }
}

/// Eight threads on two small GPUs and a host of 3 GiB: blocks go everywhere, and come back.
fn churn(gpus: &str) -> Run {
    let run = Run::program("churn").sim(gpus).shim().report();
    run.env("GPUPOOL_MIN_SIZE", "1").env("GPUPOOL_HOST_LIMIT", "3GiB").env("GPUPOOL_RESERVE", "64MiB")
}

const UNMIXED: &str = "10000 blocks, 0 wrong words\n";

#[test]
fn ten_thousand_blocks_from_eight_threads_never_mix() {
    Run::program("churn").sim("1x8GiB").go().succeeds().prints(UNMIXED);
    Run::program("churn").sim("1x8GiB").shim().go().succeeds().prints(UNMIXED);
    for free in ["strict", "lazy"] {
        for gpus in ["2x512MiB", "3x256MiB"] {
            let shim = churn(gpus).env("GPUPOOL_FREE", free).go();
            shim.succeeds().prints(UNMIXED);
            assert_eq!(shim.reported("violations"), &serde_json::json!([]), "{gpus} {free}");
        }
    }
}

#[test]
fn eight_threads_together_keep_to_every_limit() {
    let run = churn("2x512MiB").env("GPUPOOL_LIMIT", "0:200MiB,1:300MiB");
    let shim = run.go();
    shim.succeeds().prints(UNMIXED);
    let peak = |path: &str| shim.reported(path).as_u64().unwrap_or(0) >> 20;
    // GPU 0 has the context's 16 MiB as well.
    let peaks = (peak("gpus/0/peak"), peak("gpus/1/peak"), peak("hosts/0/peak"));
    assert!(peaks.0 <= 216 && peaks.1 <= 300 && peaks.2 <= 3072, "MiB at most: {peaks:?}");
}

#[test]
fn memory_freed_while_a_kernel_reads_it_stays_whole() {
    let run = Run::program("free_while_running").sim("2x512MiB").report();
    let bare = run.clone().go();
    bare.succeeds().says("round 1: the free returned before the kernel ran: no");
    let strict = run.clone().shim().go();
    strict.same_as(&bare);
    // A lazy free returns early; the data must be right all the same.
    let lazy = run.arg("lazy").shim().env("GPUPOOL_FREE", "lazy").go();
    lazy.succeeds().says("round 1: the free returned before the kernel ran: yes");
    for output in [&bare, &strict, &lazy] {
        for round in 1..=8 {
            output.says(&format!("round {round}: 0 words overwritten"));
        }
        assert_eq!(output.reported("violations"), &serde_json::json!([]));
    }
}

#[test]
fn after_all_frees_and_a_trim_the_machine_is_as_before() {
    for (gpus, largest) in [("1x2GiB", "300"), ("3x512MiB", "900"), ("2x256MiB", "700")] {
        for free in ["strict", "lazy"] {
            let run = Run::program("leak").arg(largest).sim(gpus).env("GPUPOOL_HOST_LIMIT", "2GiB").shim();
            let shim = run.env("GPUPOOL_FREE", free).env("GPUPOOL_MIN_SIZE", "1").report().go();
            let as_before = |round| format!("round {round}: free memory as before, physical memory as before\n");
            shim.succeeds().prints(&(0..3).map(as_before).collect::<String>());
            assert_eq!(shim.reported("live_handles"), 0);
            assert_eq!(shim.reported("violations"), &serde_json::json!([]));
        }
    }
}

#[test]
fn freed_memory_is_used_again() {
    let shim = steps("a:100 f:0 a:100 f:1 a:60 a:40 c:2 c:3").go();
    shim.succeeds();
    let reused = shim.picked(|event| match event {
        Event::BlockAllocate(block) => Some(block.reused),
        _ => None,
    });
    assert_eq!(reused, [false, true, true, true], "{:?}", shim.records);
}

/// What was told of the bytes in use at all places, in MiB.
fn in_use(output: &Output) -> Vec<u64> {
    output.picked(|event| match event {
        Event::PoolLevel(level) => Some(level.places.iter().map(|place| place.used).sum::<u64>() >> 20),
        _ => None,
    })
}

#[test]
fn the_level_is_told_when_use_falls_and_rises_though_nothing_grows() {
    let shim = steps("a:100 a:60 f:0 f:1 a:100 f:2").go();
    shim.succeeds();
    assert_eq!(in_use(&shim), [100, 160, 60, 0, 100, 0], "{:?}", shim.records);
    // Ten thousand blocks that come and go are no reason for as many lines.
    let shim = churn("2x512MiB").log().go();
    shim.succeeds();
    let told = in_use(&shim).len();
    assert!((10..2000).contains(&told), "told {told} times");
}

#[test]
fn blocks_of_a_destroyed_context_go_with_it() {
    let shim = Run::program("threads_contexts").sim("1x1GiB").shim().report().go();
    shim.succeeds().says("done");
    assert_eq!(shim.reported("violations"), &serde_json::json!([]));
}

#[test]
fn a_second_gpu_s_blocks_are_its_own() {
    let shim = steps("a:100 g:1 a:100 u c:0 c:1 f:0 f:1").go();
    shim.succeeds();
    let homes: Vec<u32> = shim
        .records
        .iter()
        .filter_map(|record| match &record.event {
            Event::BlockAllocate(block) => Some(block.home),
            _ => None,
        })
        .collect();
    assert_eq!(homes, [0, 1]);
    assert_eq!(spilled(&shim), (0, 0));
}

#[test]
fn a_program_that_caches_is_told_once_and_then_served() {
    // The second block would overflow the home GPU: refused once, served on the retry.
    let shim = steps("r:150 r:150 c:0 c:1").env("GPUPOOL_SOFT_OOM", "on").go();
    shim.succeeds().prints("allocate 150: 0\nallocate 150: 2\nallocate 150: 0\nblock 0: 0 wrong\nblock 1: 0 wrong\n");
    let why = shim.event("pool.refuse", |event| match event {
        Event::PoolRefuse(refusal) => Some(refusal.why.clone()),
        _ => None,
    });
    assert_eq!(why, "soft");
    for quiet in ["off", "auto"] {
        let shim = steps("r:150 r:150").env("GPUPOOL_SOFT_OOM", quiet).go();
        shim.succeeds().prints("allocate 150: 0\nallocate 150: 0\n");
    }
    // Auto goes by the libraries of the frameworks that cache.
    let caching = Build::library("caching", "c10_cuda").path();
    let shim = steps("r:150 r:150").preload(caching).go();
    shim.succeeds().prints("allocate 150: 0\nallocate 150: 2\nallocate 150: 0\n");
}

/// NCCL and its like take the first OUT_OF_MEMORY for an error, and their job ends; what else the program asks for hears of it all the same.
#[test]
fn a_library_that_fails_when_it_is_refused_is_served() {
    let caching = Build::library("caching", "c10_cuda").path();
    let asked = |name| {
        let run = Run::program("asks_by_library").arg(Build::library("asks", name).path());
        run.sim(SMALL).env("GPUPOOL_RESERVE", "16MiB").shim().log().preload(caching.clone()).go()
    };
    asked("nccl").prints("block of 150 MiB: 0\nblock of 150 MiB: 0\nhandle of 150 MiB: 0\n");
    asked("other").prints("block of 150 MiB: 0\nblock of 150 MiB: 2\nhandle of 150 MiB: 2\n");
}

#[test]
fn freeing_the_cache_instead_keeps_everything_at_home() {
    let shim = steps("a:150 a:150 f:0 a:150 c:1").env("GPUPOOL_SOFT_OOM", "on").go();
    shim.succeeds().prints("allocate 150: 0\nallocate 150: 2\nfree 0: 0\nallocate 150: 0\nblock 1: 0 wrong\n");
    assert_eq!(spilled(&shim), (0, 0));
}

#[test]
fn freed_memory_goes_back_when_the_driver_needs_it() {
    // Pinned to the driver by a size below the smallest pooled one: 180 MiB that the pool holds freed must make room.
    let shim =
        steps("a:180 f:0 a:180 f:1 a:90 a:90").env("GPUPOOL_MIN_SIZE", "100MiB").env("GPUPOOL_DEVICES", "0").go();
    shim.succeeds().says("allocate 90: 0");
    assert!(!shim.stdout.contains("allocate 90: 2"), "{}", shim.stdout);
    assert!(!shim.events("pool.trim").is_empty(), "{:?}", shim.records);
}
