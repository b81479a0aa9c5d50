//! Where the fields lie, for each version that [`crate::versions`] lists.

use crate::memory::Address;

/// Offsets in bytes. Fields that are in the same place in every understood version are constants below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub thread: Thread,
    pub frame: Frame,
    pub code: Code,
    pub text: Text,
}

/// `PyThreadState`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    /// `pthread_self()` of the thread it belongs to.
    pub id: usize,
    /// The innermost frame, or what [`Thread::hop`] says.
    pub frame: usize,
    /// 3.11 and 3.12 keep the innermost frame in a structure on the C stack: its offset there.
    pub hop: Option<usize>,
}

/// `PyFrameObject` in 3.10, `_PyInterpreterFrame` since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    pub previous: usize,
    pub code: usize,
    /// Low bits of the pointer to the code object that are not part of the address.
    pub code_tag: usize,
    pub position: Position,
}

/// How a frame says which instruction it is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// 3.10: a C int at this offset, the number of the instruction, -1 before the first.
    Index(usize),
    /// Since 3.11: at `at` a pointer into the code object's instructions; at `owner` a byte that says what the frame is for.
    Pointer { at: usize, owner: usize },
}

/// `PyCodeObject`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    pub file: usize,
    pub name: usize,
    pub line_table: usize,
    pub first_line: usize,
    /// The fixed part: `tp_basicsize` of its type, and since 3.11 where the instructions begin.
    pub size: usize,
}

impl Code {
    /// A C int, since 3.11: instructions that only prepare the call. It is followed by one pointer and the instructions, in
    /// every understood version; 3.13 and 3.14 do not publish it.
    pub fn preparation(&self) -> usize {
        self.size - 2 * size_of::<usize>()
    }
}

/// `PyASCIIObject` and its extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Text {
    pub length: usize,
    pub state: usize,
    /// Where the characters of pure ASCII begin.
    pub ascii: usize,
    /// Where those of other strings begin; in a string that was not made in one piece, a pointer to them.
    pub compact: usize,
}

/// `owner` of frames of generators and coroutines.
pub const OF_GENERATOR: u8 = 1;
/// `owner` of frames that stand for C code: 3 in 3.12 and 3.13, 3 and 4 in 3.14. Before 3.12 there are none.
pub const FIRST_NOT_PYTHON: u8 = 3;

/// `PyObject.ob_type`, `PyVarObject.ob_size`, `PyBytesObject.ob_sval`.
pub const OBJECT_TYPE: usize = 8;
pub const BYTES_LENGTH: usize = 16;
pub const BYTES_DATA: usize = 32;
/// `PyTypeObject.tp_basicsize` and `tp_flags`, and the flags of `bytes` and `str` and what is derived from them.
pub const TYPE_SIZE: usize = 32;
pub const TYPE_FLAGS: usize = 168;
pub const IS_BYTES: usize = 1 << 27;
pub const IS_TEXT: usize = 1 << 28;

const TEXT_3_10: Text = Text { length: 16, state: 32, ascii: 48, compact: 72 };
const TEXT_3_12: Text = Text { length: 16, state: 32, ascii: 40, compact: 56 };

const V3_10: Layout = Layout {
    thread: Thread { id: 176, frame: 24, hop: None },
    frame: Frame { previous: 24, code: 32, code_tag: 0, position: Position::Index(96) },
    code: Code { file: 104, name: 112, line_table: 120, first_line: 40, size: 176 },
    text: TEXT_3_10,
};

const V3_11: Layout = Layout {
    thread: Thread { id: 152, frame: 56, hop: Some(8) },
    frame: Frame { previous: 48, code: 32, code_tag: 0, position: Position::Pointer { at: 56, owner: 69 } },
    code: Code { file: 112, name: 120, line_table: 136, first_line: 72, size: 184 },
    text: TEXT_3_10,
};

const V3_12: Layout = Layout {
    thread: Thread { id: 136, frame: 56, hop: Some(0) },
    frame: Frame { previous: 8, code: 0, code_tag: 0, position: Position::Pointer { at: 56, owner: 70 } },
    code: Code { file: 112, name: 120, line_table: 136, first_line: 68, size: 192 },
    text: TEXT_3_12,
};

/// The table for 3.`minor`, where it is compiled in.
pub fn compiled_in(minor: u8) -> Option<Layout> {
    match minor {
        10 => Some(V3_10),
        11 => Some(V3_11),
        12 => Some(V3_12),
        _ => None,
    }
}

/// The types whose static parts tell whether a layout fits this build.
#[derive(Clone, Copy, Debug)]
pub struct Types {
    pub type_type: Address,
    pub code: Address,
    pub text: Address,
    pub bytes: Address,
}

impl Layout {
    /// Compares with what the interpreter's static types say of their objects: no call, no GIL, no Python object needed.
    /// A build with a longer object header (Py_TRACE_REFS) or other fields fails here rather than at the first frame.
    ///
    /// # Safety
    /// `types` are the addresses of `PyType_Type`, `PyCode_Type`, `PyUnicode_Type` and `PyBytes_Type`.
    pub unsafe fn fits(&self, types: &Types) -> Result<(), String> {
        let sizes = [
            ("code", types.code, self.code.size),
            // The whole of a string that is not in one piece is one pointer longer than a compact one's head.
            ("str", types.text, self.text.compact + size_of::<usize>()),
            // The head and the terminating zero.
            ("bytes", types.bytes, BYTES_DATA + 1),
        ];
        for (name, object, expected) in sizes {
            // SAFETY: static objects, larger than the offsets read.
            let (its_type, size) = unsafe { (object.read::<usize>(OBJECT_TYPE), object.read::<usize>(TYPE_SIZE)) };
            // Before Py_Initialize some versions have not filled in the type yet.
            if its_type != types.type_type.get() && its_type != 0 {
                return Err(format!("the type object of {name} has an unknown header"));
            }
            if size != expected {
                return Err(format!("an object of type {name} takes {size} bytes, expected {expected}"));
            }
        }
        Ok(())
    }
}
