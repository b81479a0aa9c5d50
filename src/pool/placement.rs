//! Where the bytes of a new block go: pure, `(size, home, room, links, policy) -> pieces`.

/// One place that memory can be at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// A GPU, by CUDA ordinal as the process sees it.
    Gpu(u32),
    /// A host NUMA node.
    Host(u32),
}

/// How blocks are spread (`GPUPOOL_PLACEMENT`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Policy {
    /// The home GPU until it is full, then peers by link speed, then the nearest host node.
    #[default]
    LocalFirst,
    /// Chunk by chunk over all lending GPUs in turn; the host when they are full.
    Interleave,
    /// The GPU with the most room first; the host when all are full.
    MostFree,
}

/// Who reaches whom, and how fast.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    /// `(home, other) -> rank`; lower is faster; absent means the home GPU can not reach that place.
    pub ranks: std::collections::BTreeMap<(u32, Place), u32>,
}
