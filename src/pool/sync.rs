//! Locks and atomics: the real ones, or under `cfg(loom)` those of the model checker, which tries every order of steps.

#[cfg(not(loom))]
pub(crate) use parking_lot::{Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::hint::spin_loop;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::thread::yield_now;

#[cfg(loom)]
pub(crate) use checked::{Mutex, MutexGuard};
#[cfg(loom)]
pub(crate) use loom::hint::spin_loop;
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
#[cfg(loom)]
pub(crate) use loom::thread::yield_now;

/// What some threads write, apart from what others read all the time: on two lines of its own, because processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Apart<T>(pub T);

#[cfg(not(loom))]
static SEATED: AtomicUsize = AtomicUsize::new(0);
#[cfg(not(loom))]
thread_local! {
    static SEAT: std::cell::Cell<usize> = const { std::cell::Cell::new(usize::MAX) };
}
#[cfg(loom)]
loom::lazy_static! {
    static ref SEATED: AtomicUsize = AtomicUsize::new(0);
}
#[cfg(loom)]
loom::thread_local! {
    static SEAT: std::cell::Cell<usize> = std::cell::Cell::new(usize::MAX);
}

/// This thread's number, from 0 in the order in which threads first ask. Numbers of ended threads are not given again.
pub(crate) fn seat() -> usize {
    SEAT.with(|seat| {
        if seat.get() == usize::MAX {
            seat.set(SEATED.fetch_add(1, Ordering::Relaxed));
        }
        seat.get()
    })
}

/// How many threads have a number.
pub(crate) fn seated() -> usize {
    SEATED.load(Ordering::Relaxed)
}

/// loom's mutex with the interface of parking_lot's.
#[cfg(loom)]
mod checked {
    use std::sync::PoisonError;

    pub(crate) use loom::sync::MutexGuard;

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }
}
