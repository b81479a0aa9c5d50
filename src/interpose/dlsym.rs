//! `dlsym`, the way in for nearly every CUDA library.
//!
//! glibc takes the return address of `dlsym` for its caller when it resolves `RTLD_NEXT` and `RTLD_DEFAULT`, so a hook
//! written as an ordinary function would send another preloaded library's `RTLD_NEXT` back to that library. This one is
//! naked: it asks [`Slots::pick`](crate::Slots::pick) and then jumps to glibc's with the caller's frame and arguments intact, as if it were not
//! there. Only names that start like a driver function are looked at; everything on this path is free of allocation,
//! locks and `std`, since memory allocators call `dlsym` while they start.
//!
//! The exported function itself is made by [`export_dlsym`](crate::export_dlsym) in the library that has the hooks: in this
//! crate it would be exported from every program that is linked with it.
//!
//! `dlvsym` is not hooked: glibc finds nothing by it that has no version, in a library which needs versions of others, whatever version is
//! asked for, and the driver's exports have none.
//!
//! Hooking `dlopen` as well was rejected: its RUNPATH search depends on the caller in the same way.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

#[cfg(not(target_arch = "x86_64"))]
compile_error!("gpupool hooks dlsym in x86-64 assembly; this target needs its own version of src/interpose/dlsym.rs");

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// glibc's `dlsym`, once found.
static GLIBC: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Finds glibc's `dlsym` past our own. Threads that race find the same; waiting for one another could deadlock on the
/// loader's lock.
fn glibc() -> *mut c_void {
    let known = GLIBC.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    for version in [c"GLIBC_2.34", c"GLIBC_2.2.5"] {
        // SAFETY: both strings are NUL-terminated, and RTLD_NEXT is meant for a library that interposes, as this one.
        let found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        if !found.is_null() {
            GLIBC.store(found, Ordering::Release);
            return found;
        }
    }
    std::ptr::null_mut()
}

/// glibc's answer to `dlsym(handle, name)` asked from inside this library.
///
/// # Safety
/// The handle came from `dlopen`, or is one of the two that stand for a search order.
pub unsafe fn lookup(handle: *mut c_void, name: &CStr) -> *mut c_void {
    let function = glibc();
    if function.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: `glibc` returns dlsym of the C library or null, which was just excluded.
    let function: Dlsym = unsafe { std::mem::transmute(function) };
    // SAFETY: the name is NUL-terminated, and the caller vouches for the handle.
    unsafe { function(handle, name.as_ptr()) }
}

/// The C library's function behind one of the same name that this library exports.
pub fn next(slot: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let known = slot.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    let found = behind_us(name);
    slot.store(found, Ordering::Release);
    found
}

/// The function of this name in a library behind this one in the search order, or null.
pub fn behind_us(name: &CStr) -> *mut c_void {
    // SAFETY: RTLD_NEXT stands for a search order.
    unsafe { lookup(libc::RTLD_NEXT, name) }
}

/// Whether programs get another `dlsym` than the C library's: ours, or that of a library which was preloaded before it.
/// Where a program has only opened this one, the C library comes first in the search order.
pub fn is_interposed() -> bool {
    // SAFETY: RTLD_DEFAULT stands for a search order.
    let first = unsafe { lookup(libc::RTLD_DEFAULT, c"dlsym") };
    !std::ptr::eq(first, glibc())
}

/// What the naked `dlsym` does next, in the two registers of a 16-byte C struct.
#[repr(C)]
pub struct Verdict {
    /// The answer, where `jump` is null.
    answer: *mut c_void,
    /// Where to go on with the caller's arguments, or null.
    jump: *mut c_void,
}

impl Verdict {
    /// The C library answers.
    pub(crate) fn pass() -> Self {
        Self { answer: std::ptr::null_mut(), jump: glibc() }
    }

    pub(crate) fn answer(answer: *mut c_void) -> Self {
        Self { answer, jump: std::ptr::null_mut() }
    }

    /// NULL, with `dlerror` set by the lookup that has just failed.
    pub(crate) fn absent() -> Self {
        Self::answer(std::ptr::null_mut())
    }
}

/// Exports `dlsym(3)` from a library: asks `$pick`, an `unsafe extern "C" fn(handle, name, caller) -> Verdict`, and then
/// answers or jumps to the C library's function.
#[macro_export]
macro_rules! export_dlsym {
    ($pick:path) => {
        /// `dlsym(3)`.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(naked)]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[cfg_attr(test, allow(dead_code, reason = "exported only from the library"))]
        pub unsafe extern "C" fn dlsym(
            _handle: *mut ::std::ffi::c_void,
            _name: *const ::std::ffi::c_char,
        ) -> *mut ::std::ffi::c_void {
            ::std::arch::naked_asm!(
                "endbr64",
                "push rdi",
                "push rsi",
                "mov rdx, [rsp + 16]", // the caller's return address
                "sub rsp, 8",          // 16-byte alignment at the call
                "call {pick}",
                "add rsp, 8",
                "pop rsi",
                "pop rdi",
                "test rdx, rdx",
                "jz 2f",
                "jmp rdx",
                "2:",
                "ret",
                pick = sym $pick,
            )
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hook, Slots, Unhooked};

    static HOOKS: [Hook; 1] = [Hook { name: c"cuInit", ours: ours as *const c_void }];
    static SLOTS: Slots<1> = Slots::new(&HOOKS, Unhooked { is_known: |_| true, found: |_| {} });

    extern "C" fn ours() {}

    /// The verdict for a caller outside this library, in a process without a driver.
    fn verdict(handle: *mut c_void, name: &CStr) -> Verdict {
        // SAFETY: the name is NUL-terminated; address 1 is nobody's code.
        unsafe { SLOTS.pick(handle, name.as_ptr(), std::ptr::without_provenance(1)) }
    }

    #[test]
    fn other_names_and_rtld_next_go_on_to_the_c_library() {
        for name in [c"getpid", c"cudnnCreate", c"cuda", c"cu", c"", c"cuNoSuchFunction"] {
            assert_eq!(verdict(libc::RTLD_DEFAULT, name).jump, glibc(), "{name:?}");
        }
        assert_eq!(verdict(libc::RTLD_NEXT, c"cuInit").jump, glibc());
        // SAFETY: a NULL name is passed over before it is read.
        assert_eq!(unsafe { SLOTS.pick(libc::RTLD_DEFAULT, std::ptr::null(), std::ptr::null()) }.jump, glibc());
    }

    #[test]
    fn without_a_driver_our_own_export_is_not_mistaken_for_one() {
        let Verdict { answer, jump } = verdict(libc::RTLD_DEFAULT, c"cuInit");
        assert!(answer.is_null() && jump.is_null());
        // SAFETY: dlerror has no preconditions.
        assert!(!unsafe { libc::dlerror() }.is_null(), "a failed dlsym leaves a message");
    }

    #[test]
    fn this_library_and_the_driver_get_the_real_functions() {
        // SAFETY: the name is NUL-terminated.
        let own = unsafe { SLOTS.pick(libc::RTLD_DEFAULT, c"cuInit".as_ptr(), verdict as *const c_void) };
        assert_eq!(own.jump, glibc());
    }
}
