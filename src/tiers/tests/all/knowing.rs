//! Policies that know what ours cannot: what comes next, or how likely everything is.
//!
//! They say what a missed goal means. [`Known`] is a schedule that a machine can carry out, so the optimum lies between
//! [`bound::lower`](crate::bound::lower) and the best of all schedules. [`ByOdds`] knows how often each piece of memory is used and
//! nothing of the draws. Where every piece is as likely as any other and each launch is drawn anew, nobody who does not know the
//! draws does better: whatever lies near, the next launch misses as often. Where the odds differ it is the rule that is optimal for
//! pages of one size that all have to be fetched (what is least likely goes), and no proof for ours.

use crate::bound::pieces;
use crate::machine::{Machine, Step, Trace};
use crate::policies::Policy;
use gpupool_tiers::{Range, Swap, Where, Whereabouts};
use std::collections::BTreeMap;

/// What a piece does in a trace.
struct Future {
    range: Range,
    /// Launches that use it, counted from the first op, and how often each reads it.
    uses: Vec<(usize, f64)>,
    next: usize,
}

impl Future {
    fn left(&self) -> &[(usize, f64)] {
        self.uses.get(self.next..).unwrap_or_default()
    }
}

/// Brings before a launch what gains more until its victim is needed again than the move costs; the victim is needed last.
pub struct Known {
    futures: BTreeMap<u64, Future>,
    launch: usize,
    /// By how much the gain has to exceed the cost.
    margin: f64,
}

impl Known {
    pub fn of(trace: &Trace, margin: f64) -> Self {
        let future =
            |piece: crate::bound::Piece| (piece.range.start, Future { range: piece.range, uses: piece.uses, next: 0 });
        Self { futures: pieces(trace, 0).into_iter().map(future).collect(), launch: 0, margin }
    }
}

fn places(machine: &Machine, range: Range, near: bool) -> Vec<Range> {
    let mut found = Vec::new();
    machine.pieces(range, &mut |piece, place| {
        if (place == Where::Near) == near {
            found.push(piece);
        }
    });
    found
}

/// Cuts so many bytes from the end of a list of ranges.
fn cut(ranges: &mut Vec<Range>, mut bytes: u64, taken: &mut Vec<Range>) -> u64 {
    let wanted = bytes;
    while bytes > 0
        && let Some(last) = ranges.last_mut()
    {
        let start = last.end - bytes.min(last.bytes());
        taken.push(Range { start, end: last.end });
        bytes -= last.end - start;
        last.end = start;
        if last.bytes() == 0 {
            ranges.pop();
        }
    }
    wanted - bytes
}

/// Brings `wanted` in for what `victims` offer, best pairs first, while `gain` says that a byte is worth it.
fn exchange(
    machine: &mut Machine,
    wanted: &[(u64, Range)],
    victims: &[(u64, Range)],
    is_worth: impl Fn(u64, Option<u64>) -> bool,
) {
    let mut swap = Swap::default();
    let mut room = machine.near_room();
    let mut victims =
        victims.iter().map(|(id, range)| (*id, places(machine, *range, true))).filter(|(_, ranges)| !ranges.is_empty());
    let mut victim = None;
    for (id, range) in wanted {
        let mut far = places(machine, *range, false);
        if is_worth(*id, None) {
            room -= cut(&mut far, room, &mut swap.near);
        }
        while !far.is_empty() {
            if victim.as_ref().is_none_or(|(_, ranges): &(u64, Vec<Range>)| ranges.is_empty()) {
                victim = victims.next();
            }
            let Some((other, ranges)) = &mut victim else { break };
            if !is_worth(*id, Some(*other)) {
                break;
            }
            let mut out = Vec::new();
            let bytes = far.iter().map(Range::bytes).sum();
            let left = cut(ranges, bytes, &mut out);
            cut(&mut far, left, &mut swap.near);
            swap.far.extend(out.into_iter().map(|range| (range, 0)));
        }
    }
    swap.near.sort_unstable();
    swap.near.dedup_by(|next, last| {
        let joined = last.end == next.start;
        if joined {
            last.end = next.end;
        }
        joined
    });
    if !swap.near.is_empty() {
        machine.swap(&swap);
    }
}

impl Policy for Known {
    fn launch(&mut self, machine: &mut Machine, step: &Step) -> f64 {
        let links = machine.links.clone();
        let names = |range: &Range| step.ranges.iter().any(|other| other.meet(range).bytes() > 0);
        let (mut wanted, mut victims) = (Vec::new(), Vec::new());
        for range in &step.ranges {
            wanted.extend(self.futures.range(range.start..range.end).map(|(start, future)| (*start, future.range)));
        }
        wanted.retain(|(_, range)| machine.far_bytes(*range) > 0);
        if !wanted.is_empty() {
            victims.extend(self.futures.values().filter(|future| !names(&future.range)));
            victims.sort_by_key(|future| std::cmp::Reverse(future.left().first().map_or(usize::MAX, |next| next.0)));
        }
        let victims: Vec<(u64, Range)> = victims.into_iter().map(|future| (future.range.start, future.range)).collect();
        let pass = 1.0 / links.link(0).kernel;
        let worth = |future: &Future, until: usize| -> f64 {
            let uses = future.left().iter().take_while(|(at, _)| *at < until);
            uses.map(|(_, reuse)| (reuse * pass - 1.0 / links.near).max(0.0)).sum()
        };
        let both = links.copy_ns(0, 1 << 30, 1 << 30) / (1u64 << 30) as f64;
        let is_worth = |id: u64, victim: Option<u64>| {
            let Some(future) = self.futures.get(&id) else { return false };
            let one = links.remap_ns / future.range.bytes() as f64;
            let Some(victim) = victim.and_then(|victim| self.futures.get(&victim)) else {
                return worth(future, usize::MAX) > one + 1.0 / links.link(0).copy_in;
            };
            let until = victim.left().first().map_or(usize::MAX, |next| next.0);
            let cost = both + 2.0 * one;
            // What leaves comes back when it is needed, if that is cheaper than reading it from afar ever after.
            let back = worth(victim, usize::MAX).min(cost);
            let stays = worth(future, usize::MAX) - worth(victim, usize::MAX);
            (worth(future, until) - back).max(stays) > self.margin * cost
        };
        exchange(machine, &wanted, &victims, is_worth);
        for range in &step.ranges {
            for (_, future) in self.futures.range_mut(range.start..range.end) {
                if future.left().first().is_some_and(|next| next.0 <= self.launch) {
                    future.next += 1;
                }
            }
        }
        self.launch += 1;
        let took = machine.time_of(step);
        machine.now += took;
        took
    }
}

/// Knows for each piece how many of the program's rounds use it.
pub struct ByOdds {
    odds: BTreeMap<u64, (Range, f64)>,
    /// When each was last used: among equals, the one that was used last is needed last.
    used: BTreeMap<u64, u64>,
    clock: u64,
    /// Rounds that the program still has.
    left: f64,
}

impl ByOdds {
    /// From other traces of the same kind, which lay their blocks out alike, with so many rounds each.
    pub fn of(others: &[Trace], rounds: usize) -> Self {
        let mut odds: BTreeMap<u64, (Range, f64)> = BTreeMap::new();
        for trace in others {
            for piece in pieces(trace, 0) {
                let (_, odds) = odds.entry(piece.range.start).or_insert((piece.range, 0.0));
                *odds += piece.uses.len() as f64 / (rounds * others.len()) as f64;
            }
        }
        Self { odds, used: BTreeMap::new(), clock: 0, left: rounds as f64 }
    }
}

impl Policy for ByOdds {
    fn launch(&mut self, machine: &mut Machine, step: &Step) -> f64 {
        let links = machine.links.clone();
        let names = |range: &Range| step.ranges.iter().any(|other| other.meet(range).bytes() > 0);
        let mut wanted: Vec<(u64, Range)> = step.ranges.iter().map(|range| (range.start, *range)).collect();
        wanted.retain(|(_, range)| machine.far_bytes(*range) > 0);
        let mut victims: Vec<(u64, Range)> = Vec::new();
        if !wanted.is_empty() {
            victims
                .extend(self.odds.values().filter(|(range, _)| !names(range)).map(|(range, _)| (range.start, *range)));
            let order = |id: &u64| (self.odds[id].1, std::cmp::Reverse(self.used.get(id).copied().unwrap_or(0)));
            victims.sort_by(|a, b| order(&a.0).0.total_cmp(&order(&b.0).0).then(order(&a.0).1.cmp(&order(&b.0).1)));
        }
        let here = step.reuse / links.link(0).kernel - 1.0 / links.near;
        let both = links.copy_ns(0, 1 << 30, 1 << 30) / (1u64 << 30) as f64;
        let (odds, left) = (&self.odds, self.left);
        let is_worth = |id: u64, victim: Option<u64>| {
            let (range, odds_of) = odds[&id];
            let cost = both + 2.0 * links.remap_ns / range.bytes() as f64;
            // A later use costs what reading it from afar or bringing it costs, whichever is less.
            let later = here.min(cost);
            let gain = here + left * later * (odds_of - victim.map_or(0.0, |victim| odds[&victim].1));
            gain > cost
        };
        exchange(machine, &wanted, &victims, is_worth);
        for range in &step.ranges {
            self.clock += 1;
            self.used.insert(range.start, self.clock);
        }
        let took = machine.time_of(step);
        machine.now += took;
        took
    }

    fn idle(&mut self, _machine: &mut Machine) {
        self.left -= 1.0;
    }
}
