//! Whether anything was submitted since somebody waited for a context.
//!
//! Whoever submits work says so before and after the call that does it ([`Submissions::note`]): a look at a line that all share,
//! and a write only to the first submission behind a wait. Whoever waits opens a new epoch before the wait begins
//! ([`Submissions::before_wait`]) and notes it with the context when the wait is over ([`Waited::note`]). While that epoch lasts
//! and nobody has submitted anything in it, there is nothing to wait for in that context ([`Waited::covers`]).
//!
//! **Why no wait is left out that is needed.** Submission and wait are ordered by whoever takes both, the driver: it enters the
//! work in the same books that a wait goes by, under a lock. Take a submission that a wait of epoch E did not see. Then the wait
//! was there first, the opening of E happened before the submission, and so before the note behind it. That note finds E or
//! something later and leaves a number greater than E. Whoever frees memory comes after the return of the call that submitted work
//! on it, and so after that note: it finds a number greater than E, and a context that was waited for in E is none to it. The
//! same holds for a wait that found an epoch open and opened none. Epochs only grow, and there is one number, so no order between
//! different places of memory is needed: the counts are relaxed, and the note of a wait is released and acquired, so that what comes
//! after it comes after the wait.
//!
//! **What the note before is for.** Work that runs may be known to a thread before the call that submitted it returns, by what a
//! kernel writes to the host. Who frees memory for that reason sees the note before, unless a third thread's wait began between
//! it and the submission; the time between the two is that of passing on the call. To count who is inside such a call would
//! close that moment at the price of two writes a launch.

use crate::sync::{AtomicU64, Ordering};

/// Submissions of a process, in epochs: even while nothing was submitted in it, odd since something was.
///
/// A line of its own, and two because processors fetch them in pairs: every launch looks here.
#[derive(Debug)]
#[repr(align(128))]
pub struct Submissions(AtomicU64);

/// An epoch that a wait began in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch(u64);

const SUBMITTED: u64 = 1;
/// Never followed by another, and odd.
const UNSEEN: u64 = u64::MAX;

impl Default for Submissions {
    fn default() -> Self {
        Self::new()
    }
}

impl Submissions {
    /// At first anything may be under way.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU64::new(SUBMITTED))
    }

    /// At first anything may be under way.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(SUBMITTED))
    }

    /// Before a call that may submit work, and after it.
    #[inline(always)]
    pub fn note(&self) {
        if self.0.load(Ordering::Relaxed) & SUBMITTED == 0 {
            self.note_first();
        }
    }

    #[cold]
    fn note_first(&self) {
        self.0.fetch_or(SUBMITTED, Ordering::Relaxed);
    }

    /// From now on work may be submitted that nobody notes: every wait has to be made.
    pub fn go_unseen(&self) {
        self.0.store(UNSEEN, Ordering::Relaxed);
    }

    /// Whether work may be submitted that nobody notes.
    pub fn are_unseen(&self) -> bool {
        self.0.load(Ordering::Relaxed) == UNSEEN
    }

    /// Before a wait begins. `None` where it says nothing of the next one, because work is submitted unseen.
    pub fn before_wait(&self) -> Option<Epoch> {
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            if now == UNSEEN {
                return None;
            }
            if now & SUBMITTED == 0 {
                return Some(Epoch(now));
            }
            match self.0.compare_exchange_weak(now, now + 1, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(Epoch(now + 1)),
                Err(other) => now = other,
            }
        }
    }
}

/// The last wait for something, for a context or for all of a GPU, and whether that was `whole`: one word of the caller's.
#[derive(Debug, Default)]
pub struct Waited(AtomicU64);

impl Waited {
    /// Nobody has waited.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Nobody has waited.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// A wait that began in this epoch is over.
    pub fn note(&self, epoch: Epoch, whole: bool) {
        self.0.store(epoch.0 | u64::from(whole), Ordering::Release);
    }

    /// Takes all waits back: this is about another thing from now on.
    pub fn forget(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// What was said of the last wait, where nothing was submitted since it began; else `None`.
    #[inline]
    pub fn covers(&self, submissions: &Submissions) -> Option<bool> {
        let now = submissions.0.load(Ordering::Relaxed);
        let last = self.0.load(Ordering::Acquire);
        (now & SUBMITTED == 0 && last & !SUBMITTED == now).then_some(last & SUBMITTED != 0)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_wait_covers_what_follows_until_something_is_submitted() {
        let (submissions, context) = (Submissions::new(), Waited::new());
        assert_eq!(context.covers(&submissions), None, "at first anything may be under way");
        for whole in [true, false] {
            context.note(submissions.before_wait().unwrap(), whole);
            assert_eq!(context.covers(&submissions), Some(whole));
            assert_eq!(context.covers(&submissions), Some(whole), "asked twice");
            submissions.note();
            assert_eq!(context.covers(&submissions), None);
        }
    }

    #[test]
    fn a_wait_covers_one_context() {
        let (submissions, contexts) = (Submissions::new(), [Waited::new(), Waited::new()]);
        contexts[0].note(submissions.before_wait().unwrap(), true);
        assert_eq!(contexts[1].covers(&submissions), None);
        contexts[1].note(submissions.before_wait().unwrap(), true);
        assert_eq!(contexts[0].covers(&submissions), Some(true), "the second wait opened no epoch");
        contexts[0].forget();
        assert_eq!(contexts[0].covers(&submissions), None);
    }

    #[test]
    fn what_is_submitted_during_a_wait_is_not_covered_by_it() {
        let (submissions, context) = (Submissions::new(), Waited::new());
        let epoch = submissions.before_wait().unwrap();
        submissions.note();
        context.note(epoch, true);
        assert_eq!(context.covers(&submissions), None);
    }

    #[test]
    fn a_wait_that_ends_late_does_not_cover_what_an_earlier_end_does_not() {
        let (submissions, context) = (Submissions::new(), Waited::new());
        let early = submissions.before_wait().unwrap();
        submissions.note();
        let late = submissions.before_wait().unwrap();
        context.note(late, true);
        assert_eq!(context.covers(&submissions), Some(true));
        context.note(early, true);
        assert_eq!(context.covers(&submissions), None);
    }

    #[test]
    fn once_work_goes_unseen_no_wait_covers_anything() {
        let (submissions, context) = (Submissions::new(), Waited::new());
        let epoch = submissions.before_wait().unwrap();
        context.note(epoch, true);
        submissions.go_unseen();
        assert_eq!(context.covers(&submissions), None);
        assert_eq!(submissions.before_wait(), None);
        context.note(epoch, true);
        submissions.note();
        assert!(submissions.are_unseen());
        assert_eq!((context.covers(&submissions), submissions.before_wait()), (None, None));
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test -p gpupool-pool --release loom`
#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::atomic::AtomicBool;
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    /// A driver: a wait covers what was entered before it. Which piece of work is over is told by the wait alone.
    #[derive(Default)]
    struct Driver {
        books: Mutex<(Vec<usize>, Vec<usize>)>,
    }

    #[derive(Default)]
    struct Machine {
        driver: Driver,
        submissions: Submissions,
        contexts: [Waited; 2],
        /// What a thread says that has submitted something.
        told: AtomicBool,
    }

    impl Machine {
        fn submit(&self, work: usize) {
            self.submissions.note();
            self.driver.books.lock().unwrap().0.push(work);
            self.submissions.note();
        }

        /// A free of memory of this context, with its wait.
        fn free(&self, context: usize) {
            if self.contexts[context].covers(&self.submissions).is_some() {
                return;
            }
            let epoch = self.submissions.before_wait();
            {
                let mut books = self.driver.books.lock().unwrap();
                books.1 = books.0.clone();
            }
            if let Some(epoch) = epoch {
                self.contexts[context].note(epoch, true);
            }
        }

        fn is_over(&self, work: usize) -> bool {
            self.driver.books.lock().unwrap().1.contains(&work)
        }
    }

    #[test]
    fn loom_a_free_behind_a_submission_waits_for_it_whoever_waits_meanwhile() {
        loom::model(|| {
            let machine = Arc::new(Machine::default());
            let waiter = {
                let machine = machine.clone();
                thread::spawn(move || machine.free(0))
            };
            machine.submit(1);
            machine.free(0);
            assert!(machine.is_over(1));
            waiter.join().unwrap();
        });
    }

    #[test]
    fn loom_two_that_wait_beside_one_that_submits_and_frees() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let machine = Arc::new(Machine::default());
            let waiters = [0, 1].map(|context| {
                let machine = machine.clone();
                thread::spawn(move || machine.free(context))
            });
            for work in 1..=2 {
                machine.submit(work);
                machine.free(0);
                assert!(machine.is_over(work));
            }
            waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
        });
    }

    #[test]
    fn loom_a_free_on_another_thread_that_was_told_of_the_submission() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let machine = Arc::new(Machine::default());
            let submitter = {
                let machine = machine.clone();
                thread::spawn(move || {
                    machine.submit(1);
                    machine.told.store(true, Ordering::Release);
                })
            };
            let waiter = {
                let machine = machine.clone();
                thread::spawn(move || machine.free(0))
            };
            machine.free(0);
            let told = machine.told.load(Ordering::Acquire);
            machine.free(0);
            assert!(!told || machine.is_over(1));
            submitter.join().unwrap();
            waiter.join().unwrap();
            machine.free(0);
            assert!(machine.is_over(1));
        });
    }

    #[test]
    fn loom_two_that_submit_at_once() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let machine = Arc::new(Machine::default());
            let threads = [1, 2].map(|work| {
                let machine = machine.clone();
                thread::spawn(move || {
                    machine.submit(work);
                    machine.free(0);
                    assert!(machine.is_over(work));
                })
            });
            machine.free(0);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }

    #[test]
    fn loom_work_that_tells_of_itself_before_its_call_returns_is_waited_for() {
        loom::model(|| {
            let machine = Arc::new(Machine::default());
            machine.free(0);
            let submitter = {
                let machine = machine.clone();
                thread::spawn(move || machine.submit(1))
            };
            let runs = machine.driver.books.lock().unwrap().0.contains(&1);
            machine.free(0);
            assert!(!runs || machine.is_over(1));
            submitter.join().unwrap();
        });
    }

    #[test]
    #[should_panic(expected = "is_over")]
    fn loom_without_the_note_behind_a_submission_a_wait_would_be_left_out() {
        loom::model(|| {
            let machine = Arc::new(Machine::default());
            let waiter = {
                let machine = machine.clone();
                thread::spawn(move || machine.free(0))
            };
            machine.submissions.note();
            machine.driver.books.lock().unwrap().0.push(1);
            machine.free(0);
            assert!(machine.is_over(1));
            waiter.join().unwrap();
        });
    }
}
