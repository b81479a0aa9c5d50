//! What a memory pool holds: chunks of its device's memory, cut to size, kept or given back.

use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::extents::Extents;
use crate::physical::{GRANULE, Physical, Use};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a pool takes from its device at once, as long as that is there.
const CHUNK: u64 = 32 << 20;
const ALIGN: u64 = 512;

/// Bytes now and the most there were since the mark was reset.
#[derive(Clone, Copy, Debug, Default)]
pub struct Level {
    pub current: u64,
    pub high: u64,
}

impl Level {
    pub fn add(&mut self, bytes: u64) {
        self.current += bytes;
        self.high = self.high.max(self.current);
    }

    pub fn sub(&mut self, bytes: u64) {
        self.current -= bytes;
    }

    pub fn reset(&mut self) {
        self.high = self.current;
    }
}

pub struct Reserve {
    device: usize,
    /// Most it may hold; 0 for no limit but the device's.
    limit: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    chunks: BTreeMap<u64, Chunk>,
    levels: Levels,
}

/// What the attributes of a pool and of graph memory tell.
#[derive(Clone, Copy, Debug, Default)]
pub struct Levels {
    pub reserved: Level,
    pub used: Level,
}

struct Chunk {
    physical: Arc<Physical>,
    free: Extents,
}

/// Memory taken from a reserve.
pub struct Taken {
    pub address: u64,
    pub physical: Arc<Physical>,
    pub offset: u64,
}

impl Reserve {
    pub fn new(device: usize, limit: u64) -> Self {
        Self { device, limit, state: Mutex::default() }
    }

    pub fn levels(&self) -> Levels {
        self.state.lock().levels
    }

    pub fn change_levels(&self, change: impl FnOnce(&mut Levels)) {
        change(&mut self.state.lock().levels);
    }

    /// `bytes` of what it holds, or of a new chunk.
    pub fn take(&self, bytes: u64) -> Outcome<Taken> {
        // No machine has what cannot be rounded up.
        let usual = bytes.checked_next_multiple_of(CHUNK).ok_or(Code::OUT_OF_MEMORY)?;
        if let Some(taken) = self.state.lock().cut(bytes) {
            return Ok(taken);
        }
        let exact = bytes.next_multiple_of(GRANULE);
        let (address, physical) = self.grow(usual).or_else(|_| self.grow(exact))?;
        let mut state = self.state.lock();
        state.levels.reserved.add(physical.bytes);
        let free = Extents::new(0, physical.bytes);
        state.chunks.insert(address, Chunk { physical, free });
        // Another thread may have cut it already, so this can still fail where memory is short.
        state.cut(bytes).ok_or(Code::OUT_OF_MEMORY)
    }

    fn grow(&self, bytes: u64) -> Outcome<(u64, Arc<Physical>)> {
        if self.limit > 0 && bytes > self.limit.saturating_sub(self.levels().reserved.current) {
            return Err(Code::OUT_OF_MEMORY);
        }
        let physical = driver().gpus[self.device].store.allocate(bytes, Use::Plain)?;
        Ok((driver().space.take_addresses(bytes)?, physical))
    }

    /// Takes memory back. It stays here until [`Reserve::trim`].
    pub fn give(&self, address: u64, bytes: u64) {
        let mut state = self.state.lock();
        state.levels.used.sub(bytes);
        if let Some((start, chunk)) = state.chunks.range_mut(..=address).next_back() {
            chunk.free.give(address - start, bytes.next_multiple_of(ALIGN));
        }
    }

    /// Gives unused chunks back to the device until no more than `keep` bytes are held.
    pub fn trim(&self, keep: u64) {
        let mut state = self.state.lock();
        let unused: Vec<u64> = state
            .chunks
            .iter()
            .filter(|(_, chunk)| chunk.free.is_whole(chunk.physical.bytes))
            .map(|(&start, _)| start)
            .collect();
        let mut ended = Vec::new();
        for start in unused {
            if state.levels.reserved.current <= keep {
                break;
            }
            if let Some(chunk) = state.chunks.remove(&start) {
                state.levels.reserved.sub(chunk.physical.bytes);
                ended.push((start, chunk.physical));
            }
        }
        drop(state);
        for (start, physical) in ended {
            driver().space.give_addresses(start, physical.bytes);
        }
    }
}

impl State {
    fn cut(&mut self, bytes: u64) -> Option<Taken> {
        let taken = self.chunks.iter_mut().find_map(|(start, chunk)| {
            let offset = chunk.free.take(bytes.next_multiple_of(ALIGN), ALIGN)?;
            Some(Taken { address: start + offset, physical: chunk.physical.clone(), offset })
        })?;
        self.levels.used.add(bytes);
        Some(taken)
    }
}
