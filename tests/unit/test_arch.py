"""The one place that owns architectures; and the nvcc in front of the real one that enforces it."""

from pathlib import Path

import pytest

from builder import arch
from builder.values import Capability

ROOT = Path(__file__).resolve().parents[2]


def capabilities(*texts: str) -> list[Capability]:
    return [Capability.parse(t) for t in texts]


def test_default_capabilities_become_two_sass_targets_and_the_newest_ptx() -> None:
    flags = arch.gencode(capabilities("10.0", "10.3", "12.0", "12.1"))
    assert flags.split("-gencode ")[1:] == [
        "arch=compute_100,code=sm_100 ",
        "arch=compute_120,code=sm_120 ",
        "arch=compute_120,code=compute_120",
    ]


@pytest.mark.parametrize("wanted", [("10.3",), ("10.0", "10.3"), ("10.3", "12.1")])
def test_there_is_never_sm_103_code(wanted: tuple[str, ...]) -> None:
    assert "103" not in arch.gencode(capabilities(*wanted))


def test_triton_gets_every_capability_by_itself() -> None:
    assert arch.triton_targets(capabilities("12.1", "10.3")) == (103, 121)
