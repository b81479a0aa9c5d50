//! Who is told, and who is asked, by what lies below: contexts that begin and end, and a host that is short of memory.
//!
//! Observers of contexts hear of them in this order: captures first, so that nobody behind them takes one that ended
//! with its context for one that is under way.

use crate::backing::reclaim::Reclaimer;
use crate::serve::{ipc, managed, memory, pinned};
use crate::suspend::spare;
use crate::tiers;
use crate::watch::capture;
use crate::watch::context::Observer;

/// See [`crate::watch::context::observe`].
pub const OF_CONTEXTS: &[&dyn Observer] = &[
    &capture::OfContexts,
    &memory::OfContexts,
    &managed::OfContexts,
    &pinned::OfContexts,
    &ipc::OfContexts,
    &tiers::timing::OfContexts,
];

/// See [`crate::backing::reclaim`].
pub const OF_HOST_MEMORY: &[Reclaimer] = &[
    Reclaimer { give_back: spare::reclaim, goes_first: true },
    Reclaimer { give_back: pinned::trim, goes_first: false },
];
