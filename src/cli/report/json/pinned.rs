//! Pinned host memory.

use serde_json::{Map, Value, json};

use super::parts::{PARTS, seconds_per_part};
use crate::report::model::{Pinned, Timeline};

/// The pinned memory of a process of so many seconds.
pub fn object(pinned: &Pinned, seconds: f64) -> Value {
    let level = |(name, line): (&str, &Timeline)| {
        (name.replace(' ', "_"), json!({"peak": line.peak(), "last": line.last(), "bytes": line.parts(PARTS, seconds)}))
    };
    json!({
        "seconds_per_part": seconds_per_part(seconds), "levels": pinned.lines().map(level).into_iter().collect::<Map<_, _>>(),
        "returned": pinned.returned, "sites": pinned.sites,
    })
}
