"""Measure an exported model on held-out text with transformers' own code, and write its MODEL_CARD.md.

    python -m training.model_card --model NAME --corpus .data/corpus.npz --out replayssm/bundled --logs checkpoints

Losses are nats per byte, fp32 on the CPU, on windows spread evenly over the held-out files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from training import architectures

LENGTH = 1024
SCANS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
KINDS = {
    "qwen3_5-tiny": ("Qwen3.5 architecture: Gated DeltaNet and gated attention, three to one, and an MTP layer", "GDN"),
    "kimi_linear-tiny": ("Kimi-Linear architecture: Kimi Delta Attention and MLA, three to one, dense MLPs", "KDA"),
    "granite_hybrid-tiny": ("Granite-4-H architecture: Mamba-2 and attention, three to one, dense MLPs", "Mamba-2"),
}


def next_token_losses(model: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
    """Loss of each predicted token, [B, T] → [B, T − 1]."""
    logits = model(tokens, **options).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)


@contextmanager
def without_memory(model: nn.Module) -> Iterator[None]:
    """Every recurrent layer forgets its state before each token: each token becomes a sequence of its own."""
    module = sys.modules[type(model).__module__]
    names = [name for name in SCANS if hasattr(module, name)]
    kept = {name: getattr(module, name) for name in names}

    def alone(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any, **options: Any) -> Any:
            batch, length = inputs[0].shape[:2]
            options["chunk_size"] = 1

            def split(x: Any) -> Any:
                sequence = isinstance(x, Tensor) and x.dim() >= 3 and x.shape[:2] == (batch, length)
                return x.reshape(batch * length, 1, *x.shape[2:]) if sequence else x

            found = function(*map(split, inputs), **{key: split(value) for key, value in options.items()})
            out = found[0] if isinstance(found, tuple) else found
            out = out.reshape(batch, length, *out.shape[2:])
            return (out, *found[1:]) if isinstance(found, tuple) else out

        return run

    try:
        for name, function in kept.items():
            setattr(module, name, alone(function))
        yield
    finally:
        for name, function in kept.items():
            setattr(module, name, function)


def second_half_losses(model: nn.Module, tokens: Tensor, forget: bool) -> Tensor:
    """Losses of the second half, fed as a second segment; `forget` zeroes recurrent states at the boundary only."""
    half = tokens.shape[1] // 2
    cache = DynamicCache(config=model.config)
    first = model(tokens[:, :half], use_cache=True, past_key_values=cache).past_key_values
    if forget:
        for layer in first.layers:
            states = getattr(layer, "recurrent_states", None)
            for state in states.values() if isinstance(states, dict) else states or []:
                state.zero_()
    return next_token_losses(model, tokens[:, half:], use_cache=True, past_key_values=first)


def greedy_continuation(model: nn.Module, prompts: Tensor, count: int) -> Tensor:
    """Prompts and `count` greedy tokens after them; the end tokens do not stop it."""
    return model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=count, eos_token_id=None
    )


def load_predictor(model: nn.Module, folder: Path) -> architectures.MultiTokenPredictor:
    """The MTP layer of an exported folder."""
    predictor = architectures.MultiTokenPredictor(model.config)
    tensors = {k.removeprefix("mtp."): v for k, v in load_file(folder / "model.safetensors").items() if "mtp." in k}
    predictor.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return predictor.eval()


def drafts(model: nn.Module, predictor: architectures.MultiTokenPredictor, tokens: Tensor, depth: int) -> Tensor:
    """What the MTP layer drafts at every position, [B, T] → [B, T − 1, depth].

    Row t holds drafts of tokens t+2, t+3, … made from the trunk's state at t, token t+1, and earlier drafts.
    """
    hidden = model.model(tokens, use_cache=False).last_hidden_state[:, :-1]
    length = hidden.shape[1]
    tables = architectures.rotary_tables(model, hidden, length + depth)
    chain: list[tuple[Tensor, Tensor]] = []
    given, found = tokens[:, 1:], []
    for step in range(depth):
        rotary = tuple(table[:, step : step + length] for table in tables)
        hidden = predictor.step(model.model.embed_tokens(given), hidden, rotary, chain)
        given = model.lm_head(hidden).argmax(-1)
        found.append(given)
    return torch.stack(found, -1)


def tokens_per_step(drafted: Tensor, tokens: Tensor, start: int) -> tuple[int, int]:
    """(tokens, steps) of speculation that follows `tokens`: drafts count up to the first that differs, plus one."""
    position, steps, end = start, 0, len(tokens) - drafted.shape[-1] - 2
    while position < end:
        accepted = 0
        while accepted < drafted.shape[-1] and drafted[position, accepted] == tokens[position + 2 + accepted]:
            accepted += 1
        position += accepted + 1
        steps += 1
    return position - start, steps


@torch.no_grad()
def measure(name: str, folder: Path, held_out: Tensor, windows: int) -> dict[str, float]:
    """All numbers of the model card."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    starts = torch.linspace(0, len(held_out) - LENGTH - 1, windows).long()
    batches = held_out[starts[:, None] + torch.arange(LENGTH)].split(4)
    numbers = {"held-out loss": torch.cat([next_token_losses(model, x, use_cache=False) for x in batches]).mean()}
    few = batches[: max(1, len(batches) // 4)]
    below = torch.cat([next_token_losses(model, x, use_cache=False) for x in few]).mean()
    numbers["same, on the windows used below"] = below
    with without_memory(model):
        alone = torch.cat([next_token_losses(model, x, use_cache=False) for x in few]).mean()
    numbers["state zeroed before every token"] = alone
    kept, lost = (torch.cat([second_half_losses(model, x, forget)[:, :128] for x in few]) for forget in (False, True))
    numbers["first 128 tokens after a segment boundary"] = kept.mean()
    numbers["same, state zeroed at the boundary (attention and convolution kept)"] = lost.mean()
    results = {key: round(value.item(), 3) for key, value in numbers.items()}
    if getattr(model.config, "mtp_num_hidden_layers", 0):
        predictor = load_predictor(model, folder)
        starts = torch.linspace(0, len(held_out) - 257, 32).long()
        sequences = greedy_continuation(model, held_out[starts[:, None] + torch.arange(256)], 256)
        drafted = drafts(model, predictor, sequences, 3)
        counts = [tokens_per_step(drafted[row], sequences[row], 255) for row in range(len(sequences))]
        drafted_text = drafts(model, predictor, few[0], 3)
        walks = [tokens_per_step(drafted_text[row], few[0][row], 32) for row in range(len(few[0]))]
        results["tokens per step on text"] = round(sum(w[0] for w in walks) / sum(w[1] for w in walks), 2)
        truth = torch.stack([sequences[:, 2 + j : 2 + j + 250 + 255] for j in range(3)], -1)[:, 255:]
        right = (drafted[:, 255 : 255 + truth.shape[1]] == truth).float().cumprod(-1).mean((0, 1))
        results["tokens per step"] = round(sum(c[0] for c in counts) / sum(c[1] for c in counts), 2)
        results |= {f"drafts 1 to {j + 1} all right": round(right[j].item(), 3) for j in range(3)}
    return results


def card(name: str, folder: Path, results: dict[str, float], log: list[dict[str, Any]]) -> str:
    """MODEL_CARD.md."""
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        metadata = opened.metadata()
        count = sum(int(np.prod(opened.get_slice(key).get_shape())) for key in opened.keys())  # noqa: SIM118
    seconds = log[-1]["seconds"]
    what, layer = KINDS[name]
    losses = {key: value for key, value in results.items() if not key.startswith(("tokens", "draft"))}
    table = "\n".join(f"| {key} | {value} |" for key, value in losses.items())
    speculation = ""
    if "tokens per step" in results:
        accepted = ", ".join(str(results[f"drafts 1 to {j + 1} all right"]) for j in range(3))
        speculation = f"""
## Multi-token prediction

The MTP layer has the tensor names of released Qwen3.5 checkpoints (`mtp.*`), which transformers leaves out at load.
Depth j turns the embedding of token t+j and the hidden state of depth j−1 (depth 0: the trunk's, after its final norm)
into the hidden state whose head output predicts token t+1+j; the layer is applied to its own output for deeper drafts,
at rotary positions t, t+1, t+2. Keys of depth 1 at all earlier positions form its cache.

Greedy speculation with three drafts (K=3), 32 held-out prompts of 256 bytes, 256 new tokens each:
**{results["tokens per step"]} tokens a step**, the bonus token counted. Drafts right up to the first, second and third,
measured at every position: {accepted}.

Greedy text repeats itself and is easy to draft. Where the drafts must equal the held-out text itself, of which the
model is less sure, it is {results["tokens per step on text"]} tokens a step.
"""
    return f"""# {name}

{what}.
{count / 1e6:.2f} million parameters, bf16 weights, a byte-level tokenizer with a ChatML template.

It writes text that looks like Python and its documentation, and is shipped so that decoding can be tried and tested on
a model whose recurrent state matters. It knows nothing reliably: use it for no other purpose.

## Data

CPython 3.13.5: the documentation (`Doc/**/*.rst`), the standard library (`Lib/**/*.py`, one test file in three), and
short dialogues made from both: 28.2 million bytes. One file in 40, chosen by a hash of its path, is held out
(0.9 million bytes). The script is `training/corpus.py`.

## Training

`training/train.py` on one NVIDIA H200, {seconds / 60:.1f} minutes with compilation: {int(metadata["steps"]):,} steps,
{int(metadata["tokens"]) / 1e6:.0f} million tokens seen in windows of 1,024, Muon for matrices, Adam for the rest.

## Measured

transformers' own code, fp32, nats per byte, on windows of {LENGTH:,} spread over the held-out files
(`training/model_card.py`):

| | loss |
|---|---|
{table}

The last four rows are over a quarter of the windows: without the state of its {layer} layers the model loses what it
has read.
{speculation}
## Licence

The weights are offered under Apache-2.0, as the rest of this repository. They derive from CPython, copyright © 2001
Python Software Foundation; all rights reserved; used under the PSF License Version 2 (parts of the library carry the
licences listed in CPython's `Doc/license.rst`). The change made to it: a statistical model was trained on its text.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model folders")
    parser.add_argument("--model", required=True, choices=list(architectures.CONFIGS))
    parser.add_argument("--logs", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--windows", type=int, default=64)
    arguments = parser.parse_args()
    held_out = torch.from_numpy(np.load(arguments.corpus)["held_out"].astype(np.int64))
    folder = arguments.out / arguments.model
    results = measure(arguments.model, folder, held_out, arguments.windows)
    lines = (arguments.logs / f"{arguments.model}.jsonl").read_text().splitlines()
    (folder / "MODEL_CARD.md").write_text(card(arguments.model, folder, results, [json.loads(line) for line in lines]))
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
