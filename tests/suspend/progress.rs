//! What `gpupool suspend` and `gpupool resume` say meanwhile, on a terminal and where there is none.

use super::{MIB, ends_well, suspended};
use harness::{Running, artifact_folder, eventually};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
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
    fn begin(program: &Running, arguments: &str) -> Self {
        let (mut ours, mut theirs) = (-1, -1);
        let none = std::ptr::null_mut();
        // SAFETY: both numbers are locals, and NULL asks for no name and leaves settings and size as they are.
        let opened = unsafe { libc::openpty(&raw mut ours, &raw mut theirs, none, none.cast(), none.cast()) };
        assert_eq!(opened, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: made above, and nobody else has them.
        let (ours, theirs) = unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
        let mut command = Command::new(artifact_folder().join("gpupool"));
        command.args(arguments.split(' ')).arg(program.pid().to_string()).env("XDG_RUNTIME_DIR", program.session());
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

#[test]
fn on_a_terminal_it_is_told_how_far_it_is_and_how_fast_and_nowhere_else() {
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 256");
    for (arguments, call, did) in
        [("suspend --to host", "cuMemcpyDtoHAsync_v2", "left"), ("resume", "cuMemCreate", "came back")]
    {
        // One of the calls that it takes lasts, so that there is something to be told in between.
        assert_eq!(program.ask(&format!("hold {call}")), "it will");
        let command = OnTerminal::begin(&program, arguments);
        eventually("a call that stands", || (program.ask("stands") == "yes").then_some(()));
        let total = |(_, total, _): &(String, String, String)| total == "256 MiB" || total == "256.0 MiB";
        let first = eventually("how far it is", || lines(&command.written()).into_iter().find(total));
        assert_eq!(first.0.split(' ').next(), Some("0"), "{first:?}");
        let until = Instant::now() + PACE;
        eventually("a time in which nothing is told", || (Instant::now() >= until).then_some(()));
        program.ask("let");
        let (said, written) = command.ends();
        assert!(said.lines().count() == 1 && said.contains(did) && !said.contains('\r'), "{said:?}");
        let told = lines(&written);
        let is_some =
            |text: &str| text.split(' ').next().is_some_and(|number| number.parse().is_ok_and(|it: f64| it > 0.0));
        assert!(told.iter().any(|line| total(line) && is_some(&line.0) && is_some(&line.2)), "{written:?}");
        assert!(is_wiped(&written), "{written:?}");
    }

    // What is read by programs is on stdout alone, whatever stderr is.
    let (said, _) = OnTerminal::begin(&program, "suspend --json --to host").ends();
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
