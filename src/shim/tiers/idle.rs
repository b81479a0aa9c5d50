//! Where the program itself has just waited for the device, what is used most a byte comes near in place of what is used least, within
//! `GPUPOOL_MOVE_SHARE` of the time. Nothing is waited for here: where other work is running, the gate stays open and there is a next
//! wait.

use super::{Home, current_home, launch, now, record, share, stress, swap, timing};
use crate::process;
use crate::watch::capture;
use gpupool_interpose::Api;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Nanoseconds that moves may take before one is thought of: about what a small one takes.
const LEAST: u64 = 200_000;
/// What is saved up, at most.
const MOST: u64 = 200_000_000;

/// What moves at such points may take.
pub(super) struct Purse {
    /// Nothing is looked at before this time. Read without the lock.
    opens: AtomicU64,
    filled: Mutex<Filled>,
}

struct Filled {
    /// Nanoseconds that may be spent, at this time.
    holds: u64,
    at: u64,
}

impl Purse {
    pub fn new(now: u64) -> Self {
        Self { opens: AtomicU64::new(0), filled: Mutex::new(Filled { holds: 0, at: now }) }
    }

    /// What may be spent now, in a thousandth parts of the time; `None` where that is not worth anything yet, or another thread spends.
    fn open(&self, now: u64, share: u64) -> Option<u64> {
        let mut filled = self.filled.try_lock()?;
        let more = now.saturating_sub(filled.at).saturating_mul(share) / 1000;
        if filled.holds + more < LEAST {
            let missing = (LEAST - filled.holds).saturating_mul(1000) / share.max(1);
            self.opens.store(filled.at.saturating_add(missing), Ordering::Relaxed);
            return None;
        }
        filled.holds = (filled.holds + more).min(MOST);
        filled.at = now;
        Some(filled.holds)
    }

    fn spent(&self, nanoseconds: u64) {
        let mut filled = self.filled.lock();
        filled.holds = filled.holds.saturating_sub(nanoseconds);
    }
}

/// A wait of the program's is over.
#[cold]
pub fn point(api: Api) {
    let Some(home) = current_home().filter(|_| !capture::under_way()) else { return };
    process::contained(api, || {
        let now = now();
        record::waited();
        if home.tiers.lock().waited(now, home) {
            launch::cycle_ended(home);
        }
        if now >= home.purse.opens.load(Ordering::Relaxed) && !stress::is_on() {
            at_rest(home, now);
        }
    });
}

fn at_rest(home: &'static Home, begun: u64) {
    let Some(budget) = home.purse.open(begun, u64::from(share())) else { return };
    timing::gather(home);
    let mut tiers = home.tiers.lock();
    let swaps = tiers.when_idle(budget, begun, home);
    let stopped = tiers.stopped();
    drop(tiers);
    if let Some(why) = stopped {
        swap::report_stopped(home, &why);
    }
    for swap in &swaps {
        if now() - begun < budget {
            swap::carry_out(home, swap, swap::Why::Idle);
        }
    }
    // To ask costs, too.
    home.purse.spent(now() - begun);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_much_of_the_time_may_be_spent_and_not_more_than_was_saved() {
        let purse = Purse::new(1_000_000);
        assert_eq!(purse.open(2_000_000, 50), None, "50 µs");
        assert_eq!(purse.opens.load(Ordering::Relaxed), 5_000_000, "when there are 200");
        assert_eq!(purse.open(5_000_000, 50), Some(LEAST));
        purse.spent(LEAST + 1);
        assert_eq!(purse.open(8_000_000, 50), None);
        assert_eq!(purse.open(9_000_000, 50), Some(LEAST));
        assert_eq!(purse.open(60_000_000_000, 50), Some(MOST));
        assert_eq!(purse.open(60_000_000_000, 50), Some(MOST), "what is not spent stays");
    }
}
