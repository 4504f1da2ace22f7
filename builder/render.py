"""Render a lock into a build context: pure, so that the same lock gives the same bytes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from builder import arch
from builder.layout import ORDER, Removal
from builder.lock import dumps, requirements_text
from builder.values import Image, Lock

LIBRARIES = ("cuda", "cudnn", "triton", "torch")


def environment() -> jinja2.Environment:
    """Jinja with every undefined name an error."""
    return jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def dockerfile(template: str, image: Image, lock: Lock) -> str:
    """The Dockerfile of an image. Raises jinja2.TemplateError for a template that asks for what there is not."""
    filled = [name for name in ORDER if lock.layer(name)]
    return (
        environment()
        .from_string(template)
        .render(
            image=image,
            lock=lock,
            libraries=[n for n in filled if n in LIBRARIES],
            extensions="extensions" in filled,
            rest=[n for n in filled if n not in LIBRARIES and n != "extensions"],
            gencode=arch.gencode(image.capabilities),
            capabilities=[str(c) for c in image.capabilities],
        )
    )


def context(
    template: str, image: Image, lock: Lock, removals: Sequence[Removal], cards: Sequence[str]
) -> Mapping[str, str]:
    """All rendered files of a build context, path -> text."""
    files = {"Dockerfile": dockerfile(template, image, lock)}
    for name in sorted({d.layer for d in lock.distributions} - {"tools"}):
        files[f"layers/{name}/requirements.txt"] = requirements_text(lock.layer(name))
        files[f"layers/{name}/prune.txt"] = "".join(f"{r.what} {r.glob}\n" for r in removals if r.layer == name)
    files["facts/image.json"] = json.dumps(facts(image, lock, cards), indent=2) + "\n"
    files["facts/lock.toml"] = dumps(lock)
    runtime = [d for d in lock.distributions if d.layer not in ("tools", "compiler")]
    files["facts/constraints.txt"] = "".join(f"{d.name}=={d.version}\n" for d in sorted(runtime, key=lambda d: d.name))
    return files


def facts(image: Image, lock: Lock, cards: Sequence[str]) -> dict[str, Any]:
    """What the image says of itself in image.json."""
    override = (
        f"Triton {image.stack.triton} instead of {image.stack.triton_pin}, which torch {image.stack.torch} pins"
        if image.stack.override
        else None
    )
    return {
        "id": image.id,
        "versions": image.versions,
        "capabilities": [str(c) for c in image.capabilities],
        "extension_targets": [str(c) for c in arch.extension_targets(image.capabilities)],
        "driver_floor": image.stack.driver_floor,
        "override": override,
        "lock_checksum": lock.checksum,
        "cards": list(cards),
        "rules": [{"id": r.id, "verdict": r.verdict, "sentence": r.sentence, "url": r.url} for r in image.rules],
    }
