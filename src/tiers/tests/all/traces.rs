//! What programs do, as far as memory is concerned.

use crate::machine::{Machine, Op, Step, Trace};
use crate::policies::{Ours, apply};
use gpupool_tiers::{FarLink, Links, Range};
use std::collections::BTreeMap;

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;
const BASE: u64 = 0x7000_0000_0000;

pub fn peer() -> Links {
    Links::measured(vec![FarLink::PEER])
}

pub fn host() -> Links {
    Links::measured(vec![FarLink::HOST])
}

/// Numbers that look random (splitmix64), the same ones every time.
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

pub struct Writer {
    pub ops: Vec<Op>,
    next: u64,
}

impl Writer {
    pub fn new() -> Self {
        Self { ops: Vec::new(), next: BASE }
    }

    pub fn block(&mut self, bytes: u64) -> Range {
        let block = Range::of(self.next, bytes);
        self.next += bytes.next_multiple_of(2 * MIB) + 16 * MIB;
        self.ops.push(Op::Begin(block));
        block
    }

    pub fn launch(&mut self, function: u64, ranges: &[Range], compute_ns: f64, reuse: f64) {
        self.ops.push(Op::Launch(Step {
            function,
            ranges: ranges.to_vec(),
            named: Vec::new(),
            compute_ns,
            reuse,
            reuses: Vec::new(),
        }));
    }

    pub fn idle(&mut self) {
        self.ops.push(Op::Idle);
    }

    pub fn trace(self, name: &str, near: u64, links: Links, settled: usize) -> Trace {
        Trace { name: name.to_owned(), near, links, ops: self.ops, settled }
    }
}

fn parts(block: Range, bytes: u64) -> Vec<Range> {
    (block.start..block.end)
        .step_by(bytes as usize)
        .map(|start| Range::of(start, bytes.min(block.end - start)))
        .collect()
}

/// Each byte once a cycle.
pub fn cyclic(ratio: f64, links: Links, name: &str) -> Trace {
    let mut writer = Writer::new();
    let near = 4 * GIB;
    let count = (near as f64 * ratio) as u64 / (64 * MIB);
    let block = writer.block(count * 64 * MIB);
    let mut settled = 0;
    for cycle in 0..40 {
        if cycle == 20 {
            settled = writer.ops.len();
        }
        for part in parts(block, 64 * MIB) {
            writer.launch(1, &[part], 0.0, 1.0);
        }
        writer.idle();
    }
    writer.trace(name, near, links, settled)
}

/// Matrices in rotation through a GEMM that reads its operands thirty times.
pub fn rotation(links: Links, name: &str) -> Trace {
    let mut writer = Writer::new();
    let matrices: Vec<Range> = (0..32).map(|_| writer.block(512 * MIB)).collect();
    let mut settled = 0;
    for cycle in 0..12 {
        if cycle == 6 {
            settled = writer.ops.len();
        }
        for index in 0..32 {
            let operands = [matrices[index], matrices[(index + 1) % 32]];
            writer.launch(7, &operands, 11_500_000.0, 30.0);
        }
        writer.idle();
    }
    writer.trace(name, 20 * 512 * MIB, links, settled)
}

/// Weights of a model, each once a step.
pub fn decoding() -> Trace {
    let mut writer = Writer::new();
    let block = writer.block(24 * GIB);
    let mut settled = 0;
    for step in 0..40 {
        if step == 20 {
            settled = writer.ops.len();
        }
        for (layer, weights) in parts(block, 123 * MIB).iter().enumerate() {
            writer.launch(1 + (layer % 7) as u64, &[*weights], 2000.0, 1.0);
        }
        writer.idle();
    }
    writer.trace("decoding, 24 GiB with 16", 16 * GIB, peer(), settled)
}

/// A framework's allocator: segments that it keeps, cut and joined as PyTorch does.
#[derive(Default)]
struct Caching {
    /// Free memory: start, bytes and segment.
    free: BTreeMap<u64, (u64, u64)>,
    used: BTreeMap<u64, (u64, u64)>,
    held: u64,
}

impl Caching {
    fn take(&mut self, writer: &mut Writer, bytes: u64) -> Range {
        let bytes = bytes.next_multiple_of(512);
        let is_small = bytes < MIB;
        let fit = self
            .free
            .iter()
            .filter(|(_, (size, segment))| *size >= bytes && (segment & 1 == 1) == is_small)
            .min_by_key(|(_, (size, _))| *size)
            .map(|(start, (size, segment))| (*start, *size, *segment));
        let (start, size, segment) = fit.unwrap_or_else(|| {
            let size = match bytes {
                _ if is_small => 2 * MIB,
                _ if bytes < 10 * MIB => 20 * MIB,
                _ => bytes.next_multiple_of(2 * MIB),
            };
            let block = writer.block(size);
            self.held += size;
            // The lowest bit says whether it is for small tensors.
            (block.start, size, block.start | u64::from(is_small))
        });
        self.free.remove(&start);
        let rest = size - bytes;
        let keeps = if is_small { rest >= 512 } else { rest > MIB };
        let taken = if keeps { bytes } else { size };
        if keeps {
            self.free.insert(start + bytes, (rest, segment));
        }
        self.used.insert(start, (taken, segment));
        Range::of(start, bytes)
    }

    fn give(&mut self, range: Range) {
        let Some((mut bytes, segment)) = self.used.remove(&range.start) else { return };
        let mut start = range.start;
        if let Some((&before, &(size, other))) = self.free.range(..start).next_back()
            && other == segment
            && before + size == start
        {
            self.free.remove(&before);
            start = before;
            bytes += size;
        }
        if let Some(&(size, other)) = self.free.get(&(start + bytes))
            && other == segment
        {
            self.free.remove(&(start + bytes));
            bytes += size;
        }
        self.free.insert(start, (bytes, segment));
    }
}

/// A transformer in bf16 autocast with AdamW in fp32, 16 layers of width 3072 and 8192 tokens a step: about 46 GiB. The optimizer's
/// state is made at the end of the first step, out of what the framework's allocator kept of the activations.
pub fn training(ratio: f64, links: Links, name: &str) -> Trace {
    const LAYERS: usize = 16;
    const TOKENS: u64 = 8192;
    const WIDTH: u64 = 3072;
    let mut writer = Writer::new();
    let mut cache = Caching::default();
    let sizes = [3 * WIDTH * WIDTH, WIDTH * WIDTH, 4 * WIDTH * WIDTH, 4 * WIDTH * WIDTH];
    let weights: Vec<Vec<Range>> =
        (0..LAYERS).map(|_| sizes.iter().map(|count| cache.take(&mut writer, 4 * count)).collect()).collect();
    let norms: Vec<Range> = (0..LAYERS).map(|_| cache.take(&mut writer, 4 * WIDTH * 4)).collect();
    let unit = TOKENS * WIDTH * 2;
    let mut moments: Vec<(Range, Range)> = Vec::new();
    let mut settled = 0;
    let gemm = |flops: f64| flops / 600e3;
    for step in 0..16 {
        if step == 10 {
            settled = writer.ops.len();
        }
        let mut saved: Vec<Vec<Range>> = Vec::new();
        let mut casts: Vec<Vec<Range>> = Vec::new();
        let mut x = cache.take(&mut writer, unit);
        writer.launch(100, &[x], 10_000.0, 1.0);
        for layer in 0..LAYERS {
            let mut kept = vec![x];
            let mut cast = Vec::new();
            let mut input = x;
            for (number, (count, weight)) in sizes.iter().zip(&weights[layer]).enumerate() {
                // Norm, attention or activation before each product.
                let width = count / WIDTH;
                let source = input;
                if number != 1 {
                    let bytes = if number == 3 { 4 * unit } else { unit };
                    input = cache.take(&mut writer, bytes);
                    writer.launch(101 + number as u64, &[source, norms[layer], input], 5_000.0, 1.0);
                    kept.push(input);
                } else {
                    input = cache.take(&mut writer, unit);
                    writer.launch(102, &[source, input], 900_000.0, 2.0);
                    kept.push(input);
                }
                let half = cache.take(&mut writer, 2 * count);
                writer.launch(110, &[*weight, half], 2_000.0, 1.0);
                cast.push(half);
                let out = cache.take(&mut writer, if number == 3 { unit } else { TOKENS * width * 2 });
                writer.launch(120, &[input, half, out], gemm(2.0 * TOKENS as f64 * *count as f64), 16.0);
                kept.push(out);
                input = out;
            }
            let next = cache.take(&mut writer, unit);
            writer.launch(130, &[x, input, next], 5_000.0, 1.0);
            x = next;
            saved.push(kept);
            casts.push(cast);
        }
        let mut slope = cache.take(&mut writer, unit);
        writer.launch(140, &[x, slope], 50_000.0, 1.0);
        cache.give(x);
        let mut slopes: Vec<Vec<Range>> = Vec::new();
        for _ in 0..LAYERS {
            let kept = saved.pop().unwrap_or_default();
            let cast = casts.pop().unwrap_or_default();
            let mut own = Vec::new();
            for number in (0..4).rev() {
                let count = sizes[number];
                // Of the four products: kept is x, then (input, output) of each.
                let (input, out) = (kept[1 + 2 * number], kept[2 + 2 * number]);
                let before = cache.take(&mut writer, input.bytes());
                let flops = 2.0 * TOKENS as f64 * count as f64;
                writer.launch(121, &[slope, cast[number], before], gemm(flops), 16.0);
                let half = cache.take(&mut writer, 2 * count);
                writer.launch(122, &[slope, input, half], gemm(flops), 16.0);
                let whole = cache.take(&mut writer, 4 * count);
                writer.launch(111, &[half, whole], 2_000.0, 1.0);
                own.push(whole);
                cache.give(half);
                cache.give(cast[number]);
                let source = if number == 0 { kept[0] } else { kept[2 * number] };
                let after = cache.take(&mut writer, source.bytes());
                writer.launch(150 + number as u64, &[before, input, source, after], 5_000.0, 1.0);
                cache.give(before);
                cache.give(slope);
                cache.give(out);
                cache.give(input);
                slope = after;
            }
            own.reverse();
            slopes.push(own);
            cache.give(kept[0]);
        }
        cache.give(slope);
        slopes.reverse();
        if moments.is_empty() {
            for weight in weights.iter().flatten() {
                moments.push((cache.take(&mut writer, weight.bytes()), cache.take(&mut writer, weight.bytes())));
            }
        }
        // One launch works on sixteen tensors.
        let all: Vec<[Range; 4]> = weights
            .iter()
            .flatten()
            .zip(slopes.iter().flatten())
            .zip(&moments)
            .map(|((weight, slope), (first, second))| [*weight, *slope, *first, *second])
            .collect();
        for group in all.chunks(16) {
            writer.launch(160, &group.concat(), 10_000.0, 1.6);
        }
        slopes.into_iter().flatten().for_each(|slope| cache.give(slope));
        writer.idle();
    }
    writer.trace(name, (cache.held as f64 / ratio) as u64 / (2 * MIB) * (2 * MIB), links, settled)
}

/// A Llama of 6.7 billion parameters in bf16: four texts of 4 096 tokens are read and 24 tokens written, again and again. 26 GiB: weights and the
/// cache of keys and values first (`lazily`: as each layer first uses it), then what a layer works on, by a caching allocator. Products read the narrow operand 30 times
/// and the wide one 8 times, and write their result once, and attention reads everything ten times, as measured for such sizes.
pub fn language_model(near: u64, rounds: usize, tokens: usize, links: Links, lazily: bool) -> Trace {
    const LAYERS: usize = 32;
    const WIDTH: u64 = 4096;
    const INNER: u64 = 11_008;
    const TOKENS: u64 = 4 * 4096;
    let mut writer = Writer::new();
    let mut cache = Caching::default();
    let shapes =
        [WIDTH * WIDTH, WIDTH * WIDTH, WIDTH * WIDTH, WIDTH * WIDTH, INNER * WIDTH, INNER * WIDTH, INNER * WIDTH];
    let embedding = cache.take(&mut writer, 32_000 * WIDTH * 2);
    let workspace = cache.take(&mut writer, 32 * MIB);
    let weights: Vec<Vec<Range>> =
        (0..LAYERS).map(|_| shapes.iter().map(|count| cache.take(&mut writer, 2 * count)).collect()).collect();
    let head = cache.take(&mut writer, 32_000 * WIDTH * 2);
    let length = 4096 + tokens as u64;
    let mut keys: Vec<[Range; 2]> = Vec::new();
    let more_keys = |writer: &mut Writer, cache: &mut Caching, keys: &mut Vec<[Range; 2]>| {
        keys.push([(); 2].map(|()| cache.take(writer, 4 * length * WIDTH * 2)));
    };
    if !lazily {
        (0..LAYERS).for_each(|_| more_keys(&mut writer, &mut cache, &mut keys));
    }
    let mut settled = 0;
    for round in 0..rounds {
        if round == rounds / 2 {
            settled = writer.ops.len();
        }
        for token in 0..tokens {
            let rows = if token == 0 { TOKENS } else { 4 };
            let product = |writer: &mut Writer, function: u64, input: Range, weight: Range, out: Range| {
                let flops = rows as f64 * weight.bytes() as f64;
                let reuses = if rows > 4 { vec![8.0, 30.0, 1.0] } else { vec![1.0; 3] };
                writer.ops.push(Op::Launch(Step {
                    function: function + if rows > 4 { 0 } else { 1000 },
                    ranges: vec![input, weight, out],
                    // A workspace, too, that products of this size do without.
                    named: [out, input, weight, workspace].map(|range| range.start).to_vec(),
                    compute_ns: flops / 650e3,
                    reuse: reuses[0],
                    reuses,
                }));
            };
            let unit = rows * WIDTH * 2;
            let mut x = cache.take(&mut writer, unit);
            writer.launch(1, &[embedding, x], 5_000.0, if rows > 4 { 0.5 } else { 0.001 });
            let norm = |writer: &mut Writer, cache: &mut Caching, x: Range| {
                let wide = cache.take(writer, 2 * unit);
                writer.launch(2, &[x, wide], 2_000.0, 1.0);
                let squares = cache.take(writer, 2 * unit);
                writer.launch(3, &[wide, squares], 2_000.0, 1.0);
                writer.launch(4, &[squares], 2_000.0, 1.0);
                cache.give(squares);
                let scaled = cache.take(writer, 2 * unit);
                writer.launch(5, &[wide, scaled], 2_000.0, 1.0);
                cache.give(wide);
                let out = cache.take(writer, unit);
                writer.launch(6, &[scaled, out], 2_000.0, 1.0);
                cache.give(scaled);
                out
            };
            for layer in 0..LAYERS {
                let input = norm(&mut writer, &mut cache, x);
                let mut parts = [0, 1, 2].map(|part| {
                    let out = cache.take(&mut writer, unit);
                    product(&mut writer, 10, input, weights[layer][part], out);
                    out
                });
                cache.give(input);
                for part in &mut parts[..2] {
                    let turned = cache.take(&mut writer, unit);
                    writer.launch(11, &[*part, turned], 2_000.0, 1.0);
                    let out = cache.take(&mut writer, unit);
                    writer.launch(12, &[*part, turned, out], 2_000.0, 1.0);
                    cache.give(turned);
                    cache.give(std::mem::replace(part, out));
                }
                if keys.len() == layer {
                    more_keys(&mut writer, &mut cache, &mut keys);
                }
                for (part, kept) in parts[1..].iter().zip(&keys[layer]) {
                    let part = Range::of(part.start, part.bytes());
                    let into = Range::of(kept.start, if rows > 4 { unit } else { 2 * MIB });
                    writer.launch(13, &[part, into], 2_000.0, 1.0);
                }
                let out = cache.take(&mut writer, unit);
                let (took, reuse) = if rows > 4 { (1_800_000.0, 10.0) } else { (5_000.0, 1.0) };
                let [first, second] = keys[layer];
                writer.launch(if rows > 4 { 14 } else { 15 }, &[parts[0], first, second, out], took, reuse);
                parts.into_iter().for_each(|part| cache.give(part));
                let projected = cache.take(&mut writer, unit);
                product(&mut writer, 10, out, weights[layer][3], projected);
                cache.give(out);
                let sum = cache.take(&mut writer, unit);
                writer.launch(16, &[x, projected, sum], 2_000.0, 1.0);
                cache.give(projected);
                cache.give(x);
                let input = norm(&mut writer, &mut cache, sum);
                let wide = rows * INNER * 2;
                let gate = cache.take(&mut writer, wide);
                product(&mut writer, 20, input, weights[layer][4], gate);
                let shut = cache.take(&mut writer, wide);
                writer.launch(21, &[gate, shut], 2_000.0, 1.0);
                cache.give(gate);
                let up = cache.take(&mut writer, wide);
                product(&mut writer, 20, input, weights[layer][5], up);
                cache.give(input);
                let both = cache.take(&mut writer, wide);
                writer.launch(22, &[shut, up, both], 2_000.0, 1.0);
                cache.give(shut);
                cache.give(up);
                let down = cache.take(&mut writer, unit);
                product(&mut writer, 23, both, weights[layer][6], down);
                cache.give(both);
                x = cache.take(&mut writer, unit);
                writer.launch(16, &[sum, down, x], 2_000.0, 1.0);
                cache.give(sum);
                cache.give(down);
            }
            let words = cache.take(&mut writer, 4 * 32_000 * 2);
            writer.launch(30, &[head, words], 10_000.0, 1.0);
            cache.give(words);
            cache.give(x);
            writer.idle();
        }
    }
    writer.trace("language model", near, links, settled)
}

/// Layers of experts, of which a few are used for a token, some more often than others.
pub fn experts(seed: u64, reuse: f64, name: &str) -> Trace {
    let mut writer = Writer::new();
    let mut dice = Dice(seed);
    let layers: Vec<(Range, Vec<Range>)> = (0..12)
        .map(|_| {
            // Each a block of its own, as frameworks allocate tensors of this size.
            let dense = writer.block(64 * MIB);
            let experts = (0..16).map(|_| writer.block(48 * MIB));
            (dense, experts.collect())
        })
        .collect();
    let out = writer.block(32 * MIB);
    let mut settled = 0;
    for step in 0..110 {
        if step == 70 {
            settled = writer.ops.len();
        }
        for (layer, (dense, experts)) in layers.iter().enumerate() {
            writer.launch(1, &[*dense, out], 20_000.0, 1.0);
            let mut chosen = Vec::new();
            while chosen.len() < 4 {
                // A few are popular, and not the same ones in each layer.
                let rank = (dice.share().powi(3) * 16.0) as usize;
                let expert = (rank * 5 + layer * 3) % 16;
                if !chosen.contains(&expert) {
                    chosen.push(expert);
                }
            }
            for expert in chosen {
                writer.launch(2, &[experts[expert], out], 30_000.0, reuse);
            }
        }
        writer.idle();
    }
    writer.trace(name, 6 * GIB, peer(), settled)
}

/// Decoding: weights once a step, and a cache of keys and values that grows and is read by four heads at a time.
pub fn growing() -> Trace {
    let mut writer = Writer::new();
    let weights = writer.block(8 * GIB);
    let weights = parts(weights, 256 * MIB);
    let mut pages: Vec<Range> = Vec::new();
    let mut settled = 0;
    for step in 0..120 {
        if step % 6 == 0 {
            pages.push(writer.block(192 * MIB));
        }
        if step == 60 {
            settled = writer.ops.len();
        }
        for (layer, weight) in weights.iter().enumerate() {
            writer.launch(1, &[*weight], 5_000.0, 1.0);
            let of_layer: Vec<Range> = pages.iter().map(|page| parts(*page, 6 * MIB)[layer]).collect();
            writer.launch(2, &of_layer, 5_000.0, 4.0);
        }
        writer.idle();
    }
    writer.trace("growing KV cache", 9 * GIB, peer(), settled)
}

/// The working set changes every so many cycles.
pub fn phases() -> Trace {
    let mut writer = Writer::new();
    let sets: Vec<Range> = (0..3).map(|_| writer.block(3 * GIB)).collect();
    let mut settled = 0;
    for phase in 0..6 {
        if phase == 1 {
            settled = writer.ops.len();
        }
        for _ in 0..60 {
            for part in parts(sets[phase % 3], 128 * MIB) {
                writer.launch(phase as u64 % 3, &[part], 100_000.0, 2.0);
            }
            writer.idle();
        }
    }
    writer.trace("phases of 60 cycles", 4 * GIB, peer(), settled)
}

/// Anything at any time.
pub fn random(seed: u64, reuse: f64, name: &str) -> Trace {
    let mut writer = Writer::new();
    let mut dice = Dice(seed);
    let blocks: Vec<Range> = (0..48).map(|_| writer.block(128 * MIB)).collect();
    let mut settled = 0;
    for step in 0..4000 {
        if step == 2000 {
            settled = writer.ops.len();
        }
        let one = blocks[dice.below(48) as usize];
        let two = blocks[dice.below(48) as usize];
        let both = [one, two];
        writer.launch(dice.below(4), if one == two { &both[..1] } else { &both }, 50_000.0, reuse);
        if step % 100 == 99 {
            writer.idle();
        }
    }
    writer.trace(name, 4 * GIB, peer(), settled)
}

pub fn all() -> Vec<Trace> {
    let mut traces = Vec::new();
    for ratio in [1.1, 1.3, 1.5, 2.0] {
        traces.push(cyclic(ratio, peer(), &format!("read once, {ratio} ×")));
    }
    traces.push(cyclic(1.3, host(), "read once, 1.3 ×, host"));
    traces.push(decoding());
    traces.push(rotation(peer(), "GEMM rotation, by engines"));
    // 512 MiB in by the engine and out by 132 blocks of a kernel took 1.9 ms.
    let by_kernel = Links::measured(vec![FarLink { both: 282.0, ..FarLink::PEER }]);
    traces.push(rotation(by_kernel, "GEMM rotation, out by a kernel"));
    traces.push(rotation(host(), "GEMM rotation, host"));
    for ratio in [1.2, 1.56, 2.0] {
        traces.push(training(ratio, peer(), &format!("training, {ratio} ×")));
    }
    traces.push(training(1.2, host(), "training, 1.2 ×, host"));
    traces.push(experts(3, 1.0, "experts, read once"));
    traces.push(experts(3, 12.0, "experts, read 12 times"));
    traces.push(growing());
    traces.push(phases());
    traces.push(random(5, 1.0, "random, read once"));
    traces.push(random(6, 30.0, "random, read 30 times"));
    for repeats in [1, 3, 12] {
        traces.push(adversary(repeats));
    }
    traces
}

/// Other draws of the same odds, where a trace is drawn.
pub fn others(trace: &Trace) -> Option<Vec<Trace>> {
    let drawn: fn(u64) -> Trace = match trace.name.split(',').next() {
        Some("experts") => |seed| experts(seed, 1.0, ""),
        Some("random") => |seed| random(seed, 1.0, ""),
        _ => return None,
    };
    Some((100..116).map(drawn).collect())
}

/// Reads what lies far, over and over, and something else as soon as that is near: whatever moves was moved in vain. Recorded while
/// the policy works.
pub fn adversary(repeats: usize) -> Trace {
    let mut writer = Writer::new();
    let blocks: Vec<Range> = (0..32).map(|_| writer.block(128 * MIB)).collect();
    let mut trace = writer.trace(&format!("adversary, after {repeats} cycles"), 16 * 128 * MIB, peer(), 0);
    let mut machine = Machine::new(trace.near, trace.links.clone());
    let mut ours = Ours::new(&trace);
    for op in &trace.ops {
        apply(&mut machine, &mut ours, op);
    }
    for round in 0..200 / repeats {
        let far: Vec<Range> = blocks.iter().copied().filter(|block| machine.far_bytes(*block) > 0).collect();
        for _ in 0..repeats {
            for block in &far {
                let step = Step {
                    function: 1,
                    ranges: vec![*block],
                    named: Vec::new(),
                    compute_ns: 50_000.0,
                    reuse: 2.5,
                    reuses: Vec::new(),
                };
                trace.ops.push(Op::Launch(step));
                apply(&mut machine, &mut ours, &trace.ops[trace.ops.len() - 1]);
            }
            trace.ops.push(Op::Idle);
            apply(&mut machine, &mut ours, &Op::Idle);
        }
        if round == 100 / repeats {
            trace.settled = trace.ops.len();
        }
    }
    trace
}

/// Few launches on few blocks, for the exact optimum.
pub fn small(seed: u64, blocks: u64, near: u64, launches: u64, cycle: u64, reuse: f64) -> Trace {
    let mut writer = Writer::new();
    let mut dice = Dice(seed);
    let blocks: Vec<Range> = (0..blocks).map(|_| writer.block(256 * MIB)).collect();
    let order: Vec<Range> = (0..cycle).map(|_| blocks[dice.below(blocks.len() as u64) as usize]).collect();
    for launch in 0..launches {
        let at = (launch % cycle) as usize;
        writer.launch(at as u64 % 3, &[order[at]], 300_000.0, reuse);
        if at == 0 {
            writer.idle();
        }
    }
    writer.trace("small", near * 256 * MIB, peer(), 0)
}
