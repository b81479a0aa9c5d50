//! Who is calling: the program, or the shim itself further up on this thread.
//!
//! The driver and the shim call hooked names too (the driver through its own exports when a tool patched them, the shim
//! through the log's or the loader's detours). Such inner calls go straight to the driver.
//!
//! The thread's depth is kept in this crate and not in `gpupool_interpose`, because the thread's last context is kept here too
//! (`watch::context`): a hook that passes its call on reads both thread-local variables, and for two of one crate the compiler
//! needs only one call of the loader (`__tls_get_addr`).

use gpupool_interpose::cancel::{self, Shelter};
use std::cell::Cell;

thread_local! {
    /// Hooks under way on this thread. `const` and without a destructor, so that touching it never allocates and stays
    /// legal while the thread is being torn down.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Marks this thread as inside a hook until dropped, and keeps it from being cancelled where somebody may do that.
pub struct Guard(Option<Shelter>);

/// Marks this thread as inside a hook; `None` when it is inside one already.
#[inline]
pub fn enter() -> Option<Guard> {
    DEPTH.with(|depth| {
        if depth.get() != 0 {
            return None;
        }
        depth.set(1);
        Some(Guard(cancel::is_known().then(cancel::shelter)))
    })
}

/// Marks this thread as inside a hook, for calls that take microseconds anyway: it cannot be cancelled until the guard is
/// dropped, not even by the first `pthread_cancel` of the process. `None` when this thread is inside a hook already.
#[inline]
pub fn enter_sheltered() -> Option<Guard> {
    let mut guard = enter()?;
    guard.0.get_or_insert_with(cancel::shelter);
    Some(guard)
}

/// Acts as if this thread were in no hook: for a wait in one that holds nothing. A handler of a signal that comes meanwhile may call the driver, as
/// it may where a thread waits in front of a hook; and where it jumps out of the wait, nobody comes back to say that the hook is over.
pub fn outside<T>(act: impl FnOnce() -> T) -> T {
    let depth = DEPTH.replace(0);
    let done = act();
    DEPTH.set(depth);
    done
}

/// Whether this thread is in no hook.
#[inline]
pub fn is_outside() -> bool {
    DEPTH.with(|depth| depth.get() == 0)
}

impl Drop for Guard {
    #[inline]
    fn drop(&mut self) {
        DEPTH.with(|depth| depth.set(0));
        // Last: a thread that is cancelled asynchronously ends here.
        drop(self.0.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_outer_call_enters_and_leaving_it_opens_again() {
        let outer = enter();
        assert!(outer.is_some());
        assert!(enter().is_none());
        assert!(enter().is_none(), "an inner call that passed must not open the guard");
        assert!(std::thread::spawn(|| enter().is_some()).join().unwrap(), "other threads are not inside");
        assert!(outside(|| enter().is_some()), "what is called in a wait is the program's");
        assert!(enter().is_none(), "and the hook goes on behind it");
        drop(outer);
        assert!(enter().is_some());
    }
}
