//! The last words: what the pool did for this process, in at most thirteen lines on stderr.

use std::fmt::Write as _;
use std::path::Path;

use gpupool_config::{Switch, format_size};

use super::stderr;

/// Lines for places; the other lines of a summary are at most seven. A machine with more gets its busiest ones, and one
/// line for the rest.
const PLACE_LINES: usize = 6;

/// What was lost by far memory is worth a word from so many seconds on.
const LEAST_LOST: f64 = 0.1;

/// One place in the summary. Sizes are bytes.
#[derive(Clone, Debug)]
pub struct PlaceSummary {
    /// `gpu0`, `host0`.
    pub name: String,
    /// The most that live blocks took there, and memory that the program made itself, as far as the limit counts that.
    pub peak_used: u64,
    /// The most the pool may hold there; `None` where only the driver limits it.
    pub limit: Option<u64>,
    /// What the pool holds there now and never gave out.
    pub unused: u64,
}

/// What `GPUPOOL_MOVE` did.
#[derive(Clone, Copy, Debug, Default)]
pub struct MovedSummary {
    /// How often.
    pub times: u64,
    /// Bytes that came near, and that left.
    pub came: u64,
    pub left: u64,
    /// Seconds for which it held the program up.
    pub took: f64,
    /// Seconds that kernels took less by it, as measured on some of them; below 0: more.
    pub saved: f64,
}

/// What a process did, for its summary.
#[derive(Debug, Default)]
pub struct Summary<'a> {
    /// Every place that could lend.
    pub places: Vec<PlaceSummary>,
    /// Contexts that exist at exit: GPU and kind (`primary`, `created`).
    pub contexts: Vec<(u32, String)>,
    /// Warnings and errors ([`super::warnings`]).
    pub warnings: u64,
    /// The JSON log ([`super::lasting_file`]).
    pub log_file: Option<&'a Path>,
    /// There is no such file any more.
    pub log_removed: bool,
    /// Bytes of blocks and handles that lay outside their home GPU when they were made, over the life of the process.
    pub spilled: u64,
    /// Bytes of live blocks, and of handles of the program's own, that lie outside their home GPU now, also where they moved there.
    pub far: u64,
    /// What changed places while the program ran.
    pub moved: MovedSummary,
    /// Seconds that kernels are reckoned to have lost by far memory, and since when something was far.
    pub lost: Option<(f64, f64)>,
    /// The most host memory that was pinned, and the most that the program held in it.
    pub pinned: (u64, u64),
    /// Lines of the log that were lost, and why ([`super::lost`]).
    pub lost_lines: Option<(u64, std::io::Error)>,
    /// How often the program was told OUT_OF_MEMORY, and the most bytes that it had asked for then.
    pub refused: (u64, u64),
}

/// Writes the summary if it is wanted: always, never, or (auto) when memory beyond the home GPU was used or something
/// went wrong, so that a program that just fits stays as quiet as it is without us.
pub fn write_summary(when: Switch, summary: &Summary<'_>) {
    let wanted = match when {
        Switch::On => true,
        Switch::Off => false,
        Switch::Auto => summary.spilled > 0 || summary.far > 0 || summary.warnings > 0 || summary.refused.0 > 0,
    };
    if wanted {
        stderr::write(libc::STDERR_FILENO, &render(summary));
    }
}

fn render(summary: &Summary<'_>) -> String {
    let mut text = String::new();
    // Writing into a String cannot fail.
    let mut line = |words: std::fmt::Arguments<'_>| {
        let _ = writeln!(text, "gpupool: {words}");
    };

    let (shown, hidden) = busiest(&summary.places);
    match (shown.is_empty(), summary.spilled) {
        (true, 0) => line(format_args!("no memory was pooled")),
        // A block that lay elsewhere would have been in the pool, and what the limit counts has a peak.
        (true, _) => line(format_args!("no block was pooled, but the program's own handles (cuMemCreate) were placed")),
        (false, _) => {}
    }
    for place in shown {
        let peak = format_size(place.peak_used);
        let limit = place.limit.map(|limit| format!(" of {}", format_size(limit))).unwrap_or_default();
        let unused = place.unused;
        let held = if unused > 0 { format!(", {} held unused", format_size(unused)) } else { String::new() };
        line(format_args!("{:<6} peak {peak:>9}{limit}{held}", place.name));
    }
    if !hidden.is_empty() {
        let peak = hidden.iter().fold(0u64, |sum, place| sum.saturating_add(place.peak_used));
        line(format_args!("{} more places, peaks {} together", hidden.len(), format_size(peak)));
    }
    if summary.spilled + summary.far > 0 {
        let spilled = format_size(summary.spilled);
        // Not a part of the first: what was near when it was allocated may have left since, for others or for a drain.
        let outside = match (summary.spilled, summary.far) {
            (0, far) => {
                format!(
                    "{} in use at the end lay outside the GPU that asked for it, where it moved since",
                    format_size(far)
                )
            }
            (_, far) => {
                let at_the_end = format!("; at the end {} in use did, with what moved since", format_size(far));
                let at_the_end = if far > 0 { at_the_end } else { String::new() };
                format!(
                    "{spilled} of all that was allocated lay outside the GPU that asked for it when it was{at_the_end}"
                )
            }
        };
        let lost = summary.lost.filter(|(lost, _)| *lost >= LEAST_LOST).map_or_else(String::new, |(lost, of)| {
            // Kernels that overlap may lose more together than there was.
            format!("; kernels lost about {:.1} s of {of:.1} s by that", lost.min(of))
        });
        line(format_args!("{outside}{lost}"));
    }
    let MovedSummary { times, came, left, took, saved } = summary.moved;
    if times > 0 {
        let times = if times == 1 { "one move".to_owned() } else { format!("{times} moves") };
        let [came, left] = [came, left].map(format_size);
        let what = if saved < 0.0 { "lost" } else { "saved" };
        let saved = saved.abs();
        line(format_args!(
            "{came} came near and {left} left in {times}, which took {took:.1} s and {what} about {saved:.1} s"
        ));
    }
    let (pinned, requested) = summary.pinned;
    if pinned > 0 {
        line(format_args!(
            "pinned peak {:>9}, of which {} were asked for",
            format_size(pinned),
            format_size(requested)
        ));
    }
    if !summary.contexts.is_empty() {
        line(format_args!("contexts: {}", contexts(&summary.contexts)));
    }
    let (refused, largest) = summary.refused;
    if refused > 0 {
        let times = if refused == 1 { "once".to_owned() } else { format!("{refused} times") };
        let most = if refused == 1 { "for" } else { "at most for" };
        line(format_args!("the program was told OUT_OF_MEMORY {times}, {most} {}", format_size(largest)));
    }
    let warnings = match summary.warnings {
        0 => None,
        1 => Some("1 warning".to_owned()),
        many => Some(format!("{many} warnings")),
    };
    let removed = if summary.log_removed { " (it was removed)" } else { "" };
    let lost = summary
        .lost_lines
        .as_ref()
        .map_or(String::new(), |(lines, why)| format!(" ({lines} lines of it were lost: {why})"));
    match (summary.log_file, warnings) {
        (Some(path), Some(warnings)) => line(format_args!("{warnings}; log: {}{removed}{lost}", one_line(path))),
        (Some(path), None) => line(format_args!("log: {}{removed}{lost}", one_line(path))),
        (None, Some(warnings)) => line(format_args!("{warnings}")),
        (None, None) => {}
    }
    if let Some(path) = summary.log_file.filter(|_| !summary.log_removed) {
        let oom = if refused > 0 { "--oom " } else { "" };
        line(format_args!("next: gpupool report {oom}{}", quoted(path)));
    } else if refused > 0 {
        line(format_args!("next: gpupool run --log FILE, and then gpupool report --oom FILE"));
    }
    text
}

/// The places to show, in their own order, and the rest. Places nothing was ever on are neither.
fn busiest(places: &[PlaceSummary]) -> (Vec<&PlaceSummary>, Vec<&PlaceSummary>) {
    let mut used: Vec<(usize, &PlaceSummary)> =
        places.iter().enumerate().filter(|(_, place)| place.peak_used > 0 || place.unused > 0).collect();
    used.sort_by_key(|(index, place)| (std::cmp::Reverse(place.peak_used), *index));
    let shown = if used.len() > PLACE_LINES { PLACE_LINES - 1 } else { used.len() };
    let hidden = used.split_off(shown);
    used.sort_by_key(|(index, _)| *index);
    (used.into_iter().map(|(_, place)| place).collect(), hidden.into_iter().map(|(_, place)| place).collect())
}

/// `GPU 0 primary, GPU 1 created ×2`, cut short where a process has very many.
fn contexts(contexts: &[(u32, String)]) -> String {
    let mut counts: Vec<(&(u32, String), usize)> = Vec::new();
    for context in contexts {
        match counts.iter_mut().find(|(known, _)| *known == context) {
            Some((_, count)) => *count += 1,
            None => counts.push((context, 1)),
        }
    }
    counts.sort();
    let mut words: Vec<String> = counts
        .iter()
        .map(|((gpu, kind), count)| match count {
            1 => format!("GPU {gpu} {kind}"),
            _ => format!("GPU {gpu} {kind} ×{count}"),
        })
        .collect();
    if words.len() > 8 {
        let more = words.len() - 8;
        words.truncate(8);
        words.push(format!("{more} more"));
    }
    words.join(", ")
}

/// A path in one line.
fn one_line(path: &Path) -> String {
    path.display().to_string().replace('\n', "\u{fffd}")
}

/// A path as a shell takes it.
fn quoted(path: &Path) -> String {
    let path = one_line(path);
    let plain = path.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/._-+:@%".contains(&byte));
    if plain { path } else { format!("'{}'", path.replace('\'', "'\\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(name: &str, peak_used: u64, limit: Option<u64>, unused: u64) -> PlaceSummary {
        PlaceSummary { name: name.to_owned(), peak_used, limit, unused }
    }

    #[test]
    fn a_refusal_is_told_with_what_tells_more() {
        let told = render(&Summary { refused: (3, 5 << 30), ..Summary::default() });
        assert!(told.contains("gpupool: the program was told OUT_OF_MEMORY 3 times, at most for 5.0 GiB\n"), "{told}");
        assert!(
            told.ends_with("gpupool: next: gpupool run --log FILE, and then gpupool report --oom FILE\n"),
            "{told}"
        );
        let log = Some(Path::new("/tmp/a.jsonl"));
        let told = render(&Summary { refused: (1, 5 << 30), log_file: log, ..Summary::default() });
        assert!(told.contains("gpupool: the program was told OUT_OF_MEMORY once, for 5.0 GiB\n"), "{told}");
        assert!(told.ends_with("gpupool: next: gpupool report --oom /tmp/a.jsonl\n"), "{told}");
    }

    #[test]
    fn a_spill_is_told_in_a_few_lines() {
        let summary = Summary {
            places: vec![
                place("gpu0", 31 << 30, Some(31 << 30), 0),
                place("gpu1", 29 << 30, Some(31 << 30), 0),
                place("gpu2", 0, Some(31 << 30), 0),
                place("host0", 1 << 20, None, 2 << 20),
            ],
            contexts: vec![(0, "primary".to_owned()), (1, "created".to_owned()), (1, "created".to_owned())],
            warnings: 1,
            log_file: Some(Path::new("/tmp/a b.jsonl")),
            log_removed: false,
            spilled: 29 << 30,
            far: 26 << 30,
            moved: MovedSummary { times: 12, came: 3 << 30, left: 2 << 30, took: 0.24, saved: 31.0 },
            lost: Some((1.26, 40.0)),
            pinned: (3 << 29, 1 << 30),
            lost_lines: None,
            refused: (0, 0),
        };
        let expected = "\
gpupool: gpu0   peak  31.0 GiB of 31.0 GiB
gpupool: gpu1   peak  29.0 GiB of 31.0 GiB
gpupool: host0  peak   1.0 MiB, 2.0 MiB held unused
gpupool: 29.0 GiB of all that was allocated lay outside the GPU that asked for it when it was; at the end 26.0 GiB in use did, with what moved since; kernels lost about 1.3 s of 40.0 s by that
gpupool: 3.0 GiB came near and 2.0 GiB left in 12 moves, which took 0.2 s and saved about 31.0 s
gpupool: pinned peak   1.5 GiB, of which 1.0 GiB were asked for
gpupool: contexts: GPU 0 primary, GPU 1 created ×2
gpupool: 1 warning; log: /tmp/a b.jsonl
gpupool: next: gpupool report '/tmp/a b.jsonl'
";
        assert_eq!(render(&summary), expected);
    }

    #[test]
    fn a_large_machine_keeps_to_twelve_lines() {
        let summary = Summary {
            places: (0..20)
                .map(|gpu| place(&format!("gpu{gpu}"), (gpu % 5) << 30, None, u64::from(gpu % 5 == 0)))
                .collect(),
            contexts: (0..20).map(|gpu| (gpu, "primary".to_owned())).collect(),
            warnings: 3,
            log_file: Some(Path::new("/tmp/x")),
            log_removed: false,
            spilled: 1,
            far: 1,
            moved: MovedSummary { times: 1, ..MovedSummary::default() },
            lost: Some((9.0, 1.0)),
            pinned: (1, 1),
            lost_lines: None,
            refused: (0, 0),
        };
        let text = render(&summary);
        assert_eq!(text.lines().count(), 12, "{text}");
        assert!(text.contains("gpupool: gpu19  peak   4.0 GiB"), "{text}");
        assert!(text.contains("15 more places"), "{text}");
        assert!(text.contains("GPU 7 primary, 12 more"), "{text}");
    }

    #[test]
    fn a_process_without_pooled_memory_says_so_in_one_line() {
        assert_eq!(render(&Summary::default()), "gpupool: no memory was pooled\n");
        let handles = render(&Summary { spilled: 3 << 20, ..Summary::default() });
        assert!(!handles.contains("no memory") && handles.contains("cuMemCreate"), "{handles}");
        assert!(
            handles.contains("3.0 MiB of all that was allocated lay outside the GPU that asked for it"),
            "{handles}"
        );
    }
}
