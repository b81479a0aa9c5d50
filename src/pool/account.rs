//! What each place may hold, and who has how much of it: one account a place for all who take memory there.
//!
//! The pool, the program's own handles and managed memory each have a claim of their own name, and one limit holds for the
//! sum. A claim is checked and charged in one step, under one lock for all places: of two that are checked one after the
//! other and charged later, both would find the same room. Only numbers: who charges makes the memory, before or after.
//!
//! What a place may hold can change while memory lies there: the limit, whether it lends to other GPUs than itself, and whether it is closed.
//! That takes nothing away from anybody. It says what comes next, and here is the only place that says it.

use crate::place::PlaceId;
use crate::sync::Mutex;
use crate::{Place, PlaceSpec};
// The standard library's under loom, too: nothing is ordered by them, so there is nothing for it to interleave.
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Who has memory at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The pool's chunks.
    Pool,
    /// Memory that the program made itself (`cuMemCreate`).
    Handles,
    /// Managed memory that was placed there, whether it is there at this moment or not.
    Managed,
}

impl Claim {
    /// Every claim.
    pub const ALL: [Claim; 3] = [Claim::Pool, Claim::Handles, Claim::Managed];
}

/// The bytes of each claim on one place, in the order of [`Claim::ALL`].
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    now: [u64; 3],
    peak: [u64; 3],
    /// The most that all of them ever were together.
    peak_taken: u64,
}

impl Sums {
    fn taken(&self) -> u64 {
        self.now.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    fn charge(&mut self, claim: Claim, bytes: u64) {
        let (now, peak) = (&mut self.now[claim as usize], &mut self.peak[claim as usize]);
        *now = now.saturating_add(bytes);
        *peak = (*peak).max(*now);
        self.peak_taken = self.peak_taken.max(self.taken());
    }

    fn credit(&mut self, claim: Claim, bytes: u64) {
        let now = &mut self.now[claim as usize];
        debug_assert!(*now >= bytes, "{claim:?} gives back {bytes} bytes of {now}");
        *now = now.saturating_sub(bytes);
    }
}

/// What may change about a place at any moment.
#[derive(Debug)]
struct Terms {
    limit: AtomicU64,
    /// The most that the limit ever was.
    most: AtomicU64,
    /// Nothing new goes there, whatever the limit.
    closed: AtomicBool,
    /// Blocks of other homes may stand there.
    lends: AtomicBool,
}

/// The accounts of all places; a place without one takes nothing.
#[derive(Debug)]
pub struct Accounts {
    specs: Vec<PlaceSpec>,
    terms: Vec<Terms>,
    sums: Mutex<Vec<Sums>>,
}

impl Accounts {
    /// Accounts with nothing in them, each place once. All places are open, and lend; a disk stays open and never does.
    pub fn new(specs: &[PlaceSpec]) -> Self {
        let terms = |spec: &PlaceSpec| Terms {
            limit: AtomicU64::new(spec.limit),
            most: AtomicU64::new(spec.limit),
            closed: AtomicBool::new(false),
            lends: AtomicBool::new(!spec.place.is_stored()),
        };
        Self {
            specs: specs.to_vec(),
            terms: specs.iter().map(terms).collect(),
            sums: Mutex::new(vec![Sums::default(); specs.len()]),
        }
    }

    /// The place with this index.
    pub(crate) fn place(&self, id: PlaceId) -> Place {
        self.specs[id.index()].place
    }

    /// The places, and what each could hold at first.
    pub fn specs(&self) -> &[PlaceSpec] {
        &self.specs
    }

    fn index(&self, place: Place) -> Option<usize> {
        self.specs.iter().position(|spec| spec.place == place)
    }

    /// The index of a place that has an account.
    pub(crate) fn id(&self, place: Place) -> Option<PlaceId> {
        Some(PlaceId::from_number(u32::try_from(self.index(place)?).ok()?))
    }

    fn terms(&self, place: Place) -> Option<&Terms> {
        self.index(place).map(|index| &self.terms[index])
    }

    /// Those that may change: what was put on a disk has to come back, and what is to go there has nowhere else to go.
    fn changing(&self, place: Place) -> Option<&Terms> {
        self.terms(place).filter(|_| !place.is_stored())
    }

    /// The most that all claims on a place may add up to; 0 where it has no account, and while it is closed.
    pub fn limit(&self, place: Place) -> u64 {
        self.id(place).map_or(0, |id| self.limit_at(id))
    }

    /// [`Accounts::limit`] of the place with this index.
    pub(crate) fn limit_at(&self, id: PlaceId) -> u64 {
        let terms = &self.terms[id.index()];
        if terms.closed.load(Ordering::Relaxed) { 0 } else { terms.limit.load(Ordering::Relaxed) }
    }

    /// Changes that. What lies there beyond it stays; a pool is to be told ([`crate::Pool::heed_accounts`]).
    pub fn set_limit(&self, place: Place, bytes: u64) {
        if let Some(terms) = self.changing(place) {
            terms.limit.store(bytes, Ordering::Relaxed);
            terms.most.fetch_max(bytes, Ordering::Relaxed);
        }
    }

    /// The most that [`Accounts::limit`] ever was: what a peak is measured by.
    pub fn highest_limit(&self, place: Place) -> u64 {
        self.terms(place).map_or(0, |terms| terms.most.load(Ordering::Relaxed))
    }

    /// Closes a place to everything new, or opens it again with the limit that it has. A pool is to be told.
    pub fn close(&self, place: Place, closed: bool) {
        if let Some(terms) = self.changing(place) {
            terms.closed.store(closed, Ordering::Relaxed);
        }
    }

    /// Whether a place is closed.
    pub fn is_closed(&self, place: Place) -> bool {
        self.terms(place).is_some_and(|terms| terms.closed.load(Ordering::Relaxed))
    }

    /// Says whether blocks of other homes may stand at a place from now on. A pool is to be told.
    pub fn lend(&self, place: Place, lends: bool) {
        if let Some(terms) = self.changing(place) {
            terms.lends.store(lends, Ordering::Relaxed);
        }
    }

    /// Whether they may. The host always lends.
    pub fn lends(&self, place: Place) -> bool {
        self.terms(place).is_some_and(|terms| terms.lends.load(Ordering::Relaxed))
    }

    /// Whether new blocks of this home may stand at a place, as far as that goes.
    pub fn takes(&self, place: Place, home: u32) -> bool {
        place == Place::Gpu(home) || self.lends(place)
    }

    /// Charges `bytes` at a place, unless all claims there would then be more than its limit.
    pub fn charge(&self, claim: Claim, place: Place, bytes: u64) -> bool {
        self.charge_all(claim, &[(place, bytes)]).is_ok()
    }

    /// Charges all of these, or none.
    ///
    /// # Errors
    /// A place that has no room below its limit.
    pub fn charge_all(&self, claim: Claim, parts: &[(Place, u64)]) -> Result<(), Place> {
        self.charge_below(claim, parts, |place| self.limit(place))
    }

    /// Charges all of these, or none, where each place may hold `most`, whatever its own limit.
    ///
    /// # Errors
    /// A place that has no room.
    pub fn charge_below(&self, claim: Claim, parts: &[(Place, u64)], most: impl Fn(Place) -> u64) -> Result<(), Place> {
        let mut sums = self.sums.lock();
        let before = sums.clone();
        for &(place, bytes) in parts {
            let index = self.index(place);
            let fits = |index: &usize| sums[*index].taken().checked_add(bytes).is_some_and(|sum| sum <= most(place));
            let Some(index) = index.filter(fits) else {
                *sums = before;
                return Err(place);
            };
            sums[index].charge(claim, bytes);
        }
        Ok(())
    }

    /// Charges what exists already, whatever the limit: memory that could not be given back.
    pub fn charge_existing(&self, claim: Claim, place: Place, bytes: u64) {
        if let Some(index) = self.index(place) {
            self.sums.lock()[index].charge(claim, bytes);
        }
    }

    /// So many bytes of this claim are gone, or were never made.
    pub fn credit(&self, claim: Claim, place: Place, bytes: u64) {
        if let Some(index) = self.index(place) {
            self.sums.lock()[index].credit(claim, bytes);
        }
    }

    fn at<T: Default>(&self, place: Place, read: impl FnOnce(&Sums) -> T) -> T {
        self.index(place).map_or_else(T::default, |index| read(&self.sums.lock()[index]))
    }

    /// Bytes of this claim on a place.
    pub fn of(&self, claim: Claim, place: Place) -> u64 {
        self.at(place, |sums| sums.now[claim as usize])
    }

    /// The most that [`Accounts::of`] ever was.
    pub fn peak_of(&self, claim: Claim, place: Place) -> u64 {
        self.at(place, |sums| sums.peak[claim as usize])
    }

    /// Bytes of all claims on a place.
    pub fn taken(&self, place: Place) -> u64 {
        self.at(place, Sums::taken)
    }

    /// The most that a program used of a place, of which `pooled` is the most that its blocks did: with the memory that it made itself, as far as the limit counts that.
    /// Both may have had their most at different times: never more than what was ever taken there, and no less than what was used at one moment.
    pub fn peak_used(&self, place: Place, pooled: u64) -> u64 {
        self.at(place, |sums| match sums.peak[Claim::Handles as usize] {
            0 => pooled,
            handles => pooled.saturating_add(handles).min(sums.peak_taken.max(pooled)),
        })
    }

    /// Bytes of all claims on a place but this one.
    pub fn taken_by_others(&self, claim: Claim, place: Place) -> u64 {
        self.at(place, |sums| sums.taken().saturating_sub(sums.now[claim as usize]))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const PLACES: [Place; 3] = [Place::Gpu(0), Place::Gpu(1), Place::Host(0)];

    #[test]
    fn the_most_that_was_used_has_the_programs_own_memory_in_it_and_never_more_than_was_taken() {
        let gpu = Place::Gpu(0);
        let accounts = Accounts::new(&[PlaceSpec { place: gpu, limit: 100 }]);
        assert!(accounts.charge(Claim::Pool, gpu, 40));
        assert_eq!(accounts.peak_used(gpu, 30), 30, "only the pool knows what of its memory was used");
        assert!(accounts.charge(Claim::Handles, gpu, 20));
        assert_eq!(accounts.peak_used(gpu, 30), 50);
        accounts.credit(Claim::Pool, gpu, 40);
        assert!(accounts.charge(Claim::Handles, gpu, 50));
        assert_eq!(accounts.peak_used(gpu, 30), 70, "not 100, which never was");
        assert!(!accounts.charge(Claim::Handles, gpu, 31));
        assert_eq!(accounts.peak_used(gpu, 0), 70);
    }

    #[derive(Clone, Debug)]
    enum Op {
        /// Below the place's own limit, or below another.
        Charge {
            claim: usize,
            parts: Vec<(usize, u64)>,
            most: Option<u64>,
        },
        Exists {
            claim: usize,
            place: usize,
            bytes: u64,
        },
        /// Of what is there.
        Credit {
            claim: usize,
            place: usize,
            share: u64,
        },
    }

    fn any_op() -> impl proptest::strategy::Strategy<Value = Op> {
        use proptest::prelude::*;
        let part = || (0..4usize, prop_oneof![8 => 0..60u64, 1 => Just(u64::MAX)]);
        prop_oneof![
            6 => (0..3usize, proptest::collection::vec(part(), 1..4), proptest::option::of(0..200u64))
                .prop_map(|(claim, parts, most)| Op::Charge { claim, parts, most }),
            1 => (0..3usize, 0..3usize, 0..60u64).prop_map(|(claim, place, bytes)| Op::Exists { claim, place, bytes }),
            4 => (0..3usize, 0..3usize, 0..=4u64).prop_map(|(claim, place, share)| Op::Credit { claim, place, share }),
        ]
    }

    proptest::proptest! {
        #[test]
        fn it_answers_as_a_plain_sum_does(ops in proptest::collection::vec(any_op(), 1..80)) {
            let limits = [100, 50, 0];
            let specs = [0, 1, 2].map(|index| PlaceSpec { place: PLACES[index], limit: limits[index] });
            let accounts = Accounts::new(&specs);
            let place = |index: usize| PLACES.get(index).copied().unwrap_or(Place::Gpu(9));
            let mut sums: BTreeMap<(usize, usize), u128> = BTreeMap::new();
            let all = |sums: &BTreeMap<(usize, usize), u128>, at: usize| {
                sums.iter().filter(|entry| entry.0.1 == at).map(|entry| *entry.1).sum::<u128>()
            };
            for op in ops {
                match op {
                    Op::Charge { claim, parts, most } => {
                        let mut then = sums.clone();
                        let mut refused = None;
                        for &(at, bytes) in &parts {
                            let most = most.unwrap_or_else(|| limits.get(at).copied().unwrap_or(0));
                            if refused.is_none() && (at > 2 || all(&then, at) + u128::from(bytes) > u128::from(most)) {
                                refused = Some(place(at));
                            }
                            *then.entry((claim, at)).or_default() += u128::from(bytes);
                        }
                        let parts: Vec<(Place, u64)> = parts.iter().map(|&(at, bytes)| (place(at), bytes)).collect();
                        let answer = match most {
                            Some(most) => accounts.charge_below(Claim::ALL[claim], &parts, |_| most),
                            None => accounts.charge_all(Claim::ALL[claim], &parts),
                        };
                        proptest::prop_assert_eq!(answer, refused.map_or(Ok(()), Err));
                        if refused.is_none() {
                            sums = then;
                        }
                    }
                    Op::Exists { claim, place: at, bytes } => {
                        accounts.charge_existing(Claim::ALL[claim], place(at), bytes);
                        *sums.entry((claim, at)).or_default() += u128::from(bytes);
                    }
                    Op::Credit { claim, place: at, share } => {
                        let held = sums.entry((claim, at)).or_default();
                        let bytes = (*held * u128::from(share) / 4) as u64;
                        *held -= u128::from(bytes);
                        accounts.credit(Claim::ALL[claim], place(at), bytes);
                    }
                }
                for at in 0..3 {
                    proptest::prop_assert_eq!(u128::from(accounts.taken(place(at))), all(&sums, at));
                    for claim in 0..3 {
                        let held = sums.get(&(claim, at)).copied().unwrap_or(0);
                        let name = Claim::ALL[claim];
                        proptest::prop_assert_eq!(u128::from(accounts.of(name, place(at))), held);
                        proptest::prop_assert_eq!(
                            u128::from(accounts.taken_by_others(name, place(at))),
                            all(&sums, at) - held
                        );
                        proptest::prop_assert!(accounts.peak_of(name, place(at)) >= accounts.of(name, place(at)));
                    }
                }
            }
        }
    }
}
