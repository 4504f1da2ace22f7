"""The tests of the code inside the image (tests/inside), run in the image itself, by its own Python and against its own libraries."""

import importlib.metadata
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.image.conftest import ROOT, BuiltImage, RunIn

RUNNER = ("pytest", "pluggy", "iniconfig", "pygments")  # pure Python, from this environment; packaging is in the image
FUSE = ("--device", "/dev/fuse") if Path("/dev/fuse").exists() else ()
AT_LEAST = {"not slow": 450, "slow": 14}  # tests that ran: fewer means that some were not collected
ALLOWED_SKIPS = re.compile("not in the image|root writes everywhere|causal-conv1d is installed here")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pytest without a virtual environment around it, to be mounted beside the image's own packages."""
    folder = tmp_path_factory.mktemp("runner")
    for name in RUNNER:
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(distribution.locate_file(file)), folder / file)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("which", AT_LEAST)
def test_inside(image: BuiltImage, run_in: RunIn, runner: Path, tmp_path: Path, which: str) -> None:
    """As root with the right to mount, which some of them need."""
    tmp_path.chmod(0o777)
    done = run_in(
        image.reference,
        "-m", "pytest", "/opt/tests/inside", "-q", "-m", which, "-p", "no:cacheprovider", "--junitxml", "/opt/out/junit.xml",
        "-c", "/dev/null", "--rootdir", "/opt/tests",
        entrypoint="/opt/venv/bin/python",
        env={"PYTHONPATH": "/opt/runner", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "2"},
        # A reaper for what killed programs leave; mounts of small, full and network file systems.
        options=("--init", "--cap-add", "SYS_ADMIN", "--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined", *FUSE),
        mounts=(f"{runner}:/opt/runner:ro", f"{ROOT / 'tests' / 'inside'}:/opt/tests/inside:ro", f"{tmp_path}:/opt/out"),
        timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    cases = list(ElementTree.parse(tmp_path / "junit.xml").iter("testcase"))
    skipped = {f"{c.get('name')}: {s.get('message')}" for c in cases for s in c.iter("skipped")}
    assert len(cases) - len(skipped) >= AT_LEAST[which], (len(cases), skipped)
    assert not {reason for reason in skipped if not ALLOWED_SKIPS.search(reason)}
