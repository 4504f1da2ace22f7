"""Known-bad rules: when a condition holds, and that every trap about versions or capabilities has a rule that speaks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.plan import Request, resolve
from builder.rules import applies, facts, holds, speaking
from builder.values import Capability, Condition, Matrix, Rule, Verdict

DEFAULT = {
    "cuda": "13.0",
    "torch": "2.12.1",
    "triton": "3.7.1",
    "fla": "0.6.0",
    "conv1d": "1.7.0",
    "transformers": "5.24.0",
    "python": "3.13",
    "base": "trixie",
    "platform": "linux/amd64",
    "override": "false",
}
ALL = ("10.0", "10.3", "12.0", "12.1")


def capabilities(*texts: str) -> tuple[Capability, ...]:
    return tuple(map(Capability.parse, texts))


def verdicts(matrix: Matrix, over: dict[str, str], texts: tuple[str, ...] = ALL) -> dict[str, str]:
    """Verdict by rule for an image like the default one, with other versions."""
    return {rule.id: rule.verdict for rule in speaking(matrix.rules, {**DEFAULT, **over}, capabilities(*texts))}


# --- conditions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "wanted", "value", "expected"),
    [
        ("triton", "<=3.6", "3.6.0", True),
        ("triton", "==3.7.*", "3.7.1", True),
        ("triton", "==3.7.*", "3.70.0", False),
        ("triton", ">=3.6,<3.8", "3.8.0", False),
        ("triton", ">=3.9", "3.10.0", True),
        ("triton", ">=3.8", "3.8.0rc1", False),
        ("triton", ">3.7", "3.8.0rc1", True),
        ("conv1d", "<1.7.0", "1.6.2.post1", True),
        ("conv1d", ">=0", "none", False),
        ("conv1d", "none", "none", True),
        ("conv1d", "none", "1.7.0", False),
        ("base", "trixie", "trixie", True),
        ("base", "trixie", "bookworm", False),
        ("platform", "linux/arm64", "linux/amd64", False),
        ("override", "true", "true", True),
    ],
)
def test_one_part_of_a_condition(axis: str, wanted: str, value: str, expected: bool) -> None:
    assert holds(axis, wanted, value) is expected


def test_every_part_must_hold() -> None:
    condition = Condition(where=(("fla", "<=0.5.1"), ("triton", ">=3.6")), capabilities=capabilities("10.0", "10.3"))
    assert applies(condition, {"fla": "0.5.1", "triton": "3.6.0"}, capabilities("10.3", "12.0"))
    assert not applies(condition, {"fla": "0.5.2", "triton": "3.6.0"}, capabilities("10.3"))
    assert not applies(condition, {"fla": "0.5.1", "triton": "3.5.0"}, capabilities("10.3"))
    assert not applies(condition, {"fla": "0.5.1", "triton": "3.6.0"}, capabilities("12.0", "12.1"))


def test_what_is_not_known_never_holds() -> None:
    assert not applies(Condition(where=(("triton", ">=0"),)), {"fla": "0.6.0"}, ())


versions = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))


@given(versions, versions)
def test_versions_are_compared_as_numbers(a: tuple[int, int, int], b: tuple[int, int, int]) -> None:
    left, right = ".".join(map(str, a)), ".".join(map(str, b))
    assert holds("torch", f"<={right}", left) == (a <= b)
    assert holds("torch", f">{right}", left) == (a > b)


@given(st.sets(st.sampled_from(ALL)), st.sets(st.sampled_from(ALL), min_size=1))
def test_a_condition_wants_one_of_its_capabilities(have: set[str], wanted: set[str]) -> None:
    assert applies(Condition(capabilities=capabilities(*wanted)), {}, capabilities(*have)) == bool(have & wanted)


def test_refusals_come_first_and_the_rest_keeps_its_order() -> None:
    def rule(name: str, verdict: Verdict) -> Rule:
        return Rule(id=name, when=Condition(where=(("fla", ">=0"),)), verdict=verdict, sentence="", url="", instead="")

    rules = [rule("a", "warn"), rule("b", "refuse"), rule("c", "warn"), rule("d", "refuse")]
    assert [spoken.id for spoken in speaking(rules, DEFAULT, ())] == ["b", "d", "a", "c"]


def test_facts_of_an_image(matrix: Matrix) -> None:
    assert facts(resolve(matrix, Request(triton="3.7"))) == DEFAULT
    assert facts(resolve(matrix, Request(torch="2.11", triton="3.7")))["override"] == "true"


# --- every trap about versions or capabilities -------------------------------------------------------------------------

# Rule, verdict, versions for which it must speak, capabilities, versions for which it must be silent.
TRAPS: list[tuple[str, str, dict[str, str], tuple[str, ...], dict[str, str]]] = [
    ("triton-autotuner-race", "note", {"triton": "3.6.0"}, ("12.0",), {"triton": "3.5.1"}),
    ("triton-autotuner-race", "note", {"triton": "3.9.1"}, ("12.0",), {"triton": "3.10.0"}),
    ("triton-3.7.0-nondeterministic", "warn", {"torch": "2.12.0", "triton": "3.7.0"}, ("10.0",), {"triton": "3.7.1"}),
    ("fla-gated-delta-rule-race", "refuse", {"fla": "0.5.1", "triton": "3.6.0"}, ("10.0",), {"fla": "0.5.2"}),
    (
        "fla-gated-delta-rule-race",
        "refuse",
        {"fla": "0.4.2", "triton": "3.7.1"},
        ("10.3",),
        {"fla": "0.4.2", "triton": "3.8.0"},
    ),
    ("fla-output-kernel-race", "warn", {"fla": "0.5.2"}, ("10.0",), {"fla": "0.6.0"}),
    ("fla-unaware-of-sm-12x", "refuse", {"fla": "0.5.0"}, ("12.0",), {"fla": "0.5.1"}),
    ("fla-unaware-of-sm-12x", "refuse", {"fla": "0.4.2"}, ("12.1",), {"fla": "0.6.0"}),
    (
        "fla-import-with-triton-3.9",
        "refuse",
        {"fla": "0.5.2", "triton": "3.9.0"},
        ("12.0",),
        {"fla": "0.6.0", "triton": "3.9.0"},
    ),
    ("fla-conv-retunes", "warn", {"fla": "0.5.2"}, ("12.0",), {"fla": "0.6.0"}),
    ("fla-ignores-cache-mode", "warn", {"fla": "0.5.0"}, ("12.0",), {"fla": "0.5.1"}),
    ("fla-wants-newer-conv1d", "warn", {"conv1d": "1.6.2.post1"}, ("12.0",), {"conv1d": "1.6.2.post1", "fla": "0.5.2"}),
    ("triton-override", "warn", {"torch": "2.11.0", "override": "true"}, ("12.0",), {"torch": "2.11.0"}),
    ("triton-ptxas-path-ignored", "note", {"triton": "3.6.0"}, ("12.0",), {"triton": "3.5.1"}),
    ("triton-3.6-truncated-group-file", "note", {"triton": "3.6.0"}, ("12.0",), {"triton": "3.7.1"}),
    ("flex-backward-shared-memory", "note", {"torch": "2.15.0"}, ("12.0",), {"torch": "2.16.0"}),
    ("cuda-13-forward-compatibility", "note", {"cuda": "13.0"}, ("12.0",), {"cuda": "12.8"}),
    ("conv1d-wrong-sm-103-code", "note", {"conv1d": "1.6.1"}, ("10.3",), {"conv1d": "none"}),
    ("conv1d-wrong-sm-103-code", "note", {"conv1d": "1.7.0"}, ("10.3",), {"cuda": "12.8"}),
    ("conv1d-hard-coded-architectures", "note", {"conv1d": "1.7.0"}, ("12.0",), {"conv1d": "none"}),
]
# Rules about some GPUs are silent for an image without them.
SILENT = [
    ("fla-gated-delta-rule-race", {"fla": "0.5.1"}, ("12.0", "12.1")),
    ("fla-output-kernel-race", {"fla": "0.5.2"}, ("12.0", "12.1")),
    ("fla-unaware-of-sm-12x", {"fla": "0.5.0"}, ("10.0", "10.3")),
    ("flex-backward-shared-memory", {}, ("10.0", "10.3")),
    ("cuda-13-forward-compatibility", {}, ("10.0", "10.3")),
    ("conv1d-wrong-sm-103-code", {}, ("10.0", "12.0", "12.1")),
]


@pytest.mark.parametrize(("rule", "verdict", "versions", "texts", "silent"), TRAPS)
def test_a_trap_speaks(
    matrix: Matrix, rule: str, verdict: str, versions: dict[str, str], texts: tuple[str, ...], silent: dict[str, str]
) -> None:
    assert verdicts(matrix, versions, texts).get(rule) == verdict
    assert rule not in verdicts(matrix, silent, texts)


@pytest.mark.parametrize(("rule", "versions", "texts"), SILENT)
def test_a_trap_of_other_gpus_is_silent(
    matrix: Matrix, rule: str, versions: dict[str, str], texts: tuple[str, ...]
) -> None:
    assert rule in verdicts(matrix, versions, ALL)
    assert rule not in verdicts(matrix, versions, texts)


def test_every_rule_has_a_test(matrix: Matrix) -> None:
    assert {rule.id for rule in matrix.rules} == {trap[0] for trap in TRAPS}


def test_every_rule_says_where_it_is_from_and_what_to_do(matrix: Matrix) -> None:
    for rule in matrix.rules:
        assert rule.url.startswith("https://github.com/"), rule.id
        assert rule.sentence.endswith(".") and rule.instead.endswith("."), rule.id
        assert rule.instead not in rule.sentence, rule.id


def test_what_a_refusal_offers_is_in_the_matrix_and_not_refused(matrix: Matrix) -> None:
    image = resolve(matrix, Request(triton="3.7", fla="0.6.0"))
    assert all("FLA=0.6.0" in rule.instead for rule in matrix.rules if rule.verdict == "refuse")
    assert {rule.verdict for rule in image.rules} == {"note"}


def test_expected_verdicts_of_the_rows_that_must_work(matrix: Matrix) -> None:
    def spoken(**asked: Any) -> set[str]:
        return {rule.id for rule in resolve(matrix, Request(**asked)).rules}

    assert "triton-3.7.0-nondeterministic" in spoken(torch="2.12.0")
    assert "triton-3.7.0-nondeterministic" not in spoken(triton="3.7")
    assert "triton-override" in spoken(torch="2.11", triton="3.7")
    assert "triton-override" not in spoken(torch="2.11")
    assert {"fla-output-kernel-race", "fla-conv-retunes"} <= spoken(triton="3.7", fla="0.5.2")
    assert "cuda-13-forward-compatibility" not in spoken(cuda="12.8")
