//! A program that runs while the test looks at it, and does what it is told.

use crate::run::{LOG, SESSION};
use crate::{artifact_folder, eventually};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output};
use tempfile::TempDir;

/// See [`crate::Run::start`]. Killed when dropped.
#[derive(Debug)]
pub struct Running {
    pub(crate) child: Child,
    pub(crate) input: Option<ChildStdin>,
    pub(crate) output: BufReader<ChildStdout>,
    pub(crate) folder: TempDir,
}

impl Running {
    /// Tells it a line, and gives the line that it answers.
    #[track_caller]
    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.answer(&format!("an answer to {line}"))
    }

    /// A line that it says by itself.
    #[track_caller]
    pub fn hear(&mut self) -> String {
        self.answer("a word")
    }

    #[track_caller]
    fn answer(&mut self, what: &str) -> String {
        let mut answer = String::new();
        let read = self.output.read_line(&mut answer).unwrap_or_else(|e| panic!("not {what}: {e}"));
        if read == 0 {
            panic!("it ended without {what}: {}", self.ended());
        }
        answer.trim_end().to_owned()
    }

    /// Tells it a line to which there is no answer.
    #[track_caller]
    pub fn tell(&mut self, line: &str) {
        let Some(input) = &mut self.input else { panic!("its input was closed") };
        if let Err(error) = input.write_all(format!("{line}\n").as_bytes()) {
            panic!("it does not hear {line}: {error}: {}", self.ended());
        }
    }

    /// What became of it that has closed its end of a pipe; and its log stays for whoever looks into that.
    fn ended(&mut self) -> String {
        drop(self.input.take());
        let status = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        let mut said = String::new();
        let _ = self.output.read_to_string(&mut said);
        let folder = self.folder.path().display().to_string();
        self.folder.disable_cleanup(true);
        format!("{status}; it said {said:?}; its files are in {folder}")
    }

    /// The process's number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Runs the command with these arguments, which finds this program among others of its user.
    pub fn gpupool(&self, arguments: &str) -> Output {
        let mut command = Command::new(artifact_folder().join("gpupool"));
        command.args(arguments.split_whitespace()).env("XDG_RUNTIME_DIR", self.session()).env_remove("LD_PRELOAD");
        command.output().unwrap_or_else(|error| panic!("gpupool {arguments}: {error}"))
    }

    /// What it has as `XDG_RUNTIME_DIR`.
    pub fn session(&self) -> PathBuf {
        self.folder.path().join(SESSION)
    }

    /// Its log, where [`crate::Run::log`] asked for one.
    pub fn log(&self) -> PathBuf {
        self.folder.path().join(LOG)
    }

    /// Sends it a signal. Of one that stops it this is back once all its threads stand: others go on for a while when the first one does.
    #[track_caller]
    pub fn signal(&self, signal: i32) {
        // SAFETY: kill has no preconditions; the child was not waited for, so the number is its.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
        if signal == libc::SIGSTOP {
            eventually("a stop", || {
                let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid())).into_iter().flatten().flatten();
                let read = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("stat")).ok();
                let stands =
                    |text: String| text.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['T', 't', 'Z', 'X']));
                threads.filter_map(read).all(stands).then_some(())
            });
        }
    }

    /// Kills it, and waits until its last thread is gone: /proc calls a process a zombie as soon as its main thread is
    /// over. What it leaves stays for [`Self::end`], its number too.
    pub fn kill(&self) {
        self.signal(libc::SIGKILL);
        // SAFETY: a siginfo_t of zeros is one, and waitid writes one to it; WNOWAIT leaves the child to be waited for.
        let waited = unsafe {
            let mut what: libc::siginfo_t = std::mem::zeroed();
            libc::waitid(libc::P_PID, self.child.id(), &mut what, libc::WEXITED | libc::WNOWAIT)
        };
        assert_eq!(waited, 0, "{}", std::io::Error::last_os_error());
    }

    /// Waits for its end, which the end of its input brings about.
    pub fn end(mut self) -> (ExitStatus, TempDir) {
        drop(self.input.take());
        self.ends()
    }

    /// Waits for an end of its own, with its input open: to some programs the end of that is a reason to end, too.
    pub fn ends(mut self) -> (ExitStatus, TempDir) {
        let status = self.child.wait().unwrap_or_else(|e| panic!("lost it: {e}"));
        let folder = std::mem::replace(&mut self.folder, tempfile::tempdir().unwrap_or_else(|e| panic!("{e}")));
        (status, folder)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
