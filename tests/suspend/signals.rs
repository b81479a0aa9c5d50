//! Signals for a thread that waits for the program to be resumed.

use super::{MIB, ends_well, page, suspended, told};
use harness::{Run, Running, Traced, at_work, goes_on, repository};

/// The signals that a thread of it has blocked.
fn blocked(program: &Running, thread: i32) -> String {
    let status = std::fs::read_to_string(format!("/proc/{}/task/{thread}/status", program.pid()))
        .unwrap_or_else(|error| panic!("its status: {error}"));
    status.lines().find(|line| line.starts_with("SigBlk")).unwrap_or_else(|| panic!("{status}")).to_owned()
}

/// Where the time of one sleep is over and the next one has not begun: nothing is there that the signal could end.
#[test]
fn a_signal_that_comes_between_two_sleeps_at_the_gate_resumes_the_program() {
    let mut program = suspended("1x1GiB").start(None);
    at_work(&mut program, 1);
    let thread = program.ask("thread").parse().unwrap();
    let before = blocked(&program, thread);
    for times in 1..=3 {
        told(&program, "suspend --to host");
        let traced = Traced::begin(thread).unwrap();
        traced.sleeps_twice();
        assert_eq!(program.ask("signal"), "sent");
        drop(traced);
        goes_on(&mut program);
        assert_eq!(program.ask("handled"), times.to_string());
        assert_eq!(blocked(&program, thread), before, "what the thread has blocked is its own");
    }
    ends_well(program);
}

/// The wait that the handler came out of hears of it only once the handler is back.
#[test]
fn a_handler_that_uses_a_gpu_itself_resumes_the_program() {
    let mut program = suspended("1x1GiB").start(None);
    at_work(&mut program, 1);
    assert_eq!(program.ask("reading"), "it will");
    for times in 1..=2 {
        told(&program, "suspend --to host");
        // It waits at the gate, where the signal finds it.
        let traced = Traced::begin(program.ask("thread").parse().unwrap()).unwrap();
        traced.sleeps_twice();
        drop(traced);
        assert_eq!(program.ask("signal"), "sent");
        goes_on(&mut program);
        assert_eq!(program.ask("handled"), times.to_string());
    }
    ends_well(program);
}

/// Nobody comes back to the wait, and the thread waits again at its next call.
#[test]
fn a_thread_that_jumps_out_of_a_handler_while_it_waits_resumes_the_program() {
    let mut program = suspended("1x1GiB").start(None);
    at_work(&mut program, 1);
    assert_eq!(program.ask("jumping"), "it will");
    for times in 1..=4 {
        // An allocation waits behind the gate, in the middle of its hook.
        program.ask(if times % 2 == 0 { "allocating" } else { "working" });
        goes_on(&mut program);
        told(&program, "suspend --to host");
        let traced = Traced::begin(program.ask("thread").parse().unwrap()).unwrap();
        traced.sleeps_twice();
        drop(traced);
        assert_eq!(program.ask("signal"), "sent");
        goes_on(&mut program);
        assert_eq!(program.ask("handled"), times.to_string());
    }
    program.ask("working");
    goes_on(&mut program);
    ends_well(program);
}

/// Python's handler of it only notes that it came, and the program hears of it once the call is back.
#[test]
fn a_keyboard_interrupt_resumes_a_python_program_which_ends_as_it_wants() {
    let script = repository().join("tests/clients/interrupted.py");
    let run = Run::command("python3").env("PYTHONDONTWRITEBYTECODE", "1").arg(script).sim("1x1GiB");
    let mut program = run.env("GPUPOOL_RESERVE", "16MiB").shim().start(None);
    assert_eq!(program.ask("begin"), "it begins");
    let left = told(&program, "suspend --to host --wait 60s");
    assert!(left["bytes"].as_u64() >= Some(8 * MIB), "{left}");
    // The main thread waits in a call.
    let traced = Traced::begin(program.pid() as i32).unwrap();
    traced.sleeps_twice();
    assert!(page(&program).is_some_and(|page| page.levels.suspended > 0));
    program.signal(libc::SIGINT);
    drop(traced);
    assert_eq!(program.hear(), "interrupted: right");
    let (status, _folder) = program.ends();
    assert!(status.success(), "{status}");
}
