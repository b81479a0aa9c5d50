//! Bodies: graphs that can be launched, as far as it matters what they use ([`crate::tiers::graphs`]).

use super::Real;
use crate::process;
use crate::tiers::graphs;
use crate::watch::capture;
use cudarc::driver::sys::{CUgraph, CUgraphExec};
use gpupool_cuda::{CuResult, Graph, GraphExec};

/// What a graph that can be launched uses from now on.
///
/// # Safety
/// Both are those of a call that made the one of the other, or changed it to be as the other.
pub unsafe fn noted(exec: CUgraphExec, graph: CUgraph) {
    let handles = GraphExec::from_raw(exec).zip(Graph::from_raw(graph));
    match handles.zip(process::driver()) {
        // SAFETY: as for this function; a graph is not to be changed by others while a call has it.
        Some(((exec, graph), driver)) => unsafe { graphs::made(driver, exec, graph) },
        None => capture::graph_made(),
    }
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn update(real: &mut Real, exec: CUgraphExec, graph: CUgraph) -> CuResult {
    let result = real.call();
    if result.is_ok() {
        // SAFETY: the driver has changed the one to be as the other.
        unsafe { noted(exec, graph) };
    }
    result
}

/// A node is another now. What it uses is in the graph from which the other was made no more.
///
/// # Safety
/// Called by a row's trampoline.
pub unsafe fn node_set(real: &mut Real) -> CuResult {
    let result = real.call();
    if result.is_ok() {
        capture::graph_made();
    }
    result
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn destroy(real: &mut Real, exec: CUgraphExec) -> CuResult {
    let handle = GraphExec::from_raw(exec);
    let used = handle.and_then(graphs::ending);
    let result = real.call();
    if !result.is_ok()
        && let Some((handle, used)) = handle.zip(used)
    {
        graphs::put(handle, used);
    }
    result
}
