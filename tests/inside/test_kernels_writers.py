"""Writers that are killed, run out of disk, or are eight at once: nothing is lost, half-written or left damaged."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from blackwell.kernels import entries, seal, sums
from blackwell.kernels.damage import verify_cache
from blackwell.kernels.repair import repair

pytest.importorskip("triton")
KERNELS = 4

WRITER = """
import json, os, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def scale(x, n, factor: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)

hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
print("ready", flush=True)
if len(sys.argv) > 2:
    sys.stdin.readline()
for number in range(int(sys.argv[1])):
    signature = {"x": "*fp32", "n": "i32", "factor": "constexpr", "B": "constexpr"}
    source = ASTSource(scale, signature, {"factor": float(number), "B": 64})
    triton.compile(source, target=GPUTarget("cuda", 120, 32))
    print(number, flush=True)
print(json.dumps({"hits": sum(hits), "misses": len(hits) - sum(hits)}), flush=True)
os._exit(0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "writer.py"
    path.write_text(WRITER)
    return path


def start(script: Path, cache: Path, *more: str, **options: Any) -> "subprocess.Popen[str]":
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache / "triton"), "BLACKWELL_STARTUP": "0"}
    command = [sys.executable, str(script), str(KERNELS), *more]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options)


def finish(script: Path, cache: Path) -> dict[str, int]:
    """Run the writer to its end; its hits and misses."""
    writer = start(script, cache)
    out, err = writer.communicate(timeout=200)
    assert writer.returncode == 0, err[-2000:]
    counts: dict[str, int] = json.loads(out.splitlines()[-1])
    return counts


def assert_whole(script: Path, cache: Path) -> None:
    """After verify and repair: no damage, and a full run brings the cache to where an undisturbed one would be."""
    repair(cache)
    assert verify_cache(cache) == []
    finish(script, cache)
    assert finish(script, cache) == {"hits": KERNELS, "misses": 0}
    assert verify_cache(cache) == []
    assert len(list(entries.kernels(cache))) == KERNELS


def test_killed_while_writing(script: Path, tmp_path: Path) -> None:
    """SIGKILL at several moments of several compiles; the damage left behind is found and repaired."""
    cache = tmp_path / "cache"
    for delay_s in (0.0, 0.03, 0.06, 0.1):
        writer = start(script, cache, "wait")
        assert writer.stdout is not None and writer.stdin is not None
        assert writer.stdout.readline() == "ready\n"
        writer.stdin.write("go\n")
        writer.stdin.flush()
        while not any(cache.glob("triton/*/*")) and writer.poll() is None:
            time.sleep(0.001)  # until the first file is there
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=60)
        assert writer.returncode == -signal.SIGKILL
        sound = {kernel.entry for kernel in entries.kernels(cache)}
        removed = {item.entry for item in repair(cache)}
        assert not sound & removed, "a sound kernel was removed"
    assert_whole(script, cache)


def test_half_an_entry_is_found(script: Path, tmp_path: Path) -> None:
    """The states a killed writer leaves, made by hand, for every point between two of Triton's writes."""
    cache = tmp_path / "cache"
    finish(script, cache)
    group = min(cache.glob("triton/*/__grp__*.json"))
    order = ["source", "ttir", "ttgir", "llir", "ptx", "cubin", "json"]
    files = {suffix: (group.parent / f"scale.{suffix}").read_bytes() for suffix in order}
    for written in range(len(order)):
        for path in group.parent.iterdir():
            path.unlink()
        for suffix in order[:written]:
            (group.parent / f"scale.{suffix}").write_bytes(files[suffix])
        temporary = group.parent / "tmp.pid_1_half"
        temporary.mkdir()
        (temporary / f"scale.{order[written]}").write_bytes(files[order[written]][:10])
        assert verify_cache(cache), f"nothing found after {written} writes"
        repair(cache)
        assert verify_cache(cache) == []
        group.parent.mkdir(exist_ok=True)
    group.parent.rmdir()
    assert_whole(script, cache)


def test_disk_full_while_writing(script: Path, tmp_path: Path) -> None:
    """No file may grow past 4 KiB (as on a full disk, the write fails in the middle): an error, not a bad entry."""
    cache = tmp_path / "cache"

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    writer = start(script, cache, preexec_fn=limit)
    _, err = writer.communicate(timeout=200)
    assert writer.returncode != 0
    assert "OSError" in err or "PTXASError" in err or "ptxas" in err, err[-2000:]
    assert list(entries.kernels(cache)) == []
    assert verify_cache(cache), "the unfinished entry is reported"
    assert_whole(script, cache)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_disk_really_full(script: Path, tmp_path: Path) -> None:
    """A tmpfs of 100 KiB, filled by compiling: what is complete stays, the rest is found."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        cache = mount / "cache"
        writer = start(script, cache)
        _, err = writer.communicate(timeout=200)
        assert writer.returncode != 0 and "No space left on device" in err, err[-2000:]
        sound = {kernel.entry for kernel in entries.kernels(cache)}
        assert verify_cache(cache)
        removed = {item.entry for item in repair(cache)}
        assert not sound & removed
        assert verify_cache(cache) == []
        assert {kernel.entry for kernel in entries.kernels(cache)} == sound
        subprocess.run(["mount", "-o", "remount,size=10m", str(mount)], check=True)
        assert_whole(script, cache)
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_disk_full_while_sealing(script: Path, tmp_path: Path) -> None:
    """The old list stays or none is there; never half a list."""
    cache = tmp_path / "cache"
    finish(script, cache)
    sums.write_list(cache, {"a": "0" * 64})
    before = (cache / sums.LIST).read_bytes()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            sums.write_list(cache, {f"file{n}": "0" * 64 for n in range(100)})
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert (cache / sums.LIST).read_bytes() == before
    assert not list(cache.glob(f".{sums.LIST}*"))


def test_eight_writers_on_one_directory(script: Path, tmp_path: Path) -> None:
    """All compile the same kernels at once; the result is whole, sealed, and hit by a ninth."""
    cache = tmp_path / "cache"
    writers = [start(script, cache, "wait") for _ in range(8)]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, err = writer.communicate(timeout=200)
        assert writer.returncode == 0, err[-2000:]
    assert verify_cache(cache) == []
    assert len(list(entries.kernels(cache))) == KERNELS
    seal(cache, {"capabilities": ["12.0"]})
    assert verify_cache(cache) == []
    assert finish(script, cache) == {"hits": KERNELS, "misses": 0}
    assert verify_cache(cache) == []
