//! What was stored comes back; what was damaged since does not, and is named.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

mod common;

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use common::{KINDS, Kind, Numbers, about, load, memory, meta, store};
use gpupool_store::{Codec, Error, Options, PART, Reader, Which, Writer, list, show, verify};
use proptest::prelude::*;

fn codec() -> impl Strategy<Value = Option<Codec>> {
    prop_oneof![Just(None), prop::sample::select(&Codec::ALL[..]).prop_map(Some)]
}

fn kind() -> impl Strategy<Value = Kind> {
    prop::sample::select(&KINDS[..])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// The model is the memory itself: handed over in pieces of any length and in any order, by copy or not, read at any place.
    #[test]
    fn memory_comes_back(
        blocks in prop::collection::vec((kind(), 0_usize..1_500_000, any::<u64>()), 0..5),
        codec in codec(),
        direct in any::<bool>(),
        threads in 1_usize..4,
        seed in any::<u64>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let blocks: Vec<Vec<u8>> = blocks.into_iter().map(|(kind, bytes, seed)| memory(kind, bytes, seed)).collect();
        let mut numbers = Numbers(seed);
        let mut pieces = Vec::new();
        for (id, block) in blocks.iter().enumerate() {
            let mut at = 0;
            while at < block.len() {
                let end = (at + 1 + numbers.below(600_000) as usize).min(block.len());
                pieces.push((id, at, end));
                at = end;
            }
        }
        for at in (1..pieces.len()).rev() {
            pieces.swap(at, numbers.below(at as u64 + 1) as usize);
        }
        let options = Options { threads, direct, codec, ..Options::default() };
        let writer = Writer::create(folder.path(), meta(), options).unwrap();
        let keys: Vec<_> =
            blocks.iter().enumerate().map(|(id, bytes)| writer.block(about(id as u64, bytes.len())).unwrap()).collect();
        for (id, at, end) in pieces {
            let bytes = &blocks[id][at..end];
            match numbers.below(3) {
                0 => writer.write(keys[id], at as u64, bytes),
                1 => writer.submit(keys[id], at as u64, bytes.to_vec()),
                _ => {
                    let mut room = writer.room().unwrap();
                    room[..bytes.len()].copy_from_slice(bytes);
                    room.truncate(bytes.len());
                    writer.submit(keys[id], at as u64, room)
                }
            }.unwrap();
        }
        let written = writer.finish().unwrap();
        prop_assert_eq!(written.bytes, blocks.iter().map(|block| block.len() as u64).sum::<u64>());

        let reader = Reader::open(folder.path(), Which::Newest, threads).unwrap();
        prop_assert_eq!(&reader.manifest().meta, &meta());
        for (id, block) in blocks.iter().enumerate() {
            prop_assert_eq!(&reader.block(id as u64).unwrap().about, &about(id as u64, block.len()));
            let mut back = vec![0xee; block.len()];
            reader.read_into(id as u64, 0, &mut back).unwrap();
            prop_assert!(&back == block, "block {}", id);
            let from = numbers.below(block.len() as u64 + 1) as usize;
            let end = from + numbers.below((block.len() - from) as u64 + 1) as usize;
            back[from..end].fill(0xee);
            reader.read_here(id as u64, from as u64, &mut back[from..end]).unwrap();
            prop_assert!(back[from..end] == block[from..end], "block {} from {} to {}", id, from, end);
        }
        let verified = verify(folder.path(), None, threads).unwrap();
        prop_assert!(verified.len() == 1 && verified[0].wrong.is_empty(), "{:?}", verified);
    }
}

#[test]
fn a_block_of_several_parts_comes_back_whichever_way_it_is_stored() {
    let folder = tempfile::tempdir().unwrap();
    let block = memory(Kind::Bf16, 2 * PART + 4097, 5);
    for codec in [None, Some(Codec::None), Some(Codec::Lz4), Some(Codec::Zstd), Some(Codec::Planes2)] {
        let written =
            store(folder.path(), Options { codec, ..Options::default() }, std::slice::from_ref(&block)).unwrap();
        let reader = Reader::open(folder.path(), Which::Number(written.generation), 2).unwrap();
        assert_eq!(reader.block(0).unwrap().parts.len(), 3);
        let mut back = vec![0; block.len()];
        reader.read_into(0, 0, &mut back).unwrap();
        assert!(back == block, "{codec:?}");
    }
}

/// Of the files of memory in a folder that this process has open, whether each passes the page cache by, as the kernel tells.
fn passes_the_cache_by(folder: &Path) -> Vec<bool> {
    let flags = |entry: &fs::DirEntry| {
        let file = fs::read_link(entry.path()).ok()?;
        let is_data = file.starts_with(folder) && file.file_name()?.to_str()?.starts_with("data-");
        let told = fs::read_to_string(format!("/proc/self/fdinfo/{}", entry.file_name().to_str()?)).ok()?;
        let flags = told.lines().find_map(|line| line.strip_prefix("flags:"))?;
        is_data.then(|| i32::from_str_radix(flags.trim(), 8).ok()).flatten()
    };
    let open = fs::read_dir("/proc/self/fd").unwrap().flatten();
    open.filter_map(|entry| flags(&entry)).map(|flags| flags & libc::O_DIRECT != 0).collect()
}

/// Otherwise an image would push what programs have read and written out of the machine's memory.
#[test]
fn memory_passes_the_page_cache_by_on_its_way_out_and_back_where_the_file_system_lets_it() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = fs::canonicalize(folder.path()).unwrap();
    let lets = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_DIRECT)
        .open(path.join("asked"))
        .is_ok();
    let block = memory(Kind::Random, 3 * PART, 3);
    for direct in [true, false] {
        let writer = Writer::create(&path, meta(), Options { direct, ..Options::default() }).unwrap();
        let key = writer.block(about(0, block.len())).unwrap();
        writer.write(key, 0, &block).unwrap();
        let begun = std::time::Instant::now();
        let files = loop {
            let files = passes_the_cache_by(&path);
            if !files.is_empty() {
                break files;
            }
            assert!(begun.elapsed() < std::time::Duration::from_secs(60), "no file of it is open");
            std::thread::yield_now();
        };
        let number = writer.finish().unwrap().generation;
        assert!(files.iter().all(|passes| *passes == (direct && lets)), "{direct} {lets}: {files:?}");
        let reader = Reader::open(&path, Which::Number(number), 2).unwrap();
        let mut back = vec![0; block.len()];
        reader.read_into(0, 0, &mut back).unwrap();
        assert!(back == block && passes_the_cache_by(&path).iter().all(|passes| *passes == lets));
    }
}

#[test]
fn memory_that_repeats_itself_takes_no_room_and_floats_take_less() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = 2 * PART + 4096;
    let stored = |kind, codec| {
        store(folder.path(), Options { codec, ..Options::default() }, &[memory(kind, bytes, 7)]).unwrap().stored
    };
    for kind in [Kind::Zeros, Kind::Constant, Kind::Words] {
        assert_eq!(stored(kind, None), 0, "{kind:?}");
    }
    let of_16 = |stored: u64| stored * 16 / bytes as u64;
    assert_eq!(of_16(stored(Kind::Random, Some(Codec::Planes2))), 16, "noise is stored as it is");
    assert!(of_16(stored(Kind::Bf16, Some(Codec::Planes2))) < 12, "about two thirds are left");
    assert!(of_16(stored(Kind::F32, Some(Codec::Planes4))) < 14, "about five sixths are left");
    // However much there is of it, it is one entry of the manifest.
    let zeros = show(folder.path(), Some(1)).unwrap();
    assert_eq!(zeros.blocks[0].parts.len(), 1);
}

/// One small generation with every codec and a file for it; where the files are.
fn sample(folder: &Path) -> (Vec<Vec<u8>>, PathBuf, PathBuf) {
    let blocks: Vec<Vec<u8>> =
        [Kind::Bf16, Kind::F32, Kind::Text, Kind::Random, Kind::Zeros].map(|kind| memory(kind, 30_001, 3)).into();
    for codec in [Codec::Lz4, Codec::Zstd, Codec::Planes2, Codec::Planes4] {
        drop(store(folder, Options { threads: 1, codec: Some(codec), ..Options::default() }, &blocks).unwrap());
    }
    (blocks, PathBuf::from("manifest"), PathBuf::from("data-00"))
}

fn generation(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("gen-{number:06}"))
}

#[test]
fn a_flipped_byte_anywhere_is_found_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let (_, manifest, data) = sample(folder.path());
    let mut numbers = Numbers(1);
    for number in 1..=4 {
        let path = generation(folder.path(), number).join(&manifest);
        let whole = fs::read(&path).unwrap();
        // All of them once; the manifests differ in a few bytes only.
        for at in (0..whole.len()).step_by(if number == 1 { 1 } else { 97 }) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << numbers.below(8);
            fs::write(&path, &damaged).unwrap();
            let error = show(folder.path(), Some(number)).expect_err(&format!("byte {at} of the manifest"));
            assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
        }
        fs::write(&path, &whole).unwrap();

        let path = generation(folder.path(), number).join(&data);
        let whole = fs::read(&path).unwrap();
        for at in (0..whole.len()).step_by(1501) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << numbers.below(8);
            fs::write(&path, &damaged).unwrap();
            let verified = verify(folder.path(), Some(number), 1).unwrap();
            let [Error::Part { path: found, block, address, offset: 0, .. }] = &verified[0].wrong[..] else {
                panic!("generation {number}, byte {at}: {verified:?}");
            };
            assert_eq!((found, *address), (&path, about(*block, 0).address), "byte {at}");
        }
        fs::write(&path, &whole).unwrap();
        assert!(verify(folder.path(), Some(number), 1).unwrap()[0].wrong.is_empty());
    }
}

#[test]
fn a_file_that_is_cut_or_longer_is_found_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let (_, manifest, data) = sample(folder.path());
    for name in [manifest, data] {
        let path = generation(folder.path(), 2).join(name);
        let whole = fs::read(&path).unwrap();
        let step = if whole.len() > 10_000 { 997 } else { 1 };
        let mut lengths: Vec<usize> = (0..whole.len()).step_by(step).collect();
        lengths.push(whole.len() + 1);
        for length in lengths {
            let mut other = whole.clone();
            other.resize(length, b'\n');
            fs::write(&path, &other).unwrap();
            let verified = verify(folder.path(), Some(2), 1).unwrap();
            let wrong: Vec<String> = verified[0].wrong.iter().map(ToString::to_string).collect();
            assert!(wrong.len() == 1 && wrong[0].contains(path.to_str().unwrap()), "{length} bytes: {wrong:?}");
        }
        fs::write(&path, &whole).unwrap();
    }
}

#[test]
fn damage_to_the_newest_is_told_and_the_one_before_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (blocks, manifest, _) = sample(folder.path());
    let path = generation(folder.path(), 4).join(manifest);
    fs::write(&path, "gpupool-store 1\n{}\n").unwrap();
    let reader = Reader::open(folder.path(), Which::Newest, 1).unwrap();
    assert_eq!(reader.manifest().generation, 3);
    assert_eq!(reader.skipped().len(), 1);
    assert!(reader.skipped()[0].to_string().contains("gen-000004/manifest: damaged"), "{:?}", reader.skipped());
    assert_eq!(load(folder.path(), Which::Newest).unwrap(), blocks);
    let listed = list(folder.path()).unwrap();
    assert_eq!(
        listed.iter().map(|one| (one.generation, one.told.is_ok())).collect::<Vec<_>>(),
        [(4, false), (3, true), (2, true), (1, true)]
    );
    // Damaged ones are not among those that are kept, and go with the old ones.
    drop(store(folder.path(), Options { keep: Some(3), ..Options::default() }, &blocks).unwrap());
    let left: Vec<u64> = list(folder.path()).unwrap().iter().map(|one| one.generation).collect();
    assert_eq!(left, [5, 4, 3, 2], "three that are whole, and what lies between them");
    gpupool_store::keep(folder.path(), 1).unwrap();
    assert_eq!(list(folder.path()).unwrap().len(), 1);
}

#[test]
fn a_newer_version_is_refused_and_not_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let (_, manifest, _) = sample(folder.path());
    let path = generation(folder.path(), 4).join(manifest);
    let text = fs::read_to_string(&path).unwrap().replacen("gpupool-store 1\n", "gpupool-store 3\n", 1);
    fs::write(&path, text).unwrap();
    let error = Reader::open(folder.path(), Which::Newest, 1).unwrap_err();
    assert!(matches!(error, Error::Newer { version: 3, .. }), "{error}");
    let expected = "its format is version 3, and this gpupool reads up to 2; use the gpupool that wrote it";
    assert_eq!(error.to_string(), format!("{}: {expected}", path.display()));
    assert_eq!(Reader::open(folder.path(), Which::Number(3), 1).unwrap().manifest().generation, 3);
}

#[test]
fn what_was_not_handed_over_or_twice_is_no_generation() {
    let folder = tempfile::tempdir().unwrap();
    let begin = || {
        let writer = Writer::create(folder.path(), meta(), Options::default()).unwrap();
        let block = writer.block(about(7, 100_000)).unwrap();
        writer.write(block, 0, &vec![1; 60_000]).unwrap();
        (writer, block)
    };
    let (writer, _) = begin();
    let said = writer.finish().unwrap_err().to_string();
    assert_eq!(said, "block 7: bytes at 60000 were handed over not at all");
    let (writer, block) = begin();
    writer.write(block, 50_000, &vec![2; 50_000]).unwrap();
    assert_eq!(writer.finish().unwrap_err().to_string(), "block 7: bytes at 50000 were handed over twice");
    let (writer, block) = begin();
    let said = writer.write(block, 60_000, &vec![2; 40_001]).unwrap_err().to_string();
    assert_eq!(said, "block 7: 40001 bytes at 60000 are beyond its 100000 bytes");
    assert_eq!(writer.block(about(7, 1)).unwrap_err().to_string(), "block 7 is told of twice");
    drop(writer);
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["lock"], "nothing of them is left");
}
