//! Lists that are as long as a report needs them, and what did not fit.

use std::collections::BTreeMap;

/// Entries of one kind that are kept for a process. A program that makes more of them has one mistake many times, and the
/// rest is counted.
const KEPT: usize = 256;

/// What was left out of a report, and how much of it.
pub type LeftOut = BTreeMap<&'static str, u64>;

/// Adds an entry to a list that is not full; else counts it.
pub fn keep<T>(list: &mut Vec<T>, entry: T, what: &'static str, more: &mut LeftOut) {
    if list.len() < KEPT {
        list.push(entry);
    } else {
        *more.entry(what).or_default() += 1;
    }
}
