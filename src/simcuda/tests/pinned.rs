//! Pinned and registered host memory.

#![allow(clippy::macro_metavars_in_unsafe, reason = "the macro is there to make the one unsafe call")]

mod common;

use common::*;
use cudarc::driver::sys::*;
use std::ffi::c_void;
use std::ptr::null_mut;

const MIB: usize = 1 << 20;

fn pinned(bytes: usize, flags: u32) -> u64 {
    let mut address = null_mut();
    ok!(cuMemHostAlloc(&mut address, bytes, flags));
    address as u64
}

fn at(address: u64) -> *mut c_void {
    address as *mut c_void
}

/// A pointer attribute as 8 bytes, or the error.
fn ask(attribute: CUpointer_attribute, address: u64) -> Result<u64, i32> {
    let mut value = 0_u64;
    match cu!(cuPointerGetAttribute((&raw mut value).cast(), attribute, address)) {
        0 => Ok(value),
        code => Err(code),
    }
}

#[test]
fn a_refused_or_empty_request_leaves_null() {
    alone("a_refused_or_empty_request_leaves_null", &[("SIMCUDA_HOST", "64MiB")], || {
        ok!(cuInit(0));
        let alloc = |bytes, flags| {
            let mut address = at(7);
            let code = cu!(cuMemHostAlloc(&mut address, bytes, flags));
            (code, address as u64)
        };
        assert_eq!(alloc(64, 0), (201, 0), "no context");
        start_on(0);
        assert_eq!(alloc(0, 0), (0, 0));
        assert_eq!(alloc(64, 8), (1, 0));
        assert_eq!(alloc(65 * MIB, 0), (2, 0));
        assert_eq!(cu!(cuMemHostAlloc(null_mut(), 64, 0)), 1);
        ok!(cuMemFreeHost(null_mut()));
    });
}

#[test]
fn small_requests_share_frames_and_say_their_own_size() {
    alone("small_requests_share_frames_and_say_their_own_size", &[], || {
        start_on(0);
        let (first, second) = (pinned(1000, 0), pinned(1000, 0));
        assert_eq!(second - first, 1024);
        assert_eq!(count("simcuda_pinned"), 2 * MIB as u64);
        use CUpointer_attribute::*;
        let attributes = [
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CU_POINTER_ATTRIBUTE_HOST_POINTER,
            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
            CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
        ];
        let inner = second + 100;
        let said = attributes.map(|attribute| ask(attribute, inner).unwrap());
        assert_eq!(said, [1, inner, second, 1000, 2 << 20, second]);
        let (mut base, mut bytes) = (0, 0);
        ok!(cuMemGetAddressRange_v2(&mut base, &mut bytes, inner));
        assert_eq!((base, bytes), (second, 1000));
        let behind = second + 1500;
        assert_eq!(ask(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, behind), Err(1));
        assert_eq!(cu!(cuMemGetAddressRange_v2(&mut base, &mut bytes, behind)), 500);
        let (mut flags, mut device) = (9, 9);
        assert_eq!((cu!(cuMemHostGetFlags(&mut flags, at(behind))), flags), (1, 9));
        assert_eq!((cu!(cuMemHostGetDevicePointer_v2(&mut device, at(behind), 0)), device), (1, 0));
        ok!(cuMemFreeHost(at(second)));
        assert_eq!(cu!(cuMemFreeHost(at(second))), 1, "twice");
        assert_eq!(cu!(cuMemFreeHost(at(first + 8))), 1, "inner");
        assert_eq!(cu!(cuMemFree_v2(first)), 1, "not device memory");
        ok!(cuCtxSetCurrent(null_mut()));
        ok!(cuMemFreeHost(at(first)));
        assert_eq!(count("simcuda_pinned"), 0);
    });
}

#[test]
fn flags_read_back_with_mapped_added() {
    alone("flags_read_back_with_mapped_added", &[], || {
        start_on(0);
        let read = |address| {
            let mut flags = 99;
            ok!(cuMemHostGetFlags(&mut flags, at(address)));
            flags
        };
        assert_eq!([0, 1, 2, 3, 4, 5, 6, 7].map(|flags| read(pinned(4096, flags) + 8)), [2, 3, 2, 3, 6, 7, 6, 7]);
        let mut managed = 0;
        ok!(cuMemAllocManaged(&mut managed, 4096, 1));
        assert_eq!(read(managed), 2);
        let mut plain = 0;
        ok!(cuMemAlloc_v2(&mut plain, 4096));
        assert_eq!(cu!(cuMemHostGetFlags(&mut 0, at(plain))), 1);
    });
}

#[test]
fn registrations_do_not_meet_and_end_where_they_began() {
    alone("registrations_do_not_meet_and_end_where_they_began", &[], || {
        start_on(0);
        let mut pages = vec![0_u8; 8 * 4096];
        let base = (pages.as_mut_ptr() as u64).next_multiple_of(4096);
        let register = |address: u64, bytes, flags| cu!(cuMemHostRegister_v2(at(address), bytes, flags));
        let unregister = |address: u64| cu!(cuMemHostUnregister(at(address)));
        assert_eq!(register(base + 100, 5000, 0), 0, "no alignment is asked for");
        use CUpointer_attribute::*;
        let said = [
            CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
            CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
        ]
        .map(|attribute| ask(attribute, base + 200).unwrap());
        assert_eq!(said, [5000, 8192, base]);
        assert_eq!(register(base + 100, 5000, 0), 712, "again");
        assert_eq!(register(base + 4096, 4096, 0), 712, "overlapping");
        assert_eq!(register(base + 200, 8, 0), 712, "inside");
        assert_eq!(register(base + 5100, 4096, 0), 0, "adjacent");
        assert_eq!(unregister(base + 200), 1, "inner");
        assert_eq!(cu!(cuMemFreeHost(at(base + 100))), 1, "not allocated");
        assert_eq!((unregister(base + 100), unregister(base + 100)), (0, 713));
        let nothing = (register(base, 0, 0), register(0, 64, 0), register(base, 64, 16), register(0x1000, 64, 0));
        assert_eq!(nothing, (1, 1, 1, 1));
        let block = pinned(8192, 0);
        assert_eq!((register(block, 8192, 0), register(block + 4096, 64, 0), unregister(block)), (1, 1, 1));
    });
}

#[test]
fn the_end_of_a_context_ends_what_was_pinned_in_it() {
    alone("the_end_of_a_context_ends_what_was_pinned_in_it", &[], || {
        let context = start_on(0);
        let (small, large) = (pinned(1000, 1), pinned(4 * MIB, 1));
        let mut own = vec![0_u8; 4096];
        let own = own.as_mut_ptr() as u64;
        ok!(cuMemHostRegister_v2(at(own), 4096, 1));
        ok!(cuDevicePrimaryCtxReset_v2(0));
        assert_eq!(count("simcuda_pinned"), 0);
        // While the context that is gone is current, nothing is looked at.
        assert_eq!([small, large].map(|address| cu!(cuMemFreeHost(at(address)))), [709, 709]);
        assert_eq!(start_on(0), context);
        assert_eq!([small, large].map(|address| cu!(cuMemFreeHost(at(address)))), [1, 1]);
        assert_eq!(cu!(cuMemHostUnregister(at(own))), 713);
        ok!(cuMemHostRegister_v2(at(own), 4096, 0));
    });
}

#[test]
fn frees_and_unregistrations_wait_for_their_context() {
    alone("frees_and_unregistrations_wait_for_their_context", &[], || {
        start_on(0);
        let (block, mut own) = (pinned(4 * MIB, 0), vec![0_u8; 4096]);
        let own = own.as_mut_ptr() as u64;
        ok!(cuMemHostRegister_v2(at(own), 4096, 0));
        let (flag, stream, wait) = (pinned_flag(), stream(), function(c"wait_flag"));
        let ends: [Box<dyn Fn() -> i32>; 2] =
            [Box::new(|| cu!(cuMemFreeHost(at(block)))), Box::new(|| cu!(cuMemHostUnregister(at(own))))];
        for end in ends {
            // SAFETY: nothing runs that reads the flag.
            unsafe { flag.write(0) };
            assert_eq!(launch(wait, stream, &mut [flag as u64]), 0);
            pinned(4096, 0);
            assert_eq!(cu!(cuStreamQuery(stream)), 600, "an allocation does not wait");
            let raiser = std::thread::spawn({
                let flag = flag as usize;
                move || raise(flag)
            });
            assert_eq!(end(), 0);
            ok!(cuStreamQuery(stream));
            raiser.join().unwrap();
        }
    });
}

#[test]
fn strict_captures_break_and_relaxed_ones_hold() {
    alone("strict_captures_break_and_relaxed_ones_hold", &[], || {
        start_on(0);
        use CUstreamCaptureMode_enum::*;
        let (stream, mut graph, mut own) = (stream(), null_mut(), vec![0_u8; 4096]);
        let own = own.as_mut_ptr() as u64;
        let calls: [&dyn Fn() -> i32; 3] =
            [&|| cu!(cuMemHostAlloc(&mut null_mut(), 4096, 0)), &|| cu!(cuMemFreeHost(at(1 << 20))), &|| {
                cu!(cuMemHostRegister_v2(at(own), 64, 0))
            }];
        for mode in [CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL] {
            for call in calls {
                ok!(cuStreamBeginCapture_v2(stream, mode));
                assert_eq!((call(), cu!(cuStreamEndCapture(stream, &mut graph))), (900, 901));
            }
        }
        ok!(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        let block = pinned(4096, 0);
        ok!(cuMemHostGetFlags(&mut 0, at(block)));
        ok!(cuMemFreeHost(at(block)));
        assert_eq!(calls[2](), 0);
        ok!(cuStreamEndCapture(stream, &mut graph));
    });
}

#[test]
fn resident_pages_come_and_go_with_the_memory() {
    alone("resident_pages_come_and_go_with_the_memory", &[("SIMCUDA_PINNED", "resident")], || {
        start_on(0);
        let before = shared_pages();
        let block = pinned(16 * MIB, 0);
        assert_eq!(shared_pages() - before, 16 * MIB);
        ok!(cuMemFreeHost(at(block)));
        assert_eq!(shared_pages(), before);
    });
}
