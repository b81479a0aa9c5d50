//! Random operation sequences against a naive model: a flat list of blocks, and the mock's own list of mappings.

use super::checks::{
    CHUNK, GPU0, GPU1, HOST, Lenders, MIB, assert_accounts_beside, assert_block, assert_returns_everything,
    note_busy_on, pool_with, route,
};
use super::mock::Mock;
use gpupool_pool::{
    Allocation, Anchor, Anchors, Block, Claim, FRAME, Free, FreeError, MoveError, Moved, Place, Policy, Pool,
    Rearranged, Refusal, Repacked, Repacks, Request, Stopped, Wish,
};
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
enum Op {
    Allocate {
        bytes: u64,
        home: u32,
        owner: u64,
        soft: bool,
        repacks: Repacks,
    },
    Free {
        pick: usize,
        when: Free,
    },
    /// In the order of a stream of that GPU.
    FreeAfter {
        pick: usize,
        gpu: u32,
    },
    Hold {
        pick: usize,
    },
    LetGo {
        pick: usize,
    },
    WithdrawAnchor {
        pick: usize,
        why: Anchor,
    },
    FreeTwice {
        pick: usize,
    },
    FreeOwner {
        owner: u64,
    },
    Trim {
        place: Option<Place>,
        bytes: Option<u64>,
        waits_for: Vec<u32>,
    },
    /// What nobody used for so many periods goes home, after a new one began or not.
    Unused {
        begins: bool,
        periods: u32,
        place: Option<Place>,
        most: u64,
        asks: bool,
    },
    Capture(bool),
    /// A kernel on a GPU begins to wait for the host, or none does any more.
    Stall(Option<u32>),
    External {
        place: Place,
        bytes: u64,
    },
    Blind(bool),
    Anchor {
        pick: usize,
        from: u64,
        bytes: u64,
        why: Anchor,
    },
    ReleaseAnchor {
        pick: usize,
    },
    /// Others than the pool have so much of a place, or what they had before where there is no room.
    Claim {
        place: Place,
        bytes: u64,
    },
    /// A device is added to those that reach all memory.
    Arrive,
    /// A part of a block goes to another place.
    Move {
        pick: usize,
        from: u64,
        bytes: u64,
        place: Place,
    },
    /// Several parts of blocks go to other places while the program is stopped, if it can be.
    Rearrange {
        wishes: Vec<(usize, u64, u64, Place)>,
        /// The program can be stopped, and is quiet so many times when asked.
        stops: bool,
        quiet: u32,
        /// What the program does before it is stopped.
        meanwhile: Meanwhile,
        /// Chunks that others stand on, too, are divided.
        divides: bool,
    },
    /// What is free on chunks at a place goes home, if the program can be stopped so many times.
    Repack {
        place: Place,
        bytes: u64,
        over: bool,
        stops: u32,
    },
}

#[derive(Clone, Debug)]
enum Meanwhile {
    Nothing,
    Free(usize),
    Trim(Option<Place>),
    Unused,
    Allocate(u64),
}

const LIMITS: [(Place, u64); 3] = [(GPU0, 256 * MIB), (GPU1, 193 * MIB), (HOST, 128 * MIB)];
const CAPACITY: [(Place, u64); 3] = [(GPU0, 300 * MIB), (GPU1, 200 * MIB), (HOST, 128 * MIB)];

fn any_repacks() -> impl Strategy<Value = Repacks> {
    prop_oneof![Just(Repacks::Never), Just(Repacks::ToFit), Just(Repacks::ToStay)]
}

fn any_place() -> impl Strategy<Value = Place> {
    prop_oneof![Just(GPU0), Just(GPU1), Just(HOST)]
}

fn any_anchor() -> impl Strategy<Value = Anchor> {
    prop_oneof![4 => Just(Anchor::Shared), 1 => Just(Anchor::Retained), 1 => Just(Anchor::Descriptor), 4 => Just(Anchor::Asked)]
}

fn any_op() -> impl Strategy<Value = Op> {
    let bytes = prop_oneof![
        4 => (1..8u64).prop_map(|frames| frames * FRAME),
        4 => 1..70 * MIB,
        1 => 1..600 * MIB,
    ];
    let when = prop_oneof![Just(Free::Strict), Just(Free::Lazy)];
    prop_oneof![
        10 => (bytes, 0..2u32, 0..3u64, any::<bool>(), any_repacks())
            .prop_map(|(bytes, home, owner, soft, repacks)| Op::Allocate { bytes, home, owner, soft, repacks }),
        8 => (any::<usize>(), when).prop_map(|(pick, when)| Op::Free { pick, when }),
        2 => any::<usize>().prop_map(|pick| Op::Hold { pick }),
        2 => any::<usize>().prop_map(|pick| Op::LetGo { pick }),
        1 => (any::<usize>(), any_anchor()).prop_map(|(pick, why)| Op::WithdrawAnchor { pick, why }),
        2 => (any::<usize>(), 0..3u32).prop_map(|(pick, gpu)| Op::FreeAfter { pick, gpu }),
        1 => any::<usize>().prop_map(|pick| Op::FreeTwice { pick }),
        1 => (0..3u64).prop_map(|owner| Op::FreeOwner { owner }),
        1 => (proptest::option::of(any_place()), proptest::option::of(1..100 * MIB), proptest::sample::subsequence(vec![0, 1], 0..=2))
            .prop_map(|(place, bytes, waits_for)| Op::Trim { place, bytes, waits_for }),
        2 => (any::<bool>(), 0..4u32, proptest::option::of(any_place()), prop_oneof![Just(u64::MAX), 1..100 * MIB], any::<bool>())
            .prop_map(|(begins, periods, place, most, asks)| Op::Unused { begins, periods, place, most, asks }),
        1 => any::<bool>().prop_map(Op::Capture),
        2 => proptest::option::of(0..2u32).prop_map(Op::Stall),
        1 => (any_place(), 0..300 * MIB).prop_map(|(place, bytes)| Op::External { place, bytes }),
        1 => any::<bool>().prop_map(Op::Blind),
        2 => (any::<usize>(), 0..40 * MIB, 1..60 * MIB, any_anchor())
            .prop_map(|(pick, from, bytes, why)| Op::Anchor { pick, from, bytes, why }),
        1 => any::<usize>().prop_map(|pick| Op::ReleaseAnchor { pick }),
        2 => (any_place(), 0..150 * MIB).prop_map(|(place, bytes)| Op::Claim { place, bytes }),
        1 => Just(Op::Arrive),
        4 => (any::<usize>(), prop_oneof![Just(0), 0..40 * MIB], prop_oneof![Just(u64::MAX), 1..60 * MIB], any_place())
            .prop_map(|(pick, from, bytes, place)| Op::Move { pick, from, bytes, place }),
        4 => (
            proptest::collection::vec(
                (any::<usize>(), prop_oneof![3 => Just(0), 1 => 0..40 * MIB], prop_oneof![3 => Just(u64::MAX), 1 => 1..60 * MIB], any_place()),
                1..5,
            ),
            prop_oneof![1 => Just(false), 6 => Just(true)],
            prop_oneof![1 => 0..4u32, 4 => Just(u32::MAX)],
            any_meanwhile(),
            any::<bool>(),
        )
            .prop_map(|(wishes, stops, quiet, meanwhile, divides)| Op::Rearrange {
                wishes,
                stops,
                quiet,
                meanwhile,
                divides,
            }),
        2 => (any_place(), prop_oneof![Just(u64::MAX), 1..60 * MIB], any::<bool>(), prop_oneof![0..3u32, Just(u32::MAX)])
            .prop_map(|(place, bytes, over, stops)| Op::Repack { place, bytes, over, stops }),
    ]
}

fn any_meanwhile() -> impl Strategy<Value = Meanwhile> {
    prop_oneof![
        4 => Just(Meanwhile::Nothing),
        2 => any::<usize>().prop_map(Meanwhile::Free),
        1 => proptest::option::of(any_place()).prop_map(Meanwhile::Trim),
        1 => Just(Meanwhile::Unused),
        1 => (1..20 * MIB).prop_map(Meanwhile::Allocate),
    ]
}

/// The program of these tests, stopped.
struct Still<'a> {
    mock: &'a Mock,
    quiet: u32,
}

impl<'a> Still<'a> {
    fn new(mock: &'a Mock, quiet: u32) -> Self {
        mock.inner().stopped = true;
        Self { mock, quiet }
    }
}

impl Stopped for Still<'_> {
    fn still_quiet(&mut self) -> bool {
        let is_quiet = self.quiet > 0;
        if is_quiet {
            self.mock.inner().all_done();
        }
        self.quiet = self.quiet.saturating_sub(1);
        is_quiet
    }

    fn is_for_a_while(&self) -> bool {
        true
    }
}

impl Drop for Still<'_> {
    fn drop(&mut self) {
        self.mock.inner().stopped = false;
    }
}

struct Model {
    pool: Pool<Mock>,
    policy: Policy,
    lenders: Lenders,
    live: Vec<Allocation>,
    /// Where freed blocks began and ended since the last trim.
    borders: BTreeSet<u64>,
    /// Freed while a GPU that does not own all of it might still be at work on it: the pool may learn late that it is free.
    borrowed: Vec<(u64, u64)>,
    /// The last request of a home was refused softly, so the next one must not be.
    told: [bool; 2],
    /// Of every block that began.
    ids: BTreeSet<u64>,
    /// How often the program has written to blocks since they began, by number, and how many moves there were.
    written: BTreeMap<u64, u64>,
    moves: u64,
    /// AnchorCounts on physical memory, by handle.
    anchored: BTreeMap<u64, Anchors>,
    /// Ranges that the program asked to keep in place, with the number of their block.
    asked: Vec<(u64, u64, u64)>,
    /// The period of the pool, and that in which a block on this physical memory was freed last, by handle.
    period: u32,
    freed_in: BTreeMap<u64, u32>,
    /// What moves have vacated and is kept, by handle.
    stock: BTreeSet<u64>,
    /// The fewest bytes in live blocks since the pool was asked last.
    least_live: u64,
    /// Blocks that others have, by number.
    out: BTreeMap<u64, Out>,
    /// Something was given out by its pages, so that small blocks stand on small chunks.
    gives_out: bool,
}

/// What others have of a block.
#[derive(Debug, Default)]
struct Out {
    address: u64,
    holds: u32,
    given: bool,
    /// The block's frames as handles and offsets in them, once it has ended.
    frames: Option<BTreeSet<(u64, u64)>>,
}

impl Out {
    fn is_over(&self) -> bool {
        self.holds == 0 && !self.given
    }
}

impl Model {
    fn new(policy: Policy, lenders: Lenders) -> Self {
        let pool = pool_with(policy, lenders, &LIMITS, &CAPACITY);
        Self {
            pool,
            policy,
            lenders,
            live: Vec::new(),
            borders: BTreeSet::new(),
            borrowed: Vec::new(),
            told: [false; 2],
            ids: BTreeSet::new(),
            written: BTreeMap::new(),
            moves: 0,
            anchored: BTreeMap::new(),
            asked: Vec::new(),
            period: 0,
            freed_in: BTreeMap::new(),
            stock: BTreeSet::new(),
            least_live: 0,
            out: BTreeMap::new(),
            gives_out: false,
        }
    }

    fn run(&mut self, op: &Op) {
        let calls = self.pool.backend().inner().log.len();
        let may_wait_for = self.waited_for(op);
        // Who works for a GPU waits for it, as with the driver: the kernel there ends before.
        self.pool.backend().inner().held.retain(|gpu| may_wait_for >> gpu & 1 == 0);
        self.act(op);
        self.least_live = self.least_live.min(self.live_bytes());
        let waits = self.pool.backend().inner().log[calls..]
            .iter()
            .filter(|call| call.0 == "quiesce")
            .map(|call| call.1)
            .collect::<Vec<_>>();
        for set in waits {
            assert_eq!(set & !may_wait_for, 0, "{op:?} waited for another GPU than its own");
        }
    }

    /// The GPUs that a call may wait for: a bit each.
    fn waited_for(&self, op: &Op) -> u64 {
        let home = |pick: usize| self.live.get(pick % self.live.len().max(1)).map_or(0, |it| 1 << it.block.home);
        match *op {
            Op::Allocate { home, .. } => 1 << home,
            Op::Free { pick, .. } => home(pick),
            // Nobody else would wait for a GPU that is not the pool's.
            Op::FreeAfter { gpu: 2, .. } => 1 << 2,
            Op::Trim { ref waits_for, .. } => waits_for.iter().map(|gpu| 1 << gpu).sum(),
            // Waits for everybody, and says so.
            Op::Move { .. } => u64::MAX,
            _ => 0,
        }
    }

    fn act(&mut self, op: &Op) {
        match *op {
            Op::Allocate { bytes, home, owner, soft, repacks } => {
                self.allocate(&Request {
                    bytes,
                    home,
                    owner,
                    soft_refusal: soft,
                    repacks,
                    can_ask: false,
                    can_widen: false,
                });
            }
            Op::Free { pick, when } => {
                if self.live.is_empty() {
                    return;
                }
                let gone = self.live.swap_remove(pick % self.live.len());
                let waits = when == Free::Strict && !self.pool.backend().inner().capturing;
                if !waits {
                    self.note_busy(&gone, gone.block.home);
                }
                let is_out = self.ends(&gone.block);
                assert_eq!(self.pool.free(gone.block.address, when), Ok(gone.block));
                self.note_borders(&gone);
                if waits && is_out {
                    let (start, end) =
                        (gone.block.address, gone.block.address + gone.block.bytes.next_multiple_of(FRAME));
                    let inner = self.pool.backend().inner();
                    let whole = inner.mapped().any(|(at, bytes, _)| start <= at && at + bytes <= end);
                    assert!(!whole, "a chunk that only this block stood on is still there");
                }
                assert_eq!(self.pool.block_at(gone.block.address), None);
                assert_eq!(self.pool.free(gone.block.address, when), Err(FreeError::NotABlock));
            }
            Op::FreeAfter { pick, gpu } => {
                if self.live.is_empty() {
                    return;
                }
                let at = pick % self.live.len();
                let address = self.live[at].block.address;
                if gpu == 2 && self.pool.backend().inner().capturing {
                    assert!(matches!(self.pool.free_after(address, gpu), Err(FreeError::Backend(_))));
                    return;
                }
                let gone = self.live.swap_remove(at);
                if gpu < 2 {
                    self.note_busy(&gone, gpu);
                }
                self.ends(&gone.block);
                assert_eq!(self.pool.free_after(address, gpu), Ok(gone.block));
                self.note_borders(&gone);
                assert_eq!(self.pool.free_after(address, gpu), Err(FreeError::NotABlock));
            }
            Op::Hold { pick } => {
                let Some(some) = self.live.get(pick % self.live.len().max(1)) else { return };
                let block = some.block;
                assert_eq!(self.pool.hold(block.address, block.id), Some(block));
                assert_eq!(self.pool.hold(block.address, block.id + 1), None, "that number is another block's");
                let out = self.out.entry(block.id).or_default();
                (out.address, out.holds) = (block.address, out.holds + 1);
            }
            Op::LetGo { pick } => {
                let open: Vec<u64> = self.out.iter().filter(|(_, out)| out.holds > 0).map(|(id, _)| *id).collect();
                let Some(id) = open.get(pick % open.len().max(1)) else { return };
                let out = self.out.get_mut(id).unwrap();
                out.holds -= 1;
                self.pool.let_go(out.address, *id);
                if out.is_over() {
                    let out = self.out.remove(id).unwrap();
                    // What was freed long before joins the free runs only now.
                    for &(handle, offset) in out.frames.iter().flatten() {
                        let start = self.pool.backend().inner().mapped_at(handle);
                        self.borders.extend(start.into_iter().flat_map(|at| [at + offset, at + offset + FRAME]));
                    }
                }
            }
            Op::WithdrawAnchor { pick, why } => {
                let Some(some) = self.live.get(pick % self.live.len().max(1)) else { return };
                let block = some.block;
                // As a call does that anchors and then fails.
                let usage = self.pool.usage();
                let given = self.out.get(&block.id).is_some_and(|out| out.given);
                if why != Anchor::Asked && !given && self.pool.anchor(block.address, block.bytes, why).is_some() {
                    self.gives_out = true;
                    assert!(self.pool.withdraw_anchor(block.address, block.bytes, why));
                }
                assert_eq!(self.pool.usage(), usage);
            }
            Op::FreeTwice { pick } => {
                let Some(some) = self.live.get(pick % self.live.len().max(1)) else { return };
                for offset in [1, 512, FRAME] {
                    if some.block.bytes > offset {
                        let answer = self.pool.free(some.block.address + offset, Free::Lazy);
                        assert_eq!(answer, Err(FreeError::NotABlock), "an inner address is no block");
                    }
                }
            }
            Op::FreeOwner { owner } => {
                let (gone, live): (Vec<_>, Vec<_>) =
                    self.live.drain(..).partition(|allocation| allocation.block.owner == owner);
                self.live = live;
                for allocation in &gone {
                    self.ends(&allocation.block);
                    self.note_borders(allocation);
                    self.note_busy(allocation, allocation.block.home);
                }
                assert_eq!(self.pool.free_owned_by(owner).len(), gone.len());
            }
            Op::Trim { place, bytes, ref waits_for } => self.trim(place, bytes, waits_for),
            Op::Unused { begins, periods, place, most, asks } => self.return_unused(begins, periods, place, most, asks),
            Op::Capture(on) => self.pool.backend().inner().capturing = on,
            Op::Stall(gpu) => self.pool.backend().inner().held = gpu.into_iter().collect(),
            Op::External { place, bytes } => {
                self.pool.backend().inner().external.insert(place, bytes);
            }
            Op::Blind(on) => self.pool.backend().inner().blind = on,
            Op::Anchor { pick, from, bytes, why } => {
                let Some(some) = self.live.get(pick % self.live.len().max(1)) else { return };
                let block = some.block;
                self.anchor(&block, block.address + from % block.bytes.next_multiple_of(FRAME), bytes, why);
            }
            Op::ReleaseAnchor { pick } => {
                let mut asked = std::mem::take(&mut self.asked);
                asked.retain(|range| self.lives(range.2));
                if !asked.is_empty() {
                    let (address, bytes, _) = asked.swap_remove(pick % asked.len());
                    assert!(self.pool.release_anchor(address, bytes));
                }
                self.asked = asked;
            }
            Op::Claim { place, bytes } => {
                let accounts = self.pool.accounts();
                let before = accounts.of(Claim::Handles, place);
                let room = accounts.limit(place) - self.pool.backend().inner().held(place);
                accounts.credit(Claim::Handles, place, before);
                assert_eq!(accounts.charge(Claim::Handles, place, bytes), bytes <= room);
                if bytes > room {
                    assert!(accounts.charge(Claim::Handles, place, before), "it was there");
                }
            }
            Op::Move { pick, from, bytes, place } => {
                self.move_some(pick, from, bytes, place);
                self.note_stock();
            }
            Op::Rearrange { ref wishes, stops, quiet, ref meanwhile, divides } => {
                self.rearrange(wishes, (stops, quiet, divides), meanwhile);
                self.note_stock();
            }
            Op::Repack { place, bytes, over, stops } => {
                self.repack(place, bytes, over, stops);
                self.note_stock();
            }
            Op::Arrive => {
                {
                    let mut inner = self.pool.backend().inner();
                    inner.readers += 1;
                    let readers = inner.readers;
                    inner.arrived.insert((readers % 2) as u32, readers);
                }
                self.pool.grant_again().unwrap();
            }
        }
    }

    /// What is mapped nowhere now and was before has been vacated.
    fn note_stock(&mut self) {
        let stock: BTreeSet<u64> = self.pool.backend().inner().stock().into_iter().map(|row| row.0).collect();
        self.freed_in.extend(stock.difference(&self.stock).map(|&handle| (handle, self.period)));
        self.stock = stock;
    }

    fn rearrange(
        &mut self,
        wanted: &[(usize, u64, u64, Place)],
        (stops, quiet, divides): (bool, u32, bool),
        meanwhile: &Meanwhile,
    ) {
        if self.live.is_empty() {
            return;
        }
        self.write_to_some();
        let mut wishes = Vec::new();
        for &(pick, from, bytes, to) in wanted {
            let block = self.live[pick % self.live.len()].block;
            let from = from % block.bytes;
            wishes.push(Wish { address: block.address + from, bytes: bytes.min(block.bytes - from), to });
            let end = block.address + block.bytes.next_multiple_of(FRAME);
            self.borders.extend((block.address..=end).step_by(FRAME as usize));
        }
        let pieces = |model: &Self| -> Vec<_> {
            let blocks = model.live.iter().map(|allocation| allocation.block.address);
            blocks.flat_map(|address| model.pool.pieces(address, u64::MAX)).map(|it| (it.address, it.handle)).collect()
        };
        let before = pieces(self);
        let freed_in = self.freed_in_of_frames();
        let victim = match *meanwhile {
            Meanwhile::Free(pick) => Some(pick % self.live.len()),
            _ => None,
        };
        let victim = victim.filter(|at| !self.out.contains_key(&self.live[*at].block.id)).map(|at| self.live[at]);
        let (was_stopped, is_over, made) = (Cell::new(false), Cell::new(false), Cell::new(None));
        let pool = &self.pool;
        let period = self.period;
        let stop = || {
            match (meanwhile, victim) {
                (Meanwhile::Free(_), Some(victim)) => {
                    note_busy_on(pool, &victim, victim.block.home);
                    assert_eq!(pool.free(victim.block.address, Free::Lazy), Ok(victim.block));
                    is_over.set(true);
                }
                (Meanwhile::Trim(place), _) => {
                    pool.trim(*place, None, &[]);
                }
                (Meanwhile::Unused, _) => {
                    pool.return_unused(None, period, u64::MAX, |_| false);
                }
                // One that would not fit waits until the move is over, and nobody else is here to end it.
                (&Meanwhile::Allocate(bytes), _)
                    if pool.usage().places.iter().all(|it| it.limit - it.held > 200 * MIB) =>
                {
                    let request = Request {
                        bytes,
                        home: 0,
                        owner: 0,
                        soft_refusal: false,
                        repacks: Repacks::Never,
                        can_ask: false,
                        can_widen: false,
                    };
                    made.set(pool.allocate(&request).ok());
                }
                _ => {}
            }
            was_stopped.set(true);
            stops.then(|| Still::new(pool.backend(), quiet))
        };
        let answer = if divides { pool.rearrange_dividing(&wishes, stop) } else { pool.rearrange(&wishes, stop) };
        if is_over.get()
            && let Some(gone) = victim
        {
            self.live.retain(|allocation| allocation.block != gone.block);
            // Otherwise the move has proven that nobody is at work on it.
            if !stops || quiet == 0 {
                self.note_borrowed(&gone, gone.block.home);
            }
            self.ends(&gone.block);
            self.note_borders(&gone);
        }
        if let Some(made) = made.get() {
            assert!(self.ids.insert(made.block.id), "ids are unique");
            self.write(&made.block);
            self.live.push(made);
            self.told[0] = false;
        }
        match answer {
            Ok(Rearranged { wishes: answers, cut_short, .. }) => {
                assert!(stops || !was_stopped.get());
                assert!(matches!(cut_short, None | Some(MoveError::NotQuiet)), "{cut_short:?} without a fault");
                assert_eq!(answers.len(), wishes.len());
                for (wish, answer) in wishes.iter().zip(&answers) {
                    let Moved { moved, there, anchored, shared } = *answer;
                    assert!(
                        moved + there + anchored + shared <= wish.bytes.next_multiple_of(FRAME),
                        "{wish:?} {answer:?}"
                    );
                    let is_alone = wishes.iter().filter(|other| {
                        other.address < wish.address + wish.bytes && wish.address < other.address + other.bytes
                    });
                    if is_alone.count() > 1 || cut_short.is_some() {
                        continue;
                    }
                    let inner = self.pool.backend().inner();
                    let at = (wish.address.next_multiple_of(FRAME)..wish.address + wish.bytes).step_by(FRAME as usize);
                    let is_there = |at: &u64| inner.mapped_around(*at).is_some_and(|row| row.2 == wish.to);
                    let is_there = at.filter(is_there).count() as u64 * FRAME;
                    // A frame that the range has a part of counts only at the end of the block.
                    assert!(is_there.abs_diff(moved + there) <= FRAME, "{wish:?} {answer:?} {is_there}");
                }
            }
            Err(error) => {
                match error {
                    MoveError::NotNow => assert!(!stops && was_stopped.get()),
                    MoveError::NotQuiet => assert_eq!(quiet, 0),
                    MoveError::OutOfReach => assert_ne!(self.lenders, Lenders::All),
                    MoveError::Full { missing, .. } => assert!(missing > 0),
                    error => panic!("{error:?} without a fault"),
                }
                let after = pieces(self);
                let changed = after.iter().find(|piece| !before.contains(piece) && made.get().is_none());
                assert_eq!(changed, None, "nothing was to change");
            }
        }
        self.carry_freed_in(&freed_in);
    }

    /// Returns what came free and stayed so.
    fn repack(&mut self, place: Place, bytes: u64, over: bool, stops: u32) -> u64 {
        for block in self.live.iter().map(|allocation| allocation.block) {
            let end = block.address + block.bytes.next_multiple_of(FRAME);
            self.borders.extend((block.address..=end).step_by(FRAME as usize));
        }
        let held = |model: &Self| model.pool.backend().inner().held(place);
        let (before, freed_in, left) = (held(self), self.freed_in_of_frames(), Cell::new(stops));
        let mock = self.pool.backend();
        let stop = || {
            let stops = left.get() > 0;
            left.set(left.get().saturating_sub(1));
            stops.then(|| Still::new(mock, u32::MAX))
        };
        let places_before = self.places_of_live();
        let freed = match self.pool.repack(place, bytes, |_| over, |_, _| false, stop) {
            // What is vacated may serve the next move.
            Ok(Repacked { freed, away, .. }) => {
                self.pool.trim(Some(place), None, &[]);
                assert!(before >= held(self) && freed <= before, "{freed} of {before}, and {} are left", held(self));
                assert!(away.is_empty() || over);
                let is_away = |at: &u64| away.iter().any(|range| (range.0..range.0 + range.1).contains(at));
                for (at, now) in self.places_of_live() {
                    assert!(places_before[&at] == now || is_away(&at), "{at:#x} went to {now:?}");
                }
                freed
            }
            Err(error) => {
                assert!(error == MoveError::NotNow && stops == 0, "{error:?}");
                0
            }
        };
        self.carry_freed_in(&freed_in);
        freed
    }

    /// Where each frame of the live blocks lies.
    fn places_of_live(&self) -> BTreeMap<u64, Place> {
        let inner = self.pool.backend().inner();
        let frames = self.live.iter().flat_map(|it| {
            let block = it.block;
            (block.address..block.address + block.bytes).step_by(FRAME as usize)
        });
        frames.filter_map(|at| Some((at, inner.mapped_around(at)?.2))).collect()
    }

    /// For each mapped frame, the period in which something on its chunk was freed last, and the chunk.
    fn freed_in_of_frames(&self) -> BTreeMap<u64, (u64, u32)> {
        let inner = self.pool.backend().inner();
        let chunks: Vec<_> = inner.mapped().filter_map(|(start, ..)| inner.mapped_around(start)).collect();
        let frames = chunks.into_iter().flat_map(|(start, bytes, _, handle)| {
            let freed_in = self.freed_in.get(&handle).copied().unwrap_or(0);
            (start..start + bytes).step_by(FRAME as usize).map(move |at| (at, (handle, freed_in)))
        });
        frames.collect()
    }

    /// Chunks that came in place of others were freed when those were; what they were before does not count.
    fn carry_freed_in(&mut self, before: &BTreeMap<u64, (u64, u32)>) {
        let after: Vec<(u64, u64)> = {
            let inner = self.pool.backend().inner();
            before.keys().filter_map(|&at| Some((at, inner.mapped_around(at)?.3))).collect()
        };
        let changed = |at: u64, now: u64| before.get(&at).is_some_and(|was| was.0 != now);
        let mut known: BTreeMap<u64, u32> = BTreeMap::new();
        for &(at, now) in after.iter().filter(|(at, now)| changed(*at, *now)) {
            let entry = known.entry(now).or_insert(0);
            *entry = before[&at].1.max(*entry);
        }
        self.freed_in.extend(known);
    }

    fn move_some(&mut self, pick: usize, from: u64, bytes: u64, place: Place) {
        let Some(&Allocation { block, .. }) = self.live.get(pick % self.live.len().max(1)) else { return };
        let last = block.address + block.bytes;
        let from = block.address + from % block.bytes;
        let bytes = bytes.min(last - from);
        let start = from.next_multiple_of(FRAME);
        let end = if from + bytes == last { last.next_multiple_of(FRAME) } else { (from + bytes) / FRAME * FRAME };
        let end = end.max(start);
        let frees = self.free_rows(None);
        let is_free = |at: u64| frees.iter().any(|row| (row.0..row.0 + row.1).contains(&at));
        let block_end = last.next_multiple_of(FRAME);
        let mut expected = Moved::default();
        // What each place has to have room for, and what goes home there.
        let mut needed: BTreeMap<Place, u64> = BTreeMap::new();
        let mut moving = Vec::new();
        {
            let inner = self.pool.backend().inner();
            let touched = inner.mapped().filter(|row| start < end && row.0 < end && start < row.0 + row.1);
            for (at, size, lies) in touched {
                let (inside, handle) = ((at.max(start), (at + size).min(end)), inner.mapped_around(at).unwrap().3);
                let part = inside.1 - inside.0;
                let mut frames = (at..at + size).step_by(FRAME as usize);
                if lies == place {
                    expected.there += part;
                } else if self.anchored.contains_key(&handle) || self.is_asked(at, size) {
                    expected.anchored += part;
                } else if !frames.all(|frame| (block.address..block_end).contains(&frame) || is_free(frame)) {
                    expected.shared += part;
                } else {
                    expected.moved += part;
                    let live = (at + size).min(block_end) - at.max(block.address);
                    *needed.entry(place).or_default() += part;
                    *needed.entry(lies).or_default() += live - part;
                    moving.push((at, size, handle));
                }
            }
        }
        let places = LIMITS.map(|entry| entry.0);
        let reached = route(block.home, &places, self.lenders).contains(&place);
        let capturing = self.pool.backend().inner().capturing;
        let held = |place: Place| self.pool.backend().inner().held(place);
        let freed_in = self.freed_in_of_frames();
        match self.pool.move_to(from, bytes, place) {
            Err(MoveError::OutOfReach) => assert!(!reached),
            Err(MoveError::NotNow) => assert!(capturing && reached),
            Err(MoveError::Full { place, .. }) => {
                let needed = needed.get(&place).copied().unwrap_or(0);
                assert!(needed > 0, "nothing was to be made at {place:?}");
                // Where nobody can tell what is left, the pool tries for a while and gives up.
                if self.pool.backend().inner().blind {
                    return;
                }
                self.pool.trim(Some(place), None, &[0, 1]);
                let limit = LIMITS.iter().find(|entry| entry.0 == place).unwrap().1;
                let allowed = limit - self.pool.accounts().taken(place);
                let room = allowed.min(self.pool.backend().inner().left(place));
                assert!(room / FRAME * FRAME < needed, "{needed} were refused at {place:?} though {room} can be had");
            }
            Ok(moved) => {
                assert!(reached && !capturing);
                assert_eq!(moved, expected, "{from:#x} and {bytes} bytes to {place:?}");
                let inner = self.pool.backend().inner();
                for (at, size, handle) in moving {
                    assert_ne!(inner.mapped_at(handle), Some(at), "the old memory is still there");
                    // Free memory on it went along with the old memory.
                    let gone =
                        (at..at + size).step_by(FRAME as usize).filter(|at| !(block.address..block_end).contains(at));
                    assert!(gone.into_iter().all(|at| inner.frame_at(at).is_none()), "free memory is still there");
                }
                drop(inner);
                assert!(held(place) <= LIMITS.iter().find(|entry| entry.0 == place).unwrap().1);
                self.borders.extend([from, start, end, block_end, block.address]);
                self.carry_freed_in(&freed_in);
            }
            Err(error) => panic!("{error:?} without a fault"),
        }
    }

    /// Whether the program asked for any of these bytes to stay in place.
    fn is_asked(&self, start: u64, bytes: u64) -> bool {
        let touches = |range: &(u64, u64, u64)| range.0 < start + bytes && start < range.0 + range.1;
        self.asked.iter().any(|range| touches(range) && self.lives(range.2))
    }

    /// Puts something of its own into each frame of a block.
    fn write(&self, block: &Block) {
        let mut inner = self.pool.backend().inner();
        for at in (block.address..block.address + block.bytes).step_by(FRAME as usize) {
            inner.write(at, self.content(block, at));
        }
    }

    /// What the program has written there.
    fn content(&self, block: &Block, at: u64) -> u64 {
        at ^ block.id << 50 ^ self.written.get(&block.id).copied().unwrap_or(0) << 42
    }

    /// Between two moves the program writes to some of its blocks, and not to others.
    fn write_to_some(&mut self) {
        self.moves += 1;
        let blocks: Vec<Block> = self.live.iter().map(|allocation| allocation.block).collect();
        for block in blocks.iter().filter(|block| (block.id + self.moves).is_multiple_of(3)) {
            *self.written.entry(block.id).or_default() += 1;
            self.write(block);
        }
    }

    fn assert_contents(&self) {
        let inner = self.pool.backend().inner();
        for block in self.live.iter().map(|allocation| allocation.block) {
            for at in (block.address..block.address + block.bytes).step_by(FRAME as usize) {
                assert_eq!(inner.read(at), self.content(&block, at), "{at:#x} of {block:?}");
            }
        }
        assert!(inner.aliases().iter().all(|bytes| *bytes >= 4 * MIB), "{:?}", inner.aliases());
    }

    /// Neighbours are found by it: those that stand on one chunk go together or not at all.
    fn assert_order(&self) {
        let stretches = self.pool.stretches();
        assert!(stretches.is_sorted_by_key(|(block, _)| block.address), "{stretches:?}");
        let blocks: Vec<Block> = (0..4).flat_map(|home| self.pool.blocks(home)).collect();
        assert!(blocks.is_sorted_by_key(|block| (block.home, block.address)), "{blocks:?}");
    }

    /// This block is about to end; whether others have it.
    fn ends(&mut self, block: &Block) -> bool {
        let frames = self.frames_of(block);
        let Some(out) = self.out.get_mut(&block.id).filter(|out| !out.is_over()) else {
            self.out.remove(&block.id);
            return false;
        };
        out.frames = Some(frames);
        true
    }

    fn frames_of(&self, block: &Block) -> BTreeSet<(u64, u64)> {
        let inner = self.pool.backend().inner();
        let end = block.address + block.bytes.next_multiple_of(FRAME);
        (block.address..end).step_by(FRAME as usize).filter_map(|address| inner.frame_at(address)).collect()
    }

    /// Whether others have this frame of an ended block.
    fn is_held(&self, frame: Option<(u64, u64)>) -> bool {
        let ended = || self.out.values().filter_map(|out| out.frames.as_ref());
        frame.is_some_and(|frame| ended().any(|frames| frames.contains(&frame)))
    }

    /// How much of what is mapped such frames are.
    fn held_bytes(&self) -> BTreeMap<Place, u64> {
        let inner = self.pool.backend().inner();
        let mut bytes = BTreeMap::new();
        for (start, size, place) in inner.mapped() {
            let held = (start..start + size).step_by(FRAME as usize).filter(|at| self.is_held(inner.frame_at(*at)));
            *bytes.entry(place).or_default() += held.count() as u64 * FRAME;
        }
        bytes
    }

    fn lives(&self, id: u64) -> bool {
        self.live.iter().any(|allocation| allocation.block.id == id)
    }

    fn anchor(&mut self, block: &Block, address: u64, bytes: u64, why: Anchor) {
        let reach = if why == Anchor::Asked { block.bytes } else { block.bytes.next_multiple_of(FRAME) };
        let inside = address + bytes <= block.address + reach;
        let touched: Vec<_> = {
            let inner = self.pool.backend().inner();
            let mappings = inner.mapped().filter_map(|(start, ..)| inner.mapped_around(start));
            mappings.filter(|row| row.0 < address + bytes && address < row.0 + row.1).collect()
        };
        let sum = touched.iter().map(|row| row.1).sum();
        assert_eq!(self.pool.anchor(address, bytes, why), inside.then_some(sum));
        self.gives_out |= inside && why != Anchor::Asked;
        match why {
            _ if !inside => {}
            Anchor::Asked => self.asked.push((address, bytes, block.id)),
            why if why != Anchor::Shared && !self.out.get(&block.id).is_some_and(|out| out.given) => {
                let out = self.out.entry(block.id).or_default();
                (out.address, out.given) = (block.address, true);
                touched.iter().for_each(|row| *self.anchored.entry(row.3).or_default() |= why.into());
            }
            why => touched.iter().for_each(|row| *self.anchored.entry(row.3).or_default() |= why.into()),
        }
    }

    /// What must stay in place, by the mock's mappings and the model's own anchors.
    fn assert_anchors(&self) {
        let usage = self.pool.usage();
        let inner = self.pool.backend().inner();
        let mut anchored: BTreeMap<Place, u64> = BTreeMap::new();
        for (start, bytes, place) in inner.mapped() {
            let handle = inner.mapped_around(start).unwrap().3;
            if self.is_asked(start, bytes) || self.anchored.contains_key(&handle) {
                *anchored.entry(place).or_default() += bytes;
            }
        }
        for account in &usage.places {
            assert_eq!(account.anchored, anchored.get(&account.place).copied().unwrap_or(0), "at {:?}", account.place);
        }
    }

    fn trim(&mut self, place: Option<Place>, bytes: Option<u64>, waits_for: &[u32]) {
        let held = || -> u64 {
            let inner = self.pool.backend().inner();
            LIMITS.iter().filter(|entry| place.is_none_or(|place| place == entry.0)).map(|e| inner.held(e.0)).sum()
        };
        // What is not returned is put back among the free runs, where neighbours join unless a GPU may be at work on one.
        if !self.pool.backend().inner().anything_busy() {
            self.borders.clear();
        }
        let before = held();
        let returned = self.pool.trim(place, bytes, waits_for);
        assert_eq!(before - held(), returned);
        if returned < bytes.unwrap_or(u64::MAX) && !self.pool.backend().inner().capturing {
            assert_eq!(
                self.pool.trim(place, None, waits_for),
                0,
                "a trim that returns less than it should left nothing to return"
            );
        }
    }

    fn live_bytes(&self) -> u64 {
        self.live.iter().map(|allocation| allocation.block.bytes).sum()
    }

    fn return_unused(&mut self, begins: bool, periods: u32, place: Option<Place>, most: u64, asks: bool) {
        if begins {
            self.period += 1;
            assert_eq!(self.pool.begin_period(), self.period);
            assert_eq!(self.pool.freed_memory().kept, 0);
            self.least_live = self.live_bytes();
        }
        let since = self.period.saturating_sub(periods);
        let before: Vec<_> = {
            let inner = self.pool.backend().inner();
            let mapped = inner.mapped().filter_map(|(start, ..)| inner.mapped_around(start));
            mapped.chain(inner.stock().into_iter().map(|(handle, bytes, place)| (0, bytes, place, handle))).collect()
        };
        let returned = self.pool.return_unused(place, since, most, |_| asks);
        let inner = self.pool.backend().inner();
        let gone = before.iter().filter(|row| inner.is_gone(row.3));
        let (mut sum, mut largest) = (0, 0);
        for &(start, bytes, at, handle) in gone {
            assert!(place.is_none_or(|place| place == at), "{start:#x} at {at:?}");
            let freed_in = self.freed_in.remove(&handle).unwrap_or(0);
            assert!(freed_in < since, "{start:#x} was used in period {freed_in}, and {since} is asked for");
            sum += bytes;
            largest = largest.max(bytes);
        }
        assert_eq!(sum, returned);
        assert!(sum == 0 || sum - largest < most, "more than was to go");
        drop(inner);
        let freed = self.pool.freed_memory();
        assert_eq!(freed.live_bytes, self.live_bytes());
        assert!(freed.least_live_bytes <= self.least_live, "{freed:?}, {} were in use", self.least_live);
        assert_eq!(freed.held, LIMITS.iter().map(|entry| self.pool.backend().inner().held(entry.0)).sum::<u64>());
        self.least_live = self.live_bytes();
    }

    /// Mapped memory under no live block, and with `home` only such that no other GPU may still touch, by the mock's account: maximal rows at one
    /// place, `(start, bytes, place)`.
    fn free_rows(&self, home: Option<u32>) -> Vec<(u64, u64, Place)> {
        let mut rows: Vec<(u64, u64, Place)> = Vec::new();
        let inner = self.pool.backend().inner();
        let mappings: Vec<_> = inner.mapped().collect();
        for (start, bytes, place) in mappings {
            for address in (start..start + bytes).step_by(FRAME as usize) {
                let taken = self.is_held(inner.frame_at(address))
                    || home.is_some_and(|home| inner.is_busy_elsewhere(address, FRAME, home))
                    || self.live.iter().any(|allocation| {
                        let block = allocation.block;
                        (block.address..block.address + block.bytes).contains(&address)
                    });
                match rows.last_mut() {
                    _ if taken => {}
                    Some((at, size, there)) if *at + *size == address && *there == place => *size += FRAME,
                    _ => rows.push((address, FRAME, place)),
                }
            }
        }
        rows
    }

    fn note_busy(&mut self, gone: &Allocation, gpu: u32) {
        note_busy_on(&self.pool, gone, gpu);
        self.note_borrowed(gone, gpu);
    }

    fn note_borrowed(&mut self, gone: &Allocation, gpu: u32) {
        let (start, end) = (gone.block.address, gone.block.address + gone.block.bytes.next_multiple_of(FRAME));
        let owned =
            |(at, bytes, place): (u64, u64, Place)| at + bytes <= start || end <= at || place == Place::Gpu(gpu);
        if !self.pool.backend().inner().mapped().all(owned) {
            self.borrowed.push((start, end));
        }
    }

    fn note_borders(&mut self, gone: &Allocation) {
        for (handle, _) in self.frames_of(&gone.block) {
            self.freed_in.insert(handle, self.period);
        }
        let end = gone.block.address + gone.block.bytes.next_multiple_of(FRAME);
        self.borders.extend([gone.block.address, end]);
    }

    /// Whether a GPU that does not own all of this row was at work on a part of it when that was freed.
    fn was_borrowed(&self, row: &(u64, u64, Place)) -> bool {
        self.borrowed.iter().any(|range| range.0 < row.0 + row.1 && row.0 < range.1)
    }

    /// Whether a block at `address` begins where a free row may begin, and no row that surely is one would fit better.
    fn is_best_unjoined(&self, address: u64, size: u64, home: Place, rows: &[(u64, u64, Place)]) -> bool {
        let at_home = || rows.iter().filter(|row| row.2 == home);
        let Some(around) = at_home().find(|row| (row.0..row.0 + row.1).contains(&address)) else { return false };
        // A move that comes to nothing gives what is free on the chunks it had taken back by itself; what lies beside it may be known to be quiet then.
        let is_chunk = || self.pool.backend().inner().mapped().any(|mapping| mapping.0 == address);
        let begins = address == around.0 || self.borders.contains(&address) || is_chunk();
        // The row that was cut ends at a border, at this one at the earliest.
        let end = self.borders.range(address + size..).next().map_or(u64::MAX, |&end| end).min(around.0 + around.1);
        let is_whole = |row: &&(u64, u64, Place)| {
            !self.was_borrowed(row) && self.borders.range(row.0 + 1..row.0 + row.1).next().is_none()
        };
        let better = at_home().filter(is_whole).any(|row| (size..end - address).contains(&row.1));
        begins && !better
    }

    fn allocate(&mut self, request: &Request) {
        let home = Place::Gpu(request.home);
        let size = request.bytes.next_multiple_of(FRAME);
        let rows = self.free_rows(Some(request.home));
        let all_rows = self.free_rows(None);
        let best_fit = rows.iter().filter(|row| row.2 == home && row.1 >= size).min_by_key(|row| (row.1, row.0));
        let waiting = self.pool.backend().inner().capturing && self.pool.backend().inner().anything_busy();
        // Somebody else holds so much that a place has less than nothing left. The driver says 0 then, and memory returned
        // there gives less room than it was; the pool can only find that out by trying.
        let overdrawn = {
            let inner = self.pool.backend().inner();
            let external = |place: Place| inner.external.get(&place).copied().unwrap_or(0);
            CAPACITY.iter().any(|&(place, bytes)| inner.held(place) + external(place) > bytes)
        };
        let told = std::mem::take(&mut self.told[request.home as usize]);
        let held = self.held();
        let calls = self.pool.backend().inner().log.len();
        match self.pool.allocate(request) {
            Ok(allocation) => {
                let block = allocation.block;
                assert_eq!((block.bytes, block.home, block.owner), (request.bytes, request.home, request.owner));
                assert!(self.ids.insert(block.id), "ids are unique");
                for other in &self.live {
                    let apart = other.block.address + other.block.bytes <= block.address
                        || block.address + size <= other.block.address;
                    assert!(apart, "{block:?} overlaps {:?}", other.block);
                }
                for frame in self.frames_of(&block) {
                    assert!(!self.is_held(Some(frame)), "{block:?} got frames that others have open");
                }
                assert_block(&self.pool, &allocation);
                let (start, end) = (block.address, block.address + size);
                let rests = |range: (u64, u64)| [(range.0, range.1.min(start)), (range.0.max(end), range.1)];
                self.borrowed = self.borrowed.iter().flat_map(|&range| rests(range)).filter(|it| it.0 < it.1).collect();
                let called = |name: &str| self.pool.backend().inner().log[calls..].iter().any(|call| call.0 == name);
                if allocation.reused {
                    let was_row = all_rows.iter().any(|row| (row.0..row.0 + row.1).contains(&block.address));
                    let is_more = self.held() > held;
                    assert!(was_row || called("map") && !is_more, "it was there before, here or elsewhere");
                    if !was_row {
                        // What is left of its last chunk was freed at another time than what is freed beside it later.
                        let last = self.pool.backend().inner().mapped_around(block.address + size - 1).unwrap();
                        self.borders.extend([block.address, block.address + size, last.0 + last.1]);
                    }
                } else {
                    assert!(called("create"), "nobody made this memory");
                }
                // Whoever asked another GPU may know of better rows than were free before.
                let looked = self.pool.backend().inner().log[calls..].iter().any(|call| call.0 == "look");
                let is_apart = self.gives_out && size <= CHUNK / 4;
                if self.policy == Policy::LocalFirst && !waiting && !looked && !is_apart {
                    // The strict best fit at home, as if all freed neighbours were joined, or at least the best of those
                    // that need no joining.
                    if let Some(row) = best_fit {
                        let unjoined = || self.is_best_unjoined(block.address, size, home, &rows);
                        assert!(block.address == row.0 || unjoined(), "{block:x?} in {rows:x?}, {:x?}", self.borders);
                    }
                }
                if self.lenders == Lenders::None {
                    assert_eq!(allocation.on_peers, 0);
                }
                self.write(&block);
                self.live.push(allocation);
            }
            Err(Refusal::Soft) => {
                assert!(request.soft_refusal && !told, "told twice in a row");
                // What another GPU was at work on may be known late to be free.
                let fits = |row: &(u64, u64, Place)| row.2 == home && row.1 >= size && !self.was_borrowed(row);
                assert!(!rows.iter().any(fits) || self.policy != Policy::LocalFirst || waiting);
                self.told[request.home as usize] = true;
            }
            Err(Refusal::HalfUsed { place, bytes }) => {
                assert!(request.repacks != Repacks::Never && bytes > 0);
                let half_used: u64 = self.half_used(place).iter().sum();
                assert!(bytes <= half_used, "{bytes} of {half_used} are wanted at {place:?}");
                self.told[request.home as usize] = told;
                if request.repacks == Repacks::ToFit && !waiting {
                    let without = self.pool.allocate(&Request { repacks: Repacks::Never, ..*request });
                    assert!(matches!(without, Err(Refusal::Full { .. })), "{without:?} without");
                }
                self.repack(place, bytes, true, u32::MAX);
                self.note_stock();
                self.allocate(&Request { repacks: Repacks::Never, can_ask: false, can_widen: false, ..*request });
            }
            Err(Refusal::Lacks { .. } | Refusal::Far { .. }) => panic!("nobody can be asked"),
            Err(Refusal::Full { .. }) if overdrawn => {}
            Err(Refusal::Full { .. }) => self.assert_full(request, size),
            Err(refusal) => panic!("{refusal:?} without a fault"),
        }
    }

    /// Bytes of all memory there is.
    fn held(&self) -> u64 {
        let inner = self.pool.backend().inner();
        LIMITS.iter().map(|entry| inner.held(entry.0)).sum()
    }

    /// What is free on each chunk at a place at least half of which is, but for those that must stay where they are.
    fn half_used(&self, place: Place) -> Vec<u64> {
        let frees = self.free_rows(None);
        let is_free = |at: u64| frees.iter().any(|row| (row.0..row.0 + row.1).contains(&at));
        let inner = self.pool.backend().inner();
        let at_place = inner.mapped().filter(|row| row.2 == place);
        let free = at_place.filter_map(|(start, bytes, _)| {
            let handle = inner.mapped_around(start)?.3;
            let free = (start..start + bytes).step_by(FRAME as usize).filter(|at| is_free(*at)).count() as u64 * FRAME;
            let stays = self.anchored.contains_key(&handle) || self.is_asked(start, bytes);
            (!stays && free < bytes && free * 2 >= bytes).then_some(free)
        });
        free.collect()
    }

    /// The places really have no room: after everything free is returned, they lack it still.
    fn assert_full(&self, request: &Request, size: u64) {
        if self.pool.backend().inner().capturing || self.pool.backend().inner().blind {
            return;
        }
        self.pool.trim(None, None, &[request.home]);
        let usage = self.pool.usage();
        let inner = self.pool.backend().inner();
        let room = |place: Place| {
            let account = usage.places.iter().find(|account| account.place == place).unwrap();
            let room = (account.limit - self.pool.accounts().taken(place)).min(inner.left(place));
            room - room % FRAME
        };
        let places = LIMITS.map(|entry| entry.0);
        let rooms: u64 = route(request.home, &places, self.lenders).into_iter().map(room).sum();
        assert!(rooms < size, "{size} were refused though {rooms} can be had");
    }
}

fn check(policy: Policy, lenders: Lenders, ops: &[Op]) {
    let mut model = Model::new(policy, lenders);
    for op in ops {
        model.run(op);
        assert_accounts_beside(&model.pool, &model.live, model.held_bytes());
        model.assert_anchors();
        model.assert_contents();
        let blocks: Vec<_> = model.live.iter().map(|allocation| allocation.block).collect();
        for block in blocks {
            assert_eq!(model.pool.block_at(block.address), Some(block), "nothing is lost");
        }
        model.assert_order();
    }
    model.pool.backend().inner().external.clear();
    assert_returns_everything(&model.pool, &model.live);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn local_first_agrees_with_the_model(ops in proptest::collection::vec(any_op(), 1..120)) {
        check(Policy::LocalFirst, Lenders::All, &ops);
    }

    #[test]
    fn interleave_agrees_with_the_model(ops in proptest::collection::vec(any_op(), 1..120)) {
        check(Policy::Interleave, Lenders::All, &ops);
    }

    #[test]
    fn most_free_agrees_with_the_model(ops in proptest::collection::vec(any_op(), 1..120)) {
        check(Policy::MostFree, Lenders::All, &ops);
    }

    #[test]
    fn ranks_that_keep_to_themselves_agree_with_the_model(ops in proptest::collection::vec(any_op(), 1..120)) {
        check(Policy::LocalFirst, Lenders::None, &ops);
    }
}

/// A block that GPU 1 borrowed and others have open ends beside one that GPU 1 may still be at work on.
#[test]
fn what_others_have_open_is_not_freed_with_what_its_borrower_is_not_done_with() {
    let ops = vec![
        Op::Allocate { bytes: 12582912, home: 1, owner: 0, soft: false, repacks: Repacks::Never },
        Op::Allocate { bytes: 8388608, home: 0, owner: 0, soft: false, repacks: Repacks::Never },
        Op::Allocate { bytes: 18874369, home: 0, owner: 0, soft: false, repacks: Repacks::Never },
        Op::Free { pick: 15063425673682003, when: Free::Strict },
        Op::Allocate { bytes: 2097152, home: 1, owner: 0, soft: false, repacks: Repacks::Never },
        Op::Allocate { bytes: 23068673, home: 0, owner: 0, soft: false, repacks: Repacks::Never },
        Op::Allocate { bytes: 8388608, home: 1, owner: 0, soft: false, repacks: Repacks::Never },
        Op::Allocate { bytes: 14680065, home: 0, owner: 0, soft: false, repacks: Repacks::Never },
        Op::Hold { pick: 364457935800149671 },
        Op::FreeAfter { pick: 4819340651991481210, gpu: 0 },
        Op::Allocate { bytes: 2097152, home: 0, owner: 0, soft: false, repacks: Repacks::Never },
        Op::FreeTwice { pick: 0 },
        Op::FreeTwice { pick: 0 },
        Op::Allocate { bytes: 2097152, home: 0, owner: 0, soft: false, repacks: Repacks::Never },
        Op::Free { pick: 13835671797078129423, when: Free::Strict },
        Op::Hold { pick: 872993583837688916 },
        Op::Allocate { bytes: 2097152, home: 0, owner: 0, soft: false, repacks: Repacks::Never },
        Op::FreeAfter { pick: 120970371949066316, gpu: 0 },
        Op::Free { pick: 4188547942687104200, when: Free::Lazy },
        Op::Allocate { bytes: 2097152, home: 0, owner: 0, soft: false, repacks: Repacks::Never },
        Op::Free { pick: 1103879517507973616, when: Free::Strict },
        Op::Allocate { bytes: 2097152, home: 0, owner: 0, soft: false, repacks: Repacks::Never },
        Op::Free { pick: 3038544896094292986, when: Free::Lazy },
        Op::Free { pick: 0, when: Free::Strict },
        Op::WithdrawAnchor { pick: 0, why: Anchor::Shared },
        Op::Free { pick: 16978272256689860173, when: Free::Strict },
    ];
    check(Policy::MostFree, Lenders::All, &ops);
}

/// A block ends while a move prepares that takes a part of it to another GPU, and its own GPU is proven idle by the move: that part serves
/// the next block of the GPU that it came to, rather than a larger row that the thread keeps.
#[test]
fn what_a_move_proves_quiet_is_known_to_be_free() {
    let allocate = |bytes, home, owner| Op::Allocate { bytes, home, owner, soft: false, repacks: Repacks::Never };
    let strictly = |pick| Op::Free { pick, when: Free::Strict };
    let rearrange = |wish, stops, quiet, victim| Op::Rearrange {
        wishes: vec![wish],
        stops,
        quiet,
        meanwhile: Meanwhile::Free(victim),
        divides: false,
    };
    let ops = vec![
        allocate(56623105, 1, 1),
        Op::Move { pick: 0, from: 4194305, bytes: u64::MAX, place: GPU0 },
        allocate(10485760, 0, 0),
        allocate(2097152, 1, 0),
        allocate(352321537, 0, 0),
        Op::FreeOwner { owner: 1 },
        strictly(13833317334054897132),
        allocate(2097152, 0, 0),
        rearrange((3941835777039366084, 0, 25165824, GPU1), false, 0, 235283742583013668),
        Op::FreeAfter { pick: 1184253491907479321, gpu: 0 },
        allocate(14680065, 1, 0),
        strictly(0),
        strictly(0),
        allocate(2097152, 0, 0),
        allocate(10485760, 0, 0),
        strictly(1395026693189800622),
        rearrange((0, 6291457, u64::MAX, GPU1), true, 1, 0),
        allocate(4194304, 1, 0),
        strictly(0),
        allocate(2097152, 1, 0),
    ];
    check(Policy::LocalFirst, Lenders::All, &ops);
}

/// A move that is given up takes a part out of a row that is partly quiet, and gives it back: the quiet part begins at a chunk then.
#[test]
fn what_a_move_gives_back_leaves_the_rest_of_a_row_quiet() {
    let allocate = |bytes| Op::Allocate { bytes, home: 0, owner: 0, soft: false, repacks: Repacks::Never };
    let strictly = |pick| Op::Free { pick, when: Free::Strict };
    let ops = vec![
        allocate(2097152),
        allocate(2097152),
        strictly(0),
        Op::FreeAfter { pick: 0, gpu: 0 },
        allocate(2097152),
        strictly(0),
        allocate(104857601),
        allocate(494927873),
        allocate(2097152),
        Op::FreeAfter { pick: 4054320068505899978, gpu: 0 },
        strictly(0),
        allocate(2097152),
        allocate(2097152),
        strictly(0),
        allocate(4194304),
        Op::Free { pick: 93867590013845287, when: Free::Lazy },
        Op::Rearrange {
            wishes: vec![(0, 0, u64::MAX, GPU1)],
            stops: false,
            quiet: 0,
            meanwhile: Meanwhile::Nothing,
            divides: false,
        },
        allocate(4194304),
    ];
    check(Policy::LocalFirst, Lenders::All, &ops);
}

/// A move that comes to nothing because the program is not quiet proves nothing: a wait for the block's GPU is heard of only when the pool looks
/// at all of its memory, and until then the best fit may be missed.
#[test]
fn what_a_move_could_not_prove_quiet_may_be_known_late() {
    let allocate = |bytes, home| Op::Allocate { bytes, home, owner: 0, soft: false, repacks: Repacks::Never };
    let ops = vec![
        allocate(2 * MIB, 1),
        Op::Move { pick: 0, from: 0, bytes: u64::MAX, place: GPU0 },
        allocate(2 * MIB, 1),
        allocate(4 * MIB, 0),
        Op::Rearrange {
            wishes: vec![(0, 0, u64::MAX, GPU1)],
            stops: true,
            quiet: 0,
            meanwhile: Meanwhile::Free(0),
            divides: false,
        },
        Op::Free { pick: 1, when: Free::Strict },
        Op::Free { pick: 0, when: Free::Strict },
        allocate(2 * MIB, 0),
    ];
    check(Policy::LocalFirst, Lenders::All, &ops);
}
