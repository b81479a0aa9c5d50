"""Writes the wheel: python3 wheel.py --stage FOLDER --notices FOLDER --output FOLDER [--expect TAG]

The staged files are a command, libraries and a program, ready made. No build backend writes such a wheel: maturin takes binaries that
cargo builds for it, but neither libraries that are ready nor further programs, and would build ours a second time. A wheel is a zip with
three files about it (PEP 427, PEP 639, PEP 770), and the same content gives the same bytes: order, times and modes are fixed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]
#: What the files may need of a machine besides the C library's own parts: the compiler's unwinder, which manylinux allows.
LIBRARIES = {"libgcc_s.so.1", "libc.so.6", "libdl.so.2", "libpthread.so.0", "libm.so.6", "librt.so.1", "ld-linux-x86-64.so.2"}
#: The largest that the index's users should have to fetch.
MOST = 6_000_000


def version() -> str:
    """The workspace's, which is everything's."""
    found = re.search(r'^version = "([^"]+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    if not found:
        sys.exit("Cargo.toml has no version")
    return found[1]


def needs(file: Path) -> tuple[int, int]:
    """The newest version of glibc that an executable or library needs; ends the program for a library that not every machine has."""
    told = subprocess.run(["objdump", "-p", str(file)], capture_output=True, text=True, check=True).stdout
    foreign = set(re.findall(r"^ *NEEDED +(\S+)", told, re.MULTILINE)) - LIBRARIES
    if foreign:
        sys.exit(f"{file} needs {', '.join(sorted(foreign))}, which not every machine has")
    # A linker with an old glibc's symbols leaves one that is newer without a version, and the loader of the old one stops there.
    symbols = subprocess.run(["objdump", "-T", str(file)], capture_output=True, text=True, check=True).stdout
    unknown = re.findall(r"^[0-9a-f]+ {2}[ g] {3}D\S* +\*UND\*\t[0-9a-f]+ {10,}(\S+)$", symbols, re.MULTILINE)
    if unknown:
        sys.exit(f"{file} needs {', '.join(sorted(unknown))}, which the C library that it was linked against does not have")
    # The loader passes over a missing version that is needed weakly (flag 2).
    versions = re.findall(r"^ +0x[0-9a-f]+ 0x([0-9a-f]+) +\d+ GLIBC_(\d+)\.(\d+)", told, re.MULTILINE)
    return max(((int(major), int(minor)) for flags, major, minor in versions if not int(flags, 16) & 2), default=(2, 5))


def contents(stage: Path, notices: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of the wheel but the list of them: name, bytes and mode."""
    number = version()
    info, data = f"gpupool-{number}.dist-info", f"gpupool-{number}.data"
    files: dict[str, tuple[bytes, int]] = {}

    def add(name: str, source: Path, mode: int = 0o644) -> None:
        files[name] = (source.read_bytes(), mode)

    for module in sorted((PACKAGE / "gpupool").glob("*")):
        if module.suffix in (".py", ".typed"):
            add(f"gpupool/{module.name}", module)
    files["gpupool/_version.py"] = (f'__version__ = "{number}"\n'.encode(), 0o644)
    for library in ("libgpupool.so", "libsimcuda.so", "libsimnvml.so", "two_arrays"):
        add(f"gpupool/lib/{library}", stage / library, 0o755)
    add("gpupool/include/gpupool.h", ROOT / "include/gpupool.h")
    for example in sorted((ROOT / "include/examples").iterdir()):
        add(f"gpupool/examples/{example.name}", example)
    add(f"{data}/scripts/gpupool", stage / "gpupool", 0o755)
    # Installers put these beside the folder of the command, where man and the shells look for what belongs to a command on PATH. Not
    # compressed: the wheel is.
    for file in sorted(path for path in (stage / "share").rglob("*") if path.is_file()):
        add(f"{data}/data/{file.relative_to(stage)}", file)

    glibc = max(needs(stage / name) for name in ("gpupool", "libgpupool.so", "libsimcuda.so", "libsimnvml.so", "two_arrays"))
    tag = "py3-none-manylinux_{}_{}_x86_64".format(*glibc)
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: gpupool {number}\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        0o644,
    )
    metadata = f"""Metadata-Version: 2.4
Name: gpupool
Version: {number}
Summary: The memory of every GPU, and then of the host, for one unmodified CUDA program
License-Expression: MIT OR Apache-2.0
License-File: LICENSE
License-File: THIRD-PARTY.txt
Requires-Python: >=3.9
Classifier: Environment :: GPU :: NVIDIA CUDA
Classifier: Operating System :: POSIX :: Linux
Classifier: Topic :: Scientific/Engineering
Classifier: Typing :: Typed
Description-Content-Type: text/markdown

{(ROOT / "README.md").read_text()}"""
    files[f"{info}/METADATA"] = (metadata.encode(), 0o644)
    add(f"{info}/licenses/LICENSE", ROOT / "LICENSE")
    add(f"{info}/licenses/THIRD-PARTY.txt", notices / "THIRD-PARTY.txt")
    add(f"{info}/sboms/gpupool.cdx.json", notices / "gpupool.cdx.json")
    return files


def write(files: dict[str, tuple[bytes, int]], output: Path) -> Path:
    """Writes the wheel with its list of files; gives its path."""
    [info] = {name.split("/")[0] for name in files if name.endswith("/WHEEL")}
    tag = re.search(rb"^Tag: (\S+)", files[f"{info}/WHEEL"][0], re.MULTILINE)[1].decode()
    record = f"{info}/RECORD"
    lines = []
    for name in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name][0]).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(files[name][0])}\n")
    lines.append(f"{record},,\n")
    # What is about the wheel comes last, so that it can be changed without writing the rest anew.
    order = sorted(files, key=lambda name: (name.startswith(info), name)) + [record]
    files = files | {record: ("".join(lines).encode(), 0o644)}
    # Of the commit, if that is told; a zip knows no time before 1980.
    seconds = max(int(os.environ.get("SOURCE_DATE_EPOCH", 0)), 315_532_800)
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"gpupool-{version()}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in order:
            entry = zipfile.ZipInfo(name, time.gmtime(seconds)[:6])
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = (0o100000 | files[name][1]) << 16
            wheel.writestr(entry, files[name][0], compresslevel=9)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the wheel")
    parser.add_argument("--stage", type=Path, required=True, help="the folder with the command, the libraries and the demo's program")
    parser.add_argument("--notices", type=Path, required=True, help="the folder with what notices.py wrote")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--expect", metavar="TAG", help="what the machine must be told, as manylinux_2_28; another one is an error")
    given = parser.parse_args()
    wheel = write(contents(given.stage, given.notices), given.output)
    if given.expect and given.expect not in wheel.name:
        sys.exit(f"{wheel.name} is not for {given.expect}: a file needs a newer glibc")
    # A build that is not for every Linux is for trying it out, and made in less time and not to be small.
    if given.expect and wheel.stat().st_size > MOST:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MOST}")
    print(wheel)


if __name__ == "__main__":
    main()
