//! The one way of an event into the log: as the very type that its reader gets.

use std::fmt::{self, Display};

use gpupool_events::{Level, Target, Written};

/// The field that holds all of an event's own. A record has nothing of that name.
pub(super) const FIELDS: &str = "event.fields";

/// Says that something happened, and one sentence about it. Both are made only where a filter lets the event through;
/// `make` says nothing itself, since the filters have been asked about this event by then.
///
/// ```text
/// log::emit(|| (PoolTrim { bytes, why: why.to_owned() }, format!("returned {size} to the driver for {why}")));
/// ```
#[inline]
pub fn emit<E: Written, T: Display>(make: impl FnOnce() -> (E, T)) {
    /// `tracing` filters by places in the code, and a place has one target and one level.
    macro_rules! at {
        ($target:ident, $level:ident) => {
            if tracing::enabled!(target: Target::$target.name(), tracing::Level::$level) {
                taken(make, |event, text| {
                    tracing::event!(
                        target: Target::$target.name(), tracing::Level::$level,
                        event = E::NAME, { FIELDS } = ?event, "{text}"
                    );
                });
            }
        };
    }
    macro_rules! about {
        ($($target:ident)+) => {
            match (E::TARGET, E::LEVEL) {
                $(
                    (Target::$target, Level::Error) => at!($target, ERROR),
                    (Target::$target, Level::Warn) => at!($target, WARN),
                    (Target::$target, Level::Info) => at!($target, INFO),
                    (Target::$target, Level::Debug) => at!($target, DEBUG),
                    (Target::$target, Level::Trace) => at!($target, TRACE),
                )+
            }
        };
    }
    // Known when this is compiled: one arm is left of it for each event.
    about!(Call Context Finding Ipc Log Memory Module Pinned Process);
}

/// Out of the way of the calls that nobody logs.
#[cold]
#[inline(never)]
fn taken<E: Written, T: Display>(make: impl FnOnce() -> (E, T), say: impl FnOnce(&Fields<E>, &T)) {
    let (event, text) = make();
    say(&Fields(event), &text);
}

/// An event's fields as they are in the line.
struct Fields<E>(E);

impl<E: Written> fmt::Debug for Fields<E> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = Vec::new();
        self.0.write_fields(&mut line);
        out.write_str(&String::from_utf8_lossy(&line))
    }
}
