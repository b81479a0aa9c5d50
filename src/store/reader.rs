//! Reads a generation: what is asked for is read, decompressed and compared with its hash, by several threads at once.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use crate::PART;
use crate::buffer::{ALIGNMENT, Buffer, padded};
use crate::codec::{Codec, Decoder};
use crate::disk::{Disk, File};
use crate::error::{Error, Result};
use crate::manifest::{About, Block, Manifest, Part, Word, hash};
use crate::signals;
use crate::store::{Store, name_of};

/// Which generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The newest whose manifest is whole. One of a newer format is an error and not passed over: what is older is not what was
    /// stored last.
    Newest,
    /// This one.
    Number(u64),
}

/// A generation that is open for reading. Threads of the program may read at the same time.
#[derive(Debug)]
pub struct Reader {
    manifest: Manifest,
    path: PathBuf,
    files: Vec<File>,
    blocks: HashMap<u64, usize>,
    skipped: Vec<Error>,
    spare: Mutex<Vec<Scratch>>,
    threads: usize,
}

/// What a thread needs to read a part.
struct Scratch {
    stored: Buffer,
    whole: Buffer,
    decoder: Decoder,
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Scratch")
    }
}

/// A part, the bytes of it that are wanted, and where they go.
struct Piece<'a> {
    block: &'a About,
    part: &'a Part,
    /// Where in the part they begin.
    from: usize,
    to: &'a mut [u8],
}

impl Reader {
    /// Opens a generation. `threads` read at once what one call asks for; 0: one for each processor, 16 at most.
    ///
    /// # Errors
    /// There is none, its manifest or the length of a file is not what it was, or it was written by a newer gpupool.
    pub fn open(folder: &Path, which: Which, threads: usize) -> Result<Self> {
        Self::open_on(folder, which, threads, &Disk::default())
    }

    pub(crate) fn open_on(folder: &Path, which: Which, threads: usize, disk: &Disk) -> Result<Self> {
        let store = Store::open(folder, false, disk)?;
        let threads = if threads > 0 { threads } else { crate::processors().min(16) };
        let generation = match which {
            Which::Number(generation) => return Self::of(&store, generation, threads),
            Which::Newest => store.generations()?,
        };
        let mut skipped = Vec::new();
        for generation in generation {
            match Self::of(&store, generation, threads) {
                Ok(reader) => return Ok(Self { skipped, ..reader }),
                Err(error @ Error::Newer { .. }) => return Err(error),
                Err(error) => skipped.push(error),
            }
        }
        // Why the newest one is none says more than that there is none.
        Err(skipped.into_iter().next().unwrap_or_else(|| Error::Absent { path: store.folder.path().to_owned() }))
    }

    pub(crate) fn of(store: &Store, generation: u64, threads: usize) -> Result<Self> {
        let (folder, manifest) = store.manifest(generation)?;
        let mut files = Vec::new();
        for data in &manifest.files {
            let file = folder.open(&data.name, true)?;
            let bytes = file.bytes()?;
            if bytes != data.bytes {
                return Err(Error::damaged(file.path(), format!("it has {bytes} bytes, expected {}", data.bytes)));
            }
            files.push(file);
        }
        let blocks = manifest.blocks.iter().enumerate().map(|(at, block)| (block.about.id, at)).collect();
        let path = store.folder.path().join(name_of(generation));
        Ok(Self { manifest, path, files, blocks, skipped: Vec::new(), spare: Mutex::default(), threads })
    }

    /// What it says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Why newer generations were passed over. Whoever goes on with an older one says this.
    pub fn skipped(&self) -> &[Error] {
        &self.skipped
    }

    /// A block by its id.
    pub fn block(&self, id: u64) -> Option<&Block> {
        self.blocks.get(&id).and_then(|at| self.manifest.blocks.get(*at))
    }

    /// Fills `bytes` from a place in a block. Several parts are read by several threads. Parts are read whole: who asks for the
    /// bytes of [`Block::parts`], or many of them, has each read once.
    ///
    /// # Errors
    /// There are no such bytes, or they are not what was written. `bytes` holds anything then.
    pub fn read_into(&self, block: u64, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let pieces = self.pieces(block, offset, bytes)?;
        self.read_pieces(pieces, self.threads)
    }

    /// As [`Reader::read_into`], by the calling thread alone: for whoever has several of their own, none of which then waits for another.
    ///
    /// # Errors
    /// As of [`Reader::read_into`].
    pub fn read_here(&self, block: u64, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let pieces = self.pieces(block, offset, bytes)?;
        self.read_pieces(pieces, 1)
    }

    /// What of the parts has these bytes.
    fn pieces<'a>(&'a self, block: u64, offset: u64, bytes: &'a mut [u8]) -> Result<Vec<Piece<'a>>> {
        let Some(Block { about, parts }) = self.block(block) else {
            return Err(Error::misuse(format!("{}: no block {block}", self.path.display())));
        };
        let end = offset.checked_add(bytes.len() as u64).filter(|end| *end <= about.bytes);
        let Some(end) = end else {
            let (asked, whole) = (bytes.len(), about.bytes);
            return Err(Error::misuse(format!(
                "{}: block {block}: {asked} bytes at {offset} are beyond its {whole} bytes",
                self.path.display()
            )));
        };
        let first = parts.partition_point(|part| part.offset + part.bytes <= offset);
        let mut pieces = Vec::new();
        let mut left = bytes;
        for part in parts[first..].iter().take_while(|part| part.offset < end) {
            let from = offset.saturating_sub(part.offset);
            let length = (part.offset + part.bytes).min(end) - (part.offset + from);
            let (to, rest) = std::mem::take(&mut left).split_at_mut(usize::try_from(length).unwrap_or(0));
            left = rest;
            pieces.push(Piece { block: about, part, from: usize::try_from(from).unwrap_or(0), to });
        }
        Ok(pieces)
    }

    /// Whether `bytes` are those of a block from this offset on, by its hashes: these have to be whole parts, or pieces of one that repeats eight bytes,
    /// no longer than [`PART`](crate::PART).
    pub fn is(&self, block: u64, part: &Part, offset: u64, bytes: &[u8]) -> bool {
        if part.codec != Codec::Fill {
            return (part.offset, part.bytes) == (offset, bytes.len() as u64) && hash(bytes) == part.word.0;
        }
        let from = usize::try_from(offset.saturating_sub(part.offset)).unwrap_or(0);
        let mut expected = part.word.0.to_le_bytes();
        expected.rotate_left(from % 8);
        self.block(block).is_some() && bytes.iter().zip(expected.iter().cycle()).all(|(found, wanted)| found == wanted)
    }

    fn read_pieces(&self, pieces: Vec<Piece<'_>>, threads: usize) -> Result<()> {
        let helpers = threads.min(pieces.len()).saturating_sub(1);
        let pieces = Mutex::new(pieces.into_iter());
        let failed = Mutex::new(None);
        let read = || {
            let done = self.with_scratch(|scratch| {
                while failed.lock().is_none() {
                    let Some(piece) = pieces.lock().next() else { break };
                    self.read_piece(piece, scratch)?;
                }
                Ok(())
            });
            if let Err(error) = done {
                failed.lock().get_or_insert(error);
            }
        };
        std::thread::scope(|scope| {
            // Where the system has no thread to spare, fewer read.
            let _ = (0..helpers).try_for_each(|_| signals::spawn_in(scope, read).map(drop));
            read();
        });
        failed.into_inner().map_or(Ok(()), Err)
    }

    fn with_scratch<T>(&self, body: impl FnOnce(&mut Scratch) -> Result<T>) -> Result<T> {
        let spare = self.spare.lock().pop();
        let mut scratch = match spare {
            Some(scratch) => scratch,
            None => {
                let no_memory = |errno| Error::io(&self.path, "have memory to read", errno);
                Scratch {
                    stored: Buffer::new(PART).map_err(no_memory)?,
                    whole: Buffer::new(PART).map_err(no_memory)?,
                    decoder: Decoder::new().map_err(no_memory)?,
                }
            }
        };
        let done = catch_unwind(AssertUnwindSafe(|| body(&mut scratch)))
            .unwrap_or_else(|_| Err(Error::misuse("reading stored memory panicked; this is a mistake of gpupool")));
        // As many as were in use at once.
        self.spare.lock().push(scratch);
        done
    }

    fn read_piece(&self, piece: Piece<'_>, scratch: &mut Scratch) -> Result<()> {
        let Piece { block, part, from, to } = piece;
        if part.codec == Codec::Fill {
            fill(to, part.word.0, from);
            return Ok(());
        }
        let length = usize::try_from(part.bytes).unwrap_or(0);
        if from == 0 && to.len() == length {
            return self.read_part(block, part, to, &mut scratch.stored, &mut scratch.decoder);
        }
        let Scratch { stored, whole, decoder } = scratch;
        self.read_part(block, part, &mut whole[..length], stored, decoder)?;
        to.copy_from_slice(&whole[from..from + to.len()]);
        Ok(())
    }

    /// Reads a whole part that lies in a file.
    fn read_part(
        &self,
        block: &About,
        part: &Part,
        out: &mut [u8],
        buffer: &mut Buffer,
        decoder: &mut Decoder,
    ) -> Result<()> {
        let file = usize::try_from(part.file).ok().and_then(|file| self.files.get(file));
        let file = file.ok_or_else(|| Error::damaged(&self.path, "a part lies in a file that is not listed"))?;
        fetch(file, part, out, buffer, decoder).map_err(|unfit| match unfit {
            Unfit::Unread(error) => error,
            Unfit::Wrong { expected, found } => Error::Part {
                path: file.path().to_owned(),
                block: block.id,
                address: block.address,
                offset: part.offset,
                expected,
                found,
            },
        })
    }

    /// Reads every part. What is wrong, in the order of blocks and offsets; and how many bytes of memory were compared.
    pub(crate) fn verify(&self) -> (Vec<Error>, u64) {
        let parts = self.manifest.blocks.iter().flat_map(|block| block.parts.iter().map(move |part| (block, part)));
        let parts = Mutex::new(parts.enumerate());
        let wrong = Mutex::new(Vec::new());
        let work = || {
            let done = self.with_scratch(|scratch| {
                loop {
                    let next = parts.lock().next();
                    let Some((number, (block, part))) = next else { return Ok(()) };
                    if part.codec == Codec::Fill {
                        continue;
                    }
                    let Scratch { stored, whole, decoder } = scratch;
                    let out = &mut whole[..usize::try_from(part.bytes).unwrap_or(0)];
                    if let Err(error) = self.read_part(&block.about, part, out, stored, decoder) {
                        wrong.lock().push((number, error));
                    }
                }
            });
            if let Err(error) = done {
                wrong.lock().push((usize::MAX, error));
            }
        };
        std::thread::scope(|scope| {
            let _ = (1..self.threads).try_for_each(|_| signals::spawn_in(scope, work).map(drop));
            work();
        });
        let mut wrong = wrong.into_inner();
        wrong.sort_by_key(|(number, _)| *number);
        (wrong.into_iter().map(|(_, error)| error).collect(), self.manifest.bytes)
    }
}

/// What is wrong with a part.
pub(crate) enum Unfit {
    /// It cannot be read.
    Unread(Error),
    Wrong {
        expected: String,
        found: String,
    },
}

/// Reads a whole part that lies in this file, and compares it with its hash. The buffer is of [`PART`] bytes.
pub(crate) fn fetch(
    file: &File,
    part: &Part,
    out: &mut [u8],
    buffer: &mut Buffer,
    decoder: &mut Decoder,
) -> std::result::Result<(), Unfit> {
    let wrong = |expected: String, found: String| Unfit::Wrong { expected, found };
    let stored = usize::try_from(part.stored).unwrap_or(0);
    let room = padded(stored);
    let is_aligned = out.as_ptr().addr().is_multiple_of(ALIGNMENT);
    if part.codec == Codec::None && room == out.len() && is_aligned {
        file.read(out, part.at).map_err(Unfit::Unread)?;
    } else {
        let buffer = &mut buffer[..room];
        file.read(buffer, part.at).map_err(Unfit::Unread)?;
        if let Some(at) = buffer[stored..].iter().position(|byte| *byte != 0) {
            let at = part.at + (stored + at) as u64;
            return Err(wrong("zeros behind its bytes".to_owned(), format!("others, at byte {at} of the file")));
        }
        decoder
            .decode(part.codec, &buffer[..stored], out)
            .map_err(|what| wrong(format!("{} bytes by {}", out.len(), part.codec.word()), what))?;
    }
    let found = Word(hash(out));
    if found == part.word { Ok(()) } else { Err(wrong(format!("XXH3-64 {}", part.word), found.to_string())) }
}

/// Repeats a word, from the byte `from` of its repetitions on.
fn fill(to: &mut [u8], word: u64, from: usize) {
    let mut word = word.to_le_bytes();
    word.rotate_left(from % 8);
    if word.iter().all(|byte| *byte == word[0]) {
        to.fill(word[0]);
        return;
    }
    let (words, rest) = to.as_chunks_mut::<8>();
    words.fill(word);
    rest.copy_from_slice(&word[..rest.len()]);
}
