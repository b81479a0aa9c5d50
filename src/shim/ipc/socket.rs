//! Unix sockets that carry whole messages and file descriptors. The standard library has neither.

use super::own::Own;
use std::io::{Error, ErrorKind, Result};
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// Bytes of control data for the most descriptors that one message may carry.
const CONTROL: usize = 8 << 10;

/// A sequenced-packet socket: messages arrive whole and in order, and an end is seen.
#[derive(Debug)]
pub struct Socket(Own);

/// What one message brought.
#[derive(Debug)]
pub struct Received {
    /// Its length; 0 at the end of the connection.
    pub bytes: usize,
    pub descriptors: Vec<OwnedFd>,
    /// Some descriptors were lost: this process may have no more.
    pub truncated: bool,
}

/// An abstract address: no file to leave behind, gone with its socket.
fn address(name: &str) -> Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all-zero is a valid value of this C struct.
    let mut address: libc::sockaddr_un = unsafe { zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    if name.len() >= address.sun_path.len() {
        return Err(ErrorKind::InvalidInput.into());
    }
    for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let length = size_of::<libc::sa_family_t>() + 1 + name.len();
    Ok((address, length as libc::socklen_t))
}

/// The answer of a call that gives -1 and `errno`.
fn checked(answer: libc::c_int) -> Result<libc::c_int> {
    if answer < 0 { Err(Error::last_os_error()) } else { Ok(answer) }
}

/// Makes a call again that a signal interrupted.
fn uninterrupted<T>(mut call: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            answer => return answer,
        }
    }
}

impl Socket {
    fn new(flags: libc::c_int) -> Result<Self> {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | flags;
        // SAFETY: socket has no preconditions.
        let fd = checked(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })?;
        // SAFETY: the descriptor is new and nobody else closes it.
        Ok(Self(Own::new(unsafe { OwnedFd::from_raw_fd(fd) })?))
    }

    /// A socket that others connect to by this name. Its calls never block.
    pub fn listen(name: &str) -> Result<Self> {
        let socket = Self::new(libc::SOCK_NONBLOCK)?;
        let (address, length) = address(name)?;
        // SAFETY: the address is of that length.
        checked(unsafe { libc::bind(socket.fd(), (&raw const address).cast(), length) })?;
        // SAFETY: the descriptor is a bound socket.
        checked(unsafe { libc::listen(socket.fd(), 64) })?;
        Ok(socket)
    }

    /// The next connection, whose calls never block either.
    pub fn accept(&self) -> Result<Self> {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let fd = uninterrupted(|| {
            // SAFETY: NULL says that the peer's address is not wanted.
            checked(unsafe { libc::accept4(self.fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags) })
        })?;
        // SAFETY: the descriptor is new and nobody else closes it.
        Ok(Self(Own::new(unsafe { OwnedFd::from_raw_fd(fd) })?))
    }

    /// Connects to a listener of that name, which may be too busy to take it at once.
    pub fn connect(name: &str, deadline: Instant) -> Result<Self> {
        let socket = Self::new(0)?;
        let (address, length) = address(name)?;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            let limit = libc::timeval {
                tv_sec: left.as_secs() as libc::time_t,
                // Zero in both would be no limit.
                tv_usec: libc::suseconds_t::from(left.subsec_micros().max(1)),
            };
            // For Unix sockets the limit on sending is the one on connecting.
            socket.set_option(libc::SO_SNDTIMEO, &limit)?;
            // SAFETY: the address is of that length.
            match checked(unsafe { libc::connect(socket.fd(), (&raw const address).cast(), length) }) {
                Ok(_) => return Ok(socket),
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(error) => return Err(error),
            }
        }
    }

    pub fn fd(&self) -> RawFd {
        self.0.number()
    }

    /// Whether the descriptor still is this socket: the program may have closed it, and its next file has the number.
    pub fn is_there(&self) -> bool {
        self.0.is_there()
    }

    fn set_option<T>(&self, option: libc::c_int, value: &T) -> Result<()> {
        let length = size_of::<T>() as libc::socklen_t;
        // SAFETY: the value is of that length, and each caller gives the type of its option.
        checked(unsafe {
            libc::setsockopt(self.fd(), libc::SOL_SOCKET, option, std::ptr::from_ref(value).cast(), length)
        })?;
        Ok(())
    }

    /// User and process at the other end, as they were when it connected or began to listen.
    pub fn peer(&self) -> Result<libc::ucred> {
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the output is of the option's type and length.
        checked(unsafe {
            libc::getsockopt(self.fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut length)
        })?;
        Ok(peer)
    }

    /// Sends one message with these descriptors, or fails at once.
    pub fn send(&self, bytes: &[u8], descriptors: &[OwnedFd]) -> Result<()> {
        let mut control = [0u64; CONTROL / 8];
        let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: all-zero is a valid value of this C struct.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if !descriptors.is_empty() {
            let length = (descriptors.len() * size_of::<RawFd>()) as u32;
            // SAFETY: CMSG_SPACE and CMSG_LEN compute.
            let (space, total) = unsafe { (libc::CMSG_SPACE(length) as usize, libc::CMSG_LEN(length) as usize) };
            if space > CONTROL {
                return Err(ErrorKind::InvalidInput.into());
            }
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = space;
            // SAFETY: the control buffer is aligned as its header wants and has room for it and for the descriptors.
            unsafe {
                let header = libc::CMSG_FIRSTHDR(&raw const message);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = total;
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                for (index, descriptor) in descriptors.iter().enumerate() {
                    data.add(index).write_unaligned(descriptor.as_raw_fd());
                }
            }
        }
        uninterrupted(|| {
            let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
            // SAFETY: the message describes buffers that outlive the call.
            let sent = unsafe { libc::sendmsg(self.fd(), &raw const message, flags) };
            if sent < 0 { Err(Error::last_os_error()) } else { Ok(()) }
        })
    }

    /// Receives one message that is there already; `WouldBlock` if there is none.
    pub fn receive(&self, buffer: &mut [u8]) -> Result<Received> {
        let mut control = [0u64; CONTROL / 8];
        let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        // SAFETY: all-zero is a valid value of this C struct.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = CONTROL;
        let bytes = uninterrupted(|| {
            let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
            // SAFETY: the message describes buffers that outlive the call.
            let received = unsafe { libc::recvmsg(self.fd(), &raw mut message, flags) };
            usize::try_from(received).map_err(|_| Error::last_os_error())
        })?;
        let mut descriptors = Vec::new();
        // SAFETY: the kernel has filled the control buffer with well-formed headers, of which those of SCM_RIGHTS carry
        // descriptors that are new in this process and nobody else's.
        unsafe {
            let mut header = libc::CMSG_FIRSTHDR(&raw const message);
            while !header.is_null() {
                if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                    let data = libc::CMSG_DATA(header).cast::<RawFd>();
                    let length = (*header).cmsg_len - libc::CMSG_LEN(0) as usize;
                    for index in 0..length / size_of::<RawFd>() {
                        descriptors.push(OwnedFd::from_raw_fd(data.add(index).read_unaligned()));
                    }
                }
                header = libc::CMSG_NXTHDR(&raw const message, header);
            }
        }
        Ok(Received { bytes, descriptors, truncated: message.msg_flags & libc::MSG_CTRUNC != 0 })
    }

    /// The next message, until `deadline`.
    pub fn receive_by(&self, buffer: &mut [u8], deadline: Instant) -> Result<Received> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            wait(&mut [readable(self.fd())], Some(left))?;
            match self.receive(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                answer => return answer,
            }
        }
    }
}

/// Interest in what a descriptor has to read.
pub fn readable(fd: RawFd) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// Waits until one of these has something, a signal comes, or the time is over.
pub fn wait(list: &mut [libc::pollfd], limit: Option<Duration>) -> Result<()> {
    let limit = limit.map_or(-1, |limit| limit.as_millis().clamp(1, 60_000) as libc::c_int);
    // SAFETY: the list is of that length.
    match checked(unsafe { libc::poll(list.as_mut_ptr(), list.len() as libc::nfds_t, limit) }) {
        Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
        answer => answer.map(drop),
    }
}
