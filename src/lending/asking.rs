//! One question to several: who is asked next, and what follows from what each answers.

use crate::{Offer, What, next_round, sort};
use std::collections::{BTreeMap, BTreeSet};

/// How often in one question those are asked again that are in the middle of borrowing: what is on its way to become a block's is none yet, and cannot be given. Who
/// borrows all the time would be asked for all of the time otherwise.
const AGAIN: u32 = 15;

/// What one has freed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// So much. `loans`: what it still has there for other GPUs.
    Freed {
        /// Bytes.
        bytes: u64,
        /// Bytes.
        loans: u64,
    },
    /// Nothing, and why, in its words.
    Refused(String),
    /// It has ended, and the driver has taken back all that it had.
    Ended,
    /// It is stopped, and answers nobody before it goes on.
    Halted,
    /// It will not answer, or has said nothing in the short time for which one is waited for that is not known to have any.
    None,
    /// It has said nothing for as long as anybody is waited for.
    Silent,
    /// It was answering those who had come earlier.
    Busy,
}

/// What follows from an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Nothing but who is asked next.
    Nothing,
    /// So much is free.
    Freed(u64),
    /// All that it had is free, or soon is: so much of what it was asked for.
    Ended(u64),
    /// It is asked again in a moment.
    Again,
    /// It is not asked for a while, whatever is lacking.
    LeaveAlone,
    /// It is not asked for memory of this GPU for a while.
    HasNone,
}

/// What one was asked for, and gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Bytes that it was asked for.
    pub asked: u64,
    /// Bytes that it freed.
    pub freed: u64,
    /// What it answered last, unless it gave what it was asked for.
    pub why: Option<Answer>,
}

/// Who has not been asked yet, and what the others said. Each is known by its number.
#[derive(Debug, Default)]
pub struct Asking {
    left: Vec<Offer<u32>>,
    /// Who has said nothing so far. It is asked again behind the others.
    late: Vec<Offer<u32>>,
    /// Who answered others all the time, and may be asked again at once.
    busy: BTreeSet<u32>,
    silent: BTreeSet<u32>,
    told: BTreeMap<u32, Told>,
    again: u32,
}

impl Asking {
    /// Of these.
    pub fn new(offers: Vec<Offer<u32>>) -> Self {
        Self { left: offers, ..Self::default() }
    }

    /// More is known now of who gives what; who is late stays so.
    pub fn learn(&mut self, offers: Vec<Offer<u32>>) {
        self.left = offers;
        self.left.retain(|offer| self.late.iter().all(|late| late.who != offer.who));
    }

    /// What is asked for next; `None`: nobody is left.
    pub fn next_kind(&mut self) -> Option<What> {
        if self.left.is_empty() {
            self.left = std::mem::take(&mut self.late);
        }
        sort(&mut self.left);
        self.left.first().map(|offer| offer.what)
    }

    /// Who is asked now for so many bytes, each with its share ([`next_round`]).
    pub fn round(&mut self, bytes: u64, ahead: u64) -> Vec<(Offer<u32>, u64)> {
        let round = next_round(&mut self.left, bytes, ahead);
        for (offer, share) in &round {
            let told = self.told.entry(offer.who).or_default();
            told.asked = told.freed.saturating_add(*share);
        }
        round
    }

    /// Whether anybody beside these can be asked; `known`: of whom it is known what it gives.
    pub fn has_others(&self, round: &[(Offer<u32>, u64)], known: bool) -> bool {
        let is_other = |of: &Offer<u32>| round.iter().all(|(offer, _)| offer.who != of.who);
        self.left.iter().chain(&self.late).any(|of| is_other(of) && (of.what.is_known() || !known))
    }

    /// One of a round has answered. `borrows`: whether it is in the middle of borrowing.
    pub fn answered(&mut self, offer: &Offer<u32>, share: u64, answer: Answer, borrows: impl FnOnce() -> bool) -> Then {
        let knows = offer.what.is_known();
        let is_left = self.left.iter().any(|of| of.who == offer.who);
        let told = self.told.entry(offer.who).or_default();
        told.why = Some(answer.clone());
        match answer {
            Answer::Freed { bytes, loans } if bytes > 0 => {
                told.freed = told.freed.saturating_add(bytes);
                told.why = None;
                let rest = offer.bytes.saturating_sub(bytes);
                let more = match offer.what {
                    _ if bytes < share => None,
                    _ if loans > 0 => Some((What::Loans, loans)),
                    What::Own if rest > 0 => Some((What::Own, rest)),
                    // Who gave all that was known may have more.
                    What::Own | What::New => Some((What::New, 0)),
                    What::Loans | What::NewLoans => None,
                };
                self.left.extend(more.map(|(what, bytes)| Offer { what, bytes, ..offer.clone() }));
                Then::Freed(bytes)
            }
            Answer::Ended => {
                self.left.retain(|of| of.who != offer.who);
                Then::Ended(if knows { share } else { 0 })
            }
            Answer::Busy => {
                self.busy.insert(offer.who);
                self.late.extend(Some(offer.clone()).filter(|_| knows));
                Then::Nothing
            }
            Answer::Freed { .. } if self.again < AGAIN && borrows() => {
                self.again += 1;
                self.left.push(offer.clone());
                Then::Again
            }
            // Of its belongings it may have some to give yet; and who was asked for loans of which nobody knows is waited for a short time only.
            Answer::Freed { .. } | Answer::Refused(_) if is_left => Then::Nothing,
            Answer::None if !knows && is_left => Then::Nothing,
            Answer::Silent => {
                self.late.push(offer.clone());
                self.late.extend(self.left.extract_if(.., |of| of.who == offer.who));
                Then::Nothing
            }
            Answer::None if knows => {
                self.silent.insert(offer.who);
                self.left.retain(|of| of.who != offer.who);
                Then::LeaveAlone
            }
            // Once it goes on it is asked again.
            Answer::Halted => {
                self.silent.insert(offer.who);
                self.left.retain(|of| of.who != offer.who);
                Then::Nothing
            }
            Answer::None | Answer::Freed { .. } | Answer::Refused(_) => Then::HasNone,
        }
    }

    /// Those who have said nothing to the end, and were not answering others.
    pub fn hung(&self) -> BTreeSet<u32> {
        self.late.iter().map(|offer| offer.who).filter(|who| !self.busy.contains(who)).collect()
    }

    /// How many did not answer.
    pub fn silent(&self) -> usize {
        self.silent.union(&self.hung()).count()
    }

    /// How many were answering others all the time, at least once.
    pub fn busy(&self) -> usize {
        self.busy.len()
    }

    /// Who was asked, by number.
    pub fn told(&self) -> &BTreeMap<u32, Told> {
        &self.told
    }
}

/// Whether nobody gives anything for what would not be there in the end: all of it is known, and less than the least that is of any use.
pub fn is_in_vain<T>(offers: &[Offer<T>], least: u64) -> bool {
    let is_known = offers.iter().all(|offer| offer.what.is_known());
    !offers.is_empty() && is_known && offers.iter().map(|offer| offer.bytes).sum::<u64>() < least
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Answer = Answer::Freed { bytes: 0, loans: 0 };

    fn offer(who: u32, what: What, bytes: u64) -> Offer<u32> {
        Offer { what, bytes, priority: 1, who }
    }

    fn freed(bytes: u64) -> Answer {
        Answer::Freed { bytes, loans: 0 }
    }

    /// Who is asked in this round, each with its share.
    fn round(asking: &mut Asking, bytes: u64) -> Vec<(Offer<u32>, u64)> {
        assert!(asking.next_kind().is_some());
        asking.round(bytes, 0)
    }

    fn says(asking: &mut Asking, bytes: u64, answer: Answer) -> (u32, Then) {
        let round = round(asking, bytes);
        let [(offer, share)] = &round[..] else { panic!("{round:?}") };
        (offer.who, asking.answered(offer, *share, answer, || false))
    }

    #[test]
    fn who_says_nothing_is_asked_again_behind_all_others_and_counts_once() {
        let mut asking = Asking::new(vec![offer(1, What::Loans, 9), offer(1, What::Own, 5), offer(2, What::Own, 9)]);
        let first = round(&mut asking, 7);
        assert!(asking.has_others(&first, true));
        assert_eq!(asking.answered(&first[0].0, 7, Answer::Silent, || true), Then::Nothing);
        // It is asked for nothing of its own either before the others were.
        assert_eq!(says(&mut asking, 7, freed(4)), (2, Then::Freed(4)));
        let again = round(&mut asking, 3);
        assert_eq!((again[0].0.who, again[0].0.what, asking.has_others(&again, false)), (1, What::Loans, false));
        assert_eq!(asking.answered(&again[0].0, 3, Answer::Silent, || true), Then::Nothing);
        assert_eq!((asking.hung(), asking.silent(), asking.busy()), (BTreeSet::from([1]), 1, 0));
        let told =
            [(1, Told { asked: 3, freed: 0, why: Some(Answer::Silent) }), (2, Told { asked: 7, freed: 4, why: None })];
        assert_eq!(asking.told(), &BTreeMap::from(told));
    }

    #[test]
    fn who_gave_all_that_was_known_is_asked_for_what_it_says_it_has_or_may_have() {
        let mut asking = Asking::new(vec![offer(1, What::Loans, 4), offer(2, What::Own, 4)]);
        assert_eq!(says(&mut asking, 4, Answer::Freed { bytes: 4, loans: 6 }).1, Then::Freed(4));
        assert_eq!(round(&mut asking, 5)[0], (offer(1, What::Loans, 6), 5));
        assert_eq!(says(&mut asking, 4, freed(4)), (2, Then::Freed(4)));
        assert_eq!(asking.next_kind(), Some(What::New));
        // Less than it was asked for: it has no more.
        assert_eq!(says(&mut asking, 9, freed(5)), (2, Then::Freed(5)));
        assert_eq!(asking.next_kind(), None);
        assert_eq!(asking.told()[&2], Told { asked: 13, freed: 9, why: None });
    }

    #[test]
    fn who_is_in_the_middle_of_borrowing_is_asked_again_but_not_for_ever() {
        let mut asking = Asking::new(vec![offer(1, What::Loans, 4), offer(2, What::Own, 9)]);
        for _ in 0..AGAIN {
            let now = round(&mut asking, 3);
            assert_eq!(now, [(offer(1, What::Loans, 4), 3)]);
            assert_eq!(asking.answered(&now[0].0, 3, NONE, || true), Then::Again);
        }
        let now = round(&mut asking, 3);
        assert_eq!(asking.answered(&now[0].0, 3, NONE, || true), Then::HasNone);
        assert_eq!(round(&mut asking, 3)[0].0.who, 2);
    }

    #[test]
    fn who_refuses_ends_or_is_stopped_is_asked_no_more_and_who_is_busy_is() {
        let words = || Answer::Refused("it matters more".to_owned());
        let two = || Asking::new(vec![offer(1, What::Loans, 4), offer(1, What::Own, 4)]);
        for (answer, then, next) in [
            (words(), Then::Nothing, Some(What::Own)),
            (Answer::Ended, Then::Ended(3), None),
            (Answer::Halted, Then::Nothing, None),
            (Answer::None, Then::LeaveAlone, None),
        ] {
            let mut asking = two();
            assert_eq!(says(&mut asking, 3, answer.clone()), (1, then), "{answer:?}");
            assert_eq!(asking.next_kind(), next, "{answer:?}");
            assert_eq!(asking.silent(), usize::from(matches!(answer, Answer::Halted | Answer::None)));
        }
        let mut asking = Asking::new(vec![offer(1, What::Own, 4)]);
        assert_eq!(says(&mut asking, 3, Answer::Busy), (1, Then::Nothing));
        assert_eq!((asking.hung().len(), asking.busy(), asking.next_kind()), (0, 1, Some(What::Own)));
        // Nobody knew that it has any.
        let mut asking = Asking::new(vec![offer(1, What::New, 0)]);
        assert_eq!(says(&mut asking, 3, words()), (1, Then::HasNone));
        assert_eq!((asking.silent(), asking.next_kind()), (0, None));
    }

    #[test]
    fn less_than_the_least_that_is_of_use_is_asked_of_nobody() {
        let known = [offer(1, What::Own, 4), offer(2, What::Loans, 4)];
        assert_eq!([8, 9].map(|least| is_in_vain(&known, least)), [false, true]);
        assert!(!is_in_vain(&[known[0].clone(), offer(2, What::New, 0)], 99) && !is_in_vain::<u32>(&[], 99));
    }
}
