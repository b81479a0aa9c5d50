//! Memory of the program's own that only the driver can place: compressed, shared over a fabric, for sparse textures or for hardware decompression, or asked for on the host. It has the driver's own
//! handles, is in no image and stays when a program is suspended, and whoever asks for that is told how much it is.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

static KNOWN: Mutex<Known> = Mutex::new(Known::new());
/// Whether there ever was any, readable without the lock: in most programs there is not.
static IS_ANY: AtomicBool = AtomicBool::new(false);

/// As the driver counts: memory lives as long as a handle of it is held or it is mapped anywhere.
#[derive(Debug)]
struct Known {
    /// By their handles: how long each is, and how many references and mappings it has.
    pieces: BTreeMap<u64, Piece>,
    /// By their first addresses: how long each mapping is, and of which handle.
    mapped: BTreeMap<u64, (u64, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    bytes: u64,
    /// The GPU that it was made on; `None`: the host.
    gpu: Option<u32>,
    references: u64,
    mappings: u64,
}

impl Known {
    const fn new() -> Self {
        Self { pieces: BTreeMap::new(), mapped: BTreeMap::new() }
    }

    fn change(&mut self, handle: u64, change: impl FnOnce(&mut Piece)) -> bool {
        let Some(piece) = self.pieces.get_mut(&handle) else { return false };
        change(piece);
        if piece.references == 0 && piece.mappings == 0 {
            self.pieces.remove(&handle);
        }
        true
    }

    fn made(&mut self, handle: u64, bytes: u64, gpu: Option<u32>) {
        self.pieces.insert(handle, Piece { bytes, gpu, references: 1, mappings: 0 });
    }

    fn mapped(&mut self, address: u64, bytes: u64, handle: u64) {
        if self.change(handle, |piece| piece.mappings += 1) {
            self.mapped.insert(address, (bytes, handle));
        }
    }

    /// Takes out what begins there, since the driver unmaps whole mappings alone.
    fn unmap(&mut self, address: u64, bytes: u64) -> Vec<Unmapping> {
        let range = address..address.saturating_add(bytes);
        let gone: Vec<(u64, (u64, u64))> = self.mapped.range(range).map(|(start, known)| (*start, *known)).collect();
        let take = |(address, (bytes, handle)): (u64, (u64, u64))| {
            self.mapped.remove(&address);
            let piece = *self.pieces.get(&handle)?;
            self.change(handle, |piece| piece.mappings = piece.mappings.saturating_sub(1));
            Some(Unmapping { address, bytes, handle, piece })
        };
        gone.into_iter().filter_map(take).collect()
    }

    fn still_mapped(&mut self, Unmapping { address, bytes, handle, piece }: Unmapping) {
        self.pieces.entry(handle).or_insert(Piece { references: 0, mappings: 0, ..piece });
        self.mapped(address, bytes, handle);
    }

    fn release(&mut self, handle: u64) -> Option<Releasing> {
        let piece = *self.pieces.get(&handle)?;
        self.change(handle, |piece| piece.references = piece.references.saturating_sub(1));
        Some(Releasing { handle, piece })
    }

    fn still_held(&mut self, Releasing { handle, piece }: Releasing) {
        let piece = self.pieces.entry(handle).or_insert(Piece { references: 0, mappings: 0, ..piece });
        piece.references += 1;
    }

    fn at(&self, address: u64) -> Option<u64> {
        let (start, (bytes, handle)) = self.mapped.range(..=address).next_back()?;
        (address < start + bytes).then_some(*handle)
    }

    /// Bytes that are mapped in a range, of each mapping as much as lies in it, and on which GPU.
    fn mapped_in(&self, address: u64, bytes: u64) -> Vec<(u64, Option<u32>)> {
        let end = address.saturating_add(bytes);
        let below = self.mapped.range(..end).rev().map(|(start, (bytes, handle))| (*start, start + bytes, handle));
        let within = below.take_while(|(_, last, _)| *last > address);
        let gpu = |handle: &u64| self.pieces.get(handle).and_then(|piece| piece.gpu);
        within.map(|(start, last, handle)| (last.min(end) - start.max(address), gpu(handle))).collect()
    }

    fn bytes(&self) -> u64 {
        self.pieces.values().map(|piece| piece.bytes).sum()
    }

    fn bytes_on(&self, gpu: u32) -> u64 {
        self.bytes_where(|on| on == Some(gpu))
    }

    fn bytes_where(&self, is_meant: impl Fn(Option<u32>) -> bool) -> u64 {
        self.pieces.values().filter(|piece| is_meant(piece.gpu)).map(|piece| piece.bytes).sum()
    }
}

/// A reference that is about to be given back: whoever is given this handle next must not find it counted.
#[must_use = "it is counted again where the driver refuses"]
pub struct Releasing {
    handle: u64,
    piece: Piece,
}

/// A mapping that is about to end: whatever is mapped there next is not this.
#[must_use = "it is known again where the driver refuses"]
pub struct Unmapping {
    address: u64,
    bytes: u64,
    handle: u64,
    piece: Piece,
}

/// The driver made this, on a GPU or on the host.
#[cold]
pub fn made(handle: u64, bytes: u64, gpu: Option<u32>) {
    KNOWN.lock().made(handle, bytes, gpu);
    IS_ANY.store(true, Ordering::Release);
}

fn with<T>(ask: impl FnOnce(&mut Known) -> T) -> Option<T> {
    IS_ANY.load(Ordering::Acquire).then(|| ask(&mut KNOWN.lock()))
}

/// A reference of the driver's handle is about to be given back.
pub fn release(handle: u64) -> Option<Releasing> {
    with(|known| known.release(handle)).flatten()
}

/// The driver refused that: it is counted as before.
pub fn still_held(releasing: Releasing) {
    with(|known| known.still_held(releasing));
}

/// The driver gave one more reference on what is mapped at this address.
pub fn retained(address: u64) {
    with(|known| known.at(address).map(|handle| known.change(handle, |piece| piece.references += 1)));
}

/// The driver has mapped so much of it there.
pub fn mapped(address: u64, bytes: u64, handle: u64) {
    with(|known| known.mapped(address, bytes, handle));
}

/// A range is about to be unmapped: what of this is mapped there.
pub fn unmap(address: u64, bytes: u64) -> Vec<Unmapping> {
    with(|known| known.unmap(address, bytes)).unwrap_or_default()
}

/// The driver refused that: it is mapped as before.
pub fn still_mapped(unmapping: Vec<Unmapping>) {
    if !unmapping.is_empty() {
        with(|known| unmapping.into_iter().for_each(|one| known.still_mapped(one)));
    }
}

/// What of it is mapped in a range: of each mapping the bytes, and the GPU that it lies on.
pub fn mapped_in(address: u64, bytes: u64) -> Vec<(u64, Option<u32>)> {
    with(|known| known.mapped_in(address, bytes)).unwrap_or_default()
}

/// How many there are.
pub fn count() -> u64 {
    with(|known| known.pieces.len() as u64).unwrap_or_default()
}

/// Bytes of all that there is.
pub fn bytes() -> u64 {
    with(|known| known.bytes()).unwrap_or_default()
}

/// Bytes of what there is on GPUs.
pub fn bytes_on_gpus() -> u64 {
    with(|known| known.bytes_where(|gpu| gpu.is_some())).unwrap_or_default()
}

/// Bytes of what the program asked for on the host.
pub fn bytes_on_host() -> u64 {
    with(|known| known.bytes_where(|gpu| gpu.is_none())).unwrap_or_default()
}

/// Bytes of what there is on a GPU.
pub fn bytes_on(gpu: u32) -> u64 {
    with(|known| known.bytes_on(gpu)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_there_as_long_as_a_handle_is_held_or_it_is_mapped() {
        let mut known = Known::new();
        known.made(7, 100, Some(1));
        known.made(8, 50, None);
        known.mapped(1000, 100, 7);
        known.mapped(2000, 100, 7);
        // Another one's.
        known.mapped(3000, 10, 9);
        assert_eq!((known.bytes(), known.at(1099), known.at(1100), known.at(3000)), (150, Some(7), None, None));
        assert_eq!((known.bytes_on(1), known.bytes_on(0)), (100, 0));
        assert_eq!(known.mapped_in(1090, 920), [(10, Some(1)), (10, Some(1))]);
        assert_eq!((known.mapped_in(1100, 900), known.mapped_in(900, 100)), (vec![], vec![]));
        assert!(known.release(8).is_some() && known.release(8).is_none());
        // Refused, and then not.
        let releasing = known.release(7).unwrap();
        known.still_held(releasing);
        assert!(known.release(7).is_some());
        assert_eq!(known.unmap(900, 200).len(), 1);
        assert_eq!((known.bytes(), known.at(1000)), (100, None), "it is mapped elsewhere");
        let refused = known.unmap(2000, 100);
        assert_eq!(known.bytes(), 0);
        refused.into_iter().for_each(|one| known.still_mapped(one));
        assert_eq!((known.bytes(), known.at(2000)), (100, Some(7)));
        // A reference that was taken by its address.
        known.change(7, |piece| piece.references += 1);
        assert_eq!((known.unmap(2000, 100).len(), known.bytes()), (1, 100));
        assert!(known.release(7).is_some() && known.bytes() == 0 && known.mapped.is_empty());
    }
}
