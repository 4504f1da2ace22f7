"""The mask: brute force, the block mask, and the compiled flex forward where the CPU can run it."""

import shutil
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from blackwell.step import kernels, mask, reference  # noqa: E402
from blackwell.step.anchors import Batch, random_batch, replace  # noqa: E402
from blackwell.step.config import SHAPES, Shape  # noqa: E402

SMALL = Shape(batch=1, tokens=48, anchors=4, block=4)
RIGHT = mask.draft_predicate  # the mutants below stand in its place and need the original


def batch_of(shape: Shape, packed: bool = True, padded: int = 1) -> Batch:
    """A random batch whose last blocks are padding."""
    batch = random_batch(shape, 99, packed, seed=3)
    keep, anchors = batch.keep.clone(), batch.anchors.clone()
    keep[:, shape.anchors - padded :], anchors[:, shape.anchors - padded :] = False, 0
    return replace(batch, keep=keep, anchors=anchors)


def check_mask(visible: torch.Tensor, batch: Batch, block: int) -> None:
    """Compare bool [1,1,Q,S+Q] with the rule, spelled out pair by pair."""
    tokens = batch.ids.shape[1]
    anchors, keep, documents = batch.anchors[0].tolist(), batch.keep[0].tolist(), batch.documents[0].tolist()
    for q in range(len(anchors) * block):
        j = q // block
        for kv in range(tokens + len(anchors) * block):
            if not keep[j]:
                expected = False
            elif kv < tokens:
                expected = kv < anchors[j] and documents[kv] == documents[anchors[j]]
            else:
                expected = (kv - tokens) // block == j
            assert bool(visible[0, 0, q, kv]) == expected, f"slot {q} of block {j} (anchor {anchors[j]}), key {kv}"


@pytest.mark.parametrize("packed", [False, True])
def test_mask_is_the_rule(packed: bool) -> None:
    batch = batch_of(SMALL, packed)
    check_mask(mask.DraftMask.of(batch, SMALL.block).dense(), batch, SMALL.block)


def at_the_anchor(anchors: torch.Tensor, keep: torch.Tensor, documents: torch.Tensor, block: int) -> mask.Predicate:
    """`<=` for `<`: the context at the anchor itself is seen."""
    right = RIGHT(anchors, keep, documents, block)
    return lambda b, h, q, kv: right(b, h, q, kv) | ((kv == anchors[b, q // block]) & keep[b, q // block])


def across_documents(anchors: torch.Tensor, keep: torch.Tensor, documents: torch.Tensor, block: int) -> mask.Predicate:
    """The document is not looked at."""
    return RIGHT(anchors, keep, torch.zeros_like(documents), block)


def other_blocks(anchors: torch.Tensor, keep: torch.Tensor, documents: torch.Tensor, block: int) -> mask.Predicate:
    """Every block sees every block."""
    right = RIGHT(anchors, keep, documents, block)
    return lambda b, h, q, kv: right(b, h, q, kv) | ((kv >= documents.shape[1]) & keep[b, q // block])


def causal_block(anchors: torch.Tensor, keep: torch.Tensor, documents: torch.Tensor, block: int) -> mask.Predicate:
    """Slots of a block see only earlier slots."""
    right = RIGHT(anchors, keep, documents, block)
    return lambda b, h, q, kv: right(b, h, q, kv) & (kv <= q + documents.shape[1])


def padding_sees(anchors: torch.Tensor, keep: torch.Tensor, documents: torch.Tensor, block: int) -> mask.Predicate:
    """Padded-out blocks see their own slots."""
    return RIGHT(anchors, torch.ones_like(keep), documents, block)


MUTANTS = [at_the_anchor, across_documents, other_blocks, causal_block, padding_sees]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mask_check_rejects(mutant: Callable[..., mask.Predicate], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(SMALL)
    monkeypatch.setattr(mask, "draft_predicate", mutant)
    with pytest.raises(AssertionError):
        check_mask(mask.DraftMask.of(batch, SMALL.block).dense(), batch, SMALL.block)


def check_block_mask(block_mask: object, visible: torch.Tensor) -> None:
    """Listed blocks hold every visible pair, and blocks listed as full have no hidden one."""
    size = 128
    queries, keys = visible.shape[-2:]
    partial, full = set(), set()
    for name, found in (("kv", partial), ("full_kv", full)):
        counts, indices = getattr(block_mask, f"{name}_num_blocks"), getattr(block_mask, f"{name}_indices")
        for row, count in enumerate(counts[0, 0].tolist()):
            found |= {(row, column) for column in indices[0, 0, row, :count].tolist()}
    assert not partial & full
    for row in range(-(-queries // size)):
        for column in range(-(-keys // size)):
            tile = visible[0, 0, row * size : (row + 1) * size, column * size : (column + 1) * size]
            if (row, column) in full:
                assert bool(tile.all())
            elif (row, column) not in partial:
                assert not bool(tile.any())


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize("packed", [False, True])
def test_block_mask_covers_the_dense_mask(name: str, packed: bool) -> None:
    shape = SHAPES[name]
    draft_mask = mask.DraftMask.of(batch_of(shape, packed), shape.block)
    visible = draft_mask.dense()
    check_block_mask(draft_mask.blocks(), visible)
    with pytest.raises(AssertionError):  # a pair that lies in no listed block
        everything = torch.ones_like(visible)
        check_block_mask(
            mask.DraftMask.of(batch_of(shape, packed, padded=shape.anchors), shape.block).blocks(), everything
        )


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.double() - ref.double()).norm() / ref.double().norm())


@pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor's CPU kernels need g++, which this image does not carry"
)
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_compiled_flex_forward_equals_the_dense_reference(name: str) -> None:
    """On the CPU flex has a compiled forward and no backward; both on a GPU: tests/gpu."""
    shape = SHAPES[name]
    draft_mask = mask.DraftMask.of(batch_of(shape), shape.block)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, shape.queries, 64, generator=generator)
    k, v = (torch.randn(1, 2, shape.tokens + shape.queries, 64, generator=generator) for _ in range(2))
    from torch._inductor import config as inductor

    # Precompiled headers pay for many kernels; these are two.
    with torch.no_grad(), inductor.patch(cpp_cache_precompile_headers=False):
        out = kernels.flex()(q, k, v, block_mask=draft_mask.blocks(), enable_gqa=True)
    dense = reference.dense_attention(q.double(), k.double(), v.double(), draft_mask.dense())
    assert relative(out, dense) < 1e-5
    assert relative(out, reference.dense_attention(q, k, v, torch.ones_like(draft_mask.dense()))) > 0.1
    assert out[:, :, -shape.block :].abs().max() == 0, "a padded-out block sees nothing and answers 0"
