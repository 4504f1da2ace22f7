"""The frozen target: a tiny Qwen3.5 text model of transformers with random weights, and the hidden states tapped from it."""

from typing import Any

import torch
from torch import Tensor, nn

from blackwell.step import kernels
from blackwell.step.anchors import Batch
from blackwell.step.config import TargetSize


def tap_layers(layers: int, count: int) -> list[int]:
    """Indices of the tapped layers: `count` of them evenly spaced from 1 to L-3, both included, each once.

    A shallow stack taps what it can: L = 4 leaves only layer 1.
    """
    first, last = 1, max(1, layers - 3)
    if count == 1 or first == last:
        return [first + (last - first) // 2]
    return sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)})


def target_config(size: TargetSize) -> Any:
    """`Qwen3_5TextConfig` of the given size; every fourth layer is full attention, the others gated delta rule."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        linear_num_key_heads=size.linear_key_heads,
        linear_num_value_heads=size.linear_value_heads,
        linear_key_head_dim=size.linear_head_dim,
        linear_value_head_dim=size.linear_head_dim,
        linear_conv_kernel_dim=size.conv_width,
        use_cache=False,
        # A quarter of each head is rotated (16 of 64: 8 frequencies), shared out between time, height and width.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
        },
    )


class Target(nn.Module):
    """A frozen `Qwen3_5TextModel` with its LM head. It never receives a gradient."""

    def __init__(self, size: TargetSize, taps: int) -> None:
        super().__init__()
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

        kernels.install()
        self.model = Qwen3_5TextModel(target_config(size))
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        self.layers = tap_layers(size.layers, taps)
        self.requires_grad_(False).eval()

    def embed(self, ids: Tensor) -> Tensor:
        """Frozen embedding table: [B,Q] -> [B,Q,D]."""
        return self.model.embed_tokens(ids)

    def tap(self, batch: Batch) -> Tensor:
        """Run the target on [B,S] tokens and concatenate the tapped hidden states on features -> [B,S,T·D]."""
        packing: dict[str, Any] = {}
        mask = None
        if batch.cu_seqlens is not None:
            # The gated delta rule and FLA's convolution take offsets, causal-conv1d the document index of each token.
            packing = {"cu_seq_lens_q": batch.cu_seqlens, "seq_idx": batch.documents.to(torch.int32)}
            mask = causal_within_document(batch.documents)
        with torch.no_grad():
            out = self.model(
                input_ids=batch.ids,
                position_ids=batch.positions,
                attention_mask={"full_attention": mask, "linear_attention": None},
                output_hidden_states=True,
                use_cache=False,
                **packing,
            )
        # Entry 0 is the embedding, so the output of layer i is entry i + 1.
        return torch.cat([out.hidden_states[layer + 1] for layer in self.layers], dim=-1)


def causal_within_document(documents: Tensor) -> Tensor:
    """Attention mask of packed rows: each token sees itself and what precedes it in its document. [B,S] -> bool [B,1,S,S]."""
    tokens = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=documents.device).tril()
    return (same & causal)[:, None]
