//! Files for the viewers that people have, written while the logs are read. What is a number of the report comes from its model; what
//! happened when comes from the records on their way to it.

mod frames;
mod memory_viz;
mod perfetto;
mod pickle;
mod speedscope;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};

use gpupool_events::Record;

use super::model::{Found, Logs, Process};
use super::target;
use crate::failure::Failure;
use crate::terminal::clean;
use memory_viz::MemoryViz;
use perfetto::Perfetto;

/// Where to write what.
#[derive(clap::Args, Default)]
pub struct Files {
    /// Write a memory snapshot for PyTorch's viewer, https://pytorch.org/memory_viz: blocks with their places in the program, and what
    /// happened to them; each place is a device. Needs a log of level debug (gpupool run --set log=debug) to have blocks
    #[arg(long, value_name = "FILE")]
    memory_viz: Option<PathBuf>,
    /// Write a trace for https://ui.perfetto.dev: what each place held over time, moves, contexts, findings
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
    /// Write bytes by place in the program for https://www.speedscope.app: blocks (from a log of level debug), contexts, modules, pinned
    /// memory
    #[arg(long, value_name = "FILE")]
    speedscope: Option<PathBuf>,
}

/// The files that were asked for, while the logs are read.
pub struct Viewers<'a> {
    files: &'a Files,
    memory_viz: Option<MemoryViz>,
    perfetto: Option<Perfetto<BufWriter<File>>>,
}

impl Files {
    /// Refuses two of these, or one of them and the page, in one file.
    ///
    /// # Errors
    /// Exit 2.
    pub fn refuse_twice(&self, html: Option<&PathBuf>) -> Result<(), Failure> {
        let Files { memory_viz, perfetto, speedscope } = self;
        target::refuse_twice(&[
            ("--html", html),
            ("--memory-viz", memory_viz.as_ref()),
            ("--perfetto", perfetto.as_ref()),
            ("--speedscope", speedscope.as_ref()),
        ])
    }
}

impl<'a> Viewers<'a> {
    /// Begins what is written record by record of these logs.
    ///
    /// # Errors
    /// Such a file cannot be written, or is one of the logs.
    pub fn begin(files: &'a Files, logs: &[PathBuf]) -> Result<Viewers<'a>, Failure> {
        for path in [&files.memory_viz, &files.perfetto, &files.speedscope].into_iter().flatten() {
            target::refuse_logs(path, logs)?;
        }
        let perfetto = files.perfetto.as_deref().map(|path| Ok(Perfetto::new(create(path)?))).transpose()?;
        Ok(Viewers { files, memory_viz: files.memory_viz.as_ref().map(|_| MemoryViz::new(logs.len())), perfetto })
    }

    /// Takes in a record.
    pub fn look(&mut self, process: &Process, record: &Record) {
        if let Some(memory_viz) = &mut self.memory_viz {
            memory_viz.look(process, record);
        }
        if let Some(perfetto) = &mut self.perfetto {
            perfetto.look(process, record);
        }
    }

    /// Writes the rest. What was written and what is to be known of it, a line each; none where no file was asked for.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn finish(self, logs: &Logs, found: &[Found]) -> Result<String, Failure> {
        let mut told = String::new();
        let mut tell = |path: &Path, what: String| told.push_str(&format!("{}: {what}\n", path.display()));
        if let (Some(path), Some(memory_viz)) = (&self.files.memory_viz, &self.memory_viz) {
            let written = memory_viz.write(logs, create(path)?).map_err(|error| failed(path, &error))?;
            let numbers: Vec<String> = written
                .devices
                .iter()
                .enumerate()
                .map(|(number, place)| format!("{number} is {}", clean(place)))
                .collect();
            let devices = if numbers.is_empty() { String::new() } else { format!("; device {}", numbers.join(", ")) };
            tell(path, format!("open it at https://pytorch.org/memory_viz{devices}"));
            if written.is_coarse {
                let how = "for blocks, log the program with gpupool run --set log=debug";
                tell(path, format!("the log tells what places hold, and not which blocks; {how}"));
            }
            if written.left_out > 0 {
                tell(path, format!("{} entries of the trace are left out, the earliest ones", written.left_out));
            }
            if written.blocks_left_out > 0 {
                tell(path, format!("{} blocks are left out: too many at a time", written.blocks_left_out));
            }
        }
        if let (Some(path), Some(perfetto)) = (&self.files.perfetto, self.perfetto) {
            let left_out = perfetto.finish(logs, found).map_err(|error| failed(path, &error))?;
            tell(path, "open it at https://ui.perfetto.dev".to_owned());
            if left_out > 0 {
                tell(path, format!("{left_out} events are left out: the log has names for too many tracks"));
            }
        }
        if let Some(path) = &self.files.speedscope {
            let profiles = speedscope::write(logs, create(path)?).map_err(|error| failed(path, &error))?;
            let what = match profiles {
                0 => "empty: the log has no bytes by place in the program; log it with gpupool run --set log=debug",
                _ => "open it at https://www.speedscope.app",
            };
            tell(path, what.to_owned());
        }
        Ok(told)
    }
}

fn create(path: &Path) -> Result<BufWriter<File>, Failure> {
    File::create(path).map(|file| BufWriter::with_capacity(1 << 18, file)).map_err(|error| failed(path, &error))
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    Failure::usage(format!("{}: cannot be written: {error}; name another file", path.display()))
}
