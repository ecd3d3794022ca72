"""What an engine has done and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Tally:
    """The counts among :class:`EngineStats` that the engine itself makes."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_hits: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    batch: int = 0
    cancelled: int = 0
    finished: int = 0
    drafted: int = 0
    accepted: int = 0
    windows: int = 0
    waited_seconds: float = 0.0


@dataclass
class EngineStats(Tally):
    """Counts since the engine was made, and what it holds now.

    Attributes:
        queued, running: samples that wait, and that have a row.
        prompt_tokens: of all requests that began to run.
        cached_tokens: of these, from the prefix cache.
        cache_hits: requests with any of them.
        prefilled_tokens: tokens that prefills computed; after a preemption some of them again.
        generated_tokens: new tokens.
        steps: of the engine.
        batch: rows of the last decode step.
        preemptions: samples that had to make room.
        cancelled, finished: requests.
        pages_total, pages_free: pages of keys and values; free ones hold nothing.
        slots_total, slots_free: slots of recurrent state; free ones hold nothing.
        snapshots: slots that the prefix cache holds.
        evictions: snapshots that the prefix cache gave up.
        drafted, accepted: tokens of speculation.
        windows: verify windows that held drafts.
        waited_seconds: in which the host did nothing but wait for the device.
        counters: of the pool, see :meth:`replayssm.ReplayPool.counters`.
    """

    queued: int = 0
    running: int = 0
    preemptions: int = 0
    pages_total: int = 0
    pages_free: int = 0
    slots_total: int = 0
    slots_free: int = 0
    snapshots: int = 0
    evictions: int = 0
    counters: dict[str, int] = field(default_factory=dict)
