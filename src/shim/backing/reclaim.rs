//! Who can give host memory back when the host is short of it. What keeps freed memory lies above this, so the list is handed
//! over by the start of the library.

use once_cell::race::OnceBox;

/// Gives back what it keeps, for the reason that the log is to name; the bytes.
pub type Reclaimer = fn(why: &str) -> u64;

static RECLAIMERS: OnceBox<&'static [Reclaimer]> = OnceBox::new();

/// Hands the list over. A second one is ignored.
pub fn may_be_asked(list: &'static [Reclaimer]) {
    let _ = RECLAIMERS.set(Box::new(list));
}

/// The host is short of memory; the bytes that were given back.
pub fn reclaim(why: &str) -> u64 {
    RECLAIMERS.get().copied().unwrap_or_default().iter().map(|reclaimer| reclaimer(why)).sum()
}
