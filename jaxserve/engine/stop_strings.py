"""Stop strings: find the first one in a growing text, and hold back no more than could become one.

The method is the automaton of Aho and Corasick (1975): its state after a text is the longest suffix that
begins a stop string. That suffix is exactly what must be held back, and reading one character costs O(1)
amortised, however many and long the stop strings are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """The automaton of a set of non-empty stop strings. Immutable after construction, so that the
    completions of one request share it.

    Attributes (one entry a state, state 0 is "nothing matched yet"):
        children: next state by character, where the match goes on.
        fail: the state of the next shorter suffix that still begins a stop string.
        depth: length of the suffix that the state stands for.
        hit: the longest stop string that ends here, or None.
    """

    def __init__(self, stops: Iterable[str]):
        self.children: list[dict[str, int]] = [{}]
        self.fail: list[int] = [0]
        self.depth: list[int] = [0]
        self.hit: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        assert stop, "an empty stop string would match everywhere"
        state = 0
        for char in stop:
            if char not in self.children[state]:
                self.children[state][char] = len(self.children)
                self.children.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.hit.append(None)
            state = self.children[state][char]
        self.hit[state] = stop

    def _link(self) -> None:
        # Breadth first: a state's fail link leads to a shallower state, whose own links are ready.
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.children[state].items():
                self.fail[child] = self.step(self.fail[state], char)
                queue.append(child)
            # The state's own string is longer than any that ends in one of its suffixes.
            self.hit[state] = self.hit[state] or self.hit[self.fail[state]]

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        children, fail = self.children, self.fail
        while (child := children[state].get(char)) is None:
            if state == 0:
                return 0
            state = fail[state]
        return child


class StopMatcher:
    """Reads one sequence's text and passes on what is safe to show.

    The match that is completed first wins, so the result depends on the text alone and not on how it is
    cut into tokens. Of several that end at the same character the longest wins, hence the earliest start.
    """

    def __init__(self, stops: StopStrings, include_stop: bool = False):
        self._stops = stops
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def feed(self, text: str, active: bool = True) -> tuple[str, str | None]:
        """Reads `text`; returns what may be shown now and the stop string that was met, if any.

        With a stop string the shown text ends right before it (right after it with `include_stop`) and
        nothing is held any more. While not `active`, stop strings that are completed do not count.
        """
        stops, state = self._stops, self._state
        step, hit = stops.step, stops.hit
        known = self._held + text
        for position, char in enumerate(text, len(self._held) + 1):
            state = step(state, char)
            stop = hit[state]
            if active and stop is not None:
                self._held, self._state = "", 0
                return known[: position if self._include_stop else position - len(stop)], stop
        self._state = state
        safe = len(known) - stops.depth[state]
        self._held = known[safe:]
        return known[:safe], None

    def flush(self) -> str:
        """The held text, when the generation ended for another reason."""
        held, self._held, self._state = self._held, "", 0
        return held
