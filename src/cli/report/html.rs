//! The report as one page that needs no network: what was large, where it lay, and what to do. Its numbers are those of `--json`, and each
//! says by `data-of` where it stands there.

mod data;
mod numbers;
mod tame;

use std::fs::File;
use std::io::Write;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use gpupool_config::format_size;
use minijinja::{AutoEscape, Environment, context};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::json;
use super::model::{Found, Logs, labels};
use super::target;
use crate::failure::Failure;

const PAGE: &str = include_str!("html/page.html");
const STYLE: &str = include_str!("html/page.css");
const SCRIPT: &str = include_str!("html/page.js");
const PLOT_STYLE: &str = include_str!("html/uplot/uPlot.min.css");
const PLOT: &str = include_str!("html/uplot/uPlot.iife.min.js");
const PLOT_LICENCE: &str = include_str!("html/uplot/LICENSE");

/// Writes the page, and says in one line what was written.
///
/// # Errors
/// Exit 2 if the file is one of the logs or cannot be written.
pub fn write(path: &Path, logs: &Logs, found: &[Found]) -> Result<String, Failure> {
    target::refuse_logs(path, logs.logs.iter().map(|log| &log.path))?;
    let page = render(logs, found)?;
    let written = File::create(path).and_then(|mut file| file.write_all(page.as_bytes()));
    written.map_err(|error| Failure::usage(format!("{}: cannot be written: {error}", path.display())))?;
    Ok(format!("{}: {}, opens in any browser\n", path.display(), format_size(page.len() as u64)))
}

/// The page.
///
/// # Errors
/// A template does not fit what it shows, which is a mistake of this program.
fn render(logs: &Logs, found: &[Found]) -> Result<String, Failure> {
    let labels = labels(logs);
    let data = data::data(logs, &labels);
    // Of what is drawn the report has a copy in few parts.
    let report = tame::tame(json::value(logs, found));
    let page = page(report, &data);
    page.map_err(|error| Failure::usage(format!("the page cannot be made: {error:#}; please report it")))
}

fn page(report: Value, data: &Value) -> Result<String, minijinja::Error> {
    let mut pages = Environment::new();
    pages.set_auto_escape_callback(|_| AutoEscape::Html);
    pages.set_formatter(|out, state, value| match value.as_str() {
        Some(text) if !value.is_safe() => {
            minijinja::escape_formatter(out, state, &minijinja::Value::from(tame::tame_lines(text)))
        }
        _ => minijinja::escape_formatter(out, state, value),
    });
    pages.add_template("page", PAGE)?;
    let known = minijinja::Value::from_serialize(&report);
    numbers::add(&mut pages, report);
    let context = context! {
        report => known,
        version => env!("CARGO_PKG_VERSION"),
        style => minijinja::Value::from_safe_string(format!("{PLOT_STYLE}\n{STYLE}")),
        plot_licence => PLOT_LICENCE,
        plot => minijinja::Value::from_safe_string(PLOT.to_owned()),
        script => minijinja::Value::from_safe_string(SCRIPT.to_owned()),
        data => minijinja::Value::from_safe_string(in_script(data)),
        policy => policy(),
    };
    pages.get_template("page")?.render(context)
}

/// The page asks nothing of any network and runs no script but its two, whatever else a log may bring into it.
fn policy() -> String {
    let hash = |script: &str| format!("'sha256-{}'", STANDARD.encode(Sha256::digest(script)));
    format!(
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {} {}; base-uri 'none'; form-action 'none'",
        hash(PLOT),
        hash(SCRIPT)
    )
}

/// JSON that can stand in a `script` element: nothing in it ends that, or begins another.
fn in_script(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}
