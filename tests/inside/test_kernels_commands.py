"""seal, list, verify, repair, relocate and explain on a small real Triton cache."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blackwell import cli, kernels, overlay
from blackwell.kernels import entries, explain, sealing, sums
from blackwell.kernels.damage import inductor_hash, verify_cache
from blackwell.kernels.repair import relocate, repair

pytest.importorskip("triton")

JOB = """
import json, os, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def scale(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2.0, mask=i < n)

@triton.jit
def shift(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 2.0, mask=i < n)

hits = {}
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: hits.__setitem__(src.name, cache_hit)
for kernel in (scale, shift):
    source = ASTSource(kernel, {"x": "*fp32", "n": "i32", "B": "constexpr"}, {"B": 64})
    triton.compile(source, target=GPUTarget("cuda", 120, 32))
print(json.dumps(hits), flush=True)
os._exit(0)
"""
CARD = explain.Card(name="NVIDIA RTX PRO 6000", capability="12.0")
FACTS = {"capabilities": ["12.0"], "cards": [CARD.name]}


def run_job(job: Path, cache: Path, **more: str) -> dict[str, bool]:
    """Run the job on a cache; kernel name -> hit."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache / "triton"), "BLACKWELL_STARTUP": "0", **more}
    done = subprocess.run([sys.executable, str(job)], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    hits: dict[str, bool] = json.loads(done.stdout)
    return hits


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(job script, its cache, with an Inductor graph and code file beside the kernels), not sealed."""
    root = tmp_path_factory.mktemp("warmed")
    job, cache = root / "job.py", root / "cache"
    job.write_text(JOB)
    assert run_job(job, cache) == {"scale": False, "shift": False}
    graph, code = b"\x80\x04N.", b"import torch"
    for path, content in (
        (f"inductor/fxgraph/ab/fab/{inductor_hash(graph)}", graph),
        (f"inductor/aotautograd/aab/{inductor_hash(graph)}", graph),
        (f"inductor/cd/c{inductor_hash(code)}.py", code),
        ("inductor/cd/0123.best_config", b'{"num_warps": 4}'),
    ):
        (cache / path).parent.mkdir(parents=True, exist_ok=True)
        (cache / path).write_bytes(content)
    return job, cache


@pytest.fixture
def cache(warmed: tuple[Path, Path]) -> Any:
    """The warmed cache at the place it was built, sealed; put back as it was afterwards."""
    _, built = warmed
    kept = built.with_name("kept")
    shutil.copytree(built, kept)
    kernels.seal(built, FACTS)
    yield built
    shutil.rmtree(built)
    kept.rename(built)


def test_seal_makes_it_complete_and_readable_for_everybody(cache: Path) -> None:
    listed = sums.read_list(cache)
    assert listed is not None and set(listed) == set(sums.listed_files(cache)) and "keys.json" in listed
    done = subprocess.run(["sha256sum", "--check", "--quiet", sums.LIST], cwd=cache, capture_output=True, text=True)
    assert done.returncode == 0, "the list is one that sha256sum reads"
    modes = {(p.is_dir(), stat.S_IMODE(p.stat().st_mode)) for p in [cache, *cache.rglob("*")]}
    assert modes == {(True, 0o755), (False, 0o644)}
    assert verify_cache(cache) == []


def test_seal_cleans_leftovers_and_refuses_damage(warmed: tuple[Path, Path], tmp_path: Path) -> None:
    _, built = warmed
    left = [built / "triton/EMPTY", built / "inductor/locks/a.lock", built / "inductor/cd/.12.34.tmp"]
    left[0].mkdir()
    left[1].parent.mkdir()
    left[1].write_text("")
    left[2].write_text("half")
    kernels.seal(built, FACTS)
    assert not any(path.exists() for path in left)
    for name in (sums.LIST, sealing.KEYS):
        (built / name).unlink()
    (built / "inductor/locks").rmdir()
    copy = shutil.copytree(built, tmp_path / "copy")
    relocate(copy, str(built), str(copy))
    next(copy.glob("triton/*/scale.cubin")).write_bytes(b"")
    with pytest.raises(ValueError, match=r"scale\.cubin is empty"):
        kernels.seal(copy, FACTS)
    assert not (copy / sums.LIST).exists()


@pytest.mark.parametrize(
    ("pattern", "recompiles"),
    [
        ("inductor/fxgraph/*/*/*", "Inductor graph"),
        ("inductor/aotautograd/*/*", "Inductor graph"),
        ("inductor/cd/*.py", "Inductor code"),
        ("inductor/cd/*.best_config", "autotuning"),
    ],
)
@pytest.mark.parametrize("how", ["empty", "truncated", "garbage", "missing"])
def test_inductor_damage(cache: Path, pattern: str, recompiles: str, how: str) -> None:
    """Every kind is found in the file itself (but for a missing one), found by the list, and removed alone."""
    (path,) = cache.glob(pattern)
    content = path.read_bytes()
    changed = {"empty": b"", "truncated": content[: len(content) // 2], "garbage": bytes(255 - b for b in content)}
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(changed[how])
    relative = str(path.relative_to(cache))
    assert [d.path for d in verify_cache(cache)] == [relative]
    listed = cache / sums.LIST
    kept = listed.read_bytes()
    listed.unlink()
    assert [d.path for d in verify_cache(cache)] == ([] if how == "missing" else [relative])
    listed.write_bytes(kept)
    removed = repair(cache)
    assert [item.entry for item in removed] == [relative]
    assert removed[0].recompiles.startswith(recompiles)
    assert verify_cache(cache) == []
    assert len(list(entries.kernels(cache))) == 2


def test_relocate_makes_a_copy_hit(warmed: tuple[Path, Path], cache: Path, tmp_path: Path) -> None:
    job, _ = warmed
    away = cache.with_name("away")
    cache.rename(away)  # a group file's old paths must not be there, or the copy hits through them
    try:
        copy = shutil.copytree(away, tmp_path / "elsewhere")
        untouched = shutil.copytree(away, tmp_path / "untouched")
        assert {d.kind for d in verify_cache(copy)} == {"relocated"}
        assert run_job(job, untouched) == {"scale": False, "shift": False}, "without relocate it recompiles silently"
        changed = relocate(copy, str(cache), str(copy))
        assert {Path(name).name for name in changed} == {"__grp__scale.json", "__grp__shift.json", "keys.json"}
        assert relocate(copy, str(cache), str(copy)) == [], "a second run has nothing left to do"
        assert verify_cache(copy) == []
        assert run_job(job, copy) == {"scale": True, "shift": True}
        assert verify_cache(copy) == []
    finally:
        away.rename(cache)


def test_relocate_does_not_bless_damage(cache: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(cache, tmp_path / "elsewhere")
    group = next(copy.glob("triton/*/__grp__scale.json"))
    group.write_text(group.read_text() + " ")
    relocate(copy, str(cache), str(copy))
    assert [(d.path, d.kind) for d in verify_cache(copy)] == [(str(group.relative_to(copy)), "corrupt")]


def test_overlay_verifies_and_repairs_without_touching_the_baked_cache(
    warmed: tuple[Path, Path], cache: Path, tmp_path: Path
) -> None:
    job, _ = warmed
    environment = {
        "BLACKWELL_CACHE": str(cache),
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "BLACKWELL_OVERLAY": str(tmp_path / "overlay"),
    }
    place = overlay.apply(environment)
    assert place is not None
    assert verify_cache(place) == []
    assert run_job(job, Path(place)) == {"scale": True, "shift": True}
    link = next(Path(place).glob("triton/*/scale.cubin"))
    link.unlink()
    link.write_bytes(b"half")
    assert [d.kind for d in verify_cache(place)] == ["corrupt"]
    repair(Path(place))
    assert run_job(job, Path(place)) == {"scale": False, "shift": True}
    assert verify_cache(cache) == []


def reasons(cache: Path, kernel: str = "scale", card: explain.Card = CARD, **environment: str) -> str:
    """What explain says, in one text; the job looks at the right place unless `environment` says otherwise."""
    right = {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    return "\n".join(explain.explain(cache, kernel, card, {**right, **environment})["reasons"])


def test_explain_finds_nothing_when_nothing_differs(cache: Path) -> None:
    answer = explain.explain(
        cache, "scale", CARD, {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    )
    assert answer["differences"] == [] and answer["found"] is True
    assert "the launch itself" in answer["reasons"][0]


def test_explain_names_an_environment_variable(
    warmed: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of Triton's cache-invalidating list; that it really misses is tried on a copy."""
    job, _ = warmed
    name = "DISABLE_LLVM_OPT"
    copy = shutil.copytree(cache, tmp_path / "copy")
    relocate(copy, str(cache), str(copy))
    assert run_job(job, copy, **{name: "1"}) == {"scale": False, "shift": False}
    monkeypatch.setenv(name, "1")
    assert f"environment variable {name} differs: warmed with (not set), now" in reasons(cache)


def test_explain_names_the_assembler(cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.1, V99.1.1'\n")
    other.chmod(0o755)
    text = reasons(cache, TRITON_PTXAS_BLACKWELL_PATH=str(other))
    assert "assembler ptxas-blackwell differs" in text and "release 99.1" in text


def test_explain_names_target_device_place_and_forcing(cache: Path, tmp_path: Path) -> None:
    assert "GPU target differs: warmed with 12.0, now 10.0" in reasons(cache, card=explain.Card(capability="10.0"))
    card = explain.Card(name="NVIDIA GeForce RTX 5090", capability="12.0")
    assert "device name differs: warmed with NVIDIA RTX PRO 6000, now NVIDIA GeForce RTX 5090" in reasons(
        cache, card=card
    )
    assert "TRITON_CACHE_DIR differs" in reasons(cache, TRITON_CACHE_DIR="/tmp/mine")
    assert "TRITON_ALWAYS_COMPILE" in reasons(cache, TRITON_ALWAYS_COMPILE="1")
    copy = shutil.copytree(cache, tmp_path / "copy")
    assert f"blackwell kernels relocate {cache} {copy}" in reasons(copy)


def test_explain_names_another_triton(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "triton_checksum", lambda: "another")
    assert "Triton's own files differs" in reasons(cache)


def test_explain_names_changed_source(warmed: tuple[Path, Path], cache: Path) -> None:
    job, _ = warmed
    text = job.read_text()
    try:
        job.write_text(text.replace("* 2.0", "* 3.0"))
        assert f"source of scale in {job} has changed since" in reasons(cache)
        assert "has changed" not in reasons(cache, "shift")
        job.write_text("")
        assert "no longer in" in reasons(cache)
    finally:
        job.write_text(text)


def test_explain_names_missing_damaged_and_unknown(cache: Path) -> None:
    assert "no entry named scael: no warmed workload launches it; near: scale" in reasons(cache, "scael")
    shutil.rmtree(next(cache.glob("triton/*/shift.cubin")).parent)
    assert "missing" in reasons(cache, "shift") or "no longer there" in reasons(cache, "shift")
    repair(cache)
    assert "was warmed, but is no longer there" in reasons(cache, "shift")
    next(cache.glob("triton/*/scale.cubin")).write_bytes(b"")
    assert "scale.cubin is empty" in reasons(cache)


def test_explain_needs_a_sealed_cache(warmed: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="not sealed"):
        explain.explain(warmed[1], "scale", CARD, {})


def test_commands(cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit codes and JSON of every action, as doctor and the tests of the image use them."""
    monkeypatch.setenv("BLACKWELL_CACHE", str(cache))

    def answer(*words: str) -> tuple[int, Any]:
        code = cli.main(["kernels", *words, "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, listing = answer("list")
    assert code == 0 and [k["name"] for k in listing["triton"]].count("scale") == 1
    assert {e["kind"] for e in listing["inductor"]} == {"fxgraph", "aotautograd", "code", "autotune"}
    assert answer("verify") == (0, {"cache": str(cache), "sealed": True, "damages": []})
    next(cache.glob("triton/*/scale.cubin")).write_bytes(b"")
    code, damaged = answer("verify")
    assert code == 1 and [d["kind"] for d in damaged["damages"]] == ["empty"]
    code, repaired = answer("repair")
    assert code == 0 and [r["recompiles"] for r in repaired["removed"]] == ["kernel scale"]
    assert answer("verify")[0] == 0
    code, why = answer("explain", "scale", "--card", str(CARD.name), "--capability", "12.0")
    assert code == 1 and why["found"] is False
    assert answer("relocate", str(cache), str(cache)) == (0, {"cache": str(cache), "changed": []})
    for words in (["list"], ["verify"], ["repair"]):
        assert cli.main(["kernels", *words]) == 0
    assert "shift" in capsys.readouterr().out


def test_no_cache_is_said_plainly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLACKWELL_CACHE", raising=False)
    assert cli.main(["kernels", "verify"]) == 2
    assert "--cache" in capsys.readouterr().err
    assert cli.main(["kernels", "verify", "--cache", "/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().err


def test_repair_where_directories_cannot_be_renamed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the lower layer of a container's overlay file system: EXDEV for a directory, while files can be renamed."""
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.is_dir():
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    damaged = next(cache.glob("triton/*/scale.cubin"))
    damaged.write_bytes(b"half")
    (removed,) = repair(cache)
    assert removed.entry == f"triton/{damaged.parent.name}" and removed.recompiles == "kernel scale"
    assert not damaged.parent.exists() and next(cache.glob("triton/*/shift.cubin")).exists()
    assert verify_cache(cache) == [] and not list(cache.glob(".trash*"))


def test_list_says_signatures_and_that_nothing_has_the_name(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in cache.glob("triton/*/*.ttir"):  # an image has none
        path.unlink()
    assert {kernel.signature for kernel in entries.kernels(cache)} == {("*f32", "i32")}
    assert cli.main(["kernels", "list", "nosuch", "--cache", str(cache)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "no warm kernel's name contains 'nosuch'" in said.err
