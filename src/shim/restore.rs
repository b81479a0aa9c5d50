//! How does memory that the program names come back from an image (`GPUPOOL_RESTORE`)?
//!
//! The newest whole generation is opened when the first name is asked for, and stays the one that is meant. Each name comes back once: a program that
//! gives it to other memory later wants the name, and not its old contents. Nothing is silent: what did not come back is an error of that
//! call and a line, and at the end it is told how much did.

use crate::gate;
use crate::image::Shuttle;
use crate::log;
use crate::process;
use crate::serve::memory::names::Named;
use crate::watch::capture;
use gpupool_config::format_size;
use gpupool_cuda::{CuResult, Driver};
use gpupool_events::{BlockRestore, ProgramRestore};
use gpupool_pool::Block;
use gpupool_store::{Reader, Which};
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

/// The image.
struct Source {
    reader: Reader,
    names: BTreeMap<String, Stored>,
    blocks: u64,
    bytes: u64,
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
        *state = open(folder);
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
    let loaded = Shuttle::for_bytes(driver, block.owner, block.home, *bytes).and_then(|mut shuttle| {
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

fn open(folder: &Path) -> State {
    let reader = match Reader::open(folder, Which::Newest, 0) {
        Ok(reader) => reader,
        Err(error) => {
            warn(&format!("nothing comes back: {error}"));
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
    State::Open(Box::new(Source { reader, names, blocks: 0, bytes: 0 }))
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
            (generation, source.blocks, source.bytes, names(source, false), names(source, true))
        }
        // It was told why.
        State::Failed => return,
        State::Closed => (0, 0, 0, Vec::new(), Vec::new()),
    };
    let text = format!("{blocks} named ranges came back, {} in all", format_size(bytes));
    let mut told = text.clone();
    if let [first, ..] = &left[..] {
        told += &format!("; {} that the image has were not asked for, as `{first}`", left.len());
    }
    if let [first, ..] = &others[..] {
        told += &format!("; {} have another size now, as `{first}`", others.len());
    }
    if generation == 0 {
        warn("nothing came back: the program has named no memory (gpupool_name, gpupool.name)");
    } else if told != text {
        warn(&told);
    }
    log::emit(|| {
        let folder = folder.display().to_string();
        (ProgramRestore { folder, generation, blocks, bytes, not_asked: left.len() as u64 }, text)
    });
}
