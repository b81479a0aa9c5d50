//! What no policy can go below.
//!
//! [`exact`] tries every set of near items at every launch, for traces of a few items. [`lower`] is a relaxation for all others: the
//! room near has a price at each launch, each piece of memory decides for itself where it is when (a path through near and far at
//! each of its uses, with what moving costs), and what the room yields is taken off. For any prices that is no more than the
//! cheapest schedule costs (Lagrange); the prices are made better step by step. It grants more than a machine can do: memory may lie
//! anywhere at the beginning, a byte moves at half the price of a byte each way at once, draining costs nothing, and mapping costs what
//! it would if the whole block moved as one range.

use crate::machine::{Machine, Op, Trace};
use gpupool_tiers::{Range, Where};
use std::collections::{BTreeMap, BTreeSet};

/// Memory that is always used as a whole.
#[derive(Clone, Debug)]
pub struct Piece {
    pub range: Range,
    /// The how manyth block it is of.
    pub block: usize,
    /// Bytes of that block.
    pub of: u64,
    /// Ops between its block's begin and end.
    pub life: std::ops::Range<usize>,
    /// The launch (counted from the first op that matters) and how often it is read there.
    pub uses: Vec<(usize, f64)>,
}

/// The pieces of a trace, with their uses from an op on.
pub fn pieces(trace: &Trace, from: usize) -> Vec<Piece> {
    let mut lives: Vec<(Range, std::ops::Range<usize>)> = Vec::new();
    let mut open: BTreeMap<u64, usize> = BTreeMap::new();
    let mut borders: BTreeMap<usize, BTreeSet<u64>> = BTreeMap::new();
    let block_of =
        |open: &BTreeMap<u64, usize>, address: u64| open.range(..=address).next_back().map(|(_, block)| *block);
    for (at, op) in trace.ops.iter().enumerate() {
        match op {
            Op::Begin(range) => {
                open.insert(range.start, lives.len());
                borders.entry(lives.len()).or_default().extend([range.start, range.end]);
                lives.push((*range, at..trace.ops.len()));
            }
            Op::End(range) => {
                if let Some(block) = open.remove(&range.start) {
                    lives[block].1.end = at;
                }
            }
            Op::Launch(step) => {
                for range in &step.ranges {
                    if let Some(block) = block_of(&open, range.start) {
                        borders.entry(block).or_default().extend([range.start, range.end]);
                    }
                }
            }
            Op::Copy(_) | Op::Idle => {}
        }
    }
    let mut pieces: Vec<Piece> = Vec::new();
    let mut index: BTreeMap<(usize, u64), usize> = BTreeMap::new();
    for (block, borders) in &borders {
        let borders: Vec<u64> = borders.iter().copied().collect();
        for pair in borders.windows(2) {
            index.insert((*block, pair[0]), pieces.len());
            let range = Range { start: pair[0], end: pair[1] };
            pieces.push(Piece {
                range,
                block: *block,
                of: lives[*block].0.bytes(),
                life: lives[*block].1.clone(),
                uses: Vec::new(),
            });
        }
    }
    let (mut open, mut next, mut launch) = (BTreeMap::new(), 0, 0);
    for (at, op) in trace.ops.iter().enumerate() {
        match op {
            Op::Begin(range) => {
                open.insert(range.start, next);
                next += 1;
            }
            Op::End(range) => {
                open.remove(&range.start);
            }
            Op::Launch(step) if at >= from => {
                for range in &step.ranges {
                    let Some(block) = block_of(&open, range.start) else { continue };
                    for (_, &piece) in index.range((block, range.start)..(block, range.end)) {
                        match pieces[piece].uses.last_mut() {
                            Some(last) if last.0 == launch => last.1 += step.reuse,
                            _ => pieces[piece].uses.push((launch, step.reuse)),
                        }
                    }
                }
                launch += 1;
            }
            _ => {}
        }
    }
    pieces
}

/// How memory is near at a use.
#[derive(Clone, Copy, PartialEq)]
enum Near {
    /// It was near all the time since the use before.
    Stayed,
    /// It was near at the use before, and far in between.
    WasAway,
    WasFar,
}

/// The relaxation, from the settled op on.
pub fn lower(trace: &Trace, upper: f64) -> f64 {
    let pieces: Vec<Piece> = pieces(trace, trace.settled).into_iter().filter(|piece| !piece.uses.is_empty()).collect();
    let steps: Vec<f64> = trace
        .ops
        .iter()
        .skip(trace.settled)
        .filter_map(|op| if let Op::Launch(step) = op { Some(step.compute_ns) } else { None })
        .collect();
    let compute: f64 = steps.iter().sum();
    let link = trace.links.link(0);
    let both = trace.links.copy_ns(0, 1 << 30, 1 << 30) / (1u64 << 30) as f64;
    // Half of a byte each way, and never more than a copy one way.
    let (come, go) = ((both / 2.0).min(1.0 / link.copy_in), (both / 2.0).min(1.0 / link.copy_out));
    let mut price = vec![0.0f64; steps.len()];
    let mut best = 0.0f64;
    let mut step_size = 1.0;
    let mut since = 0;
    let mut direction = vec![0.0f64; steps.len()];
    for _ in 0..400 {
        let mut sums = vec![0.0; price.len() + 1];
        for (at, price) in price.iter().enumerate() {
            sums[at + 1] = sums[at] + price;
        }
        let mut cost = compute - price.iter().sum::<f64>() * trace.near as f64;
        let mut change = vec![0.0f64; price.len() + 1];
        for piece in &pieces {
            let bytes = piece.range.bytes() as f64;
            // A range that is mapped anew has no more bytes than the block.
            let map = trace.links.remap_ns / piece.of as f64 + trace.links.remap_ns_per_byte;
            let (come, go) = (come + map, go + map);
            // Costs a byte of being far and near behind each use, and whether each was near before.
            let (mut far, mut near) = (0.0f64, 0.0f64);
            let mut from: Vec<(bool, Near)> = Vec::with_capacity(piece.uses.len());
            for (number, &(at, reuse)) in piece.uses.iter().enumerate() {
                let last = if number == 0 { at } else { piece.uses[number - 1].0 + 1 };
                let hold = sums[at] - sums[last];
                // At the first use it may be anywhere.
                let first = number == 0;
                let (leaves, away) = (near + if first { 0.0 } else { go }, far);
                let (stays, comes) = (near + hold, leaves.min(away) + if first { 0.0 } else { come });
                let was = match (stays <= comes, leaves < away) {
                    (true, _) => Near::Stayed,
                    (false, true) => Near::WasAway,
                    (false, false) => Near::WasFar,
                };
                let before = (leaves < away, was);
                let next_near = stays.min(comes) + price[at] + reuse.min(1.0) / trace.links.near;
                let next_far = leaves.min(away) + reuse / link.kernel;
                (far, near) = (next_far, next_near);
                from.push(before);
            }
            cost += bytes * far.min(near);
            let mut is_near = near < far;
            for number in (0..piece.uses.len()).rev() {
                let at = piece.uses[number].0;
                let was_near = if is_near { from[number].1 != Near::WasFar } else { from[number].0 };
                if is_near {
                    change[at] += bytes;
                    change[at + 1] -= bytes;
                    if from[number].1 == Near::Stayed && number > 0 {
                        change[piece.uses[number - 1].0 + 1] += bytes;
                        change[at] -= bytes;
                    }
                }
                is_near = was_near;
            }
        }
        if cost > best * (1.0 + 1e-5) {
            best = cost;
            since = 0;
        } else {
            since += 1;
            if since > 12 {
                step_size *= 0.7;
                since = 0;
            }
        }
        let (mut level, mut norm) = (0.0, 0.0);
        for (at, direction) in direction.iter_mut().enumerate() {
            level += change[at];
            *direction = (level - trace.near as f64) + 0.6 * *direction;
            if price[at] > 0.0 || *direction > 0.0 {
                norm += *direction * *direction;
            }
        }
        if norm == 0.0 {
            break;
        }
        let length = step_size * (upper - cost).max(upper * 1e-4) / norm;
        for (price, direction) in price.iter_mut().zip(&direction) {
            *price = (*price + length * direction).max(0.0);
        }
    }
    best
}

/// The cheapest schedule of moves before launches, by trying everything: `items` whole blocks, at most 8, as they lie at first.
pub fn exact(trace: &Trace) -> f64 {
    let blocks: Vec<Range> =
        trace.ops.iter().filter_map(|op| if let Op::Begin(range) = op { Some(*range) } else { None }).collect();
    assert!(blocks.len() <= 8);
    let mut machine = Machine::new(trace.near, trace.links.clone());
    blocks.iter().for_each(|block| machine.begin(*block));
    let first: usize =
        (0..blocks.len()).filter(|block| machine.far_bytes(blocks[*block]) == 0).map(|block| 1usize << block).sum();
    let bytes = |set: usize| -> u64 {
        blocks.iter().enumerate().filter(|(block, _)| set >> block & 1 == 1).map(|(_, block)| block.bytes()).sum()
    };
    let sets: Vec<usize> = (0..1 << blocks.len()).filter(|set| bytes(*set) <= trace.near).collect();
    let cost_of = |from: usize, to: usize| {
        let (come, go) = (to & !from, from & !to);
        if come == 0 && go == 0 {
            return 0.0;
        }
        let ranges = (come.count_ones() + go.count_ones()) as usize;
        trace.links.drain_ns
            + trace.links.copy_ns(0, bytes(come), bytes(go))
            + trace.links.map_ns(ranges, bytes(come | go))
    };
    let between: Vec<Vec<f64>> = sets.iter().map(|to| sets.iter().map(|from| cost_of(*from, *to)).collect()).collect();
    let mut costs: Vec<f64> = sets.iter().map(|set| if *set == first { 0.0 } else { f64::INFINITY }).collect();
    for op in &trace.ops {
        let Op::Launch(step) = op else { continue };
        let reached = |to: usize| {
            costs.iter().zip(&between[to]).map(|(cost, change)| cost + change).fold(f64::INFINITY, f64::min)
        };
        let taken = |set: usize| {
            let mut machine = machine.clone();
            for (block, range) in blocks.iter().enumerate() {
                machine.put(*range, if set >> block & 1 == 1 { Where::Near } else { Where::Far(0) });
            }
            machine.time_of(step)
        };
        costs = sets.iter().enumerate().map(|(index, set)| reached(index) + taken(*set)).collect();
    }
    costs.into_iter().fold(f64::INFINITY, f64::min)
}
