//! Why a command did not do what it was asked, and the exit code that says so.

use std::process::ExitCode;

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

    /// A program could not be started; the codes are the shell's.
    pub fn start(program: &std::ffi::OsStr, error: &std::io::Error) -> Failure {
        let code = if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 };
        Failure { code, message: format!("{}: {error}", program.display()) }
    }

    /// Says it, one `gpupool:` a line.
    pub fn report(self) -> ExitCode {
        for line in self.message.lines() {
            eprintln!("gpupool: {line}");
        }
        ExitCode::from(self.code)
    }
}
