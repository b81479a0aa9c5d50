//! The CPython of this process: found once, then read.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::sync::atomic::{AtomicU32, Ordering, fence};

use once_cell::race::OnceBox;

use crate::check::{Check, Checker};
use crate::layout::{
    self, FIRST_NOT_PYTHON, IS_BYTES, IS_TEXT, Layout, OBJECT_TYPE, OF_GENERATOR, Position, TYPE_FLAGS, Types,
};
use crate::memory::Address;
use crate::stack::{RawFrame, Stack};
use crate::text::{LONGEST, Raw};
use crate::versions::{Offsets, UNDERSTOOD};
use crate::{Version, published};

/// Bytes an instruction, or a part of one.
const UNIT: isize = 2;

/// What the first look found. Empty as long as there is no CPython in the process.
static FOUND: OnceBox<Result<Interpreter, String>> = OnceBox::new();

/// Looks that found no CPython.
static MISSES: AtomicU32 = AtomicU32::new(0);

/// The interpreter, if it can be read.
#[inline]
pub fn get() -> Option<&'static Interpreter> {
    match FOUND.get() {
        Some(Ok(interpreter)) if interpreter.check.passed_or_open() => Some(interpreter),
        Some(_) => None,
        None => look_again(),
    }
}

/// What was found so far, without looking.
pub fn found() -> Option<Result<&'static Interpreter, &'static str>> {
    FOUND.get().map(|found| found.as_ref().map_err(String::as_str))
}

/// A process may load CPython late, and a symbol that is in no library costs a walk through all of them, so this looks at
/// the first call, the second, the fourth and so on. Hooking dlopen would tell, but breaks the search path of its caller.
#[cold]
fn look_again() -> Option<&'static Interpreter> {
    let misses = MISSES.load(Ordering::Relaxed);
    MISSES.store(misses.wrapping_add(1), Ordering::Relaxed);
    if !misses.wrapping_add(1).is_power_of_two() {
        return None;
    }
    symbol(c"PyGILState_GetThisThreadState")?;
    FOUND.get_or_init(|| Box::new(Interpreter::open())).as_ref().ok()
}

/// A symbol of the process's global scope. A CPython that was loaded with RTLD_LOCAL is not seen.
pub fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a zero-terminated name; RTLD_DEFAULT is always a legal handle.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// A symbol of the process's global scope that CPython cannot be read without. The error names it.
fn required(name: &CStr) -> Result<*mut c_void, String> {
    symbol(name).ok_or_else(|| format!("the interpreter does not export {}", name.to_string_lossy()))
}

/// A function of the process's CPython, by its name and type.
macro_rules! function {
    ($found:expr, $type:ty) => {
        // SAFETY: `dlsym` found the name, and CPython declares it with this type in every understood version.
        $found.map(|address| unsafe { std::mem::transmute::<*mut std::ffi::c_void, $type>(address) })
    };
}
pub(super) use function;

/// A CPython whose structures are known.
pub struct Interpreter {
    pub version: Version,
    pub layout: Layout,
    pub check: Check,
    types: Types,
    this_thread: extern "C" fn() -> *mut c_void,
    is_initialized: extern "C" fn() -> c_int,
    is_finalizing: Option<extern "C" fn() -> c_int>,
}

impl Interpreter {
    /// Calls only functions that CPython documents as callable before `Py_Initialize` and without the GIL.
    ///
    /// # Errors
    /// Why this interpreter cannot be read, as a clause for the log.
    fn open() -> Result<Self, String> {
        let version = Version::from_hex(version_hex()?);
        let refuse = |why: String| format!("CPython {version}: {why}");
        let layout = find_layout(version).map_err(refuse)?;
        let object = |name: &CStr| {
            let address = required(name).map_err(refuse)?.expose_provenance();
            Address::new(address).ok_or_else(|| refuse(format!("{} is misaligned", name.to_string_lossy())))
        };
        let types = Types {
            type_type: object(c"PyType_Type")?,
            code: object(c"PyCode_Type")?,
            text: object(c"PyUnicode_Type")?,
            bytes: object(c"PyBytes_Type")?,
        };
        // SAFETY: the four type objects, by their names.
        unsafe { layout.fits(&types) }.map_err(refuse)?;
        Ok(Self {
            version,
            layout,
            check: Check::new(Checker::find(symbol)),
            types,
            this_thread: function!(required(c"PyGILState_GetThisThreadState"), extern "C" fn() -> *mut c_void)
                .map_err(refuse)?,
            is_initialized: function!(required(c"Py_IsInitialized"), extern "C" fn() -> c_int).map_err(refuse)?,
            is_finalizing: function!(
                // Public since 3.13.
                symbol(c"Py_IsFinalizing").or_else(|| symbol(c"_Py_IsFinalizing")),
                extern "C" fn() -> c_int
            ),
        })
    }

    /// This thread's `PyThreadState`, while Python runs. Another thread's is never returned: the structure says whose it is.
    #[inline]
    pub fn thread(&self) -> Option<Address> {
        if !self.runs() {
            return None;
        }
        let thread = Address::new((self.this_thread)().expose_provenance())?;
        // SAFETY: CPython keeps this thread's state for as long as the thread knows it, except at finalisation: then it is
        // freed, which leaves it readable. `pthread_self` has no preconditions.
        let (owner, own) = unsafe { (thread.read::<c_ulong>(self.layout.thread.id), libc::pthread_self()) };
        (owner == own).then_some(thread)
    }

    /// Since finalisation began; functions that `atexit` was given have run by then.
    pub fn is_taken_apart(&self) -> bool {
        self.is_finalizing.is_some_and(|is_finalizing| is_finalizing() != 0)
    }

    /// Between `Py_Initialize` and the beginning of finalisation.
    #[inline]
    fn runs(&self) -> bool {
        (self.is_initialized)() != 0 && self.is_finalizing.is_none_or(|is_finalizing| is_finalizing() == 0)
    }

    /// Reads the frames of this thread into `stack`, the innermost first.
    #[inline]
    pub fn read(&self, thread: Address, stack: &mut Stack) {
        // Between frames of Python there may be one of C code and one that the interpreter made for a class's call.
        const MOST: usize = 3 * (crate::MAX_FRAMES + 1);

        let Layout { thread: of_thread, frame: of_frame, .. } = &self.layout;
        // SAFETY: this thread's state, readable as `thread` says.
        let innermost = unsafe { thread.pointer(of_thread.frame, 0) };
        // A daemon thread that was put aside since may find that its state was freed, and something else in its place. So
        // what was read is used only if finalisation, which begins long before that, has not begun even now.
        fence(Ordering::Acquire);
        if !self.runs() {
            return;
        }
        // SAFETY: the structure that 3.11 and 3.12 keep on the C stack belongs to a C function that has not returned,
        // because this thread is further down in it.
        let mut next =
            of_thread.hop.map_or(innermost, |hop| innermost.and_then(|on_stack| unsafe { on_stack.pointer(hop, 0) }));
        let prepares = matches!(of_frame.position, Position::Pointer { .. });
        for _ in 0..MOST {
            let Some(frame) = next else { return };
            // SAFETY: a frame of the chain of this very thread. Only this thread runs or unlinks them, and it is here. Each
            // holds a reference to its code object, so the pointer read is good until this call is over.
            unsafe {
                next = frame.pointer(of_frame.previous, 0);
                let (owner, position) = match of_frame.position {
                    Position::Index(at) => (0, frame.read::<c_int>(at) as isize),
                    Position::Pointer { at, owner } => (frame.read::<u8>(owner), frame.read::<isize>(at)),
                };
                if owner >= FIRST_NOT_PYTHON {
                    continue;
                }
                let Some(code) = frame.pointer(of_frame.code, of_frame.code_tag) else { continue };
                if prepares && owner != OF_GENERATOR && self.is_preparing(code, position) {
                    continue;
                }
                if !stack.push(RawFrame { code, position }) {
                    return;
                }
            }
        }
        stack.cut();
    }

    /// Whether a frame is not yet in the program's code. Python counts it as no frame; since 3.12 it makes some that never
    /// get further, for calls of `__init__`.
    ///
    /// # Safety
    /// A live code object, of a version since 3.11.
    #[inline]
    unsafe fn is_preparing(&self, code: Address, position: isize) -> bool {
        // SAFETY: the caller's.
        let preparation = unsafe { code.read::<c_int>(self.layout.code.preparation()) };
        let begin = (code.get() + self.layout.code.size).cast_signed();
        position < begin + UNIT * preparation as isize
    }

    /// How many bytes of code are before the instruction at which a frame stands; `None` before the first one.
    pub fn code_offset(&self, frame: &RawFrame) -> Option<usize> {
        let offset = match self.layout.frame.position {
            Position::Index(_) => frame.position.checked_mul(UNIT),
            Position::Pointer { .. } => frame.position.checked_sub_unsigned(frame.code.get() + self.layout.code.size),
        };
        usize::try_from(offset?).ok()
    }

    /// Whether this is a code object, as far as its type says.
    ///
    /// # Safety
    /// A live Python object.
    pub unsafe fn is_code(&self, object: Address) -> bool {
        // SAFETY: the caller's.
        unsafe { object.read::<usize>(OBJECT_TYPE) == self.types.code.get() }
    }

    /// The string at `offset` in `object`; `None` where there is none.
    ///
    /// # Safety
    /// A live Python object with a pointer at `offset`, which stays alive and unchanged during `'a`.
    pub unsafe fn text<'a>(&self, object: Address, offset: usize) -> Option<Raw<'a>> {
        let at = &self.layout.text;
        // SAFETY: the caller's, and the object is a string by its type's flags. Bits 2 to 4 of a string's state are the
        // width, bit 5 says that it is in one piece, bit 6 that it is ASCII. Another thread may intern the string meanwhile,
        // which changes other bits.
        unsafe {
            let string = self.flagged(object, offset, IS_TEXT)?;
            let length = usize::try_from(string.read::<isize>(at.length)).ok()?;
            let state = string.read::<u32>(at.state);
            let width = match (state >> 2) & 7 {
                width @ (1 | 2 | 4) => width as u8,
                _ => return None,
            };
            let (in_one_piece, ascii) = (state & 1 << 5 != 0, state & 1 << 6 != 0);
            let size = length.min(LONGEST) * usize::from(width);
            let bytes = match (in_one_piece, ascii) {
                (true, true) => string.bytes(at.ascii, size),
                (true, false) => string.bytes(at.compact, size),
                // Made by a class derived from str: the characters are elsewhere.
                (false, _) => string.pointer(at.compact, 0)?.bytes(0, size),
            };
            Some(Raw { width, bytes, cut: length > LONGEST })
        }
    }

    /// The bytes object at `offset` in `object`.
    ///
    /// # Safety
    /// As for [`Interpreter::text`].
    pub unsafe fn bytes<'a>(&self, object: Address, offset: usize) -> Option<&'a [u8]> {
        // SAFETY: the caller's, and the object is `bytes` by its type's flags.
        unsafe {
            let bytes = self.flagged(object, offset, IS_BYTES)?;
            let length = usize::try_from(bytes.read::<isize>(layout::BYTES_LENGTH)).ok()?;
            Some(bytes.bytes(layout::BYTES_DATA, length))
        }
    }

    /// The object at `offset` in `object`, if its type has this flag.
    ///
    /// # Safety
    /// As for [`Interpreter::text`].
    unsafe fn flagged(&self, object: Address, offset: usize, flag: usize) -> Option<Address> {
        // SAFETY: the caller's; every object's type is a live type object.
        unsafe {
            let found = object.pointer(offset, 0)?;
            let its_type = found.pointer(OBJECT_TYPE, 0)?;
            (its_type.read::<usize>(TYPE_FLAGS) & flag != 0).then_some(found)
        }
    }
}

/// The layout of `version`, or why it is not known.
fn find_layout(version: Version) -> Result<Layout, String> {
    let understood = UNDERSTOOD.iter().find(|understood| version.major == 3 && understood.minor == version.minor);
    let Some(understood) = understood.filter(|_| version.is_released()) else {
        let [oldest, .., newest] = UNDERSTOOD;
        return Err(format!("frames are read in releases of 3.{} to 3.{} only", oldest.minor, newest.minor));
    };
    match understood.offsets {
        Offsets::CompiledIn => {
            layout::compiled_in(understood.minor).ok_or_else(|| "no table of its structures".to_owned())
        }
        Offsets::Published => {
            let words = required(c"_PyRuntime")?.cast::<[u64; published::WORDS]>();
            // SAFETY: since 3.13 `_PyRuntime` begins with a block of constants, and is longer than what is read here.
            published::layout(unsafe { &*words }, version.hex)
        }
    }
}

/// `PY_VERSION_HEX` of the interpreter.
fn version_hex() -> Result<u32, String> {
    if let Some(constant) = symbol(c"Py_Version") {
        // SAFETY: a `const unsigned long` since 3.11.
        let hex = unsafe { constant.cast::<c_ulong>().read() };
        return u32::try_from(hex).map_err(|_| format!("Py_Version is {hex:#x}"));
    }
    // 3.10 has only the text: "3.10.13 (main, …".
    let function = function!(required(c"Py_GetVersion"), extern "C" fn() -> *const c_char)?;
    // SAFETY: a static string, and callable at any time.
    let text = unsafe { CStr::from_ptr(function()) }.to_string_lossy();
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse::<u8>().ok());
    match (numbers.next(), numbers.next(), text.split_whitespace().next()) {
        (Some(major), Some(minor), Some(word)) => {
            let micro = numbers.next().unwrap_or(0);
            // Letters in it are an alpha, a beta, or "rc"; "+" is a build from the repository.
            let level = if word.contains(char::is_alphabetic) { 0xa0 } else { 0xf0 };
            Ok(u32::from_be_bytes([major, minor, micro, level]))
        }
        _ => Err(format!("Py_GetVersion says {text:?}")),
    }
}
