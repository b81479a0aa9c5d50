//! Pointer attributes.

use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{In, Out};
use crate::physical::Place;
use crate::space::{Kind, Origin, Region};
use crate::vmm;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

const HOST: c_uint = 1;
const DEVICE: c_uint = 2;
/// `CU_DEVICE_INVALID`, the ordinal of memory the driver does not know.
const NO_DEVICE: c_int = -2;

/// The value of an attribute, of the type that the interface writes.
enum Value {
    Unsigned(c_uint),
    Signed(c_int),
    Long(u64),
    Flag(bool),
}

impl Value {
    fn put(self, out: Out<c_void>) -> Outcome {
        match self {
            Value::Unsigned(value) => out.put(value),
            Value::Signed(value) => out.put(value),
            Value::Long(value) => out.put(value),
            // Documented as a boolean, measured as four bytes.
            Value::Flag(value) => out.put(c_uint::from(value)),
        }
    }

    /// What `cuPointerGetAttributes` gives for memory the driver does not know.
    fn absent(attribute: c_int) -> Option<Self> {
        Some(match attribute {
            // 14 is a mask of eight bytes (measured).
            1 | 3 | 4 | 7 | 11 | 12 | 14 | 17..=20 => Value::Long(0),
            2 | 16 => Value::Unsigned(0),
            6 | 8 | 10 | 13 | 15 | 21 => Value::Flag(false),
            9 => Value::Signed(NO_DEVICE),
            _ => return None,
        })
    }
}

/// The owner as attributes name it: the GPU that holds exactly this address; 0 for host memory from `cuMemCreate`.
fn ordinal(kind: &Kind) -> c_int {
    let device = match kind {
        Kind::Plain { device, .. } | Kind::Host { device, .. } | Kind::Managed { device, .. } => *device,
        Kind::Vmm { physical, .. } => match physical.place() {
            Place::Gpu(device) => device,
            Place::Host(_) => 0,
        },
    };
    device as c_int
}

fn context(kind: &Kind) -> u64 {
    let id = match kind {
        // A pool is the device's, not a context's.
        Kind::Plain { origin: Origin::Pool(_), .. } => return 0,
        Kind::Plain { context, .. } | Kind::Host { context, .. } | Kind::Managed { context, .. } => *context,
        Kind::Vmm { .. } => return 0,
    };
    driver().contexts.all().iter().find(|context| context.id == id).map_or(0, |context| context.handle as u64)
}

/// Whether the memory is in host memory; managed memory counts as the device's.
fn on_host(kind: &Kind) -> bool {
    match kind {
        Kind::Host { .. } => true,
        Kind::Vmm { physical, .. } => matches!(physical.place(), Place::Host(_)),
        Kind::Plain { .. } | Kind::Managed { .. } => false,
    }
}

/// The mapping around an address, start and bytes.
fn mapping(region: &Region) -> (u64, u64) {
    match region.kind {
        Kind::Host { registered, .. } => crate::pinned::mapping(region, registered),
        Kind::Plain { ref physical, offset, origin: Origin::Pool(_), .. } => (region.start - offset, physical.bytes),
        _ => (region.start, region.bytes),
    }
}

fn value(attribute: c_int, address: u64, region: &Region) -> Outcome<Value> {
    let kind = &region.kind;
    let (start, bytes) = match kind {
        // Of mapped memory these two name the reservation.
        Kind::Vmm { reservation, .. } => *reservation,
        _ => (region.start, region.bytes),
    };
    Ok(match attribute {
        1 => Value::Long(context(kind)),
        2 => Value::Unsigned(if on_host(kind) { HOST } else { DEVICE }),
        3 => Value::Long(address),
        4 => match kind {
            Kind::Host { .. } | Kind::Managed { .. } => Value::Long(address),
            Kind::Vmm { grants, .. } if grants.host => Value::Long(address),
            _ => return Err(Code::INVALID_VALUE),
        },
        6 => Value::Flag(sync_memops(region)),
        7 | 20 => Value::Long(region.id),
        8 => Value::Flag(matches!(kind, Kind::Managed { .. })),
        9 => Value::Signed(ordinal(kind)),
        10 => Value::Flag(matches!(kind, Kind::Plain { origin: Origin::Alloc, .. })),
        11 => Value::Long(start),
        12 => Value::Long(bytes),
        13 => Value::Flag(true),
        14 => Value::Long(match kind {
            Kind::Vmm { handle, .. } => vmm::handle_types(*handle) as u64,
            _ => 0,
        }),
        15 => Value::Flag(match kind {
            Kind::Plain { origin: Origin::Alloc, .. } => driver().settings.rdma,
            Kind::Vmm { handle, .. } => vmm::is_rdma_capable(*handle),
            _ => false,
        }),
        21 => Value::Flag(matches!(kind, Kind::Plain { origin: Origin::Alloc, .. })),
        16 => Value::Unsigned(3),
        17 => Value::Long(match kind {
            Kind::Plain { origin: Origin::Pool(pool), .. } => *pool as u64,
            _ => 0,
        }),
        18 => Value::Long(mapping(region).1),
        19 => Value::Long(mapping(region).0),
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// `cuPointerGetAttribute`: INVALID_VALUE for memory the driver does not know.
pub fn attribute(out: Out<c_void>, attribute: c_int, address: u64) -> Outcome {
    out.required()?;
    let region = driver().space.find(address).ok_or(Code::INVALID_VALUE)?;
    value(attribute, address, &region)?.put(out)
}

/// `cuPointerGetAttributes`: memory the driver does not know, and attributes that do not apply, read as nothing.
pub fn attributes(count: c_uint, list: In<c_int>, out: In<Out<c_void>>, address: u64) -> Outcome {
    if count == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let list = list.list(count as usize)?;
    let out = out.list(count as usize)?;
    let region = driver().space.find(address);
    for (&attribute, &out) in list.iter().zip(&out) {
        let absent = Value::absent(attribute).ok_or(Code::INVALID_VALUE)?;
        let known = region.as_ref().and_then(|region| value(attribute, address, region).ok());
        known.unwrap_or(absent).put(out)?;
    }
    Ok(())
}

/// `cuPointerSetAttribute`: only SYNC_MEMOPS can be set, without a context too, and not for mapped memory.
pub fn set_attribute(new: In<c_uint>, attribute: c_int, address: u64) -> Outcome {
    let waits = new.get()? != 0;
    let region = driver().space.find(address).filter(|_| attribute == 6).ok_or(Code::INVALID_VALUE)?;
    if matches!(region.kind, Kind::Vmm { .. }) {
        return Err(Code::NOT_SUPPORTED);
    }
    SYNC_MEMOPS.lock().insert(region.id, waits);
    ANY_SET.store(true, Ordering::Release);
    Ok(())
}

/// What SYNC_MEMOPS was set to, by the region's id, which no other region ever has.
static SYNC_MEMOPS: Mutex<BTreeMap<u64, bool>> = Mutex::new(BTreeMap::new());
static ANY_SET: AtomicBool = AtomicBool::new(false);

fn sync_memops(region: &Region) -> bool {
    let set = SYNC_MEMOPS.lock().get(&region.id).copied();
    set.unwrap_or(matches!(region.kind, Kind::Managed { .. }))
}

/// Whether a fill at this address that is not asynchronous is over when it returns.
pub fn is_filled_at_once(address: u64) -> bool {
    ANY_SET.load(Ordering::Acquire) && driver().space.find(address).is_some_and(|region| sync_memops(&region))
}
