//! Where in the program something happened: Python frames where Python is running, native ones behind them.

use crate::python;
use std::ffi::{CStr, c_void};

/// Native frames that are kept; what matters is near the driver.
const NATIVE: usize = 24;

/// One frame of native code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Native {
    /// File name of the shared object or executable, without its folder.
    pub object: String,
    /// The exported symbol that the address lies behind, where there is one.
    pub symbol: Option<String>,
    /// Bytes behind the symbol, or else behind the object's first byte.
    pub offset: usize,
}

/// A place in the program.
#[derive(Clone, Debug, Default)]
pub struct Site {
    pub python: Vec<python::Frame>,
    /// There were more Python frames than were read.
    pub truncated: bool,
    pub native: Vec<Native>,
}

/// The place that is calling now. Some microseconds: for contexts, modules and findings, not for every call.
pub fn here() -> Site {
    let stack = python::capture();
    let truncated = stack.as_ref().is_some_and(python::Stack::is_truncated);
    let python = stack.map(|stack| stack.resolve()).unwrap_or_default();
    Site { python, truncated, native: native() }
}

fn native() -> Vec<Native> {
    let mut frames = Vec::new();
    backtrace::trace(|frame| {
        if let Some(found) = describe(frame.ip())
            && found.object != "libgpupool.so"
        {
            frames.push(found);
        }
        frames.len() < NATIVE
    });
    frames
}

/// What the loader knows of an address: reading debug information would take seconds and megabytes in the program.
pub fn describe(address: *mut c_void) -> Option<Native> {
    // SAFETY: all-zero is a valid Dl_info; the call fills it.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked about.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's strings are NUL-terminated and live as long as the object, which is on this thread's stack.
    let text = |pointer| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned();
    let path = text(info.dli_fname);
    let object = path.rsplit('/').next().unwrap_or(&path).to_owned();
    let symbol = (!info.dli_sname.is_null()).then(|| text(info.dli_sname));
    let start = if symbol.is_some() { info.dli_saddr } else { info.dli_fbase };
    Some(Native { object, symbol, offset: (address as usize).wrapping_sub(start as usize) })
}

impl Site {
    /// The library that made the call: the innermost one that is neither ours nor the driver.
    pub fn caller(&self) -> Option<&str> {
        self.native.iter().map(|frame| frame.object.as_str()).find(|object| !object.starts_with("libcuda.so"))
    }

    /// The runtime function (`cudaMalloc`, …) that the call came through, where a shared runtime shows it.
    pub fn runtime_call(&self) -> Option<&str> {
        let symbols = self.native.iter().filter(|frame| frame.object.starts_with("libcudart"));
        symbols.filter_map(|frame| frame.symbol.as_deref()).rfind(|symbol| is_runtime_name(symbol))
    }

    /// The one line a person looks for: the innermost Python frame that is not the standard library's or a package's, or
    /// else the innermost one, or else the innermost native one outside the CUDA libraries.
    pub fn line(&self) -> String {
        let own = |frame: &&python::Frame| {
            !["site-packages", "dist-packages", "/lib/python", "<frozen"].iter().any(|part| frame.file.contains(part))
        };
        if let Some(frame) = self.python.iter().find(own).or(self.python.first()) {
            let line = frame.line.map_or(String::new(), |line| format!(":{line}"));
            return format!("{}{line} in {}", frame.file, frame.function);
        }
        let outside = |frame: &&Native| !frame.object.starts_with("libcud");
        match self.native.iter().find(outside).or(self.native.first()) {
            Some(Native { object, symbol: Some(symbol), offset }) => format!("{symbol}+{offset:#x} in {object}"),
            Some(Native { object, symbol: None, offset }) => format!("{object}+{offset:#x}"),
            None => "unknown".to_owned(),
        }
    }

    /// The form of the log.
    pub fn json(&self) -> String {
        let python = self.python.iter().map(
            |frame| serde_json::json!({"file": frame.file, "function": frame.function, "line": frame.line}),
        );
        let native = self.native.iter().map(
            |frame| serde_json::json!({"object": frame.object, "symbol": frame.symbol, "offset": frame.offset}),
        );
        serde_json::json!({
            "python": python.collect::<Vec<_>>(),
            "native": native.collect::<Vec<_>>(),
            "truncated": self.truncated,
        })
        .to_string()
    }

    /// Whether the two are one line of the program, so that a loop is seen as one.
    pub fn same_line(&self, other: &Site) -> bool {
        self.line() == other.line()
    }
}

fn is_runtime_name(symbol: &str) -> bool {
    symbol.strip_prefix("cuda").is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()))
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

    fn python_frame(file: &str, line: u32) -> python::Frame {
        python::Frame { file: file.to_owned(), function: "f".to_owned(), line: Some(line) }
    }

    #[test]
    fn the_line_is_the_users_and_not_a_packages() {
        let site = Site {
            python: vec![python_frame("/venv/lib/python3.12/site-packages/torch/cuda/__init__.py", 9), python_frame("train.py", 7)],
            ..Site::default()
        };
        assert_eq!(site.line(), "train.py:7 in f");
    }

    #[test]
    fn without_python_the_line_is_the_code_outside_cuda() {
        let frame = |object: &str| Native { object: object.to_owned(), symbol: None, offset: 16 };
        let site = Site { native: vec![frame("libcudart.so.13"), frame("libnccl.so.2")], ..Site::default() };
        assert_eq!(site.line(), "libnccl.so.2+0x10");
        assert_eq!(site.caller(), Some("libcudart.so.13"));
        assert_eq!(Site::default().line(), "unknown");
    }

    #[test]
    fn a_runtime_call_is_told_by_the_outermost_of_the_runtimes_names() {
        let frame = |symbol: &str| Native { object: "libcudart.so.13".to_owned(), symbol: Some(symbol.to_owned()), offset: 1 };
        let site = Site { native: vec![frame("__cudaInit"), frame("cudaFree"), frame("cudaSetDevice")], ..Site::default() };
        assert_eq!(site.runtime_call(), Some("cudaSetDevice"));
    }

    #[test]
    fn native_frames_name_this_executable() {
        assert!(!here().native.is_empty());
    }
}
