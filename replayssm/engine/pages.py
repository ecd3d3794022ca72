"""Pages of keys and values: which are free, who holds the others."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Numbers of the pages that attention layers keep keys and values in, counted by reference.

    A page holds the same `page_size` tokens in every attention layer. Running sequences and the prefix cache each hold
    references; a page without any is free. Only the cache gives a page up for somebody else, so the pages that it alone
    holds, which are *idle*, are as good as free.

    Args:
        num_pages: how many there are.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_idle = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._cached = [False] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that are free, or would be without the prefix cache."""
        return len(self._free) + self.num_idle

    def take(self, count: int) -> list[int]:
        """`count` free pages, each with one reference.

        Raises:
            IndexError: fewer are free; none is taken.
        """
        if count > len(self._free):
            raise IndexError(f"{count} pages are wanted, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to pages that somebody holds."""
        for page in pages:
            self._idle(page, -1)
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less; pages without any are free."""
        for page in pages:
            self._holders[page] -= 1
            self._idle(page, +1)
            if not self._holders[page]:
                self._free.append(page)

    def cache(self, pages: Iterable[int]) -> None:
        """As :meth:`share`, for the prefix cache, which holds a page at most once."""
        for page in pages:
            self._holders[page] += 1
            self._cached[page] = True

    def uncache(self, pages: Iterable[int]) -> None:
        """As :meth:`release`, for the prefix cache."""
        for page in pages:
            self._idle(page, -1)
            self._cached[page] = False
        self.release(pages)

    def is_free(self, page: int) -> bool:
        """Whether nobody holds it."""
        return not self._holders[page]

    def is_idle(self, page: int) -> bool:
        """Whether the prefix cache alone holds it."""
        return self._cached[page] and self._holders[page] == 1

    def _idle(self, page: int, change: int) -> None:
        if self._cached[page] and self._holders[page] == 1:
            self.num_idle += change
