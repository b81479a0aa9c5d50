//! Requests below `GPUPOOL_MIN_SIZE`: blocks that share frames of the pool, and answer as the driver's own.

use gpupool_events::Event;
use harness::{Output, Run};

/// How such blocks may be served; the last one is without ours.
const SETTINGS: [&[&str]; 4] =
    [&[], &["GPUPOOL_FREE=lazy"], &["GPUPOOL_PLACEMENT=interleave"], &["GPUPOOL_SMALL=driver"]];

fn small(what: &str) -> Run {
    Run::program("small").arg(what).sim("2x1GiB")
}

/// Blocks of the pool that were smaller than 1 MiB.
fn pooled(output: &Output) -> usize {
    let is_small = |event: &Event| matches!(event, Event::BlockAllocate(block) if block.bytes < 1 << 20);
    output.records.iter().filter(|record| is_small(&record.event)).count()
}

#[test]
fn they_are_the_pools_unless_the_user_wants_the_driver() {
    let run = || small("loop").log().env("GPUPOOL_LOG", "debug");
    let (pool, driver) = (run().shim().go(), run().shim().env("GPUPOOL_SMALL", "driver").go());
    assert_eq!((pooled(&pool), pooled(&driver)), (8000, 0), "{}", pool.stderr);
    let limit = run().shim().env("GPUPOOL_MIN_SIZE", "512KiB").go();
    assert!(
        limit.records.iter().any(|record| matches!(&record.event, Event::BlockAllocate(it) if it.bytes > 512 << 10))
    );
    for mode in ["spill", "trace", "managed"] {
        assert_eq!(pooled(&run().shim().env("GPUPOOL_MODE", mode).go()), 0, "{mode}");
    }
}

#[test]
fn they_answer_as_the_drivers_own() {
    for settings in SETTINGS {
        small("answers").same_under_shim(settings).succeeds().says("frees of what is none");
    }
}

#[test]
fn threads_may_free_each_others() {
    for settings in SETTINGS {
        small("threads").same_under_shim(settings).succeeds().prints("0 wrong\n");
        small("loop").same_under_shim(settings).succeeds().prints("0 wrong\n");
    }
}

#[test]
fn they_end_with_their_context_and_with_no_other() {
    for settings in SETTINGS {
        small("contexts")
            .same_under_shim(settings)
            .succeeds()
            .says("  of the one that is not: 0, the block, 5000 bytes");
    }
}

#[test]
fn a_child_has_none_of_its_parents() {
    for settings in SETTINGS {
        small("fork").same_under_shim(settings).succeeds().says("the parent's holds 9");
    }
}

#[test]
fn graphs_and_streams_work_on_them() {
    for settings in SETTINGS {
        small("graph").same_under_shim(settings).succeeds().says("its neighbour holds 5");
    }
}

/// What the pool has no room for is the driver's, and after that nobody's.
#[test]
fn a_gpu_fills_up_and_is_as_large_again_afterwards() {
    let run = || small("full").sim("1x128MiB").env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_HOST_LIMIT", "0");
    let bare = run().go();
    for settings in [&[][..], &["GPUPOOL_FREE=lazy"]] {
        let shim =
            settings.iter().filter_map(|it: &&str| it.split_once('=')).fold(run(), |run, it| run.env(it.0, it.1));
        let shim = shim.shim().report().go();
        shim.same_as(&bare).succeeds().says("the second time as many").says("then 2, and the pointer is 0");
    }
}

#[test]
fn what_is_empty_goes_back_to_the_driver() {
    let run = small("loop").shim().report().log().env("GPUPOOL_IDLE", "1s");
    let shim = run.go();
    let exit = shim.event("process.exit", |event| match event {
        Event::ProcessExit(exit) => Some(exit.clone()),
        _ => None,
    });
    assert_eq!((exit.live_blocks, exit.live_bytes, exit.allocations), (0, 0, 8000), "{exit:?}");
    let peak = exit.peak.iter().find(|peak| peak.place == "gpu0").map_or(0, |peak| peak.peak_used);
    // 400 blocks of 0.5 MiB on average.
    assert!((150 << 20..300 << 20).contains(&peak), "{exit:?}");
}

/// By what the program asked for, and not by the memory that they share.
#[test]
fn they_count_in_what_was_live_at_most_and_in_what_took_no_new_memory() {
    let told = small("statistics").shim().go();
    told.succeeds().prints("5 blocks, 5000 bytes, 3155728 at most, 11 allocations, 9 without new memory\n");
}

/// Another process has a block open: its memory serves nobody else, also when the exporter frees it.
#[test]
fn they_are_shared_with_other_processes() {
    let steps = "A:alloc:0:300 A:alloc:1:4 A:alloc:2:100 A:fill:0:10 A:fill:1:20 A:fill:2:30 A:get:0:0 A:get:1:512 A:get:2:0 \
                 B:open:1 B:open:0 B:open:2 B:range:0 B:range:1 B:check:0:10 B:check:1:20 B:check:2:30 B:fill:1:7 A:check:1:7 \
                 B:again:1 B:close:1 B:close:1 B:close:1 A:free:1 A:alloc:3:4 A:fill:3:50 B:check:0:10 B:close:0 B:close:2 \
                 A:check:0:10 A:check:2:30 A:check:3:50 A:free:0 A:free:2 A:free:3 B:exit A:exit";
    for settings in SETTINGS {
        let run = Run::program("ipc").args(steps).sim("2x1GiB");
        run.same_under_shim(settings).succeeds().says("B:check:1:20: 0 wrong, ends right");
    }
    let steps = "A:alloc:0:300 A:alloc:1:300 A:fill:0:10 A:get:0:0 B:open:0 A:free:0 A:alloc:2:300 A:fill:2:99 A:alloc:3:300 \
                 A:fill:3:77 B:check:0:10 B:close:0 B:exit A:check:2:99 A:exit";
    for settings in [&[][..], &["GPUPOOL_FREE=lazy"]] {
        let run = Run::program("ipc").args(steps).sim("2x1GiB").shim();
        let run = settings.iter().filter_map(|it: &&str| it.split_once('=')).fold(run, |run, it| run.env(it.0, it.1));
        run.go().succeeds().says("B:check:0:10: 0 wrong, ends right").says("A:check:2:99: 0 wrong, ends right");
    }
}

#[test]
fn a_fault_at_any_call_leaves_nothing_behind() {
    for code in [2, 999, 600, 1] {
        for free in ["strict", "lazy"] {
            let run = Run::program("fault_sweep").args(&format!("{code} 1 300k")).sim("2x256MiB");
            let shim = run.env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_FREE", free).shim().go();
            shim.succeeds();
            for line in shim.stdout.lines() {
                let answer = line.split_once(": ").map_or("", |(_, answer)| answer);
                let allowed = [
                    "allocation survives".to_owned(),
                    format!("allocation answers {code}"),
                    format!("free answers {code}"),
                ];
                assert!(line.starts_with("swept ") || allowed.iter().any(|it| it == answer), "{code}: {line}");
            }
        }
    }
}
