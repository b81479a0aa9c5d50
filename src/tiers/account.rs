//! What moves cost and what they brought: the guard against losing by it.
//!
//! **The aim**: a program takes at most 1.02 times as long as it would if nothing had moved. As far as what is below holds, so does that, at every moment, not only
//! in the end, by an account that is paid into before anything is paid from it:
//! - In come a fixed part of the time that has passed ([`RISK`]) and what launches took less than they would have where memory
//!   first lay, as far as that was measured. Nothing is lent in advance.
//! - Out go what moves took, and what launches took more. A launch of which nothing was measured is charged for reading its operands
//!   [`UNKNOWN`](crate::kinds::UNKNOWN) times.
//! - Of the balance, as much is **reserved** as bringing everything back would take that was near at first and is far now, and what launches may lose by
//!   it until it comes back: a quarter of that ([`Extent::is_due`](crate::extents::Extent::is_due)). Of what cycles that use all memory show to lose little, only what it loses in eight of
//!   them: until then its way back is earned ([`Extents::keep_at_most`](crate::extents::Extents::keep_at_most)).
//!
//! Two rules keep the balance at or above the reserve. Memory moves only if what is free pays for the move and for the way back of
//! what leaves; and a launch that may lose more than what is free has those of its operands brought back first by which launches have lost that quarter. The reserve
//! pays for both. Where launches cannot wait, that comes back at the next point of rest instead. It is the rule of who rents skis and does not know how often they will be used: what comes back at its first loss costs a swap for one reading that
//! it would have saved, and where a model writes a word between two readings, a hundred of these at once.
//! (There is always room for that: whatever was near at first fitted beside all else that was.) So moves and losses never exceed
//! `RISK` of the time and the gains: with `T` for the time without moves, `t` with them, `t <= T + RISK * t`, and `t <= 1.02 * T`.
//!
//! What is credited and charged is what was measured, 5 % less and 5 % more, since that is how exactly it is told. An operand of which
//! nothing was measured is credited with nothing and charged in full: what a launch gains by one does not make up for what it may lose by
//! another. As soon as one launch of its function and sizes is measured, all that were charged like that are charged anew, and what was too much is given back
//! ([`Unmeasured`](crate::unmeasured::Unmeasured)). Times that contradict what is known, two in a row or one of three, make it unknown again.
//!
//! What this rests on: a move takes about what it was reckoned to (what it takes more is paid from what is free, and can exceed that
//! once; what moves took beside what they were reckoned with is what later ones are reckoned with, and the way back of all that left); what is to come back can (who cannot move it has told so); and a launch of the same function with the same operands
//! reads them as often as when it was measured. Nobody can check the last while they are near. And where new memory would have lain if
//! nothing had moved is known, and so is what a launch reads. That cannot be known: a pointer says where it begins, and nothing where it
//! ends. It is taken to go on as far as other launches of its function and sizes, at most to where the next pointer leads. Where that
//! is too far, as with a tensor behind which others lie that were not named for long, a launch is credited with what it does not read,
//! and the mean of what its function reads in earnest and does not read passes for measured, until times contradict it. Of some 80 000 to 95 000
//! random programs one lost more by it (`tests/all/properties.rs`). How much can be lost where it is wrong is bounded by the balance's limit,
//! [`MOST`], as soon as it is noticed: good times do not pay for long bad ones.
//!
//! As long as each launch is what it was before the first move, gains are compared with the time of whole cycles: what the clock does not
//! confirm is taken back, and where cycles are slower and nothing is left to lose, all that was near at first comes back.
//!
//! Beside it, a clock that knows nothing of gains: if cycles take longer than before the first move, eight in a row, moving stops.
//! Who was stopped waits: 64 cycles, after each further time twice as many, or until the program does something else.

use crate::interface::{Ledger, Why};
use crate::links::Links;

/// The part of the time that may be lost, at most: 0.02 of what it would have been.
const RISK: f64 = 0.02 / 1.02;
/// Cycles in a row that have to be slower, or without anything gained.
const SLOW: u32 = 8;
/// By how much.
const SLOWER: f64 = 1.03;
const WAIT: u64 = 64;
/// How often swapping everything could be paid from what is free, at most.
const MOST: f64 = 8.0;

#[derive(Debug, Default)]
pub struct Account {
    /// The part of the time that may be lost.
    risk: f64,
    pub spent_ns: f64,
    pub saved_ns: f64,
    balance: f64,
    /// What bringing everything back would take.
    pub reserve: f64,
    /// What swapping everything would take.
    all_ns: f64,
    /// What the time has paid in so far.
    paid_in: f64,
    /// Something was worth moving in this cycle and could not be paid; in how many in a row, while nothing was gained.
    refused: bool,
    unpaid: u32,
    is_unpaid: Option<Why>,
    now: Option<u64>,
    /// Launches of a cycle before anything moved, the bytes that they named, and the nanoseconds of the longest.
    before: Option<(u64, u64, f64)>,
    slow: u32,
    /// Each launch since then was what it was before: the clock's figures can be compared.
    is_same: bool,
    /// What was saved and spent when the present cycle began.
    at_begin: (f64, f64),
    /// What was credited more than the clock says that cycles took less, over the last ones that can be compared.
    doubt_ns: f64,
    /// The clock has contradicted the gains: everything has to come back.
    is_wrong: bool,
    pub cycle_ns: f64,
    cycle_began: Option<u64>,
    stopped: Option<Why>,
    untold: bool,
    until: u64,
    wait: u64,
}

impl Account {
    /// Where moves may take this part of the time ([`crate::Settings::share`]). No more than that is risked, and never more than [`RISK`].
    pub fn new(share: f64) -> Self {
        let mut account = Self::default();
        account.set_share(share);
        account
    }

    /// They may take another part of it from now on.
    pub fn set_share(&mut self, share: f64) {
        self.risk = RISK.min(share.max(0.0));
    }

    /// What swapping all near memory takes.
    pub fn grant(&mut self, swap_all_ns: f64) {
        self.all_ns = self.all_ns.max(swap_all_ns);
    }

    /// What may be lost.
    pub fn free(&self) -> f64 {
        self.balance - self.reserve
    }

    pub fn ledger(&self, cycles: u64, length: Option<u64>) -> Ledger {
        Ledger {
            cycles,
            length,
            cycle_ns: self.cycle_ns,
            spent_ns: self.spent_ns,
            saved_ns: self.saved_ns,
            free_ns: self.free(),
            reserve_ns: self.reserve,
            doubt_ns: self.doubt_ns,
        }
    }

    fn add(&mut self, ns: f64) {
        if ns.is_finite() {
            let most = (self.reserve + MOST * self.all_ns).max(self.balance);
            self.balance = (self.balance + ns).min(most);
        }
    }

    /// The time.
    pub fn time_is(&mut self, now: u64) {
        let passed = self.now.map_or(0, |before| now.saturating_sub(before));
        self.now = Some(now.max(self.now.unwrap_or(0)));
        self.paid_in += passed as f64 * self.risk;
        self.add(passed as f64 * self.risk);
    }

    pub fn saved(&mut self, ns: f64) {
        if ns.is_finite() {
            self.saved_ns += ns;
        }
        self.add(ns);
    }

    pub fn spent(&mut self, ns: f64) {
        self.spent_ns += ns;
        self.add(-ns);
    }

    /// Whether what can be paid, with its way back, is more than what any move costs besides copying. Something is worth it.
    pub fn can_move(&mut self, links: &Links) -> bool {
        let may = self.free() > 4.0 * links.drain_ns + 16.0 * links.remap_ns;
        self.refused |= !may;
        may
    }

    /// Whether so much may be spent and so much more reserved.
    ///
    /// On a known cycle nothing moves before it was measured how long it takes as it is.
    pub fn may_spend(&mut self, ns: f64, reserve: f64, is_known: bool) -> bool {
        if is_known && self.spent_ns == 0.0 && self.before.is_none() {
            return false;
        }
        let may = ns + reserve <= self.free();
        self.refused |= !may;
        may && self.stopped.is_none()
    }

    fn stop(&mut self, why: Why, cycle: u64) {
        self.stopped = Some(why);
        self.untold = true;
        self.wait = (self.wait * 2).clamp(WAIT, WAIT << 10);
        self.until = cycle + self.wait;
        self.slow = 0;
    }

    /// A cycle of so many launches, which named so many bytes, has ended now; `is_same`: each was what it was in the one before.
    pub fn cycle(&mut self, now: u64, length: Option<u64>, bytes: u64, cycle: u64, is_same: bool) {
        self.is_same &= is_same;
        let took = self.cycle_began.map(|began| now.saturating_sub(began) as f64);
        self.cycle_began = Some(now);
        if cycle >= self.until {
            self.stopped = None;
            self.is_wrong = false;
        }
        let in_vain = std::mem::take(&mut self.refused) && self.spent_ns - self.saved_ns > 0.5 * self.paid_in;
        self.unpaid = if in_vain { self.unpaid + 1 } else { 0 };
        if self.unpaid >= SLOW && self.stopped.is_none() {
            // Nothing has to be stopped, since nothing can be paid: it is only told.
            self.untold = self.is_unpaid.is_none();
            self.is_unpaid = Some(Why::Unpaid { spent_ns: self.spent_ns, saved_ns: self.saved_ns });
        } else if self.saved_ns > self.spent_ns {
            self.is_unpaid = None;
        }
        let before = std::mem::replace(&mut self.at_begin, (self.saved_ns, self.spent_ns));
        let (saved, spent) = (self.saved_ns - before.0, self.spent_ns - before.1);
        let Some((took, length)) = took.zip(length) else { return };
        self.cycle_ns = took;
        // Another amount of work is no comparison.
        let alike = |(launches, named): (u64, u64)| {
            length.abs_diff(launches) * 50 <= launches && bytes.abs_diff(named) <= named / 50
        };
        match self.before {
            _ if self.spent_ns == 0.0 => {
                let known = self.before.filter(|(launches, named, _)| alike((*launches, *named)));
                self.before = Some((length, bytes, known.map_or(took, |(_, _, ns)| ns.max(took))));
                self.is_same = true;
            }
            Some((launches, named, before_ns)) if alike((launches, named)) => {
                if self.is_same {
                    self.doubt(saved, before_ns - (took - spent), before_ns);
                }
                let is_slow = took > SLOWER * before_ns;
                self.slow = if is_slow { self.slow + 1 } else { 0 };
                // A cycle in which memory moved is longer by that, which is paid from the account already: the first one after a move would stop what had just begun to gain.
                let nothing_moved = spent == 0.0;
                let is_contradicted = is_slow && nothing_moved && self.doubt_ns > 0.0 && self.free() < 0.0;
                if (self.slow >= SLOW || is_contradicted) && self.stopped.is_none() {
                    self.is_wrong = true;
                    self.stop(Why::Slower { before_ns, now_ns: took }, cycle);
                }
            }
            _ => self.slow = 0,
        }
    }

    /// A cycle has saved so much by what was measured, and so much by the clock. What was credited in vain is taken back; a cycle that
    /// took long for another reason counts for no more than it usually takes.
    fn doubt(&mut self, saved: f64, by_clock: f64, before_ns: f64) {
        let more = (saved - by_clock).clamp(-before_ns, saved.abs() + before_ns);
        let doubt_ns = (self.doubt_ns + more).max(-before_ns);
        self.add(self.doubt_ns.max(0.0) - doubt_ns.max(0.0));
        self.doubt_ns = doubt_ns;
    }

    /// Whether all that was near at first should come back, since what was measured does not explain how long cycles take.
    #[inline]
    pub fn is_wrong(&self) -> bool {
        self.is_wrong && self.reserve > 0.0
    }

    /// The program does something else now.
    pub fn changed(&mut self) {
        self.is_wrong = false;
        self.doubt_ns = 0.0;
        if self.spent_ns > 0.0 {
            // What a cycle took where memory first lay can no longer be measured.
            self.before = None;
        }
        self.slow = 0;
        // Who loses at each change does not begin anew at each.
        if self.saved_ns > self.spent_ns {
            self.stopped = None;
        }
    }

    pub fn why(&self) -> Option<Why> {
        self.stopped.or(self.is_unpaid)
    }

    /// The stop that was not told yet.
    pub fn tell(&mut self) -> Option<Why> {
        if std::mem::take(&mut self.untold) { self.why() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// What moves take is paid already; what follows them is what tells whether they were worth it.
    #[test]
    fn a_cycle_in_which_memory_moved_ends_no_moves_and_one_behind_it_does_where_nothing_is_left_to_lose() {
        let mut account = Account::new(0.05);
        let cycle = |account: &mut Account, number: u64, ends: u64| account.cycle(ends * MS, Some(9), 90, number, true);
        cycle(&mut account, 1, 0);
        cycle(&mut account, 2, 100);
        // More was credited than the clock says.
        account.saved(30e6);
        account.spent(20e6);
        cycle(&mut account, 3, 210);
        assert!(account.doubt_ns > 0.0 && account.free() < 0.0);
        assert_eq!(account.why(), None);
        account.saved(1e6);
        cycle(&mut account, 4, 320);
        assert!(matches!(account.why(), Some(Why::Slower { .. })) && account.tell().is_some());
    }
}
