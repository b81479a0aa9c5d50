//! A process that may open no more descriptors. One test, alone in its program, because the limit is the process's.

#![cfg(not(miri))]
#![allow(clippy::unwrap_used, reason = "tests panic")]

use gpupool_wire::Socket;
use gpupool_wire::socket::Failure;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

const NONE: &[OwnedFd] = &[];

/// No number from this one on is given to a new descriptor; the limit before.
fn limit(numbers: u64) -> Rlimit {
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(numbers), ..before }).unwrap();
    before
}

#[test]
fn descriptors_that_do_not_fit_are_lost_and_those_that_came_are_closed() {
    let name = format!("gpupool-wire-test-limits-{}", std::process::id());
    let soon = || Instant::now() + Duration::from_secs(30);
    let listener: Socket = Socket::listen(&name).unwrap();
    let one: Socket = Socket::connect(&name, soon()).unwrap();
    let other = listener.accept().unwrap();
    let next_number = || File::open("/dev/null").unwrap().as_raw_fd() as u64;
    let first_free = next_number();

    for room in [0, 1] {
        let (mut reader, writer) = std::io::pipe().unwrap();
        one.send(b"three", &[&writer, &writer, &writer]).unwrap();
        one.send(b"none", NONE).unwrap();
        let numbers = next_number();
        let before = limit(numbers + room);
        let lost = other.receive_by(&mut [0; 8], soon());
        let next = other.receive_by(&mut [0; 8], soon());
        let refused: Option<std::io::Error> =
            (room == 0).then(|| Socket::<OwnedFd>::connect(&name, soon()).unwrap_err());
        setrlimit(Resource::Nofile, before).unwrap();

        assert!(matches!(lost, Err(Failure::DescriptorsLost)), "room for {room}: {lost:?}");
        assert_eq!(next.unwrap().bytes, 4, "room for {room}: the connection goes on");
        assert!(refused.is_none_or(|error| error.raw_os_error() == Some(libc::EMFILE)));
        assert_eq!(next_number(), numbers, "room for {room}: none stayed open");
        // With this one gone nobody has the writing end, so those that were on their way are closed, too.
        drop(writer);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0, "room for {room}");
    }
    assert_eq!(next_number(), first_free);
}
