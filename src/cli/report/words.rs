//! How processes, places and times are called, in text and in JSON alike.

use gpupool_events::{NativeFrame, PyFrame, Site};

use super::gather::Log;
use super::model::{End, Process};
use crate::terminal::{clean, columns, shorten};

/// Frames shown behind the line that matters.
const OUTER_FRAMES: usize = 2;
/// Native frames shown where there are none of Python.
const NATIVE_FRAMES: usize = 4;

/// A name for each process: `rank 3` where no other has that rank, else `pid 4711`.
pub fn labels(processes: &[Process]) -> Vec<String> {
    let rank = |process: &Process| process.start.as_ref().and_then(|start| start.local_rank);
    let label = |process: &Process| match rank(process) {
        Some(own) if processes.iter().filter(|other| rank(other) == Some(own)).count() == 1 => format!("rank {own}"),
        Some(own) => format!("rank {own} (pid {})", process.pid),
        None => format!("pid {}", process.pid),
    };
    let mut labels: Vec<String> = processes.iter().map(label).collect();
    // Programs that followed each other in one process share its number.
    for (index, process) in processes.iter().enumerate().filter(|(_, process)| process.replaced) {
        let later =
            processes.iter().enumerate().filter(|(_, later)| (later.log, later.pid) == (process.log, process.pid));
        for (number, (index, _)) in later.enumerate().filter(|(_, (later, _))| *later > index) {
            labels[index] = format!("{} program {}", label(&processes[index]), number + 1);
        }
    }
    labels
}

/// Processes whose logs end before what is judged at the end of a process. A child of a fork has no start in its log, and
/// nothing is judged at its end.
pub fn findings_missing(processes: &[Process]) -> Vec<usize> {
    let is_cut = |process: &Process| process.start.is_some() && process.end() != End::Exit;
    processes.iter().enumerate().filter(|(_, process)| is_cut(process)).map(|(index, _)| index).collect()
}

/// Several processes in a few words: `ranks 0-6`, `rank 1, pid 7`, `pid 7 and 12 more`.
pub fn together(labels: &[String], indices: &[usize]) -> String {
    let names: Vec<&str> = indices.iter().filter_map(|index| labels.get(*index)).map(String::as_str).collect();
    let ranks: Option<Vec<u32>> =
        names.iter().map(|name| name.strip_prefix("rank ").and_then(|rank| rank.parse().ok())).collect();
    match (ranks, names.as_slice()) {
        (Some(mut ranks), [_, _, ..]) => {
            ranks.sort_unstable();
            format!("ranks {}", ranges(&ranks))
        }
        (_, [first, second, third, rest @ ..]) if !rest.is_empty() => {
            format!("{first}, {second}, {third} and {} more", rest.len())
        }
        (_, names) => names.join(", "),
    }
}

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
    format!("{label}{}", rest(width - label.len()))
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
    let path = shorten(&clean(path), width - columns(&rest));
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

/// The sentence for a path that is no readable log.
pub fn why_unreadable(log: &Log) -> String {
    let what = if log.bad_lines > 0 { "holds no record of gpupool; " } else { "" };
    // One line a log, whatever is in it.
    clean(&format!("{}: {what}{}", log.path.display(), log.problems.join("; ")))
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
    fn processes_are_called_together() {
        let labels: Vec<String> = ["rank 0", "rank 1", "rank 2", "pid 7"].map(str::to_owned).to_vec();
        assert_eq!(together(&labels, &[0, 1, 2]), "ranks 0-2");
        assert_eq!(together(&labels, &[1]), "rank 1");
        assert_eq!(together(&labels, &[0, 3]), "rank 0, pid 7");
        assert_eq!(together(&labels, &[0, 1, 2, 3]), "rank 0, rank 1, rank 2 and 1 more");
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
}
