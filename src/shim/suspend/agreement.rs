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

/// With nobody: a program that has not come to rest goes on for a while before the next try.
pub struct Alone {
    breath: Duration,
    /// How often it has not come to rest; `None`: a try takes no longer for that.
    tries: Option<u32>,
}

impl Default for Alone {
    fn default() -> Self {
        Self::patient(PAUSE)
    }
}

impl Alone {
    /// Whoever has asked for it gives it a time of his own: a step whose memory lies on the host takes seconds, and a program that is let go on after half a one each time comes to rest by chance alone.
    pub fn patient(breath: Duration) -> Self {
        Self { breath, tries: Some(0) }
    }

    /// Others wait for it, and for no more than two seconds.
    pub fn brief(breath: Duration) -> Self {
        Self { breath, tries: None }
    }
}

impl Agreement for Alone {
    fn hold(&mut self) -> Duration {
        self.tries.map_or(HOLD, |tries| HOLD * (1 << (tries / TRIES).min(DOUBLINGS)))
    }

    fn may_close(&mut self) -> bool {
        true
    }

    fn is_quiet(&mut self) -> bool {
        true
    }

    fn is_disturbed(&mut self, _: &Disturbed) {
        self.tries = self.tries.map(|tries| tries + 1);
        std::thread::sleep(self.breath);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For how many milliseconds so many tries in vain hold it up.
    fn held(mut alone: Alone, tries: usize) -> Vec<u128> {
        let times = (0..tries).map(|_| {
            let time = alone.hold().as_millis();
            alone.is_disturbed(&Disturbed::Closed);
            time
        });
        times.collect()
    }

    #[test]
    fn who_does_not_come_to_rest_is_held_up_for_longer_and_longer_up_to_eight_seconds() {
        let held = held(Alone::patient(Duration::ZERO), 12);
        assert_eq!(held, [[500; 2], [1000; 2], [2000; 2], [4000; 2], [8000; 2], [8000; 2]].concat());
    }
    #[test]
    fn who_others_wait_for_is_held_up_for_as_long_each_time() {
        assert_eq!(held(Alone::brief(Duration::ZERO), 10), [500; 10]);
    }
}
