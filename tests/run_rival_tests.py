"""Run SGLang's or vLLM's own tests of their ring decode with our functions in place of theirs.

Fetch the test file yourself, into a folder that git ignores; nothing of those projects is part of this repository::

    python tests/run_rival_tests.py .rivals/test_gdn_replayssm_decode.py

Neither project needs to be installed. Modules that their tests import are replaced by small ones: the function under
test is ours, and their step-by-step kernel, which they compare with, is the recurrence in float64. A helper file that
a test imports (vLLM's `tests/kernels/mamba/utils.py`) is read from the folder of the test, as `utils.py`. Tests of
functions that are not in `replayssm.integrations` are skipped. Without a GPU the tests run on the CPU.

Prints pytest's summary, then the largest relative error that any comparison saw, for each test and precision.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replayssm import recurrence
from replayssm.integrations.sglang import fused_recurrent_linear_replayssm_decode
from replayssm.integrations.vllm import NULL_BLOCK_ID, selective_state_update_replayssm_output_only

BACKEND = "auto"
errors: dict[str, float] = {}


def ours_delta(*args: Any, **kwargs: Any) -> Any:
    return fused_recurrent_linear_replayssm_decode(*args, **kwargs, backend=BACKEND)


def ours_mamba2(*args: Any, **kwargs: Any) -> Any:
    return selective_state_update_replayssm_output_only(*args, **kwargs, backend=BACKEND)


def skip(*_: Any, **__: Any) -> None:
    pytest.skip("replayssm.integrations has no such function")


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Their plain decode step, which writes the state at every token: the recurrence in float64."""
    h_v, d_v, d_k = initial_state.shape[1:]
    h_k = (mixed_qkv.shape[1] - h_v * d_v) // (2 * d_k)
    live = (ssm_state_indices >= 0).nonzero()[:, 0]
    slots = ssm_state_indices[live].long()
    qkv, a, b, A_log, dt_bias = (x.double() for x in (mixed_qkv[live], a[live], b[live], A_log, dt_bias))
    q, k, v = qkv.split([h_k * d_k, h_k * d_k, h_v * d_v], dim=1)
    q, k, v = q.unflatten(1, (h_k, d_k)), k.unflatten(1, (h_k, d_k)), v.unflatten(1, (h_v, d_v))
    if use_qk_l2norm_in_kernel:
        q, k = (x * recurrence.inverse_norm(x)[..., None] for x in (q, k))
    if a.shape[1] == h_v:
        g = recurrence.gdn_log_decay(a, A_log, dt_bias)
    else:
        g = recurrence.kda_log_decay(a.unflatten(1, (h_v, d_k)), A_log, dt_bias.view(h_v, d_k))
    state, y = recurrence.step(initial_state[slots].double(), q * scale, k, v, g, b.sigmoid(), "delta")
    initial_state[slots] = state.to(initial_state.dtype)
    out.zero_()
    out[live, 0] = y.to(out.dtype)
    return out, initial_state


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    out: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Their plain Mamba-2 step: the recurrence in float64."""
    assert out is not None
    slots = torch.arange(len(x), device=x.device)
    live = slots
    if state_batch_indices is not None:
        live = (state_batch_indices != NULL_BLOCK_ID).nonzero()[:, 0]
        slots = state_batch_indices[live].long()
    bias = None if dt_bias is None else dt_bias[:, 0].double()
    delta = recurrence.mamba2_time_step(dt[live, :, 0].double(), bias, use_softplus=dt_softplus)
    inputs = x[live].double()
    u, g = delta[..., None] * inputs, delta * A[:, 0, 0].double()
    new, y = recurrence.step(state[slots].double(), C[live].double(), B[live].double(), u, g, None, "additive")
    state[slots] = new.to(state.dtype)
    y = y if D is None else y + D.double() * inputs
    y = y if z is None else y * recurrence.silu(z[live].double())
    out[live] = y.to(out.dtype)
    return out


def einops() -> dict[str, Any]:
    """The three rearrangements that vLLM's helper file uses."""
    axes = {"b h d -> b h d 1": 3, "b h n -> b h 1 n": 2}
    return {
        "rearrange": lambda x, pattern: x.unsqueeze(axes[pattern]),
        "repeat": lambda x, _, h: x.repeat_interleave(h, dim=1),
    }


def modules(folder: Path) -> dict[str, dict[str, Any]]:
    delta = {f"fused_recurrent_{kind}_replayssm_decode": ours_delta for kind in ("linear", "gdn")}
    plain = {f"fused_recurrent_{kind}_packed_decode": packed_decode for kind in ("gated_delta_rule", "kda")}
    found = {
        "einops": einops(),
        "sglang.test.test_utils": {"CustomTestCase": unittest.TestCase},
        "sglang.test.ci.ci_register": {
            f"register_{kind}_ci": lambda *_, **__: None for kind in ("cuda", "amd", "cpu", "npu", "xpu")
        },
        "vllm.model_executor.layers.fla.ops": plain | {"fused_recurrent_gated_delta_rule_replayssm": ours_delta},
        "vllm.utils.torch_utils": {"set_random_seed": torch.manual_seed},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": NULL_BLOCK_ID},
    }
    for parent in ("sglang.srt.layers.attention.fla", "sglang.kernels.ops.attention.fla"):
        found[f"{parent}.fused_recurrent"] = plain
        found[f"{parent}.fused_recurrent_linear_replayssm"] = delta
    found["sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm"] = delta
    mamba = "vllm.model_executor.layers.mamba.ops"
    name = "selective_state_update_replayssm"
    found[f"{mamba}.mamba_ssm"] = {"selective_state_update": selective_state_update}
    found[f"{mamba}.{name}_output_only"] = {f"{name}_output_only": ours_mamba2}
    found[f"{mamba}.{name}_state_and_output"] = {f"{name}_state_and_output": skip}
    if (folder / "utils.py").is_file():
        found["tests.kernels.mamba.utils"] = {}
    return found


def install(folder: Path) -> None:
    for full_name, contents in modules(folder).items():
        parts = full_name.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules or end == len(parts):
                module = ModuleType(name)
                module.__path__ = []  # type: ignore[attr-defined]
                sys.modules[name] = module
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[name])
        vars(sys.modules[full_name]).update(contents)
    if (folder / "utils.py").is_file():
        spec = importlib.util.spec_from_file_location("tests.kernels.mamba.utils", folder / "utils.py")
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(sys.modules["tests.kernels.mamba.utils"])


def record_errors() -> None:
    """Note how far apart the tensors are that a test compares."""
    theirs = torch.testing.assert_close

    def assert_close(actual: Any, expected: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(actual, Tensor) and actual.is_floating_point() and actual.numel():
            test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].rpartition("::")[2]
            precision = re.search(r"s(?:32|16|fp16)_a(?:32|16|fp16)", test)
            key = f"{test.partition('[')[0]} {precision[0] if precision else ''}".strip()
            norm = expected.double().norm().item()
            error = (actual.double() - expected.double()).norm().item() / max(norm, 1e-30)
            errors[key] = max(errors.get(key, 0.0), error)
        theirs(actual, expected, *args, **kwargs)

    torch.testing.assert_close = assert_close


def main() -> int:
    global BACKEND
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="their test file")
    parser.add_argument("--backend", default="auto", choices=["auto", "torch", "triton", "cuda"], help="our backend")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("-k", default="", help="which tests, as for pytest")
    arguments = parser.parse_args()
    BACKEND = arguments.backend
    if not arguments.file.is_file():
        parser.error(f"{arguments.file} is not a file")
    install(arguments.file.resolve().parent)
    record_errors()
    text = arguments.file.read_text()
    if arguments.device == "cpu":  # their files name the device, and skip themselves without a GPU
        text = text.replace('"cuda"', '"cpu"').replace("torch.cuda.is_available()", "True")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / arguments.file.name
        copy.write_text(text)
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", folder, "-c", os.devnull, "-k", arguments.k]
        code = pytest.main([*options, "--import-mode=importlib", str(copy)])
    for key in sorted(errors):
        print(f"largest relative error {errors[key]:.1e}  {key}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
