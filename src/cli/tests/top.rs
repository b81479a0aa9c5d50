//! `gpupool top` on a terminal: it takes it, and gives it back however it ends.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::{Child, ExitStatus, Stdio};
use std::ptr::null_mut;

use crate::common::{gpupool, made, output, stderr, stdout};

/// `gpupool top` on a terminal of its own, once it has drawn something.
struct Shown {
    child: Child,
    terminal: File,
    said: String,
}

impl Shown {
    fn start(arguments: &[&str]) -> Shown {
        let (mut master, mut slave) = (-1, -1);
        let mut size = libc::winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: both outputs and the size are locals; the name and the settings may be NULL.
        let opened = unsafe { libc::openpty(&raw mut master, &raw mut slave, null_mut(), null_mut(), &raw mut size) };
        assert_eq!(opened, 0, "no pseudo-terminal: {}", std::io::Error::last_os_error());
        // SAFETY: openpty succeeded, so both are open descriptors of ours, owned once each.
        let (master, slave) = unsafe { (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        let mut command = gpupool();
        command.arg("top").args(arguments).env("TERM", "xterm").env("XDG_RUNTIME_DIR", "/nowhere");
        command.stdin(made(slave.try_clone())).stderr(Stdio::null()).stdout(slave);
        let child = made(command.spawn());
        // Without these the reading ends when the child does.
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut shown = Shown { child, terminal: File::from(master), said: String::new() };
        while !shown.said.contains("q leave") {
            assert!(shown.read(), "it ended: {:?}", shown.said);
        }
        shown
    }

    /// Some more of what it writes; `false` after its end, when Linux answers EIO.
    fn read(&mut self) -> bool {
        let mut some = [0; 4096];
        let read = self.terminal.read(&mut some).unwrap_or(0);
        self.said.push_str(&String::from_utf8_lossy(&some[..read]));
        read > 0
    }

    fn end(mut self) -> (ExitStatus, String) {
        while self.read() {}
        (made(self.child.wait()), self.said)
    }
}

/// The other screen of a terminal, and the first one again.
const ENTER: &str = "\x1b[?1049h";
const LEAVE: &str = "\x1b[?1049l";

#[test]
fn it_leaves_the_terminal_as_it_was() {
    let mut by_key = Shown::start(&["--interval", "1min"]);
    made(by_key.terminal.write_all(b"q"));
    let by_signal = Shown::start(&["--interval", "1min"]);
    // SAFETY: kill has no preconditions; the child was not waited for, so the number is its.
    assert_eq!(unsafe { libc::kill(by_signal.child.id() as i32, libc::SIGTERM) }, 0);
    for shown in [by_key, by_signal] {
        let (status, said) = shown.end();
        assert!(status.success(), "{status}: {said:?}");
        let (entered, left) = (said.find(ENTER), said.rfind(LEAVE));
        assert!(entered.is_some() && entered < left, "{said:?}");
        assert!(said.contains("gpupool top on "), "{said:?}");
    }
}

#[test]
fn without_a_terminal_it_says_what_to_do() {
    let mut command = gpupool();
    let refused = output(command.arg("top").stdin(Stdio::null()));
    assert_eq!(refused.status.code(), Some(2));
    assert_eq!(stdout(&refused), "");
    assert_eq!(
        stderr(&refused),
        "gpupool: top: stdout is no terminal; use --once or --json, and ssh -t to another machine\n"
    );
    for (option, value) in [("--interval", "1ms"), ("--interval", "soon"), ("--sort", "size")] {
        let refused = output(gpupool().args(["top", "--once", option, value]));
        assert_eq!(refused.status.code(), Some(2), "{option} {value}");
    }
}

#[test]
fn a_reader_that_leaves_ends_it() {
    let mut command = gpupool();
    command.args(["top", "--json", "--interval", "100ms"]).stdout(Stdio::piped());
    let mut child = made(command.spawn());
    let mut lines = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    made(std::io::BufRead::read_line(&mut lines, &mut line));
    assert!(line.starts_with("{\"at\":") && line.ends_with("]}\n"), "{line}");
    drop(lines);
    assert!(made(child.wait()).success());
}
