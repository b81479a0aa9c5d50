//! Which swap is worth it now.
//!
//! Everything is reckoned in nanoseconds a byte. A byte that is far costs its reader the passes that cross the link; one that comes
//! in while another goes out costs the link both ways, which is as much as two passes. What leaves loses, too: what its next uses
//! cost from afar or what bringing it back costs, whichever is less. A swap is worth it if what comes in gains more, until what
//! leaves is needed again, than the copying and that loss. On a cycle that reads each byte once this never holds, and nothing moves;
//! where a launch reads its operand thirty times it holds for each launch, and the operand that was just used goes, since the cycle
//! needs it last.

use crate::extents::{Extent, FRAME, Least};
use crate::interface::{Range, Swap, Whereabouts};
use crate::kinds::{self, NONE, UNKNOWN};
use crate::tiers::Tiers;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// What is expected has to exceed what it costs by so much.
const MARGIN: f64 = 1.1;
/// The same for two densities, at an idle point.
const DENSER: f64 = 1.2;
/// Cycles within which a swap at an idle point has to pay, at most; never more than were seen so far: what has gone on for long
/// will go on for about as long.
const PAYBACK: u32 = 32;
/// The same for one before a launch, which is waited for.
const SOON: u32 = 8;
/// What part of what may be lost is risked to find out how often something is read: one of so many.
const EXPLORE: f64 = 4.0;
/// Launches before the next question, while nothing can be paid.
const POOR: u64 = 16;
const MOST_POOR: u64 = 1024;
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
    /// What is still to be had, lowest addresses last; none before somebody looked.
    units: Option<Vec<Unit>>,
}

/// What moves as a whole, or any part of it.
#[derive(Clone, Copy, Debug)]
struct Unit {
    range: Range,
    is_whole: bool,
}

impl Unit {
    /// Takes at most so many bytes off its end, all of it or nothing where it moves as a whole.
    fn take(&mut self, bytes: u64) -> Option<Range> {
        let all = self.range;
        if all.bytes() <= bytes {
            self.range.end = self.range.start;
            return Some(all);
        }
        let start = (all.end - bytes).next_multiple_of(FRAME);
        if self.is_whole || start >= all.end {
            return None;
        }
        self.range.end = start;
        Some(Range { start, ..all })
    }
}

/// Who could leave, the best first. Most questions are answered by the first few, so they are not sorted.
struct Queue {
    victims: Vec<Victim>,
    /// Their order, and where each is in the list.
    order: BinaryHeap<Reverse<(Key, u32)>>,
}

/// By the first number, and where that is equal by the second.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key(u64, u64);

impl Key {
    /// The least loss, and among equals what is needed last.
    fn of(victim: &Victim) -> Self {
        // The bits of positive numbers are ordered as they are.
        Self(victim.loss.max(0.0).to_bits(), u64::from(u32::MAX - victim.until))
    }
}

impl Queue {
    fn new(victims: Vec<Victim>, key: impl Fn(&Victim) -> Key) -> Self {
        let order = victims.iter().zip(0u32..).map(|(victim, index)| Reverse((key(victim), index))).collect();
        Self { victims, order }
    }

    fn first(&mut self) -> Option<&mut Victim> {
        let Reverse((_, index)) = self.order.peek()?;
        self.victims.get_mut(*index as usize)
    }

    fn skip(&mut self) {
        self.order.pop();
    }
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
    /// Nothing that the launch names leaves. Looks at every extent only
    /// where something may be worth it: tens of microseconds for some thousand then.
    pub fn before(&mut self, launch: u64, now_ns: u64, at: &impl Whereabouts) -> Option<Swap> {
        self.account.time_is(now_ns);
        let id = self.cycle.kind(launch);
        if id == NONE || launch + 1 != self.cycle.position {
            return None;
        }
        self.moves_for_last = true;
        self.refresh_all(at);
        if self.kinds.hot(id).is_some_and(|hot| self.must_return(hot)) {
            let back = self.swap_back(id, self.account.is_wrong(), at);
            if back.is_some() {
                return back;
            }
            self.back_again = self.cycle.position + 64;
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
        self.vain += u32::from(swap.is_none());
        let is_guess = self.kinds.get(id).is_some_and(|_| !self.kinds.gain(id).1);
        if let Some(kind) = self.kinds.get_mut(id) {
            // What was not worth it is asked again later, and what was may be again at its next launch.
            kind.put_off = if swap.is_some() { 0 } else { (kind.put_off * 2).clamp(1, 64) };
            let put_off = u64::from(kind.put_off);
            if let Some(hot) = self.kinds.hot_mut(id) {
                hot.asked_again = launch + put_off * cycle;
            }
        }
        if let Some(swap) = &mut swap
            && is_guess
        {
            swap.time_it = true;
            self.kinds.guessed(id);
        }
        swap
    }

    /// Brings back what this launch would find near if nothing had moved, in place of what would be far; or all that would be near.
    fn swap_back(&mut self, id: u32, all: bool, at: &impl Whereabouts) -> Option<Swap> {
        let kind = self.kinds.get(id)?;
        let is_used = |slot: u32| kind.uses.iter().any(|part| part.slot == slot);
        let mut guests: Vec<(f32, u32)> = self
            .extents
            .live()
            .filter(|(slot, extent)| extent.near_free > 0 && extent.stays_until <= self.cycles && !is_used(*slot))
            .map(|(slot, extent)| (extent.density, slot))
            .collect();
        guests.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let mut guests = guests.into_iter();
        let mut out: Vec<Range> = Vec::new();
        let mut room = at.near_room();
        let mut swap = Swap::default();
        let others: Vec<kinds::Use> = if all {
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
        for part in kind.uses.iter().chain(&others) {
            let Some(extent) = self.extents.get(part.slot) else { continue };
            if extent.displaced() <= 0 || extent.stays_until > self.cycles {
                continue;
            }
            swap.gain_ns += f64::from(self.kinds.credit(id, -1.0) * part.part * -extent.saved_ns(self.cycles));
            for (range, place) in self.extents.displaced(part.slot, false, at) {
                let mut back = vec![range];
                room -= take(&mut back, room, &mut swap.near);
                while !back.is_empty() {
                    if out.is_empty() {
                        let Some((_, slot)) = guests.next() else { break };
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

    fn swap_before(&mut self, id: u32, at: &impl Whereabouts) -> Option<Swap> {
        let kind = self.kinds.get(id)?;
        let (gain, is_measured) = self.kinds.gain(id);
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
        let soon = f64::from(self.prospect().clamp(1, SOON));
        // Nobody knows the new cycle yet, but this launch has come again in it: what was not used in between is of the one before.
        let again = self.previous.filter(|previous| is_outdated && *previous >= self.cycle.lost());
        let far_free: u64 = wanted.iter().filter_map(|want| self.extents.get(want.1)).map(|want| want.far_free).sum();
        // What a byte gains in so many launches, and in each cycle, nanoseconds.
        let gains = |here: f64, slot: u32, place: u8, launches: u32| {
            let kernel = links.link(place).kernel;
            let later = offset.map_or(0.0, |offset| self.timeline.worth(slot, offset, launches, 64.0, &self.kinds));
            let a_cycle = self.extents.get(slot).map_or(0.0, |extent| f64::from(extent.density) / kernel).max(here);
            (here + f64::from(later) / kernel, a_cycle)
        };
        // No victim can be better than one that loses the least of all and is needed as late as any.
        let least = offset.map_or(self.least.visits.min(self.least.away), |_| self.least.away).min(back);
        let may_leave = |(here, slot, place): &(f64, u32, u8)| {
            let cost = links.swap_ns_per_byte(*place);
            let (until, a_cycle) = gains(*here, *slot, *place, self.timeline.longest());
            let stays = a_cycle * soon;
            let until = if again.is_some() { until.max(stays) } else { until };
            until >= MARGIN * (cost + least) || !is_outdated && stays >= MARGIN * cost + DENSER * self.least.away * soon
        };
        // What is needed how much is not known before a cycle has ended.
        let mut victims = if self.learnt > 0 && room < far_free && wanted.iter().any(may_leave) {
            self.victims(back, offset, is_used)
        } else if room == 0 {
            return None;
        } else {
            Vec::new()
        };
        let last = |victim: &Victim| self.extents.get(victim.slot).map_or(0, |extent| extent.last);
        let mut victims = match again {
            Some(previous) => {
                if victims.iter().any(|victim| last(victim) < previous) {
                    victims.retain(|victim| last(victim) < previous);
                }
                Queue::new(victims, |victim| Key(last(victim), 0))
            }
            None => Queue::new(victims, Key::of),
        };
        // What can be paid, with the way back.
        let fixed = 2.0 * links.drain_ns + 8.0 * links.remap_ns;
        let mut affordable = ((self.account.free() - fixed) / (2.0 * back)).max(0.0) as u64 / FRAME * FRAME;
        let mut explored = 0;
        let mut swap = Swap::default();
        for (here, slot, place) in wanted {
            let mut far = self.units(slot, place, at);
            far.retain(|unit| swap.near.iter().all(|range| range.meet(&unit.range).bytes() == 0));
            let until = |launches: u32| gains(here, slot, place, launches).0;
            let (whole, a_cycle) = gains(here, slot, place, cycle);
            let is_free = whole.max(a_cycle * soon);
            let cost = links.swap_ns_per_byte(place);
            'units: while let Some(unit) = far.last_mut().filter(|_| affordable > 0) {
                if let Some(comes) = unit.take(room.min(affordable)) {
                    room -= comes.bytes();
                    affordable -= comes.bytes();
                    swap.gain_ns += comes.bytes() as f64 * is_free;
                    swap.near.push(comes);
                    if unit.range.bytes() == 0 {
                        far.pop();
                    }
                    continue;
                }
                let wanted = if unit.is_whole { unit.range.bytes() } else { unit.range.bytes().min(affordable + room) };
                if wanted > affordable + room || wanted == 0 {
                    break;
                }
                let (mut out, mut left, mut gain_ns) = (Vec::new(), 0, 0.0);
                while room + left < wanted {
                    let Some(victim) = victims.first() else { break 'units };
                    // The first to read it from afar may read it often; how often is known after that.
                    let risk = if self.timeline.unsure.get(victim.slot as usize).is_some_and(|unsure| *unsure) {
                        let bytes = self.account.free() / EXPLORE / f64::from(UNKNOWN) * links.link(place).kernel;
                        (bytes as u64 / FRAME * FRAME).saturating_sub(explored)
                    } else {
                        u64::MAX
                    };
                    let units = victim.units.get_or_insert_with(|| self.units_of(victim.slot, true, None, at));
                    let Some(near) = units.last_mut().filter(|_| risk > 0) else {
                        victims.skip();
                        continue;
                    };
                    let (loss, away, next) = match near.is_whole {
                        true => match self.judge(
                            near.range,
                            victim.slot,
                            (victim.loss, victim.away, victim.until),
                            back,
                            offset,
                            is_used,
                        ) {
                            Some(judged) => judged,
                            None => {
                                units.pop();
                                continue;
                            }
                        },
                        false => (victim.loss, victim.away, victim.until),
                    };
                    // It comes back when it is needed; or it stays away for some cycles, and the other near.
                    let (until, stays) = (until(next), a_cycle * soon);
                    let gain = if again.is_some() && stays >= MARGIN * (cost + loss) {
                        stays - loss
                    } else if until >= MARGIN * (cost + back) {
                        until - back
                    } else if !is_outdated && stays >= MARGIN * cost + DENSER * away * soon {
                        stays - away * soon
                    } else if until >= MARGIN * (cost + loss) {
                        until - loss
                    } else if near.is_whole && (loss > victim.loss || away > victim.away || next < victim.until) {
                        // Something else of its chunk is worth more.
                        units.pop();
                        continue;
                    } else {
                        break 'units;
                    };
                    let Some(goes) = near
                        .take((wanted - room - left).max(if near.is_whole { near.range.bytes() } else { 0 }).min(risk))
                    else {
                        victims.skip();
                        continue;
                    };
                    if near.range.bytes() == 0 {
                        units.pop();
                    }
                    if risk < u64::MAX {
                        explored += goes.bytes();
                    }
                    left += goes.bytes();
                    gain_ns += goes.bytes() as f64 * gain;
                    if swap.far.iter().chain(&out).all(|(other, _): &(Range, u8)| other.meet(&goes).bytes() == 0) {
                        out.push((goes, place));
                    } else {
                        // A chunk that leaves for somebody else already.
                        left -= goes.bytes();
                    }
                }
                let Some(comes) = unit.take(wanted) else { break };
                let bytes = comes.bytes();
                affordable = affordable.saturating_sub(bytes);
                // What left beyond it is room for the next.
                swap.gain_ns += gain_ns / left.max(1) as f64 * left.min(bytes) as f64
                    + is_free * room.min(bytes.saturating_sub(left)) as f64;
                room = (room + left).saturating_sub(bytes);
                swap.far.append(&mut out);
                swap.near.push(comes);
                if unit.range.bytes() == 0 {
                    far.pop();
                }
            }
        }
        self.finish(swap, 1.0, &mut 0.0)
    }

    /// Works out what any extent that could leave loses at least, unless nothing has changed since.
    fn find_least(&mut self) {
        if self.least.epoch == self.extents.epoch {
            return;
        }
        let mut least = Least { epoch: self.extents.epoch, away: f64::INFINITY, visits: f64::INFINITY };
        for (_, extent) in self.extents.live().filter(|(_, extent)| extent.near_free > 0) {
            let kernel = self.settings.links.link(extent.place).kernel;
            least.away = least.away.min(f64::from(extent.density) / kernel);
            least.visits = least.visits.min(f64::from(extent.visits) / kernel);
        }
        self.least = least;
    }

    /// What could leave, in no order.
    fn victims(&self, back: f64, offset: Option<u32>, is_used: impl Fn(u32) -> bool) -> Vec<Victim> {
        self.extents
            .live()
            .filter(|(slot, extent)| extent.near_free > 0 && extent.stays_until <= self.cycles && !is_used(*slot))
            .map(|(slot, extent)| {
                let (loss, away, until) = self.as_victim(slot, extent, back, offset);
                Victim { slot, loss, away, until, units: None }
            })
            .collect()
    }

    /// What is lost by its leaving, by its being read from afar for a cycle, and launches until it is needed ([`Victim`]).
    fn as_victim(&self, slot: u32, extent: &Extent, back: f64, offset: Option<u32>) -> (f64, f64, u32) {
        let kernel = self.settings.links.link(extent.place).kernel;
        let away = f64::from(extent.density) / kernel;
        // Without a cycle: what was not used for long, and is used seldom.
        let idle = self.cycle.position.saturating_sub(extent.last) as f64 * 4096.0 / (away / back).max(1.0);
        let until = offset.map_or(idle as u32, |offset| self.timeline.next(slot, offset));
        // On a known cycle it comes back once, when it is needed; what is drawn each time comes back each time.
        let loss = match offset {
            Some(_) => away.min(back),
            None => away.min(f64::from(extent.visits) / kernel),
        };
        (loss, away, until)
    }

    /// What an extent's memory at a place, or near, moves in, lowest addresses last.
    fn units_of(&self, slot: u32, near: bool, place: Option<u8>, at: &impl Whereabouts) -> Vec<Unit> {
        let mut units: Vec<Unit> = Vec::new();
        for (range, _) in self
            .extents
            .movable(slot, near, at)
            .into_iter()
            .filter(|(_, other)| place.is_none_or(|place| *other == place))
        {
            let mut start = range.start;
            while start < range.end {
                let Some(unit) = at.unit(start).filter(|unit| unit.start <= start && start < unit.end) else {
                    units.push(Unit { range: Range { start, ..range }, is_whole: false });
                    break;
                };
                let part = unit.meet(&range);
                // A chunk that is wanted for a small part is divided.
                let moves = if near || 2 * part.bytes() >= unit.bytes() { unit } else { part };
                if units.last().is_none_or(|last| last.range != moves) {
                    units.push(Unit { range: moves, is_whole: true });
                }
                start = unit.end;
            }
        }
        units.reverse();
        units
    }

    fn units(&self, slot: u32, place: u8, at: &impl Whereabouts) -> Vec<Unit> {
        self.units_of(slot, false, Some(place), at)
    }

    /// What leaves with an extent where its whole chunk does: nanoseconds a byte that are lost, those of being read from afar, and launches
    /// until something of it is needed. None where something of it is in use.
    fn judge(
        &self,
        chunk: Range,
        slot: u32,
        own: (f64, f64, u32),
        back: f64,
        offset: Option<u32>,
        is_used: impl Fn(u32) -> bool,
    ) -> Option<(f64, f64, u32)> {
        let (mut loss, mut away, mut until) = (0.0, 0.0, own.2);
        for other in self.extents.over(chunk) {
            let Some(extent) = self.extents.get(other) else { continue };
            if other != slot && (is_used(other) || extent.stays_until > self.cycles) {
                return None;
            }
            let bytes = extent.range.meet(&chunk).bytes() as f64;
            let judged = if other == slot { own } else { self.as_victim(other, extent, back, offset) };
            loss += bytes * judged.0;
            away += bytes * judged.1;
            until = until.min(judged.2);
        }
        let bytes = chunk.bytes().max(1) as f64;
        Some((loss / bytes, away / bytes, until))
    }

    /// What carrying it out is expected to take.
    fn cost_of(&self, swap: &Swap) -> f64 {
        let links = &self.settings.links;
        let place = match (swap.far.first(), swap.near.first()) {
            (Some((_, place)), _) => *place,
            (None, Some(range)) => {
                let slot = self.extents.over(*range).next();
                slot.and_then(|slot| self.extents.get(slot)).map_or(0, |extent| extent.place)
            }
            (None, None) => 0,
        };
        let (bytes_in, bytes_out) = (swap.bytes_in(), swap.bytes_out());
        links.drain_ns
            + links.copy_ns(place, bytes_in, bytes_out)
            + links.map_ns(swap.near.len() + swap.far.len(), bytes_in + bytes_out)
    }

    /// What a swap costs in all, and whether that is still worth it and may be spent.
    fn finish(&mut self, mut swap: Swap, cycles: f64, promised: &mut f64) -> Option<Swap> {
        if swap.near.is_empty() {
            return None;
        }
        join(&mut swap.near);
        join_placed(&mut swap.far);
        swap.cost_ns = self.cost_of(&swap);
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
            back_ns - extent.back_ns
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

    /// What should move while the device is idle anyway, best first, in `budget_ns` in all. What is used most, a byte, comes in for
    /// what is used least.
    pub fn when_idle(&mut self, budget_ns: u64, now_ns: u64, at: &impl Whereabouts) -> Vec<Swap> {
        self.launch_is_over(at);
        self.account.time_is(now_ns);
        self.refresh_all(at);
        self.catch_up();
        let mut promised = 0.0;
        let mut swaps = Vec::new();
        if self.seen == 0 || self.is_outdated() || !self.account.can_move(&self.settings.links) {
            return swaps;
        }
        let links = self.settings.links.clone();
        let payback = f64::from(self.seen.max(self.patience).clamp(1, PAYBACK));
        let is_known = self.cycle.length().is_some();
        // What comes in before its launch and leaves again costs two swaps a cycle, however dense it is.
        // What is drawn each time costs no more than bringing it each time that it is drawn.
        let is_drawn = self.surprises >= SURPRISES;
        let worth = |extent: &Extent| {
            let kernel = links.link(extent.place).kernel;
            let density = f64::from(extent.density) / kernel;
            match (is_drawn, is_known) {
                (true, _) => density.min(f64::from(extent.visits) / kernel),
                (false, true) => density.min(2.0 * links.swap_ns_per_byte(extent.place)),
                (false, false) => density,
            }
        };
        let mut far: Vec<(f64, u32, u8)> = Vec::new();
        let mut near: Vec<(f64, u32)> = Vec::new();
        for (slot, extent) in self.extents.live().filter(|(_, extent)| extent.stays_until <= self.cycles) {
            let density = worth(extent);
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
        let mut left = (budget_ns as f64).min(self.account.free() / 2.0);
        let mut near = near.into_iter();
        let mut victim: Vec<(f64, Unit)> = Vec::new();
        let link = far.first().map_or(0.0, |(_, _, place)| links.link(*place).kernel);
        let mut explored = (self.account.free() / EXPLORE / f64::from(UNKNOWN) * link) as u64 / FRAME * FRAME;
        let mut swap = Swap::default();
        let mean = |range: Range| {
            let of = self.extents.over(range).filter_map(|slot| self.extents.get(slot));
            of.map(|extent| worth(extent) * extent.range.meet(&range).bytes() as f64).sum::<f64>()
                / range.bytes().max(1) as f64
        };
        let is_fresh = |ranges: &[Range], range: Range| ranges.iter().all(|other| other.meet(&range).bytes() == 0);
        let mut planned: Vec<Swap> = Vec::new();
        let mut goes: Vec<Range> = Vec::new();
        let mut came: Vec<Range> = Vec::new();
        'far: for (density, slot, place) in far {
            let mut units = self.units(slot, place, at);
            while let Some(unit) = units.last_mut() {
                if !is_fresh(&came, unit.range) {
                    units.pop();
                    continue;
                }
                let density = if unit.is_whole { mean(unit.range) } else { density };
                let fits = |bytes: u64, out: u64| {
                    let mapping = (bytes as f64 / WHOLE as f64).min(1.0) * links.remap_ns;
                    links.copy_ns(place, bytes, out) + 2.0 * mapping
                };
                // Such a part of a swap as there is still time for.
                let part = |bytes: u64, out: u64| match fits(bytes, out) {
                    cost if cost > left => ((bytes as f64 * left / cost) as u64 / FRAME) * FRAME,
                    _ => bytes,
                };
                let mut wanted = if unit.is_whole { unit.range.bytes() } else { unit.range.bytes().min(BATCH) };
                if room >= FRAME && !unit.is_whole {
                    wanted = part(wanted.min(room), 0);
                }
                let (mut out, mut bytes_out, mut loss_ns) = (Vec::new(), 0, 0.0);
                while room + bytes_out < wanted {
                    let Some((loss, next)) = victim.last_mut() else {
                        let Some((loss, slot)) = near.next() else { break 'far };
                        let unsure = self.timeline.unsure.get(slot as usize).is_some_and(|unsure| *unsure);
                        for mut unit in self.units_of(slot, true, None, at) {
                            let loss = if unit.is_whole { mean(unit.range) } else { loss };
                            if unsure {
                                let Some(some) = unit.take(explored) else { continue };
                                explored -= some.bytes();
                                unit.range = some;
                            }
                            victim.push((loss, unit));
                        }
                        continue;
                    };
                    if next.range.bytes() == 0 || !is_fresh(&goes, next.range) || !is_fresh(&came, next.range) {
                        victim.pop();
                        continue;
                    }
                    let loss = *loss;
                    if density < DENSER * loss {
                        if next.is_whole {
                            // Something else of its chunk is used more.
                            victim.pop();
                            continue;
                        }
                        break 'far;
                    }
                    let lacks = wanted - room - bytes_out;
                    let most = if next.is_whole { next.range.bytes() } else { part(lacks, lacks) };
                    let Some(range) = next.take(most).filter(|range| range.bytes() > 0) else { break 'far };
                    bytes_out += range.bytes();
                    loss_ns += loss * range.bytes() as f64;
                    if !next.is_whole && range.bytes() < lacks {
                        wanted = room + bytes_out;
                    }
                    out.push((range, place));
                }
                let bytes = wanted.min(unit.range.bytes());
                let cost = fits(bytes, bytes_out);
                let gain = density * bytes as f64 - loss_ns;
                if bytes == 0 || cost > left || gain * payback < MARGIN * cost {
                    // Those that follow are no better.
                    if bytes == 0 || bytes_out > 0 || density * payback < 1.0 / links.link(place).copy_in {
                        break 'far;
                    }
                    continue 'far;
                }
                let Some(range) = unit.take(bytes) else { continue 'far };
                if unit.range.bytes() == 0 {
                    units.pop();
                }
                room = (room + bytes_out).saturating_sub(range.bytes());
                left -= cost;
                swap.gain_ns += gain;
                goes.extend(out.iter().map(|(range, _)| *range));
                came.push(range);
                swap.far.append(&mut out);
                swap.near.push(range);
                if swap.bytes_in() >= BATCH {
                    planned.push(std::mem::take(&mut swap));
                }
            }
        }
        planned.push(swap);
        swaps.extend(planned.into_iter().filter_map(|swap| self.finish(swap, payback, &mut promised)));
        swaps
    }
}
