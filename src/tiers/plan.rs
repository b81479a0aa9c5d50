//! Which swap is worth it now.
//!
//! Everything is reckoned in nanoseconds a byte. A byte that is far costs its reader the passes that cross the link; one that comes
//! in while another goes out costs the link both ways, which is as much as two passes. What leaves loses, too: what its next uses
//! cost from afar or what bringing it back costs, whichever is less. A swap is worth it if what comes in gains more, until what
//! leaves is needed again, than the copying and that loss. On a cycle that reads each byte once this never holds, and nothing moves;
//! where a launch reads its operand thirty times it holds for each launch, and the operand that was just used goes, since the cycle
//! needs it last.

use crate::extents::Extent;
use crate::interface::{Range, Swap, Whereabouts};
use crate::kinds::{self, NONE};
use crate::tiers::{Guess, Tiers};
use crate::units::Unit;
use std::collections::BTreeMap;

/// What is expected has to exceed what it costs by so much.
pub const MARGIN: f64 = 1.1;
/// The same for two densities, at an idle point.
pub const DENSER: f64 = 1.2;
/// What part of what may be lost is risked to find out how often something is read: one of so many.
pub const EXPLORE: f64 = 4.0;
/// Questions in vain that one makes up for whose answer was worth it, where no cycle is known.
const ANSWERED: u32 = 4;
/// Launches before the next question, while nothing can be paid.
const POOR: u64 = 16;
const MOST_POOR: u64 = 1024;

/// Takes `bytes` from the end of a list of ranges, cut at frames. Answers what was taken.
fn take(ranges: &mut Vec<Range>, bytes: u64, taken: &mut Vec<Range>) -> u64 {
    let mut left = bytes;
    while left > 0
        && let Some(last) = ranges.last_mut()
    {
        let mut unit = Unit { range: *last, is_whole: false };
        let Some(part) = unit.take(left) else { break };
        left -= part.bytes();
        taken.push(part);
        *last = unit.range;
        if last.bytes() == 0 {
            ranges.pop();
        }
    }
    bytes - left
}

/// Puts neighbours together.
fn join(ranges: &mut Vec<Range>) {
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let joined = last.end == next.start;
        if joined {
            last.end = next.end;
        }
        joined
    });
}

/// The same, where they go to the same place.
fn join_placed(ranges: &mut Vec<(Range, u8)>) {
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let joined = last.0.end == next.0.start && last.1 == next.1;
        if joined {
            last.0.end = next.0.end;
        }
        joined
    });
}

impl Tiers {
    /// Whether memory should move before this launch, the last that was told of ([`Launch::ask`](crate::Launch::ask)), and which.
    /// Nothing that the launch names leaves, but for what it would find near if nothing had moved. Looks at every extent only
    /// where something may be worth it: tens of microseconds for some thousand then.
    pub fn before(&mut self, launch: u64, now_ns: u64, at: &impl Whereabouts) -> Option<Swap> {
        self.account.time_is(now_ns);
        let id = self.cycle.kind(launch);
        if id == NONE || launch + 1 != self.cycle.position {
            return None;
        }
        self.moves_for_last = true;
        self.refresh_all(at);
        if self.must_return(id) {
            let back = self.swap_back(Some(id), self.account.is_wrong(), at);
            if back.is_some() {
                return back;
            }
            // A launch before which everything was to come back may itself stand in the way, and says nothing of what others lose.
            let loses = self.kinds.hot(id).is_some_and(|hot| self.loses_too_much(hot));
            let again = if loses { &mut self.back_again } else { &mut self.all_back_again };
            *again = self.cycle.position + 64;
        }
        // With so little to spend nothing that is worth a launch's wait comes.
        if !self.account.can_move(&self.settings.links) {
            self.poor_for = (self.poor_for * 2).clamp(POOR, MOST_POOR);
            self.poor_until = self.cycle.position + self.poor_for;
            return None;
        }
        self.poor_for = 0;
        self.catch_up();
        self.find_least();
        let mut swap = self.swap_before(id, at);
        // Cycles of a few launches are counted together.
        let cycle = self.cycle.length().unwrap_or(u64::from(self.timeline.length()).clamp(1, 64)).max(8);
        // What is asked each time, whatever was answered, takes no question from anybody else.
        let is_counted = !self.kinds.hot(id).is_some_and(|hot| hot.asks_each_time);
        self.vain += u32::from(swap.is_none() && is_counted);
        if swap.is_some() && self.is_elsewhere() {
            // No cycle ends there for long.
            self.vain = self.vain.saturating_sub(ANSWERED);
        }
        let is_guess = self.kinds.get(id).is_some_and(|_| !self.kinds.gain(id).1);
        if let Some(kind) = self.kinds.get_mut(id) {
            // What was not worth it is asked again later, and what was may be again at its next launch.
            kind.put_off = if swap.is_some() { 0 } else { (kind.put_off * 2).clamp(1, 64) };
            let put_off = u64::from(kind.put_off);
            if let Some(hot) = self.kinds.hot_mut(id) {
                hot.asked_again = launch + put_off * cycle;
            }
        }
        if let Some(swap) = &mut swap {
            if is_guess {
                swap.time_it = true;
                self.kinds.guessed(id);
            }
            let comes = |part: &&kinds::Use| {
                let extent = self.extents.get(part.slot);
                extent.is_some_and(|extent| swap.near.iter().any(|range| range.meet(&extent.range).bytes() > 0))
            };
            let uses = self.kinds.get(id).map_or(&[][..], |kind| &kind.uses);
            let tried = uses.iter().filter(|part| self.kinds.promises(id, part, &self.extents).is_some()).filter(comes);
            let tried: Vec<u8> = tried.filter_map(|part| part.operand).collect();
            for operand in &tried {
                swap.time_it = true;
                self.kinds.is_tried(id, *operand);
            }
            self.guess = swap.time_it.then_some(Guess { kind: id, is_guess, tried });
        }
        swap
    }

    /// Brings back what this launch would find near if nothing had moved, in place of what would be far, once launches have lost enough by it
    /// ([`Extent::is_due`]). Without a launch, whatever is due; `all`: due or not.
    pub(crate) fn swap_back(&mut self, launch: Option<u32>, all: bool, at: &impl Whereabouts) -> Option<Swap> {
        let uses = launch.and_then(|id| self.kinds.get(id)).map_or(&[][..], |kind| &kind.uses);
        let is_used = |slot: u32| uses.iter().any(|part| part.slot == slot);
        let mut guests: Vec<(bool, f32, u32)> = self
            .extents
            .live()
            .filter(|(_, extent)| extent.near_free > 0 && extent.stays_until <= self.cycles)
            .map(|(slot, extent)| (is_used(slot), extent.density, slot))
            .collect();
        // What the launch itself reads leaves last, and only for what it reads, too: then all of that lies as it did at first.
        guests.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mut guests = guests.into_iter().peekable();
        let mut out: Vec<Range> = Vec::new();
        let mut room = at.near_room();
        let mut swap = Swap { is_back: true, ..Swap::default() };
        let others: Vec<kinds::Use> = if all || launch.is_none() {
            let others = self.extents.live().filter(|(slot, extent)| extent.displaced() > 0 && !is_used(*slot));
            others
                .map(|(slot, extent)| kinds::Use {
                    slot,
                    generation: extent.generation,
                    share: 0.0,
                    part: 0.0,
                    is_named: true,
                    operand: None,
                })
                .collect()
        } else {
            Vec::new()
        };
        let charges = launch.map_or_else(Vec::new, |id| self.charges_of(id, at));
        let is_due = |slot: u32, extent: &Extent| {
            let more_ns = charges.iter().filter(|charge| charge.0 == slot).map(|charge| charge.1).sum();
            extent.is_due(more_ns)
        };
        for part in uses.iter().chain(&others) {
            let Some(extent) = self.extents.get(part.slot) else { continue };
            if extent.displaced() <= 0 || extent.stays_until > self.cycles || !all && !is_due(part.slot, extent) {
                continue;
            }
            let credit = launch.map_or(0.0, |id| self.kinds.credit(id, -1.0));
            swap.gain_ns += f64::from(credit * part.part * -extent.saved_ns(self.cycles));
            for (range, place) in self.extents.displaced(part.slot, false, at) {
                let mut back = vec![range];
                room -= take(&mut back, room, &mut swap.near);
                while !back.is_empty() {
                    if out.is_empty() {
                        let Some((.., slot)) = guests.next_if(|(is_used, ..)| !is_used || part.share > 0.0) else {
                            break;
                        };
                        out.extend(self.extents.displaced(slot, true, at).into_iter().map(|(range, _)| range));
                        continue;
                    }
                    let mut left = Vec::new();
                    let bytes = take(&mut out, back.iter().map(Range::bytes).sum(), &mut left);
                    let came = take(&mut back, bytes, &mut swap.near);
                    swap.far.extend(left.into_iter().map(|range| (range, place)));
                    if came == 0 {
                        break;
                    }
                }
            }
        }
        if swap.near.is_empty() {
            return None;
        }
        join(&mut swap.near);
        join_placed(&mut swap.far);
        swap.cost_ns = self.cost_of(&swap);
        Some(swap)
    }

    /// What carrying it out is expected to take.
    fn cost_of(&self, swap: &Swap) -> f64 {
        let place = match (swap.far.first(), swap.near.first()) {
            (Some((_, place)), _) => *place,
            (None, Some(range)) => {
                let slot = self.extents.over(*range).next();
                slot.and_then(|slot| self.extents.get(slot)).map_or(0, |extent| extent.place)
            }
            (None, None) => 0,
        };
        let ranges = swap.near.len() + swap.far.len();
        self.settings.links.swap_ns(place, ranges, swap.bytes_in(), swap.bytes_out())
    }

    /// What a swap costs in all, and whether that is still worth it and may be spent.
    ///
    /// `made_ns`: what memory takes that has to be made for it while the device has nothing to do.
    pub(crate) fn finish(&mut self, mut swap: Swap, cycles: f64, made_ns: f64, promised: &mut f64) -> Option<Swap> {
        if swap.near.is_empty() {
            return None;
        }
        join(&mut swap.near);
        join_placed(&mut swap.far);
        swap.cost_ns = self.cost_of(&swap) + made_ns;
        if swap.gain_ns * cycles < MARGIN * swap.cost_ns {
            return None;
        }
        // What its going and coming does to what bringing everything back would take.
        let mut slots: BTreeMap<u32, i64> = BTreeMap::new();
        let mut change = |range: &Range, sign: i64| {
            for slot in self.extents.over(*range) {
                let bytes = self.extents.get(slot).map_or(0, |extent| extent.range.meet(range).bytes());
                *slots.entry(slot).or_default() += sign * bytes as i64;
            }
        };
        swap.far.iter().for_each(|(range, _)| change(range, 1));
        swap.near.iter().for_each(|range| change(range, -1));
        let reserve = |(slot, bytes): (&u32, &i64)| {
            let Some(extent) = self.extents.get(*slot) else { return 0.0 };
            let displaced = (extent.displaced() + bytes).max(0) as u64;
            let back_ns = if displaced == 0 { 0.0 } else { self.settings.links.back_ns(extent.place, displaced) };
            extent.kept_if(back_ns, displaced) - extent.kept_ns()
        };
        let change = swap.bytes_out() as i64 - swap.bytes_in() as i64;
        let reserve = slots.iter().map(reserve).sum::<f64>() + self.extents.room_ns(change);
        let is_known = self.cycle.length().is_some();
        if !self.account.may_spend(*promised + swap.cost_ns, reserve, is_known) {
            return None;
        }
        *promised += swap.cost_ns + reserve;
        Some(swap)
    }
}
