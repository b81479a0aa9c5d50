"""Every shape of call: what the probe reads is what traceback.extract_stack() says."""

import asyncio
import contextlib
import ctypes
import functools
import os
import threading

from probe import compare, done


def function():
    compare()


class Class:
    def method(self):
        return compare()

    @classmethod
    def of_class(cls):
        return compare()

    @staticmethod
    def static():
        return compare()

    @property
    def value(self):
        return compare()

    def __getattr__(self, name):
        return compare()

    def __getitem__(self, key):
        return compare()

    def __add__(self, other):
        return compare()

    def __iter__(self):
        compare()
        yield 1

    def __enter__(self):
        return compare()

    def __exit__(self, *what):
        compare()

    def __del__(self):
        compare()

    def __repr__(self):
        compare()
        return "Class"


def generator():
    compare()
    got = yield 1
    compare()
    yield from inner_generator()
    return got


def inner_generator():
    compare()
    yield 2


def methods():
    it = Class()
    it.method()
    Class.of_class()
    Class.static()
    it.value
    it.missing
    it[1]
    it + 1
    list(it)
    f"{it!r}"
    with it:
        compare()
    del it
    type("Made", (), {"__init__": lambda self: (compare(), None)[1]})()


def closures():
    near = 1

    def inner():
        return near + compare()

    inner()
    (lambda: compare())()
    functools.partial(Class.static)()


def generators():
    it = generator()
    next(it)
    it.send(3)
    list(it)
    next(compare() for _ in [0])
    list(map(lambda _: compare(), [1, 2]))


def comprehensions():
    [compare() for _ in [0]]
    {compare() for _ in [0]}
    {compare(): 0 for _ in [0]}
    [[compare() for _ in [0]] for _ in [0]]


def callbacks():
    sorted([3, 1, 2], key=lambda value: compare() or value)
    max([1, 2], key=lambda value: compare())
    functools.reduce(lambda left, right: compare(), [1, 2, 3])
    list(filter(lambda value: compare(), [1]))
    # Through C and back, with the GIL given up between.
    ctypes.CFUNCTYPE(ctypes.c_int)(compare)()
    quicksort = ctypes.CDLL(None).qsort
    order = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda left, right: compare())
    quicksort((ctypes.c_int * 2)(2, 1), 2, 4, order)


async def coroutine():
    await asyncio.sleep(0)
    compare()
    async for _ in asynchronous():
        compare()
    async with manager():
        compare()
    [compare() async for _ in asynchronous()]
    return compare()


async def asynchronous():
    compare()
    yield 1
    await asyncio.sleep(0)
    compare()


@contextlib.asynccontextmanager
async def manager():
    compare()
    yield
    compare()


async def tasks():
    await asyncio.gather(coroutine(), coroutine(), asyncio.create_task(coroutine()))
    asyncio.get_running_loop().call_soon(compare)
    await asyncio.get_running_loop().run_in_executor(None, compare)
    await asyncio.sleep(0)


def compiled():
    eval("compare()")
    eval("[compare() for _ in [0]]")
    exec("def made():\n    x = 1\n\n    return compare()\n\nmade()")
    # The compiler keeps a class derived from str as it is.
    exec(compile("compare()", type("Name", (str,), {})("derived.py"), "exec"), globals())
    exec(compile("compare()", "a\nname", "exec").replace(co_filename="replaced"), globals())


def lines():
    (
        compare(),
        1,
        [
            compare(),
        ],
    )
    try:
        1 / compare()
    except ZeroDivisionError:
        compare()
    finally:
        compare()
    for _ in range(2):
        while compare():
            pass
    with contextlib.suppress(KeyError):
        compare()
        {}[
            compare()
        ]
    # Far lines: the table must say jumps of more than one byte, forward and back.
    source = "\n" * 70_000 + "compare()\n" + "\n" * 300 + "x = [\n" + "\n" * 200 + "compare()]\n"
    exec(compile(source, "far.py", "exec"), globals())
    exec(compile("if 1:\n" + "    x = 1\n" * 5000 + "    compare()\n", "long.py", "exec"), globals())


def names():
    for file in (
        "plain.py",
        "größe.py",
        "訓練/モデル.py",
        "🐍.py",
        "mixed é訓🐍 .py",
        os.fsdecode(b"undecodable-\xff.py"),
        "",
        "x" * 4096,
    ):
        exec(compile("def f():\n    compare()\nf()", file, "exec"), globals())
    exec("def größe(): compare()\ngröße()", globals())
    exec("def 訓練(): compare()\n訓練()", globals())
    exec("class Ünï:\n    def méthode(self): compare()\nÜnï().méthode()", globals())
    exec("def 𝒻(): compare()\n𝒻()", globals())


def depth(calls):
    if calls == 0:
        compare()
    else:
        depth(calls - 1)


def depth_through_c(calls):
    """Every second frame is of C code."""
    if calls == 0:
        compare()
    else:
        list(map(depth_through_c, [calls - 1]))


def recursion():
    for calls in (1, 40, 57, 58, 59, 60, 61, 62, 63, 64, 65, 200, 500):
        depth(calls)
    for calls in (20, 70, 150):
        depth_through_c(calls)


def threads():
    failed = []

    def body():
        try:
            for _ in range(20):
                function()
                methods()
                callbacks()
        except BaseException as error:
            failed.append(error)

    running = [threading.Thread(target=body) for _ in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failed, failed


def tracing():
    """Debuggers and coverage put their own instructions in the place of the program's."""
    import sys

    sys.settrace(lambda *_: (lambda *_: None))
    try:
        function()
        generators()
        lines()
    finally:
        sys.settrace(None)


function()
methods()
closures()
generators()
comprehensions()
callbacks()
asyncio.run(tasks())
compiled()
lines()
names()
recursion()
threads()
tracing()
compare()
done(1000)
