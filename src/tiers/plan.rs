//! Which swap is worth it now.
//!
//! Everything is reckoned in nanoseconds a byte. A byte that is far costs its reader the passes that cross the link; one that comes
//! in while another goes out costs the link both ways, which is as much as two passes. What leaves loses, too: what its next uses
//! cost from afar or what bringing it back costs, whichever is less. A swap is worth it if what comes in gains more, until what
//! leaves is needed again, than the copying and that loss. On a cycle that reads each byte once this never holds, and nothing moves;
//! where a launch reads its operand thirty times it holds for each launch, and the operand that was just used goes, since the cycle
//! needs it last.

use crate::extents::FRAME;
use crate::interface::{Range, Swap, Whereabouts};
use crate::kinds::NONE;
use crate::tiers::Tiers;

/// What is expected has to exceed what it costs by so much.
const MARGIN: f64 = 1.1;
/// The same for two densities, at an idle point.
const DENSER: f64 = 1.2;
/// Cycles within which a swap at an idle point has to pay, at most; never more than were seen so far: what has gone on for long
/// will go on for about as long.
const PAYBACK: u32 = 32;
/// The same for one before a launch, which is waited for.
const SOON: u32 = 8;
/// Which part of the launches may come otherwise than before, if the order of the cycle is to be relied on.
const SURPRISES: f32 = 0.4;
/// Pieces smaller than this go along with their neighbours, as far as mapping is concerned.
const WHOLE: u64 = 32 << 20;
/// Bytes of one swap at an idle point, about.
const BATCH: u64 = 1 << 30;

/// What could leave.
struct Victim {
    slot: u32,
    /// Nanoseconds a byte that are lost in a cycle: read from afar, or by coming back if that is less.
    loss: f64,
    /// Nanoseconds a byte a cycle of being read from afar.
    away: f64,
    /// Launches until it is needed; if nobody knows, how long it was not.
    until: u32,
    /// Bytes that are still to be had, lowest addresses last; none before somebody looked.
    ranges: Option<Vec<Range>>,
}

/// Takes `bytes` from the end of a list of ranges, cut at frames. Answers what was taken.
fn take(ranges: &mut Vec<Range>, bytes: u64, taken: &mut Vec<Range>) -> u64 {
    let mut left = bytes;
    while left > 0
        && let Some(last) = ranges.last_mut()
    {
        if last.bytes() <= left {
            left -= last.bytes();
            taken.push(*last);
            ranges.pop();
        } else {
            let start = (last.end - left).next_multiple_of(FRAME);
            if start < last.end {
                taken.push(Range { start, end: last.end });
                left -= last.end - start;
                last.end = start;
            }
            break;
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
    /// Nothing that the launch names leaves. Looks at every extent: tens of microseconds for some thousand.
    pub fn before(&mut self, launch: u64, now_ns: u64, at: &impl Whereabouts) -> Option<Swap> {
        self.account.time_is(now_ns, self.settings.share / 10.0);
        let id = self.cycle.kind(launch);
        if id == NONE || launch + 1 != self.cycle.position {
            return None;
        }
        let mut swap = self.swap_before(id, at);
        let cycle = self.cycle.length().unwrap_or(64);
        self.vain += u32::from(swap.is_none());
        let is_guess = self.kinds.get(id).is_some_and(|kind| !self.kinds.gain(kind).1);
        if let Some(kind) = self.kinds.get_mut(id) {
            // What was not worth it is asked again later, and what was may be again at its next launch.
            kind.put_off = if swap.is_some() { 0 } else { (kind.put_off * 2).clamp(1, 64) };
            kind.asked_again = launch + u64::from(kind.put_off) * cycle;
        }
        if let Some(swap) = &mut swap
            && is_guess
        {
            swap.time_it = true;
            self.kinds.guessed(id);
        }
        swap
    }

    fn swap_before(&mut self, id: u32, at: &impl Whereabouts) -> Option<Swap> {
        self.refresh_all(at);
        let kind = self.kinds.get(id)?;
        let (gain, is_measured) = self.kinds.gain(kind);
        if !is_measured && !self.kinds.may_guess(kind) {
            return None;
        }
        let links = &self.settings.links;
        // Where other operands come each time, what was next the last time says nothing.
        let offset = self.timeline.offset(self.cycle.repeats()).filter(|_| self.surprises < SURPRISES);
        let is_outdated = self.is_outdated();
        let cycle = self.timeline.length();
        let is_used = |slot: u32| kind.uses.iter().any(|part| part.slot == slot);
        let mut wanted: Vec<(f64, u32, u8)> = kind
            .uses
            .iter()
            .filter_map(|part| {
                let extent = self.extents.get(part.slot)?;
                let may = extent.far_free > 0 && extent.stays_until <= self.cycles;
                may.then(|| (f64::from(gain * part.part) / links.link(extent.place).kernel, part.slot, extent.place))
            })
            .collect();
        wanted.sort_by(|a, b| b.0.total_cmp(&a.0));
        let back = wanted.first().map(|(_, _, place)| links.swap_ns_per_byte(*place))?;
        let mut room = at.near_room();
        let mut victims =
            if room < wanted.iter().filter_map(|want| self.extents.get(want.1)).map(|want| want.far_free).sum() {
                self.victims(back, offset, is_used)
            } else {
                Vec::new()
            };
        let soon = f64::from(self.seen.max(self.patience).clamp(1, SOON));
        let mut next = 0;
        let mut swap = Swap::default();
        for (here, slot, place) in wanted {
            let link = links.link(place);
            let mut far = self.extents.movable(slot, false, at);
            far.retain(|(_, other)| *other == place);
            let mut far: Vec<Range> = far.into_iter().map(|(range, _)| range).rev().collect();
            let a_cycle =
                self.extents.get(slot).map_or(0.0, |extent| f64::from(extent.density) / link.kernel).max(here);
            // What it gains until then, nanoseconds a byte, this launch included.
            let until = |launches: u32| {
                let later = offset.map_or(0.0, |offset| self.timeline.worth(slot, offset, launches, 64.0, &self.kinds));
                here + f64::from(later) / link.kernel
            };
            let free = take(&mut far, room, &mut swap.near);
            if free > 0 {
                room -= free;
                swap.gain_ns += free as f64 * until(cycle).max(a_cycle * soon);
            }
            while !far.is_empty()
                && let Some(victim) = victims.get_mut(next)
            {
                let cost = links.swap_ns_per_byte(place);
                // It comes back when it is needed; or it stays away for some cycles, and the other near.
                let (until, stays) = (until(victim.until), a_cycle * soon);
                let gain = if until >= MARGIN * (cost + back) {
                    until - back
                } else if !is_outdated && stays >= MARGIN * cost + DENSER * victim.away * soon {
                    stays - victim.away * soon
                } else if until >= MARGIN * (cost + victim.loss) {
                    until - victim.loss
                } else {
                    break;
                };
                let (extents, slot) = (&self.extents, victim.slot);
                let near = victim.ranges.get_or_insert_with(|| {
                    extents.movable(slot, true, at).into_iter().map(|(range, _)| range).collect()
                });
                let wanted: u64 = far.iter().map(Range::bytes).sum();
                let mut out = Vec::new();
                let left = take(near, wanted, &mut out);
                let came = take(&mut far, left, &mut swap.near);
                swap.far.extend(out.into_iter().map(|range| (range, place)));
                swap.gain_ns += came as f64 * gain;
                if near.is_empty() || left == 0 {
                    next += 1;
                }
                if left > 0 && came == 0 {
                    break;
                }
            }
        }
        self.finish(swap, 1.0)
    }

    /// What could leave, least loss first, and among equals what is needed last.
    fn victims(&self, back: f64, offset: Option<u32>, is_used: impl Fn(u32) -> bool) -> Vec<Victim> {
        let mut victims: Vec<Victim> = self
            .extents
            .live()
            .filter(|(slot, extent)| extent.near_free > 0 && extent.stays_until <= self.cycles && !is_used(*slot))
            .map(|(slot, extent)| {
                let kernel = self.settings.links.link(extent.place).kernel;
                let away = f64::from(extent.density) / kernel;
                // Without a cycle: what was not used for long, and is used seldom.
                let idle = self.cycle.position.saturating_sub(extent.last) as f64 * 4096.0 / (away / back).max(1.0);
                let until = offset.map_or(idle as u32, |offset| self.timeline.next(slot, offset));
                Victim { slot, loss: away.min(back), away, until, ranges: None }
            })
            .collect();
        victims.sort_by(|a, b| a.loss.total_cmp(&b.loss).then(b.until.cmp(&a.until)));
        victims
    }

    fn may_spend(&mut self, ns: f64) -> bool {
        self.account.may_spend(ns, self.cycle.length().is_some(), self.cycles)
    }

    /// What a swap costs in all, and whether that is still worth it and may be spent.
    fn finish(&mut self, mut swap: Swap, cycles: f64) -> Option<Swap> {
        if swap.near.is_empty() {
            return None;
        }
        let links = &self.settings.links;
        join(&mut swap.near);
        join_placed(&mut swap.far);
        let place = match swap.far.first() {
            Some((_, place)) => *place,
            None => swap
                .near
                .first()
                .and_then(|range| self.extents.over(*range).next())
                .map_or(0, |slot| self.extents.get(slot).map_or(0, |extent| extent.place)),
        };
        let (bytes_in, bytes_out) = (swap.bytes_in(), swap.bytes_out());
        swap.cost_ns = links.drain_ns
            + links.copy_ns(place, bytes_in, bytes_out)
            + links.map_ns(swap.near.len() + swap.far.len(), bytes_in + bytes_out);
        if swap.gain_ns * cycles < MARGIN * swap.cost_ns {
            return None;
        }
        // What was near at first and comes back was paid for when it left; it may come back, within a wider limit.
        let displaced: u64 = swap.near.iter().map(|range| range.bytes() - self.extents.far_at_home(*range)).sum();
        let may = if displaced * 2 < bytes_in {
            self.may_spend(2.0 * swap.cost_ns)
        } else {
            self.account.may_return(swap.cost_ns)
        };
        if !may {
            return None;
        }
        Some(swap)
    }

    /// What should move while the device is idle anyway, best first, in `budget_ns` in all. What is used most, a byte, comes in for
    /// what is used least.
    pub fn when_idle(&mut self, budget_ns: u64, now_ns: u64, at: &impl Whereabouts) -> Vec<Swap> {
        self.account.time_is(now_ns, self.settings.share / 10.0);
        self.refresh_all(at);
        let mut swaps = Vec::new();
        if self.seen == 0 || self.is_outdated() {
            return swaps;
        }
        let links = self.settings.links.clone();
        let payback = f64::from(self.seen.max(self.patience).clamp(1, PAYBACK));
        let is_known = self.cycle.length().is_some();
        // What comes in before its launch and leaves again costs two swaps a cycle, however dense it is.
        let worth = |density: f32, place: u8| {
            let density = f64::from(density) / links.link(place).kernel;
            if is_known { density.min(2.0 * links.swap_ns_per_byte(place)) } else { density }
        };
        let mut far: Vec<(f64, u32, u8)> = Vec::new();
        let mut near: Vec<(f64, u32)> = Vec::new();
        for (slot, extent) in self.extents.live().filter(|(_, extent)| extent.stays_until <= self.cycles) {
            let density = worth(extent.density, extent.place);
            if extent.far_free > 0 && density > 0.0 {
                far.push((density, slot, extent.place));
            }
            if extent.near_free > 0 {
                near.push((density, slot));
            }
        }
        far.sort_by(|a, b| b.0.total_cmp(&a.0));
        near.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut room = at.near_room();
        let mut left = budget_ns as f64;
        let mut near = near.into_iter();
        let mut victim: Option<(f64, Vec<Range>)> = None;
        let mut swap = Swap::default();
        'far: for (density, slot, place) in far {
            let ranges = self.extents.movable(slot, false, at);
            let mut ranges: Vec<Range> =
                ranges.into_iter().filter(|(_, other)| *other == place).map(|(range, _)| range).rev().collect();
            let mapping = |bytes: u64| (bytes as f64 / WHOLE as f64).min(1.0) * links.remap_ns;
            while !ranges.is_empty() {
                let wanted: u64 = ranges.iter().map(Range::bytes).sum::<u64>().min(BATCH);
                let (loss, bytes) = if room >= FRAME {
                    (0.0, wanted.min(room))
                } else {
                    if victim.as_ref().is_none_or(|(_, ranges)| ranges.is_empty()) {
                        let Some((loss, slot)) = near.next() else { break 'far };
                        let ranges = self.extents.movable(slot, true, at).into_iter().map(|(range, _)| range).collect();
                        victim = Some((loss, ranges));
                        continue;
                    }
                    let Some((loss, ranges)) = &victim else { break 'far };
                    (*loss, wanted.min(ranges.iter().map(Range::bytes).sum()))
                };
                let is_free = room >= FRAME;
                let bytes_out = if is_free { 0 } else { bytes };
                let fits =
                    |bytes: u64| links.copy_ns(place, bytes, if is_free { 0 } else { bytes }) + 2.0 * mapping(bytes);
                let bytes = if fits(bytes) > left {
                    ((bytes as f64 * left / fits(bytes)) as u64 / FRAME) * FRAME
                } else {
                    bytes
                };
                let cost = fits(bytes);
                let gain = (density - loss) * bytes as f64;
                if density < DENSER * loss || gain * payback < MARGIN * cost || bytes == 0 {
                    // Those that follow are no better.
                    if bytes == 0 || bytes_out > 0 || density * payback < 1.0 / links.link(place).copy_in {
                        break 'far;
                    }
                    continue 'far;
                }
                let came = if is_free {
                    let came = take(&mut ranges, bytes, &mut swap.near);
                    room -= came;
                    came
                } else if let Some((_, victim)) = &mut victim {
                    let mut out = Vec::new();
                    let left = take(victim, bytes, &mut out);
                    let came = take(&mut ranges, left, &mut swap.near);
                    swap.far.extend(out.into_iter().map(|range| (range, place)));
                    if left == 0 {
                        victim.clear();
                    }
                    came
                } else {
                    0
                };
                left -= cost;
                swap.gain_ns += (density - loss) * came as f64;
                if came == 0 {
                    continue 'far;
                }
                if swap.bytes_in() >= BATCH {
                    swaps.extend(self.finish(std::mem::take(&mut swap), payback));
                }
            }
        }
        swaps.extend(self.finish(swap, payback));
        swaps
    }
}
