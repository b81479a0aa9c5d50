//! Graphs: lists of work, from a capture or node by node, that run in the order in which they were added.

use crate::driver::{Handles, driver};
use crate::error::{Code, Outcome};
use crate::ffi::{Copy3d, Handle, In, Out};
use crate::graph_memory::{self, AllocNode, Allocation, Room};
use crate::kernels::Kernel;
use crate::stream::{HostFn, Work, host_work, resolve};
use crate::{copy, fill, launch};
use parking_lot::Mutex;
use std::ffi::{c_int, c_uint};
use std::sync::{Arc, Weak};

/// The work in the order in which it was added, each with its handle.
pub struct Graph {
    nodes: Mutex<Vec<(Handle, Work)>>,
    /// The executable made of it last. While that exists, a graph with memory nodes makes no other.
    executable: Mutex<Weak<Executable>>,
}

/// What a piece of work is to a graph.
#[derive(Clone)]
pub enum Node {
    Kernel(&'static Kernel),
    Memcpy,
    Memset,
    Host,
    /// Of so many nodes, one of which may be a kernel that follows pointers.
    Graph {
        works: usize,
        follows: bool,
    },
    Empty,
    MemAlloc(Arc<Allocation>),
    MemFree(Arc<Allocation>),
}

impl Node {
    /// `CUgraphNodeType`.
    fn number(&self) -> c_int {
        match self {
            Node::Kernel(_) => 0,
            Node::Memcpy => 1,
            Node::Memset => 2,
            Node::Host => 3,
            Node::Graph { .. } => 4,
            Node::Empty => 5,
            Node::MemAlloc(_) => 10,
            Node::MemFree(_) => 11,
        }
    }

    /// Whether it uses memory that nothing in its parameters names.
    pub fn follows_pointers(&self) -> bool {
        matches!(self, Node::Kernel(Kernel { follows: true, .. }) | Node::Graph { follows: true, .. })
    }

    fn is_memory(&self) -> bool {
        matches!(self, Node::MemAlloc(_) | Node::MemFree(_))
    }
}

/// What a node handle stands for; its graph's handle, so that dependencies can be checked.
pub struct Entry {
    graph: Handle,
    node: Node,
}

/// `CUgraphExec`.
pub struct Executable {
    work: Mutex<Vec<Work>>,
    rooms: Vec<Arc<Room>>,
    /// Memory that a launch left allocated is freed by the next one.
    auto_free: bool,
}

const AUTO_FREE_ON_LAUNCH: u64 = 1;

impl Graph {
    /// Enters a graph of `work`, with a handle for it and for each node.
    pub fn enter(work: Vec<Work>) -> Handle {
        let driver = driver();
        let handle = Handles::<Graph>::reserve();
        let graph = Arc::new(Self { nodes: Mutex::default(), executable: Mutex::new(Weak::new()) });
        graph.extend(handle, work);
        driver.graphs.insert_as(handle, graph);
        handle
    }

    /// Adds work at the end; `graph` is its own handle.
    pub fn extend(&self, graph: Handle, work: Vec<Work>) {
        let enter = |work: Work| (driver().nodes.insert(Arc::new(Entry { graph, node: work.node.clone() })), work);
        self.nodes.lock().extend(work.into_iter().map(enter));
    }

    fn work(&self) -> Vec<Work> {
        self.nodes.lock().iter().map(|(_, work)| work.clone()).collect()
    }

    fn has_memory(&self) -> bool {
        self.nodes.lock().iter().any(|(_, work)| work.node.is_memory())
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

/// `cuGraphClone`. Two graphs cannot own the same memory.
pub fn clone(out: Out<Handle>, graph: Handle) -> Outcome {
    out.required()?;
    let graph = driver().graphs.get(graph).map_err(|_| Code::INVALID_VALUE)?;
    if graph.has_memory() {
        return Err(Code::NOT_SUPPORTED);
    }
    out.set(Graph::enter(graph.work()))
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
    let node = driver.nodes.insert(Arc::new(Entry { graph, node: work.node.clone() }));
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

/// `CUgraphNodeParams`: its kind, then the parameters of that kind.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AnyNode {
    kind: c_int,
    reserved: [c_int; 3],
    params: [u64; 29],
    tail: u64,
}

const _: () = assert!(size_of::<AnyNode>() == size_of::<cudarc::driver::sys::CUgraphNodeParams>());

/// `cuGraphAddNode`: the kinds that have a call of their own here.
pub fn add_any(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize, node: Out<AnyNode>) -> Outcome {
    const PARAMS: usize = std::mem::offset_of!(AnyNode, params);
    // In `CUDA_MEMCPY_NODE_PARAMS`, behind flags and context.
    const COPY: usize = PARAMS + 16;
    let kind = node.take()?.kind;
    let params = |offset| node.address() + offset;
    match kind {
        0 => add_kernel(out, graph, dependencies, count, In::from_address(params(PARAMS))),
        1 => add_memcpy(out, graph, dependencies, count, In::from_address(params(COPY)), 0),
        2 => add_memset(out, graph, dependencies, count, In::from_address(params(PARAMS)), 0),
        3 => add_host(out, graph, dependencies, count, In::from_address(params(PARAMS))),
        5 => add_empty(out, graph, dependencies, count),
        10 => add_alloc(out, graph, dependencies, count, Out::from_address(params(PARAMS))),
        11 => add_free(out, graph, dependencies, count, In::<u64>::from_address(params(PARAMS)).get()?),
        _ => Err(Code::NOT_SUPPORTED),
    }
}

/// `cuGraphAddNode_v2`. Edges carry nothing here.
pub fn add_any_v2(
    out: Out<Handle>,
    graph: Handle,
    dependencies: In<Handle>,
    _edges: In<u8>,
    count: usize,
    node: Out<AnyNode>,
) -> Outcome {
    add_any(out, graph, dependencies, count, node)
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
    out.set(driver().nodes.get(node).map_err(|_| Code::INVALID_VALUE)?.node.number())
}

/// `cuGraphAddMemAllocNode`: the address is written back at once.
pub fn add_alloc(
    out: Out<Handle>,
    graph: Handle,
    dependencies: In<Handle>,
    count: usize,
    params: Out<AllocNode>,
) -> Outcome {
    out.required()?;
    let given = params.take()?;
    let allocation = given.allocate()?;
    let address = allocation.address;
    add(out, graph, dependencies, count, graph_memory::alloc_work(allocation))?;
    params.set(given.with_address(address))
}

pub fn add_free(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize, address: u64) -> Outcome {
    out.required()?;
    add(out, graph, dependencies, count, graph_memory::free_work(address)?)
}

pub fn alloc_params(node: Handle, out: Out<AllocNode>) -> Outcome {
    out.required()?;
    match &driver().nodes.get(node).map_err(|_| Code::INVALID_VALUE)?.node {
        Node::MemAlloc(allocation) => out.set(AllocNode::of(allocation)),
        _ => Err(Code::INVALID_VALUE),
    }
}

pub fn free_params(node: Handle, out: Out<u64>) -> Outcome {
    out.required()?;
    match &driver().nodes.get(node).map_err(|_| Code::INVALID_VALUE)?.node {
        Node::MemFree(allocation) => out.set(allocation.address),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// `cuGraphInstantiateWithFlags`. That a second executable of a graph with memory nodes is refused is documented, and not
/// with which error.
pub fn instantiate(out: Out<Handle>, graph: Handle, flags: u64) -> Outcome {
    out.required()?;
    let graph = driver().graphs.get(graph).map_err(|_| Code::INVALID_VALUE)?;
    let mut latest = graph.executable.lock();
    if graph.has_memory() && latest.strong_count() > 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    let (work, rooms) = graph_memory::equip(graph.work());
    let auto_free = flags & AUTO_FREE_ON_LAUNCH != 0;
    let executable = Arc::new(Executable { work: Mutex::new(work), rooms, auto_free });
    *latest = Arc::downgrade(&executable);
    out.set(driver().executables.insert(executable))
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

/// `cuGraphExecUpdate`: takes over the work of a graph of the same size, without memory nodes.
pub fn update(executable: Handle, graph: Handle, _result: Out<u8>) -> Outcome {
    let graph = driver().graphs.get(graph).map_err(|_| Code::INVALID_VALUE)?;
    let work = graph.work();
    let executable = driver().executables.get(executable).map_err(|_| Code::INVALID_VALUE)?;
    let mut current = executable.work.lock();
    if current.len() != work.len() || graph.has_memory() || !executable.rooms.is_empty() {
        return Err(Code::GRAPH_EXEC_UPDATE_FAILURE);
    }
    *current = work;
    Ok(())
}

pub fn launch_graph(executable: Handle, stream: Handle) -> Outcome {
    let executable = driver().executables.get(executable).map_err(|_| Code::INVALID_VALUE)?;
    let stream = resolve(stream)?;
    let list = executable.work.lock().clone();
    if list.iter().any(|work| work.node.is_memory()) {
        if stream.capturing()?.is_some() {
            return Err(Code::NOT_SUPPORTED);
        }
        graph_memory::prepare(&list, &executable.rooms, executable.auto_free)?;
    }
    let touches = list.iter().flat_map(|work| work.touches.clone()).collect();
    let node = Node::Graph { works: list.len(), follows: list.iter().any(|work| work.node.follows_pointers()) };
    let action: crate::stream::Action =
        Arc::new(move |context| list.iter().try_for_each(|work| (work.action)(context)));
    stream.submit(Work { action, touches, node })
}

/// `cuGraphUpload`: takes the memory that a launch will need.
pub fn upload(executable: Handle, stream: Handle) -> Outcome {
    let executable = driver().executables.get(executable).map_err(|_| Code::INVALID_VALUE)?;
    resolve(stream)?;
    executable.rooms.iter().try_for_each(|room| room.fill())
}

pub fn destroy_executable(executable: Handle) -> Outcome {
    driver().executables.remove(executable).map(drop).map_err(|_| Code::INVALID_VALUE)
}
