//! Who is told of contexts that begin and end, in this order: captures first, so that nobody behind them takes one that ended
//! with its context for one that is under way.

use crate::context::Observer;
use crate::{capture, ipc, managed, memory, pinned};

/// See [`crate::context::observe`].
pub const OF_CONTEXTS: &[&dyn Observer] =
    &[&capture::OfContexts, &memory::OfContexts, &managed::OfContexts, &pinned::OfContexts, &ipc::OfContexts];
