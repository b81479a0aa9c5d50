//! Requests to this process (`gpupool suspend`, `resume`, `checkpoint`, `set`, `drain`, `undrain`): whoever has one listens by a file beside the
//! page, and rings.

use super::{Published, drains, last, page_path, set};
use crate::checkpoint::{self, Asked, Busy};
use crate::gate::{self, Disturbed};
use crate::guard;
use crate::recall::give;
use crate::serve::ipc::Own;
use crate::suspend::vacate::{Rest, Vacated};
use crate::suspend::{self, Agreement, Alone, bring_home};
use gpupool_store::signals::stack_of;
use gpupool_wire::Socket;
use gpupool_wire::control::{self, Reply, Request, Stayed, Stored, Target, Together};
use gpupool_wire::socket::Failure;
use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the thread that writes an image is called.
const THREAD: &str = "gpupool-image";
/// Bytes of its stack.
const STACK: usize = 2 << 20;
/// How long whoever rang has to say what it wants, before the agent goes on with what else there is to do.
const TO_ASK: Duration = Duration::from_secs(2);
/// For how long the share of the image before that has its turn is read before a program is stopped: what is not read by then has its memory copied instead. Of several programs
/// each is waited for by the others.
const AHEAD: Duration = Duration::from_secs(20);
const AHEAD_TOGETHER: Duration = Duration::from_secs(1);
/// How long a program that was stopped with others waits for the word that they have stopped too.
const TO_AGREE: Duration = Duration::from_secs(5);
/// As long, where some of them are on other hosts, and commands ask each other by files of a shared folder: they give up before that.
const TO_AGREE_APART: Duration = Duration::from_secs(15);
/// How long one whose memory is copied waits for those whose is not: these may have to write to a disk.
const TO_FOLLOW: Duration = Duration::from_secs(600);
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
    // Whoever rang may have said it by the file alone: a process that was stopped heard of nothing else.
    let drains = drains::look()
        .into_iter()
        .chain(set::look())
        .chain(bring_home::look())
        .chain(suspend::settle())
        .chain(suspend::spare::look())
        .min();
    if !suspend::waits_for_others() {
        let again = suspend::has_just_failed().then_some(PERIOD);
        return again.into_iter().chain(drains).min();
    }
    suspend::keep_empty();
    // Whoever resumes it finds it by its page.
    if last::has_main_left() {
        suspend::resume_unreachable(
            "its main thread has left, and the system finds its memory no more, by which a command calls it",
        );
    } else if !Published::own().is_some_and(Published::is_found) {
        suspend::resume_unreachable("its metrics page is gone, no longer to be seen by its user, or written over");
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
        Ok(Request::Checkpoint { folder, keep, patience, together, leaves, full }) => {
            let ahead = match together {
                // Nobody waits for the end of the stop, or others for the beginning of it.
                _ if leaves => Duration::ZERO,
                Together::Alone => AHEAD,
                Together::Host | Together::Hosts => AHEAD_TOGETHER,
            };
            let asked = Asked { folder, keep: usize::try_from(keep).ok().filter(|keep| *keep > 0), full, ahead };
            if !leaves {
                return begin_image(asked, within(patience), together, socket);
            }
            in_words(image_and_leave(&asked, within(patience), together, &socket))
        }
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

/// When so many milliseconds are over.
fn within(patience: u64) -> Instant {
    Instant::now() + Duration::from_millis(patience).min(MOST)
}

/// Tells whoever asked how far it is: that there is something to do, that it is begun with, and from then on now and then.
fn teller(socket: &Socket<Own>) -> impl FnMut(u64, u64) + '_ {
    let mut told = (0u32, Instant::now());
    move |done, total| {
        let (times, at) = told;
        if times < 2 || at.elapsed() >= PACE {
            told = (times.saturating_add(1), Instant::now());
            say(socket, &Reply::Progress { done, total }.encode());
        }
    }
}

/// Has an image written by a thread of its own, which has this one's signals, all of them blocked. It takes minutes, and this thread has others to
/// answer.
fn begin_image(asked: Asked, deadline: Instant, together: Together, socket: Socket<Own>) {
    let socket = Arc::new(socket);
    let to_answer = Arc::clone(&socket);
    // Here and not by that thread, which begins when the system likes: whoever is heard next may ask for a suspension.
    let busy = Busy::begin();
    let write = move || {
        // Every driver call of this thread is ours.
        let _inside = guard::enter();
        let (socket, mut progress) = (&*to_answer, teller(&to_answer));
        let take = || {
            conducted(socket, deadline, together, |agreement, is_wanted| {
                checkpoint::take(&asked, busy, deadline, is_wanted, agreement, &mut progress)
            })
        };
        // What panics has said where. The end of the connection tells whoever asked.
        let Ok(taken) = catch_unwind(AssertUnwindSafe(take)) else { return };
        // So does that of the process.
        if taken.is_err() && gate::is_ending() {
            return;
        }
        say(socket, &taken.map_or_else(|why| Reply::Refused { why }, |done| Reply::Stored(stored(&done))).encode());
    };
    let thread = std::thread::Builder::new().name(THREAD.to_owned()).stack_size(stack_of(STACK));
    if let Err(error) = thread.spawn(write) {
        say(&socket, &Reply::Refused { why: format!("there can be no further thread: {error}") }.encode());
    }
}

fn stored(done: &checkpoint::Done) -> Stored {
    Stored {
        generation: done.generation,
        bytes: done.bytes,
        stored: done.stored,
        fresh: done.fresh,
        unchanged: done.unchanged,
        damaged: done.damaged,
        left_out: done.all_left_out(),
        not_copied: done.not_copied,
        to_gpus: done.to_gpus,
        to_host: done.to_host,
        in_stop: done.in_stop,
        stopped_microseconds: done.stopped.as_micros() as u64,
        microseconds: done.took.as_micros() as u64,
        not_removed: done.not_removed.clone(),
    }
}

fn carry_out(request: Request, socket: &Socket<Own>) -> Reply {
    let mut progress = teller(socket);
    let is_wanted = || is_there(socket);
    let done = match request {
        Request::Suspend { target, patience, together } => {
            let deadline = within(patience);
            if let Err(why) = can_be_called() {
                return Reply::Refused { why };
            }
            // It would stand still in the middle, and be lost if the program ended.
            if checkpoint::is_under_way() {
                return Reply::Refused {
                    why: "an image of it is being written (gpupool checkpoint); once that is there, suspend it"
                        .to_owned(),
                };
            }
            let together = if together { Together::Host } else { Together::Alone };
            let done = conducted(socket, deadline, together, |agreement, is_wanted| {
                suspend::suspend(&target, deadline, is_wanted, agreement, &mut progress)
            });
            if_wanted(done, is_wanted)
        }
        Request::Apart { ranks } => Err(suspend::refuse_alone(&ranks)),
        Request::Resume => suspend::resume(&mut progress),
        Request::Close | Request::Open | Request::Go => {
            Err("this is said to a program that is being suspended together with others".to_owned())
        }
        Request::Freezable => suspend::is_freezable(),
        Request::Checkpoint { .. } => Err("it is for a thread of its own".to_owned()),
        Request::Set(all) => {
            return match set::set(&all, &is_wanted) {
                Ok(changes) => Reply::Changed(changes),
                Err(why) => Reply::Refused { why },
            };
        }
        Request::Drain { gpu, patience } => {
            return left(drains::drain(&gpu, within(patience), &is_wanted, &mut progress));
        }
        Request::Undrain { gpu, patience } => {
            return left(drains::undrain(&gpu, within(patience), &is_wanted, &mut progress));
        }
        Request::GiveWay { gpu, bytes, priority, loans, patience } => {
            // No other user's, root's neither: whoever has no page in this folder does not matter more than who has.
            let asker = socket.peer().map_err(|error| error.to_string());
            match asker.and_then(|peer| peer.is_same_user().map(|()| peer.pid)) {
                Ok(pid) => {
                    give::give_way(&gpu, (bytes, loans), priority, pid, within(patience), &is_wanted, &mut progress)
                        .map(|(Vacated { moved, took, .. }, stayed)| suspend::Done {
                            moved,
                            stayed,
                            took,
                            ..Default::default()
                        })
                }
                Err(why) => Err(why),
            }
        }
    };
    in_words(done)
}

fn in_words(done: Result<suspend::Done, String>) -> Reply {
    match done {
        Ok(suspend::Done { moved, stayed, to_disk, stored, took, waited }) => {
            let [microseconds, waited] = [took, waited].map(|time| time.as_micros() as u64);
            Reply::Done { moved, stayed, to_disk, stored, microseconds, waited }
        }
        Err(why) => Reply::Refused { why },
    }
}

/// Whether a suspended program could be asked to go on.
fn can_be_called() -> Result<(), String> {
    if last::has_main_left() {
        return Err("its main thread has left, so that nobody could call it to resume it".to_owned());
    }
    Ok(())
}

/// What became of a suspension, if somebody hears it: who was interrupted before the answer has asked for nothing, and nobody else knows that the program is to
/// be resumed.
fn if_wanted(done: Result<suspend::Done, String>, is_wanted: impl Fn() -> bool) -> Result<suspend::Done, String> {
    if done.is_err() || is_wanted() {
        return done;
    }
    let back = suspend::resume(&mut |_, _| {});
    let why = back.err().map_or_else(String::new, |why| format!(", and it could not be resumed: {why}"));
    Err(format!("whoever asked for it has gone{why}"))
}

/// An image of the program, and behind that its memory leaves for the host: all of it by this thread, as of any suspension, and at one moment. The image is told of as soon as
/// it is whole, and stays whatever becomes of the rest.
fn image_and_leave(
    asked: &Asked,
    deadline: Instant,
    together: Together,
    socket: &Socket<Own>,
) -> Result<suspend::Done, String> {
    can_be_called()?;
    if suspend::since() != 0 {
        return Err(suspend::FIRST.to_owned());
    }
    let mut prepared = Some(checkpoint::Prepared::new(asked, Busy::begin())?);
    let mut progress = teller(socket);
    let done = conducted(socket, deadline, together, |agreement, is_wanted| {
        let mut image = |held: &gate::Held, progress: &mut dyn FnMut(u64, u64)| {
            let Some(prepared) = prepared.take() else { return Ok(()) };
            let done = checkpoint::take_held(prepared, held, progress)?;
            say(socket, &Reply::Stored(stored(&done)).encode());
            Ok(())
        };
        suspend::suspend_behind(&Target::Host, deadline, is_wanted, agreement, &mut image, &mut progress)
    });
    if_wanted(done, || is_there(socket))
}

fn left(done: Result<Vacated, String>) -> Reply {
    match done {
        Ok(Vacated { moved, rest, took }) => {
            let stayed = rest.into_iter().map(|Rest { bytes, what, .. }| Stayed { bytes, what });
            Reply::Left { moved, microseconds: took.as_micros() as u64, stayed: stayed.collect() }
        }
        Err(why) => Reply::Refused { why },
    }
}

/// Does what has to be agreed with whoever asked where that is for several programs `together`; `act` is told how, and whether it is wanted still.
fn conducted<T>(
    socket: &Socket<Own>,
    deadline: Instant,
    together: Together,
    act: impl FnOnce(&mut dyn Agreement, &dyn Fn() -> bool) -> T,
) -> T {
    let is_alone = together == Together::Alone;
    let is_agreed = Cell::new(is_alone);
    let to_agree = if together == Together::Hosts { TO_AGREE_APART } else { TO_AGREE };
    let mut conducted = Conducted { socket, deadline, to_agree, is_agreed: &is_agreed, tries: 0 };
    let agreement: &mut dyn Agreement = if is_alone { &mut Alone::default() } else { &mut conducted };
    // Until then its end is seen where its words are waited for, which nobody else may read.
    act(agreement, &|| if is_agreed.get() { is_there(socket) } else { socket.is_there() })
}

/// The command says when, to all programs that it suspends together.
struct Conducted<'a> {
    socket: &'a Socket<Own>,
    deadline: Instant,
    /// How long the word that all have stopped may take.
    to_agree: Duration,
    /// Nothing more is to be said.
    is_agreed: &'a Cell<bool>,
    tries: u32,
}

/// The shortest try, and how often each further one is twice as long, before it begins anew: most come to rest at once or, where another one was stopped
/// first, not at all; and some need a whole step of what they do.
const SHORTEST: Duration = Duration::from_millis(100);
const DOUBLINGS: u32 = 5;

impl Conducted<'_> {
    /// Its next word.
    fn word(&self, until: Instant) -> Option<Request> {
        let mut buffer = [0; control::ROOM];
        let received = self.socket.receive_by(&mut buffer, until).ok()?;
        Request::decode(&buffer[..received.bytes]).ok()
    }
}

impl Agreement for Conducted<'_> {
    fn hold(&mut self) -> Duration {
        self.tries += 1;
        SHORTEST * (1 << ((self.tries - 1) % DOUBLINGS))
    }

    fn may_close(&mut self) -> bool {
        loop {
            match self.word(self.deadline + self.to_agree) {
                Some(Request::Close) => return true,
                // It said so to all, also to those that had not stopped.
                Some(Request::Open) => {}
                _ => return false,
            }
        }
    }

    fn is_quiet(&mut self) -> bool {
        say(self.socket, &Reply::Quiet.encode());
        self.is_agreed.set(matches!(self.word(Instant::now() + self.to_agree), Some(Request::Go)));
        self.is_agreed.get()
    }

    fn is_done(&mut self) -> bool {
        say(self.socket, &Reply::Quiet.encode());
        matches!(self.word(Instant::now() + TO_FOLLOW), Some(Request::Go))
    }

    fn is_disturbed(&mut self, disturbed: &Disturbed) {
        say(self.socket, &Reply::Busy { why: disturbed.to_string() }.encode());
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
