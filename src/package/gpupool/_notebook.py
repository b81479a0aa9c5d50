"""``%load_ext gpupool``: what the pool of a notebook's kernel holds, as a picture below the cell, and in a terminal as text."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from html import escape
from typing import Any

from gpupool._interface import LabelUsage, PlaceUsage, Statistics, labels, places, state, statistics, why
from gpupool._logs import report, report_text

_USAGE = """%gpupool                      what the pool holds where
%gpupool report               what this process has logged so far
%gpupool write FILE…          the same for a viewer, by the end of the name: .html (a page), .pickle (PyTorch's memory viewer),
                              .perfetto-trace (Perfetto), .speedscope.json (speedscope)
%%gpupool                     what the pool holds after the cell, and what the cell changed"""

#: The bars: what blocks use, and what of the rest the pool holds.
_USED, _HELD, _FREE = "#4e79a7", "#a0cbe8", "#8884"
_WIDTH, _ROW = 420, 22


@dataclass(frozen=True)
class Picture:
    """What the pool holds at a moment, and what it held at an earlier one."""

    state: str
    why: str
    statistics: Statistics
    places: list[PlaceUsage]
    labels: list[LabelUsage]
    before: dict[int, int] | None = None

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        if not self.places:
            return f"<p>{escape(self._lines()[0])}</p>"
        rows = "".join(self._bar(place, at * _ROW) for at, place in enumerate(self.places))
        height = len(self.places) * _ROW
        svg = (
            f'<svg role="img" aria-label="memory of the pool by place" width="{_WIDTH + 330}" height="{height}" '
            f'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">{rows}</svg>'
        )
        named = "".join(
            f"<tr><td>{escape(one.label)}</td><td>{_size(one.bytes)}</td><td>{one.blocks}</td>"
            f"<td>{_size(one.on_peers)}</td><td>{_size(one.on_host)}</td></tr>"
            for one in self.labels
        )
        heads = "<tr><th>label</th><th>bytes</th><th>blocks</th><th>on other GPUs</th><th>on the host</th></tr>"
        table = f"<table>{heads}{named}</table>" if named else ""
        return f"<div>{escape(self._lines()[0])}</div>{svg}{table}"

    def _lines(self) -> list[str]:
        if not self.places:
            return [f"gpupool: {self.why or 'no memory was asked of the pool yet'} ({self.state.lower()})"]
        told = self.statistics
        lines = [
            f"gpupool: {_size(told.live_bytes)} in {_blocks(told.live_blocks)}, at most {_size(told.peak_live_bytes)}; "
            f"{told.allocations} allocations, {told.reuses} of them from freed memory"
        ]
        widest = max(len(place.name) for place in self.places)
        lines += [f"  {place.name:<{widest}}  {self._words(place)}" for place in self.places]
        for one in self.labels:
            far = one.on_peers + one.on_host
            lines.append(f"  label {one.label}: {_size(one.bytes)} in {_blocks(one.blocks)}" + (f", {_size(far)} far" if far else ""))
        return lines

    def _words(self, place: PlaceUsage) -> str:
        words = f"{_size(place.used)} used, {_size(place.held)} held of {_size(place.limit)}, at most {_size(place.peak_used)}"
        change = 0 if self.before is None else place.used - self.before.get(place.place, 0)
        return words + (f" ({'+' if change > 0 else '−'}{_size(abs(change))})" if change else "")

    def _bar(self, place: PlaceUsage, top: int) -> str:
        whole = max(place.limit, place.held, place.used, 1)
        used, held = (round(part / whole * _WIDTH, 1) for part in (place.used, max(place.held, place.used)))
        bar = "".join(
            f'<rect x="60" y="{top + 3}" width="{width}" height="{_ROW - 6}" style="fill:{colour}"/>'
            for width, colour in ((_WIDTH, _FREE), (held, _HELD), (used, _USED))
        )
        text = f"{_size(place.used)} of {_size(place.limit)}" + (f", {_size(place.held)} held" if place.held > place.used else "")
        name, words = escape(place.name), escape(self._words(place))
        return (
            f'<g><title>{name}: {words}</title><text x="0" y="{top + 16}">{name}</text>{bar}'
            f'<text x="{_WIDTH + 70}" y="{top + 16}">{escape(text)}</text></g>'
        )


def _blocks(number: int) -> str:
    return "1 block" if number == 1 else f"{number} blocks"


def _size(number: int) -> str:
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def picture(before: dict[int, int] | None = None) -> Picture:
    """What the pool of this process holds now."""
    return Picture(state().name, why(), statistics(), places(), labels(), before)


def _write(paths: list[str]) -> str:
    kinds = {".html": "html", ".pickle": "memory_viz", ".perfetto-trace": "perfetto", ".speedscope.json": "speedscope"}
    files: dict[str, str] = {}
    for path in paths:
        kind = next((kind for end, kind in kinds.items() if path.endswith(end)), None)
        if kind is None:
            raise ValueError(f"{path}: its name tells no viewer; end it in one of {', '.join(kinds)}")
        files[kind] = path
    report(**files)
    return "written: " + ", ".join(os.path.abspath(path) for path in files.values())


def load(shell: Any) -> None:
    """Adds the magics to an IPython."""

    def magic(line: str, cell: str | None = None) -> Any:
        if cell is not None:
            before = {place.place: place.used for place in places()}
            shell.run_cell(cell)
            return picture(before)
        words = shlex.split(line)
        if not words:
            return picture()
        try:
            if words == ["report"]:
                print(report_text(), end="")
            elif words[0] == "write" and len(words) > 1:
                print(_write(words[1:]))
            else:
                print(_USAGE)
        except (RuntimeError, ValueError) as error:
            # A sentence helps more here than the way through this package.
            print(f"gpupool: {error}", file=sys.stderr)
        return None

    magic.__doc__ = _USAGE
    shell.register_magic_function(magic, "line_cell", "gpupool")
