//! How processes are called, in text and in JSON alike.

use std::collections::{BTreeMap, BTreeSet};

use super::logs::Logs;
use super::process::{End, Process};
use crate::terminal::clean;
use crate::words::ranges;

/// Hosts that are named; a job may run on thousands.
const HOSTS: usize = 4;

/// A name for each process: `rank 3` where no other has that rank, else `pid 4711`; with its host, `node7 rank 3`, where the logs are of
/// several. Hosts are known of ranks alone: where processes of several logs would have one name, since each host counts by itself, they have their log's.
pub fn labels(logs: &Logs) -> Vec<String> {
    let processes = &logs.processes[..];
    let rank = |process: &Process| process.start.as_ref().and_then(|start| start.local_rank);
    let hosts: BTreeSet<&str> = processes.iter().filter_map(Process::host).collect();
    let label = |process: &Process| {
        let host =
            process.host().filter(|_| hosts.len() > 1).map_or_else(String::new, |host| format!("{} ", clean(host)));
        let same = |other: &&Process| rank(other) == rank(process) && other.host() == process.host();
        match rank(process) {
            Some(own) if processes.iter().filter(same).count() == 1 => format!("{host}rank {own}"),
            Some(own) => format!("{host}rank {own} (pid {})", process.pid),
            None => format!("{host}pid {}", process.pid),
        }
    };
    let mut labels: Vec<String> = processes.iter().map(label).collect();
    // Programs that followed each other in one process share its number.
    for (index, process) in processes.iter().enumerate().filter(|(_, process)| process.replaced) {
        let later =
            processes.iter().enumerate().filter(|(_, later)| (later.log, later.pid) == (process.log, process.pid));
        for (number, (index, _)) in later.enumerate().filter(|(_, (later, _))| *later > index) {
            labels[index] = format!("{} program {}", label(&processes[index]), number + 1);
        }
    }
    let mut by_label: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for (label, process) in labels.iter().zip(processes) {
        by_label.entry(label).or_default().insert(process.log);
    }
    let named = labels.iter().zip(processes).map(|(label, process)| {
        let log = logs.logs.get(process.log).filter(|_| by_label[label.as_str()].len() > 1);
        log.map_or_else(|| label.clone(), |log| format!("{label} of {}", clean(&log.path.display().to_string())))
    });
    named.collect()
}

/// Processes whose logs end before what is judged at the end of a process. A child of a fork has no start in its log, and
/// nothing is judged at its end.
pub fn findings_missing(processes: &[Process]) -> Vec<usize> {
    let is_cut = |process: &Process| process.start.is_some() && process.end() != End::Exit;
    processes.iter().enumerate().filter(|(_, process)| is_cut(process)).map(|(index, _)| index).collect()
}

/// Several processes in a few words: `ranks 0-6`, `node1 ranks 0-3, node2 ranks 0-3`, `rank 1, pid 7`, `pid 7 and 12 more`.
pub fn together(labels: &[String], indices: &[usize]) -> String {
    let names: Vec<&str> = indices.iter().filter_map(|index| labels.get(*index)).map(String::as_str).collect();
    match (ranks_by_host(&names), names.as_slice()) {
        (Some(hosts), [_, _, ..]) => {
            let of_host = |(host, ranks): &(&str, Vec<u32>)| match ranks.as_slice() {
                [rank] => format!("{host}rank {rank}"),
                ranks => format!("{host}ranks {}", ranges(ranks)),
            };
            let told: Vec<String> = hosts.iter().take(HOSTS).map(of_host).collect();
            let more =
                if hosts.len() > HOSTS { format!(" and {} more hosts", hosts.len() - HOSTS) } else { String::new() };
            told.join(", ") + &more
        }
        (_, [first, second, third, rest @ ..]) if !rest.is_empty() => {
            format!("{first}, {second}, {third} and {} more", rest.len())
        }
        (_, names) => names.join(", "),
    }
}

/// Ranks that are called by nothing else, in order, with what stands before them: the host and a blank, or nothing.
fn ranks_by_host<'a>(names: &[&'a str]) -> Option<Vec<(&'a str, Vec<u32>)>> {
    let mut hosts: Vec<(&str, Vec<u32>)> = Vec::new();
    for name in names {
        let (host, rank) = name.rsplit_once("rank ")?;
        let rank = rank.parse().ok()?;
        match hosts.iter_mut().find(|(known, _)| *known == host) {
            Some((_, ranks)) => ranks.push(rank),
            None => hosts.push((host, vec![rank])),
        }
    }
    hosts.iter_mut().for_each(|(_, ranks)| ranks.sort_unstable());
    Some(hosts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_called_together() {
        let labels: Vec<String> = ["rank 0", "rank 1", "rank 2", "pid 7"].map(str::to_owned).to_vec();
        assert_eq!(together(&labels, &[0, 1, 2]), "ranks 0-2");
        assert_eq!(together(&labels, &[1]), "rank 1");
        assert_eq!(together(&labels, &[0, 3]), "rank 0, pid 7");
        assert_eq!(together(&labels, &[0, 1, 2, 3]), "rank 0, rank 1, rank 2 and 1 more");
        let labels: Vec<String> = ["a rank 1", "b rank 0", "a rank 0", "rank 5"].map(str::to_owned).to_vec();
        assert_eq!(together(&labels, &[0, 1, 2]), "a ranks 0-1, b rank 0");
        assert_eq!(together(&labels, &[0, 3]), "a rank 1, rank 5");
    }
}
