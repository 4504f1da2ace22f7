"""What a job's imports lead to: which Triton, torch, FLA and causal-conv1d load, and which path each takes.

`look` runs in a bounded child and reports each stage as it ends: a crash or a hang names the stage that it met.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

STAGES = ("triton", "torch", "causal_conv1d", "transformers", "fla flags", "fla")
"""Cheapest and most telling first: `import fla` takes seconds, its flags alone do not."""


def look(report: Callable[[Any], None]) -> None:
    """Report ("start", stage), then ("facts", stage, dict) or ("error", stage, text) for each of STAGES."""
    for stage, function in zip(STAGES, (_triton, _torch, _conv1d, _transformers, _fla_flags, _fla), strict=True):
        report(("start", stage))
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                facts = function()
            facts["warnings"] = [str(w.message) for w in caught if _telling(str(w.message))]
        except BaseException as problem:  # a library may even raise SystemExit at import
            report(("error", stage, f"{type(problem).__name__}: {problem}".splitlines()[0]))
        else:
            # As plain values: unpickling torch's own version type would import torch in the caller.
            report(("facts", stage, json.loads(json.dumps(facts, default=str))))


def _telling(message: str) -> bool:
    """Whether a warning says that a library took another path than the fast one."""
    lowered = message.lower()
    return any(word in lowered for word in ("roll back", "fall back", "fallback", "falling back", "not supported"))


def _triton() -> dict[str, Any]:
    import triton
    from triton._C import libtriton

    return {
        "version": triton.__version__,
        "file": triton.__file__,
        "key_variables": dict(libtriton.get_cache_invalidating_env_vars()),
    }


def _torch() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "version": torch.__version__,
        "file": torch.__file__,
        "cuda": torch.version.cuda,
        "arches": (torch._C._cuda_getArchFlags() or "").split() if hasattr(torch._C, "_cuda_getArchFlags") else [],
        "sees_gpu": torch.cuda.is_available(),
    }
    if facts["sees_gpu"]:
        import triton

        target = triton.runtime.driver.active.get_current_target()
        facts["target"] = f"{target.backend}:{target.arch}"
    return facts


def _conv1d() -> dict[str, Any]:
    if importlib.util.find_spec("causal_conv1d") is None:
        return {"installed": False}
    import causal_conv1d

    extension = importlib.import_module("causal_conv1d_cuda")
    importlib.import_module("causal_conv1d.cpp_functions").causal_conv1d_bwd_function  # noqa: B018 - FLA takes this one
    return {"installed": True, "version": causal_conv1d.__version__, "extension": extension.__file__}


def _transformers() -> dict[str, Any]:
    if importlib.util.find_spec("transformers") is None:
        return {"installed": False}
    from transformers.utils import import_utils

    return {
        "installed": True,
        "fla": bool(import_utils.is_flash_linear_attention_available()),
        "conv1d": bool(import_utils.is_causal_conv1d_available()),
    }


def _fla_flags() -> dict[str, Any]:
    """FLA's own idea of the machine, without importing all of its models."""
    with _without_init():
        utils = importlib.import_module("fla.utils")
    return {"platform": utils.device_platform, "blackwell": bool(getattr(utils, "IS_NVIDIA_BLACKWELL", False))}


@contextlib.contextmanager
def _without_init() -> Iterator[None]:
    """Let FLA's submodules be imported without its `__init__`, which imports every model."""
    name = "fla"
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    shell = types.ModuleType(name)
    shell.__path__ = list(spec.submodule_search_locations or ())
    shell.__spec__ = spec
    shell.__version__ = importlib.metadata.version("flash-linear-attention")  # type: ignore[attr-defined]
    sys.modules[name] = shell
    try:
        yield
    finally:
        del sys.modules[name]


def _fla() -> dict[str, Any]:
    import fla

    importlib.import_module("fla.ops.gated_delta_rule")
    return {"version": fla.__version__, "file": fla.__file__}
