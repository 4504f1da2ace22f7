"""Start-up hook of Python processes under the null GPU: loads `integer_truth` as soon as torch has been imported.

`blackwell.nullgpu.environment` puts this directory on PYTHONPATH. Another sitecustomize further down the path still runs.
"""

import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent


class _TruthAfterTorch:
    """Import hook behind the loader of `torch`.

    Programs that only ask whether torch exists call it too (transformers does), so the hook is used up by loading alone.
    """

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch" or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._asking.now = False
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_then_install(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _load("integer_truth", HERE.parent / "integer_truth.py").install()

        spec.loader.exec_module = load_then_install  # type: ignore[method-assign]
        return spec


def _load(name: str, file: Path) -> ModuleType:
    """A module from a file, without putting its directory on sys.path: the user's own modules keep their names."""
    spec = importlib.util.spec_from_file_location(f"blackwell_nullgpu_{name}", file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _run_next() -> None:
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.origin is not None:
        _load("next_sitecustomize", Path(spec.origin))


if os.environ.get("NULLGPU_ON"):
    sys.meta_path.insert(0, _TruthAfterTorch())
_run_next()
