//! GPUs that only lend memory and are kept awake (`GPUPOOL_LENDERS=awake`): what NVML says of their clocks, who holds a context
//! there and for how long, and what the program sees of it.

use gpupool_events::{Event, Level, Reader};
use harness::{Run, Running, artifact_folder, driver_folder_with_nvml, eventually, library};
use std::fs::{self, File};
use std::io::BufReader;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

const AWAKE: &str = "1980";
const ASLEEP: &str = "345";

/// A machine of two GPUs whose processes share one runtime folder, with somebody beside who asks NVML and nothing else.
struct Machine {
    folder: tempfile::TempDir,
    run: Run,
    watcher: Running,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("no temporary folder: {e}"));
        let run = Run::program("agent").sim("2x1GiB").nvml().env("SIMCUDA_MACHINE", folder.path().join("machine"));
        let mut watcher = run.clone().start(None);
        watcher.ask("nvml");
        Self { folder, run, watcher }
    }

    /// The folder of its user's session.
    fn session(&self) -> &Path {
        self.folder.path()
    }

    /// A program that has 256 MiB on its own GPU and the rest on the other one.
    fn lent(&self) -> Run {
        let run = self.run.clone().env("GPUPOOL_LENDERS", "awake").env("GPUPOOL_LIMIT", "0:256MiB");
        run.env("GPUPOOL_HOST_LIMIT", "0").log()
    }

    fn awake(&self) -> Run {
        self.lent().shim()
    }

    fn program(&self, run: Run) -> Running {
        let mut program = run.start(Some(self.session()));
        program.ask("init");
        program
    }

    fn clock(&mut self) -> String {
        self.watcher.ask("clock 1")
    }

    fn on_the_lender(&mut self) -> String {
        self.watcher.ask("on 1")
    }

    #[track_caller]
    fn until_clock(&mut self, clock: &str) {
        eventually(&format!("a clock of {clock} MHz"), || (self.clock() == clock).then_some(()));
    }

    /// What the helper's socket is called in a session.
    fn socket(&self) -> String {
        let entries = fs::read_dir(self.session().join("gpupool")).into_iter().flatten().flatten();
        let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.find(|name| name.starts_with("lenders") && name.ends_with(".sock")).unwrap_or_default()
    }

    /// The files of the helper, which is there as long as they are.
    fn helpers(&self) -> usize {
        let entries = fs::read_dir(self.session().join("gpupool")).into_iter().flatten().flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("lenders")).count()
    }
}

/// The events of a log, and what was warned of.
fn log(folder: &Path) -> (Vec<Event>, Vec<String>) {
    let log = File::open(folder.join("log.jsonl")).unwrap_or_else(|e| panic!("no log: {e}"));
    // The last line of a program that goes on may be half written.
    let records: Vec<_> = Reader::new(BufReader::new(log)).map_while(Result::ok).collect();
    let warned = records.iter().filter(|record| record.level == Level::Warn).map(|record| record.message.clone());
    (records.iter().map(|record| record.event.clone()).collect(), warned.collect())
}

/// Whether a program's log says that a GPU is kept awake for it.
fn noted(program: &Running) -> bool {
    times_noted(program) > 0
}

/// How often it says so: once a connection.
fn times_noted(program: &Running) -> usize {
    let session = program.session();
    let events = log(session.parent().unwrap_or_else(|| panic!("no folder"))).0;
    events.iter().filter(|event| matches!(event, Event::LenderAwake(_))).count()
}

/// Waits for a warning about the setting; what it says.
#[track_caller]
fn warned(program: &Running) -> String {
    let log_of = program.session();
    let folder = log_of.parent().unwrap_or_else(|| panic!("no folder"));
    eventually("a warning", || log(folder).1.into_iter().find(|text| text.contains("GPUPOOL_LENDERS=awake")))
}

/// Ends it, and expects that it was warned about the setting so often and ended well.
#[track_caller]
fn ends_with_warnings(program: Running, count: usize) {
    let (status, folder) = program.end();
    assert!(status.success(), "{status}");
    let warnings = log(folder.path()).1;
    assert_eq!(warnings.iter().filter(|text| text.contains("GPUPOOL_LENDERS")).count(), count, "{warnings:?}");
}

#[test]
fn the_first_spill_wakes_the_lender_and_the_end_of_the_program_lets_it_sleep() {
    let mut machine = Machine::new();
    let mut program = machine.program(machine.awake());
    program.ask("watch");
    program.ask("allocate 64");
    assert_eq!((machine.clock().as_str(), machine.helpers()), (ASLEEP, 0), "nothing lies on it");
    program.ask("allocate 400");
    machine.until_clock(AWAKE);
    assert_eq!(machine.on_the_lender(), "1");
    assert_eq!(program.ask("children"), "0 ended, none to wait for");
    assert_eq!(program.ask("threads"), "threads: gpupool");
    eventually("the program is told", || noted(&program).then_some(()));
    let (status, folder) = program.end();
    assert!(status.success(), "{status}");
    machine.until_clock(ASLEEP);
    eventually("no file of the helper's", || (machine.helpers() == 0).then_some(()));
    let (events, warnings) = log(folder.path());
    let woken = events.iter().filter(|event| matches!(event, Event::LenderAwake(awake) if awake.gpu == 1)).count();
    assert_eq!((woken, warnings), (1, Vec::new()));
}

/// It holds a context there, and runs under nothing.
#[test]
fn a_drain_names_the_helper_as_gpupool_s_own() {
    let mut machine = Machine::new();
    let mut program = machine.program(machine.awake().env("GPUPOOL_HOST_LIMIT", "2GiB"));
    program.ask("allocate 400");
    machine.until_clock(AWAKE);
    let mut command = Command::new(artifact_folder().join("gpupool"));
    command.args(["drain", "--json", "1"]).env("XDG_RUNTIME_DIR", machine.session()).env_remove("LD_PRELOAD");
    command.env("LD_LIBRARY_PATH", driver_folder_with_nvml()).env("SIMCUDA_GPUS", "2x1GiB");
    let drain = command.env("SIMCUDA_MACHINE", machine.folder.path().join("machine")).output();
    let drain = drain.unwrap_or_else(|error| panic!("gpupool drain: {error}"));
    let said = String::from_utf8_lossy(&drain.stdout).into_owned();
    assert!(said.contains("it is the helper of gpupool that keeps this GPU awake (GPUPOOL_LENDERS=awake)"), "{said}");
    assert!(!said.contains("does not run under gpupool"), "{said}");
    assert!(program.end().0.success());
}

#[test]
fn two_programs_have_one_helper_which_outlives_the_one_that_is_killed() {
    let mut machine = Machine::new();
    let mut programs = [machine.program(machine.awake()), machine.program(machine.awake())];
    // Both at once, so that both may start one.
    programs.iter_mut().for_each(|program| program.tell("allocate 64"));
    programs.iter_mut().for_each(|program| program.tell("allocate 350"));
    eventually("both are told", || programs.iter().all(noted).then_some(()));
    assert_eq!((machine.clock().as_str(), machine.on_the_lender().as_str()), (AWAKE, "1"));
    let [first, second] = programs;
    first.signal(libc::SIGKILL);
    first.end();
    // One that comes later is served by the same one.
    let mut third = machine.program(machine.awake());
    third.ask("allocate 64");
    third.ask("allocate 300");
    eventually("the third is told", || noted(&third).then_some(()));
    assert_eq!((machine.clock().as_str(), machine.on_the_lender().as_str()), (AWAKE, "1"));
    second.end();
    third.end();
    machine.until_clock(ASLEEP);
}

/// Users have runtime folders of their own, and so helpers that know nothing of each other.
#[test]
fn a_gpu_that_another_user_s_helper_keeps_awake_costs_no_second_context_and_stays_awake_when_that_one_ends() {
    let mut machine = Machine::new();
    let elsewhere = tempfile::tempdir().unwrap_or_else(|e| panic!("no temporary folder: {e}"));
    let mut first = machine.program(machine.awake());
    let mut second = machine.awake().start(Some(elsewhere.path()));
    second.ask("init");
    for program in [&mut first, &mut second] {
        program.ask("allocate 64");
        program.ask("allocate 300");
        eventually("it is told", || noted(program).then_some(()));
    }
    let sockets = [machine.session(), elsewhere.path()].map(|it| it.join("gpupool").join(machine.socket()));
    assert!(sockets.iter().all(|socket| socket.exists()), "each has a helper: {sockets:?}");
    assert_eq!((machine.clock().as_str(), machine.on_the_lender().as_str()), (AWAKE, "1"));
    first.end();
    eventually("the first one's helper has ended", || (!sockets[0].exists()).then_some(()));
    // The simulated GPU falls asleep at once.
    machine.until_clock(AWAKE);
    assert_eq!(machine.on_the_lender(), "1");
    second.end();
    machine.until_clock(ASLEEP);
}

/// In a user namespace it may be anybody.
#[test]
fn a_program_of_the_user_who_stands_for_all_unknown_ones_is_told_that_nobody_serves_it() {
    const NOBODY: u32 = 65534;
    // SAFETY: the call has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        println!("only root can become another user: not checked");
        return;
    }
    let mut machine = Machine::new();
    // The simulated driver makes its file there.
    let allowed = fs::set_permissions(machine.session(), PermissionsExt::from_mode(0o777));
    allowed.unwrap_or_else(|e| panic!("{e}"));
    let mut program = machine.awake().user(NOBODY).start(None);
    program.ask("init");
    program.ask("allocate 64");
    program.ask("allocate 400");
    let said = warned(&program);
    assert!(said.contains("GPUs that only lend memory stay asleep") && said.contains("of its own user"), "{said}");
    assert!(
        said.contains(&format!("user {NOBODY} stands for every user that this user namespace does not know")),
        "{said}"
    );
    assert_eq!(machine.clock(), ASLEEP);
    ends_with_warnings(program, 1);
}

#[test]
fn without_the_setting_nothing_is_started() {
    let mut machine = Machine::new();
    let mut program = machine.program(machine.awake().env("GPUPOOL_LENDERS", "asleep"));
    let mut awake = machine.program(machine.awake().env("GPUPOOL_LIMIT", "0:512MiB"));
    program.ask("allocate 400");
    // Nor where it is set and nothing lies on another GPU: that one's thread has looked when its page says this.
    awake.ask("allocate 64");
    let page = || fs::read_dir(machine.session().join("gpupool")).into_iter().flatten().count();
    eventually("two pages", || (page() == 2).then_some(()));
    awake.ask("allocate 32");
    for program in [&mut program, &mut awake] {
        let before = program.ask("switches");
        program.ask("free");
        eventually("another look", || (program.ask("switches") != before).then_some(()));
    }
    assert_eq!((machine.clock().as_str(), machine.helpers()), (ASLEEP, 0));
}

#[test]
fn a_forked_child_that_lives_on_keeps_no_gpu_awake() {
    let mut machine = Machine::new();
    let mut program = machine.program(machine.awake());
    program.ask("allocate 400");
    machine.until_clock(AWAKE);
    let child: i32 = program.ask("orphan").parse().unwrap_or_else(|e| panic!("{e}"));
    program.signal(libc::SIGKILL);
    program.end();
    machine.until_clock(ASLEEP);
    // SAFETY: the child waits for this, so the number is its own.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0, "it was there all the time");
}

#[test]
fn a_program_that_closes_every_descriptor_keeps_its_files_and_gets_another_connection() {
    let mut machine = Machine::new();
    let mut program = machine.program(machine.awake());
    program.ask("allocate 400");
    eventually("the program is told", || noted(&program).then_some(()));
    assert_eq!(program.ask("close 600"), "opened 600");
    // Between the two connections the GPU may fall asleep, and it may be too short for anybody to see.
    program.ask("allocate 32");
    eventually("the program is told again", || (times_noted(&program) == 2).then_some(()));
    assert_eq!((machine.clock().as_str(), machine.on_the_lender().as_str()), (AWAKE, "1"));
    assert_eq!(program.ask("kept"), "kept 600");
    ends_with_warnings(program, 0);
}

#[test]
fn another_program_by_exec_is_another_program() {
    let mut machine = Machine::new();
    let mut program = machine.program(machine.awake());
    program.ask("allocate 400");
    machine.until_clock(AWAKE);
    let path = fs::read_link(format!("/proc/{}/exe", program.pid())).unwrap_or_else(|e| panic!("{e}"));
    program.tell(&format!("become {}", path.display()));
    machine.until_clock(ASLEEP);
    assert_eq!(program.ask("threads"), "threads:");
}

#[test]
fn a_helper_that_serves_others_yet_is_no_process_that_outlived_the_program() {
    let mut machine = Machine::new();
    let watched = Run::command(library("gpupool")).args("run --fail-on GP005 --").arg(harness::program("agent"));
    let watched = watched.sim("2x1GiB").nvml().env("SIMCUDA_MACHINE", machine.session().join("machine")).log();
    let watched = watched.env("GPUPOOL_LENDERS", "awake").env("GPUPOOL_LIMIT", "0:256MiB");
    // It starts the helper, which is left to the command that watches it.
    let mut first = machine.program(watched.env("GPUPOOL_HOST_LIMIT", "0"));
    first.ask("allocate 400");
    eventually("the first is told", || noted(&first).then_some(()));
    let mut second = machine.program(machine.awake());
    second.ask("allocate 400");
    eventually("the second is told", || noted(&second).then_some(()));
    let (status, _) = first.end();
    assert_eq!(status.code(), Some(0));
    assert_eq!(machine.clock(), AWAKE, "for the second one");
}

/// An orphan would be a child of that program's: one that waits for all its children would wait for the helper, and that for it.
#[test]
fn a_program_that_adopts_orphans_gets_no_helper_for_a_child() {
    let mut machine = Machine::new();
    let mut program = machine.program(machine.awake());
    assert_eq!(program.ask("adopt"), "adopts");
    program.ask("allocate 400");
    let said = warned(&program);
    assert!(said.contains("PR_SET_CHILD_SUBREAPER"), "{said}");
    assert_eq!(program.ask("children"), "0 ended, none to wait for");
    assert_eq!((machine.clock().as_str(), machine.helpers()), (ASLEEP, 0));
    ends_with_warnings(program, 1);
}

#[test]
fn without_the_command_there_is_one_warning_and_the_memory_all_the_same() {
    let mut machine = Machine::new();
    let alone = machine.session().join("libgpupool.so");
    fs::copy(library("libgpupool.so"), &alone).unwrap_or_else(|e| panic!("{e}"));
    let run = machine.lent();
    let mut program = machine.program(run.env("PATH", "/nowhere").preload(alone));
    program.ask("allocate 400");
    let said = warned(&program);
    assert!(said.contains("no command `gpupool` beside") && said.contains("install it"), "{said}");
    program.ask("allocate 100");
    assert_eq!(program.ask("children"), "0 ended, none to wait for");
    assert_eq!(program.ask("statistics").split(' ').next(), Some("2"));
    assert_eq!(machine.clock(), ASLEEP);
    ends_with_warnings(program, 1);
}

#[test]
fn a_helper_that_ends_at_once_is_told_and_not_started_again_at_every_look() {
    let mut machine = Machine::new();
    let folder = machine.session().join("bin");
    fs::create_dir(&folder).unwrap_or_else(|e| panic!("{e}"));
    let alone = folder.join("libgpupool.so");
    fs::copy(library("libgpupool.so"), &alone).unwrap_or_else(|e| panic!("{e}"));
    // One of a version that has no such command.
    let command = folder.join("gpupool");
    harness::script(&command, &format!("#!/bin/sh\necho started >>{}/starts\nexit 2\n", folder.display()));
    let run = machine.lent();
    let mut program = machine.program(run.preload(alone));
    program.ask("allocate 400");
    assert!(warned(&program).contains("the helper ended before it held a context"));
    // Two looks more, each after something has changed.
    for _ in 0..2 {
        let before = program.ask("switches");
        program.ask("allocate 32");
        eventually("another look", || (program.ask("switches") != before).then_some(()));
    }
    let starts = fs::read_to_string(folder.join("starts")).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(starts, "started\n");
    assert_eq!(machine.clock(), ASLEEP);
    ends_with_warnings(program, 1);
}

#[test]
fn a_lender_without_room_for_a_context_stays_asleep_with_one_warning() {
    let mut machine = Machine::new();
    // Who leaves for nobody keeps no room for a context.
    let run = machine.awake().env("GPUPOOL_RESERVE", "0").env("GPUPOOL_RECALL_WAIT", "off");
    let mut program = machine.program(run);
    // All of the second GPU.
    program.ask("allocate 1270");
    let said = warned(&program);
    assert!(said.contains("GPU 1: no context can be had there: CUDA_ERROR_OUT_OF_MEMORY (2)"), "{said}");
    assert_eq!(machine.clock(), ASLEEP);
    assert_eq!(program.ask("statistics").split(' ').next(), Some("1"));
    ends_with_warnings(program, 1);
}

#[test]
fn a_folder_that_is_not_the_users_alone_is_passed_over_by_both() {
    let mut machine = Machine::new();
    std::os::unix::fs::symlink("/", machine.session().join("gpupool")).unwrap_or_else(|e| panic!("{e}"));
    let mut program = machine.program(machine.awake());
    program.ask("allocate 400");
    machine.until_clock(AWAKE);
    program.end();
    machine.until_clock(ASLEEP);
}

#[test]
fn without_any_folder_there_is_one_warning() {
    // SAFETY: takes nothing and cannot fail.
    let user = unsafe { libc::geteuid() };
    if user != 0 {
        println!("only root can take every folder away: not checked");
        return;
    }
    let machine = Machine::new();
    let temporary = Path::new("/tmp/gpupool-0");
    let is_new = fs::create_dir(temporary).is_ok();
    // Folders that anybody may write to are not used.
    let mounts = "mount -t tmpfs -o mode=755 none /run && mkdir /run/gpupool && chmod 777 /run/gpupool && \
                  mount -t tmpfs -o mode=777 none /tmp/gpupool-0 && unset XDG_RUNTIME_DIR && exec \"$0\"";
    let agent = harness::program("agent");
    let variables = |run: Run| {
        run.env("GPUPOOL_LENDERS", "awake").env("GPUPOOL_LIMIT", "0:256MiB").env("GPUPOOL_HOST_LIMIT", "0").shim().log()
    };
    let run = Run::command("unshare").args("--mount bash -c").arg(mounts).arg(agent);
    let run = run.sim("2x1GiB").nvml().env("SIMCUDA_MACHINE", machine.session().join("machine"));
    let mut program = variables(run).start(None);
    program.ask("init");
    program.ask("allocate 400");
    let said = warned(&program);
    assert!(said.contains("/run/gpupool") && said.contains("/tmp/gpupool-0"), "{said}");
    ends_with_warnings(program, 1);
    if is_new {
        let _ = fs::remove_dir(temporary);
    }
}
