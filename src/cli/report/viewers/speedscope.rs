//! Bytes by place in the program, for `https://www.speedscope.app`: one profile a process and question, each a flame graph of bytes.

use std::collections::HashMap;
use std::io::{self, Write};

use gpupool_events::Site;
use serde_json::{Value, json};

use super::frames::{Frame, frames};
use crate::report::model::{Holder, Logs, Process, labels};

/// The format that this is, as its schema calls itself.
const SCHEMA: &str = "https://www.speedscope.app/file-format-schema.json";

/// Stacks with the bytes of each: one graph.
struct Profile {
    name: String,
    samples: Vec<Vec<usize>>,
    weights: Vec<u64>,
}

/// Frames, each once, as all profiles of a file share them.
#[derive(Default)]
struct Frames {
    all: Vec<Frame>,
    numbers: HashMap<Frame, usize>,
}

impl Frames {
    fn number(&mut self, frame: Frame) -> usize {
        *self.numbers.entry(frame).or_insert_with_key(|frame| {
            self.all.push(frame.clone());
            self.all.len() - 1
        })
    }
}

/// Writes the file; how many profiles it has.
pub fn write(logs: &Logs, mut out: impl Write) -> io::Result<usize> {
    let mut known = Frames::default();
    let mut profiles: Vec<Profile> = Vec::new();
    for (process, label) in logs.processes.iter().zip(labels(logs)) {
        for question in questions(process) {
            let name = format!("{label}: {}", question.name);
            let mut profile = Profile { name, samples: Vec::new(), weights: Vec::new() };
            for held in question.held.iter().filter(|held| held.bytes > 0) {
                // The outermost first, and around all of them what kind of memory it is.
                let site = held.site.map(frames).filter(|frames| !frames.is_empty());
                let mut stack = site.unwrap_or_else(|| vec![Frame::words("a place that the log does not tell")]);
                stack.push(Frame::words(&held.around));
                profile.samples.push(stack.into_iter().rev().map(|frame| known.number(frame)).collect());
                profile.weights.push(held.bytes);
            }
            if !profile.samples.is_empty() {
                profiles.push(profile);
            }
        }
    }
    let frames: Vec<Value> = known.all.iter().map(of_frame).collect();
    let count = profiles.len();
    let profiles: Vec<Value> = profiles.into_iter().map(of_profile).collect();
    let file = json!({
        "$schema": SCHEMA, "exporter": format!("gpupool {}", gpupool_config::VERSION), "name": name(logs),
        "activeProfileIndex": 0, "shared": {"frames": frames}, "profiles": profiles,
    });
    serde_json::to_writer(&mut out, &file)?;
    out.flush()?;
    Ok(count)
}

fn name(logs: &Logs) -> String {
    let names: Vec<String> = logs.logs.iter().take(3).map(|log| log.path.display().to_string()).collect();
    let more = logs.logs.len().saturating_sub(names.len());
    if more > 0 { format!("{} and {more} more", names.join(", ")) } else { names.join(", ") }
}

fn of_frame(frame: &Frame) -> Value {
    let mut value = json!({"name": frame.function});
    if !frame.file.is_empty() {
        value["file"] = json!(frame.file);
    }
    if frame.line > 0 {
        value["line"] = json!(frame.line);
    }
    value
}

fn of_profile(profile: Profile) -> Value {
    let end: u64 = profile.weights.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes));
    json!({
        "type": "sampled", "name": profile.name, "unit": "bytes", "startValue": 0, "endValue": end,
        "samples": profile.samples, "weights": profile.weights,
    })
}

/// What a profile answers.
struct Question<'a> {
    name: &'static str,
    held: Vec<Held<'a>>,
}

struct Held<'a> {
    site: Option<&'a Site>,
    bytes: u64,
    /// What stands around all places of its kind.
    around: String,
}

/// The questions that the log of this process answers.
fn questions(process: &Process) -> Vec<Question<'_>> {
    let holders = &process.holders;
    let of_blocks = |bytes: &dyn Fn(&Holder) -> u64| {
        let held = |holder: &_| Held {
            site: holders.site(holder),
            bytes: bytes(holder),
            around: holder.label.clone().map_or_else(|| "no label".to_owned(), |label| format!("label {label}")),
        };
        holders.all().into_iter().map(held).collect::<Vec<_>>()
    };
    let contexts = process.contexts.iter().map(|context| Held {
        site: context.made.site.as_ref(),
        bytes: context.made.cost.unwrap_or(0),
        around: format!("context on GPU {}", context.made.device),
    });
    let modules = process.sites.iter().filter(|(_, sum)| sum.modules > 0 && sum.contexts == 0).map(|(site, sum)| {
        Held { site: Some(site), bytes: u64::try_from(sum.memory).unwrap_or(0), around: "modules".to_owned() }
    });
    let pinned = process.pinned.sites.iter().map(|site| Held {
        site: site.site.as_ref(),
        bytes: site.peak,
        around: "pinned memory".to_owned(),
    });
    vec![
        Question { name: "blocks at the peak", held: of_blocks(&|holder| holders.at_peak(holder)[0]) },
        Question { name: "blocks at the end", held: of_blocks(&|holder| holders.now(holder)[0]) },
        Question {
            name: "blocks that lay elsewhere at the peak",
            held: of_blocks(&|holder| holders.at_peak(holder)[1]),
        },
        Question { name: "contexts and modules", held: contexts.chain(modules).collect() },
        Question { name: "pinned memory, each place at its own peak", held: pinned.collect() },
    ]
}
