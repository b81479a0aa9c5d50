//! What the pool asks of whoever owns the memory.

use crate::Place;

/// Why a [`Backend`] call failed. `E` is the backend's own error; the pool hands it back and never looks inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault<E> {
    /// The place has no memory left for this request. The pool tries the next place.
    OutOfMemory(E),
    /// The place cannot give memory at all (a container forbids host memory, say). The pool stops asking it.
    Unavailable(E),
    /// The driver asks for patience (`CUDA_ERROR_NOT_READY`). The pool repeats the call a few times.
    NotReady(E),
    /// Anything else: the operation is rolled back and the error handed to the caller.
    Failed(E),
}

/// Physical memory and address space, as the pool needs them. Addresses are absolute and multiples of
/// [`crate::FRAME`], sizes are bytes and multiples of it. Called from any thread, never under the pool's lock.
pub trait Backend: Send + Sync {
    /// One piece of physical memory (`CUmemGenericAllocationHandle`).
    type Handle: Copy + Send + Sync + std::fmt::Debug + PartialEq;
    /// The backend's own error, passed through.
    type Error: Clone + std::fmt::Debug + Send;

    /// Bytes that `place` could still give right now, after what must be left free there; `None` where nobody can tell
    /// (then the pool finds out by asking). Called only when the pool is about to grow.
    fn headroom(&self, place: Place) -> Option<u64>;
    /// Creates physical memory at `place` (`cuMemCreate`). At [`Place::Disk`] and [`Place::Pageable`] there is none: the answer stands for it, and is never mapped,
    /// granted or given a second mapping.
    fn create(&self, place: Place, bytes: u64) -> Result<Self::Handle, Fault<Self::Error>>;
    /// Returns what `create` made there (`cuMemRelease`). It is mapped nowhere at that point.
    fn release(&self, handle: Self::Handle, place: Place, bytes: u64) -> Result<(), Fault<Self::Error>>;
    /// Maps a whole handle at `address` (`cuMemMap`).
    fn map(&self, address: u64, bytes: u64, handle: Self::Handle) -> Result<(), Fault<Self::Error>>;
    /// Unmaps exactly what one or several `map` calls put there (`cuMemUnmap`).
    fn unmap(&self, address: u64, bytes: u64) -> Result<(), Fault<Self::Error>>;
    /// Gives every device that is to reach memory of `place` now read and write access to this mapped range
    /// (`cuMemSetAccess`).
    fn grant(&self, address: u64, bytes: u64, place: Place) -> Result<(), Fault<Self::Error>>;
    /// Another number each time that a device is added to those which [`Backend::grant`] names. Memory that was granted while
    /// the number was another one may lack that device; see [`crate::Pool::grant_again`].
    fn readers(&self) -> u64 {
        0
    }
    /// Returns once no work that was submitted to these GPUs before the call is running any more (`cuCtxSynchronize` of
    /// every context there). It must not wait for any other GPU. `NotReady` here means "not now" (a stream is being
    /// captured and nothing is left to wait with) and is not repeated.
    fn quiesce(&self, gpus: &[u32]) -> Result<(), Fault<Self::Error>>;
    /// Returns once no work that was submitted before the call in the context of this owner ([`crate::Request::owner`]), on
    /// this GPU, is running any more: what the driver's own free waits for (`cuCtxSynchronize` there). Says whether that was
    /// all work on the GPU, as it is where no other context is. Faults as for [`Backend::quiesce`].
    fn quiesce_owner(&self, owner: u64, gpu: u32) -> Result<bool, Fault<Self::Error>> {
        let _ = owner;
        self.quiesce(&[gpu]).map(|()| true)
    }
    /// Whether [`Backend::quiesce_owner`] would return at once, without a question to anybody, since it is known that nothing was submitted in
    /// the context of this owner since that was last waited for. Asked at every lazy free, so it takes two loads; `false` where nobody keeps that.
    fn is_at_rest(&self, owner: u64) -> bool {
        let _ = owner;
        false
    }
    /// Whether all work that was submitted to this GPU before the call is over, asked without waiting for it. `false` where
    /// nobody can tell, or not now.
    fn has_finished(&self, gpu: u32) -> bool;
    /// Takes a second mapping down ([`Mover::alias`]) and gives its addresses back.
    fn drop_alias(&self, address: u64, bytes: u64) -> Result<(), Fault<Self::Error>> {
        let _ = (address, bytes);
        Ok(())
    }
}

/// Bytes to be copied from one address to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Where they are.
    pub from: u64,
    /// Where they are wanted.
    pub to: u64,
    /// How many.
    pub bytes: u64,
    /// It comes home. What goes out may be copied at the same time, by another engine.
    pub inward: bool,
    /// Nothing is mapped at `from`: they are to be read from where they were stored by that address
    /// ([`Place::is_stored`]).
    pub stored: bool,
    /// From one GPU to another, neither of which is the one that copies.
    pub between: bool,
}

/// What it takes to move the contents of memory, beside a [`Backend`].
pub trait Mover: Backend {
    /// Maps a whole handle a second time, at addresses of its own outside the reservation, for the devices that
    /// [`Backend::grant`] names (`cuMemAddressReserve`, `cuMemMap`, `cuMemSetAccess`). Returns the first address. Nothing is left
    /// of what failed.
    fn alias(&self, handle: Self::Handle, bytes: u64, place: Place) -> Result<u64, Fault<Self::Error>>;
    /// Returns once no work that was submitted before the call is running on any device that may reach the pool's memory. Faults
    /// as for [`Backend::quiesce`].
    fn drain(&self) -> Result<(), Fault<Self::Error>>;
    /// Makes what [`Mover::copy`] needs in the context of this owner, on this GPU, so that it makes nothing itself.
    fn prepare(&self, owner: u64, gpu: u32) -> Result<(), Fault<Self::Error>>;
    /// Copies all of these, and returns when they are done: in the context of this owner, on this GPU. No two of them touch the same
    /// memory. Called while the program's threads may be held: it allocates nothing, logs nothing and takes no lock that they may have.
    fn copy(&self, owner: u64, gpu: u32, transfers: &[Transfer]) -> Result<(), Fault<Self::Error>>;
    /// Writes down what a GPU finds in memory of its own ([`Contents`]), in the context of this owner; nothing where it cannot. Called where
    /// [`Mover::copy`] is, with the same promises.
    fn digest(&self, owner: u64, gpu: u32, contents: &mut [Contents]);
}

/// Memory, and a number for what is in it: where two are equal the contents are, since one of 128 bits is the same by chance as
/// often as a disk of this size errs unseen, and far less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contents {
    /// First byte.
    pub address: u64,
    /// How many.
    pub bytes: u64,
    /// The number; `None` where it is not known.
    pub digest: Option<u128>,
}
