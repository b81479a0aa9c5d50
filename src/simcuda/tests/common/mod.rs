//! Runs each test in a process of its own, with the driver just built, and calls it through cudarc's declarations: the
//! types of a real client, so that a wrong parameter shows. Beside that, what nearly every test begins with.

#![allow(dead_code, reason = "each file of tests uses a part of them")]
#![allow(clippy::unwrap_used, reason = "helpers of tests, where a panic is the report")]

use cudarc::driver::sys::*;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::ptr::null_mut;

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

/// Runs `body` in a new process under `settings`, in strict mode, and expects no violation. `name` is the test's own.
#[track_caller]
pub fn alone(name: &str, settings: &[(&str, &str)], body: fn()) {
    wrongly(name, settings, body, |violations| assert!(violations.is_empty(), "{violations:#?}"));
}

/// Runs `body`, which does what is not allowed, in a new process under `settings` and in strict mode: `check` gets the
/// violations, one a line without the process. `name` is the test's own.
#[track_caller]
pub fn wrongly(name: &str, settings: &[(&str, &str)], body: fn(), check: fn(&[&str])) {
    run(name, settings, body, check, |status, out| status.success() && out.contains("1 passed"));
}

/// Runs `body`, which the driver ends with an abort, in a new process under `settings` and in strict mode: `check` gets the
/// violations, one a line without the process. `name` is the test's own.
#[track_caller]
pub fn aborts(name: &str, settings: &[(&str, &str)], body: fn(), check: fn(&[&str])) {
    run(name, settings, body, check, |status, _| status.signal() == Some(libc::SIGABRT));
}

#[track_caller]
fn run(name: &str, settings: &[(&str, &str)], body: fn(), check: fn(&[&str]), expected: fn(&ExitStatus, &str) -> bool) {
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
    let violations = folder.join("violations");
    let _ = std::fs::remove_file(&violations);
    let output = Command::new(me)
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env("SIMCUDA_TEST", name)
        .env("LD_LIBRARY_PATH", &folder)
        .env("SIMCUDA_STRICT", "on")
        .env("SIMCUDA_VIOLATIONS", &violations)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(expected(&output.status, &out), "{name}: {}\n{out}\n{err}", output.status);
    let violations = std::fs::read_to_string(violations).unwrap_or_default();
    let violations: Vec<_> = violations.lines().map(|line| line.split_once(": ").unwrap().1).collect();
    check(&violations);
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

/// The kernels that tests launch; what they do is in README.
pub const PTX: &std::ffi::CStr = c".version 7.0
.target sm_70
.address_size 64
.visible .entry fill_u32(.param .u64 p, .param .u64 n, .param .u32 v) { ret; }
.visible .entry iota_u32(.param .u64 p, .param .u64 n, .param .u32 v) { ret; }
.visible .entry check_iota_u32(.param .u64 p, .param .u64 n, .param .u32 v, .param .u64 bad) { ret; }
.visible .entry sum_u32(.param .u64 p, .param .u64 n, .param .u64 out) { ret; }
.visible .entry add_struct(.param .align 8 .b8 p[32]) { ret; }
.visible .entry wait_flag(.param .u64 flag) { ret; }
.visible .entry sum_table_u32(.param .u64 table, .param .u64 count, .param .u64 n, .param .u64 out) { ret; }
.visible .entry fill_table_u32(.param .u64 table, .param .u64 count, .param .u64 n, .param .u32 v) { ret; }
.visible .entry sum_list_u64(.param .u64 head, .param .u64 out, .param .u64 flag) { ret; }
.visible .entry add_list_u64(.param .u64 head, .param .u64 v) { ret; }
.visible .entry check_until_u32(.param .u64 p, .param .u64 n, .param .u32 v, .param .u64 f, .param .u64 ns, .param .u64 bad) { ret; }
.visible .entry add_each_u32(.param .u64 p, .param .u64 n, .param .u32 times, .param .u64 flag) { ret; }
.visible .entry stranger(.param .u64 p) { ret; }
";

/// The primary context of `device`, made current.
pub fn start_on(device: i32) -> CUcontext {
    let mut context = null_mut();
    ok!(cuInit(0));
    ok!(cuDevicePrimaryCtxRetain(&mut context, device));
    ok!(cuCtxSetCurrent(context));
    context
}

pub fn function(name: &std::ffi::CStr) -> CUfunction {
    let (mut module, mut function) = (null_mut(), null_mut());
    ok!(cuModuleLoadData(&mut module, PTX.as_ptr().cast()));
    ok!(cuModuleGetFunction(&mut function, module, name.as_ptr()));
    function
}

pub fn launch(function: CUfunction, stream: CUstream, args: &mut [u64]) -> i32 {
    let mut pointers: Vec<_> = args.iter_mut().map(|arg| (arg as *mut u64).cast()).collect();
    cu!(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, pointers.as_mut_ptr(), null_mut()))
}

pub fn stream() -> CUstream {
    let mut stream = null_mut();
    ok!(cuStreamCreate(&mut stream, 1));
    stream
}

pub fn read(address: u64) -> u32 {
    let mut word = 0_u32;
    ok!(cuMemcpyDtoH_v2((&raw mut word).cast(), address, 4));
    word
}

pub fn pinned_flag() -> *mut u32 {
    let mut flag = null_mut();
    ok!(cuMemHostAlloc(&mut flag, 4096, 0));
    flag.cast()
}

pub fn raise(flag: usize) {
    // SAFETY: a live pinned word; the worker reads it atomically too.
    unsafe { std::sync::atomic::AtomicU32::from_ptr(flag as *mut u32) }.store(1, std::sync::atomic::Ordering::Release);
}

/// Lets a kernel go after a long time, so that a call that waits for it wrongly fails its test and does not hang it.
pub fn raise_in_the_end(flag: usize) {
    std::thread::spawn(move || {
        std::thread::park_timeout(std::time::Duration::from_secs(30));
        raise(flag);
    });
}

/// Pages of the process that are shared memory, in bytes: what pinned memory is to the system.
pub fn shared_pages() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// One frame: the smallest handle.
pub const CHUNK: usize = 2 << 20;

pub fn location(device: i32) -> CUmemLocation {
    // SAFETY: a structure of integers, for which zero is a value.
    let mut location: CUmemLocation = unsafe { std::mem::zeroed() };
    location.type_ = if device < 0 {
        CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA
    } else {
        CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE
    };
    location.id = device.max(0);
    location
}

pub fn prop(device: i32) -> CUmemAllocationProp {
    // SAFETY: a structure of integers, for which zero is a value, and of enumerations, which are set to members below.
    let mut prop: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    prop.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = location(device);
    prop
}

/// A handle of `bytes` on a GPU, or on the host for -1.
pub fn create(device: i32, bytes: usize) -> u64 {
    let mut handle = 0;
    ok!(cuMemCreate(&mut handle, bytes, &prop(device), 0));
    handle
}

pub fn reserve(bytes: usize) -> u64 {
    let mut address = 0;
    ok!(cuMemAddressReserve(&mut address, bytes, 0, 0, 0));
    address
}

pub fn grant(address: u64, bytes: usize, devices: &[i32]) -> i32 {
    let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let list: Vec<_> = devices.iter().map(|&device| CUmemAccessDesc { location: location(device), flags }).collect();
    cu!(cuMemSetAccess(address, bytes, list.as_ptr(), list.len()))
}

/// One chunk of `device` at `address`, open to `devices`.
pub fn place(address: u64, device: i32, devices: &[i32]) {
    let handle = create(device, CHUNK);
    ok!(cuMemMap(address, CHUNK, 0, handle, 0));
    assert_eq!(grant(address, CHUNK, devices), 0);
    ok!(cuMemRelease(handle));
}
