"""Turn trained weights into a model folder that `AutoModelForCausalLM.from_pretrained` loads offline.

    python -m training.export --checkpoints checkpoints --out replayssm/bundled [--model qwen3_5-tiny]

Writes config.json, generation_config.json, model.safetensors (bf16) and the tokenizer. MODEL_CARD.md comes from
`model_card.py`, which measures the exported folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from training import architectures
from training.tokenizer import END_OF_TEXT, IM_END, PAD, save_tokenizer


def export(name: str, checkpoints: Path, out: Path) -> None:
    """One model folder `out/name` from `checkpoints/name.safetensors`."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    model, _ = architectures.build(name)
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = "float32"  # small weights lose nothing by being computed with in fp32, and CPUs are faster at it
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=[END_OF_TEXT, IM_END], pad_token_id=PAD).save_pretrained(folder)
    source = checkpoints / f"{name}.safetensors"
    with safe_open(source, framework="pt") as opened:
        metadata = opened.metadata()
    weights = folder / "model.safetensors"
    save_file(load_file(source), weights, metadata)
    weights.chmod(0o644)  # safetensors writes files that only their owner may read
    save_tokenizer(folder, config.max_position_embeddings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model folders")
    parser.add_argument("--model", choices=list(architectures.CONFIGS), help="only this one")
    arguments = parser.parse_args()
    for name in [arguments.model] if arguments.model else architectures.CONFIGS:
        export(name, arguments.checkpoints, arguments.out)


if __name__ == "__main__":
    main()
