//! How commands on several hosts that write one image of a job find each other and agree at every step of it: by files in the job's folder, which is all
//! that they share.
//!
//! ```text
//! DIR/.meeting-5f3a…/          one attempt: made by node 0 in one step, and removed by it
//!   said/0000-called           by node 0: who it is
//!   said/0001-came, …          by node 0: what all have said at this step, and what follows
//!   said/alive-17              by node 0, with a higher number twice a second
//!   heard/1-77aa…-0001-came    by node 1, of which there may be another one that was killed: a number of its own tells them apart
//!   heard/1-77aa…-alive-9      as of node 0
//!   heard/1-77aa…-left         it takes part no more, and why
//! ```
//!
//! **What is asked of the file system** is little, since it may be one of several hosts (NFS): a file is written under another name, closed and renamed, and neither
//! changed nor called the same again, so what a host remembers of one is right. A folder is opened anew for each look at it, by its name: that is
//! when such a host asks the server whether it knows its entries still (close-to-open). Changes within one tick of the server's clock may look like none; the next sign of
//! life is one more change. No lock and no clock of two hosts is compared: a node is lost once its sign of life has not changed for [`LOST`].
//!
//! **Who is killed** leaves its files. Node 0 alone says which attempt there is and who takes part: what an older one has left is answered by nobody, and removed by the
//! next node 0 once it has seen that nobody lives there.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Display, Formatter};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::disk::{Disk, Folder};
use crate::error::{Error, Result};
use crate::signals;
use crate::store::{Store, read_whole};

/// How often a node says that it lives.
const BEAT: Duration = Duration::from_millis(500);
/// Who has not said so for this long takes part no more. A server of files may be slow.
const LOST: Duration = Duration::from_secs(10);
/// How long what others have left is looked at before it is removed.
const LEFT: Duration = Duration::from_secs(3);
/// How much longer the others wait for node 0 than it does for them.
const SLACK: Duration = Duration::from_secs(2);
/// How long node 0 waits at the end until all others have read its last word.
const TO_READ: Duration = Duration::from_secs(3);
/// How long those who have come to an attempt that ends may need until they have seen it.
const TO_LEAVE: Duration = Duration::from_secs(1);
/// How often it is looked whether others have come.
const COMING: Duration = Duration::from_millis(20);

const MEETING: &str = ".meeting-";
/// What an attempt is called besides, to which nobody comes yet, or any more.
const HIDDEN: &str = ".new";
const SAID: &str = "said";
const HEARD: &str = "heard";
const CALLED: &str = "0000-called";
const CAME: &str = "0001-came";
const LEFT_NAME: &str = "left";
const ALIVE: &str = "alive-";

/// Who takes part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Who {
    /// From 0.
    pub node: u32,
    /// The name of its host.
    pub host: String,
    /// The process there that speaks for it.
    pub pid: u32,
}

impl Display for Who {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        write!(out, "node {} (host {}, process {})", self.node, self.host, self.pid)
    }
}

/// How long a step may take, and how soon its end is to be seen.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// How long all have until they have said something; `None`: as long as they live.
    pub within: Option<Duration>,
    /// How often it is looked.
    pub look: Duration,
}

#[derive(Serialize, Deserialize)]
struct Came<T> {
    nodes: u32,
    who: Who,
    told: T,
}

/// Who takes part, and by which number of its own.
type Roll = Vec<(Who, String)>;

/// A word in its file: what was said, or why nothing more will be.
type Word<T> = std::result::Result<T, String>;

fn in_words<T>(result: Result<T>) -> Word<T> {
    result.map_err(|error| error.to_string())
}

fn own_number() -> String {
    format!("{:016x}", RandomState::new().build_hasher().finish())
}

fn write(folder: &Folder, name: &str, told: &impl Serialize) -> Result<()> {
    let text = serde_json::to_vec(told).map_err(|error| Error::misuse(format!("{name}: {error}")))?;
    let unfinished = format!(".{name}");
    let file = folder.create(&unfinished, false)?;
    file.write(&text, 0)?;
    // Closed before it has its name: whoever opens it then has all of it.
    drop(file);
    folder.rename(&unfinished, name)
}

fn read<T: DeserializeOwned>(folder: &Folder, name: &str) -> Result<T> {
    let file = folder.open(name, false)?;
    serde_json::from_slice(&read_whole(&file)?).map_err(|error| Error::damaged(file.path(), error.to_string()))
}

/// Removes an attempt. Nobody comes to it once it has its other name, and who has come already, and may say something in this moment, leaves as soon as there is nobody
/// to listen to. What can be removed no sooner than [`TO_LEAVE`] is left for the next node 0, which it does not disturb.
fn remove_all(store: &Store, name: &str) -> Result<()> {
    let gone = format!("{}{HIDDEN}", name.trim_end_matches(HIDDEN));
    if gone != name {
        store.folder.rename(name, &gone)?;
    }
    // One that was killed while it made them has made only some.
    let inner = |inner: &str| store.folder.folder(&gone).and_then(|attempt| attempt.remove_folder(inner));
    let _ = inner(SAID);
    let until = Instant::now() + TO_LEAVE;
    loop {
        let _ = inner(HEARD);
        let is_there =
            !matches!(store.folder.remove_folder(&gone), Ok(()) | Err(Error::Io { errno: Errno::NOENT, .. }));
        if !is_there || Instant::now() >= until {
            return Ok(());
        }
        std::thread::sleep(COMING);
    }
}

/// Says now and then that this node lives, until it is dropped.
#[derive(Debug)]
struct Beat {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Beat {
    fn begin(folder: Folder, prefix: String) -> Result<Self> {
        let name = move |number: u64| format!("{prefix}{ALIVE}{number}");
        drop(folder.create(&name(0), false)?);
        let (stop, stopped) = channel::<()>();
        let path = folder.path().to_owned();
        let beat = move || {
            let mut number = 0;
            while stopped.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
                // What cannot be said is not heard, which says the same.
                if folder.rename(&name(number), &name(number + 1)).is_ok() {
                    number += 1;
                }
            }
            let _ = folder.remove(&name(number));
        };
        let thread = signals::spawn(beat)
            .map_err(|error| Error::misuse(format!("{}: no thread can be started: {error}", path.display())))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// When somebody's sign of life changed last.
#[derive(Debug)]
struct Pulse {
    last: Option<String>,
    since: Instant,
}

impl Pulse {
    fn new() -> Self {
        Self { last: None, since: Instant::now() }
    }

    /// Whether there has been none for too long.
    fn is_lost(&mut self, names: &[String], prefix: &str) -> bool {
        let mut signs =
            names.iter().filter(|name| name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(ALIVE)));
        let now = signs.next().cloned();
        if now.is_some() && now != self.last {
            (self.last, self.since) = (now, Instant::now());
        }
        self.since.elapsed() >= LOST
    }
}

/// The commands of all nodes, as one of them sees it. Whoever drops it takes part no more.
#[derive(Debug)]
pub struct Meeting {
    store: Store,
    name: String,
    attempt: Folder,
    own: Who,
    /// Node 0 has none.
    prefix: String,
    roll: Roll,
    step: u32,
    pulses: BTreeMap<u32, Pulse>,
    why: Option<String>,
    beat: Option<Beat>,
}

impl Meeting {
    /// Calls the others, as node 0, and waits `until` all have come, as long as that `is_wanted`. `check` is told what each has said of itself, in their order, and
    /// may refuse. For who has the lock of the folder, where the file system keeps locks.
    ///
    /// # Errors
    /// Why there is no meeting, in words; who has come is told the same.
    pub fn lead<T: Serialize + DeserializeOwned>(
        folder: &Path,
        nodes: u32,
        (own, told): (Who, T),
        until: Instant,
        is_wanted: &dyn Fn() -> bool,
        check: impl FnOnce(&[(Who, T)]) -> Word<()>,
    ) -> Word<Self> {
        Self::lead_on(folder, nodes, (own, told), until, is_wanted, check, &Disk::default())
    }

    pub(crate) fn lead_on<T: Serialize + DeserializeOwned>(
        folder: &Path,
        nodes: u32,
        (own, told): (Who, T),
        until: Instant,
        is_wanted: &dyn Fn() -> bool,
        check: impl FnOnce(&[(Who, T)]) -> Word<()>,
        disk: &Disk,
    ) -> Word<Self> {
        let mut meeting = in_words(Self::call(folder, own, disk))?;
        let word = meeting.all_that_come(nodes, told, until, is_wanted);
        let word = word.and_then(|came| {
            let (told, roll): (Vec<_>, Roll) =
                came.into_iter().map(|(prefix, Came { who, told, .. })| ((who.clone(), told), (who, prefix))).unzip();
            check(&told).map(|()| roll)
        });
        if let Err(error) = meeting.said().and_then(|said| write(&said, CAME, &word)) {
            return Err(meeting.leave(error.to_string()));
        }
        match word {
            Ok(roll) => {
                meeting.roll = roll;
                Ok(meeting)
            }
            Err(why) => Err(meeting.leave(why)),
        }
    }

    /// Makes what the others find.
    fn call(folder: &Path, own: Who, disk: &Disk) -> Result<Self> {
        let store = Store::open(folder, true, disk)?;
        sweep(&store)?;
        let name = format!("{MEETING}{}", own_number());
        let unfinished = format!("{name}{HIDDEN}");
        let attempt = store.folder.make(&unfinished)?;
        attempt.make(HEARD)?;
        let said = attempt.make(SAID)?;
        write(&said, CALLED, &own)?;
        let beat = Beat::begin(said, String::new())?;
        store.folder.rename(&unfinished, &name)?;
        let mut meeting = Self::new(store, name, attempt, own, String::new());
        meeting.beat = Some(beat);
        // Another one that came in the same moment finds this one, too.
        let others = meetings(&meeting.store)?.into_iter().find(|other| *other != meeting.name);
        match others {
            None => Ok(meeting),
            Some(other) => Err(taken(&meeting.store, &other)),
        }
    }

    fn new(store: Store, name: String, attempt: Folder, own: Who, prefix: String) -> Self {
        let pulses = BTreeMap::new();
        Self { store, name, attempt, own, prefix, roll: Roll::new(), step: 1, pulses, why: None, beat: None }
    }

    /// Opened anew: see above.
    fn said(&self) -> Result<Folder> {
        self.attempt.folder(SAID)
    }

    fn heard(&self) -> Result<Folder> {
        self.attempt.folder(HEARD)
    }

    fn all_that_come<T: DeserializeOwned>(
        &self,
        nodes: u32,
        told: T,
        until: Instant,
        is_wanted: &dyn Fn() -> bool,
    ) -> Word<Vec<(String, Came<T>)>> {
        let mut come = BTreeMap::from([(0, (String::new(), Came { nodes, who: self.own.clone(), told }))]);
        let mut pulses: BTreeMap<String, Pulse> = BTreeMap::new();
        let begun = Instant::now();
        loop {
            let heard = in_words(self.heard())?;
            let names = in_words(heard.names())?;
            for name in &names {
                let Some(prefix) = name.strip_suffix(CAME).filter(|_| !name.starts_with('.')) else { continue };
                if come.values().any(|(known, _)| known == prefix) {
                    continue;
                }
                let pulse = pulses.entry(prefix.to_owned()).or_insert_with(Pulse::new);
                let has_left = names.contains(&format!("{prefix}{LEFT_NAME}"));
                // Whoever came first is this node, and after its end the next one.
                if has_left || pulse.is_lost(&names, prefix) {
                    continue;
                }
                let came: Came<T> = in_words(read(&heard, name))?;
                let node = came.who.node;
                if came.nodes != nodes || node >= nodes || node == 0 {
                    return Err(format!(
                        "{} came as one of {} nodes, and this is node 0 of {nodes}; start the command with --node K/{nodes}, K from 0 to {}, once \
                         on each host",
                        came.who,
                        came.nodes,
                        nodes - 1
                    ));
                }
                come.entry(node).or_insert((prefix.to_owned(), came));
            }
            come.retain(|node, (prefix, _)| {
                let has_left = names.contains(&format!("{prefix}{LEFT_NAME}"));
                *node == 0 || !has_left && !pulses.get_mut(prefix).is_some_and(|pulse| pulse.is_lost(&names, prefix))
            });
            if come.len() == nodes as usize {
                return Ok(come.into_values().collect());
            }
            let missing: Vec<String> =
                (0..nodes).filter(|node| !come.contains_key(node)).map(|node| node.to_string()).collect();
            if !is_wanted() || Instant::now() >= until {
                return Err(format!(
                    "node {} of {nodes} (from 0) has not come to {} within {}: the command is started once on each host, with the same folder",
                    missing.join(", "),
                    self.store.folder.path().display(),
                    seconds(begun.elapsed())
                ));
            }
            std::thread::sleep(COMING);
        }
    }

    /// Joins the attempt of node 0, as one of the others, for which it is waited `until` then, as long as that `is_wanted`.
    ///
    /// # Errors
    /// Why there is no meeting, in words.
    pub fn join<T: Serialize>(
        folder: &Path,
        nodes: u32,
        (own, told): (Who, T),
        until: Instant,
        is_wanted: &dyn Fn() -> bool,
    ) -> Word<Self> {
        Self::join_on(folder, nodes, (own, told), until, is_wanted, &Disk::default())
    }

    pub(crate) fn join_on<T: Serialize>(
        folder: &Path,
        nodes: u32,
        (own, told): (Who, T),
        until: Instant,
        is_wanted: &dyn Fn() -> bool,
        disk: &Disk,
    ) -> Word<Self> {
        let mut entered = Vec::new();
        let joined = Self::join_any(folder, nodes, (own, told), until, is_wanted, disk, &mut entered);
        // Where node 0 counts on this one already, it hears why.
        if let Err(why) = &joined {
            entered.iter_mut().for_each(|meeting| meeting.why = Some(why.clone()));
        }
        joined
    }

    fn join_any<T: Serialize>(
        folder: &Path,
        nodes: u32,
        (own, told): (Who, T),
        until: Instant,
        is_wanted: &dyn Fn() -> bool,
        disk: &Disk,
        entered: &mut Vec<Self>,
    ) -> Word<Self> {
        // Made where it is not there: that asks the server, whatever this host remembers of it.
        in_words(Store::open(folder, true, disk))?;
        let came = Came { nodes, who: own, told };
        let prefix = format!("{}-{}-", came.who.node, own_number());
        let mut known = BTreeSet::new();
        let begun = Instant::now();
        loop {
            let store = in_words(Store::open(folder, false, disk))?;
            for name in in_words(meetings(&store))? {
                if known.insert(name.clone()) {
                    entered.extend(in_words(Self::enter(folder, name, &prefix, &came, disk))?);
                }
            }
            let mut at = 0;
            while at < entered.len() {
                let meeting = &entered[at];
                let Some((said, names)) = in_words(meeting.what_is_said())? else {
                    entered.remove(at);
                    continue;
                };
                if names.iter().any(|name| name == CAME) {
                    let roll: Roll = in_words(read::<Word<Roll>>(&said, CAME))??;
                    let own = |(_, known): &(Who, String)| *known == prefix;
                    if !roll.iter().any(own) {
                        let other = roll.into_iter().map(|(who, _)| who).find(|who| who.node == came.who.node);
                        let other = other.map_or("another process".to_owned(), |who| who.to_string());
                        return Err(format!(
                            "{other} takes part already; each host has a number of its own, and one command"
                        ));
                    }
                    let mut meeting = entered.remove(at);
                    meeting.roll = roll;
                    return Ok(meeting);
                }
                at += 1;
            }
            if !is_wanted() || Instant::now() >= until {
                return Err(format!(
                    "node 0 of {nodes} has not come to {} within {}, or others of them have not: the command is started once on each host, with \
                     the same folder",
                    folder.display(),
                    seconds(begun.elapsed())
                ));
            }
            std::thread::sleep(COMING);
        }
    }

    /// Comes to an attempt, unless it goes on without this node or is removed in this moment.
    fn enter<T: Serialize>(
        folder: &Path,
        name: String,
        prefix: &str,
        came: &Came<T>,
        disk: &Disk,
    ) -> Result<Option<Self>> {
        let store = Store::open(folder, false, disk)?;
        let Some(attempt) = unless_gone(store.folder.folder(&name))? else { return Ok(None) };
        let mut meeting = Self::new(store, name, attempt, came.who.clone(), prefix.to_owned());
        if meeting.what_is_said()?.is_none_or(|(_, names)| names.iter().any(|name| name == CAME)) {
            return Ok(None);
        }
        let begin = |meeting: &mut Self| -> Result<()> {
            meeting.beat = Some(Beat::begin(meeting.heard()?, prefix.to_owned())?);
            write(&meeting.heard()?, &format!("{prefix}{CAME}"), came)
        };
        let begun = begin(&mut meeting);
        Ok(unless_gone(begun)?.map(|()| meeting))
    }

    /// What node 0 has said, and by which names; `None`: the attempt is over, and removed.
    fn what_is_said(&self) -> Result<Option<(Folder, Vec<String>)>> {
        unless_gone(self.said().and_then(|said| said.names().map(|names| (said, names))))
    }

    /// All that take part, in their order.
    pub fn nodes(&self) -> impl Iterator<Item = &Who> {
        self.roll.iter().map(|(who, _)| who)
    }

    /// Says something at this `step`, and hears what node 0 makes of what all have said, in their order (`decide`): the same for all.
    ///
    /// # Errors
    /// Somebody takes part no more, who and why in words; this is the end then.
    pub fn agree<W: Serialize + DeserializeOwned, V: Serialize + DeserializeOwned>(
        &mut self,
        step: &str,
        word: W,
        pace: Pace,
        decide: impl FnOnce(Vec<(Who, W)>) -> V,
    ) -> Word<V> {
        let agreed = self.agree_on(step, word, pace, decide);
        // The others hear it where they still can.
        self.why = agreed.as_ref().err().cloned();
        agreed
    }

    fn agree_on<W: Serialize + DeserializeOwned, V: Serialize + DeserializeOwned>(
        &mut self,
        step: &str,
        word: W,
        pace: Pace,
        decide: impl FnOnce(Vec<(Who, W)>) -> V,
    ) -> Word<V> {
        self.step += 1;
        let name = format!("{:04}-{step}", self.step);
        if self.own.node > 0 {
            let own = format!("{}{name}", self.prefix);
            in_words(self.heard().and_then(|heard| write(&heard, &own, &word)))?;
            return self.verdict(&name, pace)?;
        }
        let verdict = self.all_words(&name, word, pace).map(decide);
        in_words(self.said().and_then(|said| write(&said, &name, &verdict)))?;
        verdict
    }

    fn all_words<W: DeserializeOwned>(&mut self, name: &str, own: W, pace: Pace) -> Word<Vec<(Who, W)>> {
        let until = pace.within.map(|within| Instant::now() + within);
        let roll = self.roll.clone();
        let mut words = BTreeMap::from([(0, (self.own.clone(), own))]);
        loop {
            let heard = in_words(self.heard())?;
            let names = in_words(heard.names())?;
            for (who, prefix) in &roll[1..] {
                if words.contains_key(&who.node) {
                    continue;
                }
                let (word, left) = (format!("{prefix}{name}"), format!("{prefix}{LEFT_NAME}"));
                if names.contains(&word) {
                    let word = read(&heard, &word).map_err(|error| format!("{who} is not understood: {error}"))?;
                    words.insert(who.node, (who.clone(), word));
                } else if names.contains(&left) {
                    return Err(given_up(who, &heard, &left));
                }
            }
            if words.len() == roll.len() {
                return Ok(words.into_values().collect());
            }
            for (who, prefix) in &roll[1..] {
                let pulse = self.pulses.entry(who.node).or_insert_with(Pulse::new);
                if pulse.is_lost(&names, prefix) {
                    return Err(lost(who));
                }
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                let late: Vec<String> = roll
                    .iter()
                    .filter(|(who, _)| !words.contains_key(&who.node))
                    .map(|(who, _)| who.to_string())
                    .collect();
                return Err(format!("{} did not answer in time", late.join(", ")));
            }
            std::thread::sleep(pace.look);
        }
    }

    fn verdict<V: DeserializeOwned>(&mut self, name: &str, pace: Pace) -> Word<Word<V>> {
        let until = pace.within.map(|within| Instant::now() + within + SLACK);
        let Some(first) = self.nodes().next().cloned() else { return Err("there is no node 0".to_owned()) };
        loop {
            let Some((said, names)) = in_words(self.what_is_said())? else {
                return Err(format!("{first} has given up"));
            };
            if names.iter().any(|known| known == name) {
                return read(&said, name).map_err(|error| format!("{first} is not understood: {error}"));
            }
            if names.iter().any(|known| known == LEFT_NAME) {
                return Err(given_up(&first, &said, LEFT_NAME));
            }
            if self.pulses.entry(0).or_insert_with(Pulse::new).is_lost(&names, "") {
                return Err(lost(&first));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Err(format!("{first} did not answer in time"));
            }
            std::thread::sleep(pace.look);
        }
    }

    /// Takes part no more, and says why to the others; the same comes back.
    pub fn leave(mut self, why: String) -> String {
        self.why = Some(why.clone());
        why
    }

    /// Waits until the others have left, so that they have read the last word.
    fn wait_for_others(&mut self) {
        let until = Instant::now() + TO_READ;
        while Instant::now() < until {
            // A look that fails says nothing of them: removed now, the last word would be heard by nobody.
            if let Ok(names) = self.heard().and_then(|heard| heard.names()) {
                let mut others =
                    names.iter().filter(|name| !name.starts_with('.')).filter_map(|name| name.strip_suffix(CAME));
                if others.all(|prefix| names.contains(&format!("{prefix}{LEFT_NAME}"))) {
                    return;
                }
            }
            std::thread::sleep(COMING);
        }
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        // What cannot be said now is seen by the others, as of one that was killed.
        if self.own.node > 0 {
            let left = format!("{}{LEFT_NAME}", self.prefix);
            let _ = self.heard().and_then(|heard| write(&heard, &left, &self.why));
            return;
        }
        let _ = self.said().and_then(|said| write(&said, LEFT_NAME, &self.why));
        self.wait_for_others();
        self.beat = None;
        // What is left is removed by the next one.
        let _ = remove_all(&self.store, &self.name);
    }
}

fn given_up(who: &Who, folder: &Folder, left: &str) -> String {
    match read::<Option<String>>(folder, left) {
        Ok(Some(why)) => format!("{who} has given up: {why}"),
        _ => format!("{who} has given up"),
    }
}

/// As somebody who waited for it says it: of a short time not as 0.
fn seconds(time: Duration) -> String {
    let decimals = usize::from(time < Duration::from_secs(10));
    format!("{:.decimals$} s", time.as_secs_f64())
}

fn lost(who: &Who) -> String {
    format!(
        "{who} has said nothing for {} s: it was killed or stopped, or its host does not reach the folder",
        LOST.as_secs()
    )
}

/// `None` where it is about something that is not there any more, as of an attempt that is removed in this moment: the file systems of several hosts have a word of their own for that.
fn unless_gone<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Err(Error::Io { errno: Errno::NOENT | Errno::STALE, .. }) => Ok(None),
        result => result.map(Some),
    }
}

/// The attempts that there are.
fn meetings(store: &Store) -> Result<Vec<String>> {
    Ok(store.folder.names()?.into_iter().filter(|name| name.starts_with(MEETING) && !name.ends_with(HIDDEN)).collect())
}

/// What is told where another attempt lives.
fn taken(store: &Store, name: &str) -> Error {
    let who =
        store.folder.folder(name).and_then(|attempt| attempt.folder(SAID)).and_then(|said| read::<Who>(&said, CALLED));
    let who = who.map_or("the command of another host".to_owned(), |who| who.to_string());
    Error::refused(store.folder.path(), format!("{who} writes an image of a job there; one at a time"))
}

/// Removes what killed ones have left.
fn sweep(store: &Store) -> Result<()> {
    let sign = |name: &String| -> Result<Option<String>> {
        let names = store.folder.folder(name).and_then(|attempt| attempt.folder(SAID)?.names());
        Ok(unless_gone(names)?.and_then(|names| names.into_iter().find(|name| name.starts_with(ALIVE))))
    };
    let all = || -> Result<BTreeMap<String, Option<String>>> {
        let names = store.folder.names()?.into_iter().filter(|name| name.starts_with(MEETING));
        names.map(|name| Ok((name.clone(), sign(&name)?))).collect()
    };
    let before = all()?;
    let until = Instant::now() + LEFT;
    while !before.is_empty() && Instant::now() < until {
        let now = all()?;
        // One without a sign and with its other name begins or ends just now: whoever begins has a sign in a moment.
        let is_known = |name: &String, sign: &Option<String>| before.get(name) == Some(sign);
        let passes = |name: &str, sign: &Option<String>| name.ends_with(HIDDEN) && sign.is_none();
        if let Some((name, _)) = now.iter().find(|(name, sign)| !is_known(name, sign) && !passes(name, sign)) {
            return Err(taken(store, name));
        }
        std::thread::sleep(COMING);
    }
    before.keys().try_for_each(|name| match remove_all(store, name) {
        Err(Error::Io { errno: Errno::NOENT, .. }) => Ok(()),
        answer => answer,
    })
}
