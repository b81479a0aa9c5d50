//! A look at the machine from outside: the simulated NVML, and reports.

use crate::occupancy::{Frozen, Occupancy, Record, Shared, Slot, open};
use crate::settings::Settings;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Somebody who looks at the machine without being part of it.
pub struct Visitor {
    /// Mapped: for as long as this is, or, of a machine of one process, for good.
    occupancy: *const Occupancy,
    file: Option<Shared>,
}

impl Drop for Visitor {
    fn drop(&mut self) {
        if self.file.is_some() {
            // SAFETY: the mapping is one of this visitor's own, of that size, and all that was lent of it was for as long as this is.
            unsafe { libc::munmap(self.occupancy.cast_mut().cast(), size_of::<Occupancy>()) };
        }
    }
}

impl Visitor {
    /// Looks at the machine that `SIMCUDA_MACHINE` names.
    pub fn of(settings: &Settings) -> Option<Result<Self, String>> {
        let path = settings.machine.as_ref()?;
        Some(
            open(path, settings)
                .map(|(occupancy, file)| Self { occupancy: std::ptr::from_ref(occupancy), file: Some(file) }),
        )
    }

    /// Looks at a machine of one process, from inside.
    ///
    /// # Safety
    /// `occupancy` is what [`crate::Machine::occupancy`] returned in this process.
    pub unsafe fn within(occupancy: *const Occupancy) -> Self {
        Self { occupancy, file: None }
    }

    fn occupancy(&self) -> &Occupancy {
        // SAFETY: it is mapped at least as long as this visitor is.
        unsafe { &*self.occupancy }
    }

    fn living(&self) -> impl Iterator<Item = (usize, &Slot)> {
        let alive = |index| self.file.as_ref().is_none_or(|file| file.is_alive(self.occupancy(), index));
        self.occupancy().slots().filter(move |(index, _)| alive(*index))
    }

    /// Bytes in use at a place, by all processes that are there.
    pub fn used(&self, place: usize) -> u64 {
        let _guard = self.occupancy().lock();
        let slots: u64 = self.living().map(|(_, slot)| slot.on(place)).sum();
        let held = |record: &&Record| {
            let (offset, bytes) = record.range();
            let owner = (record.owner.load(Relaxed) as usize).checked_sub(1);
            record.is_on(place)
                && (owner.is_some_and(|owner| self.living().any(|(index, _)| index == owner))
                    || self.occupancy().is_open(place, offset, bytes))
        };
        slots + self.occupancy().records().filter(held).map(|record| record.bytes.load(Relaxed)).sum::<u64>()
    }

    fn slot_of(&self, pid: u32) -> Option<&Slot> {
        self.living().map(|(_, slot)| slot).find(|slot| slot.pid.load(Relaxed) == pid)
    }

    /// Whether a process is stopped; `None`: it is not part of the machine.
    pub fn frozen(&self, pid: u32) -> Option<Frozen> {
        self.slot_of(pid).map(Slot::frozen)
    }

    /// Stops a process, or lets it go on.
    pub fn freeze(&self, pid: u32, frozen: Frozen) {
        if let Some(slot) = self.slot_of(pid) {
            slot.frozen.store(frozen as u32, Release);
        }
    }

    /// See [`Machine::set_unfit`](crate::Machine::set_unfit).
    pub fn unfit(&self, pid: u32) -> [i32; 2] {
        self.slot_of(pid).map_or([0; 2], |slot| [slot.refuses.load(Acquire), slot.unfit.load(Acquire)])
    }

    /// The memory of a process is back.
    pub fn has_returned(&self, pid: u32) {
        if let Some(slot) = self.slot_of(pid) {
            slot.returns.fetch_add(1, AcqRel);
        }
    }

    /// Whether a process other than this one is part of the machine and has no context yet.
    pub fn begins_beside(&self, pid: u32) -> bool {
        let _guard = self.occupancy().lock();
        let begins =
            |slot: &Slot| slot.contexts.iter().all(|count| count.load(Relaxed) == 0) && slot.frozen() != Frozen::Gone;
        self.living().any(|(_, slot)| slot.pid.load(Relaxed) != pid && begins(slot))
    }

    /// Processes with a context on a GPU, and the bytes they use there.
    pub fn on_gpu(&self, place: usize) -> Vec<(u32, u64)> {
        let _guard = self.occupancy().lock();
        let is_there = |slot: &Slot| slot.contexts[place].load(Relaxed) > 0 && slot.frozen() != Frozen::Gone;
        let with_context = self.living().filter(|(_, slot)| is_there(slot));
        let bytes = |index: usize, slot: &Slot| {
            let own = |record: &&Record| record.is_on(place) && record.owner.load(Relaxed) == index as u32 + 1;
            slot.on(place)
                + self.occupancy().records().filter(own).map(|record| record.bytes.load(Relaxed)).sum::<u64>()
        };
        with_context.map(|(index, slot)| (slot.pid.load(Relaxed), bytes(index, slot))).collect()
    }
}
