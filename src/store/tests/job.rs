//! Images of several processes that belong together.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

mod common;

use std::path::Path;

use common::{Kind, memory, store};
use gpupool_store::{Error, JobWriter, Options, jobs, list, rank_folder};

/// A rank's own image.
fn image(folder: &Path, rank: u32, seed: u64) -> (u32, u64) {
    let block = memory(Kind::Random, 100_000, seed);
    let written = store(&rank_folder(folder, rank), Options::default(), &[block]).unwrap();
    (rank, written.generation)
}

fn job(folder: &Path, seed: u64, keep: Option<usize>) -> u64 {
    let writer = JobWriter::create(folder).unwrap();
    let ranks = [1, 0].map(|rank| image(folder, rank, seed));
    let (generation, not_removed) = writer.finish(&ranks, Vec::new(), keep).unwrap();
    assert_eq!(not_removed, None);
    generation
}

fn generations(folder: &Path) -> Vec<(u32, u64)> {
    let of = |rank| {
        let listed = list(&rank_folder(folder, rank)).unwrap();
        listed.into_iter().map(move |listed| (rank, listed.generation))
    };
    (0..2).flat_map(of).collect()
}

/// Which images of the job are whole, newest first.
fn whole(folder: &Path) -> Vec<u64> {
    jobs(folder).unwrap().into_iter().filter(|listed| listed.told.is_ok()).map(|listed| listed.generation).collect()
}

#[test]
fn a_jobs_image_is_there_with_all_of_its_ranks_or_not_at_all() {
    let around = tempfile::tempdir().unwrap();
    let folder = &around.path().join("job");
    assert_eq!(job(folder, 1, None), 1);
    assert_eq!(job(folder, 2, None), 2);
    let ranks = jobs(folder).unwrap().remove(0).told.unwrap().ranks;
    assert_eq!(ranks.iter().map(|image| (image.rank, image.generation)).collect::<Vec<_>>(), [(0, 2), (1, 2)]);

    // Of the third one a rank has died, and the command with it.
    let writer = JobWriter::create(folder).unwrap();
    image(folder, 0, 3);
    drop(writer);
    assert_eq!(whole(folder), [2, 1]);
    assert_eq!(generations(folder), [(0, 3), (0, 2), (0, 1), (1, 2), (1, 1)]);

    // The next one removes what belongs to no job, and does not take what is not there for one.
    let writer = JobWriter::create(folder).unwrap();
    assert_eq!(generations(folder), [(0, 2), (0, 1), (1, 2), (1, 1)]);
    let ranks = [image(folder, 0, 4), (1, 9)];
    assert!(matches!(writer.finish(&ranks, Vec::new(), Some(1)), Err(Error::Absent { .. })));
    assert_eq!(whole(folder), [2, 1]);

    assert_eq!(job(folder, 5, Some(2)), 3);
    assert_eq!(whole(folder), [3, 2]);
    assert_eq!(generations(folder), [(0, 3), (0, 2), (1, 3), (1, 2)]);
}

#[test]
fn a_job_whose_rank_has_lost_its_image_is_none_and_does_not_count_among_those_that_are_kept() {
    let around = tempfile::tempdir().unwrap();
    let folder = &around.path().join("job");
    (1..=3).for_each(|seed| assert_eq!(job(folder, seed, None), seed));
    std::fs::remove_dir_all(rank_folder(folder, 1).join("gen-000003")).unwrap();
    assert_eq!(whole(folder), [2, 1]);
    let listed = jobs(folder).unwrap();
    assert!(matches!(&listed[0].told, Err(Error::Absent { path }) if path.ends_with("rank-1/gen-000003")));
    assert_eq!(job(folder, 4, Some(2)), 4);
    assert_eq!(whole(folder), [4, 2]);
    // A file that was changed names nothing.
    let name = folder.join("job-000004");
    let text = std::fs::read_to_string(&name).unwrap().replace("\"rank\":0", "\"rank\":5");
    std::fs::write(&name, text).unwrap();
    assert_eq!(whole(folder), [2]);
}

#[test]
fn two_do_not_write_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let first = JobWriter::create(folder.path()).unwrap();
    assert!(matches!(JobWriter::create(folder.path()), Err(Error::Busy { .. })));
    drop(first);
    JobWriter::create(folder.path()).unwrap();
}

#[test]
fn what_cannot_be_removed_of_a_job_is_told_and_keeps_no_new_image_from_being_written() {
    let around = tempfile::tempdir().unwrap();
    let folder = &around.path().join("job");
    assert_eq!(job(folder, 1, None), 1);
    // Somebody's: of these names, and none of them an image.
    std::fs::create_dir(folder.join("job-000003")).unwrap();
    std::fs::write(rank_folder(folder, 0).join("gen-000002"), "x").unwrap();
    // What stands in the way of a removal.
    std::fs::create_dir(rank_folder(folder, 1).join("gen-000001/mine")).unwrap();
    std::fs::create_dir(folder.join(".job-000002.new")).unwrap();
    for generation in [4, 5] {
        let writer = JobWriter::create(folder).unwrap();
        let ranks = [0, 1].map(|rank| image(folder, rank, generation));
        let (written, not_removed) = writer.finish(&ranks, Vec::new(), Some(1)).unwrap();
        assert_eq!(written, generation);
        let why = not_removed.unwrap().to_string();
        assert!(why.contains(".job-000002.new") || why.contains("gen-000001/mine"), "{why}");
        assert_eq!(whole(folder), [generation]);
    }
    assert_eq!(generations(folder), [(0, 4), (0, 2), (1, 3), (1, 1)], "all that can be removed is");
    std::fs::remove_dir(rank_folder(folder, 1).join("gen-000001/mine")).unwrap();
    std::fs::remove_dir(folder.join(".job-000002.new")).unwrap();
    assert_eq!(job(folder, 6, Some(1)), 6);
    assert_eq!(generations(folder), [(0, 5), (0, 2), (1, 4)]);
    assert!(folder.join("job-000003").is_dir());
}
