//! The head of every message: that it is one of ours, of which version, of which kind, and how long.

use std::fmt::{Display, Formatter};
use zerocopy::native_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of all messages and handles together. It goes up with any change of theirs: the processes of one machine
/// mostly run the same library, so a version for each kind would have many combinations and no use.
pub const VERSION: u32 = 12;

const MAGIC: [u8; 8] = *b"gpupool\x1d";

/// The kind of a message that says nothing but its version: the answer to one of another version. The kinds of
/// [`crate::blocks`] are 0x100 to 0x1ff, those of [`crate::lenders`] 0x200 to 0x2ff, those of [`crate::control`] 0x300 to 0x3ff.
const SPEAKS: u32 = 0;

/// This struct and [`SPEAKS`] are the same in every version, so that each can tell the others.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 8],
    version: U32,
    kind: U32,
    /// Bytes of the whole message, the head among them.
    length: U32,
}

/// Bytes of the head.
pub const HEAD: usize = size_of::<Head>();

/// Why bytes are no message that this process can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unread {
    /// The message is of this version, which the reader does not speak.
    Version(u32),
    /// It is no message at all, or it says what cannot be.
    Nonsense,
}

impl Unread {
    /// What to answer before the connection is closed; `None`: nothing. Only the side that is asked answers, so that two
    /// versions do not go on telling each other.
    pub fn answer(&self) -> Option<Vec<u8>> {
        matches!(self, Unread::Version(_)).then(|| encode(SPEAKS, &[]))
    }
}

impl Display for Unread {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Unread::Version(theirs) => write!(
                out,
                "it speaks version {theirs} of gpupool's messages, and this process version {VERSION}; run both under the \
                 same version of gpupool"
            ),
            Unread::Nonsense => out.write_str("what it said is no message of gpupool's"),
        }
    }
}

/// A message of this kind.
pub fn encode(kind: u32, body: &[u8]) -> Vec<u8> {
    let length = (HEAD + body.len()) as u32;
    let head = Head { magic: MAGIC, version: VERSION.into(), kind: kind.into(), length: length.into() };
    [head.as_bytes(), body].concat()
}

/// The kind and the body of a message that arrived as a whole. The reader's buffer has to be one byte longer than the longest
/// message: one that is longer still has then lost its end, and is not as long as it says.
///
/// # Errors
/// It is of another version, or no message.
pub fn decode(bytes: &[u8]) -> Result<(u32, &[u8]), Unread> {
    let (head, body) = Head::read_from_prefix(bytes).map_err(|_| Unread::Nonsense)?;
    if head.magic != MAGIC {
        return Err(Unread::Nonsense);
    }
    if head.version != VERSION {
        return Err(Unread::Version(head.version.get()));
    }
    if head.length.get() as usize != bytes.len() {
        return Err(Unread::Nonsense);
    }
    Ok((head.kind.get(), body))
}
