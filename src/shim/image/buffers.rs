//! A few pinned buffers that bytes pass through on their way to a disk and back.
//!
//! They are pinned at once and by the driver, past the pool of pinned memory: what the program has there is the program's. A store's threads
//! give each back as soon as its bytes are stored, which is why they live as long as the last one that is out.

use gpupool_cuda::{CuResult, Driver};
use gpupool_store::PART;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;

/// Pinned memory of one context, in buffers of [`PART`] bytes.
pub struct Buffers {
    driver: &'static Driver,
    shelf: Arc<Shelf>,
}

/// What those who have a buffer and those who want one have in common.
struct Shelf {
    /// The first byte of all of them.
    start: u64,
    count: usize,
    state: Mutex<State>,
    came_back: Condvar,
}

struct State {
    free: Vec<usize>,
    /// How many nobody may have any more.
    lost: usize,
}

/// All buffers, in use until this is dropped.
pub struct All<'a> {
    shelf: &'a Shelf,
    pub bytes: &'a mut [u8],
}

impl Drop for All<'_> {
    fn drop(&mut self) {
        self.shelf.state.lock().free = (0..self.shelf.count).collect();
        self.shelf.came_back.notify_all();
    }
}

/// A buffer that is in use, until this is dropped.
pub struct Lent {
    shelf: Arc<Shelf>,
    number: usize,
    bytes: usize,
}

impl Buffers {
    /// In the current context, which lives until this is dropped.
    pub fn pin(driver: &'static Driver, count: usize) -> Result<Self, CuResult> {
        let start = driver.pin((count * PART) as u64, 0)?;
        let state = Mutex::new(State { free: (0..count).collect(), lost: 0 });
        Ok(Self { driver, shelf: Arc::new(Shelf { start, count, state, came_back: Condvar::new() }) })
    }

    /// One that is free, of this length; waits for it. Whoever waits has all others handed over to somebody who gives them back.
    pub fn take(&self, bytes: usize) -> Lent {
        let mut shelf = self.shelf.state.lock();
        loop {
            if let Some(number) = shelf.free.pop() {
                return Lent { shelf: Arc::clone(&self.shelf), number, bytes: bytes.min(PART) };
            }
            self.shelf.came_back.wait(&mut shelf);
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.shelf.count
    }

    /// Whether there is one that nobody may have any more.
    pub fn has_lost(&self) -> bool {
        self.shelf.state.lock().lost > 0
    }

    /// Waits until none is lent.
    pub fn wait(&self) {
        drop(self.take_all());
    }

    /// Nobody gets one again: something may still be reading them.
    pub fn lose_all(&self) {
        self.shelf.state.lock().lost = self.shelf.count;
        self.shelf.came_back.notify_all();
    }

    /// All of them as one piece of memory; waits until none is lent. `None`: one is lost.
    pub fn take_all(&self) -> Option<All<'_>> {
        let mut shelf = self.shelf.state.lock();
        while shelf.free.len() + shelf.lost < self.shelf.count {
            self.shelf.came_back.wait(&mut shelf);
        }
        if shelf.lost > 0 {
            return None;
        }
        shelf.free.clear();
        drop(shelf);
        // SAFETY: pinned memory of `pin`, so long, which the driver has zeroed or somebody has written. All buffers were free, and
        // nobody gets one before the answer is dropped.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.shelf.start as *mut u8, self.shelf.count * PART) };
        Some(All { shelf: &self.shelf, bytes })
    }

    /// Waits until none is lent, and unpins them. In the context that they were made in. What is lost goes with the context.
    pub fn unpin(&self) {
        if let Some(all) = self.take_all() {
            // Nobody takes one any more.
            std::mem::forget(all);
            // SAFETY: `pin` got this address, and every buffer of it is back.
            let _: CuResult = unsafe { self.driver.unpin(self.shelf.start) };
        }
    }
}

impl Lent {
    pub fn start(&self) -> *mut u8 {
        (self.shelf.start + (self.number * PART) as u64) as *mut u8
    }

    /// Nobody gets it again: something may still be writing to it.
    pub fn lose(self) {
        self.shelf.state.lock().lost += 1;
        self.shelf.came_back.notify_all();
        std::mem::forget(self);
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: pinned memory of `pin`, at least `bytes` of it, which nobody else has until this is dropped. Whoever copies into it reads
        // it only once that is over.
        unsafe { std::slice::from_raw_parts(self.start(), self.bytes) }
    }
}

impl AsMut<[u8]> for Lent {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and no copy is on its way to it or from it.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.bytes) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.shelf.state.lock().free.push(self.number);
        self.shelf.came_back.notify_all();
    }
}
