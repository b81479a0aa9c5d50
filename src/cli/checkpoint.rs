//! `gpupool checkpoint`: has a running program write images of its GPU memory; see `src/shim/checkpoint`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use gpupool_config::{format_size, parse_duration};
use gpupool_metrics::Identity;
use gpupool_wire::control::{MOST_PATH, Reply, Request, Stored};
use serde::Serialize;

use crate::control;
use crate::failure::{Failure, complain};
use crate::pages::{Listed, Pages};
use crate::{stdout, terminal};

/// Write an image of a running program's GPU memory to a folder, while the program goes on
#[derive(clap::Args)]
#[command(
    after_help = "The program is stopped for as long as it takes to copy its memory to where there is room on its GPUs, others and the host; what finds
no room there is written before it goes on. An image is of one moment, and there once it is whole: whatever fails, the older ones stay.
gpupool store list shows them, gpupool run --restore brings named memory back.

With --every, this command asks again and again. Where it ends, there are no further images, and the program runs on; where the program
ends, so does it, with 0 if its last image is whole.

Examples:
  gpupool checkpoint 4711 /scratch/train
  gpupool checkpoint 4711 /scratch/train --every 10min --keep 3
  gpupool checkpoint --json 4711 /scratch/train | jq .generation"
)]
pub struct Args {
    /// Its number, as gpupool ps lists it
    pid: u32,
    /// A folder of its own for these images; made if it is not there. The program writes it, as its own user
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Write another image so long after one was begun, until the program ends
    #[arg(long, value_parser = pause, value_name = "TIME")]
    every: Option<Duration>,
    /// Keep so many images, the newest, and remove older ones
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), value_name = "NUMBER")]
    keep: Option<u32>,
    /// How long its work on the GPUs has to be over
    #[arg(long, value_parser = time, default_value = "10s", value_name = "TIME")]
    wait: Duration,
    /// One JSON object for each image, a line each
    #[arg(long)]
    json: bool,
}

fn time(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|error| error.to_string())
}

fn pause(text: &str) -> Result<Duration, String> {
    let pause = time(text)?;
    if pause.is_zero() { Err("write a time of more than nothing, as 10min".to_owned()) } else { Ok(pause) }
}

/// How often it is looked whether the program has ended.
const LOOK: Duration = Duration::from_secs(1);

/// One image, or why there is none.
#[derive(Serialize)]
struct Told {
    pid: u32,
    folder: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    generation: u64,
    bytes: u64,
    stored_bytes: u64,
    /// Of the program's own memory, and not in the image.
    left_out_bytes: u64,
    /// What the program waited for the disk for.
    in_stop_bytes: u64,
    stopped_microseconds: u64,
    microseconds: u64,
}

/// Has images written, and says what is in them.
///
/// # Errors
/// The program cannot be asked, or nothing can be printed.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let folder = std::path::absolute(&args.folder);
    let folder = folder.map_err(|error| Failure::usage(format!("{}: {error}", args.folder.display())))?;
    if folder.as_os_str().len() > MOST_PATH {
        return Err(Failure::usage(format!("{}: longer than the {MOST_PATH} bytes of a path", folder.display())));
    }
    let request = Request::Checkpoint {
        folder: folder.clone(),
        keep: args.keep.unwrap_or(0),
        patience: u64::try_from(args.wait.as_millis()).unwrap_or(u64::MAX),
    };
    let row = find(args.pid)?;
    let identity = row.told.process.identity;
    let mut is_done = false;
    loop {
        let begun = Instant::now();
        let reply = control::ask_one(&row, &request);
        // Where it ended in the middle of one, the one before is the last, and whole.
        let ended_within = reply.is_err() && is_done && is_ending(&identity);
        if !ended_within {
            is_done = print(args, told(args.pid, &folder, reply))?;
        }
        if let Some(every) = args.every {
            while begun.elapsed() < every && !has_ended(&identity) {
                std::thread::sleep(LOOK.min(every.saturating_sub(begun.elapsed())));
            }
            if !has_ended(&identity) {
                continue;
            }
            let last = if is_done { ", and the last one is whole" } else { "" };
            complain(&format!("process {} has ended; no further image is written{last}", args.pid));
        }
        return Ok(if is_done { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
}

/// Whether a process that answers nothing any more ends: its connections end a moment before it does.
fn is_ending(identity: &Identity) -> bool {
    let until = Instant::now() + LOOK;
    while !has_ended(identity) {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Whether the process that was asked is no more, or is about to be: its page is gone then.
fn has_ended(identity: &Identity) -> bool {
    let is_there = || Pages::new().look().rows.iter().any(|row| row.told.process.identity == *identity);
    identity.life().is_over() || !is_there()
}

fn find(pid: u32) -> Result<Listed, Failure> {
    let found = control::find(&[pid])?;
    found.into_iter().next().ok_or_else(|| Failure::usage(format!("no process {pid} is known here")))
}

fn told(pid: u32, folder: &std::path::Path, reply: Result<Reply, String>) -> Told {
    let (error, stored) = match reply {
        Ok(Reply::Stored(stored)) => (None, stored),
        Ok(Reply::Refused { why }) | Err(why) => (Some(why), Stored::default()),
        Ok(_) => (Some("it answered nothing at the end".to_owned()), Stored::default()),
    };
    let Stored { generation, bytes, stored, left_out, in_stop, stopped_microseconds, microseconds } = stored;
    Told {
        pid,
        folder: folder.to_owned(),
        error,
        generation,
        bytes,
        stored_bytes: stored,
        left_out_bytes: left_out,
        in_stop_bytes: in_stop,
        stopped_microseconds,
        microseconds,
    }
}

/// Whether there is an image.
fn print(args: &Args, told: Told) -> Result<bool, Failure> {
    if args.json {
        let text = serde_json::to_string(&told).map_err(|error| Failure::broken(error.to_string()))?;
        stdout::print(&format!("{}\n", terminal::clean_json(&text)))?;
    }
    if let Some(error) = &told.error {
        complain(&format!("process {}: {error}", told.pid));
        return Ok(false);
    }
    if args.json {
        return Ok(true);
    }
    let seconds = |microseconds: u64| microseconds as f64 * 1e-6;
    let mut line = format!(
        "process {}: generation {} in {}: {} of memory, {} on the disk, in {:.2} s; the program was stopped for {:.3} s",
        told.pid,
        told.generation,
        terminal::clean(&told.folder.display().to_string()),
        format_size(told.bytes),
        format_size(told.stored_bytes),
        seconds(told.microseconds),
        seconds(told.stopped_microseconds)
    );
    if told.in_stop_bytes > 0 {
        line +=
            &format!("; {} found no room elsewhere and were written during the stop", format_size(told.in_stop_bytes));
    }
    if told.left_out_bytes > 0 {
        line += &format!("; {} of its own memory are not in it", format_size(told.left_out_bytes));
    }
    stdout::print(&format!("{line}\n"))?;
    Ok(true)
}
