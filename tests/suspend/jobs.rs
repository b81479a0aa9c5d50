//! Ranks of a job, which wait for each other on their GPUs: they are suspended together, or one is refused.

use super::{ends_well, suspended};
use harness::{Run, Running, artifact_folder, at_work, eventually, goes_on, page_of};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// As a launcher would start them that says of `world` ranks: of a program of its own each, whose pages are in one folder.
fn ranks(session: &TempDir, count: u32, world: u32) -> Vec<Running> {
    numbered(session, 0..count, world)
}

/// The same of ranks with these numbers.
fn numbered(session: &TempDir, numbers: impl IntoIterator<Item = u32>, world: u32) -> Vec<Running> {
    let rank = |number: u32| {
        let run = suspended("1x1GiB").env("LOCAL_RANK", number.to_string());
        let run = run.env("LOCAL_WORLD_SIZE", world.to_string()).env("GPUPOOL_DEVICES", "0").log();
        let mut program = run.start(Some(session.path()));
        at_work(&mut program, 1);
        program
    };
    numbers.into_iter().map(rank).collect()
}

fn gpupool(session: &Path, arguments: &str) -> Output {
    let mut command = Command::new(artifact_folder().join("gpupool"));
    command.args(arguments.split(' ')).env("XDG_RUNTIME_DIR", session).env_remove("LD_PRELOAD");
    command.output().unwrap()
}

#[track_caller]
fn done(session: &TempDir, arguments: &str) -> Value {
    let ended = gpupool(session.path(), arguments);
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.success(), "{arguments}: {said}");
    serde_json::from_slice(&ended.stdout).unwrap_or_else(|error| panic!("{arguments}: {error}: {said}"))
}

/// The one line by which it was refused.
#[track_caller]
fn refused(session: &TempDir, arguments: &str) -> String {
    let ended = gpupool(session.path(), arguments);
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(!ended.status.success() && said.lines().count() == 1, "{arguments}: {said}");
    said
}

/// Which of them are suspended, as their pages say.
fn are_suspended(session: &TempDir, ranks: &[Running]) -> Vec<bool> {
    let of_one = |rank: &Running| page_of(session.path(), rank.pid()).map(|page| page.levels.suspended > 0);
    ranks.iter().map(|rank| of_one(rank).unwrap_or_else(|| panic!("process {} has no page", rank.pid()))).collect()
}

/// Causes of GP022 in its log.
fn causes(rank: &Running) -> Vec<String> {
    let log = std::fs::read_to_string(rank.log()).unwrap();
    let events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let found = events.filter(|event| event["code"] == "GP022");
    found.map(|event| event["facts"]["cause"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn one_rank_alone_is_refused_with_the_numbers_of_the_others_unless_that_is_meant() {
    let session = tempfile::tempdir().unwrap();
    let mut ranks = ranks(&session, 3, 3);
    let [first, second, third] = [0, 1, 2].map(|rank: usize| ranks[rank].pid());
    for _ in 0..2 {
        let said = refused(&session, &format!("suspend --to host {first}"));
        assert!(said.contains(&format!("process {first}: ")) && said.contains("GP022"), "{said}");
        assert!(said.contains(&format!("processes {second}, {third} run as well")), "{said}");
        assert!(said.contains(&format!("--job {first}")) && said.contains("--alone"), "{said}");
    }
    let said = refused(&session, &format!("suspend {third} {first}"));
    assert!(said.contains(&format!("process {third}: ")) && said.contains(&format!("process {second} runs as well")));
    let json = gpupool(session.path(), &format!("suspend --json {second}"));
    let told: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert!(told[0]["error"].as_str().is_some_and(|why| why.contains("--job")), "{told}");
    assert_eq!(are_suspended(&session, &ranks), [false; 3]);
    ranks.iter_mut().for_each(goes_on);
    // What helps is said by the command with all that there is to say, and in the finding once.
    let log = std::fs::read_to_string(ranks[0].log()).unwrap();
    let finding = log.lines().find(|line| line.contains("GP022")).unwrap_or_else(|| panic!("{log}"));
    let finding: Value = serde_json::from_str(finding).unwrap();
    let message = finding["message"].as_str().unwrap();
    assert!(message.contains(&format!("processes {second}, {third} run as well")), "{message}");
    assert_eq!((message.matches("--job").count(), message.matches("--alone").count()), (1, 1), "{message}");
    // No call of the program brought it about.
    assert!(!message.contains("where:"), "{message}");
    // Told once by each that was asked, whoever asks in a loop.
    assert_eq!(ranks.iter().map(causes).collect::<Vec<_>>(), [["siblings"], ["siblings"], ["siblings"]]);

    done(&session, &format!("suspend --json --alone {first}"));
    assert_eq!(are_suspended(&session, &ranks), [true, false, false]);
    // One that is suspended already waits for nobody.
    done(&session, &format!("suspend --json {third} {second}"));
    assert_eq!(are_suspended(&session, &ranks), [true; 3]);
    done(&session, &format!("resume --json {second}"));
    assert_eq!(are_suspended(&session, &ranks), [true, false, true]);
    goes_on(&mut ranks[1]);
    // Those of them that are suspended.
    let back = done(&session, &format!("resume --json --job {second}"));
    let pids: Vec<u64> = back.as_array().unwrap().iter().filter_map(|row| row["pid"].as_u64()).collect();
    assert_eq!(pids, [first, third].map(u64::from));
    ranks.iter_mut().for_each(goes_on);
    ranks.into_iter().for_each(ends_well);
}

#[test]
fn all_ranks_of_a_job_are_suspended_and_resumed_by_the_number_of_one() {
    let session = tempfile::tempdir().unwrap();
    let mut ranks = ranks(&session, 2, 2);
    let pids: Vec<u64> = ranks.iter().map(|rank| rank.pid().into()).collect();
    for name in [format!("--job {}", ranks[1].pid()), "--job".to_owned()] {
        let left = done(&session, &format!("suspend --json --wait 60s --to host {name}"));
        let told: Vec<u64> = left.as_array().unwrap().iter().filter_map(|row| row["pid"].as_u64()).collect();
        assert_eq!(told, pids, "in the order of their numbers: {left}");
        assert_eq!(are_suspended(&session, &ranks), [true; 2]);
        done(&session, &format!("resume --json {name}"));
        assert_eq!(are_suspended(&session, &ranks), [false; 2]);
        ranks.iter_mut().for_each(goes_on);
    }
    assert!(refused(&session, "suspend --job 1 2").contains("--job takes one process of the job"));
    let both = gpupool(session.path(), &format!("suspend --job --alone {}", pids[0]));
    assert!(!both.status.success() && String::from_utf8_lossy(&both.stderr).contains("cannot be used with"));
    // One that has ended waits for nobody; the job is not whole without it.
    ranks.pop().unwrap().kill();
    let said = refused(&session, &format!("suspend --job {}", pids[0]));
    assert!(said.contains("has 2 ranks, and those found beside it are 0"), "{said}");
    eventually("one without the other", || {
        gpupool(session.path(), &format!("suspend {}", pids[0])).status.success().then_some(())
    });
    done(&session, &format!("resume --json {}", pids[0]));
    ranks.into_iter().for_each(ends_well);
}

/// A launcher that says so has started one, whatever else its parent has.
#[test]
fn ranks_of_jobs_of_one_are_no_siblings() {
    let session = tempfile::tempdir().unwrap();
    let ranks = ranks(&session, 2, 1);
    for job in ["", "--job "] {
        let told = done(&session, &format!("suspend --json {job}{}", ranks[0].pid()));
        assert_eq!(told.as_array().map(Vec::len), Some(1), "{told}");
        assert_eq!(are_suspended(&session, &ranks), [true, false]);
        done(&session, &format!("resume --json {job}{}", ranks[0].pid()));
    }
    // Without a number it is not said which job is meant.
    assert!(refused(&session, "suspend --job").contains("ranks of several jobs are here"));
    ranks.into_iter().for_each(ends_well);
}

/// As where a launcher was told wrongly. All of them have to be named, and who follows the advice has them suspended.
#[test]
fn ranks_of_one_number_are_refused_with_an_advice_that_works() {
    let session = tempfile::tempdir().unwrap();
    let mut ranks = numbered(&session, [0, 0, 0], 2);
    let [first, second, third] = [0, 1, 2].map(|rank: usize| ranks[rank].pid());
    let said = refused(&session, &format!("suspend {second} {first}"));
    let advice = format!("gpupool suspend {second} {first} {third} suspends all of them together");
    assert!(said.contains(&advice), "{said}");
    let told = done(&session, &format!("suspend --json --wait 60s {second} {first} {third}"));
    assert_eq!(told.as_array().map(Vec::len), Some(3), "{told}");
    done(&session, &format!("resume --json {first} {second} {third}"));
    ranks.iter_mut().for_each(goes_on);
    ranks.into_iter().for_each(ends_well);
}

#[test]
fn that_one_of_several_has_ended_keeps_no_other_one_suspended() {
    let session = tempfile::tempdir().unwrap();
    let mut programs = ranks(&session, 2, 2);
    let (lives, killed) = (programs[0].pid(), programs[1].pid());
    done(&session, &format!("suspend --json --to host {lives} {killed}"));
    let ended = programs.pop().unwrap();
    ended.signal(libc::SIGKILL);
    ended.end();
    let said = refused(&session, &format!("resume {killed} {lives}"));
    assert!(said.contains(&format!("process {killed} ")) && said.contains("its process is gone"), "{said}");
    assert_eq!(are_suspended(&session, &programs), [false]);
    goes_on(&mut programs[0]);
    programs.into_iter().for_each(ends_well);
}

#[test]
fn that_one_rank_has_ended_keeps_no_other_one_of_the_job_suspended() {
    let session = tempfile::tempdir().unwrap();
    let mut programs = ranks(&session, 3, 3);
    let first = programs[0].pid();
    for name in [format!("--job {first}"), "--job".to_owned()] {
        if programs.len() == 3 {
            done(&session, &format!("suspend --json --to host --job {first}"));
            let ended = programs.pop().unwrap();
            ended.signal(libc::SIGKILL);
            ended.end();
        } else {
            done(&session, &format!("suspend --json --to host {first} {}", programs[1].pid()));
        }
        let ended = gpupool(session.path(), &format!("resume --json {name}"));
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!((ended.status.code(), said.lines().count()), (Some(1), 1), "{said}");
        assert!(said.contains("has 3 ranks") && said.contains("rank 2 is not"), "{said}");
        let told: Value = serde_json::from_slice(&ended.stdout).unwrap();
        assert_eq!(told.as_array().map(Vec::len), Some(2), "{told}");
        assert_eq!(are_suspended(&session, &programs), [false; 2]);
        programs.iter_mut().for_each(goes_on);
    }
    // That of what is no more whole stays refused.
    let said = refused(&session, &format!("suspend --job {first}"));
    assert!(said.contains("has 3 ranks, and those found beside it are 0, 1"), "{said}");
    programs.into_iter().for_each(ends_well);
}

/// A program that no launcher has numbered, on this GPU of two.
fn unnumbered(session: &TempDir, run: Run) -> Run {
    let run = run.sim("2x320MiB").env("SIMCUDA_MACHINE", session.path().join("machine"));
    run.env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_HOST_LIMIT", "1GiB").log().shim()
}

#[track_caller]
fn takes(rank: &mut Running) {
    let answer = rank.ask("take 8");
    assert!(answer.parse::<u64>().is_ok(), "{answer}");
}

/// The numbers of processes that have something, once there are so many.
fn with_memory(session: &TempDir, count: usize) -> Vec<u64> {
    eventually("their pages", || {
        let rows = done(session, "ps --json");
        let rows = rows.as_array()?.iter().filter(|row| row["levels"]["live_bytes"] == 8 << 20);
        let pids: Vec<u64> = rows.filter_map(|row| row["process"]["identity"]["pid"].as_u64()).collect();
        (pids.len() == count).then_some(pids)
    })
}

/// Whichever of these is named, or none, all of them are suspended and come back.
#[track_caller]
fn are_one_job(session: &TempDir, pids: &[u64]) {
    let named = pids.iter().map(|pid| format!("--job {pid}")).chain(["--job".to_owned()]);
    for job in named {
        for command in ["suspend --wait 60s --to host", "resume"] {
            let told = done(session, &format!("{command} --json {job}"));
            let told: Vec<u64> = told.as_array().unwrap().iter().filter_map(|row| row["pid"].as_u64()).collect();
            assert_eq!(told, pids, "{command} {job}");
        }
    }
}

#[test]
fn two_ranks_on_one_gpu_and_a_third_on_another_are_one_job_whichever_is_named() {
    let session = tempfile::tempdir().unwrap();
    let rank = |gpu: u32| unnumbered(&session, Run::program("neighbour").arg(gpu.to_string()));
    let mut ranks = [0, 0, 1].map(|gpu| rank(gpu).start(Some(session.path())));
    ranks.iter_mut().for_each(takes);
    let pids = with_memory(&session, 3);
    are_one_job(&session, &pids);
    let folder = session.path().join("images");
    let image = gpupool(session.path(), &format!("checkpoint --json --job {} {}", pids[0], folder.display()));
    let told: Value = serde_json::from_slice(&image.stdout).unwrap_or_else(|_| panic!("{image:?}"));
    assert_eq!(told["ranks"].as_array().map(Vec::len), Some(3), "{told}");
    // One that looks like them and is none is named.
    let other = unnumbered(&session, Run::program("neighbour").arg("0")).env("CUDA_VISIBLE_DEVICES", "1");
    let mut other = other.start(Some(session.path()));
    takes(&mut other);
    with_memory(&session, 4);
    let ended = gpupool(session.path(), &format!("suspend --wait 60s --to host --job {}", pids[2]));
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    let line = format!("process {} runs the same and is not of the job", other.pid());
    assert!(ended.status.success() && said.contains(&line) && said.contains("it sees other GPUs"), "{said}");
    done(&session, &format!("resume --json --job {}", pids[0]));
}

/// As behind a shell that starts them and ends.
#[test]
fn ranks_whose_parent_has_ended_are_one_job_still() {
    let session = tempfile::tempdir().unwrap();
    let rank = |gpu: u32| {
        let shell = Run::command("sh").arg("-c").arg(format!("exec 3<&0; \"$0\" {gpu} <&3 3<&- & exit 0"));
        let mut shell = unnumbered(&session, shell.arg(harness::program("neighbour"))).start(Some(session.path()));
        takes(&mut shell);
        shell
    };
    let ranks = [rank(0), rank(1)];
    let pids = with_memory(&session, 2);
    are_one_job(&session, &pids);
    drop(ranks);
}
