//! Who asks for pinned memory: frameworks whose allocators are known, and the program's own lines.

use gpupool_events::{NativeFrame, Site};
use std::fs;
use std::path::Path;

/// A framework with an allocator of pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Framework {
    pub name: &'static str,
    /// Its allocator asks for powers of two.
    pub rounds: bool,
    /// What else to do about that, in words.
    pub remedy: &'static str,
}

/// By a part of the path of the library that asks the driver. All of these keep what they were given until the process
/// ends, by design, so nothing of theirs is a leak.
const FRAMEWORKS: &[(&str, Framework)] = &[
    ("/libc10_cuda.so", PYTORCH),
    ("/libtorch_cuda.so", PYTORCH),
    ("/libtorch_cpu.so", PYTORCH),
    ("/cupy/cuda/pinned_memory", CUPY),
    ("/libnccl.so", keeps("NCCL")),
    ("/libcublas", keeps("cuBLAS")),
    ("/libcudnn", keeps("cuDNN")),
    ("/jaxlib/", keeps("JAX")),
    ("/xla_cuda_plugin.so", keeps("JAX")),
    ("/librmm.so", keeps("RMM")),
];

const PYTORCH: Framework = Framework { name: "PyTorch", rounds: true, remedy: "" };

const CUPY: Framework = Framework {
    name: "CuPy",
    rounds: true,
    remedy: "; its pool can be turned off with cupy.cuda.set_pinned_memory_allocator(None), as gpupool pools too",
};

const fn keeps(name: &'static str) -> Framework {
    Framework { name, rounds: false, remedy: "" }
}

/// The framework whose allocator made this call: the innermost of the libraries that is one. The driver and the runtime
/// stand between, and behind it the program.
pub fn framework(site: &Site) -> Option<Framework> {
    let of = |frame: &NativeFrame| FRAMEWORKS.iter().find(|(part, _)| frame.object.contains(part));
    site.native.iter().find_map(of).map(|(_, framework)| *framework)
}

/// What makes two places one: the program's line where Python is running, else all native frames, for a program that the
/// runtime is linked into has the same innermost one everywhere.
pub fn identity(site: &Site) -> String {
    match site.program_frame() {
        Some(frame) => frame.to_string(),
        None => site.native.iter().map(|frame| format!("{}+{:x}\n", frame.object, frame.offset)).collect(),
    }
}

/// What places have in common that are reached through one function: the innermost frame. A library that does something
/// wrong does so for each line that calls it, and is one thing to mend.
pub fn cause(site: &Site) -> String {
    let python = site.python.first().map(ToString::to_string);
    let native = || site.native.first().map(|frame| format!("{}+{:x}", frame.object, frame.offset));
    python.or_else(native).unwrap_or_default()
}

/// Whether two places are one line of a Python program.
pub fn same_line(one: &Site, other: &Site) -> bool {
    one.program_frame().is_some() && one.program_frame() == other.program_frame()
}

/// The version of the CuPy that made this call, from the folder that its package was installed in beside it:
/// `site-packages/cupy_cuda12x-12.3.0.dist-info`.
pub fn cupy_version(site: &Site) -> Option<String> {
    let file = |frame: &str| frame.split_once("/cupy/").map(|(packages, _)| packages.to_owned());
    let python = site.python.iter().find_map(|frame| file(&frame.file));
    let packages = python.or_else(|| site.native.iter().find_map(|frame| file(&frame.object)))?;
    let names = fs::read_dir(Path::new(&packages)).ok()?.flatten();
    names.filter_map(|entry| version_in(&entry.file_name().to_string_lossy())).next()
}

/// `cupy_cuda12x-12.3.0.dist-info` → `12.3.0`.
fn version_in(name: &str) -> Option<String> {
    let (package, version) = name.strip_suffix(".dist-info")?.rsplit_once('-')?;
    let is_cupy = package == "cupy" || package.starts_with("cupy_cuda") || package.starts_with("cupy_rocm");
    is_cupy.then(|| version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_events::PyFrame;

    fn native(objects: &[&str]) -> Site {
        let frame = |object: &&str| NativeFrame { object: (*object).to_owned(), symbol: None, offset: 1 };
        Site { native: objects.iter().map(frame).collect(), ..Site::default() }
    }

    #[test]
    fn a_framework_is_known_by_the_library_that_asks() {
        let of = |objects: &[&str]| framework(&native(objects)).map(|framework| (framework.name, framework.rounds));
        assert_eq!(
            of(&["/x/libcudart.so.13", "/x/torch/lib/libc10_cuda.so", "/usr/bin/python3"]),
            Some(("PyTorch", true))
        );
        assert_eq!(of(&["/p/cupy/cuda/pinned_memory.cpython-312-x86_64-linux-gnu.so"]), Some(("CuPy", true)));
        assert_eq!(of(&["/x/libnccl.so.2", "/x/libtorch_cuda.so"]), Some(("NCCL", false)));
        assert_eq!(of(&["/home/ada/train"]), None);
    }

    #[test]
    fn the_version_of_cupy_is_read_off_its_package() {
        let packages = std::env::temp_dir().join(format!("gpupool-cupy-{}", std::process::id()));
        for name in ["cupy", "numpy-2.1.0.dist-info", "cupyx_of_others-3.0.dist-info", "cupy_cuda12x-12.3.0.dist-info"]
        {
            fs::create_dir_all(packages.join(name)).unwrap();
        }
        let file = packages.join("cupy/_creation/from_data.py").display().to_string();
        let site = Site { python: vec![PyFrame { file, line: 88, function: "asarray".to_owned() }], ..Site::default() };
        assert_eq!(cupy_version(&site).as_deref(), Some("12.3.0"));
        fs::remove_dir_all(&packages).unwrap();
        assert_eq!(cupy_version(&site), None);
        assert_eq!(cupy_version(&Site::default()), None);
    }

    #[test]
    fn one_line_is_one_place_whatever_lies_below_it() {
        let line = |line| Site {
            python: vec![PyFrame { file: "train.py".to_owned(), line, function: "step".to_owned() }],
            ..native(&["/lib/a.so"])
        };
        assert_eq!(identity(&line(3)), identity(&Site { native: Vec::new(), ..line(3) }));
        assert!(same_line(&line(3), &line(3)) && !same_line(&line(3), &line(4)));
        assert_ne!(identity(&native(&["/lib/a.so"])), identity(&native(&["/lib/b.so"])));
        assert_eq!(cause(&native(&["/lib/a.so", "/lib/b.so"])), cause(&native(&["/lib/a.so", "/bin/c"])));
        assert_ne!(cause(&line(3)), cause(&line(4)));
        assert!(!same_line(&native(&["/lib/a.so"]), &native(&["/lib/a.so"])), "a whole function is no line");
    }
}
