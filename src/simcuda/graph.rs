//! Graphs: lists of work, from a capture or node by node, that run in the order in which they were added.

use crate::driver::{Handles, driver};
use crate::error::{Code, Outcome};
use crate::ffi::{Copy3d, Handle, In, Out};
use crate::graph_memory::{self, AllocNode, Allocation, Room};
use crate::kernels::Kernel;
use crate::launch::Parameters;
use crate::physical::Place;
use crate::space::Kind;
use crate::stream::{HostFn, Work, host_work, resolve};
use crate::{copy, fill, launch};
use parking_lot::Mutex;
use std::ffi::{c_int, c_uint};
use std::sync::{Arc, Weak};

/// The work in the order in which it was added.
pub struct Graph {
    nodes: Mutex<Vec<Member>>,
    /// The executable made of it last. While that exists, a graph with memory nodes makes no other.
    executable: Mutex<Weak<Executable>>,
}

/// A node of a graph or an executable.
#[derive(Clone)]
struct Member {
    handle: Handle,
    work: Work,
    /// Where the memory of a copy's or a fill's operands lay when it was added.
    operands: Vec<Place>,
}

impl Member {
    fn new(handle: Handle, work: Work) -> Self {
        let operands = operands(&work);
        Self { handle, work, operands }
    }
}

/// The places of the memory that a copy or a fill names, in their order. Executables keep to those: "the device(s) to which the
/// operand(s) was allocated/mapped cannot change", as the documentation of `cuGraphExecUpdate` has it.
fn operands(work: &Work) -> Vec<Place> {
    if !matches!(work.node, Node::Memcpy(_) | Node::Memset(_)) {
        return Vec::new();
    }
    let regions = work.touches.iter().flat_map(|&(start, end)| driver().space.within(start, end));
    let mut places: Vec<Place> = regions
        .filter_map(|region| match &region.kind {
            Kind::Plain { physical, .. } | Kind::Vmm { physical, .. } => Some(physical.place()),
            Kind::Host { .. } | Kind::Managed { .. } => None,
        })
        .collect();
    places.dedup();
    places
}

/// What a piece of work is to a graph.
#[derive(Clone)]
pub enum Node {
    Kernel(&'static Kernel, Arc<Parameters>),
    Memcpy(Copy3d),
    Memset(MemsetNode),
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
            Node::Kernel(..) => 0,
            Node::Memcpy(_) => 1,
            Node::Memset(_) => 2,
            Node::Host => 3,
            Node::Graph { .. } => 4,
            Node::Empty => 5,
            Node::MemAlloc(_) => 10,
            Node::MemFree(_) => 11,
        }
    }

    /// Whether it uses memory that nothing in its parameters names.
    pub fn follows_pointers(&self) -> bool {
        matches!(self, Node::Kernel(Kernel { follows: true, .. }, _) | Node::Graph { follows: true, .. })
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
    members: Mutex<Vec<Member>>,
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
        let enter = |work: Work| {
            let node = work.node.clone();
            Member::new(driver().nodes.insert(Arc::new(Entry { graph, node })), work)
        };
        self.nodes.lock().extend(work.into_iter().map(enter));
    }

    fn work(&self) -> Vec<Work> {
        self.nodes.lock().iter().map(|member| member.work.clone()).collect()
    }

    fn has_memory(&self) -> bool {
        self.nodes.lock().iter().any(|member| member.work.node.is_memory())
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
    target.nodes.lock().push(Member::new(node, work));
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
    add(out, graph, dependencies, count, kernel_work(node)?)
}

fn kernel_work(node: In<KernelNode>) -> Outcome<Work> {
    let node = node.get()?;
    let (params, extra) = (In::from_address(node.params), In::from_address(node.extra));
    launch::work(node.function, node.grid, node.block, node.shared, params, extra)
}

/// `CUDA_MEMSET_NODE_PARAMS`: what both versions begin with.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemsetNode {
    pub address: u64,
    pub pitch: usize,
    pub value: c_uint,
    pub element: c_uint,
    pub width: usize,
    pub height: usize,
}

pub fn add_memset(
    out: Out<Handle>,
    graph: Handle,
    dependencies: In<Handle>,
    count: usize,
    node: In<MemsetNode>,
    context: Handle,
) -> Outcome {
    add(out, graph, dependencies, count, memset_work(node, context)?)
}

fn memset_work(node: In<MemsetNode>, context: Handle) -> Outcome<Work> {
    let node = node.get()?;
    let device = crate::context::by_handle(context)?.device;
    fill::work(device, node.address, node.pitch, node.value, node.element, node.width, node.height)
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
        for (index, member) in nodes.iter().take(room).enumerate() {
            list.set_at(index, member.handle);
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

/// `cuGraphKernelNodeGetParams`: the arguments are the node's, and live as long as it does.
pub fn kernel_params(node: Handle, out: Out<KernelNode>) -> Outcome {
    out.required()?;
    match &driver().nodes.get(node).map_err(|_| Code::INVALID_VALUE)?.node {
        Node::Kernel(_, given) => out.set(KernelNode {
            function: given.function,
            grid: given.grid,
            block: given.block,
            shared: given.shared,
            params: given.pointers(),
            extra: 0,
        }),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// `cuGraphMemcpyNodeGetParams`.
pub fn memcpy_params(node: Handle, out: Out<Copy3d>) -> Outcome {
    out.required()?;
    match &driver().nodes.get(node).map_err(|_| Code::INVALID_VALUE)?.node {
        Node::Memcpy(copy) => out.set(*copy),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// `cuGraphMemsetNodeGetParams`.
pub fn memset_params(node: Handle, out: Out<MemsetNode>) -> Outcome {
    out.required()?;
    match &driver().nodes.get(node).map_err(|_| Code::INVALID_VALUE)?.node {
        Node::Memset(fill) => out.set(*fill),
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
    // The work alone is another one where it takes memory.
    let members = graph.nodes.lock().iter().zip(work).map(|(member, work)| Member { work, ..member.clone() }).collect();
    let executable = Arc::new(Executable { members: Mutex::new(members), rooms, auto_free });
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

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UpdateResult {
    result: c_int,
    node: Handle,
    from: Handle,
}

const TOPOLOGY_CHANGED: c_int = 2;
const PARAMETERS_CHANGED: c_int = 5;

/// `cuGraphExecUpdate`: takes over the work of a graph of the same size, without memory nodes, whose copies and fills have their
/// operands where those of the executable's had them when they were added.
pub fn update(executable: Handle, graph: Handle, result: Out<UpdateResult>) -> Outcome {
    let graph = driver().graphs.get(graph).map_err(|_| Code::INVALID_VALUE)?;
    let executable = driver().executables.get(executable).map_err(|_| Code::INVALID_VALUE)?;
    let fresh = graph.nodes.lock().clone();
    let mut current = executable.members.lock();
    if current.len() != fresh.len() || graph.has_memory() || !executable.rooms.is_empty() {
        result.set_if_wanted(UpdateResult { result: TOPOLOGY_CHANGED, node: 0, from: 0 });
        return Err(Code::GRAPH_EXEC_UPDATE_FAILURE);
    }
    if let Some((old, new)) = current.iter().zip(&fresh).find(|(old, new)| old.operands != new.operands) {
        result.set_if_wanted(UpdateResult { result: PARAMETERS_CHANGED, node: new.handle, from: old.handle });
        return Err(Code::GRAPH_EXEC_UPDATE_FAILURE);
    }
    result.set_if_wanted(UpdateResult { result: 0, node: 0, from: 0 });
    for (old, new) in current.iter_mut().zip(fresh) {
        // The nodes of the graph that it was made of go on naming those of the executable.
        *old = Member { handle: old.handle, ..new };
    }
    Ok(())
}

/// The work of one node of an executable becomes another of its kind; INVALID_VALUE "if the memory operands' mappings changed".
fn set_node(executable: Handle, node: Handle, work: Work) -> Outcome {
    let executable = driver().executables.get(executable).map_err(|_| Code::INVALID_VALUE)?;
    let fresh = Member::new(node, work);
    let mut members = executable.members.lock();
    let member = members.iter_mut().find(|member| member.handle == node).ok_or(Code::INVALID_VALUE)?;
    if member.work.node.number() != fresh.work.node.number() || member.operands != fresh.operands {
        return Err(Code::INVALID_VALUE);
    }
    *member = fresh;
    Ok(())
}

/// `cuGraphExecKernelNodeSetParams`.
pub fn set_kernel(executable: Handle, node: Handle, params: In<KernelNode>) -> Outcome {
    set_node(executable, node, kernel_work(params)?)
}

/// `cuGraphExecMemcpyNodeSetParams`.
pub fn set_memcpy(executable: Handle, node: Handle, params: In<Copy3d>, _context: Handle) -> Outcome {
    set_node(executable, node, copy::volume_work(params)?)
}

/// `cuGraphExecMemsetNodeSetParams`.
pub fn set_memset(executable: Handle, node: Handle, params: In<MemsetNode>, context: Handle) -> Outcome {
    set_node(executable, node, memset_work(params, context)?)
}

pub fn launch_graph(executable: Handle, stream: Handle) -> Outcome {
    let executable = driver().executables.get(executable).map_err(|_| Code::INVALID_VALUE)?;
    let stream = resolve(stream)?;
    let list: Vec<Work> = executable.members.lock().iter().map(|member| member.work.clone()).collect();
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
