//! How long a section may be, and what it says of rows that it leaves out.

use crate::terminal::{Page, Table};

/// Rows of a section; whoever wants all takes `--json`.
pub const ROWS: usize = 12;
/// Contexts, which are what the report is for.
pub const CONTEXT_ROWS: usize = 64;
/// Rows of processes above which those that are alike are folded into one.
pub const FOLDED: usize = 16;
/// Indent of what stands below a row.
pub const BELOW: usize = 6;

/// Rows, up to a number; the rest is counted in a line.
pub fn show(page: &mut Page, table: Table, hidden: usize) {
    page.table(&table);
    if hidden > 0 {
        page.line(&format!("  {hidden} more; --json has them"));
    }
}
