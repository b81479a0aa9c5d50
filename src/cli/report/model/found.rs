//! What was found, over all processes: the same mistake in eight ranks is one finding with eight ranks.

use std::collections::BTreeMap;

use gpupool_config::format_size;
use gpupool_events::{Finding, FindingMade, RankOnGpu0, Site};

use super::process::{Context, Process};
use crate::words::ranges;

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
pub fn findings(processes: &[Process]) -> Vec<Found> {
    let made = processes.iter().enumerate();
    let mut found = gathered(
        made.flat_map(|(index, process)| process.findings.iter().map(move |(made, times)| (index, made, *times))),
    );
    let ranks: Vec<(usize, RankOnGpu0)> =
        processes.iter().enumerate().filter_map(|(index, process)| Some((index, on_gpu_0(process)?))).collect();
    found.extend(ranks_on_gpu_0(&ranks));
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

/// What a log tells of a rank with a context on its GPU 0.
fn on_gpu_0(process: &Process) -> Option<RankOnGpu0> {
    let start = process.start.as_ref()?;
    let Context { made, .. } = process.contexts.iter().find(|context| context.made.device == 0)?;
    Some(RankOnGpu0 {
        local_rank: start.local_rank?,
        job_ranks: start.job_ranks,
        job: start.job.clone(),
        host: start.host.clone(),
        gpus: Some(gpus(process)),
        uuid: made.uuid.clone(),
        visible_devices: visible_devices(process).map(str::to_owned),
        cost: made.cost,
        site: made.site.clone(),
    })
}

/// GP002: more ranks of one job with a context on the GPU that is the first of each than have to share it, although there are
/// more GPUs. Each rank comes with the number of its process.
pub fn ranks_on_gpu_0(ranks: &[(usize, RankOnGpu0)]) -> Vec<Found> {
    let mut groups: Vec<Vec<&(usize, RankOnGpu0)>> = Vec::new();
    for rank in ranks {
        match groups.iter_mut().find(|group| is_same_gpu(&group[0].1, &rank.1)) {
            Some(group) => group.push(rank),
            None => groups.push(vec![rank]),
        }
    }
    groups.iter().filter_map(|group| on_one_gpu(group)).collect()
}

/// With a list of its own for each rank, GPU 0 is another GPU in each of them. UUIDs tell; where there are none, all is the
/// same only if both were shown the same GPUs.
fn is_same_gpu(one: &RankOnGpu0, other: &RankOnGpu0) -> bool {
    let gpu = match (&one.uuid, &other.uuid) {
        (Some(one), Some(other)) => one == other,
        _ => one.visible_devices == other.visible_devices,
    };
    gpu && one.job == other.job && one.host == other.host
}

fn on_one_gpu(group: &[&(usize, RankOnGpu0)]) -> Option<Found> {
    let gpus = group.iter().filter_map(|(_, rank)| rank.gpus).max().unwrap_or(1);
    let mut distinct: Vec<u32> = group.iter().map(|(_, rank)| rank.local_rank).collect();
    distinct.sort_unstable();
    distinct.dedup();
    let told = group.iter().filter_map(|(_, rank)| rank.job_ranks).max().unwrap_or(0);
    let job_ranks = distinct.last().map_or(told, |last| told.max(last + 1));
    if gpus < 2 || distinct.len() as u64 <= u64::from(job_ranks.div_ceil(gpus)).max(1) {
        return None;
    }
    let cost = group.iter().filter_map(|(_, rank)| rank.cost).fold(0, u64::saturating_add);
    let taken = if cost > 0 { format!(", {} in all", format_size(cost)) } else { String::new() };
    // The rank whose own GPU it is does nothing wrong; the line to change is another's.
    let (_, guilty) = group.iter().copied().find(|(_, rank)| is_guest(rank)).or(group.last().copied())?;
    let mut processes: Vec<usize> = group.iter().map(|(index, _)| *index).collect();
    processes.dedup();
    Some(Found {
        code: Finding::RANKS_ON_GPU_0.code.to_owned(),
        what: format!(
            "local ranks {} of one job made a context on GPU 0{taken}; there are {gpus} GPUs",
            ranges(&distinct)
        ),
        site: guilty.site.clone(),
        facts: BTreeMap::new(),
        devices: vec![0],
        times: processes.len() as u64,
        processes,
    })
}

/// Whether GPU 0 is another rank's, where ranks are given GPUs in turn.
pub fn is_guest(rank: &RankOnGpu0) -> bool {
    rank.gpus.is_some_and(|gpus| gpus > 1 && !rank.local_rank.is_multiple_of(gpus))
}

fn visible_devices(process: &Process) -> Option<&str> {
    process.init.as_ref().and_then(|init| init.visible_devices.as_deref())
}

/// How many GPUs a process sees; where its log does not say, as many as it is known to have met.
fn gpus(process: &Process) -> u32 {
    let told = process.init.as_ref().and_then(|init| init.gpus);
    let number = |place: &str| place.strip_prefix("gpu").and_then(|number| number.parse::<u32>().ok());
    let places = process.levels.keys().map(String::as_str);
    let peaks = process.exit.iter().flat_map(|exit| &exit.peak).map(|peak| peak.place.as_str());
    let met = places.chain(peaks).filter_map(number).chain(process.contexts.iter().map(|context| context.made.device));
    told.unwrap_or_else(|| met.max().map_or(1, |most| most.saturating_add(1)))
}
