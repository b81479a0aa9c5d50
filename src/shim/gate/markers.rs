//! The events that are put behind all work of a context, one for each context, kept from one closing of the gate to the next.
//!
//! The driver makes no event in a context while a copy to memory that is not pinned waits in its call there (measured: `cuEventCreate`
//! and `cuStreamCreate` of other threads wait for that one; launching, recording an event and asking it do not). Such a copy may wait for a
//! kernel that waits for another process, and so for ever if that one is suspended. So an event is made only while no other thread is in
//! a gated call, and then kept. One that enters such a copy in between is waited for: once in the life of a context, and for no longer than its program waits.

use crate::watch::context;
use gpupool_cuda::Marker;
use parking_lot::Mutex;

/// By the context's number. Those of contexts that ended are found by that.
static KEPT: Mutex<Vec<(u64, Marker<'static>)>> = Mutex::new(Vec::new());

/// The event of this context, which the caller keeps alive until it is put back. `None`: there is none, or another thread has it.
pub fn take(id: u64) -> Option<Marker<'static>> {
    let mut kept = KEPT.lock();
    let at = kept.iter().position(|(of, _)| *of == id)?;
    Some(kept.swap_remove(at).1)
}

/// Puts it back; the context lives still.
pub fn put_back(id: u64, marker: Marker<'static>) {
    let mut kept = KEPT.lock();
    let mut at = 0;
    while at < kept.len() {
        if context::by_id(kept[at].0).is_some() {
            at += 1;
        } else {
            // The driver has ended it with its context, and may have given its handle to another one.
            std::mem::forget(kept.swap_remove(at).1);
        }
    }
    if kept.iter().all(|(of, _)| *of != id) {
        kept.push((id, marker));
    } else {
        // Another thread made one as well. It is ended without the lock.
        drop(kept);
        drop(marker);
    }
}
