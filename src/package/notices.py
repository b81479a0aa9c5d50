"""Writes the licences of everything that the libraries and the command are made of, and a list of it for machines (CycloneDX):

python3 notices.py --output FOLDER

All comes from `cargo metadata` and the crates' own files, as cargo has fetched them; nothing is asked of the network.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: What is shipped; everything else of the workspace is for tests.
SHIPPED = ("gpupool", "gpupool-cli", "simcuda", "simnvml")
TARGET = "x86_64-unknown-linux-gnu"
LICENCE_FILE = re.compile(r"^(LICEN[CS]E|COPYING|COPYRIGHT|NOTICE|UNLICENSE)", re.IGNORECASE)


#: What is in the command and no crate: the folder with the licence, and where it is from.
BUNDLED = (
    {"name": "uPlot", "licence": "MIT", "folder": ROOT / "src/cli/report/html/uplot", "file": "uPlot.iife.min.js", "purl": "pkg:npm/uplot"},
)


def bundled_version(bundled: dict) -> str:
    """The version that the file says it is."""
    return re.search(r"\(v([0-9.]+)\)", (bundled["folder"] / bundled["file"]).read_text(errors="replace")[:200])[1]


def crates() -> list[dict]:
    """The crates that are linked into what is shipped, ours among them, by name and version."""
    command = ["cargo", "metadata", "--format-version=1", "--locked", f"--filter-platform={TARGET}"]
    told = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    packages = {package["id"]: package for package in told["packages"]}
    nodes = {node["id"]: node for node in told["resolve"]["nodes"]}
    wanted = [identity for identity, package in packages.items() if package["name"] in SHIPPED]
    found = set()
    while wanted:
        identity = wanted.pop()
        # A macro runs in the compiler, with all that it is made of; what it writes is the program's own.
        if identity in found or is_macro(packages[identity]):
            continue
        found.add(identity)
        # Neither what tests use nor what runs while building is in the result.
        normal = (one for one in nodes[identity]["deps"] if any(kind["kind"] is None for kind in one["dep_kinds"]))
        wanted.extend(one["pkg"] for one in normal)
    return sorted((packages[identity] for identity in found), key=lambda package: (package["name"], package["version"]))


def is_macro(package: dict) -> bool:
    """Whether it runs in the compiler."""
    return any("proc-macro" in target["kind"] for target in package["targets"])


def texts(package: dict) -> list[str]:
    """The licence texts that a crate comes with."""
    folder = Path(package["manifest_path"]).parent
    files = sorted(path for path in folder.iterdir() if path.is_file() and LICENCE_FILE.match(path.name))
    # One that names a file of its own in place of a well-known licence.
    if package.get("license_file"):
        files.append(folder / package["license_file"])
    return [path.read_text(errors="replace").strip() for path in dict.fromkeys(files)]


def third_party(packages: list[dict]) -> str:
    """The licences as people read them: each text once, under the crates that have it."""
    by_text: dict[str, list[str]] = {}
    overview = []
    for package in packages:
        if package["source"] is None:
            continue
        name = f"{package['name']} {package['version']}"
        licence = package["license"] or "see below"
        own = texts(package)
        if not own:
            if "MIT" not in licence and "Apache-2.0" not in licence:
                sys.exit(f"{name} ({licence}) comes without a licence text, and none is known here")
            # Its authors name a licence whose text is among ours.
            own = [(ROOT / "LICENSE").read_text().strip()]
        overview.append(f"  {name}: {licence}")
        for text in own:
            by_text.setdefault(text, []).append(name)
    for bundled in BUNDLED:
        name = f"{bundled['name']} {bundled_version(bundled)}"
        overview.append(f"  {name}: {bundled['licence']} (in the page of gpupool report --html)")
        by_text.setdefault((bundled["folder"] / "LICENSE").read_text().strip(), []).append(name)
    rule = "=" * 80
    parts = [
        "gpupool contains the following crates and scripts. Where there is a choice, they are used under MIT or Apache-2.0. It also contains\n"
        "the standard library of Rust (MIT or Apache-2.0, The Rust Project contributors).\n\n" + "\n".join(overview)
    ]
    parts.extend(f"{rule}\n{', '.join(names)}\n{rule}\n{text}" for text, names in by_text.items())
    return "\n\n".join(parts) + "\n"


def bill(packages: list[dict]) -> dict:
    """The list for machines: CycloneDX 1.5."""

    def component(package: dict) -> dict:
        one = {"type": "library", "name": package["name"], "version": package["version"]}
        if package["license"]:
            # Cargo once wrote "/" for OR.
            one["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
        if package["source"] is not None:
            one["purl"] = f"pkg:cargo/{package['name']}@{package['version']}"
        return one

    others = [
        {
            "type": "library",
            "name": bundled["name"],
            "version": bundled_version(bundled),
            "licenses": [{"expression": bundled["licence"]}],
            "purl": f"{bundled['purl']}@{bundled_version(bundled)}",
        }
        for bundled in BUNDLED
    ]
    [own] = [package for package in packages if package["name"] == "gpupool"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(own) | {"type": "application"}},
        "components": [component(package) for package in packages if package is not own] + others,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes licences and the list of what there is inside")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write to")
    output = parser.parse_args().output
    packages = crates()
    output.mkdir(parents=True, exist_ok=True)
    (output / "THIRD-PARTY.txt").write_text(third_party(packages))
    (output / "gpupool.cdx.json").write_text(json.dumps(bill(packages), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
