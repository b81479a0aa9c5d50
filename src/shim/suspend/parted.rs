//! Memory that left, by where it lay: what is to come back.

use crate::backing::open::Opened;
use crate::backing::terms;
use crate::tiers;
use gpupool_cuda::Physical;
use gpupool_pool::{Piece, Place};
use std::collections::BTreeMap;

/// Memory that left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parted {
    /// Of the pool: of a block with this number, this range, which lay there.
    Pooled { block: u64, start: u64, address: u64, bytes: u64, from: Place },
    /// The program's own, mapped at this address and asked for on this GPU, which lay there.
    Own { address: u64, bytes: u64, asked: u32, from: Place },
}

impl Parted {
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Pooled { bytes, .. } | Self::Own { bytes, .. } => *bytes,
        }
    }

    pub fn address(&self) -> u64 {
        match self {
            Self::Pooled { address, .. } | Self::Own { address, .. } => *address,
        }
    }

    /// Where it lay.
    pub fn from(&self) -> Place {
        match self {
            Self::Pooled { from, .. } | Self::Own { from, .. } => *from,
        }
    }
}

/// What of `more` is not among what has left before: of a program that is suspended, what left its GPU for one from which it leaves again comes back to the first.
pub fn beyond(more: Vec<Parted>, before: &[Parted]) -> Vec<Parted> {
    let mut known: Vec<(u64, u64)> =
        before.iter().map(|parted| (parted.address(), parted.address() + parted.bytes())).collect();
    known.sort_unstable();
    let mut rest = Vec::new();
    for parted in more {
        let Parted::Pooled { block, start, address, bytes, from } = parted else {
            if !before.iter().any(|known| known.address() == parted.address()) {
                rest.push(parted);
            }
            continue;
        };
        let (mut at, end) = (address, address + bytes);
        // Addresses of the pool and of the program's own memory have nothing in common.
        for &(from_there, until) in known.iter().filter(|(start, until)| *until > address && *start < end) {
            if from_there > at {
                rest.push(Parted::Pooled { block, start, address: at, bytes: from_there - at, from });
            }
            at = at.max(until);
        }
        if at < end {
            rest.push(Parted::Pooled { block, start, address: at, bytes: end - at, from });
        }
    }
    rest
}

/// What of this belongs to blocks that live.
pub fn living(opened: &Opened, parted: Vec<Parted>) -> Vec<Parted> {
    let live: BTreeMap<u64, u64> = opened.pool.stretches().iter().map(|(block, _)| (block.address, block.id)).collect();
    let lives = |parted: &Parted| match parted {
        Parted::Pooled { block, start, .. } => live.get(start) == Some(block),
        Parted::Own { .. } => true,
    };
    parted.into_iter().filter(lives).collect()
}

/// What of a GPU's own blocks lies elsewhere, as far as there is `room` for it on that GPU.
pub fn displaced(opened: &Opened, gpu: u32, room: u64) -> Vec<Parted> {
    let mut left = room;
    let home = Place::Gpu(gpu);
    let stretches = opened.pool.stretches().into_iter().filter(|(block, _)| block.home == gpu);
    let far = stretches.flat_map(|(block, pieces)| pieces.into_iter().map(move |piece| (block, piece)));
    // What the program has put somewhere itself stays there.
    let is_put = |piece: &Piece<Physical>| tiers::is_placed(piece.address, piece.bytes);
    let far = far.filter(|(_, piece)| {
        piece.place != home
            && !piece.place.is_stored()
            && piece.anchors.is_empty()
            && !terms::is_place_left_alone(piece.place)
            && !is_put(piece)
    });
    let fits = far.map_while(|(block, piece)| {
        left = left.checked_sub(piece.bytes)?;
        let (id, start) = (block.id, block.address);
        Some(Parted::Pooled { block: id, start, address: piece.address, bytes: piece.bytes, from: home })
    });
    fits.collect()
}

/// About so many bytes of these.
pub(super) fn next_of(away: &mut Vec<Parted>, bytes: u64) -> Vec<Parted> {
    let mut sum = 0;
    let count = away
        .iter()
        .position(|parted| {
            sum += parted.bytes();
            sum >= bytes
        })
        .map_or(away.len(), |at| at + 1);
    away.drain(..count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaves_again_comes_back_to_where_it_left_first() {
        let pooled = |address, bytes, gpu| Parted::Pooled { block: 1, start: 0, address, bytes, from: Place::Gpu(gpu) };
        let own = |address, gpu| Parted::Own { address, bytes: 10, asked: 0, from: Place::Gpu(gpu) };
        let before = [pooled(300, 50, 0), pooled(100, 100, 0), own(1000, 0)];
        let more = vec![pooled(0, 50, 2), pooled(50, 400, 2), pooled(120, 40, 2), own(1000, 2), own(2000, 2)];
        let left = [pooled(0, 50, 2), pooled(50, 50, 2), pooled(200, 100, 2), pooled(350, 100, 2), own(2000, 2)];
        assert_eq!(beyond(more, &before), left);
        assert_eq!(beyond(left.to_vec(), &[]), left);
    }
}
