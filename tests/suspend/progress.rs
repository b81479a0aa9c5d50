//! What `gpupool suspend`, `resume` and `checkpoint` say meanwhile, on a terminal and where there is none.

use super::{MIB, ends_well, suspended};
use harness::{Running, artifact_folder, eventually};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// More than the time that a program leaves between two messages about how far it is.
const PACE: Duration = Duration::from_millis(120);

/// A command whose stderr is a terminal, and all that it has written there.
struct OnTerminal {
    child: Child,
    written: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
}

impl OnTerminal {
    /// Of a user's session.
    fn begin(session: &Path, arguments: &str) -> Self {
        let (mut ours, mut theirs) = (-1, -1);
        let none = std::ptr::null_mut();
        // SAFETY: both numbers are locals, and NULL asks for no name and leaves settings and size as they are.
        let opened = unsafe { libc::openpty(&raw mut ours, &raw mut theirs, none, none.cast(), none.cast()) };
        assert_eq!(opened, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: made above, and nobody else has them.
        let (ours, theirs) = unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
        let mut command = Command::new(artifact_folder().join("gpupool"));
        command.args(arguments.split(' ')).env("XDG_RUNTIME_DIR", session);
        let child = command.env_remove("LD_PRELOAD").stdout(Stdio::piped()).stderr(theirs).spawn().unwrap();
        // The command keeps the other end open no longer than that has it.
        drop(command);
        let written = Arc::new(Mutex::new(String::new()));
        let (mut ours, to) = (ours, Arc::clone(&written));
        let reader = std::thread::spawn(move || {
            let mut some = [0; 4096];
            // It fails once nobody has the other end.
            while let Ok(bytes @ 1..) = ours.read(&mut some) {
                to.lock().unwrap().push_str(&String::from_utf8_lossy(&some[..bytes]));
            }
        });
        Self { child, written, reader }
    }

    fn written(&self) -> String {
        self.written.lock().unwrap().clone()
    }

    /// Its end: what it wrote to stdout and to the terminal.
    fn ends(self) -> (String, String) {
        let ended = self.child.wait_with_output().unwrap();
        self.reader.join().unwrap();
        let written = self.written.lock().unwrap().clone();
        assert!(ended.status.success(), "{written}");
        (String::from_utf8(ended.stdout).unwrap(), written)
    }
}

/// The lines that one after the other stood there: how many bytes of how many, and how many a second.
fn lines(written: &str) -> Vec<(String, String, String)> {
    let line = |line: &str| {
        let (done, rest) = line.trim_end().split_once(" of ")?;
        let (total, rate) = rest.split_once(", ")?;
        Some((done.to_owned(), total.to_owned(), rate.strip_suffix("/s")?.to_owned()))
    };
    written.split('\r').filter_map(line).collect()
}

/// Whether all that was written there is gone from the line again.
fn is_wiped(written: &str) -> bool {
    written.ends_with("\r\x1b[K")
}

/// It is told how far this command is, as each program stands for a while at the first call of this name: of so many MiB. What it says at its end.
#[track_caller]
fn is_told(programs: &mut [Running], session: &Path, arguments: &str, call: &str, mib: u64) -> String {
    for program in &mut *programs {
        // One of the calls that it takes lasts, so that there is something to be told in between.
        assert_eq!(program.ask(&format!("hold {call}")), "it will");
    }
    let command = OnTerminal::begin(session, arguments);
    for program in &mut *programs {
        eventually("a call that stands", || (program.ask("stands") == "yes").then_some(()));
    }
    let total = |(_, total, _): &(String, String, String)| *total == format!("{mib}.0 MiB");
    let first = eventually("how far it is", || lines(&command.written()).into_iter().find(total));
    // Before the call that stands, what the pool had kept of its place may be there: a page or two, for which nothing is made.
    let begun: f64 = first.0.split(' ').next().unwrap().parse().unwrap();
    assert!(begun <= 8.0 && (begun == 0.0 || first.0.ends_with("MiB")), "{first:?}");
    let until = Instant::now() + PACE;
    eventually("a time in which nothing is told", || (Instant::now() >= until).then_some(()));
    for program in &mut *programs {
        program.ask("let");
    }
    let (said, written) = command.ends();
    assert!(said.lines().count() == programs.len() && !said.contains('\r'), "{said:?}");
    let told = lines(&written);
    let is_some =
        |text: &str| text.split(' ').next().is_some_and(|number| number.parse().is_ok_and(|it: f64| it > 0.0));
    assert!(told.iter().any(|line| total(line) && is_some(&line.0) && is_some(&line.2)), "{written:?}");
    assert!(is_wiped(&written), "{written:?}");
    said
}

#[test]
fn of_an_image_it_is_told_as_well_how_far_it_is_and_how_fast() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 256");
    let (session, pid) = (program.session(), program.pid());
    let arguments = format!("checkpoint {pid} {}", folder.path().join("images").display());
    // From its copy to the disk, while the program goes on.
    let mut programs = [program];
    let said = is_told(&mut programs, &session, &arguments, "cuMemcpyDtoHAsync_v2", 256);
    assert!(said.contains("generation 1 in ") && said.contains("256.0 MiB of memory"), "{said}");
    let (said, written) = OnTerminal::begin(&session, &format!("{arguments} --json")).ends();
    let told: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(told["bytes"], 256 * MIB, "{told}");
    assert!(lines(&written).is_empty() || is_wiped(&written), "{written:?}");
    programs.into_iter().for_each(ends_well);
}

#[test]
fn of_several_programs_it_is_told_in_one_line_how_far_all_of_them_are() {
    let session = tempfile::tempdir().unwrap();
    std::fs::set_permissions(session.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let mut programs = [256, 128].map(|mib| {
        let mut program = suspended("1x1GiB").start(Some(session.path()));
        program.ask(&format!("keep {mib}"));
        program
    });
    let pids = programs.each_ref().map(|program| program.pid().to_string()).join(" ");
    for (arguments, call) in [("suspend --to host", "cuMemcpyDtoHAsync_v2"), ("resume", "cuMemCreate")] {
        is_told(&mut programs, session.path(), &format!("{arguments} {pids}"), call, 384);
    }
    for mut program in programs {
        program.ask("check");
        eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
        ends_well(program);
    }
}

#[test]
fn on_a_terminal_it_is_told_how_far_it_is_and_how_fast_and_nowhere_else() {
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 256");
    let (session, pid) = (program.session(), program.pid());
    let mut programs = [program];
    for (arguments, call, did) in
        [("suspend --to host", "cuMemcpyDtoHAsync_v2", "left"), ("resume", "cuMemCreate", "came back")]
    {
        let said = is_told(&mut programs, &session, &format!("{arguments} {pid}"), call, 256);
        assert!(said.contains(did), "{said:?}");
    }
    let [mut program] = programs;

    // What is read by programs is on stdout alone, whatever stderr is.
    let (said, _) = OnTerminal::begin(&session, &format!("suspend --json --to host {pid}")).ends();
    let told: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(told[0]["bytes"], 256 * MIB, "{told}");
    // And where it is no terminal, nothing is written to it.
    for arguments in ["resume", "suspend --to host", "resume --json"] {
        let ended = program.gpupool(&format!("{arguments} {}", program.pid()));
        assert!(ended.status.success() && ended.stderr.is_empty(), "{}", String::from_utf8_lossy(&ended.stderr));
    }
    program.ask("check");
    eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
    ends_well(program);
}
