//! What is drawn of processes as their pages tell of them, and what keys make of it.

use std::time::Duration;

use gpupool_metrics::{Counter, Finding, Life, Table};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::style::Color;

use super::state::{Screen, Shown, Sort, State, Step};
use super::{once, text, view};
use crate::pages::{Listed, Look, Numbers, Skipped};
use crate::sample::{GIB, listed, look};
use crate::terminal::columns;

/// When tests look.
const NOW: u64 = 1_700_000_012_000_000;
const SECOND: Duration = Duration::from_secs(1);

fn state() -> State {
    State::new("node1".to_owned(), SECOND, Sort::Used, "", false)
}

/// A process on one GPU, with so much in use.
fn small(pid: u32, name: &str, gib: u64) -> Listed {
    let mut row = listed(pid, name);
    row.told.levels.places.rows.truncate(1);
    let place = &mut row.told.levels.places.rows[0];
    (place.used, place.held, place.own) = (gib * GIB, gib * GIB, 0);
    row.told.levels.residence.on_peers = 0;
    row.told.levels.residence.on_host = 0;
    row.told.process.rank = None;
    row.told.findings = Table::default();
    row.told.contexts.rows.truncate(1);
    row
}

/// Two looks a second apart, between which one process moved memory.
fn two_looks() -> State {
    let mut state = state();
    let rows = || vec![listed(812, "train"), small(77, "serve", 4)];
    state.update(look(rows()), NOW - 1_000_000, None);
    let mut rows = rows();
    rows[0].told.counters[Counter::Moves as usize] += 3;
    rows[0].told.counters[Counter::CameFromHostBytes as usize] += GIB;
    rows[0].told.counters[Counter::LeftForPeersBytes as usize] += GIB / 2;
    rows[0].told.levels.residence.lost_microseconds += 120_000;
    state.update(look(rows), NOW, Some(SECOND));
    state
}

fn drawn(state: &mut State, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(state, frame.area(), frame.buffer_mut())).unwrap();
    terminal.backend().buffer().clone()
}

fn screen(state: &mut State, width: u16, height: u16) -> String {
    let text = text(&drawn(state, width, height));
    assert!(text.lines().all(|line| columns(line) <= usize::from(width)), "{text}");
    text
}

fn press(state: &mut State, code: KeyCode) -> Step {
    state.key(KeyEvent::new(code, KeyModifiers::NONE))
}

fn write(state: &mut State, text: &str) {
    text.chars().for_each(|c| assert_eq!(press(state, KeyCode::Char(c)), Step::Draw));
}

fn pids(state: &State) -> Vec<u32> {
    state.visible().iter().map(|row| row.pid()).collect()
}

const AT_60: &str = "\
gpupool top on node1, 2 processes, by used
gpu0        █████████████████████▒▒·  124.0 GiB of 140.0 GiB
gpu1        ███▒····················  20.0 GiB of 140.0 GiB
host0       █·······················  10.0 GiB of 256.0 GiB

    pid       used        far    moved/s  ctx name
    812  153.0 GiB   30.0 GiB    1.5 GiB   2! train
     77    4.0 GiB          -          -    1 serve

GP001  pid 812, 12.0 s ago: a context on GPU 1 was made by c
GP016  pid 812, 12.0 s ago: a context on GPU 1 was made by c
GP001  pid 812, 12.0 s ago: a context on GPU 1 was made by c
q leave  ↑↓ choose  Enter details  s sort  r turn  / filter
";

const AT_80: &str = "\
gpupool top on node1, 2 processes, by used
gpu0        ███████████████████████████████████████▒▒▒··  124.0 GiB of 140.0 GiB
gpu1        ██████▒▒····································  20.0 GiB of 140.0 GiB
host0       ██··········································  10.0 GiB of 256.0 GiB

    pid rank       used       held        far    moved/s  ctx name
    812    1  153.0 GiB  170.0 GiB   30.0 GiB    1.5 GiB   2! train
     77         4.0 GiB    4.0 GiB          -          -    1 serve

GP001  pid 812, 12.0 s ago: a context on GPU 1 was made by cudaSetDevice and not
GP016  pid 812, 12.0 s ago: a context on GPU 1 was made by cudaSetDevice and not
GP001  pid 812, 12.0 s ago: a context on GPU 1 was made by cudaSetDevice and not
q leave  ↑↓ choose  Enter details  s sort  r turn  / filter  ?
";

const AT_200: &str = "\
    pid rank     state    mode       used       held        far    moved/s moves/s  lost     pinned  ctx name
    812    1   running    pool  153.0 GiB  170.0 GiB   30.0 GiB    1.5 GiB     3.0 12.0%    8.0 GiB   2! train
     77        running    pool    4.0 GiB    4.0 GiB          -          -       -     -    8.0 GiB    1 serve
";

#[test]
fn the_list_has_more_columns_where_there_is_room() {
    let mut state = two_looks();
    assert_eq!(screen(&mut state, 60, 13), AT_60);
    assert_eq!(screen(&mut state, 80, 13), AT_80);
    let wide = screen(&mut state, 200, 13);
    assert!(wide.contains(AT_200), "{wide}");
    assert!(wide.contains("  124.0 GiB used, 134.0 GiB held, 1.0 GiB of programs of 140.0 GiB\n"), "{wide}");
    assert!(wide.contains("and nothing ran in it\n"), "{wide}");
    // As text there is all of it and no line for keys.
    let (without_keys, _) = AT_60.trim_end().rsplit_once('\n').unwrap();
    assert_eq!(once(&state, 60).trim_end(), without_keys);
}

#[test]
fn where_lines_are_few_the_processes_keep_them() {
    let mut state = two_looks();
    let low = screen(&mut state, 80, 10);
    assert!(low.contains("train") && low.contains("gpu0") && !low.contains("GP001"), "{low}");
    let lower = screen(&mut state, 80, 5);
    assert!(lower.contains("train") && lower.contains("serve") && !lower.contains("gpu0"), "{lower}");
    // The chosen one is in sight, however many there are.
    let rows = (1..100).map(|pid| small(pid, &format!("p{pid}."), 200 - u64::from(pid))).collect();
    state.update(look(rows), NOW, Some(SECOND));
    press(&mut state, KeyCode::End);
    let end = screen(&mut state, 80, 12);
    assert!(end.contains("p99.") && !end.contains("p1."), "{end}");
}

#[test]
fn a_disk_is_a_place_as_long_as_something_lies_there() {
    let mut row = small(812, "train", 4);
    let mut disk = row.told.levels.places.rows[0];
    (disk.on_disk, disk.number, disk.used, disk.held, disk.own) = (true, 0, GIB, GIB, 0);
    row.told.levels.places.rows.push(disk);
    let mut state = state();
    state.update(look(vec![row.clone()]), NOW, None);
    let details = |state: &mut State| {
        state.key(KeyEvent::new(KeyCode::Enter, KeyModifiers::NONE));
        screen(state, 120, 40)
    };
    assert!(screen(&mut state, 120, 40).contains("disk"));
    assert!(details(&mut state).contains("disk"));
    let disk = &mut row.told.levels.places.rows[1];
    (disk.used, disk.held) = (0, 0);
    let mut state = self::state();
    state.update(look(vec![row]), NOW, None);
    assert!(!screen(&mut state, 120, 40).contains("disk"));
    assert!(!details(&mut state).contains("disk"));
}

#[test]
fn no_size_of_a_terminal_and_no_number_of_a_page_is_too_much() {
    let mut state = two_looks();
    let mut odd = listed(u32::MAX, "");
    odd.told.counters = [u64::MAX; Counter::ALL.len()];
    for place in &mut odd.told.levels.places.rows {
        (place.limit, place.used, place.held, place.own) = (0, u64::MAX, u64::MAX - 1, u64::MAX);
    }
    odd.told.levels.residence.on_peers = u64::MAX;
    odd.told.contexts.more = u32::MAX;
    odd.told.findings.rows[0].at = u64::MAX;
    state.update(look(vec![listed(812, "train"), odd]), NOW, Some(SECOND));
    let text = screen(&mut state, 80, 30);
    assert!(text.contains("\n42…7295 ") && text.contains(" 4…7!"), "a number that is too long shows that: {text}");
    for screen in [None, Some(KeyCode::Enter), Some(KeyCode::Char('?'))] {
        screen.map(|code| press(&mut state, code));
        for width in (1..=70).chain([133, 400]) {
            for height in [1, 2, 3, 7, 24] {
                self::screen(&mut state, width, height);
            }
        }
    }
}

#[test]
fn what_a_terminal_would_obey_is_seen_and_not_done() {
    let evil = "\x1b[31mevil\x07\n\u{202e}name";
    let mut row = listed(812, evil);
    let told = &mut row.told;
    told.process.command = evil.to_owned();
    told.process.library = "\x1b]0;".to_owned();
    told.levels.mode = evil[..8].to_owned();
    told.levels.gpus.rows[0].name = evil.to_owned();
    let finding = &mut told.findings.rows[0];
    (finding.text, finding.code) = (evil.to_owned(), evil.to_owned());
    told.labels.rows[0].name = evil.to_owned();
    let context = &mut told.contexts.rows[0];
    (context.call, context.site, context.kind) = (evil.to_owned(), evil.to_owned(), evil.to_owned());
    told.sites.rows[0].text = evil.to_owned();
    let mut state = state();
    state.update(look(vec![row]), NOW, None);
    let mut all = screen(&mut state, 80, 30) + &once(&state, 80);
    write(&mut state, "/\u{1b}");
    all += &screen(&mut state, 80, 30);
    press(&mut state, KeyCode::Esc);
    press(&mut state, KeyCode::Enter);
    all += &screen(&mut state, 80, 100);
    assert!(!all.contains(|c: char| c.is_control() && c != '\n' || c == '\u{202e}'), "{all:?}");
    assert!(all.contains("\u{fffd}[31mevil\u{fffd}\u{fffd}\u{fffd}name"), "{all}");
}

#[test]
fn wide_characters_keep_the_columns() {
    let mut state = state();
    let mut row = listed(812, "訓練");
    row.state = Life::Stopped;
    state.update(look(vec![row]), NOW, None);
    let text = screen(&mut state, 80, 20);
    assert!(text.contains("2! (stopped) 訓練\n"), "{text}");
    let mut row = listed(812, &"訓練".repeat(10));
    row.state = Life::Stopped;
    state.update(look(vec![row]), NOW, None);
    let text = screen(&mut state, 60, 20);
    assert!(text.contains("2! (stopped) …練\n"), "{text}");
}

#[test]
fn colours_are_there_only_when_wanted() {
    let has_colour = |colours| {
        let mut state = State::new("node1".to_owned(), SECOND, Sort::Used, "", colours);
        state.update(look(vec![listed(812, "train")]), NOW, None);
        let lists = drawn(&mut state, 80, 20);
        press(&mut state, KeyCode::Enter);
        let details = drawn(&mut state, 80, 60);
        lists.content().iter().chain(details.content()).any(|cell| (cell.fg, cell.bg) != (Color::Reset, Color::Reset))
    };
    assert!(has_colour(true) && !has_colour(false));
}

#[test]
fn details_tell_all_and_scroll_no_further_than_their_end() {
    let mut state = two_looks();
    press(&mut state, KeyCode::Enter);
    assert_eq!(state.screen(), Screen::Details { scrolled: 0 });
    let all = screen(&mut state, 80, 100);
    for part in [
        "pid 812, train, rank 1 of 4\n",
        "running, mode pool, user 1000, first allocation 11.5 s ago, gpupool 0.2.0\n",
        "train --lr 1e-4\n",
        "120.0 GiB of 139.0 GiB\n",
        "lies        120.0 GiB near, 20.0 GiB on other GPUs, 10.0 GiB on the host\n",
        "a second    1.0 GiB came, 512.0 MiB left in 3.0 moves, 12.0 % of the time lost\n",
        "gpu1        primary, cost unknown, not used so far\n",
        "            cuDevicePrimaryCtxRetain at /home/ada/train.py:88 in step\n",
        "            gpu0 borrows 20.0 GiB of gpu1\n",
        "used, 1.0 GiB stay free\n",
        "by reading 25.7 MiB over links,\n",
        "6.0 GiB     pinned, in 3 blocks at /home/ada/data.py:7 in load\n",
        "5.0 GiB     device, in 5 blocks at /home/ada/train.py:12 in weights\n",
        "30.0 GiB    kv, 3 blocks, 20.0 GiB far, 10.0 GiB may be near\n",
        "Findings: 3\n",
    ] {
        assert!(all.contains(part), "no {part}in\n{all}");
    }
    let lines = all.trim_end().lines().count();
    for _ in 0..20 {
        press(&mut state, KeyCode::PageDown);
    }
    let end = screen(&mut state, 80, 20);
    assert!(end.contains("Findings: 3\n"), "{end}");
    let Screen::Details { scrolled } = state.screen() else { panic!("{:?}", state.screen()) };
    assert!(scrolled > 0 && scrolled < lines, "{scrolled} of {lines}");
    press(&mut state, KeyCode::Up);
    assert_ne!(screen(&mut state, 80, 20), end, "the first key up goes up");
    press(&mut state, KeyCode::Esc);
    assert_eq!(state.screen(), Screen::List);
    // The process ends while one looks at it.
    press(&mut state, KeyCode::Enter);
    state.update(look(vec![small(77, "serve", 4)]), NOW, Some(SECOND));
    assert_eq!(state.screen(), Screen::List);
}

#[test]
fn keys_sort_turn_and_filter() {
    let mut state = state();
    let mut rows = vec![small(1, "b-train", 9), small(2, "a-serve", 5), small(3, "c-Train", 7)];
    rows[1].told.levels.residence.on_peers = GIB;
    rows[2].told.levels.pinned.pinned = 100 * GIB;
    state.update(look(rows), NOW, None);
    assert_eq!(pids(&state), [1, 3, 2], "what uses most is first");
    let mut orders = Vec::new();
    for _ in 0..7 {
        press(&mut state, KeyCode::Char('s'));
        orders.push((state.order().0, pids(&state)));
    }
    assert_eq!(
        orders,
        [
            (Sort::Held, vec![1, 3, 2]),
            (Sort::Far, vec![2, 1, 3]),
            (Sort::Moved, vec![1, 2, 3]),
            (Sort::Pinned, vec![3, 1, 2]),
            (Sort::Pid, vec![1, 2, 3]),
            (Sort::Name, vec![2, 1, 3]),
            (Sort::Used, vec![1, 3, 2]),
        ]
    );
    press(&mut state, KeyCode::Char('r'));
    assert_eq!(pids(&state), [2, 3, 1]);
    write(&mut state, "/train");
    assert_eq!(pids(&state), [3, 1], "while it is written");
    write(&mut state, "q");
    assert_eq!(pids(&state), [0; 0], "a letter like any other");
    assert!(screen(&mut state, 80, 20).contains("no process has that in it"));
    press(&mut state, KeyCode::Backspace);
    press(&mut state, KeyCode::Enter);
    assert_eq!((state.filter(), pids(&state)), (("train", false), vec![3, 1]));
    assert!(screen(&mut state, 80, 20).starts_with("gpupool top on node1, 2 of 3, by used (turned), with \"train\"\n"));
    write(&mut state, "/x");
    press(&mut state, KeyCode::Esc);
    assert_eq!(state.filter(), ("train", false), "the one before");
    press(&mut state, KeyCode::Esc);
    assert_eq!(pids(&state), [2, 3, 1]);
}

#[test]
fn the_chosen_process_stays_chosen_while_the_order_changes() {
    let mut state = state();
    let rows = |sizes: [u64; 3]| look(sizes.iter().zip(1..).map(|(size, pid)| small(pid, "p", *size)).collect());
    state.update(rows([9, 8, 7]), NOW, None);
    let chosen = |state: &State| state.chosen().map(|at| pids(state)[at]);
    assert_eq!(chosen(&state), Some(1), "the first one before any is chosen");
    press(&mut state, KeyCode::Down);
    assert_eq!(chosen(&state), Some(2));
    state.update(rows([1, 8, 20]), NOW, Some(SECOND));
    assert_eq!((pids(&state), chosen(&state)), (vec![3, 2, 1], Some(2)));
    press(&mut state, KeyCode::PageDown);
    assert_eq!(chosen(&state), Some(1), "no further than the last");
    press(&mut state, KeyCode::Home);
    assert_eq!(chosen(&state), Some(3));
    press(&mut state, KeyCode::Up);
    assert_eq!(chosen(&state), Some(3));
    state.update(Look::default(), NOW, Some(SECOND));
    assert_eq!(chosen(&state), None);
    press(&mut state, KeyCode::Down);
    press(&mut state, KeyCode::Enter);
    assert_eq!(state.screen(), Screen::List, "there is nothing to tell of");
    assert!(screen(&mut state, 80, 20).contains("no process runs under gpupool"));
}

#[test]
fn q_and_ctrl_c_leave_from_everywhere() {
    for keys in [&[][..], &[KeyCode::Enter], &[KeyCode::Char('?')]] {
        for (code, modifiers) in [(KeyCode::Char('q'), KeyModifiers::NONE), (KeyCode::Char('c'), KeyModifiers::CONTROL)]
        {
            let mut state = two_looks();
            keys.iter().for_each(|key| assert_eq!(press(&mut state, *key), Step::Draw));
            let mut key = KeyEvent::new(code, modifiers);
            key.kind = KeyEventKind::Release;
            assert_eq!(state.key(key), Step::Draw, "only let go");
            key.kind = KeyEventKind::Press;
            assert_eq!(state.key(key), Step::Leave);
        }
    }
    let mut state = two_looks();
    press(&mut state, KeyCode::Char('?'));
    let help = screen(&mut state, 60, 24);
    assert!(help.contains("moved, pinned, pid, name\n") && help.contains("any key: back"), "{help}");
    assert!(help.lines().all(|line| columns(line) < 60), "nothing is cut off:\n{help}");
    press(&mut state, KeyCode::Char('x'));
    assert_eq!(state.screen(), Screen::List);
}

#[test]
fn rates_are_of_one_program_only() {
    let mut state = state();
    let rates = |state: &State| state.rows()[0].rates.map(|rates| (rates.moves, rates.moved(), rates.lost));
    let row = |moves: u64, image: u64| {
        let mut row = small(1, "p", 4);
        row.told.counters[Counter::Moves as usize] = moves;
        row.told.process.identity.image = image;
        look(vec![row])
    };
    state.update(row(10, 16), NOW, None);
    assert_eq!(rates(&state), None, "nothing to compare with");
    state.update(row(30, 16), NOW, Some(SECOND * 4));
    assert_eq!(rates(&state), Some((5.0, 0.0, 0.0)));
    state.update(row(20, 16), NOW, Some(SECOND));
    assert_eq!(rates(&state), None, "it fell, so it is none");
    state.update(row(40, 32), NOW, Some(SECOND));
    assert_eq!(rates(&state), None, "another program of the same process");
}

#[test]
fn pages_that_are_not_read_are_counted() {
    let mut state = state();
    let skipped = |reason| Skipped { reason, pid: None, why: String::new() };
    let skipped = vec![skipped("version"), skipped("torn"), skipped("gone")];
    state.update(Look { rows: vec![], skipped }, NOW, None);
    assert!(screen(&mut state, 80, 20).contains("0 processes, by used, 2 pages not read\n"));
}

#[test]
fn gpus_are_one_by_what_they_are_and_not_by_their_number() {
    let mut other = small(2, "other", 4);
    // Its GPU 0 is the GPU 1 of the first.
    other.told.levels.gpus.rows.remove(0);
    other.told.levels.gpus.rows[0].ordinal = 0;
    let mut state = state();
    state.update(look(vec![listed(1, "train"), other.clone()]), NOW, None);
    let text = screen(&mut state, 80, 20);
    let named = |text: &str, bytes: &str| {
        let line = text.lines().find(|line| line.ends_with(&format!("  {bytes} of 140.0 GiB")));
        line.unwrap_or_else(|| panic!("{text}")).split_whitespace().next().unwrap_or_default().to_owned()
    };
    let (first, shared) = (named(&text, "120.0 GiB"), named(&text, "24.0 GiB"));
    assert!(first.starts_with("GPU-") && shared.starts_with("GPU-"), "no number is of one GPU: {text}");
    assert_ne!(first, shared, "{text}");
    assert_eq!(shared, "GPU-02020202-0202-0202-0202-020202020202", "as ps has it: {text}");
    assert_ne!(named(&screen(&mut state, 60, 20), "120.0 GiB"), named(&screen(&mut state, 60, 20), "24.0 GiB"));

    // Two programs that see one GPU each, which each calls GPU 0.
    let mut one = small(1, "one", 3);
    one.told.levels.gpus.rows.truncate(1);
    state.update(look(vec![one, other]), NOW, None);
    let text = screen(&mut state, 80, 20);
    let (first, shared) = (named(&text, "3.0 GiB"), named(&text, "4.0 GiB"));
    assert!(first.starts_with("GPU-") && shared.starts_with("GPU-") && first != shared, "{text}");
}

/// All programs number alike, and `gpupool drain 0` would take another GPU.
#[test]
fn a_gpu_has_the_machines_number_where_programs_have_another_one() {
    let mut state = state();
    state.update(look(vec![listed(1, "train")]), NOW, None);
    let text = |state: &mut State| screen(state, 120, 20);
    let machine = |first, second| Numbers::known([([1; 16], first), ([2; 16], second)]);
    state.set_numbers(&machine(0, 1));
    assert!(text(&mut state).contains("\ngpu0 "), "{}", text(&mut state));
    state.set_numbers(&machine(2, 3));
    let told = text(&mut state);
    assert!(told.contains("\nGPU 2 (GPU-0") && told.contains("\nGPU 3 (GPU-0"), "{told}");
    assert!(told.contains("01010101) ") && told.contains("02020202) ") && !told.contains("\ngpu0 "), "{told}");
}

#[test]
fn the_host_has_no_more_than_the_machine() {
    let rows = || look(vec![listed(1, "train"), listed(2, "serve"), listed(3, "other")]);
    let host =
        |state: &State| once(state, 60).lines().find(|line| line.starts_with("host0")).unwrap_or_default().to_owned();
    let mut unknown = state();
    unknown.update(rows(), NOW, None);
    assert!(host(&unknown).ends_with("  30.0 GiB of 768.0 GiB"), "{}", host(&unknown));
    let mut known = state().with_host_memory(Some(500 * GIB));
    known.update(rows(), NOW, None);
    assert!(host(&known).ends_with("  30.0 GiB of 500.0 GiB"), "{}", host(&known));
    // Limits that are less than the machine has are what there is.
    let mut large = state().with_host_memory(Some(1000 * GIB));
    large.update(rows(), NOW, None);
    assert!(host(&large).ends_with("  30.0 GiB of 768.0 GiB"), "{}", host(&large));
}

#[test]
fn the_newest_findings_stand_last_and_there_are_five() {
    let mut row = listed(812, "train");
    let found = |number: u64| Finding {
        at: NOW - number * 1_000_000,
        code: format!("GP{number:03}"),
        device: None,
        text: "x".to_owned(),
    };
    row.told.findings.rows = (1..=9).map(found).collect();
    let mut state = state();
    state.update(look(vec![row]), NOW, None);
    let text = once(&state, 60);
    let codes: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("GP")?.get(..3)).collect();
    assert_eq!(codes, ["005", "004", "003", "002", "001"]);
}

#[test]
fn json_has_the_page_and_the_rates() {
    let state = two_looks();
    let shown: Vec<&Shown> = state.visible();
    let json = serde_json::to_value(shown).unwrap();
    assert_eq!(json[0]["levels"]["live_bytes"], 150 * GIB);
    assert_eq!(json[0]["rates"]["moves_per_second"], 3.0);
    assert_eq!(json[0]["rates"]["came_bytes_per_second"], GIB as f64);
    assert_eq!(json[1]["state"], "running");
}
