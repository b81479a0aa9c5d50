//! `gpupool run`: a program with the pool preloaded.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use gpupool_config::{Mode, PREFIX, SETTINGS, Settings, no_setting, without_unit};

use crate::fail_on::FailOn;
use crate::failure::{self, Failure};
use crate::{companion, elf, images, inherited, log_settings, preloadable};

/// Run a program with the pool behind its cudaMalloc
#[derive(clap::Args, Default)]
#[command(after_help = settings_help())]
pub struct Args {
    #[arg(long, value_name = "MODE", help = mode_help())]
    mode: Option<OsString>,
    /// Any setting, as limit=0:70GiB or GPUPOOL_LIMIT=0:70GiB; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<OsString>,
    /// Write the log to FILE as JSON lines; %p in it is the process id (GPUPOOL_LOG_FILE)
    #[arg(long, value_name = "FILE")]
    log: Option<OsString>,
    /// Bring back what the program names (gpupool_name) from the newest image in DIR, which gpupool checkpoint wrote (GPUPOOL_RESTORE)
    #[arg(long, value_name = "DIR")]
    restore: Option<PathBuf>,
    /// From this image in DIR, as gpupool store list numbers them, and not the newest whole one (GPUPOOL_RESTORE_GENERATION)
    #[arg(long, value_name = "N", requires = "restore")]
    generation: Option<u64>,
    /// Bring back all blocks of that image, in the order in which they were allocated, when the program says that it has built them (gpupool_restore);
    /// nothing comes back where the order differs (GPUPOOL_RESTORE_BY_ORDER=on)
    #[arg(long, requires = "restore")]
    restore_by_order: bool,
    /// Print a summary on stderr at exit (GPUPOOL_SUMMARY=on)
    #[arg(long)]
    summary: bool,
    /// Exit with 3 when the program succeeds but one of these findings was made, and with 4 when that is not known, as one of
    /// its processes was killed or could not write: codes as GP001,GP005, or any
    #[arg(long, value_name = "CODES", value_delimiter = ',')]
    fail_on: Vec<String>,
    /// The library to preload [default: libgpupool.so that came with this program]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

const EXAMPLES: &str = "Examples:
  gpupool run -- python train.py
  gpupool run --summary --set limit=0:70GiB -- ./program
  gpupool run --log train.%p.jsonl -- torchrun --nproc-per-node 4 train.py
  gpupool run --log train.jsonl --set log=debug -- python train.py   with every block
  gpupool run --restore /scratch/train -- python train.py            memory that it names comes back
  gpupool run --fail-on GP001 -- pytest                              exit 3 if one is found
";

/// Becomes the program, unless its end is to be judged (`--fail-on`). A parent that waits would have to imitate the shell's job
/// control and pass signals on; a process that is the program has its number, its terminal, its exit code and its death without
/// any of that.
///
/// # Errors
/// Exit 2 for a setting, finding or library that cannot be used, 127 for a program that is not there, 126 for one that cannot
/// be started.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    let fail_on = FailOn::parse(&args.fail_on)?;
    let (mut wanted, mut mistakes) = wanted(&args);
    let environment: BTreeMap<OsString, OsString> = std::env::vars_os().chain(wanted.clone()).collect();
    let settings = match Settings::read(environment.into_iter()) {
        Ok(settings) if mistakes.is_empty() => settings,
        read => {
            mistakes.extend(read.err().iter().flatten().map(ToString::to_string));
            return Err(Failure::usage(mistakes.join("\n")));
        }
    };
    let mut problems = log_settings::problems(&settings);
    problems.extend(images::none_come_back(&settings));
    if !problems.is_empty() {
        return Err(Failure::usage(problems.join("\n")));
    }
    if settings.mode == Mode::Off {
        // Nobody else would say so: the library passes without a word.
        settings.without_effect().iter().for_each(|problem| failure::complain(&format!("warning: {problem}")));
    }
    if let Some(template) = &settings.log_file {
        // Now, for all processes of the program: each would take it from the folder that it is in when it starts.
        let folder = std::env::current_dir().map_err(|error| {
            Failure::broken(format!("the folder that this runs in cannot be found: {error}; change to another one"))
        });
        let template = if template.is_relative() { template.from_folder(&folder?) } else { template.clone() };
        wanted.insert(format!("{PREFIX}LOG_FILE").into(), template.template().to_owned());
    }
    let library = companion::find(companion::POOL, args.library.as_deref())?;
    let Some((program, arguments)) = args.command.split_first() else {
        return Err(Failure::usage("no program to run; write it after --"));
    };
    if let Some(foreign) = elf::why_foreign(program) {
        return Err(Failure::usage(format!(
            "{} is {foreign}; libgpupool.so is for programs on x86-64 that are linked to glibc, and others do not start with it",
            program.display()
        )));
    }
    if fail_on.is_none()
        && let Some(reason) = elf::why_not_intercepted(program)
    {
        failure::complain(&format!(
            "warning: {} {reason}, so that nothing can be loaded into it: it runs without gpupool and writes no log (programs that it \
             starts are served, unless it takes LD_PRELOAD from them)",
            program.display()
        ));
    }
    let mut command = Command::new(program);
    let before = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    if let Some(warning) = companion::foreign(&library) {
        failure::complain(&format!("warning: {warning}"));
    }
    let library = preloadable::path(library)?;
    command.args(arguments).envs(wanted).env("LD_PRELOAD", preload(&library, &before, elf::sanitizers_of(program)));
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

/// Whether a program can be run with these `--set`.
///
/// # Errors
/// Exit 2 for those that are none; says what is wrong with each.
pub fn check(set: &[OsString]) -> Result<(), Failure> {
    let args = Args { set: set.to_owned(), ..Args::default() };
    let (wanted, mut mistakes) = wanted(&args);
    mistakes.extend(Settings::read(wanted.into_iter()).err().iter().flatten().map(ToString::to_string));
    if mistakes.is_empty() { Ok(()) } else { Err(Failure::usage(mistakes.join("\n"))) }
}

/// The variables that the flags stand for, and what is wrong with the flags.
fn wanted(args: &Args) -> (BTreeMap<OsString, OsString>, Vec<String>) {
    const EXAMPLE: &str = "write for example --set min-size=2MiB";
    let mut mistakes = Vec::new();
    // With the words that said so.
    let mut all: Vec<(OsString, OsString, String)> = Vec::new();
    for pair in &args.set {
        let said = format!("--set {}", pair.display());
        match split(pair) {
            None => mistakes.push(format!("{said}: not NAME=VALUE; {EXAMPLE}")),
            Some((name, _)) if name.is_empty() => mistakes.push(format!("{said}: no name in front of =; {EXAMPLE}")),
            Some((name, value)) => match variable(name) {
                Ok(variable) => {
                    // In the environment it is obeyed with a warning, since the program would be without the pool otherwise.
                    let few = without_unit(std::iter::once((variable.clone(), value.to_owned())));
                    mistakes.extend(few.into_iter().map(|problem| format!("{said}: {}", problem.reason)));
                    all.push((variable, value.to_owned(), said));
                }
                Err(reason) => mistakes.push(format!("{said}: {reason}")),
            },
        }
    }
    let flags = [("MODE", "--mode", &args.mode), ("LOG_FILE", "--log", &args.log)];
    for (name, flag, value) in flags {
        if let Some(value) = value {
            all.push((format!("{PREFIX}{name}").into(), value.clone(), format!("{flag} {}", value.display())));
        }
    }
    if let Some(folder) = &args.restore {
        let said = format!("--restore {}", folder.display());
        // For all processes of the program, wherever they start.
        match std::path::absolute(folder) {
            Ok(folder) => all.push((format!("{PREFIX}RESTORE").into(), folder.into(), said)),
            Err(error) => mistakes.push(format!("{said}: {error}")),
        }
    }
    if let Some(number) = args.generation {
        let said = format!("--generation {number}");
        all.push((format!("{PREFIX}RESTORE_GENERATION").into(), number.to_string().into(), said));
    }
    if args.restore_by_order {
        let said = "--restore-by-order".to_owned();
        all.push((format!("{PREFIX}RESTORE_BY_ORDER").into(), "on".into(), said));
    }
    if args.summary {
        all.push((format!("{PREFIX}SUMMARY").into(), "on".into(), "--summary".to_owned()));
    }
    let mut wanted: BTreeMap<OsString, (OsString, String)> = BTreeMap::new();
    for (name, value, said) in all {
        match wanted.get(&name) {
            Some((other, said_before)) if *other != value => {
                mistakes.push(format!("{said_before} and {said}: two values for {}; write one", name.display()));
            }
            _ => {
                wanted.insert(name, (value, said));
            }
        }
    }
    (wanted.into_iter().map(|(name, (value, _))| (name, value)).collect(), mistakes)
}

fn split(pair: &OsStr) -> Option<(&OsStr, &OsStr)> {
    let at = pair.as_bytes().iter().position(|byte| *byte == b'=')?;
    let (name, value) = pair.as_bytes().split_at(at);
    Some((OsStr::from_bytes(name), OsStr::from_bytes(&value[1..])))
}

/// `min-size`, `MIN_SIZE` and `GPUPOOL_MIN_SIZE` are the same setting.
fn variable(name: &OsStr) -> Result<OsString, String> {
    let name = name.to_str().ok_or("a name that is not UTF-8")?;
    let name = name.to_ascii_uppercase().replace('-', "_");
    let name = if name.starts_with(PREFIX) { name } else { format!("{PREFIX}{name}") };
    no_setting(&name).map_or(Ok(name.into()), Err)
}

/// `LD_PRELOAD` with our library first and everything that was there behind it, except for the runtimes of sanitizers: those
/// refuse to start behind anything, whether the program needs them or they are preloaded.
fn preload(library: &Path, before: &OsStr, sanitizers: Vec<OsString>) -> OsString {
    let before = before.as_bytes().split(|byte| b" :".contains(byte)).filter(|entry| !entry.is_empty());
    let (first, others): (Vec<&OsStr>, Vec<&OsStr>) =
        before.map(OsStr::from_bytes).partition(|entry| elf::is_sanitizer(entry));
    let named = |sanitizer: &&OsString| !first.iter().any(|entry| Path::new(entry).file_name() == Some(sanitizer));
    let missing = sanitizers.iter().filter(named).map(OsString::as_os_str);
    let others = others.into_iter().filter(|entry| *entry != library.as_os_str());
    let list: Vec<&OsStr> = first.iter().copied().chain(missing).chain([library.as_os_str()]).chain(others).collect();
    list.join(OsStr::new(":"))
}

/// The modes, as the table of settings has them.
fn mode_help() -> String {
    let values = SETTINGS.iter().find(|row| row.name == "GPUPOOL_MODE").map_or("", |row| row.values);
    let values: Vec<&str> = values.split('|').collect();
    let words = match values.as_slice() {
        [others @ .., last] if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        one => one.concat(),
    };
    format!("Who serves an allocation: {words} (GPUPOOL_MODE)")
}

/// The table of settings as the end of a help text.
fn settings_help() -> String {
    let mut text = EXAMPLES.to_owned();
    text.push_str("\nSettings, as environment variables or --set NAME=VALUE:\n");
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
        let list = |before: &str| preload(Path::new("/a/libgpupool.so"), OsStr::new(before), Vec::new());
        assert_eq!(list(""), "/a/libgpupool.so");
        assert_eq!(list("/b.so /c.so:/d.so"), "/a/libgpupool.so:/b.so:/c.so:/d.so");
        assert_eq!(list("/b.so:/a/libgpupool.so"), "/a/libgpupool.so:/b.so");
    }

    #[test]
    fn sanitizers_stay_in_front_and_come_once() {
        let list = |before: &str, needed: &[&str]| {
            let needed = needed.iter().map(OsString::from).collect();
            preload(Path::new("/a/libgpupool.so"), OsStr::new(before), needed)
        };
        assert_eq!(list("", &["libasan.so.8"]), "libasan.so.8:/a/libgpupool.so");
        assert_eq!(list("/b.so:/x/libtsan.so.2", &[]), "/x/libtsan.so.2:/a/libgpupool.so:/b.so");
        assert_eq!(list("/x/libasan.so.8", &["libasan.so.8"]), "/x/libasan.so.8:/a/libgpupool.so");
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
