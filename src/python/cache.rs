//! Text for frames, kept from one capture to the next: the same few call sites allocate again and again.
//!
//! A code object may die and another one take its address, with the same names at the same addresses too. So an entry is
//! used only if every byte from which it was made is still the same: the characters of both names, the first line, and as
//! much of the line table as was decoded. That costs a comparison, where pointers alone would now and then lie.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::interpreter::Interpreter;
use crate::layout::Position;
use crate::lines::{self, Found};
use crate::stack::{Frame, RawFrame, Stack};
use crate::text::Raw;

/// Places; a call site has one. 512 hold the frames of a training loop several times over.
const PLACES: usize = 512;
/// Frames that need more than this of a line table are decoded each time, to bound the memory kept to a few MiB.
const LONGEST_TABLE: usize = 8 << 10;

static CACHE: Mutex<Vec<Option<Entry>>> = Mutex::new(Vec::new());

struct Entry {
    frame: RawFrame,
    first_line: i32,
    file: OwnText,
    function: OwnText,
    table: Box<[u8]>,
    text: Frame,
}

/// What a code object says of itself, in place.
struct Code<'a> {
    file: Option<Raw<'a>>,
    function: Option<Raw<'a>>,
    table: &'a [u8],
    first_line: i32,
}

#[derive(PartialEq)]
struct OwnText {
    width: u8,
    bytes: Box<[u8]>,
    cut: bool,
}

/// The frames of `stack` as text.
///
/// # Safety
/// The frames are on the calling thread's stack, and stay there until this returns.
pub unsafe fn resolve(interpreter: &Interpreter, stack: &Stack) -> Vec<Frame> {
    // Whoever finds it taken decodes for itself rather than wait; that also serves a child whose parent forked meanwhile.
    let mut places = CACHE.try_lock();
    if let Some(places) = &mut places
        && places.is_empty()
    {
        places.resize_with(PLACES, || None);
    }
    let mut frames = Vec::with_capacity(stack.depth());
    for frame in stack.frames() {
        // SAFETY: the frame holds a reference to its code object, as the caller says.
        let Some(code) = (unsafe { Code::read(interpreter, frame) }) else { continue };
        let place = places.as_mut().and_then(|places| places.get_mut(hash(frame) % PLACES));
        frames.push(match place {
            Some(Some(entry)) if entry.is_of(frame, &code) => entry.text.clone(),
            place => {
                let (text, used) = code.decode(interpreter, frame);
                if let Some(place) = place {
                    *place = used.and_then(|used| Entry::new(*frame, &code, used, text.clone()));
                }
                text
            }
        });
    }
    frames
}

/// Code objects are at multiples of 16, instructions at multiples of 2.
fn hash(frame: &RawFrame) -> usize {
    let mixed = (frame.code.get() >> 4) ^ frame.position.cast_unsigned().rotate_left(17);
    mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48
}

impl<'a> Code<'a> {
    /// # Safety
    /// The code object of `frame` is alive, and stays so during `'a`.
    unsafe fn read(interpreter: &Interpreter, frame: &RawFrame) -> Option<Self> {
        let at = &interpreter.layout.code;
        // SAFETY: the caller's; the type says that it is a code object, whose names and line table never change.
        unsafe {
            interpreter.is_code(frame.code).then(|| Self {
                file: interpreter.text(frame.code, at.file),
                function: interpreter.text(frame.code, at.name),
                table: interpreter.bytes(frame.code, at.line_table).unwrap_or_default(),
                first_line: frame.code.read(at.first_line),
            })
        }
    }

    /// The text, and how much of the line table it was made from; `None` if that is more than is worth keeping.
    fn decode(&self, interpreter: &Interpreter, frame: &RawFrame) -> (Frame, Option<usize>) {
        let (line, used) = match interpreter.code_offset(frame) {
            // As Python itself says of a frame that has not begun.
            None => (u32::try_from(self.first_line).ok(), Some(0)),
            Some(offset) => {
                let found = match interpreter.layout.frame.position {
                    Position::Index(_) => lines::in_pairs(self.table, self.first_line, offset),
                    Position::Pointer { .. } => lines::in_entries(self.table, self.first_line, offset / 2),
                };
                found.map_or((None, None), |Found { line, used }| (line, Some(used)))
            }
        };
        let text = |raw: Option<Raw>| raw.map_or_else(|| Arc::from("?"), |raw| Arc::from(raw.decode()));
        (
            Frame { file: text(self.file), function: text(self.function), line },
            used.filter(|used| *used <= LONGEST_TABLE),
        )
    }
}

impl Entry {
    fn new(frame: RawFrame, code: &Code, used: usize, text: Frame) -> Option<Self> {
        let (file, function) = (OwnText::of(code.file?), OwnText::of(code.function?));
        Some(Self { frame, first_line: code.first_line, file, function, table: code.table.get(..used)?.into(), text })
    }

    fn is_of(&self, frame: &RawFrame, code: &Code) -> bool {
        self.frame == *frame
            && self.first_line == code.first_line
            && code.table.starts_with(&self.table)
            && code.file.is_some_and(|file| self.file.is(file))
            && code.function.is_some_and(|function| self.function.is(function))
    }
}

impl OwnText {
    fn of(raw: Raw) -> Self {
        Self { width: raw.width, bytes: raw.bytes.into(), cut: raw.cut }
    }

    fn is(&self, raw: Raw) -> bool {
        self.width == raw.width && self.cut == raw.cut && *self.bytes == *raw.bytes
    }
}
