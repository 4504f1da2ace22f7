"""One page about an image, in HTML (self-contained, legible on a phone) and in Markdown. Pure: everything is given."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup
from markupsafe import escape as escaped

from builder.engine.sizes import Layer
from builder.sbom import licence_counts
from builder.values import Image, Lock
from builder.verify import Verdict

# Kernels by what they are for: the first pattern that fits a kernel's name names its family.
FAMILIES: Sequence[tuple[str, str]] = (
    ("flex attention", r"triton_\w*flex_attention"),
    ("other Inductor kernels", r"triton_"),
    ("causal convolution", r".*conv1d"),
    ("gated delta rule", r"chunk_|recompute_w_u|prepare_wy|fused_recurrent|merge_|solve_tril|kkt|chunk"),
    ("norms and gates", r".*(norm|gate|swiglu|sigmoid|silu)"),
    ("loss and embedding", r".*(cross_entropy|logsumexp|embedding|rotary)"),
)
OTHER = "other Triton kernels"
TITLES = {
    "torch": "torch",
    "triton": "Triton",
    "fla": "FLA (flash-linear-attention)",
    "conv1d": "causal-conv1d",
    "transformers": "transformers",
    "cuda": "CUDA",
    "python": "Python",
    "base": "base",
}


@dataclass(frozen=True, kw_only=True)
class Material:
    """Everything that a report tells. `warm` is the image's own report of its kernel cache, {} if it has none.

    `cards` are the named cards with one of its capabilities; `benchmark` is what bench/first_step.py wrote, or {};
    `layer_names` says in a word which step made each of `layers`.
    """

    image: Image
    lock: Lock
    digest: str
    labels: Mapping[str, str]
    verdict: Verdict | None
    layers: Sequence[Layer]
    layer_names: Sequence[str]
    cards: Sequence[str]
    warm: Mapping[str, Any]
    bill: bytes
    benchmark: Mapping[str, Any]


def family(kernel: str) -> str:
    """What a kernel is for, by its name."""
    return next((name for name, pattern in FAMILIES if re.match(pattern, kernel)), OTHER)


def capability(arch: int) -> str:
    """Triton's GPU target as a compute capability: 120 is 12.0."""
    return f"{arch // 10}.{arch % 10}"


def warm_table(warm: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, list[int]]]]:
    """Warm kernels counted: the capabilities, and for each family its counts in their order, the largest family first."""
    counts: Counter[tuple[str, str]] = Counter(
        (family(k["kernel"]), capability(k["target"]["arch"])) for k in warm.get("kernels", [])
    )
    columns = sorted({c for _, c in counts}, key=lambda c: tuple(map(int, c.split("."))))
    families = sorted({f for f, _ in counts}, key=lambda f: (-sum(counts[f, c] for c in columns), f))
    return columns, [(f, [counts[f, c] for c in columns]) for f in families]


def facts(material: Material) -> dict[str, Any]:
    """What the templates are filled with."""
    image, verdict = material.image, material.verdict
    columns, families = warm_table(material.warm)
    runtime = [d for d in material.lock.distributions if d.layer not in ("tools", "compiler")]
    total = sum(layer.size for layer in material.layers)
    compressed = sum(layer.compressed.get("zstd", 0) for layer in material.layers)
    largest = max((layer.size for layer in material.layers), default=1)
    tests = (
        sorted(verdict.tests, key=lambda t: (("failed", "skipped", "passed").index(t.outcome), t.name))
        if verdict
        else []
    )
    rows = [
        {
            **{k: row.get(k) for k in ("program", "run", "ok", "first_step", "second_step", "later_steps")},
            "compiled": row.get("report", {}).get("misses"),
        }
        for row in material.benchmark.get("rows", [])
    ]
    return {
        "image": image,
        "title": f"torch {image.stack.torch}, Triton {image.stack.triton}, CUDA {image.stack.cuda}",
        "digest": material.digest,
        "created": material.labels.get("org.opencontainers.image.created", ""),
        "versions": [(TITLES[axis], v) for axis, v in image.versions.items()],
        "capabilities": [str(c) for c in image.capabilities],
        "cards": material.cards,
        "state": "not verified" if verdict is None else "passed its tests" if verdict.passed else "failed its tests",
        "verdict": verdict,
        "tests": tests,
        "counts": verdict.counts() if verdict else {},
        "rules": image.rules,
        "layers": [
            {
                "name": name,
                "size": layer.size,
                "zstd": layer.compressed.get("zstd", 0),
                "share": layer.size / max(largest, 1),
            }
            for layer, name in zip(material.layers, material.layer_names, strict=True)
        ],
        "largest": largest,
        "size": total,
        "size_zstd": compressed,
        "columns": columns,
        "families": families,
        "most": max((n for _, counts in families for n in counts), default=1),
        "kernels": len(material.warm.get("kernels", [])),
        "warm": material.warm,
        "runs": [r for r in material.warm.get("runs", []) if r.get("card")],
        "distributions": sorted(runtime, key=lambda d: d.name),
        "debian": material.lock.debian,
        "licences": licence_counts(material.bill),
        "benchmark": rows,
        "bench_facts": material.benchmark.get("facts", {}),
        "lock": material.lock,
    }


def environment(*, escape: bool) -> jinja2.Environment:
    """Jinja with every undefined name an error, and the filters that both templates use."""
    made = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=escape,
    )
    made.filters["mb"] = lambda size: f"{size / 1e6:,.{0 if size >= 1e7 else 1}f} MB"
    made.filters["gb"] = lambda size: f"{size / 1e9:.2f} GB"
    made.filters["code"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escaped(text))))
    made.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    made.filters["seconds"] = lambda value, digits=2: "-" if value is None else f"{value:.{digits}f}"
    return made


def html(material: Material) -> str:
    """The page."""
    return _fill("report.html.j2", material, escape=True)


def markdown(material: Material) -> str:
    """The same in Markdown, without the plots."""
    return _fill("report.md.j2", material, escape=False)


def _fill(name: str, material: Material, *, escape: bool) -> str:
    template = (resources.files("builder.layout") / name).read_text(encoding="utf-8")
    return environment(escape=escape).from_string(template).render(**facts(material))


def read_benchmark(text: str | bytes) -> dict[str, Any]:
    """What bench/first_step.py wrote. Raises ValueError for anything else."""
    data = json.loads(text)
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("rows"), list)
        or not all(isinstance(row, dict) for row in data["rows"])
    ):
        raise ValueError("no result of bench/first_step.py: it has no rows")
    return data
