"""SGLang's and vLLM's call contracts, against the float64 recurrence."""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from oracle import LOWER_BOUND, Layer, relative_error
from torch import Tensor

from replayssm import recurrence
from replayssm.integrations.sglang import fused_recurrent_linear_replayssm_decode
from replayssm.integrations.vllm import selective_state_update_replayssm_output_only

SLOTS = 7
DELTA_SHAPES = [
    *("gdn-128x128-ratio2", "gdn-64x64-ratio3", "gdn-16x16-ratio8", "gdn-olmo-96x192", "gdn-odd-17x33"),
    *("kda-128x128", "kda-bounded-64x64"),
]
MAMBA2_SHAPES = ["mamba2-64x128-groups2", "mamba2-80x128-groups1", "mamba2-64x64-groups4"]
SMALL = {"gdn": ("gdn", 1, 2, 16, 8), "kda": ("kda", 2, 2, 8, 16), "kda_bounded": ("kda_bounded", 1, 1, 16, 16)}
SMALL["kda_grouped"] = ("kda", 2, 4, 8, 16)  # SGLang allows fewer key heads than value heads for KDA too
SMALL_MAMBA2 = ("mamba2", 2, 4, 16, 8)


class Contract:
    """The tensors that a caller owns, filled with NaN, and the state that the recurrence says each slot has."""

    def __init__(self, layer: Layer, ring_len: int, state_dtype: torch.dtype, ring_dtype: torch.dtype) -> None:
        self.layer, self.ring_len = layer, ring_len
        h_k, h_v, d_k, d_v = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim

        def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
            page = torch.full((SLOTS, *shape), float("nan"), dtype=dtype, device=layer.device)
            return page.view(SLOTS, -1)[:, : page[0].numel()].view(page.shape)

        channel = (d_k,) if layer.kind.startswith("kda") else ()
        # As in a pool of larger pages: the slot stride of the state is free.
        pages = torch.full((SLOTS, h_v + 1, d_v, d_k), float("nan"), dtype=state_dtype, device=layer.device)
        self.state = pages[:, :h_v]
        self.ring_u = poisoned(h_v, ring_len, d_v, dtype=ring_dtype)
        self.ring_k = poisoned(h_k, ring_len, d_k, dtype=ring_dtype)
        self.ring_g = poisoned(h_v, ring_len, *channel, dtype=torch.float32)
        self.expected: dict[int, Tensor] = {}
        self.cursors: dict[int, int] = {}

    def join(self, slot: int) -> None:
        """A prefill left a state in this slot."""
        self.state[slot] = torch.randn(self.state.shape[1:], generator=self.layer.rng).to(self.layer.device)
        self.expected[slot] = self.state[slot : slot + 1].double()
        self.cursors[slot] = 0

    def step(self, rows: list[int], forced: set[int]) -> tuple[Tensor, Tensor, list[int]]:
        """Step these slots, negative for padding; output, what it should be, and the slots that flush."""
        inputs = self.layer.draw(len(rows))
        write_pos = [self.cursors.get(slot, 99) for slot in rows]
        y = self.call(inputs, rows, write_pos, [int(slot in forced) for slot in rows])
        wanted = torch.zeros(y.shape, dtype=torch.float64, device=y.device)
        flushed = []
        for row, slot in enumerate(rows):
            if slot < 0:
                continue
            one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
            self.expected[slot], wanted[row : row + 1] = self.layer.reference(one, self.expected[slot])
            flush = slot in forced or self.cursors[slot] == self.ring_len - 1
            self.cursors[slot] = 0 if flush else self.cursors[slot] + 1
            if flush:
                flushed.append(slot)
        return y, wanted, flushed

    def folded(self, slot: int) -> Tensor:
        """The state that checkpoint and records say, as their project defines a record, in float64."""
        at, count = slice(slot, slot + 1), self.cursors[slot]
        u, k, g = (ring[at, :, :count].double() for ring in (self.ring_u, self.ring_k, self.ring_g))
        u, g = self.records(u, g)
        return recurrence.fold(self.state[at].double(), u, k, g)

    def call(self, inputs: dict[str, Tensor], rows: list[int], write_pos: list[int], forced: list[int]) -> Tensor:
        raise NotImplementedError

    def records(self, u: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return u, g

    def ints(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.layer.device)


class SGLang(Contract):
    def arguments(self, inputs: dict[str, Tensor], rows: list[int], write_pos: list[int]) -> dict[str, Any]:
        layer, batch = self.layer, len(rows)
        wide = torch.cat([inputs["q"].flatten(1), inputs["k"].flatten(1), inputs["v"].flatten(1), inputs["b"]], dim=1)
        return {
            "mixed_qkv": wide[:, : -layer.num_v_heads],
            "a": inputs["a"],
            "b": inputs["b"],
            "A_log": layer.A_log,
            "dt_bias": layer.dt_bias,
            "scale": layer.head_k_dim**-0.5,
            "initial_state": self.state,
            "d_cache": self.ring_u,
            "k_cache": self.ring_k,
            "g_cache": self.ring_g,
            "out": inputs["v"].new_full((batch, 1, layer.num_v_heads, layer.head_v_dim), 42.0),
            "ssm_state_indices": self.ints(rows),
            "write_pos": self.ints(write_pos),
            "use_qk_l2norm_in_kernel": True,
            "is_kda": layer.kind.startswith("kda"),
            "backend": layer.backend,
        }

    def call(self, inputs: dict[str, Tensor], rows: list[int], write_pos: list[int], forced: list[int]) -> Tensor:
        arguments = self.arguments(inputs, rows, write_pos)
        if any(forced):
            arguments["force_flush"] = self.ints(forced)
        if self.layer.kind == "kda_bounded":
            arguments["lower_bound"] = LOWER_BOUND
        out, state = fused_recurrent_linear_replayssm_decode(**arguments)
        assert out is arguments["out"]
        assert state is self.state
        return out.squeeze(1)


class VLLM(Contract):
    null_block_id = 0

    def arguments(self, inputs: dict[str, Tensor], rows: list[int], write_pos: list[int]) -> dict[str, Any]:
        layer = self.layer
        head_dim, state_dim = layer.head_v_dim, layer.head_k_dim
        assert layer.D is not None
        index = [self.null_block_id if slot < 0 else slot for slot in rows]
        return {
            "state": self.state,
            "x": inputs["x"],
            "dt": inputs["dt"][..., None].expand(-1, -1, head_dim),
            "A": (-layer.A_log.exp())[:, None, None].expand(-1, head_dim, state_dim),
            "B": inputs["B"],
            "C": inputs["C"],
            "D": layer.D[:, None].expand(-1, head_dim),
            "dt_bias": layer.dt_bias[:, None].expand(-1, head_dim),
            "z": inputs["z"],
            "dt_softplus": True,
            "x_cache": self.ring_u,
            "dt_cache": self.ring_g,
            "B_cache": self.ring_k,
            "write_pos": self.ints([*write_pos, 99]),  # a buffer for graphs is longer than the batch
            "is_flush": self.ints([*(int(p == self.ring_len - 1) for p in write_pos), 1], torch.bool),
            "max_cache_len": self.ring_len,
            "state_batch_indices": self.ints(index)[:, None],
            "null_block_id": self.null_block_id,
            "out": torch.full_like(inputs["x"], 42.0),
            "backend": layer.backend,
        }

    def call(self, inputs: dict[str, Tensor], rows: list[int], write_pos: list[int], forced: list[int]) -> Tensor:
        arguments = self.arguments(inputs, rows, write_pos)
        arguments["is_flush"][: len(rows)] |= self.ints(forced, torch.bool)
        out = selective_state_update_replayssm_output_only(**arguments)
        assert out is arguments["out"]
        return torch.where(self.ints(rows)[:, None, None] < 0, out - 42, out)  # padding rows are left alone

    def records(self, u: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return u * g[..., None], g * -self.layer.A_log.double().exp()[:, None]


def check_program(contract: Contract, steps: int, y_bound: float, state_bound: float) -> None:
    """Rows that join one after the other, padding between them, natural flushes and forced ones."""
    rng = random.Random(5)
    slots = [5, 2, 6, 3]
    for step in range(steps):
        if step % 3 == 0 and step // 3 < len(slots):
            contract.join(slots[step // 3])
        active = [slot for slot in contract.cursors if rng.random() < 0.9]
        rng.shuffle(active)
        rows = [*active[:1], -1, *active[1:]]
        forced = {slot for slot in active if rng.random() < 0.05 and step > 2}
        y, wanted, flushed = contract.step(rows, forced)
        padding = [i for i, slot in enumerate(rows) if slot < 0]
        assert (y[padding] == 0).all()
        for row, slot in enumerate(rows):
            if slot >= 0:
                assert relative_error(y[row], wanted[row]) < y_bound
        for slot in flushed:
            assert relative_error(contract.state[slot : slot + 1], contract.expected[slot]) < state_bound
        for slot in active if step % 4 == 0 else []:
            assert relative_error(contract.folded(slot), contract.expected[slot]) < state_bound
    for slot in set(range(SLOTS)) - set(slots):
        for tensor in (contract.state, contract.ring_u, contract.ring_k, contract.ring_g):
            assert tensor[slot].isnan().all()


@pytest.fixture
def interpreted() -> dict[str, str]:
    if torch.cuda.is_available() or find_spec("triton") is None:
        pytest.skip("needs triton, and kernels defined for its interpreter")
    return {"device": "cpu", "backend": "triton"}


def y_bound(place: dict[str, str]) -> float:
    # The GPU's exponential is off by two units in the last place, a CPU's by less than one.
    return 1e-6 if place["device"] == "cpu" else 2e-6


@pytest.mark.parametrize("ring_len", [1, 4, 8, 16])
@pytest.mark.parametrize("shape", DELTA_SHAPES)
def test_sglang_contract(shape: str, ring_len: int, place: dict[str, str]) -> None:
    contract = SGLang(Layer.named(shape, **place), ring_len, torch.float32, torch.float32)
    check_program(contract, 2 * ring_len + 13, y_bound(place), 1e-6)


@pytest.mark.parametrize("ring_len", [1, 4, 8, 16])
@pytest.mark.parametrize("shape", MAMBA2_SHAPES)
def test_vllm_contract(shape: str, ring_len: int, place: dict[str, str]) -> None:
    contract = VLLM(Layer.named(shape, **place), ring_len, torch.float32, torch.float32)
    check_program(contract, 2 * ring_len + 13, y_bound(place), 1e-6)


@pytest.mark.parametrize("kind", [*SMALL, "mamba2"])
@pytest.mark.parametrize("ring_len", [1, 4])
def test_contracts_in_the_interpreter(kind: str, ring_len: int, interpreted: dict[str, str]) -> None:
    kwargs = {"dtype": torch.float32, **interpreted}
    layer = Layer(*SMALL_MAMBA2, **kwargs) if kind == "mamba2" else Layer(*SMALL[kind], **kwargs)
    contract = (VLLM if kind == "mamba2" else SGLang)(layer, ring_len, torch.float32, torch.float32)
    check_program(contract, 12, 1e-6, 1e-6)


# (state, ring, bound of the state error): what a 16-bit ring or state loses, it loses in these projects' contracts.
PRECISIONS = {
    "rings and state in float32": (torch.float32, torch.float32, 1e-6),
    "rings in bfloat16": (torch.float32, torch.bfloat16, 4e-3),
    "all in bfloat16": (torch.bfloat16, torch.bfloat16, 8e-3),
    "float16 rings and state": (torch.float16, torch.float16, 1e-3),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", [*SMALL, "mamba2"])
def test_bfloat16_inputs(kind: str, precision: str, place: dict[str, str]) -> None:
    """With float32 rings, as SGLang allocates them beside a float32 state, states stay exact to 1e-6."""
    state_dtype, ring_dtype, bound = PRECISIONS[precision]
    shape = SMALL_MAMBA2 if kind == "mamba2" else SMALL[kind]
    layer = Layer(*shape, dtype=torch.bfloat16, **place)
    contract = (VLLM if kind == "mamba2" else SGLang)(layer, 8, state_dtype, ring_dtype)
    check_program(contract, 30, 2**-8 + 2 * bound, bound)  # 2⁻⁸ is the rounding of the output


@pytest.mark.parametrize("use_norm", [True, False])
def test_sglang_ring_holds_normalised_keys(use_norm: bool, place: dict[str, str]) -> None:
    """k_cache is what the caller's kernels expect: keys divided by their norms; as they come without the norm."""
    contract = SGLang(Layer(*SMALL["gdn"], **place), 4, torch.float32, torch.float32)
    contract.join(1)
    inputs = contract.layer.draw(1)
    arguments = contract.arguments(inputs, [1], [0]) | {"use_qk_l2norm_in_kernel": use_norm}
    fused_recurrent_linear_replayssm_decode(**arguments)
    k = inputs["k"] / (inputs["k"].square().sum(-1, keepdim=True) + 1e-6).sqrt() if use_norm else inputs["k"]
    assert relative_error(contract.ring_k[1:2, :, 0], k) < 1e-6
    assert contract.ring_k[1:2, :, 1:].isnan().all()


def test_vllm_rings_hold_the_inputs(place: dict[str, str]) -> None:
    """x and B bit for bit, and Δ after bias and softplus."""
    layer = Layer(*SMALL_MAMBA2, dtype=torch.bfloat16, **place)
    contract = VLLM(layer, 4, torch.float32, torch.bfloat16)
    contract.join(3)
    inputs = layer.draw(1)
    selective_state_update_replayssm_output_only(**contract.arguments(inputs, [3], [0]))
    assert torch.equal(contract.ring_u[3:4, :, 0], inputs["x"])
    assert torch.equal(contract.ring_k[3:4, :, 0], inputs["B"])
    delta = torch.nn.functional.softplus(inputs["dt"].double() + layer.dt_bias.double())
    assert relative_error(contract.ring_g[3:4, :, 0], delta) < 1e-6


def test_vllm_without_heads_and_with_free_parameters(place: dict[str, str]) -> None:
    """One head without its dimension, D for each channel, no bias, no softplus, no z, no indices; int8 flags."""
    torch.manual_seed(0)
    device = place["device"]
    slots, p, n, ring_len = 3, 8, 16, 2
    state = torch.randn(slots, p, n, device=device)
    expected = state.double()
    A, D = -torch.rand(1, 1, device=device), torch.randn(p, device=device)
    x_cache = torch.full((slots, 1, ring_len, p), float("nan"), device=device)
    dt_cache = torch.full((slots, 1, ring_len), float("nan"), device=device)
    B_cache = torch.full((slots, 1, ring_len, n), float("nan"), device=device)
    for step in range(5):
        x, B, C = (torch.randn(slots, size, device=device) for size in (p, n, n))
        dt = torch.rand(slots, 1, device=device)
        position = step % ring_len
        y = selective_state_update_replayssm_output_only(
            state,
            x,
            dt.expand(-1, p),
            A.expand(p, n),
            B,
            C,
            D,
            x_cache=x_cache,
            dt_cache=dt_cache,
            B_cache=B_cache,
            write_pos=torch.full((slots,), position, dtype=torch.int32, device=device),
            is_flush=torch.full((slots,), int(position == ring_len - 1), dtype=torch.int8, device=device),
            max_cache_len=ring_len,
            out=torch.empty_like(x),
            backend=place["backend"],
        )
        assert y.shape == x.shape
        decay = (dt.double() * A.double()).exp()[..., None]
        expected = expected * decay + (dt * x).double()[..., None] * B.double()[:, None]
        wanted = (expected @ C.double()[..., None]).squeeze(-1) + D.double() * x.double()
        assert relative_error(y, wanted) < y_bound(place)
        if position == ring_len - 1:
            assert relative_error(state, expected) < 1e-6


def test_outputs_may_be_strided(place: dict[str, str]) -> None:
    layer = Layer(*SMALL_MAMBA2, **place)
    contract = VLLM(layer, 2, torch.float32, torch.float32)
    contract.join(1)
    inputs = layer.draw(2)
    other = VLLM(layer, 2, torch.float32, torch.float32)
    other.state.copy_(contract.state)
    plain = selective_state_update_replayssm_output_only(**contract.arguments(inputs, [1, -1], [0, 0]))
    out = torch.full_like(inputs["x"], 42.0).transpose(1, 2).contiguous().transpose(1, 2)
    strided = selective_state_update_replayssm_output_only(**other.arguments(inputs, [1, -1], [0, 0]) | {"out": out})
    assert torch.equal(plain, strided)
    assert (strided[1] == 42).all()


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixed_qkv": ones(2, 49)}, r"mixed_qkv has shape \[2, 49\]: \[B, 2\*H\*K \+ HV\*V\] = \[2, 48\] is wanted"),
        ({"mixed_qkv": ones(48, 2).T}, r"mixed_qkv has strides \(1, 2\): a contiguous last dimension"),
        ({"mixed_qkv": [1]}, "mixed_qkv is a list: a tensor"),
        ({"a": ones(2, 2, 16)}, r"a has shape \[2, 2, 16\]: \[B, HV\] = \[2, 2\]"),
        ({"is_kda": True}, r"a has shape \[2, 2\]: \[B, HV, K\]"),
        ({"d_cache": ones(7, 2, 3, 8)}, r"d_cache has shape \[7, 2, 3, 8\]: \[slots, HV, L, V\] = \[7, 2, 4, 8\]"),
        ({"g_cache": ones(7, 2, 4, dtype=torch.bfloat16)}, "g_cache has dtype bfloat16: float32 is wanted"),
        ({"k_cache": ones(7, 3, 4, 16)}, "initial_state has HV = 2 heads, k_cache H = 3"),
        ({"out": ones(2, 2, 8)}, r"out has shape \[2, 2, 8\]: \[B, 1, HV, V\]"),
        ({"write_pos": ones(2)}, "write_pos has dtype float32: int32"),
        ({"write_pos": ones(3, dtype=torch.int32)}, r"write_pos has shape \[3\]: \[B\] = \[2\]"),
        ({"write_pos": torch.tensor([0, 4], dtype=torch.int32)}, "write_pos holds 4: numbers from 0 to L - 1 = 3"),
        ({"write_pos": torch.tensor([-1, 0], dtype=torch.int32)}, "write_pos holds -1"),
        ({"ssm_state_indices": torch.tensor([0, 7])}, "ssm_state_indices holds 7: numbers below N = 7"),
        ({"ssm_state_indices": torch.tensor([3, 3])}, "ssm_state_indices holds 3 more than once"),
        ({"force_flush": ones(2)}, "force_flush has dtype float32: int32 or bool"),
        ({"lower_bound": -5.0}, "lower_bound is -5.0, is_kda is False"),
        ({"backend": "nope"}, "backend 'nope' is unknown"),
    ],
)
def test_wrong_sglang_arguments_are_named(change: dict[str, Any], message: str) -> None:
    contract = SGLang(Layer(*SMALL["gdn"]), 4, torch.float32, torch.float32)
    arguments = contract.arguments(contract.layer.draw(2), [1, 2], [0, 0]) | change
    with pytest.raises(ValueError, match=message) as error:
        fused_recurrent_linear_replayssm_decode(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_cache": None}, "x_cache is a NoneType: a tensor is wanted"),
        ({"out": None}, "out is a NoneType"),
        ({"x": 3}, "x is a int"),
        ({"dt": ones(2, 4, 8)}, r"dt has strides \(32, 8, 1\): one number per head, expanded, is wanted"),
        ({"A": ones(4, 8, 16)}, "A has strides"),
        ({"dt_bias": ones(4, 8)}, "dt_bias has strides"),
        ({"B": ones(2, 3, 16)}, "state has H = 4 heads, B has G = 3 groups"),
        ({"C": ones(2, 4, 16)}, r"C has shape \[2, 4, 16\]: \[B, G, N\] = \[2, 2, 16\]"),
        ({"max_cache_len": 5}, r"x_cache has shape \[7, 4, 4, 8\]: \[slots, H, L, P\] = \[7, 4, 5, 8\]"),
        ({"max_cache_len": 0}, "max_cache_len is 0"),
        ({"dt_cache": ones(7, 4, 4, dtype=torch.float16)}, "dt_cache has dtype float16: float32"),
        ({"write_pos": ones(1, dtype=torch.int32)}, r"write_pos has shape \[1\]: \[B\] = \[2\]"),
        ({"is_flush": ones(2)}, "is_flush has dtype float32: bool or int8 or int32"),
        ({"state_batch_indices": torch.tensor([1, 9])}, "state_batch_indices holds 9"),
        ({"state_batch_indices": torch.tensor([1, 1])}, "state_batch_indices holds 1 more than once"),
        ({"enable_stochastic_rounding": True}, "enable_stochastic_rounding is True"),
    ],
)
def test_wrong_vllm_arguments_are_named(change: dict[str, Any], message: str) -> None:
    contract = VLLM(Layer(*SMALL_MAMBA2), 4, torch.float32, torch.float32)
    arguments = contract.arguments(contract.layer.draw(2), [1, 2], [0, 0]) | change
    with pytest.raises(ValueError, match=message) as error:
        selective_state_update_replayssm_output_only(**arguments)
    assert "\n" not in str(error.value)
