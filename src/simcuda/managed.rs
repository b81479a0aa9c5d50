//! Managed memory: its allocation, advice, prefetch, and what a range answers about itself.

use crate::capture;
use crate::context::current;
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, In, Location, Out};
use crate::graph::Node;
use crate::pinned;
use crate::residence::{self, PAGE, PROCESSOR, Page, place_of};
use crate::space::{Kind, Region};
use crate::stream::{Stream, Work, resolve};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

const ATTACH_GLOBAL: c_uint = 1;
const ATTACH_HOST: c_uint = 2;
/// `CU_DEVICE_CPU` and `CU_DEVICE_INVALID`.
const CPU: c_int = -1;
const NO_DEVICE: c_int = -2;

/// `cuMemAllocManaged`. It counts against no GPU until a device uses it or it is prefetched, so that more than all GPUs
/// hold can be allocated.
pub fn alloc(out: Out<u64>, bytes: usize, flags: c_uint) -> Outcome {
    out.required()?;
    let context = current()?;
    if bytes == 0 || ![ATTACH_GLOBAL, ATTACH_HOST].contains(&flags) {
        return Err(Code::INVALID_VALUE);
    }
    capture::forbid()?;
    let bytes = bytes as u64;
    let address = pinned::map(bytes.checked_next_multiple_of(PAGE).ok_or(Code::OUT_OF_MEMORY)?, false)?;
    residence::enter(address, bytes);
    driver().space.insert_host(address, bytes, Kind::Managed { context: context.owner(), device: context.device })?;
    crate::checkpoint::tell();
    out.set(address)
}

/// Gives back what a region that was removed from the address space took.
pub fn drop_region(region: &Region) {
    residence::leave(region.start, region.bytes);
    pinned::unmap(region.start, region.bytes.next_multiple_of(PAGE));
    crate::checkpoint::tell();
}

/// A range of whole or part pages of one managed allocation, or INVALID_VALUE.
fn range(address: u64, bytes: usize) -> Outcome<(u64, u64)> {
    current()?;
    let end = address.checked_add(bytes as u64).ok_or(Code::INVALID_VALUE)?;
    let inside = driver().space.find(address).is_some_and(|region| {
        matches!(region.kind, Kind::Managed { .. }) && end <= region.end().next_multiple_of(PAGE)
    });
    if inside && bytes > 0 { Ok((address, bytes as u64)) } else { Err(Code::INVALID_VALUE) }
}

/// A place for managed memory, the node of the calling thread made explicit. A GPU that cannot fault refuses.
fn location(given: Location) -> Outcome<Location> {
    let driver = driver();
    match given.kind {
        Location::DEVICE => {
            driver.gpu(given.id).map_err(|_| Code::INVALID_VALUE)?;
            if driver.settings.concurrent_managed { Ok(given) } else { Err(Code::INVALID_DEVICE) }
        }
        Location::HOST => Ok(Location { kind: Location::HOST, id: 0 }),
        Location::HOST_NUMA if (0..driver.hosts.len() as c_int).contains(&given.id) => Ok(given),
        Location::HOST_NUMA_CURRENT => Ok(Location { kind: Location::HOST_NUMA, id: 0 }),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// The place that an interface before locations means: an ordinal, or −1 for the processor.
fn by_device(device: c_int) -> Location {
    if device == CPU {
        Location { kind: Location::HOST, id: 0 }
    } else {
        Location { kind: Location::DEVICE, id: device }
    }
}

/// `cuMemAdvise` of 8.0.
pub fn advise(address: u64, bytes: usize, advice: c_int, device: c_int) -> Outcome {
    advise_v2(address, bytes, advice, by_device(device))
}

/// `cuMemAdvise_v2`. The location counts only where the advice has one.
pub fn advise_v2(address: u64, bytes: usize, advice: c_int, at: Location) -> Outcome {
    let (start, bytes) = range(address, bytes)?;
    capture::forbid()?;
    let accessor = || match location(at)? {
        Location { kind: Location::DEVICE, id } => Ok(1_u64 << id),
        Location { kind: Location::HOST, .. } => Ok(PROCESSOR),
        _ => Err(Code::INVALID_VALUE),
    };
    let change: Box<dyn Fn(&mut Page)> = match advice {
        1 | 2 => Box::new(move |page| page.read_mostly = advice == 1),
        3 => {
            let preferred = location(at)?;
            Box::new(move |page| page.preferred = Some(preferred))
        }
        4 => Box::new(|page| page.preferred = None),
        5 => {
            let bit = accessor()?;
            Box::new(move |page| page.accessed_by |= bit)
        }
        6 => {
            let bit = accessor()?;
            Box::new(move |page| page.accessed_by &= !bit)
        }
        _ => return Err(Code::INVALID_VALUE),
    };
    residence::advise(start, bytes, change);
    Ok(())
}

/// `cuMemPrefetchAsync` of 8.0.
pub fn prefetch(address: u64, bytes: usize, device: c_int, stream: Handle) -> Outcome {
    prefetch_v2(address, bytes, by_device(device), 0, stream)
}

/// `cuMemPrefetchAsync_v2`.
pub fn prefetch_v2(address: u64, bytes: usize, to: Location, flags: c_uint, stream: Handle) -> Outcome {
    let range = range(address, bytes)?;
    let to = location(to)?;
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let stream = uncaptured(stream)?;
    queue(&stream, range, to)
}

/// Graphs have no node for prefetches, so one breaks the capture of its stream.
fn uncaptured(stream: Handle) -> Outcome<Arc<Stream>> {
    let stream = resolve(stream)?;
    match stream.capturing()? {
        None => Ok(stream),
        Some(capture) => {
            capture.invalidate();
            Err(Code::STREAM_CAPTURE_UNSUPPORTED)
        }
    }
}

fn queue(stream: &Arc<Stream>, (start, bytes): (u64, u64), to: Location) -> Outcome {
    // Documented as the last place that was asked for, whether the pages are there yet or not.
    residence::advise(start, bytes, |page| page.prefetched = Some(to));
    stream.run_or_submit(Work {
        action: Arc::new(move |_| {
            residence::move_to(start, bytes, place_of(to));
            Ok(())
        }),
        touches: Vec::new(),
        node: Node::Empty,
    })
}

/// `cuMemPrefetchBatchAsync`: the `i`-th location holds from range `first[i]` to before `first[i + 1]`.
#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub fn prefetch_batch(
    addresses: In<u64>,
    sizes: In<usize>,
    count: usize,
    locations: In<Location>,
    first: In<usize>,
    location_count: usize,
    flags: u64,
    stream: Handle,
) -> Outcome {
    let first = first.list(location_count)?;
    let ordered = first.first() == Some(&0) && first.is_sorted_by(|a, b| a < b) && first.iter().all(|&at| at < count);
    if flags != 0 || count == 0 || !ordered {
        return Err(Code::INVALID_VALUE);
    }
    let locations = locations.list(location_count)?.into_iter().map(location).collect::<Outcome<Vec<_>>>()?;
    let ranges = ranges(addresses, sizes, count)?;
    let stream = uncaptured(stream)?;
    for (index, range) in ranges.into_iter().enumerate() {
        queue(&stream, range, locations[first.partition_point(|&at| at <= index) - 1])?;
    }
    Ok(())
}

/// `cuMemDiscardBatchAsync`: the contents may be lost from here on; here they stay, as they may.
pub fn discard_batch(addresses: In<u64>, sizes: In<usize>, count: usize, flags: u64, stream: Handle) -> Outcome {
    if flags != 0 || count == 0 {
        return Err(Code::INVALID_VALUE);
    }
    ranges(addresses, sizes, count)?;
    uncaptured(stream).map(drop)
}

fn ranges(addresses: In<u64>, sizes: In<usize>, count: usize) -> Outcome<Vec<(u64, u64)>> {
    let pairs = addresses.list(count)?.into_iter().zip(sizes.list(count)?);
    pairs.map(|(address, bytes)| range(address, bytes)).collect()
}

/// `cuMemRangeGetAttribute`.
pub fn range_attribute(data: Out<c_void>, size: usize, attribute: c_int, address: u64, bytes: usize) -> Outcome {
    data.required()?;
    let (start, bytes) = range(address, bytes)?;
    let pages = residence::pages(start, bytes);
    if attribute == 3 {
        return accessors(data.cast(), size, &pages);
    }
    if size != size_of::<c_int>() {
        return Err(Code::INVALID_VALUE);
    }
    let preferred = || common(&pages, |page| page.preferred);
    let prefetched = || common(&pages, |page| page.prefetched);
    data.put(match attribute {
        1 => c_int::from(pages.iter().all(|page| page.read_mostly)),
        2 => device_of(preferred()),
        4 => device_of(prefetched()),
        5 => kind_of(preferred().map(nodeless)),
        6 => id_of(preferred().map(nodeless)),
        7 => kind_of(prefetched()),
        8 => id_of(prefetched()),
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// `cuMemRangeGetAttributes`.
pub fn range_attributes(
    data: In<Out<c_void>>,
    sizes: In<usize>,
    attributes: In<c_int>,
    count: usize,
    address: u64,
    bytes: usize,
) -> Outcome {
    if count == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let (data, sizes) = (data.list(count)?, sizes.list(count)?);
    for ((data, size), attribute) in data.into_iter().zip(sizes).zip(attributes.list(count)?) {
        range_attribute(data, size, attribute, address, bytes)?;
    }
    Ok(())
}

/// The processors announced for every page; the rest of the list reads as no device.
fn accessors(list: Out<c_int>, size: usize, pages: &[Page]) -> Outcome {
    if size == 0 || !size.is_multiple_of(size_of::<c_int>()) {
        return Err(Code::INVALID_VALUE);
    }
    let all = pages.iter().fold(u64::MAX, |all, page| all & page.accessed_by);
    let gpus = (0..32).filter(|ordinal| all & 1 << ordinal != 0);
    let processor = (all & PROCESSOR != 0).then_some(CPU);
    let named = gpus.chain(processor).chain(std::iter::repeat(NO_DEVICE));
    for (index, device) in named.take(size / size_of::<c_int>()).enumerate() {
        list.set_at(index, device);
    }
    Ok(())
}

/// The location that every page has.
fn common(pages: &[Page], of: impl Fn(&Page) -> Option<Location>) -> Option<Location> {
    let first = of(pages.first()?)?;
    pages.iter().all(|page| of(page) == Some(first)).then_some(first)
}

/// A preferred location on a node reads back as the host without one; that of a prefetch keeps its node.
fn nodeless(location: Location) -> Location {
    if location.kind == Location::HOST_NUMA { by_device(CPU) } else { location }
}

/// The attributes of 8.0 know GPUs and the processor, but no nodes.
fn device_of(location: Option<Location>) -> c_int {
    match location {
        Some(Location { kind: Location::DEVICE, id }) => id,
        Some(_) => CPU,
        None => NO_DEVICE,
    }
}

fn kind_of(location: Option<Location>) -> c_int {
    location.map_or(0, |location| location.kind)
}

fn id_of(location: Option<Location>) -> c_int {
    match location {
        Some(Location { kind: Location::HOST, .. }) => CPU,
        Some(location) => location.id,
        None => NO_DEVICE,
    }
}
