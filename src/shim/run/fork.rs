//! What happens on a fork. CUDA does not survive one, so the child passes everything through, and the first call of the driver
//! there is told about, with the place of the fork.

use crate::agent;
use crate::checkpoint;
use crate::gate;
use crate::guard;
use crate::log::verdict;
use crate::process::{self, Event};
use crate::serve::ipc;
use crate::suspend;
use crate::watch::environment;
use gpupool_interpose::Api;

/// Remembers where, in case the child uses CUDA. Nothing where the shim is not active.
pub(super) extern "C" fn before() {
    if process::is_active()
        && let Some(_inside) = guard::enter_sheltered()
    {
        let _ = std::panic::catch_unwind(environment::before_fork);
    }
    agent::before_fork();
}

pub(super) extern "C" fn in_parent() {
    agent::after_fork_in_parent();
}

/// CUDA does not survive a fork, and neither do locks that another thread held: only atomics are touched here, and from
/// now on every call goes straight to the driver, which says NOT_INITIALIZED as it does without us.
pub(super) extern "C" fn in_child() {
    gate::after_fork_in_child();
    agent::after_fork_in_child();
    suspend::after_fork_in_child();
    checkpoint::after_fork_in_child();
    ipc::after_fork_in_child();
    process::happened(Event::Forked);
}

/// The child of a fork calls the driver. Giving things back at its end is what it inherited, not use.
#[cold]
pub fn used_in_child(api: Api) -> bool {
    let ends = ["Free", "Destroy", "Release", "Unload", "PopCurrent"].iter().any(|word| api.name().contains(word));
    if !ends {
        used_by(api.name());
    }
    false
}

/// The child of a fork calls this, which uses the driver. A function of the C interface says so itself: the program did not make the calls of the driver that follow.
#[cold]
pub fn used_by(call: &str) {
    if process::happened(Event::Used) {
        process::explain(process::AFTER_FORK.to_bytes());
        let _inside = guard::enter_sheltered();
        let _ = std::panic::catch_unwind(|| {
            environment::used_after_fork(call);
            // Nothing more is found in this process.
            verdict::ended();
        });
    }
}
