//! The report for people. One file a section.

mod call_sites;
mod chart;
mod commands;
mod contexts;
mod far;
mod findings;
mod given;
mod growth;
mod limits;
mod memory;
mod modules;
mod moves;
pub mod oom;
mod pinned;
mod problems;
mod processes;
mod rows;

use crate::report::model::{Found, Logs, labels};
use crate::terminal::Page;

/// The report as text of 80 columns.
pub fn render(logs: &Logs, found: &[Found], colours: bool) -> String {
    let labels = labels(logs);
    let mut page = Page::new(colours);
    if !logs.processes.is_empty() {
        processes::section(&mut page, logs, &labels);
        contexts::section(&mut page, logs, &labels);
        findings::section(&mut page, logs, found, &labels);
        memory::section(&mut page, logs, &labels);
        growth::section(&mut page, logs, &labels);
        oom::told(&mut page, logs, &labels);
        far::section(&mut page, logs, &labels);
        moves::section(&mut page, logs, &labels);
        given::section(&mut page, logs, &labels);
        commands::section(&mut page, logs, &labels);
        pinned::section(&mut page, logs, &labels);
        modules::section(&mut page, logs, &labels);
        limits::section(&mut page, logs, &labels);
        call_sites::section(&mut page, logs);
        problems::warnings(&mut page, logs, &labels);
    }
    problems::missing(&mut page, logs, &labels);
    page.into_text()
}
