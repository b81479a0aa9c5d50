//! Launches that are alike: the same function with the same pointers.
//!
//! A launch that was seen before costs one hash over its words and one look into a table. What it reads, and what is known of its
//! time, is kept with its kind.

use crate::extents::Extents;
use crate::interface::Range;
use std::collections::HashMap;

/// No kind.
pub const NONE: u32 = u32::MAX;
/// Kinds that are remembered; about 150 bytes each. Beyond it the older half is forgotten.
const MOST: usize = 1 << 16;
/// Functions that are told apart.
const MOST_FUNCTIONS: usize = 1 << 14;
/// Measurements of a function before they become rare.
const EAGER: u32 = 32;

/// One extent in a launch.
#[derive(Clone, Copy, Debug)]
pub struct Use {
    pub slot: u32,
    pub generation: u32,
    /// Which part of it is read, 0 to 1.
    pub part: f32,
}

/// What launches took with so much far memory.
#[derive(Clone, Copy, Debug)]
struct Level {
    /// The pass over the far bytes, nanoseconds.
    pass_ns: f32,
    /// The launch's time, nanoseconds, and by how much single ones differ from it.
    ns: f32,
    off: f32,
    count: u32,
}

impl Level {
    fn new(pass_ns: f32, ns: f32) -> Self {
        Self { pass_ns, ns, off: 0.0, count: 1 }
    }

    fn is(&self, pass_ns: f32) -> bool {
        (pass_ns - self.pass_ns).abs() <= 0.02 * pass_ns.max(self.pass_ns)
    }

    fn add(&mut self, ns: f32) {
        let weight = (1.0 / (self.count + 1) as f32).max(0.2);
        self.off += ((ns - self.ns).abs() - self.off) * weight;
        self.ns += (ns - self.ns) * weight;
        self.count = self.count.saturating_add(1);
    }
}

/// Two measured times of something, one with more far memory than the other.
#[derive(Clone, Copy, Debug, Default)]
struct Samples {
    most: Option<Level>,
    least: Option<Level>,
}

impl Samples {
    /// Adds a measurement. Answers whether it contradicts the earlier ones: the same launch does something else now, and nothing
    /// that was measured holds.
    fn add(&mut self, pass_ns: f32, ns: f32) -> bool {
        let differs = |level: &Level| level.is(pass_ns) && (ns - level.ns).abs() > 0.5 * level.ns.max(ns);
        let differs = self.most.as_ref().is_some_and(differs) || self.least.as_ref().is_some_and(differs);
        if differs {
            *self = Self::default();
        }
        for (level, is_beyond) in
            [(&mut self.most, f32::gt as fn(&f32, &f32) -> bool), (&mut self.least, f32::lt as fn(&f32, &f32) -> bool)]
        {
            match level {
                Some(known) if known.is(pass_ns) => known.add(ns),
                Some(known) if !is_beyond(&pass_ns, &known.pass_ns) => {}
                _ => *level = Some(Level::new(pass_ns, ns)),
            }
        }
        differs
    }

    /// Nanoseconds that each nanosecond of far pass costs, if two measurements are far enough apart to tell. Where launches of one
    /// kind take now long and now short, as with a length among the parameters, that counts against it.
    fn slope(&self) -> Option<f32> {
        let (most, least) = (self.most?, self.least?);
        let (gain, off) = (most.ns - least.ns, most.off + least.off);
        let is_clear = most.pass_ns - least.pass_ns > 0.2 * most.pass_ns && off <= 0.5 * gain.abs().max(0.1 * most.ns);
        is_clear.then(|| ((gain - off) / (most.pass_ns - least.pass_ns)).max(0.0))
    }
}

#[derive(Clone, Debug)]
pub struct Kind {
    hash: u64,
    pub function: u32,
    pub uses: Box<[Use]>,
    /// The position of its last launch.
    pub last: u64,
    /// The shape of the extents for which `uses` holds, if it was named by ranges or a pointer led nowhere.
    shape: Option<u64>,
    /// It is not asked for a swap before this position; for how many cycles it was put off the last time.
    pub asked_again: u64,
    pub put_off: u32,
    samples: Samples,
    /// Bytes that it names.
    pub bytes: u64,
    /// They are the same as at its launch before: later pointers cut no more off what it names.
    settled: bool,
}

impl Kind {
    /// It names so many bytes now. What was measured holds for the same bytes alone: before the borders behind its pointers were
    /// known, it seemed to read the whole block.
    #[inline]
    pub fn names(&mut self, bytes: u64) {
        self.settled = bytes == self.bytes;
        if !self.settled {
            self.samples = Samples::default();
            self.bytes = bytes;
        }
    }
}

/// A line through measurements of launches of different sizes: nanoseconds a byte named against those of far pass a byte.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    count: f32,
    x: f32,
    y: f32,
    xx: f32,
    xy: f32,
    yy: f32,
}

impl Line {
    fn add(&mut self, x: f32, y: f32) {
        // About the last fifty count.
        let keep = 0.98;
        self.count = self.count * keep + 1.0;
        for (sum, value) in
            [(&mut self.x, x), (&mut self.y, y), (&mut self.xx, x * x), (&mut self.xy, x * y), (&mut self.yy, y * y)]
        {
            *sum = *sum * keep + value;
        }
    }

    /// Its slope, if the points lie apart and near it.
    fn slope(&self) -> Option<f32> {
        if self.count < 3.5 {
            return None;
        }
        let (x, y) = (self.x / self.count, self.y / self.count);
        let (xx, xy, yy) = (self.xx / self.count - x * x, self.xy / self.count - x * y, self.yy / self.count - y * y);
        let slope = xy / xx;
        let rest = (yy - slope * xy).max(0.0);
        (xx > 0.01 * x * x && rest < 0.02 * y * y).then_some(slope.max(0.0))
    }
}

#[derive(Clone, Debug)]
pub struct Function {
    pub name: u64,
    /// Gain for each nanosecond of far pass that becomes near, as measured on one kind with both.
    gain: Option<f32>,
    /// The same by all its kinds.
    line: Line,
    /// Time of a launch with nothing far, nanoseconds a byte named.
    near: Option<f32>,
    samples: u32,
    far_samples: u32,
    /// Moves on the strength of a guess, since nothing was measured near.
    pub guesses: u32,
    count: u32,
}

impl Function {
    fn gain(&self) -> Option<f32> {
        self.gain.or_else(|| self.line.slope())
    }
}

#[derive(Debug)]
pub struct Kinds {
    kinds: Vec<Kind>,
    /// Index of kinds by hash, a power of two long.
    table: Vec<u32>,
    functions: Vec<Function>,
    names: HashMap<u64, u32>,
    /// Part of a pass that is saved by having it near, for what is read once.
    once: f32,
}

#[inline]
fn mix(hash: u64, word: u64) -> u64 {
    (hash.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The hash of a launch. Two that share it would share what is known of them, which costs time at worst; of 2^16 kinds two do
/// once in 2^33 programs.
#[inline]
pub fn hash(function: u64, words: &[u64]) -> u64 {
    let mut hash = mix(0x51ed_270b_7a1c_9d4f, function);
    for &word in words {
        hash = mix(hash, word);
    }
    hash ^ (hash >> 29)
}

pub fn hash_of_ranges(function: u64, ranges: &[Range]) -> u64 {
    let hash = ranges.iter().fold(mix(1, function), |hash, range| mix(mix(hash, range.start), range.end));
    hash ^ (hash >> 29)
}

impl Kinds {
    pub fn new(once: f64) -> Self {
        Self {
            kinds: Vec::new(),
            table: vec![NONE; 1 << 10],
            functions: Vec::new(),
            names: HashMap::new(),
            once: once as f32,
        }
    }

    pub fn get(&self, kind: u32) -> Option<&Kind> {
        self.kinds.get(kind as usize)
    }

    pub fn get_mut(&mut self, kind: u32) -> Option<&mut Kind> {
        self.kinds.get_mut(kind as usize)
    }

    pub fn functions(&self) -> &[Function] {
        &self.functions
    }

    #[inline]
    pub fn find(&self, hash: u64) -> u32 {
        let mask = self.table.len() - 1;
        let mut at = hash as usize & mask;
        loop {
            match self.table.get(at) {
                Some(&kind) if kind != NONE => {
                    if self.kinds.get(kind as usize).is_some_and(|kind| kind.hash == hash) {
                        return kind;
                    }
                }
                _ => return NONE,
            }
            at = (at + 1) & mask;
        }
    }

    fn enter(&mut self, kind: u32, hash: u64) {
        let mask = self.table.len() - 1;
        let mut at = hash as usize & mask;
        while self.table[at] != NONE {
            at = (at + 1) & mask;
        }
        self.table[at] = kind;
    }

    /// Whether there is room for another.
    pub fn is_full(&self) -> bool {
        self.kinds.len() >= MOST
    }

    /// Forgets the kinds that were not launched since a position, and says what each is called now.
    pub fn forget_before(&mut self, position: u64) -> Vec<u32> {
        let mut names = vec![NONE; self.kinds.len()];
        let mut kept = Vec::with_capacity(MOST / 2);
        for (old, kind) in self.kinds.drain(..).enumerate() {
            if kind.last >= position {
                names[old] = kept.len() as u32;
                kept.push(kind);
            }
        }
        self.kinds = kept;
        self.table.fill(NONE);
        for kind in 0..self.kinds.len() {
            self.enter(kind as u32, self.kinds[kind].hash);
        }
        names
    }

    fn function(&mut self, name: u64) -> u32 {
        if let Some(&function) = self.names.get(&name) {
            return function;
        }
        // The last one stands for all that there is no room for.
        let function = self.functions.len().min(MOST_FUNCTIONS - 1) as u32;
        if function as usize == self.functions.len() {
            self.functions.push(Function {
                name,
                gain: None,
                line: Line::default(),
                near: None,
                samples: 0,
                far_samples: 0,
                guesses: 0,
                count: 0,
            });
            self.names.insert(name, function);
        }
        function
    }

    pub fn add(&mut self, hash: u64, function: u64, position: u64) -> u32 {
        if self.kinds.len() * 2 >= self.table.len() {
            self.table = vec![NONE; self.table.len() * 2];
            for kind in 0..self.kinds.len() {
                self.enter(kind as u32, self.kinds[kind].hash);
            }
        }
        let function = self.function(function);
        let kind = self.kinds.len() as u32;
        self.kinds.push(Kind {
            hash,
            function,
            uses: Box::default(),
            last: position,
            shape: None,
            asked_again: 0,
            put_off: 0,
            samples: Samples::default(),
            bytes: 0,
            settled: false,
        });
        self.enter(kind, hash);
        kind
    }

    /// Whether the extents of a kind have to be looked up again for another reason than that one of them ended.
    #[inline]
    pub fn is_stale(kind: &Kind, extents: &Extents) -> bool {
        kind.shape.is_some_and(|shape| shape != extents.shape)
    }

    /// Looks the extents up that pointers name.
    pub fn resolve(&mut self, kind: u32, words: &[u64], extents: &mut Extents, cycle: u64) {
        let mut slots: Vec<u32> = Vec::with_capacity(words.len());
        let mut is_known = true;
        for &word in words {
            match extents.named(word, cycle) {
                Some(slot) if !slots.contains(&slot) => slots.push(slot),
                Some(_) => {}
                None => is_known = false,
            }
        }
        // A later word may have cut what an earlier one named; the earlier one keeps its head, which is what it named.
        let uses = slots
            .iter()
            .filter_map(|&slot| extents.get(slot).map(|extent| Use { slot, generation: extent.generation, part: 1.0 }));
        let uses: Box<[Use]> = uses.collect();
        if let Some(kind) = self.get_mut(kind) {
            kind.uses = uses;
            kind.shape = (!is_known).then_some(extents.shape);
        }
    }

    /// Looks the extents up that ranges touch.
    pub fn resolve_ranges(&mut self, kind: u32, ranges: &[Range], extents: &mut Extents, cycle: u64) {
        let mut uses: Vec<Use> = Vec::new();
        for range in ranges {
            extents.named(range.start, cycle);
        }
        for range in ranges {
            for slot in extents.over(*range) {
                let Some(extent) = extents.get(slot) else { continue };
                let part = extent.range.meet(range).bytes() as f32 / extent.range.bytes().max(1) as f32;
                match uses.iter_mut().find(|known| known.slot == slot) {
                    Some(known) => known.part = (known.part + part).min(1.0),
                    None => uses.push(Use { slot, generation: extent.generation, part }),
                }
            }
        }
        if let Some(kind) = self.get_mut(kind) {
            kind.uses = uses.into();
            kind.shape = Some(extents.shape);
        }
    }

    /// Whether the next launch of a function should be timed.
    #[inline]
    pub fn wants_timing(&mut self, kind: u32, is_far: bool) -> bool {
        let Some(kind) = self.kinds.get(kind as usize) else { return false };
        let Some(function) = self.functions.get_mut(kind.function as usize) else { return false };
        function.count = function.count.wrapping_add(1);
        if !kind.settled {
            return false;
        }
        if is_far {
            function.samples < EAGER && kind.samples.most.is_none_or(|most| most.count < 2) || function.count % 32 == 0
        } else {
            // Only what was once measured far has another end to be known.
            function.far_samples > 0 && function.samples < EAGER && kind.samples.slope().is_none()
                || function.far_samples > 0 && function.count % 256 == 0
        }
    }

    /// The same by the caller's name for the function.
    pub fn function_wants_timing(&self, name: u64) -> bool {
        let function = self.names.get(&name).and_then(|function| self.functions.get(*function as usize));
        function.is_none_or(|function| function.samples < EAGER || function.gain().is_none())
    }

    pub fn timed(&mut self, kind: u32, pass_ns: f32, ns: f32) {
        let Some(kind) = self.kinds.get_mut(kind as usize) else { return };
        let Some(function) = self.functions.get_mut(kind.function as usize) else { return };
        if !kind.settled {
            return;
        }
        if kind.samples.add(pass_ns, ns) {
            function.gain = None;
            function.line = Line::default();
            function.samples = function.samples.min(EAGER / 2);
        }
        function.samples = function.samples.saturating_add(1);
        let bytes = kind.bytes.max(1) as f32;
        function.line.add(pass_ns / bytes, ns / bytes);
        if pass_ns > 0.0 {
            function.far_samples = function.far_samples.saturating_add(1);
        } else {
            let near = ns / bytes;
            function.near = Some(function.near.map_or(near, |old| old + (near - old) * 0.25));
            function.guesses = 0;
        }
        if let Some(slope) = kind.samples.slope() {
            function.gain = Some(function.gain.map_or(slope, |old| old + (slope - old) * 0.25));
            function.guesses = 0;
        }
    }

    /// Nanoseconds that are gained for each nanosecond of far pass that a launch of this kind no longer has, and whether that is
    /// measured or a guess.
    #[inline]
    pub fn gain(&self, kind: &Kind) -> (f32, bool) {
        if let Some(slope) = kind.samples.slope() {
            return (slope, true);
        }
        let Some(function) = self.functions.get(kind.function as usize) else { return (self.once, true) };
        // More than all of its time it cannot gain.
        let known = kind.samples.most.filter(|most| most.pass_ns > 0.0 && most.count > 1);
        let Some(known) = known else { return (function.gain().unwrap_or(self.once), true) };
        let (pass, ns) = (known.pass_ns, (known.ns - known.off).max(0.0));
        let rest = ns - function.near.unwrap_or(0.0) * kind.bytes as f32;
        // What the function's other launches gain holds for this one only if it explains at least half of its time.
        let explains = |gain: &f32| 2.0 * (function.near.unwrap_or(0.0) * kind.bytes as f32 + gain * pass) >= ns;
        match function.gain().filter(explains) {
            Some(gain) => (gain.min(ns / pass), true),
            // What a kernel computes meanwhile is not known yet. Near the time of one pass it is nothing.
            None => {
                let guess = (rest / pass).max(0.0);
                (guess.max(self.once.min(ns / pass)), guess < 1.5 * self.once)
            }
        }
    }

    pub fn guessed(&mut self, kind: u32) {
        let function = self.kinds.get(kind as usize).map(|kind| kind.function);
        if let Some(function) = function.and_then(|function| self.functions.get_mut(function as usize)) {
            function.guesses += 1;
        }
    }

    /// Whether a move may still be made on a guess.
    pub fn may_guess(&self, kind: &Kind) -> bool {
        self.functions.get(kind.function as usize).is_some_and(|function| function.guesses < 2)
    }

    /// What was measured of a function, for people.
    pub fn reuse(&self, function: u32) -> Option<f64> {
        let function = self.functions.get(function as usize)?;
        function.gain().map(|gain| f64::from(gain + 1.0 - self.once))
    }
}
