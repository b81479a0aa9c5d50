//! A quantity over time, cut into parts of equal length.

/// Parts that the time of a process is cut into.
pub const PARTS: usize = 200;

/// How long one of them is.
pub fn seconds_per_part(seconds: f64) -> f64 {
    seconds / PARTS as f64
}
