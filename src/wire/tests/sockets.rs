//! Sockets between two ends in one process, and between two processes where it matters whose they are.

#![cfg(not(miri))]
#![allow(clippy::unwrap_used, reason = "tests panic")]

use gpupool_wire::socket::{Failure, MOST_DESCRIPTORS, wait};
use gpupool_wire::{Credentials, Socket};
use rustix::io::{FdFlags, fcntl_getfd};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, id};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const NONE: &[OwnedFd] = &[];

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// A name that no other test and no other run has.
fn name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("gpupool-wire-test-{}-{}", id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The connecting and the accepting end of a connection.
fn pair() -> (Socket, Socket) {
    let name = name();
    let listener: Socket = Socket::listen(&name).unwrap();
    let connected = Socket::connect(&name, soon()).unwrap();
    (connected, listener.accept().unwrap())
}

fn would_block(failure: &Failure) -> bool {
    matches!(failure, Failure::System(error) if error.kind() == ErrorKind::WouldBlock)
}

#[test]
fn messages_arrive_whole_and_in_order() {
    let (one, other) = pair();
    one.send(b"first", NONE).unwrap();
    one.send(b"second", NONE).unwrap();
    let mut buffer = [0; 64];
    for expected in [&b"first"[..], b"second"] {
        let received = other.receive_by(&mut buffer, soon()).unwrap();
        assert_eq!(&buffer[..received.bytes], expected);
        assert!(received.descriptors.is_empty());
    }
    assert!(would_block(&other.receive(&mut buffer).unwrap_err()), "nothing is left");
}

#[test]
fn a_message_that_is_too_long_fills_the_buffer_and_is_gone() {
    let (one, other) = pair();
    one.send(&[7; 100], NONE).unwrap();
    one.send(b"next", NONE).unwrap();
    let mut buffer = [0; 10];
    assert_eq!(other.receive_by(&mut buffer, soon()).unwrap().bytes, 10);
    let received = other.receive_by(&mut buffer, soon()).unwrap();
    assert_eq!(&buffer[..received.bytes], b"next");
}

#[test]
fn descriptors_lead_to_the_same_files_and_are_closed_by_exec() {
    let (one, other) = pair();
    let (mut reader, writer) = std::io::pipe().unwrap();
    // Any number of them, odd and even, and the most that there can be.
    for count in [1, 2, 3, MOST_DESCRIPTORS] {
        let copies: Vec<OwnedFd> = (0..count).map(|_| writer.try_clone().unwrap().into()).collect();
        one.send(b"here", &copies).unwrap();
        drop(copies);
        let received = other.receive_by(&mut [0; 8], soon()).unwrap();
        assert_eq!(received.descriptors.len(), count);
        for (index, descriptor) in received.descriptors.into_iter().enumerate() {
            assert!(fcntl_getfd(&descriptor).unwrap().contains(FdFlags::CLOEXEC));
            File::from(descriptor).write_all(&[index as u8]).unwrap();
            let mut byte = [255];
            reader.read_exact(&mut byte).unwrap();
            assert_eq!(byte, [index as u8]);
        }
    }
    let too_many: Vec<OwnedFd> = (0..=MOST_DESCRIPTORS).map(|_| writer.try_clone().unwrap().into()).collect();
    assert_eq!(one.send(b"here", &too_many).unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn a_descriptor_outlives_whoever_sent_it() {
    let (one, other) = pair();
    let mut file = tempfile();
    file.write_all(b"content").unwrap();
    one.send(b"here", &[OwnedFd::from(file)]).unwrap();
    drop(one);
    let mut received = other.receive_by(&mut [0; 8], soon()).unwrap();
    let mut file = File::from(received.descriptors.remove(0));
    file.rewind().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "content");
    assert_eq!(other.receive_by(&mut [0; 8], soon()).unwrap().bytes, 0, "the end of the connection");
}

/// A file without a name.
fn tempfile() -> File {
    let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::open(std::env::temp_dir(), flags, rustix::fs::Mode::RUSR).unwrap().into()
}

#[test]
fn a_closed_peer_is_the_end_for_a_reader_and_an_error_for_a_writer() {
    let (one, other) = pair();
    one.send(b"last", NONE).unwrap();
    drop(one);
    assert_eq!(other.send(b"more", NONE).unwrap_err().kind(), ErrorKind::BrokenPipe);
    let mut buffer = [0; 8];
    let received = other.receive_by(&mut buffer, soon()).unwrap();
    assert_eq!(&buffer[..received.bytes], b"last", "what was said before is heard");
    assert_eq!(other.receive_by(&mut buffer, soon()).unwrap().bytes, 0);
}

#[test]
fn a_slow_reader_makes_the_sender_fail_at_once_and_gets_all_that_was_sent() {
    let (one, other) = pair();
    let message = |number: u32| number.to_ne_bytes();
    let mut sent = 0;
    let refusal = loop {
        match one.send(&message(sent), NONE) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refusal.kind(), ErrorKind::WouldBlock);
    assert!(sent > 1, "{sent} messages fit");
    let mut buffer = [0; 8];
    for expected in 0..sent {
        let received = other.receive_by(&mut buffer, soon()).unwrap();
        assert_eq!(buffer[..received.bytes], message(expected));
    }
    one.send(&message(sent), NONE).unwrap();
    assert_eq!(other.receive_by(&mut buffer, soon()).unwrap().bytes, 4);
}

#[test]
fn a_message_that_does_not_come_is_not_waited_for_beyond_the_deadline() {
    let (one, other) = pair();
    assert!(matches!(other.receive_by(&mut [0; 8], Instant::now()), Err(Failure::TimedOut)));
    let limit = Duration::from_millis(20);
    let begun = Instant::now();
    assert!(matches!(other.receive_by(&mut [0; 8], begun + limit), Err(Failure::TimedOut)));
    assert!(begun.elapsed() >= limit);
    one.send(b"after all", NONE).unwrap();
    assert!(other.receive_by(&mut [0; 16], soon()).is_ok());
}

#[test]
fn a_listener_that_accepts_nobody_is_given_up_at_the_deadline() {
    let name = name();
    let listener: Socket = Socket::listen(&name).unwrap();
    let mut waiting = Vec::new();
    let refusal = loop {
        match Socket::<OwnedFd>::connect(&name, Instant::now() + Duration::from_millis(200)) {
            Ok(socket) => waiting.push(socket),
            Err(error) => break error,
        }
    };
    assert_eq!(refusal.kind(), ErrorKind::TimedOut);
    assert!(!waiting.is_empty());
    let accepted: Vec<Socket> = waiting.iter().map(|_| listener.accept().unwrap()).collect();
    assert_eq!(accepted.len(), waiting.len());
    assert_eq!(
        listener.accept().unwrap_err().kind(),
        ErrorKind::WouldBlock,
        "nobody else waits, and it does not block"
    );
}

#[test]
fn a_name_is_one_listeners_and_free_again_after_it() {
    let name = name();
    let connect = || Socket::<OwnedFd>::connect(&name, soon());
    assert_eq!(connect().unwrap_err().kind(), ErrorKind::ConnectionRefused);
    let listener: Socket = Socket::listen(&name).unwrap();
    assert_eq!(Socket::<OwnedFd>::listen(&name).unwrap_err().kind(), ErrorKind::AddrInUse);
    connect().unwrap();
    drop(listener);
    assert_eq!(connect().unwrap_err().kind(), ErrorKind::ConnectionRefused);
    Socket::<OwnedFd>::listen(&name).unwrap();
    assert!(Socket::<OwnedFd>::listen(&"x".repeat(200)).is_err(), "too long a name");
}

#[test]
fn those_that_have_something_to_read_are_told_from_those_that_do_not() {
    let (one, quiet) = pair();
    let (two, said) = pair();
    let (three, ended) = pair();
    let all = [&quiet, &said, &ended];
    assert_eq!(wait(all, Some(Duration::ZERO)).unwrap(), [false; 3]);
    two.send(b"!", NONE).unwrap();
    drop(three);
    assert_eq!(wait(all, None).unwrap(), [false, true, true]);
    drop((one, two));
}

const CHILD: &str = "GPUPOOL_WIRE_TEST_CONNECTS_TO";

/// This test program anew, which runs one test only and is told a name there.
fn child(before: &[&str], test: &str, name: &str) -> Command {
    let program = std::env::current_exe().unwrap();
    let words: Vec<_> = before.iter().map(|word| (*word).into()).chain([program.into_os_string()]).collect();
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args(["--exact", test, "--nocapture"]).env(CHILD, name);
    command
}

#[test]
fn credentials_are_the_kernels_of_the_other_process() {
    const THIS: &str = "credentials_are_the_kernels_of_the_other_process";
    let uid = rustix::process::geteuid().as_raw();
    if let Ok(name) = std::env::var(CHILD) {
        let socket: Socket = Socket::connect(&name, soon()).unwrap();
        let parent = std::os::unix::process::parent_id();
        assert_eq!(socket.peer().unwrap(), Credentials { pid: parent, uid });
        // Until the other side has looked.
        assert_eq!(socket.receive_by(&mut [0; 8], soon()).unwrap().bytes, 0);
        return;
    }
    let name = name();
    let listener: Socket = Socket::listen(&name).unwrap();
    let mut started = child(&[], THIS, &name).spawn().unwrap();
    wait([&listener], Some(Duration::from_secs(30))).unwrap();
    let socket = listener.accept().unwrap();
    assert_eq!(socket.peer().unwrap(), Credentials { pid: started.id(), uid });
    drop(socket);
    assert!(started.wait().unwrap().success());
}

#[test]
fn a_process_of_another_pid_namespace_has_no_number_here() {
    const THIS: &str = "a_process_of_another_pid_namespace_has_no_number_here";
    if let Ok(name) = std::env::var(CHILD) {
        let socket: Socket = Socket::connect(&name, soon()).unwrap();
        assert_eq!(socket.peer().unwrap().pid, 0);
        return;
    }
    let unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork"];
    let may = Command::new(unshare[0]).args(&unshare[1..]).arg("true").status();
    if !may.is_ok_and(|status| status.success()) {
        println!("no namespace of its own to be had here: not checked");
        return;
    }
    let name = name();
    let _listener: Socket = Socket::listen(&name).unwrap();
    assert!(child(&unshare, THIS, &name).status().unwrap().success());
}

#[test]
fn another_user_and_a_user_without_a_number_are_not_this_one() {
    let own = rustix::process::geteuid().as_raw();
    assert_eq!(Credentials { pid: 1, uid: own }.is_same_user().is_ok(), own != 65534);
    let other = Credentials { pid: 1, uid: own + 1 }.is_same_user().unwrap_err();
    assert!(other.contains(&format!("of user {}, this one of user {own}", own + 1)), "{other}");
}
