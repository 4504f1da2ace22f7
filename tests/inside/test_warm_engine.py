"""Order of the work, the verdict of the second pass, the command line's refusals, and the report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blackwell import cli, nullgpu
from blackwell.warm import child, engine, report
from test_warm_cubin import make_cubin

B200, B300, RTX, PRO = (
    "NVIDIA B200",
    "NVIDIA B300 SXM6 AC",
    "NVIDIA GeForce RTX 5090",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
)


def jobs(*cards: str, runs: tuple[str, ...] = ("a", "b")) -> list[engine.Job]:
    return [
        engine.Job(name=run, argv=("true",), card=nullgpu.card_named(card), timeout=9) for card in cards for run in runs
    ]


def outcome(card: str = B200, **changes: Any) -> child.Outcome:
    values: dict[str, Any] = {
        "argv": ("x",),
        "card": card,
        "exit_code": 0,
        "finished": True,
        "seconds": 1.0,
        "output": "",
        **changes,
    }
    return child.Outcome(**values)


def test_cards_of_one_capability_come_one_after_the_other() -> None:
    first, second = engine.waves(jobs(B200, RTX, PRO, B300))
    assert [[job.card.name for job in chain] for chain in first] == [[B200] * 2, [RTX] * 2, [B300] * 2]
    assert [[job.card.name for job in chain] for chain in second] == [[PRO] * 2]
    assert [job.name for job in first[0]] == ["a", "b"]


def fake_run(answer: Callable[[str], child.Outcome], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Replace running programs; returns a list that fills with (card, statically chosen?)."""
    calls: list[tuple[str, bool]] = []

    def run(argv: Any, environment: Any, *, card: str, limits: Any, **_: Any) -> child.Outcome:
        calls.append((card, limits is not None))
        return answer(card)

    monkeypatch.setattr(child, "run", run)
    monkeypatch.setattr(nullgpu, "environment", lambda card, count: {})
    return calls


SETTING = engine.Setting(cache=Path("/nowhere"), devices=1, jobs=2)
MISS = {"event": "kernel", "kernel": "add", "hit": False, "hash": "h"}


def test_a_warm_second_pass_is_quiet_and_only_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_run(lambda card: outcome(card, graphs={"fx_hit": 2}), monkeypatch)
    engine.check(jobs(B200), SETTING, strict_bypass=True)
    assert calls == [(B200, False)] * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kernels": (MISS,)}, "1 kernels compiled again (add)"),
        ({"graphs": {"fx_miss": 1}}, "1 compiled graphs not found"),
        ({"graphs": {"autograd_miss": 2}}, "2 compiled graphs not found"),
        ({"graphs": {"autograd_bypass": 1}}, "can't be cached"),
    ],
)
def test_every_kind_of_miss_fails_the_second_pass(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    fake_run(lambda card: outcome(card, **changes), monkeypatch)
    with pytest.raises(engine.WarmError) as caught:
        engine.check(jobs(B200, runs=("a",)), SETTING, strict_bypass=True)
    assert said in str(caught.value) and B200 in str(caught.value)


def test_a_users_graph_that_cannot_be_cached_is_not_our_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_run(lambda card: outcome(card, graphs={"autograd_bypass": 1}), monkeypatch)
    engine.check(jobs(B200), SETTING, strict_bypass=False)


def test_a_failing_program_stops_the_work_and_shows_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_run(lambda card: outcome(card, exit_code=1, finished=False, output="ZeroDivisionError"), monkeypatch)
    with pytest.raises(engine.WarmError, match=r"(?s)exit code 1.*ZeroDivisionError"):
        engine.warm(jobs(B200), SETTING)
    assert calls == [(B200, True)], "the chain ends at its first failure"


def test_max_autotune_is_said_by_name() -> None:
    assert "max-autotune" in str(outcome(exit_code=1, finished=False, refused=("max-autotune",)).problem)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "what for?"),
        (["--image"], "names no cards"),
        (["--card", "NVIDIA B2000"], "no card profile"),
        (["--card", B200, "--workload", "tyo"], "did you mean toy?"),
        (["--card", B200, "--workload", "toy", "--", "true"], "not both"),
        (["--card", B200, "--", "no-such-program"], "no program"),
    ],
)
def test_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.setenv("BLACKWELL_ROOT", str(tmp_path))
    assert cli.main(["warm", "--cache", str(tmp_path / "c"), *words]) == 1
    assert said in capsys.readouterr().err


def test_no_cache_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("BLACKWELL_CACHE", raising=False)
    assert cli.main(["warm", "--card", B200, "--json"]) == 1
    captured = capsys.readouterr()
    assert "BLACKWELL_CACHE is not set" in json.loads(captured.out)["error"]


def make_entry(cache: Path, directory: str, hash_: str, registers: int, frame: int) -> None:
    folder = cache / "triton" / directory
    folder.mkdir(parents=True)
    (folder / "add_kernel.cubin").write_bytes(make_cubin(registers, frame))
    target = {"backend": "cuda", "arch": 100, "warp_size": 32}
    metadata = {
        "name": "add_kernel",
        "hash": hash_,
        "target": target,
        "num_warps": 8,
        "num_stages": 3,
        "maxnreg": None,
        "shared": 512,
    }
    (folder / "add_kernel.json").write_text(json.dumps(metadata))


def test_the_report_joins_the_cache_with_what_the_runs_said(tmp_path: Path) -> None:
    make_entry(tmp_path, "AAA", "h1", registers=40, frame=16)
    first = outcome(
        kernels=({**MISS, "hash": "h1", "seconds": 1.5, "specialization": {"signature": {"x": "*fp32"}}}, {**MISS, "hash": "elsewhere", "seconds": 1}),
        choices=(
            {
                "event": "choice", "kernel": "add_kernel", "key": ["64"], "arch": 100, "how": "static", "chosen": {"BLOCK": 16},
                "configs": [{"config": {"BLOCK": 16}, "score": [0, 0, 0]}, {"config": {"BLOCK": 512}, "rejected": "OutOfResources: shared memory"}],
            },
        ),
    )  # fmt: skip
    again = outcome(B300, kernels=({"kernel": "add_kernel", "hit": True, "hash": "h1"},))
    made = report.make(tmp_path, [("toy/a", first), ("toy/b", again)], {}, {"cards": [B200]})
    (kernel,) = made["kernels"]
    assert (kernel["registers"], kernel["spills"], kernel["shared_bytes"]) == (40, 4, 512)
    assert (kernel["config"], kernel["compile_seconds"], kernel["cards"], kernel["runs"]) == (
        {"num_warps": 8, "num_stages": 3}, 1.5, [B200, B300], ["toy/a", "toy/b"],
    )  # fmt: skip
    assert made["rejected"] == [
        {
            "kernel": "add_kernel",
            "key": ["64"],
            "card": B200,
            "config": {"BLOCK": 512},
            "reason": "OutOfResources: shared memory",
        }
    ]
    later = report.make(
        tmp_path, [("mine", outcome(kernels=({"kernel": "add_kernel", "hit": True, "hash": "h1"},)))], made, {}
    )
    (kernel,) = later["kernels"]
    assert kernel["compile_seconds"] == 1.5 and kernel["runs"] == ["toy/a", "toy/b", "mine"], (
        "an earlier report is continued"
    )
    assert later["choices"] == made["choices"] and len(later["runs"]) == 3


def test_labels(tmp_path: Path) -> None:
    cache = tmp_path / "0123456789abcdef"
    make_entry(cache, "AAA", "h1", 1, 1)
    made = report.make(cache, [], {}, {})
    text = "ptxas: NVIDIA (R) Ptx optimizing assembler\nCuda compilation tools, release 13.1, V13.1.80\n"
    labels = report.summary(cache, made, [B200, RTX], report.assembler_label({"ptxas-blackwell": text}))
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    assert labels == {
        "cache.fingerprint": "0123456789abcdef",
        "cache.entries": 1,
        "cache.bytes": size,
        "cache.assembler": "ptxas-blackwell 13.1.80",
        "cache.cards": f"{B200}, {RTX}",
    }
