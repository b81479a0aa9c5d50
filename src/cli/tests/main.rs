//! The command line as its users meet it: real processes. One binary, so that the helpers are compiled and used once.

mod common;
mod demo;
mod doctor;
mod explain;
mod fail_on;
mod html;
mod kernel;
mod plan;
mod readme;
mod report;
mod run;
mod signals;
mod sim;
mod store;
mod suspend;
mod top;
mod viewers;
mod words;
