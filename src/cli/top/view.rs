//! How it looks, on any width from [`NARROWEST`]. All text that is a program's own passes through [`clean`].

use std::collections::BTreeMap;

use gpupool_config::format_size;
use gpupool_metrics::{Context, Counter, Finding, Label, Life, Place, Snapshot};
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Clear, Paragraph, Row, StatefulWidget, Table, TableState, Widget};

use super::rates::Rates;
use super::state::{Screen, Shown, State};
use crate::terminal::{self, clean, columns, shorten, wrap};
use crate::words;

/// Columns that there should be. On fewer, lines are cut off at their ends.
pub const NARROWEST: u16 = 60;
/// Findings below the list.
const FINDINGS: usize = 5;
/// What stands in front of a bar, with the space behind it. UUIDs have more, as far as the bar can spare it.
const NAME: usize = 12;
/// A UUID as NVIDIA writes it, with a GPU's number in front of it, and the space behind it.
const UUID: usize = 50;
/// What a bar keeps beside a UUID.
const SHORTEST: usize = 14;

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);

/// A style with a colour where colours are wanted.
fn coloured(state: &State, colour: Color) -> Style {
    if state.colours() { Style::new().fg(colour) } else { Style::new() }
}

/// Draws what is to be seen now.
pub fn draw(state: &mut State, area: Rect, buffer: &mut Buffer) {
    match state.screen() {
        Screen::List => list(state, area, buffer, true),
        Screen::Help => help(area, buffer),
        Screen::Details { .. } => {
            let [body, foot] = Layout::vertical([Constraint::Min(0), Constraint::Length(1)]).areas(area);
            let Some(row) = state.chosen_row() else { return };
            let lines = details(state, row, usize::from(area.width));
            state.scroll_at_most(lines.len().saturating_sub(usize::from(body.height)));
            let Screen::Details { scrolled } = state.screen() else { return };
            let rest: Vec<Line<'_>> = lines.into_iter().skip(scrolled).collect();
            Paragraph::new(rest).render(body, buffer);
            Line::styled("q leave  Esc list  ↑↓ scroll  ? keys", DIM).render(foot, buffer);
        }
    }
}

/// Lines that [`list`] needs so that nothing is left out, without keys.
pub fn height(state: &State) -> u16 {
    let rows = state.visible().len().max(1);
    Parts { machine: places(state).len(), rows: rows + 1, found: found(state).len() }.height()
}

/// How many lines the parts of the list have.
#[derive(Clone, Copy, Debug)]
struct Parts {
    machine: usize,
    /// The processes, with their headings.
    rows: usize,
    found: usize,
}

impl Parts {
    /// With the heading above them, and an empty line behind the machine and in front of findings.
    fn height(self) -> u16 {
        let empty = usize::from(self.machine > 0) + usize::from(self.found > 0);
        u16::try_from(1 + self.machine + self.rows + self.found + empty).unwrap_or(u16::MAX)
    }

    /// What of it is shown in so many lines: some processes, and the other parts where they fit whole beside these.
    fn within(self, height: u16) -> Self {
        const SOME: usize = 6;
        let rows = self.rows.min(SOME);
        let fits = |parts: &Self| Self { rows, ..*parts }.height() <= height;
        let without = [self, Self { found: 0, ..self }, Self { machine: 0, found: 0, ..self }];
        without.into_iter().find(fits).unwrap_or(without[2])
    }
}

/// The machine, the processes, what was found, and the keys where they are wanted.
pub fn list(state: &State, area: Rect, buffer: &mut Buffer, with_keys: bool) {
    let [area, keys] = Layout::vertical([Constraint::Min(0), Constraint::Length(u16::from(with_keys))]).areas(area);
    foot(state).render(keys, buffer);
    let (places, found) = (places(state), found(state));
    let rows = state.visible().len().max(1) + 1;
    let parts = Parts { machine: places.len(), rows, found: found.len() }.within(area.height);
    let lines = |lines: usize| Constraint::Length(u16::try_from(lines).unwrap_or(u16::MAX));
    let [top, machine, _, processes, _, below] = Layout::vertical([
        lines(1),
        lines(parts.machine),
        lines(usize::from(parts.machine > 0)),
        Constraint::Min(1),
        lines(usize::from(parts.found > 0)),
        lines(parts.found),
    ])
    .areas(area);
    let width = usize::from(area.width);
    heading(state, width).render(top, buffer);
    let bars: Vec<Bar> = places.iter().map(|place| place.bar(width >= WIDE)).collect();
    Paragraph::new(bar_lines(state, &bars, width)).render(machine, buffer);
    self::processes(state, processes, buffer);
    Paragraph::new(found).render(below, buffer);
}

fn heading(state: &State, width: usize) -> Line<'static> {
    let count = state.rows().len();
    let shown = state.visible().len();
    let count =
        if shown == count { words::count(count as u64, "process", "processes") } else { format!("{shown} of {count}") };
    let (sort, turned) = state.order();
    let mut parts = vec![
        format!("gpupool top on {}", shorten(&clean(state.host()), 20)),
        count,
        format!("by {}{}", sort.word(), if turned { " (turned)" } else { "" }),
    ];
    if state.skipped() > 0 {
        parts.push(words::count(state.skipped() as u64, "page not read", "pages not read"));
    }
    if !state.filter().0.is_empty() {
        parts.push(format!("with \"{}\"", clean(state.filter().0)));
    }
    Line::styled(shorten(&parts.join(", "), width), BOLD)
}

fn foot(state: &State) -> Line<'static> {
    let (filter, is_written) = state.filter();
    if is_written {
        return Line::from(format!("only with: {}▏  Enter keeps it, Esc does not", clean(filter)));
    }
    Line::styled("q leave  ↑↓ choose  Enter details  s sort  r turn  / filter  ?", DIM)
}

/// What all processes have in one place.
struct Machine {
    name: String,
    used: u64,
    held: u64,
    /// Beside what is held.
    own: u64,
    /// The memory of a GPU, and where that is not known, as of the host, what all processes may take together: of the host no more
    /// than it has.
    of: u64,
}

/// Where memory can be: a disk is no place once what was on it is back.
fn is_there(place: &&Place) -> bool {
    !place.on_disk || place.held.max(place.used).max(place.own) > 0
}

/// Places of the machine: GPUs by what they are, since each program may number them in its own way. Where they do so, no number names
/// one GPU, not even one that only a single program sees: then all of them have the machine's numbers and their UUIDs here, as in `gpupool ps`.
fn places(state: &State) -> Vec<Machine> {
    let by_uuid = state.numbers().are_others(state.rows().iter().map(Shown::told));
    let mut merged: BTreeMap<(bool, String), Machine> = BTreeMap::new();
    for row in state.rows() {
        let levels = &row.told().levels;
        for place in levels.places.rows.iter().filter(is_there) {
            let gpu = levels.gpu(place.number).filter(|_| place.is_gpu());
            // Without its UUID nobody knows which GPU a number is: those of one number are taken for one.
            let uuid = gpu.filter(|gpu| by_uuid && gpu.uuid_text().is_some());
            let name = uuid.map_or_else(|| place.name(), |gpu| state.numbers().name(&gpu.uuid));
            let empty = Machine { name: name.clone(), used: 0, held: 0, own: 0, of: 0 };
            let machine = merged.entry((!place.is_gpu(), name)).or_insert(empty);
            machine.used = machine.used.saturating_add(place.used);
            machine.held = machine.held.saturating_add(place.held);
            machine.own = machine.own.saturating_add(place.own);
            machine.of = match gpu {
                Some(gpu) => machine.of.max(gpu.total),
                None => machine.of.saturating_add(place.limit),
            };
            // Each process may take its limit as long as the others do not, so that the sum may be more than there is.
            if let Some(installed) = state.host_memory().filter(|_| place.on_host) {
                machine.of = machine.of.min(installed);
            }
        }
    }
    let mut places: Vec<Machine> = merged.into_values().collect();
    places.sort_by(|one, other| {
        let kind = |name: &str| ["host", "disk"].iter().position(|kind| name.starts_with(kind)).map_or(0, |at| 1 + at);
        let rank = |name: &str| (kind(name), name.len(), name.to_owned());
        rank(&one.name).cmp(&rank(&other.name))
    });
    places
}

impl Machine {
    fn bar(&self, wide: bool) -> Bar {
        let own = if wide && self.own > 0 { format!(", {} of programs", format_size(self.own)) } else { String::new() };
        let held = if wide { format!(" used, {} held", format_size(self.held)) } else { String::new() };
        Bar {
            name: self.name.clone(),
            used: self.used,
            held: self.held,
            own: self.own,
            of: self.of,
            words: format!("{}{held}{own} of {}", format_size(self.used), format_size(self.of)),
        }
    }
}

/// From so many columns on there are more words beside a bar.
const WIDE: usize = 100;

/// What is used, held and made by programs, of how much.
struct Bar {
    name: String,
    used: u64,
    held: u64,
    own: u64,
    of: u64,
    words: String,
}

impl Bar {
    fn line(&self, state: &State, name: usize, length: usize) -> Line<'static> {
        let taken = self.held.max(self.used).saturating_add(self.own);
        let cells = |bytes: u64| {
            let cells = (bytes as f64 / self.of.max(1) as f64 * length as f64).round() as usize;
            // What there is a little of is seen.
            if bytes > 0 { cells.clamp(1, length) } else { 0 }
        };
        let used = cells(self.used);
        let held = cells(self.held).max(used);
        let all = cells(taken).max(held);
        let is_full = self.of > 0 && taken as f64 >= self.of as f64 * 0.97;
        let colour = coloured(state, if is_full { Color::Red } else { Color::Green });
        Line::from(vec![
            Span::raw(format!("{:<name$}", shorten(&self.name, name - 1))),
            Span::styled("█".repeat(used), colour),
            Span::styled("▒".repeat(held - used), colour),
            Span::styled("▓".repeat(all - held), coloured(state, Color::Blue)),
            Span::styled("·".repeat(length - all), DIM),
            Span::raw(format!("  {}", self.words)),
        ])
    }
}

/// Bars of one length, with what stands beside them.
fn bar_lines(state: &State, bars: &[Bar], width: usize) -> Vec<Line<'static>> {
    let words = bars.iter().map(|bar| columns(&bar.words)).max().unwrap_or(0);
    let names = bars.iter().map(|bar| columns(&bar.name)).max().unwrap_or(0);
    // A UUID is what ps and nvidia-smi -L have as well, so it is cut in its middle only where the bar would all but vanish.
    let most = width.saturating_sub(2 + words + SHORTEST);
    let name = (names + 1).clamp(NAME, most.clamp(NAME, UUID));
    let length = width.saturating_sub(name + 2 + words).max(4);
    bars.iter().map(|bar| bar.line(state, name, length)).collect()
}

/// One column of the list.
struct Column {
    heading: &'static str,
    width: u16,
    /// Shown from so many columns of the terminal on.
    from: u16,
    cell: fn(&Shown) -> String,
}

/// Behind the others: how many contexts there are, and the name, which takes what is left.
const CONTEXTS: u16 = 4;
const LEAST: u16 = 8;

const COLUMNS: [Column; 11] = [
    Column { heading: "pid", width: 7, from: 0, cell: |row| row.pid().to_string() },
    Column {
        heading: "rank",
        width: 4,
        from: 80,
        cell: |row| row.told().process.rank.map_or(String::new(), |r| r.to_string()),
    },
    Column { heading: "state", width: 9, from: 100, cell: |row| row.listed.word().to_owned() },
    Column { heading: "mode", width: 7, from: 130, cell: |row| clean(&row.told().levels.mode) },
    Column { heading: "used", width: 10, from: 0, cell: |row| format_size(row.listed.used()) },
    Column { heading: "held", width: 10, from: 80, cell: |row| format_size(row.listed.held()) },
    Column { heading: "far", width: 10, from: 0, cell: |row| size_or_none(row.far()) },
    Column {
        heading: "moved/s",
        width: 10,
        from: 0,
        cell: |row| rate(row.rates, |rates| size_or_none(rates.moved() as u64)),
    },
    Column {
        heading: "moves/s",
        width: 7,
        from: 130,
        cell: |row| rate(row.rates, |rates| number_or_none(rates.moves)),
    },
    Column { heading: "lost", width: 5, from: 130, cell: |row| rate(row.rates, |rates| part_or_none(rates.lost)) },
    Column { heading: "pinned", width: 10, from: 100, cell: |row| size_or_none(row.told().levels.pinned.pinned) },
];

fn rate(rates: Option<Rates>, word: impl Fn(Rates) -> String) -> String {
    rates.map_or("?".to_owned(), word)
}

fn size_or_none(bytes: u64) -> String {
    if bytes == 0 { "-".to_owned() } else { format_size(bytes) }
}

fn number_or_none(number: f64) -> String {
    if number == 0.0 { "-".to_owned() } else { format!("{number:.1}") }
}

fn part_or_none(part: f64) -> String {
    if part < 0.0005 { "-".to_owned() } else { format!("{:.1}%", (part * 100.0).min(999.0)) }
}

/// Contexts that live; with a mark if some of them were not used so far.
fn contexts(told: &Snapshot) -> String {
    let count = told.contexts.rows.len() as u64 + u64::from(told.contexts.more);
    format!("{count}{}", if told.contexts.rows.iter().any(Context::is_unused) { "!" } else { "" })
}

fn processes(state: &State, area: Rect, buffer: &mut Buffer) {
    let columns: Vec<&Column> = COLUMNS.iter().filter(|column| column.from <= area.width).collect();
    let has_state = columns.iter().any(|column| column.heading == "state");
    // A number that is cut off at its end would be another number.
    let right = |text: String, width: u16| {
        let width = usize::from(width);
        format!("{:>width$}", shorten(&text, width))
    };
    let taken: u16 = columns.iter().map(|column| column.width + 1).sum();
    let room = usize::from(area.width.saturating_sub(taken + CONTEXTS + 1).max(LEAST));
    let name = |row: &Shown| {
        let name = clean(&row.told().process.name);
        let word = row.listed.word();
        // In front, where no name is so long that nobody sees it.
        let mark = if has_state || word == Life::Running.word() { String::new() } else { format!("({word}) ") };
        format!("{mark}{}", shorten(&name, room.saturating_sub(terminal::columns(&mark))))
    };
    let visible = state.visible();
    let rows = visible.iter().map(|row| {
        let cells = columns.iter().map(|column| right((column.cell)(row), column.width));
        let cells = cells.chain([right(contexts(row.told()), CONTEXTS), name(row)]);
        let style = if row.listed.word() == Life::Running.word() { Style::new() } else { DIM };
        Row::new(cells).style(style)
    });
    let headings = columns.iter().map(|column| right(column.heading.to_owned(), column.width));
    let headings = headings.chain([right("ctx".to_owned(), CONTEXTS), "name".to_owned()]);
    let widths = columns.iter().map(|column| Constraint::Length(column.width));
    let widths = widths.chain([Constraint::Length(CONTEXTS), Constraint::Min(LEAST)]);
    let table = Table::new(rows, widths)
        .header(Row::new(headings).style(BOLD))
        .column_spacing(1)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut chosen = TableState::default().with_selected(state.chosen());
    StatefulWidget::render(table, area, buffer, &mut chosen);
    if visible.is_empty() {
        let below = Rect { y: area.y + 1, height: area.height.saturating_sub(1), ..area };
        let words = match state.rows().is_empty() {
            true => format!("no process runs under gpupool ({} hides it)", words::UNSEEN),
            false => "no process has that in it".to_owned(),
        };
        Line::raw(words).render(below.intersection(buffer.area), buffer);
    }
}

/// The last findings, in a line each.
fn found(state: &State) -> Vec<Line<'static>> {
    let findings = state.findings();
    let last = findings.len().saturating_sub(FINDINGS);
    findings[last..].iter().map(|(row, finding)| finding_line(state, finding, Some(row))).collect()
}

fn finding_line(state: &State, finding: &Finding, of: Option<&Shown>) -> Line<'static> {
    let ago = words::time(state.now().saturating_sub(finding.at) as f64 / 1e6);
    let of = of.map_or(String::new(), |row| format!("pid {}, ", row.pid()));
    Line::from(vec![
        Span::styled(clean(&finding.code), coloured(state, Color::Yellow)),
        Span::raw(format!("  {of}{ago} ago: {}", clean(&finding.text))),
    ])
}

const KEYS: &[(&str, &str)] = &[
    ("↑ ↓  k j", "choose a process; PgUp PgDn by ten, Home End"),
    ("Enter  l", "all that the chosen process tells; Esc back"),
    ("s", "by used, held, far, moved, pinned, pid, name"),
    ("r", "turn the order"),
    ("/", "only those with a text in name, command or pid"),
    ("Esc", "all processes again"),
    ("q  Ctrl-C", "leave"),
];

const SIGNS: &[&str] = &[
    "█ in use  ▒ held and free  ▓ made by programs  · the rest",
    "used: also what programs made; far: of that, elsewhere",
    "moved/s: bytes that came near or left",
    "lost: the part of the time that far memory costs kernels",
    "ctx: CUDA contexts; ! where one was not used so far",
    "?: nothing to compare with before the second look",
];

fn help(area: Rect, buffer: &mut Buffer) {
    Clear.render(area, buffer);
    let mut lines = vec![Line::styled("Keys", BOLD)];
    lines.extend(KEYS.iter().map(|(key, does)| Line::raw(format!("  {key:<11}{does}"))));
    lines.extend([Line::raw(""), Line::styled("Signs", BOLD)]);
    lines.extend(SIGNS.iter().map(|sign| Line::raw(format!("  {sign}"))));
    lines.extend([Line::raw(""), Line::styled("any key: back", DIM)]);
    Paragraph::new(lines).render(area, buffer);
}

/// All that a process tells.
fn details(state: &State, row: &Shown, width: usize) -> Vec<Line<'static>> {
    let told = row.told();
    let mut lines = Lines { lines: Vec::new(), width };
    let process = &told.process;
    let rank = match (process.rank, process.world) {
        (Some(rank), Some(world)) => format!(", rank {rank} of {world}"),
        (Some(rank), None) => format!(", rank {rank}"),
        _ => String::new(),
    };
    let since = words::time(state.now().saturating_sub(process.created) as f64 / 1e6);
    lines.heading(&format!("pid {}, {}{rank}", process.identity.pid, clean(&process.name)));
    let (life, mode) = (row.listed.word(), clean(&told.levels.mode));
    lines.text(&format!(
        "{life}, mode {mode}, user {}, first allocation {since} ago, gpupool {}",
        row.listed.owner,
        clean(&process.library)
    ));
    lines.text(&clean(&process.command));
    lines.heading("Memory by place");
    let places: Vec<&Place> = told.levels.places.rows.iter().filter(is_there).collect();
    let bars: Vec<Bar> = places.iter().map(|place| bar_of(place, width >= WIDE)).collect();
    for (place, bar) in places.iter().zip(bar_lines(state, &bars, width)) {
        lines.lines.push(bar);
        let more = [
            ("anchored", place.anchored),
            ("of the program's own", place.own),
            ("at most used", place.peak_used),
            ("stay free", place.reserve),
        ];
        let more =
            more.iter().filter(|(_, bytes)| *bytes > 0).map(|(what, bytes)| format!("{} {what}", format_size(*bytes)));
        lines.entry("", &more.collect::<Vec<_>>().join(", "));
    }
    lines.heading("Far memory and moves");
    let residence = &told.levels.residence;
    let places = [(residence.near, "near"), (residence.on_peers, "on other GPUs"), (residence.on_host, "on the host")];
    let lies = places.map(|(bytes, place)| format!("{} {place}", format_size(bytes))).join(", ");
    lines.entry("lies", &lies);
    for loan in &told.levels.loans.rows {
        let (gpu, bytes, place) = (loan.borrower, format_size(loan.bytes), loan.lender());
        // The host lends nobody's memory.
        let what = if loan.on_host {
            format!("gpu{gpu} has {bytes} on {place}")
        } else {
            format!("gpu{gpu} borrows {bytes} of {place}")
        };
        lines.entry("", &what);
    }
    lines.more(told.levels.loans.more);
    let lost = words::time(residence.lost_microseconds as f64 / 1e6);
    let read = format_size(told.counter(Counter::FarReadBytes));
    lines.entry("lost", &format!("{lost} of kernels' time so far, by reading {read} over links, estimated"));
    if let Some(rates) = row.rates {
        let size = |bytes: f64| format_size(bytes as u64);
        lines.entry(
            "a second",
            &format!(
                "{} came, {} left in {:.1} moves, {:.1} % of the time lost",
                size(rates.came),
                size(rates.left),
                rates.moves,
                rates.lost * 100.0
            ),
        );
    }
    lines.heading(&format!("Contexts: {}", told.contexts.rows.len() as u64 + u64::from(told.contexts.more)));
    for context in &told.contexts.rows {
        let cost = context.cost.map_or("cost unknown".to_owned(), format_size);
        let uses = if context.is_unused() {
            "not used so far".to_owned()
        } else {
            format!("{} launches, {} copies, {} allocations", context.launches, context.copies, context.allocations)
        };
        lines.entry(&format!("gpu{}", context.device), &format!("{}, {cost}, {uses}", clean(&context.kind)));
        lines.entry("", &format!("{} at {}", clean(&context.call), clean(&context.site)));
    }
    lines.more(told.contexts.more);
    pinned(told, &mut lines);
    held(told, &mut lines);
    labels(told, &mut lines);
    counters(told, &mut lines);
    let findings = told.findings.rows.len() as u64 + u64::from(told.findings.more);
    lines.heading(&format!("Findings: {findings}"));
    for finding in &told.findings.rows {
        let ago = words::time(state.now().saturating_sub(finding.at) as f64 / 1e6);
        lines.entry(&clean(&finding.code), &format!("{ago} ago: {}", clean(&finding.text)));
    }
    lines.lines
}

fn pinned(told: &Snapshot, lines: &mut Lines) {
    let pinned = &told.levels.pinned;
    if pinned.peak_pinned == 0 {
        return;
    }
    lines.heading("Pinned memory");
    let size = format_size;
    lines.entry(
        "pinned",
        &format!(
            "{}, of which {} are the program's and {} were registered",
            size(pinned.pinned),
            size(pinned.requested),
            size(pinned.registered)
        ),
    );
    lines.entry("limit", &format!("{}, at most so far {}", size(pinned.limit), size(pinned.peak_pinned)));
}

/// Places in the program, by what they hold of device memory and of pinned memory.
fn held(told: &Snapshot, lines: &mut Lines) {
    if told.sites.rows.is_empty() {
        return;
    }
    lines.heading("Held by line of the program");
    for site in &told.sites.rows {
        let blocks = words::count(site.blocks, "block", "blocks");
        let memory = clean(&site.memory);
        lines.entry(&format_size(site.live), &format!("{memory}, in {blocks} at {}", clean(&site.text)));
    }
    lines.more(told.sites.more);
}

fn labels(told: &Snapshot, lines: &mut Lines) {
    if told.labels.rows.is_empty() {
        return;
    }
    lines.heading("By name");
    for Label { name, blocks, bytes, on_peers, on_host, budget, near: _ } in &told.labels.rows {
        let far = on_peers.saturating_add(*on_host);
        let far = if far > 0 { format!(", {} far", format_size(far)) } else { String::new() };
        let budget = budget.map_or(String::new(), |budget| format!(", {} may be near", format_size(budget)));
        let blocks = words::count(*blocks, "block", "blocks");
        lines.entry(&format_size(*bytes), &format!("{}, {blocks}{far}{budget}", clean(name)));
    }
    lines.more(told.labels.more);
}

/// What was counted, as far as it is not 0, under its name in `ps --json`.
fn counters(told: &Snapshot, lines: &mut Lines) {
    lines.heading("Counted so far");
    let name = |counter: Counter| match serde_json::to_value(counter) {
        Ok(serde_json::Value::String(name)) => name,
        _ => format!("{counter:?}"),
    };
    let counted = Counter::ALL.into_iter().filter(|counter| told.counter(*counter) > 0).map(|counter| {
        let (name, value) = (name(counter), told.counter(counter));
        match (name.strip_suffix("_bytes"), name.strip_suffix("_microseconds")) {
            (Some(name), _) => format!("{} {}", name.replace('_', " "), format_size(value)),
            (_, Some(name)) => format!("{} {}", name.replace('_', " "), words::time(value as f64 / 1e6)),
            _ => format!("{} {value}", name.replace('_', " ")),
        }
    });
    lines.text(&counted.collect::<Vec<_>>().join(", "));
}

fn bar_of(place: &Place, wide: bool) -> Bar {
    let held = if wide { format!(" used, {} held", format_size(place.held)) } else { String::new() };
    let words = format!("{}{held} of {}", format_size(place.used), format_size(place.limit));
    Bar { name: place.name(), used: place.used, held: place.held, own: place.own, of: place.limit, words }
}

/// Lines that keep to a width.
struct Lines {
    lines: Vec<Line<'static>>,
    width: usize,
}

impl Lines {
    fn heading(&mut self, words: &str) {
        if !self.lines.is_empty() {
            self.lines.push(Line::raw(""));
        }
        self.lines.push(Line::styled(shorten(words, self.width), BOLD));
    }

    fn text(&mut self, words: &str) {
        self.lines.extend(wrap(words, self.width).into_iter().map(Line::raw));
    }

    /// Words beside a label; nothing where there are none.
    fn entry(&mut self, label: &str, words: &str) {
        if words.is_empty() {
            return;
        }
        let label = shorten(label, NAME - 1);
        for (number, line) in wrap(words, self.width.saturating_sub(NAME)).into_iter().enumerate() {
            let before = if number == 0 { label.as_str() } else { "" };
            let space = " ".repeat(NAME - columns(before));
            self.lines.push(Line::raw(format!("{before}{space}{line}")));
        }
    }

    /// Rows that the page has no room for.
    fn more(&mut self, more: u32) {
        if more > 0 {
            self.entry("", &format!("and {more} more"));
        }
    }
}
