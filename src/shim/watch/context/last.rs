//! Which context a thread used last, and for how long it may go by that without asking anybody.

use super::Context;
use gpupool_cuda as cuda;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts what ends contexts, when it begins and when it is over, and errors that may stick to one: what any thread remembered
/// before is void once it moved. No epoch is 0.
pub(super) struct Epoch(AtomicU64);

impl Epoch {
    pub const fn new() -> Self {
        Self(AtomicU64::new(1))
    }

    #[inline]
    pub fn now(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    pub fn pass(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// The context that was current on a thread last, its handle, and the epoch of that.
#[derive(Clone, Copy)]
struct Seen {
    epoch: u64,
    handle: Option<cuda::Context>,
    context: Option<Context>,
    /// A context that ended had this handle before, and may be current again once this one is popped: the same handle then
    /// says nothing. No switch of contexts that was seen leaves such a memory standing.
    again: bool,
}

impl Seen {
    const NOTHING: Self = Self { epoch: 0, handle: None, context: None, again: false };
}

/// What one thread remembers. What it is asked in is the epoch of that moment.
pub(super) struct Last(Cell<Seen>);

impl Last {
    pub const fn new() -> Self {
        Self(Cell::new(Seen::NOTHING))
    }

    /// The context of this handle, where it was the last one in the same epoch.
    #[inline]
    pub fn context_of(&self, handle: cuda::Context, epoch: u64) -> Option<Context> {
        let seen = self.0.get();
        (seen.handle == Some(handle) && seen.epoch == epoch).then_some(seen.context)?
    }

    /// Whether the last context is known to be in use already.
    #[inline]
    pub fn is_in_use(&self, epoch: u64) -> bool {
        let seen = self.0.get();
        seen.epoch == epoch && seen.context.is_some_and(|context| context.usage.is_used())
    }

    /// Whether what is current now is another context than the last one. Where the handle does not say, that is taken to be so,
    /// and the context is looked up anew.
    #[inline]
    pub fn has_switched_to(&self, current: Option<cuda::Context>, epoch: u64) -> bool {
        let seen = self.0.get();
        if seen.again {
            self.forget();
        }
        seen.again || current != if seen.epoch == epoch { seen.handle } else { None }
    }

    /// This context was looked up by its handle; `epoch` is from before the look-up. `again`: a context that ended had that
    /// handle, too.
    pub fn remember(&self, handle: cuda::Context, context: Context, epoch: u64, again: bool) {
        self.0.set(Seen { epoch, handle: Some(handle), context: Some(context), again });
    }

    pub fn forget(&self) {
        self.0.set(Seen::NOTHING);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, Tally};
    use super::*;
    use gpupool_cuda::Device;

    fn handle(number: usize) -> cuda::Context {
        cuda::Context::from_raw(std::ptr::without_provenance_mut(number)).unwrap()
    }

    /// A context with this id, which nobody has used yet.
    fn context(id: u64) -> Context {
        Context { device: Device::of(0), kind: Kind::Created, id, tally: Box::leak(Box::<Tally>::default()) }
    }

    /// A thread that has looked up a context with this handle in this epoch.
    fn thread(number: usize, context: Context, epoch: u64) -> Last {
        let last = Last::new();
        last.remember(handle(number), context, epoch, false);
        last
    }

    #[test]
    fn a_thread_that_has_looked_nothing_up_remembers_nothing() {
        let (last, epoch) = (Last::new(), Epoch::new().now());
        assert_eq!(last.context_of(handle(0x10), epoch), None);
        assert!(!last.is_in_use(epoch));
        assert!(!last.has_switched_to(None, epoch), "it had none before");
        assert!(last.has_switched_to(Some(handle(0x10)), epoch));
    }

    #[test]
    fn a_context_is_remembered_by_its_own_handle_in_its_own_epoch() {
        let epoch = Epoch::new();
        let last = thread(0x10, context(1), epoch.now());
        for _ in 0..2 {
            assert_eq!(last.context_of(handle(0x10), epoch.now()), Some(context(1)));
        }
        assert_eq!(last.context_of(handle(0x20), epoch.now()), None);
        last.remember(handle(0x20), context(2), epoch.now(), false);
        assert_eq!(last.context_of(handle(0x20), epoch.now()), Some(context(2)));
        assert_eq!(last.context_of(handle(0x10), epoch.now()), None, "one is remembered, the last");
    }

    #[test]
    fn an_end_voids_what_every_thread_remembered() {
        let epoch = Epoch::new();
        let threads = [thread(0x10, context(1), epoch.now()), thread(0x20, context(2), epoch.now())];
        epoch.pass();
        for (last, handle) in threads.iter().zip([handle(0x10), handle(0x20)]) {
            assert_eq!(last.context_of(handle, epoch.now()), None, "its handle may be another context's");
            assert!(last.has_switched_to(Some(handle), epoch.now()));
            assert!(!last.has_switched_to(None, epoch.now()), "nothing to look up");
        }
    }

    #[test]
    fn what_is_looked_up_while_a_context_ends_is_not_remembered() {
        let epoch = Epoch::new();
        let before = epoch.now();
        epoch.pass();
        let last = thread(0x10, context(1), before);
        assert_eq!(last.context_of(handle(0x10), epoch.now()), None);
        assert!(last.has_switched_to(Some(handle(0x10)), epoch.now()));
    }

    #[test]
    fn a_switch_is_another_handle() {
        let epoch = Epoch::new().now();
        let last = thread(0x10, context(1), epoch);
        for (current, switched) in [(Some(handle(0x10)), false), (Some(handle(0x20)), true), (None, true)] {
            assert_eq!(last.has_switched_to(current, epoch), switched, "{current:?}");
        }
        assert_eq!(last.context_of(handle(0x10), epoch), Some(context(1)), "the question changes nothing");
    }

    #[test]
    fn a_handle_that_was_given_again_says_nothing_once_contexts_were_switched() {
        let epoch = Epoch::new().now();
        let last = Last::new();
        last.remember(handle(0x10), context(2), epoch, true);
        assert_eq!(last.context_of(handle(0x10), epoch), Some(context(2)), "until then it is this one's");
        assert!(last.has_switched_to(Some(handle(0x10)), epoch), "it may be the one that ended");
        assert_eq!(last.context_of(handle(0x10), epoch), None);
        assert!(!last.has_switched_to(None, epoch), "told once");
        last.remember(handle(0x10), context(2), epoch, true);
        assert!(last.has_switched_to(None, epoch));
        assert_eq!(last.context_of(handle(0x10), epoch), None, "nor does it say more behind another switch");
    }

    #[test]
    fn a_context_is_in_use_once_it_was_used_and_until_one_ends() {
        let epoch = Epoch::new();
        let used = context(1);
        let last = thread(0x10, used, epoch.now());
        assert!(!last.is_in_use(epoch.now()));
        used.usage.launched();
        assert!(last.is_in_use(epoch.now()));
        epoch.pass();
        assert!(!last.is_in_use(epoch.now()));
    }

    #[test]
    fn what_a_thread_forgets_is_looked_up_again() {
        let epoch = Epoch::new().now();
        let last = thread(0x10, context(1), epoch);
        last.forget();
        assert_eq!(last.context_of(handle(0x10), epoch), None);
        assert!(last.has_switched_to(Some(handle(0x10)), epoch));
    }

    /// What happens to two threads, for [`no_order_of_what_happens_makes_a_thread_go_by_a_handle_that_may_be_anothers`].
    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// This thread looks up its context, whose handle was given again or not.
        LookUp(usize, bool),
        /// It looks its context up in the epoch before this one, since something ended meanwhile.
        LookUpLate(usize),
        /// A switch of its contexts is seen, to the same handle.
        Switch(usize),
        Forget(usize),
        End,
    }

    #[test]
    fn no_order_of_what_happens_makes_a_thread_go_by_a_handle_that_may_be_anothers() {
        use Step::{End, Forget, LookUp, LookUpLate, Switch};
        const STEPS: [Step; 8] =
            [LookUp(0, false), LookUp(0, true), LookUp(1, false), LookUpLate(0), Switch(0), Switch(1), Forget(0), End];
        const LENGTH: u32 = 5;
        let known = [context(1), context(2)];
        for number in 0..STEPS.len().pow(LENGTH) {
            let story: Vec<Step> = (0..LENGTH).map(|at| STEPS[number / STEPS.len().pow(at) % STEPS.len()]).collect();
            let (epoch, threads) = (Epoch::new(), [Last::new(), Last::new()]);
            // Whether each thread may go by its handle, and whether it may still do so behind a switch.
            let mut may = [(false, false); 2];
            for step in &story {
                match *step {
                    LookUp(thread, again) => {
                        threads[thread].remember(handle(0x10), known[thread], epoch.now(), again);
                        may[thread] = (true, !again);
                    }
                    LookUpLate(thread) => {
                        threads[thread].remember(handle(0x10), known[thread], epoch.now() - 1, false);
                        may[thread] = (false, false);
                    }
                    Switch(thread) => {
                        let switched = threads[thread].has_switched_to(Some(handle(0x10)), epoch.now());
                        may[thread] = (may[thread].1, may[thread].1);
                        assert_eq!(switched, !may[thread].0, "{story:?} at {step:?}");
                    }
                    Forget(thread) => {
                        threads[thread].forget();
                        may[thread] = (false, false);
                    }
                    End => {
                        epoch.pass();
                        may = [(false, false); 2];
                    }
                }
                for (thread, last) in threads.iter().enumerate() {
                    let expected = may[thread].0.then_some(known[thread]);
                    assert_eq!(last.context_of(handle(0x10), epoch.now()), expected, "{story:?} up to {step:?}");
                }
            }
        }
    }
}
