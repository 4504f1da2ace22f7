"""Look after the kernel cache: what is warm, what is damaged, why a kernel missed.

  blackwell kernels list [NAME]           what is warm, and for which GPU target
  blackwell kernels verify                find damage; exit code 1 when there is any
  blackwell kernels repair                remove just the damaged entries, and say what will recompile
  blackwell kernels relocate OLD NEW      make a cache that was copied from OLD to NEW valid there
  blackwell kernels explain KERNEL        which part of the key differs from when the cache was warmed

Without --cache, the image's baked cache is meant (BLACKWELL_CACHE). Example: blackwell kernels verify --json
"""

import argparse
import os
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from blackwell import paths
from blackwell.kernels.damage import Damage, verify_cache
from blackwell.kernels.sealing import seal
from blackwell.output import emit_json, emit_table, say

HELP = "list, verify, repair, relocate or explain the kernel cache"

__all__ = ["HELP", "Damage", "add_arguments", "run", "seal", "verify_cache"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the five actions."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--cache", type=Path, metavar="DIR", help="the directory that holds triton/ and inductor/")
    common.add_argument("--json", action="store_true", help="one JSON document on stdout")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", parents=[common], help="what is warm")
    listing.add_argument("name", nargs="?", help="only kernels whose name contains this")
    actions.add_parser("verify", parents=[common], help="find damage")
    actions.add_parser("repair", parents=[common], help="remove the damaged entries")
    moving = actions.add_parser("relocate", parents=[common], help="make a copied cache valid at its new place")
    moving.add_argument("old", help="absolute path at which the cache was built")
    moving.add_argument("new", help="absolute path at which it lies now")
    why = actions.add_parser("explain", parents=[common], help="why a kernel missed")
    why.add_argument("kernel", help="the kernel's function name")
    why.add_argument("--card", help="card name, as the NVIDIA driver reports it (default: ask torch)")
    why.add_argument("--capability", type=_capability, help="compute capability such as 12.0 (default: ask torch)")


def _capability(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability: write for example 12.0")
    return text


def run(args: argparse.Namespace) -> int:
    """Exit code 0, 1 for damage or a reason to miss, 2 when the question can't be answered."""
    cache = args.cache or (Path(args.new) if args.action == "relocate" else paths.baked_cache())
    if cache is None:
        say("blackwell kernels: no cache named: give --cache DIR, or set BLACKWELL_CACHE as the image does")
        return 2
    actions = {"list": _list, "verify": _verify, "repair": _repair, "relocate": _relocate, "explain": _explain}
    try:
        return actions[args.action](cache, args)
    except BrokenPipeError:
        raise
    except (FileNotFoundError, ValueError) as problem:
        text = str(problem)
    except PermissionError as problem:
        text = f"{problem.filename} can't be changed by user {os.geteuid()}; run as its owner"
    except OSError as problem:  # a read-only mount, a full disk, a file in a directory's place
        text = f"{problem.filename or cache}: {problem.strerror or problem}; nothing more was changed: put that right, then run it again"
    if args.json:
        emit_json({"error": text})
    say(f"blackwell kernels {args.action}: {text}")
    return 2


def _list(cache: Path, args: argparse.Namespace) -> int:
    from blackwell.kernels import entries

    if not cache.is_dir():
        raise FileNotFoundError(f"no kernel cache at {cache}: name its directory, or set BLACKWELL_CACHE")
    kernels = [k for k in entries.kernels(cache) if (args.name or "") in k.name]
    inductor = list(entries.inductor_files(cache))
    if args.json:
        triton = [asdict(k) | {"capability": k.capability} for k in kernels]
        emit_json({"cache": str(cache), "triton": triton, "inductor": [asdict(e) for e in inductor]})
        return 0
    if args.name and not kernels:
        say(f"no warm kernel's name contains {args.name!r}; `blackwell kernels list` prints all of {cache}")
        return 1
    header = ("KERNEL", "TARGET", "WARPS", "STAGES", "CUBIN", "REGS", "SPILLS", "SHARED", "SIGNATURE")
    emit_table(
        header,
        (
            (
                *(k.name, k.capability, k.num_warps, k.num_stages, k.cubin_bytes),
                *("?" if value is None else value for value in (k.registers, k.spills)),
                *(k.shared_bytes, " ".join(k.signature)),
            )
            for k in sorted(kernels, key=lambda k: (k.name, k.arch, k.num_warps))
        ),
    )
    if not args.name:
        counts = Counter(entry.kind for entry in inductor)
        print()
        emit_table(("INDUCTOR", "FILES"), sorted(counts.items()))
    return 0


def _verify(cache: Path, args: argparse.Namespace) -> int:
    from blackwell.kernels import sums

    damages = verify_cache(cache)
    sealed = sums.read_list(cache)
    if args.json:
        emit_json({"cache": str(cache), "sealed": sealed is not None, "damages": [asdict(d) for d in damages]})
    elif damages:
        emit_table(("FILE", "DAMAGE", "EFFECT", "DETAIL"), ((d.path, d.kind, d.effect, d.detail) for d in damages))
        say(f"{len(damages)} damaged; `blackwell kernels repair` removes just these entries")
    else:
        checked = (
            f"{len(sealed)} files as listed" if sealed is not None else "sound by structure (no checksum list here)"
        )
        print(f"{cache}: {checked}")
    return 1 if damages else 0


def _repair(cache: Path, args: argparse.Namespace) -> int:
    from blackwell.kernels.repair import repair

    removed = repair(cache)
    if args.json:
        emit_json({"cache": str(cache), "removed": [asdict(item) for item in removed]})
        return 0
    for item in removed:
        print(f"removed {item.entry}: {'; '.join(item.reasons)}")
    recompiles = sorted(item.recompiles for item in removed if item.recompiles)
    print(
        f"will be made again by the next run that needs it: {', '.join(recompiles)}"
        if recompiles
        else "nothing to make again"
    )
    return 0


def _relocate(cache: Path, args: argparse.Namespace) -> int:
    from blackwell.kernels.repair import relocate

    if not cache.is_dir():
        raise FileNotFoundError(f"no kernel cache at {cache}: copy it there first")
    changed = relocate(cache, args.old, args.new)
    if args.json:
        emit_json({"cache": str(cache), "changed": changed})
    else:
        print(f"{len(changed)} group files now point to {args.new}")
    return 0


def _explain(cache: Path, args: argparse.Namespace) -> int:
    from blackwell.kernels import explain

    present = explain.Card() if args.card and args.capability else explain.present_card()
    card = explain.Card(name=args.card or present.name, capability=args.capability or present.capability)
    answer = explain.explain(cache, args.kernel, card)
    if args.json:
        emit_json(answer)
    else:
        for reason in answer["reasons"]:
            print(f"- {reason}")
        if card.capability is None:
            say("no GPU in reach: the GPU target and the device name were not compared (--capability, --card)")
    return 1 if answer["differences"] or not answer["found"] else 0
