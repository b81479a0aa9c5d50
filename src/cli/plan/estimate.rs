//! What the logs say of how much memory a program needs and what far memory costs it, and what that would be elsewhere. Pure.

use std::collections::BTreeMap;

use gpupool_lending::CONTEXT;
use gpupool_tiers::FarLink;

use super::machine::{Demand, Lies, Machine};
use crate::report::{NEAR_AND_FAR, Process};

/// Parts that the time of the logs is cut into.
const PARTS: usize = 400;
/// Far bytes that are so much more than the log's are told of as beyond what it saw.
const BEYOND: f64 = 4.0;
/// What a program takes with all near is no less than this part of what it took: what was lost is estimated, and where it is nearly all of
/// the time, the rest is no measure of anything.
const LEAST_NEAR: f64 = 0.05;

/// Processes that ran at the same time, as their logs tell.
pub struct Program {
    /// Memory in use in each part of the time, one row for each process and each GPU that it works on.
    demands: Vec<(Demand, Vec<u64>)>,
    /// What contexts take, by GPU.
    contexts: Vec<u64>,
    /// What one takes, where the logs tell.
    context: Option<u64>,
    /// Seconds from the first start to the last end.
    pub seconds: f64,
    /// The most that was in use at once.
    pub peak: u64,
    /// What far memory cost; none where nothing was far.
    pub far: Option<Far>,
}

/// What far memory cost while the logs were written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Far {
    /// Bytes on other GPUs and on the host, in their mean over the time.
    pub on_peers: f64,
    pub on_host: f64,
    /// Seconds that kernels lost, as estimated, in the process that lost most; none where no kernel was seen to read any of it.
    pub lost: Option<f64>,
}

/// What would be on a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// The most there would be of each at any moment.
    pub peak: Lies,
    /// Far bytes in their mean over the time.
    pub on_peers: f64,
    pub on_host: f64,
    /// Seconds in which a kernel reads those once.
    pub pass: f64,
    /// How long it would take, in parts of what it takes with all memory near; none where the logs do not tell how often far memory is read.
    pub slowdown: Option<f64>,
    /// It may be more: several times as much would be far as the logs have seen, or they lost nearly all of the time.
    pub is_beyond: bool,
}

/// A machine with what would be on it.
pub struct Row {
    /// As it was written.
    pub name: String,
    pub machine: Machine,
    pub estimate: Estimate,
}

impl Program {
    /// Of the processes of some logs.
    pub fn of(processes: &[Process]) -> Program {
        let begin = processes.iter().map(Process::origin).fold(f64::INFINITY, f64::min);
        let end = processes.iter().map(|process| process.last).fold(f64::NEG_INFINITY, f64::max);
        let seconds = (end - begin).max(0.001);
        let mut gpus = BTreeMap::new();
        let mut program =
            Program { demands: Vec::new(), contexts: Vec::new(), context: None, seconds, peak: 0, far: None };
        let mut all = vec![0u64; PARTS];
        let mut far = Far { on_peers: 0.0, on_host: 0.0, lost: None };
        for (number, process) in (0..).zip(processes.iter().filter(|process| process.all.peak() > 0)) {
            let mut used = process.all.parts_of(PARTS, process.origin() - begin, seconds);
            // What a process held at its end is nobody's afterwards.
            let ended = ((process.last - begin) / seconds * PARTS as f64).ceil() as usize;
            used.iter_mut().skip(ended.max(1)).for_each(|bytes| *bytes = 0);
            all.iter_mut().zip(&used).for_each(|(all, bytes)| *all = all.saturating_add(*bytes));
            let [_, peers, host] = NEAR_AND_FAR;
            // Ranks of a job do not, unless GPUPOOL_DEVICES says so, which shows in what they did.
            let ranks = process.start.as_ref().and_then(|start| start.job_ranks).unwrap_or(1);
            let borrows = ranks < 2 || process.residence.get(peers).is_some_and(|line| line.peak() > 0);
            for (home, share) in homes(process) {
                let next = gpus.len() as u32;
                let home = *gpus.entry(home).or_insert(next);
                let rows = used.iter().map(|bytes| (*bytes as f64 * share) as u64).collect();
                program.demands.push((Demand { home, process: number, borrows, bytes: 0 }, rows));
            }
            let mean = |name: &str| {
                let parts =
                    process.residence.get(name).map(|line| line.lasts_of(PARTS, process.origin() - begin, seconds));
                parts.map_or(0.0, |mut parts| {
                    parts.iter_mut().skip(ended.max(1)).for_each(|bytes| *bytes = 0);
                    parts.iter().map(|bytes| *bytes as f64).sum::<f64>() / PARTS as f64
                })
            };
            far.on_peers += mean(peers);
            far.on_host += mean(host);
            let lost: f64 = process.readers.values().map(|reader| reader.lost).sum();
            if !process.readers.is_empty() {
                // Kernels that overlap may lose more together than there was.
                let lost = lost.clamp(0.0, process.last - process.origin());
                // Ranks wait for each other: the slowest is what counts.
                far.lost = Some(far.lost.map_or(lost, |most: f64| most.max(lost)));
            }
        }
        program.contexts = contexts(processes, &gpus);
        program.context = usual_cost(processes);
        program.peak = all.into_iter().max().unwrap_or(0);
        program.far = (far.on_peers + far.on_host > 0.0).then_some(far);
        program
    }

    /// GPUs that the processes work on.
    pub fn homes(&self) -> usize {
        self.contexts.len()
    }

    /// What would be on this machine.
    pub fn on(&self, machine: &Machine) -> Estimate {
        let mut estimate = Estimate::default();
        // Several GPUs' contexts on one, where there are fewer.
        let mut contexts = vec![0; machine.gpus.len()];
        for (gpu, bytes) in self.contexts.iter().enumerate() {
            if let Some(sum) = contexts.get_mut(gpu % machine.gpus.len().max(1)) {
                *sum = u64::saturating_add(*sum, *bytes);
            }
        }
        for part in 0..PARTS {
            let demands: Vec<Demand> =
                self.demands.iter().map(|(demand, rows)| Demand { bytes: rows[part], ..*demand }).collect();
            let mut all = Lies::default();
            for lies in machine.place(&demands, &contexts, self.context) {
                all.near = all.near.saturating_add(lies.near);
                all.on_peers = all.on_peers.saturating_add(lies.on_peers);
                all.on_host = all.on_host.saturating_add(lies.on_host);
                // A log may say anything.
                all.missing = all.missing.saturating_add(lies.missing);
            }
            let peak = &mut estimate.peak;
            peak.near = peak.near.max(all.near);
            peak.on_peers = peak.on_peers.max(all.on_peers);
            peak.on_host = peak.on_host.max(all.on_host);
            peak.missing = peak.missing.max(all.missing);
            estimate.on_peers += all.on_peers as f64 / PARTS as f64;
            estimate.on_host += all.on_host as f64 / PARTS as f64;
        }
        estimate.pass = machine.pass_ns(estimate.on_peers, estimate.on_host) * 1e-9;
        if estimate.peak.missing == 0 {
            self.slow(machine, &mut estimate);
        }
        estimate
    }

    /// How long it would take there: what is far is taken to be read as often, byte by byte, as what was far in the logs.
    fn slow(&self, machine: &Machine, estimate: &mut Estimate) {
        if estimate.peak.far() == 0 {
            estimate.slowdown = Some(1.0);
            return;
        }
        let Some(Far { on_peers, on_host, lost: Some(lost) }) = self.far else { return };
        let before = Machine { peer: Some(FarLink::PEER), ..machine.clone() }.pass_ns(on_peers, on_host) * 1e-9;
        if before <= 0.0 {
            return;
        }
        estimate.slowdown = Some(1.0 + lost * estimate.pass / before / self.near(lost));
        estimate.is_beyond = self.is_vague() || estimate.on_peers + estimate.on_host > BEYOND * (on_peers + on_host);
    }

    /// How long it took while the logs were written, in parts of what it takes with all memory near.
    pub fn slowdown(&self) -> Option<f64> {
        match self.far {
            None => Some(1.0),
            Some(Far { lost, .. }) => lost.map(|lost| self.seconds / self.near(lost)),
        }
    }

    /// Nearly all of the time was lost, so that the rest is no measure of what it takes with all memory near.
    pub fn is_vague(&self) -> bool {
        let lost = self.far.and_then(|far| far.lost).unwrap_or(0.0);
        lost >= self.seconds * (1.0 - LEAST_NEAR)
    }

    /// Seconds that it would have taken with all memory near, if it lost so many.
    fn near(&self, lost: f64) -> f64 {
        (self.seconds - lost).max(self.seconds * LEAST_NEAR)
    }
}

/// A GPU, in all processes: by its UUID where that is known.
type Gpu = (Option<String>, Option<u32>, u32);

/// The GPUs that a process works on, with the part of its memory that each asked for, as far as its contexts tell.
fn homes(process: &Process) -> Vec<(Gpu, f64)> {
    let mut homes: BTreeMap<Gpu, f64> = BTreeMap::new();
    for context in &process.contexts {
        let asked = context.used.as_ref().map_or(0, |used| used.bytes_peak);
        *homes.entry(gpu(process, context.made.device, context.made.uuid.as_ref())).or_default() += asked as f64;
    }
    let all: f64 = homes.values().sum();
    if all > 0.0 {
        homes.retain(|_, asked| *asked > 0.0);
        return homes.into_iter().map(|(gpu, asked)| (gpu, asked / all)).collect();
    }
    // What a context was used for is told at its end, which a process that was killed has not seen.
    let first = homes.into_keys().next().unwrap_or_else(|| gpu(process, 0, None));
    vec![(first, 1.0)]
}

fn gpu(process: &Process, device: u32, uuid: Option<&String>) -> Gpu {
    // Ranks may each be shown one GPU, which all of them call 0.
    let rank = process.start.as_ref().and_then(|start| start.local_rank).filter(|_| uuid.is_none());
    (uuid.cloned(), rank, if uuid.is_some() { 0 } else { device })
}

/// What a context takes, as the library reckons it: of those that were measured alone the dearest, else of the others the cheapest.
fn usual_cost(processes: &[Process]) -> Option<u64> {
    let costs = |approximate: bool| {
        let made = processes.iter().flat_map(|process| &process.contexts).map(|context| &context.made);
        made.filter(move |made| made.approximate == approximate).filter_map(|made| made.cost).filter(|cost| *cost > 0)
    };
    costs(false).max().or_else(|| costs(true).min())
}

/// What contexts take of each GPU that is worked on.
fn contexts(processes: &[Process], gpus: &BTreeMap<Gpu, u32>) -> Vec<u64> {
    let mut contexts = vec![0; gpus.len()];
    for process in processes {
        for context in process.contexts.iter().filter(|context| context.gone.is_none()) {
            let known = gpus.get(&gpu(process, context.made.device, context.made.uuid.as_ref()));
            if let Some(sum) = known.and_then(|gpu| contexts.get_mut(*gpu as usize)) {
                *sum = u64::saturating_add(*sum, context.made.cost.unwrap_or(CONTEXT));
            }
        }
    }
    contexts
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_events::Record;

    const GIB: u64 = 1 << 30;

    fn process(lines: &[String]) -> Process {
        let mut process: Option<Process> = None;
        for line in lines {
            let line = format!(r#"{{"v":1,"pid":7,"tid":7,"level":"info","message":"",{line}}}"#);
            let record = Record::from_json(line.as_bytes()).unwrap();
            process.get_or_insert_with(|| Process::new(0, 0, &record)).add(record);
        }
        process.unwrap()
    }

    fn level(t: f64, gib: u64) -> String {
        format!(r#""t":{t},"event":"pool.level","places":[{{"place":"gpu0","held":0,"used":{}}}]"#, gib * GIB)
    }

    fn far(t: f64, gib: u64) -> String {
        format!(r#""t":{t},"event":"pool.residence","near":0,"on_peers":{},"on_host":0"#, gib * GIB)
    }

    /// A hundred seconds, of which it lost twenty by 10 GiB on another GPU.
    fn lossy() -> Process {
        let reader = r#""t":100,"event":"tier.reader","home":0,"function":"f","launches":9,"on_peers":9,"on_host":0,"timed":1,"lost":20.0,"why":"x""#;
        process(&[level(0.0, 40), far(0.0, 10), reader.to_owned()])
    }

    fn machine(gpus: usize, gib: u64) -> Machine {
        Machine { gpus: vec![gib * GIB; gpus], limit: None, host: 0, peer: Some(FarLink::PEER) }
    }

    #[test]
    fn what_is_far_costs_as_much_a_byte_as_in_the_log() {
        let program = Program::of(&[lossy()]);
        assert_eq!((program.peak, program.seconds), (40 * GIB, 100.0));
        assert_eq!(program.slowdown(), Some(1.25), "20 s of 100 were lost");
        let half = program.on(&machine(2, 36));
        assert_eq!(half.peak.on_peers, 5 * GIB);
        let slowdown = half.slowdown.unwrap();
        assert!((slowdown - 1.125).abs() < 0.01, "half as much is far: {slowdown}");
        assert_eq!(program.on(&machine(1, 64)).slowdown, Some(1.0));
        let small = program.on(&machine(8, 12));
        assert!(!small.is_beyond && small.peak.on_peers == 29 * GIB - GIB / 4, "{small:?}");
    }

    #[test]
    fn without_far_memory_in_the_log_nothing_is_said_of_its_cost() {
        let program = Program::of(&[process(&[level(0.0, 40), level(9.0, 0)])]);
        let there = program.on(&machine(2, 36));
        assert_eq!((there.slowdown, there.peak.on_peers), (None, 5 * GIB));
        assert!(there.pass > 0.0);
        assert_eq!(program.on(&machine(1, 36)).peak.missing, 5 * GIB);
    }

    #[test]
    fn an_empty_log_needs_nothing() {
        let program = Program::of(&[]);
        assert_eq!((program.peak, program.on(&machine(1, 1)).peak), (0, Lies::default()));
    }
}
