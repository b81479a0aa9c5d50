//! Several moves of a program that is held: while one of them is copied, the next one is prepared and the one before it is finished.
//!
//! Making memory, mapping it a second time and giving it back take as long as the copy between two GPUs does, and need nobody to be stopped (`pool/moves.rs`). So a few
//! threads carry them out, and take turns where the program is to be stopped: whoever moves asks whether all work of all contexts is over, and another one's copies
//! would be in the way.

use super::rearranging::{BATCH, Turn, rearrange};
use super::why::Why;
use crate::backing::open::Opened;
use crate::gate::Held;
use crate::guard;
use gpupool_cuda::Driver;
use gpupool_pool::{Moved, Wish};
use gpupool_store::signals;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

/// One copies, one prepares and one finishes.
const THREADS: usize = 3;

/// What moves between GPUs at a time where there is much of it: what stands one behind the other is mapped by one call, and 4 GiB are copied in 15 ms.
const MOST: u64 = 4 << 30;

/// How much of so many bytes moves between GPUs at a time: each thread has several of these.
pub fn step_of(bytes: u64) -> u64 {
    (bytes / (2 * THREADS as u64)).clamp(BATCH, MOST)
}

/// Carries these out as long as it `goes_on`, and tells `heard` of each which one it was and what became of it. Where memory is short one may fail for another one's sake.
pub fn carry_out(
    opened: &'static Opened,
    driver: &'static Driver,
    held: &Held,
    all: &[Vec<Wish>],
    goes_on: &(dyn Fn() -> bool + Sync),
    heard: &mut dyn FnMut(usize, Result<Moved, Why>),
) {
    let (turn, next) = (Turn::default(), AtomicUsize::new(0));
    let (told, hears) = mpsc::channel();
    let work = |told: &dyn Fn(usize, Result<Moved, Why>)| {
        while goes_on()
            && let at = next.fetch_add(1, Ordering::Relaxed)
            && let Some(wishes) = all.get(at)
        {
            told(at, rearrange(opened, driver, held, &turn, wishes));
        }
    };
    std::thread::scope(|scope| {
        let work = &work;
        let begin = |_: &usize| {
            let told = told.clone();
            let body = move || {
                // Every driver call of this thread is ours.
                let _inside = guard::enter();
                work(&|at, moved| {
                    let _ = told.send((at, moved));
                });
            };
            signals::spawn_in(scope, body).is_ok()
        };
        // The calling thread does nothing but hear, where there is another one.
        let begun = (0..THREADS.min(all.len())).take_while(begin).count();
        if begun == 0 {
            work(&|at, moved| {
                let _ = told.send((at, moved));
            });
        }
        drop(told);
        for (at, moved) in hears {
            heard(at, moved);
        }
    });
}
