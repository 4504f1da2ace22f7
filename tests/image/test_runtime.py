"""A job in a container of the image: any user, a read-only root, no HOME; its own kernel; pip; signals; many ranks."""

import base64
import hashlib
import json
import shutil
import subprocess
import time
import uuid
import zipfile
from pathlib import Path
from typing import Any

import pytest

from builder.engine import docker
from tests.image.conftest import BuiltImage, RunIn

SETTINGS: dict[str, dict[str, Any]] = {
    "root": {},
    "random user": {"user": "12345:0"},
    "read-only root": {"user": "12345:0", "read_only": True, "tmpfs": ["/tmp:exec"]},
    "no home": {"user": "12345:0"},
}
# Fails for whatever a user without a name, a home or a writable root breaks. torch's Inductor asks for the user's name
# at import; where that raises, `import fla` raises with it, and transformers silently takes plain torch.
JOB = """
import tempfile, torch, triton
import torch._inductor.codecache
import fla.ops.gated_delta_rule
tempfile.TemporaryFile()
print('ready')
"""


@pytest.mark.parametrize("setting", SETTINGS)
def test_job_starts(image: BuiltImage, run_in: RunIn, tmp_path: Path, setting: str) -> None:
    words = ["env", "-u", "HOME"] if setting == "no home" else []
    script = job(tmp_path, "train.py", JOB)
    mounts = [f"{tmp_path}:/job:ro"]
    done = run_in(image.reference, *words, "python", script, mounts=mounts, timeout=300, **SETTINGS[setting])
    assert done.stdout.splitlines()[-1:] == ["ready"], done.stderr


def job(directory: Path, name: str, text: str) -> str:
    """Write a script that any user may read; its path in the container."""
    directory.chmod(0o755)
    (directory / name).write_text(text)
    (directory / name).chmod(0o644)
    return f"/job/{name}"


# ---- a kernel of the user's own

KERNEL = """
import json, torch, triton, triton.language as tl
hits = []
triton.knobs.compilation.listener = lambda **event: hits.append(bool(event["cache_hit"]))

@triton.jit
def triple_and_add(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 3 * tl.load(x + at, mask=at < n) + 7, mask=at < n)

x = torch.zeros(1000, device="cuda")
triple_and_add[(8,)](x, torch.empty_like(x), 1000, BLOCK=128)
print(json.dumps(hits), flush=True)
"""
# Twice as a process of its own, then what became of the baked cache.
TWICE = """
import hashlib, os, subprocess, sys
from blackwell import nullgpu, paths
from pathlib import Path
def state():
    baked = sorted(Path(os.environ["BLACKWELL_CACHE"]).rglob("*"))
    return hashlib.sha256(repr([(str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in baked]).encode()).hexdigest()
before = state()
for turn in range(2):
    words, variables = nullgpu.command([sys.executable, "/job/kernel.py"], sys.argv[1])
    subprocess.run(words, env=variables, check=True, timeout=200)
print("untouched" if state() == before else "touched")
"""


@pytest.mark.parametrize("setting", ["root", "read-only root"])
def test_new_kernel_compiles_once_beside_the_baked_ones(
    image: BuiltImage, run_in: RunIn, tmp_path: Path, setting: str
) -> None:
    job(tmp_path, "kernel.py", KERNEL)
    twice = job(tmp_path, "twice.py", TWICE)
    card = image.facts["cards"][0]
    done = run_in(
        image.reference, "python", twice, card, mounts=[f"{tmp_path}:/job:ro"], timeout=300, **SETTINGS[setting]
    )
    assert done.stdout.splitlines() == ["[false]", "[true]", "untouched"], done.stderr


# ---- pip


def wheel(directory: Path, name: str, version: str, requires: str = "") -> None:
    """A real, empty distribution."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{path},{checksum(text)},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def checksum(text: str) -> str:
    """As a wheel's RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


PIP = "python -m pip --disable-pip-version-check install --quiet --no-index --find-links /job"
OTHER = "2.9.0"


@pytest.mark.parametrize("what", [f"torch=={OTHER}", f"--force-reinstall torch=={OTHER}", "wants-other-torch"])
def test_pip_does_not_replace_torch(image: BuiltImage, run_in: RunIn, tmp_path: Path, what: str) -> None:
    tmp_path.chmod(0o755)
    wheel(tmp_path, "torch", OTHER)
    wheel(tmp_path, "wants-other-torch", "1.0", f"torch=={OTHER}")
    done = run_in(
        image.reference,
        "sh",
        "-c",
        f"{PIP} {what}; python -c 'import torch; print(torch.__version__)'",
        mounts=[f"{tmp_path}:/job:ro"],
    )
    assert done.stdout.strip().partition("+")[0] == image.facts["versions"]["torch"], done.stderr
    assert "onflict" in done.stderr or "constraint" in done.stderr, "pip must say why"


def test_pip_adds_what_fits_and_keeps_the_pins(image: BuiltImage, run_in: RunIn, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    wheel(tmp_path, "torch", "99.0")
    wheel(tmp_path, "wants-any-torch", "1.0", "torch")
    versions = "import importlib.metadata as m; print(m.version('wants-any-torch'), m.version('torch'))"
    script = f'{PIP} --upgrade wants-any-torch && python -c "{versions}"'
    done = run_in(image.reference, "sh", "-c", script, mounts=[f"{tmp_path}:/job:ro"])
    assert done.returncode == 0, done.stderr
    added, torch = done.stdout.split()
    assert (added, torch.partition("+")[0]) == ("1.0", image.facts["versions"]["torch"])


def test_forced_torch_is_reported_by_doctor(image: BuiltImage, run_in: RunIn, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    wheel(tmp_path, "torch", OTHER)
    script = f"env -u PIP_CONSTRAINT {PIP} --no-deps torch=={OTHER} && blackwell doctor --no-gpu --json"
    done = run_in(image.reference, "sh", "-c", script, mounts=[f"{tmp_path}:/job:ro"])
    assert done.returncode == 1, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["checks"]}
    assert rows["distributions"]["verdict"] == "fail"
    assert f"torch is {OTHER}, locked {image.facts['versions']['torch']}" in rows["distributions"]["saw"]


# ---- entrypoint

SIGTERM = """
import signal, sys, time
def stop(number, frame):
    print('saved', flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print('working', flush=True)
time.sleep(120)
"""


def test_stop_reaches_the_job(image: BuiltImage, engine: docker.Engine) -> None:
    """The job is process 1 (the entrypoint execs), so its own handler runs at once."""
    client, name = str(engine.client), f"blackwell-test-{uuid.uuid4().hex[:12]}"
    words = [client, "run", "-d", "--name", name, image.reference, "python", "-c", SIGTERM]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    try:
        for _ in range(300):
            if "working" in logs(client, name):
                break
            time.sleep(0.1)
        begin = time.monotonic()
        subprocess.run([client, "stop", "-t", "60", name], check=True, capture_output=True, timeout=90)
        assert time.monotonic() - begin < 20
        assert logs(client, name).split() == ["working", "saved"]
        code = subprocess.run([client, "inspect", "-f", "{{.State.ExitCode}}", name], capture_output=True, text=True)
        assert code.stdout.strip() == "7"
    finally:
        subprocess.run([client, "rm", "-f", name], capture_output=True, check=False)


def logs(client: str, name: str) -> str:
    """All output of a container so far."""
    done = subprocess.run([client, "logs", name], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout + done.stderr


def test_silent_without_a_terminal(image: BuiltImage, run_in: RunIn) -> None:
    done = run_in(image.reference, "sh", "-c", "echo only this; exit 5")
    assert (done.returncode, done.stdout, done.stderr) == (5, "only this\n", "")


def on_terminal(engine: docker.Engine, reference: str, *words: str, options: tuple[str, ...] = ()) -> str:
    """What a person would see: `script` gives `docker run -it` a terminal."""
    if shutil.which("script") is None:
        pytest.skip("no `script` on this host to make a terminal with")
    command = " ".join([str(engine.client), "run", "--rm", "-it", *options, reference, *words])
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        input="exit\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.replace("\r", "")


def test_three_lines_on_a_terminal_and_the_job_runs_though_there_is_no_gpu(
    image: BuiltImage, engine: docker.Engine
) -> None:
    seen = on_terminal(engine, image.reference, "echo", "job-runs").splitlines()
    lines = [line for line in seen if line.strip() and line != "exit"]
    assert image.facts["id"] in lines[0]
    assert f"torch {image.facts['versions']['torch']}" in lines[1]
    assert "doctor: " in lines[2]
    assert lines[3:] == ["job-runs"]


def test_lines_can_be_switched_off(image: BuiltImage, engine: docker.Engine) -> None:
    seen = on_terminal(engine, image.reference, "echo", "job-runs", options=("-e", "BLACKWELL_BANNER=0"))
    assert [line for line in seen.splitlines() if line.strip() and line != "exit"] == ["job-runs"]


def test_shell_on_a_terminal_without_arguments(image: BuiltImage, engine: docker.Engine) -> None:
    seen = on_terminal(engine, image.reference, options=("-e", "BLACKWELL_BANNER=0"))
    assert "#" in seen or "$" in seen, seen


# ---- many ranks


@pytest.mark.slow
def test_eight_ranks_share_one_baked_cache_without_a_write(image: BuiltImage, run_in: RunIn) -> None:
    """Eight processes at once under the null GPU, read-only root: every one is warm, and nothing is written."""
    card = image.facts["cards"][0]
    rank = f"blackwell step --device null --card '{card}' --steps 1 --expect-warm --json >/dev/null"
    script = f"""
for rank in 1 2 3 4 5 6 7 8; do ({rank}; echo "code $?") & done; wait
find /tmp -path '*blackwell-*' -type f ! -name .overlay-of -printf 'wrote %p\\n'
"""
    done = run_in(image.reference, "sh", "-c", script, user="12345:0", read_only=True, tmpfs=["/tmp:exec"], timeout=900)
    assert done.stdout.splitlines() == ["code 0"] * 8, done.stdout + done.stderr[-3000:]


@pytest.mark.slow
def test_torchrun_shares_one_baked_cache_without_a_write(image: BuiltImage, run_in: RunIn) -> None:
    """What the README tells people with four GPUs, under the null GPU: every rank is warm, and nothing is written."""
    step = ["blackwell", "step", "--device", "null", "--steps", "1", "--expect-warm", "--json"]
    script = f"""
torchrun --nproc-per-node 4 --log-dir /tmp/ranks --redirects 1 -m {" ".join(step)}; code=$?
for rank in 0 1 2 3; do cat /tmp/ranks/*/attempt_0/$rank/stdout.log | python -c 'import json, sys; print(json.load(sys.stdin)["misses"])'; done
echo "code $code"
find /tmp -path '*blackwell-*' -type f ! -name .overlay-of -printf 'wrote %p\\n'
"""
    done = run_in(image.reference, "sh", "-c", script, user="12345:0", read_only=True, tmpfs=["/tmp:exec"], timeout=900)
    assert done.stdout.splitlines() == ["0"] * 4 + ["code 0"], done.stdout + done.stderr[-3000:]


# ---- the baked cache, damaged


def test_repair_works_on_the_baked_cache_of_a_container(image: BuiltImage, run_in: RunIn) -> None:
    """There it is a lower layer, whose directories overlayfs does not rename."""
    script = """
cd "$BLACKWELL_CACHE/triton"
set -- */*.cubin
truncate -s 100 "$1"
graph=$(find ../inductor/fxgraph -type f | head -n 1)
truncate -s 100 "$graph"
blackwell kernels verify >/dev/null; echo "damaged $?"
blackwell kernels repair --json | python -c 'import json, sys; print(len(json.load(sys.stdin)["removed"]))'
blackwell kernels verify >/dev/null; echo "repaired $?"
[ ! -e "$(dirname "$1")" ] && [ -e "$(dirname "$2")" ] && echo "just this"; ls -A .. | grep -c trash
"""
    done = run_in(image.reference, "sh", "-c", script, timeout=300)
    assert done.stdout.splitlines() == ["damaged 1", "2", "repaired 0", "just this", "0"], done.stdout + done.stderr
