//! Images of all ranks of a job at one moment.
//!
//! ```text
//! DIR/
//!   lock                  as of a folder of generations
//!   rank-0/, rank-1/, …   each a folder of generations, written by that rank
//!   job-000003            which generation of each rank belong together: its presence makes them an image of the job
//!   .job-000004.new       being written
//!   .meeting-5f3a…/       how several hosts agree meanwhile (`meeting.rs`)
//! ```
//!
//! A rank writes its generation by itself, and without the job's file it is one of no job: it is removed by whoever next writes to the folder. So a rank
//! that dies meanwhile, or the command, leaves the older images of the job.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::look::{Verified, or_error, verify};
use crate::manifest::{Word, hash, seal, unseal};
use crate::reader::Reader;
use crate::store::{Lock, Store, begins_with, read_whole};

/// What the first line of a job's file begins with; the format's version is behind it.
const HEAD: &str = "gpupool-job ";
const VERSION: u32 = 2;
/// What a job of one host says: then ranks have the numbers of their host, which is all that version 1 knows.
const OF_ONE_HOST: u32 = 1;

/// The image of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankImage {
    /// Its number.
    pub rank: u32,
    /// The generation in its folder.
    pub generation: u64,
    /// Bytes of memory in it.
    pub bytes: u64,
    /// XXH3-64 of its manifest: a number is given again where a newest generation was removed.
    pub manifest: Word,
}

/// What belongs together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Its number.
    pub generation: u64,
    /// When all of it was whole, in seconds since 1970.
    pub written: u64,
    /// One for each rank, in order of their numbers.
    pub ranks: Vec<RankImage>,
    /// The hosts that the ranks were on, where these were several: then the numbers are those of the whole job, and else of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
}

/// A job's image, or why there is none.
#[derive(Clone, Debug, Serialize)]
pub struct ListedJob {
    /// Its number.
    pub generation: u64,
    /// `Err`: what is wrong with it or with the generation of a rank.
    #[serde(flatten, serialize_with = "or_error")]
    pub told: Result<Job>,
}

/// What became of the verification of a job's image.
#[derive(Clone, Debug, Serialize)]
pub struct VerifiedJob {
    /// Its number.
    pub generation: u64,
    /// Why its ranks could not be looked at.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "as_text")]
    pub error: Option<Error>,
    /// By the number of the rank.
    pub ranks: BTreeMap<u32, Verified>,
}

impl VerifiedJob {
    /// Whether all of it is what was written.
    pub fn is_whole(&self) -> bool {
        self.error.is_none() && self.ranks.values().all(|verified| verified.wrong.is_empty())
    }
}

#[allow(clippy::ref_option, reason = "serde passes a reference")]
fn as_text<S: serde::Serializer>(error: &Option<Error>, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    error.as_ref().map(Error::to_string).serialize(serializer)
}

/// Reads an image of a job, or all of them, and compares every hash, with `threads` at once (0: one for each processor).
///
/// # Errors
/// There is no such image.
pub fn verify_jobs(
    folder: &Path,
    jobs: Vec<ListedJob>,
    generation: Option<u64>,
    threads: usize,
) -> Result<Vec<VerifiedJob>> {
    let wanted: Vec<ListedJob> =
        jobs.into_iter().filter(|listed| generation.is_none_or(|wanted| wanted == listed.generation)).collect();
    if wanted.is_empty() {
        return Err(Error::Absent { path: folder.join(name_of(generation.unwrap_or(0))) });
    }
    let verified = wanted.into_iter().map(|ListedJob { generation, told }| {
        let (mut error, mut ranks) = (None, BTreeMap::new());
        match told {
            Ok(job) => {
                for RankImage { rank, generation, .. } in job.ranks {
                    match verify(&rank_folder(folder, rank), Some(generation), threads) {
                        Ok(verified) => ranks.extend(verified.into_iter().map(|verified| (rank, verified))),
                        Err(failed) => error = Some(failed),
                    }
                }
            }
            Err(failed) => error = Some(failed),
        }
        VerifiedJob { generation, error, ranks }
    });
    Ok(verified.collect())
}

/// Where a rank writes.
pub fn rank_folder(folder: &Path, rank: u32) -> PathBuf {
    folder.join(format!("rank-{rank}"))
}

/// The job's folder, where this one is a rank's in it: what else is written here is of no image of the job, and takes the place of what is.
pub fn job_around(folder: &Path) -> Option<PathBuf> {
    let folder = folder.canonicalize().ok()?;
    rank_of(folder.file_name()?.to_str()?)?;
    let around = folder.parent()?;
    let store = Store::open(around, false, &Disk::default()).ok()?;
    let has_some = numbers(&store).is_ok_and(|numbers| !numbers.is_empty());
    has_some.then(|| around.to_owned())
}

fn name_of(generation: u64) -> String {
    format!("job-{generation:06}")
}

fn number_of(name: &str) -> Option<u64> {
    let number = name.strip_prefix("job-")?.parse().ok()?;
    (name_of(number) == name).then_some(number)
}

fn rank_of(name: &str) -> Option<u32> {
    let number = name.strip_prefix("rank-")?.parse().ok()?;
    (format!("rank-{number}") == name).then_some(number)
}

fn numbers(store: &Store) -> Result<Vec<u64>> {
    let mut numbers: Vec<u64> = store.folder.names()?.iter().filter_map(|name| number_of(name)).collect();
    numbers.sort_unstable_by(|a, b| b.cmp(a));
    Ok(numbers)
}

/// Whether what is called as a job's image is one, and not a folder, a link or a file of somebody else's.
///
/// # Errors
/// It cannot be looked at, or is damaged from its first letter on.
fn is_own(store: &Store, generation: u64) -> Result<bool> {
    let file = match store.folder.open(&name_of(generation), false) {
        Err(Error::Refused { .. } | Error::Io { errno: Errno::NOENT, .. }) => return Ok(false),
        answer => answer?,
    };
    if begins_with(&file, HEAD)? {
        return Ok(true);
    }
    Err(Error::refused(file.path(), "gpupool wrote no such image of a job, so it stays as it is"))
}

/// Before it is whole.
fn unfinished_name_of(generation: u64) -> String {
    format!(".{}.new", name_of(generation))
}

fn read(store: &Store, generation: u64) -> Result<Job> {
    let file = store.folder.open(&name_of(generation), false)?;
    let text = read_whole(&file)?;
    let job: Job = serde_json::from_slice(unseal(HEAD, VERSION, &text, file.path())?)
        .map_err(|error| Error::damaged(file.path(), error.to_string()))?;
    let is_in_order = job.ranks.is_sorted_by(|one, next| one.rank < next.rank) && !job.ranks.is_empty();
    if job.generation != generation || !is_in_order {
        return Err(Error::damaged(file.path(), "its ranks or its number are not what its name says"));
    }
    Ok(job)
}

/// Whether all of it can be read, as far as can be seen without reading all: each rank comes to the same answer.
fn is_whole(folder: &Path, job: &Job) -> Result<()> {
    job.ranks.iter().try_for_each(|image| {
        let found = look(folder, image.rank, image.generation)?;
        if found == *image {
            return Ok(());
        }
        let path = rank_folder(folder, image.rank).join(crate::store::name_of(image.generation));
        Err(Error::damaged(&path, "another generation took the place of the one that belongs to the job"))
    })
}

/// The image of a rank as it is there.
fn look(folder: &Path, rank: u32, generation: u64) -> Result<RankImage> {
    let store = Store::open(&rank_folder(folder, rank), false, &Disk::default())?;
    let reader = Reader::of(&store, generation, 1)?;
    let manifest = Word(hash(&store.manifest_text(generation)?.1));
    Ok(RankImage { rank, generation, bytes: reader.manifest().bytes, manifest })
}

/// How long a rank has to let go of its folder, which has been told that its image is none.
const TO_LET_GO: Duration = Duration::from_secs(2);

fn lock_of_rank(store: &Store) -> Result<Lock> {
    let until = Instant::now() + TO_LET_GO;
    loop {
        match store.lock() {
            Err(Error::Busy { .. }) if Instant::now() < until => std::thread::sleep(Duration::from_millis(10)),
            answer => return answer,
        }
    }
}

/// The images of a job, newest first; none where the folder is not a job's.
///
/// # Errors
/// The folder is not there or may not be trusted.
pub fn jobs(folder: &Path) -> Result<Vec<ListedJob>> {
    let store = Store::open(folder, false, &Disk::default())?;
    let told = |generation| {
        let job = read(&store, generation)?;
        is_whole(folder, &job).map(|()| job)
    };
    Ok(numbers(&store)?.into_iter().map(|generation| ListedJob { generation, told: told(generation) }).collect())
}

/// The names of folders in this one that have generations, of a process or of a job, in order: where the folder around them was named
/// in place of one of them, as that which `gpupool suspend --to` was given, in which each process has its own.
///
/// # Errors
/// The folder is not there or may not be trusted.
pub fn folders_in(folder: &Path) -> Result<Vec<String>> {
    let store = Store::open(folder, false, &Disk::default())?;
    let has_some = |name: &String| {
        let below = folder.join(name);
        let found = Store::open(&below, false, &Disk::default())
            .and_then(|store| Ok(!store.generations()?.is_empty() || !numbers(&store)?.is_empty()));
        // One that is no folder, or another user's, is none of those that could be named instead.
        found.unwrap_or(false)
    };
    let mut names: Vec<String> = store.folder.names()?.into_iter().filter(has_some).collect();
    names.sort_unstable();
    Ok(names)
}

/// Holds a job's folder while its ranks write to it.
#[derive(Debug)]
pub struct JobWriter {
    store: Store,
    path: PathBuf,
    disk: Disk,
    /// Why something is there still that others had left.
    not_removed: Option<Error>,
    _lock: Lock,
}

impl JobWriter {
    /// Begins an image of a job; the folder is made if it is not there. What ranks have left of images that were never whole goes.
    ///
    /// # Errors
    /// The folder may not be trusted, or somebody else writes there.
    pub fn create(folder: &Path) -> Result<Self> {
        Self::create_on(folder, &Disk::default())
    }

    pub(crate) fn create_on(folder: &Path, disk: &Disk) -> Result<Self> {
        let store = Store::open(folder, true, disk)?;
        let lock = store.lock()?;
        let stale = |name: &&String| {
            name.strip_prefix('.')
                .and_then(|name| name.strip_suffix(".new"))
                .is_some_and(|name| number_of(name).is_some())
        };
        let names = store.folder.names()?;
        let stale = names.iter().filter(stale);
        let stays = stale.fold(None, |stays: Option<Error>, name| stays.or(store.folder.remove(name).err()));
        let mut writer = Self { store, path: folder.to_owned(), disk: disk.clone(), not_removed: stays, _lock: lock };
        // None of that keeps a new image from being written.
        let others = writer.remove_others().err();
        writer.not_removed = writer.not_removed.take().or(others);
        Ok(writer)
    }

    /// Says that these generations of ranks belong together, which were on `hosts` where these were several, and removes all images of the job but the
    /// newest `keep`; the number of the image, and why older ones are still there.
    ///
    /// # Errors
    /// One of them is not there, or nothing can be written. Then this image is none, and the older ones are.
    pub fn finish(self, ranks: &[(u32, u64)], hosts: Vec<String>, keep: Option<usize>) -> Result<(u64, Option<Error>)> {
        let look = |(rank, generation): &(u32, u64)| look(&self.path, *rank, *generation);
        let mut ranks = ranks.iter().map(look).collect::<Result<Vec<_>>>()?;
        ranks.sort_by_key(|image| image.rank);
        let numbers = numbers(&self.store)?;
        let names = self.store.folder.names()?;
        let newest = numbers.iter().find(|number| is_own(&self.store, **number).unwrap_or(true));
        let is_free = |number: &u64| {
            let own = [name_of(*number), unfinished_name_of(*number)];
            !names.iter().any(|name| own.contains(name))
        };
        let mut after = newest.map_or(1, |newest| newest.saturating_add(1))..=u64::MAX;
        let generation = after.find(is_free).unwrap_or(u64::MAX);
        let written = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        if let Some(twice) = ranks.windows(2).find(|pair| pair[0].rank == pair[1].rank) {
            return Err(Error::misuse(format!("rank {} would be in the image twice", twice[0].rank)));
        }
        let version = if hosts.is_empty() { OF_ONE_HOST } else { VERSION };
        let job = Job { generation, written, ranks, hosts };
        let folder = &self.store.folder;
        let (name, new) = (name_of(generation), unfinished_name_of(generation));
        let file = folder.create(&new, false)?;
        file.write(&seal(HEAD, version, &job)?, 0)?;
        file.sync()?;
        folder.rename(&new, &name)?;
        folder.sync().inspect_err(|_| {
            // Nobody may find what its writer was told is not there.
            let _ = folder.rename(&name, &new);
        })?;
        let older = self.keep(generation, numbers, keep).err();
        Ok((generation, self.not_removed.or(older)))
    }

    /// Removes what its ranks have written for an image that never became whole.
    ///
    /// # Errors
    /// A rank writes still, or the system refuses.
    pub fn give_up(self) -> Result<()> {
        self.remove_others()
    }

    fn keep(&self, newest: u64, older: Vec<u64>, keep: Option<usize>) -> Result<()> {
        let Some(keep) = keep else { return Ok(()) };
        // One that is not whole is not one of those that are kept.
        let mut left = keep.max(1) - 1;
        let mut stays = None;
        for generation in older.into_iter().filter(|generation| *generation != newest) {
            let why = match read(&self.store, generation).and_then(|job| is_whole(&self.path, &job)) {
                Ok(()) if left > 0 => {
                    left -= 1;
                    None
                }
                // Which alone knows what is in it.
                Err(error @ Error::Newer { .. }) => (left == 0).then_some(error),
                _ => match is_own(&self.store, generation) {
                    Ok(true) => self.store.folder.remove(&name_of(generation)).err(),
                    other => other.err(),
                },
            };
            stays = stays.or(why);
        }
        let others = self.remove_others();
        stays.map_or(others, Err)
    }

    /// Removes generations of ranks that belong to no image of the job.
    ///
    /// # Errors
    /// One of them cannot be removed, or a rank's folder not be written to; all others are gone.
    fn remove_others(&self) -> Result<()> {
        let mut known = BTreeSet::new();
        for generation in numbers(&self.store)? {
            if is_own(&self.store, generation) == Ok(false) {
                continue;
            }
            // What it names is not known, so nothing is certain to be no job's.
            let Ok(job) = read(&self.store, generation) else { return Ok(()) };
            known.extend(job.ranks.iter().map(|image| (image.rank, image.generation)));
        }
        let names = self.store.folder.names()?;
        let ranks = names.iter().filter_map(|name| rank_of(name));
        let stays = ranks.fold(None, |stays: Option<Error>, rank| stays.or(self.remove_others_of(rank, &known).err()));
        stays.map_or(Ok(()), Err)
    }

    fn remove_others_of(&self, rank: u32, known: &BTreeSet<(u32, u64)>) -> Result<()> {
        let store = Store::open(&rank_folder(&self.path, rank), false, &self.disk)?;
        let _lock = lock_of_rank(&store)?;
        let mut stays = store.clean().err();
        for generation in store.generations()? {
            if !known.contains(&(rank, generation)) {
                stays = stays.or(store.remove_own(generation).err());
            }
        }
        stays.map_or(Ok(()), Err)
    }
}
