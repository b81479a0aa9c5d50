//! What the program loses by memory that lies far from the GPU that uses it, whether memory moves or not ([`ledger`] says how that is
//! reckoned), and what is said of it ([`told`]).
//!
//! One launch of 64 is looked at, in steps of chance, so that no loop is always met at the same place; the first ones are looked at more
//! often, and where launches follow each other so closely that the looks would take more than a small part of the time, fewer. Nothing of it happens before the first block of a GPU lies elsewhere; from then on a launch counts down a number of its
//! thread's own.

mod ledger;
mod told;

pub use told::{judge, lost_microseconds, read_bytes, refuses, worst};

use super::launch::About;
use super::timing::{self, Running, Timing};
use super::{GPUS, link, now, own, totals};
use crate::backing::open::Opened;
use crate::process;
use crate::serve::handles::by_hand;
use crate::watch::arguments::{self, Arguments, Reader};
use crate::watch::context::{self, Context};
use crate::watch::{capture, site};
use gpupool_cuda::{Device, Driver};
use gpupool_events::Site;
use gpupool_interpose::Api;
use gpupool_pool::{Allocation, Block, Place};
use gpupool_tiers::{FarLink, Links, Range};
use ledger::{Ledger, Seen};
use once_cell::race::OnceBox;
use parking_lot::Mutex;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// How much of a range had to leave a GPU and comes back by itself.
type Away = fn(u32, u64, u64) -> u64;
/// No launch asks before anything has.
static AWAY: OnceBox<Away> = OnceBox::new();

/// Something has left these GPUs that comes back by itself, which `asks` knows.
pub fn has_left(gpus: impl IntoIterator<Item = u32>, asks: Away) {
    let _ = AWAY.set(Box::new(asks));
    gpus.into_iter().filter(|gpu| watch(*gpu).is_none()).for_each(begin);
}

static WATCHES: [OnceBox<Watch>; GPUS] = [const { OnceBox::new() }; GPUS];

/// Launches that are looked at one by one, and as many again of which one of four is.
const EAGER: u64 = 64;
/// Of launches after those one of so many is looked at, in the mean; and of short ones, one of so many at least.
const USUAL: u64 = 64;
const RARE: u64 = 256;
/// Looks may take one of so many nanoseconds, as far as that leaves enough of them.
const ONE_OF: u64 = 200;
/// Pointers by which operands within large blocks are told apart.
const POINTERS: usize = 1 << 14;
/// Words of one launch that are looked at.
const WORDS: usize = 128;
/// What a function has to have lost before it is looked where it is launched, nanoseconds.
const WORTH_A_LOOK: f64 = 50e6;

/// One GPU whose memory lies elsewhere in part.
struct Watch {
    gpu: u32,
    opened: &'static Opened,
    driver: &'static Driver,
    /// The ways to places other than the GPU.
    links: Vec<(Place, FarLink)>,
    /// What a kernel reads of the GPU's own memory, bytes a nanosecond.
    near: f64,
    ledger: Mutex<Ledger<Site>>,
    pointers: Mutex<BTreeSet<u64>>,
    timing: Timing,
    /// Launches that were looked at.
    samples: AtomicU64,
    /// How often functions had been forgotten when the ledger last heard of it.
    forgotten: AtomicU64,
    /// When it is looked next whether there is something to say, nanoseconds from the beginning.
    next_tell: AtomicU64,
    /// How many windows in a row more was lost than `GPUPOOL_FAR_LIMIT` says, and nothing came near.
    beyond: AtomicU32,
}

fn watch(gpu: u32) -> Option<&'static Watch> {
    WATCHES.get(gpu as usize)?.get()
}

fn watches() -> impl Iterator<Item = &'static Watch> {
    WATCHES.iter().filter_map(OnceBox::get)
}

/// Where launches are timed for this.
pub(super) fn timings() -> impl Iterator<Item = &'static Timing> {
    watches().map(|watch| &watch.timing)
}

/// A block was made.
pub(super) fn made(allocation: &Allocation) {
    if allocation.on_peers + allocation.on_host > 0 && watch(allocation.block.home).is_none() {
        begin(allocation.block.home);
    }
}

/// Some of what the program made by `cuMemCreate` for this GPU lies elsewhere.
pub(super) fn own_is_far(gpu: u32) {
    if watch(gpu).is_none() {
        begin(gpu);
    }
}

/// A block ended.
pub(super) fn ended(block: &Block) {
    if let Some(watch) = watch(block.home) {
        let mut pointers = watch.pointers.lock();
        let of_it: Vec<u64> = pointers.range(block.address..block.address + block.bytes).copied().collect();
        for pointer in of_it {
            pointers.remove(&pointer);
        }
    }
}

#[cold]
fn begin(gpu: u32) {
    let Some((opened, driver)) = super::ready() else { return };
    let Some(entry) = WATCHES.get(gpu as usize) else { return };
    if !driver.knows_parameters() {
        return;
    }
    let places = opened.plan.places.iter().map(|spec| spec.place).filter(|place| *place != Place::Gpu(gpu));
    let links = places.map(|place| (place, link(&opened.plan.topology, gpu, place))).collect();
    entry.get_or_init(|| {
        Box::new(Watch {
            gpu,
            opened,
            driver,
            links,
            near: Links::measured(Vec::new()).near,
            ledger: Mutex::new(Ledger::new(now())),
            pointers: Mutex::default(),
            timing: Timing::default(),
            samples: AtomicU64::new(0),
            forgotten: AtomicU64::new(arguments::forgotten()),
            next_tell: AtomicU64::new(told::FIRST),
            beyond: AtomicU32::new(0),
        })
    });
    arguments::begin(Reader::Far);
}

thread_local! {
    /// Launches until the next one that is looked at. `const` and without a destructor: legal at any time.
    static LEFT: Cell<u32> = const { Cell::new(0) };
    /// Launches that the next one stands for.
    static WEIGHT: Cell<u32> = const { Cell::new(1) };
    /// When the last one was looked at, nanoseconds.
    static LOOKED: Cell<u64> = const { Cell::new(0) };
}

/// How many launches there should be for one look, in the mean, where the last look took so long and the last so many launches so long.
fn launches_for_a_look(took: u64, launches: u32, nanoseconds: u64) -> u64 {
    let apart = nanoseconds / u64::from(launches.max(1));
    (took.saturating_mul(ONE_OF) / apart.max(1)).clamp(USUAL, RARE)
}

/// The gap to the next launch that is looked at, of this thread; of many looks, so large in the mean.
fn gap(samples: u64, mean: u64) -> u32 {
    static STATE: AtomicU64 = AtomicU64::new(0);
    match samples {
        0..EAGER => 1,
        EAGER..128 => 4,
        // A multiplicative generator: the upper bits of its product are well spread.
        _ => {
            let state = STATE.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed);
            1 + ((state.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) % (2 * mean - 1)) as u32
        }
    }
}

/// Whether this thread's next launch is one of those that are looked at. Asked once before each.
#[inline]
pub fn is_due() -> bool {
    let left = LEFT.get();
    LEFT.set(left.saturating_sub(1));
    left == 0
}

/// Before such a launch in this context. What this returns is given to [`super::launch::after`] behind it.
///
/// # Safety
/// The arguments are those that the program passes to the driver with this function.
#[cold]
pub unsafe fn before(api: Api, context: Context, about: About, arguments: Arguments) -> Option<Running> {
    let weight = WEIGHT.get();
    let began = now();
    let since = began.saturating_sub(LOOKED.replace(began));
    let watch = watch(context.device.ordinal());
    let running = watch.filter(|_| !capture::under_way()).and_then(|watch| {
        // SAFETY: as for this function.
        let look = || unsafe { watch.look(api, about, arguments, weight) };
        process::contained(api, look).flatten()
    });
    let mean = launches_for_a_look(now().saturating_sub(began), weight, since);
    let gap = gap(watch.map_or(0, |watch| watch.samples.fetch_add(1, Relaxed)), mean);
    WEIGHT.set(gap);
    LEFT.set(gap - 1);
    running
}

impl Watch {
    /// # Safety
    /// As for [`before`].
    unsafe fn look(&'static self, api: Api, about: About, arguments: Arguments, weight: u32) -> Option<Running> {
        let function = about.function?;
        let layout = arguments::layout_of(self.driver, function);
        let mut words: Vec<u64> = Vec::new();
        // SAFETY: as for this function, and the layout is that of the program's function.
        unsafe {
            arguments.words(layout, |word| {
                if words.len() < WORDS && super::is_ours(self.opened, word) {
                    words.push(word);
                }
            });
        }
        words.sort_unstable();
        words.dedup();
        let mut seen = self.seen(&words, weight);
        if seen.far() > 0 {
            let place = Place::Gpu(self.gpu);
            let usage = self.opened.pool.usage();
            let own = usage.places.iter().find(|it| it.place == place);
            seen.free = own.map_or(0, |it| it.held.saturating_sub(it.used));
            let room = super::near_room(self.opened, self.gpu);
            let unneeded = self.opened.pool.unneeded(place);
            // A limit says nothing of what others have there.
            let by_limit = room.saturating_sub(unneeded);
            let free = (by_limit > 0).then(|| self.opened.plan.free_at(self.driver, place)).flatten();
            // Some of what is not free there is the program's own contexts, which no limit counts.
            let not_free = by_limit.saturating_sub(free.unwrap_or(u64::MAX));
            seen.others = not_free.saturating_sub(context::cost_on(Device::of(self.gpu)));
            seen.room = room - not_free;
            seen.is_drained = self.opened.pool.accounts().is_closed(place);
        }
        self.gather();
        let handle = function.raw().addr() as u64;
        let forgotten = arguments::forgotten();
        let is_known = {
            let mut ledger = self.ledger.lock();
            if self.forgotten.swap(forgotten, Relaxed) != forgotten {
                ledger.forget_handles();
            }
            ledger.knows(handle)
        };
        // SAFETY: the function is the one that the program launches.
        let name = if is_known { None } else { unsafe { self.driver.name_of(function) } };
        let mut ledger = self.ledger.lock();
        let answer = ledger.saw(handle, seen, name);
        let known = ledger.function(answer.function);
        let wants_site = known.site.is_none() && known.lost_ns >= WORTH_A_LOOK;
        let window = ledger.window(now(), totals::came());
        drop(ledger);
        if wants_site {
            let site = site::here();
            self.ledger.lock().found_at(answer.function, site);
        }
        if let Some(window) = window {
            told::window(self, window);
        }
        told::now_and_then(self);
        if !answer.time_it {
            return None;
        }
        let begin = || timing::begin(&self.timing, self.driver, answer.id, about.stream_of(api));
        let running = about.is_plain.then(begin).flatten();
        if running.is_none() {
            self.ledger.lock().timed(answer.id, None);
        }
        running
    }

    /// What the words of a launch name. Each names the memory up to the next pointer that was seen, or to the end of its block.
    fn seen(&self, words: &[u64], weight: u32) -> Seen {
        let mut seen = Seen { weight, once: 1.0, ..Seen::default() };
        let mut saved = 0.0;
        for &word in words {
            let block = self.opened.pool.block_at(word).filter(|block| block.home == self.gpu);
            let Some(limit) = block.as_ref().map(|block| block.address + block.bytes).or_else(|| own::end_at(word))
            else {
                continue;
            };
            let end = {
                let mut pointers = self.pointers.lock();
                if pointers.len() < POINTERS {
                    pointers.insert(word);
                }
                pointers.range(word + 1..).next().copied().unwrap_or(u64::MAX)
            };
            let end = end.min(limit);
            seen.away += AWAY.get().map_or(0, |away| away(self.gpu, word, end - word));
            for (bytes, place, is_anchored) in self.pieces(word, end, block.is_some()) {
                seen.bytes += bytes;
                let Some((_, link)) = self.links.iter().find(|(known, _)| *known == place) else { continue };
                *(if place.is_host() { &mut seen.on_host } else { &mut seen.on_peers }) += bytes;
                seen.anchored += if is_anchored { bytes } else { 0 };
                let pass = bytes as f64 / link.kernel;
                seen.pass_ns += pass;
                saved += pass - bytes as f64 / self.near;
            }
        }
        seen.away = seen.away.min(seen.far());
        if seen.pass_ns > 0.0 {
            seen.once = (saved / seen.pass_ns).clamp(0.0, 1.0);
        }
        seen
    }

    /// Where what lies between two addresses is, of the pool or of the program's own: bytes, the place, and whether it must stay there.
    fn pieces(&self, from: u64, to: u64, is_pooled: bool) -> Vec<(u64, Place, bool)> {
        if is_pooled {
            let pieces = self.opened.pool.pieces(from, to - from).into_iter();
            return pieces.map(|piece| (piece.bytes, piece.place, !piece.anchors.is_empty())).collect();
        }
        let own = by_hand::pieces(from, to - from).into_iter().filter(|piece| piece.asked == self.gpu);
        let meant = Range { start: from, end: to };
        own.map(|piece| (own::range_of(&piece).meet(&meant).bytes(), piece.place, own::stays(&piece))).collect()
    }

    /// Takes the times in that are known by now.
    fn gather(&self) {
        timing::gather_of(&self.timing, self.driver, |id, ns| self.ledger.lock().timed(id, ns));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_that_follow_each_other_closely_are_looked_at_less_often() {
        assert_eq!(launches_for_a_look(4_000, 64, 64 * 20_000), USUAL, "20 µs apart");
        assert_eq!(launches_for_a_look(4_000, 64, 64 * 5_000), 160, "5 µs apart: a two hundredth of the time");
        assert_eq!(launches_for_a_look(4_000, 64, 64 * 500), RARE, "half a microsecond apart");
        assert_eq!(launches_for_a_look(9_000_000, 64, 64 * 500), RARE, "and however long one look took");
        for mean in [USUAL, 160, RARE] {
            let gaps: Vec<u32> = (0..4000).map(|_| gap(128, mean)).collect();
            assert!(gaps.iter().all(|gap| (1..2 * mean).contains(&u64::from(*gap))));
            let all: u64 = gaps.iter().map(|gap| u64::from(*gap)).sum();
            assert!((all / 4000).abs_diff(mean) < mean / 16, "{all} in 4000 gaps of {mean}");
        }
        assert_eq!([gap(0, RARE), gap(EAGER, RARE)], [1, 4], "the first ones are looked at whatever that takes");
    }
}
