//! Sizes that lack a unit, and that nobody means in bytes.

use crate::problem::Problem;
use std::ffi::OsString;

/// What a place may hold or keep free. The other sizes may well be a few bytes.
const OF_PLACES: [&str; 5] =
    ["GPUPOOL_RESERVE", "GPUPOOL_LIMIT", "GPUPOOL_HOST_LIMIT", "GPUPOOL_PINNED_LIMIT", "GPUPOOL_GUARANTEE"];
/// Not even the smallest piece of memory at a place, which is 2 MiB, has so few bytes. 0 is a size that is meant.
const FEWEST: u64 = 1 << 16;

/// Of the settings among `vars`, those whose number is most likely one of GiB: `GPUPOOL_LIMIT=10`. They mean bytes all the same.
pub fn without_unit(vars: impl Iterator<Item = (OsString, OsString)>) -> Vec<Problem> {
    let settings = vars.filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    settings
        .filter_map(|(name, value)| few_bytes(&name, &value).map(|reason| Problem { name, value, reason }))
        .collect()
}

/// What to say of this value where its number is most likely one of GiB.
pub(crate) fn few_bytes(name: &str, value: &str) -> Option<String> {
    if !OF_PLACES.contains(&name) {
        return None;
    }
    let mut sizes = value.split(',').map(|part| part.rsplit(':').next().unwrap_or(part).trim());
    let number = sizes.find(|size| size.parse::<u64>().is_ok_and(|bytes| (1..FEWEST).contains(&bytes)))?;
    let bytes = if number.parse() == Ok(1_u64) { "byte" } else { "bytes" };
    Some(format!("{number} {bytes}, as there is no unit; write {number}GiB if that is meant"))
}
