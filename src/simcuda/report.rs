//! What the program did to the machine: violations as they happen, and a JSON report at exit (`SIMCUDA_REPORT`).

use crate::driver::{Driver, if_initialised};
use crate::physical::Store;
use crate::space::{Kind, Region};
use crate::{primary, vmm};
use parking_lot::Mutex;
use std::fmt::Write;
use std::os::unix::fs::OpenOptionsExt;

static VIOLATIONS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Records something a correct program never does, and says it once on stderr.
pub fn violation(message: String) {
    let mut list = VIOLATIONS.lock();
    note(&message);
    if list.is_empty() {
        simmachine::say(&format!("simcuda: {message} (further violations are only counted)"));
    }
    list.push(message);
}

/// Appends a line where the settings say, at once: a process that is killed has said it too, and each of several.
fn note(message: &str) {
    let Some(path) = if_initialised().and_then(|driver| driver.settings.violations.as_ref()) else { return };
    let line = format!("{}: {message}\n", std::process::id());
    let file = std::fs::OpenOptions::new().append(true).create(true).mode(0o600).open(path);
    if let Err(error) = file.and_then(|mut file| std::io::Write::write_all(&mut file, line.as_bytes())) {
        simmachine::say(&format!("simcuda: SIMCUDA_VIOLATIONS={path}: {error}"));
    }
}

pub fn violations() -> usize {
    VIOLATIONS.lock().len()
}

/// Writes the report if one was asked for; `%p` in its path is the process id. A path that cannot be written is said on
/// stderr: the program's exit code is its own.
pub fn write() {
    let Some(driver) = if_initialised() else { return };
    let Some(path) = &driver.settings.report else { return };
    let path = path.replace("%p", &std::process::id().to_string());
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&path)
        .and_then(|mut file| std::io::Write::write_all(&mut file, text(driver).as_bytes()));
    if let Err(error) = written {
        simmachine::say(&format!("simcuda: SIMCUDA_REPORT={path}: {error}"));
    }
}

fn text(driver: &Driver) -> String {
    let regions = driver.space.regions();
    let gpus = join(driver.gpus.iter().enumerate().map(|(ordinal, gpu)| {
        let (active, retained) = primary::count(ordinal);
        format!(
            "{{\"ordinal\": {ordinal}, {}, \"primary_active\": {active}, \"primary_retained\": {retained}}}",
            usage(&gpu.store)
        )
    }));
    let hosts =
        join(driver.hosts.iter().enumerate().map(|(node, store)| format!("{{\"node\": {node}, {}}}", usage(store))));
    let mapped = join(regions.iter().filter_map(|region| match &region.kind {
        Kind::Vmm { physical, .. } => Some(range(region, &format!("{:?}", physical.place()))),
        _ => None,
    }));
    let allocations = join(regions.iter().filter_map(|region| match &region.kind {
        Kind::Plain { device, physical, .. } if !physical.is_vacant() => Some(range(region, &format!("Gpu({device})"))),
        Kind::Host { registered: false, .. } => Some(range(region, "Pinned")),
        Kind::Managed { .. } => Some(range(region, "Managed")),
        _ => None,
    }));
    let reservations = join(
        driver.space.reservations().iter().map(|(start, bytes)| format!("{{\"start\": {start}, \"bytes\": {bytes}}}")),
    );
    let violations = join(VIOLATIONS.lock().iter().map(|message| format!("\"{}\"", escape(message))));
    format!(
        "{{\n\"calls\": {},\n\"gpus\": [{gpus}],\n\"hosts\": [{hosts}],\n\"live_handles\": {},\n\"mapped_bytes\": {},\n\
         \"mapped\": [{mapped}],\n\"allocations\": [{allocations}],\n\"reservations\": [{reservations}],\n\"violations\": [{violations}]\n}}\n",
        crate::boundary::calls(),
        vmm::live_handles(),
        driver.space.mapped(),
    )
}

fn usage(store: &Store) -> String {
    let usage = store.usage();
    format!(
        "\"capacity\": {}, \"plain\": {}, \"vmm\": {}, \"contexts\": {}, \"pinned\": {}, \"managed\": {}, \"used\": {}, \"peak\": {}",
        store.capacity,
        usage.plain,
        usage.vmm,
        usage.contexts,
        usage.pinned,
        usage.managed,
        usage.total(),
        usage.peak
    )
}

fn range(region: &Region, place: &str) -> String {
    format!("{{\"start\": {}, \"bytes\": {}, \"place\": \"{place}\"}}", region.start, region.bytes)
}

fn join(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

fn escape(text: &str) -> String {
    text.chars().fold(String::new(), |mut escaped, letter| {
        match letter {
            '"' | '\\' => escaped.extend(['\\', letter]),
            // Writing to a string cannot fail.
            control if control.is_control() => drop(write!(escaped, "\\u{:04x}", control as u32)),
            _ => escaped.push(letter),
        }
        escaped
    })
}
