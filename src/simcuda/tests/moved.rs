//! What a driver may punish when memory is exchanged behind addresses that stay: mappings that are read while something is written
//! through another one, graphs whose operands lie elsewhere, memory that lost its data.

#![allow(clippy::macro_metavars_in_unsafe, reason = "the macro is there to make the one unsafe call")]

mod common;

use common::*;
use cudarc::driver::sys::*;
use std::ptr::null_mut;

const WORDS: u64 = CHUNK as u64 / 4;
const ECC_UNCORRECTABLE: i32 = 214;

/// The same memory mapped twice, for GPU 0.
fn mapped_twice() -> (u64, u64) {
    let (space, handle) = (reserve(2 * CHUNK), create(0, CHUNK));
    for at in [space, space + CHUNK as u64] {
        ok!(cuMemMap(at, CHUNK, 0, handle, 0));
        assert_eq!(grant(at, CHUNK, &[0]), 0);
    }
    (space, space + CHUNK as u64)
}

fn counter() -> u64 {
    let mut block = 0;
    ok!(cuMemAlloc_v2(&mut block, 8));
    ok!(cuMemsetD8_v2(block, 0, 8));
    block
}

/// Starts a kernel that reads until the flag is raised, and waits until it runs.
fn check_until(stream: CUstream, at: u64, flag: *mut u32, wrong: u64) {
    let function = function(c"check_until_u32");
    raise_in_the_end(flag as usize);
    assert_eq!(launch(function, stream, &mut [at, 16, 5, flag as u64, 30_000_000_000, wrong]), 0);
    until_it_runs(flag);
}

/// A kernel writes the word behind its flag when it runs.
fn until_it_runs(flag: *mut u32) {
    // SAFETY: the second word of a live pinned page; the kernel writes it atomically, too.
    let runs = unsafe { std::sync::atomic::AtomicU32::from_ptr(flag.add(1)) };
    while runs.load(std::sync::atomic::Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn what_is_written_through_one_mapping_is_not_for_who_already_reads_through_another() {
    alone("what_is_written_through_one_mapping_is_not_for_who_already_reads_through_another", &[], || {
        start_on(0);
        let (near, alias) = mapped_twice();
        let (reader, writer) = (stream(), stream());
        // Complete, and then read through the other mapping: by a grid that begins afterwards, and by a copy.
        assert_eq!(launch(function(c"iota_u32"), writer, &mut [near, WORDS, 5]), 0);
        ok!(cuStreamSynchronize(writer));
        let mut target = 0;
        ok!(cuMemAlloc_v2(&mut target, CHUNK));
        ok!(cuMemcpyDtoDAsync_v2(target, alias, CHUNK, reader));
        ok!(cuStreamSynchronize(reader));
        let wrong = counter();
        for at in [near, alias, target] {
            assert_eq!(launch(function(c"check_iota_u32"), reader, &mut [at, WORDS, 5, wrong]), 0);
        }
        ok!(cuStreamSynchronize(reader));
        assert_eq!(read(wrong), 0);
        // The same words again: a grid that is there sees none of them through the other mapping.
        let flag = pinned_flag();
        check_until(reader, near, flag, wrong);
        assert_eq!(read(wrong), 0);
        ok!(cuMemcpyDtoDAsync_v2(alias, target, CHUNK, writer));
        ok!(cuStreamSynchronize(writer));
        // It looks once more for certain, or ends by itself after half a minute.
        while read(wrong) == 0 && cu!(cuStreamQuery(reader)) == 600 {
            std::thread::yield_now();
        }
        raise(flag as usize);
        ok!(cuStreamSynchronize(reader));
        assert_ne!(read(wrong), 0);
        // Through its own mapping it does, and who begins later does through either.
        let (wrong, flag) = (counter(), pinned_flag());
        check_until(reader, near, flag, wrong);
        ok!(cuMemcpyDtoDAsync_v2(near, target, CHUNK, writer));
        ok!(cuStreamSynchronize(writer));
        raise(flag as usize);
        ok!(cuStreamSynchronize(reader));
        for at in [near, alias] {
            assert_eq!(launch(function(c"check_iota_u32"), reader, &mut [at, WORDS, 5, wrong]), 0);
        }
        ok!(cuStreamSynchronize(reader));
        assert_eq!(read(wrong), 0);
    });
}

#[test]
fn a_grid_that_began_before_a_write_follows_no_pointer_that_it_brought() {
    alone("a_grid_that_began_before_a_write_follows_no_pointer_that_it_brought", &[], || {
        start_on(0);
        let (near, alias) = mapped_twice();
        let (reader, writer, flag, out) = (stream(), stream(), pinned_flag(), counter());
        ok!(cuMemcpyHtoD_v2(near, [0_u64, 7].as_ptr().cast(), 16));
        raise_in_the_end(flag as usize);
        assert_eq!(launch(function(c"sum_list_u64"), reader, &mut [near, out, flag as u64]), 0);
        let mut pinned = null_mut();
        ok!(cuMemHostAlloc(&mut pinned, 4096, 0));
        // SAFETY: two words of a live page that nobody else uses.
        unsafe { pinned.cast::<[u64; 2]>().write([0, 7]) };
        ok!(cuMemcpyHtoDAsync_v2(alias, pinned, 16, writer));
        ok!(cuStreamSynchronize(writer));
        raise(flag as usize);
        // It reads a next node that nobody wrote.
        assert_eq!(cu!(cuStreamSynchronize(reader)), 700);
    });
}

#[test]
fn a_copy_out_beside_a_kernel_that_writes_brings_what_nobody_wrote() {
    alone("a_copy_out_beside_a_kernel_that_writes_brings_what_nobody_wrote", &[], || {
        start_on(0);
        let (near, alias) = mapped_twice();
        let (kernels, copies, mut target) = (stream(), stream(), 0);
        ok!(cuMemAlloc_v2(&mut target, CHUNK));
        let copied = || {
            ok!(cuMemcpyDtoDAsync_v2(target, alias, CHUNK, copies));
            ok!(cuStreamSynchronize(copies));
            read(target)
        };
        let (fill, flag) = (function(c"fill_u32"), pinned_flag());
        // The fills write what is there already, so that nothing but incoherence can be seen.
        assert_eq!(launch(fill, kernels, &mut [near, WORDS, 3]), 0);
        ok!(cuStreamSynchronize(kernels));
        // The copy meets some of 1000 fills, or the last of them before it ends.
        assert_eq!(launch(function(c"wait_flag"), kernels, &mut [flag as u64]), 0);
        for _ in 0..1000 {
            assert_eq!(launch(fill, kernels, &mut [near, WORDS, 3]), 0);
        }
        raise(flag as usize);
        let mut met = false;
        while cu!(cuStreamQuery(kernels)) == 600 {
            met |= copied() != 3;
        }
        assert!(met, "no copy of all those beside 1000 fills was incoherent");
        assert_eq!(copied(), 3);
    });
}

/// A graph that fills `at`, made by its node.
fn fill_graph(context: CUcontext, at: u64) -> (CUgraph, CUgraphNode) {
    let (mut graph, mut node) = (null_mut(), null_mut());
    let params = fill_params(at);
    ok!(cuGraphCreate(&mut graph, 0));
    ok!(cuGraphAddMemsetNode(&mut node, graph, null_mut(), 0, &params, context));
    (graph, node)
}

fn fill_params(at: u64) -> CUDA_MEMSET_NODE_PARAMS {
    CUDA_MEMSET_NODE_PARAMS { dst: at, pitch: 0, value: 9, elementSize: 4, width: 16, height: 1 }
}

#[test]
fn executables_keep_to_the_gpu_that_their_operands_lay_on() {
    alone("executables_keep_to_the_gpu_that_their_operands_lay_on", &[], || {
        let context = start_on(0);
        let (at, stream) = (reserve(CHUNK), stream());
        place(at, 0, &[0, 1]);
        let (graph, node) = fill_graph(context, at);
        let mut executable = null_mut();
        ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        let launched = |executable| {
            ok!(cuMemsetD32_v2(at, 1, 16));
            ok!(cuGraphLaunch(executable, stream));
            ok!(cuStreamSynchronize(stream));
            read(at)
        };
        let exchanged = |device| {
            ok!(cuCtxSynchronize());
            ok!(cuMemUnmap(at, CHUNK));
            place(at, device, &[0, 1]);
        };
        let updated = |graph| {
            // SAFETY: a structure of integers and pointers, for which zero is a value.
            let mut info: CUgraphExecUpdateResultInfo = unsafe { std::mem::zeroed() };
            (cu!(cuGraphExecUpdate_v2(executable, graph, &mut info)), info.result as u32)
        };
        let set = || cu!(cuGraphExecMemsetNodeSetParams(executable, node, &fill_params(at), context));
        // Another chunk of the same GPU is nothing to it.
        exchanged(0);
        assert_eq!((updated(fill_graph(context, at).0), set(), launched(executable)), ((0, 0), 0, 9));
        // On another GPU or the host it replays, and is updated with its own graph (measured); not with what is made there.
        for device in [1, -1] {
            exchanged(device);
            assert_eq!((launched(executable), updated(graph)), (9, (0, 0)));
            assert_eq!((updated(fill_graph(context, at).0), set()), ((910, 5), 1));
            assert_eq!(launched(executable), 9);
            let mut again = null_mut();
            ok!(cuGraphInstantiateWithFlags(&mut again, fill_graph(context, at).0, 0));
            assert_eq!(launched(again), 9);
        }
        exchanged(0);
        assert_eq!((updated(fill_graph(context, at).0), set()), ((0, 0), 0));
        // Nodes of other graphs name nothing in it.
        let other = fill_graph(context, at).1;
        assert_eq!(cu!(cuGraphExecMemsetNodeSetParams(executable, other, &fill_params(at), context)), 1);
    });
}

#[test]
fn memory_that_lost_its_data_ends_the_context_that_copies_it() {
    alone("memory_that_lost_its_data_ends_the_context_that_copies_it", &[], || {
        let (second, first) = (start_on(1), start_on(0));
        let (space, handle, mut target) = (reserve(3 * CHUNK), create(1, CHUNK), 0);
        let chunk = |index: u64| space + index * CHUNK as u64;
        for index in [0, 1] {
            ok!(cuMemMap(chunk(index), CHUNK, 0, handle, 0));
            assert_eq!(grant(chunk(index), CHUNK, &[0, 1]), 0);
        }
        place(chunk(2), 1, &[0, 1]);
        ok!(cuMemAlloc_v2(&mut target, CHUNK));
        type Spoil = extern "C" fn(u64, u64) -> i32;
        // SAFETY: `int simcuda_spoil(uint64_t, uint64_t)`.
        let spoil = unsafe { std::mem::transmute::<*mut libc::c_void, Spoil>(symbol("simcuda_spoil")) };
        assert_eq!((spoil(chunk(0) + 4096, 4096), spoil(space + (3 * CHUNK) as u64, 8)), (0, 1));
        // What is beside it, and its mapping, are as before: evacuating the page is what ends the context.
        ok!(cuMemcpyDtoD_v2(target, chunk(2), CHUNK));
        ok!(cuMemcpyDtoD_v2(target, chunk(1), 4096));
        assert_eq!(read(chunk(1)), 0);
        ok!(cuMemcpyDtoDAsync_v2(target, chunk(1), CHUNK, null_mut()));
        assert_eq!((cu!(cuCtxSynchronize()), cu!(cuCtxSynchronize())), (ECC_UNCORRECTABLE, ECC_UNCORRECTABLE));
        assert_eq!(cu!(cuMemAlloc_v2(&mut target, 512)), ECC_UNCORRECTABLE, "a sticky error of {first:?}");
        // Another context is well until it touches the page.
        ok!(cuCtxSetCurrent(second));
        ok!(cuCtxSynchronize());
        assert_eq!(launch(function(c"fill_u32"), null_mut(), &mut [chunk(0), WORDS, 1]), 0);
        assert_eq!(cu!(cuCtxSynchronize()), ECC_UNCORRECTABLE);
    });
}

/// A word of GPU 1, to which GPU 0 adds 3 from before to after GPU 1 adds 5.
fn added_by_both() -> u32 {
    let (second, first) = (start_on(1), start_on(0));
    let (word, flag, held) = (reserve(CHUNK), pinned_flag(), stream());
    place(word, 1, &[0, 1]);
    raise_in_the_end(flag as usize);
    assert_eq!(launch(function(c"add_each_u32"), held, &mut [word, 1, 3, flag as u64]), 0);
    until_it_runs(flag);
    ok!(cuCtxSetCurrent(second));
    assert_eq!(launch(function(c"add_each_u32"), null_mut(), &mut [word, 1, 5, 0]), 0);
    ok!(cuCtxSynchronize());
    raise(flag as usize);
    ok!(cuCtxSetCurrent(first));
    ok!(cuStreamSynchronize(held));
    read(word)
}

#[test]
fn atomics_over_a_link_that_has_them_lose_nothing() {
    alone("atomics_over_a_link_that_has_them_lose_nothing", &[], || assert_eq!(added_by_both(), 8));
}

#[test]
fn atomics_over_a_link_without_them_lose_what_the_owner_adds_meanwhile() {
    let settings = [("SIMCUDA_LINK", "pcie")];
    alone("atomics_over_a_link_without_them_lose_what_the_owner_adds_meanwhile", &settings, || {
        assert_eq!(added_by_both(), 3);
    });
}

#[test]
fn page_tables_take_memory_until_the_unmap() {
    const EACH: u64 = 64 << 10;
    let settings = [("SIMCUDA_GPUS", "2x64MiB"), ("SIMCUDA_CONTEXT_MIB", "1"), ("SIMCUDA_PAGE_TABLES", "65536")];
    alone("page_tables_take_memory_until_the_unmap", &settings, || {
        start_on(0);
        let (space, handle, before) = (reserve(4 * CHUNK), create(1, 2 * CHUNK), [used(0), used(1)]);
        let tables = || [0, 1].map(|device| (used(device) - before[device as usize]) / EACH);
        for at in [space, space + 2 * CHUNK as u64] {
            ok!(cuMemMap(at, 2 * CHUNK, 0, handle, 0));
        }
        assert_eq!(tables(), [0, 0]);
        assert_eq!(grant(space, 4 * CHUNK, &[0]), 0);
        assert_eq!((grant(space, 2 * CHUNK, &[0, 1]), tables()), (0, [4, 2]));
        ok!(cuMemUnmap(space, 2 * CHUNK));
        assert_eq!(tables(), [2, 0]);
        // The whole GPU is taken: nothing is mapped for it any more, until something is given back.
        let last = create(0, ((64 << 20) - used(0) as usize) & !(CHUNK - 1));
        ok!(cuMemMap(space, 2 * CHUNK, 0, handle, 0));
        let mut plain = Vec::new();
        loop {
            let mut block = 0;
            match cu!(cuMemAlloc_v2(&mut block, CHUNK)) {
                0 => plain.push(block),
                code => break assert_eq!(code, 2),
            }
        }
        let room = ((64 << 20) - used(0)) / EACH;
        let filler = reserve(64 * CHUNK);
        for index in 0..room {
            let at = filler + index * CHUNK as u64;
            let small = create(1, CHUNK);
            ok!(cuMemMap(at, CHUNK, 0, small, 0));
            ok!(cuMemRelease(small));
            assert_eq!(grant(at, CHUNK, &[0]), 0);
        }
        assert_eq!(grant(space, 2 * CHUNK, &[0]), 2, "no page table");
        ok!(cuMemRelease(last));
        assert_eq!(grant(space, 2 * CHUNK, &[0]), 0);
    });
}
