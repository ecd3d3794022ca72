"""Verify windows in Triton's interpreter: the claims of test_verify.py that cost little there; a GPU runs them all."""

from __future__ import annotations

import pytest
import test_verify
import torch
from oracle import KINDS

from replayssm.backends.step import Layer, Rules, Step, Window

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs test_verify.py itself")

from replayssm.backends.triton import verify_step  # noqa: E402 - after the skip where there is no Triton


def in_ci(*chosen: str) -> object:
    """The chosen kinds run in CI, the others in `make test-thorough`."""
    marks = {kind: [] if kind in chosen else [pytest.mark.thorough] for kind in KINDS}
    return pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks[kind]) for kind in KINDS])


PLACE = {"device": "cpu", "backend": "triton"}


@pytest.mark.parametrize(
    "shape",
    [
        "kda-bounded-64x64",
        pytest.param("gdn-odd-17x33", marks=pytest.mark.thorough),
        pytest.param("mamba2-64x64-groups4", marks=pytest.mark.thorough),
        pytest.param("gdn-16x16-ratio8", marks=pytest.mark.thorough),
    ],
)
def test_a_chain_equals_the_recurrence(shape: str) -> None:
    test_verify.test_every_token_and_state_of_a_chain_equals_the_recurrence(shape, 5, PLACE)


@in_ci("gdn")
def test_a_tree_equals_the_recurrence_along_its_paths(kind: str) -> None:
    test_verify.test_every_token_of_a_tree_equals_the_recurrence_along_its_path(kind, 7, "random", PLACE)


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        ("mamba2", "width2"),
        pytest.param("gdn", "chain", marks=pytest.mark.thorough),
        pytest.param("kda", "random", marks=pytest.mark.thorough),
    ],
)
def test_ragged_rows(kind: str, tree: str) -> None:
    test_verify.test_ragged_rows_padding_and_staggered_cursors(kind, tree, PLACE)


@in_ci("kda")
def test_folds(kind: str) -> None:
    test_verify.test_a_fold_takes_the_committed_records_and_no_draft(kind, PLACE)
    test_verify.test_a_fold_leaves_a_shared_snapshot_alone(kind, "random", PLACE)


@in_ci("kda")
def test_rejected_drafts_and_views(kind: str) -> None:
    test_verify.test_rejected_drafts_leave_no_trace(kind, PLACE)
    test_verify.test_inputs_may_be_views_of_one_projection(kind, PLACE)


@pytest.mark.parametrize("kind", ["kda", pytest.param("gdn", marks=pytest.mark.thorough)])
def test_strong_and_weak_decays(kind: str) -> None:
    test_verify.test_strong_and_weak_decays_side_by_side_keep_their_digits(kind, "random", PLACE)


def test_a_token_that_is_its_own_parent_ends_the_walk() -> None:
    """A GPU doesn't check parents: a wrong one gives wrong numbers, but never a walk without an end."""
    layer = test_verify.small("gdn", **PLACE)
    tokens = 3
    state = {
        "checkpoint": layer.zero_state(1, torch.float32),
        "ring_u": torch.zeros(1, layer.num_v_heads, 4, layer.head_v_dim),
        "ring_k": torch.zeros(1, layer.num_k_heads, 4, layer.head_k_dim),
        "ring_g": torch.zeros(1, layer.num_v_heads, 4),
        "write_pos": torch.zeros(1, dtype=torch.int32),
        "checkpoint_slot": torch.zeros(1, dtype=torch.int32),
    }
    step = Step(**state, slots=torch.zeros(1, dtype=torch.int32), flush_period=4, force_flush=None)
    window = Window(torch.tensor([tokens], dtype=torch.int32), torch.tensor([[-1, 1, 7]], dtype=torch.int32))
    x = layer.draw_window(1, tokens)
    tensors = Layer(*x.values(), layer.A_log, layer.dt_bias)
    y = verify_step(tensors, Rules(l2_norm=True), step, window)
    assert y.isfinite().all()
