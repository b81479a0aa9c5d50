//! The policy on a simulated machine, beside others and a bound that none can go below.
//!
//! `cargo test --release -p gpupool-tiers -- --nocapture table` prints the ratios of all policies on all traces.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

mod behaviour;
mod bound;
mod format;
mod knowing;
mod machine;
mod policies;
mod properties;
mod recorded;
mod table;
mod tournament;
mod traces;
