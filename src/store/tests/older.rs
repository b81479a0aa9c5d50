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

fn blocks() -> Vec<Vec<u8>> {
    [Kind::Random, Kind::Bf16, Kind::Zeros, Kind::Text, Kind::Holes]
        .into_iter()
        .zip(0..)
        .map(|(kind, seed)| memory(kind, PART + 1_234_567, seed))
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
    assert!((1..2 << 20).contains(&third.fresh), "{}", third.fresh);
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
