"""Verify windows beside the float64 oracle: draw, verify, compare every token, commit, compare every state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from oracle import Layer, poison, relative_error
from torch import Tensor

from replayssm import ReplayPool

Tree = Callable[[int, torch.Generator], list[int]]


def chain(tokens: int, _: torch.Generator) -> list[int]:
    return list(range(-1, tokens - 1))


def wide(width: int) -> Tree:
    """A tree in which every token, and the committed state, has `width` children."""
    return lambda tokens, _: [i // width - 1 for i in range(tokens)]


def random_tree(tokens: int, rng: torch.Generator) -> list[int]:
    return [int(torch.randint(-1, i, (1,), generator=rng)) if i else -1 for i in range(tokens)]


TREES: dict[str, Tree] = {"chain": chain, "width2": wide(2), "width3": wide(3), "random": random_tree}


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Tokens from the committed state to `node`, which is included; none for −1."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def int32(values: object, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Run:
    """Slots of a one-layer pool beside their float64 states. Everything not in use holds NaN."""

    def __init__(self, layer: Layer, num_rows: int = 2, *, ring: int, tolerance: float = 1e-6, **options: object):
        self.layer, self.tolerance = layer, tolerance
        settings = {"ring_len": ring, "max_window": min(16, ring), "activation_dtype": layer.dtype, **options}
        self.pool = ReplayPool(
            [layer.spec],
            num_rows + 3,
            device=layer.device,
            backend=layer.backend,
            **settings,  # type: ignore[arg-type]
        )
        poison(self.pool)
        self.rows = self.pool.alloc(num_rows)
        self.states = {slot: layer.zero_state(1) for slot in self.rows}
        self.rng = torch.Generator().manual_seed(layer.seed)

    def pick(self, largest: int) -> int:
        """A random number from 0 to `largest`."""
        return int(torch.randint(0, largest + 1, (1,), generator=self.rng))

    def decode(self, batch: Sequence[int] | None = None, force: Tensor | None = None) -> None:
        batch = self.rows if batch is None else batch
        slots = self.pool.slot_tensor(batch)
        inputs = self.layer.draw(len(batch))
        y = self.layer.decode(inputs, **self.pool.state_args(0), slots=slots, force_flush=force)
        self.pool.advance(slots, force)
        for row, slot in enumerate(batch):
            if slot >= 0:
                one = {name: x[row : row + 1] for name, x in inputs.items()}
                self.states[slot], expected = self.layer.reference(one, self.states[slot])
                self.compare(y[row], expected[0])
        self.check_states()

    def verify(
        self,
        tokens: int,
        counts: Sequence[int] | None = None,
        batch: Sequence[int] | None = None,
        tree: Tree = chain,
        inputs: dict[str, Tensor] | None = None,
    ) -> None:
        """Run a window and compare the outputs of its tokens; a chain goes without parents."""
        layer = self.layer
        self.batch = list(self.rows if batch is None else batch)
        self.counts = [tokens] * len(self.batch) if counts is None else list(counts)
        self.parents = [tree(tokens, self.rng) for _ in self.batch]
        given = layer.draw_window(len(self.batch), tokens) if inputs is None else inputs
        given = {name: x.clone() for name, x in given.items()}
        shown = [[*line[:n], *([99] * (tokens - n))] for line, n in zip(self.parents, self.counts, strict=True)]
        for row, n in enumerate(self.counts):
            for x in given.values():
                x[row, n:] = float("nan")
        self.y = layer.verify(
            given,
            **self.pool.verify_args(0),
            slots=self.pool.slot_tensor(self.batch),
            num_tokens=None if counts is None else int32(self.counts, layer.device),
            parents=None if tree is chain else int32(shown, layer.device),
        )
        assert self.y.dtype == layer.dtype
        self.after: list[list[Tensor]] = []
        for row, (slot, n) in enumerate(zip(self.batch, self.counts, strict=True)):
            assert (self.y[row, n if slot >= 0 else 0 :] == 0).all()
            self.after.append([])
            if slot >= 0 and n:
                one = {name: x[row : row + 1, :n] for name, x in given.items()}
                states, expected = layer.reference_window(one, self.states[slot], self.parents[row][:n])
                self.compare(self.y[row, :n], expected[0])
                self.after[row] = states

    def commit(self, paths: Sequence[Sequence[int]] | None = None) -> None:
        """Accept a path of each row, by default all of a chain, and compare the states."""
        device = self.layer.device
        paths = [range(n) for n in self.counts] if paths is None else paths
        tokens = self.y.shape[1]
        by_path = any(list(path) != list(range(len(path))) for path in paths)
        path = int32([[*path, *([77] * (tokens - len(path)))] for path in paths], device) if by_path else None
        slots, taken = self.pool.slot_tensor(self.batch), int32([len(path) for path in paths], device)
        self.pool.commit(slots, int32(self.counts, device), taken, path)
        for slot, nodes, states in zip(self.batch, paths, self.after, strict=True):
            if slot >= 0 and len(nodes):
                self.states[slot] = states[nodes[-1]]
        self.check_states()

    def random_paths(self) -> list[list[int]]:
        """For each row a path that can be accepted, often an empty one."""
        return [
            path_to(self.pick(n) - 1, parents) if slot >= 0 else []
            for slot, n, parents in zip(self.batch, self.counts, self.parents, strict=True)
        ]

    def compare(self, y: Tensor, expected: Tensor) -> None:
        # A GPU's exponential is good for two units more; states stay within the tolerance.
        exact = self.tolerance * (2 if self.layer.device == "cuda" else 1)
        error = {torch.float32: exact, torch.bfloat16: 4e-3, torch.float16: 5e-4}[self.layer.dtype]
        assert relative_error(y, expected) < error

    def check_states(self) -> None:
        for slot, state in self.states.items():
            if float(state.norm()):
                assert relative_error(self.pool.read_state(0, [slot]), state) < self.tolerance
            else:
                assert float(self.pool.read_state(0, [slot]).norm()) == 0
