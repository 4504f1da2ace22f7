"""Tests that need a card: `python -m pytest tests/gpu -q`. Without one they skip and say why.

Measured errors, times and memory go to $OUT/gpu_results.json when OUT is set. TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR are used as
they are; from cold caches the suite compiles for several minutes.
"""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

INSIDE = Path(__file__).resolve().parents[2] / "builder" / "inside"
if INSIDE.is_dir() and str(INSIDE) not in sys.path:
    sys.path.insert(0, str(INSIDE))

import blackwell.startup  # noqa: E402, F401 - the image's start-up hook: without it two threads race in Triton's autotuner

_results: dict[str, Any] = {}


def _no_card() -> str | None:
    """Why these tests can't run here, or None."""
    if os.environ.get("NULLGPU_ON"):
        return "the null GPU is on: its results are garbage"
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "no GPU is visible to torch"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything in this folder where there is no card."""
    reason = _no_card()
    if reason is not None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`record(name=value)` keeps numbers of this test for gpu_results.json."""

    def keep(**values: Any) -> None:
        _results.setdefault(request.node.name, {}).update(values)

    return keep


@pytest.fixture(autouse=True)
def fresh_inputs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed from the clock, print the seed (shown when the test fails), and leave no memory behind."""
    import torch

    if _no_card() is None:
        seed = torch.seed() % 2**31
        torch.manual_seed(seed)
        print(f"seed {seed}")
        _results.setdefault(request.node.name, {})["seed"] = seed
    yield
    if _no_card() is None:
        import torch._dynamo

        torch._dynamo.reset()  # every test compiles flex for its own shapes: together they would pass the recompile limit
        torch.cuda.empty_cache()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the results with what they were measured on."""
    out = os.environ.get("OUT")
    if not out or _no_card() is not None:
        return
    import torch
    import triton

    properties = torch.cuda.get_device_properties(0)
    about = {
        "card": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "fla": _version("fla-core"),
        "causal_conv1d": _version("causal-conv1d"),
        "transformers": _version("transformers"),
        "exit_status": int(exitstatus),
    }
    (Path(out) / "gpu_results.json").write_text(
        json.dumps({"about": about, "tests": _results}, indent=1, default=str) + "\n"
    )


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
