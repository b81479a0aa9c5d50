//! What the demo runs on, and sizes that make its point there.

use std::fmt;
use std::path::Path;

use gpupool_config::format_size;
use gpupool_machine::Host;
use simmachine::settings::Settings;

use super::step::{Expect, Step};
use super::workshop::Workshop;
use crate::failure::Failure;

const GIB: u64 = 1 << 30;
/// Left free on every real GPU and on the real host: somebody may be working there.
const LEFT_FREE: u64 = 2 * GIB;
/// How far the last step goes beyond what the GPUs have together.
const BEYOND: u64 = 4 * GIB;

/// Memory of one GPU in bytes, with a context on it.
struct Gpu {
    free: u64,
    total: u64,
}

/// GPUs and host memory, real or not.
pub struct Machine {
    /// How many simulated GPUs of what size; `None` for the real ones.
    simulated: Option<String>,
    gpus: Vec<Gpu>,
    /// Bytes of host memory to spare. It is the real host's also where the GPUs are simulated: the pool looks there before
    /// it takes any.
    host: u64,
}

impl Machine {
    /// The real GPUs, or simulated ones: those asked for, or of the `gpupool sim` around this command, else 4 × 32 GiB.
    ///
    /// The driver is asked by a child: a process that has called `cuInit` keeps the GPUs' attention until it ends.
    pub fn find(workshop: &Workshop, asked: Option<&str>) -> Result<Machine, Failure> {
        let around = if asked.is_none() { around()? } else { None };
        let asked = asked.or(around.as_deref());
        if asked.is_none() {
            let real = Machine { simulated: None, gpus: Vec::new(), host: available() };
            // Any error means that there is no GPU to show this on, and what follows says what is used instead.
            if let Some(gpus) = real.list(workshop).ok().filter(|gpus| !gpus.is_empty()) {
                return Ok(Machine { gpus, ..real });
            }
        }
        let simulated = Some(asked.unwrap_or("4x32GiB").to_owned());
        let machine = Machine { simulated, gpus: Vec::new(), host: available() };
        let gpus = machine
            .list(workshop)
            .map_err(|reason| Failure::broken(format!("the simulated driver does not answer: {reason}")))?;
        if gpus.first().is_none_or(|gpu| gpu.total < 2 * GIB) {
            return Err(Failure::usage("the demo needs GPUs of 2 GiB or more; write for example --gpus 4x32GiB"));
        }
        Ok(Machine { gpus, ..machine })
    }

    /// What goes in front of a command so that it runs on this machine.
    pub fn prefix(&self) -> Vec<String> {
        match &self.simulated {
            Some(gpus) => ["gpupool", "sim", "--gpus", gpus, "--"].map(str::to_owned).to_vec(),
            None => Vec::new(),
        }
    }

    fn list(&self, workshop: &Workshop) -> Result<Vec<Gpu>, String> {
        let mut words = self.prefix();
        words.extend(["./two_arrays", "list"].map(str::to_owned));
        let output = workshop.command(&words).output().map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
        }
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let gpu = |line: &str| {
            let (free, total) = line.split_once(' ')?;
            Some(Gpu { free: free.parse().ok()?, total: total.parse().ok()? })
        };
        text.lines().map(|line| gpu(line).ok_or_else(|| format!("unexpected answer {line:?}"))).collect()
    }

    /// Whether the step that needs the host can be shown. By default the pool takes at most half of what the host has to
    /// spare, which is left at that on a real machine; simulated host memory costs only what is written to it.
    fn host_suffices(&self) -> bool {
        let on_host = BEYOND + LEFT_FREE * (self.gpus.len() as u64 + 1);
        let share = if self.simulated.is_some() { self.host } else { self.host / 2 };
        share >= on_host
    }

    /// The steps that this machine can show.
    pub fn story(&self) -> Vec<Step> {
        let Some(first) = self.gpus.first() else { return Vec::new() };
        let real = self.simulated.is_none();
        let sum: u64 = self.gpus.iter().map(|gpu| if real { gpu.free } else { gpu.total }).sum();
        // Nearly one GPU each, so that two cannot fit on it.
        let array = whole(if real { first.free.saturating_sub(LEFT_FREE) } else { first.total / 16 * 15 });
        // Three quarters of all GPUs: more than any one of them has.
        let large = whole(sum / 32 * 25);
        let beyond = whole(sum) + BEYOND;
        let settings: &[&str] = if real { &["--set", "reserve=2GiB"] } else { &[] };

        let pooled = |title: String, sizes: Vec<u64>, settings: &[&str], expect| Step {
            title,
            sizes,
            settings: Some(settings.iter().map(|word| (*word).to_owned()).collect()),
            expect,
        };
        let mut story = vec![Step {
            title: format!("Two arrays of {} on GPU 0, which has {}", format_size(array), format_size(first.total)),
            sizes: vec![array, array],
            settings: None,
            expect: Expect::SecondFails,
        }];
        if self.gpus.len() > 1 {
            story.push(pooled(
                "The same program with gpupool".to_owned(),
                vec![array, array],
                settings,
                Expect::OnGpus,
            ));
            story.push(pooled(format!("One array of {}", format_size(large)), vec![large], settings, Expect::OnGpus));
        }
        if self.host_suffices() {
            let limit = ["--set", "host-limit=32GiB"];
            let settings = if real { settings } else { &limit[..] };
            let title = format!("One array of {}, more than the GPUs have together", format_size(beyond));
            story.push(pooled(title, vec![beyond], settings, Expect::OnHostToo));
        }
        story
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.simulated.is_some() { "simulated" } else { "real" };
        let noun = if self.gpus.len() == 1 { "GPU" } else { "GPUs" };
        let mut sizes: Vec<_> = self.gpus.iter().map(|gpu| format_size(gpu.total)).collect();
        sizes.dedup();
        let host = format_size(self.host);
        write!(out, "{} {kind} {noun} of {}, {host} of host memory to spare", self.gpus.len(), sizes.join(" and "))?;
        if self.gpus.len() == 1 {
            write!(out, "\nSpreading over GPUs needs two; this shows what the host can give to one.")?;
        }
        if !self.host_suffices() {
            write!(out, "\nThe host has too little memory to spare for the step that needs it; that one is left out.")?;
        }
        Ok(())
    }
}

/// The GPUs of the `gpupool sim` that this command runs in, which would be taken for real ones; `None` outside of any. They are made
/// anew for the steps, so that what else runs in there takes nothing of them.
fn around() -> Result<Option<String>, Failure> {
    let variable = |name: &str| std::env::var(name).ok();
    // `gpupool sim` gives it to whatever it starts, and no driver of a GPU knows it.
    if variable("SIMCUDA_MACHINE").is_none() {
        return Ok(None);
    }
    let gpus = Settings::read(variable).map_err(Failure::usage)?.gpus;
    let words: Vec<String> = gpus.iter().map(|bytes| format!("1x{}", in_words(*bytes))).collect();
    let same = gpus.windows(2).all(|pair| pair[0] == pair[1]);
    Ok(match (gpus.first(), same) {
        (Some(bytes), true) => Some(format!("{}x{}", gpus.len(), in_words(*bytes))),
        _ => Some(words.join(",")),
    })
}

/// A size as a user writes it.
fn in_words(bytes: u64) -> String {
    if bytes.is_multiple_of(GIB) { format!("{}GiB", bytes / GIB) } else { format!("{}MiB", bytes >> 20) }
}

/// Rounded down to whole GiB, for numbers that can be read.
fn whole(bytes: u64) -> u64 {
    bytes / GIB * GIB
}

/// Bytes of host memory that a process here can still take.
fn available() -> u64 {
    Host::at(Path::new("/")).memory().available().unwrap_or(0)
}
