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
        """The result of a check: its detail, and a line for each pair. Below the goal where a ratio misses it. A goal may also be a
        function from what was measured to a number."""
        goal = at_most if at_most is not None else at_least
        goals = {what: goal(what) if callable(goal) else goal for what in self._pairs}
        missed = [
            what
            for what, ours in ((what, self.ratio(what)) for what in self._pairs)
            if (ours > goals[what] if at_most is not None else ours < goals[what])
        ]
        word = "at most" if at_most is not None else "at least"
        alike = len(set(goals.values())) == 1
        told = [self.told(what) + ("" if alike else f" ({word} {goals[what]})") for what in self._pairs]
        detail = f"{before}{'; '.join(told)}" + (f" (goal {word} {next(iter(goals.values()))})" if alike else "")
        if missed:
            raise BelowGoal(detail, self.lines())
        return detail, self.lines()

    def measured(self):
        """What was measured."""
        return list(self._pairs)

    def spread(self, what):
        """By how much the other side's own numbers differ: the largest to the least, less 1. A ratio that is nearer to 1 says nothing."""
        theirs = [side for _, side in self._pairs[what]]
        return max(theirs) / min(theirs) - 1
