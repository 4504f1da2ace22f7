"""torch.compile, flex_attention and FLA under the null GPU: they run, and a second process finds everything the first one compiled."""

import json
from pathlib import Path
from typing import Any

import pytest
from nullgpu_helper import needs_compiler, run_under

pytest.importorskip("torch")
pytestmark = [needs_compiler, pytest.mark.slow]

HEAD = """
import json, os
import torch, triton
from torch._dynamo.utils import counters
kernels = {"hit": 0, "miss": 0}
def listener(*, cache_hit, **_):
    kernels["hit" if cache_hit else "miss"] += 1
triton.knobs.compilation.listener = listener
def done(**facts):
    inductor = {key: counters["inductor"][key] for key in ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")}
    autograd = {key: counters["aot_autograd"][key] for key in ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")}
    print("DONE" + json.dumps({**inductor, **autograd, **kernels, **facts}), flush=True)
    os._exit(0)
"""

MODES = """
from torch import nn
for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs"):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).cuda()
    compiled = torch.compile(model, mode=mode)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        x = torch.ones(8, 64, device="cuda", requires_grad=True)
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x).sum().backward()
    assert x.grad.shape == (8, 64), mode
@torch.compile
def lengths(offsets):
    return torch.diff(offsets).clamp(min=1)
assert lengths(torch.tensor([0, 3, 8], device="cuda")).shape == (2,)
done()
"""

FLEX = """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
documents = torch.repeat_interleave(torch.arange(2), torch.tensor([200, 312])).cuda()
mask = create_block_mask(lambda b, h, i, j: (i >= j) & (documents[i] == documents[j]), None, None, 512, 512, device="cuda")
q, k, v = (torch.ones(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
out = torch.compile(flex_attention)(q, k, v, block_mask=mask)
out.sum().backward()
done(shape=list(q.grad.shape))
"""

# One configuration a kernel: enough to see that every kernel launches and is found again.
FLA = """
from triton.runtime.autotuner import Autotuner
Autotuner.prune_configs = lambda self, kwargs: self.configs[:1]
from fla.modules.conv import causal_conv1d
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
def step(offsets):
    q, k, v = (torch.ones(1, 192, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gate = torch.ones(1, 192, 2, device="cuda", requires_grad=True)
    beta = torch.ones(1, 192, 2, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out, state = chunk_gated_delta_rule(q, k, v, gate, beta, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets)
    (out.sum() + state.sum()).backward()
    x = torch.ones(1, 192, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(128, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    causal_conv1d(x, weight, activation="silu", cu_seqlens=offsets)[0].sum().backward()
    return list(state.shape), list(q.grad.shape), list(weight.grad.shape)
plain, packed = step(None), step(torch.tensor([0, 70, 192], device="cuda"))
done(plain=plain, packed=packed)
"""


def run(program: str, caches: Path) -> dict[str, Any]:
    """What the program reported with `done`. One that raises ends at once too: interpreter exit may hang under the null GPU."""
    body = "".join(f"    {line}\n" for line in program.splitlines())
    whole = (
        f"{HEAD}\ntry:\n{body}except BaseException:\n    import traceback\n    traceback.print_exc()\n    os._exit(1)\n"
    )
    said = run_under(
        "NVIDIA B200",
        ["-c", whole],
        TRITON_CACHE_DIR=str(caches / "triton"),
        TORCHINDUCTOR_CACHE_DIR=str(caches / "inductor"),
        FLA_TILELANG="0",
        seconds=900,
    )
    assert "DONE" in said, said
    facts: dict[str, Any] = json.loads(said.partition("DONE")[2].partition("\n")[0])
    return facts


def cubins(caches: Path) -> set[Path]:
    return set(caches.rglob("*.cubin"))


def test_compile_modes(tmp_path: Path) -> None:
    facts = run(MODES, tmp_path)
    assert facts["fxgraph_cache_miss"] >= 4 and cubins(tmp_path)


def test_flex_attention_hits_in_a_second_process(tmp_path: Path) -> None:
    first = run(FLEX, tmp_path)
    assert first["shape"] == [1, 2, 512, 64]
    assert first["fxgraph_cache_miss"] == 2 and first["autograd_cache_miss"] == 1
    made = cubins(tmp_path)
    assert made
    second = run(FLEX, tmp_path)
    assert (second["fxgraph_cache_hit"], second["fxgraph_cache_miss"], second["fxgraph_cache_bypass"]) == (2, 0, 0)
    assert (second["autograd_cache_hit"], second["autograd_cache_miss"], second["autograd_cache_bypass"]) == (1, 0, 0)
    assert cubins(tmp_path) == made and second["miss"] == 0


def test_gated_delta_rule_and_conv_hit_in_a_second_process(tmp_path: Path) -> None:
    pytest.importorskip("fla")
    first = run(FLA, tmp_path)
    assert first["plain"] == [[1, 2, 64, 64], [1, 192, 2, 64], [128, 4]]
    assert first["packed"] == [[2, 2, 64, 64], [1, 192, 2, 64], [128, 4]]
    assert first["miss"] > 15
    made = cubins(tmp_path)
    second = run(FLA, tmp_path)
    assert second["miss"] == 0 and second["hit"] > 15 and cubins(tmp_path) == made
