"""Anchors, packing, positions and draft input of the DFlash step, each check with a mutation that it must reject."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from blackwell.step import anchors as A  # noqa: E402
from blackwell.step.config import SHAPES, StepError  # noqa: E402

MASK = 99
K = 4


def made(lengths: tuple[int, ...] = (9, 14, 7), count: int = 6, seed: int = 0, prompt: int = 2) -> A.Batch:
    """Packed documents of known lengths, each starting with `prompt` tokens that are not supervised."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(MASK, (n,), generator=generator) for n in lengths]
    return A.pack(ids, [torch.arange(n) >= prompt for n in lengths], count, generator)


def check_anchors(batch: A.Batch) -> None:
    """Sorted, unique, supervised at p and p+1, both in one document."""
    for row, (anchors, keep) in enumerate(zip(batch.anchors.tolist(), batch.keep.tolist(), strict=True)):
        real = [a for a, kept in zip(anchors, keep, strict=True) if kept]
        assert real == sorted(set(real))
        assert keep == sorted(keep, reverse=True), "padding comes last"
        for p in real:
            assert batch.supervised[row, p] and batch.supervised[row, p + 1]
            assert batch.documents[row, p] == batch.documents[row, p + 1], (
                "an anchor's block starts in its own document"
            )


def test_anchors_hold_for_many_draws() -> None:
    seen = set()
    for seed in range(40):
        batch = made(seed=seed)
        check_anchors(batch)
        assert bool(batch.keep.all())
        seen.add(tuple(batch.anchors.flatten().tolist()))
    assert len(seen) > 20, "anchors are drawn, not fixed"


def test_every_candidate_can_be_drawn() -> None:
    batch = made()
    candidates = A.anchor_candidates(batch.supervised, batch.documents)
    wanted = set(candidates[0].nonzero().flatten().tolist())
    drawn: set[int] = set()
    for seed in range(60):
        anchors, _ = A.draw_anchors(candidates, 6, torch.Generator().manual_seed(seed))
        drawn |= set(anchors.flatten().tolist())
    assert drawn == wanted


def both_supervised(supervised: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """p and p+1 supervised, the document not looked at."""
    return torch.nn.functional.pad(supervised[:, :-1] & supervised[:, 1:], (0, 1))


@pytest.mark.parametrize(
    ("mutant", "prompt"),
    [
        (lambda supervised, documents: supervised, 2),  # p+1 not looked at: a document's last token becomes an anchor
        (lambda supervised, documents: torch.ones_like(supervised), 2),  # prompts too
        (both_supervised, 0),  # without prompts only the document rule keeps neighbours apart
    ],
)
def test_anchor_check_rejects_wrong_candidates(
    mutant: Callable[..., torch.Tensor], prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(60):
        check_anchors(made(seed=seed, prompt=prompt))
    monkeypatch.setattr(A, "anchor_candidates", mutant)
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(60):
            check_anchors(made(seed=seed, prompt=prompt))


def test_too_few_candidates_are_padded() -> None:
    batch = made(lengths=(5,), count=6)  # candidates: 2 and 3
    assert batch.anchors.tolist() == [[2, 3, 0, 0, 0, 0]]
    assert batch.keep.tolist() == [[True, True, False, False, False, False]]
    check_anchors(batch)


def test_no_candidate_is_an_error() -> None:
    with pytest.raises(StepError, match="no token of the batch can be an anchor"):
        made(lengths=(3, 3))


def check_positions(batch: A.Batch, positions: torch.Tensor) -> None:
    """Context restarts per document; slot k of a block stands at its anchor's position + k."""
    tokens = batch.ids.shape[1]
    count, last = 0, -1
    for t in range(tokens):
        document = int(batch.documents[0, t])
        count = 0 if document != last else count + 1
        last = document
        assert positions[0, t] == count
    for j, anchor in enumerate(batch.anchors[0].tolist()):
        for k in range(K):
            assert positions[0, tokens + j * K + k] == positions[0, anchor] + k


def test_positions() -> None:
    batch = made()
    positions = A.draft_positions(batch, K)
    assert positions.shape == (1, 30 + 6 * K)
    check_positions(batch, positions)


def test_position_check_rejects_positions_that_run_on() -> None:
    batch = made()
    running = torch.arange(30)[None]
    with pytest.raises(AssertionError):
        check_positions(batch, torch.cat([running, (batch.anchors[..., None] + torch.arange(K)).flatten(1)], dim=1))
    with pytest.raises(AssertionError):  # the block counted from anchor + 1
        wrong = A.draft_positions(batch, K).clone()
        wrong[:, 30:] += 1
        check_positions(batch, wrong)


def check_draft_ids(batch: A.Batch, ids: torch.Tensor) -> None:
    """All MASK but slot 0 of each real block: the true token at the anchor."""
    for j, (anchor, kept) in enumerate(zip(batch.anchors[0].tolist(), batch.keep[0].tolist(), strict=True)):
        assert ids[0, j * K] == (batch.ids[0, anchor] if kept else MASK)
        assert ids[0, j * K + 1 : (j + 1) * K].eq(MASK).all()


@pytest.mark.parametrize("lengths", [(9, 14, 7), (5,)])
def test_draft_ids(lengths: tuple[int, ...]) -> None:
    batch = made(lengths=lengths)
    ids = A.draft_ids(batch, K, MASK)
    assert ids.shape == (1, 6 * K)
    check_draft_ids(batch, ids)


def test_draft_ids_check_rejects_the_next_token() -> None:
    batch = made()
    with pytest.raises(AssertionError):
        check_draft_ids(batch, A.draft_ids(A.replace(batch, ids=batch.ids.roll(-1, dims=1)), K, MASK))


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize("packed", [False, True])
def test_random_batch(name: str, packed: bool) -> None:
    shape = SHAPES[name]
    batch = A.random_batch(shape, MASK, packed, seed=1)
    check_anchors(batch)
    assert batch.ids.shape == (1, shape.tokens) and int(batch.ids.max()) < MASK
    assert batch.anchors.shape == (1, shape.anchors)
    if packed:
        assert batch.cu_seqlens is not None
        assert batch.cu_seqlens.dtype == torch.int32
        assert batch.cu_seqlens.tolist() == [
            0,
            *torch.tensor(A.document_lengths(shape.tokens, True)).cumsum(0).tolist(),
        ]
        assert batch.cu_seqlens.diff().tolist() == batch.documents.flatten().bincount().tolist()
        assert all(n % 64 for n in batch.cu_seqlens.diff().tolist()), "documents end inside FLA's chunks of 64"
    else:
        assert batch.cu_seqlens is None
