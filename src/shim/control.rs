//! The C control interface (`include/gpupool.h`): found with `dlsym(RTLD_DEFAULT, …)`, so that programs need not link it.
//! None of these is called by the hooks; each may be called from any thread, with or without a pool.

use crate::hook::{HOOKS, guard};
use crate::{memory, process};
use gpupool_pool::Place;
use once_cell::race::OnceBox;
use std::ffi::{c_char, c_int};

/// One place's memory, in bytes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct gpupool_place {
    /// A GPU's CUDA ordinal, or -1 less the number of a host NUMA node (-1 is node 0).
    pub place: c_int,
    /// Live blocks stand on this much of `held`.
    pub used: u64,
    /// Physical memory that the pool holds there.
    pub held: u64,
    /// The most that `used` ever was.
    pub peak_used: u64,
    /// The most that the pool may hold there.
    pub limit: u64,
}

/// This library's version, a string that is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// The names of all hooked driver functions, separated by NUL and ended by two.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_hook_names() -> *const c_char {
    static NAMES: OnceBox<Vec<u8>> = OnceBox::new();
    let collect =
        || Box::new(HOOKS.iter().flat_map(|hook| hook.name.to_bytes_with_nul()).chain(&[0]).copied().collect());
    NAMES.get_or_init(collect).as_ptr().cast()
}

/// Returns all freed memory that the pool keeps to the driver, and says how many bytes that was. Does nothing while a
/// stream is being captured.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_trim() -> u64 {
    let Some(_inside) = process::is_active().then(guard::enter).flatten() else { return 0 };
    std::panic::catch_unwind(memory::trim).unwrap_or(0)
}

/// Writes up to `capacity` places to `places` and returns how many the pool has (0 while it is not open).
///
/// # Safety
/// `places` has room for `capacity` elements, or `capacity` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_places(places: *mut gpupool_place, capacity: usize) -> usize {
    let Some(_inside) = process::is_active().then(guard::enter).flatten() else { return 0 };
    let usage = std::panic::catch_unwind(memory::usage).ok().flatten().unwrap_or_default();
    for (index, usage) in usage.places.iter().enumerate().take(capacity) {
        let place = match usage.place {
            Place::Gpu(ordinal) => ordinal as c_int,
            Place::Host(node) => -1 - node as c_int,
        };
        let row =
            gpupool_place { place, used: usage.used, held: usage.held, peak_used: usage.peak_used, limit: usage.limit };
        // SAFETY: `index` is below `capacity`, for which the caller has room.
        unsafe { places.add(index).write(row) };
    }
    usage.places.len()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// `BLESS=1 cargo test -p gpupool header` writes the file.
    #[test]
    fn the_header_is_generated_from_this_file() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let config = cbindgen::Config::from_file(root.join("include/cbindgen.toml")).unwrap();
        let source = root.join("src/shim/control.rs");
        let mut text = Vec::new();
        cbindgen::Builder::new().with_config(config).with_src(source).generate().unwrap().write(&mut text);
        let (text, header) = (String::from_utf8(text).unwrap(), root.join("include/gpupool.h"));
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&header, &text).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&header).unwrap(), text, "BLESS=1 cargo test -p gpupool header");
    }
}
