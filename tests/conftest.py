"""Fixtures that all tests share."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

# A GPU machine runs `make test-gpu` with what it has; these files need more.
_NEEDS = {"test_programs.py": "hypothesis", "test_cli.py": "pydantic", "test_docs.py": "pydantic"}
collect_ignore = [file for file, package in _NEEDS.items() if find_spec(package) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that this machine has."""
    return request.param
