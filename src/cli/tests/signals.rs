//! What a program inherits through `gpupool run` and `gpupool sim`, and which signals it gets: all of it as if nothing were
//! between it and whoever started it.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::common::{Bench, made, output, stderr, stdout};

/// The ways to start a program.
const WAYS: [(&str, &[&str]); 3] = [("run", &[]), ("run", &["--fail-on", "any"]), ("sim", &[])];
/// Those that stay between the program and its parent.
const WRAPPERS: [(&str, &[&str]); 2] = [("run", &["--fail-on", "any"]), ("sim", &[])];

/// Blocks every signal, says so, and names each one that it gets until SIGUSR2 ends it.
const NAME_SIGNALS: &str = r#"
#include <signal.h>
#include <stdio.h>
int main(void) {
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, 0);
    puts("ready");
    fflush(stdout);
    for (;;) {
        siginfo_t info;
        if (sigwaitinfo(&all, &info) < 0) continue;
        printf("%d\n", info.si_signo);
        if (fflush(stdout)) return 1;
        if (info.si_signo == SIGUSR2) return 0;
    }
}
"#;

/// A started command that writes lines.
struct Lines {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Lines {
    fn start(command: &mut Command) -> Lines {
        let mut child = made(command.stdout(Stdio::piped()).spawn());
        let out = BufReader::new(made(child.stdout.take().ok_or("no pipe")));
        let mut lines = Lines { child, out };
        assert_eq!(lines.next(), "ready");
        lines
    }

    /// The next line, or an empty one at the end.
    fn next(&mut self) -> String {
        assert!(!self.out.buffer().is_empty() || is_ready(&self.out), "nothing was said");
        let mut line = String::new();
        made(self.out.read_line(&mut line));
        line.trim_end().to_owned()
    }

    fn id(&self) -> i32 {
        self.child.id().cast_signed()
    }
}

/// Sends `signal` to a process, or with a negative number to a group.
fn send(to: i32, signal: i32) {
    // SAFETY: plain integers. Every process that is meant here is a child that was not waited for, so its number is its own.
    assert_eq!(unsafe { libc::kill(to, signal) }, 0);
}

/// A change to a command that takes effect when it starts.
fn at_start(command: &mut Command, change: fn()) {
    // SAFETY: every `change` of this file calls functions that are async-signal-safe and nothing else.
    unsafe {
        command.pre_exec(move || {
            change();
            Ok(())
        })
    };
}

fn ignore(signal: i32) {
    // SAFETY: SIG_IGN is no function that could run.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

#[test]
fn ignored_signals_and_the_mask_are_inherited() {
    let bench = Bench::new();
    let changes: [fn(); 4] = [
        || {},
        || ignore(libc::SIGPIPE),
        || [libc::SIGHUP, libc::SIGCHLD, libc::SIGINT].into_iter().for_each(ignore),
        || {
            let mut set = std::mem::MaybeUninit::uninit();
            // SAFETY: sigemptyset fills the set before it is used.
            unsafe {
                libc::sigemptyset(set.as_mut_ptr());
                libc::sigaddset(set.as_mut_ptr(), libc::SIGUSR1);
                libc::sigaddset(set.as_mut_ptr(), libc::SIGPIPE);
                libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            }
        },
    ];
    let show = ["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"];
    for (number, change) in changes.into_iter().enumerate() {
        let mut bare = Command::new(show[0]);
        crate::common::usual_signals(&mut bare);
        at_start(bare.args(&show[1..]), change);
        let bare = stdout(&output(&mut bare));
        for (way, flags) in WAYS {
            let mut command = bench.gpupool(way, flags);
            at_start(command.args(show), change);
            assert_eq!(stdout(&output(&mut command)), bare, "change {number} under {way} {flags:?}");
        }
    }
}

#[test]
fn closed_descriptors_stay_closed() {
    let bench = Bench::new();
    let show = ["sh", "-c", "exec 2>&-; for n in 0 1 2; do [ -e /proc/self/fd/$n ] && echo $n >&9; done; true"];
    for (way, flags) in WAYS {
        for closed in ["<&-", ">&-", "<&- >&-"] {
            // What the program says goes to descriptor 9, which is this test's pipe.
            let script = format!("exec 9>&1; exec {closed}; exec \"$@\"");
            let listed = |command: &mut Command| stdout(&output(command));
            let mut bare = Command::new("sh");
            let bare = listed(bare.args(["-c", &script, "sh"]).args(show));
            let gpupool = bench.gpupool(way, flags);
            let mut command = Command::new("sh");
            command.args(["-c", &script, "sh"]).arg(gpupool.get_program()).args(gpupool.get_args()).args(show);
            assert_eq!(listed(&mut command), bare, "{closed} under {way} {flags:?}");
        }
    }
}

#[test]
fn a_signal_to_the_group_arrives_once() {
    let bench = Bench::new();
    let program = bench.compile("signals", NAME_SIGNALS, &[]);
    for (way, flags) in WRAPPERS {
        let mut lines = Lines::start(bench.gpupool(way, flags).arg(&program).process_group(0));
        for _ in 0..50 {
            send(-lines.id(), libc::SIGTERM);
            assert_eq!(lines.next(), libc::SIGTERM.to_string(), "{way}");
            // To the wrapper alone: it has dealt with the one before when this one arrives.
            send(lines.id(), libc::SIGURG);
            assert_eq!(lines.next(), libc::SIGURG.to_string(), "{way}: a second SIGTERM");
        }
        send(-lines.id(), libc::SIGUSR2);
        assert_eq!(lines.next(), libc::SIGUSR2.to_string());
        assert_eq!(lines.child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn two_wrappers_pass_on_what_one_of_them_got_and_nothing_twice() {
    let bench = Bench::new();
    let program = bench.compile("signals", NAME_SIGNALS, &[]);
    let inner = bench.gpupool("run", &["--fail-on", "any"]);
    let mut outer = bench.gpupool("sim", &[]);
    outer.arg(inner.get_program()).args(inner.get_args()).arg(&program);
    let mut lines = Lines::start(outer.process_group(0));
    for _ in 0..20 {
        send(-lines.id(), libc::SIGINT);
        assert_eq!(lines.next(), libc::SIGINT.to_string());
        send(lines.id(), libc::SIGTERM);
        assert_eq!(lines.next(), libc::SIGTERM.to_string());
    }
    send(lines.id(), libc::SIGUSR2);
    assert_eq!(lines.next(), libc::SIGUSR2.to_string());
    assert_eq!(lines.child.wait().unwrap().code(), Some(0));
}

#[test]
fn every_signal_that_can_be_caught_reaches_the_program() {
    let bench = Bench::new();
    let program = bench.compile("signals", NAME_SIGNALS, &[]);
    let stops = [libc::SIGKILL, libc::SIGSTOP, libc::SIGTTIN, libc::SIGTTOU, libc::SIGTSTP];
    for (way, flags) in WRAPPERS {
        let mut lines = Lines::start(bench.gpupool(way, flags).arg(&program).process_group(0));
        let last = libc::SIGRTMIN() + 1;
        for signal in (1..32).chain([last]).filter(|signal| !stops.contains(signal)) {
            // A wrapper has children of its own, and a program ends by this one here.
            if signal != libc::SIGCHLD && signal != libc::SIGUSR2 {
                send(lines.id(), signal);
                assert_eq!(lines.next(), signal.to_string(), "{way}");
            }
        }
        // Stopped and continued together with its wrapper.
        send(lines.id(), libc::SIGTSTP);
        assert_eq!(lines.next(), libc::SIGTSTP.to_string(), "{way}");
        send(lines.id(), libc::SIGCONT);
        assert_eq!(lines.next(), libc::SIGCONT.to_string(), "{way}");
        send(lines.id(), libc::SIGUSR2);
        assert_eq!(lines.next(), libc::SIGUSR2.to_string());
        assert_eq!(lines.child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn a_killed_wrapper_takes_its_program_along_and_the_next_one_clears_up() {
    let bench = Bench::new();
    let program = bench.compile("signals", NAME_SIGNALS, &[]);
    let temporary = bench.path("tmp");
    std::fs::create_dir(&temporary).unwrap();
    let left = || -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&temporary).unwrap().map(|entry| entry.unwrap().path());
        entries.collect()
    };
    for (way, flags) in WRAPPERS {
        let mut lines = Lines::start(bench.gpupool(way, flags).arg(&program).env("TMPDIR", &temporary));
        // One that is at work is let alone by others.
        let beside = output(bench.gpupool(way, flags).arg("true").env("TMPDIR", &temporary));
        assert!(beside.status.code().is_some(), "{}", stderr(&beside));
        assert_eq!(left().len(), 1, "{way}");
        send(lines.id(), libc::SIGKILL);
        assert!(is_ready(&lines.out), "{way}: the program outlived its wrapper");
        assert_eq!(lines.out.read(&mut [0]).unwrap(), 0, "{way}");
        lines.child.wait().unwrap();
        let next = output(bench.gpupool(way, flags).arg("true").env("TMPDIR", &temporary));
        assert!(next.status.code().is_some(), "{}", stderr(&next));
        assert_eq!(left(), Vec::<PathBuf>::new(), "{way}");
    }
}

/// Whether there is something to read, or nobody who could write. The limit is for a failure, which would wait for ever.
fn is_ready(out: &BufReader<ChildStdout>) -> bool {
    let mut poll = libc::pollfd { fd: out.get_ref().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `poll` is one valid entry and outlives the call.
    unsafe { libc::poll(&raw mut poll, 1, 10_000) == 1 }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn folders_of_other_programs_are_let_alone() {
    let bench = Bench::new();
    let temporary = bench.path("tmp");
    for name in ["gpupool-sim-mine", "other"] {
        std::fs::create_dir_all(temporary.join(name)).unwrap();
    }
    assert!(output(bench.gpupool("sim", &[]).arg("true").env("TMPDIR", &temporary)).status.success());
    assert!(Path::exists(&temporary.join("gpupool-sim-mine")) && Path::exists(&temporary.join("other")));
}

/// A signal to the wrapper itself, while it makes its folder and there is no program yet.
const INTERRUPTED_AT_ITS_FOLDER: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
int mkdir(const char *path, mode_t mode) {
    int (*real)(const char *, mode_t) = (int (*)(const char *, mode_t))dlsym(RTLD_NEXT, "mkdir");
    int made = real(path, mode);
    if (made == 0 && strstr(path, "/gpupool-")) raise(SIGINT);
    return made;
}
"#;

#[test]
fn a_signal_before_there_is_a_program_leaves_no_folder_behind() {
    let bench = Bench::new();
    let preload = bench.compile("interrupts.so", INTERRUPTED_AT_ITS_FOLDER, &["-shared", "-fPIC", "-ldl"]);
    for (way, flags) in WRAPPERS {
        let temporary = made(tempfile::tempdir());
        let mut command = bench.gpupool(way, flags);
        command.args(["sh", "-c", "while :; do sleep 1; done"]).env("TMPDIR", temporary.path());
        let output = output(command.env("LD_PRELOAD", &preload));
        assert_eq!(output.status.signal(), Some(libc::SIGINT), "{way}: {}", stderr(&output));
        assert_eq!(made(std::fs::read_dir(temporary.path())).count(), 0, "{way}");
    }
}
