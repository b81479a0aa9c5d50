//! How those who need room are heard by those who have it: who is waited for and for how long, in which order, and what is believed.

use super::setup::{asked, gave, held, is_whole, takes};
use super::{MIB, Machine};
use gpupool_events::{Event, Reader};
use gpupool_metrics::folder::{Folder, Roots};
use gpupool_metrics::{Loan, Snapshot, Took};
use gpupool_wire::Socket;
use gpupool_wire::control::{ROOM, Reply, Request};
use harness::{Running, Traced, eventually, goes_on};
use std::io::BufReader;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

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

/// Once: it may be stopped for hours, and whoever reads the log is to find why what it has is not asked for.
#[test]
fn who_is_stopped_is_told_to_be_left_out() {
    let machine = Machine::new("2x320MiB");
    let stopped = machine.holder(machine.neighbour(0, 10), 240);
    stopped.signal(libc::SIGSTOP);
    let mut high = machine.start(machine.neighbour(0, 90));
    takes(&mut high, 80);
    takes(&mut high, 80);
    let log = std::fs::read_to_string(high.log()).unwrap();
    let told = format!("process {} is not asked for memory of GPU 0", stopped.pid());
    assert_eq!(log.matches(&told).count(), 1, "{log}");
    stopped.signal(libc::SIGCONT);
    is_whole(high);
    is_whole(stopped);
}

/// So many wait in the line of those who ask this program.
#[track_caller]
fn in_line(machine: &Machine, program: &Running, count: usize) {
    let name = |name: &String| name.starts_with(&format!("{}-", program.pid())) && name.ends_with(".page");
    let page = machine.folder.path().join("gpupool").join(machine.files().into_iter().find(name).unwrap());
    let page = format!(":{} ", std::os::unix::fs::MetadataExt::ino(&page.metadata().unwrap()));
    eventually("places in the line", || {
        let locks = std::fs::read_to_string("/proc/locks").unwrap();
        let places = locks.lines().filter(|line| line.contains("OFDLCK") && line.contains(&page)).count();
        (places >= count).then_some(())
    });
}

/// Each has seen the same free memory, and asks for what it lacks beside that.
#[test]
fn two_that_ask_one_at_the_same_moment_have_all_that_it_had() {
    let machine = Machine::new("2x320MiB");
    let mut owners = [0, 1].map(|_| machine.holder(machine.neighbour(1, 50), 2));
    let debtor = machine.debtor(240);
    let agent = super::upset::agent(&debtor);
    owners.iter_mut().for_each(|owner| owner.tell("take 100"));
    in_line(&machine, &debtor, 2);
    drop(agent);
    for owner in &mut owners {
        owner.hear().parse::<u64>().unwrap();
        let page = machine.until(owner, "its memory", |page| page.levels.live_bytes == 102 * MIB);
        assert_eq!((held(&page, 1), page.levels.residence.on_host), (102 * MIB, 0), "{page:?}");
    }
    owners.into_iter().for_each(|owner| drop(is_whole(owner)));
    is_whole(debtor);
}

/// No page says yet that it has any, and it answers between two steps only.
#[test]
fn who_asks_while_memory_comes_back_has_it() {
    let machine = Machine::new("2x320MiB");
    let mut next = machine.holder(machine.neighbour(1, 50), 2);
    let first = machine.start(machine.neighbour(1, 50));
    let mut debtor = machine.debtor(240);
    let mut first = first;
    takes(&mut first, 288);
    machine.until(&debtor, "all of it elsewhere", |page| held(page, 1) == 0);
    let settled = || {
        let log = Reader::new(BufReader::new(std::fs::File::open(debtor.log()).unwrap()));
        let of = |event| if let Event::HostSettle(event) = event { event.bytes } else { 0 };
        let sum: u64 = log.map_while(Result::ok).map(|record| of(record.event)).sum();
        (sum >= 200 * MIB).then_some(())
    };
    eventually("memory of the driver's on the host", settled);
    debtor.ask("hold cuMemCreate");
    first.signal(libc::SIGKILL);
    drop(first);
    eventually("memory on its way back", || (debtor.ask("stands") == "yes").then_some(()));
    next.tell("take 290");
    in_line(&machine, &debtor, 1);
    // Longer than anybody is waited for of whom it is not known that it has any.
    std::thread::sleep(Duration::from_millis(400));
    debtor.ask("let");
    next.hear().parse::<u64>().unwrap();
    let page = machine.until(&next, "its memory", |page| page.levels.live_bytes == 292 * MIB);
    assert_eq!((held(&page, 1), page.levels.residence.on_host), (292 * MIB, 0), "{page:?}");
    is_whole(next);
    is_whole(debtor);
}

/// No page tells of it yet, and it answers behind that only. What others have for themselves is asked for once it is clear that loans left no room.
#[test]
fn who_asks_while_a_loan_leaves_for_another_reason_has_it_and_nobody_else_gives_anything() {
    for command in ["set --json PID limit=1:0B,0:2MiB", "suspend --alone --json --to host PID"] {
        let machine = Machine::new("2x320MiB");
        let low = machine.holder(machine.neighbour(1, 20), 120);
        let mut high = machine.holder(machine.neighbour(1, 80), 2);
        let debtor = machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_LIMIT", "0:2MiB");
        let mut debtor = machine.start(debtor);
        takes(&mut debtor, 160);
        debtor.ask("hold cuMemUnmap");
        let line = command.replace("PID", &debtor.pid().to_string());
        std::thread::scope(|scope| {
            let command = scope.spawn(|| machine.told(&line));
            eventually("memory that leaves", || (debtor.ask("stands") == "yes").then_some(()));
            high.tell("take 120");
            // Who has asked for that is heard, and is in no line any more.
            in_line(&machine, &debtor, 2);
            // Longer than anybody is waited for of whom it is not known that it has any.
            std::thread::sleep(Duration::from_millis(400));
            debtor.ask("let");
            assert!(command.join().unwrap().1, "{line}");
        });
        high.hear().parse::<u64>().unwrap();
        let page = machine.until(&high, "its memory", |page| page.levels.live_bytes == 122 * MIB);
        assert_eq!((held(&page, 1), page.levels.residence.on_host), (122 * MIB, 0), "{page:?}");
        assert_eq!(gave(&is_whole(low)), 0, "{line}");
        is_whole(high);
        if line.starts_with("suspend") {
            assert!(machine.told(&format!("resume --json {}", debtor.pid())).1);
        }
        is_whole(debtor);
    }
}

/// It has more than the other one, and is asked before.
#[test]
fn who_can_give_is_asked_while_another_one_hangs_in_a_kernel() {
    let machine = Machine::new("2x320MiB");
    let [mut hung, idle] = [160, 80].map(|mib| machine.debtor(mib));
    hung.ask("spin");
    let mut owner =
        machine.start(machine.neighbour(1, 50).env("GPUPOOL_DEVICES", "1").env("GPUPOOL_RECALL_WAIT", "6s"));
    takes(&mut owner, 100);
    let page = machine.until(&owner, "its memory", |page| page.levels.live_bytes == 100 * MIB);
    assert_eq!((held(&page, 1), page.levels.residence.on_host), (100 * MIB, 0), "{page:?}");
    // What it hangs in costs once, and not each block anew.
    takes(&mut owner, 20);
    let questions: Vec<_> = is_whole(owner);
    let waited = |event: &Event| if let Event::RecallAsk(event) = event { Some(event.microseconds) } else { None };
    let waited: Vec<u64> = questions.iter().filter_map(waited).collect();
    assert!(waited.iter().filter(|time| **time > 1_500_000).count() <= 1, "{waited:?}");
    hung.ask("release");
    assert!(gave(&is_whole(idle)) > 0);
    assert_eq!(gave(&is_whole(hung)), 0);
}

/// As short as one that is to cost next to nothing.
#[test]
fn who_waits_for_a_short_time_asks_as_well() {
    let machine = Machine::new("2x320MiB");
    let debtor = machine.debtor(240);
    let mut owner = machine.start(machine.neighbour(1, 50).env("GPUPOOL_RECALL_WAIT", "60ms"));
    takes(&mut owner, 120);
    assert!(!asked(&is_whole(owner)).is_empty());
    is_whole(debtor);
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

/// This process, as one that runs under gpupool would look: a page that says it has what `like` has and matters least; its folder, itself and the name of
/// its door.
fn pretend(machine: &Machine, like: &Snapshot) -> (Folder, PathBuf, String) {
    pretend_that(machine, like, Took::default())
}

/// The same, where its page says that of what it takes of GPUs.
fn pretend_that(machine: &Machine, like: &Snapshot, took: Took) -> (Folder, PathBuf, String) {
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
    page.memory().tell_took(took);
    let door = path.with_extension("call").file_name().unwrap().to_str().unwrap().to_owned();
    (folder, path, door)
}

#[test]
fn a_process_that_lies_about_what_it_freed_is_not_believed() {
    let machine = Machine::new("2x320MiB");
    let holder = machine.holder(machine.neighbour(0, 90), 240);
    let (folder, path, name) = pretend(&machine, &machine.page(&holder));
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
    socket.send(&done(1 << 40), &none).unwrap();
    // The driver is asked, and after that it once more, since another one may have taken what came free; not for good.
    let is_over = AtomicBool::new(false);
    let lies = std::thread::scope(|scope| {
        let lies = scope.spawn(|| {
            let mut lies = 1;
            while !is_over.load(Ordering::Acquire) {
                let Ok(socket) = Socket::<OwnedFd>::connect_in(std::os::fd::AsFd::as_fd(&folder.fd()), &name) else {
                    std::thread::yield_now();
                    continue;
                };
                let mut buffer = [0; ROOM];
                // The door of the question before may be there still.
                if socket.receive_by(&mut buffer, Instant::now() + Duration::from_secs(20)).is_ok_and(|it| it.bytes > 0)
                {
                    lies += 1;
                    socket.send(&done(1 << 40), &none).unwrap();
                }
            }
            lies
        });
        other.hear().parse::<u64>().unwrap();
        is_over.store(true, Ordering::Release);
        lies.join().unwrap()
    });
    assert!((2..=16).contains(&lies), "{lies}");
    assert_eq!(other.ask("check"), "0");
    machine.until(&other, "memory elsewhere", |page| held(page, 1) + page.levels.residence.on_host >= 80 * MIB);
    // Nor does nonsense do harm.
    other.tell("take 60");
    let socket =
        eventually("a question", || Socket::<OwnedFd>::connect_in(std::os::fd::AsFd::as_fd(&folder.fd()), &name).ok());
    socket.receive_by(&mut buffer, Instant::now() + Duration::from_secs(20)).unwrap();
    socket.send(&[0xff; 300], &none).unwrap();
    drop(socket);
    other.hear().parse::<u64>().unwrap();
    assert_eq!(other.ask("check"), "0");
    std::fs::remove_file(path).unwrap();
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

/// GPU 0 is full: of one that works there and matters most, of one that matters little, and of one that only borrows as much there as is told, the page of which is like this.
fn full_by_a_loan(bytes: u64) -> (Machine, Running, Running, Snapshot) {
    let machine = Machine::new("2x320MiB");
    let filler = machine.holder(machine.neighbour(0, 90), 80);
    let low = machine.holder(machine.neighbour(0, 10), 100);
    let mut like = machine.page(&filler);
    for place in &mut like.levels.places.rows {
        place.held = if place.is_gpu() && place.number == 0 { bytes } else { 0 };
    }
    like.levels.loans.rows = vec![Loan { number: 0, on_host: false, borrower: 1, bytes }];
    (machine, filler, low, like)
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
    let (folder, path, name) = pretend(&machine, &machine.page(&holder));
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
    let (folder, path, name) = pretend(&machine, &machine.page(&holder));
    let [stopped, other] = &mut askers;
    stopped.tell("take 160");
    eventually("a door", || path.with_extension("call").exists().then_some(()));
    stopped.signal(libc::SIGSTOP);
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
    let wait = Duration::from_secs(3);
    let asker = |_| machine.holder(machine.neighbour(0, 50).env("GPUPOOL_RECALL_WAIT", "3s"), 2);
    let mut askers: Vec<Running> = (0..5).map(asker).collect();
    let (folder, path, name) = pretend(&machine, &machine.page(&holder));
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
        std::thread::sleep(wait / 4);
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

/// Its page tells of its loans up to a second late, and who works there is not to lose what it has for that.
#[test]
fn nobody_gives_its_own_while_others_have_loans_that_their_pages_do_not_tell_of_yet() {
    let (machine, filler, low, like) = full_by_a_loan(20 * MIB);
    let (folder, path, name) = pretend(&machine, &like);
    let mut asker = machine.start(machine.neighbour(0, 50));
    asker.tell("take 190");
    let (socket, bytes) = question(&folder, &name);
    assert_eq!(bytes, 20 * MIB, "what its page says");
    let none: [OwnedFd; 0] = [];
    let stays = Reply::Done { moved: bytes, stayed: 60 * MIB, to_disk: 0, stored: 0, microseconds: 1, waited: 0 };
    socket.send(&stays.encode(), &none).unwrap();
    let (socket, bytes) = question(&folder, &name);
    assert!((40 * MIB..=60 * MIB).contains(&bytes), "{bytes}");
    drop(filler);
    socket.send(&done(bytes), &none).unwrap();
    asker.hear().parse::<u64>().unwrap();
    std::fs::remove_file(path).unwrap();
    machine.until(&asker, "all of it near", |page| held(page, 0) == 190 * MIB);
    is_whole(asker);
    let given = is_whole(low);
    assert!(!given.iter().any(|event| matches!(event, Event::RecallGive(_))), "{given:?}");
}

/// As a program does that a scheduler ends to begin another one.
#[test]
fn what_one_had_that_ends_while_it_is_asked_is_waited_for() {
    let machine = Machine::new("2x320MiB");
    let ends = machine.holder(machine.neighbour(0, 10), 240);
    let agent = super::upset::agent(&ends);
    let mut asker = machine.start(machine.neighbour(0, 90).env("GPUPOOL_RECALL_WAIT", "30s"));
    asker.tell("take 200");
    in_line(&machine, &ends, 1);
    ends.signal(libc::SIGKILL);
    drop(agent);
    asker.hear().parse::<u64>().unwrap();
    machine.until(&asker, "all of it near", |page| held(page, 0) == 200 * MIB);
    let silent = |event: &Event| if let Event::RecallAsk(event) = event { event.silent } else { 0 };
    assert_eq!(is_whole(asker).iter().map(silent).sum::<u32>(), 0);
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
    let (folder, path, name) = pretend(&machine, &like);
    let mut other = machine.start(machine.neighbour(0, 50));
    other.tell("take 160");
    let none: [OwnedFd; 0] = [];
    let (socket, bytes) = question(&folder, &name);
    assert_eq!(bytes, 20 * MIB, "what its page says");
    socket.send(&done(20 * MIB), &none).unwrap();
    drop(socket);
    let (socket, bytes) = question(&folder, &name);
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
    // It was asked twice, and is one process.
    let processes =
        events.iter().find_map(|event| if let Event::RecallAsk(event) = event { Some(event.asked) } else { None });
    assert_eq!(processes, Some(1), "{events:?}");
}

/// Longer than `GPUPOOL_RECALL_WAIT`, which is for those who are not heard.
#[test]
fn who_is_heard_to_free_memory_is_waited_for() {
    let machine = Machine::new("2x320MiB");
    let holder = machine.holder(machine.neighbour(0, 90), 240);
    let (folder, path, name) = pretend(&machine, &machine.page(&holder));
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

/// It is heard for longer than `GPUPOOL_RECALL_WAIT`, comes to a standstill with nothing freed, and is the first that is asked.
#[test]
fn who_gives_for_longer_than_the_wait_and_then_stands_still_keeps_nobody_else_from_being_asked() {
    let machine = Machine::new("2x320MiB");
    let low = machine.holder(machine.neighbour(0, 10), 240);
    let (folder, path, name) = pretend(&machine, &machine.page(&low));
    let wait = Duration::from_secs(3);
    let mut high = machine.start(machine.neighbour(0, 90).env("GPUPOOL_RECALL_WAIT", "3s"));
    high.tell("take 160");
    let (socket, _) = question(&folder, &name);
    let (begun, none) = (Instant::now(), [] as [OwnedFd; 0]);
    for done in 1.. {
        socket.send(&Reply::Progress { done, total: 1 << 40 }.encode(), &none).unwrap();
        if begun.elapsed() > wait {
            break;
        }
        std::thread::sleep(wait / 20);
    }
    high.hear().parse::<u64>().unwrap();
    drop(socket);
    let page = machine.until(&high, "its memory", |page| page.levels.live_bytes == 160 * MIB);
    assert_eq!((held(&page, 0), page.levels.residence.on_host), (160 * MIB, 0), "{page:?}");
    std::fs::remove_file(path).unwrap();
    // Who was asked, what each gave and why not, in the log and in the report.
    let (pid, log) = (low.pid(), high.log());
    let report = String::from_utf8(machine.gpupool(&format!("report {}", log.display())).stdout).unwrap();
    let json = machine.gpupool(&format!("report --json {}", log.display())).stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let events = is_whole(high);
    let rows = |event: &Event| if let Event::RecallAsk(event) = event { event.whom.clone() } else { Vec::new() };
    let rows: Vec<_> = events.iter().flat_map(rows).collect();
    let [own, low_row] = [std::process::id(), pid].map(|pid| rows.iter().find(|row| row.pid == pid).unwrap());
    assert_eq!((own.freed, own.why.as_deref()), (0, Some("silent")), "{rows:?}");
    assert!(low_row.freed >= 80 * MIB && low_row.freed >= low_row.bytes && low_row.why.is_none(), "{rows:?}");
    assert!(report.contains("Other programs that were asked for memory of a GPU"), "{report}");
    assert!(report.contains("did not answer in time"), "{report}");
    let asked = json["processes"][0]["asked"].as_array().unwrap();
    assert!(asked.iter().any(|row| row["pid"] == pid && row["freed"] == low_row.freed), "{asked:?}");
    assert!(asked.iter().any(|row| row["pid"] == own.pid && row["why"]["silent"] == 1), "{asked:?}");
    is_whole(low);
}

/// What is on its way to become a block's is none yet. Its page says that it takes memory of a GPU that it does not work on, as it does from the driver's call on.
#[test]
fn who_makes_its_first_loan_at_that_very_moment_is_asked_again_and_nobody_gives_its_own() {
    let (machine, filler, low, like) = full_by_a_loan(80 * MIB);
    let (folder, path, name) = pretend_that(&machine, &like, Took { is_taking: true, last: 0 });
    let mut asker = machine.start(machine.neighbour(0, 50));
    asker.tell("take 190");
    let none: [OwnedFd; 0] = [];
    let (socket, _) = question(&folder, &name);
    socket.send(&done(0), &none).unwrap();
    let (socket, bytes) = question(&folder, &name);
    drop(filler);
    socket.send(&done(bytes), &none).unwrap();
    asker.hear().parse::<u64>().unwrap();
    std::fs::remove_file(path).unwrap();
    machine.until(&asker, "all of it near", |page| held(page, 0) == 190 * MIB);
    is_whole(asker);
    assert_eq!(gave(&is_whole(low)), 0);
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
    let (folder, path, name) = pretend(&machine, &machine.page(&holder));
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
    let request = Request::GiveWay { gpu, bytes: 20 * MIB, priority: 90, loans: false, patience: 20_000 }.encode();
    let deaf = super::begin_to_say(&machine.page_file(), &request, None);
    goes_on(&mut program);
    machine.until(&program, "memory on the host", |page| page.levels.residence.on_host >= 20 * MIB);
    goes_on(&mut program);
    drop(deaf);
    super::ends_well(program);
}
