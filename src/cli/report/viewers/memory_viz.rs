//! A memory snapshot as PyTorch's viewer (`https://pytorch.org/memory_viz`, `torch/cuda/_memory_viz.py`) opens it: a pickle of segments
//! with their blocks as they are at the end, and of what happened before.
//!
//! A device of the viewer is a place: a GPU, or the host. Where several processes use one place, each has addresses of its own, which are
//! told apart by their upper bits ([`PROCESS`]), and is a stream of its own. The log tells which blocks there are and how much each place
//! holds, and not which freed chunks it holds: memory that a freed block had stays a segment as long as the place holds so much, and what
//! it holds beyond all of them is one segment of its own ([`KEPT`]).
//!
//! The viewer goes back from the end, so what is kept of a long log is its end ([`TRACE`] entries, a part for each log), as with PyTorch's
//! own recorder. Logs are read one after the other, and what happened is put in the order of time in the end.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, Write};

use gpupool_events::{Event, Record};

use super::frames::{Frame, frames};
use super::pickle::Pickle;
use crate::report::model::{Logs, Process, labels};

/// Entries of the trace that are kept, of all processes together: about 25 MB in memory and in the file.
const TRACE: usize = 1 << 19;
/// What blocks and segments are made of.
const FRAME: u64 = 2 << 20;
/// Addresses of the next process begin so much higher. The viewer's numbers have 53 bits, but all of these are multiples of 512.
const PROCESS: u64 = 1 << 48;
/// Where the segment begins of which it is not known which blocks had it.
const KEPT: u64 = 1 << 47;
/// Places of a process that are kept apart. A machine has a few; a log may say anything.
const PLACES: usize = 64;
/// Names of blocks that are kept apart.
const NAMES: usize = 2048;
/// How far back the beginning of a block is looked for that gets a name.
const RECENT: usize = 4096;
/// Blocks that are known at a time.
const BLOCKS: usize = 1 << 20;

/// What was read so far.
#[derive(Default)]
pub struct MemoryViz {
    /// How many logs share the trace.
    logs: usize,
    /// By [`Process::met`].
    processes: Vec<Program>,
    names: Vec<String>,
    left_out: u64,
    blocks_left_out: u64,
}

/// One process.
#[derive(Default)]
struct Program {
    blocks: HashMap<u64, Block>,
    places: Vec<Place>,
    trace: VecDeque<Entry>,
}

/// A block as the trace last told of it.
#[derive(Clone, Default)]
struct Block {
    site: Option<u64>,
    label: Option<usize>,
    /// Bytes at each place.
    parts: Vec<(usize, u64)>,
}

#[derive(Default)]
struct Place {
    name: String,
    /// Ranges that are segments, each with its end.
    mapped: BTreeMap<u64, u64>,
    /// Parts of blocks that lie here, by address, with their bytes.
    live: BTreeMap<u64, u64>,
    /// Ranges of frames in segments that no block has, each with its end. Found among the blocks whenever some are to go, they took longer
    /// than reading the log.
    free: BTreeMap<u64, u64>,
    /// Bytes of these ranges, and of the frames in them that blocks have.
    mapped_bytes: u64,
    live_bytes: u64,
    /// Bytes of the segment at [`KEPT`], and of the block that stands there for what the place uses beyond the blocks that are known.
    kept: u64,
    unknown: u64,
}

#[derive(Clone, Copy)]
struct Entry {
    action: Action,
    process: u32,
    place: u32,
    address: u64,
    bytes: u64,
    /// Number of the place in the program.
    site: Option<u64>,
    label: Option<usize>,
    microseconds: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Action {
    Allocate,
    Free,
    Map,
    Unmap,
    OutOfMemory,
}

/// How much a file holds, for whoever is told of it.
pub struct Written {
    pub devices: Vec<String>,
    /// Entries of the trace that were too many.
    pub left_out: u64,
    /// Blocks that were too many.
    pub blocks_left_out: u64,
    /// The log told of no block.
    pub is_coarse: bool,
}

impl MemoryViz {
    /// Of so many logs.
    pub fn new(logs: usize) -> MemoryViz {
        MemoryViz { logs, ..MemoryViz::default() }
    }

    /// Takes in a record.
    pub fn look(&mut self, process: &Process, record: &Record) {
        while self.processes.len() <= process.met {
            self.processes.push(Program::default());
        }
        let now = Now { process: process.met, microseconds: microseconds(record.t) };
        match &record.event {
            Event::BlockAllocate(made) => {
                self.free(now, made.address);
                if self.processes[now.process].blocks.len() >= BLOCKS {
                    self.blocks_left_out += 1;
                    return;
                }
                // Where the rest lies is said by the next record.
                let far = made.on_peers.saturating_add(made.on_host);
                let parts = self.place(now, &format!("gpu{}", made.home)).zip(made.bytes.checked_sub(far));
                let block = Block { site: made.site, label: None, parts: Vec::new() };
                self.processes[now.process].blocks.insert(made.address, block);
                self.lies(now, made.address, parts.into_iter().collect());
            }
            Event::BlockFree(freed) => self.free(now, freed.address),
            Event::BlockPlaced(placed) => {
                let parts = placed.places.iter().filter_map(|part| Some((self.place(now, &part.place)?, part.bytes)));
                let parts: Vec<(usize, u64)> = parts.collect();
                self.lies(now, placed.address, parts);
            }
            Event::BlockLabel(named) => {
                let label = named.label.as_ref().and_then(|name| self.name(name));
                self.label(now, named.address, label);
            }
            Event::PoolLevel(level) => {
                for told in &level.places {
                    let Some(place) = self.place(now, &told.place) else { continue };
                    self.holds(now, place, told.held.max(told.used).min(KEPT), told.used);
                }
            }
            Event::PoolRefuse(refused) => {
                let Some(place) = self.place(now, &format!("gpu{}", refused.home)) else { return };
                let free = refused.bytes.saturating_sub(refused.missing.unwrap_or(refused.bytes));
                self.say(now, place, Action::OutOfMemory, free, refused.bytes, &Block::default());
            }
            _ => {}
        }
    }

    /// Writes the file.
    pub fn write(&self, logs: &Logs, out: impl Write) -> io::Result<Written> {
        let devices = Devices::new(&self.processes, logs);
        let labels = labels(logs);
        let mut file =
            File { pickle: Pickle::new(out)?, stacks: HashMap::new(), names: &self.names, logs, labels: &labels };
        let mut snapshot = file.pickle.dictionary()?;
        file.pickle.key(&mut snapshot, "segments")?;
        let mut segments = file.pickle.list()?;
        for (met, program) in self.processes.iter().enumerate() {
            for (index, place) in program.places.iter().enumerate() {
                let Some(device) = devices.of(met, index) else { continue };
                for segment in place.segments(met, &program.blocks) {
                    file.pickle.item(&mut segments)?;
                    file.segment(met, device, &segment)?;
                }
            }
        }
        file.pickle.end(segments)?;
        file.pickle.key(&mut snapshot, "device_traces")?;
        let mut traces = file.pickle.list()?;
        let in_order = self.in_order();
        for device in 0..devices.names.len() {
            file.pickle.item(&mut traces)?;
            let mut trace = file.pickle.list()?;
            let of_device = |entry: &&Entry| devices.of(entry.process as usize, entry.place as usize) == Some(device);
            for entry in in_order.iter().copied().filter(of_device) {
                file.entry(&mut trace, entry)?;
            }
            file.pickle.end(trace)?;
        }
        file.pickle.end(traces)?;
        // The viewer shows these as they are.
        file.pickle.key(&mut snapshot, "allocator_settings")?;
        let mut settings = file.pickle.dictionary()?;
        file.pickle.key(&mut settings, "written_by")?;
        file.pickle.string(&format!("gpupool {}", gpupool_config::VERSION))?;
        for (device, name) in devices.names.iter().enumerate() {
            file.pickle.key(&mut settings, &format!("device {device}"))?;
            file.pickle.string(name)?;
        }
        for process in &logs.processes {
            file.pickle.key(&mut settings, &format!("stream {}", process.met))?;
            file.pickle.string(&file.labels[position(logs, process.met)].clone())?;
        }
        if self.left_out > 0 {
            file.pickle.key(&mut settings, "earlier trace entries left out")?;
            file.pickle.number(self.left_out)?;
        }
        file.pickle.end(settings)?;
        file.pickle.end(snapshot)?;
        file.pickle.finish()?.flush()?;
        let is_coarse = !in_order.iter().any(|entry| entry.action == Action::Allocate && entry.address != KEPT);
        Ok(Written {
            devices: devices.names,
            left_out: self.left_out,
            blocks_left_out: self.blocks_left_out,
            is_coarse,
        })
    }

    /// What happened in all processes, by time; in each of them in the order in which it was told, which threads mix up a little.
    fn in_order(&self) -> Vec<&Entry> {
        let mut all: Vec<(u64, &Entry)> = Vec::new();
        for program in &self.processes {
            let mut latest = 0;
            all.extend(program.trace.iter().map(|entry| {
                latest = entry.microseconds.max(latest);
                (latest, entry)
            }));
        }
        all.sort_by_key(|(time, _)| *time);
        all.into_iter().map(|(_, entry)| entry).collect()
    }

    fn name(&mut self, name: &str) -> Option<usize> {
        if let Some(known) = self.names.iter().position(|known| known == name) {
            return Some(known);
        }
        (self.names.len() < NAMES).then(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        })
    }

    /// The number of a place of this process.
    fn place(&mut self, now: Now, name: &str) -> Option<usize> {
        let places = &mut self.processes[now.process].places;
        if let Some(known) = places.iter().position(|place| place.name == name) {
            return Some(known);
        }
        if places.len() >= PLACES {
            return None;
        }
        places.push(Place { name: name.to_owned(), ..Place::default() });
        Some(places.len() - 1)
    }

    /// A block lies there now. The viewer knows none that changes: at each place where it did not lie so it begins, and where it does not
    /// any more it ends.
    fn lies(&mut self, now: Now, address: u64, parts: Vec<(usize, u64)>) {
        // Others would be in each other's way; there are no such blocks.
        let fits = |bytes: u64| bytes > 0 && address.saturating_add(bytes) <= KEPT - FRAME;
        let parts: Vec<(usize, u64)> = parts.into_iter().filter(|(_, bytes)| fits(*bytes)).collect();
        let Some(block) = self.processes[now.process].blocks.get_mut(&address) else { return };
        let before = std::mem::replace(&mut block.parts, parts.clone());
        let block = block.clone();
        for part in before.iter().filter(|part| !parts.contains(part)) {
            self.ends_at(now, part.0, address, &block);
        }
        for &(place, bytes) in parts.iter().filter(|part| !before.contains(part)) {
            let (start, end) = frames_of(address, bytes);
            self.map(now, place, start, end);
            let of = &mut self.processes[now.process].places[place];
            let (from, to) = of.alone(address, bytes);
            of.live_bytes += to - from;
            of.live.insert(address, bytes);
            cut(&mut of.free, start, end);
            self.say(now, place, Action::Allocate, address, bytes, &block);
        }
    }

    fn free(&mut self, now: Now, address: u64) {
        let Some(block) = self.processes[now.process].blocks.remove(&address) else { return };
        for &(place, _) in &block.parts {
            self.ends_at(now, place, address, &block);
        }
    }

    fn ends_at(&mut self, now: Now, place: usize, address: u64, block: &Block) {
        let of = &mut self.processes[now.process].places[place];
        if let Some(bytes) = of.live.remove(&address) {
            let (from, to) = of.alone(address, bytes);
            of.live_bytes = of.live_bytes.saturating_sub(to - from);
            if from < to {
                join(&mut of.free, from, to);
            }
            self.say(now, place, Action::Free, address, bytes, block);
        }
    }

    /// A block has a name, which the viewer has of its beginning: mostly one of the last entries.
    fn label(&mut self, now: Now, address: u64, label: Option<usize>) {
        let Some(block) = self.processes[now.process].blocks.get_mut(&address) else { return };
        block.label = label;
        let is_its = |entry: &&mut Entry| entry.address == address && entry.action == Action::Allocate;
        let trace = &mut self.processes[now.process].trace;
        trace.iter_mut().rev().take(RECENT).filter(is_its).for_each(|entry| entry.label = label);
    }

    /// Makes segments of what is none in this range, of the memory that is kept as far as there is any.
    fn map(&mut self, now: Now, place: usize, start: u64, end: u64) {
        let missing = gaps(&self.processes[now.process].places[place].mapped, start, end);
        for (start, end) in missing {
            let Place { kept, unknown, .. } = self.processes[now.process].places[place];
            self.keep(now, place, kept.saturating_sub(end - start).max(unknown), unknown);
            let of = &mut self.processes[now.process].places[place];
            of.mapped_bytes += end - start;
            join(&mut of.mapped, start, end);
            self.say(now, place, Action::Map, start, end - start, &Block::default());
        }
    }

    /// The place holds and uses so much now.
    fn holds(&mut self, now: Now, place: usize, held: u64, used: u64) {
        let of = &self.processes[now.process].places[place];
        let unknown = used.saturating_sub(of.live_bytes);
        // Of what no block has, the highest goes first: blocks are placed low.
        for (start, end) in of.highest_free((of.mapped_bytes + unknown).saturating_sub(held)) {
            let of = &mut self.processes[now.process].places[place];
            // In a log that contradicts itself blocks overlap, and what one of them leaves may be gone already.
            of.mapped_bytes = of.mapped_bytes.saturating_sub(end - start);
            cut(&mut of.mapped, start, end);
            cut(&mut of.free, start, end);
            self.say(now, place, Action::Unmap, start, end - start, &Block::default());
        }
        let mapped = self.processes[now.process].places[place].mapped_bytes;
        self.keep(now, place, held.saturating_sub(mapped).max(unknown), unknown);
    }

    /// So much is held of which it is not known which blocks had it, and so much of that is used by blocks of which the log does not tell.
    fn keep(&mut self, now: Now, place: usize, bytes: u64, unknown: u64) {
        let of = &mut self.processes[now.process].places[place];
        let before = std::mem::replace(&mut of.kept, bytes);
        let unknown_before = std::mem::replace(&mut of.unknown, unknown);
        let changes = unknown != unknown_before;
        if changes && unknown_before > 0 {
            self.say(now, place, Action::Free, KEPT, unknown_before, &Block::default());
        }
        let (action, from, to) =
            if bytes > before { (Action::Map, before, bytes) } else { (Action::Unmap, bytes, before) };
        if from < to {
            self.say(now, place, action, KEPT + from, to - from, &Block::default());
        }
        if changes && unknown > 0 {
            self.say(now, place, Action::Allocate, KEPT, unknown, &Block::default());
        }
    }

    fn say(&mut self, now: Now, place: usize, action: Action, address: u64, bytes: u64, of: &Block) {
        let most = TRACE / self.logs.max(self.processes.len());
        let trace = &mut self.processes[now.process].trace;
        if trace.len() >= most {
            trace.pop_front();
            self.left_out += 1;
        }
        let (process, place) = (now.process as u32, place as u32);
        let Now { microseconds, .. } = now;
        trace.push_back(Entry { action, process, place, address, bytes, site: of.site, label: of.label, microseconds });
    }
}

#[derive(Clone, Copy)]
struct Now {
    process: usize,
    microseconds: u64,
}

fn microseconds(seconds: f64) -> u64 {
    // A time that makes no sense is 0 in an integer.
    (seconds * 1e6) as u64
}

/// A segment as it is at the end.
struct Segment<'a> {
    address: u64,
    bytes: u64,
    /// In address order and next to each other: address, bytes, and the block, if it is one.
    blocks: Vec<(u64, u64, Option<&'a Block>)>,
}

impl Place {
    /// The highest ranges of segments that no block has, of so many bytes together as far as there are any.
    fn highest_free(&self, mut bytes: u64) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        for (&start, &end) in self.free.iter().rev() {
            if bytes == 0 {
                break;
            }
            let taken = bytes.min(end - start);
            found.push((end - taken, end));
            bytes -= taken;
        }
        found
    }

    fn segments<'a>(&self, process: usize, blocks: &'a HashMap<u64, Block>) -> Vec<Segment<'a>> {
        let offset = PROCESS * process as u64;
        let mut segments = Vec::new();
        for (&start, &end) in &self.mapped {
            let (mut parts, mut at) = (Vec::new(), start);
            for (&address, &bytes) in self.live.range(start..end) {
                // Blocks of a log that contradicts itself may overlap.
                let (from, to) = (address.max(at), address.saturating_add(bytes).min(end));
                if from < to {
                    if at < from {
                        parts.push((offset + at, from - at, None));
                    }
                    parts.push((offset + from, to - from, blocks.get(&address)));
                    at = to;
                }
            }
            if at < end {
                parts.push((offset + at, end - at, None));
            }
            segments.push(Segment { address: offset + start, bytes: end - start, blocks: parts });
        }
        if self.kept > 0 {
            segments.push(Segment { address: offset + KEPT, bytes: self.kept, blocks: self.unknown(offset) });
        }
        segments
    }

    /// The frames that a part of a block has and no other block, whether it is one of them yet or not any more.
    fn alone(&self, address: u64, bytes: u64) -> (u64, u64) {
        let (start, end) = frames_of(address, bytes);
        let before = self.live.range(..address).next_back().is_some_and(|(at, bytes)| at + bytes > start);
        let behind = self.live.range(address + 1..).next().is_some_and(|(at, _)| *at < end);
        let from = if before { start + FRAME } else { start };
        (from, if behind { end - FRAME } else { end }.max(from))
    }

    /// The segment of which it is not known which blocks had it.
    fn unknown<'a>(&self, offset: u64) -> Vec<(u64, u64, Option<&'a Block>)> {
        static UNKNOWN: Block = Block { site: None, label: None, parts: Vec::new() };
        let parts = [(0, self.unknown, Some(&UNKNOWN)), (self.unknown, self.kept - self.unknown, None)];
        let parts = parts.into_iter().filter(|(_, bytes, _)| *bytes > 0);
        parts.map(|(at, bytes, block)| (offset + KEPT + at, bytes, block)).collect()
    }
}

/// Ranges by their starts: what of `start..end` is in none.
fn gaps(ranges: &BTreeMap<u64, u64>, start: u64, end: u64) -> Vec<(u64, u64)> {
    let mut at = start;
    let mut gaps = Vec::new();
    let before = ranges.range(..start).next_back().filter(|(_, until)| **until > start);
    for (&from, &until) in before.into_iter().chain(ranges.range(start..end)) {
        if at < from {
            gaps.push((at, from));
        }
        at = at.max(until);
    }
    if at < end {
        gaps.push((at, end));
    }
    gaps
}

/// Adds a range; those that touch become one.
fn join(ranges: &mut BTreeMap<u64, u64>, mut start: u64, mut end: u64) {
    while let Some((&from, &until)) = ranges.range(..=end).next_back().filter(|(_, until)| **until >= start) {
        ranges.remove(&from);
        (start, end) = (start.min(from), end.max(until));
    }
    ranges.insert(start, end);
}

/// Takes out of them what lies between.
fn cut(ranges: &mut BTreeMap<u64, u64>, start: u64, end: u64) {
    while let Some((&from, &until)) = ranges.range(..end).next_back().filter(|(_, until)| **until > start) {
        ranges.remove(&from);
        if end < until {
            ranges.insert(end, until);
        }
        if from < start {
            ranges.insert(from, start);
        }
    }
}

/// The frames that a range of addresses lies in.
fn frames_of(address: u64, bytes: u64) -> (u64, u64) {
    (address / FRAME * FRAME, (address + bytes).div_ceil(FRAME) * FRAME)
}

/// The devices of the viewer.
struct Devices {
    /// What each is.
    names: Vec<String>,
    /// By process and place.
    of: Vec<Vec<usize>>,
}

/// What tells one device from another, in the order in which they come.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// The machine, where the log names it.
    host: Option<String>,
    is_gpu: Reverse<bool>,
    /// `CUDA_VISIBLE_DEVICES`: GPUs have other numbers by another list.
    visible: Option<String>,
    number: u32,
    name: String,
}

impl Devices {
    /// Places of the same name are one device if both processes were on one host and shown the same GPUs. GPUs come first, in order.
    fn new(programs: &[Program], logs: &Logs) -> Devices {
        let key = |met: usize, place: &Place| {
            let process = &logs.processes[position(logs, met)];
            let is_gpu = place.name.starts_with("gpu");
            let visible = process.init.as_ref().and_then(|init| init.visible_devices.clone());
            let digits = place.name.trim_start_matches(|letter: char| !letter.is_ascii_digit());
            Key {
                host: process.start.as_ref().and_then(|start| start.host.clone()),
                is_gpu: Reverse(is_gpu),
                visible: visible.filter(|_| is_gpu),
                number: digits.parse().unwrap_or(u32::MAX),
                name: place.name.clone(),
            }
        };
        let keys = programs.iter().enumerate();
        let keys: Vec<Vec<Key>> =
            keys.map(|(met, program)| program.places.iter().map(|place| key(met, place)).collect()).collect();
        let mut all: Vec<Key> = keys.iter().flatten().cloned().collect();
        all.sort();
        all.dedup();
        let hosts = all.iter().any(|key| key.host != all[0].host);
        let views = all.iter().any(|key| key.is_gpu == all[0].is_gpu && key.visible != all[0].visible);
        let name = |Key { host, visible, name, .. }: &Key| {
            let visible = visible.as_ref().filter(|_| views).map(|list| format!(" (CUDA_VISIBLE_DEVICES={list})"));
            let host = host.as_ref().filter(|_| hosts).map(|host| format!(" of {host}"));
            format!("{name}{}{}", visible.unwrap_or_default(), host.unwrap_or_default())
        };
        let index = |key: &Key| all.binary_search(key).unwrap_or(0);
        Devices {
            names: all.iter().map(name).collect(),
            of: keys.iter().map(|of| of.iter().map(index).collect()).collect(),
        }
    }

    fn of(&self, process: usize, place: usize) -> Option<usize> {
        self.of.get(process)?.get(place).copied()
    }
}

/// Where a process stands in the list by now.
fn position(logs: &Logs, met: usize) -> usize {
    logs.processes.iter().position(|process| process.met == met).unwrap_or(0)
}

/// The file while it is written.
struct File<'a, W> {
    pickle: Pickle<W>,
    /// By process, place in the program and name: the number of the list of frames.
    stacks: HashMap<(usize, Option<u64>), u32>,
    names: &'a [String],
    logs: &'a Logs,
    labels: &'a [String],
}

impl<W: Write> File<'_, W> {
    fn segment(&mut self, met: usize, device: usize, segment: &Segment) -> io::Result<()> {
        let active = segment.blocks.iter().filter(|(_, _, block)| block.is_some()).map(|(_, bytes, _)| bytes).sum();
        let mut of = self.pickle.dictionary()?;
        for (name, value) in [
            ("device", device as u64),
            ("address", segment.address),
            ("total_size", segment.bytes),
            ("allocated_size", active),
            ("active_size", active),
            ("requested_size", active),
            ("stream", met as u64),
        ] {
            self.pickle.key(&mut of, name)?;
            self.pickle.number(value)?;
        }
        self.pickle.key(&mut of, "segment_type")?;
        self.pickle.string("large")?;
        self.pickle.key(&mut of, "frames")?;
        let none = self.pickle.list()?;
        self.pickle.end(none)?;
        self.pickle.key(&mut of, "blocks")?;
        let mut blocks = self.pickle.list()?;
        for &(address, bytes, block) in &segment.blocks {
            self.pickle.item(&mut blocks)?;
            let mut of = self.pickle.dictionary()?;
            for (name, value) in
                [("address", address), ("size", bytes), ("requested_size", if block.is_some() { bytes } else { 0 })]
            {
                self.pickle.key(&mut of, name)?;
                self.pickle.number(value)?;
            }
            self.pickle.key(&mut of, "state")?;
            self.pickle.string(if block.is_some() { "active_allocated" } else { "inactive" })?;
            self.pickle.key(&mut of, "frames")?;
            self.stack(met, block.map(|block| block.site))?;
            self.pickle.end(of)?;
        }
        self.pickle.end(blocks)?;
        self.pickle.end(of)
    }

    /// The frames of a block, or of what is none.
    fn stack(&mut self, met: usize, site: Option<Option<u64>>) -> io::Result<()> {
        let Some(site) = site else {
            let none = self.pickle.list()?;
            return self.pickle.end(none);
        };
        if let Some(number) = self.stacks.get(&(met, site)) {
            return self.pickle.again(*number);
        }
        let index = position(self.logs, met);
        let process = &self.logs.processes[index];
        let known = site.and_then(|site| process.holders.site_of(site)).map(frames).filter(|frames| !frames.is_empty());
        let mut all = known.unwrap_or_else(|| vec![Frame::words("a place that the log does not tell")]);
        all.push(Frame::words(&self.labels[index]));
        let mut list = self.pickle.list()?;
        for frame in all {
            self.pickle.item(&mut list)?;
            let mut of = self.pickle.dictionary()?;
            self.pickle.key(&mut of, "filename")?;
            self.pickle.string(&frame.file)?;
            self.pickle.key(&mut of, "line")?;
            self.pickle.number(u64::from(frame.line))?;
            self.pickle.key(&mut of, "name")?;
            self.pickle.string(&frame.function)?;
            self.pickle.end(of)?;
        }
        self.pickle.end(list)?;
        let number = self.pickle.remember()?;
        self.stacks.insert((met, site), number);
        Ok(())
    }

    fn entry(&mut self, trace: &mut super::pickle::Items, entry: &Entry) -> io::Result<()> {
        let met = entry.process as usize;
        let actions: &[&str] = match entry.action {
            Action::Allocate => &["alloc"],
            Action::Free => &["free_requested", "free_completed"],
            Action::Map => &["segment_map"],
            Action::Unmap => &["segment_unmap"],
            Action::OutOfMemory => &["oom"],
        };
        for action in actions {
            self.pickle.item(trace)?;
            let mut of = self.pickle.dictionary()?;
            self.pickle.key(&mut of, "action")?;
            self.pickle.string(action)?;
            let address = if entry.action == Action::OutOfMemory {
                ("device_free", entry.address)
            } else {
                ("addr", PROCESS * u64::from(entry.process) + entry.address)
            };
            for (name, value) in
                [address, ("size", entry.bytes), ("stream", met as u64), ("time_us", entry.microseconds)]
            {
                self.pickle.key(&mut of, name)?;
                self.pickle.number(value)?;
            }
            self.pickle.key(&mut of, "frames")?;
            let has_site = matches!(entry.action, Action::Allocate | Action::Free);
            self.stack(met, has_site.then_some(entry.site))?;
            // The viewer colours by these, and fails where none is `unknown`.
            if !self.names.is_empty() {
                self.pickle.key(&mut of, "category")?;
                self.pickle
                    .string(entry.label.and_then(|label| self.names.get(label)).map_or("unknown", String::as_str))?;
            }
            self.pickle.end(of)?;
        }
        Ok(())
    }
}
