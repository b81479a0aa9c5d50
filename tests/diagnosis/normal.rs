//! Takes out of a text what differs from run to run and from machine to machine.

use crate::case::Told;

/// Frames of the C library, of what calls `main`, and of `os.environ`: their number and names differ.
const NOT_OURS: [&str; 3] = ["/libc.so.", "from _start in ", " in __setitem__"];

/// Process ids, times, curves over time, offsets in binaries, the folder of the run, frames that no program of ours has, and
/// the widths of columns.
pub fn normal(text: &str, all: &[&Told]) -> String {
    let mut text = text.to_owned();
    for told in all {
        text = text.replace(&told.folder().display().to_string(), "/tmp/gp-XXXXXX");
    }
    let processes: Vec<String> = all.iter().flat_map(|told| told.processes()).map(|pid| pid.to_string()).collect();
    let mut normal = String::new();
    let mut section = "";
    for line in text.lines() {
        if !line.starts_with(' ') {
            section = line;
        }
        if NOT_OURS.iter().any(|part| line.contains(part)) {
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        let words = words(line, &processes);
        normal.push_str(&line[..indent]);
        normal.push_str(cut(section, &words));
        normal.push('\n');
    }
    normal
}

/// The words of a line with one blank between them; a time is one word, whatever its unit.
fn words(line: &str, processes: &[String]) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in line.split_whitespace() {
        let bare = word.trim_end_matches([',', ';', '.']);
        let end = &word[bare.len()..];
        let number = words.last().is_some_and(|last| last.parse::<f64>().is_ok());
        if number && ["s", "ms", "min", "h"].contains(&bare) {
            words.pop();
            words.push(format!("TIME{end}"));
        } else if processes.iter().any(|pid| pid == bare) {
            words.push(format!("PID{end}"));
        } else if bare.starts_with("libffi.so") || bare.starts_with("_ctypes.") {
            words.push(format!("CTYPES{end}"));
        } else if word.contains('…') && word.contains('/') {
            // A path cut in the middle shows a part of the folder's random name.
            words.push("CUT".to_owned());
        } else if word.chars().all(|drawn| ('▁'..='█').contains(&drawn)) {
            // A curve over time, whose lowest points are blanks.
            if words.last().is_none_or(|last| last != "CURVE") {
                words.push("CURVE".to_owned());
            }
        } else {
            // An estimate, out of measured times.
            if bare == "times" && number && words.iter().rev().nth(1).is_some_and(|before| before == "about") {
                words.pop();
                words.push("COUNT".to_owned());
            }
            words.push(without_offset(word));
        }
    }
    words.join(" ")
}

/// `file+0x12ab,` becomes `file+OFFSET,`.
fn without_offset(word: &str) -> String {
    let Some((object, offset)) = word.split_once("+0x") else { return word.to_owned() };
    format!("{object}+OFFSET{}", offset.trim_start_matches(|digit: char| digit.is_ascii_hexdigit()))
}

/// The last column of two tables holds a path of this machine, or one cut to the room that times leave.
fn cut<'a>(section: &str, line: &'a str) -> &'a str {
    match section {
        section if section.starts_with("Processes") && line.contains(" exit ") => {
            line.find(" exit ").map_or(line, |at| &line[..at + 5])
        }
        section if section.starts_with("Lines that took") => line.find(" TIME ").map_or(line, |at| &line[..at]),
        _ => line,
    }
}

#[test]
fn what_varies_is_replaced_and_nothing_else() {
    let said = "  pid 17    17  pool  5 ms  exit  /tmp/x\n     from main in /tmp/y+0x1f;  523.0 MiB at 0.1 s, call 117";
    let words: Vec<String> = said.lines().map(|line| words(line, &["17".to_owned()])).collect();
    assert_eq!(words, ["pid PID PID pool TIME exit /tmp/x", "from main in /tmp/y+OFFSET; 523.0 MiB at TIME, call 117"]);
    assert_eq!(cut("Processes, with times", &words[0]), "pid PID PID pool TIME exit");
    assert_eq!(cut("Contexts", &words[0]), words[0]);
}

#[test]
fn what_depends_on_the_machine_is_replaced() {
    assert_eq!(words("it reads 2 MiB about 3000 times, 5 times", &[]), "it reads 2 MiB about COUNT times, 5 times");
}
