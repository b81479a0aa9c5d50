//! A process that is part of the machine: what it takes of each place and gives back, and the frames it shares.

use crate::files::{is_locked, lock_bytes, map, map_file, memory_file};
use crate::occupancy::{
    DIRTY, FREE, Frozen, GRANULE, LIFE, Occupancy, PLACES, Record, SHARED, SLOTS, Shared, Slot, Use, open, start_of,
};
use crate::settings::Settings;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// All memory of one place: its file, and where this process sees the whole of it.
pub struct Memory {
    pub file: OwnedFd,
    pub base: usize,
}

/// A process's view of the machine that it is part of.
pub struct Machine {
    occupancy: &'static Occupancy,
    /// `None` for a machine of one process.
    file: Option<Shared>,
    slot: usize,
    places: [OnceLock<Memory>; PLACES],
}

impl Machine {
    /// The machine that `SIMCUDA_MACHINE` names, or one of this process's own.
    pub fn join(settings: &Settings) -> Result<Self, String> {
        let places = [const { OnceLock::new() }; PLACES];
        let Some(path) = &settings.machine else {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let address = map(size_of::<Occupancy>() as u64, flags, -1)
                .ok_or("no room for what the machine's processes share")?;
            // SAFETY: zeroed memory of the layout's size, never taken away.
            let occupancy = unsafe { &*(address as *const Occupancy) };
            occupancy.prepare(settings);
            occupancy.claim(0);
            return Ok(Self { occupancy, file: None, slot: 0, places });
        };
        let (occupancy, file) = open(path, settings)?;
        let guard = occupancy.lock();
        // What this process was before an `exec` has the same number and start, and no lock.
        let me = std::process::id();
        for (index, slot) in occupancy.slots() {
            let mine = slot.pid.load(Relaxed) == me && Some(slot.start.load(Relaxed)) == start_of(me);
            if !file.is_locked(index) && (mine || !file.is_alive(occupancy, index)) {
                occupancy.bury(index);
            }
        }
        // Who ends gives its slot up before the system takes its lock.
        let is_free = |&index: &usize| occupancy.slots[index].taken.load(Relaxed) == 0 && !file.is_locked(index);
        let free = (0..SLOTS).find(is_free);
        let slot =
            free.ok_or_else(|| format!("SIMCUDA_MACHINE={}: {SLOTS} processes are on it already", path.display()))?;
        lock_bytes(&file.file, libc::F_WRLCK, LIFE + slot as i64, 1, libc::F_OFD_SETLK)
            .map_err(|error| format!("SIMCUDA_MACHINE={}: cannot be locked: {error}", path.display()))?;
        occupancy.claim(slot);
        drop(guard);
        Ok(Self { occupancy, file: Some(file), slot, places })
    }

    pub fn occupancy(&self) -> &'static Occupancy {
        self.occupancy
    }

    fn mine(&self) -> &Slot {
        &self.occupancy.slots[self.slot]
    }

    /// Whether somebody has stopped this process.
    pub fn is_frozen(&self) -> bool {
        self.mine().frozen() != Frozen::Not
    }

    /// What the driver is to answer when this process's memory is to leave, and when it is to come back; 0: it does.
    pub fn set_unfit(&self, leaving: i32, coming: i32) {
        self.mine().refuses.store(leaving, Release);
        self.mine().unfit.store(coming, Release);
    }

    /// How often this process's memory left and came back.
    pub fn returns(&self) -> u32 {
        self.mine().returns.load(Acquire)
    }

    fn mark(&self) -> u8 {
        self.slot as u8 + 1
    }

    /// The memory of a place, which a living process of this machine has or which begins here.
    pub fn memory(&self, place: usize, name: &str) -> Result<&Memory, String> {
        let _guard = self.occupancy.lock();
        if let Some(memory) = self.places[place].get() {
            return Ok(memory);
        }
        self.reap();
        let capacity = self.occupancy.capacity[place].load(Relaxed);
        let what = format!("{capacity} bytes for {name}");
        let holders = || self.occupancy.slots().filter(|(_, slot)| slot.files[place].load(Relaxed) != 0);
        let file = match holders().find_map(|(_, slot)| slot.file(place, name)) {
            Some(file) => file,
            None => {
                // Whatever was there went with the last process that had it. Where all who have it closed their descriptors
                // (a daemon; a child of `fork` that keeps the memory of a killed parent), their frames stay counted, and
                // nobody can be given them any more.
                if holders().next().is_none() {
                    self.occupancy.mark(place, 0, capacity, FREE);
                    let left = self.occupancy.records().filter(|record| record.is_on(place));
                    left.for_each(|record| record.live.store(0, Release));
                }
                memory_file(name, capacity).map_err(|error| format!("memfd_create of {what} failed: {error}"))?
            }
        };
        let base = map_file(&file, 0, capacity)
            .ok_or_else(|| {
                let error = std::io::Error::last_os_error();
                format!(
                    "mmap of {what} failed: {error}; raise the limit on address space (ulimit -v) if there is one, or lower \
                     SIMCUDA_GPUS or SIMCUDA_HOST"
                )
            })?;
        self.mine().files[place].store(file.as_raw_fd() + 1, Relaxed);
        Ok(self.places[place].get_or_init(|| Memory { file, base }))
    }

    /// Bytes in use at a place, by all processes.
    pub fn used(&self, place: usize) -> u64 {
        let _guard = self.occupancy.lock();
        self.reap();
        self.sum(place)
    }

    fn sum(&self, place: usize) -> u64 {
        let slots: u64 = self.occupancy.slots().map(|(_, slot)| slot.on(place)).sum();
        let shared = self.occupancy.records().filter(|record| record.is_on(place));
        slots + shared.map(|record| record.bytes.load(Relaxed)).sum::<u64>()
    }

    /// Counts `bytes` against a place, or says how many are missing.
    pub fn charge(&self, place: usize, purpose: Use, bytes: u64) -> Result<(), u64> {
        let _guard = self.occupancy.lock();
        let free = || self.occupancy.capacity[place].load(Relaxed).saturating_sub(self.sum(place));
        let mut left = free();
        if bytes > left {
            self.reap();
            left = free();
        }
        if bytes > left {
            return Err(bytes - left);
        }
        self.mine().used[place][purpose as usize].fetch_add(bytes, Relaxed);
        if purpose == Use::Context {
            self.mine().contexts[place].fetch_add(1, Relaxed);
        }
        Ok(())
    }

    pub fn refund(&self, place: usize, purpose: Use, bytes: u64) {
        if purpose == Use::Context {
            self.mine().contexts[place].fetch_sub(1, Relaxed);
        }
        self.mine().used[place][purpose as usize].fetch_sub(bytes, Relaxed);
    }

    /// Frames of a place for bytes that were charged, in one stretch if there is one: a GPU's page tables make fragmentation
    /// of physical memory invisible too. They read as zero.
    pub fn take(&self, place: usize, bytes: u64) -> Option<Vec<(u64, u64)>> {
        let guard = self.occupancy.lock();
        let frames = &self.occupancy.frames[place][..self.occupancy.frames_of(place)];
        let wanted = bytes.div_ceil(GRANULE) as usize;
        let is_free = |at: usize| matches!(frames[at].load(Relaxed), FREE | DIRTY);
        let mut runs: Vec<(usize, usize)> = Vec::new();
        let (mut first, mut at) = (None, self.occupancy.first_free[place].load(Relaxed) as usize);
        let mut found = 0;
        while at < frames.len() {
            if !is_free(at) {
                at += 1;
                continue;
            }
            let start = at;
            while at < frames.len() && at - start < wanted && is_free(at) {
                at += 1;
            }
            first = first.or(Some(start));
            if at - start == wanted {
                (runs, found) = (vec![(start, wanted)], wanted);
                break;
            }
            if found < wanted {
                let count = (at - start).min(wanted - found);
                runs.push((start, count));
                found += count;
            }
        }
        if found < wanted {
            return None;
        }
        let mut dirty = Vec::new();
        for &(start, count) in &runs {
            for (index, frame) in frames[start..start + count].iter().enumerate() {
                if frame.swap(self.mark(), Relaxed) == DIRTY {
                    dirty.push(start + index);
                }
            }
        }
        // Frames before the first free one stay taken; the search has passed them.
        if let Some(first) = first {
            let next = runs.iter().find(|run| run.0 == first).map_or(first, |run| run.0 + run.1);
            self.occupancy.first_free[place].store(next as u64, Relaxed);
        }
        drop(guard);
        for frame in dirty {
            self.punch(place, frame as u64 * GRANULE, GRANULE);
        }
        Some(runs.into_iter().map(|(start, count)| (start as u64 * GRANULE, count as u64 * GRANULE)).collect())
    }

    /// Gives frames back, and what was charged for them. `mark` may write into them once they are emptied.
    pub fn give(&self, place: usize, purpose: Use, offset: u64, bytes: u64, mark: impl FnOnce()) {
        self.punch(place, offset, bytes);
        mark();
        let _guard = self.occupancy.lock();
        self.occupancy.mark(place, offset, bytes, FREE);
        self.refund(place, purpose, bytes);
    }

    /// Whether another description holds a lock on a stretch of a place's memory.
    fn is_open(&self, place: usize, offset: u64, bytes: u64) -> bool {
        match self.places[place].get() {
            Some(memory) => is_locked(memory.file.as_raw_fd(), offset as i64, bytes as i64),
            None => self.occupancy.is_open(place, offset, bytes),
        }
    }

    /// From here on other processes may hold these frames, beyond their end in this one. `None` where there are too many.
    pub fn share(&self, place: usize, purpose: Use, offset: u64, bytes: u64) -> Option<usize> {
        let _guard = self.occupancy.lock();
        let index = self.occupancy.records.iter().position(|record| record.live.load(Relaxed) == 0)?;
        let record = &self.occupancy.records[index];
        record.owner.store(u32::from(self.mark()), Relaxed);
        record.place.store(place as u32, Relaxed);
        record.purpose.store(purpose as u32, Relaxed);
        record.offset.store(offset, Relaxed);
        record.bytes.store(bytes, Relaxed);
        self.occupancy.records_used.fetch_max(index as u32 + 1, Relaxed);
        record.live.store(1, Release);
        self.occupancy.mark(place, offset, bytes, SHARED);
        self.refund(place, purpose, bytes);
        Some(index)
    }

    /// Undoes [`Machine::share`] before anybody was given the frames.
    pub fn take_back(&self, index: usize) {
        let _guard = self.occupancy.lock();
        let record = &self.occupancy.records[index];
        self.reclaim(record);
    }

    /// This process lets go of frames that it shared: they are free now, or when the last other holder lets go.
    pub fn end_shared(&self, index: usize) {
        let _guard = self.occupancy.lock();
        self.occupancy.records[index].owner.store(0, Relaxed);
        self.end_if_closed(&self.occupancy.records[index]);
    }

    fn end_if_closed(&self, record: &Record) {
        let (place, (offset, bytes)) = (record.place.load(Relaxed) as usize, record.range());
        if self.is_open(place, offset, bytes) {
            return;
        }
        self.reclaim(record);
        // Whoever cannot clear the frames leaves that to the next who takes them.
        let mark = if self.punch(place, offset, bytes) { FREE } else { DIRTY };
        self.occupancy.mark(place, offset, bytes, mark);
        self.mine().used[place][record.purpose.load(Relaxed) as usize].fetch_sub(bytes, Relaxed);
    }

    /// Makes the frames of a record this process's own again. A death on the way leaves no frames that are nobody's, nor a
    /// record of frames that somebody else has taken.
    fn reclaim(&self, record: &Record) {
        let (place, (offset, bytes)) = (record.place.load(Relaxed) as usize, record.range());
        self.occupancy.mark(place, offset, bytes, self.mark());
        self.mine().used[place][record.purpose.load(Relaxed) as usize].fetch_add(bytes, Relaxed);
        record.live.store(0, Release);
    }

    /// Clears what processes that have ended left. Under the mutex.
    fn reap(&self) {
        if let Some(file) = &self.file {
            let others = self.occupancy.slots().filter(|(index, _)| *index != self.slot);
            let ended = others.filter(|(index, _)| !file.is_alive(self.occupancy, *index));
            ended.for_each(|(index, _)| self.occupancy.bury(index));
        }
        let left = self.occupancy.records().filter(|record| record.owner.load(Relaxed) == 0);
        left.for_each(|record| self.end_if_closed(record));
    }

    /// Returns the pages to the system, so that the stretch reads as zero; whether this process could.
    fn punch(&self, place: usize, offset: u64, bytes: u64) -> bool {
        let Some(memory) = self.places[place].get() else { return false };
        let address = memory.base + offset as usize;
        // SAFETY: a stretch of the place's own mapping, whose frames nobody holds or this process has just taken. By
        // address and not by descriptor, which the program may have closed and opened again as something else.
        unsafe { libc::madvise(address as *mut _, bytes as usize, libc::MADV_REMOVE) == 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;

    /// A machine of this test alone, with one GPU of which 8 frames are free.
    fn machine() -> Machine {
        let settings = Settings::read(|name| (name == "SIMCUDA_GPUS").then(|| "1x64MiB".to_owned())).unwrap();
        let machine = Machine::join(&settings).unwrap();
        machine.memory(0, "simcuda-gpu-0").unwrap();
        // All but 8 of the 32 frames.
        machine.charge(0, Use::Plain, 24 * GRANULE).unwrap();
        assert_eq!(machine.take(0, 24 * GRANULE), Some(vec![(0, 24 * GRANULE)]));
        machine
    }

    fn take(machine: &Machine, frames: u64) -> Option<Vec<(u64, u64)>> {
        machine.charge(0, Use::Vmm, frames * GRANULE).ok()?;
        let taken = machine.take(0, frames * GRANULE).unwrap();
        Some(taken.into_iter().map(|(offset, bytes)| (offset / GRANULE, bytes / GRANULE)).collect())
    }

    fn give(machine: &Machine, frame: u64, frames: u64) {
        machine.give(0, Use::Vmm, frame * GRANULE, frames * GRANULE, || ());
    }

    #[test]
    fn frames_come_in_one_stretch_where_there_is_one_and_else_in_several() {
        let machine = machine();
        assert_eq!([take(&machine, 2), take(&machine, 3)], [Some(vec![(24, 2)]), Some(vec![(26, 3)])]);
        give(&machine, 24, 2);
        assert_eq!(take(&machine, 3), Some(vec![(29, 3)]), "the first stretch that is long enough");
        assert_eq!(take(&machine, 3), None);
        give(&machine, 30, 2);
        assert_eq!(take(&machine, 4), Some(vec![(24, 2), (30, 2)]));
        give(&machine, 26, 1);
        assert_eq!([take(&machine, 2), take(&machine, 1)], [None, Some(vec![(26, 1)])]);
        assert_eq!(machine.used(0), 64 << 20);
    }

    #[test]
    fn what_is_missing_is_told_and_nothing_charged() {
        let machine = machine();
        assert_eq!(machine.charge(0, Use::Pinned, 8 * GRANULE + 5), Err(5));
        assert_eq!(machine.used(0), 24 * GRANULE);
        assert_eq!(machine.charge(0, Use::Pinned, 8 * GRANULE), Ok(()));
        assert_eq!(machine.charge(0, Use::Context, 1), Err(1));
        machine.refund(0, Use::Pinned, 8 * GRANULE);
        assert_eq!(machine.used(0), 24 * GRANULE);
    }

    #[test]
    fn a_slot_whose_last_process_has_not_quite_ended_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machine");
        let ending = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        lock_bytes(&ending, libc::F_WRLCK, LIFE, 1, libc::F_OFD_SETLK).unwrap();
        let get = |name: &str| match name {
            "SIMCUDA_GPUS" => Some("1x64MiB".to_owned()),
            "SIMCUDA_MACHINE" => Some(path.display().to_string()),
            _ => None,
        };
        let machine = Machine::join(&Settings::read(get).unwrap()).unwrap();
        assert_eq!(machine.slot, 1);
    }

    #[test]
    fn shared_frames_are_kept_while_a_lock_on_them_is_held() {
        let machine = machine();
        assert_eq!(take(&machine, 4), Some(vec![(24, 4)]));
        let record = machine.share(0, Use::Vmm, 24 * GRANULE, 4 * GRANULE).unwrap();
        let memory = machine.memory(0, "simcuda-gpu-0").unwrap();
        let path = format!("/proc/self/fd/{}", memory.file.as_raw_fd());
        let holder = OpenOptions::new().read(true).write(true).open(path).unwrap();
        lock_bytes(&holder, libc::F_RDLCK, 24 << 21, 4 << 21, libc::F_OFD_SETLK).unwrap();
        machine.end_shared(record);
        assert_eq!((machine.used(0), take(&machine, 5)), (28 * GRANULE, None));
        drop(holder);
        assert_eq!((machine.used(0), take(&machine, 5)), (24 * GRANULE, Some(vec![(24, 5)])));
    }
}
