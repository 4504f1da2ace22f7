"""Runs at every start of the image's interpreter (a .pth file holds `import blackwell.startup`): importing it arms it.

It puts one finder in front of the import system and does nothing else until torch or triton is imported. Then it
names a UID without a name, lays the writable overlay over the baked kernel cache (`blackwell.overlay`), and once their modules are loaded
makes Triton's autotuner thread-safe (`blackwell.autotuner_race`) and gives Triton and torch the hashes of their own files
(`blackwell.source_keys`). BLACKWELL_STARTUP=0 switches all of it off. It must stay far below 2 ms
and never raise: whatever goes wrong here, the job still starts, only without the help.
"""

import os
import sys

TYPE_CHECKING = False  # known to type checkers by its name; importing `typing` would cost several milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

CACHE_USERS = frozenset({"torch", "triton"})
AUTOTUNER = "triton.runtime.autotuner"
TRITON_CACHE = "triton.runtime.cache"
TORCH_CACHE = "torch._inductor.codecache"


class _Finder:
    """Meta path finder that finds nothing itself, but acts when certain modules are about to be imported."""

    def __init__(self) -> None:
        self.overlay_done = False

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Called for every import of a module that isn't loaded; None leaves it to the next finder."""
        if name in CACHE_USERS:
            if not self.overlay_done:
                self.overlay_done = True
                name_user()
                lay_overlay()
        elif name in ARMED:
            return _spec_that_arms(name, path)
        return None


def lay_overlay() -> None:
    """Redirect the cache variables to the overlay; silent whatever happens."""
    try:
        from blackwell import overlay

        overlay.apply()
    except Exception:  # a broken overlay must not stop a job: it then reads the baked cache directly
        pass


def name_user() -> None:
    """Give a UID that has no name one: Inductor asks for the user's name while it is imported, and fails without.

    Kubernetes runs jobs under such UIDs; then FLA's import fails, and transformers silently takes plain torch
    (https://github.com/pytorch/pytorch/issues/140765). Can go when Inductor no longer calls getpass.getuser().
    """
    try:
        if not any(os.environ.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):
            import pwd

            try:
                pwd.getpwuid(os.getuid())
            except KeyError:
                os.environ["USER"] = f"uid-{os.getuid()}"
    except Exception:  # as above: the job starts in any case
        pass


def arm_autotuner(_: "ModuleType | None" = None) -> None:
    """Close the autotuner's thread race in the loaded Triton; silent whatever happens."""
    try:
        from blackwell import autotuner_race

        autotuner_race.arm()
    except Exception:  # Triton as it is beats a job that doesn't start
        pass


def arm_triton_key(module: "ModuleType") -> None:
    """Spare the process hashing Triton's own files; silent whatever happens."""
    try:
        from blackwell import source_keys

        source_keys.arm_triton(module)
    except Exception:  # then Triton hashes them
        pass


def arm_torch_key(module: "ModuleType") -> None:
    """Spare the process hashing torch's own files; silent whatever happens."""
    try:
        from blackwell import source_keys

        source_keys.arm_torch(module)
    except Exception:  # then torch hashes them
        pass


ARMED: "dict[str, Callable[[ModuleType], None]]" = {
    AUTOTUNER: arm_autotuner,
    TRITON_CACHE: arm_triton_key,
    TORCH_CACHE: arm_torch_key,
}
"""What to call with a module once it has run."""


def _spec_that_arms(name: str, path: "Sequence[str] | None") -> "ModuleSpec | None":
    """The module's ordinary spec, whose loader calls its function of ARMED once the module has run."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None:
        return None
    load = spec.loader.exec_module

    def load_and_arm(module: "ModuleType") -> None:
        load(module)
        ARMED[name](module)

    try:
        loader: Any = spec.loader
        loader.exec_module = load_and_arm
    except AttributeError:
        return None
    return spec


def start() -> None:
    """Put the finder in place, once; called by importing this module."""
    if os.environ.get("BLACKWELL_STARTUP") == "0" or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    if CACHE_USERS & sys.modules.keys():
        name_user()
        lay_overlay()
    for name, arm in ARMED.items():
        if name in sys.modules:
            arm(sys.modules[name])


start()
