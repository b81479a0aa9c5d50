//! What to move before a launch: for each thing that it reads from afar, what is worth least to the launches after it.

use crate::ahead::Ahead;
use crate::cycle::SURPRISES;
use crate::extents::{Extent, FRAME, Least};
use crate::interface::{Range, Swap, Whereabouts};
use crate::kinds::UNKNOWN;
use crate::links::Links;
use crate::plan::{DENSER, EXPLORE, MARGIN};
use crate::tiers::Tiers;
use crate::units::{Unit, units};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Bytes that come in one swap, about, where some of them are for later launches.
const TOGETHER: u64 = 768 << 20;
/// Which part of what can be paid may go to these: one of so many. What is only expected leaves enough for what is asked for.
const AT_STAKE: u64 = 8;
/// A stop is worth sparing where it takes at least as long as copying so much, in and out. Beside the host it does not: what comes too early costs more there.
const WORTH_SPARING: u64 = 8 << 20;

/// Bytes that leave ahead of what comes next, about, and how many times as much as it loses in a cycle bringing each back has to take.
const ROOM_AHEAD: u64 = 1 << 30;
const SELDOM: f64 = 4.0;
/// Pieces that are looked at for that.
const MOST_AHEAD: usize = 64;

/// Cycles within which a swap before a launch, which is waited for, has to pay, at most; never more than were seen so far.
const SOON: u32 = 8;

/// What leaving costs.
#[derive(Clone, Copy, Debug)]
struct Loss {
    /// Nanoseconds a byte that are lost in a cycle: read from afar, or by coming back if that is less.
    loss: f64,
    /// Nanoseconds a byte a cycle of being read from afar.
    away: f64,
    /// Launches until it is needed; if nobody knows, how long it was not.
    until: u32,
}

/// What could leave.
struct Victim {
    slot: u32,
    loss: Loss,
    /// What is still to be had, lowest addresses last; none before somebody looked.
    units: Option<Vec<Unit>>,
}

/// Who could leave, the best first. Most questions are answered by the first few, so they are not sorted.
#[derive(Default)]
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
        Self(victim.loss.loss.max(0.0).to_bits(), u64::from(u32::MAX - victim.loss.until))
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

    /// Leaves the next unit of the first one out.
    fn pop_unit(&mut self) {
        if let Some(units) = self.first().and_then(|victim| victim.units.as_mut()) {
            units.pop();
        }
    }

    /// Takes at most so many bytes of it.
    fn take(&mut self, bytes: u64) -> Option<Range> {
        let units = self.first()?.units.as_mut()?;
        let goes = units.last_mut()?.take(bytes)?;
        if units.last().is_some_and(|unit| unit.range.bytes() == 0) {
            units.pop();
        }
        Some(goes)
    }
}

/// Something far that the launch reads.
#[derive(Clone, Copy)]
struct Want {
    slot: u32,
    place: u8,
    /// Nanoseconds a byte that this launch gains by its being near.
    here: f64,
}

/// Memory that leaves for something that comes.
#[derive(Default)]
struct Made {
    out: Vec<(Range, u8)>,
    bytes: u64,
    gain_ns: f64,
}

/// What is looked for and what was found so far.
struct Search<'a, A, U> {
    tiers: &'a Tiers,
    links: &'a Links,
    at: &'a A,
    /// Whether the launch names something of an extent.
    is_used: U,
    /// Where in the cycle the launch is, where what comes next is known.
    offset: Option<u32>,
    is_outdated: bool,
    /// The next launches, where they are expected to be those that followed this one before.
    ahead: Ahead,
    /// Launches within which nothing is used of what leaves.
    spared: u32,
    /// When the launch was made before, in a cycle that is not known otherwise.
    again: Option<u64>,
    /// Cycles that what comes in is counted on to be of use.
    soon: f64,
    /// Nanoseconds a byte of bringing something back.
    back: f64,
    /// Bytes that are free near, and those that can be paid for, with the way back.
    room: u64,
    affordable: u64,
    /// Bytes that were risked to find out how often they are read.
    explored: u64,
    victims: Queue,
    swap: Swap,
}

impl Tiers {
    /// The swap that is worth most before this launch.
    pub(crate) fn swap_before(&mut self, id: u32, at: &impl Whereabouts) -> Option<Swap> {
        let kind = self.kinds.get(id)?;
        let (gain, is_measured) = self.kinds.gain(id);
        if !is_measured && !self.kinds.may_guess(kind) {
            return None;
        }
        let links = &self.settings.links;
        let mut wanted: Vec<Want> = kind
            .uses
            .iter()
            .filter_map(|part| {
                let extent = self.extents.get(part.slot)?;
                let may = extent.far_free > 0 && extent.stays_until <= self.cycles;
                let tries = self.kinds.promises(id, part, &self.extents).filter(|_| self.is_elsewhere());
                let passes = (gain * part.part).max(tries.unwrap_or(0.0) * part.share);
                let here = f64::from(passes) / links.link(extent.place).kernel;
                may.then_some(Want { slot: part.slot, place: extent.place, here })
            })
            .collect();
        wanted.sort_by(|a, b| b.here.total_cmp(&a.here));
        let back = links.swap_ns_per_byte(wanted.first()?.place);
        let is_outdated = self.is_outdated();
        // What can be paid, with the way back.
        let fixed = 2.0 * links.drain_ns + 8.0 * links.remap_ns;
        let mut search = Search {
            tiers: self,
            links,
            at,
            is_used: |slot: u32| kind.uses.iter().any(|part| part.slot == slot),
            // Where other operands come each time, what was next the last time says nothing.
            offset: self
                .timeline
                .offset(self.cycle.repeats())
                .filter(|_| self.surprises < SURPRISES && !self.is_elsewhere()),
            is_outdated,
            ahead: Ahead::default(),
            spared: 0,
            // Nobody knows the new cycle yet, but this launch has come again in it: what was not used in between is of the one before.
            again: self.previous.filter(|previous| is_outdated && *previous >= self.cycle.lost()),
            soon: f64::from(self.prospect().clamp(1, SOON)),
            back,
            room: at.near_room(),
            affordable: ((self.account.free() - fixed) / (2.0 * back)).max(0.0) as u64 / FRAME * FRAME,
            explored: 0,
            victims: Queue::default(),
            swap: Swap::default(),
        };
        let far = wanted.iter().filter_map(|want| self.extents.get(want.slot)).map(|extent| extent.far_free).sum();
        // What is needed how much is not known before a cycle has ended.
        if self.learnt > 0 && search.room < far && wanted.iter().any(|want| search.may_pay(want)) {
            search.ahead = Ahead::of(self, id);
            search.find_victims();
        } else if search.room == 0 {
            return None;
        }
        for want in &wanted {
            search.bring(want);
        }
        let own = search.swap.clone();
        if !own.near.is_empty() {
            search.bring_along();
            search.make_room_ahead();
        }
        let swap = search.swap;
        // Memory is made for it beside what the device still has to do.
        self.finish(swap, 1.0, 0.0, &mut 0.0).or_else(|| self.finish(own, 1.0, 0.0, &mut 0.0))
    }

    /// Works out what any extent that could leave loses at least, unless nothing has changed since.
    pub(crate) fn find_least(&mut self) {
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
}

impl<A: Whereabouts, U: Fn(u32) -> bool> Search<'_, A, U> {
    /// What a byte gains in so many launches, and in each cycle, nanoseconds.
    fn gains(&self, want: &Want, launches: u32) -> (f64, f64) {
        let Self { tiers, offset, .. } = self;
        if tiers.is_elsewhere() {
            // What was learnt of cycles says nothing here, and what follows the next use of what leaves nobody knows.
            let extent = tiers.extents.get(want.slot);
            let more = extent.map_or(0.0, |extent| extent.uses_in(u64::from(launches), tiers.cycle.position));
            return (want.here * (1.0 + f64::from(more)), want.here);
        }
        let kernel = self.links.link(want.place).kernel;
        let worth = |offset| tiers.timeline.worth(want.slot, offset, launches, 64.0, &tiers.kinds);
        let density = tiers.extents.get(want.slot).map_or(0.0, |extent| f64::from(extent.density));
        (want.here + f64::from(offset.map_or(0.0, worth)) / kernel, (density / kernel).max(want.here))
    }

    /// Whether it could be worth it with the best victim that there can be: one that loses the least of all and is needed as late as any.
    fn may_pay(&self, want: &Want) -> bool {
        let Least { away, visits, .. } = self.tiers.least;
        let least = self.offset.map_or(visits.min(away), |_| away).min(self.back);
        let cost = self.links.swap_ns_per_byte(want.place);
        let (until, a_cycle) = self.gains(want, self.tiers.timeline.longest());
        let stays = a_cycle * self.soon;
        let until = if self.again.is_some() { until.max(stays) } else { until };
        until >= MARGIN * (cost + least) || !self.is_outdated && stays >= MARGIN * cost + DENSER * away * self.soon
    }

    /// The program is stopped now: what the next launches read often comes, too, in place of what none of them uses, so that none of them stops it again.
    fn bring_along(&mut self) {
        let place = self.swap.far.first().map_or(0, |(_, place)| *place);
        let stop = self.links.drain_ns + 2.0 * self.links.remap_ns;
        if stop < WORTH_SPARING as f64 * self.links.swap_ns_per_byte(place) {
            return;
        }
        self.affordable /= AT_STAKE;
        let uses = std::mem::take(&mut self.ahead.uses);
        self.spared = self.ahead.launches;
        for (slot, passes) in uses {
            if self.swap.bytes_in() >= TOGETHER {
                break;
            }
            let Some(extent) = self.tiers.extents.get(slot) else { continue };
            if extent.far_free == 0 || extent.stays_until > self.tiers.cycles || (self.is_used)(slot) {
                continue;
            }
            let place = extent.place;
            // On a known cycle this use is among those that are counted there.
            let here = if self.offset.is_some() { 0.0 } else { f64::from(passes) / self.links.link(place).kernel };
            let want = Want { slot, place, here };
            if self.may_pay(&want) {
                self.bring(&want);
            }
        }
    }

    /// And what a cycle reads seldom leaves for what comes next: that finds room then, and its stop is as short as it can be.
    fn make_room_ahead(&mut self) {
        let Some(place) = self.swap.far.first().map(|(_, place)| *place) else { return };
        if !self.tiers.is_elsewhere() || !self.tiers.knows_all() {
            return;
        }
        let is_cheap = |loss: Loss| SELDOM * loss.loss <= self.back && loss.until >= self.spared;
        for _ in 0..MOST_AHEAD {
            let Some(victim) = self.victims.first().filter(|_| self.room < ROOM_AHEAD) else { return };
            let slot = victim.slot;
            let near = victim.units.get_or_insert_with(|| units(&self.tiers.extents, slot, None, self.at));
            let (own, near) = (victim.loss, near.last().copied());
            if !is_cheap(own) {
                return;
            }
            let Some(near) = near.filter(|near| near.range.bytes() <= self.affordable) else {
                self.victims.skip();
                continue;
            };
            let loss = if near.is_whole { self.loss_with_chunk(near.range, slot, own) } else { Some(own) };
            if !loss.is_some_and(is_cheap) || self.risk(slot, place) < near.range.bytes() {
                self.victims.pop_unit();
                continue;
            }
            let Some(goes) = self.victims.take(near.range.bytes()) else { return };
            if self.swap.far.iter().all(|(other, _)| other.meet(&goes).bytes() == 0) {
                self.room += goes.bytes();
                self.affordable -= goes.bytes();
                self.swap.far.push((goes, place));
            }
        }
    }

    fn find_victims(&mut self) {
        let Tiers { extents, cycles, .. } = self.tiers;
        let mut victims: Vec<Victim> = extents
            .live()
            .filter(|(slot, extent)| extent.near_free > 0 && extent.stays_until <= *cycles && !(self.is_used)(*slot))
            .map(|(slot, extent)| Victim { slot, loss: self.loss_of(slot, extent), units: None })
            .collect();
        let last = |victim: &Victim| extents.get(victim.slot).map_or(0, |extent| extent.last);
        self.victims = match self.again {
            Some(previous) if self.ahead.launches == 0 => {
                if victims.iter().any(|victim| last(victim) < previous) {
                    victims.retain(|victim| last(victim) < previous);
                }
                Queue::new(victims, |victim| Key(last(victim), 0))
            }
            _ => Queue::new(victims, Key::of),
        };
    }

    fn loss_of(&self, slot: u32, extent: &Extent) -> Loss {
        let tiers = self.tiers;
        let kernel = self.links.link(extent.place).kernel;
        let away = f64::from(extent.density) / kernel;
        // What was used since the cycle began and in no cycle before is of something that the program does for the first time, or does again after long, as a language
        // model that has written reads again: where it was used a moment ago it will be in a moment.
        if self.offset.is_some() && tiers.timeline.is_idle(slot) && extent.last >= tiers.cycle.began() {
            let until = tiers.cycle.position.saturating_sub(extent.last) as u32;
            // What is known of older cycles makes it no cheaper.
            return Loss { loss: self.back, away: away.max(self.back), until };
        }
        // Where it is known what follows, that says when it is used.
        if tiers.is_elsewhere()
            && let Some(until) = self.ahead.first_use(slot)
        {
            return Loss { loss: self.back, away: away.max(self.back), until };
        }
        // What was learnt of cycles is of another part of the program: uses are expected as they came last.
        if tiers.is_elsewhere()
            && let Some(until) = extent.next_use(tiers.cycle.position)
        {
            let until = (until as u32).max(self.ahead.launches);
            // What a cycle reads seldom may stay away, whatever address the rest is given in each: the state of an optimizer and not the results of a layer.
            if away < self.back && tiers.knows_all() && !tiers.timeline.is_unsure(slot) {
                return Loss { loss: away, away, until };
            }
            return Loss { loss: self.back, away: away.max(self.back), until };
        }
        // Without a cycle: what was not used for long, and is used seldom.
        let idle = tiers.cycle.position.saturating_sub(extent.last) as f64 * 4096.0 / (away / self.back).max(1.0);
        let until = self.offset.map_or(idle as u32, |offset| tiers.timeline.next(slot, offset));
        // On a known cycle it comes back once, when it is needed; what is drawn each time comes back each time.
        let loss = match self.offset {
            Some(_) => away.min(self.back),
            None => away.min(f64::from(extent.visits) / kernel),
        };
        Loss { loss, away, until }
    }

    /// What leaves with an extent where its whole chunk does, all in all; none where something of it is in use.
    fn loss_with_chunk(&self, chunk: Range, slot: u32, own: Loss) -> Option<Loss> {
        let mut all = Loss { loss: 0.0, away: 0.0, until: own.until };
        let share = |extent: &Extent| extent.range.meet(&chunk).bytes() as f64 / chunk.bytes().max(1) as f64;
        for other in self.tiers.extents.over(chunk) {
            let Some(extent) = self.tiers.extents.get(other) else { continue };
            if other != slot && ((self.is_used)(other) || extent.stays_until > self.tiers.cycles) {
                return None;
            }
            let loss = if other == slot { own } else { self.loss_of(other, extent) };
            all.loss += share(extent) * loss.loss;
            all.away += share(extent) * loss.away;
            all.until = all.until.min(loss.until);
        }
        Some(all)
    }

    /// Nanoseconds a byte that are gained by its being near in place of this: until that is needed and comes back, or for some cycles,
    /// while the other stays away. None where neither is worth the copying.
    fn gain_over(&self, want: &Want, loss: Loss) -> Option<f64> {
        let cost = self.links.swap_ns_per_byte(want.place);
        let (until, a_cycle) = self.gains(want, loss.until);
        let stays = a_cycle * self.soon;
        if self.again.is_some() && stays >= MARGIN * (cost + loss.loss) {
            Some(stays - loss.loss)
        } else if until >= MARGIN * (cost + self.back) {
            Some(until - self.back)
        } else if !self.is_outdated && stays >= MARGIN * cost + DENSER * loss.away * self.soon {
            Some(stays - loss.away * self.soon)
        } else if until >= MARGIN * (cost + loss.loss) {
            Some(until - loss.loss)
        } else {
            None
        }
    }

    /// Brings as much of it as is worth it.
    fn bring(&mut self, want: &Want) {
        let mut far = units(&self.tiers.extents, want.slot, Some(want.place), self.at);
        far.retain(|unit| self.swap.near.iter().all(|range| range.meet(&unit.range).bytes() == 0));
        let (whole, a_cycle) = self.gains(want, self.tiers.timeline.length());
        let is_free = whole.max(a_cycle * self.soon);
        while let Some(unit) = far.last_mut().filter(|_| self.affordable > 0) {
            if unit.range.bytes() == 0 {
                far.pop();
                continue;
            }
            if let Some(comes) = unit.take(self.room.min(self.affordable)) {
                self.room -= comes.bytes();
                self.affordable -= comes.bytes();
                self.swap.gain_ns += comes.bytes() as f64 * is_free;
                self.swap.near.push(comes);
                continue;
            }
            let all = unit.range.bytes();
            let bytes = if unit.is_whole { all } else { all.min(self.affordable + self.room) };
            if bytes > self.affordable + self.room {
                return;
            }
            let Some(mut made) = self.make_room(want, bytes) else { return };
            let Some(comes) = unit.take(bytes) else { return };
            self.affordable = self.affordable.saturating_sub(bytes);
            self.swap.gain_ns += made.gain_ns / made.bytes.max(1) as f64 * made.bytes.min(bytes) as f64
                + is_free * self.room.min(bytes.saturating_sub(made.bytes)) as f64;
            // What left beyond it is room for the next.
            self.room = (self.room + made.bytes).saturating_sub(bytes);
            self.swap.far.append(&mut made.out);
            self.swap.near.push(comes);
        }
    }

    /// What leaves so that so many bytes of something can come; none where that is not worth it.
    fn make_room(&mut self, want: &Want, bytes: u64) -> Option<Made> {
        let mut made = Made::default();
        while self.room + made.bytes < bytes {
            let victim = self.victims.first()?;
            let slot = victim.slot;
            let near = victim.units.get_or_insert_with(|| units(&self.tiers.extents, slot, None, self.at));
            let (own, near) = (victim.loss, near.last().copied());
            let risk = self.risk(slot, want.place);
            let Some(near) = near.filter(|_| risk > 0) else {
                self.victims.skip();
                continue;
            };
            let loss = if near.is_whole { self.loss_with_chunk(near.range, slot, own) } else { Some(own) };
            let loss = loss.filter(|loss| loss.until >= self.spared);
            let Some((loss, gain)) = loss.map(|loss| (loss, self.gain_over(want, loss))) else {
                self.victims.pop_unit();
                continue;
            };
            let Some(gain) = gain else {
                // Something else of its chunk may be worth more than what was looked for.
                let is_more = loss.loss > own.loss || loss.away > own.away || loss.until < own.until;
                if near.is_whole && is_more {
                    self.victims.pop_unit();
                    continue;
                }
                return None;
            };
            let lacks = if near.is_whole { near.range.bytes() } else { bytes - self.room - made.bytes };
            let Some(goes) = self.victims.take(lacks.min(risk)) else {
                self.victims.skip();
                continue;
            };
            if risk < u64::MAX {
                self.explored += goes.bytes();
            }
            // A chunk may leave for somebody else already.
            if self.swap.far.iter().chain(&made.out).all(|(other, _)| other.meet(&goes).bytes() == 0) {
                made.bytes += goes.bytes();
                made.gain_ns += goes.bytes() as f64 * gain;
                made.out.push((goes, want.place));
            }
        }
        Some(made)
    }

    /// Bytes of it that may leave: the first to read it from afar may read it often, and how often is known after that.
    fn risk(&self, slot: u32, place: u8) -> u64 {
        if !self.tiers.timeline.is_unsure(slot) {
            return u64::MAX;
        }
        let bytes = self.tiers.account.free() / EXPLORE / f64::from(UNKNOWN) * self.links.link(place).kernel;
        (bytes as u64 / FRAME * FRAME).saturating_sub(self.explored)
    }
}
