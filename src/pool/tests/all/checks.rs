//! What holds for every pool at any time, and the machine most tests run on.

use super::mock::{BASE, Mock};
use gpupool_pool::{
    Accounts, Allocation, Claim, Config, FRAME, Free, FreeError, LARGEST_CHUNK, Links, Piece, Place, PlaceSpec, Policy,
    Pool, Refusal, Repacks, Request, order,
};
use std::collections::BTreeMap;
use std::sync::Arc;

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;
pub const GPU0: Place = Place::Gpu(0);
pub const GPU1: Place = Place::Gpu(1);
pub const GPU2: Place = Place::Gpu(2);
pub const HOST: Place = Place::Host(0);

/// All GPUs reach each other and all host nodes.
pub fn all_linked(places: &[Place]) -> Links {
    let mut ranks = BTreeMap::new();
    for &home in places {
        let Place::Gpu(ordinal) = home else { continue };
        for &place in places {
            if place != home {
                ranks.insert((ordinal, place), u32::from(place.is_host()));
            }
        }
    }
    Links { ranks }
}

/// Bytes of the largest chunk here: small, so that most blocks stand on several.
pub const CHUNK: u64 = 32 << 20;

/// A pool whose limits are what the places have, in 64 TiB of addresses.
pub fn pool(policy: Policy, capacity: &[(Place, u64)]) -> Pool<Mock> {
    pool_with(policy, Lenders::All, capacity, capacity)
}

/// Which GPUs lend to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lenders {
    All,
    None,
}

/// A pool over one GPU with chunks as large as outside of tests.
pub fn roomy(limit: u64) -> Pool<Mock> {
    roomy_at(&[(GPU0, limit)])
}

/// The same over these places, all of which are linked.
pub fn roomy_at(places: &[(Place, u64)]) -> Pool<Mock> {
    let specs: Vec<PlaceSpec> = places.iter().map(|&(place, limit)| PlaceSpec { place, limit }).collect();
    let config = Config {
        base: BASE,
        bytes: 64 << 40,
        accounts: Arc::new(Accounts::new(&specs)),
        links: all_linked(&places.iter().map(|&(place, _)| place).collect::<Vec<_>>()),
        policy: Policy::LocalFirst,
        largest_chunk: LARGEST_CHUNK,
    };
    Pool::new(config, Mock::new(places))
}

pub fn pool_with(policy: Policy, lenders: Lenders, limits: &[(Place, u64)], capacity: &[(Place, u64)]) -> Pool<Mock> {
    let places: Vec<Place> = limits.iter().map(|&(place, _)| place).collect();
    let specs: Vec<PlaceSpec> = limits.iter().map(|&(place, limit)| PlaceSpec { place, limit }).collect();
    let accounts = Accounts::new(&specs);
    for place in places.iter().filter(|place| lenders == Lenders::None && !place.is_host()) {
        accounts.lend(*place, false);
    }
    let config = Config {
        base: BASE,
        bytes: 64 << 40,
        accounts: Arc::new(accounts),
        links: all_linked(&places),
        policy,
        largest_chunk: CHUNK,
    };
    Pool::new(config, Mock::new(capacity))
}

pub fn request(bytes: u64, home: u32) -> Request {
    Request {
        bytes,
        home,
        owner: u64::from(home) + 1,
        soft_refusal: false,
        repacks: Repacks::Never,
        can_ask: false,
        can_widen: false,
    }
}

pub fn allocate(pool: &Pool<Mock>, bytes: u64) -> Result<Allocation, Refusal<u64>> {
    pool.allocate(&request(bytes, 0))
}

/// `usage()` against what the mock holds and what `live` blocks stand on.
pub fn assert_accounts(pool: &Pool<Mock>, live: &[Allocation]) {
    assert_accounts_beside(pool, live, BTreeMap::new());
}

/// `usage()` against what the mock holds and what `live` blocks stand on, where ended blocks that others have open left
/// `used` bytes behind.
pub fn assert_accounts_beside(pool: &Pool<Mock>, live: &[Allocation], mut used: BTreeMap<Place, u64>) {
    let usage = pool.usage();
    let inner = pool.backend().inner();
    for allocation in live {
        for piece in pool.pieces(allocation.block.address, u64::MAX) {
            *used.entry(piece.place).or_default() += piece.bytes;
        }
    }
    for place in &usage.places {
        assert_eq!(place.held, inner.held(place.place), "held at {:?}", place.place);
        let accounts = pool.accounts();
        assert_eq!(accounts.of(Claim::Pool, place.place), place.held, "charged at {:?}", place.place);
        assert!(accounts.taken(place.place) <= accounts.limit(place.place), "all claims at {:?}", place.place);
        assert_eq!(place.used, used.get(&place.place).copied().unwrap_or(0), "used at {:?}", place.place);
        assert!(place.used <= place.held && place.held <= place.limit && place.used <= place.peak_used, "{place:?}");
    }
    assert_eq!(usage.live_blocks, live.len() as u64);
    assert_eq!(usage.live_bytes, live.iter().map(|allocation| allocation.block.bytes).sum::<u64>());
    assert!(usage.peak_live_bytes >= usage.live_bytes);
}

/// One block by itself: its pieces cover it, are usable, and agree with what the allocation said.
pub fn assert_block(pool: &Pool<Mock>, allocation: &Allocation) {
    let block = allocation.block;
    let size = block.bytes.next_multiple_of(FRAME);
    assert!(block.address.is_multiple_of(512) && pool.contains(block.address));
    for offset in [0, 1.min(block.bytes - 1), block.bytes / 2, block.bytes - 1] {
        assert_eq!(pool.block_at(block.address + offset), Some(block));
    }
    assert_pieces(pool, block.address, block.bytes);
    assert_pieces(pool, block.address + block.bytes / 3, block.bytes / 2);
    let pieces = pool.pieces(block.address, u64::MAX);
    let inner = pool.backend().inner();
    let mut at = block.address;
    let (mut on_peers, mut on_host) = (0, 0);
    for Piece { address, bytes, place, .. } in pieces {
        assert_eq!(address, at, "pieces are in address order, without gaps");
        inner.assert_usable(address, bytes, place);
        at += bytes;
        match place {
            Place::Host(_) => on_host += bytes,
            Place::Gpu(ordinal) if ordinal != block.home => on_peers += bytes,
            Place::Gpu(_) | Place::Disk | Place::Pageable => {}
        }
    }
    assert_eq!(at, block.address + size, "pieces cover the block");
    assert_eq!((on_peers, on_host), (allocation.on_peers, allocation.on_host));
    assert!(!inner.is_busy(block.address, size), "a GPU may still touch this memory");
}

/// The pieces of a range inside a block cover it, each in the whole chunk that the mock knows of.
fn assert_pieces(pool: &Pool<Mock>, address: u64, bytes: u64) {
    let pieces = pool.pieces(address, bytes);
    let inner = pool.backend().inner();
    let mut at = address;
    for piece in pieces {
        assert_eq!(piece.address, at);
        let mapped = inner.mapped_around(at).expect("a piece is mapped");
        assert_eq!((piece.chunk_address, piece.chunk_bytes, piece.place, piece.handle), mapped);
        at += piece.bytes;
    }
    assert_eq!(at, address + bytes, "pieces cover the range and nothing more");
}

/// Frees everything, trims, and expects the mock to hold nothing.
pub fn assert_returns_everything(pool: &Pool<Mock>, live: &[Allocation]) {
    pool.backend().inner().capturing = false;
    pool.backend().inner().held.clear();
    pool.backend().inner().fault = None;
    pool.backend().inner().second = None;
    for allocation in live {
        assert_eq!(pool.free(allocation.block.address, gpupool_pool::Free::Lazy), Ok(allocation.block));
        note_busy(pool, allocation);
    }
    pool.trim(None, None, &[0, 1]);
    assert_accounts(pool, &[]);
    assert!(pool.backend().inner().is_empty(), "a handle or a mapping is left");
    assert_eq!(
        pool.usage().places.iter().map(|place| place.anchored).sum::<u64>(),
        0,
        "nothing is left to stay in place"
    );
}

/// Tells the mock that its home GPU may still work on this freed block.
pub fn note_busy(pool: &Pool<Mock>, allocation: &Allocation) {
    note_busy_on(pool, allocation, allocation.block.home);
}

/// Tells the mock that this GPU may still work on this freed block.
pub fn note_busy_on(pool: &Pool<Mock>, allocation: &Allocation, gpu: u32) {
    let block = allocation.block;
    pool.backend().inner().note_busy(block.address, block.bytes.next_multiple_of(FRAME), gpu);
}

/// The places of a block of GPU `home`, best first.
pub fn route(home: u32, places: &[Place], lenders: Lenders) -> Vec<Place> {
    let mut route = order(home, places, &all_linked(places));
    route.retain(|place| lenders == Lenders::All || place.is_host() || *place == Place::Gpu(home));
    route
}

/// Frees what begins here, which another thread may have ended before: whether this call did.
pub fn free_in_a_race(pool: &Pool<Mock>, address: u64, when: Free) -> bool {
    match pool.free(address, when) {
        Ok(_) => true,
        Err(answer) => {
            assert_eq!(answer, FreeError::NotABlock);
            false
        }
    }
}

/// After threads that made and ended so many blocks: ends what these owners have left, which is every other block, once.
pub fn assert_the_rest_ends_once(pool: &Pool<Mock>, owners: &[u64], made: u64, ended: u64) {
    let usage = pool.usage();
    assert_eq!((usage.allocations, usage.live_blocks), (made, made - ended));
    let left: usize = owners.iter().map(|&owner| pool.free_owned_by(owner).len()).sum();
    assert_eq!(left as u64, made - ended, "every block ended once");
}
