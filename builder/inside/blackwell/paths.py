"""Where things lie inside the image. BLACKWELL_ROOT moves the whole tree (tests); the default is /opt/blackwell."""

import json
import os
from pathlib import Path
from typing import Any


def root() -> Path:
    """The image's own directory."""
    return Path(os.environ.get("BLACKWELL_ROOT", "/opt/blackwell"))


def image_facts() -> dict[str, Any]:
    """What the image says of itself (image.json). Raises FileNotFoundError outside an image."""
    facts: dict[str, Any] = json.loads((root() / "image.json").read_text())
    return facts


def baked_cache() -> Path | None:
    """The baked kernel cache named by BLACKWELL_CACHE, or None outside an image."""
    value = os.environ.get("BLACKWELL_CACHE")
    return Path(value) if value else None


def nullgpu_lib() -> Path:
    """Directory of the built null GPU libraries."""
    return Path(os.environ.get("BLACKWELL_NULLGPU_LIB", str(root() / "nullgpu" / "lib")))


def data(kind: str) -> Path:
    """Directory of data files shipped with the package: 'bundles', 'cards' or 'workloads'."""
    return Path(__file__).parent / kind
