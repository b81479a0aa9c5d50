//! The table of settings.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::choice::{Contexts, Free, Lenders, MemInfo, Mode, Move, Pinned, Placement, Prefetch, Small, Switch, Toggle};
use crate::duration::parse_duration;
use crate::log_path::LogPath;
use crate::settings::{Devices, FarLimit, Limits, Settings, gpu_list};
use crate::size::parse_size;

/// What every variable of ours starts with. An unknown name behind it is a mistake, not somebody else's variable.
pub const PREFIX: &str = "GPUPOOL_";

/// The folder for what each process finds, past the log: set by `gpupool run --fail-on` and nobody else, hence no row of
/// [`SETTINGS`]. `gpupool_events::Verdict` says what lies there.
pub const VERDICTS: &str = "GPUPOOL_VERDICTS";

/// One row: a variable, told for people and read for the program.
pub struct Setting {
    /// The variable.
    pub name: &'static str,
    /// The values it takes, as a help text shows them.
    pub values: &'static str,
    /// What holds when it is unset, in words.
    pub default: &'static str,
    /// One sentence.
    pub help: &'static str,
    /// Puts a value that is not empty into the settings, or says what to write instead.
    pub(crate) read: fn(&mut Settings, &OsStr) -> Result<(), String>,
}

/// Every setting, in the order in which people meet them. To add one: a row here and a field in [`Settings`].
pub const SETTINGS: &[Setting] = &[
    Setting {
        name: "GPUPOOL_MODE",
        values: Mode::WORDS,
        default: "pool",
        help: "Who serves an allocation: the pool, the driver and then the pool (spill), managed memory striped over the pool's \
               places (managed), the driver with every call logged (trace), or the driver alone (off).",
        read: |settings, value| choice(value, "a mode", Mode::WORDS, Mode::from_word).map(|word| settings.mode = word),
    },
    Setting {
        name: "GPUPOOL_MIN_SIZE",
        values: "size",
        default: "1MiB",
        help: "Requests of this size and more are the pool's, each in pages of 2 MiB that no other block shares. Smaller ones, in \
               mode pool: of less than 1 MiB, GPUPOOL_SMALL says who serves them; of 1 MiB and more (where this is set higher), the \
               driver does, on the program's own GPU, and the pool only what has no room there.",
        read: |settings, value| {
            settings.min_size = match size(value, "1MiB")? {
                0 => return Err("must be at least 1; write 1 to pool every request".to_owned()),
                bytes => bytes,
            };
            Ok(())
        },
    },
    Setting {
        name: "GPUPOOL_SMALL",
        values: Small::WORDS,
        default: "pool",
        help: "Who serves requests of less than 1 MiB (and less than GPUPOOL_MIN_SIZE) in mode pool: the pool, which packs several of \
               them into a page of 2 MiB on the program's GPU, or the driver, which also gets what there is no room for.",
        read: |settings, value| {
            choice(value, "an answer", Small::WORDS, Small::from_word).map(|word| settings.small = word)
        },
    },
    Setting {
        name: "GPUPOOL_DEVICES",
        values: "auto|0,2,3",
        default: "auto",
        help: "GPUs that lend memory, by the program's own numbering; auto is all it can see, or its own one in a job of \
               several ranks on the host. Memory for a GPU that a list leaves out is the driver's.",
        read: |settings, value| Devices::parse(text(value)?).map(|devices| settings.devices = devices),
    },
    Setting {
        name: "GPUPOOL_RESERVE",
        values: "size",
        default: "1GiB, at most 1/16 of the GPU",
        help: "Memory left free on every GPU. Another program's context (about half a GiB) has to fit into it: freed memory that waits for `GPUPOOL_IDLE` makes no room for a program that has no context yet.",
        read: |settings, value| size(value, "1GiB").map(|bytes| settings.reserve = Some(bytes)),
    },
    Setting {
        name: "GPUPOOL_LIMIT",
        values: "0:70GiB,1:40GiB or one size for every GPU",
        default: "the GPU less the reserve",
        help: "The most the pool takes of a GPU, together with the program's own cuMemCreate. Nothing is borrowed beyond it. On its own GPU a program may have more by the driver, which serves what is not pooled and is asked for what no place has room for (`pool.refuse` in the log).",
        read: |settings, value| Limits::parse(text(value)?).map(|limits| settings.limit = limits),
    },
    Setting {
        name: "GPUPOOL_HOST_LIMIT",
        values: "size",
        default: "half of what is available beyond 2 GiB, divided by the ranks on the host",
        help: "The most the pool takes of the host's memory in this process, and no more than there is; 0 keeps to the GPUs.",
        read: |settings, value| size(value, "64GiB").map(|bytes| settings.host_limit = Some(bytes)),
    },
    Setting {
        name: "GPUPOOL_PLACEMENT",
        values: Placement::WORDS,
        default: "local-first",
        help: "Where a block goes: the program's GPU and then the nearest peers, every GPU in turn, or the emptiest GPU; the \
               host always last.",
        read: |settings, value| {
            choice(value, "a placement", Placement::WORDS, Placement::from_word).map(|word| settings.placement = word)
        },
    },
    Setting {
        name: "GPUPOOL_FREE",
        values: Free::WORDS,
        default: "strict",
        help: "What a free waits for. strict: for all work of the context that the memory was allocated in, as the driver's free does, also while a stream is being captured. lazy: for nothing, which is faster where a program frees while its kernels run. That memory is given out again only once the work is over; until then an allocation takes other memory, new memory of the driver's if need be. It waits only with the GPU full, or once the process holds twice the most that it ever used. So lazy holds more memory.",
        read: |settings, value| {
            choice(value, "a way to free", Free::WORDS, Free::from_word).map(|word| settings.free = word)
        },
    },
    Setting {
        name: "GPUPOOL_IDLE",
        values: "duration or off",
        default: "10s",
        help: "Freed memory that nobody used for this long goes back to the driver. It goes within a second where others need the GPU, and where the program has freed most of what it had and seems to have ended its work, until that guess was wrong once. off keeps it until somebody asks.",
        read: |settings, value| {
            settings.idle = if text(value)? == "off" { None } else { Some(duration(value, "10s or off")?) };
            Ok(())
        },
    },
    Setting {
        name: "GPUPOOL_IDLE_SUSPEND",
        values: "duration, duration:folder or off",
        default: "off",
        help: "A program that has used no GPU for this long is suspended (gpupool suspend), and resumes by itself at the next call \
               that uses one; 1s at least. With a folder after the time (5min:/scratch/me) its memory goes there, else to other GPUs \
               and the host.",
        read: |settings, value| {
            const LEAST: Duration = Duration::from_secs(1);
            const EXAMPLE: &str = "5min, 5min:/scratch/me or off";
            // A path may be of any bytes.
            let bytes = value.as_bytes();
            let (time, folder) = match bytes.iter().position(|byte| *byte == b':') {
                Some(at) => (OsStr::from_bytes(&bytes[..at]), Some(Path::new(OsStr::from_bytes(&bytes[at + 1..])))),
                None => (value, None),
            };
            if folder.is_some_and(|folder| !folder.is_absolute()) {
                return Err(format!("the folder's path does not begin with /; write for example {EXAMPLE}"));
            }
            settings.idle_suspend = match text(time)? {
                "off" if folder.is_none() => None,
                _ => match duration(time, EXAMPLE)? {
                    time if time < LEAST => return Err(format!("shorter than 1s; write for example {EXAMPLE}")),
                    time => Some(time),
                },
            };
            settings.idle_suspend_to = settings.idle_suspend.and(folder).map(Path::to_owned);
            Ok(())
        },
    },
    Setting {
        name: "GPUPOOL_RESTORE",
        values: "folder",
        default: "no folder",
        help: "Memory that the program names (gpupool_name) comes back from the newest image in this folder (gpupool checkpoint), where it \
               has the same size there.",
        read: |settings, value| {
            if !Path::new(value).is_absolute() {
                return Err("no path from the root on; write for example /scratch/train".to_owned());
            }
            settings.restore = Some(PathBuf::from(value));
            Ok(())
        },
    },
    Setting {
        name: "GPUPOOL_RESTORE_GENERATION",
        values: "number",
        default: "the newest whole one",
        help: "Which image of the folder of GPUPOOL_RESTORE is meant, by the number that gpupool store list has; of a job, by the job's. Where it is not there, nothing comes back.",
        read: |settings, value| {
            settings.restore_generation = match text(value)?.parse() {
                Ok(number @ 1..) => Some(number),
                _ => {
                    return Err("not the number of an image; gpupool store list FOLDER has them, write for example 7"
                        .to_owned());
                }
            };
            Ok(())
        },
    },
    Setting {
        name: "GPUPOOL_RESTORE_BY_ORDER",
        values: Toggle::WORDS,
        default: "off",
        help: "Whether all blocks come back from the image of GPUPOOL_RESTORE, in the order in which they were allocated, when the program says that it has \
               built them (gpupool_restore); nothing does where the order differs.",
        read: |settings, value| {
            choice(value, "on or off", Toggle::WORDS, Toggle::from_word).map(|word| settings.restore_by_order = word)
        },
    },
    Setting {
        name: "GPUPOOL_LENDERS",
        values: Lenders::WORDS,
        default: "asleep",
        help: "awake: one helper process for all programs of a user holds a context on GPUs that only lend memory, which \
               otherwise lower their clocks and are read more slowly (by 8 to 11 % on H200); costs about 523 MiB and 52 W a GPU.",
        read: |settings, value| {
            choice(value, "a state", Lenders::WORDS, Lenders::from_word).map(|word| settings.lenders = word)
        },
    },
    Setting {
        name: "GPUPOOL_MOVE",
        values: Move::WORDS,
        default: "off",
        help: "Whether memory of the pool that lies far from the GPU that uses it comes near while the program runs, in place of \
               what is used less: auto where that pays, stress at every opportunity (for tests).",
        read: |settings, value| {
            choice(value, "a choice", Move::WORDS, Move::from_word).map(|word| settings.moving = word)
        },
    },
    Setting {
        name: "GPUPOOL_MOVE_SHARE",
        values: "percentage",
        default: "5%",
        help: "The part of the program's time that moving may cost: moves that turn out not to pay, waits for a GPU that does not come to rest, and moves made while the program itself has just waited for the GPU. Several ranks on one host have it together.",
        read: |settings, value| percentage(value, "5%").map(|share| settings.move_share = share),
    },
    Setting {
        name: "GPUPOOL_PRIORITY",
        values: "0 to 100",
        default: "50",
        help: "How much the program matters beside others on the same GPUs: those below it give way to it with all that they have there, its equals with what they only borrow; gpupool ps shows it.",
        read: |settings, value| {
            settings.priority = match text(value)?.parse() {
                Ok(number @ 0..=100) => number,
                _ => return Err("not a whole number from 0 to 100; write for example 80".to_owned()),
            };
            Ok(())
        },
    },
    Setting {
        name: "GPUPOOL_GUARANTEE",
        values: "0:20GiB,1:10GiB or one size for every GPU",
        default: "nothing is guaranteed",
        help: "So much of a GPU is this program's whatever the priority of others: what it has there below that is not asked back, \
               and as long as it has less, others give way to it.",
        read: |settings, value| Limits::parse(text(value)?).map(|limits| settings.guarantee = limits),
    },
    Setting {
        name: "GPUPOOL_RECALL_WAIT",
        values: "duration or off",
        default: "2s",
        help: "How long an allocation waits at most for others to give way: programs of a lower priority with all that they have on its GPU, programs of the same one with what they only borrow there. It waits up to three times as long while it hears that memory is leaving. off asks nobody, and a rank is lent no GPU that nobody works on.",
        read: |settings, value| {
            settings.recall_wait = if text(value)? == "off" { None } else { Some(duration(value, "2s or off")?) };
            Ok(())
        },
    },
    Setting {
        name: "GPUPOOL_FAR_LIMIT",
        values: "off, percentage or percentage:refuse",
        default: "off",
        help: "Warns where kernels lose more of the time than this by reading memory that lies far from their GPU, and nothing comes near; \
               with :refuse, what would lie far, too, then gets OUT_OF_MEMORY. The time is an estimate.",
        read: |settings, value| far_limit(value).map(|limit| settings.far_limit = limit),
    },
    Setting {
        name: "GPUPOOL_PINNED",
        values: Pinned::WORDS,
        default: "pool",
        help: "Who serves pinned host memory (cudaMallocHost): a pool that keeps what was freed, or the driver.",
        read: |settings, value| {
            choice(value, "an answer", Pinned::WORDS, Pinned::from_word).map(|word| settings.pinned = word)
        },
    },
    Setting {
        name: "GPUPOOL_PINNED_LIMIT",
        values: "size",
        default: "a quarter of the memory, divided by the ranks on the host",
        help: "The most that the pool pins in this process; what goes beyond it is left to the driver, and reported.",
        read: |settings, value| size(value, "16GiB").map(|bytes| settings.pinned_limit = Some(bytes)),
    },
    Setting {
        name: "GPUPOOL_PINNED_IDLE",
        values: "duration",
        default: "30s",
        help: "Freed pinned memory that nobody used for this long goes back to the system.",
        read: |settings, value| duration(value, "30s").map(|duration| settings.pinned_idle = duration),
    },
    Setting {
        name: "GPUPOOL_SOFT_OOM",
        values: Switch::WORDS,
        default: "auto",
        help: "Says OUT_OF_MEMORY once before the program's GPU overflows, so that a caching allocator frees its cache; auto \
               does so for programs known to retry.",
        read: |settings, value| switch(value).map(|word| settings.soft_oom = word),
    },
    Setting {
        name: "GPUPOOL_MEMINFO",
        values: MemInfo::WORDS,
        default: "pool",
        help: "Whose free and total memory a program is told: the pool's or its GPU's.",
        read: |settings, value| {
            choice(value, "an answer", MemInfo::WORDS, MemInfo::from_word).map(|word| settings.meminfo = word)
        },
    },
    Setting {
        name: "GPUPOOL_PEER_RDMA",
        values: Switch::WORDS,
        default: "auto",
        help: "Whether network adapters may be given pooled GPU memory (GPUDirect RDMA); auto is yes on every GPU that can.",
        read: |settings, value| switch(value).map(|word| settings.peer_rdma = word),
    },
    Setting {
        name: "GPUPOOL_PREFETCH",
        values: Prefetch::WORDS,
        default: "alloc",
        help: "When the stripes of managed memory are moved to their places: when it is allocated, or also before a launch \
               whose arguments name it.",
        read: |settings, value| {
            choice(value, "a time", Prefetch::WORDS, Prefetch::from_word).map(|word| settings.prefetch = word)
        },
    },
    Setting {
        name: "GPUPOOL_MANAGED_ADVICE",
        values: Toggle::WORDS,
        default: "off",
        help: "In every mode, places and prefetches memory that the program itself allocates with cuMemAllocManaged as mode \
               managed does its blocks.",
        read: |settings, value| {
            choice(value, "on or off", Toggle::WORDS, Toggle::from_word).map(|word| settings.managed_advice = word)
        },
    },
    Setting {
        name: "GPUPOOL_CONTEXTS",
        values: Contexts::WORDS,
        default: "warn",
        help: "Contexts that nobody uses are reported; with deny, a call that would make one on a GPU which \
               GPUPOOL_CONTEXT_DEVICES does not name fails.",
        read: |settings, value| {
            choice(value, "a policy", Contexts::WORDS, Contexts::from_word).map(|word| settings.contexts = word)
        },
    },
    Setting {
        name: "GPUPOOL_CONTEXT_DEVICES",
        values: "0,2,3",
        default: "every GPU",
        help: "GPUs that may have a context where GPUPOOL_CONTEXTS=deny, by the program's own numbering.",
        read: |settings, value| {
            gpu_list(text(value)?, "for example 0,2,3").map(|list| settings.context_devices = Some(list))
        },
    },
    Setting {
        name: "GPUPOOL_MALLOC_HEAP_SIZE",
        values: "size",
        default: "the driver's, 8MiB",
        help: "Heap of device malloc, set in each context as it is made.",
        read: |settings, value| size(value, "256MiB").map(|bytes| settings.malloc_heap_size = Some(bytes)),
    },
    Setting {
        name: "GPUPOOL_STACK_SIZE",
        values: "size",
        default: "the driver's, 1KiB",
        help: "Stack of each GPU thread, set in each context as it is made.",
        read: |settings, value| size(value, "16KiB").map(|bytes| settings.stack_size = Some(bytes)),
    },
    Setting {
        name: "GPUPOOL_PRINTF_FIFO_SIZE",
        values: "size",
        default: "the driver's, 1MiB",
        help: "Buffer of device printf, set in each context as it is made.",
        read: |settings, value| size(value, "8MiB").map(|bytes| settings.printf_fifo_size = Some(bytes)),
    },
    Setting {
        name: "GPUPOOL_LOG",
        values: "error|warn|info|debug|trace or directives such as gpupool::memory=debug",
        default: "warn on stderr, info in a file",
        help: "What is logged.",
        read: |settings, value| {
            settings.log = Some(text(value)?.to_owned());
            Ok(())
        },
    },
    Setting {
        name: "GPUPOOL_LOG_FILE",
        values: "path with %p process, %e executable, %h host, %% percent",
        default: "no file",
        help: "Writes the log as JSON lines to a new file, a relative one where the program started. In a container, %p is \
               the process's number, its PID namespace and when it started.",
        read: |settings, value| LogPath::parse(value).map(|path| settings.log_file = Some(path)),
    },
    Setting {
        name: "GPUPOOL_SUMMARY",
        values: Switch::WORDS,
        default: "auto",
        help: "A summary on stderr at exit; auto when there was something to say.",
        read: |settings, value| switch(value).map(|word| settings.summary = word),
    },
    Setting {
        name: "GPUPOOL_METRICS",
        values: Toggle::WORDS,
        default: "on",
        help: "Whether the process tells what it holds while it runs, in a file for its user alone, by which all others find it: with off there is no ps, set, suspend, checkpoint or drain for it, it neither asks others for memory nor gives way to them, and ranks without a launcher do not find each other.",
        read: |settings, value| {
            choice(value, "on or off", Toggle::WORDS, Toggle::from_word).map(|word| settings.metrics = word)
        },
    },
];

fn text(value: &OsStr) -> Result<&str, String> {
    value.to_str().map(str::trim).ok_or_else(|| "not UTF-8".to_owned())
}

fn size(value: &OsStr, example: &str) -> Result<u64, String> {
    parse_size(text(value)?).map_err(|error| format!("{error}; write for example {example}"))
}

fn duration(value: &OsStr, example: &str) -> Result<Duration, String> {
    parse_duration(text(value)?).map_err(|error| format!("{error}; write for example {example}"))
}

/// In thousandths.
fn percentage(value: &OsStr, example: &str) -> Result<u32, String> {
    let number = text(value)?.trim().strip_suffix('%').and_then(|number| number.trim_end().parse::<f64>().ok());
    match number {
        Some(number) if (0.0..=100.0).contains(&number) => Ok((number * 10.0).round() as u32),
        _ => Err(format!("not a percentage from 0% to 100%; write for example {example}")),
    }
}

fn far_limit(value: &OsStr) -> Result<Option<FarLimit>, String> {
    let words = text(value)?;
    if words == "off" {
        return Ok(None);
    }
    let (share, refuses) = match words.split_once(':') {
        None => (words, false),
        Some((share, "refuse")) => (share, true),
        Some((_, other)) => return Err(format!("{other:?} is not refuse; write for example 20%:refuse")),
    };
    percentage(OsStr::new(share), "20%, 20%:refuse or off").map(|share| Some(FarLimit { share, refuses }))
}

fn choice<T>(value: &OsStr, what: &str, words: &str, from_word: fn(&str) -> Option<T>) -> Result<T, String> {
    from_word(text(value)?).ok_or_else(|| format!("not {what}; write one of {words}"))
}

fn switch(value: &OsStr) -> Result<Switch, String> {
    choice(value, "a switch", Switch::WORDS, Switch::from_word)
}
