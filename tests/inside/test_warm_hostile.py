"""`blackwell warm` and `blackwell tune` with wrong words, damaged files and a sudden end: one sentence, nothing touched that isn't theirs."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import blackwell
import pytest

CARD = "NVIDIA GeForce RTX 5090"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(blackwell.__file__).resolve().parents[1])}
ENTRY = {
    "card": CARD, "capability": "12.0", "triton": "3.7.1", "torch": "2.12.1", "kernel": "k", "key": [1],
    "configs": [{"config": {"num_warps": 4}, "ms": 1.0}],
}  # fmt: skip


def call(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "blackwell", *words], env={**ENVIRONMENT, **more}, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip


def warm(cache: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return call("warm", "--cache", str(cache), "--card", CARD, "--json", *words, **more)


def refused(done: subprocess.CompletedProcess[str], says: str) -> None:
    """One sentence on stderr, the same as JSON where that was asked for, and no traceback."""
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr
    assert says in done.stderr, done.stderr
    if done.returncode == 1:
        assert says in json.loads(done.stdout)["error"]


def test_a_cache_of_ones_own_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    """It may lie in /tmp, whose mode is not ours to change."""
    parent = tmp_path / "like-tmp"
    parent.mkdir()
    parent.chmod(0o1777)
    done = warm(parent / "cache", "--no-check", "--", sys.executable, "-c", "print(1)")
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(parent.stat().st_mode) == 0o1777
    assert [path.name for path in parent.iterdir()] == ["cache"]


def test_a_check_looks_at_the_cache_that_is_named(tmp_path: Path) -> None:
    program = ("--", sys.executable, "-c", "import torch; print(torch.ones(3, device='cuda') * 2)")
    refused(warm(tmp_path / "nothing", "--check", *program), "is no warm cache")
    assert not (tmp_path / "nothing").exists()
    cache = tmp_path / "cache"
    assert warm(cache, "--no-check", *program).returncode == 0
    step = ("--", sys.executable, "-m", "blackwell", "step", "--steps", "1")
    refused(warm(cache, "--check", *step), "compiled again")


@pytest.mark.parametrize(
    "words",
    [
        ("--timeout", "0"), ("--timeout", "nan"), ("--timeout", "-1"), ("--jobs", "-1"), ("--jobs", "0"), ("--devices", "0"),
        ("--devices", "17"), ("--cache", ""), ("--bundle", ""),
    ],
    ids=" ".join,
)  # fmt: skip
def test_numbers_that_mean_nothing(words: tuple[str, ...], tmp_path: Path) -> None:
    refused(warm(tmp_path / "cache", *words, "--", "true"), "invalid")
    assert not (tmp_path / "cache").exists()


def test_a_program_without_python_is_called_so(tmp_path: Path) -> None:
    refused(warm(tmp_path / "cache", "--", "true"), "ran no Python that could be watched")


@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 100_000], ids=lambda text: text[:3])
def test_a_damaged_report_is_found_before_the_work(text: str, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "report.json").write_text(text)
    refused(
        warm(tmp_path / "cache", "--", sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"), "is no report"
    )
    assert not (tmp_path / "ran").exists()


def test_a_file_in_the_caches_place(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("mine")
    refused(warm(tmp_path / "cache", "--", "true"), "is no directory")
    assert (tmp_path / "cache").read_text() == "mine"


BROKEN_PROFILES = {
    "no TOML": "name = ",
    "a number for a table": 'name = "X"\nattributes = 3\n',
    "words for numbers": 'name = "X"\n[attributes]\ncompute_capability_major = "12"\n',
    "no limits": f'name = "{CARD}"\nmemory = 1\ndriver = "580"\nmeasured = false\nsource = "x"\n[attributes]\ncompute_capability_major = 12\ncompute_capability_minor = 0\n',
}


@pytest.mark.parametrize("name", BROKEN_PROFILES)
def test_broken_card_profiles(name: str, tmp_path: Path) -> None:
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "mine.toml").write_text(BROKEN_PROFILES[name])
    done = warm(tmp_path / "cache", "--", sys.executable, "-c", "print(1)", BLACKWELL_CARDS=str(tmp_path / "cards"))
    refused(done, "profile")


def test_a_broken_image_json(tmp_path: Path) -> None:
    (tmp_path / "image.json").write_text("{")
    refused(
        call("warm", "--image", "--cache", str(tmp_path / "cache"), "--json", BLACKWELL_ROOT=str(tmp_path)),
        "image.json names no cards",
    )


def broken(**changes: Any) -> str:
    return json.dumps({"format": 1, "entries": [{**ENTRY, **changes}]})


BROKEN_BUNDLES = {
    "no configurations": broken(configs=[]),
    "a time that is none": broken(configs=[{"config": {}, "ms": float("nan")}]),
    "a negative time": broken(configs=[{"config": {}, "ms": -5}]),
    "no capability": broken(capability="abc"),
    "a word for a key": broken(key="abc"),
    "an object for entries": '{"format": 1, "entries": {}}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", BROKEN_BUNDLES)
def test_broken_bundles_are_found_before_the_work(name: str, tmp_path: Path) -> None:
    bundle, out = tmp_path / "bundle.json", tmp_path / "out.json"
    bundle.write_text(BROKEN_BUNDLES[name])
    refused(call("tune", "--merge", str(bundle), "--out", str(out), "--json"), "is no bundle")
    assert not out.exists()
    done = warm(
        tmp_path / "cache", "--bundle", str(bundle), "--", sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"
    )
    refused(done, "is no bundle")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("out", ["missing/out.json", "", "/dev/full", "."])
def test_a_place_that_tune_cannot_write_to(out: str, tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    good.write_text(json.dumps({"format": 1, "entries": [ENTRY]}))
    place = str(tmp_path / out) if out == "missing/out.json" else out
    refused(call("tune", "--merge", str(good), "--out", place, "--json"), "with --out FILE")


def test_merging_into_one_of_the_merged_on_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no right to mount here")
    try:
        mine, other = small / "a.json", tmp_path / "b.json"
        mine.write_text(json.dumps({"format": 1, "entries": [{**ENTRY, "kernel": f"k{i}"} for i in range(100)]}))
        other.write_text(json.dumps({"format": 1, "entries": [{**ENTRY, "kernel": f"other{i}"} for i in range(300)]}))
        before = mine.read_bytes()
        refused(call("tune", "--merge", str(mine), str(other), "--out", str(mine), "--json"), "is untouched")
        assert mine.read_bytes() == before and [path.name for path in small.iterdir()] == ["a.json"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_bundle_whose_configurations_were_all_refused_is_still_json(tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    good.write_text(json.dumps({"format": 1, "entries": [{**ENTRY, "configs": [{"config": {}, "ms": None}]}]}))
    done = call("tune", "--merge", str(good), "--out", str(tmp_path / "out.json"), "--json")
    assert done.returncode == 0, done.stderr

    def no_constant(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(done.stdout, parse_constant=no_constant)["entries"][0]["ms"] is None


def test_the_program_ends_with_a_warming_that_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(300)"
    process = subprocess.Popen(
        [sys.executable, "-m", "blackwell", "warm", "--cache", str(tmp_path / "cache"), "--card", CARD, "--", sys.executable, "-c", code],
        env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (pid.exists() and pid.read_text()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 10
    while (
        Path(f"/proc/{pid.read_text()}").exists()
        and "Z" not in Path(f"/proc/{pid.read_text()}/stat").read_text().rpartition(")")[2][:3]
    ):
        assert time.monotonic() < deadline, "the program outlived its warming"
        time.sleep(0.1)
