//! Legacy IPC: plain memory and events of another process of the same user, through that process' memory files.

use crate::context::{current, wait_for_owner};
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::event;
use crate::ffi::{Handle, Out};
use crate::physical::Use;
use crate::shared_event::{self, SharedEvent};
use crate::space::{Kind, Origin, Region};
use parking_lot::Mutex;
use simmachine::files;
use std::ffi::c_uint;

const MAGIC: u64 = 0x6970_635f_6375_6461;
const EVENT_MAGIC: u64 = 0x6370_695f_746e_7665;
const LAZY_PEER_ACCESS: c_uint = 1;

/// What this process has open, each handle once in each context.
static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

struct Opened {
    handle: MemHandle,
    address: u64,
    owner: u64,
    device: usize,
    count: u32,
}

/// `CUipcMemHandle`: 64 bytes that name process, descriptor, stretch and device, and the allocation in that.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemHandle([u64; 8]);

pub fn get(out: Out<MemHandle>, address: u64) -> Outcome {
    out.required()?;
    current()?;
    let region = driver().space.find(address).ok_or(Code::INVALID_VALUE)?;
    let Kind::Plain { physical, device, origin: Origin::Alloc, offset, .. } = &region.kind else {
        return Err(Code::INVALID_VALUE);
    };
    // A scattered allocation cannot be named in 64 bytes; memory has to be nearly full for that to happen.
    let [piece] = physical.pieces[..] else { return Err(Code::NOT_SUPPORTED) };
    let (descriptor, index) = (physical.file() as u64, driver().gpus[*device].index as u64);
    physical.note_shared()?;
    // The handle is that of the whole allocation, whichever address in it was named. Small ones in one frame have one each.
    let process = u64::from(std::process::id());
    out.set(MemHandle([MAGIC, process, descriptor, piece.offset, piece.bytes, index, *offset, region.bytes]))
}

pub fn open(out: Out<u64>, handle: MemHandle, flags: c_uint) -> Outcome {
    out.required()?;
    let context = current()?;
    let MemHandle([magic, process, descriptor, offset, bytes, index, inside, length]) = handle;
    // The one flag there is has to be given.
    if magic != MAGIC || flags != LAZY_PEER_ACCESS {
        return Err(Code::INVALID_VALUE);
    }
    if process == u64::from(std::process::id()) {
        return Err(Code::INVALID_CONTEXT);
    }
    let driver = driver();
    if let Some(known) = reopen(&handle, context.owner(), context.device)? {
        return out.set(known);
    }
    let device = driver.gpus.iter().position(|gpu| gpu.index as u64 == index).ok_or(Code::INVALID_DEVICE)?;
    let gpu = &driver.gpus[device];
    let path = format!("/proc/{process}/fd/{descriptor}");
    let file = files::open(path).map_err(|_| Code::INVALID_VALUE)?;
    let physical = gpu.store.import(file, offset, bytes, Use::Plain)?;
    if inside.checked_add(length).is_none_or(|end| end > physical.bytes) {
        return Err(Code::INVALID_VALUE);
    }
    // It counts as the opener's GPU's, wherever it lies (measured).
    let address = driver.space.attach(physical, context.device, context.owner(), (inside, length))?;
    OPENED.lock().push(Opened { handle, address, owner: context.owner(), device: context.device, count: 1 });
    out.set(address)
}

/// Where a handle that is open in this context already is open, counted once more. Another context of the same GPU is refused meanwhile, and
/// one of another GPU has it at an address of its own (measured).
fn reopen(handle: &MemHandle, owner: u64, device: usize) -> Outcome<Option<u64>> {
    let mut opened = OPENED.lock();
    // Contexts take what was opened in them with them.
    opened.retain(|open| is_opened(open.address));
    let mut here = opened.iter_mut().filter(|open| open.handle.0 == handle.0 && open.device == device);
    let Some(open) = here.next() else { return Ok(None) };
    if open.owner != owner {
        return Err(Code::INVALID_HANDLE);
    }
    open.count += 1;
    Ok(Some(open.address))
}

fn is_opened(address: u64) -> bool {
    let region = driver().space.find(address);
    region
        .is_some_and(|region| region.start == address && matches!(region.kind, Kind::Plain { origin: Origin::Ipc, .. }))
}

/// `cuIpcCloseMemHandle`: the last one waits for the context that the handle was opened in and for the current one, which a
/// capture there neither hinders nor hears of.
pub fn close(address: u64) -> Outcome {
    let current = current()?;
    let driver = driver();
    let owner = match driver.space.find(address) {
        Some(Region { start, kind: Kind::Plain { context, origin: Origin::Ipc, .. }, .. }) if start == address => {
            context
        }
        _ => return Err(Code::INVALID_VALUE),
    };
    let mut opened = OPENED.lock();
    if let Some(index) = opened.iter().position(|open| open.address == address) {
        opened[index].count -= 1;
        if opened[index].count > 0 {
            return Ok(());
        }
        opened.swap_remove(index);
    }
    drop(opened);
    wait_for_owner(owner);
    wait_for_owner(current.owner());
    driver.space.free(address)
}

/// `cuIpcGetEventHandle`, of an event that was created for it.
pub fn get_event(out: Out<MemHandle>, event: Handle) -> Outcome {
    out.required()?;
    current()?;
    let descriptor = event::shared(event)?.descriptor() as u64;
    out.set(MemHandle([EVENT_MAGIC, u64::from(std::process::id()), descriptor, 0, 0, 0, 0, 0]))
}

pub fn open_event(out: Out<Handle>, handle: MemHandle) -> Outcome {
    out.required()?;
    current()?;
    let MemHandle([magic, process, descriptor, ..]) = handle;
    if magic != EVENT_MAGIC {
        return Err(Code::INVALID_VALUE);
    }
    if process == u64::from(std::process::id()) {
        return Err(Code::INVALID_CONTEXT);
    }
    let path = format!("/proc/{process}/fd/{descriptor}");
    // The number may mean another file by now.
    let is_event = std::fs::read_link(&path).is_ok_and(|link| link.to_string_lossy().contains(shared_event::NAME));
    if !is_event {
        return Err(Code::INVALID_VALUE);
    }
    let file = files::open(path).map_err(|_| Code::INVALID_VALUE)?;
    out.set(event::import(SharedEvent::over(file)?)?)
}
