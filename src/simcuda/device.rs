//! `cuDevice*`: what the simulated GPUs say about themselves.

use crate::attributes;
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{In, Out};
use simmachine::links::Link;
use std::ffi::{c_char, c_int, c_uint};

pub fn get(out: Out<c_int>, ordinal: c_int) -> Outcome {
    out.required()?;
    driver().gpu(ordinal)?;
    out.set(ordinal)
}

pub fn count(out: Out<c_int>) -> Outcome {
    out.set(driver().gpus.len() as c_int)
}

pub fn name(out: Out<c_char>, capacity: c_int, device: c_int) -> Outcome {
    let gpu = driver().gpu(device)?;
    out.set_text(&simmachine::name(gpu.store.capacity), capacity)
}

pub fn uuid(out: Out<[u8; 16]>, device: c_int) -> Outcome {
    let driver = driver();
    out.set(simmachine::uuid_bytes(driver.settings.machine.as_deref(), driver.gpu(device)?.index))
}

pub fn luid(_out: Out<c_char>, _mask: Out<c_uint>, _device: c_int) -> Outcome {
    // Windows only, in the real driver too.
    Err(Code::NOT_SUPPORTED)
}

pub fn total_memory(out: Out<usize>, device: c_int) -> Outcome {
    out.required()?;
    out.set(driver().gpu(device)?.store.capacity as usize)
}

pub fn attribute(out: Out<c_int>, attribute: c_int, device: c_int) -> Outcome {
    out.required()?;
    let driver = driver();
    let gpu = driver.gpu(device)?;
    out.set(attributes::value(&driver.settings, gpu.index, attribute).ok_or(Code::INVALID_VALUE)?)
}

pub fn bus_id(out: Out<c_char>, capacity: c_int, device: c_int) -> Outcome {
    let gpu = driver().gpu(device)?;
    out.set_text(&bus_id_text(gpu.index), capacity)
}

fn bus_id_text(index: usize) -> String {
    simmachine::bus_id(index, 4)
}

pub fn by_bus_id(out: Out<c_int>, text: In<c_char>) -> Outcome {
    out.required()?;
    let wanted = text.text()?.to_ascii_uppercase();
    let found = driver().gpus.iter().position(|gpu| {
        let full = bus_id_text(gpu.index);
        full == wanted || full[5..] == wanted
    });
    out.set(found.ok_or(Code::INVALID_DEVICE)? as c_int)
}

/// What joins two GPUs, by ordinal.
pub fn link(a: usize, b: usize) -> Link {
    let driver = driver();
    driver.settings.links.between(driver.gpus[a].index, driver.gpus[b].index)
}

/// Whether two GPUs, by ordinal, can reach each other's memory.
pub fn linked(a: usize, b: usize) -> bool {
    link(a, b).is_peer()
}

pub fn can_access_peer(out: Out<c_int>, device: c_int, peer: c_int) -> Outcome {
    let (from, to) = (driver().gpu(device)?.index, driver().gpu(peer)?.index);
    out.set(c_int::from(from != to && driver().settings.links.between(from, to).is_peer()))
}

/// `cuDeviceGetP2PAttribute`: rank (0 is the fastest), access, native atomics, array access.
pub fn peer_attribute(out: Out<c_int>, attribute: c_int, device: c_int, peer: c_int) -> Outcome {
    out.required()?;
    if device == peer {
        return Err(Code::INVALID_DEVICE);
    }
    let (from, to) = (driver().gpu(device)?.index, driver().gpu(peer)?.index);
    let links = &driver().settings.links;
    let link = links.between(from, to);
    out.set(match attribute {
        1 => links.rank(from, to),
        2 | 4 => c_int::from(link.is_peer()),
        3 | 5 => c_int::from(link.is_nvlink()),
        _ => return Err(Code::INVALID_VALUE),
    })
}

pub fn compute_capability(major: Out<c_int>, minor: Out<c_int>, device: c_int) -> Outcome {
    driver().gpu(device)?;
    major.set(attributes::CAPABILITY.0)?;
    minor.set(attributes::CAPABILITY.1)
}

/// `CUdevprop`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Properties([c_int; 14]);

pub fn properties(out: Out<Properties>, device: c_int) -> Outcome {
    out.required()?;
    let driver = driver();
    let index = driver.gpu(device)?.index;
    // In the order of the structure: threads, block x y z, grid x y z, shared, constant, warp, pitch, registers, clock, texture.
    let fields = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14];
    out.set(Properties(fields.map(|field| attributes::value(&driver.settings, index, field).unwrap_or(0))))
}

pub fn affinity_support(out: Out<c_int>, _kind: c_int, device: c_int) -> Outcome {
    driver().gpu(device)?;
    out.set(0)
}
