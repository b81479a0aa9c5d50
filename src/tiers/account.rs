//! What moves cost and what they brought: the guard against thrashing.
//!
//! Moving is an investment that may fail: a cycle changes, a measurement was wrong. Three things bound what that can cost:
//! - **A balance.** It begins with what swapping all near memory once costs, and gains a small part of the time. Each move is paid
//!   from it; what launches take less than where memory first lay is paid in, and what they take more is paid out. Nothing moves
//!   beyond it. Earlier gains count up to eight times the beginning: good times do not pay for long bad ones.
//! - **The time of a cycle**, measured, against what it was before the first move. Longer eight times in a row, and moving stops.
//! - Who was stopped waits: 64 cycles, after each further time twice as many, or until the cycle changes.

use crate::interface::Why;

/// Cycles in a row that have to be slower.
const SLOW: u32 = 8;
/// By how much.
const SLOWER: f64 = 1.03;
const WAIT: u64 = 64;
/// How often swapping everything could be paid from the balance, at most.
const MOST: f64 = 8.0;

#[derive(Debug, Default)]
pub struct Account {
    pub spent_ns: f64,
    pub saved_ns: f64,
    balance: f64,
    /// What the balance began with.
    granted: f64,
    now: Option<u64>,
    /// Launches of a cycle before anything moved, the bytes that they named, and the nanoseconds of the longest.
    before: Option<(u64, u64, f64)>,
    slow: u32,
    pub cycle_ns: f64,
    cycle_began: Option<u64>,
    stopped: Option<Why>,
    untold: bool,
    until: u64,
    wait: u64,
}

impl Account {
    /// What may be risked grows with what there is to lose.
    pub fn grant(&mut self, swap_all_ns: f64) {
        if swap_all_ns > self.granted {
            self.balance += swap_all_ns - self.granted;
            self.granted = swap_all_ns;
        }
    }

    /// The time, and which part of it may be lost.
    pub fn time_is(&mut self, now: u64, rate: f64) {
        let passed = self.now.map_or(0, |before| now.saturating_sub(before));
        self.now = Some(now.max(self.now.unwrap_or(0)));
        self.balance = (self.balance + passed as f64 * rate).min(MOST * self.granted);
    }

    pub fn saved(&mut self, ns: f64) {
        self.saved_ns += ns;
        // What is lost beyond all that was risked is lost by what could not move back; that must not bar it for ever.
        let floor = self.balance.min(-self.granted);
        self.balance = (self.balance + ns).max(floor).min(MOST * self.granted);
    }

    pub fn spent(&mut self, ns: f64) {
        self.spent_ns += ns;
        self.balance -= ns;
    }

    /// Whether so much may be risked. Where something was worth moving and hardly anything is left, moving stops.
    ///
    /// On a known cycle nothing moves before it was measured how long it takes as it is.
    pub fn may_spend(&mut self, ns: f64, is_known: bool, cycle: u64) -> bool {
        if is_known && self.spent_ns == 0.0 && self.before.is_none() {
            return false;
        }
        let may = self.stopped.is_none() && ns <= self.balance;
        if !may && self.stopped.is_none() && self.balance < self.granted / 8.0 {
            self.stop(Why::Unpaid { spent_ns: self.spent_ns, saved_ns: self.saved_ns }, cycle);
        }
        may
    }

    /// The same for what only returns to where it first lay: it was paid for when it left, but not to be sent to and fro.
    pub fn may_return(&self, ns: f64) -> bool {
        self.balance - ns >= -2.0 * self.granted
    }

    fn stop(&mut self, why: Why, cycle: u64) {
        self.stopped = Some(why);
        self.untold = true;
        self.wait = (self.wait * 2).clamp(WAIT, WAIT << 10);
        self.until = cycle + self.wait;
        self.slow = 0;
    }

    /// A cycle of so many launches, which named so many bytes, has ended now.
    pub fn cycle(&mut self, now: u64, length: Option<u64>, bytes: u64, cycle: u64) {
        let took = self.cycle_began.map(|began| now.saturating_sub(began) as f64);
        self.cycle_began = Some(now);
        if cycle >= self.until {
            self.stopped = None;
        }
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
            }
            Some((launches, named, before_ns)) if alike((launches, named)) && took > SLOWER * before_ns => {
                self.slow += 1;
                if self.slow >= SLOW && self.stopped.is_none() {
                    self.stop(Why::Slower { before_ns, now_ns: took }, cycle);
                }
            }
            _ => self.slow = 0,
        }
    }

    /// The program does something else now.
    pub fn changed(&mut self) {
        if self.spent_ns > 0.0 {
            // What a cycle took where memory first lay can no longer be measured.
            self.before = None;
        }
        self.slow = 0;
        // Who loses at each change does not begin anew at each.
        if self.balance > self.granted / 4.0 {
            self.stopped = None;
        }
    }

    pub fn why(&self) -> Option<Why> {
        self.stopped
    }

    /// The stop that was not told yet.
    pub fn tell(&mut self) -> Option<Why> {
        if std::mem::take(&mut self.untold) { self.stopped } else { None }
    }
}
