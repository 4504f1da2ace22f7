"""The static choice: occupancy against numbers worked out by hand, and the order of its criteria."""

import pytest
from blackwell.warm import choice
from blackwell.warm.choice import KernelFacts, Limits

SM_100 = Limits(threads=2048, registers=65536, shared=233472, blocks=32, reserved_shared=1024)
SM_120 = Limits(threads=1536, registers=65536, shared=102400, blocks=24, reserved_shared=1024)


def facts(registers: int = 32, spills: int = 0, shared: int = 0, warps: int = 4) -> KernelFacts:
    return KernelFacts(registers=registers, spills=spills, shared=shared, warps=warps)


@pytest.mark.parametrize(
    ("kernel", "limits", "expected"),
    [
        (facts(registers=32), SM_100, 1.0),  # 16 blocks of 128 threads fill 2048
        (facts(registers=128), SM_100, 16 / 64),  # 4096 registers a warp: 16 warps
        (facts(registers=255, warps=8), SM_100, 8 / 64),  # 8192 a warp: 8 warps, one block
        (facts(registers=32, shared=100_000), SM_100, 2 * 4 / 64),  # two blocks of 101,024 bytes
        (facts(registers=32, shared=100_000), SM_120, 1 * 4 / 48),
        (facts(registers=32, warps=1), SM_120, 24 / 48),  # 24 blocks is the most
        (facts(registers=255, warps=16), SM_100, 0.0),  # 16 warps of 8192 registers don't fit
        (facts(shared=240_000), SM_100, 0.0),
    ],
)
def test_occupancy(kernel: KernelFacts, limits: Limits, expected: float) -> None:
    assert choice.occupancy(kernel, limits) == pytest.approx(expected)


def chosen(*candidates: KernelFacts, limits: Limits = SM_100) -> int:
    return choice.best([choice.score(kernel, limits, order) for order, kernel in enumerate(candidates)])


def test_spills_count_more_than_occupancy() -> None:
    assert chosen(facts(registers=64, spills=40), facts(registers=255, warps=8)) == 1


def test_a_few_spilled_registers_are_as_good_as_none() -> None:
    assert chosen(facts(registers=64, spills=choice.SPILL_STEP - 1), facts(registers=255, warps=8)) == 0


def test_more_occupancy_than_enough_is_worth_nothing() -> None:
    assert chosen(facts(registers=128), facts(registers=32)) == 0, "both have enough: the author's order decides"


def test_too_little_occupancy_loses() -> None:
    assert chosen(facts(shared=150_000), facts(shared=40_000)) == 1


def test_middling_blocks_before_the_authors_order() -> None:
    assert chosen(facts(warps=1), facts(warps=8), facts(warps=4)) == 2


def test_equal_candidates_keep_the_authors_order() -> None:
    assert chosen(facts(), facts(), facts()) == 0


def test_what_does_not_fit_is_never_chosen() -> None:
    assert chosen(facts(shared=240_000), facts(spills=1000)) == 1
    assert choice.score(facts(shared=240_000), SM_100, 0) == [choice.REJECTED] * 3


def chosen_of(*candidates: KernelFacts | None, groups: str = "") -> int:
    return choice.best(choice.scores(candidates, groups or ["same"] * len(candidates), SM_100))


def test_warps_that_repeat_each_others_work_lose() -> None:
    """Facts and times of FLA's kkt_solve kernel on an H200: 0.083, 0.143 and 0.262 ms."""
    kkt = [facts(registers=r, shared=s, warps=w) for r, s, w in ((232, 3584, 1), (232, 4096, 2), (234, 4096, 4))]
    assert chosen_of(*kkt) == 0
    assert chosen_of(*reversed(kkt)) == 2, "whatever the author's order"
    assert chosen(*kkt) == 2, "without the comparison the middling block would win"


def test_warps_that_share_work_are_judged_as_before() -> None:
    """FLA's recompute_w_u on an H200: 0.077, 0.071 and 0.074 ms; a thread's registers fall as warps double."""
    assert chosen_of(facts(registers=238, warps=2), facts(registers=110, warps=4), facts(registers=60, warps=8)) == 1


def test_fewer_warps_that_spill_prove_nothing() -> None:
    """FLA's prepare_wy_repr_bwd: 255 registers and 214 spills with two warps (0.294 ms), 250 and none with four (0.215 ms)."""
    assert chosen_of(facts(registers=255, spills=214, warps=2), facts(registers=250, warps=4)) == 1


def test_only_configurations_that_differ_in_warps_alone_are_compared() -> None:
    small, large = facts(registers=32, warps=1), facts(registers=32, warps=4)
    assert chosen_of(small, large, groups="aa") == 0
    assert chosen_of(small, large, groups="ab") == 1


def test_rejected_ones_are_no_measure_and_no_choice() -> None:
    assert chosen_of(None, facts(warps=4), None) == 1
    assert choice.scores([None], ["a"], SM_100) == [[choice.REJECTED] * 3]


def test_limits_come_from_every_shipped_card() -> None:
    from blackwell import nullgpu
    from blackwell.warm.engine import card_limits

    limits = {card.name: card_limits(card) for card in nullgpu.cards().values()}
    assert limits, "no card profiles are shipped"
    assert all(value.threads in (1536, 2048) and value.registers == 65536 for value in limits.values())
