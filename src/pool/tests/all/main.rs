//! The pool against a mock backend that keeps the driver's rules.

mod behaviour;
mod checks;
mod faults;
mod mock;
mod model;
mod placement;
mod threads;
