//! The one type: told of what happens, asked what to do.

use crate::account::Account;
use crate::cycle::{Cycle, HISTORY};
use crate::extents::Extents;
use crate::interface::{Launch, Range, Reader, Settings, Told, Whereabouts, Why};
use crate::kinds::{self, Kinds, NONE};
use crate::timeline::Timeline;

/// What copies and fills are called among the functions.
const COPY: u64 = u64::MAX;
/// Measurements under way that are remembered.
const PENDING: usize = 64;
/// Launches that lose less by far memory than this are not worth a question, nanoseconds.
const LEAST: f32 = 20_000.0;
/// Questions in a cycle that may be answered with no; each looks at every extent.
const VAIN: u32 = 64;
/// Cycles after which what is learnt is looked at only now and then.
const LEARNT: u32 = 16;

/// What should lie near for one home GPU. See the crate's page.
#[derive(Debug)]
pub struct Tiers {
    pub(crate) settings: Settings,
    pub(crate) extents: Extents,
    pub(crate) kinds: Kinds,
    pub(crate) cycle: Cycle,
    pub(crate) timeline: Timeline,
    pub(crate) account: Account,
    /// Cycles so far.
    pub(crate) cycles: u64,
    /// Cycles since the program last began to do something else.
    pub(crate) seen: u32,
    /// A quarter of the cycles that it did the same before, and the shorter of the last two times.
    era: u32,
    pub(crate) patience: u32,
    /// Which part of a cycle's launches came otherwise than in the cycle before, over the last ones.
    pub(crate) surprises: f32,
    /// Which part of a cycle's uses was expected, over the last ones.
    expected: f32,
    /// The last launch, what it saved, and whether something was moved for it since.
    last: (u32, f32),
    moved_for_last: bool,
    /// Questions in this cycle that were answered with no.
    pub(crate) vain: u32,
    pending: [(u64, u32, f32); PENDING],
    ended: bool,
    /// The position up to which the densities know what the program does.
    pub(crate) learnt: u64,
    built: (u64, u64),
    measured: u64,
    swaps: u64,
    moved_in: u64,
    moved_out: u64,
}

impl Tiers {
    /// Knows of nothing yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let once = (0..settings.links.far.len() as u8).map(|place| settings.links.once(place)).fold(1.0, f64::min);
        Self {
            extents: Extents::default(),
            kinds: Kinds::new(once),
            cycle: Cycle::new(),
            timeline: Timeline::default(),
            account: Account::default(),
            cycles: 0,
            seen: 0,
            era: u32::MAX,
            patience: 0,
            surprises: 0.0,
            expected: 0.0,
            learnt: 0,
            last: (NONE, 0.0),
            moved_for_last: false,
            vain: 0,
            pending: [(u64::MAX, NONE, 0.0); PENDING],
            ended: false,
            built: (0, 0),
            measured: 0,
            swaps: 0,
            moved_in: 0,
            moved_out: 0,
            settings,
        }
    }

    /// A block has begun. All of them are told, near ones too: what lies near is what may have to leave.
    pub fn block_began(&mut self, address: u64, bytes: u64) {
        self.extents.block_began(Range::of(address, bytes), self.cycles);
    }

    /// A block has ended, which began at this address.
    pub fn block_ended(&mut self, address: u64) {
        self.extents.block_ended(address);
    }

    /// Memory of living blocks lies elsewhere now, whoever moved it, or must stay where it is from now on, or need not any more.
    pub fn placed(&mut self, range: Range) {
        self.extents.placed(range);
        self.moved_for_last = true;
    }

    /// A range that a [`Swap`](crate::Swap) named did not move. It is left alone for a while, longer each time.
    pub fn stayed(&mut self, range: Range) {
        self.extents.stayed(range, self.cycles);
    }

    /// A swap was carried out, or part of it; what it took, in all.
    pub fn moved(&mut self, bytes_in: u64, bytes_out: u64, took_ns: u64) {
        self.account.spent(took_ns as f64);
        self.swaps += 1;
        self.moved_in += bytes_in;
        self.moved_out += bytes_out;
    }

    /// A launch is about to be made. `words` are those of its parameters that lie in the pool, in any order, pointers in by-value
    /// structs and tables included; of a graph, those of all its nodes.
    ///
    /// About 100 ns for a launch of four words that was seen before, where a cycle has a thousand of them, and 170 for eight; 0.6 µs for six
    /// words where it has five thousand; a microsecond and more for a new one (`benches/launch.rs`, beside other work).
    #[inline]
    pub fn launched(&mut self, function: u64, words: &[u64], at: &impl Whereabouts) -> Launch {
        let hash = kinds::hash(function, words);
        let mut kind = self.kinds.find(hash);
        let mut is_new = false;
        if kind == NONE {
            kind = self.add(hash, function);
            is_new = true;
        }
        if is_new || self.is_stale(kind) {
            self.kinds.resolve(kind, words, &mut self.extents, self.cycles);
        }
        self.note(kind, is_new, at)
    }

    /// Ranges are about to be copied or filled.
    pub fn copied(&mut self, ranges: &[Range], at: &impl Whereabouts) -> Launch {
        let hash = kinds::hash_of_ranges(COPY, ranges);
        let mut kind = self.kinds.find(hash);
        let is_new = kind == NONE;
        if is_new {
            kind = self.add(hash, COPY);
        }
        if is_new || self.is_stale(kind) {
            self.kinds.resolve_ranges(kind, ranges, &mut self.extents, self.cycles);
        }
        Launch { time_it: false, ..self.note(kind, is_new, at) }
    }

    #[cold]
    fn add(&mut self, hash: u64, function: u64) -> u32 {
        if self.kinds.is_full() {
            let names = self.kinds.forget_before(self.cycle.position.saturating_sub(HISTORY / 2));
            self.cycle.rename(&names);
            for (_, kind, _) in &mut self.pending {
                *kind = names.get(*kind as usize).copied().unwrap_or(NONE);
            }
            self.last = (NONE, 0.0);
            self.built = (u64::MAX, 0);
            self.timeline = Timeline::default();
        }
        self.kinds.add(hash, function, self.cycle.position)
    }

    #[inline]
    fn is_stale(&self, kind: u32) -> bool {
        self.kinds.get(kind).is_none_or(|kind| {
            let ended = |part: &kinds::Use| {
                self.extents.get(part.slot).is_none_or(|extent| extent.generation != part.generation)
            };
            Kinds::is_stale(kind, &self.extents) || kind.uses.iter().any(ended)
        })
    }

    #[inline]
    fn note(&mut self, kind: u32, is_new: bool, at: &impl Whereabouts) -> Launch {
        if self.moved_for_last {
            self.count_last(at);
        }
        let id = self.cycle.position;
        let (mut pass_ns, mut may_ns, mut saved_ns, mut bytes) = (0.0, 0.0, 0.0, 0);
        let Some(known) = self.kinds.get_mut(kind) else { return Launch { id, ..Launch::default() } };
        for part in &known.uses {
            self.extents.refresh(part.slot, &self.settings.links, at);
            if let Some(extent) = self.extents.get_mut(part.slot) {
                pass_ns += part.part * extent.pass_ns;
                may_ns += part.part * extent.may_ns;
                saved_ns += part.part * extent.saved_ns();
                bytes += extent.range.bytes();
                extent.last_cycle = self.cycles;
                extent.last = id;
            }
        }
        known.names(bytes);
        let last = (!is_new).then_some(known.last);
        known.last = id;
        let is_due = known.asked_again <= id;
        let function = known.function;
        if saved_ns.abs() > 1.0
            && let Some(known) = self.kinds.get(kind)
        {
            let gain = self.kinds.gain(known).0;
            self.account.saved(f64::from(gain * saved_ns));
        }
        self.last = (kind, saved_ns);
        let ends = self.cycle.push(kind, function, last, self.settings.window);
        self.ended |= ends;
        let time_it = self.kinds.wants_timing(kind, pass_ns > 0.0);
        Launch { id, ask: is_due && may_ns > 0.0 && self.may_ask(kind, may_ns), time_it, tell_time: ends }
    }

    #[inline]
    fn may_ask(&self, kind: u32, pass_ns: f32) -> bool {
        self.vain < VAIN
            && pass_ns > LEAST / 64.0
            && self.kinds.get(kind).is_some_and(|known| {
                let here = self.kinds.gain(known).0 * pass_ns;
                let cycle: f32 = known
                    .uses
                    .iter()
                    .filter_map(|part| self.extents.get(part.slot))
                    .map(|extent| extent.density * extent.may_ns)
                    .sum();
                here.max(cycle) > LEAST.max(pass_ns)
            })
    }

    /// What was moved for the last launch was moved before it ran.
    #[cold]
    fn count_last(&mut self, at: &impl Whereabouts) {
        self.moved_for_last = false;
        let (kind, before) = self.last;
        let Some(known) = self.kinds.get(kind) else { return };
        let mut saved = 0.0;
        for part in &known.uses {
            self.extents.refresh(part.slot, &self.settings.links, at);
            saved += self.extents.get(part.slot).map_or(0.0, |extent| part.part * extent.saved_ns());
        }
        self.account.saved(f64::from(self.kinds.gain(known).0 * (saved - before)));
        self.last.1 = saved;
    }

    /// Whether a launch of this function should be timed, for whoever has to prepare that before it knows the launch. Of a launch
    /// itself, [`Launch::time_it`] says so.
    #[must_use]
    pub fn wants_timing(&self, function: u64) -> bool {
        self.kinds.function_wants_timing(function)
    }

    /// This launch is being timed: what it reads lies where it lies now.
    pub fn timing(&mut self, launch: u64, at: &impl Whereabouts) {
        let kind = self.cycle.kind(launch);
        let Some(known) = self.kinds.get(kind) else { return };
        let mut pass_ns = 0.0;
        for part in &known.uses {
            self.extents.refresh(part.slot, &self.settings.links, at);
            pass_ns += self.extents.get(part.slot).map_or(0.0, |extent| part.part * extent.pass_ns);
        }
        self.pending[launch as usize % PENDING] = (launch, kind, pass_ns);
    }

    /// It took so long, from its start to its end on the GPU.
    pub fn timed(&mut self, launch: u64, nanoseconds: u64) {
        let (id, kind, pass_ns) = self.pending[launch as usize % PENDING];
        if id == launch {
            self.pending[launch as usize % PENDING] = (u64::MAX, NONE, 0.0);
            self.kinds.timed(kind, pass_ns, nanoseconds as f32);
            self.measured += 1;
        }
    }

    /// The time, on a clock that only goes forward, when [`Launch::tell_time`] asks for it. What a cycle showed is worked out here:
    /// 10 ns for each use of an extent in it, for the first cycles and then for each eighth while nothing changes.
    pub fn time_is(&mut self, now_ns: u64, at: &impl Whereabouts) {
        let rate = self.settings.share / 10.0;
        self.account.time_is(now_ns, rate);
        if !std::mem::take(&mut self.ended) {
            return;
        }
        self.cycles += 1;
        self.vain = 0;
        self.seen += 1;
        let length = self.cycle.length();
        self.account.cycle(now_ns, length, self.timeline.bytes, self.cycles);
        let span = self.cycle.last(self.settings.window);
        let launches = (span.end - span.start).max(1);
        let surprising = std::mem::take(&mut self.cycle.surprises) as f32 / launches as f32;
        self.surprises += (surprising - self.surprises) * 0.25;
        let state = (self.extents.shape, self.measured);
        if self.seen > LEARNT && surprising == 0.0 && self.built == state && !self.cycles.is_multiple_of(8) {
            return;
        }
        self.built = state;
        let before = self.timeline.length();
        self.timeline.rebuild(&self.cycle, &self.kinds, &self.extents, self.settings.window);
        if before.abs_diff(self.timeline.length()) > before / 4 {
            // Counted by other cycles.
            self.extents.forget(&self.timeline.passes);
        }
        let expected = self.extents.cycle(&self.timeline.passes, self.seen, self.cycles);
        if expected < 0.5 * self.expected {
            self.extents.forget(&self.timeline.passes);
            self.patience = (self.seen / 4).min(self.era);
            self.era = self.seen / 4;
            self.seen = 1;
            self.account.changed();
        }
        self.expected += (expected - self.expected) * 0.25;
        if self.cycles.is_multiple_of(4) {
            self.extents.forget_borders(self.cycles);
        }
        self.learnt = self.cycle.position;
        self.refresh_all(at);
    }

    /// The program does something else than what was learnt last.
    pub(crate) fn is_outdated(&self) -> bool {
        self.cycle.lost() > self.learnt
    }

    pub(crate) fn refresh_all(&mut self, at: &impl Whereabouts) {
        let (mut near, mut place) = (0, None);
        for slot in 0..self.extents.slots() as u32 {
            self.extents.refresh(slot, &self.settings.links, at);
            if let Some(extent) = self.extents.get(slot) {
                near += extent.near_bytes;
                if extent.far_bytes > 0 {
                    place = place.max(Some((extent.far_bytes, extent.place)));
                }
            }
        }
        if let Some((_, place)) = place {
            let swap_all = near as f64 * self.settings.links.swap_ns_per_byte(place);
            self.account.grant(swap_all);
        }
    }

    /// Why nothing moves any more; once for each time that it stopped.
    pub fn stopped(&mut self) -> Option<Why> {
        self.account.tell()
    }

    /// Nanoseconds that launches took less than they would have where memory first lay, as [`told`](Self::told) has it among much else.
    #[must_use]
    pub fn saved_ns(&self) -> f64 {
        self.account.saved_ns
    }

    /// Totals, with the `most` functions that lose most.
    pub fn told(&mut self, most: usize, at: &impl Whereabouts) -> Told {
        self.refresh_all(at);
        let span = self.cycle.last(self.settings.window);
        let mut readers: Vec<(u64, f64)> = vec![(0, 0.0); self.kinds.functions().len()];
        for known in span.filter_map(|position| self.kinds.get(self.cycle.kind(position))) {
            let gain = f64::from(self.kinds.gain(known).0);
            let reader = &mut readers[known.function as usize];
            for (part, extent) in known.uses.iter().filter_map(|part| Some((part, self.extents.get(part.slot)?))) {
                reader.0 += (extent.far_bytes as f64 * f64::from(part.part)) as u64;
                reader.1 += gain * f64::from(part.part * extent.pass_ns);
            }
        }
        let mut readers: Vec<Reader> = readers
            .into_iter()
            .zip(0u32..)
            .filter(|((far_bytes, _), _)| *far_bytes > 0)
            .map(|((far_bytes, lost_ns), index)| {
                let function = self.kinds.functions()[index as usize].name;
                Reader { function, far_bytes, reuse: self.kinds.reuse(index), lost_ns }
            })
            .collect();
        readers.sort_by(|a, b| b.lost_ns.total_cmp(&a.lost_ns));
        readers.truncate(most);
        Told {
            launches: self.cycle.position,
            cycles: self.cycles,
            cycle: self.cycle.length(),
            cycle_ns: self.account.cycle_ns,
            swaps: self.swaps,
            moved_in: self.moved_in,
            moved_out: self.moved_out,
            spent_ns: self.account.spent_ns,
            saved_ns: self.account.saved_ns,
            near: self.extents.live().map(|(_, extent)| extent.near_bytes).sum(),
            far: self.extents.live().map(|(_, extent)| extent.far_bytes).sum(),
            extents: self.extents.len(),
            readers,
            stopped: self.account.why(),
        }
    }
}
