//! What can be told. One table: a row is the type, its name on the wire, what lets it through a filter, and its fields.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::level::{Level, Target};
use crate::shared::{
    AskedOf, HolderAtRefusal, MapChange, PlaceAtRefusal, PlaceBytes, PlaceLevel, PlacePeak, Remedy, Site,
};

/// An event as it is written: every record of it has this name, and the filters of `GPUPOOL_LOG` go by target and level.
pub trait Written: Fields {
    /// Its name on the wire.
    const NAME: &'static str;
    /// What it is about.
    const TARGET: Target;
    /// How much it matters.
    const LEVEL: Level;
}

/// What a line has of its event's own.
pub trait Fields {
    /// Appends the fields to an object that has some: `,"home":0,"bytes":64`. What is not known is left out.
    fn write_fields(&self, line: &mut Vec<u8>);
}

/// A type that a field of an event may have.
trait Field: Serialize {
    fn is_known(&self) -> bool {
        true
    }

    fn write(&self, name: &str, line: &mut Vec<u8>) {
        if self.is_known() {
            let start = line.len();
            line.extend_from_slice(format!(",\"{name}\":").as_bytes());
            if serde_json::to_writer(&mut *line, self).is_err() {
                // A field that has no JSON must not cost the line; none of the types below can fail.
                line.truncate(start);
            }
        }
    }
}

impl<T: Serialize> Field for Option<T> {
    fn is_known(&self) -> bool {
        self.is_some()
    }
}

impl Field for bool {}
impl Field for f64 {}
impl Field for i32 {}
impl Field for u32 {}
impl Field for u64 {}
impl Field for String {}
impl<T: Serialize> Field for Vec<T> {}
impl Field for BTreeMap<String, String> {}
impl Field for Site {}

/// Declares every event as a struct, the enum over them, and the conversion by wire name. A row without target and level is
/// no event of its own: the target and the level are those of whoever says it.
macro_rules! events {
    ($(
        $(#[$doc:meta])*
        $name:ident = $wire:literal $(($target:ident, $level:ident))? {
            $($(#[$field_doc:meta])* $field:ident: $type:ty,)*
        }
    )+) => {
        $(
            $(#[$doc])*
            // Not `Default`: whoever writes one names every field.
            #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
            pub struct $name {
                $($(#[$field_doc])* pub $field: $type,)*
            }

            $(impl Written for $name {
                const NAME: &'static str = $wire;
                const TARGET: Target = Target::$target;
                const LEVEL: Level = Level::$level;
            })?

            impl Fields for $name {
                fn write_fields(&self, line: &mut Vec<u8>) {
                    $(Field::write(&self.$field, stringify!($field), line);)*
                }
            }
        )+

        /// One event, by its type.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Event {
            $(#[doc = concat!("`", $wire, "`")] $name($name),)+
            /// An event of another version of the writer, kept as it came.
            Other {
                /// Its name on the wire.
                name: String,
                /// Its fields.
                fields: Map<String, Value>,
            },
        }

        impl Event {
            /// Every name this version knows.
            pub const NAMES: &[&str] = &[$($wire),+];

            /// The name on the wire.
            pub fn name(&self) -> &str {
                match self {
                    $(Event::$name(_) => $wire,)+
                    Event::Other { name, .. } => name,
                }
            }

            /// The event called `name` with these fields; those it does not have are passed over.
            ///
            /// # Errors
            /// A known event lacks a field, or a field has another type.
            pub(crate) fn from_fields(name: &str, fields: Map<String, Value>) -> serde_json::Result<Event> {
                match name {
                    $($wire => serde_json::from_value(Value::Object(fields)).map(Event::$name),)+
                    _ => Ok(Event::Other { name: name.to_owned(), fields }),
                }
            }
        }
    };
}

events! {
    /// The process used CUDA for the first time. A second one of the same process comes of `exec`: another program, whose
    /// records these are from here on. The one before did not reach its end, and was not killed either.
    ProcessStart = "process.start" (Process, Info) {
        /// Version of gpupool.
        version: String,
        /// `GPUPOOL_MODE` as it holds.
        mode: String,
        /// Path of the executable.
        exe: String,
        /// Its number among the ranks of its job on this host, where a launcher says so.
        local_rank: Option<u32>,
        /// How many ranks of its job there are on this host, where a launcher says so.
        job_ranks: Option<u32>,
        /// What tells the job from others on this host, where the launcher says.
        job: Option<String>,
        /// The host's name, where this is a rank.
        host: Option<String>,
    }
    /// The process ends in order; a killed one leaves no such line.
    ProcessExit = "process.exit" (Process, Info) {
        /// One entry a place the pool could use, also where it used nothing.
        peak: Vec<PlacePeak>,
        /// Blocks the program never freed.
        live_blocks: u64,
        /// Bytes of the blocks that the program never freed.
        live_bytes: u64,
        /// Handles of the program's own memory (`cuMemCreate`) that it never released, or never unmapped.
        #[serde(default)]
        live_handles: u64,
        /// Bytes of the memory behind them.
        #[serde(default)]
        live_handle_bytes: u64,
        /// Pooled allocations in the life of the process.
        allocations: u64,
        /// Pooled allocations that were served from memory freed before.
        reuses: u64,
    }
    /// There is no more room for the log (disk, quota, RLIMIT_FSIZE). The lines that follow are lost, until `log.lost` says
    /// how many there were; where this is the last record, nothing is known of how the process ended.
    LogFull = "log.full" (Log, Warn) {
        /// What the system says.
        why: String,
    }
    /// Lines of this process are missing before this one.
    LogLost = "log.lost" (Log, Warn) {
        /// How many, since the last such record.
        lines: u64,
        /// What the system said.
        why: String,
    }
    /// The pool reserved its address space, at the first pooled allocation.
    PoolOpen = "pool.open" (Memory, Info) {
        /// First address of the reservation.
        base: u64,
        /// Bytes of the reservation.
        bytes: u64,
        /// The places that lend.
        places: Vec<String>,
    }
    /// The pool took new memory for a block.
    PoolGrow = "pool.grow" (Memory, Info) {
        /// GPU that was current.
        home: u32,
        /// Bytes of the block.
        bytes: u64,
        /// Bytes of it on other GPUs.
        on_peers: u64,
        /// Bytes of it on the host.
        on_host: u64,
        /// The number of the place that asked for it (`memory.site`).
        site: Option<u64>,
    }
    /// A place in the program that asks for pooled memory, the first time that it is met. Others name it by its number; a line of
    /// another thread may do so shortly before this one.
    MemorySite = "memory.site" (Memory, Info) {
        /// Its number in this log, from 1.
        id: u64,
        /// Where.
        site: Site,
    }
    /// A block does not lie on its home GPU alone.
    PoolSpill = "pool.spill" (Memory, Info) {
        /// GPU that was current.
        home: u32,
        /// Bytes of the block.
        bytes: u64,
        /// Bytes of it on other GPUs.
        on_peers: u64,
        /// Bytes of it on the host.
        on_host: u64,
        /// The number of the place that asked for it (`memory.site`).
        site: Option<u64>,
    }
    /// A handle of the program's own (`cuMemCreate`), or a part of it, was made elsewhere than it asked for.
    VmmSteer = "vmm.steer" (Memory, Info) {
        /// GPU that it was asked for on.
        home: u32,
        /// Bytes that were made elsewhere.
        bytes: u64,
        /// The place where they are.
        place: String,
        /// `full` (the driver had no memory there), or `limit` (`GPUPOOL_LIMIT`).
        why: String,
    }
    /// Somebody holds a context on a GPU that only lends memory, so that it keeps its clocks (`GPUPOOL_LENDERS=awake`).
    LenderAwake = "lender.awake" (Memory, Info) {
        /// The GPU.
        gpu: u32,
    }
    /// Free memory went back to the driver.
    PoolTrim = "pool.trim" (Memory, Info) {
        /// Bytes returned.
        bytes: u64,
        /// The call that needed it; or `idle`, `fell` or `others`, where it went by itself: nobody had used it for
        /// `GPUPOOL_IDLE`, the program had freed most of what it held, or its GPU was nearly full and others used it.
        why: String,
    }
    /// Chunks of which the program had freed a large part were cut anew (`GPUPOOL_MOVE`): what is in use got chunks of its own, at the
    /// same addresses and the same place, so that the rest is free for larger blocks or the driver.
    PoolRepack = "pool.repack" (Memory, Info) {
        /// Where, as `gpu1` or `host0`.
        place: String,
        /// A `request` that would have been refused or gone farther away, `gpupool_trim`, or `stress`.
        why: String,
        /// Bytes that came free.
        freed: u64,
        /// Bytes in use that were copied for it.
        copied: u64,
        /// Bytes of them that are elsewhere since.
        away: u64,
        /// What it took, without the wait for the work in front of it.
        microseconds: u64,
    }
    /// The program was told OUT_OF_MEMORY.
    PoolRefuse = "pool.refuse" (Memory, Info) {
        /// GPU that was current.
        home: u32,
        /// Bytes asked for.
        bytes: u64,
        /// `soft` (so that a cache is freed), `full`, `far` (`GPUPOOL_FAR_LIMIT`), or the driver's error.
        why: String,
        /// Bytes for which there was no place, when the pool was full.
        missing: Option<u64>,
    }
    /// The program was told OUT_OF_MEMORY, and neither a cache nor the driver helps: who held what, what would have fit where, and which
    /// setting would have helped. Written for the first refusal of a process, the second, the fourth and so on, and for each 1024th.
    OutOfMemory = "memory.out" (Memory, Info) {
        /// Which refusal of this process it is, from 1.
        number: u64,
        /// GPU that the memory was for.
        home: u32,
        /// Bytes asked for.
        bytes: u64,
        /// `block` (`cuMemAlloc`), `handle` (`cuMemCreate`), `stream` (stream-ordered) or `context` (what one takes, about).
        kind: String,
        /// Why there was none, in words.
        why: String,
        /// Bytes of the largest request that there was room for.
        fits: u64,
        /// Of a handle: the largest that lies whole on another place. A larger one is made of parts, which lie on GPUs alone.
        largest_whole: Option<u64>,
        /// Where in the program.
        site: Option<Site>,
        /// Every place of the machine that the process knows of.
        places: Vec<PlaceAtRefusal>,
        /// Who held most, by place in the program and by name.
        holders: Vec<HolderAtRefusal>,
        /// Further holders, and what they held.
        more_holders: u64,
        /// Bytes that those held.
        more_bytes: u64,
        /// Bytes of blocks of less than a MiB, of which nobody notes who holds them.
        small: u64,
        /// Bytes that the program held in blocks of the pool.
        live_bytes: u64,
        /// Bytes of host memory that were pinned.
        pinned: u64,
        /// What would have helped, the best first; empty where no setting would.
        remedies: Vec<Remedy>,
    }
    /// The pool could not serve and the driver was asked.
    PoolFallback = "pool.fallback" (Memory, Warn) {
        /// GPU that was current.
        home: u32,
        /// Bytes asked for.
        bytes: u64,
        /// What failed.
        why: String,
    }
    /// A place gives no memory at all; the pool goes on without it.
    PoolUnavailable = "pool.unavailable" (Memory, Warn) {
        /// The place.
        place: String,
        /// The driver's answer.
        error: String,
    }
    /// A pooled allocation.
    BlockAllocate = "block.allocate" (Memory, Debug) {
        /// What the program got.
        address: u64,
        /// Bytes it asked for.
        bytes: u64,
        /// GPU that was current.
        home: u32,
        /// Whether the memory had been freed before.
        reused: bool,
        /// Bytes of it on other GPUs.
        on_peers: u64,
        /// Bytes of it on the host.
        on_host: u64,
        /// The number of the place that asked for it (`memory.site`).
        site: Option<u64>,
    }
    /// Where a block lies that is not on its home GPU alone: after `block.allocate`, and after some of it moved.
    BlockPlaced = "block.placed" (Memory, Debug) {
        /// Its address.
        address: u64,
        /// Bytes of the block at each place that has some.
        places: Vec<PlaceBytes>,
    }
    /// The program had a part of a pooled block moved.
    BlockMove = "block.move" (Memory, Info) {
        /// First byte of the range that was to go.
        address: u64,
        /// Bytes that lie at the place now and did not before.
        bytes: u64,
        /// The GPU that was current when the block was allocated.
        home: u32,
        /// Where to, as `gpu1` or `host0`.
        place: String,
        /// Bytes of the range that stayed elsewhere.
        stayed: u64,
        /// What the program calls the block.
        #[serde(default)]
        label: Option<String>,
    }
    /// The program was suspended (`gpupool suspend`): it waits where it submits work, and its memory has left the GPUs.
    ProgramSuspend = "program.suspend" (Memory, Info) {
        /// Bytes that left.
        bytes: u64,
        /// Bytes that could not leave.
        stayed: u64,
        /// Where they were to go: `peers`, `host`, `anywhere` of these, or the path of a folder.
        to: String,
        /// Bytes that the files in that folder take.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stored: Option<u64>,
        /// What it took, with the wait for the work in front of it.
        microseconds: u64,
        /// Of that, the wait.
        #[serde(default)]
        waited_microseconds: u64,
    }
    /// The program goes on (`gpupool resume`).
    ProgramResume = "program.resume" (Memory, Info) {
        /// Bytes that came back.
        bytes: u64,
        /// Bytes that lie elsewhere still, because there was no room.
        stayed: u64,
        /// What it took.
        microseconds: u64,
    }
    /// An image of the program's GPU memory was written (`gpupool checkpoint`).
    ProgramCheckpoint = "program.checkpoint" (Memory, Info) {
        /// The folder.
        folder: String,
        /// The image's number there.
        generation: u64,
        /// Bytes of memory in it.
        bytes: u64,
        /// Bytes that it takes on the disk.
        stored: u64,
        /// Bytes of these that were written now; the others are of older images.
        fresh: u64,
        /// Bytes of memory that were the same in the image before, and were not written again.
        unchanged: u64,
        /// Bytes of memory that were the same, and were written again as what the image before had of them was damaged.
        #[serde(default)]
        damaged: u64,
        /// Bytes that are not in it: of the program's own memory, what could not be read, and what the driver made for want of room in the pool.
        left_out: u64,
        /// Bytes that were not copied, as the GPUs saw that they are what the image before has.
        #[serde(default)]
        not_copied: u64,
        /// Bytes that were copied to GPUs while the program was stopped, so that it need not wait for the disk.
        #[serde(default)]
        to_gpus: u64,
        /// Bytes that were copied to the host's memory, as GPUs had no room.
        #[serde(default)]
        to_host: u64,
        /// Bytes for which there was no room elsewhere, so that the program waited for the disk.
        in_stop: u64,
        /// For how long the program was stopped.
        stopped_microseconds: u64,
        /// What all of it took, with the wait for the work in front of it.
        microseconds: u64,
    }
    /// Memory that the program named came back from an image (`GPUPOOL_RESTORE`).
    BlockRestore = "block.restore" (Memory, Info) {
        /// Its first byte.
        address: u64,
        /// How many.
        bytes: u64,
        /// What the program calls it.
        name: String,
        /// The image's number in its folder.
        generation: u64,
        /// What it took.
        microseconds: u64,
    }
    /// At the end of a program that was to have memory back from an image: what came.
    ProgramRestore = "program.restore" (Memory, Info) {
        /// The folder.
        folder: String,
        /// The image's number there; 0 where the program has named nothing.
        generation: u64,
        /// Named ranges that came back.
        blocks: u64,
        /// Their bytes.
        bytes: u64,
        /// Names in the image that the program gave to nothing.
        not_asked: u64,
    }
    /// Memory left a GPU that is drained (`gpupool drain`), and nothing new goes there.
    GpuDrain = "gpu.drain" (Memory, Info) {
        /// The GPU.
        device: u32,
        /// Its UUID, `GPU-…`.
        uuid: String,
        /// Bytes that left.
        bytes: u64,
        /// Bytes of the pool's and of the program's own memory that are still there.
        stayed: u64,
        /// What it took.
        microseconds: u64,
    }
    /// Others were asked for memory of a GPU that an allocation lacked.
    RecallAsk = "recall.ask" (Memory, Info) {
        /// The GPU.
        device: u32,
        /// Bytes that were lacking.
        bytes: u64,
        /// Bytes that were asked for beside those, because it asked for more and more.
        #[serde(default)]
        ahead: u64,
        /// Bytes that they say they freed.
        freed: u64,
        /// How many processes were asked, each counted once.
        asked: u32,
        /// How many of these had not answered in time.
        silent: u32,
        /// How long the allocation waited for it.
        microseconds: u64,
        /// Who was asked, one row a process, by number; none in logs of earlier versions.
        #[serde(default)]
        whom: Vec<AskedOf>,
    }
    /// Memory left a GPU because somebody else needs it.
    RecallGive = "recall.give" (Memory, Info) {
        /// The GPU.
        device: u32,
        /// Bytes that were asked for.
        bytes: u64,
        /// Bytes that are free now.
        freed: u64,
        /// Who asked or came, if that is one process.
        to_pid: Option<u32>,
        /// Why: `asked`, `context` (of a program without gpupool), `works` (somebody works on a GPU that was lent while nobody did), `reserve` (less was free than is kept free), `growth`
        /// (`recall.sign`).
        why: String,
        /// What it took.
        microseconds: u64,
    }
    /// The memory in use of a GPU that this process borrows from, and where nobody has a context, grew by none of the programs under gpupool: somebody is about to come.
    RecallSign = "recall.sign" (Memory, Info) {
        /// The GPU.
        device: u32,
        /// Bytes by which it grew.
        bytes: u64,
        /// Bytes that this process has there.
        borrowed: u64,
        /// Whether all of these leave. Not where nobody came behind such a sign lately.
        leaves: bool,
    }
    /// What had left a GPU for plain memory of the host, so that it was free at once, is memory of the host that GPUs reach, and the program goes on.
    HostSettle = "host.settle" (Memory, Info) {
        /// Bytes that left.
        bytes: u64,
        /// How long the program stood still for it, from the moment when the first of it had left.
        microseconds: u64,
    }
    /// Whoever watches over the machine's memory said that it is short (`MEMORY_PRESSURE_WATCH`), and what could be spared was given back.
    MemoryPressure = "memory.pressure" (Memory, Info) {
        /// Bytes of the pool's freed memory, on GPUs and on the host, and of plain memory that a suspended program was in.
        bytes: u64,
        /// Bytes of freed pinned memory.
        pinned: u64,
    }
    /// A GPU is drained no more (`gpupool undrain`).
    GpuUndrain = "gpu.undrain" (Memory, Info) {
        /// The GPU.
        device: u32,
        /// Its UUID, `GPU-…`.
        uuid: String,
        /// Bytes that came back to it.
        bytes: u64,
        /// Bytes that had left it and stay elsewhere.
        stayed: u64,
        /// What it took.
        microseconds: u64,
    }
    /// A setting was changed while the program runs (`gpupool set`).
    SettingChange = "setting.change" (Memory, Info) {
        /// Its name, `GPUPOOL_LIMIT`.
        name: String,
        /// What it said before; empty where it said nothing.
        old: String,
        /// What it says now.
        new: String,
    }
    /// Memory came near the GPU that uses it, and other memory left it for that (`GPUPOOL_MOVE`).
    TierSwap = "tier.swap" (Memory, Debug) {
        /// That GPU.
        home: u32,
        /// What it was worth it for: the next `launch`, what launches use most where the program waits (`idle`), or `stress`.
        why: String,
        /// Bytes that came near.
        bytes_in: u64,
        /// Bytes that left.
        bytes_out: u64,
        /// Bytes that could not move: on chunks that must stay, or that others stand on, too.
        stayed: u64,
        /// What it took, without the wait for the work in front of it.
        microseconds: u64,
        /// For how long of that the program was stopped: the copies and the mapping.
        #[serde(default)]
        stopped: u64,
        /// Of the bytes that left, those that had not changed since they came, and so were not copied.
        #[serde(default)]
        as_it_came: u64,
    }
    /// Nothing moves for a GPU any more, until the program does something else: it did not pay.
    TierStop = "tier.stop" (Memory, Info) {
        /// That GPU.
        home: u32,
        /// What was found, in words.
        why: String,
    }
    /// What all moves of the process (`GPUPOOL_MOVE`) came to: told at its end, where there were any.
    TierTotal = "tier.total" (Memory, Info) {
        /// How often memory moved.
        times: u64,
        /// Bytes that came near the GPU that uses them.
        came: u64,
        /// Bytes that left for them.
        left: u64,
        /// Seconds that the moves took, without the waits for the work in front of them.
        took: f64,
        /// Seconds that launches took less than where memory first lay, as estimated; below zero where they took longer.
        saved: f64,
    }
    /// What a function is reckoned to have lost by far memory so far: told at the end of the process, and before that ever more seldom.
    TierReader = "tier.reader" (Memory, Info) {
        /// The GPU that runs it.
        home: u32,
        /// Its name, as its module has it.
        function: String,
        /// Launches that named far memory, as estimated from those that were looked at.
        launches: u64,
        /// Bytes on other GPUs that the last one of those named.
        on_peers: u64,
        /// Bytes on the host that it named.
        on_host: u64,
        /// Launches with far memory that were timed.
        timed: u32,
        /// How often far bytes crossed the link in one launch, in their mean; absent where none was timed.
        passes: Option<f64>,
        /// Seconds lost, as estimated.
        lost: f64,
        /// Why that memory was not moved, in words.
        why: String,
        /// Where the program launched it.
        site: Option<Site>,
    }
    /// More of the time was lost by far memory than `GPUPOOL_FAR_LIMIT` says, and nothing came near.
    TierLimit = "tier.limit" (Memory, Warn) {
        /// The GPU whose kernels lose it.
        home: u32,
        /// The part of the time, 0 to 1, as estimated.
        share: f64,
        /// The limit, 0 to 1.
        limit: f64,
        /// Whether what would be far is refused from now on.
        refuses: bool,
        /// The function that loses most.
        function: String,
        /// Why nothing came near, in words.
        why: String,
    }
    /// The program named a pooled block.
    BlockLabel = "block.label" (Memory, Debug) {
        /// Its address.
        address: u64,
        /// Bytes asked for when it was allocated.
        bytes: u64,
        /// The GPU that was current when it was allocated.
        home: u32,
        /// What it is called now; absent where the name was taken back.
        label: Option<String>,
    }
    /// How much memory has a name, after that changed.
    LabelLevel = "label.level" (Memory, Info) {
        /// The name.
        label: String,
        /// Blocks of that name.
        blocks: u64,
        /// Bytes asked for in them.
        bytes: u64,
        /// How much of them may lie on the GPU that asked for them.
        budget: Option<u64>,
    }
    /// A pooled block was freed.
    BlockFree = "block.free" (Memory, Debug) {
        /// Its address.
        address: u64,
        /// Bytes asked for when it was allocated.
        bytes: u64,
        /// GPU that was current when it was allocated.
        home: u32,
        /// What the program called it.
        #[serde(default)]
        label: Option<String>,
    }
    /// What the pool holds and uses, after it grew or shrank, or after what is in use changed much.
    PoolLevel = "pool.level" (Memory, Info) {
        /// One entry a place.
        places: Vec<PlaceLevel>,
    }
    /// What lies where in the pool's addresses, as far as that has changed since the last such record.
    PoolMap = "pool.map" (Memory, Debug) {
        /// In address order.
        changes: Vec<MapChange>,
    }
    /// Where live blocks lie, as seen from the GPU that was current when each was allocated: after the pool grew or shrank or memory
    /// moved, from the first block on that lies elsewhere.
    PoolResidence = "pool.residence" (Memory, Info) {
        /// Bytes on that GPU.
        near: u64,
        /// Bytes on other GPUs.
        on_peers: u64,
        /// Bytes on the host.
        on_host: u64,
    }
    /// Pinned host memory was handed to the program, or its own memory registered.
    PinnedAllocate = "pinned.allocate" (Pinned, Debug) {
        /// What the program got or registered.
        address: u64,
        /// Bytes it asked for.
        bytes: u64,
        /// `CU_MEMHOSTALLOC_…` or `CU_MEMHOSTREGISTER_…`.
        flags: u32,
        /// Who pinned it: `pool`, `driver`, or `program` (registered memory is the program's own).
        by: String,
        /// Whether no driver call was needed.
        reused: bool,
    }
    /// Pinned host memory was freed, or unregistered.
    PinnedFree = "pinned.free" (Pinned, Debug) {
        /// Its address.
        address: u64,
        /// Bytes asked for when it was allocated.
        bytes: u64,
        /// Who pinned it: `pool`, `driver`, or `program` (registered memory is the program's own).
        by: String,
    }
    /// What is pinned, after that changed.
    PinnedLevel = "pinned.level" (Pinned, Info) {
        /// Bytes that the process has pinned: the pool's segments, the driver's allocations and registered memory.
        pinned: u64,
        /// Bytes of pinned memory that the program holds, as it asked for them.
        requested: u64,
        /// Bytes of registered memory, which count as `pinned` and as `requested` too.
        registered: u64,
    }
    /// Freed pinned memory went back to the system.
    PinnedReturn = "pinned.return" (Pinned, Info) {
        /// Bytes returned.
        bytes: u64,
        /// `idle`, or who needed it.
        why: String,
    }
    /// What one place in the program did with pinned memory; written at exit, the largest first.
    PinnedSite = "pinned.site" (Pinned, Info) {
        /// How often it allocated or registered. Memory that the pool had ready is counted for the place that last asked
        /// for that size, and every sixteenth time the place is looked at.
        allocations: u64,
        /// Bytes it asked for, all together.
        requested: u64,
        /// Bytes that had to be pinned for it; the rest of `requested` was served from memory pinned before.
        pinned: u64,
        /// The most bytes of its allocations at any moment.
        peak: u64,
        /// Bytes that are still allocated.
        live: u64,
        /// How long the driver took to pin for it.
        seconds: f64,
        /// Where.
        site: Option<Site>,
    }
    /// The driver was initialised: from here on it has read its environment, and a fork breaks it.
    CudaInit = "cuda.init" (Process, Info) {
        /// `CUDA_VISIBLE_DEVICES` at that moment.
        visible_devices: Option<String>,
        /// `CUDA_DEVICE_ORDER` at that moment.
        device_order: Option<String>,
        /// GPUs that the process can see.
        gpus: Option<u32>,
        /// The driver call.
        call: String,
        /// File of the library that called it.
        caller: Option<String>,
        /// Name of the thread.
        thread: String,
        /// Seconds since the process started.
        seconds: f64,
        /// Where.
        site: Option<Site>,
    }
    /// A CUDA context came into being.
    ContextCreate = "context.create" (Context, Info) {
        /// Its number in this log, from 1; 0 in logs that have none.
        #[serde(default)]
        id: u64,
        /// The context's GPU.
        device: u32,
        /// The GPU's PCI address, as `0000:1b:00.0`.
        pci: Option<String>,
        /// The GPU's UUID, as `GPU-…`.
        uuid: Option<String>,
        /// `primary`, `created` (`cuCtxCreate`), `found` (in use, unseen before) or `appeared` (between two calls).
        kind: String,
        /// The driver call that did it, or `appeared between A and B`.
        call: String,
        /// The runtime's name for it, where it can be told.
        runtime_call: Option<String>,
        /// File of the library that called the driver.
        caller: Option<String>,
        /// Name of the thread.
        #[serde(default)]
        thread: String,
        /// Seconds since the process started.
        #[serde(default)]
        seconds: f64,
        /// Bytes of the GPU's memory it took.
        cost: Option<u64>,
        /// Others use that GPU too, so `cost` may hold something of theirs.
        #[serde(default)]
        approximate: bool,
        /// Where.
        site: Option<Site>,
    }
    /// What was done in a context; written when it goes, and at exit.
    ContextUse = "context.use" (Context, Info) {
        /// The context's number in this log; 0 in logs that have none.
        id: u64,
        /// The context's GPU.
        device: u32,
        /// `primary`, `created`, `found` or `appeared`, as `context.create` told it.
        kind: String,
        /// Allocations, pooled or not.
        allocations: u64,
        /// The most bytes that were allocated at any moment.
        bytes_peak: u64,
        /// Kernels launched.
        launches: u64,
        /// Copies and fills.
        copies: u64,
        /// Modules loaded.
        modules: u64,
        /// Seconds from the process's start to the last allocation, launch, copy or load; absent where there was none.
        last_use: Option<f64>,
    }
    /// A CUDA context is gone.
    ContextDestroy = "context.destroy" (Context, Info) {
        /// The context's number in this log; 0 in logs that have none.
        #[serde(default)]
        id: u64,
        /// The context's GPU.
        device: u32,
        /// `primary`, `created`, `found` or `appeared`, as `context.create` told it.
        kind: String,
        /// The driver call that did it.
        call: String,
    }
    /// `GPUPOOL_CONTEXTS=deny` made the call fail.
    ContextDenied = "context.denied" (Context, Info) {
        /// The GPU that was to get a context.
        device: u32,
        /// The driver call.
        call: String,
        /// Where.
        site: Option<Site>,
    }
    /// Code was loaded.
    ModuleLoad = "module.load" (Module, Info) {
        /// Its number in this log, from 1.
        id: u64,
        /// The GPU that was current; absent where none was, as a library may be loaded before there is a context.
        device: Option<u32>,
        /// The driver call.
        call: String,
        /// What the image is: `cubin`, `ptx`, `fatbin`, `link`, or `file` where it could not be read.
        kind: String,
        /// The file it came from.
        path: Option<String>,
        /// Bytes of the image.
        bytes: Option<u64>,
        /// Kernels in the image.
        kernels: Option<u32>,
        /// How long the call took.
        seconds: f64,
        /// Bytes of the GPU's memory it took; negative where others gave some back meanwhile.
        memory: Option<i64>,
        /// Kernels are loaded when they are first used.
        #[serde(default)]
        lazy: bool,
        /// The image uses `malloc` on the device.
        #[serde(default)]
        uses_malloc: bool,
        /// File of the library that called the driver.
        caller: Option<String>,
        /// Name of the thread.
        #[serde(default)]
        thread: String,
        /// Where.
        site: Option<Site>,
    }
    /// Code is gone.
    ModuleUnload = "module.unload" (Module, Info) {
        /// The module's number in this log.
        id: u64,
        /// The GPU that was current when it was loaded; absent where none was.
        device: Option<u32>,
        /// The driver call.
        call: String,
    }
    /// A limit of a context was set.
    LimitSet = "limit.set" (Context, Info) {
        /// The context's GPU.
        device: u32,
        /// `stack_size`, `printf_fifo_size`, `malloc_heap_size` and so on: `CUlimit` in lower case.
        limit: String,
        /// What was asked for, mostly bytes.
        value: u64,
        /// `CUresult`.
        result: i32,
        /// `program` or `gpupool`.
        by: String,
        /// Where, if it was the program.
        site: Option<Site>,
    }
    /// The program changed a variable that only counts until the driver is initialised.
    EnvironmentSet = "environment.set" (Process, Info) {
        /// `CUDA_VISIBLE_DEVICES` or `CUDA_DEVICE_ORDER`.
        name: String,
        /// The new value; absent when the variable was removed.
        value: Option<String>,
        /// `setenv`, `putenv` or `unsetenv`.
        call: String,
        /// Where.
        site: Option<Site>,
    }
    /// Something a person should change. [`finding`](crate::finding) knows the code.
    FindingMade = "finding" (Finding, Warn) {
        /// `GP001` and so on.
        code: String,
        /// The GPU it is about.
        device: Option<u32>,
        /// One sentence: what was found.
        what: String,
        /// Where.
        site: Option<Site>,
        /// What else is known, by name: `value_then`, `value_now`.
        #[serde(default)]
        facts: BTreeMap<String, String>,
    }
    /// `cuIpcGetMemHandle` on a pooled block, the first for that block.
    IpcExport = "ipc.export" (Ipc, Info) {
        /// The block's address.
        address: u64,
        /// Bytes of the block.
        bytes: u64,
        /// Pieces of physical memory that it lies in.
        chunks: u64,
    }
    /// `cuIpcOpenMemHandle` on a pooled block of another process, the first time.
    IpcImport = "ipc.import" (Ipc, Info) {
        /// The address here.
        address: u64,
        /// Bytes of the block.
        bytes: u64,
        /// Pieces of physical memory that it lies in.
        chunks: u64,
        /// Process id of the exporter.
        exporter: u32,
        /// How long it took.
        seconds: f64,
    }
    /// `cuIpcCloseMemHandle`, the last for that block: it is no longer mapped here.
    IpcClose = "ipc.close" (Ipc, Info) {
        /// The address it had here.
        address: u64,
        /// Bytes of the block.
        bytes: u64,
    }
    /// Pooled memory was not shared.
    IpcFailed = "ipc.failed" (Ipc, Warn) {
        /// `export`, `import`, or `serve`: the exporter did not answer somebody's import.
        what: String,
        /// Why.
        why: String,
    }
    /// A hooked call, at level trace.
    Call = "call" (Call, Trace) {
        /// Name of the driver's export.
        api: String,
        /// `CUresult`.
        result: i32,
    }
    /// gpupool itself failed; the record's message says how. The pool takes no new allocations from here on.
    Panic = "panic" (Process, Error) {
        /// Source file and line.
        place: Option<String>,
        /// The hook it happened in.
        api: Option<String>,
    }
    /// A message with nothing to count.
    Note = "note" {
        /// The condition that is told about once.
        about: Option<String>,
    }
}
