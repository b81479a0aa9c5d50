//! What is the same as in the generation before is not written again.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

mod common;

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use common::{Kind, about, load, memory, meta};
use gpupool_store::{Options, PART, Which, Writer, Written, list, remove, show, verify};

/// Writes these blocks, where what is there already is not written again.
fn again(folder: &Path, blocks: &[Vec<u8>], keep: Option<usize>) -> Written {
    let options = Options { threads: 3, keep, reuse: true, ..Options::default() };
    let writer = Writer::create(folder, meta(), options).unwrap();
    for (id, bytes) in blocks.iter().enumerate() {
        let block = writer.block(about(id as u64, bytes.len())).unwrap();
        writer.write(block, 0, bytes).unwrap();
    }
    writer.finish().unwrap()
}

/// Bytes of each block behind its first part.
const TAIL: usize = 1_234_567;

fn blocks() -> Vec<Vec<u8>> {
    [Kind::Random, Kind::Bf16, Kind::Zeros, Kind::Text, Kind::Holes]
        .into_iter()
        .zip(0..)
        .map(|(kind, seed)| memory(kind, PART + TAIL, seed))
        .collect()
}

#[track_caller]
fn is_there(folder: &Path, generation: u64, blocks: &[Vec<u8>]) {
    assert!(load(folder, Which::Number(generation)).unwrap() == blocks, "generation {generation} holds other bytes");
    for verified in verify(folder, None, 2).unwrap() {
        assert_eq!(verified.wrong, []);
    }
}

/// What all files of the folder take, each once, however many names it has.
fn on_disk(folder: &Path) -> u64 {
    let mut files = std::collections::BTreeMap::new();
    for generation in std::fs::read_dir(folder).unwrap().flatten().filter(|entry| entry.path().is_dir()) {
        for file in std::fs::read_dir(generation.path()).unwrap().flatten() {
            let data = file.metadata().unwrap();
            files.insert(data.ino(), data.len());
        }
    }
    files.values().sum()
}

#[test]
fn what_has_not_changed_takes_no_room_and_outlives_the_older_generation() {
    let folder = tempfile::tempdir().unwrap();
    let mut blocks = blocks();
    let first = again(folder.path(), &blocks, None);
    assert_eq!((first.unchanged, first.fresh), (0, first.stored));
    drop(first);
    let before = on_disk(folder.path());

    let second = again(folder.path(), &blocks, None);
    assert_eq!(second.fresh, 0, "nothing is written twice");
    assert!(second.unchanged >= 3 * PART as u64 && second.stored >= before / 2);
    drop(second);
    assert!(on_disk(folder.path()) < before + 100_000, "but the manifest");

    // One byte of one part.
    blocks[0][PART + 5] ^= 1;
    let third = again(folder.path(), &blocks, None);
    // It is a part of so many bytes, padded, that no codec makes shorter. What else is in use of the file that it lay in is copied where that is less than it: which thread writes what
    // differs from time to time.
    let part = (TAIL as u64).next_multiple_of(4096);
    assert!((part..2 * part).contains(&third.fresh), "{}", third.fresh);
    drop(third);
    assert_eq!(
        list(folder.path()).unwrap()[0].told.as_ref().unwrap().fresh,
        show(folder.path(), None).unwrap().fresh()
    );
    is_there(folder.path(), 3, &blocks);
    // Whatever goes, the others have all that is theirs.
    remove(folder.path(), 2).unwrap();
    remove(folder.path(), 1).unwrap();
    is_there(folder.path(), 3, &blocks);
}

#[test]
fn memory_that_has_moved_is_found_and_so_is_what_lies_there_twice() {
    let folder = tempfile::tempdir().unwrap();
    let mut blocks = blocks();
    drop(again(folder.path(), &blocks, None));
    blocks.reverse();
    blocks.push(blocks[4].clone());
    let second = again(folder.path(), &blocks, None);
    assert_eq!(second.fresh, 0);
    drop(second);
    is_there(folder.path(), 2, &blocks);
}

/// A file of which little is in use does not stay for that, and not every generation adds one.
#[test]
fn what_is_on_the_disk_stays_within_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let mut blocks: Vec<Vec<u8>> = (0..16).map(|seed| memory(Kind::Random, 200_000, seed)).collect();
    for round in 0..200_u64 {
        let number = round as usize % blocks.len();
        blocks[number] = memory(Kind::Random, 200_000, 1000 + round);
        drop(again(folder.path(), &blocks, Some(1)));
        let manifest = show(folder.path(), None).unwrap();
        assert!(manifest.stored <= 2 * (manifest.bytes + 16 * 4096), "{round}: {}", manifest.stored);
        assert!(manifest.files.len() <= 64 + 4, "{round}: {} files", manifest.files.len());
        assert!(on_disk(folder.path()) <= manifest.stored + 100_000, "{round}");
    }
    is_there(folder.path(), 200, &blocks);
}

#[test]
fn a_file_that_is_no_more_what_was_written_serves_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = blocks();
    drop(again(folder.path(), &blocks, None));
    // Shorter than it was, and gone.
    let files = std::fs::read_dir(folder.path().join("gen-000001")).unwrap().flatten().map(|entry| entry.path());
    let mut data: Vec<_> = files.filter(|path| path.to_string_lossy().contains("data-")).collect();
    data.sort();
    std::fs::File::options().write(true).open(&data[0]).unwrap().set_len(4096).unwrap();
    data[1..].iter().for_each(|path| std::fs::remove_file(path).unwrap());
    let second = again(folder.path(), &blocks, Some(1));
    assert_eq!(second.unchanged, 0);
    drop(second);
    is_there(folder.path(), 2, &blocks);
}

/// Flips a byte of every file of a generation that has data, in the middle of it. Files of older ones are the same, whatever they are called.
fn damage(folder: &Path, generation: u64) {
    let files = std::fs::read_dir(folder.join(format!("gen-{generation:06}"))).unwrap().flatten();
    for file in files.filter(|file| file.file_name().to_string_lossy().starts_with("data-")) {
        let file = std::fs::File::options().read(true).write(true).open(file.path()).unwrap();
        let (at, mut byte) = ((file.metadata().unwrap().len() / 2) & !0xfff, [0]);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }
}

/// While all images that are kept have it, nobody would find it.
#[test]
fn what_is_damaged_and_does_not_change_is_written_anew_before_the_image_without_the_damage_is_gone() {
    const KEEP: u64 = 3;
    let folder = tempfile::tempdir().unwrap();
    let blocks: Vec<Vec<u8>> = (0..3).map(|seed| memory(Kind::Random, 3 * PART, seed)).collect();
    let image = || again(folder.path(), &blocks, Some(KEEP as usize));
    assert_eq!(image().damaged, 0);
    damage(folder.path(), 1);
    let found: Vec<u64> = (0..KEEP).map(|_| image().damaged).collect();
    assert_eq!(found.iter().sum::<u64>(), 3 * PART as u64, "one part of each file: {found:?}");
    assert!(load(folder.path(), Which::Number(KEEP + 1)).unwrap() == blocks);
    // Those of before are gone after as many again, and nothing is left of it.
    (0..KEEP).for_each(|_| assert_eq!(image().damaged, 0));
    is_there(folder.path(), 2 * KEEP + 1, &blocks);
}

/// As [`again`], of memory of which these blocks are known to be as they were: their bytes are handed over only where they are not taken without, in pieces as long as parts. How
/// many bytes were taken.
fn known(folder: &Path, blocks: &[Vec<u8>], as_before: &[usize], keep: usize, reads: bool) -> (Written, u64) {
    let options = Options { threads: 3, keep: Some(keep), reuse: true, ..Options::default() };
    let writer = Writer::create(folder, meta(), options).unwrap();
    writer.read_ahead(&|| reads);
    let mut taken = 0;
    for (id, bytes) in blocks.iter().enumerate() {
        let block = writer.block(about(id as u64, bytes.len())).unwrap();
        for (piece, offset) in bytes.chunks(PART).zip((0..).step_by(PART)) {
            if as_before.contains(&id) && writer.reuse(block, offset, piece.len(), (id as u64, offset)).unwrap() {
                taken += piece.len() as u64;
            } else {
                writer.write(block, offset, piece).unwrap();
            }
        }
    }
    (writer.finish().unwrap(), taken)
}

#[test]
fn what_is_known_to_be_as_it_was_is_taken_without_its_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let mut blocks = blocks();
    // Of a length at which no hash is kept that it would be found by.
    blocks.push(memory(Kind::Random, 1000, 9));
    let first = again(folder.path(), &blocks, Some(2));
    let (sum, seal) = (blocks.iter().map(|bytes| bytes.len() as u64).sum::<u64>(), first.seal);
    drop(first);
    for round in 0..20 {
        let writer = Writer::create(folder.path(), meta(), Options { reuse: true, ..Options::default() }).unwrap();
        assert!(round > 0 || writer.before() == Some(seal));
        drop(writer);
        // Each time one of them is another one, so that files come and go and what is in use of them is copied together.
        let changes = round as usize % blocks.len();
        let bytes = blocks[changes].len();
        blocks[changes] = memory(Kind::Random, bytes, 1000 + round);
        let as_before: Vec<usize> = (0..blocks.len()).filter(|block| *block != changes).collect();
        let (written, taken) = known(folder.path(), &blocks, &as_before, 2, true);
        assert_eq!(taken, sum - bytes as u64, "{round}");
        assert!(written.damaged == 0 && written.unchanged <= taken && written.fresh <= 3 * sum, "{round}: {written:?}");
        drop(written);
        is_there(folder.path(), round + 2, &blocks);
    }
}

/// What no codec makes shorter takes on the disk what it takes in memory, whether it changed or its file was not worth keeping; and zeros that are taken as they were are nothing new.
#[test]
fn what_is_told_to_have_changed_is_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut blocks: Vec<Vec<u8>> = (0..8).map(|seed| memory(Kind::Random, PART, seed)).collect();
    drop(again(folder.path(), &blocks, Some(2)));
    let all = 8 * PART as u64;
    let mut was_copied = false;
    for round in 0..8 {
        blocks[round][100] ^= 1;
        let written = again(folder.path(), &blocks, Some(2));
        assert_eq!(written.bytes - written.unchanged, written.fresh, "{round}: {written:?}");
        was_copied |= written.fresh > PART as u64;
        assert!(written.fresh >= PART as u64 && written.fresh < all, "{round}: {written:?}");
    }
    assert!(was_copied, "no file was given up");
    let zeros = vec![vec![0; PART]];
    drop(again(folder.path(), &zeros, None));
    let writer = Writer::create(folder.path(), meta(), Options { reuse: true, ..Options::default() }).unwrap();
    let block = writer.block(about(0, PART)).unwrap();
    assert!(writer.reuse(block, 0, PART, (0, 0)).unwrap());
    let written = writer.finish().unwrap();
    assert_eq!((written.unchanged, written.fresh), (PART as u64, 0));
}

/// Zeros and the like are stored as one however long they are, and any piece of them is taken; of others only what was stored as one.
#[test]
fn only_whole_parts_are_taken_and_any_piece_of_what_repeats() {
    let folder = tempfile::tempdir().unwrap();
    let words: Vec<u8> = (0..3 * PART / 8).flat_map(|_| 0x1122_3344_5566_7788_u64.to_le_bytes()).collect();
    let blocks = [words, memory(Kind::Random, 2 * PART, 5)];
    drop(again(folder.path(), &blocks, None));
    let options = Options { reuse: true, ..Options::default() };
    let writer = Writer::create(folder.path(), meta(), options).unwrap();
    let part = PART as u64;
    let repeats = writer.block(about(7, PART)).unwrap();
    assert!(writer.reuse(repeats, 0, PART, (0, part + 13)).unwrap(), "within what repeats");
    let random = writer.block(about(8, 2 * PART)).unwrap();
    assert!(!writer.reuse(random, 0, PART, (1, 4096)).unwrap(), "across two parts");
    assert!(!writer.reuse(random, 0, 4096, (1, 0)).unwrap(), "a piece of one");
    assert!(!writer.reuse(random, 0, PART, (1, 2 * part)).unwrap(), "behind its end");
    assert!(!writer.reuse(random, 0, PART, (2, 0)).unwrap(), "of no block");
    assert!(writer.reuse(random, 0, PART, (1, part)).unwrap() && writer.reuse(random, part, PART, (1, 0)).unwrap());
    assert!(writer.reuse(random, part + 1, PART, (1, 0)).is_err(), "beyond the block");
    drop(writer.finish().unwrap());
    let told = load(folder.path(), Which::Newest).unwrap();
    assert!(told[0] == blocks[0][PART + 13..2 * PART + 13]);
    assert!(told[1][..PART] == blocks[1][PART..] && told[1][PART..] == blocks[1][..PART]);
    assert_eq!(show(folder.path(), None).unwrap().fresh(), 0);
}

/// What is damaged is handed over, whoever says that it is as it was: what has its turn is read before it is taken, or not taken.
#[test]
fn what_is_damaged_is_not_taken_where_it_has_its_turn() {
    let folder = tempfile::tempdir().unwrap();
    let blocks: Vec<Vec<u8>> = (0..3).map(|seed| memory(Kind::Random, 3 * PART, seed)).collect();
    let (part, all) = (PART as u64, 9 * PART as u64);
    drop(again(folder.path(), &blocks, Some(1)));
    // Of one image that is kept every part has its turn.
    let (written, taken) = known(folder.path(), &blocks, &[0, 1, 2], 1, false);
    assert_eq!((taken, written.unchanged), (0, all), "nothing was read");
    drop(written);
    damage(folder.path(), 2);
    let (written, taken) = known(folder.path(), &blocks, &[0, 1, 2], 1, true);
    assert_eq!((taken, written.damaged), (all - 3 * part, 3 * part), "one part of each file");
    drop(written);
    is_there(folder.path(), 3, &blocks);
    // What is gone, or no more as long, was never there.
    for entry in std::fs::read_dir(folder.path().join("gen-000003")).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with("data-") {
            std::fs::File::options().write(true).open(entry.path()).unwrap().set_len(4096).unwrap();
        }
    }
    let (written, taken) = known(folder.path(), &blocks, &[0, 1, 2], 3, true);
    assert_eq!((taken, written.damaged), (0, all));
    drop(written);
    assert!(load(folder.path(), Which::Newest).unwrap() == blocks);
}
