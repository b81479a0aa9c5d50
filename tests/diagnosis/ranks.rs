//! Jobs of several ranks (GP002): each writes its own log, and the report puts them together.

use crate::case::{Case, Told, compare, folder, report};
use crate::normal::normal;
use tempfile::TempDir;

thread_local! {
    /// Ranks of one job are on one machine, and each test has a thread of its own.
    static MACHINE: TempDir = folder();
}

fn with(case: &str, variables: &[(&str, &str)]) -> Told {
    let machine = MACHINE.with(|folder| folder.path().join("machine"));
    let case = Case::program("contexts", case).on_machine(machine);
    variables.iter().fold(case, |case, (name, value)| case.env(name, value)).go()
}

#[track_caller]
fn rank(rank: u32, case: &str) -> Told {
    with(case, &[("LOCAL_RANK", &rank.to_string()), ("LOCAL_WORLD_SIZE", "2")])
}

/// The report has no finding.
#[track_caller]
fn nothing(all: &[&Told]) {
    for told in all {
        told.finds_nothing();
    }
    let merged = report(all);
    assert!(merged.contains("\nFindings\n  none\n"), "{merged}");
}

/// One rank alone does not know what the others do.
#[test]
fn two_ranks_that_work_on_gpu_0_are_one_finding_of_both() {
    let (first, second) = (rank(0, "first"), rank(1, "first"));
    nothing(&[&first]);
    nothing(&[&second]);
    let merged = report(&[&first, &second]);
    assert_eq!(merged.matches("GP002  ").count(), 1, "{merged}");
    compare("ranks", &normal(&merged, &[&first, &second]));
}

#[test]
fn a_rank_that_only_touches_gpu_0_is_found_in_the_merged_logs() {
    let (first, second) = (rank(0, "first"), rank(1, "stray"));
    second.finds(&["GP001"]);
    let merged = report(&[&first, &second]);
    assert!(merged.contains("GP001  ") && merged.contains("GP002  "), "{merged}");
}

#[test]
fn every_launcher_is_understood() {
    for [rank, ranks] in [
        ["OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
        ["MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
        ["MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"],
        ["JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"],
        ["PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"],
        ["PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"],
        ["FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE"],
        ["SLURM_LOCALID", "SLURM_TASKS_PER_NODE"],
    ] {
        let [first, second] = ["0", "1"].map(|number| {
            with("first", &[(rank, number), (ranks, "2"), ("FLUX_JOB_NNODES", "1"), ("SLURM_STEP_ID", "0")])
        });
        let merged = report(&[&first, &second]);
        assert!(merged.contains("GP002  ") && merged.contains("rank 1"), "{rank}: {merged}");
    }
}

#[test]
fn a_gpu_for_each_rank_is_no_finding() {
    nothing(&[&rank(0, "first"), &rank(1, "one")]);
    // One visible GPU a rank: both are GPU 0 to their programs, and none of ours to blame.
    let own =
        |rank: &str| with("first", &[("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", "2"), ("CUDA_VISIBLE_DEVICES", rank)]);
    nothing(&[&own("0"), &own("1")]);
}

/// Where every rank has a list of its own, numbers say nothing: UUIDs are compared.
#[test]
fn ranks_on_one_gpu_are_found_whatever_each_of_them_calls_it() {
    let listed = |number: &str, list: &str, case: &str| {
        with(case, &[("LOCAL_RANK", number), ("LOCAL_WORLD_SIZE", "2"), ("CUDA_VISIBLE_DEVICES", list)])
    };
    // Both work on the last GPU of the machine.
    let merged = report(&[&listed("0", "0,1,2,3", "one"), &listed("1", "3,0,1,2", "first")]);
    assert!(merged.contains("GP002  ") && merged.contains("in     ranks 0-1, GPUs 0, 3"), "{merged}");
    assert!(merged.contains("one and the same GPU"), "{merged}");
    let merged = report(&[&rank(0, "one"), &rank(1, "one")]);
    assert!(merged.contains("GP002  ") && merged.contains("made a context on GPU 3"), "{merged}");
    // The same number, and another GPU.
    nothing(&[&listed("0", "0,1,2,3", "first"), &listed("1", "3,0,1,2", "first")]);
}

#[test]
fn ranks_of_two_jobs_are_not_counted_together() {
    let of = |job: &str, rank: &str, case| {
        with(case, &[("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", "2"), ("TORCHELASTIC_RUN_ID", job)])
    };
    nothing(&[&of("a", "0", "first"), &of("a", "1", "one"), &of("b", "0", "one"), &of("b", "1", "first")]);
}

#[test]
fn more_ranks_than_gpus_have_to_share() {
    let of = |rank: &str| with("first", &[("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", "8")]);
    nothing(&[&of("0"), &of("4")]);
    let merged = report(&[&of("0"), &of("4"), &of("5")]);
    assert!(merged.contains("GP002  "), "{merged}");
}
