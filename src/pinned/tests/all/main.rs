//! The pool of pinned memory against a mock backend that keeps the driver's rules.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests panic as tests do")]

mod behaviour;
mod faults;
mod mock;
mod model;
mod sequences;
mod threads;
