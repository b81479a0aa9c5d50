//! What can be set, what each setting may say, and how a mistake is told.
//!
//! The shim reads its settings inside somebody else's process and the command line reads them before that process exists;
//! both get them here, so `gpupool run` refuses exactly what the preloaded library would refuse. [`SETTINGS`] is the one
//! table: README's list, `gpupool run --help` and [`Settings::read`] all come from it.
//!
//! Architecture Invariant: nothing here reads the environment, a file or the clock. The caller passes the variables, which
//! is what lets a test, the command line's `--set` and a real process share every line of this crate.
#![forbid(unsafe_code)]

mod choice;
mod duration;
mod effects;
mod log_level;
mod log_path;
mod outside;
mod problem;
mod ranks;
mod read;
mod settings;
mod size;
mod table;
mod units;

pub use choice::{Contexts, Free, Lenders, MemInfo, Mode, Move, Pinned, Placement, Prefetch, Small, Switch, Toggle};
pub use duration::{DurationError, parse_duration};
pub use log_level::{SUBJECTS, check_log};
pub use log_path::{LogPath, LogPathNames};
pub use outside::{Budget, Outside, tightest};
pub use problem::Problem;
pub use ranks::{Rank, launcher_variables, local_ranks, passed_over, rank};
pub use read::{nearest, no_setting, read_one};
pub use settings::{Devices, FarLimit, Limits, Settings};
pub use size::{SizeError, format_size, parse_size};
pub use table::{PREFIX, SETTINGS, Setting, VERDICTS};
pub use units::without_unit;

/// Version and build of what this is part of, as `0.2.0 (4f2c8b1, 2026-11-22)`.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("GPUPOOL_BUILD"), ")");
