//! `gpupool run`: a program with the pool preloaded.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use gpupool_config::{LogPath, LogPathNames, PREFIX, SETTINGS, Settings};

use crate::companion;
use crate::fail_on::FailOn;
use crate::failure::Failure;
use crate::inherited;

/// Run a program with the pool behind its cudaMalloc
#[derive(clap::Args)]
#[command(after_help = settings_help())]
pub struct Args {
    /// Who serves an allocation: pool, spill, trace or off (GPUPOOL_MODE)
    #[arg(long, value_name = "MODE")]
    mode: Option<OsString>,
    /// Any setting, as limit=0:70GiB or GPUPOOL_LIMIT=0:70GiB; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<OsString>,
    /// Write the log to FILE as JSON lines; %p in it is the process id (GPUPOOL_LOG_FILE)
    #[arg(long, value_name = "FILE")]
    log: Option<OsString>,
    /// Print a summary on stderr at exit (GPUPOOL_SUMMARY=on)
    #[arg(long)]
    summary: bool,
    /// Exit with 3 when the program succeeds but one of these findings was made: codes as GP001,GP005, or any
    #[arg(long, value_name = "CODES", value_delimiter = ',')]
    fail_on: Vec<String>,
    /// The library to preload [default: libgpupool.so that came with this program]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Becomes the program, unless its end is to be judged (`--fail-on`). A parent that waits would have to imitate the shell's job control and pass signals on; a process
/// that is the program has its number, its terminal, its exit code and its death without any of that.
///
/// # Errors
/// Exit 2 for a setting, finding or library that can not be used, 127 for a program that is not there, 126 for one that can not
/// be started.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    let fail_on = FailOn::parse(&args.fail_on)?;
    let wanted = wanted(&args)?;
    let environment: BTreeMap<OsString, OsString> = std::env::vars_os().chain(wanted.clone()).collect();
    let settings = Settings::read(environment.into_iter())
        .map_err(|problems| Failure::usage(problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")))?;
    if let Some(template) = &settings.log_file {
        check_log(template)?;
    }
    let library = companion::find("libgpupool.so", args.library.as_deref(), "--library", "gpupool")?;
    let Some((program, arguments)) = args.command.split_first() else {
        return Err(Failure::usage("no program to run; write it behind --"));
    };
    let mut command = Command::new(program);
    command.args(arguments).envs(wanted).env("LD_PRELOAD", preload(&library, std::env::var_os("LD_PRELOAD"))?);
    match fail_on {
        Some(fail_on) => fail_on.run(command, &settings),
        None => Err(Failure::start(program, &become_it(command))),
    }
}

fn become_it(mut command: Command) -> std::io::Error {
    inherited::hand_on(&mut command);
    let error = command.exec();
    inherited::go_on();
    error
}

/// The variables that the flags stand for. The flags with a name of their own win over `--set`.
fn wanted(args: &Args) -> Result<BTreeMap<OsString, OsString>, Failure> {
    let mut wanted = BTreeMap::new();
    for pair in &args.set {
        let (name, value) = split(pair).ok_or_else(|| {
            Failure::usage(format!("--set {}: not NAME=VALUE; write for example --set min-size=2MiB", pair.display()))
        })?;
        wanted.insert(variable(name)?, value.to_owned());
    }
    let flags =
        [("MODE", args.mode.clone()), ("LOG_FILE", args.log.clone()), ("SUMMARY", args.summary.then(|| "on".into()))];
    for (name, value) in flags {
        if let Some(value) = value {
            wanted.insert(format!("{PREFIX}{name}").into(), value);
        }
    }
    Ok(wanted)
}

fn split(pair: &OsStr) -> Option<(&OsStr, &OsStr)> {
    let at = pair.as_bytes().iter().position(|byte| *byte == b'=')?;
    let (name, value) = pair.as_bytes().split_at(at);
    Some((OsStr::from_bytes(name), OsStr::from_bytes(&value[1..])))
}

/// `min-size`, `MIN_SIZE` and `GPUPOOL_MIN_SIZE` are the same setting.
fn variable(name: &OsStr) -> Result<OsString, Failure> {
    let name = name.to_str().ok_or_else(|| Failure::usage(format!("--set {}: not UTF-8", name.display())))?;
    let name = name.to_ascii_uppercase().replace('-', "_");
    Ok(if name.starts_with(PREFIX) { name } else { format!("{PREFIX}{name}") }.into())
}

/// Refuses a log that the program could only complain about. The name holds the program's own number, so only what is
/// the same for every process can be looked at here; the library checks the rest.
fn check_log(template: &LogPath) -> Result<(), Failure> {
    let text = template.template().display();
    let varies = template.template().as_bytes().contains(&b'%');
    let path = template.expand(LogPathNames { pid: 0, executable: OsStr::new(""), host: OsStr::new("") });
    if !varies && path.symlink_metadata().is_ok() {
        return Err(Failure::usage(format!(
            "GPUPOOL_LOG_FILE={text}: exists already; remove it, or put %p into the name"
        )));
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let folder_varies =
        template.template().as_bytes().iter().rev().skip_while(|byte| **byte != b'/').any(|byte| *byte == b'%');
    if !folder_varies && !writable(folder) {
        let folder = folder.display();
        return Err(Failure::usage(format!(
            "GPUPOOL_LOG_FILE={text}: can not write into the folder {folder}; choose another"
        )));
    }
    Ok(())
}

fn writable(folder: &Path) -> bool {
    let Ok(name) = std::ffi::CString::new(folder.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: `name` is a NUL-terminated string that outlives the call.
    folder.is_dir() && unsafe { libc::access(name.as_ptr(), libc::W_OK | libc::X_OK) } == 0
}

/// `LD_PRELOAD` with our library first and everything that was there behind it.
fn preload(library: &Path, before: Option<OsString>) -> Result<OsString, Failure> {
    // The loader splits at these and replaces $ORIGIN and the like; it knows no way to quote them.
    if library.as_os_str().as_bytes().iter().any(|byte| b" :$".contains(byte) || byte.is_ascii_whitespace()) {
        let library = library.display();
        return Err(Failure::usage(format!(
            "{library}: LD_PRELOAD can not hold a path with a space, ':' or '$'; move it"
        )));
    }
    let mut list = library.as_os_str().to_owned();
    for other in before.iter().flat_map(|list| list.as_bytes().split(|byte| b" :".contains(byte))) {
        if !other.is_empty() && other != library.as_os_str().as_bytes() {
            list.push(":");
            list.push(OsStr::from_bytes(other));
        }
    }
    Ok(list)
}

/// The table of settings as the end of a help text.
fn settings_help() -> String {
    let mut text = "Settings, as environment variables or --set NAME=VALUE:\n".to_owned();
    for row in SETTINGS {
        text.push_str(&format!("\n  {}  ({})\n      {} [default: {}]\n", row.name, row.values, row.help, row.default));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_comes_first_and_once() {
        let list = |before: &str| preload(Path::new("/a/libgpupool.so"), Some(before.into())).unwrap();
        assert_eq!(preload(Path::new("/a/libgpupool.so"), None).unwrap(), "/a/libgpupool.so");
        assert_eq!(list(""), "/a/libgpupool.so");
        assert_eq!(list("/b.so /c.so:/d.so"), "/a/libgpupool.so:/b.so:/c.so:/d.so");
        assert_eq!(list("/b.so:/a/libgpupool.so"), "/a/libgpupool.so:/b.so");
    }

    #[test]
    fn a_path_the_loader_would_split_is_refused() {
        for path in ["/a b/x.so", "/a:b/x.so", "/$ORIGIN/x.so"] {
            assert!(preload(Path::new(path), None).is_err(), "{path}");
        }
    }

    #[test]
    fn names_are_taken_in_any_spelling() {
        for name in ["min-size", "MIN_SIZE", "gpupool_min_size", "GPUPOOL_MIN_SIZE", "gpupool-min-size"] {
            assert_eq!(variable(OsStr::new(name)).unwrap(), "GPUPOOL_MIN_SIZE");
        }
        assert_eq!(split(OsStr::new("a=b=c")), Some((OsStr::new("a"), OsStr::new("b=c"))));
        assert_eq!(split(OsStr::new("a")), None);
    }
}
