"""One batch: packed documents, anchors, positions, draft input, labels. Made on the CPU, as a data loader does.

Nothing here computes with floats on the device, so the null GPU (whose floats are garbage) sees the true integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from blackwell.step.config import Shape, StepError


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens of one batch with the anchors drawn for it.

    ids         [B,S] int64
    supervised  [B,S] bool   tokens the loss may look at (answers, not prompts)
    documents   [B,S] int64  index of the document each token belongs to, 0, 1, ...
    positions   [B,S] int64  0, 1, ... restarting at each document
    anchors     [B,N] int64  sorted; padded with 0 where `keep` is false
    keep        [B,N] bool   blocks that are real
    cu_seqlens  [documents+1] int32, or None for one document per row: FLA's and transformers' name for the packed offsets
    """

    ids: Tensor
    supervised: Tensor
    documents: Tensor
    positions: Tensor
    anchors: Tensor
    keep: Tensor
    cu_seqlens: Tensor | None

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: value if value is None else value.to(device) for name, value in moved.items()})


def document_lengths(tokens: int, packed: bool) -> list[int]:
    """Lengths of the documents in a row of S tokens: three uneven ones, no multiple of FLA's chunk of 64, or one."""
    if not packed:
        return [tokens]
    first, second = tokens * 3 // 8 - 3, tokens * 2 // 5
    return [first, second, tokens - first - second]


def anchor_candidates(supervised: Tensor, documents: Tensor) -> Tensor:
    """Positions p where p and p+1 are supervised and lie in the same document. [B,S], [B,S] -> bool [B,S]."""
    both = supervised[:, :-1] & supervised[:, 1:] & (documents[:, :-1] == documents[:, 1:])
    return torch.nn.functional.pad(both, (0, 1), value=False)


def draw_anchors(candidates: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw N anchors per row without replacement, sorted. bool [B,S] -> anchors int64 [B,N], keep bool [B,N].

    A row with fewer than N candidates takes them all; the rest of its anchors are padding, with keep false.
    """
    rows, kept = [], []
    for row in candidates:
        found = row.nonzero().flatten()
        chosen = found[torch.randperm(len(found), generator=generator)[:count]].sort().values
        rows.append(torch.nn.functional.pad(chosen, (0, count - len(chosen))))
        kept.append(torch.arange(count) < len(chosen))
    if not any(bool(k.any()) for k in kept):
        raise StepError(
            "no token of the batch can be an anchor: two supervised neighbours within one document are needed."
        )
    return torch.stack(rows), torch.stack(kept)


def pack(ids: Sequence[Tensor], supervised: Sequence[Tensor], count: int, generator: torch.Generator) -> Batch:
    """Pack documents (1-D ids and supervision of each) into one row, B = 1, and draw N anchors."""
    # B = 1 always: `cu_seqlens` with more rows gives a wrong conv weight gradient
    # (https://github.com/fla-org/flash-linear-attention/pull/955; lift when every supported FLA has it).
    lengths = torch.tensor([len(document) for document in ids])
    documents = torch.repeat_interleave(torch.arange(len(ids)), lengths)[None]
    positions = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    answer = torch.cat(list(supervised))[None]
    anchors, keep = draw_anchors(anchor_candidates(answer, documents), count, generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return Batch(
        ids=torch.cat(list(ids))[None],
        supervised=answer,
        documents=documents,
        positions=positions,
        anchors=anchors,
        keep=keep,
        cu_seqlens=offsets if len(ids) > 1 else None,
    )


def random_batch(shape: Shape, text_vocabulary: int, packed: bool, seed: int) -> Batch:
    """Random documents of which the first quarter is prompt (not supervised) and the rest answer."""
    if shape.batch != 1:
        raise StepError(f"packed rows use a batch of 1, not {shape.batch} (see `pack`).")
    generator = torch.Generator().manual_seed(seed)
    lengths = document_lengths(shape.tokens, packed)
    ids = [torch.randint(text_vocabulary, (length,), generator=generator) for length in lengths]
    supervised = [torch.arange(length) >= length // 4 for length in lengths]
    return pack(ids, supervised, shape.anchors, generator)


def draft_ids(batch: Batch, block: int, mask_token: int) -> Tensor:
    """Draft input: all MASK except slot 0 of each real block, which is the true token at the anchor. -> [B,Q]."""
    first = batch.ids.gather(1, batch.anchors)  # [B,N]
    first = torch.where(batch.keep, first, mask_token)
    rest = first.new_full((*first.shape, block - 1), mask_token)
    return torch.cat([first[..., None], rest], dim=-1).flatten(1)


def draft_positions(batch: Batch, block: int) -> Tensor:
    """Context positions, then anchor + 0..K-1 for each block, counted within the anchor's document. -> [B,S+Q]."""
    first = batch.positions.gather(1, batch.anchors)  # [B,N]
    slots = torch.arange(block, device=first.device)
    return torch.cat([batch.positions, (first[..., None] + slots).flatten(1)], dim=1)
