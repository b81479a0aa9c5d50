//! The driver's own functions behind the hooks.
//!
//! Used on the `dlsym` path: no allocation, no lock, no `std` beyond atomics. Threads that race fill the same values.
//!
//! From a pointer that the driver gave to the hook of the same export: the driver exports no two `cu*` names at one address,
//! and `cuGetProcAddress` hands out exactly those addresses, so the pointer says which version was chosen. Matching names
//! instead would need the driver's own rules for versions, flags and aliases, and would be wrong again with the next
//! release.

use crate::code;
use crate::dlsym::{self, Verdict};
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// The driver's library, by the name that every CUDA program uses.
const DRIVER: &CStr = c"libcuda.so.1";

/// A hook, as programs find it.
pub struct Hook {
    /// The exported name.
    pub name: &'static CStr,
    /// What is exported under that name.
    pub ours: *const c_void,
}

// SAFETY: both fields are addresses of immutable statics and code.
unsafe impl Sync for Hook {}

/// What is looked at of the driver's functions that have no hook.
pub struct Unhooked {
    /// Whether a function of this name is of no interest.
    pub is_known: fn(&[u8]) -> bool,
    /// The program has another one, of this name. Allocates nothing and takes no lock.
    pub found: fn(&[u8]),
}

/// The hooks of a library and, once there is a driver, the real function behind each.
pub struct Slots<const N: usize> {
    hooks: &'static [Hook; N],
    unhooked: Unhooked,
    real: [AtomicPtr<c_void>; N],
    filled: AtomicBool,
}

impl<const N: usize> Slots<N> {
    /// Slots for these hooks, empty.
    pub const fn new(hooks: &'static [Hook; N], unhooked: Unhooked) -> Self {
        Self {
            hooks,
            unhooked,
            real: [const { AtomicPtr::new(std::ptr::null_mut()) }; N],
            filled: AtomicBool::new(false),
        }
    }

    /// The driver's function for the hook with this index, which is loaded if it was not. `None` where the driver has no such
    /// function, or where there is no driver.
    #[inline]
    pub fn get(&self, index: usize) -> Option<*mut c_void> {
        let known = self.real[index].load(Ordering::Acquire);
        if !known.is_null() {
            return Some(known);
        }
        self.get_cold(index)
    }

    #[cold]
    fn get_cold(&self, index: usize) -> Option<*mut c_void> {
        if !self.filled.load(Ordering::Acquire) && !self.fill(libc::RTLD_NOW) {
            return None;
        }
        let known = self.real[index].load(Ordering::Acquire);
        (!known.is_null()).then_some(known)
    }

    /// The hook for a pointer into the driver; any other pointer as it is.
    fn hook_for(&self, pointer: *mut c_void) -> Option<*mut c_void> {
        // All of them, whatever the log's level: launches, too, are made again when memory was found for them.
        self.index_of(pointer).map(|index| self.hooks[index].ours.cast_mut())
    }

    /// What the program gets where the driver gave it this pointer for a function of this name: the hook for it, or the pointer.
    pub fn given(&self, pointer: *mut c_void, name: &[u8]) -> *mut c_void {
        self.hook_for(pointer).unwrap_or_else(|| {
            if !pointer.is_null() && !(self.unhooked.is_known)(name) {
                (self.unhooked.found)(name);
            }
            pointer
        })
    }

    /// The hook whose real function is at `pointer`.
    fn index_of(&self, pointer: *mut c_void) -> Option<usize> {
        // The driver has no such function; nor has it, perhaps, that of a hook, whose slot is null then.
        if pointer.is_null() {
            return None;
        }
        if !self.is_filled() {
            return None;
        }
        self.real.iter().position(|slot| std::ptr::eq(slot.load(Ordering::Acquire), pointer))
    }

    /// Whether the driver's functions are known, which are looked up now if its library is loaded.
    fn is_filled(&self) -> bool {
        self.filled.load(Ordering::Acquire) || {
            let filled = self.fill(libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            // The program's own lookup succeeded, so `dlerror` must say nothing of the ones we made.
            // SAFETY: dlerror has no preconditions; it clears this thread's pending message.
            unsafe { libc::dlerror() };
            filled
        }
    }

    /// The program looks up a name of the driver's kind that has no hook.
    ///
    /// # Safety
    /// As for [`pick`](Self::pick).
    unsafe fn passed(&self, handle: *mut c_void, name: &CStr) {
        if (self.unhooked.is_known)(name.to_bytes()) {
            return;
        }
        // SAFETY: the handle is the program's own argument.
        let found = unsafe { dlsym::lookup(handle, name) };
        // Other libraries have names of that kind, too (`cuFileRead`).
        if !found.is_null() && self.is_filled() && code::is_drivers(found) {
            (self.unhooked.found)(name.to_bytes());
        }
    }

    /// What the exported `dlsym` answers to `handle` and `name`, asked from the return address `caller`.
    ///
    /// # Safety
    /// As the C library demands: `name` is NULL or NUL-terminated, and the handle came from `dlopen` or stands for a search
    /// order.
    pub unsafe fn pick(&self, handle: *mut c_void, name: *const c_char, caller: *const c_void) -> Verdict {
        if handle == libc::RTLD_NEXT || name.is_null() {
            return Verdict::pass();
        }
        // SAFETY: `name` is not NULL, and the caller vouches for its end.
        let name = unsafe { CStr::from_ptr(name) };
        let [b'c', b'u', b'A'..=b'Z', ..] = name.to_bytes() else { return Verdict::pass() };
        if code::is_driver_or_ours(caller) {
            return Verdict::pass();
        }
        let Some(hook) = self.hooks.iter().find(|hook| hook.name == name) else {
            // SAFETY: the arguments are this call's.
            unsafe { self.passed(handle, name) };
            return Verdict::pass();
        };
        // This library exports the name, so glibc would find it even where the program has no CUDA at all; a program
        // that asks whether CUDA is there must hear what it would hear without us.
        let in_scope = || match driver_is_loaded() || !dlsym::behind_us(name).is_null() {
            true => Verdict::pass(),
            false => Verdict::absent(),
        };
        if handle == libc::RTLD_DEFAULT {
            return in_scope();
        }
        // SAFETY: the handle is the program's own argument.
        let found = unsafe { dlsym::lookup(handle, name) };
        if found.is_null() {
            return Verdict::pass();
        }
        if std::ptr::eq(found, hook.ours) {
            // A handle on the global scope (`dlopen(NULL)`), where this library comes first.
            return in_scope();
        }
        Verdict::answer(self.hook_for(found).unwrap_or(found))
    }

    /// Looks every hook's function up in the driver. The reference that `dlopen` takes is kept for the life of the process:
    /// the addresses are used until then.
    fn fill(&self, mode: i32) -> bool {
        // SAFETY: the name is NUL-terminated; loading libcuda runs its constructors, as the program's own use would.
        let handle = unsafe { libc::dlopen(DRIVER.as_ptr(), mode) };
        if handle.is_null() {
            return false;
        }
        let mut any = std::ptr::null_mut();
        for (slot, hook) in self.real.iter().zip(self.hooks) {
            // SAFETY: the handle was opened above.
            let found = unsafe { dlsym::lookup(handle, hook.name) };
            if !found.is_null() && !std::ptr::eq(found, hook.ours) {
                slot.store(found, Ordering::Release);
                any = found;
            }
        }
        if any.is_null() {
            return false;
        }
        code::driver_is_at(any);
        self.filled.store(true, Ordering::Release);
        true
    }
}

/// Whether this process has a driver library loaded, without loading it.
fn driver_is_loaded() -> bool {
    // SAFETY: the name is NUL-terminated; RTLD_NOLOAD only looks.
    let handle = unsafe { libc::dlopen(DRIVER.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return false;
    }
    // SAFETY: `handle` came from dlopen just now; closing it drops only the reference taken there.
    unsafe { libc::dlclose(handle) };
    true
}
