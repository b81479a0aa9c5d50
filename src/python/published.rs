//! Offsets that CPython publishes about itself since 3.13: `_Py_DebugOffsets`, the first member of `_PyRuntime`.
//!
//! It is a run of 64-bit words: a cookie, the version, whether the build is free-threaded, then for each structure its
//! size and some offsets. Minor versions insert words, so each has its own list of where the structures begin.

use crate::layout::{BYTES_DATA, BYTES_LENGTH, Code, Frame, Layout, OBJECT_TYPE, Position, Text, Thread};

const COOKIE: u64 = u64::from_ne_bytes(*b"xdebugpy");

/// What is read of `_PyRuntime`, in words: up to the last structure used in any version. `_PyRuntime` is far longer.
pub const WORDS: usize = 81;

/// Indices of the words at which the structures begin (their sizes), in one minor version.
struct Starts {
    thread: usize,
    frame: usize,
    code: usize,
    object: usize,
    bytes: usize,
    text: usize,
}

const V3_13: Starts = Starts { thread: 19, frame: 28, code: 34, object: 44, bytes: 64, text: 67 };
/// Three words more for the interpreter, two for a frame, one for code, and a set between list and dict.
const V3_14: Starts = Starts { thread: 22, frame: 31, code: 39, object: 50, bytes: 74, text: 77 };

/// The layout that the block describes. `version` is `Py_Version` of the same interpreter.
///
/// # Errors
/// Why it cannot be used, as a clause for the log.
pub fn layout(words: &[u64; WORDS], version: u32) -> Result<Layout, String> {
    if words[0] != COOKIE {
        return Err("_PyRuntime does not begin with the cookie \"xdebugpy\"".to_owned());
    }
    if words[1] != u64::from(version) {
        return Err(format!("_PyRuntime describes version {:#x}, the interpreter is {version:#x}", words[1]));
    }
    if words[2] != 0 {
        return Err("a free-threaded build".to_owned());
    }
    let (at, tag) = match (version >> 16) & 0xff {
        13 => (V3_13, 0),
        // Objects lie at multiples of 8, and the reference to the code object keeps flags in the bits below.
        14 => (V3_14, 7),
        minor => return Err(format!("no list of the offsets that 3.{minor} publishes")),
    };

    let thread = Structure { name: "PyThreadState", words: &words[at.thread..] };
    let frame = Structure { name: "_PyInterpreterFrame", words: &words[at.frame..] };
    let code = Structure { name: "PyCodeObject", words: &words[at.code..] };
    let object = Structure { name: "PyObject", words: &words[at.object..] };
    let bytes = Structure { name: "PyBytesObject", words: &words[at.bytes..] };
    let text = Structure { name: "PyUnicodeObject", words: &words[at.text..] };
    let constants =
        [(object.pointer(1)?, OBJECT_TYPE), (bytes.pointer(1)?, BYTES_LENGTH), (bytes.byte(2)?, BYTES_DATA)];
    if let Some((published, known)) = constants.iter().find(|(published, known)| published != known) {
        return Err(format!("_PyRuntime gives offset {published} for a field of every object that is at {known}"));
    }

    let ascii = text.byte(3)?;
    Ok(Layout {
        thread: Thread { id: thread.pointer(5)?, frame: thread.pointer(4)?, hop: None },
        frame: Frame {
            previous: frame.pointer(1)?,
            code: frame.pointer(2)?,
            code_tag: tag,
            position: Position::Pointer { at: frame.pointer(3)?, owner: frame.byte(5)? },
        },
        code: Code {
            file: code.pointer(1)?,
            name: code.pointer(2)?,
            line_table: code.pointer(4)?,
            first_line: code.byte(5)?,
            size: code.byte(9)?,
        },
        // The length and address of the cached UTF-8 follow the head of a string that is not ASCII.
        text: Text { length: text.pointer(2)?, state: text.byte(1)?, ascii, compact: ascii + 2 * size_of::<usize>() },
    })
}

/// The words of one structure: its size, then offsets.
struct Structure<'a> {
    name: &'static str,
    words: &'a [u64],
}

impl Structure<'_> {
    /// No structure that is read is larger than this; a thread state has under 1 KiB in 3.14.
    const LARGEST: usize = 16 << 10;

    fn byte(&self, index: usize) -> Result<usize, String> {
        let (size, offset) = (self.words[0], self.words[index]);
        match (usize::try_from(size), usize::try_from(offset)) {
            (Ok(size), Ok(offset)) if size <= Self::LARGEST && offset < size => Ok(offset),
            _ => Err(format!("_PyRuntime gives offset {offset} in {} of {size} bytes", self.name)),
        }
    }

    fn pointer(&self, index: usize) -> Result<usize, String> {
        let offset = self.byte(index)?;
        if offset.is_multiple_of(size_of::<usize>()) {
            Ok(offset)
        } else {
            Err(format!("_PyRuntime gives offset {offset} for a pointer in {}", self.name))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V3_13_0: u32 = 0x030d_00f0;
    const V3_14_10: u32 = 0x030e_0af0;

    /// A block with these structures, each `(where it begins, its size, its offsets)`.
    fn block(version: u32, structures: &[(usize, u64, &[u64])]) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        (words[0], words[1]) = (COOKIE, version.into());
        for (start, size, offsets) in structures {
            words[*start] = *size;
            words[start + 1..][..offsets.len()].copy_from_slice(offsets);
        }
        words
    }

    /// As CPython 3.13.0 for x86-64 publishes them.
    fn v3_13() -> [u64; WORDS] {
        block(
            V3_13_0,
            &[
                (19, 304, &[0, 8, 16, 72, 152, 160, 232, 32]),
                (28, 80, &[8, 0, 56, 72, 70]),
                (34, 208, &[112, 120, 128, 136, 68, 52, 96, 104, 200]),
                (44, 16, &[8]),
                (64, 40, &[16, 32]),
                (67, 64, &[32, 16, 40]),
            ],
        )
    }

    #[test]
    fn the_structures_are_found_where_each_version_has_them() {
        let expected = Layout {
            thread: Thread { id: 152, frame: 72, hop: None },
            frame: Frame { previous: 8, code: 0, code_tag: 0, position: Position::Pointer { at: 56, owner: 70 } },
            code: Code { file: 112, name: 120, line_table: 136, first_line: 68, size: 200 },
            text: Text { length: 16, state: 32, ascii: 40, compact: 56 },
        };
        assert_eq!(layout(&v3_13(), V3_13_0), Ok(expected));

        // As CPython 3.14.10 publishes them.
        let words = block(
            V3_14_10,
            &[
                (22, 832, &[0, 8, 16, 72, 152, 160, 232, 32]),
                (31, 88, &[8, 0, 56, 80, 74, 64, 0]),
                (39, 216, &[112, 120, 128, 136, 68, 52, 96, 104, 208, 0]),
                (50, 16, &[8]),
                (74, 40, &[16, 32]),
                (77, 64, &[32, 16, 40]),
            ],
        );
        let position = Position::Pointer { at: 56, owner: 74 };
        let expected = Layout {
            frame: Frame { code_tag: 7, position, ..expected.frame },
            code: Code { size: 208, ..expected.code },
            ..expected
        };
        assert_eq!(layout(&words, V3_14_10), Ok(expected));
    }

    #[test]
    fn offsets_that_cannot_be_are_refused() {
        for (word, value, reason) in [
            (23, 4096, "_PyRuntime gives offset 4096 in PyThreadState of 304 bytes"),
            (31, 57, "_PyRuntime gives offset 57 for a pointer in _PyInterpreterFrame"),
            (34, 1 << 40, "_PyRuntime gives offset 112 in PyCodeObject of 1099511627776 bytes"),
            (45, 0, "_PyRuntime gives offset 0 for a field of every object that is at 8"),
            (66, 24, "_PyRuntime gives offset 24 for a field of every object that is at 32"),
        ] {
            let mut words = v3_13();
            words[word] = value;
            assert_eq!(layout(&words, V3_13_0), Err(reason.to_owned()));
        }
        assert_eq!(
            layout(&block(0x030f_00f0, &[]), 0x030f_00f0),
            Err("no list of the offsets that 3.15 publishes".to_owned())
        );
    }
}
