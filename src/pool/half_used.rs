//! Chunks of which the program has freed a large part: what would come free if the rest got chunks of its own ([`crate::repack`]).

use crate::place::PlaceId;
use crate::registry::{Record, Registry};
use crate::runs::Kind;
use crate::state::State;

/// A chunk at least half of which is free, though not all: that could go as it is.
pub(crate) struct HalfUsed {
    pub start: u32,
    pub end: u32,
    /// Free frames.
    pub free: u32,
    /// The blocks that stand on it, each with its first frame.
    pub blocks: Vec<(u32, Record)>,
}

impl<H: Copy> State<H> {
    /// Such chunks at a place, as far as they may get other memory; the front keeps nothing.
    pub fn half_used(&mut self, place: PlaceId, registry: &Registry) -> Vec<HalfUsed> {
        let mut found = Vec::new();
        for chunk in self.chunks.all() {
            let may_go = chunk.place == place && !chunk.moving && chunk.anchors.reasons().is_empty();
            if !may_go || self.asked.touches(chunk.start, chunk.end(), registry) {
                continue;
            }
            let (mut free, mut out) = (0, Vec::new());
            let mut at = chunk.start;
            while at < chunk.end()
                && let Some(run) = self.runs.around(at)
            {
                let end = run.end().min(chunk.end());
                match run.kind {
                    Kind::Out => out.push((at, end, run.start)),
                    Kind::Free(_) => free += end - at,
                }
                at = end;
            }
            if free < chunk.frames
                && free * 2 >= chunk.frames
                && let Some(blocks) = blocks_on(&out, registry)
            {
                found.push(HalfUsed { start: chunk.start, end: chunk.end(), free, blocks });
            }
        }
        found
    }
}

/// The blocks on these frames, each `(start, end, first frame of the run)`; `None` if anything else is there: what is on its way to be a
/// block, what others have of an ended one, or a slab, which goes by itself.
fn blocks_on(out: &[(u32, u32, u32)], registry: &Registry) -> Option<Vec<(u32, Record)>> {
    let mut blocks = Vec::new();
    for &(start, end, run) in out {
        let mut at = start;
        while at < end {
            let (block, record) = registry.around(at, run).filter(|(_, record)| !record.slab)?;
            blocks.push((block, record));
            at = block + record.frames;
        }
    }
    Some(blocks)
}
