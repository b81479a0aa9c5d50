//! Who can give host memory back when the host is short of it. What keeps freed memory lies above this, so the list is handed
//! over by the start of the library.

use crate::taking::Taking;
use crate::watch::context;
use gpupool_cuda::Device;
use gpupool_pool::Place;
use once_cell::race::OnceBox;

/// Who keeps memory of the host that nobody uses.
pub struct Reclaimer {
    /// Gives back what it keeps, for the reason that the log is to name; the bytes.
    pub give_back: fn(why: &str) -> u64,
    /// No limit counts what it keeps, so that goes before anything is made on the host, short or not.
    pub goes_first: bool,
}

static RECLAIMERS: OnceBox<&'static [Reclaimer]> = OnceBox::new();

/// Hands the list over. A second one is ignored.
pub fn may_be_asked(list: &'static [Reclaimer]) {
    let _ = RECLAIMERS.set(Box::new(list));
}

fn all() -> impl Iterator<Item = &'static Reclaimer> {
    RECLAIMERS.get().copied().unwrap_or_default().iter()
}

/// The host is short of memory; the bytes that were given back.
pub fn reclaim(why: &str) -> u64 {
    all().map(|reclaimer| (reclaimer.give_back)(why)).sum()
}

/// Memory is about to be made at this place, until what this returns is dropped: what no limit counts makes room for it, and others hear whose it is. No allocation, since the gate may be closed.
#[must_use = "others hear whose memory it is until it is dropped"]
pub fn make_room_at(place: Place) -> Option<Taking> {
    if place.is_host() {
        all().filter(|reclaimer| reclaimer.goes_first).for_each(|reclaimer| {
            (reclaimer.give_back)("memory on the host");
        });
    }
    // Where it has a context it is seen by that, once others have asked who has one.
    matches!(place, Place::Gpu(gpu) if !context::is_on_for(Device::of(gpu), gpupool_lending::AWAITED))
        .then(Taking::begin)
}
