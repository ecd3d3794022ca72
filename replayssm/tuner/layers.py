"""The recurrent layers of a model, from its config alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from replayssm import bundled
from replayssm.backends.cuda import blocks
from replayssm.errors import InputError, one_line
from replayssm.loading import quiet_libraries
from replayssm.loading.architectures import check_architecture
from replayssm.loading.folder import CONFIG_FILE, find_model, read_config, read_json_object
from replayssm.state import LayerSpec

Layers = dict[str, list[LayerSpec]]


def block_shape(
    spec: LayerSpec, state_dtype: torch.dtype, ring_len: int = 1, ring_dtype: torch.dtype = torch.float32
) -> blocks.Shape:
    """A layer as the cuts see it."""
    rules = (spec.gate == "channel", spec.rule == "delta")
    dims = (spec.head_v_dim, spec.head_k_dim, spec.num_v_heads // spec.num_k_heads, spec.num_v_heads)
    return blocks.Shape(*rules, *dims, ring_len, state_dtype, ring_dtype)


def config_file(model: str) -> Path:
    """The config of a bundled model, a model folder or a config's own file, of an architecture that replay serves.

    Raises:
        InputError: there is none, or it is of another.
    """
    path = Path(model)
    if model not in bundled.names() and path.is_file():
        check_architecture(read_json_object(path))
        return path
    folder = find_model(model, f"a folder with config.json, {CONFIG_FILE}")
    check_architecture(read_config(folder))
    return folder / "config.json"


def layers_of(model: str) -> Layers:
    """The different recurrent layers of a model, by kind: "gdn", "kda" or "mamba2". No weights are made or read.

    Raises:
        InputError: transformers can't make a model of its config.
    """
    path = config_file(model)
    with quiet_libraries():
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        from replayssm.models.support import find_adapters

        try:
            config = CONFIG_MAPPING[read_json_object(path)["model_type"]].from_json_file(path)
            with torch.device("meta"):
                adapters = find_adapters(AutoModelForCausalLM.from_config(config))
        except Exception as error:  # whatever a config makes transformers raise, the config is the cause
            raise InputError(f"{path} gives no model: {type(error).__name__}: {one_line(error)}") from error
    found: Layers = {}
    for adapter in adapters:
        spec = replace(adapter.spec, conv_dim=0)
        specs = found.setdefault(adapter.operator, [])
        if spec not in specs:
            specs.append(spec)
    return found


def with_kernels(layers: Layers) -> tuple[Layers, list[str]]:
    """The layers that the cuda backend has kernels for, and a line about each of the others."""
    from replayssm.bench.workload import shape_name

    found: Layers = {}
    notes = []
    for kind, specs in layers.items():
        for spec in specs:
            missing = block_shape(spec, torch.float32).unsupported()
            if missing is None:
                found.setdefault(kind, []).append(spec)
            else:
                notes.append(f"{kind} {shape_name(spec)} is left out: {missing}")
    return found, notes
