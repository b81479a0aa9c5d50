//! Who gives way to whom, how much, and when it may come back: what processes decide about each other's memory, as pure logic. It asks nobody, reads no
//! clock and moves nothing. `src/shim/recall` does what it says, and `tests/day.rs` plays a day of a machine by it.
//!
//! - **Loans before belongings.** What lies on a GPU for the sake of another one is a loan, and whoever works there may call it back unless its priority is
//!   lower. What a program has on its own GPU gives way to a higher priority alone. So of two programs at most one gives way to the other, but for loans.
//! - **As few as possible are asked**, in this order: for loans before belongings, of those who have some who matters least, and of these who has most. What follows from what
//!   each answers is [`Asking`]'s.
//! - **In whole parts**, chosen together where one that goes first would be in the way of what is enough ([`choose`]).
//! - **Seldom.** Who asks again at once is on its way to more, and asks for as much again as it has got so far ([`Growth`]).
//! - **No ping-pong.** What was given stays away for a time, twice as long each time that it was asked for soon after it had come back, and comes back
//!   only where beside the reserve as much again is free.
//! - **Who cannot ask** is looked for, more often while somebody begins to use CUDA ([`Coming`]), and given way to before it is seen where a GPU's memory in use
//!   grows by none of ours ([`InUse`], [`Alarm`]).
//! - **What leaves unasked** is tried until it has left, and holds its program up for a bounded part of the time ([`Leaving`]).

mod asking;
mod choosing;
mod coming;
mod leaving;

pub use asking::{Answer, Asking, Then, Told, is_in_vain};
pub use choosing::{Part, choose};
pub use coming::{AWAITED, Alarm, Coming, Heed, INIT, InUse, Listed};
pub use leaving::{Due, Leaving, Whom};

use std::time::Duration;

/// What a context takes of a GPU where nobody knows better, bytes (H200, driver 580).
pub const CONTEXT: u64 = 523 << 20;
/// No more than this part of a GPU is kept free for somebody's context.
const CONTEXTS: u64 = 8;

/// Bytes that stay free for somebody's context on a GPU of `total` bytes from which a process only borrows, and leaves for whoever comes, whatever its reserve: what
/// `cuInit` and a context take. Who was refused its context is never seen, and nothing would leave for it. `context`: what a context takes here, where that is known.
pub fn kept_for_context(total: u64, context: Option<u64>) -> u64 {
    context.unwrap_or(CONTEXT).saturating_add(INIT).min(total / CONTEXTS)
}

/// How long nothing of what was given is taken back, at first.
pub const GUARD: Duration = Duration::from_secs(10);
/// And at most.
pub const LONGEST_GUARD: Duration = Duration::from_secs(320);

/// What another process has of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stake {
    pub priority: u32,
    /// Bytes that it has there for other GPUs.
    pub lent: u64,
    /// Bytes that it has there for that GPU, with what is free of them.
    pub own: u64,
    /// It may have come to have more loans since that was known: it has just borrowed, of this GPU or another one.
    pub borrows: bool,
}

impl Stake {
    /// Whether it is worth asking, for a program of this priority: it may have come to have something by now.
    pub fn may_give(&self, priority: u32) -> bool {
        self.priority <= priority
    }

    /// Bytes that it gives to a program of this priority, but for what it is guaranteed.
    pub fn gives(&self, priority: u32) -> u64 {
        match terms(self.priority, priority, 0) {
            Some(Terms { lent: true, .. }) => self.lent,
            Some(Terms { lent: false, .. }) => self.lent + self.own,
            None => 0,
        }
    }
}

/// Of so many bytes that a program lacks of a GPU, those for which it is above all others: it `has` so much there, with what is free.
pub fn guaranteed(has: u64, lacks: u64, guarantee: u64) -> u64 {
    guarantee.saturating_sub(has).min(lacks)
}

/// What somebody may give.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// What it has there for other GPUs.
    Loans,
    /// The same of one that may have come to have some by now.
    NewLoans,
    /// What it has there for that GPU.
    Own,
    /// Whatever it has come to have there: nothing is known of it, and what is known is up to a second old.
    New,
}

impl What {
    /// Whether nothing but loans is asked for.
    pub fn is_loans(self) -> bool {
        matches!(self, What::Loans | What::NewLoans)
    }

    /// Whether so much is known to be there.
    pub fn is_known(self) -> bool {
        matches!(self, What::Loans | What::Own)
    }
}

/// So many bytes that one may give; 0 where that is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer<T> {
    pub what: What,
    pub bytes: u64,
    pub priority: u32,
    pub who: T,
}

/// What others may give to a program of this priority, in the order in which they are asked for it: nobody's belongings before everybody's loans.
pub fn in_order<T: Clone>(others: impl IntoIterator<Item = (Stake, T)>, priority: u32) -> Vec<Offer<T>> {
    let offers = |(stake, who): (Stake, T)| {
        let own = stake.gives(priority) - stake.gives(priority).min(stake.lent);
        let loans = stake.gives(priority) - own;
        let of_loans = match loans {
            0 => (stake.borrows && stake.may_give(priority)).then_some((What::NewLoans, 0)),
            _ => Some((What::Loans, loans)),
        };
        let of_own = match own {
            0 if loans == 0 => stake.may_give(priority).then_some((What::New, 0)),
            0 => None,
            _ => Some((What::Own, own)),
        };
        of_loans.into_iter().chain(of_own).map(move |(what, bytes)| Offer {
            what,
            bytes,
            priority: stake.priority,
            who: who.clone(),
        })
    };
    let mut all: Vec<Offer<T>> = others.into_iter().flat_map(offers).collect();
    sort(&mut all);
    all
}

/// Puts them in that order.
pub fn sort<T>(offers: &mut [Offer<T>]) {
    offers.sort_by_key(|offer| (offer.what, offer.priority, u64::MAX - offer.bytes));
}

/// Takes those out who are asked next for so many bytes, each with its share: as many as have enough loans together, as far as is known, then those that
/// may have more, one after the other, each of which is asked for all of it and says at once whether it has any; then belongings, the same way. Of the last one that is known to have enough so many bytes more are
/// asked for as are wanted `ahead`: nobody is asked for these alone.
pub fn next_round<T>(offers: &mut Vec<Offer<T>>, bytes: u64, ahead: u64) -> Vec<(Offer<T>, u64)> {
    let Some(what) = offers.first().map(|offer| offer.what) else { return Vec::new() };
    let (mut missing, mut asked) = (bytes, Vec::new());
    while missing > 0 && offers.first().is_some_and(|offer| offer.what == what) {
        let offer = offers.remove(0);
        let share = if what.is_known() { offer.bytes.min(missing.saturating_add(ahead)) } else { missing };
        missing = if what.is_known() { missing.saturating_sub(share) } else { missing };
        asked.push((offer, share));
        // Asked at once, each would give all of it.
        if !what.is_known() {
            break;
        }
    }
    asked
}

/// How long after a question the next one is part of the same growth.
pub const GROWS_FOR: Duration = Duration::from_secs(1);
/// What is asked for ahead at most: about what leaves in half a second.
pub const MOST_AHEAD: u64 = 16 << 30;

/// What a program has got of one GPU by questions that came soon one after the other: as where it takes block after block. Each question costs, so it asks for as much
/// again as it has got, beyond what it lacks: of what it did not need in the end, it has been given no more than it took. That comes back to whoever gave it after
/// the guard time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Growth(u64);

impl Growth {
    /// Bytes to ask for ahead, so long after the last question was answered; `room`: what the program may have there beyond what it lacks.
    pub fn ahead(&mut self, since: Duration, room: u64) -> u64 {
        if since > GROWS_FOR {
            self.0 = 0;
        }
        self.0.min(MOST_AHEAD).min(room)
    }

    /// So much was freed for it.
    pub fn got(&mut self, bytes: u64) {
        self.0 = self.0.saturating_add(bytes);
    }
}

/// On which terms a program gives way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Only what is there for other GPUs, and what is free.
    pub lent: bool,
    /// So many bytes stay in any case.
    pub floor: u64,
}

/// On which terms a program of priority `own`, guaranteed so many bytes there, gives way to one of another priority; `None`: not at all.
pub fn terms(own: u32, asker: u32, guarantee: u64) -> Option<Terms> {
    match asker.cmp(&own) {
        std::cmp::Ordering::Less => None,
        std::cmp::Ordering::Equal => Some(Terms { lent: true, floor: 0 }),
        std::cmp::Ordering::Greater => Some(Terms { lent: false, floor: guarantee }),
    }
}

/// How long what was given of one GPU stays away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard {
    time: Duration,
    is_doubled: bool,
}

impl Default for Guard {
    fn default() -> Self {
        Self { time: GUARD, is_doubled: false }
    }
}

impl Guard {
    /// Something came back.
    pub fn came_back(&mut self) {
        self.is_doubled = false;
    }

    /// It is asked for again, so long after something came back: the time for which it stays away now.
    pub fn asked(&mut self, since: Duration) -> Duration {
        if since >= 2 * self.time {
            self.time = GUARD;
        } else if !self.is_doubled {
            // Once for each time that it came back: who asks may ask for what it needs in many steps.
            (self.time, self.is_doubled) = ((self.time * 2).min(LONGEST_GUARD), true);
        }
        self.time
    }
}

/// Bytes that may come back to a GPU of which so many are free: the reserve stays free, and as much again, so that who needs some does not have to
/// ask at once. `limit`: what the process may have there beyond what it has.
pub fn room(free: u64, reserve: u64, limit: u64) -> u64 {
    free.saturating_sub(2 * reserve).min(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stake(priority: u32, lent: u64, own: u64) -> Stake {
        Stake { priority, lent, own, borrows: false }
    }

    #[test]
    fn loans_go_to_equals_and_all_goes_to_who_matters_more() {
        assert_eq!(stake(50, 3, 5).gives(50), 3);
        assert_eq!(stake(50, 3, 5).gives(51), 8);
        assert_eq!(stake(50, 3, 5).gives(49), 0);
        assert_eq!(terms(50, 90, 7), Some(Terms { lent: false, floor: 7 }));
        assert_eq!(terms(50, 50, 7), Some(Terms { lent: true, floor: 0 }));
        assert_eq!(terms(50, 49, 7), None);
        assert_eq!((guaranteed(6, 4, 10), guaranteed(6, 5, 10), guaranteed(u64::MAX, 1, 10)), (4, 4, 0));
    }

    #[test]
    fn borrowers_are_asked_first_then_who_matters_least_and_only_as_many_as_have_enough() {
        let others = [
            (stake(10, 0, 9), "own"),
            (stake(99, 9, 0), "above"),
            (stake(50, 6, 9), "much"),
            (stake(20, 2, 0), "least"),
            (stake(10, 0, 0), "none"),
            (stake(10, 0, 0), "none too"),
            (Stake { borrows: true, ..stake(20, 0, 9) }, "new"),
        ];
        let order = in_order(others, 60);
        let told = |offers: &[Offer<&'static str>]| -> Vec<_> {
            offers.iter().map(|offer| (offer.who, offer.what, offer.bytes)).collect()
        };
        let expected = [
            ("least", What::Loans, 2),
            ("much", What::Loans, 6),
            ("new", What::NewLoans, 0),
            ("own", What::Own, 9),
            ("new", What::Own, 9),
            ("much", What::Own, 9),
            ("none", What::New, 0),
            ("none too", What::New, 0),
        ];
        assert_eq!(told(&order), expected);
        let rounds = |shares: &[(u64, u64)]| {
            let mut left = order.clone();
            let mut round = |(bytes, ahead): &(u64, u64)| -> Vec<_> {
                next_round(&mut left, *bytes, *ahead).into_iter().map(|(offer, share)| (offer.who, share)).collect()
            };
            shares.iter().map(&mut round).collect::<Vec<_>>()
        };
        // Ahead is asked for where there is more than what lacks, and nobody more is asked for it.
        let all = rounds(&[(3, 9), (5, 0), (5, 9)]);
        assert_eq!(all, [vec![("least", 2), ("much", 6)], vec![("new", 5)], vec![("own", 9)]]);
        // No belongings in one round with loans: what was loaned may have become more since that was known.
        let all = rounds(&[(20, 0), (12, 0), (12, 0), (12, 0), (2, 0), (2, 0)]);
        assert_eq!((&all[0], &all[2]), (&vec![("least", 2), ("much", 6)], &vec![("own", 9), ("new", 3)]));
        assert_eq!(all[3..], [vec![("much", 9)], vec![("none", 2)], vec![("none too", 2)]]);
    }

    #[test]
    fn who_is_asked_soon_again_waits_longer_once_for_each_time_that_it_came_back() {
        let seconds = Duration::from_secs;
        let mut guard = Guard::default();
        assert_eq!((guard.asked(seconds(5)), guard.asked(seconds(6))), (seconds(20), seconds(20)));
        guard.came_back();
        assert_eq!(guard.asked(seconds(39)), seconds(40));
        for _ in 0..9 {
            guard.came_back();
            guard.asked(seconds(1));
        }
        assert_eq!(guard.asked(seconds(1)), LONGEST_GUARD);
        assert_eq!(guard.asked(2 * LONGEST_GUARD), GUARD);
    }

    #[test]
    fn who_takes_block_after_block_asks_for_as_much_again_as_it_got_and_who_does_not_for_what_it_lacks() {
        const GIB: u64 = 1 << 30;
        let (soon, later) = (Duration::from_millis(10), GROWS_FOR + Duration::from_millis(1));
        let mut growth = Growth::default();
        // Blocks of a gibibyte: how many questions 50 of them take.
        let (mut questions, mut free) = (0, 0);
        for _ in 0..50 {
            if free == 0 {
                let bytes = GIB + growth.ahead(soon, u64::MAX);
                growth.got(bytes);
                (questions, free) = (questions + 1, bytes / GIB);
            }
            free -= 1;
        }
        assert_eq!(questions, 7);
        assert_eq!((growth.ahead(soon, u64::MAX), growth.ahead(soon, 3)), (MOST_AHEAD, 3));
        assert_eq!((growth.ahead(later, u64::MAX), growth.ahead(soon, u64::MAX)), (0, 0));
    }

    #[test]
    fn nothing_comes_back_into_the_reserve() {
        assert_eq!((room(10, 3, 9), room(10, 3, 2), room(5, 3, 9)), (4, 2, 0));
    }
}
