//! Memory of a suspended program in files of a folder (`gpupool suspend --to DIR`), the pool's and what the program made itself.
//!
//! **All of it is on the disk before any of it leaves.** What a disk takes can fail until its very last `fsync`, so the memory is written from where it
//! lies, the generation is made whole, and only then does the pool let go of the memory ([`Place::Disk`]), by its addresses. On the way back each
//! chunk is read to new memory before it is mapped, and the generation is removed once all is back. So whatever fails, at least one of the two
//! is whole. Rejected: to write chunk by chunk as they leave, which needs no room for both, but leaves the program with neither
//! where the disk turns out to be full.
//!
//! **Each process has a folder of its own** in the one that was asked for, since a store has one writer. Its lock is held for as long as the memory is
//! there; what a process left that is no more is removed by the next that stores something in the same folder.
//!
//! [`Place::Disk`]: gpupool_pool::Place::Disk

use crate::backing::mover::{self, Load};
use crate::backing::open::Opened;
use crate::image::{self, Failed, Shuttle, Stretch};
use crate::serve::handles::by_hand::{self, NOBODY, Read};
use gpupool_cuda::{CuResult, Driver};
use gpupool_metrics::{Identity, Life};
use gpupool_pool::Transfer;
use gpupool_store::{About, Options, Reader, Which, Writer, Written};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How much is handed over before anybody is told.
const STEP: u64 = 64 << 20;
/// What the folders of processes begin with.
const PREFIX: &str = "suspended-";

/// Memory that is stored.
pub struct Stored {
    /// The folder of this process.
    folder: PathBuf,
    written: Written,
    /// By address, bytes and the number of the block in the store.
    ranges: Arc<BTreeMap<u64, (u64, u64)>>,
}

/// A range to be stored: of frames of the pool, or of the program's own memory.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// Whose context copies it ([`gpupool_pool::Block::owner`]), on which GPU.
    pub owner: u64,
    pub home: u32,
    pub address: u64,
    pub bytes: u64,
}

impl Stored {
    /// Stores all of these. Nobody writes to them before they are back: the program is held.
    ///
    /// # Errors
    /// Why not, in words; nothing is left in the folder then.
    pub fn write(
        driver: &'static Driver,
        opened: &Opened,
        folder: &Path,
        ranges: &[Range],
        is_wanted: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, String> {
        let words = |error: gpupool_store::Error| error.to_string();
        let identity = Identity::own().ok_or("the system does not tell when this process started")?;
        gpupool_store::own_folder(folder).map_err(words)?;
        sweep(folder);
        let own = folder.join(name_of(&identity));
        let bytes = ranges.iter().map(|range| range.bytes).sum();
        let written = write(driver, opened, &own, ranges, bytes, is_wanted, progress);
        let written = written.inspect_err(|_| remove_empty(&own))?;
        let numbered = (0..).zip(ranges).map(|(id, range)| (range.address, (range.bytes, id)));
        // What was written is read once before anything is given up for it: its manifest, and how long each file is.
        let stored = Self { folder: own, written, ranges: Arc::new(numbered.collect()) };
        match stored.reader().map_err(words) {
            Ok(_) => Ok(stored),
            Err(why) => {
                stored.unname().end();
                Err(why)
            }
        }
    }

    /// Bytes of memory that are stored.
    pub fn bytes(&self) -> u64 {
        self.written.bytes
    }

    /// Bytes that its files take.
    pub fn bytes_on_disk(&self) -> u64 {
        self.written.stored
    }

    /// Whether all that lies at these addresses was stored. What was freed meanwhile may have been given out again as a part of something larger.
    pub fn has(&self, address: u64, bytes: u64) -> bool {
        let from_there = Transfer { from: address, to: 0, bytes, inward: true, stored: true, between: false };
        stretches_of(&self.ranges, &from_there, &mut Vec::new()).is_ok()
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn reader(&self) -> gpupool_store::Result<Reader> {
        Reader::open(&self.folder, Which::Number(self.written.generation), 0)
    }

    /// Has what is stored read for the length of `act`, as the pool asks for it; `act` is given what tells why that failed, if it did.
    ///
    /// # Errors
    /// What is stored cannot be opened.
    pub fn reading<T>(&self, driver: &'static Driver, act: impl FnOnce(&Unread) -> T) -> Result<T, String> {
        let reader = self.reader().map_err(|error| error.to_string())?;
        let unread = Unread::default();
        let load = loader(driver, reader, Arc::clone(&self.ranges), unread.clone());
        Ok(mover::loading(load, || act(&unread)))
    }

    /// All is back: its files are in no folder any more, and open, so that the system gives their room back at the latest when the process ends.
    pub fn unname(self) -> Unnamed {
        let Self { folder, written, .. } = self;
        let unnamed = written.unname();
        if unnamed.is_ok() {
            remove_empty(&folder);
        }
        Unnamed { folder, unnamed }
    }
}

/// Files that are in no folder any more.
pub struct Unnamed {
    folder: PathBuf,
    unnamed: gpupool_store::Result<gpupool_store::Unnamed>,
}

impl Unnamed {
    /// Gives their room back.
    pub fn end(self) {
        let Self { folder, unnamed } = self;
        if let Err(error) = unnamed.and_then(gpupool_store::Unnamed::end) {
            tracing::warn!(
                target: "gpupool::memory", about = "suspend",
                "files of what was stored of this program, which nobody needs any more, could not be removed: {error}"
            );
        }
        // Who moved the folder and put a copy in its place has files there that are others than those which were open.
        if folder.exists() {
            let _ = gpupool_store::keep(&folder, 0);
        }
        remove_empty(&folder);
    }
}

/// Why something could not be read, if it could not.
#[derive(Clone, Default)]
pub struct Unread(Arc<Mutex<Option<String>>>);

impl Unread {
    /// Why, in words.
    pub fn why(&self) -> Option<String> {
        self.0.lock().clone()
    }

    /// The first one counts.
    pub fn note(&self, why: String) {
        self.0.lock().get_or_insert(why);
    }
}

/// From where a range is read.
struct Source<'a> {
    opened: &'a Opened,
    gpu: u32,
    address: u64,
    /// How long a second mapping is that was made for this.
    alias: Option<u64>,
}

impl<'a> Source<'a> {
    /// The pool's memory is read where it is, by its home, and the program's own where some GPU may.
    ///
    /// # Errors
    /// None may any more, or the driver refused what that takes; in words.
    fn of(driver: &Driver, opened: &'a Opened, range: &Range) -> Result<Self, String> {
        let &Range { owner, home, address, bytes } = range;
        if owner != NOBODY {
            return Ok(Self { opened, gpu: home, address, alias: None });
        }
        let own = by_hand::at(address).ok_or_else(|| format!("{address:#x} is mapped no more"))?;
        match by_hand::readable(driver, opened, &own) {
            Ok(Some(Read::There(gpu))) => Ok(Self { opened, gpu, address, alias: None }),
            Ok(Some(Read::Aliased(gpu, address))) => Ok(Self { opened, gpu, address, alias: Some(bytes) }),
            Ok(None) => Err(format!("no GPU that the program works on reaches {}", own.place)),
            Err(result) => Err(format!("the driver answered {result} to a second mapping of what is at {}", own.place)),
        }
    }
}

impl Drop for Source<'_> {
    fn drop(&mut self) {
        if let Some(bytes) = self.alias {
            by_hand::drop_alias(self.opened, self.address, bytes);
        }
    }
}

fn write(
    driver: &'static Driver,
    opened: &Opened,
    own: &Path,
    ranges: &[Range],
    bytes: u64,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64),
) -> Result<Written, String> {
    let words = |error: gpupool_store::Error| error.to_string();
    let options = Options { expected: bytes, keep: Some(1), ..Options::default() };
    let writer = Writer::create(own, image::meta(opened), options).map_err(words)?;
    let mut done = 0;
    // Whatever fails, these go behind the shuttle, which waits for its copies from them.
    let mut sources: Vec<Source<'_>> = Vec::new();
    let mut shuttle: Option<(Shuttle, (u64, u32))> = None;
    let failed = |failed: Failed| failed.to_string();
    for (id, range) in (0..).zip(ranges) {
        let Range { owner, home, address, bytes } = range;
        let source = Source::of(driver, opened, range)?;
        let (gpu, from) = (source.gpu, source.address);
        sources.push(source);
        let key = writer
            .block(About { id, address: *address, bytes: *bytes, home: Some(*home), ..About::default() })
            .map_err(words)?;
        let whose = (*owner, gpu);
        if shuttle.as_ref().is_none_or(|(_, known)| *known != whose) {
            if let Some((mut last, _)) = shuttle.take() {
                last.saved(&writer).map_err(failed)?;
            }
            shuttle = Some((Shuttle::new(driver, *owner, gpu).map_err(failed)?, whose));
        }
        let Some((shuttle, _)) = &mut shuttle else { continue };
        for at in (0..*bytes).step_by(STEP as usize) {
            if !is_wanted() {
                return Err("whoever asked for it has gone".to_owned());
            }
            let bytes = STEP.min(bytes - at);
            shuttle.save(&writer, key, at, from + at, bytes).map_err(failed)?;
            done += bytes;
            progress(done);
        }
    }
    if let Some((mut last, _)) = shuttle.take() {
        last.saved(&writer).map_err(failed)?;
    }
    writer.finish().map_err(words)
}

/// Reads stored ranges to where they are wanted.
fn loader(driver: &'static Driver, reader: Reader, ranges: Arc<BTreeMap<u64, (u64, u64)>>, unread: Unread) -> Load {
    let mut shuttle: Option<(Shuttle, (u64, u32))> = None;
    Box::new(move |owner, gpu, transfers| {
        let mut load = || -> Result<(), String> {
            let words = |failed: Failed| failed.to_string();
            if shuttle.as_ref().is_none_or(|(_, known)| *known != (owner, gpu)) {
                shuttle = None;
                shuttle = Some((Shuttle::new(driver, owner, gpu).map_err(words)?, (owner, gpu)));
            }
            let Some((shuttle, _)) = &shuttle else { return Ok(()) };
            let mut stretches = Vec::new();
            for transfer in transfers {
                stretches_of(&ranges, transfer, &mut stretches)?;
            }
            // All at once: a disk that is asked for one chunk after the other lies idle at the end of each.
            shuttle.load_all(&reader, &stretches).map_err(words)
        };
        load().map_err(|why| {
            unread.note(why);
            CuResult::INVALID_VALUE
        })
    })
}

/// Adds what of the store has the bytes of a transfer.
fn stretches_of(
    ranges: &BTreeMap<u64, (u64, u64)>,
    &Transfer { from, to, bytes, .. }: &Transfer,
    stretches: &mut Vec<Stretch>,
) -> Result<(), String> {
    let mut at = 0;
    while at < bytes {
        let found = ranges.range(..=from + at).next_back();
        let found = found.filter(|(address, (length, _))| from + at < **address + length);
        let Some((address, (length, id))) = found else {
            return Err(format!("{:#x} was not stored; this is a mistake of gpupool", from + at));
        };
        let offset = from + at - address;
        let length = (length - offset).min(bytes - at);
        stretches.push(Stretch { block: *id, offset, address: to + at, bytes: length });
        at += length;
    }
    Ok(())
}

/// The process's, which no other one has at the same time: also not in another container or on another host, as long as it was booted
/// at another time.
fn name_of(Identity { boot, namespace, pid, started, .. }: &Identity) -> String {
    let boot: String = boot.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!("{PREFIX}{boot}-{namespace:x}-{pid}-{started}")
}

/// Removes what processes of this system left that are no more: their lock is nobody's.
fn sweep(folder: &Path) {
    let Some(own) = Identity::own() else { return };
    let here = name_of(&own);
    let end = here.match_indices('-').nth(2).map_or(here.len(), |(at, _)| at + 1);
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(&here[..end])) else { continue };
        let numbers = rest.split_once('-').and_then(|(pid, started)| Some((pid.parse().ok()?, started.parse().ok()?)));
        let Some((pid, started)) = numbers else { continue };
        let whose = Identity { pid, started, image: 0, ..own };
        if whose.life() == Life::Gone && gpupool_store::keep(&entry.path(), 0).is_ok() {
            remove_empty(&entry.path());
        }
    }
}

/// A process's folder without a generation.
fn remove_empty(own: &Path) {
    // The lock is nobody's any more. Where there is more in the folder, it stays.
    let _ = std::fs::remove_file(own.join("lock"));
    let _ = std::fs::remove_dir(own);
}
