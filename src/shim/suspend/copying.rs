//! What leaves for a disk or for plain memory of the host is copied there before it leaves: how much of it there is room for, and what of it is there at all.

use super::Target;
use super::kept::{self, Kept, Refused};
use super::leaves::{Full, Leaves};
use super::parting::{Stretch, batches, chosen, host_for, there};
use super::put::Put;
use super::rearranging::BATCH;
use super::spare;
use super::stored::{Range, Stored};
use super::why::Why;
use crate::backing::host;
use crate::backing::open::Opened;
use crate::image::crew::Crews;
use crate::serve::handles::by_hand::{self, NOBODY, Own};
use crate::serve::memory::idle;
use gpupool_cuda::{Driver, Physical};
use gpupool_pool::{Block, FRAME, Piece, Place};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;

/// What is copied to plain memory before it leaves one GPU: half a second's work.
const AT_ONCE: u64 = 16 << 30;
/// How often at most all of a program's memory is written to a folder because it has been given more meanwhile.
const ROUNDS: u32 = 4;

/// What of the pool's memory at the places that are left may leave, in whole frames, as it comes back.
fn ranges(stretches: &[Stretch], is_left: impl Fn(Place) -> bool) -> Vec<Range> {
    let leaves =
        |piece: &&Piece<Physical>| piece.anchors.is_empty() && !piece.place.is_stored() && is_left(piece.place);
    let frames = |block: Block, piece: &Piece<Physical>| {
        let address = piece.address / FRAME * FRAME;
        let bytes = (piece.address + piece.bytes).next_multiple_of(FRAME) - address;
        Range { owner: block.owner, home: block.home, address, bytes }
    };
    let of = |(block, pieces): &(Block, Vec<Piece<Physical>>)| -> Vec<Range> {
        pieces.iter().filter(leaves).map(|piece| frames(*block, piece)).collect()
    };
    let mut ranges: Vec<Range> = stretches.iter().flat_map(of).collect();
    // Each owner's one after the other: what copies them is made for one owner.
    ranges.sort_by_key(|range| (range.home, range.owner, range.address));
    ranges
}

/// What the program made itself.
fn of_own(own: Own) -> Range {
    Range { owner: NOBODY, home: own.asked, address: own.address, bytes: own.bytes }
}

/// Stores all memory of the pool and of the program's own that may leave in a folder; `None` where there is none.
///
/// A call that asks for memory passes no gate, and one that was under way when the program was stopped may be given some while the rest is written: that is
/// begun anew then, as soon as it is seen, since one process has one image in a folder. Rejected: to keep what came on the host, which would leave a program that
/// went to a disk in two places.
///
/// # Errors
/// Why not, in words.
pub fn store(
    opened: &'static Opened,
    driver: &'static Driver,
    folder: &Path,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Option<Put>, String> {
    opened.pool.free_empty_slabs();
    let leaves = Leaves::Suspended { target: &Target::Folder(folder.to_owned()), put: None, full: None };
    let there = || {
        let (near, own) = chosen(opened, leaves);
        let own = own.into_iter().filter(|own| by_hand::why_unstored(opened, own).is_none()).map(of_own);
        own.chain(ranges(&near, |place| leaves.place(place))).collect()
    };
    // Asked at each step: a look at all blocks is made only where one was given out since.
    let given = || opened.pool.usage().allocations + by_hand::count_so_far();
    let write = |ranges: &[Range], goes_on: &dyn Fn() -> bool| {
        let total = ranges.iter().map(|range| range.bytes).sum();
        progress(0, total);
        Stored::write(driver, opened, folder, ranges, goes_on, &mut |done| progress(done, total))
    };
    let stored = write_all(&there, &given, is_wanted, write, |stored| stored.unname().end())?;
    Ok(stored.map(|stored| Put::Disk(Box::new(stored))))
}

/// Writes all that is `there`, and `drops` what was written and begins anew where more has come, as far as the count of what was `given` out says so; `None` where there
/// is nothing.
fn write_all<T>(
    there: &dyn Fn() -> Vec<Range>,
    given: &dyn Fn() -> u64,
    is_wanted: &dyn Fn() -> bool,
    mut write: impl FnMut(&[Range], &dyn Fn() -> bool) -> Result<T, String>,
    drops: impl Fn(T),
) -> Result<Option<T>, String> {
    // Whoever asks once more waits, so it is not more than a few calls that come.
    for is_last in (1..=ROUNDS).map(|round| round == ROUNDS) {
        let looked_at = Cell::new(given());
        let ranges = there();
        if ranges.is_empty() {
            return Ok(None);
        }
        let known: BTreeMap<u64, u64> = ranges.iter().map(|range| (range.address, range.bytes)).collect();
        // What has gone is none of that. What came counts also where it has gone since: writing was ended for it.
        let is_more = || there().iter().any(|range| known.get(&range.address).is_none_or(|bytes| *bytes < range.bytes));
        let has_come = Cell::new(false);
        let goes_on = || {
            let now = given();
            if !is_last && looked_at.replace(now) != now {
                has_come.set(has_come.get() || is_more());
            }
            is_wanted() && !has_come.get()
        };
        let stored = write(&ranges, &goes_on);
        if !is_wanted() || is_last || !(has_come.get() || is_more()) {
            return stored.map(Some);
        }
        if let Ok(stored) = stored {
            drops(stored);
        }
    }
    Ok(None)
}

/// Copies as much of the pool's memory that is to leave to plain memory of the host as there is room for, and of a suspended program's own; `None` where that is
/// nothing, and why it was not all. Of one GPU about as much as [`AT_ONCE`], and only what may lie on the host; there is room for a further [`BATCH`] on the host,
/// which takes it over ([`settle`]).
///
/// # Errors
/// Why not, in words.
pub fn keep(
    opened: &'static Opened,
    driver: &'static Driver,
    leaves: Leaves<'_>,
    crews: &mut Crews,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Option<Put>, Option<Full>), String> {
    let (mut near, own) = chosen(opened, leaves);
    if matches!(leaves, Leaves::Gpu { .. }) {
        near.retain(|(block, _)| host_for(opened, block.home).is_some());
        let mut sum = 0;
        let first = batches(&near, BATCH).take_while(|batch| {
            let goes = sum < AT_ONCE;
            sum += batch.iter().map(|(_, pieces)| there(leaves, pieces)).sum::<u64>();
            goes
        });
        near.truncate(first.map(<[Stretch]>::len).sum());
    }
    // Where the program goes on, what it made itself goes straight to where GPUs reach it.
    let is_suspended = matches!(leaves, Leaves::Suspended { .. });
    let (keeps, own): (Vec<Own>, Vec<Own>) =
        own.into_iter().partition(|own| is_suspended && by_hand::may_go(own.address, own.asked));
    // What the program made itself comes first: where the driver has to make memory on the host for it, that takes as much of it.
    let ranges: Vec<Range> = keeps.into_iter().map(of_own).chain(ranges(&near, |place| leaves.place(place))).collect();
    let hosts: Vec<Place> = opened.plan.places.iter().map(|spec| spec.place).filter(|place| place.is_host()).collect();
    let Some(&first) = hosts.first() else { return Ok((None, Some(Full::new(Why::nowhere(), &ranges)))) };
    let own = own.into_iter().map(|own| own.bytes).sum();
    let bytes = ranges.iter().map(|range| range.bytes).sum::<u64>();
    // What the program has freed there counts as much as what it uses, as what came back from there a moment ago, and is no plain memory.
    if allowed_on_host(opened) < bytes.saturating_add(own) {
        let text = "what leaves GPUs needs that room";
        hosts.iter().for_each(|place| _ = idle::give_back_unused(Some(*place), u32::MAX, "recall", text));
    }
    let wanted = bytes + if is_suspended { 0 } else { BATCH };
    let Room { allowed, mut there } = room_on_host(opened, wanted);
    if matches!(leaves, Leaves::Gpu { .. }) {
        there -= BATCH.min(there / 2);
    }
    let room = allowed.min(there).saturating_sub(own);
    // Of what lacks room, the limit is the reason unless the host has less.
    let lacks = |missing| if allowed <= there { Why::limited(first, Some(missing)) } else { Why::full(first, missing) };
    let (ranges, plain, full) = placed(ranges, room, lacks, kept::make);
    if ranges.is_empty() {
        return Ok((None, full));
    }
    let total = ranges.iter().map(|range| range.bytes).sum();
    progress(0, total);
    let mut heard = |done| {
        progress(done, total);
        is_wanted()
    };
    Kept::copy(driver, plain, &ranges, crews, &mut heard).map(|kept| (Some(Put::Host(kept)), full))
}

/// What of these there is `room` for and memory can be made for, that memory, and what is left out and why. The system may refuse what nobody said that it lacks: limits of
/// the process (`RLIMIT_AS`), what it counts as promised; then it is asked for half of that, and so on.
fn placed<T: Default>(
    ranges: Vec<Range>,
    room: u64,
    lacks_room: impl Fn(u64) -> Why,
    make: impl Fn(u64) -> Result<T, Refused>,
) -> (Vec<Range>, T, Option<Full>) {
    let all = ranges.iter().map(|range| range.bytes).sum::<u64>();
    let (mut room, mut refused) = (room, None);
    loop {
        let (fits, left_out) = fitting(ranges.clone(), room);
        let bytes: u64 = fits.iter().map(|range| range.bytes).sum();
        let made = if bytes == 0 { Ok(T::default()) } else { make(bytes) };
        match made {
            Ok(made) => {
                let lacks = all.saturating_sub(room);
                let why = refused.map_or_else(|| lacks_room(lacks), |refused| Why::refused(refused, all - bytes));
                return (fits, made, (lacks > 0).then(|| Full::new(why, &left_out)));
            }
            Err(why) => {
                room = why.fits;
                refused = Some(why);
            }
        }
    }
}

/// Plain memory of the host that this process may have at a moment.
pub struct Room {
    /// Below the limits of what the pool takes of the host.
    pub allowed: u64,
    /// Beside what is kept back for the host itself.
    pub there: u64,
}

/// How much plain memory may be had for so much.
pub fn room_on_host(opened: &Opened, wanted: u64) -> Room {
    let allowed = allowed_on_host(opened);
    let there = if allowed == 0 { 0 } else { beside(wanted, host::available, spare::give_back).unwrap_or(u64::MAX) };
    Room { allowed, there }
}

/// [`Room::allowed`].
fn allowed_on_host(opened: &Opened) -> u64 {
    let accounts = opened.pool.accounts();
    let hosts = opened.plan.places.iter().map(|spec| spec.place).filter(|place| place.is_host());
    let left: u64 = hosts.map(|place| accounts.limit(place).saturating_sub(accounts.taken(place))).sum();
    // What is in plain memory already will be the host's as well.
    left.saturating_sub(accounts.taken(Place::Pageable))
}

/// How much memory there is for so much, beside what is spare, or with that where it takes that: nobody knows how much of it was ever made, so it goes.
fn beside(wanted: u64, available: impl Fn() -> Option<u64>, give_back: impl Fn() -> u64) -> Option<u64> {
    let beside = available()?;
    if wanted > beside && give_back() > 0 { available() } else { Some(beside) }
}

/// What of these there is room for, one after the other, and the rest.
fn fitting(ranges: Vec<Range>, room: u64) -> (Vec<Range>, Vec<Range>) {
    let mut room = room;
    ranges.into_iter().partition(|range| {
        let fits = range.bytes <= room;
        if fits {
            room -= range.bytes;
        }
        fits
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_there_was_no_room_for_is_told_from_what_came_later() {
        let range = |address, bytes| Range { owner: 1, home: 0, address, bytes };
        let (kept, left_out) = fitting(vec![range(100, 40), range(200, 30), range(300, 20), range(400, 10)], 60);
        assert_eq!(kept.iter().map(|range| range.address).collect::<Vec<_>>(), [100, 300]);
        let full = Full::new(Why::full(Place::Host(0), 40), &left_out);
        let has: Vec<u64> =
            [99, 100, 199, 200, 229, 230, 300, 399, 400, 409, 410].into_iter().filter(|at| full.has(*at)).collect();
        assert_eq!(has, [200, 229, 400, 409]);
    }

    #[test]
    fn what_the_system_gives_no_memory_for_is_left_out_and_told_as_such() {
        let range = |address, bytes| Range { owner: 1, home: 0, address, bytes };
        let all = || vec![range(100, 40), range(200, 30), range(300, 20), range(400, 10)];
        let placed_by = |room, most: u64, is_limited| {
            let make = |bytes: u64| {
                let error = std::io::ErrorKind::OutOfMemory.into();
                let fits = if is_limited { most } else { bytes / 2 };
                if bytes > most { Err(Refused { error, is_limited, fits }) } else { Ok(bytes) }
            };
            let (ranges, made, full) = placed(all(), room, |missing| Why::full(Place::Host(0), missing), make);
            let addresses: Vec<u64> = ranges.iter().map(|range| range.address).collect();
            (addresses, made, full.map(|full| (full.why.cause, full.ranges.len())))
        };
        assert_eq!(placed_by(100, 100, false), (vec![100, 200, 300, 400], 100, None));
        assert_eq!(placed_by(60, 100, false), (vec![100, 300], 60, Some(("room", 2))));
        // Half of it, and half of that.
        assert_eq!(placed_by(100, 30, false), (vec![300], 20, Some(("room", 3))));
        assert_eq!(placed_by(100, 75, true), (vec![100, 200], 70, Some(("addresses", 2))));
        assert_eq!(placed_by(100, 0, true), (vec![], 0, Some(("addresses", 4))));
    }

    #[test]
    fn spare_memory_is_room_only_as_far_as_it_was_ever_made() {
        // 100 were spare, of which only 20 are there.
        for (wanted, room, is_given_back) in [(100, 110, false), (130, 130, true), (200, 130, true)] {
            let gone = Cell::new(false);
            let there = beside(
                wanted,
                || Some(if gone.get() { 130 } else { 110 }),
                || {
                    gone.set(true);
                    100
                },
            );
            assert_eq!((there, gone.get()), (Some(room), is_given_back), "{wanted}");
        }
        assert_eq!(beside(200, || Some(110), || 0), Some(110));
    }

    #[test]
    fn what_comes_while_all_is_written_is_written_too_whether_or_not_it_stays() {
        let range = |address| Range { owner: 1, home: 0, address, bytes: 10 };
        // What is there at each look, and whether somebody was given something before it.
        let played = |looks: &[&[u64]]| {
            let look = Cell::new(0);
            let there = || {
                let at = look.replace(look.get() + 1).min(looks.len() - 1);
                looks[at].iter().map(|address| range(*address)).collect::<Vec<_>>()
            };
            let (count, dropped) = (Cell::new(0), Cell::new(0));
            let given = || count.replace(count.get() + 1);
            let mut rounds = Vec::new();
            let write = |ranges: &[Range], goes_on: &dyn Fn() -> bool| {
                let addresses: Vec<u64> = ranges.iter().map(|range| range.address).collect();
                rounds.push(addresses.clone());
                if goes_on() { Ok(addresses) } else { Err("it was told not to go on".to_owned()) }
            };
            let written = write_all(&there, &given, &|| true, write, |_| dropped.set(dropped.get() + 1));
            (written, rounds.len(), dropped.get())
        };
        assert_eq!(played(&[&[]]), (Ok(None), 0, 0));
        assert_eq!(played(&[&[1]]), (Ok(Some(vec![1])), 1, 0));
        // It comes at the look in the middle.
        assert_eq!(played(&[&[1], &[1, 2], &[1, 2]]), (Ok(Some(vec![1, 2])), 2, 0));
        // It has gone again when all is begun anew.
        assert_eq!(played(&[&[1], &[1, 2], &[1]]), (Ok(Some(vec![1])), 2, 0));
        // It comes at the end only.
        assert_eq!(played(&[&[1], &[1], &[1, 2], &[1, 2]]), (Ok(Some(vec![1, 2])), 2, 1));
        // Again and again: what is written last counts.
        let all: Vec<Vec<u64>> = (1..20).map(|last| (1..=last).collect()).collect();
        let all: Vec<&[u64]> = all.iter().map(Vec::as_slice).collect();
        let (written, rounds, _) = played(&all);
        assert!(written.is_ok_and(|written| written.is_some()) && rounds == ROUNDS as usize);
    }
}
