//! The program's own memory (`cuMemCreate`: PyTorch's expandable segments, JAX's arena) moves as the pool's does, by whole parts of what is
//! behind a handle.
//!
//! To the tiers a block is a stretch of addresses that the program has mapped one behind the other, since a tensor lies over several handles of an
//! allocator's 20 MiB. It grows as long as more is mapped behind it, and may have holes. Where its handles are for several GPUs it is a block of each of these, and what is for
//! another GPU is a hole: a pointer to its begin names all that is behind it, whichever GPU the first handle is for. Rejected: a block for each run of handles of one GPU, behind
//! whose end nothing would be named.
//!
//! What the program's handles keep is not the pool's to prepare beside running work: memory is made, copied and mapped while the program is
//! stopped. That takes longer than a swap of the pool's, which the tiers learn by what moves took.

use super::swap::{Failed, Outcome, Stop, Why};
use super::{Home, begin, far, home, placed, totals};
use crate::backing::{reclaim, terms};
use crate::process;
use crate::serve::handles::by_hand::{self, OwnPiece};
use crate::serve::handles::{self, Hearer};
use crate::serve::memory::by_hand::Unplaced;
use gpupool_config::Move;
use gpupool_cuda::CuResult;
use gpupool_pool::Place;
use gpupool_tiers::{Range, Where};
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// A part of more bytes does not move: it would hold the program up for longer than launches are asked to wait, and leave no room for what stays. Arenas
/// that do not fit are made of smaller parts (`serve/handles/steer.rs`).
const MOST: u64 = 512 << 20;

/// A stretch of addresses with memory of the program's own.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stretch {
    end: u64,
    /// The GPUs that something of it was asked for on.
    gpus: Vec<u32>,
    /// Bytes of it that are mapped. The rest are holes.
    mapped: u64,
}

/// By their first addresses.
static STRETCHES: Mutex<BTreeMap<u64, Stretch>> = Mutex::new(BTreeMap::new());

/// Has what follows told of mappings.
pub(super) fn start() {
    handles::hear_of_mappings(Hearer { mapped, unmapped, placed: placed_by_program });
}

/// What a mapping changes, for the GPUs that have something of the stretch already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// A stretch of its own.
    New,
    /// More of the one that is there.
    Grown,
    /// Something in a hole.
    Filled,
}

/// The stretch that this is mapped in, and where it begins; whether it is the first there of its GPU.
struct Added<'a> {
    change: Change,
    start: u64,
    stretch: &'a Stretch,
    is_first: bool,
}

fn add(all: &mut BTreeMap<u64, Stretch>, range: Range, gpu: u32) -> Added<'_> {
    let before = all.range(..=range.start).next_back();
    let start = before.filter(|(_, stretch)| range.start <= stretch.end).map_or(range.start, |(start, _)| *start);
    let new = Stretch { end: range.start, gpus: Vec::new(), mapped: 0 };
    let stretch = all.entry(start).or_insert(new);
    let change = match stretch.mapped {
        0 => Change::New,
        _ if range.end <= stretch.end => Change::Filled,
        // Nothing else is mapped there now, or the driver would have refused it; a hole at the end of a stretch may be passed over.
        _ => Change::Grown,
    };
    stretch.mapped += range.bytes();
    stretch.end = stretch.end.max(range.end);
    let is_first = !stretch.gpus.contains(&gpu);
    if is_first {
        stretch.gpus.push(gpu);
    }
    Added { change, start, stretch, is_first }
}

/// The stretch that lost this, and whether nothing of it is mapped any more.
fn take(all: &mut BTreeMap<u64, Stretch>, range: Range) -> Option<(u64, Stretch, bool)> {
    let (&start, stretch) = all.range_mut(..=range.start).next_back()?;
    if range.start >= stretch.end {
        return None;
    }
    stretch.mapped = stretch.mapped.saturating_sub(range.bytes());
    let (left, is_over) = (stretch.clone(), stretch.mapped == 0);
    if is_over {
        all.remove(&start);
    }
    Some((start, left, is_over))
}

fn mapped(address: u64, bytes: u64, gpu: u32, is_elsewhere: bool) {
    if is_elsewhere {
        far::own_is_far(gpu);
    }
    if process::settings().moving == Move::Off {
        return;
    }
    let range = Range::of(address, bytes);
    // Held until the tiers know of it: another thread's mapping behind this one is told after it.
    let mut all = STRETCHES.lock();
    let Added { change, start, stretch, is_first } = add(&mut all, range, gpu);
    for home in homes(stretch) {
        let mut tiers = home.tiers.lock();
        match change {
            _ if is_first && home.gpu == gpu => tiers.block_began(start, stretch.end - start),
            Change::New => {}
            Change::Grown => tiers.block_grew(start, address, bytes),
            Change::Filled => tiers.placed(range),
        }
    }
    drop(all);
    if home(gpu).is_none() && (is_elsewhere || process::settings().moving == Move::Stress) {
        begin(gpu);
    }
}

/// Of the GPUs that have something of a stretch, those whose memory may move.
fn homes(stretch: &Stretch) -> impl Iterator<Item = &'static Home> {
    stretch.gpus.iter().filter_map(|gpu| home(*gpu))
}

fn unmapped(address: u64, bytes: u64) {
    let range = Range::of(address, bytes);
    placed::own(range, false);
    let mut all = STRETCHES.lock();
    let Some((start, stretch, is_over)) = take(&mut all, range) else { return };
    for home in homes(&stretch) {
        let mut tiers = home.tiers.lock();
        if is_over { tiers.block_ended(start) } else { tiers.placed(range) }
    }
}

fn placed_by_program(address: u64, bytes: u64, is_placed: bool) {
    let range = Range::of(address, bytes);
    placed::own(range, is_placed);
    let all = STRETCHES.lock();
    let stretch = all.range(..=address).next_back().map(|(_, stretch)| stretch);
    stretch.into_iter().flat_map(homes).for_each(|home| home.tiers.lock().placed(range));
}

/// Tells the stretches of a GPU, for who begins to move: where each begins, and its bytes. None changes meanwhile.
pub(super) fn each_stretch(gpu: u32, mut tell: impl FnMut(u64, u64)) {
    let all = STRETCHES.lock();
    all.iter().filter(|(_, it)| it.gpus.contains(&gpu)).for_each(|(&start, it)| tell(start, it.end - start));
}

/// The end of the stretch that an address lies in.
pub(super) fn end_at(address: u64) -> Option<u64> {
    let all = STRETCHES.lock();
    all.range(..=address).next_back().map(|(_, stretch)| stretch.end).filter(|end| address < *end)
}

/// Where each part of a range lies, if it was asked for on this GPU; `None`: a place that is nobody's here.
pub(super) fn pieces(home: &Home, range: Range, tell: &mut dyn FnMut(&OwnPiece, Option<Where>)) {
    for piece in by_hand::pieces(range.start, range.bytes()).iter().filter(|piece| piece.asked == home.gpu) {
        let far = || home.places.iter().position(|place| *place == piece.place);
        let place =
            if piece.place == Place::Gpu(home.gpu) { Some(Where::Near) } else { far().map(|at| Where::Far(at as u8)) };
        tell(piece, place);
    }
}

/// Whether a part cannot move by itself.
pub(super) fn stays(piece: &OwnPiece) -> bool {
    piece.stays || piece.bytes > MOST
}

pub(super) fn range_of(piece: &OwnPiece) -> Range {
    Range::of(piece.start, piece.bytes)
}

/// A part that changes places.
#[derive(Clone, Copy, Debug)]
pub(super) struct Goes {
    pub piece: OwnPiece,
    pub to: Place,
}

/// The parts of these ranges that a move to a place would concern, each once: those of which most is named.
pub(super) fn goes(home: &Home, ranges: &[Range], to: Place, found: &mut Vec<Goes>) {
    for &range in ranges {
        pieces(home, range, &mut |piece, _| {
            let whole = range_of(piece);
            let is_meant = whole.meet(&range).bytes() >= whole.bytes() / 2;
            let is_known = found.iter().any(|known| known.piece.start == piece.start);
            let is_held = || {
                let mut is_held = false;
                super::stays(whole, &mut |_| is_held = true);
                is_held
            };
            if is_meant && piece.place != to && !stays(piece) && !is_known && !is_held() {
                found.push(Goes { piece: *piece, to });
            }
        });
    }
}

/// The first of these that are so many bytes together; all of them if they are fewer.
pub(super) fn enough(all: Vec<Goes>, bytes: u64) -> Vec<Goes> {
    let mut left = bytes;
    let is_needed = |goes: &Goes| {
        let is_needed = left > 0;
        left = left.saturating_sub(goes.piece.bytes);
        is_needed
    };
    all.into_iter().take_while(is_needed).collect()
}

/// Those of these that fit into so much, one after the other.
pub(super) fn fitting(all: Vec<Goes>, mut room: u64) -> Vec<Goes> {
    let fits = |goes: &Goes| {
        let fits = goes.piece.bytes <= room;
        room -= if fits { goes.piece.bytes } else { 0 };
        fits
    };
    all.into_iter().filter(fits).collect()
}

pub(super) fn bytes_of(all: &[Goes]) -> u64 {
    all.iter().map(|goes| goes.piece.bytes).sum()
}

/// Has these leave and then those come, with the program stopped for all of it.
pub(super) fn exchange(
    home: &Home,
    far: &[Goes],
    near: &[Goes],
    why: Why,
    outcome: &mut Outcome,
) -> Result<(), Failed> {
    if far.iter().chain(near).any(|goes| terms::is_place_left_alone(goes.piece.place)) {
        return Err(Failed::left_alone());
    }
    // What the host keeps for suspensions goes while the GPU is at work.
    far.iter().filter(|goes| goes.to.is_host()).take(1).for_each(|goes| drop(reclaim::make_room_at(goes.to)));
    let stop = Stop::new(home, why);
    let Some(mut quiet) = stop.stop() else {
        return Err(stop.failed(outcome));
    };
    let (mut done, mut others): (Vec<(Goes, bool)>, Vec<Range>) = (Vec::new(), Vec::new());
    let mut is_full = false;
    for goes in far.iter().chain(near) {
        // The program may have mapped something else there until the GPU was at rest, for which nobody has reckoned.
        if !is_there(&goes.piece) {
            others.push(range_of(&goes.piece));
            continue;
        }
        let mut was_quiet = true;
        let moved = by_hand::move_part(home.driver, home.opened, &goes.piece, goes.to, || {
            was_quiet = gpupool_pool::Stopped::still_quiet(&mut quiet);
            was_quiet
        });
        done.push((*goes, moved.is_ok()));
        if !was_quiet {
            drop(quiet);
            settle(home, &done, &others, outcome);
            return Err(stop.passed(outcome));
        }
        is_full |= matches!(moved, Err(Unplaced::NoRoom | Unplaced::Refused(CuResult::OUT_OF_MEMORY)));
    }
    drop(quiet);
    settle(home, &done, &others, outcome);
    stop.over(outcome);
    if is_full && done.iter().all(|(_, moved)| !moved) { Err(Failed::Full) } else { Ok(()) }
}

/// Whether this part is what is mapped there now.
fn is_there(piece: &OwnPiece) -> bool {
    by_hand::pieces(piece.start, 1).first().is_some_and(|now| now == piece)
}

/// What became of them is told, and of ranges at which something else is mapped by now.
fn settle(home: &Home, done: &[(Goes, bool)], others: &[Range], outcome: &mut Outcome) {
    let mut tiers = home.tiers.lock();
    others.iter().for_each(|range| tiers.placed(*range));
    for (Goes { piece, to }, moved) in done {
        let range = range_of(piece);
        tiers.placed(range);
        if !moved {
            outcome.stayed += piece.bytes;
            tiers.stayed(range);
            continue;
        }
        totals::changed_places(home.gpu, piece.place, *to, piece.bytes);
        *(if *to == Place::Gpu(home.gpu) { &mut outcome.came } else { &mut outcome.left }) += piece.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mapped_behind_each_other_is_one_stretch_until_nothing_of_it_is_mapped() {
        let mut all = BTreeMap::new();
        let range = |start, end| Range { start, end };
        let adds = |all: &mut BTreeMap<u64, Stretch>, start, end, gpu| {
            let added = add(all, range(start, end), gpu);
            (added.change, added.start, added.is_first)
        };
        let taken = |all: &mut BTreeMap<u64, Stretch>, start, end| {
            take(all, range(start, end)).map(|(start, _, is_over)| (start, is_over))
        };
        assert_eq!(adds(&mut all, 100, 120, 0), (Change::New, 100, true));
        assert_eq!(adds(&mut all, 120, 140, 0), (Change::Grown, 100, false));
        assert_eq!(adds(&mut all, 140, 160, 1), (Change::Grown, 100, true), "of another GPU");
        assert_eq!(adds(&mut all, 160, 170, 0), (Change::Grown, 100, false));
        assert_eq!(taken(&mut all, 100, 120), Some((100, false)));
        assert_eq!(adds(&mut all, 100, 110, 1), (Change::Filled, 100, false));
        for (start, end) in [(120, 140), (100, 110), (140, 160)] {
            assert_eq!(taken(&mut all, start, end), Some((100, false)));
        }
        assert_eq!(taken(&mut all, 160, 170), Some((100, true)));
        assert_eq!(taken(&mut all, 100, 110), None);
        assert_eq!(adds(&mut all, 500, 520, 0), (Change::New, 500, true));
        assert_eq!(adds(&mut all, 521, 530, 0), (Change::New, 521, true), "a byte behind it");
        assert_eq!(all.keys().copied().collect::<Vec<_>>(), [500, 521]);
    }

    #[test]
    fn parts_leave_until_it_is_enough_and_come_as_far_as_they_fit() {
        let of = |bytes: u64| Goes {
            piece: OwnPiece { start: bytes, bytes, asked: 0, place: Place::Gpu(0), stays: false },
            to: Place::Gpu(1),
        };
        let sizes = |all: &[Goes]| all.iter().map(|goes| goes.piece.bytes).collect::<Vec<_>>();
        let all = || vec![of(20), of(30), of(5)];
        assert_eq!(sizes(&enough(all(), 20)), [20]);
        assert_eq!(sizes(&enough(all(), 21)), [20, 30]);
        assert_eq!(sizes(&enough(all(), 0)), [0_u64; 0]);
        assert_eq!(sizes(&fitting(all(), 26)), [20, 5]);
    }
}
