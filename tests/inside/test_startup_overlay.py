"""The start-up hook and the overlay: free when there is nothing to do, never raising, safe for many ranks at once."""

import json
import os
import stat
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import blackwell
import pytest
from blackwell import overlay

INSIDE = Path(blackwell.__file__).resolve().parents[1]
NOBODY = 12345


@pytest.fixture
def baked(tmp_path: Path) -> Path:
    """A sealed cache: one Triton entry, one Inductor graph, and lock files that must not be linked."""
    cache = tmp_path / "opt" / "cache" / "0123456789abcdef"
    files = {
        "triton/KEY/scale.cubin": "cubin",
        "triton/KEY/__grp__scale.json": json.dumps({"child_paths": {}}),
        "triton/KEY/lock": "",
        "inductor/fxgraph/ab/fabc/entry": "graph",
        "inductor/locks/some.lock": "",
        "SHA256SUMS": "0" * 64 + "  triton/KEY/scale.cubin\n",
    }
    for name, text in files.items():
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_text(text)
    return cache


def job(baked: Path, tmp: Path, **more: str) -> dict[str, str]:
    """The environment of a job in the image."""
    tmp.mkdir(exist_ok=True)
    return {
        "BLACKWELL_CACHE": str(baked),
        "TRITON_CACHE_DIR": f"{baked}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{baked}/inductor",
        "TMPDIR": str(tmp),
        **more,
    }


def test_every_file_is_linked_and_variables_move(baked: Path, tmp_path: Path) -> None:
    environment = job(baked, tmp_path / "tmp")
    place = overlay.apply(environment)
    assert place == str(tmp_path / "tmp" / f"blackwell-{os.geteuid()}-0123456789abcdef")
    assert environment["TRITON_CACHE_DIR"] == f"{place}/triton"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == f"{place}/inductor"
    links = {str(p.relative_to(place)): str(p.readlink()) for p in Path(place).rglob("*") if p.is_symlink()}
    names = ["triton/KEY/scale.cubin", "triton/KEY/__grp__scale.json", "inductor/fxgraph/ab/fabc/entry"]
    assert links == {name: str(baked / name) for name in names}
    assert stat.S_IMODE(Path(place).stat().st_mode) == 0o700


def test_writing_by_rename_leaves_the_baked_file_alone(baked: Path, tmp_path: Path) -> None:
    environment = job(baked, tmp_path / "tmp")
    overlay.apply(environment)
    target = Path(environment["TRITON_CACHE_DIR"]) / "KEY" / "scale.cubin"
    temporary = target.with_name("new")
    temporary.write_text("mine")
    temporary.replace(target)
    assert (baked / "triton/KEY/scale.cubin").read_text() == "cubin"
    again = job(baked, tmp_path / "tmp")
    overlay.apply(again)
    assert target.read_text() == "mine", "a second process keeps what was compiled"


@pytest.mark.parametrize(
    "change",
    [
        {"BLACKWELL_CACHE": ""},
        {"BLACKWELL_OVERLAY": "off"},
        {"TRITON_CACHE_DIR": "/mine", "TORCHINDUCTOR_CACHE_DIR": "/mine"},
    ],
)
def test_left_alone(baked: Path, tmp_path: Path, change: dict[str, str]) -> None:
    environment = job(baked, tmp_path / "tmp", **change)
    before = dict(environment)
    assert overlay.apply(environment) is None
    assert environment == before
    assert not any((tmp_path / "tmp").iterdir())


def test_unsealed_cache_is_left_alone(baked: Path, tmp_path: Path) -> None:
    """It is being warmed: what is compiled belongs into the cache itself."""
    (baked / "SHA256SUMS").unlink()
    environment = job(baked, tmp_path / "tmp")
    assert overlay.apply(environment) is None
    assert environment["TRITON_CACHE_DIR"] == f"{baked}/triton"


def test_users_own_variable_stays(baked: Path, tmp_path: Path) -> None:
    environment = job(baked, tmp_path / "tmp", TRITON_CACHE_DIR="/mine")
    place = overlay.apply(environment)
    assert environment["TRITON_CACHE_DIR"] == "/mine"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == f"{place}/inductor"


def test_sealed_again_adds_new_and_drops_dead_links(baked: Path, tmp_path: Path) -> None:
    place = Path(overlay.apply(job(baked, tmp_path / "tmp")) or "")
    own = place / "triton" / "OWN"
    own.mkdir()
    (own / "mine.cubin").write_text("mine")
    (baked / "triton/KEY/scale.cubin").unlink()
    (baked / "triton/KEY/other.cubin").write_text("new")
    (baked / "SHA256SUMS").write_text("another list\n")
    overlay.apply(job(baked, tmp_path / "tmp"))
    assert not (place / "triton/KEY/scale.cubin").is_symlink()
    assert (place / "triton/KEY/other.cubin").read_text() == "new"
    assert (own / "mine.cubin").read_text() == "mine"


def test_half_made_overlay_is_finished(baked: Path, tmp_path: Path) -> None:
    """As if a rank had been killed while it made the overlay."""
    place = Path(overlay.apply(job(baked, tmp_path / "tmp")) or "")
    (place / overlay.STAMP).unlink()
    (place / "triton/KEY/scale.cubin").unlink()
    assert overlay.apply(job(baked, tmp_path / "tmp")) == str(place)
    assert (place / "triton/KEY/scale.cubin").read_text() == "cubin"


@pytest.mark.parametrize("trap", ["symlink", "writable", "file"])
def test_somebody_elses_directory_is_not_used(baked: Path, tmp_path: Path, trap: str) -> None:
    """The name can be guessed, and shared objects are loaded from it."""
    environment = job(baked, tmp_path / "tmp", BLACKWELL_OVERLAY="")
    name = tmp_path / "tmp" / f"blackwell-{os.geteuid()}-{baked.name}"
    if trap == "symlink":
        (tmp_path / "theirs").mkdir()
        name.symlink_to(tmp_path / "theirs")
    elif trap == "file":
        name.write_text("")
    else:
        name.mkdir()
        name.chmod(0o777)
    place = overlay.apply(environment)
    assert place != str(name)
    if place is not None:  # the next place, /tmp itself
        assert place == f"/tmp/{name.name}"
        subprocess.run(["rm", "-r", place], check=True)


def test_explicit_place(baked: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o777)
    assert overlay.apply(job(baked, tmp_path / "tmp", BLACKWELL_OVERLAY=str(volume))) == str(volume)
    assert (volume / "triton/KEY/scale.cubin").read_text() == "cubin"


def test_nothing_writable_leaves_the_baked_paths_and_says_nothing(
    baked: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "makedirs", refuse)
    environment = job(baked, tmp_path / "tmp")
    before = dict(environment)
    assert overlay.apply(environment) is None
    assert environment == before
    assert capfd.readouterr() == ("", "")


def test_full_temporary_directories_leave_home(baked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else root, who may write everywhere, would compile into the baked cache."""
    home, stamped = tmp_path / "home", overlay._stamp

    def full(place: str, seal: str) -> None:
        if not place.startswith(str(home)):
            raise OSError(28, "No space left on device")
        stamped(place, seal)

    monkeypatch.setattr(overlay, "_stamp", full)
    environment = job(baked, tmp_path / "tmp", HOME=str(home))
    place = overlay.apply(environment)
    assert place == f"{home}/.cache/blackwell-{os.geteuid()}-0123456789abcdef"
    assert environment["TRITON_CACHE_DIR"] == f"{place}/triton"
    assert list((tmp_path / "tmp").iterdir()) == [], "half an overlay is taken away from a full disk"


@pytest.fixture
def for_everybody(tmp_path: Path) -> Iterator[Path]:
    """`tmp_path`, reachable by every user."""
    opened = []
    for parent in [tmp_path, *tmp_path.parents]:
        mode = stat.S_IMODE(parent.stat().st_mode)
        if mode & 0o005 != 0o005 and os.access(parent, os.W_OK) and parent.owner() == tmp_path.owner():
            opened.append((parent, mode))
            parent.chmod(mode | 0o055)
    yield tmp_path
    for parent, mode in opened:
        parent.chmod(mode)


RANK = """
import os, sys, time
sys.path.insert(0, os.environ["INSIDE"])
from blackwell import overlay
open(os.environ["GATE"] + str(os.getpid()), "w").close()
while not os.path.exists(os.environ["GATE"]):  # all ranks start together
    time.sleep(0.001)
place = overlay.apply()
assert place, "no overlay"
parts = [os.path.join(place, part) for part in overlay.VARIABLES.values()]
files = [os.path.join(f, n) for part in parts for f, _, names in os.walk(part) for n in names]
assert all(os.path.exists(file) for file in files)
print(place, len(files))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_random_uid_without_home(baked: Path, for_everybody: Path) -> None:
    tmp = for_everybody / "tmp"
    environment = job(baked, tmp, INSIDE=str(INSIDE))
    tmp.chmod(0o1777)
    before = sorted((str(p), p.stat().st_mtime_ns) for p in baked.rglob("*"))
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        place = overlay.apply(environment)
        good = place == f"{tmp}/blackwell-{NOBODY}-{baked.name}" and (Path(place) / "triton/KEY/scale.cubin").is_file()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted((str(p), p.stat().st_mtime_ns) for p in baked.rglob("*")) == before


def test_eight_ranks_at_once(baked: Path, tmp_path: Path) -> None:
    for number in range(300):
        (baked / f"triton/K{number}").mkdir()
        (baked / f"triton/K{number}/a.cubin").write_text("x")
    gate = tmp_path / "gate"
    environment = job(baked, tmp_path / "tmp", INSIDE=str(INSIDE), GATE=str(gate))
    command = [sys.executable, "-S", "-c", RANK]
    ranks = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("gate?*"))) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    gate.touch()
    answers = {rank.communicate(timeout=60)[0] for rank in ranks}
    assert all(rank.returncode == 0 for rank in ranks)
    assert answers == {f"{tmp_path}/tmp/blackwell-{os.geteuid()}-{baked.name} 303\n"}


HOOKED = """
import sys
import blackwell.startup
before = set(sys.modules)
{body}
"""


def run_hooked(body: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter in which the hook is armed as by the image's .pth file."""
    command = [sys.executable, "-c", HOOKED.format(body=body)]
    merged = {"PATH": os.environ["PATH"], "PYTHONPATH": str(INSIDE), **environment}
    return subprocess.run(command, env=merged, capture_output=True, text=True, timeout=120)


@pytest.fixture
def fake_packages(tmp_path: Path) -> Path:
    """A `torch` and a `triton` that only say what the cache variable is when they are imported."""
    for name in ("torch", "triton"):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text("import os\nprint(os.environ['TRITON_CACHE_DIR'])\n")
    return tmp_path / "packages"


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_hook_lays_the_overlay_before_torch_or_triton_loads(
    baked: Path, tmp_path: Path, fake_packages: Path, name: str
) -> None:
    environment = job(baked, tmp_path / "tmp", PYTHONPATH=f"{INSIDE}:{fake_packages}")
    assert not any((tmp_path / "tmp").iterdir())
    done = run_hooked(f"import {name}", environment)
    assert done.stdout == f"{tmp_path}/tmp/blackwell-{os.geteuid()}-{baked.name}/triton\n", done.stderr
    off = run_hooked(f"import {name}", {**environment, "BLACKWELL_STARTUP": "0"})
    assert off.stdout == f"{baked}/triton\n"


def test_hook_does_nothing_without_torch(baked: Path, tmp_path: Path) -> None:
    done = run_hooked("import json, argparse; print('blackwell.overlay' in sys.modules)", job(baked, tmp_path / "tmp"))
    assert done.stdout == "False\n"
    assert not any((tmp_path / "tmp").iterdir())


def test_hook_never_raises(baked: Path, tmp_path: Path, fake_packages: Path) -> None:
    body = "import blackwell.overlay; blackwell.overlay.apply = None; import torch; print('went on')"
    done = run_hooked(body, job(baked, tmp_path / "tmp", PYTHONPATH=f"{INSIDE}:{fake_packages}"))
    assert done.stdout == f"{baked}/triton\nwent on\n"
    assert done.stderr == ""


def test_hook_arms_the_real_autotuner() -> None:
    pytest.importorskip("triton")
    body = (
        "import triton, inspect; from blackwell import autotuner_race; print(autotuner_race.is_armed());"
        "from triton.runtime import autotuner; print(len(inspect.getsource(autotuner)) > 1000)"
    )
    assert run_hooked(body, {}).stdout == "True\nTrue\n"
    off = run_hooked(body, {"BLACKWELL_STARTUP": "0"})
    assert off.stdout == "False\nTrue\n"


def test_hook_costs_less_than_two_milliseconds() -> None:
    """CPU time of importing the hook in a bare interpreter; the median of several, for a busy machine."""
    code = (
        "import os, sys, time; sys.path.insert(0, os.environ['INSIDE']); t = time.process_time_ns();"
        "import blackwell.startup; print((time.process_time_ns() - t) / 1e6)"
    )
    environment = {"INSIDE": str(INSIDE), "BLACKWELL_CACHE": "/nowhere"}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        for _ in range(7)
    ]
    assert statistics.median(float(run.stdout) for run in runs) < 2.0
