//! What the page draws: quantities over time, cut to the length that a page has room for, however long the log was.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gpupool_events::Site;
use serde_json::{Value, json};

use super::tame::{tame, tame_text};
use crate::report::model::{Holder, Logs, Moment, Process, Timeline};

/// Values of all lines together, and of one. At a dozen letters each the page keeps below 5 MB.
const VALUES: usize = 120_000;
const POINTS: usize = 1024;
const LEAST_POINTS: usize = 64;
/// Processes with lines of their own, those that held most; the others are drawn as one.
const PROCESSES: usize = 48;
/// Names with lines of their own, those that held most.
const NAMES: usize = 40;
/// Moments at which it is told who held what, and holders that are told.
const MOMENTS: usize = 200;
const HOLDERS: usize = 240;
/// Processes whose addresses are drawn, those that held most; at how many moments, all together; and runs of cells of one moment.
const MAPS: usize = 12;
const MAP_MOMENTS: usize = 64;
const MAP_CELLS: usize = 2048;
/// Frames of a call site, from the innermost one.
const FRAMES: usize = 24;

/// Everything that is drawn. Times are seconds from the start of the page's clock, sizes bytes; a line is its runs: value, length, ….
pub fn data(logs: &Logs, labels: &[String]) -> Value {
    let clock = Clock::of(&logs.processes);
    let mut order: Vec<usize> = (0..logs.processes.len()).collect();
    order.sort_by_key(|index| Reverse(logs.processes[*index].all.peak()));
    let (own, others) = order.split_at(order.len().min(PROCESSES));
    let lines: usize = own.iter().map(|index| lines_of(&logs.processes[*index])).sum();
    let points = (VALUES / lines.max(1)).clamp(LEAST_POINTS, POINTS);
    let cut = Cut { clock: &clock, points };
    let mut own = own.to_vec();
    own.sort_unstable();
    let mut drawn: Vec<Value> =
        own.iter().map(|index| cut.process(&logs.processes[*index], &labels[*index], *index)).collect();
    if !others.is_empty() {
        let others: Vec<&Process> = others.iter().map(|index| &logs.processes[*index]).collect();
        drawn.push(cut.others(&others));
    }
    json!({
        "end": clock.end, "points": points, "moments": MOMENTS, "processes": drawn, "names": cut.names(logs, labels),
        "holders": cut.holders(logs), "maps": cut.maps(logs),
    })
}

fn lines_of(process: &Process) -> usize {
    process.levels.len() + process.held.len() + process.residence.len() + 5
}

/// What the times of the page count from.
struct Clock {
    /// Seconds since 1970; `None` where the clocks of the processes are not one, and each counts from its own start.
    origin: Option<f64>,
    end: f64,
}

impl Clock {
    fn of(processes: &[Process]) -> Clock {
        let mut hosts: Vec<Option<&str>> =
            processes.iter().map(|one| one.start.as_ref().and_then(|start| start.host.as_deref())).collect();
        hosts.sort_unstable();
        hosts.dedup();
        let first = processes.iter().map(Process::origin).fold(f64::INFINITY, f64::min);
        let last = processes.iter().map(|one| one.last).fold(0.0, f64::max);
        let longest = processes.iter().map(|one| one.last - one.origin()).fold(0.0, f64::max);
        // Logs of other days beside each other would leave nothing of either to be seen.
        let is_one = hosts.len() <= 1 && last - first <= longest * 8.0;
        let end = if is_one { last - first } else { longest };
        let end = if end.is_finite() { end.clamp(0.001, 1e12) } else { 1e12 };
        Clock { origin: is_one.then_some(first), end }
    }

    /// When a process started, by the page's clock.
    fn offset(&self, process: &Process) -> f64 {
        self.origin.map_or(0.0, |origin| process.origin() - origin)
    }
}

struct Cut<'a> {
    clock: &'a Clock,
    points: usize,
}

impl Cut<'_> {
    /// What one line is at each point.
    fn points(&self, process: &Process, line: &Timeline) -> Vec<u64> {
        let mut points = line.parts_of(self.points, self.clock.offset(process), self.clock.end);
        // Nothing is known after the process has ended, and nothing held.
        let end = (self.clock.offset(process) + process.last - process.origin()) / self.clock.end * self.points as f64;
        if process.exit.is_some() && end.is_finite() {
            points.iter_mut().skip(end as usize + 1).for_each(|value| *value = 0);
        }
        points
    }

    fn line(&self, process: &Process, line: &Timeline) -> Value {
        runs(&self.points(process, line))
    }

    fn lines<'a>(&self, process: &Process, lines: impl Iterator<Item = (&'a str, &'a Timeline)>) -> Value {
        lines
            .filter(|(_, line)| line.peak() > 0)
            .map(|(name, line)| json!({"name": tame_text(name), "peak": line.peak(), "line": self.line(process, line)}))
            .collect()
    }

    fn process(&self, process: &Process, label: &str, index: usize) -> Value {
        let named = |lines: &BTreeMap<String, Timeline>| {
            self.lines(process, lines.iter().map(|(name, line)| (name.as_str(), line)))
        };
        let moves = [("came near", &process.moves.came), ("left", &process.moves.left)];
        let (_, peak, peak_at) = process.holders.total();
        json!({
            "index": index, "label": label, "start": self.clock.offset(process), "used": named(&process.levels),
            "held": named(&process.held), "residence": self.lines(process, process.residence.iter().map(|(name, line)| (*name, line))),
            "pinned": self.lines(process, process.pinned.lines().into_iter()), "moves": self.lines(process, moves.into_iter()),
            "peak": peak, "peak_at": self.clock.offset(process) + peak_at,
        })
    }

    /// Processes that have no lines of their own, in one.
    fn others(&self, others: &[&Process]) -> Value {
        let mut sums: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        for process in others {
            for (place, line) in &process.levels {
                let sum = sums.entry(place).or_insert_with(|| vec![0; self.points]);
                sum.iter_mut()
                    .zip(self.points(process, line))
                    .for_each(|(sum, value)| *sum = sum.saturating_add(value));
            }
        }
        let used: Vec<Value> = sums
            .iter()
            .map(|(place, sum)| json!({"name": tame_text(place), "peak": sum.iter().max(), "line": runs(sum)}))
            .collect();
        json!({
            "index": null, "label": format!("{} others", others.len()), "start": 0, "used": used, "held": [], "residence": [],
            "pinned": [], "moves": [], "peak": 0, "peak_at": 0,
        })
    }

    /// The names that the program gave its memory.
    fn names(&self, logs: &Logs, labels: &[String]) -> Value {
        let named = logs.processes.iter().zip(labels).enumerate();
        let mut all: Vec<_> = named
            .flat_map(|(index, (process, _))| {
                process.named.iter().map(move |(name, line)| (index, process, name, line))
            })
            .filter(|(.., line)| line.peak() > 0)
            .collect();
        all.sort_by_key(|(.., line)| Reverse(line.peak()));
        let told = all.iter().take(NAMES).map(|(index, process, name, line)| {
            json!({"process": index, "name": tame_text(name), "peak": line.peak(), "line": self.line(process, line)})
        });
        told.collect()
    }

    /// What the pool's addresses were made of, of those that held most.
    fn maps(&self, logs: &Logs) -> Value {
        let mut all: Vec<(usize, &Process)> =
            logs.processes.iter().enumerate().filter(|(_, one)| one.map.is_known()).collect();
        all.sort_by_key(|(_, process)| Reverse(process.all.peak()));
        all.truncate(MAPS);
        let most = MAP_MOMENTS / all.len().max(1);
        let told = all.into_iter().map(|(index, process)| {
            let moments = process.map.moments(most, process.last - process.origin(), &process.holders);
            let moments: Vec<Value> = moments.iter().map(|moment| self.map(process, moment)).collect();
            json!({"process": index, "moments": moments})
        });
        told.collect()
    }

    fn map(&self, process: &Process, moment: &Moment) -> Value {
        let places = moment.places.iter().map(|one| {
            json!({
                "place": tame_text(&one.place), "held": one.held, "used": one.used, "holes": one.holes, "largest": one.largest,
            })
        });
        let cells = moment
            .cells
            .iter()
            .take(MAP_CELLS)
            .flat_map(|run| [run.place as u64, u64::from(run.tenths), u64::from(run.count)]);
        json!({
            "at": self.clock.offset(process) + moment.at, "cell": moment.cell, "places": places.collect::<Vec<_>>(),
            "cells": cells.collect::<Vec<_>>(),
        })
    }

    /// Who held what at which moment. Frames are told once and named by their numbers.
    fn holders(&self, logs: &Logs) -> Value {
        let mut all: Vec<(usize, &Process, &Holder)> = Vec::new();
        for (index, process) in logs.processes.iter().enumerate() {
            all.extend(process.holders.all().into_iter().map(|holder| (index, process, holder)));
        }
        all.sort_by_key(|(.., holder)| Reverse(holder.line.peak()));
        let lasts = |process: &Process, line: &Timeline| {
            let mut lasts = line.lasts_of(MOMENTS, self.clock.offset(process), self.clock.end);
            let end = (self.clock.offset(process) + process.last - process.origin()) / self.clock.end * MOMENTS as f64;
            if process.exit.is_some() && end.is_finite() {
                lasts.iter_mut().skip(end as usize + 1).for_each(|value| *value = 0);
            }
            lasts
        };
        let (told, rest) = all.split_at(all.len().min(HOLDERS));
        let mut frames = Frames::default();
        let mut holders: Vec<Value> = Vec::new();
        for (index, process, holder) in told {
            holders.push(json!({
                "process": index, "frames": frames.of(process.holders.site(holder)), "label": holder.label.as_deref().map(tame_text),
                "line": runs(&lasts(process, &holder.line)), "far": runs(&lasts(process, &holder.far)),
                "at_peak": process.holders.at_peak(holder),
            }));
        }
        let mut sums: BTreeMap<usize, (Vec<u64>, [u64; 2])> = BTreeMap::new();
        for (index, process, holder) in rest {
            let (sum, at_peak) = sums.entry(*index).or_insert_with(|| (vec![0; MOMENTS], [0; 2]));
            let more = lasts(process, &holder.line);
            sum.iter_mut().zip(more).for_each(|(sum, value)| *sum = sum.saturating_add(value));
            for (sum, value) in at_peak.iter_mut().zip(process.holders.at_peak(holder)) {
                *sum = sum.saturating_add(value);
            }
        }
        for (index, (sum, at_peak)) in sums {
            let other = frames.number("other places".to_owned());
            holders.push(json!({
                "process": index, "frames": [other], "label": null, "line": runs(&sum), "far": [0, MOMENTS], "at_peak": at_peak,
            }));
        }
        json!({"frames": tame(json!(frames.texts)), "list": holders})
    }
}

/// What frames are called, each once.
#[derive(Default)]
struct Frames {
    texts: Vec<String>,
    numbers: BTreeMap<String, usize>,
}

impl Frames {
    /// The frames of a place, the outermost first.
    fn of(&mut self, site: Option<&Site>) -> Vec<usize> {
        let Some(site) = site else { return Vec::new() };
        let python = site.python.iter().map(ToString::to_string);
        let native = site.native.iter().map(ToString::to_string);
        let mut frames: Vec<String> =
            if site.python.is_empty() { native.take(FRAMES).collect() } else { python.take(FRAMES).collect() };
        frames.reverse();
        frames.into_iter().map(|frame| self.number(frame)).collect()
    }

    fn number(&mut self, text: String) -> usize {
        let next = self.texts.len();
        *self.numbers.entry(text).or_insert_with_key(|text| {
            self.texts.push(text.clone());
            next
        })
    }
}

/// Most lines stay as they are for long: each value with the number of points that have it.
fn runs(points: &[u64]) -> Value {
    points.chunk_by(|one, next| one == next).flat_map(|run| [run[0], run.len() as u64]).collect()
}
