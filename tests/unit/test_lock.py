"""Locks: made from a resolver, written, read, refused when stale, damaged or incomplete."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from builder import lock
from builder.errors import LockStaleError, ResolveError
from builder.layout import layers
from builder.matrix import load
from builder.plan import Request, resolve
from builder.values import DebianPackage, Image, Lock

ROOT = Path(__file__).resolve().parents[2]
HASH = ("sha256:" + "0" * 64,)
DEBIAN = (DebianPackage(name="bash", version="5.2.37-2+b10"), DebianPackage(name="bsdutils", version="1:2.41.5"))


def image(**wanted: str) -> Image:
    return resolve(load(ROOT / "matrices"), Request(**wanted))


class Index:
    """A resolver over a few distributions; `loses` is what an override of Triton loses, as a flat override does."""

    def __init__(self, loses: str = "") -> None:
        self.loses = loses

    def __call__(
        self, requirements: Sequence[str], *, overrides: Sequence[str] = (), constraints: Sequence[str] = ()
    ) -> Mapping[str, tuple[str, tuple[str, ...]]]:
        pins = dict(r.split("==") if "==" in r else (r, "1.0") for r in requirements)
        if "torch" in pins:
            pins |= {"nvidia-cublas": "13.1", "triton": pins.get("triton", "3.6.0")}
        for name, version in (o.split("==") for o in overrides):
            if name in pins:
                pins[name] = version
            pins.pop(self.loses, None)
        return {name: (version, HASH) for name, version in pins.items()}


def made(wanted: Image, index: Index | None = None) -> Lock:
    return lock.make(wanted, layers(), index or Index(), DEBIAN, 1_796_000_000)


def test_what_is_written_is_read_back() -> None:
    first = made(image(triton="3.7"))
    text = lock.dumps(first)
    again = lock.loads(text, where="x.lock.toml")
    assert again == first
    assert lock.dumps(again) == text
    assert again.checksum == first.checksum


def test_a_lock_names_no_index() -> None:
    for path in (ROOT / "matrices" / "locks").glob("*.toml"):
        assert "://" not in path.read_text(), path


def test_every_committed_lock_is_fresh_and_every_layer_known() -> None:
    matrix = load(ROOT / "matrices")
    paths = sorted((ROOT / "matrices" / "locks").glob("*.lock.toml"))
    assert paths
    for path in paths:
        found = lock.loads(path.read_text(), where=path.name)
        wanted = resolve(matrix, Request(id=found.name))
        lock.check(found, wanted, layers())
        assert found.version("torch") == wanted.stack.torch
        assert found.version("triton") == wanted.stack.triton
        assert found.version("fla-core") == wanted.fla.version
        assert bool(found.layer("extensions")) == (wanted.conv1d != "none")


@pytest.mark.parametrize("axis", [{"torch": "2.11"}, {"fla": "0.5.2"}, {"conv1d": "1.6"}, {"base": "bookworm"}])
def test_a_lock_of_another_row_is_stale(axis: dict[str, str]) -> None:
    other = image(**({"triton": "3.6"} if "torch" in axis else {"triton": "3.7", **axis}))
    with pytest.raises(LockStaleError, match="stale") as refused:
        lock.check(made(image(triton="3.7")), other, layers())
    assert "builder lock --id" in refused.value.hint


def test_a_change_of_the_layer_data_makes_a_lock_stale() -> None:
    wanted = image(triton="3.7")
    changed = replace(layers(), runtime=(*layers().runtime, "something"))
    with pytest.raises(LockStaleError):
        lock.check(made(wanted), wanted, changed)


def test_a_budget_does_not_make_a_lock_stale() -> None:
    wanted = image(triton="3.7")
    lock.check(made(wanted), replace(wanted, stack=replace(wanted.stack, budget_zstd_bytes=1)), layers())


def test_capabilities_do_not_make_a_lock_stale() -> None:
    lock.check(
        made(image(triton="3.7")),
        resolve(load(ROOT / "matrices"), Request(triton="3.7", capabilities=("12.0",))),
        layers(),
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t[: len(t) // 2],
        lambda t: t.replace("sha256:" + "0" * 64, "md5:1"),
        lambda t: t.replace("version = 1\n", "version = 99\n", 1),
        lambda t: t.split("[[distributions]]")[0],
        lambda t: t.replace("epoch", "epoche"),
        lambda t: "",
        lambda t: t.encode() + b"\xff",
        lambda t: t.replace("debian = [", "debian = [1,"),
        lambda t: t.replace("hashes = [", "hashes = [1,", 1),
        lambda t: t.replace("epoch = 1796000000", "epoch = inf"),
        lambda t: t.replace("epoch = 1796000000", "epoch = -1"),
        lambda t: t.replace("epoch = 1796000000", "epoch = 999999999999999"),
        lambda t: t.replace('name = "torch"', 'name = "torch --index-url=x"'),
        lambda t: "x = " + "[" * 5000,
    ],
)
def test_a_damaged_or_incomplete_lock_is_refused(damage) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LockStaleError) as refused:
        lock.loads(damage(lock.dumps(made(image(triton="3.7")))), where="matrices/locks/x.lock.toml")
    assert "builder lock --id x" in refused.value.hint


LOST: dict[str, Callable[[Lock], Lock]] = {
    "its last distribution": lambda x: replace(x, distributions=x.distributions[:-1]),
    "half of them": lambda x: replace(x, distributions=x.distributions[: len(x.distributions) // 2]),
    "its tools": lambda x: replace(x, distributions=tuple(d for d in x.distributions if d.layer != "tools")),
    "another torch": lambda x: replace(x, distributions=tuple(replace(d, version="2.0") if d.name == "torch" else d for d in x.distributions)),
    "another platform": lambda x: replace(x, platform="linux/arm64"),
    "another base": lambda x: replace(x, base="bookworm"),
    "no Debian packages": lambda x: replace(x, debian=()),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOST)
@pytest.mark.parametrize("wanted", [{"triton": "3.7"}, {"torch": "2.11", "triton": "3.7"}, {"cuda": "12.8"}])
def test_a_lock_that_was_cut_off_or_edited_is_refused(kind: str, wanted: dict[str, str]) -> None:
    """A lock cut off between two entries is good TOML; the inputs that it names are still right."""
    cell = image(**wanted)
    whole = lock.loads(lock.dumps(made(cell)), where="x")
    lock.check(whole, cell, layers())
    with pytest.raises(LockStaleError, match="edited or cut off") as refused:
        lock.check(LOST[kind](whole), cell, layers())
    assert "builder lock --id" in refused.value.hint


def test_an_override_changes_triton_alone() -> None:
    wanted = image(torch="2.11", triton="3.7")
    assert wanted.stack.override
    assert made(wanted).version("triton") == wanted.stack.triton


def test_an_override_that_loses_a_runtime_package_is_refused() -> None:
    """A flat override drops cuda-toolkit's extras and with them runtime packages (comfy-cli#413)."""
    with pytest.raises(ResolveError, match="nvidia-cublas"):
        made(image(torch="2.11", triton="3.7"), Index(loses="nvidia-cublas"))


def test_requirements_carry_every_hash() -> None:
    found = made(image(triton="3.7"))
    text = lock.requirements_text(found.distributions)
    assert text.count("--hash=") == len(found.distributions)
