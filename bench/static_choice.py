"""The static choice, replayed on measurements: what it would choose now of configurations that were timed on a card.

  python bench/static_choice.py bench/results/first_step-*.json

Needs no card: the results of bench/first_step.py hold each configuration's registers, spills, shared memory and measured milliseconds.
Prints, for each kernel, the choice of the rule in builder/inside/blackwell/warm/choice.py against the best, and the sum. Standard library only.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "builder" / "inside"))

from blackwell import nullgpu  # noqa: E402
from blackwell.warm import choice  # noqa: E402
from blackwell.warm.engine import card_limits  # noqa: E402


def chosen(configs: list[Mapping[str, Any]], limits: choice.Limits) -> int:
    """Index of the rule's choice; a configuration without facts was rejected where it was compiled."""
    names = choice.KernelFacts.__dataclass_fields__
    facts = [
        None if c["registers"] is None else choice.KernelFacts(**{name: c[name] for name in names}) for c in configs
    ]
    groups = [repr(sorted((k, v) for k, v in c["config"].items() if k != "num_warps")) for c in configs]
    return choice.best(choice.scores(facts, groups, limits))


def replay(path: Path) -> Iterator[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]:
    """(program, kernel, chosen configuration, best configuration) of every autotuned kernel in a result of bench/first_step.py."""
    content = json.loads(path.read_text())
    limits = card_limits(nullgpu.card_named(content["facts"]["card"]))
    for program, kernels in content["autotuners"].items():
        for kernel in kernels:
            configs = kernel["configs"]
            yield program, kernel["kernel"], configs[chosen(configs, limits)], min(configs, key=lambda c: c["ms"])


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="first_step*.json")
    total = best_total = 0.0
    print(
        "| results | program | kernel | chosen ms | best ms | regret | chosen | best |\n|---|---|---|---|---|---|---|---|"
    )
    for path in parser.parse_args().results:
        for program, kernel, mine, best in replay(path):
            total, best_total = total + mine["ms"], best_total + best["ms"]
            print(
                f"| {path.stem} | {program} | {kernel} | {mine['ms']:.4f} | {best['ms']:.4f} | {mine['ms'] / best['ms'] - 1:+.0%} "
                f"| {json.dumps(mine['config'])} | {json.dumps(best['config'])} |"
            )
    print(f"\nAll kernels once: {total:.3f} ms as chosen, {best_total:.3f} ms at best: {total / best_total - 1:+.1%}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
