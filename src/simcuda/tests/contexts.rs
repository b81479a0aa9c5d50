//! Contexts, primary, created and green: who waits for whom, what breaks a capture, and what is left after an end.

#![allow(clippy::macro_metavars_in_unsafe, reason = "the macro is there to make the one unsafe call")]

mod common;

use common::*;
use cudarc::driver::sys::*;
use std::ptr::null_mut;

const MODES: [CUstreamCaptureMode; 3] = [
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
];

fn lowered(flag: *mut u32) -> bool {
    // SAFETY: a live pinned word.
    unsafe { std::sync::atomic::AtomicU32::from_ptr(flag) }.load(std::sync::atomic::Ordering::Acquire) == 0
}

fn allocate(bytes: usize) -> u64 {
    let mut block = 0;
    ok!(cuMemAlloc_v2(&mut block, bytes));
    block
}

/// What is given back in these tests, and the call that does it.
type Ending = (&'static str, Box<dyn FnOnce() -> i32>);

fn endings() -> Vec<Ending> {
    let mut list: Vec<Ending> = Vec::new();
    for bytes in [4096, 64 << 20] {
        let block = allocate(bytes);
        list.push(("cuMemFree", Box::new(move || cu!(cuMemFree_v2(block)))));
        for flags in [0, 1] {
            let mut pinned = null_mut();
            ok!(cuMemHostAlloc(&mut pinned, bytes, flags));
            list.push(("cuMemFreeHost", Box::new(move || cu!(cuMemFreeHost(pinned)))));
        }
    }
    let mut managed = 0;
    ok!(cuMemAllocManaged(&mut managed, 4096, 1));
    list.push(("cuMemFree of managed memory", Box::new(move || cu!(cuMemFree_v2(managed)))));
    let own = vec![0_u8; 4096].leak().as_mut_ptr();
    ok!(cuMemHostRegister_v2(own.cast(), 4096, 0));
    list.push(("cuMemHostUnregister", Box::new(move || cu!(cuMemHostUnregister(own.cast())))));
    list
}

/// Memory of a pool, which is no context's.
fn pooled() -> Vec<Ending> {
    let mut block = 0;
    ok!(cuMemAllocAsync(&mut block, 4096, null_mut()));
    ok!(cuStreamSynchronize(null_mut()));
    vec![("cuMemFree of a pool's memory", Box::new(move || cu!(cuMemFree_v2(block))))]
}

/// Runs a call of each kind while a kernel in `busy` waits for the host, in the context `current`.
fn while_held(busy: CUcontext, held: CUstream, current: CUcontext, calls: Vec<Ending>, waits: bool) {
    ok!(cuCtxSetCurrent(busy));
    let (flag, wait) = (pinned_flag(), function(c"wait_flag"));
    raise_in_the_end(flag as usize);
    for (name, call) in calls {
        ok!(cuCtxSetCurrent(busy));
        // SAFETY: a live pinned word that no kernel reads now.
        unsafe { flag.write_volatile(0) };
        assert_eq!(launch(wait, held, &mut [flag as u64]), 0);
        ok!(cuCtxSetCurrent(current));
        let address = flag as usize;
        let raiser = waits.then(|| std::thread::spawn(move || raise(address)));
        assert_eq!(call(), 0, "{name}");
        ok!(cuCtxSetCurrent(busy));
        assert_eq!(cu!(cuStreamQuery(held)), if waits { 0 } else { 600 }, "{name}, which waits: {waits}");
        assert!(waits || lowered(flag), "{name} waited");
        match raiser {
            Some(raiser) => assert!(raiser.join().is_ok()),
            None => raise(address),
        }
        ok!(cuStreamSynchronize(held));
    }
}

#[test]
fn a_free_waits_for_the_context_that_owns_the_memory_and_for_no_other() {
    alone("a_free_waits_for_the_context_that_owns_the_memory_and_for_no_other", &[], || {
        let contexts = [start_on(1), start_on(0), null_mut()];
        let [other_gpu, primary, mut created] = contexts;
        ok!(cuCtxCreate_v4(&mut created, null_mut(), 0, 0));
        let streams = [other_gpu, primary, created].map(|context| {
            ok!(cuCtxSetCurrent(context));
            (context, stream())
        });
        for (owner, _) in streams {
            for (busy, held) in streams {
                // Whatever is current makes no difference.
                for (current, _) in streams {
                    ok!(cuCtxSetCurrent(owner));
                    while_held(busy, held, current, endings(), owner == busy);
                    ok!(cuCtxSetCurrent(owner));
                    while_held(busy, held, current, pooled(), false);
                }
            }
        }
        // Peer access changes nothing of that.
        for (from, to) in [(primary, other_gpu), (other_gpu, primary)] {
            ok!(cuCtxSetCurrent(from));
            ok!(cuCtxEnablePeerAccess(to, 0));
            ok!(cuCtxSetCurrent(primary));
            while_held(other_gpu, streams[0].1, primary, endings(), false);
        }
    });
}

#[test]
fn virtual_memory_is_made_and_given_back_without_a_wait() {
    alone("virtual_memory_is_made_and_given_back_without_a_wait", &[], || {
        let context = start_on(0);
        let address = reserve(CHUNK);
        let handle = std::rc::Rc::new(std::cell::Cell::new(0));
        let (made, mapped, released) = (handle.clone(), handle.clone(), handle);
        let calls: Vec<Ending> = vec![
            ("cuMemCreate", Box::new(move || (made.set(create(0, CHUNK)), 0).1)),
            ("cuMemMap", Box::new(move || cu!(cuMemMap(address, CHUNK, 0, mapped.get(), 0)))),
            ("cuMemSetAccess", Box::new(move || grant(address, CHUNK, &[0, 1]))),
            ("cuMemUnmap", Box::new(move || cu!(cuMemUnmap(address, CHUNK)))),
            ("cuMemRelease", Box::new(move || cu!(cuMemRelease(released.get())))),
        ];
        while_held(context, stream(), context, calls, false);
    });
}

#[test]
fn what_waits_for_a_context_breaks_its_captures_in_every_mode() {
    alone("what_waits_for_a_context_breaks_its_captures_in_every_mode", &[], || {
        let context = start_on(0);
        let (stream, mut graph, mut event) = (stream(), null_mut(), null_mut());
        ok!(cuEventCreate(&mut event, 2));
        type Call = fn(CUcontext, CUevent) -> i32;
        let calls: [(&str, Call); 4] = [
            ("synchronize", |_, _| cu!(cuCtxSynchronize())),
            ("synchronize by handle", |context, _| cu!(cuCtxSynchronize_v2(context))),
            ("record", |context, event| cu!(cuCtxRecordEvent(context, event))),
            ("wait", |context, event| cu!(cuCtxWaitEvent(context, event))),
        ];
        for mode in MODES {
            for (name, call) in calls {
                ok!(cuStreamBeginCapture_v2(stream, mode));
                assert_eq!(call(context, event), 900, "{name} in mode {mode:?}");
                assert_eq!(cu!(cuStreamEndCapture(stream, &mut graph)), 901, "{name} in mode {mode:?}");
            }
            ok!(cuStreamBeginCapture_v2(stream, mode));
            let (context, event) = (context as usize, event as usize);
            let elsewhere = move || {
                ok!(cuCtxSetCurrent(context as CUcontext));
                (cu!(cuCtxSynchronize()), cu!(cuCtxRecordEvent(context as CUcontext, event as CUevent)))
            };
            assert_eq!(std::thread::spawn(elsewhere).join().unwrap(), (900, 900), "from another thread, {mode:?}");
            assert_eq!(cu!(cuStreamEndCapture(stream, &mut graph)), 901, "{mode:?}");
            // A wait for the stream that captures.
            ok!(cuStreamBeginCapture_v2(stream, mode));
            assert_eq!((cu!(cuStreamSynchronize(stream)), cu!(cuStreamEndCapture(stream, &mut graph))), (900, 901));
        }
    });
}

#[test]
fn what_waits_for_a_context_is_nothing_to_captures_in_another() {
    alone("what_waits_for_a_context_is_nothing_to_captures_in_another", &[], || {
        let (other_gpu, primary, mut created) = (start_on(1), start_on(0), null_mut());
        ok!(cuCtxCreate_v4(&mut created, null_mut(), 0, 0));
        ok!(cuCtxSetCurrent(primary));
        let (stream, mut graph) = (stream(), null_mut());
        for mode in MODES {
            for elsewhere in [other_gpu, created] {
                ok!(cuStreamBeginCapture_v2(stream, mode));
                ok!(cuCtxSetCurrent(elsewhere));
                let mut event = null_mut();
                ok!(cuEventCreate(&mut event, 2));
                ok!(cuCtxSynchronize());
                ok!(cuCtxRecordEvent(elsewhere, event));
                ok!(cuCtxWaitEvent(elsewhere, event));
                ok!(cuCtxSetCurrent(primary));
                ok!(cuStreamEndCapture(stream, &mut graph));
            }
        }
        ok!(cuCtxSynchronize());
    });
}

#[test]
fn a_free_breaks_global_captures_of_all_threads_and_no_relaxed_one() {
    alone("a_free_breaks_global_captures_of_all_threads_and_no_relaxed_one", &[], || {
        let (context, stream, mut graph) = (start_on(0) as usize, stream(), null_mut());
        let (first, second) = (allocate(4 << 20), allocate(4 << 20));
        ok!(cuStreamBeginCapture_v2(stream, MODES[2]));
        ok!(cuMemFree_v2(first));
        ok!(cuStreamEndCapture(stream, &mut graph));
        ok!(cuStreamBeginCapture_v2(stream, MODES[0]));
        let elsewhere = move || {
            ok!(cuCtxSetCurrent(context as CUcontext));
            cu!(cuMemFree_v2(second))
        };
        assert_eq!(std::thread::spawn(elsewhere).join().unwrap(), 900);
        assert_eq!(cu!(cuStreamEndCapture(stream, &mut graph)), 901);
        ok!(cuMemFree_v2(second));
    });
}

#[test]
fn asking_about_an_event_breaks_a_global_capture_unless_the_thread_is_relaxed() {
    alone("asking_about_an_event_breaks_a_global_capture_unless_the_thread_is_relaxed", &[], || {
        let context = start_on(0);
        let mut event = null_mut();
        ok!(cuEventCreate(&mut event, 2));
        ok!(cuCtxRecordEvent(context, event));
        let (context, event) = (context as usize, event as usize);
        for captured in MODES {
            for asking in MODES {
                let stream = stream();
                let mut graph = null_mut();
                ok!(cuStreamBeginCapture_v2(stream, captured));
                let asked = std::thread::spawn(move || {
                    let mut mode = asking;
                    ok!(cuCtxSetCurrent(context as CUcontext));
                    ok!(cuThreadExchangeStreamCaptureMode(&mut mode));
                    cu!(cuEventQuery(event as CUevent))
                });
                let asked = asked.join().unwrap_or(-1);
                let breaks = captured == MODES[0] && asking == MODES[0];
                assert_eq!(asked, if breaks { 900 } else { 0 }, "{captured:?}, asked in {asking:?}");
                assert_eq!(cu!(cuStreamEndCapture(stream, &mut graph)), if breaks { 901 } else { 0 });
                ok!(cuStreamDestroy_v2(stream));
            }
        }
    });
}

#[test]
fn on_a_relaxed_thread_memory_comes_and_goes_in_every_capture_and_frees_wait() {
    alone("on_a_relaxed_thread_memory_comes_and_goes_in_every_capture_and_frees_wait", &[], || {
        let context = start_on(0) as usize;
        let (wait_flag, busy, flag) = (function(c"wait_flag") as usize, stream() as usize, pinned_flag() as usize);
        let on_thread = move |relaxed: bool| {
            let (mut mode, mut block, mut memory) = (MODES[2], 0, null_mut());
            ok!(cuCtxSetCurrent(context as CUcontext));
            if relaxed {
                ok!(cuThreadExchangeStreamCaptureMode(&mut mode));
            }
            let made = (cu!(cuMemAlloc_v2(&mut block, 4096)), cu!(cuMemHostAlloc(&mut memory, 4096, 0)));
            let memory = memory as usize;
            let frees: [&dyn Fn() -> i32; 2] =
                [&|| cu!(cuMemFree_v2(block)), &|| cu!(cuMemFreeHost(memory as *mut std::ffi::c_void))];
            for free in frees.into_iter().filter(|_| made == (0, 0)) {
                // SAFETY: a live pinned word, which no kernel reads now.
                unsafe { std::sync::atomic::AtomicU32::from_ptr(flag as *mut u32) }
                    .store(0, std::sync::atomic::Ordering::Release);
                assert_eq!(launch(wait_flag as CUfunction, busy as CUstream, &mut [flag as u64]), 0);
                let raiser = std::thread::spawn(move || {
                    (0..2000).for_each(|_| std::thread::yield_now());
                    raise(flag);
                });
                assert_eq!(free(), 0);
                assert!(!lowered(flag as *mut u32), "the free waits for the kernel");
                raiser.join().unwrap();
            }
            if relaxed {
                ok!(cuThreadExchangeStreamCaptureMode(&mut mode));
            }
            made
        };
        for captured in MODES {
            for (relaxed, own) in [(false, false), (false, true), (true, false), (true, true)] {
                let (stream, mut graph) = (stream(), null_mut());
                ok!(cuStreamBeginCapture_v2(stream, captured));
                let made = if own {
                    on_thread(relaxed)
                } else {
                    std::thread::spawn(move || on_thread(relaxed)).join().unwrap()
                };
                let breaks = !relaxed && (captured == MODES[0] || captured == MODES[1] && own);
                let what = format!("{captured:?}, relaxed {relaxed}, on its own thread {own}");
                assert_eq!(made, if breaks { (900, 900) } else { (0, 0) }, "{what}");
                assert_eq!(cu!(cuStreamEndCapture(stream, &mut graph)), if breaks { 901 } else { 0 }, "{what}");
                ok!(cuStreamDestroy_v2(stream));
            }
        }
    });
}

#[test]
fn an_event_of_a_context_stands_for_all_of_its_streams() {
    alone("an_event_of_a_context_stands_for_all_of_its_streams", &[], || {
        let context = start_on(0);
        let (held, later, flag, mut event) = (stream(), stream(), pinned_flag(), null_mut());
        raise_in_the_end(flag as usize);
        ok!(cuEventCreate(&mut event, 2));
        ok!(cuCtxRecordEvent(context, event));
        ok!(cuEventQuery(event));
        assert_eq!(launch(function(c"wait_flag"), held, &mut [flag as u64]), 0);
        ok!(cuCtxRecordEvent(context, event));
        assert_eq!(cu!(cuEventQuery(event)), 600);
        ok!(cuCtxWaitEvent(context, event));
        let block = allocate(4096);
        assert_eq!(launch(function(c"fill_u32"), later, &mut [block, 4, 7]), 0);
        assert_eq!(cu!(cuStreamQuery(later)), 600, "it waits for what the event stands for");
        raise(flag as usize);
        ok!(cuEventSynchronize(event));
        ok!(cuStreamQuery(held));
        ok!(cuStreamSynchronize(later));
        assert_eq!(read(block), 7);
        let other = start_on(1);
        assert_eq!(cu!(cuCtxRecordEvent(other, event)), 400, "of another context");
        assert_eq!(cu!(cuEventRecord(event, null_mut())), 400);
    });
}

/// A green context of 16 multiprocessors of GPU 0, and its `CUcontext`.
fn green() -> (CUgreenCtx, CUcontext) {
    // SAFETY: a structure of integers, for which zero is a value.
    let (mut all, mut part): (CUdevResource, CUdevResource) = unsafe { std::mem::zeroed() };
    let (mut groups, mut desc, mut green, mut context) = (1, null_mut(), null_mut(), null_mut());
    let kind = CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
    ok!(cuDeviceGetDevResource(0, &mut all, kind));
    ok!(cuDevSmResourceSplitByCount(&mut part, &mut groups, &all, null_mut(), 0, 16));
    ok!(cuDevResourceGenerateDesc(&mut desc, &mut part, 1));
    ok!(cuGreenCtxCreate(&mut green, desc, 0, 1));
    ok!(cuCtxFromGreenCtx(&mut context, green));
    (green, context)
}

fn primary_is_active() -> bool {
    let (mut flags, mut active) = (0, -1);
    ok!(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
    active == 1
}

#[test]
fn multiprocessors_are_split_as_documented() {
    alone("multiprocessors_are_split_as_documented", &[], || {
        ok!(cuInit(0));
        let kind = CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        // SAFETY: structures of integers, for which zero is a value.
        let (mut all, mut rest, mut parts): (CUdevResource, CUdevResource, [CUdevResource; 4]) =
            unsafe { std::mem::zeroed() };
        // SAFETY: the one member of the union that these calls write.
        let size = |resource: &CUdevResource| unsafe { resource.__bindgen_anon_1.sm.smCount };
        ok!(cuDeviceGetDevResource(0, &mut all, kind));
        assert_eq!(size(&all), 132);
        let mut groups = 0;
        ok!(cuDevSmResourceSplitByCount(null_mut(), &mut groups, &all, null_mut(), 0, 20));
        assert_eq!(groups, 5, "of 24 each");
        groups = 4;
        ok!(cuDevSmResourceSplitByCount(parts.as_mut_ptr(), &mut groups, &all, &mut rest, 0, 20));
        assert_eq!((groups, parts.each_ref().map(size), size(&rest)), (4, [24; 4], 36));
        assert_eq!(cu!(cuDevSmResourceSplitByCount(parts.as_mut_ptr(), &mut groups, &all, &mut rest, 0, 200)), 915);
        let mut desc = null_mut();
        ok!(cuDevResourceGenerateDesc(&mut desc, parts.as_mut_ptr(), 2));
        let mut mixed = [parts[0], all];
        assert_eq!(cu!(cuDevResourceGenerateDesc(&mut desc, mixed.as_mut_ptr(), 2)), 915);
        let (mut green, mut context) = (null_mut(), null_mut());
        assert_eq!(cu!(cuGreenCtxCreate(&mut green, desc, 0, 0)), 1, "the flag is required");
        assert_eq!(cu!(cuGreenCtxCreate(&mut green, desc, 1, 1)), 1, "another GPU's");
        ok!(cuGreenCtxCreate(&mut green, desc, 0, 1));
        ok!(cuGreenCtxGetDevResource(green, &mut all, kind));
        assert_eq!(size(&all), 48);
        ok!(cuCtxFromGreenCtx(&mut context, green));
        ok!(cuCtxGetDevResource(context, &mut all, kind));
        assert_eq!(size(&all), 48);
    });
}

#[test]
fn a_green_context_keeps_the_primary_one_and_its_memory_outlives_it() {
    alone("a_green_context_keeps_the_primary_one_and_its_memory_outlives_it", &[], || {
        let primary = start_on(0);
        let (green, derived) = green();
        assert_ne!(derived, primary);
        let mut again = null_mut();
        ok!(cuCtxFromGreenCtx(&mut again, green));
        assert_eq!(again, derived);
        ok!(cuCtxSetCurrent(derived));
        let (block, before) = (allocate(64 << 20), used(0));
        let mut own = null_mut();
        ok!(cuGreenCtxStreamCreate(&mut own, green, 1, 0));
        assert_eq!(launch(function(c"fill_u32"), own, &mut [block, 16, 9]), 0);
        ok!(cuStreamSynchronize(own));
        assert_eq!(read(block), 9);
        let (mut context, mut of) = (null_mut(), null_mut());
        ok!(cuStreamGetCtx_v2(own, &mut context, &mut of));
        assert_eq!((context, of), (primary, green));
        ok!(cuStreamGetGreenCtx(own, &mut of));
        assert_eq!(of, green);
        assert_eq!(cu!(cuCtxDestroy_v2(derived)), 201, "it is not the program's to destroy");
        ok!(cuDevicePrimaryCtxRelease_v2(0));
        assert!(primary_is_active(), "the green context retains it");
        ok!(cuGreenCtxDestroy(green));
        assert!(!primary_is_active() && used(0) == 0, "nobody retains it any more: {}", used(0));

        // With the primary context retained, memory stays.
        start_on(0);
        let (green, derived) = self::green();
        ok!(cuCtxPushCurrent_v2(derived));
        let block = allocate(64 << 20);
        ok!(cuCtxPopCurrent_v2(&mut context));
        ok!(cuGreenCtxDestroy(green));
        assert_eq!(used(0), before);
        ok!(cuMemsetD32_v2(block, 3, 4));
        assert_eq!(read(block), 3);
        ok!(cuMemFree_v2(block));
        assert_eq!(cu!(cuMemFree_v2(block)), 1);
    });
}

#[test]
fn a_green_context_that_was_destroyed_answers_with_errors() {
    alone("a_green_context_that_was_destroyed_answers_with_errors", &[], || {
        let primary = start_on(0);
        let (green, derived) = green();
        let (mut own, mut event, mut graph, mut context, mut number) =
            (null_mut(), null_mut(), null_mut(), null_mut(), 0);
        ok!(cuEventCreate(&mut event, 2));
        ok!(cuGreenCtxStreamCreate(&mut own, green, 1, 0));
        ok!(cuCtxSetCurrent(derived));
        ok!(cuStreamBeginCapture_v2(own, MODES[0]));
        assert_eq!(cu!(cuGreenCtxRecordEvent(green, event)), 900);
        assert_eq!(cu!(cuStreamEndCapture(own, &mut graph)), 901);
        ok!(cuStreamBeginCapture_v2(own, MODES[0]));
        ok!(cuGreenCtxDestroy(green));
        // The green context's own capture ended with it.
        assert_eq!(cu!(cuMemAlloc_v2(&mut number, 4096)), 709);
        assert_eq!((cu!(cuCtxSynchronize()), cu!(cuCtxSetCurrent(derived))), (709, 201));
        ok!(cuCtxSetCurrent(primary));
        ok!(cuMemAlloc_v2(&mut number, 4096));
        let answers = [
            cu!(cuStreamQuery(own)),
            cu!(cuStreamSynchronize(own)),
            cu!(cuStreamDestroy_v2(own)),
            cu!(cuMemsetD32Async(number, 1, 4, own)),
        ];
        assert_eq!(answers, [709; 4], "as documented for CUDA 13.0");
        let answers = [
            cu!(cuCtxFromGreenCtx(&mut context, green)),
            cu!(cuGreenCtxDestroy(green)),
            cu!(cuGreenCtxStreamCreate(&mut own, green, 1, 0)),
            cu!(cuGreenCtxRecordEvent(green, event)),
            cu!(cuGreenCtxWaitEvent(green, event)),
        ];
        assert_eq!(answers, [201; 5]);
    });
}

#[test]
fn the_primary_context_waits_for_its_green_ones() {
    alone("the_primary_context_waits_for_its_green_ones", &[], || {
        let primary = start_on(0);
        let (green, derived) = green();
        let (mut own, mut event, flag) = (null_mut(), null_mut(), pinned_flag());
        raise_in_the_end(flag as usize);
        ok!(cuEventCreate(&mut event, 2));
        ok!(cuGreenCtxStreamCreate(&mut own, green, 1, 0));
        ok!(cuCtxSetCurrent(derived));
        assert_eq!(launch(function(c"wait_flag"), own, &mut [flag as u64]), 0);
        ok!(cuCtxSetCurrent(primary));
        ok!(cuCtxRecordEvent(primary, event));
        assert_eq!(cu!(cuEventQuery(event)), 600);
        let block = allocate(4096);
        let raiser = std::thread::spawn({
            let flag = flag as usize;
            move || raise(flag)
        });
        // The memory is the primary context's, so a free waits for its green ones too.
        ok!(cuMemFree_v2(block));
        ok!(cuStreamQuery(own));
        raiser.join().unwrap();
        ok!(cuEventQuery(event));
        // SAFETY: a live pinned word.
        unsafe { flag.write_volatile(0) };
        assert_eq!(launch(function(c"wait_flag"), own, &mut [flag as u64]), 0);
        let raiser = std::thread::spawn({
            let flag = flag as usize;
            move || raise(flag)
        });
        ok!(cuCtxSynchronize());
        ok!(cuStreamQuery(own));
        raiser.join().unwrap();
        // Not the other way round.
        let work = stream();
        // SAFETY: a live pinned word.
        unsafe { flag.write_volatile(0) };
        assert_eq!(launch(function(c"wait_flag"), work, &mut [flag as u64]), 0);
        ok!(cuCtxSetCurrent(derived));
        ok!(cuCtxSynchronize());
        assert!(lowered(flag) && cu!(cuStreamQuery(work)) == 600, "the green context waited for the primary one");
        raise(flag as usize);
        ok!(cuCtxSetCurrent(primary));
        ok!(cuCtxSynchronize());
        // A reset is refused as long as there is a part.
        assert_eq!(cu!(cuDevicePrimaryCtxReset_v2(0)), 800);
        assert!(primary_is_active());
        ok!(cuGreenCtxDestroy(green));
        ok!(cuDevicePrimaryCtxReset_v2(0));
        assert!(!primary_is_active());
    });
}

#[test]
fn after_a_reset_the_old_context_is_dead_and_its_memory_gone() {
    alone("after_a_reset_the_old_context_is_dead_and_its_memory_gone", &[], || {
        let before = start_on(0);
        let (old, mut block, mut base, mut bytes, mut pinned) = (allocate(64 << 20), 0, 0, 0, null_mut());
        ok!(cuDevicePrimaryCtxReset_v2(0));
        assert!(!primary_is_active() && used(0) == 0);
        let answers = [
            cu!(cuMemAlloc_v2(&mut block, 4096)),
            cu!(cuMemAllocPitch_v2(&mut block, &mut bytes, 64, 64, 4)),
            cu!(cuMemAllocManaged(&mut block, 4096, 1)),
            cu!(cuMemHostAlloc(&mut pinned, 4096, 0)),
            cu!(cuMemGetInfo_v2(&mut bytes, &mut bytes.clone())),
            cu!(cuMemGetAddressRange_v2(&mut base, &mut bytes, old)),
            cu!(cuMemFree_v2(old)),
            cu!(cuMemcpyDtoH_v2((&raw mut base).cast(), old, 4)),
            cu!(cuCtxSynchronize()),
        ];
        assert_eq!(answers, [709; 9]);
        let mut after = null_mut();
        ok!(cuDevicePrimaryCtxRetain(&mut after, 0));
        assert_eq!(after, before, "the same handle");
        // The handle that stayed current is the new life's.
        ok!(cuCtxSynchronize());
        assert_eq!(cu!(cuMemFree_v2(old)), 1);
        ok!(cuMemFree_v2(allocate(64 << 20)));
        ok!(cuCtxSetCurrent(null_mut()));
        assert_eq!(cu!(cuMemGetAddressRange_v2(&mut base, &mut bytes, old)), 201);
        assert_eq!(cu!(cuMemAlloc_v2(&mut block, 4096)), 201);
    });
}

#[test]
fn a_capture_ends_with_its_context_or_its_stream() {
    alone("a_capture_ends_with_its_context_or_its_stream", &[], || {
        let keeper = start_on(1);
        let allocates = || {
            let mut block = 0;
            cu!(cuMemAlloc_v2(&mut block, 4096))
        };
        let destroyed: [fn(CUcontext); 2] =
            [|context| ok!(cuCtxDestroy_v2(context)), |context| ok!(cuCtxDetach(context))];
        for end in destroyed {
            let mut context = null_mut();
            ok!(cuCtxCreate_v4(&mut context, null_mut(), 0, 0));
            ok!(cuStreamBeginCapture_v2(stream(), MODES[0]));
            assert_eq!(allocates(), 900);
            end(context);
            ok!(cuCtxSetCurrent(keeper));
            assert_eq!(allocates(), 0);
        }
        let primary = start_on(0);
        let (first, mut graph) = (stream(), null_mut());
        ok!(cuStreamBeginCapture_v2(first, MODES[0]));
        ok!(cuDevicePrimaryCtxReset_v2(0));
        ok!(cuCtxSetCurrent(keeper));
        assert_eq!(allocates(), 0);
        assert_ne!(cu!(cuStreamEndCapture(first, &mut graph)), 0);
        assert_eq!(start_on(0), primary);
        let first = stream();
        ok!(cuStreamBeginCapture_v2(first, MODES[0]));
        assert_eq!(cu!(cuStreamBeginCapture_v2(first, MODES[0])), 401, "it captures already");
        ok!(cuStreamDestroy_v2(first));
        assert_eq!(allocates(), 0);
    });
}

#[test]
fn a_primary_context_s_handle_is_good_between_its_lives_and_a_created_one_s_is_used_again() {
    alone("a_primary_context_s_handle_is_good_between_its_lives_and_a_created_one_s_is_used_again", &[], || {
        let (mut again, mut other, mut address) = (null_mut(), null_mut(), 0);
        let (mut first, mut second) = (0, 0);
        let primary = start_on(0);
        ok!(cuCtxGetId(null_mut(), &mut first));
        ok!(cuDevicePrimaryCtxReset_v2(0));
        assert_eq!((cu!(cuCtxGetId(null_mut(), &mut second)), cu!(cuMemAlloc_v2(&mut address, 4096))), (709, 709));
        assert_eq!((cu!(cuCtxGetId(primary, &mut second)), cu!(cuDevicePrimaryCtxRelease_v2(0))), (709, 0));
        ok!(cuCtxSetCurrent(primary));
        ok!(cuDevicePrimaryCtxRetain(&mut again, 0));
        assert_eq!(primary, again);
        ok!(cuCtxGetId(null_mut(), &mut second));
        assert_ne!(first, second);
        ok!(cuMemAlloc_v2(&mut address, 4096));

        ok!(cuCtxCreate_v4(&mut other, null_mut(), 0, 0));
        ok!(cuCtxGetId(other, &mut first));
        ok!(cuCtxDestroy_v2(other));
        assert_eq!(cu!(cuCtxGetId(other, &mut second)), 709);
        ok!(cuCtxCreate_v4(&mut again, null_mut(), 0, 0));
        assert_eq!(other, again, "not always on a real driver, but often");
        ok!(cuCtxGetId(again, &mut second));
        assert_ne!(first, second);
    });
}

#[test]
fn to_push_a_context_that_was_destroyed_ends_the_process() {
    const NAME: &str = "to_push_a_context_that_was_destroyed_ends_the_process";
    for kind in ["created", "green"] {
        let push = || {
            let primary = start_on(0);
            let mut context = null_mut();
            if std::env::var("KIND").as_deref() == Ok("green") {
                let green;
                (green, context) = self::green();
                ok!(cuGreenCtxDestroy(green));
            } else {
                ok!(cuCtxCreate_v4(&mut context, null_mut(), 0, 0));
                ok!(cuCtxDestroy_v2(context));
            }
            ok!(cuCtxSetCurrent(primary));
            ok!(cuCtxPushCurrent_v2(context));
        };
        aborts(NAME, &[("KIND", kind)], push, |violations| {
            assert_eq!(violations.len(), 1, "{violations:#?}");
            assert!(violations[0].starts_with("cuCtxPushCurrent of 0x"), "{}", violations[0]);
        });
    }
}
