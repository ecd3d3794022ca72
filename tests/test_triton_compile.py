"""The Triton kernels compile for six GPU generations within a budget of spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parent
# ptxas spills 6 words of two window kernels on sm_90, with registers left; the tile that doesn't is slower.
MAX_SPILLS = 8
# Windows over a float32 checkpoint with 16 records: on an H200 the tiles that spill nothing take 3 to 19 % longer.
MAX_SPILLS_OF_WINDOWS = 64


NUM_KERNELS = {"all": 57, "main": 25}
#: One target of each maker in full, of the others the kernels that are no variant of another.
IN_CI = [("sm_90", "all"), ("gfx942", "all"), *((name, "main") for name in ("sm_80", "sm_89", "sm_100", "sm_120"))]
THOROUGH = [(name, "all") for name, part in IN_CI if part == "main"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "part"), [*IN_CI, *(pytest.param(*given, marks=pytest.mark.thorough) for given in THOROUGH)]
)
def test_kernels_compile_within_a_budget(target: str, part: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(TESTS.parent)}
    run = subprocess.run(
        [sys.executable, TESTS / "compile_kernels.py", target, *(["main"] if part == "main" else [])],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    print(f"\n{target}: " + ", ".join(f"{r['kernel']} {r['registers']} registers" for r in rows))
    assert len(rows) == NUM_KERNELS[part]
    assert [r for r in rows if r["spills"] > max_spills(r["kernel"])] == []


def max_spills(kernel: str) -> int:
    is_window = kernel.startswith("verify") and kernel.endswith("fp32")
    return MAX_SPILLS_OF_WINDOWS if is_window else MAX_SPILLS
