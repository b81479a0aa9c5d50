//! Types that several events have in common.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Bytes at one place over the life of a process, in [`ProcessExit`](crate::ProcessExit).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacePeak {
    /// `gpu0`, `host0`.
    pub place: String,
    /// Bytes the pool holds there now, used or not.
    pub held: u64,
    /// The most bytes of live blocks there at any moment, and of memory that the program made itself (`cuMemCreate`), as far as the limit counts that.
    pub peak_used: u64,
    /// The most bytes the pool was allowed to hold there at any moment; absent where only the driver limits it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// Bytes at one place at one moment, in [`PoolLevel`](crate::PoolLevel).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceLevel {
    /// `gpu0`, `host0`.
    pub place: String,
    /// Bytes the pool holds there, used or not.
    pub held: u64,
    /// Bytes of live blocks there.
    pub used: u64,
}

/// One place when the program was told OUT_OF_MEMORY, in [`OutOfMemory`](crate::OutOfMemory). All in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceAtRefusal {
    /// `gpu0`, `host0`.
    pub place: String,
    /// The GPU's memory; absent for the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// The most that the pool may hold there.
    pub limit: u64,
    /// What the pool held there, used or not.
    pub held: u64,
    /// Live blocks there.
    pub used: u64,
    /// Memory that the program made itself (`cuMemCreate`).
    pub own: u64,
    /// The contexts of this process.
    pub contexts: u64,
    /// What has to stay free there (`GPUPOOL_RESERVE`).
    pub reserve: u64,
    /// What has to stay free there for somebody's context, whatever the reserve: on a GPU that is only borrowed from. Absent where that is nothing.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub for_context: u64,
    /// What the system called free there, the reserve included; absent where nobody told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free: Option<u64>,
    /// What was neither free nor of these: other processes, and what the driver made for this one. Absent where nobody told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub others: Option<u64>,
    /// The part of the request that there was room for here.
    pub room: u64,
    /// Why it was not looked at: `not listed` (`GPUPOOL_DEVICES`), `another rank's`, `out of reach`, `not lent` (a limit of 0), `drained`
    /// (`gpupool drain`), `too large` (the host, for a handle that is larger than [`OutOfMemory`](crate::OutOfMemory)'s `largest_whole`).
    /// Logs of 0.2.0 before that have `no handles` of the host and any handle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out: Option<String>,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

impl PlaceAtRefusal {
    /// What has to stay free there.
    pub fn kept_free(&self) -> u64 {
        self.reserve.max(self.for_context)
    }
}

/// Who held memory when the program was told OUT_OF_MEMORY.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderAtRefusal {
    /// `device`, or `pinned` for pinned host memory.
    pub memory: String,
    /// Where in the program it was asked for; absent where that was not looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub site: Option<Site>,
    /// What the program calls it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Blocks.
    pub blocks: u64,
    /// Bytes asked for in them.
    pub bytes: u64,
    /// Bytes of them on other GPUs than the one that they were asked for on.
    pub on_peers: u64,
    /// Bytes of them on the host.
    pub on_host: u64,
    /// Bytes of blocks that were not looked at, and were counted here because the place last asked for as many bytes.
    pub guessed: u64,
}

/// What one process was asked for and gave, in [`RecallAsk`](crate::RecallAsk).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskedOf {
    /// Its number.
    pub pid: u32,
    /// Bytes that it was asked for.
    pub bytes: u64,
    /// Bytes that it says it freed.
    pub freed: u64,
    /// What it answered last, unless that was memory: `nothing` (it had none to give), `silent` (it did not answer in time), `busy` (it was answering those who had come earlier), `stopped`,
    /// `ended` (what it had is free), or `refused: ` and its own words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// A setting that would have made room.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remedy {
    /// Its name, `GPUPOOL_HOST_LIMIT`; or a command that takes something back, `gpupool undrain`.
    pub setting: String,
    /// A value for it, or what the command is for.
    pub value: String,
    /// Bytes of room that it would have brought, at that moment.
    pub gain: u64,
    /// Whether that alone would have been enough.
    pub enough: bool,
    /// What else is to be known of it, one sentence.
    pub note: String,
}

impl Remedy {
    /// As somebody writes it: `GPUPOOL_HOST_LIMIT=8GiB`, `gpupool undrain 1`.
    pub fn said(&self) -> String {
        let between = if self.setting.contains(' ') { ' ' } else { '=' };
        format!("{}{between}{}", self.setting, self.value)
    }
}

/// What lies at some addresses of the pool now and did not before, in [`PoolMap`](crate::PoolMap).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapChange {
    /// The first of them.
    pub address: u64,
    /// How many.
    pub bytes: u64,
    /// `gpu0`, `host0`; absent where nothing is mapped any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
}

/// A part of a block, in [`BlockPlaced`](crate::BlockPlaced).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceBytes {
    /// `gpu0`, `host0`.
    pub place: String,
    /// Bytes of the block there.
    pub bytes: u64,
}

/// A rank of a job that has a context on a GPU: what shows whether several ranks share that GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankOnGpu {
    /// The GPU, by the rank's own numbering; another rank may call it otherwise.
    pub device: u32,
    /// The rank's number among those of its job on its host.
    pub local_rank: u32,
    /// How many ranks of the job there are on the host, where the launcher says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_ranks: Option<u32>,
    /// What tells the job from others on the host, where the launcher says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// The host's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// GPUs that the process can see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<u32>,
    /// The GPU's UUID, as `GPU-…`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// `CUDA_VISIBLE_DEVICES` as CUDA read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub visible_devices: Option<String>,
    /// Bytes of the GPU's memory that the context took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<u64>,
    /// Where it was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub site: Option<Site>,
}

/// One function of Python on the stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PyFrame {
    /// `co_filename`, as Python has it: absolute for imported modules, as given for scripts.
    pub file: String,
    /// The line that was being run; 0 where Python knows none.
    pub line: u32,
    /// `co_name`: the function without its class, as `traceback` has it.
    pub function: String,
}

/// One native function on the stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NativeFrame {
    /// File of the library or executable.
    pub object: String,
    /// The nearest exported name below the address, as the file spells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symbol: Option<String>,
    /// The address in the file, for `addr2line -e object`; the same whatever address the file is loaded at.
    pub offset: u64,
}

/// Where something happened. Innermost frame first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Site {
    /// Python's frames; none on a thread that Python does not know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub python: Vec<PyFrame>,
    /// Native frames, where there are none of Python or they were asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub native: Vec<NativeFrame>,
    /// There were more frames than were kept.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
}

impl Site {
    /// Neither Python's frames nor native ones.
    pub fn is_empty(&self) -> bool {
        self.python.is_empty() && self.native.is_empty()
    }

    /// The innermost frame of the program's own: past installed packages, the standard library and what Python makes up
    /// (`<frozen …>`). A person can change that line; where there is none, the innermost frame is all there is.
    pub fn program_frame(&self) -> Option<&PyFrame> {
        self.python.iter().find(|frame| frame.is_of_program()).or(self.python.first())
    }
}

impl PyFrame {
    fn is_of_program(&self) -> bool {
        let installed = |part: &str| {
            let version = part.strip_prefix("python3.");
            part == "site-packages"
                || part == "dist-packages"
                || version.is_some_and(|minor| minor.parse::<u8>().is_ok())
        };
        // `<stdin>` and `<string>` are the program's; a notebook's cells have paths.
        !self.file.starts_with("<frozen ") && !self.file.split('/').any(installed)
    }
}

/// `train.py:12 in main`.
impl fmt::Display for PyFrame {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(out, "{} in {}", self.file, self.function),
            line => write!(out, "{}:{line} in {}", self.file, self.function),
        }
    }
}

/// `step in libwork.so+0x1a40`.
impl fmt::Display for NativeFrame {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(symbol) = &self.symbol {
            write!(out, "{symbol} in ")?;
        }
        write!(out, "{}+{:#x}", self.object, self.offset)
    }
}

/// The innermost frame: of Python if there is one, else native.
impl fmt::Display for Site {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.python.first(), self.native.first()) {
            (Some(frame), _) => frame.fmt(out),
            (None, Some(frame)) => frame.fmt(out),
            (None, None) => out.write_str("an unknown place"),
        }
    }
}
