//! Where the code of the driver and of this library lies in memory.
//!
//! The driver and this library look driver functions up for themselves, and get the real ones: the driver looks itself up
//! while it starts, and would call us where the program did not if it were answered with hooks.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Empty until known.
static DRIVER: Range = Range::empty();
/// Empty until known.
static OURS: Range = Range::empty();

/// Addresses from `first` up to `last`, which is outside.
struct Range {
    first: AtomicUsize,
    last: AtomicUsize,
}

impl Range {
    const fn empty() -> Self {
        Self { first: AtomicUsize::new(0), last: AtomicUsize::new(0) }
    }

    fn set(&self, first: usize, last: usize) {
        self.first.store(first, Ordering::Relaxed);
        self.last.store(last, Ordering::Release);
    }

    fn contains(&self, address: usize) -> bool {
        address < self.last.load(Ordering::Acquire) && address >= self.first.load(Ordering::Relaxed)
    }
}

/// Whether a return address lies in the driver or in the library that this crate is linked into.
pub fn is_driver_or_ours(caller: *const c_void) -> bool {
    if OURS.last.load(Ordering::Acquire) == 0 {
        locate(is_driver_or_ours as *const c_void, &OURS);
    }
    let caller = caller as usize;
    OURS.contains(caller) || DRIVER.contains(caller)
}

/// Whether this address lies in the driver, as far as that is known.
pub(crate) fn is_drivers(address: *const c_void) -> bool {
    DRIVER.contains(address as usize)
}

/// Notes the library that `function`, one of the driver's, lies in.
pub(crate) fn driver_is_at(function: *const c_void) {
    locate(function, &DRIVER);
}

/// Finds the loaded object that `address` lies in and stores its extent.
fn locate(address: *const c_void, range: &Range) {
    struct Search<'a> {
        address: usize,
        range: &'a Range,
    }
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, data: *mut c_void) -> i32 {
        // SAFETY: dl_iterate_phdr passes a valid description, and `data` is the Search below.
        let (info, search) = unsafe { (&*info, &*data.cast::<Search>()) };
        let (mut first, mut last) = (usize::MAX, 0);
        for index in 0..usize::from(info.dlpi_phnum) {
            // SAFETY: `dlpi_phdr` points to `dlpi_phnum` headers.
            let header = unsafe { &*info.dlpi_phdr.add(index) };
            if header.p_type == libc::PT_LOAD {
                let start = (info.dlpi_addr as usize).wrapping_add(header.p_vaddr as usize);
                first = first.min(start);
                last = last.max(start.wrapping_add(header.p_memsz as usize));
            }
        }
        if (first..last).contains(&search.address) {
            search.range.set(first, last);
            return 1;
        }
        0
    }
    let mut search = Search { address: address as usize, range };
    // SAFETY: `visit` matches the callback's signature and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
}
