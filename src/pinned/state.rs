//! Everything under the pool's lock. A step here never calls the backend; whoever needs it unlocks first and comes back
//! with what happened.

use crate::policy;
use crate::runs::{Class, Fit, Kind, Run, RunId, Runs, Segment};
use crate::underway::Underway;
use crate::{Block, Config, PAGE, PinnedUsage, Request};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// A request on its way, with what was tried for it. Each of these is tried once, so a request ends.
#[derive(Debug)]
pub(crate) struct Attempt<'a> {
    pub request: &'a Request,
    pub class: Class,
    /// Bytes of the run it needs.
    pub bytes: u64,
    /// The device was waited for, or could not be.
    pub waited: bool,
    /// Segments were given back so that this one stays within the bounds.
    pub made_room: bool,
    /// The driver was short: pin no more than this block needs.
    pub exact: bool,
    /// All that was unused was given back.
    pub trimmed: bool,
}

impl<'a> Attempt<'a> {
    pub fn new(request: &'a Request, bytes: u64) -> Self {
        let class = Class { key: request.key, below_page: bytes < PAGE };
        Self { request, class, bytes, waited: false, made_room: false, exact: false, trimmed: false }
    }

    /// The least that can be pinned for it.
    pub fn least(&self) -> u64 {
        policy::segment(self.bytes, 0)
    }
}

/// What a request needs next.
#[derive(Debug)]
pub(crate) enum Step {
    /// It stands.
    Done(Block),
    /// Memory that the device may still touch could serve it.
    Wait,
    /// First give back these segments, if need be by waiting for the device.
    Return { leaving: Vec<Leaving>, may_wait: bool },
    /// Pin so many bytes; they count from now on.
    Pin { bytes: u64, ticket: u64 },
    /// So many bytes more would pass the limit.
    Limit(u64),
}

/// A segment on its way back to the driver; no run knows it any more.
#[derive(Debug)]
pub(crate) struct Leaving {
    pub segment: Segment,
    /// What it would be again if it does not go.
    runs: Vec<Run>,
    ticket: u64,
}

/// The block that is `run`, if it is one.
fn block(run: &Run, segment: &Segment) -> Option<Block> {
    match run.kind {
        Kind::Live { requested, id, .. } => {
            Some(Block { address: run.address, bytes: requested, key: segment.class.key, id })
        }
        _ => None,
    }
}

#[derive(Debug)]
pub(crate) struct State {
    config: Config,
    pub runs: Runs,
    /// Frees that did not wait, so far: the number of the latest.
    pub unwaited: u64,
    /// Busy runs of each context in the order of their frees, with the number of each. An entry whose run is gone stays until
    /// its turn.
    resting: BTreeMap<u64, VecDeque<(u64, RunId)>>,
    /// Segments that are being pinned.
    pinning: Underway,
    /// Segments on their way back.
    leaving: Underway,
    last_id: u64,
    totals: Totals,
}

#[derive(Debug, Default)]
struct Totals {
    requested: u64,
    blocks: u64,
    peak_pinned: u64,
    peak_requested: u64,
    peak_used: u64,
    returned: u64,
    allocations: u64,
    reuses: u64,
}

impl State {
    pub fn new(config: Config) -> Self {
        Self {
            config,
            runs: Runs::default(),
            unwaited: 0,
            resting: BTreeMap::new(),
            pinning: Underway::default(),
            leaving: Underway::default(),
            last_id: 0,
            totals: Totals::default(),
        }
    }

    /// Looks for the next step of a request; serves it at once where that can be.
    pub fn next_step(&mut self, attempt: &mut Attempt) -> Step {
        let peak = self.totals.peak_used.max(self.runs.used + attempt.bytes);
        let slack = policy::slack(peak);
        let together = policy::together(self.runs.small(attempt.class), slack);
        let segment = policy::segment(attempt.bytes, together);
        if let Some(fit) = self.fit(attempt, segment, slack) {
            self.totals.reuses += 1;
            return Step::Done(self.award(fit, attempt));
        }
        // Only a guess at whether it will do: what is freed may not lie together. A wait is what the free itself would
        // have cost in the strict case, and pinning costs more than most.
        if !attempt.waited && self.runs.busy(attempt.class) >= attempt.bytes {
            return Step::Wait;
        }
        self.grow(attempt, segment, policy::ceiling(peak))
    }

    /// Where the block fits: exactly, beside others, or in a whole segment that it may break.
    fn fit(&self, attempt: &Attempt, segment: u64, slack: u64) -> Option<Fit> {
        let (part, whole) = self.runs.best_fits(attempt.class, attempt.bytes);
        let exact = |fit: &Fit| fit.bytes == attempt.bytes;
        // One no bigger than what would be pinned is as good as that. A bigger one is broken only as long as the rests
        // of all broken ones stay small: it could not go back, and the next block of its size would need another.
        let rests = self.runs.held - self.runs.spare - self.runs.used;
        let may_break = |fit: &Fit| fit.bytes <= segment || rests + (fit.bytes - attempt.bytes) <= slack;
        part.filter(exact).or(whole.filter(exact)).or(part).or(whole.filter(may_break))
    }

    /// How to pin memory for a request that fits nowhere.
    fn grow(&mut self, attempt: &mut Attempt, segment: u64, ceiling: u64) -> Step {
        let least = attempt.least();
        let mut bytes = if attempt.exact { least } else { segment };
        let all = self.pinned() + self.pinning.bytes();
        if (all - self.runs.spare).saturating_add(least) > self.config.limit {
            return Step::Limit(least);
        }
        if !attempt.made_room {
            attempt.made_room = true;
            let allowed = ceiling.min(self.config.limit);
            let excess = (all + bytes).saturating_sub(allowed);
            let leaving = self.detach_unused(excess, None);
            if !leaving.is_empty() {
                // Beyond the bound for a while is better than waiting; beyond the limit is not allowed.
                return Step::Return { leaving, may_wait: all + bytes > self.config.limit };
            }
        }
        if all + bytes > self.config.limit {
            bytes = least;
        }
        if all + bytes > self.config.limit {
            // Somebody was faster, or a segment did not go.
            return Step::Limit(least);
        }
        Step::Pin { bytes, ticket: self.pinning.begin(attempt.request.key.context, bytes, None) }
    }

    /// A segment was pinned; serves the request from it. `None` if its context ended meanwhile, and the memory with it.
    pub fn pinned_at(&mut self, ticket: u64, address: u64, attempt: &Attempt) -> Option<Block> {
        let bytes = self.withdraw(ticket)?;
        self.given_anew(address, bytes);
        let small = bytes <= policy::slack(self.totals.peak_used);
        let segment = Segment { address, bytes, class: attempt.class, small, used: 0, since: Duration::ZERO };
        let run = self.runs.add_segment(segment, &[Run { address, bytes, kind: Kind::Free }]);
        self.totals.peak_pinned = self.totals.peak_pinned.max(self.pinned());
        Some(self.award(Fit { run, bytes }, attempt))
    }

    /// A segment is no longer being pinned; returns its bytes, or `None` if its context ended meanwhile.
    pub fn withdraw(&mut self, ticket: u64) -> Option<u64> {
        self.pinning.end(ticket)
    }

    fn award(&mut self, fit: Fit, attempt: &Attempt) -> Block {
        let Request { bytes, key } = *attempt.request;
        self.last_id += 1;
        let address = self.runs.take(fit, attempt.bytes, bytes, self.last_id);
        let totals = &mut self.totals;
        totals.allocations += 1;
        totals.blocks += 1;
        totals.requested += bytes;
        totals.peak_requested = totals.peak_requested.max(totals.requested);
        totals.peak_used = totals.peak_used.max(self.runs.used);
        Block { address, bytes, key, id: self.last_id }
    }

    /// The live block that starts at `address`, if no thread ends it already, and its run.
    pub fn block_to_end(&self, address: u64) -> Option<(RunId, Block)> {
        let (run, block) = self.block_around(address)?;
        let is_ending = matches!(self.runs.run(run).kind, Kind::Live { ending: true, .. });
        (block.address == address && !is_ending).then_some((run, block))
    }

    /// The live block that `address` lies in, and its run.
    pub fn block_around(&self, address: u64) -> Option<(RunId, Block)> {
        let id = self.runs.around(address)?;
        let run = self.runs.run(id);
        Some((id, block(run, self.runs.segment(id))?))
    }

    /// The live block that `address` lies in; `Some(None)` in what no live block has of a segment.
    pub fn found(&self, address: u64) -> Option<Option<Block>> {
        let id = self.runs.around(address)?;
        Some(block(self.runs.run(id), self.runs.segment(id)))
    }

    /// Whether `block` lives in that run still. It may have gone with its context.
    fn lives(&self, run: RunId, block: &Block) -> bool {
        matches!(self.runs.run(run).kind, Kind::Live { id, .. } if id == block.id)
    }

    /// Notes whether a thread is about to end `block`.
    pub fn mark(&mut self, run: RunId, block: &Block, is_ending: bool) {
        if self.lives(run, block)
            && let Kind::Live { ending, .. } = self.runs.kind_mut(run)
        {
            *ending = is_ending;
        }
    }

    /// Ends `block`. `quiet`: the device is done with it. Says whether its segment is without a block from now on.
    pub fn end(&mut self, run: RunId, block: &Block, quiet: bool, now: Duration) -> bool {
        if !self.lives(run, block) {
            return false;
        }
        self.totals.blocks -= 1;
        self.totals.requested -= block.bytes;
        if quiet {
            return self.runs.end(run, Kind::Free, now);
        }
        self.unwaited += 1;
        let number = self.unwaited;
        self.resting.entry(block.key.context).or_default().push_back((number, run));
        self.runs.end(run, Kind::Busy { number }, now)
    }

    /// A wait for this context is over; when it began, the latest free that did not wait had this number.
    pub fn waited_for(&mut self, context: u64, begun: u64) {
        let Some(resting) = self.resting.get_mut(&context) else { return };
        while let Some(&(number, run)) = resting.front()
            && number <= begun
        {
            resting.pop_front();
            self.runs.settle(run, number);
        }
        if resting.is_empty() {
            self.resting.remove(&context);
        }
    }

    /// Takes segments without a block out, the longest unused first: until `bytes` are together, and only those unused
    /// since `until` or longer.
    pub fn detach_unused(&mut self, bytes: u64, until: Option<Duration>) -> Vec<Leaving> {
        let mut sum = 0;
        let mut chosen = Vec::new();
        for segment in self.runs.unused() {
            if sum >= bytes || until.is_some_and(|until| segment.since > until) {
                break;
            }
            chosen.push(segment.address);
            sum += segment.bytes;
        }
        chosen.into_iter().filter_map(|address| self.detach(address)).collect()
    }

    fn detach(&mut self, address: u64) -> Option<Leaving> {
        let (segment, runs) = self.runs.remove_segment(address)?;
        let ticket = self.leaving.begin(segment.class.key.context, segment.bytes, Some(segment.address));
        Some(Leaving { segment, runs, ticket })
    }

    /// A segment went back to the driver; returns its bytes, 0 if it went with its context first.
    pub fn left(&mut self, gone: &Leaving) -> u64 {
        let bytes = self.leaving.end(gone.ticket).unwrap_or(0);
        self.totals.returned += bytes;
        bytes
    }

    /// The driver did not take a segment back: it is pinned still, and unused since `since`. Or it went with its context,
    /// and that is why; then another one may have its addresses already.
    pub fn put_back(&mut self, kept: Leaving, since: Duration) {
        let Leaving { segment, mut runs, ticket } = kept;
        if !self.leaving.stays(ticket) {
            return;
        }
        // The old entries of busy runs may have had their turns while nobody knew these runs: new numbers for them.
        let mut busy = Vec::new();
        for run in &mut runs {
            if let Kind::Busy { number } = &mut run.kind {
                self.unwaited += 1;
                *number = self.unwaited;
                busy.push((*number, run.address));
            }
        }
        self.runs.add_segment(Segment { since, ..segment }, &runs);
        for (number, address) in busy {
            let resting = self.resting.entry(segment.class.key.context).or_default();
            resting.extend(self.runs.around(address).map(|run| (number, run)));
        }
    }

    /// Since when the longest unused segment is without a block.
    pub fn unused_since(&self) -> Option<Duration> {
        self.runs.unused().next().map(|segment| segment.since)
    }

    /// Forgets the segments of a context that ended; returns the blocks that lived in them.
    pub fn context_gone(&mut self, context: u64) -> Vec<Block> {
        self.pinning.context_gone(context);
        self.leaving.context_gone(context);
        self.resting.remove(&context);
        let segments = self.runs.segments_of(context);
        let blocks = segments.into_iter().flat_map(|address| self.forget(address)).collect();
        self.runs.forget_classes_of(context);
        blocks
    }

    /// The driver gave this range to somebody: what was there ended with its context, and nobody has said so yet.
    pub fn given_anew(&mut self, address: u64, bytes: u64) {
        for gone in self.runs.segments_in(address, bytes) {
            self.forget(gone);
        }
        self.leaving.given_anew(address, bytes);
    }

    /// Forgets a segment that the driver does not have any more; returns the blocks that lived in it.
    fn forget(&mut self, address: u64) -> Vec<Block> {
        let Some((segment, runs)) = self.runs.remove_segment(address) else { return Vec::new() };
        let blocks: Vec<Block> = runs.iter().filter_map(|run| block(run, &segment)).collect();
        for block in &blocks {
            self.totals.blocks -= 1;
            self.totals.requested -= block.bytes;
        }
        blocks
    }

    /// Bytes the driver has pinned for the pool.
    fn pinned(&self) -> u64 {
        self.runs.held + self.leaving.bytes()
    }

    /// Bytes without a block that are pinned beyond the bound.
    pub fn excess(&self) -> u64 {
        let all = self.runs.held + self.pinning.bytes();
        all.saturating_sub(policy::ceiling(self.totals.peak_used)).min(self.runs.spare)
    }

    pub fn usage(&self) -> PinnedUsage {
        let Totals { requested, blocks, peak_pinned, peak_requested, peak_used, returned, allocations, reuses } =
            self.totals;
        PinnedUsage {
            pinned: self.pinned(),
            requested,
            used: self.runs.used,
            peak_pinned,
            peak_requested,
            peak_used,
            returned,
            segments: self.runs.segments() as u64,
            blocks,
            allocations,
            reuses,
        }
    }
}
