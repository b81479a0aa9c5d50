//! One image of all ranks of a job on one host.

use super::{MIB, checkpointed, ends_well, generations, gpupool, session, store, unfinished};
use gpupool_store::{Reader, Which, jobs, rank_folder};
use harness::{Run, Running, artifact_folder, at_work, eventually, goes_on};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

/// What the command says of a job's image.
#[track_caller]
pub(super) fn job(program: &Running, session: &Path, folder: &Path, more: &str) -> Value {
    let ended = gpupool(program, session, &format!("checkpoint --json {more} {}", folder.display()));
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    let told: Value = serde_json::from_str(&text)
        .unwrap_or_else(|_| panic!("{more}: {text}{}", String::from_utf8_lossy(&ended.stderr)));
    assert_eq!(ended.status.success(), told.get("error").is_none(), "{told}");
    told
}

/// The job's images that are whole, newest first.
pub(super) fn job_images(folder: &Path) -> Vec<u64> {
    let listed = jobs(folder).unwrap_or_default().into_iter();
    listed.filter(|listed| listed.told.is_ok()).map(|listed| listed.generation).collect()
}

pub(super) fn rank(number: u32) -> Run {
    checkpointed("1x1GiB")
        .env("LOCAL_RANK", number.to_string())
        .env("LOCAL_WORLD_SIZE", "2")
        .env("GPUPOOL_DEVICES", "0")
}

/// The newest image of each of two ranks has memory of one moment, and both of the same: neither of them is ever more than a step ahead.
#[track_caller]
pub(super) fn are_of_one_moment(folder: &Path, latest: u32) {
    let step = |rank: u32| {
        let reader = Reader::open(&rank_folder(folder, rank), Which::Newest, 1).unwrap();
        let block = reader.manifest().blocks.iter().map(|block| &block.about).find(|about| about.bytes == 8 * MIB);
        let block = block.unwrap_or_else(|| panic!("rank {rank} has no block of 8 MiB"));
        let mut bytes = vec![0; 8 << 20];
        reader.read_into(block.id, 0, &mut bytes).unwrap();
        let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        assert!(words.windows(2).all(|pair| pair[1] == pair[0] + 1), "rank {rank}: of two moments");
        words[0] / 16
    };
    let [first, second] = [0, 1].map(step);
    assert!(first.abs_diff(second) <= 1 && first.max(second) <= latest + 1, "{first} and {second} of {latest}");
}

/// Steps that two ranks have done together.
pub(super) fn steps(program: &mut Running) -> u64 {
    program.ask("steps").parse().unwrap()
}

#[track_caller]
pub(super) fn further_steps(program: &mut Running) {
    let before = steps(program);
    eventually("further steps", || (steps(program) > before + 8).then_some(()));
}

#[test]
fn ranks_whose_kernels_wait_for_each_other_have_one_image_of_one_moment() {
    let (_around, folder) = store();
    let run = Run::program("ranks").sim("2x1GiB").env("SIMCUDA_STRICT", "on").env("GPUPOOL_RESERVE", "16MiB").shim();
    let mut program = run.start(None);
    let other: u32 = program.ask("other").parse().unwrap();
    further_steps(&mut program);
    for generation in 1..=4 {
        let told =
            job(&program, &program.session(), &folder, &format!("--wait 30s --keep 2 {} {other}", program.pid()));
        assert_eq!(told["generation"], generation, "{told}");
        let latest = steps(&mut program) as u32;
        are_of_one_moment(&folder, latest);
        further_steps(&mut program);
    }
    assert_eq!(job_images(&folder), [4, 3]);
    let list = String::from_utf8(program.gpupool(&format!("store list {}", folder.display())).stdout).unwrap();
    assert!(list.contains("images of a job"), "{list}");
    let verified = program.gpupool(&format!("store verify --json {}", folder.display()));
    let told: Value = serde_json::from_slice(&verified.stdout).unwrap();
    assert!(verified.status.success() && told[1]["ranks"]["1"]["wrong"] == serde_json::json!([]), "{told}");
    assert_eq!(program.ask("end"), "0 wrong");
    assert!(program.end().0.success());
}

#[test]
fn a_jobs_ranks_come_back_by_their_numbers() {
    let (_around, folder) = store();
    let session = session();
    let mut ranks = [0, 1].map(|number| rank(number).start(Some(session.path())));
    for (program, seed) in ranks.iter_mut().zip([5000, 6000]) {
        program.ask(&format!("name weights 3072 0 {seed}"));
    }
    let [first, second] = &ranks;
    let told = job(second, session.path(), &folder, &format!("--job {}", second.pid()));
    assert_eq!(told["ranks"].as_array().map(Vec::len), Some(2), "{told}");
    assert_eq!(told["ranks"][0]["pid"], first.pid(), "in the order of their numbers: {told}");
    // One that has died is missed.
    second.kill();
    let alone = gpupool(first, session.path(), &format!("checkpoint --job {} {}", first.pid(), folder.display()));
    let said = String::from_utf8(alone.stderr).unwrap();
    assert!(said.contains("has 2 ranks, and those found beside it are 0"), "{said}");
    assert_eq!(job_images(&folder), [1]);

    for (number, seed) in [(1, 6000), (0, 5000)] {
        let mut program = rank(number).env("GPUPOOL_RESTORE", &folder).start(None);
        assert_eq!(program.ask("name weights 3072 0 1"), format!("0 {seed} 0"), "rank {number}");
    }
    let mut third = rank(2).env("GPUPOOL_RESTORE", &folder).start(None);
    assert_eq!(third.ask("name weights 3072 0 1"), "-8 1 0");
    let log = std::fs::read_to_string(third.log()).unwrap();
    assert!(log.contains("it is of 2 ranks, and this process is rank 2"), "{log}");
    // A rank whose image is gone is no reason to take those of another moment for the others.
    std::fs::remove_dir_all(rank_folder(&folder, 1)).unwrap();
    let mut program = rank(0).env("GPUPOOL_RESTORE", &folder).start(None);
    assert_eq!(program.ask("name weights 3072 0 1"), "-8 1 0");
}

#[test]
fn a_rank_that_is_killed_while_it_writes_leaves_the_older_image_of_the_job_and_the_other_rank() {
    let (_around, folder) = store();
    let session = session();
    let mut first = rank(0).start(Some(session.path()));
    at_work(&mut first, 2);
    let mut whole = 0;
    for round in 0..4_u64 {
        let mut second = rank(1).start(Some(session.path()));
        // What the one before has left is not found again in another process's memory.
        second.ask(&format!("name weights 32768 0 {}", 5000 + round));
        let pids = format!("{} {}", first.pid(), second.pid());
        std::thread::scope(|scope| {
            let (asking, pages, own, pids) = (&first, session.path(), &folder, &pids);
            let asked = scope.spawn(move || job(asking, pages, own, pids));
            let rank = rank_folder(&folder, 1);
            eventually("a part of an image, or all of it", || {
                let writer = std::fs::read_to_string(rank.join("lock")).ok();
                let is_its = writer.is_some_and(|writer| writer.trim() == second.pid().to_string());
                let is_there = job_images(&folder).first() > Some(&whole);
                (is_there || is_its && unfinished(&rank) >= Some(round * 2 * MIB)).then_some(())
            });
            second.signal(libc::SIGKILL);
            let told = asked.join().unwrap();
            let images = job_images(&folder);
            match told.get("error") {
                None => whole += 1,
                Some(why) => assert!(why.as_str().is_some_and(|why| why.contains("as it was")), "{told}"),
            }
            assert_eq!(images.first().copied().unwrap_or(0), whole, "{told}");
        });
        goes_on(&mut first);
    }
    let mut second = rank(1).start(Some(session.path()));
    second.ask("name weights 4096 0 5000");
    let told = job(&first, session.path(), &folder, &format!("--keep 1 {} {}", first.pid(), second.pid()));
    assert_eq!(told["generation"], whole + 1, "{told}");
    assert_eq!(job_images(&folder), [whole + 1]);
    let [one, other] = [0, 1].map(|rank| generations(&rank_folder(&folder, rank)).len());
    assert_eq!((one, other), (1, 1), "what belongs to no image of the job is gone");
    ends_well(first);
}

/// Whether the thread that makes an image of this program waits for something to be said to it.
fn waits_for_a_word(program: &Running) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", program.pid())).unwrap();
    let of = |task: &std::fs::DirEntry, name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
    let mut images = tasks.flatten().filter(|task| of(task, "comm").trim() == "gpupool-image");
    // The number of the system call that it is in.
    let sleeps = [libc::SYS_poll, libc::SYS_ppoll].map(|call| call.to_string());
    images.any(|task| of(&task, "syscall").split(' ').next().is_some_and(|call| sleeps.iter().any(|it| it == call)))
}

/// It may write to another one's memory as soon as it goes on, which would then be of a later moment than its own.
#[test]
fn no_rank_goes_on_before_the_memory_of_all_is_copied() {
    let (_around, folder) = store();
    let session = session();
    let [mut first, mut second] = [0, 1].map(|number| rank(number).start(Some(session.path())));
    first.ask("name weights 131072 0 5000");
    second.ask("block 10240 5000");
    at_work(&mut first, 1);
    let used = |rank: &mut Running| -> u64 { rank.ask("used").parse().unwrap() };
    let before = used(&mut first);
    // Nothing of it works, so this is its memory's being mapped a second time, from where it is copied.
    second.ask("hold cuMemMap");
    let mut command = Command::new(artifact_folder().join("gpupool"));
    command.args(["checkpoint", "--json", "--wait", "60s"]).args([&first, &second].map(|rank| rank.pid().to_string()));
    command.arg(&folder).env("XDG_RUNTIME_DIR", session.path()).env_remove("LD_PRELOAD").stdout(Stdio::piped());
    let command = command.spawn().unwrap();
    eventually("a rank that stands in the middle of copying", || (second.ask("stands") == "yes").then_some(()));
    // Both are at rest since before that: its thread ends the round at most that it had no further work for, and begins none.
    let rounds = |rank: &mut Running| -> u64 { rank.ask("rounds").parse().unwrap() };
    let most = rounds(&mut first) + 1;
    eventually("a rank that has its copy and waits for the other one", || {
        assert!(rounds(&mut first) <= most, "the first rank goes on while the second one is copied");
        (used(&mut first) >= before + 64 * MIB && waits_for_a_word(&first)).then_some(())
    });
    assert!(rounds(&mut first) <= most);
    second.ask("let");
    let told: Value = serde_json::from_slice(&command.wait_with_output().unwrap().stdout).unwrap();
    assert!(told.get("error").is_none(), "{told}");
    assert_eq!(job_images(&folder), [1]);
    goes_on(&mut first);
    [first, second].into_iter().for_each(ends_well);
}

#[test]
fn of_ranks_of_which_one_is_suspended_there_is_no_image_and_it_is_said_why() {
    let (_around, folder) = store();
    let session = session();
    let mut ranks = [0, 1].map(|number| rank(number).start(Some(session.path())));
    ranks.iter_mut().for_each(|rank| at_work(rank, 1));
    let pids = ranks.each_ref().map(|rank| rank.pid().to_string()).join(" ");
    let [first, second] = &ranks;
    let suspend = |what: &str| gpupool(first, session.path(), &format!("{what} {}", second.pid())).status.success();
    assert!(suspend("suspend --alone"));
    // It has ended its connection before or after it is told when to stop.
    for _ in 0..12 {
        let told = job(first, session.path(), &folder, &pids);
        let said = |rank: usize| told["ranks"][rank]["error"].as_str().unwrap_or_default().to_owned();
        assert!(said(1).contains("it is suspended; resume it first"), "{told}");
        assert!(said(0).contains(&format!("process {} was not ready", second.pid())), "{told}");
    }
    assert!(suspend("resume"));
    assert_eq!(job(first, session.path(), &folder, &pids)["generation"], 1);
    ranks.into_iter().for_each(ends_well);
}

/// A launcher's word of `of` ranks on this host, all of the job.
fn rank_of(number: u32, of: u32) -> Run {
    rank(number).env("LOCAL_WORLD_SIZE", of.to_string()).env("WORLD_SIZE", of.to_string())
}

/// What a program that names its memory gets from the images in a folder, and its log.
fn came_back(run: Run, folder: &Path) -> (String, String) {
    let mut program = run.env("GPUPOOL_RESTORE", folder).start(None);
    let answer = program.ask("name weights 3072 0 1");
    let log = std::fs::read_to_string(program.log()).unwrap();
    ends_well(program);
    (answer, log)
}

#[test]
fn an_image_of_a_part_of_a_job_is_refused_and_the_whole_one_stays() {
    let (_around, folder) = store();
    let session = session();
    let mut ranks: Vec<Running> = (0..3).map(|number| rank_of(number, 3).start(Some(session.path()))).collect();
    ranks.iter_mut().for_each(|rank| drop(rank.ask("name weights 3072 0 5000")));
    let [first, second, third] = [0, 1, 2].map(|number: usize| ranks[number].pid());
    assert_eq!(job(&ranks[0], session.path(), &folder, &format!("--job {first}"))["generation"], 1);
    let refused = |pids: &str| {
        let ended = gpupool(&ranks[0], session.path(), &format!("checkpoint --keep 1 {pids} {}", folder.display()));
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!((ended.status.code(), said.lines().count()), (Some(2), 1), "{pids}: {said}");
        assert_eq!(job_images(&folder), [1], "{pids}: {said}");
        said
    };
    let said = refused(&format!("{first} {second}"));
    assert!(said.contains(&format!("process {third} runs as well")), "{said}");
    assert!(said.contains(&format!("gpupool checkpoint --job {first} DIR")), "{said}");
    // A rank that is suspended is missed as much as one that runs.
    assert!(gpupool(&ranks[0], session.path(), &format!("suspend --alone {third}")).status.success());
    let said = refused(&format!("{second} {first}"));
    assert!(said.contains(&format!("process {third} runs as well")), "{said}");
    // And one that has ended, of which the launcher has told.
    let ended = ranks.pop().unwrap();
    ended.kill();
    ended.end();
    let said = gpupool(&ranks[0], session.path(), &format!("checkpoint {first} {second} {}", folder.display()));
    let said = String::from_utf8(said.stderr).unwrap();
    assert!(said.contains("has 3 ranks, and rank 2 is not among"), "{said}");
    assert_eq!(job_images(&folder), [1]);
    ranks.into_iter().for_each(ends_well);
}

/// As an older gpupool may have written it, or a launcher that said of fewer.
#[test]
fn no_rank_takes_what_it_has_of_an_image_of_fewer_ranks_than_its_launcher_says() {
    let (_around, folder) = store();
    let session = session();
    let write = |of: u32, seed: u32| {
        let ranks: Vec<Running> = (0..of).map(|number| rank_of(number, of).start(Some(session.path()))).collect();
        let ranks: Vec<Running> = ranks
            .into_iter()
            .map(|mut rank| {
                rank.ask(&format!("name weights 3072 0 {seed}"));
                rank
            })
            .collect();
        let told = job(&ranks[0], session.path(), &folder, &format!("--job {}", ranks[0].pid()));
        assert_eq!(told["ranks"].as_array().map(Vec::len), Some(of as usize), "{told}");
        ranks.into_iter().for_each(ends_well);
    };
    let back = |number: u32, of: u32| came_back(rank_of(number, of), &folder);
    write(2, 6000);
    let (answer, log) = back(0, 3);
    assert_eq!(answer, "-8 1 0", "{log}");
    assert!(log.contains("it is of 2 ranks, and the launcher says that there are 3"), "{log}");
    write(3, 5000);
    write(2, 6000);
    for number in [0, 2] {
        let (answer, log) = back(number, 3);
        assert_eq!(answer, "0 5000 0", "{log}");
        assert!(log.contains("an image of the job is passed over: "), "{log}");
    }
    assert_eq!(back(1, 2).0, "0 6000 0");
}

/// Every rank reads the folder that `GPUPOOL_RESTORE` names, and an image of one would give all of them that one's memory.
#[test]
fn an_image_of_one_rank_is_made_when_that_is_meant_and_comes_back_in_that_rank_only() {
    let (_around, folder) = store();
    let session = session();
    let mut ranks = [0, 1].map(|number| rank_of(number, 2).start(Some(session.path())));
    for (program, seed) in ranks.iter_mut().zip([5000, 6000]) {
        program.ask(&format!("name weights 3072 0 {seed}"));
    }
    let [first, second] = [0, 1].map(|number: usize| ranks[number].pid());
    let ask = |how: &str| gpupool(&ranks[0], session.path(), &format!("checkpoint {how} {first} {}", folder.display()));
    for how in ["", "--process"] {
        let refused = ask(how);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert_eq!((refused.status.code(), said.lines().count()), (Some(2), 1), "{how}: {said}");
        assert!(said.contains(&format!("process {second} runs as well")), "{how}: {said}");
        assert!(said.contains(&format!("gpupool checkpoint --job {first} DIR is of all, --alone")), "{how}: {said}");
    }
    assert!(!folder.exists());
    let made = ask("--alone");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    ranks.into_iter().for_each(ends_well);

    let back = |run: Run| came_back(run, &folder);
    let (answer, log) = back(rank_of(0, 2));
    assert_eq!(answer, "0 5000 0", "{log}");
    assert!(!log.contains("GPUPOOL_RESTORE: image"), "{log}");
    let (answer, log) = back(rank_of(1, 2));
    assert_eq!(answer, "-8 1 0", "{log}");
    assert!(log.contains("is of rank 0 of 2 alone, and this process is rank 1 of 2"), "{log}");
    // Of another number of ranks, or of none, it comes back and is told.
    let (answer, log) = back(rank_of(0, 3));
    assert_eq!(answer, "0 5000 0", "{log}");
    assert!(log.contains("is of rank 0 of 2, and this process is rank 0 of 3"), "{log}");
    let (answer, log) = back(checkpointed("1x1GiB"));
    assert_eq!(answer, "0 5000 0", "{log}");
    assert!(log.contains("is of rank 0 of 2, and this process is no rank of several"), "{log}");
}

#[test]
fn ranks_are_told_that_what_they_read_is_of_a_process_without_ranks_or_of_more_ranks() {
    let (_around, folder) = store();
    let back = |folder: &Path, number: u32, of: u32| came_back(rank_of(number, of), folder);
    let mut program = checkpointed("1x1GiB").start(None);
    program.ask("name weights 3072 0 5000");
    let made = program.gpupool(&format!("checkpoint {} {}", program.pid(), folder.display()));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    ends_well(program);
    let (answer, log) = back(&folder, 1, 2);
    assert_eq!(answer, "0 5000 0", "{log}");
    assert!(log.contains("was no rank of several, and this process is rank 1 of 2: each rank"), "{log}");

    let (_around, folder) = store();
    let session = session();
    let mut ranks: Vec<Running> = (0..3).map(|number| rank_of(number, 3).start(Some(session.path()))).collect();
    ranks.iter_mut().for_each(|rank| drop(rank.ask("name weights 3072 0 5000")));
    job(&ranks[0], session.path(), &folder, &format!("--job {}", ranks[0].pid()));
    ranks.into_iter().for_each(ends_well);
    let (answer, log) = back(&folder, 1, 2);
    assert_eq!(answer, "0 5000 0", "{log}");
    assert!(log.contains("is of 3 ranks, and the launcher says that there are 2: nothing of the others"), "{log}");
}

/// With `--keep` the images of the one went for those of the other, and a restore takes the newest, whosever it is.
#[test]
fn a_folder_with_images_of_another_rank_or_another_program_takes_none_of_this_one() {
    let (_around, folder) = store();
    let session = session();
    let mut ranks = [0, 1].map(|number| rank_of(number, 2).start(Some(session.path())));
    ranks.iter_mut().for_each(|rank| drop(rank.ask("name weights 3072 0 5000")));
    let mut other =
        Run::program("suspended").sim("1x1GiB").env("GPUPOOL_RESERVE", "16MiB").shim().start(Some(session.path()));
    at_work(&mut other, 1);
    let ask = |how: &str, pid: u32| {
        let asked = gpupool(&ranks[0], session.path(), &format!("checkpoint {how} {pid} {}", folder.display()));
        (asked.status.code(), String::from_utf8_lossy(&asked.stderr).into_owned())
    };
    let [first, second] = [0, 1].map(|number: usize| ranks[number].pid());
    for _ in 0..2 {
        assert_eq!(ask("--alone", first), (Some(0), String::new()));
    }
    let (status, said) = ask("--alone --keep 1", second);
    assert_eq!((status, said.lines().count()), (Some(2), 1), "{said}");
    assert!(said.contains("has images of rank 0 of 2 (image 2), and process") && said.contains("is rank 1"), "{said}");
    let (status, said) = ask("--keep 1", other.pid());
    assert_eq!((status, said.lines().count()), (Some(2), 1), "{said}");
    assert!(said.contains("has images of another program (image 2 is of ") && said.contains("suspended"), "{said}");
    assert_eq!(generations(&folder), [2, 1]);
    assert_eq!(ask("--alone --keep 1", first), (Some(0), String::new()), "its own goes on");
    assert_eq!(generations(&folder), [3]);
    ranks.into_iter().for_each(ends_well);
}

/// Nobody tells it before they are started again, and then there is nothing to be done any more.
#[test]
fn that_ranks_without_numbers_need_them_to_be_restored_is_told_with_the_image() {
    let (_around, folder) = store();
    let session = session();
    let run = || checkpointed("1x1GiB").env("GPUPOOL_DEVICES", "0");
    let mut ranks = [(); 2].map(|()| run().start(Some(session.path())));
    for (program, seed) in ranks.iter_mut().zip([5000, 6000]) {
        program.ask(&format!("name weights 3072 0 {seed}"));
    }
    let [first, second] = ranks.each_ref().map(Running::pid);
    let asked = gpupool(&ranks[0], session.path(), &format!("checkpoint {second} {first} {}", folder.display()));
    let said = String::from_utf8_lossy(&asked.stderr).into_owned();
    assert_eq!((asked.status.code(), said.lines().count()), (Some(0), 1), "{said}");
    assert!(said.contains(&format!("rank 0 is process {second}, rank 1 is process {first}")), "{said}");
    assert!(said.contains("LOCAL_RANK set to its number here and LOCAL_WORLD_SIZE=2"), "{said}");
    ranks.into_iter().for_each(ends_well);
    // As it says.
    for (number, seed) in [("0", 6000), ("1", 5000)] {
        let run = run().env("LOCAL_RANK", number).env("LOCAL_WORLD_SIZE", "2").env("GPUPOOL_RESTORE", &folder);
        assert_eq!(run.start(None).ask("name weights 3072 0 1"), format!("0 {seed} 0"), "rank {number}");
    }
}

/// The newest one may be damaged, or of a moment that is no good.
#[test]
fn an_older_image_of_a_job_comes_back_where_its_number_is_given() {
    let (_around, folder) = store();
    let session = session();
    let mut ranks = [0, 1].map(|number| rank_of(number, 2).start(Some(session.path())));
    for moment in [0, 1000] {
        for (program, seed) in ranks.iter_mut().zip([5000, 7000]) {
            program.ask(&format!("name weights{moment} 3072 0 {}", seed + moment));
        }
        job(&ranks[0], session.path(), &folder, &format!("--job {}", ranks[0].pid()));
    }
    ranks.into_iter().for_each(ends_well);
    let back = |number: u32, generation: &str, name: &str| {
        let run = rank_of(number, 2).env("GPUPOOL_RESTORE", &folder).env("GPUPOOL_RESTORE_GENERATION", generation);
        let mut program = run.start(None);
        (program.ask(&format!("name {name} 3072 0 1")), std::fs::read_to_string(program.log()).unwrap())
    };
    for (number, seed) in [(0, 5000), (1, 7000)] {
        assert_eq!(back(number, "1", "weights0").0, format!("0 {seed} 0"), "rank {number}");
        assert_eq!(back(number, "1", "weights1000").0, "-8 1 0", "rank {number}: the older image has none of it");
        assert_eq!(back(number, "2", "weights1000").0, format!("0 {} 0", seed + 1000), "rank {number}");
    }
    let (answer, log) = back(0, "3", "weights0");
    assert!(answer == "-8 1 0" && log.contains("it has no image 3 of the job that is whole"), "{answer}: {log}");
}
