//! How the page lies in its file: C structs in the byte order of the machine, which every reader shares.
//!
//! The beginning of [`Header`], up to `pid`, never changes: by it any version of a reader knows whose page it is and whether
//! its process is gone. For everything else a change is a new [`VERSION`].

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The version of the layout.
pub const VERSION: u32 = 8;
/// The size of a page in bytes, whatever it holds.
pub const BYTES: usize = 64 << 10;
/// The first bytes of every page. A machine of the other byte order does not find them.
pub(crate) const MAGIC: u64 = u64::from_be_bytes(*b"gpupool\n");

/// Rows of a table.
pub(crate) const GPUS: usize = 32;
pub(crate) const PLACES: usize = 32;
pub(crate) const CONTEXTS: usize = 64;
pub(crate) const SITES: usize = 64;
pub(crate) const FINDINGS: usize = 64;
pub(crate) const LABELS: usize = 64;
pub(crate) const LOANS: usize = 64;
const COUNTERS: usize = 32;

/// Where the parts begin.
pub(crate) const STATE: usize = 512;
/// Whether the process takes memory of a GPU that it has no context on, or makes a context, and when it last did: nanoseconds of the monotonic clock, which all processes share, twice, and one more while it does.
/// It is said before and behind, unlike the rest: others see the GPU's memory in use grow, and are to know whose doing it is.
pub(crate) const TOOK: usize = 520;
/// Whether memory of the program comes to GPUs or leaves them at this moment. Said before and behind as well: what moves is in no table before that is over.
pub(crate) const MOVES: usize = 528;
/// A word that changes whenever somebody wants to be heard by the process: it sleeps on the first half (a futex). What it says means
/// nothing, and no reader looks at it.
pub(crate) const BELL: usize = 576;
pub(crate) const COUNTERS_AT: usize = 640;
const LEVELS: usize = 1024;
const CONTEXTS_AT: usize = behind::<Levels>(LEVELS);
const SITES_AT: usize = behind::<Contexts>(CONTEXTS_AT);
const FINDINGS_AT: usize = behind::<Sites>(SITES_AT);
const LABELS_AT: usize = behind::<Findings>(FINDINGS_AT);

/// The first line of the cache behind a group: its count and its value.
const fn behind<T>(at: usize) -> usize {
    (at + size_of::<u64>() + size_of::<T>()).next_multiple_of(64)
}

const _: () = assert!(size_of::<Header>() <= STATE);
const _: () = assert!(COUNTERS_AT + COUNTERS * size_of::<u64>() <= LEVELS);
const _: () = assert!(behind::<Labels>(LABELS_AT) <= BYTES);

/// What [`STATE`] holds.
pub(crate) const RUNNING: u64 = 0;
pub(crate) const ENDED: u64 = 1;

macro_rules! counters {
    ($($(#[$about:meta])* $counter:ident,)*) => {
        /// Numbers that only grow, in their order in the page.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Counter {
            $($(#[$about])* $counter,)*
        }

        impl Counter {
            /// Every counter, in the order in the page.
            pub const ALL: [Counter; [$(Counter::$counter),*].len()] = [$(Counter::$counter),*];
        }
    };
}

counters! {
    /// Blocks that the pool served.
    Allocations,
    /// Blocks of the pool that ended.
    Frees,
    /// Blocks that the pool served from freed memory.
    Reuses,
    /// Bytes of blocks that the pool served.
    AllocatedBytes,
    /// Requests for device memory that the driver served.
    PassedOn,
    /// OUT_OF_MEMORY said once to a program that caches.
    SoftRefusals,
    /// Requests that no place had room for; the driver was asked.
    Refusals,
    /// Blocks that could not be made although there was room; the driver was asked.
    Fallbacks,
    /// Times that freed memory went back to the driver because somebody needed or asked for it.
    Trims,
    /// Bytes that went back to the driver.
    TrimmedBytes,
    /// Bytes of blocks and handles that lay outside their home GPU when they were made, each time that one was.
    SpilledBytes,
    /// Blocks of which another process was given a handle.
    Exports,
    /// Blocks of other processes that were opened.
    Imports,
    /// Times that memory of the pool changed places while the program ran (`GPUPOOL_MOVE`).
    Moves,
    /// Bytes that came to the GPU that uses them from another GPU.
    CameFromPeersBytes,
    /// Bytes that came to the GPU that uses them from the host.
    CameFromHostBytes,
    /// Bytes that left for another GPU than the one that uses them.
    LeftForPeersBytes,
    /// Bytes that left for the host.
    LeftForHostBytes,
    /// Microseconds for which moves held a thread of the program up, beyond the work that the GPU had in front of them.
    MovingMicroseconds,
    /// Microseconds for which moves waited for the work that the GPU had in front of them.
    AwaitingMicroseconds,
    /// Times that moving stopped because the program was slower than before anything moved.
    StopsSlower,
    /// Times that moving stopped because moves took more time than they saved.
    StopsUnpaid,
    /// Moves that were not made because the GPUs did not come to rest.
    StopsNotQuiet,
    /// Moves that were not made because a place had no room, or memory could not be moved.
    StopsNoRoom,
    /// Moves that were not made because the process has made a CUDA graph.
    StopsGraphs,
    /// Moves that were not made because nothing may move in this process, as the log says.
    StopsOff,
    /// Bytes that kernels have read over links from memory on other GPUs and the host, as estimated from some launches.
    FarReadBytes,
    /// Times that the program was suspended (`gpupool suspend`, `GPUPOOL_IDLE_SUSPEND`).
    Suspensions,
    /// Times that it was resumed after that.
    Resumes,
    /// Images of it that are whole (`gpupool checkpoint`).
    Images,
    /// Microseconds for which it was stopped for those images.
    ImageStopMicroseconds,
}

impl Counter {
    /// The byte of the page that this counter begins at.
    pub(crate) fn at(self) -> usize {
        COUNTERS_AT + self as usize * size_of::<u64>()
    }
}

const _: () = assert!(Counter::ALL.len() <= COUNTERS);

/// Text that ends at the first NUL or fills its room.
pub(crate) type Text<const N: usize> = [u8; N];

/// Who the process is.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Header {
    pub magic: u64,
    pub version: u32,
    /// The size of the whole page.
    pub bytes: u32,
    pub boot: [u8; 16],
    pub started: u64,
    pub namespace: u64,
    pub image: u64,
    pub pid: u32,
    /// -1 where there is none.
    pub rank: i32,
    /// Ranks of the job on this host; 0 where that is not known.
    pub world: u32,
    /// As `rank`, of the job on all hosts.
    pub job_rank: i32,
    /// Microseconds since the epoch.
    pub created: u64,
    /// As `world`, of the job on all hosts.
    pub job_world: u32,
    pub reserved: u32,
    pub library: Text<16>,
    pub name: Text<64>,
    pub command: Text<256>,
}

/// A part of the page that is written and read as a whole.
pub(crate) trait Group: FromBytes + IntoBytes + Immutable {
    /// The byte of the page that its count is at; the value is behind that.
    const AT: usize;
    /// For people.
    const NAME: &str;
}

macro_rules! groups {
    ($($group:ident at $at:expr, $name:literal;)*) => {
        $(impl Group for $group {
            const AT: usize = $at;
            const NAME: &str = $name;
        })*
    };
}

groups! {
    Levels at LEVELS, "levels";
    Contexts at CONTEXTS_AT, "contexts";
    Sites at SITES_AT, "call sites";
    Findings at FINDINGS_AT, "findings";
    Labels at LABELS_AT, "labels";
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Levels {
    /// Microseconds since the epoch.
    pub updated: u64,
    pub mode: Text<16>,
    pub live_blocks: u64,
    pub live_bytes: u64,
    pub peak_live_bytes: u64,
    pub pinned_limit: u64,
    pub pinned: u64,
    pub requested: u64,
    pub registered: u64,
    pub peak_pinned: u64,
    pub peak_requested: u64,
    pub near: u64,
    pub on_peers: u64,
    pub on_host: u64,
    pub lost_microseconds: u64,
    /// Below 0 where moving made the program slower.
    pub saved_microseconds: i64,
    /// Microseconds since the epoch; 0 for a program that is not suspended.
    pub suspended: u64,
    /// 0 to 100.
    pub priority: u64,
    pub gpu_count: u32,
    pub place_count: u32,
    /// GPUs that the table has no room for.
    pub more_gpus: u32,
    /// Places that the table has no room for.
    pub more_places: u32,
    pub loan_count: u32,
    /// Loans that the table has no room for.
    pub more_loans: u32,
    pub gpus: [Gpu; GPUS],
    pub places: [Place; PLACES],
    pub loans: [Loan; LOANS],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Loan {
    pub borrower: u32,
    /// 0 or 1.
    pub on_host: u32,
    pub number: u32,
    pub reserved: u32,
    pub bytes: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Gpu {
    pub ordinal: u32,
    pub reserved: u32,
    pub total: u64,
    pub uuid: [u8; 16],
    pub name: Text<64>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Place {
    /// 0: a GPU; 1: the host; 2: a disk.
    pub kind: u32,
    pub number: u32,
    pub limit: u64,
    pub held: u64,
    pub used: u64,
    pub peak_used: u64,
    pub anchored: u64,
    pub own: u64,
    pub reserve: u64,
    /// 0 or 1.
    pub drained: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Contexts {
    pub count: u32,
    pub more: u32,
    pub rows: [Context; CONTEXTS],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Context {
    pub id: u64,
    pub device: u32,
    pub reserved: u32,
    /// The largest number where that is not known.
    pub cost: u64,
    pub launches: u64,
    pub copies: u64,
    pub allocations: u64,
    pub kind: Text<16>,
    pub call: Text<48>,
    pub site: Text<160>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Sites {
    pub count: u32,
    pub more: u32,
    pub rows: [Site; SITES],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Site {
    pub live: u64,
    pub blocks: u64,
    pub total: u64,
    pub memory: Text<16>,
    pub text: Text<152>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Findings {
    pub count: u32,
    pub more: u32,
    pub rows: [Finding; FINDINGS],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Finding {
    /// Microseconds since the epoch.
    pub at: u64,
    /// -1 for none.
    pub device: i32,
    pub reserved: u32,
    pub code: Text<16>,
    pub text: Text<224>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Labels {
    pub count: u32,
    pub more: u32,
    pub rows: [Label; LABELS],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Label {
    pub blocks: u64,
    pub bytes: u64,
    pub near: u64,
    pub on_peers: u64,
    pub on_host: u64,
    /// The largest number where there is none.
    pub budget: u64,
    pub name: Text<64>,
}
