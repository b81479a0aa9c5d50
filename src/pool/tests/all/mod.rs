//! The pool against a mock backend that keeps the driver's rules.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests panic as tests do")]

mod anchors;
mod behaviour;
mod checks;
mod disk;
mod faults;
mod lazy;
mod mock;
mod model;
mod placement;
mod rearranging;
mod small;
mod terms;
mod threads;
