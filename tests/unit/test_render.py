"""Rendering is pure, strict, and puts nothing of the host into an image."""

from pathlib import Path

import jinja2
import pytest

from builder import lock, render
from builder.layout import ORDER, layers, removals
from builder.matrix import load
from builder.plan import Request, resolve

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (ROOT / "Dockerfile.j2").read_text()
LOCKS = sorted((ROOT / "matrices" / "locks").glob("*.lock.toml"))


def rendered(path: Path) -> dict[str, str]:
    found = lock.loads(path.read_text(), where=path.name)
    image = resolve(load(ROOT / "matrices"), Request(id=found.name))
    return dict(render.context(TEMPLATE, image, found, removals(), ["NVIDIA B200"]))


@pytest.mark.parametrize("path", LOCKS, ids=lambda p: p.name.removesuffix(".lock.toml"))
def test_same_lock_same_bytes(path: Path) -> None:
    assert rendered(path) == rendered(path)


@pytest.mark.parametrize("path", LOCKS, ids=lambda p: p.name.removesuffix(".lock.toml"))
def test_every_distribution_is_installed_by_exactly_one_layer(path: Path) -> None:
    found = lock.loads(path.read_text(), where=path.name)
    files = rendered(path)
    for distribution in found.distributions:
        if distribution.layer != "tools":
            holders = [
                n for n, t in files.items() if n.endswith("requirements.txt") and f"\n{distribution.name}==" in "\n" + t
            ]
            assert holders == [f"layers/{distribution.layer}/requirements.txt"]
            assert f"source=layers/{distribution.layer}," in files["Dockerfile"]


def test_an_undefined_name_is_an_error() -> None:
    path = LOCKS[0]
    found = lock.loads(path.read_text(), where=path.name)
    image = resolve(load(ROOT / "matrices"), Request(id=found.name))
    with pytest.raises(jinja2.UndefinedError):
        render.dockerfile(TEMPLATE + "{{ tritn }}", image, found)


def test_every_layer_has_a_place_in_the_order() -> None:
    assert sorted(ORDER) == sorted(name for name, _ in layers().patterns)


def test_a_layer_that_changes_seldom_comes_first() -> None:
    text = rendered(LOCKS[-1])["Dockerfile"]
    places = [text.index(f"source=layers/{name},") for name in ("cuda", "cudnn", "triton", "torch", "python", "fla")]
    assert places == sorted(places)


def test_secrets_are_mounts_and_never_arguments() -> None:
    text = rendered(LOCKS[0])["Dockerfile"]
    assert "type=secret,id=network" in text
    for word in ("PROXY", "INDEX", "proxy", "CERT"):
        assert word not in text


def test_removals_have_reasons_and_known_layers() -> None:
    for removal in removals():
        assert len(removal.reason) > 20
        assert removal.layer in ORDER
        assert removal.what in ("files", "symbols")
        assert not removal.glob.startswith("/") and ".." not in removal.glob
