//! Why a command did not do what it was asked, and the exit code that says so.

use std::io::Write;
use std::process::ExitCode;

use crate::terminal;

/// Told on stderr; the process then exits with `code`.
#[derive(Debug)]
pub struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    /// The command line, a setting or the installation is wrong: nothing was started.
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure { code: 2, message: message.into() }
    }

    /// Something went wrong on the way.
    pub fn broken(message: impl Into<String>) -> Failure {
        Failure { code: 1, message: message.into() }
    }

    /// Nothing went wrong, and there is nothing more to do.
    pub fn nothing() -> Failure {
        Failure { code: 0, message: String::new() }
    }

    /// A program could not be started; the codes are the shell's.
    pub fn start(program: &std::ffi::OsStr, error: &std::io::Error) -> Failure {
        let code = if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 };
        let name = if program.is_empty() { "\"\"".to_owned() } else { program.display().to_string() };
        Failure { code, message: format!("{name}: {error}") }
    }

    /// With another exit code: of a command whose 1 is an answer.
    pub fn with_code(self, code: u8) -> Failure {
        Failure { code, ..self }
    }

    /// Says it, one `gpupool:` a line.
    pub fn report(self) -> ExitCode {
        self.message.lines().for_each(complain);
        ExitCode::from(self.code)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(self.message.lines().next().unwrap_or_default())
    }
}

/// One line on stderr, without anything in it that a terminal would obey. A stderr that is closed or full (`eprintln!` would
/// panic) must not change the exit code.
pub fn complain(line: &str) {
    let _ = std::io::stderr().write_all(format!("gpupool: {}\n", terminal::clean(line)).as_bytes());
}
