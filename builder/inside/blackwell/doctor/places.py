"""Where installed packages lie, found without importing them."""

import importlib.util
from pathlib import Path


def triton_directory() -> Path | None:
    """Triton's package directory, None when it isn't installed."""
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
