"""The frozen values: capabilities, identifiers, checksums."""

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.plan import Request, images, resolve
from builder.values import Capability, Distribution, Lock, Matrix, checksum


@pytest.mark.parametrize("text", ["", "12", "12.", ".0", "a.b", "12.0.1", "12,0", "sm_120", "-1.0", "12.0 "])
def test_what_is_no_capability(text: str) -> None:
    with pytest.raises(ValueError, match="no compute capability"):
        Capability.parse(text)


@given(st.integers(0, 99), st.integers(0, 9))
def test_a_capability_survives_text(major: int, minor: int) -> None:
    capability = Capability(major=major, minor=minor)
    assert Capability.parse(str(capability)) == capability
    assert capability.sm == f"sm_{major}{minor}"


def test_capabilities_sort_as_numbers() -> None:
    texts = ["12.1", "10.3", "9.0", "12.0", "10.0"]
    assert [str(c) for c in sorted(map(Capability.parse, texts))] == ["9.0", "10.0", "10.3", "12.0", "12.1"]


def test_values_are_frozen(matrix: Matrix) -> None:
    image = resolve(matrix, Request(triton="3.7"))
    with pytest.raises(FrozenInstanceError):
        image.conv1d = "none"  # type: ignore[misc]


def test_identifiers_are_unique_and_fit_a_tag(matrix: Matrix) -> None:
    plan = [image for platform in matrix.platforms for image in images(matrix, platform)]
    assert len({image.id for image in plan}) == len({image.lock_name for image in plan}) == len(plan)
    for image in plan:
        name = image.tag.partition(":")[2]
        assert image.tag == f"blackwell:{image.id}"
        assert len(name) <= 128
        assert name[0].isalnum() and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-_")


def test_capabilities_change_the_identifier_and_not_the_lock(matrix: Matrix) -> None:
    default = resolve(matrix, Request(triton="3.7"))
    chosen = resolve(matrix, Request(triton="3.7", capabilities=("12.0", "10.0")))
    assert default.id == default.lock_name == chosen.lock_name
    assert chosen.id == f"{default.id}-sm100-sm120"


def test_identifier_says_when_there_is_no_extension(matrix: Matrix) -> None:
    image = resolve(matrix, Request(cuda="12.8"))
    assert image.conv1d == "none"
    assert "-noconv1d-" in image.id


def test_another_platform_has_a_lock_of_its_own(matrix: Matrix) -> None:
    amd64 = resolve(matrix, Request(triton="3.7"))
    arm64 = resolve(matrix, Request(triton="3.7", platform="linux/arm64"))
    assert arm64.lock_name == f"{amd64.lock_name}-arm64"
    assert (amd64.arch, arm64.arch) == ("amd64", "arm64")


def test_versions_cover_every_axis(matrix: Matrix) -> None:
    versions = resolve(matrix, Request(triton="3.7")).versions
    assert set(versions) == {"cuda", "torch", "triton", "fla", "conv1d", "transformers", "python", "base"}
    assert all(versions.values())


@given(st.dictionaries(st.text(), st.integers()))
def test_checksum_ignores_the_order_of_keys(value: dict[str, int]) -> None:
    assert checksum(value) == checksum(dict(reversed(value.items())))


def test_checksum_sees_a_change() -> None:
    assert checksum({"a": 1}) != checksum({"a": 2})
    assert checksum({}).startswith("sha256:") and len(checksum({})) == len("sha256:") + 64


@pytest.fixture
def lock() -> Lock:
    def distribution(name: str, version: str, layer: str) -> Distribution:
        return Distribution(name=name, version=version, hashes=("sha256:0",), layer=layer)

    return Lock(
        name="x",
        inputs="sha256:1",
        epoch=1,
        platform="linux/amd64",
        base="sha256:2",
        debian=(),
        distributions=(
            distribution("torch", "2.12.1", "torch"),
            distribution("nvidia-cuda-nvcc", "13.0.88", "compiler"),
            distribution("ninja", "1.0", "tools"),
        ),
    )


def test_lock_knows_what_the_runtime_image_has(lock: Lock) -> None:
    assert lock.version("torch") == "2.12.1"
    assert lock.version("nvidia-cuda-nvcc") is None
    assert lock.version("ninja") is None
    assert [d.name for d in lock.layer("compiler")] == ["nvidia-cuda-nvcc"]


def test_lock_checksum_sees_every_pin(lock: Lock) -> None:
    other = replace(lock.distributions[0], version="2.12.0")
    assert replace(lock, distributions=(other, *lock.distributions[1:])).checksum != lock.checksum
