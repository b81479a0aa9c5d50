//! What the process told CUDA before it started, and what it changed too late: `CUDA_VISIBLE_DEVICES` and
//! `CUDA_DEVICE_ORDER` are read by `cuInit` and never again, and a child of `fork` cannot use its parent's CUDA.
//!
//! To name the line that set a variable, `setenv`, `putenv` and `unsetenv` are exported. They do what the C library's do;
//! before `cuInit`, and for any other name, they do nothing else.

use crate::guard;
use crate::watch::{context, finding, site};
use crate::{clock, log, own_memory, process};
use gpupool_events::{CudaInit, EnvironmentSet, Finding, Site};
use gpupool_interpose::dlsym;
use once_cell::race::OnceBox;
use parking_lot::Mutex;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// The variables that `cuInit` reads.
const WATCHED: [&str; 2] = ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"];

/// The state at the first `cuInit` that succeeded.
struct Initial {
    values: [Option<String>; 2],
    /// GPUs that the process saw then.
    gpus: Option<usize>,
    site: Site,
}

static INITIAL: OnceBox<Initial> = OnceBox::new();

fn values() -> [Option<String>; 2] {
    WATCHED.map(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
}

/// The values of the watched variables when nobody vouches any more for the memory that the environment lies in. `None` where that cannot be read
/// without the danger of a fault.
fn values_at_end() -> Option<[Option<String>; 2]> {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    /// More than a program has, less than would take long.
    const ENTRIES: usize = 1 << 14;
    // SAFETY: the C library's variable of this name is a pointer.
    let start = unsafe { std::ptr::read_volatile(&raw const environ) } as usize;
    let mut values = [None, None];
    if start == 0 {
        return Some(values);
    }
    for index in 0..ENTRIES {
        let mut pointer = [0; size_of::<usize>()];
        if read_own(start + index * pointer.len(), &mut pointer) < pointer.len() {
            return None;
        }
        let entry = usize::from_ne_bytes(pointer);
        if entry == 0 {
            return Some(values);
        }
        let mut text = [0; 512];
        let length = read_own(entry, &mut text);
        let text = &text[..length];
        let text = text.split(|byte| *byte == 0).next().unwrap_or(text);
        for (value, name) in values.iter_mut().zip(WATCHED) {
            let assigned = text.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="));
            if let Some(assigned) = assigned.filter(|_| value.is_none()) {
                *value = Some(String::from_utf8_lossy(assigned).into_owned());
            }
        }
    }
    None
}

/// Copies what can be read from an address of this process on; how many bytes.
fn read_own(address: usize, into: &mut [u8]) -> usize {
    /// What is behind the end of a mapping must not keep the bytes before it from being read.
    const PAGE: usize = 4096;
    let mut done = 0;
    while done < into.len() {
        let from = address + done;
        let bytes = (PAGE - from % PAGE).min(into.len() - done);
        if !own_memory::read(from as u64, &mut into[done..done + bytes]) {
            break;
        }
        done += bytes;
    }
    done
}

/// `cuInit` succeeded.
pub fn initialised(call: &'static str) {
    if INITIAL.get().is_some() {
        return;
    }
    if let Some(driver) = context::driver() {
        context::remember(driver);
    }
    let gpus = context::driver().map(|driver| driver.device_count());
    let gpus = gpus.and_then(|gpus| usize::try_from(gpus).ok());
    let initial = Initial { values: values(), gpus, site: site::here() };
    let [visible_devices, device_order] = &initial.values;
    log::emit(|| {
        let event = CudaInit {
            visible_devices: visible_devices.clone(),
            device_order: device_order.clone(),
            gpus: gpus.and_then(|gpus| u32::try_from(gpus).ok()),
            call: call.to_owned(),
            caller: site::caller(&initial.site).map(str::to_owned),
            thread: site::thread_name(),
            seconds: clock::uptime(),
            site: Some(initial.site.clone()),
        };
        (event, format!("CUDA initialised by {}", site::line(&initial.site)))
    });
    process::cuda_read(initial.values[0].clone());
    let _ = INITIAL.set(Box::new(initial));
}

/// Whether two values of a watched variable mean the same to CUDA, in a process that sees `gpus` with the first of them.
fn mean_the_same(index: usize, then: Option<&str>, now: Option<&str>, gpus: Option<usize>) -> bool {
    if then == now {
        return true;
    }
    if WATCHED[index] == "CUDA_DEVICE_ORDER" {
        const DEFAULT: &str = "FASTEST_FIRST";
        return then.unwrap_or(DEFAULT).trim() == now.unwrap_or(DEFAULT).trim();
    }
    let numbers =
        |list: &str| list.split(',').map(|item| item.trim().parse::<usize>().ok()).collect::<Option<Vec<_>>>();
    let Some(mut now) = now.and_then(numbers) else { return false };
    match then {
        Some(then) => numbers(then) == Some(now),
        // All that there are, in their order. The first number that is no GPU's ends a list.
        None => gpus.is_some_and(|gpus| {
            now.truncate(now.iter().take_while(|gpu| **gpu < gpus).count());
            now.into_iter().eq(0..gpus)
        }),
    }
}

/// The last change of a watched variable that was seen.
#[derive(Clone)]
struct Change {
    value: Option<String>,
    site: Site,
}

/// By the variable's index.
static CHANGES: Mutex<[Option<Change>; 2]> = Mutex::new([None, None]);

/// A watched variable may have another value than before; `call` was made to change it.
fn look(call: &str) {
    let Some(initial) = INITIAL.get() else { return };
    for (index, (then, now)) in initial.values.iter().zip(values()).enumerate() {
        let before = CHANGES.lock()[index].as_ref().map_or_else(|| then.clone(), |change| change.value.clone());
        if before == now {
            continue;
        }
        let site = site::here();
        log::emit(|| {
            let name = WATCHED[index];
            let event = EnvironmentSet {
                name: name.to_owned(),
                value: now.clone(),
                call: call.to_owned(),
                site: Some(site.clone()),
            };
            (event, format!("{name} changed by {}", site::line(&site)))
        });
        CHANGES.lock()[index] = Some(Change { value: now, site });
    }
}

/// At the end of the process: what was not set back to what CUDA read. Not at the change itself: a program that sets a
/// variable for the processes that it starts, and takes it back, has done nothing wrong; nor has one that uses no GPU itself,
/// and only starts those that do. The environment is not read again
/// here by `getenv`: an entry may lie in memory that is gone by now, or another thread may be changing it.
pub fn judge() {
    judge_forks();
    let Some(initial) = INITIAL.get().filter(|_| context::was_any()) else { return };
    let changes = CHANGES.lock().clone();
    let Some(values) = values_at_end() else { return };
    for (index, (then, now)) in initial.values.iter().zip(values).enumerate() {
        if mean_the_same(index, then.as_deref(), now.as_deref(), initial.gpus) {
            continue;
        }
        // A change that came past `setenv` has no place.
        let change = changes[index].as_ref().filter(|change| change.value == now);
        let site = change.map(|change| change.site.clone()).unwrap_or_default();
        let show = |value: &Option<String>| value.as_ref().map_or("unset".to_owned(), |value| format!("\"{value}\""));
        let (then, now, initialised_by) = (show(then), show(&now), site::line(&initial.site));
        let what = format!(
            "{} was {then} when CUDA was initialised by {initialised_by}, and is {now} now, which CUDA does not see",
            WATCHED[index]
        );
        let facts = [
            ("variable", WATCHED[index].to_owned()),
            ("value_then", then),
            ("value_now", now),
            ("initialised_by", initialised_by),
        ];
        finding::make(&Finding::ENVIRONMENT_TOO_LATE, None, &site, &facts, &what);
    }
}

/// Where the process forked last, for the child.
static FORKED_AT: Mutex<Option<Site>> = Mutex::new(None);

/// Lines that forked, of which children are counted by themselves; those of more lines are counted together.
const FORKING_LINES: usize = 64;
/// How many children called CUDA, by the line that forked them. The process and everything that it forked share this page, so that
/// a mistake in a pool of workers is told once and not by each of them.
static CHILDREN: AtomicPtr<[AtomicU32; FORKING_LINES]> = AtomicPtr::new(std::ptr::null_mut());
/// The lines, as the count of each is in [`CHILDREN`].
static LINES: Mutex<Vec<Site>> = Mutex::new(Vec::new());
/// The line of the last fork, in both.
static LINE: AtomicUsize = AtomicUsize::new(0);

fn children() -> Option<&'static [AtomicU32; FORKING_LINES]> {
    // SAFETY: NULL, or a mapping of that size that `share` made, which is zeros at first, never unmapped and only reached as
    // atomics.
    unsafe { CHILDREN.load(Ordering::Acquire).as_ref() }
}

/// Makes the page, if there is none yet. Without it each child speaks for itself.
fn share() {
    if children().is_some() {
        return;
    }
    let length = size_of::<[AtomicU32; FORKING_LINES]>();
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), length, access, kind, -1, 0) };
    if page == libc::MAP_FAILED {
        return;
    }
    let (unset, new) = (std::ptr::null_mut(), page.cast());
    if CHILDREN.compare_exchange(unset, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: the mapping that was just made, which nobody else knows of: another thread's is in use.
        unsafe { libc::munmap(page, length) };
    }
}

/// In the parent, before a fork of a process that uses CUDA.
pub fn before_fork() {
    if INITIAL.get().is_some() {
        let site = site::here();
        share();
        let mut lines = LINES.lock();
        let known = lines.iter().position(|line| *line == site);
        let line = known.unwrap_or_else(|| {
            if lines.len() < FORKING_LINES {
                lines.push(site.clone());
            }
            lines.len() - 1
        });
        drop(lines);
        LINE.store(line, Ordering::Relaxed);
        *FORKED_AT.lock() = Some(site);
    }
}

/// At the end of the process: how many of those that it forked called CUDA, where it was more than the one that said so.
fn judge_forks() {
    let Some(children) = children() else { return };
    let lines = LINES.lock().clone();
    for (line, count) in lines.iter().zip(children).map(|(line, count)| (line, count.load(Ordering::Relaxed))) {
        if count > 1 {
            let code = Finding::FORK_AFTER_INIT.code;
            tracing::warn!(target: "gpupool::finding", "{count} children forked by {} called CUDA ({code})", site::line(line));
        }
    }
}

/// In the child of such a fork: it calls CUDA, which will not work. The first child of each line says so.
pub fn used_after_fork(call: &str) {
    let count = children().and_then(|children| children.get(LINE.load(Ordering::Relaxed)));
    if count.is_some_and(|count| count.fetch_add(1, Ordering::Relaxed) > 0) {
        return;
    }
    // Another thread of the parent may have held the lock in the moment of the fork.
    let site = FORKED_AT.try_lock().and_then(|mut site| site.take()).unwrap_or_default();
    let what = format!(
        "this process was forked from one that had initialised CUDA, and calls {call}: the driver refuses every call here"
    );
    finding::make(&Finding::FORK_AFTER_INIT, None, &site, &[("call", call.to_owned())], &what);
}

/// After the C library changed a variable.
///
/// # Safety
/// `name` is NULL or starts a NUL-terminated string, `NAME` or `NAME=value`.
unsafe fn changed(name: *const c_char, call: &str) {
    if name.is_null() || INITIAL.get().is_none() || !process::is_open() {
        return;
    }
    // SAFETY: not NULL, and NUL-terminated.
    let text = unsafe { CStr::from_ptr(name) }.to_bytes();
    let name = text.split(|byte| *byte == b'=').next().unwrap_or(text);
    if !WATCHED.iter().any(|watched| watched.as_bytes() == name) {
        return;
    }
    let Some(_inside) = guard::enter_sheltered() else { return };
    let _ = std::panic::catch_unwind(|| look(call));
}

macro_rules! environment_functions {
    ($($name:ident($($p:ident: $t:ty),*);)*) => {
        $(
            /// The C library's function of this name, and a look at what it changed. Behind that look, its thread may be
            /// cancelled asynchronously, which unwinds this.
            ///
            /// # Safety
            /// As the C library's.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            #[cfg_attr(test, allow(dead_code, reason = "exported only from the library"))]
            pub unsafe extern "C-unwind" fn $name($($p: $t),*) -> c_int {
                static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
                let function = dlsym::next(&NEXT, c_name(concat!(stringify!($name), "\0")));
                if function.is_null() {
                    return -1;
                }
                // SAFETY: the C library's export of this name has this signature.
                let function: unsafe extern "C" fn($($t),*) -> c_int = unsafe { std::mem::transmute(function) };
                // SAFETY: the caller's own arguments.
                let result = unsafe { function($($p),*) };
                let (first, ..) = ($($p,)*);
                // SAFETY: the first argument of each of these functions is such a string.
                unsafe { changed(first, stringify!($name)) };
                result
            }
        )*
    };
}

const fn c_name(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("not a C string"),
    }
}

environment_functions! {
    setenv(name: *const c_char, value: *const c_char, overwrite: c_int);
    unsetenv(name: *const c_char);
    putenv(assignment: *mut c_char);
}
