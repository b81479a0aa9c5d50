//! Commands of several hosts that meet in one folder.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::thread::scope;
use std::time::{Duration, Instant};

use gpupool_store::{Meeting, Pace, Who};

const SOON: Pace = Pace { within: Some(Duration::from_secs(20)), look: Duration::from_millis(1) };

fn who(node: u32) -> Who {
    Who { node, host: format!("host{node}"), pid: 100 + node }
}

fn in_a_while() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Node 0 of so many; `told` is what it says of itself.
fn lead(folder: &Path, nodes: u32, until: Instant) -> Result<Meeting, String> {
    Meeting::lead(folder, nodes, (who(0), 0), until, &|| true, |told| {
        let told: Vec<_> = told.iter().map(|(who, number)| (who.node, *number)).collect();
        let expected: Vec<_> = (0..nodes).map(|node| (node, node * 10)).collect();
        if told == expected { Ok(()) } else { Err(format!("they said {told:?}")) }
    })
}

fn join(folder: &Path, node: u32, nodes: u32) -> Result<Meeting, String> {
    Meeting::join(folder, nodes, (who(node), node * 10), in_a_while(), &|| true)
}

fn meeting_folders(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(".meeting-")).collect()
}

fn sum(words: Vec<(Who, u32)>) -> u32 {
    words.into_iter().map(|(who, word)| who.node * word).sum()
}

#[test]
fn all_hear_what_node_0_makes_of_what_all_have_said_and_nothing_is_left() {
    let around = tempfile::tempdir().unwrap();
    let folder = &around.path().join("job");
    scope(|scope| {
        let others: Vec<_> = (1..4)
            .map(|node| {
                scope.spawn(move || {
                    let mut meeting = join(folder, node, 4).unwrap();
                    assert_eq!(meeting.nodes().cloned().collect::<Vec<_>>(), [0, 1, 2, 3].map(who));
                    (0..20).map(|step| meeting.agree("step", step, SOON, sum).unwrap()).collect::<Vec<_>>()
                })
            })
            .collect();
        let mut meeting = lead(folder, 4, in_a_while()).unwrap();
        let heard: Vec<u32> = (0..20).map(|step| meeting.agree("step", step, SOON, sum).unwrap()).collect();
        assert_eq!(heard, (0..20).map(|step| 6 * step).collect::<Vec<_>>());
        drop(meeting);
        others.into_iter().for_each(|other| assert_eq!(other.join().unwrap(), heard));
    });
    assert_eq!(meeting_folders(folder), <[PathBuf; 0]>::default());
}

#[test]
fn who_does_not_come_is_named_to_all_that_have() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path();
    scope(|scope| {
        let other = scope.spawn(|| join(folder, 1, 4).map(drop).unwrap_err());
        // Long enough for the one that comes.
        let why = lead(folder, 4, Instant::now() + Duration::from_millis(1_900)).map(drop).unwrap_err();
        assert!(why.contains("node 2, 3 of 4 (from 0) has not come") && why.contains(" within 1.9 s: "), "{why}");
        assert_eq!(other.join().unwrap(), why);
    });
    let why = Meeting::join(folder, 2, (who(1), 10), Instant::now(), &|| true).map(drop).unwrap_err();
    assert!(why.contains("node 0 of 2 has not come"), "{why}");
    assert_eq!(meeting_folders(folder), <[PathBuf; 0]>::default());
}

#[test]
fn one_of_another_number_of_nodes_or_of_the_same_number_is_refused() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path();
    scope(|scope| {
        let other = scope.spawn(|| join(folder, 1, 3).map(drop).unwrap_err());
        let why = lead(folder, 2, in_a_while()).map(drop).unwrap_err();
        assert!(why.contains("node 1 (host host1, process 101) came as one of 3 nodes"), "{why}");
        assert_eq!(other.join().unwrap(), why);
    });
    scope(|scope| {
        // The later one may find that the others have met without it.
        let one = || Meeting::join(folder, 2, (who(1), 10), Instant::now() + Duration::from_secs(4), &|| true);
        let others = [0, 1].map(|_| scope.spawn(one));
        let leads = lead(folder, 2, in_a_while()).unwrap();
        let (joined, refused): (Vec<_>, Vec<_>) =
            others.into_iter().map(|other| other.join().unwrap()).partition(Result::is_ok);
        let why: Vec<String> = refused.into_iter().filter_map(Result::err).collect();
        assert_eq!((joined.len(), why.len()), (1, 1), "{why:?}");
        assert!(why[0].contains("takes part already") || why[0].contains("node 0 of 2 has not come"), "{why:?}");
        drop(joined);
        drop(leads);
    });
}

#[test]
fn who_leaves_says_why() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path();
    let early = |meeting: &mut Meeting| meeting.agree("step", 1, SOON, sum).unwrap_err();
    scope(|scope| {
        let others = [1, 2].map(|node| scope.spawn(move || join(folder, node, 3).unwrap()));
        let mut first = lead(folder, 3, in_a_while()).unwrap();
        let [one, two] = others.map(|other| other.join().unwrap());
        let two = scope.spawn(move || early(&mut { two }));
        one.leave("its rank has ended".to_owned());
        let why = early(&mut first);
        assert_eq!(why, "node 1 (host host1, process 101) has given up: its rank has ended");
        assert_eq!(two.join().unwrap(), why);
    });
    scope(|scope| {
        let other = scope.spawn(|| early(&mut join(folder, 1, 2).unwrap()));
        let first = lead(folder, 2, in_a_while()).unwrap();
        first.leave("there is no room".to_owned());
        assert_eq!(other.join().unwrap(), "node 0 (host host0, process 100) has given up: there is no room");
    });
}

#[test]
fn what_killed_ones_have_left_disturbs_nobody_and_goes() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path();
    // As they are while one waits for the other, and nobody writes there any more.
    let copied = folder.join("copied");
    scope(|scope| {
        let leads = scope.spawn(|| lead(folder, 3, Instant::now() + Duration::from_secs(3)).map(drop));
        let joins = scope.spawn(|| join(folder, 1, 3).map(drop));
        let is_there = |path: &Path| {
            let names = std::fs::read_dir(path.join("heard")).unwrap();
            names.count() >= 2
        };
        let lies = loop {
            match meeting_folders(folder).pop() {
                Some(path) if !path.to_string_lossy().ends_with(".new") && is_there(&path) => break path,
                _ => std::thread::yield_now(),
            }
        };
        let copied = std::process::Command::new("cp").arg("-r").args([&lies, &copied]).status().unwrap();
        assert!(copied.success());
        assert!(leads.join().unwrap().is_err() && joins.join().unwrap().is_err());
    });
    let left = folder.join(".meeting-0000000000000000");
    std::fs::rename(&copied, &left).unwrap();
    std::fs::create_dir(folder.join(".meeting-0000000000000001.new")).unwrap();
    let waits = File::open(&left).unwrap();
    scope(|scope| {
        let other = scope.spawn(|| join(folder, 1, 2).unwrap().agree("step", 1, SOON, sum));
        // One of a third number of nodes waits there, and says so for a while after nobody is there to listen any more.
        scope.spawn(move || {
            let inside = PathBuf::from(format!("/proc/self/fd/{}", waits.as_raw_fd()));
            let mut more = 0;
            while more < 300 {
                let _ = std::fs::write(inside.join(format!("heard/2-77aa-alive-{more}")), "");
                more += u32::from(!inside.join("said").exists());
            }
        });
        let mut first = lead(folder, 2, in_a_while()).unwrap();
        assert_eq!(first.agree("step", 2, SOON, sum), Ok(1));
        assert_eq!(other.join().unwrap(), Ok(1));
    });
    assert_eq!(meeting_folders(folder), <[PathBuf; 0]>::default());
}

#[test]
fn a_second_attempt_beside_one_that_lives_is_refused() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path();
    scope(|scope| {
        let first = scope.spawn(|| lead(folder, 2, Instant::now() + Duration::from_secs(4)).map(drop));
        while meeting_folders(folder).is_empty() {
            std::thread::yield_now();
        }
        let why = lead(folder, 2, in_a_while()).map(drop).unwrap_err();
        assert!(why.contains("writes an image of a job there"), "{why}");
        let why = first.join().unwrap().unwrap_err();
        assert!(why.contains("node 1 of 2 (from 0) has not come"), "{why}");
    });
}
