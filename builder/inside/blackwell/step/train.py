"""Train: the whole step, on whichever device. `run_step(config)` is the entry; the devices differ by kernels and precision only."""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from blackwell.step.config import ColdKernel, StepConfig, StepError
from blackwell.step.observe import Observer, cold_text


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run showed. Times in seconds, memory in bytes. Losses and norms are None under the null GPU, whose floats are garbage."""

    device: str
    card: str | None
    shape: dict[str, int]
    packed: bool
    threads: int
    steps: int
    losses: list[float] | None
    gradient_norms: list[float] | None
    peak_memory: int
    kernels_loaded: int
    hits: int
    misses: int
    kernels: dict[str, dict[str, int]]  # per Triton kernel: hits and misses
    graphs: dict[str, int]
    seconds: dict[str, float]
    implementations: dict[str, list[str]]
    versions: dict[str, str | None]
    warnings: list[str]
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        return asdict(self)


def run_step(config: StepConfig, null: bool = False) -> Report:
    """Build target and drafter, take `config.steps` optimizer steps on one batch, and report.

    `null` says that the null GPU is on: nothing then looks at a float. Raises ColdKernel at the first miss under `expect_warm`, and
    StepError if the step can't run. What ran but must not be accepted (a slow path, a loss that is not finite) is in `problems`.
    """
    started = time.perf_counter()
    with Observer(config.expect_warm) as observer:
        try:
            return _observed(config, null, observer, started)
        except ColdKernel:
            raise
        except Exception as error:  # Inductor wraps what the listener raised
            if config.expect_warm and observer.misses:
                raise ColdKernel(cold_text(observer.misses[0])) from error
            raise


def _observed(config: StepConfig, null: bool, observer: Observer, started: float) -> Report:
    import torch

    from blackwell.step import kernels

    if config.device == "cuda" and not torch.cuda.is_available():
        raise StepError(
            "no GPU is visible to torch. Use --device null for the compile-only step, --device cpu to train on the CPU."
        )
    trainer = Trainer(config)
    seconds = {"build": time.perf_counter() - started}
    losses, norms = [], []
    for index in range(config.steps):
        before = time.perf_counter()
        loss, norm = trainer.step()
        _synchronize(config.device)
        if index < 2:
            seconds[("first_step", "second_step")[index]] = time.perf_counter() - before
        losses.append(loss)
        norms.append(norm)
    seconds |= {"triton": observer.triton_seconds, "dynamo": observer.dynamo_seconds()}
    if config.expect_warm:
        _demand_warm(observer)
    losses_out = None if null else [float(x) for x in losses]
    norms_out = None if null else [float(x) for x in norms]
    problems = [f"slow path: {text}" for text in observer.slow_paths(cpu=config.device == "cpu")]
    if losses_out is not None and norms_out is not None and not all(map(math.isfinite, losses_out + norms_out)):
        problems.append(f"a loss or a gradient norm is not finite: losses {losses_out}, gradient norms {norms_out}")
    return Report(
        device="null" if null else config.device,
        card=torch.cuda.get_device_name() if config.device == "cuda" else None,
        shape=asdict(config.shape),
        packed=config.packed,
        threads=config.threads,
        steps=config.steps,
        losses=losses_out,
        gradient_norms=norms_out,
        peak_memory=_peak_memory(config.device),
        kernels_loaded=observer.loads,
        hits=len(observer.hits),
        misses=len(observer.misses),
        kernels=observer.by_kernel(),
        graphs=observer.graphs(),
        seconds={name: round(value, 4) for name, value in seconds.items()},
        implementations=kernels.implementations(),
        versions=_versions(),
        warnings=list(observer.warnings),
        problems=problems,
    )


class Trainer:
    """Target replicas, one per thread, each with its own batch, and the one drafter that learns from all of them."""

    def __init__(self, config: StepConfig) -> None:
        import torch

        from blackwell.step.anchors import random_batch
        from blackwell.step.drafter import Drafter
        from blackwell.step.target import Target

        self.config = config
        if config.device == "cuda":
            # More recompiles than the limit would silently run flex eagerly (https://github.com/vllm-project/vllm/issues/27178): an error
            # here. One compile thread keeps Inductor's Triton compiles in this process, where the listener counts them; neither is part
            # of a cache key.
            import torch._inductor.config

            torch._dynamo.config.fail_on_recompile_limit_hit = True
            torch._inductor.config.compile_threads = 1
        torch.manual_seed(config.seed)
        target = Target(config.target, taps=config.drafter.layers)
        # Weights are drawn on the CPU in float32, the same for every device; the frozen target then lies in bfloat16 on a GPU.
        drafter = Drafter(config.drafter, len(target.layers))
        if config.device == "cuda":
            target = target.to(config.device, torch.bfloat16)
        self.targets = [target, *(copy.deepcopy(target) for _ in range(config.threads - 1))]
        self.drafter = drafter.to(config.device).train()
        text = config.target.mask_token  # ids below MASK are text
        self.batches = [
            random_batch(config.shape, text, config.packed, config.seed + replica).to(config.device)
            for replica in range(config.threads)
        ]
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=config.learning_rate)

    def step(self) -> tuple[Any, Any]:
        """One optimizer step -> loss and gradient norm before clipping, both scalar tensors on the device."""
        import torch

        tapped = in_threads([lambda t=t, b=b: t.tap(b) for t, b in zip(self.targets, self.batches, strict=True)])  # type: ignore[misc]
        total = torch.zeros((), device=self.config.device)
        self.optimizer.zero_grad(set_to_none=True)
        for target, batch, hidden in zip(self.targets, self.batches, tapped, strict=True):
            loss = draft_loss(self.config, target, self.drafter, batch, hidden) / len(self.targets)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.clip)
        self.optimizer.step()
        return total, norm


def draft_loss(config: StepConfig, target: Any, drafter: Any, batch: Any, tapped: Any) -> Any:
    """Forward of the drafter on tapped hidden states [B,S,T·D] of one batch -> the scalar loss."""
    import torch

    from blackwell.step import kernels
    from blackwell.step.anchors import draft_ids, draft_positions
    from blackwell.step.loss import block_loss, cross_entropy, labels_and_weights
    from blackwell.step.mask import DraftMask

    block = config.shape.block
    mixed = torch.autocast("cuda", torch.bfloat16) if config.device == "cuda" else contextlib.nullcontext()
    with mixed:
        context = drafter.add_noise(drafter.fuse(tapped), config.noise)  # C [B,S,D]
        x = target.embed(draft_ids(batch, block, config.target.mask_token))  # X [B,Q,D]
        mask = kernels.prepare_mask(DraftMask.of(batch, block))
        hidden = drafter(context, x, draft_positions(batch, block), mask)  # [B,Q,D]
        labels, weights = labels_and_weights(batch, block, config.gamma)
        per_slot = cross_entropy(target.head, hidden, labels, config.head_chunk)
    return block_loss(per_slot, weights)


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run the jobs at once, one thread each (a single one in this thread), and return their answers in order; raises the first error."""
    if len(jobs) == 1:
        return [jobs[0]()]
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def _demand_warm(observer: Observer) -> None:
    if observer.misses:
        raise ColdKernel(cold_text(observer.misses[0]))
    graphs = observer.graphs()
    missed = [name for name in ("fx_miss", "fx_bypass", "autograd_miss", "autograd_bypass") if graphs[name]]
    if missed:
        raise ColdKernel(cold_text(f"torch.compile(flex_attention) ({', '.join(missed)})"))


def _synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _peak_memory(device: str) -> int:
    """Bytes: allocated by torch on the GPU, or resident in this process on the CPU."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _versions() -> dict[str, str | None]:
    import platform
    from importlib import metadata

    import torch

    versions: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for distribution in ("torch", "triton", "fla-core", "flash-linear-attention", "causal-conv1d", "transformers"):
        try:
            versions[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            versions[distribution] = None
    return versions
