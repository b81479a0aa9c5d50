//! How memory comes back that left its GPUs (`parted.rs`): to where it was, or where there is room now; and what of it has not.

use super::away;
use super::kept::Kept;
use super::parted::{Parted, living};
use super::parting::{Stretch, host_for};
use super::put::Put;
use super::rearranging::{BATCH, Turn, rearrange};
use super::stored::Unread;
use super::turns;
use super::why::Why;
use crate::backing::open::Opened;
use crate::backing::terms;
use crate::gate::{Held, Limits};
use crate::serve::handles::by_hand;
use crate::tiers;
use gpupool_config::format_size;
use gpupool_cuda::{Driver, Physical};
use gpupool_pool::{FRAME, Mapped, Moved, Piece, Place, Wish};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

/// For how many ranges that found no room smaller memory goes out of the way, of the largest: the program stands still meanwhile, and each looks at all that it has.
const MOST_IN_THE_WAY: usize = 8;

/// What could not come back although it has to, since it is mapped nowhere: why, and all that is elsewhere still.
pub type Stuck = (String, Vec<Parted>);

/// Has all of this come back; bytes that came, and that did not.
///
/// # Errors
/// Something is where no GPU reaches it still.
pub fn come_back(
    opened: &'static Opened,
    driver: &'static Driver,
    held: &Held,
    parted: Vec<Parted>,
    put: Option<&Put>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(u64, u64), Stuck> {
    let Some(put) = put else {
        return Ok(bring_back(opened, driver, held, &parted, None, &mut None, progress));
    };
    let (mut why, mut refused) = (None, None);
    let back = put.reading(driver, |unread| {
        let (mut moved, mut stayed) =
            bring_back(opened, driver, held, &parted, Some((put, unread)), &mut refused, progress);
        let left = still_put(opened, &parted);
        if unread.why().is_none() && !left.is_empty() {
            // It was there before anybody said otherwise, and the program cannot go on without it.
            let _waived = terms::waive(left.iter().map(Parted::from));
            let (came, _) = bring_back(opened, driver, held, &left, Some((put, unread)), &mut refused, &mut |_, _| {});
            moved += came;
            stayed = stayed.saturating_sub(came);
        }
        why = unread.why();
        (moved, stayed)
    });
    // Of what was freed meanwhile, nothing is left there either. All work is over, so this waits for nothing.
    let gpus: Vec<u32> = opened.plan.members.keys().copied().collect();
    opened.pool.trim(Some(put.place()), None, &gpus);
    let is_stored = |(_, pieces): &Stretch| pieces.iter().any(|piece| piece.place.is_stored());
    let bytes = |pieces: &[Piece<Physical>]| -> u64 {
        pieces.iter().filter(|piece| piece.place.is_stored()).map(|piece| piece.bytes).sum()
    };
    let pooled =
        opened.pool.stretches().into_iter().filter(is_stored).map(|(block, pieces)| (block.home, bytes(&pieces)));
    let own = by_hand::all().into_iter().filter(|own| own.place.is_stored()).map(|own| (own.asked, own.bytes));
    let stored = pooled.chain(own).reduce(|(home, sum), (_, bytes)| (home, sum + bytes));
    match (back, stored) {
        (Ok(back), None) => Ok(back),
        // Nothing of it was needed.
        (Err(_), None) => Ok((0, 0)),
        (Ok(_), Some((home, bytes))) => {
            let nowhere = || {
                let order = opened.plan.order(home);
                let places: Vec<String> = order.iter().map(Place::to_string).collect();
                let last = refused.as_ref().map_or_else(String::new, |why: &Why| format!(" ({})", why.text));
                format!("{} of it found no room on {}{last}", format_size(bytes), places.join(", "))
            };
            Err((why.unwrap_or_else(nowhere), parted))
        }
        (Err(why), Some(_)) => Err((why, parted)),
    }
}

/// Has what was put in plain memory become memory of the host that GPUs reach, a batch after the other until `until`, and gives the plain memory of each back;
/// how many bytes are left.
///
/// # Errors
/// Nothing more of it found a place; why, in words.
pub fn settle(
    opened: &'static Opened,
    driver: &'static Driver,
    held: &Held,
    kept: &Kept,
    until: Instant,
) -> Result<u64, String> {
    kept.reading(driver, |unread| {
        let mut wishes = put_down(opened);
        loop {
            // Of what was freed meanwhile nothing is left there either. All work is over, so this waits for nothing.
            let gpus: Vec<u32> = opened.plan.members.keys().copied().collect();
            opened.pool.trim(Some(Place::Pageable), None, &gpus);
            let left = |wishes: &[Wish]| wishes.iter().map(|wish| wish.bytes).sum::<u64>();
            let before = left(&wishes);
            if wishes.is_empty() || Instant::now() >= until {
                return Ok(before);
            }
            let mut sum = 0;
            let count = wishes.iter().take_while(|wish| {
                let goes = sum < BATCH;
                sum += wish.bytes;
                goes
            });
            let batch = &wishes[..count.count()];
            let mut why = None;
            if let Err(cause) = rearrange(opened, driver, held, &Turn::default(), batch) {
                why = Some(cause);
                for wish in batch.iter().take_while(|_| unread.why().is_none()) {
                    nearest(opened, driver, held, *wish);
                }
            }
            let after = put_down(opened);
            kept.look_what_arrived(opened);
            if left(&after) >= before {
                return Err(unread.why().or(why.map(|why| why.text)).unwrap_or_else(|| Why::nowhere().text));
            }
            wishes = after;
        }
    })
}

/// What of blocks lies in plain memory, each to go to the host.
fn put_down(opened: &Opened) -> Vec<Wish> {
    let mut wishes: Vec<Wish> = Vec::new();
    for (block, pieces) in opened.pool.stretches() {
        let to = host_for(opened, block.home).unwrap_or(Place::Gpu(block.home));
        for piece in pieces.iter().filter(|piece| piece.place == Place::Pageable) {
            match wishes.last_mut() {
                Some(last) if last.address + last.bytes == piece.address && last.address >= block.address => {
                    last.bytes += piece.bytes;
                }
                _ => wishes.push(Wish { address: piece.address, bytes: piece.bytes, to }),
            }
        }
    }
    wishes
}

/// What of this lies neither where it lay nor at home now, which is never worse: of each block the parts for which that is so.
pub fn not_back(opened: &Opened, parted: &[Parted]) -> Vec<Parted> {
    let blocks: BTreeMap<u64, (u64, u32)> =
        opened.pool.stretches().iter().map(|(block, _)| (block.address, (block.id, block.home))).collect();
    let own = by_hand::all();
    let away = |parted: &Parted| -> Vec<Parted> {
        match *parted {
            Parted::Pooled { block, start, address, bytes, from } => {
                let Some((_, home)) = blocks.get(&start).filter(|(id, _)| *id == block) else { return Vec::new() };
                let is_away = |piece: &&Piece<Physical>| piece.place != from && piece.place != Place::Gpu(*home);
                let mut ranges: Vec<(u64, u64)> = Vec::new();
                for piece in opened.pool.pieces_of_stretch(address, bytes).iter().filter(is_away) {
                    match ranges.last_mut() {
                        Some((_, end)) if *end == piece.address => *end += piece.bytes,
                        _ => ranges.push((piece.address, piece.address + piece.bytes)),
                    }
                }
                let part = |(address, end)| Parted::Pooled { block, start, address, bytes: end - address, from };
                ranges.into_iter().map(part).collect()
            }
            Parted::Own { address, from, .. } => {
                let is_away = own.iter().any(|own| own.address == address && own.place != from);
                is_away.then_some(*parted).into_iter().collect()
            }
        }
    };
    parted.iter().filter(|parted| matches!(parted.from(), Place::Gpu(_))).flat_map(away).collect()
}

/// What of this has not come back from where nothing of it is mapped.
fn still_put(opened: &Opened, parted: &[Parted]) -> Vec<Parted> {
    let stretches = opened.pool.stretches();
    let pieces = stretches.iter().flat_map(|(_, pieces)| pieces).filter(|piece| piece.place.is_stored());
    let stored: Vec<(u64, u64)> = pieces.map(|piece| (piece.address, piece.address + piece.bytes)).collect();
    let is_stored = |parted: &&Parted| match **parted {
        Parted::Pooled { address, bytes, .. } => {
            let next = stored.partition_point(|(_, end)| *end <= address);
            stored.get(next).is_some_and(|(start, _)| *start < address + bytes)
        }
        Parted::Own { address, .. } => by_hand::is_away(address),
    };
    parted.iter().filter(is_stored).copied().collect()
}

/// As [`come_back`], as far as it goes: nothing more is tried once something that is mapped nowhere could not be read. `why`: of the last that did not come.
pub fn bring_back(
    opened: &'static Opened,
    driver: &'static Driver,
    held: &Held,
    parted: &[Parted],
    put: Option<(&Put, &Unread)>,
    why: &mut Option<Why>,
    progress: &mut dyn FnMut(u64, u64),
) -> (u64, u64) {
    // What the driver has taken meanwhile for small blocks of the program, or had before, is not lacking a second time.
    let _bringing = terms::bring();
    let is_unread = || put.is_some_and(|(_, unread)| unread.why().is_some());
    let arrived = || put.into_iter().for_each(|(put, _)| put.look_what_arrived(opened));
    // A block that was freed meanwhile has nothing to come back.
    let parted = living(opened, parted.to_vec());
    let blocks = opened.pool.stretches().into_iter().map(|(block, _)| block);
    let ends: BTreeMap<u64, u64> = blocks.map(|block| (block.address, block.address + block.bytes)).collect();
    let total = parted.iter().map(Parted::bytes).sum();
    progress(0, total);
    let (mut moved, mut stayed) = (0, 0);
    let step = if put.is_some() { BATCH } else { turns::step_of(total) };
    let mut batches: Vec<Vec<Wish>> = Vec::new();
    let (mut own, mut away): (Vec<Parted>, Vec<Parted>) = (Vec::new(), Vec::new());
    for parted in parted {
        match parted {
            Parted::Pooled { start, address, bytes, from, .. } => {
                let is_ill = |piece: &Piece<Physical>| terms::is_place_left_alone(piece.place);
                if opened.pool.pieces_of_stretch(address, bytes).iter().any(is_ill) {
                    *why = Some(Why::ill());
                    stayed += bytes;
                    continue;
                }
                // A block that was freed in between has nothing to come back.
                let Some(block) = ends.get(&start).map(|end| start..*end) else { continue };
                let wish = whole_frames(block, address, bytes, from);
                match batches.last_mut() {
                    Some(batch) if sum_of(batch) < step => batch.push(wish),
                    _ => batches.push(vec![wish]),
                }
            }
            Parted::Own { address, .. } if by_hand::is_away(address) => away.push(parted),
            Parted::Own { .. } => own.push(parted),
        }
    }
    // In whole frames, of which the last one of a block is not always full.
    let kept = |batch: &[Wish], back: Moved| (back.anchored + back.shared).min(sum_of(batch));
    let mut rest: Vec<&[Wish]> = Vec::new();
    if batches.len() > 1 {
        turns::carry_out(opened, driver, held, &batches, &|| !is_unread(), &mut |at, back| match back {
            Ok(back) => {
                let (all, kept) = (sum_of(&batches[at]), kept(&batches[at], back));
                (moved, stayed) = (moved + all - kept, stayed + kept);
                arrived();
                progress(moved + stayed, total);
            }
            Err(_) => rest.push(&batches[at]),
        });
    } else {
        rest.extend(batches.iter().map(Vec::as_slice));
    }
    let mut alone: Vec<Wish> = Vec::new();
    for batch in rest {
        if is_unread() {
            break;
        }
        match rearrange(opened, driver, held, &Turn::default(), batch) {
            Ok(back) => {
                let kept = kept(batch, back);
                if kept > 0 {
                    *why = Some(if back.shared > 0 { Why::shared() } else { Why::pages() });
                }
                (moved, stayed) = (moved + sum_of(batch) - kept, stayed + kept);
                arrived();
            }
            Err(cause) => {
                *why = Some(cause);
                alone.extend_from_slice(batch);
                continue;
            }
        }
        progress(moved + stayed, total);
    }
    // The largest first: what is small finds room beside it, and would be in its way.
    alone.sort_by_key(|wish| Reverse(wish.bytes));
    let mut without: Vec<Wish> = Vec::new();
    for wish in alone {
        if is_unread() {
            break;
        }
        match nearest(opened, driver, held, wish) {
            Some(place) if place == wish.to || !place.is_host() => moved += wish.bytes,
            // What was freed meanwhile has nowhere to come back to.
            None if opened.pool.pieces_of_stretch(wish.address, wish.bytes).is_empty() => {}
            _ => {
                stayed += wish.bytes;
                without.push(wish);
            }
        }
        arrived();
        progress(moved + stayed, total);
    }
    for wish in without.into_iter().take(MOST_IN_THE_WAY).take_while(|_| !is_unread()) {
        if behind_smaller(opened, driver, held, wish) {
            (moved, stayed) = (moved + wish.bytes, stayed.saturating_sub(wish.bytes));
            progress(moved + stayed, total);
        }
    }
    for parted in own.iter().take_while(|_| !is_unread()) {
        let Parted::Own { address, bytes, asked, from } = *parted else { continue };
        let stop = || held.stop(driver, &Limits::default()).ok();
        match by_hand::move_behind(driver, opened, address, bytes, from, asked, stop) {
            Ok(()) => moved += bytes,
            Err(unplaced) => {
                *why = Some(Why::own(&unplaced, from));
                stayed += bytes;
            }
        }
    }
    for batch in own_batches(&away) {
        bring_in(opened, driver, held, batch, &is_unread, &mut |came, bytes| {
            if came {
                moved += bytes;
            } else {
                stayed += bytes;
            }
        });
        arrived();
        progress(moved + stayed, total);
    }
    (moved, stayed)
}

/// The frames that this range of a block has a part of, up to the block's last byte: nothing less can move.
fn whole_frames(block: Range<u64>, address: u64, bytes: u64, to: Place) -> Wish {
    let start = (address - address % FRAME).max(block.start);
    let end = (address + bytes).next_multiple_of(FRAME).min(block.end);
    Wish { address: start, bytes: end.saturating_sub(start), to }
}

fn sum_of(batch: &[Wish]) -> u64 {
    batch.iter().map(|wish| wish.bytes).sum()
}

/// As many of these as are worth one call that copies, of one GPU and from one place.
fn own_batches(away: &[Parted]) -> impl Iterator<Item = &[Parted]> {
    let mut sum = 0;
    away.chunk_by(move |one, other| {
        sum += one.bytes();
        let alike =
            matches!((one, other), (Parted::Own { asked, .. }, Parted::Own { asked: next, .. }) if asked == next);
        let goes_on = alike && one.from() == other.from() && sum < BATCH;
        if !goes_on {
            sum = 0;
        }
        goes_on
    })
}

/// Has memory of the program's own that is mapped nowhere come back to where it lay, all of these at once or less and less where that fails; one
/// alone to where there is room. `told` hears for each whether it lies on a GPU, and its bytes.
fn bring_in(
    opened: &Opened,
    driver: &'static Driver,
    held: &Held,
    batch: &[Parted],
    is_unread: &dyn Fn() -> bool,
    told: &mut dyn FnMut(bool, u64),
) {
    let Some(Parted::Own { asked, from, .. }) = batch.first() else { return };
    if is_unread() {
        return;
    }
    // What of it has come with others before stays where it is.
    let starts: Vec<u64> = batch.iter().map(Parted::address).filter(|start| by_hand::is_away(*start)).collect();
    let bytes = batch.iter().map(Parted::bytes).sum();
    let stop = || held.stop(driver, &Limits::default()).ok();
    let come = |to: Place| by_hand::bring_in(driver, opened, &starts, bytes, to, *asked, stop).is_ok();
    if come(*from) {
        return batch.iter().for_each(|parted| told(true, parted.bytes()));
    }
    if batch.len() > 1 {
        let (left, right) = batch.split_at(batch.len() / 2);
        bring_in(opened, driver, held, left, is_unread, told);
        return bring_in(opened, driver, held, right, is_unread, told);
    }
    let mut others = opened.plan.order(*asked).into_iter().filter(|place| place != from);
    let found = others.find(|place| !is_unread() && come(*place));
    told(found.is_some_and(|place| !place.is_host()), bytes);
}

/// Where a range has room now: where it was, or on another GPU of the pool; and for what is mapped nowhere, on the host.
fn nearest(opened: &Opened, driver: &'static Driver, held: &Held, wish: Wish) -> Option<Place> {
    let gpu = match wish.to {
        Place::Gpu(gpu) => Some(gpu),
        Place::Host(_) | Place::Disk | Place::Pageable => None,
    };
    let home = opened.pool.block_at(wish.address).map(|block| block.home).or(gpu);
    let others = home.map(|home| opened.plan.order(home)).unwrap_or_default();
    let is_here = |row: &Mapped| (row.address..row.address + row.bytes).contains(&wish.address);
    let is_stored = opened.pool.mapped().iter().any(|row| row.place.is_stored() && is_here(row));
    // What lies on a GPU already is no better off on another one that is not its own.
    let is_on_gpu = opened
        .pool
        .pieces_of_stretch(wish.address, 1)
        .first()
        .is_some_and(|piece| matches!(piece.place, Place::Gpu(_)));
    let may = |place: &Place| (is_stored || matches!(place, Place::Gpu(_)) && !is_on_gpu) && *place != wish.to;
    let others = others.into_iter().filter(may);
    std::iter::once(wish.to).chain(others).find(|&to| {
        rearrange(opened, driver, held, &Turn::default(), &[Wish { to, ..wish }])
            .is_ok_and(|moved| moved.anchored + moved.shared == 0)
    })
}

/// Has a range that found no room on any GPU come to one from which smaller memory of the program's goes to another GPU: a chunk is not divided, so together they may have
/// room for it where neither has. What does not help lies where it lay before. Whether the range lies on a GPU now.
fn behind_smaller(opened: &Opened, driver: &'static Driver, held: &Held, wish: Wish) -> bool {
    let is_on_host = opened.pool.pieces_of_stretch(wish.address, 1).first().is_some_and(|piece| piece.place.is_host());
    let Some(block) = opened.pool.block_at(wish.address).filter(|_| is_on_host) else { return false };
    let goes = |wish: Wish| {
        let moved = rearrange(opened, driver, held, &Turn::default(), &[wish]);
        moved.is_ok_and(|moved| moved.anchored + moved.shared == 0)
    };
    let gpus_for = |home: u32, but: Place| {
        let order = opened.plan.order(home).into_iter();
        order.filter(move |place| matches!(place, Place::Gpu(_)) && *place != but)
    };
    let first = Some(wish.to).filter(|place| matches!(place, Place::Gpu(_)));
    first.into_iter().chain(gpus_for(block.home, wish.to)).any(|to| {
        let by_limit = opened.plan.limit(to).saturating_sub(opened.plan.accounts.taken(to));
        let free = opened.plan.free_at(driver, to).unwrap_or(0).min(by_limit);
        let lacking = wish.bytes.saturating_sub(free);
        let smaller = smaller_at(opened, to, wish.bytes);
        if smaller.iter().map(|(_, piece)| piece.bytes()).sum::<u64>() < lacking {
            return false;
        }
        let (mut gone, mut made) = (Vec::new(), 0);
        for (home, piece) in smaller {
            if made >= lacking {
                break;
            }
            let (address, bytes) = (piece.address(), piece.bytes());
            if gpus_for(home, to).any(|other| goes(Wish { address, bytes, to: other })) {
                made += bytes;
                gone.push((home, piece));
            }
        }
        let is_there = made >= lacking && goes(Wish { to, ..wish });
        if is_there {
            // What was at home is missed there, and comes back once that has room.
            away::add(gone.into_iter().filter(|(home, _)| Place::Gpu(*home) == to).map(|(_, piece)| piece));
        } else {
            let back = |piece: &Parted| Wish { address: piece.address(), bytes: piece.bytes(), to };
            gone.iter().for_each(|(_, piece)| _ = goes(back(piece)));
        }
        is_there
    })
}

/// What lies on this GPU in pieces that are smaller than so many bytes and may go elsewhere, with the homes of their blocks: what lies at home last, and the largest first, so that
/// few have to go.
fn smaller_at(opened: &Opened, to: Place, bytes: u64) -> Vec<(u32, Parted)> {
    let may_go = |piece: &Piece<Physical>| {
        piece.place == to
            && piece.bytes < bytes
            && piece.anchors.is_empty()
            && !terms::is_place_left_alone(piece.place)
            && !tiers::is_placed(piece.address, piece.bytes)
    };
    let mut all = Vec::new();
    for (block, pieces) in opened.pool.stretches() {
        for Piece { address, bytes, .. } in pieces.into_iter().filter(may_go) {
            let (id, start) = (block.id, block.address);
            all.push((block.home, Parted::Pooled { block: id, start, address, bytes, from: to }));
        }
    }
    all.sort_by_key(|(home, piece)| (Place::Gpu(*home) == to, Reverse(piece.bytes())));
    all
}
