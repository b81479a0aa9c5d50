//! What a program and the helper say to each other that keeps lending GPUs awake.
//!
//! A program says which GPUs it has memory on without a context, again whenever that changes, and is answered about each of
//! them. The helper holds a context on a GPU as long as a connection names it, so the end of a connection is all that it needs
//! to hear of a program's end.

use crate::message::{self, HEAD, Unread};
use crate::socket::Credentials;
use zerocopy::native_endian::I32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The bytes of a GPU's UUID, which names it in every process: numbers depend on what each can see.
pub type Uuid = [u8; 16];

/// GPUs in one message.
pub const MOST: usize = 64;
/// A buffer of this size has room for every message, and one byte more (see [`message::decode`]).
pub const ROOM: usize = HEAD + MOST * size_of::<StateBytes>() + 1;

const KEEP: u32 = 0x200;
const ADOPT: u32 = 0x201;
const STATES: u32 = 0x210;

/// What is said to the helper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// All GPUs that this connection needs awake, in place of those it named before.
    Keep(Vec<Uuid>),
    /// The descriptor that comes with this message is a connection of somebody else's, which is the helper's from now on.
    Adopt,
}

/// How it went with a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// Which one.
    pub gpu: Uuid,
    /// 0: a context is on it. [`UNSEEN`], [`NO_DRIVER`], or the `CUresult` of the call that failed.
    pub result: i32,
}

/// The helper sees no such GPU: it runs where the GPU is hidden, or it is a part of one (MIG).
pub const UNSEEN: i32 = -1;
/// The helper cannot use CUDA at all.
pub const NO_DRIVER: i32 = -2;

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct StateBytes {
    gpu: Uuid,
    result: I32,
}

/// Whether the helper serves programs of this process's user.
///
/// # Errors
/// It does not; the reason.
pub fn may_be_served() -> Result<(), String> {
    let why = |why| format!("the helper serves no program but those that are certainly of its own user, and {why}");
    Credentials::own().is_same_user().map_err(why)
}

impl Request {
    /// Its bytes; of more than [`MOST`] GPUs the first.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Request::Keep(gpus) => message::encode(KEEP, gpus[..gpus.len().min(MOST)].as_flattened()),
            Request::Adopt => message::encode(ADOPT, &[]),
        }
    }

    /// The request in these bytes.
    ///
    /// # Errors
    /// It is of another version, or none.
    pub fn decode(bytes: &[u8]) -> Result<Self, Unread> {
        match message::decode(bytes)? {
            (KEEP, body) if body.len() <= MOST * size_of::<Uuid>() => {
                let gpus = <[Uuid]>::ref_from_bytes(body).map_err(|_| Unread::Nonsense)?;
                Ok(Request::Keep(gpus.to_vec()))
            }
            (ADOPT, []) => Ok(Request::Adopt),
            _ => Err(Unread::Nonsense),
        }
    }
}

/// The answer about these GPUs; of more than [`MOST`] the first.
pub fn encode_states(states: &[State]) -> Vec<u8> {
    let bytes = |state: &State| StateBytes { gpu: state.gpu, result: state.result.into() };
    let bytes: Vec<StateBytes> = states.iter().take(MOST).map(bytes).collect();
    message::encode(STATES, bytes.as_bytes())
}

/// The answer in these bytes.
///
/// # Errors
/// It is of another version, or none.
pub fn decode_states(bytes: &[u8]) -> Result<Vec<State>, Unread> {
    let (STATES, body) = message::decode(bytes)? else { return Err(Unread::Nonsense) };
    let states = <[StateBytes]>::ref_from_bytes(body).map_err(|_| Unread::Nonsense)?;
    if states.len() > MOST {
        return Err(Unread::Nonsense);
    }
    Ok(states.iter().map(|bytes| State { gpu: bytes.gpu, result: bytes.result.get() }).collect())
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
        fn what_is_said_is_what_is_heard(gpus: Vec<Uuid>, results: Vec<i32>) {
            let request = Request::Keep(gpus.iter().copied().take(MOST).collect());
            let bytes = Request::Keep(gpus.clone()).encode();
            prop_assert!(bytes.len() < ROOM);
            prop_assert_eq!(Request::decode(&bytes), Ok(request));
            let states: Vec<State> =
                gpus.iter().zip(&results).map(|(gpu, result)| State { gpu: *gpu, result: *result }).take(MOST).collect();
            let bytes = encode_states(&states);
            prop_assert!(bytes.len() < ROOM);
            prop_assert_eq!(decode_states(&bytes), Ok(states));
        }

        #[test]
        fn any_bytes_are_a_message_or_none(bytes: Vec<u8>) {
            let framed = [KEEP, ADOPT, STATES].map(|kind| message::encode(kind, &bytes));
            for bytes in framed.iter().chain([&bytes]) {
                if let Ok(request) = Request::decode(bytes) {
                    prop_assert_eq!(&request.encode(), bytes);
                }
                if let Ok(states) = decode_states(bytes) {
                    prop_assert_eq!(&encode_states(&states), bytes);
                }
            }
        }
    }

    #[test]
    fn more_gpus_than_fit_are_no_message() {
        let body = vec![0; (MOST + 1) * size_of::<Uuid>()];
        assert_eq!(Request::decode(&message::encode(KEEP, &body)), Err(Unread::Nonsense));
        let body = vec![0; (MOST + 1) * size_of::<StateBytes>()];
        assert_eq!(decode_states(&message::encode(STATES, &body)), Err(Unread::Nonsense));
    }
}
