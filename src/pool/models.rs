//! The whole pool under the model checker: every order of steps between two threads.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p gpupool-pool --release loom`

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use crate::clock::Clock;
use crate::{
    Accounts, AddressIndex, Anchor, Backend, Claim, Config, Contents, FRAME, Fault, Free, FreeError, LARGEST_CHUNK,
    Links, MoveError, Mover, Place, PlaceSpec, Policy, Pool, Repacks, Request, Stopped, Transfer, Wish,
};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

/// Two GPUs that work is submitted to, and that say in [`Backend::quiesce`] what of it was seen there. Nothing here orders
/// threads: if a wait is to see a submission, the pool must have seen to that.
#[derive(Default)]
struct Device {
    submitted: [AtomicU64; 2],
    finished: [AtomicU64; 2],
}

impl Backend for Device {
    type Handle = ();
    type Error = ();

    fn headroom(&self, _place: Place) -> Option<u64> {
        None
    }
    fn create(&self, _place: Place, _bytes: u64) -> Result<(), Fault<()>> {
        Ok(())
    }
    fn release(&self, _handle: (), _place: Place, _bytes: u64) -> Result<(), Fault<()>> {
        Ok(())
    }
    fn map(&self, _address: u64, _bytes: u64, _handle: ()) -> Result<(), Fault<()>> {
        Ok(())
    }
    fn unmap(&self, _address: u64, _bytes: u64) -> Result<(), Fault<()>> {
        Ok(())
    }
    fn grant(&self, _address: u64, _bytes: u64, _place: Place) -> Result<(), Fault<()>> {
        Ok(())
    }
    fn quiesce(&self, gpus: &[u32]) -> Result<(), Fault<()>> {
        for &gpu in gpus {
            let seen = self.submitted[gpu as usize].load(Ordering::Relaxed);
            self.finished[gpu as usize].fetch_max(seen, Ordering::Relaxed);
        }
        Ok(())
    }
    fn has_finished(&self, _gpu: u32) -> bool {
        false
    }
}

impl Mover for Device {
    fn alias(&self, _handle: (), _bytes: u64, _place: Place) -> Result<u64, Fault<()>> {
        Ok(1)
    }
    fn drain(&self) -> Result<(), Fault<()>> {
        self.quiesce(&[0, 1])
    }
    fn prepare(&self, _owner: u64, _gpu: u32) -> Result<(), Fault<()>> {
        Ok(())
    }
    fn copy(&self, _owner: u64, _gpu: u32, _transfers: &[Transfer]) -> Result<(), Fault<()>> {
        Ok(())
    }
    fn digest(&self, _owner: u64, _gpu: u32, contents: &mut [Contents]) {
        contents.iter_mut().for_each(|contents| contents.digest = Some(0));
    }
}

/// Whether a block of a frame went to GPU 1, or had ended.
fn moves(pool: &Pool<Device>, block: u64) -> bool {
    match pool.move_to(block, FRAME, Place::Gpu(1)) {
        Ok(moved) => moved.moved > 0,
        Err(MoveError::NotABlock) => false,
        Err(error) => panic!("{error:?}"),
    }
}

/// A program that is stopped.
struct Still;

impl Stopped for Still {
    fn still_quiet(&mut self) -> bool {
        true
    }
}

/// Whether these blocks of a frame went to these GPUs, all of them at once, where the program could be stopped.
fn rearranges(pool: &Pool<Device>, wishes: &[(u64, u32)], stops: bool) -> bool {
    let wish = |&(address, gpu): &(u64, u32)| Wish { address, bytes: FRAME, to: Place::Gpu(gpu) };
    let wishes: Vec<Wish> = wishes.iter().map(wish).collect();
    let stop = || {
        let stopped = stops.then_some(Still);
        if stops {
            assert!(pool.backend().quiesce(&[0, 1]).is_ok());
        }
        stopped
    };
    match pool.rearrange(&wishes, stop) {
        Ok(done) => {
            assert_eq!(done.cut_short, None);
            done.wishes.iter().any(|moved| moved.moved > 0)
        }
        Err(MoveError::NotNow) => {
            assert!(!stops);
            false
        }
        Err(MoveError::NotABlock | MoveError::Full { .. }) => false,
        Err(error) => panic!("{error:?}"),
    }
}

fn accounts(specs: &[PlaceSpec]) -> std::sync::Arc<Accounts> {
    std::sync::Arc::new(Accounts::new(specs))
}

/// A GPU of so many frames.
fn pool(frames: u64) -> Arc<Pool<Device>> {
    let config = Config {
        base: 1 << 40,
        bytes: 4 * frames.max(4) * FRAME,
        accounts: accounts(&[PlaceSpec { place: Place::Gpu(0), limit: frames * FRAME }]),
        links: Links::default(),
        policy: Policy::LocalFirst,
        largest_chunk: LARGEST_CHUNK,
    };
    Arc::new(Pool::new(config, Device::default()))
}

/// A GPU of so many frames that lends all of them to a second one, which has none.
fn lending_pool(frames: u64) -> Arc<Pool<Device>> {
    let config = Config {
        base: 1 << 40,
        bytes: 16 * FRAME,
        accounts: accounts(&[
            PlaceSpec { place: Place::Gpu(0), limit: frames * FRAME },
            PlaceSpec { place: Place::Gpu(1), limit: 0 },
        ]),
        links: Links { ranks: [((1, Place::Gpu(0)), 0)].into() },
        policy: Policy::LocalFirst,
        largest_chunk: LARGEST_CHUNK,
    };
    Arc::new(Pool::new(config, Device::default()))
}

/// Two GPUs of so many frames each that lend to each other.
fn pool_of_two(frames: u64) -> Arc<Pool<Device>> {
    let spec = |gpu: u32| PlaceSpec { place: Place::Gpu(gpu), limit: frames * FRAME };
    let config = Config {
        base: 1 << 40,
        bytes: 16 * FRAME,
        accounts: accounts(&[spec(0), spec(1)]),
        links: Links { ranks: [((0, Place::Gpu(1)), 0), ((1, Place::Gpu(0)), 0)].into() },
        policy: Policy::LocalFirst,
        largest_chunk: LARGEST_CHUNK,
    };
    Arc::new(Pool::new(config, Device::default()))
}

fn allocate(pool: &Pool<Device>, frames: u64) -> Option<u64> {
    allocate_for(pool, 0, frames)
}

fn allocate_for(pool: &Pool<Device>, home: u32, frames: u64) -> Option<u64> {
    let request = Request {
        bytes: frames * FRAME,
        home,
        owner: 1,
        soft_refusal: false,
        repacks: Repacks::Never,
        can_ask: false,
        can_widen: false,
    };
    pool.allocate(&request).ok().map(|allocation| allocation.block.address)
}

/// Whatever happened: the sums agree with these blocks, and everything comes back.
fn check_end(pool: &Pool<Device>, live: &[u64]) {
    let usage = pool.usage();
    assert_eq!(usage.live_blocks, live.len() as u64);
    assert!(usage.places[0].used <= usage.places[0].peak_used && usage.live_bytes <= usage.peak_live_bytes);
    for &address in live {
        assert!(pool.free(address, Free::Strict).is_ok());
    }
    pool.trim(None, None, &[0, 1]);
    let usage = pool.usage();
    assert_eq!((usage.live_blocks, usage.live_bytes), (0, 0));
    for place in usage.places {
        assert_eq!((place.used, place.held, place.anchored), (0, 0, 0), "at {:?}", place.place);
    }
}

fn every_order(model: impl Fn() + Sync + Send + 'static) {
    check(model, None);
}

/// For models that would take minutes otherwise: every order in which a thread that could go on is interrupted
/// [`INTERRUPTIONS`] times at most. They are enough to find the mistakes that were planted to try these models: an ordering
/// weakened, a fence or the second look left out, a wait that vouches for another GPU.
fn nearly_every_order(model: impl Fn() + Sync + Send + 'static) {
    check(model, Some(INTERRUPTIONS));
}

const INTERRUPTIONS: usize = 3;

fn check(model: impl Fn() + Sync + Send + 'static, interruptions: Option<usize>) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 20_000;
    builder.preemption_bound = interruptions;
    builder.check(model);
}

#[test]
fn loom_of_two_frees_one_succeeds() {
    for when in [Free::Lazy, Free::Strict] {
        every_order(move || {
            let pool = pool(2);
            let block = allocate(&pool, 1).unwrap();
            let other = Arc::clone(&pool);
            let thread = thread::spawn(move || other.free(block, Free::Lazy));
            let answers = [pool.free(block, when), thread.join().unwrap()];
            assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1);
            assert!(answers.contains(&Err(FreeError::NotABlock)));
            check_end(&pool, &[]);
        });
    }
}

/// What another thread returns by itself (the agent) is gone, too, when a trim by hand is over.
#[test]
fn loom_nothing_is_left_behind_a_trim_of_all() {
    every_order(|| {
        let pool = pool(2);
        let block = allocate(&pool, 1).unwrap();
        assert!(pool.free(block, Free::Strict).is_ok());
        pool.begin_period();
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || other.return_unused(None, u32::MAX, u64::MAX, |_| false));
        let returned = pool.trim_all(&[0]);
        assert_eq!(pool.usage().places[0].held, 0);
        assert_eq!(returned + thread.join().unwrap(), FRAME);
        check_end(&pool, &[]);
    });
}

/// Free chunks are mapped side by side for one block while another thread allocates and frees.
#[test]
fn loom_what_is_gathered_is_nobody_elses() {
    nearly_every_order(|| {
        // A chunk of 32 MiB is the smallest that is gathered.
        let pool = pool(64);
        let rows: Vec<u64> = (0..4).map(|_| allocate(&pool, 16).unwrap()).collect();
        assert!(pool.free(rows[0], Free::Strict).is_ok());
        assert!(pool.free(rows[2], Free::Strict).is_ok());
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || allocate(&other, 16));
        let joined = allocate(&pool, 32);
        let one = thread.join().unwrap();
        assert!(joined.is_some() != one.is_some(), "there is room for either");
        let live: Vec<u64> = [rows[1], rows[3]].into_iter().chain(joined).chain(one).collect();
        check_end(&pool, &live);
    });
}

#[test]
fn loom_who_frees_can_allocate_again() {
    // The GPU is full, so that each thread lives from what was freed: memory that is out of sight for a moment, on its
    // way between a shard and the free runs, would make an allocation fail.
    every_order(|| {
        let pool = pool(2);
        let blocks = [allocate(&pool, 1).unwrap(), allocate(&pool, 1).unwrap()];
        let other = Arc::clone(&pool);
        let again = |pool: &Pool<Device>, block: u64| {
            assert!(pool.free(block, Free::Strict).is_ok());
            allocate(pool, 1)
        };
        let thread = thread::spawn(move || again(&other, blocks[1]));
        let live = [again(&pool, blocks[0]), thread.join().unwrap()].map(|block| block.expect("it freed one before"));
        assert_ne!(live[0], live[1], "two blocks on one frame");
        check_end(&pool, &live);
    });
}

#[test]
fn loom_a_free_against_an_allocation_that_needs_it_joined() {
    every_order(|| {
        let pool = pool(2);
        let blocks = [allocate(&pool, 1).unwrap(), allocate(&pool, 1).unwrap()];
        assert!(pool.free(blocks[0], Free::Strict).is_ok());
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || other.free(blocks[1], Free::Lazy).is_ok());
        let early = allocate(&pool, 2);
        assert!(thread.join().unwrap());
        let block = early.or_else(|| allocate(&pool, 2)).expect("both halves are free");
        check_end(&pool, &[block]);
    });
}

/// Memory freed lazily while another thread waits for the device: the wait must vouch for no more than it covered. So
/// many threads take a seat first that the two share a shard (1), or do not (0).
fn free_against_wait(threads_before: usize) {
    every_order(move || {
        let pool = pool(2);
        let blocks = [allocate(&pool, 1).unwrap(), allocate(&pool, 1).unwrap()];
        for _ in 0..threads_before {
            thread::spawn(crate::sync::seat).join().unwrap();
        }
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || {
            other.backend().submitted[0].store(1, Ordering::Relaxed);
            assert!(other.free(blocks[1], Free::Lazy).is_ok());
        });
        assert!(pool.free(blocks[0], Free::Strict).is_ok());
        let first = allocate(&pool, 1).expect("one was freed before");
        let second = allocate(&pool, 1);
        if first == blocks[1] || second == Some(blocks[1]) {
            assert_eq!(pool.backend().finished[0].load(Ordering::Relaxed), 1, "the GPU may still touch this memory");
        }
        thread.join().unwrap();
        let live: Vec<u64> = [Some(first), second].into_iter().flatten().collect();
        check_end(&pool, &live);
    });
}

#[test]
fn loom_a_wait_vouches_for_its_shard_no_further_than_it_covered() {
    free_against_wait(1);
}

#[test]
fn loom_memory_of_another_shard_is_waited_for() {
    free_against_wait(0);
}

/// What GPU 1 borrowed of GPU 0 is freed lazily while somebody waits for GPU 0, and with `both` for GPU 1 too: only that
/// wait makes it anybody's.
fn borrowed_against_wait(both: bool) {
    let interruptions = both.then_some(INTERRUPTIONS);
    let model = move || {
        let pool = lending_pool(2);
        let (own, lent) = (allocate(&pool, 1).unwrap(), allocate_for(&pool, 1, 1).unwrap());
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || {
            other.backend().submitted[1].store(1, Ordering::Relaxed);
            assert!(other.free(lent, Free::Lazy).is_ok());
            if both {
                // Needs the memory joined, or waits for it; either way it waits for GPU 1 only.
                let again = allocate_for(&other, 1, 1).expect("it freed one before");
                assert!(other.free(again, Free::Strict).is_ok());
            }
        });
        assert!(pool.free(own, Free::Strict).is_ok());
        let first = allocate(&pool, 1);
        let second = allocate(&pool, 1);
        if first == Some(lent) || second == Some(lent) {
            assert_eq!(
                pool.backend().finished[1].load(Ordering::Relaxed),
                1,
                "the other GPU may still touch this memory"
            );
        }
        thread.join().unwrap();
        let live: Vec<u64> = [first, second].into_iter().flatten().collect();
        check_end(&pool, &live);
    };
    check(model, interruptions);
}

#[test]
fn loom_a_wait_for_one_gpu_says_nothing_about_what_another_borrowed() {
    borrowed_against_wait(false);
}

#[test]
fn loom_what_a_gpu_borrowed_is_everybody_s_after_a_wait_for_it() {
    borrowed_against_wait(true);
}

#[test]
fn loom_a_wait_that_counts_a_free_saw_the_work_before_it() {
    every_order(|| {
        let clock = Arc::new(Clock::new(1));
        let submitted = Arc::new(AtomicU64::new(0));
        let (other, work) = (Arc::clone(&clock), Arc::clone(&submitted));
        let thread = thread::spawn(move || {
            work.store(1, Ordering::Relaxed);
            other.tick()
        });
        let begun = clock.now();
        let seen = submitted.load(Ordering::Relaxed);
        clock.covered(0, begun);
        let number = thread.join().unwrap();
        assert!(clock.quiesced(0) < number || seen == 1, "the wait vouches for what it did not cover");
    });
}

/// Asks for addresses once beside changes, as often as they can be told, and after them.
fn index_beside(
    before: &'static [u64],
    changes: fn(&AddressIndex),
    asked: u64,
    right: fn(Option<u64>) -> bool,
) -> impl Fn() + Sync + Send + 'static {
    move || {
        let index = Arc::new(AddressIndex::default());
        for &block in before {
            index.insert(block, block + 50);
        }
        for &block in before {
            index.find(block).unwrap().store(block, Ordering::Relaxed);
        }
        let other = Arc::clone(&index);
        // The look and not the change is the thread's: the other way round loom passes over two of five planted mistakes.
        let thread = thread::spawn(move || {
            if let Some(found) = other.look(asked) {
                let number = found.map(|number| number.load(Ordering::Relaxed));
                assert!(right(number), "{number:?}");
            }
        });
        changes(&index);
        thread.join().unwrap();
        let number = index.look(asked).unwrap().map(|number| number.load(Ordering::Relaxed));
        assert!(right(number), "{number:?}, though nothing changes any more");
    }
}

#[test]
fn loom_a_look_finds_a_block_that_stays() {
    let insert: fn(&AddressIndex) = |index| index.insert(100, 150);
    let remove: fn(&AddressIndex) = |index| index.remove(100);
    // Its row moves, in one table or to another.
    every_order(index_beside(&[200], insert, 220, |number| number == Some(200)));
    every_order(index_beside(&[100, 200], remove, 220, |number| number == Some(200)));
    every_order(index_beside(&[200, 300], insert, 220, |number| number == Some(200)));
    every_order(index_beside(&[100, 200, 300], remove, 220, |number| number == Some(200)));
}

#[test]
fn loom_a_look_never_takes_another_block_for_the_one_that_went() {
    // The row of the one becomes that of the other: what is read in between has the start of one and the end of the other.
    every_order(index_beside(&[100, 200], |index| index.remove(100), 120, |number| matches!(number, None | Some(100))));
    every_order(index_beside(&[200], |index| index.insert(100, 150), 120, |number| matches!(number, None | Some(0))));
}

#[test]
fn loom_a_look_beside_two_changes_never_takes_another_block_for_the_one_asked_for() {
    // A second change in the table that the first made.
    let replace: fn(&AddressIndex) = |index| {
        index.remove(200);
        index.insert(10, 60);
    };
    nearly_every_order(index_beside(&[100, 200], replace, 120, |number| number == Some(100)));
}

#[test]
fn loom_sums_are_never_torn() {
    every_order(|| {
        let pool = pool(2);
        let blocks = [allocate(&pool, 1).unwrap(), allocate(&pool, 1).unwrap()];
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || {
            assert!(other.free(blocks[1], Free::Lazy).is_ok());
            allocate(&other, 1).expect("it freed one before")
        });
        let usage = pool.usage();
        assert!((1..=2).contains(&usage.live_blocks), "{usage:?}");
        assert_eq!(usage.live_bytes, usage.live_blocks * FRAME);
        assert_eq!(usage.places[0].used, usage.live_bytes);
        assert_eq!(usage.places[0].held, 2 * FRAME);
        let last = thread.join().unwrap();
        check_end(&pool, &[blocks[0], last]);
    });
}

fn small(pool: &Pool<Device>) -> Option<u64> {
    let request = Request {
        bytes: 1000,
        home: 0,
        owner: 1,
        soft_refusal: false,
        repacks: Repacks::Never,
        can_ask: false,
        can_widen: false,
    };
    pool.allocate_small(&request).ok().map(|small| small.block.address)
}

#[test]
fn loom_a_context_ends_while_a_slab_is_taken_for_it() {
    nearly_every_order(|| {
        let pool = pool(1);
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || small(&other));
        let ended = pool.free_owned_by(1).len();
        let made = thread.join().unwrap();
        let lives = made.is_some_and(|address| pool.block_at(address).is_some());
        assert_eq!(usize::from(made.is_some()), ended + usize::from(lives));
        assert_eq!(pool.free_owned_by(1).len(), usize::from(lives));
        check_end(&pool, &[]);
    });
}

#[test]
fn loom_of_two_ends_of_a_small_block_one_counts() {
    for when in [Free::Lazy, Free::Strict] {
        nearly_every_order(move || {
            let pool = pool(1);
            let (first, _second) = (small(&pool).unwrap(), small(&pool).unwrap());
            let other = Arc::clone(&pool);
            let thread = thread::spawn(move || other.free(first, when).is_ok());
            let ended = pool.free_owned_by(1).len();
            let freed = thread.join().unwrap();
            assert_eq!(ended + usize::from(freed), 2);
            check_end(&pool, &[]);
        });
    }
}

#[test]
fn loom_a_trim_against_frees() {
    nearly_every_order(|| {
        let pool = pool(2);
        let blocks = [allocate(&pool, 1).unwrap(), allocate(&pool, 1).unwrap()];
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || {
            assert!(other.free(blocks[0], Free::Lazy).is_ok());
            assert!(other.free(blocks[1], Free::Strict).is_ok());
        });
        assert!(pool.trim(None, None, &[0, 1]) <= 2 * FRAME);
        assert_eq!(pool.free_owned_by(2), []);
        thread.join().unwrap();
        check_end(&pool, &[]);
    });
}

#[test]
fn loom_frames_that_others_hold_serve_nobody_until_they_let_go() {
    for when in [Free::Lazy, Free::Strict] {
        every_order(move || {
            let pool = pool(2);
            let (block, neighbour) = two_on_one_chunk(&pool);
            let id = pool.block_at(block).unwrap().id;
            let other = Arc::clone(&pool);
            // Another process opens the block and lets go of it, while this one frees it and allocates again.
            let held = Arc::new(AtomicU64::new(0));
            let has = Arc::clone(&held);
            let thread = thread::spawn(move || {
                if other.hold(block, id).is_some() {
                    has.store(1, Ordering::SeqCst);
                    has.store(0, Ordering::SeqCst);
                    other.let_go(block, id);
                }
            });
            assert!(pool.free(block, when).is_ok());
            let next = allocate(&pool, 1);
            if next == Some(block) {
                assert_eq!(held.load(Ordering::SeqCst), 0, "two have these frames");
            }
            thread.join().unwrap();
            let next = next.or_else(|| allocate(&pool, 1)).expect("nobody has it any more");
            check_end(&pool, &[neighbour, next]);
        });
    }
}

/// Two blocks of a frame each on one chunk of two.
fn two_on_one_chunk(pool: &Pool<Device>) -> (u64, u64) {
    let whole = allocate(pool, 2).unwrap();
    assert!(pool.free(whole, Free::Strict).is_ok());
    let blocks = (allocate(pool, 1).unwrap(), allocate(pool, 1).unwrap());
    assert_eq!(blocks, (whole, whole + FRAME));
    blocks
}

/// What the books say of a place, and what these blocks say that lie there.
fn check_places(pool: &Pool<Device>, live: &[u64]) {
    let usage = pool.usage();
    let pieces: Vec<_> = live.iter().flat_map(|&address| pool.pieces(address, u64::MAX)).collect();
    for place in usage.places {
        let used: u64 = pieces.iter().filter(|piece| piece.place == place.place).map(|piece| piece.bytes).sum();
        assert_eq!(place.used, used, "at {:?}", place.place);
        assert!(place.used <= place.held && place.held <= place.limit, "{place:?}");
    }
}

#[test]
fn loom_what_moves_while_it_is_freed_serves_nobody_as_local_that_is_not() {
    for when in [Free::Lazy, Free::Strict] {
        nearly_every_order(move || {
            let pool = pool_of_two(1);
            let block = allocate(&pool, 1).unwrap();
            let (other, moved) = (Arc::clone(&pool), Arc::new(AtomicU64::new(0)));
            let has_moved = Arc::clone(&moved);
            let thread = thread::spawn(move || {
                has_moved.store(u64::from(moves(&other, block)), Ordering::SeqCst);
            });
            assert!(pool.free(block, when).is_ok());
            let before = moved.load(Ordering::SeqCst) == 1;
            let request = Request {
                bytes: FRAME,
                home: 0,
                owner: 1,
                soft_refusal: false,
                repacks: Repacks::Never,
                can_ask: false,
                can_widen: false,
            };
            let again = pool.allocate(&request).expect("each GPU has room for a block");
            let (address, is_local) = (again.block.address, again.on_peers == 0);
            // Until the move is over, what was freed meanwhile serves nobody.
            assert!(!before || is_local, "GPU 0 has all of its room");
            let place = pool.pieces(address, 1)[0].place;
            assert!(!before || place == Place::Gpu(0), "what moved is on GPU 1");
            thread.join().unwrap();
            check_places(&pool, &[address]);
            check_end(&pool, &[address]);
        });
    }
}

#[test]
fn loom_what_is_anchored_does_not_move() {
    for why in [Anchor::Shared, Anchor::Asked] {
        nearly_every_order(move || {
            let pool = pool_of_two(1);
            let block = allocate(&pool, 1).unwrap();
            let (other, anchored) = (Arc::clone(&pool), Arc::new(AtomicU64::new(0)));
            let is_anchored = Arc::clone(&anchored);
            let thread = thread::spawn(move || {
                let before = is_anchored.load(Ordering::SeqCst) == 1;
                let moved = moves(&other, block);
                assert!(!before || !moved, "it was to stay");
                moved
            });
            assert_eq!(pool.anchor(block, FRAME, why), Some(FRAME));
            let place = pool.pieces(block, 1)[0].place;
            anchored.store(1, Ordering::SeqCst);
            let moved = thread.join().unwrap();
            assert_eq!(place, if moved { Place::Gpu(1) } else { Place::Gpu(0) }, "it moved after it was to stay");
            let bytes = pool.usage().places.iter().map(|usage| (usage.place, usage.anchored)).collect::<Vec<_>>();
            let there = |gpu: u32| (Place::Gpu(gpu), if place == Place::Gpu(gpu) { FRAME } else { 0 });
            assert_eq!(bytes, [there(0), there(1)]);
            check_places(&pool, &[block]);
            check_end(&pool, &[block]);
        });
    }
}

#[test]
fn loom_a_move_against_a_trim_and_a_free() {
    nearly_every_order(|| {
        let pool = pool_of_two(2);
        let (block, neighbour) = two_on_one_chunk(&pool);
        assert!(pool.free(neighbour, Free::Strict).is_ok());
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || moves(&other, block));
        assert!(pool.free(block, Free::Lazy).is_ok());
        let returned = pool.trim(Some(Place::Gpu(0)), None, &[0]);
        let moved = thread.join().unwrap();
        assert_eq!(returned, if moved { 0 } else { 2 * FRAME }, "it is on one GPU or the other, or gone");
        check_places(&pool, &[]);
        check_end(&pool, &[]);
    });
}

#[test]
fn loom_an_allocation_waits_for_room_that_a_move_has_taken() {
    for stops in [true, false] {
        nearly_every_order(move || {
            let pool = pool_of_two(2);
            let [near, other_near, far] = [0; 3].map(|_| allocate(&pool, 1).unwrap());
            let other = Arc::clone(&pool);
            // Both change places, for which the last frame of GPU 1 is needed for a moment.
            let thread = thread::spawn(move || rearranges(&other, &[(near, 1), (far, 0)], stops));
            let last = allocate(&pool, 1).expect("nobody else keeps the last frame");
            let moved = thread.join().unwrap();
            let places = [near, far].map(|block| pool.pieces(block, 1)[0].place);
            assert_eq!(places, if moved { [Place::Gpu(1), Place::Gpu(0)] } else { [Place::Gpu(0), Place::Gpu(1)] });
            let live = [near, other_near, far, last];
            check_places(&pool, &live);
            check_end(&pool, &live);
        });
    }
}

#[test]
fn loom_a_block_ends_while_it_changes_places_with_another() {
    nearly_every_order(|| {
        let pool = pool_of_two(2);
        let [near, other_near, far] = [0; 3].map(|_| allocate(&pool, 1).unwrap());
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || rearranges(&other, &[(near, 1), (far, 0)], true));
        assert!(pool.free(near, Free::Lazy).is_ok());
        let again = allocate(&pool, 1).expect("one was freed before");
        thread.join().unwrap();
        let live = [other_near, far, again];
        check_places(&pool, &live);
        check_end(&pool, &live);
    });
}

#[test]
fn loom_what_moves_left_is_taken_by_a_move_or_goes_home() {
    nearly_every_order(|| {
        let pool = pool_of_two(8);
        let block = allocate(&pool, 1).unwrap();
        for gpu in [1, 0] {
            assert!(rearranges(&pool, &[(block, gpu)], true));
        }
        assert_eq!(pool.usage().places[1].held, FRAME, "GPU 1 keeps a chunk");
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || rearranges(&other, &[(block, 1)], true));
        let returned = pool.trim(Some(Place::Gpu(1)), None, &[]);
        assert!(thread.join().unwrap() && returned <= FRAME);
        assert_eq!(pool.usage().places[1].held, FRAME, "the block is there now");
        check_places(&pool, &[block]);
        check_end(&pool, &[block]);
    });
}

#[test]
fn loom_two_claims_at_the_limit_are_one_too_many() {
    every_order(|| {
        let accounts =
            accounts(&[PlaceSpec { place: Place::Gpu(0), limit: 10 }, PlaceSpec { place: Place::Gpu(1), limit: 10 }]);
        let other = std::sync::Arc::clone(&accounts);
        // Both want most of both places, each in an order of its own.
        let parts = [(Place::Gpu(0), 6), (Place::Gpu(1), 6)];
        let thread = thread::spawn(move || other.charge_all(Claim::Handles, &[parts[1], parts[0]]).is_ok());
        let first = accounts.charge_all(Claim::Pool, &parts).is_ok();
        let second = thread.join().unwrap();
        assert!(first != second, "one has the room, and the other has none of it");
        for place in [Place::Gpu(0), Place::Gpu(1)] {
            assert_eq!(accounts.taken(place), 6);
            assert_eq!(accounts.of(Claim::Pool, place), if first { 6 } else { 0 });
        }
    });
}

#[test]
fn loom_the_pool_and_a_handle_at_the_limit_keep_to_it() {
    every_order(|| {
        let pool = pool(2);
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || other.accounts().charge(Claim::Handles, Place::Gpu(0), FRAME + 1));
        let blocks = [allocate(&pool, 1), allocate(&pool, 1)];
        let has_handle = thread.join().unwrap();
        let live: Vec<u64> = blocks.into_iter().flatten().collect();
        let taken = pool.accounts().taken(Place::Gpu(0));
        assert!(taken <= 2 * FRAME, "{taken} bytes of {}", 2 * FRAME);
        assert_eq!(taken, live.len() as u64 * FRAME + if has_handle { FRAME + 1 } else { 0 });
        assert!(has_handle || !live.is_empty(), "somebody has the room");
        check_end(&pool, &live);
    });
}
