//! Managed memory: advice by page, and which GPU it counts against.

#![allow(clippy::macro_metavars_in_unsafe, reason = "the macro is there to make the one unsafe call")]

mod common;

use common::*;
use cudarc::driver::sys::*;
use std::ffi::c_int;
use std::ptr::null_mut;

const MIB: u64 = 1 << 20;
const HOST: c_int = -1;
const NOWHERE: c_int = -2;

fn managed(bytes: u64) -> u64 {
    let mut address = 0;
    ok!(cuMemAllocManaged(&mut address, bytes as usize, 1));
    address
}

/// Bytes of a range at a GPU, the host or nowhere.
fn at(address: u64, bytes: u64, place: c_int) -> u64 {
    type At = extern "C" fn(u64, u64, c_int) -> u64;
    // SAFETY: `uint64_t simcuda_managed_at(uint64_t, uint64_t, int)`.
    unsafe { std::mem::transmute::<*mut libc::c_void, At>(symbol("simcuda_managed_at"))(address, bytes, place) }
}

fn place(kind: CUmemLocationType, id: c_int) -> CUmemLocation {
    // SAFETY: a structure of integers and one enumeration whose zero is a member.
    let mut place: CUmemLocation = unsafe { std::mem::zeroed() };
    (place.type_, place.id) = (kind, id);
    place
}

fn gpu(id: c_int) -> CUmemLocation {
    place(CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id)
}

/// The export of before CUDA 13, which the declarations no longer have: −1 is the processor.
fn prefetch(address: u64, bytes: usize, device: c_int, stream: CUstream) -> c_int {
    type Prefetch = unsafe extern "C" fn(u64, usize, c_int, CUstream) -> c_int;
    // SAFETY: the documented signature of this export; the arguments are plain values.
    unsafe {
        std::mem::transmute::<*mut libc::c_void, Prefetch>(symbol("cuMemPrefetchAsync"))(address, bytes, device, stream)
    }
}

fn range(attribute: CUmem_range_attribute, address: u64, bytes: u64) -> c_int {
    let mut value = -9;
    ok!(cuMemRangeGetAttribute((&raw mut value).cast(), 4, attribute, address, bytes as usize));
    value
}

use CUmem_advise_enum::*;
use CUmem_range_attribute_enum::*;

#[test]
fn advice_holds_for_the_pages_it_was_given_for() {
    alone("advice_holds_for_the_pages_it_was_given_for", &[], || {
        start_on(0);
        let (block, half) = (managed(8 * MIB), 4 * MIB);
        let advise = |advice, at, bytes: u64, to| cu!(cuMemAdvise_v2(at, bytes as usize, advice, to));
        let node = place(CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, 0);
        let host = place(CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, 77);
        assert_eq!(advise(CU_MEM_ADVISE_SET_PREFERRED_LOCATION, block, half, gpu(1)), 0);
        assert_eq!(advise(CU_MEM_ADVISE_SET_PREFERRED_LOCATION, block + half, half, node), 0);
        let preferred = |at, bytes| {
            [
                range(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, at, bytes),
                range(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, at, bytes),
                range(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID, at, bytes),
            ]
        };
        assert_eq!(preferred(block, half), [1, 1, 1]);
        assert_eq!(preferred(block + half, half), [-1, 2, -1], "a node reads back as the host");
        assert_eq!(preferred(block, 2 * half), [-2, 0, -2], "not the same for all pages");
        assert_eq!(advise(CU_MEM_ADVISE_SET_PREFERRED_LOCATION, block + half, half, host), 0);
        assert_eq!(preferred(block + half, half), [-1, 2, -1]);
        assert_eq!(advise(CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, block, half, gpu(99)), 0);
        assert_eq!(preferred(block, half), [-2, 0, -2]);

        for device in [0, 1] {
            assert_eq!(advise(CU_MEM_ADVISE_SET_ACCESSED_BY, block, 8 * MIB, gpu(device)), 0);
        }
        assert_eq!(advise(CU_MEM_ADVISE_UNSET_ACCESSED_BY, block, half, gpu(0)), 0);
        let accessors = |at, bytes: u64| {
            let mut list = [9_i32; 3];
            let data = list.as_mut_ptr().cast();
            ok!(cuMemRangeGetAttribute(data, 12, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, at, bytes as usize));
            list
        };
        assert_eq!(accessors(block, half), [1, -2, -2]);
        assert_eq!(accessors(block + half, half), [0, 1, -2]);
        assert_eq!(accessors(block, 2 * half), [1, -2, -2]);

        assert_eq!(advise(CU_MEM_ADVISE_SET_READ_MOSTLY, block + 4096, 1, gpu(0)), 0);
        assert_eq!(range(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, block + 4096, 4096), 1, "whole pages");
        assert_eq!(range(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, block, 8192), 0);
    });
}

#[test]
fn wrong_advice_is_refused() {
    alone("wrong_advice_is_refused", &[], || {
        start_on(0);
        let (block, mut plain) = (managed(4 * MIB), 0);
        ok!(cuMemAlloc_v2(&mut plain, 4096));
        let prefer = |at, bytes, to| cu!(cuMemAdvise_v2(at, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, to));
        assert_eq!(prefer(block, 4 << 20, gpu(2)), 1);
        assert_eq!(prefer(block, 0, gpu(0)), 1);
        assert_eq!(prefer(block, (4 << 20) + 1, gpu(0)), 1, "past the end");
        assert_eq!(prefer(plain, 4096, gpu(0)), 1);
        let node = place(CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, 0);
        let accessed = |to| cu!(cuMemAdvise_v2(block, 4096, CU_MEM_ADVISE_SET_ACCESSED_BY, to));
        assert_eq!(accessed(node), 1, "a node is no accessor");
        assert_eq!(cu!(cuMemPrefetchAsync_v2(block, 4096, gpu(0), 1, null_mut())), 1, "flags");
        assert_eq!(cu!(cuMemPrefetchAsync_v2(plain, 4096, gpu(0), 0, null_mut())), 1);
        let mut data = 0_i64;
        let read = |data, bytes| {
            cu!(cuMemRangeGetAttribute(data, bytes, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, block, 4096))
        };
        assert_eq!(read((&raw mut data).cast(), 8), 1, "an int is wanted");
    });
}

#[test]
fn a_machine_whose_gpus_do_not_fault_refuses_them_as_places() {
    let without = [("SIMCUDA_CONCURRENT_MANAGED", "off")];
    alone("a_machine_whose_gpus_do_not_fault_refuses_them_as_places", &without, || {
        start_on(0);
        let block = managed(4096);
        let (mut able, attribute) = (9, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
        ok!(cuDeviceGetAttribute(&mut able, attribute, 0));
        assert_eq!(able, 0);
        assert_eq!(prefetch(block, 4096, 0, null_mut()), 101);
        assert_eq!(prefetch(block, 4096, -1, null_mut()), 0);
        ok!(cuMemFree_v2(block));
    });
}

#[test]
fn a_prefetch_moves_pages_in_the_order_of_its_stream() {
    alone("a_prefetch_moves_pages_in_the_order_of_its_stream", &[], || {
        start_on(0);
        let (block, before) = (managed(8 * MIB), used(1));
        assert_eq!(at(block, 8 * MIB, NOWHERE), 8 * MIB);
        let (flag, stream) = (pinned_flag(), stream());
        assert_eq!(launch(function(c"wait_flag"), stream, &mut [flag as u64]), 0);
        assert_eq!(prefetch(block, 8 << 20, 1, stream), 0);
        let asked = range(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, block, 8 * MIB);
        assert_eq!((asked, at(block, 8 * MIB, 1)), (1, 0), "asked for, not there yet");
        raise(flag as usize);
        ok!(cuStreamSynchronize(stream));
        assert_eq!((at(block, 8 * MIB, 1), used(1) - before), (8 * MIB, 8 * MIB));
        assert_eq!(prefetch(block + 2 * MIB, 2 << 20, -1, stream), 0);
        ok!(cuStreamSynchronize(stream));
        assert_eq!((at(block, 8 * MIB, 1), at(block, 8 * MIB, HOST)), (6 * MIB, 2 * MIB));
        let node = place(CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, 0);
        ok!(cuMemPrefetchAsync_v2(block + 2 * MIB, 2 << 20, node, 0, stream));
        let last = [
            CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION,
            CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE,
            CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID,
        ];
        assert_eq!(last.map(|attribute| range(attribute, block + 2 * MIB, 2 * MIB)), [-1, 3, 0], "with its node");
        assert_eq!(range(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, block, 8 * MIB), -2, "no longer one place");
        let (mut addresses, mut sizes) = ([block, block + 4 * MIB, block + 6 * MIB], [4 << 20, 2 << 20, 2 << 20]);
        let (mut places, mut first) = ([gpu(0), gpu(1)], [0, 2]);
        ok!(cuMemPrefetchBatchAsync(
            addresses.as_mut_ptr(),
            sizes.as_mut_ptr(),
            3,
            places.as_mut_ptr(),
            first.as_mut_ptr(),
            2,
            0,
            stream,
        ));
        ok!(cuStreamSynchronize(stream));
        assert_eq!((at(block, 8 * MIB, 0), at(block, 8 * MIB, 1)), (6 * MIB, 2 * MIB));
        ok!(cuMemFree_v2(block));
        assert_eq!(used(1), before);
    });
}

#[test]
fn kernels_bring_pages_or_leave_them_as_advised() {
    alone("kernels_bring_pages_or_leave_them_as_advised", &[], || {
        start_on(0);
        let (block, words) = (managed(8 * MIB), 2 * MIB / 4);
        let part = |index: u64| block + index * 2 * MIB;
        let advise = |index, advice, to| {
            ok!(cuMemAdvise_v2(part(index), 2 << 20, advice, gpu(to)));
        };
        // Part 0: nothing said. 1: preferred elsewhere. 2: lives elsewhere and accessed from here. 3: lives elsewhere.
        advise(1, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, 1);
        advise(2, CU_MEM_ADVISE_SET_ACCESSED_BY, 0);
        assert_eq!(prefetch(part(2), 4 << 20, 1, null_mut()), 0);
        for index in 0..4 {
            assert_eq!(launch(function(c"iota_u32"), null_mut(), &mut [part(index), words, 7]), 0);
        }
        ok!(cuCtxSynchronize());
        let places = [0, 1, 2, 3].map(|index| [0, 1].map(|device| at(part(index), 2 * MIB, device) / MIB));
        assert_eq!(places, [[2, 0], [0, 2], [0, 2], [2, 0]]);
        // SAFETY: managed memory is the processor's too.
        assert_eq!(unsafe { *((part(3) + 8) as *const u32) }, 9);
    });
}

#[test]
fn managed_memory_makes_room_and_may_exceed_the_machine() {
    let small = [("SIMCUDA_GPUS", "2x64MiB"), ("SIMCUDA_CONTEXT_MIB", "0")];
    alone("managed_memory_makes_room_and_may_exceed_the_machine", &small, || {
        start_on(0);
        let (first, second, mut plain) = (managed(48 * MIB), managed(96 * MIB), 0);
        assert_eq!(prefetch(first, 48 << 20, 0, null_mut()), 0);
        assert_eq!(prefetch(second, 32 << 20, 0, null_mut()), 0);
        ok!(cuCtxSynchronize());
        assert_eq!((at(first, 48 * MIB, 0), at(first, 48 * MIB, HOST)), (32 * MIB, 16 * MIB), "the oldest left");
        ok!(cuMemAlloc_v2(&mut plain, 40 << 20));
        assert_eq!((used(0), at(first, 48 * MIB, 0), at(second, 96 * MIB, 0)), (64 * MIB, 0, 24 * MIB));
        assert_eq!(prefetch(second, 96 << 20, 0, null_mut()), 0);
        ok!(cuCtxSynchronize());
        assert_eq!(at(second, 96 * MIB, 0), 24 * MIB, "as much as fits");
        assert_eq!(cu!(cuMemAlloc_v2(&mut plain, 32 << 20)), 2, "plain memory does not leave");
        ok!(cuMemFree_v2(first));
        ok!(cuMemFree_v2(second));
        assert_eq!(used(0), 40 * MIB);
    });
}

#[test]
fn a_prefetch_breaks_every_capture_and_advice_the_strict_ones() {
    alone("a_prefetch_breaks_every_capture_and_advice_the_strict_ones", &[], || {
        start_on(0);
        use CUstreamCaptureMode_enum::*;
        let (block, stream, mut graph) = (managed(4096), stream(), null_mut());
        let advise = || cu!(cuMemAdvise_v2(block, 4096, CU_MEM_ADVISE_SET_READ_MOSTLY, gpu(0)));
        for (mode, advised) in [
            (CU_STREAM_CAPTURE_MODE_GLOBAL, 900),
            (CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, 900),
            (CU_STREAM_CAPTURE_MODE_RELAXED, 0),
        ] {
            ok!(cuStreamBeginCapture_v2(stream, mode));
            assert_eq!(advise(), advised);
            assert_eq!(cu!(cuStreamEndCapture(stream, &mut graph)), if advised == 0 { 0 } else { 901 });
            ok!(cuStreamBeginCapture_v2(stream, mode));
            assert_eq!(prefetch(block, 4096, 0, stream), 900);
            assert_eq!(cu!(cuStreamEndCapture(stream, &mut graph)), 901);
        }
    });
}

#[test]
fn threads_overfill_the_gpus_and_every_page_is_somewhere_once() {
    let small = [("SIMCUDA_GPUS", "2x64MiB"), ("SIMCUDA_CONTEXT_MIB", "1")];
    alone("threads_overfill_the_gpus_and_every_page_is_somewhere_once", &small, || {
        let context = start_on(0) as usize;
        let blocks: Vec<u64> = (0..4).map(|_| managed(48 * MIB)).collect();
        std::thread::scope(|scope| {
            for (thread, &block) in blocks.iter().enumerate() {
                scope.spawn(move || {
                    ok!(cuCtxSetCurrent(context as CUcontext));
                    let stream = stream();
                    for round in 0..100 {
                        let (start, device) = ((round * 5 % 40) as u64 * MIB, ((round + thread) % 3) as c_int - 1);
                        assert_eq!(prefetch(block + start, 8 << 20, device, stream), 0);
                        let mut plain = 0;
                        // May be refused while the others' plain memory is there.
                        if cu!(cuMemAlloc_v2(&mut plain, 4 << 20)) == 0 {
                            ok!(cuMemFree_v2(plain));
                        }
                    }
                    ok!(cuStreamSynchronize(stream));
                });
            }
        });
        let total = |place| blocks.iter().map(|&block| at(block, 48 * MIB, place)).sum::<u64>();
        assert_eq!([total(0) + MIB, total(1)], [used(0), used(1)]);
        assert_eq!(total(0) + total(1) + total(HOST) + total(NOWHERE), 4 * 48 * MIB);
    });
}
