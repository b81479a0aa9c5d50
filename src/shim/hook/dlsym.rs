//! `dlsym`, the way in for nearly every CUDA library.
//!
//! glibc takes the return address of `dlsym` for its caller when it resolves `RTLD_NEXT` and `RTLD_DEFAULT`, so a hook
//! written as an ordinary function would send another preloaded library's `RTLD_NEXT` back to that library. This one is
//! naked: it asks [`pick`] and then jumps to glibc's with the caller's frame and arguments intact, as if it were not
//! there. Only names that start like a driver function are looked at; everything on this path is free of allocation,
//! locks and `std`, since memory allocators call `dlsym` while they start.
//!
//! Hooking `dlopen` as well was rejected: its RUNPATH search depends on the caller in the same way.

use super::{HOOKS, resolve};
use crate::driver::real;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

#[cfg(not(target_arch = "x86_64"))]
compile_error!("gpupool hooks dlsym in x86-64 assembly; this target needs its own version of hook/dlsym.rs");

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
pub fn lookup(handle: *mut c_void, name: &CStr) -> *mut c_void {
    let function = glibc();
    if function.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: `glibc` returns dlsym of the C library or null, which was just excluded.
    let function: Dlsym = unsafe { std::mem::transmute(function) };
    // SAFETY: the name is NUL-terminated; the handle is the program's own, or one that this library opened.
    unsafe { function(handle, name.as_ptr()) }
}

/// The C library's function behind one of the same name that this library exports.
pub fn next(slot: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let known = slot.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    let found = lookup(libc::RTLD_NEXT, name);
    slot.store(found, Ordering::Release);
    found
}

/// Whether programs get another `dlsym` than the C library's: ours, or that of a library which was preloaded before it.
/// Where a program has only opened this one, the C library comes first in the search order.
pub fn is_interposed() -> bool {
    !std::ptr::eq(lookup(libc::RTLD_DEFAULT, c"dlsym"), glibc())
}

/// What the naked `dlsym` does next, in the two registers of a 16-byte C struct.
#[repr(C)]
struct Verdict {
    /// The answer, where `jump` is null.
    answer: *mut c_void,
    /// Where to go on with the caller's arguments, or null.
    jump: *mut c_void,
}

/// `handle`, `name` and return address of a call to `dlsym`; see the module's text.
unsafe extern "C" fn pick(handle: *mut c_void, name: *const c_char, caller: *const c_void) -> Verdict {
    let pass = Verdict { answer: std::ptr::null_mut(), jump: glibc() };
    if handle == libc::RTLD_NEXT || name.is_null() {
        return pass;
    }
    // SAFETY: `name` is not NULL, and `dlsym` demands a NUL-terminated string.
    let name = unsafe { CStr::from_ptr(name) };
    let [b'c', b'u', b'A'..=b'Z', ..] = name.to_bytes() else { return pass };
    if real::inside_driver_or_shim(caller) {
        return pass;
    }
    let Some(row) = HOOKS.iter().position(|hook| hook.name == name) else {
        return pass;
    };
    if handle == libc::RTLD_DEFAULT {
        // This library exports the name, so glibc would find it even where the program has no CUDA at all; a program
        // that asks whether CUDA is there must hear what it would hear without us.
        return if real::driver_is_loaded() || !lookup(libc::RTLD_NEXT, name).is_null() { pass } else { absent() };
    }
    let found = lookup(handle, name);
    if found.is_null() {
        return pass;
    }
    if std::ptr::eq(found, HOOKS[row].ours) {
        // A handle on the global scope (`dlopen(NULL)`), where this library comes first.
        return if real::driver_is_loaded() || !lookup(libc::RTLD_NEXT, name).is_null() { pass } else { absent() };
    }
    Verdict { answer: resolve::hook_for(found), jump: std::ptr::null_mut() }
}

/// NULL, with `dlerror` set by the lookup that has just failed.
fn absent() -> Verdict {
    Verdict { answer: std::ptr::null_mut(), jump: std::ptr::null_mut() }
}

/// `dlsym(3)`.
///
/// # Safety
/// As the C library's.
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code, reason = "exported only from the library"))]
pub unsafe extern "C" fn dlsym(_handle: *mut c_void, _name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
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
        pick = sym pick,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The verdict for a caller outside this library, in a process without a driver.
    fn verdict(handle: *mut c_void, name: &CStr) -> Verdict {
        // SAFETY: the name is NUL-terminated; address 1 is nobody's code.
        unsafe { pick(handle, name.as_ptr(), std::ptr::without_provenance(1)) }
    }

    #[test]
    fn other_names_and_rtld_next_go_on_to_the_c_library() {
        for name in [c"getpid", c"cudnnCreate", c"cuda", c"cu", c"", c"cuNoSuchFunction"] {
            assert_eq!(verdict(libc::RTLD_DEFAULT, name).jump, glibc(), "{name:?}");
        }
        assert_eq!(verdict(libc::RTLD_NEXT, c"cuInit").jump, glibc());
        // SAFETY: a NULL name is passed over before it is read.
        assert_eq!(unsafe { pick(libc::RTLD_DEFAULT, std::ptr::null(), std::ptr::null()) }.jump, glibc());
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
        let own = unsafe { pick(libc::RTLD_DEFAULT, c"cuInit".as_ptr(), verdict as *const c_void) };
        assert_eq!(own.jump, glibc());
    }
}
