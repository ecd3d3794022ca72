"""Who runs when: budgets, order, shared prefixes, snapshots, preemption. No model: tokens are made up here."""

from types import SimpleNamespace

import pytest

from replayssm.engine.pages import PagePool
from replayssm.engine.prefix import PrefixCache
from replayssm.engine.request import Phase, Request, Sequence
from replayssm.engine.scheduler import STEPS_PER_PRIORITY, Limits, Scheduler
from tests.token_model import TokenPool

PAGE = 4


class Desk:
    """A scheduler, and steps that do what it plans."""

    def __init__(
        self, *, rows=4, slots=12, pages=64, chunk=16, budget=32, every=8, window=1, cached=True, invariant=False
    ):
        self.slots, self.pages = TokenPool(slots, ring_len=4, backend="torch"), PagePool(pages)
        cache = PrefixCache(self.pages, self.slots, PAGE) if cached else None
        self.scheduler = Scheduler(
            self.slots, self.pages, cache, Limits(rows, PAGE, chunk, budget, every, window, invariant)
        )
        self.steps = 0
        self.plans = []

    def add(self, tokens, *, new=4, priority=0, index=0):
        request = Request(str(len(tokens)), list(tokens), SimpleNamespace(max_tokens=new), 0, priority)
        request.turn = (self.steps - STEPS_PER_PRIORITY * priority, next(self.counter))
        sequence = Sequence(request, index, list(tokens), text=None)
        request.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    counter = iter(range(10**6))

    def step(self):
        plan = self.scheduler.plan()
        self.plans.append(plan)
        self.steps += 1
        sampled = list(plan.decode)
        for piece in (piece for pieces in plan.rounds for piece in pieces):
            sequence = piece.sequence
            assert len(self.slots.tokens(sequence.slot)) == piece.start < piece.end
            assert len(sequence.pages) * PAGE >= piece.end
            for slot in (sequence.slot, piece.keep):
                if slot is not None:
                    self.slots.write_tokens(slot, tuple(sequence.tokens[: piece.end]))
        for piece in (piece for pieces in plan.rounds for piece in pieces):
            sequence = piece.sequence
            self.scheduler.prefilled(piece)
            sampled += [sequence] if sequence.phase is Phase.DECODE else []
        for sequence in plan.decode:
            sequence.done += 1
            assert len(sequence.pages) * PAGE >= sequence.done
            self.slots.write_tokens(sequence.slot, tuple(sequence.tokens[: sequence.done]))
            if self.scheduler.at_snapshot(sequence):
                self.scheduler.keep(sequence)
        for sequence in sampled:
            sequence.tokens.append(len(sequence.tokens))
            if sequence.num_left == 0:
                self.scheduler.finish(sequence)
        return plan

    def run(self, limit=500):
        while self.scheduler.has_work:
            self.step()
            assert self.steps < limit
        return self

    def pieces(self, sequence):
        """Where each step's pieces of a sequence ended."""
        return [[p.end for pieces in plan.rounds for p in pieces if p.sequence is sequence] for plan in self.plans]

    @property
    def snapshots(self):
        """The lengths of all prefixes that the cache holds a state of."""
        return sorted(node.end for node in self.scheduler.cache.recent)

    def is_whole(self):
        """Whether everything was given back, but for what the cache holds."""
        held = len(self.scheduler.cache.recent) if self.scheduler.cache else 0
        return self.pages.num_available == self.pages.num_pages and self.slots.num_free + held == self.slots.num_slots


def test_a_prompt_is_cut_at_chunks_and_at_its_last_page_boundary():
    desk = Desk()
    sequence = desk.add(range(1, 41), new=2)
    desk.run()
    assert [ends for ends in desk.pieces(sequence) if ends] == [[16, 32], [36, 40]]
    assert desk.snapshots == [16, 32, 36]
    assert desk.is_whole()


def test_a_prompt_takes_one_chunk_of_a_step_and_its_tail_beside_others_that_decode():
    desk = Desk()
    desk.add(range(100, 104), new=30)
    desk.step()
    sequence = desk.add(range(1, 41), new=2)
    desk.run()
    assert [ends for ends in desk.pieces(sequence) if ends] == [[16], [32], [36, 40]]
    assert {16, 32, 36} <= set(desk.snapshots)


def test_a_snapshot_within_a_step_is_left_out_where_no_slot_is_free():
    desk = Desk(rows=1, slots=2, budget=64)
    sequence = desk.add(range(1, 41), new=2)
    desk.run()
    assert [ends for ends in desk.pieces(sequence) if ends] == [[16, 32, 36, 40]]
    assert desk.snapshots == [36]
    assert desk.is_whole()


def test_prompts_with_one_beginning_in_one_step_keep_one_snapshot_of_it():
    desk = Desk(budget=64)
    for last in (50, 60):
        desk.add([*range(1, 9), last], new=1)  # too short to wait for
    desk.step()
    assert desk.snapshots == [8]
    desk.run()
    assert desk.is_whole()


def test_slots_for_snapshots_of_a_step_that_failed_are_given_back():
    desk = Desk(budget=64)
    sequence = desk.add(range(1, 41), new=2)
    plan = desk.scheduler.plan()
    assert [piece.keep is not None for of_round in plan.rounds for piece in of_round] == [True, True, True, False]
    desk.scheduler.failed()
    desk.scheduler.finish(sequence)
    assert desk.is_whole()


@pytest.mark.parametrize(
    ("part", "first"), [("slots.alloc", 100), ("slots.fork", 1), ("pages.share", 1), ("pages.take", 1)]
)
def test_a_sequence_that_could_not_join_holds_nothing_and_joins_later(part, first, monkeypatch):
    desk = Desk()
    desk.add(range(1, 41), new=1)
    desk.run()
    sequence = desk.add(range(first, first + 44), new=2)  # from 1 on the cache has its beginning
    owner, name = part.split(".")
    with monkeypatch.context() as patched:
        patched.setattr(getattr(desk, owner), name, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            desk.step()
    assert desk.is_whole()
    assert len(desk.scheduler._rows) == 4
    desk.run()
    assert sequence.finished
    assert desk.is_whole()


def test_without_a_cache_a_prompt_is_cut_at_chunks_only():
    desk = Desk(cached=False)
    sequence = desk.add(range(1, 41), new=2)
    desk.run()
    assert [ends for ends in desk.pieces(sequence) if ends] == [[32], [40]]
    assert desk.is_whole()


def test_a_second_prompt_begins_where_the_first_ones_snapshot_ends():
    desk = Desk()
    desk.add(range(1, 42), new=1)
    desk.run()
    second = desk.add([*range(1, 41), 99, 98], new=1)
    desk.run()
    assert second.request.cached_tokens == 40
    assert [ends for ends in desk.pieces(second) if ends] == [[42]]


def test_a_prefix_is_of_use_while_the_first_request_still_decodes():
    desk = Desk()
    first = desk.add(range(1, 42), new=30)
    for _ in range(5):
        desk.step()
    second = desk.add([*range(1, 41), 99], new=1)
    desk.step()
    assert first.phase is Phase.DECODE
    assert second.request.cached_tokens == 40


def test_a_prefix_that_another_is_computing_is_waited_for_and_ends_where_they_part():
    desk = Desk()
    desk.add([*range(1, 31), *[50] * 10], new=1)
    second = desk.add([*range(1, 31), *[60] * 10], new=1)
    desk.run()
    assert second.request.cached_tokens == 28  # whole pages of the 30 tokens that both begin with
    assert 28 in desk.snapshots


def test_a_short_common_prefix_is_not_waited_for():
    desk = Desk()
    desk.add([*range(1, 9), *[50] * 10], new=1)
    second = desk.add([*range(1, 9), *[60] * 10], new=1)
    desk.step()
    assert second.row >= 0
    assert second.request.cached_tokens == 0


def test_where_prompts_part_a_snapshot_serves_the_third():
    desk = Desk(chunk=64, budget=80)
    desk.add([*range(1, 31), *[50] * 20], new=1)
    desk.run()
    second = desk.add([*range(1, 31), *[60] * 20], new=1)
    desk.run()
    assert second.request.cached_tokens == 0  # the only snapshot lay behind the parting
    third = desk.add([*range(1, 31), *[70] * 20], new=1)
    desk.run()
    assert third.request.cached_tokens == 28


def test_decoding_sequences_come_before_prompts_in_a_steps_budget():
    desk = Desk(budget=16, chunk=16)
    first = desk.add(range(1, 9), new=20)
    desk.step()
    assert first.phase is Phase.DECODE
    desk.add(range(100, 140), new=1)
    plan = desk.step()
    assert plan.decode == [first]
    (piece,) = plan.rounds[0]
    assert piece.end == 12  # whole pages of the 15 tokens that are left


def test_snapshots_are_taken_while_decoding():
    desk = Desk(every=8)
    sequence = desk.add(range(1, 4), new=30)
    desk.run()
    assert desk.snapshots == [8, 16, 24, 32]
    longer = desk.add([*sequence.tokens, 99], new=1)
    desk.run()
    assert longer.request.cached_tokens == 32


def test_a_window_ends_at_the_next_snapshot_and_at_the_last_token():
    desk = Desk(every=8, window=6)
    sequence = desk.add(range(1, 6), new=8)  # of a window a step keeps the first token only
    windows = []
    while desk.scheduler.has_work:
        windows += desk.step().windows
    assert windows == [3, 2, 1, 4, 3, 2, 1]
    assert len(sequence.tokens) == 13


def test_the_last_to_come_makes_room_and_is_computed_again():
    desk = Desk(pages=8, cached=False)
    first, second = desk.add(range(1, 13), new=12), desk.add(range(21, 33), new=12)
    desk.run()
    assert desk.scheduler.preemptions > 0
    assert [first.num_left, second.num_left] == [0, 0]
    assert first.request.started is None
    assert [ends for ends in desk.pieces(first) if ends] == [[12]]  # it never had to go
    assert desk.is_whole()


def test_a_sequence_joins_only_with_a_page_to_spare_for_each_that_runs():
    desk = Desk(pages=7, cached=False)
    first, second = desk.add(range(1, 13), new=8), desk.add(range(21, 33), new=8)
    third = desk.add(range(41, 45), new=4)
    desk.step()
    assert (first.row >= 0, second.row >= 0, third.row >= 0) == (True, True, False)


def test_a_sequence_whose_token_is_in_flight_waits_until_it_is_read():
    desk = Desk()
    sequence = desk.add(range(1, 6))
    sequence.in_flight = 1  # as after a preemption
    other = desk.add(range(11, 16))
    assert desk.step().joined == [other]
    sequence.in_flight = 0
    assert desk.step().joined == [sequence]


def test_a_row_is_taken_from_nobody_of_the_same_priority():
    desk = Desk(rows=2)
    first = desk.add(range(1, 6))
    first.in_flight = 1  # as after a preemption
    others = [desk.add(range(start, start + 5), new=9) for start in (11, 21)]
    assert desk.step().joined == others
    first.in_flight = 0
    desk.run()
    assert desk.scheduler.preemptions == 0
    assert first.finished


def test_nobody_waits_for_a_prefix_of_one_that_stands_behind():
    desk = Desk(budget=32)
    first = desk.add([*range(1, 61), 70])
    first.in_flight = 1  # as after a preemption
    second = desk.add([*range(1, 61), 80])
    desk.step()
    assert second.phase is Phase.PREFILL
    first.in_flight = 0
    assert desk.step().joined == [first]


def test_cached_pages_go_before_a_sequence_has_to():
    desk = Desk(pages=8)
    desk.add(range(1, 16), new=1)
    desk.run()
    assert desk.pages.num_idle == 3
    second = desk.add(range(21, 33), new=20)
    desk.run()
    assert desk.scheduler.preemptions == 0
    assert desk.scheduler.cache.evictions > 0
    assert second.num_left == 0


def test_a_higher_priority_goes_first_and_takes_a_row():
    desk = Desk(rows=1)
    low = desk.add(range(1, 6), new=40)
    desk.step()
    waiting = desk.add(range(11, 16), new=1)
    high = desk.add(range(21, 26), new=1, priority=1)
    desk.step()
    assert high.finished
    assert not low.finished
    desk.run()
    assert desk.scheduler.preemptions == 1
    assert low.finished
    assert waiting.finished


def test_no_request_starves_under_a_stream_of_higher_priority():
    desk = Desk(rows=1)
    low = desk.add(range(1, 6), new=3)
    while not low.finished:  # two new ones for each that ends
        desk.add(range(11, 16), new=2, priority=1)
        desk.step()
        assert desk.steps < 3 * STEPS_PER_PRIORITY
    assert desk.scheduler.num_waiting > STEPS_PER_PRIORITY / 2


def test_a_large_prompt_is_not_overtaken_by_small_ones():
    desk = Desk(rows=4, pages=16, cached=False)
    desk.add(range(1, 25), new=20)
    desk.step()
    large = desk.add(range(1, 50), new=2)
    small = desk.add(range(1, 5), new=2)
    while not large.finished:
        desk.step()
        assert small.row < 0 or large.row >= 0 or large.finished


def test_a_cancelled_sequence_gives_everything_back_wherever_it_is():
    desk = Desk(budget=8)
    decoding = desk.add(range(1, 6), new=9)
    desk.step()
    prefilling, waiting = desk.add(range(11, 40), new=9), desk.add(range(41, 60), new=9)
    desk.step()
    assert [s.phase for s in (decoding, prefilling, waiting)] == [Phase.DECODE, Phase.PREFILL, Phase.WAITING]
    for sequence in (decoding, prefilling, waiting):
        desk.scheduler.finish(sequence)
        desk.scheduler.finish(sequence)  # a second time changes nothing
    assert not desk.scheduler.has_work
    assert desk.is_whole()
    assert desk.step().empty


def test_a_hit_whose_snapshot_is_the_last_slot_gives_way_to_its_own_request():
    desk = Desk(rows=1, slots=2)
    desk.add(range(1, 10), new=1)
    desk.run()
    assert desk.snapshots == [8]
    (held,) = desk.slots.alloc()
    second = desk.add([*range(1, 9), 99], new=1)
    assert desk.step().joined == [second]
    assert second.request.cached_tokens == 0
    desk.run()
    desk.slots.free(held)
    assert desk.is_whole()


@pytest.mark.parametrize("samples", [3])
def test_samples_of_one_prompt_compute_it_once(samples):
    desk = Desk()
    sequences = [desk.add(range(1, 42), new=2)]
    request = sequences[0].request
    for index in range(1, samples):
        sequence = Sequence(request, index, list(request.prompt), text=None)
        request.sequences.append(sequence)
        desk.scheduler.add(sequence)
        sequences.append(sequence)
    desk.run()
    computed = [sum(p.end - p.start for plan in desk.plans for r in plan.rounds for p in r if p.sequence is s)
                for s in sequences]  # fmt: skip
    assert computed == [41, 1, 1]


def test_invariant_steps_cut_prompts_at_chunks_alone_and_take_prefixes_up_there():
    desk = Desk(invariant=True, budget=20)
    first = desk.add([*range(1, 61), 99], new=30)
    second = desk.add([*range(1, 61), 98], new=30)
    third = desk.add(range(100, 121), new=30)
    desk.run()
    pieces = [[end for step in desk.pieces(sequence) for end in step] for sequence in (first, second, third)]
    assert pieces == [[16, 32, 48, 61], [61], [16, 21]]
    assert desk.snapshots == [16, 16, 32, 48]
    assert desk.is_whole()


def test_invariant_sequences_run_only_with_room_to_their_end():
    desk = Desk(invariant=True, pages=20, cached=False)
    sequences = [desk.add(range(1, 10), new=30) for _ in range(4)]  # ten pages each
    desk.step()
    assert [sequence.row >= 0 for sequence in sequences] == [True, True, False, False]
    desk.add(range(1, 10), new=30, priority=5)
    desk.run()
    assert desk.scheduler.preemptions == 0
    assert desk.is_whole()


def test_sequences_that_were_cancelled_while_they_waited_are_forgotten():
    desk = Desk(rows=1)
    desk.add(range(1, 6), new=50)
    desk.step()
    for number in range(1000):
        desk.scheduler.finish(desk.add(range(number, number + 5)))
    last = desk.add(range(7, 12))
    assert len(desk.scheduler.waiting) < 100
    desk.run()
    assert last.finished
    assert desk.is_whole()


def test_those_that_wait_for_a_prefix_hold_up_no_other():
    desk = Desk(rows=4, budget=200)
    desk.add([*range(1, 101), 200], new=1)
    for number in range(20):
        desk.add([*range(1, 101), 300 + number], new=1)
    other = desk.add(range(400, 405), new=1)
    plan = desk.step()
    assert other in plan.joined
