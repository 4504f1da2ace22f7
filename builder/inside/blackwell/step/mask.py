"""Who sees whom: the mask of Q draft slots over S context tokens and Q draft slots, as one predicate for flex and for the dense reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blackwell.step.anchors import Batch

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, q, kv) -> may query q see key kv


def draft_predicate(anchors: Tensor, keep: Tensor, documents: Tensor, block: int) -> Predicate:
    """The rule of the paper. anchors [B,N], keep [B,N], documents [B,S].

    A slot of block j sees context t only if t < anchor_j (strictly) and t lies in the anchor's document, and every slot of its own
    block, and no other block. Slots of padded-out blocks see nothing.
    """
    tokens = documents.shape[1]
    home = documents.gather(1, anchors)  # [B,N] document of each anchor

    def may_see(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        j = q // block
        t = kv.clamp(max=tokens - 1)  # a valid index also where kv is a draft slot
        context = (kv < tokens) & (kv < anchors[b, j]) & (documents[b, t] == home[b, j])
        own_block = (kv >= tokens) & ((kv - tokens) // block == j)
        return (context | own_block) & keep[b, j]

    return may_see


@dataclass(frozen=True)
class DraftMask:
    """A predicate with the lengths it is for: Q = N·K queries over S + Q keys."""

    predicate: Predicate
    batch: int
    queries: int
    keys: int
    device: torch.device

    @classmethod
    def of(cls, batch: Batch, block: int) -> "DraftMask":
        """The mask of a batch, on the device where the batch lies."""
        rows, count = batch.anchors.shape
        queries = count * block
        predicate = draft_predicate(batch.anchors, batch.keep, batch.documents, block)
        return cls(predicate, rows, queries, batch.ids.shape[1] + queries, batch.ids.device)

    def dense(self) -> Tensor:
        """bool [B,1,Q,S+Q], true where the query sees the key."""
        b = torch.arange(self.batch, device=self.device)[:, None, None]
        q = torch.arange(self.queries, device=self.device)[:, None]
        kv = torch.arange(self.keys, device=self.device)
        return self.predicate(b, b.new_zeros(()), q, kv).expand(self.batch, self.queries, self.keys)[:, None]

    def blocks(self) -> Any:
        """The same as a `BlockMask` for flex_attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(
            self.predicate, B=self.batch, H=None, Q_LEN=self.queries, KV_LEN=self.keys, device=str(self.device)
        )
