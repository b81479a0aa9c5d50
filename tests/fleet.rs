//! Several programs on one machine: `gpupool set`, `gpupool drain` and `gpupool undrain` beside programs that go on with their work.

#![allow(clippy::unwrap_used, reason = "tests panic")]

#[path = "fleet/setup.rs"]
mod setup;

#[path = "fleet/asking.rs"]
mod asking;

#[path = "fleet/comers.rs"]
mod comers;

#[path = "fleet/drained.rs"]
mod drained;

#[path = "fleet/gpu_errors.rs"]
mod gpu_errors;

#[path = "fleet/loans.rs"]
mod loans;

#[path = "fleet/order.rs"]
mod order;

#[path = "fleet/outside.rs"]
mod outside;

#[path = "fleet/ranks.rs"]
mod ranks;

#[path = "fleet/recall.rs"]
mod recall;

#[path = "fleet/upset.rs"]
mod upset;

#[path = "fleet/users.rs"]
mod users;

use gpupool_events::{Event, Reader};
use gpupool_metrics::{Place, Snapshot};
use gpupool_wire::control::Request;
use harness::{Run, Running, Traced, artifact_folder, at_work, driver_folder_with_nvml, eventually, goes_on, page_of};
use serde_json::Value;
use std::io::BufReader;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Output as Ended};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// What each thread of a program has, but for its 40 KiB.
const EACH: u64 = 40 * MIB;

/// One machine, and one user's session on it.
struct Machine {
    folder: TempDir,
    gpus: &'static str,
}

impl Machine {
    fn new(gpus: &'static str) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), gpus }
    }

    fn run(&self) -> Run {
        let run = Run::program("suspended").sim(self.gpus).env("SIMCUDA_MACHINE", self.folder.path().join("machine"));
        run.env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_HOST_LIMIT", "4GiB").report().log().shim()
    }

    fn start(&self, run: Run) -> Running {
        run.start(Some(self.folder.path()))
    }

    /// A program at work on GPU 0 that borrows nearly all of its memory of GPU 1.
    fn borrower(&self) -> Running {
        let mut program = self.start(self.run().env("GPUPOOL_LIMIT", "0:4MiB"));
        at_work(&mut program, 1);
        self.until(&program, "memory on GPU 1", |page| held(page, 1) >= EACH / 2);
        program
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(artifact_folder().join("gpupool"));
        command.args(arguments.split_whitespace()).env("XDG_RUNTIME_DIR", self.folder.path()).env_remove("LD_PRELOAD");
        command.env("LD_LIBRARY_PATH", driver_folder_with_nvml()).env("SIMCUDA_GPUS", self.gpus);
        command.env("SIMCUDA_CONTEXT_MIB", "16").env("SIMCUDA_MACHINE", self.folder.path().join("machine"));
        command
    }

    fn gpupool(&self, arguments: &str) -> Ended {
        self.command(arguments).output().unwrap_or_else(|error| panic!("gpupool {arguments}: {error}"))
    }

    /// What it says as JSON, and whether it succeeded.
    #[track_caller]
    fn told(&self, arguments: &str) -> (Value, bool) {
        let ended = self.gpupool(arguments);
        let text = String::from_utf8_lossy(&ended.stdout).into_owned();
        let all = serde_json::from_str(&text)
            .unwrap_or_else(|_| panic!("{arguments}: {text}{}", String::from_utf8_lossy(&ended.stderr)));
        (all, ended.status.success())
    }

    /// What a program's page says, once it says it.
    #[track_caller]
    fn page(&self, program: &Running) -> Snapshot {
        eventually("a page", || page_of(self.folder.path(), program.pid()))
    }

    /// The only page that there is.
    #[track_caller]
    fn page_file(&self) -> PathBuf {
        let folder = std::fs::read_dir(self.folder.path().join("gpupool")).unwrap().map(|entry| entry.unwrap().path());
        folder.into_iter().find(|path| path.extension().is_some_and(|kind| kind == "page")).unwrap()
    }

    #[track_caller]
    fn until(&self, program: &Running, what: &str, is_so: impl Fn(&Snapshot) -> bool) -> Snapshot {
        eventually(what, || page_of(self.folder.path(), program.pid()).filter(&is_so))
    }
}

fn at(page: &Snapshot, gpu: u32) -> Place {
    *page.levels.places.rows.iter().find(|place| place.is_gpu() && place.number == gpu).unwrap()
}

/// What a program has on a GPU, the pool's and its own.
fn held(page: &Snapshot, gpu: u32) -> u64 {
    at(page, gpu).held + at(page, gpu).own
}

fn uuid(page: &Snapshot, gpu: u32) -> String {
    page.levels.gpu(gpu).unwrap().uuid_text().unwrap()
}

/// It ends, having found every byte as it had left it, and the simulated driver no breach of the rules; its log.
#[track_caller]
fn ends_well(mut program: Running) -> Vec<Event> {
    assert_eq!(program.ask("end"), "0 wrong");
    let log = std::fs::File::open(program.log()).unwrap();
    let (status, folder) = program.end();
    assert!(status.success(), "{status}");
    let report = std::fs::read_to_string(folder.path().join("report")).unwrap_or_default();
    let report: Value = serde_json::from_str(&report).unwrap_or_default();
    assert_eq!(report["violations"], serde_json::json!([]), "{report}");
    Reader::new(BufReader::new(log)).map_while(Result::ok).map(|record| record.event).collect()
}

#[test]
fn a_gpu_that_only_lends_is_emptied_and_stays_so_also_for_those_who_come_later() {
    let machine = Machine::new("2x1GiB");
    let mut program = machine.borrower();
    let mut others = [machine.borrower(), machine.borrower()];
    let (told, all) = machine.told("drain --json 1");
    assert!(all, "{told}");
    for program in &others {
        let row = told.as_array().unwrap().iter().find(|row| row["pid"] == program.pid()).unwrap();
        assert!(row["bytes"].as_u64() >= Some(EACH / 2) && row["stayed"] == serde_json::json!([]), "{told}");
    }
    for program in others.iter_mut().chain([&mut program]) {
        goes_on(program);
        let page = machine.until(program, "an empty GPU 1", |page| at(page, 1).drained && held(page, 1) == 0);
        assert_eq!(at(&page, 1).limit, 0);
    }
    let [mut other, killed] = others;
    killed.signal(libc::SIGKILL);
    drop(killed);
    let mut late = machine.start(machine.run().env("GPUPOOL_LIMIT", "0:4MiB"));
    at_work(&mut late, 1);
    let page = machine.page(&late);
    assert!(at(&page, 1).drained && held(&page, 1) == 0, "{page:?}");
    // Who asks a second time hears that nothing is there.
    assert!(machine.told("drain --json 1").1);
    let text = String::from_utf8(machine.gpupool("ps").stdout).unwrap();
    assert!(text.contains("gpu1 drained"), "{text}");

    assert!(machine.told("undrain --json 1").1);
    for program in [&mut program, &mut other] {
        goes_on(program);
        machine.until(program, "memory on GPU 1", |page| !at(page, 1).drained && held(page, 1) >= EACH / 2);
    }
    machine.until(&late, "GPU 1 as before", |page| !at(page, 1).drained && at(page, 1).limit > 0);
    let events = ends_well(program);
    let moved = |event: &Event| match event {
        Event::GpuDrain(event) => Some((event.device, event.bytes, event.stayed)),
        Event::GpuUndrain(event) => Some((event.device, event.bytes, event.stayed)),
        _ => None,
    };
    let moved: Vec<_> = events.iter().filter_map(moved).collect();
    assert!(moved.iter().all(|(device, _, stayed)| (*device, *stayed) == (1, 0)), "{moved:?}");
    assert!(moved.iter().filter(|(_, bytes, _)| *bytes >= EACH / 2).count() == 2, "{moved:?}");
    ends_well(other);
    ends_well(late);
    let left =
        std::fs::read_dir(machine.folder.path().join("gpupool")).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| !name.to_string_lossy().ends_with(".page")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_program_that_computes_on_a_drained_gpu_goes_on_and_keeps_its_context_alone() {
    let machine = Machine::new("3x1GiB");
    let mut program = machine.start(machine.run());
    at_work(&mut program, 3);
    let gpu = uuid(&machine.page(&program), 1);
    let (told, all) = machine.told(&format!("drain --json {gpu}"));
    assert!(!all, "its context is there");
    let [row] = &told.as_array().unwrap()[..] else { panic!("{told}") };
    let [stayed] = &row["stayed"].as_array().unwrap()[..] else { panic!("{told}") };
    assert!(
        stayed["what"].as_str().unwrap().starts_with("a context, ") && row["bytes"].as_u64() >= Some(EACH),
        "{told}"
    );
    goes_on(&mut program);
    machine.until(&program, "an empty GPU 1", |page| at(page, 1).drained && held(page, 1) == 0);
    let undrain = || String::from_utf8(machine.gpupool(&format!("undrain {gpu}")).stdout).unwrap();
    assert!(undrain().ends_with("is drained no more\n"));
    goes_on(&mut program);
    machine.until(&program, "memory on GPU 1", |page| held(page, 1) >= EACH);
    assert!(undrain().ends_with("was not drained\n"));
    ends_well(program);
}

/// What a GPU held only because another one was drained comes back from there once, to where it was first, and not on to that GPU.
#[test]
fn what_left_two_gpus_belongs_to_the_first_of_them() {
    let machine = Machine::new("3x320MiB");
    let run = machine
        .neighbour(0, 50)
        .env("GPUPOOL_DEVICES", "0,1,2")
        .env("GPUPOOL_LIMIT", "0:100MiB")
        .env("GPUPOOL_IDLE", "100ms");
    let program = machine.holder(run, 200);
    let page = machine.until(&program, "memory on a peer", |page| held(page, 1) + held(page, 2) >= 80 * MIB);
    let (first, second) = if held(&page, 1) > 0 { (1, 2) } else { (2, 1) };
    assert_eq!(held(&page, second), 0, "{page:?}");
    let done = |line: &str| assert!(machine.told(line).1, "{line}");
    done(&format!("drain --json {first}"));
    machine.until(&program, "memory on the other", |page| held(page, second) >= 80 * MIB && held(page, first) == 0);
    done(&format!("drain --json {second}"));
    machine.until(&program, "memory on the host", |page| held(page, first) + held(page, second) == 0);
    done(&format!("undrain --json {first}"));
    machine.until(&program, "memory where it was first", |page| held(page, first) >= 80 * MIB);
    let (told, _) = machine.told(&format!("undrain --json {second}"));
    assert_eq!(told[0]["bytes"], 0, "{told}");
    machine.until(&program, "no GPU drained", |page| !at(page, second).drained);
    let page = machine.page(&program);
    assert!(held(&page, first) >= 80 * MIB && held(&page, second) == 0, "{page:?}");
    // Back on its way, it still comes to where it was first.
    [first, second].iter().for_each(|gpu| done(&format!("drain --json {gpu}")));
    done(&format!("undrain --json {second}"));
    machine.until(&program, "memory on the other again", |page| held(page, second) >= 80 * MIB);
    done(&format!("undrain --json {first}"));
    machine
        .until(&program, "memory where it was first", |page| held(page, first) >= 80 * MIB && held(page, second) == 0);
    setup::is_whole(program);
}

#[test]
fn who_is_stopped_or_never_comes_to_rest_delays_nobody_and_leaves_afterwards() {
    let machine = Machine::new("2x1GiB");
    let (mut stopped, mut busy, mut other) = (machine.borrower(), machine.borrower(), machine.borrower());
    busy.ask("spin");
    stopped.signal(libc::SIGSTOP);
    let begun = Instant::now();
    let (told, all) = machine.told("drain --deadline 3s --json 1");
    assert!(!all && begun.elapsed() < Duration::from_secs(10), "{told}");
    let row = |program: &Running| told.as_array().unwrap().iter().find(|row| row["pid"] == program.pid()).unwrap();
    assert!(row(&other)["bytes"].as_u64() >= Some(EACH / 2), "{told}");
    assert!(row(&busy)["stayed"][0]["what"].as_str().unwrap().contains("did not come to rest in time"), "{told}");
    let pid = stopped.pid();
    let error = format!(
        "what it has on the GPU is there still, and leaves once it goes on, as the GPU is drained: it is stopped (SIGSTOP) and answers nobody; \
         kill -CONT {pid} lets it go on"
    );
    assert_eq!(row(&stopped)["error"], error.as_str(), "{told}");
    goes_on(&mut other);
    stopped.signal(libc::SIGCONT);
    goes_on(&mut stopped);
    machine.until(&stopped, "an empty GPU 1", |page| at(page, 1).drained && held(page, 1) == 0);
    busy.ask("release");
    machine.until(&busy, "an empty GPU 1", |page| at(page, 1).drained && held(page, 1) == 0);
    assert!(machine.told("drain --json 1").1);
    goes_on(&mut busy);
    [stopped, busy, other].into_iter().for_each(|program| drop(ends_well(program)));
}

/// Its thread that answers stands in the middle of something, as in a call of the driver that does not return.
#[test]
fn of_a_program_that_hangs_it_is_told_what_was_not_done_and_what_to_do() {
    let machine = Machine::new("2x1GiB");
    let program = machine.borrower();
    let tasks = std::fs::read_dir(format!("/proc/{}/task", program.pid())).unwrap();
    let is_ours = |task: &std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap() == "gpupool\n";
    let ours = tasks.flatten().find(is_ours).unwrap().file_name().to_str().unwrap().parse().unwrap();
    let stands = Traced::begin(ours).unwrap();
    let (told, all) = machine.told("drain --deadline 1s --json 1");
    let error = told[0]["error"].as_str().unwrap_or_default();
    assert!(!all && told[0]["pid"] == program.pid(), "{told}");
    let begins = "what it has on the GPU is there still, and leaves once it goes on, as the GPU is drained: it did not answer within ";
    assert!(error.starts_with(begins) && error.ends_with(&format!("or end it (kill {})", program.pid())), "{told}");
    drop(stands);
    machine.until(&program, "an empty GPU 1", |page| at(page, 1).drained && held(page, 1) == 0);
    ends_well(program);
}

/// The last try of a drain says for how long it has waited, too.
#[test]
fn a_drain_says_what_was_in_the_way_and_for_how_long() {
    let machine = Machine::new("2x1GiB");
    let mut program = machine.borrower();
    program.ask("hold cuMemcpyDtoH_v2");
    eventually("a call that stands", || (program.ask("stands") == "yes").then_some(()));
    let (told, _) = machine.told("drain --deadline 1s --json 1");
    let why = told[0]["stayed"][0]["what"].as_str().unwrap_or_default();
    let waited = why.split("was in cuMemcpyDtoH_v2 for more than ").nth(1).and_then(|text| text.strip_suffix(" ms"));
    assert!(waited.and_then(|text| text.parse::<u64>().ok()) >= Some(10), "{told}");
    program.ask("let");
    goes_on(&mut program);
    ends_well(program);
}

#[test]
fn settings_change_while_a_program_works_and_what_follows_is_told() {
    let machine = Machine::new("3x1GiB");
    let mut program = machine.start(machine.run());
    at_work(&mut program, 1);
    let pid = program.pid();
    let set = |settings: &str| machine.told(&format!("set --json {pid} {settings}"));
    let (told, done) = set("limit=0:12MiB priority=80 move_share=7% log=gpupool::memory=debug");
    let change = |name: &str, old: &str, new: &str| {
        let row = told["changes"].as_array().unwrap().iter().find(|row| row["name"] == name).unwrap();
        assert_eq!((row["old"].as_str(), row["new"].as_str()), (Some(old), Some(new)), "{told}");
        row["note"].as_str().unwrap_or_default().to_owned()
    };
    assert!(done);
    let note = change("GPUPOOL_LIMIT", "", "0:12MiB");
    assert!(note.contains(" moved away from GPU 0"), "{note}");
    change("GPUPOOL_PRIORITY", "50", "80");
    change("GPUPOOL_MOVE_SHARE", "5%", "7%");
    change("GPUPOOL_LOG", "debug", "gpupool::memory=debug");
    // Without a setting they are shown, and nothing changes.
    let (told, done) = set("");
    assert!(done && told["changes"].is_null(), "{told}");
    let all = told["settings"].as_array().unwrap();
    let says = |name: &str| all.iter().find(|row| row["name"] == name).unwrap()["value"].as_str().unwrap();
    let names = ["GPUPOOL_LIMIT", "GPUPOOL_PRIORITY", "GPUPOOL_MOVE_SHARE", "GPUPOOL_DEVICES", "GPUPOOL_GUARANTEE"];
    assert_eq!(names.map(says), ["0:12MiB", "80", "7%", "auto", ""], "{told}");
    let shown = String::from_utf8(machine.gpupool(&format!("set {pid}")).stdout).unwrap();
    assert!(shown.contains("GPUPOOL_LIMIT: 0:12MiB\n") && shown.contains("GPUPOOL_GUARANTEE: (unset)\n"), "{shown}");
    goes_on(&mut program);
    let page = machine.until(&program, "the new limit kept", |page| {
        page.levels.priority == 80 && at(page, 0).limit == 12 * MIB && at(page, 0).held <= 12 * MIB
    });
    assert!(held(&page, 1) + held(&page, 2) >= 20 * MIB, "{page:?}");
    let text = String::from_utf8(machine.gpupool("ps").stdout).unwrap();
    assert!(text.contains("priority") && text.contains(" 80 "), "{text}");

    let (told, done) = set("devices=0,2");
    let note = told["changes"][0]["note"].as_str().unwrap_or_default();
    assert!(done && note.contains(" moved away from GPU 1"), "{told} {page:?}");
    goes_on(&mut program);
    let page = machine.until(&program, "an empty GPU 1", |page| held(page, 1) == 0);
    assert!(held(&page, 2) >= 20 * MIB, "{page:?}");
    // What has room again comes back: what left and what is free for more is known at once.
    let (told, done) = set("devices=auto limit=");
    let notes: Vec<&str> = told["changes"].as_array().unwrap().iter().filter_map(|row| row["note"].as_str()).collect();
    assert!(done && notes.iter().any(|note| note.contains(" came to GPU 0")), "{told}");
    goes_on(&mut program);
    machine.until(&program, "all of it on GPU 0", |page| {
        at(page, 0).held >= 30 * MIB && held(page, 1) == 0 && held(page, 2) == 0
    });
    program.ask("allocate 400");
    eventually("the allocation", || (program.ask("allocated") == "yes").then_some(()));
    machine.until(&program, "no limit", |page| at(page, 0).held >= 400 * MIB);

    let refused = |settings: &str, expected: &str| {
        let ended = machine.gpupool(&format!("set {pid} {settings}"));
        let text = String::from_utf8(ended.stderr).unwrap();
        assert!(!ended.status.success() && text.lines().count() == 1 && text.contains(expected), "{settings}: {text}");
    };
    refused(
        "priority=10 mode=spill",
        "GPUPOOL_MODE is read when the program starts and cannot be changed while it runs",
    );
    refused("priority=10 limit=7:1GiB", "there is no GPU 7");
    refused("priority=10 devices=1,9", "there is no GPU 9");
    refused(
        "priority=10 devices=1",
        "the program works on GPU 0, and the list of those that its memory may lie on leaves that out; devices=0,1 has it as well",
    );
    refused("priority=10 priority=11", "is given twice");
    refused("priority=101", "not a whole number from 0 to 100");
    refused("log=dbug", "neither a level nor a part of gpupool");
    refused("limits=1GiB", "did you mean GPUPOOL_LIMIT?");
    // More than one message of the socket holds: nothing is asked of the program.
    let long = format!("priority=10 log={}", vec!["gpupool::memory=debug"; 3000].join(","));
    refused(&long, "and what a program can be told at once has room for");
    assert_eq!(machine.page(&program).levels.priority, 80, "all or nothing");
    let events = ends_well(program);
    let changed = |event: &&Event| matches!(event, Event::SettingChange(_));
    assert_eq!(events.iter().filter(changed).count(), 7);
}

/// What a program that has no pool could be told is little, and whoever tells it more hears so.
#[test]
fn what_changes_nothing_in_a_mode_is_told_with_the_mode() {
    let machine = Machine::new("1x320MiB");
    for mode in ["trace", "managed"] {
        let mut program = machine.start(machine.neighbour(0, 50).env("GPUPOOL_MODE", mode));
        setup::takes(&mut program, 60);
        machine.until(&program, "a page", |page| page.levels.live_bytes >= 60 * MIB || mode == "trace");
        let pid = program.pid();
        let idle = format!(
            "says nothing with GPUPOOL_MODE={mode}: what gives way is the pool's memory, in the modes pool and spill"
        );
        let shown = String::from_utf8(machine.gpupool(&format!("set {pid}")).stdout).unwrap();
        assert!(shown.contains(&format!("GPUPOOL_PRIORITY: 50 ({idle})\n")), "{shown}");
        assert!(shown.contains("GPUPOOL_LOG: ") && !shown.contains("GPUPOOL_LIMIT: (unset) ("), "{shown}");
        let (told, done) = machine.told(&format!("set --json {pid} priority=80 log=debug"));
        let note = |at: usize| told["changes"][at]["note"].as_str().unwrap_or_default();
        assert!(done && note(0) == idle && note(1).is_empty(), "{told}");
        let limited = machine.gpupool(&format!("set {pid} limit=0:20MiB"));
        let said = [&limited.stdout, &limited.stderr].map(|said| String::from_utf8_lossy(said).into_owned()).concat();
        let expected = match mode {
            "managed" => "40.0 MiB stays on GPU 0: managed memory, which stays where it was placed",
            _ => "the program has no pool, as GPUPOOL_MODE=trace leaves its memory to the driver",
        };
        assert!(said.contains(expected), "{said}");
        let suspended = machine.gpupool(&format!("suspend {pid}"));
        let whose =
            if mode == "managed" { "is managed memory, which the driver moves itself" } else { "is the driver's" };
        let said = String::from_utf8_lossy(&suspended.stderr).into_owned();
        assert!(said.contains(&format!("with GPUPOOL_MODE={mode} its memory {whose}; only the pool's")), "{said}");
        setup::is_whole(program);
    }
}

/// It is neither counted nor moved, and whoever empties a GPU would look for it.
#[test]
fn what_the_driver_has_of_a_program_in_mode_spill_is_told_of() {
    let machine = Machine::new("1x320MiB");
    let mut program = machine.start(machine.neighbour(0, 50).env("GPUPOOL_MODE", "spill"));
    setup::takes(&mut program, 60);
    let pid = program.pid();
    machine.until(&program, "a page", |_| true);
    let said = |words: &str| String::from_utf8(machine.gpupool(words).stdout).unwrap();
    let listed = said("ps");
    assert!(listed.contains("not counted: what the driver had room for (mode spill)"), "{listed}");
    let limited = said(&format!("set {pid} limit=0:20MiB"));
    assert!(limited.contains("what the driver had room for on GPU 0 stays as well"), "{limited}");
    let left = said(&format!("suspend --to host {pid}"));
    assert!(
        left.contains("left the GPUs, without what the driver had room for, which stays there (mode spill), in "),
        "{left}"
    );
    assert!(machine.told(&format!("resume --json {pid}")).1);
    setup::is_whole(program);
}

#[test]
fn what_cannot_come_home_when_a_limit_is_raised_is_told() {
    let machine = Machine::new("2x320MiB");
    let mut debtor = machine.debtor(60);
    debtor.ask("spin");
    let (told, done) = machine.told(&format!("set --json {} limit=0:260MiB", debtor.pid()));
    let change = &told["changes"][0];
    assert!(done && change["old"] == "0:2MiB" && change["new"] == "0:260MiB", "{told}");
    let note = change["note"].as_str().unwrap_or_default();
    assert!(note.contains(" stays elsewhere than on GPU 0: "), "{told}");
    debtor.ask("release");
    setup::is_whole(debtor);
}

#[test]
fn a_suspension_says_where_the_memory_is_afterwards() {
    let machine = Machine::new("2x320MiB");
    for (to, left, expected) in
        [("peers", "left the GPUs that it works on", " on GPU 1"), ("host", "left the GPUs", " on the host")]
    {
        let program = machine.holder(machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1"), 60);
        let said = machine.gpupool(&format!("suspend --to {to} {}", program.pid()));
        let said = format!("{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
        assert!(said.contains(&format!("60.0 MiB {left} (it has 60.0 MiB")) && said.contains(expected), "{said}");
        assert!(machine.told(&format!("resume --json {}", program.pid())).1);
        setup::is_whole(program);
    }
}

#[test]
fn a_log_level_that_is_set_while_a_program_runs_counts_from_then_on() {
    let machine = Machine::new("1x320MiB");
    let program = machine.holder(machine.neighbour(0, 50), 20);
    let set = |settings: &str| assert!(machine.told(&format!("set --json {} {settings}", program.pid())).1);
    set("log=error");
    set("priority=60");
    set("log=info");
    set("priority=70");
    let changes = |event: &Event| match event {
        Event::SettingChange(event) => Some((event.name.clone(), event.new.clone())),
        _ => None,
    };
    let changes: Vec<_> = setup::is_whole(program).iter().filter_map(changes).collect();
    let priorities: Vec<_> = changes.iter().filter(|(name, _)| name == "GPUPOOL_PRIORITY").collect();
    assert_eq!(priorities, [&("GPUPOOL_PRIORITY".to_owned(), "70".to_owned())], "{changes:?}");
}

#[test]
fn what_a_program_asks_for_while_its_gpu_is_drained_lies_elsewhere() {
    for mode in ["pool", "spill"] {
        let machine = Machine::new("2x1GiB");
        let mut program = machine.start(machine.run().env("GPUPOOL_MODE", mode));
        at_work(&mut program, 1);
        // In mode spill the driver has served what there was.
        machine.told("drain --json 0");
        program.ask("allocate 64");
        eventually("the allocation", || (program.ask("allocated") == "yes").then_some(()));
        program.ask("create 32");
        eventually("the allocation", || (program.ask("allocated") == "yes").then_some(()));
        goes_on(&mut program);
        let page = machine.until(&program, "memory elsewhere", |page| held(page, 1) >= 96 * MIB);
        assert_eq!((held(&page, 0), at(&page, 0).drained), (0, true), "{mode}: {page:?}");
        machine.told("undrain --json 0");
        goes_on(&mut program);
        ends_well(program);
    }
}

/// A small piece of its own is no arena because nothing may lie on its GPU just now, so it goes whole to where there is room.
#[test]
fn what_a_program_makes_itself_while_its_only_gpu_is_drained_lies_on_the_host() {
    let machine = Machine::new("1x1GiB");
    let mut program = machine.start(machine.run());
    at_work(&mut program, 1);
    machine.told("drain --json 0");
    let on_host = |page: &Snapshot| -> u64 {
        page.levels.places.rows.iter().filter(|place| place.on_host).map(|place| place.held + place.own).sum()
    };
    let before = on_host(&machine.until(&program, "an empty GPU", |page| held(page, 0) == 0));
    program.ask("create 32");
    eventually("the allocation", || (program.ask("allocated") == "yes").then_some(()));
    machine.until(&program, "memory on the host", |page| on_host(page) >= before + 32 * MIB);
    program.ask("allocate 32");
    eventually("the allocation", || (program.ask("allocated") == "yes").then_some(()));
    machine.told("undrain --json 0");
    goes_on(&mut program);
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(log.contains("GPU 0 is drained (gpupool drain)") && log.contains("gpupool undrain 0"), "{log}");
    ends_well(program);
}

#[test]
fn a_rank_that_keeps_to_its_own_gpu_is_lent_others_and_not_again() {
    let machine = Machine::new("2x1GiB");
    let mut program = machine.start(machine.run().env("LOCAL_WORLD_SIZE", "4").env("GPUPOOL_LIMIT", "0:64MiB"));
    at_work(&mut program, 1);
    let allocate = |program: &mut Running| {
        program.ask("allocate 64");
        eventually("the allocation", || (program.ask("allocated") == "yes").then_some(()));
    };
    allocate(&mut program);
    let page = machine.until(&program, "memory on the host", |page| page.levels.residence.on_host >= 32 * MIB);
    assert_eq!(held(&page, 1), 0, "{page:?}");
    let pid = program.pid();
    assert!(machine.told(&format!("set --json {pid} devices=0,1")).1);
    allocate(&mut program);
    machine.until(&program, "memory on GPU 1", |page| held(page, 1) >= 32 * MIB);
    let (told, done) = machine.told(&format!("set --json {pid} devices=auto"));
    assert!(done && told["changes"][0]["old"] == "0,1", "{told}");
    machine.until(&program, "an empty GPU 1", |page| held(page, 1) == 0);
    goes_on(&mut program);
    ends_well(program);
}

#[test]
fn a_drain_whose_command_is_killed_goes_on_and_ends_with_undrain() {
    let machine = Machine::new("2x1GiB");
    let mut program = machine.borrower();
    program.ask("spin");
    let gpu = uuid(&machine.page(&program), 1);
    let mut command = machine.command(&format!("drain {gpu}")).spawn().unwrap();
    let said = machine.folder.path().join("gpupool").join(format!("{gpu}.drained"));
    eventually("a file that says so", || said.exists().then_some(()));
    command.kill().unwrap();
    command.wait().unwrap();
    program.ask("release");
    machine.until(&program, "an empty GPU 1", |page| held(page, 1) == 0);
    goes_on(&mut program);
    assert!(machine.told(&format!("undrain --json {gpu}")).1);
    machine.until(&program, "memory on GPU 1", |page| held(page, 1) >= EACH / 2);
    goes_on(&mut program);
    ends_well(program);
}

/// Listens where commands do, as this user or another one, and says something to whoever connects; how many bytes the last answer has.
fn say(page: &Path, words: &[u8], user: Option<libc::uid_t>) -> isize {
    let other = begin_to_say(page, words, user);
    let mut answer = [0u8; 64];
    let mut last = 0;
    loop {
        // SAFETY: the buffer is writable for its length.
        match unsafe { libc::recv(other.as_raw_fd(), answer.as_mut_ptr().cast(), answer.len(), 0) } {
            bytes if bytes > 0 => last = bytes,
            _ => return last,
        }
    }
}

/// The same, and the connection to whoever was told.
fn begin_to_say(page: &Path, words: &[u8], user: Option<libc::uid_t>) -> OwnedFd {
    use std::os::fd::FromRawFd;
    use std::os::unix::ffi::OsStrExt;
    let name = page.with_extension("call");
    // SAFETY: the call has no preconditions, and the descriptor that it gives is nobody else's.
    let socket =
        unsafe { OwnedFd::from_raw_fd(libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0)) };
    // SAFETY: all-zero is a valid value of this C struct.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let path = name.as_os_str().as_bytes();
    assert!(path.len() < address.sun_path.len(), "{}", name.display());
    address.sun_path.iter_mut().zip(path).for_each(|(to, from)| *to = *from as libc::c_char);
    // SAFETY: the address is a local of that size.
    let bound = unsafe {
        libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size_of::<libc::sockaddr_un>() as libc::socklen_t)
    };
    assert_eq!(bound, 0, "{}", std::io::Error::last_os_error());
    let listens = || {
        // SAFETY: the call of the system itself changes the user of this thread alone, which ends afterwards; the descriptor is a bound socket.
        unsafe {
            if let Some(user) = user {
                assert_eq!(libc::syscall(libc::SYS_setresuid, user, user, user), 0);
            }
            assert_eq!(libc::listen(socket.as_raw_fd(), 1), 0);
        }
    };
    std::thread::scope(|scope| scope.spawn(listens).join().unwrap());
    // SAFETY: the descriptor is a socket that listens; the program's agent looks once a second, and connects.
    let other =
        unsafe { OwnedFd::from_raw_fd(libc::accept(socket.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut())) };
    std::fs::remove_file(name).unwrap();
    // SAFETY: the bytes are readable for their length. Who has hung up already hears nothing.
    let said = unsafe { libc::send(other.as_raw_fd(), words.as_ptr().cast(), words.len(), libc::MSG_NOSIGNAL) };
    assert!(said == words.len() as isize || user.is_some(), "{}", std::io::Error::last_os_error());
    other
}

/// The folder keeps other users out. Whoever gets there all the same is not heard.
#[test]
fn nobody_does_what_another_user_says() {
    if !users::can_become_another() {
        return;
    }
    let machine = Machine::new("1x320MiB");
    let program = machine.holder(machine.neighbour(0, 10), 80);
    let gpu = machine.page(&program).levels.gpu(0).unwrap().uuid;
    let page = machine.page_file();
    let request = Request::GiveWay { gpu, bytes: 20 * MIB, priority: 90, loans: false, patience: 20_000 }.encode();
    assert_eq!(say(&page, &request, Some(users::OTHER)), 0);
    assert_eq!(machine.page(&program).levels.residence.on_host, 0);
    assert!(say(&page, &request, None) > 0, "the user's own");
    machine.until(&program, "memory on the host", |page| page.levels.residence.on_host >= 20 * MIB);
    assert_eq!(setup::gave(&setup::is_whole(program)), 20 * MIB);
}

#[test]
fn nonsense_on_the_socket_changes_nothing() {
    let machine = Machine::new("2x1GiB");
    let mut program = machine.borrower();
    let before = machine.page(&program);
    let page = machine.page_file();
    for words in [&b"drain everything"[..], &[0; 300], &[0xff; 24]] {
        assert_eq!(say(&page, words, None), 0, "it answers nonsense");
    }
    goes_on(&mut program);
    let after = machine.page(&program);
    assert!(at(&after, 1).limit == at(&before, 1).limit && held(&after, 1) >= EACH / 2, "{after:?}");
    assert!(machine.told("drain --json 1").1);
    machine.until(&program, "an empty GPU 1", |page| held(page, 1) == 0);
    ends_well(program);
}

#[test]
fn memory_on_a_disk_comes_back_whatever_was_said_of_its_gpu_meanwhile() {
    let machine = Machine::new("1x1GiB");
    let folder = tempfile::tempdir().unwrap();
    let is_right = |program: &mut Running| {
        program.ask("check");
        eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
    };
    let [to, back] = [format!("suspend --json --to {}", folder.path().display()), "resume --json".to_owned()];
    // Somewhere else, as long as there is room.
    let mut program = machine.start(machine.run());
    program.ask("keep 64");
    let pid = program.pid();
    let done = |arguments: &str| {
        let (told, all) = machine.told(arguments);
        assert!(all, "{arguments}: {told}");
        told
    };
    done(&format!("{to} {pid}"));
    machine.gpupool("drain 0");
    machine.until(&program, "a drained GPU", |page| at(page, 0).drained);
    done(&format!("{back} {pid}"));
    is_right(&mut program);
    machine.until(&program, "an empty GPU", |page| held(page, 0) == 0);
    done(&format!("{to} {pid}"));
    done("undrain --json 0");
    done(&format!("{back} {pid}"));
    is_right(&mut program);
    ends_well(program);

    // And where it was, where there is no room elsewhere.
    let mut program = machine.start(machine.run().env("GPUPOOL_HOST_LIMIT", "0"));
    program.ask("keep 64");
    let pid = program.pid();
    done(&format!("{to} {pid}"));
    machine.gpupool("drain 0");
    machine.until(&program, "a drained GPU", |page| at(page, 0).drained);
    let told = done(&format!("{back} {pid}"));
    assert_eq!(told[0]["stayed_bytes"], 0, "{told}");
    is_right(&mut program);
    let page = machine.until(&program, "memory on its GPU", |page| held(page, 0) >= 64 * MIB);
    assert!(at(&page, 0).drained && at(&page, 0).limit == 0, "{page:?}");
    // It leaves a drained GPU for the disk as well.
    done(&format!("{to} {pid}"));
    machine.until(&program, "an empty GPU", |page| held(page, 0) == 0);
    done("undrain --json 0");
    machine.told(&format!("set --json {pid} limit=16MiB"));
    let told = done(&format!("{back} {pid}"));
    assert_eq!(told[0]["stayed_bytes"], 0, "{told}");
    is_right(&mut program);
    let page = machine.until(&program, "memory on its GPU", |page| held(page, 0) >= 64 * MIB);
    assert_eq!(at(&page, 0).limit, 16 * MIB, "what was said holds for all that comes");
    ends_well(program);
}
