//! Which interpreters can be read: the library obeys this table, and `gpupool doctor` shows it.

/// One minor version of CPython whose frames can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Understood {
    /// 3.`minor`; releases and release candidates, because a layout may still change before those.
    pub minor: u8,
    pub offsets: Offsets,
}

/// Where the offsets of the interpreter's structures come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offsets {
    /// A table in this library. CPython does not change these structures within a minor version.
    CompiledIn,
    /// The interpreter publishes them at the start of `_PyRuntime`.
    Published,
}

/// Every version that can be read. Free-threaded builds cannot, whatever their version.
pub const UNDERSTOOD: [Understood; 5] = [
    Understood { minor: 10, offsets: Offsets::CompiledIn },
    Understood { minor: 11, offsets: Offsets::CompiledIn },
    Understood { minor: 12, offsets: Offsets::CompiledIn },
    Understood { minor: 13, offsets: Offsets::Published },
    Understood { minor: 14, offsets: Offsets::Published },
];
