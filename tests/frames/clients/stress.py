"""Eight threads make functions, read their frames and drop them, so that code objects take each other's addresses.

Names are of one length, and four functions in a row differ only in a line, so that a stale answer would show.
"""

import ctypes
import gc
import threading

from probe import HELD, RELEASED, parse, state

THREADS = 8
ROUNDS = 400
failed = []
read = 0


def body(thread, library):
    global read
    buffer = ctypes.create_string_buffer(1 << 16)
    for number in range(ROUNDS):
        name, file, line = f"f{thread}{number // 4:06}", f"<{thread}{number // 4:06}>", number * 7 % 23
        source = f"def {name}(read):\n" + "\n" * line + "    return read()\n"
        scope = {}
        exec(compile(source, file, "exec"), scope)
        function = scope.pop(name)
        for _ in range(3):
            length = function(lambda: library.frames_text(buffer, len(buffer)))
            frames, _ = parse(buffer.value.decode())
            if length < 0 or frames[1] != (file, name, line + 2) or frames[2][1] != "body":
                failed.append((file, name, line + 2, frames))
                return
            read += 1


def run(*work):
    try:
        body(*work)
    except BaseException as error:
        failed.append(error)


threads = [threading.Thread(target=run, args=(n, (RELEASED, HELD)[n % 2])) for n in range(THREADS)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    gc.collect()
for thread in threads:
    thread.join()
assert not failed, failed[0]
print(f"{THREADS * ROUNDS} functions; {state()}")
