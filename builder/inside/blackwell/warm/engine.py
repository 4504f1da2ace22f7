"""The work of `blackwell warm`: which runs on which cards, in what order, and whether a second pass finds everything warm."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from blackwell import nullgpu
from blackwell.output import say
from blackwell.warm import child, choice

T = TypeVar("T")
R = TypeVar("R")

BYTES_A_PROCESS = 3 << 30
"""Memory to count on for one watched process: torch, Triton's compiler and their caches."""


class WarmError(Exception):
    """The caches could not be warmed, or a second pass did not find them warm. The text says what happened, why, and what to do next."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program to run under the null GPU of one card."""

    name: str  # "toy/odd-packed", or the user's script
    argv: tuple[str, ...]
    card: nullgpu.Card
    timeout: float


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs share."""

    cache: Path
    devices: int
    jobs: int
    directory: Path | None = None  # where the programs run; None: here
    as_a_job: bool = False  # leave the caches' places to the environment and the start-up hook's overlay, as for a job


def default_jobs() -> int:
    """How many programs to run at once: by cores and by free memory, at least one."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        free = BYTES_A_PROCESS
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return max(1, min(len(os.sched_getaffinity(0)), free // BYTES_A_PROCESS))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def card_limits(card: nullgpu.Card) -> choice.Limits:
    """What a static choice needs to know of the card."""
    try:
        return choice.Limits.of({**card.inherited, **card.attributes})
    except KeyError as error:
        raise WarmError(
            f"the profile of {card.name} lacks {error}, which choices without a GPU are made from: take a profile of `blackwell doctor --profile`."
        ) from error


def waves(jobs: Sequence[Job]) -> list[list[list[Job]]]:
    """Jobs in waves of chains: chains of a wave run side by side, the jobs of a chain one after the other.

    The first wave has one card for each compute capability, because Triton's kernels are the same for all cards of one: the other cards
    then find them, and only Inductor's part is left to do.
    """
    by_card: dict[str, list[Job]] = {}
    for job in jobs:
        by_card.setdefault(job.card.name, []).append(job)
    first: dict[str, list[Job]] = {}
    later: list[list[Job]] = []
    for chain in by_card.values():
        capability = chain[0].card.capability
        if capability in first:
            later.append(chain)
        else:
            first[capability] = chain
    return [wave for wave in (list(first.values()), later) if wave]


def warm(jobs: Sequence[Job], setting: Setting) -> list[tuple[str, child.Outcome]]:
    """Fill the caches. Raises WarmError at the first program that fails."""
    progress = Progress(len(jobs), "warm")
    results: list[tuple[str, child.Outcome]] = []
    for wave in waves(jobs):
        threads = max(1, setting.jobs // min(len(wave), setting.jobs))

        def chain_of(chain: list[Job], threads: int = threads) -> list[tuple[str, child.Outcome]]:
            return [(job.name, _run(job, setting, progress, card_limits(job.card), threads)) for job in chain]

        results += [outcome for outcomes in _side_by_side(chain_of, wave, setting.jobs) for outcome in outcomes]
    return results


def check(jobs: Sequence[Job], setting: Setting, strict_bypass: bool) -> list[tuple[str, child.Outcome]]:
    """Run everything again in new processes. Raises WarmError when anything was compiled; `strict_bypass`: or can't be cached."""
    progress = Progress(len(jobs), "check")
    results = _side_by_side(lambda job: (job.name, _run(job, setting, progress, None, 1)), jobs, setting.jobs)
    cold = []
    for name, outcome in results:
        what = []
        if outcome.misses:
            kernels = sorted(set(outcome.misses))
            what.append(
                f"{len(outcome.misses)} kernels compiled again ({', '.join(kernels[:5])}{', ...' if len(kernels) > 5 else ''})"
            )
        if outcome.graph_misses:
            what.append(f"{outcome.graph_misses} compiled graphs not found")
        if outcome.graph_bypasses and strict_bypass:
            what.append(f"{outcome.graph_bypasses} compiled graphs that can't be cached")
        if what:
            cold.append(f"{name} on {outcome.card}: {', '.join(what)}")
    if cold:
        raise WarmError(
            "a second pass in new processes did not find everything warm: "
            + "; ".join(cold)
            + ". Either this program was never warmed in this cache, or it takes other shapes "
            "or branches in every run: then fix its seeds and lengths. `blackwell kernels explain KERNEL` says which part of a key differs."
        )
    return results


def _run(job: Job, setting: Setting, progress: "Progress", limits: choice.Limits | None, threads: int) -> child.Outcome:
    environment = {**os.environ, **nullgpu.environment(job.card.name, setting.devices)}
    if not setting.as_a_job:
        environment = child.cache_environment(environment, setting.cache)
    outcome = child.run(
        job.argv,
        environment,
        card=job.card.name,
        timeout=job.timeout,
        limits=limits,
        threads=threads,
        directory=setting.directory,
    )
    if outcome.problem:
        raise WarmError(
            f"{job.name} on {job.card.name} {outcome.problem} after {outcome.seconds:.0f} s (null GPU: floats are garbage, so a program must "
            f"not stop at a bad loss). Its last output:\n{outcome.output.rstrip()}"
        )
    progress.done(job, outcome)
    return outcome


class Progress:
    """Counts finished runs on stderr."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what, self._done = total, what, 0

    def done(self, job: Job, outcome: child.Outcome) -> None:
        """One line for a finished run."""
        self._done += 1
        graphs = outcome.graphs
        found = graphs.get("fx_hit", 0) + graphs.get("autograd_hit", 0)
        say(
            f"blackwell {self._what} [{self._done}/{self._total}] {job.card.name}, {job.name}: {len(outcome.misses)} kernels compiled, "
            f"{outcome.hits} found; {outcome.graph_misses} graphs compiled, {found} found; {outcome.seconds:.0f} s"
        )


def _side_by_side(function: Callable[[T], R], items: Sequence[T], jobs: int) -> list[R]:
    """Results in the items' order; after the first error nothing more is started, and it is raised."""
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:  # also Ctrl-C: what still runs is no use any more
            for future in futures:
                future.cancel()
            child.stop_all()
            raise
