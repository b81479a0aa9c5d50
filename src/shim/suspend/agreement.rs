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
    fn hold(&mut self) -> Duration {
        Duration::from_millis(500)
    }
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

/// With nobody.
pub struct Alone;

impl Agreement for Alone {
    fn may_close(&mut self) -> bool {
        true
    }

    fn is_quiet(&mut self) -> bool {
        true
    }

    fn is_disturbed(&mut self, _: &Disturbed) {
        std::thread::sleep(PAUSE);
    }
}
