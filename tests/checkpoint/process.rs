//! `gpupool checkpoint --process`: an image, behind which the program leaves the GPUs whole.

use super::{MIB, agrees, checkpointed, ends_well, generations, rounds_of, session, store, stored, verifies};
use harness::{Build, Run, Running, artifact_folder, at_work, eventually, goes_on, page_of};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// A folder with a `criu` that writes down what it is asked and does `then`; without `then` there is none.
fn path(then: Option<&str>) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    if let Some(then) = then {
        let script = folder.path().join("criu");
        let told = folder.path().join("told");
        harness::script(&script, &format!("#!/bin/sh\necho \"$@\" >> {}\n{then}\n", told.display()));
    }
    folder
}

/// The command on the machine that a program is on, where programs are found in this folder alone, with these variables beside.
fn gpupool(program: &Running, path: &Path, arguments: &str, beside: &[(&str, &Path)]) -> Output {
    let environment = std::fs::read(format!("/proc/{}/environ", program.pid())).unwrap();
    let variables = environment.split(|byte| *byte == 0).filter_map(|pair| {
        let (name, value) = std::str::from_utf8(pair).ok()?.split_once('=')?;
        (name.starts_with("SIMCUDA_") || name == "LD_LIBRARY_PATH").then(|| (name.to_owned(), value.to_owned()))
    });
    let mut command = Command::new(artifact_folder().join("gpupool"));
    command.args(arguments.split_whitespace()).envs(variables).env("XDG_RUNTIME_DIR", program.session());
    command.env("PATH", path).env_remove("LD_PRELOAD").envs(beside.iter().copied()).output().unwrap()
}

fn lines(text: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(text).lines().map(str::to_owned).collect()
}

#[track_caller]
fn succeeds(ended: &Output) -> Vec<String> {
    assert!(ended.status.success() && ended.stderr.is_empty(), "{ended:?}");
    lines(&ended.stdout)
}

/// Another process of the same machine, which has nothing itself.
fn witness(program: &mut Running) -> Running {
    // A process whose program has only just been put in place has no environment to be read yet; who answers has.
    program.ask("used");
    let environment = std::fs::read(format!("/proc/{}/environ", program.pid())).unwrap();
    let mut variables = environment.split(|byte| *byte == 0).filter_map(|pair| std::str::from_utf8(pair).ok());
    let machine = variables.find_map(|pair| pair.strip_prefix("SIMCUDA_MACHINE=")).unwrap().to_owned();
    Run::program("checkpointed").sim("2x1GiB").env("SIMCUDA_MACHINE", machine).start(None)
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name.contains("process"));
    names.sort();
    names
}

#[test]
fn with_process_an_image_is_written_and_the_program_leaves_the_gpus_without_going_on_in_between() {
    let (_around, folder) = store();
    let none = path(None);
    let mut program = checkpointed("2x1GiB").machine().start(None);
    let mut witness = witness(&mut program);
    let block: u64 = program.ask("block 20480 5000").parse().unwrap();
    at_work(&mut program, 2);
    let pid = program.pid();
    for number in 1..=2 {
        let ended =
            gpupool(&program, none.path(), &format!("checkpoint --process {pid} {} --wait 60s", folder.display()), &[]);
        let said = succeeds(&ended);
        assert_eq!(witness.ask("used"), "0", "{said:?}");
        assert_eq!(generations(&folder)[0], number);
        assert!(said[0].contains(&format!("process {pid}: generation {number} in ")), "{said:?}");
        assert!(!said[0].contains("found no room"), "{said:?}");
        assert!(said[1].contains("left the GPUs") && !said[1].contains("stayed"), "{said:?}");
        assert!(said[2].contains("has nothing on the GPUs") && said[2].contains("is not installed"), "{said:?}");
        assert_eq!(said.len(), 3, "{said:?}");
        verifies(&folder);
        assert!(stored(&folder, block, 20480 << 10).iter().zip(5000..).all(|(word, wanted)| *word == wanted));
        agrees(&mut program, &folder, 2);
        // Both threads have done all that is not in the image, which is one round at most of each.
        let done: u32 = program.ask("rounds").parse().unwrap();
        let seen: u32 = (0..2).map(|thread| rounds_of(&mut program, &folder, thread)[0]).sum();
        assert!((seen..=seen + 2).contains(&done), "{seen} rounds are in the image, and {done} were done");
        let page = page_of(&program.session(), pid).unwrap();
        assert!(page.levels.suspended > 0, "{page:?}");
        succeeds(&gpupool(&program, none.path(), &format!("resume {pid}"), &[]));
        assert_eq!(program.ask(&format!("look {block} 20480")), "5000 0");
        goes_on(&mut program);
    }
    assert_eq!(names(&folder), [""; 0], "nothing of criu's");
    ends_well(program);
}

#[test]
fn with_process_the_image_is_one_as_any_other_and_comes_back_by_name_in_another_program() {
    let (_around, folder) = store();
    let none = path(None);
    let mut program = checkpointed("1x1GiB").machine().start(None);
    assert_eq!(program.ask("name weights 3072 64 5000"), "0 21384 0");
    let asked = format!("checkpoint --json --process {} {}", program.pid(), folder.display());
    let ended = gpupool(&program, none.path(), &asked, &[]);
    let told: Value = serde_json::from_str(&succeeds(&ended).concat()).unwrap();
    assert_eq!((&told["generation"], &told["process"]["is_off_gpus"]), (&1.into(), &true.into()), "{told}");
    assert!(told["process"]["bytes"].as_u64() >= Some(3 * MIB) && told["process"]["dump"].is_null(), "{told}");
    succeeds(&gpupool(&program, none.path(), &format!("resume {}", program.pid()), &[]));
    ends_well(program);
    let mut program = checkpointed("1x1GiB").env("GPUPOOL_RESTORE", &folder).start(None);
    assert_eq!(program.ask("name weights 3072 0 1"), "0 21384 0");
}

#[test]
fn with_process_criu_stores_the_process_beside_its_image_and_the_program_can_be_resumed() {
    let (_around, folder) = store();
    let criu = path(Some("while [ $# -gt 1 ]; do [ \"$1\" = --images-dir ] && : > \"$2/inventory.img\"; shift; done"));
    let mut program = checkpointed("1x1GiB").machine().start(None);
    let block: u64 = program.ask("block 20480 5000").parse().unwrap();
    let pid = program.pid();
    for (number, left) in [(1, vec!["process-000001"]), (2, vec!["process-000002"])] {
        let asked = format!("checkpoint --process --keep 1 {pid} {}", folder.display());
        let said = succeeds(&gpupool(&program, criu.path(), &asked, &[]));
        assert_eq!(
            (generations(&folder), names(&folder)),
            (vec![number], left.iter().map(|name| (*name).to_owned()).collect())
        );
        let dump = folder.join(left[0]);
        assert!(said[2].contains(&dump.display().to_string()) && said[2].contains("gpupool resume"), "{said:?}");
        assert!(dump.join("inventory.img").exists());
        assert_eq!(std::fs::metadata(&dump).unwrap().permissions().mode() & 0o777, 0o700);
        succeeds(&gpupool(&program, criu.path(), &format!("resume {pid}"), &[]));
        assert_eq!(program.ask(&format!("look {block} 20480")), "5000 0");
    }
    let told = std::fs::read_to_string(criu.path().join("told")).unwrap();
    let expected = format!(
        "dump --tree {pid} --images-dir {}/.process-000001.new --leave-running --shell-job --file-locks",
        folder.display()
    );
    assert_eq!(told.lines().next(), Some(expected.as_str()));
    ends_well(program);
}

#[test]
fn with_process_a_criu_that_fails_leaves_the_image_and_the_program_goes_on() {
    let (_around, folder) = store();
    let criu = path(Some("echo one of many >&2; echo 'Error: no such kernel' >&2; exit 1"));
    let mut program = checkpointed("1x1GiB").machine().start(None);
    let block: u64 = program.ask("block 20480 5000").parse().unwrap();
    at_work(&mut program, 1);
    let asked = format!("checkpoint --process {} {} --wait 60s", program.pid(), folder.display());
    let ended = gpupool(&program, criu.path(), &asked, &[]);
    let said = lines(&ended.stderr);
    assert!(ended.status.code() == Some(1) && said.len() == 1, "{ended:?}");
    assert!(said[0].contains("generation 1 is whole, and it is resumed, since criu dump ended with"), "{said:?}");
    assert!(said[0].ends_with(": Error: no such kernel"), "{said:?}");
    assert_eq!(names(&folder), [""; 0]);
    verifies(&folder);
    assert_eq!(program.ask(&format!("look {block} 20480")), "5000 0");
    goes_on(&mut program);
    ends_well(program);
}

#[test]
fn with_process_where_somebody_resumes_it_meanwhile_it_is_not_said_to_be_suspended() {
    let (_around, folder) = store();
    let mut program = checkpointed("1x1GiB").machine().start(None);
    at_work(&mut program, 1);
    let resume =
        format!("{} resume {} > /dev/null 2>&1; exit 1", artifact_folder().join("gpupool").display(), program.pid());
    let criu = path(Some(&resume));
    let asked = format!("checkpoint --process {} {} --wait 60s", program.pid(), folder.display());
    let ended = gpupool(&program, criu.path(), &asked, &[]);
    let said = lines(&ended.stderr);
    assert!(ended.status.code() == Some(1) && said.len() == 1, "{ended:?}");
    let expected = "generation 1 is whole, and it goes on, since it was resumed meanwhile: criu dump ended with";
    assert!(said[0].contains(expected), "{said:?}");
    verifies(&folder);
    goes_on(&mut program);
    ends_well(program);
}

#[test]
fn with_process_where_the_driver_refuses_or_something_cannot_leave_the_image_stays_and_the_program_goes_on() {
    let none = path(None);
    let driver = |flag: &str| {
        let folder = tempfile::tempdir().unwrap();
        let built =
            Build::library("refuses_checkpoint", &format!("refuses_checkpoint{flag}")).flag(&format!("-D{flag}"));
        std::fs::copy(built.path(), folder.path().join("libcuda.so.1")).unwrap();
        folder
    };
    let mut program = checkpointed("1x1GiB").machine().start(None);
    let block: u64 = program.ask("block 20480 5000").parse().unwrap();
    at_work(&mut program, 1);
    let (_around, folder) = store();
    let asked = format!("checkpoint --process {} {} --wait 60s", program.pid(), folder.display());
    let is_refused = |program: &mut Running, beside: &[(&str, &Path)], words: &[&str]| {
        let ended = gpupool(program, none.path(), &asked, beside);
        let said = lines(&ended.stderr);
        assert!(ended.status.code() == Some(1) && said.len() == 1, "{ended:?}");
        assert!(words.iter().all(|word| said[0].contains(word)), "{said:?}");
        let page = page_of(&program.session(), program.pid()).unwrap();
        assert_eq!(page.levels.suspended, 0, "{page:?}");
        assert_eq!(program.ask(&format!("look {block} 20480")), "5000 0");
        goes_on(program);
    };
    let words = ["generation 1 is whole, and it is resumed, since the rest of it cannot leave: ", "999"];
    let refuses = driver("NEW");
    is_refused(&mut program, &[("LD_LIBRARY_PATH", refuses.path())], &words);
    verifies(&folder);
    assert!(stored(&folder, block, 20480 << 10).iter().zip(5000..).all(|(word, wanted)| *word == wanted));
    // An older driver is known before anything is done.
    let old = driver("OLD");
    is_refused(&mut program, &[("LD_LIBRARY_PATH", old.path())], &["driver 570", "nothing was done"]);
    assert_eq!(generations(&folder), [1]);
    ends_well(program);

    // The host may have nothing of it, and then what lies there already would not come back.
    for (limit, words) in [
        ("0", ["generation 1 is whole, and it goes on, since its memory cannot leave: ", "nothing of it can leave"]),
        (
            "10MiB",
            [
                "generation 1 is whole, and it is resumed, since the rest of it cannot leave: ",
                "of the pool are mapped still",
            ],
        ),
    ] {
        let (_around, folder) = store();
        let mut program = checkpointed("1x1GiB").machine().env("GPUPOOL_HOST_LIMIT", limit).start(None);
        let block: u64 = program.ask("block 20480 5000").parse().unwrap();
        let small: u64 = program.ask("block 6144 7000").parse().unwrap();
        let asked = format!("checkpoint --process {} {}", program.pid(), folder.display());
        let ended = gpupool(&program, none.path(), &asked, &[]);
        let said = lines(&ended.stderr);
        assert!(ended.status.code() == Some(1) && said.len() == 1, "{ended:?}");
        assert!(words.iter().all(|word| said[0].contains(word)), "{said:?}");
        verifies(&folder);
        assert_eq!(program.ask(&format!("look {block} 20480")), "5000 0");
        assert_eq!(program.ask(&format!("look {small} 6144")), "7000 0");
        ends_well(program);
    }
}

#[test]
fn with_process_what_cannot_go_together_is_refused_in_one_line_and_nothing_is_written() {
    let (_around, folder) = store();
    let none = path(None);
    let mut program = checkpointed("1x1GiB").machine().start(None);
    at_work(&mut program, 1);
    let pid = program.pid();
    for (more, code, words) in [
        (format!("{pid} FOLDER --every 10min"), 2, "--every goes on while the program does"),
        (format!("{pid} 4711 FOLDER"), 2, "--process takes one process"),
        (format!("--job {pid} FOLDER"), 2, "--process takes one process"),
        (format!("--node 0/2 {pid} FOLDER"), 2, "--process takes one process"),
    ] {
        let asked = format!("checkpoint --process {}", more.replace("FOLDER", &folder.display().to_string()));
        let ended = gpupool(&program, none.path(), &asked, &[]);
        let said = lines(&ended.stderr);
        assert!(ended.status.code() == Some(code) && said.len() == 1 && said[0].contains(words), "{more}: {ended:?}");
    }
    // One that never comes to rest, and one that is suspended, are as they were.
    program.ask("spin");
    let asked = format!("checkpoint --process {pid} {} --wait 1s", folder.display());
    let ended = gpupool(&program, none.path(), &asked, &[]);
    assert!(lines(&ended.stderr)[0].contains("did not come to rest in time: "), "{ended:?}");
    program.ask("release");
    goes_on(&mut program);
    succeeds(&gpupool(&program, none.path(), &format!("suspend {pid}"), &[]));
    let ended = gpupool(&program, none.path(), &asked, &[]);
    let said = lines(&ended.stderr);
    assert!(
        ended.status.code() == Some(1) && said.len() == 1 && said[0].contains("it is suspended; resume it first"),
        "{ended:?}"
    );
    succeeds(&gpupool(&program, none.path(), &format!("resume {pid}"), &[]));
    assert_eq!(generations(&folder), [0; 0]);
    goes_on(&mut program);
    ends_well(program);
}

/// From the first to the last one that it needs.
#[test]
fn with_process_whichever_call_of_the_driver_fails_the_program_goes_on_and_the_older_image_is_there() {
    let (_around, folder) = store();
    let none = path(None);
    let mut program = checkpointed("1x1GiB").machine().start(None);
    let block: u64 = program.ask("block 10240 5000").parse().unwrap();
    let pid = program.pid();
    let asked = format!("checkpoint --json --process --keep 2 {pid} {} --wait 2s", folder.display());
    let (mut left, mut failed) = (0, 0);
    for number in 1.. {
        let code = [999, 2, 801][number % 3];
        let before: usize = program.ask(&format!("fault {number} {code}")).parse().unwrap();
        let ended = gpupool(&program, none.path(), &asked, &[]);
        let said = String::from_utf8_lossy(&ended.stdout).into_owned();
        let told: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{number}: {ended:?}"));
        let calls = program.ask("calls").parse::<usize>().unwrap() - before;
        program.ask("fault 0 0");
        if ended.status.success() {
            left += 1;
            let back = gpupool(&program, none.path(), &format!("resume {pid}"), &[]);
            assert!(back.status.success(), "{number}: {back:?}");
        } else {
            failed += 1;
            assert!(!ended.stderr.is_empty() || told["error"].is_string(), "{number}: {ended:?}");
            // What cannot come back either is there still, and comes back once that is mended.
            if page_of(&program.session(), pid).unwrap().levels.suspended > 0 {
                assert!(
                    gpupool(&program, none.path(), &format!("resume {pid}"), &[]).status.success(),
                    "{number}: {ended:?}"
                );
            }
        }
        assert_eq!(program.ask(&format!("look {block} 10240")), "5000 0", "{number}: {told}");
        if !generations(&folder).is_empty() {
            assert!(stored(&folder, block, 10240 << 10).iter().zip(5000..).all(|(word, wanted)| *word == wanted));
        }
        if calls < number {
            break;
        }
    }
    assert!(left > 0 && failed > 3, "{left} left, and {failed} did not");
    verifies(&folder);
    at_work(&mut program, 1);
    goes_on(&mut program);
    ends_well(program);
}

#[test]
fn with_process_a_command_that_is_killed_while_the_image_is_written_leaves_a_program_that_goes_on() {
    let (_around, folder) = store();
    let session = session();
    let mut program = checkpointed("1x1GiB").machine().start(Some(session.path()));
    let block: u64 = program.ask("block 204800 5000").parse().unwrap();
    at_work(&mut program, 1);
    let mut command = Command::new(artifact_folder().join("gpupool"));
    let environment = std::fs::read(format!("/proc/{}/environ", program.pid())).unwrap();
    let variables = environment.split(|byte| *byte == 0).filter_map(|pair| {
        let (name, value) = std::str::from_utf8(pair).ok()?.split_once('=')?;
        (name.starts_with("SIMCUDA_") || name == "LD_LIBRARY_PATH").then(|| (name.to_owned(), value.to_owned()))
    });
    command.envs(variables).env("XDG_RUNTIME_DIR", session.path()).env_remove("LD_PRELOAD");
    command.args(["checkpoint", "--process", "--wait", "60s", &program.pid().to_string()]).arg(&folder);
    let mut command = command.spawn().unwrap();
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let writers = eventually("the writing", || harness::held_writers(&program, (processors / 2).clamp(2, 8)));
    command.kill().unwrap();
    command.wait().unwrap();
    drop(writers);
    // What was begun is finished, and nobody waits for the rest.
    eventually("the image", || (generations(&folder) == [1]).then_some(()));
    goes_on(&mut program);
    verifies(&folder);
    assert_eq!(program.ask(&format!("look {block} 204800")), "5000 0");
    ends_well(program);
}

#[test]
fn with_process_a_suspended_program_has_nothing_on_a_gpu_and_comes_back() {
    let (_around, folder) = store();
    let mut program = checkpointed("2x1GiB").machine().start(None);
    let session = program.session();
    let block: u64 = program.ask("block 20480 5000").parse().unwrap();
    let mut witness = witness(&mut program);
    let mut used = || -> u64 { witness.ask("used").parse().unwrap() };
    let before = used();
    let pid = program.pid();
    for to in [&folder.display().to_string(), "host", "host"] {
        let ended = super::gpupool(&program, &session, &format!("suspend --process --to {to} {pid}"));
        let said = format!("{}{}", String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
        assert!(ended.status.success() && said.contains("has nothing on the GPUs"), "{said}");
        assert_eq!(used(), 0, "{said}");
        let ended = super::gpupool(&program, &session, &format!("resume {pid}"));
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        assert_eq!(program.ask(&format!("look {block} 20480")), "5000 0");
        assert!(used() >= 20 * MIB);
    }
    // What the program made itself goes with it.
    at_work(&mut program, 1);
    for to in ["host", &folder.display().to_string(), "host"] {
        let ended = super::gpupool(&program, &session, &format!("suspend --process --to {to} {pid}"));
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        assert_eq!(used(), 0);
        let ended = super::gpupool(&program, &session, &format!("resume {pid}"));
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        goes_on(&mut program);
    }
    // What would not come back is not taken away: memory of the program's own on the host, mapped or not.
    assert_eq!(program.ask("on-host 4"), "made");
    for to in ["host", &folder.display().to_string()] {
        let ended = super::gpupool(&program, &session, &format!("suspend --process --to {to} {pid}"));
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(
            !ended.status.success() && said.contains("4.0 MiB that it made by cuMemCreate are on the host"),
            "{said}"
        );
        goes_on(&mut program);
    }
    assert_eq!(program.ask("released"), "released");
    // Nor memory on peers, which is known before anybody is asked.
    let ended = super::gpupool(&program, &session, &format!("suspend --process --to peers {pid}"));
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.code() == Some(2) && said.contains("--process needs --to host or --to DIR"), "{said}");
    assert_eq!(program.ask(&format!("look {block} 20480")), "5000 0", "it runs");
    assert!(used() >= before);
    goes_on(&mut program);
    ends_well(program);
}

/// None of its calls of the driver returns before it is resumed, so it makes none for whoever asks.
#[test]
fn with_process_a_suspended_program_answers_every_command() {
    let (_around, folder) = store();
    let none = path(None);
    let mut program = checkpointed("2x1GiB").machine().nvml().start(None);
    let session = program.session();
    let pid = program.pid();
    let block: u64 = program.ask("block 20480 5000").parse().unwrap();
    let on_gpu = move || -> Option<u64> {
        let places = page_of(&session, pid)?.levels.places.rows;
        Some(places.iter().filter(|place| place.is_gpu() && place.number == 0).map(|place| place.held).sum())
    };
    let before = eventually("a page", || on_gpu().filter(|bytes| *bytes >= 20 * MIB));
    let asked = |words: &str| gpupool(&program, none.path(), words, &[]);
    let is = |words: &str| lines(&asked(words).stdout).concat();
    succeeds(&asked(&format!("suspend --process --to host {pid}")));
    let ended = asked(&format!("checkpoint {pid} {}", folder.display()));
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(
        (ended.status.code(), said.trim_end()),
        (Some(1), &*format!("gpupool: process {pid}: it is suspended; resume it first"))
    );
    assert!(!folder.exists(), "no folder is made for it");
    // Nothing of it is there, not even its context.
    let ended = asked("drain 0");
    let said = succeeds(&ended);
    assert!(said.len() == 1 && said[0].contains("is drained: nothing is left there"), "{said:?}");
    for gpu in ["0", "1"] {
        let said = succeeds(&asked(&format!("undrain {gpu}")));
        let whole = format!(
            "did not come back: the program is suspended whole (gpupool suspend --process); what it has is placed when it is resumed (gpupool resume {pid})"
        );
        assert!(said.len() == 3 && said[1].contains(&whole), "{said:?}");
    }
    // It has heard all of that, and hears what comes next.
    for setting in ["limit=0:64MiB", "limit=0:900MiB", "priority=3"] {
        let said = is(&format!("set {pid} {setting}"));
        assert!(said.contains(setting.split_once('=').unwrap().1), "{setting}: {said}");
    }
    // What it has comes to where it may lie then.
    succeeds(&asked("drain 0"));
    let ended = asked(&format!("resume {pid}"));
    assert!(ended.status.success(), "{ended:?}");
    eventually("memory elsewhere", || (on_gpu()? == 0).then_some(()));
    let said = is("drain 0");
    assert!(said.contains("did not leave") && said.contains("a context"), "its context is back: {said}");
    let said = is("undrain 0");
    assert!(said.contains("came back"), "{said}");
    eventually("memory at home", || (on_gpu()? >= before).then_some(()));
    succeeds(&asked(&format!("suspend --process --to host {pid}")));
    succeeds(&asked("drain 0"));
    succeeds(&asked("undrain 0"));
    succeeds(&asked(&format!("resume {pid}")));
    eventually("memory at home", || (on_gpu()? >= before).then_some(()));
    assert_eq!(program.ask(&format!("look {block} 20480")), "5000 0");
    ends_well(program);
}
