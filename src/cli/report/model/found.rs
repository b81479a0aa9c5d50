//! What was found, over all processes: the same mistake in eight ranks is one finding with eight ranks.

use std::collections::BTreeMap;

use gpupool_config::format_size;
use gpupool_events::{Finding, FindingMade, RankOnGpu, Site};

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
    let ranks: Vec<(usize, RankOnGpu)> = processes
        .iter()
        .enumerate()
        .flat_map(|(index, process)| on_gpus(process).into_iter().map(move |rank| (index, rank)))
        .collect();
    found.extend(ranks_on_one_gpu(&ranks));
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

    /// Whether this is the same mistake: one at the same line of the program, whatever GPU it meets, or without a line one in the
    /// same words.
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

/// What a log tells of a rank's first context on each of its GPUs.
fn on_gpus(process: &Process) -> Vec<RankOnGpu> {
    let Some((start, local_rank)) = process.start.as_ref().and_then(|start| Some((start, start.local_rank?))) else {
        return Vec::new();
    };
    let mut on_gpus: Vec<RankOnGpu> = Vec::new();
    for Context { made, .. } in &process.contexts {
        if on_gpus.iter().any(|known| known.device == made.device) {
            continue;
        }
        on_gpus.push(RankOnGpu {
            device: made.device,
            local_rank,
            job_ranks: start.job_ranks,
            job: start.job.clone(),
            host: start.host.clone(),
            gpus: Some(gpus(process)),
            uuid: made.uuid.clone(),
            visible_devices: visible_devices(process).map(str::to_owned),
            cost: made.cost,
            site: made.site.clone(),
        });
    }
    on_gpus
}

/// Contexts of ranks, each with the number of its process.
type Ranks<'a> = Vec<&'a (usize, RankOnGpu)>;

/// GP002: more ranks of one job with a context on one GPU than have to share it, although there are more GPUs. Each rank comes
/// with the number of its process. The same ranks on several GPUs, as after a look at each of them, are one finding.
pub fn ranks_on_one_gpu(ranks: &[(usize, RankOnGpu)]) -> Vec<Found> {
    let mut gpus: Vec<Ranks> = Vec::new();
    for rank in ranks {
        match gpus.iter_mut().find(|gpu| is_same_gpu(&gpu[0].1, &rank.1)) {
            Some(gpu) => gpu.push(rank),
            None => gpus.push(vec![rank]),
        }
    }
    let mut shared: Vec<Ranks> = Vec::new();
    for gpu in &gpus {
        let of_the_job = gpus.iter().filter(|other| is_same_job(&other[0].1, &gpu[0].1));
        let known = u32::try_from(of_the_job.count()).unwrap_or(u32::MAX);
        if !is_shared(gpu, known) {
            continue;
        }
        let same =
            shared.iter_mut().find(|other| is_same_job(&other[0].1, &gpu[0].1) && distinct(other) == distinct(gpu));
        match same {
            Some(other) => other.extend(gpu),
            None => shared.push(gpu.clone()),
        }
    }
    shared.iter().filter_map(|ranks| of_ranks(ranks)).collect()
}

/// The number of a GPU is another one in each rank with a list of its own. UUIDs tell; where there are none, the number means the
/// same only if both were shown the same GPUs.
fn is_same_gpu(one: &RankOnGpu, other: &RankOnGpu) -> bool {
    let gpu = match (&one.uuid, &other.uuid) {
        (Some(one), Some(other)) => one == other,
        _ => (&one.visible_devices, one.device) == (&other.visible_devices, other.device),
    };
    gpu && is_same_job(one, other)
}

fn is_same_job(one: &RankOnGpu, other: &RankOnGpu) -> bool {
    one.job == other.job && one.host == other.host
}

/// The ranks, in order, each once.
fn distinct(ranks: &[&(usize, RankOnGpu)]) -> Vec<u32> {
    let mut distinct: Vec<u32> = ranks.iter().map(|(_, rank)| rank.local_rank).collect();
    distinct.sort_unstable();
    distinct.dedup();
    distinct
}

/// How many GPUs these ranks could be on.
fn gpus_of(ranks: &[&(usize, RankOnGpu)]) -> u32 {
    ranks.iter().filter_map(|(_, rank)| rank.gpus).max().unwrap_or(1)
}

/// Whether more ranks are on this GPU than have to be. Ranks of the job were met on `known` GPUs; each may be shown fewer.
fn is_shared(gpu: &[&(usize, RankOnGpu)], known: u32) -> bool {
    let gpus = gpus_of(gpu).max(known);
    let distinct = distinct(gpu);
    let told = gpu.iter().filter_map(|(_, rank)| rank.job_ranks).max().unwrap_or(0);
    let job_ranks = distinct.last().map_or(told, |last| told.max(last + 1));
    gpus >= 2 && distinct.len() as u64 > u64::from(job_ranks.div_ceil(gpus)).max(1)
}

fn of_ranks(ranks: &[&(usize, RankOnGpu)]) -> Option<Found> {
    let cost = ranks.iter().filter_map(|(_, rank)| rank.cost).fold(0, u64::saturating_add);
    let taken = if cost > 0 { format!(", {} in all", format_size(cost)) } else { String::new() };
    // The rank whose own GPU it is does nothing wrong; the line to change is another's.
    let (_, guilty) = ranks.iter().copied().find(|(_, rank)| is_guest(rank)).or(ranks.last().copied())?;
    let mut processes: Vec<usize> = ranks.iter().map(|(index, _)| *index).collect();
    processes.sort_unstable();
    processes.dedup();
    let mut devices: Vec<u32> = ranks.iter().map(|(_, rank)| rank.device).collect();
    devices.sort_unstable();
    devices.dedup();
    let distinct = distinct(ranks);
    let one_gpu = ranks.iter().all(|(_, rank)| is_same_gpu(rank, guilty));
    let place = match devices.as_slice() {
        [device] => format!("GPU {device}"),
        _ if one_gpu => {
            let mut names: Vec<String> =
                ranks.iter().map(|(_, rank)| format!("GPU {} of rank {}", rank.device, rank.local_rank)).collect();
            names.dedup();
            format!("one and the same GPU ({})", names.join(", "))
        }
        several => format!("GPUs {}", ranges(several)),
    };
    let gpus = gpus_of(ranks);
    let there = if gpus > 1 { format!("there are {gpus} GPUs") } else { "the job has other GPUs".to_owned() };
    Some(Found {
        code: Finding::RANKS_ON_ONE_GPU.code.to_owned(),
        what: format!("local ranks {} of one job made a context on {place}{taken}; {there}", ranges(&distinct)),
        site: guilty.site.clone(),
        facts: BTreeMap::new(),
        devices,
        times: processes.len() as u64,
        processes,
    })
}

/// Whether the GPU is another rank's, where ranks are given GPUs in turn.
fn is_guest(rank: &RankOnGpu) -> bool {
    rank.gpus.is_some_and(|gpus| gpus > 1 && rank.local_rank % gpus != rank.device)
}

/// Whether the GPU is most likely another rank's. GPU 0 is, for every rank that is not given it, as mistakes lead there. Another
/// one may be a rank's own by another rule where there are more GPUs than ranks.
pub fn is_on_anothers(rank: &RankOnGpu) -> bool {
    let each_has_a_rank = rank.gpus.zip(rank.job_ranks).is_some_and(|(gpus, ranks)| gpus <= ranks);
    is_guest(rank) && (rank.device == 0 || each_has_a_rank)
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
