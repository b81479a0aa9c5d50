//! Runs each test in a process of its own, with the driver just built, and calls it through cudarc's declarations: the
//! types of a real client, so that a wrong parameter shows.

#![allow(clippy::unwrap_used, reason = "helpers of tests, where a panic is the report")]

use std::path::PathBuf;
use std::process::Command;

/// A driver call; its result as a number.
#[macro_export]
macro_rules! cu {
    ($name:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: outputs point to live variables of the types that the declaration asks for; anything else is a number
        // that the driver has to check itself.
        unsafe { cudarc::driver::sys::$name($($arg),*) as i32 }
    };
}

/// A driver call that has to succeed.
#[macro_export]
macro_rules! ok {
    ($name:ident($($arg:expr),* $(,)?)) => {
        assert_eq!($crate::cu!($name($($arg),*)), 0, stringify!($name))
    };
}

/// Runs `body` in a new process under `settings`. `name` is the test's own.
#[track_caller]
pub fn alone(name: &str, settings: &[(&str, &str)], body: fn()) {
    if std::env::var("SIMCUDA_TEST").as_deref() == Ok(name) {
        return body();
    }
    let me = std::env::current_exe().unwrap();
    let built = me.ancestors().nth(2).unwrap().join("libsimcuda.so");
    assert!(built.exists(), "{}: run cargo build -p simcuda first", built.display());
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    for link in ["libcuda.so.1", "libcuda.so"] {
        let link = folder.join(link);
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(&built, link).unwrap();
    }
    let output = Command::new(me)
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env("SIMCUDA_TEST", name)
        .env("LD_LIBRARY_PATH", &folder)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{name}: {}\n{out}\n{err}", output.status);
}

/// The address of an export, driver call or probe.
pub fn symbol(name: &str) -> *mut libc::c_void {
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: both names are C strings, and the library stays loaded.
    unsafe { libc::dlsym(libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW), name.as_ptr()) }
}

/// A test probe that takes nothing and counts something.
pub fn count(name: &str) -> u64 {
    let address = symbol(name);
    assert!(!address.is_null(), "{name}");
    // SAFETY: every probe used here is `uint64_t name(void)`.
    unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> u64>(address)() }
}

/// Bytes in use on a GPU.
pub fn used(device: i32) -> u64 {
    // SAFETY: `uint64_t simcuda_used(int)`.
    unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(i32) -> u64>(symbol("simcuda_used"))(device) }
}

/// Arms a list of faults.
pub fn arm(spec: &std::ffi::CStr) -> i32 {
    type Arm = extern "C" fn(*const libc::c_char) -> i32;
    // SAFETY: `int simcuda_fault_arm(const char *)`.
    unsafe { std::mem::transmute::<*mut libc::c_void, Arm>(symbol("simcuda_fault_arm"))(spec.as_ptr()) }
}
