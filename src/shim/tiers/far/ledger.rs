//! What launches lose by far memory, reckoned from some of them. Pure: told of launches and times, by a clock that only goes forward.
//!
//! **How it is reckoned.** Some launches are looked at, and each stands for all since the last one (its weight). Of such a launch it is
//! known which memory it names, where that lies, and, by two events, how long it took. What a function takes for a byte when nothing
//! that it names is far is its own work; what it takes beyond that is lost. Where a function was never seen with all near, all of its
//! time counts, but for what reading near memory would take: kernels that read far memory mostly wait for it. A launch that could not
//! be timed counts as the function's others did, byte by byte.
//!
//! **Where it is blind.** Memory that a kernel finds through pointers in memory; copies and graphs; kernels that compute for so long
//! that the far bytes come in meanwhile, if they never ran with all near; and two kernels that wait for far memory at once count twice.

use gpupool_interpose::cancel::Map;
use std::collections::VecDeque;

/// Functions that are told apart; the rest are one.
const MOST: usize = 1 << 12;
/// Launches that are being timed.
const PENDING: usize = 64;
/// How often a function is timed with all near, before that is done for one launch of eight only.
const EAGER: u32 = 8;

/// How often a launch is believed to read a far byte, at most: a kernel with a few far bytes among much that is near takes its time for
/// the rest.
const MOST_PASSES: f64 = 4096.0;

/// A launch that is looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seen {
    /// Launches that it stands for, itself included.
    pub weight: u32,
    /// Bytes that it names.
    pub bytes: u64,
    pub on_peers: u64,
    pub on_host: u64,
    /// Far bytes that must stay where they are.
    pub anchored: u64,
    /// Nanoseconds that reading each far byte once takes over its link.
    pub pass_ns: f64,
    /// The part of that which near memory would not take.
    pub once: f64,
    /// Bytes of the GPU that could have come near without another's leaving it, and those that it had free of the program's memory.
    pub room: u64,
    pub free: u64,
    /// Bytes of the GPU that this program might have by its limits, and others have.
    pub others: u64,
    /// Far bytes that had to leave the GPU and come back by themselves.
    pub away: u64,
    /// Whether nothing goes to the GPU, as it is drained.
    pub is_drained: bool,
}

impl Seen {
    pub fn far(&self) -> u64 {
        self.on_peers + self.on_host
    }
}

/// A function that was launched while something was far.
#[derive(Clone, Debug, Default)]
pub struct Function<S> {
    pub name: String,
    /// Where it was launched, once it had lost enough for a look.
    pub site: Option<S>,
    /// Launches that named far memory, as estimated.
    pub launches: u64,
    /// The last launch with far memory that was looked at.
    pub last: Seen,
    /// Which part of the last launches named far memory, over about eight that were looked at.
    pub recently: f64,
    /// Launches with far memory that were timed.
    pub timed: u32,
    /// Nanoseconds lost by all launches, as estimated.
    pub lost_ns: f64,
    /// Of the last launches that were timed: nanoseconds beyond their own work, those of them that were lost, and in how many far bytes,
    /// which take so many nanoseconds to cross the link once. Sums, since the mean of what single launches lose a byte would be that of
    /// the launches with hardly any far bytes, a counter among their arguments say.
    beyond_ns: f64,
    timed_lost_ns: f64,
    far_bytes: f64,
    pass_ns: f64,
    /// Nanoseconds for a byte with all near.
    near: Option<f64>,
    near_timed: u32,
    near_seen: u32,
}

/// Time that has passed and what was lost of it: what `GPUPOOL_FAR_LIMIT` is about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// The part of the time that was lost, 0 to 1.
    pub share: f64,
    /// Something came near meanwhile.
    pub moved: bool,
}

/// The least that a window holds: so many launches that were looked at and nanoseconds that were lost, or so many nanoseconds.
const WINDOW_SAMPLES: u32 = 32;
const WINDOW_LOST: f64 = 250e6;
const WINDOW: u64 = 5_000_000_000;

#[derive(Debug)]
pub struct Ledger<S> {
    functions: Vec<Function<S>>,
    by_handle: Map<u64, usize>,
    by_name: Map<String, usize>,
    pending: VecDeque<(u64, usize, Seen)>,
    next: u64,
    lost_ns: f64,
    /// Bytes that crossed links, as estimated.
    read: f64,
    began: u64,
    window_began: u64,
    window_samples: u32,
    window_lost: f64,
    window_came: u64,
}

/// What becomes of a launch that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Its number, for [`Ledger::timed`].
    pub id: u64,
    /// Index of its function.
    pub function: usize,
    /// It is worth two events.
    pub time_it: bool,
}

impl<S> Function<S> {
    /// How often the far bytes crossed the link in one launch, in the mean of those that were timed.
    pub fn passes(&self) -> f64 {
        self.beyond_ns / self.pass_ns.max(1.0)
    }

    /// A launch took so long beyond its own work, and lost so much of that.
    fn add(&mut self, beyond_ns: f64, lost_ns: f64, seen: &Seen) {
        self.timed = self.timed.saturating_add(1);
        // About the last sixteen count.
        let keep = if self.timed > 16 { 15.0 / 16.0 } else { 1.0 };
        for (sum, more) in [
            (&mut self.beyond_ns, beyond_ns),
            (&mut self.timed_lost_ns, lost_ns),
            (&mut self.far_bytes, seen.far() as f64),
            (&mut self.pass_ns, seen.pass_ns),
        ] {
            *sum = *sum * keep + more;
        }
    }
}

impl<S: Default> Ledger<S> {
    pub fn new(now: u64) -> Self {
        Self {
            functions: Vec::new(),
            by_handle: Map::default(),
            by_name: Map::default(),
            pending: VecDeque::new(),
            next: 0,
            lost_ns: 0.0,
            read: 0.0,
            began: now,
            window_began: now,
            window_samples: 0,
            window_lost: 0.0,
            window_came: 0,
        }
    }

    /// Handles may stand for other functions from now on.
    pub fn forget_handles(&mut self) {
        self.by_handle.clear();
    }

    /// Whether a function is known by this handle.
    pub fn knows(&self, handle: u64) -> bool {
        self.by_handle.contains_key(&handle)
    }

    /// A launch of the function with this handle, whose name is needed where the handle is not known.
    pub fn saw(&mut self, handle: u64, seen: Seen, name: Option<String>) -> Answer {
        let index = match self.by_handle.get(&handle) {
            Some(&index) => index,
            None => self.enter(handle, name.unwrap_or_else(|| format!("the function {handle:#x}"))),
        };
        self.window_samples += 1;
        let id = self.next;
        self.next += 1;
        let function = &mut self.functions[index];
        function.recently += (f64::from(u8::from(seen.far() > 0)) - function.recently) / 8.0;
        let time_it = if seen.far() > 0 {
            function.launches += u64::from(seen.weight);
            function.last = seen;
            true
        } else {
            // Only of a function that reads far memory, too, is it of use.
            function.near_seen = function.near_seen.wrapping_add(1);
            function.launches > 0 && (function.near_timed < EAGER || function.near_seen.is_multiple_of(8))
        };
        let time_it = time_it && seen.bytes > 0;
        if time_it {
            if self.pending.len() == PENDING {
                self.untimed();
            }
            self.pending.push_back((id, index, seen));
        }
        Answer { id, function: index, time_it }
    }

    fn enter(&mut self, handle: u64, name: String) -> usize {
        let known = self.by_name.get(&name).copied();
        let index = known.unwrap_or_else(|| {
            if self.functions.len() == MOST {
                return MOST - 1;
            }
            let name = if self.functions.len() == MOST - 1 { "other functions".to_owned() } else { name };
            self.by_name.insert(name.clone(), self.functions.len());
            self.functions.push(Function { name, ..Function::default() });
            self.functions.len() - 1
        });
        if self.by_handle.len() >= 4 * MOST {
            self.by_handle.clear();
        }
        self.by_handle.insert(handle, index);
        index
    }

    /// The oldest launch that is waited for: its time will not be known.
    fn untimed(&mut self) {
        if let Some((_, index, seen)) = self.pending.pop_front() {
            self.guess(index, seen);
        }
    }

    fn guess(&mut self, index: usize, seen: Seen) {
        let function = &self.functions[index];
        let lost = function.timed_lost_ns / function.far_bytes.max(1.0) * seen.far() as f64;
        self.read += seen.far() as f64 * function.passes() * f64::from(seen.weight);
        self.lose(index, lost * f64::from(seen.weight));
    }

    fn lose(&mut self, index: usize, lost_ns: f64) {
        self.functions[index].lost_ns += lost_ns;
        self.lost_ns += lost_ns;
        self.window_lost += lost_ns;
    }

    /// A launch took so long; none: nobody can tell.
    pub fn timed(&mut self, id: u64, nanoseconds: Option<f64>) {
        let Some(at) = self.pending.iter().position(|pending| pending.0 == id) else { return };
        let Some((_, index, seen)) = self.pending.remove(at) else { return };
        let Some(ns) = nanoseconds else { return self.guess(index, seen) };
        let function = &mut self.functions[index];
        if seen.far() == 0 {
            function.near_timed = function.near_timed.saturating_add(1);
            let (near, count) = (ns / seen.bytes as f64, f64::from(function.near_timed.min(16)));
            function.near = Some(function.near.map_or(near, |old| old + (near - old) / count));
            return;
        }
        let own = function.near.map(|near| near * seen.bytes as f64);
        let most = MOST_PASSES * seen.pass_ns;
        let lost = own.map_or(seen.once * ns, |own| (ns - own).max(0.0)).min(most);
        let beyond = own.map_or(ns, |own| (ns - own).max(0.0)).min(most);
        function.add(beyond, lost, &seen);
        self.read += seen.far() as f64 * (beyond / seen.pass_ns.max(1.0)) * f64::from(seen.weight);
        self.lose(index, lost * f64::from(seen.weight));
    }

    pub fn function(&self, index: usize) -> &Function<S> {
        &self.functions[index]
    }

    pub fn found_at(&mut self, index: usize, site: S) {
        self.functions[index].site = Some(site);
    }

    /// Functions that lost most, most first.
    pub fn functions(&self) -> Vec<&Function<S>> {
        let mut functions: Vec<_> = self.functions.iter().filter(|function| function.lost_ns > 0.0).collect();
        functions.sort_by(|a, b| b.lost_ns.total_cmp(&a.lost_ns));
        functions
    }

    /// Nanoseconds lost so far.
    pub fn lost_ns(&self) -> f64 {
        self.lost_ns
    }

    /// Far bytes that launches read so far, each as often as it crossed the link.
    pub fn read_bytes(&self) -> f64 {
        self.read
    }

    /// Nanoseconds since it was begun.
    pub fn age(&self, now: u64) -> u64 {
        now.saturating_sub(self.began)
    }

    /// What part of the last time was lost, whenever enough of it has passed. `came`: bytes that came near so far.
    pub fn window(&mut self, now: u64, came: u64) -> Option<Window> {
        let passed = now.saturating_sub(self.window_began);
        let is_enough = self.window_samples >= WINDOW_SAMPLES && self.window_lost >= WINDOW_LOST;
        if !is_enough && passed < WINDOW {
            return None;
        }
        let share = (self.window_lost / passed.max(1) as f64).min(1.0);
        let window = Window { share, moved: came > self.window_came };
        (self.window_began, self.window_samples, self.window_lost, self.window_came) = (now, 0, 0.0, came);
        Some(window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn far(weight: u32) -> Seen {
        Seen { weight, bytes: 2 * GIB, on_host: GIB, pass_ns: 20e6, once: 0.9, ..Seen::default() }
    }

    fn near() -> Seen {
        Seen { weight: 1, bytes: 2 * GIB, once: 1.0, ..Seen::default() }
    }

    fn ledger() -> Ledger<()> {
        Ledger::new(0)
    }

    fn launch(ledger: &mut Ledger<()>, seen: Seen, ns: f64) {
        let answer = ledger.saw(1, seen, Some("read".to_owned()));
        assert!(answer.time_it, "{seen:?}");
        ledger.timed(answer.id, Some(ns));
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-6 * b.abs(), "{a} is not {b}");
    }

    #[test]
    fn all_of_its_time_counts_until_it_was_seen_near_and_then_what_it_takes_more() {
        let mut ledger = ledger();
        launch(&mut ledger, far(1), 100e6);
        close(ledger.lost_ns(), 90e6);
        close(ledger.function(0).passes(), 5.0);
        launch(&mut ledger, near(), 60e6);
        launch(&mut ledger, far(10), 100e6);
        close(ledger.lost_ns(), 90e6 + 10.0 * 40e6);
        assert_eq!(ledger.function(0).launches, 11);
    }

    #[test]
    fn what_was_not_timed_counts_as_the_others_did() {
        let mut ledger = ledger();
        launch(&mut ledger, far(1), 100e6);
        let answer = ledger.saw(1, far(3), None);
        ledger.timed(answer.id, None);
        close(ledger.lost_ns(), 90e6 * 4.0);
        // However many are waited for.
        for _ in 0..100 {
            ledger.saw(1, far(1), None);
        }
        close(ledger.lost_ns(), 90e6 * (4.0 + 36.0));
    }

    #[test]
    fn a_launch_with_few_far_bytes_says_little_of_one_with_many() {
        let mut ledger = ledger();
        let few = Seen { on_host: 4, pass_ns: 8e-8, once: 0.9, ..far(1) };
        launch(&mut ledger, few, 100e6);
        launch(&mut ledger, far(1), 40e6);
        let answer = ledger.saw(1, far(1), None);
        ledger.timed(answer.id, None);
        close(ledger.lost_ns(), 2.0 * 36e6);
        assert!((1.9..2.1).contains(&ledger.function(0).passes()), "{}", ledger.function(0).passes());
    }

    #[test]
    fn what_never_reads_far_memory_is_not_timed_and_loses_nothing() {
        let mut ledger = ledger();
        assert!(!ledger.saw(1, near(), Some("read".to_owned())).time_it);
        assert!(ledger.functions().is_empty());
    }

    #[test]
    fn a_function_is_the_same_under_another_handle_and_another_one_under_the_same() {
        let mut ledger = ledger();
        launch(&mut ledger, far(1), 100e6);
        ledger.forget_handles();
        assert_eq!(ledger.saw(2, far(1), Some("read".to_owned())).function, 0);
        assert_eq!(ledger.saw(1, far(1), Some("write".to_owned())).function, 1);
    }

    #[test]
    fn a_window_says_which_part_of_the_time_was_lost_and_never_more_than_all() {
        let mut ledger = ledger();
        for _ in 0..31 {
            launch(&mut ledger, far(1), 100e6);
        }
        assert_eq!(ledger.window(4_000_000_000, 0), None, "too few launches and too little time");
        launch(&mut ledger, far(1), 100e6);
        let window = ledger.window(4_000_000_000, 0).unwrap();
        close(window.share, 32.0 * 90e6 / 4e9);
        assert!(!window.moved);
        assert_eq!(ledger.window(8_999_999_999, 7), None);
        assert_eq!(ledger.window(9_000_000_000, 7), Some(Window { share: 0.0, moved: true }));
        launch(&mut ledger, far(1000), 1e9);
        assert_eq!(ledger.window(14_000_000_000, 7), Some(Window { share: 1.0, moved: false }));
    }
}
