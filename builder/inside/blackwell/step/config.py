"""What one training step is made of: sizes, constants, and the ways it can fail. Standard library only.

Letters follow the paper (arXiv 2602.06036): B batch, S packed tokens, D hidden, T tapped target layers, N anchors, K block size,
V vocabulary, Q = N·K.
"""

from dataclasses import dataclass, field


class StepError(Exception):
    """The step can't run, or what it showed is not acceptable. The text says what happened, why, and what to do next."""


class ColdKernel(StepError):
    """`--expect-warm` and something had to be compiled; the text names the first such kernel."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """B, S, N and K of one batch."""

    batch: int
    tokens: int
    anchors: int
    block: int

    @property
    def queries(self) -> int:
        """Q = N·K, the length of the draft input."""
        return self.anchors * self.block


SHAPES = {
    "toy": Shape(batch=1, tokens=256, anchors=8, block=16),  # Q = 128, keys 384: multiples of flex's 128
    "odd": Shape(batch=1, tokens=200, anchors=5, block=16),  # Q = 80, keys 280: no multiple of 128
}


@dataclass(frozen=True, kw_only=True)
class TargetSize:
    """The frozen target: a Qwen3.5 text stack, three gated-delta layers to one full-attention layer."""

    vocabulary: int = 2048
    hidden: int = 256
    intermediate: int = 512
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    linear_key_heads: int = 2
    linear_value_heads: int = 4  # twice the key heads, as in the real family
    linear_head_dim: int = 64
    conv_width: int = 4

    @property
    def mask_token(self) -> int:
        """Id of MASK: the last row of the vocabulary, which no text uses."""
        return self.vocabulary - 1


@dataclass(frozen=True, kw_only=True)
class DrafterSize:
    """The drafter's own dimensions. Only `hidden` is shared with the target, whose embedding table and head it borrows.

    `head_dim` stays at 64 or 128: flex's backward at more does not fit sm_12x's shared memory
    (https://github.com/pytorch/pytorch/issues/198224; lift the limit when every supported torch has the fix).
    """

    hidden: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 768
    rope_theta: float = 1_000_000.0
    eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Everything `run_step` needs. `device` is where tensors lie: "cuda" also under the null GPU."""

    device: str = "cpu"
    steps: int = 2
    shape: Shape = SHAPES["toy"]
    packed: bool = False
    threads: int = 1
    expect_warm: bool = False
    seed: int = 0
    target: TargetSize = field(default_factory=TargetSize)
    drafter: DrafterSize = field(default_factory=DrafterSize)
    learning_rate: float = 6e-4
    clip: float = 1.0
    noise: float = 0.05  # half width of the uniform noise on C, whose entries are of order 1 after its norm
    gamma: float = 7.0  # decay of the loss weight along a block, for K = 16
    head_chunk: int = 4  # blocks whose logits exist at once

    def __post_init__(self) -> None:
        if self.steps < 1 or self.threads < 1:
            raise StepError(f"steps and threads must be at least 1, not {self.steps} and {self.threads}.")
        if self.device not in ("cpu", "cuda"):
            raise StepError(f"unknown device {self.device!r}: use cpu or cuda.")
        if self.expect_warm and self.device == "cpu":
            raise StepError(
                "--expect-warm counts compiled GPU kernels and the CPU step has none: use --device cuda or --device null."
            )
        if self.drafter.hidden != self.target.hidden:
            raise StepError(
                "the drafter borrows the target's embedding table and head, so both need the same hidden size."
            )
