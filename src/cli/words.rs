//! How numbers, sizes, times and places in a program are written for people.

use gpupool_config::format_size;
use gpupool_events::{NativeFrame, PyFrame, Site};

use crate::terminal::{clean, columns, shorten};

/// Frames shown behind the line that matters.
const OUTER_FRAMES: usize = 2;
/// Native frames shown where there are none of Python.
const NATIVE_FRAMES: usize = 4;

/// With what a program has no page, by which all commands find it.
pub const UNSEEN: &str = "GPUPOOL_METRICS=off";

/// How much more slowly a GPU is read that lends memory while nobody has a context on it, and what one there takes (measured on
/// H200, by kernels and by copies).
pub const LENDER_ASLEEP: &str = "8 to 11 % more slowly (H200)";
pub const LENDER_COST: &str = "about 523 MiB and 52 W a GPU";

/// `0-3, 7` of sorted numbers.
pub fn ranges(numbers: &[u32]) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut rest = numbers;
    while let Some(first) = rest.first() {
        let length = (0u32..).zip(rest).take_while(|(step, number)| **number == first + step).count();
        let (run, after) = rest.split_at(length);
        words.push(match run {
            [_, .., last] => format!("{first}-{last}"),
            _ => first.to_string(),
        });
        rest = after;
    }
    words.join(", ")
}

/// The line that matters, in at most `width` columns.
pub fn place(site: &Site, width: usize) -> String {
    match (site.program_frame(), site.native.first()) {
        (Some(frame), _) => python(frame, width),
        (None, Some(frame)) => native(frame, width),
        (None, None) => "unknown".to_owned(),
    }
}

/// Where something happened, in a few lines of at most `width` columns: the program's own line, what it went through, and
/// who called it.
pub fn places(site: Option<&Site>, width: usize) -> Vec<String> {
    let Some(site) = site.filter(|site| !site.is_empty()) else {
        return Vec::new();
    };
    let Some(own) = site.program_frame() else {
        let frames = site.native.iter().take(NATIVE_FRAMES).enumerate();
        return frames
            .map(|(depth, frame)| labelled(if depth == 0 { "" } else { "from " }, width, |width| native(frame, width)))
            .collect();
    };
    let at = site.python.iter().position(|frame| frame == own).unwrap_or(0);
    let mut lines = vec![python(own, width)];
    if at > 0 {
        lines.push(labelled("via ", width, |width| python(&site.python[0], width)));
    }
    let outer = site.python.iter().skip(at + 1).take(OUTER_FRAMES);
    lines.extend(outer.map(|frame| labelled("from ", width, |width| python(frame, width))));
    lines
}

fn labelled(label: &str, width: usize, rest: impl Fn(usize) -> String) -> String {
    format!("{label}{}", rest(width.saturating_sub(label.len())))
}

/// `…/train.py:12 in main`: the path gives way first, as the line is what is looked for.
fn python(frame: &PyFrame, width: usize) -> String {
    let line = if frame.line == 0 { String::new() } else { format!(":{}", frame.line) };
    with_path(&frame.file, &format!("{line} in {}", frame.function), width)
}

fn native(frame: &NativeFrame, width: usize) -> String {
    let offset = format!("+{:#x}", frame.offset);
    match &frame.symbol {
        // Names of C++ templates can be longer than any line.
        Some(symbol) => {
            let symbol = shorten(&clean(symbol), width / 2);
            let width = width.saturating_sub(columns(&symbol) + 4);
            format!("{symbol} in {}", with_path(&frame.object, &offset, width))
        }
        None => with_path(&frame.object, &offset, width),
    }
}

fn with_path(path: &str, rest: &str, width: usize) -> String {
    let rest = clean(rest);
    // A file's name needs some room, whatever is behind it.
    let rest = shorten(&rest, width.saturating_sub(16));
    let path = shorten(&clean(path), width.saturating_sub(columns(&rest)));
    format!("{path}{rest}")
}

/// Seconds as people say them.
pub fn time(seconds: f64) -> String {
    match seconds {
        s if s < 0.0005 => "0 s".to_owned(),
        s if s < 0.1 => format!("{:.0} ms", s * 1000.0),
        s if s < 100.0 => format!("{s:.1} s"),
        s if s < 6000.0 => format!("{:.0} min", s / 60.0),
        s if s < 1e9 => format!("{:.1} h", s / 3600.0),
        // No program runs for decades.
        _ => "?".to_owned(),
    }
}

/// `1 kernel`, `2 kernels`.
pub fn count(number: u64, one: &str, many: &str) -> String {
    if number == 1 { format!("1 {one}") } else { format!("{number} {many}") }
}

/// A size that may be below zero.
pub fn signed(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", format_size(bytes.unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_a_range() {
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[3]), "3");
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
    }

    #[test]
    fn times_are_short() {
        let shown = [0.0001, 0.012, 0.25, 12.34, 600.0, 36_000.0].map(time);
        assert_eq!(shown, ["0 s", "12 ms", "0.2 s", "12.3 s", "10 min", "10.0 h"]);
    }

    #[test]
    fn a_line_keeps_its_end_when_its_path_is_cut() {
        let frame =
            PyFrame { file: "/a/very/long/path/to/some/train.py".to_owned(), line: 12, function: "main".to_owned() };
        assert_eq!(python(&frame, 28), "/a/ve…me/train.py:12 in main");
        let site = Site { python: vec![frame], ..Site::default() };
        assert!(columns(&place(&site, 24)) <= 24);
    }

    #[test]
    fn sizes_below_zero_have_a_sign() {
        assert_eq!(signed(-(3 << 20)), "-3.0 MiB");
        assert_eq!(signed(i64::MIN), "-8388608.0 TiB");
    }
}
