//! When a program that is to be suspended is stopped: as soon as it can be, or together with others.
//!
//! Programs that work on something together wait for each other on their GPUs: a collective is over once all of them have issued it. Stopped one
//! after the other they would be stopped in the middle of one, and some of them never come to rest. So all are stopped at the same moment, for a
//! moment; where not all of them are quiet then, all go on and it is tried again. Whoever asks conducts that, since the programs do not know
//! of each other.

use crate::gate::Disturbed;
use std::time::Duration;

/// How long a program is left alone after a try.
pub const PAUSE: Duration = Duration::from_millis(100);

/// With whom it is agreed when the program stops.
pub trait Agreement {
    /// For how long one try holds up a program that does not come to rest.
    fn hold(&mut self) -> Duration;
    /// Returns when the program may be stopped; `false`: nobody wants that any more.
    fn may_close(&mut self) -> bool;
    /// It has stopped. Returns whether it stays so; else it goes on, and it is tried again.
    fn is_quiet(&mut self) -> bool;
    /// What is to be done while it is stopped is done. Returns once that is so of all others; `false`: it is not, and all is in vain.
    fn is_done(&mut self) -> bool {
        true
    }
    /// It could not be stopped.
    fn is_disturbed(&mut self, disturbed: &Disturbed);
}

/// How long the first tries hold a program up that nobody else waits for, and after how many of them the next ones do so for twice as
/// long, up to sixteen times. What a program has under way at once may take longer than half a second where its processors or its GPUs
/// are not its own, and a training step whose memory lies on the host takes five seconds and more: who opened every time after two would
/// never see it at rest.
const HOLD: Duration = Duration::from_millis(500);
const TRIES: u32 = 2;
const DOUBLINGS: u32 = 4;

/// For how long a try holds the program up behind so many in vain.
pub fn hold_behind(tries: u32) -> Duration {
    HOLD * (1 << (tries / TRIES).min(DOUBLINGS))
}

/// With nobody.
#[derive(Default)]
pub struct Alone {
    tries: u32,
}

impl Agreement for Alone {
    fn hold(&mut self) -> Duration {
        hold_behind(self.tries)
    }

    fn may_close(&mut self) -> bool {
        true
    }

    fn is_quiet(&mut self) -> bool {
        true
    }

    fn is_disturbed(&mut self, _: &Disturbed) {
        self.tries += 1;
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_come_to_rest_is_held_up_for_longer_and_longer_up_to_eight_seconds() {
        let mut alone = Alone::default();
        let mut held = Vec::new();
        for _ in 0..12 {
            held.push(alone.hold().as_millis());
            alone.tries += 1;
        }
        assert_eq!(held, [[500; 2], [1000; 2], [2000; 2], [4000; 2], [8000; 2], [8000; 2]].concat());
    }
}
