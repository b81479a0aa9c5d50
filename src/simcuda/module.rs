//! Modules, libraries, the linker: all of them PTX text of which names and parameters are used.

use crate::capture;
use crate::context::current;
use crate::driver::{Handles, driver};
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, In, Out};
use crate::kernels::Kernel;
use crate::ptx::{self, Global};
use crate::space::Origin;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

/// A loaded module, or a library (`context` is `None`: it belongs to no context).
pub struct Module {
    pub context: Option<u64>,
    entries: BTreeMap<String, Entry>,
    globals: BTreeMap<String, (Global, u64)>,
    /// A library's variables, and where each is in the contexts that asked for it.
    declared: Vec<Global>,
    placed: Mutex<BTreeMap<(u64, String), u64>>,
}

/// The handles of one kernel: the `CUfunction`, and in a library the `CUkernel` too.
struct Entry {
    function: Handle,
    kernel: Option<Handle>,
}

/// What a `CUfunction` or a `CUkernel` stands for. Launches and occupancy take either, other calls only their own.
pub struct Function {
    pub name: CString,
    pub params: Vec<(usize, usize)>,
    pub kernel: Option<&'static Kernel>,
    kind: Kind,
    module: Handle,
    dynamic_shared: Mutex<c_int>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Function,
    /// With the function it becomes in a context.
    Kernel(Handle),
}

/// A `CUfunction`; INVALID_HANDLE for a `CUkernel`.
fn function(handle: Handle) -> Outcome<Arc<Function>> {
    let found = driver().functions.get(handle)?;
    if found.kind == Kind::Function { Ok(found) } else { Err(Code::INVALID_HANDLE) }
}

/// A `CUkernel` and its `CUfunction`; INVALID_HANDLE for a `CUfunction`.
fn kernel(handle: Handle) -> Outcome<(Arc<Function>, Handle)> {
    let found = driver().functions.get(handle)?;
    match found.kind {
        Kind::Kernel(function) => Ok((found, function)),
        Kind::Function => Err(Code::INVALID_HANDLE),
    }
}

fn load(text: &str, context: Option<(u64, usize)>) -> Outcome<Handle> {
    if !ptx::is_ptx(text) {
        return Err(Code::INVALID_PTX);
    }
    let driver = driver();
    let module = Handles::<Module>::reserve();
    let mut entries = BTreeMap::new();
    for entry in ptx::entries(text) {
        let sizes: Vec<usize> = entry.params.iter().map(|(_, size)| *size).collect();
        let name = CString::new(entry.name.as_str()).map_err(|_| Code::INVALID_PTX)?;
        let enter = |kind| {
            driver.functions.insert(Arc::new(Function {
                name: name.clone(),
                kernel: Kernel::named(&entry.name, &sizes),
                params: entry.params.clone(),
                kind,
                module,
                dynamic_shared: Mutex::new(0),
            }))
        };
        let function = enter(Kind::Function);
        let kernel = context.is_none().then(|| enter(Kind::Kernel(function)));
        entries.insert(entry.name.clone(), Entry { function, kernel });
    }
    let mut globals = BTreeMap::new();
    if let Some((id, device)) = context {
        for global in ptx::globals(text) {
            let store = &driver.gpus[device].store;
            let address = driver.space.allocate(store, device, id, Origin::Alloc, global.bytes as u64)?;
            globals.insert(global.name.clone(), (global, address));
        }
    }
    let declared = if context.is_none() { ptx::globals(text) } else { Vec::new() };
    let context = context.map(|(id, _)| id);
    driver
        .modules
        .insert_as(module, Arc::new(Module { context, entries, globals, declared, placed: Mutex::default() }));
    Ok(module)
}

/// The text behind an image pointer. Compiled images (ELF, fat binaries) have no kernel for a GPU that does not exist.
fn image<'a>(image: In<c_void>) -> Outcome<&'a str> {
    const ELF: u32 = u32::from_le_bytes(*b"\x7fELF");
    const FATBIN: u32 = 0xba55_ed50;
    const FATBIN_WRAPPER: u32 = 0x4662_43b1;
    let first = image.cast::<[u8; 4]>().get()?;
    match u32::from_le_bytes(first) {
        ELF | FATBIN | FATBIN_WRAPPER => Err(Code::NO_BINARY_FOR_GPU),
        _ if first[0].is_ascii_graphic() || first[0].is_ascii_whitespace() => {
            image.cast::<c_char>().text().map_err(|_| Code::INVALID_IMAGE)
        }
        _ => Err(Code::INVALID_IMAGE),
    }
}

pub fn load_data(out: Out<Handle>, data: In<c_void>) -> Outcome {
    out.required()?;
    let context = current()?;
    capture::forbid()?;
    out.set(load(image(data)?, Some((context.owner(), context.device)))?)
}

pub fn load_data_ex(
    out: Out<Handle>,
    data: In<c_void>,
    _count: c_uint,
    _options: In<c_int>,
    _values: In<usize>,
) -> Outcome {
    load_data(out, data)
}

fn read(path: In<c_char>) -> Outcome<String> {
    let bytes = std::fs::read(path.text()?).map_err(|_| Code::FILE_NOT_FOUND)?;
    if bytes.starts_with(b"\x7fELF") {
        return Err(Code::NO_BINARY_FOR_GPU);
    }
    String::from_utf8(bytes).map_err(|_| Code::INVALID_IMAGE)
}

pub fn load_file(out: Out<Handle>, path: In<c_char>) -> Outcome {
    out.required()?;
    let context = current()?;
    out.set(load(&read(path)?, Some((context.owner(), context.device)))?)
}

pub fn unload(handle: Handle) -> Outcome {
    current()?;
    unload_library(handle)
}

pub fn get_function(out: Out<Handle>, module: Handle, name: In<c_char>) -> Outcome {
    out.required()?;
    let module = driver().modules.get(module)?;
    out.set(module.entries.get(name.text()?).ok_or(Code::NOT_FOUND)?.function)
}

pub fn function_count(out: Out<c_uint>, module: Handle) -> Outcome {
    out.set(driver().modules.get(module)?.entries.len() as c_uint)
}

/// `cuModuleGetGlobal`. A variable with an initial value is refused: its memory here would read as zero.
pub fn get_global(address: Out<u64>, bytes: Out<usize>, module: Handle, name: In<c_char>) -> Outcome {
    let module = driver().modules.get(module)?;
    let (global, start) = module.globals.get(name.text()?).ok_or(Code::NOT_FOUND)?;
    if global.initialised {
        return Err(Code::NOT_SUPPORTED);
    }
    address.set_if_wanted(*start);
    bytes.set_if_wanted(global.bytes);
    Ok(())
}

/// `cuModuleGetLoadingMode`: eager.
pub fn loading_mode(out: Out<c_int>) -> Outcome {
    out.set(1)
}

// Libraries

#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub fn library_load_data(
    out: Out<Handle>,
    data: In<c_void>,
    _options: In<c_int>,
    _values: In<usize>,
    _count: c_uint,
    _library_options: In<c_int>,
    _library_values: In<usize>,
    _library_count: c_uint,
) -> Outcome {
    out.required()?;
    out.set(load(image(data)?, None)?)
}

#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub fn library_load_file(
    out: Out<Handle>,
    path: In<c_char>,
    _options: In<c_int>,
    _values: In<usize>,
    _count: c_uint,
    _library_options: In<c_int>,
    _library_values: In<usize>,
    _library_count: c_uint,
) -> Outcome {
    out.required()?;
    out.set(load(&read(path)?, None)?)
}

pub fn unload_library(handle: Handle) -> Outcome {
    let driver = driver();
    let module = driver.modules.remove(handle)?;
    for entry in module.entries.values() {
        for handle in std::iter::once(entry.function).chain(entry.kernel) {
            // Each was entered when the module was loaded.
            let _ = driver.functions.remove(handle);
        }
    }
    for address in module.placed.lock().values() {
        // Its context may have taken it already.
        let _ = driver.space.free(*address);
    }
    module.globals.values().try_for_each(|(_, address)| driver.space.free(*address))
}

/// `cuLibraryGetModule`: the module of a library in the current context is the library itself.
pub fn library_module(out: Out<Handle>, library: Handle) -> Outcome {
    out.required()?;
    current()?;
    driver().modules.get(library)?;
    out.set(library)
}

/// `cuLibraryGetKernel`.
pub fn library_kernel(out: Out<Handle>, library: Handle, name: In<c_char>) -> Outcome {
    out.required()?;
    let library = driver().modules.get(library)?;
    let entry = library.entries.get(name.text()?).ok_or(Code::NOT_FOUND)?;
    out.set(entry.kernel.ok_or(Code::INVALID_HANDLE)?)
}

/// `cuLibraryGetGlobal`: each context has its own, made when it is first asked for.
pub fn library_global(address: Out<u64>, bytes: Out<usize>, library: Handle, name: In<c_char>) -> Outcome {
    let context = current()?;
    let (library, name) = (driver().modules.get(library)?, name.text()?);
    let global = library.declared.iter().find(|global| global.name == name).ok_or(Code::NOT_FOUND)?;
    if global.initialised {
        return Err(Code::NOT_SUPPORTED);
    }
    let mut placed = library.placed.lock();
    let key = (context.owner(), name.to_owned());
    let start = match placed.get(&key) {
        Some(start) => *start,
        None => {
            let store = &driver().gpus[context.device].store;
            let size = global.bytes as u64;
            let start = driver().space.allocate(store, context.device, context.owner(), Origin::Alloc, size)?;
            placed.insert(key, start);
            start
        }
    };
    address.set_if_wanted(start);
    bytes.set_if_wanted(global.bytes);
    Ok(())
}

/// `cuLibraryGetManaged`: no PTX here declares managed variables.
pub fn library_managed(_address: Out<u64>, _bytes: Out<usize>, library: Handle, name: In<c_char>) -> Outcome {
    driver().modules.get(library)?;
    name.text()?;
    Err(Code::NOT_FOUND)
}

/// `cuKernelGetFunction`: another handle. Here it is the same in every context.
pub fn kernel_function(out: Out<Handle>, handle: Handle) -> Outcome {
    out.required()?;
    current()?;
    out.set(kernel(handle)?.1)
}

// Functions

pub fn function_module(out: Out<Handle>, handle: Handle) -> Outcome {
    out.set(function(handle)?.module)
}

pub fn function_name(out: Out<*const c_char>, handle: Handle) -> Outcome {
    name(out, function(handle)?)
}

pub fn kernel_name(out: Out<*const c_char>, handle: Handle) -> Outcome {
    name(out, kernel(handle)?.0)
}

fn name(out: Out<*const c_char>, function: Arc<Function>) -> Outcome {
    out.required()?;
    let name: &CStr = &function.name;
    // Valid until the module is unloaded, as documented: the function's own string.
    out.set(name.as_ptr())
}

/// `cuFuncGetParamInfo`: INVALID_VALUE past the last.
pub fn function_param(handle: Handle, index: usize, offset: Out<usize>, bytes: Out<usize>) -> Outcome {
    param(function(handle)?, index, offset, bytes)
}

/// `cuKernelGetParamInfo`.
pub fn kernel_param(handle: Handle, index: usize, offset: Out<usize>, bytes: Out<usize>) -> Outcome {
    param(kernel(handle)?.0, index, offset, bytes)
}

fn param(function: Arc<Function>, index: usize, offset: Out<usize>, bytes: Out<usize>) -> Outcome {
    let (at, size) = *function.params.get(index).ok_or(Code::INVALID_VALUE)?;
    offset.set(at)?;
    bytes.set_if_wanted(size);
    Ok(())
}

pub fn function_attribute(out: Out<c_int>, attribute: c_int, handle: Handle) -> Outcome {
    read_attribute(out, attribute, function(handle)?)
}

fn read_attribute(out: Out<c_int>, attribute: c_int, function: Arc<Function>) -> Outcome {
    out.set(match attribute {
        0 => 1024,
        4 => 32,
        5 | 6 => 90,
        8 => *function.dynamic_shared.lock(),
        9 => -1,
        1..=3 | 7 | 10..=15 => 0,
        _ => return Err(Code::INVALID_VALUE),
    })
}

pub fn set_function_attribute(handle: Handle, attribute: c_int, value: c_int) -> Outcome {
    write_attribute(attribute, value, function(handle)?)
}

fn write_attribute(attribute: c_int, value: c_int, function: Arc<Function>) -> Outcome {
    match attribute {
        8 if (0..=232_448).contains(&value) => {
            *function.dynamic_shared.lock() = value;
            Ok(())
        }
        9..=15 => Ok(()),
        _ => Err(Code::INVALID_VALUE),
    }
}

pub fn kernel_attribute(out: Out<c_int>, attribute: c_int, handle: Handle, device: c_int) -> Outcome {
    driver().gpu(device)?;
    read_attribute(out, attribute, kernel(handle)?.0)
}

pub fn set_kernel_attribute(attribute: c_int, value: c_int, handle: Handle, device: c_int) -> Outcome {
    driver().gpu(device)?;
    write_attribute(attribute, value, kernel(handle)?.0)
}

pub fn set_cache_config(handle: Handle, _config: c_int) -> Outcome {
    function(handle).map(drop)
}

/// `cuFuncIsLoaded`: loading is eager.
pub fn is_loaded(out: Out<c_int>, handle: Handle) -> Outcome {
    function(handle)?;
    out.set(1)
}

pub fn load_function(handle: Handle) -> Outcome {
    function(handle).map(drop)
}

// Occupancy

pub fn occupancy(out: Out<c_int>, function: Handle, block: c_int, shared: usize) -> Outcome {
    out.required()?;
    driver().functions.get(function)?;
    if !(1..=1024).contains(&block) {
        return Err(Code::INVALID_VALUE);
    }
    let by_threads = 2048 / ((block + 31) / 32 * 32);
    let by_memory = 233_472_usize.checked_div(shared).map_or(32, |blocks| blocks as c_int);
    out.set(by_threads.min(by_memory).min(32))
}

pub fn occupancy_with_flags(out: Out<c_int>, function: Handle, block: c_int, shared: usize, _flags: c_uint) -> Outcome {
    occupancy(out, function, block, shared)
}

pub fn potential_block_size(
    grid: Out<c_int>,
    block: Out<c_int>,
    function: Handle,
    _shared_of: usize,
    _shared: usize,
    limit: c_int,
) -> Outcome {
    driver().functions.get(function)?;
    let size = if limit > 0 { limit.min(1024) } else { 1024 };
    grid.set(132 * (2048 / size).min(32))?;
    block.set(size)
}

// The linker

/// `CUlinkState`: the texts added so far; the result of linking is their concatenation.
#[derive(Default)]
pub struct Link {
    text: Mutex<Vec<u8>>,
}

pub fn link_create(_count: c_uint, _options: In<c_int>, _values: In<usize>, out: Out<Handle>) -> Outcome {
    out.required()?;
    current()?;
    out.set(driver().links.insert(Arc::new(Link::default())))
}

#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub fn link_add_data(
    link: Handle,
    _kind: c_int,
    data: In<u8>,
    bytes: usize,
    _name: In<c_char>,
    _count: c_uint,
    _options: In<c_int>,
    _values: In<usize>,
) -> Outcome {
    let link = driver().links.get(link)?;
    let added = data.list(bytes)?;
    let mut text = link.text.lock();
    text.extend(added.iter().take_while(|byte| **byte != 0));
    text.push(b'\n');
    Ok(())
}

pub fn link_add_file(
    link: Handle,
    _kind: c_int,
    path: In<c_char>,
    _count: c_uint,
    _options: In<c_int>,
    _values: In<usize>,
) -> Outcome {
    let link = driver().links.get(link)?;
    let added = read(path)?;
    let mut text = link.text.lock();
    text.extend(added.bytes());
    text.push(b'\n');
    Ok(())
}

/// `cuLinkComplete`: the image lives as long as the link state.
pub fn link_complete(link: Handle, out: Out<usize>, bytes: Out<usize>) -> Outcome {
    out.required()?;
    let link = driver().links.get(link)?;
    let mut text = link.text.lock();
    if text.last() != Some(&0) {
        text.push(0);
    }
    bytes.set_if_wanted(text.len());
    out.set(text.as_ptr() as usize)
}

pub fn link_destroy(link: Handle) -> Outcome {
    driver().links.remove(link).map(drop)
}
