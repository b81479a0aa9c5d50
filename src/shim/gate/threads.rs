//! Every thread's way through the gate.
//!
//! A thread has a slot from its first gated call on. Slots stay where they are for good, since somebody may look at one whose thread
//! has just ended; a later thread gets it. A thread that ends gives it back, in whatever call it ended. Behind that, as in the
//! destructors of other libraries' thread-local variables, it takes one that nobody gives back: such slots are looked through once
//! there is no other.

use super::Disturbed;
use super::kernel::{self, Kernel};
use crate::guard;
use gpupool_pool::{Gate, Mark, Outside, Slot};
use once_cell::race::OnceBox;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::time::Duration;

pub(super) static GATE: Gate<Kernel> = Gate::new(Kernel);

/// What a row is called, by its place in the table of hooks.
pub type Names = fn(u16) -> &'static str;

/// How long a thread waits for a gate that is draining before it opens it, in nanoseconds. Set by who closes it.
pub(super) static PATIENCE: AtomicU64 = AtomicU64::new(Duration::from_millis(5).as_nanos() as u64);

thread_local! {
    /// This thread's slot, where nothing but two stores and a look are asked of the thread. `const` and without a destructor, so that
    /// touching it never allocates and stays legal while the thread is being torn down.
    static SEAT: Cell<Option<&'static Slot>> = const { Cell::new(None) };
    /// This thread's slot, in any case.
    static OWN: Cell<Option<&'static Slot>> = const { Cell::new(None) };
    /// Whether `ENDING` is gone.
    static HAS_ENDED: Cell<bool> = const { Cell::new(false) };
    static ENDING: Ending = const { Ending };
}

/// Gives the slot back as the thread ends.
struct Ending;

impl Drop for Ending {
    fn drop(&mut self) {
        HAS_ENDED.set(true);
        SEAT.set(None);
        if let Some(slot) = OWN.take() {
            slot.give_back();
        }
    }
}

/// Slots in the first block; each further one has twice as many.
const FIRST: usize = 64;
/// More slots than a system can have threads.
const BLOCKS: usize = 17;

static SLOTS: [OnceBox<Box<[Slot]>>; BLOCKS] = [const { OnceBox::new() }; BLOCKS];
/// For threads that find none. Whoever is in it never leaves.
static NONE_LEFT: Slot = Slot::new();
/// What such a thread writes to.
static NOBODYS: Slot = Slot::new();
static HAS_LATE: AtomicBool = AtomicBool::new(false);

/// All slots, one thread's each.
pub(super) fn slots() -> impl Iterator<Item = &'static Slot> {
    let blocks = SLOTS.iter().map_while(OnceBox::get);
    std::iter::once(&NONE_LEFT).chain(blocks.flat_map(|block| block.iter()))
}

/// This thread's number with the system.
pub(super) fn id() -> u32 {
    gpupool_interpose::thread_number() as u32
}

fn is_gone(thread: u32) -> bool {
    // SAFETY: the call takes numbers; signal 0 is only a question.
    let answer = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) };
    // SAFETY: it is this thread's error number.
    answer != 0 && unsafe { *libc::__errno_location() } == libc::ESRCH
}

/// A slot for this thread.
fn take() -> &'static Slot {
    let thread = id();
    for (number, block) in SLOTS.iter().enumerate() {
        let is_new = block.get().is_none();
        let block = block.get_or_init(|| Box::new((0..FIRST << number).map(|_| Slot::new()).collect()));
        if let Some(slot) = block.iter().find(|slot| slot.take(thread)) {
            return slot;
        }
        if !is_new && HAS_LATE.load(Ordering::Relaxed) {
            block.iter().for_each(|slot| slot.reap(is_gone));
            if let Some(slot) = block.iter().find(|slot| slot.take(thread)) {
                return slot;
            }
        }
    }
    GATE.stay(&NONE_LEFT);
    &NOBODYS
}

/// The name of a row, once any row was passed.
static NAMES: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

/// What stands for the library's own moves by hand among the rows.
const BY_HAND_ROW: u16 = u16::MAX;
const BY_HAND: Mark = Mark::new(BY_HAND_ROW);

pub(super) fn name(row: u16) -> Option<&'static str> {
    if row == BY_HAND_ROW {
        return Some("gpupool_prefetch or gpupool_advise");
    }
    let names = NAMES.load(Ordering::Acquire);
    if names.is_null() {
        return None;
    }
    // SAFETY: `first` stores nothing but a function of this type.
    let names: Names = unsafe { std::mem::transmute(names) };
    Some(names(row))
}

/// Held by a thread for the length of a gated call; ended by [`leave`](Passed::leave) and by nothing else, so that a thread which is
/// cancelled inside the call unwinds through nothing.
#[must_use]
pub struct Passed(&'static Slot);

/// Before a call that submits work or looks at mappings. Returns inside; waits where the gate is closed.
///
/// Always inlined, so that a row asks the loader only once where this thread's variables lie.
#[inline(always)]
pub fn enter(mark: Mark, names: Names) -> Passed {
    match SEAT.get() {
        Some(slot) => {
            if !GATE.enter(slot, mark) {
                wait(slot, mark);
            }
            Passed(slot)
        }
        None => without_seat(mark, names),
    }
}

/// As [`enter`], for a question that is answered without a look at what is mapped where `is_known`: such a one waits for nobody, as its answer is the same whatever moves. `None`:
/// the gate is not open, and it has passed none. Where the gate is open that is not asked, since to find out takes longer than to pass.
#[inline(always)]
pub fn enter_unless(mark: Mark, names: Names, is_known: impl FnOnce() -> bool) -> Option<Passed> {
    let slot = match SEAT.get() {
        Some(slot) if GATE.enter(slot, mark) => return Some(Passed(slot)),
        Some(slot) => slot,
        None => {
            let slot = OWN.get().unwrap_or_else(|| first(names));
            if GATE.enter_fenced(slot, mark) {
                return Some(Passed(slot));
            }
            slot
        }
    };
    // Outside before it is found out, which takes locks: whoever closes the gate waits for all that are inside.
    GATE.leave(slot, mark);
    if is_known() {
        return None;
    }
    if !GATE.enter_fenced(slot, mark) {
        wait(slot, mark);
    }
    Some(Passed(slot))
}

impl Passed {
    /// Behind the call, which is the one that this was got for.
    #[inline(always)]
    pub fn leave(self, mark: Mark) {
        GATE.leave(self.0, mark);
    }
}

#[cold]
#[inline(never)]
fn wait(slot: &'static Slot, mark: Mark) {
    GATE.wait(slot, mark, PATIENCE.load(Ordering::Relaxed));
}

/// A thread's first call, or each one where the system makes no barrier on other threads.
#[cold]
#[inline(never)]
fn without_seat(mark: Mark, names: Names) -> Passed {
    let slot = OWN.get().unwrap_or_else(|| first(names));
    if !GATE.enter_fenced(slot, mark) {
        wait(slot, mark);
    }
    Passed(slot)
}

fn first(names: Names) -> &'static Slot {
    NAMES.store(names as *mut (), Ordering::Release);
    seat()
}

/// A slot for this thread, which has none.
fn seat() -> &'static Slot {
    let slot = take();
    OWN.set(Some(slot));
    if kernel::barrier_reaches_all() {
        SEAT.set(Some(slot));
    }
    if HAS_ENDED.get() || ENDING.try_with(|_| ()).is_err() {
        HAS_LATE.store(true, Ordering::Relaxed);
    }
    slot
}

/// Before something of ours is submitted among the program's work, in front of the call that passes the gate itself: whoever has closed it would take this for
/// work that passed no gate. `None` where it is closed, or about to be; waits for nobody.
pub fn enter_if_open() -> Option<MovingByHand> {
    let slot = OWN.get().unwrap_or_else(seat);
    let inside = GATE.enter_fenced(slot, BY_HAND);
    let entered = MovingByHand(slot);
    inside.then_some(entered)
}

/// Held for the length of a move by hand, or of a submission of ours.
#[must_use]
pub struct MovingByHand(&'static Slot);

/// Before memory is moved by hand, which submits copies as a gated call does: nobody else moves anything meanwhile, or takes these copies for
/// work that passed no gate. Waits where the gate is closed; for a thread that holds no lock which a hook takes.
pub fn enter_by_hand() -> MovingByHand {
    let slot = OWN.get().unwrap_or_else(seat);
    if !GATE.enter_fenced(slot, BY_HAND) {
        wait(slot, BY_HAND);
    }
    MovingByHand(slot)
}

impl Drop for MovingByHand {
    fn drop(&mut self) {
        GATE.leave(self.0, BY_HAND);
    }
}

/// For calls that pass no gate and would bring memory to a GPU that a suspended program has left: waits until it is resumed. For a thread that holds
/// nothing.
#[inline]
pub fn wait_while_held() {
    if GATE.is_held() && !is_inside() {
        guard::outside(|| GATE.wait_while_held());
    }
}

/// Asks for the held gate to be opened, as a thread that waits there does.
pub fn ask() {
    kernel::Kernel.wanted();
}

/// Whether a thread that waited at the held gate was interrupted by a signal since the last question.
pub fn has_asked() -> bool {
    kernel::WANTED.swap(false, Ordering::AcqRel)
}

/// Whether every thread that has to wait at the held gate asks for it to be opened, and not only one that is interrupted.
pub fn whoever_waits_asks(asks: bool) {
    kernel::EVERYBODY_ASKS.store(asks, Ordering::Release);
}

/// See [`whoever_waits_asks`].
pub fn does_whoever_waits_ask() -> bool {
    kernel::EVERYBODY_ASKS.load(Ordering::Acquire)
}

/// Whether this thread is in a gated call, as in a callback of the driver.
pub(super) fn is_inside() -> bool {
    OWN.get().is_some_and(|slot| slot.inside().is_some())
}

/// Returns once no other thread is in a gated call, whatever comes after that.
pub(super) fn wait_for_others(patience: Duration) -> Result<(), Disturbed> {
    let own = OWN.get();
    let is_other = |slot: &Slot| own.is_none_or(|own| !std::ptr::eq(own, slot));
    let until = kernel::after(patience);
    loop {
        let mut others = slots().filter(|slot| is_other(slot));
        let Some((slot, mark)) = others.find_map(|slot| Some((slot, slot.inside()?))) else { return Ok(()) };
        if kernel::now() >= until {
            return Err(Disturbed::Inside {
                thread: slot.thread(),
                api: mark.number().and_then(name),
                waited: patience,
            });
        }
        kernel::sleep_for(Duration::from_micros(10));
    }
}

/// In the child of a fork: nobody is left who would open it.
pub fn after_fork_in_child() {
    GATE.open_for_good();
}
