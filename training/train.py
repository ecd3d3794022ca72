"""Train one bundled model on one GPU for a fixed time.

    python -m training.train --model qwen3_5-tiny --corpus .data/corpus.npz --out checkpoints --minutes 9

The learning rate falls to zero along a cosine of the time used, so the run ends where the schedule ends, however fast
the machine is. Weights are written as bf16 safetensors, every --save-every seconds and at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training import architectures, chunked
from training.muon import Muon

MTP_DEPTHS = 3


def losses(
    model: nn.Module, predictor: nn.Module | None, window: Tensor, length: int, rotary: tuple[Tensor, Tensor] | None
) -> list[Tensor]:
    """Next-token loss, then the MTP losses of depths 1 … 3; window [B, length + 1 + MTP_DEPTHS].

    The MTP layer sees half of the rows: its deeper steps hold a length² score matrix, and it is no harder to train.
    """
    hidden = architectures.trunk(model, window[:, :length], rotary)

    def loss(states: Tensor, ahead: int) -> Tensor:
        targets = window[:, ahead : ahead + length]
        return F.cross_entropy(architectures.logits(model, states).flatten(0, 1), targets.flatten())

    results = [loss(hidden, 1)]
    if predictor is not None:
        rows = (len(window) + 1) // 2
        window, hidden = window[:rows], hidden[:rows]
        depths = range(1, MTP_DEPTHS + 1)
        embeddings = [model.model.embed_tokens(window[:, depth : depth + length]) for depth in depths]
        tables = [tuple(table[:, depth - 1 : depth - 1 + length] for table in rotary) for depth in depths]
        states = predictor(embeddings, hidden, tables)
        results += [loss(state, depth + 1) for depth, state in zip(depths, states, strict=True)]
    return results


def split_parameters(modules: list[nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
    """(matrices for Muon, everything else for Adam): embeddings, head, and projections to a few heads go to Adam."""
    matrices, others, seen = [], [], set()
    for module in modules:
        for name, parameter in module.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            inner = parameter.dim() == 2 and min(parameter.shape) >= 16
            is_matrix = inner and "embed_tokens" not in name and "lm_head" not in name
            (matrices if is_matrix else others).append(parameter)
    return matrices, others


def state_dict(model: nn.Module, predictor: nn.Module | None) -> dict[str, Tensor]:
    """bf16 tensors under the names of released checkpoints; a tied head is left out."""
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    if predictor is not None:
        tensors |= {f"mtp.{name}": tensor for name, tensor in predictor.state_dict().items()}
    return {name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in tensors.items()}


def load(path: Path, model: nn.Module, predictor: nn.Module | None) -> None:
    """Continue from the weights of an earlier run."""
    tensors = load_file(path)
    model.load_state_dict({k: v for k, v in tensors.items() if not k.startswith("mtp.")}, strict=False)
    if predictor is not None:
        predictor.load_state_dict({k.removeprefix("mtp."): v for k, v in tensors.items() if k.startswith("mtp.")})


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, choices=list(architectures.CONFIGS))
    parser.add_argument("--corpus", type=Path, required=True, help="the file that corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for NAME.safetensors and NAME.jsonl")
    parser.add_argument("--minutes", type=float, default=9.0, help="time to the end of training, start-up included")
    parser.add_argument("--max-steps", type=int, default=1 << 30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--muon-rate", type=float, default=0.015)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--mtp-weight", type=float, default=0.3, help="weight of the mean MTP loss")
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between checkpoints")
    parser.add_argument("--init-from", type=Path, help="weights of an earlier run to continue from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.cache_size_limit = 64
    device, length = torch.device(arguments.device), arguments.length
    corpus = np.load(arguments.corpus)
    train, held_out = (torch.from_numpy(corpus[key].astype(np.int16)).to(device) for key in ("train", "held_out"))
    span = length + 1 + MTP_DEPTHS

    model, predictor = architectures.build(arguments.model)
    if arguments.init_from:
        load(arguments.init_from, model, predictor)
    model.to(device).eval()  # no dropout anywhere; eval keeps Mamba-2 layers off the fused training kernel
    modules: list[nn.Module] = [model]
    if predictor is not None:
        modules.append(predictor.to(device))
    chunked.install(model)
    if not arguments.no_compile:
        architectures.compile_layers(model, predictor)
    rotary = architectures.rotary_tables(model, torch.zeros(1, 1, 1, device=device), span)

    matrices, others = split_parameters(modules)
    muon = Muon(matrices, weight_decay=0.02)
    adam = torch.optim.AdamW(others, lr=arguments.adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = (arguments.out / f"{arguments.model}.jsonl").open("a")

    def report(**fields: object) -> None:
        line = json.dumps({"model": arguments.model, "seconds": round(time.perf_counter() - started, 1), **fields})
        log.write(line + "\n")
        log.flush()
        print(line, flush=True)

    def sample(stream: Tensor, offsets: Tensor) -> Tensor:
        return stream[offsets[:, None] + torch.arange(span, device=device)].long()

    def forward(window: Tensor) -> list[Tensor]:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return losses(model, predictor, window, length, rotary)

    def evaluate(batches: int) -> list[float]:  # with gradients on, so that the compiled graphs are training's
        totals: list[Tensor] = []
        for batch in range(batches):
            offsets = torch.arange(arguments.batch, device=device) * length + batch * arguments.batch * length
            totals.append(torch.stack(forward(sample(held_out, offsets % (len(held_out) - span)))).detach())
        return [round(value, 4) for value in torch.stack(totals).mean(0).tolist()]

    def save(step: int) -> None:
        metadata = {"format": "pt", "steps": str(step), "tokens": str(step * arguments.batch * length)}
        save_file(state_dict(model, predictor), arguments.out / f"{arguments.model}.safetensors", metadata)

    report(parameters=sum(p.numel() for m in modules for p in m.parameters()), matrices=len(matrices))
    sum(forward(sample(train, torch.arange(arguments.batch, device=device)))).backward()  # compiles everything
    for parameter in matrices + others:
        parameter.grad = None
    if device.type == "cuda":
        torch.cuda.synchronize()
    report(event="compiled")

    begun = saved = time.perf_counter()
    total = arguments.minutes * 60 - (begun - started)
    step = 0
    while step < arguments.max_steps:
        progress = (time.perf_counter() - begun) / total
        if progress >= 1:
            break
        factor = min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * progress))
        window = sample(train, torch.randint(len(train) - span, (arguments.batch,), device=device))
        found = forward(window)
        loss = found[0]
        if len(found) > 1:
            loss = loss + arguments.mtp_weight * torch.stack(found[1:]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(others, 1.0)
        muon.step(arguments.muon_rate * factor)
        for group in adam.param_groups:
            group["lr"] = arguments.adam_rate * factor
        adam.step()
        for parameter in matrices + others:
            parameter.grad = None
        step += 1
        if step % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # keeps the schedule's clock honest
        if step % 100 == 0 or step in (1, 10, 30):
            rate = step * arguments.batch * length / (time.perf_counter() - begun)
            report(step=step, losses=[round(x.item(), 4) for x in found], tokens_per_second=int(rate))
        if step % 1000 == 0:
            report(step=step, held_out=evaluate(2))
        if time.perf_counter() - saved > arguments.save_every:
            save(step)
            saved = time.perf_counter()
    save(step)
    report(step=step, tokens=step * arguments.batch * length, held_out=evaluate(8), event="done")


if __name__ == "__main__":
    main()
