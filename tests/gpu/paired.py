"""Runs that are compared by a clock: in turn, and judged by the ratios of the pairs."""

import statistics

from running import BelowGoal


def in_turn(rounds, ours, theirs):
    """Pairs of results. Whoever comes first changes, so that a GPU that warms up favours neither."""
    for number in range(rounds):
        if number % 2:
            second = theirs()
            yield ours(), second
        else:
            yield ours(), theirs()


class Pairs:
    """Numbers measured in pairs, by what was measured. `names` says what the two sides are."""

    def __init__(self, unit, names=("shim", "bare"), digits=3):
        self.unit, self.names, self.digits, self._pairs = unit, names, digits, {}

    def add(self, what, ours, theirs):
        self._pairs.setdefault(what, []).append((ours, theirs))

    def ratio(self, what):
        """Ours to theirs. The median of the pairs' ratios and not the ratio of the medians: what changes slowly on the
        machine changes both sides of a pair."""
        return statistics.median(ours / theirs for ours, theirs in self._pairs[what])

    def medians(self, what):
        return tuple(statistics.median(side) for side in zip(*self._pairs[what]))

    def told(self, what):
        ours, theirs = self.medians(what)
        one, other = self.names
        numbers = f"{one} {ours:.{self.digits}f} {self.unit}, {other} {theirs:.{self.digits}f} {self.unit}"
        return f"{what} {numbers}, ratio {self.ratio(what):.4f}"

    def lines(self):
        """One line a pair."""
        one, other = self.names
        return [
            f"{what}: {one} {ours:.{self.digits}f} {self.unit}, {other} {theirs:.{self.digits}f} {self.unit}, "
            f"ratio {ours / theirs:.4f}"
            for what, pairs in self._pairs.items()
            for ours, theirs in pairs
        ]

    def judged(self, before="", at_most=None, at_least=None):
        """The result of a check: its detail, and a line for each pair. Below the goal where a ratio misses it."""
        goal = f"at most {at_most}" if at_most is not None else f"at least {at_least}"
        detail = f"{before}{'; '.join(self.told(what) for what in self._pairs)} (goal {goal})"
        ratios = [self.ratio(what) for what in self._pairs]
        if (at_most is not None and max(ratios) > at_most) or (at_least is not None and min(ratios) < at_least):
            raise BelowGoal(detail, self.lines())
        return detail, self.lines()
