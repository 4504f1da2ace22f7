"""Choose an autotuner's configuration without a GPU, from what the compiled code tells. Standard library only.

The rule, most important first: few spilled registers, an occupancy that can hide memory latency, no warps that repeat each other's work, a
middling block size, the kernel author's order. It is a guess and is reported as `static`; `blackwell tune` on a card replaces it by
measurements. bench/static_choice.py replays it on what was measured.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

WARP = 32  # threads
REGISTER_UNIT = 256  # registers are given to a warp in units of this many
WARP_UNIT = 4  # and warps in fours, one for each scheduler of an SM
ENOUGH_OCCUPANCY = 0.25  # share of an SM's warps from which more hides no more latency, as a rule of thumb
SPILL_STEP = 8  # registers: fewer are as good as none, the compiler's own noise
MIDDLING_WARPS = 4
REJECTED = float("inf")

REPEATED = 1.6
"""From how many times the registers of a block with fewer warps on, warps are taken to repeat work instead of sharing it: shared work halves
a thread's registers when the warps double (1.0, and a little for what every thread needs), repeated work leaves them as they are (2.0).
Replayed on an H200's measurements (bench/results) anything from 1.4 to 1.9 chooses the same or as good."""

REPEATED_PENALTY = 10.0  # more than any distance from middling warps, which is at most 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one SM of the card has; the names of CUdevice_attribute, lower case."""

    threads: int  # max_threads_per_multiprocessor
    registers: int  # max_registers_per_multiprocessor
    shared: int  # max_shared_memory_per_multiprocessor, bytes
    blocks: int  # max_blocks_per_multiprocessor
    reserved_shared: int  # reserved_shared_memory_per_block, bytes

    @classmethod
    def of(cls, attributes: Mapping[str, int]) -> "Limits":
        """From a card profile's attributes. Raises KeyError for a missing one."""
        return cls(
            threads=attributes["max_threads_per_multiprocessor"],
            registers=attributes["max_registers_per_multiprocessor"],
            shared=attributes["max_shared_memory_per_multiprocessor"],
            blocks=attributes["max_blocks_per_multiprocessor"],
            reserved_shared=attributes["reserved_shared_memory_per_block"],
        )


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """One compiled configuration of a kernel."""

    registers: int  # a thread
    spills: int  # registers
    shared: int  # bytes a block
    warps: int  # a block


def occupancy(facts: KernelFacts, limits: Limits) -> float:
    """Share of an SM's warps that blocks of this kernel can keep resident, 0 to 1."""
    per_warp = -(-max(facts.registers, 1) * WARP // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = limits.registers // per_warp // WARP_UNIT * WARP_UNIT // facts.warps
    by_threads = limits.threads // (facts.warps * WARP)
    by_shared = (
        limits.shared // (facts.shared + limits.reserved_shared)
        if facts.shared + limits.reserved_shared
        else limits.blocks
    )
    blocks = min(limits.blocks, by_registers, by_threads, by_shared)
    return blocks * facts.warps * WARP / limits.threads


def score(facts: KernelFacts, limits: Limits, order: int) -> list[float]:
    """Three numbers to compare in order, smaller is better; they stand where an autotuner keeps times.

    `order` is the configuration's place in the author's list. A configuration of which not even one block fits an SM is REJECTED.
    """
    share = occupancy(facts, limits)
    if share == 0:
        return [REJECTED] * 3
    shortfall = max(0.0, ENOUGH_OCCUPANCY - share)
    distance = abs(facts.warps.bit_length() - MIDDLING_WARPS.bit_length())
    return [float(facts.spills // SPILL_STEP), shortfall, float(distance) + order / 10_000]


def scores(facts: Sequence[KernelFacts | None], groups: Sequence[Hashable], limits: Limits) -> list[list[float]]:
    """`score` of each configuration of a kernel, in the author's order; worse where its warps repeat each other's work.

    groups: configurations with equal ones differ in their number of warps alone. None for facts: the card would reject it.
    """
    return [
        [REJECTED] * 3
        if own is None
        else _with_penalty(own, score(own, limits, order), alike(facts, groups, groups[order]))
        for order, own in enumerate(facts)
    ]


def alike(facts: Sequence[KernelFacts | None], groups: Sequence[Hashable], group: Hashable) -> list[KernelFacts]:
    """The facts of a group."""
    return [one for one, its in zip(facts, groups, strict=True) if one is not None and its == group]


def _with_penalty(own: KernelFacts, value: list[float], group: Sequence[KernelFacts]) -> list[float]:
    fewer = [one for one in group if one.warps <= own.warps and one.spills // SPILL_STEP <= own.spills // SPILL_STEP]
    least = min(max(one.registers, 1) * one.warps for one in fewer)
    repeated = own.registers * own.warps >= REPEATED * least
    return [*value[:2], value[2] + (REPEATED_PENALTY if repeated else 0.0)]


def best(scores: Sequence[Sequence[float]]) -> int:
    """Index of the smallest score; the first of equal ones. Raises ValueError for none."""
    return min(range(len(scores)), key=lambda index: list(scores[index]))
