"""Runs the programs on the simulated GPUs that it is started on, and takes the pictures: take.py GPUPOOL"""

from __future__ import annotations

import fcntl
import html
import os
import pathlib
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios

import pyte

HERE = pathlib.Path(__file__).resolve().parent
COLUMNS, LINES = 100, 14
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
# What xterm shows, a little softer; `default` is the text's own.
COLOURS = {
    "default": "#d8dee9", "black": "#3b4252", "red": "#e0707c", "green": "#8fbf7f", "brown": "#e6c77c", "blue": "#7aa2d6",
    "magenta": "#b48ead", "cyan": "#7fc1ce", "white": "#e5e9f0",
}
BACKGROUND = "#1d2129"
WIDTH, HEIGHT = 8.4, 18


def started(gpupool, log, *words):
    """A program that has come to where it waits."""
    settings = ["--set", "log=debug", "--set", "idle=off", "--set", "host_limit=8GiB", "--log", str(log)]
    child = subprocess.Popen(
        [gpupool, "run", *settings, "--", sys.executable, HERE / "training.py", *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    if child.stdout.readline() != "ready\n":
        sys.exit(f"take.py: {words or 'training.py'}: it ended before it was ready")
    return child


def screen_of(command, until):
    """The screen of a program on a terminal once it shows that."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm-256color"})
    os.close(slave)
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    while not until("\n".join(screen.display)):
        if not select.select([master], [], [], 30)[0]:
            sys.exit(f"take.py: {command}: not what was waited for:\n" + "\n".join(screen.display))
        stream.feed(os.read(master, 1 << 16))
    child.terminate()
    child.wait()
    return screen


def named(line, names):
    """A line of cells in which names and numbers that are another each time are replaced, so that the picture changes with what is shown
    alone. Columns stay where a number ends in one."""
    for name, instead in names.items():
        text = "".join(cell.data for cell in line)
        for found in reversed(list(re.finditer(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text))):
            letters = instead.rjust(len(name)) if name.isdigit() else instead
            cells = [line[found.start()]._replace(data=letter) for letter in letters]
            line = line[: found.start()] + cells + line[found.end() :]
            line = (line + [line[-1]] * COLUMNS)[:COLUMNS]
    return line


def svg(screen, names):
    """The screen as a picture: a run of cells that are alike is one text."""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMNS * WIDTH + 24:.0f} {LINES * HEIGHT + 24}" '
        'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14">',
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
    ]
    for row in range(LINES):
        line = named([screen.buffer[row][column] for column in range(COLUMNS)], names)
        at = 0
        while at < COLUMNS:
            style = (line[at].fg, line[at].bg, line[at].bold, line[at].reverse)
            end = at
            while end < COLUMNS and (line[end].fg, line[end].bg, line[end].bold, line[end].reverse) == style:
                end += 1
            text = "".join(cell.data for cell in line[at:end])
            ink, ground = colour(style[0], "default"), colour(style[1], None)
            if style[3]:
                ink, ground = BACKGROUND, ink
            x, y = 12 + at * WIDTH, 12 + row * HEIGHT
            if ground:
                out.append(f'<rect x="{x:.1f}" y="{y}" width="{(end - at) * WIDTH:.1f}" height="{HEIGHT}" fill="{ground}"/>')
            if text.strip():
                weight = ' font-weight="bold"' if style[2] else ""
                kept = html.escape(text.rstrip()).replace(" ", "\u00a0")
                length = len(text.rstrip()) * WIDTH
                out.append(f'<text x="{x:.1f}" y="{y + 13}" fill="{ink}"{weight} textLength="{length:.1f}">{kept}</text>')
            at = end
    return "\n".join([*out, "</svg>", ""])


def colour(name, default):
    if name == "default":
        return COLOURS[default] if default else None
    return COLOURS.get(name.removeprefix("bright"), f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else COLOURS["default"])


def page(gpupool, log, pid, folder):
    """The page of a log, as a browser shows its upper part."""
    file, picture = folder / "page.html", HERE / "page.png"
    # The same number and name each time.
    text = log.read_text(encoding="utf-8").replace(f'"pid":{pid},', '"pid":4711,')
    log.write_text(text.replace(os.path.realpath(sys.executable), "/usr/bin/python"), encoding="utf-8")
    subprocess.run([gpupool, "report", "--html", file, log], check=True, stdout=subprocess.DEVNULL)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        return f"no headless browser ({', '.join(BROWSERS)}) here: {picture.name} stays as it is"
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1180,1500", "--virtual-time-budget=3000"]
    shot = folder / "page.png"
    subprocess.run([browser, *words, f"--screenshot={shot}", f"--user-data-dir={folder / 'profile'}", f"file://{file}"],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    shutil.copyfile(shot, picture)
    return f"{picture.name}: {picture.stat().st_size >> 10} KiB"


def main():
    gpupool = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="gpupool-pictures-") as name:
        folder = pathlib.Path(name)
        # Only these two are to be seen.
        os.environ["XDG_RUNTIME_DIR"] = name
        log = folder / "training.jsonl"
        children = [started(gpupool, log), started(gpupool, folder / "small.jsonl", "small")]
        pids = [str(child.pid) for child in children]


        def is_complete(text):
            # Both programs with all that they hold, and with what changed since a look before.
            rows = [line for line in text.splitlines() if line.split()[:1] in ([pids[0]], [pids[1]])]
            return "q leave" in text and any(" 15.0 GiB" in row for row in rows) and len(rows) == 2 and "?" not in "".join(rows)

        screen = screen_of([gpupool, "top", "--interval", "500ms"], is_complete)
        names = dict(zip(pids, ("4711", "4712"))) | {os.uname().nodename: "node1", os.path.basename(os.path.realpath(sys.executable)): "python"}
        picture = HERE / "top.svg"
        picture.write_text(svg(screen, names), encoding="utf-8")
        print(f"{picture.name}: {picture.stat().st_size >> 10} KiB")
        for child in children:
            child.stdin.close()
            child.wait()
        print(page(gpupool, log, children[0].pid, folder))


main()
