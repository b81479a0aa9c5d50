//! What two processes say to each other about a block: the 64 bytes that the program carries from one to the other, and the
//! messages on the exporter's socket.

use crate::message::{self, HEAD, Unread, VERSION};
use gpupool_pool::FRAME;
use zerocopy::native_endian::{I32, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Chunks in one answer: the kernel passes at most 253 descriptors at a time.
pub const BATCH: u32 = 200;

/// A `CUipcMemHandle` of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// The exporting process, for people and for the name of its socket.
    pub pid: u32,
    /// Random, one a process, and no secret: it is part of a name that everybody can read.
    pub process: u64,
    /// What opens the block.
    pub key: Key,
    /// Bytes of the block.
    pub bytes: u64,
}

/// What opens a block: its number and the secret that only those know who were given the handle.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// [`gpupool_pool::Block::id`]: an address may be another block's by now, a number never.
    pub block: u64,
    /// Of this block alone.
    pub secret: Secret,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "block {}", self.block)
    }
}

/// Random, one a block: whoever may open one block cannot guess what opens another.
pub type Secret = [u8; 16];

/// Whether two secrets are the same; takes as long wherever they differ, so that it cannot be found byte by byte.
pub fn same_secret(one: &Secret, other: &Secret) -> bool {
    let different = one.iter().zip(other).fold(0, |different, (one, other)| different | (one ^ other));
    std::hint::black_box(different) == 0
}

/// Begins every handle of ours; handles of the driver's begin otherwise.
const MAGIC: [u8; 8] = *b"gpupool\x1c";

/// The bytes of a handle. Magic, version and checksum are at these places in every version.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HandleBytes {
    magic: [u8; 8],
    version: U32,
    pid: U32,
    process: U64,
    key: KeyBytes,
    bytes: U64,
    /// Of all before it.
    checksum: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct KeyBytes {
    block: U64,
    secret: Secret,
}

impl From<&Key> for KeyBytes {
    fn from(key: &Key) -> Self {
        Self { block: key.block.into(), secret: key.secret }
    }
}

impl From<KeyBytes> for Key {
    fn from(bytes: KeyBytes) -> Self {
        Self { block: bytes.block.get(), secret: bytes.secret }
    }
}

/// Bytes of a handle that the checksum is of.
const CHECKED: usize = 56;

impl Handle {
    /// The bytes that the program gets. The same block has the same bytes each time, as with the driver: programs use
    /// them as a key.
    pub fn encode(&self) -> [u8; 64] {
        let mut handle = HandleBytes {
            magic: MAGIC,
            version: VERSION.into(),
            pid: self.pid.into(),
            process: self.process.into(),
            key: (&self.key).into(),
            bytes: self.bytes.into(),
            checksum: 0.into(),
        };
        handle.checksum = checksum(&handle.as_bytes()[..CHECKED]).into();
        zerocopy::transmute!(handle)
    }

    /// The handle in these bytes.
    ///
    /// # Errors
    /// It is not one of ours, or one of another version.
    pub fn decode(bytes: &[u8; 64]) -> Result<Self, Unread> {
        let handle: HandleBytes = zerocopy::transmute!(*bytes);
        if handle.magic != MAGIC || handle.checksum != checksum(&bytes[..CHECKED]) {
            return Err(Unread::Nonsense);
        }
        if handle.version != VERSION {
            return Err(Unread::Version(handle.version.get()));
        }
        let HandleBytes { pid, process, key, bytes, .. } = handle;
        Ok(Self { pid: pid.get(), process: process.get(), key: key.into(), bytes: bytes.get() })
    }

    /// The abstract name of the exporter's socket.
    pub fn socket(pid: u32, process: u64) -> String {
        format!("{}{process:016x}", Self::sockets(pid))
    }

    /// What the name of each socket of a process begins with.
    pub fn sockets(pid: u32) -> String {
        format!("gpupool-ipc-{pid}-")
    }
}

/// FNV-1a: not against forgery, which the secret is, but so that a handle which was damaged on its way goes to the driver.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The kinds of messages about blocks.
mod kind {
    pub const HOLD: u32 = 0x100;
    pub const CHUNKS: u32 = 0x101;
    pub const LET_GO: u32 = 0x102;
    pub const HELD: u32 = 0x180;
    pub const CHUNKS_ARE: u32 = 0x181;
    pub const GONE: u32 = 0x182;
    pub const FAILED: u32 = 0x183;
    pub const REFUSED: u32 = 0x184;
}

/// What the importer asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// To have the block: from the answer on its memory serves nobody else, until [`Request::LetGo`] or the end of the
    /// importer.
    Hold,
    /// Chunks of a block that it has.
    Chunks {
        /// The index of the first one.
        first: u32,
        /// How many at most, which is what the importer has descriptors left for.
        most: u32,
    },
    /// It has the block no more. There is no answer.
    LetGo,
}

/// The body of [`kind::CHUNKS`]; those of the other requests are the key alone.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ChunksBytes {
    key: KeyBytes,
    first: U32,
    most: U32,
}

impl Request {
    /// Bytes of a buffer that every request fits into, and one more ([`message::decode`]).
    pub const BUFFER: usize = HEAD + size_of::<ChunksBytes>() + 1;

    /// The message.
    pub fn encode(&self, key: &Key) -> Vec<u8> {
        let key = KeyBytes::from(key);
        match *self {
            Request::Hold => message::encode(kind::HOLD, key.as_bytes()),
            Request::Chunks { first, most } => {
                let body = ChunksBytes { key, first: first.into(), most: most.into() };
                message::encode(kind::CHUNKS, body.as_bytes())
            }
            Request::LetGo => message::encode(kind::LET_GO, key.as_bytes()),
        }
    }

    /// The request in a message, and the key of the block.
    ///
    /// # Errors
    /// It is of another version, or no request.
    pub fn decode(bytes: &[u8]) -> Result<(Self, Key), Unread> {
        let (kind, body) = message::decode(bytes)?;
        let (request, key) = match kind {
            kind::HOLD => (Request::Hold, whole(body)?),
            kind::CHUNKS => {
                let ChunksBytes { key, first, most } = whole(body)?;
                (Request::Chunks { first: first.get(), most: most.get() }, key)
            }
            kind::LET_GO => (Request::LetGo, whole(body)?),
            _ => return Err(Unread::Nonsense),
        };
        Ok((request, KeyBytes::into(key)))
    }
}

/// A body that is this and nothing more.
fn whole<T: FromBytes>(body: &[u8]) -> Result<T, Unread> {
    T::read_from_bytes(body).map_err(|_| Unread::Nonsense)
}

/// Where a chunk is, in words that mean the same in both processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// A GPU by its UUID (`cuDeviceGetUuid`): ordinals differ where `CUDA_VISIBLE_DEVICES` does.
    Gpu([u8; 16]),
    /// A host NUMA node.
    Host(u32),
}

/// One chunk; its descriptor comes with the message, in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// How many bytes it has.
    pub bytes: u64,
    /// Where it is.
    pub place: Where,
}

/// The question that an answer is to. The importer's program may close a connection's descriptor in the middle of a question, and
/// its number may lead to another connection before the answer is read, which is then to somebody else's question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// [`Key::block`].
    pub block: u64,
    /// The first chunk that was asked for; 0 for [`Request::Hold`].
    pub first: u32,
}

impl Question {
    /// That of a process whose questions are not read ([`Answer::Refused`]).
    pub const UNREAD: Self = Self { block: 0, first: 0 };

    /// What this request asks about this block.
    pub fn of(request: &Request, key: &Key) -> Self {
        let first = match *request {
            Request::Chunks { first, .. } => first,
            Request::Hold | Request::LetGo => 0,
        };
        Self { block: key.block, first }
    }
}

/// Begins the body of every answer.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct QuestionBytes {
    block: U64,
    first: U32,
}

/// What the exporter says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The importer has the block.
    Held,
    /// Some chunks of the block, and how it lies in all of them.
    Chunks {
        /// How the block lies in all its chunks.
        layout: Layout,
        /// At most [`BATCH`] of them.
        chunks: Vec<Chunk>,
    },
    /// The block was freed.
    Gone,
    /// The driver did not export a chunk (`CUresult`).
    Failed(i32),
    /// The importer is another user's process, whatever it asks: its questions are not read.
    Refused,
}

/// A block and its chunks as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// How many chunks there are.
    pub chunks: u32,
    /// Bytes of all chunks.
    pub span: u64,
    /// Byte of the chunks, one behind the other, that the block begins at.
    pub offset: u64,
    /// UUID of the GPU that the block is said to be on.
    pub home: [u8; 16],
}

impl Layout {
    /// Whether a block of so many bytes can lie so.
    pub fn holds(&self, bytes: u64) -> bool {
        let end = self.offset.checked_add(bytes);
        self.span.is_multiple_of(FRAME) && end.is_some_and(|end| end <= self.span) && self.chunks > 0 && bytes > 0
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct LayoutBytes {
    chunks: U32,
    span: U64,
    offset: U64,
    home: [u8; 16],
}

impl From<&Layout> for LayoutBytes {
    fn from(layout: &Layout) -> Self {
        let Layout { chunks, span, offset, home } = *layout;
        Self { chunks: chunks.into(), span: span.into(), offset: offset.into(), home }
    }
}

impl From<LayoutBytes> for Layout {
    fn from(bytes: LayoutBytes) -> Self {
        let LayoutBytes { chunks, span, offset, home } = bytes;
        Self { chunks: chunks.get(), span: span.get(), offset: offset.get(), home }
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ChunkBytes {
    bytes: U64,
    /// [`ON_GPU`] or [`ON_HOST`], which say whether the UUID or the node counts; the other one is zero.
    place: U32,
    node: U32,
    uuid: [u8; 16],
}

const ON_GPU: u32 = 0;
const ON_HOST: u32 = 1;

impl From<&Chunk> for ChunkBytes {
    fn from(chunk: &Chunk) -> Self {
        let (place, node, uuid) = match chunk.place {
            Where::Gpu(uuid) => (ON_GPU, 0, uuid),
            Where::Host(node) => (ON_HOST, node, [0; 16]),
        };
        Self { bytes: chunk.bytes.into(), place: place.into(), node: node.into(), uuid }
    }
}

impl Chunk {
    fn of(chunk: &ChunkBytes) -> Result<Self, Unread> {
        let (bytes, node) = (chunk.bytes.get(), chunk.node.get());
        let place = match chunk.place.get() {
            ON_GPU if node == 0 => Where::Gpu(chunk.uuid),
            ON_HOST if chunk.uuid == [0; 16] => Where::Host(node),
            _ => return Err(Unread::Nonsense),
        };
        if bytes == 0 || !bytes.is_multiple_of(FRAME) {
            return Err(Unread::Nonsense);
        }
        Ok(Self { bytes, place })
    }
}

impl Answer {
    /// Bytes of a buffer that every answer fits into, and one more ([`message::decode`]).
    pub const BUFFER: usize =
        HEAD + size_of::<QuestionBytes>() + size_of::<LayoutBytes>() + BATCH as usize * size_of::<ChunkBytes>() + 1;

    /// The message that says this to that question.
    pub fn encode(&self, to: Question) -> Vec<u8> {
        let to = QuestionBytes { block: to.block.into(), first: to.first.into() };
        let say = |kind, body: &[u8]| message::encode(kind, &[to.as_bytes(), body].concat());
        match self {
            Answer::Held => say(kind::HELD, &[]),
            Answer::Chunks { layout, chunks } => {
                let mut body = LayoutBytes::from(layout).as_bytes().to_vec();
                chunks.iter().for_each(|chunk| body.extend(ChunkBytes::from(chunk).as_bytes()));
                say(kind::CHUNKS_ARE, &body)
            }
            Answer::Gone => say(kind::GONE, &[]),
            Answer::Failed(code) => say(kind::FAILED, I32::new(*code).as_bytes()),
            Answer::Refused => say(kind::REFUSED, &[]),
        }
    }

    /// The answer in a message, and the question that it is to.
    ///
    /// # Errors
    /// It is of another version, or no answer.
    pub fn decode(bytes: &[u8]) -> Result<(Self, Question), Unread> {
        let (kind, body) = message::decode(bytes)?;
        let (to, body) = QuestionBytes::read_from_prefix(body).map_err(|_| Unread::Nonsense)?;
        let answer = match (kind, body) {
            (kind::HELD, []) => Answer::Held,
            (kind::CHUNKS_ARE, body) => {
                let (layout, rest) = LayoutBytes::read_from_prefix(body).map_err(|_| Unread::Nonsense)?;
                let chunks = <[ChunkBytes]>::ref_from_bytes(rest).map_err(|_| Unread::Nonsense)?;
                if chunks.len() > BATCH as usize {
                    return Err(Unread::Nonsense);
                }
                let chunks = chunks.iter().map(Chunk::of).collect::<Result<_, _>>()?;
                Answer::Chunks { layout: layout.into(), chunks }
            }
            (kind::GONE, []) => Answer::Gone,
            (kind::FAILED, body) => Answer::Failed(whole::<I32>(body)?.get()),
            (kind::REFUSED, []) => Answer::Refused,
            _ => return Err(Unread::Nonsense),
        };
        Ok((answer, Question { block: to.block.get(), first: to.first.get() }))
    }
}
