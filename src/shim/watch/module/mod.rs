//! Modules: what is loaded where, what it costs, and the findings about it.

pub mod alone;
pub mod image;

use crate::watch::{
    context::{self, Record, limits},
    finding, site,
};
use crate::{log, process};
use alone::Around;
use gpupool_config::format_size;
use gpupool_cuda::{CuResult, Device, Driver, Module};
use gpupool_events::{Finding, ModuleLoad, ModuleUnload, Site};
use gpupool_interpose::Api;
use image::Image;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Loads whose place is remembered for findings. A program that loads more (a compiler in a loop) is found by the first.
const REMEMBERED: usize = 256;
/// Memory below which eager loading is nobody's problem.
const WORTH_SAYING: i64 = 32 << 20;

/// The id of no context: they count from 1.
const NO_CONTEXT: u64 = 0;

#[derive(Clone)]
struct Loaded {
    /// 0 where none was current.
    context: u64,
    device: Option<Device>,
    call: &'static str,
    image: Image,
    /// It uses device malloc, and the heap was what the driver starts with.
    default_heap: bool,
    site: Site,
}

static LOADED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());

/// What was loaded so far. A copy, because findings are written, and no lock is held meanwhile.
fn loaded() -> Vec<Loaded> {
    LOADED.lock().clone()
}

/// Contexts whose heap the program set itself, whatever to: it knows of the heap.
static HEAP_CHOSEN: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Whether the heap of this context is what nobody chose. Without a context there is no heap yet; each gets what the settings
/// say, or else the default.
fn has_default_heap(driver: &Driver, context: Option<u64>) -> bool {
    let chosen = process::settings().malloc_heap_size.is_some()
        || context.is_some_and(|context| HEAP_CHOSEN.lock().contains(&context));
    !chosen && (context.is_none() || context::heap_is_default(driver))
}

/// What is known of something that is loaded now.
struct Numbered {
    id: u64,
    /// Bytes that its GPU lost to its eager load, and to nobody else.
    took: u64,
}

/// What is loaded now, by handle.
static NUMBERS: Mutex<BTreeMap<Module, Numbered>> = Mutex::new(BTreeMap::new());
/// Loads are numbered from 1.
static NEXT: AtomicU64 = AtomicU64::new(1);
/// Bytes that all have taken that were loaded eagerly and are still there, and the most that this ever was.
static EAGER: AtomicU64 = AtomicU64::new(0);
static MOST_EAGER: AtomicU64 = AtomicU64::new(0);

/// Whether anything was ever loaded. Takes no lock, so that it can be asked where the process leaves at once.
pub fn was_any() -> bool {
    NEXT.load(Relaxed) > 1
}

/// The current GPU's memory at one moment.
#[derive(Clone, Copy)]
struct Look {
    free: u64,
    /// Bytes of it that the pool holds: other threads may allocate while this one loads.
    pooled: u64,
}

impl Look {
    fn now(driver: &Driver) -> Option<Self> {
        let free = driver.free_memory().ok()?;
        let pooled = driver.current_device().map_or(0, context::held_on);
        Some(Self { free, pooled })
    }

    /// Bytes that the GPU lost since, to others than the pool.
    fn lost_since(self, before: Self) -> u64 {
        before.free.saturating_sub(self.free).saturating_sub(self.pooled.saturating_sub(before.pooled))
    }
}

/// Makes a loading call, and notes what it loaded. `look` gives the handle, where there is one, and says what the image is; it runs
/// after a success.
pub fn load(
    api: Api,
    load: impl FnOnce() -> CuResult,
    path: Option<String>,
    look: impl FnOnce() -> (Option<Module>, Image),
) -> CuResult {
    let driver = context::driver();
    let before = driver.and_then(Look::now);
    let around = Around::begin();
    let start = Instant::now();
    let result = load();
    let seconds = start.elapsed().as_secs_f64();
    let was_alone = around.was_alone();
    let call = api.name();
    if result.is_ok()
        && let Some(driver) = driver
    {
        context::sweep(driver, call);
        let (handle, image) = look();
        let id = register(handle);
        let took = note(driver, id, call, path, image, before, seconds);
        if was_alone {
            took_eagerly(handle, took);
        }
    }
    result
}

/// The number of what was loaded, and of its handle until it is unloaded.
fn register(handle: Option<Module>) -> u64 {
    let id = NEXT.fetch_add(1, Relaxed);
    if let Some(handle) = handle {
        NUMBERS.lock().insert(handle, Numbered { id, took: 0 });
    }
    id
}

/// An eager load took this much.
fn took_eagerly(handle: Option<Module>, took: u64) {
    if took > 0 {
        if let Some(handle) = handle
            && let Some(loaded) = NUMBERS.lock().get_mut(&handle)
        {
            loaded.took = took;
        }
        let now = EAGER.fetch_add(took, Relaxed) + took;
        MOST_EAGER.fetch_max(now, Relaxed);
    }
}

/// Logs a load and remembers where it was; what its GPU lost, where it was eager and no other process was there.
fn note(
    driver: &Driver,
    id: u64,
    call: &'static str,
    path: Option<String>,
    image: Image,
    before: Option<Look>,
    seconds: f64,
) -> u64 {
    // A library may be loaded before there is any context; its kernels then go to each context that runs them.
    let context = context::current(driver);
    if let Some(context) = context {
        context.usage.modules.fetch_add(1, Relaxed);
    }
    let device = context.map(|context| context.device);
    let after = Look::now(driver);
    let memory = before.zip(after).map(|(before, after)| before.free as i64 - after.free as i64);
    let lazy = driver.loads_lazily();
    let site = site::here();
    let Image { kind, bytes, kernels, uses_malloc } = image;
    log::emit(|| {
        let event = ModuleLoad {
            id,
            device: device.map(Device::ordinal),
            call: call.to_owned(),
            kind: kind.to_owned(),
            path: path.clone(),
            bytes,
            kernels,
            seconds,
            memory,
            lazy,
            uses_malloc,
            caller: site::caller(&site).map(str::to_owned),
            thread: site::thread_name(),
            site: Some(site.clone()),
        };
        let size = bytes.map_or("unknown size".to_owned(), format_size);
        (event, format!("{call}: {kind} of {size}{} by {}", on(device), site::line(&site)))
    });
    let default_heap = uses_malloc && has_default_heap(driver, context.map(|context| context.id));
    let mut loaded = LOADED.lock();
    if loaded.len() < REMEMBERED || (default_heap && loaded.iter().all(|loaded| !loaded.default_heap)) {
        loaded.push(Loaded {
            context: context.map_or(NO_CONTEXT, |context| context.id),
            device,
            call,
            image,
            default_heap,
            site,
        });
    }
    drop(loaded);
    // What other processes took meanwhile looks the same, so it is only counted where there are none.
    let lost = before.zip(after).map_or(0, |(before, after)| after.lost_since(before));
    let is_known = lost > 0 && !lazy && device.is_some_and(|device| context::is_alone_on(driver, device));
    if is_known { lost } else { 0 }
}

/// ` on GPU 1`, or nothing.
fn on(device: Option<Device>) -> String {
    device.map_or(String::new(), |device| format!(" on GPU {device}"))
}

/// Makes a call that ends what has this handle. What is known of it is taken out before: another load may be given the handle
/// before the call is back.
pub fn unload(handle: Option<Module>, call: &'static str, unload: impl FnOnce() -> CuResult) -> CuResult {
    let known = handle.and_then(|handle| NUMBERS.lock().remove(&handle));
    let result = unload();
    if !result.is_ok() {
        if let (Some(handle), Some(known)) = (handle, known) {
            NUMBERS.lock().insert(handle, known);
        }
        return result;
    }
    // Loaded before the shim took part, if it has no number.
    let gone = known.unwrap_or(Numbered { id: 0, took: 0 });
    EAGER.fetch_sub(gone.took, Relaxed);
    let device = context::driver().and_then(context::current).map(|context| context.device);
    log::emit(|| {
        let event = ModuleUnload { id: gone.id, device: device.map(Device::ordinal), call: call.to_owned() };
        (event, format!("{call}{}", on(device)))
    });
    result
}

/// The program set a limit, and the driver has answered.
pub fn limit_set(limit: i32, value: u64, result: CuResult) {
    // Without a context there is nothing that has limits, and the driver has said so.
    let Some(driver) = context::driver() else { return };
    let Some(context) = context::current(driver) else { return };
    limits::report(context.device, limit, value, result);
    if result.is_ok() {
        if limit == limits::MALLOC_HEAP_SIZE {
            let mut chosen = HEAP_CHOSEN.lock();
            if chosen.len() < REMEMBERED && !chosen.contains(&context.id) {
                chosen.push(context.id);
            }
            drop(chosen);
            // Too late for what has run, but the program knows of the heap.
            LOADED
                .lock()
                .iter_mut()
                .filter(|loaded| loaded.context == context.id || loaded.context == NO_CONTEXT)
                .for_each(|loaded| loaded.default_heap = false);
        }
        return;
    }
    if driver.limit(limit) == Ok(value) {
        // It is what was asked for already.
        return;
    }
    let what = format!(
        "{} could not be set to {} on GPU {} any more: the driver answered {result}",
        limits::name(limit),
        format_size(value),
        context.device
    );
    let facts = [("limit", limits::name(limit)), ("value", value.to_string()), ("result", result.0.to_string())];
    finding::make(&Finding::LIMIT_TOO_LATE, Some(context.device), &site::here(), &facts, &what);
}

/// For a context in which nothing ran: where its modules came from, if any were loaded.
pub fn loaded_in_vain(context: u64, device: Device, working: &[&Record]) {
    let loaded = loaded();
    let mine: Vec<&Loaded> = loaded.iter().filter(|loaded| loaded.context == context).collect();
    let Some(first) = mine.first() else { return };
    let (number, first_of_them) = match mine.len() {
        1 => ("one module was loaded".to_owned(), ""),
        many => (format!("{many} modules were loaded"), "the first "),
    };
    let what = format!(
        "{number} on GPU {device}, {first_of_them}by {} ({}), and nothing ran there; this process works on GPU {}",
        first.call,
        first.image.kind,
        context::devices(working)
    );
    finding::make(&Finding::MODULE_ELSEWHERE, Some(device), &first.site, &[("modules", mine.len().to_string())], &what);
}

/// At the end of the process.
pub fn judge() {
    let eager = MOST_EAGER.load(Relaxed);
    let loaded = loaded();
    if eager as i64 >= WORTH_SAYING
        && let Some(first) = loaded.first()
    {
        let what = format!(
            "modules were loaded eagerly and took {}; lazily, only kernels that run take memory",
            format_size(eager)
        );
        finding::make(&Finding::EAGER_MODULES, first.device, &first.site, &[("bytes", eager.to_string())], &what);
    }
    if let Some(first) = loaded.iter().find(|loaded| loaded.default_heap) {
        let what = format!(
            "a module that uses device malloc was loaded{} with the heap at its default of {}",
            on(first.device),
            format_size(limits::DEFAULT_HEAP)
        );
        finding::make(
            &Finding::DEVICE_HEAP_DEFAULT,
            first.device,
            &first.site,
            &[("heap", limits::DEFAULT_HEAP.to_string())],
            &what,
        );
    }
}

/// Whether this thread could ask what is loaded, as whoever writes the log may.
#[cfg(test)]
pub fn can_be_asked() -> bool {
    LOADED.try_lock().is_some() && NUMBERS.try_lock().is_some() && HEAP_CHOSEN.try_lock().is_some()
}
