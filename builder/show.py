"""How answers look: JSON for machines, tables for people."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.table import Table

from builder.engine.sizes import Layer
from builder.layout import ORDER
from builder.values import Image, Lock


def table(*headers: str) -> Table:
    """A table without lines. What doesn't fit into a terminal goes on in the next line: nobody can copy half an identifier."""
    made = Table(show_header=bool(headers), box=None, pad_edge=False)
    for header in headers or ("", ""):
        made.add_column(header, overflow="fold")
    return made


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
    made = table()
    made.add_row("identifier", image.id)
    made.add_row("tag", image.tag)
    for axis, version in image.versions.items():
        made.add_row(axis, version)
    made.add_row("capabilities", ", ".join(str(c) for c in image.capabilities))
    made.add_row("NVIDIA driver", f"{image.stack.driver_floor} or newer")
    if image.stack.override:
        made.add_row("override", f"torch pins Triton {image.stack.triton_pin}")
    return made


# What a build step's command tells of its layer. The steps that install distributions all look alike; their order names them.
LAYER_NAMES = (
    ("rootfs.tar", "base"),
    ("python.sh", "virtual environment"),
    ("wheels.sh", "extensions"),
    ("/nullgpu", "null GPU"),
    ("inside/blackwell", "blackwell command"),
    ("entrypoint", "entrypoint"),
    ("facts/", "facts and lock"),
    ("finish.sh", "start-up hook"),
    ("/cache", "warm kernel cache"),
)


def layer_names(layers: Sequence[Layer], lock: Lock) -> list[str]:
    """What each layer of an image is, in a word or two; for an unknown step its command."""
    installed = iter([name for name in ORDER if lock.layer(name) and name != "extensions"])
    names = []
    for layer in layers:
        known = next((name for mark, name in LAYER_NAMES if mark in layer.created_by), "")
        if "install.sh" in layer.created_by:
            known = next(installed, "")
        words = " ".join(re.sub(r"--mount=\S+|/bin/sh -c|#.*", "", layer.created_by).split())
        names.append(known or words[:60] or "-")
    return names


def layer_table(layers: Sequence[Layer], names: Sequence[str]) -> Table:
    """Sizes by layer, in MB (10^6 bytes), with a sum. names: of the layers."""
    kinds = sorted(layers[0].compressed, reverse=True) if layers else []
    made = table("layer", "size", *kinds)
    for layer, name in zip(layers, names, strict=True):
        made.add_row(name, megabytes(layer.size), *(megabytes(layer.compressed[k]) for k in kinds))
    sums = (megabytes(sum(x.compressed[k] for x in layers)) for k in kinds)
    made.add_row("all", megabytes(sum(x.size for x in layers)), *sums)
    return made


def time_table(seconds: Mapping[str, float]) -> Table:
    """Seconds by stage of a build."""
    made = table("stage", "time")
    for stage, value in seconds.items():
        made.add_row(stage, f"{value:,.0f} s")
    return made


def megabytes(size: float) -> str:
    """A size in bytes for people."""
    return f"{size / 1e6:,.0f} MB"


def markdown_rows(rows: Sequence[tuple[Image, bool]]) -> str:
    """A Markdown table of images: (image, is it what its Triton prefix means by default)."""
    lines = [
        "| ask for | CUDA | torch | Triton | FLA | causal-conv1d | Python | NVIDIA driver | known issues |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for image, default in rows:
        v = image.versions
        triton = v["triton"] + (f" (torch pins {image.stack.triton_pin})" if image.stack.override else "")
        short = ".".join(v["triton"].split(".")[:2])
        ask = f"`make image TRITON={short}`" if default else f"`make image ID={image.lock_name}`"
        warnings = ", ".join(f"[{r.id}]({r.url})" for r in image.warnings) or "-"
        lines.append(
            f"| {ask} | {v['cuda']} | {v['torch']} | {triton} | {v['fla']} | {v['conv1d']} | {v['python']} | {image.stack.driver_floor} | {warnings} |"
        )
    return "\n".join(lines) + "\n"
