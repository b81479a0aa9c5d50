//! Where the bytes of a new block go: pure, `(size, rooms in order of preference, policy, turn) -> pieces`.
//!
//! [`order`] turns the links of a home GPU into a list of places, best first; [`spread`] deals a size out over that list.
//! Neither knows what a pool is, so both can be tested (and simulated) on their own.

use std::fmt;

use crate::{FRAME, Place, STRIPE};

/// `gpu0`, `host0`, `disk`, `pageable`: how places are written in the log.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Gpu(ordinal) => write!(f, "gpu{ordinal}"),
            Place::Host(node) => write!(f, "host{node}"),
            Place::Disk => f.write_str("disk"),
            Place::Pageable => f.write_str("pageable"),
        }
    }
}

/// How blocks are spread (`GPUPOOL_PLACEMENT`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Policy {
    /// The home GPU until it is full, then peers by link speed, then the nearest host node.
    #[default]
    LocalFirst,
    /// Chunk by chunk over all lending GPUs in turn; the host when they are full.
    Interleave,
    /// The GPU with the most room first; the host when all are full.
    MostFree,
}

impl Policy {
    /// Whether a block with so many bytes away from home goes over the edge of what this policy fills first.
    pub fn overflows(self, on_peers: u64, on_host: u64) -> bool {
        match self {
            Policy::LocalFirst => on_peers + on_host > 0,
            // These send blocks to peers of their own choice, long before home is full.
            Policy::Interleave | Policy::MostFree => on_host > 0,
        }
    }
}

/// Who reaches whom, and how fast.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    /// `(home, other) -> rank`; lower is faster; absent means the home GPU cannot reach that place.
    pub ranks: std::collections::BTreeMap<(u32, Place), u32>,
}

/// What a place could still take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Where.
    pub place: Place,
    /// Bytes; the part beyond a multiple of [`FRAME`] is not used.
    pub bytes: u64,
}

/// The places a block of `home` can stand on, best first: home itself, the reachable GPUs by rank (the next
/// higher ordinal first among equals, wrapping, so that neighbours do not all spill onto GPU 0), the reachable host nodes
/// by rank. Empty when `home` is not among `places`. Which of them lend is the accounts' ([`crate::Accounts::lends`]), and may change.
pub fn order(home: u32, places: &[Place], links: &Links) -> Vec<Place> {
    if !places.contains(&Place::Gpu(home)) {
        return Vec::new();
    }
    let rank = |place: Place| match place {
        Place::Gpu(ordinal) if ordinal == home => Some(0),
        Place::Disk | Place::Pageable => None,
        _ => links.ranks.get(&(home, place)).copied(),
    };
    let mut ranked: Vec<(u32, Place)> = places.iter().filter_map(|&place| Some((rank(place)?, place))).collect();
    ranked.sort_unstable_by_key(|&(rank, place)| match place {
        Place::Gpu(ordinal) => (false, ordinal != home, rank, ordinal < home, ordinal),
        Place::Host(node) => (true, true, rank, false, node),
        Place::Disk | Place::Pageable => (true, true, rank, true, 0),
    });
    ranked.into_iter().map(|(_, place)| place).collect()
}

/// Deals `bytes`, rounded up to [`FRAME`], out over `rooms`, which come in the order of [`order`].
///
/// The pieces are in address order and add up to the rounded size; neighbours at one place are merged, and none is empty.
/// `turn` is where [`Policy::Interleave`] starts, counted from block to block: without it every block of one chunk would
/// land at home. The other policies ignore it.
///
/// # Errors
/// The bytes that all rooms together lack.
pub fn spread(bytes: u64, rooms: &[Room], policy: Policy, turn: u64) -> Result<Vec<(Place, u64)>, u64> {
    let mut rooms: Vec<Room> =
        rooms.iter().map(|room| Room { bytes: room.bytes - room.bytes % FRAME, ..*room }).collect();
    let mut pieces = Pieces { list: Vec::new(), left: round_up(bytes) };
    // Known before dealing, so that a request beyond all bounds costs nothing.
    let total = rooms.iter().fold(0u64, |sum, room| sum.saturating_add(room.bytes));
    if total < pieces.left {
        return Err(pieces.left - total);
    }
    let gpus = rooms.iter().take_while(|room| !room.place.is_host()).count();
    match policy {
        Policy::LocalFirst => {}
        Policy::Interleave => {
            let mut next = if gpus == 0 { 0 } else { (turn % gpus as u64) as usize };
            while pieces.left > 0 && rooms[..gpus].iter().any(|room| room.bytes > 0) {
                pieces.take(&mut rooms[next], STRIPE);
                next = (next + 1) % gpus;
            }
        }
        // A stable sort: among equals the order of preference stays.
        Policy::MostFree => rooms[..gpus].sort_by_key(|room| std::cmp::Reverse(room.bytes)),
    }
    for room in &mut rooms {
        pieces.take(room, u64::MAX);
    }
    Ok(pieces.list)
}

/// `bytes` up to the next multiple of [`FRAME`], or the largest there is.
pub(crate) fn round_up(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(FRAME).unwrap_or(u64::MAX - (FRAME - 1))
}

struct Pieces {
    list: Vec<(Place, u64)>,
    left: u64,
}

impl Pieces {
    fn take(&mut self, room: &mut Room, most: u64) {
        let bytes = room.bytes.min(self.left).min(most);
        if bytes == 0 {
            return;
        }
        room.bytes -= bytes;
        self.left -= bytes;
        match self.list.last_mut() {
            Some((place, sum)) if *place == room.place => *sum += bytes,
            _ => self.list.push((room.place, bytes)),
        }
    }
}
