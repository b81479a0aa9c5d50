//! Copies and fills: validated when called, carried out in the order of their stream over whatever is mapped then.

use crate::boundary::{DefaultStream, default_stream};
use crate::capture;
use crate::clock;
use crate::coherence;
use crate::context::{Context, by_handle, current};
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{Copy2d, Copy3d, Handle, In, Out, Side3d};
use crate::graph::Node;
use crate::space::{Span, access, granted};
use crate::stream::{Stream, Work, resolve};
use std::ffi::c_int;
use std::sync::Arc;

/// What an address may be in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Memory the driver knows.
    Device,
    /// Memory the driver knows, or the program's own.
    Any,
}

/// Rows in memory: `slice` and `pitch` bytes from one to the next in each direction.
#[derive(Clone, Copy, Debug)]
pub struct Surface {
    pub address: u64,
    pub pitch: u64,
    pub slice: u64,
    pub side: Side,
    /// The device that does the access; a mapping without a grant for it fails.
    pub device: usize,
}

/// `depth` × `height` rows of `width` bytes.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub width: u64,
    pub height: u64,
    pub depth: u64,
}

impl Shape {
    fn is_empty(&self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }
}

impl Surface {
    fn line(address: u64, side: Side, device: usize) -> Self {
        Self { address, pitch: 0, slice: 0, side, device }
    }

    /// The bytes from the first to the last of `shape`; INVALID_VALUE where the numbers do not fit in an address.
    fn extent(&self, shape: Shape) -> Outcome<u64> {
        let rows = (shape.height - 1).checked_mul(self.pitch);
        let slices = (shape.depth - 1).checked_mul(self.slice);
        let bytes = rows.zip(slices).and_then(|(rows, slices)| rows.checked_add(slices)?.checked_add(shape.width));
        bytes.filter(|bytes| self.address.checked_add(*bytes).is_some()).ok_or(Code::INVALID_VALUE)
    }

    /// Whether the rows follow each other without a gap, so that one stretch is enough.
    fn is_dense(&self, shape: Shape) -> bool {
        (shape.height == 1 || self.pitch == shape.width)
            && (shape.depth == 1 || self.slice == self.pitch * shape.height)
    }

    fn row(&self, y: u64, z: u64) -> u64 {
        self.address + y * self.pitch + z * self.slice
    }

    fn spans(&self, address: u64, bytes: u64) -> Outcome<Vec<Span>> {
        driver().space.spans(address, bytes, self.side == Side::Any)
    }

    /// INVALID_VALUE for what is not there, and whether the access is granted everywhere.
    fn check(&self, shape: Shape, write: bool) -> Outcome<bool> {
        let mut allowed = true;
        let mut visit = |address, bytes| {
            allowed &= self.spans(address, bytes)?.iter().all(|span| granted(span, self.device, write));
            Ok(())
        };
        if self.is_dense(shape) {
            visit(self.address, self.extent(shape)?)?;
        } else {
            self.extent(shape)?;
            for z in 0..shape.depth {
                for y in 0..shape.height {
                    visit(self.row(y, z), shape.width)?;
                }
            }
        }
        Ok(allowed)
    }

    /// Whether the program's own unpinned memory is meant.
    fn is_pageable(&self) -> bool {
        self.side == Side::Any && driver().space.find(self.address).is_none()
    }
}

/// What happens where a device has no access to its operand.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ungranted {
    /// The call says so: INVALID_VALUE.
    Refuse,
    /// The call succeeds and the context dies with LAUNCH_FAILED, as measured for `cuMemcpy` and the peer copies.
    Kill,
}

#[derive(Clone, Copy)]
struct Copy {
    dst: Surface,
    src: Surface,
    shape: Shape,
    ungranted: Ungranted,
}

impl Copy {
    /// As a node of a graph tells it.
    fn described(&self) -> Copy3d {
        let side = |surface: &Surface| Side3d {
            x: 0,
            y: 0,
            z: 0,
            lod: 0,
            // `CU_MEMORYTYPE_DEVICE` and `CU_MEMORYTYPE_UNIFIED`.
            kind: if surface.side == Side::Device { 2 } else { 4 },
            host: 0,
            device: surface.address,
            array: 0,
            reserved: 0,
            pitch: surface.pitch as usize,
            height: surface.slice.checked_div(surface.pitch).unwrap_or(0) as usize,
        };
        let [width, height, depth] = [self.shape.width, self.shape.height, self.shape.depth].map(|side| side as usize);
        Copy3d { src: side(&self.src), dst: side(&self.dst), width, height, depth }
    }

    fn run(&self) -> Outcome {
        let Copy { dst, src, shape, .. } = *self;
        // What was legal at the call and is gone now is an illegal address to the hardware.
        let faulty = |_| Code::ILLEGAL_ADDRESS;
        let line = |to, from, bytes| -> Outcome {
            let (target, source) = (dst.spans(to, bytes).map_err(faulty)?, src.spans(from, bytes).map_err(faulty)?);
            access(&target, dst.device)?;
            access(&source, src.device)?;
            clock::copy(src.device, &target, &source);
            let (read, _written) = (coherence::open(&source, false), coherence::open(&target, true));
            transfer(&target, &source);
            if read.is_stale() {
                coherence::spoil(&target);
            }
            Ok(())
        };
        if dst.is_dense(shape) && src.is_dense(shape) {
            return line(dst.address, src.address, shape.width * shape.height * shape.depth);
        }
        for z in 0..shape.depth {
            for y in 0..shape.height {
                line(dst.row(y, z), src.row(y, z), shape.width)?;
            }
        }
        Ok(())
    }

    fn touches(&self) -> Outcome<Vec<(u64, u64)>> {
        [self.dst, self.src]
            .iter()
            .map(|surface| Ok((surface.address, surface.address + surface.extent(self.shape)?)))
            .collect()
    }
}

/// Moves bytes between two lists of stretches of the same total length.
fn transfer(to: &[Span], from: &[Span]) {
    let (mut to, mut from) =
        (to.iter().map(|span| (span.alias, span.bytes)), from.iter().map(|span| (span.alias, span.bytes)));
    let (mut target, mut source) = (to.next(), from.next());
    while let (Some((dst, room)), Some((src, left))) = (target, source) {
        let bytes = room.min(left);
        // SAFETY: both stretches are the driver's own view of live memory (their spans hold it), or memory the program
        // named for this copy. `copy` allows them to overlap.
        unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, bytes) };
        target = if bytes == room { to.next() } else { Some((dst + bytes, room - bytes)) };
        source = if bytes == left { from.next() } else { Some((src + bytes, left - bytes)) };
    }
}

/// When a call returns.
enum When {
    Done,
    Queued(Handle),
}

/// The work of a copy node of a graph.
pub fn volume_work(copy: In<Copy3d>) -> Outcome<Work> {
    let copy = volume_of(copy, false)?;
    if copy.shape.is_empty() || !(copy.dst.check(copy.shape, true)? & copy.src.check(copy.shape, false)?) {
        return Err(Code::INVALID_VALUE);
    }
    Ok(Work {
        touches: copy.touches()?,
        action: Arc::new(move |_: &Context| copy.run()),
        node: Node::Memcpy(copy.described()),
    })
}

fn start(copy: Copy, when: When) -> Outcome {
    let context = current()?;
    if copy.shape.is_empty() {
        return match when {
            When::Queued(stream) => resolve(stream).map(drop),
            When::Done => Ok(()),
        };
    }
    let allowed = copy.dst.check(copy.shape, true)? & copy.src.check(copy.shape, false)?;
    if !allowed && copy.ungranted == Ungranted::Refuse {
        return Err(Code::INVALID_VALUE);
    }
    let action: crate::stream::Action = if allowed {
        Arc::new(move |_: &Context| copy.run())
    } else {
        Arc::new(|_: &Context| Err(Code::LAUNCH_FAILED))
    };
    match when {
        When::Done => {
            capture::forbid()?;
            synchronously(&context, &Work { action, touches: copy.touches()?, node: Node::Memcpy(copy.described()) })
        }
        When::Queued(handle) => {
            let stream = resolve(handle)?;
            queue(&stream, copy, action, allowed)
        }
    }
}

/// A copy that returns when it is done: after the work that its default stream has to wait for.
fn synchronously(context: &Arc<Context>, work: &Work) -> Outcome {
    let handle = if default_stream() == DefaultStream::Legacy { 1 } else { 2 };
    let stream = resolve(handle)?;
    let earliest = stream.settle(context);
    context.check()?;
    if let Err(code) = stream.run_here(context, work, earliest) {
        context.kill(code);
    }
    clock::host_saw(stream.last().end());
    Ok(())
}

/// Pageable memory is only borrowed for the call: a source is copied out first, a target is waited for.
fn queue(stream: &Arc<Stream>, copy: Copy, action: crate::stream::Action, allowed: bool) -> Outcome {
    let capturing = stream.capturing()?.is_some();
    if capturing || !allowed {
        return stream.submit(Work { action, touches: copy.touches()?, node: Node::Memcpy(copy.described()) });
    }
    let linear = copy.dst.is_dense(copy.shape) && copy.src.is_dense(copy.shape);
    if copy.src.is_pageable() && !copy.dst.is_pageable() && linear && !stream.is_idle() {
        let bytes = copy.src.extent(copy.shape)? as usize;
        let mut staged = vec![0_u8; bytes];
        // SAFETY: the program named these bytes for this copy, and `staged` is as long.
        unsafe { std::ptr::copy_nonoverlapping(copy.src.address as *const u8, staged.as_mut_ptr(), bytes) };
        let dst = copy.dst;
        let action: crate::stream::Action = Arc::new(move |_: &Context| {
            let spans = dst.spans(dst.address, bytes as u64).map_err(|_| Code::ILLEGAL_ADDRESS)?;
            access(&spans, dst.device)?;
            let staged = [Span { alias: staged.as_ptr() as usize, bytes, region: None }];
            clock::copy(dst.device, &spans, &staged);
            let _written = coherence::open(&spans, true);
            transfer(&spans, &staged);
            Ok(())
        });
        let touches = vec![(dst.address, dst.address + bytes as u64)];
        return stream.submit(Work { action, touches, node: Node::Memcpy(copy.described()) });
    }
    let waits = copy.dst.is_pageable() || copy.src.is_pageable();
    let work = Work { action, touches: copy.touches()?, node: Node::Memcpy(copy.described()) };
    if waits {
        let context = stream.context()?;
        let _held = copy.dst.is_pageable().then(|| context.hold_while_copying());
        stream.run_or_submit(work)?;
        let last = stream.last();
        last.wait();
        clock::host_saw(last.end());
        return Ok(());
    }
    stream.submit(work)
}

// Linear copies

fn linear(dst: (u64, Side), src: (u64, Side), bytes: usize, ungranted: Ungranted, when: When) -> Outcome {
    let device = current()?.device;
    let shape = Shape { width: bytes as u64, height: 1, depth: 1 };
    let (dst, src) = (Surface::line(dst.0, dst.1, device), Surface::line(src.0, src.1, device));
    start(Copy { dst, src, shape, ungranted }, when)
}

pub fn any(dst: u64, src: u64, bytes: usize) -> Outcome {
    linear((dst, Side::Any), (src, Side::Any), bytes, Ungranted::Kill, When::Done)
}

pub fn any_async(dst: u64, src: u64, bytes: usize, stream: Handle) -> Outcome {
    linear((dst, Side::Any), (src, Side::Any), bytes, Ungranted::Kill, When::Queued(stream))
}

pub fn to_device(dst: u64, src: u64, bytes: usize) -> Outcome {
    linear((dst, Side::Device), (src, Side::Any), bytes, Ungranted::Refuse, When::Done)
}

pub fn to_device_async(dst: u64, src: u64, bytes: usize, stream: Handle) -> Outcome {
    linear((dst, Side::Device), (src, Side::Any), bytes, Ungranted::Refuse, When::Queued(stream))
}

pub fn to_host(dst: u64, src: u64, bytes: usize) -> Outcome {
    linear((dst, Side::Any), (src, Side::Device), bytes, Ungranted::Refuse, When::Done)
}

pub fn to_host_async(dst: u64, src: u64, bytes: usize, stream: Handle) -> Outcome {
    linear((dst, Side::Any), (src, Side::Device), bytes, Ungranted::Refuse, When::Queued(stream))
}

pub fn on_device(dst: u64, src: u64, bytes: usize) -> Outcome {
    linear((dst, Side::Device), (src, Side::Device), bytes, Ungranted::Refuse, When::Done)
}

/// `cuMemcpyDtoD` before CUDA 3.2, with 32-bit device pointers, as the others of that interface.
pub fn on_device_32(_dst: u32, _src: u32, _bytes: u32) -> Outcome {
    Err(Code::NOT_SUPPORTED)
}

pub fn on_device_async(dst: u64, src: u64, bytes: usize, stream: Handle) -> Outcome {
    linear((dst, Side::Device), (src, Side::Device), bytes, Ungranted::Refuse, When::Queued(stream))
}

/// `cuMemcpyBatchAsync`: copies in any order; here in the given one. Attributes are hints, and not used.
#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub fn batch(
    targets: In<u64>,
    sources: In<u64>,
    sizes: In<usize>,
    count: usize,
    _attributes: In<u8>,
    _first: In<usize>,
    attribute_count: usize,
    stream: Handle,
) -> Outcome {
    if count == 0 || attribute_count == 0 || attribute_count > count || stream <= 1 {
        return Err(Code::INVALID_VALUE);
    }
    let (targets, sources, sizes) = (targets.list(count)?, sources.list(count)?, sizes.list(count)?);
    for ((target, source), bytes) in targets.into_iter().zip(sources).zip(sizes) {
        any_async(target, source, bytes, stream)?;
    }
    Ok(())
}

/// `cuMemcpyBatchAsync` of 12.8, which also names the copy that failed; `SIZE_MAX` stands for none in particular.
#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub fn batch_v1(
    targets: In<u64>,
    sources: In<u64>,
    sizes: In<usize>,
    count: usize,
    attributes: In<u8>,
    first: In<usize>,
    attribute_count: usize,
    failed: Out<usize>,
    stream: Handle,
) -> Outcome {
    batch(targets, sources, sizes, count, attributes, first, attribute_count, stream)
        .inspect_err(|_| failed.set_if_wanted(usize::MAX))
}

/// `cuMemcpyWithAttributesAsync`.
pub fn with_attributes(target: u64, source: u64, bytes: usize, attributes: In<u8>, stream: Handle) -> Outcome {
    if attributes.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    any_async(target, source, bytes, stream)
}

/// `cuMemcpyPeer`: each side is accessed by the device of its own context.
fn peer_copy(dst: u64, to: Handle, src: u64, from: Handle, bytes: usize, when: When) -> Outcome {
    current()?;
    let dst = Surface::line(dst, Side::Device, by_handle(to)?.device);
    let src = Surface::line(src, Side::Device, by_handle(from)?.device);
    let shape = Shape { width: bytes as u64, height: 1, depth: 1 };
    start(Copy { dst, src, shape, ungranted: Ungranted::Kill }, when)
}

pub fn peer(dst: u64, to: Handle, src: u64, from: Handle, bytes: usize) -> Outcome {
    peer_copy(dst, to, src, from, bytes, When::Done)
}

pub fn peer_async(dst: u64, to: Handle, src: u64, from: Handle, bytes: usize, stream: Handle) -> Outcome {
    peer_copy(dst, to, src, from, bytes, When::Queued(stream))
}

// Copies of rectangles and boxes

const HOST: c_int = 1;
const DEVICE: c_int = 2;
const UNIFIED: c_int = 4;

const ARRAY: c_int = 3;

/// One side of a copy as the structures describe it; a pitch or slice height of 0 means "as the copy is".
struct Operand {
    kind: c_int,
    host: usize,
    device: u64,
    at: (usize, usize, usize),
    pitch: usize,
    slice_rows: usize,
}

impl Operand {
    fn surface(&self, shape: Shape) -> Outcome<Surface> {
        let (address, side) = match self.kind {
            HOST => (self.host as u64, Side::Any),
            DEVICE => (self.device, Side::Device),
            UNIFIED => (self.device, Side::Any),
            ARRAY => return Err(Code::NOT_SUPPORTED),
            _ => return Err(Code::INVALID_VALUE),
        };
        let or = |given: usize, default| if given == 0 { default } else { given as u64 };
        let pitch = or(self.pitch, shape.width);
        if pitch < shape.width {
            return Err(Code::INVALID_VALUE);
        }
        let slice = pitch.checked_mul(or(self.slice_rows, shape.height)).ok_or(Code::INVALID_VALUE)?;
        let (x, y, z) = (self.at.0 as u64, self.at.1 as u64, self.at.2 as u64);
        let corner = y.checked_mul(pitch).zip(z.checked_mul(slice));
        let address = corner.and_then(|(rows, slices)| address.checked_add(rows)?.checked_add(slices)?.checked_add(x));
        Ok(Surface { address: address.ok_or(Code::INVALID_VALUE)?, pitch, slice, side, device: current()?.device })
    }
}

fn rectangle(copy: In<Copy2d>, when: When) -> Outcome {
    let copy = copy.get()?;
    current()?;
    let shape = Shape { width: copy.width as u64, height: copy.height as u64, depth: 1 };
    let side = |side: crate::ffi::Side2d| {
        let at = (side.x, side.y, 0);
        Operand { kind: side.kind, host: side.host, device: side.device, at, pitch: side.pitch, slice_rows: 0 }
            .surface(shape)
    };
    start(Copy { dst: side(copy.dst)?, src: side(copy.src)?, shape, ungranted: Ungranted::Refuse }, when)
}

pub fn rectangle_sync(copy: In<Copy2d>) -> Outcome {
    rectangle(copy, When::Done)
}

pub fn rectangle_async(copy: In<Copy2d>, stream: Handle) -> Outcome {
    rectangle(copy, When::Queued(stream))
}

fn volume(copy: In<Copy3d>, peers: bool, when: When) -> Outcome {
    start(volume_of(copy, peers)?, when)
}

fn volume_of(copy: In<Copy3d>, peers: bool) -> Outcome<Copy> {
    let copy = copy.get()?;
    current()?;
    let shape = Shape { width: copy.width as u64, height: copy.height as u64, depth: copy.depth as u64 };
    let side = |side: crate::ffi::Side3d| {
        let at = (side.x, side.y, side.z);
        let operand = Operand {
            kind: side.kind,
            host: side.host,
            device: side.device,
            at,
            pitch: side.pitch,
            slice_rows: side.height,
        };
        let mut made = operand.surface(shape)?;
        if peers && side.reserved != 0 {
            made.device = by_handle(side.reserved)?.device;
        }
        Ok(made)
    };
    let ungranted = if peers { Ungranted::Kill } else { Ungranted::Refuse };
    Ok(Copy { dst: side(copy.dst)?, src: side(copy.src)?, shape, ungranted })
}

pub fn volume_sync(copy: In<Copy3d>) -> Outcome {
    volume(copy, false, When::Done)
}

pub fn volume_async(copy: In<Copy3d>, stream: Handle) -> Outcome {
    volume(copy, false, When::Queued(stream))
}

pub fn volume_peer(copy: In<Copy3d>) -> Outcome {
    volume(copy, true, When::Done)
}

pub fn volume_peer_async(copy: In<Copy3d>, stream: Handle) -> Outcome {
    volume(copy, true, When::Queued(stream))
}
