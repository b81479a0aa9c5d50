//! Memory that goes from one process to another by priority, from borrowers to those who work on a GPU, and to programs that do not run under gpupool.

use super::{MIB, Machine, at, uuid};
use gpupool_events::{Event, Reader};
use gpupool_metrics::Snapshot;
use gpupool_metrics::folder::{Folder, Roots};
use gpupool_wire::Socket;
use gpupool_wire::control::{ROOM, Reply, Request};
use harness::{Run, Running, Traced, eventually, goes_on, page_of};
use serde_json::Value;
use std::io::BufReader;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

impl Machine {
    /// A program on this GPU that matters so much.
    pub(super) fn neighbour(&self, gpu: u32, priority: u32) -> Run {
        self.with_priority(Run::program("neighbour").arg(gpu.to_string()), priority)
    }

    fn with_priority(&self, run: Run, priority: u32) -> Run {
        let run = run.sim(self.gpus).nvml();
        let run = run.env("SIMCUDA_MACHINE", self.folder.path().join("machine")).env("SIMCUDA_CONTEXT_MIB", "4");
        let run = run
            .env("GPUPOOL_RESERVE", "16MiB")
            .env("GPUPOOL_RECALL_WAIT", "30s")
            .env("GPUPOOL_HOST_LIMIT", "4GiB")
            .report()
            .log()
            .shim();
        run.env("GPUPOOL_PRIORITY", priority.to_string())
    }

    /// One without gpupool on this GPU.
    pub(super) fn bare(&self, gpu: u32) -> Run {
        let run = Run::program("neighbour").arg(gpu.to_string()).sim(self.gpus).nvml();
        run.env("SIMCUDA_MACHINE", self.folder.path().join("machine")).env("SIMCUDA_CONTEXT_MIB", "4")
    }

    /// A rank of a job, of which what was freed goes home soon.
    fn rank(&self, gpu: u32) -> Run {
        self.neighbour(gpu, 50).env("GPUPOOL_IDLE", "100ms")
    }

    /// One that runs and has so many MiB.
    pub(super) fn holder(&self, run: Run, mib: u64) -> Running {
        let mut program = self.start(run);
        // Each block on a chunk of its own.
        for _ in 0..mib / 20 {
            takes(&mut program, 20);
        }
        if !mib.is_multiple_of(20) {
            takes(&mut program, mib % 20);
        }
        self.until(&program, "a page", |page| page.levels.live_bytes >= mib * MIB);
        program
    }

    /// One on GPU 0 that has borrowed so many MiB of GPU 1.
    pub(super) fn debtor(&self, mib: u64) -> Running {
        let program =
            self.holder(self.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_LIMIT", "0:2MiB"), mib);
        self.until(&program, "a loan", |page| held(page, 1) >= mib * MIB - 4 * MIB);
        program
    }

    pub(super) fn files(&self) -> Vec<String> {
        let files = std::fs::read_dir(self.folder.path().join("gpupool")).unwrap();
        files.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }
}

/// What a program has on a GPU; nothing where its page does not say yet.
pub(super) fn held(page: &Snapshot, gpu: u32) -> u64 {
    let places = page.levels.places.rows.iter();
    places.filter(|place| place.is_gpu() && place.number == gpu).map(|place| place.held + place.own).sum()
}

/// What a program has of its own making on a GPU.
fn own(page: &Snapshot, gpu: u32) -> u64 {
    let places = page.levels.places.rows.iter();
    places.filter(|place| place.is_gpu() && place.number == gpu).map(|place| place.own).sum()
}

#[track_caller]
pub(super) fn takes(program: &mut Running, mib: u64) -> u64 {
    let answer = program.ask(&format!("take {mib}"));
    answer.parse().unwrap_or_else(|_| panic!("take {mib}: {answer}"))
}

/// All of its memory is as it was, it ends, and no rule of the driver was broken; its log.
#[track_caller]
pub(super) fn is_whole(mut program: Running) -> Vec<Event> {
    assert_eq!(program.ask("check"), "0");
    let log = program.log();
    let file = std::fs::File::open(&log).ok();
    let (status, folder) = program.end();
    assert!(status.success(), "{status}");
    let report = std::fs::read_to_string(folder.path().join("report")).unwrap_or_default();
    let report: Value = serde_json::from_str(&report).unwrap_or_default();
    assert_eq!(report["violations"], serde_json::json!([]), "{report}");
    let lines = file.map(|file| Reader::new(BufReader::new(file)).map_while(Result::ok).map(|record| record.event));
    lines.into_iter().flatten().collect()
}

pub(super) fn asked(events: &[Event]) -> Vec<(u64, u64)> {
    let of = |event: &Event| match event {
        Event::RecallAsk(event) => Some((event.bytes, event.freed)),
        _ => None,
    };
    events.iter().filter_map(of).collect()
}

pub(super) fn gave(events: &[Event]) -> u64 {
    let of = |event: &Event| if let Event::RecallGive(event) = event { event.freed } else { 0 };
    events.iter().map(of).sum()
}

#[test]
fn memory_of_a_lower_priority_gives_way_to_a_higher_one_and_to_no_other() {
    let machine = Machine::new("2x320MiB");
    let low = machine.holder(machine.neighbour(0, 10), 240);
    let mut high = machine.start(machine.neighbour(0, 90));
    takes(&mut high, 160);
    let page = machine.until(&high, "its memory", |page| held(page, 0) >= 160 * MIB);
    assert_eq!((held(&page, 1), page.levels.residence.on_host), (0, 0), "{page:?}");
    // To another GPU, as long as one has room, and not to the host.
    let page = machine.until(&low, "what is left", |page| held(page, 0) <= 142 * MIB && held(page, 1) >= 96 * MIB);
    assert_eq!((page.levels.live_bytes, page.levels.residence.on_host), (240 * MIB, 0), "{page:?}");
    // An equal one and a lower one get what is free, and no more.
    let others = [machine.holder(machine.neighbour(0, 90), 60), machine.holder(machine.neighbour(0, 5), 60)];
    let page = machine.page(&high);
    assert_eq!(held(&page, 0), 160 * MIB, "{page:?}");
    // What matters more is not asked at all.
    let mut low = low;
    takes(&mut low, 40);
    // GPU 1 has room for that. What has none, lies on the host for a reason that is told.
    let log = |low: &Running| std::fs::read_to_string(low.log()).unwrap();
    let why = "what this program had there was given to another one that does not matter less";
    assert!(!log(&low).contains(why), "{}", log(&low));
    takes(&mut low, 200);
    machine.until(&low, "memory on the host", |page| page.levels.residence.on_host >= 20 * MIB);
    let log = log(&low);
    assert!(log.contains(why) && log.contains("raise GPUPOOL_PRIORITY of this one"), "{log}");
    let events = is_whole(low);
    assert!(asked(&events).iter().all(|(_, freed)| *freed == 0) && gave(&events) >= 96 * MIB, "{:?}", asked(&events));
    let events = is_whole(high);
    assert!(gave(&events) == 0 && asked(&events).iter().any(|(_, freed)| *freed >= 96 * MIB), "{:?}", asked(&events));
    others.into_iter().for_each(|other| drop(is_whole(other)));
}

/// The driver refuses memory on the host at first, as one does that takes longer for it than anybody waits.
#[test]
fn a_gpu_is_free_before_the_driver_has_made_memory_on_the_host_for_what_left_it() {
    let machine = Machine::new("1x320MiB");
    let late: Vec<String> = (13..40).map(|call| format!("cuMemCreate:{call}=2")).collect();
    let low = machine.neighbour(0, 10).env("SIMCUDA_FAULT", late.join(","));
    let low = machine.holder(low, 240);
    let mut high = machine.start(machine.neighbour(0, 90));
    takes(&mut high, 260);
    let page = machine.until(&high, "its memory", |page| held(page, 0) >= 260 * MIB);
    assert_eq!(page.levels.residence.on_host, 0, "{page:?}");
    let page = machine.until(&low, "memory on the host", |page| page.levels.residence.on_host >= 200 * MIB);
    assert_eq!(page.levels.live_bytes, 240 * MIB, "{page:?}");
    let told = machine.gpupool("ps").stdout;
    assert!(String::from_utf8_lossy(&told).contains("far: "), "{}", String::from_utf8_lossy(&told));
    let events = is_whole(low);
    let settled: u64 =
        events.iter().map(|event| if let Event::HostSettle(event) = event { event.bytes } else { 0 }).sum();
    assert!(settled >= 200 * MIB && gave(&events) >= 200 * MIB, "{settled}");
    let ended =
        events.iter().find_map(|event| if let Event::ProcessExit(event) = event { Some(&event.peak) } else { None });
    let of_gpu = ended.unwrap().iter().find(|peak| peak.place == "gpu0").unwrap();
    assert!(of_gpu.limit >= Some(of_gpu.peak_used), "a peak of more than was allowed: {of_gpu:?}");
    is_whole(high);
}

/// As one does that loads a model: each question costs.
#[test]
fn who_takes_block_after_block_asks_for_more_at_a_time() {
    let machine = Machine::new("1x480MiB");
    let low = machine.holder(machine.neighbour(0, 10), 440);
    let mut high = machine.start(machine.neighbour(0, 90));
    for _ in 0..20 {
        takes(&mut high, 20);
    }
    let page = machine.until(&high, "its memory", |page| page.levels.live_bytes == 400 * MIB);
    assert_eq!((held(&page, 0), page.levels.residence.on_host), (400 * MIB, 0), "{page:?}");
    is_whole(low);
    let questions = asked(&is_whole(high));
    // Each but the first few is for as much again as all before it; on a busy machine some of them come so late that they begin anew.
    assert!(questions.len() <= 15 && questions.iter().max() > questions.first(), "{questions:?}");
}

/// Each call fails now and then on the way to plain memory and to the host.
#[test]
fn a_call_of_the_driver_that_fails_during_a_recall_to_the_host_loses_nothing() {
    let machine = Machine::new("1x320MiB");
    let mut low = machine.holder(machine.neighbour(0, 10), 280);
    let mut all = Vec::new();
    let out = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemcpyDtoHAsync_v2"];
    let back = ["cuMemcpyHtoDAsync_v2", "cuMemHostRegister_v2", "cuStreamCreate", "cuStreamSynchronize"];
    for (at, call) in (0..).zip(out.into_iter().chain(back)) {
        let code = [2, 999][at % 2];
        let faults: Vec<String> = (0..3).map(|time| format!("{call}:{}={code}", 1 + at % 3 + time * 2)).collect();
        assert_eq!(low.ask(&format!("faults {}", faults.join(","))), "armed");
        // Another one each time: who asks again at once asks for more, and has it then.
        let mut high = machine.start(machine.neighbour(0, 90));
        takes(&mut high, 18);
        assert_eq!(low.ask("check"), "0", "{call}");
        all.push(high);
    }
    let near = |high: &Running| held(&machine.until(high, "its memory", |page| page.levels.live_bytes == 18 * MIB), 0);
    let near: u64 = all.iter().map(near).sum();
    assert!(near >= 140 * MIB, "{near}");
    let questions: Vec<_> = all.into_iter().map(|high| asked(&is_whole(high))).collect();
    assert!(questions.iter().filter(|asked| !asked.is_empty()).count() >= 9, "{questions:?}");
    is_whole(low);
}

/// Before it has allocated anything, and where a context takes more than the reserve.
#[test]
fn memory_of_a_lower_priority_gives_way_to_the_context_of_a_higher_one() {
    let machine = Machine::new("2x320MiB");
    let low = machine.holder(machine.neighbour(0, 10), 290);
    let mut high = machine.start(machine.neighbour(0, 90).env("SIMCUDA_CONTEXT_MIB", "100"));
    takes(&mut high, 20);
    let page = machine.until(&high, "its memory", |page| held(page, 0) >= 20 * MIB);
    assert_eq!(held(&page, 1), 0, "{page:?}");
    assert!(gave(&is_whole(low)) >= 70 * MIB);
    is_whole(high);
}

#[test]
fn memory_of_a_programs_own_making_asks_and_gives_way_as_well() {
    let machine = Machine::new("2x320MiB");
    let mut low = machine.start(machine.neighbour(0, 10));
    assert_eq!(low.ask("own 120"), "made");
    assert_eq!(low.ask("own 100"), "made");
    machine.until(&low, "its memory", |page| own(page, 0) >= 220 * MIB);
    let mut high = machine.start(machine.neighbour(0, 90));
    assert_eq!(high.ask("own 160"), "made");
    machine.until(&high, "its memory", |page| own(page, 0) >= 160 * MIB);
    machine.until(&low, "what is left", |page| own(page, 0) <= 120 * MIB);
    is_whole(low);
    is_whole(high);
}

#[test]
fn a_loan_is_called_back_by_who_works_there_and_what_is_guaranteed_stays() {
    let machine = Machine::new("2x320MiB");
    let debtor = machine.debtor(240);
    // Of the same priority.
    let owner = machine.holder(machine.neighbour(1, 50).env("GPUPOOL_GUARANTEE", "1:80MiB"), 200);
    machine.until(&owner, "its memory", |page| held(page, 1) >= 200 * MIB && held(page, 0) == 0);
    machine.until(&debtor, "what is left", |page| held(page, 1) <= 100 * MIB);
    // Above all others, and what is guaranteed is left.
    let mut above = machine.start(machine.neighbour(1, 100));
    takes(&mut above, 280);
    let page = machine.until(&owner, "what is left", |page| held(page, 1) < 200 * MIB);
    assert!(held(&page, 1) >= 80 * MIB, "{page:?}");
    drop(is_whole(above));
    // Within what it is guaranteed a program is above all.
    let high = machine.holder(machine.neighbour(0, 90), 280);
    let low = machine.neighbour(0, 1).env("GPUPOOL_GUARANTEE", "0:60MiB");
    let low = machine.holder(low, 60);
    machine.until(&low, "its memory", |page| held(page, 0) >= 60 * MIB);
    for program in [debtor, owner, high, low] {
        is_whole(program);
    }
}

/// Also where that is the middle of a chunk, which moves whole.
#[test]
fn nobody_goes_below_what_it_is_guaranteed() {
    for guarantee in [60, 200] {
        let machine = Machine::new("2x320MiB");
        let low = machine.neighbour(0, 1).env("GPUPOOL_GUARANTEE", format!("0:{guarantee}MiB"));
        let mut low = machine.start(low);
        takes(&mut low, 240);
        machine.until(&low, "its memory", |page| held(page, 0) >= 240 * MIB);
        let mut high = machine.start(machine.neighbour(0, 90));
        takes(&mut high, 240);
        let page = machine.until(&high, "its memory", |page| held(page, 0) + held(page, 1) >= 240 * MIB);
        assert!(held(&page, 0) <= (320 - guarantee) * MIB, "{page:?}");
        assert!(held(&machine.page(&low), 0) >= guarantee * MIB);
        is_whole(low);
        is_whole(high);
    }
}

#[test]
fn a_priority_that_is_changed_counts_from_then_on() {
    let machine = Machine::new("2x320MiB");
    let first = machine.holder(machine.neighbour(0, 50), 240);
    let mut second = machine.holder(machine.neighbour(0, 50), 20);
    takes(&mut second, 80);
    machine.until(&second, "memory elsewhere", |page| held(page, 1) + page.levels.residence.on_host >= 40 * MIB);
    assert_eq!(held(&machine.page(&first), 0), 240 * MIB, "equals do not give way");
    let (told, done) = machine.told(&format!("priority --json {} 60", second.pid()));
    assert!(done && told["changes"][0]["new"] == "60", "{told}");
    takes(&mut second, 80);
    machine.until(&first, "what is left", |page| held(page, 0) < 200 * MIB);
    is_whole(first);
    is_whole(second);
}

#[test]
fn who_does_not_answer_delays_nobody_for_long_and_loses_nothing() {
    let machine = Machine::new("2x320MiB");
    let mut hung = machine.holder(machine.neighbour(0, 10), 80);
    let stopped = machine.holder(machine.neighbour(0, 10), 80);
    let killed = machine.holder(machine.neighbour(0, 10), 80);
    hung.ask("spin");
    stopped.signal(libc::SIGSTOP);
    let mut high = machine.start(machine.neighbour(0, 90).env("GPUPOOL_RECALL_WAIT", "1s"));
    takes(&mut high, 120);
    machine.until(&high, "its memory", |page| page.levels.live_bytes == 120 * MIB);
    killed.signal(libc::SIGKILL);
    drop(killed);
    hung.ask("release");
    stopped.signal(libc::SIGCONT);
    takes(&mut high, 60);
    // By its own clock: who is heard and frees nothing is waited for three times as long as it says, and the next one is asked in the rest of that.
    let waited = |event: &Event| if let Event::RecallAsk(event) = event { Some(event.microseconds) } else { None };
    let waited: Vec<u64> = is_whole(high).iter().filter_map(waited).collect();
    assert!(!waited.is_empty() && waited.iter().all(|time| *time < 4_000_000), "{waited:?}");
    for program in [hung, stopped] {
        is_whole(program);
    }
    assert_eq!(machine.files().iter().filter(|name| name.ends_with(".call")).count(), 0, "{:?}", machine.files());
}

#[test]
fn two_that_ask_each_other_at_once_do_not_wait_for_each_other() {
    let machine = Machine::new("2x320MiB");
    // Each has borrowed from the other's GPU.
    let debtor = |gpu: u32| {
        let limit = format!("{gpu}:2MiB");
        let program =
            machine.holder(machine.neighbour(gpu, 50).env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_LIMIT", limit), 240);
        machine.until(&program, "a loan", |page| held(page, 1 - gpu) >= 230 * MIB);
        program
    };
    let mut programs = [debtor(0), debtor(1)];
    for program in &programs {
        assert!(machine.told(&format!("set --json {} limit=", program.pid())).1);
    }
    let begun = Instant::now();
    programs.iter_mut().for_each(|program| program.tell("take 120"));
    for program in &mut programs {
        let took: u64 = program.ask("check").parse().unwrap();
        assert!(took < 25_000, "{took} ms");
        assert_eq!(program.ask("check"), "0");
    }
    assert!(begun.elapsed() < Duration::from_secs(20));
    for (gpu, program) in (0..).zip(&programs) {
        machine.until(program, "memory at home", |page| held(page, gpu) >= 100 * MIB);
    }
    for program in &mut programs {
        // One answer is left, of the last question.
        assert_eq!(program.ask("fork"), "0");
        assert_eq!(program.ask("check"), "child ended with 7");
    }
    programs.into_iter().for_each(|mut program| {
        assert_eq!(program.ask("check"), "0");
        let (status, _folder) = program.end();
        assert!(status.success(), "{status}");
    });
}

/// This process, as one that runs under gpupool would look: a page that says it has a gigabyte of the GPU and matters least.
fn pretend(machine: &Machine, like: &Snapshot) -> (Folder, std::path::PathBuf) {
    let nowhere = machine.folder.path().join("none");
    let roots = Roots {
        session: Some(machine.folder.path().to_owned()),
        run: nowhere.clone(),
        temporary: nowhere.clone(),
        sessions: nowhere,
    };
    let (folder, _) = Folder::own(&roots).unwrap();
    let mut process = like.process.clone();
    process.identity = gpupool_metrics::Identity::own().unwrap();
    let (mut page, path) = gpupool_metrics::Map::create(&folder, &process).unwrap();
    let mut levels = like.levels.clone();
    levels.priority = 0;
    levels.updated = gpupool_metrics::now();
    assert!(page.levels(&levels));
    (folder, path)
}

#[test]
fn a_process_that_lies_about_what_it_freed_is_not_believed() {
    let machine = Machine::new("2x320MiB");
    let holder = machine.holder(machine.neighbour(0, 90), 240);
    let (folder, path) = pretend(&machine, &machine.page(&holder));
    let name = path.with_extension("call").file_name().unwrap().to_str().unwrap().to_owned();
    let mut other = machine.start(machine.neighbour(0, 50));
    other.tell("take 160");
    let socket =
        eventually("a question", || Socket::<OwnedFd>::connect_in(std::os::fd::AsFd::as_fd(&folder.fd()), &name).ok());
    let mut buffer = [0; ROOM];
    let received = socket.receive_by(&mut buffer, Instant::now() + Duration::from_secs(20)).unwrap();
    let Ok(Request::GiveWay { bytes, priority: 50, .. }) = Request::decode(&buffer[..received.bytes]) else {
        panic!("another question")
    };
    assert!(bytes >= 80 * MIB, "{bytes}");
    let none: [OwnedFd; 0] = [];
    let lie = Reply::Done { moved: 1 << 40, stayed: 0, to_disk: 0, stored: 0, microseconds: 1, waited: 0 };
    socket.send(&lie.encode(), &none).unwrap();
    // It has asked the driver, and lies elsewhere in part.
    other.ask("check").parse::<u64>().unwrap();
    assert_eq!(other.ask("check"), "0");
    machine.until(&other, "memory elsewhere", |page| held(page, 1) + page.levels.residence.on_host >= 80 * MIB);
    // Nor does nonsense do harm.
    other.tell("take 60");
    let socket =
        eventually("a question", || Socket::<OwnedFd>::connect_in(std::os::fd::AsFd::as_fd(&folder.fd()), &name).ok());
    socket.receive_by(&mut buffer, Instant::now() + Duration::from_secs(20)).unwrap();
    socket.send(&[0xff; 300], &none).unwrap();
    drop(socket);
    assert_eq!(other.ask("check"), "0");
    std::fs::remove_file(path).unwrap();
    let _ = other.ask("check");
    let (status, _folder) = other.end();
    assert!(status.success(), "{status}");
    is_whole(holder);
}

/// The question that is put to this process, by whoever has the turn.
#[track_caller]
fn question(folder: &Folder, name: &str) -> (Socket<OwnedFd>, u64) {
    eventually("a question", || {
        // The door of the question before may be there still.
        let socket = Socket::<OwnedFd>::connect_in(std::os::fd::AsFd::as_fd(&folder.fd()), name).ok()?;
        let mut buffer = [0; ROOM];
        let received = socket.receive_by(&mut buffer, Instant::now() + Duration::from_secs(20)).ok()?;
        match Request::decode(&buffer[..received.bytes]) {
            Ok(Request::GiveWay { bytes, .. }) => Some((socket, bytes)),
            _ => None,
        }
    })
}

fn done(moved: u64) -> Vec<u8> {
    Reply::Done { moved, stayed: 0, to_disk: 0, stored: 0, microseconds: 1, waited: 0 }.encode()
}

/// It would be found by nobody then, and wait for all of `GPUPOOL_RECALL_WAIT`.
#[test]
fn who_has_been_heard_does_not_remove_the_door_of_who_comes_next() {
    let machine = Machine::new("2x320MiB");
    let holder = machine.holder(machine.neighbour(0, 90), 240);
    let mut askers = [machine.holder(machine.neighbour(0, 50), 4), machine.holder(machine.neighbour(0, 50), 4)];
    let (folder, path) = pretend(&machine, &machine.page(&holder));
    let name = path.with_extension("call").file_name().unwrap().to_str().unwrap().to_owned();
    let [first, second] = &mut askers;
    first.tell("take 160");
    eventually("a door", || path.with_extension("call").exists().then_some(()));
    let traced = Traced::begin(first.pid() as i32).unwrap();
    let socket = std::thread::scope(|scope| {
        let heard = scope.spawn(|| question(&folder, &name).0);
        // Others may ask from here on.
        traced.ends_call(libc::SYS_fcntl, |given| given[1] == libc::F_OFD_SETLK as u64);
        second.tell("take 160");
        let listens = || {
            let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
            sockets.lines().any(|line| line.contains(&name) && line.split(' ').nth(3) == Some("00010000")).then_some(())
        };
        eventually("the next door", listens);
        drop(traced);
        heard.join().unwrap()
    });
    let none: [OwnedFd; 0] = [];
    socket.send(&done(0), &none).unwrap();
    first.ask("check").parse::<u64>().unwrap();
    let (socket, _) = question(&folder, &name);
    socket.send(&done(0), &none).unwrap();
    assert!(second.ask("check").parse::<u64>().unwrap() < 20_000);
    std::fs::remove_file(path).unwrap();
    for program in askers {
        is_whole(program);
    }
    is_whole(holder);
}

/// A job that was put to sleep by its terminal may be so for hours.
#[test]
fn who_is_stopped_while_it_has_the_turn_is_passed_by_and_asks_when_it_goes_on() {
    let machine = Machine::new("2x320MiB");
    let holder = machine.holder(machine.neighbour(0, 90), 240);
    let mut askers = [machine.holder(machine.neighbour(0, 50), 4), machine.holder(machine.neighbour(0, 50), 4)];
    let (folder, path) = pretend(&machine, &machine.page(&holder));
    let name = path.with_extension("call").file_name().unwrap().to_str().unwrap().to_owned();
    let [stopped, other] = &mut askers;
    stopped.tell("take 160");
    eventually("a door", || path.with_extension("call").exists().then_some(()));
    stopped.signal(libc::SIGSTOP);
    eventually("a stop", || gpupool_metrics::stat(stopped.pid()).filter(|stat| stat.state == b'T'));
    other.tell("take 160");
    let none: [OwnedFd; 0] = [];
    let answers = |asker: &Running| {
        let socket = eventually("its question", || {
            let socket = Socket::<OwnedFd>::connect_in(std::os::fd::AsFd::as_fd(&folder.fd()), &name).ok()?;
            (socket.peer().unwrap().pid == asker.pid()).then_some(socket)
        });
        let mut buffer = [0; ROOM];
        socket.receive_by(&mut buffer, Instant::now() + Duration::from_secs(20)).unwrap();
        socket.send(&done(0), &none).unwrap();
    };
    answers(other);
    assert!(other.ask("check").parse::<u64>().unwrap() < 20_000);
    stopped.signal(libc::SIGCONT);
    answers(stopped);
    assert!(stopped.ask("check").parse::<u64>().is_ok());
    std::fs::remove_file(path).unwrap();
    askers.into_iter().for_each(|program| drop(is_whole(program)));
    is_whole(holder);
}

/// Who waits for its turn longer than `GPUPOOL_RECALL_WAIT` has not been met with silence.
#[test]
fn those_who_ask_one_are_served_in_the_order_in_which_they_came() {
    let machine = Machine::new("2x320MiB");
    let holder = machine.holder(machine.neighbour(0, 90), 240);
    let wait = Duration::from_secs(1);
    let asker = |_| machine.holder(machine.neighbour(0, 50).env("GPUPOOL_RECALL_WAIT", "1s"), 2);
    let mut askers: Vec<Running> = (0..5).map(asker).collect();
    let (folder, path) = pretend(&machine, &machine.page(&holder));
    let name = path.with_extension("call").file_name().unwrap().to_str().unwrap().to_owned();
    let page = std::os::unix::fs::MetadataExt::ino(&path.metadata().unwrap());
    let in_line = || {
        let locks = std::fs::read_to_string("/proc/locks").unwrap();
        locks.lines().filter(|line| line.contains("OFDLCK") && line.contains(&format!(":{page} "))).count()
    };
    for (at, asker) in askers.iter_mut().enumerate() {
        asker.tell("take 160");
        eventually("a place in the line", || (in_line() > at).then_some(()));
    }
    let none: [OwnedFd; 0] = [];
    for asker in &mut askers {
        let (socket, _) = question(&folder, &name);
        assert_eq!(socket.peer().unwrap().pid, asker.pid());
        // As long as it takes to stop a program and copy.
        std::thread::sleep(wait / 3);
        socket.send(&done(0), &none).unwrap();
    }
    std::fs::remove_file(path).unwrap();
    for mut asker in askers {
        asker.ask("check").parse::<u64>().unwrap();
        let silent = |event: &Event| if let Event::RecallAsk(event) = event { event.silent } else { 0 };
        let events = is_whole(asker);
        assert_eq!(events.iter().map(silent).sum::<u32>(), 0, "{events:?}");
        assert!(!asked(&events).is_empty());
    }
    is_whole(holder);
}

/// A page is up to a second old.
#[test]
fn who_has_more_than_its_page_says_is_asked_for_it_and_waited_for() {
    let machine = Machine::new("2x320MiB");
    let holder = machine.holder(machine.neighbour(0, 90), 240);
    let mut like = machine.page(&holder);
    for place in &mut like.levels.places.rows {
        place.held = if place.is_gpu() && place.number == 0 { 20 * MIB } else { 0 };
    }
    let (folder, path) = pretend(&machine, &like);
    let name = path.with_extension("call").file_name().unwrap().to_str().unwrap().to_owned();
    let mut other = machine.start(machine.neighbour(0, 50));
    other.tell("take 160");
    let question = || {
        eventually("a question", || {
            // The door of the question before may be there still.
            let socket = Socket::<OwnedFd>::connect_in(std::os::fd::AsFd::as_fd(&folder.fd()), &name).ok()?;
            let mut buffer = [0; ROOM];
            let received = socket.receive_by(&mut buffer, Instant::now() + Duration::from_secs(20)).ok()?;
            match Request::decode(&buffer[..received.bytes]) {
                Ok(Request::GiveWay { bytes, .. }) => Some((socket, bytes)),
                _ => None,
            }
        })
    };
    let none: [OwnedFd; 0] = [];
    let done = |moved| Reply::Done { moved, stayed: 0, to_disk: 0, stored: 0, microseconds: 1, waited: 0 }.encode();
    let (socket, bytes) = question();
    assert_eq!(bytes, 20 * MIB, "what its page says");
    socket.send(&done(20 * MIB), &none).unwrap();
    drop(socket);
    let (socket, bytes) = question();
    assert!(bytes >= 60 * MIB, "{bytes}");
    socket.send(&Reply::Progress { done: 0, total: bytes }.encode(), &none).unwrap();
    // As long as it takes to stop a program and copy.
    std::thread::sleep(Duration::from_millis(400));
    drop(holder);
    socket.send(&done(bytes), &none).unwrap();
    other.ask("check").parse::<u64>().unwrap();
    std::fs::remove_file(path).unwrap();
    let events = is_whole(other);
    assert_eq!(asked(&events).first().map(|(_, freed)| *freed), Some(20 * MIB + bytes), "{:?}", asked(&events));
}

/// Longer than `GPUPOOL_RECALL_WAIT`, which is for those who are not heard.
#[test]
fn who_is_heard_to_free_memory_is_waited_for() {
    let machine = Machine::new("2x320MiB");
    let holder = machine.holder(machine.neighbour(0, 90), 240);
    let (folder, path) = pretend(&machine, &machine.page(&holder));
    let name = path.with_extension("call").file_name().unwrap().to_str().unwrap().to_owned();
    let wait = Duration::from_millis(1200);
    let mut other = machine.start(machine.neighbour(0, 50).env("GPUPOOL_RECALL_WAIT", "1200ms"));
    other.tell("take 160");
    let socket =
        eventually("a question", || Socket::<OwnedFd>::connect_in(std::os::fd::AsFd::as_fd(&folder.fd()), &name).ok());
    let mut buffer = [0; ROOM];
    socket.receive_by(&mut buffer, Instant::now() + Duration::from_secs(20)).unwrap();
    let (begun, none) = (Instant::now(), [] as [OwnedFd; 0]);
    for done in 1.. {
        if begun.elapsed() > wait {
            break;
        }
        socket.send(&Reply::Progress { done, total: 1 << 40 }.encode(), &none).unwrap();
        std::thread::sleep(wait / 20);
    }
    drop(holder);
    socket
        .send(
            &Reply::Done { moved: 240 * MIB, stayed: 0, to_disk: 0, stored: 0, microseconds: 1, waited: 0 }.encode(),
            &none,
        )
        .unwrap();
    other.ask("check").parse::<u64>().unwrap();
    std::fs::remove_file(path).unwrap();
    let events = is_whole(other);
    assert_eq!(asked(&events).first().map(|(_, freed)| *freed), Some(240 * MIB), "{:?}", asked(&events));
}

#[test]
fn a_program_without_gpupool_gets_what_others_only_borrow() {
    let machine = Machine::new("2x320MiB");
    let mut debtor = machine.debtor(240);
    let mut bare = machine.start(machine.bare(1));
    let page = machine.until(&debtor, "an empty GPU 1", |page| held(page, 1) == 0);
    assert_eq!(page.levels.live_bytes, 240 * MIB);
    takes(&mut bare, 300);
    assert_eq!((bare.ask("check"), debtor.ask("check")), ("0".to_owned(), "0".to_owned()));
    // What it goes on to need elsewhere lies elsewhere.
    takes(&mut debtor, 40);
    assert_eq!(held(&machine.page(&debtor), 1), 0);
    assert!(gave(&is_whole(debtor)) >= 236 * MIB);
    let (status, _folder) = bare.end();
    assert!(status.success(), "{status}");
}

/// A page is rung for its process alone, so that what was lent a moment ago may not have been looked at yet.
#[test]
fn a_program_without_gpupool_that_comes_right_after_the_memory_gets_it_as_well() {
    let machine = Machine::new("2x320MiB");
    let low = machine.holder(machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1"), 240);
    let agent = super::upset::agent(&low);
    let mut suspends = machine.command(&format!("suspend --to peers {}", low.pid())).spawn().unwrap();
    // It has said that it is done, and has looked at nothing since.
    agent.ends_call(libc::SYS_sendmsg, |_| machine.page(&low).levels.suspended > 0);
    let mut bare = machine.start(machine.bare(1));
    assert_eq!(bare.ask("check"), "0", "it has begun");
    drop(agent);
    assert!(suspends.wait().unwrap().success());
    let page = machine.until(&low, "an empty GPU 1", |page| held(page, 1) == 0);
    assert!(held(&page, 0) == 0 && page.levels.suspended > 0, "{page:?}");
    takes(&mut bare, 280);
    assert!(machine.told(&format!("resume --json {}", low.pid())).1);
    is_whole(low);
    let (status, _folder) = bare.end();
    assert!(status.success(), "{status}");
}

/// It has run for so long that it did not come after what is borrowed from now on.
#[track_caller]
pub(super) fn was_there_before(bare: &Running) {
    let ticks = gpupool_metrics::stat(bare.pid()).unwrap().started as f64;
    eventually("one that has been there for a while", || {
        let up: f64 = std::fs::read_to_string("/proc/uptime").unwrap().split(' ').next()?.parse().ok()?;
        (up - ticks / 100.0 > 4.0).then_some(())
    });
}

/// It had what it needed when somebody borrowed the rest, and needs more.
#[test]
fn a_program_without_gpupool_that_was_there_before_the_loan_grows_by_what_is_kept_free() {
    let machine = Machine::new("2x320MiB");
    let mut bare = machine.start(machine.bare(1));
    takes(&mut bare, 20);
    was_there_before(&bare);
    let debtor = machine.debtor(260);
    for round in 1..=5 {
        takes(&mut bare, 16);
        // 16 MiB are free again, beside its context and what it has.
        machine.until(&debtor, "room", |page| held(page, 1) <= (320 - 16 - 4 - 20 - 16 * round) * MIB);
    }
    assert_eq!(bare.ask("check"), "0");
    assert!(gave(&is_whole(debtor)) >= 40 * MIB);
    let (status, _folder) = bare.end();
    assert!(status.success(), "{status}");
}

#[test]
fn many_with_priorities_take_and_drop_at_random_and_lose_nothing() {
    // Longer and with more by GPUPOOL_FLEET_SECONDS and GPUPOOL_FLEET_PROCESSES.
    let number = |name: &str, otherwise: u32| std::env::var(name).map_or(otherwise, |text| text.parse().unwrap());
    let (seconds, count) = (number("GPUPOOL_FLEET_SECONDS", 3), number("GPUPOOL_FLEET_PROCESSES", 5));
    let machine = Machine::new("2x160MiB");
    let program = |number: u32| machine.start(machine.neighbour(number % 2, 10 + number * 80 / count));
    let mut programs: Vec<Running> = (0..count).map(program).collect();
    let mut killed = machine.start(machine.neighbour(0, 40));
    // Whoever comes while others fill its GPU that matter more gets no context there.
    for program in programs.iter_mut().chain([&mut killed]) {
        assert_eq!(program.ask("check"), "0", "it has begun");
    }
    for (number, program) in (1..).zip(&mut programs) {
        program.tell(&format!("churn {seconds} {} 80", number * 7919));
    }
    killed.tell("churn 600 3 80");
    std::thread::sleep(Duration::from_secs(u64::from(seconds) / 2));
    killed.signal(libc::SIGKILL);
    drop(killed);
    for program in &mut programs {
        let answer = program.ask("check");
        let numbers: Vec<u64> = answer.split(' ').map(|number| number.parse().unwrap()).collect();
        let [rounds, wrong, refused, longest] = numbers[..] else { panic!("{answer}") };
        assert!(rounds > 0 && (wrong, refused) == (0, 0) && longest < 30_000, "{answer}");
        assert_eq!(program.ask("check"), "0");
        println!("rounds, wrong words, refusals, longest allocation in ms: {answer}");
    }
    for program in programs {
        let (status, folder) = program.end();
        assert!(status.success(), "{status}");
        let report = std::fs::read_to_string(folder.path().join("report")).unwrap();
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["violations"], serde_json::json!([]), "{report}");
    }
    // The next one that comes removes what the killed one left.
    is_whole(machine.holder(machine.neighbour(0, 50), 4));
    assert_eq!(machine.files(), Vec::<String>::new());
}

#[test]
fn processes_that_come_and_go_leave_no_file_behind() {
    // All thousand by GPUPOOL_FLEET_COMERS.
    let all: u32 = std::env::var("GPUPOOL_FLEET_COMERS").map_or(16, |text| text.parse().unwrap());
    let machine = Machine::new("2x160MiB");
    let low = machine.holder(machine.neighbour(0, 10), 100);
    let mut killed = Vec::new();
    for number in 0..all / 4 {
        let mut comers: Vec<Running> = (0..4).map(|at| machine.start(machine.neighbour(0, 20 + at))).collect();
        comers.iter_mut().for_each(|comer| comer.tell("take 40"));
        // Some are killed while they ask.
        for (at, comer) in comers.into_iter().enumerate() {
            if at as u32 == number % 4 {
                comer.signal(libc::SIGKILL);
                killed.push(comer.pid());
            } else {
                let (status, _folder) = comer.end();
                assert!(status.success(), "{status}");
            }
        }
    }
    is_whole(low);
    is_whole(machine.holder(machine.neighbour(0, 50), 4));
    // Who was killed before it had said whose its page is has left one that nobody takes away for a minute: it could be a process of another PID namespace.
    let is_begun =
        |name: &String| killed.iter().any(|pid| name.starts_with(&format!(".{pid}-")) && name.ends_with(".new"));
    let left: Vec<String> = machine.files().into_iter().filter(|name| !is_begun(name)).collect();
    assert_eq!(left, Vec::<String>::new());
}

/// The thread that asks waits for as long as `GPUPOOL_RECALL_WAIT` allows; the others work.
#[test]
fn a_program_works_on_while_one_of_its_threads_waits_for_an_answer() {
    let machine = Machine::new("2x320MiB");
    let mut program = machine.start(machine.run().env("GPUPOOL_RECALL_WAIT", "30s"));
    super::at_work(&mut program, 1);
    let holder = machine.holder(machine.neighbour(0, 90), 220);
    let (folder, path) = pretend(&machine, &machine.page(&holder));
    let name = path.with_extension("call").file_name().unwrap().to_str().unwrap().to_owned();
    program.ask("allocate 120");
    let (socket, _) = question(&folder, &name);
    for _ in 0..3 {
        goes_on(&mut program);
    }
    assert_eq!(program.ask("allocated"), "no");
    let none: [OwnedFd; 0] = [];
    socket.send(&done(0), &none).unwrap();
    std::fs::remove_file(path).unwrap();
    eventually("the allocation", || (program.ask("allocated") == "yes").then_some(()));
    super::ends_well(program);
    is_whole(holder);
}

/// Neither one that connects and says nothing, nor one that takes no answer.
#[test]
fn a_program_works_on_while_it_answers_whoever_is_silent() {
    let machine = Machine::new("1x1GiB");
    let mut program = machine.start(machine.run());
    super::at_work(&mut program, 1);
    let gpu = machine.page(&program).levels.gpu(0).unwrap().uuid;
    let silent = super::begin_to_say(&machine.page_file(), &[], None);
    goes_on(&mut program);
    drop(silent);
    let request = Request::GiveWay { gpu, bytes: 20 * MIB, priority: 90, patience: 20_000 }.encode();
    let deaf = super::begin_to_say(&machine.page_file(), &request, None);
    goes_on(&mut program);
    machine.until(&program, "memory on the host", |page| page.levels.residence.on_host >= 20 * MIB);
    goes_on(&mut program);
    drop(deaf);
    super::ends_well(program);
}

#[test]
fn who_works_while_others_take_its_loans_goes_on() {
    let machine = Machine::new("2x320MiB");
    let mut borrower = machine.start(machine.run().env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_LIMIT", "0:4MiB"));
    super::at_work(&mut borrower, 1);
    machine.until(&borrower, "a loan", |page| held(page, 1) >= 16 * MIB);
    let before = page_of(machine.folder.path(), borrower.pid()).unwrap();
    assert!(held(&before, 1) >= 16 * MIB);
    let mut owner = machine.start(machine.neighbour(1, 50));
    takes(&mut owner, 280);
    goes_on(&mut borrower);
    is_whole(owner);
    super::ends_well(borrower);
}

#[test]
fn ranks_that_no_launcher_tells_of_keep_to_their_own_gpus() {
    let machine = Machine::new("2x320MiB");
    let rank = |gpu: u32| machine.rank(gpu).env("GPUPOOL_LIMIT", format!("{gpu}:16MiB")).env("GPUPOOL_MOVE", "auto");
    let mut ranks = [machine.start(rank(0)), machine.start(rank(1))];
    keep_to_their_own_gpus(&machine, &mut ranks, [0, 1]);
    // They wait for each other, so the time that moves may take is that of both together.
    for program in &ranks {
        let log = std::fs::read_to_string(program.log()).unwrap();
        assert!(log.contains("moves may take 2.5% of this process's time"), "{log}");
    }
    let text = String::from_utf8(machine.gpupool("ps").stdout).unwrap();
    assert!(text.contains("gpu0 ") && text.contains("gpu1 ") && !text.contains("GPU-"), "{text}");
    // One that is named GPUs has them.
    let mut other = machine.start(rank(0).env("GPUPOOL_DEVICES", "0,1"));
    takes(&mut other, 40);
    machine.until(&other, "a loan", |page| held(page, 1) >= 20 * MIB);
    ranks.into_iter().chain([other]).for_each(|program| drop(is_whole(program)));
}

/// Of another session, started by another process, another program, or another notebook of one server: each looks like a rank, and is nobody's.
#[test]
fn programs_that_only_look_like_ranks_lend_each_other_their_gpus() {
    let renamed = tempfile::tempdir().unwrap();
    let renamed = renamed.path().join("another");
    std::fs::copy(harness::program("neighbour"), &renamed).unwrap();
    // Two scripts of one interpreter.
    let folder = tempfile::tempdir().unwrap();
    let python = folder.path().join("python3");
    std::fs::copy(harness::program("neighbour"), &python).unwrap();
    let server = std::process::id().to_string();
    for is in
        ["another session", "another parent", "another program", "another script", "another notebook", "another kernel"]
    {
        let machine = Machine::new("2x320MiB");
        let of = |run: Run, gpu: u32| {
            let run = machine.with_priority(run, 50).env("GPUPOOL_IDLE", "100ms");
            run.env("GPUPOOL_LIMIT", format!("{gpu}:16MiB"))
        };
        // Of IPython, as an editor starts them in its own session: the number is by what each sees.
        let notebook =
            |list: &str| Run::command(&python).args("-m ipykernel_launcher").env("CUDA_VISIBLE_DEVICES", list);
        let first = match is {
            "another script" => Run::command(&python).arg("0"),
            "another notebook" => notebook("0,1"),
            "another kernel" => Run::program("neighbour").arg("0").env("JPY_PARENT_PID", &server),
            _ => Run::program("neighbour").arg("0"),
        };
        let mut first = machine.start(of(first, 0));
        let other = match is {
            "another script" => Run::command(&python).arg("1"),
            "another notebook" => notebook("1,0"),
            "another kernel" => Run::program("neighbour").arg("1").env("JPY_PARENT_PID", &server),
            "another session" => Run::command("setsid").arg(harness::program("neighbour")).arg("1"),
            // It starts the program, and waits for it.
            "another parent" => {
                Run::command("sh").arg("-c").arg("\"$0\" 1; exit $?").arg(harness::program("neighbour"))
            }
            _ => Run::command(&renamed).arg("1"),
        };
        let mut other = machine.start(of(other, if is == "another notebook" { 0 } else { 1 }));
        takes(&mut other, 24);
        takes(&mut first, 24);
        let others = |machine: &Machine| machine.files().iter().filter(|name| name.ends_with(".page")).count();
        eventually("the other one's page", || (others(&machine) == 2).then_some(()));
        // It looks who else is there once a second at most, and each time that its page says something new.
        for mib in [26, 28, 30] {
            takes(&mut first, 2);
            machine.until(&first, "a look", |page| page.levels.live_bytes == mib * MIB);
        }
        takes(&mut first, 40);
        let page = machine.until(&first, "a loan", |page| page.levels.live_bytes == 70 * MIB);
        let log = std::fs::read_to_string(first.log()).unwrap();
        assert!(held(&page, 1) >= 40 * MIB && page.levels.residence.on_host == 0, "{is}: {page:?}");
        assert!(!log.contains("home_only"), "{is}: {log}");
        assert_eq!(other.ask("check"), "0");
        is_whole(first);
        is_whole(other);
    }
}

/// Whose arguments differ, each sees its own GPU first.
#[test]
fn one_script_that_an_interpreter_runs_twice_is_ranks_of_one_job_and_says_why_memory_lies_on_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let python = folder.path().join("python3");
    std::fs::copy(harness::program("neighbour"), &python).unwrap();
    let machine = Machine::new("2x320MiB");
    let rank = |list: &str| {
        let run = machine.with_priority(Run::command(&python).args("-u 0").arg(format!("--gpus={list}")), 50);
        run.env("GPUPOOL_LIMIT", "0:16MiB").env("GPUPOOL_IDLE", "100ms").env("CUDA_VISIBLE_DEVICES", list)
    };
    let mut ranks = [machine.start(rank("0,1")), machine.start(rank("1,0"))];
    keep_to_their_own_gpus(&machine, &mut ranks, [0, 0]);
    for program in &ranks {
        let log = std::fs::read_to_string(program.log()).unwrap();
        assert!(
            log.contains("was taken for one of several ranks of a job") && log.contains("gpupool set PID devices=0,1"),
            "{log}"
        );
        assert!(!log.contains("no GPU that can lend has room"), "{log}");
    }
    ranks.into_iter().for_each(|program| drop(is_whole(program)));
}

/// As Dask-CUDA starts its workers: each sees all GPUs, its own one first.
#[test]
fn workers_that_see_the_gpus_in_turn_keep_to_their_own_and_are_told_apart() {
    let machine = Machine::new("2x320MiB");
    let worker =
        |list: &str| machine.neighbour(0, 50).env("GPUPOOL_LIMIT", "0:16MiB").env("CUDA_VISIBLE_DEVICES", list);
    let mut workers = [machine.start(worker("0,1")), machine.start(worker("1,0"))];
    keep_to_their_own_gpus(&machine, &mut workers, [0, 0]);
    let text = String::from_utf8(machine.gpupool("ps").stdout).unwrap();
    for program in &workers {
        let gpu = uuid(&machine.page(program), 0);
        assert!(text.contains(&format!("gpu0 is {gpu}\n")), "{text}");
    }
    workers.into_iter().for_each(|program| drop(is_whole(program)));
}

/// They have nothing, and know of each other.
fn know_of_each_other(programs: &mut [Running; 2]) {
    for program in programs.iter_mut() {
        takes(program, 24);
    }
    for program in programs.iter() {
        let said = || std::fs::read_to_string(program.log()).unwrap_or_default().contains("home_only").then_some(());
        eventually("a program that knows of the other", said);
    }
    // What it took before they knew of each other lay where there was room.
    programs.iter_mut().for_each(|program| assert_eq!(program.ask("drop"), "dropped"));
}

/// Once they know of each other, what a program's GPU has no room for goes to the host alone; `own`: the GPU of each, by its own numbering.
fn keep_to_their_own_gpus(machine: &Machine, programs: &mut [Running; 2], own: [u32; 2]) {
    know_of_each_other(programs);
    for (gpu, program) in own.into_iter().zip(programs.iter_mut()) {
        machine.until(program, "an empty GPU of the other", |page| held(page, 1 - gpu) == 0);
        takes(program, 40);
    }
    for (gpu, program) in own.into_iter().zip(programs) {
        let page = machine.until(program, "memory on the host", |page| page.levels.residence.on_host >= 20 * MIB);
        assert_eq!(held(&page, 1 - gpu), 0, "{page:?}");
    }
}

/// Ranks of a launcher that says how many there are.
pub(super) fn launched(machine: &Machine, number: u32, count: u32, priority: u32) -> Run {
    let run = machine.neighbour(number, priority).env("LOCAL_RANK", number.to_string());
    run.env("LOCAL_WORLD_SIZE", count.to_string())
}

#[test]
fn ranks_are_lent_the_gpus_that_nobody_works_on_until_somebody_does() {
    let machine = Machine::new("4x320MiB");
    let mut ranks = [0, 1].map(|number| machine.holder(launched(&machine, number, 2, 50), 480));
    for (other, program) in [1, 0].into_iter().zip(&ranks) {
        let page = machine.until(program, "loans", |page| held(page, 2) + held(page, 3) >= 160 * MIB);
        assert_eq!((held(&page, other), page.levels.residence.on_host), (0, 0), "{page:?}");
    }
    // One that cannot ask, and one that can, each as soon as it is there.
    let mut bare = machine.start(machine.bare(2));
    assert_eq!(bare.ask("check"), "0", "it has begun");
    let left = |machine: &Machine, ranks: &[Running], gpu| {
        ranks.iter().for_each(|program| {
            let page = machine.until(program, "an empty GPU", |page| held(page, gpu) == 0);
            assert_eq!(page.levels.live_bytes, 480 * MIB, "{page:?}");
        });
    };
    left(&machine, &ranks, 2);
    takes(&mut bare, 280);
    let mut sibling = machine.start(machine.neighbour(3, 50));
    assert_eq!(sibling.ask("check"), "0", "it has begun");
    left(&machine, &ranks, 3);
    takes(&mut sibling, 280);
    machine.until(&sibling, "its memory", |page| held(page, 3) >= 280 * MIB);
    // What they go on to need lies on the host.
    for (number, program) in [0, 1].into_iter().zip(&mut ranks) {
        takes(program, 40);
        let page = machine.until(program, "more on the host", |page| page.levels.live_bytes == 520 * MIB);
        assert!(page.levels.residence.on_host >= 200 * MIB, "{page:?}");
        (0..4).filter(|gpu| *gpu != number).for_each(|gpu| assert_eq!(held(&page, gpu), 0, "{page:?}"));
    }
    assert_eq!(bare.ask("check"), "0");
    ranks.into_iter().chain([sibling]).for_each(|program| drop(is_whole(program)));
    assert!(bare.end().0.success());
}

/// Neither those of ranks that have not started, nor those that a rank sees at another place than others do.
#[test]
fn no_rank_is_lent_the_gpu_of_another_one() {
    let on_host = |machine: &Machine, program: &Running, mib: u64| {
        let page = machine.until(program, "memory on the host", |page| page.levels.residence.on_host >= mib * MIB);
        (1..3).for_each(|gpu| assert_eq!(held(&page, gpu), 0, "{page:?}"));
    };
    let machine = Machine::new("3x320MiB");
    let first = machine.holder(launched(&machine, 0, 3, 50), 400);
    on_host(&machine, &first, 80);
    drop(is_whole(first));
    let second = launched(&machine, 0, 2, 50).env("LOCAL_RANK", "1").env("CUDA_VISIBLE_DEVICES", "1,2,0");
    let second = machine.holder(second, 400);
    on_host(&machine, &second, 80);
    drop(is_whole(second));
    // With one of them as a GPU of its own that nobody counted: NVML tells of it.
    let third = machine.holder(machine.neighbour(2, 50), 20);
    let first = machine.holder(launched(&machine, 0, 2, 50), 400);
    on_host(&machine, &first, 80);
    [first, third].into_iter().for_each(|program| drop(is_whole(program)));
}

#[test]
fn the_rank_that_matters_more_has_the_gpu_that_nobody_works_on() {
    let machine = Machine::new("3x320MiB");
    let mut low = machine.holder(launched(&machine, 0, 2, 10), 540);
    machine.until(&low, "a loan", |page| held(page, 2) >= 220 * MIB);
    let high = machine.holder(launched(&machine, 1, 2, 90), 540);
    let page = machine.until(&high, "a loan", |page| held(page, 2) >= 220 * MIB);
    assert_eq!((held(&page, 0), page.levels.residence.on_host), (0, 0), "{page:?}");
    machine.until(&low, "what is left", |page| held(page, 2) <= 80 * MIB);
    takes(&mut low, 40);
    let page = machine.page(&high);
    assert_eq!(page.levels.residence.on_host, 0, "{page:?}");
    let events = is_whole(low);
    assert!(gave(&events) >= 140 * MIB && asked(&events).iter().all(|(_, freed)| *freed == 0), "{:?}", asked(&events));
    assert_eq!(gave(&is_whole(high)), 0);
}

/// What a program makes itself, and programs that no launcher tells of.
#[test]
fn ranks_that_no_launcher_tells_of_are_lent_gpus_that_nobody_works_on() {
    let machine = Machine::new("3x320MiB");
    let rank = |gpu: u32| machine.rank(gpu).env("GPUPOOL_LIMIT", format!("{gpu}:16MiB"));
    let mut ranks = [machine.start(rank(0)), machine.start(rank(1))];
    know_of_each_other(&mut ranks);
    for (other, program) in [1, 0].into_iter().zip(&mut ranks) {
        machine.until(program, "an empty GPU of the other", |page| held(page, other) == 0);
        takes(program, 40);
        program.ask("own 40");
        let page = machine.until(program, "loans", |page| held(page, 2) >= 60 * MIB);
        assert_eq!((held(&page, other), page.levels.residence.on_host), (0, 0), "{page:?}");
    }
    ranks.into_iter().for_each(|program| drop(is_whole(program)));
}

/// Something happens to a GPU, as NVML tells it, again and again until the program knows: it hears of what comes after its first look.
#[track_caller]
fn happens(machine: &Machine, events: &std::path::Path, line: &str, program: &Running) -> Snapshot {
    use std::io::Write;
    eventually("a closed GPU", || {
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(events).unwrap();
        file.write_all(format!("{line}\n").as_bytes()).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        page_of(machine.folder.path(), program.pid())
            .filter(|page| !page.levels.places.rows.is_empty() && at(page, 1).drained)
    })
}

/// Each kind of such an error, and not for who works there either. Of a row that is to be replaced (63) nobody says that what is in it can be read.
#[test]
fn nothing_is_copied_from_a_gpu_after_a_grave_error_that_nobody_asks_for() {
    let machine = Machine::new("2x512MiB");
    let grave = [48, 63, 64, 74, 79, 94, 95];
    let debtor = |xid: u32| {
        let events = machine.folder.path().join(format!("events-{xid}"));
        std::fs::write(&events, "").unwrap();
        let run = machine.neighbour(0, 50).env("SIMCUDA_EVENTS", &events).env("GPUPOOL_DEVICES", "0,1");
        let program = machine.holder(run.env("GPUPOOL_LIMIT", "0:2MiB"), 20);
        machine.until(&program, "a loan", |page| held(page, 1) >= 18 * MIB);
        (program, events)
    };
    let programs: Vec<_> = grave.into_iter().map(|xid| (xid, debtor(xid))).collect();
    std::thread::scope(|scope| {
        for (xid, (program, events)) in &programs {
            let machine = &machine;
            scope.spawn(move || happens(machine, events, &format!("1 xid {xid}"), program));
        }
    });
    // One that works there and lacks memory.
    let mut owner = machine.start(machine.neighbour(1, 90));
    takes(&mut owner, 440);
    machine.until(&owner, "memory elsewhere", |page| page.levels.live_bytes == 440 * MIB && held(page, 1) < 440 * MIB);
    for (xid, (program, _)) in programs {
        let page = machine.page(&program);
        assert!(held(&page, 1) >= 18 * MIB && at(&page, 1).drained, "{xid}: {page:?}");
        assert_eq!(gave(&is_whole(program)), 0, "{xid}");
    }
    is_whole(owner);
}

#[test]
fn a_gpu_with_rows_to_be_replaced_is_left_and_one_with_a_grave_error_is_left_alone() {
    let machine = Machine::new("2x320MiB");
    let events = machine.folder.path().join("events");
    std::fs::write(&events, "").unwrap();
    let debtor = || {
        let run = machine.neighbour(0, 50).env("SIMCUDA_EVENTS", &events).env("GPUPOOL_DEVICES", "0,1");
        let program = machine.holder(run.env("GPUPOOL_LIMIT", "0:2MiB"), 40);
        machine.until(&program, "a loan", |page| held(page, 1) >= 36 * MIB);
        program
    };
    let mut program = debtor();
    happens(&machine, &events, "1 xid 79", &program);
    takes(&mut program, 40);
    let page = machine.until(&program, "memory elsewhere", |page| page.levels.residence.on_host >= 36 * MIB);
    assert!((36 * MIB..=42 * MIB).contains(&held(&page, 1)), "nothing left it, and nothing went there: {page:?}");
    // Somebody asks for it.
    assert!(machine.told("drain --json 1").1);
    machine.until(&program, "an empty GPU 1", |page| held(page, 1) == 0);
    drop(is_whole(program));
    machine.told("undrain --json 1");

    let program = debtor();
    happens(&machine, &events, "1 remap corrected pending", &program);
    let page = machine.until(&program, "an empty GPU 1", |page| held(page, 1) == 0);
    assert!(at(&page, 1).drained && page.levels.residence.on_host >= 36 * MIB, "{page:?}");
    is_whole(program);
}

/// Rows that are to be replaced come with an Xid as well. Where the errors in them were corrected, all of it can be read.
#[test]
fn a_gpu_is_left_for_rows_that_can_be_read_and_left_alone_for_one_that_cannot() {
    let machine = Machine::new("2x320MiB");
    let recorded = |kind: &str| {
        let events = machine.folder.path().join(format!("events-{kind}"));
        // Such a row was there before: what was in it was lost then.
        std::fs::write(&events, "1 remap uncorrected\n").unwrap();
        let run = machine.neighbour(0, 50).env("SIMCUDA_EVENTS", &events).env("GPUPOOL_DEVICES", "0,1");
        let program = machine.holder(run.env("GPUPOOL_LIMIT", "0:2MiB"), 40);
        machine.until(&program, "a loan", |page| held(page, 1) >= 36 * MIB);
        happens(&machine, &events, &format!("1 xid 63\n1 remap {kind} pending"), &program);
        program
    };
    let program = recorded("corrected");
    machine.until(&program, "an empty GPU 1", |page| held(page, 1) == 0 && page.levels.residence.on_host >= 36 * MIB);
    is_whole(program);
    let mut program = recorded("uncorrected");
    takes(&mut program, 40);
    let page = machine.until(&program, "memory elsewhere", |page| page.levels.residence.on_host >= 36 * MIB);
    assert!((36 * MIB..=42 * MIB).contains(&held(&page, 1)), "nothing left it, and nothing went there: {page:?}");
    is_whole(program);
}
