//! `gpupool suspend` and `gpupool resume`: a program's memory leaves its GPUs while it runs, and comes back.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

#[path = "suspend/again.rs"]
mod again;
#[path = "suspend/disk.rs"]
mod disk;
#[path = "suspend/ends.rs"]
mod ends;
#[path = "suspend/faults.rs"]
mod faults;
#[path = "suspend/host.rs"]
mod host;
#[path = "suspend/jobs.rs"]
mod jobs;
#[path = "suspend/progress.rs"]
mod progress;
#[path = "suspend/questions.rs"]
mod questions;
#[path = "suspend/rest.rs"]
mod rest;
#[path = "suspend/shared.rs"]
mod shared;
#[path = "suspend/signals.rs"]
mod signals;

use gpupool_metrics::Snapshot;
use gpupool_wire::Socket;
use gpupool_wire::control::{ROOM, Reply, Request, Target};
use gpupool_wire::socket::Failure;
use harness::{Run, Running, artifact_folder, at_work, eventually, goes_on, page_of};
use serde_json::Value;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output as Ended};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn suspended(gpus: &str) -> Run {
    let run = Run::program("suspended").sim(gpus).env("SIMCUDA_STRICT", "on").env("GPUPOOL_RESERVE", "16MiB");
    run.env("GPUPOOL_HOST_LIMIT", "4GiB").report().shim()
}

fn gpupool(program: &Running, arguments: &str) -> Ended {
    program.gpupool(arguments)
}

/// The command's one line about this program.
#[track_caller]
fn told(program: &Running, arguments: &str) -> Value {
    let ended = gpupool(program, &format!("{arguments} --json {}", program.pid()));
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    let all: Value = serde_json::from_str(&text)
        .unwrap_or_else(|_| panic!("{arguments}: {text}{}", String::from_utf8_lossy(&ended.stderr)));
    assert_eq!(ended.status.success(), all[0].get("error").is_none(), "{all}");
    all[0].clone()
}

/// What the program's page says.
fn page(program: &Running) -> Option<Snapshot> {
    page_of(&program.session(), program.pid())
}

/// Bytes that it has at places of this kind, the pool's and its own.
fn at(page: &Snapshot, on_host: bool) -> u64 {
    let here = page.levels.places.rows.iter().filter(|place| !place.on_disk && place.on_host == on_host);
    here.map(|place| place.held + place.own).sum()
}

/// It ends, having found every byte as it had left it, and the simulated driver no breach of the rules.
#[track_caller]
fn ends_well(mut program: Running) {
    assert_eq!(program.ask("end"), "0 wrong");
    let (status, folder) = program.end();
    assert!(status.success(), "{status}");
    let report = std::fs::read_to_string(folder.path().join("report")).unwrap_or_default();
    let report: Value = serde_json::from_str(&report).unwrap_or_default();
    assert_eq!(report["violations"], serde_json::json!([]), "{report}");
}

#[test]
fn memory_leaves_the_gpus_of_a_program_at_work_and_comes_back_and_nothing_is_lost() {
    let mut program = suspended("2x1GiB").start(None);
    at_work(&mut program, 4);
    for _ in 0..3 {
        let left = told(&program, "suspend");
        assert!(left["bytes"].as_u64() >= Some(4 * 40 * MIB) && left["stayed_bytes"] == 0, "{left}");
        let rounds = program.ask("rounds");
        let empty = |page: &Snapshot| page.levels.suspended > 0 && at(page, false) == 0;
        // The page says that it is suspended by the time that the command has ended; what a call frees that was under way goes a moment later.
        assert!(self::page(&program).is_some_and(|page| page.levels.suspended > 0));
        let page = eventually("empty GPUs", || page(&program).filter(empty));
        assert!(at(&page, true) >= 4 * 40 * MIB, "{page:?}");
        assert_eq!(program.ask("rounds"), rounds, "nobody does anything");
        let back = told(&program, "resume");
        assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&left["bytes"], &Value::from(0)));
        // What was there is free, and goes home later.
        let none_on_host =
            |page: &Snapshot| page.levels.places.rows.iter().all(|place| !place.on_host || place.used == 0);
        let is_back = |page: &Snapshot| page.levels.suspended == 0 && none_on_host(page);
        assert!(self::page(&program).is_some_and(|page| is_back(&page)), "everything back");
        goes_on(&mut program);
    }
    ends_well(program);
}

/// How often: `GPUPOOL_SUSPENSIONS` says otherwise, as 200 before a release.
fn times() -> u32 {
    std::env::var("GPUPOOL_SUSPENSIONS").ok().and_then(|times| times.parse().ok()).unwrap_or(8)
}

#[test]
fn eight_threads_that_submit_all_the_time_are_suspended_again_and_again_and_nothing_is_lost() {
    let mut program = suspended("2x1GiB").start(None);
    at_work(&mut program, 8);
    for time in 0..times() {
        let to = ["suspend --to host", "suspend"][time as usize % 2];
        let left = told(&program, to);
        // One that asked for memory when it was stopped may have freed a block just before.
        assert!(left["bytes"].as_u64() >= Some(7 * 40 * MIB) && left["stayed_bytes"] == 0, "{to}, {time}: {left}");
        let back = told(&program, "resume");
        assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&left["bytes"], &Value::from(0)), "{to}, {time}");
        assert_eq!(program.ask("wrong"), "0", "{to}, {time}");
        goes_on(&mut program);
    }
    ends_well(program);
}

/// Nobody but the commands has a word with it in between.
#[test]
fn a_program_that_never_calls_cuda_again_leaves_comes_back_and_has_an_image() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 64");
    for time in 0..3 {
        for to in ["host".to_owned(), folder.path().join("suspended").display().to_string()] {
            let left = told(&program, &format!("suspend --to {to}"));
            assert!(left["bytes"].as_u64() >= Some(64 * MIB) && left["stayed_bytes"] == 0, "{left}");
            eventually("an empty GPU", || page(&program).filter(|page| at(page, false) == 0));
            let back = told(&program, "resume");
            assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&left["bytes"], &Value::from(0)));
        }
        let images = folder.path().join("images");
        let image = gpupool(&program, &format!("checkpoint {} {}", program.pid(), images.display()));
        assert!(image.status.success(), "{}", String::from_utf8_lossy(&image.stderr));
        let verified = gpupool(&program, &format!("store verify {}", images.display()));
        let said = String::from_utf8_lossy(&verified.stdout).into_owned();
        assert!(verified.status.success() && said.contains(&format!("generation {}", time + 1)), "{said}");
    }
    program.ask("check");
    eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
    ends_well(program);
}

/// The command's complaint about this program, which is why it failed.
#[track_caller]
fn refused(program: &Running, arguments: &str) -> String {
    told(program, arguments)["error"].as_str().unwrap_or_else(|| panic!("{arguments} was not refused")).to_owned()
}

#[test]
fn memory_goes_to_gpus_that_the_program_only_borrows_from_while_they_have_room() {
    let mut program = suspended("2x1GiB").env("SIMCUDA_GPUS", "4x1GiB").start(None);
    // GPU by GPU, so that one thread works on one of four.
    at_work(&mut program, 1);
    let left = told(&program, "suspend --to peers");
    assert!(left["bytes"].as_u64() >= Some(40 * MIB) && left["stayed_bytes"] == 0, "{left}");
    let held = |page: &Snapshot, gpu: u32| {
        let place = page.levels.places.rows.iter().find(|place| !place.on_host && place.number == gpu);
        place.map_or(0, |place| place.held + place.own)
    };
    // What a free that was under way then gave back goes a moment later.
    let page = eventually("an empty GPU 0", || {
        page(&program).filter(|page| page.levels.suspended > 0 && (held(page, 0), at(page, true)) == (0, 0))
    });
    assert!(held(&page, 1) + held(&page, 2) + held(&page, 3) >= 40 * MIB, "{page:?}");
    told(&program, "resume");
    goes_on(&mut program);
    ends_well(program);
}

/// It is told what there is not, and what to do.
#[test]
fn a_program_that_no_gpu_lends_to_is_told_so_that_is_to_go_to_others() {
    for (gpus, variables, expected) in [
        (
            "2x1GiB",
            &[("LOCAL_WORLD_SIZE", "2"), ("LOCAL_RANK", "0")][..],
            "set PID devices=0,1 has GPU 0 and 1 lend to it",
        ),
        ("1x1GiB", &[][..], "--to host has the host take it"),
    ] {
        let mut program = variables.iter().fold(suspended(gpus), |run, (name, value)| run.env(name, value)).start(None);
        at_work(&mut program, 1);
        let ended = program.gpupool(&format!("suspend --to peers {}", program.pid()));
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(!ended.status.success() && said.contains(expected) && said.lines().count() == 1, "{said}");
        goes_on(&mut program);
        ends_well(program);
    }
}

/// More than leaves in one step, so that one is prepared while another one is copied.
#[test]
fn what_leaves_and_comes_back_in_several_steps_at_once_is_as_it_was() {
    let mut program = suspended("2x2GiB").start(None);
    at_work(&mut program, 1);
    program.ask("allocate 1030");
    eventually("the allocation", || (program.ask("allocated") == "yes").then_some(()));
    program.ask("keep 96");
    let left = told(&program, "suspend --to peers");
    assert!(left["bytes"].as_u64() >= Some((1030 + 96 + 40) * MIB) && left["stayed_bytes"] == 0, "{left}");
    let back = told(&program, "resume");
    assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&left["bytes"], &Value::from(0)));
    program.ask("check");
    eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
    goes_on(&mut program);
    program.ask("drop");
    ends_well(program);
}

#[test]
fn what_has_nowhere_to_go_stays_and_is_told_and_the_rest_leaves() {
    let mut program = suspended("1x1GiB").env("GPUPOOL_HOST_LIMIT", "12MiB").log().start(None);
    at_work(&mut program, 1);
    let left = told(&program, "suspend");
    let [bytes, stayed] = ["bytes", "stayed_bytes"].map(|key| left[key].as_u64().unwrap());
    assert!(bytes > 0 && stayed >= 20 * MIB, "{left}");
    told(&program, "resume");
    goes_on(&mut program);
    assert_eq!(program.ask("end"), "0 wrong");
    let log = program.log();
    let (_, _folder) = program.end();
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("GP022") && log.contains("host0 lacks"), "{log}");
    assert!(log.contains("program.suspend") && log.contains("program.resume"), "{log}");
}

#[test]
fn a_program_that_never_comes_to_rest_is_left_alone_in_time() {
    let mut program = suspended("1x1GiB").start(None);
    at_work(&mut program, 1);
    program.ask("spin");
    let asked = Instant::now();
    let why = refused(&program, "suspend --wait 1s");
    assert!(why.contains("did not come to rest in time: "), "{why}");
    // However loaded the machine is.
    assert!((1..60).contains(&asked.elapsed().as_secs()), "{:?}", asked.elapsed());
    program.ask("allocate 64");
    eventually("the allocation", || (program.ask("allocated") == "yes").then_some(()));
    program.ask("release");
    goes_on(&mut program);
    assert_eq!(told(&program, "suspend")["stayed_bytes"], 0);
    told(&program, "resume");
    assert_eq!(program.ask("end"), "0 wrong");
}

#[test]
fn what_asks_for_memory_or_a_signal_waits_or_wakes_and_the_end_waits_for_nobody() {
    let mut program = suspended("2x1GiB").start(None);
    at_work(&mut program, 2);
    told(&program, "suspend");
    program.ask("allocate 64");
    assert_eq!(program.ask("fork"), "child ended with 7");
    let rounds = program.ask("rounds");
    let why = refused(&program, "suspend");
    assert!(why.contains("suspended already"), "{why}");
    assert_eq!(
        (program.ask("allocated"), program.ask("rounds")),
        ("no".to_owned(), rounds.clone()),
        "it is suspended still"
    );
    program.ask("create 8");
    assert_eq!((program.ask("allocated"), program.ask("rounds")), ("no".to_owned(), rounds));
    // Somebody at the keyboard.
    program.ask("signal");
    goes_on(&mut program);
    eventually("the allocation", || (program.ask("allocated") == "yes").then_some(()));
    assert_eq!(program.ask("handled"), "1");
    // Until it has been told, whoever resumes it hears that this was done already.
    eventually("a page that says so", || page(&program).filter(|page| page.levels.suspended == 0));
    let why = refused(&program, "resume");
    assert!(why.contains("it is not suspended"), "{why}");

    told(&program, "suspend");
    program.tell("exit");
    let (status, _folder) = program.end();
    assert_eq!(status.code(), Some(5), "{status}");
    for signal in [libc::SIGTERM, libc::SIGKILL] {
        let mut program = suspended("2x1GiB").start(None);
        at_work(&mut program, 2);
        told(&program, "suspend");
        program.signal(signal);
        let (status, _folder) = program.end();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(signal), "{status}");
    }
}

#[test]
fn who_cannot_be_asked_is_named_in_one_line() {
    let mut program = suspended("1x1GiB").start(None);
    let complaint = |program: &Running, arguments: &str| {
        let ended = gpupool(program, arguments);
        assert!(!ended.status.success());
        String::from_utf8(ended.stderr).unwrap()
    };
    let none = complaint(&program, &format!("suspend {}", program.pid()));
    assert_eq!(none.lines().count(), 1, "{none}");
    assert!(
        none.contains(&format!("process {} runs under gpupool and has no page", program.pid()))
            && none.contains("it has allocated no GPU memory yet"),
        "{none}"
    );
    at_work(&mut program, 1);
    program.signal(libc::SIGSTOP);
    eventually("a stopped process", || {
        let ended = gpupool(&program, &format!("resume {}", program.pid()));
        String::from_utf8(ended.stderr).unwrap().contains("is stopped (SIGSTOP)").then_some(())
    });
    // What was not done, and what to do.
    let pid = program.pid();
    for arguments in [format!("suspend {pid}"), format!("set {pid} priority=60"), format!("checkpoint {pid} /nowhere")]
    {
        let text = complaint(&program, &arguments);
        assert_eq!(
            text,
            format!(
                "gpupool: process {pid}: nothing was done: it is stopped (SIGSTOP) and answers nobody; kill -CONT {pid}, then again\n"
            )
        );
    }
    program.signal(libc::SIGCONT);
    goes_on(&mut program);
    let folder = program.session().join("gpupool");
    let calls = |folder: &std::path::Path| {
        let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().ends_with(".call")).count()
    };
    told(&program, "suspend");
    told(&program, "resume");
    assert_eq!(calls(&folder), 0, "nothing is left behind");
}

/// Two at once, and one that is killed while it asks, which leaves its file behind.
#[test]
fn several_commands_at_once_end_with_one_answer_each() {
    let mut program = suspended("2x1GiB").start(None);
    at_work(&mut program, 2);
    for _ in 0..5 {
        let all: Vec<Ended> = std::thread::scope(|scope| {
            let ask = |arguments: &'static str| {
                let program = &program;
                scope.spawn(move || gpupool(program, &format!("{arguments} {}", program.pid())))
            };
            let asked = ["suspend", "suspend", "resume", "suspend"].map(ask);
            asked.into_iter().map(|asked| asked.join().unwrap()).collect()
        });
        for ended in all.iter().filter(|ended| !ended.status.success()) {
            let text = String::from_utf8_lossy(&ended.stderr);
            let known = [
                "suspended already",
                "is not suspended",
                "others were asking it all the time",
                "another command is at it (gpupool ",
            ];
            assert!(text.lines().count() == 1 && known.iter().any(|known| text.contains(known)), "{text}");
        }
        let page = program.session().join("gpupool");
        let names = std::fs::read_dir(page).unwrap().map(|entry| entry.unwrap().path());
        let page = names.into_iter().find(|path| path.extension().is_some_and(|kind| kind == "page")).unwrap();
        // What one leaves that was killed: a socket that nobody listens at.
        let left = page.with_extension("call");
        drop(std::os::unix::net::UnixListener::bind(&left).unwrap());
        let ended = gpupool(&program, &format!("resume {}", program.pid()));
        let text = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success() || text.contains("is not suspended"), "{text}");
        assert!(!left.exists());
        goes_on(&mut program);
    }
    ends_well(program);
}

/// One of them stands in the middle of it until the other one waits for its turn.
#[test]
fn who_asks_for_a_resume_that_is_under_way_hears_that_the_program_is_resumed() {
    for json in ["", " --json"] {
        let resume = |program: &Running| {
            let mut command = Command::new(artifact_folder().join("gpupool"));
            command.args(format!("resume{json} {}", program.pid()).split(' '));
            command.env("XDG_RUNTIME_DIR", program.session()).env_remove("LD_PRELOAD");
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
        };
        let mut program = suspended("1x1GiB").start(None);
        program.ask("keep 64");
        told(&program, "suspend --to host");
        assert_eq!(program.ask("hold cuMemCreate"), "it will");
        let first = resume(&program);
        eventually("a call that stands", || (program.ask("stands") == "yes").then_some(()));
        let second = resume(&program);
        // It has looked which processes there are, and has this one's page open to ring at it.
        let rings = |pid: u32| {
            let open = |entry: std::io::Result<std::fs::DirEntry>| {
                let entry = entry.ok()?;
                let is_page = std::fs::read_link(entry.path()).ok()?.extension().is_some_and(|kind| kind == "page");
                let number = entry.file_name();
                let about = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", number.to_str()?)).ok()?;
                let flags = about.lines().find_map(|line| line.strip_prefix("flags:"))?.trim().to_owned();
                (is_page && flags.ends_with('2')).then_some(())
            };
            std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.find_map(open)
        };
        eventually("a command that waits for its turn", || rings(second.id()));
        program.ask("let");
        let [first, second] = [first, second].map(|command| command.wait_with_output().unwrap());
        assert!(first.status.success(), "{first:?}");
        assert!(second.status.success() && second.stderr.is_empty(), "{second:?}");
        let said = String::from_utf8_lossy(&second.stdout).into_owned();
        match json {
            "" => assert!(said.contains("is resumed already") && said.lines().count() == 1, "{said}"),
            _ => {
                let told: Value = serde_json::from_str(&said).unwrap();
                assert!(told[0]["error"].is_null() && told[0]["bytes"] == 0, "{told}");
            }
        }
        // One that nobody had suspended is none that was resumed.
        let why = refused(&program, "resume");
        assert!(why.contains("it is not suspended"), "{why}");
        ends_well(program);
    }
}

/// For root alone, who can be anybody. All users that a user namespace does not know have this number, so nobody knows who asks.
#[test]
fn a_user_whom_the_program_does_not_hear_is_told_so_in_one_line() {
    const NOBODY: u32 = 65534;
    // SAFETY: the call has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let session = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(session.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let as_nobody = ["--reuid", "65534", "--clear-groups"];
    let mut run = Run::command("setpriv").sim("1x1GiB").env("TMPDIR", session.path());
    for word in as_nobody.iter().map(std::ffi::OsString::from).chain([harness::program("suspended").into()]) {
        run = run.arg(word);
    }
    let mut program = run.shim().start(Some(session.path()));
    program.ask("keep 64");
    let asked = |arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(as_nobody).arg(artifact_folder().join("gpupool")).args(arguments).arg(program.pid().to_string());
        command.env("XDG_RUNTIME_DIR", session.path()).env_remove("LD_PRELOAD").output().unwrap()
    };
    for arguments in [&["suspend"][..], &["suspend", "--to", "host"], &["resume"]] {
        let ended = asked(arguments);
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(!ended.status.success() && said.lines().count() == 1, "{said}");
        assert!(said.contains("user 65534") && said.contains("as root"), "{said}");
    }
}

/// For root alone, who can be anybody. The folder of pages is open to all, as nobody but its owner can have made it.
#[test]
fn another_user_is_heard_by_no_program_and_root_is() {
    // SAFETY: the call has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let session = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(session.path(), Some(1001), Some(1001)).unwrap();
    let mut run = Run::command("setpriv").sim("1x1GiB").env("TMPDIR", session.path());
    for word in ["--reuid", "1001", "--clear-groups"]
        .map(std::ffi::OsString::from)
        .into_iter()
        .chain([harness::program("suspended").into()])
    {
        run = run.arg(word);
    }
    let mut program = run.shim().start(Some(session.path()));
    program.ask("keep 64");
    let pages = session.path().join("gpupool");
    let mode = |mode: u32| {
        for path in [session.path(), &pages] {
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        }
    };
    let asked = |uid: &str, arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", uid, "--clear-groups"]).arg(artifact_folder().join("gpupool")).args(arguments);
        command.arg(program.pid().to_string()).env("XDG_RUNTIME_DIR", session.path()).env_remove("LD_PRELOAD");
        command.output().unwrap()
    };
    mode(0o777);
    for word in ["suspend", "resume"] {
        let ended = asked("1002", &[word]);
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(
            !ended.status.success()
                && said.lines().count() == 1
                && said.contains("is another user's: only that one and root may ask it"),
            "{said}"
        );
    }
    mode(0o700);
    for arguments in [&["suspend", "--to", "host"][..], &["resume"]] {
        let ended = asked("0", arguments);
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }
}

/// What the program answers to one that asks it by itself and as this user, without a command which would look whether that is any use.
fn answer_to(user: u32, program: &Running, request: &Request) -> Option<Reply> {
    let folder = program.session().join("gpupool");
    let mut names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let page = names.find(|path| path.extension().is_some_and(|kind| kind == "page")).unwrap();
    let name = page.with_extension("call");
    let page = std::fs::OpenOptions::new().read(true).write(true).open(&page).unwrap();
    let (kind, path) = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, name.as_os_str().as_bytes());
    let mut address = libc::sockaddr_un { sun_family: libc::AF_UNIX as u16, sun_path: [0; 108] };
    assert!(path.len() < address.sun_path.len(), "{}", name.display());
    address.sun_path.iter_mut().zip(path).for_each(|(to, from)| *to = *from as libc::c_char);
    // SAFETY: the call takes numbers, and nobody else has what it gives; the address is a local of the length that is told.
    let listener = unsafe {
        let socket = OwnedFd::from_raw_fd(libc::socket(libc::AF_UNIX, kind, 0));
        let length = size_of_val(&address) as libc::socklen_t;
        assert_eq!(libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length), 0);
        socket
    };
    // Whoever connects is told who has begun to listen, and nobody can before. The system's own call is for this thread, and the C library's for all.
    std::thread::scope(|scope| {
        let begun = scope.spawn(|| {
            // SAFETY: both calls take numbers, and this thread does nothing else.
            unsafe { (libc::syscall(libc::SYS_setresuid, -1, user, -1), libc::listen(listener.as_raw_fd(), 4)) }
        });
        assert_eq!(begun.join().unwrap(), (0, 0));
    });
    let listener: Socket<OwnedFd> = Socket::adopt(listener).unwrap();
    let socket = eventually("a connection", || {
        gpupool_metrics::ring(page.as_fd()).unwrap();
        listener.accept().ok()
    });
    std::fs::remove_file(name).unwrap();
    // It may have ended the connection already.
    let none: [OwnedFd; 0] = [];
    let _ = socket.send(&request.encode(), &none);
    let mut buffer = [0; ROOM];
    loop {
        let received = socket.receive_by(&mut buffer, Instant::now() + Duration::from_secs(60));
        let bytes = match received {
            Ok(received) => received.bytes,
            Err(Failure::TimedOut) => panic!("it neither answers nor ends the connection"),
            Err(_) => 0,
        };
        match (bytes > 0).then(|| Reply::decode(&buffer[..bytes]).unwrap()) {
            Some(Reply::Progress { .. }) => {}
            answer => return answer,
        }
    }
}

/// For root alone, who can be anybody. A command asks nobody who would not hear it, so this is none.
#[test]
fn a_program_looks_itself_whose_process_asks_it() {
    // SAFETY: the call has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let mut program = suspended("1x1GiB").log().start(None);
    program.ask("keep 64");
    let ask = Request::Suspend { target: Target::Host, patience: 60_000, together: false };
    for request in [&ask, &Request::Set(vec!["GPUPOOL_PRIORITY=1".to_owned()]), &Request::Resume] {
        assert_eq!(answer_to(1002, &program, request), None);
    }
    let log = std::fs::read_to_string(program.log()).unwrap();
    // It was rung for more often than it was asked, perhaps.
    assert!(log.matches("a request to this process was not heard: it is of user 1002").count() >= 3, "{log}");
    let page = page(&program).unwrap();
    assert_eq!((page.levels.suspended, at(&page, false)), (0, 64 * MIB), "{page:?}");
    // The same way leads there, for who may.
    assert!(matches!(answer_to(0, &program, &ask), Some(Reply::Done { moved, stayed: 0, .. }) if moved == 64 * MIB));
    assert!(matches!(answer_to(0, &program, &Request::Resume), Some(Reply::Done { moved, .. }) if moved == 64 * MIB));
    ends_well(program);
}

/// Each gets to the processes in an order of its own, and may have to wait for the other.
#[test]
fn of_two_commands_that_suspend_the_same_programs_at_once_one_does() {
    let session = tempfile::tempdir().unwrap();
    let mut programs = [(); 2].map(|()| {
        let mut program = suspended("2x1GiB").start(Some(session.path()));
        at_work(&mut program, 1);
        program
    });
    let [one, other] = [&programs[0], &programs[1]].map(Running::pid);
    let gpupool = |arguments: String| {
        let mut command = Command::new(artifact_folder().join("gpupool"));
        command.args(arguments.split(' ')).env("XDG_RUNTIME_DIR", session.path()).env_remove("LD_PRELOAD");
        command.output().unwrap()
    };
    for _ in 0..8 {
        let all: Vec<Ended> = std::thread::scope(|scope| {
            let asked = [[one, other], [one, other], [other, one]].map(|[first, next]| {
                let gpupool = &gpupool;
                scope.spawn(move || gpupool(format!("suspend {first} {next}")))
            });
            asked.into_iter().map(|asked| asked.join().unwrap()).collect()
        });
        let texts: Vec<String> = all.iter().map(|ended| String::from_utf8_lossy(&ended.stderr).into_owned()).collect();
        assert_eq!(all.iter().filter(|ended| ended.status.success()).count(), 1, "{texts:?}");
        assert!(gpupool(format!("resume {one} {other}")).status.success());
        programs.iter_mut().for_each(goes_on);
    }
    programs.into_iter().for_each(ends_well);
}

/// The second process of `ranks`, whose page is beside the first one's.
fn other_rank(program: &mut Running) -> u32 {
    let pid = program.ask("other").parse().unwrap_or(0);
    let is_listed = |program: &Running| {
        let rows: Value = serde_json::from_slice(&gpupool(program, "ps --json").stdout).ok()?;
        rows.as_array()?.iter().any(|row| row["process"]["identity"]["pid"] == pid).then_some(())
    };
    eventually("both ranks", || is_listed(program));
    pid
}

#[track_caller]
fn both_go_on(program: &mut Running) {
    let steps = |program: &mut Running| -> u64 { program.ask("steps").parse().unwrap_or(0) };
    let before = steps(program);
    eventually("further steps", || (steps(program) > before + 8).then_some(()));
}

#[test]
fn programs_whose_kernels_wait_for_each_other_are_stopped_at_the_same_moment() {
    let run = Run::program("ranks").sim("2x1GiB").env("SIMCUDA_STRICT", "on").env("GPUPOOL_RESERVE", "16MiB").shim();
    let mut program = run.start(None);
    let other = other_rank(&mut program);
    both_go_on(&mut program);
    for _ in 0..4 {
        let pids = format!("{} {other}", program.pid());
        let ended = gpupool(&program, &format!("suspend --json --wait 30s --to host {pids}"));
        let told: Value = serde_json::from_slice(&ended.stdout).unwrap();
        assert!(ended.status.success(), "{told}{}", String::from_utf8_lossy(&ended.stderr));
        for row in told.as_array().unwrap() {
            assert!(row["bytes"].as_u64() >= Some(8 * MIB), "{told}");
        }
        let steps = program.ask("steps");
        let back = gpupool(&program, &format!("resume {pids}"));
        assert!(back.status.success(), "{}", String::from_utf8_lossy(&back.stderr));
        assert_ne!(steps, "0");
        both_go_on(&mut program);
    }
    assert_eq!(program.ask("end"), "0 wrong");
    assert!(program.end().0.success());
}

#[test]
fn of_programs_that_are_suspended_together_all_run_on_where_one_cannot_be() {
    let run = || Run::program("ranks").sim("2x1GiB").env("GPUPOOL_RESERVE", "16MiB").shim();
    let mut program = run().start(None);
    let other = other_rank(&mut program);
    both_go_on(&mut program);
    // Suspended alone, one keeps the other from coming to rest; that one is refused in time, and nothing else is changed.
    let alone = told(&program, "suspend --to host");
    assert!(alone["bytes"].as_u64() >= Some(8 * MIB), "{alone}");
    let ended = gpupool(&program, &format!("suspend --wait 2s --to host {} {other}", program.pid()));
    let text = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(!ended.status.success() && text.contains("it is suspended already"), "{text}");
    assert!(
        text.contains(&format!("process {other}: it is left as it was, since all are suspended together or none")),
        "{text}"
    );
    // Alone neither: it is in a call that holds its context, and asking it does not wait for that.
    let ended = gpupool(&program, &format!("suspend --wait 1s {other}"));
    let text = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(!ended.status.success() && text.contains("it did not come to rest in time"), "{text}");
    told(&program, "resume");
    both_go_on(&mut program);
    assert_eq!(program.ask("end"), "0 wrong");
    assert!(program.end().0.success());
}

#[test]
fn a_program_that_uses_no_gpu_for_long_is_suspended_and_resumed_by_its_next_call() {
    let mut program = suspended("1x1GiB").env("GPUPOOL_IDLE_SUSPEND", "1s").start(None);
    program.ask("allocate 64");
    eventually("the allocation", || (program.ask("allocated") == "yes").then_some(()));
    for _ in 0..2 {
        let dormant = |page: &Snapshot| page.levels.suspended > 0 && at(page, false) == 0 && at(page, true) >= 64 * MIB;
        eventually("an empty GPU", || page(&program).filter(dormant));
        program.ask("allocate 8");
        eventually("the next allocation", || (program.ask("allocated") == "yes").then_some(()));
        eventually("a GPU in use", || {
            page(&program).filter(|page| page.levels.suspended == 0 && at(page, false) >= 64 * MIB)
        });
    }
    at_work(&mut program, 1);
    ends_well(program);
}

/// Its memory takes longer to come back than the program may rest.
#[test]
fn the_call_that_resumes_a_program_goes_on_however_long_that_takes() {
    let folder = tempfile::tempdir().unwrap();
    let mut program =
        suspended("1x1GiB").env("GPUPOOL_IDLE_SUSPEND", format!("1s:{}", folder.path().display())).log().start(None);
    program.ask("allocate 900");
    eventually("the allocation", || (program.ask("allocated") == "yes").then_some(()));
    let count = |program: &Running, event: &str| {
        std::fs::read_to_string(program.log()).unwrap().matches(&format!("\"event\":\"program.{event}\"")).count()
    };
    for times in 1..4 {
        eventually("a suspension", || (count(&program, "suspend") == times).then_some(()));
        program.ask("allocate 8");
        eventually("the next allocation", || (program.ask("allocated") == "yes").then_some(()));
        // The call goes on before that is in the log.
        eventually("a resume", || (count(&program, "resume") >= times).then_some(()));
        assert_eq!(count(&program, "resume"), times, "once for each call");
    }
    ends_well(program);
}

/// A command that waits for the program's work, told to do so for long.
fn waiting(program: &Running) -> std::process::Child {
    let command = artifact_folder().join("gpupool");
    let mut command = Command::new(command);
    command.args(["suspend", "--wait", "10min", &program.pid().to_string()]).env("XDG_RUNTIME_DIR", program.session());
    command.env_remove("LD_PRELOAD").stderr(std::process::Stdio::piped());
    let child = command.spawn().unwrap_or_else(|error| panic!("gpupool suspend: {error}"));
    let call = |path: &std::path::Path| path.extension().is_some_and(|kind| kind == "call");
    let has_call = || {
        let folder = std::fs::read_dir(program.session().join("gpupool")).ok()?;
        Some(folder.flatten().any(|entry| call(&entry.path())))
    };
    // It listens until the process has connected. Where that was quicker than this look, it waits already.
    eventually("a process that hears it", || (has_call() == Some(false)).then_some(()));
    child
}

#[test]
fn a_request_ends_with_whoever_made_it_and_a_stopped_process_is_waited_for_by_nobody() {
    let mut program = suspended("1x1GiB").start(None);
    at_work(&mut program, 1);
    program.ask("spin");
    let mut killed = waiting(&program);
    killed.kill().unwrap();
    killed.wait().unwrap();
    let left = waiting(&program);
    program.signal(libc::SIGSTOP);
    let ended = left.wait_with_output().unwrap();
    program.signal(libc::SIGCONT);
    let text = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(!ended.status.success() && text.lines().count() == 1 && text.contains("SIGSTOP"), "{text}");
    program.ask("release");
    goes_on(&mut program);
    assert_eq!(told(&program, "suspend")["stayed_bytes"], 0);
    told(&program, "resume");
    ends_well(program);
}

#[test]
fn a_program_that_nobody_can_ask_any_more_is_resumed_by_itself() {
    let mut program = suspended("2x1GiB").start(None);
    at_work(&mut program, 2);
    told(&program, "suspend");
    for entry in std::fs::read_dir(program.session().join("gpupool")).unwrap().flatten() {
        std::fs::remove_file(entry.path()).unwrap();
    }
    goes_on(&mut program);
    ends_well(program);

    // Somebody writes over the page, or puts another file in its place.
    for replace in [false, true] {
        let mut program = suspended("2x1GiB").start(None);
        at_work(&mut program, 2);
        told(&program, "suspend");
        let entry = std::fs::read_dir(program.session().join("gpupool")).unwrap().flatten().next().unwrap();
        let garbage = vec![0xa5; entry.metadata().unwrap().len() as usize];
        if replace {
            std::fs::remove_file(entry.path()).unwrap();
        }
        std::fs::write(entry.path(), garbage).unwrap();
        goes_on(&mut program);
        ends_well(program);
    }

    let mut program = suspended("2x1GiB").start(None);
    at_work(&mut program, 2);
    told(&program, "suspend");
    program.tell("leave");
    let (status, _folder) = program.end();
    assert_eq!(status.code(), Some(6), "{status}");
}

/// For root alone: others cannot do that.
#[test]
fn who_has_become_another_user_or_has_another_root_folder_is_named_as_such() {
    if std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap()) != 0 {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (does, words) in [
        ("become 65534".to_owned(), "it acts as user 65534 now (seteuid)"),
        (format!("root {}", folder.path().display()), "its root folder is "),
    ] {
        let mut program = suspended("1x1GiB").start(None);
        at_work(&mut program, 1);
        assert_eq!(program.ask(&does), "done");
        let why = refused(&program, "suspend");
        assert!(why.contains(words), "{why}");
        goes_on(&mut program);
    }
}

#[test]
fn memory_of_its_own_comes_back_where_gpus_do_not_reach_each_other() {
    let mut program = suspended("2x1GiB").env("SIMCUDA_LINK", "none").start(None);
    at_work(&mut program, 2);
    for _ in 0..2 {
        let left = told(&program, "suspend --to host");
        // Where there is no link, what the driver has room for is the driver's (mode spill).
        assert!(left["bytes"].as_u64() >= Some(2 * 8 * MIB) && left["stayed_bytes"] == 0, "{left}");
        assert_eq!(told(&program, "resume")["stayed_bytes"], 0);
        goes_on(&mut program);
    }
    ends_well(program);
}

#[test]
fn what_stream_ordered_pools_keep_unused_goes_and_what_is_in_use_is_told() {
    let mut program = suspended("1x1GiB").log().start(None);
    at_work(&mut program, 1);
    assert_eq!(program.ask("stream 64"), "kept");
    assert!(program.ask("reserved").parse::<u64>().unwrap() >= 64 * MIB);
    let left = told(&program, "suspend --to host");
    let reserved = program.ask("reserved");
    assert!(reserved.parse::<u64>().unwrap() < 64 * MIB, "{reserved}");
    assert_eq!(left["stayed_bytes"].to_string(), reserved, "{left}");
    assert!(std::fs::read_to_string(program.log()).unwrap().contains("stream-ordered pools"));
    told(&program, "resume");
    goes_on(&mut program);
}

#[test]
fn freed_pinned_memory_that_is_kept_goes_back_to_the_system() {
    let mut program = suspended("1x1GiB").env("GPUPOOL_PINNED_IDLE", "1h").log().start(None);
    program.ask("keep 64");
    let pinned = |program: &mut Running| -> u64 { program.ask("pinned").parse().unwrap() };
    let before = pinned(&mut program);
    for to in ["host", "peers", "host"] {
        program.ask("pin 96");
        assert!(pinned(&mut program) >= before + 96 * MIB, "it is kept for the next one");
        let told = told(&program, &format!("suspend --to {to}"));
        assert_eq!(told["error"].is_null(), to == "host", "{told}");
        if to == "host" {
            // What copied it is gone as well.
            assert_eq!(pinned(&mut program), before);
            self::told(&program, "resume");
        }
    }
    let log = std::fs::read_to_string(program.log()).unwrap();
    let returns = log.lines().filter(|line| line.contains("\"pinned.return\"") && line.contains("\"suspend\""));
    assert_eq!(returns.count(), 2, "{log}");
    program.ask("check");
    eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
    ends_well(program);
}

#[test]
fn a_program_with_memory_of_its_own_alone_is_suspended_as_well() {
    let mut program = suspended("1x1GiB").start(None);
    program.ask("create 8");
    eventually("its memory", || (program.ask("allocated") == "yes").then_some(()));
    let left = eventually("a process that is known", || {
        let ended = gpupool(&program, &format!("suspend --json {}", program.pid()));
        serde_json::from_slice::<Value>(&ended.stdout).ok().filter(|told| told[0].get("error").is_none())
    });
    assert_eq!((&left[0]["bytes"], &left[0]["stayed_bytes"]), (&Value::from(8 * MIB), &Value::from(0)));
    let back = told(&program, "resume");
    assert_eq!(back["bytes"], left[0]["bytes"]);
}
