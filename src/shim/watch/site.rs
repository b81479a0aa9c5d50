//! Where in the program something happened: Python frames where Python is running, native ones behind them.

use gpupool_events::{NativeFrame, PyFrame, Site};
use gpupool_interpose::cancel;
use gpupool_python as python;
use std::ffi::{CStr, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};

/// Native frames that are kept; what matters is near the driver.
const NATIVE: usize = 24;

/// The place that is calling now. Some microseconds: for contexts, modules and findings, not for every call.
pub fn here() -> Site {
    let _sheltered = cancel::shelter();
    let stack = python::capture();
    report_python();
    let truncated = stack.as_ref().is_some_and(python::Stack::is_truncated);
    let python: Vec<python::Frame> = stack.map(|stack| stack.resolve()).unwrap_or_default();
    let python = python.into_iter().map(|frame| PyFrame {
        file: frame.file.to_string(),
        line: frame.line.unwrap_or(0),
        function: frame.function.to_string(),
    });
    Site { python: python.collect(), native: native(), truncated }
}

/// A number that stands for the place that is calling now, without a look at names: some hundred nanoseconds a frame. The
/// same place has the same number for as long as its code stays loaded.
pub fn fingerprint() -> u64 {
    let mut hasher = DefaultHasher::new();
    if let Some(stack) = python::capture() {
        stack.hash(&mut hasher);
    }
    let mut frames = 0;
    backtrace::trace(|frame| {
        (frame.ip() as usize).hash(&mut hasher);
        frames += 1;
        frames < NATIVE
    });
    hasher.finish()
}

/// Says once why Python frames are missing where there is a Python.
fn report_python() {
    static SAID: AtomicBool = AtomicBool::new(false);
    if let python::State::Off(reason) = python::state()
        && !SAID.swap(true, Ordering::Relaxed)
    {
        tracing::info!(
            target: "gpupool::python", about = "python", "Python frames are not read: {reason}"
        );
    }
}

fn native() -> Vec<NativeFrame> {
    let mut frames = Vec::new();
    let own = describe((&raw const OWN).cast_mut().cast()).map(|(_, base)| base);
    backtrace::trace(|frame| {
        // A return address is behind its call, and may be the first of the next line or function.
        let call = frame.ip().wrapping_byte_sub(1);
        if let Some((found, base)) = describe(call)
            // By where it is loaded: it may have any name.
            && Some(base) != own
            // fork and setenv are reached through the C library; the place is who called it.
            && !(frames.is_empty() && file_name(&found.object).starts_with("libc.so"))
        {
            frames.push(found);
        }
        frames.len() < NATIVE
    });
    frames
}

/// An address in this library.
static OWN: u8 = 0;

/// What the loader knows of an address, and where its object begins: reading debug information would take seconds and megabytes in
/// the program.
fn describe(address: *mut c_void) -> Option<(NativeFrame, usize)> {
    // SAFETY: all-zero is a valid Dl_info; the call fills it.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked about.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's strings are NUL-terminated and live as long as the object, which is on this thread's stack.
    let text = |pointer| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned();
    let frame = NativeFrame {
        object: text(info.dli_fname),
        symbol: (!info.dli_sname.is_null()).then(|| text(info.dli_sname)),
        offset: (address as u64).wrapping_sub(info.dli_fbase as u64),
    };
    Some((frame, info.dli_fbase.addr()))
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// The library that made the call: the innermost one that is neither ours nor the driver.
pub fn caller(site: &Site) -> Option<&str> {
    site.native.iter().map(|frame| file_name(&frame.object)).find(|object| !object.starts_with("libcuda.so"))
}

/// The file name of the library or program whose call this is: as [`caller`], past the runtime where that is shared, and without a look at Python.
pub fn library() -> Option<String> {
    let _sheltered = cancel::shelter();
    let mut objects = native().into_iter().map(|frame| file_name(&frame.object).to_owned());
    objects.find(|object| !object.starts_with("libcuda.so") && !object.starts_with("libcudart"))
}

/// The runtime function (`cudaMalloc`, …) that the call came through, where a shared runtime shows it: the outermost of
/// its names, which is the one that the program called.
pub fn runtime_call(site: &Site) -> Option<&str> {
    let frames = site.native.iter().filter(|frame| file_name(&frame.object).starts_with("libcudart"));
    let is_runtime = |symbol: &&str| {
        symbol.strip_prefix("cuda").is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()))
    };
    frames.filter_map(|frame| frame.symbol.as_deref()).rfind(is_runtime)
}

/// The one line a person looks for: the program's own innermost Python frame, or else the innermost native frame outside
/// the CUDA libraries.
pub fn line(site: &Site) -> String {
    if let Some(frame) = site.program_frame() {
        return frame.to_string();
    }
    let outside = |frame: &&NativeFrame| !file_name(&frame.object).starts_with("libcud");
    let frame = site.native.iter().find(outside).or(site.native.first());
    frame.map_or_else(|| "unknown".to_owned(), ToString::to_string)
}

/// This thread's name, as tools show it.
pub fn thread_name() -> String {
    let mut name = [0u8; 16];
    // SAFETY: the buffer has the 16 bytes that PR_GET_NAME writes at most.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let length = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    String::from_utf8_lossy(&name[..length]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(object: &str, symbol: Option<&str>) -> NativeFrame {
        NativeFrame { object: format!("/usr/lib/{object}"), symbol: symbol.map(str::to_owned), offset: 16 }
    }

    #[test]
    fn without_python_the_line_is_the_code_outside_cuda() {
        let site =
            Site { native: vec![frame("libcudart.so.13", None), frame("libnccl.so.2", None)], ..Site::default() };
        assert_eq!(line(&site), "/usr/lib/libnccl.so.2+0x10");
        assert_eq!(caller(&site), Some("libcudart.so.13"));
        assert_eq!(line(&Site::default()), "unknown");
    }

    #[test]
    fn the_runtime_call_is_the_one_that_the_program_made() {
        let symbols = ["__cudaInit", "cudaFree", "cudaSetDevice"];
        let site =
            Site { native: symbols.map(|symbol| frame("libcudart.so.13", Some(symbol))).to_vec(), ..Site::default() };
        assert_eq!(runtime_call(&site), Some("cudaSetDevice"));
    }

    /// The test's executable holds this library.
    #[test]
    fn frames_of_this_library_are_left_out_whatever_its_file_is_called() {
        let own = std::env::current_exe().unwrap();
        assert_eq!(here().native.iter().find(|frame| own.ends_with(file_name(&frame.object))), None);
    }
}
