//! What an image has comes back in another process, by names or by order.

use super::{MIB, blocks_of, checkpointed, ends_well, image, image_under_way, make_newer, store, verifies};
use harness::{Run, eventually};
use std::path::{Path, PathBuf};
use std::process::Command;

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
fn an_older_image_comes_back_where_its_number_is_given() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    for seed in [5000, 6000] {
        program.ask(&format!("name at{seed} 3072 0 {seed}"));
        image(&program, &folder, "");
    }
    program.signal(libc::SIGKILL);
    let mut program = by_command(&folder, "--generation 1").start(None);
    assert_eq!(program.ask("name at5000 3072 0 1"), "0 5000 0");
    assert_eq!(program.ask("name at6000 3072 0 1"), "-8 1 0", "of the newer image alone");
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(log.contains("generation 1 in "), "{log}");
    let gone = checkpointed("1x1GiB").env("GPUPOOL_RESTORE", &folder).env("GPUPOOL_RESTORE_GENERATION", "9");
    let mut program = gone.start(None);
    assert_eq!(program.ask("name at5000 3072 0 1"), "-8 1 0");
}

/// By the command, and not by its variables.
fn by_command(folder: &Path, more: &str) -> Run {
    let program = harness::program("checkpointed");
    let command = Run::command(harness::artifact_folder().join("gpupool")).args("run --restore").arg(folder);
    let run = command.args(more).arg("--").arg(program).sim("1x1GiB").env("GPUPOOL_RESERVE", "16MiB").report().log();
    run.env("GPUPOOL_HOST_LIMIT", "1GiB")
}

#[test]
fn the_command_has_what_has_names_come_back_or_all_of_it_in_its_order() {
    const SIZES: [u64; 3] = [3072, 40, 2048];
    let (around, folder) = store();
    with_names(&folder);
    let mut program = by_command(&folder, "").start(None);
    assert_eq!(program.ask("name weights 3072 0 1"), "0 22384 0");
    assert_eq!(program.ask("restore"), "0 0", "nothing comes back by order");
    ends_well(program);

    let ordered = around.path().join("ordered");
    let mut program = checkpointed("1x1GiB").start(None);
    blocks_of(&mut program, &SIZES, 5000);
    image(&program, &ordered, "");
    drop(program);
    let mut program = by_command(&ordered, "--restore-by-order").start(None);
    let addresses = blocks_of(&mut program, &SIZES, 1);
    let answer = program.ask("restore");
    assert!(answer.starts_with("0 ") && answer != "0 0", "{answer}");
    for ((address, size), number) in addresses.iter().zip(SIZES).zip(0..) {
        assert_eq!(program.ask(&format!("look {address} {size}")), format!("{} 0", 5000 + number * 100_000));
    }
    ends_well(program);

    // A path is this command's, wherever the program works.
    let mut command = Command::new(harness::artifact_folder().join("gpupool"));
    command.args(["run", "--restore", "ordered", "--", "sh", "-c", "cd / && echo $GPUPOOL_RESTORE"]);
    let said = command.current_dir(around.path()).env_remove("LD_PRELOAD").output().unwrap();
    assert_eq!(String::from_utf8(said.stdout).unwrap(), format!("{}\n", ordered.display()));

    // Which folder was meant is said before anything starts.
    for (named, expected) in [
        (ordered.join("gen-000001"), format!("it is one image; name the folder around it, {}, ", ordered.display())),
        (
            around.path().to_owned(),
            format!("name one of those in it that have some: {}, {}\n", folder.display(), ordered.display()),
        ),
    ] {
        let mut command = Command::new(harness::artifact_folder().join("gpupool"));
        command.arg("run").arg("--restore").arg(named).args(["--", "echo", "started"]).env_remove("LD_PRELOAD");
        let said = command.output().unwrap();
        let text = String::from_utf8(said.stderr).unwrap();
        assert_eq!((said.status.code(), said.stdout), (Some(2), Vec::new()), "{text}");
        assert!(text.lines().count() == 1 && text.contains(&expected), "{text}");
    }
}

/// The package as it is installed: its version is written where it is built.
fn package(around: &Path) -> PathBuf {
    let package = around.join("packages/gpupool");
    std::fs::create_dir_all(&package).unwrap();
    for entry in std::fs::read_dir(harness::repository().join("src/package/gpupool")).unwrap().flatten() {
        std::os::unix::fs::symlink(entry.path(), package.join(entry.file_name())).unwrap();
    }
    if !package.join("_version.py").exists() {
        std::fs::write(package.join("_version.py"), "__version__ = \"0\"\n").unwrap();
    }
    around.join("packages")
}

/// The Python package: what it names is in the image by that name, and comes back by it, and in its order.
#[test]
fn python_names_memory_and_has_it_come_back() {
    let (around, folder) = store();
    let packages = package(around.path());
    let begin = |first: u32, folder: Option<&Path>, by_order: &str| {
        let run = Run::client("restored.py").arg(first.to_string()).sim("1x1GiB").report().log().shim();
        let run = run.env("PYTHONPATH", &packages).env("GPUPOOL_RESTORE_BY_ORDER", by_order);
        let run = folder.into_iter().fold(run, |run, folder| run.env("GPUPOOL_RESTORE", folder));
        let mut program = run.start(None);
        let words = ["name array", "name address", "name other", "take it back", "restore", "words"];
        let said = words.map(|word| program.ask(word));
        (program, said)
    };
    let (program, said) = begin(5, None, "off");
    assert_eq!(said, ["None", "None", "None", "None", "0", "[[5], [6], [7]]"]);
    image(&program, &folder, "");
    let manifest = gpupool_store::show(&folder, None).unwrap();
    let mut names: Vec<_> = manifest.blocks.iter().flat_map(|block| &block.about.names).collect();
    names.sort_by_key(|name| &name.name);
    let names: Vec<_> = names.iter().map(|named| (named.name.as_str(), named.offset, named.bytes)).collect();
    assert_eq!(names, [("state", 0, 1 << 20), ("weights", 0, 3 << 20)]);
    assert!(program.end().0.success());

    let (program, said) = begin(50, Some(&folder), "off");
    let named = ["None", "None", "NOT_RESTORED", "None", "0", "[[5], [51], [7, 52]]"];
    assert_eq!(said, named, "what has names, and nothing else");
    assert!(program.end().0.success());
    let (program, said) = begin(50, Some(&folder), "on");
    let [.., bytes, words] = said;
    assert!(bytes.parse::<u64>().unwrap() >= (3072 + 40 + 2048) << 10, "{bytes}");
    assert_eq!(words, "[[5], [6], [7]]", "all of it");
    assert!(program.end().0.success());
}

#[test]
fn what_a_newer_gpupool_wrote_is_restored_by_none_that_is_older_and_the_program_goes_on() {
    let (_around, folder) = store();
    with_names(&folder);
    // There is an older one that could be read; it is not what was asked for.
    let mut program = checkpointed("1x1GiB").start(None);
    program.ask("name weights 3072 0 7");
    image(&program, &folder, "");
    drop(program);
    let written = make_newer(&folder, 2);
    let mut program = by_command(&folder, "").start(None);
    assert_eq!(program.ask("name weights 3072 0 1"), "-8 1 0");
    assert_eq!(program.ask("name bias 12 4 1"), "-8 1025 0");
    let log = std::fs::read_to_string(program.log()).unwrap();
    let told: Vec<&str> = log.lines().filter(|line| line.contains("nothing comes back: ")).collect();
    assert!(told.len() == 1 && told[0].contains("its format is version 99"), "{log}");
    ends_well(program);
    assert_eq!(std::fs::read_to_string(folder.join("gen-000002/manifest")).unwrap(), written);
}

/// What came back is right, and what did not is told: the answer, and the log.
#[test]
fn whichever_call_of_the_driver_fails_while_memory_comes_back_nothing_else_is_taken_for_it() {
    const KIB: u64 = 20480;
    let (around, folder) = store();
    let mut program = checkpointed("1x1GiB").start(None);
    assert_eq!(program.ask(&format!("name weights {KIB} 0 5000")), "0 5000 0");
    image(&program, &folder, "");
    drop(program);
    let ordered = around.path().join("ordered");
    let mut program = checkpointed("1x1GiB").start(None);
    blocks_of(&mut program, &[KIB], 5000);
    image(&program, &ordered, "");
    drop(program);
    for (folder, by_order) in [(&folder, "off"), (&ordered, "on")] {
        let (mut failed, mut back, mut count) = (0, 0, 0);
        for number in 1.. {
            let code = [999, 2, 1][number % 3];
            let what = format!("by order: {by_order}, call {number} answers {code}");
            let run = checkpointed("1x1GiB").env("GPUPOOL_RESTORE", folder);
            let mut program = run.env("GPUPOOL_RESTORE_BY_ORDER", by_order).start(None);
            let (answer, found) = if by_order == "on" {
                let block = blocks_of(&mut program, &[KIB], 1)[0];
                program.ask(&format!("late {number} {code}"));
                let answer = program.ask("restore");
                (answer.split(' ').next().unwrap().to_owned(), program.ask(&format!("look {block} {KIB}")))
            } else {
                program.ask(&format!("late {number} {code}"));
                let answer = program.ask(&format!("name weights {KIB} 0 1"));
                let (code, found) = answer.split_once(' ').unwrap();
                (code.to_owned(), found.to_owned())
            };
            let calls: usize = program.ask("made").parse().unwrap();
            if answer == "0" {
                back += 1;
                assert_eq!(found, "5000 0", "{what}");
            } else {
                failed += 1;
                let log = std::fs::read_to_string(program.log()).unwrap();
                let is_told = log.contains("hold anything now: ") || log.contains("holds anything now");
                assert!(answer != "-8" || is_told, "{what}: {answer}: {log}");
                assert!(answer == "-8" || found == "1 0", "{what}: {answer}, and {found}: nothing was begun");
            }
            // And whatever became of it, the program has memory that it can use.
            let block = blocks_of(&mut program, &[2048], 3)[0];
            assert_eq!(program.ask(&format!("look {block} 2048")), "3 0", "{what}");
            ends_well(program);
            if calls < number {
                count = number;
                break;
            }
        }
        assert!(
            count > 10 && failed > 3 && back >= 1,
            "by order: {by_order}, {count} calls, {failed} failed, {back} back"
        );
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
    assert!(log.contains("nothing comes back: ") && log.contains("none: there is no such folder"), "{log}");
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
    assert!(log.contains("the order differs at block 1 of 1: the place that asked for it is "), "{log}");
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
    let why = || std::fs::read_to_string(program.log()).unwrap();
    assert!(answer.starts_with("0 ") && answer != "0 0", "{answer}: {}", why());
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
