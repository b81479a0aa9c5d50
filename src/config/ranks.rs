//! What launchers of several ranks say in the environment: which rank this is on its host and in the whole job, how many share this host, and of which
//! job.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

/// What one launcher sets.
struct Launcher {
    /// The rank's number on its host, from 0.
    rank: &'static str,
    /// How many ranks there are on the host; the first of these that is set.
    counts: &'static [&'static str],
    /// The ranks of the whole job and its hosts, of a launcher that does not count the ranks of a host.
    spread: Option<[&'static str; 2]>,
    /// What together tells the job from others on the host, and is the same for all its ranks.
    job: &'static [&'static str],
    /// The rank's number in the whole job, from 0; then how many ranks the job has: the first of these that is set.
    overall: &'static [&'static str],
    /// What its ranks alone have, where others of its processes have its counts and a number, too.
    only_ranks_have: Option<&'static str>,
}

/// The most specific launcher first: `torchrun` inside a Slurm job knows better than Slurm.
const LAUNCHERS: &[Launcher] = &[
    // torchrun, Accelerate, DeepSpeed, Lightning.
    Launcher {
        rank: "LOCAL_RANK",
        counts: &["LOCAL_WORLD_SIZE"],
        spread: None,
        job: &["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"],
        overall: &["RANK", "WORLD_SIZE"],
        only_ranks_have: None,
    },
    // Open MPI; its job has a name in version 5 and a number in version 4.
    Launcher {
        rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        counts: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        spread: None,
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
        overall: &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        only_ranks_have: None,
    },
    // Intel MPI, MPICH.
    Launcher {
        rank: "MPI_LOCALRANKID",
        counts: &["MPI_LOCALNRANKS"],
        spread: None,
        job: &[],
        overall: &["PMI_RANK", "PMI_SIZE"],
        only_ranks_have: None,
    },
    // MVAPICH2.
    Launcher {
        rank: "MV2_COMM_WORLD_LOCAL_RANK",
        counts: &["MV2_COMM_WORLD_LOCAL_SIZE"],
        spread: None,
        job: &[],
        overall: &["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"],
        only_ranks_have: None,
    },
    // IBM's jsrun.
    Launcher {
        rank: "JSM_NAMESPACE_LOCAL_RANK",
        counts: &["JSM_NAMESPACE_LOCAL_SIZE"],
        spread: None,
        job: &["LSB_JOBID"],
        overall: &["JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"],
        only_ranks_have: None,
    },
    // HPE's PALS.
    Launcher {
        rank: "PALS_LOCAL_RANKID",
        counts: &["PALS_LOCAL_SIZE"],
        spread: None,
        job: &["PALS_APID"],
        overall: &["PALS_RANKID"],
        only_ranks_have: None,
    },
    // Cray's PMI, under whatever launcher. Others' PMI gives a number in the whole job only (PMI_RANK), which says nothing of
    // a host.
    Launcher {
        rank: "PMI_LOCAL_RANK",
        counts: &["PMI_LOCAL_SIZE"],
        spread: None,
        job: &["PMI_JOBID"],
        overall: &["PMI_RANK", "PMI_SIZE"],
        only_ranks_have: None,
    },
    Launcher {
        rank: "FLUX_TASK_LOCAL_ID",
        counts: &[],
        spread: Some(["FLUX_JOB_SIZE", "FLUX_JOB_NNODES"]),
        job: &["FLUX_JOB_ID"],
        overall: &["FLUX_TASK_RANK", "FLUX_JOB_SIZE"],
        only_ranks_have: None,
    },
    Launcher {
        rank: "SLURM_LOCALID",
        // The step's, as srun sets it, before the job's.
        counts: &["SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"],
        spread: None,
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
        // The script of a job, and the shell of salloc, have the counts of the job that they begin, and the script is number 0. What
        // they start by themselves is one process that has all GPUs of the job.
        overall: &["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"],
        only_ranks_have: Some("SLURM_STEP_ID"),
    },
];

/// Every variable of launchers that anything here depends on.
pub fn launcher_variables() -> impl Iterator<Item = &'static str> {
    LAUNCHERS.iter().flat_map(|launcher| {
        let counts = launcher.counts.iter().chain(launcher.spread.iter().flatten());
        let others = launcher.job.iter().chain(launcher.overall);
        std::iter::once(launcher.rank).chain(counts.copied()).chain(others.copied())
    })
}

/// Which rank of a job this process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rank {
    /// The launcher's variable that says so.
    pub variable: &'static str,
    /// Its number among the ranks on this host, from 0.
    pub number: u32,
    /// How many ranks there are on this host, where the launcher says.
    pub ranks: Option<u32>,
    /// What tells the job from others on this host, where the launcher says.
    pub job: Option<String>,
    /// Its number among the ranks of the whole job, from 0, where the launcher says.
    pub overall: Option<u32>,
    /// How many ranks the whole job has, where the launcher says.
    pub overall_ranks: Option<u32>,
}

impl Launcher {
    /// Whether what it said is meant for this process.
    fn has_started_it(&self, said: &BTreeMap<&'static str, OsString>) -> bool {
        self.only_ranks_have.is_none_or(|name| said.contains_key(name))
    }

    /// The number of this process among the ranks on this host.
    fn rank(&self, said: &BTreeMap<&'static str, OsString>) -> Option<u32> {
        let number = said.get(self.rank).filter(|_| self.has_started_it(said))?;
        number.to_str()?.trim().parse().ok()
    }

    /// How many ranks it says there are on this host, and in which variable.
    fn ranks(&self, said: &BTreeMap<&'static str, OsString>) -> Option<(&'static str, u32)> {
        if !self.has_started_it(said) {
            return None;
        }
        let text = |name: &'static str| said.get(name).and_then(|value| value.to_str());
        let counted = self.counts.iter().copied().find_map(|name| Some((name, largest_count(text(name)?)?)));
        counted.or_else(|| {
            let [ranks, hosts] = self.spread?;
            let number = |name| text(name)?.trim().parse::<u32>().ok();
            // As many on one host as there may be: see `largest_count`.
            Some((ranks, number(ranks)?.div_ceil(number(hosts).filter(|hosts| *hosts > 0)?)))
        })
    }
}

/// Which rank this process is; `None` where no launcher gave it a number.
///
/// The first launcher that gives one decides, and only what it says itself is taken for the rest: `torchrun` inside a Slurm
/// job has other ranks than Slurm.
pub fn rank(vars: impl Iterator<Item = (OsString, OsString)>) -> Option<Rank> {
    let said = said(vars);
    let text = |name: &'static str| said.get(name).and_then(|value| value.to_str());
    let (launcher, number) = LAUNCHERS.iter().find_map(|launcher| Some((launcher, launcher.rank(&said)?)))?;
    let ranks = launcher.ranks(&said).map(|(_, ranks)| ranks);
    let job: Vec<&str> = launcher.job.iter().copied().filter_map(text).collect();
    let job = (!job.is_empty()).then(|| job.join(":"));
    let counted = |name: &&'static str| text(name)?.trim().parse().ok();
    let (overall, overall_ranks) = match launcher.overall {
        [number, counts @ ..] => (counted(number), counts.iter().find_map(counted)),
        [] => (None, None),
    };
    Some(Rank { variable: launcher.rank, number, ranks, job, overall, overall_ranks })
}

/// What launchers' variables say that is no number, and therefore passed over: the variable, its value, and what it should be.
pub fn passed_over(vars: impl Iterator<Item = (OsString, OsString)>) -> Vec<String> {
    let said = said(vars);
    let wrong = |name: &'static str, what: &str, is_number: &dyn Fn(&str) -> bool| {
        let value = said.get(name).filter(|value| !value.is_empty() && !value.to_str().is_some_and(is_number))?;
        Some(format!("{name}={} is not {what}", value.display()))
    };
    let is_number = |value: &str| value.trim().parse::<u32>().is_ok();
    let is_count = |value: &str| largest_count(value).is_some();
    let of_one = |launcher: &'static Launcher| {
        let rank = wrong(launcher.rank, "the number of a rank", &is_number);
        let counts = launcher.counts.iter().map(|name| wrong(name, "a number of ranks", &is_count));
        let spread = launcher.spread.iter().flatten().map(|name| wrong(name, "a number", &is_number));
        std::iter::once(rank).chain(counts).chain(spread).flatten().collect::<Vec<_>>()
    };
    LAUNCHERS.iter().flat_map(of_one).collect()
}

/// The variable that says that several ranks of a job run on this host, and how many; `None` for a process that owns its
/// job.
///
/// The first launcher that says anything decides, also when it says 1. A value that is no number is passed over: these
/// variables are not ours to complain about.
pub fn local_ranks(vars: impl Iterator<Item = (OsString, OsString)>) -> Option<(&'static str, u32)> {
    let said = said(vars);
    let (variable, ranks) = LAUNCHERS.iter().find_map(|launcher| launcher.ranks(&said))?;
    (ranks > 1).then_some((variable, ranks))
}

/// What launchers said, by variable.
fn said(vars: impl Iterator<Item = (OsString, OsString)>) -> BTreeMap<&'static str, OsString> {
    let known = |(name, value): (OsString, OsString)| {
        Some((launcher_variables().find(|known| OsStr::new(known) == name)?, value))
    };
    vars.filter_map(known).collect()
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

    fn rank_in(vars: &[(&str, &str)]) -> Option<Rank> {
        rank(vars.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))))
    }

    #[test]
    fn a_rank_is_told_by_one_launcher_with_its_job() {
        let slurm =
            [("SLURM_LOCALID", "0"), ("SLURM_TASKS_PER_NODE", "1"), ("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "2")];
        let of_slurm = rank_in(&slurm);
        let none = (None, None);
        let expected = |variable, number, ranks, job: &str, (overall, overall_ranks)| {
            Some(Rank { variable, number, ranks, job: Some(job.to_owned()), overall, overall_ranks })
        };
        assert_eq!(of_slurm, expected("SLURM_LOCALID", 0, Some(1), "7:2", none));
        let step = [("SLURM_PROCID", "5"), ("SLURM_NTASKS", "9"), ("SLURM_STEP_NUM_TASKS", "6")];
        let of_step = rank_in(&[&slurm[..], &step].concat());
        assert_eq!(of_step, expected("SLURM_LOCALID", 0, Some(1), "7:2", (Some(5), Some(6))));
        let both: Vec<_> = slurm.into_iter().chain([("LOCAL_RANK", "5"), ("MASTER_PORT", "29500")]).collect();
        assert_eq!(rank_in(&both), expected("LOCAL_RANK", 5, None, "29500", none));
        // What Slurm counts are not torchrun's ranks.
        let torchrun = [("RANK", "13"), ("WORLD_SIZE", "16")];
        let inner = rank_in(&[&both[..], &step, &torchrun].concat());
        assert_eq!(inner, expected("LOCAL_RANK", 5, None, "29500", (Some(13), Some(16))));
        assert_eq!(rank_in(&[&both[..], &step].concat()), expected("LOCAL_RANK", 5, None, "29500", none));
        assert_eq!(rank_in(&[("LOCAL_RANK", "first"), ("LOCAL_WORLD_SIZE", "2")]), None);
    }

    #[test]
    fn one_process_owns_its_job() {
        assert_eq!(ranks(&[]), None);
        assert_eq!(ranks(&[("LOCAL_WORLD_SIZE", "1")]), None);
        assert_eq!(ranks(&[("PATH", "8")]), None);
    }

    #[test]
    fn every_launcher_is_heard() {
        for (launcher, name) in
            LAUNCHERS.iter().flat_map(|launcher| launcher.counts.iter().map(move |name| (launcher, *name)))
        {
            let vars: Vec<_> =
                launcher.only_ranks_have.map(|has| (has, "0")).into_iter().chain([(name, "4")]).collect();
            assert_eq!(ranks(&vars), Some((name, 4)));
        }
        assert_eq!(ranks(&[("FLUX_JOB_SIZE", "7"), ("FLUX_JOB_NNODES", "2")]), Some(("FLUX_JOB_SIZE", 4)));
        assert_eq!(ranks(&[("FLUX_JOB_SIZE", "7"), ("FLUX_JOB_NNODES", "0")]), None);
        for launcher in LAUNCHERS {
            let counts = match (launcher.counts, launcher.spread) {
                ([count, ..], _) => vec![(*count, "4")],
                ([], Some([ranks, hosts])) => vec![(ranks, "8"), (hosts, "2")],
                ([], None) => vec![],
            };
            let has = launcher.only_ranks_have.map(|has| (has, "9"));
            let vars: Vec<_> = [(launcher.rank, "3")].into_iter().chain(counts).chain(has).collect();
            let job = has.map(|(_, value)| value.to_owned());
            let told = rank_in(&vars).map(|rank| (rank.variable, rank.number, rank.ranks, rank.job));
            assert_eq!(told, Some((launcher.rank, 3, Some(4), job)));
        }
    }

    #[test]
    fn the_inner_launcher_outranks_the_outer_one() {
        let slurm = [("SLURM_STEP_ID", "0"), ("SLURM_NTASKS_PER_NODE", "8")];
        let [two, one] = ["2", "1"].map(|ranks| [slurm[0], slurm[1], ("LOCAL_WORLD_SIZE", ranks)]);
        assert_eq!(ranks(&two), Some(("LOCAL_WORLD_SIZE", 2)));
        assert_eq!(ranks(&one), None);
    }

    #[test]
    fn slurm_groups_give_the_largest() {
        let step = |count| ranks(&[("SLURM_STEP_ID", "0"), ("SLURM_TASKS_PER_NODE", count)]);
        assert_eq!(step("2(x3)"), Some(("SLURM_TASKS_PER_NODE", 2)));
        assert_eq!(step("1,4(x2),2"), Some(("SLURM_TASKS_PER_NODE", 4)));
        assert_eq!(step("1(x16)"), None);
    }

    /// What Slurm 22.05.8 says to the script of a job of four tasks, and to a step of four and one of one task in it.
    #[test]
    fn the_script_of_a_job_is_no_rank_of_its_steps() {
        let script =
            [("SLURM_JOB_ID", "3"), ("SLURM_LOCALID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_TASKS_PER_NODE", "4")];
        assert_eq!((ranks(&script), rank_in(&script)), (None, None));
        let step = |tasks| {
            let said = [("SLURM_STEP_ID", "1"), ("SLURM_STEP_TASKS_PER_NODE", tasks)];
            script.into_iter().chain(said).collect::<Vec<_>>()
        };
        assert_eq!(ranks(&step("4")), Some(("SLURM_STEP_TASKS_PER_NODE", 4)));
        assert_eq!(ranks(&step("1")), None);
        let one = rank_in(&step("1")).map(|rank| (rank.number, rank.ranks, rank.job));
        assert_eq!(one, Some((0, Some(1), Some("3:1".to_owned()))));
    }

    #[test]
    fn nonsense_is_passed_over() {
        assert_eq!(ranks(&[("LOCAL_WORLD_SIZE", "many"), ("MPI_LOCALNRANKS", "2")]), Some(("MPI_LOCALNRANKS", 2)));
        assert_eq!(ranks(&[("LOCAL_WORLD_SIZE", "")]), None);
    }
}
