//! How what left GPUs that are drained no more, or found no room when the program was resumed ([`super::away`]), comes back to them: when somebody says so, and by itself once
//! there is room.

use super::coming_back;
use super::parted::{self, Parted};
use super::vacate::{BREATH, Rest, SLICE, Vacated, uuid};
use super::why::Why;
use super::{Alone, Done, away, given, hold, told_anew};
use crate::backing::{open, terms};
use crate::gate;
use crate::log;
use crate::nvml;
use crate::process;
use crate::serve::memory;
use crate::watch::context;
use gpupool_config::{Move, format_size};
use gpupool_cuda::Device;
use gpupool_events::GpuUndrain;
use gpupool_pool::{FRAME, Place};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Notes what did not come back to its GPU when the program was resumed.
pub fn remember(left: Vec<Parted>) {
    away::add(left);
}

/// Of a program that is about to be resumed: what left its GPUs when it was suspended, and behind it what may come back to GPUs that something had left before. What of
/// both is the same goes to where it lay first, in one step.
pub fn with_left(opened: &open::Opened, parted: Vec<Parted>) -> Vec<Parted> {
    have_lent_again(opened, &parted);
    have_lent_again(opened, &away::all());
    joined(parted, coming_back::not_back(opened, &once(away::take(&left()))))
}

/// What left, each byte once: to where it lay before it was `away` already. What only is away comes last, since it lies where GPUs reach it.
fn joined(parted: Vec<Parted>, away: Vec<Parted>) -> Vec<Parted> {
    let beside = parted::beyond(away.clone(), &parted);
    let both = parted::beyond(away.clone(), &beside);
    let rest = parted::beyond(parted, &away);
    both.into_iter().chain(rest).chain(beside).collect()
}

/// The GPUs that something may come back to.
fn left() -> Vec<u32> {
    away::gpus().into_iter().filter(|gpu| terms::may_hold(*gpu)).collect()
}

/// Those that it would come back to by itself ([`look`]) if they lent.
pub fn waits_for_lenders() -> Vec<u32> {
    if !comes_by_itself() {
        return Vec::new();
    }
    away::gpus().into_iter().filter(|gpu| !terms::may_hold(*gpu)).collect()
}

/// Whether what found no room, or had to leave, comes back without a further word. With `GPUPOOL_MOVE=auto` memory comes near by what it is worth.
fn comes_by_itself() -> bool {
    process::settings().moving == Move::Off && super::since() == 0 && !gate::is_ending()
}

/// Has GPUs lend again that these lay on, if nobody works there: of a rank that keeps to its own they have lent no more since nothing was there.
fn have_lent_again(opened: &open::Opened, parted: &[Parted]) {
    let home_of = |parted: &Parted| match parted {
        Parted::Pooled { address, .. } => opened.pool.block_at(*address).map(|block| block.home),
        Parted::Own { asked, .. } => Some(*asked),
    };
    let is_gone = |parted: &&Parted| matches!(parted.from(), Place::Gpu(gpu) if !terms::may_hold(gpu) && !context::is_on(Device::of(gpu)));
    let homes: BTreeSet<u32> = parted.iter().filter(is_gone).filter_map(home_of).collect();
    // None is asked for room: this is the thread that answers others.
    homes.into_iter().for_each(|home| memory::have_more_lend(home, 0));
}

/// Whether anything may.
pub fn is_any_left() -> bool {
    if let Some(opened) = open::opened() {
        have_lent_again(opened, &away::all());
    }
    !left().is_empty()
}

/// Has it come back, as far as there is room.
pub fn bring_left(progress: &mut dyn FnMut(u64, u64)) -> Done {
    let begun = Instant::now();
    let mut sum = Done::default();
    for gpu in left() {
        let Vacated { moved, rest, .. } = bring(gpu, begun + TO_BRING, &|| true, progress);
        sum.moved += moved;
        sum.stayed += rest.iter().map(|rest| rest.bytes).sum::<u64>();
    }
    Done { took: begun.elapsed(), ..sum }
}

/// How long the program's work has to be over for that.
const TO_BRING: Duration = Duration::from_secs(10);
/// The shortest and the longest pause between two looks whether there is room; each try in vain doubles it.
const LOOKS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// When it is looked again, and how long the pause is behind that look.
static NEXT: Mutex<Option<(Instant, Duration)>> = Mutex::new(None);

/// Brings back what had no room, where there seems to be some now; how long nothing need be done.
pub fn look() -> Option<Duration> {
    let gpus = left();
    if gpus.is_empty() || !comes_by_itself() {
        *NEXT.lock() = None;
        return None;
    }
    let now = Instant::now();
    let mut next = NEXT.lock();
    let (at, pause) = *next.get_or_insert((now + LOOKS[0], LOOKS[0]));
    if now < at {
        return Some(at - now);
    }
    let tried: Vec<u32> = gpus.into_iter().filter(|gpu| has_room(*gpu)).collect();
    let done = tried.iter().map(|gpu| bring(*gpu, now + SLICE, &|| true, &mut |_, _| {}));
    let is_in_vain = !tried.is_empty() && done.map(|done| done.moved).sum::<u64>() == 0;
    let pause = if is_in_vain { (pause * 2).min(LOOKS[1]) } else { LOOKS[0] };
    *next = Some((Instant::now() + pause, pause));
    Some(pause)
}

/// Whether the smallest part of what may come back to this GPU has room there, as far as can be known without a try.
pub fn has_room(gpu: u32) -> bool {
    let least = away::of(gpu).iter().map(Parted::bytes).min();
    let (Some(least), Some(opened)) = (least, open::opened()) else { return false };
    let place = Place::Gpu(gpu);
    let usage = opened.pool.usage();
    let kept =
        usage.places.iter().find(|known| known.place == place).map_or(0, |known| known.held.saturating_sub(known.used));
    let accounts = &opened.plan.accounts;
    let allowed = accounts.limit(place).saturating_sub(accounts.taken(place));
    let known = opened.plan.topology.gpus.iter().find(|known| known.ordinal == gpu);
    let free = known.and_then(|known| nvml::get()?.free(&known.uuid));
    allowed + kept >= least && free.is_none_or(|free| free + kept >= least)
}

/// What of each GPU's own blocks lay elsewhere when it was drained, for want of room: it has not left, and so does not come back.
static ELSEWHERE: Mutex<BTreeMap<u32, BTreeSet<u64>>> = Mutex::new(BTreeMap::new());

/// This GPU is about to be left. Of one that has been left already, it is what was so before.
pub fn note_before_drain(gpu: u32) {
    let Some(opened) = open::opened() else { return };
    ELSEWHERE
        .lock()
        .entry(gpu)
        .or_insert_with(|| parted::displaced(opened, gpu, u64::MAX).iter().map(Parted::address).collect());
}

/// Has what left a GPU while it was drained come back ([`bring_home`]), and the log hears of it: of one that was not drained (`is_news`) only where something came.
pub fn come_back(
    gpu: u32,
    is_news: bool,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Vacated {
    let mut done = bring_home(gpu, deadline, is_wanted, progress);
    let before = ELSEWHERE.lock().remove(&gpu).unwrap_or_default();
    if !is_news && done.moved == 0 {
        return done;
    }
    // What it has asked for while the GPU was drained, and would be there otherwise.
    if let Some(opened) = open::opened().filter(|_| done.rest.is_empty()) {
        let displaced = parted::displaced(opened, gpu, u64::MAX);
        let late: Vec<u64> =
            displaced.iter().filter(|parted| !before.contains(&parted.address())).map(Parted::bytes).collect();
        done.rest = rest_of(late.iter().sum(), has_no_room(gpu, late.iter().copied().min().unwrap_or(0)));
    }
    log::emit(|| {
        let (moved, stayed) = (done.moved, done.stayed());
        let is = if is_news { "is drained no more" } else { "was not drained" };
        let text = format!("GPU {gpu} {is}: {} came back to it", format_size(moved));
        let microseconds = done.took.as_micros() as u64;
        (GpuUndrain { device: gpu, uuid: uuid(gpu), bytes: moved, stayed, microseconds }, text)
    });
    done
}

/// Why so much has no room on a GPU, in words.
fn has_no_room(gpu: u32, bytes: u64) -> String {
    let place = Place::Gpu(gpu);
    let said = terms::said_limit(place).filter(|_| terms::left_at(place) < bytes);
    let why = said.map(|limit| format!(": GPUPOOL_LIMIT allows {} of it", format_size(limit)));
    format!("GPU {gpu} has no room for it{}", why.unwrap_or_default())
}

/// Has what left a GPU come back, and what of its own never had room there come, until `deadline`, as far as there is room: where it is drained no more, or more of it may be
/// used than before.
pub fn bring_home(
    gpu: u32,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Vacated {
    // The driver would be asked below what is free.
    if super::is_whole() {
        let bytes = away::of(gpu).iter().map(Parted::bytes).sum();
        return Vacated { rest: rest_of(bytes, super::whole()), ..Vacated::default() };
    }
    // A GPU that was lent while nobody worked there lends no more once nothing was there for a while.
    if let Some(opened) = open::opened() {
        have_lent_again(opened, &away::of(gpu));
    }
    // What was asked for meanwhile lies elsewhere as well; what somebody else needed the room for comes by itself.
    if let (Some(driver), Some(opened)) = (process::driver(), open::opened()) {
        let away = away::of(gpu);
        let by_limit = opened.plan.limit(Place::Gpu(gpu)).saturating_sub(opened.plan.accounts.taken(Place::Gpu(gpu)));
        let free = opened.plan.free_at(driver, Place::Gpu(gpu)).unwrap_or(0).min(by_limit);
        let room = free.saturating_sub(away.iter().map(Parted::bytes).sum());
        let mut known: BTreeSet<u64> = away.iter().map(Parted::address).collect();
        known.extend(given::addresses());
        let others = parted::displaced(opened, gpu, room).into_iter();
        away::add(others.filter(|parted| !known.contains(&parted.address())));
    }
    bring(gpu, deadline, is_wanted, progress)
}

/// What is known to have left, and to be missed, comes back.
fn bring(gpu: u32, deadline: Instant, is_wanted: &dyn Fn() -> bool, progress: &mut dyn FnMut(u64, u64)) -> Vacated {
    let begun = Instant::now();
    let mut left = Vec::new();
    let known = away::of(gpu);
    let mut away = once(known.clone());
    // It may have come to its own GPU by another way.
    if let Some(opened) = open::opened() {
        away = coming_back::not_back(opened, &away);
    }
    let total: u64 = away.iter().map(Parted::bytes).sum();
    let (mut moved, mut stayed, mut any_moved) = (0, 0, false);
    let mut why = "there is no room for it".to_owned();
    let mut alone = Alone::patient(BREATH);
    while !away.is_empty() {
        let (Some(driver), Some(opened)) = (process::driver(), open::opened()) else { break };
        let state = match super::settled(deadline) {
            Ok(state) => state,
            Err(text) => {
                why = text;
                break;
            }
        };
        // What a suspended program has where is settled when it is resumed.
        if state.is_some() {
            why = "the program is suspended; what it has is placed when it is resumed".to_owned();
            break;
        }
        let held = match hold(driver, deadline, is_wanted, &mut alone) {
            Ok(held) => held,
            Err(text) => {
                why = text;
                break;
            }
        };
        let until = Instant::now() + SLICE;
        while Instant::now() < until && !away.is_empty() {
            // Nothing is on a disk while the program is not suspended.
            let next = parted::next_of(&mut away, 1 << 30);
            let mut cause = None;
            let (came, not) = coming_back::bring_back(opened, driver, &held, &next, None, &mut cause, &mut |_, _| {});
            if let Some(Why { text, .. }) = cause {
                why = text;
            }
            let not_back = coming_back::not_back(opened, &next);
            // What came to another GPU has not come back.
            let elsewhere = not_back.iter().map(Parted::bytes).sum::<u64>().max(not);
            left.extend(not_back);
            any_moved |= came > 0;
            moved += came.saturating_sub(elsewhere - not);
            stayed += elsewhere;
            progress(moved + stayed, total);
        }
        drop(held);
        drop(state);
        if !away.is_empty() {
            std::thread::sleep(BREATH);
        }
    }
    stayed += away.iter().map(Parted::bytes).sum::<u64>();
    // Whoever asks once more finds it.
    away.extend(left);
    away::came(gpu, &known, &away);
    if any_moved {
        told_anew();
    }
    if stayed > 0
        && let Some(closed) = terms::why_closed(gpu)
    {
        why = closed;
    }
    Vacated { moved, rest: rest_of(stayed, why), took: begun.elapsed() }
}

/// What is told of so many bytes that did not come back. Of less than a page, nothing: what lies beside small memory of others on its page has nothing to gain, and nobody is to look for it.
fn rest_of(stayed: u64, why: String) -> Vec<Rest> {
    let rest = Rest { bytes: stayed, what: why, cause: "" };
    Some(rest).filter(|rest| rest.bytes >= FRAME).into_iter().collect()
}

/// Each byte of these once, by address: what left when a GPU was drained may have left again since, another one or with the whole program. The first that has it
/// keeps it.
fn once(away: Vec<Parted>) -> Vec<Parted> {
    // Start and end of what is known; none touches another.
    let mut known: BTreeMap<u64, u64> = BTreeMap::new();
    let mut rest = Vec::new();
    for parted in away {
        let (start, end) = (parted.address(), parted.address() + parted.bytes());
        let before = known.range(..start).next_back().filter(|(_, until)| **until >= start);
        let from = before.map_or(start, |(from, _)| *from);
        let over: Vec<(u64, u64)> = known.range(from..=end).map(|(from, until)| (*from, *until)).collect();
        match parted {
            Parted::Pooled { block, start: of, from, .. } => {
                let mut at = start;
                for (from_there, until) in over.iter().copied().chain([(end, end)]) {
                    if from_there > at {
                        rest.push(Parted::Pooled {
                            block,
                            start: of,
                            address: at,
                            bytes: from_there.min(end) - at,
                            from,
                        });
                    }
                    at = at.max(until);
                }
            }
            Parted::Own { .. } if over.iter().all(|(_, until)| *until <= start) => rest.push(parted),
            Parted::Own { .. } => continue,
        }
        over.iter().for_each(|(from, _)| _ = known.remove(from));
        let until = over.last().map_or(end, |(_, until)| end.max(*until));
        known.insert(over.first().map_or(start, |(from, _)| start.min(*from)), until);
    }
    rest.sort_by_key(Parted::address);
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_less_than_a_page_is_not_told_as_what_stays() {
        let told = |bytes| rest_of(bytes, "no room".to_owned()).iter().map(|rest| rest.bytes).sum::<u64>();
        assert_eq!([0, 8, FRAME - 1, FRAME].map(told), [0, 0, 0, FRAME]);
    }

    #[test]
    fn what_left_twice_comes_back_once() {
        let pooled = |address, bytes| Parted::Pooled { block: 1, start: 100, address, bytes, from: Place::Gpu(0) };
        let all = once(vec![pooled(200, 50), pooled(100, 40), pooled(100, 40), pooled(120, 60), pooled(210, 10)]);
        let all: Vec<_> = all.iter().map(|parted| (parted.address(), parted.bytes())).collect();
        assert_eq!(all, [(100, 40), (140, 40), (200, 50)]);
    }

    #[test]
    fn what_left_two_gpus_belongs_to_the_first() {
        let pooled =
            |address, bytes, from| Parted::Pooled { block: 1, start: 0, address, bytes, from: Place::Gpu(from) };
        let own = |from| Parted::Own { address: 1000, bytes: 10, asked: 0, from: Place::Gpu(from) };
        let all = once(vec![pooled(150, 50, 1), own(1), pooled(100, 200, 2), own(2), pooled(90, 20, 3)]);
        let parts = [pooled(90, 10, 3), pooled(100, 50, 2), pooled(150, 50, 1), pooled(200, 100, 2), own(1)];
        assert_eq!(all, parts);
    }

    #[test]
    fn what_was_elsewhere_before_it_left_comes_back_to_where_it_lay_first() {
        let pooled =
            |address, bytes, from| Parted::Pooled { block: 1, start: 0, address, bytes, from: Place::Gpu(from) };
        let own = |address, from| Parted::Own { address, bytes: 10, asked: 0, from: Place::Gpu(from) };
        let parted = vec![pooled(100, 100, 1), pooled(300, 50, 0), own(1000, 1)];
        let away = vec![pooled(150, 100, 0), pooled(500, 10, 0), own(1000, 0), own(2000, 0)];
        let all = [pooled(150, 50, 0), own(1000, 0), pooled(100, 50, 1), pooled(300, 50, 0)];
        let beside = [pooled(200, 50, 0), pooled(500, 10, 0), own(2000, 0)];
        assert_eq!(joined(parted, away), [&all[..], &beside[..]].concat());
    }
}
