"""Start-up hook of Python processes under the null GPU: loads `integer_truth` as soon as torch has been imported.

`blackwell.nullgpu.environment` puts this directory on PYTHONPATH. Another sitecustomize further down the path still runs.
"""

import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

# By its file: in an interpreter that is not the image's, the package is not to be found by name.
_spec = importlib.util.spec_from_file_location("blackwell_after_import", HERE.parent / "after_import.py")
assert _spec is not None and _spec.loader is not None
after_import = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(after_import)


def _install_truth(_: object) -> None:
    after_import.load_file("blackwell_nullgpu_integer_truth", HERE.parent / "integer_truth.py").install()


if os.environ.get("NULLGPU_ON"):
    sys.meta_path.insert(0, after_import.AfterImport({"torch": _install_truth}))
after_import.run_next_sitecustomize(HERE)
