"""What the kernels and the engine should reach on an H200, and the measured values beside it.

A target is met if it is met at every point that it speaks of: the table shows the worst of them. Kernels at L = 16.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from replayssm.bench.report import LAYER_NAMES, OURS, SHORT_DTYPES

SUITES = ("decode", "verify", "e2e")
RING_LEN = 16
LARGE, SMALL = (128, 512), (1, 8)  # batches, from and to
HALF = ("bfloat16", "float16")
HEADER = ("target", "state", "wanted", "worst", "at", "there at the roofline", "points that meet it")

Row = dict[str, Any]
Results = dict[str, list[Row]]


@dataclass(frozen=True)
class Value:
    """A measured number and the point that it is of.

    Attributes:
        bound: what it would be if ours took the roofline's time: no kernel does better. None where there is no such.
    """

    number: float
    where: str
    bound: float | None = None


@dataclass(frozen=True)
class Target:
    """A number that every value must reach, or stay under.

    Args:
        what: is asked for.
        state: dtypes of the checkpoint, as the table says them.
        limit: the number.
        values: what was measured, from the rows by suite.
        at_most: whether smaller is better.
    """

    what: str
    state: str
    limit: float
    values: Callable[[Results], Iterable[Value]]
    at_most: bool = False

    def line(self, results: Results) -> list[str]:
        """Cells of the table."""
        wanted = f"{'≤' if self.at_most else '≥'} {self.limit:.2f}"
        values = list(self.values(results))
        if not values:
            return [self.what, self.state, wanted, "–", "", "", "not measured"]
        worst = (max if self.at_most else min)(values, key=lambda value: value.number)
        met = sum(map(self._is_met, values))
        verdict = "all" if met == len(values) else f"{met} of {len(values)}"
        bound = "–" if worst.bound is None else f"{worst.bound:.3f}"
        return [self.what, self.state, wanted, f"{worst.number:.3f}", worst.where, bound, verdict]

    def _is_met(self, value: Value) -> bool:
        return value.number <= self.limit if self.at_most else value.number >= self.limit


# Kernels


@dataclass(frozen=True)
class Point:
    """Everybody's rows at one operator, dtype, batch and window."""

    op: str
    dtype: str
    batch: int
    window: int
    rows: tuple[Row, ...]
    beside: tuple[Row, ...]  # decode steps at the same dtype and batch

    @property
    def where(self) -> str:
        window = f" T={self.window}" if self.window > 1 else ""
        return f"B={self.batch}{window}"

    def at_roofline(self) -> "Point":
        """The same, had ours taken the roofline's time."""

        def ideal(rows: tuple[Row, ...]) -> tuple[Row, ...]:
            return tuple(row | {"us": row["roofline_us"]} if is_ours(row) and row["us"] else row for row in rows)

        return replace(self, rows=ideal(self.rows), beside=ideal(self.beside))

    def fastest(self, fits: Callable[[Row], bool], rows: tuple[Row, ...] | None = None) -> Row | None:
        rows = self.rows if rows is None else rows
        timed = [row for row in rows if row["us"] and fits(row)]
        return min(timed, key=lambda row: float(row["us"]), default=None)


Metric = Callable[[Point], float | None]


def is_ours(row: Row) -> bool:
    return row["contender"] in OURS


def share_of_roofline(point: Point) -> float | None:
    ours = point.fastest(is_ours)
    return ours["roofline_us"] / ours["us"] if ours else None


def over(*names: str) -> Metric:
    """How many times ours the fastest of these contenders takes."""
    return _over(lambda row: row["contender"] in names)


def over_no_ring() -> Metric:
    """How many times ours the fastest contender takes that writes the state at every token."""
    return _over(lambda row: row["ring_len"] is None)


def _over(fits: Callable[[Row], bool]) -> Metric:
    def ratio(point: Point) -> float | None:
        ours, theirs = point.fastest(is_ours), point.fastest(fits)
        return theirs["us"] / ours["us"] if ours and theirs else None

    return ratio


def per_decode(point: Point) -> float | None:
    """How many times our decode step our window takes."""
    window, step = point.fastest(is_ours), point.fastest(is_ours, point.beside)
    return window["us"] / step["us"] if window and step else None


def points(rows: list[Row]) -> Iterator[Point]:
    """All points at L = 16."""
    rows = [row for row in rows if row["ring_len"] in (None, RING_LEN)]
    places = dict.fromkeys((row["op"], row["state_dtype"], row["batch"], row["window"]) for row in rows)
    for op, dtype, batch, window in places:
        here = [row for row in rows if (row["state_dtype"], row["batch"]) == (dtype, batch)]
        beside = tuple(row for row in here if row["op"] == op.replace("_verify", "_decode"))
        yield Point(op, dtype, batch, window, tuple(r for r in here if (r["op"], r["window"]) == (op, window)), beside)


def kernel(
    op: str,
    dtypes: tuple[str, ...],
    batches: tuple[int, int],
    metric: Metric,
    *,
    windows: tuple[int, ...] = (1,),
    suite: str = "decode",
) -> Callable[[Results], Iterable[Value]]:
    """Values of a metric at all points of an operator, or of all operators whose names end so."""

    def values(results: Results) -> Iterator[Value]:
        for point in points(results.get(suite, [])):
            fits = point.op.endswith(op) and point.dtype in dtypes and point.window in windows
            if not fits or not batches[0] <= point.batch <= batches[1]:
                continue
            number = metric(point)
            if number is not None:
                layer = f"{point.op.partition('_')[0]} " if point.op != op else ""
                dtype = f"{SHORT_DTYPES[point.dtype]} " if len(dtypes) > 1 else ""
                yield Value(number, f"{layer}{dtype}{point.where}", metric(point.at_roofline()))

    return values


# End to end


def rates(contender: str, beside: str, batches: tuple[int, int]) -> Callable[[Results], Iterable[Value]]:
    """How many times another contender's tokens per second one makes behind copied contexts, at its longest one."""

    def values(results: Results) -> Iterator[Value]:
        rows = [row for row in results.get("e2e", []) if row["load"] == "filled" and row["tokens_per_s"]]
        longest = max((row["prompt_tokens"] for row in rows), default=0)
        at = {(row["contender"], row["batch"]): row for row in rows if row["prompt_tokens"] == longest}
        for (name, batch), row in at.items():
            other = at.get((beside, batch))
            if name == contender and other and batches[0] <= batch <= batches[1]:
                yield Value(row["tokens_per_s"] / other["tokens_per_s"], f"B={batch}")

    return values


FP32, BF16, ALL = ("float32",), ("bfloat16",), ("float32", *HALF)
SGLANG = ("SGLang's replay", over("sglang/replay"))
FORK = ("the fork's replay", over("vllm-fork/replay"))
NO_RING = ("no ring", over_no_ring())
#: Operator; shares of the roofline in fp32 and 16 bits; rival, its factors in fp32 and bf16.
DECODE = (
    ("gdn", 0.90, 0.85, ((SGLANG, 1.12, 1.5), (NO_RING, 1.85, 1.7))),
    ("mamba2", 0.88, 0.80, ((FORK, 1.35, 1.6),)),
    ("kda", 0.85, 0.80, ((NO_RING, 1.7, 1.5), (SGLANG, 1.7, 2.5))),
)


def targets() -> Iterator[Target]:
    for kind, full, half, rivals in DECODE:
        op, step = f"{kind}_decode", f"{LAYER_NAMES[kind]} decode, B ≥ 128"
        yield Target(f"{step}: roofline / time", "fp32", full, kernel(op, FP32, LARGE, share_of_roofline))
        yield Target(f"{step}: roofline / time", "16 bits", half, kernel(op, HALF, LARGE, share_of_roofline))
        for (name, metric), in_fp32, in_bf16 in rivals:
            yield Target(f"{step}: × over {name}", "fp32", in_fp32, kernel(op, FP32, LARGE, metric))
            yield Target(f"{step}: × over {name}", "bf16", in_bf16, kernel(op, BF16, LARGE, metric))
    for state, dtypes, least in (("fp32", FP32, 1.4), ("bf16", BF16, 1.8)):
        values = kernel("_verify", dtypes, LARGE, over("vllm-fork/replay"), windows=(4,), suite="verify")
        yield Target("Windows of 4, B ≥ 128: × over the fork's replay", state, least, values)
    values = kernel("_verify", ALL, (1, 512), per_decode, suite="verify")
    yield Target("Windows of 1: time / decode step's", "all", 1.05, values, at_most=True)
    yield Target("Decode, B ≤ 8: × over no ring", "all", 1.0, kernel("_decode", ALL, SMALL, over_no_ring()))
    no_ring = kernel("_verify", ALL, SMALL, over_no_ring(), windows=(1, 2, 4, 8), suite="verify")
    yield Target("Windows, B ≤ 8: × over no ring", "all", 1.0, no_ring)
    for batch, least in ((1, 1.0), (256, 1.25), (512, 1.3)):
        values = rates("replay", "no-replay", (batch, batch))
        yield Target(f"Engine, B = {batch}: tokens/s with / without replay", "fp32", least, values)
    yield Target(
        "Engine, windows of 4, B ≤ 32: tokens/s / decode's", "fp32", 1.8, rates("speculate", "replay", (1, 32))
    )
    yield Target(
        "Engine, windows of 4, B ≤ 128: tokens/s / decode's", "fp32", 1.0, rates("speculate", "replay", (1, 128))
    )


def lines(results: Results) -> list[list[str]]:
    """The table, without its header."""
    return [target.line(results) for target in targets()]
