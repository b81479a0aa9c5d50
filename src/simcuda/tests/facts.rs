//! The answers measured on real GPUs, row by row.

#![allow(clippy::macro_metavars_in_unsafe, reason = "the macro is there to make the one unsafe call")]

mod common;

use common::*;
use cudarc::driver::sys::*;
use std::ptr::null_mut;

const MIB: u64 = 1 << 20;
const TIB: usize = 1 << 40;
const CONTEXT: u64 = 523 * MIB;

#[test]
fn reservations_reach_64_tib_and_their_end_can_be_mapped() {
    alone("reservations_reach_64_tib_and_their_end_can_be_mapped", &[], || {
        start_on(0);
        let mut address = 0;
        assert_eq!(cu!(cuMemAddressReserve(&mut address, 100 * TIB, 0, 0, 0)), 2);
        let address = reserve(64 * TIB);
        let end = address + 64 * TIB as u64 - CHUNK as u64;
        place(end, 0, &[0]);
        ok!(cuMemsetD32_v2(end, 7, CHUNK / 4));
        assert_eq!(read(end + CHUNK as u64 - 4), 7);
        assert_eq!(cu!(cuMemAddressFree(address, 64 * TIB)), 1, "something is mapped in it");
        ok!(cuMemUnmap(end, CHUNK));
        ok!(cuMemAddressFree(address, 64 * TIB));
        for device in [0, -1] {
            for option in [
                CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM,
                CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            ] {
                let mut bytes = 0;
                ok!(cuMemGetAllocationGranularity(&mut bytes, &prop(device), option));
                assert_eq!(bytes, CHUNK);
            }
        }
    });
}

#[test]
fn links_are_as_the_matrix_says_whatever_the_ordinals_are() {
    let matrix = concat!("matrix:", env!("CARGO_MANIFEST_DIR"), "/links/dgx1.txt");
    // Ordinals 0 to 3 are the machine's GPUs 4, 0, 1 and 7.
    let settings = [("SIMCUDA_LINK", matrix), ("CUDA_VISIBLE_DEVICES", "4,0,1,7")];
    alone("links_are_as_the_matrix_says_whatever_the_ordinals_are", &settings, || {
        use CUdevice_P2PAttribute as Of;
        let (context, address) = (start_on(0), reserve(CHUNK));
        // Two links, one link, none, and between GPUs 1 and 7 none.
        for (from, to, can, atomics) in
            [(0, 1, 1, 1), (0, 3, 1, 1), (1, 2, 1, 1), (0, 2, 0, 0), (2, 3, 0, 0), (3, 3, 0, 9)]
        {
            let mut answer = 9;
            ok!(cuDeviceCanAccessPeer(&mut answer, from, to));
            assert_eq!(answer, can, "{from} to {to}");
            if from != to {
                ok!(cuDeviceGetP2PAttribute(
                    &mut answer,
                    Of::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
                    from,
                    to
                ));
                assert_eq!(answer, atomics, "{from} to {to}");
                ok!(cuDeviceGetP2PAttribute(&mut answer, Of::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, from, to));
                assert_eq!(answer, can, "{from} to {to}");
            }
        }
        let rank = |from, to| {
            let mut rank = 9;
            ok!(cuDeviceGetP2PAttribute(&mut rank, Of::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, from, to));
            rank
        };
        assert_eq!([rank(0, 1), rank(0, 3), rank(1, 2)], [0, 0, 1], "NV2, NV2, NV1");
        // What has no link can be copied, through the host, but neither granted nor enabled.
        let handle = create(2, CHUNK);
        ok!(cuMemMap(address, CHUNK, 0, handle, 0));
        assert_ne!(grant(address, CHUNK, &[0]), 0);
        let (mut other, mut here, mut there) = (null_mut(), 0, 0);
        ok!(cuMemAlloc_v2(&mut here, CHUNK));
        ok!(cuMemsetD32_v2(here, 41, 1));
        ok!(cuDevicePrimaryCtxRetain(&mut other, 2));
        assert_eq!(cu!(cuCtxEnablePeerAccess(other, 0)), 217);
        ok!(cuCtxSetCurrent(other));
        ok!(cuMemAlloc_v2(&mut there, CHUNK));
        ok!(cuMemcpyPeer(there, other, here, context, 4));
        assert_eq!(read(there), 41);
    });
}

#[test]
fn a_matrix_that_cannot_be_read_is_named() {
    alone("a_matrix_that_cannot_be_read_is_named", &[("SIMCUDA_LINK", "matrix:/no/such/file")], || {
        assert_eq!(cu!(cuInit(0)), 1);
    });
}

#[test]
fn a_peers_memory_needs_no_context_there() {
    alone("a_peers_memory_needs_no_context_there", &[], || {
        start_on(0);
        let address = reserve(CHUNK);
        place(address, 1, &[0, 1]);
        ok!(cuMemsetD32_v2(address, 5, CHUNK / 4));
        assert_eq!(read(address), 5);
        let (mut flags, mut active) = (0, 1);
        ok!(cuDevicePrimaryCtxGetState(1, &mut flags, &mut active));
        assert_eq!((active, used(0), used(1)), (0, CONTEXT, 2 * MIB));
    });
}

#[test]
fn one_range_spans_gpus_and_host() {
    alone("one_range_spans_gpus_and_host", &[], || {
        start_on(0);
        let (address, words) = (reserve(4 * CHUNK), 3 * CHUNK as u64 / 4);
        for (index, device) in [0, 1, -1].into_iter().enumerate() {
            place(address + (index * CHUNK) as u64, device, &[0, 1]);
        }
        let (iota, check) = (function(c"iota_u32"), function(c"check_iota_u32"));
        let mut bad = 0;
        ok!(cuMemAlloc_v2(&mut bad, 8));
        ok!(cuMemsetD8_v2(bad, 0, 8));
        assert_eq!(launch(iota, null_mut(), &mut [address, words, 3]), 0);
        assert_eq!(launch(check, null_mut(), &mut [address, words, 3, bad]), 0);
        assert_eq!(read(bad), 0);
        let border = address + CHUNK as u64;
        ok!(cuMemsetD8_v2(border - 6, 0xab, 12));
        assert_eq!(read(border - 4), 0xabab_abab);
        let data: Vec<u8> = (0..3 * CHUNK).map(|index| (index / 7) as u8).collect();
        let mut back = vec![0_u8; data.len()];
        ok!(cuMemcpyHtoD_v2(address, data.as_ptr().cast(), data.len()));
        ok!(cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), address, back.len()));
        assert!(data == back);
        ok!(cuMemcpyDtoD_v2(address, border + 1000, CHUNK));
        ok!(cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), address, CHUNK));
        assert!(back[..CHUNK] == data[CHUNK + 1000..2 * CHUNK + 1000]);
        let copied = cu!(cuMemcpyHtoD_v2(address, data.as_ptr().cast(), data.len() + 1));
        assert_eq!(copied, 1, "one byte more than is mapped");
    });
}

#[test]
fn access_that_was_not_granted_is_refused_or_kills_the_context() {
    alone("access_that_was_not_granted_is_refused_or_kills_the_context", &[], || {
        let first = start_on(0);
        let address = reserve(CHUNK);
        place(address, 1, &[0]);
        ok!(cuMemsetD8_v2(address, 1, CHUNK));
        let second = start_on(1);
        let mut plain = 0;
        ok!(cuMemAlloc_v2(&mut plain, CHUNK));
        assert_eq!(cu!(cuMemcpyDtoD_v2(plain, address, 64)), 1);
        ok!(cuCtxSynchronize());
        assert_eq!(cu!(cuMemcpyPeer(plain, second, address, second, 64)), 0, "the call succeeds");
        assert_eq!(cu!(cuCtxSynchronize()), 719, "and the context is dead");
        assert_eq!(cu!(cuMemAlloc_v2(&mut plain, 64)), 719);
        assert_eq!(cu!(cuCtxSynchronize()), 719);
        ok!(cuCtxSetCurrent(first));
        ok!(cuCtxSynchronize());
    });
}

#[test]
fn a_kernel_without_access_kills_its_context() {
    alone("a_kernel_without_access_kills_its_context", &[], || {
        start_on(0);
        let address = reserve(CHUNK);
        place(address, 0, &[1]);
        assert_eq!(launch(function(c"fill_u32"), null_mut(), &mut [address, 4, 1]), 0);
        assert_eq!(cu!(cuCtxSynchronize()), 719);
    });
}

#[test]
fn unmapping_what_a_kernel_uses_is_reported() {
    let off = [("SIMCUDA_STRICT", "off")];
    wrongly("unmapping_what_a_kernel_uses_is_reported", &off, unmap_under_a_kernel, |violations| {
        assert_eq!(violations.len(), 1, "{violations:#?}");
    });
}

fn unmap_under_a_kernel() {
    start_on(0);
    let address = reserve(2 * CHUNK);
    place(address, 0, &[0]);
    place(address + CHUNK as u64, 0, &[0]);
    let (flag, stream) = (pinned_flag(), stream());
    assert_eq!(launch(function(c"wait_flag"), stream, &mut [flag as u64]), 0);
    assert_eq!(launch(function(c"fill_u32"), stream, &mut [address, 100, 1]), 0);
    ok!(cuMemUnmap(address + CHUNK as u64, CHUNK));
    assert_eq!(count("simcuda_violations"), 0, "a neighbour may go");
    ok!(cuMemUnmap(address, CHUNK));
    assert_eq!(count("simcuda_violations"), 1);
    raise(flag as usize);
    assert_eq!(cu!(cuStreamSynchronize(stream)), 700);
}

#[test]
fn a_capture_allows_vmm_and_no_allocation() {
    alone("a_capture_allows_vmm_and_no_allocation", &[], || {
        start_on(0);
        let (stream, mut graph, mut block) = (stream(), null_mut(), 0);
        let global = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        ok!(cuStreamBeginCapture_v2(stream, global));
        let address = reserve(CHUNK);
        place(address, 0, &[0]);
        ok!(cuMemsetD32Async(address, 9, 16, stream));
        ok!(cuStreamEndCapture(stream, &mut graph));
        assert_eq!(read(address), 0, "recorded, not run");
        let mut executable = null_mut();
        ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        ok!(cuGraphLaunch(executable, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(read(address), 9);
        let synchronize = || cu!(cuCtxSynchronize());
        let allocate = || cu!(cuMemAlloc_v2(&mut block, 64));
        let forbidden: [Box<dyn FnOnce() -> i32>; 2] = [Box::new(synchronize), Box::new(allocate)];
        for call in forbidden {
            ok!(cuStreamBeginCapture_v2(stream, global));
            assert_eq!(call(), 900);
            assert_eq!(cu!(cuStreamEndCapture(stream, &mut graph)), 901);
        }
        ok!(cuCtxSynchronize());
    });
}

#[test]
fn pointers_say_what_real_ones_say() {
    alone("pointers_say_what_real_ones_say", &[], || {
        start_on(0);
        let address = reserve(4 * CHUNK);
        for (index, device) in [0, 1, -1].into_iter().enumerate() {
            place(address + (index * CHUNK) as u64, device, &[0, 1]);
        }
        let number = |attribute, pointer| {
            let mut value = -1_i32;
            ok!(cuPointerGetAttribute((&raw mut value).cast(), attribute, pointer));
            value
        };
        let long = |attribute, pointer| {
            let mut value = 0_u64;
            ok!(cuPointerGetAttribute((&raw mut value).cast(), attribute, pointer));
            value
        };
        use CUpointer_attribute::*;
        let chunk = |index: u64| address + index * CHUNK as u64 + 100;
        let ordinals = [0, 1, 2].map(|index| number(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, chunk(index)));
        let types = [0, 1, 2].map(|index| number(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, chunk(index)));
        assert_eq!((ordinals, types), ([0, 1, 0], [2, 2, 1]));
        assert_eq!(long(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, chunk(1)), address);
        assert_eq!(long(CU_POINTER_ATTRIBUTE_RANGE_SIZE, chunk(1)), 4 * CHUNK as u64);
        assert_eq!(number(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, chunk(0)), 0);
        let (mut base, mut bytes) = (0, 0);
        ok!(cuMemGetAddressRange_v2(&mut base, &mut bytes, chunk(1)));
        assert_eq!((base, bytes), (address + CHUNK as u64, CHUNK));
        ok!(cuMemGetAddressRange_v2(&mut base, &mut bytes, chunk(2)));
        assert_eq!((base, bytes), (0, CHUNK), "of memory on the host the start is not told");
        // SAFETY: an array of bytes.
        let mut handle: CUipcMemHandle = unsafe { std::mem::zeroed() };
        assert_eq!(cu!(cuIpcGetMemHandle(&mut handle, chunk(0))), 1);
        let mut plain = 0;
        ok!(cuMemAlloc_v2(&mut plain, 64));
        ok!(cuIpcGetMemHandle(&mut handle, plain));
    });
}

#[test]
fn handles_are_mapped_and_unmapped_whole() {
    alone("handles_are_mapped_and_unmapped_whole", &[], || {
        start_on(0);
        let address = reserve(16 * CHUNK);
        let handle = create(0, 2 * CHUNK);
        assert_eq!(cu!(cuMemMap(address, CHUNK, 0, handle, 0)), 801, "half of it");
        assert_eq!(cu!(cuMemMap(address, CHUNK, CHUNK, handle, 0)), 801, "an offset");
        ok!(cuMemMap(address, 2 * CHUNK, 0, handle, 0));
        assert_eq!(cu!(cuMemMap(address + CHUNK as u64, 2 * CHUNK, 0, handle, 0)), 1, "over another");
        assert_eq!(grant(address, CHUNK, &[0]), 1, "half of it");
        assert_eq!(grant(address, 2 * CHUNK, &[0]), 0);
        ok!(cuMemsetD32_v2(address, 1, 1));
        let before = used(0);
        ok!(cuMemRelease(handle));
        assert_eq!((used(0), count("simcuda_handles")), (before, 0), "mapped memory outlives its handle");
        let elsewhere = address + 8 * CHUNK as u64;
        ok!(cuMemMap(elsewhere, 2 * CHUNK, 0, handle, 0));
        ok!(cuMemUnmap(elsewhere, 2 * CHUNK));
        assert_eq!(cu!(cuMemRelease(handle)), 1);
        let mut again = 0;
        ok!(cuMemRetainAllocationHandle(&mut again, (address + 5) as *mut _));
        assert_eq!(again, handle);
        assert_eq!(cu!(cuMemUnmap(address, CHUNK)), 1, "half of it");
        ok!(cuMemUnmap(address, 2 * CHUNK));
        ok!(cuMemMap(address + 4 * CHUNK as u64, 2 * CHUNK, 0, again, 0));
        assert_eq!(grant(address + 4 * CHUNK as u64, 2 * CHUNK, &[0]), 0);
        assert_eq!(read(address + 4 * CHUNK as u64), 1, "the data moved with it");
        ok!(cuMemUnmap(address + 4 * CHUNK as u64, 2 * CHUNK));
        ok!(cuMemRelease(again));
        assert_eq!((used(0), count("simcuda_mapped")), (CONTEXT, 0));
    });
}

#[test]
fn memory_runs_out_at_the_last_byte() {
    let small = [("SIMCUDA_GPUS", "1x1GiB"), ("SIMCUDA_HOST", "4MiB")];
    alone("memory_runs_out_at_the_last_byte", &small, || {
        start_on(0);
        // 523 MiB are the context's; chunks are 2 MiB.
        let (room, mut handle, mut block) = (500 * MIB as usize, 0, 0);
        ok!(cuMemAlloc_v2(&mut block, room));
        assert_eq!(cu!(cuMemCreate(&mut handle, CHUNK, &prop(0), 0)), 2);
        assert_eq!(cu!(cuMemAlloc_v2(&mut block, 1)), 2);
        let host = [create(-1, CHUNK), create(-1, CHUNK)];
        assert_eq!(cu!(cuMemCreate(&mut handle, CHUNK, &prop(-1), 0)), 2);
        ok!(cuMemRelease(host[0]));
        create(-1, CHUNK);
    });
}

#[test]
fn a_container_may_forbid_host_memory() {
    alone("a_container_may_forbid_host_memory", &[("SIMCUDA_HOST", "none")], || {
        start_on(0);
        let mut handle = 0;
        assert_eq!(cu!(cuMemCreate(&mut handle, CHUNK, &prop(-1), 0)), 800);
        create(0, CHUNK);
    });
}

#[test]
fn free_waits_for_the_device_and_allocation_does_not() {
    alone("free_waits_for_the_device_and_allocation_does_not", &[], || {
        start_on(0);
        let (mut block, mut other) = (0, 0);
        ok!(cuMemAlloc_v2(&mut block, 64 << 20));
        let (flag, stream) = (pinned_flag(), stream());
        assert_eq!(launch(function(c"wait_flag"), stream, &mut [flag as u64]), 0);
        assert_eq!(launch(function(c"fill_u32"), stream, &mut [block, 4096, 1]), 0);
        ok!(cuMemAlloc_v2(&mut other, 64 << 20));
        assert_eq!(cu!(cuStreamQuery(stream)), 600, "still spinning");
        let raiser = std::thread::spawn({
            let flag = flag as usize;
            move || raise(flag)
        });
        ok!(cuMemFree_v2(other));
        ok!(cuStreamQuery(stream));
        raiser.join().unwrap();
    });
}

#[test]
fn faults_strike_once_at_their_turn() {
    alone("faults_strike_once_at_their_turn", &[("SIMCUDA_FAULT", "cuMemAlloc:2=999")], || {
        start_on(0);
        let mut block = 0;
        ok!(cuMemAlloc_v2(&mut block, 64));
        assert_eq!(cu!(cuMemAlloc_v2(&mut block, 64)), 999);
        ok!(cuMemAlloc_v2(&mut block, 64));
        assert_eq!(arm(c"*:2=2,cuMemFree_v2:1=700"), 0);
        ok!(cuCtxSynchronize());
        assert_eq!(cu!(cuCtxSynchronize()), 2);
        assert_eq!(cu!(cuMemFree_v2(block)), 700);
        ok!(cuMemFree_v2(block));
        assert_eq!(arm(c"cuNoSuchCall:1=2"), 1);
    });
}

#[test]
fn kernels_that_are_not_built_in_load_and_do_not_launch() {
    alone("kernels_that_are_not_built_in_load_and_do_not_launch", &[], || {
        start_on(0);
        let stranger = function(c"stranger");
        assert_eq!(launch(stranger, null_mut(), &mut [0]), 801);
        let (mut offset, mut bytes) = (9, 9);
        ok!(cuFuncGetParamInfo(function(c"fill_u32"), 2, &mut offset, &mut bytes));
        assert_eq!((offset, bytes), (16, 4));
        assert_eq!(cu!(cuFuncGetParamInfo(stranger, 1, &mut offset, &mut bytes)), 1);
    });
}

#[test]
fn functions_and_kernels_are_different_handles() {
    alone("functions_and_kernels_are_different_handles", &[], || {
        start_on(0);
        let (mut library, mut kernel, mut function) = (null_mut(), null_mut(), null_mut());
        let (mut own, none) = (null_mut(), null_mut());
        ok!(cuLibraryLoadData(&mut library, PTX.as_ptr().cast(), none, null_mut(), 0, null_mut(), null_mut(), 0));
        ok!(cuLibraryGetKernel(&mut kernel, library, c"add_struct".as_ptr()));
        ok!(cuKernelGetFunction(&mut function, kernel));
        let (mut offset, mut bytes) = (9, 9);
        assert_ne!(function, kernel.cast());
        ok!(cuFuncGetParamInfo(function, 0, &mut offset, &mut bytes));
        assert_eq!((offset, bytes), (0, 32));
        ok!(cuKernelGetParamInfo(kernel, 0, &mut offset, null_mut()));
        let as_kernel = function.cast();
        assert_eq!(cu!(cuFuncGetParamInfo(kernel.cast(), 0, &mut offset, &mut bytes)), 400);
        assert_eq!(cu!(cuKernelGetParamInfo(as_kernel, 0, &mut offset, &mut bytes)), 400);
        assert_eq!(cu!(cuFuncGetModule(&mut own, kernel.cast())), 400);

        // Pointers inside a structure, by parameter list and by buffer, through either handle.
        let mut block = 0;
        ok!(cuMemAlloc_v2(&mut block, 48));
        let part = |index: u64| block + 16 * index;
        assert_eq!(launch(self::function(c"iota_u32"), null_mut(), &mut [part(0), 4, 10]), 0);
        assert_eq!(launch(self::function(c"iota_u32"), null_mut(), &mut [part(1), 4, 100]), 0);
        let mut args = [part(2), part(0), part(1), 4_u64];
        let mut list = [args.as_mut_ptr().cast()];
        ok!(cuLaunchKernel(kernel.cast(), 1, 1, 1, 1, 1, 1, 0, null_mut(), list.as_mut_ptr(), null_mut()));
        assert_eq!([0, 12].map(|at| read(part(2) + at)), [110, 116]);
        (args[0], args[1]) = (part(0), part(1));
        let mut size = 32_usize;
        let marker = |number: usize| number as *mut _;
        let mut extra = [marker(1), args.as_mut_ptr().cast(), marker(2), (&raw mut size).cast(), null_mut()];
        ok!(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, null_mut(), null_mut(), extra.as_mut_ptr()));
        assert_eq!(read(part(0)), 200);
    });
}

#[test]
fn nothing_answers_before_init_but_the_resolver() {
    alone("nothing_answers_before_init_but_the_resolver", &[], || {
        let (mut n, mut pointer, mut status) =
            (0, null_mut(), CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS);
        assert_eq!(cu!(cuDeviceGetCount(&mut n)), 3);
        ok!(cuGetProcAddress_v2(c"cuMemAlloc".as_ptr(), &mut pointer, 12000, 0, &mut status));
        assert_eq!(pointer, symbol("cuMemAlloc_v2"));
        ok!(cuInit(0));
        assert_eq!(cu!(cuDeviceGetCount(null_mut())), 1);
        assert_eq!(cu!(cuCtxSynchronize()), 201);
    });
}

#[test]
fn every_export_is_reachable_by_its_base_name() {
    alone("every_export_is_reachable_by_its_base_name", &[("SIMCUDA_DRIVER", "13030")], || {
        let versions = [
            2000, 2030, 3010, 3020, 4000, 5050, 6050, 7000, 9020, 10000, 11000, 11040, 12000, 12020, 12030, 12050,
            12080, 13000, 13020, 13030,
        ];
        let library = std::fs::canonicalize(std::env::var("LD_LIBRARY_PATH").unwrap() + "/libcuda.so.1").unwrap();
        let listed = std::process::Command::new("nm").args(["-D", "--defined-only"]).arg(library).output().unwrap();
        let listed = String::from_utf8(listed.stdout).unwrap();
        let exports: Vec<_> =
            listed.lines().filter_map(|line| line.rsplit(' ').next()).filter(|name| name.starts_with("cu")).collect();
        assert!(exports.len() > 250, "{}", exports.len());
        for export in exports {
            let name = export.trim_end_matches("_ptsz").trim_end_matches("_ptds");
            let base = name
                .rsplit_once("_v")
                .filter(|(_, number)| number.parse::<u32>().is_ok())
                .map_or(name, |(base, _)| base);
            let base = std::ffi::CString::new(base).unwrap();
            let reached = versions.iter().flat_map(|&version| [(version, 0), (version, 2)]).any(|(version, flags)| {
                let mut pointer = null_mut();
                ok!(cuGetProcAddress_v2(base.as_ptr(), &mut pointer, version, flags, null_mut()));
                pointer == symbol(export)
            });
            assert!(reached, "{export}");
        }
    });
}

#[test]
fn shared_memory_lives_until_the_last_process_lets_go() {
    alone("shared_memory_lives_until_the_last_process_lets_go", &[("SIMCUDA_GPUS", "1x1GiB")], || {
        start_on(0);
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let mut wanted = prop(0);
        wanted.requestedHandleTypes = kind;
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let (before, chunk) = (open(), CHUNK as u64);
        let handles = [0; 4].map(|mut handle| {
            ok!(cuMemCreate(&mut handle, CHUNK, &wanted, 0));
            handle
        });
        assert_eq!(open(), before, "memory that may be exported costs no descriptor");
        let full = used(0);
        let mut descriptor = -1_i32;
        ok!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handles[1], kind, 0));
        for handle in handles {
            ok!(cuMemRelease(handle));
        }
        assert_eq!(used(0), full - 3 * chunk, "somebody has the descriptor");
        let mut imported = 0;
        ok!(cuMemImportFromShareableHandle(&mut imported, descriptor as usize as *mut _, kind));
        // SAFETY: the descriptor is ours and closed once.
        unsafe { libc::close(descriptor) };
        assert_eq!(used(0), full - 3 * chunk, "the import has it");
        ok!(cuMemRelease(imported));
        assert_eq!(used(0), full - 4 * chunk);
    });
}

#[test]
fn an_attached_context_ends_with_its_last_detachment() {
    alone("an_attached_context_ends_with_its_last_detachment", &[], || {
        start_on(1);
        let (mut context, mut again) = (null_mut(), null_mut());
        assert_eq!(cu!(cuCtxAttach(&mut again, 0)), 1, "a primary context is retained instead");
        ok!(cuCtxCreate_v4(&mut context, null_mut(), 0, 0));
        ok!(cuCtxAttach(&mut again, 0));
        assert_eq!(again, context);
        ok!(cuCtxDetach(context));
        ok!(cuCtxSynchronize());
        ok!(cuCtxDetach(context));
        assert_eq!((used(0), cu!(cuCtxSetCurrent(context))), (0, 201));
    });
}
