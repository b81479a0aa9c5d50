//! How the process ends: in order (`exit`, `quick_exit`), or at once (`_exit`).

use super::ending;
use crate::agent;
use crate::guard;
use crate::log::verdict;
use crate::process::{self, Phase};
use crate::watch::{context, module};
use std::ffi::c_void;

/// The other orderly end, which runs none of the handlers of `exit`.
pub(super) extern "C" fn quick(_: *mut c_void) {
    orderly();
}

/// The process leaves by `_exit`, perhaps in the handler of a signal, in a child of `vfork`, or while other threads are in the
/// middle of something: nothing can be judged here. Where there is nothing to judge, that is said, without a lock or an
/// allocation: of a process that never called the driver, and of one that only asked, as a forked worker may that counts
/// the GPUs. Contexts and what is loaded are all that is judged at the end.
pub fn at_once() {
    if !verdict::is_asked() {
        return;
    }
    verdict::did_not_become();
    match process::phase() {
        Phase::Idle => verdict::left(),
        Phase::Active if !context::was_any() && !module::was_any() => verdict::ended_at_once(),
        _ => {}
    }
}

/// Writes the summary. Nothing is freed: the driver does that, and other threads may still be running.
pub(super) extern "C" fn orderly() {
    agent::ended();
    verdict::did_not_become();
    if !process::is_active() {
        if process::phase() == Phase::Idle {
            verdict::left();
        }
        return;
    }
    let Some(_inside) = guard::enter_sheltered() else { return };
    // A panic must not cross into libc's exit.
    let judged = std::panic::catch_unwind(ending::write);
    // After an internal error it is not known what would have been found.
    if judged.is_ok() && process::is_open() {
        let _ = std::panic::catch_unwind(verdict::ended);
    }
}
