//! The log's wire format: one JSON object a line, the same types for whoever writes and whoever reads.
//!
//! ```json
//! {"v":1,"t":1767225600.25,"pid":7,"tid":9,"level":"info","event":"pool.grow","message":"…","home":0,"bytes":33554432,…}
//! ```
//!
//! A reader meets files of older and newer writers. Fields it does not know are passed over, events it does not know
//! become [`Event::Other`]; only a new [`VERSION`] may change what a known field means. Sizes are bytes, addresses are
//! device addresses, GPUs are the program's own ordinals, and a place is written `gpu0` or `host0`.
#![forbid(unsafe_code)]

mod event;
mod findings;
mod level;
mod reader;
mod record;
mod shared;
mod spare;
mod verdict;

pub use event::*;
pub use findings::{FINDINGS, Finding, finding, nearest_finding};
pub use level::{Level, Target};
pub use reader::{LineError, Reader};
pub use record::{Record, VERSION, Wrong};
pub use shared::*;
pub use spare::Spare;
pub use verdict::{Attendance, Began, Outside, Present, Verdict, VerdictEnd, VerdictLine};
