//! What can be told. One table: a row is the type, its name on the wire and its fields.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Declares every event as a struct, the enum over them, and the conversion by wire name.
macro_rules! events {
    ($($(#[$doc:meta])* $name:ident = $wire:literal { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })+) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
            pub struct $name {
                $($(#[$field_doc])* pub $field: $type,)*
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

            /// The fields as they go on the wire.
            pub(crate) fn fields(&self) -> serde_json::Result<Map<String, Value>> {
                let value = match self {
                    $(Event::$name(event) => serde_json::to_value(event)?,)+
                    Event::Other { fields, .. } => return Ok(fields.clone()),
                };
                Ok(match value {
                    Value::Object(fields) => fields.into_iter().filter(|(_, value)| !value.is_null()).collect(),
                    _ => Map::new(),
                })
            }
        }
    };
}

/// Bytes at one place, in [`ProcessExit`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacePeak {
    /// `gpu0`, `host0`.
    pub place: String,
    /// Bytes the pool holds there now, used or not.
    pub held: u64,
    /// The most bytes of live blocks there at any moment.
    pub peak_used: u64,
    /// The most bytes the pool may hold there; absent where only the driver limits it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

events! {
    /// The process used CUDA for the first time.
    ProcessStart = "process.start" {
        /// Version of gpupool.
        version: String,
        /// `GPUPOOL_MODE` as it holds.
        mode: String,
        /// Path of the executable.
        exe: String,
        /// `cuDriverGetVersion`, for example 13000.
        driver_version: Option<u32>,
        /// GPUs the process can see, where it has asked yet.
        gpus: Option<u32>,
    }
    /// The process ends in order; a killed one leaves no such line.
    ProcessExit = "process.exit" {
        /// One entry a place the pool could use, also where it used nothing.
        peak: Vec<PlacePeak>,
        /// Blocks the program never freed.
        live_blocks: u64,
        /// Their bytes.
        live_bytes: u64,
        /// Pooled allocations in the life of the process.
        allocations: u64,
        /// Those of them served from memory freed before.
        reuses: u64,
    }
    /// The pool reserved its address space, at the first pooled allocation.
    PoolOpen = "pool.open" {
        /// First address of the reservation.
        base: u64,
        /// Its size.
        bytes: u64,
        /// The places that lend.
        places: Vec<String>,
    }
    /// The pool took new memory for a block.
    PoolGrow = "pool.grow" {
        /// GPU that was current.
        home: u32,
        /// Bytes of the block.
        bytes: u64,
        /// Bytes of it on other GPUs.
        on_peers: u64,
        /// Bytes of it on the host.
        on_host: u64,
    }
    /// A block does not lie on its home GPU alone.
    PoolSpill = "pool.spill" {
        /// GPU that was current.
        home: u32,
        /// Bytes of the block.
        bytes: u64,
        /// Bytes of it on other GPUs.
        on_peers: u64,
        /// Bytes of it on the host.
        on_host: u64,
    }
    /// Free memory went back to the driver.
    PoolTrim = "pool.trim" {
        /// Bytes returned.
        bytes: u64,
        /// Who needed it.
        why: String,
    }
    /// The program was told OUT_OF_MEMORY.
    PoolRefuse = "pool.refuse" {
        /// GPU that was current.
        home: u32,
        /// Bytes asked for.
        bytes: u64,
        /// `soft` (so that a cache is freed), `full`, or the driver's error.
        why: String,
        /// Bytes for which there was no place, when the pool was full.
        missing: Option<u64>,
    }
    /// The pool could not serve and the driver was asked.
    PoolFallback = "pool.fallback" {
        /// GPU that was current.
        home: u32,
        /// Bytes asked for.
        bytes: u64,
        /// What failed.
        why: String,
    }
    /// A place gives no memory at all; the pool goes on without it.
    PoolUnavailable = "pool.unavailable" {
        /// The place.
        place: String,
        /// The driver's answer.
        error: String,
    }
    /// A pooled allocation.
    BlockAllocate = "block.allocate" {
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
    }
    /// A pooled block was freed.
    BlockFree = "block.free" {
        /// Its address.
        address: u64,
        /// Bytes asked for when it was allocated.
        bytes: u64,
        /// GPU that was current when it was allocated.
        home: u32,
    }
    /// A CUDA context came into being.
    ContextCreate = "context.create" {
        /// Its GPU.
        device: u32,
        /// `primary` or `created`.
        kind: String,
        /// The driver call that did it.
        call: String,
    }
    /// A CUDA context is gone.
    ContextDestroy = "context.destroy" {
        /// Its GPU.
        device: u32,
        /// `primary` or `created`.
        kind: String,
        /// The driver call that did it.
        call: String,
    }
    /// `cuIpcGetMemHandle` on a pooled block, which has no such handle.
    IpcRefused = "ipc.refused" {
        /// The address asked about.
        address: u64,
        /// Bytes of the block.
        bytes: u64,
    }
    /// A hooked call, at level trace.
    Call = "call" {
        /// Name of the driver's export.
        api: String,
        /// `CUresult`.
        result: i32,
        /// The current GPU, where it is known.
        device: Option<u32>,
    }
    /// gpupool itself failed; the record's message says how. The pool takes no new allocations from here on.
    Panic = "panic" {
        /// Source file and line.
        place: Option<String>,
        /// The hook it happened in.
        api: Option<String>,
    }
    /// The process forked; the child passes every call through.
    Fork = "fork" {
        /// Process that forked.
        parent: u32,
    }
    /// A setting can not be used.
    SettingsProblem = "settings.problem" {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// What was expected.
        reason: String,
    }
    /// A message with nothing to count.
    Note = "note" {
        /// The condition that is told about once.
        about: Option<String>,
    }
}
