//! One image of ranks on several hosts, whose commands meet in its folder.

use super::jobs::{are_of_one_moment, further_steps, job_images, rank, steps};
use super::{MIB, ends_well, generations, session, store, unfinished, writers};
use gpupool_store::rank_folder;
use harness::{Run, Running, artifact_folder, at_work, eventually, goes_on, held_writers};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The command on one of two hosts, which are two folders of pages.
fn on_host(node: u32, session: &Path, folder: &Path, more: &str) -> Child {
    let mut command = Command::new(artifact_folder().join("gpupool"));
    command.args(["checkpoint", "--json", "--node", &format!("{node}/2")]).args(more.split_whitespace()).arg(folder);
    command.env("XDG_RUNTIME_DIR", session).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// What it says in the end.
#[track_caller]
fn said(command: Child) -> Value {
    let ended = command.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    let told: Value =
        serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}{}", String::from_utf8_lossy(&ended.stderr)));
    assert_eq!(ended.status.success(), told.get("error").is_none(), "{told}");
    told
}

/// Both commands.
fn on_hosts(sessions: [&Path; 2], folder: &Path, more: &str) -> [Value; 2] {
    // The one that the others wait for comes last.
    let other = on_host(1, sessions[1], folder, more);
    let first = on_host(0, sessions[0], folder, more);
    [first, other].map(said)
}

/// The only rank on its host.
fn host_rank(number: u32) -> Run {
    rank(0).env("LOCAL_WORLD_SIZE", "1").env("RANK", number.to_string()).env("WORLD_SIZE", "2")
}

/// One rank on each of two hosts, at work, and the folders of their pages.
fn two_hosts() -> ([TempDir; 2], [Running; 2]) {
    let sessions = [session(), session()];
    let mut number = 0;
    let ranks = sessions.each_ref().map(|session| {
        let mut rank = host_rank(number).start(Some(session.path()));
        number += 1;
        at_work(&mut rank, 1);
        rank
    });
    (sessions, ranks)
}

/// What lies in the folder of an attempt by which hosts agree, `said` and `heard`.
fn meeting(folder: &Path) -> Vec<String> {
    let entries = |path: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    };
    let is_one = |path: &PathBuf| path.to_string_lossy().contains("/.meeting-");
    let folders = entries(folder).into_iter().filter(is_one).flat_map(|path| entries(&path));
    folders.flat_map(|path| entries(&path)).map(|path| path.to_string_lossy().into_owned()).collect()
}

/// Waits until a node says this in an attempt, or its command has ended.
fn until_said(command: &mut Child, folder: &Path, node: u32, step: &str) {
    let (inner, begins) = if node == 0 { ("/said/", "0") } else { ("/heard/", "1-") };
    let is_it = |path: &String| {
        let name = path.split_once(inner).map(|(_, name)| name);
        name.is_some_and(|name| name.starts_with(begins) && name.ends_with(&format!("-{step}")))
    };
    while !meeting(folder).iter().any(is_it) && command.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
}

/// A command stands still for so long.
fn held_up(command: &Child, time: Duration) {
    let signal = |signal| {
        // SAFETY: kill has no preconditions; the child was not waited for, so the number is its.
        assert_eq!(unsafe { libc::kill(command.id() as i32, signal) }, 0);
    };
    signal(libc::SIGSTOP);
    let begun = Instant::now();
    eventually("the end of that time", || (begun.elapsed() >= time).then_some(()));
    signal(libc::SIGCONT);
}

#[test]
fn ranks_on_two_hosts_have_one_image_of_one_moment() {
    let (_around, folder) = store();
    let other = session();
    let run = Run::program("ranks").sim("2x1GiB").env("SIMCUDA_STRICT", "on").env("GPUPOOL_RESERVE", "16MiB").shim();
    let run = run.env("OTHER_SESSION", other.path()).env("RANK", "0").env("WORLD_SIZE", "2");
    let mut program = run.env("LOCAL_RANK", "0").env("LOCAL_WORLD_SIZE", "1").start(None);
    further_steps(&mut program);
    let session = program.session();
    for generation in 1..=4 {
        let [mut second, first] = [(1, other.path()), (0, &*session)]
            .map(|(node, session)| on_host(node, session, &folder, "--wait 30s --keep 2"));
        if generation % 2 == 1 {
            // One is late, and many steps are done meanwhile where the first does not wait for it.
            until_said(&mut second, &folder, 1, "came");
            held_up(&second, Duration::from_millis(300));
        }
        let told = [first, second].map(said);
        for (node, told) in told.iter().enumerate() {
            assert_eq!(
                (&told["generation"], told["hosts"].as_array().map(Vec::len)),
                (&generation.into(), Some(2)),
                "{told}"
            );
            let own = folder.join(format!("rank-{node}"));
            assert_eq!(told["ranks"].as_array().map(Vec::len), Some(1), "{told}");
            assert_eq!(told["ranks"][0]["folder"], own.to_str().unwrap(), "{told}");
        }
        let latest = steps(&mut program) as u32;
        are_of_one_moment(&folder, latest);
        further_steps(&mut program);
    }
    assert_eq!(job_images(&folder), [4, 3]);
    assert_eq!(meeting(&folder), [""; 0]);
    let verified = program.gpupool(&format!("store verify --json {}", folder.display()));
    let told: Value = serde_json::from_slice(&verified.stdout).unwrap();
    assert!(verified.status.success() && told[1]["ranks"]["1"]["wrong"] == serde_json::json!([]), "{told}");
    assert_eq!(program.ask("end"), "0 wrong");
    assert!(program.end().0.success());
}

#[test]
fn ranks_of_several_hosts_come_back_by_their_numbers_in_the_whole_job() {
    let (_around, folder) = store();
    let sessions = [session(), session()];
    let ranks: Vec<Running> = sessions
        .iter()
        .zip([0, 1])
        .map(|(session, number)| {
            let mut rank = host_rank(number).start(Some(session.path()));
            rank.ask(&format!("name weights 3072 0 {}", 5000 + number * 1000));
            rank
        })
        .collect();
    let told = on_hosts(sessions.each_ref().map(TempDir::path), &folder, "");
    assert_eq!(told.each_ref().map(|told| &told["generation"]), [1, 1], "{told:?}");
    let list = String::from_utf8(ranks[0].gpupool(&format!("store list {}", folder.display())).stdout).unwrap();
    assert!(list.contains("of 2 hosts"), "{list}");
    for (number, seed) in [(1, 6000), (0, 5000)] {
        let mut program = host_rank(number).env("GPUPOOL_RESTORE", &folder).start(None);
        assert_eq!(program.ask("name weights 3072 0 1"), format!("0 {seed} 0"), "rank {number}");
    }
    // The same two on one host.
    let mut program = rank(1).env("RANK", "1").env("WORLD_SIZE", "2").env("GPUPOOL_RESTORE", &folder).start(None);
    assert_eq!(program.ask("name weights 3072 0 1"), "0 6000 0");
    let mut program = rank(1).env("GPUPOOL_RESTORE", &folder).start(None);
    assert_eq!(program.ask("name weights 3072 0 1"), "-8 1 0");
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(log.contains("it is of ranks on 2 hosts, and no launcher has given this process its number"), "{log}");
}

#[test]
fn a_host_or_a_rank_that_is_missing_is_named_and_the_older_image_stays() {
    let (_around, folder) = store();
    let (sessions, mut ranks) = two_hosts();
    let paths = sessions.each_ref().map(TempDir::path);
    let told = on_hosts(paths, &folder, "");
    assert_eq!(told[0].get("error"), None, "{told:?}");
    let error = |told: &Value| told["error"].as_str().unwrap_or_else(|| panic!("{told}")).to_owned();

    let alone = error(&said(on_host(0, paths[0], &folder, "--meet 1s")));
    assert!(alone.contains("node 1 of 2 (from 0) has not come"), "{alone}");
    let alone = error(&said(on_host(1, paths[1], &folder, "--meet 1s")));
    assert!(alone.contains("node 0 of 2 has not come"), "{alone}");
    // Both commands on one host.
    for told in on_hosts([paths[0]; 2], &folder, "").map(|told| error(&told)) {
        assert!(told.contains("are both rank 0 of their job"), "{told}");
    }
    let other = session();
    let lost = host_rank(1).env("WORLD_SIZE", "3").env("RANK", "2");
    let mut lost = lost.start(Some(other.path()));
    at_work(&mut lost, 1);
    for told in on_hosts([paths[0], other.path()], &folder, "").map(|told| error(&told)) {
        assert!(told.contains("is of a job of 3 ranks, and others of one of 2"), "{told}");
    }
    // One that is not stopped, on the other host.
    ranks[1].ask("spin");
    // Whose own work ran at the last try would be told of that.
    assert_eq!(ranks[0].ask("rest"), "all do");
    let [first, second] = on_hosts(paths, &folder, "--wait 1s").map(|told| error(&told));
    ranks[0].ask("work");
    assert!(first.contains("node 1 (host ") && first.contains("did not come to rest in time"), "{first}");
    assert!(second.contains("did not come to rest in time"), "{second}");
    ranks[1].ask("release");
    assert_eq!(job_images(&folder), [1]);
    assert_eq!(meeting(&folder), [""; 0]);
    let told = on_hosts(paths, &folder, "--keep 1");
    assert_eq!(told.each_ref().map(|told| &told["generation"]), [2, 2], "{told:?}");
    assert_eq!(job_images(&folder), [2]);
    for mut rank in ranks {
        goes_on(&mut rank);
        ends_well(rank);
    }
}

#[test]
fn with_every_the_commands_of_both_hosts_meet_again_until_the_job_ends() {
    let (_around, folder) = store();
    let (sessions, ranks) = two_hosts();
    let begin = |node: usize| on_host(node as u32, sessions[node].path(), &folder, "--every 1s --keep 2 --meet 5s");
    let commands = [begin(1), begin(0)];
    eventually("a third image", || (job_images(&folder).first() >= Some(&3)).then_some(()));
    ranks.into_iter().for_each(ends_well);
    for command in commands {
        let ended = command.wait_with_output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert!(ended.status.success() && said.contains("has ended; no further image is written"), "{said}");
    }
    let images = job_images(&folder);
    assert!(images.len() == 2 && images[0] == images[1] + 1, "{images:?}");
}

/// Of each case all is of its own, so that they wait side by side for those that were killed.
#[test]
fn a_host_whose_command_is_killed_leaves_the_older_image_and_nothing_that_disturbs_the_next() {
    const CASES: [(u32, &str); 8] = [
        (0, "called"),
        (1, "came"),
        (0, "ready"),
        (1, "rest"),
        (0, "copied"),
        (1, "copied"),
        (0, "written"),
        (1, "written"),
    ];
    std::thread::scope(|scope| {
        for case in CASES {
            scope.spawn(move || killed_at(case));
        }
    });
}

fn killed_at((killed, step): (u32, &str)) {
    let (_around, folder) = store();
    let (sessions, mut ranks) = two_hosts();
    let paths = sessions.each_ref().map(TempDir::path);
    let told = on_hosts(paths, &folder, "");
    assert_eq!(told[0].get("error"), None, "{told:?}");
    let case = format!("node {killed} at {step}");

    let more = "--meet 12s --wait 30s";
    // Who is alone first is the one that is killed.
    let is_alone = ["called", "came"].contains(&step);
    let mut commands: Vec<(u32, Child)> = [killed, 1 - killed]
        .into_iter()
        .take(if is_alone && killed == 0 { 1 } else { 2 })
        .map(|node| (node, on_host(node, paths[node as usize], &folder, more)))
        .collect();
    let (_, mut command) = commands.remove(0);
    until_said(&mut command, &folder, killed, step);
    command.kill().unwrap();
    command.wait().unwrap();
    let begun = Instant::now();
    let mut images = vec![1];
    for (_, other) in commands {
        let told = said(other);
        match told["error"].as_str() {
            None => images.insert(0, 2),
            Some(why) => {
                let names = [format!("node {killed} (host "), format!("node {killed} of 2")];
                assert!(names.iter().any(|name| why.contains(name)), "{case}: {why}");
            }
        }
        assert!(step != "written" || told.get("error").is_none(), "{case}: {told}");
    }
    // Ten seconds without a sign of life, or those that it is waited for one to come.
    assert!(begun.elapsed().as_secs() < 40, "{case}: {:?}", begun.elapsed());
    assert_eq!(job_images(&folder), images, "{case}");
    for rank in &mut ranks {
        goes_on(rank);
    }
    // A rank that had begun to write finishes that.
    eventually("the end of what was begun", || {
        let lock =
            |rank| std::fs::read_to_string(rank_folder(&folder, rank).join("lock")).is_ok_and(|by| by.is_empty());
        (lock(0) && lock(1)).then_some(())
    });
    let told = on_hosts(paths, &folder, "--keep 1");
    assert_eq!(told[0]["generation"], images[0] + 1, "{case}: {told:?}");
    assert_eq!(told[1]["generation"], images[0] + 1, "{case}: {told:?}");
    assert_eq!(job_images(&folder), [images[0] + 1], "{case}");
    assert_eq!([0, 1].map(|rank| generations(&rank_folder(&folder, rank)).len()), [1, 1], "{case}");
    assert_eq!(meeting(&folder), [""; 0], "{case}");
    for rank in ranks {
        ends_well(rank);
    }
}

#[test]
fn a_rank_on_another_host_that_is_killed_while_it_writes_leaves_the_older_image() {
    let (_around, folder) = store();
    let (sessions, mut ranks) = two_hosts();
    let paths = sessions.each_ref().map(TempDir::path);
    let told = on_hosts(paths, &folder, "");
    assert_eq!(told[0].get("error"), None, "{told:?}");
    let mut images = vec![1];
    // Before the first byte, and behind some.
    for least in [0, 4 * MIB] {
        ranks[1].ask(&format!("name weights 65536 0 {}", 7000 + least));
        let pid = ranks[1].pid();
        let [mut other, first] = [1, 0].map(|node| on_host(node, paths[node as usize], &folder, ""));
        let held = loop {
            let held = if least == 0 { held_writers(&ranks[1], writers()) } else { None };
            let is_written = least > 0 && unfinished(&rank_folder(&folder, 1)).is_some_and(|bytes| bytes >= least);
            if held.is_some() || is_written || other.try_wait().unwrap().is_some() {
                break held;
            }
        };
        ranks[1].signal(libc::SIGKILL);
        // Its threads end once nobody looks at them.
        drop(held);
        let told = [first, other].map(said);
        match told[0]["error"].as_str() {
            None => images.insert(0, 2),
            Some(why) => assert!(why.contains(&format!("process {pid}")) && why.contains("node 1 (host "), "{why}"),
        }
        assert_eq!(told[1].get("error").is_some(), told[0].get("error").is_some(), "{told:?}");
        assert_eq!(job_images(&folder), images);
        goes_on(&mut ranks[0]);
        ranks[1] = host_rank(1).start(Some(paths[1]));
        at_work(&mut ranks[1], 1);
    }
    let told = on_hosts(paths, &folder, "--keep 1");
    let next = images[0] + 1;
    assert_eq!(told.each_ref().map(|told| told["generation"].as_u64()), [Some(next); 2], "{told:?}");
    assert_eq!([0, 1].map(|rank| generations(&rank_folder(&folder, rank)).len()), [1, 1]);
    ranks.into_iter().for_each(ends_well);
}

/// One of them hears late that all have stopped: its own rank waits for that.
#[test]
fn a_folder_that_is_slow_for_one_host_delays_all_and_that_is_all() {
    let (_around, folder) = store();
    let (sessions, ranks) = two_hosts();
    let paths = sessions.each_ref().map(TempDir::path);
    let [mut other, first] = [1, 0].map(|node| on_host(node, paths[node as usize], &folder, ""));
    until_said(&mut other, &folder, 1, "rest");
    // More than a program waits for others of its own host.
    held_up(&other, Duration::from_secs(6));
    let told = [first, other].map(said);
    assert_eq!(told.each_ref().map(|told| &told["generation"]), [1, 1], "{told:?}");
    ranks.into_iter().for_each(ends_well);
}
