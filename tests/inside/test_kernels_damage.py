"""Every kind of damage on every kind of file of a real Triton cache: what Triton does, what `verify` sees, and what
`repair` leaves. The trials run in kernels_damage.py; run this file with -s to see the table.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from blackwell.kernels import entries, sums
from blackwell.kernels.damage import verify_cache
from blackwell.kernels.repair import repair

SCRIPT = Path(__file__).with_name("kernels_damage.py")
EXTRA = [path for path in os.environ.get("BLACKWELL_EXTRA_TRITONS", "").split(":") if path]

ONLY_IN_LIST = {"autotune-foreign"}
"""Damage that can't be seen in the file itself: the timings of another kernel with the same configs."""


@functools.cache
def tried(tree: str) -> tuple[Path, dict[str, Any]]:
    """Run all trials with one Triton; the directory of damaged copies and the answers."""
    work = Path(tempfile.mkdtemp(prefix="damage-"))
    environment = {**os.environ, "PYTHONPATH": tree, "BLACKWELL_STARTUP": "0"}
    for name in ("TRITON_CACHE_DIR", "TRITON_CACHE_AUTOTUNING"):
        environment.pop(name, None)
    command = [sys.executable, str(SCRIPT), str(work)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return work, answer


@pytest.fixture(scope="module", params=["", *EXTRA], ids=lambda path: Path(path).name or "installed")
def trials(request: pytest.FixtureRequest) -> Any:
    if not request.param:
        pytest.importorskip("triton")
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("needs a C compiler for the modules that are damaged")
    work, answer = tried(request.param)
    yield work, answer
    shutil.rmtree(work, ignore_errors=True)
    tried.cache_clear()


def test_table(trials: Any) -> None:
    """Prints the table; holds what issue 3 and the traps list rely on."""
    _, answer = trials
    results = answer["results"]
    for name, result in results.items():
        print(f"{answer['triton']:8}{name:22}{result['first']:40}{result['second']}")
    assert results["cubin-empty"]["first"].startswith("loads rubbish")
    assert results["group-relocated"]["first"] == "recompiles"
    assert results["autotune-truncated"]["first"].startswith("raises")
    assert results["module-missing"]["first"] == "recompiles"


def test_sound_cache_has_no_damage(trials: Any) -> None:
    work, _ = trials
    live = shutil.copytree(work / "pristine", work / "sound")
    group = next(live.glob("triton/*/__grp__*.json"))
    assert {d.kind for d in verify_cache(live)} == {"relocated"}, "a copy is out of place, and nothing else"
    assert str(live) not in group.read_text()
    assert verify_cache(work / "live") == []


def test_every_damage_is_found_with_a_list(trials: Any) -> None:
    work, answer = trials
    pristine = work / "pristine"
    listed = {name: sums.file_sum(pristine / name) for name in sums.listed_files(pristine)}
    for name, result in answer["results"].items():
        copy = work / name
        sums.write_list(copy, listed)
        # These copies lie elsewhere than where they were built, so all their group files are out of place as well.
        found = {d.path for d in verify_cache(copy) if d.kind != "relocated" or name == "group-relocated"}
        (copy / sums.LIST).unlink()
        assert result["path"] in found, f"{name} was not found"


def test_structure_and_repair(trials: Any) -> None:
    """At the place the cache was built, so that nothing else is wrong: every harm is seen without a list; repaired, the
    cache is sound, the next run has what it needs to recompile, and every other entry is untouched.
    """
    work, answer = trials
    live, pristine = work / "live", work / "pristine"
    listed = {name: sums.file_sum(pristine / name) for name in sums.listed_files(pristine)}
    blind = set()
    for name, result in answer["results"].items():
        shutil.rmtree(live)
        shutil.copytree(work / name, live)
        # An autotune file or C module that is gone leaves no trace; without a list nobody can know it was there.
        invisible = name in ("autotune-missing", "module-missing")
        if result["first"] != "hit" and not verify_cache(live) and not invisible:
            blind.add(name)
        sums.write_list(live, listed)
        removed = repair(live)
        assert verify_cache(live) == [], name
        gone = {item.entry for item in removed}
        assert gone and gone <= {str(Path(result["path"]).parent), result["path"]}, name
        assert any(item.recompiles for item in removed)
        (live / sums.LIST).unlink()
        left = {file: sums.file_sum(live / file) for file in sums.listed_files(live)}
        kept = {f: s for f, s in listed.items() if f not in gone and str(Path(f).parent) not in gone}
        assert left == kept, name
    assert blind <= ONLY_IN_LIST
    shutil.rmtree(live)
    shutil.copytree(pristine, live)


def test_list_tells_what_is_warm(trials: Any) -> None:
    work, _ = trials
    kernels = {kernel.name: kernel for kernel in entries.kernels(work / "pristine")}
    scale = kernels["scale"]
    assert (scale.capability, scale.num_warps, scale.backend) == ("12.0", 4, "cuda")
    assert scale.signature == ("*f32", "i32")
    assert scale.cubin_bytes == next((work / "pristine").glob("triton/*/scale.cubin")).stat().st_size
    assert scale.registers is not None and scale.registers > 0 and scale.spills == 0
