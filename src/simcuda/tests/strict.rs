//! Strict mode: memory that unfinished work may still use is not taken away, and what was released shows.

#![allow(clippy::macro_metavars_in_unsafe, reason = "the macro is there to make the one unsafe call")]

mod common;

use common::*;
use cudarc::driver::sys::*;
use std::ptr::null_mut;

/// A list of 64-bit words on the device.
fn upload(words: &[u64]) -> u64 {
    let mut block = 0;
    ok!(cuMemAlloc_v2(&mut block, words.len() * 8));
    ok!(cuMemcpyHtoD_v2(block, words.as_ptr().cast(), words.len() * 8));
    block
}

fn read_long(address: u64) -> u64 {
    let mut word = 0_u64;
    ok!(cuMemcpyDtoH_v2((&raw mut word).cast(), address, 8));
    word
}

fn take_access(address: u64, device: i32) {
    let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE;
    let desc = CUmemAccessDesc { location: location(device), flags };
    ok!(cuMemSetAccess(address, CHUNK, &desc, 1));
}

/// A chunk of `device` at `address`, kept by the handle that is returned.
fn held(address: u64, device: i32, devices: &[i32]) -> u64 {
    let handle = create(device, CHUNK);
    ok!(cuMemMap(address, CHUNK, 0, handle, 0));
    assert_eq!(grant(address, CHUNK, devices), 0);
    handle
}

#[test]
fn tables_and_lists_are_followed_where_they_lead() {
    alone("tables_and_lists_are_followed_where_they_lead", &[], || {
        start_on(0);
        let space = reserve(4 * CHUNK);
        let chunk = |index: u64| space + index * CHUNK as u64;
        for index in 0..3 {
            place(chunk(index), (index % 2) as i32, &[0]);
        }
        let table = upload(&[chunk(2), chunk(0), chunk(1) + 64]);
        let out = upload(&[0]);
        assert_eq!(launch(function(c"fill_table_u32"), null_mut(), &mut [table, 3, 16, 5]), 0);
        assert_eq!(launch(function(c"sum_table_u32"), null_mut(), &mut [table, 3, 16, out]), 0);
        assert_eq!((read_long(out), read(chunk(2)), read(chunk(1))), (3 * 16 * 5, 5, 0));

        // A list from one GPU to the other and back; what it finds counts, not what was there at the launch.
        let nodes = [chunk(0) + 512, chunk(1) + 512, chunk(2) + 512];
        for (node, next) in nodes.iter().zip([nodes[1], nodes[2], 0]) {
            ok!(cuMemcpyHtoD_v2(*node, [next, 10].as_ptr().cast(), 16));
        }
        ok!(cuMemsetD8_v2(out, 0, 8));
        assert_eq!(launch(function(c"add_list_u64"), null_mut(), &mut [nodes[0], 7]), 0);
        let (flag, stream) = (pinned_flag(), stream());
        ok!(cuCtxSynchronize());
        assert_eq!(launch(function(c"sum_list_u64"), stream, &mut [nodes[0], out, flag as u64]), 0);
        ok!(cuMemcpyHtoD_v2(nodes[1], [0_u64].as_ptr().cast(), 8));
        raise(flag as usize);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(read_long(out), 34);
        // A pointer to nothing ends the context.
        ok!(cuMemcpyHtoD_v2(nodes[1], [chunk(3)].as_ptr().cast(), 8));
        assert_eq!(launch(function(c"sum_list_u64"), null_mut(), &mut [nodes[0], out, 0]), 0);
        assert_eq!(cu!(cuCtxSynchronize()), 700);
    });
}

#[test]
fn what_unfinished_work_names_is_not_taken_away() {
    wrongly("what_unfinished_work_names_is_not_taken_away", &[], take_what_is_named, |violations| {
        let context = "of context";
        let expected = [
            ["cuMemUnmap of 2097152 bytes", "kernel fill_u32 is queued in stream", context],
            ["cuMemUnmap of 2097152 bytes", "a copy is queued in stream", context],
            ["cuMemUnmap of 2097152 bytes", "a graph of 1 nodes is queued in stream", context],
            ["cuMemSetAccess, which takes access away,", "a fill is queued in stream", "on GPU 0"],
        ];
        assert_eq!(violations.len(), expected.len(), "{violations:#?}");
        for (said, parts) in violations.iter().zip(expected) {
            assert!(parts.iter().all(|part| said.contains(part)), "{said}, expected {parts:?}");
        }
    });
}

fn take_what_is_named() {
    start_on(0);
    let (space, flag, stream) = (reserve(8 * CHUNK), pinned_flag(), stream());
    let chunk = |index: u64| space + index * CHUNK as u64;
    for index in 0..6 {
        place(chunk(index), 0, &[0, 1]);
    }
    let (fill, wait) = (function(c"fill_u32"), function(c"wait_flag"));
    let (mut graph, mut executable) = (null_mut(), null_mut());
    ok!(cuStreamBeginCapture_v2(stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED));
    assert_eq!(launch(fill, stream, &mut [chunk(2), 4, 1]), 0);
    ok!(cuStreamEndCapture(stream, &mut graph));
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));

    assert_eq!(launch(wait, stream, &mut [flag as u64]), 0);
    assert_eq!(launch(fill, stream, &mut [chunk(0), 4, 1]), 0);
    ok!(cuMemcpyDtoDAsync_v2(chunk(1), chunk(1) + 4096, 64, stream));
    ok!(cuGraphLaunch(executable, stream));
    ok!(cuMemsetD32Async(chunk(3), 1, 4, stream));
    ok!(cuMemUnmap(chunk(5), CHUNK));
    take_access(chunk(4), 1);
    assert_eq!(count("simcuda_violations"), 0, "nobody uses these");
    for index in 0..3 {
        ok!(cuMemUnmap(chunk(index), CHUNK));
    }
    take_access(chunk(3), 1);
    assert_eq!(count("simcuda_violations"), 3, "GPU 1 does nothing with it");
    take_access(chunk(3), 0);

    raise(flag as usize);
    assert_eq!(cu!(cuStreamSynchronize(stream)), 700);
}

#[test]
fn memory_that_another_context_uses_is_not_freed() {
    // The free waits for the context that owns the memory only, so this is the program's to keep in order.
    wrongly("memory_that_another_context_uses_is_not_freed", &[], free_what_others_use, |violations| {
        let used = "kernel fill_u32 is queued in stream";
        let expected = [
            ["a free of 4096 bytes", used, "on GPU 1"],
            ["a free of pinned memory of 4096 bytes", used, "on GPU 1"],
            ["a free of 4096 bytes", used, "on GPU 0"],
            ["a free of pinned memory of 4096 bytes", used, "on GPU 0"],
        ];
        assert_eq!(violations.len(), expected.len(), "{violations:#?}");
        for (said, parts) in violations.iter().zip(expected) {
            assert!(parts.iter().all(|part| said.contains(part)), "{said}, expected {parts:?}");
        }
    });
}

fn free_what_others_use() {
    let (first, second, mut created) = (start_on(0), start_on(1), null_mut());
    ok!(cuCtxEnablePeerAccess(first, 0));
    ok!(cuCtxCreate_v4(&mut created, null_mut(), 0, 0));
    for (round, other) in [second, created].into_iter().enumerate() {
        ok!(cuCtxSetCurrent(first));
        let (used, spare, mut pinned) = (upload(&[0; 512]), upload(&[0; 512]), null_mut());
        ok!(cuMemHostAlloc(&mut pinned, 4096, 1));
        ok!(cuCtxSetCurrent(other));
        let (stream, flag) = (stream(), pinned_flag());
        raise_in_the_end(flag as usize);
        assert_eq!(launch(function(c"wait_flag"), stream, &mut [flag as u64]), 0);
        for target in [used, pinned as u64] {
            assert_eq!(launch(function(c"fill_u32"), stream, &mut [target, 4, 1]), 0);
        }
        ok!(cuMemFree_v2(spare));
        assert_eq!(count("simcuda_violations"), 2 * round as u64);
        ok!(cuMemFree_v2(used));
        ok!(cuMemFreeHost(pinned));
        raise(flag as usize);
        assert_eq!(cu!(cuStreamSynchronize(stream)), 700);
    }
}

#[test]
fn kernels_that_follow_pointers_may_use_all_that_their_gpu_reaches() {
    wrongly(
        "kernels_that_follow_pointers_may_use_all_that_their_gpu_reaches",
        &[],
        take_from_under_a_list,
        |violations| {
            let follower = "kernel sum_list_u64, which follows pointers,";
            let expected = [
                ["mapping anew what was unmapped, of 2097152 bytes", follower],
                ["cuMemSetAccess, which takes access away,", follower],
            ];
            assert_eq!(violations.len(), expected.len(), "{violations:#?}");
            for (said, parts) in violations.iter().zip(expected) {
                assert!(parts.iter().all(|part| said.contains(part)), "{said}, expected {parts:?}");
            }
        },
    );
}

fn take_from_under_a_list() {
    start_on(0);
    let (space, flag, stream) = (reserve(4 * CHUNK), pinned_flag(), stream());
    let chunk = |index: u64| space + index * CHUNK as u64;
    let handle = held(chunk(0), 1, &[0, 1]);
    held(chunk(1), 1, &[1]);
    held(chunk(2), 1, &[0, 1]);
    let (node, out) = (upload(&[0, 5]), upload(&[0]));
    // A second mapping, where no kernel ever was, and the first, where one is.
    let second = reserve(CHUNK);
    ok!(cuMemMap(second, CHUNK, 0, handle, 0));
    assert_eq!(grant(second, CHUNK, &[0, 1]), 0);
    assert_eq!(launch(function(c"fill_u32"), stream, &mut [chunk(0), 4, 1]), 0);
    ok!(cuStreamSynchronize(stream));
    let follow = function(c"sum_list_u64");
    assert_eq!(launch(follow, stream, &mut [node, out, flag as u64]), 0);
    ok!(cuMemUnmap(second, CHUNK));
    ok!(cuMemUnmap(chunk(1), CHUNK));
    take_access(chunk(2), 1);
    assert_eq!(count("simcuda_violations"), 0, "what its GPU does not reach");
    ok!(cuMemUnmap(chunk(0), CHUNK));
    assert_eq!(count("simcuda_violations"), 0, "what is freed goes");
    ok!(cuMemMap(chunk(0), CHUNK, 0, handle, 0));
    assert_eq!(grant(chunk(0), CHUNK, &[0, 1]), 0);
    assert_eq!(count("simcuda_violations"), 1, "what is moved does not");
    take_access(chunk(2), 0);
    raise(flag as usize);
    ok!(cuStreamSynchronize(stream));
    assert_eq!(count("simcuda_violations"), 2);
    // Nobody runs: all of it may be done.
    ok!(cuMemUnmap(chunk(0), CHUNK));
    ok!(cuMemMap(chunk(0), CHUNK, 0, handle, 0));
    assert_eq!(grant(chunk(0), CHUNK, &[0, 1]), 0);
    take_access(chunk(0), 0);
    assert_eq!(read_long(out), 5);
}

#[test]
fn a_copy_that_another_thread_waits_for_counts_too() {
    wrongly("a_copy_that_another_thread_waits_for_counts_too", &[], unmap_under_a_call, |violations| {
        assert_eq!(violations.len(), 1, "{violations:#?}");
        assert!(violations[0].contains("a copy runs in a call that waits for it"), "{}", violations[0]);
    });
}

fn unmap_under_a_call() {
    let context = start_on(0) as usize;
    const BYTES: usize = 16 << 20;
    let (address, handle) = (reserve(BYTES), create(0, BYTES));
    let over = std::sync::atomic::AtomicBool::new(false);
    let begun = std::sync::atomic::AtomicUsize::new(0);
    let mut data = vec![0_u8; BYTES];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ok!(cuCtxSetCurrent(context as CUcontext));
            while !over.load(std::sync::atomic::Ordering::Acquire) {
                begun.fetch_add(1, std::sync::atomic::Ordering::AcqRel);
                // It is refused while nothing is mapped.
                let answer = cu!(cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), address, BYTES));
                assert!([0, 1].contains(&answer), "{answer}");
            }
        });
        // Nothing can hold such a copy back, so it is met sooner or later; or never, which ends the test.
        let start = std::time::Instant::now();
        while count("simcuda_violations") == 0 && start.elapsed().as_secs() < 30 {
            ok!(cuMemMap(address, BYTES, 0, handle, 0));
            assert_eq!(grant(address, BYTES, &[0]), 0);
            // The next one to begin finds the memory, and takes a thousand times as long as it does to say that it runs: what
            // is unmapped before that is gone when the copy looks, which ends its context and is no violation.
            let before = begun.load(std::sync::atomic::Ordering::Acquire);
            while begun.load(std::sync::atomic::Ordering::Acquire) == before && start.elapsed().as_secs() < 30 {
                std::hint::spin_loop();
            }
            (0..50).for_each(|_| std::thread::yield_now());
            ok!(cuMemUnmap(address, BYTES));
        }
        over.store(true, std::sync::atomic::Ordering::Release);
    });
}

#[test]
fn released_memory_shows_in_what_reads_it() {
    alone("released_memory_shows_in_what_reads_it", &[("SIMCUDA_GPUS", "1x1GiB")], || {
        const POISON: u32 = 0xdbdb_dbdb;
        start_on(0);
        let address = reserve(2 * CHUNK);
        place(address, 0, &[0]);
        place(address + CHUNK as u64, 0, &[0]);
        assert_eq!(read(address), 0, "nobody had it");
        ok!(cuMemsetD32_v2(address, 7, CHUNK / 4));
        ok!(cuMemUnmap(address, 2 * CHUNK));
        for index in 0..2 {
            place(address + index * CHUNK as u64, 0, &[0]);
        }
        let words = [0, CHUNK as u64].map(|at| read(address + at));
        assert!(words == [POISON, 0] || words == [0, POISON], "one of both was written: {words:x?}");
        let (mut small, mut keeper) = (0, 0);
        ok!(cuMemAlloc_v2(&mut keeper, 512));
        ok!(cuMemAlloc_v2(&mut small, 512));
        ok!(cuMemsetD32_v2(small, 7, 128));
        ok!(cuMemFree_v2(small));
        let mut again = 0;
        ok!(cuMemAlloc_v2(&mut again, 512));
        assert_eq!((again, read(again)), (small, POISON));
    });
}

#[test]
fn events_tell_far_memory_from_near() {
    alone("events_tell_far_memory_from_near", &[], || {
        let peer = start_on(1);
        let context = start_on(0);
        ok!(cuCtxEnablePeerAccess(peer, 0));
        const BYTES: usize = 8 << 20;
        let space = reserve(3 * BYTES);
        let chunk = |index: usize| space + (index * BYTES) as u64;
        for (index, device) in [0, 1, -1].into_iter().enumerate() {
            let handle = create(device, BYTES);
            ok!(cuMemMap(chunk(index), BYTES, 0, handle, 0));
            assert_eq!(grant(chunk(index), BYTES, &[0, 1]), 0);
        }
        let (stream, out, sum, fill) = (stream(), upload(&[0]), function(c"sum_u32"), function(c"fill_u32"));
        let mut events = [null_mut(), null_mut()];
        for event in &mut events {
            ok!(cuEventCreate(event, 0));
        }
        let timed = |work: &dyn Fn()| {
            ok!(cuEventRecord(events[0], stream));
            work();
            ok!(cuEventRecord(events[1], stream));
            let mut time = 0.0;
            ok!(cuEventSynchronize(events[1]));
            ok!(cuEventElapsedTime_v2(&mut time, events[0], events[1]));
            time
        };
        // GB/s and ms.
        let close = |time: f32, speed: f32| {
            let expected = BYTES as f32 / speed / 1e6;
            assert!((time / expected - 1.0).abs() < 0.01, "{time} ms, expected {expected} at {speed} GB/s");
        };
        let words = BYTES as u64 / 4;
        for (place, [read, write, copied]) in
            [[4480.0, 4310.0, 2140.0], [374.0, 371.0, 397.0], [51.0, 53.0, 55.0]].into_iter().enumerate()
        {
            close(timed(&|| assert_eq!(launch(sum, stream, &mut [chunk(place), words, out]), 0)), read);
            close(timed(&|| assert_eq!(launch(fill, stream, &mut [chunk(place), words, 1]), 0)), write);
            close(timed(&|| ok!(cuMemcpyDtoDAsync_v2(chunk(place), chunk(0), BYTES, stream))), copied);
        }
        // Twice in a row is twice the time, and work elsewhere does not count.
        let once = timed(&|| assert_eq!(launch(sum, stream, &mut [chunk(1), words, out]), 0));
        let other = self::stream();
        let both = timed(&|| {
            for _ in 0..2 {
                assert_eq!(launch(sum, stream, &mut [chunk(1), words, out]), 0);
            }
            assert_eq!(launch(sum, other, &mut [chunk(2), words, out]), 0);
        });
        assert!((both / once - 2.0).abs() < 0.01, "{both} and {once} ms");
        // What a stream waits for does count.
        let mut end = null_mut();
        ok!(cuEventCreate(&mut end, 2));
        let waited = timed(&|| {
            assert_eq!(launch(sum, other, &mut [chunk(2), words, out]), 0);
            ok!(cuEventRecord(end, other));
            ok!(cuStreamWaitEvent(stream, end, 0));
        });
        assert!(waited > 0.1, "{waited} ms for 8 MiB of host memory in the other stream");
        assert_eq!(timed(&|| {}), 0.0);
        ok!(cuCtxRecordEvent(context, events[1]));
        ok!(cuEventSynchronize(events[1]));
        let mut time = -1.0;
        ok!(cuEventElapsedTime_v2(&mut time, events[0], events[1]));
        assert_eq!(time, 0.0);
    });
}
