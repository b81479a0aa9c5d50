//! One comparison with what Python itself says, at the first capture made with the GIL held.
//!
//! The layouts are right for the builds that were tested; a build that a distribution patched is found out here, and the
//! reading of frames ends with one reason.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU8, Ordering};

use once_cell::race::OnceBox;

use crate::interpreter::{Interpreter, function};
use crate::memory::Address;
use crate::stack::Stack;

const OPEN: u8 = 0;
const UNDER_WAY: u8 = 1;
const PASSED: u8 = 2;
const FAILED: u8 = 3;

/// Frames compared, from the innermost; each one costs Python a frame object.
const COMPARED: usize = 8;

/// Whether the comparison was made, and how it went.
pub struct Check {
    state: AtomicU8,
    reason: OnceBox<String>,
    checker: Option<Checker>,
}

impl Check {
    pub fn new(checker: Option<Checker>) -> Self {
        Self { state: AtomicU8::new(OPEN), reason: OnceBox::new(), checker }
    }

    /// The layout has not been found wrong.
    #[inline]
    pub fn passed_or_open(&self) -> bool {
        self.state.load(Ordering::Acquire) != FAILED
    }

    #[inline]
    pub fn passed(&self) -> bool {
        self.state.load(Ordering::Acquire) == PASSED
    }

    /// Why the frames are not to be trusted, if they are not.
    pub fn failure(&self) -> Option<&str> {
        if self.passed_or_open() { None } else { self.reason.get().map(String::as_str) }
    }

    /// Compares `stack`, just captured on this thread, if the thread holds the GIL. False: the module is off from now on.
    #[cold]
    pub fn run(&self, interpreter: &Interpreter, thread: Address, stack: &Stack) -> bool {
        let Some(checker) = self.checker.as_ref().filter(|checker| checker.holds_the_gil(thread)) else { return true };
        if self.state.compare_exchange(OPEN, UNDER_WAY, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return true;
        }
        let outcome = match checker.compare(stack) {
            // An exception is under way, and looking must not disturb it.
            None => OPEN,
            Some(Ok(())) => PASSED,
            Some(Err(difference)) => {
                let reason =
                    format!("CPython {}: frames read differ from Python's own: {difference}", interpreter.version);
                let _ = self.reason.set(Box::new(reason));
                FAILED
            }
        };
        self.state.store(outcome, Ordering::Release);
        outcome != FAILED
    }
}

type Object = *mut c_void;

macro_rules! checker {
    ($($field:ident: $($symbol:literal)|+ => fn($($argument:ty),*) $(-> $result:ty)?;)+) => {
        /// The functions of the C interface that the comparison calls.
        pub struct Checker { $($field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)+ }

        impl Checker {
            /// `None` if one is missing; the comparison is then never made.
            pub fn find(symbol: impl Fn(&CStr) -> Option<*mut c_void>) -> Option<Self> {
                Some(Self {
                    $($field: function!(
                        None$(.or_else(|| symbol($symbol)))+, unsafe extern "C" fn($($argument),*) $(-> $result)?
                    )?,)+
                })
            }
        }
    };
}

checker! {
    gil_check: c"PyGILState_Check" => fn() -> c_int;
    current_thread: c"PyThreadState_GetUnchecked" | c"_PyThreadState_UncheckedGet" => fn() -> Object;
    error: c"PyErr_Occurred" => fn() -> Object;
    clear_error: c"PyErr_Clear" => fn();
    disable_gc: c"PyGC_Disable" => fn() -> c_int;
    enable_gc: c"PyGC_Enable" => fn() -> c_int;
    innermost: c"PyEval_GetFrame" => fn() -> Object;
    code: c"PyFrame_GetCode" => fn(Object) -> Object;
    line: c"PyFrame_GetLineNumber" => fn(Object) -> c_int;
    back: c"PyFrame_GetBack" => fn(Object) -> Object;
    attribute: c"PyObject_GetAttrString" => fn(Object, *const c_char) -> Object;
    utf8: c"PyUnicode_AsUTF8AndSize" => fn(Object, *mut isize) -> *const c_char;
    hold: c"Py_IncRef" => fn(Object);
    drop: c"Py_DecRef" => fn(Object);
}

impl Checker {
    /// Whether this thread holds the GIL, asked by two calls that do not need it. `PyGILState_Check` alone is not enough:
    /// with subinterpreters it always says yes. The current thread state is the holder's up to 3.11, and since then this thread's
    /// while it is attached.
    fn holds_the_gil(&self, thread: Address) -> bool {
        // SAFETY: both may be called from any thread.
        unsafe { (self.gil_check)() == 1 && (self.current_thread)().addr() == thread.get() }
    }

    /// `None`: not now. The GIL is held.
    fn compare(&self, stack: &Stack) -> Option<Result<(), String>> {
        // SAFETY: the GIL is held.
        if !unsafe { (self.error)() }.is_null() {
            return None;
        }
        // Making a frame object may start a collection, whose finalisers would run Python inside the program's call.
        // SAFETY: the GIL is held.
        let collects = unsafe { (self.disable_gc)() };
        let outcome = self.compare_frames(stack);
        if collects == 1 {
            // SAFETY: the GIL is held.
            unsafe { (self.enable_gc)() };
        }
        Some(outcome)
    }

    fn compare_frames(&self, stack: &Stack) -> Result<(), String> {
        let texts = stack.resolve();
        if texts.len() != stack.depth() {
            return Err(format!("{} of {} frames have a code object", texts.len(), stack.depth()));
        }
        // SAFETY: the GIL is held. The result is borrowed, so that a reference is taken to be dropped as the others are.
        let mut frame = unsafe {
            let innermost = (self.innermost)();
            (self.hold)(innermost);
            Owned { checker: self, object: innermost }
        };
        for (depth, (raw, text)) in stack.frames().iter().zip(&texts).take(COMPARED).enumerate() {
            if frame.object.is_null() {
                return Err(format!("Python has {depth} frames, {} were read", stack.depth()));
            }
            // SAFETY: a frame object and the GIL; a new reference.
            let code = Owned { checker: self, object: unsafe { (self.code)(frame.object) } };
            if code.object.addr() != raw.code.get() {
                return Err(format!("frame {depth} runs another code object than the one read"));
            }
            // SAFETY: a frame object and the GIL.
            let line = u32::try_from(unsafe { (self.line)(frame.object) }).ok().filter(|line| *line != 0);
            if line != text.line {
                return Err(format!("frame {depth} is at line {line:?}, read was {:?}", text.line));
            }
            for (name, read) in [(c"co_filename", &text.file), (c"co_name", &text.function)] {
                // SAFETY: a code object, which runs no Python for its attributes, and the GIL; a new reference.
                let value = Owned { checker: self, object: unsafe { (self.attribute)(code.object, name.as_ptr()) } };
                if self.differs(&value, read) {
                    return Err(format!("frame {depth} has another {} than {read:?}", name.to_string_lossy()));
                }
            }
            // SAFETY: a frame object and the GIL; a new reference, or null behind the outermost frame.
            frame = Owned { checker: self, object: unsafe { (self.back)(frame.object) } };
        }
        if stack.depth() < COMPARED && !frame.object.is_null() {
            return Err(format!("Python has more than the {} frames that were read", stack.depth()));
        }
        Ok(())
    }

    /// Whether a Python string is not this text. One that has no UTF-8 cannot be compared, and passes.
    fn differs(&self, value: &Owned, read: &str) -> bool {
        let mut length = 0;
        // SAFETY: a string or null (which raises), and the GIL; the result lives as long as the string.
        let utf8 = unsafe {
            if value.object.is_null() { std::ptr::null() } else { (self.utf8)(value.object, &raw mut length) }
        };
        let (false, Ok(length)) = (utf8.is_null(), usize::try_from(length)) else {
            // SAFETY: the GIL is held, and there was no exception before.
            unsafe { (self.clear_error)() };
            return value.object.is_null();
        };
        // SAFETY: as long as Python says, and alive while `value` is.
        let text = unsafe { std::slice::from_raw_parts(utf8.cast::<u8>(), length) };
        text != read.as_bytes() && !read.ends_with('…')
    }
}

/// A reference of ours, or null.
struct Owned<'a> {
    checker: &'a Checker,
    object: Object,
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: a reference that was taken, or null, which is allowed; the GIL is held for as long as these live.
        unsafe { (self.checker.drop)(self.object) };
    }
}
