//! Memory that goes from one process to another: an allocation that lacks memory on its GPU asks those of the user's processes that have some there
//! and matter less ([`ask`]), and they give way ([`give`]); and programs that do not run under gpupool are given way to unasked ([`strangers`]). A rank of a job is lent GPUs that nobody works on ([`idle`]).
//! What leaves unasked is tried until it has left ([`leaving`]).
//!
//! **Who gives way to whom.** What lies on a GPU for the sake of another one is a loan, and whoever works there may call it back unless its priority
//! is lower. What a program has on its own GPU gives way to a higher priority alone. Neither goes below what its program is guaranteed
//! (`GPUPOOL_GUARANTEE`), and within its own guarantee a program is above all others. So of two programs at most one gives way to the other,
//! but for loans, which are called from one GPU each.
//!
//! **Nobody waits for good.** The thread that allocates asks, with no lock of the pool, outside the gate and for a bounded time; the agent answers, and never
//! asks. So two processes that ask each other at once are both answered. What others say that they freed is not believed: the driver is asked again.
//!
//! **No ping-pong.** What was given is not taken back for a while, longer each time that it was taken back too early, and only where there is room.

pub mod ask;
mod at_work;
mod coming;
pub mod give;
pub mod idle;
pub mod leaving;
mod neighbours;
pub mod siblings;
pub mod strangers;
mod turns;
mod whom;

use crate::backing::terms;
use crate::latest::Latest;
use std::path::{Path, PathBuf};

/// Where the page of this process lies, and its number: the child of a fork asks nobody.
static PAGE: Latest<(u32, PathBuf)> = Latest::new();

/// The process can be found from here on, by this page, and finds others beside it.
pub fn is_found_by(page: &Path) {
    PAGE.set((std::process::id(), page.to_owned()));
}

/// Whether somebody stands at the door beside the page, and waits for this process to hear what is wanted.
fn is_called() -> bool {
    page().is_some_and(|page| page.with_extension("call").symlink_metadata().is_ok())
}

/// The priority of this process is another one: what was kept for who matters less now is kept no more, and whoever gave nothing is asked anew.
pub fn priority_has_changed() {
    terms::forget_given(&neighbours::priority_of);
    whom::ask_anew();
}

fn page() -> Option<&'static Path> {
    PAGE.get().filter(|(pid, _)| *pid == std::process::id()).map(|(_, page)| page.as_path())
}
