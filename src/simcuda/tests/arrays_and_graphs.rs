//! Arrays, and the ways to make a graph or a batch beside the usual ones.

#![allow(clippy::macro_metavars_in_unsafe, reason = "the macro is there to make the one unsafe call")]

mod common;

use common::*;
use cudarc::driver::sys::*;
use std::ptr::{null, null_mut};

const MIB: u64 = 1 << 20;

/// An array of floats.
fn descriptor(width: usize, height: usize, depth: usize, flags: u32) -> CUDA_ARRAY3D_DESCRIPTOR {
    let format = CUarray_format::CU_AD_FORMAT_FLOAT;
    CUDA_ARRAY3D_DESCRIPTOR { Width: width, Height: height, Depth: depth, Format: format, NumChannels: 1, Flags: flags }
}

#[test]
fn arrays_take_memory_until_they_or_their_context_end() {
    alone("arrays_take_memory_until_they_or_their_context_end", &[], || {
        start_on(0);
        let (before, mut array, mut levels) = (used(0), null_mut(), null_mut());
        ok!(cuArray3DCreate_v2(&mut array, &descriptor(512, 512, 4, 0)));
        assert_eq!(used(0) - before, 4 * MIB);
        let mut back = descriptor(0, 0, 0, 0);
        ok!(cuArray3DGetDescriptor_v2(&mut back, array));
        assert_eq!((back.Width, back.Height, back.Depth), (512, 512, 4));
        ok!(cuMipmappedArrayCreate(&mut levels, &descriptor(512, 512, 0, 0), 99));
        assert!((4 * MIB + MIB..6 * MIB).contains(&(used(0) - before)), "a third more than its first level");
        assert_eq!(cu!(cuArrayDestroy(levels.cast())), 400);
        ok!(cuArrayDestroy(array));
        assert_eq!(cu!(cuArrayDestroy(array)), 400);
        ok!(cuDevicePrimaryCtxReset_v2(0));
        assert_eq!(used(0), 0);
    });
}

#[test]
fn what_no_array_can_be_is_refused() {
    let small = [("SIMCUDA_GPUS", "1x1GiB")];
    alone("what_no_array_can_be_is_refused", &small, || {
        start_on(0);
        let create = |descriptor| cu!(cuArray3DCreate_v2(&mut null_mut(), &descriptor));
        let (layered, cube, sparse) = (1, 4, 0x40);
        assert_eq!(create(descriptor(0, 8, 0, 0)), 1, "no width");
        assert_eq!(create(descriptor(8, 0, 8, 0)), 1, "depth without height");
        assert_eq!(create(descriptor(8, 0, 8, layered)), 0, "but layers of lines");
        assert_eq!(create(descriptor(8, 4, 6, cube)), 1, "no square");
        assert_eq!(create(CUDA_ARRAY3D_DESCRIPTOR { NumChannels: 3, ..descriptor(8, 8, 0, 0) }), 1);
        assert_eq!(create(descriptor(8, 8, 0, 0x100)), 1, "unknown flag");
        assert_eq!(create(descriptor(8, 8, 0, sparse)), 801);
        assert_eq!(create(descriptor(131_072, 65_536, 0, 0)), 2);
    });
}

#[test]
fn a_batch_of_copies_runs_in_its_stream() {
    alone("a_batch_of_copies_runs_in_its_stream", &[], || {
        start_on(0);
        let (stream, mut block, mut host) = (stream(), 0, [1_u32, 2, 3, 4]);
        ok!(cuMemAlloc_v2(&mut block, 16));
        let source = host.as_mut_ptr() as u64;
        let (mut to, mut from, mut sizes) = ([block, block + 8], [source + 8, source], [8_usize, 8]);
        // SAFETY: a structure of integers, for whose enumerations zero is a member.
        let (mut attributes, mut first) = (unsafe { std::mem::zeroed::<CUmemcpyAttributes>() }, 0);
        let mut batch = |stream| {
            let lists = (to.as_mut_ptr(), from.as_mut_ptr(), sizes.as_mut_ptr());
            cu!(cuMemcpyBatchAsync_v2(lists.0, lists.1, lists.2, 2, &mut attributes, &mut first, 1, stream))
        };
        assert_eq!((batch(stream), batch(null_mut())), (0, 1), "not in the legacy stream");
        ok!(cuStreamSynchronize(stream));
        assert_eq!([0, 4, 8, 12].map(|at| read(block + at)), [3, 4, 1, 2]);
    });
}

#[test]
fn nodes_of_every_kind_come_through_one_call() {
    alone("nodes_of_every_kind_come_through_one_call", &[], || {
        start_on(0);
        let (mut graph, mut node, stream, mut block) = (null_mut(), null_mut(), stream(), 0);
        ok!(cuMemAlloc_v2(&mut block, 64));
        ok!(cuGraphCreate(&mut graph, 0));
        // SAFETY: integers, pointers and enumerations for which zero is a member.
        let mut params: CUgraphNodeParams = unsafe { std::mem::zeroed() };
        params.type_ = CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET;
        // SAFETY: integers, pointers and enumerations for which zero is a member.
        let mut memset: CUDA_MEMSET_NODE_PARAMS_v2 = unsafe { std::mem::zeroed() };
        (memset.dst, memset.value, memset.elementSize, memset.width, memset.height) = (block, 5, 4, 4, 1);
        params.__bindgen_anon_1.memset = memset;
        ok!(cuGraphAddNode_v2(&mut node, graph, null(), null(), 0, &mut params));
        params.type_ = CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC;
        // SAFETY: integers, pointers and enumerations for which zero is a member.
        let mut alloc: CUDA_MEM_ALLOC_NODE_PARAMS_v2 = unsafe { std::mem::zeroed() };
        alloc.poolProps.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        alloc.poolProps.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        alloc.bytesize = 4096;
        params.__bindgen_anon_1.alloc = alloc;
        ok!(cuGraphAddNode_v2(&mut node, graph, &node.clone(), null(), 1, &mut params));
        // SAFETY: the kind says which member it is.
        assert_ne!(unsafe { params.__bindgen_anon_1.alloc.dptr }, 0);

        // More of it, from a capture.
        let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        ok!(cuStreamBeginCaptureToGraph(stream, graph, null(), null(), 0, relaxed));
        ok!(cuMemsetD32Async(block + 4, 6, 1, stream));
        let (mut same, mut executable, mut count) = (null_mut(), null_mut(), 0);
        ok!(cuStreamEndCapture(stream, &mut same));
        ok!(cuGraphGetNodes(graph, null_mut(), &mut count));
        assert_eq!((same, count), (graph, 3));
        ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        ok!(cuGraphLaunch(executable, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!([0, 4].map(|at| read(block + at)), [5, 6]);
    });
}

#[test]
fn a_librarys_variable_is_another_in_each_context() {
    alone("a_librarys_variable_is_another_in_each_context", &[], || {
        start_on(0);
        let text = c".version 7.0\n.target sm_70\n.address_size 64\n.visible .global .align 4 .b8 table[64];\n";
        let (mut library, none) = (null_mut(), null_mut());
        ok!(cuLibraryLoadData(&mut library, text.as_ptr().cast(), none, null_mut(), 0, null_mut(), null_mut(), 0));
        let variable = || {
            let (mut address, mut bytes) = (0, 0);
            ok!(cuLibraryGetGlobal(&mut address, &mut bytes, library, c"table".as_ptr()));
            (address, bytes)
        };
        let first = variable();
        ok!(cuMemsetD8_v2(first.0, 1, first.1));
        assert_eq!((first.1, variable()), (64, first));
        start_on(1);
        assert_ne!(variable().0, first.0);
        assert_eq!(cu!(cuLibraryGetGlobal(&mut 0, &mut 0, library, c"chair".as_ptr())), 500);
        ok!(cuLibraryUnload(library));
        assert_eq!(cu!(cuMemsetD8_v2(first.0, 1, 1)), 1);
    });
}
