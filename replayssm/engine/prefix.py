"""The prefix cache: a radix tree over tokens whose nodes own pages and, some of them, a snapshot of the state."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from replayssm.engine.pages import PagePool
from replayssm.state import ReplayPool


@dataclass(eq=False)
class Node:
    """The tokens between its parent's end and its own, in whole pages.

    A leaf always has a snapshot: pages behind the last one are of no use, since recurrent layers can't start there.

    Attributes:
        tokens: of the edge that leads to it.
        pages: that hold their keys and values, one for each `page_size` of them.
        end: tokens from the root to its end.
        snapshot: the slot that keeps the state after `end` tokens.
        children: by the tokens of their first page.
    """

    tokens: list[int]
    pages: list[int]
    end: int
    parent: Node | None
    snapshot: int | None = None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)


class Hit(NamedTuple):
    """What the cache has of a sequence.

    Attributes:
        node: the deepest one with a snapshot; None if there is none.
        pages: from the root to that node.
        agreed: tokens, in whole pages, that the tree has; at least ``node.end``. Pages that lie behind the snapshot
            can't be used, but that others went another way from there says that it is a place worth a snapshot.
    """

    node: Node | None
    pages: list[int]
    agreed: int

    @property
    def length(self) -> int:
        """Tokens that need no computing."""
        return self.node.end if self.node else 0


class PrefixCache:
    """Snapshots and pages of prefixes, until somebody needs the room.

    Args:
        pages: the engine's pages, of which the tree holds references.
        slots: the engine's pool, in which a snapshot is a slot.
        page_size: tokens in a page.
    """

    def __init__(self, pages: PagePool, slots: ReplayPool, page_size: int) -> None:
        self.pages = pages
        self.slots = slots
        self.page_size = page_size
        self.root = Node([], [], 0, None)
        self.recent: dict[Node, None] = {}  # nodes with a snapshot, the least recently used first
        self.evictions = 0

    def find(self, tokens: Sequence[int], limit: int) -> Hit:
        """The longest prefix of `tokens` with a snapshot, `limit` tokens at most. It becomes the most recently used."""
        path, agreed = self._walk(tokens, limit)
        while path and path[-1].snapshot is None:
            path.pop()
        if not path:
            return Hit(None, [], agreed)
        self._touch(path[-1])
        return Hit(path[-1], [page for node in path for page in node.pages], agreed)

    def holds(self, tokens: Sequence[int], end: int) -> bool:
        """Whether there is a snapshot after exactly the first `end` tokens. It becomes the most recently used."""
        return self.find(tokens, end).length == end

    def insert(self, tokens: Sequence[int], end: int, pages: Sequence[int], snapshot: int) -> None:
        """Keep a snapshot of the state after `end` tokens, a whole number of pages.

        Args:
            tokens: at least `end` tokens.
            end: no snapshot may be there yet, see :meth:`holds`.
            pages: that hold the tokens' keys and values. The tree takes references to those of which it has none.
            snapshot: becomes the tree's to free.
        """
        path, agreed = self._walk(tokens, end)
        node = path[-1] if path else self.root
        if agreed > node.end:
            node = self._split(node.children[self._key(tokens, node.end)], agreed)
        if agreed < end:
            own = list(pages[agreed // self.page_size : end // self.page_size])
            self.pages.cache(own)
            node = self._attach(node, Node(list(tokens[agreed:end]), own, end, node))
        node.snapshot = snapshot
        self._touch(node)

    def free_pages(self, count: int) -> bool:
        """Evict until `count` pages are free. Says whether they are."""
        while self.pages.num_free < count:
            leaf = next(self._leaves(), None)
            if leaf is None:
                return False
            self._evict(leaf)
        return True

    def free_slot(self) -> bool:
        """Evict until a slot is free. Says whether one is."""
        while not self.slots.num_free:
            unread = (node for node in self.recent if not self.slots.has_readers(self._snapshot_of(node)))
            node = next(unread, None)
            if node is None:
                return False
            self._evict(node)
        return True

    def drop(self, tokens: Sequence[int], is_broken: Callable[[int, list[int]], bool]) -> None:
        """Forget a sequence's first snapshot that is broken, and all that begins with it.

        Args:
            tokens: of the sequence.
            is_broken: says it of a snapshot and all pages up to it. What is longer than a broken one is broken, too.
        """
        path, _ = self._walk(tokens, len(tokens))
        ends = [i for i, node in enumerate(path) if node.snapshot is not None]

        def broken(end: int) -> bool:
            return is_broken(self._snapshot_of(path[end]), [page for node in path[: end + 1] for page in node.pages])

        first = bisect_left(ends, True, key=broken)
        if first < len(ends):
            for node in self._beginning_with(path[ends[first]]):
                self._evict(node)

    def clear(self) -> None:
        """Forget everything."""
        while self.recent:
            self._evict(next(iter(self.recent)))

    # Inside

    def _key(self, tokens: Sequence[int], start: int) -> tuple[int, ...]:
        return tuple(tokens[start : start + self.page_size])

    def _walk(self, tokens: Sequence[int], limit: int) -> tuple[list[Node], int]:
        """Nodes that lie wholly within the first `limit` tokens, and how many tokens agree, in whole pages."""
        path: list[Node] = []
        node, at = self.root, 0
        while at + self.page_size <= limit:
            child = node.children.get(self._key(tokens, at))
            if child is None:
                break
            same = self._agreeing(child.tokens, tokens, at, limit)
            at += same
            if same < len(child.tokens):
                break
            path.append(child)
            node = child
        return path, at

    def _agreeing(self, edge: list[int], tokens: Sequence[int], start: int, limit: int) -> int:
        """How many tokens of an edge are those from `start` on, in whole pages."""
        room = min(len(edge), limit - start) // self.page_size * self.page_size
        if edge[:room] == list(tokens[start : start + room]):
            return room
        same = 0
        while edge[same : same + self.page_size] == list(tokens[start + same : start + same + self.page_size]):
            same += self.page_size
        return same

    def _attach(self, parent: Node, child: Node) -> Node:
        child.parent = parent
        parent.children[self._key(child.tokens, 0)] = child
        return child

    def _split(self, node: Node, end: int) -> Node:
        """A new node that ends after `end` tokens, within the edge of `node`, which becomes its child."""
        assert node.parent is not None
        cut = len(node.tokens) - (node.end - end)
        upper = Node(node.tokens[:cut], node.pages[: cut // self.page_size], end, node.parent)
        node.tokens, node.pages = node.tokens[cut:], node.pages[cut // self.page_size :]
        self._attach(node.parent, upper)
        self._attach(upper, node)
        return upper

    def _touch(self, node: Node) -> None:
        self.recent.pop(node, None)
        self.recent[node] = None

    def _leaves(self) -> Iterator[Node]:
        """Leaves in the order in which to evict them for their pages: the least recently used first.

        Those whose pages somebody else holds, too, give nothing by themselves and come last.
        """
        leaves = [node for node in self.recent if not node.children]
        yield from (node for node in leaves if self.pages.is_idle(node.pages[-1]))
        yield from leaves

    def _beginning_with(self, node: Node) -> list[Node]:
        """Nodes with a snapshot from this one on, each behind those that begin with it."""
        found = [node]
        for one in found:  # which grows
            found += one.children.values()
        return [one for one in reversed(found) if one.snapshot is not None]

    def _snapshot_of(self, node: Node) -> int:
        assert node.snapshot is not None
        return node.snapshot

    def _evict(self, node: Node) -> None:
        """Free a node's snapshot, and what is of no use without it."""
        self.slots.free(self._snapshot_of(node))
        self.evictions += 1
        node.snapshot = None
        del self.recent[node]
        while node.parent is not None and node.snapshot is None and not node.children:
            del node.parent.children[self._key(node.tokens, 0)]
            self.pages.uncache(node.pages)
            node = node.parent
        if node.parent is not None and node.snapshot is None and len(node.children) == 1:
            self._merge(node)

    def _merge(self, node: Node) -> None:
        """Put a node without snapshot and its only child together."""
        assert node.parent is not None
        (child,) = node.children.values()
        child.tokens, child.pages = node.tokens + child.tokens, node.pages + child.pages
        self._attach(node.parent, child)
