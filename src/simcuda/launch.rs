//! Kernel launches.

use crate::context::Context;
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, In};
use crate::graph::Node;
use crate::kernels::Args;
use crate::module::Function;
use crate::stream::{Work, resolve};
use std::ffi::c_uint;
use std::sync::Arc;

/// Markers of the `extra` list.
const BUFFER_POINTER: usize = 1;
const BUFFER_SIZE: usize = 2;

/// `CUlaunchConfig`. The attributes (clusters, priorities) do not matter here.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: Handle,
    attributes: usize,
    count: c_uint,
}

const _: () = assert!(size_of::<Config>() == size_of::<cudarc::driver::sys::CUlaunchConfig>());

/// What a kernel's node of a graph was given, with copies of the arguments that live as long as it does.
pub struct Parameters {
    pub function: Handle,
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared: c_uint,
    /// A pointer to each argument.
    pointers: Vec<usize>,
    /// Where they lead.
    _arguments: Vec<Box<[u8]>>,
}

impl Parameters {
    /// Where the pointers to the arguments are (`kernelParams`).
    pub fn pointers(&self) -> usize {
        self.pointers.as_ptr().addr()
    }
}

/// The work of a launch: arguments are copied now, as the driver does.
pub fn work(
    handle: Handle,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    params: In<usize>,
    extra: In<usize>,
) -> Outcome<Work> {
    let function = driver().functions.get(handle)?;
    let threads = block.iter().map(|&side| u64::from(side)).product::<u64>();
    if grid.contains(&0) || threads == 0 || threads > 1024 || block[2] > 64 {
        return Err(Code::INVALID_VALUE);
    }
    let args = arguments(&function, params, extra)?;
    let copies = bytes(&function, params, extra)?;
    let pointers = copies.iter().map(|argument| argument.as_ptr().addr()).collect();
    let parameters = Parameters { function: handle, grid, block, shared, pointers, _arguments: copies };
    let Some(kernel) = function.kernel else {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            let name = function.name.to_string_lossy();
            simmachine::say(&format!(
                "simcuda: kernel {name} is not built in (README: kernels); its launch is refused with NOT_SUPPORTED"
            ));
        });
        return Err(Code::NOT_SUPPORTED);
    };
    let touches = kernel.ranges(&args);
    let action = Arc::new(move |context: &Context| kernel.run(&args, context));
    Ok(Work { action, touches, node: Node::Kernel(kernel, Arc::new(parameters)) })
}

/// The bytes of each argument.
fn bytes(function: &Function, params: In<usize>, extra: In<usize>) -> Outcome<Vec<Box<[u8]>>> {
    let of = |address: usize, bytes: usize| (0..bytes).map(|at| In::<u8>::from_address(address).at(at)).collect();
    if !extra.is_null() {
        let base = buffer(function, extra)?;
        return Ok(function.params.iter().map(|&(offset, bytes)| of(base + offset, bytes)).collect());
    }
    let pointers = params.list(function.params.len())?;
    Ok(function.params.iter().zip(pointers).map(|(&(_, bytes), pointer)| of(pointer, bytes)).collect())
}

fn arguments(function: &Function, params: In<usize>, extra: In<usize>) -> Outcome<Args> {
    if !extra.is_null() {
        let base = buffer(function, extra)?;
        return Ok(function.params.iter().flat_map(|&(offset, bytes)| words(base + offset, bytes)).collect());
    }
    if params.is_null() && !function.params.is_empty() {
        return Err(Code::INVALID_VALUE);
    }
    let pointers = params.list(function.params.len())?;
    if pointers.contains(&0) {
        return Err(Code::INVALID_VALUE);
    }
    Ok(function.params.iter().zip(pointers).flat_map(|(&(_, bytes), pointer)| words(pointer, bytes)).collect())
}

/// The packed argument buffer of an `extra` list.
fn buffer(function: &Function, extra: In<usize>) -> Outcome<usize> {
    let (mut base, mut size) = (0, 0);
    let mut index = 0;
    loop {
        match extra.at(index) {
            0 => break,
            BUFFER_POINTER => base = extra.at(index + 1),
            BUFFER_SIZE => size = In::<usize>::from_address(extra.at(index + 1)).get()?,
            _ => return Err(Code::INVALID_VALUE),
        }
        index += 2;
    }
    let needed = function.params.last().map_or(0, |(offset, bytes)| offset + bytes);
    if base == 0 && needed > 0 || size < needed { Err(Code::INVALID_VALUE) } else { Ok(base) }
}

/// An argument: a scalar, or the words of a structure.
fn words(address: usize, bytes: usize) -> impl Iterator<Item = u64> {
    (0..bytes).step_by(8).map(move |start| {
        let mut value = [0; 8];
        for (index, byte) in value.iter_mut().enumerate().take(bytes - start) {
            *byte = In::<u8>::from_address(address).at(start + index);
        }
        u64::from_le_bytes(value)
    })
}

#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub fn kernel(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: Handle,
    params: In<usize>,
    extra: In<usize>,
) -> Outcome {
    let stream = resolve(stream)?;
    stream.submit(work(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared, params, extra)?)
}

#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub fn cooperative(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: Handle,
    params: In<usize>,
) -> Outcome {
    kernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, params, In::from_address(0))
}

pub fn kernel_ex(config: In<Config>, function: Handle, params: In<usize>, extra: In<usize>) -> Outcome {
    let config = config.get()?;
    let stream = resolve(config.stream)?;
    stream.submit(work(function, config.grid, config.block, config.shared, params, extra)?)
}
