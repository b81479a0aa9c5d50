//! Writes a generation: bytes of blocks come in, threads of its own compress and write them.
//!
//! Each thread has a file of its own and writes it from front to back: file systems that let one writer at a time into a file
//! that grows then keep nobody waiting, and no place in a file has to be agreed on.

use std::collections::{HashMap, VecDeque};
use std::ops::{Deref, DerefMut, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;

use crate::PART;
use crate::buffer::{ALIGNMENT, Buffer, padded};
use crate::codec::{Codec, Costs, Encoder, Speed, choose, output_for};
use crate::disk::{Disk, File, Folder};
use crate::error::{Error, Result};
use crate::manifest::{About, Block, DIGESTED, Data, Digest, Manifest, Meta, Part, Word, digest, hash};
use crate::older::{Older, Scratch};
use crate::signals;
use crate::store::{Lock, Store, unfinished_name_of};

/// A part is looked at in pieces of this length for eight bytes that repeat.
const PIECE: usize = 64 << 10;
/// As many bytes that repeat are a part of their own.
const RUN: usize = 256 << 10;
/// What a compressor of zstd, its tables and a thread's stack take, in bytes; for [`Options::memory`].
const ASIDE: usize = 4 << 20;

/// How a generation is written.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that compress and write. 0: one for each processor, 16 at most.
    pub threads: usize,
    /// Whether the page cache is passed by, where the file system allows it.
    pub direct: bool,
    /// How parts are stored. `None`: each as a sample of it and the speed of the disk speak for.
    pub codec: Option<Codec>,
    /// Bytes that are about to come. If the file system has fewer free, nothing is begun: what compression will save is not
    /// known before. 0: not looked at.
    pub expected: u64,
    /// How many whole generations are left when this one is, itself among them; older ones are removed then. `None`: all.
    pub keep: Option<usize>,
    /// Whether parts that are the same in the newest whole generation are not written again, where the file system can give a file a second name. Of these
    /// every `keep`-th (every eighth where all generations are left) is read and compared, so that each is within so many generations. How much
    /// will be written is not known before then, and `expected` is not looked at where there is such a generation.
    pub reuse: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { threads: 0, direct: true, codec: None, expected: 0, keep: None, reuse: false }
    }
}

impl Options {
    fn threads(&self) -> usize {
        if self.threads > 0 { self.threads } else { crate::processors().min(16) }
    }

    /// The most memory that a writer takes for itself, in bytes: for each thread two buffers for what comes in, one for what goes
    /// out, one for planes, and the compressor's tables; two for what is read again of older generations. Of what is handed over by [`Writer::submit`] it
    /// keeps that.
    pub fn memory(&self) -> usize {
        let again = if self.reuse { 2 * PART } else { 0 };
        self.threads() * (4 * PART + again + ASIDE)
    }
}

/// A block that bytes can be written of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(u32);

/// Bytes that are still to be stored: a piece of what a caller handed over.
struct Job {
    block: Key,
    offset: u64,
    source: Arc<dyn Source>,
    range: Range<usize>,
}

/// What callers hand over. Dropped in a thread of the writer, as soon as its last byte is stored.
trait Source: Send + Sync {
    fn bytes(&self) -> &[u8];
}

struct Owned<T>(T);

impl<T: AsRef<[u8]> + Send + Sync> Source for Owned<T> {
    fn bytes(&self) -> &[u8] {
        self.0.as_ref()
    }
}

/// A buffer of the writer: on a page's border, [`PART`] bytes. It goes back to the writer when it is dropped.
pub struct Room {
    buffer: Option<Buffer>,
    bytes: usize,
    from: Arc<Shared>,
}

impl Room {
    /// Leaves the first `bytes` of it.
    pub fn truncate(&mut self, bytes: usize) {
        self.bytes = self.bytes.min(bytes);
    }
}

impl Deref for Room {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.as_deref().map_or(&[], |buffer| &buffer[..self.bytes])
    }
}

impl DerefMut for Room {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.buffer {
            Some(buffer) => &mut buffer[..self.bytes],
            None => &mut [],
        }
    }
}

impl AsRef<[u8]> for Room {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.from.state.lock().free.push(buffer);
            self.from.freed.notify_one();
        }
    }
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    free: Vec<Buffer>,
    buffers: usize,
    is_closed: bool,
    /// The first thing that went wrong. Nothing more is taken then.
    failed: Option<Error>,
}

/// What the writer and its threads have in common.
struct Shared {
    state: Mutex<State>,
    /// A job came, or none will.
    came: Condvar,
    /// A job was taken.
    taken: Condvar,
    /// A buffer came back.
    freed: Condvar,
    most: usize,
    disk_rate: Mutex<DiskRate>,
    costs: Arc<Costs>,
    threads: usize,
    unfinished: Folder,
    older: Option<Older>,
    options: Options,
}

/// How fast the disk takes what is written.
struct DiskRate {
    writing: usize,
    since: Instant,
    /// For how long anything was being written.
    busy: Duration,
    /// For how long each thread wrote, in sum.
    waited: Duration,
    bytes: u64,
}

impl DiskRate {
    /// What is assumed before anything was written, in bytes a second.
    const ASSUMED: f64 = 2e9;
    /// What is older than this hardly counts.
    const MEMORY: Duration = Duration::from_secs(2);

    fn new() -> Self {
        Self { writing: 0, since: Instant::now(), busy: Duration::ZERO, waited: Duration::ZERO, bytes: 0 }
    }

    fn begin(&mut self) -> Instant {
        let now = Instant::now();
        if self.writing == 0 {
            self.since = now;
        }
        self.writing += 1;
        now
    }

    fn end(&mut self, begun: Instant, bytes: usize) {
        let now = Instant::now();
        self.busy += now - self.since;
        self.waited += now - begun;
        self.since = now;
        self.writing = self.writing.saturating_sub(1);
        self.bytes += bytes as u64;
        if self.busy > Self::MEMORY {
            self.busy /= 2;
            self.waited /= 2;
            self.bytes /= 2;
        }
    }

    fn speed(&self, threads: usize) -> Speed {
        // The first write of a file is slower than those that follow.
        if self.bytes < 2 * PART as u64 {
            return Speed { threads, disk: Self::ASSUMED, wait: threads as f64 / Self::ASSUMED };
        }
        let bytes = self.bytes as f64;
        let disk = bytes / self.busy.as_secs_f64().max(1e-6);
        Speed { threads, disk, wait: self.waited.as_secs_f64() / bytes }
    }
}

impl Shared {
    fn fail(&self, error: Error) {
        let mut state = self.state.lock();
        state.failed.get_or_insert(error);
        let left = std::mem::take(&mut state.jobs);
        drop(state);
        // Outside of the lock: what they hold may be a buffer, which goes back under it.
        drop(left);
        self.came.notify_all();
        self.taken.notify_all();
        self.freed.notify_all();
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if state.failed.is_some() {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                self.taken.notify_one();
                return Some(job);
            }
            if state.is_closed {
                return None;
            }
            self.came.wait(&mut state);
        }
    }

    fn put(&self, job: Job) -> Result<()> {
        let mut state = self.state.lock();
        loop {
            if let Some(error) = &state.failed {
                let error = error.clone();
                // It may hold a buffer, which goes back under the lock.
                drop(state);
                drop(job);
                return Err(error);
            }
            if state.jobs.len() < self.most {
                state.jobs.push_back(job);
                self.came.notify_one();
                return Ok(());
            }
            self.taken.wait(&mut state);
        }
    }
}

/// One thread: its file, what it needs to compress, and what it stored.
struct Worker {
    shared: Arc<Shared>,
    number: usize,
    file: Option<File>,
    end: u64,
    encoder: Encoder,
    out: Buffer,
    parts: Vec<(Key, Part)>,
    /// Bytes that were damaged there, or were there no more.
    damaged: u64,
    scratch: Option<Scratch>,
}

/// What a thread leaves.
struct Done {
    data: Option<Data>,
    damaged: u64,
    parts: Vec<(Key, Part)>,
}

impl Worker {
    fn run(mut self) -> Result<Done> {
        while let Some(job) = self.shared.next() {
            let bytes = &job.source.bytes()[job.range.clone()];
            for (range, fill) in runs(bytes) {
                let offset = job.offset + range.start as u64;
                let part = match fill {
                    Some(word) => Part {
                        offset,
                        bytes: range.len() as u64,
                        codec: Codec::Fill,
                        word: Word(word),
                        upper: Word(0),
                        stored: 0,
                        file: 0,
                        at: 0,
                    },
                    None => self.store(offset, &bytes[range])?,
                };
                self.parts.push((job.block, part));
            }
        }
        let data = match &self.file {
            Some(file) => {
                file.sync_data()?;
                Some(Data { name: file_name(self.number), bytes: self.end, from: None })
            }
            None => None,
        };
        Ok(Done { data, damaged: self.damaged, parts: self.parts })
    }

    /// The part of an older file that holds these bytes.
    fn known(&mut self, digest: Digest, source: &[u8]) -> Result<Option<Part>> {
        let Some(older) = &self.shared.older else { return Ok(None) };
        let Some(part) = older.find(digest, source.len() as u64) else {
            if older.has_lost(digest, source.len() as u64) {
                self.damaged += source.len() as u64;
            }
            return Ok(None);
        };
        if older.has_its_turn(&part) {
            let scratch = match &mut self.scratch {
                Some(scratch) => scratch,
                None => {
                    let path = self.shared.unfinished.path();
                    let made = Scratch::new().map_err(|errno| Error::io(path, "have memory to read", errno))?;
                    self.scratch.insert(made)
                }
            };
            if !older.is_right(&part, source, &self.shared.unfinished, scratch) {
                self.damaged += part.bytes;
                return Ok(None);
            }
        }
        Ok(Some(part))
    }

    fn store(&mut self, offset: u64, source: &[u8]) -> Result<Part> {
        let (word, upper) = if self.shared.options.reuse && source.len() >= DIGESTED {
            let digest = digest(source);
            if let Some(part) = self.known(digest, source)? {
                return Ok(Part { offset, ..part });
            }
            (digest.lower, digest.upper)
        } else {
            (hash(source), 0)
        };
        let file = match &self.file {
            Some(file) => file,
            None => {
                let file = self.shared.unfinished.create(&file_name(self.number), self.shared.options.direct)?;
                self.file.insert(file)
            }
        };
        let wanted = match self.shared.options.codec {
            Some(codec) => codec,
            None => {
                let speed = self.shared.disk_rate.lock().speed(self.shared.threads);
                choose(&self.encoder.estimate(source), speed)
            }
        };
        let (codec, stored) = match self.encoder.encode(wanted, source, &mut self.out) {
            Some(stored) => (wanted, stored),
            None => (Codec::None, source.len()),
        };
        let room = padded(stored);
        let is_ready = source.len() == room && source.as_ptr().addr().is_multiple_of(ALIGNMENT);
        let bytes = if codec == Codec::None && is_ready {
            source
        } else {
            if codec == Codec::None {
                self.out[..stored].copy_from_slice(source);
            }
            self.out[stored..room].fill(0);
            &self.out[..room]
        };
        let begun = self.shared.disk_rate.lock().begin();
        let written = file.write(bytes, self.end);
        self.shared.disk_rate.lock().end(begun, room);
        written?;
        let at = self.end;
        self.end += room as u64;
        Ok(Part {
            offset,
            bytes: source.len() as u64,
            codec,
            word: Word(word),
            upper: Word(upper),
            stored: stored as u64,
            file: 0,
            at,
        })
    }
}

fn file_name(number: usize) -> String {
    format!("data-{number:02}")
}

/// The eight bytes that repeat all through `bytes`, if any do.
fn fill_of(bytes: &[u8]) -> Option<u64> {
    let mut word = [0; 8];
    let (first, rest) = bytes.split_at(bytes.len().min(8));
    word[..first.len()].copy_from_slice(first);
    // Each byte is the one eight before it: one comparison of the bytes with themselves, which ends where they differ.
    (*rest == bytes[..rest.len()]).then_some(u64::from_le_bytes(word))
}

/// The bytes in order, as ranges of such that repeat and such that do not.
fn runs(bytes: &[u8]) -> Vec<(Range<usize>, Option<u64>)> {
    let mut found: Vec<(Range<usize>, Option<u64>)> = Vec::new();
    for at in (0..bytes.len()).step_by(PIECE) {
        let range = at..(at + PIECE).min(bytes.len());
        let fill = fill_of(&bytes[range.clone()]);
        match found.last_mut() {
            Some((last, known)) if *known == fill => last.end = range.end,
            _ => found.push((range, fill)),
        }
    }
    let mut joined: Vec<(Range<usize>, Option<u64>)> = Vec::new();
    for (range, fill) in found {
        let fill = fill.filter(|_| range.len() >= RUN || range.len() == bytes.len());
        match joined.last_mut() {
            Some((last, None)) if fill.is_none() => last.end = range.end,
            _ => joined.push((range, fill)),
        }
    }
    joined
}

/// Writes one generation. Threads of the program may hand bytes over at the same time.
///
/// Dropped before [`Writer::finish`], it leaves nothing behind. In the child of a fork it does nothing.
pub struct Writer {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Result<Done>>>,
    blocks: Mutex<Blocks>,
    /// What was taken of the generation before.
    reused: Mutex<Vec<(Key, Part)>>,
    meta: Meta,
    generation: u64,
    /// Why something is there still that others had left.
    not_removed: Option<Error>,
    /// Both are there until the end.
    store: Option<Store>,
    lock: Option<Lock>,
    process: u32,
}

#[derive(Default)]
struct Blocks {
    list: Vec<About>,
    ids: HashMap<u64, Key>,
}

/// A generation that is whole. While this lives, nobody else can write into the folder, and so nobody removes the generation.
#[derive(Debug)]
pub struct Written {
    /// Its number.
    pub generation: u64,
    /// Bytes of blocks in it.
    pub bytes: u64,
    /// Bytes that its files take.
    pub stored: u64,
    /// Bytes of files that were written for it; the others are of older generations.
    pub fresh: u64,
    /// Bytes of blocks that were not written again.
    pub unchanged: u64,
    /// Bytes of blocks that had not changed, and were written again as what there was of them was damaged. Older generations have that still.
    pub damaged: u64,
    /// What only this generation has of all that were ever written; see [`Writer::before`].
    pub seal: u64,
    /// Why older generations, or what was left of such, are still there that were to be removed.
    pub not_removed: Option<Error>,
    store: Store,
    _lock: Lock,
}

impl Written {
    /// Removes the generation again: its bytes are needed no more.
    ///
    /// # Errors
    /// The system refuses.
    pub fn remove(self) -> Result<()> {
        self.store.remove(self.generation)
    }

    /// As [`Written::remove`], in no time however much it is: nobody finds it any more. What its files take is given back by [`Unnamed::end`], or when the process
    /// ends.
    ///
    /// # Errors
    /// The system refuses; what of it has a name still the next writer removes.
    pub fn unname(self) -> Result<Unnamed> {
        let files = self.store.unname(self.generation)?;
        Ok(Unnamed { files, written: self })
    }
}

/// A generation that nobody finds any more.
pub struct Unnamed {
    files: Vec<File>,
    written: Written,
}

impl Unnamed {
    /// Gives back what its files take.
    ///
    /// # Errors
    /// The system refuses to remove what it kept of them.
    pub fn end(self) -> Result<()> {
        let Self { files, written } = self;
        drop(files);
        written.store.remove_rest(written.generation)
    }
}

impl Writer {
    /// Begins a generation in a folder, which is made if it is not there; the folder around it is.
    ///
    /// # Errors
    /// The folder may not be trusted ([`Error::Refused`]), somebody else writes there ([`Error::Busy`]), it has too little room
    /// ([`Error::NoRoom`]), or the system has no memory or threads.
    pub fn create(folder: &Path, meta: Meta, options: Options) -> Result<Self> {
        Self::create_on(folder, meta, options, &Disk::default())
    }

    pub(crate) fn create_on(folder: &Path, meta: Meta, options: Options, disk: &Disk) -> Result<Self> {
        let store = Store::open(folder, true, disk)?;
        let lock = store.lock()?;
        let not_removed = store.clean().err();
        let threads = options.threads();
        let generation = store.next()?;
        let unfinished = store.folder.make(&unfinished_name_of(generation))?;
        let give_up = |error| {
            // What cannot be removed now, the next writer removes.
            let _ = store.folder.remove_folder(&unfinished_name_of(generation));
            error
        };
        let older = if options.reuse {
            Older::of(&store, &unfinished, generation, options.keep).map_err(give_up)?
        } else {
            None
        };
        if options.expected > 0 && older.is_none() {
            // The manifest, and the end of each part.
            let needed = options.expected.saturating_add(options.expected / 512).saturating_add(1 << 20);
            store.has_room(needed).map_err(give_up)?;
        }
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            came: Condvar::new(),
            taken: Condvar::new(),
            freed: Condvar::new(),
            most: threads * 2,
            disk_rate: Mutex::new(DiskRate::new()),
            costs: Arc::default(),
            threads,
            unfinished,
            older,
            options,
        });
        let mut writer = Self {
            shared,
            threads: Vec::new(),
            blocks: Mutex::default(),
            reused: Mutex::default(),
            meta,
            generation,
            not_removed,
            store: Some(store),
            lock: Some(lock),
            process: std::process::id(),
        };
        for number in 0..threads {
            match writer.start(number) {
                Ok(thread) => writer.threads.push(thread),
                // Fewer do.
                Err(_) if number > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(writer)
    }

    fn start(&self, number: usize) -> Result<JoinHandle<Result<Done>>> {
        let path = self.shared.unfinished.path();
        let no_memory = |errno| Error::io(path, "have memory to write", errno);
        let shared = Arc::clone(&self.shared);
        let (file, end, parts) = (None, 0, Vec::new());
        let encoder = Encoder::new(&shared.costs).map_err(no_memory)?;
        let out = Buffer::new(output_for(PART)).map_err(no_memory)?;
        let worker = Worker { shared, number, file, end, encoder, out, parts, damaged: 0, scratch: None };
        let body = move || {
            let shared = Arc::clone(&worker.shared);
            // Who waits for room in the queue would wait for ever.
            let done = catch_unwind(AssertUnwindSafe(|| worker.run())).unwrap_or_else(|_| {
                Err(Error::misuse("a thread that stores memory panicked; this is a mistake of gpupool"))
            });
            done.inspect_err(|error| shared.fail(error.clone()))
        };
        signals::spawn(body).map_err(|error| {
            Error::io(path, "start a thread to write", Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
        })
    }

    /// The number of the generation that is being written.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Tells of a block. All its bytes have to be handed over before [`Writer::finish`].
    ///
    /// # Errors
    /// There is one of this id already.
    pub fn block(&self, about: About) -> Result<Key> {
        let mut blocks = self.blocks.lock();
        let key = Key(u32::try_from(blocks.list.len()).map_err(|_| Error::misuse("too many blocks"))?);
        if blocks.ids.contains_key(&about.id) {
            return Err(Error::misuse(format!("block {} is told of twice", about.id)));
        }
        blocks.ids.insert(about.id, key);
        blocks.list.push(about);
        Ok(key)
    }

    fn check(&self, block: Key, offset: u64, bytes: usize) -> Result<()> {
        let blocks = self.blocks.lock();
        let about = blocks.list.get(block.0 as usize).ok_or_else(|| Error::misuse("no such block"))?;
        let end = offset.checked_add(bytes as u64);
        if end.is_none_or(|end| end > about.bytes) {
            let About { id, bytes: whole, .. } = about;
            return Err(Error::misuse(format!("block {id}: {bytes} bytes at {offset} are beyond its {whole} bytes")));
        }
        Ok(())
    }

    /// What tells the generation before this one from all others ([`Written::seal`]), where there is one that has parts to share.
    pub fn before(&self) -> Option<u64> {
        self.shared.older.as_ref().map(|older| older.seal)
    }

    /// Reads what of the generation before has its turn to be read, as long as it `goes_on`; what is damaged, or was not read, [`Writer::reuse`] does not take.
    pub fn read_ahead(&self, goes_on: &(dyn Fn() -> bool + Sync)) {
        if let Some(older) = &self.shared.older {
            older.read_ahead(&self.shared.unfinished, self.shared.threads, goes_on);
        }
    }

    /// Takes bytes of a block from the generation [before](Writer::before), without having them: they are what that has of block `from.0` from the offset `from.1` on, as the caller knows.
    /// `false`: that has not all of it whole in pieces of its own, or some of it is to be read first; then they are to be handed over.
    ///
    /// # Errors
    /// They are outside of the block.
    pub fn reuse(&self, block: Key, offset: u64, bytes: usize, from: (u64, u64)) -> Result<bool> {
        self.check(block, offset, bytes)?;
        let older = self.shared.older.as_ref();
        let Some(parts) = older.and_then(|older| older.range(from.0, from.1, bytes as u64, offset)) else {
            return Ok(false);
        };
        self.reused.lock().extend(parts.into_iter().map(|part| (block, part)));
        Ok(true)
    }

    /// A buffer to fill and [`Writer::submit`], without a copy more. Waits until one is free; there are two for each thread of the
    /// writer, so that a thread that asks for a second one before it submits the first may wait for itself.
    ///
    /// # Errors
    /// Writing failed, or there is no memory.
    pub fn room(&self) -> Result<Room> {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        let buffer = loop {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if let Some(buffer) = state.free.pop() {
                break buffer;
            }
            if state.buffers < shared.most {
                let no_memory = |errno| Error::io(shared.unfinished.path(), "have memory to write", errno);
                let buffer = Buffer::new(PART).map_err(no_memory)?;
                state.buffers += 1;
                break buffer;
            }
            shared.freed.wait(&mut state);
        };
        Ok(Room { buffer: Some(buffer), bytes: PART, from: Arc::clone(shared) })
    }

    /// Hands bytes of a block over, which are copied. Waits while there is much to be written already.
    ///
    /// # Errors
    /// They are outside of the block, or writing failed: also of what was handed over before.
    pub fn write(&self, block: Key, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check(block, offset, bytes.len())?;
        for (number, piece) in bytes.chunks(PART).enumerate() {
            let mut room = self.room()?;
            room.truncate(piece.len());
            room.copy_from_slice(piece);
            self.queue(block, offset + (number * PART) as u64, room)?;
        }
        Ok(())
    }

    /// Hands bytes of a block over, which are not copied. They are dropped, by a thread of the writer, when all of them are
    /// stored or writing failed. Waits while there is much to be written already.
    ///
    /// # Errors
    /// As of [`Writer::write`].
    pub fn submit(&self, block: Key, offset: u64, bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Result<()> {
        self.check(block, offset, bytes.as_ref().len())?;
        self.queue(block, offset, bytes)
    }

    fn queue(&self, block: Key, offset: u64, bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Result<()> {
        let source: Arc<dyn Source> = Arc::new(Owned(bytes));
        let length = source.bytes().len();
        for at in (0..length).step_by(PART) {
            let (range, source) = (at..(at + PART).min(length), Arc::clone(&source));
            self.shared.put(Job { block, offset: offset + at as u64, source, range })?;
        }
        Ok(())
    }

    /// Waits until all is on the disk, and makes the generation whole.
    ///
    /// # Errors
    /// A block was not handed over whole, or twice; or writing failed. The generation is not there then, and the older ones are.
    pub fn finish(mut self) -> Result<Written> {
        let (manifest, damaged) = self.gather()?;
        let (Some(store), Some(lock)) = (self.store.take(), self.lock.take()) else {
            return Err(Error::misuse("finished twice"));
        };
        let unfinished = &self.shared.unfinished;
        let published = signals::aside(|| store.publish(unfinished, &manifest));
        let published =
            published.unwrap_or_else(|| Err(Error::io(unfinished.path(), "start a thread to write", Errno::AGAIN)));
        let seal = match published {
            Ok(seal) => seal,
            Err(error) => {
                (self.store, self.lock) = (Some(store), Some(lock));
                return Err(error);
            }
        };
        let older = self.shared.options.keep.and_then(|keep| store.keep(keep.max(1)).err());
        let not_removed = self.not_removed.take().or(older);
        let fresh = manifest.fresh();
        let Manifest { generation, bytes, stored, unchanged, .. } = manifest;
        Ok(Written { generation, bytes, stored, fresh, unchanged, damaged, seal, not_removed, store, _lock: lock })
    }

    /// Ends the threads and puts together what they stored; and how much of what was stored before was damaged.
    fn gather(&mut self) -> Result<(Manifest, u64)> {
        let done = self.close();
        let list = std::mem::take(&mut *self.blocks.lock()).list;
        let mut blocks: Vec<Block> = list.into_iter().map(|about| Block { about, parts: Vec::new() }).collect();
        let mut files = Vec::new();
        let (mut unchanged, mut damaged) = (0, 0);
        let mut failed = self.shared.state.lock().failed.clone();
        for done in done {
            let Some(done) = done else {
                failed.get_or_insert_with(|| Error::misuse("a thread that stores memory ended early"));
                continue;
            };
            let file = files.len() as u64;
            files.extend(done.data);
            damaged += done.damaged;
            for (key, part) in done.parts {
                let file = if part.codec == Codec::Fill { 0 } else { part.file.max(file) };
                if let Some(block) = blocks.get_mut(key.0 as usize) {
                    block.parts.push(Part { file, ..part });
                }
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        for (key, part) in self.reused.get_mut().drain(..) {
            unchanged += if part.codec == Codec::Fill { part.bytes } else { 0 };
            if let Some(block) = blocks.get_mut(key.0 as usize) {
                block.parts.push(part);
            }
        }
        for Block { about, parts } in &mut blocks {
            parts.sort_unstable_by_key(|part| part.offset);
            join_fills(parts);
            let mut end = 0;
            for part in parts.iter() {
                if part.offset != end {
                    let how = if part.offset < end { "twice" } else { "not at all" };
                    let at = part.offset.min(end);
                    return Err(Error::misuse(format!("block {}: bytes at {at} were handed over {how}", about.id)));
                }
                end += part.bytes;
            }
            if end != about.bytes {
                return Err(Error::misuse(format!("block {}: bytes at {end} were handed over not at all", about.id)));
            }
        }
        let shared = &self.shared;
        if let Some(older) = &shared.older {
            let settle = || older.settle(&mut blocks, &mut files, &shared.unfinished, &file_name(shared.threads));
            signals::aside(settle)
                .unwrap_or_else(|| Err(Error::io(shared.unfinished.path(), "start a thread to write", Errno::AGAIN)))?;
        }
        // What stood in a file that was not worth keeping was written again.
        let is_kept = |part: &&Part| {
            let file = usize::try_from(part.file).ok().and_then(|at| files.get(at));
            part.codec != Codec::Fill && file.is_some_and(|file| file.from.is_some())
        };
        unchanged += blocks.iter().flat_map(|block| &block.parts).filter(is_kept).map(|part| part.bytes).sum::<u64>();
        let manifest = Manifest {
            generation: self.generation,
            written: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            meta: std::mem::take(&mut self.meta),
            bytes: blocks.iter().map(|block| block.about.bytes).sum(),
            stored: files.iter().map(|file| file.bytes).sum(),
            unchanged,
            files,
            blocks,
        };
        Ok((manifest, damaged))
    }

    /// Lets the threads end when nothing is left to do, and waits for them.
    fn close(&mut self) -> Vec<Option<Done>> {
        self.shared.state.lock().is_closed = true;
        self.shared.came.notify_all();
        self.threads.drain(..).map(|thread| thread.join().ok().and_then(Result::ok)).collect()
    }
}

/// Makes one of such that follow on each other and repeat the same.
fn join_fills(parts: &mut Vec<Part>) {
    parts.dedup_by(|next, part| {
        let is_fill = part.codec == Codec::Fill && next.codec == Codec::Fill && part.word == next.word;
        let joined = is_fill && part.offset + part.bytes == next.offset && part.bytes % 8 == 0;
        if joined {
            part.bytes += next.bytes;
        }
        joined
    });
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The threads are the parent's, and so are the files.
            std::mem::take(&mut self.threads).into_iter().for_each(std::mem::forget);
            return;
        }
        let Some(store) = self.store.take() else { return };
        self.shared.fail(Error::misuse("given up"));
        self.close();
        // What cannot be removed now, the next writer removes.
        let _ = store.folder.remove_folder(&unfinished_name_of(self.generation));
    }
}
