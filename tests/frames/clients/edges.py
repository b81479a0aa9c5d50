"""What is not a stack of Python: other threads, frames that are gone, a forked child. And what a capture costs."""

import os
import threading

from probe import HELD, RELEASED, compare, done, told

assert told(RELEASED.frames_state) == "no Python in this process so far"
assert RELEASED.frames_count() == 1
assert told(RELEASED.frames_state).endswith(", not compared yet"), "that needs the GIL"

compare()
assert told(RELEASED.frames_state).endswith(", compared with its own answers"), told(RELEASED.frames_state)

for library in (RELEASED, HELD):
    assert library.frames_count_on_new_thread() == -1
    assert library.frames_allocations() == 0

assert told(RELEASED.frames_understood) == (
    "3.10 compiled-in, 3.11 compiled-in, 3.12 compiled-in, 3.13 published, 3.14 published"
)


def where():
    return told(RELEASED.frames_shown)


# A function, its caller and the caller of that, as people see them.
code = compile("def inner():\n  return where()\n\nanswer = inner()", "größe.py", "exec")
scope = {"where": where}
exec(code, scope)
shown = scope["answer"].splitlines()[1:]
assert shown[1:3] == ["größe.py:2 in inner", "größe.py:4 in <module>"], shown


def here_and_there():
    """The same instruction keeps the stack and asks for it."""
    return [call() for call in (RELEASED.frames_keep, RELEASED.frames_resolve_kept)]


def deeper(calls):
    return here_and_there() if calls == 0 else deeper(calls - 1)


kept, resolved = deeper(20)
assert kept == resolved >= 22, (kept, resolved)
# Now the frames are gone, and nothing of them is touched.
assert RELEASED.frames_resolve_kept() == 0

# Another thread's frames, though they are still there.
keeping, go = threading.Event(), threading.Event()


def keep_and_wait():
    RELEASED.frames_keep()
    keeping.set()
    go.wait()


thread = threading.Thread(target=keep_and_wait)
thread.start()
keeping.wait()
assert RELEASED.frames_resolve_kept() == 0
go.set()
thread.join()

child = os.fork()
if child == 0:
    compare()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0

done(1)
