//! What others than gpupool say of memory: that the machine is short of it, in systemd's protocol, and how much of a GPU a program may use.

use super::setup::{held, is_whole, takes};
use super::{MIB, Machine, at};
use gpupool_events::Event;
use harness::{Run, Running, eventually};
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

impl Machine {
    /// One that keeps what it frees.
    fn keeper(&self, watched: &Path) -> Run {
        let run = self.neighbour(0, 50).env("GPUPOOL_IDLE", "off").env("GPUPOOL_PINNED_IDLE", "10min");
        run.env("MEMORY_PRESSURE_WATCH", watched)
    }

    /// It has freed 60 MiB of its GPU and 8 MiB of pinned memory, which are kept.
    fn keeps(&self, program: &mut Running) {
        takes(program, 60);
        assert_eq!(program.ask("pin 8"), "unpinned");
        assert_eq!(program.ask("drop"), "dropped");
        self.until(program, "freed memory", |page| page.levels.live_bytes == 0 && held(page, 0) >= 60 * MIB);
    }

    /// All that it kept goes back once `say` has said so.
    #[track_caller]
    fn gives_back(&self, mut program: Running, say: impl FnOnce()) {
        self.keeps(&mut program);
        say();
        self.until(&program, "an empty pool", |page| held(page, 0) == 0 && page.levels.pinned.pinned < MIB);
        // Nothing else is said: what it frees is kept as before.
        self.keeps(&mut program);
        let told = |event: &Event| match event {
            Event::MemoryPressure(event) => Some((event.bytes, event.pinned)),
            _ => None,
        };
        let told: Vec<(u64, u64)> = is_whole(program).iter().filter_map(told).collect();
        let [(bytes, pinned)] = told[..] else { panic!("{told:?}") };
        assert!(bytes >= 60 * MIB && pinned >= 8 * MIB, "{told:?}");
    }
}

#[test]
fn what_is_kept_goes_back_when_a_fifo_says_that_memory_is_short() {
    let machine = Machine::new("1x320MiB");
    let path = machine.folder.path().join("pressure");
    let name = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the name ends with a zero.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let program = machine.start(machine.keeper(&path));
    // The words are not for a FIFO.
    machine.gives_back(program, || {
        let open = || std::fs::OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&path).ok();
        eventually("somebody who reads", open).write_all(b"short").unwrap();
    });
}

#[test]
fn what_is_kept_goes_back_when_a_socket_says_that_memory_is_short() {
    let machine = Machine::new("1x320MiB");
    let path = machine.folder.path().join("pressure");
    let listener = UnixListener::bind(&path).unwrap();
    let run = machine.keeper(&path).env("MEMORY_PRESSURE_WRITE", "c29tZSAyMDAwMDAgMjAwMDAwMAA=");
    let mut program = machine.start(run);
    takes(&mut program, 2);
    let (mut socket, _) = listener.accept().unwrap();
    let mut words = [0; 20];
    socket.read_exact(&mut words).unwrap();
    assert_eq!(&words, b"some 200000 2000000\0");
    assert_eq!(program.ask("drop"), "dropped");
    machine.gives_back(program, || socket.write_all(b"short").unwrap());
}

/// The kernel's own file, by which a control group tells of it. That the machine is short of memory cannot be had without harm to who runs beside; that it is short
/// of processors is told in the same way.
#[test]
fn what_is_kept_goes_back_when_the_kernel_says_so() {
    const WATCHED: &str = "/proc/pressure/cpu";
    let machine = Machine::new("1x320MiB");
    // Of two seconds a thousandth, so that users who are not root may ask for it.
    let run = machine.keeper(Path::new(WATCHED)).env("MEMORY_PRESSURE_WRITE", "c29tZSAyMDAwIDIwMDAwMDAA");
    let mut program = machine.start(run);
    let log = program.log();
    let log = || std::fs::read_to_string(&log).unwrap();
    takes(&mut program, 60);
    assert_eq!(program.ask("pin 8"), "unpinned");
    assert_eq!(program.ask("drop"), "dropped");
    let trigger = std::fs::OpenOptions::new().read(true).write(true).open(WATCHED);
    if let Err(e) = trigger.and_then(|mut file| file.write_all(b"some 2000 2000000\0")) {
        eprintln!("{WATCHED}: {e}; what is kept stays, and the log says why");
        assert!(log().contains("MEMORY_PRESSURE_WATCH="), "{}", log());
        is_whole(program);
        return;
    }
    // More who have something to do than there are processors, so that somebody always waits.
    let is_over = AtomicBool::new(false);
    let threads = 2 * std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let empty = catch_unwind(AssertUnwindSafe(|| {
            eventually("what the kernel said", || log().contains("\"memory.pressure\"").then_some(()));
            machine.until(&program, "an empty pool", |page| held(page, 0) == 0 && page.levels.pinned.pinned < MIB);
        }));
        is_over.store(true, Ordering::Relaxed);
        empty.unwrap_or_else(|panic| resume_unwind(panic));
    });
    is_whole(program);
}

#[test]
fn a_program_that_is_to_watch_nothing_or_what_is_not_there_runs_as_ever() {
    let machine = Machine::new("1x320MiB");
    for (path, words, why) in [
        ("/dev/null", "!", None),
        ("/nowhere/at/all", "", Some("/nowhere/at/all: No such file or directory")),
        ("run/pressure", "", Some("run/pressure: it is no absolute path")),
        ("/proc/pressure/memory", "!", Some("/proc/pressure/memory: MEMORY_PRESSURE_WRITE is no base64")),
    ] {
        let run = machine.keeper(Path::new(path)).env("MEMORY_PRESSURE_WRITE", words);
        let mut program = machine.start(run);
        machine.keeps(&mut program);
        let log = std::fs::read_to_string(program.log()).unwrap();
        assert_eq!(log.contains("MEMORY_PRESSURE_WATCH="), why.is_some(), "{log}");
        assert!(log.contains(why.unwrap_or_default()), "{log}");
        is_whole(program);
    }
}

#[test]
fn an_ordinary_file_is_not_watched_and_not_written_to() {
    let machine = Machine::new("1x320MiB");
    let path = machine.folder.path().join("ordinary");
    std::fs::write(&path, "somebody's").unwrap();
    let mut program = machine.start(machine.keeper(&path).env("MEMORY_PRESSURE_WRITE", "REFNQUdF"));
    machine.keeps(&mut program);
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(log.contains("it is an ordinary file, which tells of nothing"), "{log}");
    is_whole(program);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "somebody's");
}

#[test]
fn the_smallest_of_what_others_allow_binds_and_is_told() {
    let machine = Machine::new("2x320MiB");
    let limits = [
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=64M,1=1G"),
        ("CUDA_DEVICE_MEMORY_LIMIT", "200m"),
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "100m"),
    ];
    let run = limits.iter().fold(machine.neighbour(0, 50), |run, (name, value)| run.env(name, value));
    let mut program = machine.start(run);
    for _ in 0..5 {
        takes(&mut program, 20);
    }
    let page = machine.until(&program, "its memory", |page| page.levels.live_bytes == 100 * MIB);
    assert_eq!((at(&page, 0).limit, at(&page, 1).limit), (64 * MIB, 200 * MIB), "{page:?}");
    assert!(held(&page, 0) <= 64 * MIB, "{page:?}");
    // A limit of the user's may be less, and is not more.
    for (said, limit) in [("0:40MiB", 40), ("0:300MiB", 64), ("", 64)] {
        let (told, done) = machine.told(&format!("set --json {} limit={said}", program.pid()));
        assert!(done, "{told}");
        machine.until(&program, "the limit", |page| at(page, 0).limit == limit * MIB);
    }
    let log = std::fs::read_to_string(program.log()).unwrap();
    let told = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT lets this process use 64.0 MiB of GPU 0";
    assert_eq!(log.matches(told).count(), 1, "{log}");
    is_whole(program);

    let mut doctor = machine.command("doctor --json");
    let ended = doctor.envs(limits).env("GPUPOOL_LIMIT", "1:90MiB").output().unwrap();
    let told: Value = serde_json::from_slice(&ended.stdout).unwrap();
    let check = told["checks"].as_array().unwrap().iter().find(|check| check["name"] == "budgets").unwrap();
    assert_eq!(
        (&check["facts"][0]["bytes"], &check["facts"][1]["source"]),
        (&(64 * MIB).into(), &"GPUPOOL_LIMIT".into())
    );
    let what = check["what"].as_str().unwrap();
    assert!(what.contains(&format!("{} of the 320.0 MiB", told_size(64))) && what.contains("of GPU 1"), "{what}");
}

/// Of its own, before anybody has looked at what the GPUs are.
#[test]
fn what_others_allow_binds_the_first_memory_of_a_program_as_well() {
    let machine = Machine::new("2x320MiB");
    let mut program = machine.start(machine.neighbour(0, 50).env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=64M"));
    assert_eq!(program.ask("own 100"), "made");
    let page = machine.until(&program, "its memory", |page| held(page, 0) + held(page, 1) >= 100 * MIB);
    assert!(held(&page, 0) <= 64 * MIB, "{page:?}");
    is_whole(program);
}

fn told_size(mib: u64) -> String {
    format!("{mib}.0 MiB")
}
