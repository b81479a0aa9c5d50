//! What another process or thread does in its own time.

use std::time::{Duration, Instant};

/// Looks until there is what is looked for. The library's agent looks what has changed once a second, and writes a page of metrics
/// as long after it when nothing else keeps the machine busy; the limit of a minute here is for what never comes.
#[track_caller]
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
