"""The null GPU's start-up hook is used up by loading torch, not by asking whether it exists."""

import os
import subprocess
import sys
from pathlib import Path


def test_asking_for_torch_first_keeps_integer_truth(tmp_path: Path) -> None:
    """A stand-in package named torch is enough: the hook knows only the name."""
    import blackwell

    inside = Path(blackwell.__file__).parent
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    code = (
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('torch') and importlib.util.find_spec('torch')\n"
        "try:\n    import torch\nexcept Exception: pass\n"  # integer_truth itself wants the real torch
        "print('blackwell_nullgpu_integer_truth' in sys.modules)"
    )
    path = os.pathsep.join([str(inside / "nullgpu_hook"), str(tmp_path)])
    env = {**os.environ, "NULLGPU_ON": "1", "PYTHONPATH": path, "BLACKWELL_STARTUP": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
