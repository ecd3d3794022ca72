"""Who runs in the next step: admission, chunks of prompts, room for new tokens, preemption.

All sequences stand in one fixed order, `Sequence.order`: by *turn*, which is the step at which the request arrived,
less `STEPS_PER_PRIORITY` for each point of priority; then by arrival. So a request of higher priority overtakes those
that came up to so many steps earlier, and none waits for ever. The first in that order is never preempted, and alone
it always fits; so it ends, whatever else happens.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from replayssm.engine.pages import PagePool
from replayssm.engine.prefix import Hit, PrefixCache
from replayssm.engine.request import Phase, Sequence
from replayssm.state import ReplayPool

STEPS_PER_PRIORITY = 256
FEW = 64  # sequences that are looked at though they can't run yet, or kept though they are done
WORTH_SHARING = 4  # pages; to wait for another's prefix, or to stop for a snapshot where others branch off


class Piece(NamedTuple):
    """Tokens `start` to `end` of a sequence, for a prefill.

    Attributes:
        keep: a slot that keeps the state after them, where more of the sequence follows in the same step.
        last: whether nothing does.
    """

    sequence: Sequence
    start: int
    end: int
    keep: int | None = None
    last: bool = True


@dataclass
class Plan:
    """What a step computes.

    Attributes:
        rounds: pieces of prompts, at most one of a sequence in a round; the next round continues it. All rounds are
            computed in one forward.
        decode: sequences that get a new token.
        windows: for each of these, how many tokens its verify window may have; 1 without drafts.
        joined: sequences that got a row in this step.
    """

    rounds: list[list[Piece]] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    joined: list[Sequence] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.rounds or self.decode)


@dataclass(frozen=True)
class Limits:
    """What bounds a step.

    Attributes:
        max_rows: sequences that run at once.
        page_size: tokens of a page.
        chunk_tokens: the longest piece of one prompt in a step; whole pages.
        max_step_tokens: of all sequences in a step. Decoding ones come first.
        snapshot_every: tokens between snapshots of a decoding sequence; whole pages.
        max_window: the longest verify window; 1 without speculation.
        invariant: nothing that changes the sizes of a sequence's forwards may depend on others. Prompts are cut at
            chunks only, prefixes taken up at chunks only, and sequences never preempted.
    """

    max_rows: int
    page_size: int
    chunk_tokens: int
    max_step_tokens: int
    snapshot_every: int
    max_window: int = 1
    invariant: bool = False


class Scheduler:
    """Gives sequences rows, slots and pages, and takes them back.

    Args:
        slots: the pool whose slots it hands out.
        pages: whose pages it hands out.
        cache: None for an engine without a prefix cache.
        limits: of a step.
    """

    def __init__(self, slots: ReplayPool, pages: PagePool, cache: PrefixCache | None, limits: Limits) -> None:
        self.slots = slots
        self.pages = pages
        self.cache = cache
        self.limits = limits
        self.waiting: list[tuple[tuple[int, int, int], Sequence]] = []  # a heap
        self.num_waiting = 0
        self.running: list[Sequence] = []  # in order
        self.preemptions = 0
        self._rows = list(range(limits.max_rows))  # a heap of the free ones
        self._reserved: set[int] = set()  # slots for snapshots within the prefill that was planned

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        heapq.heappush(self.waiting, (sequence.order, sequence))
        self.num_waiting += 1

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        if sequence.phase is Phase.WAITING:
            self.num_waiting -= 1  # it leaves the heap when its turn comes, or when many are done
            sequence.phase = Phase.FINISHED
            if len(self.waiting) > 2 * self.num_waiting + FEW:
                self.waiting = [entry for entry in self.waiting if not entry[1].finished]
                heapq.heapify(self.waiting)
        elif not sequence.finished:
            self._take_back(sequence)
        sequence.phase = Phase.FINISHED

    def plan(self) -> Plan:
        """Decide on a step: who joins, who decodes, and whose prompts use the rest of the budget."""
        plan = Plan()
        joined = self._admit()
        budget, page_size, drafts = self.limits.max_step_tokens, self.limits.page_size, self.limits.max_window > 1
        for sequence in list(self.running):
            if sequence.phase is not Phase.DECODE or sequence.num_left <= 0:
                continue
            if sequence.done < len(sequence.pages) * page_size or self._make_room(sequence):
                window = self._window(sequence) if drafts else 1
                plan.decode.append(sequence)
                plan.windows.append(window)
                budget -= window
        for sequence in self.running:
            if sequence.phase is Phase.PREFILL:
                # Beside sequences that decode a prompt takes a chunk of a step, without them all that is left.
                budget -= self._cut(sequence, budget, plan.rounds, whole=not plan.decode)
        plan.joined = [sequence for sequence in joined if sequence.row >= 0]
        return plan

    def prefilled(self, piece: Piece) -> None:
        """A prefill of this piece was launched. Keeps a snapshot where one is wanted."""
        sequence = piece.sequence
        sequence.done = piece.end
        if piece.keep is not None:
            self._insert(sequence, piece.keep)
        elif piece.last and self._is_stop(sequence, piece.end):
            self.keep(sequence)
        if piece.end == len(sequence.tokens):
            sequence.phase = Phase.DECODE

    def at_snapshot(self, sequence: Sequence) -> bool:
        """Whether a decoding sequence has reached a place for a snapshot."""
        here = sequence.done % self.limits.snapshot_every == 0 and not self.limits.invariant
        return here and sequence.phase is Phase.DECODE

    def keep(self, sequence: Sequence) -> None:
        """Give the cache a snapshot of a sequence that has done whole pages, if it has none yet and there is room."""
        cache, end = self.cache, sequence.done
        if cache is not None and self._has_room(cache, sequence, end):
            cache.insert(sequence.tokens, end, sequence.pages, self.slots.snapshot(sequence.slot))

    def failed(self) -> None:
        """A step broke off after it was planned."""
        self.slots.free(sorted(self._reserved))
        self._reserved.clear()

    def _reserve(self, sequence: Sequence, end: int) -> int | None:
        """A slot for a snapshot within a prefill, where one is wanted and there is room."""
        cache = self.cache
        if cache is None or not self._is_stop(sequence, end) or not self._has_room(cache, sequence, end):
            return None
        (slot,) = self.slots.alloc(1, zero=False)
        self._reserved.add(slot)
        return slot

    def _insert(self, sequence: Sequence, slot: int) -> None:
        """Give the cache the snapshot that a prefill has written into a slot."""
        assert self.cache is not None
        self._reserved.remove(slot)
        if self.cache.holds(sequence.tokens, sequence.done):  # of another sequence in the same step
            self.slots.free(slot)
            return
        self.slots.seal(slot)
        self.cache.insert(sequence.tokens, sequence.done, sequence.pages, slot)

    def _is_stop(self, sequence: Sequence, end: int) -> bool:
        """Whether a snapshot is wanted where a piece ends."""
        return end in sequence.stops or end % self.limits.chunk_tokens == 0

    def _has_room(self, cache: PrefixCache, sequence: Sequence, end: int) -> bool:
        """Whether the cache can take a snapshot after so many tokens: whole pages, of which it has none yet."""
        return end % self.limits.page_size == 0 and not cache.holds(sequence.tokens, end) and cache.free_slot()

    # Admission

    def _admit(self) -> list[Sequence]:
        """Let waiting sequences join, in their order, as long as there is work for them in this step."""
        joined: list[Sequence] = []
        held: list[tuple[tuple[int, int, int], Sequence]] = []
        try:
            while self.waiting and len(held) < self.limits.max_rows + FEW:
                sequence = self.waiting[0][1]
                if sequence.finished:
                    heapq.heappop(self.waiting)
                elif sequence.in_flight or self._shares_soon(sequence):
                    held.append(heapq.heappop(self.waiting))
                elif not self._has_budget():
                    break
                elif self._place(sequence):
                    heapq.heappop(self.waiting)
                    joined.append(sequence)
                elif not self._preempt_for(sequence):
                    break
        finally:  # whatever fails ends those that run, and those that wait go on waiting
            for entry in held:
                heapq.heappush(self.waiting, entry)
        return joined

    def _has_budget(self) -> bool:
        """Whether the prompts that are under way leave some of a step."""
        tokens = sum(len(s.tokens) - s.done for s in self.running if s.phase is Phase.PREFILL)
        return tokens < self.limits.max_step_tokens

    def _place(self, sequence: Sequence) -> bool:
        """Give a sequence a row, a slot, and pages for its tokens. Says whether there was room."""
        hit = self._find(sequence)
        tokens = len(sequence.tokens) + (sequence.num_left if self.limits.invariant else 0)
        wanted = self._num_pages(tokens) - len(hit.pages)
        idle = sum(self.pages.is_idle(page) for page in hit.pages)
        spare = 0 if self.limits.invariant else len(self.running)  # each may want another page soon
        if not self._rows or self.pages.num_available - idle < wanted + spare or not self._slot_is_free():
            return False
        snapshot = hit.node.snapshot if hit.node else None
        if hit.node and snapshot is None:
            return self._place(sequence)  # its own hit was what had to go: now the slot is free
        try:
            self._equip(sequence, hit.pages, snapshot, wanted)
        except BaseException:  # it runs not yet, so nobody else would give these back
            self._give_back(sequence)
            raise
        sequence.done = sequence.saved.done if sequence.saved else hit.length
        sequence.stops = self._stops(sequence, hit)
        sequence.phase = Phase.PREFILL
        self.num_waiting -= 1
        insort(self.running, sequence, key=lambda s: s.order)
        if sequence.request.cached_tokens is None:
            sequence.request.cached_tokens = min(sequence.done, len(sequence.request.prompt))
        return True

    def _equip(self, sequence: Sequence, shared: list[int], snapshot: int | None, wanted: int) -> None:
        """Give a sequence a slot, the pages it shares and others, and a row, all of which are there."""
        sequence.slot = self.slots.alloc()[0] if snapshot is None else self.slots.fork(snapshot)
        self.pages.share(shared)  # before others are evicted
        sequence.pages = list(shared)
        self._free_pages(wanted)
        sequence.pages += self.pages.take(wanted)
        sequence.row = heapq.heappop(self._rows)

    def _find(self, sequence: Sequence) -> Hit:
        """What the cache has of all but the last token, whose output is what is wanted."""
        if self.cache is None or sequence.saved is not None:
            return Hit(None, [], 0)
        return self.cache.find(sequence.tokens, len(sequence.tokens) - 1)

    def _stops(self, sequence: Sequence, hit: Hit) -> set[int]:
        """Snapshots at the last page boundary before the last token, and where others took another way."""
        if self.cache is None or self.limits.invariant:
            return set()
        stops = {self._whole_pages(len(sequence.tokens) - 1)}
        if hit.agreed - hit.length >= WORTH_SHARING * self.limits.page_size:
            stops.add(hit.agreed)
        return stops

    def _shares_soon(self, sequence: Sequence) -> bool:
        """Whether a sequence before it is computing a prefix that it can use; if so, that one stops for a snapshot."""
        if self.cache is None or sequence.saved is not None:
            return False
        page = self.limits.page_size
        for other in self.running:
            if other.phase is not Phase.PREFILL or other.order > sequence.order:
                continue
            if other.tokens[:page] != sequence.tokens[:page]:
                continue
            shared = min(_common(other.tokens, sequence.tokens), len(sequence.tokens) - 1)
            shared -= shared % (self.limits.chunk_tokens if self.limits.invariant else page)
            gain = shared - self._find(sequence).length if shared > other.done else 0
            if gain >= WORTH_SHARING * page or (gain > 0 and shared in other.stops):
                other.stops.add(shared)
                return True
        return False

    # Memory

    def _num_pages(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_size)

    def _whole_pages(self, tokens: int) -> int:
        return tokens // self.limits.page_size * self.limits.page_size

    def _slot_is_free(self) -> bool:
        return bool(self.slots.num_free) or (self.cache is not None and self.cache.free_slot())

    def _free_pages(self, count: int) -> bool:
        return self.pages.num_free >= count or (self.cache is not None and self.cache.free_pages(count))

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Pages for so many tokens, without taking any from others. Says whether there are."""
        count = self._num_pages(tokens) - len(sequence.pages)
        if count > 0:
            if not self._free_pages(count):
                return False
            sequence.pages += self.pages.take(count)
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """A page for a decoding sequence's next token, taken from those behind it if need be; False if it had to go."""
        while not self._grow(sequence, sequence.done + 1):
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _window(self, sequence: Sequence) -> int:
        """How many tokens its verify window may have: within what is left to sample, and the next snapshot's place."""
        window = min(self.limits.max_window, sequence.num_left)
        if self.cache is not None:
            every = self.limits.snapshot_every
            window = min(window, every - sequence.done % every)
        while window > 1 and not self._grow(sequence, sequence.done + window):
            window -= 1
        return window

    def _preempt_for(self, sequence: Sequence) -> bool:
        """Preempt the last running sequence if it comes after a waiting one, and has a lower priority."""
        last = self.running[-1] if self.running else sequence
        if self.limits.invariant or last.order <= sequence.order or last.request.priority >= sequence.request.priority:
            return False
        self._preempt(last)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take slot and pages back; the tokens stay and are computed again later."""
        self._take_back(sequence)
        sequence.phase = Phase.WAITING
        sequence.done = 0
        self.preemptions += 1
        self.add(sequence)

    def _take_back(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Take from a sequence what it has of slot, pages and row."""
        if sequence.slot >= 0:
            self.slots.free(sequence.slot)
        self.pages.release(sequence.pages)
        if sequence.row >= 0:
            heapq.heappush(self._rows, sequence.row)
        sequence.slot, sequence.row, sequence.pages, sequence.stops = -1, -1, [], set()

    # Pieces

    def _cut(self, sequence: Sequence, budget: int, rounds: list[list[Piece]], *, whole: bool) -> int:
        """Put the next piece and the tail of a prompt, or all of it, into the rounds. Gives their tokens."""
        ends = [sequence.done]
        while (end := self._piece_end(sequence, ends[-1], budget - (ends[-1] - sequence.done), whole)) > ends[-1]:
            ends.append(end)
            left = len(sequence.tokens) - end
            if not left or (not whole and left > self.limits.page_size):
                break
        # Where slots are short, the longest prefix is worth the most.
        kept = {end: self._reserve(sequence, end) for end in reversed(ends[1:-1])}
        for number, (start, end) in enumerate(pairwise(ends)):
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(Piece(sequence, start, end, kept.get(end), last=end == ends[-1]))
        return ends[-1] - sequence.done

    def _piece_end(self, sequence: Sequence, start: int, budget: int, whole: bool) -> int:
        """Where a piece ends: at a chunk's end, a snapshot's place, the last token, or the budget's last whole page."""
        chunk = self.limits.chunk_tokens
        if whole and self.cache is None and not self.limits.invariant:
            chunk = len(sequence.tokens)  # nothing happens at a chunk's end
        stops = [stop for stop in sequence.stops if stop > start]
        end = min(len(sequence.tokens), (start // chunk + 1) * chunk, *stops)
        if end <= start + budget:
            return end
        return start if self.limits.invariant else self._whole_pages(start + budget)


def _common(first: list[int], second: list[int]) -> int:
    """How many tokens two lists begin with alike."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    low, high = 0, length  # the first `low` agree, the first `high` don't
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
