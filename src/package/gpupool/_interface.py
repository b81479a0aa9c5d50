"""The C interface (``include/gpupool.h``) by ctypes.

Functions that need the pool raise GpupoolError with ``error.code`` NOT_ACTIVE where there is none: before CUDA was used, or in a
process in which gpupool takes no part (``why()`` tells).
"""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, overload

#: What the place of the host's NUMA node 0 is called; a node's is -1 less its number.
_HOST = -1
#: What a disk is called, where memory is while the program is suspended to one.
_DISK = -(1 << 31)
#: A label's room with its NUL.
_LABEL = 64
_NO_BUDGET = (1 << 64) - 1
_NOT_ACTIVE = -1


class State(enum.IntEnum):
    """What part gpupool plays in this process."""

    #: No function of the CUDA driver was called yet, so nothing was decided.
    IDLE = 0
    #: It takes part; ``mode()`` says how.
    ACTIVE = 1
    #: It failed inside: memory handed out stays valid, new memory comes from the driver.
    CLOSED = 2
    #: Memory of GPUs is the driver's: switched off, a setting that cannot be used, here or on any machine, no pool on this machine, or the
    #: child of a fork; ``why()`` says which. What only the first allocation finds out is ACTIVE before it.
    PASSING = 3


class Advice(enum.IntEnum):
    """What can be said of memory; see ``advise``."""

    READ_MOSTLY = 1
    NOT_READ_MOSTLY = 2
    PREFERRED_LOCATION = 3
    NO_PREFERRED_LOCATION = 4
    ACCESSED_BY = 5
    NOT_ACCESSED_BY = 6


class Anchors(enum.IntFlag):
    """Why memory must stay on the physical memory it is on."""

    #: Shared with other processes by CUDA IPC.
    SHARED = 1
    #: Its physical handle was retained.
    RETAINED = 2
    #: A descriptor of it was given out.
    EXPORTED = 4
    #: ``anchor``, or CU_POINTER_ATTRIBUTE_SYNC_MEMOPS.
    ANCHORED = 8


#: Why a call did nothing, and what to do: by the C interface's codes, and by those of the driver that its calls answer with.
_ERRORS = {
    -1: ("NOT_ACTIVE", "gpupool has no part in this process, or no pool yet", "make this call after the first use of CUDA"),
    -2: (
        "INVALID_ARGUMENT",
        "an address is NULL, a size is 0 or a number or name is none that is known",
        "see the call's parameters in gpupool.h; a label has 1 to 63 bytes",
    ),
    -3: (
        "NOT_POOLED",
        "the address lies in no live block of the pool's, but is freed, the driver's or nobody's",
        "name memory that cudaMalloc gave while gpupool served it",
    ),
    -4: ("NOT_SUPPORTED", "this kind of memory cannot do that there", "choose a place of places() that the memory's GPU reaches"),
    -5: ("INTERNAL", "gpupool failed", "the log says where; please report it"),
    -6: ("STAYED", "some of the memory stayed where it was", "pieces() tells where it lies and what must stay there"),
    -7: ("OVER_BUDGET", "the label would have more on its GPU than its budget", "raise label_budget(), or free memory of that label"),
    -8: ("NOT_RESTORED", "it did not come back from the image", "read the log, which says why; the memory has its name"),
    1: ("CUDA_ERROR_INVALID_VALUE", "the driver knows no such memory", "name memory that is not freed"),
    2: (
        "CUDA_ERROR_OUT_OF_MEMORY",
        "the place has no room",
        "free memory there (places() tells what is held), or choose another",
    ),
    201: ("CUDA_ERROR_INVALID_CONTEXT", "this thread has no context", "make a GPU current in it first"),
    600: ("CUDA_ERROR_NOT_READY", "the GPUs do not come to rest", "wait for the work that was submitted, and call again"),
    900: ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "a stream is being captured", "call again when the capture has ended"),
}


class GpupoolError(RuntimeError):
    """A call did nothing. ``number`` is the C interface's (below 0) or a CUresult, and ``code`` its name, as "NOT_POOLED"."""

    def __init__(self, call: str, number: int) -> None:
        from gpupool._preload import is_preloaded

        self.number = number
        unknown = (f"CUDA_ERROR_{number}", f"the driver answered {number}", "its documentation says what that means")
        self.code, reason, advice = _ERRORS.get(number, unknown)
        if number == -1 and why():
            reason = why()
            if state() != State.IDLE or not is_preloaded():
                advice = "`gpupool doctor` in the same environment tells more"
        super().__init__(f"{call}: {self.code} ({number}): {reason}; {advice}")


@dataclass(frozen=True)
class Statistics:
    """The pool of this process in numbers."""

    #: Blocks that the program holds, the bytes it asked for in them, and the most that those ever were.
    live_blocks: int
    live_bytes: int
    peak_live_bytes: int
    #: Bytes of physical memory that the pool holds: live blocks, and freed ones that it keeps.
    held_on_gpus: int
    held_on_host: int
    #: Blocks served so far, and those of them served from freed memory.
    allocations: int
    reuses: int
    #: Bytes of blocks and handles that were not on the GPU that asked when they were made, each time that one was.
    spilled_bytes: int
    #: Bytes that went back to the driver so far.
    trimmed_bytes: int


@dataclass(frozen=True)
class PlaceUsage:
    """One place's memory, in bytes."""

    #: A GPU's CUDA ordinal, or -1 less the number of a host NUMA node; ``name`` is it in words.
    place: int
    used: int
    held: int
    peak_used: int
    limit: int

    @property
    def name(self) -> str:
        """``gpu0``, ``host0``."""
        return _name(self.place)


@dataclass(frozen=True)
class Piece:
    """A part of a block that lies at one place."""

    address: int
    bytes: int
    place: int
    anchors: Anchors

    @property
    def name(self) -> str:
        """Its place: ``gpu0``, ``host0``."""
        return _name(self.place)


@dataclass(frozen=True)
class LabelUsage:
    """What has a label, in bytes that were asked for."""

    label: str
    blocks: int
    bytes: int
    #: What of it lies on the GPU that was current when each block was allocated, on other GPUs, and on the host.
    at_home: int
    on_peers: int
    on_host: int
    #: The most that may be ``at_home``, if there is a budget.
    budget: int | None


def _name(place: int) -> str:
    if place == _DISK:
        return "disk"
    return f"gpu{place}" if place >= 0 else f"host{_HOST - place}"


def gpu(number: int) -> int:
    """The place of the GPU with this CUDA ordinal."""
    if number < 0:
        raise ValueError(f"no GPU has the number {number}")
    return number


def host(node: int = 0) -> int:
    """The place of the host's memory on a NUMA node."""
    if node < 0:
        raise ValueError(f"no NUMA node has the number {node}")
    return _HOST - node


class _Statistics(ctypes.Structure):
    _fields_ = [("size", c_size_t)] + [(name, c_uint64) for name in Statistics.__dataclass_fields__]


class _Place(ctypes.Structure):
    _fields_ = [("place", c_int), ("used", c_uint64), ("held", c_uint64), ("peak_used", c_uint64), ("limit", c_uint64)]


class _Piece(ctypes.Structure):
    _fields_ = [("address", c_uint64), ("bytes", c_uint64), ("place", c_int), ("anchors", c_uint)]


class _LabelUsage(ctypes.Structure):
    _fields_ = [("label", c_char * _LABEL)] + [
        (name, c_uint64) for name in ("blocks", "bytes", "at_home", "on_peers", "on_host", "budget")
    ]


#: The functions as the header has them: what they answer and what they take.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "gpupool_version": (c_char_p, []),
    "gpupool_trim": (c_uint64, []),
    "gpupool_malloc": (c_int, [POINTER(c_void_p), c_size_t, c_int, c_void_p]),
    "gpupool_free": (c_int, [c_void_p, c_int, c_void_p]),
    "gpupool_pieces": (c_int, [c_void_p, c_size_t, POINTER(_Piece), POINTER(c_size_t)]),
    "gpupool_anchor": (c_int, [c_void_p, c_size_t]),
    "gpupool_release_anchor": (c_int, [c_void_p, c_size_t]),
    "gpupool_advise": (c_int, [c_void_p, c_size_t, c_int, c_int]),
    "gpupool_prefetch": (c_int, [c_void_p, c_size_t, c_int, c_void_p]),
    "gpupool_label": (c_int, [c_void_p, c_char_p]),
    "gpupool_name": (c_int, [c_void_p, c_size_t, c_char_p]),
    "gpupool_restore": (c_int, [POINTER(c_size_t)]),
    "gpupool_label_scope": (c_int, [c_char_p, c_char_p]),
    "gpupool_far_scope": (c_int, [c_int]),
    "gpupool_label_budget": (c_int, [c_char_p, c_uint64]),
    "gpupool_labels": (c_size_t, [POINTER(_LabelUsage), c_size_t]),
    "gpupool_get_state": (c_int, []),
    "gpupool_mode": (c_char_p, []),
    "gpupool_why": (c_char_p, []),
    "gpupool_log_file": (c_char_p, []),
    "gpupool_get_statistics": (c_int, [POINTER(_Statistics)]),
    "gpupool_places": (c_size_t, [POINTER(_Place), c_size_t]),
}


@functools.cache
def interface() -> ctypes.CDLL:
    """The library: the preloaded one, or this package's, which is opened and stays until the process ends."""
    from gpupool._preload import is_preloaded, library

    opened = ctypes.CDLL(None) if is_preloaded() else ctypes.CDLL(library())
    for name, (answer, arguments) in _FUNCTIONS.items():
        function = getattr(opened, name)
        function.restype, function.argtypes = answer, arguments
    return opened


def _made(call: str, number: int) -> None:
    if number != 0:
        raise GpupoolError(call, number)


def _range(memory: Any, size: int | None) -> tuple[int, int]:
    """Address and bytes of what a caller names: an address with a size, or an array or tensor of a framework."""
    if isinstance(memory, int):
        if size is None:
            raise TypeError("of an address the size must be said, too")
        return memory, size
    if hasattr(memory, "untyped_storage"):
        address, whole = memory.data_ptr(), memory.numel() * memory.element_size()
        if not memory.is_contiguous():
            raise ValueError("a tensor that is not contiguous is no range of memory; name its storage by address and size")
    elif hasattr(memory, "__cuda_array_interface__"):
        told = memory.__cuda_array_interface__
        if told.get("strides") is not None:
            raise ValueError("an array that is not contiguous is no range of memory; name it by address and size")
        address, whole = told["data"][0], int(told["typestr"][2:])
        for length in told["shape"]:
            whole *= length
    else:
        raise TypeError(f"{type(memory).__name__} is no address, and no array or tensor on a GPU")
    return address, whole if size is None else size


def state() -> State:
    """What part gpupool plays in this process."""
    return State(interface().gpupool_get_state())


def mode() -> str:
    """How allocations are served now: a value of GPUPOOL_MODE, "off" where every allocation goes to the driver."""
    return str(interface().gpupool_mode().decode())


def why() -> str:
    """Why allocations go to the driver, a sentence; empty where they do not."""
    from gpupool._preload import is_preloaded

    if not is_preloaded():
        return "the library is not preloaded in this process; start the program by `gpupool run`, or call gpupool.activate() first"
    return str(interface().gpupool_why().decode())


def statistics() -> Statistics:
    """The pool in numbers: all 0 while there is none."""
    told = _Statistics(size=ctypes.sizeof(_Statistics))
    number = interface().gpupool_get_statistics(byref(told))
    if number != -1:
        _made("gpupool_get_statistics", number)
    return Statistics(*(getattr(told, name) for name in Statistics.__dataclass_fields__))


def _listed(function: Any, kind: Any) -> list[Any]:
    """What a function writes that takes room for its answers and says how many there are; there may be more by the second call."""
    room = function(None, 0)
    while True:
        answers = (kind * room)()
        count = function(answers, room)
        if count <= room:
            return list(answers[:count])
        room = count


def places() -> list[PlaceUsage]:
    """The memory of each place of the pool; none while there is no pool."""
    told = _listed(interface().gpupool_places, _Place)
    return [PlaceUsage(one.place, one.used, one.held, one.peak_used, one.limit) for one in told]


def labels() -> list[LabelUsage]:
    """What has each label, in the order in which they were first used."""
    told = _listed(interface().gpupool_labels, _LabelUsage)
    return [
        LabelUsage(
            one.label.decode(errors="replace"),
            one.blocks,
            one.bytes,
            one.at_home,
            one.on_peers,
            one.on_host,
            None if one.budget == _NO_BUDGET else one.budget,
        )
        for one in told
    ]


def trim() -> int:
    """Returns all freed memory that the pool keeps to the driver, and says how many bytes that was."""
    return int(interface().gpupool_trim())


def pieces(memory: Any, size: int | None = None) -> list[Piece]:
    """Where the parts of memory lie, in address order: of an address and a size, or of an array or tensor on a GPU."""
    address, size = _range(memory, size)
    room = 16
    while True:
        answers, count = (_Piece * room)(), c_size_t(room)
        _made("gpupool_pieces", interface().gpupool_pieces(address, size, answers, byref(count)))
        if count.value <= room:
            return [Piece(one.address, one.bytes, one.place, Anchors(one.anchors)) for one in answers[: count.value]]
        room = count.value


def prefetch(memory: Any, place: int, size: int | None = None, stream: int = 0) -> None:
    """Moves memory to a place, ``gpu(1)`` or ``host()``, at the same addresses.

    The call waits for all work on every GPU; nothing may use the memory meanwhile. GpupoolError with ``code`` "STAYED" says that some of
    it stayed; see ``gpupool_prefetch`` in the header for all that holds.
    """
    address, size = _range(memory, size)
    _made("gpupool_prefetch", interface().gpupool_prefetch(address, size, place, stream))


def advise(memory: Any, advice: Advice, place: int, size: int | None = None) -> None:
    """Says something of memory: PREFERRED_LOCATION moves memory of the pool to the place, as ``prefetch`` does."""
    address, size = _range(memory, size)
    _made("gpupool_advise", interface().gpupool_advise(address, size, advice, place))


class _Anchor:
    """An anchor that was set. As a context manager it is released at the end of the block."""

    def __init__(self, address: int, size: int) -> None:
        self._range = (address, size)

    def __enter__(self) -> _Anchor:
        return self

    def __exit__(self, *_how: object) -> None:
        release_anchor(*self._range)


def anchor(memory: Any, size: int | None = None) -> _Anchor:
    """Keeps memory on the physical memory that it is on, until ``release_anchor`` of the same range or the end of its block.

    >>> with gpupool.anchor(tensor):
    ...     adapter.send(tensor)
    """
    address, size = _range(memory, size)
    _made("gpupool_anchor", interface().gpupool_anchor(address, size))
    return _Anchor(address, size)


def release_anchor(memory: Any, size: int | None = None) -> None:
    """Takes back one ``anchor`` of exactly this range."""
    address, size = _range(memory, size)
    _made("gpupool_release_anchor", interface().gpupool_release_anchor(address, size))


@overload
def label(memory: str) -> AbstractContextManager[None]: ...
@overload
def label(memory: Any, name: str | None) -> None: ...
def label(memory: Any, name: str | None = None) -> AbstractContextManager[None] | None:
    """Gives the block that memory lies in a label, in place of any it had; None takes it back. It ends with the block.

    With a name alone it is a scope: what this thread allocates inside has that label. A tensor that a framework serves from its cache is
    not allocated then. Where gpupool takes no part, the scope does nothing.

    >>> with gpupool.label("kv"):
    ...     cache = torch.empty(size, device="cuda")
    """
    if isinstance(memory, str):
        return _labelled(memory)
    address, _ = _range(memory, 1)
    _made("gpupool_label", interface().gpupool_label(address, None if name is None else name.encode()))
    return None


def name(memory: Any, name: str | None, size: int | None = None) -> None:
    """Names memory of the pool, so that ``gpupool checkpoint`` stores it by that name; None takes the name back.

    Under ``gpupool run --restore DIR`` the bytes that were stored are in it when this returns, the first time that the name is given.
    GpupoolError with ``code`` "NOT_RESTORED" says that they are not, because the image has no memory of that name and size; the log says which.

    >>> for key, tensor in model.state_dict().items():
    ...     gpupool.name(tensor, key)
    """
    address, size = _range(memory, 0 if size is None and isinstance(memory, int) else size)
    _made("gpupool_name", interface().gpupool_name(address, size, None if name is None else name.encode()))


def restore() -> int:
    """Says that the program has built what it is about to load: all blocks of the image are in memory when this returns; how many bytes.

    Under ``gpupool run --restore DIR --restore-by-order``; otherwise 0. GpupoolError with ``code`` "NOT_RESTORED" says that nothing came back,
    because the program's blocks differ from those of the image in number, size, order or the line that asked; the log says at which.

    >>> model, optimizer = build()
    ... gpupool.restore()
    """
    size = c_size_t()
    _made("gpupool_restore", interface().gpupool_restore(byref(size)))
    return size.value


@contextmanager
def _labelled(name: str) -> Iterator[None]:
    outer = ctypes.create_string_buffer(_LABEL)
    number = interface().gpupool_label_scope(name.encode(), outer)
    if number != _NOT_ACTIVE:
        _made("gpupool_label_scope", number)
    try:
        yield
    finally:
        interface().gpupool_label_scope(outer, None)


@contextmanager
def far() -> Iterator[None]:
    """A scope in which this thread's allocations are placed elsewhere than on its GPU where there is room: on other GPUs, and then on
    the host. They stay there, whatever GPUPOOL_MOVE says; ``prefetch`` brings them home. For what is used seldom, as an optimizer's state.

    >>> with gpupool.far():
    ...     state = torch.empty(size, device="cuda")
    """
    outer = interface().gpupool_far_scope(1)
    try:
        yield
    finally:
        interface().gpupool_far_scope(int(outer > 0))


def label_budget(name: str, size: int | None) -> None:
    """Says how many bytes with a label may lie on the GPU that asked for them; None takes that back."""
    _made("gpupool_label_budget", interface().gpupool_label_budget(name.encode(), _NO_BUDGET if size is None else size))
