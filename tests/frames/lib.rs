//! The shim's reader of Python frames as a library of its own, callable by ctypes and from C: it is tested in processes
//! of every CPython at hand, without a CUDA driver or hooks between.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::c_char;
use std::fmt::Write;
use std::hint::black_box;
use std::sync::Mutex;
use std::time::Instant;

use gpupool_python::{self as python, versions};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// Counts what this library allocates, by thread.
struct Counting;

// SAFETY: the system's allocator does all of it; the counter neither allocates nor panics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(pointer, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Copies what fits of `text` into the caller's `size` bytes, with a zero at the end, and returns the whole length.
///
/// # Safety
/// `size` bytes at `into` may be written.
unsafe fn give(text: &str, into: *mut c_char, size: usize) -> isize {
    let length = text.len().min(size.saturating_sub(1));
    if size != 0 {
        // SAFETY: the caller's; `length` is below `size`.
        unsafe {
            into.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), length);
            into.add(length).write(0);
        }
    }
    text.len().cast_signed()
}

fn lines(frames: &[python::Frame], truncated: bool) -> String {
    let mut text = String::new();
    for python::Frame { file, function, line } in frames {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{file}\t{function}\t{}", line.unwrap_or(0));
    }
    if truncated {
        text.push_str("…\n");
    }
    text
}

/// The frames of this thread, one a line: file, function, line, with tabs between and the innermost first; "…" at the end
/// of a truncated stack. Returns the length in bytes, or -1 where nothing is captured.
///
/// # Safety
/// `size` bytes at `into` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn frames_text(into: *mut c_char, size: usize) -> isize {
    let Some(stack) = python::capture() else { return -1 };
    // SAFETY: the caller's.
    unsafe { give(&lines(&stack.resolve(), stack.is_truncated()), into, size) }
}

/// As `frames_text`, in the form that goes to people.
///
/// # Safety
/// `size` bytes at `into` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn frames_shown(into: *mut c_char, size: usize) -> isize {
    let Some(stack) = python::capture() else { return -1 };
    let shown: Vec<String> = stack.resolve().iter().map(ToString::to_string).collect();
    // SAFETY: the caller's.
    unsafe { give(&shown.join("\n"), into, size) }
}

/// How many frames are captured, without making text; -1 where nothing is.
#[unsafe(no_mangle)]
pub extern "C" fn frames_count() -> isize {
    python::capture().map_or(-1, |stack| stack.depth().cast_signed())
}

/// As `frames_count`, from a thread that Python knows nothing of.
#[unsafe(no_mangle)]
pub extern "C" fn frames_count_on_new_thread() -> isize {
    std::thread::spawn(|| frames_count()).join().unwrap_or(-2)
}

/// How often a thousand captures allocate.
#[unsafe(no_mangle)]
pub extern "C" fn frames_allocations() -> isize {
    let before = ALLOCATIONS.get();
    (0..1000).for_each(|_| {
        black_box(python::capture());
    });
    (ALLOCATIONS.get() - before).cast_signed()
}

/// What `gpupool doctor` will show of this process.
///
/// # Safety
/// `size` bytes at `into` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn frames_state(into: *mut c_char, size: usize) -> isize {
    // SAFETY: the caller's.
    unsafe { give(&python::state().to_string(), into, size) }
}

/// The versions that can be read, as "3.10 compiled-in, 3.11 …".
///
/// # Safety
/// `size` bytes at `into` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn frames_understood(into: *mut c_char, size: usize) -> isize {
    let words = versions::UNDERSTOOD.map(|versions::Understood { minor, offsets }| match offsets {
        versions::Offsets::CompiledIn => format!("3.{minor} compiled-in"),
        versions::Offsets::Published => format!("3.{minor} published"),
    });
    // SAFETY: the caller's.
    unsafe { give(&words.join(", "), into, size) }
}

static KEPT: Mutex<Option<python::Stack>> = Mutex::new(None);

/// Keeps the stack of this call past its end, as no hook may.
#[unsafe(no_mangle)]
pub extern "C" fn frames_keep() -> isize {
    let stack = python::capture();
    let length = stack.as_ref().map_or(-1, |stack| stack.depth().cast_signed());
    *KEPT.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = stack;
    length
}

/// How many frames of the kept stack become text now; -1 if none is kept.
#[unsafe(no_mangle)]
pub extern "C" fn frames_resolve_kept() -> isize {
    let kept = KEPT.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    kept.as_ref().map_or(-1, |stack| stack.resolve().len().cast_signed())
}

/// Nanoseconds a capture takes, the mean of `rounds`.
#[unsafe(no_mangle)]
pub extern "C" fn frames_time_raw(rounds: u32) -> f64 {
    time(rounds, || {
        black_box(python::capture());
    })
}

/// Nanoseconds a capture with text takes, the mean of `rounds`.
#[unsafe(no_mangle)]
pub extern "C" fn frames_time_text(rounds: u32) -> f64 {
    time(rounds, || {
        black_box(python::capture().map(|stack| stack.resolve()));
    })
}

fn time(rounds: u32, mut body: impl FnMut()) -> f64 {
    let start = Instant::now();
    (0..rounds).for_each(|_| body());
    start.elapsed().as_secs_f64() * 1e9 / f64::from(rounds)
}
