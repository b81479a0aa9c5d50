//! What is shown, and what keys make of it. Nothing here draws, reads pages or asks for the time.

use std::time::Duration;

use gpupool_metrics::{Finding, Snapshot};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use serde::Serialize;

use super::rates::Rates;
use crate::pages::{Key, Listed, Look, Numbers};
use crate::terminal::clean;

/// A process that is listed.
#[derive(Clone, Debug, Serialize)]
pub struct Shown {
    #[serde(flatten)]
    pub listed: Listed,
    /// Nothing at the first look at it.
    pub rates: Option<Rates>,
}

impl Shown {
    pub fn told(&self) -> &Snapshot {
        &self.listed.told
    }

    pub fn key(&self) -> Key {
        self.listed.key()
    }

    pub fn pid(&self) -> u32 {
        self.told().process.identity.pid
    }

    /// Bytes that lie elsewhere than on the GPU that uses them.
    pub fn far(&self) -> u64 {
        let residence = &self.told().levels.residence;
        residence.on_peers.saturating_add(residence.on_host)
    }

    fn has(&self, text: &str) -> bool {
        let process = &self.told().process;
        let text = text.to_lowercase();
        let has = |of: &str| clean(of).to_lowercase().contains(&text);
        has(&process.name) || has(&process.command) || process.identity.pid.to_string().contains(&text)
    }
}

/// What comes first in the list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Sort {
    /// Memory in use
    #[default]
    Used,
    /// Memory held
    Held,
    /// Memory that lies far from the GPU that uses it
    Far,
    /// Bytes moved a second
    Moved,
    /// Pinned memory
    Pinned,
    /// The process's number
    Pid,
    /// The process's name
    Name,
}

impl Sort {
    const ALL: [Self; 7] = [Self::Used, Self::Held, Self::Far, Self::Moved, Self::Pinned, Self::Pid, Self::Name];

    pub fn word(self) -> &'static str {
        match self {
            Self::Used => "used",
            Self::Held => "held",
            Self::Far => "far",
            Self::Moved => "moved",
            Self::Pinned => "pinned",
            Self::Pid => "pid",
            Self::Name => "name",
        }
    }

    fn next(self) -> Self {
        let at = Self::ALL.iter().position(|sort| *sort == self).unwrap_or(0);
        Self::ALL[(at + 1) % Self::ALL.len()]
    }
}

/// What fills the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Screen {
    List,
    /// Of the chosen process, without so many lines at the top.
    Details {
        scrolled: usize,
    },
    Help,
}

/// What is to be done after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Draw,
    Leave,
}

/// See the module.
pub struct State {
    host: String,
    host_memory: Option<u64>,
    interval: Duration,
    colours: bool,
    now: u64,
    rows: Vec<Shown>,
    numbers: Numbers,
    skipped: usize,
    sort: Sort,
    turned: bool,
    filter: String,
    /// The filter before it was being written.
    writing: Option<String>,
    chosen: Option<Key>,
    screen: Screen,
}

/// Lines that a page key goes.
const PAGE: usize = 10;

impl State {
    pub fn new(host: String, interval: Duration, sort: Sort, filter: &str, colours: bool) -> Self {
        let filter = filter.to_owned();
        Self {
            host,
            host_memory: None,
            interval,
            colours,
            now: 0,
            rows: Vec::new(),
            numbers: Numbers::default(),
            skipped: 0,
            sort,
            turned: false,
            filter,
            writing: None,
            chosen: None,
            screen: Screen::List,
        }
    }

    /// With what this machine has of host memory, where that is known: no process's page tells.
    pub fn with_host_memory(self, host_memory: Option<u64>) -> Self {
        Self { host_memory, ..self }
    }

    /// With the numbers of the machine's GPUs.
    pub fn set_numbers(&mut self, numbers: &Numbers) {
        self.numbers = numbers.clone();
    }

    /// The numbers of the machine's GPUs, as far as they are known.
    pub fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    /// Takes in what a look found at `now`, in microseconds since the epoch, so long after the one before.
    pub fn update(&mut self, look: Look, now: u64, apart: Option<Duration>) {
        let rows = look.rows.into_iter().map(|listed| {
            let before = self.rows.iter().find(|row| row.key() == listed.key());
            let rates =
                before.zip(apart).and_then(|(before, apart)| Rates::between(before.told(), &listed.told, apart));
            Shown { listed, rates }
        });
        self.rows = rows.collect();
        self.skipped = look.skipped.iter().filter(|skipped| skipped.reason != "gone").count();
        self.now = now;
        self.arrange();
        if matches!(self.screen, Screen::Details { .. }) && self.chosen_row().is_none() {
            self.screen = Screen::List;
        }
    }

    /// Puts the rows into their order. One that is as large as another stays behind it from look to look.
    fn arrange(&mut self) {
        let sort = self.sort;
        self.rows.sort_by(|one, other| {
            let down = match sort {
                Sort::Used => other.listed.used().cmp(&one.listed.used()),
                Sort::Held => other.listed.held().cmp(&one.listed.held()),
                Sort::Far => other.far().cmp(&one.far()),
                Sort::Moved => {
                    let moved = |row: &Shown| row.rates.map_or(0.0, |rates| rates.moved());
                    moved(other).total_cmp(&moved(one))
                }
                Sort::Pinned => other.told().levels.pinned.pinned.cmp(&one.told().levels.pinned.pinned),
                Sort::Pid => one.pid().cmp(&other.pid()),
                Sort::Name => one.told().process.name.cmp(&other.told().process.name),
            };
            down.then(one.pid().cmp(&other.pid()))
        });
        if self.turned {
            self.rows.reverse();
        }
    }

    /// The rows that the filter lets through, in their order.
    pub fn visible(&self) -> Vec<&Shown> {
        self.rows.iter().filter(|row| row.has(&self.filter)).collect()
    }

    /// All rows.
    pub fn rows(&self) -> &[Shown] {
        &self.rows
    }

    /// Where the chosen row is among those that are visible: the first one if none was chosen, or the one that was is not there.
    pub fn chosen(&self) -> Option<usize> {
        let visible = self.visible();
        let at = self.chosen.and_then(|chosen| visible.iter().position(|row| row.key() == chosen));
        if visible.is_empty() { None } else { Some(at.unwrap_or(0)) }
    }

    /// The row that was chosen, as long as it is there.
    pub fn chosen_row(&self) -> Option<&Shown> {
        self.rows.iter().find(|row| Some(row.key()) == self.chosen)
    }

    /// The last findings of all processes, and whose each is, the newest last.
    pub fn findings(&self) -> Vec<(&Shown, &Finding)> {
        let of = |row| {
            let row: &Shown = row;
            row.told().findings.rows.iter().map(move |finding| (row, finding))
        };
        let mut findings: Vec<_> = self.visible().into_iter().flat_map(of).collect();
        findings.sort_by_key(|(_, finding)| finding.at);
        findings
    }

    pub fn host(&self) -> &str {
        &self.host
    }

    pub fn host_memory(&self) -> Option<u64> {
        self.host_memory
    }

    pub fn interval(&self) -> Duration {
        self.interval
    }

    pub fn colours(&self) -> bool {
        self.colours
    }

    pub fn now(&self) -> u64 {
        self.now
    }

    /// How many pages were not read.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    pub fn screen(&self) -> Screen {
        self.screen
    }

    /// Takes back what was scrolled beyond the end.
    pub fn scroll_at_most(&mut self, most: usize) {
        if let Screen::Details { scrolled } = &mut self.screen {
            *scrolled = (*scrolled).min(most);
        }
    }

    /// What comes first, and whether it comes last.
    pub fn order(&self) -> (Sort, bool) {
        (self.sort, self.turned)
    }

    /// What the filter is, and whether it is being written.
    pub fn filter(&self) -> (&str, bool) {
        (&self.filter, self.writing.is_some())
    }

    /// What a key does.
    pub fn key(&mut self, key: KeyEvent) -> Step {
        if key.kind == KeyEventKind::Release {
            return Step::Draw;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if key.code == KeyCode::Char('c') { Step::Leave } else { Step::Draw };
        }
        if self.writing.is_some() {
            self.write(key.code);
            return Step::Draw;
        }
        match (self.screen, key.code) {
            (_, KeyCode::Char('q')) => return Step::Leave,
            (Screen::Help, _) => self.screen = Screen::List,
            (_, KeyCode::Char('?' | 'h')) => self.screen = Screen::Help,
            (Screen::Details { scrolled }, code) => self.screen = details(scrolled, code),
            (Screen::List, code) => self.list(code),
        }
        Step::Draw
    }

    fn write(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.writing = None,
            KeyCode::Esc => self.filter = self.writing.take().unwrap_or_default(),
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(c) => self.filter.push(c),
            _ => {}
        }
    }

    fn list(&mut self, code: KeyCode) {
        match code {
            KeyCode::Up | KeyCode::Char('k') => self.choose(|at| at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.choose(|at| at + 1),
            KeyCode::PageUp => self.choose(|at| at.saturating_sub(PAGE)),
            KeyCode::PageDown => self.choose(|at| at + PAGE),
            KeyCode::Home | KeyCode::Char('g') => self.choose(|_| 0),
            KeyCode::End | KeyCode::Char('G') => self.choose(|_| usize::MAX),
            KeyCode::Enter | KeyCode::Right | KeyCode::Char('l') => {
                self.choose(|at| at);
                if self.chosen.is_some() {
                    self.screen = Screen::Details { scrolled: 0 };
                }
            }
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.turned = !self.turned,
            KeyCode::Char('/') => self.writing = Some(self.filter.clone()),
            KeyCode::Esc => self.filter.clear(),
            _ => {}
        }
        self.arrange();
    }

    fn choose(&mut self, go: impl Fn(usize) -> usize) {
        let visible = self.visible();
        let at = self.chosen().map(|at| go(at).min(visible.len() - 1));
        self.chosen = at.map(|at| visible[at].key());
    }
}

fn details(scrolled: usize, code: KeyCode) -> Screen {
    let scrolled = match code {
        KeyCode::Up | KeyCode::Char('k') => scrolled.saturating_sub(1),
        KeyCode::Down | KeyCode::Char('j') => scrolled.saturating_add(1),
        KeyCode::PageUp => scrolled.saturating_sub(PAGE),
        KeyCode::PageDown | KeyCode::Char(' ') => scrolled.saturating_add(PAGE),
        KeyCode::Home | KeyCode::Char('g') => 0,
        KeyCode::Esc | KeyCode::Enter | KeyCode::Left | KeyCode::Backspace => return Screen::List,
        _ => scrolled,
    };
    Screen::Details { scrolled }
}
