//! What lies in a folder, for people and tools.

use std::path::Path;

use serde::Serialize;

use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::manifest::{Manifest, Process};
use crate::reader::Reader;
use crate::store::{Store, name_of};

/// A generation, in short.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// Its number.
    pub generation: u64,
    /// What it says of itself; `Err`: why that cannot be read.
    #[serde(flatten, serialize_with = "or_error")]
    pub told: std::result::Result<Summary, Error>,
}

/// What a generation says of itself, in short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// When it was finished, in seconds since 1970.
    pub written: u64,
    /// Whose memory it is.
    pub process: Process,
    /// Of which host.
    pub host: String,
    /// The version of gpupool that wrote it.
    pub gpupool: String,
    /// Bytes of memory.
    pub bytes: u64,
    /// Bytes on the disk.
    pub stored: u64,
    /// Bytes of these in files that were written for it; the others are of older generations.
    pub fresh: u64,
    /// How many blocks there are.
    pub blocks: usize,
}

/// What became of a generation's verification.
#[derive(Clone, Debug, Serialize)]
pub struct Verified {
    /// Its number.
    pub generation: u64,
    /// Bytes of memory that were compared; 0 where the manifest cannot be read.
    pub bytes: u64,
    /// What is wrong; nothing where it is whole.
    #[serde(serialize_with = "as_text")]
    pub wrong: Vec<Error>,
}

pub fn or_error<T: Serialize, S: serde::Serializer>(
    told: &std::result::Result<T, Error>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Wrong {
        error: String,
    }
    match told {
        Ok(summary) => summary.serialize(serializer),
        Err(error) => Wrong { error: error.to_string() }.serialize(serializer),
    }
}

fn as_text<S: serde::Serializer>(errors: &[Error], serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_seq(errors.iter().map(Error::to_string))
}

fn summary(manifest: Manifest) -> Summary {
    let fresh = manifest.fresh();
    let Manifest { written, meta, bytes, stored, blocks, .. } = manifest;
    let (process, host, gpupool) = (meta.process, meta.host, meta.gpupool);
    Summary { written, process, host, gpupool, bytes, stored, fresh, blocks: blocks.len() }
}

/// The generations of a folder, newest first. Only manifests are read.
///
/// # Errors
/// The folder is not there or may not be trusted.
pub fn list(folder: &Path) -> Result<Vec<Listed>> {
    let store = Store::open(folder, false, &Disk::default())?;
    let listed = store.generations()?.into_iter();
    let told = |generation| store.manifest(generation).map(|(_, manifest)| summary(manifest));
    Ok(listed.map(|generation| Listed { generation, told: told(generation) }).collect())
}

/// All that a generation says of itself. `None`: the newest.
///
/// # Errors
/// There is none, or its manifest cannot be read.
pub fn show(folder: &Path, generation: Option<u64>) -> Result<Manifest> {
    let store = Store::open(folder, false, &Disk::default())?;
    let newest = || store.generations().map(|all| all.first().copied());
    let generation = match generation {
        Some(generation) => Some(generation),
        None => newest()?,
    };
    let generation = generation.ok_or_else(|| Error::Absent { path: folder.to_owned() })?;
    store.manifest(generation).map(|(_, manifest)| manifest)
}

/// Reads a generation, or all of them, newest first, and compares every hash, with `threads` at once (0: one for each processor).
///
/// # Errors
/// The folder is not there or may not be trusted, or has nothing, or not that generation. What is wrong with one that is there is in the answer.
pub fn verify(folder: &Path, generation: Option<u64>, threads: usize) -> Result<Vec<Verified>> {
    let store = Store::open(folder, false, &Disk::default())?;
    let mut all = store.generations()?;
    if let Some(wanted) = generation {
        all.retain(|generation| *generation == wanted);
    }
    if all.is_empty() {
        let path = generation.map_or_else(|| folder.to_owned(), |wanted| folder.join(name_of(wanted)));
        return Err(Error::Absent { path });
    }
    let threads = if threads > 0 { threads } else { crate::processors().min(16) };
    let verified = all.into_iter().map(|generation| match Reader::of(&store, generation, threads) {
        Ok(reader) => {
            let (wrong, bytes) = reader.verify();
            Verified { generation, bytes, wrong }
        }
        Err(error) => Verified { generation, bytes: 0, wrong: vec![error] },
    });
    Ok(verified.collect())
}

/// Removes all but the newest `keep` generations whose manifests are whole.
///
/// # Errors
/// Somebody writes into the folder, or what is in it cannot be removed.
pub fn keep(folder: &Path, keep: usize) -> Result<()> {
    let store = Store::open(folder, false, &Disk::default())?;
    let _lock = store.lock()?;
    let cleaned = store.clean();
    store.keep(keep).and(cleaned)
}

/// Removes a generation.
///
/// # Errors
/// There is none, somebody writes into the folder, or it cannot be removed.
pub fn remove(folder: &Path, generation: u64) -> Result<()> {
    let store = Store::open(folder, false, &Disk::default())?;
    let _lock = store.lock()?;
    store.remove(generation)
}
