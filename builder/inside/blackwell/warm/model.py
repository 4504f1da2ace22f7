"""Train a few layers of a real model with its true dimensions and random weights: what its kernels depend on, without its weights.

  python -m blackwell.warm.model qwen3.5-27b --tokens 2048 8192 --packed --drafter

CONFIG is a transformers config.json, a directory that holds one, or a name from blackwell/workloads/*.json. `--layers` cuts the stack
to one layer of each kind. The same script runs under the null GPU (where losses are garbage and not looked at) and on a card.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blackwell import output, paths
from blackwell.step.config import DrafterSize, Shape, StepConfig

FAMILIES = frozenset({"qwen3_5_text", "qwen3", "llama", "qwen2", "mistral"})
"""Values of model_type that this script has a way to cut and to pack for."""

LEARNING_RATE = 1e-5
DRAFT_BLOCK = 16
DRAFT_ANCHORS = 32


class ModelError(Exception):
    """The model can't be made from the configuration; the text says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one length: its first step, its second, and the median of the rest."""

    tokens: int
    packed: bool
    first_step: float
    second_step: float | None
    later_steps: float | None


def load_config(name: str) -> dict[str, Any]:
    """The text model's configuration as a dict. Raises ModelError for a missing file or an unsupported family."""
    shipped = paths.data("workloads") / f"{name}.json"
    path = shipped if shipped.is_file() else Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelError(
            f"{name} is neither a config.json nor one of {', '.join(sorted(p.stem for p in paths.data('workloads').glob('*.json')))}."
        )
    content: dict[str, Any] = json.loads(path.read_text())
    content = content.get("text_config", content)  # a vision-language model: its language half
    if content.get("model_type") not in FAMILIES:
        raise ModelError(
            f"{path}: model_type {content.get('model_type')!r} is not one of {', '.join(sorted(FAMILIES))}. Warm your own training script "
            "instead: blackwell warm --card NAME -- python train.py"
        )
    return content


def cut(content: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """The configuration with `layers` layers, of which the kinds come in their order of first appearance; None leaves it whole."""
    if layers is None:
        return content
    kinds = content.get("layer_types") or []
    if not kinds and content["model_type"] == "qwen3_5_text":
        kinds = ["linear_attention", "full_attention"]
    distinct = list(dict.fromkeys(kinds))
    shortened = {**content, "num_hidden_layers": layers}
    if distinct:
        shortened["layer_types"] = [distinct[index % len(distinct)] for index in range(layers)]
    return shortened


def build(content: dict[str, Any]) -> Any:
    """The model on the GPU in bfloat16, ready to train."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {
        key: value
        for key, value in content.items()
        if key not in ("model_type", "dtype", "torch_dtype", "architectures")
    }
    config = AutoConfig.for_model(content["model_type"], **values)
    config.use_cache = False
    if content["model_type"] == "qwen3_5_text":
        from blackwell.step import kernels

        kernels.install()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.train()


def batch_of(tokens: int, packed: bool, vocabulary: int) -> Any:
    """A batch of one row (`blackwell.step.anchors.Batch`), made on the CPU and moved."""
    from blackwell.step.anchors import random_batch

    shape = Shape(batch=1, tokens=tokens, anchors=DRAFT_ANCHORS, block=DRAFT_BLOCK)
    return random_batch(shape, vocabulary - 1, packed, seed=0).to("cuda")


def train_step(model: Any, batch: Any, optimizer: Any, hybrid: bool) -> Any:
    """One optimizer step of the language model on the batch -> its last hidden states [1,S,D], without gradient."""
    import torch

    from blackwell.step.target import causal_within_document

    arguments: dict[str, Any] = {"input_ids": batch.ids, "labels": batch.ids, "position_ids": batch.positions}
    if batch.cu_seqlens is not None:
        mask = causal_within_document(batch.documents)
        arguments["attention_mask"] = {"full_attention": mask, "linear_attention": None} if hybrid else mask
        if hybrid:
            arguments |= {"cu_seq_lens_q": batch.cu_seqlens, "seq_idx": batch.documents.to(torch.int32)}
    out = model(**arguments, output_hidden_states=True)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return out.hidden_states[-1].detach()


class DrafterTraining:
    """A DFlash drafter for the model, with flex_attention compiled: one training step a call."""

    def __init__(self, model: Any, content: dict[str, Any]) -> None:
        import torch

        from blackwell.step.drafter import Drafter

        size = DrafterSize(
            hidden=content["hidden_size"],
            layers=2,
            heads=32,
            kv_heads=8,
            head_dim=128,
            intermediate=content["intermediate_size"],
        )
        with torch.device("cuda"):
            self.drafter = Drafter(size, taps=1).train()
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=LEARNING_RATE)
        self.model = model
        self.content = content
        self.size = size

    def embed(self, ids: Any) -> Any:
        """The target's embedding, which `draft_loss` asks for."""
        return self.model.get_input_embeddings()(ids).detach()

    @property
    def head(self) -> Any:
        """The target's head, which `draft_loss` asks for."""
        return self.model.get_output_embeddings()

    def step(self, batch: Any, hidden: Any, tokens: int) -> None:
        """One step on hidden states [1,S,D] of the target."""
        from blackwell.step.config import TargetSize
        from blackwell.step.train import draft_loss

        target = TargetSize(hidden=self.size.hidden, vocabulary=self.content["vocab_size"])
        shape = Shape(batch=1, tokens=tokens, anchors=DRAFT_ANCHORS, block=DRAFT_BLOCK)
        config = StepConfig(device="cuda", shape=shape, target=target, drafter=self.size)
        draft_loss(config, self, self.drafter, batch, hidden).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def measure(step: Callable[[], None], count: int, tokens: int, packed: bool) -> Timing:
    """Run `count` steps, each waited for."""
    import torch

    seconds = []
    for _ in range(count):
        before = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - before)
    later = statistics.median(seconds[2:]) if len(seconds) > 2 else None
    return Timing(
        tokens=tokens,
        packed=packed,
        first_step=seconds[0],
        second_step=seconds[1] if len(seconds) > 1 else None,
        later_steps=later,
    )


def main() -> int:
    """Command line; prints JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m blackwell.warm.model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", help="config.json, its directory, or a shipped name")
    parser.add_argument("--layers", type=int, metavar="N", help="cut the stack to N layers (default: whole)")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[2048],
        metavar="S",
        help="row lengths, one after the other (default: 2048)",
    )
    parser.add_argument("--packed", action="store_true", help="pack three documents into the row")
    parser.add_argument("--drafter", action="store_true", help="also train a DFlash drafter on the hidden states")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="steps of each length (default: 2)")
    args = parser.parse_args()
    try:
        content = cut(load_config(args.config), args.layers)
    except ModelError as error:
        output.say(f"blackwell.warm.model: {error}")
        return 1
    started = time.perf_counter()
    import torch
    from torch._inductor import config as inductor_config

    from blackwell.step.observe import Observer

    inductor_config.compile_threads = 1  # in this process, where compiles are counted; not part of a key
    torch.manual_seed(0)
    with Observer() as observer:
        model = build(content)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        drafter = DrafterTraining(model, content) if args.drafter else None
        built = time.perf_counter() - started
        timings = []
        for tokens in args.tokens:
            batch = batch_of(tokens, args.packed, content["vocab_size"])

            def step(batch: Any = batch, tokens: int = tokens) -> None:
                hidden = train_step(model, batch, optimizer, hybrid=content["model_type"] == "qwen3_5_text")
                if drafter is not None:
                    drafter.step(batch, hidden, tokens)

            timings.append(measure(step, args.steps, tokens, args.packed))
        output.emit_json(
            {
                "config": args.config, "layers": content["num_hidden_layers"], "device": torch.cuda.get_device_name(), "build_seconds": built,
                "timings": [asdict(timing) for timing in timings], "hits": len(observer.hits), "misses": len(observer.misses),
                "missed": observer.misses[:20], "kernels_loaded": observer.loads,
                "triton_seconds": observer.triton_seconds, "dynamo_seconds": observer.dynamo_seconds(), "graphs": observer.graphs(), "problems": observer.slow_paths(cpu=False),
            }
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A process that used the null GPU can hang or abort while shutting down, after its work: as in blackwell.step. Remove together.
    os._exit(code)
