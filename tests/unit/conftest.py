"""Unit tests touch nothing outside: no process, no socket. Shared: the real matrix, and a way to write small ones."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import settings

from builder.matrix import load
from builder.values import Matrix

# A busy machine is no reason to fail, and a database of examples would be a file in the working tree.
settings.register_profile("quiet", deadline=None, database=None)
settings.load_profile("quiet")

MATRICES = Path(__file__).parents[2] / "matrices"


@pytest.fixture(autouse=True)
def no_outside_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a process or opening a socket fails the test, also where the code under test would swallow an error."""

    def refusing(what: str) -> Callable[..., NoReturn]:
        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            pytest.fail(f"a unit test must not touch the outside world: {what}")

        return refuse

    doors: list[tuple[Any, list[str]]] = [
        (subprocess.Popen, ["__init__"]),
        (asyncio, ["create_subprocess_exec", "create_subprocess_shell"]),
        (os, ["system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp", "execv", "execve"]),
        (socket.socket, ["connect", "connect_ex", "bind", "sendto"]),
        (socket, ["getaddrinfo", "create_connection"]),
    ]
    for owner, names in doors:
        for name in names:
            monkeypatch.setattr(owner, name, refusing(f"{owner.__name__}.{name}"))


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    """The matrix of this repository."""
    return load(MATRICES)


TOOLKIT = ["nvidia-cuda-nvcc==13.0.88"]
SMALL: dict[str, Any] = {
    "capabilities": ["10.0", "12.0"],
    "platforms": ["linux/amd64"],
    "budget_zstd_bytes": 1000,
    "defaults": {"base": "trixie", "fla": "0.6.0", "conv1d": "1.7.0", "capabilities": ["10.0", "12.0"]},
    "bases": [{"name": "trixie", "suite": "trixie", "python": "3.13"}],
    "stacks": [
        {
            "cuda": "13.0",
            "torch": "2.12.1",
            "triton": "3.7.1",
            "driver_floor": "580.65.06",
            "toolkit": TOOLKIT,
            "default_for": ["triton"],
        },
        {"cuda": "13.0", "torch": "2.12.0", "triton": "3.7.0", "driver_floor": "580.65.06", "toolkit": TOOLKIT},
    ],
    "fla": [{"version": "0.6.0", "transformers": "5.24.0"}],
    "conv1d": [{"version": "1.7.0"}],
    "excludes": [],
    "rules": [
        {
            "id": "bad",
            "when": {"triton": "==3.7.0"},
            "verdict": "refuse",
            "sentence": "It is bad.",
            "url": "https://example.org/1",
            "instead": "Use 3.7.1.",
        }
    ],
}


@pytest.fixture
def small() -> dict[str, Any]:
    """A small sound matrix as data, to be spoilt."""
    return deepcopy(SMALL)


@pytest.fixture
def directory(tmp_path: Path) -> Callable[..., Path]:
    """Write TOML files into a directory: `directory(stacks="...", bases="...")`."""

    def write(**files: str) -> Path:
        for name, content in files.items():
            (tmp_path / f"{name}.toml").write_text(content, encoding="utf-8")
        return tmp_path

    return write
