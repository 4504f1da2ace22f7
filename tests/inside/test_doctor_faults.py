"""Every fault is made for real (variable set, file placed, library loaded); then the real command must say it."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_support import STANDIN, Image, run_doctor

RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """A good image: cache directories there, constraints as installed."""
    made = Image(root=tmp_path / "image")
    for part in ("cache/triton", "cache/inductor", "overlay"):
        (made.root / part).mkdir(parents=True)
    made.facts()
    made.constraints()
    return made


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled libcuda stand-in, whose file name tells the driver's version as the real one's does."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile the libcuda stand-in with")
    directory = tmp_path_factory.mktemp("standin")
    (directory / "libcuda.c").write_text(STANDIN)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so", "libcuda.c"],
        cwd=directory,
        check=True,
    )
    return directory / "libcuda.so"


def card(
    standin: Path, tmp_path: Path, driver: str = "580.159.03", folder: str = "lib", **changes: str
) -> dict[str, str]:
    """Variables that make the stand-in this machine's libcuda."""
    if os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("a real NVIDIA driver is here: its version and cards can't be changed")
    directory = tmp_path / folder
    directory.mkdir(exist_ok=True)
    shutil.copy(standin, directory / f"libcuda.so.{driver}")
    (directory / "libcuda.so.1").symlink_to(f"libcuda.so.{driver}")
    return {"LD_LIBRARY_PATH": str(directory), "STANDIN_NAME": RTX, **changes}


# ---- a machine where all is well, and one without a GPU


def test_good_machine_passes(image: Image, standin: Path, tmp_path: Path) -> None:
    report = image.doctor(**card(standin, tmp_path))
    said = {row["name"]: (row["verdict"], row["saw"]) for row in report.document["checks"]}
    bad = {name: text for name, text in said.items() if text[0] in ("warn", "fail")}
    bad.pop("shared-memory", None)  # Docker's default of 64 MiB is a warning by right
    assert not bad
    assert report.code == 0
    assert report.document["image"] == "test-image"


def test_without_driver_fails_and_says_how_to_start(image: Image) -> None:
    if os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("there is a driver here")
    report = image.doctor()
    assert report.code == 1
    assert report["driver"][0] == "fail"
    assert "--gpus all" in report["driver"][1]
    assert "580.65.06" in report["driver"][1]


def test_no_gpu_judges_the_image_alone(image: Image) -> None:
    report = image.doctor("--quick", "--no-gpu")
    assert report.code == 0, report.document
    assert report["driver"] == ("skip", "not judged: --no-gpu -> ")


# ---- driver, libcuda, GPU


def test_old_driver_is_named_with_the_floor(image: Image, standin: Path, tmp_path: Path) -> None:
    verdict, text = image.doctor(**card(standin, tmp_path, driver="570.86.10"))["driver"]
    assert verdict == "fail"
    assert "570.86.10" in text and "580.65.06" in text


@pytest.mark.parametrize(
    ("major", "minor", "verdict", "word"),
    [
        ("12", "0", "pass", "in the image's set"),
        ("12", "1", "pass", "12.1 runs the code for 12.0"),
        ("10", "3", "pass", "10.3 runs the code for 10.0"),
        ("9", "0", "fail", "has 9.0"),
        ("11", "0", "fail", "within one major version"),
    ],
)
def test_capability(
    image: Image, standin: Path, tmp_path: Path, major: str, minor: str, verdict: str, word: str
) -> None:
    found = image.doctor(**card(standin, tmp_path, STANDIN_MAJOR=major, STANDIN_MINOR=minor))["capability"]
    assert found[0] == verdict
    assert word in found[1]


def test_older_minor_does_not_run_newer_code(image: Image, standin: Path, tmp_path: Path) -> None:
    image.facts(capabilities=["12.1"])
    assert image.doctor(**card(standin, tmp_path))["capability"][0] == "fail"


def test_card_that_is_not_warm_is_a_warning(image: Image, standin: Path, tmp_path: Path) -> None:
    report = image.doctor(**card(standin, tmp_path) | {"STANDIN_NAME": "NVIDIA GeForce RTX 5090"})
    assert report["card"][0] == "warn"
    assert "NVIDIA GeForce RTX 5090" in report["card"][1]
    assert report.code == 0


def test_cuinit_804_is_explained(image: Image, standin: Path, tmp_path: Path) -> None:
    report = image.doctor(**card(standin, tmp_path, folder="compat", STANDIN_INIT="804"))
    assert report["libcuda"][0] == "fail"
    assert "804" in report["libcuda"][1] and "cuda/compat" in report["libcuda"][1]
    assert report["forward-compat"][0] == "fail"


def test_forward_compat_on_an_rtx_board_fails_before_error_804(image: Image, standin: Path, tmp_path: Path) -> None:
    verdict, text = image.doctor(**card(standin, tmp_path, folder="compat"))["forward-compat"]
    assert verdict == "fail"
    assert RTX in text and "LD_LIBRARY_PATH" in text


def test_forward_compat_without_a_known_board_is_a_warning(image: Image, tmp_path: Path) -> None:
    compat = tmp_path / "cuda" / "compat"
    compat.mkdir(parents=True)
    (compat / "libcuda.so.1").write_bytes(b"")
    assert image.doctor("--quick", "--no-gpu", LD_LIBRARY_PATH=str(compat))["forward-compat"][0] == "warn"


def test_driver_that_hangs_is_reported_in_time(image: Image, standin: Path, tmp_path: Path) -> None:
    report = image.doctor("--quick", "--limit", "4", **card(standin, tmp_path, STANDIN_HANG="1"))
    assert report.document["seconds"] < 7
    assert report["libcuda"][0] == "fail" or "no answer" in report["libcuda"][1]
    assert report.code == 1


def test_driver_that_crashes_is_reported(image: Image, standin: Path, tmp_path: Path) -> None:
    report = image.doctor(**card(standin, tmp_path, STANDIN_CRASH="1"))
    assert "SIGABRT" in report["libcuda"][1]
    assert report.code == 1


def test_hidden_gpus(image: Image, standin: Path, tmp_path: Path) -> None:
    report = image.doctor(**card(standin, tmp_path, STANDIN_COUNT="0", CUDA_VISIBLE_DEVICES=""))
    assert report["gpus"][0] == "fail"


def test_profile_refuses_without_a_card(image: Image, tmp_path: Path) -> None:
    if os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("there is a card here")
    out = tmp_path / "card.toml"
    done = run_doctor(["--profile", str(out)], image.environment())
    assert done.returncode == 1
    assert "no profile" in done.stderr
    assert not out.exists()


# ---- variables

BOGUS = "/nowhere/ptxas"


@pytest.mark.parametrize(
    ("check", "verdict", "word", "changes"),
    [
        ("nvidia-variables", "warn", "NVIDIA_VISIBLE_DEVICES", {"NVIDIA_VISIBLE_DEVICES": None}),
        ("nvidia-variables", "warn", "NVIDIA_DRIVER_CAPABILITIES", {"NVIDIA_DRIVER_CAPABILITIES": None}),
        ("nvidia-variables", "fail", "compute", {"NVIDIA_DRIVER_CAPABILITIES": "utility"}),
        ("nvidia-variables", "pass", "all", {"NVIDIA_DRIVER_CAPABILITIES": "all"}),
        ("assembler", "fail", "does nothing on Blackwell", {"TRITON_PTXAS_PATH": "/usr/bin/true"}),
        ("assembler", "fail", "no program", {"TRITON_PTXAS_BLACKWELL_PATH": BOGUS}),
        ("assembler", "fail", "tell a version", {"TRITON_PTXAS_BLACKWELL_PATH": "/bin/true"}),
        ("fla-variables", "fail", "raise at import", {"FLA_CACHE_MODE": "on"}),
        ("fla-variables", "fail", "convolution raise", {"FLA_CONV_BACKEND": "cudnn"}),
        ("fla-variables", "warn", "unchecked", {"FLA_CACHE_MODE": "full"}),
        ("fla-variables", "warn", "no directory", {"FLA_CONFIG_DIR": "/nowhere"}),
        ("fla-variables", "warn", "TileLang", {"FLA_TILELANG": None}),
        ("key-variables", "warn", "CXX=/bin/false", {"CXX": "/bin/false"}),
        ("key-variables", "warn", "switches a cache off", {"TRITON_ALWAYS_COMPILE": "1"}),
        ("key-variables", "warn", "switches a cache off", {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}),
        ("key-variables", "warn", "part of the cache's keys", {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}),
        ("cache-used", "warn", "is not the baked", {"TRITON_CACHE_DIR": "/var/tmp"}),
        ("cache-used", "warn", "is not set", {"TORCHINDUCTOR_CACHE_DIR": None}),
        ("cache-used", "warn", "BLACKWELL_CACHE", {"BLACKWELL_CACHE": None}),
        ("pip-constraint", "warn", "PIP_CONSTRAINT is not set", {"PIP_CONSTRAINT": None}),
        ("pip-constraint", "warn", "leaves out", {"UV_CONSTRAINT": "/dev/null"}),
        ("preload", "warn", "isn't there", {"LD_PRELOAD": "/nowhere/libx.so"}),
        ("preload", "warn", "left over", {"NULLGPU_ON": "results-are-garbage"}),
        ("compiler", "fail", "CC=/nowhere/cc", {"CC": "/nowhere/cc"}),
        ("cache-writable", "warn", "PermissionError", {"BLACKWELL_OVERLAY": "/proc/overlay"}),
        ("python", "warn", "first in PATH", {"PATH": "/usr/bin:/bin:/sbin"}),
    ],
)
def test_variable(image: Image, check: str, verdict: str, word: str, changes: dict[str, str | None]) -> None:
    found = image.doctor("--quick", "--no-gpu", **changes)[check]
    assert found[0] == verdict, found
    assert word in found[1]


def test_variable_that_the_image_itself_sets_is_no_change(image: Image) -> None:
    image.facts(environment={"CXX": "g++"})
    assert image.doctor("--quick", "--no-gpu", CXX="g++")["key-variables"][0] == "pass"
    assert image.doctor("--quick", "--no-gpu", CXX="clang++")["key-variables"][0] == "warn"


def test_assembler_equal_to_tritons_own_passes_and_another_fails(image: Image, tmp_path: Path) -> None:
    import importlib.util

    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.submodule_search_locations
    programs = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "bin"
    same = image.doctor("--quick", "--no-gpu", TRITON_PTXAS_BLACKWELL_PATH=str(programs / "ptxas-blackwell"))
    assert same["assembler"][0] == "pass"
    older = image.doctor("--quick", "--no-gpu", TRITON_PTXAS_BLACKWELL_PATH=str(programs / "ptxas"))
    assert older["assembler"][0] == "fail"
    assert "every kernel misses" in older["assembler"][1]


def test_null_gpu_in_a_job(image: Image, tmp_path: Path) -> None:
    library = tmp_path / "nullgpu" / "lib" / "libcuda.so.1"
    library.parent.mkdir(parents=True)
    (tmp_path / "empty.c").write_text("int nullgpu_test;")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "empty.c")], check=True)
    report = image.doctor("--quick", "--no-gpu", LD_PRELOAD=str(library))
    assert report["preload"][0] == "fail"
    assert "nothing that is computed here is real" in report["preload"][1]
    assert report.code == 1


def test_small_shared_memory(image: Image) -> None:
    """A real 64 MiB /dev/shm, as Docker gives, in a mount namespace of its own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting needs root and unshare")
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    argv = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        script,
        "sh",
        sys.executable,
        "-m",
        "blackwell",
        "doctor",
        "--quick",
        "--no-gpu",
        "--limit",
        "5",
    ]
    done = subprocess.run(argv, env=image.environment(), capture_output=True, text=True, timeout=30, check=False)
    if "mount:" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no mount allowed here: {done.stderr.strip()}")
    assert "/dev/shm has 64 MiB" in done.stdout
    assert "--shm-size" in done.stdout


HUNG_MOUNT = """
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def check(code):
    if code: sys.exit("MOUNT: " + os.strerror(ctypes.get_errno()))
check(libc.unshare(0x00020000))
check(libc.mount(b"none", b"/", None, (1 << 18) | (1 << 14), None))
fuse = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
check(libc.mount(b"host:/share", sys.argv[1].encode(), b"fuse.sshfs", 6, options))
sys.exit(subprocess.run(sys.argv[2:]).returncode)
"""


def test_cache_on_network_storage_whose_server_is_gone(image: Image, tmp_path: Path) -> None:
    """A FUSE mount that nobody serves: every access hangs, as on NFS without its server."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("mounting FUSE needs root and /dev/fuse")
    share = tmp_path / "share"
    share.mkdir()
    where = str(share / "cache")
    argv = [
        sys.executable,
        "-c",
        HUNG_MOUNT,
        str(share),
        sys.executable,
        "-m",
        "blackwell",
        "doctor",
        "--quick",
        "--no-gpu",
        "--limit",
        "5",
    ]
    done = subprocess.run(
        argv, env=image.environment(TRITON_CACHE_DIR=where), capture_output=True, text=True, timeout=30, check=False
    )
    if "MOUNT" in done.stderr:
        pytest.skip(f"no mount allowed here: {done.stderr.strip()}")
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "fuse.sshfs" in rows["cache-storage"], done.stdout
    assert "no answer" in rows["cache-writable"]


# ---- files


def test_outside_an_image(image: Image) -> None:
    (image.root / "image.json").unlink()
    report = image.doctor("--quick", "--no-gpu")
    assert report["image"][0] == "fail"
    assert report.code == 1


def test_known_bad_versions_are_noted_by_name(image: Image) -> None:
    image.facts(
        rules=[{"id": "triton-3.7.0-b200", "verdict": "warn", "sentence": "...", "url": "https://example.com/1"}]
    )
    verdict, text = image.doctor("--quick", "--no-gpu")["known-bad"]
    assert verdict == "pass", "a note about versions must not make every start-up line a warning"
    assert "triton-3.7.0-b200" in text


def test_compiler_taken_away(image: Image, tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    (bare / "python").symlink_to(sys.executable)
    verdict, text = image.doctor("--quick", "--no-gpu", PATH=str(bare))["compiler"]
    assert verdict == "warn"
    assert "a C compiler" in text


def test_overlay_counts_as_the_baked_cache(image: Image) -> None:
    (image.root / "overlay" / ".overlay-of").write_text(f"{image.root / 'cache'}\n1 2\n")
    variables = {"TRITON_CACHE_DIR": str(image.root / "overlay" / "triton")}
    assert image.doctor("--quick", "--no-gpu", **variables)["cache-used"][0] == "pass"


def test_place_for_new_kernels_is_really_tried(image: Image) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere; the read-only case is tested in a container")
    (image.root / "overlay").chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert image.doctor("--quick", "--no-gpu")["cache-writable"][0] == "warn"
