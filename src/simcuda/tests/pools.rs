//! Stream-ordered allocation and the pools behind it.

#![allow(clippy::macro_metavars_in_unsafe, reason = "the macro is there to make the one unsafe call")]

mod common;

use common::*;
use cudarc::driver::sys::*;
use std::ptr::null_mut;

const MIB: u64 = 1 << 20;

use CUmemPool_attribute_enum::*;

fn read_attribute(pool: CUmemoryPool, attribute: CUmemPool_attribute_enum) -> u64 {
    let mut value = 0_u64;
    ok!(cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()));
    value
}

fn set_attribute(pool: CUmemoryPool, attribute: CUmemPool_attribute_enum, mut value: u64) {
    ok!(cuMemPoolSetAttribute(pool, attribute, (&raw mut value).cast()));
}

/// Reserved and used bytes.
fn held(pool: CUmemoryPool) -> (u64, u64) {
    (read_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), read_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT))
}

fn default_pool(device: i32) -> CUmemoryPool {
    let mut pool = null_mut();
    ok!(cuDeviceGetDefaultMemPool(&mut pool, device));
    pool
}

fn make_pool(change: impl FnOnce(&mut CUmemPoolProps)) -> CUmemoryPool {
    // SAFETY: a structure of integers, for whose enumerations zero is a member.
    let mut props: CUmemPoolProps = unsafe { std::mem::zeroed() };
    props.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    change(&mut props);
    let mut pool = null_mut();
    ok!(cuMemPoolCreate(&mut pool, &props));
    pool
}

fn take(bytes: u64, stream: CUstream) -> u64 {
    let mut address = 0;
    ok!(cuMemAllocAsync(&mut address, bytes as usize, stream));
    address
}

fn give(address: u64, stream: CUstream) -> i32 {
    cu!(cuMemFreeAsync(address, stream))
}

#[test]
fn a_pool_gives_back_beyond_its_threshold_when_a_stream_is_waited_for() {
    alone("a_pool_gives_back_beyond_its_threshold_when_a_stream_is_waited_for", &[], || {
        start_on(0);
        let (stream, pool, before) = (stream(), default_pool(0), used(0));
        let block = take(MIB, stream);
        assert_eq!((held(pool), used(0) - before), ((32 * MIB, MIB), 32 * MIB));
        ok!(cuMemsetD32Async(block, 7, 100, stream));
        assert_eq!(give(block, stream), 0);
        ok!(cuStreamSynchronize(stream));
        assert_eq!((held(pool), used(0)), ((0, 0), before));

        set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX);
        assert_eq!(give(take(40 * MIB, stream), stream), 0);
        ok!(cuStreamSynchronize(stream));
        assert_eq!((held(pool), used(0) - before), ((64 * MIB, 0), 64 * MIB), "kept");
        let high = [CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, CU_MEMPOOL_ATTR_USED_MEM_HIGH];
        assert_eq!(high.map(|attribute| read_attribute(pool, attribute)), [64 * MIB, 40 * MIB]);
        high.into_iter().for_each(|attribute| set_attribute(pool, attribute, 0));
        assert_eq!(high.map(|attribute| read_attribute(pool, attribute)), [64 * MIB, 0]);
        let block = take(MIB, stream);
        ok!(cuMemPoolTrimTo(pool, 0));
        assert_eq!(held(pool).0, 64 * MIB, "part of the chunk is in use");
        assert_eq!(give(block, stream), 0);
        ok!(cuStreamSynchronize(stream));
        ok!(cuMemPoolTrimTo(pool, 0));
        assert_eq!((held(pool), used(0)), ((0, 0), before));
    });
}

#[test]
fn what_no_machine_has_is_out_of_memory() {
    alone("what_no_machine_has_is_out_of_memory", &[], || {
        start_on(0);
        let (stream, own, mut graph) = (stream(), make_pool(|_| ()), null_mut());
        let limited = make_pool(|props| props.maxSize = 64 << 20);
        let pools = [default_pool(0), own, limited];
        // Each pool has a chunk with room in it.
        let blocks = pools.map(|pool| {
            let mut block = 0;
            ok!(cuMemAllocFromPoolAsync(&mut block, 4096, pool, stream));
            block
        });
        let sizes = [usize::MAX, usize::MAX - 511, usize::MAX - (2 << 20) + 1, 1 << 62, 1 << 50];
        for bytes in sizes {
            for pool in pools {
                let mut block = 7;
                assert_eq!(cu!(cuMemAllocFromPoolAsync(&mut block, bytes, pool, stream)), 2, "{bytes:#x}");
                assert_eq!(block, 0);
            }
            let mut block = 7;
            assert_eq!(cu!(cuMemAlloc_v2(&mut block, bytes)), 2, "{bytes:#x}");
            assert_eq!(cu!(cuMemAllocManaged(&mut block, bytes, 1)), 2, "{bytes:#x}");
            assert_eq!(cu!(cuMemHostAlloc((&raw mut block).cast(), bytes, 0)), 2, "{bytes:#x}");
        }
        ok!(cuStreamBeginCapture_v2(stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED));
        for bytes in sizes {
            let mut block = 7;
            assert_eq!(cu!(cuMemAllocAsync(&mut block, bytes, stream)), 2, "{bytes:#x}");
        }
        ok!(cuStreamEndCapture(stream, &mut graph));
        for block in blocks {
            assert_eq!(give(block, stream), 0);
        }
    });
}

#[test]
fn a_stream_has_its_freed_memory_again_before_it_gets_there() {
    alone("a_stream_has_its_freed_memory_again_before_it_gets_there", &[], || {
        start_on(0);
        let (first, second, flag) = (stream(), stream(), pinned_flag());
        let block = take(MIB, first);
        assert_eq!(launch(function(c"wait_flag"), first, &mut [flag as u64]), 0);
        assert_eq!(launch(function(c"fill_u32"), first, &mut [block, 100, 5]), 0);
        assert_eq!(give(block, first), 0);
        assert_eq!(give(block, first), 1, "twice");
        assert_ne!(take(MIB, second), block, "the other stream may be ahead");
        assert_eq!(take(MIB, first), block);
        raise(flag as usize);
        ok!(cuStreamSynchronize(first));
        assert_eq!(read(block), 5, "it was not freed after all");
        assert_eq!(give(block, first), 0);
        ok!(cuStreamSynchronize(first));
        assert_eq!(cu!(cuMemsetD8_v2(block, 0, 1)), 1);
    });
}

#[test]
fn what_may_be_freed_in_a_streams_order() {
    alone("what_may_be_freed_in_a_streams_order", &[], || {
        start_on(0);
        let (stream, mut plain, mut host) = (stream(), 0, null_mut());
        ok!(cuMemAlloc_v2(&mut plain, 4096));
        ok!(cuMemHostAlloc(&mut host, 4096, 0));
        assert_eq!((give(plain + 512, stream), give(plain, stream)), (1, 0));
        assert_eq!((give(host as u64, stream), give(0, stream)), (1, 0));
        let block = take(4096, stream);
        ok!(cuMemFree_v2(block));
        assert_eq!(give(block, stream), 1);
        let mut address = 9;
        assert_eq!((cu!(cuMemAllocAsync(&mut address, 0, stream)), address), (0, 0));
        let mut address = 9;
        assert_eq!((cu!(cuMemAllocAsync(&mut address, 1 << 40, stream)), address), (2, 0));
        assert_eq!(cu!(cuMemAllocAsync(null_mut(), 1, stream)), 1);
    });
}

#[test]
fn attributes_name_the_pool_and_no_context() {
    alone("attributes_name_the_pool_and_no_context", &[], || {
        start_on(0);
        let block = take(1000, stream()) + 10;
        use CUpointer_attribute::*;
        let ask = |attribute| {
            let mut value = 0_u64;
            ok!(cuPointerGetAttribute((&raw mut value).cast(), attribute, block));
            value
        };
        assert_eq!(ask(CU_POINTER_ATTRIBUTE_CONTEXT), 0);
        assert_eq!(ask(CU_POINTER_ATTRIBUTE_RANGE_SIZE), 1000);
        assert_eq!(ask(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE), default_pool(0) as u64);
        assert_eq!(ask(CU_POINTER_ATTRIBUTE_MAPPING_SIZE), 32 * MIB);
    });
}

#[test]
fn a_pool_may_be_limited_and_outlived_by_its_memory() {
    let small = [("SIMCUDA_GPUS", "1x1GiB"), ("SIMCUDA_CONTEXT_MIB", "512")];
    alone("a_pool_may_be_limited_and_outlived_by_its_memory", &small, || {
        start_on(0);
        let (stream, before) = (stream(), used(0));
        let pool = make_pool(|props| props.maxSize = 16 << 20);
        let from = |bytes| {
            let mut address = 0;
            (cu!(cuMemAllocFromPoolAsync(&mut address, bytes, pool, stream)), address)
        };
        assert_eq!(from(17 << 20).0, 2);
        let (code, block) = from(10 << 20);
        assert_eq!((code, from(7 << 20).0), (0, 2));
        ok!(cuMemPoolDestroy(pool));
        assert_eq!((cu!(cuMemPoolDestroy(pool)), from(1).0), (1, 1));
        ok!(cuMemsetD32Async(block, 3, 1, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(read(block), 3);
        assert_eq!(give(block, stream), 0);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(used(0), before);
        // A chunk as large as usual is taken only where there is room for it.
        let room = (1 << 30) - before;
        let mut plain = 0;
        ok!(cuMemAlloc_v2(&mut plain, (room - 4 * MIB) as usize));
        take(3 * MIB, stream);
        assert_eq!(cu!(cuMemAllocAsync(&mut plain, 2 << 20, stream)), 2);
    });
}

#[test]
fn the_current_pool_of_a_device_is_the_programs_choice() {
    alone("the_current_pool_of_a_device_is_the_programs_choice", &[], || {
        start_on(0);
        let pool = make_pool(|_| ());
        ok!(cuDeviceSetMemPool(0, pool));
        take(MIB, stream());
        assert_eq!((held(pool).1, held(default_pool(0)).1), (MIB, 0));
        assert_eq!(cu!(cuDeviceSetMemPool(1, pool)), 1, "of another device");
        // SAFETY: as in `make_pool`.
        let mut location: CUmemLocation = unsafe { std::mem::zeroed() };
        location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let (mut current, mut default) = (null_mut(), null_mut());
        let kind = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        ok!(cuMemGetMemPool(&mut current, &mut location, kind));
        ok!(cuMemGetDefaultMemPool(&mut default, &mut location, kind));
        assert_eq!((current, default), (pool, default_pool(0)));
    });
}

#[test]
fn an_exported_pool_shares_its_allocations() {
    alone("an_exported_pool_shares_its_allocations", &[], || {
        start_on(0);
        let fd = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let (stream, private) = (stream(), make_pool(|_| ()));
        let pool = make_pool(|props| props.handleTypes = fd);
        let mut descriptor = -1_i32;
        assert_eq!(cu!(cuMemPoolExportToShareableHandle((&raw mut descriptor).cast(), private, fd, 0)), 1);
        ok!(cuMemPoolExportToShareableHandle((&raw mut descriptor).cast(), pool, fd, 0));
        let mut imported = null_mut();
        ok!(cuMemPoolImportFromShareableHandle(&mut imported, descriptor as usize as *mut _, fd, 0));
        let (mut lead, mut block) = (0, 0);
        ok!(cuMemAllocFromPoolAsync(&mut lead, 512, pool, stream));
        ok!(cuMemAllocFromPoolAsync(&mut block, 8192, pool, stream));
        // SAFETY: an array of bytes.
        let mut data: CUmemPoolPtrExportData = unsafe { std::mem::zeroed() };
        ok!(cuMemPoolExportPointer(&mut data, block));
        let mut view = 0;
        ok!(cuMemPoolImportPointer(&mut view, imported, &mut data));
        ok!(cuMemsetD32_v2(block + 4, 77, 1));
        assert_eq!(read(view + 4), 77);
        assert_eq!(cu!(cuMemAllocFromPoolAsync(&mut lead, 64, imported, stream)), 1, "nothing comes from it");
        assert_eq!(cu!(cuMemPoolImportPointer(&mut view, pool, &mut data)), 1, "not an imported pool");
        assert_eq!(give(view, stream), 0);
        ok!(cuStreamSynchronize(stream));
        assert_eq!((cu!(cuMemsetD8_v2(view, 0, 1)), read(block + 4)), (1, 77));
    });
}

#[test]
fn threads_share_a_pool_and_lose_no_byte() {
    alone("threads_share_a_pool_and_lose_no_byte", &[], || {
        let context = start_on(0) as usize;
        let (before, pool) = (used(0), default_pool(0));
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                scope.spawn(move || {
                    ok!(cuCtxSetCurrent(context as CUcontext));
                    let (stream, mut blocks) = (stream(), Vec::new());
                    for round in 0..200 {
                        let bytes = (1 + (round * 7 + thread * 13) % 40) * 100_000;
                        let block = take(bytes, stream);
                        ok!(cuMemsetD32Async(block, round as u32, 16, stream));
                        blocks.push((block, round as u32));
                        if blocks.len() > 5 {
                            let (block, value) = blocks.remove((round % 5) as usize);
                            ok!(cuStreamSynchronize(stream));
                            assert_eq!((read(block), read(block + 60)), (value, value));
                            assert_eq!(give(block, stream), 0);
                        }
                    }
                    blocks.iter().for_each(|(block, _)| assert_eq!(give(*block, stream), 0));
                    ok!(cuStreamSynchronize(stream));
                });
            }
        });
        ok!(cuCtxSynchronize());
        assert_eq!((held(pool), used(0)), ((0, 0), before));
    });
}
