//! What is to leave a GPU unasked, since somebody has come there who cannot ask for it, and when that is tried: one rule for what a program borrows
//! ([`Whom::Strangers`], [`Whom::Reserve`]) and for what a rank is lent for as long as nobody works there ([`Whom::Workers`]).
//!
//! **Until it has left**, or those for whom it leaves have gone. A program whose kernel runs longer than anybody waits has to be tried again: nobody else looks after it.
//!
//! **Each try holds the whole program up**, whichever GPU it is for, so there is one pace for all of them. The first one waits for [`FIRST`] that the program comes to rest, and
//! each one behind a try that moved nothing twice as long, up to [`LATER`]: most programs rest at once, and one that does not should not stand still for seconds to show that. Behind
//! it the program is left alone for [`RESTS`] times as long as it took, and twice as long each time; what moved something is gone on with soon. Who comes meanwhile waits for the next
//! try, and the pace is kept for a while when all have gone: otherwise programs that come and go would have it tried all the time. Rejected: to wait as long as one that asks
//! waits for its answer from the first try on, which held a program whose step takes long for six seconds within the first ten.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// For how long the program's coming to rest is waited for by a first try: somewhat longer than a step of most programs takes.
pub const FIRST: Duration = Duration::from_millis(250);
/// And at most, behind tries that moved nothing.
pub const LATER: Duration = Duration::from_secs(2);
/// How many times as long as such a try took, or [`LATER`] if that is less, the program is left alone.
pub const RESTS: u32 = 4;
/// The shortest and the longest time for which it is.
pub const SHORTEST: Duration = Duration::from_millis(500);
pub const LONGEST: Duration = Duration::from_secs(30);
/// For how long more of what has left is looked for: a thread that had chosen the GPU before may have made memory there after.
pub const LATE: Duration = Duration::from_secs(1);

/// For whom something leaves a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whom {
    /// Whoever works there, who need not be known: it was lent because nobody did.
    Workers(Option<u32>),
    /// These, who came when something was borrowed there already.
    Strangers(BTreeSet<u32>),
    /// Those who were there before, and find less free than is kept free for them.
    Reserve,
    /// Whoever is about to come, by the GPU's memory in use: nobody is seen there yet.
    Comer,
}

impl Whom {
    /// One of them, where that is known.
    pub fn one(&self) -> Option<u32> {
        match self {
            Self::Workers(pid) => *pid,
            Self::Strangers(pids) => pids.first().copied(),
            Self::Reserve | Self::Comer => None,
        }
    }
}

/// What is to leave one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Due {
    pub gpu: u32,
    pub whom: Whom,
    /// So many bytes; `u64::MAX`: all that is there for others.
    pub bytes: u64,
}

#[derive(Debug)]
struct Entry {
    whom: Whom,
    bytes: u64,
    /// Since when nothing is there any more.
    empty: Option<Instant>,
    /// A try moved nothing, and that was told.
    is_told: bool,
}

/// What is to leave, and when it is tried next.
#[derive(Debug, Default)]
pub struct Leaving {
    all: BTreeMap<u32, Entry>,
    /// How long the program was left alone behind the last try, if that was in vain.
    pause: Duration,
    /// How often that was waited for twice as long as at first.
    doubled: u32,
    /// How many tries were in vain since that was taken, and how long they took in all.
    vain: (u32, Duration),
    /// Nothing is tried before.
    next: Option<Instant>,
}

impl Leaving {
    /// None at all, in a static.
    pub const fn new() -> Self {
        Self { all: BTreeMap::new(), pause: Duration::ZERO, doubled: 0, vain: (0, Duration::ZERO), next: None }
    }

    /// So many bytes are to leave this GPU for those, with what is to leave it already.
    pub fn begin(&mut self, gpu: u32, whom: Whom, bytes: u64, now: Instant) {
        if self.all.is_empty() && self.next.is_none_or(|next| now >= next + LONGEST) {
            (self.pause, self.doubled, self.next) = (Duration::ZERO, 0, None);
        }
        let Some(entry) = self.all.get_mut(&gpu) else {
            self.all.insert(gpu, Entry { whom, bytes, empty: None, is_told: false });
            return;
        };
        match (&mut entry.whom, whom) {
            (Whom::Strangers(before), Whom::Strangers(more)) => before.extend(more),
            // What is kept free is part of what leaves for those in any case, and who was about to come may be one of them.
            (Whom::Workers(_) | Whom::Strangers(_), Whom::Reserve | Whom::Comer) | (Whom::Comer, Whom::Reserve) => {
                return;
            }
            (before, whom) => *before = whom,
        }
        entry.bytes = bytes;
    }

    /// Whether something is to leave this GPU for whoever works there.
    pub fn is_for_workers(&self, gpu: u32) -> bool {
        matches!(self.all.get(&gpu), Some(Entry { whom: Whom::Workers(_), .. }))
    }

    /// The GPUs that something is to leave, and for whom.
    pub fn all(&self) -> Vec<(u32, Whom)> {
        self.all.iter().map(|(gpu, entry)| (*gpu, entry.whom.clone())).collect()
    }

    /// Those of whom this is not so have gone, or need it no more.
    pub fn retain(&mut self, mut is_wanted: impl FnMut(u32, &mut Whom) -> bool) {
        self.all.retain(|gpu, entry| is_wanted(*gpu, &mut entry.whom));
    }

    /// Whether something is there still that is to leave this GPU: where nothing was for a while, it has left.
    pub fn note(&mut self, gpu: u32, is_any: bool, now: Instant) {
        let Some(entry) = self.all.get_mut(&gpu) else { return };
        let empty = *entry.empty.get_or_insert(now);
        if is_any {
            entry.empty = None;
        } else if now.saturating_duration_since(empty) >= LATE {
            self.all.remove(&gpu);
        }
    }

    /// What is to be tried at this time.
    pub fn due(&self, now: Instant) -> Vec<Due> {
        if self.next.is_some_and(|next| now < next) {
            return Vec::new();
        }
        let there = self.all.iter().filter(|(_, entry)| entry.empty.is_none());
        there.map(|(gpu, entry)| Due { gpu: *gpu, whom: entry.whom.clone(), bytes: entry.bytes }).collect()
    }

    /// For how long the next try may wait for the program to come to rest. Where that was long enough once it is so the next time.
    pub fn patience(&self) -> Duration {
        (FIRST * (1 << self.doubled.min(8))).min(LATER)
    }

    /// How many tries were in vain since something is to leave, and how long they held the program up in all.
    pub fn in_vain(&self) -> (u32, Duration) {
        self.vain
    }

    /// The same, once nothing is to leave any more: what was to may have been taken back before anybody looked. They are counted anew from then on.
    pub fn take_in_vain(&mut self) -> Option<(u32, Duration)> {
        let is_over = self.all.is_empty() && self.vain.0 > 0;
        is_over.then(|| std::mem::take(&mut self.vain))
    }

    /// It was tried, and something of it has left or not; when the next try is, at the earliest.
    pub fn tried(&mut self, begun: Instant, ended: Instant, has_moved: bool) -> Instant {
        let all = ended.saturating_duration_since(begun);
        let took = all.min(LATER);
        let rest = if has_moved {
            self.pause = Duration::ZERO;
            took.max(SHORTEST)
        } else {
            self.pause = (2 * self.pause).clamp(SHORTEST, LONGEST);
            self.doubled = self.doubled.saturating_add(1);
            self.vain = (self.vain.0 + 1, self.vain.1 + all);
            self.pause.max(RESTS * took)
        };
        let next = ended + rest;
        self.next = Some(next);
        next
    }

    /// Whether it is told now that nothing of what is to leave this GPU did: once.
    pub fn tells(&mut self, gpu: u32) -> bool {
        self.all.get_mut(&gpu).is_some_and(|entry| !std::mem::replace(&mut entry.is_told, true))
    }

    /// How long nothing need be done; `None`: until something is to leave.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        let of = |entry: &Entry| match (entry.empty, self.next) {
            (Some(empty), _) => (empty + LATE).saturating_duration_since(now),
            (None, Some(next)) => next.saturating_duration_since(now),
            (None, None) => Duration::ZERO,
        };
        self.all.values().map(of).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn strangers(pids: &[u32]) -> Whom {
        Whom::Strangers(pids.iter().copied().collect())
    }

    /// Tries what is due, all of it in vain, until `end`; each time of a try and how long it took.
    fn in_vain(leaving: &mut Leaving, mut now: Instant, end: Instant) -> Vec<(Instant, Duration)> {
        let mut tries = Vec::new();
        while now < end {
            if leaving.due(now).is_empty() {
                now += Duration::from_millis(50);
                continue;
            }
            let took = leaving.patience();
            tries.push((now, took));
            leaving.tried(now, now + took, false);
            now += took;
        }
        tries
    }

    /// Who was about to come is seen there, or does not come, behind a try in vain: that is told all the same, with what those cost for whom it is tried next.
    #[test]
    fn tries_in_vain_are_counted_until_nothing_is_to_leave_and_told_once() {
        let (mut leaving, now) = (Leaving::new(), Instant::now());
        leaving.begin(2, Whom::Comer, 7, now);
        leaving.tried(now, now + seconds(1), false);
        assert_eq!(leaving.take_in_vain(), None);
        leaving.retain(|_, whom| *whom != Whom::Comer);
        leaving.begin(2, strangers(&[4711]), 7, now + seconds(2));
        leaving.tried(now + seconds(2), now + seconds(4), false);
        assert_eq!((leaving.take_in_vain(), leaving.in_vain()), (None, (2, seconds(3))));
        leaving.retain(|_, _| false);
        assert_eq!((leaving.take_in_vain(), leaving.take_in_vain()), (Some((2, seconds(3))), None));
    }

    #[test]
    fn what_does_not_leave_is_tried_again_until_it_has_and_more_and_more_seldom() {
        let begun = Instant::now();
        let mut leaving = Leaving::new();
        assert_eq!(leaving.wait(begun), None);
        leaving.begin(1, Whom::Workers(Some(7)), u64::MAX, begun);
        assert_eq!(leaving.due(begun), [Due { gpu: 1, whom: Whom::Workers(Some(7)), bytes: u64::MAX }]);
        let tries = in_vain(&mut leaving, begun, begun + seconds(3600));
        let pauses: Vec<Duration> =
            tries.windows(2).map(|pair| pair[1].0 - (pair[0].0 + pair[0].1)).map(|pause| pause / 1000 * 1000).collect();
        assert!(pauses.windows(2).all(|pair| pair[0] <= pair[1]), "{pauses:?}");
        assert!(pauses[0] >= RESTS * FIRST && *pauses.last().unwrap() >= LONGEST, "{pauses:?}");
        let took: Vec<Duration> = tries.iter().map(|(_, took)| *took).collect();
        assert_eq!(took[..5], [FIRST, 2 * FIRST, 4 * FIRST, LATER, LATER]);
        assert_eq!(leaving.in_vain(), (tries.len() as u32, took.iter().sum()));
        // Of the first ten seconds.
        let held: Duration = tries.iter().filter(|(at, _)| *at < begun + seconds(10)).map(|(_, took)| *took).sum();
        assert!(held <= seconds(4), "{held:?}");
        assert!(pauses.iter().all(|pause| *pause <= LONGEST + seconds(1)), "{pauses:?}");
        // It is there at the end as at the beginning, and leaves at last.
        let end = begun + seconds(3700);
        assert_eq!(leaving.due(end).len(), 1);
        leaving.tried(end, end, true);
        leaving.note(1, false, end);
        assert_eq!((leaving.due(end + seconds(1)), leaving.all().len()), (Vec::new(), 1));
        leaving.note(1, false, end + LATE);
        assert_eq!((leaving.all(), leaving.wait(end)), (Vec::new(), None));
        // What was so long ago is no matter to who comes now.
        assert_eq!((leaving.take_in_vain().unwrap().0, leaving.patience()), (tries.len() as u32, LATER));
        leaving.begin(1, Whom::Workers(None), u64::MAX, end + 2 * LONGEST);
        assert_eq!((leaving.in_vain(), leaving.patience()), ((0, Duration::ZERO), FIRST));
    }

    #[test]
    fn a_part_that_left_has_the_rest_follow_soon_and_what_comes_late_as_well() {
        let now = Instant::now();
        let mut leaving = Leaving::new();
        leaving.begin(1, strangers(&[7]), u64::MAX, now);
        in_vain(&mut leaving, now, now + seconds(300));
        let later = now + seconds(400);
        assert_eq!(leaving.patience(), LATER);
        assert_eq!(leaving.tried(later, later, true), later + SHORTEST);
        assert_eq!((leaving.due(later).len(), leaving.due(later + SHORTEST).len()), (0, 1));
        assert_eq!(leaving.patience(), LATER, "as long as it took");
        leaving.note(1, false, later);
        leaving.note(1, true, later + LATE / 2);
        leaving.note(1, false, later + LATE);
        assert_eq!((leaving.all().len(), leaving.due(later + SHORTEST).len()), (1, 0));
        leaving.note(1, true, later + LATE);
        assert_eq!(leaving.due(later + LATE).len(), 1);
    }

    #[test]
    fn all_leaves_for_those_who_come_together_and_nothing_once_they_have_gone() {
        let now = Instant::now();
        let mut leaving = Leaving::new();
        leaving.begin(1, Whom::Reserve, 5, now);
        leaving.begin(1, Whom::Reserve, 9, now);
        assert_eq!(leaving.due(now)[0].bytes, 9);
        leaving.begin(1, strangers(&[7]), u64::MAX, now);
        leaving.begin(1, Whom::Reserve, 9, now);
        leaving.begin(1, strangers(&[8]), u64::MAX, now);
        assert_eq!(leaving.due(now), [Due { gpu: 1, whom: strangers(&[7, 8]), bytes: u64::MAX }]);
        assert!(leaving.tells(1) && !leaving.tells(1) && !leaving.tells(2));
        // Who was about to come is one of those, and there is nothing less to be done for them.
        leaving.begin(1, Whom::Comer, u64::MAX, now);
        assert_eq!(leaving.all(), [(1, strangers(&[7, 8]))]);
        leaving.begin(2, Whom::Reserve, 9, now);
        leaving.begin(2, Whom::Comer, u64::MAX, now);
        leaving.begin(2, Whom::Reserve, 9, now);
        assert_eq!(leaving.due(now)[1], Due { gpu: 2, whom: Whom::Comer, bytes: u64::MAX });
        leaving.begin(2, strangers(&[9]), u64::MAX, now);
        assert_eq!(leaving.all()[1], (2, strangers(&[9])));
        leaving.retain(|gpu, _| gpu != 2);
        let goes = |gone: u32| {
            move |_: u32, whom: &mut Whom| {
                let Whom::Strangers(pids) = whom else { panic!("{whom:?}") };
                pids.remove(&gone);
                !pids.is_empty()
            }
        };
        leaving.retain(goes(7));
        assert_eq!(leaving.all(), [(1, strangers(&[8]))]);
        leaving.retain(goes(8));
        assert_eq!((leaving.all(), leaving.is_for_workers(1)), (Vec::new(), false));
        leaving.begin(1, Whom::Workers(None), u64::MAX, now);
        assert!(leaving.is_for_workers(1) && leaving.due(now)[0].whom.one().is_none());
    }

    /// However many GPUs there are, and whoever comes and goes.
    #[test]
    fn tries_in_vain_take_a_fifth_of_the_time_at_most() {
        let mut seed: u32 = 1;
        let mut random = move |below: u32| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) % below
        };
        for _ in 0..200 {
            let begun = Instant::now();
            let (mut leaving, mut now, mut tried) = (Leaving::new(), begun, Duration::ZERO);
            while now < begun + seconds(600) {
                match random(4) {
                    0 => leaving.begin(random(3), strangers(&[random(9)]), u64::MAX, now),
                    1 => leaving.begin(random(3), Whom::Workers(None), u64::MAX, now),
                    2 => {
                        let gone = random(3);
                        leaving.retain(|gpu, _| gpu != gone);
                    }
                    _ => {}
                }
                if !leaving.due(now).is_empty() {
                    // Some fail at once, and some take longer than they may.
                    let took = leaving.patience() * random(12) / 10;
                    leaving.tried(now, now + took, false);
                    (now, tried) = (now + took, tried + took);
                }
                now += Duration::from_millis(u64::from(random(1000)));
            }
            assert!(tried <= FIRST + (now - begun) / (RESTS + 1) * 12 / 10, "{tried:?} of {:?}", now - begun);
        }
    }
}
