//! Memory of the host that moves need is made on the agent's thread, beside the program.
//!
//! To make it takes the driver ten times as long as to fill it, and longer where nobody had touched that memory before (4 × H200: 5 GB/s). Where the thread that launches made
//! it, four readings of a language model paid for nothing else: what moves may risk was spent before the first of them gained anything. So a move that lacks much of it is not
//! begun, the agent makes what it needs, and at a later launch it finds that in the pool's stock. Rejected: to count only what a move will take once there is
//! memory, since the program would be slower than promised all the same.
//!
//! What the agent has made may not be kept, or not be enough for the next move. So the move after that makes what it lacks by itself, as it does where there is no agent.

use super::{home, swap};
use crate::backing::open;
use crate::bell;
use crate::clock::monotonic_nanoseconds as now;
use gpupool_config::format_size;
use gpupool_pool::{Place, Wish};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// So little is made at once in any case: 2 ms.
const LITTLE: u64 = 8 << 20;

/// Nobody has asked for anything.
const NOTHING: u8 = 0;
/// The agent makes what was asked for, or will.
const ASKED: u8 = 1;
/// It has made that.
const MADE: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(NOTHING);
/// What a move needs memory for, and whose it is.
static WANTED: Mutex<Option<(u32, Vec<Wish>)>> = Mutex::new(None);
/// There is an agent, which looks.
static IS_SERVED: AtomicBool = AtomicBool::new(false);

/// Whether memory that moves lack at a place is made beside the program.
pub(super) fn serves(place: Place) -> bool {
    place.is_host() && IS_SERVED.load(Ordering::Relaxed)
}

/// Whether a move may make so much at a place by itself.
pub(super) fn may_make(place: Place, bytes: u64) -> bool {
    !serves(place) || bytes < LITTLE || STATE.load(Ordering::Acquire) == MADE
}

/// A move was not begun, since it lacks memory.
pub(super) fn ask(gpu: u32, wishes: &[Wish]) {
    if STATE.compare_exchange(NOTHING, ASKED, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        *WANTED.lock() = Some((gpu, wishes.to_vec()));
        bell::wake();
    }
}

/// Whether the agent makes memory for a move.
pub(super) fn is_under_way() -> bool {
    STATE.load(Ordering::Acquire) == ASKED
}

/// A move was made, with all the memory that it needs.
pub(super) fn had_all() {
    let _ = STATE.compare_exchange(MADE, NOTHING, Ordering::AcqRel, Ordering::Relaxed);
}

/// There is an agent from now on.
pub fn begin() {
    IS_SERVED.store(true, Ordering::Relaxed);
}

/// By the agent: makes what was asked for.
pub fn look() {
    let Some((gpu, wishes)) = WANTED.lock().take() else { return };
    // However it ends, a move that lacks something makes it next.
    struct Over;
    impl Drop for Over {
        fn drop(&mut self) {
            if std::thread::panicking() {
                // The agent looks no more.
                IS_SERVED.store(false, Ordering::Relaxed);
            }
            STATE.store(MADE, Ordering::Release);
        }
    }
    let _over = Over;
    let (Some(home), Some(opened)) = (home(gpu), open::opened()) else { return };
    let begun = now();
    // Nothing is stopped, so nothing moves; what was made for it is kept.
    let made = home.alone(|| opened.pool.rearrange(&wishes, || None::<swap::Quiet<'_>>));
    if made.is_some() {
        let bytes = wishes.iter().filter(|wish| wish.to.is_host()).map(|wish| wish.bytes).sum();
        let (size, microseconds) = (format_size(bytes), (now() - begun) / 1000);
        tracing::debug!(
            target: "gpupool::memory", about = "moves",
            "GPU {gpu}: memory of the host for a move of {size} was made beside the program, in {microseconds} µs"
        );
    }
}
