//! What has not changed since the last image is not copied while the program is stopped, and every change is seen.

use super::jobs::rank;
use super::{
    MIB, agrees, blocks_of, checkpointed, copied, ends_well, generations, gpupool, image, not_copied, session, store,
    stored, verifies,
};
use gpupool_store::{Reader, Which, rank_folder};
use harness::{Run, Running, at_work, goes_on};
use serde_json::Value;
use std::path::Path;

/// A part of an image.
const PART: u64 = 8 * MIB;
const KIB: u64 = 40 << 10;

/// What a block of so many KiB holds that counts up.
fn counting(seed: u32, kib: u64) -> Vec<u32> {
    (seed..).take((kib << 8) as usize).collect()
}

/// A GPU that has no room for a copy of most of what it holds.
fn crowded() -> Run {
    checkpointed("1x1GiB").env("GPUPOOL_LIMIT", "0:44MiB")
}

/// The newest image has the words at an address that the program has there.
#[track_caller]
fn is_stored(folder: &Path, address: u64, wanted: &[u32], what: &str) {
    let found = stored(folder, address, wanted.len() * 4);
    let wrong = found.iter().zip(wanted).position(|(found, wanted)| found != wanted);
    assert_eq!(wrong, None, "{what}: the image has another word there");
}

#[test]
fn only_what_has_changed_is_copied_and_every_change_is_seen() {
    let (_around, folder) = store();
    let mut program = crowded().start(None);
    let block = blocks_of(&mut program, &[KIB], 5000)[0];
    let mut words = counting(5000, KIB);
    let first = image(&program, &folder, "--keep 2");
    assert_eq!((copied(&first), not_copied(&first)), ([0, 40, 0], 0), "{first}");
    let told = image(&program, &folder, "--keep 2");
    assert_eq!((copied(&told), not_copied(&told)), ([0; 3], 40 * MIB), "{told}");
    assert_eq!((&told["new_bytes"], &told["unchanged_bytes"]), (&0.into(), &(40 * MIB).into()), "{told}");
    is_stored(&folder, block, &words, "nothing");
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(log.contains("\"not_copied\":41943040"), "{log}");
    // By one bit each: the first and the last word of the block and of a part of the image, and some within.
    for (at, bit) in [(0, 0), (words.len() - 1, 31), (2 << 20, 7), ((2 << 20) - 1, 1), (1_234_567, 31), (3, 31)] {
        words[at] ^= 1 << bit;
        program.ask(&format!("put {} {}", block + 4 * at as u64, words[at]));
        let told = image(&program, &folder, "--keep 2");
        assert_eq!((copied(&told), not_copied(&told)), ([0, 8, 0], 40 * MIB - PART), "word {at}: {told}");
        is_stored(&folder, block, &words, &format!("word {at}"));
    }
    // Within four that are looked at together, next to each other, far from each other, as many words from the beginning of their part, and of two parts.
    for (one, other, parts) in [(8, 10, 1), (7, 8, 1), (100, 2_000_000, 1), (64, (2 << 20) + 64, 2), (5, 9_000_000, 2)]
    {
        words.swap(one, other);
        program.ask(&format!("swap {} {}", block + 4 * one as u64, block + 4 * other as u64));
        let told = image(&program, &folder, "--keep 2");
        assert_eq!(not_copied(&told), 40 * MIB - parts * PART, "{one} and {other}: {told}");
        is_stored(&folder, block, &words, &format!("{one} and {other}"));
    }
    // Whole groups of four that are looked at together, which hold what they did, elsewhere in their part.
    for word in 0..4 {
        let (one, other) = (16 + word, 400 + word);
        words.swap(one, other);
        program.ask(&format!("swap {} {}", block + 4 * one as u64, block + 4 * other as u64));
    }
    let told = image(&program, &folder, "--keep 2");
    assert_eq!(not_copied(&told), 40 * MIB - PART, "groups of four: {told}");
    is_stored(&folder, block, &words, "groups of four");
    // Each part with another one of the block: they begin at the same place in each, and their words are those of before in another order.
    let (front, back) = words.split_at_mut(2 << 20);
    front[..64].swap_with_slice(&mut back[..64]);
    for at in 0..64 {
        program.ask(&format!("swap {} {}", block + 4 * at, block + PART + 4 * at));
    }
    assert_eq!(not_copied(&image(&program, &folder, "--keep 2")), 40 * MIB - 2 * PART);
    is_stored(&folder, block, &words, "the beginnings of two parts");
    verifies(&folder);
    ends_well(program);
}

/// Blocks that are written all the time beside others that are not, small ones, and the program's own memory.
#[test]
fn what_changes_and_what_does_not_are_of_one_moment() {
    let (_around, folder) = store();
    let mut program = checkpointed("2x1GiB").start(None);
    let blocks = blocks_of(&mut program, &[KIB / 2, 40, 6 << 10], 5000);
    let own: u64 = program.ask("own 10240 9000").parse().unwrap();
    at_work(&mut program, 4);
    for generation in 1..=12 {
        let told = image(&program, &folder, "--keep 3");
        // The small one has neighbours that change.
        let least = if generation > 1 { 36 * MIB } else { 0 };
        assert!(not_copied(&told) >= least && not_copied(&told) <= 40 * MIB, "{told}");
        copied(&told);
        agrees(&mut program, &folder, 4);
        let all =
            [(blocks[0], KIB / 2, 5000), (blocks[1], 40, 105_000), (blocks[2], 6 << 10, 205_000), (own, 10240, 9000)];
        for (address, kib, seed) in all {
            let words = counting(seed, kib);
            is_stored(&folder, address, &words, &format!("{address:#x} in generation {generation}"));
        }
        goes_on(&mut program);
    }
    verifies(&folder);
    ends_well(program);
}

/// What is referred to has to be there.
#[test]
fn where_the_last_image_is_not_the_newest_in_the_folder_everything_is_copied() {
    let (_around, folder) = store();
    let (_other, other) = store();
    let mut program = crowded().start(None);
    let block = blocks_of(&mut program, &[KIB], 5000)[0];
    let words = counting(5000, KIB);
    let next = |folder: &Path, more: &str, known: bool| {
        let told = image(&program, folder, more);
        assert_eq!(not_copied(&told), if known { 40 * MIB } else { 0 }, "{more}: {told}");
        is_stored(folder, block, &words, more);
    };
    next(&folder, "--keep 4", false);
    next(&folder, "--keep 4", true);
    next(&other, "--keep 4", false);
    next(&folder, "--keep 4", false);
    next(&folder, "--keep 4", true);
    // The newest is gone, and the one before that is not the one that is known.
    let newest = generations(&folder)[0];
    std::fs::remove_dir_all(folder.join(format!("gen-{newest:06}"))).unwrap();
    next(&folder, "--keep 4", false);
    next(&folder, "--keep 4", true);
    next(&folder, "--keep 4 --full", false);
    next(&folder, "--keep 4", false);
    next(&folder, "--keep 1", true);
    assert_eq!(generations(&folder).len(), 1);
    next(&folder, "--keep 1", true);
    verifies(&folder);
    ends_well(program);
}

/// Another process has other keys, and remembers nothing.
#[test]
fn another_process_takes_nothing_for_unchanged_that_it_has_not_seen() {
    let (_around, folder) = store();
    for _ in 0..2 {
        let mut program = crowded().start(None);
        blocks_of(&mut program, &[KIB], 5000);
        assert_eq!(not_copied(&image(&program, &folder, "")), 0);
        ends_well(program);
    }
}

/// Memory that lies on another GPU or on the host would be looked at no faster than it is copied.
#[test]
fn what_lies_elsewhere_is_copied_each_time() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").env("GPUPOOL_LIMIT", "0:12MiB").start(None);
    let blocks = blocks_of(&mut program, &[8 << 10, KIB], 5000);
    for generation in 1..=3 {
        let told = image(&program, &folder, "");
        assert_eq!(not_copied(&told), if generation > 1 { 12 * MIB } else { 0 }, "as much as is near: {told}");
        for (block, kib, seed) in [(blocks[0], 8 << 10, 5000), (blocks[1], KIB, 105_000)] {
            let words = counting(seed, kib);
            is_stored(&folder, block, &words, "each");
        }
    }
    ends_well(program);
}

/// As where the driver's translator is not installed.
#[test]
fn where_the_driver_makes_no_kernel_everything_is_copied() {
    let (_around, folder) = store();
    let mut program = crowded().env("SIMCUDA_FAULT", "cuLinkComplete:1=222").start(None);
    let block = blocks_of(&mut program, &[KIB], 5000)[0];
    let words = counting(5000, KIB);
    for _ in 0..2 {
        let told = image(&program, &folder, "");
        assert_eq!((copied(&told), not_copied(&told)), ([0, 40, 0], 0), "{told}");
        is_stored(&folder, block, &words, "each");
    }
    ends_well(program);
}

/// Also behind `--process`, where nothing is read before the stop, and after the memory was away in between.
#[test]
fn a_program_that_leaves_behind_its_image_has_what_is_unchanged_from_the_one_before() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").machine().start(None);
    let block = blocks_of(&mut program, &[KIB], 5000)[0];
    let mut words = counting(5000, KIB);
    assert_eq!(not_copied(&image(&program, &folder, "")), 0);
    let mut seen = 0;
    for round in 0..3 {
        words[round] ^= 1;
        program.ask(&format!("put {} {}", block + 4 * round as u64, words[round]));
        let asked = format!("checkpoint --json --process --wait 60s {} {}", program.pid(), folder.display());
        let ended = gpupool(&program, &program.session(), &asked);
        let told: Value = serde_json::from_slice(&ended.stdout).unwrap();
        assert_eq!(told["process"]["is_off_gpus"], true, "{told}");
        seen += not_copied(&told);
        assert!(not_copied(&told) <= 40 * MIB - PART, "{told}");
        is_stored(&folder, block, &words, "with --process");
        assert!(gpupool(&program, &program.session(), &format!("resume {}", program.pid())).status.success());
    }
    assert!(seen >= 2 * 32 * MIB, "{seen}: one in eight has its turn to be read");
    verifies(&folder);
    ends_well(program);
}

#[test]
fn ranks_of_a_job_copy_what_has_changed() {
    let (session, (_around, folder)) = (session(), store());
    let mut ranks = [0, 1].map(|number| rank(number).start(Some(session.path())));
    let blocks = ranks.each_mut().map(|rank: &mut Running| blocks_of(rank, &[KIB], 5000)[0]);
    let pids = ranks.each_ref().map(Running::pid);
    for generation in 1..=3 {
        let asked = format!("checkpoint --json {} {} {} --keep 3", pids[0], pids[1], folder.display());
        let told: Value = serde_json::from_slice(&gpupool(&ranks[0], session.path(), &asked).stdout).unwrap();
        assert_eq!(told["generation"], generation, "{told}");
        for (number, block) in (0..).zip(blocks) {
            assert_eq!(
                not_copied(&told["ranks"][number as usize]),
                if generation > 1 { 40 * MIB } else { 0 },
                "{told}"
            );
            let reader = Reader::open(&rank_folder(&folder, number), Which::Newest, 1).unwrap();
            let about = reader.manifest().blocks.iter().map(|block| &block.about).find(|about| about.address == block);
            let mut bytes = vec![0; (KIB as usize) << 10];
            reader.read_into(about.unwrap().id, 0, &mut bytes).unwrap();
            let words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
            assert!(words.zip(5000..).all(|(word, wanted)| word == wanted), "rank {number}");
        }
    }
    ranks.into_iter().for_each(ends_well);
}
