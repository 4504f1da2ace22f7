"""Shared by the null GPU's tests: the built libraries, and programs run under them."""

import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
from blackwell import nullgpu, paths

HERE = Path(__file__).resolve().parent
BUILD = Path(nullgpu.__file__).resolve().parents[1] / "nullgpu" / "build.py"
needs_compiler = pytest.mark.skipif(
    not os.environ.get("BLACKWELL_NULLGPU_LIB") and not paths.nullgpu_lib().is_dir() and not shutil.which("gcc"),
    reason="no built null GPU libraries and no gcc to build them",
)


@functools.cache
def built_library() -> Path:
    """The image's libraries, or ones built once for this run."""
    if os.environ.get("BLACKWELL_NULLGPU_LIB") or paths.nullgpu_lib().is_dir():
        return paths.nullgpu_lib().resolve()
    out = Path(tempfile.mkdtemp(prefix="nullgpu-lib-"))
    site = sysconfig.get_paths()["purelib"]
    done = subprocess.run(
        [sys.executable, BUILD, "--site", site, "--out", out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out


def run_under(card: str, argv: list[str], count: int = 1, seconds: int = 600, **extra: str) -> str:
    """Run Python with `argv` under the null GPU; returns stdout and stderr together. The exit code is the caller's business (see warm.md)."""
    os.environ["BLACKWELL_NULLGPU_LIB"] = str(built_library())
    beside = os.environ.get("BLACKWELL_NULLGPU_BESIDE_DRIVER") == "1"
    words, variables = nullgpu.command([sys.executable, *argv], card, count, beside_driver=beside)
    done = subprocess.run(
        words,
        env={**variables, **extra},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=seconds,
    )
    return done.stdout


@functools.cache
def section_results() -> dict[str, tuple[bool, str]]:
    """Every section of nullgpu_sections.py, run once in forks of one process on two null B200s."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "results.json"
        said = run_under("NVIDIA B200", [str(HERE / "nullgpu_sections.py"), str(out)], count=2, seconds=3000)
        assert out.is_file(), said
        results: dict[str, tuple[bool, str]] = json.loads(out.read_text())
    return results
