//! In which order chunks change their memory, where what comes in takes the room of what goes out.
//!
//! Every step takes chunks that stand one behind the other out of use and puts others in their place, which are filled before and
//! were free until then: so until a step is over, its contents are at both places. What a step vacates serves later steps. Where
//! the near place is full, a ring of chunks that wait for each other is opened by one spare chunk, wherever there is room for it,
//! and then needs no more memory. Steps that wait for none of each other are a wave; copies of one wave run at once.
//!
//! Nothing here knows the pool: frames, places and numbers.

use crate::FRAME;
use crate::place::PlaceId;
use std::collections::BTreeMap;
use std::ops::Range;

/// Frames of the smallest chunk that is worth being used again in another size than usual, and whose borders are kept: 32 MiB.
/// A smaller one costs more to map than it saves.
const WORTH: u32 = ((32 << 20) / FRAME) as u32;

/// Chunks of one size at one place. Only such can stand for each other, because a handle is mapped whole.
pub(crate) type Class = (PlaceId, u32);

/// What a place is to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Nearness {
    Peer,
    Home,
    Host,
}

/// Frames in use, and where they are to lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub start: u32,
    pub end: u32,
    pub place: PlaceId,
    pub nearness: Nearness,
}

/// A chunk that goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Old {
    pub start: u32,
    pub frames: u32,
    pub place: PlaceId,
    pub on_host: bool,
}

/// Chunks that go and stand one behind the other, and what of them is in use, both in address order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stretch {
    pub old: Vec<Old>,
    pub parts: Vec<Part>,
}

/// Whose memory a new chunk gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// One of its class that is there and free.
    Stock,
    /// One that has to be made.
    New,
    /// That of the old chunk of this number, counted over all stretches.
    Vacated(usize),
}

/// A chunk that comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    pub start: u32,
    pub frames: u32,
    pub place: PlaceId,
    pub source: Source,
}

/// Chunks that are replaced together, because the borders of new and old ones meet only around them.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// Which old chunks, counted over all stretches.
    pub old: Range<usize>,
    pub tiles: Vec<Tile>,
    /// Something of it comes home.
    pub inward: bool,
    /// Memory of the host is in it.
    by_host: bool,
    rank: Nearness,
}

/// What room there is: frames of new chunks by place, and how large one may be.
#[derive(Clone, Debug)]
pub(crate) struct Rooms {
    pub frames: BTreeMap<PlaceId, u64>,
    pub largest: u32,
}

impl Rooms {
    fn take(&mut self, wanted: &BTreeMap<Class, u32>) -> Result<(), (PlaceId, u64)> {
        let mut sums: BTreeMap<PlaceId, u64> = BTreeMap::new();
        for (&(place, frames), &count) in wanted {
            *sums.entry(place).or_default() += u64::from(frames) * u64::from(count);
        }
        for (&place, &sum) in &sums {
            let room = self.frames.get(&place).copied().unwrap_or(0);
            if room < sum {
                return Err((place, sum - room));
            }
        }
        for (place, sum) in sums {
            *self.frames.entry(place).or_default() -= sum;
        }
        Ok(())
    }
}

/// The steps, wave by wave. An error is a place and how many frames it lacks.
pub(crate) fn schedule(
    stretches: &[Stretch],
    stock: &BTreeMap<Class, u32>,
    rooms: &Rooms,
) -> Result<Vec<Vec<Step>>, (PlaceId, u64)> {
    // Chunks of the usual sizes are mapped most cheaply; but what there is may be of other sizes, and nothing be left to make any.
    in_sizes(stretches, stock, rooms.clone(), false).or_else(|_| in_sizes(stretches, stock, rooms.clone(), true))
}

fn in_sizes(
    stretches: &[Stretch],
    stock: &BTreeMap<Class, u32>,
    mut rooms: Rooms,
    any: bool,
) -> Result<Vec<Vec<Step>>, (PlaceId, u64)> {
    let mut supply = stock.clone();
    for old in stretches.iter().flat_map(|stretch| &stretch.old) {
        *supply.entry((old.place, old.frames)).or_default() += 1;
    }
    let mut pending = Vec::new();
    let mut missing = BTreeMap::new();
    let mut before = 0;
    for stretch in stretches {
        let tiles = cut(stretch, rooms.largest, any, &mut supply, &mut missing);
        steps_of(stretch, before, &tiles, &mut pending);
        before += stretch.old.len();
    }
    // What no old chunk and no stock is the right size for has to be made in any case.
    rooms.take(&missing)?;
    let mut open: BTreeMap<Class, Vec<Source>> = BTreeMap::new();
    for (sources, source) in [(stock, Source::Stock), (&missing, Source::New)] {
        for (&class, &count) in sources {
            open.entry(class).or_default().extend((0..count).map(|_| source));
        }
    }
    let old: Vec<&Old> = stretches.iter().flat_map(|stretch| &stretch.old).collect();
    let mut waves = Vec::new();
    while !pending.is_empty() {
        let mut wave = Vec::new();
        fill(&mut pending, &mut open, &mut wave);
        // The link to the host carries both directions at once, where each of them has a spare chunk.
        if waves.is_empty()
            && let Some(first) = wave.first()
            && let Some(other) = pending.iter().find(|step: &&Step| step.inward != first.inward && step.by_host)
            && wave.iter().all(|step: &Step| step.inward == first.inward)
        {
            let missing = missing_of(other, &open);
            if rooms.take(&missing).is_ok() {
                add_new(&mut open, &missing);
                fill(&mut pending, &mut open, &mut wave);
            }
        }
        if wave.is_empty() {
            open_ring(&pending, &mut open, &mut rooms)?;
            continue;
        }
        for index in wave.iter().flat_map(|step| step.old.clone()) {
            let class = (old[index].place, old[index].frames);
            // The last of these is taken first: memory that is vacated before any of the stock.
            open.entry(class).or_default().push(Source::Vacated(index));
        }
        waves.push(wave);
    }
    Ok(waves)
}

/// Divides the frames of a stretch into chunks to come. Those that `supply` has none for are added to `missing`.
fn cut(
    stretch: &Stretch,
    largest: u32,
    any: bool,
    supply: &mut BTreeMap<Class, u32>,
    missing: &mut BTreeMap<Class, u32>,
) -> Vec<(Tile, Nearness)> {
    let mut tiles = Vec::new();
    for part in &stretch.parts {
        let mut at = part.start;
        while at < part.end {
            // What goes out keeps the borders of large chunks, so that each of them is a step of its own.
            let border = stretch.old.iter().find(|old| old.start + old.frames > at && old.frames >= WORTH);
            let end = match border {
                Some(old) if part.nearness != Nearness::Home && old.start <= at => part.end.min(old.start + old.frames),
                Some(old) if part.nearness != Nearness::Home => part.end.min(old.start),
                _ => part.end,
            };
            let left = end - at;
            let usual = usual_size(part.nearness, left, largest);
            let least = if any { usual.min(WORTH) } else { usual };
            let mut fitting = supply.range_mut((part.place, least)..=(part.place, left)).rev();
            let frames = match fitting.find(|entry| *entry.1 > 0) {
                Some((&(_, frames), count)) => {
                    *count -= 1;
                    frames
                }
                None => {
                    *missing.entry((part.place, usual)).or_default() += 1;
                    usual
                }
            };
            tiles.push((Tile { start: at, frames, place: part.place, source: Source::New }, part.nearness));
            at += frames;
        }
    }
    tiles
}

/// Frames of a new chunk where so many are left. What is far comes back, and its memory serves what goes out next if it is of the
/// same size: on the host all chunks are of 32 MiB, since making and remapping it costs by the byte; on a peer, where remapping
/// costs mostly by the chunk, they are powers of two from there on. What is less than 32 MiB is one chunk.
fn usual_size(nearness: Nearness, left: u32, largest: u32) -> u32 {
    let most = left.min(largest);
    match nearness {
        Nearness::Home => most,
        Nearness::Host => most.min(WORTH),
        Nearness::Peer if most < WORTH => most,
        Nearness::Peer => 1 << most.ilog2(),
    }
}

/// Divides a stretch, whose old chunks are counted from `before` on, where no new chunk lies across a border of old ones.
fn steps_of(stretch: &Stretch, before: usize, tiles: &[(Tile, Nearness)], steps: &mut Vec<Step>) {
    let mut tiles = tiles.iter().copied().peekable();
    let mut first = 0;
    let mut inside: Vec<(Tile, Nearness)> = Vec::new();
    for (index, old) in stretch.old.iter().enumerate() {
        let end = old.start + old.frames;
        while let Some(tile) = tiles.next_if(|(tile, _)| tile.start < end) {
            inside.push(tile);
        }
        if inside.last().is_some_and(|(tile, _)| tile.start + tile.frames > end) {
            continue;
        }
        let from_host = stretch.old[first..=index].iter().any(|old| old.on_host);
        let ranks = || inside.iter().map(|(_, nearness)| *nearness);
        steps.push(Step {
            old: before + first..before + index + 1,
            inward: ranks().any(|nearness| nearness == Nearness::Home),
            by_host: from_host || ranks().any(|nearness| nearness == Nearness::Host),
            rank: ranks().max().unwrap_or(Nearness::Peer),
            tiles: inside.drain(..).map(|(tile, _)| tile).collect(),
        });
        first = index + 1;
    }
    debug_assert!(inside.is_empty() && tiles.next().is_none(), "what is in use stands on the old chunks");
}

/// Moves steps that can be done now to the wave: one in and one out in turn, as far as both go.
fn fill(pending: &mut Vec<Step>, open: &mut BTreeMap<Class, Vec<Source>>, wave: &mut Vec<Step>) {
    let mut inward = wave.last().map_or(pending.first().is_some_and(|step| step.inward), |step| !step.inward);
    loop {
        if pending.iter().all(|step| step.inward != inward) {
            inward = !inward;
        }
        let can = |step: &Step| step.inward == inward && missing_of(step, open).is_empty();
        match pending.iter().position(can) {
            Some(index) => {
                let mut step = pending.remove(index);
                for tile in &mut step.tiles {
                    let sources = open.get_mut(&(tile.place, tile.frames));
                    tile.source = sources.and_then(Vec::pop).unwrap_or(Source::New);
                }
                wave.push(step);
                inward = !inward;
            }
            // The other direction may go alone where nothing else can.
            None if wave.is_empty() => {
                inward = !inward;
                if !pending.iter().any(|step| step.inward == inward && missing_of(step, open).is_empty()) {
                    return;
                }
            }
            None => return,
        }
    }
}

/// What a step needs that is not there.
fn missing_of(step: &Step, open: &BTreeMap<Class, Vec<Source>>) -> BTreeMap<Class, u32> {
    let mut needed: BTreeMap<Class, u32> = BTreeMap::new();
    for tile in &step.tiles {
        *needed.entry((tile.place, tile.frames)).or_default() += 1;
    }
    for (class, count) in &mut needed {
        *count = count.saturating_sub(open.get(class).map_or(0, |sources| sources.len() as u32));
    }
    needed.retain(|_, count| *count > 0);
    needed
}

fn add_new(open: &mut BTreeMap<Class, Vec<Source>>, missing: &BTreeMap<Class, u32>) {
    for (&class, &count) in missing {
        // Before what else there is: what is vacated goes first.
        let sources = open.entry(class).or_default();
        sources.splice(0..0, (0..count).map(|_| Source::New));
    }
}

/// All steps wait for each other: makes what the cheapest of them lacks. Memory of a peer is preferred, because near memory is what
/// there is least of, and memory of the host is what takes longest to make.
fn open_ring(
    pending: &[Step],
    open: &mut BTreeMap<Class, Vec<Source>>,
    rooms: &mut Rooms,
) -> Result<(), (PlaceId, u64)> {
    let mut choices: Vec<_> = pending.iter().map(|step| (step.rank, missing_of(step, open))).collect();
    let frames = |missing: &BTreeMap<Class, u32>| -> u64 {
        missing.iter().map(|(class, count)| u64::from(class.1) * u64::from(*count)).sum()
    };
    choices.sort_by_key(|(rank, missing)| (frames(missing), *rank));
    let mut answer = Ok(());
    for (_, missing) in &choices {
        match rooms.take(missing) {
            Ok(()) => {
                add_new(open, missing);
                return Ok(());
            }
            Err(lack) => answer = answer.and(Err(lack)),
        }
    }
    answer
}
