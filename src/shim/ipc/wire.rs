//! What two processes say to each other about a block: the 64 bytes that the program carries from one to the other, and
//! the messages on the exporter's socket. Both sides run on one machine, so numbers are in its own byte order.

use gpupool_pool::FRAME;

/// Chunks in one answer: the kernel passes at most 253 descriptors at a time.
pub const BATCH: u32 = 200;

/// A `CUipcMemHandle` of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// The exporting process, for people.
    pub pid: u32,
    /// What its socket is called; nobody can guess it.
    pub token: Token,
    /// [`gpupool_pool::Block::id`]: an address may be another block's by now, a number never.
    pub block: u64,
    /// First byte of the block in the exporter.
    pub address: u64,
    /// Bytes of the block.
    pub bytes: u64,
}

/// Random, one a process.
pub type Token = [u8; 16];

/// Begins every handle of ours; handles of the driver's begin otherwise.
const MAGIC: [u8; 8] = *b"gpupool\x1c";
/// Of the handle and of the messages.
const VERSION: u32 = 1;

impl Handle {
    /// The bytes that the program gets. The same block has the same bytes each time, as with the driver: programs use
    /// them as a key.
    pub fn encode(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        let mut out = Writer(&mut bytes);
        out.put(&MAGIC);
        out.put(&VERSION.to_ne_bytes());
        out.put(&self.pid.to_ne_bytes());
        out.put(&self.token);
        for number in [self.block, self.address, self.bytes] {
            out.put(&number.to_ne_bytes());
        }
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
        let (pid, token) = (from.u32()?, from.take()?);
        Some(Self { pid, token, block: from.u64()?, address: from.u64()?, bytes: from.u64()? })
    }

    /// The abstract name of the exporter's socket.
    pub fn socket(pid: u32, token: &Token) -> String {
        let hex: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("gpupool-ipc-{pid}-{hex}")
    }
}

/// The importer asks for chunks of a block, some at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub block: u64,
    pub address: u64,
    /// Index of the first chunk.
    pub first: u32,
    /// How many at most: what the importer has descriptors left for.
    pub most: u32,
}

impl Request {
    pub const SIZE: usize = 28;

    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        let mut out = Writer(&mut bytes);
        out.put(&VERSION.to_ne_bytes());
        out.put(&self.block.to_ne_bytes());
        out.put(&self.address.to_ne_bytes());
        out.put(&self.first.to_ne_bytes());
        out.put(&self.most.to_ne_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        if bytes.len() != Self::SIZE || from.u32()? != VERSION {
            return None;
        }
        Some(Self { block: from.u64()?, address: from.u64()?, first: from.u32()?, most: from.u32()? })
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

/// FNV-1a: not against forgery, which the token is, but so that a handle which was damaged on its way goes to the driver.
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
        Handle { pid: 77, token: [9; 16], block: 3, address: 0x7000_0000_0000, bytes: 5 << 20 }
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
    fn messages_read_back() {
        let request = Request { block: 3, address: 1 << 40, first: 200, most: 7 };
        assert_eq!(Request::decode(&request.encode()), Some(request));
        assert_eq!(Request::decode(&request.encode()[1..]), None);
        let layout = Layout { chunks: 2, span: 34 << 20, offset: 2 << 20, home: [5; 16] };
        let chunks = vec![
            Chunk { bytes: 32 << 20, place: Where::Gpu([5; 16]) },
            Chunk { bytes: 2 << 20, place: Where::Host(1) },
        ];
        for answer in [Answer::Chunks { layout, chunks }, Answer::Gone, Answer::Failed(-3), Answer::Refused] {
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
