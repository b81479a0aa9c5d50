//! What a report knows, read from logs: a few numbers for each process, however long its log is.

mod commands;
mod found;
mod grown;
mod holders;
mod kept;
mod labels;
mod logs;
mod map;
mod moves;
mod pinned;
mod process;
mod refusals;
mod timeline;

pub use commands::{Commands, Suspension};
pub use found::{Found, findings, is_on_anothers, merge, ranks_on_one_gpu};
pub use grown::Sum as GrownSum;
pub use holders::{Holder, Holders};
pub use labels::{findings_missing, labels, together};
pub use logs::{Log, Logs};
pub use map::Moment;
pub use moves::Moves;
pub use pinned::Pinned;
pub use process::{AskedSum, Context, End, ModuleGroup, ModuleSum, NEAR_AND_FAR, Process, SiteSum};
pub use refusals::{BySetting, Refusal, SettingThatRefuses};
pub use timeline::Timeline;
