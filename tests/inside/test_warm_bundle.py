"""Bundles: what `tune` collects, a merge, and what a build takes from one and what it refuses."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
from blackwell.warm import bundle

ABOUT = {"card": "NVIDIA B200", "capability": "10.0", "triton": "3.7.1", "torch": "2.12.1"}
KEY = [64, "torch.bfloat16"]


def stored(block: int, warps: int = 4) -> dict[str, Any]:
    """A configuration as Triton 3.6 and 3.7 write it."""
    return {
        "kwargs": {"BLOCK": block},
        "num_warps": warps,
        "num_ctas": 1,
        "num_stages": 2,
        "maxnreg": None,
        "pre_hook": None,
        "ir_override": None,
    }


def flat(block: int, warps: int = 4) -> dict[str, Any]:
    return {"BLOCK": block, "num_warps": warps, "num_ctas": 1, "num_stages": 2}


def write_result(cache: Path, directory: str, times: list[tuple[dict[str, Any], float]]) -> Path:
    path = cache / "triton" / directory / "kernel.autotune.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"key": KEY, "configs_timings": [[config, [ms] * 3] for config, ms in times]}))
    return path


def entry(*configs: tuple[dict[str, Any], float], **changes: str) -> bundle.Entry:
    return bundle.Entry(kernel="kernel", key=tuple(KEY), configs=configs, **{**ABOUT, **changes})


def choice(directory: str, arch: int = 100) -> dict[str, Any]:
    return {
        "kernel": "kernel",
        "key": [str(part) for part in KEY],
        "arch": arch,
        "directory": directory,
        "how": "static",
    }


def test_collect_takes_measured_files_and_not_baked_links(tmp_path: Path) -> None:
    baked = write_result(tmp_path / "baked", "BAKED", [(stored(16), 1.0)])
    write_result(tmp_path, "MINE", [(stored(16), 0.5), (stored(32), math.inf)])
    (tmp_path / "triton" / "BAKED").mkdir()
    (tmp_path / "triton" / "BAKED" / baked.name).symlink_to(baked)
    assert bundle.collect(tmp_path / "triton", **ABOUT) == [entry((flat(16), 0.5), (flat(32), math.inf))]


def test_a_bundle_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    entries = [entry((flat(16), 0.5), (flat(32), math.inf))]
    path.write_text(bundle.dumps(entries))
    assert "Infinity" not in path.read_text(), "not JSON"
    assert bundle.load(path) == entries


def test_merge_keeps_the_later_of_the_same_and_all_others() -> None:
    old, new, other = entry((flat(16), 1.0)), entry((flat(16), 2.0)), entry((flat(16), 3.0), card="NVIDIA B300")
    assert bundle.merge([[old, other], [new]]) == [new, other]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 1}', '{"format": 1, "entries": [{"card": "x"}]}', '{"format": 99, "entries": []}']
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(bundle.BundleError, match=r"b\.json"):
        bundle.load(tmp_path / "b.json")
    with pytest.raises(bundle.BundleError, match="can't be read"):
        bundle.load(tmp_path / "none.json")


def test_a_measured_choice_wins_in_its_own_capability_only(tmp_path: Path) -> None:
    mine = write_result(tmp_path, "MINE", [(stored(16), 0.0), (stored(32), 1.0)])
    other = write_result(tmp_path, "OTHER", [(stored(16), 0.0), (stored(32), 1.0)])
    before = other.read_text()
    choices = [choice("MINE"), choice("OTHER", arch=120)]
    problems = bundle.apply(
        tmp_path, choices, [entry((flat(16), 0.9), (flat(32), 0.3))], cards=["NVIDIA B200"], triton="3.7.1"
    )
    assert problems == []
    assert bundle.read_times(mine) == (tuple(KEY), [(flat(16), 0.9), (flat(32), 0.3)])
    assert (choices[0]["how"], choices[0]["chosen"], choices[0]["measured_on"]) == ("measured", flat(32), "NVIDIA B200")
    assert other.read_text() == before
    assert choices[1]["how"] == "static"


def test_a_configuration_that_was_not_measured_is_not_chosen(tmp_path: Path) -> None:
    path = write_result(tmp_path, "MINE", [(stored(16), 0.0), (stored(32), 1.0)])
    bundle.apply(tmp_path, [choice("MINE")], [entry((flat(32), 0.3))], cards=["NVIDIA B200"], triton="3.7.1")
    assert bundle.read_times(path)[1] == [(flat(16), math.inf), (flat(32), 0.3)]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (entry((flat(64), 0.1), (flat(16), 0.2)), "not in the kernel's own list"),
        (entry((flat(16, warps=32), 0.1)), "not in the kernel's own list"),
        (entry((flat(16), 0.1), triton="3.6.0"), "measured with Triton 3.6.0"),
        (bundle.Entry(kernel="gone", key=(1,), configs=((flat(16), 0.1),), **ABOUT), "no such kernel"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(tmp_path: Path, given: bundle.Entry, reason: str) -> None:
    path = write_result(tmp_path, "MINE", [(stored(16), 0.0), (stored(32), 1.0)])
    before = path.read_text()
    problems = bundle.apply(tmp_path, [choice("MINE")], [given], cards=["NVIDIA B200"], triton="3.7.1")
    assert len(problems) == 1 and reason in problems[0]
    assert path.read_text() == before


def test_of_two_cards_of_one_capability_the_first_named_wins(tmp_path: Path) -> None:
    path = write_result(tmp_path, "MINE", [(stored(16), 0.0), (stored(32), 1.0)])
    entries = [entry((flat(16), 0.1), (flat(32), 0.2)), entry((flat(16), 0.9), (flat(32), 0.8), card="B")]
    for cards, best in ((["NVIDIA B200", "B"], 0.1), (["B", "NVIDIA B200"], 0.8)):
        bundle.apply(tmp_path, [choice("MINE")], entries, cards=cards, triton="3.7.1")
        assert min(ms for _, ms in bundle.read_times(path)[1]) == best


def test_other_cards_entries_are_silently_not_for_this_build(tmp_path: Path) -> None:
    assert bundle.apply(tmp_path, [], [entry((flat(16), 0.1))], cards=["NVIDIA B300"], triton="3.7.1") == []


def test_an_image_takes_the_bundles_in_its_sources_and_the_one_that_is_asked_for_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blackwell import paths, warm

    parser = argparse.ArgumentParser()
    warm.add_arguments(parser)
    monkeypatch.setattr(paths, "data", lambda kind: tmp_path / kind)
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles" / "README.md").write_text("not a bundle")
    for name, ms in (("bundles/a", 0.1), ("bundles/b", 0.2), ("asked", 0.3)):
        (tmp_path / f"{name}.json").write_text(bundle.dumps([entry((flat(16), ms))]))

    def chosen(*words: str) -> list[float]:
        args = parser.parse_args(words)
        return [found.configs[0][1] for found in bundle.merge(map(bundle.load, warm._bundles(args)))]

    assert chosen("--image") == [0.2]
    assert chosen("--image", "--bundle", str(tmp_path / "asked.json")) == [0.3]
    assert chosen("--card", "NVIDIA B200") == []


def test_tune_refuses_without_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from blackwell import cli, nullgpu

    monkeypatch.setattr(nullgpu, "driver_visible", lambda: False)
    assert cli.main(["tune", "--out", str(tmp_path / "b.json")]) == 1
    assert "no NVIDIA driver" in capsys.readouterr().err
    assert not (tmp_path / "b.json").exists()


def test_tune_merges(tmp_path: Path) -> None:
    from blackwell import cli

    for name, card in (("a", "A"), ("b", "B")):
        (tmp_path / f"{name}.json").write_text(bundle.dumps([entry((flat(16), 0.1), card=card)]))
    out = tmp_path / "all.json"
    assert cli.main(["tune", "--merge", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(out)]) == 0
    assert [found.card for found in bundle.load(out)] == ["A", "B"]
