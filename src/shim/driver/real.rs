//! The driver's own functions behind the rows of the table, and where its code lies in memory.
//!
//! Used on the `dlsym` path: no allocation, no lock, no `std` beyond atomics. Threads that race fill the same values.

use crate::hook::{HOOKS, Row, dlsym};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// The driver's library, by the name that every CUDA program uses.
const DRIVER: &std::ffi::CStr = c"libcuda.so.1";

static REAL: [AtomicPtr<c_void>; Row::COUNT] = [const { AtomicPtr::new(std::ptr::null_mut()) }; Row::COUNT];
static FILLED: AtomicBool = AtomicBool::new(false);

/// Code of the driver and of this library: `[first, last)` each, empty until known.
static DRIVER_CODE: Range = Range::empty();
static SHIM_CODE: Range = Range::empty();

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

/// The driver's function for this row; `None` where the driver has none, or where there is no driver.
#[inline]
pub fn get(row: Row) -> Option<*mut c_void> {
    let known = REAL[row as usize].load(Ordering::Acquire);
    if !known.is_null() {
        return Some(known);
    }
    get_cold(row)
}

#[cold]
fn get_cold(row: Row) -> Option<*mut c_void> {
    if !FILLED.load(Ordering::Acquire) && !fill(libc::RTLD_NOW) {
        return None;
    }
    let known = REAL[row as usize].load(Ordering::Acquire);
    (!known.is_null()).then_some(known)
}

/// The row whose real function is at `pointer`.
pub fn row_of(pointer: *mut c_void) -> Option<usize> {
    // The driver has no such function; nor has it, perhaps, that of a row, whose slot is null then.
    if pointer.is_null() {
        return None;
    }
    if !FILLED.load(Ordering::Acquire) {
        let filled = fill(libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        // The program's own lookup succeeded, so `dlerror` must say nothing of the ones we made.
        // SAFETY: dlerror has no preconditions; it clears this thread's pending message.
        unsafe { libc::dlerror() };
        if !filled {
            return None;
        }
    }
    REAL.iter().position(|slot| std::ptr::eq(slot.load(Ordering::Acquire), pointer))
}

/// An export of the loaded driver that has no row.
pub fn export(name: &std::ffi::CStr) -> Option<*mut c_void> {
    // SAFETY: the name is NUL-terminated; RTLD_NOLOAD only looks.
    let handle = unsafe { libc::dlopen(DRIVER.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return None;
    }
    let found = dlsym::lookup(handle, name);
    (!found.is_null()).then_some(found)
}

/// Whether this process has a driver library loaded, without loading it.
pub fn driver_is_loaded() -> bool {
    // SAFETY: the name is NUL-terminated; RTLD_NOLOAD only looks.
    let handle = unsafe { libc::dlopen(DRIVER.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return false;
    }
    // SAFETY: `handle` came from dlopen just now; closing it drops only the reference taken there.
    unsafe { libc::dlclose(handle) };
    true
}

/// Whether a return address lies in the driver or in this library: their own lookups get the real functions. (The
/// driver looks itself up while it starts; answering with hooks would make it call us where the program did not.)
pub fn inside_driver_or_shim(caller: *const c_void) -> bool {
    if SHIM_CODE.last.load(Ordering::Acquire) == 0 {
        locate(inside_driver_or_shim as *const c_void, &SHIM_CODE);
    }
    let caller = caller as usize;
    SHIM_CODE.contains(caller) || DRIVER_CODE.contains(caller)
}

/// Looks every row up in the driver. The reference that `dlopen` takes is kept for the life of the process: the
/// addresses are used until then.
fn fill(mode: i32) -> bool {
    // SAFETY: the name is NUL-terminated.
    let handle = unsafe { libc::dlopen(DRIVER.as_ptr(), mode) };
    if handle.is_null() {
        return false;
    }
    let mut any = std::ptr::null_mut();
    for (slot, hook) in REAL.iter().zip(&HOOKS) {
        let found = dlsym::lookup(handle, hook.name);
        if !found.is_null() && !std::ptr::eq(found, hook.ours) {
            slot.store(found, Ordering::Release);
            any = found;
        }
    }
    if any.is_null() {
        return false;
    }
    locate(any, &DRIVER_CODE);
    FILLED.store(true, Ordering::Release);
    true
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
