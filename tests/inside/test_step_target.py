"""The target: which layers are tapped, packing, routing of kernels, and the references themselves."""

import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from blackwell.step import kernels, reference  # noqa: E402
from blackwell.step.anchors import Batch, pack, random_batch, replace  # noqa: E402
from blackwell.step.config import SHAPES, StepError, TargetSize  # noqa: E402
from blackwell.step.target import Target, tap_layers  # noqa: E402

TINY = TargetSize(vocabulary=128, hidden=64, intermediate=64, heads=2, kv_heads=1, head_dim=32, linear_key_heads=1, linear_value_heads=2, linear_head_dim=16)  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [(4, 2, [1]), (4, 5, [1]), (8, 2, [1, 5]), (32, 5, [1, 8, 15, 22, 29]), (36, 5, [1, 9, 17, 25, 33]), (24, 1, [11])],
)
def test_tap_layers(layers: int, count: int, expected: list[int]) -> None:
    assert tap_layers(layers, count) == expected


def check_taps(target: Target, batch: Batch, tapped: torch.Tensor) -> None:
    """The features of tap i are what layer `layers[i]` really put out."""
    outputs: dict[int, torch.Tensor] = {}
    hooks = [
        target.model.layers[i].register_forward_hook(lambda module, args, out, i=i: outputs.__setitem__(i, out[0] if isinstance(out, tuple) else out))
        for i in target.layers
    ]  # fmt: skip
    target.tap(batch)
    for hook in hooks:
        hook.remove()
    assert torch.equal(tapped, torch.cat([outputs[i] for i in target.layers], dim=-1))


def test_taps_are_layer_outputs_concatenated_on_features() -> None:
    torch.manual_seed(0)
    target = Target(replace(TINY, layers=8), taps=2)
    batch = random_batch(SHAPES["odd"], 127, False, seed=0)
    tapped = target.tap(batch)
    assert target.layers == [1, 5]
    assert tapped.shape == (1, 200, 2 * 64)
    check_taps(target, batch, tapped)
    target.layers = [0, 4]  # the entry before: index without + 1
    shifted = target.tap(batch)
    target.layers = [1, 5]
    with pytest.raises(AssertionError):
        check_taps(target, batch, shifted)


def test_layer_kinds() -> None:
    target = Target(TINY, taps=2)
    assert target.model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert not any(p.requires_grad for p in target.parameters()) and not target.training


def packing_error(change: dict[str, object]) -> float:
    """Largest difference of the tapped features between three documents alone and packed, with `change` made to the packed batch."""
    torch.manual_seed(0)
    target = Target(replace(TINY, layers=8), taps=3)  # taps 1, 3 (full attention), 5
    generator = torch.Generator().manual_seed(2)
    documents = [torch.randint(127, (n,), generator=generator) for n in (70, 41, 100)]
    packed = pack(documents, [torch.ones(len(d), dtype=torch.bool) for d in documents], 4, generator)
    alone = torch.cat(
        [target.tap(pack([d], [torch.ones(len(d), dtype=torch.bool)], 4, generator)) for d in documents], dim=1
    )
    return float((target.tap(replace(packed, **change)) - alone).abs().max())


def test_packed_documents_do_not_see_each_other() -> None:
    assert packing_error({}) < 1e-5
    assert packing_error({"cu_seqlens": None}) > 1e-3
    assert packing_error({"cu_seqlens": torch.tensor([0, 60, 111, 211], dtype=torch.int32)}) > 1e-3
    assert packing_error({"documents": torch.zeros(1, 211, dtype=torch.long)}) > 1e-3
    assert packing_error({"positions": torch.arange(211)[None] * 3}) > 1e-3


def test_conv_and_delta_rule_each_keep_documents_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the offsets in one of the two only: the packing check above notices each."""
    for name in ("causal_conv_per_document", "delta_rule_per_document"):
        right = getattr(reference, name)
        with monkeypatch.context() as patch:
            if name == "causal_conv_per_document":
                patch.setattr(reference, name, lambda *args, right=right: right(*args[:-1], None))
            else:
                patch.setattr(
                    reference, name, lambda *args, right=right, **kw: right(*args, **{**kw, "cu_seqlens": None})
                )
            assert packing_error({}) > 1e-4, name


def test_delta_rule_references_agree() -> None:
    """transformers' chunked reference (float32 inside) against the definition in float64, with grouped value heads and an odd length."""
    kernels.install()
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 77, 2, 16, generator=generator) for _ in range(2))
    v = torch.randn(1, 77, 4, 16, generator=generator)
    g, beta = -torch.rand(1, 77, 4, generator=generator), torch.rand(1, 77, 4, generator=generator)
    out, _ = qwen.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=None)
    exact = reference.recurrent_delta_rule(*(x.double() for x in (q, k, v, g, beta)))
    assert (out - exact).norm() / exact.norm() < 1e-5
    wrong = reference.recurrent_delta_rule(*(x.double() for x in (q, k, v, g * 1.01, beta)))
    assert (out - wrong).norm() / wrong.norm() > 1e-4


def test_conv_reference_is_causal_convolution() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(1, 3, 11, generator=generator), torch.randn(3, 4, generator=generator)
    out = reference.causal_conv_per_document(x, w, None, "silu", torch.tensor([0, 5, 11]))
    for start, end in ((0, 5), (5, 11)):
        for c in range(3):
            for t in range(start, end):
                total = sum(float(w[c, 3 - back]) * float(x[0, c, t - back]) for back in range(4) if t - back >= start)
                assert float(out[0, c, t]) == pytest.approx(total / (1 + pow(2.718281828459045, -total)), abs=1e-5)
    with pytest.raises(ValueError, match="unknown activation"):
        reference.causal_conv_per_document(x, w, None, "relu", None)


def wrapped(module: str):
    """A kernel in transformers' wrapping whose implementation claims to live in `module`."""

    def implementation(*args, **kwargs):
        return module

    implementation.__module__ = module

    def wrapper(*args, **kwargs):
        return implementation(*args, **kwargs)

    return wrapper


GPU = torch.empty(1, 2, 3, device="meta")  # not a CPU tensor: takes the GPU's route, computes nothing


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """What `implementations` reports, fresh."""
    fresh: dict[str, set[str]] = {}
    monkeypatch.setattr(kernels, "_ran", fresh)
    return fresh


def test_gpu_delta_rule_must_be_flas(ran: dict[str, set[str]]) -> None:
    assert (
        kernels.route_delta_rule(wrapped("fla.ops.gated_delta_rule.chunk"))(GPU, GPU, GPU)
        == "fla.ops.gated_delta_rule.chunk"
    )
    assert "fla.ops.gated_delta_rule.chunk" in str(kernels.implementations())
    with pytest.raises(StepError, match="fell back to plain torch"):
        kernels.route_delta_rule(wrapped("transformers.models.qwen3_5.modeling_qwen3_5"))(GPU, GPU, GPU)


def test_gpu_conv_is_causal_conv1d_else_flas(ran: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(2, 4, device="meta")
    assert (
        kernels.route_conv(wrapped("causal_conv1d.causal_conv1d_interface"))(GPU, weight)
        == "causal_conv1d.causal_conv1d_interface"
    )

    def fla_conv(x, weight, bias, activation, cu_seqlens):
        assert x.shape == (1, 3, 2), "FLA's convolution takes [B,S,C]"
        return x, None

    monkeypatch.setitem(sys.modules, "fla.modules.convolution", types.SimpleNamespace(causal_conv1d=fla_conv))
    plain = kernels.route_conv(wrapped("transformers.models.qwen3_5.modeling_qwen3_5"))
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert plain(GPU, weight).shape == GPU.shape
    assert any("fla_conv" in name for name in ran["causal_conv1d"])
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(StepError, match="installed but does not serve the target"):
        plain(GPU, weight)


def test_unknown_wrapping_is_said(ran: dict[str, set[str]]) -> None:
    with pytest.raises(StepError, match="no longer says which implementation"):
        kernels.route_conv(lambda *args: None)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "blackwell_missing is not installed: build it again."),
        ("import blackwell_missing_too", "fails: No module named 'blackwell_missing_too'. Install blackwell_missing_too."),
        ("raise OSError(28, 'No space left on device')", "No space left on device. If a disk is full"),
        ("raise ImportError('undefined symbol: _ZN')", "fails: ImportError: undefined symbol: _ZN. If it isn't the machine, build it again."),
        ("", "works now, so it failed earlier in this process"),
    ],
)  # fmt: skip
def test_a_fallback_says_why(source: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if source is not None:
        (tmp_path / "blackwell_missing.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "blackwell_missing", raising=False)
    assert reason in kernels._why_not("blackwell_missing", "build it again")
    sys.modules.pop("blackwell_missing", None)
