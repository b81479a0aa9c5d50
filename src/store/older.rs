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
//! for certain of any program, as kernels follow pointers. Whoever knows that memory is what it was ([`Older::range`]) need not have its bytes; then those whose turn it is
//! are read before ([`Older::read_ahead`]), so that what is damaged is not taken.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rustix::io::Errno;

use crate::PART;
use crate::buffer::{Buffer, padded};
use crate::codec::{Codec, Decoder};
use crate::disk::Folder;
use crate::error::{Error, Result};
use crate::manifest::{Block, Data, Digest, Manifest, Part, Word};
use crate::reader::fetch;
use crate::signals;
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
    /// What the generation says that it has of each block, and whether it is there still.
    blocks: HashMap<u64, Vec<(Part, bool)>>,
    /// Of parts that were read, by where they lie: whether they are as they were.
    read: Mutex<HashMap<(u64, u64), bool>>,
    /// What only this generation has ([`Store::sealed`]).
    pub seal: u64,
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
        let newest = store.generations()?.into_iter().find_map(|generation| store.sealed(generation).ok());
        let Some((folder, manifest, seal)) = newest else { return Ok(None) };
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
        let mut by_block = HashMap::new();
        for Block { about, parts: stored } in blocks {
            let mut own = Vec::with_capacity(stored.len());
            for part in stored {
                let at = usize::try_from(part.file).unwrap_or(usize::MAX);
                let file = numbers.get(at).copied().flatten();
                own.push((Part { file: file.unwrap_or(0), ..part }, part.codec == Codec::Fill || file.is_some()));
                let Some(digest) = part.digest() else { continue };
                if let Some(file) = file {
                    parts.insert((digest, part.bytes), Part { file, ..part });
                } else if are_whole.get(at).is_some_and(|is_whole| !is_whole) {
                    lost.insert((digest, part.bytes));
                }
            }
            by_block.insert(about.id, own);
        }
        let round = keep.map_or(ROUND, |keep| keep.max(1) as u64);
        let (read, turn) = (Mutex::default(), number % round);
        Ok(Some(Self { files: kept, parts, lost, blocks: by_block, read, seal, round, turn }))
    }

    /// Whether a part is read in this generation.
    pub fn has_its_turn(&self, part: &Part) -> bool {
        part.word.0 % self.round == self.turn
    }

    /// Whether a part that was found holds these bytes still.
    pub fn is_right(&self, part: &Part, bytes: &[u8], unfinished: &Folder, scratch: &mut Scratch) -> bool {
        match self.verdict(part) {
            Some(is_right) => is_right,
            None => self.is_whole(part, unfinished, scratch).is_some_and(|found| *found == *bytes),
        }
    }

    /// Its bytes, if they are what was stored.
    fn is_whole<'a>(&self, part: &Part, unfinished: &Folder, scratch: &'a mut Scratch) -> Option<&'a [u8]> {
        let Scratch { stored, whole, decoder } = scratch;
        let out = whole.get_mut(..usize::try_from(part.bytes).ok()?)?;
        let file = unfinished.open(&self.files.get(index(part.file))?.name, true).ok()?;
        fetch(&file, part, out, stored, decoder).ok()?;
        Some(out)
    }

    fn verdict(&self, part: &Part) -> Option<bool> {
        self.read.lock().get(&(part.file, part.at)).copied()
    }

    /// Reads the parts whose turn it is, as long as it `goes_on`, by so many threads.
    pub fn read_ahead(&self, unfinished: &Folder, threads: usize, goes_on: &(dyn Fn() -> bool + Sync)) {
        let own = self.blocks.values().flatten().filter(|(part, is_there)| *is_there && part.codec != Codec::Fill);
        let due = own.filter(|(part, _)| self.has_its_turn(part)).map(|(part, _)| ((part.file, part.at), *part));
        // In the order in which they lie there.
        let due: Vec<Part> = due.collect::<BTreeMap<_, _>>().into_values().collect();
        let next = AtomicUsize::new(0);
        let read = || {
            let Ok(mut scratch) = Scratch::new() else { return };
            while goes_on()
                && let Some(part) = due.get(next.fetch_add(1, Ordering::Relaxed))
            {
                let is_right = self.is_whole(part, unfinished, &mut scratch).is_some();
                self.read.lock().insert((part.file, part.at), is_right);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(due.len()) {
                // Where the system has no thread to spare, fewer read.
                if signals::spawn_in(scope, read).is_err() {
                    break;
                }
            }
            read();
        });
    }

    /// What the generation has of a block from an offset on, for a block that has the same bytes from `to` on. `None`: it has not all of it, or it was stored in
    /// other pieces, or some of it is damaged, or has its turn to be read and was not.
    pub fn range(&self, block: u64, offset: u64, bytes: u64, to: u64) -> Option<Vec<Part>> {
        let end = offset.checked_add(bytes)?;
        let parts = self.blocks.get(&block)?;
        let first = parts.partition_point(|(part, _)| part.offset + part.bytes <= offset);
        let mut found = Vec::new();
        let mut at = offset;
        for (part, is_there) in &parts[first..] {
            if at >= end {
                break;
            }
            let until = (part.offset + part.bytes).min(end);
            let is_all = part.offset == at && until == part.offset + part.bytes;
            let part = if part.codec == Codec::Fill {
                // Any piece of it repeats the same.
                let turned = 8 * u32::try_from((at - part.offset) % 8).unwrap_or(0);
                Part { bytes: until - at, word: Word(part.word.0.rotate_right(turned)), file: 0, ..*part }
            } else {
                let is_right = self.verdict(part).unwrap_or(!self.has_its_turn(part));
                (*is_there && is_all && is_right).then_some(*part)?
            };
            found.push(Part { offset: to + (at - offset), ..part });
            at = until;
        }
        (at == end).then_some(found)
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
        let all = self.blocks.values().flatten().filter(|(part, is_there)| *is_there && part.codec != Codec::Fill);
        let stored: HashMap<(u64, u64), u64> = all.map(|(part, _)| ((part.file, part.at), part.stored)).collect();
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
