"""Act in an unchanged program: right after it imports a module, and at its start beside whatever sitecustomize it has of its own.

Standard library only, and loaded from its file by the start-up hooks: it may not import anything of this package.
"""

import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


class AfterImport:
    """Meta path finder that calls a function with a module right after it was imported, once each."""

    def __init__(self, hooks: Mapping[str, Callable[[ModuleType], object]]) -> None:
        self._hooks = dict(hooks)
        self._asking = threading.local()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders give, with the hook behind its loader.

        Also called by programs that only ask whether a module exists (transformers does), so a hook is used up by loading, not by finding.
        """
        if name not in self._hooks or getattr(self._asking, "name", None) == name:
            return None
        self._asking.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.name = None
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_then_call(module: ModuleType) -> None:
            load(module)
            hook = self._hooks.pop(name, None)
            if hook is not None:
                hook(module)

        spec.loader.exec_module = load_then_call  # type: ignore[method-assign]
        return spec


def load_file(name: str, file: Path) -> ModuleType:
    """A module from a file, without putting its directory on sys.path: the user's own modules keep their names."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_next_sitecustomize(here: Path) -> None:
    """Run the sitecustomize that lies after the directory `here` on sys.path, which `here`'s own has hidden."""
    places = [Path(entry or ".").resolve() for entry in sys.path]
    later = sys.path[places.index(here) + 1 :] if here in places else sys.path
    spec = PathFinder.find_spec("sitecustomize", later)
    if spec is not None and spec.origin is not None:
        load_file(f"blackwell_sitecustomize_after_{here.name}", Path(spec.origin))
