//! What a generation says of itself: a line that names the format, one JSON object, and a line with the hash of both.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::buffer::padded;
use crate::codec::Codec;
use crate::error::{Error, Result};
use crate::{PART, VERSION};

/// What the first line begins with; the format's version is behind it.
pub const HEAD: &str = "gpupool-store ";
/// What the last line begins with; 16 hexadecimal digits are behind it.
const TAIL: &str = "\nxxh3-64 ";
/// The length of the last line with the end of the line before it, in bytes.
const TAIL_BYTES: usize = TAIL.len() + 16 + 1;

/// XXH3-64, or a word of memory: 16 hexadecimal digits in the manifest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Word(pub u64);

impl std::fmt::Display for Word {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{:016x}", self.0)
    }
}

impl Serialize for Word {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Word {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map(Word).map_err(serde::de::Error::custom)
    }
}

/// Whose memory it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// When it started, in clock ticks since the boot.
    pub started: u64,
    /// Its command line, for people.
    pub command: String,
}

/// What the caller of the writer says of a generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// Whose memory it is.
    pub process: Process,
    /// The host's name.
    pub host: String,
    /// The UUIDs of the process's GPUs, by the numbers that blocks name as their home.
    pub gpus: Vec<String>,
    /// The version of gpupool that wrote it.
    pub gpupool: String,
    /// Whatever else the caller wants to find again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, String>,
}

impl Meta {
    /// Of which rank of a job it is, where that was noted ([`OfRanks::note`]).
    #[must_use]
    pub fn rank(&self) -> Option<OfRanks> {
        let (number, ranks) = self.notes.get(RANK)?.split_once(" of ")?;
        Some(OfRanks { number: number.parse().ok()?, ranks: ranks.parse().ok()? })
    }
}

/// The note that says of which rank of a job a generation is: `0 of 2`.
const RANK: &str = "rank";

/// Which rank of a job with several a process is: of the whole job where its launcher says so, or of those on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfRanks {
    /// From 0.
    pub number: u32,
    /// How many there are.
    pub ranks: u32,
}

impl OfRanks {
    /// The note ([`Meta::notes`]) that says so.
    #[must_use]
    pub fn note(self) -> (String, String) {
        (RANK.to_owned(), self.to_string())
    }
}

impl std::fmt::Display for OfRanks {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} of {}", self.number, self.ranks)
    }
}

/// What the caller of the writer says of a block of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// A number that no other block of the generation has.
    pub id: u64,
    /// Where the program has it.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// The GPU that it belongs to, as a place in [`Meta::gpus`]. `None`: the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<u32>,
    /// The place in the program that asked for it; empty where that is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub site: String,
    /// What the program calls blocks of its kind; empty where it has said nothing.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label: String,
    /// Ranges of it that the program finds again by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<Name>,
    /// Where it is memory that several small blocks have in common: where each begins in it, and its length.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub small: Vec<(u64, u64)>,
}

/// A range of a block that has a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    /// What the program calls it; no other range of the generation is called so.
    pub name: String,
    /// Where it begins in the block.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// A block as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// What the writer was told.
    #[serde(flatten)]
    pub about: About,
    /// Its bytes: in order of their offsets, without gap or overlap.
    pub parts: Vec<Part>,
}

/// Bytes of a block that are stored as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Where they begin in the block.
    pub offset: u64,
    /// How many there are; of a part that takes room in a file at most [`PART`].
    pub bytes: u64,
    /// How they are stored.
    pub codec: Codec,
    /// [`Codec::Fill`]: the eight bytes that they repeat from their first on, the lowest first. Otherwise their XXH3-64.
    #[serde(rename = "xxh3")]
    pub word: Word,
    /// What tells them from all other bytes together with [`Part::word`]: the upper half of their XXH3-128. 0 where it is not known, as of [`Codec::Fill`]
    /// and of parts that are short.
    #[serde(rename = "xxh3_upper", default, skip_serializing_if = "is_none")]
    pub upper: Word,
    /// How many bytes they take, without the zeros behind them up to a multiple of 4096. 0 for [`Codec::Fill`].
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stored: u64,
    /// In which file, as a place in [`Manifest::files`].
    #[serde(default, skip_serializing_if = "is_zero")]
    pub file: u64,
    /// Where in that file.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub at: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_none(word: &Word) -> bool {
    word.0 == 0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A file with parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Data {
    /// Its name in the generation's folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The generation that it was written with, if that was another one: it is a second name of a file there, and may have parts that are in use no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<u64>,
}

/// What a generation says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Its number.
    pub generation: u64,
    /// When it was finished, in seconds since 1970.
    pub written: u64,
    /// What the writer was told.
    #[serde(flatten)]
    pub meta: Meta,
    /// The sum of its blocks.
    pub bytes: u64,
    /// The sum of its files.
    pub stored: u64,
    /// Bytes of its blocks that were the same in the generation before, and were not written again.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unchanged: u64,
    /// Its files.
    pub files: Vec<Data>,
    /// Its blocks, in the order in which the writer was told of them.
    pub blocks: Vec<Block>,
}

/// The hash of everything here.
pub fn hash(bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(bytes)
}

/// 128 bits of bytes: XXH3-64, and the upper half of XXH3-128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest {
    pub lower: u64,
    pub upper: u64,
}

/// Of bytes that are no fewer than [`DIGESTED`], at once what [`hash`] says of them: of more than 240 bytes XXH3-64 is the lower half of XXH3-128.
pub fn digest(bytes: &[u8]) -> Digest {
    let both = twox_hash::XxHash3_128::oneshot(bytes);
    Digest { lower: both as u64, upper: (both >> 64) as u64 }
}

/// Shorter parts are not looked for in older generations.
pub const DIGESTED: usize = 4096;

impl Part {
    /// What tells its bytes from all others, where that is known.
    pub fn digest(&self) -> Option<Digest> {
        let is_known = self.codec != Codec::Fill && self.upper.0 != 0;
        is_known.then_some(Digest { lower: self.word.0, upper: self.upper.0 })
    }
}

/// A file's contents: a line with the format's name and version, what is told in JSON, a line with the hash of both.
pub fn seal(head: &str, version: u32, told: &impl Serialize) -> Result<Vec<u8>> {
    let mut text = format!("{head}{version}\n").into_bytes();
    serde_json::to_writer(&mut text, told).map_err(|error| Error::misuse(format!("{head}: {error}")))?;
    let hash = Word(hash(&text));
    text.extend_from_slice(format!("{TAIL}{hash}\n").as_bytes());
    Ok(text)
}

/// What is told in such a file.
///
/// # Errors
/// It is damaged, or of a version above `newest`.
pub fn unseal<'a>(head: &str, newest: u32, text: &'a [u8], path: &Path) -> Result<&'a [u8]> {
    let damaged = |what: String| Error::damaged(path, what);
    let line = text.iter().take(head.len() + 16).position(|letter| *letter == b'\n');
    let line = line.and_then(|end| std::str::from_utf8(&text[..end]).ok()?.strip_prefix(head)?.parse::<u32>().ok());
    let Some(version) = line else { return Err(damaged(format!("its first line is not `{head}VERSION`"))) };
    // Before the hash: how a newer one ends is not known.
    if version > newest {
        return Err(Error::Newer { path: path.to_owned(), version, newest });
    }
    let (told, tail) = text.split_at(text.len().saturating_sub(TAIL_BYTES));
    let tail = std::str::from_utf8(tail).ok().and_then(|tail| tail.strip_prefix(TAIL)?.strip_suffix('\n'));
    let Some(expected) = tail.filter(|digits| digits.len() == 16) else {
        return Err(damaged("its last line, with the hash, is missing".to_owned()));
    };
    let found = Word(hash(told)).to_string();
    if expected != found {
        return Err(damaged(format!("its hash is {found}, expected {expected}")));
    }
    let json = told.iter().position(|letter| *letter == b'\n').map(|end| &told[end + 1..]);
    Ok(json.unwrap_or_default())
}

impl Manifest {
    /// Bytes of files that were written for it.
    pub fn fresh(&self) -> u64 {
        self.files.iter().filter(|file| file.from.is_none()).map(|file| file.bytes).sum()
    }

    /// The file's contents.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        // What has no older files is read by whoever reads the first version.
        let version = if self.files.iter().any(|file| file.from.is_some()) { VERSION } else { 1 };
        seal(HEAD, version, self)
    }

    /// Of a file's contents.
    ///
    /// # Errors
    /// They are damaged, or of a newer version.
    pub(crate) fn decode(text: &[u8], path: &Path) -> Result<Self> {
        let damaged = |what: String| Error::damaged(path, what);
        let json = unseal(HEAD, VERSION, text, path)?;
        let manifest: Self = serde_json::from_slice(json).map_err(|error| damaged(error.to_string()))?;
        manifest.check().map_err(damaged)?;
        Ok(manifest)
    }

    /// Whether all of it fits together, so that a reader need not ask again. The hash says that it is what was written, and
    /// not that what was written makes sense.
    fn check(&self) -> std::result::Result<(), String> {
        // Parts that are the same may be stored once.
        let mut used = std::collections::BTreeMap::new();
        for Block { about, parts } in &self.blocks {
            let mut end = 0_u64;
            for part in parts {
                let Part { offset, bytes, stored, at, .. } = *part;
                let wrong = |what: &str| Err(format!("block {}, offset {offset}: {what}", about.id));
                if offset != end || bytes == 0 {
                    return wrong("its parts do not follow on each other");
                }
                end = end.checked_add(bytes).ok_or("a part ends beyond every address")?;
                if part.codec == Codec::Fill {
                    continue;
                }
                if bytes > PART as u64 || stored == 0 || stored > bytes || at % padded(1) as u64 != 0 {
                    return wrong("a part has an impossible length or place");
                }
                let file = usize::try_from(part.file).unwrap_or(usize::MAX);
                let Some(data) = self.files.get(file) else {
                    return wrong("a part lies in a file that is not listed");
                };
                let room = padded(stored as usize) as u64;
                if at.checked_add(room).is_none_or(|end| end > data.bytes) {
                    return wrong("a part lies behind the end of its file");
                }
                if used.insert((file, at), room).is_some_and(|other| other != room) {
                    return wrong("a part lies where another one does");
                }
            }
            if end != about.bytes {
                return Err(format!("block {}: {} bytes, and its parts have {end}", about.id, about.bytes));
            }
        }
        let mut sums = vec![0_u64; self.files.len()];
        for ((file, _), room) in used {
            sums[file] += room;
        }
        for (file, used) in self.files.iter().zip(sums) {
            if !file.name.starts_with("data-") || file.name.contains('/') {
                return Err(format!("`{}` is no name of a file of parts", file.name));
            }
            if file.bytes != used && (file.from.is_none() || file.bytes < used) {
                return Err(format!("{}: {} bytes, and its parts take {used}", file.name, file.bytes));
            }
        }
        Ok(())
    }
}
