//! The agent's thread and the metrics page: what a running process tells of itself, and what becomes of that when it forks,
//! ends, is killed or closes what it did not open.

use gpupool_metrics::{Counter, Life, Snapshot};
use harness::{Output, Run, Running, artifact_folder, eventually, folder_of_pages};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn agent() -> Run {
    Run::program("agent").sim("2x1GiB").shim()
}

/// Every page there that can be read, with what its process is doing.
fn pages(session: &Path) -> Vec<(Life, Snapshot)> {
    harness::pages(session).into_iter().map(|told| (told.process.identity.life(), told)).collect()
}

fn files(session: &Path) -> usize {
    fs::read_dir(session.join("gpupool")).map_or(0, Iterator::count)
}

fn page_of(session: &Path, pid: u32) -> Option<Snapshot> {
    pages(session).into_iter().map(|(_, told)| told).find(|told| told.process.identity.pid == pid)
}

/// The page of a running program, once it tells of so many live bytes.
#[track_caller]
fn with_live(program: &Running, bytes: u64) -> Snapshot {
    let look = || page_of(&program.session(), program.pid()).filter(|told| told.levels.live_bytes == bytes);
    eventually(&format!("{bytes} live bytes on the page"), look)
}

#[test]
fn the_page_says_what_the_program_is_told_of_itself() {
    let mut program =
        agent().env("LOCAL_RANK", "1").env("LOCAL_WORLD_SIZE", "4").env("GPUPOOL_DEVICES", "0,1").start(None);
    program.ask("init");
    assert_eq!(files(&program.session()), 0, "nothing was allocated");
    for size in [64, 1100, 200] {
        program.ask(&format!("allocate {size}"));
    }
    program.ask("free");
    program.ask("pin 8");
    let told = eventually("pinned memory on the page", || {
        let told = page_of(&program.session(), program.pid())?;
        // Places in the program are written at other moments than what is held.
        let is_written = told.sites.rows.iter().any(|site| site.live == 1164 * MIB);
        (is_written && told.levels.pinned.requested == 8 * MIB && told.levels.live_bytes == 1164 * MIB).then_some(told)
    });
    let held = |on_host| {
        let there = told.levels.places.rows.iter().filter(|place| place.on_host == on_host);
        there.map(|place| place.held).sum::<u64>()
    };
    let levels = &told.levels;
    let numbers = [levels.live_blocks, levels.live_bytes, held(false), held(true), told.counter(Counter::Allocations)];
    assert_eq!(numbers.map(|number| number.to_string()).join(" "), program.ask("statistics"));
    assert_eq!(told.counter(Counter::AllocatedBytes), 1364 * MIB);
    assert_eq!((told.counter(Counter::Frees), told.counter(Counter::PassedOn)), (1, 0));
    assert!(told.counter(Counter::SpilledBytes) > 0, "{told:?}");
    assert_eq!((levels.mode.as_str(), levels.gpus.rows.len()), ("pool", 2));
    assert!(levels.gpus.rows.iter().all(|gpu| !gpu.name.is_empty() && gpu.uuid != [0; 16]), "{:?}", levels.gpus);
    assert!(levels.pinned.pinned >= 8 * MIB && levels.pinned.limit > 0, "{:?}", levels.pinned);
    let [device, pinned] = &told.sites.rows[..] else { panic!("{:?}", told.sites) };
    assert_eq!((device.memory.as_str(), device.live, device.blocks), ("device", 1164 * MIB, 2));
    assert_eq!((pinned.memory.as_str(), pinned.live, pinned.blocks, pinned.total), ("pinned", 8 * MIB, 1, 8 * MIB));
    let lent: u64 = told.levels.loans.rows.iter().filter(|loan| !loan.on_host).map(|loan| loan.bytes).sum();
    assert_eq!((lent > 0, lent), (true, levels.residence.on_peers), "{:?}", told.levels.loans);
    let [context] = &told.contexts.rows[..] else { panic!("{:?}", told.contexts) };
    assert_eq!(
        (context.device, context.kind.as_str(), context.call.as_str()),
        (0, "primary", "cuDevicePrimaryCtxRetain")
    );
    let process = &told.process;
    assert_eq!((process.name.as_str(), process.rank, process.world), ("agent", Some(1), Some(4)));
    assert!(process.command.ends_with("/agent"), "{process:?}");
    let (status, folder) = program.end();
    assert!(status.success());
    assert_eq!(files(&folder.path().join("session")), 0, "the page goes with its process");
}

/// Whether a limit is charged for it or not: what a program like JAX has is all of this kind.
#[test]
fn memory_that_the_program_makes_itself_is_on_the_page() {
    for (name, value) in [("GPUPOOL_LIMIT", "1GiB"), ("GPUPOOL_LOG", "warn")] {
        let mut program = agent().env(name, value).start(None);
        program.ask("init");
        program.ask("make 64");
        let with_own = |program: &Running, bytes: u64| {
            let look = || {
                let rows = page_of(&program.session(), program.pid())?.levels.places.rows;
                (rows.iter().map(|place| place.own).sum::<u64>() == bytes).then_some(())
            };
            eventually(&format!("{bytes} bytes of its own on the page, {name}"), look);
        };
        with_own(&program, 64 * MIB);
        program.ask("drop");
        with_own(&program, 0);
    }
}

#[test]
fn one_thread_that_takes_no_signal_and_sleeps_while_nothing_changes() {
    let mut program = agent().start(None);
    program.ask("init");
    assert_eq!(program.ask("threads"), "threads:");
    program.ask("allocate 64");
    // The thread gives itself its name as it begins.
    eventually("one thread of that name", || (program.ask("threads") == "threads: gpupool").then_some(()));
    // All but the two that the C library keeps for itself, SIGKILL and SIGSTOP.
    assert_eq!(program.ask("signals"), "fffffffe7ffbfeff");
    with_live(&program, 64 * MIB);
    // It has looked twice more and found nothing, and then it does not wake any more. Looked at until two looks two seconds
    // apart are the same, which a thread that wakes every second never is.
    let begun = Instant::now();
    loop {
        let before = program.ask("switches");
        std::thread::sleep(Duration::from_millis(2200));
        if program.ask("switches") == before {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "it wakes although nothing changes");
    }
    program.ask("free");
    with_live(&program, 0);
}

#[test]
fn a_process_without_allocations_has_neither_thread_nor_folder() {
    let mut program = agent().start(None);
    assert_eq!(program.ask("threads"), "threads:");
    program.ask("init");
    assert_eq!(program.ask("threads"), "threads:");
    assert!(!program.session().join("gpupool").exists());
    // The thread is there for freed memory, too, where there is a pool that keeps any.
    for (name, value) in [("GPUPOOL_IDLE", "off"), ("GPUPOOL_MODE", "managed"), ("GPUPOOL_MODE", "pool")] {
        let mut off = agent().env("GPUPOOL_METRICS", "off").env(name, value).start(None);
        off.ask("init");
        off.ask("allocate 64");
        let threads = if value == "pool" { "threads: gpupool" } else { "threads:" };
        eventually(threads, || (off.ask("threads") == threads).then_some(()));
        assert!(!off.session().join("gpupool").exists());
    }
}

#[test]
fn pinned_memory_and_mode_managed_begin_it_too() {
    for (mode, line) in [("pool", "pin 2"), ("managed", "allocate 64")] {
        let mut program = agent().env("GPUPOOL_MODE", mode).start(None);
        program.ask("init");
        program.ask(line);
        let look = || page_of(&program.session(), program.pid()).filter(|told| told.levels.updated > 0);
        assert_eq!(eventually("a page", look).levels.mode, mode);
        assert_eq!(program.ask("threads"), "threads: gpupool");
    }
}

#[test]
fn findings_are_on_the_page_while_the_program_runs() {
    let mut program = agent().start(None);
    program.ask("init");
    program.ask("allocate 64");
    assert_eq!(program.ask("twice"), "registered twice: 712");
    let told = eventually("a finding on the page", || {
        page_of(&program.session(), program.pid()).filter(|told| !told.findings.rows.is_empty())
    });
    let [finding] = &told.findings.rows[..] else { panic!("{:?}", told.findings) };
    assert_eq!(finding.code, "GP016");
    assert!(finding.text.contains("registered") && finding.at >= told.process.created, "{finding:?}");
}

#[test]
fn the_child_of_a_fork_leaves_its_parents_page_alone() {
    let mut program = agent().start(None);
    program.ask("init");
    program.ask("allocate 64");
    with_live(&program, 64 * MIB);
    program.ask("fork");
    assert_eq!(pages(&program.session()).len(), 1, "the child has none");
    program.ask("allocate 32");
    with_live(&program, 96 * MIB);
    assert_eq!(program.ask("release"), "child ended with 0");
    program.ask("free");
    with_live(&program, 64 * MIB);
}

#[test]
fn a_child_from_before_the_first_allocation_has_its_own() {
    let mut program = agent().start(None);
    let child = program.ask("fork-cuda");
    let child: u32 = child.strip_prefix("child ").and_then(|pid| pid.parse().ok()).unwrap_or_else(|| panic!("{child}"));
    let session = program.session();
    eventually("the child's page", || page_of(&session, child).filter(|told| told.levels.live_bytes == 4 * MIB));
    assert!(page_of(&session, program.pid()).is_none(), "the parent has allocated nothing");
    program.ask("init");
    program.ask("allocate 64");
    with_live(&program, 64 * MIB);
    assert_eq!(program.ask("release"), "child ended with 0");
    assert!(page_of(&session, child).is_none());
    with_live(&program, 64 * MIB);
}

#[test]
fn after_exec_the_old_page_counts_no_more_and_a_new_one_replaces_it() {
    let mut program = agent().start(None);
    program.ask("init");
    program.ask("allocate 64");
    with_live(&program, 64 * MIB);
    let executable = format!("/proc/{}/exe", program.pid());
    let path = fs::read_link(&executable).unwrap_or_else(|e| panic!("{e}"));
    program.tell(&format!("become {}", path.display()));
    assert_eq!(program.ask("threads"), "threads:");
    let [(life, _)] = &pages(&program.session())[..] else { panic!("one page, of the old program") };
    assert_eq!(*life, Life::Replaced);
    assert_eq!(listed(&program.session(), program.pid()), None);
    program.ask("init");
    program.ask("allocate 32");
    with_live(&program, 32 * MIB);
    let [(life, _)] = &pages(&program.session())[..] else { panic!("one page") };
    assert_eq!(*life, Life::Running);
}

#[test]
fn a_program_that_closes_every_descriptor_keeps_its_page_and_its_files() {
    let mut program = agent().start(None);
    program.ask("init");
    program.ask("allocate 64");
    with_live(&program, 64 * MIB);
    assert_eq!(program.ask("close 600"), "opened 600");
    program.ask("allocate 32");
    with_live(&program, 96 * MIB);
    assert_eq!(program.ask("kept"), "kept 600");
    let (status, folder) = program.end();
    assert!(status.success());
    assert_eq!(files(&folder.path().join("session")), 0);
}

#[test]
fn what_a_killed_process_leaves_is_removed_by_the_next() {
    let mut first = agent().start(None);
    first.ask("init");
    first.ask("allocate 64");
    with_live(&first, 64 * MIB);
    let session = first.session();
    first.signal(libc::SIGKILL);
    let (_, folder) = first.end();
    let [(life, told)] = &pages(&session)[..] else { panic!("the page stays") };
    assert_eq!((*life, told.levels.live_bytes), (Life::Gone, 64 * MIB), "what it said last");
    let mut second = agent().start(Some(&session));
    second.ask("init");
    second.ask("allocate 32");
    assert_eq!(files(&session), 1, "the first one's page is gone, and the second one's is there");
    let killed = second.pid();
    second.signal(libc::SIGKILL);
    second.end();
    assert_eq!(files(&session), 1);
    assert_eq!(listed(&session, killed), None);
    assert_eq!(files(&session), 0, "a reader removes it, too");
    drop(folder);
}

#[test]
fn a_stopped_program_is_seen_like_any_other() {
    let mut program = agent().start(None);
    program.ask("init");
    program.ask("allocate 64");
    with_live(&program, 64 * MIB);
    program.signal(libc::SIGSTOP);
    let session = program.session();
    let stopped = || pages(&session).into_iter().find(|(life, _)| *life == Life::Stopped);
    assert_eq!(eventually("a stopped program", stopped).1.levels.live_bytes, 64 * MIB);
    assert!(ps(&session, &[]).stdout.contains("stopped"));
    program.signal(libc::SIGCONT);
    program.ask("free");
    with_live(&program, 0);
}

/// The line of `gpupool ps` about this process, if there is one. Others may run on this machine meanwhile.
fn listed(session: &Path, pid: u32) -> Option<String> {
    let said = ps(session, &[]).stdout;
    said.lines().find(|line| line.split_whitespace().next() == Some(&pid.to_string())).map(str::to_owned)
}

/// `gpupool ps`, which for root looks at the folders of everybody on this machine.
fn ps(session: &Path, arguments: &[&str]) -> Said {
    let mut command = Command::new(artifact_folder().join("gpupool"));
    let said = command.arg("ps").args(arguments).env("XDG_RUNTIME_DIR", session).env("NO_COLOR", "1").output();
    let said = said.unwrap_or_else(|e| panic!("gpupool: {e}"));
    assert!(said.status.success(), "{said:?}");
    Said {
        stdout: String::from_utf8_lossy(&said.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&said.stderr).into_owned(),
    }
}

struct Said {
    stdout: String,
    stderr: String,
}

#[test]
fn ps_lists_processes_with_their_memory_by_place() {
    let mut program = agent().env("GPUPOOL_HOST_LIMIT", "0").start(None);
    program.ask("init");
    program.ask("allocate 64");
    program.ask("allocate 1000");
    with_live(&program, 1064 * MIB);
    let text = ps(&program.session(), &[]).stdout;
    let pid = program.pid();
    let row = listed(&program.session(), pid).unwrap_or_else(|| panic!("{text}"));
    let words: Vec<&str> = row.split_whitespace().collect();
    assert_eq!((words[1], words[2], words.last()), ("running", "pool", Some(&"agent")), "{text}");
    assert!(text.contains("gpu0 ") && text.contains("gpu1 "), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&ps(&program.session(), &["--json"]).stdout).unwrap_or_else(|e| panic!("{e}"));
    let rows = json.as_array().unwrap_or_else(|| panic!("{json}"));
    let row = rows.iter().find(|row| row["process"]["identity"]["pid"] == pid).unwrap_or_else(|| panic!("{json}"));
    assert_eq!(row["state"], "running");
    assert_eq!(row["levels"]["live_bytes"], 1064 * MIB);
    assert_eq!(row["levels"]["places"]["rows"][0]["place"], "gpu0");
    assert_eq!(row["counters"]["allocations"], 2);
    // Pages that cannot be read are named, and the others listed.
    let newer = program.session().join(format!("gpupool/{pid}-1.page"));
    let mut bytes = fs::read(
        fs::read_dir(program.session().join("gpupool"))
            .into_iter()
            .flatten()
            .flatten()
            .next()
            .map_or_else(|| panic!("no page"), |entry| entry.path()),
    )
    .unwrap_or_else(|e| panic!("{e}"));
    bytes[8] = 9;
    fs::write(&newer, &bytes).unwrap_or_else(|e| panic!("{e}"));
    let said = ps(&program.session(), &[]);
    assert!(said.stderr.contains("its layout has version 9, and this gpupool reads version"), "{}", said.stderr);
    assert!(said.stdout.contains("running"), "{}", said.stdout);
}

/// To say "none" would be a lie about what another version of gpupool serves.
#[test]
fn ps_says_that_a_process_runs_under_another_version() {
    let mut program = agent().start(None);
    program.ask("init");
    program.ask("allocate 64");
    with_live(&program, 64 * MIB);
    let page = fs::read_dir(program.session().join("gpupool")).into_iter().flatten().flatten().next();
    let page = page.map_or_else(|| panic!("no page"), |entry| entry.path());
    let page = fs::OpenOptions::new().write(true).open(page).unwrap_or_else(|e| panic!("{e}"));
    page.write_at(&[9], 8).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(listed(&program.session(), program.pid()), None);
    let said = ps(&program.session(), &[]).stdout;
    assert!(said.contains("under another version of gpupool"), "{said}");
    assert!(!said.contains("no process runs under gpupool"), "{said}");
    let asked = program.gpupool(&format!("set {} priority=60", program.pid()));
    let why = String::from_utf8_lossy(&asked.stderr).into_owned();
    let begins = format!("gpupool: process {} cannot be asked, and nothing was done: ", program.pid());
    assert!(why.starts_with(&begins) && why.contains("use the gpupool that is as new as the program's"), "{why}");
}

/// A user looks for a program that runs, and finds none.
#[test]
fn the_setting_that_leaves_a_program_without_a_page_is_named_where_it_is_looked_for() {
    let with = |name: &str, value: &str| {
        let mut program = agent().env(name, value).start(None);
        program.ask("init");
        program.ask("allocate 64");
        program
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let off = with("GPUPOOL_METRICS", "off");
    let pid = off.pid();
    for arguments in ["ps", "top --once"] {
        let said = text(&off.gpupool(arguments).stdout);
        assert!(said.contains("no process runs under gpupool") && said.contains("GPUPOOL_METRICS=off"), "{said}");
    }
    for arguments in
        ["set PID priority=60", "suspend PID", "resume PID", "checkpoint PID /nowhere", "suspend --job PID"]
    {
        let asked = off.gpupool(&arguments.replace("PID", &pid.to_string()));
        let begins =
            format!("gpupool: process {pid} runs with GPUPOOL_METRICS=off: it has no page, so no command can ask it");
        assert!(asked.status.code() == Some(2) && text(&asked.stderr).starts_with(&begins), "{}", text(&asked.stderr));
    }
    let passing = with("GPUPOOL_MODE", "off");
    let why = text(&passing.gpupool(&format!("set {} priority=60", passing.pid())).stderr);
    assert!(why.contains("runs with GPUPOOL_MODE=off, so gpupool has no part in it"), "{why}");
    // The test itself is no such program.
    let why = text(&off.gpupool(&format!("set {} priority=60", std::process::id())).stderr);
    assert!(why.contains("is not known to run under gpupool here") && why.contains("GPUPOOL_METRICS=off"), "{why}");
    let why = text(&off.gpupool(&format!("set {} priority=60", i32::MAX)).stderr);
    assert!(why.contains("there is no process 2147483647 here"), "{why}");
}

/// A run to its end under a session folder that is made beforehand; its log.
fn in_session(prepare: impl FnOnce(&Path)) -> (Output, tempfile::TempDir) {
    let session = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    fs::set_permissions(session.path(), Permissions::from_mode(0o700)).unwrap_or_else(|e| panic!("{e}"));
    prepare(&session.path().join("gpupool"));
    let run = Run::program("steps").args("a:64 c:0 f:0").sim("1x256MiB").shim().log();
    (run.env("XDG_RUNTIME_DIR", session.path()).go(), session)
}

fn said_of_metrics(output: &Output) -> String {
    let about = output.records.iter().filter(|record| record.message.starts_with("metrics: "));
    about.map(|record| record.message.as_str()).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_folder_that_is_not_the_users_alone_is_refused_and_the_program_runs() {
    let (linked, session) = in_session(|path| symlink("/", path).unwrap_or_else(|e| panic!("{e}")));
    let named = session.path().join("gpupool").display().to_string();
    linked.succeeds().says("block 0: 0 wrong");
    assert!(said_of_metrics(&linked).contains(&format!("{named}: it is a link or no folder")), "{linked:?}");
    let (open, session) = in_session(|path| {
        fs::create_dir(path)
            .and_then(|()| fs::set_permissions(path, Permissions::from_mode(0o777)))
            .unwrap_or_else(|e| panic!("{e}"));
    });
    open.succeeds().says("block 0: 0 wrong");
    assert!(said_of_metrics(&open).contains("gpupool: others may write to it (mode 777)"), "{open:?}");
    assert_eq!(files(session.path()), 0);
    let mut is_root = true;
    let (theirs, session) = in_session(|path| {
        fs::create_dir(path).unwrap_or_else(|e| panic!("{e}"));
        fs::set_permissions(path, Permissions::from_mode(0o700)).unwrap_or_else(|e| panic!("{e}"));
        is_root = chown(path, Some(65534), None).is_ok();
    });
    theirs.succeeds().says("block 0: 0 wrong");
    if is_root {
        assert!(said_of_metrics(&theirs).contains("gpupool: it is of user 65534"), "{theirs:?}");
        assert_eq!(files(session.path()), 0);
    } else {
        println!("only root can make others' folders: not checked");
    }
}

/// Nobody finds the program then, which is not to be found out by a command that finds nobody.
#[test]
fn a_program_that_has_no_folder_for_its_page_says_so_and_so_does_the_doctor() {
    if !Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success()) {
        println!("only root can mount what nobody may write to: not checked");
        return;
    }
    // What is under test may lie below the folders around these.
    let mounts = "for folder in /run/gpupool /tmp/gpupool-$(id -u); do mkdir -p -m 700 $folder && mount -t tmpfs -o mode=777 none $folder || exit 1; done; ";
    let at = |command: &str, session: &str| {
        let run = Run::command("unshare").args("--mount bash -c").arg(format!("{mounts}{command}"));
        run.arg(harness::program("steps")).env("XDG_RUNTIME_DIR", session).sim("1x256MiB")
    };
    let run = "exec \"$0\" a:64 c:0 f:0";
    let told = at(run, "/nowhere").shim().env("GPUPOOL_LOG", "warn").go();
    told.succeeds().says("block 0: 0 wrong").warns("metrics: no page, so no command finds this process");
    told.warns("/run/gpupool: others may write to it (mode 777)");
    let unwanted = at(run, "/nowhere").shim().env("GPUPOOL_LOG", "warn").env("GPUPOOL_METRICS", "off").go();
    unwanted.succeeds();
    assert!(!unwanted.stderr.contains("no page"), "{}", unwanted.stderr);
    let doctor = format!("exec {} doctor --json", artifact_folder().join("gpupool").display());
    let checks_of = |session: &str| {
        let told: Value = serde_json::from_str(&at(&doctor, session).go().stdout).unwrap_or_else(|e| panic!("{e}"));
        let checks = told["checks"].as_array().cloned().unwrap_or_default();
        checks.into_iter().find(|check| check["name"] == "page")
    };
    let check = checks_of("/nowhere").unwrap_or_else(|| panic!("no line of the page"));
    assert_eq!(check["state"], "finding");
    assert!(check["what"].as_str().is_some_and(|what| what.contains("others may write to it (mode 777)")), "{check}");
    let session = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    fs::set_permissions(session.path(), Permissions::from_mode(0o700)).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(checks_of(&session.path().display().to_string()), None);
}

#[test]
fn a_full_disk_costs_the_program_nothing() {
    // The limit on the size of files, below a page's: what does not fit is not begun, and no signal comes.
    let run = Run::program("surroundings").args("fsize-kill 20000").sim("2x1GiB").shim();
    run.env("GPUPOOL_LOG", "info").go().succeeds().says("failed: 0").warns("which RLIMIT_FSIZE forbids");
    // A disk of 32 KiB, where this user may mount one.
    let session = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let mounted = Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success());
    if !mounted {
        println!("only root can mount a small disk: not checked");
        return;
    }
    let command = "mount -t tmpfs -o size=32k,mode=700 none \"$XDG_RUNTIME_DIR\" && exec \"$0\" a:64 c:0 f:0";
    let run = Run::command("unshare").args("--mount bash -c").arg(command).arg(harness::program("steps"));
    let told = run.env("XDG_RUNTIME_DIR", session.path()).sim("1x256MiB").shim().log().go();
    told.succeeds().says("block 0: 0 wrong");
    assert!(said_of_metrics(&told).contains("taking room for it failed: No space left on device"), "{told:?}");
}

#[test]
fn a_page_that_somebody_cuts_does_not_end_the_program() {
    let mut program = agent().start(None);
    program.ask("init");
    program.ask("allocate 64");
    with_live(&program, 64 * MIB);
    let folder = folder_of_pages(&program.session()).unwrap_or_else(|| panic!("no folder"));
    let path = folder.path().join(&folder.pages()[0].name);
    fs::File::options().write(true).open(path).and_then(|file| file.set_len(0)).unwrap_or_else(|e| panic!("{e}"));
    program.ask("allocate 32");
    let begun = program.ask("switches");
    // The thread has looked since, and the program lives.
    eventually("another look", || (program_switches(&program) != begun).then_some(()));
    assert_eq!(program.ask("statistics").split(' ').next(), Some("2"));
    let (status, _) = program.end();
    assert!(status.success(), "{status}: the end is told on the page, too");
}

fn program_switches(program: &Running) -> String {
    let tasks = fs::read_dir(format!("/proc/{}/task", program.pid())).into_iter().flatten().flatten();
    let other = tasks.map(|task| task.path()).find(|task| !task.ends_with(program.pid().to_string()));
    let status = other.and_then(|task| fs::read_to_string(task.join("status")).ok()).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:\t"));
    line.unwrap_or_default().to_owned()
}

#[test]
fn a_hundred_processes_at_once_leave_nothing() {
    let session = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    fs::set_permissions(session.path(), Permissions::from_mode(0o700)).unwrap_or_else(|e| panic!("{e}"));
    let mut programs: Vec<Running> = (0..100).map(|_| agent().start(Some(session.path()))).collect();
    for program in &mut programs {
        program.tell("init");
        program.tell("allocate 2");
    }
    let told = eventually("a hundred pages", || {
        let pages = pages(session.path());
        pages
            .iter()
            .all(|(_, told)| told.levels.live_bytes == 2 * MIB)
            .then_some(pages)
            .filter(|pages| pages.len() == 100)
    });
    assert!(told.iter().all(|(life, _)| *life == Life::Running));
    // One in four is killed, and cleaned up after by whoever comes next.
    for (index, program) in programs.into_iter().enumerate() {
        if index % 4 == 0 {
            program.signal(libc::SIGKILL);
        }
        program.end();
    }
    assert_eq!(files(session.path()), 25);
    let (_, _) = {
        let mut last = agent().start(Some(session.path()));
        last.ask("init");
        last.ask("allocate 2");
        last.end()
    };
    assert_eq!(files(session.path()), 0);
}

/// Names are the program's: whatever is in them breaks no line, and however many there are, the page holds the largest.
#[test]
fn names_of_blocks_are_on_the_page_and_in_ps_with_where_they_lie() {
    let mut program = agent().env("GPUPOOL_HOST_LIMIT", "0").start(None);
    program.ask("init");
    for (mib, name) in [(512, "weights"), (900, "k\u{1b}[31mv")] {
        program.ask(&format!("allocate {mib}"));
        assert_eq!(program.ask(&format!("label {name}")), "label: 0");
    }
    let far = |told: &Snapshot| told.levels.residence.on_peers;
    let told = eventually("names on the page", || {
        // What lies where is written by itself, and may come a moment later.
        page_of(&program.session(), program.pid()).filter(|told| told.labels.rows.len() == 2 && far(told) > 0)
    });
    let names: Vec<_> = told.labels.rows.iter().map(|label| (label.name.as_str(), label.blocks, label.bytes)).collect();
    assert_eq!(names, [("k\u{1b}[31mv", 1, 900 * MIB), ("weights", 1, 512 * MIB)], "the largest first");
    let [kv, weights] = &told.labels.rows[..] else { panic!("{:?}", told.labels) };
    assert_eq!((weights.near, weights.on_peers, weights.on_host), (512 * MIB, 0, 0));
    assert_eq!((kv.near + kv.on_peers, kv.on_host, kv.on_peers > 0), (900 * MIB, 0, true));
    assert_eq!((far(&told), told.levels.residence.on_host), (kv.on_peers, 0));
    let text = ps(&program.session(), &[]).stdout;
    assert!(text.contains("labels: k\u{fffd}[31mv 900.0 MiB") && text.contains("weights 512.0 MiB"), "{text}");
    assert!(text.contains("far: ") && text.contains(" on other GPUs"), "{text}");
    for number in 0..3 {
        program.ask("allocate 1");
        program.ask(&format!("label small{number}"));
    }
    let told = eventually("more names", || {
        page_of(&program.session(), program.pid()).filter(|told| told.labels.rows.len() == 5)
    });
    assert_eq!(told.labels.more, 0);
}
