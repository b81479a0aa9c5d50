//! What two processes say to each other about a block: the 64 bytes that the program carries from one to the other, and
//! the messages on the exporter's socket. Both sides run on one machine, so numbers are in its own byte order.

use gpupool_pool::FRAME;

/// Chunks in one answer: the kernel passes at most 253 descriptors at a time.
pub const BATCH: u32 = 200;

/// A `CUipcMemHandle` of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// The exporting process, for people and for the name of its socket.
    pub pid: u32,
    /// Random, one a process, and no secret: it is part of a name that everybody can read.
    pub process: u64,
    pub key: Key,
    /// Bytes of the block.
    pub bytes: u64,
}

/// What opens a block: its number and the secret that only those know who were given the handle.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// [`gpupool_pool::Block::id`]: an address may be another block's by now, a number never.
    pub block: u64,
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
/// Of the handle and of the messages.
const VERSION: u32 = 2;

impl Handle {
    /// The bytes that the program gets. The same block has the same bytes each time, as with the driver: programs use
    /// them as a key.
    pub fn encode(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        let mut out = Writer(&mut bytes);
        out.put(&MAGIC);
        out.put(&VERSION.to_ne_bytes());
        out.put(&self.pid.to_ne_bytes());
        out.put(&self.process.to_ne_bytes());
        out.put(&self.key.block.to_ne_bytes());
        out.put(&self.key.secret);
        out.put(&self.bytes.to_ne_bytes());
        let check = checksum(&bytes[..56]);
        bytes[56..].copy_from_slice(&check.to_ne_bytes());
        bytes
    }

    /// `None`: not a handle of ours, or of another version.
    pub fn decode(bytes: &[u8; 64]) -> Option<Self> {
        let mut from = Reader(bytes);
        if from.take()? != MAGIC || from.u32()? != VERSION || checksum(&bytes[..56]) != Reader(&bytes[56..]).u64()? {
            return None;
        }
        let (pid, process) = (from.u32()?, from.u64()?);
        let key = Key { block: from.u64()?, secret: from.take()? };
        Some(Self { pid, process, key, bytes: from.u64()? })
    }

    /// The abstract name of the exporter's socket.
    pub fn socket(pid: u32, process: u64) -> String {
        format!("gpupool-ipc-{pid}-{process:016x}")
    }
}

/// What the importer asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// To have the block: from the answer on its memory serves nobody else, until [`Request::LetGo`] or the end of the
    /// importer.
    Hold,
    /// Chunks of a block that it has: the index of the first one, and how many at most, which is what the importer has
    /// descriptors left for.
    Chunks { first: u32, most: u32 },
    /// It has the block no more. There is no answer.
    LetGo,
}

impl Request {
    pub const SIZE: usize = 40;

    pub fn encode(&self, key: &Key) -> [u8; Self::SIZE] {
        let (kind, first, most) = match *self {
            Request::Hold => (0u32, 0, 0),
            Request::Chunks { first, most } => (1, first, most),
            Request::LetGo => (2, 0, 0),
        };
        let mut bytes = [0; Self::SIZE];
        let mut out = Writer(&mut bytes);
        out.put(&VERSION.to_ne_bytes());
        out.put(&kind.to_ne_bytes());
        out.put(&key.block.to_ne_bytes());
        out.put(&key.secret);
        out.put(&first.to_ne_bytes());
        out.put(&most.to_ne_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<(Self, Key)> {
        let mut from = Reader(bytes);
        if bytes.len() != Self::SIZE || from.u32()? != VERSION {
            return None;
        }
        let (kind, key) = (from.u32()?, Key { block: from.u64()?, secret: from.take()? });
        let (first, most) = (from.u32()?, from.u32()?);
        let request = match kind {
            0 => Request::Hold,
            1 => Request::Chunks { first, most },
            2 => Request::LetGo,
            _ => return None,
        };
        Some((request, key))
    }
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
    pub bytes: u64,
    pub place: Where,
}

/// What the exporter says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The importer has the block.
    Held,
    /// Some chunks of the block, and how it lies in all of them.
    Chunks { layout: Layout, chunks: Vec<Chunk> },
    /// The block was freed.
    Gone,
    /// The driver did not export a chunk (`CUresult`).
    Failed(i32),
    /// The importer is another user's process.
    Refused,
}

/// A block and its chunks as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// How many chunks there are.
    pub chunks: u32,
    /// Their bytes together.
    pub span: u64,
    /// Where the block begins in them.
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

const HEAD: usize = 8 + 4 + 8 + 8 + 16;
const CHUNK: usize = 8 + 4 + 16;

/// Bytes of the longest answer.
pub const LONGEST: usize = HEAD + BATCH as usize * CHUNK;

impl Answer {
    pub fn encode(&self) -> Vec<u8> {
        let (status, code) = match self {
            Answer::Chunks { .. } => (0u32, 0i32),
            Answer::Gone => (1, 0),
            Answer::Failed(code) => (2, *code),
            Answer::Refused => (3, 0),
            Answer::Held => (4, 0),
        };
        let mut out = [status.to_ne_bytes(), code.to_ne_bytes()].concat();
        if let Answer::Chunks { layout, chunks } = self {
            out.extend(layout.chunks.to_ne_bytes());
            out.extend(layout.span.to_ne_bytes());
            out.extend(layout.offset.to_ne_bytes());
            out.extend(layout.home);
            for chunk in chunks {
                out.extend(chunk.bytes.to_ne_bytes());
                let (node, uuid) = match chunk.place {
                    Where::Gpu(uuid) => (u32::MAX, uuid),
                    Where::Host(node) => (node, [0; 16]),
                };
                out.extend(node.to_ne_bytes());
                out.extend(uuid);
            }
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let (status, code) = (from.u32()?, from.u32()? as i32);
        match status {
            0 => {}
            1 => return Some(Answer::Gone),
            2 => return Some(Answer::Failed(code)),
            3 => return Some(Answer::Refused),
            4 => return Some(Answer::Held),
            _ => return None,
        }
        let layout = Layout { chunks: from.u32()?, span: from.u64()?, offset: from.u64()?, home: from.take()? };
        let mut chunks = Vec::new();
        while !from.0.is_empty() {
            let (bytes, node, uuid) = (from.u64()?, from.u32()?, from.take()?);
            if bytes == 0 || !bytes.is_multiple_of(FRAME) {
                return None;
            }
            chunks.push(Chunk { bytes, place: if node == u32::MAX { Where::Gpu(uuid) } else { Where::Host(node) } });
        }
        Some(Answer::Chunks { layout, chunks })
    }
}

/// FNV-1a: not against forgery, which the secret is, but so that a handle which was damaged on its way goes to the driver.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

struct Writer<'a>(&'a mut [u8]);

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        let rest = std::mem::take(&mut self.0);
        let (head, tail) = rest.split_at_mut(bytes.len());
        head.copy_from_slice(bytes);
        self.0 = tail;
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(*head)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle() -> Handle {
        Handle { pid: 77, process: 0x1234_5678, key: Key { block: 3, secret: [9; 16] }, bytes: 5 << 20 }
    }

    #[test]
    fn a_handle_reads_back_and_a_damaged_one_is_not_ours() {
        let bytes = handle().encode();
        assert_eq!(Handle::decode(&bytes), Some(handle()));
        for at in 0..64 {
            let mut damaged = bytes;
            damaged[at] ^= 1;
            assert_eq!(Handle::decode(&damaged), None, "byte {at}");
        }
        assert_eq!(Handle::decode(&[0; 64]), None);
    }

    #[test]
    fn a_secret_is_told_by_no_name_and_no_log() {
        let secret: String = handle().key.secret.iter().map(|byte| format!("{byte:02x}")).collect();
        let Handle { pid, process, key, .. } = handle();
        assert!(!Handle::socket(pid, process).contains(&secret));
        assert_eq!(format!("{key:?}"), "block 3");
        assert!(same_secret(&key.secret, &[9; 16]));
        for at in 0..16 {
            let mut other = key.secret;
            other[at] ^= 0x10;
            assert!(!same_secret(&key.secret, &other), "byte {at}");
        }
    }

    #[test]
    fn messages_read_back() {
        let key = handle().key;
        for request in [Request::Hold, Request::Chunks { first: 200, most: 7 }, Request::LetGo] {
            assert_eq!(Request::decode(&request.encode(&key)), Some((request, key)));
            assert_eq!(Request::decode(&request.encode(&key)[1..]), None);
        }
        let layout = Layout { chunks: 2, span: 34 << 20, offset: 2 << 20, home: [5; 16] };
        let chunks = vec![
            Chunk { bytes: 32 << 20, place: Where::Gpu([5; 16]) },
            Chunk { bytes: 2 << 20, place: Where::Host(1) },
        ];
        for answer in
            [Answer::Chunks { layout, chunks }, Answer::Held, Answer::Gone, Answer::Failed(-3), Answer::Refused]
        {
            let bytes = answer.encode();
            assert!(bytes.len() <= LONGEST);
            assert_eq!(Answer::decode(&bytes), Some(answer));
        }
    }

    #[test]
    fn answers_that_make_no_sense_are_none() {
        let layout = Layout { chunks: 1, span: FRAME, offset: 0, home: [0; 16] };
        let odd = Answer::Chunks { layout, chunks: vec![Chunk { bytes: FRAME + 1, place: Where::Host(0) }] };
        assert_eq!(Answer::decode(&odd.encode()), None, "half a frame");
        let whole = Answer::Chunks { layout, chunks: vec![Chunk { bytes: FRAME, place: Where::Host(0) }] }.encode();
        assert_eq!(Answer::decode(&whole[..whole.len() - 1]), None, "cut off");
        assert_eq!(Answer::decode(&[9; 8]), None, "no such status");
        assert!(layout.holds(FRAME) && !layout.holds(FRAME + 1) && !layout.holds(0));
        assert!(!Layout { offset: u64::MAX, ..layout }.holds(FRAME));
    }
}
