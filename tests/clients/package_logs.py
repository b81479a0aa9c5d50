"""What the Python package makes of this process's own log, and what a notebook shows: package_logs.py LOG"""

import contextlib
import io
import sys
from pathlib import Path

import gpupool

try:
    gpupool.log_file()
except gpupool.NoLog as error:
    if not gpupool.is_preloaded():
        print("no log:", type(error).__name__ + ":", str(error).split(":")[0])
gpupool.activate(log_file=sys.argv[1], log="debug", limit="0:96MiB", idle="off", summary="off")
sys.path.insert(0, str(Path(__file__).parent))

import ctypes  # noqa: E402

from cuda_calls import call, init, use  # noqa: E402

MIB = 1 << 20


def weights(mebibytes):
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(mebibytes * MIB))
    return address.value


class Shell:
    """What `%load_ext` needs of an IPython."""

    def register_magic_function(self, function, kind, name):
        assert (kind, name) == ("line_cell", "gpupool")
        self.magic = function

    def run_cell(self, cell):
        exec(cell, globals())


def main():
    init()
    use(0)
    call("cuMemFree_v2", ctypes.c_uint64(weights(64)))
    weights(32)
    weights(96)
    snapshot = gpupool.memory_snapshot()
    sizes = {}
    frames = []
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                place = snapshot["allocator_settings"][f"device {segment['device']}"]
                sizes[place] = sizes.get(place, 0) + block["size"]
                frames = frames or block["frames"]
    print("live:", ", ".join(f"{size // MIB} MiB on {place}" for place, size in sorted(sizes.items())))
    told = gpupool.report()["processes"][0]["memory"]["places"]
    here = {place.name: place for place in gpupool.places()}
    held = {place: 0 for place in here}
    for segment in snapshot["segments"]:
        held[snapshot["allocator_settings"][f"device {segment['device']}"]] += segment["total_size"]
    print(
        "same:",
        sum(sizes.values()) == gpupool.statistics().live_bytes,
        all(told[name]["used"][-1] == place.used for name, place in here.items()),
        all(held[name] == place.held for name, place in here.items()),
    )
    print("at:", [f"{Path(frame['filename']).name}:{frame['name']}" for frame in frames if frame["line"]])
    shell = Shell()
    gpupool.load_ipython_extension(shell)
    names = [str(Path(sys.argv[1]).parent / name) for name in ("a.html", "a.pickle", "a.perfetto-trace", "a.speedscope.json")]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        shell.magic("write " + " ".join(f"'{name}'" for name in names))
        shell.magic("report")
        shell.magic("?")
    print("written:", all(Path(name).stat().st_size > 100 for name in names))
    print("said:", [word in said.getvalue() for word in ("written: ", "Processes, with times", "%%gpupool")])
    picture = shell.magic("")
    print(picture.__repr__().splitlines()[0])
    html = picture._repr_html_()
    print("picture:", html.count("<rect") == 3 * len(here), "gpu1: 64.0 MiB used" in html)
    changed = shell.magic("", "weights(2)")
    print("change:", "(+2.0 MiB)" in repr(changed))


main()
