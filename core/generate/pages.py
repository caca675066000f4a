"""Pages: keys and values of what prompts begin with, kept for later prompts that begin equally.

A page is PAGE tokens after those of another page (or at the start), so that the pages form a tree
by token ids; a prompt goes on after the longest path that it shares with it (as RadixAttention,
arXiv 2312.07104). Models with states of all tokens so far also keep the state after some pages, and
a prompt goes on after one of these. If all pages are in use, those without a continuation that were
used longest ago are dropped. This is the table; the arrays are the runner's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sabia.core.ops.kv_cache import cache_bytes
from sabia.core.spec.model import ModelSpec

PAGE = 16
ROOT = -1
Key = tuple[int | str, tuple[int, ...]]  # (the page before it or its adapter, its tokens)
STATES_SHARE = 0.5  # of the bytes, for a model that has states


@dataclass(frozen=True)
class Begun:
    """How a prompt is run. pages: those of its first tokens; state: the number of the kept state
    after them, for a model that has states. keep_at: the tokens after which its state is to be
    kept, 0 for none."""

    pages: tuple[int, ...] = ()
    state: int = ROOT
    keep_at: int = 0

    def __len__(self) -> int:
        return len(self.pages) * PAGE


@dataclass(frozen=True)
class Kept:
    """What a runner copies of prompts that it has run: pages[i] from page blocks[i] of prompt
    rows[i]; states[i] from that kept of prompt state_rows[i]."""

    pages: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    state_rows: list[int] = field(default_factory=list)


@dataclass
class _Page:
    key: Key
    used: int
    continuations: int = 0
    state: int = ROOT


class PageTable:
    """The tree of `pages` pages, and `states` states for a model that has states (else None)."""

    def __init__(self, pages: int, states: int | None = None) -> None:
        self.size, self.states = pages, states
        self.clear()

    @classmethod
    def fitting(cls, spec: ModelSpec, dtype: str, memory: int, most: int) -> "PageTable":
        """The table of as many pages as fit the bytes of `memory`, at most `most`."""
        state = cache_bytes(spec, 1, 0, dtype)
        page = cache_bytes(spec, 1, PAGE, dtype) - state
        for_states = int(memory * (STATES_SHARE if page else 1)) if state else 0
        pages = min(most, (memory - for_states) // page if page else most * bool(for_states))
        return cls(pages, min(pages, for_states // state) if state else None)

    def clear(self) -> None:
        """Forget all, such as after a change of the weights."""
        self._numbers: dict[Key, int] = {}
        self._pages: dict[int, _Page] = {}
        self._free = list(range(self.size - 1, -1, -1))
        self._free_states = list(range((self.states or 0) - 1, -1, -1))
        self._clock = 0

    def begin(self, prompt: Sequence[int], adapter: str = "") -> Begun:
        """How to run a prompt; one token or more is left to run."""
        self._clock += 1
        path = self._path(prompt, adapter)
        for page in path:
            self._pages[page].used = self._clock
        if self.states is None:
            return Begun(tuple(path))
        known = len(path) * PAGE
        while path and self._pages[path[-1]].state == ROOT:
            path.pop()
        if known == len(path) * PAGE:  # else where this prompt and others part
            known = (len(prompt) - 1) // PAGE * PAGE
        keep_at = known if self.states and known > len(path) * PAGE else 0
        return Begun(tuple(path), self._pages[path[-1]].state if path else ROOT, keep_at)

    def next_key(self, prompt: Sequence[int], begun: Begun, adapter: str = "") -> Key | None:
        """What tells prompts apart that would make the same page; None for one that makes none."""
        end = len(begun) + PAGE
        if not self.size or end >= len(prompt):
            return None
        return begun.pages[-1] if begun.pages else adapter, tuple(prompt[len(begun) : end])

    def keep(
        self, prompts: Sequence[Sequence[int]], begun: Sequence[Begun], adapters: Sequence[str]
    ) -> Kept:
        """Make the pages of prompts that have been run, as far as there is room."""
        kept, self._clock = Kept(), self._clock + 1
        for row, (prompt, start) in enumerate(zip(prompts, begun, strict=True)):
            last: int | str = adapters[row]
            for block in range((len(prompt) - 1) // PAGE):
                key = last, tuple(prompt[block * PAGE : (block + 1) * PAGE])
                number = self._numbers.get(key)
                if number is None:
                    number = self._take(key)
                    if number is None:
                        break
                    kept.pages.append(number)
                    kept.rows.append(row)
                    kept.blocks.append(block)
                self._pages[number].used = self._clock
                last = number
                if (block + 1) * PAGE == start.keep_at and self._pages[number].state == ROOT:
                    state = self._take_state(number)
                    if state is not None:
                        kept.states.append(state)
                        kept.state_rows.append(row)
        return kept

    def _path(self, prompt: Sequence[int], adapter: str) -> list[int]:
        path = list[int]()
        last: int | str = adapter
        for block in range((len(prompt) - 1) // PAGE):
            number = self._numbers.get((last, tuple(prompt[block * PAGE : (block + 1) * PAGE])))
            if number is None:
                break
            path.append(number)
            last = number
        return path

    def _take(self, key: Key) -> int | None:
        """The number of a new page; None if all others are of this step or are continued."""
        if not self._free:
            self._drop_oldest()
        if not self._free:
            return None
        number = self._free.pop()
        self._numbers[key], self._pages[number] = number, _Page(key, self._clock)
        if isinstance(key[0], int):
            self._pages[key[0]].continuations += 1
        return number

    def _drop_oldest(self) -> None:
        """Drop an eighth of the pages, or as many as nobody continues."""
        ends = [n for n, page in self._pages.items()
                if not page.continuations and page.used < self._clock]  # fmt: skip
        for number in sorted(ends, key=lambda n: self._pages[n].used)[: max(1, self.size // 8)]:
            page = self._pages.pop(number)
            del self._numbers[page.key]
            if isinstance(page.key[0], int):
                self._pages[page.key[0]].continuations -= 1
            if page.state != ROOT:
                self._free_states.append(page.state)
            self._free.append(number)

    def _take_state(self, number: int) -> int | None:
        """A state for a page, if need be that of the page that was used longest ago."""
        if not self._free_states:
            have = [page for page in self._pages.values()
                    if page.state != ROOT and page.used < self._clock]  # fmt: skip
            if not have:
                return None
            oldest = min(have, key=lambda page: page.used)
            self._free_states.append(oldest.state)
            oldest.state = ROOT
        self._pages[number].state = self._free_states.pop()
        return self._pages[number].state
