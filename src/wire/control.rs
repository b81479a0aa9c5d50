//! What `gpupool suspend`, `resume`, `checkpoint`, `set`, `drain` and `undrain` say to a program, and it to them; and what a program that lacks
//! memory says to others.
//!
//! The command listens by a file beside the program's metrics page and rings at the page (`gpupool_metrics::ring`); the program's agent
//! connects. So a program that nobody asks anything has no socket, and no descriptor for one. One command is heard at a time: the file's
//! name is the process's.

use crate::message::{self, HEAD, Unread};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use zerocopy::native_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the longest text that goes with a request or an answer, and of all texts of a list together; what is longer is cut.
pub const MOST_TEXT: usize = 2048;
/// Bytes of the longest name of a folder that goes with a request.
pub const MOST_PATH: usize = 4095;
/// Rows of the longest list of what stayed; what goes beyond that is left out.
const MOST_STAYED: usize = 32;
/// The most ranks that are named at once; those beyond are left out.
const MOST_RANKS: usize = 256;
/// A buffer of this size has room for every message, and one byte more (see [`message::decode`]).
pub const ROOM: usize = HEAD + size_of::<StoredBytes>() + MOST_PATH + 1;
const _: () = assert!(HEAD + size_of::<SuspendBytes>() + MOST_PATH < ROOM);
const _: () = assert!(HEAD + MOST_RANKS * size_of::<U32>() < ROOM);
const _: () = assert!(HEAD + size_of::<AnswerBytes>() + MOST_TEXT < ROOM);
const _: () = assert!(HEAD + size_of::<LeftBytes>() + MOST_STAYED * size_of::<U64>() + MOST_TEXT < ROOM);
const _: () = assert!(HEAD + size_of::<CheckpointBytes>() + MOST_PATH < ROOM);
const _: () = assert!(HEAD + size_of::<StoredBytes>() + MOST_TEXT < ROOM);

const SUSPEND: u32 = 0x300;
const RESUME: u32 = 0x301;
const CLOSE: u32 = 0x302;
const OPEN: u32 = 0x303;
const GO: u32 = 0x304;
const CHECKPOINT: u32 = 0x305;
const FREEZABLE: u32 = 0x306;
const APART: u32 = 0x307;
const SET: u32 = 0x320;
const DRAIN: u32 = 0x321;
const UNDRAIN: u32 = 0x322;
const GIVE_WAY: u32 = 0x323;
const PROGRESS: u32 = 0x310;
const ANSWER: u32 = 0x311;
const QUIET: u32 = 0x312;
const BUSY: u32 = 0x313;
const STORED: u32 = 0x314;
const CHANGED: u32 = 0x330;
const LEFT: u32 = 0x331;

/// Stands between the texts of a list and ends none of them: no setting and no reason has this letter.
const BETWEEN: char = '\u{1f}';

/// Where the memory of a suspended program is to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// To GPUs that it only borrows from, then to the host.
    Anywhere,
    /// To such GPUs alone.
    Peers,
    /// To the host alone.
    Host,
    /// Into files in this folder: an absolute path, as the program sees it, of [`MOST_PATH`] bytes at most.
    Folder(PathBuf),
}

const WORDS: [Target; 3] = [Target::Anywhere, Target::Peers, Target::Host];
/// What says that a path follows.
const FOLDER: u32 = 3;

impl Target {
    fn of(number: u32, path: &[u8]) -> Option<Self> {
        match number {
            FOLDER => folder(path).map(Self::Folder),
            _ => WORDS.get(number as usize).filter(|_| path.is_empty()).cloned(),
        }
    }

    fn parts(&self) -> (u32, &[u8]) {
        match self {
            Self::Anywhere => (0, &[]),
            Self::Peers => (1, &[]),
            Self::Host => (2, &[]),
            Self::Folder(path) => (FOLDER, path.as_os_str().as_bytes()),
        }
    }
}

/// The folder of these bytes, where they are an absolute path.
fn folder(path: &[u8]) -> Option<PathBuf> {
    let is_path = path.len() <= MOST_PATH && path.starts_with(b"/") && !path.contains(&0);
    is_path.then(|| PathBuf::from(OsStr::from_bytes(path)))
}

/// With whom a program does what it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Together {
    /// With nobody.
    Alone,
    /// With others of its host, which who asks speaks to.
    Host,
    /// With others of other hosts too, so that what has become of them takes longer to be known.
    Hosts,
}

impl Together {
    const ALL: [Self; 3] = [Self::Alone, Self::Host, Self::Hosts];

    fn of(number: U32) -> Result<Self, Unread> {
        Self::ALL.get(number.get() as usize).copied().ok_or(Unread::Nonsense)
    }
}

/// What is asked of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// That its memory leaves the GPUs, once its work is over, for which it has so many milliseconds. `together`: with other programs, so that it is
    /// told when to try ([`Request::Close`]) and what has come of that for all ([`Request::Open`], [`Request::Go`]).
    Suspend { target: Target, patience: u64, together: bool },
    /// That it says why it is not suspended without these processes, which are ranks of the same job. Nothing is done with it.
    Apart { ranks: Vec<u32> },
    /// That it comes back, and the program goes on.
    Resume,
    /// It is to stop for a moment, at the same time as the others.
    Close,
    /// It is to go on: not all of them have come to rest.
    Open,
    /// All of them have come to rest: it is suspended now.
    Go,
    /// Whether the driver's own checkpoint would bring back what it still has: it is suspended, and nothing of the pool is mapped.
    Freezable,
    /// That an image of it is written to a folder (as in [`Target::Folder`]), where as many are left then (0: all). Its work has so many milliseconds to be over.
    /// `together`: as of [`Request::Suspend`], and once its memory is copied it says so ([`Reply::Quiet`]) and waits until that of all others is ([`Request::Go`]).
    /// `leaves`: it does not go on behind that, but its memory leaves for the host as well, which is answered once more ([`Reply::Done`]).
    Checkpoint { folder: PathBuf, keep: u32, patience: u64, together: Together, leaves: bool, full: bool },
    /// That these settings change, each `NAME=VALUE`: all of them, or none. An empty list asks what those that can be changed say now ([`Reply::Changed`]).
    Set(Vec<String>),
    /// That it looks which GPUs are drained, of which this one is, and has its memory leave that one within so many milliseconds.
    Drain { gpu: [u8; 16], patience: u64 },
    /// That it looks again, and what has left this GPU may come back.
    Undrain { gpu: [u8; 16], patience: u64 },
    /// That so much of what it has on this GPU goes elsewhere within so many milliseconds, for a program of this priority ([`GUARANTEED`]: for what that
    /// one is guaranteed). `loans`: of what it has there for other GPUs alone. Said by that program itself, of the same user. It answers with [`Reply::Done`], of which `stayed` is then what it still has there for
    /// other GPUs: its page says so up to a second later.
    GiveWay { gpu: [u8; 16], bytes: u64, priority: u32, loans: bool, patience: u64 },
}

/// A priority above all others.
pub const GUARANTEED: u32 = 101;

/// A setting that was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Its name, `GPUPOOL_LIMIT`.
    pub name: String,
    /// What it said before; empty where nothing was said.
    pub old: String,
    /// What it says now.
    pub new: String,
    /// What followed at once, in words; empty where nothing did.
    pub note: String,
}

impl Change {
    /// Of its four texts.
    fn of(texts: &[String]) -> Self {
        let text = |at: usize| texts.get(at).cloned().unwrap_or_default();
        Self { name: text(0), old: text(1), new: text(2), note: text(3) }
    }
}

/// What of a program is still on a GPU that is drained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stayed {
    /// How much; 0 where that is not known.
    pub bytes: u64,
    /// What it is and why, in words.
    pub what: String,
}

/// What it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// So many bytes of so many have moved.
    Progress { done: u64, total: u64 },
    /// It is done. `to_disk`: of what moved, what is in files now, and `stored`, how long these are. `waited`: microseconds of that in which the program's work was
    /// waited for.
    Done { moved: u64, stayed: u64, to_disk: u64, stored: u64, microseconds: u64, waited: u64 },
    /// An image is whole.
    Stored(Stored),
    /// It was not done, and nothing has changed.
    Refused { why: String },
    /// It has stopped, and waits for what becomes of the others.
    Quiet,
    /// It has not come to rest, and runs on.
    Busy { why: String },
    /// These settings have changed.
    Changed(Vec<Change>),
    /// So many bytes left the GPU, or came back to it, and this is still there, or elsewhere.
    Left { moved: u64, microseconds: u64, stayed: Vec<Stayed> },
}

/// Texts of a list in one, of at most [`MOST_TEXT`] bytes.
fn joined<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    let mut all = String::new();
    for text in texts {
        let text: String = text.chars().filter(|letter| *letter != BETWEEN).collect();
        all.push_str(&text);
        all.push(BETWEEN);
    }
    all
}

/// `None`: it is no such list.
fn parted(bytes: &[u8]) -> Option<Vec<String>> {
    let text = std::str::from_utf8(bytes).ok().filter(|text| text.len() <= MOST_TEXT)?;
    if text.is_empty() {
        return Some(Vec::new());
    }
    Some(text.strip_suffix(BETWEEN)?.split(BETWEEN).map(str::to_owned).collect())
}

/// Cut between two letters.
fn cut_at(text: &str, most: usize) -> &str {
    let end = (0..=text.len().min(most)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    &text[..end]
}

/// An image that a program has written of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Its number in its folder.
    pub generation: u64,
    /// Bytes of memory in it.
    pub bytes: u64,
    /// Bytes that it takes on the disk.
    pub stored: u64,
    /// Bytes of these that were written now.
    pub fresh: u64,
    /// Bytes of memory that were the same in the image before, and were not written again.
    pub unchanged: u64,
    /// Bytes of memory that were the same, and were written again as what the image before had of them was damaged.
    pub damaged: u64,
    /// Bytes that are not in it, of the program's own memory and of what the driver made for want of room in the pool.
    pub left_out: u64,
    /// Bytes that were not copied, as the GPUs saw that they are what the image before has.
    pub not_copied: u64,
    /// Bytes that were copied to GPUs while it was stopped.
    pub to_gpus: u64,
    /// Bytes that were copied to the host's memory then.
    pub to_host: u64,
    /// Bytes that the program waited for the disk for.
    pub in_stop: u64,
    /// For how long it was stopped.
    pub stopped_microseconds: u64,
    /// What all of it took.
    pub microseconds: u64,
    /// Why older images are there still that were to be removed, in words; empty where none is.
    pub not_removed: String,
}

/// A text is behind it.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct StoredBytes([U64; 13]);

/// A path is behind it.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct CheckpointBytes {
    keep: U32,
    together: U32,
    leaves: U32,
    full: U32,
    patience: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct SuspendBytes {
    target: U32,
    together: U32,
    patience: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct GpuBytes {
    gpu: [u8; 16],
    patience: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct GiveWayBytes {
    gpu: [u8; 16],
    bytes: U64,
    priority: U32,
    loans: U32,
    patience: U64,
}

/// The head of an answer about a GPU; behind it as many sizes as texts, and the texts.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct LeftBytes {
    moved: U64,
    microseconds: U64,
    count: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ProgressBytes {
    done: U64,
    total: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct AnswerBytes {
    /// 0: done; 1: refused, with a text behind this.
    refused: U32,
    moved: U64,
    stayed: U64,
    to_disk: U64,
    stored: U64,
    microseconds: U64,
    waited: U64,
}

fn yes_or_no(number: U32) -> Result<bool, Unread> {
    match number.get() {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Unread::Nonsense),
    }
}

impl Request {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let about = |kind, gpu: &[u8; 16], patience: u64| {
            message::encode(kind, GpuBytes { gpu: *gpu, patience: patience.into() }.as_bytes())
        };
        match self {
            Self::Suspend { target, patience, together } => {
                let (target, path) = target.parts();
                let bytes = SuspendBytes {
                    target: target.into(),
                    together: u32::from(*together).into(),
                    patience: (*patience).into(),
                };
                message::encode(SUSPEND, &[bytes.as_bytes(), path].concat())
            }
            Self::Apart { ranks } => {
                let ranks: Vec<U32> = ranks.iter().take(MOST_RANKS).map(|rank| (*rank).into()).collect();
                message::encode(APART, ranks.as_bytes())
            }
            Self::Resume => message::encode(RESUME, &[]),
            Self::Close => message::encode(CLOSE, &[]),
            Self::Open => message::encode(OPEN, &[]),
            Self::Go => message::encode(GO, &[]),
            Self::Freezable => message::encode(FREEZABLE, &[]),
            Self::Checkpoint { folder, keep, patience, together, leaves, full } => {
                let [keep, together, leaves, full] =
                    [*keep, *together as u32, u32::from(*leaves), u32::from(*full)].map(U32::from);
                let bytes = CheckpointBytes { keep, together, leaves, full, patience: (*patience).into() };
                message::encode(CHECKPOINT, &[bytes.as_bytes(), folder.as_os_str().as_bytes()].concat())
            }
            Self::Set(all) => message::encode(SET, joined(all.iter().map(String::as_str)).as_bytes()),
            Self::Drain { gpu, patience } => about(DRAIN, gpu, *patience),
            Self::Undrain { gpu, patience } => about(UNDRAIN, gpu, *patience),
            Self::GiveWay { gpu, bytes, priority, loans, patience } => {
                let (bytes, patience) = ((*bytes).into(), (*patience).into());
                let [priority, loans] = [*priority, u32::from(*loans)].map(U32::from);
                message::encode(GIVE_WAY, GiveWayBytes { gpu: *gpu, bytes, priority, loans, patience }.as_bytes())
            }
        }
    }

    /// The request in these bytes.
    ///
    /// # Errors
    /// It is of another version, or none.
    pub fn decode(bytes: &[u8]) -> Result<Self, Unread> {
        match message::decode(bytes)? {
            (SUSPEND, body) => {
                let (SuspendBytes { target, together, patience }, path) =
                    SuspendBytes::read_from_prefix(body).map_err(|_| Unread::Nonsense)?;
                let target = Target::of(target.get(), path).ok_or(Unread::Nonsense)?;
                Ok(Self::Suspend { target, patience: patience.get(), together: yes_or_no(together)? })
            }
            (APART, body) => {
                let ranks = <[U32]>::ref_from_bytes(body).ok().filter(|ranks| ranks.len() <= MOST_RANKS);
                let ranks = ranks.ok_or(Unread::Nonsense)?;
                Ok(Self::Apart { ranks: ranks.iter().map(|rank| rank.get()).collect() })
            }
            (RESUME, []) => Ok(Self::Resume),
            (CLOSE, []) => Ok(Self::Close),
            (OPEN, []) => Ok(Self::Open),
            (GO, []) => Ok(Self::Go),
            (FREEZABLE, []) => Ok(Self::Freezable),
            (CHECKPOINT, body) => {
                let (CheckpointBytes { keep, together, leaves, full, patience }, path) =
                    CheckpointBytes::read_from_prefix(body).map_err(|_| Unread::Nonsense)?;
                let folder = folder(path).ok_or(Unread::Nonsense)?;
                let (together, leaves, full) = (Together::of(together)?, yes_or_no(leaves)?, yes_or_no(full)?);
                let (keep, patience) = (keep.get(), patience.get());
                Ok(Self::Checkpoint { folder, keep, patience, together, leaves, full })
            }
            (SET, body) => parted(body).map(Self::Set).ok_or(Unread::Nonsense),
            (kind @ (DRAIN | UNDRAIN), body) => {
                let GpuBytes { gpu, patience } = GpuBytes::read_from_bytes(body).map_err(|_| Unread::Nonsense)?;
                let patience = patience.get();
                Ok(if kind == DRAIN { Self::Drain { gpu, patience } } else { Self::Undrain { gpu, patience } })
            }
            (GIVE_WAY, body) => {
                let GiveWayBytes { gpu, bytes, priority, loans, patience } =
                    GiveWayBytes::read_from_bytes(body).map_err(|_| Unread::Nonsense)?;
                let (bytes, priority, patience) = (bytes.get(), priority.get(), patience.get());
                let (loans, is_priority) = (yes_or_no(loans)?, priority <= GUARANTEED);
                is_priority.then_some(Self::GiveWay { gpu, bytes, priority, loans, patience }).ok_or(Unread::Nonsense)
            }
            _ => Err(Unread::Nonsense),
        }
    }
}

impl Reply {
    /// Why it was not done.
    pub fn refusal(self) -> Option<String> {
        match self {
            Self::Refused { why } => Some(why),
            _ => None,
        }
    }

    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let answer = |refused: u32, [moved, stayed, to_disk, stored, microseconds, waited]: [u64; 6], text: &[u8]| {
            let bytes = AnswerBytes {
                refused: refused.into(),
                moved: moved.into(),
                stayed: stayed.into(),
                to_disk: to_disk.into(),
                stored: stored.into(),
                microseconds: microseconds.into(),
                waited: waited.into(),
            };
            message::encode(ANSWER, &[bytes.as_bytes(), text].concat())
        };
        match self {
            Self::Progress { done, total } => {
                let bytes = ProgressBytes { done: (*done).into(), total: (*total).into() };
                message::encode(PROGRESS, bytes.as_bytes())
            }
            Self::Done { moved, stayed, to_disk, stored, microseconds, waited } => {
                answer(0, [*moved, *stayed, *to_disk, *stored, *microseconds, *waited], &[])
            }
            Self::Stored(image) => {
                let Stored { generation, bytes, stored, fresh, unchanged, damaged, left_out, .. } = *image;
                let Stored {
                    not_copied, to_gpus, to_host, in_stop, stopped_microseconds: stopped, microseconds, ..
                } = *image;
                let numbers = [
                    generation,
                    bytes,
                    stored,
                    fresh,
                    unchanged,
                    damaged,
                    left_out,
                    not_copied,
                    to_gpus,
                    to_host,
                    in_stop,
                    stopped,
                    microseconds,
                ];
                let numbers = StoredBytes(numbers.map(U64::from));
                message::encode(STORED, &[numbers.as_bytes(), cut(&image.not_removed)].concat())
            }
            Self::Refused { why } => answer(1, [0; 6], cut(why)),
            Self::Quiet => message::encode(QUIET, &[]),
            Self::Busy { why } => message::encode(BUSY, cut(why)),
            Self::Changed(all) => {
                let texts = all.iter().flat_map(|change| [&change.name, &change.old, &change.new, &change.note]);
                let mut text = joined(texts.map(String::as_str));
                // Whole changes, as far as there is room.
                while text.len() > MOST_TEXT {
                    let kept = text.rmatch_indices(BETWEEN).nth(4).map_or(0, |(at, _)| at + 1);
                    text.truncate(kept);
                }
                message::encode(CHANGED, text.as_bytes())
            }
            Self::Left { moved, microseconds, stayed } => {
                let mut room = MOST_TEXT;
                let mut rows: Vec<(u64, &str)> = Vec::new();
                for Stayed { bytes, what } in stayed.iter().take(MOST_STAYED) {
                    let what = cut_at(what, room.saturating_sub(1));
                    if room == 0 {
                        break;
                    }
                    room -= what.len() + 1;
                    rows.push((*bytes, what));
                }
                let head = LeftBytes {
                    moved: (*moved).into(),
                    microseconds: (*microseconds).into(),
                    count: (rows.len() as u64).into(),
                };
                let mut body = head.as_bytes().to_vec();
                rows.iter().for_each(|(bytes, _)| body.extend(U64::new(*bytes).as_bytes()));
                body.extend(joined(rows.iter().map(|(_, what)| *what)).as_bytes());
                message::encode(LEFT, &body)
            }
        }
    }

    /// The reply in these bytes.
    ///
    /// # Errors
    /// It is of another version, or none.
    pub fn decode(bytes: &[u8]) -> Result<Self, Unread> {
        match message::decode(bytes)? {
            (PROGRESS, body) => {
                let ProgressBytes { done, total } =
                    ProgressBytes::read_from_bytes(body).map_err(|_| Unread::Nonsense)?;
                Ok(Self::Progress { done: done.get(), total: total.get() })
            }
            (STORED, body) => {
                let (StoredBytes(numbers), text) = StoredBytes::read_from_prefix(body).map_err(|_| Unread::Nonsense)?;
                let [
                    generation,
                    bytes,
                    stored,
                    fresh,
                    unchanged,
                    damaged,
                    left_out,
                    not_copied,
                    to_gpus,
                    to_host,
                    in_stop,
                    stopped_microseconds,
                    microseconds,
                ] = numbers.map(U64::get);
                Ok(Self::Stored(Stored {
                    generation,
                    bytes,
                    stored,
                    fresh,
                    unchanged,
                    damaged,
                    left_out,
                    not_copied,
                    to_gpus,
                    to_host,
                    in_stop,
                    stopped_microseconds,
                    microseconds,
                    not_removed: words(text)?,
                }))
            }
            (ANSWER, body) => {
                let (answer, text) = AnswerBytes::read_from_prefix(body).map_err(|_| Unread::Nonsense)?;
                let AnswerBytes { moved, stayed, to_disk, stored, microseconds, waited, .. } = answer;
                let numbers = [moved, stayed, to_disk, stored, microseconds, waited].map(U64::get);
                match (answer.refused.get(), text, numbers) {
                    (0, [], [moved, stayed, to_disk, stored, microseconds, waited]) => {
                        Ok(Self::Done { moved, stayed, to_disk, stored, microseconds, waited })
                    }
                    (1, text, [0, 0, 0, 0, 0, 0]) => Ok(Self::Refused { why: words(text)? }),
                    _ => Err(Unread::Nonsense),
                }
            }
            (QUIET, []) => Ok(Self::Quiet),
            (BUSY, text) => Ok(Self::Busy { why: words(text)? }),
            (CHANGED, body) => {
                let texts = parted(body).filter(|texts| texts.len().is_multiple_of(4)).ok_or(Unread::Nonsense)?;
                Ok(Self::Changed(texts.chunks_exact(4).map(Change::of).collect()))
            }
            (LEFT, body) => {
                let (head, rest) = LeftBytes::read_from_prefix(body).map_err(|_| Unread::Nonsense)?;
                let count = usize::try_from(head.count.get()).ok().filter(|count| *count <= MOST_STAYED);
                let sizes = count.map(|count| count * size_of::<U64>()).filter(|bytes| *bytes <= rest.len());
                let (sizes, texts) = rest.split_at(sizes.ok_or(Unread::Nonsense)?);
                let sizes = <[U64]>::ref_from_bytes(sizes).map_err(|_| Unread::Nonsense)?;
                let texts = parted(texts).filter(|texts| texts.len() == sizes.len()).ok_or(Unread::Nonsense)?;
                let stayed = sizes.iter().zip(texts).map(|(bytes, what)| Stayed { bytes: bytes.get(), what });
                let (moved, microseconds) = (head.moved.get(), head.microseconds.get());
                Ok(Self::Left { moved, microseconds, stayed: stayed.collect() })
            }
            _ => Err(Unread::Nonsense),
        }
    }
}

/// As much of a text as a message has room for.
fn cut(text: &str) -> &[u8] {
    cut_at(text, MOST_TEXT).as_bytes()
}

fn words(text: &[u8]) -> Result<String, Unread> {
    let text = std::str::from_utf8(text).ok().filter(|text| text.len() <= MOST_TEXT);
    text.map(str::to_owned).ok_or(Unread::Nonsense)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Miri takes a thousand times as long for each.
    const CASES: u32 = if cfg!(miri) { 2 } else { 256 };

    proptest! {
        // Failures are not kept in a file: Miri has no working folder to keep it in.
        #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_said_is_what_is_heard(
            target in 0..4usize,
            path in "/[^\0]{0,500}",
            gpu: [u8; 16],
            numbers: [u64; 3],
            why: String,
            keep: u32,
            texts in proptest::collection::vec("[^\u{1f}]{0,20}", 0..9),
            ranks in proptest::collection::vec(any::<u32>(), 0..MOST_RANKS),
        ) {
            let [patience, moved, stayed] = numbers;
            let give_way = Request::GiveWay { gpu, bytes: moved, priority: keep % (GUARANTEED + 1), loans: keep % 2 == 0, patience };
            let beyond = Request::GiveWay { gpu, bytes: moved, priority: GUARANTEED + 1 + keep % 1000, loans: false, patience };
            prop_assert_eq!(Request::decode(&beyond.encode()), Err(Unread::Nonsense));
            let drains = [Request::Drain { gpu, patience }, Request::Undrain { gpu, patience }, give_way];
            let together = Together::ALL[keep as usize % 3];
            let (leaves, full) = (patience % 2 == 1, moved % 2 == 1);
            let checkpoint = Request::Checkpoint { folder: path.clone().into(), keep, patience, together, leaves, full };
            let target = WORDS.get(target).cloned().unwrap_or(Target::Folder(path.into()));
            let suspend =
                [false, true].map(|together| Request::Suspend { target: target.clone(), patience, together });
            let words =
                [Request::Resume, Request::Close, Request::Open, Request::Go, Request::Freezable, Request::Set(texts.clone()), checkpoint];
            for request in drains.into_iter().chain(suspend).chain(words).chain([Request::Apart { ranks }]) {
                let bytes = request.encode();
                prop_assert!(bytes.len() < ROOM);
                prop_assert_eq!(Request::decode(&bytes), Ok(request));
            }
            let done = Reply::Done { moved, stayed, to_disk: stayed, stored: patience, microseconds: patience, waited: moved };
            let stored = Reply::Stored(Stored { generation: moved, bytes: stayed, left_out: patience, not_removed: why.clone(), ..Stored::default() });
            let changed = Reply::Changed(texts.chunks_exact(4).map(Change::of).collect());
            let rows = texts.into_iter().map(|what| Stayed { bytes: stayed, what }).collect();
            let left = Reply::Left { moved, microseconds: patience, stayed: rows };
            let words = [Reply::Refused { why: why.clone() }, Reply::Busy { why }, Reply::Quiet, changed, left];
            for reply in [Reply::Progress { done: moved, total: stayed }, done, stored].into_iter().chain(words) {
                prop_assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
            }
        }

        #[test]
        fn any_bytes_are_a_message_or_none(bytes: Vec<u8>) {
            let kinds = [
                SUSPEND, APART, RESUME, CLOSE, OPEN, GO, SET, DRAIN, UNDRAIN, CHECKPOINT, FREEZABLE, PROGRESS, ANSWER, QUIET, BUSY, CHANGED, LEFT,
                STORED,
            ];
            let framed = kinds.map(|kind| message::encode(kind, &bytes));
            for bytes in framed.iter().chain([&bytes]) {
                if let Ok(request) = Request::decode(bytes) {
                    prop_assert_eq!(&request.encode(), bytes);
                }
                if let Ok(reply) = Reply::decode(bytes) {
                    prop_assert_eq!(&reply.encode(), bytes);
                }
            }
        }
    }

    #[test]
    fn a_folder_is_an_absolute_path_that_is_not_too_long() {
        let decoded = |path: &str| {
            let target = Target::Folder(path.into());
            let suspend = Request::Suspend { target, patience: 1, together: false };
            let (folder, together) = (path.into(), Together::Hosts);
            [suspend, Request::Checkpoint { folder, keep: 0, patience: 1, together, leaves: true, full: false }]
                .map(|asked| Request::decode(&asked.encode()))
        };
        let longest = format!("/{}", "x".repeat(MOST_PATH - 1));
        assert!(["/", &longest].into_iter().flat_map(decoded).all(|decoded| decoded.is_ok()));
        for wrong in ["", "x", "/x\0", &format!("{longest}x")] {
            assert_eq!(decoded(wrong), [Err(Unread::Nonsense), Err(Unread::Nonsense)], "{wrong}");
        }
    }

    #[test]
    fn a_text_that_is_too_long_is_cut_between_two_letters() {
        let why = "ü".repeat(MOST_TEXT);
        let bytes = Reply::Refused { why: format!("a{why}") }.encode();
        assert!(bytes.len() < ROOM);
        let Ok(Reply::Refused { why }) = Reply::decode(&bytes) else { panic!("it is no reply") };
        assert_eq!(why.len(), MOST_TEXT - 1);
    }

    #[test]
    fn a_list_that_is_too_long_is_a_shorter_one() {
        let what = "ü".repeat(MOST_TEXT / 8);
        let stayed = vec![Stayed { bytes: 7, what: what.clone() }; 2 * MOST_STAYED];
        let bytes = Reply::Left { moved: 1, microseconds: 2, stayed }.encode();
        assert!(bytes.len() < ROOM);
        let Ok(Reply::Left { stayed, .. }) = Reply::decode(&bytes) else { panic!("it is no reply") };
        assert_eq!((stayed.len(), &stayed[0].what, stayed[0].bytes), (4, &what, 7));
        let short = vec![Stayed { bytes: 7, what: String::new() }; 2 * MOST_STAYED];
        let bytes = Reply::Left { moved: 1, microseconds: 2, stayed: short }.encode();
        let Ok(Reply::Left { stayed, .. }) = Reply::decode(&bytes) else { panic!("it is no reply") };
        assert_eq!(stayed.len(), MOST_STAYED);
        let change = Change { name: "A".to_owned(), old: what.clone(), new: what, note: String::new() };
        let bytes = Reply::Changed(vec![change.clone(); 9]).encode();
        assert!(bytes.len() < ROOM);
        assert_eq!(Reply::decode(&bytes), Ok(Reply::Changed(vec![change; 1])));
    }
}
