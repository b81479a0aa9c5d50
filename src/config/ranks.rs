//! How many ranks of one job share this host.

use std::ffi::{OsStr, OsString};

/// Variables that launchers set to the number of ranks on the host, the most specific launcher first: `torchrun` inside a
/// Slurm job knows better than Slurm.
pub const RANK_VARIABLES: &[&str] = &[
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
];

/// The variable that says that several ranks of a job run on this host, and how many; `None` for a process that owns its
/// job.
///
/// The first launcher that says anything decides, also when it says 1. A value that is no number is passed over: these
/// variables are not ours to complain about.
pub fn local_ranks(vars: impl Iterator<Item = (OsString, OsString)>) -> Option<(&'static str, u32)> {
    let mut found: Vec<Option<u32>> = vec![None; RANK_VARIABLES.len()];
    for (name, value) in vars {
        if let Some(index) = RANK_VARIABLES.iter().position(|known| OsStr::new(known) == name) {
            found[index] = value.to_str().and_then(largest_count);
        }
    }
    let first = found.iter().position(Option::is_some)?;
    found[first].filter(|ranks| *ranks > 1).map(|ranks| (RANK_VARIABLES[first], ranks))
}

/// Slurm writes one count per group of hosts, `4(x2),1`. Which group this host is in is not told, so the largest counts:
/// keeping to one GPU where all could lend costs room, the reverse costs other ranks their memory.
fn largest_count(value: &str) -> Option<u32> {
    value.split(',').map(|group| group.split('(').next().and_then(|count| count.trim().parse().ok())).max().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(vars: &[(&str, &str)]) -> Option<(&'static str, u32)> {
        local_ranks(vars.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))))
    }

    #[test]
    fn one_process_owns_its_job() {
        assert_eq!(ranks(&[]), None);
        assert_eq!(ranks(&[("LOCAL_WORLD_SIZE", "1")]), None);
        assert_eq!(ranks(&[("PATH", "8")]), None);
    }

    #[test]
    fn every_launcher_is_heard() {
        for name in RANK_VARIABLES {
            assert_eq!(ranks(&[(name, "4")]), Some((*name, 4)));
        }
    }

    #[test]
    fn the_inner_launcher_outranks_the_outer_one() {
        assert_eq!(ranks(&[("SLURM_NTASKS_PER_NODE", "8"), ("LOCAL_WORLD_SIZE", "2")]), Some(("LOCAL_WORLD_SIZE", 2)));
        assert_eq!(ranks(&[("SLURM_NTASKS_PER_NODE", "8"), ("LOCAL_WORLD_SIZE", "1")]), None);
    }

    #[test]
    fn slurm_groups_give_the_largest() {
        assert_eq!(ranks(&[("SLURM_TASKS_PER_NODE", "2(x3)")]), Some(("SLURM_TASKS_PER_NODE", 2)));
        assert_eq!(ranks(&[("SLURM_TASKS_PER_NODE", "1,4(x2),2")]), Some(("SLURM_TASKS_PER_NODE", 4)));
        assert_eq!(ranks(&[("SLURM_TASKS_PER_NODE", "1(x16)")]), None);
    }

    #[test]
    fn nonsense_is_passed_over() {
        assert_eq!(ranks(&[("LOCAL_WORLD_SIZE", "many"), ("MPI_LOCALNRANKS", "2")]), Some(("MPI_LOCALNRANKS", 2)));
        assert_eq!(ranks(&[("LOCAL_WORLD_SIZE", "")]), None);
    }
}
