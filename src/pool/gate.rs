//! The gate in front of every call that submits work or looks at mappings, so that one thread may have all others outside while it
//! moves memory.
//!
//! **Inside.** A thread says that it is inside by a plain store to its own [`Slot`] before such a call, and by another one behind
//! it; in between it looks at one word that all share. Nothing else happens while the gate is open.
//!
//! **Closing.** The gate goes from open to *draining*, and whoever arrives waits. A barrier on all threads ([`Outside::heavy`])
//! makes the stores of those visible that have not seen that. Then the slots are waited for. While draining, the program comes first:
//! each thread that waits opens the gate again at its own deadline, so none is kept by a thread that can itself block, and who began
//! to close it learns that by a compare-and-swap. Only one such swap, after whoever closes has proven what it wanted, leads from
//! draining to *moving*. Nobody passes then, and nobody but who closed the gate opens it.
//!
//! **Calls inside calls** (callbacks of the driver, handlers of signals) are counted in the slot, and are let through where the gate
//! is open. Where it is draining they open it: the outer call may be past the gate, and then the one who closes waits for it in any
//! case, or it was interrupted between its store and its look, and then it may already be taken to be outside. Where it is moving the
//! outer call cannot be past the gate, and the inner one waits as any other.
//!
//! **Why nobody is inside while memory moves.** Take a thread that found the gate open, and a closing whose swap to moving succeeded.
//! If the thread looked before the heavy barrier, its store is visible behind that, and the slot was waited for until the store behind
//! the call was seen, which is released and acquired. If it looked after, it found the gate closed. A slot that came into the list
//! after it was gone through belongs to a thread that looks behind a full barrier.

use crate::sync::{AtomicU32, Ordering, fence};

/// What is asked of the world: barriers, sleep, and the time.
pub trait Outside {
    /// What a thread has for as long as it waits at a gate that is held.
    type Waiting;
    /// The barrier of who enters, between its store and its look: nothing but an order for the compiler, where [`heavy`](Self::heavy)
    /// reaches all threads.
    fn light(&self);
    /// A full barrier on all threads of the process. Whether it was made.
    fn heavy(&self) -> bool;
    /// Nanoseconds of a clock that only goes on.
    fn now(&self) -> u64;
    /// Sleeps while the word has this value, at most until that time. May return early. Whether a signal that the thread handles ended it.
    fn sleep(&self, word: &AtomicU32, value: u32, until: Option<u64>) -> bool;
    /// Wakes all that sleep.
    fn wake(&self, word: &AtomicU32);
    /// Lets others go on for a moment.
    fn pause(&self);
    /// A thread begins to wait at a gate that may stay closed for long. No signal is lost from here on: one that arrives between two naps
    /// ends the next one. `hold`: the same number for all who wait until this holding ends.
    fn begin_to_wait(&self, hold: u32) -> Self::Waiting;
    /// Sleeps for a moment, or shorter. Whether a signal that the thread handles ended it.
    fn nap(&self, waiting: &mut Self::Waiting) -> bool;
    /// Somebody who waits at a gate that is held was interrupted by a signal, and wants to go on.
    fn wanted(&self) {}
}

const OPEN: u32 = 0;
const DRAINING: u32 = 1;
const MOVING: u32 = 2;
/// Nobody passes, and nobody moves anything just now: the program is suspended.
const HELD: u32 = 3;
const STATE: u32 = 3;
/// Above the state: how often it was opened, so that two closings are never taken for one.
const GENERATION: u32 = 4;

/// Calls inside each other that a slot counts; above are marks.
const DEPTH: u32 = 0xFF;
/// What a call adds to its slot: its own number and one level.
const SHIFT: u32 = 8;

/// The gate.
#[derive(Debug)]
#[repr(align(128))]
pub struct Gate<O> {
    word: AtomicU32,
    /// The number of the slot whose thread opened it last while it was draining.
    opened_by: AtomicU32,
    outside: O,
}

/// Whether one thread is inside, and in which call. A line of its own, and two because processors fetch them in pairs.
#[derive(Debug)]
#[repr(align(128))]
pub struct Slot {
    inside: AtomicU32,
    /// The number of the thread that has it; [`NOBODY`] or [`REAPED`].
    owner: AtomicU32,
}

/// A thread's wait.
struct Wait<W> {
    /// By a signal that nobody has heard of yet.
    is_interrupted: bool,
    /// Once it has seen the gate held.
    at_held: Option<W>,
}

impl<W> Default for Wait<W> {
    fn default() -> Self {
        Self { is_interrupted: false, at_held: None }
    }
}

/// The owner of a slot that is free.
const NOBODY: u32 = 0;
/// The owner of a slot whose thread is gone, while it is made free.
const REAPED: u32 = u32::MAX;

/// Which call a thread makes, as told to who waits for it: a number below 2¹⁶.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(u32);

impl Mark {
    pub const fn new(number: u16) -> Self {
        Self((number as u32) << SHIFT | 1)
    }
}

/// What is in a slot: how deep, and of one call alone, which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inside(u32);

impl Inside {
    pub fn depth(self) -> u32 {
        self.0 & DEPTH
    }

    /// The number of the call; `None` where several are inside each other.
    pub fn number(self) -> Option<u16> {
        (self.depth() == 1).then_some((self.0 >> SHIFT) as u16)
    }
}

/// Why the gate was not closed. It is open, or another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Somebody else has closed it.
    Closed,
    /// The barrier could not be made.
    NoBarrier,
    /// The thread of this slot (by its place among those gone through) stayed in this call.
    Inside { at: usize, what: Inside },
    /// A thread that waited opened it at its deadline, or a call inside another one did: the number of its slot.
    Opened { by: u32 },
}

/// The gate, draining: everybody is outside, and nobody comes in, until it is opened or one who waits does that.
#[derive(Debug)]
pub struct Draining(u32);

/// The gate, closed until this is given back.
#[derive(Debug)]
pub struct Moving(u32);

/// The gate, closed for long: nobody passes, and whoever has this may move something again and again. The end of the process and
/// the child of a fork open it all the same.
#[derive(Debug)]
pub struct Held(u32);

impl Default for Slot {
    fn default() -> Self {
        Self::new()
    }
}

impl Slot {
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self { inside: AtomicU32::new(0), owner: AtomicU32::new(NOBODY) }
    }

    #[cfg(loom)]
    pub fn new() -> Self {
        Self { inside: AtomicU32::new(0), owner: AtomicU32::new(NOBODY) }
    }

    /// Takes it for the calling thread, unless it is another's. Threads have numbers above 0 and below 2³² − 1.
    pub fn take(&self, thread: u32) -> bool {
        let taken = self.owner.load(Ordering::Relaxed) == NOBODY
            && self.owner.compare_exchange(NOBODY, thread, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if taken {
            // Who goes through the slots from now on sees this one, and if somebody did before, this thread sees that.
            fence(Ordering::SeqCst);
        }
        taken
    }

    /// The thread ends, perhaps inside a call that it was cancelled in.
    pub fn give_back(&self) {
        self.inside.store(0, Ordering::Release);
        self.owner.store(NOBODY, Ordering::Release);
    }

    /// Makes it free if it is that of a thread which ended and could not give it back.
    pub fn reap(&self, is_gone: impl FnOnce(u32) -> bool) {
        let owner = self.owner.load(Ordering::Acquire);
        if owner == NOBODY || owner == REAPED || !is_gone(owner) {
            return;
        }
        // A thread of the same number that came meanwhile has another slot, since this one was taken.
        if self.owner.compare_exchange(owner, REAPED, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.give_back();
        }
    }

    /// The number of the thread that has it, 0 for none.
    pub fn thread(&self) -> u32 {
        self.owner.load(Ordering::Relaxed)
    }

    /// What its thread is inside.
    pub fn inside(&self) -> Option<Inside> {
        let inside = self.inside.load(Ordering::Acquire);
        (inside != 0).then_some(Inside(inside))
    }
}

impl<O: Outside> Gate<O> {
    #[cfg(not(loom))]
    pub const fn new(outside: O) -> Self {
        Self { word: AtomicU32::new(OPEN), opened_by: AtomicU32::new(0), outside }
    }

    #[cfg(loom)]
    pub fn new(outside: O) -> Self {
        Self { word: AtomicU32::new(OPEN), opened_by: AtomicU32::new(0), outside }
    }

    /// Before a call. `false`: the gate is not open, and [`wait`](Self::wait) is to be called before the call is made.
    #[inline(always)]
    #[must_use]
    pub fn enter(&self, slot: &Slot, mark: Mark) -> bool {
        slot.inside.store(slot.inside.load(Ordering::Relaxed).wrapping_add(mark.0), Ordering::Relaxed);
        self.outside.light();
        self.word.load(Ordering::Acquire) & STATE == OPEN
    }

    /// Behind a call.
    #[inline(always)]
    pub fn leave(&self, slot: &Slot, mark: Mark) {
        slot.inside.store(slot.inside.load(Ordering::Relaxed).wrapping_sub(mark.0), Ordering::Release);
    }

    /// As [`enter`](Self::enter), with a full barrier of its own: where [`Outside::heavy`] reaches no other thread.
    #[must_use]
    pub fn enter_fenced(&self, slot: &Slot, mark: Mark) -> bool {
        slot.inside.store(slot.inside.load(Ordering::Relaxed).wrapping_add(mark.0), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.word.load(Ordering::Acquire) & STATE == OPEN
    }

    /// For a thread that can have no slot: this one, which may be several threads', stays inside for good, so the gate is never closed
    /// again. Waits for whoever has closed it.
    #[cold]
    pub fn stay(&self, slot: &Slot) {
        slot.inside.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.wait_until(slot, 0);
    }

    /// Behind an [`enter`](Self::enter) that found the gate closed: returns inside. Waits outside, at most for `patience` while
    /// draining.
    #[cold]
    pub fn wait(&self, slot: &Slot, mark: Mark, patience: u64) {
        let until = self.outside.now().saturating_add(patience);
        if slot.inside.load(Ordering::Relaxed) != mark.0 {
            // Inside another call. See above.
            return self.wait_until(slot, 0);
        }
        loop {
            self.leave(slot, mark);
            self.wait_until(slot, until);
            if self.enter_fenced(slot, mark) {
                return;
            }
        }
    }

    /// Waits until the gate is open. From that time on who drains it is not waited for.
    fn wait_until(&self, slot: &Slot, until: u64) {
        let mut wait = Wait::default();
        loop {
            let seen = self.word.load(Ordering::Acquire);
            match seen & STATE {
                OPEN => return,
                DRAINING if self.outside.now() >= until => self.give_up_for(seen, slot),
                DRAINING => wait.is_interrupted |= self.outside.sleep(&self.word, seen, Some(until)),
                _ => self.stay_outside(seen, &mut wait),
            }
        }
    }

    /// One look at a gate that nobody but who closed it opens, and a sleep. Who is interrupted asks for a held gate to be opened, also where that
    /// happened while something moved.
    fn stay_outside(&self, seen: u32, wait: &mut Wait<O::Waiting>) {
        let is_held = seen & STATE == HELD;
        match &mut wait.at_held {
            Some(waiting) => wait.is_interrupted |= self.outside.nap(waiting),
            None if is_held => wait.at_held = Some(self.outside.begin_to_wait(seen & !STATE)),
            None => wait.is_interrupted |= self.outside.sleep(&self.word, seen, None),
        }
        if is_held && std::mem::take(&mut wait.is_interrupted) {
            self.outside.wanted();
        }
    }

    /// Opens the gate that somebody else is draining.
    fn give_up_for(&self, seen: u32, slot: &Slot) {
        self.opened_by.store(slot.thread(), Ordering::Relaxed);
        self.open_from(seen);
    }

    /// Opens the gate if that is still its word.
    fn open_from(&self, seen: u32) -> bool {
        let open = (seen & !STATE).wrapping_add(GENERATION) | OPEN;
        let opened = self.word.compare_exchange(seen, open, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if opened {
            self.outside.wake(&self.word);
        }
        opened
    }

    /// Closes the gate and waits, until that time, for the threads of all these slots.
    pub fn drain<'s>(&self, slots: impl Iterator<Item = &'s Slot>, until: u64) -> Result<Draining, Kept> {
        let seen = self.word.load(Ordering::Relaxed);
        let draining = seen & !STATE | DRAINING;
        let swapped = seen & STATE == OPEN
            && self.word.compare_exchange(seen, draining, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if !swapped {
            return Err(Kept::Closed);
        }
        let kept = if self.outside.heavy() { self.all_outside(draining, slots, until) } else { Err(Kept::NoBarrier) };
        match kept {
            Ok(()) => Ok(Draining(draining)),
            Err(kept) if self.open_from(draining) => Err(kept),
            Err(_) => Err(self.opened()),
        }
    }

    fn all_outside<'s>(&self, word: u32, slots: impl Iterator<Item = &'s Slot>, until: u64) -> Result<(), Kept> {
        for (at, slot) in slots.enumerate() {
            while let Some(what) = slot.inside() {
                if self.word.load(Ordering::Relaxed) != word {
                    return Err(self.opened());
                }
                if self.outside.now() >= until {
                    return Err(Kept::Inside { at, what });
                }
                self.outside.pause();
            }
        }
        Ok(())
    }

    /// That somebody opened it who waited, the last time.
    pub fn opened(&self) -> Kept {
        Kept::Opened { by: self.opened_by.load(Ordering::Relaxed) }
    }

    /// From now on nobody else opens it. `Err`: somebody did.
    pub fn begin_to_move(&self, draining: Draining) -> Result<Moving, Kept> {
        let moving = draining.0 & !STATE | MOVING;
        match self.word.compare_exchange(draining.0, moving, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => Ok(Moving(moving)),
            Err(_) => Err(self.opened()),
        }
    }

    /// Whether nobody has opened it since.
    pub fn is_draining(&self, draining: &Draining) -> bool {
        self.word.load(Ordering::Relaxed) == draining.0
    }

    /// Opens a gate that was not needed. Whether nobody had done so.
    pub fn give_up(&self, draining: Draining) -> bool {
        self.open_from(draining.0)
    }

    /// Opens it.
    pub fn open(&self, moving: Moving) {
        self.open_from(moving.0);
    }

    /// Keeps it closed although nothing moves for now.
    pub fn hold(&self, moving: Moving) -> Held {
        let held = moving.0 & !STATE | HELD;
        // A child of a fork, whose gate is open for good, has nobody who does this.
        let _ = self.word.compare_exchange(moving.0, held, Ordering::AcqRel, Ordering::Relaxed);
        // Whoever waits sleeps otherwise from here on.
        self.outside.wake(&self.word);
        Held(held)
    }

    /// Nobody is inside, as before; the end of the process waits for what moves now. `None`: it has opened the gate.
    pub fn move_held(&self, held: &Held) -> Option<Moving> {
        let moving = held.0 & !STATE | MOVING;
        self.word
            .compare_exchange(held.0, moving, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
            .then_some(Moving(moving))
    }

    /// Lets everybody pass again. Whether the end of the process had not done so.
    pub fn let_go(&self, held: Held) -> bool {
        self.open_from(held.0)
    }

    /// Whether it is held. For calls that pass no gate and should wait with the others ([`wait_while_held`](Self::wait_while_held)).
    #[inline]
    pub fn is_held(&self) -> bool {
        self.word.load(Ordering::Relaxed) & STATE == HELD
    }

    /// For a thread that is not inside: waits as long as the gate is held, and while something moves meanwhile.
    #[cold]
    pub fn wait_while_held(&self) {
        let mut wait = Wait::default();
        loop {
            let seen = self.word.load(Ordering::Acquire);
            match seen & STATE {
                HELD | MOVING => self.stay_outside(seen, &mut wait),
                _ => return,
            }
        }
    }

    /// Opens it in a process that has nobody left who would: the child of a fork.
    pub fn open_for_good(&self) {
        self.word.store(OPEN, Ordering::Release);
    }

    /// Before the process ends, and once nobody closes the gate any more: waits until that time for who moves something. Who only
    /// drains is not waited for. Whether the gate is open.
    pub fn is_open_for_end(&self, until: u64) -> bool {
        fence(Ordering::SeqCst);
        loop {
            let seen = self.word.load(Ordering::Acquire);
            match seen & STATE {
                OPEN => return true,
                DRAINING | HELD => drop(self.open_from(seen)),
                _ if self.outside.now() >= until => return false,
                _ => {
                    self.outside.sleep(&self.word, seen, Some(until));
                }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// One thread's world: time goes on where somebody waits, and what is to happen meanwhile happens then.
    struct Alone<'a> {
        now: Cell<u64>,
        meanwhile: &'a dyn Fn(u64),
        has_barrier: bool,
    }

    impl<'a> Alone<'a> {
        fn with(meanwhile: &'a dyn Fn(u64)) -> Self {
            Self { now: Cell::new(0), meanwhile, has_barrier: true }
        }
    }

    impl Outside for Alone<'_> {
        type Waiting = ();
        fn light(&self) {}
        fn heavy(&self) -> bool {
            self.has_barrier
        }
        fn now(&self) -> u64 {
            self.now.get()
        }
        fn sleep(&self, _: &AtomicU32, _: u32, _: Option<u64>) -> bool {
            self.pause();
            false
        }
        fn begin_to_wait(&self, _hold: u32) {}
        fn nap(&self, _: &mut ()) -> bool {
            self.pause();
            false
        }
        fn wake(&self, _: &AtomicU32) {}
        fn pause(&self) {
            self.now.set(self.now.get() + 1);
            assert!(self.now.get() < 1000, "nobody opens the gate");
            (self.meanwhile)(self.now.get());
        }
    }

    const CALL: Mark = Mark::new(7);
    const OTHER: Mark = Mark::new(9);
    const NOTHING: &dyn Fn(u64) = &|_| {};

    #[test]
    fn a_call_is_inside_until_it_is_left_and_is_known_by_its_number() {
        let (gate, slot) = (Gate::new(Alone::with(NOTHING)), Slot::new());
        assert!(slot.take(3) && !slot.take(4), "it is the first one's");
        assert!(gate.enter(&slot, CALL));
        assert_eq!(slot.inside().map(|it| (it.depth(), it.number())), Some((1, Some(7))));
        assert!(gate.enter(&slot, OTHER));
        assert_eq!(slot.inside().map(|it| (it.depth(), it.number())), Some((2, None)));
        gate.leave(&slot, OTHER);
        assert_eq!(slot.inside().and_then(Inside::number), Some(7));
        gate.leave(&slot, CALL);
        assert_eq!(slot.inside(), None);
    }

    #[test]
    fn who_stays_inside_keeps_it_from_closing_and_is_told_of() {
        let (gate, slots) = (Gate::new(Alone::with(NOTHING)), [Slot::new(), Slot::new()]);
        assert!(gate.enter(&slots[1], CALL));
        let Err(Kept::Inside { at: 1, what }) = gate.drain(slots.iter(), 20) else { panic!("somebody is inside") };
        assert_eq!((what.number(), gate.outside.now()), (Some(7), 20));
        gate.leave(&slots[1], CALL);
        assert!(gate.enter(&slots[0], CALL), "it was opened again");
    }

    #[test]
    fn a_thread_that_ends_inside_is_outside() {
        let (gate, slot) = (Gate::new(Alone::with(NOTHING)), Slot::new());
        assert!(slot.take(1) && gate.enter(&slot, CALL));
        slot.give_back();
        let draining = gate.drain([&slot].into_iter(), 0).unwrap();
        gate.give_up(draining);
        assert!(slot.take(2), "the next thread has it");
    }

    #[test]
    fn only_the_slot_of_a_thread_that_is_gone_is_reaped() {
        let (gate, slot) = (Gate::new(Alone::with(NOTHING)), Slot::new());
        slot.reap(|_| panic!("nobody has it"));
        assert!(slot.take(8) && gate.enter(&slot, CALL));
        slot.reap(|thread| thread != 8);
        assert!(slot.inside().is_some() && slot.thread() == 8);
        slot.reap(|thread| thread == 8);
        assert!(slot.inside().is_none() && slot.take(9));
    }

    #[test]
    fn only_one_closes_it_and_no_barrier_is_no_closing() {
        let mut gate = Gate::new(Alone::with(NOTHING));
        let draining = gate.drain([].into_iter(), 0).unwrap();
        assert_eq!(gate.drain([].into_iter(), 0).unwrap_err(), Kept::Closed);
        let moving = gate.begin_to_move(draining).unwrap();
        assert_eq!(gate.drain([].into_iter(), 0).unwrap_err(), Kept::Closed);
        gate.open(moving);
        gate.outside.has_barrier = false;
        assert_eq!(gate.drain([].into_iter(), 0).unwrap_err(), Kept::NoBarrier);
        assert!(gate.enter(&Slot::new(), CALL));
    }

    #[test]
    fn who_waits_opens_what_is_draining_at_its_own_deadline() {
        let (gate, slot) = (Gate::new(Alone::with(NOTHING)), Slot::new());
        assert!(slot.take(5));
        let draining = gate.drain([&slot].into_iter(), 0).unwrap();
        assert!(gate.is_draining(&draining) && !gate.enter(&slot, CALL));
        gate.wait(&slot, CALL, 30);
        assert_eq!((gate.outside.now(), slot.inside().and_then(Inside::number)), (30, Some(7)));
        assert!(!gate.is_draining(&draining));
        assert_eq!(gate.begin_to_move(draining).unwrap_err(), Kept::Opened { by: 5 });
    }

    #[test]
    fn nobody_opens_what_moves_however_long_it_takes() {
        static GATE: Gate<Threads> = Gate::new(Threads);
        static SLOT: Slot = Slot::new();
        let draining = GATE.drain([&SLOT].into_iter(), 0).unwrap();
        let moving = GATE.begin_to_move(draining).unwrap();
        let called = std::thread::spawn(|| {
            let is_open = GATE.enter(&SLOT, CALL);
            GATE.wait(&SLOT, CALL, 0);
            is_open
        });
        while HELD.load(Ordering::SeqCst) < 100 {
            assert!(!called.is_finished(), "it was let through");
            std::thread::yield_now();
        }
        assert_eq!(SLOT.inside(), None, "it waits outside");
        GATE.open(moving);
        assert!(!called.join().unwrap());
        assert!(SLOT.inside().is_some());
    }

    /// A world in which every deadline has passed, and that counts how often somebody slept.
    struct Threads;
    static HELD: AtomicU32 = AtomicU32::new(0);

    impl Outside for Threads {
        type Waiting = ();
        fn light(&self) {}
        fn heavy(&self) -> bool {
            true
        }
        fn now(&self) -> u64 {
            1
        }
        fn sleep(&self, _: &AtomicU32, _: u32, _: Option<u64>) -> bool {
            HELD.fetch_add(1, Ordering::SeqCst);
            std::thread::yield_now();
            false
        }
        fn begin_to_wait(&self, _hold: u32) {}
        fn nap(&self, _: &mut ()) -> bool {
            unreachable!("nobody holds it")
        }
        fn wake(&self, _: &AtomicU32) {}
        fn pause(&self) {}
    }

    #[test]
    fn a_call_inside_another_one_opens_what_is_draining_at_once() {
        let (gate, slots) = (Gate::new(Alone::with(NOTHING)), [Slot::new(), Slot::new()]);
        let draining = gate.drain([&slots[0]].into_iter(), 0).unwrap();
        // Its outer call was interrupted between its store and its look.
        assert!(!gate.enter(&slots[0], CALL));
        assert!(!gate.enter(&slots[0], OTHER));
        gate.wait(&slots[0], OTHER, 30);
        assert_eq!(gate.outside.now(), 0);
        assert!(gate.begin_to_move(draining).is_err());
    }

    #[test]
    fn a_thread_that_can_have_no_slot_leaves_it_open_for_good() {
        let (gate, spare) = (Gate::new(Alone::with(NOTHING)), Slot::new());
        let draining = gate.drain([&spare].into_iter(), 9).unwrap();
        gate.stay(&spare);
        assert!(!gate.is_draining(&draining));
        assert!(matches!(gate.drain([&spare].into_iter(), 9), Err(Kept::Inside { at: 0, .. })));
    }

    #[test]
    fn the_end_of_the_process_waits_for_a_move_for_so_long_and_for_nothing_else() {
        let gate = Gate::new(Alone::with(NOTHING));
        let draining = gate.drain([].into_iter(), 0).unwrap();
        assert!(gate.is_open_for_end(0) && !gate.is_draining(&draining));
        let draining = gate.drain([].into_iter(), 0).unwrap();
        let moving = gate.begin_to_move(draining).unwrap();
        assert!(!gate.is_open_for_end(50));
        assert_eq!(gate.outside.now(), 50);
        gate.open(moving);
        assert!(gate.is_open_for_end(50));
    }

    #[test]
    fn a_held_gate_lets_nobody_pass_and_memory_move_again_until_it_is_let_go() {
        let (log, slot) = (Cell::new(0), Slot::new());
        let meanwhile = |now: u64| log.set(now);
        let gate = Gate::new(Alone::with(&meanwhile));
        let closed = |gate: &Gate<Alone<'_>>| {
            let draining = gate.drain([&slot].into_iter(), 9).unwrap();
            gate.begin_to_move(draining).unwrap()
        };
        let held = gate.hold(closed(&gate));
        assert!(gate.is_held() && !gate.enter(&slot, CALL));
        gate.leave(&slot, CALL);
        assert_eq!(gate.drain([].into_iter(), 9).unwrap_err(), Kept::Closed, "nobody else moves anything");
        for _ in 0..2 {
            let moving = gate.move_held(&held).unwrap();
            assert!(!gate.is_held() && !gate.enter(&slot, CALL));
            gate.leave(&slot, CALL);
            assert!(gate.move_held(&held).is_none());
            let again = gate.hold(moving);
            assert_eq!(again.0, held.0);
        }
        assert!(gate.let_go(held) && gate.enter(&slot, CALL) && !gate.is_held());
        gate.leave(&slot, CALL);
        gate.wait_while_held();

        // The end of the process opens it, and whoever held it learns that.
        let held = gate.hold(closed(&gate));
        assert!(gate.is_open_for_end(0) && gate.enter(&slot, CALL));
        assert!(gate.move_held(&held).is_none() && !gate.let_go(held));
        gate.leave(&slot, CALL);
    }

    /// As a person does at the keyboard.
    #[test]
    fn whoever_is_interrupted_at_a_held_gate_asks_for_it_to_be_opened() {
        struct Interrupted<'a> {
            alone: Alone<'a>,
            asked: Cell<u32>,
        }
        impl Outside for Interrupted<'_> {
            type Waiting = ();
            fn light(&self) {}
            fn heavy(&self) -> bool {
                true
            }
            fn now(&self) -> u64 {
                self.alone.now()
            }
            fn sleep(&self, _: &AtomicU32, _: u32, _: Option<u64>) -> bool {
                self.alone.pause();
                self.alone.now() == 3
            }
            fn wake(&self, _: &AtomicU32) {}
            fn pause(&self) {}
            fn begin_to_wait(&self, _hold: u32) {}
            fn nap(&self, _: &mut ()) -> bool {
                self.alone.pause();
                self.alone.now() == 3
            }
            fn wanted(&self) {
                self.asked.set(self.asked.get() + 1);
            }
        }
        // The third sleep is interrupted: while the gate is held, and while something moves first.
        for held_from in [0, 4] {
            let state: Cell<Option<&dyn Fn(u64)>> = Cell::new(None);
            let meanwhile = |now: u64| state.get().into_iter().for_each(|act| act(now));
            let gate = Gate::new(Interrupted { alone: Alone::with(&meanwhile), asked: Cell::new(0) });
            let draining = gate.drain([].into_iter(), 9).unwrap();
            let moving = Cell::new(Some(gate.begin_to_move(draining).unwrap()));
            let held = Cell::new(None);
            let act = |now: u64| {
                if now >= held_from
                    && let Some(moving) = moving.take()
                {
                    held.set(Some(gate.hold(moving)));
                }
                if now == 6 {
                    assert!(held.take().is_some_and(|held| gate.let_go(held)));
                }
            };
            if held_from == 0 {
                act(0);
            }
            state.set(Some(&act));
            gate.wait_while_held();
            assert_eq!((gate.outside.asked.get(), gate.outside.now()), (1, 6), "held from {held_from}");
        }
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test -p gpupool-pool --release loom`
#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// Barriers that are made, or are left out.
    struct World {
        has_barriers: bool,
    }

    impl Outside for World {
        type Waiting = ();
        // A barrier on all threads lies between some two steps of each, which includes that between its store and its look.
        fn light(&self) {
            if self.has_barriers {
                fence(Ordering::SeqCst);
            }
        }
        fn heavy(&self) -> bool {
            self.light();
            true
        }
        fn now(&self) -> u64 {
            1
        }
        fn sleep(&self, _: &AtomicU32, _: u32, _: Option<u64>) -> bool {
            thread::yield_now();
            false
        }
        fn begin_to_wait(&self, _hold: u32) {}
        fn nap(&self, _: &mut ()) -> bool {
            thread::yield_now();
            false
        }
        fn wake(&self, _: &AtomicU32) {}
        fn pause(&self) {
            thread::yield_now();
        }
    }

    const CALL: Mark = Mark::new(1);
    const INNER: Mark = Mark::new(2);
    /// A deadline that has passed, and one that never does, by the clock above.
    const PASSED: u64 = 0;
    const NEVER: u64 = 2;

    /// Memory that lies at one of two places, and work that counts in it. A count that is lost was written to the other place, or
    /// was not there yet when it was copied.
    struct Machine {
        gate: Gate<World>,
        slots: [Slot; 2],
        place: AtomicU32,
        /// By place, and by thread.
        memory: [[AtomicU32; 2]; 2],
    }

    impl Machine {
        fn new(has_barriers: bool) -> Arc<Self> {
            Arc::new(Self {
                gate: Gate::new(World { has_barriers }),
                slots: [Slot::new(), Slot::new()],
                place: AtomicU32::new(0),
                memory: [0, 1].map(|_| [AtomicU32::new(0), AtomicU32::new(0)]),
            })
        }

        /// What happens inside.
        fn work(&self, thread: usize) {
            let memory = &self.memory[self.place.load(Ordering::Relaxed) as usize][thread];
            memory.store(memory.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }

        fn call(&self, thread: usize, patience: u64) {
            let slot = &self.slots[thread];
            if !self.gate.enter(slot, CALL) {
                self.gate.wait(slot, CALL, patience);
            }
            self.work(thread);
            self.gate.leave(slot, CALL);
        }

        /// Whether it was moved.
        fn move_over(&self, until: u64) -> bool {
            let Ok(draining) = self.gate.drain(self.slots.iter(), until) else { return false };
            let Ok(moving) = self.gate.begin_to_move(draining) else { return false };
            self.swap();
            self.gate.open(moving);
            true
        }

        fn swap(&self) {
            let from = self.place.load(Ordering::Relaxed);
            for thread in 0..2 {
                let bytes = self.memory[from as usize][thread].load(Ordering::Relaxed);
                self.memory[1 - from as usize][thread].store(bytes, Ordering::Relaxed);
            }
            self.place.store(1 - from, Ordering::Relaxed);
        }

        fn counted(&self) -> u32 {
            let memory = &self.memory[self.place.load(Ordering::Relaxed) as usize];
            memory.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum()
        }
    }

    fn check(bound: usize, model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(bound);
        builder.check(model);
    }

    /// One thread that calls, in this way, beside one that moves; what was counted.
    fn one_beside_a_move(machine: &Arc<Machine>, call: impl FnOnce(&Machine) + Send + 'static) {
        let caller = {
            let machine = machine.clone();
            thread::spawn(move || call(&machine))
        };
        machine.move_over(NEVER);
        caller.join().unwrap();
        assert_eq!(machine.counted(), 1, "a write was lost");
    }

    #[test]
    fn loom_no_call_is_inside_while_memory_moves() {
        for patience in [PASSED, NEVER] {
            check(4, move || one_beside_a_move(&Machine::new(true), move |machine| machine.call(0, patience)));
        }
    }

    #[test]
    fn loom_no_call_is_inside_while_memory_moves_again_and_again() {
        for ends in [false, true] {
            check(3, move || {
                let machine = Machine::new(true);
                let caller = {
                    let machine = machine.clone();
                    thread::spawn(move || machine.call(0, PASSED))
                };
                if let Ok(draining) = machine.gate.drain(machine.slots.iter(), NEVER)
                    && let Ok(moving) = machine.gate.begin_to_move(draining)
                {
                    let held = machine.gate.hold(moving);
                    if ends {
                        assert!(machine.gate.is_open_for_end(NEVER));
                    }
                    if let Some(moving) = machine.gate.move_held(&held) {
                        machine.swap();
                        machine.gate.hold(moving);
                    }
                    machine.gate.let_go(held);
                }
                caller.join().unwrap();
                assert_eq!(machine.counted(), 1, "a write was lost");
            });
        }
    }

    #[test]
    fn loom_one_that_calls_beside_two_that_move() {
        check(2, || {
            let machine = Machine::new(true);
            let mover = {
                let machine = machine.clone();
                thread::spawn(move || machine.move_over(PASSED))
            };
            let caller = {
                let machine = machine.clone();
                thread::spawn(move || machine.call(0, PASSED))
            };
            machine.move_over(PASSED);
            mover.join().unwrap();
            caller.join().unwrap();
            assert_eq!(machine.counted(), 1, "a write was lost");
        });
    }

    #[test]
    fn loom_the_handler_of_a_signal_that_comes_anywhere_in_a_call() {
        fn inner(machine: &Machine) {
            let slot = &machine.slots[0];
            if !machine.gate.enter(slot, INNER) {
                machine.gate.wait(slot, INNER, NEVER);
            }
            machine.work(0);
            machine.gate.leave(slot, INNER);
        }
        // Before the store, behind it, behind the look, and on top of the wait.
        for moment in 0..4 {
            check(3, move || {
                let machine = Machine::new(true);
                let caller = {
                    let machine = machine.clone();
                    thread::spawn(move || {
                        let slot = &machine.slots[0];
                        if moment == 1 {
                            // The two halves of `enter`.
                            slot.inside.store(CALL.0, Ordering::Relaxed);
                            inner(&machine);
                            machine.gate.outside.light();
                            if machine.gate.word.load(Ordering::Acquire) & STATE != OPEN {
                                machine.gate.wait(slot, CALL, NEVER);
                            }
                        } else if !machine.gate.enter(slot, CALL) {
                            if moment == 3 {
                                machine.gate.leave(slot, CALL);
                                inner(&machine);
                                slot.inside.store(CALL.0, Ordering::Relaxed);
                            }
                            if moment == 2 {
                                inner(&machine);
                            }
                            machine.gate.wait(slot, CALL, NEVER);
                        } else if moment >= 2 {
                            inner(&machine);
                        }
                        if moment == 0 {
                            inner(&machine);
                        }
                        machine.work(0);
                        machine.gate.leave(slot, CALL);
                    })
                };
                machine.move_over(NEVER);
                caller.join().unwrap();
                assert_eq!(machine.counted(), 2, "a write was lost");
            });
        }
    }

    #[test]
    fn loom_a_thread_that_comes_while_the_slots_are_gone_through() {
        check(4, || {
            let machine = Machine::new(true);
            one_beside_a_move(&machine, |machine| {
                assert!(machine.slots[1].take(1));
                machine.call(1, NEVER);
                machine.slots[1].give_back();
            });
        });
    }

    #[test]
    fn loom_a_thread_that_can_have_no_slot() {
        check(3, || {
            let machine = Machine::new(true);
            let caller = {
                let machine = machine.clone();
                thread::spawn(move || {
                    machine.gate.stay(&machine.slots[0]);
                    machine.work(0);
                })
            };
            machine.move_over(PASSED);
            caller.join().unwrap();
            assert_eq!(machine.counted(), 1, "a write was lost");
            assert!(!machine.move_over(PASSED), "it stays inside");
        });
    }

    // What the proof needs, each left out.

    #[test]
    #[should_panic(expected = "a write was lost")]
    fn loom_without_the_barrier_a_call_would_be_overlooked() {
        check(4, || one_beside_a_move(&Machine::new(false), |machine| machine.call(0, NEVER)));
    }

    #[test]
    #[should_panic(expected = "a write was lost")]
    fn loom_a_held_call_that_goes_on_while_memory_moves_would_write_to_the_old_place() {
        check(4, || {
            one_beside_a_move(&Machine::new(true), |machine| {
                let _ = machine.gate.enter(&machine.slots[0], CALL);
                machine.work(0);
                machine.gate.leave(&machine.slots[0], CALL);
            });
        });
    }

    #[test]
    #[should_panic(expected = "a write was lost")]
    fn loom_a_call_inside_another_one_that_never_looks_would_be_let_through() {
        check(4, || {
            one_beside_a_move(&Machine::new(true), |machine| {
                let slot = &machine.slots[0];
                // Interrupted between store and look.
                slot.inside.store(CALL.0, Ordering::Relaxed);
                machine.work(0);
                slot.inside.store(0, Ordering::Release);
            });
        });
    }

    #[test]
    #[should_panic(expected = "a write was lost")]
    fn loom_without_a_release_behind_the_call_its_writes_would_not_be_copied() {
        check(4, || {
            one_beside_a_move(&Machine::new(true), |machine| {
                let slot = &machine.slots[0];
                if !machine.gate.enter(slot, CALL) {
                    machine.gate.wait(slot, CALL, NEVER);
                }
                machine.work(0);
                slot.inside.store(0, Ordering::Relaxed);
            });
        });
    }

    #[test]
    #[should_panic(expected = "a write was lost")]
    fn loom_a_deadline_that_opens_what_moves_would_let_calls_in() {
        check(4, || {
            one_beside_a_move(&Machine::new(true), |machine| {
                let slot = &machine.slots[0];
                while !machine.gate.enter(slot, CALL) {
                    machine.gate.leave(slot, CALL);
                    let seen = machine.gate.word.load(Ordering::Acquire);
                    if seen & STATE != OPEN {
                        machine.gate.open_from(seen);
                    }
                }
                machine.work(0);
                machine.gate.leave(slot, CALL);
            });
        });
    }

    #[test]
    #[should_panic(expected = "a write was lost")]
    fn loom_a_move_without_the_last_swap_would_not_see_that_the_gate_was_opened() {
        check(4, || {
            let machine = Machine::new(true);
            let caller = {
                let machine = machine.clone();
                thread::spawn(move || machine.call(0, PASSED))
            };
            if let Ok(draining) = machine.gate.drain(machine.slots.iter(), NEVER) {
                machine.swap();
                machine.gate.give_up(draining);
            }
            caller.join().unwrap();
            assert_eq!(machine.counted(), 1, "a write was lost");
        });
    }
}
