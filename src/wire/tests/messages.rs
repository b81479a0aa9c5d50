//! What is said is understood, and whatever else arrives is told from it. Under Miri: `cargo +nightly miri test -p
//! gpupool-wire --test messages`.

#![allow(clippy::unwrap_used, reason = "tests panic")]

use gpupool_pool::FRAME;
use gpupool_wire::blocks::{Answer, BATCH, Chunk, Handle, Key, Layout, Question, Request, Where, same_secret};
use gpupool_wire::message::{HEAD, decode, encode};
use gpupool_wire::{Unread, VERSION};
use proptest::collection::vec;
use proptest::prelude::*;

const CASES: u32 = if cfg!(miri) { 2 } else { 256 };
const MOST_CHUNKS: usize = if cfg!(miri) { 3 } else { BATCH as usize };

/// Where the version is, in a handle and in every message.
const VERSION_AT: std::ops::Range<usize> = 8..12;

prop_compose! {
    fn key()(block: u64, secret: [u8; 16]) -> Key {
        Key { block, secret }
    }
}

prop_compose! {
    fn handle()(pid: u32, process: u64, key in key(), bytes: u64) -> Handle {
        Handle { pid, process, key, bytes }
    }
}

fn request() -> impl Strategy<Value = Request> {
    let chunks = any::<(u32, u32)>().prop_map(|(first, most)| Request::Chunks { first, most });
    prop_oneof![Just(Request::Hold), chunks, Just(Request::LetGo)]
}

fn chunk() -> impl Strategy<Value = Chunk> {
    let place = prop_oneof![any::<[u8; 16]>().prop_map(Where::Gpu), any::<u32>().prop_map(Where::Host)];
    (1..1u64 << 40, place).prop_map(|(frames, place)| Chunk { bytes: frames.checked_mul(FRAME).unwrap(), place })
}

prop_compose! {
    fn layout()(chunks: u32, span: u64, offset: u64, home: [u8; 16]) -> Layout {
        Layout { chunks, span, offset, home }
    }
}

fn answer() -> impl Strategy<Value = Answer> {
    let chunks =
        (layout(), vec(chunk(), 0..=MOST_CHUNKS)).prop_map(|(layout, chunks)| Answer::Chunks { layout, chunks });
    let failed = any::<i32>().prop_map(Answer::Failed);
    prop_oneof![Just(Answer::Held), chunks, Just(Answer::Gone), failed, Just(Answer::Refused)]
}

prop_compose! {
    fn question()(request in request(), key in key()) -> Question {
        Question::of(&request, &key)
    }
}

/// Any message there is.
fn message() -> impl Strategy<Value = Vec<u8>> {
    let requests = (request(), key()).prop_map(|(request, key)| request.encode(&key));
    prop_oneof![requests, (answer(), question()).prop_map(|(answer, to)| answer.encode(to))]
}

/// What a message says is said in these bytes alone.
fn is_refused_or_meant(bytes: &[u8]) -> bool {
    let request = Request::decode(bytes).map(|(request, key)| request.encode(&key));
    let answer = Answer::decode(bytes).map(|(answer, to)| answer.encode(to));
    assert!(request.is_err() || answer.is_err(), "no request is an answer");
    [request, answer].into_iter().flatten().all(|meant| meant == bytes)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn handles_read_back_and_damaged_ones_are_the_drivers(handle in handle(), at in 0..64usize, bit in 0..8) {
        let mut bytes = handle.encode();
        prop_assert_eq!(Handle::decode(&bytes), Ok(handle));
        bytes[at] ^= 1u8 << bit;
        prop_assert_eq!(Handle::decode(&bytes), Err(Unread::Nonsense));
    }

    #[test]
    fn requests_read_back(request in request(), key in key()) {
        let bytes = request.encode(&key);
        prop_assert!(bytes.len() < Request::BUFFER);
        prop_assert_eq!(Request::decode(&bytes), Ok((request, key)));
    }

    #[test]
    fn answers_read_back(answer in answer(), to in question()) {
        let bytes = answer.encode(to);
        prop_assert!(bytes.len() < Answer::BUFFER);
        prop_assert_eq!(Answer::decode(&bytes), Ok((answer, to)));
    }

    #[test]
    fn what_is_cut_or_goes_on_is_no_message(bytes in message(), more in vec(any::<u8>(), 1..64), cut: prop::sample::Index) {
        let cut = &bytes[..cut.index(bytes.len())];
        let longer = [&bytes[..], &more].concat();
        for bytes in [cut, &longer] {
            prop_assert_eq!(Request::decode(bytes), Err(Unread::Nonsense));
            prop_assert_eq!(Answer::decode(bytes), Err(Unread::Nonsense));
        }
    }

    #[test]
    fn a_body_that_is_cut_or_goes_on_is_none_whatever_its_head_says(
        bytes in message(), more in vec(any::<u8>(), 1..28), cut: prop::sample::Index
    ) {
        let (kind, body) = decode(&bytes).unwrap();
        let shorter = encode(kind, &body[..cut.index(body.len() + 1)]);
        let longer = encode(kind, &[body, &more].concat());
        // The chunks of an answer may be fewer or more, and then mean that.
        prop_assert!(is_refused_or_meant(&shorter) && is_refused_or_meant(&longer));
    }

    #[test]
    fn a_head_with_one_other_bit_is_refused(bytes in message(), at in 0..HEAD, bit in 0..8) {
        let mut bytes = bytes;
        bytes[at] ^= 1u8 << bit;
        let refused = match VERSION_AT.contains(&at) {
            true => Unread::Version(u32::from_ne_bytes(bytes[VERSION_AT].try_into().unwrap())),
            false => Unread::Nonsense,
        };
        let kind_at = VERSION_AT.end..VERSION_AT.end + 4;
        if kind_at.contains(&at) {
            // Another kind with the same body, where there is one.
            prop_assert!(is_refused_or_meant(&bytes));
        } else {
            prop_assert_eq!(Request::decode(&bytes), Err(refused));
            prop_assert_eq!(Answer::decode(&bytes), Err(refused));
        }
    }

    #[test]
    fn a_message_with_other_bytes_is_refused_or_means_them(bytes in message(), others in vec(any::<(prop::sample::Index, u8)>(), 1..8)) {
        let mut bytes = bytes;
        for (at, other) in others {
            let at = at.index(bytes.len());
            bytes[at] = other;
        }
        prop_assert!(is_refused_or_meant(&bytes));
    }

    #[test]
    fn garbage_is_nonsense(bytes in vec(any::<u8>(), 0..256), kind: u32) {
        prop_assert_eq!(decode(&bytes), Err(Unread::Nonsense));
        prop_assert!(is_refused_or_meant(&encode(kind, &bytes)));
        prop_assert!(is_refused_or_meant(&encode(0x100 + kind % 3, &bytes)));
        prop_assert!(is_refused_or_meant(&encode(0x180 + kind % 5, &bytes)));
    }

    #[test]
    fn another_version_is_named_and_answered_whatever_it_says(kind: u32, body in vec(any::<u8>(), 0..64), theirs: u32) {
        prop_assume!(theirs != VERSION);
        let mut bytes = encode(kind, &body);
        bytes[VERSION_AT].copy_from_slice(&theirs.to_ne_bytes());
        let unread = Request::decode(&bytes).unwrap_err();
        prop_assert_eq!(unread, Unread::Version(theirs));
        prop_assert_eq!(Answer::decode(&bytes), Err(unread));
        let told = unread.to_string();
        prop_assert!(told.contains(&format!("version {theirs} ")) && told.contains(&format!("version {VERSION};")), "{}", told);
        // The answer has this process's version where the other one looks for it, and says nothing else.
        let answer = unread.answer().unwrap();
        prop_assert_eq!(&answer[VERSION_AT], &VERSION.to_ne_bytes());
        prop_assert_eq!(decode(&answer), Ok((0, &[][..])));
        prop_assert_eq!(Answer::decode(&answer), Err(Unread::Nonsense));
    }
}

#[test]
fn nonsense_gets_no_answer() {
    assert_eq!(Unread::Nonsense.answer(), None);
}

#[test]
fn a_handle_of_another_version_is_told_from_the_drivers() {
    let handle = Handle { pid: 77, process: 5, key: Key { block: 3, secret: [9; 16] }, bytes: 5 << 20 };
    let mut bytes = handle.encode();
    bytes[VERSION_AT].copy_from_slice(&(VERSION + 1).to_ne_bytes());
    let fnv = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let checksum: u64 = bytes[..56].iter().fold(0xcbf2_9ce4_8422_2325, fnv);
    bytes[56..].copy_from_slice(&checksum.to_ne_bytes());
    assert_eq!(Handle::decode(&bytes), Err(Unread::Version(VERSION + 1)));
    assert_eq!(Handle::decode(&[0; 64]), Err(Unread::Nonsense));
}

#[test]
fn a_secret_is_told_by_no_name_and_no_log() {
    let key = Key { block: 3, secret: [9; 16] };
    let secret: String = key.secret.iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(!Handle::socket(77, 5).contains(&secret));
    assert_eq!(format!("{key:?}"), "block 3");
    assert!(same_secret(&key.secret, &[9; 16]));
    for at in 0..16 {
        let mut other = key.secret;
        other[at] ^= 0x10;
        assert!(!same_secret(&key.secret, &other), "byte {at}");
    }
}

#[test]
fn chunks_that_cannot_be_are_nonsense() {
    let layout = Layout { chunks: 1, span: FRAME, offset: 0, home: [0; 16] };
    let of = |bytes, count: usize| {
        let chunks = vec![Chunk { bytes, place: Where::Host(0) }; count];
        Answer::decode(&Answer::Chunks { layout, chunks }.encode(Question::UNREAD))
    };
    assert!(of(FRAME, 1).is_ok());
    assert_eq!(of(FRAME + 1, 1), Err(Unread::Nonsense), "half a frame");
    assert_eq!(of(0, 1), Err(Unread::Nonsense), "nothing");
    assert!(of(FRAME, BATCH as usize).is_ok());
    assert_eq!(of(FRAME, BATCH as usize + 1), Err(Unread::Nonsense), "more than a message has descriptors");
}

#[test]
fn a_block_lies_within_its_chunks() {
    let layout = Layout { chunks: 1, span: FRAME, offset: 0, home: [0; 16] };
    assert!(layout.holds(FRAME) && !layout.holds(FRAME + 1) && !layout.holds(0));
    assert!(!Layout { offset: u64::MAX, ..layout }.holds(FRAME));
    assert!(!Layout { chunks: 0, ..layout }.holds(FRAME));
    assert!(!Layout { span: FRAME + 1, ..layout }.holds(FRAME));
}
