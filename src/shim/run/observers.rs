//! Who is told, and who is asked, by what lies below: contexts that begin and end, and a host that is short of memory.
//!
//! Observers of contexts hear of them in this order: captures first, so that nobody behind them takes one that ended
//! with its context for one that is under way.

use crate::backend::reclaim::Reclaimer;
use crate::context::Observer;
use crate::{capture, ipc, managed, memory, pinned};

/// See [`crate::context::observe`].
pub const OF_CONTEXTS: &[&dyn Observer] =
    &[&capture::OfContexts, &memory::OfContexts, &managed::OfContexts, &pinned::OfContexts, &ipc::OfContexts];

/// See [`crate::backend::reclaim`].
pub const OF_HOST_MEMORY: &[Reclaimer] = &[pinned::trim];
