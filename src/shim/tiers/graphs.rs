//! What the program's graphs use: the pointers of their kernels, which a launch of the graph names, and what their copies and fills
//! read and write.
//!
//! It is asked of the driver once, when a graph is made ready to be launched or updated, and only where memory may move. Kernels'
//! arguments are bytes to the driver, and a graph finds memory where it is now. But what copies and fills use stays in place while the
//! graph can be launched: an update may be refused where it lies on another device than before (documented). A graph with nodes
//! of other kinds, or of which a node was set anew, ends all moves instead ([`capture::graph_made`]).

use super::{GPUS, copies, home};
use crate::backing::open;
use crate::process;
use crate::serve::handles;
use crate::watch::arguments::{self, Arguments};
use crate::watch::capture;
use gpupool_config::Move;
use gpupool_cuda::{Driver, Graph, GraphExec, Part};
use gpupool_tiers::Range;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Words of one graph that are told.
const MOST: usize = 1 << 16;

/// What a graph uses.
pub struct Used {
    /// What its kernels are given that lies in the pool, each once.
    words: Arc<[u64]>,
    /// What its copies and fills use.
    fixed: Vec<Range>,
}

static GRAPHS: Mutex<BTreeMap<GraphExec, Used>> = Mutex::new(BTreeMap::new());
/// Whether any has copies or fills.
static ARE_ANY_FIXED: AtomicBool = AtomicBool::new(false);

/// A graph can be launched, or what it does is now what this one says.
///
/// # Safety
/// The graph lives, and nobody changes it meanwhile.
pub unsafe fn made(driver: &Driver, exec: GraphExec, graph: Graph) {
    if process::settings().moving == Move::Off {
        return;
    }
    // SAFETY: as for this function.
    match unsafe { gather(driver, graph) } {
        Some(used) => put(exec, used),
        None => capture::graph_made(),
    }
}

/// A graph is about to end; what it used, for [`put`] if it does not.
pub fn ending(exec: GraphExec) -> Option<Used> {
    let used = GRAPHS.lock().remove(&exec)?;
    tell(&used);
    Some(used)
}

/// What a graph that can be launched uses.
pub fn put(exec: GraphExec, used: Used) {
    if !used.fixed.is_empty() {
        ARE_ANY_FIXED.store(true, Ordering::Release);
    }
    let fixed = used.fixed.clone();
    let before = GRAPHS.lock().insert(exec, used);
    before.iter().for_each(tell);
    tell(&Used { words: Arc::default(), fixed });
}

/// What must stay has changed there.
fn tell(used: &Used) {
    for home in (0..GPUS as u32).filter_map(home) {
        let mut tiers = home.tiers.lock();
        used.fixed.iter().for_each(|range| tiers.placed(*range));
    }
}

/// # Safety
/// As for [`made`].
unsafe fn gather(driver: &Driver, graph: Graph) -> Option<Used> {
    let opened = open::opened();
    let is_ours = |address: u64| opened.is_some_and(|opened| opened.contains(address)) || handles::may_be_own(address);
    let (mut words, mut fixed) = (Vec::new(), Vec::new());
    let mut each = |part: Part| match part {
        Part::Kernel { function, parameters, extra } => {
            let layout = arguments::layout_of(driver, function);
            // SAFETY: the arguments are those of the node, as the driver keeps them, and the layout that of its function.
            unsafe {
                Arguments { parameters, extra }.words(layout, |word| {
                    if is_ours(word) && words.len() < MOST {
                        words.push(word);
                    }
                });
            }
        }
        Part::Copy(copy) => {
            // SAFETY: the driver wrote it.
            let sides = unsafe { copies::of_boxes(copy.as_ptr().cast()) };
            fixed.extend(sides.into_iter().filter(|(address, _)| is_ours(*address)));
        }
        Part::Fill(address, bytes) => fixed.extend(is_ours(address).then_some((address, bytes as usize))),
    };
    // SAFETY: as for this function.
    unsafe { driver.parts_of(graph, &mut each) }.ok()?;
    words.sort_unstable();
    words.dedup();
    let fixed = fixed.into_iter().map(|(address, bytes)| super::placed::frames(address, bytes as u64)).collect();
    Some(Used { words: words.into(), fixed })
}

/// What the kernels of a graph are given.
pub fn words(exec: GraphExec) -> Option<Arc<[u64]>> {
    GRAPHS.lock().get(&exec).map(|used| used.words.clone()).filter(|words| !words.is_empty())
}

/// Tells what of a range copies and fills of graphs use.
pub(super) fn within(range: Range, tell: &mut dyn FnMut(Range)) {
    if !ARE_ANY_FIXED.load(Ordering::Acquire) {
        return;
    }
    let graphs = GRAPHS.lock();
    let parts = graphs.values().flat_map(|used| &used.fixed).map(|fixed| fixed.meet(&range));
    parts.filter(|part| part.bytes() > 0).for_each(tell);
}
