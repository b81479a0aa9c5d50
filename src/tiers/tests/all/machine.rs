//! A machine in numbers: where memory lies, what a launch takes, what a move costs.

use gpupool_tiers::{FRAME, Links, Range, Swap, Where, Whereabouts};
use std::collections::BTreeMap;

/// One launch of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub function: u64,
    /// What it reads or writes.
    pub ranges: Vec<Range>,
    /// The words of its parameters, if they are not the starts of the ranges: one launch may work on the third part of a tensor, and
    /// be given its begin.
    pub named: Vec<u64>,
    /// Nanoseconds with everything near, besides reading it.
    pub compute_ns: f64,
    /// How often each far byte crosses the link.
    pub reuse: f64,
    /// The same of each range, if they differ.
    pub reuses: Vec<f64>,
}

impl Step {
    /// Sizes are what tells launches of one function apart.
    pub fn shape(&self) -> u64 {
        self.ranges.iter().fold(0, |shape, range| shape.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ range.bytes())
    }

    pub fn words(&self) -> Vec<u64> {
        if self.named.is_empty() { self.ranges.iter().map(|range| range.start).collect() } else { self.named.clone() }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    Begin(Range),
    End(Range),
    Launch(Step),
    /// A copy or a fill, which takes no time worth counting.
    Copy(Range),
    /// The program has waited for the device.
    Idle,
}

#[derive(Clone, Debug)]
pub struct Trace {
    pub name: String,
    pub near: u64,
    pub links: Links,
    pub ops: Vec<Op>,
    /// The op from which on it counts as settled.
    pub settled: usize,
}

#[derive(Clone, Debug)]
pub struct Machine {
    pub links: Links,
    pub near: u64,
    pub used: u64,
    /// The pieces of living blocks.
    pieces: BTreeMap<u64, (u64, Where)>,
    pub now: f64,
    pub moved_in: u64,
    pub moved_out: u64,
    /// What must stay where it is.
    pub fixed: Vec<Range>,
    /// The chunks, if memory moves by these: start and end of each.
    pub chunks: Option<BTreeMap<u64, u64>>,
    /// What a swap takes besides what it is reckoned with.
    pub extra: Extra,
    /// Swaps that were made, each of which stops the program.
    pub stops: u64,
    /// Memory has to be made at the far place for what leaves, where what came has left none.
    pub making: Option<Making>,
}

/// What a swap takes besides what it is reckoned with, nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Extra {
    pub once: f64,
    pub each_range: f64,
    /// For each byte, in or out.
    pub each_byte: f64,
    /// Where not as much comes as leaves: one goes before the other then.
    pub two_steps: f64,
}

#[derive(Clone, Copy, Debug)]
pub struct Making {
    /// Nanoseconds a byte.
    pub ns: f64,
    /// Bytes that were made for earlier moves.
    pub spare: u64,
    /// Until when some is being made beside the program.
    pub until: f64,
    /// Nanoseconds that it took in the last swap.
    pub took: f64,
}

impl Making {
    /// None was made yet, and a GiB takes so many nanoseconds.
    pub fn new(gib_ns: f64) -> Self {
        Self { ns: gib_ns / (1u64 << 30) as f64, spare: 0, until: 0.0, took: 0.0 }
    }
}

/// Bytes that are kept for the next moves, at most.
const STOCK: u64 = 2 << 30;

/// How many times as fast as from its memory a GPU reads from its caches: what a kernel reads again and again takes it no less than that.
const CACHED: f64 = 2.0;
/// Bytes of the largest chunk.
const CHUNK: u64 = 512 << 20;

impl Machine {
    pub fn new(near: u64, links: Links) -> Self {
        Self {
            links,
            near,
            used: 0,
            pieces: BTreeMap::new(),
            now: 0.0,
            moved_in: 0,
            moved_out: 0,
            fixed: Vec::new(),
            chunks: None,
            extra: Extra::default(),
            stops: 0,
            making: None,
        }
    }

    /// A block, as much of it near as fits.
    pub fn begin(&mut self, block: Range) {
        let near = block.bytes().min(self.near.saturating_sub(self.used)) / FRAME * FRAME;
        let near =
            if block.bytes() - near < FRAME && self.near - self.used >= block.bytes() { block.bytes() } else { near };
        let border = block.start + near;
        if near > 0 {
            self.pieces.insert(block.start, (border, Where::Near));
        }
        if border < block.end {
            self.pieces.insert(border, (block.end, Where::Far(0)));
        }
        self.used += near;
        if let Some(chunks) = &mut self.chunks {
            let stale: Vec<u64> = chunks.range(block.start..block.end).map(|(start, _)| *start).collect();
            chunks.retain(|start, _| !stale.contains(start));
            for (mut start, end) in [(block.start, border), (border, block.end)] {
                while start < end {
                    let next = (start + CHUNK).min(end);
                    chunks.insert(start, next);
                    start = next;
                }
            }
        }
    }

    /// What moves where the mover moves chunks: what leaves, in the parts that are used by themselves, and what comes.
    pub fn by_chunks(&self, swap: &Swap, parts: impl Fn(Range) -> Vec<Range>) -> Swap {
        let Some(chunks) = &self.chunks else { return swap.clone() };
        let touched = |range: &Range| -> Vec<(Range, Range)> {
            let before = chunks.range(..range.start).next_back();
            let all = before.into_iter().chain(chunks.range(range.start..range.end));
            let all = all.map(|(&start, &end)| Range { start, end });
            all.map(|chunk| (chunk.meet(range), chunk)).filter(|(touched, _)| touched.bytes() > 0).collect()
        };
        let mut real = Swap { near: Vec::new(), far: Vec::new(), ..swap.clone() };
        let mut gone = Vec::new();
        for (range, place) in &swap.far {
            for (_, chunk) in touched(range) {
                if !gone.contains(&chunk) {
                    gone.push(chunk);
                    for part in parts(chunk) {
                        self.pieces(part.meet(&chunk), &mut |piece, at| {
                            if at == Where::Near {
                                real.far.push((piece, *place));
                            }
                        });
                    }
                }
            }
        }
        let mut room = self.near_room() + real.bytes_out();
        let mut found: Vec<(Range, Range)> = Vec::new();
        for (part, chunk) in swap.near.iter().flat_map(touched) {
            match found.last_mut() {
                Some((known, same)) if *same == chunk => known.end = known.end.max(part.end),
                _ => found.push((part, chunk)),
            }
        }
        for (part, chunk) in found {
            let mut comes =
                if part.bytes() >= chunk.bytes() / 2 && self.far_bytes(chunk) == chunk.bytes() { chunk } else { part };
            if comes.bytes() > room {
                // A large one is not divided.
                comes.end = comes.start + if comes.bytes() < 64 << 20 { room / FRAME * FRAME } else { 0 };
            }
            room -= comes.bytes();
            self.pieces(comes, &mut |piece, at| {
                if at != Where::Near {
                    real.near.push(piece);
                }
            });
        }
        real
    }

    /// What moved has chunks of its own.
    fn divide(&mut self, range: Range) {
        let Some(chunks) = &mut self.chunks else { return };
        let touched: Vec<(u64, u64)> = {
            let before = chunks.range(..range.start).next_back();
            before.into_iter().chain(chunks.range(range.start..range.end)).map(|(start, end)| (*start, *end)).collect()
        };
        for (start, end) in touched.into_iter().filter(|(_, end)| *end > range.start) {
            chunks.remove(&start);
            for (start, end) in [(start, range.start), (range.end, end)] {
                if start < end {
                    chunks.insert(start, end);
                }
            }
        }
        chunks.insert(range.start, range.end);
    }

    pub fn end(&mut self, block: Range) {
        let gone: Vec<_> = self.pieces.range(block.start..block.end).map(|(start, piece)| (*start, *piece)).collect();
        for (start, (end, place)) in gone {
            self.pieces.remove(&start);
            if place == Where::Near {
                self.used -= end - start;
            }
        }
    }

    /// Cuts a piece in two if an address lies in it.
    fn cut(&mut self, address: u64) {
        if let Some((&start, &(end, place))) = self.pieces.range(..address).next_back()
            && address < end
        {
            self.pieces.insert(start, (address, place));
            self.pieces.insert(address, (end, place));
        }
    }

    pub fn put(&mut self, range: Range, place: Where) {
        self.cut(range.start);
        self.cut(range.end);
        for (start, (end, at)) in self.pieces.range_mut(range.start..range.end) {
            match (*at, place) {
                (Where::Near, Where::Far(_)) => self.used -= *end - *start,
                (Where::Far(_), Where::Near) => self.used += *end - *start,
                _ => {}
            }
            *at = place;
        }
        // Neighbours at one place are one piece again.
        let around: Vec<u64> =
            self.pieces.range(range.start.saturating_sub(1)..=range.end).map(|(start, _)| *start).collect();
        for start in around {
            if let Some((&before, &(end, at))) = self.pieces.range(..start).next_back()
                && end == start
                && let Some(&(behind, other)) = self.pieces.get(&start)
                && other == at
                && (range.start..=range.end).contains(&start)
                && start != range.start
                && start != range.end
            {
                self.pieces.remove(&start);
                self.pieces.insert(before, (behind, at));
            }
        }
    }

    pub fn far_bytes(&self, range: Range) -> u64 {
        let mut far = 0;
        self.pieces(range, &mut |piece, place| {
            if place != Where::Near {
                far += piece.bytes();
            }
        });
        far
    }

    /// What a launch takes as memory lies now.
    pub fn time_of(&self, step: &Step) -> f64 {
        let (mut own, mut cached, mut far) = (step.compute_ns, 0.0, 0.0);
        for (index, range) in step.ranges.iter().enumerate() {
            let reuse = step.reuses.get(index).copied().unwrap_or(step.reuse);
            cached += reuse * range.bytes() as f64 / (CACHED * self.links.near);
            self.pieces(*range, &mut |piece, place| match place {
                Where::Near => own += piece.bytes() as f64 / self.links.near,
                Where::Far(_) => far += self.links.pass_ns(place, piece.bytes()) * reuse,
            });
        }
        own.max(cached) + far
    }

    /// Carries a swap out; what it took.
    pub fn swap(&mut self, swap: &Swap) -> f64 {
        let (mut bytes_in, mut bytes_out, mut place) = (0, 0, 0);
        for (range, to) in &swap.far {
            assert_eq!(self.far_bytes(*range), 0, "{range:?} leaves and is not near");
            bytes_out += range.bytes();
            place = *to;
            self.put(*range, Where::Far(*to));
            self.divide(*range);
        }
        for range in &swap.near {
            assert_eq!(self.far_bytes(*range), range.bytes(), "{range:?} comes and is not far");
            bytes_in += range.bytes();
            self.put(*range, Where::Near);
            self.divide(*range);
        }
        assert!(self.used <= self.near, "more lies near than there is: {} of {}", self.used, self.near);
        let ranges = swap.near.len() + swap.far.len();
        let made = self.making.as_mut().map_or(0.0, |making| {
            let lacks = bytes_out.saturating_sub(making.spare);
            making.spare = (making.spare + lacks - bytes_out + bytes_in).min(STOCK);
            making.took = lacks as f64 * making.ns;
            making.took
        });
        let took = made
            + self.links.drain_ns
            + self.links.copy_ns(place, bytes_in, bytes_out)
            + self.links.map_ns(ranges, bytes_in + bytes_out)
            + self.links.far_map_ns(place, bytes_out)
            + self.extra.once
            + ranges as f64 * self.extra.each_range
            + (bytes_in + bytes_out) as f64 * self.extra.each_byte
            + if bytes_in == bytes_out || bytes_in * bytes_out == 0 { 0.0 } else { self.extra.two_steps };
        self.stops += 1;
        self.now += took;
        self.moved_in += bytes_in;
        self.moved_out += bytes_out;
        took
    }
}

impl Whereabouts for Machine {
    fn pieces(&self, range: Range, tell: &mut dyn FnMut(Range, Where)) {
        let before = self.pieces.range(..range.start).next_back();
        for (&start, &(end, place)) in before.into_iter().chain(self.pieces.range(range.start..range.end)) {
            let piece = Range { start, end }.meet(&range);
            if piece.bytes() > 0 {
                tell(piece, place);
            }
        }
    }

    fn fixed(&self, range: Range, tell: &mut dyn FnMut(Range)) {
        self.fixed.iter().map(|part| part.meet(&range)).filter(|part| part.bytes() > 0).for_each(tell);
    }

    fn unit(&self, address: u64) -> Option<Range> {
        let (&start, &end) = self.chunks.as_ref()?.range(..=address).next_back()?;
        Some(Range { start, end }).filter(|chunk| address < chunk.end)
    }

    fn near_room(&self) -> u64 {
        self.near - self.used
    }

    fn far_room(&self, _place: u8) -> u64 {
        self.making.filter(|making| making.until == 0.0).map_or(u64::MAX, |making| making.spare)
    }
}
