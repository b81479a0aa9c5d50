//! Images of one program: of one moment, whatever it does meanwhile and whoever fails.

use super::{
    MIB, agrees, begin_image, blocks_of, checkpointed, copied, data, ends_well, generations, image, image_under_way,
    make_newer, not_copied, refused, store, stored, told, unfinished, verifies, writers,
};
use gpupool_metrics::Snapshot;
use gpupool_store::{Reader, Which};
use harness::{Run, Running, at_work, eventually, goes_on, held_writers, page_of};
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::path::Path;

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
        assert_eq!(copied(&told)[1..], [0, 0], "there is room for all of it: {told}");
        agrees(&mut program, &folder, THREADS);
        goes_on(&mut program);
    }
    assert_eq!(generations(&folder), [20, 19]);
    verifies(&folder);
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert_eq!(log.matches("\"program.checkpoint\"").count(), 20);
    ends_well(program);
}

/// Their memory comes and goes with them, that of others is in each image. Ended in the middle of the stop, or while the image is written, they were taken for all that the
/// GPU has, or for the program going on.
#[test]
fn contexts_that_come_and_go_are_in_no_images_way() {
    const THREADS: u32 = 2;
    let (_around, folder) = store();
    let mut program = checkpointed("2x1GiB").start(None);
    at_work(&mut program, THREADS);
    let so_far = |program: &mut Running| program.ask("contexts").parse::<u64>().unwrap();
    let mut before = so_far(&mut program);
    for generation in 1..=20 {
        eventually("another context", || (so_far(&mut program) > before).then_some(()));
        before = so_far(&mut program);
        assert_eq!(image(&program, &folder, "--keep 2")["generation"], generation);
        agrees(&mut program, &folder, THREADS);
    }
    verifies(&folder);
    ends_well(program);
}

/// What an image is written from is none of the memory that the program had at most.
#[test]
fn copies_that_an_image_is_written_from_are_nothing_that_the_program_had() {
    let (_around, folder) = store();
    let run = Run::program("suspended").sim("2x1GiB").env("SIMCUDA_STRICT", "on").env("GPUPOOL_RESERVE", "16MiB");
    let mut program = run.log().shim().start(None);
    program.ask("keep 96");
    let most = |program: &Running| {
        let page = page_of(&program.session(), program.pid())?;
        let places = page.levels.places.rows.iter().map(|place| place.peak_used).collect::<Vec<u64>>();
        Some((page.levels.peak_live_bytes, places))
    };
    let before = eventually("a page", || most(&program).filter(|(live, _)| *live >= 96 * MIB));
    for _ in 0..2 {
        let told = image(&program, &folder, "--full");
        assert_eq!(copied(&told), [96, 0, 0], "{told}");
    }
    // What it takes then is a peak of its own.
    program.ask("allocate 32");
    let after = eventually("the allocation", || most(&program).filter(|(live, _)| *live > before.0));
    let grown = |grown: u64, by: u64| (by..by + 4 * MIB).contains(&grown);
    assert!(grown(after.0 - before.0, 32 * MIB), "{before:?} {after:?}");
    assert!(grown(after.1.iter().sum::<u64>() - before.1.iter().sum::<u64>(), 32 * MIB), "{before:?} {after:?}");
    assert_eq!(program.ask("end"), "0 wrong");
    let log = program.log();
    let (status, _folder) = program.end();
    assert!(status.success(), "{status}");
    let log = std::fs::read_to_string(log).unwrap();
    let exit = log.lines().find(|line| line.contains("\"process.exit\"")).unwrap_or_else(|| panic!("{log}"));
    let exit: Value = serde_json::from_str(exit).unwrap();
    let peaks: u64 = exit["peak"].as_array().unwrap().iter().filter_map(|place| place["peak_used"].as_u64()).sum();
    assert_eq!(peaks, after.1.iter().sum::<u64>(), "{exit}");
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

#[test]
fn a_name_that_a_block_has_not_is_taken_back_as_well_and_none_of_what_is_no_block() {
    let mut program = checkpointed("1x256MiB").start(None);
    let block = blocks_of(&mut program, &[4096], 5000)[0];
    assert_eq!(program.ask(&format!("unname {block}")), "0");
    assert_eq!(program.ask(&format!("unname {}", block + 512)), "0", "it lies in a block");
    assert_eq!(program.ask(&format!("unname {}", block + (64 << 20))), "-3");
    program.ask(&format!("drop {block}"));
    assert_eq!(program.ask(&format!("unname {block}")), "-3");
    ends_well(program);
}

/// Suspended in the middle, the image would stand still until the program is resumed.
/// A small block takes what it shares with others on its GPU, and where that is full the driver is asked.
#[test]
fn what_the_driver_made_for_want_of_room_in_the_pool_is_in_no_image_and_stays_and_both_are_told() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x256MiB").env("GPUPOOL_LIMIT", "0:12MiB").start(None);
    let blocks = blocks_of(&mut program, &[12 << 10, 40, 40], 5000);
    let told = image(&program, &folder, "");
    assert_eq!((&told["bytes"], &told["left_out_bytes"]), (&(12 * MIB).into(), &(80 << 10).into()), "{told}");
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(log.contains("80.0 KiB that the driver made, since the pool had no room for them"), "{log}");
    let left = program.gpupool(&format!("suspend --to host --json {}", program.pid()));
    let left: Value = serde_json::from_slice(&left.stdout).unwrap();
    assert_eq!((&left[0]["bytes"], &left[0]["stayed_bytes"]), (&(12 * MIB).into(), &(80 << 10).into()), "{left}");
    let log = std::fs::read_to_string(program.log()).unwrap();
    let finding = log.lines().find(|line| line.contains("GP022")).unwrap_or_else(|| panic!("{log}"));
    assert!(finding.contains("\"unpooled\"") && finding.contains("80.0 KiB stayed on its GPU"), "{finding}");
    assert!(program.gpupool(&format!("resume {}", program.pid())).status.success());
    // One that is freed is there no more, whichever way it is freed.
    program.ask(&format!("drop {}", blocks[1]));
    assert_eq!(image(&program, &folder, "")["left_out_bytes"], 40 << 10);
    program.ask(&format!("drop-later {}", blocks[2]));
    assert_eq!(image(&program, &folder, "")["left_out_bytes"], 0);
    ends_well(program);
}

#[test]
fn the_text_says_what_was_copied_to_gpus_in_the_stop() {
    let (_around, folder) = store();
    let mut program = checkpointed("2x1GiB").start(None);
    program.ask("name weights 49152 0 5000");
    let ended = program.gpupool(&format!("checkpoint {} {}", program.pid(), folder.display()));
    let said = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert!(ended.status.success() && said.contains(" MiB were copied to GPUs meanwhile"), "{said}");
    ends_well(program);
}

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
        // The disk may hold up the first for as long as the others wait for their turn.
        let known = [
            "is being written already",
            "others were asking it all the time",
            "another command is at it",
            "uses this folder",
        ];
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

/// Bytes on the host, as everybody is told.
fn on_host(program: &Running) -> u64 {
    let page = page_of(&program.session(), program.pid());
    page.map_or(0, |page| page.levels.places.rows.iter().filter(|place| place.on_host).map(|place| place.held).sum())
}

#[test]
fn where_gpus_have_no_room_a_copy_waits_in_the_host_s_memory_and_the_program_writes_on() {
    const KIB: u64 = 160 << 10;
    let (_around, folder) = store();
    let mut program = checkpointed("1x256MiB").start(None);
    let blocks = blocks_of(&mut program, &[KIB], 5000);
    at_work(&mut program, 2);
    let is_stored = |folder: &Path| {
        let words = stored(folder, blocks[0], (KIB << 10) as usize);
        words.iter().zip(5000..).all(|(word, expected)| *word == expected)
    };
    let told = image(&program, &folder, "");
    let [on_gpus, to_host, in_stop] = copied(&told);
    // What the program made itself is copied for itself, and little.
    assert!(on_gpus < 16 && to_host >= 160 && in_stop == 0, "{told}");
    agrees(&mut program, &folder, 2);
    assert!(is_stored(&folder));
    // Nothing of it is on the disk yet, and the program works.
    let (mut command, writers) = image_under_way(&program, &folder);
    eventually("the copy", || (on_host(&program) >= 160 * MIB).then_some(()));
    for _ in 0..3 {
        goes_on(&mut program);
    }
    drop(writers);
    assert!(command.wait().unwrap().success());
    agrees(&mut program, &folder, 2);
    assert!(is_stored(&folder));
    verifies(&folder);
    eventually("the end of the copy", || (on_host(&program) == 0).then_some(()));
    let log = std::fs::read_to_string(program.log()).unwrap();
    let event = log.lines().find(|line| line.contains("\"program.checkpoint\"")).unwrap();
    let event: Value = serde_json::from_str(event).unwrap();
    assert_eq!([&event["to_host"], &event["to_gpus"]], [&told["to_host_bytes"], &told["to_gpus_bytes"]], "{event}");
    ends_well(program);
}

#[test]
fn what_a_copy_takes_of_the_host_is_below_its_limit_and_the_rest_goes_to_the_disk() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x256MiB").env("GPUPOOL_HOST_LIMIT", "64MiB").start(None);
    let block = blocks_of(&mut program, &[160 << 10], 5000)[0];
    at_work(&mut program, 2);
    let told = image(&program, &folder, "");
    let [on_gpus, to_host, in_stop] = copied(&told);
    assert!(on_gpus < 16 && (40..=64).contains(&to_host) && in_stop >= 96, "{told}");
    agrees(&mut program, &folder, 2);
    assert!(stored(&folder, block, 160 << 20).iter().zip(5000..).all(|(word, expected)| *word == expected));
    goes_on(&mut program);
    ends_well(program);
}

#[test]
fn peers_that_are_nearly_full_have_what_has_room_there_and_the_host_the_rest() {
    const SIZES: [u64; 2] = [160 << 10, 160 << 10];
    let (_around, folder) = store();
    let mut program = checkpointed("2x256MiB").start(None);
    // First, as small blocks are the driver's where a GPU has no room for what they share.
    at_work(&mut program, 2);
    let blocks = blocks_of(&mut program, &SIZES, 5000);
    for _ in 0..3 {
        let told = image(&program, &folder, "--keep 2 --full");
        let [on_gpus, to_host, in_stop] = copied(&told);
        assert!(on_gpus >= 32 && to_host >= 128 && in_stop == 0 && not_copied(&told) == 0, "{told}");
        agrees(&mut program, &folder, 2);
        for (block, seed) in blocks.iter().zip([5000, 105_000]) {
            let words = stored(&folder, *block, 160 << 20);
            assert!(words.iter().zip(seed..).all(|(word, expected)| *word == expected));
        }
        goes_on(&mut program);
    }
    ends_well(program);
}

#[test]
fn where_there_is_no_room_beside_it_the_program_waits_for_the_disk() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x256MiB").env("GPUPOOL_HOST_LIMIT", "0").start(None);
    let block: u64 = program.ask("allocate 160").parse().unwrap();
    at_work(&mut program, 2);
    let told = image(&program, &folder, "");
    let [on_gpus, to_host, in_stop] = copied(&told);
    assert!(on_gpus < 16 && to_host == 0 && in_stop >= 160, "{told}");
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

/// As where a volume is taken away, or somebody clears it up.
#[test]
fn a_folder_that_vanishes_while_an_image_is_written_costs_that_image_and_nothing_else() {
    for is_removed in [false, true] {
        let (around, folder) = store();
        let mut program = checkpointed("2x1GiB").start(None);
        blocks_of(&mut program, &[200 << 10], 5000);
        at_work(&mut program, 2);
        let told = std::thread::scope(|scope| {
            let asking = &program;
            let asked = scope.spawn(|| told(asking, &folder, ""));
            let writers = eventually("an image in the middle of being written", || {
                unfinished(&folder).and_then(|_| held_writers(&program, writers()))
            });
            // Nothing of a block that large is whole while nobody writes.
            if is_removed {
                std::fs::remove_dir_all(&folder).unwrap();
            } else {
                std::fs::rename(&folder, around.path().join("elsewhere")).unwrap();
            }
            drop(writers);
            asked.join().unwrap()
        });
        let why = told["error"].as_str().unwrap_or_else(|| panic!("{is_removed}: {told}"));
        assert!(why.contains(&*folder.to_string_lossy()) && why.lines().count() == 1, "{why}");
        for _ in 0..3 {
            goes_on(&mut program);
        }
        let another = around.path().join("another");
        image(&program, &another, "");
        agrees(&mut program, &another, 2);
        verifies(&another);
        // And to the same name again.
        image(&program, &folder, "");
        agrees(&mut program, &folder, 2);
        ends_well(program);
    }
}

/// The images of a gpupool that is not there any more, after somebody went back to this one.
#[test]
fn what_a_newer_gpupool_wrote_stays_and_is_told_of() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    program.ask("name weights 4096 0 5000");
    image(&program, &folder, "");
    let written = make_newer(&folder, 1);
    at_work(&mut program, 2);
    for generation in 2..=3 {
        let told = image(&program, &folder, "--keep 1");
        assert_eq!(told["generation"], generation);
        agrees(&mut program, &folder, 2);
    }
    assert_eq!(generations(&folder), [3, 1], "one of ours, and what is not ours to remove");
    assert_eq!(std::fs::read_to_string(folder.join("gen-000001/manifest")).unwrap(), written);
    let ended = program.gpupool(&format!("checkpoint {} {} --keep 1", program.pid(), folder.display()));
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(said.contains("could not be removed") && said.contains("its format is version 99"), "{said}");
    let log = std::fs::read_to_string(program.log()).unwrap();
    let said = "older generations could not be removed: ";
    let line = log.lines().find(|line| line.contains(said)).unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains("its format is version 99") && line.contains("use the gpupool that wrote it"), "{line}");
    ends_well(program);
}

/// What somebody has put into an image's folder, and what is left of a removal.
#[test]
fn what_cannot_be_removed_is_told_and_keeps_no_new_image_from_being_written() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    at_work(&mut program, 1);
    image(&program, &folder, "");
    std::fs::create_dir(folder.join("gen-000001/mine")).unwrap();
    for generation in 2..=3 {
        let told = image(&program, &folder, "--keep 1");
        assert_eq!(told["generation"], generation, "{told}");
        let why = told["not_removed"].as_str().unwrap_or_default();
        assert!(why.contains("gen-000001/mine"), "{told}");
        assert_eq!(generations(&folder), [generation, 1], "all that can be removed is");
    }
    verifies(&folder);
    std::fs::remove_dir(folder.join("gen-000001/mine")).unwrap();
    std::fs::create_dir_all(folder.join(".gen-000007.gone/mine")).unwrap();
    for generation in 4..=5 {
        let asked = format!("checkpoint {} {} --keep 1", program.pid(), folder.display());
        let ended = program.gpupool(&asked);
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(ended.status.success() && said.contains("older images could not be removed: "), "{said}");
        assert!(said.contains(".gen-000007.gone/mine") && said.lines().count() == 1, "{said}");
        assert_eq!(generations(&folder), [generation]);
    }
    let log = std::fs::read_to_string(program.log()).unwrap();
    let said = log.lines().filter(|line| line.contains("older generations could not be removed: "));
    assert_eq!(said.count(), 4, "{log}");
    std::fs::remove_dir(folder.join(".gen-000007.gone/mine")).unwrap();
    assert_eq!(image(&program, &folder, "").get("not_removed"), None);
    assert!(!folder.join(".gen-000007.gone").exists());
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
    assert!(why.contains("has to be there and is not"), "{why}");
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

/// What is told of the compression is of what was written, and the rate of all.
#[track_caller]
fn pays(told: &Value) {
    let number = |name: &str| told[name].as_f64().unwrap_or_else(|| panic!("{name}: {told}"));
    let ratio = (number("bytes") - number("unchanged_bytes")) / number("new_bytes");
    assert!((number("compression_ratio") - ratio).abs() <= 0.001, "{ratio}: {told}");
    let rate = number("bytes") / number("microseconds") * 1e6;
    assert!((number("bytes_per_second") - rate).abs() <= 1.0, "{rate}: {told}");
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
    pays(&first);
    at_work(&mut program, 2);
    for _ in 0..3 {
        let told = image(&program, &folder, "--keep 1");
        assert!(told["unchanged_bytes"].as_u64() >= Some(48 * MIB), "{told}");
        assert!(told["new_bytes"].as_u64() < Some(24 * MIB), "{told}");
        pays(&told);
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
        // What else stands in a file of which less than half is right is written to another one: it is not copied from the GPU, and counts as written. Which parts share a file, and
        // how each is compressed, is by chance.
        assert!(told["not_copied_bytes"].as_u64().unwrap() + damaged >= all, "{how}: {told}");
        verifies(&folder);
        let words = stored(&folder, block, all as usize);
        assert!(words.iter().zip(5000..).all(|(word, expected)| *word == expected), "{how}");
    }
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
    let page = || page_of(&program.session(), program.pid());
    let before = eventually("a page", || page().filter(|page| page.levels.live_bytes >= KIB << 10));
    let (mut command, writers) = image_under_way(&program, &folder);
    // The copy is no memory that the program uses.
    let used =
        |page: &Snapshot| (page.levels.live_bytes, page.levels.places.rows.iter().map(|place| place.used).sum::<u64>());
    let now = eventually("a page that says what the copy takes", || {
        let held = |page: &Snapshot| page.levels.places.rows.iter().map(|place| place.held).sum::<u64>();
        page().filter(|page| held(page) >= held(&before) + (KIB << 10))
    });
    assert_eq!(used(&now), used(&before), "{now:?}");
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

/// The copies lie in blocks of the pool, of the size of the program's own, which nobody in it asked for.
#[test]
fn a_program_that_is_refused_memory_while_an_image_is_written_is_told_of_its_own_blocks_alone() {
    const BYTES: u64 = 200 * MIB;
    let (_around, folder) = store();
    let mut program = checkpointed("2x1GiB").start(None);
    blocks_of(&mut program, &[BYTES >> 10], 5000);
    let (mut command, writers) = image_under_way(&program, &folder);
    eventually("the copy", || {
        let used: u64 = program.ask("used").split(' ').filter_map(|used| used.parse::<u64>().ok()).sum();
        (used >= 2 * BYTES).then_some(())
    });
    assert_eq!(program.ask("refused 8000"), "2");
    let log = std::fs::read_to_string(program.log()).unwrap();
    let told = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let told = told.into_iter().find(|record| record["event"] == "memory.out").unwrap();
    let holders = told["holders"].as_array().unwrap();
    assert_eq!(holders.len(), 1, "{told:#}");
    assert_eq!((&holders[0]["blocks"], &holders[0]["bytes"]), (&1.into(), &BYTES.into()), "{told:#}");
    assert_eq!((&told["live_bytes"], &told["small"]), (&BYTES.into(), &0.into()), "{told:#}");
    drop(writers);
    assert!(command.wait().unwrap().success());
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

/// From the first to the last one that an image needs, where its copy lies on a GPU and where on the host.
#[test]
fn whichever_call_of_the_driver_fails_the_program_goes_on_and_the_older_image_is_there() {
    each_call_fails(checkpointed("1x1GiB"), "to_gpus_bytes");
}

#[test]
fn whichever_call_of_the_driver_fails_so_it_is_where_the_copy_goes_to_the_host() {
    each_call_fails(checkpointed("1x1GiB").env("GPUPOOL_LIMIT", "0:12MiB"), "to_host_bytes");
}

fn each_call_fails(run: Run, to: &str) {
    let (_around, folder) = store();
    let mut program = run.start(None);
    let block: u64 = program.ask("block 10240 5000").parse().unwrap();
    let small: u64 = program.ask("block 40 7000").parse().unwrap();
    let own: u64 = program.ask("own 4096 9000").parse().unwrap();
    let first = image(&program, &folder, "--keep 2");
    assert!(first[to].as_u64() >= Some(10 * MIB) && first["in_stop_bytes"] == 0, "{first}");
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
        for (address, bytes, seed) in [(block, 10240 << 10, 5000), (small, 40 << 10, 7000), (own, 4 << 20, 9000)] {
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
    assert_eq!(program.ask(&format!("look {own} 4096")), "9000 0");
    at_work(&mut program, 2);
    image(&program, &folder, "--keep 2");
    agrees(&mut program, &folder, 2);
    ends_well(program);
}

/// It is idle and healthy, and was said to hang in a call of the driver.
#[test]
fn a_program_without_a_free_descriptor_is_told_so() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    program.ask("name weights 3072 0 5000");
    image(&program, &folder, "");
    let limit = |most: u64| {
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        let pid = program.pid() as i32;
        // SAFETY: both are locals of the type that the call reads or fills.
        unsafe {
            assert_eq!(libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut before), 0);
            let new = libc::rlimit { rlim_cur: most, ..before };
            assert_eq!(libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const new, std::ptr::null_mut()), 0);
        }
        before.rlim_cur
    };
    let before = limit(3);
    let why = refused(&program, &folder, "");
    assert!(why.contains("it has no file descriptor left to answer by, of 3 that it may have (ulimit -n)"), "{why}");
    limit(before);
    image(&program, &folder, "");
    ends_well(program);
}
