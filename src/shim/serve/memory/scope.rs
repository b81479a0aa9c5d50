//! What the program wants of the blocks that this thread allocates from now on: a name, a place that is not home.

use std::cell::Cell;
use std::ffi::CStr;

/// A label's room with its NUL.
pub type Name = [u8; 64];

struct Scope {
    /// Empty for none.
    name: Cell<Name>,
    is_far: Cell<bool>,
}

thread_local! {
    /// `const` and without a destructor, so that touching it never allocates and stays legal while the thread is being torn down.
    static SCOPE: Scope = const { Scope { name: Cell::new([0; 64]), is_far: Cell::new(false) } };
}

/// Has what this thread allocates named so, or not at all (`""`); the name it had until now. One of 64 bytes or more is cut.
pub fn set_name(name: &str) -> Name {
    let mut room = [0; 64];
    for (to, byte) in room.iter_mut().zip(name.bytes().take(63)) {
        *to = byte;
    }
    SCOPE.with(|scope| scope.name.replace(room))
}

/// What the blocks that this thread allocates are named.
#[inline]
pub fn name() -> Option<Name> {
    Some(SCOPE.with(|scope| scope.name.get())).filter(|name| name[0] != 0)
}

/// A name as text.
pub fn text(name: &Name) -> &str {
    CStr::from_bytes_until_nul(name).ok().and_then(|name| name.to_str().ok()).unwrap_or_default()
}

/// Has what this thread allocates elsewhere than on its GPU where there is room, or not; whether it was so until now.
pub fn set_far(is_far: bool) -> bool {
    SCOPE.with(|scope| scope.is_far.replace(is_far))
}

/// Whether what this thread allocates is to be elsewhere than on its GPU.
#[inline]
pub fn is_far() -> bool {
    SCOPE.with(|scope| scope.is_far.get())
}
