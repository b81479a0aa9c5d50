//! What to move where the device has nothing to do anyway.

use crate::cycle::SURPRISES;
use crate::extents::{Extent, FRAME};
use crate::interface::{Range, Swap, Whereabouts};
use crate::kinds::UNKNOWN;
use crate::links::Links;
use crate::plan::{DENSER, EXPLORE, MARGIN};
use crate::tiers::Tiers;
use crate::units::{Unit, units};

/// Cycles within which a swap at an idle point has to pay, at most; never more than were seen so far: what has gone on for long
/// will go on for about as long.
const PAYBACK: u32 = 32;
/// Pieces smaller than this go along with their neighbours, as far as mapping is concerned.
const WHOLE: u64 = 32 << 20;
/// Bytes of one swap at an idle point, about.
const BATCH: u64 = 1 << 30;

/// What the memory takes that has to be made for what leaves; `made` has, by place, what swaps before this one need there.
fn made_ns(links: &Links, swap: &Swap, made: &mut Vec<u64>, at: &impl Whereabouts) -> f64 {
    let mut all = 0.0;
    for (range, place) in &swap.far {
        let index = usize::from(*place);
        made.resize(made.len().max(index + 1), 0);
        let before = made[index];
        made[index] += range.bytes();
        let room = at.far_room(*place);
        all += (made[index].saturating_sub(room) - before.saturating_sub(room)) as f64 / links.link(*place).make;
    }
    all
}

impl Tiers {
    /// What should move while the device is idle anyway, best first, in `budget_ns` in all. What is used most, a byte, comes in for
    /// what is used least.
    pub fn when_idle(&mut self, budget_ns: u64, now_ns: u64, at: &impl Whereabouts) -> Vec<Swap> {
        self.launch_is_over(at);
        self.account.time_is(now_ns);
        self.refresh_all(at);
        self.catch_up();
        // Where launches cannot wait, as for a collective of which another rank is late, this is the only moment at which it can come.
        if self.owes()
            && let Some(back) = self.swap_back(None, self.account.is_wrong(), at)
        {
            return vec![back];
        }
        if self.seen == 0 || self.is_outdated() || !self.account.can_move(&self.settings.links) {
            return Vec::new();
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
            let mut far_units = units(&self.extents, slot, Some(place), at);
            while let Some(unit) = far_units.last_mut() {
                if !is_fresh(&came, unit.range) {
                    far_units.pop();
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
                        let unsure = self.timeline.is_unsure(slot);
                        for mut unit in units(&self.extents, slot, None, at) {
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
                    // Several extents may share a chunk, and each names it.
                    let goes_already = out.iter().any(|(other, _): &(Range, u8)| other.meet(&next.range).bytes() > 0);
                    let is_taken = goes_already || !is_fresh(&goes, next.range) || !is_fresh(&came, next.range);
                    if next.range.bytes() == 0 || is_taken {
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
                    far_units.pop();
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
        let (mut promised, mut made) = (0.0, Vec::new());
        let answer = planned.into_iter().filter_map(|swap| {
            let made_ns = made_ns(&links, &swap, &mut made, at);
            self.finish(swap, payback, made_ns, &mut promised)
        });
        answer.collect()
    }
}
