"""Compiles the programs of the checks, each once a run."""

import glob
import os
import pathlib
import shutil
import subprocess

from running import Failed, NotRun

TESTS = pathlib.Path(__file__).resolve().parent.parent


def _compiler():
    compiler = os.environ.get("CC", "cc")
    if not shutil.which(compiler):
        raise NotRun(f"no C compiler ({compiler}); install gcc or set CC")
    return compiler


def _build(lab, command):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    lab.note(f"$ {' '.join(map(str, command))}\n{result.stdout}{result.stderr}".rstrip())
    if result.returncode:
        reason = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
        made = pathlib.Path(command[command.index("-o") + 1]).name
        raise Failed(f"{made} does not compile: {reason}")


def _driver_library():
    """The file to link with: the driver's own, or the toolkit's stand-in, which has the same soname."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    # Not on every user's PATH.
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout.splitlines()
    paths = [line.split("=>")[1].strip() for line in listed if "libcuda.so" in line and "=>" in line]
    folders += [os.path.dirname(path) for path in paths]
    folders += ["/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", *glob.glob("/usr/local/cuda*/lib64/stubs")]
    for folder in filter(None, folders):
        for name in ("libcuda.so.1", "libcuda.so"):
            if os.path.exists(f"{folder}/{name}"):
                return f"{folder}/{name}"
    raise NotRun("libcuda.so.1 is not where ldconfig, LD_LIBRARY_PATH or the CUDA toolkit have it")


def program(lab, name):
    """The compiled tests/programs/NAME.c. Called by several threads for different names."""
    binary = pathlib.Path(lab.folder.name) / name
    if not binary.exists():
        source = TESTS / "programs" / f"{name}.c"
        flags = ["-std=c11", "-O1", "-g", "-pthread", "-Wl,--as-needed"]
        _build(lab, [_compiler(), *flags, "-o", binary, source, _driver_library(), "-ldl"])
    return binary


def bench(lab, name):
    """The compiled tests/bench/NAME.c."""
    binary = pathlib.Path(lab.folder.name) / name
    if not binary.exists():
        _build(lab, [_compiler(), "-O2", "-pthread", "-o", binary, TESTS / "bench" / f"{name}.c", "-ldl"])
    return binary


def watcher(lab, name):
    """The compiled tests/gpu/NAME.c, a program that looks at the driver from outside."""
    binary = pathlib.Path(lab.folder.name) / name
    if not binary.exists():
        _build(lab, [_compiler(), "-std=c11", "-O1", "-g", "-pthread", "-o", binary, TESTS / "gpu" / f"{name}.c", "-ldl"])
    return binary


def preloaded(lab, name):
    """The compiled tests/gpu/NAME.c, which is preloaded in place of the library."""
    return library(lab, name, TESTS / "gpu")


def library(lab, name, folder=TESTS / "gpu" / "clients"):
    """The compiled clients/NAME.c, which a client loads."""
    made = pathlib.Path(lab.folder.name) / f"{name}.so"
    if not made.exists():
        _build(lab, [_compiler(), "-O2", "-shared", "-fPIC", "-o", made, folder / f"{name}.c", "-ldl"])
    return made


def rmm_program(lab, name, folder):
    """The compiled tests/bench/NAME.cpp, with RMM's headers and libraries from a folder that pip filled (--target)."""
    compiler, nvcc = shutil.which("g++"), shutil.which("nvcc")
    if not compiler or not nvcc:
        raise NotRun("needs g++ and the CUDA toolkit")
    binary = pathlib.Path(lab.folder.name) / name
    toolkit = pathlib.Path(os.path.realpath(nvcc)).parent.parent
    roots = [pathlib.Path(folder) / "librmm", pathlib.Path(folder) / "rapids_logger"]
    # RMM brings the CUDA C++ library that it is written against; it must be found before the toolkit's.
    includes = [roots[0] / "include", roots[0] / "include" / "rapids", roots[1] / "include", toolkit / "include"]
    libraries = [root / "lib64" for root in roots] + [toolkit / "lib64"]
    if not binary.exists():
        flags = ["-std=c++20", "-O2", "-pthread", *[f"-I{path}" for path in includes]]
        link = [f"-L{path}" for path in libraries] + [f"-Wl,-rpath,{path}" for path in libraries]
        named = ["-l:librmm.so", "-l:librapids_logger.so", "-lcudart"]
        _build(lab, [compiler, *flags, "-o", binary, TESTS / "bench" / f"{name}.cpp", *link, *named])
    return binary


def cuda_program(lab, name, runtime="static"):
    """The compiled tests/gpu/NAME.cu with a static or a shared runtime."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        raise NotRun("nvcc is neither on PATH nor in /usr/local/cuda/bin")
    folder = pathlib.Path(lab.folder.name)
    unlinked, binary = folder / f"{name}.o", folder / f"{name}-{runtime}"
    if not unlinked.exists():
        _build(lab, [nvcc, "-O2", "-std=c++17", "-c", "-o", unlinked, TESTS / "gpu" / f"{name}.cu"])
    if not binary.exists():
        libraries = pathlib.Path(os.path.realpath(nvcc)).parent.parent / "lib64"
        _build(lab, [nvcc, "-cudart", runtime, "-Xlinker", f"-rpath={libraries}", "-o", binary, unlinked, "-ldl"])
    return binary
