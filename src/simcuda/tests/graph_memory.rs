//! Graphs that allocate and free.

#![allow(clippy::macro_metavars_in_unsafe, reason = "the macro is there to make the one unsafe call")]

mod common;

use common::*;
use cudarc::driver::sys::*;
use std::ptr::{null, null_mut};

const MIB: u64 = 1 << 20;

use CUgraphMem_attribute_enum::*;
use CUstreamCaptureMode_enum::*;

fn attribute(attribute: CUgraphMem_attribute_enum) -> u64 {
    let mut value = 0_u64;
    ok!(cuDeviceGetGraphMemAttribute(0, attribute, (&raw mut value).cast()));
    value
}

/// Used and reserved bytes of GPU 0's graphs.
fn held() -> (u64, u64) {
    (attribute(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), attribute(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT))
}

/// What `record` does on a stream, as a graph.
fn capture(stream: CUstream, record: impl FnOnce()) -> CUgraph {
    let mut graph = null_mut();
    ok!(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    record();
    ok!(cuStreamEndCapture(stream, &mut graph));
    graph
}

fn instantiate(graph: CUgraph, flags: u64) -> CUgraphExec {
    let mut executable = null_mut();
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, flags));
    executable
}

fn run(executable: CUgraphExec, stream: CUstream) -> i32 {
    let code = cu!(cuGraphLaunch(executable, stream));
    ok!(cuStreamSynchronize(stream));
    code
}

fn take(bytes: u64, stream: CUstream) -> u64 {
    let mut address = 0;
    ok!(cuMemAllocAsync(&mut address, bytes as usize, stream));
    address
}

fn types(graph: CUgraph) -> Vec<u32> {
    let mut count = 0;
    ok!(cuGraphGetNodes(graph, null_mut(), &mut count));
    let mut nodes = vec![null_mut(); count];
    ok!(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
    let type_of = |&node: &CUgraphNode| {
        let mut kind = CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        ok!(cuGraphNodeGetType(node, &mut kind));
        kind as u32
    };
    nodes.iter().map(type_of).collect()
}

#[test]
fn a_capture_records_allocation_and_free_as_nodes() {
    alone("a_capture_records_allocation_and_free_as_nodes", &[], || {
        start_on(0);
        let (stream, copy, sum) = (stream(), function(c"iota_u32"), function(c"check_iota_u32"));
        let (mut bad, mut outside, mut block) = (0, 0, 0);
        ok!(cuMemAlloc_v2(&mut bad, 8));
        ok!(cuMemsetD8_v2(bad, 9, 8));
        ok!(cuMemAlloc_v2(&mut outside, 64));
        let graph = capture(stream, || {
            block = take(MIB, stream);
            ok!(cuMemsetD8Async(bad, 0, 8, stream));
            assert_eq!(launch(copy, stream, &mut [block, MIB / 4, 3]), 0);
            assert_eq!(launch(sum, stream, &mut [block, MIB / 4, 3, bad]), 0);
            assert_eq!(cu!(cuMemFreeAsync(outside, stream)), 1, "not a graph's, and the capture survives");
            ok!(cuMemFreeAsync(block, stream));
            assert_eq!(cu!(cuMemFreeAsync(block, stream)), 1, "twice");
        });
        assert_eq!(types(graph), [10, 2, 0, 0, 11]);
        assert_eq!((held(), read(bad)), ((0, 0), 0x0909_0909), "nothing ran");
        let executable = instantiate(graph, 0);
        for _ in 0..3 {
            assert_eq!(run(executable, stream), 0);
            assert_eq!((held(), read(bad)), ((0, 2 * MIB), 0));
        }
        assert_eq!(cu!(cuMemsetD8_v2(block, 1, 1)), 700, "no memory is behind it between launches");
    });
}

#[test]
fn memory_left_allocated_is_the_programs_to_free() {
    alone("memory_left_allocated_is_the_programs_to_free", &[], || {
        start_on(0);
        let (stream, before, mut block) = (stream(), used(0), 0);
        let graph = capture(stream, || {
            block = take(MIB, stream);
            ok!(cuMemsetD32Async(block, 6, 1, stream));
        });
        let executable = instantiate(graph, 0);
        assert_eq!((run(executable, stream), read(block), held()), (0, 6, (MIB, 2 * MIB)));
        assert_eq!(run(executable, stream), 1, "still allocated");
        ok!(cuMemFreeAsync(block, stream));
        assert_eq!(cu!(cuMemFreeAsync(block, stream)), 1);
        assert_eq!((run(executable, stream), read(block)), (0, 6));
        ok!(cuGraphExecDestroy(executable));
        ok!(cuGraphDestroy(graph));
        assert_eq!((read(block), used(0) - before), (6, 2 * MIB), "it outlives its graph");
        ok!(cuMemFree_v2(block));
        assert_eq!((held(), used(0)), ((0, 0), before));
        assert_eq!(cu!(cuMemFree_v2(block)), 1);
    });
}

#[test]
fn a_launch_frees_what_the_last_one_left_where_asked_to() {
    alone("a_launch_frees_what_the_last_one_left_where_asked_to", &[], || {
        start_on(0);
        let (stream, mut block) = (stream(), 0);
        let graph = capture(stream, || block = take(MIB, stream));
        let executable = instantiate(graph, 1);
        assert_eq!([run(executable, stream), run(executable, stream)], [0, 0]);
        assert_eq!(held(), (MIB, 2 * MIB));
    });
}

#[test]
fn unused_graph_memory_can_be_trimmed() {
    alone("unused_graph_memory_can_be_trimmed", &[("SIMCUDA_GPUS", "1x1GiB")], || {
        start_on(0);
        let (stream, before) = (stream(), used(0));
        let graph = capture(stream, || {
            let block = take(3 * MIB, stream);
            ok!(cuMemFreeAsync(block, stream));
        });
        let executable = instantiate(graph, 0);
        ok!(cuGraphUpload(executable, stream));
        assert_eq!(held(), (0, 4 * MIB));
        assert_eq!(run(executable, stream), 0);
        ok!(cuDeviceGraphMemTrim(0));
        assert_eq!((held(), used(0)), ((0, 0), before));
        let high = [CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH];
        assert_eq!(high.map(attribute), [3 * MIB, 4 * MIB]);
        for name in high {
            let mut zero = 0_u64;
            ok!(cuDeviceSetGraphMemAttribute(0, name, (&raw mut zero).cast()));
        }
        assert_eq!(high.map(attribute), [0, 0]);
        assert_eq!(run(executable, stream), 0, "a launch takes it again");
        ok!(cuDeviceGraphMemTrim(0));
        let mut plain = 0;
        ok!(cuMemAlloc_v2(&mut plain, ((1 << 30) - before) as usize & !(2 * MIB as usize - 1)));
        assert_eq!(cu!(cuGraphLaunch(executable, stream)), 2);
    });
}

#[test]
fn nodes_can_be_added_and_read_one_by_one() {
    alone("nodes_can_be_added_and_read_one_by_one", &[], || {
        start_on(0);
        let (mut graph, mut alloc, mut free) = (null_mut(), null_mut(), null_mut());
        ok!(cuGraphCreate(&mut graph, 0));
        // SAFETY: a structure of integers and pointers, for whose enumerations zero is a member.
        let mut params: CUDA_MEM_ALLOC_NODE_PARAMS = unsafe { std::mem::zeroed() };
        params.poolProps.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        params.poolProps.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let peer = [CUmemAccessDesc {
            location: CUmemLocation { id: 1, ..params.poolProps.location },
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }];
        (params.accessDescs, params.accessDescCount) = (peer.as_ptr(), 1);
        assert_eq!(cu!(cuGraphAddMemAllocNode(&mut alloc, graph, null(), 0, &mut params)), 1, "of no size");
        params.bytesize = 4096;
        ok!(cuGraphAddMemAllocNode(&mut alloc, graph, null(), 0, &mut params));
        let address = params.dptr;
        assert_ne!(address, 0);
        ok!(cuGraphAddMemFreeNode(&mut free, graph, &alloc, 1, address));
        assert_eq!(cu!(cuGraphAddMemFreeNode(&mut free, graph, &alloc, 1, address)), 1, "a second time");
        assert_eq!(cu!(cuGraphAddMemFreeNode(&mut free, graph, &alloc, 1, 64)), 1);
        let mut freed = 0;
        ok!(cuGraphMemFreeNodeGetParams(free, &mut freed));
        ok!(cuGraphMemAllocNodeGetParams(alloc, &mut params));
        assert_eq!((freed, params.bytesize, params.dptr, params.accessDescCount), (address, 4096, address, 1));
        assert_eq!(cu!(cuGraphMemAllocNodeGetParams(free, &mut params)), 1);
        let executable = instantiate(graph, 0);
        let mut second = null_mut();
        assert_eq!(cu!(cuGraphInstantiateWithFlags(&mut second, graph, 0)), 801, "one at a time");
        assert_eq!(cu!(cuGraphClone(&mut second.cast(), graph)), 801);
        ok!(cuGraphExecDestroy(executable));
        ok!(cuGraphInstantiateWithFlags(&mut second, graph, 0));
    });
}
