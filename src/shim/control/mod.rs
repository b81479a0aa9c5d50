//! The C interface (`include/gpupool.h`): found with `dlsym(RTLD_DEFAULT, …)` where the library is preloaded, or opened
//! with `dlopen`. No hook calls any of these; each may be called from any thread, with or without a pool.

mod allocate;
mod blocks;
mod labels;
mod names;
mod state;
mod statistics;

use crate::guard;
use crate::hook::HOOKS;
use crate::process;
use crate::serve::{memory, pinned};
use crate::watch::capture;
use once_cell::race::OnceBox;
use std::ffi::{c_char, c_int};

/// Why a call did nothing. Functions that return `int` return 0 for success, one of these, or a `CUresult` (above 0)
/// where the driver was asked and refused.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "names of C")]
pub enum gpupool_error {
    /// gpupool has no part in this process, or no pool yet: `gpupool_get_state` and `gpupool_why` tell.
    GPUPOOL_NOT_ACTIVE = -1,
    /// A pointer to something of the caller's is NULL, a size is 0, or a number is none of those that the function knows or no place of this pool. NULL as an address of
    /// memory is one that lies in no block.
    GPUPOOL_INVALID_ARGUMENT = -2,
    /// The address lies in no live block of the pool's.
    GPUPOOL_NOT_POOLED = -3,
    /// This kind of memory cannot do that.
    GPUPOOL_NOT_SUPPORTED = -4,
    /// gpupool failed; the log says where.
    GPUPOOL_INTERNAL = -5,
    /// Some of the memory stayed where it was: `gpupool_pieces` tells where it lies, and what must stay.
    GPUPOOL_STAYED = -6,
    /// A label would have more on its GPU than `gpupool_label_budget` allows.
    GPUPOOL_OVER_BUDGET = -7,
    /// What `gpupool run --restore` was to bring back by this name did not come back; the log says why.
    GPUPOOL_NOT_RESTORED = -8,
}

impl From<gpupool_error> for c_int {
    fn from(error: gpupool_error) -> c_int {
        error as c_int
    }
}

/// Runs the body of a function that looks at the pool: in a process where it may be looked at, kept apart from the hooks,
/// and with no panic passing.
fn looking<T>(body: impl FnOnce() -> Result<T, gpupool_error> + std::panic::UnwindSafe) -> Result<T, gpupool_error> {
    let Some(_inside) = process::is_active().then(guard::enter_sheltered).flatten() else {
        return Err(gpupool_error::GPUPOOL_NOT_ACTIVE);
    };
    std::panic::catch_unwind(body).unwrap_or(Err(gpupool_error::GPUPOOL_INTERNAL))
}

/// This library's version, a string that is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Version and build of this library, ended by NUL, for the command: it reads the file, as to open the library would make it a
/// part of the command's process. Its room is the same in all versions.
///
/// cbindgen:ignore
#[unsafe(no_mangle)]
pub static GPUPOOL_BUILD: [u8; 128] = {
    let (text, mut room) = (gpupool_config::VERSION.as_bytes(), [0; 128]);
    let mut at = 0;
    while at < text.len() && at < room.len() - 1 {
        room[at] = text[at];
        at += 1;
    }
    room
};

/// The names of all hooked driver functions, separated by NUL and ended by two.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_hook_names() -> *const c_char {
    static NAMES: OnceBox<Vec<u8>> = OnceBox::new();
    let collect =
        || Box::new(HOOKS.iter().flat_map(|hook| hook.name.to_bytes_with_nul()).chain(&[0]).copied().collect());
    NAMES.get_or_init(collect).as_ptr().cast()
}

/// Returns all freed memory that the pools of device and of pinned memory keep to the driver, and says how many bytes that
/// was. Of device memory that was freed without waiting it returns what the GPU of the current context is done with, which is
/// waited for, or what another GPU is known to be done with.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_trim() -> u64 {
    looking(|| {
        let _captured = capture::suppose();
        Ok(memory::trim() + pinned::trim("gpupool_trim"))
    })
    .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// `BLESS=1 cargo test -p gpupool header` writes the file.
    #[test]
    fn the_header_is_generated_from_these_files() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let config = cbindgen::Config::from_file(root.join("include/cbindgen.toml")).unwrap();
        // The other files are found by their `mod`.
        let source = root.join("src/shim/control/mod.rs");
        let mut text = Vec::new();
        cbindgen::Builder::new().with_config(config).with_src(source).generate().unwrap().write(&mut text);
        let (text, header) = (String::from_utf8(text).unwrap(), root.join("include/gpupool.h"));
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&header, &text).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&header).unwrap(), text, "BLESS=1 cargo test -p gpupool header");
    }
}
