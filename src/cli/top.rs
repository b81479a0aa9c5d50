//! `gpupool top`: what the processes under gpupool hold, and what changes, while one looks. It reads their metrics pages and nothing
//! else, and changes nothing.

mod rates;
mod state;
#[cfg(test)]
mod tests;
mod view;

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpupool_machine::Host;
use ratatui::DefaultTerminal;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event};
use ratatui::layout::Rect;
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use unicode_width::UnicodeWidthStr;

use crate::failure::Failure;
use crate::pages::{Look, Numbers, Pages, interval};
use crate::{stdout, terminal};
use state::{Shown, Sort, State, Step};

/// Show live what the processes under gpupool hold, and what moves
///
/// Reads what they tell and changes nothing. On another machine: ssh -t HOST gpupool top.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool top
  gpupool top --interval 500ms --sort far
  gpupool top --once --filter train
  gpupool top --json --interval 10s >over-night.jsonl

After a size stands what the GPU has, and of the host what all processes may take, at most what this machine has. GPUs have the \
machine's numbers and their UUIDs where a program numbers them differently. A ? under moved/s: there is nothing to compare with, since rates are those between two looks, and \
--once looks once; --json tells them from its second line on.

Keys: ? lists them.")]
pub struct Args {
    /// Once, as text, and then end
    #[arg(long)]
    once: bool,
    /// One JSON object a line and look; the rates are those since the line before
    #[arg(long)]
    json: bool,
    /// The time between two looks
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = interval)]
    interval: Duration,
    /// What comes first
    #[arg(long, value_enum, default_value_t)]
    sort: Sort,
    /// Only processes whose name, command or number has this in it
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
}

/// Shows it, until the user or the reader leaves.
///
/// # Errors
/// Exit 2 if there is no terminal to show it on.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let state = State::new(host, args.interval, args.sort, &args.filter, terminal::colours());
    // Not what a control group leaves to this command: the processes may be in others.
    let mut state = state.with_host_memory(Host::at(Path::new("/")).memory().installed);
    if args.json {
        lines(args, &mut state)?;
    } else if args.once {
        let mut pages = Pages::new();
        let look = pages.look();
        pages.complain(&look);
        know(&mut state, &mut Numbers::default(), &look);
        state.update(look, gpupool_metrics::now(), None);
        stdout::print(&once(&state, width()))?;
    } else if std::io::stdout().is_terminal() {
        live(&mut state)?;
    } else {
        return Err(Failure::usage("top: stdout is no terminal; use --once or --json, and ssh -t to another machine"));
    }
    Ok(ExitCode::SUCCESS)
}

/// What one look found, for programs.
#[derive(Serialize)]
struct Told<'a> {
    /// Microseconds since the epoch.
    at: u64,
    processes: Vec<&'a Shown>,
}

fn lines(args: &Args, state: &mut State) -> Result<(), Failure> {
    let mut pages = Pages::new();
    let mut last = None;
    loop {
        let begun = Instant::now();
        let look = pages.look();
        pages.complain(&look);
        state.update(look, gpupool_metrics::now(), last.map(|last: Instant| begun - last));
        last = Some(begun);
        let told = Told { at: state.now(), processes: state.visible() };
        let line = serde_json::to_string(&told).map_err(|error| Failure::broken(error.to_string()))?;
        if !stdout::print_line(&terminal::clean_json(&line))? || args.once {
            return Ok(());
        }
        std::thread::sleep(args.interval.saturating_sub(begun.elapsed()));
    }
}

/// Has it know which numbers the machine's GPUs have.
fn know(state: &mut State, numbers: &mut Numbers, look: &Look) {
    numbers.learn(&look.rows);
    state.set_numbers(numbers);
}

/// The columns to print for.
fn width() -> u16 {
    let told = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let of_terminal = || ratatui::crossterm::terminal::size().ok().map(|(columns, _)| columns);
    let found = if std::io::stdout().is_terminal() { of_terminal() } else { told };
    found.unwrap_or(terminal::WIDTH as u16).clamp(view::NARROWEST, 400)
}

/// All of the list, as text.
fn once(state: &State, width: u16) -> String {
    let area = Rect::new(0, 0, width, view::height(state));
    let mut buffer = Buffer::empty(area);
    view::list(state, area, &mut buffer, false);
    text(&buffer)
}

/// What stands in a buffer, without colours and what is empty at the ends of its lines.
fn text(buffer: &Buffer) -> String {
    let mut text = String::new();
    for row in buffer.area.rows() {
        let mut line = String::new();
        // A wide character covers the cells behind it.
        let mut covered = 0;
        for cell in row.columns().filter_map(|cell| buffer.cell(cell.as_position())) {
            if covered == 0 {
                line.push_str(cell.symbol());
                covered = cell.symbol().width().max(1);
            }
            covered -= 1;
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn live(state: &mut State) -> Result<(), Failure> {
    let broken = |error: std::io::Error| Failure::broken(format!("top: no terminal: {error}"));
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP, SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&ended)).map_err(broken)?;
    }
    let mut terminal = ratatui::try_init().map_err(broken)?;
    let shown = show(state, &mut terminal, &ended);
    if matches!(shown, Ok(End::TerminalGone)) {
        // Nothing can be put back, and to say so on that terminal, as its destructor does, would end the process by a panic.
        std::mem::forget(terminal);
        return Ok(());
    }
    // Also where showing it failed: the shell needs its terminal back.
    ratatui::restore();
    shown.map(drop).map_err(broken)
}

/// Why nothing is shown any more.
enum End {
    Asked,
    TerminalGone,
}

/// How long a signal may wait for its effect.
const NAP: Duration = Duration::from_millis(250);

/// Waits for a key, a signal or the end of that time; `false` where the terminal is gone: its window was closed, or the connection is
/// lost. crossterm would read its end again and again then, and see neither a signal nor the time.
fn waited(most: Duration) -> bool {
    let terminal = if std::io::stdin().is_terminal() { libc::STDIN_FILENO } else { libc::STDOUT_FILENO };
    let mut asked = libc::pollfd { fd: terminal, events: libc::POLLIN, revents: 0 };
    let milliseconds = most.as_millis().try_into().unwrap_or(libc::c_int::MAX);
    // SAFETY: one description, which is a local.
    let ready = unsafe { libc::poll(&raw mut asked, 1, milliseconds) };
    ready <= 0 || asked.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) == 0
}

fn show(state: &mut State, terminal: &mut DefaultTerminal, ended: &AtomicBool) -> std::io::Result<End> {
    let mut pages = Pages::new();
    let mut numbers = Numbers::default();
    let mut last: Option<Instant> = None;
    while !ended.load(Ordering::Relaxed) {
        let now = Instant::now();
        if last.is_none_or(|last| now - last >= state.interval()) {
            // What is not read is counted in the heading: a line on stderr would stand across the picture.
            let look = pages.look();
            know(state, &mut numbers, &look);
            state.update(look, gpupool_metrics::now(), last.map(|last| now - last));
            last = Some(now);
        }
        terminal.draw(|frame| view::draw(state, frame.area(), frame.buffer_mut()))?;
        // As long as nothing happens there is nothing to draw.
        let until = last.unwrap_or(now) + state.interval();
        while !ended.load(Ordering::Relaxed) && Instant::now() < until {
            if !waited(until.saturating_duration_since(Instant::now()).min(NAP)) {
                return Ok(End::TerminalGone);
            }
            if !event::poll(Duration::ZERO)? {
                continue;
            }
            match event::read()? {
                Event::Key(key) => match state.key(key) {
                    Step::Leave => return Ok(End::Asked),
                    Step::Draw => break,
                },
                Event::Resize(..) => break,
                _ => {}
            }
        }
    }
    Ok(End::Asked)
}
