//! A launch is told of before it is made: what its arguments name in the pool, and whether memory should move first.
//!
//! Not seen: pointers that a kernel finds in memory. Launches during a capture are left out, since nothing runs then.

use super::{Home, beside, current_home, graphs, home_of, is_ours, now, record, stress, swap, timing};
use crate::process;
use crate::watch::arguments::{self, Arguments};
use crate::watch::capture;
use crate::watch::context::Context;
use gpupool_cuda::{Function, GraphExec, Stream};
use gpupool_interpose::Api;
use gpupool_tiers::Launch;
use std::mem::MaybeUninit;

/// Words of one launch that are told; more of them lie in the pool only in tables of tables.
const MOST: usize = 128;

/// Words up to which one that comes again is left out: twice as many as operands are told apart of a launch.
const TOLD_APART: usize = 16;

/// What a launch is, beside its arguments.
#[derive(Clone, Copy)]
pub struct About {
    pub function: Option<Function>,
    pub stream: Stream,
    /// It may be timed: two events around it change nothing of how it runs.
    pub is_plain: bool,
    /// Blocks of threads, each way.
    pub grid: [u32; 3],
}

/// A number for launches of one function that work on as much in the same way: by the grid, and by those words of the parameters that can
/// be two numbers of up to 2^24 each, as sizes and strides are. What else differs from launch to launch (seeds, small buffers' addresses)
/// is no shape; what of it looks like one makes so many shapes that they are not told apart.
struct Shape {
    sum: u64,
    at: u64,
}

impl Shape {
    /// Parts of a word that two sizes leave empty.
    const NO_SIZES: u64 = 0xff00_0000_ff00_0000;

    fn of(grid: [u32; 3]) -> Self {
        let mut shape = Self { sum: 0, at: 0 };
        grid.into_iter().for_each(|side| shape.add(u64::from(side)));
        shape
    }

    /// In their order; each is mixed by itself, since a chain of multiplications would take longer than all the rest.
    #[inline]
    fn add(&mut self, word: u64) {
        self.at += 1;
        self.sum = self.sum.wrapping_add((word ^ self.at).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31));
    }
}

impl About {
    /// The stream that a launch by this function goes to.
    pub(super) fn stream_of(self, api: Api) -> Stream {
        self.stream.meant_by(api.name().ends_with("_ptsz"))
    }
}

/// Words that lie in the pool. Most launches have a few, and to clear the room for all would take as long as to look at those.
struct Words {
    words: [MaybeUninit<u64>; MOST],
    /// So many from the first one on are written.
    count: usize,
}

impl Words {
    #[inline]
    fn new() -> Self {
        Self { words: [const { MaybeUninit::uninit() }; MOST], count: 0 }
    }

    /// A pointer that is passed again, as by itself and in a descriptor of the tensor, is the same operand. Of launches with many
    /// pointers, which are reckoned as a whole in any case, that is not looked for.
    #[inline]
    fn push(&mut self, word: u64) {
        if self.count <= TOLD_APART && self.all().contains(&word) {
            return;
        }
        if let Some(place) = self.words.get_mut(self.count) {
            place.write(word);
            self.count += 1;
        }
    }

    #[inline]
    fn all(&self) -> &[u64] {
        // SAFETY: `push` counts a word once it has written it, and no further than there is room.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.count) }
    }
}

/// Before a launch in this context. What this returns is given to [`after`] behind it. Once for all rows, which are inlined up to here.
///
/// # Safety
/// The arguments are those that the program passes to the driver with this function.
#[inline(never)]
pub unsafe fn before(api: Api, context: Context, about: &About, arguments: Arguments) -> Option<timing::Running> {
    // SAFETY: as for this function.
    beside(api, || unsafe { look(api, context, about, arguments) })
}

/// # Safety
/// As for [`before`].
#[inline]
unsafe fn look(api: Api, context: Context, about: &About, arguments: Arguments) -> Option<timing::Running> {
    let home = home_of(context)?;
    let function = about.function?;
    let layout = arguments::known(function).or_else(|| learn(api, home, function))?;
    let mut words = Words::new();
    let mut shape = Shape::of(about.grid);
    // SAFETY: as for this function, and the layout is that of the program's function.
    unsafe {
        arguments.words(layout, |word| {
            if is_ours(home.opened, word) {
                words.push(word);
            } else if word & Shape::NO_SIZES == 0 {
                shape.add(word);
            }
        });
    }
    if words.count == 0 || capture::under_way() {
        return None;
    }
    told(api, home, about, (function.raw().addr() as u64, shape.sum), words.all())
}

/// What graphs are called among the functions.
const GRAPH: u64 = u64::MAX - 1;

/// Before the launch of a graph in this context: one of all that its kernels are given.
pub fn before_graph(api: Api, context: Context, exec: GraphExec, stream: Stream) -> Option<timing::Running> {
    beside(api, || {
        let home = home_of(context)?;
        let words = graphs::words(exec)?;
        if capture::under_way() {
            return None;
        }
        told(api, home, &About { function: None, stream, is_plain: true, grid: [0; 3] }, (GRAPH, 0), &words)
    })
}

#[inline]
fn told(
    api: Api,
    home: &'static Home,
    about: &About,
    (function, shape): (u64, u64),
    words: &[u64],
) -> Option<timing::Running> {
    let launch = home.tiers.lock().launched(function, shape, words, home);
    if record::is_on() {
        process::contained(api, || record::launch(launch.id, function, shape, words));
    }
    #[cfg(test)]
    plant::panic();
    // Of what is wanted to be timed but for little, most cannot be paid for.
    let times = launch.time_it && (launch.hear_it || home.timing.may_begin(launch.id));
    let asks = launch.ask || times || launch.tell_time || stress::is_on();
    let asks = asks || (about.is_plain && home.progress.is_due(launch.id));
    if asks { act(api, home, about, launch, words) } else { None }
}

#[cold]
fn learn(api: Api, home: &Home, function: Function) -> Option<&'static arguments::Layout> {
    process::contained(api, || arguments::learn(home.driver, function))
}

#[cold]
fn act(api: Api, home: &'static Home, about: &About, launch: Launch, words: &[u64]) -> Option<timing::Running> {
    process::contained(api, || {
        timing::gather(home);
        if launch.tell_time {
            tell_time(home);
        }
        let mut wanted = launch.time_it;
        if stress::is_on() {
            stress::move_some(home, words);
        } else if launch.ask {
            let swap = home.tiers.lock().before(launch.id, now(), home);
            if tracing::enabled!(target: "gpupool::memory", tracing::Level::TRACE) {
                // Nobody waits for the log with the lock.
                let question = home.tiers.lock().question(launch.id, home);
                let answer = if swap.is_some() { "yes" } else { "no" };
                tracing::trace!(target: "gpupool::memory", about = "asks", "launch {}, {answer}:{question}", launch.id);
            }
            if let Some(swap) = swap {
                tracing::trace!(
                    target: "gpupool::memory", about = "swaps",
                    "before launch {}: {} in, {} out, cost {:.0} ns, gain {:.0} ns",
                    launch.id, swap.bytes_in(), swap.bytes_out(), swap.cost_ns, swap.gain_ns
                );
                wanted |= swap.time_it;
                swap::carry_out(home, &swap, swap::Why::Launch);
            }
        }
        let stream = about.stream_of(api);
        if about.is_plain && home.progress.is_due(launch.id) {
            timing::mark(home, stream);
        }
        let wanted = wanted && about.is_plain;
        let mut running = wanted.then(|| timing::begin(&home.timing, home.driver, launch.id, stream)).flatten();
        if let Some(running) = &mut running {
            home.tiers.lock().timing(launch.id, home);
            running.is_awaited = launch.hear_it;
        }
        running
    })
    .flatten()
}

/// A cycle has ended.
pub(super) fn tell_time(home: &Home) {
    home.tiers.lock().time_is(now(), home);
    cycle_ended(home);
}

/// What a cycle showed is told.
pub(super) fn cycle_ended(home: &Home) {
    home.begin_cycle();
    let (stopped, ledger) = {
        let mut tiers = home.tiers.lock();
        (tiers.stopped(), tiers.ledger())
    };
    tracing::trace!(target: "gpupool::memory", about = "cycles", "GPU {}: {ledger:?}", home.gpu);
    if let Some(why) = stopped {
        swap::report_stopped(home, &why);
    }
}

/// Behind the launch, if something was begun before it.
#[cold]
pub fn after(api: Api, running: timing::Running) {
    process::contained(api, || {
        let awaited = running.is_awaited.then_some(running.launch);
        timing::end(*running);
        if let Some(launch) = awaited
            && let Some(home) = current_home()
        {
            timing::hear(home, launch);
        }
    });
}

#[cfg(test)]
pub mod plant {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    /// Whoever tells of a launch or copy panics.
    pub static IS_ON: AtomicBool = AtomicBool::new(false);
    /// Launches and copies that were told of.
    pub static TOLD: AtomicU32 = AtomicU32::new(0);

    pub fn panic() {
        TOLD.fetch_add(1, Ordering::Relaxed);
        assert!(!IS_ON.load(Ordering::Relaxed), "planted where launches and copies are told of");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_that_is_passed_again_is_one_operand() {
        let mut words = Words::new();
        // A product of matrices: each of them by its pointer, in a descriptor for loads, and in one for stores.
        for word in [0x1000, 0x2000, 0x3000, 0x1000, 0x2000, 0x3000, 0x3000, 0x4000, 0x1000, 0x4000] {
            words.push(word);
        }
        assert_eq!(words.all(), [0x1000, 0x2000, 0x3000, 0x4000]);
        (0..2 * MOST as u64).for_each(|word| words.push(0x10_0000 + word));
        assert_eq!(words.all().len(), MOST, "no more than there is room for");
    }
}
