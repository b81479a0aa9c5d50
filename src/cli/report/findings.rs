//! What was found, over all processes: the same mistake in eight ranks is one finding with eight ranks.

use std::collections::BTreeMap;

use gpupool_config::format_size;
use gpupool_events::{Finding, FindingMade, Site};

use super::model::{Context, Process};

/// A finding and the processes that it was made in.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    pub code: String,
    /// What the first process said.
    pub what: String,
    pub site: Option<Site>,
    pub facts: BTreeMap<String, String>,
    /// GPUs, in order, each once.
    pub devices: Vec<u32>,
    /// Indices of the processes, in order, each once.
    pub processes: Vec<usize>,
    /// How often it was made.
    pub times: u64,
}

/// All findings: those of the logs, by code, and those that only the logs together show.
pub fn all(processes: &[Process]) -> Vec<Found> {
    let made = processes.iter().enumerate();
    let mut found = gathered(
        made.flat_map(|(index, process)| process.findings.iter().map(move |(made, times)| (index, made, *times))),
    );
    let ranks = Finding::RANKS_ON_GPU_0.code;
    if !found.iter().any(|found| found.code == ranks) {
        found.extend(ranks_on_gpu_0(processes));
    }
    found.sort_by(|a, b| a.code.cmp(&b.code));
    found
}

/// Findings with the processes that made them, by code.
pub fn merge<'a>(made: impl Iterator<Item = (usize, &'a FindingMade)>) -> Vec<Found> {
    let mut found = gathered(made.map(|(index, made)| (index, made, 1)));
    found.sort_by(|a, b| a.code.cmp(&b.code));
    found
}

fn gathered<'a>(made: impl Iterator<Item = (usize, &'a FindingMade, u64)>) -> Vec<Found> {
    let mut found: Vec<Found> = Vec::new();
    for (index, made, times) in made {
        match found.iter_mut().find(|found| found.is_same(made)) {
            Some(same) => same.add(index, made, times),
            None => found.push(Found::new(index, made, times)),
        }
    }
    found
}

impl Found {
    fn new(process: usize, made: &FindingMade, times: u64) -> Found {
        Found {
            code: made.code.clone(),
            what: made.what.clone(),
            site: made.site.clone(),
            facts: made.facts.clone(),
            devices: made.device.into_iter().collect(),
            processes: vec![process],
            times,
        }
    }

    /// The same line is the same mistake, whatever GPU it meets; without a line only the same words are.
    fn is_same(&self, made: &FindingMade) -> bool {
        self.code == made.code && self.site == made.site && (made.site.is_some() || self.what == made.what)
    }

    fn add(&mut self, process: usize, made: &FindingMade, times: u64) {
        self.times += times;
        if let Some(device) = made.device.filter(|device| !self.devices.contains(device)) {
            self.devices.push(device);
            self.devices.sort_unstable();
        }
        if !self.processes.contains(&process) {
            self.processes.push(process);
        }
    }
}

/// GP002: several ranks of one host with a context on the GPU that is the first of each, although there are more GPUs.
fn ranks_on_gpu_0(processes: &[Process]) -> Option<Found> {
    let ranks = |process: &Process| process.start.as_ref().and_then(|start| start.local_rank);
    let several_gpus = processes.iter().any(sees_more_than_one_gpu);
    let on_gpu_0: Vec<(usize, u32, &Context)> = processes
        .iter()
        .enumerate()
        .filter_map(|(index, process)| Some((index, ranks(process)?, process)))
        .filter_map(|(index, rank, process)| {
            Some((index, rank, process.contexts.iter().find(|context| context.made.device == 0)?))
        })
        .collect();
    // With a list of its own for each rank, GPU 0 is another GPU in each of them. UUIDs tell; a log without them can only
    // be trusted if every rank was shown the same GPUs.
    let (first, _, first_context) = on_gpu_0.first()?;
    let same_gpu = |index: usize, context: &Context| match (&first_context.made.uuid, &context.made.uuid) {
        (Some(a), Some(b)) => a == b,
        _ => visible_devices(&processes[*first]) == visible_devices(&processes[index]),
    };
    let together: Vec<_> = on_gpu_0.iter().filter(|(index, _, context)| same_gpu(*index, context)).collect();
    let mut distinct: Vec<u32> = together.iter().map(|(_, rank, _)| *rank).collect();
    distinct.sort_unstable();
    distinct.dedup();
    if distinct.len() < 2 || !several_gpus {
        return None;
    }
    let costs = together.iter().filter_map(|(_, _, context)| context.made.cost);
    let cost = costs.fold(0, u64::saturating_add);
    let taken = if cost > 0 { format!(", {} together", format_size(cost)) } else { String::new() };
    // The rank whose own GPU it is does nothing wrong; the line to change is another's.
    let (_, _, guilty) = together.iter().find(|(_, rank, _)| *rank != 0)?;
    Some(Found {
        code: Finding::RANKS_ON_GPU_0.code.to_owned(),
        what: format!("{} ranks of the job have a context on GPU 0{taken}", distinct.len()),
        site: guilty.made.site.clone(),
        facts: BTreeMap::new(),
        devices: vec![0],
        processes: together.iter().map(|(index, _, _)| *index).collect(),
        times: together.len() as u64,
    })
}

fn visible_devices(process: &Process) -> Option<&str> {
    process.init.as_ref().and_then(|init| init.visible_devices.as_deref())
}

fn sees_more_than_one_gpu(process: &Process) -> bool {
    let other_gpu = |place: &str| place.strip_prefix("gpu").is_some_and(|number| number != "0");
    process.start.as_ref().and_then(|start| start.gpus).is_some_and(|gpus| gpus > 1)
        || process.contexts.iter().any(|context| context.made.device > 0)
        || process.levels.keys().any(|place| other_gpu(place))
        || process.exit.as_ref().is_some_and(|exit| exit.peak.iter().any(|peak| other_gpu(&peak.place)))
}
