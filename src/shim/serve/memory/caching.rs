//! Does this program keep freed memory in a cache of its own?

use crate::process;
use crate::watch::site;
use gpupool_config::Switch;
use std::ffi::{CStr, c_void};

/// Parts of file names of libraries whose allocators cache device memory, and on OUT_OF_MEMORY return the cache and try
/// again: PyTorch, CuPy, RMM. (XLA takes what is left in one piece and does not give back.)
const CACHING: [&str; 4] = ["libc10_cuda", "cupy/cuda/memory.", "cupy/cuda/memory/", "librmm"];

/// What the names of libraries begin with that ask for memory of their own beside a framework, and fail on OUT_OF_MEMORY: NCCL takes it for
/// an unhandled error, and the job is over.
const ASK_ONCE: [&str; 9] = [
    "libnccl",
    "libnvshmem",
    "libcublas",
    "libcudnn",
    "libcufft",
    "libcusolver",
    "libcusparse",
    "libcurand",
    "libcutensor",
];

/// Whether who calls now returns a cache and tries again when it hears of OUT_OF_MEMORY: whom [`gpupool_pool::SoftRefusal`] is for.
pub fn returns_its_cache() -> bool {
    does(process::settings().soft_oom, || {
        is_loaded(keeps_a_cache) && !site::library().is_some_and(|name| asks_once(&name))
    })
}

/// Whether the library of this file name fails when its memory is refused.
fn asks_once(name: &str) -> bool {
    ASK_ONCE.iter().any(|start| name.starts_with(start))
}

/// What the setting says; the program's libraries are looked at only where it leaves that open.
fn does(soft_oom: Switch, caches: impl FnOnce() -> bool) -> bool {
    match soft_oom {
        Switch::On => true,
        Switch::Off => false,
        Switch::Auto => caches(),
    }
}

/// Whether the library of this name keeps a cache.
fn keeps_a_cache(name: &str) -> bool {
    CACHING.iter().any(|part| name.contains(part))
}

/// Whether a library with such a name is loaded now. The names are asked about one by one, where the loader shows them: to
/// gather them first would allocate under its lock.
fn is_loaded(is_one: fn(&str) -> bool) -> bool {
    struct Search {
        is_one: fn(&str) -> bool,
        found: bool,
    }
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, search: *mut c_void) -> i32 {
        // SAFETY: dl_iterate_phdr passes a valid description.
        let name = unsafe { (*info).dlpi_name };
        if name.is_null() {
            return 0;
        }
        // SAFETY: a name that is not NULL is a NUL-terminated string, which stays while the loader's lock is held.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        // SAFETY: this is the search below, which dl_iterate_phdr passes on to one visit at a time.
        let search = unsafe { &mut *search.cast::<Search>() };
        search.found = (search.is_one)(&name);
        // Anything but 0 ends the iteration.
        search.found.into()
    }
    let mut search = Search { is_one, found: false };
    // SAFETY: `visit` has the callback's signature and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of these names, those of libraries that keep a cache.
    fn caching<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
        names.into_iter().filter(|name| keeps_a_cache(name)).collect()
    }

    const SITE: &str = "/usr/lib/python3/dist-packages/";

    #[test]
    fn allocators_that_return_a_cache_are_known_by_their_files() {
        let names = [
            "torch/lib/libc10_cuda.so",
            "cupy/cuda/memory.cpython-312-x86_64-linux-gnu.so",
            "librmm/lib64/librmm.so.25",
        ];
        let names = names.map(|name| format!("{SITE}{name}"));
        assert_eq!(caching(names.iter().map(String::as_str)).len(), names.len());
        assert_eq!(caching(["/opt/cupy/cuda/memory/pool.so", "libc10_cuda-5a1e.so"]).len(), 2, "wheels add to names");
    }

    #[test]
    fn other_libraries_keep_none() {
        let names = [
            "",
            "linux-vdso.so.1",
            "/lib/x86_64-linux-gnu/libcuda.so.1",
            "/usr/local/cuda/lib64/libcudart.so.12",
            "torch/lib/libc10.so",
            "torch/lib/libtorch_cpu.so",
            "cupy/cuda/stream.cpython-312-x86_64-linux-gnu.so",
            "jaxlib/xla_extension.so",
            "/opt/gpupool/libgpupool.so",
        ];
        assert_eq!(caching(names), [""; 0]);
    }

    #[test]
    fn libraries_that_fail_when_they_are_refused_are_known_by_their_files() {
        let names = ["libnccl.so.2", "libcublasLt.so.13", "libcudnn_engines_precompiled.so.9", "libnvshmem_host.so.3"];
        assert!(names.iter().all(|name| asks_once(name)));
        let others = ["libc10_cuda.so", "libcudart.so.13", "libtorch_cuda.so", "python3.12", "librmm.so"];
        assert!(!others.iter().any(|name| asks_once(name)));
    }

    #[test]
    fn libraries_are_looked_at_only_where_the_setting_leaves_it_open() {
        assert!(does(Switch::On, || panic!("the user said it")));
        assert!(!does(Switch::Off, || panic!("the user said it")));
        assert!(does(Switch::Auto, || true));
        assert!(!does(Switch::Auto, || false));
    }

    #[test]
    fn what_is_loaded_is_found_wherever_it_stands() {
        assert!(is_loaded(|name| name.contains("libc.so")));
        assert!(!is_loaded(|name| name.contains("no library is called this")));
        assert!(!is_loaded(keeps_a_cache), "a test has no such library");
    }
}
