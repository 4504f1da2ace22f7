"""What torch does with a damaged Inductor cache, tried on a real one; the other half of test_kernels_damage.py.

Seen on torch 2.12.1 (2.11.0 the same as far as tried): a damaged or missing graph or autograd entry recompiles silently;
a damaged generated .py or shared object raises on every run until it is removed.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from blackwell.kernels.damage import verify_cache

SCRIPT = Path(__file__).with_name("kernels_damage_inductor.py")
EXPECTED = {"fxgraph-empty": "graph missed", "code-empty": "raises", "library-empty": "raises"}


@pytest.mark.slow
def test_damaged_inductor_entries(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler for the CPU kernels")
    environment = {**os.environ, "BLACKWELL_STARTUP": "0"}
    command = [sys.executable, str(SCRIPT), str(tmp_path), *EXPECTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)["results"]
    assert set(results) == set(EXPECTED)
    assert verify_cache(tmp_path / "pristine") == []
    for name, words in EXPECTED.items():
        assert words in results[name]["first"], f"{name}: {results[name]['first']}"
        assert [d.path for d in verify_cache(tmp_path / name)] == [results[name]["path"]]
