"""The drafter against the paper's invariants and against an independent float64 reference that has no mask at all."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from blackwell.step import anchors, drafter, kernels, mask, reference  # noqa: E402
from blackwell.step.anchors import Batch, draft_positions, random_batch, replace  # noqa: E402
from blackwell.step.config import SHAPES, DrafterSize, Shape  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))  # whatever pytest's import mode
from test_step_mask import at_the_anchor, other_blocks  # noqa: E402

SIZE = DrafterSize(hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48)
SHAPE = Shape(batch=1, tokens=40, anchors=4, block=4)
Q, K = SHAPE.queries, SHAPE.block


def batch_of(shape: Shape = SHAPE, packed: bool = False, padded: int = 0) -> Batch:
    made = random_batch(shape, 99, packed, seed=7)
    if not padded:
        return made
    keep, first = made.keep.clone(), made.anchors.clone()
    keep[:, -padded:], first[:, -padded:] = False, 0
    return replace(made, keep=keep, anchors=first)


def model(dtype: torch.dtype = torch.float64, size: DrafterSize = SIZE) -> drafter.Drafter:
    """A drafter whose norms are not at their trivial value of 1."""
    torch.manual_seed(0)
    made = drafter.Drafter(size, taps=2).eval()
    for name, parameter in made.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made.to(dtype)


def inputs(
    shape: Shape = SHAPE, dtype: torch.dtype = torch.float64, size: DrafterSize = SIZE
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    context = torch.randn(1, shape.tokens, size.hidden, generator=generator, dtype=dtype)
    return context, torch.randn(1, shape.queries, size.hidden, generator=generator, dtype=dtype)


def run(batch: Batch, context: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[1,Q,D] of the float64 drafter, split into blocks [N,K,D]."""
    prepared = kernels.prepare_mask(mask.DraftMask.of(batch, K))
    return model()(context, x, draft_positions(batch, K), prepared)[0].unflatten(0, (-1, K))


def check_sees_only_before_the_anchor(batch: Batch) -> None:
    """Changing C at t >= anchor_j leaves block j unchanged; changing C before it does not."""
    context, x = inputs()
    before = run(batch, context, x)
    for j, anchor in enumerate(batch.anchors[0].tolist()):
        late = context.clone()
        late[:, anchor:] += 1.0
        assert torch.equal(run(batch, late, x)[j], before[j])
        early = context.clone()
        early[:, anchor - 1] += 1.0
        assert not torch.equal(run(batch, early, x)[j], before[j])


def check_blocks_are_alone(batch: Batch) -> None:
    """Changing block i changes block i and no other."""
    context, x = inputs()
    before = run(batch, context, x)
    for i in range(SHAPE.anchors):
        changed = x.clone()
        changed[:, i * K : (i + 1) * K] += 1.0
        after = run(batch, context, changed)
        for j in range(SHAPE.anchors):
            assert torch.equal(after[j], before[j]) == (i != j)


def test_context_from_the_anchor_on_is_not_seen() -> None:
    check_sees_only_before_the_anchor(batch_of())


def test_context_check_rejects_less_or_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask, "draft_predicate", at_the_anchor)
    with pytest.raises(AssertionError):
        check_sees_only_before_the_anchor(batch_of())


def test_blocks_do_not_see_each_other() -> None:
    check_blocks_are_alone(batch_of())


def test_block_check_rejects_blocks_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask, "draft_predicate", other_blocks)
    with pytest.raises(AssertionError):
        check_blocks_are_alone(batch_of())


def check_padding_is_finite(batch: Batch) -> None:
    context, x = (t.requires_grad_() for t in inputs())
    out = run(batch, context, x)
    assert bool(out.isfinite().all())
    out.square().sum().backward()
    assert bool(context.grad.isfinite().all()) and bool(x.grad.isfinite().all())


def test_padded_blocks_stay_finite() -> None:
    check_padding_is_finite(batch_of(padded=2))


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Softmax over -inf alone: NaN for a row that sees nothing."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def test_finite_check_rejects_naive_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "dense_attention", naive_attention)
    with pytest.raises(AssertionError):
        check_padding_is_finite(batch_of(padded=2))
    check_padding_is_finite(batch_of(padded=0))  # the naive one is right where every row sees something


# ---- an independent reference: block by block, keys picked by slicing, no mask, everything in float64 ----


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + SIZE.eps).sqrt() * weight


def turned(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding by complex numbers. x [L,H,d], positions [L]."""
    half = x.shape[-1] // 2
    angle = positions.double()[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    spun = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([spun.real, spun.imag], dim=-1)


def block_by_block(weights: dict[str, torch.Tensor], size: DrafterSize, batch: Batch, block: int, tapped: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """What the drafter answers for kept blocks, from float64 copies of its weights. tapped [1,S,T·D], x [1,Q,D] -> [1,Q,D]."""
    context = norm(tapped[0] @ weights["fuse_proj.weight"].T, weights["fuse_norm.weight"])
    answers = []
    for j, anchor in enumerate(batch.anchors[0].tolist()):
        y = x[0, j * block : (j + 1) * block]
        start = anchor - int(batch.positions[0, anchor])  # first token of the anchor's document
        places = torch.cat([torch.arange(anchor - start), torch.arange(block) + anchor - start])
        for layer in range(size.layers):
            w = {name.split(".", 2)[2]: value for name, value in weights.items() if name.startswith(f"layers.{layer}.")}
            normed = norm(y, w["input_norm.weight"])
            sources = torch.cat(
                [context[start:anchor], normed]
            )  # keys: context before the anchor, then the block itself
            q = norm(
                (normed @ w["attention.q_proj.weight"].T).view(block, size.heads, -1), w["attention.q_norm.weight"]
            )
            k = norm(
                (sources @ w["attention.k_proj.weight"].T).view(len(sources), size.kv_heads, -1),
                w["attention.k_norm.weight"],
            )
            v = (sources @ w["attention.v_proj.weight"].T).view(len(sources), size.kv_heads, -1)
            q, k = turned(q, places[-block:], size.rope_theta), turned(k, places, size.rope_theta)
            heads = []
            for h in range(size.heads):
                shared = h * size.kv_heads // size.heads
                p = torch.softmax(q[:, h] @ k[:, shared].T / size.head_dim**0.5, dim=-1)
                heads.append(p @ v[:, shared])
            y = y + torch.cat(heads, dim=-1) @ w["attention.o_proj.weight"].T
            z = norm(y, w["mlp_norm.weight"])
            gate = z @ w["gate_proj.weight"].T
            y = y + (gate * torch.sigmoid(gate) * (z @ w["up_proj.weight"].T)) @ w["down_proj.weight"].T
        answers.append(norm(y, weights["norm.weight"]))
    return torch.cat(answers)[None]


def check_against_reference(
    dtype: torch.dtype, shape: Shape, packed: bool, tolerance: float, size: DrafterSize = SIZE
) -> None:
    """Output and every gradient of the drafter against the float64 reference, by relative error."""
    made, batch = model(dtype, size), batch_of(shape, packed)
    generator = torch.Generator().manual_seed(3)
    tapped = torch.randn(1, shape.tokens, 2 * size.hidden, generator=generator, dtype=torch.float64)
    x = torch.randn(1, shape.queries, size.hidden, generator=generator, dtype=torch.float64)
    probe = torch.randn(1, shape.queries, size.hidden, generator=generator, dtype=torch.float64)
    prepared = kernels.prepare_mask(mask.DraftMask.of(batch, shape.block))
    out = made(made.fuse(tapped.to(dtype)), x.to(dtype), draft_positions(batch, shape.block), prepared)
    (out * probe.to(dtype)).sum().backward()
    weights = {name: p.detach().double().requires_grad_() for name, p in made.named_parameters()}
    exact = block_by_block(weights, size, batch, shape.block, tapped, x)
    (exact * probe).sum().backward()
    assert relative(out, exact) < tolerance
    for name, parameter in made.named_parameters():
        assert relative(parameter.grad, weights[name].grad) < tolerance, name


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.detach().double() - ref.detach()).norm() / ref.detach().norm())


@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_reference_in_float64(packed: bool) -> None:
    check_against_reference(torch.float64, SHAPE, packed, tolerance=1e-9)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_gradients_in_float32_at_real_sizes(name: str) -> None:
    check_against_reference(torch.float32, SHAPES[name], True, tolerance=2e-5, size=DrafterSize())


def context_through_input_norm(
    self: drafter.DraftLayer, x: torch.Tensor, context: torch.Tensor, rope: Any, seen: Any
) -> torch.Tensor:
    x = x + self.attention(self.input_norm(x), self.input_norm(context), rope, seen)
    y = self.mlp_norm(x)
    return x + self.down_proj(torch.nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


def no_rotary_offset(batch: Batch, block: int) -> torch.Tensor:
    tokens, queries = batch.ids.shape[1], batch.anchors.shape[1] * block
    return torch.arange(tokens + queries)[None]  # blocks stand after the row instead of at their anchors


def first_rows(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates by the wrong sign."""
    first, second = x.chunk(2, dim=-1)
    return x * cos - torch.cat([-second, first], dim=-1) * sin * (x.shape[1] == SIZE.heads)


@pytest.mark.parametrize(
    ("where", "attribute", "mutant"),
    [
        (drafter.DraftLayer, "forward", context_through_input_norm),
        (anchors, "draft_positions", no_rotary_offset),
        (mask, "draft_predicate", at_the_anchor),
        (mask, "draft_predicate", other_blocks),
        (drafter, "rotate", first_rows),
    ],
)
def test_reference_check_rejects(
    where: Any, attribute: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, attribute, mutant)
    if attribute == "draft_positions":
        monkeypatch.setitem(globals(), "draft_positions", mutant)
    with pytest.raises(AssertionError):
        check_against_reference(torch.float64, SHAPE, True, tolerance=1e-9)


def test_noise_only_while_training() -> None:
    made = model(torch.float32)
    context = torch.zeros(1, 500, 32)
    assert torch.equal(made.eval().add_noise(context, 0.05), context)
    noise = made.train().add_noise(context, 0.05)
    assert 0.045 < float(noise.abs().max()) <= 0.05
    assert abs(float(noise.mean())) < 0.002
    assert not torch.equal(noise, made.add_noise(context, 0.05)), "fresh noise each time"
    assert torch.equal(made.add_noise(context, 0.0), context)
