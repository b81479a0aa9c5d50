//! How processes are called, in text and in JSON alike.

use super::process::{End, Process};
use crate::words::ranges;

/// A name for each process: `rank 3` where no other has that rank, else `pid 4711`.
pub fn labels(processes: &[Process]) -> Vec<String> {
    let rank = |process: &Process| process.start.as_ref().and_then(|start| start.local_rank);
    let label = |process: &Process| match rank(process) {
        Some(own) if processes.iter().filter(|other| rank(other) == Some(own)).count() == 1 => format!("rank {own}"),
        Some(own) => format!("rank {own} (pid {})", process.pid),
        None => format!("pid {}", process.pid),
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
    labels
}

/// Processes whose logs end before what is judged at the end of a process. A child of a fork has no start in its log, and
/// nothing is judged at its end.
pub fn findings_missing(processes: &[Process]) -> Vec<usize> {
    let is_cut = |process: &Process| process.start.is_some() && process.end() != End::Exit;
    processes.iter().enumerate().filter(|(_, process)| is_cut(process)).map(|(index, _)| index).collect()
}

/// Several processes in a few words: `ranks 0-6`, `rank 1, pid 7`, `pid 7 and 12 more`.
pub fn together(labels: &[String], indices: &[usize]) -> String {
    let names: Vec<&str> = indices.iter().filter_map(|index| labels.get(*index)).map(String::as_str).collect();
    let ranks: Option<Vec<u32>> =
        names.iter().map(|name| name.strip_prefix("rank ").and_then(|rank| rank.parse().ok())).collect();
    match (ranks, names.as_slice()) {
        (Some(mut ranks), [_, _, ..]) => {
            ranks.sort_unstable();
            format!("ranks {}", ranges(&ranks))
        }
        (_, [first, second, third, rest @ ..]) if !rest.is_empty() => {
            format!("{first}, {second}, {third} and {} more", rest.len())
        }
        (_, names) => names.join(", "),
    }
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
    }
}
