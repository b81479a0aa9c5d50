//! Launches that are alike: the same function with the same pointers.
//!
//! A launch that was seen before costs one hash over its words and one look into a table. What it reads, and what is known of its
//! time, is kept with its kind.

use crate::extents::{AT_ONCE, Extent, Extents};
use crate::interface::Range;
use crate::operands::{self, MOST as OPERANDS, Operands, Passes, Weights};
use crate::samples::{Level, Line, Samples};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};

/// Made inside calls of the program: the standard library's own asks the system for random numbers when a thread makes its first one, in which a thread may be
/// cancelled. Whoever chooses these keys harms himself alone.
type Map = HashMap<u64, u32, BuildHasherDefault<DefaultHasher>>;

/// No kind.
pub const NONE: u32 = u32::MAX;
/// Kinds that are remembered; about 150 bytes each. Beyond it the older half is forgotten.
const MOST: usize = 1 << 16;
/// Functions that are told apart.
const MOST_FUNCTIONS: usize = 1 << 14;
/// Shapes of a function that are told apart, as sizes of matrices; one that has more has numbers among its parameters that are none.
const MOST_SHAPES: u32 = 64;
/// More shapes than these a function has where it is given other sizes each time.
const FEW_SHAPES: u32 = 8;
/// Measurements of a function before they become rare; a power of two.
const EAGER: u32 = 32;
/// Nanoseconds that a launch is charged with from which on it is worth finding out that it cannot have lost them.
const WORTH_BOUNDING: f32 = 1_000_000.0;
/// What copies and fills are called among the functions.
pub const COPY: u64 = u64::MAX;
/// How often a launch of which nothing was measured may read its operands. A GEMM of 8192 reads them thirty times.
pub const UNKNOWN: f32 = 32.0;

/// One extent in a launch.
#[derive(Clone, Copy, Debug)]
pub struct Use {
    pub slot: u32,
    pub generation: u32,
    /// Which part of it is read, 0 to 1, and the same times how often that crosses the link, where this is known.
    pub share: f32,
    pub part: f32,
    /// A pointer of the launch leads to its begin; else to something before it that goes on into it.
    pub is_named: bool,
    /// The how manyth of the launch's pointers it is reached by, of those that are told apart.
    pub operand: Option<u8>,
}

impl Use {
    /// How often what is read of it crosses the link.
    pub fn weight(&self) -> f32 {
        if self.share > 0.0 { self.part / self.share } else { 0.0 }
    }
}

/// Where in the program a launch is.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// Of the launch.
    pub position: u64,
    /// Cycles so far.
    pub cycle: u64,
}

impl Moment {
    /// Whether the begin of an extent is named about now, or was about when this launch was made the last time. A framework's allocator
    /// gives the same addresses to things of other sizes within one step, so that a pointer is no border for what is used there a hundred
    /// launches later: taken for one, it would make the rest of a tensor look unused.
    fn is_about(&self, extent: &Extent, previous: u64) -> bool {
        let is_near = |named: u64| [self.position, previous].iter().any(|at| named.abs_diff(*at) <= AT_ONCE);
        extent.named.iter().filter_map(|named| named.checked_sub(1)).any(is_near)
    }
}

/// How many times what near memory gives a kernel may read through its caches.
pub const CACHED: f32 = 2.0;

/// What the account is told of a launch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Worth {
    /// Nanoseconds less than as its operands lay at first: what is credited for those that are nearer, less what is charged for those that
    /// are farther.
    pub saved_ns: f32,
    /// Nanoseconds of pass more than at first over those that are farther, and what is charged for them.
    pub lost_ns: f32,
    pub charged_ns: f32,
}

/// What each launch of a kind needs: one line of the cache, and nothing else of the kind.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct Hot {
    pub hash: u64,
    /// The position of its last launch.
    pub last: u64,
    /// It is not asked for a swap before this position.
    pub asked_again: u64,
    /// When `pass_ns` to `asks` were worked out: [`Extents::epoch`], and what is known of the function ([`Function::version`]).
    pub epoch: u64,
    pub version: u32,
    pub function: u32,
    /// Nanoseconds of one pass over its far bytes.
    pub pass_ns: f32,
    pub worth: Worth,
    /// To move for it may be worth it.
    pub asks: bool,
    /// The same while the program does something else than was learnt, by how its operands were used last.
    pub asks_elsewhere: bool,
    /// It loses so much that this is asked whatever was answered before.
    pub asks_each_time: bool,
    /// It names as many bytes as at its launch before: later pointers cut no more off what it names.
    pub settled: bool,
    /// What more far memory costs it was not measured.
    pub unsure: bool,
    /// [`Kind::operands`], or [`NO_SHAPE`].
    pub shape: u16,
}

/// More than any number of operands.
const NO_SHAPE: u16 = u16::MAX;

const _: () = assert!(size_of::<Hot>() == 64 && MOST_FUNCTIONS <= NO_SHAPE as usize);

impl Hot {
    /// Of which function and shape it is, by their number among [`Kinds`].
    #[inline]
    pub fn shape(&self) -> Option<u32> {
        (self.shape != NO_SHAPE).then_some(u32::from(self.shape))
    }
}

/// What a gain is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// Nothing: one pass, which is what reading memory costs.
    Nothing,
    /// A launch's time with far memory alone.
    Guess,
    Measured,
}

#[derive(Clone, Debug)]
pub struct Kind {
    pub uses: Box<[Use]>,
    /// The shape of the extents for which `uses` holds, if it was named by ranges or a pointer led nowhere.
    shape: Option<u64>,
    /// For how many cycles it was not asked for a swap the last time that none was worth it.
    pub put_off: u32,
    samples: Samples,
    /// Bytes that it names.
    pub bytes: u64,
    pub function: u32,
    /// The gain that was told last.
    told: f32,
    /// What is known of launches with operands like its own.
    pub operands: Option<u32>,
    /// The same of any shape.
    any_shape: Option<u32>,
    /// It has more pointers than are told apart.
    has_many: bool,
    /// Its parts are weighed by that.
    is_weighed: bool,
    /// The cycle in which its extents are looked up again, once what comes after it is known, too; none after that.
    again: u64,
}

impl Kind {
    /// Its large operands cross the link so often.
    fn weigh(&mut self, weights: Option<Weights>, once: f32, extents: &Extents) {
        if weights.is_none() && !self.is_weighed {
            return;
        }
        self.is_weighed = weights.is_some();
        for part in &mut self.uses {
            let is_far = extents.get(part.slot).is_some_and(Extent::was_far);
            let weight = part.operand.zip(weights).map_or(1.0, |(operand, weights)| weights.of(operand, is_far, once));
            part.part = part.share * weight;
        }
    }

    /// It names so many bytes now; answers whether these are as many as before. What was measured holds for the same bytes alone:
    /// before the borders behind its pointers were known, it seemed to read the whole block.
    pub fn names(&mut self, bytes: u64) -> bool {
        let is_settled = bytes == self.bytes && bytes > 0;
        if !is_settled {
            self.samples = Samples::default();
            self.bytes = bytes;
        }
        is_settled
    }
}

#[derive(Clone, Debug)]
pub struct Function {
    count: u32,
    samples: u32,
    far_samples: u32,
    near_samples: u32,
    /// Counts the times that what is known of it has become something else.
    pub version: u32,
    pub name: u64,
    /// Gain for each nanosecond of far pass that becomes near, as measured on one kind with both.
    gain: Option<f32>,
    /// The same by all its kinds.
    line: Line,
    /// Time of a launch with nothing far, nanoseconds a byte named.
    near: Option<f32>,
    /// Nanoseconds of a launch for each nanosecond of far pass, by launches with nothing but far memory to go by.
    all_far: Level,
    /// What was known when `version` was counted last.
    told: (f32, f32),
    /// Moves on the strength of a guess, since nothing was measured near.
    pub guesses: u32,
    /// How many shapes of it were seen.
    shapes: u32,
}

impl Function {
    fn gain(&self) -> Option<f32> {
        self.gain.or_else(|| self.line.slope())
    }
}

#[derive(Debug)]
pub struct Kinds {
    kinds: Vec<Kind>,
    hot: Vec<Hot>,
    /// Index of kinds by hash, a power of two long.
    table: Vec<u32>,
    functions: Vec<Function>,
    names: Map,
    /// Part of a pass that is saved by having it near, for what is read once.
    once: f32,
    /// What a kernel reads of near memory, bytes a nanosecond.
    near: f32,
    /// Launches whose operands are alike, by their function and sizes.
    operands: Vec<Operands>,
    operands_by: Map,
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
    pub fn new(once: f64, near: f64) -> Self {
        Self {
            kinds: Vec::new(),
            hot: Vec::new(),
            table: vec![NONE; 1 << 10],
            functions: Vec::new(),
            names: Map::default(),
            once: once as f32,
            near: near as f32,
            operands: Vec::new(),
            operands_by: Map::default(),
        }
    }

    #[inline]
    pub fn get(&self, kind: u32) -> Option<&Kind> {
        self.kinds.get(kind as usize)
    }

    pub fn get_mut(&mut self, kind: u32) -> Option<&mut Kind> {
        self.kinds.get_mut(kind as usize)
    }

    #[inline]
    pub fn hot(&self, kind: u32) -> Option<&Hot> {
        self.hot.get(kind as usize)
    }

    #[inline]
    pub fn hot_mut(&mut self, kind: u32) -> Option<&mut Hot> {
        self.hot.get_mut(kind as usize)
    }

    #[inline]
    pub fn function_of(&self, kind: u32) -> Option<&Function> {
        self.functions.get(self.hot(kind)?.function as usize)
    }

    /// Whether a kind has this hash.
    #[inline]
    pub fn is(&self, kind: u32, hash: u64) -> bool {
        self.hot(kind).is_some_and(|kind| kind.hash == hash)
    }

    /// How many functions and shapes are told apart.
    pub fn shapes(&self) -> usize {
        self.operands.len()
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
                    if self.is(kind, hash) {
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
        let mut hot = Vec::with_capacity(MOST / 2);
        for (old, kind) in self.kinds.drain(..).enumerate() {
            if self.hot[old].last >= position {
                names[old] = kept.len() as u32;
                kept.push(kind);
                hot.push(self.hot[old]);
            }
        }
        self.kinds = kept;
        self.hot = hot;
        self.table.fill(NONE);
        for kind in 0..self.hot.len() {
            self.enter(kind as u32, self.hot[kind].hash);
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
                count: 0,
                samples: 0,
                far_samples: 0,
                near_samples: 0,
                version: 0,
                name,
                gain: None,
                line: Line::default(),
                near: None,
                all_far: Level { count: 0, ..Level::new(0.0, 0.0) },
                told: (0.0, 0.0),
                guesses: 0,
                shapes: 0,
            });
            self.names.insert(name, function);
        }
        function
    }

    pub fn add(&mut self, hash: u64, function: u64, position: u64) -> u32 {
        if self.kinds.len() * 2 >= self.table.len() {
            self.table = vec![NONE; self.table.len() * 2];
            for kind in 0..self.hot.len() {
                self.enter(kind as u32, self.hot[kind].hash);
            }
        }
        let function = self.function(function);
        let kind = self.kinds.len() as u32;
        self.kinds.push(Kind {
            uses: Box::default(),
            shape: None,
            put_off: 0,
            samples: Samples::default(),
            bytes: 0,
            function,
            told: 0.0,
            operands: None,
            any_shape: None,
            has_many: false,
            is_weighed: false,
            again: u64::MAX,
        });
        self.hot.push(Hot {
            hash,
            last: position,
            asked_again: 0,
            epoch: 0,
            version: 0,
            function,
            pass_ns: 0.0,
            worth: Worth::default(),
            asks: false,
            asks_elsewhere: false,
            asks_each_time: false,
            settled: false,
            unsure: true,
            shape: NO_SHAPE,
        });
        self.enter(kind, hash);
        kind
    }

    /// Whether the extents of a kind have to be looked up again for another reason than that one of them ended.
    #[inline]
    pub fn is_stale(kind: &Kind, extents: &Extents, cycle: u64) -> bool {
        kind.shape.is_some_and(|shape| shape != extents.shape) || kind.again > 0 && cycle >= kind.again
    }

    /// Looks the extents up that pointers name, each with those behind it that it goes on into, as far as launches of the same shape do.
    pub fn resolve(&mut self, kind: u32, shape: u64, words: &[u64], extents: &mut Extents, now: Moment) {
        let mut slots: Vec<(u32, usize)> = Vec::with_capacity(words.len());
        let mut is_known = true;
        for (ordinal, &word) in words.iter().enumerate() {
            match extents.named(word, now.cycle) {
                Some(slot) if slots.iter().all(|(known, _)| *known != slot) => slots.push((slot, ordinal)),
                Some(_) => {}
                None => is_known = false,
            }
        }
        for (slot, _) in &slots {
            if let Some(extent) = extents.get_mut(*slot) {
                extent.is_named_at(now.position);
            }
        }
        let previous = self.hot(kind).map_or(now.position, |hot| hot.last);
        let has_many = words.len() > OPERANDS;
        let any_shape = self.operands_of(kind, None, words.len());
        let index = self.operands_of(kind, Some(shape), words.len());
        let mut operands = index.and_then(|index| self.operands.get_mut(index as usize));
        let mut uses: Vec<Use> = Vec::with_capacity(slots.len());
        for &(slot, ordinal) in &slots {
            let is_named = |other: u32| slots.iter().any(|(slot, _)| *slot == other);
            let is_end = |other: u32, extent: &Extent| is_named(other) || now.is_about(extent, previous);
            let own: Vec<u32> = std::iter::once(slot).chain(extents.behind(slot, is_end)).collect();
            let bytes_of = |slot: &u32| extents.get(*slot).map_or(0, |extent| extent.range.bytes());
            let mut left: u64 = own.iter().map(bytes_of).sum();
            if let Some(operands) = operands.as_deref_mut().filter(|_| !has_many) {
                left = operands.reaches(ordinal, words.get(ordinal).copied().unwrap_or_default(), left);
            }
            let operand = match has_many {
                true => Some(0),
                false => Some(ordinal as u8).filter(|_| left >= operands::LARGE),
            };
            for slot in own {
                let Some(extent) = extents.get(slot).filter(|_| left > 0) else { break };
                let bytes = extent.range.bytes().min(left);
                left -= bytes;
                let share = bytes as f32 / extent.range.bytes().max(1) as f32;
                let is_named = is_named(slot);
                uses.push(Use { slot, generation: extent.generation, share, part: share, is_named, operand });
            }
        }
        for index in index.into_iter().chain(any_shape.filter(|_| has_many)) {
            if let Some(operands) = self.operands.get_mut(index as usize) {
                operands.is_seen();
            }
        }
        if let Some(hot) = self.hot_mut(kind) {
            hot.shape = index.and_then(|index| u16::try_from(index).ok()).unwrap_or(NO_SHAPE);
        }
        if let Some(kind) = self.get_mut(kind) {
            kind.uses = uses.into();
            kind.operands = index;
            kind.any_shape = any_shape;
            kind.has_many = has_many;
            kind.shape = (!is_known).then_some(extents.shape);
            kind.again = if kind.again == u64::MAX { now.cycle + 2 } else { 0 };
        }
    }

    /// What is known of launches of the same function with so many pointers, and of one shape. Where a function has too many of these,
    /// nothing is known by shape.
    fn operands_of(&mut self, kind: u32, shape: Option<u64>, pointers: usize) -> Option<u32> {
        let index = self.get(kind)?.function;
        let has_many = pointers > OPERANDS;
        let key = match shape {
            Some(shape) => hash(u64::from(index), &[shape, pointers as u64]),
            None => hash(u64::from(index), &[u64::from(has_many)]),
        };
        if let Some(known) = self.operands_by.get(&key) {
            return Some(*known);
        }
        let function = self.functions.get_mut(index as usize)?;
        if self.operands.len() == MOST_FUNCTIONS || shape.is_some() && function.shapes == MOST_SHAPES {
            return None;
        }
        function.shapes += u32::from(shape.is_some());
        let index = self.operands.len() as u32;
        let count = if has_many { 1 } else { shape.map_or(OPERANDS, |_| pointers) };
        self.operands.push(Operands::new(count, shape.is_none()));
        self.operands_by.insert(key, index);
        Some(index)
    }

    /// How far the operands of launches like this one reach is known from others.
    pub fn reaches_are_known(&self, kind: u32) -> bool {
        let known = |index: Option<u32>| self.operands.get(index? as usize).map(Operands::reaches_are_known);
        self.get(kind).is_some_and(|kind| known(kind.operands) == Some(true) || known(kind.any_shape) == Some(true))
    }

    /// How often each large operand of this launch crosses the link for each pass over it, if that is known.
    pub fn weights(&self, kind: u32) -> Option<Weights> {
        let of = |index: Option<u32>| self.operands.get(index? as usize)?.weights();
        let is_new = self.is_of_new_shape(kind);
        let kind = self.get(kind)?;
        of(kind.operands).or_else(|| of(kind.any_shape.filter(|_| !is_new)))
    }

    /// What is known of operands like its own, by its number.
    pub fn shape(&self, kind: u32) -> Option<u32> {
        self.hot(kind)?.shape()
    }

    /// How a launch of this kind reads an extent, weighed by what is known now.
    pub fn part_of(&mut self, kind: u32, slot: u32, extents: &Extents) -> Option<Use> {
        self.weigh(kind, extents);
        self.get(kind)?.uses.iter().find(|part| part.slot == slot).copied()
    }

    /// Weighs the parts of a kind by what is known now.
    pub fn weigh(&mut self, kind: u32, extents: &Extents) {
        let (weights, once) = (self.weights(kind), self.once);
        if let Some(known) = self.get_mut(kind) {
            known.weigh(weights, once, extents);
        }
    }

    /// What is known of launches of its very shape.
    fn own_shape(&self, kind: u32) -> Option<&Operands> {
        self.operands.get(self.get(kind)?.operands? as usize)
    }

    /// How often this operand can cross the link at most: [`UNKNOWN`], or what the time of a launch like this one leaves room for.
    pub fn bound(&self, kind: u32, operand: Option<u8>) -> f32 {
        UNKNOWN.min(self.bound_if_known(kind, operand))
    }

    /// How often this operand can cross the link at most in the time that launches of this very shape took; without end where none was measured.
    pub fn bound_if_known(&self, kind: u32, operand: Option<u8>) -> f32 {
        self.own_shape(kind).zip(operand).map_or(f32::INFINITY, |(own, operand)| own.bound(operand))
    }

    /// How often an operand may cross the link of which nothing is known yet ([`Operands::promises`]).
    pub fn promises(&self, id: u32, part: &Use, extents: &Extents) -> Option<f32> {
        self.get(id).filter(|kind| kind.is_weighed)?;
        extents.get(part.slot).filter(|extent| extent.was_far())?;
        self.own_shape(id)?.promises(part.operand?)
    }

    /// Memory comes near to find out how often a launch reads this operand.
    pub fn is_tried(&mut self, id: u32, operand: u8) {
        let index = self.get(id).and_then(|kind| kind.operands);
        if let Some(operands) = index.and_then(|index| self.operands.get_mut(index as usize)) {
            operands.is_tried(operand);
        }
    }

    /// It did not.
    pub fn is_not_tried(&mut self, id: u32, operand: u8) {
        let index = self.get(id).and_then(|kind| kind.operands);
        if let Some(operands) = index.and_then(|index| self.operands.get_mut(index as usize)) {
            operands.is_not_tried(operand);
        }
    }

    /// No launch of its function and shape was timed with anything far.
    pub fn was_never_timed(&self, kind: u32) -> bool {
        self.own_shape(kind).is_some_and(|own| !own.was_timed())
    }

    /// Launches of this function were timed, but none that works on as much: attention over one new word reads its keys once, over a prompt fifty times. One
    /// whose sizes are others each time is taken to do the same with each.
    fn is_of_new_shape(&self, id: u32) -> bool {
        let Some(kind) = self.get(id).filter(|kind| !kind.has_many) else { return false };
        let shapes = self.functions.get(kind.function as usize).map_or(0, |function| function.shapes);
        (2..=FEW_SHAPES).contains(&shapes) && self.was_never_timed(id)
    }

    /// A launch like this one was measured, but not how often it reads this operand.
    pub fn is_unknown(&self, kind: u32, operand: u8) -> bool {
        let is_weighed = self.get(kind).is_some_and(|kind| kind.is_weighed);
        is_weighed && self.weights(kind).is_some_and(|weights| !weights.knows(operand))
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
                    Some(known) => {
                        known.share = (known.share + part).min(1.0);
                        known.part = known.share;
                    }
                    None => {
                        let generation = extent.generation;
                        uses.push(Use { slot, generation, share: part, part, is_named: true, operand: None });
                    }
                }
            }
        }
        if let Some(kind) = self.get_mut(kind) {
            kind.uses = uses.into();
            kind.shape = Some(extents.shape);
        }
    }

    /// Whether this launch should be timed.
    #[inline]
    pub fn wants_timing(&mut self, kind: u32, is_far: bool) -> bool {
        let Some(hot) = self.hot.get(kind as usize) else { return false };
        let Some(function) = self.functions.get_mut(hot.function as usize) else { return false };
        function.count = function.count.wrapping_add(1);
        if !hot.settled {
            // How often it reads what it names is not known before that is known to be what it names; but no more than its time leaves room for.
            let is_charged = hot.worth.charged_ns > 1.0 && (hot.unsure || hot.worth.charged_ns > WORTH_BOUNDING);
            return is_charged || is_far && self.is_of_new_shape(kind);
        }
        let samples = || self.kinds.get(kind as usize).map(|kind| &kind.samples);
        let any_shape = || self.kinds.get(kind as usize).and_then(|kind| kind.any_shape);
        let known = hot.shape().or_else(any_shape);
        if let Some(operands) = known.and_then(|index| self.operands.get(index as usize)) {
            let is_open = !operands.is_settled() && (function.count.is_multiple_of(8) || is_far && hot.unsure);
            return operands.is_new() || is_open || function.count.is_multiple_of(2 * EAGER);
        }
        if is_far {
            let rarely = if function.samples < 2 * EAGER { EAGER } else { 4 * EAGER };
            function.count & (rarely - 1) == 0
                || hot.unsure && hot.worth.lost_ns > 1.0
                || function.samples < EAGER
                    && samples().is_some_and(|known| known.most.is_none_or(|most| most.count < 2))
        } else {
            // One end is measured some times before there is another: what leaves then is known after one launch.
            function.near_samples < EAGER / 4
                || function.far_samples > 0
                    && (function.count & 0xff == 0
                        || function.samples < EAGER && samples().is_some_and(|known| known.slope().is_none())
                        || hot.unsure && samples().is_some_and(|known| known.most.is_some() && known.slope().is_none()))
        }
    }

    /// The same by the caller's name for the function.
    pub fn function_wants_timing(&self, name: u64) -> bool {
        let function = self.names.get(&name).and_then(|function| self.functions.get(*function as usize));
        function.is_none_or(|function| function.samples < EAGER || function.gain().is_none())
    }

    /// A launch took so long. Answers whether what is known has become something else by it.
    ///
    /// `least`: nanoseconds that a pass over each operand takes at least, wherever it lies.
    pub fn timed(&mut self, id: u32, pass_ns: f32, passes: &Passes, least: &Passes, ns: f32) -> bool {
        let Some(kind) = self.kinds.get_mut(id as usize) else { return false };
        let Some(hot) = self.hot.get_mut(id as usize) else { return false };
        let Some(function) = self.functions.get_mut(kind.function as usize) else { return false };
        if !hot.settled {
            let index = kind.operands;
            let operands = index.and_then(|index| self.operands.get_mut(index as usize));
            if operands.is_some_and(|operands| operands.bind(passes, ns) | operands.bind(least, ns)) {
                function.version = function.version.wrapping_add(1);
            }
            return false;
        }
        let mut weighs_otherwise = false;
        for index in [kind.operands, kind.any_shape].into_iter().flatten() {
            if let Some(operands) = self.operands.get_mut(index as usize) {
                weighs_otherwise |= operands.add(passes, ns) | operands.bind(least, ns);
            }
        }
        if weighs_otherwise {
            // All launches with operands like these are looked at again.
            function.version = function.version.wrapping_add(1);
        }
        if kind.is_weighed {
            // Passes of operands that were weighed say nothing of those that were not.
            hot.version = hot.version.wrapping_sub(1);
            return weighs_otherwise;
        }
        if kind.samples.add(pass_ns, ns) {
            function.gain = None;
            function.line = Line::default();
            function.all_far.count = 0;
            function.samples = function.samples.min(EAGER / 2);
        }
        if pass_ns > 0.0 || function.far_samples > 0 {
            function.samples = function.samples.saturating_add(1);
        }
        function.line.add(pass_ns, ns, kind.bytes);
        let bytes = kind.bytes.max(1) as f32;
        if pass_ns > 0.0 {
            function.far_samples = function.far_samples.saturating_add(1);
            if function.all_far.count == 0 {
                function.all_far = Level::new(0.0, ns / pass_ns);
            } else {
                function.all_far.add(ns / pass_ns);
            }
        } else {
            function.near_samples = function.near_samples.saturating_add(1);
            let near = ns / bytes;
            function.near = Some(function.near.map_or(near, |old| old + (near - old) * 0.25));
            function.guesses = 0;
        }
        if let Some(slope) = kind.samples.slope() {
            function.gain = Some(function.gain.map_or(slope, |old| old + (slope - old) * 0.25));
            function.guesses = 0;
        }
        // The kind's own samples are new in any case.
        hot.version = hot.version.wrapping_sub(1);
        let differs = |a: f32, b: f32| (a - b).abs() > 0.05 * a.abs().max(b.abs());
        let now = (function.gain().unwrap_or(0.0), function.near.unwrap_or(0.0));
        let mut is_news = differs(function.told.0, now.0) || differs(function.told.1, now.1);
        if is_news {
            function.version = function.version.wrapping_add(1);
            function.told = now;
            hot.version = function.version.wrapping_sub(1);
        }
        is_news |= weighs_otherwise;
        let gain = self.weights(id).map_or_else(|| self.known(id).0, |weights| weights.most());
        let Some(kind) = self.kinds.get_mut(id as usize) else { return false };
        if differs(kind.told, gain) {
            kind.told = gain;
            is_news = true;
        }
        is_news
    }

    /// Nanoseconds that are gained for each nanosecond of far pass that a launch of this kind no longer has, and whether that is
    /// good enough to move by.
    #[inline]
    pub fn gain(&self, id: u32) -> (f32, bool) {
        let (gain, basis) = self.known(id);
        let gain =
            if self.get(id).is_some_and(|kind| kind.is_weighed) { gain } else { gain.min(self.most_by_time(id)) };
        (gain, basis != Basis::Guess || gain < 1.5 * self.once)
    }

    /// How often a launch can read what it names at all, in the time that it takes with all of that near. A kernel that works on parts of
    /// many tensors is given the begins of all of them, and reads little of each.
    fn most(&self, id: u32) -> f32 {
        let many = self.get(id).filter(|kind| kind.has_many);
        let function = many.and_then(|kind| self.functions.get(kind.function as usize));
        let near = function.and_then(|function| function.near);
        near.map_or(f32::INFINITY, |ns_per_byte| CACHED * self.near * ns_per_byte)
    }

    /// The same, with what it is known by.
    pub fn known(&self, id: u32) -> (f32, Basis) {
        let (gain, basis) = self.known_by_times(id);
        (self.at_most(id, gain), basis)
    }

    /// So much, but no more than [`most`](Self::most), where operands are not weighed each by itself.
    fn at_most(&self, id: u32, gain: f32) -> f32 {
        let is_weighed = self.get(id).is_some_and(|kind| kind.is_weighed);
        if is_weighed { gain } else { gain.min(self.most(id)) }
    }

    fn known_by_times(&self, id: u32) -> (f32, Basis) {
        let Some(kind) = self.get(id) else { return (self.once, Basis::Nothing) };
        // Its parts are weighed by how often they cross the link.
        if kind.is_weighed {
            return (1.0, Basis::Measured);
        }
        if let Some(slope) = kind.samples.slope() {
            return (slope, Basis::Measured);
        }
        let Some(function) = self.functions.get(kind.function as usize) else { return (self.once, Basis::Nothing) };
        // A copy reads each byte once.
        if function.name == COPY {
            return (self.once, Basis::Measured);
        }
        if self.is_of_new_shape(id) {
            return (self.once, Basis::Nothing);
        }
        // More than all of its time it cannot gain. Its own time counts from the second measurement on, or if it is like others'.
        let is_like = |most: &Level| {
            let all = &function.all_far;
            all.count >= 4 && all.off < 0.2 * all.ns && (most.ns / most.pass_ns - all.ns).abs() < 0.2 * all.ns
        };
        let known = kind.samples.most.filter(|most| most.pass_ns > 0.0 && (most.count > 1 || is_like(most)));
        let Some(known) = known else {
            let all = &function.all_far;
            return match function.gain() {
                Some(gain) => (gain, Basis::Measured),
                // Others of the function were measured far, and take alike.
                None if function.near.is_none() && all.count >= 4 && all.off < 0.2 * all.ns => {
                    ((all.ns - all.off).max(self.once), Basis::Guess)
                }
                None => (self.once, Basis::Nothing),
            };
        };
        let (pass, ns) = (known.pass_ns, (known.ns - known.off).max(0.0));
        let rest = ns - function.near.unwrap_or(0.0) * kind.bytes as f32;
        // What the function's other launches gain holds for this one only if it explains at least half of its time.
        let explains = |gain: &f32| 2.0 * (function.near.unwrap_or(0.0) * kind.bytes as f32 + gain * pass) >= ns;
        match function.gain().filter(explains) {
            Some(gain) => (gain.min(ns / pass), Basis::Measured),
            // What a kernel computes meanwhile is not known yet. Near the time of one pass it is nothing.
            None => ((rest / pass).max(0.0).max(self.once.min(ns / pass)), Basis::Guess),
        }
    }

    /// What a nanosecond of pass less is credited with: nothing that was not measured. And what one more is charged: what it could be.
    /// What was measured is told to within [`operands::TOLD`], so that much less is credited and more charged.
    pub fn credit(&self, id: u32, saved_ns: f32) -> f32 {
        if saved_ns > 0.0 {
            let gain = match self.known(id) {
                (gain, Basis::Measured) => gain,
                (gain, Basis::Guess) => gain.min(self.once),
                (_, Basis::Nothing) => 0.0,
            };
            return gain * (1.0 - operands::TOLD);
        }
        let gain = match self.known_by_times(id) {
            (gain, Basis::Measured | Basis::Guess) => gain * (1.0 + operands::TOLD),
            (_, Basis::Nothing) => UNKNOWN,
        };
        self.at_most(id, gain)
    }

    pub fn is_unsure(&self, id: u32) -> bool {
        self.known(id).1 != Basis::Measured
    }

    /// How often the operand that can be read most often can cross the link, where times were measured of launches of its very shape.
    fn most_by_time(&self, id: u32) -> f32 {
        let Some(kind) = self.get(id) else { return f32::INFINITY };
        kind.uses.iter().map(|part| self.bound_if_known(id, part.operand)).reduce(f32::max).unwrap_or(f32::INFINITY)
    }

    /// What is charged for a pass over an operand of a launch of which nothing was measured; `None` where something was.
    pub fn charge_unmeasured(&self, id: u32, operand: Option<u8>) -> Option<f32> {
        let is_unmeasured = self.known_by_times(id).1 == Basis::Nothing;
        is_unmeasured.then(|| self.at_most(id, UNKNOWN.min((1.0 + operands::TOLD) * self.bound(id, operand))))
    }

    pub fn guessed(&mut self, kind: u32) {
        let function = self.get(kind).map(|kind| kind.function);
        if let Some(function) = function.and_then(|function| self.functions.get_mut(function as usize)) {
            function.guesses += 1;
        }
    }

    /// A move that was to be made on a guess was not made.
    pub fn not_guessed(&mut self, kind: u32) {
        let function = self.get(kind).map(|kind| kind.function);
        if let Some(function) = function.and_then(|function| self.functions.get_mut(function as usize)) {
            function.guesses = function.guesses.saturating_sub(1);
        }
    }

    /// Whether a move may still be made on a guess.
    pub fn may_guess(&self, kind: &Kind) -> bool {
        self.functions.get(kind.function as usize).is_some_and(|function| function.guesses < 2)
    }

    /// What was measured of a function, for people.
    pub fn reuse(&self, function: u32) -> Option<f64> {
        let known = self.functions.get(function as usize)?;
        let mut weighed = self.kinds.iter().filter(|kind| kind.function == function && kind.is_weighed);
        let (sum, count) = weighed
            .by_ref()
            .flat_map(|kind| &kind.uses)
            .filter(|part| part.operand.is_some())
            .fold((0.0, 0.0), |(sum, count), part| (sum + f64::from(part.part), count + 1.0));
        if count > 0.0 {
            return Some(sum / count + f64::from(1.0 - self.once));
        }
        known.gain().map(|gain| f64::from(gain + 1.0 - self.once))
    }
}
