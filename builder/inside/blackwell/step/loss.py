"""The loss: slot k predicts the token at anchor + k; early slots weigh more, slot 0 nothing."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blackwell.step.anchors import Batch


def labels_and_weights(batch: Batch, block: int, gamma: float) -> tuple[Tensor, Tensor]:
    """Labels int64 [B,N,K] and weights float32 [B,N,K].

    The label of slot k is the token at anchor + k, no shift. w_0 = 0 and w_k = exp(-(k-1)/gamma), times: the label is supervised, it
    lies within the row and in the anchor's document, and the block is kept.
    """
    tokens = batch.ids.shape[1]
    slots = torch.arange(block, device=batch.ids.device)
    at = batch.anchors[..., None] + slots  # [B,N,K]
    inside = at < tokens
    at = at.clamp(max=tokens - 1)

    def pick(row: Tensor) -> Tensor:
        return row.gather(1, at.flatten(1)).view(at.shape)

    home = batch.documents.gather(1, batch.anchors)[..., None]
    counts = inside & (slots > 0) & pick(batch.supervised) & (pick(batch.documents) == home) & batch.keep[..., None]
    decay = torch.exp(-(slots - 1).clamp(min=0) / gamma)
    return pick(batch.ids), counts * decay


def cross_entropy(head: nn.Module, hidden: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Cross-entropy of every slot. Final hidden [B,Q,D], labels [B,N,K] -> [B,N,K], float32 or better.

    The frozen head makes logits [B,n,K,V] for `chunk` blocks at a time; the backward makes them again, so no more exist at once.
    """

    def of_chunk(x: Tensor, y: Tensor) -> Tensor:
        logits = head(x)  # [B,n,K,V]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return nn.functional.cross_entropy(logits.flatten(0, 2), y.flatten(), reduction="none").view(y.shape)

    blocks = hidden.unflatten(1, labels.shape[1:])  # [B,N,K,D]
    pieces = [
        checkpoint(of_chunk, x, y, use_reentrant=False, preserve_rng_state=False)
        for x, y in zip(blocks.split(chunk, dim=1), labels.split(chunk, dim=1), strict=True)
    ]
    return torch.cat(pieces, dim=1)


def block_loss(per_slot: Tensor, weights: Tensor) -> Tensor:
    """sum(w·CE) / sum(w). Both [B,N,K] -> a scalar."""
    return (per_slot * weights).sum() / weights.sum()
