//! What `gpupool drain` says of memory that cannot leave, and which GPU a number means.

use super::setup::{held, is_whole, takes};
use super::{MIB, Machine, at, ends_well, uuid};
use gpupool_events::Event;
use gpupool_metrics::Snapshot;
use harness::{Run, Running, eventually};
use serde_json::Value;
use std::process::Stdio;

/// What a drain of a GPU says that stayed of this program.
#[track_caller]
fn stayed(told: &Value, program: &Running) -> Vec<(u64, String)> {
    let row = told.as_array().unwrap().iter().find(|row| row["pid"] == program.pid());
    let rows = row.unwrap_or_else(|| panic!("{told}"))["stayed"].as_array().unwrap();
    rows.iter().map(|row| (row["bytes"].as_u64().unwrap(), row["what"].as_str().unwrap().to_owned())).collect()
}

#[track_caller]
fn has(stayed: &[(u64, String)], least: u64, words: &str) {
    assert!(stayed.iter().any(|(bytes, what)| *bytes >= least && what.contains(words)), "{words}: {stayed:?}");
}

#[test]
fn memory_that_others_know_by_its_pages_stays_and_is_told() {
    let machine = Machine::new("2x1GiB");
    let mut program = machine.start(machine.run());
    assert_eq!(program.ask("keep 64"), "kept");
    assert!(!program.ask("give").is_empty());
    let (told, all) = machine.told("drain --json 0");
    let stayed = stayed(&told, &program);
    assert!(!all, "{told}");
    has(&stayed, 64 * MIB, "others know it by its pages: another process has it open");
    has(&stayed, 1, "a context");
    let page = machine.until(&program, "a drained GPU", |page| at(page, 0).drained);
    assert!(held(&page, 0) >= 64 * MIB, "{page:?}");
    program.ask("check");
    eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
    machine.told("undrain --json 0");
    ends_well(program);
}

/// The pool of it is made once it asks for memory.
#[test]
fn a_context_of_a_program_that_has_asked_for_no_memory_is_told() {
    let machine = Machine::new("2x320MiB");
    let mut program = machine.start(machine.neighbour(1, 50).arg("steps"));
    assert_eq!((program.ask("init").as_str(), program.ask("context").as_str()), ("begun", "there"));
    machine.until(&program, "its context", |page| !page.contexts.rows.is_empty());
    let (told, all) = machine.told("drain --json 1");
    assert!(!all, "{told}");
    has(&stayed(&told, &program), 1, "a context");
    let (told, _) = machine.told("drain --json 0");
    assert!(told.as_array().unwrap().iter().all(|row| row["stayed"].as_array().unwrap().is_empty()), "{told}");
    machine.told("undrain --json 0");
    machine.told("undrain --json 1");
    is_whole(program);
}

/// What a drain keeps from being lent is no matter of a setting.
#[test]
fn who_is_refused_memory_beside_a_drained_gpu_is_told_of_undrain() {
    let machine = Machine::new("2x1GiB");
    machine.told("drain --json 1");
    let steps = Run::program("steps").arg("a:1200");
    let run = machine.with_priority(steps, 50).env("XDG_RUNTIME_DIR", machine.folder.path());
    let output = run.env("GPUPOOL_HOST_LIMIT", "0").go();
    output.says("allocate 1200: 2");
    let told = output.event("a refusal", |event| match event {
        Event::OutOfMemory(told) => Some(told.clone()),
        _ => None,
    });
    let place = told.places.iter().find(|place| place.place == "gpu1").unwrap();
    assert_eq!(place.out.as_deref(), Some("drained"), "{told:?}");
    let (first, all) = (&told.remedies[0], &told.remedies);
    assert_eq!((first.said().as_str(), first.enough), ("gpupool undrain 1", true), "{all:?}");
}

#[test]
fn managed_memory_stays_and_is_told() {
    let machine = Machine::new("2x320MiB");
    let program = machine.holder(machine.neighbour(0, 50).env("GPUPOOL_MODE", "managed"), 40);
    let (told, all) = machine.told("drain --json 0");
    assert!(!all, "{told}");
    has(&stayed(&told, &program), 40 * MIB, "managed memory, which stays where it was placed");
    machine.told("undrain --json 0");
    is_whole(program);
}

/// And every place that it found none at is named with what it lacks.
#[test]
fn memory_that_has_no_room_elsewhere_stays_and_is_told() {
    let machine = Machine::new("2x320MiB");
    let run = machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_LIMIT", "0:2MiB");
    let program = machine.holder(run.env("GPUPOOL_HOST_LIMIT", "0"), 100);
    machine.until(&program, "a loan", |page| held(page, 1) >= 96 * MIB);
    let (told, all) = machine.told("drain --json --deadline 5s 1");
    assert!(!all, "{told}");
    let stayed = stayed(&told, &program);
    let lacking: u64 = stayed.iter().filter(|(_, what)| what.contains("gpu0 lacks ")).map(|(bytes, _)| bytes).sum();
    assert!(lacking >= 90 * MIB, "{stayed:?}");
    let page = machine.page(&program);
    assert!(at(&page, 1).drained && held(&page, 1) >= 90 * MIB, "{page:?}");
    machine.told("undrain --json 1");
    is_whole(program);
}

/// Its page was written before it had any, and is written again a second later.
#[test]
fn a_program_that_has_told_of_no_gpu_yet_leaves_what_is_drained() {
    let machine = Machine::new("2x320MiB");
    let run = machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_LIMIT", "0:2MiB");
    let mut program = machine.start(run);
    program.ask("pin 4");
    machine.until(&program, "a first page", |page| page.levels.gpus.rows.is_empty());
    takes(&mut program, 60);
    let (told, _) = machine.told("drain --json 1");
    let row = told.as_array().unwrap().iter().find(|row| row["pid"] == program.pid());
    assert!(row.is_some_and(|row| row["bytes"].as_u64() >= Some(56 * MIB)), "{told}");
    machine.told("undrain --json 1");
    is_whole(program);
}

/// Blocks of 20 MiB, of which each of the other GPUs has room for one.
#[test]
fn what_is_too_much_for_each_of_the_other_gpus_is_divided_among_them_before_it_goes_to_the_host() {
    let machine = Machine::new("4x320MiB");
    let run = machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1,2,3");
    let program = machine.holder(run.env("GPUPOOL_LIMIT", "0:2MiB,2:32MiB,3:24MiB"), 60);
    machine.until(&program, "a loan", |page| held(page, 1) >= 56 * MIB);
    machine.told("drain --json 1");
    let page = machine.page(&program);
    assert_eq!(held(&page, 1), 0, "{page:?}");
    assert!(held(&page, 2) >= 18 * MIB && held(&page, 3) >= 18 * MIB, "{page:?}");
    assert!(page.levels.residence.on_host <= 22 * MIB, "{page:?}");
    machine.told("undrain --json 1");
    is_whole(program);
}

/// A block that has parts on two lenders, one of which is drained while the program is suspended: nothing comes to that one, and everything once it lends again.
#[test]
fn parts_on_a_lender_that_is_drained_meanwhile_come_elsewhere_with_the_resume() {
    let folder = tempfile::tempdir().unwrap();
    for to in ["host".to_owned(), folder.path().display().to_string()] {
        let machine = Machine::new("3x320MiB");
        let run = machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1,2");
        let mut program = machine.start(run.env("GPUPOOL_LIMIT", "0:2MiB,1:60MiB,2:60MiB"));
        takes(&mut program, 100);
        let on_both = |page: &Snapshot| held(page, 1) >= 36 * MIB && held(page, 2) >= 36 * MIB;
        machine.until(&program, "parts on both", on_both);
        let pid = program.pid();
        machine.told(&format!("suspend --json --to {to} {pid}"));
        machine.told("drain --json 1");
        assert!(machine.told(&format!("resume --json {pid}")).1);
        let page = machine.page(&program);
        assert!(held(&page, 1) == 0 && page.levels.suspended == 0, "{to}: {page:?}");
        assert!(held(&page, 2) >= 36 * MIB && page.levels.residence.on_host >= 36 * MIB, "{to}: {page:?}");
        assert_eq!(program.ask("check"), "0", "{to}");
        assert!(machine.told("undrain --json 1").1);
        let page = machine.until(&program, "parts on both again", on_both);
        assert!(page.levels.residence.on_host <= 4 * MIB, "{to}: {page:?}");
        is_whole(program);
    }
}

/// Where the GPU that it works on has no room, and neither lender has a context: a copy engine takes three times as long as a kernel for that.
#[test]
fn what_goes_from_one_lender_to_another_is_copied_by_a_kernel() {
    let machine = Machine::new("3x320MiB");
    let run = machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1,2").env("GPUPOOL_LIMIT", "0:2MiB,2:2MiB");
    let program = machine.holder(run.env("GPUPOOL_LOG", "gpupool::memory=debug"), 60);
    machine.until(&program, "a loan", |page| held(page, 1) >= 56 * MIB);
    assert!(machine.told(&format!("set --json {} limit=0:2MiB", program.pid())).1);
    machine.told("drain --json 1");
    let page = machine.page(&program);
    assert!(held(&page, 1) == 0 && held(&page, 2) >= 56 * MIB, "{page:?}");
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(log.contains(" went from one lender to another by a kernel"), "{log}");
    is_whole(program);
}

/// `nvidia-smi` counts them by bus, and each program as its variable says.
#[test]
fn a_number_is_that_of_nvidia_smi_whatever_a_program_calls_the_gpu() {
    let machine = Machine::new("2x320MiB");
    let run = |list: &str| machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1").env("CUDA_VISIBLE_DEVICES", list);
    // Both work on the GPU that each calls 0, and borrow from the other one.
    let mut programs = ["0,1", "1,0"].map(|list| machine.holder(run(list).env("GPUPOOL_LIMIT", "0:2MiB"), 60));
    let pages = programs.each_ref().map(|program| machine.until(program, "a loan", |page| held(page, 1) >= 56 * MIB));
    assert_eq!(uuid(&pages[0], 0), uuid(&pages[1], 1));
    let (told, _) = machine.told("drain --json 0");
    let [here, there] = &mut programs;
    // The second one's loan is on the machine's first GPU.
    let page = machine.until(there, "an empty GPU", |page| held(page, 1) == 0);
    assert_eq!((at(&page, 0).drained, at(&page, 1).drained), (false, true), "{told}");
    let page = machine.until(here, "a drained GPU", |page| at(page, 0).drained);
    assert!(!at(&page, 1).drained && held(&page, 1) >= 56 * MIB, "{told}");
    takes(there, 20);
    assert_eq!(held(&machine.page(there), 1), 0);
    assert!(machine.told("undrain --json 0").1);
    programs.into_iter().for_each(|program| drop(is_whole(program)));
}

/// Neither the limit of the pool nor a drain moves what the driver alone can place, nor a limit what the program made itself where there was room.
#[test]
fn what_a_limit_or_a_drain_cannot_move_of_the_programs_own_memory_is_told() {
    let machine = Machine::new("2x1GiB");
    let mut program = machine.start(machine.run());
    assert_eq!(program.ask("make 32"), "made");
    program.ask("compress");
    assert_eq!(program.ask("make 16"), "made");
    let set = |limit: &str| {
        let (told, done) = machine.told(&format!("set --json {} limit={limit}", program.pid()));
        assert!(done, "{told}");
        told["changes"][0]["note"].as_str().unwrap_or_default().to_owned()
    };
    let kind = "stays on GPU 0: it is of a kind that only the driver can place";
    let note = set("0:8MiB");
    assert!(note.contains("32.0 MiB stays on GPU 0: memory of the program's own (cuMemCreate)"), "{note}");
    assert!(note.contains(&format!("8.0 MiB {kind}")), "{note}");
    // What is told of is what is beyond.
    let note = set("0:4MiB");
    assert!(note.contains(&format!("12.0 MiB {kind}")), "{note}");
    let (told, all) = machine.told("drain --json 0");
    assert!(!all, "{told}");
    let stayed = stayed(&told, &program);
    assert!(stayed.iter().any(|(bytes, what)| *bytes == 16 * MIB && what.starts_with("it is of a kind")), "{stayed:?}");
    machine.told("undrain --json 0");
    ends_well(program);
}

/// Of another GPU, since its own one has no room for it.
#[test]
fn a_programs_own_memory_on_a_gpu_that_lends_it_leaves_for_a_new_limit_there() {
    let machine = Machine::new("2x320MiB");
    let mut program = machine.start(machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1"));
    for mib in [260, 60] {
        assert_eq!(program.ask(&format!("own {mib}")), "made");
    }
    machine.until(&program, "a loan", |page| held(page, 1) >= 60 * MIB);
    let (told, done) = machine.told(&format!("set --json {} limit=1:2MiB", program.pid()));
    assert!(done && told["changes"][0]["note"] == "60.0 MiB moved away from GPU 1", "{told}");
    machine.until(&program, "an empty GPU 1", |page| held(page, 1) == 0);
    is_whole(program);
}

/// A program with 48 MiB on GPU 0, 16 of which a kernel is about to read again and again.
fn reader(machine: &Machine, moves: &str) -> Running {
    let run = Run::program("far").args("ready 3000 40").sim(machine.gpus);
    let run = run.env("SIMCUDA_MACHINE", machine.folder.path().join("machine")).env("GPUPOOL_MOVE", moves);
    let mut program = machine.start(run.env("GPUPOOL_RESERVE", "16MiB").log().shim());
    assert_eq!(program.hear(), "ready");
    program
}

/// Has it read, and end; what is said of far memory then: its cause and how to mend it.
#[track_caller]
fn found(mut program: Running) -> (String, String) {
    program.tell("read");
    let log = program.log();
    assert!(program.hear().starts_with("sum: "));
    let (status, _folder) = program.ends();
    assert!(status.success(), "{status}");
    let log = std::fs::read_to_string(log).unwrap();
    let found = log.lines().find(|line| line.contains("GP019")).unwrap_or_else(|| panic!("{log}"));
    let found: Value = serde_json::from_str(found).unwrap();
    let fix = found["message"].as_str().unwrap().split_once("fix: ").unwrap().1.to_owned();
    (found["facts"]["cause"].as_str().unwrap().to_owned(), fix)
}

/// Neither was asked to move it, nor would that help: it comes back by itself, or once others have gone.
#[test]
fn far_memory_of_a_program_that_was_suspended_or_whose_gpu_is_drained_is_told_as_that() {
    for (moves, cause) in [("off", "away"), ("auto", "others")] {
        let machine = Machine::new("2x256MiB");
        let program = reader(&machine, moves);
        let (left, _) = machine.told(&format!("suspend --to host --json {}", program.pid()));
        assert!(left[0]["bytes"].as_u64() >= Some(48 * MIB) && left[0]["stayed_bytes"] == 0, "{left}");
        // Somebody else has GPU 0 meanwhile.
        let mut other = machine.start(machine.bare(0));
        takes(&mut other, 100);
        while other.ask("take 4").parse::<u64>().is_ok() {}
        // It goes to GPU 1.
        machine.told(&format!("resume --json {}", program.pid()));
        let (found, fix) = found(program);
        assert!(found == cause && fix.starts_with("make room on that GPU"), "GPUPOOL_MOVE={moves}: {found}, {fix}");
        assert_eq!(other.ask("check"), "0");
        drop(other.end());
    }
    let machine = Machine::new("2x256MiB");
    let program = reader(&machine, "off");
    machine.gpupool("drain 0 --deadline 30s");
    let (found, fix) = found(program);
    assert!(found == "drained" && fix.contains("gpupool undrain"), "{found}, {fix}");
}

/// As after a command that the system was slow to run: what the program did meanwhile by itself was done for it, and took its time.
#[test]
fn what_left_before_the_program_was_asked_is_told_with_the_time_that_it_took() {
    let machine = Machine::new("2x1GiB");
    let program = machine.borrower();
    let gpu = uuid(&machine.page(&program), 1);
    std::fs::write(machine.folder.path().join("gpupool").join(format!("{gpu}.drained")), "").unwrap();
    machine.until(&program, "an empty GPU 1", |page| at(page, 1).drained && held(page, 1) == 0);
    let (told, all) = machine.told("drain --json 1");
    assert!(all && told[0]["bytes"].as_u64() >= Some(20 * MIB), "{told}");
    let took = told[0]["microseconds"].as_u64().unwrap();
    assert!(machine.told("undrain --json 1").1);
    let drains = ends_well(program).into_iter().filter_map(|event| match event {
        Event::GpuDrain(event) if event.bytes > 0 => Some(event.microseconds),
        _ => None,
    });
    let drains: Vec<u64> = drains.collect();
    assert!(drains.len() == 1 && took >= drains[0], "{took}: {drains:?}");
}

/// Somebody with a higher priority has just taken the program's own GPU, and what left for that is in plain memory of the host still.
#[test]
fn what_is_on_a_drained_gpu_leaves_behind_what_is_on_its_way_to_the_host() {
    let machine = Machine::new("3x256MiB");
    let low = machine.holder(machine.neighbour(1, 20).env("GPUPOOL_DEVICES", "1,2"), 440);
    machine.until(&low, "memory on GPU 2", |page| held(page, 2) >= 180 * MIB);
    let mut high = machine.start(machine.neighbour(1, 90).env("GPUPOOL_DEVICES", "1"));
    takes(&mut high, 20);
    // What it asks for meanwhile puts off that anything becomes the host's.
    let drain = machine.command("drain --json --deadline 30s 2").stdout(Stdio::piped()).spawn().unwrap();
    for _ in 0..8 {
        takes(&mut high, 20);
    }
    let told: Value = serde_json::from_slice(&drain.wait_with_output().unwrap().stdout).unwrap();
    assert_eq!(stayed(&told, &low), [], "{told}");
    machine.until(&low, "an empty GPU 2", |page| at(page, 2).drained && held(page, 2) == 0);
    assert!(machine.told("undrain --json 2").1);
    is_whole(high);
    is_whole(low);
}

/// The borrower matters less, and was there first.
#[test]
fn what_a_program_has_for_itself_comes_back_before_loans_once_its_gpu_is_drained_no_more() {
    let machine = Machine::new("2x320MiB");
    let debtor = machine.debtor(200);
    let mut owner = machine.start(machine.neighbour(1, 60).env("GPUPOOL_DEVICES", "1"));
    assert_eq!(owner.ask("check"), "0", "it has begun");
    assert!(machine.told("drain --json 1").0.is_array());
    (0..16).for_each(|_| _ = takes(&mut owner, 20));
    let (told, all) = machine.told("undrain --json 1");
    let row = |program: &Running| told.as_array().unwrap().iter().find(|row| row["pid"] == program.pid()).unwrap();
    let page = machine.page(&owner);
    // All but what has no room beside contexts and the reserve.
    assert!(all && held(&page, 1) >= 260 * MIB, "{told} {page:?}");
    assert_eq!(row(&debtor)["bytes"], 0, "{told}");
    let [came, stayed] = [row(&owner)["bytes"].as_u64(), stayed(&told, &owner).first().map(|(bytes, _)| *bytes)];
    assert_eq!(came.unwrap() + stayed.unwrap(), 320 * MIB, "{told}");
    is_whole(owner);
    is_whole(debtor);
}

/// One wrong digit, and whoever takes the GPU out of the machine believes that it is empty.
#[test]
fn a_number_that_no_gpu_has_is_drained_by_nobody_and_one_of_a_gpu_that_was_taken_out_is_undrained() {
    let machine = Machine::new("2x320MiB");
    let said = |output: &[u8]| String::from_utf8_lossy(output).into_owned();
    let unknown = "GPU-73696d63-7564-612d-6c36-4ead00000009";
    for command in ["drain", "undrain"] {
        let ended = machine.gpupool(&format!("{command} {unknown}"));
        let error = said(&ended.stderr);
        assert_eq!(ended.status.code(), Some(2), "{command}: {error}");
        assert!(error.contains(&format!("no {unknown} on this machine")), "{error}");
        assert!(error.contains("0 is GPU-") && error.contains("1 is GPU-") && !error.contains("2 is "), "{error}");
    }
    let files = || machine.folder.path().join("gpupool").read_dir().map_or(0, |files| files.count());
    assert_eq!(files(), 0);
    // While there was a third one.
    let with_three = machine.command("drain 2").env("SIMCUDA_GPUS", "3x320MiB").output().unwrap();
    let with_three = said(&with_three.stdout);
    let third = with_three.split(' ').next().unwrap();
    assert!(third.starts_with("GPU-") && files() == 1, "{with_three}");
    let ended = machine.gpupool(&format!("undrain {third}"));
    assert!(ended.status.success() && said(&ended.stdout).ends_with("is drained no more\n"), "{ended:?}");
    assert_eq!(files(), 0);
    // Where nobody tells which GPUs there are.
    let mut command = machine.command(&format!("drain {unknown}"));
    let ended = command.env("LD_LIBRARY_PATH", harness::driver_folder()).output().unwrap();
    let error = said(&ended.stderr);
    assert!(ended.status.success() && error.contains("whether this machine has such a GPU is not known"), "{error}");
    assert!(machine.gpupool(&format!("undrain {unknown}")).status.success());
}

/// Another thread of the program is about to make 60 MiB of memory on GPU 1, and stands in that.
fn makes_late(program: &mut Running) {
    assert_eq!(program.ask("hold cuMemCreate"), "it will");
    program.ask("allocate 60");
    eventually("a call that stands", || (program.ask("stands") == "yes").then_some(()));
}

fn goes_on_with_it(program: &mut Running) {
    assert_eq!(program.ask("let"), "it does");
    eventually("its memory", || (program.ask("allocated") == "yes").then_some(()));
}

/// A thread that had chosen the GPU before it was drained makes memory there behind that.
#[test]
fn what_is_made_on_a_gpu_while_that_is_drained_leaves_as_well() {
    let machine = Machine::new("2x320MiB");
    let mut program = machine.start(machine.run().nvml().env("GPUPOOL_LIMIT", "0:4MiB"));
    assert_eq!(program.ask("keep 40"), "kept");
    machine.until(&program, "memory on GPU 1", |page| held(page, 1) >= 30 * MIB);
    makes_late(&mut program);
    let (told, _) = machine.told("drain --json 1");
    assert!(told[0]["bytes"].as_u64() >= Some(30 * MIB), "{told}");
    goes_on_with_it(&mut program);
    machine.until(&program, "an empty GPU 1", |page| {
        page.levels.live_bytes == 100 * MIB && at(page, 1).drained && held(page, 1) == 0
    });
    ends_well(program);
}

/// The drain had found that the program uses nothing there, and was about to return what it had freed.
#[test]
fn what_is_made_on_a_gpu_in_the_last_moment_of_its_drain_leaves_as_well() {
    let machine = Machine::new("2x320MiB");
    let run = machine.run().nvml().env("GPUPOOL_LIMIT", "0:4MiB").env("GPUPOOL_IDLE", "off");
    let mut program = machine.start(run);
    assert_eq!(program.ask("keep 64"), "kept");
    makes_late(&mut program);
    assert_eq!(program.ask("drop"), "freed");
    assert_eq!(program.ask("late cuMemRelease"), "it will");
    let (told, _) = machine.told("drain --json 1");
    assert_eq!(program.ask("allocated"), "yes", "{told}");
    machine.until(&program, "an empty GPU 1", |page| {
        page.levels.live_bytes == 60 * MIB && at(page, 1).drained && held(page, 1) == 0
    });
    ends_well(program);
}

/// The same of what a new setting keeps from a GPU.
#[test]
fn what_is_made_on_a_gpu_that_may_lend_no_more_of_it_leaves_as_well() {
    for setting in ["devices=0", "limit=0:4MiB,1:0"] {
        let machine = Machine::new("2x320MiB");
        let run = machine.run().nvml().env("GPUPOOL_LIMIT", "0:4MiB").env("GPUPOOL_DEVICES", "0,1");
        let mut program = machine.start(run);
        assert_eq!(program.ask("keep 40"), "kept");
        machine.until(&program, "a loan", |page| held(page, 1) >= 30 * MIB);
        makes_late(&mut program);
        let (told, done) = machine.told(&format!("set --json {} {setting}", program.pid()));
        assert!(done, "{told}");
        goes_on_with_it(&mut program);
        machine.until(&program, "nothing lent", |page| page.levels.live_bytes == 100 * MIB && held(page, 1) == 0);
        ends_well(program);
    }
}

/// What is on the host of a program's memory, the pool's and its own.
fn on_host(page: &Snapshot) -> u64 {
    page.levels.places.rows.iter().filter(|place| place.on_host).map(|place| place.held + place.own).sum()
}

/// And for which the log tells of no drain that had anything leave.
#[track_caller]
fn was_never_there(events: &[Event]) {
    let drains: Vec<_> = events.iter().filter(|event| matches!(event, Event::GpuDrain(_))).collect();
    assert!(drains.is_empty(), "{drains:?}");
}

/// Before it has any nobody has looked at what the GPUs are.
#[test]
fn the_first_memory_of_a_program_goes_to_no_drained_gpu_also_if_it_is_its_own() {
    let machine = Machine::new("2x320MiB");
    machine.told("drain --json 0");
    let mut program = machine.start(machine.neighbour(0, 50));
    assert_eq!(program.ask("own 60"), "made");
    let page = machine.until(&program, "its memory", |page| held(page, 0) + held(page, 1) >= 60 * MIB);
    assert_eq!((held(&page, 0), held(&page, 1)), (0, 60 * MIB), "{page:?}");
    was_never_there(&is_whole(program));
}

/// An arena: 200 MiB are more than half of what the GPU has, and 60 of what it may have.
#[test]
fn a_drained_gpu_gets_no_arena_while_the_host_has_room() {
    let arenas = [
        ("200", "0", "", 0),
        ("60", "0", "0:4MiB", 0),
        ("200", "0,1", "1:100MiB", 100 * MIB),
        ("200", "0,1", "", 200 * MIB),
    ];
    for (mib, devices, limit, on_peer) in arenas {
        let machine = Machine::new("2x320MiB");
        machine.told("drain --json 0");
        let run = machine.neighbour(0, 50).env("GPUPOOL_DEVICES", devices).env("GPUPOOL_LIMIT", limit);
        let mut program = machine.start(run);
        assert_eq!(program.ask(&format!("own {mib}")), "made");
        let bytes = mib.parse::<u64>().unwrap() * MIB;
        let page = machine.until(&program, "its memory", |page| {
            let gpus = page.levels.places.rows.iter().filter(|place| place.is_gpu());
            gpus.map(|gpu| held(page, gpu.number)).sum::<u64>() + on_host(page) >= bytes
        });
        let peer = if devices == "0" { 0 } else { held(&page, 1) };
        assert_eq!((held(&page, 0), peer, on_host(&page)), (0, on_peer, bytes - on_peer), "{mib} {devices} {page:?}");
        was_never_there(&is_whole(program));
    }
}

/// More than the GPU itself has is refused, as it would be bare: the program asks for less then.
#[test]
fn an_arena_that_the_gpu_would_not_have_is_refused_also_while_that_is_drained() {
    let machine = Machine::new("1x320MiB");
    machine.told("drain --json 0");
    let run = machine.with_priority(Run::program("own_memory").args("c:340 c:200 s"), 50);
    let output = run.env("XDG_RUNTIME_DIR", machine.folder.path()).go();
    output.says("create 340: 2");
    output.says("used: gpu0 4 host 200");
}

#[test]
fn what_does_not_come_back_because_of_a_limit_is_told_with_that() {
    let machine = Machine::new("1x320MiB");
    machine.told("drain --json 0");
    let program = machine.holder(machine.neighbour(0, 50).env("GPUPOOL_LIMIT", "0:40MiB"), 60);
    let (told, _) = machine.told("undrain --json 0");
    has(&stayed(&told, &program), 16 * MIB, "GPU 0 has no room for it: GPUPOOL_LIMIT allows 40.0 MiB of it");
    is_whole(program);
}

/// A program with `CUDA_VISIBLE_DEVICES=1,0` calls GPU 1 its gpu0, and whoever reads that drains GPU 0.
#[test]
fn a_gpu_that_a_program_numbers_in_its_own_way_has_the_machines_number_beside_it() {
    let machine = Machine::new("2x1GiB");
    let mut program = machine.holder(machine.neighbour(0, 50).env("CUDA_VISIBLE_DEVICES", "1,0"), 80);
    let page = machine.until(&program, "its memory", |page| held(page, 0) >= 80 * MIB);
    let name = format!("gpu0 is GPU 1 ({})", uuid(&page, 0));
    let ps = String::from_utf8(machine.gpupool("ps").stdout).unwrap();
    assert!(ps.contains(&name), "{name}: {ps}");
    let top = String::from_utf8(machine.command("top --once").env("COLUMNS", "120").output().unwrap().stdout).unwrap();
    assert!(top.lines().any(|line| line.starts_with("GPU 1 (GPU-") && line.contains("80.0 MiB")), "{top}");
    let drain = String::from_utf8(machine.gpupool("drain 1").stdout).unwrap();
    assert!(drain.contains("(neighbour, which calls it gpu0): 80.0 MiB moved away"), "{drain}");
    let (told, _) = machine.told("undrain --json 1");
    assert_eq!(told[0]["calls_it"], "gpu0", "{told}");
    takes(&mut program, 20);
    is_whole(program);
}

/// It was on another GPU before, since its own one had no room for it, and is there still.
#[test]
fn undrain_says_nothing_of_memory_that_had_no_room_there_before_the_drain() {
    let machine = Machine::new("2x320MiB");
    let program = machine.holder(machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1"), 400);
    machine.until(&program, "memory on GPU 1", |page| held(page, 1) >= 80 * MIB);
    machine.told("drain --json 0");
    let (told, is_done) = machine.told("undrain --json 0");
    assert!(is_done && stayed(&told, &program).is_empty(), "{told}");
    assert!(told[0]["bytes"].as_u64() >= Some(200 * MIB), "{told}");
    is_whole(program);
}
