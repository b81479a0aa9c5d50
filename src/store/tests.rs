//! A fault at each operation that changes the file system.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;

use crate::disk::Disk;
use crate::{About, Error, JobWriter, Meta, Options, Reader, Result, Which, Writer, jobs, list, rank_folder, verify};

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
        each_fails(is_one, false, Errno::NOSPC);
        each_fails(is_one, true, Errno::NOSPC);
    }
    // As where the disk itself has a fault.
    each_fails(true, true, Errno::IO);
}

/// Operations from the one of this number on fail, or that one does; and how many there were.
fn failing_at(failing: usize, is_one: bool, errno: Errno) -> (Disk, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&count);
    let disk = Disk::with_faults(move |_| {
        let number = counts.fetch_add(1, Ordering::Relaxed);
        if number == failing || number > failing && !is_one { Err(errno) } else { Ok(()) }
    });
    (disk, count)
}

#[track_caller]
fn is_told(error: &Error, folder: &Path, errno: Errno) {
    let said = error.to_string();
    assert!(said.starts_with(folder.to_str().unwrap()), "{said}");
    let is_full = errno == Errno::NOSPC;
    assert_eq!((error.is_full(), said.contains("make room there")), (is_full, is_full), "what to do is said: {said}");
    assert!(is_full || said.ends_with("Input/output error (os error 5)"), "{said}");
}

/// An image of two ranks, which write to disks without faults: they are processes of their own. Why older ones are still there, if they are.
fn write_job(folder: &Path, seed: u8, disk: &Disk) -> Result<Option<Error>> {
    let writer = JobWriter::create_on(folder, disk)?;
    let rank = |rank: u32| {
        let options = Options { threads: 1, ..Options::default() };
        let writer = Writer::create(&rank_folder(folder, rank), Meta::default(), options).unwrap();
        let bytes = memory(seed + rank as u8);
        let block = writer.block(About { bytes: bytes.len() as u64, ..About::default() }).unwrap();
        writer.write(block, 0, &bytes).unwrap();
        (rank, writer.finish().unwrap().generation)
    };
    Ok(writer.finish(&[0, 1].map(rank), Vec::new(), Some(2))?.1)
}

/// The newest image of a job that is whole is this one.
fn is_job_of(folder: &Path, seed: u8) -> bool {
    let newest = jobs(folder).unwrap().into_iter().find_map(|listed| listed.told.ok()).unwrap();
    newest.ranks.iter().all(|image| {
        let reader = Reader::open(&rank_folder(folder, image.rank), Which::Number(image.generation), 1).unwrap();
        let mut bytes = vec![0; memory(0).len()];
        reader.read_into(0, 0, &mut bytes).unwrap();
        bytes == memory(seed + image.rank as u8)
    })
}

#[test]
fn whatever_fails_the_older_images_of_a_job_stay_and_the_next_one_goes_on() {
    const SEEDS: [u8; 4] = [0, 10, 20, 30];
    let mut seen = Vec::new();
    for (is_one, errno) in [(false, Errno::NOSPC), (true, Errno::NOSPC), (true, Errno::IO)] {
        for failing in 0.. {
            let around = tempfile::tempdir().unwrap();
            let folder = around.path().join("job");
            let whole = |seed: &u8| assert_eq!(write_job(&folder, *seed, &Disk::default()), Ok(None));
            SEEDS[..2].iter().for_each(whole);
            let (disk, count) = failing_at(failing, is_one, errno);
            let done = write_job(&folder, SEEDS[2], &disk);
            let is_there = is_job_of(&folder, SEEDS[2]);
            let error = match done {
                Ok(None) => {
                    assert!(is_there);
                    assert!(count.load(Ordering::Relaxed) <= failing, "nobody is told that operation {failing} failed");
                    break;
                }
                Ok(Some(not_removed)) => {
                    assert!(is_there, "{failing}: {not_removed}");
                    not_removed
                }
                // What was named already could not be taken back, where nothing works any more.
                Err(error) => {
                    assert!(!is_there && is_job_of(&folder, SEEDS[1]) || is_there && !is_one, "{failing}: {error}");
                    error
                }
            };
            is_told(&error, &folder, errno);
            seen.push(error.to_string());
            whole(&SEEDS[3]);
            assert!(is_job_of(&folder, SEEDS[3]), "{failing}: {error}");
            let left = |folder: &Path| {
                let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
                let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
                names.retain(|name| name != "lock");
                names.len()
            };
            // Two images of the job and two folders; and of each rank as many.
            assert_eq!(
                (left(&folder), [0, 1].map(|rank| left(&rank_folder(&folder, rank)))),
                (4, [2, 2]),
                "{failing}: {error}"
            );
        }
    }
    for doing in ["cannot create", "cannot write", "cannot sync", "cannot rename", "cannot remove"] {
        assert!(seen.iter().any(|error| error.contains(doing)), "nothing {doing}: {seen:#?}");
    }
}

/// With `reuse` each generation has two blocks of three in common with the one before it.
fn each_fails(is_one: bool, reuse: bool, errno: Errno) {
    let mut seen = Vec::new();
    let [first, second, third, fourth] = if reuse { [9, 10, 11, 12] } else { [0, 10, 20, 30] };
    let store = |folder: &Path, seed, disk: &Disk| write(folder, seed, disk, reuse);
    for failing in 0.. {
        let folder = tempfile::tempdir().unwrap();
        [first, second].into_iter().for_each(|seed| store(folder.path(), seed, &Disk::default()).unwrap());
        let (disk, count) = failing_at(failing, is_one, errno);
        let done = store(folder.path(), third, &disk);
        let all = verify(folder.path(), None, 1).unwrap();
        assert!(all.iter().all(|one| one.wrong.is_empty()), "{failing}: {all:?}");
        let Err(error) = done else {
            assert!(is_of(folder.path(), third));
            assert!(count.load(Ordering::Relaxed) <= failing, "nobody is told that operation {failing} failed");
            break;
        };
        is_told(&error, folder.path(), errno);
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

/// Whatever cannot be looked at is an error that names the place, and never other bytes; once it can be again, all of it is there.
#[test]
fn whatever_cannot_be_read_is_an_error_and_never_wrong_bytes() {
    let folder = tempfile::tempdir().unwrap();
    [0, 10].into_iter().for_each(|seed| write(folder.path(), seed, &Disk::default(), false).unwrap());
    let mut seen = Vec::new();
    for is_one in [true, false] {
        for failing in 0.. {
            let count = Arc::new(AtomicUsize::new(0));
            let counts = Arc::clone(&count);
            let disk = Disk::default().with_unread(move |_| {
                let number = counts.fetch_add(1, Ordering::Relaxed);
                if number == failing || number > failing && !is_one { Err(Errno::IO) } else { Ok(()) }
            });
            let mut errors = Vec::new();
            match Reader::open_on(folder.path(), Which::Newest, 2, &disk) {
                Ok(reader) => {
                    // What cannot be read of the newest one is told, and the one before it is whole.
                    let seed = if reader.manifest().generation == 2 { 10 } else { 0 };
                    assert_eq!(reader.skipped().len(), usize::from(seed == 0), "{failing}: {:?}", reader.skipped());
                    errors.extend(reader.skipped().iter().cloned());
                    for id in 0..3 {
                        let wanted = memory(seed + id as u8);
                        let mut bytes = vec![0; wanted.len()];
                        for by_many in [true, false] {
                            let read = if by_many { Reader::read_into } else { Reader::read_here };
                            match read(&reader, id, 0, &mut bytes) {
                                Ok(()) => assert!(bytes == wanted, "{failing}: other bytes"),
                                Err(error) => errors.push(error),
                            }
                        }
                    }
                    let (wrong, _) = reader.verify();
                    errors.extend(wrong);
                }
                Err(error) => errors.push(error),
            }
            assert_eq!(errors.is_empty(), count.load(Ordering::Relaxed) <= failing, "{failing}: {errors:?}");
            for error in &errors {
                let said = error.to_string();
                assert!(said.starts_with(folder.path().to_str().unwrap()), "{failing}: {said}");
                assert!(said.ends_with("Input/output error (os error 5)"), "{failing}: {said}");
                seen.push(said);
            }
            if errors.is_empty() {
                break;
            }
        }
    }
    for what in [
        "cannot list",
        "manifest: cannot open",
        "manifest: cannot read",
        "data-00: cannot open",
        "data-00: cannot read",
    ] {
        assert!(seen.iter().any(|said| said.contains(what)), "nothing {what}: {seen:#?}");
    }
    assert!(is_of(folder.path(), 10));
}

/// What an image would have in common with the one before it is written anew where that one cannot be read.
#[test]
fn whatever_cannot_be_read_of_the_image_before_the_new_one_is_right_or_none() {
    let mut done = 0;
    for failing in 0.. {
        let folder = tempfile::tempdir().unwrap();
        [9, 10].into_iter().for_each(|seed| write(folder.path(), seed, &Disk::default(), true).unwrap());
        let count = Arc::new(AtomicUsize::new(0));
        let counts = Arc::clone(&count);
        let disk = Disk::default().with_unread(move |_| {
            if counts.fetch_add(1, Ordering::Relaxed) == failing { Err(Errno::IO) } else { Ok(()) }
        });
        match write(folder.path(), 11, &disk, true) {
            Ok(()) => {
                done += 1;
                assert!(is_of(folder.path(), 11), "{failing}");
            }
            Err(error) => {
                is_told(&error, folder.path(), Errno::IO);
                assert!(is_of(folder.path(), 10) || is_of(folder.path(), 11), "{failing}: {error}");
            }
        }
        let all = verify(folder.path(), None, 1).unwrap();
        assert!(all.iter().all(|one| one.wrong.is_empty()), "{failing}: {all:?}");
        write(folder.path(), 12, &Disk::default(), true).unwrap();
        assert!(is_of(folder.path(), 12), "{failing}");
        if count.load(Ordering::Relaxed) <= failing {
            assert!(failing > 5 && done > 1, "{failing} looks, {done} images");
            break;
        }
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
