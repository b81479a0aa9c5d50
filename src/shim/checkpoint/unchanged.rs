//! What has not changed since the last image, so that it need not be copied while the program is stopped.
//!
//! A GPU looks at its own memory forty times as fast as it copies it to the host (`backing/kernels.rs`). Each piece that is a part of the image has a digest taken in the stop, 128 bits with
//! keys that nobody outside of the process knows; those of the newest image that this process wrote are remembered. What has the digest that it had at the same place is what that image has of it, and the store
//! takes it from there ([`Writer::reuse`]).
//!
//! **Nothing is taken for unchanged because nobody is known to have written to it.** A digest differs for certain where no more than 16 bytes in a row changed, from a multiple of 16 on; otherwise it
//! is the same by chance once in 2^128, which for a hundred million images of as many pieces each as a whole machine has comes to less than one in 10^20.
//!
//! Everything is copied wherever any of this is missing: the newest image in the folder is not the one that is remembered; memory lies elsewhere than on the GPU that it belongs to, which would
//! look at it no faster than it copies it; the driver makes no kernel, or refuses it; a context came while memory was being mapped for the image, which then may not be let read it; or what the
//! older image has of it is damaged, or was to be read and was not.

use super::blocks::{Span, Subject};
use crate::backing::kernels;
use crate::backing::mover;
use crate::backing::open::Opened;
use crate::image;
use crate::serve::handles::by_hand;
use crate::watch::context;
use gpupool_cuda::Driver;
use gpupool_pool::{Backend, Contents, Mover};
use gpupool_store::{Key, Writer, Written};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The newest image that this process wrote.
static LAST: Mutex<Option<Arc<Last>>> = Mutex::new(None);

/// Where a piece lies, and how long it is.
type Place = (u64, u64);

/// What is known of an image.
pub struct Last {
    /// What tells it from all others ([`Written::seal`]).
    seal: u64,
    pieces: BTreeMap<Place, Piece>,
}

#[derive(Clone, Copy)]
struct Piece {
    digest: u128,
    /// Where the image has it: the block's number, and how far from its beginning.
    at: (u64, u64),
}

/// What one image is about to be known by.
#[derive(Default)]
pub struct Looked {
    pieces: BTreeMap<Place, Piece>,
}

/// Has the kernel made for all GPUs that have memory. Before the program is stopped.
pub fn learn(driver: &'static Driver, opened: &Opened) {
    let blocks = opened.pool.stretches();
    let pooled = blocks.iter().map(|(block, _)| (block.home, block.owner));
    let own = by_hand::all_mapped().into_iter().map(|own| (own.asked, by_hand::NOBODY));
    for (gpu, owner) in pooled.chain(own).collect::<BTreeMap<_, _>>() {
        if let Some((_, handle, _lives)) = mover::context_for(owner, gpu) {
            context::within_own(driver, handle, || kernels::learn(driver, gpu));
        }
    }
}

/// The image that is remembered, if that is the newest one in the folder that is written to.
pub fn last(writer: &Writer) -> Option<Arc<Last>> {
    let last = LAST.lock().clone()?;
    (writer.before() == Some(last.seal)).then_some(last)
}

/// Has no image remembered but this one, which is whole.
pub fn remember(looked: Looked, written: &Written) {
    let last = Arc::new(Last { seal: written.seal, pieces: looked.pieces });
    let before = LAST.lock().replace(last);
    drop(before);
}

/// Looks at all that can be looked at, while the program is stopped, and hands what is unchanged to the store. What is left to be copied, and how many bytes are not.
///
/// # Errors
/// As of [`Writer::reuse`].
pub fn look(
    opened: &'static Opened,
    subject: &Subject,
    keys: &[Key],
    writer: &Writer,
    last: Option<&Last>,
) -> Result<(Vec<Span>, u64, Looked), gpupool_store::Error> {
    let (mut left, mut unchanged, mut looked) = (Vec::new(), 0, Looked::default());
    for spans in subject.spans.chunk_by(|one, other| (one.gpu, one.owner) == (other.gpu, other.owner)) {
        let digests = digests(opened, subject, spans);
        let mut digests = digests.iter();
        for span in spans {
            let about = &subject.blocks[span.block];
            let mut rest: Option<Span> = None;
            for (done, bytes) in image::parts(span.offset, span.bytes) {
                let piece =
                    Span { offset: span.offset + done, address: span.address + done, bytes: bytes as u64, ..*span };
                let digest =
                    if has_digest(&piece) { digests.next().and_then(|contents| contents.digest) } else { None };
                let place = (about.address + piece.offset, piece.bytes);
                let is_taken = match (digest, last.and_then(|last| last.pieces.get(&place))) {
                    (Some(digest), Some(before)) if before.digest == digest => {
                        writer.reuse(keys[span.block], piece.offset, bytes, before.at)?
                    }
                    _ => false,
                };
                if let Some(digest) = digest {
                    looked.pieces.insert(place, Piece { digest, at: (about.id, piece.offset) });
                }
                match (is_taken, &mut rest) {
                    (true, rest) => {
                        unchanged += piece.bytes;
                        left.extend(rest.take());
                    }
                    // Pieces that lie behind each other are copied as one.
                    (false, Some(rest)) => rest.bytes += piece.bytes,
                    (false, rest) => *rest = Some(piece),
                }
            }
            left.extend(rest);
        }
    }
    Ok((left, unchanged, looked))
}

/// Whether the GPU that it belongs to has it, and can look at it.
fn has_digest(piece: &Span) -> bool {
    piece.is_near && kernels::is_fit(piece.address, piece.bytes)
}

/// Of spans of one owner and GPU, each part that [`has_digest`]: what is in it, where that could be found out.
fn digests(opened: &'static Opened, subject: &Subject, spans: &[Span]) -> Vec<Contents> {
    let pieces = spans.iter().flat_map(|span| {
        let parts = image::parts(span.offset, span.bytes);
        parts.map(|(done, bytes)| Span { address: span.address + done, bytes: bytes as u64, ..*span })
    });
    let fit = pieces.filter(has_digest);
    let mut contents: Vec<Contents> =
        fit.map(|piece| Contents { address: piece.address, bytes: piece.bytes, digest: None }).collect();
    let (Some(Span { owner, gpu, .. }), backend) = (spans.first(), opened.pool.backend()) else { return contents };
    // A kernel that reads what its GPU may not ends its context. Second mappings are for the GPUs that had one as they were made; where none has come since, each that has one now is among them.
    if !contents.is_empty() && backend.prepare(*owner, *gpu).is_ok() && backend.readers() == subject.readers {
        backend.digest(*owner, *gpu, &mut contents);
    }
    contents
}
