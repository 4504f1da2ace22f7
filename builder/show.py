"""How answers look: JSON for machines, tables for people."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.table import Table

from builder.engine.sizes import Layer
from builder.values import Image


def answer(value: Any) -> None:
    """Print JSON to stdout."""
    click.echo(json.dumps(value, indent=2))


def describe(image: Image) -> dict[str, Any]:
    """An image for machines."""
    return {
        "id": image.id,
        "tag": image.tag,
        "versions": image.versions,
        "capabilities": [str(c) for c in image.capabilities],
        "platform": image.platform,
        "driver_floor": image.stack.driver_floor,
        "override": image.stack.override,
        "rules": [
            {"id": r.id, "verdict": r.verdict, "sentence": r.sentence, "url": r.url, "instead": r.instead}
            for r in image.rules
        ],
    }


def image_table(image: Image) -> Table:
    """Identifier, tag, versions and capabilities as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("identifier", image.id)
    table.add_row("tag", image.tag)
    for axis, version in image.versions.items():
        table.add_row(axis, version)
    table.add_row("capabilities", ", ".join(str(c) for c in image.capabilities))
    table.add_row("NVIDIA driver", f"{image.stack.driver_floor} or newer")
    if image.stack.override:
        table.add_row("override", f"torch pins Triton {image.stack.triton_pin}")
    return table


def layer_name(created_by: str) -> str:
    """A layer's step in a few words."""
    if layer := re.search(r"layers/(\w+)", created_by):
        return layer[1]
    words = re.sub(r"--mount=\S+\s*|/bin/sh -c|#.*|\s{2,}", " ", created_by).strip()
    return words[:60] or "-"


def layer_table(layers: Sequence[Layer]) -> Table:
    """Sizes by layer, in MB (10^6 bytes), with a sum."""
    kinds = sorted(layers[0].compressed, reverse=True) if layers else []
    table = Table("layer", "size", *kinds, box=None, pad_edge=False)
    for layer in layers:
        table.add_row(
            layer_name(layer.created_by), megabytes(layer.size), *(megabytes(layer.compressed[k]) for k in kinds)
        )
    sums = (megabytes(sum(x.compressed[k] for x in layers)) for k in kinds)
    table.add_row("all", megabytes(sum(x.size for x in layers)), *sums)
    return table


def time_table(seconds: Mapping[str, float]) -> Table:
    """Seconds by stage of a build."""
    table = Table("stage", "time", box=None, pad_edge=False)
    for stage, value in seconds.items():
        table.add_row(stage, f"{value:,.0f} s")
    return table


def megabytes(size: float) -> str:
    """A size in bytes for people."""
    return f"{size / 1e6:,.0f} MB"


def markdown_rows(rows: Sequence[tuple[Image, bool]]) -> str:
    """A Markdown table of images: (image, is it what its Triton prefix means by default)."""
    lines = ["| ask for | CUDA | torch | Triton | FLA | causal-conv1d | Python | NVIDIA driver | known issues |", "|---|---|---|---|---|---|---|---|---|"]
    for image, default in rows:
        v = image.versions
        triton = v["triton"] + (f" (torch pins {image.stack.triton_pin})" if image.stack.override else "")
        short = ".".join(v["triton"].split(".")[:2])
        ask = f"`make image TRITON={short}`" if default else f"`make image ID={image.lock_name}`"
        warnings = ", ".join(f"[{r.id}]({r.url})" for r in image.warnings) or "-"
        lines.append(f"| {ask} | {v['cuda']} | {v['torch']} | {triton} | {v['fla']} | {v['conv1d']} | {v['python']} | {image.stack.driver_floor} | {warnings} |")
    return "\n".join(lines) + "\n"
