//! The end of a program that is suspended: what it does there with the GPUs waits for nobody.

use super::{MIB, refused, suspended, told};
use harness::{Run, Running, at_work, repository};
use std::process::ExitStatus;

/// Has it registered what uses the GPU at its end while it is suspended, and ends it so.
fn ended(registers: &[&str], ends: Option<&str>, to: &str) -> ExitStatus {
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 24");
    at_work(&mut program, 1);
    told(&program, &format!("suspend --to {to}"));
    for registers in registers {
        program.ask(registers);
    }
    if let Some(ends) = ends {
        program.tell(ends);
    }
    program.end().0
}

/// As the handler says that found every byte in its place.
const RIGHT: Option<i32> = Some(12);

#[test]
fn handlers_that_are_registered_while_it_is_suspended_keep_no_program_from_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    for (registers, ends) in [
        (&["atexit"][..], Some("exit")),
        // `main` returns.
        (&["atexit"], None),
        (&["variable"], None),
        (&["join"], Some("exit")),
        (&[], Some("quick")),
    ] {
        for to in ["host", folder] {
            assert_eq!(ended(registers, ends, to).code(), RIGHT, "{registers:?}, {ends:?}, to {to}");
            assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0, "a program that ends leaves no file");
        }
    }
}

#[test]
fn a_handler_that_is_registered_between_two_suspensions_keeps_no_program_from_an_end_that_the_c_library_brings_about() {
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 24");
    told(&program, "suspend --to host");
    told(&program, "resume");
    program.ask("atexit");
    told(&program, "suspend --to host");
    program.tell("error");
    assert_eq!(program.end().0.code(), RIGHT);
}

/// A client of Python's that is suspended before it is told to end.
fn python(arguments: &str) -> Running {
    let script = repository().join("tests/clients/at_exit.py");
    let run = Run::command("python3").env("PYTHONDONTWRITEBYTECODE", "1").arg(script).args(arguments).sim("1x1GiB");
    run.env("GPUPOOL_RESERVE", "16MiB").shim().start(None)
}

#[test]
fn what_python_calls_at_its_end_waits_for_nobody() {
    for way in ["function", "lambda", "builtin", "object"] {
        let mut program = python(way);
        assert_eq!(program.ask("allocate"), "allocated");
        let left = told(&program, "suspend --to host");
        assert!(left["bytes"].as_u64() >= Some(8 * MIB), "{left}");
        let (status, folder) = program.end();
        assert!(status.success(), "{way}: {status}");
        assert!(folder.path().join("used").exists(), "{way}");
    }
}

#[test]
fn what_python_calls_before_its_end_waits_with_the_program() {
    let mut program = python("none");
    assert_eq!(program.ask("allocate"), "allocated");
    told(&program, "suspend --to host");
    // The main thread, in a function of the program.
    assert_eq!(program.ask("use"), "it begins");
    for _ in 0..10 {
        let why = refused(&program, "suspend --to host");
        assert!(why.contains("suspended already"), "{why}");
    }
    assert_eq!(told(&program, "resume")["stayed_bytes"], 0);
    let (status, folder) = program.end();
    assert!(status.success() && folder.path().join("used").exists(), "{status}");
}
