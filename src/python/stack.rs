//! Frames as captured, and as text.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::mem::MaybeUninit;
use std::sync::Arc;

use crate::memory::Address;
use crate::{MAX_FRAMES, cache, interpreter};

/// Where one call stands, before anything is made of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawFrame {
    /// The code object. Not a reference: it lives for as long as the frame does.
    pub code: Address,
    /// What the frame says of its instruction; the layout knows what it means.
    pub position: isize,
}

/// The innermost frames of a thread, as addresses. Taking it allocates nothing and touches no reference count.
pub struct Stack {
    /// The first `length` are there. Not zeroed before: that would take as long as reading 20 frames.
    frames: [MaybeUninit<RawFrame>; MAX_FRAMES],
    length: usize,
    truncated: bool,
}

impl Stack {
    #[inline]
    pub(super) const fn new() -> Self {
        Self { frames: [MaybeUninit::uninit(); MAX_FRAMES], length: 0, truncated: false }
    }

    /// False when there is no room; the stack is then marked as truncated.
    #[inline]
    pub(super) fn push(&mut self, frame: RawFrame) -> bool {
        match self.frames.get_mut(self.length) {
            Some(place) => {
                place.write(frame);
                self.length += 1;
                true
            }
            None => {
                self.truncated = true;
                false
            }
        }
    }

    /// There were more frames than were read.
    pub(super) fn cut(&mut self) {
        self.truncated = true;
    }

    pub(super) fn frames(&self) -> &[RawFrame] {
        // SAFETY: `push` wrote the first `length` frames, which is at most their number.
        unsafe { std::slice::from_raw_parts(self.frames.as_ptr().cast(), self.length) }
    }

    /// How many frames were captured, at most [`MAX_FRAMES`].
    pub fn depth(&self) -> usize {
        self.length
    }

    /// Whether the thread has more frames, outside of these.
    pub fn is_truncated(&self) -> bool {
        self.truncated
    }

    /// The frames as text, the innermost first. Empty when the thread has left them since, or another one asks: code
    /// objects are read only while the very same frames are found on this thread again, for nothing else keeps them alive.
    pub fn resolve(&self) -> Vec<Frame> {
        let Some((interpreter, thread)) = interpreter::get().and_then(|it| Some((it, it.thread()?))) else {
            return Vec::new();
        };
        let mut now = Self::new();
        interpreter.read(thread, &mut now);
        if self.frames() != now.frames() {
            return Vec::new();
        }
        // SAFETY: the frames are on this thread's stack, as was just read, and stay there during this call.
        unsafe { cache::resolve(interpreter, self) }
    }
}

/// One call of a Python function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// `co_filename`: a path, or what stands for one ("<string>", "<stdin>").
    pub file: Arc<str>,
    /// `co_name`: the function's name without its class, "<module>" at the top level of a file.
    pub function: Arc<str>,
    /// The line under way, from 1; `None` for code that has none.
    pub line: Option<u32>,
}

impl Hash for Stack {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.frames().hash(hasher);
    }
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line} in {}", self.file, self.function),
            None => write!(f, "{} in {}", self.file, self.function),
        }
    }
}
