"""Labels, weights, and a head that never holds all logits."""

import math

import pytest

torch = pytest.importorskip("torch")

from blackwell.step import loss  # noqa: E402
from blackwell.step.anchors import Batch, random_batch, replace  # noqa: E402
from blackwell.step.config import Shape  # noqa: E402

SHAPE = Shape(batch=1, tokens=60, anchors=7, block=16)
GAMMA = 7.0


def batch() -> Batch:
    """Three short documents, so that blocks run over their ends, one padded block, and an unsupervised hole."""
    made = random_batch(SHAPE, 99, True, seed=5)
    keep, supervised, anchors = made.keep.clone(), made.supervised.clone(), made.anchors.clone()
    keep[:, -1] = False
    anchors[:, -1] = 0
    supervised[:, int(anchors[0, 0]) + 3] = False
    return replace(made, keep=keep, supervised=supervised, anchors=anchors)


def check(made: Batch, labels: torch.Tensor, weights: torch.Tensor) -> None:
    """Compare [1,N,K] labels and weights with the rule, slot by slot."""
    tokens = made.ids.shape[1]
    for j, anchor in enumerate(made.anchors[0].tolist()):
        for k in range(SHAPE.block):
            t = anchor + k
            counts = (
                bool(made.keep[0, j]) and k > 0 and t < tokens and bool(made.supervised[0, t])
                and bool(made.documents[0, t] == made.documents[0, anchor])
            )  # fmt: skip
            expected = math.exp(-(k - 1) / GAMMA) if counts else 0.0
            assert float(weights[0, j, k]) == pytest.approx(expected, rel=1e-6), f"block {j} slot {k}"
            if counts:
                assert labels[0, j, k] == made.ids[0, t]


def test_labels_and_weights() -> None:
    made = batch()
    labels, weights = loss.labels_and_weights(made, SHAPE.block, GAMMA)
    check(made, labels, weights)
    assert weights.max() == 1.0 and int((weights[0, -1] != 0).sum()) == 0


def test_check_rejects_mutations() -> None:
    made = batch()
    labels, weights = loss.labels_and_weights(made, SHAPE.block, GAMMA)
    mutants = {
        "shifted by one": (labels.roll(-1, dims=-1), weights),
        "slot 0 counts": (labels, torch.cat([torch.ones_like(weights[..., :1]), weights[..., 1:]], dim=-1)),
        "decay from k, not k-1": (labels, weights * math.exp(-1 / GAMMA)),
        "documents ignored": loss.labels_and_weights(
            replace(made, documents=torch.zeros_like(made.documents)), SHAPE.block, GAMMA
        ),
        "supervision ignored": loss.labels_and_weights(
            replace(made, supervised=torch.ones_like(made.supervised)), SHAPE.block, GAMMA
        ),
        "padding counts": loss.labels_and_weights(replace(made, keep=torch.ones_like(made.keep)), SHAPE.block, GAMMA),
    }
    for name, (wrong_labels, wrong_weights) in mutants.items():
        with pytest.raises(AssertionError):
            check(made, wrong_labels, wrong_weights)
            pytest.fail(f"not rejected: {name}", pytrace=False)


def test_chunks_change_nothing() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(32, 99, bias=False).double().requires_grad_(False)
    labels, weights = loss.labels_and_weights(batch(), SHAPE.block, GAMMA)
    results = []
    for chunk in (1, 3, 7):
        hidden = torch.randn(
            1, SHAPE.queries, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
        )
        value = loss.block_loss(loss.cross_entropy(head, hidden, labels, chunk), weights)
        value.backward()
        results.append((value.detach(), hidden.grad))
    hidden = torch.randn(
        1, SHAPE.queries, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    log_p = torch.log_softmax(head(hidden), dim=-1).view(1, SHAPE.anchors, SHAPE.block, -1)
    direct = -(log_p.gather(-1, labels[..., None])[..., 0] * weights).sum() / weights.sum()
    direct.backward()
    for value, gradient in results:
        torch.testing.assert_close(value, direct.detach())
        torch.testing.assert_close(gradient, hidden.grad)


def largest_saved(chunk: int, plain: bool) -> int:
    """Elements of the largest tensor kept for the backward of the head."""
    head = torch.nn.Linear(32, 999, bias=False).requires_grad_(False)
    labels, _ = loss.labels_and_weights(batch(), SHAPE.block, GAMMA)
    hidden = torch.randn(1, SHAPE.queries, 32, requires_grad=True)
    sizes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if plain:
            torch.nn.functional.cross_entropy(head(hidden)[0], labels.flatten(), reduction="none")
        else:
            loss.cross_entropy(head, hidden, labels, chunk)
    return max(sizes, default=0)


def test_no_logits_wait_for_the_backward() -> None:
    one_chunk = 2 * SHAPE.block * 999
    assert largest_saved(2, plain=False) < one_chunk
    assert largest_saved(2, plain=True) > one_chunk, "the measure sees logits where they are kept"
