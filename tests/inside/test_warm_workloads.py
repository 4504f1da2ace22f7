"""Workload files: the shipped ones load, and a wrong one names all that is wrong."""

import pytest
from blackwell.warm import workloads
from blackwell.warm.workloads import Workload, WorkloadError

GOOD = {"name": "w", "description": "d", "timeout": 10, "run": [{"name": "a", "argv": ["-c", "pass"]}]}


def test_shipped_workloads() -> None:
    known = workloads.load()
    assert {"toy", "qwen3.5-27b"} <= set(known)
    assert [workload.name for workload in workloads.select([], known)] == ["toy"], "an image build warms this by itself"


def test_toy_covers_both_shapes_packed_and_not() -> None:
    runs = {run.argv for run in workloads.load()["toy"].runs}
    assert {("--packed" in argv, argv[argv.index("--shape") + 1]) for argv in runs} == {
        (p, s) for p in (False, True) for s in ("toy", "odd")
    }


def test_all_errors_at_once_with_a_hint() -> None:
    wrong = {
        "name": "w",
        "descripton": "d",
        "timeout": 0,
        "run": [{"name": "a", "argv": "python x"}, {"name": "a", "argv": ["x"]}],
    }
    with pytest.raises(WorkloadError) as caught:
        Workload.from_dict(wrong, "w.toml")
    text = str(caught.value)
    for part in (
        "w.toml",
        "descripton is unknown (did you mean description?)",
        "description is missing",
        "run[0]",
        "'a' is used twice",
        "at least 1",
    ):
        assert part in text


def test_unknown_name_gets_a_suggestion() -> None:
    known = {"toy": Workload.from_dict(GOOD | {"name": "toy"}, "toy.toml")}
    with pytest.raises(WorkloadError, match="did you mean toy"):
        workloads.select(["tyo"], known)
