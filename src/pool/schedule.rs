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

/// Frames of a chunk of the host where so many are left: 32 MiB, and powers of two below, wherever it comes from. What comes near then leaves memory that what goes
/// out is laid on, whatever either is cut into on its GPU. With chunks as large as on a GPU most swaps made their own, which takes eight times as long as copying (H200).
pub(crate) fn size_on_host(left: u32) -> u32 {
    1 << left.clamp(1, WORTH).ilog2()
}

/// Chunks of one size at one place. Only such can stand for each other, because a handle is mapped whole.
pub(crate) type Class = (PlaceId, u32);

/// Chunks of the stock that have the contents of frames still, which came near from them ([`crate::stock::Twin`]): by place and first
/// frame, how many they are.
pub(crate) type Twins = BTreeMap<(PlaceId, u32), u32>;

/// What a place is to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Nearness {
    Peer,
    Home,
    Host,
    Disk,
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
    /// The one that has its contents still.
    Twin,
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
    twins: &Twins,
    rooms: &Rooms,
) -> Result<Vec<Vec<Step>>, (PlaceId, u64)> {
    // Chunks of the usual sizes are mapped most cheaply; but what there is may be of other sizes, and nothing be left to make any.
    in_sizes(stretches, stock, twins, rooms.clone(), false)
        .or_else(|_| in_sizes(stretches, stock, twins, rooms.clone(), true))
}

fn in_sizes(
    stretches: &[Stretch],
    stock: &BTreeMap<Class, u32>,
    twins: &Twins,
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
        let tiles = cut(stretch, rooms.largest, any, twins, &mut supply, &mut missing);
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
    twins: &Twins,
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
            if let Some(&frames) = twins.get(&(part.place, at)).filter(|frames| **frames <= left) {
                tiles.push((Tile { start: at, frames, place: part.place, source: Source::Twin }, part.nearness));
                at += frames;
                continue;
            }
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
/// same size: on the host no chunk is larger than 32 MiB, since making and remapping it costs by the byte; on a peer, where remapping
/// costs mostly by the chunk, they are powers of two from there on, and what is less is one chunk. On a disk there is nothing to make
/// or to use again.
fn usual_size(nearness: Nearness, left: u32, largest: u32) -> u32 {
    let most = left.min(largest);
    match nearness {
        Nearness::Home | Nearness::Disk => most,
        Nearness::Host => size_on_host(most),
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
                for tile in step.tiles.iter_mut().filter(|tile| tile.source != Source::Twin) {
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
    for tile in step.tiles.iter().filter(|tile| tile.source != Source::Twin) {
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{Nearness, Old, Part, Rooms, Source, Step, Stretch, schedule};
    use crate::place::PlaceId;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const HOME: PlaceId = PlaceId::from_number(0);
    const PEER: PlaceId = PlaceId::from_number(1);
    const HOST: PlaceId = PlaceId::from_number(2);

    fn nearness(place: PlaceId) -> Nearness {
        match place {
            HOME => Nearness::Home,
            PEER => Nearness::Peer,
            _ => Nearness::Host,
        }
    }

    /// Chunks of these frames at these places, one behind the other from `start` on, which go to `to` as far as they are in use.
    fn stretch(start: u32, chunks: &[(u32, PlaceId)], to: PlaceId) -> Stretch {
        let mut at = start;
        let old: Vec<Old> = chunks
            .iter()
            .map(|&(frames, place)| {
                at += frames;
                Old { start: at - frames, frames, place, on_host: place == HOST }
            })
            .collect();
        Stretch { old, parts: vec![Part { start, end: at, place: to, nearness: nearness(to) }] }
    }

    fn rooms(home: u64, peer: u64, host: u64) -> Rooms {
        Rooms { frames: [(HOME, home), (PEER, peer), (HOST, host)].into(), largest: 256 }
    }

    fn sizes(steps: &[Vec<Step>]) -> Vec<Vec<u32>> {
        let tiles = |step: &Step| step.tiles.iter().map(|tile| tile.frames).collect();
        steps.iter().flatten().map(tiles).collect()
    }

    fn made(steps: &[Vec<Step>]) -> u32 {
        let tiles = steps.iter().flatten().flat_map(|step| &step.tiles);
        tiles.filter(|tile| tile.source == Source::New).map(|tile| tile.frames).sum()
    }

    #[test]
    fn a_ring_of_any_length_is_opened_by_one_chunk_wherever_there_is_room() {
        let out = |index: u32| stretch(index * 1000, &[(256, HOME)], PEER);
        let inside = |index: u32| stretch(index * 1000, &[(256, PEER)], HOME);
        let stretches: Vec<Stretch> = (0..10).map(out).chain((10..20).map(inside)).collect();
        for room in [rooms(256, 0, 0), rooms(0, 256, 0)] {
            let steps = schedule(&stretches, &BTreeMap::new(), &BTreeMap::new(), &room).unwrap();
            assert_eq!((steps.len(), made(&steps)), (20, 256));
        }
        assert!(schedule(&stretches, &BTreeMap::new(), &BTreeMap::new(), &rooms(255, 255, 9999)).is_err());
        let stock = [((HOME, 256), 1)].into();
        assert_eq!(made(&schedule(&stretches, &stock, &BTreeMap::new(), &rooms(0, 0, 0)).unwrap()), 0);
        // With one at each end, both directions go at once.
        let stock = [((HOME, 256), 1), ((PEER, 256), 1)].into();
        assert_eq!(schedule(&stretches, &stock, &BTreeMap::new(), &rooms(0, 0, 0)).unwrap().len(), 10);
    }

    #[test]
    fn far_chunks_have_sizes_that_come_again() {
        let to = |frames: u32, place: PlaceId| {
            let stretches = [stretch(0, &[(frames, HOME)], place)];
            sizes(&schedule(&stretches, &BTreeMap::new(), &BTreeMap::new(), &rooms(0, 9999, 9999)).unwrap())
        };
        assert_eq!(to(256, PEER), [[256]]);
        assert_eq!(to(150, PEER), [[128, 16, 6]]);
        assert_eq!(to(40, HOST), [[16, 16, 8]]);
        assert_eq!(to(5, HOST), [[4, 1]]);
        // What comes in is as large as can be, whatever it was made of.
        let back = [stretch(0, &[(16, HOST), (16, HOST), (8, HOST)], HOME)];
        assert_eq!(sizes(&schedule(&back, &BTreeMap::new(), &BTreeMap::new(), &rooms(9999, 0, 0)).unwrap()), [[40]]);
        // Chunks that are there serve in other sizes where nothing can be made.
        let stock = [((HOME, 24), 1), ((HOME, 16), 1)].into();
        assert_eq!(sizes(&schedule(&back, &stock, &BTreeMap::new(), &rooms(0, 0, 0)).unwrap()), [[24, 16]]);
        // Small chunks become one, and large ones stay steps of their own.
        let small = [stretch(0, &[(1, HOME), (2, HOME), (40, HOME), (3, HOME), (1, HOME)], PEER)];
        let steps = schedule(&small, &BTreeMap::new(), &BTreeMap::new(), &rooms(0, 9999, 0)).unwrap();
        assert_eq!(sizes(&steps), [vec![3], vec![32, 8], vec![4]]);
    }

    fn any_place() -> impl Strategy<Value = PlaceId> {
        prop_oneof![Just(HOME), Just(PEER), Just(HOST)]
    }

    /// Chunks, and what is in use of them: what is free before each part, its frames and where they go.
    type Drawn = (Vec<(u32, PlaceId)>, Vec<(u32, u32, PlaceId)>);

    fn any_stretch() -> impl Strategy<Value = Drawn> {
        let size = || prop_oneof![4 => Just(16u32), 2 => Just(32), 3 => 1..40u32];
        let chunks = proptest::collection::vec((size(), any_place()), 1..5);
        let parts = proptest::collection::vec((0..3u32, 1..60u32, any_place()), 1..6);
        (chunks, parts)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_chunk_is_filled_before_it_is_used_and_vacated_before_it_is_filled(
            drawn in proptest::collection::vec(any_stretch(), 1..6),
            stock in proptest::collection::vec((any_place(), prop_oneof![Just(16u32), 1..40u32]), 0..5),
            home in prop_oneof![Just(0u64), 0..100u64],
            far in prop_oneof![Just(0u64), 0..400u64],
        ) {
            let mut stretches = Vec::new();
            for (index, (chunks, parts)) in drawn.iter().enumerate() {
                let mut one = stretch(index as u32 * 1000, chunks, HOME);
                let end = one.parts[0].end;
                let mut at = one.parts[0].start;
                one.parts.clear();
                for &(gap, frames, place) in parts {
                    let start = (at + gap).min(end);
                    at = (start + frames).min(end);
                    if start < at {
                        one.parts.push(Part { start, end: at, place, nearness: nearness(place) });
                    }
                }
                stretches.push(one);
            }
            let mut there: BTreeMap<_, u32> = BTreeMap::new();
            stock.iter().for_each(|class| *there.entry(*class).or_default() += 1);
            // Beside the stock, some chunks have what is to go there still, or did before something else was cut.
            let parts = || stretches.iter().flat_map(|one| &one.parts);
            let own = stock.iter().zip(parts()).filter(|((place, _), part)| *place == part.place);
            let twins: BTreeMap<_, _> = own.map(|((place, frames), part)| ((*place, part.start), *frames)).collect();
            let mut unused = twins.clone();
            let room = rooms(home, far, far);
            let Ok(waves) = schedule(&stretches, &there, &twins, &room) else { return Ok(()) };
            let old: Vec<Old> = stretches.iter().flat_map(|one| one.old.clone()).collect();
            let mut vacated = vec![false; old.len()];
            let mut served = vec![false; old.len()];
            let mut left = room.frames.clone();
            let mut covered: Vec<(u32, u32, PlaceId)> = Vec::new();
            for wave in &waves {
                for tile in wave.iter().flat_map(|step| &step.tiles) {
                    let class = (tile.place, tile.frames);
                    match tile.source {
                        Source::Stock => {
                            let count = there.entry(class).or_default();
                            prop_assert!(*count > 0, "the stock has no such chunk");
                            *count -= 1;
                        }
                        Source::Twin => {
                            prop_assert_eq!(unused.remove(&(tile.place, tile.start)), Some(tile.frames), "it is no twin");
                        }
                        Source::New => {
                            let room = left.entry(tile.place).or_default();
                            prop_assert!(*room >= u64::from(tile.frames), "there is no room for it");
                            *room -= u64::from(tile.frames);
                        }
                        Source::Vacated(index) => {
                            prop_assert!(vacated[index] && !served[index], "{index} is in use");
                            prop_assert_eq!((old[index].place, old[index].frames), class);
                            served[index] = true;
                        }
                    }
                    covered.push((tile.start, tile.start + tile.frames, tile.place));
                }
                for step in wave {
                    let (first, last) = (old[step.old.start], old[step.old.end - 1]);
                    for tile in &step.tiles {
                        let within = first.start <= tile.start && tile.start + tile.frames <= last.start + last.frames;
                        prop_assert!(within, "a step replaces what it takes down");
                    }
                    for index in step.old.clone() {
                        prop_assert!(!std::mem::replace(&mut vacated[index], true), "{index} goes twice");
                    }
                }
            }
            prop_assert!(vacated.iter().all(|it| *it), "every chunk goes");
            covered.sort_unstable();
            let frames = |ranges: &[(u32, u32, PlaceId)]| -> Vec<(u32, PlaceId)> {
                ranges.iter().flat_map(|&(start, end, place)| (start..end).map(move |frame| (frame, place))).collect()
            };
            let parts: Vec<_> = stretches.iter().flat_map(|one| &one.parts).map(|it| (it.start, it.end, it.place)).collect();
            prop_assert_eq!(frames(&covered), frames(&parts), "what is in use, and nothing else, lies where it should");
        }
    }
}
