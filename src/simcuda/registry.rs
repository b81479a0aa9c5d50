//! `cuGetProcAddress`: from a base name and a CUDA version to the export a real driver would hand out.

use crate::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{In, Out};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

pub use crate::table::API;

/// One row of the table of exports.
pub struct ApiRow {
    pub export: &'static str,
    pub address: *const c_void,
    /// First CUDA version whose callers get this export under its base name.
    pub since: c_int,
    /// The `_ptds` or `_ptsz` export of the same call.
    pub twin: Option<(&'static str, *const c_void)>,
    /// A second base name that later versions route here (`cuGraphInstantiate` became `…WithFlags`).
    pub also: Option<(&'static str, c_int)>,
}

// SAFETY: the addresses are those of functions of this library, the same from every thread and never written through.
unsafe impl Sync for ApiRow {}

impl ApiRow {
    /// Whether `name` means this row: an export, its twin, or the name without version.
    pub fn is_called(&self, name: &str) -> bool {
        self.export == name || base_name(self.export) == name || self.twin.is_some_and(|(twin, _)| twin == name)
    }
}

/// `cuMemcpyHtoDAsync_v2_ptsz` → `cuMemcpyHtoDAsync`.
pub fn base_name(export: &str) -> &str {
    let name = export.strip_suffix("_ptsz").or_else(|| export.strip_suffix("_ptds")).unwrap_or(export);
    match name.rsplit_once("_v") {
        Some((base, version)) if version.bytes().all(|byte| byte.is_ascii_digit()) => base,
        _ => name,
    }
}

type Versions = Vec<(c_int, &'static ApiRow)>;

/// Base name → its rows, oldest first.
fn names() -> &'static HashMap<&'static str, Versions> {
    static NAMES: OnceLock<HashMap<&'static str, Versions>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let mut names: HashMap<_, Versions> = HashMap::new();
        for row in API {
            names.entry(base_name(row.export)).or_default().push((row.since, row));
            if let Some((name, since)) = row.also {
                names.entry(name).or_default().push((since, row));
            }
        }
        for versions in names.values_mut() {
            versions.sort_by_key(|(since, _)| *since);
        }
        names
    })
}

/// Bits of the flags; 1 asks for the legacy default stream, and 2 wins where both are set.
const KNOWN_FLAGS: u64 = 3;
const PER_THREAD_DEFAULT_STREAM: u64 = 2;
/// The twins came with CUDA 7.
const TWINS_SINCE: c_int = 7000;

enum Answer {
    Found(*const c_void),
    Unknown,
    TooOld,
}

fn lookup(symbol: &str, version: c_int, flags: u64) -> Answer {
    let driver = driver::version();
    let Some(versions) = names().get(symbol) else { return Answer::Unknown };
    let mut known = versions.iter().filter(|(since, _)| *since <= driver).peekable();
    if known.peek().is_none() {
        return Answer::Unknown;
    }
    match known.rfind(|(since, _)| *since <= version) {
        None => Answer::TooOld,
        Some((_, row)) => Answer::Found(match row.twin {
            Some((_, twin)) if flags & PER_THREAD_DEFAULT_STREAM != 0 && version >= TWINS_SINCE => twin,
            _ => row.address,
        }),
    }
}

/// What both versions refuse outright, leaving every output alone: unknown flags, and from 13.0 a later major version.
fn check(pfn: Out<*const c_void>, version: c_int, flags: u64) -> Outcome {
    let driver = driver::version();
    let later = driver >= 13_000 && version / 1000 > driver / 1000;
    if pfn.is_null() || flags & !KNOWN_FLAGS != 0 || later {
        return Err(Code::INVALID_VALUE);
    }
    Ok(())
}

/// `cuGetProcAddress` (11.3): NOT_FOUND, and nothing written, for a name it cannot give.
pub fn get_v1(symbol: In<c_char>, pfn: Out<*const c_void>, version: c_int, flags: u64) -> Outcome {
    let symbol = symbol.text()?;
    check(pfn, version, flags)?;
    match lookup(symbol, version, flags) {
        Answer::Found(address) => pfn.set(address),
        Answer::Unknown | Answer::TooOld => Err(Code::NOT_FOUND),
    }
}

/// `cuGetProcAddress_v2` (12.0): success with a null pointer for a name it cannot give; the reason goes to `status`.
pub fn get_v2(symbol: In<c_char>, pfn: Out<*const c_void>, version: c_int, flags: u64, status: Out<c_int>) -> Outcome {
    let symbol = symbol.text()?;
    check(pfn, version, flags)?;
    let (address, reason) = match lookup(symbol, version, flags) {
        Answer::Found(address) => (address, 0),
        Answer::Unknown => (std::ptr::null(), 1),
        Answer::TooOld => (std::ptr::null(), 2),
    };
    status.set_if_wanted(reason);
    pfn.set(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_names_lose_version_and_stream_suffix_only() {
        assert_eq!(base_name("cuMemcpyHtoDAsync_v2_ptsz"), "cuMemcpyHtoDAsync");
        assert_eq!(base_name("cuMemcpy_ptds"), "cuMemcpy");
        assert_eq!(base_name("cuCtxCreate_v4"), "cuCtxCreate");
        assert_eq!(base_name("cuInit"), "cuInit");
    }

    #[test]
    fn no_name_has_two_exports_for_one_version() {
        for (name, versions) in names() {
            assert!(versions.windows(2).all(|pair| pair[0].0 < pair[1].0), "{name}");
        }
    }
}
