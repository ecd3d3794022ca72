"""Pages: references, the free ones, and those that only the prefix cache holds."""

import pytest

from replayssm.engine.pages import PagePool


def test_pages_that_are_taken_are_free_again_after_their_release():
    pool = PagePool(4)
    pages = pool.take(3)
    assert len(set(pages)) == 3
    assert pool.num_free == 1
    pool.release(pages)
    assert pool.num_free == 4


def test_a_shared_page_is_free_after_its_last_release():
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.share([page])
    pool.release([page])
    assert pool.num_free == 1
    pool.release([page])
    assert pool.num_free == 2


def test_more_pages_than_are_free_are_refused_and_none_is_taken():
    pool = PagePool(2)
    pool.take(1)
    with pytest.raises(IndexError, match="2 pages are wanted, 1 of 2 are free"):
        pool.take(2)
    assert pool.num_free == 1


def test_a_page_is_idle_while_the_cache_alone_holds_it():
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.cache([page])
    assert not pool.is_idle(page)
    pool.release([page])  # its sequence ends
    assert pool.is_idle(page)
    assert (pool.num_free, pool.num_idle, pool.num_available) == (1, 1, 2)
    pool.share([page])  # another begins with it
    assert (pool.num_free, pool.num_idle, pool.num_available) == (1, 0, 1)
    pool.release([page])
    assert pool.num_idle == 1
    pool.uncache([page])
    assert (pool.num_free, pool.num_idle) == (2, 0)


def test_a_page_that_the_cache_gives_up_stays_with_its_readers():
    pool = PagePool(1)
    (page,) = pool.take(1)
    pool.cache([page])
    pool.uncache([page])
    assert (pool.num_free, pool.num_idle) == (0, 0)
    pool.release([page])
    assert pool.num_free == 1
