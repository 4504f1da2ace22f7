"""Run the real `blackwell doctor` in a process of its own, over an image tree and an environment that are all right."""

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blackwell

STANDIN = """
/* A libcuda for a card that isn't here: what doctor must say about cards and drivers that this machine doesn't have. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int number(const char *name, int otherwise)
{
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}
int cuInit(unsigned flags)
{
  while (number("STANDIN_HANG", 0))
    pause();
  if (number("STANDIN_CRASH", 0))
    abort();
  return number("STANDIN_INIT", 0);
}
int cuDeviceGetCount(int *count) { *count = number("STANDIN_COUNT", 1); return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, getenv("STANDIN_NAME"), size); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)96 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{ *value = attribute == 75 ? number("STANDIN_MAJOR", 12) : number("STANDIN_MINOR", 0); return 0; }
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run of doctor."""

    code: int
    document: Mapping[str, Any]

    def __getitem__(self, name: str) -> tuple[str, str]:
        """Verdict and everything said by one check."""
        row = next(row for row in self.document["checks"] if row["name"] == name)
        return row["verdict"], f"{row['saw']} -> {row['todo']}"


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image's tree in a temporary directory."""

    root: Path

    def facts(self, **changes: Any) -> None:
        """Write image.json, with changes."""
        versions = {"torch": version("torch"), "triton": version("triton"), "fla": version("flash-linear-attention")}
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        facts = {
            "id": "test-image",
            "versions": {**versions, "python": python, "conv1d": "none"},
            "capabilities": ["10.0", "12.0"],
            "driver_floor": "580.65.06",
            "override": None,
            "cards": ["NVIDIA RTX PRO 6000 Blackwell Server Edition"],
        }
        (self.root / "image.json").write_text(json.dumps({**facts, **changes}))

    def constraints(self) -> Path:
        """Write constraints.txt with what is installed here, as if it had been locked."""
        path = self.root / "constraints.txt"
        installed = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])  # not what PYTHONPATH adds
        pins = {d.metadata["Name"]: d.version for d in installed if d.metadata["Name"]}
        path.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pins.items())))
        return path

    def environment(self, **changes: str | None) -> dict[str, str]:
        """All that the image sets and nothing else; a change to None takes a variable away."""
        variables: dict[str, str | None] = {
            "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(Path(blackwell.__file__).parents[1]),
            "BLACKWELL_ROOT": str(self.root),
            "BLACKWELL_CACHE": str(self.root / "cache"),
            "TRITON_CACHE_DIR": str(self.root / "cache" / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / "cache" / "inductor"),
            "BLACKWELL_OVERLAY": str(self.root / "overlay"),
            "FLA_TILELANG": "0",
            "NVIDIA_VISIBLE_DEVICES": "all",
            "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
            "PIP_CONSTRAINT": str(self.root / "constraints.txt"),
            "UV_CONSTRAINT": str(self.root / "constraints.txt"),
        }
        for name in ("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"):
            variables[name] = os.environ.get(name)
        return {name: value for name, value in {**variables, **changes}.items() if value is not None}

    def doctor(self, *options: str, **changes: str | None) -> Report:
        """`blackwell doctor --json` (--quick without options) with some variables changed.

        It gets time for a busy machine: it ends as soon as every check has answered, unless a test is about its bounds.
        """
        words = list(options or ("--quick",))
        words += [] if "--limit" in words else ["--limit", "50"]
        done = run_doctor([*words, "--json"], self.environment(**changes))
        return Report(code=done.returncode, document=json.loads(done.stdout))


def run_doctor(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """The command itself; the timeout is far beyond every bound it promises."""
    argv = [sys.executable, "-m", "blackwell", "doctor", *words]
    return subprocess.run(argv, env=dict(environment), capture_output=True, text=True, timeout=100, check=False)


def version(name: str) -> str:
    """The installed version without its local part."""
    return importlib.metadata.version(name).partition("+")[0]
