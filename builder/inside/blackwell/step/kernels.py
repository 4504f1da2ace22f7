"""Which implementation serves each of the three kernels: routed by the device of the tensors, and written down when it runs.

transformers picks the implementations of its Qwen3.5 layers once, at import: FLA's gated delta rule wherever FLA can be imported, also
for CPU tensors; causal-conv1d's convolution where that package is installed, else plain torch with a warning. `install` keeps its choice
on a GPU, puts FLA's Triton convolution in the place of plain torch, and gives CPU tensors the references.
"""

import importlib.util
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blackwell.step import reference
from blackwell.step.config import StepError
from blackwell.step.mask import DraftMask

# With fewer than 128 queries flex picks its decoding kernel, which finds no valid configuration for Q = 80 and two query heads to a key
# head (NoValidChoicesError). Training wants the main kernel, with its fused backward, at any Q.
# https://github.com/pytorch/pytorch/pull/185349; remove when every supported torch has it.
KERNEL_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}

_lock = threading.Lock()
_ran: dict[str, set[str]] = {}
_compiled: Any = None


def implementations() -> dict[str, list[str]]:
    """Which implementation of each kernel has run in this process so far."""
    with _lock:
        return {kernel: sorted(names) for kernel, names in sorted(_ran.items())}


def _note(kernel: str, name: str) -> None:
    with _lock:
        _ran.setdefault(kernel, set()).add(name)


def _choice(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """What transformers' wrapper of a kernel will call: it keeps it in a closure variable named `implementation`."""
    implementation = inspect.getclosurevars(wrapped).nonlocals.get("implementation")
    if implementation is None:
        raise StepError(
            f"transformers no longer says which implementation serves {wrapped.__name__}: the step was written against 5.24. "
            "Adapt blackwell.step.kernels to this version, or lock transformers 5.24."
        )
    return implementation  # type: ignore[no-any-return]


def _full_name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _why_not(module: str, otherwise: str) -> str:
    """Why transformers can't have found `module`: its import is tried here. `otherwise` is the advice when the import itself fails."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.split(".")[0] == error.name.split(".")[0]:
            return f"{error.name} is not installed: {otherwise}."
        return f"`import {module}` fails: {error}. Install {error.name}."
    except OSError as error:
        return f"`import {module}` fails: {error}. If a disk is full or read-only, give the job a writable TMPDIR with room."
    except Exception as error:  # whatever a library raises while it loads
        return f"`import {module}` fails: {type(error).__name__}: {error}. If it isn't the machine, {otherwise}."
    return f"`import {module}` works now, so it failed earlier in this process: look for its warning above."


def route_delta_rule(original: Callable[..., Any]) -> Callable[..., Any]:
    """A gated delta rule that sends GPU tensors to `original` (transformers' choice, FLA) and CPU tensors to its torch reference."""
    chosen, torch_reference = _choice(original), inspect.unwrap(original)

    def chunk_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        if query.device.type == "cpu":
            _note("gated_delta_rule", "torch reference (transformers)")
            return reference.delta_rule_per_document(torch_reference, query, key, value, **options)
        if not chosen.__module__.startswith("fla."):
            raise StepError(
                "FLA's gated delta rule does not serve the target, transformers fell back to plain torch. "
                + _why_not("fla.ops.gated_delta_rule", "install FLA")
            )
        _note("gated_delta_rule", _full_name(chosen))
        return original(query, key, value, **options)

    return chunk_gated_delta_rule


def route_conv(original: Callable[..., Any]) -> Callable[..., Any]:
    """A causal convolution that sends GPU tensors to causal-conv1d, or FLA's Triton kernel where that is not installed."""
    chosen = _choice(original)
    extension = chosen.__module__.startswith("causal_conv1d")

    def causal_conv1d_fn(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any) -> Tensor:  # fmt: skip
        # hidden_states [B,C,S], weight [C,W]
        cu_seqlens = options.get("cu_seq_lens_q")
        if hidden_states.device.type == "cpu":
            _note("causal_conv1d", "torch reference (grouped convolution)")
            return reference.causal_conv_per_document(hidden_states, weight, bias, activation, cu_seqlens)
        if extension:
            _note("causal_conv1d", _full_name(chosen))
            return original(hidden_states, weight, bias, activation=activation, **options)
        if importlib.util.find_spec("causal_conv1d") is not None:
            raise StepError(
                "causal_conv1d is installed but does not serve the target, transformers fell back to plain torch. "
                + _why_not(
                    "causal_conv1d",
                    "it was probably built against another torch: build it again, or remove it to use FLA's Triton convolution",
                )
            )
        # transformers knows no other convolution than causal-conv1d's (transformers.integrations.hub_kernels): serve FLA's here.
        from fla.modules.convolution import causal_conv1d

        _note("causal_conv1d", _full_name(causal_conv1d))
        out, _ = causal_conv1d(
            hidden_states.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=cu_seqlens
        )
        return out.transpose(1, 2)

    return causal_conv1d_fn


def install() -> None:
    """Route the kernels of transformers' Qwen3.5 layers, once per process. The layers look both up by these global names."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    with _lock:
        if getattr(qwen, "_blackwell_routed", False):
            return
        qwen.torch_chunk_gated_delta_rule = route_delta_rule(qwen.torch_chunk_gated_delta_rule)
        qwen.causal_conv1d_fn = route_conv(qwen.causal_conv1d_fn)
        qwen._blackwell_routed = True


def prepare_mask(mask: DraftMask) -> Any:
    """The mask in the form its device's attention takes: a BlockMask for flex, bool [B,1,Q,S+Q] for the dense reference."""
    return mask.dense() if mask.device.type == "cpu" else mask.blocks()


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Attention of q [B,H,Q,d] over k, v [B,Hkv,S+Q,d] -> [B,H,Q,d]. `mask` is what `prepare_mask` made.

    On the CPU flex has no backward ("FlexAttention does not support backward on CPU"), so the dense reference trains there.
    """
    if q.device.type == "cpu":
        _note("attention", "torch reference (dense)")
        return reference.dense_attention(q, k, v, mask)
    _note("attention", "torch.compile(flex_attention)")
    return flex()(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=KERNEL_OPTIONS)


def flex() -> Any:
    """`torch.compile(flex_attention)`, wrapped at the first call; the compilation itself happens at the first forward."""
    global _compiled
    with _lock:
        if _compiled is None:
            from torch.nn.attention.flex_attention import flex_attention

            _compiled = torch.compile(flex_attention, dynamic=False)
        return _compiled
