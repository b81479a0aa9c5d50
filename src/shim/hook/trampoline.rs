//! The exported functions that programs call in the driver's stead, one `extern "C"` function for each row of the table of
//! driver functions ([`super::table`]), and the list of them.

use super::boundary;
use super::table::for_each_hook;
use crate::address;
use crate::gate;
use crate::guard;
use crate::run;
use crate::serve::memory::unpooled;
use crate::watch::arguments;
use crate::watch::submitted::{self, Unseen};
use cudarc::driver::sys::{
    CUarray, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUipcMemHandle, CUlibrary,
    CUmemoryPool, CUmipmappedArray, CUmodule, CUstream,
};
use gpupool_cuda::{Access, CuResult, Location, PoolProperties, Properties};
use gpupool_interpose::{Api, Hook, Slots, Unhooked};
use gpupool_pool::Mark;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

const fn c_name(bytes: &'static [u8]) -> &'static CStr {
    match CStr::from_bytes_with_nul(bytes) {
        Ok(name) => name,
        Err(_) => panic!("a row's name has an inner NUL"),
    }
}

/// Whether the calls of a subject are so quick that forbidding to cancel the thread would show in them
/// ([`gpupool_interpose::cancel`]).
const fn is_quick(subject: &str, body: &str) -> bool {
    match subject.as_bytes() {
        // These wait.
        b"context" => !matches!(body.as_bytes(), b"synchronized" | b"synchronized_in"),
        b"memory" | b"host" | b"query" | b"stream" | b"stream_ordered" => true,
        _ => false,
    }
}

/// Whether the calls of a subject may submit work that touches a pooled block, which is noted before and behind them
/// ([`crate::watch::submitted`]). Of all others that list of harmless functions has the name.
const fn submits(subject: &str, body: &str) -> bool {
    match subject.as_bytes() {
        b"submit" | b"launch" => true,
        // Calls that are no launch and no copy, and whose inside nobody vouches for: uploads of graphs, modules that are filled.
        b"retry" | b"module" | b"stream_ordered" => true,
        b"context" => {
            matches!(body.as_bytes(), b"copied_between" | b"copied_between_later" | b"copied_between_blocks")
        }
        b"handle" => matches!(body.as_bytes(), b"map_arrays"),
        _ => false,
    }
}

/// Whether the calls of a subject pass the gate ([`crate::gate`]): all that may submit work, that begin a capture, or during which the
/// driver looks at what is mapped at an address, unless nobody can be moving what lies there ([`address::stays_the_drivers`]).
const fn passes_gate(subject: &str, body: &str) -> bool {
    submits(subject, body)
        || match subject.as_bytes() {
            b"handle" => true,
            b"mapping" => !matches!(body.as_bytes(), b"create"),
            b"graph" => !matches!(body.as_bytes(), b"destroy"),
            b"pass" => matches!(body.as_bytes(), b"looking"),
            b"stream" => matches!(body.as_bytes(), b"begin"),
            b"ipc" => matches!(body.as_bytes(), b"export" | b"descriptor"),
            b"query" => !matches!(body.as_bytes(), b"memory_info" | b"total_memory"),
            _ => false,
        }
}

/// Whether the calls of a subject wait for the device, as far as they pass nothing else on the way ([`super::rest`]).
const fn waits(subject: &str, body: &str) -> bool {
    matches!((subject.as_bytes(), body.as_bytes()), (b"rest", _) | (b"submit", b"read_back"))
}

/// The exported name of a row, by its place in the table.
fn name_of(row: u16) -> &'static str {
    HOOKS.get(usize::from(row)).and_then(|hook| hook.name.to_str().ok()).unwrap_or_default()
}

/// Before all that a row does, in every process: a call that is under way is waited for by whoever closes the gate later.
macro_rules! enter {
    ($name:ident: $subject:ident::$body:ident) => {
        if const { passes_gate(stringify!($subject), stringify!($body)) } {
            Some(gate::enter(const { Mark::new(Index::$name as u16) }, name_of))
        } else {
            None
        }
    };
    // A question that waits only where it needs the driver. The body finds out the same, so this is one of its calls but for the gate: a handler of a signal finds the thread inside.
    ($name:ident: $subject:ident::$body:ident, unless $is_known:expr) => {
        gate::enter_unless(const { Mark::new(Index::$name as u16) }, name_of, || {
            run::takes_part(Api(stringify!($name))).then(guard::enter).flatten().is_some_and(|_inside| {
                // SAFETY: the arguments are those of this call.
                unsafe { $is_known }
            })
        })
    };
}

/// Behind all that a row does.
macro_rules! leave {
    ($name:ident: $passed:ident) => {
        if let Some(passed) = $passed {
            passed.leave(const { Mark::new(Index::$name as u16) });
        }
    };
}

/// Before the driver's call and behind it, in a process that does not take part as well: it may begin to during the call.
macro_rules! note {
    ($subject:ident::$body:ident) => {
        if const { submits(stringify!($subject), stringify!($body)) } {
            submitted::note();
        }
    };
}

// Every function here has the ABI that may be unwound through: a thread may be cancelled asynchronously, or in the driver.
// No panic comes as far.

/// The driver's function of this name, as its C type; where the driver has none, the program gets `NOT_SUPPORTED`.
macro_rules! real_function {
    ($name:ident($($t:ty),*)) => {{
        let Some(pointer) = SLOTS.get(Index::$name as usize) else { return CuResult::NOT_SUPPORTED };
        // SAFETY: `pointer` is the driver's export of exactly this name, and the row states its C signature.
        let function: unsafe extern "C-unwind" fn($($t),*) -> CuResult = unsafe { std::mem::transmute(pointer) };
        function
    }};
}

macro_rules! trampoline {
    // Of launches and copies, the context is looked for before the call and counted in after it, which cannot panic and needs
    // no guard: so no boundary, of which a launch would feel the twenty nanoseconds. What is only traced takes the same way.
    ($name:ident($($p:ident: $t:ty),*) => submit::$body:ident($($a:ident),*)) => {
        trampoline! { @listens $name($($p: $t),*) => submit::$body($($a),*) }
    };
    // Launches, whose arguments are looked at first where that was asked for. That is a function of its own, so that one
    // which is only counted saves no register for it.
    ($name:ident($($p:ident: $t:ty),*) => launch::$body:ident($($a:ident),*)) => {
        trampoline! { @listens $name($($p: $t),*) => submit::launched(), unless (arguments::are_read()) {
            #[cold]
            unsafe extern "C-unwind" fn looked_at($($p: $t),*) -> CuResult {
                let real = real_function!($name($($t),*));
                let is_ours = run::takes_part(Api(stringify!($name))) && guard::is_outside();
                let context = if is_ours { super::submit::context(Api(stringify!($name))) } else { None };
                // In front of the gate, which this thread may close to move what it is about to use.
                // SAFETY: the program passes these arguments to the driver with this very call.
                let running = if is_ours { unsafe { super::launch::$body(Api(stringify!($name)), context, $($a),*) } } else { None };
                let passed = enter!($name: launch::$body);
                let before = is_ours.then(|| context.map(|context| context.usage()));
                submitted::note();
                // SAFETY: the arguments are the program's own, passed on unchanged.
                let mut result = unsafe { real($($p),*) };
                if let Some(before) = before {
                    if result == CuResult::OUT_OF_MEMORY && super::retry::made_room(Api(stringify!($name))) {
                        // SAFETY: the arguments are still the program's; the driver took nothing of a call that it answered so.
                        result = unsafe { real($($p),*) };
                    }
                    super::submit::launched(Api(stringify!($name)), before, result);
                }
                submitted::note();
                if let Some(running) = running {
                    super::launch::after(Api(stringify!($name)), running);
                }
                leave!($name: passed);
                result
            }
            // SAFETY: the arguments are those of this call.
            return unsafe { looked_at($($p),*) };
        } }
    };
    ($name:ident($($p:ident: $t:ty),*) => rest::$body:ident()) => {
        trampoline! { @listens $name($($p: $t),*) => rest::$body() }
    };
    ($name:ident($($p:ident: $t:ty),*) => pass::$body:ident()) => {
        trampoline! { @listens $name($($p: $t),*) => pass::$body() }
    };
    // Which context is current changes before every call of some frameworks, in ten nanoseconds.
    ($name:ident($($p:ident: $t:ty),*) => current::$body:ident($($a:ident),*)) => {
        trampoline! { @listens $name($($p: $t),*) => current::$body($($a),*) }
    };
    (@listens $name:ident($($p:ident: $t:ty),*) => $subject:ident::$body:ident($($a:ident),*) $(, unless ($other:expr) $way:block)?) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the name is the driver's")]
        pub unsafe extern "C-unwind" fn $name($($p: $t),*) -> CuResult {
            $(if $other $way)?
            let real = real_function!($name($($t),*));
            let passed = enter!($name: $subject::$body);
            note!($subject::$body);
            if !run::takes_part(Api(stringify!($name))) || !guard::is_outside() {
                // SAFETY: the arguments are the program's own, passed on unchanged.
                let result = unsafe { real($($p),*) };
                note!($subject::$body);
                leave!($name: passed);
                return result;
            }
            let before = super::$subject::before(Api(stringify!($name)));
            // SAFETY: the arguments are the program's own, passed on unchanged.
            let mut result = unsafe { real($($p),*) };
            // A launch may need memory, too: for a graph's nodes, or for what the threads of a kernel keep.
            if result == CuResult::OUT_OF_MEMORY && super::retry::made_room(Api(stringify!($name))) {
                // SAFETY: the arguments are still the program's; the driver took nothing of a call that it answered so.
                result = unsafe { real($($p),*) };
            }
            note!($subject::$body);
            super::$subject::$body(Api(stringify!($name)), before, result $(, $a)*);
            leave!($name: passed);
            // Outside the gate, which this thread may close now.
            if const { waits(stringify!($subject), stringify!($body)) } {
                super::rest::over(Api(stringify!($name)), result);
            }
            result
        }
    };
    // NULL, which programs free as a matter of course, ends nothing: it is only traced, as what `pass` has.
    ($name:ident($p:ident: $t:ty) => memory::free($a:ident)) => {
        trampoline! { @answers $name($p: $t) => memory::free($a), unless ($p == 0) {
            let real = real_function!($name($t));
            // SAFETY: the argument is the program's own, passed on unchanged.
            let result = unsafe { real($p) };
            if run::takes_part(Api(stringify!($name))) && guard::is_outside() {
                boundary::trace(Api(stringify!($name)), result);
            }
            return result;
        } }
    };
    // What the driver gave in the order of a stream it takes back within a tenth of a microsecond: such a call is noted and traced, as a launch
    // is, without the boundary.
    ($name:ident($($p:ident: $t:ty),*) => stream_ordered::free($ptr:ident, $stream:ident)) => {
        trampoline! { @answers $name($($p: $t),*) => stream_ordered::free($ptr, $stream), unless (address::is_foreign($ptr) && !unpooled::is_any()) {
            let real = real_function!($name($($t),*));
            let passed = enter!($name: stream_ordered::free);
            note!(stream_ordered::free);
            // SAFETY: the arguments are the program's own, passed on unchanged.
            let result = unsafe { real($($p),*) };
            note!(stream_ordered::free);
            if run::takes_part(Api(stringify!($name))) && guard::is_outside() {
                super::query::passed_on(Api(stringify!($name)), result);
            }
            leave!($name: passed);
            return result;
        } }
    };
    // Nor does it take much longer to give it. The body sees the answer only where there is something to do about it, as if it had made the call.
    ($name:ident($($p:ident: $t:ty),*) => stream_ordered::allocate($($a:ident),*)) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the name is the driver's")]
        pub unsafe extern "C-unwind" fn $name($($p: $t),*) -> CuResult {
            let function = real_function!($name($($t),*));
            let call = move || {
                // SAFETY: the arguments are the program's own, passed on unchanged; what they must fulfil is between it
                // and the driver.
                unsafe { function($($p),*) }
            };
            let passed = enter!($name: stream_ordered::allocate);
            note!(stream_ordered::allocate);
            let is_ours = run::takes_part(Api(stringify!($name))) && guard::is_outside();
            let mut result = call();
            if is_ours && super::stream_ordered::is_over(result) {
                boundary::trace(Api(stringify!($name)), result);
            } else if is_ours && let Some(_inside) = guard::enter() {
                let mut answer = Some(result);
                let mut first_made = move || answer.take().unwrap_or_else(call);
                result = boundary::run(Api(stringify!($name)), &mut first_made, |real| {
                    // SAFETY: the body reads or writes through the program's pointers only as the driver would: outputs after
                    // a success, where they are not NULL.
                    unsafe { super::stream_ordered::allocate(real, $($a),*) }
                });
            }
            note!(stream_ordered::allocate);
            leave!($name: passed);
            result
        }
    };
    // Questions about an address. Frameworks ask them of every pointer, and of most of them only the driver knows anything: such a
    // call is only traced, as what `pass` has.
    ($name:ident($($p:ident: $t:ty),*) => query::pointer_attribute($data:ident, $attribute:ident, $ptr:ident)) => {
        trampoline! { @asks $name($($p: $t),*) => query::pointer_attribute($data, $attribute, $ptr), about $ptr }
    };
    ($name:ident($($p:ident: $t:ty),*) => query::pointer_attributes($count:ident, $attributes:ident, $data:ident, $ptr:ident)) => {
        trampoline! { @asks $name($($p: $t),*) => query::pointer_attributes($count, $attributes, $data, $ptr), about $ptr }
    };
    ($name:ident($($p:ident: $t:ty),*) => query::address_range($base:ident, $size:ident, $ptr:ident)) => {
        trampoline! { @asks $name($($p: $t),*) => query::address_range($base, $size, $ptr), about $ptr }
    };
    (@asks $name:ident($($p:ident: $t:ty),*) => query::$body:ident($($a:ident),*), about $ptr:ident) => {
        trampoline! { @answers $name($($p: $t),*) => query::$body($($a),*), unless (address::stays_the_drivers($ptr)) {
            let real = real_function!($name($($t),*));
            // SAFETY: the arguments are the program's own, passed on unchanged.
            let result = unsafe { real($($p),*) };
            if run::takes_part(Api(stringify!($name))) && guard::is_outside() {
                super::query::passed_on(Api(stringify!($name)), result);
            }
            return result;
        }, known (super::query::known::$body($($a),*)) }
    };
    // What is given a handle, or a list of them: the driver is to have another than the program's. The body gets the call as a
    // function of that argument, which comes first and takes the place of the program's.
    ($name:ident($($p:ident: $t:ty),*) => handle::$body:ident($handle:ident $(, $a:ident)*)) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the name is the driver's")]
        pub unsafe extern "C-unwind" fn $name($($p: $t),*) -> CuResult {
            let function = real_function!($name($($t),*));
            let with = move |$handle| {
                // SAFETY: the arguments are the program's own but for one, which means the same to the driver.
                unsafe { function($($p),*) }
            };
            let passed = enter!($name: handle::$body);
            note!(handle::$body);
            let Some(_inside) = run::takes_part(Api(stringify!($name))).then(guard::enter_sheltered).flatten() else {
                let result = with(super::handle::Unseen::unseen($handle));
                note!(handle::$body);
                leave!($name: passed);
                return result;
            };
            let result = boundary::run(Api(stringify!($name)), &mut move || with(super::handle::Unseen::unseen($handle)), |real| {
                // SAFETY: a body reads or writes through the program's pointers only as the driver would: inputs as the driver
                // reads them, and outputs after a success.
                unsafe { super::handle::$body(real, with, $handle $(, $a)*) }
            });
            note!(handle::$body);
            leave!($name: passed);
            result
        }
    };
    ($name:ident($($p:ident: $t:ty),*) => $subject:ident::$body:ident($($a:ident),*)) => {
        trampoline! { @answers $name($($p: $t),*) => $subject::$body($($a),*) }
    };
    (@answers $name:ident($($p:ident: $t:ty),*) => $subject:ident::$body:ident($($a:ident),*) $(, unless ($other:expr) $way:block)? $(, known ($known:expr))?) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the name is the driver's")]
        pub unsafe extern "C-unwind" fn $name($($p: $t),*) -> CuResult {
            $(if $other $way)?
            let function = real_function!($name($($t),*));
            let call = move || {
                // SAFETY: the arguments are the program's own, passed on unchanged; what they must fulfil is between it
                // and the driver.
                unsafe { function($($p),*) }
            };
            let enter = const { if is_quick(stringify!($subject), stringify!($body)) { guard::enter } else { guard::enter_sheltered } };
            let passed = enter!($name: $subject::$body $(, unless $known)?);
            note!($subject::$body);
            let Some(_inside) = run::takes_part(Api(stringify!($name))).then(enter).flatten() else {
                let result = call();
                note!($subject::$body);
                leave!($name: passed);
                return result;
            };
            let result = boundary::run(Api(stringify!($name)), &mut { call }, |real| {
                // SAFETY: a body reads or writes through the program's pointers only as the driver would: outputs after
                // a success, where they are not NULL.
                unsafe { super::$subject::$body(real, $($a),*) }
            });
            note!($subject::$body);
            leave!($name: passed);
            result
        }
    };
}

macro_rules! trampolines {
    ($($name:ident($($p:ident: $t:ty),* $(,)?) => $subject:ident::$body:ident($($a:ident),*);)*) => {
        /// A row's place in the table.
        #[allow(non_camel_case_types, reason = "the names are the driver's")]
        enum Index { $($name),* }

        /// Rows in the table.
        const ROWS: usize = [$(stringify!($name)),*].len();

        /// Every exported function, in the table's order.
        pub static HOOKS: [Hook; ROWS] = [$(Hook {
            name: c_name(concat!(stringify!($name), "\0").as_bytes()),
            ours: $name as *const c_void,
        }),*];

        /// The driver's function behind each row.
        pub static SLOTS: Slots<ROWS> = Slots::new(
            &HOOKS,
            Unhooked {
                is_known: submitted::is_harmless,
                found: |name| submitted::goes_unseen(Unseen::Function, name),
            },
        );

        /// Which rows note what they submit, in the table's order.
        #[cfg(test)]
        static NOTED: [bool; ROWS] = [$(submits(stringify!($subject), stringify!($body))),*];

        /// Which rows pass the gate, in the table's order.
        #[cfg(test)]
        static GATED: [bool; ROWS] = [$(passes_gate(stringify!($subject), stringify!($body))),*];

        $(trampoline! { $name($($p: $t),*) => $subject::$body($($a),*) })*
    };
}
for_each_hook!(trampolines);

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_row_is_a_driver_name_of_its_own() {
        let names: HashSet<_> = HOOKS.iter().map(|hook| hook.name).collect();
        assert_eq!(names.len(), ROWS);
        for name in names {
            assert!(
                matches!(name.to_bytes(), [b'c', b'u', b'A'..=b'Z', ..]),
                "{name:?} would not pass the dlsym filter"
            );
        }
    }

    #[test]
    fn every_row_notes_what_it_submits_or_is_known_to_submit_nothing() {
        for (hook, noted) in HOOKS.iter().zip(NOTED) {
            let is_harmless = submitted::is_harmless(hook.name.to_bytes());
            assert_ne!(noted, is_harmless, "{:?}: noted {noted}, harmless {is_harmless}", hook.name);
        }
    }

    #[test]
    fn what_submits_begins_a_capture_or_looks_at_mappings_passes_the_gate() {
        let looks = |name: &str| {
            let beginnings = ["cuStreamBegin", "cuPointer", "cuMemGetAddressRange", "cuIpcGetMemHandle", "cuTex"];
            let graph = name.starts_with("cuGraph");
            let of_graph =
                ["Memcpy", "Memset", "BatchMemOp", "AddNode", "AddChild", "ExecUpdate", "Clone", "Instantiate"];
            let own = [
                "cuMemMap",
                "cuMemUnmap",
                "cuMemSetAccess",
                "cuMemRetain",
                "cuMemExport",
                "cuMemRelease",
                "cuMulticastBind",
                "cuMemGetHandleForAddressRange",
            ];
            beginnings.iter().chain(&own).any(|word| name.starts_with(word))
                || graph && of_graph.iter().any(|word| name.contains(word))
        };
        let mut looking = 0;
        for ((hook, noted), gated) in HOOKS.iter().zip(NOTED).zip(GATED) {
            let name = hook.name.to_str().unwrap();
            looking += usize::from(looks(name));
            assert!(gated || !(noted || looks(name)), "{name} does not pass the gate");
        }
        assert!(looking > 40, "{looking}");
        for name in ["cuMemAlloc_v2", "cuMemFree_v2", "cuCtxSynchronize", "cuMemGetInfo_v2", "cuCtxDestroy_v2"] {
            let row = HOOKS.iter().position(|hook| hook.name.to_str() == Ok(name)).unwrap();
            assert!(!GATED[row], "{name} waits for what others hold");
        }
    }

    /// The declarations of the driver that this is built with, from the source of its crate.
    #[test]
    fn every_function_that_is_declared_is_hooked_or_known_to_submit_nothing() {
        let mut cargo = std::process::Command::new(env!("CARGO"));
        // Of this platform's packages alone: what others need is not on a machine that has only built this.
        let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let metadata = cargo.args(["metadata", "--format-version=1", "--offline", "--filter-platform", &platform]);
        let told = metadata.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
        let told: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
        let package = told["packages"].as_array().unwrap().iter().find(|package| package["name"] == "cudarc").unwrap();
        let root = std::path::Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap();
        let source = std::fs::read_to_string(root.join("src/driver/sys/mod.rs")).unwrap();
        let declared: HashSet<&str> = source
            .lines()
            .filter_map(|line| line.trim_start().strip_prefix("pub unsafe fn ")?.split(['(', '<']).next())
            .filter(|name| matches!(name.as_bytes(), [b'c', b'u', b'A'..=b'Z', ..]))
            .collect();
        assert!(declared.len() > 450, "{} declarations", declared.len());
        let hooked: HashSet<&str> = HOOKS.iter().map(|hook| hook.name.to_str().unwrap()).collect();
        let unknown = |name: &&str| !hooked.contains(name) && !submitted::is_harmless(name.as_bytes());
        let unknown: Vec<&str> = declared.into_iter().filter(unknown).collect();
        assert!(unknown.is_empty(), "nobody has looked at {unknown:?}: hook them, or see watch/submitted/names.rs");
    }

    #[test]
    fn a_row_and_its_hook_have_the_same_index() {
        assert_eq!(HOOKS[Index::cuInit as usize].name, c"cuInit");
        assert_eq!(HOOKS[Index::cuMemAlloc_v2 as usize].name, c"cuMemAlloc_v2");
    }
}
