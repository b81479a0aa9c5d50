//! The driver, its GPUs and their links.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use gpupool_config::{Budget, Lenders, Mode, Outside, Settings, format_size, tightest};
use gpupool_machine::{Host, Uuid, dashed};
use gpupool_wire::lenders::may_be_served;
use serde_json::json;

use super::check::Check;
use super::probe::{self, FailedCall, Gpu, Link, Probe};
use super::{fabric, matrix};
use crate::drain;
use crate::terminal::{clean, shorten, width};
use crate::words::{self, LENDER_ASLEEP, LENDER_COST};

/// Eight GPUs without a persistence daemon take half a minute to wake up.
const PATIENCE: Duration = Duration::from_secs(90);
/// `CUDA_ERROR_INVALID_CONTEXT`.
const INVALID_CONTEXT: i32 = 201;
/// `cuMemCreate` on the host came with CUDA 12.2.
const HOST_MEMORY_SINCE: i32 = 12_020;

/// What the driver says that other checks need.
#[derive(Default)]
pub struct Known {
    /// The memory of each GPU; none where there is no driver, or no GPU.
    pub totals: Option<Vec<u64>>,
    /// It gives no memory on the host (`cuMemCreate`).
    pub refuses_host: bool,
}

/// What the driver is and can.
pub fn checks(settings: &Settings) -> (Vec<Check>, Known) {
    let probe = match ask() {
        Ok(probe) => probe,
        Err(reason) => {
            let advice = "see whether nvidia-smi works, and what `dmesg` says about NVRM";
            return (vec![Check::broken("driver", reason, advice)], Known::default());
        }
    };
    if let Some(problem) = &probe.failure {
        return (vec![failed(problem, &probe)], Known::default());
    }
    if probe.gpus.is_empty() {
        let advice = "see what nvidia-smi shows, and whether CUDA_VISIBLE_DEVICES hides them";
        return (vec![Check::broken("driver", "no GPU can be seen", advice)], Known::default());
    }
    let totals = probe.gpus.iter().map(|gpu| gpu.total).collect();
    let refuses_host = refusal(&probe).is_some();
    let mut checks = vec![driver(&probe), gpus(&probe), links(&probe), vmm(&probe), host_numa(&probe, settings)];
    checks.extend(lenders(&probe, settings));
    checks.extend(loans(&probe));
    checks.extend(drains(&drain::drained()));
    checks.extend(budgets(&probe, settings, Path::new("/")));
    checks.extend(fabric::check(&probe, Path::new("/")));
    (checks, Known { totals: Some(totals), refuses_host })
}

/// The smallest bound on each GPU that somebody sets, where anybody does: `GPUPOOL_LIMIT`, control groups (`dmem`, and NVML's limits of them), MPS and HAMi.
fn budgets(probe: &Probe, settings: &Settings, root: &Path) -> Option<Check> {
    let groups = Host::at(root).device_limits();
    let of = |(gpu, known): (u32, &Gpu)| {
        let groups = groups.iter().filter(|group| group.is_of(&known.pci));
        let groups = groups.map(|group| Budget { bytes: group.limit, source: group.file.display().to_string() });
        let by_nvml = known.limits.iter().map(|(folder, soft, hard)| {
            let promised = if *soft > 0 { format!(", which promises {},", format_size(*soft)) } else { String::new() };
            Budget { bytes: *hard, source: format!("NVML's limit of {folder}{promised}") }
        });
        let own = settings.limit.of(gpu).map(|bytes| Budget { bytes, source: "GPUPOOL_LIMIT".to_owned() });
        // What is no less than there is binds nobody.
        let budget = tightest(&settings.outside, gpu, groups.chain(by_nvml).chain(own))
            .filter(|budget| budget.bytes < known.total)?;
        Some((gpu, budget, known.total))
    };
    let unread = Outside::unread(std::env::vars_os());
    if !unread.is_empty() {
        let words = format!("{} is no limit that gpupool can read", unread.join(", "));
        let advice = "write 0=4G,1=512M (CUDA_MPS_PINNED_DEVICE_MEM_LIMIT) or 4g (CUDA_DEVICE_MEMORY_LIMIT); GPUPOOL_LIMIT bounds the pool as these do";
        return Some(Check::finding("budgets", words, advice));
    }
    let all: Vec<(u32, Budget, u64)> = (0..).zip(&probe.gpus).filter_map(of).collect();
    if all.is_empty() {
        return None;
    }
    let words = all.iter().map(|(gpu, Budget { bytes, source }, total)| {
        format!("{source} bounds the pool to {} of the {} of GPU {gpu}", format_size(*bytes), format_size(*total))
    });
    let facts =
        all.iter().map(|(gpu, Budget { bytes, source }, _)| json!({"gpu": gpu, "bytes": bytes, "source": source}));
    Some(Check::fine("budgets", words.collect::<Vec<_>>().join("; ")).facts(json!(facts.collect::<Vec<_>>())))
}

/// Starts this program once more to ask, and waits for its answer.
fn ask() -> Result<Probe, String> {
    let executable = std::env::current_exe().map_err(|error| format!("cannot find this executable: {error}"))?;
    // Without the preload: the question is what the driver says, not what the pool makes of it.
    let groups = std::env::join_paths(Host::at(Path::new("/")).groups()).unwrap_or_default();
    let child = Command::new(executable)
        .args(["doctor", "--probe"])
        .env_remove("LD_PRELOAD")
        .env(probe::GROUPS, groups)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = child.map_err(|error| format!("cannot start the process that asks the driver: {error}"))?;
    let (send, receive) = mpsc::channel();
    if let Some(mut stdout) = child.stdout.take() {
        let reads = thread::Builder::new().spawn(move || {
            let mut text = String::new();
            let read = stdout.read_to_string(&mut text);
            // The receiver has gone if this took too long.
            let _ = send.send(read.map(|_| text));
        });
        if let Err(error) = reads {
            // Nobody waits for it.
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!(
                "cannot start the thread that hears what the driver says (ulimit -u, ulimit -v): {error}"
            ));
        }
    }
    let answer = receive.recv_timeout(PATIENCE);
    if answer.is_err() {
        // It may have ended by itself just now.
        let _ = child.kill();
    }
    let status = child.wait().map_err(|error| format!("lost sight of the process that asks the driver: {error}"))?;
    match answer {
        Ok(Ok(text)) if status.success() => serde_json::from_str(&text)
            .map_err(|error| format!("the process that asks the driver said nonsense: {error}")),
        Ok(_) => Err(format!("asking the driver ended with {status}")),
        Err(_) => Err(format!("the driver did not answer within {} seconds", PATIENCE.as_secs())),
    }
}

fn failed(problem: &FailedCall, probe: &Probe) -> Check {
    let from = probe.library.as_ref().map(|library| format!(" ({})", library.display())).unwrap_or_default();
    let words = match problem.code {
        0 => problem.words.clone(),
        code => format!("{}{from} answers {} ({code})", problem.call, problem.words),
    };
    let advice = match problem.code {
        0 => "install NVIDIA's driver; in a container, start it with --gpus all. Without GPUs, try `gpupool sim -- …`",
        100 => "see what nvidia-smi shows, and whether CUDA_VISIBLE_DEVICES hides the GPUs",
        802 => "the GPUs are not ready: see that nvidia-fabricmanager runs and has the driver's version",
        803 | 804 => "the driver's library and its kernel module differ: restart the machine, or remove cuda-compat",
        999 => "see what `dmesg` says about NVRM; after a suspend, reload nvidia_uvm",
        _ => "see whether nvidia-smi works",
    };
    Check::broken("driver", words, advice)
        .facts(json!({"call": problem.call, "code": problem.code, "name": problem.words}))
}

fn driver(probe: &Probe) -> Check {
    let library = probe.library.as_ref().map(|library| library.display().to_string()).unwrap_or_default();
    let cuda = probe.cuda.unwrap_or(0);
    let release = probe.release.as_ref().map(|release| format!("{release}, ")).unwrap_or_default();
    let words = format!("{release}CUDA {}.{}, {library}", cuda / 1000, cuda % 1000 / 10);
    let facts = json!({"cuda": probe.cuda, "release": probe.release, "library": library, "nvml": probe.nvml});
    let check = if cuda < HOST_MEMORY_SINCE {
        Check::finding("driver", words, "memory on the host needs a driver for CUDA 12.2 or newer")
    } else {
        Check::fine("driver", words)
    };
    let below = match &probe.nvml {
        Some(reason) => {
            vec![shorten(&clean(&format!("free memory is not known: {reason}")), width() - 9)]
        }
        None => Vec::new(),
    };
    check.below(below).facts(facts)
}

fn gpus(probe: &Probe) -> Check {
    let total: u64 = probe.gpus.iter().map(|gpu| gpu.total).sum();
    let count = words::count(probe.gpus.len() as u64, "GPU", "GPUs");
    let below = probe.gpus.iter().enumerate().flat_map(|(number, gpu)| gpu_lines(number, gpu)).collect();
    Check::fine("GPUs", format!("{count}, {} together", format_size(total))).below(below).facts(json!(probe.gpus))
}

fn gpu_lines(number: usize, gpu: &Gpu) -> Vec<String> {
    let free = gpu.free.map(|free| format!(", {} free", format_size(free))).unwrap_or_default();
    let name = shorten(&clean(&gpu.name), 30);
    let mut lines = vec![
        format!("GPU {number}  {name}, {}{free}", format_size(gpu.total)),
        format!("       {}  {}", gpu.pci, gpu.uuid),
    ];
    if !gpu.processes.is_empty() {
        let known: u64 = gpu.processes.iter().filter_map(|(_, bytes)| *bytes).sum();
        let count = words::count(gpu.processes.len() as u64, "process", "processes");
        lines.push(format!("       {count} on it, {}", format_size(known)));
    }
    lines
}

fn links(probe: &Probe) -> Check {
    if probe.gpus.len() == 1 {
        return Check::fine("peers", "one GPU, so no other one lends memory");
    }
    let facts = json!(probe.links);
    let pairs = || probe.links.iter().flatten().filter(|link| **link != Link::Itself);
    let below = matrix::lines(&probe.links);
    let missing = pairs().filter(|link| **link == Link::None).count();
    let check = if missing == 0 {
        let slow = pairs().any(|link| *link == Link::Pcie);
        let words = if slow {
            "every GPU reaches every other, some over PCIe"
        } else {
            "every GPU reaches every other over NVLink"
        };
        Check::fine("peers", words)
    } else {
        let all = missing == pairs().count();
        let words = if all { "no GPU reaches another" } else { "some GPUs do not reach each other" };
        Check::finding(
            "peers",
            format!("{words}; only those that do can lend memory to each other"),
            "peer access over PCIe needs the IOMMU off (or ACS on the bridges) and is off on most GeForce cards; in a \
             virtual machine, ask for GPUs of one host bridge",
        )
    };
    check.below(below).facts(facts)
}

/// What becomes of GPUs that only lend memory; nothing where none is reached over NVLink, for which it was measured.
fn lenders(probe: &Probe, settings: &Settings) -> Option<Check> {
    probe.links.iter().flatten().find(|link| matches!(link, Link::Nvlink(_)))?;
    if matches!(settings.mode, Mode::Trace | Mode::Off) {
        return None;
    }
    let setting = settings.lenders;
    let facts = json!({"setting": setting.word()});
    if setting == Lenders::Awake
        && let Err(why) = may_be_served()
    {
        let words = format!("GPUPOOL_LENDERS=awake keeps no GPU awake here: {why}");
        return Some(
            Check::finding("lenders", words, "run the program as a user with a number of its own").facts(facts),
        );
    }
    let words = match setting {
        Lenders::Asleep => format!(
            "a GPU that only lends lowers its clocks and is read {LENDER_ASLEEP}; GPUPOOL_LENDERS=awake has a helper process keep \
             it awake, for {LENDER_COST}"
        ),
        Lenders::Awake => format!(
            "GPUPOOL_LENDERS=awake: a helper process keeps GPUs awake that only lend, for {LENDER_COST}; asleep they would be \
             read {LENDER_ASLEEP}"
        ),
    };
    Some(Check::fine("lenders", words).facts(facts))
}

/// Whether it can be known that somebody works on a GPU; nothing where it can, or nothing could be borrowed.
fn loans(probe: &Probe) -> Option<Check> {
    let why = probe.nvml.as_ref().filter(|_| probe.gpus.len() > 1)?;
    let words = format!(
        "nobody tells who works on a GPU ({}): no rank is lent GPUs that nobody works on, and memory on other GPUs does not leave for programs without \
         gpupool",
        clean(why)
    );
    let advice = "ranks whose GPU is full use the host; NVML comes with the driver, and in a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility";
    Some(Check::finding("loans", words, advice).facts(json!({"nvml": why})))
}

/// GPUs that are drained, which whoever did it may have forgotten; nothing where none is.
fn drains(drained: &[(u32, Uuid)]) -> Option<Check> {
    let numbers: Vec<String> = drained.iter().map(|(number, _)| number.to_string()).collect();
    let words = format!("drained, so that no program has memory there: {}", numbers.join(", "));
    let advice = drain::what_ends_it(&drained.first()?.1, numbers.first()?);
    let uuids: Vec<String> = drained.iter().map(|(_, uuid)| format!("GPU-{}", dashed(uuid))).collect();
    Some(Check::finding("drains", words, advice).facts(json!({"gpus": uuids})))
}

fn vmm(probe: &Probe) -> Check {
    let without: Vec<u32> = (0u32..).zip(&probe.gpus).filter(|(_, gpu)| !gpu.vmm).map(|(number, _)| number).collect();
    if without.is_empty() {
        return Check::fine("VMM", "virtual memory management on every GPU").facts(json!({"without": without}));
    }
    let words = format!("GPU {} has no virtual memory management and cannot be pooled", words::ranges(&without));
    let advice = "virtual GPUs (vGPU) often lack it; use whole GPUs or MIG instances";
    let all = without.len() == probe.gpus.len();
    let check = if all { Check::broken("VMM", words, advice) } else { Check::finding("VMM", words, advice) };
    check.facts(json!({"without": without}))
}

/// The first host node on which the driver gives no memory, and its answer. Some drivers want a context even for this; making one here would cost what gpupool is there to
/// save.
fn refusal(probe: &Probe) -> Option<(i32, i32)> {
    probe.host.iter().copied().find(|(_, code)| *code != 0 && *code != INVALID_CONTEXT)
}

fn host_numa(probe: &Probe, settings: &Settings) -> Check {
    let facts = json!(probe.host.iter().map(|(node, code)| json!({"node": node, "result": code})).collect::<Vec<_>>());
    let nodes = |list: &[i32]| list.iter().map(i32::to_string).collect::<Vec<_>>().join(", ");
    let all: Vec<i32> = probe.host.iter().map(|(node, _)| *node).collect();
    let is_unknown = probe.host.iter().any(|(_, code)| *code == INVALID_CONTEXT);
    // Managed memory is the driver's on the host, too.
    let is_asked_for = matches!(settings.mode, Mode::Pool | Mode::Spill) && settings.host_limit != Some(0);
    let check = match refusal(probe) {
        None if is_unknown => Check::fine("HOST_NUMA", "not known: this driver says so only with a context"),
        None => Check::fine("HOST_NUMA", format!("the driver gives memory on host node {}", nodes(&all))),
        Some((node, code)) if !is_asked_for => Check::fine(
            "HOST_NUMA",
            format!("cuMemCreate on host node {node} answers {code}, and with these settings nothing asks for that"),
        ),
        Some((node, code)) => Check::finding(
            "HOST_NUMA",
            format!("cuMemCreate on host node {node} answers {code}: the pool goes on without the host's memory"),
            "in a container, allow it to bind memory: docker run --cap-add SYS_NICE; else see that the driver is for CUDA \
             12.2 or newer",
        ),
    };
    check.facts(facts)
}
