"""The prefix cache: what it finds, how its tree is cut and mended, whom it evicts."""

import random

import pytest

from replayssm.engine.pages import PagePool
from replayssm.engine.prefix import Node, PrefixCache
from tests.token_model import TokenPool

PAGE = 4


class Store:
    """A cache, and sequences that only hold tokens and pages."""

    def __init__(self, num_pages=64, num_slots=16):
        self.pages, self.slots = PagePool(num_pages), TokenPool(num_slots, ring_len=4, backend="torch")
        self.cache = PrefixCache(self.pages, self.slots, PAGE)

    def keep(self, tokens, *ends, pages=None):
        """Compute tokens, give the cache snapshots at some places, and end."""
        own = self.pages.take(len(tokens) // PAGE) if pages is None else pages
        assert self.cache.free_slot()
        (slot,) = self.slots.alloc()
        for end in ends:
            assert self.cache.free_slot()
            self.slots.write_tokens(slot, tuple(tokens[:end]))
            self.cache.insert(tokens, end, own, self.slots.snapshot(slot))
        self.slots.free(slot)
        self.pages.release(own)
        return own

    def find(self, tokens):
        hit = self.cache.find(tokens, len(tokens))
        assert len(hit.pages) * PAGE == hit.length
        if hit.node is not None:
            assert self.slots.tokens(hit.node.snapshot) == tuple(tokens[: hit.length])
        return hit

    def check(self):
        """The tree is as its docstrings say, and holds all that isn't free."""
        snapshots, pages = [], []

        def walk(node: Node, end: int):
            for key, child in node.children.items():
                assert child.parent is node
                assert key == tuple(child.tokens[:PAGE])
                assert len(child.tokens) == PAGE * len(child.pages) > 0
                assert child.end == end + len(child.tokens)
                assert child.snapshot is not None or len(child.children) > 1
                pages.extend(child.pages)
                snapshots.extend([] if child.snapshot is None else [child.snapshot])
                walk(child, child.end)

        walk(self.cache.root, 0)
        assert len(set(pages)) == len(pages) == self.pages.num_idle
        assert self.pages.num_free + self.pages.num_idle == self.pages.num_pages
        assert len(set(snapshots)) == len(snapshots) == len(self.cache.recent)
        assert self.slots.num_free + len(snapshots) == self.slots.num_slots


def tokens_of(text):
    """A token for each letter."""
    return [ord(letter) for letter in text]


def test_the_deepest_snapshot_is_found_with_its_pages():
    store = Store()
    pages = store.keep(tokens_of("aaaabbbbccccdddd"), 4, 12)
    hit = store.find(tokens_of("aaaabbbbccccddddeeee"))
    assert (hit.length, hit.pages, hit.agreed) == (12, pages[:3], 12)
    hit = store.find(tokens_of("aaaabbbbcccx"))
    assert (hit.length, hit.pages, hit.agreed) == (4, pages[:1], 8)
    assert store.find(tokens_of("aaax")).node is None
    store.check()


def test_a_hit_ends_within_the_limit():
    store = Store()
    store.keep(tokens_of("aaaabbbb"), 4, 8)
    tokens = tokens_of("aaaabbbb")
    assert store.cache.find(tokens, 8).length == 8
    assert store.cache.find(tokens, 7).length == 4
    assert store.cache.find(tokens, 3).length == 0


def test_branches_share_their_beginning():
    store = Store()
    first = store.keep(tokens_of("aaaabbbbcccc"), 12)
    second = store.keep(tokens_of("aaaabbbbdddd"), 12)
    hit = store.find(tokens_of("aaaabbbbddddeeee"))
    assert (hit.length, hit.pages) == (12, [*first[:2], second[2]])
    assert store.pages.num_idle == 4  # the second one's copy of the beginning was let go
    assert store.find(tokens_of("aaaabbbbeeee")).agreed == 8  # where the two branch off there is no snapshot
    store.check()


def test_a_snapshot_within_an_edge_cuts_it():
    store = Store()
    store.keep(tokens_of("aaaabbbbcccc"), 12)
    store.keep(tokens_of("aaaabbbb"), 8)
    assert store.find(tokens_of("aaaabbbbxxxx")).length == 8
    assert store.find(tokens_of("aaaabbbbcccc")).length == 12
    store.check()


def test_pages_come_from_the_leaf_that_was_used_longest_ago():
    store = Store(num_pages=6)
    store.keep(tokens_of("aaaabbbb"), 8)
    store.keep(tokens_of("ccccdddd"), 8)
    store.find(tokens_of("aaaabbbb"))
    assert store.cache.free_pages(3)
    assert store.find(tokens_of("ccccdddd")).length == 0
    assert store.find(tokens_of("aaaabbbb")).length == 8
    assert store.cache.evictions == 1
    store.check()


def test_a_leaf_that_a_sequence_reads_gives_way_to_one_whose_pages_are_free_then():
    store = Store(num_pages=4)
    store.keep(tokens_of("aaaabbbb"), 8)
    reader = store.find(tokens_of("aaaabbbb")).pages
    store.pages.share(reader)
    store.keep(tokens_of("ccccdddd"), 8)  # used later, but nobody else holds it
    assert store.cache.free_pages(2)
    assert store.find(tokens_of("aaaabbbb")).length == 8
    assert not store.cache.free_pages(3)
    assert store.pages.num_free == 2  # the reader's stay its own, although the cache has let them go
    store.pages.release(reader)
    store.check()


def test_an_inner_snapshot_gives_its_slot_and_the_tree_stays_whole():
    store = Store(num_slots=3)
    store.keep(tokens_of("aaaabbbbcccc"), 4, 12)
    (_,) = store.slots.alloc()
    store.find(tokens_of("aaaabbbbcccc"))
    assert store.cache.free_slot()
    assert store.find(tokens_of("aaaabbbbcccc")).length == 12
    assert store.find(tokens_of("aaaaxxxx")).length == 0


def test_a_snapshot_that_a_fork_reads_is_not_evicted_for_its_slot():
    store = Store(num_slots=3)
    store.keep(tokens_of("aaaa"), 4)
    store.keep(tokens_of("bbbb"), 4)
    fork = store.slots.fork(store.find(tokens_of("aaaa")).node.snapshot)
    store.find(tokens_of("bbbb"))  # so that the other one is the older
    assert store.cache.free_slot()
    assert store.find(tokens_of("aaaa")).length == 4
    assert store.find(tokens_of("bbbb")).length == 0
    (_,) = store.slots.alloc()
    assert not store.cache.free_slot()
    store.slots.write_tokens(fork, (1,))  # its first prefill ends its reading
    assert store.cache.free_slot()


def test_clearing_gives_everything_back():
    store = Store()
    store.keep(tokens_of("aaaabbbbcccc"), 4, 8, 12)
    store.keep(tokens_of("aaaabbbbdddd"), 12)
    store.cache.clear()
    assert store.pages.num_free == store.pages.num_pages
    assert store.slots.num_free == store.slots.num_slots
    assert not store.cache.root.children
    store.check()


@pytest.mark.parametrize("seed", range(4))
def test_any_history_leaves_a_sound_tree_that_finds_what_was_kept(seed):
    rng = random.Random(seed)
    store = Store(num_pages=40, num_slots=9)
    for _ in range(150):
        tokens = [rng.randrange(2) for _ in range(PAGE * rng.randrange(1, 7))]
        end = PAGE * rng.randrange(1, len(tokens) // PAGE + 1)
        if not store.cache.holds(tokens, end):
            assert store.cache.free_pages(len(tokens) // PAGE)
            store.keep(tokens, end)
        assert store.find(tokens[:end]).length == end
        store.check()
    assert store.cache.evictions > 20
