//! Graphs: lists of work, from a capture or node by node, that run in the order in which they were added.

use crate::driver::{Handles, driver};
use crate::error::{Code, Outcome};
use crate::ffi::{Copy3d, Handle, In, Out};
use crate::stream::{HostFn, Work, host_work, resolve};
use crate::{copy, fill, launch};
use parking_lot::Mutex;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;

/// The work in the order in which it was added, each with its handle.
pub struct Graph {
    nodes: Mutex<Vec<(Handle, Work)>>,
}

/// What a piece of work is to a graph (`CUgraphNodeType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    Kernel = 0,
    Memcpy = 1,
    Memset = 2,
    Host = 3,
    Graph = 4,
    Empty = 5,
}

/// What a node handle stands for; its graph's handle, so that dependencies can be checked.
pub struct Entry {
    graph: Handle,
    node: Node,
}

/// `CUgraphExec`.
pub struct Executable {
    work: Mutex<Vec<Work>>,
}

impl Graph {
    /// Enters a graph of `work`, with a handle for it and for each node.
    pub fn enter(work: Vec<Work>) -> Handle {
        let driver = driver();
        let graph = Handles::<Graph>::reserve();
        let enter = |work: Work| (driver.nodes.insert(Arc::new(Entry { graph, node: work.node })), work);
        let nodes = work.into_iter().map(enter).collect();
        driver.graphs.insert_as(graph, Arc::new(Self { nodes: Mutex::new(nodes) }));
        graph
    }

    fn work(&self) -> Vec<Work> {
        self.nodes.lock().iter().map(|(_, work)| work.clone()).collect()
    }
}

pub fn create(out: Out<Handle>, flags: c_uint) -> Outcome {
    out.required()?;
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    out.set(Graph::enter(Vec::new()))
}

pub fn destroy(graph: Handle) -> Outcome {
    let driver = driver();
    driver.graphs.remove(graph).map_err(|_| Code::INVALID_VALUE)?;
    driver.nodes.retain(|entry| entry.graph != graph);
    Ok(())
}

pub fn clone(out: Out<Handle>, graph: Handle) -> Outcome {
    out.required()?;
    let work = driver().graphs.get(graph).map_err(|_| Code::INVALID_VALUE)?.work();
    out.set(Graph::enter(work))
}

/// Adds a node after `dependencies`, which exist already and so come before it anyway.
fn add(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize, work: Work) -> Outcome {
    out.required()?;
    let driver = driver();
    let target = driver.graphs.get(graph).map_err(|_| Code::INVALID_VALUE)?;
    for node in dependencies.list(count)? {
        if driver.nodes.get(node).map_err(|_| Code::INVALID_VALUE)?.graph != graph {
            return Err(Code::INVALID_VALUE);
        }
    }
    let node = driver.nodes.insert(Arc::new(Entry { graph, node: work.node }));
    target.nodes.lock().push((node, work));
    out.set(node)
}

/// `CUDA_KERNEL_NODE_PARAMS`: what both versions begin with.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelNode {
    function: Handle,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    params: usize,
    extra: usize,
}

pub fn add_kernel(
    out: Out<Handle>,
    graph: Handle,
    dependencies: In<Handle>,
    count: usize,
    node: In<KernelNode>,
) -> Outcome {
    let node = node.get()?;
    let work = launch::work(
        node.function,
        node.grid,
        node.block,
        In::from_address(node.params),
        In::from_address(node.extra),
    )?;
    add(out, graph, dependencies, count, work)
}

/// `CUDA_MEMSET_NODE_PARAMS`: what both versions begin with.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemsetNode {
    address: u64,
    pitch: usize,
    value: c_uint,
    element: c_uint,
    width: usize,
    height: usize,
}

pub fn add_memset(
    out: Out<Handle>,
    graph: Handle,
    dependencies: In<Handle>,
    count: usize,
    node: In<MemsetNode>,
    context: Handle,
) -> Outcome {
    let node = node.get()?;
    let device = crate::context::by_handle(context)?.device;
    let work = fill::work(device, node.address, node.pitch, node.value, node.element, node.width, node.height)?;
    add(out, graph, dependencies, count, work)
}

pub fn add_memcpy(
    out: Out<Handle>,
    graph: Handle,
    dependencies: In<Handle>,
    count: usize,
    node: In<Copy3d>,
    _context: Handle,
) -> Outcome {
    add(out, graph, dependencies, count, copy::volume_work(node)?)
}

/// `CUDA_HOST_NODE_PARAMS`: what both versions begin with.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HostNode {
    function: Option<HostFn>,
    argument: Handle,
}

pub fn add_host(
    out: Out<Handle>,
    graph: Handle,
    dependencies: In<Handle>,
    count: usize,
    node: In<HostNode>,
) -> Outcome {
    let node = node.get()?;
    add(out, graph, dependencies, count, host_work(node.function, node.argument)?)
}

pub fn add_empty(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize) -> Outcome {
    add(out, graph, dependencies, count, Work { action: Arc::new(|_| Ok(())), touches: Vec::new(), node: Node::Empty })
}

/// `cuGraphGetNodes`, in the order in which they were added.
pub fn nodes(graph: Handle, list: Out<Handle>, count: Out<usize>) -> Outcome {
    let graph = driver().graphs.get(graph).map_err(|_| Code::INVALID_VALUE)?;
    let nodes = graph.nodes.lock();
    if !list.is_null() {
        let room = count.take()?.min(nodes.len());
        for (index, (node, _)) in nodes.iter().take(room).enumerate() {
            list.set_at(index, *node);
        }
    }
    count.set(nodes.len())
}

/// `cuGraphNodeGetType`.
pub fn node_type(node: Handle, out: Out<c_int>) -> Outcome {
    out.required()?;
    out.set(driver().nodes.get(node).map_err(|_| Code::INVALID_VALUE)?.node as c_int)
}

pub fn instantiate(out: Out<Handle>, graph: Handle, _flags: u64) -> Outcome {
    out.required()?;
    let work = driver().graphs.get(graph).map_err(|_| Code::INVALID_VALUE)?.work();
    out.set(driver().executables.insert(Arc::new(Executable { work: Mutex::new(work) })))
}

/// `cuGraphInstantiate` of 10.0: no error node and no text, as nothing can go wrong here.
pub fn instantiate_v1(out: Out<Handle>, graph: Handle, node: Out<Handle>, _log: Out<u8>, _bytes: usize) -> Outcome {
    instantiate(out, graph, 0)?;
    node.set_if_wanted(0);
    Ok(())
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct InstantiateParams {
    flags: u64,
    stream: Handle,
    node: Handle,
    result: c_int,
}

pub fn instantiate_with_params(out: Out<Handle>, graph: Handle, params: Out<InstantiateParams>) -> Outcome {
    let given = params.take()?;
    instantiate(out, graph, given.flags)?;
    params.set(InstantiateParams { node: 0, result: 0, ..given })
}

/// `cuGraphExecUpdate`: takes over the work of a graph of the same size.
pub fn update(executable: Handle, graph: Handle, _result: Out<u8>) -> Outcome {
    let work = driver().graphs.get(graph).map_err(|_| Code::INVALID_VALUE)?.work();
    let executable = driver().executables.get(executable).map_err(|_| Code::INVALID_VALUE)?;
    let mut current = executable.work.lock();
    if current.len() != work.len() {
        return Err(Code::GRAPH_EXEC_UPDATE_FAILURE);
    }
    *current = work;
    Ok(())
}

pub fn launch_graph(executable: Handle, stream: Handle) -> Outcome {
    let executable = driver().executables.get(executable).map_err(|_| Code::INVALID_VALUE)?;
    let list = executable.work.lock().clone();
    let touches = list.iter().flat_map(|work| work.touches.clone()).collect();
    let action: crate::stream::Action =
        Arc::new(move |context| list.iter().try_for_each(|work| (work.action)(context)));
    resolve(stream)?.submit(Work { action, touches, node: Node::Graph })
}

pub fn upload(executable: Handle, stream: Handle) -> Outcome {
    driver().executables.get(executable).map_err(|_| Code::INVALID_VALUE)?;
    resolve(stream).map(drop)
}

pub fn destroy_executable(executable: Handle) -> Outcome {
    driver().executables.remove(executable).map(drop).map_err(|_| Code::INVALID_VALUE)
}
