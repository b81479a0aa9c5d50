//! The functions by which the template shows what the report says: each takes the JSON pointer of a value, and what it writes names that
//! pointer, so that a number of the page can be found again in `--json`.

use std::sync::Arc;

use gpupool_config::format_size;
use gpupool_events::{Site, finding};
use minijinja::{Environment, HtmlEscape};
use serde_json::Value;

use super::tame::tame_lines;
use crate::words;

/// Columns of a line that says where something is.
const PLACE: usize = 120;

/// Adds the functions to the pages of this report.
pub fn add(pages: &mut Environment<'_>, report: Value) {
    let report = Arc::new(report);
    let shown = |report: &Arc<Value>, show: fn(&Value) -> Option<String>| {
        let report = report.clone();
        move |pointer: &str| match report.pointer(pointer).and_then(|value| Some((value, show(value)?))) {
            Some((value, text)) => minijinja::Value::from_safe_string(format!(
                "<data value=\"{}\" data-of=\"{}\">{}</data>",
                HtmlEscape(&value.to_string()),
                HtmlEscape(&tame_lines(pointer)),
                HtmlEscape(&text)
            )),
            None => minijinja::Value::from("?"),
        }
    };
    pages.add_function(
        "size",
        shown(&report, |value| match value.as_i64() {
            Some(bytes) => Some(words::signed(bytes)),
            None => value.as_u64().map(format_size),
        }),
    );
    pages.add_function("number", shown(&report, |value| value.as_number().map(ToString::to_string)));
    pages.add_function("time", shown(&report, |value| value.as_f64().map(time)));
    let of = report.clone();
    pages.add_function("places", move |pointer: &str| -> Vec<String> {
        let site = of.pointer(pointer).and_then(|site| serde_json::from_value::<Site>(site.clone()).ok());
        words::places(site.as_ref(), PLACE)
    });
    pages.add_function("explain", |code: &str| finding(code).map(|known| known.explain));
    pages.add_function("ranges", |numbers: Vec<u32>| words::ranges(&numbers));
    pages.add_filter("pointed", |name: &str| name.replace('~', "~0").replace('/', "~1"));
    pages.add_filter("file", |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned());
    pages.add_filter("percent", percent);
}

/// Seconds, also below zero.
fn time(seconds: f64) -> String {
    if seconds < 0.0 { format!("-{}", words::time(-seconds)) } else { words::time(seconds) }
}

/// A part of a whole, in percent of it.
fn percent(part: f64, whole: f64) -> String {
    let percent = if whole > 0.0 { (part / whole * 100.0).clamp(0.0, 100.0) } else { 0.0 };
    format!("{percent:.1}")
}
