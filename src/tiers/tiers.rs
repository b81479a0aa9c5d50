//! The one type: told of what happens, asked what to do.

use crate::account::Account;
use crate::cycle::{self, Cycle, HISTORY, SURPRISES};
use crate::extents::{Extents, Least};
use crate::interface::{Launch, Ledger, Range, Reader, Settings, Swap, Timed, Told, Whereabouts, Why};
use crate::kinds::{self, COPY, Kinds, Moment, NONE, Worth};
use crate::links::Links;
use crate::operands::{self, MOST as MOST_OPERANDS, Passes};
use crate::timeline::Timeline;
use crate::unmeasured::Unmeasured;
use std::fmt::Write;

/// Measurements under way that are remembered: programs run some hundred launches ahead of the device.
const PENDING: usize = 1024;
/// Launches that lose less by far memory than this are not worth a question, nanoseconds.
const LEAST: f32 = 20_000.0;
/// Questions in a cycle that may be answered with no; each looks at every extent.
const VAIN: u32 = 64;
/// What a launch loses by far memory that may move is worth a question each time from so many nanoseconds on: some hundred times what one takes. A cycle is as long as
/// what a program does between two waits, so that a number of questions for each would leave most of a long one without any.
const WORTH_ASKING: f32 = 5_000_000.0;
/// The same where the program has done the same for so many cycles.
const VAIN_LATER: u32 = 8;
const LATER: u32 = 256;
/// How much one launch says of which part of them is strange: about as many as this is one part of count.
const STRANGE: f32 = 1.0 / 32.0;
/// Launches for which uses are counted on to come as they came last, where no cycle is known.
const AHEAD: u64 = 256;
/// Nanoseconds that a launch of which nothing was measured is charged with from which on its time is waited for: some hundred times what that takes beside it.
const WORTH_HEARING: f32 = 1_000_000.0;
/// What is charged for what a launch's time leaves room for: that is measured to within so much.
const CERTAIN: f32 = 1.0 + operands::TOLD;
/// Cycles within which it can be paid to bring something back that loses less in them than that takes.
const EARNED: f64 = 8.0;
/// Cycles after which what is learnt is looked at only now and then.
const LEARNT: u32 = 16;

/// Which part of what a cycle uses at least was expected of it, where the memory is the same each time.
const EXPECTED: f32 = 0.7;

/// Launches for each extent after which it is looked at again.
const SLOT: u64 = 4;

/// A launch whose time is not known yet.
#[derive(Clone, Copy, Debug)]
struct Pending {
    launch: u64,
    kind: u32,
    /// Nanoseconds of far pass that it has, and of one pass over each operand.
    pass_ns: f32,
    passes: Passes,
    /// The same as if a pass were as fast as any can be.
    least: Passes,
}

impl Default for Pending {
    fn default() -> Self {
        Self { launch: u64::MAX, kind: NONE, pass_ns: 0.0, passes: Passes::default(), least: Passes::default() }
    }
}

/// A swap before a launch of this kind is to find out what that gains.
#[derive(Debug)]
pub(crate) struct Guess {
    pub kind: u32,
    /// Nothing was measured of it near.
    pub is_guess: bool,
    /// Operands of which it is not known how often they are read.
    pub tried: Vec<u8>,
}

/// What moves took beside what they were reckoned with.
#[derive(Debug)]
struct Prices {
    /// The links as they were told.
    told: Links,
    /// Nanoseconds that the last moves were reckoned with by that, and took.
    reckoned_ns: f64,
    took_ns: f64,
    /// How many times as long they take by what is reckoned with now.
    times: f64,
}

impl Prices {
    fn new(told: Links) -> Self {
        Self { told, reckoned_ns: SWAPS_AT_FIRST, took_ns: SWAPS_AT_FIRST, times: 1.0 }
    }

    /// A move took so long. Answers how many times as long as told moves are to be reckoned with, if that is something else than before.
    fn took(&mut self, place: u8, bytes_in: u64, bytes_out: u64, took_ns: f64) -> Option<f64> {
        // How many ranges it had is not told; usually it is one each way.
        let reckoned_ns = self.told.swap_ns(place, 2, bytes_in, bytes_out);
        self.reckoned_ns = self.reckoned_ns * SWAPS_KEPT + reckoned_ns;
        // One that waited for something else for long says nothing of the others.
        self.took_ns = self.took_ns * SWAPS_KEPT + took_ns.min(MOST_TIMES * reckoned_ns);
        let times = (self.took_ns / self.reckoned_ns).clamp(1.0, MOST_TIMES);
        ((times / self.times - 1.0).abs() > PRICE_TOLD).then(|| {
            self.times = times;
            times
        })
    }
}

/// Nanoseconds of moves that are taken to have come as they were reckoned with before the first one, and how much of all that each later move leaves of it.
const SWAPS_AT_FIRST: f64 = 3e6;
const SWAPS_KEPT: f64 = 0.9;
/// So many times what it was reckoned with counts of a move at most.
const MOST_TIMES: f64 = 5.0;
/// A difference of less changes nothing.
const PRICE_TOLD: f64 = 0.15;

/// What should lie near for one home GPU. See the crate's page.
#[derive(Debug)]
pub struct Tiers {
    /// With what moves are found to cost in its links.
    pub(crate) settings: Settings,
    prices: Prices,
    pub(crate) extents: Extents,
    pub(crate) kinds: Kinds,
    pub(crate) cycle: Cycle,
    pub(crate) timeline: Timeline,
    pub(crate) account: Account,
    unmeasured: Unmeasured,
    /// Cycles so far.
    pub(crate) cycles: u64,
    /// Cycles since the program last began to do something else.
    pub(crate) seen: u32,
    /// A quarter of the cycles that it did the same before, and the shorter of the last two times.
    era: u32,
    pub(crate) patience: u32,
    /// Which part of a cycle's launches came otherwise than in the cycle before, over the last ones.
    pub(crate) surprises: f32,
    /// Which part of the last launches is of functions and shapes that the last cycle did not have.
    strange: f32,
    /// Which part of a cycle's uses was expected, over the last ones.
    expected: f32,
    /// The last launch and what the account was told of it, and whether something was moved for it since.
    last: (u32, Worth),
    moved_for_last: bool,
    /// What the last swap before a launch was to find out, if anything.
    pub(crate) guess: Option<Guess>,
    /// What moves now moves in front of the last launch, and not behind it.
    pub(crate) moves_for_last: bool,
    /// When the last launch's kind was launched before.
    pub(crate) previous: Option<u64>,
    /// The position up to which extents know when they were used.
    pub(crate) noted: u64,
    /// The position before which nothing is asked to come back, after that could not be had.
    pub(crate) back_again: u64,
    /// The same where everything was to come back.
    pub(crate) all_back_again: u64,
    /// The same for any swap, while nothing can be paid.
    pub(crate) poor_until: u64,
    pub(crate) poor_for: u64,
    /// Questions in this cycle that were answered with no.
    pub(crate) vain: u32,
    pending: Vec<Pending>,
    ended: bool,
    /// The position up to which the densities know what the program does.
    pub(crate) learnt: u64,
    built: (u64, u64),
    /// The cycle in which borders were last forgotten.
    tidied: u64,
    /// The least that any extent that could leave loses, and when that was worked out: [`Extents::epoch`].
    pub(crate) least: Least,
    measured: u64,
    swaps: u64,
    moved_in: u64,
    moved_out: u64,
}

impl Tiers {
    /// Moves may take another part of the time from now on ([`Settings::share`]).
    pub fn set_share(&mut self, share: f64) {
        self.settings.share = share;
        self.account.set_share(share);
    }

    /// Knows of nothing yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let once = (0..settings.links.far.len() as u8).map(|place| settings.links.once(place)).fold(1.0, f64::min);
        Self {
            extents: Extents::default(),
            kinds: Kinds::new(once, settings.links.near),
            cycle: Cycle::new(),
            timeline: Timeline::default(),
            account: Account::new(settings.share),
            unmeasured: Unmeasured::default(),
            prices: Prices::new(settings.links.clone()),
            cycles: 0,
            seen: 0,
            era: u32::MAX,
            patience: 0,
            surprises: 0.0,
            strange: 0.0,
            expected: 0.0,
            learnt: 0,
            last: (NONE, Worth::default()),
            moved_for_last: false,
            guess: None,
            moves_for_last: false,
            previous: None,
            noted: 0,
            back_again: 0,
            all_back_again: 0,
            poor_until: 0,
            poor_for: 0,
            vain: 0,
            pending: vec![Pending::default(); PENDING],
            ended: false,
            built: (0, 0),
            tidied: 0,
            least: Least::default(),
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

    /// So many bytes more belong to a block from now on, from where it ended before: an allocator maps more memory behind what it has.
    pub fn block_grew(&mut self, block: u64, address: u64, bytes: u64) {
        self.extents.block_grew(block, Range::of(address, bytes), self.cycles);
    }

    /// A block has ended, which began at this address.
    pub fn block_ended(&mut self, address: u64) {
        self.extents.block_ended(address);
    }

    /// Memory of living blocks lies elsewhere now, whoever moved it, or must stay where it is from now on, or need not any more.
    pub fn placed(&mut self, range: Range) {
        self.extents.placed(range);
        self.moved_for_last = self.moves_for_last;
    }

    /// A range that a [`Swap`](crate::Swap) named did not move. It is left alone for a while, longer each time.
    pub fn stayed(&mut self, range: Range) {
        self.extents.stayed(range, self.cycles);
    }

    /// A [`Swap`](crate::Swap) was not begun, for a reason that says nothing of what it names: it is made at a later launch, if it is worth it then. What it was to
    /// find out is not found out, and was no try.
    pub fn not_begun(&mut self, swap: &Swap) {
        if !swap.time_it {
            return;
        }
        if let Some(Guess { kind, is_guess, tried }) = self.guess.take() {
            if is_guess {
                self.kinds.not_guessed(kind);
            }
            tried.into_iter().for_each(|operand| self.kinds.is_not_tried(kind, operand));
        }
    }

    /// The parts of a range that are used by themselves, as far as launches have shown, in order of address. What is of no known block is
    /// left out.
    #[must_use]
    pub fn parts(&self, range: Range) -> Vec<Range> {
        let extents = self.extents.over(range).filter_map(|slot| self.extents.get(slot));
        extents.map(|extent| extent.range.meet(&range)).collect()
    }

    /// A swap was carried out, or part of it; what it took, in all, and which part of that was making memory there, as for what leaves first.
    ///
    /// That is paid as all else is, and says nothing of what later moves take, which find it made: the driver takes ten times as long to
    /// make memory of the host as to fill it, and longer still where nobody had touched it. Who reckoned with that for good would move nothing any more.
    pub fn moved(&mut self, bytes_in: u64, bytes_out: u64, took_ns: u64, made_ns: u64) {
        self.account.spent(took_ns as f64);
        let (_, place) = self.extents.totals();
        let moving_ns = took_ns.saturating_sub(made_ns) as f64;
        if bytes_in + bytes_out > 0
            && let Some(times) = self.prices.took(place.unwrap_or(0), bytes_in, bytes_out, moving_ns)
        {
            self.settings.links = self.prices.told.slowed(times);
            // What bringing each back takes is reckoned anew.
            self.extents.unsettle_all();
        }
        self.swaps += 1;
        self.moved_in += bytes_in;
        self.moved_out += bytes_out;
    }

    /// A launch is about to be made. `words` are those of its parameters that lie in the pool, in any order, pointers in by-value
    /// structs and tables included; of a graph, those of all its nodes. `shape`: the same for launches that work on as much in the same
    /// way, as a hash of the grid and of sizes among the parameters.
    ///
    /// What it costs is printed by `benches/launch.rs`; a launch that is new costs a microsecond and more.
    ///
    /// It is made anew for each type of `at`, in the crate of that: what it goes through each time has to be marked to be inlined there, or each look into a list is a call through
    /// a table of the loader.
    #[inline]
    pub fn launched(&mut self, function: u64, shape: u64, words: &[u64], at: &impl Whereabouts) -> Launch {
        let hash = kinds::hash(function, words);
        let (kind, is_new) = self.find(hash, function);
        if is_new || self.is_stale(kind) {
            self.catch_up();
            let now = Moment { position: self.cycle.position, cycle: self.cycles };
            self.kinds.resolve(kind, shape, words, &mut self.extents, now);
        }
        self.note(kind, is_new, at)
    }

    /// Ranges are about to be copied or filled.
    pub fn copied(&mut self, ranges: &[Range], at: &impl Whereabouts) -> Launch {
        let (kind, is_new) = self.find(kinds::hash_of_ranges(COPY, ranges), COPY);
        if is_new || self.is_stale(kind) {
            self.kinds.resolve_ranges(kind, ranges, &mut self.extents, self.cycles);
        }
        Launch { time_it: false, hear_it: false, ..self.note(kind, is_new, at) }
    }

    #[inline]
    fn find(&mut self, hash: u64, function: u64) -> (u32, bool) {
        let expected = self.cycle.expected();
        let kind = if self.kinds.is(expected, hash) { expected } else { self.kinds.find(hash) };
        if kind == NONE { (self.add(hash, function), true) } else { (kind, false) }
    }

    #[cold]
    fn add(&mut self, hash: u64, function: u64) -> u32 {
        if self.kinds.is_full() {
            let names = self.kinds.forget_before(self.cycle.position.saturating_sub(HISTORY / 2));
            self.cycle.rename(&names);
            self.unmeasured.rename(&names);
            for Pending { kind, .. } in &mut self.pending {
                *kind = names.get(*kind as usize).copied().unwrap_or(NONE);
            }
            self.last = (NONE, Worth::default());
            self.guess = None;
            self.built = (u64::MAX, 0);
            self.timeline = Timeline::default();
        }
        self.kinds.add(hash, function, self.cycle.position)
    }

    /// Whether the extents that it names have to be looked up again.
    #[inline]
    fn is_stale(&self, kind: u32) -> bool {
        self.kinds.hot(kind).is_none_or(|hot| hot.epoch != self.extents.epoch) && self.has_ended(kind)
    }

    #[cold]
    fn has_ended(&self, kind: u32) -> bool {
        self.kinds.get(kind).is_none_or(|kind| {
            let ended = |part: &kinds::Use| {
                self.extents.get(part.slot).is_none_or(|extent| extent.generation != part.generation)
            };
            Kinds::is_stale(kind, &self.extents, self.cycles) || kind.uses.iter().any(ended)
        })
    }

    #[inline]
    fn note(&mut self, kind: u32, is_new: bool, at: &impl Whereabouts) -> Launch {
        self.launch_is_over(at);
        self.extents.settle(&self.settings.links, at);
        let id = self.cycle.position;
        let version = self.kinds.function_of(kind).map_or(0, |function| function.version);
        let Some(hot) = self.kinds.hot_mut(kind) else { return Launch { id, ..Launch::default() } };
        let last = (!is_new).then_some(hot.last);
        hot.last = id;
        self.previous = last;
        if is_new || hot.epoch != self.extents.epoch || hot.version != version {
            self.look(kind, version, at);
        } else {
            hot.settled = true;
        }
        let Some(&hot) = self.kinds.hot(kind) else { return Launch { id, ..Launch::default() } };
        let worth = hot.worth;
        let is_at_stake = worth.saved_ns.abs() > 1.0 || worth.lost_ns > 1.0;
        let must_return = (is_at_stake || self.account.is_wrong()) && self.must_return(kind);
        if is_at_stake {
            self.account.saved(f64::from(worth.saved_ns));
        }
        self.unmeasured.launched();
        if worth.charged_ns > 1.0 {
            self.note_charges(kind, false, at);
        }
        self.last = (kind, worth);
        if let Some(shape) = hot.shape() {
            self.strange = cycle::drift(self.strange, !self.timeline.has_shape(shape), STRANGE);
        }
        let ends = self.cycle.push(kind, hot.function, last, self.settings.window);
        self.ended |= ends;
        let time_it = self.kinds.wants_timing(kind, hot.pass_ns > 0.0);
        let vain = if self.seen < LATER { VAIN } else { VAIN_LATER };
        // What was not worth it in the cycle that is known says nothing of what the program does beside it.
        let is_elsewhere = self.is_elsewhere();
        let is_due = (hot.asked_again <= id || is_elsewhere) && self.vain < vain || hot.asks_each_time;
        let ask = (hot.asks || hot.asks_elsewhere && is_elsewhere) && is_due && self.poor_until <= id || must_return;
        let hear_it = time_it && hot.worth.charged_ns > WORTH_HEARING && self.kinds.was_never_timed(kind);
        Launch { id, ask, time_it, hear_it, tell_time: ends }
    }

    /// A launch that reads from afar what would be near, and may lose more by it than there is to lose. Bringing that back is paid
    /// for already.
    pub(crate) fn must_return(&self, id: u32) -> bool {
        self.kinds.hot(id).is_some_and(|hot| self.loses_too_much(hot)) && self.cycle.position >= self.back_again
            || self.account.is_wrong() && self.cycle.position >= self.all_back_again
    }

    /// More is lost than there was to lose, or what was gained is contradicted, and something can come back: that is paid for already.
    pub(crate) fn owes(&self) -> bool {
        self.account.reserve > 0.0 && (self.account.free() < 0.0 || self.account.is_wrong())
    }

    /// Whether a launch may lose more by what is farther than at first than there is to lose.
    pub(crate) fn loses_too_much(&self, hot: &kinds::Hot) -> bool {
        hot.worth.saved_ns < -1.0 && f64::from(-hot.worth.saved_ns) > self.account.free()
    }

    /// What is charged for a launch as memory lies now, extent by extent, nanoseconds.
    pub(crate) fn charges_of(&self, id: u32, at: &impl Whereabouts) -> Vec<(u32, f64)> {
        let charge = self.kinds.credit(id, -1.0);
        let of = |part: &kinds::Use| Some((part.slot, self.charge_for(id, part, charge, at)?.1));
        self.kinds.get(id).map_or_else(Vec::new, |known| known.uses.iter().filter_map(of).collect())
    }

    /// Nanoseconds of a pass that one part of it has more than at first, and what is charged for them, where it loses anything by that.
    fn charge_for(&self, id: u32, part: &kinds::Use, charge: f32, at: &impl Whereabouts) -> Option<(f64, f64)> {
        let read = self.extents.read(part.slot, part.share, self.cycles, &self.settings.links, at)?;
        let lost_ns = -read.saved_ns;
        (lost_ns > 0.0).then(|| (f64::from(lost_ns), f64::from(self.charge_of(id, part, charge) * lost_ns)))
    }

    /// Nanoseconds that are charged for each nanosecond of far pass that this part of a launch has more than at first, where `charge` are if that was measured.
    fn charge_of(&self, id: u32, part: &kinds::Use, charge: f32) -> f32 {
        let passes = self.passes_of(id, part);
        match self.kinds.charge_unmeasured(id, part.operand) {
            Some(charge) => charge * passes,
            // No more than the launch can have read in its time, where that is known of launches of its shape.
            None => (charge * passes).min(CERTAIN * self.kinds.bound_if_known(id, part.operand)),
        }
    }

    /// How often this part of a launch crosses the link. Operands that were far each time are not told apart from the launch's own time: that is no reason to leave
    /// them far.
    fn passes_of(&self, id: u32, part: &kinds::Use) -> f32 {
        if self.is_unknown(id, part) { self.kinds.bound(id, part.operand) } else { part.weight() }
    }

    /// A launch like this one was measured, but not how often it reads this part.
    fn is_unknown(&self, id: u32, part: &kinds::Use) -> bool {
        part.operand.is_some_and(|operand| self.kinds.is_unknown(id, operand))
    }

    /// What is charged for this part of a launch is what it could be, or a guess, since it was not measured.
    fn is_unmeasured(&self, id: u32, part: &kinds::Use) -> bool {
        self.kinds.is_unsure(id) || self.is_unknown(id, part)
    }

    /// A launch of this kind was measured: what launches like it were charged with before is charged anew, and what was too much is given back.
    fn charge_anew(&mut self, id: u32) {
        let shape = self.kinds.shape(id);
        let all = self.unmeasured.like(shape, id);
        if all.is_empty() {
            return;
        }
        for (key, charge) in all {
            let part = self.kinds.part_of(key.kind, key.slot, &self.extents);
            let is_same =
                |part: &kinds::Use| part.generation == charge.generation && self.kinds.shape(key.kind) == shape;
            let Some(part) = part.filter(is_same) else {
                self.unmeasured.is_settled(&key);
                continue;
            };
            // A guess may turn out to be too low, and what was given back is not asked for again: until it is measured, only what no time leaves room for is.
            let is_unmeasured = self.is_unmeasured(key.kind, &part);
            let now = match is_unmeasured {
                true => CERTAIN * self.kinds.bound(key.kind, part.operand),
                false => self.charge_of(key.kind, &part, self.kinds.credit(key.kind, -1.0)),
            };
            let too_much = charge.too_much(f64::from(now));
            self.account.saved(too_much);
            self.extents.lost(key.slot, -too_much);
            if is_unmeasured {
                self.unmeasured.was_too_much(&key, too_much);
            } else {
                self.unmeasured.is_settled(&key);
            }
        }
        self.account.reserve = self.extents.reserve_ns();
    }

    /// What the last launch is charged with as memory lies now counts as lost by its extents, unless it did before, and is remembered where it was not measured.
    fn note_charges(&mut self, id: u32, is_counted: bool, at: &impl Whereabouts) {
        let (charge, shape) = (self.kinds.credit(id, -1.0), self.kinds.shape(id));
        let is_unsure = self.kinds.hot(id).is_some_and(|hot| hot.unsure);
        let part = |tiers: &Self, index: usize| tiers.kinds.get(id)?.uses.get(index).copied();
        let mut index = 0;
        while let Some(part) = part(self, index) {
            index += 1;
            let Some((pass_ns, charged_ns)) = self.charge_for(id, &part, charge, at) else { continue };
            if !is_counted {
                self.extents.lost(part.slot, charged_ns);
            }
            if is_unsure && self.is_unmeasured(id, &part) {
                self.unmeasured.charge(shape, id, &part, pass_ns, charged_ns);
            }
        }
        self.account.reserve = self.extents.reserve_ns();
    }

    /// Works out what a launch's operands cost as they lie now.
    #[cold]
    fn look(&mut self, id: u32, version: u32, at: &impl Whereabouts) {
        let reaches_are_known = self.kinds.reaches_are_known(id);
        self.kinds.weigh(id, &self.extents);
        let Some(known) = self.kinds.get(id) else { return };
        let (mut pass_ns, mut may_ns, mut bytes, mut a_cycle) = (0.0, 0.0, 0, 0.0);
        // What reading them once takes.
        let mut once_ns = 0.0;
        // The same for all of the next launches that are expected to.
        let mut next_ns = 0.0;
        // What may be gained where it is not known how often it is read.
        let mut tries_ns = 0.0;
        for part in &known.uses {
            let read = self.extents.read(part.slot, part.share, self.cycles, &self.settings.links, at);
            if let Some((extent, read)) = self.extents.get(part.slot).zip(read) {
                let weight = part.weight();
                pass_ns += weight * read.pass_ns;
                may_ns += weight * read.may_ns;
                once_ns += weight.min(1.0) * read.may_ns;
                bytes += extent.range.bytes();
                a_cycle += extent.density * extent.may_ns;
                let promises = self.kinds.promises(id, part, &self.extents).unwrap_or(0.0);
                tries_ns = read.may_ns.mul_add((promises - weight).max(0.0), tries_ns);
                next_ns += weight.min(1.0) * read.may_ns * extent.uses_in(AHEAD, self.cycle.position);
            }
        }
        let settled = self.kinds.get_mut(id).is_some_and(|known| known.names(bytes)) || reaches_are_known;
        // What must stay far is no reason to ask.
        let here = self.kinds.gain(id).0 * may_ns;
        let asks = may_ns > LEAST / 64.0 && here.max(a_cycle) > LEAST.max(once_ns);
        let asks_elsewhere = next_ns.max(tries_ns) > LEAST.max(once_ns);
        let (worth, is_unknown) = self.worth_of(id, at);
        let unsure = self.kinds.is_unsure(id) || is_unknown;
        if let Some(hot) = self.kinds.hot_mut(id) {
            let asks_each_time = here > WORTH_ASKING;
            *hot = kinds::Hot {
                epoch: self.extents.epoch,
                version,
                pass_ns,
                worth,
                asks,
                asks_elsewhere,
                asks_each_time,
                settled,
                unsure,
                ..*hot
            };
        }
    }

    /// What moves from here on does not move in front of the last launch.
    #[inline]
    pub(crate) fn launch_is_over(&mut self, at: &impl Whereabouts) {
        self.moves_for_last = false;
        if self.moved_for_last {
            self.count_last(at);
        }
    }

    /// What was moved for the last launch was moved before it ran.
    #[cold]
    fn count_last(&mut self, at: &impl Whereabouts) {
        self.moved_for_last = false;
        self.extents.settle(&self.settings.links, at);
        self.account.reserve = self.extents.reserve_ns();
        let (id, before) = self.last;
        let (now, _) = self.worth_of(id, at);
        self.account.saved(f64::from(now.saved_ns) - f64::from(before.saved_ns));
        self.unmeasured.take_back_last();
        if now.charged_ns > 1.0 {
            self.note_charges(id, true, at);
        }
        self.last = (id, now);
    }

    /// What the account is told of a launch, as memory lies now. What it gains by one operand makes up for what it loses by another only as
    /// far as it was measured how often it reads either. And whether it was not measured how often it reads some of those that are farther.
    fn worth_of(&self, id: u32, at: &impl Whereabouts) -> (Worth, bool) {
        let (mut gained_ns, mut worth, mut is_unknown) = (0.0, Worth::default(), false);
        let Some(known) = self.kinds.get(id) else { return (worth, is_unknown) };
        let (credit, charge) = (self.kinds.credit(id, 1.0), self.kinds.credit(id, -1.0));
        for part in &known.uses {
            let read = self.extents.read(part.slot, part.share, self.cycles, &self.settings.links, at);
            let Some(saved_ns) = read.map(|read| read.saved_ns) else { continue };
            if saved_ns >= 0.0 {
                gained_ns += part.weight() * saved_ns;
                continue;
            }
            is_unknown |= self.is_unknown(id, part);
            worth.lost_ns += self.passes_of(id, part) * -saved_ns;
            worth.charged_ns += self.charge_of(id, part, charge) * -saved_ns;
        }
        (Worth { saved_ns: credit * gained_ns - worth.charged_ns, ..worth }, is_unknown)
    }

    /// Whether a launch of this function should be timed, for whoever has to prepare that before it knows the launch. Of a launch
    /// itself, [`Launch::time_it`] says so.
    #[must_use]
    pub fn wants_timing(&self, function: u64) -> bool {
        self.kinds.function_wants_timing(function)
    }

    /// This launch is being timed: what it reads lies where it lies now.
    pub fn timing(&mut self, launch: u64, at: &impl Whereabouts) {
        if self.moved_for_last {
            self.count_last(at);
        }
        self.extents.settle(&self.settings.links, at);
        let kind = self.cycle.kind(launch);
        let Some(known) = self.kinds.get(kind) else { return };
        let mut pending = Pending { launch, kind, ..Pending::default() };
        // What a kernel reads through its caches at most.
        let most = kinds::CACHED * self.settings.links.near as f32;
        for part in &known.uses {
            let read = self.extents.read(part.slot, part.share, self.cycles, &self.settings.links, at);
            let Some((read, extent)) = read.zip(self.extents.get(part.slot)) else { continue };
            pending.pass_ns += part.weight() * read.pass_ns;
            let Some(operand) = part.operand.map(usize::from).filter(|operand| *operand < MOST_OPERANDS) else {
                continue;
            };
            pending.passes[operand] += read.pass_ns;
            pending.least[operand] += part.share * extent.range.bytes() as f32 / most;
        }
        self.pending[launch as usize % PENDING] = pending;
    }

    /// It took so long, from its start to its end on the GPU. Answers what it was and how much of that was expected.
    pub fn timed(&mut self, launch: u64, nanoseconds: u64) -> Option<Timed> {
        let Pending { launch: id, kind, pass_ns, passes, least } = self.pending[launch as usize % PENDING];
        if id != launch {
            return None;
        }
        self.pending[launch as usize % PENDING].launch = u64::MAX;
        let (gain, _) = self.kinds.gain(kind);
        let function = self.kinds.function_of(kind).map_or(0, |function| function.name);
        self.measured += u64::from(self.kinds.timed(kind, pass_ns, &passes, &least, nanoseconds as f32));
        self.charge_anew(kind);
        Some(Timed { function, kind, far_ns: pass_ns, by_operand: passes, gain })
    }

    /// The program has just waited for the device. Where it does so again and again after as many launches, a cycle ends here, and what it
    /// showed is worked out. Answers whether one did.
    pub fn waited(&mut self, now_ns: u64, at: &impl Whereabouts) -> bool {
        self.launch_is_over(at);
        let ends = self.cycle.waited();
        if ends {
            self.ended = true;
            self.time_is(now_ns, at);
        }
        ends
    }

    /// The time, on a clock that only goes forward, when [`Launch::tell_time`] asks for it. What a cycle showed is worked out here:
    /// 10 ns for each use of an extent in it, for the first cycles and then for each eighth to sixty-fourth while nothing changes.
    pub fn time_is(&mut self, now_ns: u64, at: &impl Whereabouts) {
        self.account.time_is(now_ns);
        if !std::mem::take(&mut self.ended) {
            return;
        }
        self.cycles += 1;
        self.vain = 0;
        self.seen += 1;
        let length = self.cycle.length();
        let surprises = std::mem::take(&mut self.cycle.surprises);
        self.account.cycle(now_ns, length, self.timeline.bytes, self.cycles, surprises == 0);
        let span = self.cycle.last(self.settings.window);
        let launches = (span.end - span.start).max(1);
        let surprising = surprises as f32 / launches as f32;
        self.surprises += (surprising - self.surprises) * 0.25;
        let state = (self.extents.shape, self.measured);
        // The longer nothing changes, the more rarely; in short cycles more rarely still, since each extent has to be looked at.
        let wait = u64::from((self.seen / 4).clamp(8, 64)) * launches;
        let is_soon = self.cycle.position - self.learnt < wait.max(SLOT * self.extents.slots() as u64);
        if self.seen > LEARNT && surprising == 0.0 && self.built == state && is_soon {
            return;
        }
        self.built = state;
        self.catch_up();
        let before = self.timeline.length();
        let link = (0..self.settings.links.far.len() as u8)
            .map(|place| self.settings.links.swap_ns_per_byte(place) * self.settings.links.link(place).kernel);
        let most = link.fold(0.0, f64::max) as f32;
        self.timeline.rebuild(&self.cycle, &self.kinds, &self.extents, self.settings.window, most);
        if before.abs_diff(self.timeline.length()) > before / 4 {
            // Counted by other cycles.
            self.extents.forget(&self.timeline.passes, &self.timeline.visits);
        }
        let expected = self.extents.cycle(&self.timeline.passes, &self.timeline.visits, self.seen, self.cycles);
        if expected < 0.5 * self.expected {
            self.extents.forget(&self.timeline.passes, &self.timeline.visits);
            self.patience = (self.seen / 4).min(self.era);
            self.era = self.seen / 4;
            self.seen = 1;
            self.account.changed();
        }
        self.expected += (expected - self.expected) * 0.25;
        if self.cycles >= self.tidied + 4 {
            self.tidied = self.cycles;
            self.extents.forget_borders(self.cycles);
        }
        self.learnt = self.cycle.position;
        let (timeline, links) = (&self.timeline, &self.settings.links);
        self.extents.keep_at_most(|slot, extent| {
            let is_known = timeline.is_all() && !timeline.is_unsure(slot) && extent.density > 0.0;
            is_known.then(|| EARNED * f64::from(extent.density) / links.link(extent.place).kernel)
        });
        self.refresh_all(at);
    }

    /// What cycles show holds for all memory: they use nearly all of it, and the program does now what it does in them.
    pub(crate) fn knows_all(&self) -> bool {
        self.timeline.is_all() && self.strange <= 0.5
    }

    /// The program does something else than what was learnt last.
    pub(crate) fn is_outdated(&self) -> bool {
        self.cycle.lost() > self.learnt
    }

    /// What was learnt of cycles says nothing of what is used next: the program does something else than in the cycle that was learnt last, by its functions or by how
    /// much they work on; or it does the same again and again with other memory each time, as a model that goes through its layers.
    #[inline]
    pub(crate) fn is_elsewhere(&self) -> bool {
        let is_other_memory = self.surprises >= SURPRISES && self.expected < EXPECTED;
        (self.strange > 0.5 || is_other_memory) && self.timeline.is_cycle()
    }

    /// Tells the extents when they were used last. A launch itself does not, since it names many of them and nobody may ask.
    pub(crate) fn catch_up(&mut self) {
        let position = self.cycle.position;
        let begin = self.noted.max(position.saturating_sub(HISTORY));
        self.noted = position;
        for at in begin..position {
            let id = self.cycle.kind(at);
            // Its last launch says it all.
            if self.kinds.hot(id).is_none_or(|hot| hot.last != at) {
                continue;
            }
            let Some(known) = self.kinds.get(id) else { continue };
            for part in &known.uses {
                if let Some(extent) = self.extents.get_mut(part.slot) {
                    extent.is_used_at(at);
                    if part.is_named {
                        extent.is_named_at(at);
                        extent.last_cycle = self.cycles;
                    }
                }
            }
        }
    }

    /// Cycles that what the program does now is expected to last: as long as it has, or a quarter of what it did before has.
    pub(crate) fn prospect(&self) -> u32 {
        if self.is_outdated() { (self.seen / 4).min(self.era) } else { self.seen.max(self.patience) }
    }

    pub(crate) fn refresh_all(&mut self, at: &impl Whereabouts) {
        self.extents.settle(&self.settings.links, at);
        self.account.reserve = self.extents.reserve_ns();
        let (near, place) = self.extents.totals();
        self.account.grant(near as f64 * self.settings.links.swap_ns_per_byte(place.unwrap_or(0)));
    }

    /// What a launch that was asked for loses by what lies far, and what is known that decides about it: for the log.
    #[must_use]
    pub fn question(&self, launch: u64, at: &impl Whereabouts) -> String {
        let id = self.cycle.kind(launch);
        let Some(kind) = self.kinds.get(id) else { return String::new() };
        let mut told = String::new();
        for part in &kind.uses {
            let Some(extent) = self.extents.get(part.slot) else { continue };
            let read = self.extents.read(part.slot, part.share, self.cycles, &self.settings.links, at);
            let Some(read) = read.filter(|read| read.pass_ns > 0.0) else { continue };
            let _ = write!(
                told,
                " {:#x} {} of {} MiB far, {:.1} passes of {:.0} µs{}{};",
                extent.range.start,
                extent.far_bytes >> 20,
                extent.range.bytes() >> 20,
                part.weight(),
                read.pass_ns / 1e3,
                if extent.far_free == 0 { ", fixed" } else { "" },
                if extent.stays_until > self.cycles { ", stayed" } else { "" },
            );
        }
        let offset = self.timeline.offset(self.cycle.repeats());
        format!(
            "{told} strange {:.2} free {:.1} ms, reserve {:.1} ms, gain {:?}, offset {offset:?}, outdated {}, length {:?}, surprises {:.2}, vain {}",
            self.strange,
            self.account.free() / 1e6,
            self.account.reserve / 1e6,
            self.kinds.gain(id),
            self.is_outdated(),
            self.cycle.length(),
            self.surprises,
            self.vain,
        )
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

    /// What moves may cost now, and how that came about.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        self.account.ledger(self.cycles, self.cycle.length())
    }

    /// Totals, with the `most` functions that lose most.
    pub fn told(&mut self, most: usize, at: &impl Whereabouts) -> Told {
        self.refresh_all(at);
        let span = self.cycle.last(self.settings.window);
        let mut readers: Vec<(u64, f64)> = vec![(0, 0.0); self.kinds.functions().len()];
        for id in span.map(|position| self.cycle.kind(position)) {
            let Some(known) = self.kinds.get(id) else { continue };
            let gain = f64::from(self.kinds.gain(id).0);
            let reader = &mut readers[known.function as usize];
            for (part, extent) in known.uses.iter().filter_map(|part| Some((part, self.extents.get(part.slot)?))) {
                reader.0 += (extent.far_bytes as f64 * f64::from(part.part.min(1.0))) as u64;
                reader.1 += gain * f64::from(part.part * extent.pass_ns);
            }
        }
        let mut readers: Vec<((u64, f64), u32)> =
            readers.into_iter().zip(0u32..).filter(|((far_bytes, _), _)| *far_bytes > 0).collect();
        readers.sort_by(|((_, a), _), ((_, b), _)| b.total_cmp(a));
        readers.truncate(most);
        let reader = |((far_bytes, lost_ns), index): ((u64, f64), u32)| {
            let function = self.kinds.functions()[index as usize].name;
            Reader { function, far_bytes, reuse: self.kinds.reuse(index), lost_ns }
        };
        let readers = readers.into_iter().map(reader).collect();
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
