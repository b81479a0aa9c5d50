//! What the pool holds at each place, and is about to hold: how its claim there ([`crate::Claim::Pool`]) comes about.

use crate::account::Accounts;
use crate::place::PlaceId;
use crate::{Claim, FRAME, Place, PlaceUsage, SoftRefusal};
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Growth plans after which a [`Ceiling`] is forgotten: the first, which only leads around the failure that it comes from and the
/// next request, and the last, since each further failure doubles them. The place may have lacked memory for a moment, of which nobody
/// tells; one that is full although the driver says otherwise costs a call in vain each time.
const CEILING_PLANS: RangeInclusive<u32> = 2..=64;

/// A growth sends free memory away where more would be held than was ever in use, a part of that, one in so many, and what [`PAID_FOR`] adds.
const SPARE_PART: u64 = 16;
/// Of what was sent away and made again although no more was in use than before, this part may be held beyond that from then on: a
/// loop that asks for other sizes each time could make the same memory again and again, and comes to have what it lacks by paying for it
/// once or twice. A bound by what is in use, as it once was, let memory that stayed in use pay for a loop beside it: with 64 GiB of it,
/// warm rounds of RMM's random mix of up to 4 GiB made 16 GiB each.
const PAID_FOR: (u64, u64) = (2, 3);
/// Where more is about to be in use than ever was, memory has to be made in any case, and what is sent away for that does not count until
/// it is so often as much as is in use: peaks may rise by little each time.
const MOST_EXCHANGED_AT_PEAKS: u64 = 8;

/// What a place proved to have when it ran out before its limit.
#[derive(Clone, Copy, Debug)]
struct Ceiling {
    held: u64,
    plans_left: u32,
}

/// For a block that would have to wait for the GPU, memory is made instead as long as no more is held than so many times the most that was ever in use:
/// what the program works with now, and once more what the GPU has yet to be done with. A loop on a GPU that is always at work takes new memory
/// each time otherwise. RMM and PyTorch reuse memory without a wait on the stream that it was freed in; `cuMemFree` names none.
pub(crate) const IN_FLIGHT: u64 = 2;

/// The pool's side of the account of one place. All sums are bytes.
#[derive(Debug)]
pub(crate) struct Budget {
    pub place: Place,
    /// Its index among the accounts, which each pair of large blocks asks.
    id: Option<PlaceId>,
    /// What the pool's memory is charged to as it is made. Here is also what was planned and does not exist yet.
    accounts: Arc<Accounts>,
    /// The place cannot give memory, now or ever.
    closed: bool,
    /// Everything that exists there on the pool's behalf, `leaving` and `stuck` included.
    held: u64,
    /// Under live blocks and what the front keeps.
    used: u64,
    /// The highest `used` with nothing kept and without `left_out`, and so never exceeded by live blocks of the program's.
    peak_used: u64,
    /// The part of `used` that makes no peak ([`crate::Pool::note_peaks_without`]).
    left_out: u64,
    /// The highest `used` in this cycle of the program's and in the one before ([`crate::Pool::begin_cycle`]).
    recent: [u64; 2],
    /// Promised to growth under way; it does not exist yet, or not for certain.
    promised: u64,
    /// The part of `held` that is on its way back to the driver. It still takes room: until it is gone, only the growth
    /// that sends it away may count on it, through `credit`.
    leaving: u64,
    /// The part of `promised` that waits for memory which that same growth is sending away.
    credit: u64,
    /// The part of `held` that a move or a growth has taken: it is neither free nor under a block until that is over.
    aside: u64,
    /// The part of `held` that the driver did not take back. Nothing stands on it.
    stuck: u64,
    /// Bytes of chunks that are anchored as long as they live (`crate::anchors`).
    anchored: u64,
    /// What growths sent away because it was spare, and made again although no more was in use than before.
    exchanged: u64,
    /// What growths sent away that had to make memory in any case.
    exchanged_at_peaks: u64,
    ceiling: Option<Ceiling>,
    /// How many growth plans the next ceiling lasts.
    patience: u32,
    soft: SoftRefusal,
}

impl Budget {
    pub fn new(place: Place, accounts: &Arc<Accounts>) -> Self {
        Self {
            place,
            id: accounts.id(place),
            accounts: Arc::clone(accounts),
            closed: false,
            held: 0,
            used: 0,
            peak_used: 0,
            left_out: 0,
            recent: [0; 2],
            promised: 0,
            leaving: 0,
            credit: 0,
            aside: 0,
            stuck: 0,
            anchored: 0,
            exchanged: 0,
            exchanged_at_peaks: 0,
            ceiling: None,
            patience: *CEILING_PLANS.start(),
            soft: SoftRefusal::default(),
        }
    }

    /// The account in numbers, `kept` of `used` being under no live block.
    pub fn usage(&self, kept: u64) -> PlaceUsage {
        let Self { place, held, used, peak_used, anchored, .. } = *self;
        PlaceUsage { place, limit: self.limit(), held, used: used - kept, peak_used, anchored }
    }

    /// Whether so much more in use is no new peak.
    pub fn is_below_peak(&self, bytes: u64) -> bool {
        self.used + bytes <= self.peak_used
    }

    /// Whether each block has to be seen here: a soft refusal was made, and what is served decides about the next.
    pub fn is_watched(&self) -> bool {
        self.soft != SoftRefusal::Armed
    }

    /// What blocks could still take if every free byte could be had, as far as the limit goes.
    pub fn room_by_limit(&self) -> u64 {
        self.room_beside(self.used)
    }

    fn room_beside(&self, used: u64) -> u64 {
        self.allowed().saturating_sub(used + self.promised + self.stuck)
    }

    /// What blocks could still take, given what the driver could still give (`None`: nobody can tell) and how much of `used`
    /// the front keeps.
    pub fn room(&self, headroom: Option<u64>, kept: u64) -> u64 {
        let idle = self.idle(kept);
        self.room_beside(self.used - kept).min(headroom.map_or(u64::MAX, |headroom| headroom.saturating_add(idle)))
    }

    /// What is held, serves no block, and is not on its way out, given how much of `used` the front keeps.
    pub fn idle(&self, kept: u64) -> u64 {
        self.held.saturating_sub(self.used - kept + self.leaving + self.stuck)
    }

    /// What could be created there without returning anything first, in whole frames.
    pub fn growth(&self, headroom: Option<u64>) -> u64 {
        if self.closed {
            return 0;
        }
        let most = self.ceiling.map_or(self.allowed(), |ceiling| self.allowed().min(ceiling.held));
        let bytes = most.saturating_sub(self.committed()).min(headroom.unwrap_or(u64::MAX));
        bytes - bytes % FRAME
    }

    /// Whether more is held than may be: the limit was lowered. What is freed then goes home before it serves anybody.
    pub fn is_beyond_limit(&self) -> bool {
        self.held > self.limit()
    }

    /// Whether what is promised goes beyond the limit (memory that was to leave did not, or the limit was lowered).
    pub fn is_overdrawn(&self) -> bool {
        self.committed() > self.allowed()
    }

    /// The most the place may hold, or what it holds once it proved unable to give memory.
    pub fn limit(&self) -> u64 {
        if self.closed { self.held } else { self.id.map_or(0, |id| self.accounts.limit_at(id)) }
    }

    /// Whether blocks of other homes may stand here.
    pub fn lends(&self) -> bool {
        self.accounts.lends(self.place)
    }

    /// The most the pool may hold here: the limit less what others than the pool have.
    fn allowed(&self) -> u64 {
        self.limit().saturating_sub(self.accounts.taken_by_others(Claim::Pool, self.place))
    }

    fn committed(&self) -> u64 {
        (self.held + self.promised).saturating_sub(self.credit)
    }

    /// How much more would be held, once `bytes` were made, than blocks have ever needed, a little, and what was paid for.
    pub fn spare_beside(&self, bytes: u64) -> u64 {
        self.spare_with(bytes, 0, 0)
    }

    /// The same where so much of what is set aside comes back, too, and `useful` of it in use.
    pub fn spare_with(&self, bytes: u64, gathered: u64, useful: u64) -> u64 {
        let needed = self.peak_used.max(self.used + self.promised + bytes + useful);
        let all = self.held + self.promised + bytes + gathered;
        let held = all.saturating_sub(self.leaving + self.stuck + self.aside);
        let paid_for = self.exchanged / PAID_FOR.1 * PAID_FOR.0;
        held.saturating_sub(needed + needed / SPARE_PART + paid_for)
    }

    /// Whether so much may be made for a block that could have free memory after a wait.
    pub fn may_run_ahead(&self, bytes: u64) -> bool {
        let needed = self.peak_used.max(self.used + self.promised + bytes);
        self.held + self.promised + bytes <= needed.saturating_mul(IN_FLIGHT)
    }

    /// So much is sent away because it is spare beside `made`, which is about to be, or mapped elsewhere instead.
    pub fn exchange(&mut self, bytes: u64, made: u64) {
        let needed = self.used + self.promised + made;
        if needed > self.peak_used {
            self.exchanged_at_peaks += bytes;
            let most = needed.saturating_mul(MOST_EXCHANGED_AT_PEAKS);
            self.exchanged += bytes.min(self.exchanged_at_peaks.saturating_sub(most));
        } else {
            self.exchanged += bytes;
        }
    }

    /// The program does again from here on what it did.
    pub fn begin_cycle(&mut self) {
        self.recent = [self.used, self.recent[0]];
    }

    /// What is held beyond the most that was in use in this cycle and in the one before.
    pub fn unneeded(&self) -> u64 {
        let needed = self.recent[0].max(self.recent[1]).max(self.used);
        self.held.saturating_sub(self.leaving + self.stuck + self.aside + needed)
    }

    /// Whether memory is on its way back to the driver.
    pub fn is_returning(&self) -> bool {
        self.leaving > 0
    }

    /// Whether memory is on its way back to the driver, or will be or be free once a move is over.
    pub fn is_leaving(&self) -> bool {
        self.leaving > 0 || self.aside > 0
    }

    /// Whether there is such memory, or some is being made.
    pub fn is_in_flux(&self) -> bool {
        self.is_leaving() || self.promised > 0
    }

    /// A move or a growth takes free memory.
    pub fn set_aside(&mut self, bytes: u64) {
        self.aside += bytes;
    }

    /// A move has made what it was promised.
    pub fn deliver_aside(&mut self, bytes: u64) {
        self.promised -= bytes;
        self.held += bytes;
        self.aside += bytes;
    }

    /// Memory that a move had taken is in use.
    pub fn use_aside(&mut self, bytes: u64) {
        self.aside -= bytes;
        self.used += bytes;
    }

    /// A move has vacated a chunk of `bytes`, of which `live` were in use.
    pub fn vacate(&mut self, bytes: u64, live: u64) {
        self.used -= live;
        self.aside += bytes;
    }

    /// Memory that was set aside could not be used and is the driver's again, or `stuck`.
    pub fn lose_aside(&mut self, gone: u64, stuck: u64) {
        self.aside -= gone + stuck;
        self.held -= gone;
        self.stuck += stuck;
    }

    /// Memory that a move had taken is free.
    pub fn free_aside(&mut self, bytes: u64) {
        self.aside -= bytes;
    }

    /// A growth that was promised `bytes` of memory still here sends that away first. Never more than its promise.
    pub fn lend(&mut self, bytes: u64) {
        self.credit += bytes;
    }

    /// That memory is gone, or will not go: the promise stands on its own.
    pub fn repay(&mut self, bytes: u64) {
        self.credit -= bytes;
    }

    pub fn promise(&mut self, bytes: u64) {
        self.promised += bytes;
    }

    /// Growth failed: nothing came of the promise.
    pub fn withdraw(&mut self, bytes: u64) {
        self.promised -= bytes;
    }

    /// Growth succeeded: the memory is there and in use.
    pub fn deliver(&mut self, bytes: u64) {
        self.promised -= bytes;
        self.held += bytes;
        // Below a ceiling is memory that was given back, which says nothing of what there is beyond.
        if self.ceiling.is_none() && bytes > 0 {
            self.patience = *CEILING_PLANS.start();
        }
        self.take(bytes);
    }

    /// Free memory goes into use. Not a peak yet: it may be put back.
    pub fn take(&mut self, bytes: u64) {
        self.used += bytes;
    }

    pub fn note_peak(&mut self) {
        let used = self.used.saturating_sub(self.left_out);
        self.peak_used = self.peak_used.max(used);
        self.recent[0] = self.recent[0].max(used);
    }

    /// So much of what is in use makes no peak.
    pub fn leave_out(&mut self, bytes: u64) {
        self.left_out = bytes;
    }

    pub fn put_back(&mut self, bytes: u64) {
        self.used -= bytes;
    }

    pub fn leave(&mut self, bytes: u64) {
        self.leaving += bytes;
    }

    /// Memory that was leaving is gone, or could not go.
    pub fn left(&mut self, gone: u64, stuck: u64) {
        self.leaving -= gone + stuck;
        self.held -= gone;
        self.stuck += stuck;
    }

    /// Memory of a failed growth that could not be returned: it exists although it was never delivered.
    pub fn strand(&mut self, bytes: u64) {
        self.held += bytes;
        self.stuck += bytes;
    }

    /// Stuck memory went after all.
    pub fn unstick(&mut self, bytes: u64) {
        self.stuck -= bytes;
        self.held -= bytes;
    }

    /// A chunk got its first anchor.
    pub fn anchor(&mut self, bytes: u64) {
        self.anchored += bytes;
    }

    /// A chunk lost its last anchor, or is no longer the pool's.
    pub fn release_anchor(&mut self, bytes: u64) {
        self.anchored -= bytes;
    }

    /// The place ran out after giving `created` bytes in this attempt.
    pub fn ran_out(&mut self, created: u64) {
        let held = self.held.saturating_sub(self.leaving) + created;
        self.ceiling = Some(Ceiling { held, plans_left: self.patience });
        self.patience = (self.patience * 2).min(*CEILING_PLANS.end());
    }

    /// The place cannot give memory, now or ever.
    pub fn close(&mut self) {
        self.closed = true;
    }

    /// Believes the limit again; returns whether there was a ceiling.
    pub fn forget_ceiling(&mut self) -> bool {
        self.ceiling.take().is_some()
    }

    /// Another growth was planned; an old ceiling may be out of date.
    pub fn age_ceiling(&mut self) {
        if let Some(ceiling) = &mut self.ceiling {
            ceiling.plans_left -= 1;
            if ceiling.plans_left == 0 {
                self.ceiling = None;
            }
        }
    }

    /// See [`SoftRefusal::refuse`].
    pub fn refuse_softly(&mut self, bytes: u64) -> bool {
        self.soft.refuse(bytes)
    }

    /// A block whose home this is overflowed it.
    pub fn overflowed(&mut self) {
        self.soft.overflowed();
    }

    /// A block of `bytes` was served at this home GPU, and the driver would still give `headroom` there.
    pub fn served_at_home(&mut self, bytes: u64, headroom: u64) {
        // Mostly nobody was refused, and then this costs nothing.
        if self.is_watched() {
            self.soft.served_at_home(bytes, self.limit(), self.room(Some(headroom), 0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PlaceSpec;

    #[test]
    fn memory_on_its_way_out_is_room_for_nobody_but_the_growth_that_sends_it() {
        let accounts = Accounts::new(&[PlaceSpec { place: Place::Gpu(0), limit: 100 * FRAME }]);
        let mut budget = Budget::new(Place::Gpu(0), &Arc::new(accounts));
        budget.promise(100 * FRAME);
        budget.deliver(100 * FRAME);
        budget.put_back(100 * FRAME);
        // A growth of 10 frames sends a chunk of 16 away.
        budget.leave(16 * FRAME);
        budget.lend(10 * FRAME);
        budget.promise(10 * FRAME);
        assert_eq!(budget.growth(None), 0, "the chunk is still there");
        assert!(!budget.is_overdrawn());
        budget.left(16 * FRAME, 0);
        budget.repay(10 * FRAME);
        assert_eq!(budget.growth(None), 6 * FRAME);
        budget.deliver(10 * FRAME);
        assert_eq!(budget.growth(None), 6 * FRAME);
        // Memory that did not go leaves its growth overdrawn.
        budget.leave(16 * FRAME);
        budget.lend(10 * FRAME);
        budget.promise(16 * FRAME);
        budget.left(0, 16 * FRAME);
        budget.repay(10 * FRAME);
        assert!(budget.is_overdrawn());
    }
}
