//! What lies where in the program's blocks, as far as its launches show.
//!
//! Frameworks take memory in large segments and pass pointers into them. The distinct pointers that launches name are the borders of
//! the **extents**: each goes to the next border or to the block's end. A border lies on a frame (2 MiB), since nothing smaller
//! moves, so that five hundred tensors in a segment of 20 MiB are ten extents at most and share their fate by frames. A large tensor
//! that was named at its head is one extent; it can be moved in part, so it needs no division.

use crate::interface::{Range, Whereabouts};
use crate::links::{Links, Where};
use std::collections::BTreeMap;

/// Bytes of the smallest thing that moves.
pub const FRAME: u64 = 2 << 20;
/// Extents that are told apart; about 100 bytes each. Beyond it new pointers belong to the extent that they lie in.
const MOST: usize = 1 << 16;
/// The least weight of a cycle in an extent's density. What changes at once is noticed by itself ([`Extents::cycle`]).
const DECAY: f32 = 1.0 / 32.0;

/// One extent.
#[derive(Clone, Debug)]
pub struct Extent {
    pub range: Range,
    /// Where the block begins that it is part of.
    pub block: u64,
    /// Counts the extents that had this slot before: who remembers a slot remembers this with it.
    pub generation: u32,
    pub lives: bool,
    /// `near_bytes`, `pass_ns` and `place` are out of date, and it is in the list of those.
    dirty: bool,
    /// No place has been asked yet.
    fresh: bool,
    /// The how manyth block it is part of.
    born: u64,
    pub near_bytes: u64,
    pub far_bytes: u64,
    /// The same without what must stay where it is.
    pub near_free: u64,
    pub far_free: u64,
    /// Nanoseconds of one pass over its far bytes.
    pub pass_ns: f32,
    /// The same over those that may move.
    pub may_ns: f32,
    /// Nanoseconds of one pass as it lay when it was first seen, and its bytes that were far.
    first_ns: f32,
    first_far: u64,
    /// Nanoseconds that bringing back takes what was near at first and is far.
    pub back_ns: f64,
    /// Nanoseconds that launches lost by that so far, as far as they are charged.
    lost_ns: f64,
    /// What of it is in [`Extents::displaced`].
    counted: i64,
    /// Nanoseconds that are kept at most for each byte of it that has left ([`Extents::keep_at_most`]).
    most_kept: Option<f64>,
    /// Where most of its far bytes are; if none are, where they last were.
    pub place: u8,
    /// The cycle before which it is not moved again, after somebody could not.
    pub stays_until: u64,
    stays: u32,
    /// Passes a cycle that would be saved if it were near, over the last cycles.
    pub density: f32,
    /// The same if each use cost no more than bringing it.
    pub visits: f32,
    /// The cycle in which its borders changed last: what begins in its middle may not have been named yet.
    cut: u64,
    /// The first and the last cycle in which it was named.
    first_cycle: u64,
    pub last_cycle: u64,
    /// The position of the last launch that used it.
    pub last: u64,
    /// Launches from one use to the next, at most, over the last ones that came close together, and the last that was much longer; 0 before there was one.
    gap: u64,
    long_gap: u64,
    /// When its begin was named: one more than the positions of launches that did, the last first, and 0 for none.
    pub named: [u64; NAMED],
}

impl Extent {
    /// A launch at this position used it.
    pub fn is_used_at(&mut self, position: u64) {
        if position <= self.last {
            return;
        }
        let gap = position - self.last;
        if self.last == 0 {
            // The first use.
        } else if self.gap > 0 && gap > OVERDUE * self.gap {
            self.long_gap = gap;
        } else {
            self.gap = gap.max(self.gap - self.gap / 4);
        }
        self.last = position;
    }

    /// Launches until it is used again, if uses go on to come as they did: some close together, and after a longer time some again. `None` where that is
    /// overdue by much or it was not used twice.
    pub fn next_use(&self, position: u64) -> Option<u64> {
        let age = position.saturating_sub(self.last);
        let within = |gap: u64| (gap > 0 && age <= OVERDUE * gap).then(|| gap.saturating_sub(age));
        within(self.gap).or_else(|| within(self.long_gap))
    }

    /// How often it is used in so many launches, if uses go on to come as they did; those close together count as one.
    pub fn uses_in(&self, launches: u64, position: u64) -> f32 {
        let gap = if self.long_gap > 0 { self.long_gap } else { self.gap };
        match self.next_use(position) {
            Some(_) => (launches as f32 / gap as f32).min(MOST_USES),
            None => 0.0,
        }
    }
}

/// What launches may lose by what has left before it comes back, in parts of what that takes. Nothing where it comes back at the first loss, as a swap does that takes
/// ten times as long as the one reading that it saves; 1 where who rents pays at most twice as much as who knows the future. What is kept for it cannot be spent on moves, so
/// that more than this leaves too little at the begin.
const RENT: f64 = 0.25;
/// More uses than these are not counted on.
const MOST_USES: f32 = 32.0;
/// So many times as long as it ever took to its next use, and what used an extent is over.
const OVERDUE: u64 = 4;

/// What reading an extent, or the first part of it, costs.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// Nanoseconds of one pass over its far bytes, and over those of them that may move.
    pub pass_ns: f32,
    pub may_ns: f32,
    /// Nanoseconds of a pass less than when it was first seen.
    pub saved_ns: f32,
}

/// How many times are remembered at which an extent's begin was named.
const NAMED: usize = 4;
/// Launches within which they are one time.
pub const AT_ONCE: u64 = 32;

impl Extent {
    /// Nanoseconds of a pass less now than when it was first seen; never more than none while its borders may still change.
    pub fn saved_ns(&self, cycle: u64) -> f32 {
        self.so_far(self.first_ns - self.pass_ns, cycle)
    }

    /// What is saved of it, as far as that is known while its borders may still change.
    fn so_far(&self, saved_ns: f32, cycle: u64) -> f32 {
        if self.cut < cycle { saved_ns } else { saved_ns.min(0.0) }
    }

    /// The launch at this position named its begin.
    pub fn is_named_at(&mut self, position: u64) {
        let last = self.named[0];
        if last > 0 && position + 1 > last + AT_ONCE {
            self.named.rotate_right(1);
            self.named[0] = position + 1;
        } else {
            self.named[0] = last.max(position + 1);
        }
    }

    /// Something of it is far, or was when it was first seen.
    pub fn was_far(&self) -> bool {
        self.first_far + self.far_bytes > 0
    }

    /// Nanoseconds that are kept for it: to bring back what was near at first, and what launches may lose until then.
    pub fn kept_ns(&self) -> f64 {
        self.kept_if(self.back_ns, self.counted.max(0) as u64)
    }

    /// The same if bringing it back took so long, and so many bytes were far that were near at first.
    pub fn kept_if(&self, back_ns: f64, displaced: u64) -> f64 {
        let all = back_ns + (RENT * back_ns - self.lost_ns).max(0.0);
        all.min(self.most_kept.unwrap_or(f64::INFINITY) * displaced as f64)
    }

    /// Once a launch has lost so much more by what is far of it and was near at first, launches have lost as much in all as they may before that comes back ([`RENT`]).
    pub fn is_due(&self, more_ns: f64) -> bool {
        self.back_ns > 0.0 && self.lost_ns + more_ns >= RENT * self.back_ns
    }

    /// Bytes that are far and would not be if nothing had moved; fewer than 0: near and would not be.
    pub fn displaced(&self) -> i64 {
        self.far_bytes as i64 - self.first_far as i64
    }
}

/// What of a range must stay where it is, in order of address and each byte once.
fn fixed(range: Range, at: &impl Whereabouts) -> Vec<Range> {
    let mut all = Vec::new();
    at.fixed(range, &mut |part| all.push(part.meet(&range)));
    all.sort_unstable();
    let mut joined: Vec<Range> = Vec::new();
    for part in all.into_iter().filter(|part| part.bytes() > 0) {
        match joined.last_mut() {
            Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
            _ => joined.push(part),
        }
    }
    joined
}

/// Bytes of a piece that may move.
fn free_of(piece: Range, fixed: &[Range]) -> u64 {
    piece.bytes() - fixed.iter().map(|part| part.meet(&piece).bytes()).sum::<u64>()
}

/// What any extent that could leave loses at least, nanoseconds a byte a cycle: being read from afar, and what its uses cost if each
/// costs no more than bringing it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Least {
    /// The extents that this was worked out for.
    pub epoch: u64,
    /// By being read from afar.
    pub away: f64,
    /// By its uses.
    pub visits: f64,
}

#[derive(Debug, Default)]
pub struct Extents {
    slots: Vec<Extent>,
    free: Vec<u32>,
    /// Start of each extent and its slot.
    by_start: BTreeMap<u64, u32>,
    /// What was far when it was first seen: start, end and nanoseconds a byte of a pass.
    homes: BTreeMap<u64, (u64, f64)>,
    /// Counts the changes of borders.
    pub shape: u64,
    /// Counts everything that changes what a launch's operands cost: borders, places, densities.
    pub epoch: u64,
    /// Slots whose places have to be asked.
    unsettled: Vec<u32>,
    born: u64,
    /// Nanoseconds that are kept for what was near at first and is far ([`Extent::kept_ns`]).
    kept_ns: f64,
    /// Bytes that are far and were near at first, less those that are near and were far. Where that is less than nothing, a new block
    /// would find as much more room near.
    displaced: i64,
    /// Nanoseconds a byte of the dearest swap.
    swap_ns: f64,
    /// Bytes that are near, in all, and those that are far, by the place of their extent.
    near_bytes: u64,
    far_bytes: Vec<u64>,
}

impl Extents {
    pub fn get(&self, slot: u32) -> Option<&Extent> {
        self.slots.get(slot as usize).filter(|extent| extent.lives)
    }

    pub fn get_mut(&mut self, slot: u32) -> Option<&mut Extent> {
        self.slots.get_mut(slot as usize).filter(|extent| extent.lives)
    }

    /// One more than the highest slot.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    pub fn live(&self) -> impl Iterator<Item = (u32, &Extent)> {
        self.slots.iter().enumerate().filter(|(_, extent)| extent.lives).map(|(slot, extent)| (slot as u32, extent))
    }

    pub fn len(&self) -> usize {
        self.by_start.len()
    }

    fn add(&mut self, range: Range, like: Option<&Extent>, block: u64, cycle: u64) -> u32 {
        let mut extent = Extent {
            range,
            block,
            generation: 0,
            lives: true,
            dirty: true,
            fresh: true,
            born: self.born,
            near_bytes: 0,
            far_bytes: 0,
            near_free: 0,
            far_free: 0,
            pass_ns: 0.0,
            may_ns: 0.0,
            first_ns: 0.0,
            first_far: 0,
            back_ns: 0.0,
            lost_ns: 0.0,
            counted: 0,
            most_kept: None,
            place: 0,
            stays_until: 0,
            stays: 0,
            density: 0.0,
            visits: 0.0,
            cut: cycle,
            first_cycle: cycle,
            last_cycle: cycle,
            last: 0,
            gap: 0,
            long_gap: 0,
            named: [0; NAMED],
        };
        if let Some(like) = like {
            extent = Extent {
                range,
                dirty: true,
                generation: 0,
                back_ns: 0.0,
                lost_ns: 0.0,
                counted: 0,
                near_bytes: 0,
                far_bytes: 0,
                ..like.clone()
            };
        }
        let slot = self.free.pop().unwrap_or(self.slots.len() as u32);
        match self.slots.get_mut(slot as usize) {
            Some(old) => {
                extent.generation = old.generation + 1;
                *old = extent;
            }
            None => self.slots.push(extent),
        }
        self.by_start.insert(range.start, slot);
        self.unsettled.push(slot);
        self.shape += 1;
        self.epoch += 1;
        slot
    }

    /// Its places have to be asked.
    fn unsettle(&mut self, slot: u32) {
        self.epoch += 1;
        if let Some(extent) = self.get_mut(slot)
            && !extent.dirty
        {
            extent.dirty = true;
            self.unsettled.push(slot);
        }
    }

    /// The places of all have to be asked, and what is reckoned by links with it.
    pub fn unsettle_all(&mut self) {
        (0..self.slots.len() as u32).for_each(|slot| self.unsettle(slot));
    }

    fn remove(&mut self, slot: u32) {
        self.count(slot, false);
        if let Some(extent) = self.get_mut(slot) {
            extent.lives = false;
            let start = extent.range.start;
            let kept_ns = extent.kept_ns();
            extent.back_ns = 0.0;
            let counted = std::mem::take(&mut extent.counted);
            self.kept_ns -= kept_ns;
            self.displaced -= counted;
            self.by_start.remove(&start);
            self.free.push(slot);
            self.shape += 1;
            self.epoch += 1;
        }
    }

    /// Adds what an extent has to the totals, or takes it away.
    fn count(&mut self, slot: u32, is_more: bool) {
        let Some((near, far, place)) = self.get(slot).map(|known| (known.near_bytes, known.far_bytes, known.place))
        else {
            return;
        };
        if self.far_bytes.len() <= usize::from(place) {
            self.far_bytes.resize(usize::from(place) + 1, 0);
        }
        for (total, bytes) in [(&mut self.near_bytes, near), (&mut self.far_bytes[usize::from(place)], far)] {
            *total = if is_more { *total + bytes } else { total.saturating_sub(bytes) };
        }
    }

    /// Bytes that are near, and the place where most of the others are, if there are any.
    pub fn totals(&self) -> (u64, Option<u8>) {
        let most = self.far_bytes.iter().zip(0u8..).max_by_key(|(bytes, _)| **bytes);
        (self.near_bytes, most.filter(|(bytes, _)| **bytes > 0).map(|(_, place)| place))
    }

    /// With its block.
    fn end(&mut self, slot: u32) {
        let Some(range) = self.get(slot).map(|extent| extent.range) else { return };
        let homes: Vec<u64> = self.homes.range(range.start..range.end).map(|(start, _)| *start).collect();
        for start in homes {
            self.homes.remove(&start);
        }
        self.remove(slot);
    }

    /// A block that was known at the same addresses has ended without a word.
    pub fn block_began(&mut self, block: Range, cycle: u64) {
        if block.bytes() == 0 {
            return;
        }
        let stale: Vec<u32> = self.over(block).collect();
        stale.into_iter().for_each(|slot| self.end(slot));
        self.born += 1;
        self.add(block, None, block.start, cycle);
    }

    /// More of a block: what begins before it goes on into it, as it does over any border.
    pub fn block_grew(&mut self, block: u64, more: Range, cycle: u64) {
        let stale: Vec<u32> = self.over(more).collect();
        stale.into_iter().for_each(|slot| self.end(slot));
        if more.bytes() > 0 {
            self.born += 1;
            self.add(more, None, block, cycle);
        }
    }

    pub fn block_ended(&mut self, address: u64) {
        let of_block: Vec<u32> = self
            .by_start
            .range(address..)
            .map(|(_, slot)| *slot)
            .take_while(|slot| self.get(*slot).is_some_and(|extent| extent.block == address))
            .collect();
        of_block.into_iter().for_each(|slot| self.end(slot));
    }

    /// The extents that have something of a range.
    pub fn over(&self, range: Range) -> impl Iterator<Item = u32> + '_ {
        let before = self.by_start.range(..=range.start).next_back();
        let within = self.by_start.range(range.start.saturating_add(1)..range.end.max(range.start.saturating_add(1)));
        before
            .into_iter()
            .chain(within)
            .map(|(_, slot)| *slot)
            .filter(move |slot| self.get(*slot).is_some_and(|extent| extent.range.meet(&range).bytes() > 0))
    }

    fn at(&self, address: u64) -> Option<u32> {
        let (_, slot) = self.by_start.range(..=address).next_back()?;
        self.get(*slot).filter(|extent| address < extent.range.end).map(|_| *slot)
    }

    /// The extent that a pointer names, with a border made where it points to.
    pub fn named(&mut self, address: u64, cycle: u64) -> Option<u32> {
        let slot = self.at(address)?;
        let border = address & !(FRAME - 1);
        let extent = self.get(slot)?;
        // A frame belongs to whoever points into it first; the end of what lies before it goes along.
        if border <= extent.range.start || self.len() >= MOST {
            return Some(slot);
        }
        let like = extent.clone();
        let (left, right) = (Range { end: border, ..like.range }, Range { start: border, ..like.range });
        if let Some(extent) = self.get_mut(slot) {
            (extent.range, extent.cut) = (left, cycle);
            // What reached over it has to be looked up again.
            extent.generation += 1;
        }
        self.unsettle(slot);
        let new = self.add(right, Some(&like), like.block, cycle);
        if let Some(extent) = self.get_mut(new) {
            (extent.cut, extent.first_cycle, extent.last_cycle) = (cycle, cycle, cycle);
            extent.named = [0; NAMED];
        }
        Some(new)
    }

    /// The extents behind one that what its begin points to goes on into: up to the end of the block, or to a border of which
    /// `is_end` says that something else begins there now.
    pub fn behind<'a>(
        &'a self,
        slot: u32,
        is_end: impl Fn(u32, &Extent) -> bool + 'a,
    ) -> impl Iterator<Item = u32> + 'a {
        let first = self.get(slot);
        let (end, block) = first.map_or((0, 0), |extent| (extent.range.end, extent.block));
        let behind = self.by_start.range(end..).map(|(_, slot)| *slot).filter(move |_| end > 0);
        behind.take_while(move |slot| {
            self.get(*slot).is_some_and(|extent| extent.block == block && !is_end(*slot, extent))
        })
    }

    /// Takes borders away that no pointer has named for long: those of one time, as of a program's start, after 4 cycles, others
    /// after 256. A framework cuts its first step's memory otherwise than that of all later ones, and what a border cuts off the end
    /// of a tensor looks as if nobody read it.
    pub fn forget_borders(&mut self, cycle: u64) {
        let stale: Vec<(u32, u64)> = self
            .live()
            .filter(|(_, extent)| extent.range.start != extent.block)
            .filter(|(_, extent)| {
                let patience = if extent.last_cycle <= extent.first_cycle + 1 { 4 } else { 256 };
                cycle > extent.last_cycle + patience
            })
            .map(|(slot, extent)| (slot, extent.range.start))
            .collect();
        for (slot, start) in stale {
            let left = self.by_start.range(..start).next_back().map(|(_, left)| *left);
            let Some((left, gone)) = left.and_then(|left| Some((left, self.get(slot)?.clone()))) else { continue };
            self.remove(slot);
            if let Some(extent) = self.get_mut(left) {
                extent.range.end = gone.range.end;
                // Whoever read all of it reads its first part now.
                extent.generation += 1;
                extent.fresh &= gone.fresh;
            }
            self.unsettle(left);
        }
    }

    pub fn placed(&mut self, range: Range) {
        let touched: Vec<u32> = self.over(range).collect();
        touched.into_iter().for_each(|slot| self.unsettle(slot));
    }

    /// A move of this range failed. It is tried again after 8 cycles, after twice as many each further time.
    pub fn stayed(&mut self, range: Range, cycle: u64) {
        let touched: Vec<u32> = self.over(range).collect();
        for slot in touched {
            if let Some(extent) = self.get_mut(slot) {
                extent.stays = (extent.stays + 1).min(16);
                extent.stays_until = cycle + (4 << extent.stays);
            }
        }
    }

    /// Nanoseconds that it takes to have everything as it would be if nothing had moved, and room for what would be near.
    pub fn reserve_ns(&self) -> f64 {
        self.kept_ns + (1.0 + RENT) * self.swap_ns * (-self.displaced).max(0) as f64
    }

    /// What it would take more if so many bytes more were displaced.
    pub fn room_ns(&self, change: i64) -> f64 {
        (1.0 + RENT) * self.swap_ns * ((-self.displaced - change).max(0) - (-self.displaced).max(0)) as f64
    }

    /// For what has left no more is kept than so many nanoseconds a byte, by its slot: what it loses in as many cycles as it takes to earn its way back. Where nobody
    /// knows what it loses, all of that way is.
    pub fn keep_at_most(&mut self, most: impl Fn(u32, &Extent) -> Option<f64>) {
        let mut all = 0.0;
        for (slot, extent) in (0..).zip(&mut self.slots).filter(|(_, extent)| extent.lives) {
            extent.most_kept = most(slot, extent);
            all += extent.kept_ns();
        }
        self.kept_ns = all;
    }

    /// Asks where everything lies that has moved or is new.
    #[inline]
    pub fn settle(&mut self, links: &Links, at: &impl Whereabouts) {
        if !self.unsettled.is_empty() {
            self.ask_all(links, at);
        }
    }

    #[cold]
    fn ask_all(&mut self, links: &Links, at: &impl Whereabouts) {
        let (mut new, mut known): (Vec<(u64, u64, u32)>, Vec<u32>) = (Vec::new(), Vec::new());
        for slot in std::mem::take(&mut self.unsettled) {
            // It may stand in the list twice.
            if !self.get_mut(slot).is_some_and(|extent| std::mem::take(&mut extent.dirty)) {
                continue;
            }
            self.count(slot, false);
            let Some(extent) = self.get_mut(slot) else { continue };
            let (range, mut most) = (extent.range, (0, extent.place));
            if std::mem::take(&mut extent.fresh) {
                new.push((extent.born, range.start, slot));
            } else {
                known.push(slot);
            }
            let (mut near, mut far, mut pass_ns, mut last) = (0, 0, 0.0, (0, extent.place));
            let (mut near_free, mut far_free, mut may_ns) = (0, 0, 0.0);
            let fixed = fixed(range, at);
            at.pieces(range, &mut |piece, place| match place {
                Where::Near => {
                    near += piece.bytes();
                    near_free += free_of(piece, &fixed);
                }
                Where::Far(index) => {
                    let free = free_of(piece, &fixed);
                    far += piece.bytes();
                    far_free += free;
                    pass_ns += links.pass_ns(place, piece.bytes());
                    may_ns += links.pass_ns(place, free);
                    last = (if last.1 == index { last.0 + piece.bytes() } else { piece.bytes() }, index);
                    most = most.max(last);
                }
            });
            (extent.near_bytes, extent.far_bytes) = (near, far);
            (extent.near_free, extent.far_free) = (near_free, far_free);
            (extent.pass_ns, extent.may_ns, extent.place) = (pass_ns as f32, may_ns as f32, most.1);
            self.count(slot, true);
        }
        known.into_iter().for_each(|slot| self.compare(slot, links));
        let slots: Vec<u32> = new.iter().map(|(.., slot)| *slot).collect();
        self.first_places(new, links, at);
        slots.into_iter().for_each(|slot| self.compare(slot, links));
        self.epoch += 1;
        // What rounding left behind: bringing anything back takes more.
        if self.kept_ns < 1.0 {
            self.kept_ns = 0.0;
        }
    }

    /// A launch has lost so many nanoseconds by what of it is far and was near at first; fewer than 0: what was said before was too much.
    pub fn lost(&mut self, slot: u32, ns: f64) {
        let Some(extent) = self.get_mut(slot).filter(|extent| extent.back_ns > 0.0) else { return };
        let kept_ns = extent.kept_ns();
        extent.lost_ns = (extent.lost_ns + ns).max(0.0);
        let change = extent.kept_ns() - kept_ns;
        self.kept_ns += change;
    }

    /// Works out how an extent lies, compared with how it lay at first.
    fn compare(&mut self, slot: u32, links: &Links) {
        let Some(range) = self.get(slot).map(|extent| extent.range) else { return };
        let homes =
            self.homes_in(range).fold((0, 0.0), |(all, pass), (bytes, ns)| (all + bytes, pass + bytes as f64 * ns));
        let Some(extent) = self.get_mut(slot) else { return };
        (extent.first_far, extent.first_ns) = (homes.0, homes.1 as f32);
        let displaced = extent.displaced();
        let back_ns = if displaced <= 0 { 0.0 } else { links.back_ns(extent.place, displaced as u64) };
        let swap_ns = links.swap_ns_per_byte(extent.place);
        let kept_ns = extent.kept_ns();
        if back_ns == 0.0 {
            extent.lost_ns = 0.0;
        }
        extent.back_ns = back_ns;
        let counted = std::mem::replace(&mut extent.counted, displaced);
        self.kept_ns += extent.kept_ns() - kept_ns;
        self.displaced += displaced - counted;
        self.swap_ns = self.swap_ns.max(swap_ns);
    }

    /// Notes where new extents lay at first, as it would be if nothing had moved: where something ended that had changed places,
    /// there is more room near or less than there would be.
    fn first_places(&mut self, mut new: Vec<(u64, u64, u32)>, links: &Links, at: &impl Whereabouts) {
        if new.is_empty() {
            return;
        }
        new.sort_unstable();
        let mut lacks = -self.displaced;
        let near: u64 = new.iter().filter_map(|(.., slot)| self.get(*slot)).map(|extent| extent.near_bytes).sum();
        // Before the first of them began.
        let mut room = if lacks < 0 { (at.near_room() + near) as i64 } else { 0 };
        for block in new.chunk_by(|a, b| a.0 == b.0) {
            let mut pieces: Vec<(Range, Where)> = Vec::new();
            for range in block.iter().filter_map(|(.., slot)| self.get(*slot)).map(|extent| extent.range) {
                at.pieces(range, &mut |piece, place| pieces.push((piece, place)));
            }
            let is = |near: bool| pieces.iter().filter(move |(_, place)| (*place == Where::Near) == near);
            let (near, far): (u64, u64) =
                (is(true).map(|(piece, _)| piece.bytes()).sum(), is(false).map(|(piece, _)| piece.bytes()).sum());
            let place = is(false).map(|(_, place)| *place).next().unwrap_or(Where::Far(0));
            let come = (lacks.max(0) as u64).min(far) / FRAME * FRAME;
            let go = if lacks < 0 { near.saturating_sub((room + lacks).max(0) as u64) } else { 0 };
            room -= near as i64;
            lacks += go as i64 - come as i64;
            let (mut come, mut keeps) = (come, near - go);
            for (piece, at_first) in pieces {
                // What is far and would be near begins behind what is near; what is near and would be far is its end.
                let (far, place) = match at_first {
                    Where::Near => {
                        let near = keeps.min(piece.bytes());
                        keeps -= near;
                        (Range { start: piece.start + near, ..piece }, place)
                    }
                    Where::Far(_) => {
                        let near = come.min(piece.bytes());
                        come -= near;
                        (Range { start: piece.start + near, ..piece }, at_first)
                    }
                };
                if far.bytes() > 0 {
                    self.homes.insert(far.start, (far.end, links.pass_ns(place, 1)));
                }
            }
        }
    }

    /// What of a range was far when it was first seen, piece by piece: bytes, and nanoseconds a byte of a pass.
    fn homes_in(&self, range: Range) -> impl Iterator<Item = (u64, f64)> + '_ {
        let before = self.homes.range(..range.start).next_back();
        let homes = before.into_iter().chain(self.homes.range(range.start..range.end));
        homes.map(move |(&start, &(end, ns))| (range.meet(&Range { start, end }).bytes(), ns))
    }

    /// What reading the first part of an extent, 0 to 1, costs now and cost at first. A swap leaves the begin of an extent near and its
    /// end far, so that a part of it is no such part of its pass.
    pub fn read(&self, slot: u32, share: f32, cycle: u64, links: &Links, at: &impl Whereabouts) -> Option<Read> {
        let extent = self.get(slot)?;
        let is_even = |far: u64| far == 0 || far == extent.range.bytes();
        let bytes = (f64::from(share) * extent.range.bytes() as f64) as u64;
        let part = Range::of(extent.range.start, bytes);
        let is_part = share < 1.0;
        let pass_ns = if is_part && !is_even(extent.far_bytes) {
            let mut pass_ns = 0.0;
            at.pieces(part, &mut |piece, place| pass_ns += links.pass_ns(place, piece.bytes()));
            pass_ns as f32
        } else {
            share * extent.pass_ns
        };
        let first_ns = if is_part && !is_even(extent.first_far) {
            self.homes_in(part).map(|(bytes, ns)| bytes as f64 * ns).sum::<f64>() as f32
        } else {
            share * extent.first_ns
        };
        let may = if extent.pass_ns > 0.0 { extent.may_ns / extent.pass_ns } else { 0.0 };
        Some(Read { pass_ns, may_ns: pass_ns * may, saved_ns: extent.so_far(first_ns - pass_ns, cycle) })
    }

    /// What of an extent lies far, or near, and may move.
    pub fn movable(&self, slot: u32, near: bool, at: &impl Whereabouts) -> Vec<(Range, u8)> {
        let mut found: Vec<(Range, u8)> = Vec::new();
        let Some(extent) = self.get(slot) else { return found };
        let all_fixed = fixed(extent.range, at);
        at.pieces(extent.range, &mut |piece, place| {
            let index = match place {
                Where::Near if near => extent.place,
                Where::Far(index) if !near => index,
                Where::Near | Where::Far(_) => return,
            };
            let mut start = piece.start;
            for fixed in &all_fixed {
                let fixed = piece.meet(fixed);
                if fixed.bytes() > 0 {
                    if start < fixed.start {
                        found.push((Range { start, end: fixed.start }, index));
                    }
                    start = start.max(fixed.end);
                }
            }
            match found.last_mut() {
                Some((last, place)) if last.end == start && *place == index => last.end = piece.end.max(start),
                _ if start < piece.end => found.push((Range { start, end: piece.end }, index)),
                _ => {}
            }
        });
        found
    }

    /// The same, as far as it was near at first and is far now, or the other way round.
    pub fn displaced(&self, slot: u32, near: bool, at: &impl Whereabouts) -> Vec<(Range, u8)> {
        let mut found = Vec::new();
        for (range, place) in self.movable(slot, near, at) {
            let before = self.homes.range(..range.start).next_back();
            let homes = before.into_iter().chain(self.homes.range(range.start..range.end));
            let far = homes.map(|(&start, &(end, _))| range.meet(&Range { start, end })).filter(|far| far.bytes() > 0);
            if near {
                found.extend(far.map(|far| (far, place)));
                continue;
            }
            let mut start = range.start;
            for far in far {
                if start < far.start {
                    found.push((Range { start, end: far.start }, place));
                }
                start = far.end;
            }
            if start < range.end {
                found.push((Range { start, end: range.end }, place));
            }
        }
        found
    }

    /// A cycle has ended in which each slot's uses were worth so many passes. Answers which part of that was expected, 0 to 1.
    pub fn cycle(&mut self, passes: &[f32], visits: &[f32], seen: u32, cycle: u64) -> f32 {
        let (mut expected, mut all, mut changes) = (0.0, 0.0, false);
        for (slot, extent) in self.slots.iter_mut().enumerate().filter(|(_, extent)| extent.lives) {
            let now = passes.get(slot).copied().unwrap_or(0.0);
            let bytes = extent.range.bytes() as f32;
            expected += bytes * now.min(extent.density);
            all += bytes * now;
            let age = cycle.saturating_sub(extent.first_cycle).min(u64::from(seen));
            let weight = DECAY.max(1.0 / (age as f32 + 1.0));
            let before = (extent.density, extent.visits);
            extent.density += (now - extent.density) * weight;
            extent.visits += (visits.get(slot).copied().unwrap_or(0.0) - extent.visits) * weight;
            changes |= before != (extent.density, extent.visits);
        }
        self.epoch += u64::from(changes);
        if all > 0.0 { expected / all } else { 1.0 }
    }

    /// What was expected does not hold any more: only the last cycle counts.
    pub fn forget(&mut self, passes: &[f32], visits: &[f32]) {
        self.epoch += 1;
        for (slot, extent) in self.slots.iter_mut().enumerate() {
            extent.density = passes.get(slot).copied().unwrap_or(0.0);
            extent.visits = visits.get(slot).copied().unwrap_or(0.0);
        }
    }
}
