"""The drafter: a small block-diffusion model that predicts a whole block in parallel from the target's hidden states."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from blackwell.step import kernels
from blackwell.step.config import DrafterSize


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 or better, answered in the input's precision."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding. positions [B,L] -> two of [B,1,L,d], in `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=positions.device).to(wide) / head_dim
    angles = positions.to(wide)[..., None] * torch.exp(-math.log(theta) * exponents)  # [B,L,d/2]
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + d/2) of x [B,H,L,d] by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class DraftAttention(nn.Module):
    """Grouped-query attention in which the context C is key and value, never query. Not causal: the mask says who sees whom."""

    def __init__(self, size: DrafterSize) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.q_proj = nn.Linear(size.hidden, size.heads * size.head_dim, bias=False)
        self.k_proj = nn.Linear(size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.o_proj = nn.Linear(size.heads * size.head_dim, size.hidden, bias=False)
        self.q_norm = RMSNorm(size.head_dim, size.eps)
        self.k_norm = RMSNorm(size.head_dim, size.eps)

    def _heads(self, x: Tensor) -> Tensor:
        """[B,L,H·d] -> [B,L,H,d]."""
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        """x [B,Q,D] (normed), context C [B,S,D], rope of all S + Q positions -> [B,Q,D]."""
        cos, sin = rope
        queries = x.shape[1]
        q = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)  # [B,H,Q,d]
        k = torch.cat([self.k_proj(context), self.k_proj(x)], dim=1)
        k = self.k_norm(self._heads(k)).transpose(1, 2)  # [B,Hkv,S+Q,d]
        v = torch.cat([self.v_proj(context), self.v_proj(x)], dim=1)
        v = self._heads(v).transpose(1, 2)  # [B,Hkv,S+Q,d]
        q = rotate(q, cos[:, :, -queries:], sin[:, :, -queries:])  # queries use the last Q rows, keys all
        k = rotate(k, cos, sin)
        out = kernels.attention(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DraftLayer(nn.Module):
    """One Qwen3-like layer. C skips the input norm and is not updated."""

    def __init__(self, size: DrafterSize) -> None:
        super().__init__()
        self.input_norm = RMSNorm(size.hidden, size.eps)
        self.attention = DraftAttention(size)
        self.mlp_norm = RMSNorm(size.hidden, size.eps)
        self.gate_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.down_proj = nn.Linear(size.intermediate, size.hidden, bias=False)

    def forward(self, x: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        """x [B,Q,D], context C [B,S,D] -> [B,Q,D]."""
        x = x + self.attention(self.input_norm(x), context, rope, mask)
        y = self.mlp_norm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Drafter(nn.Module):
    """All that is trained: the fuse layer, the draft layers and their norms."""

    def __init__(self, size: DrafterSize, taps: int) -> None:
        super().__init__()
        self.size = size
        self.fuse_proj = nn.Linear(taps * size.hidden, size.hidden, bias=False)
        self.fuse_norm = RMSNorm(size.hidden, size.eps)
        self.layers = nn.ModuleList(DraftLayer(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.hidden, size.eps)

    def fuse(self, tapped: Tensor) -> Tensor:
        """Fuse once: hidden states of the tapped layers [B,S,T·D] -> C [B,S,D], the same for every draft layer."""
        return self.fuse_norm(self.fuse_proj(tapped))

    def add_noise(self, context: Tensor, half_width: float) -> Tensor:
        """Noise augmentation: uniform noise on C while training, nothing in evaluation. [B,S,D] -> [B,S,D]."""
        if not self.training or half_width == 0.0:
            return context
        return context + (torch.rand_like(context) * 2.0 - 1.0) * half_width

    def forward(self, context: Tensor, x: Tensor, positions: Tensor, mask: Any) -> Tensor:
        """context C [B,S,D], draft input X [B,Q,D], positions [B,S+Q], mask from `kernels.prepare_mask` -> normed [B,Q,D]."""
        rope = rotary(positions, self.size.head_dim, self.size.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, context, rope, mask)
        return self.norm(x)
