//! `cuMemset*`: a value of 1, 2 or 4 bytes over a line or a rectangle.

use crate::capture;
use crate::clock;
use crate::coherence;
use crate::context::{Context, current};
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::Handle;
use crate::graph::{MemsetNode, Node};
use crate::pointer::is_filled_at_once;
use crate::space::{Kind, Span, access, granted};
use crate::stream::{Action, Work, resolve};
use std::sync::Arc;

const PAGE: usize = 4096;
/// From here on a zero fill returns pages instead of writing them.
const SPARSE: usize = 64 << 10;

/// `height` rows of `width` bytes, `pitch` apart.
#[derive(Clone, Copy)]
struct Fill {
    address: u64,
    pitch: u64,
    width: u64,
    height: u64,
    pattern: [u8; 4],
    /// Bytes of an element.
    element: u32,
}

impl Fill {
    /// A rectangle of elements; INVALID_VALUE for rows that overlap or addresses that are not aligned to the element.
    fn new<const N: usize>(address: u64, pitch: usize, value: [u8; N], width: usize, height: usize) -> Outcome<Self> {
        let bytes = width.checked_mul(N).ok_or(Code::INVALID_VALUE)?;
        let aligned = address.is_multiple_of(N as u64) && (height <= 1 || pitch.is_multiple_of(N) && pitch >= bytes);
        if !aligned {
            return Err(Code::INVALID_VALUE);
        }
        let pattern = std::array::from_fn(|index| value[index % N]);
        Ok(Self {
            address,
            pitch: pitch as u64,
            width: bytes as u64,
            height: height as u64,
            pattern,
            element: N as u32,
        })
    }

    /// As a node of a graph tells it.
    fn described(&self) -> MemsetNode {
        MemsetNode {
            address: self.address,
            pitch: self.pitch as usize,
            value: u32::from_ne_bytes(self.pattern) & (u32::MAX >> (32 - 8 * self.element)),
            element: self.element,
            width: (self.width / u64::from(self.element)) as usize,
            height: self.height as usize,
        }
    }

    fn end(&self) -> Outcome<u64> {
        let rows = (self.height - 1).checked_mul(self.pitch).and_then(|rows| rows.checked_add(self.width));
        rows.and_then(|bytes| self.address.checked_add(bytes)).ok_or(Code::INVALID_VALUE)
    }

    fn each_row(&self, mut body: impl FnMut(Vec<Span>) -> Outcome) -> Outcome {
        let (width, height) =
            if self.pitch == self.width { (self.width * self.height, 1) } else { (self.width, self.height) };
        (0..height).try_for_each(|row| body(driver().space.spans(self.address + row * self.pitch, width, false)?))
    }

    /// Checks that `device` may write all of it.
    fn work(self, device: usize) -> Outcome<Work> {
        let end = self.end()?;
        self.each_row(|spans| {
            let allowed = spans.iter().all(|span| granted(span, device, true));
            if allowed { Ok(()) } else { Err(Code::INVALID_VALUE) }
        })?;
        let action: Action = Arc::new(move |_: &Context| self.run(device));
        Ok(Work { action, touches: vec![(self.address, end)], node: Node::Memset(self.described()) })
    }

    fn run(&self, device: usize) -> Outcome {
        self.each_row(|spans| {
            access(&spans, device)?;
            clock::kernel(device, &spans, true);
            let _written = coherence::open(&spans, true);
            for span in &spans {
                write(span, self.pattern);
            }
            Ok(())
        })
        .map_err(|code| if code == Code::ECC_UNCORRECTABLE { code } else { Code::ILLEGAL_ADDRESS })
    }
}

fn write(span: &Span, pattern: [u8; 4]) {
    let (mut at, mut left) = (span.alias, span.bytes);
    if pattern == [0; 4] && left >= SPARSE && is_file(span) {
        let head = at.next_multiple_of(PAGE) - at;
        let pages = (left - head) / PAGE * PAGE;
        store(at, head, pattern);
        // SAFETY: whole pages of a span whose memory is held; it is a mapping of a memory file, where this frees the
        // pages and later reads give zero. A machine can so clear more memory than it has, as it can allocate it.
        let freed = unsafe { libc::madvise((at + head) as *mut _, pages, libc::MADV_REMOVE) } == 0;
        if !freed {
            store(at + head, pages, pattern);
        }
        at += head + pages;
        left -= head + pages;
    }
    store(at, left, pattern);
}

fn is_file(span: &Span) -> bool {
    matches!(span.region.as_ref().map(|region| &region.kind), Some(Kind::Plain { .. } | Kind::Vmm { .. }))
}

/// Stretches start where an element does, because addresses and borders between them are at least 4-byte aligned.
fn store(at: usize, bytes: usize, pattern: [u8; 4]) {
    // SAFETY: the span's memory is held by the caller, and nothing in this process keeps a Rust reference to it.
    let memory = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, bytes) };
    if pattern.iter().all(|byte| *byte == pattern[0]) {
        memory.fill(pattern[0]);
        return;
    }
    let mut blocks = memory.chunks_exact_mut(4);
    for block in &mut blocks {
        block.copy_from_slice(&pattern);
    }
    let rest = blocks.into_remainder();
    let length = rest.len();
    rest.copy_from_slice(&pattern[..length]);
}

/// The work of a fill node of a graph, which `device` does.
pub fn work(
    device: usize,
    address: u64,
    pitch: usize,
    value: u32,
    element: u32,
    width: usize,
    height: usize,
) -> Outcome<Work> {
    let fill = match element {
        1 => Fill::new(address, pitch, [value as u8], width, height)?,
        2 => Fill::new(address, pitch, (value as u16).to_ne_bytes(), width, height)?,
        4 => Fill::new(address, pitch, value.to_ne_bytes(), width, height)?,
        _ => return Err(Code::INVALID_VALUE),
    };
    if fill.width == 0 || fill.height == 0 { Err(Code::INVALID_VALUE) } else { fill.work(device) }
}

fn start(fill: Fill, stream: Option<Handle>) -> Outcome {
    let context = current()?;
    if fill.width == 0 || fill.height == 0 {
        return stream.map_or(Ok(()), |stream| resolve(stream).map(drop));
    }
    let work = fill.work(context.device)?;
    match stream {
        Some(handle) => resolve(handle)?.submit(work),
        None => {
            // The call may return before the fill is done, but not before what precedes it is known to be legal.
            capture::forbid()?;
            let stream = resolve(0)?;
            stream.run_or_submit(work)?;
            if is_filled_at_once(fill.address) {
                clock::host_saw(stream.settle(&context));
            }
            Ok(())
        }
    }
}

pub fn d8(address: u64, value: u8, count: usize) -> Outcome {
    start(Fill::new(address, 0, [value], count, 1)?, None)
}

pub fn d8_async(address: u64, value: u8, count: usize, stream: Handle) -> Outcome {
    start(Fill::new(address, 0, [value], count, 1)?, Some(stream))
}

pub fn d16(address: u64, value: u16, count: usize) -> Outcome {
    start(Fill::new(address, 0, value.to_ne_bytes(), count, 1)?, None)
}

pub fn d16_async(address: u64, value: u16, count: usize, stream: Handle) -> Outcome {
    start(Fill::new(address, 0, value.to_ne_bytes(), count, 1)?, Some(stream))
}

pub fn d32(address: u64, value: u32, count: usize) -> Outcome {
    start(Fill::new(address, 0, value.to_ne_bytes(), count, 1)?, None)
}

pub fn d32_async(address: u64, value: u32, count: usize, stream: Handle) -> Outcome {
    start(Fill::new(address, 0, value.to_ne_bytes(), count, 1)?, Some(stream))
}

pub fn d2d8(address: u64, pitch: usize, value: u8, width: usize, height: usize) -> Outcome {
    start(Fill::new(address, pitch, [value], width, height)?, None)
}

pub fn d2d8_async(address: u64, pitch: usize, value: u8, width: usize, height: usize, stream: Handle) -> Outcome {
    start(Fill::new(address, pitch, [value], width, height)?, Some(stream))
}

pub fn d2d16(address: u64, pitch: usize, value: u16, width: usize, height: usize) -> Outcome {
    start(Fill::new(address, pitch, value.to_ne_bytes(), width, height)?, None)
}

pub fn d2d16_async(address: u64, pitch: usize, value: u16, width: usize, height: usize, stream: Handle) -> Outcome {
    start(Fill::new(address, pitch, value.to_ne_bytes(), width, height)?, Some(stream))
}

pub fn d2d32(address: u64, pitch: usize, value: u32, width: usize, height: usize) -> Outcome {
    start(Fill::new(address, pitch, value.to_ne_bytes(), width, height)?, None)
}

pub fn d2d32_async(address: u64, pitch: usize, value: u32, width: usize, height: usize, stream: Handle) -> Outcome {
    start(Fill::new(address, pitch, value.to_ne_bytes(), width, height)?, Some(stream))
}
