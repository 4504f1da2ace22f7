"""`blackwell doctor` and `blackwell status` in a container of the built image; faults are made there for real."""

import json
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from builder.engine import docker
from tests.image.conftest import BuiltImage, RunIn

SITE = "/opt/venv/lib/python*/site-packages"


def doctor(run_in: RunIn, image: BuiltImage, *words: str, before: str = "true", **options: Any) -> dict[str, Any]:
    """The document of `doctor --json` after some shell commands in the same container; its exit code under "code"."""
    command = " ".join(["blackwell doctor --json", *words])
    done = run_in(image.reference, "sh", "-c", f"({before}) >&2; exec {command}", **options)
    assert done.stdout, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return {**document, "code": done.returncode, "rows": {row["name"]: row for row in document["checks"]}}


def test_image_alone_passes(image: BuiltImage, run_in: RunIn) -> None:
    """No GPU here: everything else must be right, and nothing may be left out that can be judged."""
    document = doctor(run_in, image, "--no-gpu", "--limit", "100")
    failed = [row for row in document["checks"] if row["verdict"] == "fail"]
    assert not failed
    assert document["code"] == 0
    assert document["image"] == image.facts["id"]
    for name in ("torch", "triton", "fla", "conv1d", "distributions", "pip-constraint"):
        assert document["rows"][name]["verdict"] == "pass", document["rows"][name]
    for name in (
        "cache-fingerprint",
        "cache-integrity",
        "cache-used",
        "cache-writable",
        "python",
        "ldconfig",
        "compiler",
    ):
        assert document["rows"][name]["verdict"] == "pass", document["rows"][name]


def test_without_a_gpu_it_ends_in_time_and_says_how_to_start(image: BuiltImage, run_in: RunIn) -> None:
    document = doctor(run_in, image)
    assert document["code"] == 1
    assert document["seconds"] < 10
    assert "--gpus all" in document["rows"]["driver"]["todo"]
    assert image.facts["driver_floor"] in document["rows"]["driver"]["todo"]


def test_random_user_read_only_root_no_network(image: BuiltImage, run_in: RunIn) -> None:
    document = doctor(
        run_in, image, "--no-gpu", user="12345:0", read_only=True, tmpfs=["/tmp:exec"], options=["--network", "none"]
    )
    assert document["code"] == 0, [row for row in document["checks"] if row["verdict"] == "fail"]


@pytest.mark.parametrize(
    ("before", "check", "verdict", "word"),
    [
        ("rm /sbin/ldconfig", "ldconfig", "fail", "missing"),
        ("rm /usr/bin/*gcc* /usr/bin/cc", "compiler", "warn", "C compiler"),
        (f"rm -r {SITE}/torch/lib/libtorch_cpu.so", "torch", "fail", "doesn't import"),
        (f"rm -r {SITE}/triton/_C", "triton", "fail", "doesn't import"),
        (f"rm -r {SITE}/fla/ops", "fla", "fail", "doesn't import"),
        ("cp /bin/true $(find $BLACKWELL_CACHE -name '*.cubin' | head -1)", "cache-integrity", "fail", "damaged"),
        ("truncate -s 0 $(find $BLACKWELL_CACHE -name '*.cubin' | head -1)", "cache-integrity", "fail", "damaged"),
        ("rm /opt/blackwell/image.json", "image", "fail", "can't be read"),
        ("rm /opt/blackwell/constraints.txt", "distributions", "fail", "can't be read"),
    ],
)  # fmt: skip
def test_fault(image: BuiltImage, run_in: RunIn, before: str, check: str, verdict: str, word: str) -> None:
    limit = "90" if check == "fla" else "20"  # only FLA's own import needs long
    row = doctor(run_in, image, "--no-gpu", "--limit", limit, before=before)["rows"][check]
    assert row["verdict"] == verdict, row
    assert word in row["saw"]


def test_conv1d_of_another_torch_is_found(image: BuiltImage, run_in: RunIn) -> None:
    if image.facts["versions"].get("conv1d") in (None, "none"):
        pytest.skip("no causal-conv1d in this image")
    before = f"for file in {SITE}/causal_conv1d_cuda*.so; do cp /bin/true $file; done"
    row = doctor(run_in, image, "--no-gpu", "--limit", "60", before=before)["rows"]["conv1d"]
    assert row["verdict"] == "fail", row


@pytest.mark.parametrize(
    ("options", "check", "verdict", "word"),
    [
        ({"options": ["--shm-size", "64m"]}, "shared-memory", "warn", "64 MiB"),
        ({"options": ["--shm-size", "2g"]}, "shared-memory", "pass", "2.0 GiB"),
        ({"user": "12345:0", "read_only": True}, "cache-writable", "warn", "no place"),
        ({"user": "12345:0", "read_only": True, "tmpfs": ["/tmp"]}, "cache-writable", "warn", "noexec"),
        ({"env": {"NVIDIA_VISIBLE_DEVICES": ""}}, "nvidia-variables", "pass", "NVIDIA_VISIBLE_DEVICES"),
        ({"env": {"TRITON_CACHE_DIR": "/root/.triton"}}, "cache-used", "warn", "is not the baked"),
        ({"env": {"TRITON_PTXAS_PATH": "/usr/bin/ptxas"}}, "assembler", "fail", "does nothing"),
        ({"env": {"FLA_CACHE_MODE": "yes"}}, "fla-variables", "fail", "raise"),
    ],
)  # fmt: skip
def test_container_option(
    image: BuiltImage, run_in: RunIn, options: dict[str, Any], check: str, verdict: str, word: str
) -> None:
    row = doctor(run_in, image, "--no-gpu", "--quick", **options)["rows"][check]
    assert row["verdict"] == verdict, row
    assert word in row["saw"]


def test_forward_compat_directory(image: BuiltImage, run_in: RunIn) -> None:
    before = (
        "mkdir -p /usr/local/cuda/compat && touch /usr/local/cuda/compat/libcuda.so.1 && "
        "echo /usr/local/cuda/compat > /etc/ld.so.conf.d/00-compat.conf"
    )
    row = doctor(run_in, image, "--no-gpu", "--quick", before=before)["rows"]["forward-compat"]
    assert row["verdict"] == "warn"
    assert "00-compat.conf" in row["saw"]


def test_null_gpu_in_a_job_is_a_failure_and_its_card_is_seen(image: BuiltImage, run_in: RunIn, tmp_path: Path) -> None:
    """Under the null GPU the checks that need a GPU run, too: capability and card must fit this image."""
    tmp_path.chmod(0o755)
    (tmp_path / "under.py").write_text(
        "import subprocess, sys\nfrom blackwell import nullgpu\n"
        "words, variables = nullgpu.command(['blackwell', 'doctor', '--quick', '--json'], sys.argv[1])\n"
        "sys.exit(subprocess.run(words, env=variables).returncode)\n"
    )
    card = image.facts["cards"][0]
    done = run_in(image.reference, "python", "/job/under.py", card, mounts=[f"{tmp_path}:/job:ro"])
    rows = {row["name"]: row for row in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert rows["preload"]["verdict"] == "fail"
    for name in ("gpus", "capability", "card"):
        assert rows[name]["verdict"] == "pass", rows[name]
    assert card in rows["gpus"]["saw"]


def test_status_of_a_running_job(image: BuiltImage, engine: docker.Engine) -> None:
    client, name = str(engine.client), f"blackwell-test-{uuid.uuid4().hex[:12]}"
    code = "import time\nwhile True: print('step', flush=True); time.sleep(0.2)"
    script = f'exec python -c "{code}" > /tmp/train.log 2>&1'
    subprocess.run(
        [client, "run", "-d", "--name", name, image.reference, "sh", "-c", script], check=True, capture_output=True
    )
    try:
        time.sleep(2)
        words = [client, "exec", name, "blackwell", "status", "--match", "step", "--json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        document = json.loads(done.stdout)
        assert (done.returncode, document["verdict"]) == (0, "running")
        assert document["log"]["value"]["path"] == "/tmp/train.log"
        assert [process["pid"] for process in document["processes"]["value"]] == [1]
    finally:
        subprocess.run([client, "rm", "-f", name], capture_output=True, check=False)
