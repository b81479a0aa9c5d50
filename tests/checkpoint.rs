//! `gpupool checkpoint`: images of a program's memory, written while it runs.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

#[path = "checkpoint/process.rs"]
mod process;

use gpupool_store::{Reader, Which, jobs, rank_folder};
use harness::{Run, Running, Traced, artifact_folder, at_work, eventually, goes_on, held_writers};
use serde_json::Value;
use std::ffi::OsStr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const KINDS: usize = 4;

fn checkpointed(gpus: &str) -> Run {
    let run = Run::program("checkpointed").sim(gpus).env("SIMCUDA_STRICT", "on").env("GPUPOOL_RESERVE", "16MiB");
    run.env("GPUPOOL_HOST_LIMIT", "1GiB").report().log().shim()
}

/// A folder in which images can lie: nobody else may replace it.
fn store() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("images");
    (folder, path)
}

/// What the command says of an image, or of why there is none.
#[track_caller]
fn told(program: &Running, folder: &Path, more: &str) -> Value {
    let ended = program.gpupool(&format!("checkpoint --json {} {} {more}", program.pid(), folder.display()));
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    let told: Value = serde_json::from_str(&text)
        .unwrap_or_else(|_| panic!("{more}: {text}{}", String::from_utf8_lossy(&ended.stderr)));
    assert_eq!(ended.status.success(), told.get("error").is_none(), "{told}");
    told
}

#[track_caller]
fn image(program: &Running, folder: &Path, more: &str) -> Value {
    let told = told(program, folder, more);
    assert_eq!(told.get("error"), None, "{told}");
    told
}

#[track_caller]
fn refused(program: &Running, folder: &Path, more: &str) -> String {
    let told = told(program, folder, more);
    told["error"].as_str().unwrap_or_else(|| panic!("it was not refused: {told}")).to_owned()
}

/// It ends, and the simulated driver has seen no breach of the rules.
#[track_caller]
fn ends_well(mut program: Running) {
    assert_eq!(program.ask("end"), "ended");
    let (status, folder) = program.end();
    assert!(status.success(), "{status}");
    let report = std::fs::read_to_string(folder.path().join("report")).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["violations"], serde_json::json!([]), "{report}");
}

/// The bytes at an address of the program, as the newest image has them.
#[track_caller]
fn stored(folder: &Path, address: u64, bytes: usize) -> Vec<u32> {
    let reader = Reader::open(folder, Which::Newest, 1).unwrap();
    let mut blocks = reader.manifest().blocks.iter().map(|block| &block.about);
    let block = blocks
        .find(|about| (about.address..about.address + about.bytes).contains(&address))
        .unwrap_or_else(|| panic!("{address:#x} is in no block"));
    let mut found = vec![0; bytes];
    reader.read_into(block.id, address - block.address, &mut found).unwrap();
    found.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// In which round each kind of this thread's memory was written.
#[track_caller]
fn rounds_of(program: &mut Running, folder: &Path, thread: u32) -> Vec<u32> {
    let sizes = [2 * MIB + 20480, MIB, 40 << 10, 2 * MIB];
    let told = program.ask(&format!("where {thread}"));
    let addresses: Vec<u64> = told.split_whitespace().map(|address| address.parse().unwrap()).collect();
    assert_eq!(addresses.len(), KINDS);
    let round = |(address, bytes): (&u64, u64)| {
        let words = stored(folder, *address, usize::try_from(bytes).unwrap());
        let first = words[0];
        let torn = words.iter().zip(0..).position(|(word, at)| *word != first.wrapping_add(at));
        assert_eq!(torn, None, "thread {thread}: memory of two rounds in one block");
        assert_eq!(first % 1000, 0);
        first / 1000
    };
    addresses.iter().zip(sizes).map(round).collect()
}

/// All of it is of one moment: each round writes one kind after the other.
#[track_caller]
fn agrees(program: &mut Running, folder: &Path, threads: u32) {
    for thread in 0..threads {
        let rounds = rounds_of(program, folder, thread);
        let falls = rounds.windows(2).all(|pair| pair[0] >= pair[1]);
        assert!(falls && rounds[0] - rounds[KINDS - 1] <= 1, "thread {thread}: {rounds:?}");
    }
}

fn generations(folder: &Path) -> Vec<u64> {
    gpupool_store::list(folder).unwrap_or_default().into_iter().map(|listed| listed.generation).collect()
}

#[track_caller]
fn verifies(folder: &Path) {
    for verified in gpupool_store::verify(folder, None, 1).unwrap() {
        assert_eq!(verified.wrong, []);
    }
}

#[test]
fn an_image_of_a_program_at_work_is_of_one_moment() {
    const THREADS: u32 = 8;
    let (_around, folder) = store();
    let mut program = checkpointed("2x1GiB").start(None);
    at_work(&mut program, THREADS);
    for generation in 1..=20 {
        let told = image(&program, &folder, "--keep 2");
        assert_eq!(told["generation"], generation);
        let least = u64::from(THREADS) * 5 * MIB;
        assert!(told["bytes"].as_u64() >= Some(least) && told["left_out_bytes"] == 0, "{told}");
        assert_eq!(told["in_stop_bytes"], 0, "there is room for all of it: {told}");
        agrees(&mut program, &folder, THREADS);
        goes_on(&mut program);
    }
    assert_eq!(generations(&folder), [20, 19]);
    verifies(&folder);
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert_eq!(log.matches("\"program.checkpoint\"").count(), 20);
    ends_well(program);
}

/// What `suspended` made of its own, as the newest image has it.
#[track_caller]
fn made_is_right(folder: &Path, home: u32, bytes: usize) {
    let reader = Reader::open(folder, Which::Newest, 1).unwrap();
    let mut blocks: Vec<_> = reader.manifest().blocks.iter().map(|block| &block.about).collect();
    blocks.sort_by_key(|about| about.address);
    let mut words = Vec::new();
    for about in blocks {
        assert_eq!(about.home, Some(home));
        let mut found = vec![0; usize::try_from(about.bytes).unwrap()];
        reader.read_into(about.id, 0, &mut found).unwrap();
        words.extend(found.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())));
    }
    assert_eq!(words.len(), bytes / 4);
    let wrong = words.iter().zip(0u32..).position(|(word, at)| *word != at.wrapping_mul(2_654_435_761));
    assert_eq!(wrong, None);
}

/// Read by whichever GPU the program works on: where the program lets it, or by a mapping of the image's own.
#[test]
fn memory_of_its_own_is_in_the_image_whoever_the_program_lets_read_it() {
    for (gpu, is_shut) in [(0, false), (0, true), (1, false), (1, true)] {
        let (_around, folder) = store();
        let mut program =
            Run::program("suspended").sim("2x1GiB").env("SIMCUDA_STRICT", "on").report().shim().start(None);
        assert_eq!(program.ask(&format!("make 16 {gpu}")), "made");
        if is_shut {
            assert_eq!(program.ask("shut"), "shut");
        }
        let told = image(&program, &folder, "");
        assert_eq!(
            (&told["bytes"], &told["left_out_bytes"]),
            (&(16 * MIB).into(), &0.into()),
            "{gpu} {is_shut}: {told}"
        );
        made_is_right(&folder, gpu, 16 << 20);
        verifies(&folder);
        assert_eq!(program.ask("end"), "0 wrong");
        let (status, folder) = program.end();
        assert!(status.success(), "{status}");
        let report = std::fs::read_to_string(folder.path().join("report")).unwrap();
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["violations"], serde_json::json!([]), "{report}");
    }
}

/// It lies in parts where each has room.
#[test]
fn an_arena_that_its_gpu_has_no_room_for_is_in_the_image() {
    let (_around, folder) = store();
    let run = Run::program("suspended").sim("2x256MiB").env("SIMCUDA_STRICT", "on");
    let mut program = run.env("GPUPOOL_LIMIT", "0:64MiB").env("GPUPOOL_RESERVE", "16MiB").shim().start(None);
    program.ask("create 240");
    eventually("memory that is filled", || (program.ask("filled") == "yes").then_some(()));
    let told = image(&program, &folder, "");
    assert_eq!((&told["bytes"], &told["left_out_bytes"]), (&(240 * MIB).into(), &0.into()), "{told}");
    let reader = Reader::open(&folder, Which::Newest, 1).unwrap();
    assert!(reader.manifest().blocks.len() > 1, "in parts");
    for block in &reader.manifest().blocks {
        let mut found = vec![0; usize::try_from(block.about.bytes).unwrap()];
        reader.read_into(block.about.id, 0, &mut found).unwrap();
        assert!(found.chunks_exact(4).all(|word| word == [7, 0, 0, 0]), "{:?}", block.about);
    }
    assert_eq!(program.ask("end"), "0 wrong");
}

/// Nobody can copy what no context reaches, and that is said.
#[test]
fn memory_of_its_own_that_no_context_reaches_is_left_out_of_the_image_and_told() {
    let (_around, folder) = store();
    let run = Run::program("suspended").sim("2x1GiB").env("SIMCUDA_LINK", "none").log().shim();
    let mut program = run.start(None);
    assert_eq!(program.ask("make 16"), "made");
    assert_eq!(program.ask("visit 1"), "visited");
    assert_eq!(program.ask("destroy"), "asked");
    eventually("the end of the context", || (program.ask("destroyed") == "yes").then_some(()));
    let told = image(&program, &folder, "");
    assert_eq!((&told["bytes"], &told["left_out_bytes"]), (&0.into(), &(16 * MIB).into()), "{told}");
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(log.contains("none of the GPUs that it works on reaches the place"), "{log}");
    assert_eq!(program.ask("end"), "0 wrong");
}

/// Suspended in the middle, the image would stand still until the program is resumed.
#[test]
fn who_is_to_be_suspended_has_an_image_that_was_begun_first() {
    let (_around, folder) = store();
    let mut program = checkpointed("2x1GiB").start(None);
    at_work(&mut program, 4);
    for generation in 1..=3 {
        std::thread::scope(|scope| {
            let arguments = format!("checkpoint {} {}", program.pid(), folder.display());
            let asking = &program;
            let asked = scope.spawn(move || asking.gpupool(&arguments));
            let is_there = || generations(&folder).first() == Some(&generation);
            eventually("a beginning", || (is_there() || unfinished(&folder).is_some()).then_some(()));
            eventually("a suspension", || {
                let ended = program.gpupool(&format!("suspend --to host {}", program.pid()));
                let said = String::from_utf8(ended.stderr).unwrap();
                assert!(ended.status.success() || said.contains("an image of it is being written"), "{said}");
                ended.status.success().then_some(())
            });
            let image = asked.join().unwrap();
            assert!(image.status.success(), "{}", String::from_utf8_lossy(&image.stderr));
        });
        assert!(program.gpupool(&format!("resume {}", program.pid())).status.success());
        goes_on(&mut program);
    }
    ends_well(program);
}

/// Bytes of an image that is not whole yet; `None`: there is none.
fn unfinished(folder: &Path) -> Option<u64> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let new = entries.map(|entry| entry.path()).find(|path| path.extension().is_some_and(|kind| kind == "new"))?;
    let files = std::fs::read_dir(new).ok()?.flatten();
    Some(files.filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum())
}

/// At ten points of writing, from the first byte on.
#[test]
fn a_program_that_is_killed_while_it_writes_leaves_the_older_images() {
    let (_around, folder) = store();
    let mut whole = 0;
    for part in 0..10 {
        let mut program = checkpointed("1x1GiB").start(None);
        program.ask("name weights 49152 0 5000");
        std::thread::scope(|scope| {
            let arguments = format!("checkpoint {} {}", program.pid(), folder.display());
            let asking = &program;
            let asked = scope.spawn(move || asking.gpupool(&arguments));
            eventually("a part of an image, or all of it", || {
                // What the one before has left is not its own.
                let writer = std::fs::read_to_string(folder.join("lock")).ok();
                let is_its = writer.is_some_and(|writer| writer.trim() == program.pid().to_string());
                let is_there = generations(&folder).first() > Some(&whole);
                (is_there || is_its && unfinished(&folder) >= Some(part * 2 * MIB)).then_some(())
            });
            program.signal(libc::SIGKILL);
            let ended = asked.join().unwrap();
            let said = String::from_utf8(ended.stderr).unwrap();
            assert!(
                ended.status.success() || said.contains("it ended before it had answered"),
                "{}: {said}",
                ended.status
            );
        });
        let now = generations(&folder).first().copied().unwrap_or(0);
        assert!(now == whole || now == whole + 1, "{now} behind {whole}");
        whole = now;
        if whole > 0 {
            verifies(&folder);
        }
    }
    // The next one is not in the way of what they left.
    let mut program = checkpointed("1x1GiB").start(None);
    program.ask("name weights 4096 0 5000");
    assert_eq!(image(&program, &folder, "--keep 1")["generation"], whole + 1);
    assert_eq!((generations(&folder), unfinished(&folder)), (vec![whole + 1], None));
    verifies(&folder);
}

#[test]
fn a_disk_that_takes_no_more_leaves_the_older_image_and_the_program() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    program.ask("name weights 8192 0 5000");
    at_work(&mut program, 2);
    image(&program, &folder, "");
    let limit = |bytes| {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the pointer is to a local, and the process is a child that was not waited for.
        let set =
            unsafe { libc::prlimit(program.pid() as i32, libc::RLIMIT_FSIZE, &raw const limit, std::ptr::null_mut()) };
        assert_eq!(set, 0);
    };
    // As where there is no room, a write fails in the middle.
    limit(MIB);
    let why = refused(&program, &folder, "--keep 1");
    assert!(why.contains("cannot write: ") && why.contains("gen-000002"), "{why}");
    assert_eq!((generations(&folder), unfinished(&folder)), (vec![1], None));
    verifies(&folder);
    limit(libc::RLIM_INFINITY);
    goes_on(&mut program);
    image(&program, &folder, "--keep 1");
    assert_eq!(generations(&folder), [2]);
    agrees(&mut program, &folder, 2);
    ends_well(program);
}

#[test]
fn two_at_once_are_one_image_or_two_and_one_folder_is_one_program_s() {
    let (_around, folder) = store();
    let mut program = checkpointed("2x1GiB").start(None);
    at_work(&mut program, 4);
    let mut images = 0;
    for _ in 0..5 {
        let all = std::thread::scope(|scope| {
            let ask = || scope.spawn(|| told(&program, &folder, ""));
            let asked = [ask(), ask(), ask()];
            asked.map(|asked| asked.join().unwrap())
        });
        let known = ["is being written already", "others were asking it all the time", "uses this folder"];
        let refused = all.iter().filter_map(|told| told["error"].as_str());
        assert!(refused.clone().all(|why| known.iter().any(|known| why.contains(known))), "{all:?}");
        let made = 3 - refused.count();
        assert!(made >= 1, "{all:?}");
        images += made;
    }
    assert_eq!(generations(&folder).len(), images);
    verifies(&folder);
    agrees(&mut program, &folder, 4);
    goes_on(&mut program);
    ends_well(program);
}

#[test]
fn with_every_images_follow_each_other_until_the_program_ends() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    at_work(&mut program, 2);
    let asked = std::thread::scope(|scope| {
        let arguments = format!("checkpoint --json {} {} --every 50ms --keep 2", program.pid(), folder.display());
        let asking = &program;
        let asked = scope.spawn(move || asking.gpupool(&arguments));
        eventually("a fourth image", || (generations(&folder).first() >= Some(&4)).then_some(()));
        program.signal(libc::SIGKILL);
        asked.join().unwrap()
    });
    let said = String::from_utf8(asked.stdout).unwrap();
    let all: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(all.len() >= 3 && (1..=3).zip(&all).all(|(number, told)| told["generation"] == number), "{all:?}");
    let said = String::from_utf8(asked.stderr).unwrap();
    assert!(said.contains("has ended; no further image is written"), "{said}");
    // One more where it was killed before the oldest was gone.
    assert!(generations(&folder).len() <= 3);
    verifies(&folder);
}

#[test]
fn with_every_the_end_of_the_program_is_a_success_once_there_is_an_image() {
    let (_around, folder) = store();
    for signal in [None, Some(libc::SIGKILL)] {
        let mut program = checkpointed("1x1GiB").start(None);
        at_work(&mut program, 1);
        let before = generations(&folder).first().copied().unwrap_or(0);
        let asked = std::thread::scope(|scope| {
            let arguments = format!("checkpoint {} {} --every 10ms --keep 1", program.pid(), folder.display());
            let (session, program) = (program.session(), program);
            let asked = scope.spawn(move || {
                let mut command = std::process::Command::new(harness::artifact_folder().join("gpupool"));
                command.args(arguments.split_whitespace()).env("XDG_RUNTIME_DIR", session).env_remove("LD_PRELOAD");
                command.output().unwrap()
            });
            eventually("an image", || (generations(&folder).first() > Some(&(before + 1))).then_some(()));
            if let Some(signal) = signal {
                program.signal(signal);
            }
            program.end();
            asked.join().unwrap()
        });
        let said = String::from_utf8(asked.stderr).unwrap();
        assert!(
            asked.status.success()
                && said.ends_with("has ended; no further image is written, and the last one is whole\n"),
            "{said}"
        );
        assert_eq!(said.lines().count(), 1, "{said}");
        verifies(&folder);
    }
    let mut program = checkpointed("1x1GiB").start(None);
    at_work(&mut program, 1);
    let refused = program.gpupool(&format!("checkpoint {} {} --every 0s", program.pid(), folder.display()));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(2) && said.contains("a time of more than nothing"), "{said}");
}

/// A program with memory that has names, and an image of it.
fn with_names(folder: &Path) {
    let mut program = checkpointed("2x1GiB").start(None);
    assert_eq!(program.ask("name weights 3072 64 5000"), "0 21384 0");
    assert_eq!(program.ask("name bias 12 4 9000"), "0 10024 0");
    assert_eq!(program.ask("name state 2048 0 7000"), "0 7000 0");
    // What nobody has any more is in no image.
    assert_eq!(program.ask("name weights 3072 64 6000"), "0 22384 0");
    image(&program, folder, "");
    let shown = String::from_utf8(program.gpupool(&format!("store show {}", folder.display())).stdout).unwrap();
    assert!(["weights", "bias", "state"].iter().all(|name| shown.contains(name)), "{shown}");
    assert_eq!(program.ask("free"), "freed");
    image(&program, folder, "");
    let manifest = gpupool_store::show(folder, None).unwrap();
    assert!(manifest.blocks.iter().all(|block| block.about.names.is_empty()), "names end with their blocks");
    gpupool_store::remove(folder, 2).unwrap();
    program.signal(libc::SIGKILL);
}

#[test]
fn what_a_program_names_comes_back_in_another_one() {
    let (_around, folder) = store();
    with_names(&folder);
    let mut program = checkpointed("1x1GiB").env("GPUPOOL_RESTORE", &folder).start(None);
    assert_eq!(program.ask("name weights 3072 0 1"), "0 22384 0", "its bytes, elsewhere");
    assert_eq!(program.ask("name bias 12 8 1"), "0 10024 0");
    // Once: the next one of that name has what the program gave it.
    assert_eq!(program.ask("name weights 3072 0 1"), "0 1 0");
    // Another size, and a name that nothing has.
    assert_eq!(program.ask("name state 1024 0 1"), "-8 1 0");
    assert_eq!(program.ask("name nobody 1024 0 1"), "-8 1 0");
    let log = program.log();
    let (status, _folder) = program.end();
    assert!(status.success(), "{status}");
    let log = std::fs::read_to_string(log).unwrap();
    assert_eq!(log.matches("\"block.restore\"").count(), 2, "{log}");
    for told in [
        "`state` did not come back: it has 1048576 bytes (1.0 MiB), and 2097152 (2.0 MiB) in generation 1 in ",
        "`nobody` did not come back: generation 1 in ",
        "2 named ranges came back, 3.0 MiB in all; 1 have another size now, as `state`",
    ] {
        assert!(log.contains(told), "{told}: {log}");
    }
}

#[test]
fn what_is_damaged_or_not_there_does_not_come_back_and_is_told_of() {
    let (around, folder) = store();
    with_names(&folder);
    let data = std::fs::read_dir(folder.join("gen-000001")).unwrap().map(|entry| entry.unwrap().path());
    for path in data.filter(|path| path.to_string_lossy().contains("data-")) {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.iter_mut().step_by(1000).for_each(|byte| *byte ^= 1);
        std::fs::write(&path, bytes).unwrap();
    }
    let mut program = checkpointed("1x1GiB").env("GPUPOOL_RESTORE", &folder).start(None);
    assert!(program.ask("name weights 3072 0 1").starts_with("-8 "));
    assert_eq!(program.ask("name other 3072 0 1"), "-8 1 0", "and the program goes on");
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(
        log.contains("`weights` did not come back from generation 1") && log.contains("hold anything now: "),
        "{log}"
    );

    let nowhere = around.path().join("none");
    let mut program = checkpointed("1x1GiB").env("GPUPOOL_RESTORE", nowhere).start(None);
    assert_eq!(program.ask("name weights 3072 0 1"), "-8 1 0");
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(log.contains("nothing comes back: ") && log.contains("no generation is stored there"), "{log}");
}

#[test]
fn where_there_is_no_room_beside_it_the_program_waits_for_the_disk() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x256MiB").env("GPUPOOL_HOST_LIMIT", "0").start(None);
    let block: u64 = program.ask("allocate 160").parse().unwrap();
    at_work(&mut program, 2);
    let told = image(&program, &folder, "");
    assert!(told["in_stop_bytes"].as_u64() >= Some(64 * MIB), "{told}");
    agrees(&mut program, &folder, 2);
    assert!(stored(&folder, block, 160 << 20).iter().all(|word| *word == 7));
    goes_on(&mut program);
    ends_well(program);
}

#[test]
fn a_program_that_never_comes_to_rest_and_one_that_is_suspended_have_no_image_and_go_on() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    at_work(&mut program, 1);
    program.ask("spin");
    let why = refused(&program, &folder, "--wait 1s");
    assert!(why.contains("did not come to rest in time: "), "{why}");
    program.ask("release");
    goes_on(&mut program);
    assert!(program.gpupool(&format!("suspend {}", program.pid())).status.success());
    let why = refused(&program, &folder, "");
    assert!(why.contains("it is suspended; resume it first"), "{why}");
    assert!(program.gpupool(&format!("resume {}", program.pid())).status.success());
    assert_eq!(generations(&folder), [0; 0]);
    goes_on(&mut program);
    image(&program, &folder, "");
    agrees(&mut program, &folder, 1);
    ends_well(program);
}

#[test]
fn a_folder_that_will_not_do_is_named_before_the_program_is_stopped() {
    let (around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    at_work(&mut program, 1);
    std::fs::write(&folder, "no folder").unwrap();
    let why = refused(&program, &folder, "");
    assert!(why.contains("it is a link or no folder") && why.contains(&*folder.to_string_lossy()), "{why}");
    let nowhere = around.path().join("none/images");
    let why = refused(&program, &nowhere, "");
    assert!(why.contains("No such file or directory"), "{why}");
    // Others could put something else in its place.
    let open = around.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let why = refused(&program, &open, "");
    assert!(why.contains("others may write to it"), "{why}");
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(log.contains("no image was written: "), "{log}");
    goes_on(&mut program);
    ends_well(program);
}

#[test]
fn what_has_not_changed_since_the_last_image_is_not_written_again() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    program.ask("name weights 49152 0 5000");
    // The others begin elsewhere in the image when something comes in front of them.
    let block: u64 = program.ask("allocate 20").parse().unwrap();
    let first = image(&program, &folder, "");
    assert_eq!((first["unchanged_bytes"].as_u64(), &first["new_bytes"]), (Some(0), &first["stored_bytes"]), "{first}");
    at_work(&mut program, 2);
    for _ in 0..3 {
        let told = image(&program, &folder, "--keep 1");
        assert!(told["unchanged_bytes"].as_u64() >= Some(48 * MIB), "{told}");
        assert!(told["new_bytes"].as_u64() < Some(24 * MIB), "{told}");
        agrees(&mut program, &folder, 2);
        assert!(stored(&folder, block, 20 << 20).iter().all(|word| *word == 7));
        goes_on(&mut program);
    }
    assert_eq!(generations(&folder), [4]);
    verifies(&folder);
    let shown = String::from_utf8(program.gpupool(&format!("store show {}", folder.display())).stdout).unwrap();
    assert!(shown.contains("as in the generation before"), "{shown}");
    ends_well(program);
    let mut program = checkpointed("1x1GiB").env("GPUPOOL_RESTORE", &folder).start(None);
    assert_eq!(program.ask("name weights 49152 0 1"), "0 5000 0", "what lies in an older file comes back");
}

/// Files of the newest generation with memory in them.
fn data(folder: &Path) -> Vec<PathBuf> {
    let newest = generations(folder).into_iter().max().unwrap();
    let all = std::fs::read_dir(folder.join(format!("gen-{newest:06}"))).unwrap().flatten().map(|entry| entry.path());
    all.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("data-"))).collect()
}

#[test]
fn what_is_damaged_in_the_last_image_is_written_anew_and_told() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    // More than what one thread takes on, and all of it of other words.
    let block: u64 = program.ask("block 32768 5000").parse().unwrap();
    let first = image(&program, &folder, "--keep 1");
    assert_eq!(first["damaged_bytes"], 0, "{first}");
    let all = 32 * MIB;
    // Of one image that is kept, every part has its turn to be read in each.
    for (how, fewest) in [("flipped", MIB), ("cut", MIB), ("removed", MIB), ("whole", 0)] {
        for path in data(&folder).into_iter().take(1) {
            let bytes = path.metadata().unwrap().len();
            let file = std::fs::File::options().write(true).read(true).open(&path).unwrap();
            let mut byte = [0];
            match how {
                "flipped" => {
                    file.read_exact_at(&mut byte, bytes / 2).unwrap();
                    file.write_all_at(&[byte[0] ^ 1], bytes / 2).unwrap();
                }
                "cut" => file.set_len(bytes / 2).unwrap(),
                "removed" => std::fs::remove_file(&path).unwrap(),
                _ => {}
            }
        }
        let told = image(&program, &folder, "--keep 1");
        let damaged = told["damaged_bytes"].as_u64().unwrap();
        assert!(damaged >= fewest && (damaged == 0) == (fewest == 0) && damaged <= all, "{how}: {told}");
        assert!(told["unchanged_bytes"].as_u64().unwrap() + damaged >= all, "{how}: {told}");
        verifies(&folder);
        let words = stored(&folder, block, all as usize);
        assert!(words.iter().zip(5000..).all(|(word, expected)| *word == expected), "{how}");
    }
    ends_well(program);
}

/// Runs the command as a user of this session, on the machine that a program is on.
fn gpupool(program: &Running, session: &Path, arguments: &str) -> std::process::Output {
    let environment = std::fs::read(format!("/proc/{}/environ", program.pid())).unwrap();
    let variables = environment.split(|byte| *byte == 0).filter_map(|pair| {
        let (name, value) = std::str::from_utf8(pair).ok()?.split_once('=')?;
        (name.starts_with("SIMCUDA_") || name == "LD_LIBRARY_PATH").then(|| (name.to_owned(), value.to_owned()))
    });
    let mut command = std::process::Command::new(harness::artifact_folder().join("gpupool"));
    command.args(arguments.split_whitespace()).env("XDG_RUNTIME_DIR", session).envs(variables).env_remove("LD_PRELOAD");
    command.output().unwrap()
}

/// A folder for the pages of several programs.
fn session() -> TempDir {
    let session = tempfile::tempdir().unwrap();
    std::fs::set_permissions(session.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    session
}

/// What the command says of a job's image.
#[track_caller]
fn job(program: &Running, session: &Path, folder: &Path, more: &str) -> Value {
    let ended = gpupool(program, session, &format!("checkpoint --json {more} {}", folder.display()));
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    let told: Value = serde_json::from_str(&text)
        .unwrap_or_else(|_| panic!("{more}: {text}{}", String::from_utf8_lossy(&ended.stderr)));
    assert_eq!(ended.status.success(), told.get("error").is_none(), "{told}");
    told
}

/// The job's images that are whole, newest first.
fn job_images(folder: &Path) -> Vec<u64> {
    let listed = jobs(folder).unwrap_or_default().into_iter();
    listed.filter(|listed| listed.told.is_ok()).map(|listed| listed.generation).collect()
}

fn rank(number: u32) -> Run {
    checkpointed("1x1GiB")
        .env("LOCAL_RANK", number.to_string())
        .env("LOCAL_WORLD_SIZE", "2")
        .env("GPUPOOL_DEVICES", "0")
}

/// The newest image of each of two ranks has memory of one moment, and both of the same: neither of them is ever more than a step ahead.
#[track_caller]
fn are_of_one_moment(folder: &Path, latest: u32) {
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
fn steps(program: &mut Running) -> u64 {
    program.ask("steps").parse().unwrap()
}

#[track_caller]
fn further_steps(program: &mut Running) {
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
    assert!(suspend("suspend"));
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

/// Blocks of a program, in the order in which it asks for them: their addresses.
fn blocks_of(program: &mut Running, sizes: &[u64], seed: u64) -> Vec<u64> {
    let block = |(size, number): (&u64, u64)| {
        program.ask(&format!("block {size} {}", seed + number * 100_000)).parse().unwrap()
    };
    sizes.iter().zip(0..).map(block).collect()
}

#[test]
fn without_names_blocks_come_back_in_the_order_in_which_they_were_allocated_or_not_at_all() {
    // The fourth and the fifth share their memory with others.
    const SIZES: [u64; 6] = [3072, 20480, 3072, 40, 12, 2048];
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    blocks_of(&mut program, &SIZES, 5000);
    image(&program, &folder, "");
    drop(program);
    let again = |by_order: &str| {
        let run = checkpointed("1x1GiB").env("GPUPOOL_RESTORE", &folder).env("GPUPOOL_RESTORE_BY_ORDER", by_order);
        run.start(None)
    };

    let mut program = again("on");
    let addresses = blocks_of(&mut program, &SIZES, 1);
    let answer = program.ask("restore");
    let bytes: u64 = answer.strip_prefix("0 ").unwrap_or_else(|| panic!("{answer}")).parse().unwrap();
    assert!(bytes >= SIZES.iter().sum::<u64>() << 10, "{answer}");
    for ((address, size), number) in addresses.iter().zip(SIZES).zip(0..) {
        assert_eq!(program.ask(&format!("look {address} {size}")), format!("{} 0", 5000 + number * 100_000));
    }
    assert_eq!(program.ask("restore"), "-8 0", "once");

    // Another order, one too few, one too many: nothing is written, and it is told at which block.
    let mut other = SIZES;
    other.swap(1, 2);
    let with_one_more: Vec<u64> = SIZES.iter().copied().chain([4096]).collect();
    for (sizes, why) in [
        (&other[..], "the order differs at block 2 of "),
        (&SIZES[..5], "and the image "),
        (&with_one_more[..], "and the image "),
        (&[3072, 20480, 3072, 40, 24, 2048][..], "where small blocks lie in it"),
    ] {
        let mut program = again("on");
        let addresses = blocks_of(&mut program, sizes, 1);
        assert_eq!(program.ask("restore"), "-8 0", "{sizes:?}");
        let log = std::fs::read_to_string(program.log()).unwrap();
        assert!(log.contains(why), "{sizes:?}: {log}");
        assert_eq!(program.ask(&format!("look {} 3072", addresses[0])), "1 0");
    }
    let mut program = again("off");
    let addresses = blocks_of(&mut program, &SIZES, 1);
    assert_eq!(program.ask("restore"), "0 0");
    assert_eq!(program.ask(&format!("look {} 3072", addresses[0])), "1 0");
    // Who asked for it and has not said when is told at the end.
    let mut program = again("on");
    blocks_of(&mut program, &SIZES, 1);
    let log = program.log();
    let (status, _folder) = program.end();
    assert!(status.success(), "{status}");
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("the program has not said that it has built what is to come back"), "{log}");
}

#[test]
fn a_block_on_memory_that_was_freed_has_its_place_in_the_order() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    program.ask("name scratch 2048 0 7");
    assert_eq!(program.ask("free"), "freed");
    // The first one stands where that was, the second one on new memory, and the third one is too large to be kept at hand.
    const SIZES: [u64; 4] = [2048, 2048, 131_072, 2048];
    blocks_of(&mut program, &SIZES, 5000);
    image(&program, &folder, "");
    drop(program);
    let run = checkpointed("1x1GiB").env("GPUPOOL_RESTORE", &folder).env("GPUPOOL_RESTORE_BY_ORDER", "on");
    let mut program = run.start(None);
    let addresses = blocks_of(&mut program, &SIZES, 1);
    let answer = program.ask("restore");
    assert!(answer.starts_with("0 ") && answer != "0 0", "{answer}");
    for ((address, size), number) in addresses.iter().zip(SIZES).zip(0..) {
        assert_eq!(program.ask(&format!("look {address} {size}")), format!("{} 0", 5000 + number * 100_000));
    }
}

/// As many blocks of the same sizes, and all the same not what was stored.
#[test]
fn a_block_that_another_line_asked_for_is_none_of_the_image() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    program.ask("name weights 2048 0 7");
    image(&program, &folder, "");
    drop(program);
    let run = checkpointed("1x1GiB").env("GPUPOOL_RESTORE", &folder).env("GPUPOOL_RESTORE_BY_ORDER", "on");
    let mut program = run.start(None);
    let addresses = blocks_of(&mut program, &[2048], 1);
    assert_eq!(program.ask("restore"), "-8 0");
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(log.contains("the order differs at block 1 of 2: the place that asked for it is "), "{log}");
    assert_eq!(program.ask(&format!("look {} 2048", addresses[0])), "1 0");
}

#[test]
fn names_of_an_image_are_missed_by_nobody_where_all_of_it_came_back_by_order() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    program.ask("name weights 2048 0 7");
    image(&program, &folder, "");
    drop(program);
    let run = checkpointed("1x1GiB").env("GPUPOOL_RESTORE", &folder).env("GPUPOOL_RESTORE_BY_ORDER", "on");
    let mut program = run.start(None);
    program.ask("name other 2048 0 7");
    let answer = program.ask("restore");
    assert!(answer.starts_with("0 ") && answer != "0 0", "{answer}");
    let log = program.log();
    let (status, _folder) = program.end();
    assert!(status.success(), "{status}");
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("program.restore") && !log.contains("were not asked for"), "{log}");
}

/// All that is known of an image says that it came back, and all the same the memory is something else.
#[test]
fn what_has_not_arrived_as_it_was_stored_is_never_silently_the_program_s() {
    // The second one is read again in three parts.
    const SIZES: [u64; 2] = [3072, 20480];
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    blocks_of(&mut program, &SIZES, 5000);
    image(&program, &folder, "");
    drop(program);
    // The first word and the last one of each, by when the first part of it is read again: nothing is read to it any more then.
    for (block, at, copies) in
        [(0, 0, 1), (0, 3072 * 1024 - 4, 1), (1, 0, 2), (1, 8 * MIB, 2), (1, 20480 * 1024 - 4, 2)]
    {
        let run = checkpointed("1x1GiB").env("GPUPOOL_RESTORE", &folder).env("GPUPOOL_RESTORE_BY_ORDER", "on");
        let mut program = run.start(None);
        let addresses = blocks_of(&mut program, &SIZES, 1);
        program.ask(&format!("spoil {} {copies}", addresses[block] + at));
        assert_eq!(program.ask("restore"), "-8 0", "block {block} at {at}");
        let log = std::fs::read_to_string(program.log()).unwrap();
        let [address, bytes] = [addresses[block], SIZES[block] << 10];
        let told = format!("{bytes} bytes at {address:#x} are not what generation 1 in {} has", folder.display());
        assert!(log.contains(&told) && log.contains("the program's memory holds anything now"), "{told}: {log}");
        assert!(!log.contains("blocks are back by their order"), "{log}");
        ends_well(program);
    }
}

/// The command, which writes an image of it meanwhile.
fn begin_image(program: &Running, folder: &Path) -> Child {
    let mut command = Command::new(artifact_folder().join("gpupool"));
    command.args(["checkpoint".as_ref(), OsStr::new(&program.pid().to_string()), folder.as_os_str()]);
    command.env("XDG_RUNTIME_DIR", program.session()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// An image of a program that is in the middle of being written, by the command: as long as its writers are held.
fn image_under_way(program: &Running, folder: &Path) -> (Child, Vec<Traced>) {
    eventually("an image in the middle of being written", || {
        let mut command = begin_image(program, folder);
        loop {
            match held_writers(program, writers()) {
                Some(writers) => return Some((command, writers)),
                None if command.try_wait().unwrap().is_some() => return None,
                None => {}
            }
        }
    })
}

/// How many threads write an image.
fn writers() -> usize {
    let processors = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    (processors / 2).clamp(2, 8)
}

/// The image's own copies lie in the pool as well.
#[test]
fn blocks_come_back_in_their_order_while_an_image_is_written() {
    // More than the buffers hold that stand between a copy and the threads that write it.
    const SIZES: [u64; 2] = [3072, 200 << 10];
    let (_around, folder) = store();
    let (_other, other) = store();
    let mut program = checkpointed("2x1GiB").start(None);
    blocks_of(&mut program, &SIZES, 5000);
    image(&program, &folder, "");
    drop(program);
    let run = checkpointed("2x1GiB").env("GPUPOOL_RESTORE", &folder).env("GPUPOOL_RESTORE_BY_ORDER", "on");
    let mut program = run.start(None);
    blocks_of(&mut program, &SIZES, 1);
    let (mut command, writers) = image_under_way(&program, &other);
    // The program goes on with a copy of all of it in the pool.
    eventually("the copy", || {
        let used: u64 = program.ask("used").split(' ').filter_map(|used| used.parse::<u64>().ok()).sum();
        (used >= 2 * (200 + 3) * MIB).then_some(())
    });
    let answer = program.ask("restore");
    assert!(answer.starts_with("0 "), "{answer}: {}", std::fs::read_to_string(program.log()).unwrap());
    drop(writers);
    assert!(command.wait().unwrap().success());
    verifies(&other);
    ends_well(program);
}

/// Copies of all that it has are in the pool until then, and would leave with it.
#[test]
fn a_program_is_not_suspended_while_an_image_of_it_is_written_whoever_else_asks_for_one() {
    const KIB: u64 = 200 << 10;
    let (_around, folder) = store();
    let (_other, other) = store();
    let mut program = checkpointed("2x1GiB").start(None);
    blocks_of(&mut program, &[KIB], 5000);
    let suspend = |program: &Running| -> Value {
        let ended = program.gpupool(&format!("suspend --to host --json {}", program.pid()));
        serde_json::from_slice(&ended.stdout).unwrap()
    };
    let (mut command, writers) = image_under_way(&program, &folder);
    // The second time nobody is in the way but the one who was refused.
    for _ in 0..2 {
        let why = refused(&program, &other, "");
        assert!(why.contains("an image of it is being written already"), "{why}");
        let told = suspend(&program);
        let why = told[0]["error"].as_str().unwrap_or_default();
        assert!(why.contains("an image of it is being written (gpupool checkpoint)"), "{told}");
    }
    drop(writers);
    assert!(command.wait().unwrap().success());
    verifies(&folder);
    let told = suspend(&program);
    assert_eq!((&told[0]["bytes"], &told[0]["stayed_bytes"]), (&Value::from(KIB << 10), &Value::from(0)), "{told}");
    let back = program.gpupool(&format!("resume {}", program.pid()));
    assert!(back.status.success(), "{}", String::from_utf8_lossy(&back.stderr));
    ends_well(program);
}

#[test]
fn a_program_that_ends_while_an_image_is_written_leaves_nothing_of_it() {
    let (_around, folder) = store();
    for part in 0..4 {
        let mut program = checkpointed("1x1GiB").start(None);
        program.ask("name weights 98304 0 5000");
        let before = generations(&folder);
        let mut command = begin_image(&program, &folder);
        eventually("a part of an image, or all of it", || {
            (unfinished(&folder) >= Some(part * 4 * MIB) || generations(&folder) != before).then_some(())
        });
        let (status, _folder) = program.end();
        assert!(status.success(), "{status}");
        assert_eq!(unfinished(&folder), None);
        command.wait().unwrap();
        if !generations(&folder).is_empty() {
            verifies(&folder);
        }
    }
}

/// From the first to the last one that an image needs.
#[test]
fn whichever_call_of_the_driver_fails_the_program_goes_on_and_the_older_image_is_there() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    let block: u64 = program.ask("block 10240 5000").parse().unwrap();
    let small: u64 = program.ask("block 40 7000").parse().unwrap();
    image(&program, &folder, "--keep 2");
    let (mut made, mut failed) = (0, Vec::new());
    for number in 1.. {
        let code = [999, 2, 801][number % 3];
        let before: usize = program.ask(&format!("fault {number} {code}")).parse().unwrap();
        let told = told(&program, &folder, "--keep 2 --wait 2s");
        let calls = program.ask("calls").parse::<usize>().unwrap() - before;
        program.ask("fault 0 0");
        match told.get("error") {
            None => made += 1,
            Some(why) => failed.push(why.as_str().unwrap().to_owned()),
        }
        for (address, bytes, seed) in [(block, 10240 << 10, 5000), (small, 40 << 10, 7000)] {
            let words = stored(&folder, address, bytes);
            assert!(words.iter().zip(seed..).all(|(word, wanted)| *word == wanted), "{number}: {told}");
        }
        assert_eq!(unfinished(&folder), None, "{number}: {told}");
        if calls < number {
            break;
        }
    }
    verifies(&folder);
    assert!(failed.len() > 3 && made > 3, "{made} images, and {failed:?}");
    assert!(failed.iter().any(|why| why.contains("the driver answered")), "{failed:?}");
    assert_eq!(program.ask(&format!("look {block} 10240")), "5000 0");
    at_work(&mut program, 2);
    image(&program, &folder, "--keep 2");
    agrees(&mut program, &folder, 2);
    ends_well(program);
}

#[test]
fn with_process_a_suspended_program_has_nothing_on_a_gpu_and_comes_back() {
    let (_around, folder) = store();
    let mut program = checkpointed("2x1GiB").machine().start(None);
    let session = program.session();
    let block: u64 = program.ask("block 20480 5000").parse().unwrap();
    // Another process of the machine, which has nothing itself.
    let environment = std::fs::read(format!("/proc/{}/environ", program.pid())).unwrap();
    let mut variables = environment.split(|byte| *byte == 0).filter_map(|pair| std::str::from_utf8(pair).ok());
    let machine = variables.find_map(|pair| pair.strip_prefix("SIMCUDA_MACHINE=")).unwrap().to_owned();
    let witness = Run::program("checkpointed").sim("2x1GiB").env("SIMCUDA_MACHINE", machine);
    let mut witness = witness.start(None);
    let mut used = || -> u64 { witness.ask("used").parse().unwrap() };
    let before = used();
    let pid = program.pid();
    for to in [&folder.display().to_string(), "host", "host"] {
        let ended = gpupool(&program, &session, &format!("suspend --process --to {to} {pid}"));
        let said = format!("{}{}", String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
        assert!(ended.status.success() && said.contains("has nothing on the GPUs"), "{said}");
        assert_eq!(used(), 0, "{said}");
        let ended = gpupool(&program, &session, &format!("resume {pid}"));
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        assert_eq!(program.ask(&format!("look {block} 20480")), "5000 0");
        assert!(used() >= 20 * MIB);
    }
    // What the program made itself goes with it.
    at_work(&mut program, 1);
    for _ in 0..2 {
        let ended = gpupool(&program, &session, &format!("suspend --process --to host {pid}"));
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        assert_eq!(used(), 0);
        let ended = gpupool(&program, &session, &format!("resume {pid}"));
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        goes_on(&mut program);
    }
    // What would not come back is not taken away: memory on peers, and the program's own, where that goes to memory of the driver's.
    for (to, why) in [("peers", "of the pool are mapped still"), ("own", "that it made by cuMemCreate are mapped")] {
        let to = if to == "own" { folder.display().to_string() } else { to.to_owned() };
        let ended = gpupool(&program, &session, &format!("suspend --process --to {to} {pid}"));
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(!ended.status.success() && said.contains("it is resumed, since the rest of it cannot leave"), "{said}");
        assert!(said.contains(why), "{said}");
        assert_eq!(program.ask(&format!("look {block} 20480")), "5000 0", "it runs");
    }
    assert!(used() >= before);
    goes_on(&mut program);
    ends_well(program);
}
