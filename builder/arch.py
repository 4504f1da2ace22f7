"""The one place that turns requested capabilities into nvcc target flags, extension architectures and Triton GPU targets."""

from collections.abc import Sequence

from builder.values import Capability


def extension_targets(capabilities: Sequence[Capability]) -> tuple[Capability, ...]:
    """Capabilities that extensions carry SASS for: x.0 of each requested major version.

    Code for 10.0 runs on 10.3 and code for 12.0 on 12.1 as it is (binary compatible within a major version). There is never
    sm_103 code: nvcc 13 makes a wrong one (https://github.com/Dao-AILab/causal-conv1d/issues/105).
    """
    return tuple(sorted({Capability(major=c.major, minor=0) for c in capabilities}))


def gencode(capabilities: Sequence[Capability]) -> str:
    """nvcc's -gencode flags for an extension: SASS for each extension target, PTX for the newest."""
    targets = extension_targets(capabilities)
    flags = [f"-gencode arch=compute_{c.major}{c.minor},code={c.sm}" for c in targets]
    newest = targets[-1]
    return " ".join(
        [*flags, f"-gencode arch=compute_{newest.major}{newest.minor},code=compute_{newest.major}{newest.minor}"]
    )


def triton_targets(capabilities: Sequence[Capability]) -> tuple[int, ...]:
    """Triton's GPU targets (10 * major + minor): every requested capability by itself."""
    return tuple(10 * c.major + c.minor for c in sorted(capabilities))
