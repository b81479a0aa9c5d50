//! Metrics pages of programs that run, and programs that go on with their work.

use crate::{Running, eventually};
use gpupool_metrics::folder::{Folder, Roots};
use gpupool_metrics::{Snapshot, read};
use std::path::Path;

/// The folder of pages under a session (`XDG_RUNTIME_DIR`), if it is there.
pub fn folder_of_pages(session: &Path) -> Option<Folder> {
    let nowhere = session.join("none");
    let session = Some(session.to_owned());
    let roots = Roots { session, run: nowhere.clone(), temporary: nowhere.clone(), sessions: nowhere };
    Folder::all(&roots).0.into_iter().next()
}

/// Every page there that can be read.
pub fn pages(session: &Path) -> Vec<Snapshot> {
    let Some(folder) = folder_of_pages(session) else { return Vec::new() };
    folder.pages().into_iter().filter_map(|entry| read(&folder.page(&entry).ok()?).ok()).collect()
}

/// What the page of a process says, once that has written it.
pub fn page_of(session: &Path, pid: u32) -> Option<Snapshot> {
    let all = pages(session).into_iter().filter(|told| told.levels.updated > 0);
    all.into_iter().find(|told| told.process.identity.pid == pid)
}

/// Has a program work with so many threads (`begin`), and waits until each has done something.
#[track_caller]
pub fn at_work(program: &mut Running, threads: u32) {
    assert_eq!(program.ask(&format!("begin {threads}")), "begun");
    goes_on(program);
}

/// Waits until it has done more (`rounds`).
#[track_caller]
pub fn goes_on(program: &mut Running) {
    let rounds = |program: &mut Running| -> u64 { program.ask("rounds").parse().unwrap_or(0) };
    let before = rounds(program);
    eventually("further rounds", || (rounds(program) > before + 8).then_some(()));
}
