"""A UID without a name gets one before torch or triton is imported, so that Inductor's import does not fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import contextlib, getpass, importlib.util, os, pwd, sys
import blackwell.startup
os.setuid(54321)  # here, not before: the interpreter of a developer may lie where only its owner can read
with contextlib.suppress(OSError):
    importlib.util.find_spec("triton")
print(getpass.getuser())
"""


def user(**env: str) -> subprocess.CompletedProcess[str]:
    import blackwell

    inside = str(Path(blackwell.__file__).parents[1])
    base = {k: v for k, v in os.environ.items() if k not in ("LOGNAME", "USER", "LNAME", "USERNAME")}
    environment = {**base, "PYTHONPATH": inside, "BLACKWELL_CACHE": "", "PYTHONDONTWRITEBYTECODE": "1", **env}
    return subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another UID")
def test_a_uid_without_a_name_gets_one() -> None:
    assert user().stdout.strip() == "uid-54321"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another UID")
def test_without_the_hook_there_is_none() -> None:
    """The fault itself: this test fails when Python or the base image gives such a UID a name."""
    done = user(BLACKWELL_STARTUP="0")
    assert done.returncode != 0 and ("No username" in done.stderr or "uid not found" in done.stderr)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another UID")
def test_a_name_that_is_there_stays() -> None:
    assert user(USER="somebody").stdout.strip() == "somebody"
