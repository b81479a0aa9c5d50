//! Text for people: 80 columns, or those of a narrower terminal, colours where they are wanted, nothing from a log that a terminal would obey.

use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// What lines keep to where nobody is known to have less.
pub const WIDTH: usize = 80;
/// Below this, words would be cut rather than wrapped.
const NARROWEST: usize = 40;

/// What every line keeps to: the columns of the terminal on stdout where it is narrower than [`WIDTH`].
pub fn width() -> usize {
    static FOUND: OnceLock<usize> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let mut size = MaybeUninit::<libc::winsize>::zeroed();
        // SAFETY: the kernel fills `size`, which lives across the call, or leaves its zeros.
        let answer = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, size.as_mut_ptr()) };
        // SAFETY: zeros are a value of this type, which is four numbers.
        let size = unsafe { size.assume_init() };
        match usize::from(size.ws_col) {
            // No terminal, or one that does not know.
            columns if answer != 0 || columns == 0 => WIDTH,
            columns => columns.clamp(NARROWEST, WIDTH),
        }
    })
}

/// Whether colours may be used on stdout: a terminal, and `NO_COLOR` unset or empty.
pub fn colours() -> bool {
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    io::stdout().is_terminal() && !unwanted && !dumb
}

/// What every column of a table may have.
const LEAST: usize = 8;

/// A text that grows line by line.
pub struct Page {
    text: String,
    colours: bool,
}

impl Page {
    /// An empty page.
    pub fn new(colours: bool) -> Page {
        Page { text: String::new(), colours }
    }

    /// What was written.
    pub fn into_text(self) -> String {
        self.text
    }

    /// A line by itself, above which there is an empty one unless the page is empty.
    pub fn heading(&mut self, words: &str) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        let lines = if columns(words) <= width() { vec![words.to_owned()] } else { wrap(words, width()) };
        for line in lines {
            let line = self.paint("1", &line);
            self.line(&line);
        }
    }

    /// A line, as it is.
    pub fn line(&mut self, words: &str) {
        self.text.push_str(words.trim_end());
        self.text.push('\n');
    }

    /// Writes an entry with its label in a colour; see [`Page::entry`].
    pub fn entry_in(&mut self, colour: &str, label: &str, words: &str) {
        let painted = label.replace(label.trim(), &self.paint(colour, label.trim()));
        let before = self.text.len();
        self.entry(label, words);
        if self.text[before..].starts_with(label) {
            self.text.replace_range(before..before + label.len(), &painted);
        }
    }

    /// Paragraphs of at most 78 columns, as they are; on a narrower terminal wrapped anew, except for lines that are indented.
    pub fn text(&mut self, text: &str) {
        if width() == WIDTH {
            return text.lines().for_each(|line| self.line(line));
        }
        for paragraph in text.split("\n\n") {
            if paragraph.starts_with(' ') {
                paragraph.lines().for_each(|line| self.line(line));
            } else {
                wrap(paragraph, width()).iter().for_each(|line| self.line(line));
            }
            self.line("");
        }
        self.text.truncate(self.text.trim_end().len());
        self.text.push('\n');
    }

    /// `label` and, beside it, words that go on below themselves.
    pub fn entry(&mut self, label: &str, words: &str) {
        let indent = columns(label);
        let room = width().saturating_sub(indent);
        // Beside a long label there is no room for words: they go below it.
        if room < LEAST * 2 {
            self.line(label);
            for line in wrap(&clean(words), width() - LEAST) {
                self.line(&format!("{:LEAST$}{line}", ""));
            }
            return;
        }
        for (number, line) in wrap(&clean(words), room).iter().enumerate() {
            let before = if number == 0 { label.to_owned() } else { " ".repeat(indent) };
            self.line(&format!("{before}{line}"));
        }
    }

    /// `words` in a colour (the number of an SGR sequence), where colours are wanted.
    pub fn paint(&self, colour: &str, words: &str) -> String {
        if self.colours { format!("\x1b[{colour}m{words}\x1b[0m") } else { words.to_owned() }
    }

    /// Rows under their headings; see [`Table`].
    pub fn table(&mut self, table: &Table) {
        if !table.fits() {
            return self.stacked(table);
        }
        let widths = table.widths();
        let heading = table.line(&widths, table.headings);
        let heading = self.paint("2", heading.trim_end());
        self.line(&heading);
        for row in &table.rows {
            let cells: Vec<&str> = row.cells.iter().map(String::as_str).collect();
            let line = table.line(&widths, &cells);
            self.line(&line);
            for below in &row.below {
                let indent = table.indent_below;
                self.line(&format!("{:indent$}{}", "", shorten(&clean(below), width() - indent)));
            }
        }
    }

    /// A table that is wider than the terminal: each row as lines of heading and cell, its first cell to the left of the others.
    fn stacked(&mut self, table: &Table) {
        let widest = table.headings.iter().map(|heading| columns(heading)).max().unwrap_or(0);
        for row in &table.rows {
            for (number, (heading, cell)) in table.headings.iter().zip(&row.cells).enumerate() {
                let indent = if number == 0 { "  " } else { "    " };
                let label = format!("{indent}{heading:widest$}  ");
                let cell = shorten(cell, width().saturating_sub(columns(&label)).max(LEAST));
                self.line(&format!("{label}{cell}"));
            }
            for below in &row.below {
                self.line(&format!("    {}", shorten(&clean(below), width() - 4)));
            }
        }
    }
}

/// A table that keeps to [`width`]: each column is as wide as its widest cell, and the last one gets what is left, its
/// cells shortened in the middle.
pub struct Table {
    headings: &'static [&'static str],
    /// One letter a column: `r` for numbers, `l` for words.
    alignment: &'static [u8],
    indent_below: usize,
    rows: Vec<Cells>,
}

struct Cells {
    cells: Vec<String>,
    below: Vec<String>,
}

impl Table {
    /// A table without rows.
    pub fn new(headings: &'static [&'static str], alignment: &'static [u8], indent_below: usize) -> Table {
        Table { headings, alignment, indent_below, rows: Vec::new() }
    }

    /// Adds a row, with lines that belong to it and run under all columns.
    pub fn row(&mut self, cells: Vec<String>, below: Vec<String>) {
        self.rows.push(Cells { cells: cells.iter().map(|cell| clean(cell)).collect(), below });
    }

    /// Whether there is room for the columns, the last of which may be shortened. On a terminal of the usual width there is taken
    /// to be.
    fn fits(&self) -> bool {
        let Some((_, others)) = self.headings.split_last() else { return true };
        let widest = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.cells.get(column)).map(|cell| columns(cell));
            cells.chain([columns(self.headings[column])]).max().unwrap_or(0)
        };
        let taken: usize = (0..others.len()).map(|column| widest(column) + 2).sum();
        width() == WIDTH || taken + 2 + LEAST * 2 <= width()
    }

    fn widths(&self) -> Vec<usize> {
        let mut widths: Vec<usize> = self.headings.iter().map(|heading| columns(heading)).collect();
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(&row.cells) {
                *width = columns(cell).max(*width);
            }
        }
        if let Some((last, others)) = widths.split_last_mut() {
            let taken = |others: &[usize]| 2 + others.iter().map(|width| width + 2).sum::<usize>();
            // Names as long as that are nobody's; the widest gives way, so that the last column is still there. A number does not: of one that is cut nobody sees what it was.
            let gives_way = |column: usize| self.alignment.get(column) != Some(&b'r');
            let is_name = gives_way(self.headings.len() - 1);
            let least = if is_name { LEAST } else { *last };
            while taken(others) + least > width()
                && let Some((_, widest)) = others
                    .iter_mut()
                    .enumerate()
                    .filter(|(column, width)| gives_way(*column) && **width > LEAST)
                    .max_by_key(|(_, width)| **width)
            {
                *widest -= 1;
            }
            if is_name {
                *last = (*last).min(width().saturating_sub(taken(others)).max(LEAST));
            }
        }
        widths
    }

    fn line(&self, widths: &[usize], cells: &[&str]) -> String {
        let mut line = String::new();
        for ((cell, width), alignment) in cells.iter().zip(widths).zip(self.alignment) {
            let cell = shorten(cell, *width);
            let space = " ".repeat(width.saturating_sub(columns(&cell)));
            line.push_str("  ");
            line.push_str(&if *alignment == b'r' { space + &cell } else { cell + &space });
        }
        line
    }
}

/// Columns that a terminal gives `text`.
pub fn columns(text: &str) -> usize {
    UnicodeWidthStr::width(text)
}

/// `text` without control characters: a path or message from a log must not move the cursor.
pub fn clean(text: &str) -> String {
    let printable = |c: char| if c.is_control() || is_direction(c) { char::REPLACEMENT_CHARACTER } else { c };
    text.chars().map(printable).collect()
}

/// JSON with an escape for each character of a text that a terminal obeys or that reorders what stands around it. serde_json has them for
/// those below U+0020 alone, and a terminal takes U+009B for the beginning of a command as well.
pub fn clean_json(json: &str) -> String {
    let mut clean = String::with_capacity(json.len());
    for c in json.chars() {
        if (c.is_control() && c != '\n') || is_direction(c) {
            let _ = write!(clean, "\\u{:04x}", u32::from(c));
        } else {
            clean.push(c);
        }
    }
    clean
}

/// Characters that reorder what stands around them.
fn is_direction(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// `text` in at most `width` columns, its middle left out: the ends of a path say most.
pub fn shorten(text: &str, width: usize) -> String {
    if columns(text) <= width {
        return text.to_owned();
    }
    let Some(room) = width.checked_sub(1) else { return String::new() };
    // The end says more than the beginning: the file, the line, the function.
    let (head, _) = split_at_column(text.chars(), room / 3);
    let head: String = head.into_iter().collect();
    let (tail, _) = split_at_column(text.chars().rev(), room - columns(&head));
    let tail: String = tail.into_iter().rev().collect();
    format!("{head}…{tail}")
}

fn split_at_column(chars: impl Iterator<Item = char>, room: usize) -> (Vec<char>, usize) {
    let mut taken = (Vec::new(), 0);
    for c in chars {
        let width = c.width().unwrap_or(0);
        if taken.1 + width > room {
            break;
        }
        taken.0.push(c);
        taken.1 += width;
    }
    taken
}

/// `parts` behind `label`, in lines of at most `width` columns that are broken between parts; one that is longer than a line is broken at spaces as well, but for those behind a number.
pub fn list(label: &str, parts: &[String], width: usize) -> Vec<String> {
    let mut lines = vec![label.to_owned()];
    let room = width.saturating_sub(columns(label));
    for (number, part) in parts.iter().enumerate() {
        let part = if number + 1 < parts.len() { format!("{part},") } else { part.clone() };
        let pieces = if columns(&part) <= room { vec![part] } else { pieces(&part) };
        for piece in pieces {
            match lines.last_mut() {
                Some(line) if line == label => line.push_str(&piece),
                Some(line) if columns(line) + 1 + columns(&piece) <= width => {
                    line.push(' ');
                    line.push_str(&piece);
                }
                _ => lines.push(format!("{:1$}{piece}", "", columns(label))),
            }
        }
    }
    lines
}

/// The words of a part, each number with what it counts.
fn pieces(part: &str) -> Vec<String> {
    let is_number = |piece: &String| piece.starts_with(|first: char| first.is_ascii_digit()) && !piece.contains(' ');
    let mut all: Vec<String> = Vec::new();
    for word in part.split_whitespace() {
        match all.last_mut() {
            Some(last) if is_number(last) => *last = format!("{last} {word}"),
            _ => all.push(word.to_owned()),
        }
    }
    all
}

/// `text` in lines of at most `width` columns, broken at spaces; a word that is longer is shortened.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let word = shorten(word, width);
        match lines.last_mut() {
            Some(line) if line.is_empty() => *line = word,
            Some(line) if columns(line) + 1 + columns(&word) <= width => {
                line.push(' ');
                line.push_str(&word);
            }
            _ => lines.push(word),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_a_long_path_is_left_out() {
        assert_eq!(shorten("/a/b.py:3 in f", 20), "/a/b.py:3 in f");
        assert_eq!(shorten("/home/somebody/projects/training/train.py:3 in f", 31), "/home/some…ning/train.py:3 in f");
        for width in 1..40 {
            assert!(columns(&shorten("/データ/訓練/長い名前のファイル.py:12 in 主", width)) <= width);
        }
    }

    #[test]
    fn lines_break_at_spaces_and_keep_their_width() {
        assert_eq!(wrap("one two  three", 8), ["one two", "three"]);
        assert_eq!(wrap("", 8), [""]);
        assert_eq!(wrap("a/very/long/word x", 8), ["a/…/word", "x"]);
    }

    #[test]
    fn what_a_terminal_would_obey_is_replaced() {
        assert_eq!(clean("a\x1b[31m\n\u{202e}b"), "a\u{fffd}[31m\u{fffd}\u{fffd}b");
    }

    #[test]
    fn a_table_keeps_to_its_width() {
        let mut table = Table::new(&["number", "where"], b"rl", 4);
        table.row(vec!["7".to_owned(), "x".repeat(200)], vec!["y".repeat(200)]);
        let mut page = Page::new(false);
        page.table(&table);
        let text = page.into_text();
        assert!(text.lines().all(|line| columns(line) <= WIDTH), "{text}");
        assert!(text.starts_with("  number  where\n       7  xxx"), "{text}");
    }

    #[test]
    fn no_number_is_cut_however_wide_the_columns_are() {
        let mut table = Table::new(&["pid", "state", "mode", "held", "used"], b"rllrr", 4);
        let numbers = ["4194304", "1023.9 GiB", "1023.8 GiB"];
        let [pid, held, used] = numbers.map(str::to_owned);
        table.row(vec![pid, "s".repeat(60), "m".repeat(60), held, used], Vec::new());
        let mut page = Page::new(false);
        page.table(&table);
        let text = page.into_text();
        assert!(numbers.iter().all(|number| text.contains(number)), "{text}");
        assert!(text.lines().all(|line| columns(line) <= WIDTH), "{text}");
    }

    #[test]
    fn a_list_is_broken_between_its_parts() {
        let parts = ["gpu0 120.0 MiB", "gpu1 80.0 MiB", "host0 40.0 MiB"].map(str::to_owned);
        assert_eq!(list("far: ", &parts, 36), ["far: gpu0 120.0 MiB, gpu1 80.0 MiB,", "     host0 40.0 MiB"]);
        assert_eq!(list("", &parts[..1], 4), ["gpu0", "120.0 MiB"]);
        let lent = "56.0 MiB of gpu1 to process 14931 (the same that process 14935 lends)".to_owned();
        let lines = [
            "lends: 56.0 MiB of gpu1 to process 14931 (the",
            "       same that process 14935 lends),",
            "       gpu0 120.0 MiB",
        ];
        assert_eq!(list("lends: ", &[lent, parts[0].clone()], 48), lines);
    }

    #[test]
    fn colours_are_only_there_when_wanted() {
        assert_eq!(Page::new(false).paint("1", "x"), "x");
        assert_eq!(Page::new(true).paint("1", "x"), "\x1b[1mx\x1b[0m");
    }
}
