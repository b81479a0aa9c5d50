//! Events between processes.

#![allow(clippy::macro_metavars_in_unsafe, reason = "the macro is there to make the one unsafe call")]

mod common;

use common::*;
use cudarc::driver::sys::*;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::ptr::null_mut;

/// Set in the second process of a test: the handle of an event, in hexadecimal.
const HANDLE: &str = "SIMCUDA_TEST_EVENT";

fn event(flags: u32) -> CUevent {
    let mut event = null_mut();
    ok!(cuEventCreate(&mut event, flags));
    event
}

fn handle_of(event: CUevent) -> CUipcEventHandle {
    // SAFETY: an array of bytes.
    let mut handle: CUipcEventHandle = unsafe { std::mem::zeroed() };
    ok!(cuIpcGetEventHandle(&mut handle, event));
    handle
}

/// Opens the other process' event, which is not there yet, says so and waits for it in a stream.
fn importer(text: &str) {
    start_on(0);
    // SAFETY: as above.
    let mut handle: CUipcEventHandle = unsafe { std::mem::zeroed() };
    for (index, byte) in handle.reserved.iter_mut().enumerate() {
        let Ok(value) = u8::from_str_radix(&text[2 * index..2 * index + 2], 16) else { panic!("{text}") };
        *byte = value as _;
    }
    let (mut event, stream) = (null_mut(), stream());
    ok!(cuIpcOpenEventHandle(&mut event, handle));
    assert_eq!(cu!(cuEventQuery(event)), 600);
    ok!(cuStreamWaitEvent(stream, event, 0));
    assert_eq!(cu!(cuStreamQuery(stream)), 600);
    println!("waiting");
    ok!(cuStreamSynchronize(stream));
    ok!(cuEventQuery(event));
    ok!(cuEventRecord(event, stream));
    ok!(cuEventSynchronize(event));
}

#[test]
fn an_event_is_waited_for_in_another_process() {
    let name = "an_event_is_waited_for_in_another_process";
    alone(name, &[], || {
        if let Ok(handle) = std::env::var(HANDLE) {
            return importer(&handle);
        }
        start_on(0);
        let (shared, private, stream, flag) = (event(6), event(2), stream(), pinned_flag());
        assert_eq!(cu!(cuEventCreate(&mut null_mut(), 4)), 1, "events of several processes have no time");
        let handle = handle_of(shared);
        assert_eq!(cu!(cuIpcGetEventHandle(&mut handle.clone(), private)), 400);
        assert_eq!(cu!(cuIpcOpenEventHandle(&mut null_mut(), handle)), 201, "in the process that made it");
        assert_eq!(launch(function(c"wait_flag"), stream, &mut [flag as u64]), 0);
        ok!(cuEventRecord(shared, stream));
        let text: String = handle.reserved.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
        let mut other = Command::new(std::env::current_exe().unwrap())
            .args([std::env::var("SIMCUDA_TEST").unwrap().as_str(), "--exact", "--nocapture", "--test-threads=1"])
            .env(HANDLE, text)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(other.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("waiting")), "the importer ended early");
        raise(flag as usize);
        assert!(lines.map(Result::unwrap).any(|line| line.contains("1 passed")));
        assert!(other.wait().unwrap().success());
        ok!(cuEventQuery(shared));
        ok!(cuEventSynchronize(shared));
    });
}
