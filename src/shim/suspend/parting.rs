//! Which memory leaves its GPUs while nobody uses it, and in which order: of a program that is suspended, or that leaves one GPU alone.

use super::Target;
use super::leaves::Leaves;
use super::parted::Parted;
use super::put::Put;
use super::rearranging::{BATCH, Turn, rearrange, stop};
use super::turns;
use super::why::{FREED, LATE, Stayed, Why};
use crate::backing::open::Opened;
use crate::backing::terms;
use crate::gate::Held;
use crate::serve::handles::by_hand::{self, Own};
use crate::serve::memory::by_hand::Unplaced;
use crate::tiers;
use gpupool_cuda::{Driver, Physical};
use gpupool_lending::{self as lending, Part};
use gpupool_pool::{Block, Moved, Piece, Place, Wish};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

struct Leaving<'a> {
    opened: &'static Opened,
    driver: &'static Driver,
    held: &'a Held,
    leaves: Leaves<'a>,
    stayed: BTreeMap<Why, u64>,
    /// Why neighbours on one chunk do not go together, while they are tried one by one.
    parted_by: Option<Why>,
}

/// The first place on the host that memory of this GPU may go to while its program goes on.
pub fn host_for(opened: &Opened, home: u32) -> Option<Place> {
    opened.plan.order(home).into_iter().find(|place| place.is_host() && tiers::keeps_atomics(opened, *place))
}

/// Has everything that `leaves` names leave. From `until` on nothing more is begun, and what is left stayed because it was late
/// ([`is_late`]).
pub fn leave(
    opened: &'static Opened,
    driver: &'static Driver,
    held: &Held,
    leaves: Leaves<'_>,
    until: Option<Instant>,
    progress: &mut dyn FnMut(u64, u64),
) -> (Vec<Parted>, Stayed) {
    let mut leaving = Leaving { opened, driver, held, leaves, stayed: BTreeMap::new(), parted_by: None };
    let is_over = || until.is_some_and(|until| Instant::now() >= until);
    let late = || Why::new(LATE, "the time was over");
    let (near, own) = chosen(opened, leaves);
    let on_gpus = |pieces: &[Piece<Physical>]| there(leaves, pieces);
    let total =
        near.iter().map(|(_, pieces)| on_gpus(pieces)).sum::<u64>() + own.iter().map(|own| own.bytes).sum::<u64>();
    progress(0, total);
    if leaves.is_put() {
        let pieces = near.iter().flat_map(|(_, pieces)| pieces);
        for piece in pieces.filter(|piece| leaves.place(piece.place) && !leaves.piece(piece)) {
            let why = match leaves.full().filter(|full| full.has(piece.address)) {
                _ if !piece.anchors.is_empty() => Some(Why::pages()),
                Some(full) => Some(full.why.clone()),
                // Of one GPU not everything is copied at once.
                None => matches!(leaves, Leaves::Suspended { .. }).then(Why::came),
            };
            if let Some(why) = why {
                *leaving.stayed.entry(why).or_default() += piece.bytes;
            }
        }
    }
    let mut parted: Vec<Parted> = Vec::new();
    let mut done = 0;
    let is_to_peers = matches!(leaves, Leaves::Suspended { .. }) && !leaves.is_put();
    let step = if is_to_peers { turns::step_of(total) } else { BATCH };
    let mut rest: Vec<&[Stretch]> = batches(&near, step).collect();
    // Of a program that goes on, as much leaves at a time as there is time for.
    if matches!(leaves, Leaves::Suspended { .. }) && rest.len() > 1 {
        parted.extend(near.iter().flat_map(|(block, pieces)| places_before(block, pieces, leaves)));
        rest = leaving.go_in_turns(rest, &mut |batch| {
            done += batch.iter().map(|(_, pieces)| on_gpus(pieces)).sum::<u64>();
            progress(done, total);
        });
        for batch in rest {
            leaving.go(batch);
            done += batch.iter().map(|(_, pieces)| on_gpus(pieces)).sum::<u64>();
            progress(done, total);
        }
        rest = Vec::new();
    }
    for batch in rest {
        if is_over() {
            let bytes: u64 = batch.iter().map(|(_, pieces)| on_gpus(pieces)).sum();
            *leaving.stayed.entry(late()).or_default() += bytes;
            continue;
        }
        parted.extend(batch.iter().flat_map(|(block, pieces)| places_before(block, pieces, leaves)));
        leaving.go(batch);
        done += batch.iter().map(|(_, pieces)| on_gpus(pieces)).sum::<u64>();
        progress(done, total);
    }
    // What stayed has nothing to come back for.
    let now = opened.pool.stretches();
    let there: BTreeSet<(u64, Place)> =
        now.iter().flat_map(|(_, pieces)| pieces.iter().map(|piece| (piece.address, piece.place))).collect();
    parted.retain(|parted| match parted {
        Parted::Pooled { address, from, .. } => !there.contains(&(*address, *from)),
        Parted::Own { .. } => true,
    });
    for Own { address, bytes, asked, place } in own {
        if is_over() {
            *leaving.stayed.entry(late()).or_default() += bytes;
            continue;
        }
        let kept_at = leaves.put().filter(|put| put.has(address, bytes)).map(Put::place);
        let is_to_disk = matches!(leaves, Leaves::Suspended { target: Target::Folder(_), .. });
        let mut why = match kept_at {
            None if is_to_disk => Why::unstored(by_hand::why_unstored(opened, &Own { address, bytes, asked, place })),
            _ => leaves.why_nowhere(),
        };
        let stop = || stop(driver, held);
        let mut has_gone = |to: Place, gone: Result<(), Unplaced>| match gone {
            Ok(()) => true,
            Err(unplaced) => {
                why = why.clone().and(Why::own(&unplaced, to));
                false
            }
        };
        let went = kept_at.is_some_and(|to| has_gone(to, by_hand::put_away(driver, opened, address, bytes, to, stop)))
            || leaving.order(asked).into_iter().any(|to| {
                // By its account alone the host has as much once more as lies in plain memory.
                let has_room = !to.is_host() || terms::left_at(to) >= bytes;
                let go = || by_hand::move_behind(driver, opened, address, bytes, to, asked, stop);
                has_gone(to, if has_room { go() } else { Err(Unplaced::NoRoom) })
            });
        if went {
            parted.push(Parted::Own { address, bytes, asked, from: place });
        } else {
            *leaving.stayed.entry(why).or_default() += bytes;
        }
        done += bytes;
        progress(done, total);
    }
    // What was freed meanwhile has left in its own way.
    leaving.stayed.retain(|why, _| why.cause != FREED);
    (parted, leaving.stayed.into_iter().map(|(why, bytes)| (bytes, why)).collect())
}

/// Bytes of these at places that are left.
pub fn there(leaves: Leaves<'_>, pieces: &[Piece<Physical>]) -> u64 {
    pieces.iter().filter(|piece| leaves.place(piece.place)).map(|piece| piece.bytes).sum()
}

/// What `leaves` names, of the pool and of the program's own memory.
pub fn chosen(opened: &Opened, leaves: Leaves<'_>) -> (Vec<Stretch>, Vec<Own>) {
    opened.pool.free_empty_slabs();
    let mut near: Vec<Stretch> = opened
        .pool
        .stretches()
        .into_iter()
        .filter(|(block, pieces)| leaves.concerns(block.home) && pieces.iter().any(|piece| leaves.place(piece.place)))
        .collect();
    let leaves_own = |own: &Own| leaves.concerns(own.asked) && leaves.place(own.place);
    let mut own: Vec<_> = by_hand::all().into_iter().filter(leaves_own).collect();
    if let Leaves::Gpu { gpu, most, cap, .. } = leaves {
        // A chunk moves as a whole, with all blocks that stand on it: one of them alone would stay, however little was asked for.
        let (stay, chunks): (Vec<Standing>, Vec<Standing>) =
            chunks_of(&near, gpu, leaves).into_iter().partition(|chunk| chunk.is_anchored);
        let pooled = chunks.iter().map(|chunk| Part { bytes: chunk.bytes, is_home: chunk.is_home });
        let by_hand = own.iter().map(|own| Part { bytes: own.bytes, is_home: own.asked == gpu });
        let parts: Vec<Part> = pooled.chain(by_hand).collect();
        let chosen = lending::choose(&parts, most, cap);
        let going = parts.iter().zip(&chosen).filter(|(_, goes)| **goes).map(|(part, _)| part.bytes);
        let mut left = most.saturating_sub(going.sum());
        let (of_chunks, of_own) = chosen.split_at(chunks.len());
        let mut keeps = of_own.iter().copied();
        own.retain(|_| keeps.next().unwrap_or(true));
        let mut goes: BTreeSet<u64> =
            chunks.iter().zip(of_chunks).filter(|(_, goes)| **goes).map(|(chunk, _)| chunk.address).collect();
        // Where the others are not enough it is told why these stay.
        for chunk in stay {
            if left > 0 {
                left = left.saturating_sub(chunk.bytes);
                goes.insert(chunk.address);
            }
        }
        for (_, pieces) in &mut near {
            pieces.retain(|piece| !leaves.place(piece.place) || goes.contains(&piece.chunk_address));
        }
        near.retain(|(_, pieces)| pieces.iter().any(|piece| leaves.place(piece.place)));
    }
    (near, own)
}

/// A chunk of the pool on a GPU that is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standing {
    address: u64,
    /// Of the blocks that stand on it and are concerned.
    bytes: u64,
    /// Whether any of them is for the GPU itself.
    is_home: bool,
    /// Whether others know any of it by its pages, so that it stays.
    is_anchored: bool,
}

/// The chunks at places that are left on which these stand, by their addresses.
fn chunks_of(stretches: &[Stretch], gpu: u32, leaves: Leaves<'_>) -> Vec<Standing> {
    let mut chunks: BTreeMap<u64, Standing> = BTreeMap::new();
    for (block, pieces) in stretches {
        for piece in pieces.iter().filter(|piece| leaves.place(piece.place)) {
            let address = piece.chunk_address;
            let chunk =
                chunks.entry(address).or_insert(Standing { address, bytes: 0, is_home: false, is_anchored: false });
            chunk.bytes += piece.bytes;
            chunk.is_home |= block.home == gpu;
            chunk.is_anchored |= !piece.anchors.is_empty();
        }
    }
    chunks.into_values().collect()
}

fn places_before(block: &Block, pieces: &[Piece<Physical>], leaves: Leaves<'_>) -> Vec<Parted> {
    let of = |piece: &Piece<Physical>| Parted::Pooled {
        block: block.id,
        start: block.address,
        address: piece.address,
        bytes: piece.bytes,
        from: piece.place,
    };
    pieces.iter().filter(|piece| leaves.place(piece.place)).map(of).collect()
}

pub type Stretch = (Block, Vec<Piece<Physical>>);

/// Whether these neighbours stand on one chunk together.
fn share_a_chunk((_, pieces): &Stretch, (_, next): &Stretch) -> bool {
    pieces.last().zip(next.first()).is_some_and(|(last, first)| last.chunk_address == first.chunk_address)
}

/// Where these come apart without two that share a chunk coming apart, as near to the middle as can be; `None`: nowhere.
fn middle(all: &[Stretch]) -> Option<usize> {
    let ends = (1..all.len()).filter(|at| !share_a_chunk(&all[at - 1], &all[*at]));
    ends.min_by_key(|at| at.abs_diff(all.len() / 2))
}

/// Neighbours that stand on one chunk together, since a chunk moves as a whole, and so many that it is worth it.
pub fn batches(all: &[Stretch], step: u64) -> impl Iterator<Item = &[Stretch]> {
    let mut sum = 0;
    all.chunk_by(move |before, behind| {
        let ((one, _), (other, _)) = (before, behind);
        sum += one.bytes;
        let goes_on = share_a_chunk(before, behind) || sum < step && one.home == other.home;
        if !goes_on {
            sum = 0;
        }
        goes_on
    })
}

/// What became of a batch.
enum Gone {
    All,
    /// Some of it has been freed meanwhile, and this is what has not.
    But(Vec<Stretch>),
    None,
}

impl Leaving<'_> {
    /// Where memory of the pool may go that belongs to this GPU, best first.
    fn targets(&self, home: u32) -> Vec<Place> {
        match self.leaves {
            leaves if leaves.is_put() => leaves.put().map(Put::place).into_iter().collect(),
            _ => self.order(home),
        }
    }

    /// The same for memory that the program made itself.
    fn order(&self, home: u32) -> Vec<Place> {
        let may =
            |place: &Place| (place.is_host() || !self.leaves.place(*place)) && self.leaves.takes(self.opened, *place);
        self.opened.plan.order(home).into_iter().filter(may).collect()
    }

    /// Moves these to the first place that they may go to; what did not go there as a whole is the answer.
    fn go_in_turns<'b>(
        &mut self,
        batches: Vec<&'b [Stretch]>,
        gone: &mut dyn FnMut(&'b [Stretch]),
    ) -> Vec<&'b [Stretch]> {
        let wishes_of = |batch: &&[Stretch]| -> Vec<Wish> {
            let to = batch.first().and_then(|(first, _)| self.targets(first.home).first().copied());
            to.map(|to| self.wishes(batch, to)).unwrap_or_default()
        };
        let (batches, rest): (Vec<_>, Vec<_>) =
            batches.into_iter().map(|batch| (batch, wishes_of(&batch))).partition(|(_, wishes)| !wishes.is_empty());
        let mut rest: Vec<&[Stretch]> = rest.into_iter().map(|(batch, _)| batch).collect();
        let (batches, wishes): (Vec<&[Stretch]>, Vec<Vec<Wish>>) = batches.into_iter().unzip();
        let (opened, driver, held) = (self.opened, self.driver, self.held);
        turns::carry_out(opened, driver, held, &wishes, &|| true, &mut |at, moved| match moved {
            Ok(moved) => {
                self.note_stayed(moved);
                gone(batches[at]);
            }
            Err(_) => rest.push(batches[at]),
        });
        rest
    }

    /// Moves all of these, or less and less at a time where there is no room for as much: to GPUs as long as one has room for any of them, and then to the host. What goes to the host as
    /// a whole where it is too much for one GPU would leave the others' room empty.
    fn go(&mut self, batch: &[Stretch]) {
        let Some((first, _)) = batch.first() else { return };
        let mut why = self.leaves.why_nowhere();
        let (gpus, others): (Vec<Place>, Vec<Place>) =
            self.targets(first.home).into_iter().partition(|to| matches!(to, Place::Gpu(_)));
        match self.go_to(batch, &gpus, &mut why) {
            Gone::All => return,
            Gone::But(living) => return self.go(&living),
            Gone::None => {}
        }
        let least = || batch.iter().map(|(_, pieces)| there(self.leaves, pieces)).filter(|bytes| *bytes > 0).min();
        // By its limit, and as the driver has it: where others have filled a GPU, each block would be tried there in vain.
        let is_free = |to: Place, least| self.opened.plan.free_at(self.driver, to).is_none_or(|free| free >= least);
        let may_take = |to: Place, least| terms::left_at(to) >= least && is_free(to, least);
        let has_room = || least().is_some_and(|least| gpus.iter().any(|to| may_take(*to, least)));
        if let Some(apart) = middle(batch).filter(|_| !others.is_empty() && has_room()) {
            let (left, right) = batch.split_at(apart);
            self.go(left);
            return self.go(right);
        }
        match self.go_to(batch, &others, &mut why) {
            Gone::All => return,
            Gone::But(living) => return self.go(&living),
            Gone::None => {}
        }
        match batch {
            [(_, pieces)] => self.go_by_piece(pieces, first.home, &why),
            _ => {
                let apart = middle(batch);
                // Neighbours on one chunk keep each other there, and why they are apart is why they stay.
                let before = if apart.is_none() { self.parted_by.replace(why) } else { None };
                let (left, right) = batch.split_at(apart.unwrap_or(batch.len() / 2));
                self.go(left);
                self.go(right);
                if apart.is_none() {
                    self.parted_by = before;
                }
            }
        }
    }

    /// Moves all of these to the first of the places that has room for them.
    fn go_to(&mut self, batch: &[Stretch], places: &[Place], why: &mut Why) -> Gone {
        for to in places {
            let wishes = self.wishes(batch, *to);
            if wishes.is_empty() {
                return Gone::All;
            }
            match self.rearrange(&wishes) {
                Ok(all) => {
                    self.note_stayed(all);
                    return Gone::All;
                }
                // All the others go together as before: what stands on one chunk goes as a whole or not at all.
                Err(cause) if cause.cause == FREED => {
                    let living = self.living(batch);
                    if living.len() < batch.len() {
                        return Gone::But(living);
                    }
                    *why = cause;
                }
                Err(cause) => *why = why.clone().and(cause),
            }
        }
        Gone::None
    }

    /// What of these has not been freed meanwhile.
    fn living(&self, batch: &[Stretch]) -> Vec<Stretch> {
        let now = self.opened.pool.stretches();
        let live: BTreeMap<u64, u64> = now.iter().map(|(block, _)| (block.address, block.id)).collect();
        batch.iter().filter(|(block, _)| live.get(&block.address) == Some(&block.id)).cloned().collect()
    }

    /// What of these lies at places that are left, or what of that was copied. The rest of a block stays where it is: it has nothing to come back for, and what
    /// lies on one chunk together with it would come back only where there is room for the rest on a chunk of its own.
    fn wishes(&self, batch: &[Stretch], to: Place) -> Vec<Wish> {
        let mut wishes: Vec<Wish> = Vec::new();
        for (block, pieces) in batch {
            let mut lay = None;
            for piece in pieces.iter().filter(|piece| self.leaves.piece(piece)) {
                let lay_beside = lay.replace(piece.place) == Some(piece.place);
                match wishes.last_mut() {
                    Some(last)
                        if lay_beside
                            && last.address + last.bytes == piece.address
                            && last.address >= block.address =>
                    {
                        last.bytes += piece.bytes;
                    }
                    _ => wishes.push(Wish { address: piece.address, bytes: piece.bytes, to }),
                }
            }
        }
        wishes
    }

    /// One block that is larger than any place has room for.
    fn go_by_piece(&mut self, pieces: &[Piece<Physical>], home: u32, why: &Why) {
        let leaves = self.leaves;
        for piece in pieces.iter().filter(|piece| leaves.piece(piece)) {
            let mut why = why.clone();
            let went = pieces.len() > 1
                && self.targets(home).into_iter().any(|to| {
                    match self.rearrange(&[Wish { address: piece.address, bytes: piece.bytes, to }]) {
                        Ok(moved) => {
                            self.note_stayed(moved);
                            true
                        }
                        Err(cause) => {
                            why = why.clone().and(cause);
                            false
                        }
                    }
                });
            if !went {
                *self.stayed.entry(why).or_default() += piece.bytes;
            }
        }
    }

    fn note_stayed(&mut self, Moved { anchored, shared, .. }: Moved) {
        let why_shared = self.parted_by.clone().unwrap_or_else(Why::shared);
        for (bytes, why) in [(anchored, Why::pages()), (shared, why_shared)] {
            if bytes > 0 {
                *self.stayed.entry(why).or_default() += bytes;
            }
        }
    }

    fn rearrange(&self, wishes: &[Wish]) -> Result<Moved, Why> {
        rearrange(self.opened, self.driver, self.held, &Turn::default(), wishes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_on_one_chunk_stay_together_where_a_batch_comes_apart() {
        let stretch = |chunks: &[u64]| -> Stretch {
            let block = Block { address: 0, bytes: 1, home: 0, owner: 1, id: 1 };
            let piece = |chunk_address: &u64| Piece {
                address: *chunk_address,
                bytes: 1,
                place: Place::Gpu(0),
                chunk_address: *chunk_address,
                chunk_bytes: 1,
                handle: Physical::from_raw(1),
                anchors: gpupool_pool::Anchors::NONE,
            };
            (block, chunks.iter().map(piece).collect())
        };
        let at = |all: &[&[u64]]| middle(&all.iter().map(|chunks| stretch(chunks)).collect::<Vec<_>>());
        assert_eq!(at(&[&[1], &[2], &[3], &[4]]), Some(2));
        assert_eq!(at(&[&[1], &[1, 2], &[2], &[4]]), Some(3));
        assert_eq!(at(&[&[1], &[2], &[2, 3], &[3]]), Some(1));
        assert_eq!(at(&[&[1, 2], &[2]]), None);
    }
}
