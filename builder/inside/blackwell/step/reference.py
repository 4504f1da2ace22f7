"""Reference implementations of the three kernels a step uses, in plain torch: what runs on the CPU, and what GPU kernels are held against."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Grouped-query attention that materializes the score matrix. A query that sees nothing answers 0.

    q [B,H,Q,d], k and v [B,Hkv,S+Q,d], visible bool [B,1,Q,S+Q] -> [B,H,Q,d], in q's precision.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    sees_any = visible.any(-1, keepdim=True)
    # A row of nothing but -inf would make softmax NaN, backward too; let such a row see all and drop its answer.
    scores = scores.masked_fill(~(visible | ~sees_any), float("-inf"))
    return (torch.softmax(scores, dim=-1) @ v).masked_fill(~sees_any, 0.0)


def _spans(tokens: int, cu_seqlens: Tensor | None) -> list[tuple[int, int]]:
    offsets = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    return list(pairwise(offsets))


def delta_rule_per_document(delta_rule: Callable[..., tuple[Tensor, Any]], q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None,
                            g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, None]:  # fmt: skip
    """Run a gated delta rule that knows no packing on each document by itself.

    q, k [B,S,Hk,d], v [B,S,Hv,d], g (log decay) and beta [B,S,Hv] -> [B,S,Hv,d]; the final state is not kept.
    """
    pieces = [
        delta_rule(q[:, a:z], k[:, a:z], v[:, a:z], g=g[:, a:z], beta=beta[:, a:z], **options)[0]
        for a, z in _spans(q.shape[1], cu_seqlens)
    ]
    return torch.cat(pieces, dim=1), None


def causal_conv_per_document(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, cu_seqlens: Tensor | None
) -> Tensor:
    """Depthwise causal convolution, each document by itself. x [B,C,S], weight [C,W] -> [B,C,S]."""
    width = weight.shape[-1]
    pieces = []
    for a, z in _spans(x.shape[-1], cu_seqlens):
        padded = torch.nn.functional.pad(x[..., a:z], (width - 1, 0))
        pieces.append(torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=weight.shape[0]))
    out = torch.cat(pieces, dim=-1)
    if activation is None:
        return out
    if activation not in ("silu", "swish"):
        raise ValueError(f"unknown activation {activation!r}: use silu, swish or None")
    return torch.nn.functional.silu(out)


def recurrent_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule token by token, in the precision of its inputs: the definition, slow and easy to trust.

    q, k [B,S,Hk,d] (normalized here), v [B,S,Hv,d], g and beta [B,S,Hv] -> [B,S,Hv,d].
    State M [B,Hv,d,d]:  M <- exp(g) M;  M <- M + beta k (v - M^T k)^T;  o = M^T q / sqrt(d).
    """
    groups = v.shape[2] // q.shape[2]
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(groups, dim=2) for x in (q, k))
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    out = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], error)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(out, dim=1)
