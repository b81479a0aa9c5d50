//! Requests to this process (`gpupool suspend`, `gpupool resume`): whoever has one listens by a file beside the page, and rings.

use super::{last, page_path};
use crate::serve::ipc::Own;
use crate::suspend::{self, Done};
use gpupool_metrics::BYTES;
use gpupool_wire::Socket;
use gpupool_wire::control::{self, Reply, Request};
use gpupool_wire::socket::Failure;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long whoever rang has to say what it wants, before the agent goes on with what else there is to do.
const TO_ASK: Duration = Duration::from_secs(2);
/// The longest that anybody waits for a program's work to be over.
const MOST: Duration = Duration::from_secs(24 * 3600);
/// How often a suspended process looks whether it can be asked still.
const PERIOD: Duration = Duration::from_secs(1);
/// The least time between two messages about how far it is.
const PACE: Duration = Duration::from_millis(100);

/// Does what is asked of the process, if anything is; how long nothing need be done. `None`: until somebody rings. `publish` has the page
/// tell what is so now: whoever reads it once the command has ended finds what that command did.
pub fn look(publish: &mut dyn FnMut()) -> Option<Duration> {
    suspend::resume_if_asked();
    if let Some(page) = page_path() {
        hear(page, publish);
    }
    if !suspend::waits_for_others() {
        return None;
    }
    // Whoever resumes it finds it by its page.
    let is_page =
        |page: &Path| page.symlink_metadata().is_ok_and(|status| status.is_file() && status.len() == BYTES as u64);
    if last::has_main_left() {
        suspend::resume_unreachable("its main thread has left, and no command takes it for a running process");
    } else if !page_path().is_some_and(is_page) {
        suspend::resume_unreachable("its metrics page is gone, or no longer to be seen by its user");
    }
    Some(PERIOD)
}

fn hear(page: &Path, publish: &mut dyn FnMut()) {
    let name = page.with_extension("call");
    if name.symlink_metadata().is_err() {
        return;
    }
    let Some((folder, name)) = name.parent().zip(name.file_name().and_then(|name| name.to_str())) else { return };
    let answer =
        std::fs::File::open(folder).and_then(|folder| Socket::<Own>::connect_in(OwnedFd::from(folder).as_fd(), name));
    // Whoever was there is gone: the next one removes the file.
    let Ok(socket) = answer else { return };
    if let Err(why) = may_ask(&socket) {
        tracing::warn!(target: "gpupool::control", about = "control", "a request to this process was not heard: {why}");
        return;
    }
    let mut buffer = [0; control::ROOM];
    let Ok(received) = socket.receive_by(&mut buffer, Instant::now() + TO_ASK) else { return };
    let reply = match Request::decode(&buffer[..received.bytes]) {
        Ok(request) => carry_out(request, &socket),
        Err(unread) => {
            if let Some(answer) = unread.answer() {
                say(&socket, &answer);
            }
            return;
        }
    };
    publish();
    say(&socket, &reply.encode());
}

/// The folder is the user's own and no other user's, so this is what root's processes and the user's own pass.
fn may_ask(socket: &Socket<Own>) -> Result<(), String> {
    let peer = socket.peer().map_err(|error| error.to_string())?;
    if peer.uid == 0 { Ok(()) } else { peer.is_same_user() }
}

fn carry_out(request: Request, socket: &Socket<Own>) -> Reply {
    let mut told = Instant::now();
    let mut progress = |done: u64, total: u64| {
        if told.elapsed() >= PACE {
            told = Instant::now();
            say(socket, &Reply::Progress { done, total }.encode());
        }
    };
    let done = match request {
        Request::Suspend { target, patience } => {
            let most = Duration::from_millis(patience).min(MOST);
            if last::has_main_left() {
                return Reply::Refused { why: "its main thread has left, so that nobody could resume it".to_owned() };
            }
            suspend::suspend(target, Instant::now() + most, &|| is_there(socket), &mut progress)
        }
        Request::Resume => suspend::resume(&mut progress),
    };
    match done {
        Ok(Done { moved, stayed, took }) => Reply::Done { moved, stayed, microseconds: took.as_micros() as u64 },
        Err(why) => Reply::Refused { why },
    }
}

/// Whether whoever asked waits for the answer.
fn is_there(socket: &Socket<Own>) -> bool {
    let mut nothing = [0; 1];
    let ended = match socket.receive(&mut nothing) {
        Ok(received) => received.bytes == 0,
        Err(Failure::System(error)) => error.kind() != std::io::ErrorKind::WouldBlock,
        Err(_) => true,
    };
    socket.is_there() && !ended
}

/// Whoever does not hear it has gone, or does not read: what was asked is done all the same.
fn say(socket: &Socket<Own>, message: &[u8]) {
    let none: [OwnedFd; 0] = [];
    if socket.is_there() {
        let _ = socket.send(message, &none);
    }
}
