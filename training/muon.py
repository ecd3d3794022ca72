"""Muon: momentum whose matrix updates are orthogonalised by a Newton-Schulz iteration (Jordan et al., 2024)."""

from __future__ import annotations

import torch
from torch import Tensor


def orthogonalise(g: Tensor) -> Tensor:
    """Roughly U Vᵀ of g = U S Vᵀ, for a stack of matrices [n, r, c], in bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315  # the quintic of the reference: singular values end within about 0.7 to 1.2
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(-1, -2) if tall else x).to(g.dtype)


class Muon:
    """Nesterov momentum 0.95, decoupled weight decay; matrices of one shape are updated as one stack."""

    def __init__(self, parameters: list[Tensor], weight_decay: float, momentum: float = 0.95) -> None:
        shapes: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            shapes.setdefault(parameter.shape, []).append(parameter)
        self.groups = list(shapes.values())
        self.buffers = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups]
        self.weight_decay, self.momentum = weight_decay, momentum

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradient = torch.stack([parameter.grad for parameter in group])
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(buffer, self.momentum))
            scale = max(1.0, group[0].shape[0] / group[0].shape[1]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate * scale)
