//! The asking itself: of one process or of several at once, and what they answer, or why nobody does.

use std::io::ErrorKind;
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpupool_metrics::folder::Folder;
use gpupool_metrics::{Door, Life, Serving, Standing, is_all_ending, ring, stat};
use gpupool_wire::Socket;
use gpupool_wire::blocks::Handle;
use gpupool_wire::control::{ROOM, Reply, Request, Target};
use gpupool_wire::socket::{Credentials, Failure as Unheard, wait};
use rustix::fs::{AtFlags, Gid, Uid, chownat};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::telling::{Progress, Told, told_by};
use crate::pages::Listed;

/// How long a process has to connect. Its agent does so as soon as it runs: it may be at another request, or in a call of the driver.
const TO_ANSWER: Duration = Duration::from_secs(10);
/// How long it may say nothing while it moves memory, or while nothing is to be waited for: what moves at a time takes less than a second.
pub(super) const TO_GO_ON: Duration = Duration::from_secs(60);
/// How long it may say nothing once it has begun to write to a disk: at the end that is waited for until it has all of it for good.
const TO_WRITE: Duration = Duration::from_secs(600);
/// How often it is looked at while it does what it was asked.
const LOOK: Duration = Duration::from_secs(1);
/// How often it is rung for meanwhile.
const RING: Duration = Duration::from_millis(50);
/// How often who waits for its turn to ask looks whether it has come.
const TURN: Duration = Duration::from_millis(10);

/// What is told of a process that is frozen.
pub(super) const FROZEN: &str = "its control group is frozen, as of a container that is paused, and it answers nobody; let it go on (docker unpause, systemctl thaw), then again";

/// What is told of one that is stopped.
pub(super) fn stopped(pid: u32) -> String {
    format!("it is stopped (SIGSTOP) and answers nobody; kill -CONT {pid}, then again")
}

/// Why there is no answer.
pub struct NoAnswer {
    pub why: String,
    /// Whether it was asked: it may have done some of it, or all.
    pub was_asked: bool,
}

/// Asks all of these at once, and waits for as long as they take.
pub fn ask_all(rows: &[Listed], request: &Request) -> Vec<Told> {
    let replies = replies(rows, request, None).into_iter().zip(rows);
    replies.map(|(reply, row)| told_by(row, reply.map_err(|none| none.why))).collect()
}

/// What each of these answers, all asked at once; from `until` on nobody is waited for.
pub fn replies(rows: &[Listed], request: &Request, until: Option<Instant>) -> Vec<Result<Reply, NoAnswer>> {
    let progress = Progress::new(rows.len());
    let told = side_by_side(rows, |at, row| ask(row, request, until, &|done, total| progress.say(at, done, total)));
    progress.end();
    told
}

/// Asks one process, with its progress on a terminal.
///
/// # Errors
/// Nobody answered; why, in words.
pub fn ask_one(row: &Listed, request: &Request) -> Result<Reply, String> {
    let progress = Progress::new(1);
    let reply = ask(row, request, None, &|done, total| progress.say(0, done, total));
    progress.end();
    reply.map_err(|none| none.why)
}

/// Asks one process for an image behind which its memory leaves: what became of the image, and, where there is one, of that.
pub fn image_and_leave(row: &Listed, request: &Request) -> (Result<Reply, String>, Option<Told>) {
    let progress = Progress::new(1);
    let say = |done, total| progress.say(0, done, total);
    let socket = connect(row, request, None);
    let hear = || hear(row, socket.as_ref().map_err(Clone::clone)?, request, silence(request), None, &say);
    let image = hear();
    let left = matches!(image, Ok(Reply::Stored(_))).then(|| told_by(row, hear()));
    progress.end();
    (image, left)
}

/// How long a process may say nothing that has been asked this.
fn silence(request: &Request) -> Duration {
    match request {
        Request::Suspend { patience, .. } | Request::Checkpoint { patience, .. } => {
            TO_GO_ON + Duration::from_millis(*patience)
        }
        _ => TO_GO_ON,
    }
}

fn ask(
    row: &Listed,
    request: &Request,
    until: Option<Instant>,
    progress: &dyn Fn(u64, u64),
) -> Result<Reply, NoAnswer> {
    // It has that long and no longer, whatever it says meanwhile.
    let silence = until.map_or_else(|| silence(request), |until| until.saturating_duration_since(Instant::now()));
    let none = |was_asked| move |why| NoAnswer { why, was_asked };
    let socket = connect(row, request, until).map_err(none(false))?;
    hear(row, &socket, request, silence, until, progress).map_err(none(true))
}

/// A connection to the process, which has been asked.
pub(super) fn connect(row: &Listed, request: &Request, until: Option<Instant>) -> Result<Connected, String> {
    let words =
        |what: &str, error: &dyn std::fmt::Display| format!("{what} beside {} failed: {error}", row.page.display());
    if let Some(why) = out_of_reach(row) {
        return Err(why);
    }
    let folder = Folder::around(&row.page).map_err(|refused| refused.to_string())?;
    let page = row.page.file_name().unwrap_or_default();
    let name = row.page.with_extension("call");
    let name = name.file_name().and_then(|name| name.to_str()).ok_or("its page has a name that is none")?;
    let page = folder.page_to_ring(page).map_err(|error| words("opening the page", &error))?;
    let at_most = |limit: Instant| until.map_or(limit, |until| until.min(limit));
    let turn_by = at_most(Instant::now() + TO_ANSWER);
    // It has its time to answer from the moment on at which the others are done, however long that took.
    let mut answer_by: Option<Instant> = None;
    // Where the file system knows no such locks, whoever comes last is next.
    let standing = Standing::at_end(page.as_fd()).ok();
    let socket = loop {
        wait_for_turn(row, &page, standing, turn_by)?;
        let answer_by = *answer_by.get_or_insert_with(|| at_most(Instant::now() + TO_ANSWER));
        let is_first = || standing.is_none_or(|standing| !matches!(standing.before(page.as_fd()), Ok(Some(_))));
        let Some(listener) = listen(&folder, name, is_first)? else {
            // Whoever stays before this one for good is told of by the wait for the turn.
            if Instant::now() >= answer_by {
                return Err(format!("others listened in {} all the time", folder.path().display()));
            }
            std::thread::sleep(TURN);
            continue;
        };
        let is_given = give(&folder, name, row.owner);
        // What is there by now is another one's.
        if is_given == Ok(false) {
            continue;
        }
        let door = Door::at(&folder, name);
        is_given.map_err(|error| words("giving the socket to its user", &error))?;
        // Who goes on after a stop, or came late to its place in the line, finds that somebody else listens.
        if let Some(socket) = accept(&listener, row, &page, &door, answer_by)? {
            break socket;
        }
    };
    if let Some(standing) = standing {
        standing.leave(page.as_fd());
    }
    if let Some(at) = word_of(request) {
        Serving::begin(page.as_fd(), at);
    }
    say(&socket, request)?;
    Ok(Connected { socket, _page: page })
}

/// What keeps a process from others for as long as it takes, as these are told.
const WORDS: [&str; 5] = ["gpupool suspend", "gpupool resume", "gpupool drain", "gpupool undrain", "gpupool set"];

/// Which of them this is.
fn word_of(request: &Request) -> Option<usize> {
    match request {
        Request::Suspend { .. } => Some(0),
        Request::Resume => Some(1),
        Request::Drain { .. } => Some(2),
        Request::Undrain { .. } => Some(3),
        Request::Set(_) => Some(4),
        _ => None,
    }
}

/// A process that has been asked.
pub(super) struct Connected {
    socket: Socket,
    /// Which is said to be served as long as it is open.
    _page: OwnedFd,
}

impl Deref for Connected {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        &self.socket
    }
}

/// Waits until nobody who came earlier asks the process, also programs that lack memory.
fn wait_for_turn(row: &Listed, page: &OwnedFd, standing: Option<Standing>, until: Instant) -> Result<(), String> {
    while let Some(standing) = standing
        && let Ok(Some(_)) = standing.before(page.as_fd())
    {
        if let Some(why) = out_of_reach(row) {
            return Err(why);
        }
        if Instant::now() >= until {
            let what = Serving::look(page.as_fd()).and_then(|at| WORDS.get(at));
            return Err(what.map_or_else(
                || "others were asking it all the time, other commands or programs that lack memory".to_owned(),
                |what| format!("another command is at it ({what}); once that is over it can be asked again"),
            ));
        }
        std::thread::sleep(TURN);
    }
    Ok(())
}

pub(super) fn say(socket: &Socket, request: &Request) -> Result<(), String> {
    let none: [OwnedFd; 0] = [];
    socket.send(&request.encode(), &none).map_err(|error| format!("the connection to it broke: {error}"))
}

/// Its next message, which comes within `silence` of the last one.
pub(super) fn next(row: &Listed, socket: &Socket, silence: Duration) -> Result<Reply, String> {
    let mut buffer = [0; ROOM];
    let until = Instant::now() + silence;
    let mut has_broken = false;
    loop {
        // Its end is seen at once, and a stop now and then.
        let received = match socket.receive_by(&mut buffer, until.min(Instant::now() + LOOK)) {
            Ok(received) => received.bytes,
            Err(Unheard::TimedOut) if stat(row.told.process.identity.pid).is_some_and(|stat| stat.state == b'T') => {
                return Err(format!(
                    "it was stopped (SIGSTOP) before it had answered; what it was asked for it does not begin once it goes on; kill -CONT {}, then again",
                    row.told.process.identity.pid
                ));
            }
            Err(Unheard::TimedOut) if Instant::now() >= until => {
                return Err(format!(
                    "it has said nothing for {} s: a call of the driver in it does not return, perhaps because it waits for work of \
                     another process, or its disk does not; once that is over, it is as if nobody had asked, and an image that was begun is \
                     finished; ask again then, or end it (kill {})",
                    silence.as_secs(),
                    row.told.process.identity.pid
                ));
            }
            Err(Unheard::TimedOut) => continue,
            // That it has not heard all is told before what it said last, which is why.
            Err(_) if !has_broken => {
                has_broken = true;
                continue;
            }
            Err(failure) => return Err(format!("the connection to it broke: {failure}")),
        };
        if received == 0 {
            let identity = row.told.process.identity;
            // Of a process that ends its descriptors go once none of its threads does anything any more.
            let what = if identity.life().is_over() || is_all_ending(identity.pid) {
                "it ended before it had answered"
            } else {
                "it closed the connection before it had answered: its program closes descriptors that it did not open, or this user may not ask it; ask again"
            };
            return Err(what.to_owned());
        }
        return Reply::decode(&buffer[..received]).map_err(|unread| unread.to_string());
    }
}

/// What becomes of it in the end.
pub(super) fn hear(
    row: &Listed,
    socket: &Socket,
    request: &Request,
    silence: Duration,
    limit: Option<Instant>,
    progress: &dyn Fn(u64, u64),
) -> Result<Reply, String> {
    let mut silence = silence;
    loop {
        let left = limit.map_or(silence, |limit| limit.saturating_duration_since(Instant::now()).min(silence));
        match next(row, socket, left)? {
            Reply::Progress { done, total } => {
                progress(done, total);
                if let Request::Checkpoint { .. } | Request::Suspend { target: Target::Folder(_), .. } = request {
                    silence = TO_WRITE;
                }
            }
            reply => return Ok(reply),
        }
    }
}

/// Does this for each row, all at once.
pub(super) fn side_by_side<T: Send>(rows: &[Listed], act: impl Fn(usize, &Listed) -> T + Sync) -> Vec<T> {
    let act = &act;
    std::thread::scope(|scope| {
        let begun: Vec<_> = rows.iter().enumerate().map(|(at, row)| scope.spawn(move || act(at, row))).collect();
        // A thread of this command that panics has said so.
        begun.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// For whoever has the turn; `None`: somebody else listens, as of [`Door::listen`].
fn listen(folder: &Folder, name: &str, is_first: impl Fn() -> bool) -> Result<Option<Socket>, String> {
    let listener = Door::listen(folder, name, is_first, || Socket::<OwnedFd>::listen_in(folder.fd(), name));
    listener.map_err(|error| format!("listening in {} failed: {error}", folder.path().display()))
}

/// Gives a socket to its process's user: whoever is to connect needs to write to it. `false`: it is there no more, since another one that took the turn for its own has
/// removed it, as of two that come in the same millisecond.
fn give(folder: &Folder, name: &str, owner: u32) -> Result<bool, Errno> {
    match chownat(folder.fd(), name, Some(Uid::from_raw(owner)), None::<Gid>, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => Ok(false),
        answer => answer.map(|()| true),
    }
}

/// The process's connection; `None`: somebody else listens for it now.
fn accept(
    listener: &Socket,
    row: &Listed,
    page: &OwnedFd,
    door: &Door<'_>,
    until: Instant,
) -> Result<Option<Socket>, String> {
    let pid = row.told.process.identity.pid;
    let begun = Instant::now();
    let mut left: Option<Instant> = None;
    let knocks = sockets_of(row);
    while Instant::now() < until {
        ring(std::os::fd::AsFd::as_fd(page))
            .map_err(|error| format!("its page {} cannot be rung at: {error}", row.page.display()))?;
        // What serves others its blocks waits for sockets, and hears of a connection alone. Its end says that nothing is wanted.
        drop(knocks.iter().map(|name| Socket::<OwnedFd>::connect(name, Instant::now() + RING)).collect::<Vec<_>>());
        let _ = wait([listener], Some(RING));
        match row.told.process.identity.life() {
            Life::Gone => return Err("it ended before it had answered".to_owned()),
            // Before it heard anything: nothing was asked of it.
            Life::Frozen => return Err(FROZEN.to_owned()),
            _ => {}
        }
        // The system tells the same of a process that ends, whose threads go one after the other: that of this thread is over soon.
        if stat(pid).is_none_or(|stat| stat.state != b'Z') || is_all_ending(pid) {
            left = None;
        } else if left.get_or_insert_with(Instant::now).elapsed() >= LOOK {
            return Err(
                "its main thread has left (pthread_exit), and the system finds its memory no more, by which it would be called".to_owned()
            );
        }
        match listener.accept() {
            Ok(socket) => match socket.peer() {
                Ok(peer) if (peer.pid, peer.uid) == (pid, row.owner) => return Ok(Some(socket)),
                // Another command that looks whether somebody listens, or somebody who is not meant.
                _ => {}
            },
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(format!("its connection failed: {error}")),
        }
        // Before it heard anything: nothing was asked of it.
        if stat(pid).is_some_and(|stat| stat.state == b'T') {
            return Err(stopped(pid));
        }
        if !door.is_there() {
            return Ok(None);
        }
    }
    if is_all_ending(pid) {
        return Err("it is ending, which takes long: the system takes its memory down".to_owned());
    }
    // It was heard before.
    if let Some(what) = Serving::look(page.as_fd()).and_then(|at| WORDS.get(at)) {
        return Err(format!("another command is at it ({what}); once that is over it can be asked again"));
    }
    if let Some(most) = without_descriptors(pid) {
        return Err(format!(
            "it did not answer within {} s: it has no file descriptor left to answer by, of {most} that it may have (ulimit -n); nothing was asked of it; \
             prlimit --pid {pid} --nofile={} gives it some, or ask again once it has closed others",
            begun.elapsed().as_secs(),
            most.saturating_add(64)
        ));
    }
    Err(format!(
        "it did not answer within {} s: a call of the driver in it may not return, as where it waits for work that never ends, or it is stopped (as all of a \
         container that is paused); ask again once it goes on, or end it (kill {pid})",
        begun.elapsed().as_secs()
    ))
}

/// How many descriptors a process may have, where every one of them is in use.
fn without_descriptors(pid: u32) -> Option<u64> {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let most = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?.split_whitespace().next()?;
    let most: u64 = most.parse().ok()?;
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let numbers = open.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok());
    (numbers.filter(|number| *number < most).count() as u64 >= most).then_some(most)
}

/// The sockets at which a process of this user's serves blocks; another user's sends this one away, and says so.
fn sockets_of(row: &Listed) -> Vec<String> {
    let name = format!("@{}", Handle::sockets(row.told.process.identity.pid));
    let of_it = |line: &str| {
        line.split_whitespace().last().filter(|path| path.starts_with(&name)).map(|path| path[1..].to_owned())
    };
    let all =
        if row.owner == geteuid().as_raw() { std::fs::read_to_string("/proc/net/unix") } else { Ok(String::new()) };
    all.unwrap_or_default().lines().filter_map(of_it).collect()
}

/// Why a process that runs hears nothing of this command, where that is certain: it does not heed this user, or does not find its page any more, as another user or with
/// another root folder.
fn out_of_reach(row: &Listed) -> Option<String> {
    let pid = row.told.process.identity.pid;
    // As it looks at whoever asks.
    if !geteuid().is_root()
        && let Err(why) = (Credentials { pid, uid: row.owner }).is_same_user()
    {
        return Some(format!("it does nothing that this user asks for: {why}; ask as root"));
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    // The last of them is the one that counts for files.
    let acts: Option<u32> = uids.and_then(|uids| uids.split_whitespace().last()?.parse().ok());
    let again = "Once that is as it was, it can be asked again";
    if let Some(user) = acts.filter(|user| *user != row.owner && *user != 0) {
        let page = row.page.display();
        return Some(format!(
            "it acts as user {user} now (seteuid), and does not get to {page} of user {}. {again}",
            row.owner
        ));
    }
    let look = |path: &Path| std::fs::metadata(path).ok().map(|status| (status.dev(), status.ino()));
    let mounts = |whose: &str| std::fs::read_link(format!("/proc/{whose}/ns/mnt")).ok();
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let here = look(&root)?;
    // In a container it may see the same file by another path.
    if mounts("self")? != mounts(&pid.to_string())? || Some(here) == look(Path::new("/")) {
        return None;
    }
    let inside = look(&root.join(row.page.strip_prefix("/").ok()?));
    let other = std::fs::read_link(&root).unwrap_or_default();
    (inside != look(&row.page)).then(|| {
        format!(
            "its root folder is {} now (chroot), and {} is not in there. {again}",
            other.display(),
            row.page.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_metrics::folder::Roots;

    /// Both looked when nobody stood in the line yet, as of two that come in the same millisecond.
    #[test]
    fn who_finds_that_another_one_listens_who_came_earlier_waits() {
        let around = tempfile::tempdir().unwrap();
        let (folder, _) = Folder::own(&Roots::new(Some(around.path().into()))).unwrap();
        let listens = |is_first: bool| listen(&folder, "1-2.call", || is_first).unwrap();
        let earlier = listens(true).unwrap();
        let door = Door::at(&folder, "1-2.call");
        assert!(listens(false).is_none() && door.is_there());
        assert!(listens(true).is_some() && !door.is_there(), "who is first takes the place of one that is killed");
        drop((door, earlier));
    }

    #[test]
    fn a_socket_that_another_one_has_removed_before_it_was_given_to_its_user_is_no_failure() {
        let around = tempfile::tempdir().unwrap();
        let (folder, _) = Folder::own(&Roots::new(Some(around.path().into()))).unwrap();
        let own = geteuid().as_raw();
        let earlier = listen(&folder, "1-2.call", || true).unwrap().unwrap();
        drop(Door::at(&folder, "1-2.call"));
        assert_eq!(give(&folder, "1-2.call", own), Ok(false));
        let again = listen(&folder, "1-2.call", || true).unwrap();
        assert!(again.is_some() && give(&folder, "1-2.call", own) == Ok(true));
        drop((earlier, again));
    }
}
