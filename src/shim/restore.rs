//! How does memory that the program names come back from an image (`GPUPOOL_RESTORE`)?
//!
//! The newest whole generation, or the one that `GPUPOOL_RESTORE_GENERATION` names, is opened when the first name is asked for, and stays the one that is meant. Each name comes back once: a program that
//! gives it to other memory later wants the name, and not its old contents. Nothing is silent: what did not come back is an error of that
//! call and a line, and at the end it is told how much did.

use crate::backing::copies;
use crate::backing::open::{self, Opened};
use crate::checkpoint::blocks::{self, GUESSED, OWN};
use crate::gate;
use crate::image::{self, Shuttle};
use crate::log;
use crate::process;
use crate::serve::memory::names::Named;
use crate::watch::capture;
use gpupool_config::{Toggle, format_size};
use gpupool_cuda::{CuResult, Driver};
use gpupool_events::{BlockRestore, ProgramRestore};
use gpupool_pool::Block;
use gpupool_store::{About, Job, Reader, Which, rank_folder};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// Why memory did not come back.
pub enum Unrestored {
    /// It is in the log.
    Told,
    /// The driver's answer.
    Refused(CuResult),
}

/// A range that has a name in the image.
#[derive(Clone, Copy)]
struct Stored {
    block: u64,
    offset: u64,
    bytes: u64,
    /// The program has named memory so.
    is_asked: bool,
    /// And memory of another size.
    is_other: bool,
}

/// The program has built what it is about to load, and every block that the image has is to have its bytes: the first block that the program has got them of the
/// first that the image has, in the order in which they were allocated. Bytes that came back; 0 where nothing is to come back so.
///
/// Addresses differ and nothing else says which block is which, so nothing is written before all of it fits: as many blocks, each of the
/// same size on the same GPU, from the same place in the program where both places are known, and with small blocks at the same places. What came back is
/// read again and compared with its hashes.
pub fn by_order(driver: &'static Driver) -> Result<u64, Unrestored> {
    let Some(folder) = process::settings().restore.as_deref() else { return Ok(0) };
    if process::settings().restore_by_order != Toggle::On {
        return Ok(0);
    }
    let mut state = STATE.lock();
    if matches!(*state, State::Closed) {
        *state = read(folder);
    }
    let State::Open(source) = &mut *state else { return Err(Unrestored::Told) };
    if source.is_ordered {
        warn("nothing comes back by order a second time");
        return Err(Unrestored::Told);
    }
    if capture::under_way() {
        return Err(Unrestored::Refused(CuResult::STREAM_CAPTURE_UNSUPPORTED));
    }
    let from = format!("generation {} in {}", source.reader.manifest().generation, folder.display());
    let failed = |why: String| {
        warn(&why);
        Unrestored::Told
    };
    let opened = open::opened()
        .ok_or_else(|| failed(format!("nothing comes back from {from}: the program has no block of the pool yet")))?;
    // Not while the program is stopped for an image, when copies of its memory are being made room for.
    let pairs = {
        let _inside = gate::enter_by_hand();
        paired(opened, &source.reader)
    };
    let pairs = pairs.map_err(|why| failed(format!("nothing comes back from {from}: {why}")))?;
    source.is_ordered = true;
    let begun = Instant::now();
    let mut loaded = 0;
    let anything = |why: String| failed(format!("{why}; the program's memory holds anything now"));
    for (block, id) in &pairs {
        let Block { address, bytes, owner, home, .. } = *block;
        // Nothing moves meanwhile.
        let _inside = gate::enter_by_hand();
        let arrived = Shuttle::for_bytes(driver, owner, home, bytes).and_then(|mut shuttle| {
            shuttle.wait_for_context()?;
            shuttle.load(&source.reader, *id, 0, address, bytes)?;
            shuttle.has_arrived(&source.reader, *id, address)
        });
        match arrived {
            // Told as it comes: what fails later leaves what came before.
            Ok(true) => {
                loaded += bytes;
                source.blocks += 1;
                source.bytes += bytes;
            }
            Ok(false) => {
                return Err(anything(format!(
                    "{bytes} bytes at {address:#x} are not what {from} has when they are read again"
                )));
            }
            Err(why) => {
                return Err(anything(format!("{bytes} bytes at {address:#x} did not come back from {from}: {why}")));
            }
        }
    }
    source.is_back = true;
    tracing::info!(
        target: "gpupool::memory", about = "restore",
        "{} blocks are back by their order, {} from {from}, in {:.2} s; each was read again and compared with its hashes",
        pairs.len(), format_size(loaded), begun.elapsed().as_secs_f64()
    );
    Ok(loaded)
}

/// Which block gets the bytes of which block of the image.
fn paired(opened: &Opened, reader: &Reader) -> Result<Vec<(Block, u64)>, String> {
    // One that no small block stands on any more is there for a while or not, as it comes.
    opened.pool.free_empty_slabs();
    let mut blocks: Vec<Block> = opened.pool.stretches().into_iter().map(|(block, _)| block).collect();
    blocks.retain(|block| !copies::is_copy(block));
    blocks.sort_by_key(|block| block.id);
    let mut stored: Vec<&About> = reader.manifest().blocks.iter().map(|block| &block.about).collect();
    stored.retain(|about| about.id < OWN);
    stored.sort_by_key(|about| about.id);
    for (number, (block, about)) in (1..).zip(blocks.iter().zip(&stored)) {
        let is = |what: &str, now: String, was: String| {
            Err(format!(
                "the order differs at block {number} of {}: {what} is {now}, and {was} in the image",
                stored.len()
            ))
        };
        if block.bytes != about.bytes {
            return is("its size", size(block.bytes), size(about.bytes));
        }
        if Some(block.home) != about.home {
            return is("its GPU", block.home.to_string(), about.home.map_or("none".to_owned(), |gpu| gpu.to_string()));
        }
        let site = blocks::site_of(block);
        let is_known = !site.is_empty() && !about.site.is_empty() && !about.site.starts_with(GUESSED);
        if is_known && site != about.site {
            return is("the place that asked for it", site, about.site.clone());
        }
        if blocks::small_in(opened, block) != about.small {
            return is("where small blocks lie in it", "one way".to_owned(), "another".to_owned());
        }
    }
    if blocks.len() != stored.len() {
        let at = blocks.len().min(stored.len());
        let next = blocks.get(at).map(|block| block.bytes).or(stored.get(at).map(|about| about.bytes)).unwrap_or(0);
        return Err(format!(
            "the order differs at block {}: the program has {} blocks, and the image {}; the first that only one of them has is of {}",
            at + 1,
            blocks.len(),
            stored.len(),
            size(next)
        ));
    }
    Ok(blocks.into_iter().zip(stored).map(|(block, about)| (block, about.id)).collect())
}

fn size(bytes: u64) -> String {
    format!("{bytes} bytes ({})", format_size(bytes))
}

/// The image.
struct Source {
    reader: Reader,
    names: BTreeMap<String, Stored>,
    blocks: u64,
    bytes: u64,
    /// What was to come back by order was asked for.
    is_ordered: bool,
    /// All of it did.
    is_back: bool,
}

enum State {
    /// Nobody has asked.
    Closed,
    Open(Box<Source>),
    /// It cannot be opened, which was told.
    Failed,
}

/// Held while memory comes back: one range at a time.
static STATE: Mutex<State> = Mutex::new(State::Closed);

/// Brings back what the image has by this name, if there is an image and it was not asked for before.
pub fn by_name(driver: &'static Driver, named: &Named, block: &Block) -> Result<(), Unrestored> {
    let Some(folder) = process::settings().restore.as_deref() else { return Ok(()) };
    let mut state = STATE.lock();
    if matches!(*state, State::Closed) {
        *state = read(folder);
    }
    let State::Open(source) = &mut *state else { return Err(Unrestored::Told) };
    let Named { name, address, bytes, .. } = named;
    let generation = source.reader.manifest().generation;
    let from = format!("generation {generation} in {}", folder.display());
    let Some(stored) = source.names.get_mut(name) else {
        warn(&format!("`{name}` did not come back: {from} has no memory of that name"));
        return Err(Unrestored::Told);
    };
    if stored.is_asked {
        return Ok(());
    }
    if stored.bytes != *bytes {
        stored.is_other = true;
        let (is, was) = (format_size(*bytes), format_size(stored.bytes));
        warn(&format!(
            "`{name}` did not come back: it has {bytes} bytes ({is}), and {} ({was}) in {from}",
            stored.bytes
        ));
        return Err(Unrestored::Told);
    }
    if capture::under_way() {
        return Err(Unrestored::Refused(CuResult::STREAM_CAPTURE_UNSUPPORTED));
    }
    stored.is_asked = true;
    let Stored { block: id, offset, .. } = *stored;
    let begun = Instant::now();
    // Nothing moves meanwhile.
    let _inside = gate::enter_by_hand();
    let loaded = Shuttle::for_bytes(driver, block.owner, block.home, *bytes).and_then(|shuttle| {
        shuttle.wait_for_context()?;
        shuttle.load(&source.reader, id, offset, *address, *bytes)
    });
    if let Err(failed) = loaded {
        warn(&format!(
            "`{name}` did not come back from {from}, and its {} hold anything now: {failed}",
            format_size(*bytes)
        ));
        return Err(Unrestored::Told);
    }
    source.blocks += 1;
    source.bytes += bytes;
    log::emit(|| {
        let took = begun.elapsed();
        let event = BlockRestore {
            address: *address,
            bytes: *bytes,
            name: name.clone(),
            generation,
            microseconds: took.as_micros() as u64,
        };
        (event, format!("`{name}` is back: {} from {from}", format_size(*bytes)))
    });
    Ok(())
}

fn read(folder: &Path) -> State {
    let opened = of_job(folder).unwrap_or_else(|| of_one(folder));
    let reader = match opened {
        Ok(reader) => reader,
        Err(why) => {
            warn(&format!("nothing comes back: {why}"));
            return State::Failed;
        }
    };
    for error in reader.skipped() {
        warn(&format!("a newer image is passed over: {error}"));
    }
    let mut names = BTreeMap::new();
    for block in &reader.manifest().blocks {
        for named in &block.about.names {
            let (offset, bytes) = (named.offset, named.bytes);
            let stored = Stored { block: block.about.id, offset, bytes, is_asked: false, is_other: false };
            names.insert(named.name.clone(), stored);
        }
    }
    State::Open(Box::new(Source { reader, names, blocks: 0, bytes: 0, is_ordered: false, is_back: false }))
}

/// How many ranks the launcher says there are of what an image is of, the ranks of a host or of the whole job; and whether that is so for certain: of several hosts the counts may differ.
fn launched(job: &Job) -> Option<(u64, bool)> {
    let rank = process::rank()?;
    let (here, all) = (rank.ranks.map(u64::from), rank.overall_ranks.map(u64::from));
    match (here, all) {
        (_, Some(all)) if !job.hosts.is_empty() => Some((all, true)),
        (Some(here), all) if job.hosts.is_empty() => Some((here, all.is_none_or(|all| all == here))),
        (None, Some(all)) => Some((all, false)),
        _ => None,
    }
}

/// Why an image of a job has not all of its ranks: what each of them comes to alike. Of what is not certain there is a line, and of ranks that nobody is now.
fn lacks_ranks(job: &Job) -> Option<String> {
    let count = job.ranks.len() as u64;
    if let Some((ranks, true)) = launched(job).filter(|(ranks, _)| *ranks < count) {
        warn(&format!(
            "image {} of the job is of {count} ranks, and the launcher says that there are {ranks}: nothing of the others comes back",
            job.generation
        ));
    }
    let (ranks, is_certain) = launched(job).filter(|(ranks, _)| *ranks > count)?;
    let why = format!("it is of {count} ranks, and the launcher says that there are {ranks}");
    if !is_certain {
        warn(&format!("image {} of the job may have a part of its ranks: {why}", job.generation));
    }
    is_certain.then_some(why)
}

/// The newest image of one process, or the one that is asked for. That of a rank is for that rank alone: its folder would give every other one the same memory.
fn of_one(folder: &Path) -> Result<Reader, String> {
    let which = process::settings().restore_generation.map_or(Which::Newest, Which::Number);
    let reader = Reader::open(folder, which, 0).map_err(|error| error.to_string())?;
    let manifest = reader.manifest();
    let image = format!("image {} in {}", manifest.generation, folder.display());
    let why = match (manifest.meta.rank(), image::rank()) {
        (None, None) => return Ok(reader),
        (Some(was), Some(own)) if was == own => return Ok(reader),
        (Some(was), Some(own)) if was.number != own.number => {
            return Err(format!(
                "{image} is of rank {was} alone, and this process is rank {own}: gpupool checkpoint --job writes images of all ranks"
            ));
        }
        (Some(was), Some(own)) => format!("is of rank {was}, and this process is rank {own}"),
        (Some(was), None) => format!("is of rank {was}, and this process is no rank of several"),
        (None, Some(own)) => format!(
            "is of a process that was no rank of several, and this process is rank {own}: each rank that reads it comes to the same memory"
        ),
    };
    warn(&format!("{image} {why}"));
    Ok(reader)
}

/// This rank's part of the newest whole image of a job, or of the one that is asked for; `None`: the folder has none of a job.
fn of_job(folder: &Path) -> Option<Result<Reader, String>> {
    let jobs = gpupool_store::jobs(folder).ok().filter(|jobs| !jobs.is_empty())?;
    let wanted = process::settings().restore_generation;
    let mut found = None;
    for listed in jobs.into_iter().filter(|listed| wanted.is_none_or(|wanted| wanted == listed.generation)) {
        let why = match listed.told {
            Ok(job) => match lacks_ranks(&job) {
                Some(why) => format!("{}: image {}: {why}", folder.display(), job.generation),
                None => {
                    found = Some(job);
                    break;
                }
            },
            Err(error) => error.to_string(),
        };
        warn(&format!("an image of the job is passed over: {why}"));
    }
    let Some(job) = found else {
        return Some(Err(match wanted {
            Some(wanted) => format!("{}: it has no image {wanted} of the job that is whole", folder.display()),
            None => format!("{}: no image of the job there is whole", folder.display()),
        }));
    };
    let count = job.ranks.len();
    // Of several hosts each has a rank of the same number there, so theirs are those of the whole job.
    let rank = process::rank();
    let own = match job.hosts.len() {
        0 => Some(rank.map_or(0, |rank| rank.number)),
        _ => rank.and_then(|rank| rank.overall),
    };
    let Some(own) = own else {
        return Some(Err(format!(
            "{}: it is of ranks on {} hosts, and no launcher has given this process its number in a whole job (RANK, SLURM_PROCID and the like)",
            folder.display(),
            job.hosts.len()
        )));
    };
    let Some(image) = job.ranks.iter().find(|image| image.rank == own) else {
        return Some(Err(format!("{}: it is of {count} ranks, and this process is rank {own}", folder.display())));
    };
    if count > 1 && rank.is_none() {
        return Some(Err(format!(
            "{}: it is of {count} ranks, and no launcher has given this process a number (LOCAL_RANK and the like)",
            folder.display()
        )));
    }
    let reader = Reader::open(&rank_folder(folder, own), Which::Number(image.generation), 0);
    Some(reader.map_err(|error| error.to_string()))
}

fn warn(what: &str) {
    tracing::warn!(target: "gpupool::memory", about = "restore", "GPUPOOL_RESTORE: {what}");
}

/// At the end of the process: what came back, and what nobody asked for.
pub fn judge() {
    let Some(folder) = process::settings().restore.as_deref() else { return };
    let Some(state) = STATE.try_lock() else { return };
    let names = |source: &Source, is_other: bool| -> Vec<String> {
        let left = source.names.iter().filter(|(_, stored)| !stored.is_asked && stored.is_other == is_other);
        left.map(|(name, _)| name.clone()).collect()
    };
    let (generation, blocks, bytes, left, others) = match &*state {
        State::Open(source) => {
            let generation = source.reader.manifest().generation;
            // What came back as a whole is asked for by no name.
            let names = |is_other| if source.is_back { Vec::new() } else { names(source, is_other) };
            (generation, source.blocks, source.bytes, names(false), names(true))
        }
        // It was told why.
        State::Failed => return,
        State::Closed => (0, 0, 0, Vec::new(), Vec::new()),
    };
    let by_order = process::settings().restore_by_order == Toggle::On;
    let what = match blocks {
        _ if by_order => "blocks and named ranges",
        1 => "named range",
        _ => "named ranges",
    };
    let text = format!("{blocks} {what} came back, {} in all", format_size(bytes));
    let mut told = text.clone();
    if let [first, ..] = &left[..] {
        told += &format!("; {} that the image has were not asked for, as `{first}`", left.len());
    }
    if let [first, ..] = &others[..] {
        told += &format!("; {} have another size now, as `{first}`", others.len());
    }
    if generation == 0 && by_order {
        warn(
            "nothing came back: the program has not said that it has built what is to come back (gpupool_restore, gpupool.restore)",
        );
    } else if generation == 0 {
        warn("nothing came back: the program has named no memory (gpupool_name, gpupool.name)");
    } else if told != text {
        warn(&told);
    }
    log::emit(|| {
        let folder = folder.display().to_string();
        (ProgramRestore { folder, generation, blocks, bytes, not_asked: left.len() as u64 }, text)
    });
}
