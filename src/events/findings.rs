//! What can be wrong with a program's use of its GPUs. One table; the log, the summary, `gpupool report` and
//! `gpupool explain` all speak from it.

/// One kind of mistake, by its code. Codes never change their meaning and are never given twice.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    /// `GP001`.
    pub code: &'static str,
    /// A few words.
    pub title: &'static str,
    /// What to do, in one line.
    pub fix: &'static str,
    /// What it means, what it costs, how it comes about and how to mend it: plain text of at most 78 columns, code
    /// indented by four.
    pub explain: &'static str,
}

/// Declares a constant for every finding and the table of them. The long texts are files of their own: they are read as
/// text, not as code.
macro_rules! findings {
    ($($(#[$doc:meta])* $name:ident = $code:literal { title: $title:literal, fix: $fix:literal, })+) => {
        impl Finding {
            $(
                $(#[$doc])*
                pub const $name: Finding = Finding {
                    code: $code,
                    title: $title,
                    fix: $fix,
                    explain: include_str!(concat!("findings/", $code, ".txt")),
                };
            )+
        }

        /// Every finding, by code.
        pub const FINDINGS: &[Finding] = &[$(Finding::$name),+];
    };
}

findings! {
    /// A primary context that was made and never used.
    STRAY_CONTEXT = "GP001" {
        title: "A context that nobody uses",
        fix: "choose the GPU before that line (torch.cuda.set_device(i), cupy.cuda.Device(i).use(), cudaSetDevice(i)) or \
              name it in the call",
    }
    /// Two or more ranks of a job with a context on one GPU.
    RANKS_ON_ONE_GPU = "GP002" {
        title: "Several ranks of a job on one GPU",
        fix: "call torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"])) before anything else touches CUDA",
    }
    /// `cuCtxEnablePeerAccess` and its runtime form need a context on both sides.
    PEER_ACCESS = "GP003" {
        title: "A context made by enabling peer access",
        fix: "enable peer access only between GPUs that both compute; memory that gpupool takes from other GPUs needs none",
    }
    /// Each GPU was made current in turn, only to be looked at.
    DEVICE_SWEEP = "GP004" {
        title: "Contexts made by looking at every GPU in turn",
        fix: "ask with calls that need no context: cudaGetDeviceProperties, cudaDeviceGetAttribute, \
              torch.cuda.get_device_properties, NVML",
    }
    /// `CUDA_VISIBLE_DEVICES` or `CUDA_DEVICE_ORDER` changed after `cuInit`.
    ENVIRONMENT_TOO_LATE = "GP005" {
        title: "CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER set too late",
        fix: "set it before the program starts, or above every import that touches CUDA",
    }
    /// `fork` after `cuInit`.
    FORK_AFTER_INIT = "GP006" {
        title: "A fork after CUDA was initialised",
        fix: "start workers with multiprocessing.set_start_method(\"spawn\"), or fork before the first CUDA call",
    }
    /// Code loaded on a GPU that never runs it.
    MODULE_ELSEWHERE = "GP007" {
        title: "A module loaded on another GPU than the one that runs it",
        fix: "make the GPU current before the module is built: with cupy.cuda.Device(i): …, with torch.cuda.device(i): …",
    }
    /// Every kernel of a module was loaded at once.
    EAGER_MODULES = "GP008" {
        title: "Modules loaded eagerly",
        fix: "start the program with CUDA_MODULE_LOADING=LAZY, or unset it where the driver is 12.2 or newer",
    }
    /// Device `malloc` with the 8 MiB it has unless told otherwise.
    DEVICE_HEAP_DEFAULT = "GP009" {
        title: "Device malloc with a heap of the default size",
        fix: "set GPUPOOL_MALLOC_HEAP_SIZE=256MiB, or call cudaDeviceSetLimit(cudaLimitMallocHeapSize, bytes) before the \
              first kernel",
    }
    /// A heap or stack limit set when the driver no longer heeds it.
    LIMIT_TOO_LATE = "GP010" {
        title: "A limit of the device set too late",
        fix: "set the limit right after choosing the GPU, before the first kernel; or set GPUPOOL_MALLOC_HEAP_SIZE, \
              GPUPOOL_STACK_SIZE or GPUPOOL_PRINTF_FIFO_SIZE",
    }
    /// `GPUPOOL_CONTEXTS=deny` refused a context.
    CONTEXT_DENIED = "GP011" {
        title: "A context refused by GPUPOOL_CONTEXTS=deny",
        fix: "use a GPU of GPUPOOL_CONTEXT_DEVICES at that line, or add this GPU to the list",
    }
    /// A framework's allocator asked for powers of two, and copies reached only a part.
    PINNED_ROUNDED = "GP012" {
        title: "Pinned memory rounded up to powers of two",
        fix: "keep the bytes of a batch just below a power of two, or pin a few buffers once and copy into them",
    }
    /// One place pins more and more, and frees nothing.
    PINNED_GROWING = "GP013" {
        title: "Pinned memory that keeps growing",
        fix: "allocate the buffers once before the loop and use them again, or free each when its copy is done",
    }
    /// Data that is in pinned memory goes to the GPU through another pinned buffer.
    STAGED_TWICE = "GP014" {
        title: "Data staged through a second pinned buffer",
        fix: "copy from the pinned memory itself; CuPy before 13 takes a second buffer in any case: upgrade it",
    }
    /// The driver spent a good part of the process's time on pinning.
    PINNING_SLOW = "GP015" {
        title: "Time lost in pinning memory",
        fix: "pin a few buffers once and use them again; with GPUPOOL_PINNED=pool, freed memory stays pinned for \
              GPUPOOL_PINNED_IDLE",
    }
    /// `cuMemHostRegister` of what is registered.
    REGISTERED_TWICE = "GP016" {
        title: "Memory registered twice",
        fix: "register each piece of memory once, where it is allocated, and unregister it before it is freed",
    }
    /// Pinned memory that nobody freed, in pieces.
    PINNED_LEAKED = "GP017" {
        title: "Pinned memory that was never freed",
        fix: "free each piece when the copies out of it are done (cudaFreeHost), or use one piece again",
    }
    /// `GPUPOOL_PINNED_LIMIT`.
    PINNED_LIMIT = "GP018" {
        title: "More pinned memory than GPUPOOL_PINNED_LIMIT",
        fix: "hold less pinned memory at a time at that line, or set GPUPOOL_PINNED_LIMIT to what the host can spare",
    }
    /// A function that reads memory on another GPU or the host, and loses time by it.
    FAR_MEMORY = "GP019" {
        title: "Far memory that is read again and again",
        fix: "set GPUPOOL_MOVE=auto where it is off, place what is read most with gpupool_prefetch, or make the working set \
              smaller",
    }
    /// The guard stopped moves.
    MOVES_UNPAID = "GP020" {
        title: "Moves of memory that did not pay",
        fix: "make what the program uses at a time smaller, or place it by hand with gpupool_prefetch and gpupool_anchor",
    }
    /// Something would have moved, and the GPUs were never at rest.
    NEVER_QUIET = "GP021" {
        title: "GPUs that never come to rest for a move",
        fix: "wait for the GPU between steps, end kernels that wait for the host, or capture before memory is far",
    }
    /// Memory of a suspended program that is still on its GPU.
    STAYED_SUSPENDED = "GP022" {
        title: "Memory that did not leave with a suspended program",
        fix: "suspend the processes that share it together, or end what holds it: gpupool explain GP022 names what that can be",
    }
    /// Somebody came to a GPU where memory is borrowed, and there is no room elsewhere for what is to leave.
    STAYED_LENT = "GP023" {
        title: "Borrowed memory that could not be given back",
        fix: "give it room elsewhere (GPUPOOL_HOST_LIMIT, memory of the host), or have the program borrow less: GPUPOOL_LIMIT for that GPU, GPUPOOL_DEVICES",
    }
}

impl Finding {
    /// What to do, in one line, where the facts of one name its `cause`: what helps against one is no use against another.
    pub fn fix_for(&self, cause: Option<&str>) -> &'static str {
        match (self.code, cause) {
            ("GP019", Some("drained")) => {
                "let it have its GPU again (gpupool undrain GPU), or move the program to another one"
            }
            ("GP019", Some("away" | "others")) => {
                "make room on that GPU: end what others have there, or have them leave it (gpupool suspend, gpupool ps); what left comes back then"
            }
            ("GP022", Some("room")) => {
                "give it more room (free memory of the host, GPUPOOL_HOST_LIMIT, GPUPOOL_LIMIT), or have its memory go to a disk: gpupool suspend --to DIR PID"
            }
            ("GP022", Some("host_limit")) => {
                "raise GPUPOOL_HOST_LIMIT before the program starts, or have its memory go to a disk: gpupool suspend --to DIR PID"
            }
            ("GP022", Some("gpu_limit")) => {
                "raise GPUPOOL_LIMIT of that GPU (gpupool set PID limit=…), or let it go to the host as well: gpupool suspend --to any PID"
            }
            ("GP022", Some("addresses")) => {
                "let the process map more (ulimit -v unlimited, before it starts), or have its memory go to a disk: gpupool suspend --to DIR PID"
            }
            ("GP022", Some("reach")) => {
                "suspend the program while it has a context on that GPU, or on one that has a way there (gpupool doctor shows them)"
            }
            ("GP022", Some("nowhere")) => {
                "let it go to the host (gpupool suspend --to host PID), or give it a GPU that lends to it (GPUPOOL_DEVICES)"
            }
            ("GP022", Some("streams")) => {
                "free what cudaMallocAsync gave before the program is suspended, or have all of it leave: gpupool suspend --process --to host PID"
            }
            ("GP022", Some("unpooled")) => {
                "give the pool room on that GPU (GPUPOOL_LIMIT), or have all of it leave: gpupool suspend --process --to host PID"
            }
            ("GP022", Some("kind")) => {
                "only the driver can take it along: gpupool suspend --process --to host PID has it try"
            }
            ("GP022", Some("siblings")) => {
                "suspend all ranks of the job: gpupool suspend --job PID, or name all of them; --alone where the others do not wait for this one"
            }
            ("GP022", Some("ill")) => "have its memory leave the GPU that had the error first: gpupool drain GPU",
            ("GP022", Some("driver" | "ending" | "past" | "came")) => {
                "resume the program and suspend it again; where it stays so, gpupool explain GP022 says more"
            }
            _ => self.fix,
        }
    }
}

/// The finding with this code, in any case.
pub fn finding(code: &str) -> Option<&'static Finding> {
    FINDINGS.iter().find(|finding| finding.code.eq_ignore_ascii_case(code))
}

/// The finding that somebody who wrote `code` most likely meant, by its number: `GP5`, `5` and `GPO05` are GP005.
pub fn nearest_finding(code: &str) -> &'static Finding {
    let digits: String = code.chars().filter(char::is_ascii_digit).collect();
    // More digits than fit are a large number all the same.
    let number = if digits.is_empty() { 1 } else { digits.parse().unwrap_or(usize::MAX) };
    // The codes are numbered from 1 without gaps.
    &FINDINGS[number.clamp(1, FINDINGS.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_count_up_from_one() {
        for (index, finding) in FINDINGS.iter().enumerate() {
            assert_eq!(finding.code, format!("GP{:03}", index + 1));
        }
    }

    #[test]
    fn texts_fit_the_terminal_and_say_something() {
        for finding in FINDINGS {
            assert!(finding.title.chars().count() <= 60 && finding.title.is_ascii(), "{}", finding.code);
            assert!(!finding.fix.contains('\n') && !finding.fix.ends_with('.'), "{}", finding.code);
            let causes = ["room", "addresses", "nowhere", "streams", "ill", "driver", "shared"].map(Some);
            let mut fixes = causes.into_iter().chain([None]).map(|cause| finding.fix_for(cause));
            assert!(fixes.all(|fix| !fix.contains('\n') && !fix.ends_with('.')), "{}", finding.code);
            assert!(finding.explain.split("\n\n").count() >= 3, "{}: too short to explain", finding.code);
            assert!(finding.explain.ends_with('\n') && finding.explain.is_ascii(), "{}", finding.code);
            for line in finding.explain.lines() {
                assert!(line.len() <= 78 && line.trim_end() == line, "{}: {line}", finding.code);
            }
        }
    }

    #[test]
    fn what_helps_depends_on_the_cause_where_the_facts_name_one() {
        let fix = |cause| Finding::STAYED_SUSPENDED.fix_for(cause);
        assert!(fix(Some("room")).contains("--to DIR") && fix(Some("addresses")).contains("ulimit"));
        assert!(fix(Some("siblings")).contains("--job PID"));
        assert_eq!((fix(Some("pages")), fix(None)), (Finding::STAYED_SUSPENDED.fix, Finding::STAYED_SUSPENDED.fix));
        assert_eq!(Finding::STRAY_CONTEXT.fix_for(Some("room")), Finding::STRAY_CONTEXT.fix);
    }

    #[test]
    fn codes_are_found_in_any_case_and_slips_are_understood() {
        assert_eq!(finding("gp005"), Some(&Finding::ENVIRONMENT_TOO_LATE));
        assert_eq!(finding("GP5"), None);
        for (slip, meant) in [
            ("GP5", "GP005"),
            ("5", "GP005"),
            ("GP0011", "GP011"),
            ("GP099", "GP023"),
            ("GP000", "GP001"),
            ("", "GP001"),
        ] {
            assert_eq!(nearest_finding(slip).code, meant, "{slip}");
        }
        assert_eq!(nearest_finding("99999999999999999999").code, "GP023");
    }
}
