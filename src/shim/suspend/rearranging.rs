//! One move of a program that is held: it is stopped for it, and tried again beside calls that end a context.

use super::why::{self, Why};
use crate::backing::open::Opened;
use crate::backing::residence;
use crate::gate::{Closed, Held, Limits};
use crate::image::crew::{Crews, Way};
use gpupool_cuda::Driver;
use gpupool_pool::{MoveError, Moved, Stopped, Wish};
use parking_lot::{Mutex, MutexGuard};
use std::time::Duration;

/// What moves at a time, so that the end of the process waits for no more: as much as makes the calls that surround it cheap. More where a
/// chunk or block is larger, and between GPUs ([`super::turns::step_of`]).
pub const BATCH: u64 = 1 << 30;

/// How often something is tried beside a call that ends a context, and how long that is waited for each time.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(5);

/// Whose turn it is, of several that move at the same time.
#[derive(Default)]
pub struct Turn(Mutex<()>);

/// Crews that copy nothing at this moment, for whoever asks for more soon: only while the program is held. They keep contexts alive, and so go
/// as soon as something cannot move because a call is about to end one: that call waits for them.
static AT_REST: Mutex<Option<Crews>> = Mutex::new(None);

/// Those, or none yet.
pub fn rested() -> Crews {
    AT_REST.lock().take().unwrap_or_else(|| Crews::new(Way::Out))
}

/// They have copied.
pub fn rest(crews: Crews) {
    let before = AT_REST.lock().replace(crews);
    drop(before);
}

/// They are of no use any more, or in the way.
pub fn let_go_of_crews() {
    let crews = AT_REST.lock().take();
    drop(crews);
}

/// The program is stopped for a move. `None`: not now.
pub fn stop(driver: &'static Driver, held: &Held) -> Option<Closed<'static>> {
    held.stop(driver, &Limits::default()).inspect_err(|_| let_go_of_crews()).ok()
}

/// The gate, held, while something moves, and whose turn it is.
struct Quiet<'a>(Closed<'static>, #[expect(dead_code, reason = "it ends with the turn")] MutexGuard<'a, ()>);

impl Stopped for Quiet<'_> {
    fn still_quiet(&mut self) -> bool {
        self.0.still_quiet().is_ok()
    }
}

/// Moves these at once. What shares a chunk with memory that nobody wished for is parted from that by a second move, where there is room for it.
pub fn rearrange(
    opened: &Opened,
    driver: &'static Driver,
    held: &Held,
    turn: &Turn,
    wishes: &[Wish],
) -> Result<Moved, Why> {
    for _ in 0..TRIES {
        let stops = || {
            let turn = turn.0.lock();
            Some(Quiet(stop(driver, held)?, turn))
        };
        match opened.pool.rearrange(wishes, stops) {
            Ok(done) => {
                // Even what is cut short has moved something, to wherever there was room.
                residence::is_far();
                if let Some(error) = done.cut_short {
                    return Err(why::in_words(&error));
                }
                let (shared, alone): (Vec<_>, Vec<_>) =
                    wishes.iter().zip(done.wishes).partition(|(_, moved)| moved.shared > 0);
                let sum = |all: Vec<(&Wish, Moved)>| all.into_iter().map(|(_, moved)| moved).sum::<Moved>();
                if shared.is_empty() {
                    return Ok(sum(alone));
                }
                let again: Vec<Wish> = shared.iter().map(|(wish, _)| **wish).collect();
                // Where that fails, all of it lies as the first one left it.
                let parted = opened.pool.rearrange_dividing(&again, stops).ok();
                let parted = parted.filter(|done| done.cut_short.is_none());
                let moved = parted.map_or_else(|| sum(shared), |done| done.wishes.into_iter().sum());
                return Ok([sum(alone), moved].into_iter().sum());
            }
            // A context that is about to end is gone soon. Where the process ends, nothing more is tried.
            Err(MoveError::NotNow) => std::thread::sleep(PAUSE),
            Err(error) => return Err(why::in_words(&error)),
        }
    }
    Err(why::in_words(&MoveError::NotNow))
}
