//! Everything between the program and the bodies: the table, the exported trampolines, and the ways to reach them.

pub mod boundary;
pub mod exports;
#[cfg(test)]
mod listing;
pub mod resolve;
pub mod table;
pub mod trampoline;

// Bodies, by subject. Each is a few lines: it decides who answers, the work is done elsewhere.
pub mod context;
pub mod current;
pub mod graph;
pub mod handle;
pub mod host;
pub mod ipc;
pub mod launch;
pub mod mapping;
pub mod memory;
pub mod module;
pub mod pass;
pub mod query;
pub mod rest;
pub mod retry;
pub mod stream;
pub mod stream_ordered;
pub mod submit;

pub use boundary::Real;
pub use trampoline::HOOKS;

#[cfg(test)]
mod tests;
