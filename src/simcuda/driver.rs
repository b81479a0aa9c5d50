//! The one driver of the process: its machine, its address space, its handles; `cuInit` and the end of the process.

use crate::boundary::{self, Phase};
use crate::context::Context;
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, Out};
use crate::physical::{Place, Store};
use crate::settings::Settings;
use crate::space::Space;
use crate::{fault, report};
use parking_lot::{Mutex, RwLock};
use simmachine::{Machine, Use, gpu_place};
use std::collections::HashMap;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// One visible GPU.
pub struct Gpu {
    /// Its number in the machine, which names it in UUID and bus id whatever `CUDA_VISIBLE_DEVICES` did to ordinals.
    pub index: usize,
    pub store: Store,
    pub primary: Mutex<crate::primary::Primary>,
    pub pools: Mutex<crate::mempool::DevicePools>,
}

pub struct Driver {
    pub settings: Settings,
    /// The accounts of the machine, which other processes may share.
    pub machine: Machine,
    pub gpus: Vec<Gpu>,
    pub hosts: Vec<Store>,
    pub space: Space,
    pub contexts: Handles<Context>,
    pub streams: Handles<crate::stream::Stream>,
    pub events: Handles<crate::event::Event>,
    pub modules: Handles<crate::module::Module>,
    pub functions: Handles<crate::module::Function>,
    pub graphs: Handles<crate::graph::Graph>,
    pub executables: Handles<crate::graph::Executable>,
    pub nodes: Handles<crate::graph::Entry>,
    pub pools: Handles<crate::mempool::Pool>,
    pub links: Handles<crate::module::Link>,
    pub arrays: Handles<crate::array::Array>,
    pub resources: Handles<crate::green::Resources>,
    pub greens: Handles<crate::green::Green>,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();
static INIT: Mutex<()> = Mutex::new(());

/// The driver, where it is there already.
pub fn started() -> Option<&'static Driver> {
    DRIVER.get()
}

/// The driver, from a body that runs after `cuInit`.
pub fn driver() -> &'static Driver {
    match DRIVER.get() {
        Some(driver) => driver,
        // The boundary lets no such call through before `cuInit`.
        None => unreachable!("driver state before cuInit"),
    }
}

/// The driver, if `cuInit` has run (test probes and `cuGetProcAddress` may come earlier).
pub fn if_initialised() -> Option<&'static Driver> {
    DRIVER.get()
}

/// The CUDA version this driver claims; before `cuInit` it is read from the environment each time.
pub fn version() -> c_int {
    if let Some(driver) = DRIVER.get() {
        return driver.settings.driver;
    }
    static EARLY: OnceLock<c_int> = OnceLock::new();
    *EARLY.get_or_init(|| std::env::var("SIMCUDA_DRIVER").ok().and_then(|text| text.parse().ok()).unwrap_or(13_000))
}

impl Driver {
    fn new(settings: Settings) -> Result<Self, String> {
        let machine = Machine::join(&settings)?;
        let gpus = settings
            .visible
            .iter()
            .enumerate()
            .map(|(ordinal, &index)| {
                let store = Store::new(&machine, Place::Gpu(ordinal), index, settings.gpus[index])?;
                Ok(Gpu { index, store, primary: Mutex::default(), pools: Mutex::default() })
            })
            .collect::<Result<_, String>>()?;
        for &(index, bytes) in settings.init_bytes.iter().filter(|(index, _)| settings.visible.contains(index)) {
            // Where there is no room, what a real driver does was not seen; here it goes on without.
            let _ = machine.charge(gpu_place(index), Use::Init, bytes);
        }
        let hosts = (0..settings.host_nodes)
            .map(|node| Store::new(&machine, Place::Host(node), node as usize, settings.node_bytes()))
            .collect::<Result<_, String>>()?;
        Ok(Self {
            settings,
            machine,
            gpus,
            hosts,
            space: Space::new()?,
            contexts: Handles::new(),
            streams: Handles::new(),
            events: Handles::new(),
            modules: Handles::new(),
            functions: Handles::new(),
            graphs: Handles::new(),
            executables: Handles::new(),
            nodes: Handles::new(),
            pools: Handles::new(),
            links: Handles::new(),
            arrays: Handles::new(),
            resources: Handles::new(),
            greens: Handles::new(),
        })
    }

    /// The GPU with this ordinal (a `CUdevice`).
    pub fn gpu(&self, device: c_int) -> Outcome<&Gpu> {
        usize::try_from(device).ok().and_then(|device| self.gpus.get(device)).ok_or(Code::INVALID_DEVICE)
    }
}

/// `cuInit`. A second call changes nothing; a bad setting is said on stderr and answered INVALID_VALUE.
pub fn init(flags: c_uint) -> Outcome {
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    if boundary::phase() == Phase::Forked {
        return Err(Code::NOT_INITIALIZED);
    }
    let _once = INIT.lock();
    if boundary::phase() == Phase::Ready {
        return Ok(());
    }
    let refuse = |message: String| {
        simmachine::say(&format!("simcuda: {message}"));
        Code::INVALID_VALUE
    };
    let settings = Settings::read(|name| std::env::var(name).ok()).map_err(refuse)?;
    fault::arm(&settings.faults).map_err(|message| refuse(format!("SIMCUDA_FAULT={message}")))?;
    // The list is armed only now, so this call counts itself as the first.
    if let Some(code) = fault::strike("cuInit") {
        return Err(code);
    }
    if settings.visible.is_empty() {
        return Err(Code::NO_DEVICE);
    }
    if DRIVER.get().is_none() {
        let driver = Driver::new(settings).map_err(|message| {
            simmachine::say(&format!("simcuda: {message}"));
            Code::OPERATING_SYSTEM
        })?;
        // `INIT` is held, so nobody else has set it since the check.
        let _ = DRIVER.set(driver);
        // SAFETY: both handlers are plain functions of this library, which is never unloaded (`DF_1_NODELETE` is not
        // needed: a process that initialised the driver keeps it, as with the real one).
        unsafe {
            libc::atexit(at_exit);
            libc::pthread_atfork(None, None, Some(in_child));
        }
    }
    boundary::set_phase(Phase::Ready);
    Ok(())
}

extern "C" fn at_exit() {
    if boundary::phase() == Phase::Ready {
        report::write();
        boundary::set_phase(Phase::Gone);
    }
}

/// A child of a process that had initialised the driver cannot use it: the workers are gone, the memory is the parent's.
extern "C" fn in_child() {
    boundary::set_phase(Phase::Forked);
}

/// `cuDriverGetVersion`.
pub fn get_version(out: Out<c_int>) -> Outcome {
    out.set(version())
}

/// `cuGetExportTable`: NVIDIA's private tables are not imitated. There is one of the simulation's own, for programs that take one and
/// call nothing there: its identifier is 1, and like NVIDIA's it begins with its size.
pub fn export_table(table: Out<usize>, id: crate::ffi::In<[u8; 16]>) -> Outcome {
    static OWN: usize = size_of::<usize>();
    table.required()?;
    if id.get()? != u128::to_le_bytes(1) {
        return Err(Code::NOT_SUPPORTED);
    }
    table.set((&raw const OWN).addr())
}

/// `cuProfilerStart` and `cuProfilerStop`.
pub fn profiler() -> Outcome {
    crate::context::current().map(drop)
}

/// Objects by the opaque number the program holds. A number is never given twice, so a stale handle is recognised.
pub struct Handles<T> {
    map: RwLock<HashMap<Handle, Arc<T>>>,
}

static NEXT_HANDLE: AtomicUsize = AtomicUsize::new(0x5100_0000);

impl<T> Handles<T> {
    fn new() -> Self {
        Self { map: RwLock::new(HashMap::new()) }
    }

    /// A new number, aligned as a pointer would be: programs keep flags in the low bits.
    pub fn reserve() -> Handle {
        NEXT_HANDLE.fetch_add(64, Ordering::Relaxed)
    }

    pub fn insert(&self, object: Arc<T>) -> Handle {
        let handle = Self::reserve();
        self.insert_as(handle, object);
        handle
    }

    pub fn insert_as(&self, handle: Handle, object: Arc<T>) {
        self.map.write().insert(handle, object);
    }

    /// The object, or INVALID_HANDLE.
    pub fn get(&self, handle: Handle) -> Outcome<Arc<T>> {
        self.map.read().get(&handle).cloned().ok_or(Code::INVALID_HANDLE)
    }

    pub fn remove(&self, handle: Handle) -> Outcome<Arc<T>> {
        self.map.write().remove(&handle).ok_or(Code::INVALID_HANDLE)
    }

    /// Drops those for which `keep` is false (a context takes its streams and modules with it).
    pub fn retain(&self, keep: impl Fn(&T) -> bool) {
        self.map.write().retain(|_, object| keep(object));
    }

    /// The handle of one that `is` it.
    pub fn find(&self, is: impl Fn(&T) -> bool) -> Option<Handle> {
        self.map.read().iter().find(|(_, object)| is(object)).map(|(handle, _)| *handle)
    }

    pub fn all(&self) -> Vec<Arc<T>> {
        self.map.read().values().cloned().collect()
    }
}
