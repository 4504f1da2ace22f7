"""The tiny DFlash training step: the proof that an image trains.

A frozen Qwen3.5 target is run on a batch, hidden states are tapped, and a small block-diffusion drafter learns to predict whole blocks
from them (arXiv 2602.06036). The same code runs on three devices:

  cuda  on the card, with FLA's and causal-conv1d's kernels and torch.compile(flex_attention)
  null  the compile-only step: the same under the null GPU, which shows the named card; results are garbage and not looked at
  cpu   really trains, through reference implementations in float32

Exit code: 0 passed; 1 the step failed or took a slow path; 3 --expect-warm met a kernel that had to be compiled.

Under torchrun every rank takes the step on a GPU of its own, and all share one kernel cache.

Example:  blackwell step --device null --card "NVIDIA B200" --expect-warm --json
          torchrun --nproc-per-node 4 -m blackwell step --expect-warm
"""

import argparse
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from blackwell import output
from blackwell.step.config import SHAPES, ColdKernel, StepConfig, StepError

HELP = "run the tiny DFlash training step and report losses, kernels, hits and misses"
EXIT_FAILED = 1
EXIT_COLD = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `blackwell step`."""
    parser.add_argument(
        "--device", choices=("cuda", "cpu", "null"), default="cuda", help="where to run (default: cuda)"
    )
    parser.add_argument(
        "--card", metavar="NAME", help="card the null GPU shows (default: the first one this image was made for)"
    )
    parser.add_argument(
        "--steps", type=int, default=2, metavar="N", help="optimizer steps, all on one batch (default: 2)"
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="toy", help="toy: S=256, N=8; odd: S=200, N=5 (default: toy)"
    )
    parser.add_argument("--packed", action="store_true", help="pack three documents into the row")
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="target replicas, one thread each (default: 1)"
    )
    parser.add_argument("--expect-warm", action="store_true", help="fail at the first kernel that has to be compiled")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Run the step and print the report; the exit code says whether it passed."""
    try:
        code = _run(args)
    except ColdKernel as error:
        code = _failed(args, error, EXIT_COLD)
    except StepError as error:
        code = _failed(args, error, EXIT_FAILED)
    except Exception as error:  # whatever it is, the answer stays JSON and the process ends by the way below
        traceback.print_exc()
        code = _failed(args, StepError(f"the step broke: {type(error).__name__}: {error}"), EXIT_FAILED)
    sys.stdout.flush()
    sys.stderr.flush()
    if args.device != "cpu" and "torch" in sys.modules:
        # An interpreter that has used the null GPU can hang or abort while shutting down, after all its work (shared with autograd's
        # threads); caches are written by now. Remove when warm processes exit by themselves on every supported torch.
        os._exit(code)
    return code


def _run(args: argparse.Namespace) -> int:
    null = _null_gpu_is_on()
    if args.device == "null" and not null:
        _become_null(args)
    if args.device == "cpu" and null:
        raise StepError("the null GPU is on, and --device cpu has no use for it: run without it.")
    if args.device == "cuda" and not null:
        os.environ.update(gpu_of_rank(os.environ))
    config = StepConfig(
        device="cpu" if args.device == "cpu" else "cuda",
        steps=args.steps,
        shape=SHAPES[args.shape],
        packed=args.packed,
        threads=args.threads,
        expect_warm=args.expect_warm,
    )
    from blackwell.step.train import Report, run_step

    report: Report = run_step(config, null=null)
    if args.json:
        output.emit_json(report.to_dict())
    else:
        output.emit_table(("what", "value"), list(output.flat(report.to_dict())))
    for problem in report.problems:
        output.say(f"blackwell step: {problem}")
    return EXIT_FAILED if report.problems else 0


def gpu_of_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """What to set so that this rank of torchrun sees its own GPU alone, as device 0; empty without torchrun.

    Device 0 on every rank is what was warmed: Inductor's keys hold the device's index. To be set before torch is imported. Raises StepError
    when LOCAL_RANK is no rank, or CUDA_VISIBLE_DEVICES names fewer GPUs than there are ranks; a single one is taken as already chosen for
    this rank.
    """
    if "LOCAL_RANK" not in environment or "LOCAL_WORLD_SIZE" not in environment:
        return {}
    try:
        rank = int(environment["LOCAL_RANK"])
    except ValueError:
        rank = -1
    if rank < 0:
        raise StepError(
            f"LOCAL_RANK={environment['LOCAL_RANK']} is no rank, so this process can't tell which GPU is its own. "
            "torchrun sets it to 0, 1, 2, ...; to run on one GPU alone, unset LOCAL_RANK."
        )
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return {"CUDA_VISIBLE_DEVICES": str(rank)}
    visible = [device for device in named.split(",") if device.strip()]
    if len(visible) == 1:
        return {}
    if rank >= len(visible):
        raise StepError(
            f"local rank {rank} of {environment['LOCAL_WORLD_SIZE']} has no GPU: CUDA_VISIBLE_DEVICES={named} names {len(visible)}. "
            f"Start {len(visible)} ranks, or make more GPUs visible."
        )
    return {"CUDA_VISIBLE_DEVICES": visible[rank]}


def _failed(args: argparse.Namespace, error: StepError, code: int) -> int:
    if args.json:
        output.emit_json({"device": args.device, "error": str(error), "problems": [str(error)]})
    output.say(f"blackwell step: {error}")
    return code


def _null_gpu_is_on() -> bool:
    from blackwell import nullgpu

    return bool(nullgpu.is_on())


def _become_null(args: argparse.Namespace) -> None:
    """Replace this process by the same command under the null GPU. Does not return."""
    from blackwell import nullgpu, paths

    card = args.card
    if card is None:
        try:
            card = paths.image_facts()["cards"][0]
        except (FileNotFoundError, KeyError, IndexError) as error:
            raise StepError(
                "which card should the null GPU show? Outside an image say it: --card 'NVIDIA B200'."
            ) from error
    command = [
        sys.executable,
        "-m",
        "blackwell",
        "step",
        "--device",
        "null",
        "--card",
        card,
        "--steps",
        str(args.steps),
    ]
    command += ["--shape", args.shape, "--threads", str(args.threads)]
    command += [
        flag
        for flag, wanted in (("--packed", args.packed), ("--expect-warm", args.expect_warm), ("--json", args.json))
        if wanted
    ]
    try:
        environment = {**os.environ, **nullgpu.environment(card)}
        nullgpu.announce(card)
    except nullgpu.NullGpuError as error:
        raise StepError(str(error)) from error
    ours = str(Path(__file__).resolve().parents[2])  # so that the new interpreter finds this very package
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (ours, environment.get("PYTHONPATH")) if p)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, environment)
