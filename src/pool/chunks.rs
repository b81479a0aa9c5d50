//! The pool's chunks, each one physical handle: which of them is mapped at a frame of the address range, at which place its
//! memory lies, and why it must stay there. No other list says where memory lies.

use crate::FRAME;
use crate::place::PlaceId;
use crate::place_map::PlaceMap;
use crate::{Anchor, Anchors};
use std::sync::Arc;

/// Bytes of so many frames.
pub(crate) fn bytes_of(frames: u32) -> u64 {
    u64::from(frames) * FRAME
}

/// The second mapping of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Alias {
    pub address: u64,
    /// [`crate::Backend::readers`] when it was granted.
    pub readers: u64,
}

/// One physical handle and the frames it is mapped at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk<H> {
    pub start: u32,
    pub frames: u32,
    pub place: PlaceId,
    pub handle: H,
    /// Why its contents may not move to other physical memory; only reasons that last as long as the chunk.
    pub anchors: AnchorCounts,
    /// Where it is mapped a second time ([`crate::Mover::alias`]), which lasts as long as the handle.
    pub alias: Option<Alias>,
    /// A move has taken it: its contents are copied, and what is mapped at its frames is about to change.
    pub moving: bool,
}

impl<H> Chunk<H> {
    /// The frame behind its last one.
    pub fn end(&self) -> u32 {
        self.start + self.frames
    }
}

/// How often each reason was given, in the order of [`Anchor::ALL`]: a call that fails after it said its reason takes that one
/// back and nobody else's.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AnchorCounts([u32; 3]);

impl AnchorCounts {
    fn add(&mut self, why: Anchor) {
        if let Some(count) = self.0.get_mut(why as usize) {
            *count = count.saturating_add(1);
        }
    }

    fn remove(&mut self, why: Anchor) {
        if let Some(count) = self.0.get_mut(why as usize) {
            *count = count.saturating_sub(1);
        }
    }

    /// The reasons that there are.
    pub fn reasons(self) -> Anchors {
        let given = Anchor::ALL.into_iter().zip(self.0).filter(|(_, count)| *count > 0);
        given.fold(Anchors::NONE, |anchors, (why, _)| anchors | why.into())
    }
}

const NONE: u32 = u32::MAX;

/// All mapped chunks.
#[derive(Debug)]
pub(crate) struct Chunks<H> {
    slots: Vec<Option<Chunk<H>>>,
    vacant: Vec<u32>,
    /// The slot behind each frame, as far as frames were ever used.
    at_frame: Vec<u32>,
    /// The places of the chunks once more, by frame, for looks without the lock that all this is under.
    places: Arc<PlaceMap>,
}

impl<H: Copy> Chunks<H> {
    /// An empty table for an address range of so many frames.
    pub fn new(frames: u64) -> Self {
        let places = Arc::new(PlaceMap::new(frames));
        Self { slots: Vec::new(), vacant: Vec::new(), at_frame: Vec::new(), places }
    }

    /// Where the chunks lie.
    pub fn places(&self) -> &Arc<PlaceMap> {
        &self.places
    }

    /// Adds chunks that lie one behind the other.
    pub fn insert(&mut self, chunks: &[Chunk<H>]) {
        for row in chunks.chunk_by(|left, right| left.place == right.place) {
            row.iter().for_each(|chunk| self.enter(*chunk));
            if let (Some(first), Some(last)) = (row.first(), row.last()) {
                self.places.set(first.start, last.start + last.frames, Some(first.place));
            }
        }
    }

    fn enter(&mut self, chunk: Chunk<H>) {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[slot as usize] = Some(chunk);
        let end = (chunk.start + chunk.frames) as usize;
        if self.at_frame.len() < end {
            self.at_frame.resize(end, NONE);
        }
        self.at_frame[chunk.start as usize..end].fill(slot);
    }

    /// The chunk behind `frame`.
    pub fn at(&self, frame: u32) -> Option<&Chunk<H>> {
        let slot = *self.at_frame.get(frame as usize)?;
        self.slots.get(slot as usize)?.as_ref()
    }

    /// Every chunk, in address order.
    pub fn all(&self) -> Vec<Chunk<H>> {
        let mut all: Vec<Chunk<H>> = self.slots.iter().flatten().copied().collect();
        all.sort_unstable_by_key(|chunk| chunk.start);
        all
    }

    /// The chunks that `start..end` touches, in address order.
    pub fn touched(&self, start: u32, end: u32) -> impl Iterator<Item = &Chunk<H>> {
        let mut frame = start;
        std::iter::from_fn(move || {
            let chunk = self.at(frame).filter(|_| frame < end)?;
            frame = chunk.start + chunk.frames;
            Some(chunk)
        })
    }

    /// Anchors the chunks that `start..end` touches; returns those that were not anchored before.
    pub fn anchor(&mut self, start: u32, end: u32, why: Anchor) -> Vec<Chunk<H>> {
        let mut changed = self.change(start, end, |anchors| anchors.add(why));
        changed.retain(|before| before.anchors.reasons().is_empty());
        changed
    }

    /// Takes one anchor with this reason off the chunks that `start..end` touches; returns the chunks that have none left.
    pub fn withdraw_anchor(&mut self, start: u32, end: u32, why: Anchor) -> Vec<Chunk<H>> {
        let mut changed = self.change(start, end, |anchors| anchors.remove(why));
        changed.retain(|before| {
            let mut after = before.anchors;
            after.remove(why);
            !before.anchors.reasons().is_empty() && after.reasons().is_empty()
        });
        changed
    }

    /// Changes the anchors of the chunks that `start..end` touches; returns the chunks as they were.
    fn change(&mut self, start: u32, end: u32, change: impl Fn(&mut AnchorCounts)) -> Vec<Chunk<H>> {
        let touched: Vec<u32> = self.touched(start, end).map(|chunk| self.at_frame[chunk.start as usize]).collect();
        let mut before = Vec::with_capacity(touched.len());
        for slot in touched {
            let Some(chunk) = &mut self.slots[slot as usize] else { continue };
            before.push(*chunk);
            change(&mut chunk.anchors);
        }
        before
    }

    /// A move takes the chunks that `start..end` touches, or has let go of them.
    pub fn set_moving(&mut self, start: u32, end: u32, moving: bool) {
        let mut frame = start;
        while frame < end
            && let Some(&slot) = self.at_frame.get(frame as usize)
            && let Some(chunk) = self.slots.get_mut(slot as usize).and_then(Option::as_mut)
        {
            chunk.moving = moving;
            frame = chunk.end();
        }
    }

    /// The chunk that starts at this frame has this second mapping.
    pub fn set_alias(&mut self, start: u32, alias: Option<Alias>) {
        if let Some(&slot) = self.at_frame.get(start as usize)
            && let Some(chunk) = self.slots.get_mut(slot as usize).and_then(Option::as_mut)
        {
            chunk.alias = alias;
        }
    }

    /// Whether a move has taken any chunk that `start..end` touches.
    pub fn is_moving(&self, start: u32, end: u32) -> bool {
        self.touched(start, end).any(|chunk| chunk.moving)
    }

    /// Takes the chunks out that lie in `start..end`; both are borders of chunks.
    pub fn remove_range(&mut self, start: u32, end: u32) -> Vec<Chunk<H>> {
        let mut removed = Vec::new();
        let mut frame = start;
        while frame < end {
            let slot = std::mem::replace(&mut self.at_frame[frame as usize], NONE);
            let Some(chunk) = self.slots.get_mut(slot as usize).and_then(Option::take) else {
                debug_assert!(false, "frame {frame} of a mapped run has no chunk");
                break;
            };
            debug_assert!(chunk.start == frame && chunk.start + chunk.frames <= end, "a chunk is released whole");
            frame = chunk.start + chunk.frames;
            self.at_frame[chunk.start as usize..frame as usize].fill(NONE);
            self.vacant.push(slot);
            removed.push(chunk);
        }
        self.places.set(start, frame, None);
        removed
    }

    /// The row of whole chunks inside `start..end`: its borders, both `end` if there is none.
    pub fn whole_within(&self, start: u32, end: u32) -> (u32, u32) {
        let mut first = start;
        if let Some(chunk) = self.at(start)
            && chunk.start < start
        {
            first = (chunk.start + chunk.frames).min(end);
        }
        let mut last = end;
        if let Some(chunk) = self.at(end - 1)
            && chunk.start + chunk.frames > end
        {
            last = chunk.start;
        }
        if last <= first { (end, end) } else { (first, last) }
    }
}
