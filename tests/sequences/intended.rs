//! Where a program under the shim sees something else than without it, on purpose. Everything else that differs is a
//! defect. Each item says what differs and why; the calls ask here, and nowhere else is one run treated unlike the other.

use crate::driver::Location;

/// Which of the two runs this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Bare,
    Shim,
}

/// What `cuMemAlloc` gives under the shim, in the variant that is played. Both sides know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Service {
    /// Blocks of the pool.
    #[default]
    Pool,
    /// The driver's memory, as long as there is some.
    Driver,
    /// Managed memory.
    Managed,
}

impl Service {
    pub const ALL: [(&str, Service); 3] =
        [("pool", Service::Pool), ("driver", Service::Driver), ("managed", Service::Managed)];

    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, known)| *known == self).map_or("pool", |(name, _)| name)
    }
}

impl Side {
    /// Told from the control interface.
    pub fn here() -> Self {
        // SAFETY: the name is NUL-terminated.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"gpupool_version".as_ptr()) };
        if found.is_null() { Side::Bare } else { Side::Shim }
    }

    /// Bytes on the host that are there once memory has moved, until the process ends: pinned memory that the library's kernel writes digests to,
    /// for each GPU that memory moved for, served by the simulated driver from a piece of its smallest size. A bare run has `used` as it is.
    pub fn without_its_own(self, used: u64, gpus: u64) -> u64 {
        const PIECE: u64 = 2 << 20;
        let moves = std::env::var_os("GPUPOOL_MOVE").is_some();
        if self == Side::Shim && moves { used.saturating_sub(gpus * PIECE) } else { used }
    }

    /// Pooled memory can be taken and freed while a stream is being captured, in every mode. Bare, both calls fail with 900
    /// in the modes global and thread-local, and break the capture. A program that does it works under the shim, so bare
    /// the calls are left out, and nothing else of the scene is. In mode relaxed both work on both sides.
    pub fn may_allocate_in_capture(self, service: Service, mode: i32) -> bool {
        const RELAXED: i32 = 2;
        mode == RELAXED || (self == Side::Shim && service == Service::Pool)
    }
}

/// Pointer attributes that are the same: context, memory type, device and host pointer, GPU, first byte, size, mapped. The
/// others are not asked:
/// * buffer id (7): unique on either side, and no number is promised;
/// * managed (8), synchronous memory operations (6): in mode managed, memory of `cuMemAlloc` is managed, and says so;
/// * legacy IPC (10): pooled memory is shared in gpupool's own way and answers 0, so that libraries choose the other way;
/// * allowed handle types, GPUDirect RDMA (14, 15), mempool (17), size and base of the mapping (18, 19), memory block id
///   (20): they describe the physical memory behind a block, which is another one.
///
/// How much memory is free is asked and not compared either: a pool answers for all its GPUs.
pub const ATTRIBUTES: [i32; 8] = [1, 2, 3, 4, 9, 11, 12, 13];

/// In mode managed, memory of `cuMemAlloc` is managed memory also where a program asks what only host memory can answer
/// (the host pointer), gives advice, or shares it (managed memory has no IPC handle).
pub fn passes_for_plain(service: Service) -> bool {
    service != Service::Managed
}

/// A handle that its GPU had no room for is placed elsewhere, and the program is told the GPU that it asked for. Whoever
/// imports the descriptor of such a handle never asked, and is told where the memory is: not compared with `asked`, and
/// attributes of memory with such a handle are not asked at all.
pub fn place_told(imported: bool, found: Location, asked: Location) -> Location {
    if imported { asked } else { found }
}

/// Flags of pinned memory without the portable one: a real driver cuts small allocations from shared pages and tells that flag of who asked for the pages first,
/// bare as well, so that it is not the same in two runs.
pub fn flags_told(flags: u32) -> u32 {
    const PORTABLE: u32 = 1;
    flags & !PORTABLE
}
