"""What the Python package offers, in a program that starts itself anew under the library: package_client.py [WORD]"""

import sys
from pathlib import Path

import gpupool

print("begins:", gpupool.is_preloaded(), sys.argv[1:])
with gpupool.label("early"), gpupool.far():
    pass
gpupool.activate(summary="off")
# An installed package knows nothing of this folder, and a program that began again must not need it either.
sys.path.insert(0, str(Path(__file__).parent))

import ctypes  # noqa: E402

from cuda_calls import call, init, use  # noqa: E402

MIB = 1 << 20


class Array:
    """What a framework's array says of itself."""

    def __init__(self, mebibytes):
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(mebibytes * MIB))
        self.address = address.value
        self.__cuda_array_interface__ = {
            "shape": (mebibytes, MIB),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


def where(array):
    sizes = {}
    for piece in gpupool.pieces(array):
        sizes[piece.name] = sizes.get(piece.name, 0) + piece.bytes // MIB
    return sizes


def error_of(function, *arguments):
    try:
        function(*arguments)
    except gpupool.GpupoolError as error:
        return f"{error.code}: {error}"
    return "none"


def main():
    print("state:", gpupool.state().name, gpupool.is_active(), gpupool.statistics().live_blocks, gpupool.places())
    print("early:", error_of(gpupool.pieces, 4096, 1))
    init()
    use(0)
    array = Array(64)
    print("state:", gpupool.state().name, gpupool.is_active(), gpupool.mode(), repr(gpupool.why()))
    told = gpupool.statistics()
    print("live:", told.live_blocks, told.live_bytes // MIB)
    print("lies:", where(array))
    gpupool.prefetch(array, gpupool.gpu(1))
    print("moved:", where(array))
    with gpupool.anchor(array):
        print("anchored:", [piece.anchors.name for piece in gpupool.pieces(array)], error_of(gpupool.prefetch, array, gpupool.gpu(0)))
    filling = Array(200)
    print("full:", error_of(gpupool.prefetch, filling, gpupool.gpu(1)))
    call("cuMemFree_v2", ctypes.c_uint64(filling.address))
    gpupool.prefetch(array, gpupool.gpu(0))
    print("home:", where(array))
    gpupool.label(array, "kv")
    print("labels:", [(one.label, one.blocks, one.bytes // MIB, one.at_home // MIB, one.budget) for one in gpupool.labels()])
    gpupool.label_budget("kv", 32 * MIB)
    print("budget:", gpupool.labels()[0].budget // MIB)
    with gpupool.label("activations"):
        named = Array(8)
        small = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(small), ctypes.c_size_t(1000))
        with gpupool.far(), gpupool.label("state"):
            elsewhere = Array(8)
        after = Array(8)
    near = Array(8)
    print("far:", where(elsewhere), "near:", where(after), where(near))
    print("scopes:", [(one.label, one.blocks) for one in gpupool.labels()])
    try:
        with gpupool.label("x" * 64):
            print("never")
    except gpupool.GpupoolError as error:
        print("too long:", error.code)
    call("cuMemFree_v2", small)
    for one in (named, elsewhere, after, near):
        call("cuMemFree_v2", ctypes.c_uint64(one.address))
    print("stranger:", error_of(gpupool.pieces, 4096, 1))
    print("places:", [place.name for place in gpupool.places()])
    print("used:", gpupool.places()[0].used // MIB)
    call("cuMemFree_v2", ctypes.c_uint64(array.address))
    print("trimmed:", gpupool.trim() // MIB > 0)
    # A second call changes nothing.
    gpupool.activate()
    child = gpupool.run(
        [sys.executable, "-c", "import gpupool; print('child:', gpupool.is_preloaded())"], {"mode": "off"}, capture_output=True, text=True
    )
    print(child.stdout, end="")


main()
