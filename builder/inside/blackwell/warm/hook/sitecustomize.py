"""Start-up hook of Python processes that `blackwell warm` watches: starts the recorder, then runs whichever sitecustomize comes next."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def _run_next() -> None:
    # Only what comes later on the path: the null GPU's hook lies before this one and has already run.
    places = [Path(entry or ".").resolve() for entry in sys.path]
    later = sys.path[places.index(HERE) + 1 :] if HERE in places else sys.path
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", later)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["blackwell_warm_next_sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("BLACKWELL_WARM_EVENTS"):
    try:
        from blackwell.warm import recorder
    except ModuleNotFoundError:  # not the image's interpreter: the package lies three directories up
        sys.path.append(str(HERE.parents[2]))
        from blackwell.warm import recorder
    recorder.start()
_run_next()
