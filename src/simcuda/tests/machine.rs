//! One machine of several processes: what one of them uses is missing for the others, until it gives it back or ends.

#![allow(clippy::macro_metavars_in_unsafe, reason = "the macro is there to make the one unsafe call")]
#![allow(clippy::unwrap_used, reason = "helpers of tests, where a panic is the report")]

mod common;

use common::*;
use cudarc::driver::sys::*;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::ptr::null_mut;

const MACHINE: &str = "SIMCUDA_MACHINE";
/// Set in the other processes of a test: the number of the socket over which descriptors come and go.
const SOCKET: &str = "SIMCUDA_TEST_SOCKET";
const MIB: usize = 1 << 20;
const FD: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
/// Two GPUs on which a context costs little, and little host memory.
const SMALL: [(&str, &str); 3] =
    [("SIMCUDA_GPUS", "2x256MiB"), ("SIMCUDA_CONTEXT_MIB", "16"), ("SIMCUDA_HOST", "128MiB")];

/// Runs `body` as the test's own process on a machine with several; processes that it starts take orders instead.
fn together(name: &str, body: fn()) {
    alone(name, &SMALL, body);
}

/// The body of a test, in either kind of process.
fn on_a_machine(body: impl FnOnce()) {
    if let Ok(socket) = std::env::var(SOCKET) {
        return obey(socket.parse().unwrap());
    }
    let folder = std::env::temp_dir().join(format!("simcuda-machine-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    // SAFETY: this process has one thread beside the harness' own, which reads no variables.
    unsafe { std::env::set_var(MACHINE, folder.join("machine")) };
    body();
    std::fs::remove_dir_all(folder).unwrap();
}

/// A process that does as it is told, on GPU 0 of those it sees.
struct Other {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    socket: UnixStream,
}

impl Other {
    fn start() -> Self {
        Self::start_seeing("0,1")
    }

    fn start_seeing(devices: &str) -> Self {
        let (socket, theirs) = UnixStream::pair().unwrap();
        let number = theirs.as_raw_fd();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([std::env::var("SIMCUDA_TEST").unwrap().as_str(), "--exact", "--nocapture", "--test-threads=1"])
            .env(SOCKET, number.to_string())
            .env("CUDA_VISIBLE_DEVICES", devices)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // SAFETY: between fork and exec only the one system call is made, on a descriptor that is open there.
        unsafe {
            command.pre_exec(move || {
                libc::fcntl(number, libc::F_SETFD, 0);
                Ok(())
            })
        };
        let mut child = command.spawn().unwrap();
        let (orders, answers) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, orders, answers, socket }
    }

    fn send(&mut self, order: &str) {
        writeln!(self.orders.as_mut().unwrap(), "{order}").unwrap();
    }

    fn answer(&mut self) -> i64 {
        let mut line = String::new();
        while self.answers.read_line(&mut line).unwrap() > 0 {
            // What the test harness prints comes before the first answer, on the same line too.
            if let Some((_, answer)) = line.split_once("> ") {
                return answer.trim().parse().unwrap();
            }
            line.clear();
        }
        panic!("the other process ended early");
    }

    fn ask(&mut self, order: &str) -> i64 {
        self.send(order);
        self.answer()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn end(mut self) {
        self.orders = None;
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended already; where a test failed it must not stay.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn obey(socket: RawFd) {
    // SAFETY: the parent made the socket for this process, which knows no other owner.
    let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(socket) });
    start_on(0);
    let (mut taken, mut handle, mut address) = (Vec::new(), 0, 0);
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let number = words.get(1).map_or(0, |word| word.parse::<usize>().unwrap());
        let answer = match words[0] {
            "alloc" => {
                let mut block = 0;
                let code = cu!(cuMemAlloc_v2(&mut block, number * MIB));
                taken.push(block);
                i64::from(code)
            }
            "free" => i64::from(cu!(cuMemFree_v2(taken.pop().unwrap()))),
            "pin" => {
                let mut place = null_mut();
                i64::from(cu!(cuMemHostAlloc(&mut place, number * MIB, 0)))
            }
            "free-mib" => {
                let (mut free, mut total) = (0, 0);
                ok!(cuMemGetInfo_v2(&mut free, &mut total));
                (free / MIB) as i64
            }
            "used-mib" => (used(number as i32) / MIB as u64) as i64,
            // As many frames as there are.
            "hog" => {
                let mut count = 0;
                while cu!(cuMemCreate(&mut handle, CHUNK, &prop(0), 0)) == 0 {
                    count += 1;
                }
                count
            }
            "export" => {
                let mut wanted = prop(0);
                wanted.requestedHandleTypes = FD;
                ok!(cuMemCreate(&mut handle, number * MIB, &wanted, 0));
                let mut descriptor = -1_i32;
                ok!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, FD, 0));
                // SAFETY: the descriptor was just made for this process.
                give(&socket, unsafe { OwnedFd::from_raw_fd(descriptor) });
                0
            }
            "import" => {
                let descriptor = receive(&socket);
                ok!(cuMemImportFromShareableHandle(&mut handle, descriptor.as_raw_fd() as usize as *mut _, FD));
                0
            }
            "map" => {
                address = reserve(number * MIB);
                ok!(cuMemMap(address, number * MIB, 0, handle, 0));
                i64::from(grant(address, number * MIB, &[0]))
            }
            "release" => i64::from(cu!(cuMemRelease(handle))),
            "unmap" => i64::from(cu!(cuMemUnmap(address, number * MIB))),
            "write" => i64::from(cu!(cuMemsetD32_v2(address, number as u32, 1))),
            "read" => i64::from(read(address)),
            // A child that has the descriptors, and ends with the socket.
            "fork" => {
                // SAFETY: the child waits for the end of its input and leaves.
                unsafe {
                    let child = libc::fork();
                    if child == 0 {
                        libc::read(socket.as_raw_fd(), [0_u8; 1].as_mut_ptr().cast(), 1);
                        libc::_exit(0);
                    }
                    i64::from(child)
                }
            }
            // What a daemon does.
            "close-all" => {
                // SAFETY: plain system call; standard input, output and error stay.
                unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
                0
            }
            "exec" => {
                println!("> 0");
                panic!("{}", Command::new("cat").exec());
            }
            _ => panic!("{line}"),
        };
        println!("> {answer}");
    }
}

/// Sends one descriptor.
fn give(socket: &UnixStream, descriptor: OwnedFd) {
    let number = descriptor.as_raw_fd();
    message(socket, |header, control| {
        // SAFETY: the control buffer has room for one descriptor, and header and buffer live across the call.
        unsafe {
            (*control).cmsg_level = libc::SOL_SOCKET;
            (*control).cmsg_type = libc::SCM_RIGHTS;
            (*control).cmsg_len = libc::CMSG_LEN(4) as usize;
            libc::CMSG_DATA(control).cast::<i32>().write_unaligned(number);
            assert_eq!(libc::sendmsg(socket.as_raw_fd(), header, 0), 1);
        }
    });
}

fn receive(socket: &UnixStream) -> OwnedFd {
    let mut number = -1;
    message(socket, |header, control| {
        // SAFETY: the kernel fills the control buffer, which lives across the call.
        unsafe {
            assert_eq!(libc::recvmsg(socket.as_raw_fd(), header, libc::MSG_CMSG_CLOEXEC), 1);
            assert_eq!((*control).cmsg_type, libc::SCM_RIGHTS);
            number = libc::CMSG_DATA(control).cast::<i32>().read_unaligned();
        }
    });
    // SAFETY: the descriptor was just received and nobody else closes it.
    unsafe { OwnedFd::from_raw_fd(number) }
}

fn message(_socket: &UnixStream, body: impl FnOnce(*mut libc::msghdr, *mut libc::cmsghdr)) {
    let (mut byte, mut control) = ([0_u8; 1], [0_u64; 4]);
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: a structure of integers and pointers, for which zero is a value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    // SAFETY: a computation from the size of one descriptor.
    header.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as usize;
    body(&raw mut header, control.as_mut_ptr().cast());
}

#[test]
fn what_one_process_uses_is_missing_for_the_other() {
    together("what_one_process_uses_is_missing_for_the_other", || {
        on_a_machine(|| {
            let (mut a, mut b) = (Other::start(), Other::start());
            // Both contexts are there, and each costs 16 MiB.
            assert_eq!([a.ask("alloc 0"), b.ask("alloc 0")], [1, 1]);
            assert_eq!([a.ask("free-mib"), b.ask("free-mib")], [224, 224]);
            assert_eq!(a.ask("alloc 200"), 0);
            assert_eq!([a.ask("free-mib"), b.ask("free-mib")], [24, 24]);
            assert_eq!([b.ask("alloc 26"), b.ask("alloc 24"), a.ask("alloc 2")], [2, 0, 2]);
            assert_eq!([b.ask("used-mib 0"), b.ask("used-mib 1")], [256, 0]);
            assert_eq!([a.ask("pin 100"), b.ask("pin 29"), b.ask("pin 28")], [0, 2, 0]);
            a.end();
            assert_eq!(b.ask("free-mib"), 216);
            b.end();
        });
    });
}

#[test]
fn a_killed_process_gives_everything_back() {
    together("a_killed_process_gives_everything_back", || {
        on_a_machine(|| {
            let (mut a, mut b) = (Other::start(), Other::start());
            assert_eq!([a.ask("alloc 100"), b.ask("alloc 100"), b.ask("pin 100")], [0, 0, 0]);
            // What the killed process wrote is not there for the next.
            assert_eq!([b.ask("export 16"), b.ask("map 16"), b.ask("write 77")], [0, 0, 0]);
            drop(receive(&b.socket));
            assert_eq!([a.ask("alloc 10"), a.ask("pin 64")], [2, 2]);
            b.kill();
            assert_eq!([a.ask("free-mib"), a.ask("pin 64")], [140, 0]);
            assert_eq!([a.ask("export 140"), a.ask("map 140"), a.ask("read")], [0, 0, 0]);
            let mut c = Other::start_seeing("1");
            assert_eq!([c.ask("used-mib 0"), a.ask("used-mib 0"), a.ask("used-mib 1")], [16, 256, 16]);
            a.kill();
            c.end();
        });
    });
}

#[test]
fn a_process_that_runs_another_program_has_ended() {
    together("a_process_that_runs_another_program_has_ended", || {
        on_a_machine(|| {
            let (mut a, mut b) = (Other::start(), Other::start());
            assert_eq!(b.ask("alloc 100"), 0);
            // The other program answers too, so it runs.
            assert_eq!([b.ask("exec"), b.ask("> 5")], [0, 5]);
            assert_eq!(a.ask("free-mib"), 240);
            b.end();
            a.end();
        });
    });
}

#[test]
fn a_child_that_has_the_descriptors_keeps_the_memory_as_on_a_real_gpu() {
    together("a_child_that_has_the_descriptors_keeps_the_memory_as_on_a_real_gpu", || {
        on_a_machine(|| {
            let (mut a, mut b) = (Other::start(), Other::start());
            // SAFETY: plain system call: orphans become children of this process.
            unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
            assert_eq!(b.ask("alloc 100"), 0);
            let child = b.ask("fork");
            b.kill();
            assert_eq!(a.ask("free-mib"), 124);
            // The child, which is this process' now, ends with its socket.
            b.socket.shutdown(std::net::Shutdown::Both).unwrap();
            // SAFETY: plain system call; nobody else waits for this child.
            assert_eq!(unsafe { libc::waitpid(child as i32, null_mut(), 0) }, child as i32);
            assert_eq!(a.ask("free-mib"), 240);
            a.end();
        });
    });
}

#[test]
fn a_process_that_closed_its_descriptors_still_counts() {
    together("a_process_that_closed_its_descriptors_still_counts", || {
        on_a_machine(|| {
            let (mut a, mut b) = (Other::start(), Other::start());
            assert_eq!([b.ask("alloc 100"), b.ask("close-all"), b.ask("alloc 10")], [0, 0, 0]);
            assert_eq!([a.ask("free-mib"), b.ask("free-mib"), a.ask("alloc 120")], [114, 114, 2]);
            b.kill();
            assert_eq!([a.ask("alloc 120"), a.ask("free-mib")], [0, 120]);
            a.end();
        });
    });
}

#[test]
fn exported_memory_is_counted_once_and_lives_until_its_last_holder_is_gone() {
    together("exported_memory_is_counted_once_and_lives_until_its_last_holder_is_gone", || {
        on_a_machine(|| {
            let (mut a, mut b, mut c) = (Other::start(), Other::start(), Other::start_seeing("1"));
            assert_eq!([a.ask("export 64"), a.ask("map 64"), a.ask("write 41")], [0, 0, 0]);
            let descriptor = receive(&a.socket);
            let told = |b: &mut Other| b.ask("free-mib");
            assert_eq!([told(&mut b), c.ask("alloc 1")], [160, 0]);
            a.kill();
            assert_eq!(told(&mut b), 176, "the descriptor is still on its way");
            give(&b.socket, descriptor);
            assert_eq!([b.ask("import"), b.ask("map 64"), b.ask("read"), told(&mut b)], [0, 0, 41, 176]);
            let mut d = Other::start();
            assert_eq!([told(&mut d), d.ask("alloc 162"), d.ask("alloc 160")], [160, 2, 0]);
            assert_eq!([b.ask("read"), b.ask("release"), told(&mut d), b.ask("unmap 64")], [41, 0, 0, 0]);
            assert_eq!([told(&mut d), d.ask("export 64"), d.ask("map 64"), d.ask("read")], [64, 0, 0, 0]);
            drop(receive(&d.socket));
            assert_eq!(told(&mut d), 0);
            [b, c, d].into_iter().for_each(Other::end);
        });
    });
}

#[test]
fn ten_processes_at_once_take_what_there_is_and_no_more() {
    together("ten_processes_at_once_take_what_there_is_and_no_more", || {
        on_a_machine(|| {
            let mut others: Vec<Other> = (0..10).map(|_| Other::start()).collect();
            // Each has its context before the first takes frames.
            others.iter_mut().for_each(|other| assert_eq!(other.ask("alloc 0"), 1));
            others.iter_mut().for_each(|other| other.send("hog"));
            let counts: Vec<i64> = others.iter_mut().map(Other::answer).collect();
            assert_eq!(counts.iter().sum::<i64>(), (256 - 160) / 2, "{counts:?}");
            let mut last = others.pop().unwrap();
            last.kill();
            assert_eq!(others[0].ask("free-mib"), 16 + 2 * counts[9]);
            others.into_iter().for_each(Other::end);
        });
    });
}

#[test]
fn a_process_with_another_idea_of_the_machine_is_refused() {
    together("a_process_with_another_idea_of_the_machine_is_refused", || {
        on_a_machine(|| {
            let mut a = Other::start();
            assert_eq!(a.ask("alloc 1"), 0);
            let me = std::env::current_exe().unwrap();
            let mut command = Command::new(me);
            let name = std::env::var("SIMCUDA_TEST").unwrap();
            command.args([name.as_str(), "--exact", "--nocapture"]).env(SOCKET, "99").env("SIMCUDA_GPUS", "4x256MiB");
            let output = command.output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success());
            assert!(said.contains("this machine was made with other SIMCUDA_GPUS"), "{said}");
            a.end();
        });
    });
}
