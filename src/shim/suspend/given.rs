//! What left a GPU because somebody else needed the room (`recall/give.rs`), and how it comes back once there is.

use super::coming_back;
use super::parted::{self, Parted};
use super::vacate::{SHORT_BREATH, SLICE};
use super::{Alone, STATE, hold, told_anew};
use crate::backing::open::{self, Opened};
use crate::backing::terms;
use crate::process;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// What has left which GPU because somebody else needed the room.
static GIVEN: Mutex<BTreeMap<u32, Vec<Parted>>> = Mutex::new(BTreeMap::new());

/// This left a GPU for somebody else now.
pub(super) fn add(opened: &Opened, gpu: u32, parted: Vec<Parted>) {
    let before = GIVEN.lock().remove(&gpu).unwrap_or_default();
    let all = parted::living(opened, before.into_iter().chain(parted).collect());
    GIVEN.lock().insert(gpu, all);
}

/// Where all of it begins.
pub(super) fn addresses() -> BTreeSet<u64> {
    GIVEN.lock().values().flatten().map(Parted::address).collect()
}

/// GPUs that something left for somebody else.
pub fn given() -> Vec<u32> {
    GIVEN.lock().iter().filter(|(_, parted)| !parted.is_empty()).map(|(gpu, _)| *gpu).collect()
}

/// What the program has freed of that comes back nowhere, and would take the room of what does; nor does what came home by another way.
fn forget_freed(gpu: u32) {
    let given = GIVEN.lock().remove(&gpu);
    if let Some((given, opened)) = given.zip(open::opened()) {
        let given = coming_back::not_back(opened, &given);
        GIVEN.lock().insert(gpu, given);
    }
}

/// Bytes of such memory of one of them.
pub fn given_of(gpu: u32) -> u64 {
    forget_freed(gpu);
    GIVEN.lock().get(&gpu).map_or(0, |parted| parted.iter().map(Parted::bytes).sum())
}

/// Whether anything may come back now: the program is not suspended, nor about to be.
pub fn may_come_back() -> bool {
    STATE.try_lock().is_some_and(|state| state.is_none())
}

/// How much comes back before it is looked whether somebody calls, who may want the room: what a link of 25 GB/s takes 5 ms for, or one chunk.
const STEP: u64 = 128 << 20;

/// Has of that so much come back as there is `room` for, until the program has stood still for [`SLICE`] or somebody calls (`goes_on`); the bytes. What did not come is tried again
/// by the next call.
///
/// In steps: this is the thread that answers others, and who asks for the room while 100 GiB come back would wait for seconds for one of whom no page says that it has any.
pub fn take_back(gpu: u32, room: u64, goes_on: &dyn Fn() -> bool) -> u64 {
    let mut sum = 0;
    forget_freed(gpu);
    let back: Vec<Parted> = {
        let mut given = GIVEN.lock();
        let Some(away) = given.get_mut(&gpu) else { return 0 };
        let fits = |parted: &Parted| {
            sum += parted.bytes();
            sum > room
        };
        let count = away.iter().position(fits).unwrap_or(away.len());
        away.drain(..count).collect()
    };
    let (Some(driver), Some(opened)) = (process::driver(), open::opened()) else { return 0 };
    // An image may be in the middle of being written, for as long as a disk takes.
    let Some(_state) = STATE.try_lock().filter(|state| state.is_none() && !back.is_empty()) else {
        GIVEN.lock().entry(gpu).or_default().extend(back);
        return 0;
    };
    match hold(driver, Instant::now() + SLICE, &|| true, &mut Alone::brief(SHORT_BREATH)) {
        Ok(held) => {
            // Who asks between two steps is not to find that nothing comes back.
            let bringing = terms::bring();
            let until = Instant::now() + SLICE;
            let (mut sum, mut away) = (0, back);
            // The first step in any case: the door of one that was killed stands there until the next one comes.
            while !away.is_empty() && (sum == 0 || Instant::now() < until && goes_on()) {
                let next = parted::next_of(&mut away, STEP);
                let (came, _) = coming_back::bring_back(opened, driver, &held, &next, None, &mut None, &mut |_, _| {});
                sum += came;
                // What found no room is tried again.
                let not_back = coming_back::not_back(opened, &next);
                if !not_back.is_empty() {
                    away.extend(not_back);
                    break;
                }
            }
            GIVEN.lock().entry(gpu).or_default().extend(away);
            drop(bringing);
            drop(held);
            told_anew();
            sum
        }
        Err(_) => {
            GIVEN.lock().entry(gpu).or_default().extend(back);
            0
        }
    }
}
