//! What happens to the GPUs: lines of the file that `SIMCUDA_EVENTS` names, which a test appends to while programs run.
//!
//! ```text
//! 0 xid 79
//! 0 ecc corrected 3
//! 1 remap uncorrected pending
//! ```
//!
//! `uncorrected` and `corrected` are alternatives, and so are `pending`, `failed` and nothing.

use crate::ffi::Answer;
use crate::machine::{Gpu, settings};
use nvml_wrapper_sys::bindings::*;
use std::ffi::{c_uint, c_ulonglong};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const XID: u64 = nvmlEventTypeXidCriticalError as u64;
const CORRECTED: u64 = nvmlEventTypeSingleBitEccError as u64;
const UNCORRECTED: u64 = nvmlEventTypeDoubleBitEccError as u64;
const REMAPPED: u64 = nvmlEventTypeDramRetirementEvent as u64;
const REMAP_FAILED: u64 = nvmlEventTypeDramRetirementFailure as u64;
pub const SUPPORTED: u64 = XID | CORRECTED | UNCORRECTED | REMAPPED | REMAP_FAILED;

/// How often the file is looked at by somebody who waits.
const INTERVAL: Duration = Duration::from_millis(2);

/// What the events so far made of a GPU.
#[derive(Default)]
pub struct Health {
    pub corrected: u64,
    pub uncorrected: u64,
    pub rows_corrected: c_uint,
    pub rows_uncorrected: c_uint,
    pub pending: bool,
    pub failed: bool,
}

/// What one line says: which GPU, and what happened to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Event {
    gpu: usize,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Xid(u64),
    Ecc { corrected: bool, count: u64 },
    Remap { corrected: bool, pending: bool, failed: bool },
}

impl Event {
    fn read(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (gpu, words) = words.split_first()?;
        let is_corrected = |word| match word {
            "corrected" => Some(true),
            "uncorrected" => Some(false),
            _ => None,
        };
        let what = match *words {
            ["xid", code] => What::Xid(code.parse().ok()?),
            ["ecc", kind, count] => What::Ecc { corrected: is_corrected(kind)?, count: count.parse().ok()? },
            ["remap", kind] => What::Remap { corrected: is_corrected(kind)?, pending: false, failed: false },
            ["remap", kind, "pending"] => What::Remap { corrected: is_corrected(kind)?, pending: true, failed: false },
            ["remap", kind, "failed"] => What::Remap { corrected: is_corrected(kind)?, pending: false, failed: true },
            _ => return None,
        };
        Some(Self { gpu: gpu.parse().ok()?, what })
    }

    /// NVML's type of it, and what goes with that.
    fn as_nvml(self) -> (u64, u64) {
        match self.what {
            What::Xid(code) => (XID, code),
            What::Ecc { corrected: true, .. } => (CORRECTED, 0),
            What::Ecc { corrected: false, .. } => (UNCORRECTED, 0),
            What::Remap { failed: true, .. } => (REMAP_FAILED, 0),
            What::Remap { .. } => (REMAPPED, 0),
        }
    }
}

/// All events so far, in order. A line that is still being written is left for the next look; one that is none is named on
/// stderr, once.
fn happened() -> Answer<Vec<Option<Event>>> {
    static NAMED: Mutex<usize> = Mutex::new(0);
    let Some(path) = &settings()?.events else { return Ok(Vec::new()) };
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let events: Vec<Option<Event>> = whole.lines().map(Event::read_or_skip).collect();
    let mut named = NAMED.lock().unwrap_or_else(PoisonError::into_inner);
    for (index, line) in whole.lines().enumerate().skip(*named) {
        if events[index].is_none() && !is_blank(line) {
            simmachine::say(&format!(
                "simnvml: SIMCUDA_EVENTS={}: line {}: expected GPU xid CODE, GPU ecc corrected|uncorrected COUNT or GPU remap \
                 corrected|uncorrected [pending|failed], found {line:?}",
                path.display(),
                index + 1
            ));
        }
    }
    *named = events.len();
    Ok(events)
}

fn is_blank(line: &str) -> bool {
    line.trim().is_empty() || line.starts_with('#')
}

impl Event {
    fn read_or_skip(line: &str) -> Option<Self> {
        if is_blank(line) { None } else { Self::read(line) }
    }
}

pub fn health(gpu: usize) -> Answer<Health> {
    let mut health = Health::default();
    for event in happened()?.into_iter().flatten().filter(|event| event.gpu == gpu) {
        match event.what {
            What::Xid(_) => {}
            What::Ecc { corrected: true, count } => health.corrected += count,
            What::Ecc { corrected: false, count } => health.uncorrected += count,
            What::Remap { corrected, pending, failed } => {
                let rows = if corrected { &mut health.rows_corrected } else { &mut health.rows_uncorrected };
                *rows += c_uint::from(!failed);
                health.pending |= pending;
                health.failed |= failed;
            }
        }
    }
    Ok(health)
}

/// What a program waits for. Handles are positions in the list, from 1.
#[derive(Default)]
pub struct EventSet {
    /// GPU, types, and how many events there were when they were registered.
    registered: Vec<(usize, u64, usize)>,
    /// Events before this one were told.
    next: usize,
}

static SETS: Mutex<Vec<Option<EventSet>>> = Mutex::new(Vec::new());

fn sets() -> MutexGuard<'static, Vec<Option<EventSet>>> {
    SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_set<T>(handle: nvmlEventSet_t, body: impl FnOnce(&mut EventSet) -> T) -> Answer<T> {
    let mut sets = sets();
    let set = (handle as usize).checked_sub(1).and_then(|index| sets.get_mut(index)?.as_mut());
    set.map(body).ok_or(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)
}

impl EventSet {
    pub fn create() -> nvmlEventSet_t {
        let mut sets = sets();
        sets.push(Some(Self::default()));
        sets.len() as nvmlEventSet_t
    }

    /// The next of these events that was asked for.
    fn take(&mut self, events: &[Option<Event>]) -> Option<Event> {
        while let Some(event) = events.get(self.next) {
            let index = self.next;
            self.next += 1;
            let wanted = |event: &Event| {
                let (kind, _) = event.as_nvml();
                self.registered.iter().any(|&(gpu, types, from)| gpu == event.gpu && types & kind != 0 && index >= from)
            };
            if let Some(event) = event.filter(wanted) {
                return Some(event);
            }
        }
        None
    }
}

/// Only what happens from now on is told.
pub fn register(handle: nvmlEventSet_t, gpu: usize, types: c_ulonglong) -> Answer {
    if types & !SUPPORTED != 0 {
        return Err(nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
    }
    let so_far = happened()?.len();
    with_set(handle, |set| set.registered.push((gpu, types, so_far)))
}

pub fn wait(handle: nvmlEventSet_t, milliseconds: c_uint) -> Answer<nvmlEventData_t> {
    let end = Instant::now() + Duration::from_millis(milliseconds.into());
    loop {
        let events = happened()?;
        if let Some(event) = with_set(handle, |set| set.take(&events))? {
            let (kind, data) = event.as_nvml();
            return Ok(nvmlEventData_t {
                device: Gpu::by_index(event.gpu as c_uint)?.handle(),
                eventType: kind,
                eventData: data,
                gpuInstanceId: c_uint::MAX,
                computeInstanceId: c_uint::MAX,
            });
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(nvmlReturn_enum_NVML_ERROR_TIMEOUT);
        }
        std::thread::sleep(left.min(INTERVAL));
    }
}

pub fn free_set(handle: nvmlEventSet_t) -> Answer {
    with_set(handle, |_| ())?;
    sets()[handle as usize - 1] = None;
    Ok(())
}

/// The event of NVML's first interface.
#[repr(C)]
pub struct DataV1 {
    device: nvmlDevice_t,
    kind: c_ulonglong,
    data: c_ulonglong,
}

impl From<nvmlEventData_t> for DataV1 {
    fn from(event: nvmlEventData_t) -> Self {
        Self { device: event.device, kind: event.eventType, data: event.eventData }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_what_happened() {
        let read = Event::read;
        assert_eq!(read("3 xid 79"), Some(Event { gpu: 3, what: What::Xid(79) }));
        let ecc = What::Ecc { corrected: true, count: 7 };
        assert_eq!(read("0 ecc corrected 7"), Some(Event { gpu: 0, what: ecc }));
        let remap = What::Remap { corrected: false, pending: true, failed: false };
        assert_eq!(read("1 remap uncorrected pending"), Some(Event { gpu: 1, what: remap }));
        for bad in ["", "x", "0", "0 xid", "0 xid 1 2", "a xid 1", "0 ecc 7", "0 remap uncorrected soon", "0 burn"] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }
}
