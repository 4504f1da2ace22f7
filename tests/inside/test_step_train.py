"""Training, packing, threads, the report, and the command line, on the CPU."""

import json
import logging
import math
import os
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import blackwell  # noqa: E402
from blackwell import cli, step  # noqa: E402
from blackwell.step import anchors, observe, train  # noqa: E402
from blackwell.step.anchors import Batch, pack, replace  # noqa: E402
from blackwell.step.config import SHAPES, ColdKernel, StepConfig, StepError, TargetSize  # noqa: E402


def check_falls(losses: list[float]) -> None:
    """The loss falls over 20 steps on one batch: to well under its start, and not by one lucky step."""
    assert len(losses) == 20
    assert losses[-1] < 0.7 * losses[0]
    assert max(losses[15:]) < min(losses[:5])


def test_loss_falls_over_20_steps_on_one_batch() -> None:
    report = train.run_step(StepConfig(steps=20))
    assert report.losses is not None and report.gradient_norms is not None
    assert abs(report.losses[0] - math.log(2048)) < 1.0, "an untrained drafter guesses"
    check_falls(report.losses)
    assert report.problems == []


def test_fall_check_rejects_a_step_that_does_not_train() -> None:
    report = train.run_step(StepConfig(steps=20, learning_rate=0.0))
    with pytest.raises(AssertionError):
        check_falls(report.losses)


@pytest.mark.parametrize("packed", [False, True])
def test_second_shape_trains(packed: bool) -> None:
    report = train.run_step(StepConfig(shape=SHAPES["odd"], packed=packed, steps=3))
    assert report.losses[-1] < report.losses[0]
    assert report.problems == []
    assert report.shape == {"batch": 1, "tokens": 200, "anchors": 5, "block": 16}


def one_backward() -> train.Trainer:
    """A trainer with gradients in place."""
    config = StepConfig()
    trainer = train.Trainer(config)
    target, batch = trainer.targets[0], trainer.batches[0]
    tapped = target.tap(batch)
    assert not tapped.requires_grad
    train.draft_loss(config, target, trainer.drafter, batch, tapped).backward()
    return trainer


def check_gradients(trainer: train.Trainer) -> None:
    """None for the target; finite and non-zero for all that is trained."""
    for name, parameter in trainer.targets[0].named_parameters():
        assert parameter.grad is None, f"the target's {name} received a gradient"
    for name, parameter in trainer.drafter.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()) and float(parameter.grad.abs().max()) > 0, name


def test_only_the_drafter_receives_gradients() -> None:
    check_gradients(one_backward())


def test_gradient_check_rejects_a_target_that_is_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    from blackwell.step.target import Target

    right = Target.__init__

    def thawed(self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self.head.requires_grad_(True)

    monkeypatch.setattr(Target, "__init__", thawed)
    with pytest.raises(AssertionError, match="received a gradient"):
        check_gradients(one_backward())


def test_gradient_check_rejects_a_part_that_does_not_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    from blackwell.step.drafter import Drafter

    right = Drafter.fuse
    monkeypatch.setattr(Drafter, "fuse", lambda self, tapped: right(self, tapped).detach())
    with pytest.raises(AssertionError, match="fuse"):
        check_gradients(one_backward())


def test_the_optimizer_holds_the_drafter_and_nothing_else() -> None:
    trainer = train.Trainer(StepConfig())
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in trainer.drafter.parameters()}
    assert isinstance(trainer.optimizer, torch.optim.AdamW) and trainer.optimizer.param_groups[0]["lr"] == 6e-4
    names = {name.split(".")[0] for name, _ in trainer.drafter.named_parameters()}
    assert names == {"fuse_proj", "fuse_norm", "layers", "norm"}


def test_gradients_are_clipped() -> None:
    trainer = train.Trainer(StepConfig(clip=0.1))
    _, before = trainer.step()
    after = torch.stack([p.grad.norm() for p in trainer.drafter.parameters()]).norm()
    assert float(before) > 0.1 and float(after) == pytest.approx(0.1, rel=1e-3)


# ---- packed equals unpacked ----

LENGTHS = (90, 66)


def document_losses(spoil: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Loss of each of two documents alone, and of the same two packed into one row with the same anchors."""
    config = StepConfig(noise=0.0)
    trainer = train.Trainer(config)
    trainer.drafter.eval()
    generator = torch.Generator().manual_seed(11)
    ids = [torch.randint(2047, (n,), generator=generator) for n in LENGTHS]
    answers = [torch.arange(n) >= n // 4 for n in LENGTHS]
    alone = [pack([i], [a], 4, generator) for i, a in zip(ids, answers, strict=True)]
    both = pack(ids, answers, 8, generator)
    shifted = torch.cat([alone[0].anchors, alone[1].anchors + LENGTHS[0]], dim=1)
    both = replace(both, anchors=shifted, keep=torch.ones_like(shifted, dtype=torch.bool))
    both = replace(both, **spoil)

    def loss_of(batch: Batch, keep: torch.Tensor) -> float:
        batch = replace(batch, keep=keep)
        with torch.no_grad():
            return float(
                train.draft_loss(config, trainer.targets[0], trainer.drafter, batch, trainer.targets[0].tap(batch))
            )

    first = torch.arange(8)[None] < 4
    return [loss_of(batch, batch.keep) for batch in alone], [loss_of(both, first), loss_of(both, ~first)]


def test_packed_documents_have_the_loss_they_have_alone() -> None:
    alone, packed = document_losses({})
    assert packed == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    "spoil",
    [
        {"cu_seqlens": None},
        {"positions": torch.cat([torch.arange(90), torch.arange(66) * 2])[None]},
        {"documents": torch.zeros(1, sum(LENGTHS), dtype=torch.long)},
    ],
    ids=["no offsets", "wrong positions", "one document"],
)
def test_packing_check_notices(spoil: dict[str, Any]) -> None:
    alone, packed = document_losses(spoil)
    assert packed != pytest.approx(alone, rel=1e-5)


# ---- threads ----


def test_two_replicas_in_two_threads_equal_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    config = StepConfig(threads=2, steps=2, packed=True)
    parallel = train.run_step(config)
    monkeypatch.setattr(train, "in_threads", lambda jobs: [job() for job in jobs])
    assert train.run_step(config).losses == parallel.losses
    single = train.run_step(StepConfig(threads=1, steps=2, packed=True))
    assert single.losses != parallel.losses, "the second replica's batch counts"


def test_in_threads_runs_at_once_and_raises() -> None:
    barrier = threading.Barrier(2, timeout=20)  # passes only if both jobs are under way together
    idents = train.in_threads([lambda: (barrier.wait(), threading.get_ident())[1]] * 2)
    assert len(set(idents)) == 2 and threading.get_ident() not in idents
    with pytest.raises(ZeroDivisionError):
        train.in_threads([lambda: 1, lambda: 1 // 0])


# ---- observation ----


def test_listener_counts_hits_and_misses() -> None:
    from triton import knobs

    before, calls = knobs.compilation.listener, []
    knobs.compilation.listener = lambda **event: calls.append(event)
    try:
        with observe.Observer() as observer:
            for name, hit in (("a", True), ("b", False), ("a", True)):
                knobs.compilation.listener(
                    src=None, metadata={"name": name}, metadata_group={}, times=None, cache_hit=hit
                )
            for hook in list(knobs.runtime.kernel_load_end_hook.calls):
                hook(None, None, "a", None, None)
        assert observer.by_kernel() == {"a": {"hits": 2, "misses": 0}, "b": {"hits": 0, "misses": 1}}
        assert observer.loads == 1
        assert len(calls) == 3, "a listener that was there still hears"
        knobs.compilation.listener(src=None)
        assert len(calls) == 4, "and is back afterwards"
    finally:
        knobs.compilation.listener = before


def test_expect_warm_stops_at_the_first_miss_and_names_it() -> None:
    with observe.Observer(expect_warm=True) as observer:
        observer.on_compilation(src=None, metadata={"name": "warm_kernel"}, cache_hit=True)
        with pytest.raises(ColdKernel, match="kernel cold_kernel was not in the kernel cache"):
            observer.on_compilation(src=None, metadata={"name": "cold_kernel"}, cache_hit=False)


def test_graph_misses_count_as_cold() -> None:
    from torch._dynamo.utils import counters

    with observe.Observer() as observer:
        train._demand_warm(observer)
        counters["inductor"]["fxgraph_cache_miss"] += 1
        with pytest.raises(ColdKernel, match=r"flex_attention.*fx_miss"):
            train._demand_warm(observer)


def test_a_wrapped_miss_is_still_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    def inductor_wraps(config: StepConfig, null: bool, observer: observe.Observer, started: float) -> None:
        try:
            observer.on_compilation(src=None, metadata={"name": "inner"}, cache_hit=False)
        except ColdKernel as error:
            raise RuntimeError("BackendCompilerFailed") from error

    monkeypatch.setattr(train, "_observed", inductor_wraps)
    with pytest.raises(ColdKernel, match="kernel inner"):
        train.run_step(StepConfig(device="cuda", expect_warm=True))
    with pytest.raises(RuntimeError, match="BackendCompilerFailed"):
        monkeypatch.setattr(train, "_observed", lambda *a: (_ for _ in ()).throw(RuntimeError("BackendCompilerFailed")))
        train.run_step(StepConfig(device="cuda", expect_warm=True))


SLOW = [
    "`causal_conv1d_fn` is falling back to its reference PyTorch implementation because `causal-conv1d` is not installed.",
    "The fast path is not available because one of the required library is not installed.",
    "Triton is not supported on current platform, roll back to CPU.",
    "flex_attention called without torch.compile() - this will use an unfused implementation",
    "torch._dynamo hit config.recompile_limit (8)",
]


@pytest.mark.parametrize("message", SLOW)
def test_slow_path_warnings_are_caught(message: str) -> None:
    with observe.Observer() as observer:
        warnings.warn(message, stacklevel=1)
        logging.getLogger("transformers.models.qwen3_5").warning(message + " (logged)")
    assert observer.slow_paths(cpu=False) == [message, message + " (logged)"]


def test_harmless_warnings_are_kept_and_not_errors() -> None:
    with observe.Observer() as observer:
        logging.getLogger("torch._dynamo").warning("Guards may run slower on Python 3.13.0.")
        warnings.warn(SLOW[2], stacklevel=1)
    assert len(observer.warnings) == 2
    assert observer.slow_paths(cpu=True) == [] and observer.slow_paths(cpu=False) == [SLOW[2]]


def test_a_slow_path_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    right = train.Trainer.step

    def warn(self: train.Trainer) -> Any:
        warnings.warn(SLOW[0], stacklevel=1)
        return right(self)

    monkeypatch.setattr(train.Trainer, "step", warn)
    assert train.run_step(StepConfig()).problems == [f"slow path: {SLOW[0]}"]


def test_a_loss_that_is_not_finite_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.Trainer, "step", lambda self: (torch.tensor(float("nan")), torch.tensor(1.0)))
    assert "not finite" in train.run_step(StepConfig()).problems[0]
    under_null = train.run_step(StepConfig(), null=True)
    assert under_null.problems == [] and under_null.losses is None and under_null.device == "null"


# ---- configuration and command line ----


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"steps": 0}, "at least 1"),
        ({"threads": 0}, "at least 1"),
        ({"device": "tpu"}, "unknown device"),
        ({"expect_warm": True}, "--device cuda or --device null"),
        ({"target": TargetSize(hidden=128)}, "same hidden size"),
    ],
)
def test_wrong_configuration(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(StepError, match=text):
        StepConfig(**wrong)


@pytest.fixture
def nullgpu(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for blackwell.nullgpu that is off and names an environment."""
    fake = types.SimpleNamespace(
        is_on=lambda: False,
        environment=lambda card, count=1: {"LD_PRELOAD": "lib.so", "CARD": card},
        announce=lambda card: print(f"on: {card}", file=sys.stderr),
        NullGpuError=type("NullGpuError", (Exception,), {}),
    )
    monkeypatch.setitem(sys.modules, "blackwell.nullgpu", fake)
    monkeypatch.setattr(blackwell, "nullgpu", fake, raising=False)
    return fake


def test_cli_cpu_json(nullgpu: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["step", "--device", "cpu", "--steps", "2", "--packed", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["losses"]) == len(answer["gradient_norms"]) == 2
    assert set(answer["seconds"]) == {"build", "first_step", "second_step", "triton", "dynamo"}
    assert answer["hits"] == answer["misses"] == answer["kernels_loaded"] == 0
    assert answer["peak_memory"] > 100_000_000
    assert answer["versions"]["transformers"] and answer["packed"] is True
    assert set(answer["implementations"]) == {"attention", "causal_conv1d", "gated_delta_rule"}


def test_cli_table(nullgpu: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["step", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("what")


def test_cli_failures(
    nullgpu: types.SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["step", "--device", "cpu", "--expect-warm", "--json"]) == step.EXIT_FAILED
    assert "--device cuda or --device null" in json.loads(capsys.readouterr().out)["error"]
    monkeypatch.setattr(
        train,
        "run_step",
        lambda config, null: (_ for _ in ()).throw(ColdKernel("kernel x was not in the kernel cache")),
    )
    assert cli.main(["step", "--device", "cpu"]) == step.EXIT_COLD
    monkeypatch.setattr(train, "run_step", lambda config, null: 1 // 0)
    assert cli.main(["step", "--device", "cpu", "--json"]) == step.EXIT_FAILED
    assert "ZeroDivisionError" in json.loads(capsys.readouterr().out)["error"]
    nullgpu.is_on = lambda: True
    assert cli.main(["step", "--device", "cpu"]) == step.EXIT_FAILED


def test_cli_null_becomes_the_same_command_under_the_null_gpu(
    nullgpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Replaced(BaseException):
        pass

    seen: list[Any] = []

    def execve(path: str, argv: list[str], environment: dict[str, str]) -> None:
        seen.extend([path, argv, environment])
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(os, "_exit", lambda code: None)  # a step that breaks ends its process, which is pytest's here
    with pytest.raises(Replaced):
        cli.main(
            [
                "step",
                "--device",
                "null",
                "--card",
                "NVIDIA B200",
                "--shape",
                "odd",
                "--packed",
                "--threads",
                "2",
                "--expect-warm",
                "--json",
            ]
        )
    assert "on: NVIDIA B200" in capsys.readouterr().err
    path, argv, environment = seen
    assert path == sys.executable
    assert argv[:4] == [sys.executable, "-m", "blackwell", "step"]
    for words in (
        ["--device", "null"],
        ["--card", "NVIDIA B200"],
        ["--shape", "odd"],
        ["--threads", "2"],
        ["--steps", "2"],
    ):
        assert argv[argv.index(words[0]) + 1] == words[1]
    assert {"--packed", "--expect-warm", "--json"} <= set(argv)
    assert environment["LD_PRELOAD"] == "lib.so" and environment["CARD"] == "NVIDIA B200"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(Path(blackwell.__file__).parents[1])


def test_cli_null_says_why_the_null_gpu_cannot_start(
    nullgpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def environment(card: str, count: int = 1) -> dict[str, str]:
        raise nullgpu.NullGpuError(f"no card profile is named {card!r}")

    nullgpu.environment = environment
    monkeypatch.setattr(os, "_exit", lambda code: None)
    assert cli.main(["step", "--device", "null", "--card", "RTX 1"]) == step.EXIT_FAILED
    assert "no card profile is named 'RTX 1'" in capsys.readouterr().err


def test_cli_null_needs_a_card_outside_an_image(nullgpu: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("BLACKWELL_ROOT", str(tmp_path))
    monkeypatch.setattr(os, "_exit", lambda code: None)
    assert cli.main(["step", "--device", "null"]) == step.EXIT_FAILED
    assert "--card 'NVIDIA B200'" in capsys.readouterr().err


def test_importing_the_command_costs_no_torch() -> None:
    """`blackwell --help` must not import torch."""
    code = "import blackwell.step, sys; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(blackwell.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-S", "-c", code], env=env, timeout=60, check=False).returncode == 0


def test_anchor_mutation_reaches_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose documents hold nothing to learn from is refused before any model is run."""
    monkeypatch.setattr(anchors, "document_lengths", lambda tokens, packed: [1] * tokens)
    with pytest.raises(StepError, match="no token of the batch"):
        train.run_step(StepConfig(packed=True))


RANK_2 = {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        ({"LOCAL_RANK": "2"}, {}),  # somebody's own variable, not torchrun's
        (RANK_2, {"CUDA_VISIBLE_DEVICES": "2"}),
        (RANK_2 | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"CUDA_VISIBLE_DEVICES": "6"}),
        (RANK_2 | {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, {"CUDA_VISIBLE_DEVICES": "GPU-c"}),
        (RANK_2 | {"CUDA_VISIBLE_DEVICES": "5"}, {}),
    ],
)
def test_each_rank_of_torchrun_takes_its_own_gpu(environment: dict[str, str], expected: dict[str, str]) -> None:
    assert step.gpu_of_rank(environment) == expected


def test_rank_without_a_gpu_is_told() -> None:
    with pytest.raises(StepError, match="local rank 2 of 4 has no GPU: CUDA_VISIBLE_DEVICES=0,1 names 2"):
        step.gpu_of_rank(RANK_2 | {"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize("rank", ["x", "", "-1", "2.0"])
def test_a_rank_that_is_none_is_told(rank: str) -> None:
    with pytest.raises(StepError, match=f"LOCAL_RANK={rank} is no rank.*unset LOCAL_RANK"):
        step.gpu_of_rank(RANK_2 | {"LOCAL_RANK": rank})
