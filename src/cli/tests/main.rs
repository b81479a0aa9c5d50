//! The command line as its users meet it: real processes. One binary, so that the helpers are compiled and used once.

mod common;
mod demo;
mod readme;
mod run;
mod sim;
