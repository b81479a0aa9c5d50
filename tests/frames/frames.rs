//! Python frames as read in real processes of every CPython at hand; which these were is printed (`-- --nocapture`).

mod pythons;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use pythons::{Embedding, Python, probe};

const CLIENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/clients");

impl Python {
    /// A client that ends well; what it printed.
    fn client(&self, name: &str, environment: &[(&str, &str)]) -> String {
        succeeds(&format!("{name} on CPython {}", self.version), self.command(name).envs(environment.iter().copied()))
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(&self.path);
        command.args(["-B", "-X", "faulthandler"]).arg(Path::new(CLIENTS).join(name));
        command.env("FRAMES_PROBE", probe()).env("PYTHONUTF8", "1").env_remove("PYTHONPATH");
        command
    }
}

fn output(what: &str, command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{what}: {:?} does not start: {error}", command.get_program()))
}

fn succeeds(what: &str, command: &mut Command) -> String {
    let told = output(what, command);
    let (out, err) = (String::from_utf8_lossy(&told.stdout), String::from_utf8_lossy(&told.stderr));
    assert!(told.status.success(), "{what}: {}\n{out}{err}", told.status);
    out.into_owned()
}

/// Compiles a C client; `name` is the result's, without spaces.
fn compile(source: &str, name: &str, arguments: &[String]) -> PathBuf {
    let result = pythons::artifacts().join("frames");
    std::fs::create_dir_all(&result).unwrap_or_else(|error| panic!("{}: {error}", result.display()));
    let result = result.join(name);
    let mut cc = Command::new("cc");
    cc.arg("-O1").arg(Path::new(CLIENTS).join(source)).arg("-o").arg(&result).args(arguments);
    succeeds(name, &mut cc);
    result
}

#[test]
fn every_shape_of_call_reads_as_traceback_says() {
    for python in pythons::all() {
        let told = python.client("shapes.py", &[]);
        eprint!("{told}");
        assert!(told.ends_with("compared with its own answers\n"), "{told}");
    }
}

#[test]
fn other_threads_gone_frames_and_a_forked_child() {
    for python in pythons::all() {
        python.client("edges.py", &[]);
    }
}

#[test]
fn code_objects_made_and_dropped_meanwhile() {
    for python in pythons::all() {
        for allocator in ["default", "debug", "malloc"] {
            let told = python.client("stress.py", &[("PYTHONMALLOC", allocator)]);
            assert!(told.starts_with("3200 functions; CPython"), "{told}");
        }
    }
}

#[test]
fn daemon_threads_read_while_the_interpreter_goes_down() {
    for python in pythons::all() {
        for _ in 0..10 {
            let told = python.client("exit.py", &[]);
            assert!(told.ends_with(", compared with its own answers\n"), "{told}");
        }
    }
}

#[test]
fn nothing_before_main_and_nothing_after_exit() {
    let probe = probe();
    let folder = probe.parent().unwrap().display();
    let link = [format!("-L{folder}"), "-lframes_probe".into(), format!("-Wl,-rpath,{folder}")];
    let preloaded = compile("preloaded.c", "preloaded.so", &[&["-shared".into(), "-fPIC".into()], &link[..]].concat());
    for python in pythons::all() {
        let told = output("preloaded", python.command("exit.py").env("LD_PRELOAD", &preloaded));
        let err = String::from_utf8_lossy(&told.stderr);
        assert!(told.status.success(), "CPython {}: {err}", python.version);
        let count = |line| err.lines().filter(|said| *said == line).count();
        assert!(count("before: -1") >= 1 && count("after: -1") >= 1, "CPython {}: {err}", python.version);
        assert_eq!(count("before: -1") + count("after: -1"), err.lines().count(), "CPython {}: {err}", python.version);
    }
}

/// Builds the embedding program for every CPython that has its headers and library here.
fn embedding(flags: &[&str]) -> impl Iterator<Item = (&'static Python, String)> {
    pythons::all().iter().filter_map(move |python| {
        let Some(Embedding { include, library, prefix }) = &python.embedding else {
            eprintln!("CPython {}: no headers or no shared library, not embedded", python.version);
            return None;
        };
        let mut arguments = vec![format!("-I{}", include.display()), "-rdynamic".into()];
        arguments
            .extend([library.display().to_string(), format!("-Wl,-rpath={}", library.with_file_name("").display())]);
        arguments.extend(flags.iter().map(ToString::to_string));
        let name = format!("embed-{}{}", python.version, flags.concat());
        let mut command = Command::new(compile("embed.c", &name, &arguments));
        // Without it the library looks for the standard modules beside the program.
        command.arg(probe()).env("PYTHONHOME", prefix);
        Some((python, succeeds(&name, &mut command)))
    })
}

#[test]
fn embedding_programs_have_frames_only_while_python_runs() {
    for (python, told) in embedding(&[]) {
        let version = &python.version;
        let mut expected = "before: -1; OPEN
initialised: -1; OPEN
running: with an exception: 5; OPEN
5
ROUND
finalised: -1; COMPARED
initialised: -1; COMPARED
running: 5
ROUND
lingering: 5; COMPARED
finalised: -1; COMPARED
left behind: -1; COMPARED
native thread: -1; COMPARED
"
        .to_owned();
        const ROUND: &str = "native thread: -1; COMPARED
attached thread, no code: -1; COMPARED
attached thread: 5
released thread: -1; COMPARED
again: 5";
        for (word, text) in [
            ("ROUND", ROUND),
            ("OPEN", &format!("CPython {version}, not compared yet")),
            ("COMPARED", &format!("CPython {version}, compared with its own answers")),
        ] {
            expected = expected.replace(word, text);
        }
        assert_eq!(told, expected, "CPython {version}");
    }
}

#[test]
fn an_interpreter_that_says_otherwise_is_left_alone() {
    for (python, told) in embedding(&["-DWRONG_LINE"]) {
        let version = &python.version;
        let reason = format!(
            "Python frames are not read: CPython {version}: frames read differ from Python's own: \
             frame 0 is at line Some(12345), read was Some(1)"
        );
        assert!(told.contains("running: with an exception: 5;"), "{told}");
        assert!(told.contains("\n-1\n") && !told.contains("\n5\n"), "{told}");
        assert!(told.contains(&format!("again: -1\nfinalised: -1; {reason}\n")), "{told}");
    }
}

#[test]
fn builds_that_are_not_understood_are_named_and_never_read() {
    let cookie = u64::from_ne_bytes(*b"xdebugpy");
    let range = "frames are read in releases of 3.10 to 3.14 only";
    let cases: &[(&[String], &str)] = &[
        (&["-DVERSION=0x030f00f0".into()], &format!("CPython 3.15.0: {range}")),
        (&["-DVERSION=0x030912f0".into()], &format!("CPython 3.9.18: {range}")),
        (&["-DVERSION=0x040c00f0".into()], &format!("CPython 4.12.0: {range}")),
        (&["-DVERSION=0x030e00b2".into()], &format!("CPython 3.14.0 pre-release: {range}")),
        (&["-DVERSION_TEXT=\"3.9.2 (default)\"".into()], &format!("CPython 3.9.2: {range}")),
        (&["-DVERSION_TEXT=\"3.10.0a7+ (x)\"".into()], &format!("CPython 3.10.0 pre-release: {range}")),
        (&["-DVERSION_TEXT=\"unknown\"".into()], "Py_GetVersion says \"unknown\""),
        (&["-DNO_INITIALIZED".into()], "CPython 3.12.1: the interpreter does not export Py_IsInitialized"),
        (&["-DCODE_SIZE=208".into()], "CPython 3.12.1: an object of type code takes 208 bytes, expected 192"),
        (&["-DVERSION=0x030d00f0".into()], "CPython 3.13.0: the interpreter does not export _PyRuntime"),
        (
            &["-DVERSION=0x030d00f0".into(), "-DRUNTIME=1".into()],
            "CPython 3.13.0: _PyRuntime does not begin with the cookie \"xdebugpy\"",
        ),
        (
            &["-DVERSION=0x030d00f0".into(), format!("-DRUNTIME={cookie}u,0x030d01f0")],
            "CPython 3.13.0: _PyRuntime describes version 0x30d01f0, the interpreter is 0x30d00f0",
        ),
        (
            &["-DVERSION=0x030e02f0".into(), format!("-DRUNTIME={cookie}u,0x030e02f0,1")],
            "CPython 3.14.2: a free-threaded build",
        ),
        (
            &["-DVERSION=0x030e02f0".into(), format!("-DRUNTIME={cookie}u,0x030e02f0,0")],
            "CPython 3.14.2: _PyRuntime gives offset 0 in PyObject of 0 bytes",
        ),
    ];
    for (number, (flags, reason)) in cases.iter().enumerate() {
        let mut flags = flags.to_vec();
        flags.push("-rdynamic".into());
        let program = compile("pretender.c", &format!("pretender-{number}"), &flags);
        let told = succeeds(reason, Command::new(program).arg(probe()));
        assert_eq!(told, format!("-1 -1 Python frames are not read: {reason}\n"));
    }
}

#[test]
fn a_process_without_python_is_said_to_have_none() {
    let program = compile("pretender.c", "pretender-quiet", &["-fvisibility=hidden".into()]);
    let told = succeeds("pretender-quiet", Command::new(program).arg(probe()));
    assert_eq!(told, "-1 -1 no Python in this process so far\n");
}
