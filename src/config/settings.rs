//! The settings of one process, typed.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::choice::{Contexts, Free, Lenders, MemInfo, Mode, Move, Pinned, Placement, Prefetch, Small, Switch, Toggle};
use crate::log_path::LogPath;
use crate::outside::Outside;
use crate::problem::Problem;
use crate::size::{exact_size, format_size, parse_size};

/// What a process was told. Sizes are bytes; `None` is the default that the table describes and only the process can
/// work out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `GPUPOOL_MODE`.
    pub mode: Mode,
    /// `GPUPOOL_MIN_SIZE`; at least 1.
    pub min_size: u64,
    /// `GPUPOOL_SMALL`.
    pub small: Small,
    /// `GPUPOOL_DEVICES`.
    pub devices: Devices,
    /// `GPUPOOL_RESERVE`; see [`Settings::reserve_of`].
    pub reserve: Option<u64>,
    /// `GPUPOOL_LIMIT`.
    pub limit: Limits,
    /// `GPUPOOL_HOST_LIMIT`; 0 is no host tier.
    pub host_limit: Option<u64>,
    /// `GPUPOOL_PLACEMENT`.
    pub placement: Placement,
    /// `GPUPOOL_FREE`.
    pub free: Free,
    /// `GPUPOOL_IDLE`; `None` keeps freed memory until somebody asks.
    pub idle: Option<Duration>,
    /// `GPUPOOL_RESTORE`: the folder of images.
    pub restore: Option<PathBuf>,
    /// `GPUPOOL_RESTORE_GENERATION`; `None` is the newest whole image there.
    pub restore_generation: Option<u64>,
    /// `GPUPOOL_RESTORE_BY_ORDER`
    pub restore_by_order: Toggle,
    /// `GPUPOOL_IDLE_SUSPEND`; `None` suspends nobody.
    pub idle_suspend: Option<Duration>,
    /// The same: the folder that memory goes to then; `None`: other GPUs and the host.
    pub idle_suspend_to: Option<PathBuf>,
    /// `GPUPOOL_LENDERS`.
    pub lenders: Lenders,
    /// `GPUPOOL_MOVE`.
    pub moving: Move,
    /// `GPUPOOL_MOVE_SHARE`, in thousandths.
    pub move_share: u32,
    /// `GPUPOOL_PRIORITY`, 0 to 100.
    pub priority: u32,
    /// `GPUPOOL_GUARANTEE`.
    pub guarantee: Limits,
    /// `GPUPOOL_RECALL_WAIT`; `None`: nobody is asked.
    pub recall_wait: Option<Duration>,
    /// `GPUPOOL_FAR_LIMIT`.
    pub far_limit: Option<FarLimit>,
    /// `GPUPOOL_PINNED`.
    pub pinned: Pinned,
    /// `GPUPOOL_PINNED_LIMIT`; 0 pools nothing.
    pub pinned_limit: Option<u64>,
    /// `GPUPOOL_PINNED_IDLE`.
    pub pinned_idle: Duration,
    /// `GPUPOOL_SOFT_OOM`.
    pub soft_oom: Switch,
    /// `GPUPOOL_MEMINFO`.
    pub meminfo: MemInfo,
    /// `GPUPOOL_PEER_RDMA`.
    pub peer_rdma: Switch,
    /// `GPUPOOL_PREFETCH`.
    pub prefetch: Prefetch,
    /// `GPUPOOL_MANAGED_ADVICE`.
    pub managed_advice: Toggle,
    /// `GPUPOOL_CONTEXTS`.
    pub contexts: Contexts,
    /// `GPUPOOL_CONTEXT_DEVICES`, in the order written; `None` where contexts may be anywhere.
    pub context_devices: Option<Vec<u32>>,
    /// `GPUPOOL_MALLOC_HEAP_SIZE`, for each context.
    pub malloc_heap_size: Option<u64>,
    /// `GPUPOOL_STACK_SIZE`, for each thread of a kernel.
    pub stack_size: Option<u64>,
    /// `GPUPOOL_PRINTF_FIFO_SIZE`, for each context.
    pub printf_fifo_size: Option<u64>,
    /// `GPUPOOL_LOG`, unparsed: the directives' grammar belongs to the log, which checks them when it starts.
    pub log: Option<String>,
    /// `GPUPOOL_LOG_FILE`.
    pub log_file: Option<LogPath>,
    /// `GPUPOOL_SUMMARY`.
    pub summary: Switch,
    /// `GPUPOOL_METRICS`.
    pub metrics: Toggle,
    /// The launcher's variable that says that several ranks of a job run on this host, and how many.
    pub local_ranks: Option<(&'static str, u32)>,
    /// What others say in the environment that the process may use of a GPU.
    pub outside: Vec<Outside>,
    /// The value of each setting that was given, as it was written.
    pub said: BTreeMap<&'static str, String>,
}

/// `GPUPOOL_FAR_LIMIT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FarLimit {
    /// The part of the time that may be lost, in thousandths.
    pub share: u32,
    /// What would lie far beyond that is refused.
    pub refuses: bool,
}

impl fmt::Display for FarLimit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}%{}", f64::from(self.share) / 10.0, if self.refuses { ":refuse" } else { "" })
    }
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            mode: Mode::default(),
            min_size: 1 << 20,
            small: Small::default(),
            devices: Devices::Auto,
            reserve: None,
            limit: Limits::Unset,
            host_limit: None,
            placement: Placement::default(),
            free: Free::default(),
            idle: Some(Duration::from_secs(10)),
            restore: None,
            restore_generation: None,
            restore_by_order: Toggle::Off,
            idle_suspend: None,
            idle_suspend_to: None,
            lenders: Lenders::default(),
            moving: Move::default(),
            move_share: 50,
            priority: 50,
            guarantee: Limits::Unset,
            recall_wait: Some(Duration::from_secs(2)),
            far_limit: None,
            pinned: Pinned::default(),
            pinned_limit: None,
            pinned_idle: Duration::from_secs(30),
            soft_oom: Switch::default(),
            meminfo: MemInfo::default(),
            peer_rdma: Switch::default(),
            prefetch: Prefetch::default(),
            managed_advice: Toggle::default(),
            contexts: Contexts::default(),
            context_devices: None,
            malloc_heap_size: None,
            stack_size: None,
            printf_fifo_size: None,
            log: None,
            log_file: None,
            summary: Switch::default(),
            metrics: Toggle::On,
            local_ranks: None,
            outside: Vec::new(),
            said: BTreeMap::new(),
        }
    }
}

/// Which GPUs lend memory (`GPUPOOL_DEVICES`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Devices {
    /// All visible ones, or the rank's own one in a job of several ranks on the host.
    Auto,
    /// The GPUs with these ordinals, in the order written, none twice.
    List(Vec<u32>),
}

/// The most that the pool takes of each GPU (`GPUPOOL_LIMIT`), in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Limits {
    /// Only the reserve limits it.
    Unset,
    /// One limit for every GPU.
    Every(u64),
    /// By ordinal; a GPU that is not named has no limit.
    PerGpu(BTreeMap<u32, u64>),
}

impl Settings {
    /// What no setting says wrong by itself.
    pub(crate) fn contradiction(&self) -> Option<Problem> {
        let unnamed = self.contexts == Contexts::Deny && self.context_devices.is_none();
        unnamed.then(|| Problem {
            name: "GPUPOOL_CONTEXTS".to_owned(),
            value: Contexts::Deny.word().to_owned(),
            reason: "says nothing without GPUPOOL_CONTEXT_DEVICES; write there the GPUs that may have a context, for \
                     example 0"
                .to_owned(),
        })
    }

    /// Ranks of the job on this host, this process among them.
    pub fn ranks(&self) -> u32 {
        self.local_ranks.map_or(1, |(_, ranks)| ranks)
    }

    /// Bytes to leave free on a GPU of `total` bytes.
    pub fn reserve_of(&self, total: u64) -> u64 {
        self.reserve.unwrap_or_else(|| (1 << 30).min(total / 16))
    }

    /// What [`Settings::read`] cannot know: whether the GPUs named exist and have what they are limited to. `totals` is
    /// the memory of every visible GPU, by ordinal (`cuDeviceTotalMem`).
    pub fn check_gpus(&self, totals: &[u64]) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut problem = |name: &str, value: String, reason: String| {
            problems.push(Problem { name: name.to_owned(), value, reason });
        };
        let visible = match totals.len() {
            0 => "this process sees no GPU".to_owned(),
            1 => "this process sees only GPU 0".to_owned(),
            count => format!("this process sees GPUs 0 to {}", count - 1),
        };
        let lending = match &self.devices {
            Devices::Auto => None,
            Devices::List(list) => Some(list),
        };
        let lists = [("GPUPOOL_DEVICES", lending), ("GPUPOOL_CONTEXT_DEVICES", self.context_devices.as_ref())];
        for (name, list) in lists.into_iter().filter_map(|(name, list)| Some((name, list?))) {
            for gpu in list.iter().filter(|gpu| **gpu as usize >= totals.len()) {
                let value = list.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
                problem(name, value, format!("there is no GPU {gpu}; {visible}"));
            }
        }
        // A reserve above one small GPU among larger ones keeps that out; above all of them it leaves nothing to pool.
        if let (Some(reserve), Some(most)) = (self.reserve, totals.iter().max())
            && reserve >= *most
        {
            let reason = format!("no GPU here has more than {}; write less than that", format_size(*most));
            problem("GPUPOOL_RESERVE", format_size(reserve).replace(' ', ""), reason);
        }
        for (name, limits) in [("GPUPOOL_LIMIT", &self.limit), ("GPUPOOL_GUARANTEE", &self.guarantee)] {
            // One size for every GPU is "at most", so a smaller GPU among larger ones is no mistake.
            let Limits::PerGpu(limits) = limits else { continue };
            for (&gpu, &bytes) in limits {
                let value = format!("{gpu}:{}", format_size(bytes).replace(' ', ""));
                match totals.get(gpu as usize) {
                    None => problem(name, value, format!("there is no GPU {gpu}; {visible}")),
                    Some(total) if bytes > *total => {
                        let has = format_size(*total);
                        problem(name, value, format!("GPU {gpu} has {has}; write at most that"));
                    }
                    Some(_) => {}
                }
            }
        }
        problems
    }
}

/// As it is written: `auto` or `0,2,3`.
impl fmt::Display for Devices {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Devices::Auto => out.write_str("auto"),
            Devices::List(list) => out.write_str(&list.iter().map(u32::to_string).collect::<Vec<_>>().join(",")),
        }
    }
}

/// As it is written: `0:70GiB,1:40GiB` or one size; nothing where there is none.
impl fmt::Display for Limits {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = exact_size;
        match self {
            Limits::Unset => Ok(()),
            Limits::Every(bytes) => out.write_str(&size(*bytes)),
            Limits::PerGpu(limits) => {
                let all = limits.iter().map(|(gpu, bytes)| format!("{gpu}:{}", size(*bytes)));
                out.write_str(&all.collect::<Vec<_>>().join(","))
            }
        }
    }
}

impl Devices {
    pub(crate) fn parse(text: &str) -> Result<Devices, String> {
        if text == "auto" {
            return Ok(Devices::Auto);
        }
        gpu_list(text, "auto or for example 0,2,3").map(Devices::List)
    }
}

impl Limits {
    /// Whether any GPU has one.
    pub fn is_set(&self) -> bool {
        !matches!(self, Limits::Unset)
    }

    /// The limit of one GPU in bytes, if it has one.
    pub fn of(&self, gpu: u32) -> Option<u64> {
        match self {
            Limits::Unset => None,
            Limits::Every(bytes) => Some(*bytes),
            Limits::PerGpu(limits) => limits.get(&gpu).copied(),
        }
    }

    pub(crate) fn parse(text: &str) -> Result<Limits, String> {
        const EXAMPLE: &str = "write for example 0:70GiB,1:40GiB";
        if !text.contains([':', ',']) {
            return parse_size(text)
                .map(Limits::Every)
                .map_err(|error| format!("{error}; {EXAMPLE}, or 40GiB for every GPU"));
        }
        let mut limits = BTreeMap::new();
        for item in text.split(',') {
            let (gpu, size) = item.split_once(':').ok_or_else(|| format!("{item:?} names no GPU; {EXAMPLE}"))?;
            let gpu = ordinal(gpu).ok_or_else(|| format!("{gpu:?} is not a GPU's number; {EXAMPLE}"))?;
            let bytes = parse_size(size).map_err(|error| format!("{error}; {EXAMPLE}"))?;
            if limits.insert(gpu, bytes).is_some() {
                return Err(format!("GPU {gpu} is named twice; write every GPU once"));
            }
        }
        Ok(Limits::PerGpu(limits))
    }
}

/// GPUs' numbers in the order written; `expected` is what a complaint says to write.
pub(crate) fn gpu_list(text: &str, expected: &str) -> Result<Vec<u32>, String> {
    let mut list = Vec::new();
    for item in text.split(',') {
        let gpu = ordinal(item).ok_or_else(|| format!("{item:?} is not a GPU's number; write {expected}"))?;
        if list.contains(&gpu) {
            return Err(format!("GPU {gpu} is named twice; write every GPU once"));
        }
        list.push(gpu);
    }
    Ok(list)
}

/// A GPU's number. `u32::from_str` alone would take "+1".
fn ordinal(text: &str) -> Option<u32> {
    let text = text.trim();
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}
