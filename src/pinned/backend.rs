//! What the pool asks of whoever pins memory.

use crate::{Fault, Key};

/// Pinned memory, as the pool needs it. Sizes are bytes and multiples of [`crate::PAGE`]. Called from any thread, never
/// under the pool's lock.
pub trait Backend: Send + Sync {
    /// The backend's own error, passed through.
    type Error: Clone + std::fmt::Debug + Send;

    /// Pins new memory in the context and with the flags of `key` (`cuMemHostAlloc`); returns its address, a multiple of
    /// [`crate::PAGE`]. After [`Fault::OutOfMemory`] the pool gives back what it can and asks once more; every other fault
    /// ends the request.
    fn pin(&self, key: Key, bytes: u64) -> Result<u64, Fault<Self::Error>>;

    /// Gives back what one `pin` gave (`cuMemFreeHost`). It need not be quiet: the driver's free waits for the device. Where
    /// that must not be, because `may_wait` is false and the device may be busy, the answer is an error. After any error the memory is taken to be pinned still and stays in the pool.
    ///
    /// `may_wait` is false inside [`crate::Pool::allocate`], since the driver's own allocation does not wait, and for memory of
    /// contexts that the caller has nothing to do with: a kernel may be running there that waits for the program.
    /// [`crate::Pool::return_idle`] makes up for it.
    fn unpin(&self, key: Key, address: u64, bytes: u64, may_wait: bool) -> Result<(), Self::Error>;

    /// Returns once no work submitted in this context ([`Key::context`]) before the call is running any more
    /// (`cuCtxSynchronize` there): what the driver's own free of pinned memory waits for, portable or not (measured).
    /// [`Fault::NotReady`] means "not now" (a stream is being captured and nothing is left to wait with) and is not repeated.
    fn quiesce(&self, context: u64) -> Result<(), Fault<Self::Error>>;
}
