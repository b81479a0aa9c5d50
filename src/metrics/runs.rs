//! What a process runs, so that two that run the same can be told from two that only have one interpreter.

use std::ffi::OsStr;
use std::fmt::Display;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What a process runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Where its executable lies, as the system says; `None`: it is not to be read.
    executable: Option<PathBuf>,
    code: Code,
}

/// What an executable does, as far as its arguments say.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Code {
    /// That of the executable.
    Own,
    /// That of a file, a module, or of what stands in the arguments, which an interpreter runs.
    Given(Vec<u8>),
    /// It has written a title over its arguments, as `setproctitle` does (Ray, vLLM).
    Untold,
}

/// The environment that a process was started with. A program that writes to its own while another thread of it reads has no part in it.
#[derive(Clone, Debug)]
pub struct Environment(Vec<u8>);

impl Environment {
    /// That of a process, by its number or `self`. `None`: it has ended, or this user is not told.
    pub fn of(process: impl Display) -> Option<Self> {
        fs::read(format!("/proc/{process}/environ")).ok().map(Self)
    }

    /// Each variable with its value.
    pub fn variables(&self) -> impl Iterator<Item = (&OsStr, &OsStr)> {
        self.0.split(|byte| *byte == 0).filter_map(|variable| {
            let at = variable.iter().position(|byte| *byte == b'=')?;
            Some((OsStr::from_bytes(&variable[..at]), OsStr::from_bytes(&variable[at + 1..])))
        })
    }

    /// The value of one; of several with this name, the first.
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        self.variables().find(|(known, _)| *known == name).map(|(_, value)| value)
    }
}

/// The files that a process maps, and what of them matters to us.
#[derive(Clone, Debug)]
pub struct Maps(Vec<u8>);

impl Maps {
    /// Those of a process. `None`: it has ended, or this user is not told.
    pub fn of(pid: u32) -> Option<Self> {
        fs::read(format!("/proc/{pid}/maps")).ok().map(Self)
    }

    /// Whether gpupool's library is among them.
    pub fn has_library(&self) -> bool {
        self.has(b"/libgpupool")
    }

    /// Whether the CUDA driver's library is.
    pub fn has_driver(&self) -> bool {
        self.has(b"cuda.so")
    }

    fn has(&self, part: &[u8]) -> bool {
        self.0.windows(part.len()).any(|there| there == part)
    }
}

/// What a process runs; `None` where it has ended, or another user's is not told.
pub fn runs(pid: u32) -> Option<Runs> {
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let executable = fs::read_link(format!("/proc/{pid}/exe")).ok();
    let code = code(executable.as_deref(), &arguments);
    Some(Runs { executable, code })
}

impl Runs {
    /// Whether both run the same, whatever else they were given. Where it is not told they may.
    pub fn may_be_same_as(&self, other: &Self) -> bool {
        let is_same = self.executable.is_none() || other.executable.is_none() || self.executable == other.executable;
        is_same && (self.code == other.code || self.code == Code::Untold || other.code == Code::Untold)
    }
}

/// Whether a process runs the program of which somebody noted this command line, its words with one space between them: whatever else either was given, and wherever its
/// file lies. Where that is not told, it may.
pub fn may_run(pid: u32, noted: &str) -> bool {
    let Ok(arguments) = fs::read(format!("/proc/{pid}/cmdline")) else { return true };
    may_be_called(&arguments, noted.as_bytes())
}

fn may_be_called(arguments: &[u8], noted: &[u8]) -> bool {
    // Both lose where a word with spaces ends, and so alike.
    let words = |text: &[u8]| -> Vec<u8> { text.iter().map(|byte| if *byte == b' ' { 0 } else { *byte }).collect() };
    let last = |path: &[u8]| path.rsplit(|byte| *byte == b'/').next().unwrap_or_default().to_vec();
    let first = |text: &[u8]| text.split(|byte| *byte == 0).next().unwrap_or_default().to_vec();
    let (own, noted) = (words(arguments), words(noted));
    let (own_first, noted_first) = (first(&own), first(&noted));
    if own_first.is_empty() || noted_first.is_empty() {
        return true;
    }
    let of = |first: &[u8], text: &[u8]| code(Some(Path::new(OsStr::from_bytes(first))), text);
    match (of(&own_first, &own), of(&noted_first, &noted)) {
        (Code::Given(own), Code::Given(noted)) => last(&own) == last(&noted),
        (Code::Own, Code::Own) => last(&own_first) == last(&noted_first),
        (Code::Untold, _) | (_, Code::Untold) => true,
        _ => false,
    }
}

/// Whether a process of this parent is the kernel of a notebook: it runs IPython's program, or its parent is the server that says in its environment that it started it
/// (`JPY_PARENT_PID`). What a kernel starts inherits that, and has another parent.
pub fn is_kernel(pid: u32, parent: u32, runs: Option<&Runs>) -> bool {
    let environment = Environment::of(pid);
    let server = environment.as_ref().and_then(|environment| environment.get("JPY_PARENT_PID"));
    let server = server.map(OsStr::as_bytes);
    is_kernel_of(parent, server, runs)
}

fn is_kernel_of(parent: u32, server: Option<&[u8]>, runs: Option<&Runs>) -> bool {
    const KERNELS: [&[u8]; 3] = [b"-m ipykernel_launcher", b"-m ipykernel", b"ipykernel_launcher.py"];
    let is_ipython = |code: &[u8]| {
        let name = code.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        KERNELS.contains(&code) || KERNELS.contains(&name)
    };
    let says_so = server.and_then(|server| str::from_utf8(server).ok()?.parse().ok()) == Some(parent);
    says_so || matches!(runs, Some(Runs { code: Code::Given(code), .. }) if is_ipython(code))
}

/// Of an executable that was started with these arguments, each with a zero behind it.
fn code(executable: Option<&Path>, arguments: &[u8]) -> Code {
    let mut all = arguments.strip_suffix(b"\0").unwrap_or(arguments).split(|byte| *byte == 0);
    let first = all.next().unwrap_or_default();
    let name = executable.and_then(Path::file_name).map_or(first, OsStr::as_bytes);
    let is_python = |name: &[u8]| name.starts_with(b"python") || name.starts_with(b"pypy");
    if is_python(name) {
        // A title has no name of an interpreter at its beginning.
        let named = Path::new(OsStr::from_bytes(first)).file_name().map_or(first, OsStr::as_bytes);
        return if is_python(named) { of_python(all) } else { Code::Untold };
    }
    const OTHERS: [&[u8]; 9] = [b"julia", b"perl", b"ruby", b"node", b"lua", b"java", b"R", b"sh", b"bash"];
    if OTHERS.contains(&name) {
        // Options that have a value of their own behind them are not known of each; two with the same have the same.
        let given = all.find(|argument| !argument.starts_with(b"-"));
        return given.map_or(Code::Own, |given| Code::Given(given.to_vec()));
    }
    Code::Own
}

/// By the rules of `python --help`: options up to a module (`-m`), code (`-c`) or a script. The numbers in code are left out, as the workers of
/// `multiprocessing` are started by code that has their descriptors in it.
fn of_python<'a>(mut arguments: impl Iterator<Item = &'a [u8]>) -> Code {
    while let Some(argument) = arguments.next() {
        if argument == b"--check-hash-based-pycs" {
            arguments.next();
        } else if argument == b"-" || !argument.starts_with(b"-") {
            return Code::Given(argument.strip_prefix(b"./").unwrap_or(argument).to_vec());
        } else if !argument.starts_with(b"--") {
            let takes = argument.iter().skip(1).position(|letter| b"cmWXQ".contains(letter));
            let Some(at) = takes.map(|at| at + 1) else { continue };
            let rest = &argument[at + 1..];
            let value = if rest.is_empty() { arguments.next().unwrap_or_default() } else { rest };
            match argument[at] {
                b'm' => return Code::Given([b"-m ", value].concat()),
                b'c' => return Code::Given(value.iter().copied().filter(|byte| !byte.is_ascii_digit()).collect()),
                _ => {}
            }
        }
    }
    Code::Own
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(executable: &str, arguments: &[&str]) -> Runs {
        let text: String = arguments.iter().map(|argument| format!("{argument}\0")).collect();
        let executable = PathBuf::from(executable);
        let code = code(Some(&executable), text.as_bytes());
        Runs { executable: Some(executable), code }
    }

    fn python(arguments: &str) -> Runs {
        let all: Vec<&str> = ["python3"].into_iter().chain(arguments.split(' ')).collect();
        of("/usr/bin/python3.11", &all)
    }

    #[test]
    fn one_script_with_other_arguments_is_the_same_and_two_scripts_are_not() {
        let same = |a: &Runs, b: &Runs| a.may_be_same_as(b) && b.may_be_same_as(a);
        assert!(same(&python("train.py --rank 0"), &python("-u ./train.py --rank 1")));
        assert!(same(&python("-m pkg.train a"), &python("-um pkg.train b")));
        assert!(same(&python("-mpkg.train a"), &python("-W ignore -X dev -m pkg.train")));
        for (a, b) in [
            ("train.py", "serve.py"),
            ("train1.py", "train2.py"),
            ("train.py", "-m train.py"),
            ("-m train", "-m serve"),
            ("-c train()", "-c serve()"),
            ("train.py serve.py", "serve.py train.py"),
            ("-Wignore train.py", "-Wignore serve.py"),
            ("--check-hash-based-pycs always train.py", "--check-hash-based-pycs always serve.py"),
        ] {
            assert!(!same(&python(a), &python(b)), "{a} {b}");
        }
        assert!(!same(&python("train.py"), &of("/opt/other/python3.11", &["python3", "train.py"])));
    }

    #[test]
    fn a_program_is_known_by_the_command_line_that_was_noted_of_it() {
        let may =
            |own: &str, noted: &str| may_be_called(format!("{own}\0").replace(' ', "\0").as_bytes(), noted.as_bytes());
        for (own, noted) in [
            ("python3 train.py --resume", "/venv/bin/python3.11 ./train.py"),
            ("./train 1 50", "/opt/train 3"),
            ("python -m pkg.train a", "python -um pkg.train"),
            ("python -c import x; x.f(5)", "python -c import x; x.f(6)"),
            ("train", ""),
        ] {
            assert!(may(own, noted) && (noted.is_empty() || may(noted, own)), "{own} | {noted}");
        }
        for (own, noted) in [
            ("python train.py", "python serve.py"),
            ("python train.py", "./train.py"),
            ("./train 1", "./serve 1"),
            ("python -m train", "python train.py"),
        ] {
            assert!(!may(own, noted) && !may(noted, own), "{own} | {noted}");
        }
    }

    #[test]
    fn workers_that_one_program_has_spawned_are_the_same() {
        let worker = |tracker: u32, pipe: u32| {
            let code = format!(
                "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd={tracker}, pipe_handle={pipe})"
            );
            of("/usr/bin/python3.11", &["/usr/bin/python3", "-c", &code, "--multiprocessing-fork"])
        };
        assert!(worker(5, 9).may_be_same_as(&worker(6, 17)));
        // Where a title says nothing of what is run, they may be.
        let titled = |title| of("/usr/bin/python3.11", &[title]);
        assert!(titled("VLLM::Worker_TP0").may_be_same_as(&titled("VLLM::Worker_TP1")));
        assert!(titled("VLLM::Worker_TP0").may_be_same_as(&worker(5, 9)));
    }

    #[test]
    fn a_notebooks_kernel_is_known_by_its_program_or_its_server() {
        let is = |runs: &Runs, server: Option<&str>| is_kernel_of(4711, server.map(str::as_bytes), Some(runs));
        for kernel in [
            "-m ipykernel_launcher -f /run/kernel-1.json",
            "-Xfrozen_modules=off -m ipykernel -f x",
            "/opt/ipykernel_launcher.py -f x",
        ] {
            assert!(is(&python(kernel), None), "{kernel}");
        }
        let julia = of("/usr/bin/julia", &["julia", "kernel.jl", "/run/kernel-1.json"]);
        assert!(is(&julia, Some("4711")), "any kernel of the server");
        // What a kernel has started has the variable, too, and is no kernel; nor is one that only names the program.
        let worker = python("-c spawn_main(tracker_fd=5)");
        for (other, server) in
            [(&worker, Some("4710")), (&julia, None), (&python("train.py ipykernel_launcher.py"), Some("none"))]
        {
            assert!(!is(other, server), "{other:?} {server:?}");
        }
    }

    #[test]
    fn a_program_that_is_no_interpreter_is_the_same_whatever_it_is_given() {
        assert!(of("/opt/train", &["train", "0"]).may_be_same_as(&of("/opt/train", &["./train", "1"])));
        assert!(!of("/opt/train", &["train", "0"]).may_be_same_as(&of("/opt/serve", &["serve", "0"])));
        assert!(
            !of("/usr/bin/julia", &["julia", "-q", "a.jl"]).may_be_same_as(&of("/usr/bin/julia", &["julia", "b.jl"]))
        );
    }

    #[test]
    fn a_variable_is_what_stands_behind_its_whole_name() {
        let environment = Environment(b"HOME_OF=/a\0HOME=/b=c\0=::\0HOME=/d\0nothing\0EMPTY=\0".to_vec());
        let get = |name: &str| environment.get(name).and_then(OsStr::to_str);
        assert_eq!([get("HOME"), get("EMPTY"), get("nothing")], [Some("/b=c"), Some(""), None]);
    }

    #[test]
    fn what_a_process_maps_and_was_started_with_is_read() {
        let own = std::process::id();
        assert!(Environment::of("self").is_some() && Environment::of(u32::MAX).is_none());
        // The test is no program under gpupool, and is linked to no driver.
        let maps = Maps::of(own).unwrap();
        assert!(maps.has(b"/") && !maps.has_library() && !maps.has_driver());
        assert!(Maps(b"7f00-7f01 r-xp 0 08:01 1 /opt/lib/libgpupool.so\n".to_vec()).has_library());
        assert!(Maps::of(u32::MAX).is_none());
    }

    #[test]
    fn a_process_that_runs_is_told_of() {
        let own = runs(std::process::id()).unwrap();
        assert!(own.may_be_same_as(&own) && own.executable.is_some());
        assert_eq!(runs(u32::MAX), None);
    }
}
