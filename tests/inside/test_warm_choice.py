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


def test_limits_come_from_every_shipped_card() -> None:
    from blackwell import nullgpu
    from blackwell.warm.engine import card_limits

    limits = {card.name: card_limits(card) for card in nullgpu.cards().values()}
    assert limits, "no card profiles are shipped"
    assert all(value.threads in (1536, 2048) and value.registers == 65536 for value in limits.values())
