//! Memory of ended blocks that others still have: processes that opened it, whoever got a handle or a descriptor.
//!
//! Such frames are out, like those of a block, so nobody is served from them. They become free when the last process that
//! opened the block lets go. Those of which a handle or a descriptor was given away wait for their chunk: once no live block
//! stands on it, it goes back to the driver, who keeps the memory for whoever has it. That way holds also for the former,
//! and is the only one that gives a chunk back while another process has it open.

use crate::clock::Clock;
use crate::place::PlaceId;
use crate::runs::Freed;
use std::collections::{BTreeMap, BTreeSet};

/// What is left of one block.
#[derive(Debug)]
pub(crate) struct Left {
    /// Frames that are still here, `(start, end)`; those whose chunk went to the driver are not.
    pub parts: Vec<(u32, u32)>,
    /// How the block ended.
    pub freed: Freed,
    /// How many processes have it open.
    pub holds: u32,
    /// A handle or a descriptor was given away.
    pub given: bool,
}

/// The ended blocks whose memory other processes still have.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// By the number of the block.
    pub blocks: BTreeMap<u64, Left>,
    /// Let go of before its end had come by here: numbers of blocks that end at this moment, and how often.
    pub early: BTreeMap<u64, u32>,
}

impl Held {
    /// The GPUs that may be at work on such memory.
    pub fn at_work(&self, clock: &Clock) -> Vec<PlaceId> {
        let busy = self.blocks.values().filter(|left| !left.freed.is_quiet(clock));
        let gpus: BTreeSet<PlaceId> = busy.filter_map(|left| left.freed.gpu).collect();
        gpus.into_iter().collect()
    }
}
