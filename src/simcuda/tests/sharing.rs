//! What processes and network cards share: descriptors, buffers, events.

#![allow(clippy::macro_metavars_in_unsafe, reason = "the macro is there to make the one unsafe call")]

mod common;

use common::*;
use cudarc::driver::sys::*;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::ptr::{null, null_mut};

/// Set in the second process of a test: the handle of an event, in hexadecimal.
const HANDLE: &str = "SIMCUDA_TEST_EVENT";

fn event(flags: u32) -> CUevent {
    let mut event = null_mut();
    ok!(cuEventCreate(&mut event, flags));
    event
}

fn handle_of(event: CUevent) -> CUipcEventHandle {
    // SAFETY: an array of bytes.
    let mut handle: CUipcEventHandle = unsafe { std::mem::zeroed() };
    ok!(cuIpcGetEventHandle(&mut handle, event));
    handle
}

/// Opens the other process's event, which is not there yet, says so and waits for it in a stream.
fn importer(text: &str) {
    start_on(0);
    // SAFETY: an array of bytes.
    let mut handle: CUipcEventHandle = unsafe { std::mem::zeroed() };
    for (index, byte) in handle.reserved.iter_mut().enumerate() {
        let Ok(value) = u8::from_str_radix(&text[2 * index..2 * index + 2], 16) else { panic!("{text}") };
        *byte = value as _;
    }
    let (mut event, stream) = (null_mut(), stream());
    ok!(cuIpcOpenEventHandle(&mut event, handle));
    assert_eq!(cu!(cuEventQuery(event)), 600);
    ok!(cuStreamWaitEvent(stream, event, 0));
    assert_eq!(cu!(cuStreamQuery(stream)), 600);
    println!("waiting");
    ok!(cuStreamSynchronize(stream));
    ok!(cuEventQuery(event));
    ok!(cuEventRecord(event, stream));
    ok!(cuEventSynchronize(event));
}

#[test]
fn an_event_is_waited_for_in_another_process() {
    let name = "an_event_is_waited_for_in_another_process";
    alone(name, &[], || {
        if let Ok(handle) = std::env::var(HANDLE) {
            return importer(&handle);
        }
        start_on(0);
        let (shared, private, stream, flag) = (event(6), event(2), stream(), pinned_flag());
        assert_eq!(cu!(cuEventCreate(&mut null_mut(), 4)), 1, "events of several processes have no time");
        let handle = handle_of(shared);
        assert_eq!(cu!(cuIpcGetEventHandle(&mut handle.clone(), private)), 400);
        assert_eq!(cu!(cuIpcOpenEventHandle(&mut null_mut(), handle)), 201, "in the process that made it");
        assert_eq!(launch(function(c"wait_flag"), stream, &mut [flag as u64]), 0);
        ok!(cuEventRecord(shared, stream));
        let text: String = handle.reserved.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
        let mut other = Command::new(std::env::current_exe().unwrap())
            .args([std::env::var("SIMCUDA_TEST").unwrap().as_str(), "--exact", "--nocapture", "--test-threads=1"])
            .env(HANDLE, text)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(other.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("waiting")), "the importer ended early");
        raise(flag as usize);
        assert!(lines.map(Result::unwrap).any(|line| line.contains("1 passed")));
        assert!(other.wait().unwrap().success());
        ok!(cuEventQuery(shared));
        ok!(cuEventSynchronize(shared));
    });
}

#[test]
fn a_shared_descriptor_is_the_same_memory() {
    alone("a_shared_descriptor_is_the_same_memory", &[], || {
        start_on(0);
        let mut wanted = prop(1);
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        wanted.requestedHandleTypes = kind;
        let (mut handle, mut imported, mut descriptor) = (0, 0, -1_i32);
        ok!(cuMemCreate(&mut handle, CHUNK, &wanted, 0));
        ok!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, kind, 0));
        ok!(cuMemImportFromShareableHandle(&mut imported, descriptor as usize as *mut _, kind));
        assert_eq!(used(1), CHUNK as u64, "counted once");
        let address = reserve(2 * CHUNK);
        let second = address + CHUNK as u64;
        ok!(cuMemMap(address, CHUNK, 0, handle, 0));
        ok!(cuMemMap(second, CHUNK, 0, imported, 0));
        assert_eq!(grant(address, 2 * CHUNK, &[0]), 0);
        ok!(cuMemsetD32_v2(address, 77, 1));
        assert_eq!(read(second), 77);
        let mut other = 0;
        assert_eq!(cu!(cuMemImportFromShareableHandle(&mut other, null_mut(), kind)), 999, "not one of ours");
        assert_eq!(cu!(cuMemcpy(0, null::<u8>() as u64, 16)), 1);
    });
}

#[test]
fn memory_that_lies_scattered_is_no_less_and_cannot_be_exported() {
    let settings = [("SIMCUDA_GPUS", "1x64MiB"), ("SIMCUDA_CONTEXT_MIB", "8")];
    alone("memory_that_lies_scattered_is_no_less_and_cannot_be_exported", &settings, || {
        start_on(0);
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let mut wanted = prop(0);
        wanted.requestedHandleTypes = kind;
        // All of the GPU in frames, of which every other one is given back.
        let frames: Vec<u64> = (0..28)
            .map(|_| {
                let mut block = 0;
                ok!(cuMemAlloc_v2(&mut block, 2 << 20));
                block
            })
            .collect();
        frames.iter().step_by(2).for_each(|&frame| ok!(cuMemFree_v2(frame)));
        let (mut handle, mut descriptor, mut block) = (0, -1_i32, 0);
        // The context has no frames, so as many are free in one stretch.
        ok!(cuMemAlloc_v2(&mut block, 8 << 20));
        ok!(cuMemCreate(&mut handle, 8 << 20, &wanted, 0));
        ok!(cuMemAlloc_v2(&mut block, 8 << 20));
        assert_eq!(cu!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, kind, 0)), 801);
        let mut named = CUipcMemHandle { reserved: [0; 64] };
        assert_eq!(cu!(cuIpcGetMemHandle(&mut named, block)), 801);
        let address = reserve(8 << 20);
        ok!(cuMemMap(address, 8 << 20, 0, handle, 0));
        assert_eq!(grant(address, 8 << 20, &[0]), 0);
        for at in [block, address] {
            ok!(cuMemsetD32_v2(at, 5, 2 << 20));
            assert_eq!((read(at), read(at + (8 << 20) - 4)), (5, 5));
        }
    });
}

#[test]
fn network_cards_reach_memory_that_was_made_for_them() {
    alone("network_cards_reach_memory_that_was_made_for_them", &[], || {
        start_on(0);
        use CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE as RDMA;
        let mut wanted = prop(0);
        let (mut handle, address) = (0, reserve(2 * CHUNK));
        wanted.allocFlags.gpuDirectRDMACapable = 1;
        ok!(cuMemCreate(&mut handle, CHUNK, &wanted, 0));
        ok!(cuMemMap(address, CHUNK, 0, handle, 0));
        assert_eq!(grant(address, CHUNK, &[0]), 0);
        ok!(cuMemRelease(handle));
        place(address + CHUNK as u64, 0, &[0]);
        let capable = |address| {
            let mut value = 9_u32;
            ok!(cuPointerGetAttribute((&raw mut value).cast(), RDMA, address));
            value
        };
        let mut plain = 0;
        ok!(cuMemAlloc_v2(&mut plain, CHUNK));
        assert_eq!([address, address + CHUNK as u64, plain].map(capable), [1, 0, 1]);

        let buffer = |address, bytes| {
            let mut descriptor = -1_i32;
            let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
            (cu!(cuMemGetHandleForAddressRange((&raw mut descriptor).cast(), address, bytes, kind, 0)), descriptor)
        };
        let (code, descriptor) = buffer(address, 2 * CHUNK);
        assert_eq!((code, buffer(plain, 4096).0, buffer(plain, 100).0, buffer(64, 4096).0), (0, 0, 1, 1));
        let before = used(0);
        ok!(cuMemUnmap(address, 2 * CHUNK));
        assert_eq!(used(0), before, "the buffer keeps the memory");
        // SAFETY: the descriptor is this test's own.
        unsafe { libc::close(descriptor) };
        assert_eq!(used(0), before - 2 * CHUNK as u64);
    });
}

#[test]
fn a_machine_without_rdma_refuses_what_asks_for_it() {
    alone("a_machine_without_rdma_refuses_what_asks_for_it", &[("SIMCUDA_RDMA", "off")], || {
        start_on(0);
        let (mut handle, mut able, mut wanted) = (0, 9, prop(0));
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        ok!(cuDeviceGetAttribute(&mut able, attribute, 0));
        wanted.allocFlags.gpuDirectRDMACapable = 1;
        assert_eq!((able, cu!(cuMemCreate(&mut handle, CHUNK, &wanted, 0))), (0, 801));
        create(0, CHUNK);
    });
}
