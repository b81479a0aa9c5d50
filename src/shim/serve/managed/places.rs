//! What each place holds of managed memory, and on which places a new block goes. Only numbers: no driver call.
//!
//! The pool's own budgets cannot serve here: they count physical memory that the pool holds, which managed memory moves
//! away from and comes back to. What is charged instead is what was *placed* somewhere. The driver lets GPUs be
//! oversubscribed, and evicts to the host when they are, so the caps that hold are those of the accounts.

use gpupool_pool::{
    Accounts, Claim, FRAME, Links, Place, PlaceSpec, PlaceUsage, Policy, Room, SoftRefusal, order, spread,
};
use std::sync::Arc;

/// What the system says of a place now.
#[derive(Clone, Copy, Debug)]
pub enum Level {
    /// A GPU: the bytes that may be used at all, and those in use, by whomever.
    Gpu { usable: u64, in_use: u64 },
    /// The host: the bytes that it could give.
    Host { available: u64 },
    /// Nobody can tell; the cap decides alone.
    Unknown,
}

/// Why a block was not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It would overflow its GPU, and whoever asks may be told so once.
    Soft,
    /// All places together lack `missing` bytes.
    Full { missing: u64 },
}

/// Consecutive parts of a block, each with its place and bytes (whole frames; the last may reach past the block's end).
pub type Stripes = Vec<(Place, u64)>;

/// The places of managed memory, and the rules by which blocks go to them.
#[derive(Debug)]
pub struct Places {
    accounts: Arc<Accounts>,
    /// By place, in the order of the accounts.
    soft: Vec<SoftRefusal>,
    links: Links,
    policy: Policy,
    /// Blocks placed so far; see [`spread`].
    turn: u64,
}

impl Places {
    pub fn new(accounts: Arc<Accounts>, links: Links, policy: Policy) -> Self {
        let soft = vec![SoftRefusal::default(); accounts.specs().len()];
        Self { accounts, soft, links, policy, turn: 0 }
    }

    /// The places that a block of this GPU may go to, best first; empty where the GPU is not one of ours.
    pub fn order(&self, home: u32) -> Vec<Place> {
        let places: Vec<Place> = self.accounts.specs().iter().map(|spec| spec.place).collect();
        let mut order = order(home, &places, &self.links);
        order.retain(|place| self.accounts.takes(*place, home));
        order
    }

    /// How many places have to be known before a block can be placed: the first may do, unless the policy compares.
    pub fn needed(&self, order: &[Place]) -> usize {
        if self.policy == Policy::LocalFirst { 1 } else { order.len() }
    }

    /// The bytes that each place could still take.
    pub fn rooms(&self, levels: &[(Place, Level)]) -> Vec<Room> {
        levels.iter().map(|&(place, level)| Room { place, bytes: self.room(place, level) }).collect()
    }

    fn room(&self, place: Place, level: Level) -> u64 {
        let below_limit = self.accounts.limit(place).saturating_sub(self.accounts.taken(place));
        match level {
            // What of ours is not on the GPU yet is not in the driver's number, and what is there is in both, so the larger
            // of the two is what the GPU has to hold.
            Level::Gpu { usable, in_use } => {
                let placed = self.accounts.of(Claim::Managed, place);
                below_limit.min(usable.saturating_sub(in_use.max(placed)))
            }
            Level::Host { available } => below_limit.min(available),
            Level::Unknown => below_limit,
        }
    }

    /// Sets room aside for a block. `levels` are the places that may be used, in the order of [`Places::order`]: the first
    /// is its GPU. `soft`: whoever asks may be told once that the GPU overflows.
    pub fn take(&mut self, bytes: u64, levels: &[(Place, Level)], soft: bool) -> Result<Stripes, Refusal> {
        loop {
            let spread = spread(bytes, &self.rooms(levels), self.policy, self.turn);
            let stripes = spread.map_err(|missing| Refusal::Full { missing })?;
            let Some(&(home, level)) = levels.first() else { return Ok(stripes) };
            let (mut on_peers, mut on_host) = (0, 0);
            for &(place, bytes) in &stripes {
                match place {
                    Place::Host(_) => on_host += bytes,
                    Place::Gpu(_) if place != home => on_peers += bytes,
                    Place::Gpu(_) | Place::Disk | Place::Pageable => {}
                }
            }
            let overflows = self.policy.overflows(on_peers, on_host);
            if soft && overflows && self.soft_of(home).is_some_and(|it| it.refuse(bytes)) {
                return Err(Refusal::Soft);
            }
            // Somebody else may have taken the room since it was looked at. Each time that happens he has got on.
            if self.accounts.charge_all(Claim::Managed, &stripes).is_err() {
                continue;
            }
            self.turn += 1;
            let (limit, room) = (self.accounts.limit(home), self.room(home, level));
            if let Some(it) = self.soft_of(home) {
                if overflows {
                    it.overflowed();
                } else {
                    it.served_at_home(bytes, limit, room);
                }
            }
            return Ok(stripes);
        }
    }

    /// A block is gone, or was never made.
    pub fn give(&mut self, stripes: &Stripes) {
        stripes.iter().for_each(|&(place, bytes)| self.accounts.credit(Claim::Managed, place, bytes));
    }

    fn soft_of(&mut self, home: Place) -> Option<&mut SoftRefusal> {
        let index = self.accounts.specs().iter().position(|spec| spec.place == home)?;
        self.soft.get_mut(index)
    }

    /// What was placed, in numbers; `held` is what was placed there.
    pub fn usage(&self) -> Vec<PlaceUsage> {
        let usage = |&PlaceSpec { place, .. }: &PlaceSpec| {
            let limit = self.accounts.limit(place);
            let (used, peak_used) =
                (self.accounts.of(Claim::Managed, place), self.accounts.peak_of(Claim::Managed, place));
            PlaceUsage { place, limit, held: used, used, peak_used, anchored: 0 }
        };
        self.accounts.specs().iter().map(usage).collect()
    }
}

/// The parts of a block of `bytes` at `address`, as `(place, address, bytes)`, the last cut to the block's end.
pub fn parts(address: u64, bytes: u64, stripes: &Stripes) -> impl Iterator<Item = (Place, u64, u64)> {
    debug_assert_eq!(stripes.iter().map(|(_, bytes)| bytes).sum::<u64>(), bytes.next_multiple_of(FRAME));
    let end = address + bytes;
    stripes.iter().scan(address, move |at, &(place, bytes)| {
        let start = *at;
        *at += bytes;
        Some((place, start, bytes.min(end - start)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const GPU: Place = Place::Gpu(0);
    const PEER: Place = Place::Gpu(1);
    const HOST: Place = Place::Host(0);

    fn places(policy: Policy) -> Places {
        let specs =
            [(GPU, 10), (PEER, 10), (HOST, 4)].map(|(place, frames)| PlaceSpec { place, limit: frames * FRAME });
        let links = Links { ranks: BTreeMap::from([((0, PEER), 1), ((0, HOST), 9), ((1, GPU), 1), ((1, HOST), 9)]) };
        Places::new(Arc::new(Accounts::new(&specs)), links, policy)
    }

    fn unknown(places: &Places) -> Vec<(Place, Level)> {
        places.order(0).into_iter().map(|place| (place, Level::Unknown)).collect()
    }

    #[test]
    fn a_block_fills_home_then_the_peer_then_the_host_and_no_more() {
        let mut places = places(Policy::LocalFirst);
        let levels = unknown(&places);
        let stripes = places.take(23 * FRAME + 1, &levels, false);
        assert_eq!(stripes, Ok(vec![(GPU, 10 * FRAME), (PEER, 10 * FRAME), (HOST, 4 * FRAME)]));
        assert_eq!(places.take(1, &levels, false), Err(Refusal::Full { missing: FRAME }));
        places.give(&vec![(PEER, FRAME)]);
        assert_eq!(places.take(1, &levels, false), Ok(vec![(PEER, FRAME)]));
    }

    #[test]
    fn what_the_program_made_itself_is_no_room_either() {
        let mut places = places(Policy::LocalFirst);
        let levels = unknown(&places);
        assert!(places.accounts.charge(Claim::Handles, GPU, 7 * FRAME));
        assert_eq!(places.take(4 * FRAME, &levels, false), Ok(vec![(GPU, 3 * FRAME), (PEER, FRAME)]));
        assert!(!places.accounts.charge(Claim::Handles, GPU, FRAME), "and the other way round");
    }

    #[test]
    fn what_others_use_is_no_room_and_what_we_placed_counts_once() {
        let mut places = places(Policy::LocalFirst);
        let level = |in_use: u64| vec![(GPU, Level::Gpu { usable: 8 * FRAME, in_use: in_use * FRAME })];
        assert_eq!(places.take(3 * FRAME, &level(0), false), Ok(vec![(GPU, 3 * FRAME)]));
        // Three frames placed, none or all of them there yet.
        assert_eq!(places.rooms(&level(0))[0].bytes, 5 * FRAME);
        assert_eq!(places.rooms(&level(3))[0].bytes, 5 * FRAME);
        // Four frames of somebody else's beside them.
        assert_eq!(places.rooms(&level(7))[0].bytes, FRAME);
        assert_eq!(places.take(2 * FRAME, &level(7), false), Err(Refusal::Full { missing: FRAME }));
    }

    #[test]
    fn a_refusal_is_made_once_and_the_retry_is_served_whatever_others_do() {
        let mut places = places(Policy::LocalFirst);
        let levels = unknown(&places);
        let mut take = |frames: u64| places.take(frames * FRAME, &levels, true);
        assert!(take(8).is_ok());
        assert_eq!(take(4), Err(Refusal::Soft));
        assert_eq!(take(1), Ok(vec![(GPU, FRAME)]), "somebody else's, at home");
        assert_eq!(take(4), Ok(vec![(GPU, FRAME), (PEER, 3 * FRAME)]));
        assert_eq!(take(2), Ok(vec![(PEER, 2 * FRAME)]), "told once");
        places.give(&vec![(GPU, 10 * FRAME)]);
        assert!(places.take(FRAME, &levels, true).is_ok(), "home has room again");
        assert_eq!(places.take(10 * FRAME, &levels, true), Err(Refusal::Soft));
        assert_eq!(places.take(10 * FRAME, &levels, false), Ok(vec![(GPU, 9 * FRAME), (PEER, FRAME)]));
    }

    #[test]
    fn parts_end_with_the_block() {
        let stripes = vec![(GPU, 2 * FRAME), (PEER, FRAME)];
        let parts: Vec<_> = parts(1 << 30, 2 * FRAME + 5, &stripes).collect();
        assert_eq!(parts, [(GPU, 1 << 30, 2 * FRAME), (PEER, (1 << 30) + 2 * FRAME, 5)]);
    }
}
