//! One step: a command line, what it printed, and where its memory was.

use std::fs::File;
use std::io::{BufReader, Write};
use std::process::{Output, Stdio};

use gpupool_config::format_size;
use gpupool_events::{Event, PlacePeak, Reader};

use super::workshop::{Workshop, show};
use crate::failure::Failure;

/// What a step must show.
#[derive(Clone, Copy)]
pub enum Expect {
    /// The first array fits, the second does not.
    SecondFails,
    /// Everything fits, on more than one GPU and not on the host.
    OnGpus,
    /// Everything fits, some of it on the host.
    OnHostToo,
}

/// A command and its point.
pub struct Step {
    pub title: String,
    /// Bytes of each array.
    pub sizes: Vec<u64>,
    /// Flags of `gpupool run`; `None` runs the program bare.
    pub settings: Option<Vec<String>>,
    pub expect: Expect,
}

impl Step {
    /// Runs it with `prefix` in front of its command, and says what it showed, or (inner error) what it showed instead.
    ///
    /// # Errors
    /// The command could not be started, or nobody reads `out` any more.
    pub fn run(
        &self,
        workshop: &Workshop,
        prefix: Vec<String>,
        number: usize,
        out: &mut dyn Write,
    ) -> Result<Result<String, String>, Failure> {
        let log = format!("step{number}.jsonl");
        let mut words = prefix;
        if let Some(settings) = &self.settings {
            words.extend(["gpupool", "run", "--log", &log].map(str::to_owned));
            words.extend(settings.iter().cloned());
            words.push("--".to_owned());
        }
        words.push("./two_arrays".to_owned());
        words.extend(self.sizes.iter().map(|bytes| format!("{}GiB", bytes >> 30)));

        show(out, format_args!("$ {}", words.join(" ")))?;
        let output = workshop
            .command(&words)
            .stderr(Stdio::inherit())
            .output()
            .map_err(|error| Failure::broken(format!("{}: {error}", words.join(" "))))?;
        show(out, format_args!("{}", String::from_utf8_lossy(&output.stdout).trim_end()))?;
        if self.settings.is_none() {
            return Ok(self.judge_bare(&output));
        }
        let peaks = match peaks(workshop, &log) {
            Ok(peaks) => peaks,
            Err(reason) => return Ok(Err(format!("{reason} (the program: {})", output.status))),
        };
        show(out, format_args!("  {:<8}{:>11}", "place", "peak"))?;
        for peak in &peaks {
            show(out, format_args!("  {:<8}{:>11}", peak.place, format_size(peak.peak_used)))?;
        }
        Ok(self.judge_pooled(&output, &peaks))
    }

    fn judge_bare(&self, output: &Output) -> Result<String, String> {
        let text = String::from_utf8_lossy(&output.stdout);
        let first = text.contains("array 1,") && text.lines().next().is_some_and(|line| line.ends_with("allocated"));
        match output.status.code() {
            Some(1) if first && text.trim_end().ends_with("out of memory") => {
                Ok("the second one does not fit".to_owned())
            }
            _ => Err(format!("the first array should fit and the second one not ({})", output.status)),
        }
    }

    fn judge_pooled(&self, output: &Output, peaks: &[PlacePeak]) -> Result<String, String> {
        if !output.status.success() {
            return Err(format!("the program should get its memory and find its data right ({})", output.status));
        }
        let sum = |kind: &str| {
            peaks.iter().filter(|peak| peak.place.starts_with(kind)).map(|peak| peak.peak_used).sum::<u64>()
        };
        let (gpus, host, asked) = (sum("gpu"), sum("host"), self.sizes.iter().sum::<u64>());
        let used = peaks.iter().filter(|peak| peak.place.starts_with("gpu") && peak.peak_used > 0).count();
        if gpus + host < asked {
            return Err(format!(
                "{} were asked for, {} were in the pool",
                format_size(asked),
                format_size(gpus + host)
            ));
        }
        match self.expect {
            Expect::SecondFails => Err("this step runs bare".to_owned()),
            Expect::OnGpus if host > 0 => Err(format!("{} lay on the host", format_size(host))),
            Expect::OnGpus if used < 2 => Err("everything lay on one GPU".to_owned()),
            Expect::OnGpus => {
                Ok(format!("{} live on {used} GPUs, nothing on the host, contents right", format_size(asked)))
            }
            Expect::OnHostToo if host == 0 => Err("nothing lay on the host".to_owned()),
            Expect::OnHostToo => {
                Ok(format!("{} on the GPUs and {} on the host, contents right", format_size(gpus), format_size(host)))
            }
        }
    }
}

/// Where the memory of a process was, from the last line of its log.
fn peaks(workshop: &Workshop, log: &str) -> Result<Vec<PlacePeak>, String> {
    let file = File::open(workshop.folder().join(log)).map_err(|error| format!("no log {log}: {error}"))?;
    let mut peaks = None;
    for record in Reader::new(BufReader::new(file)) {
        if let Event::ProcessExit(exit) = record.map_err(|error| format!("{log}: {error}"))?.event {
            peaks = Some(exit.peak);
        }
    }
    peaks.ok_or_else(|| format!("{log} has no process.exit"))
}
