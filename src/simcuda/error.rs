//! Result codes of the driver interface, with the names and texts that programs print.

use crate::ffi::Out;
use std::ffi::{CStr, c_char, c_int};

/// A `CUresult`. An integer and not an enum, because callers and settings may bring any number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub c_int);

/// What the body of a driver call answers; the boundary turns it into a `CUresult`.
pub type Outcome<T = ()> = Result<T, Code>;

macro_rules! codes {
    ($($name:ident = $value:literal $symbol:literal $text:literal;)*) => {
        impl Code {
            $(#[allow(dead_code, reason = "the list is the driver's, not only what this crate returns")]
            pub const $name: Code = Code($value);)*

            fn texts(self) -> Option<(&'static CStr, &'static CStr)> {
                match self.0 {
                    $($value => Some(($symbol, $text)),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    SUCCESS = 0 c"CUDA_SUCCESS" c"no error";
    INVALID_VALUE = 1 c"CUDA_ERROR_INVALID_VALUE" c"invalid argument";
    OUT_OF_MEMORY = 2 c"CUDA_ERROR_OUT_OF_MEMORY" c"out of memory";
    NOT_INITIALIZED = 3 c"CUDA_ERROR_NOT_INITIALIZED" c"initialization error";
    DEINITIALIZED = 4 c"CUDA_ERROR_DEINITIALIZED" c"driver shutting down";
    NO_DEVICE = 100 c"CUDA_ERROR_NO_DEVICE" c"no CUDA-capable device is detected";
    INVALID_DEVICE = 101 c"CUDA_ERROR_INVALID_DEVICE" c"invalid device ordinal";
    INVALID_IMAGE = 200 c"CUDA_ERROR_INVALID_IMAGE" c"device kernel image is invalid";
    INVALID_CONTEXT = 201 c"CUDA_ERROR_INVALID_CONTEXT" c"invalid device context";
    MAP_FAILED = 205 c"CUDA_ERROR_MAP_FAILED" c"mapping of buffer object failed";
    ALREADY_MAPPED = 208 c"CUDA_ERROR_ALREADY_MAPPED" c"resource already mapped";
    NO_BINARY_FOR_GPU = 209 c"CUDA_ERROR_NO_BINARY_FOR_GPU" c"no kernel image is available for execution on the device";
    ECC_UNCORRECTABLE = 214 c"CUDA_ERROR_ECC_UNCORRECTABLE" c"uncorrectable ECC error encountered";
    PEER_ACCESS_UNSUPPORTED = 217 c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" c"peer access is not supported between these two devices";
    INVALID_PTX = 218 c"CUDA_ERROR_INVALID_PTX" c"a PTX JIT compilation failed";
    INVALID_SOURCE = 300 c"CUDA_ERROR_INVALID_SOURCE" c"device kernel image is invalid";
    FILE_NOT_FOUND = 301 c"CUDA_ERROR_FILE_NOT_FOUND" c"file not found";
    OPERATING_SYSTEM = 304 c"CUDA_ERROR_OPERATING_SYSTEM" c"OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400 c"CUDA_ERROR_INVALID_HANDLE" c"invalid resource handle";
    ILLEGAL_STATE = 401 c"CUDA_ERROR_ILLEGAL_STATE" c"the operation cannot be performed in the present state";
    NOT_FOUND = 500 c"CUDA_ERROR_NOT_FOUND" c"named symbol not found";
    NOT_READY = 600 c"CUDA_ERROR_NOT_READY" c"device not ready";
    ILLEGAL_ADDRESS = 700 c"CUDA_ERROR_ILLEGAL_ADDRESS" c"an illegal memory access was encountered";
    PEER_ACCESS_ALREADY_ENABLED = 704 c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED" c"peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705 c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED" c"peer access has not been enabled";
    PRIMARY_CONTEXT_ACTIVE = 708 c"CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE" c"cannot set while device is active in this process";
    CONTEXT_IS_DESTROYED = 709 c"CUDA_ERROR_CONTEXT_IS_DESTROYED" c"context is destroyed";
    HOST_MEMORY_ALREADY_REGISTERED = 712 c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" c"part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713 c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED" c"pointer does not correspond to a registered memory region";
    DEVICE_UNAVAILABLE = 46 c"CUDA_ERROR_DEVICE_UNAVAILABLE" c"CUDA-capable device(s) is/are busy or unavailable";
    LAUNCH_FAILED = 719 c"CUDA_ERROR_LAUNCH_FAILED" c"unspecified launch failure";
    NOT_PERMITTED = 800 c"CUDA_ERROR_NOT_PERMITTED" c"operation not permitted";
    NOT_SUPPORTED = 801 c"CUDA_ERROR_NOT_SUPPORTED" c"operation not supported";
    STREAM_CAPTURE_UNSUPPORTED = 900 c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" c"operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901 c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED" c"operation failed due to a previous error during capture";
    STREAM_CAPTURE_MERGE = 902 c"CUDA_ERROR_STREAM_CAPTURE_MERGE" c"operation would result in a merge of separate capture sequences";
    STREAM_CAPTURE_UNMATCHED = 903 c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED" c"capture was not ended in the same stream as it began";
    STREAM_CAPTURE_UNJOINED = 904 c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED" c"capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION = 905 c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION" c"dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906 c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT" c"operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907 c"CUDA_ERROR_CAPTURED_EVENT" c"operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD = 908 c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD" c"attempt to terminate a thread-local capture sequence from another thread";
    GRAPH_EXEC_UPDATE_FAILURE = 910 c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE" c"the graph update was not performed because it included changes which violated constraints specific to instantiated graph update";
    INVALID_RESOURCE_TYPE = 914 c"CUDA_ERROR_INVALID_RESOURCE_TYPE" c"invalid resource type";
    INVALID_RESOURCE_CONFIGURATION = 915 c"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION" c"invalid resource configuration";
    UNKNOWN = 999 c"CUDA_ERROR_UNKNOWN" c"unknown error";
}

/// `cuGetErrorName`: INVALID_VALUE and a null string for a number that is no result code.
pub fn name(code: c_int, out: Out<*const c_char>) -> Outcome {
    text(code, out, |(symbol, _)| symbol)
}

/// `cuGetErrorString`: as [`name`], with the sentence in place of the symbol.
pub fn string(code: c_int, out: Out<*const c_char>) -> Outcome {
    text(code, out, |(_, sentence)| sentence)
}

fn text(
    code: c_int,
    out: Out<*const c_char>,
    pick: impl FnOnce((&'static CStr, &'static CStr)) -> &'static CStr,
) -> Outcome {
    match Code(code).texts() {
        Some(texts) => out.set(pick(texts).as_ptr()),
        None => {
            out.set(std::ptr::null())?;
            Err(Code::INVALID_VALUE)
        }
    }
}
