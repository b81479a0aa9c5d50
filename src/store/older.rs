//! What a generation has in common with the one before it, and need not be written again.
//!
//! Its files get a second name (a hard link) in the folder of the generation that is being written, so each generation has all of its parts in its own
//! folder: removing an older one is what it always was, and whoever is killed in the middle leaves names that the next writer removes. Rejected: a part
//! that names another generation. Then no generation could be removed without reading all others, and one damaged or lost folder would
//! take its successors along.
//!
//! **What is damaged does not stay so.** A part that never changes would be read by nobody until it is needed, and its damage would be in every image by
//! then. So each generation reads those whose turn it is, as many as that all had theirs before the last image without the damage is removed
//! ([`Older::is_right`]); what is not as it was is written anew.
//!
//! A part is the same where its length and the 128 bits of its XXH3 are, wherever it lay. Nothing else is asked: who wrote to memory since is not known
//! for certain of any program, as kernels follow pointers.

use std::collections::{BTreeMap, HashMap, HashSet};

use rustix::io::Errno;

use crate::PART;
use crate::buffer::{Buffer, padded};
use crate::codec::{Codec, Decoder};
use crate::disk::Folder;
use crate::error::{Error, Result};
use crate::manifest::{Block, Data, Digest, Manifest, Part};
use crate::reader::fetch;
use crate::store::Store;

/// Numbers of older files in [`Part::file`] begin here while a generation is being written.
const FIRST: u64 = 1 << 32;
/// A file of which less than one over this is still in use is not kept for that; neither are the smallest of more files than [`MOST`]. What is in use of them is copied.
const USED: u64 = 2;
const MOST: usize = 64;
/// In how many generations every part has its turn to be read, where no older ones are removed.
const ROUND: u64 = 8;

/// What lies in files that were written before.
pub struct Older {
    files: Vec<Data>,
    parts: HashMap<(Digest, u64), Part>,
    /// What lay in files that are gone, or not as long as they were.
    lost: HashSet<(Digest, u64)>,
    /// Of so many generations, whose turn it is in this one.
    round: u64,
    turn: u64,
}

/// What a thread reads a part with.
pub struct Scratch {
    stored: Buffer,
    whole: Buffer,
    decoder: Decoder,
}

impl Scratch {
    pub fn new() -> std::result::Result<Self, Errno> {
        Ok(Self { stored: Buffer::new(PART)?, whole: Buffer::new(PART)?, decoder: Decoder::new()? })
    }
}

impl Older {
    /// Of the newest generation that is whole, where the file system can give files a second name. Names are made in `unfinished`, which becomes
    /// generation `number` of which `keep` are left.
    pub fn of(store: &Store, unfinished: &Folder, number: u64, keep: Option<usize>) -> Result<Option<Self>> {
        let newest = store.generations()?.into_iter().find_map(|generation| store.manifest(generation).ok());
        let Some((folder, manifest)) = newest else { return Ok(None) };
        let Manifest { generation, files, blocks, .. } = manifest;
        let mut kept = Vec::new();
        let mut numbers = Vec::new();
        let mut are_whole = Vec::new();
        for Data { name, bytes, from } in files {
            // What is not as long as it was is no more what was written.
            let is_whole = folder.open(&name, false).and_then(|file| file.bytes()).is_ok_and(|found| found == bytes);
            let new = if from.is_some() { name.clone() } else { format!("{name}-{generation:06}") };
            are_whole.push(is_whole);
            let is_there = is_whole && link(&folder, &name, unfinished, &new)?;
            numbers.push(is_there.then_some(FIRST + kept.len() as u64));
            if is_there {
                kept.push(Data { name: new, bytes, from: from.or(Some(generation)) });
            }
        }
        let mut parts = HashMap::new();
        let mut lost = HashSet::new();
        for part in blocks.into_iter().flat_map(|block| block.parts) {
            let Some((digest, at)) = part.digest().zip(usize::try_from(part.file).ok()) else { continue };
            if let Some(file) = numbers.get(at).copied().flatten() {
                parts.insert((digest, part.bytes), Part { file, ..part });
            } else if are_whole.get(at).is_some_and(|is_whole| !is_whole) {
                lost.insert((digest, part.bytes));
            }
        }
        let round = keep.map_or(ROUND, |keep| keep.max(1) as u64);
        Ok(Some(Self { files: kept, parts, lost, round, turn: number % round }))
    }

    /// Whether a part of this hash is read in this generation.
    pub fn has_its_turn(&self, digest: Digest) -> bool {
        digest.lower % self.round == self.turn
    }

    /// Whether a part that was found holds these bytes still.
    pub fn is_right(&self, part: &Part, bytes: &[u8], unfinished: &Folder, scratch: &mut Scratch) -> bool {
        let Scratch { stored, whole, decoder } = scratch;
        let out = &mut whole[..bytes.len()];
        let file = self.files.get(index(part.file)).map(|file| unfinished.open(&file.name, true));
        matches!(file, Some(Ok(file)) if fetch(&file, part, out, stored, decoder).is_ok()) && *out == *bytes
    }

    /// A part with these bytes, stored already.
    pub fn find(&self, digest: Digest, bytes: u64) -> Option<Part> {
        self.parts.get(&(digest, bytes)).copied()
    }

    /// Whether a part with these bytes was stored, and is there no more.
    pub fn has_lost(&self, digest: Digest, bytes: u64) -> bool {
        self.lost.contains(&(digest, bytes))
    }

    /// Puts the files that are worth keeping behind `files` and copies what is in use of the others to a file of this name. Parts name their
    /// files by their places in `files` then.
    pub fn settle(&self, blocks: &mut [Block], files: &mut Vec<Data>, unfinished: &Folder, rest: &str) -> Result<()> {
        let mut used: BTreeMap<(u64, u64), u64> = BTreeMap::new();
        for part in older(blocks) {
            used.insert((part.file, part.at), padded(usize::try_from(part.stored).unwrap_or(0)) as u64);
        }
        let mut sums = vec![0; self.files.len()];
        for ((file, _), bytes) in &used {
            sums[index(*file)] += bytes;
        }
        let mut kept: Vec<usize> =
            (0..sums.len()).filter(|at| sums[*at] > 0 && sums[*at] >= self.files[*at].bytes / USED).collect();
        kept.sort_by_key(|at| std::cmp::Reverse(sums[*at]));
        kept.truncate(MOST);
        let moved = self.copy(used.keys().filter(|(file, _)| !kept.contains(&index(*file))), unfinished, rest)?;
        let own = files.len() as u64;
        let copies = if moved.at.is_empty() { 0 } else { 1 };
        for part in older(blocks) {
            match moved.at.get(&(part.file, part.at)) {
                Some(at) => (part.file, part.at) = (own, *at),
                None => {
                    let place = kept.iter().position(|at| *at == index(part.file)).unwrap_or(usize::MAX);
                    part.file = own + copies + place as u64;
                }
            }
        }
        if copies > 0 {
            files.push(Data { name: rest.to_owned(), bytes: moved.bytes, from: None });
        }
        files.extend(kept.iter().map(|at| self.files[*at].clone()));
        for (at, file) in self.files.iter().enumerate() {
            if !kept.contains(&at) {
                unfinished.remove(&file.name)?;
            }
        }
        Ok(())
    }

    /// As they are stored: what is in them is compared with its hash by whoever reads it.
    fn copy<'a>(&self, places: impl Iterator<Item = &'a (u64, u64)>, unfinished: &Folder, name: &str) -> Result<Moved> {
        let mut moved = Moved::default();
        let mut places = places.peekable();
        if places.peek().is_none() {
            return Ok(moved);
        }
        let stored: HashMap<(u64, u64), u64> =
            self.parts.values().map(|part| ((part.file, part.at), part.stored)).collect();
        let mut buffer =
            Buffer::new(PART).map_err(|errno| Error::io(unfinished.path(), "have memory to write", errno))?;
        let to = unfinished.create(name, true)?;
        for (file, at) in places {
            let bytes = stored.get(&(*file, *at)).map_or(0, |stored| padded(usize::try_from(*stored).unwrap_or(0)));
            let from = unfinished.open(&self.files[index(*file)].name, true)?;
            from.read(&mut buffer[..bytes], *at)?;
            to.write(&buffer[..bytes], moved.bytes)?;
            moved.at.insert((*file, *at), moved.bytes);
            moved.bytes += bytes as u64;
        }
        to.sync_data()?;
        Ok(moved)
    }
}

/// Where parts were copied to, in one file.
#[derive(Default)]
struct Moved {
    at: HashMap<(u64, u64), u64>,
    bytes: u64,
}

fn index(file: u64) -> usize {
    usize::try_from(file.saturating_sub(FIRST)).unwrap_or(usize::MAX)
}

/// The parts that lie in older files.
fn older(blocks: &mut [Block]) -> impl Iterator<Item = &mut Part> {
    let parts = blocks.iter_mut().flat_map(|block| &mut block.parts);
    parts.filter(|part| part.codec != Codec::Fill && part.file >= FIRST)
}

/// Whether there can be a second name at all, or one more.
fn link(folder: &Folder, name: &str, unfinished: &Folder, new: &str) -> Result<bool> {
    match folder.link(name, unfinished, new) {
        Ok(()) => Ok(true),
        Err(Error::Io {
            errno: Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::MLINK | Errno::XDEV | Errno::INVAL,
            ..
        }) => Ok(false),
        Err(error) => Err(error),
    }
}
