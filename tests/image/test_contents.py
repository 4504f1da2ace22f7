"""What is in the image is what the lock says, and nothing besides. Expected comes from the lock, observed from the container."""

import json
import re

from packaging.version import Version
from testinfra.host import Host

from builder.layout import removals
from tests.image.conftest import BuiltImage, RunIn

SITE = "/opt/venv/lib/{python}/site-packages"


def python(host: Host, code: str, *, env: str = "") -> str:
    done = host.run(f"{env} /opt/venv/bin/python -c %s", code)
    assert done.rc == 0, done.stderr
    return str(done.stdout)


def test_every_locked_distribution_is_there_and_none_besides(host: Host, image: BuiltImage) -> None:
    code = "import importlib.metadata as m, json; print(json.dumps(sorted([d.name.lower().replace('_', '-'), d.version] for d in m.distributions())))"
    found = dict(json.loads(python(host, code)))
    expected = {d.name: d.version for d in image.lock.distributions if d.layer not in ("tools", "compiler")}
    assert found == expected


def test_debian_packages_are_the_locked_ones(host: Host, image: BuiltImage) -> None:
    listing = host.check_output("dpkg-query -W -f '${Package}=${Version}\\n'")
    assert sorted(listing.splitlines()) == sorted(f"{p.name}={p.version}" for p in image.lock.debian)


def test_everything_imports_without_a_fallback_warning(host: Host, image: BuiltImage) -> None:
    modules = [
        "torch",
        "triton",
        "fla",
        "fla.ops.gated_delta_rule",
        "fla.models",
        "transformers.models.qwen3_5.modeling_qwen3_5",
        "einops",
        "pynvml",
    ]
    modules += [] if image.facts["versions"]["conv1d"] == "none" else ["causal_conv1d", "causal_conv1d_cuda"]
    code = f"import importlib\nfor m in {modules!r}: importlib.import_module(m)"
    done = host.run("/opt/venv/bin/python -W always -c %s", code)
    assert done.rc == 0, done.stderr


def test_requirements_of_all_distributions_are_met(host: Host, image: BuiltImage) -> None:
    done = host.run("/opt/venv/bin/python -m pip check")
    assert [line for line in done.stdout.splitlines() if "but you have" in line or "requires" in line] == []


def test_extensions_carry_the_requested_architectures_and_no_sm_103(host: Host, image: BuiltImage) -> None:
    """cuobjdump of the installed library, not of what the build said."""
    if image.facts["versions"]["conv1d"] == "none":
        assert not host.file("/opt/blackwell/extensions").exists
        return
    site = SITE.format(python=image.python)
    library = host.check_output(f"ls {site}/causal_conv1d_cuda*.so")
    listing = host.check_output(f"{site}/triton/backends/nvidia/bin/cuobjdump --list-elf --list-ptx {library}")
    targets = [c.replace(".", "") for c in image.facts["extension_targets"]]
    assert set(re.findall(r"\.sm_(\w+)\.cubin", listing)) == set(targets)
    assert set(re.findall(r"\.sm_(\w+)\.ptx", listing)) == {targets[-1]}
    assert "sm_103" not in listing


def test_cuda_libraries_are_there_once_and_no_compiler(host: Host, image: BuiltImage) -> None:
    assert host.run("command -v nvcc").rc != 0
    assert host.check_output("find / -xdev -name nvcc -o -xdev -name cicc -o -xdev -name 'libcudart_static.a'") == ""
    names = host.check_output(
        "find /opt/venv /usr -xdev -type f -name 'libcublasLt.so*' -o -xdev -type f -name 'libcudnn_adv.so*' -o -xdev -type f -name 'libcufft.so*'"
    ).splitlines()
    assert len(names) == 3, names


# Rows of dead weight that only images of the other CUDA have.
OLDER_CUDA = {"cuda/bindings/*.cpp", "cuda/bindings/_*/*.cpp"}
NEWER_CUDA = {"nvidia/cu*/lib/*.a", "torch/bin/ptxas"}
WEIGHT = """
import csv, importlib.metadata, json, subprocess, sys
from fnmatch import fnmatchcase
from pathlib import Path
site = Path(sys.argv[1])
brought = {row[0] for d in importlib.metadata.distributions() for row in csv.reader((d.read_text("RECORD") or "").splitlines())}
found = {}
for what, glob in json.loads(sys.argv[2]):
    # The part of a name as deep as the glob: a star stops at a slash, and a folder goes with all that is in it.
    depth = glob.count("/") + 1
    names = [name for name in brought if fnmatchcase("/".join(name.split("/")[:depth]), glob)]
    left = [name for name in names if (site / name).exists()]
    if what == "symbols":
        sections = [subprocess.run(["readelf", "-SW", site / name], capture_output=True, text=True, check=True).stdout for name in left]
        left = [name for name, text in zip(left, sections) if ".debug_" in text or ".symtab" in text]
    found[glob] = [len(names), left]
print(json.dumps(found))
"""


def test_dead_weight_is_gone_and_every_row_of_it_is_about_something(host: Host, image: BuiltImage) -> None:
    """What the distributions say they brought (their RECORD) against what lies there."""
    rows = [[removal.what, removal.glob] for removal in removals()]
    command = "/opt/venv/bin/python -c %s %s %s"
    done = host.run(command, WEIGHT, SITE.format(python=image.python), json.dumps(rows))
    assert done.rc == 0, done.stderr
    found = json.loads(done.stdout)
    assert {glob: left for glob, (_, left) in found.items() if left} == {}
    triton, cuda = (Version(image.facts["versions"][name]) for name in ("triton", "cuda"))
    elsewhere = {"triton/plugins/lib*"} if triton < Version("3.7") else set()
    elsewhere |= NEWER_CUDA if cuda < Version("13") else OLDER_CUDA
    assert {glob for glob, (count, _) in found.items() if not count} == elsewhere


def test_environment(image: BuiltImage) -> None:
    env = dict(pair.split("=", 1) for pair in image.config["Env"])
    assert env["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert env["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert env["FLA_TILELANG"] == "0"
    cache = env["BLACKWELL_CACHE"]
    assert cache == f"/opt/blackwell/cache/{image.labels['io.blackwell.cache.fingerprint']}"
    assert env["TRITON_CACHE_DIR"] == f"{cache}/triton"
    assert env["TORCHINDUCTOR_CACHE_DIR"] == f"{cache}/inductor"
    assert env["PIP_CONSTRAINT"] == env["UV_CONSTRAINT"] == "/opt/blackwell/constraints.txt"
    assert "TRITON_PTXAS_PATH" not in env and "TRITON_PTXAS_BLACKWELL_PATH" not in env


def test_labels_say_what_the_image_is(image: BuiltImage) -> None:
    labels = image.labels
    assert labels["org.opencontainers.image.version"] == labels["io.blackwell.id"] == image.facts["id"]
    assert labels["io.blackwell.lock"] == image.lock.checksum
    assert labels["io.blackwell.capabilities"] == ",".join(image.facts["capabilities"])
    assert labels["io.blackwell.driver-floor"] == image.facts["driver_floor"]
    assert {
        k.removeprefix("io.blackwell.version."): v for k, v in labels.items() if k.startswith("io.blackwell.version.")
    } == image.facts["versions"]
    assert ("io.blackwell.override" in labels) == bool(image.facts["override"])
    assert int(labels["io.blackwell.cache.entries"]) > 0
    assert int(labels["io.blackwell.cache.bytes"]) > 0


def test_runs_under_a_random_uid_with_a_read_only_root(image: BuiltImage, run_in: RunIn) -> None:
    done = run_in(
        image.reference,
        "python",
        "-c",
        "import torch, triton, fla; print('ready')",
        user="54321:0",
        read_only=True,
        tmpfs=["/tmp"],
    )
    assert done.stdout.strip().endswith("ready"), done.stderr


def test_ldconfig_is_there_for_triton(host: Host) -> None:
    """Triton 3.6 and 3.7 run /sbin/ldconfig -p before they look into the cache."""
    assert host.run("/sbin/ldconfig -p").rc == 0


def test_nothing_of_the_build_is_left(image: BuiltImage, run_in: RunIn) -> None:
    """No wheel cache, secret, source or temporary file: they would be dead weight, or worse.

    In a fresh container in which no Python ran: the start-up hook of one leaves its overlay below /tmp.
    """
    places = ["/root/.cache", "/tmp", "/var/tmp", "/opt/build", "/opt/layer", "/opt/wheels", "/run/secrets"]
    done = run_in(image.reference, *places, "-type", "f", entrypoint="find")
    assert done.stdout == ""
    # A place that does not exist is as good as an empty one; any other complaint means that find did not look.
    assert all("No such file or directory" in line for line in done.stderr.splitlines()), done.stderr
