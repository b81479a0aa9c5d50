//! What is written is read, and whatever else stands in a page is told from it. Under Miri (`cargo +nightly miri test -p
//! gpupool-metrics`) the parts run that need no file.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests panic")]

use gpupool_metrics::{
    BYTES, Context, Counter, Finding, Gpu, Identity, Label, Levels, Loan, Page, Pinned, Place, Process, Residence,
    Site, Snapshot, Table, Took, Unreadable, VERSION, identify, moves, read,
};
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::FromZeros;

/// Miri takes a thousand times as long for each.
const CASES: u32 = if cfg!(miri) { 4 } else { 32 };

/// Where the first group's count is.
const LEVELS: usize = 1024;

fn memory() -> Box<[AtomicU64]> {
    <[AtomicU64]>::new_box_zeroed_with_elems(BYTES / 8).unwrap()
}

fn bytes(memory: &[AtomicU64]) -> Vec<u8> {
    let mut bytes = vec![0; memory.len() * 8];
    for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(memory) {
        *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
    }
    bytes
}

fn process() -> Process {
    Process {
        identity: Identity { boot: [3; 16], started: 77, namespace: 4_026_531_836, image: 140_736, pid: 812 },
        rank: Some(1),
        world: Some(4),
        job_rank: Some(9),
        job_world: Some(16),
        created: 1_700_000_000_000_000,
        library: "0.1.0".to_owned(),
        name: "python3.13".to_owned(),
        command: "python train.py --lr 1e-4".to_owned(),
    }
}

fn begin(memory: &[AtomicU64]) -> Page<&[AtomicU64]> {
    Page::begin(memory, &process()).unwrap()
}

/// Texts that fit into their rooms.
fn short(most: usize) -> impl Strategy<Value = String> {
    let characters =
        prop_oneof![8 => proptest::char::range(' ', '~'), 1 => Just('ö'), 1 => Just('\n'), 1 => Just('\u{1b}')];
    vec(characters, 0..most / 2).prop_map(|characters| characters.into_iter().collect())
}

prop_compose! {
    fn gpu()(ordinal: u32, uuid: [u8; 16], name in short(64), total: u64) -> Gpu {
        Gpu { ordinal, uuid, name, total }
    }
}

prop_compose! {
    fn place()(kind: u8, number: u32, [limit, held, used, peak_used, anchored, own, reserve]: [u64; 7], drained: bool) -> Place {
        let (on_host, on_disk) = (kind % 3 == 1, kind % 3 == 2);
        Place { on_host, on_disk, number, limit, held, used, peak_used, anchored, own, reserve, drained }
    }
}

prop_compose! {
    fn loan()(borrower: u32, on_host: bool, number: u32, bytes: u64) -> Loan {
        Loan { borrower, on_host, number, bytes }
    }
}

prop_compose! {
    fn levels()(
        [updated, live_blocks, live_bytes, peak_live_bytes, suspended, priority]: [u64; 6],
        mode in short(16),
        [limit, pinned, requested, registered, peak_pinned, peak_requested]: [u64; 6],
        [near, on_peers, on_host, lost_microseconds]: [u64; 4],
        saved_microseconds: i64,
        gpus in vec(gpu(), 0..=32),
        places in vec(place(), 0..=32),
        loans in vec(loan(), 0..=64),
    ) -> Levels {
        let pinned = Pinned { limit, pinned, requested, registered, peak_pinned, peak_requested };
        let residence = Residence { near, on_peers, on_host, lost_microseconds, saved_microseconds };
        let (gpus, places, loans) = (gpus.into(), places.into(), loans.into());
        Levels {
            updated, mode, live_blocks, live_bytes, peak_live_bytes, suspended, priority, pinned, residence, gpus, places,
            loans,
        }
    }
}

prop_compose! {
    fn context()(
        [id, launches, copies, allocations]: [u64; 4],
        device: u32,
        cost in proptest::option::of(0..u64::MAX),
        kind in short(16),
        call in short(48),
        site in short(160),
    ) -> Context {
        Context { id, device, kind, cost, call, site, launches, copies, allocations }
    }
}

prop_compose! {
    fn site()(memory in short(16), text in short(152), [live, blocks, total]: [u64; 3]) -> Site {
        Site { memory, text, live, blocks, total }
    }
}

prop_compose! {
    fn found()(at: u64, code in short(16), device in proptest::option::of(0..1u32 << 31), text in short(224)) -> Finding {
        Finding { at, code, device, text }
    }
}

prop_compose! {
    fn label()(
        name in short(64),
        [blocks, bytes, near, on_peers, on_host]: [u64; 5],
        budget in proptest::option::of(0..u64::MAX),
    ) -> Label {
        Label { name, blocks, bytes, near, on_peers, on_host, budget }
    }
}

prop_compose! {
    fn snapshot()(
        counters: [u64; Counter::ALL.len()],
        levels in levels(),
        contexts in vec(context(), 0..=64),
        sites in vec(site(), 0..=64),
        findings in vec(found(), 0..=64),
        labels in vec(label(), 0..=64),
    ) -> Snapshot {
        Snapshot {
            process: process(),
            ended: false,
            took: Took::default(),
        moves: false,
            counters,
            levels,
            contexts: contexts.into(),
            sites: sites.into(),
            findings: findings.into(),
            labels: labels.into(),
        }
    }
}

fn write<M: gpupool_metrics::Memory>(page: &mut Page<M>, snapshot: &Snapshot) {
    assert!(Counter::ALL.iter().all(|counter| page.set(*counter, snapshot.counter(*counter))));
    assert!(page.levels(&snapshot.levels) && page.contexts(&snapshot.contexts));
    assert!(page.sites(&snapshot.sites) && page.findings(&snapshot.findings));
    assert!(page.labels(&snapshot.labels));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, max_shrink_iters: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    #[cfg_attr(miri, ignore = "takes Miri half a minute; the tests below write and read there")]
    fn what_is_written_is_read(first in snapshot(), second in snapshot()) {
        let memory = memory();
        let mut page = begin(&memory);
        for snapshot in [first, second] {
            write(&mut page, &snapshot);
            prop_assert_eq!(&read(&memory[..]).unwrap(), &snapshot);
            prop_assert_eq!(&read(&bytes(&memory)[..]).unwrap(), &snapshot, "from a file's bytes");
        }
    }

    /// Any bytes may stand in a file: the answer is a page or a reason.
    #[test]
    #[cfg_attr(miri, ignore = "takes Miri half a minute, and reading has no unsafe code")]
    fn changed_bytes_stop_nobody(snapshot in snapshot(), changes in vec((0..BYTES, any::<u8>()), 1..200), cut in 0..=BYTES) {
        let memory = memory();
        write(&mut begin(&memory), &snapshot);
        let mut bytes = bytes(&memory);
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        if let Ok(told) = read(&bytes[..]) {
            prop_assert!(told.levels.places.rows.len() <= 32 && told.levels.gpus.rows.len() <= 32);
            prop_assert!(told.contexts.rows.len() <= 64 && told.sites.rows.len() <= 64 && told.findings.rows.len() <= 64);
        }
        let _ = identify(&bytes[..]);
        if cut < BYTES {
            prop_assert!(read(&bytes[..cut]).is_err(), "a page that was cut");
        }
    }
}

#[test]
fn a_count_that_there_is_no_room_for_is_cut() {
    let memory = memory();
    write(&mut begin(&memory), &empty());
    let before = bytes(&memory);
    // Every word of the page as the largest number: whatever is a count is one of them.
    for at in (LEVELS..BYTES).step_by(8) {
        let mut bytes = before.clone();
        bytes[at..at + 8].fill(0xfe);
        match read(&bytes[..]) {
            Ok(told) => assert!(told.levels.places.rows.len() + told.contexts.rows.len() <= 64, "at {at}"),
            Err(error) => panic!("at {at}: {error}"),
        }
        if cfg!(miri) && at > LEVELS + 256 {
            break;
        }
    }
}

fn empty() -> Snapshot {
    Snapshot {
        process: process(),
        ended: false,
        took: Took::default(),
        moves: false,
        counters: [0; Counter::ALL.len()],
        levels: Levels::default(),
        contexts: Table::default(),
        sites: Table::default(),
        findings: Table::default(),
        labels: Table::default(),
    }
}

#[test]
fn what_there_is_no_room_for_is_counted() {
    let memory = memory();
    let mut page = begin(&memory);
    let site = |live| Site { memory: "pinned".to_owned(), text: "ö".repeat(100), live, blocks: 1, total: live };
    page.sites(&(0..70).map(site).collect::<Vec<_>>().into());
    let finding = |at| Finding { at, code: "GP011".to_owned(), device: None, text: "x".repeat(500) };
    page.findings(&Table { rows: (0..66).map(finding).collect(), more: 3 });
    let told = read(&memory[..]).unwrap();
    assert_eq!((told.sites.rows.len(), told.sites.more), (64, 6));
    assert_eq!(told.sites.rows[0].text, format!("{}…", "ö".repeat(74)), "cut between two characters");
    assert_eq!((told.findings.rows.len(), told.findings.more), (64, 5), "the oldest make room");
    assert_eq!(told.findings.rows.iter().map(|finding| finding.at).collect::<Vec<_>>(), (2..66).collect::<Vec<_>>());
    assert_eq!(told.findings.rows[0].text.len(), 224);
}

#[test]
fn the_end_is_told() {
    let memory = memory();
    let page = begin(&memory);
    assert!(!read(&memory[..]).unwrap().ended);
    assert!(page.set(Counter::Trims, 5));
    assert!(Page::end(page.memory()));
    let told = read(&memory[..]).unwrap();
    assert_eq!((told.ended, told.counter(Counter::Trims)), (true, 5));
}

/// By the process itself through its mapping, whose byte that is.
#[test]
fn whether_it_takes_memory_is_told_beside_the_rest() {
    let memory = memory();
    let _ = begin(&memory);
    let took = |word: u64| {
        memory[520 / 8].store(word, Ordering::Relaxed);
        read(&memory[..]).unwrap().took
    };
    assert!(!took(0).is_since(0));
    assert_eq!(took(7 << 1 | 1), Took { is_taking: true, last: 7 });
    assert!(took(7 << 1 | 1).is_since(9) && took(7 << 1).is_since(7) && !took(7 << 1).is_since(8));
}

/// As well.
#[test]
fn whether_memory_moves_is_told_beside_the_rest() {
    let memory = memory();
    let _ = begin(&memory);
    for word in [0, 1, 0] {
        memory[528 / 8].store(word, Ordering::Relaxed);
        assert_eq!((read(&memory[..]).unwrap().moves, moves(&memory[..])), (word != 0, word != 0));
    }
}

#[test]
fn a_newer_layout_is_named_and_still_says_whose_it_is() {
    let memory = memory();
    let _ = begin(&memory);
    let mut bytes = bytes(&memory);
    bytes[8..12].copy_from_slice(&(VERSION + 1).to_ne_bytes());
    let error = read(&bytes[..]).unwrap_err();
    assert!(matches!(error, Unreadable::Version(found) if found == VERSION + 1));
    let (newer, own) = (VERSION + 1, VERSION);
    let expected = format!(
        "its layout has version {newer}, and this gpupool reads version {own}; use the gpupool that is as new as the program's"
    );
    assert_eq!(error.to_string(), expected);
    assert_eq!(identify(&bytes[..]).unwrap(), process().identity);
    bytes[0] ^= 1;
    assert!(matches!(read(&bytes[..]), Err(Unreadable::Foreign)));
    assert!(matches!(identify(&[0u8; 0][..]), Err(Unreadable::File(_))));
}

/// A process that was killed in the middle of a write.
#[test]
fn a_torn_group_is_said_to_be_one() {
    let memory = memory();
    let mut page = begin(&memory);
    page.levels(&Levels { updated: 7, ..Levels::default() });
    memory[LEVELS / 8].fetch_add(1, Ordering::Relaxed);
    let error = read(&memory[..]).unwrap_err();
    assert!(matches!(error, Unreadable::Torn("levels")), "{error}");
    page.levels(&Levels { updated: 8, ..Levels::default() });
    assert_eq!(read(&memory[..]).unwrap().levels.updated, 8, "and whoever writes next makes it whole");
}

/// A writer and readers at full speed: levels that must agree do.
#[test]
fn readers_never_see_a_mixture() {
    let memory = memory();
    let rounds = if cfg!(miri) { 3 } else { 3000 };
    let place = |value: u64| Place {
        on_host: false,
        on_disk: false,
        number: 0,
        limit: value,
        held: value,
        used: value,
        peak_used: value,
        anchored: value,
        own: value,
        reserve: value,
        drained: false,
    };
    let levels = |value: u64| Levels {
        updated: value,
        live_bytes: value,
        places: vec![place(value); 32].into(),
        ..Levels::default()
    };
    let mut page = begin(&memory);
    page.levels(&levels(0));
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || assert!((1..=rounds).all(|value| page.levels(&levels(value)))));
        let mut last = 0;
        loop {
            let is_over = writer.is_finished();
            match read(&memory[..]) {
                Ok(told) => {
                    assert_eq!(told.levels, levels(told.levels.updated));
                    assert!(told.levels.updated >= last);
                    last = told.levels.updated;
                }
                Err(error) => assert!(matches!(error, Unreadable::Torn("levels")) && !is_over, "{error}"),
            }
            if is_over {
                break;
            }
        }
        assert_eq!(last, rounds);
    });
}
