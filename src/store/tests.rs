//! A fault at each operation that changes the file system.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;

use crate::disk::Disk;
use crate::{About, Error, Meta, Options, Reader, Result, Which, Writer, list, verify};

fn memory(seed: u8) -> Vec<u8> {
    (0..300_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8 ^ seed).collect()
}

fn write(folder: &Path, seed: u8, disk: &Disk, reuse: bool) -> Result<()> {
    let options = Options { threads: 1, keep: Some(2), reuse, ..Options::default() };
    let writer = Writer::create_on(folder, Meta::default(), options, disk)?;
    for id in 0..3 {
        let bytes = memory(seed + id as u8);
        let block = writer.block(About { id, bytes: bytes.len() as u64, ..About::default() })?;
        writer.write(block, 0, &bytes)?;
    }
    let written = writer.finish()?;
    written.not_removed.map_or(Ok(()), Err)
}

fn is_of(folder: &Path, seed: u8) -> bool {
    let reader = Reader::open(folder, Which::Newest, 1).unwrap();
    assert!(reader.skipped().is_empty(), "{:?}", reader.skipped());
    let mut bytes = vec![0; memory(0).len()];
    (0..3).all(|id| {
        reader.read_into(id, 0, &mut bytes).unwrap();
        bytes == memory(seed + id as u8)
    })
}

/// Whether it was about a generation that is too old: it is renamed and then removed.
fn is_of_removal(error: &Error) -> bool {
    let said = error.to_string();
    said.contains("cannot remove") && !said.contains(".new/") || said.contains("gen-000001: cannot rename")
}

#[test]
fn whatever_fails_the_older_generations_stay_and_the_next_writer_goes_on() {
    // From some operation on all of them fail, so that what cleans up fails, too; or one of them does.
    for is_one in [false, true] {
        each_fails(is_one, false);
        each_fails(is_one, true);
    }
}

/// With `reuse` each generation has two blocks of three in common with the one before it.
fn each_fails(is_one: bool, reuse: bool) {
    let mut seen = Vec::new();
    let [first, second, third, fourth] = if reuse { [9, 10, 11, 12] } else { [0, 10, 20, 30] };
    let store = |folder: &Path, seed, disk: &Disk| write(folder, seed, disk, reuse);
    for failing in 0.. {
        let folder = tempfile::tempdir().unwrap();
        [first, second].into_iter().for_each(|seed| store(folder.path(), seed, &Disk::default()).unwrap());
        let count = Arc::new(AtomicUsize::new(0));
        let faults = Arc::clone(&count);
        let disk = Disk::with_faults(move |_| {
            let number = faults.fetch_add(1, Ordering::Relaxed);
            if number == failing || number > failing && !is_one { Err(Errno::NOSPC) } else { Ok(()) }
        });
        let done = store(folder.path(), third, &disk);
        let all = verify(folder.path(), None, 1).unwrap();
        assert!(all.iter().all(|one| one.wrong.is_empty()), "{failing}: {all:?}");
        let Err(error) = done else {
            assert!(is_of(folder.path(), third));
            break;
        };
        assert!(error.is_full() && error.to_string().starts_with(folder.path().to_str().unwrap()), "{error}");
        assert!(error.to_string().contains("make room there"), "what to do is said: {error}");
        // The new one counts where all that failed was to remove what is old, and where it could not be taken back.
        let newest = if is_of(folder.path(), second) { second } else { third };
        assert!(newest == second || is_of(folder.path(), third), "{failing}: {error}");
        if is_one {
            assert_eq!(newest == third, is_of_removal(&error), "{failing}: {error}");
        }
        seen.push(error.to_string().rsplit("/store").next().unwrap_or_default().to_owned());
        store(folder.path(), fourth, &Disk::default()).unwrap();
        assert!(is_of(folder.path(), fourth));
        assert_eq!(list(folder.path()).unwrap().len(), 2);
        let left = std::fs::read_dir(folder.path()).unwrap().flatten();
        let stale: Vec<_> =
            left.map(|entry| entry.file_name()).filter(|name| name.as_encoded_bytes()[0] == b'.').collect();
        assert!(stale.is_empty(), "{failing}: {stale:?}");
    }
    let mut doing =
        vec!["cannot make", "cannot create", "cannot write", "cannot sync", "cannot rename", "cannot remove"];
    if reuse {
        doing.push("cannot link");
    }
    for doing in doing {
        assert!(seen.iter().any(|error| error.contains(doing)), "nothing {doing}: {seen:#?}");
    }
}

#[test]
fn one_fault_among_many_threads_ends_all_of_them() {
    for failing in 3..9 {
        let folder = tempfile::tempdir().unwrap();
        let count = AtomicUsize::new(0);
        let disk = Disk::with_faults(move |doing| {
            if doing == "write" && count.fetch_add(1, Ordering::Relaxed) == failing { Err(Errno::IO) } else { Ok(()) }
        });
        let options = Options { threads: 3, ..Options::default() };
        let writer = Writer::create_on(folder.path(), Meta::default(), options, &disk).unwrap();
        let bytes = memory(1);
        let block = writer.block(About { bytes: 40 * bytes.len() as u64, ..About::default() }).unwrap();
        let written = (0..40).try_for_each(|number| writer.write(block, number * bytes.len() as u64, &bytes));
        let finished = writer.finish().map(drop).unwrap_err();
        for error in [written.err().unwrap_or(finished.clone()), finished] {
            assert!(error.to_string().ends_with("cannot write: Input/output error (os error 5)"), "{error}");
        }
        assert!(list(folder.path()).unwrap().is_empty());
    }
}
