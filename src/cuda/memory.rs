//! Memory: addresses, physical memory behind them, managed and pinned memory.
//!
//! All sizes are in bytes; those of physical memory and of mappings are multiples of the granularity, 2 MiB.
//!
//! What makes, maps, pins or ends memory may read or write a file in the driver, and so be where a thread is cancelled ([`cancel`]): it is not, before the
//! hook has ended that makes the call. That is little beside what these take.

use crate::{Access, CuResult, Device, Driver, Location, Physical, Properties, Stream};
use gpupool_interpose::cancel;
use gpupool_pool::Place;
use parking_lot::Mutex;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Held by whoever maps, unmaps or says who may use what is mapped. Two threads of which one gives access to a range and another gives access to the same, or maps
/// or unmaps within it, get into each other's way in the driver (580.159.04): one of them is answered ALREADY_MAPPED, or both succeed and a GPU that was given access cannot
/// read (`tests/programs/probe_grants.c`, RESULTS.md). Rejected: to ask again, since what succeeded says nothing of what is there; a lock for each range, since
/// the driver does one of these calls at a time anyhow.
static MAPPING: Mutex<()> = Mutex::new(());

/// `CU_MEM_ATTACH_GLOBAL`.
const ATTACH_GLOBAL: c_uint = 1;

/// A place in the calls that know no NUMA nodes.
fn device(place: Place) -> Device {
    match place {
        Place::Gpu(ordinal) => Device::of(ordinal),
        Place::Host(_) | Place::Disk | Place::Pageable => Device::CPU,
    }
}

impl Driver {
    /// Reserves addresses anywhere (`cuMemAddressReserve`).
    pub fn reserve(&self, bytes: u64) -> Result<u64, CuResult> {
        self.reserve_from(0, bytes)
    }

    /// The same from this address on, or anywhere where the driver cannot have those; which, it answers.
    pub fn reserve_from(&self, wanted: u64, bytes: u64) -> Result<u64, CuResult> {
        let _sheltered = cancel::shelter();
        let mut base = 0;
        // SAFETY: the output is a local; the address is a wish, which the driver looks up among those that are free.
        unsafe { (self.cuMemAddressReserve)(&raw mut base, bytes as usize, 0, wanted, 0) }.ok()?;
        Ok(base)
    }

    /// Gives back a reservation in which nothing is mapped (`cuMemAddressFree`).
    pub fn free_reservation(&self, base: u64, bytes: u64) -> CuResult {
        let _sheltered = cancel::shelter();
        // SAFETY: the call takes numbers only, and the driver knows its reservations.
        unsafe { (self.cuMemAddressFree)(base, bytes as usize) }
    }

    /// Makes physical memory (`cuMemCreate`); its handle, which has one reference. Needs no context.
    pub fn create(&self, bytes: u64, properties: &Properties) -> Result<Physical, CuResult> {
        let _sheltered = cancel::shelter();
        let mut handle = Physical::from_raw(0);
        // SAFETY: the output is a local, and the properties, the C struct with numbers for enums, outlive the call.
        unsafe { (self.cuMemCreate)(&raw mut handle, bytes as usize, properties, 0) }.ok()?;
        Ok(handle)
    }

    /// Drops one reference on physical memory (`cuMemRelease`). Mappings keep the memory.
    pub fn release(&self, handle: Physical) -> CuResult {
        let _sheltered = cancel::shelter();
        // SAFETY: the call takes a number only, and the driver knows its handles.
        unsafe { (self.cuMemRelease)(handle) }
    }

    /// Maps physical memory from its beginning at a reserved address (`cuMemMap`). `flags` is 0 but for those that a program
    /// gave.
    pub fn map(&self, address: u64, bytes: u64, handle: Physical, flags: u64) -> CuResult {
        let _sheltered = cancel::shelter();
        let _alone = MAPPING.lock();
        // SAFETY: the call takes numbers only; the driver refuses ranges that are not reserved or not free.
        unsafe { (self.cuMemMap)(address, bytes as usize, 0, handle, flags) }
    }

    /// Ends whole mappings (`cuMemUnmap`). The driver waits for nobody: the caller has made sure that no work uses the range.
    pub fn unmap(&self, address: u64, bytes: u64) -> CuResult {
        let _sheltered = cancel::shelter();
        let _alone = MAPPING.lock();
        // SAFETY: the call takes numbers only; the driver refuses ranges that are not whole mappings.
        unsafe { (self.cuMemUnmap)(address, bytes as usize) }
    }

    /// Says who may use a mapped range (`cuMemSetAccess`), besides whoever was allowed before.
    pub fn set_access(&self, address: u64, bytes: u64, list: &[Access]) -> CuResult {
        let _sheltered = cancel::shelter();
        let _alone = MAPPING.lock();
        // SAFETY: the list, of the C struct with numbers for enums, outlives the call.
        unsafe { (self.cuMemSetAccess)(address, bytes as usize, list.as_ptr(), list.len()) }
    }

    /// Takes a reference on the physical memory that is mapped at an address (`cuMemRetainAllocationHandle`); its handle.
    pub fn retain_at(&self, address: u64) -> Result<Physical, CuResult> {
        let _sheltered = cancel::shelter();
        let mut handle = Physical::from_raw(0);
        // SAFETY: the output is a local; the address is looked up and not followed.
        unsafe { (self.cuMemRetainAllocationHandle)(&raw mut handle, address as *mut c_void) }.ok()?;
        Ok(handle)
    }

    /// What physical memory was made with (`cuMemGetAllocationPropertiesFromHandle`).
    pub fn properties_of(&self, handle: Physical) -> Result<Properties, CuResult> {
        let _sheltered = cancel::shelter();
        let mut properties = Properties::of(Place::Gpu(0));
        // SAFETY: the output is a local, the C struct with numbers for enums.
        unsafe { (self.cuMemGetAllocationPropertiesFromHandle)(&raw mut properties, handle) }.ok()?;
        Ok(properties)
    }

    /// A descriptor of physical memory, for another process (`cuMemExportToShareableHandle`).
    pub fn export(&self, handle: Physical) -> Result<OwnedFd, CuResult> {
        let _sheltered = cancel::shelter();
        let mut descriptor: c_int = -1;
        // SAFETY: the output is of the type that this kind of handle has; the driver knows its handles.
        unsafe { (self.cuMemExportToShareableHandle)((&raw mut descriptor).cast(), handle, Properties::POSIX_FD, 0) }
            .ok()?;
        // SAFETY: the descriptor is new, and nobody else closes it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// The physical memory behind another process's descriptor (`cuMemImportFromShareableHandle`); its handle, which has one
    /// reference. The driver keeps what it needs of the descriptor.
    pub fn import(&self, descriptor: &OwnedFd) -> Result<Physical, CuResult> {
        let _sheltered = cancel::shelter();
        let mut handle = Physical::from_raw(0);
        let shared = descriptor.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the output is a local; the descriptor is open, and the driver finds out what it is of.
        unsafe { (self.cuMemImportFromShareableHandle)(&raw mut handle, shared, Properties::POSIX_FD) }.ok()?;
        Ok(handle)
    }

    /// Frees memory of `cuMemAlloc` or `cuMemAllocManaged` (`cuMemFree`). Waits for the context that owns it.
    pub fn free(&self, address: u64) -> CuResult {
        let _sheltered = cancel::shelter();
        // SAFETY: any address may be freed; the driver refuses what is nobody's.
        unsafe { (self.cuMemFree_v2)(address) }
    }

    /// Copies memory that the current context can reach, in the order of a stream (`cuMemcpyDtoDAsync`). An address that this context
    /// cannot reach is an error that it does not survive.
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn copy_in(&self, stream: Stream, to: u64, from: u64, bytes: u64) -> CuResult {
        // SAFETY: the driver checks both ranges; the caller vouches for the stream.
        unsafe { (self.cuMemcpyDtoDAsync_v2)(to, from, bytes as usize, stream) }
    }

    /// Copies device memory to the processor's (`cuMemcpyDtoHAsync`), in the order of a stream of the current context.
    ///
    /// # Safety
    /// The stream lives. `to` is pinned and has room for `bytes`, and nobody looks at it before the stream has come to this copy.
    pub unsafe fn copy_to_host(&self, stream: Stream, to: *mut u8, from: u64, bytes: u64) -> CuResult {
        // SAFETY: the driver checks the range on the device; the caller vouches for the stream and for what lies on the host.
        unsafe { (self.cuMemcpyDtoHAsync_v2)(to.cast(), from, bytes as usize, stream) }
    }

    /// Copies the processor's memory to the device (`cuMemcpyHtoDAsync`), in the order of a stream of the current context.
    ///
    /// # Safety
    /// The stream lives. `from` is pinned and has `bytes`, and nobody writes to them before the stream has come to this copy.
    pub unsafe fn copy_to_device(&self, stream: Stream, to: u64, from: *const u8, bytes: u64) -> CuResult {
        // SAFETY: the driver checks the range on the device; the caller vouches for the stream and for what lies on the host.
        unsafe { (self.cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes as usize, stream) }
    }

    /// Managed memory that every GPU may use (`cuMemAllocManaged`).
    pub fn allocate_managed(&self, bytes: u64) -> Result<u64, CuResult> {
        let _sheltered = cancel::shelter();
        let mut address = 0;
        // SAFETY: the output is a local.
        unsafe { (self.cuMemAllocManaged)(&raw mut address, bytes as usize, ATTACH_GLOBAL) }.ok()?;
        Ok(address)
    }

    /// Gives advice, a number of `CUmem_advise`, on managed memory (`cuMemAdvise_v2`, or `cuMemAdvise` where the driver is
    /// older). Invalidates a capture.
    pub fn advise(&self, address: u64, bytes: u64, advice: c_int, place: Place) -> CuResult {
        let _sheltered = cancel::shelter();
        match self.cuMemAdvise_v2 {
            // SAFETY: the call takes numbers only, and the driver checks range and location.
            Some(call) => unsafe { call(address, bytes as usize, advice, Location::of(place)) },
            // SAFETY: the call takes numbers only, and the driver checks range and device.
            None => unsafe { (self.cuMemAdvise)(address, bytes as usize, advice, device(place)) },
        }
    }

    /// Moves managed memory to a place, in the order of a stream of the current context (`cuMemPrefetchAsync_v2`, or
    /// `cuMemPrefetchAsync`). Invalidates a capture.
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn prefetch(&self, address: u64, bytes: u64, place: Place, stream: Stream) -> CuResult {
        match self.cuMemPrefetchAsync_v2 {
            // SAFETY: the driver checks range and location; the caller vouches for the stream.
            Some(call) => unsafe { call(address, bytes as usize, Location::of(place), 0, stream) },
            // SAFETY: the driver checks range and device; the caller vouches for the stream.
            None => unsafe { (self.cuMemPrefetchAsync)(address, bytes as usize, device(place), stream) },
        }
    }

    /// Pinned host memory of the current context (`cuMemHostAlloc`), with the flags of `CU_MEMHOSTALLOC_*`.
    pub fn pin(&self, bytes: u64, flags: c_uint) -> Result<u64, CuResult> {
        let _sheltered = cancel::shelter();
        let mut address = std::ptr::null_mut();
        // SAFETY: the output is a local.
        unsafe { (self.cuMemHostAlloc)(&raw mut address, bytes as usize, flags) }.ok()?;
        Ok(address as u64)
    }

    /// Gives pinned host memory back (`cuMemFreeHost`). Waits for the context that owns it.
    ///
    /// # Safety
    /// [`pin`](Self::pin) gave this address, and nobody uses the memory any more: it is unmapped from the process.
    pub unsafe fn unpin(&self, address: u64) -> CuResult {
        let _sheltered = cancel::shelter();
        // SAFETY: the caller vouches for the memory.
        unsafe { (self.cuMemFreeHost)(address as *mut c_void) }
    }

    /// Pins memory of the process, for the current context (`cuMemHostRegister`).
    pub fn register(&self, address: u64, bytes: u64) -> CuResult {
        let _sheltered = cancel::shelter();
        // SAFETY: the driver checks that there is memory, and only pins it.
        unsafe { (self.cuMemHostRegister_v2)(address as *mut c_void, bytes as usize, 0) }
    }

    /// Undoes that (`cuMemHostUnregister`): it waits for work that uses the memory.
    pub fn unregister(&self, address: u64) -> CuResult {
        let _sheltered = cancel::shelter();
        // SAFETY: the driver refuses an address that was not registered.
        unsafe { (self.cuMemHostUnregister)(address as *mut c_void) }
    }
}
