"""SGLang's own LFM2, whose short convolutions run in plain torch: its kernels are of a GPU.

Everything else of a hybrid model is SGLang's: the pool of states, the radix tree that keeps some of
them, and the attention layers. With ``--mamba-radix-cache-strategy extra_buffer``, the default of
most other hybrid models, a step also copies states for the tree, at the lengths that SGLang asks
for. LFM2's kernels do not; these do, and SGLang lets a model by the name of one of these others.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models import lfm2
from torch import Tensor


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    conv_states: Tensor,
    activation: None,
) -> Tensor:
    """A prefill: float [channels, T] of several requests, whose states are replaced."""
    starts, outputs, seen = query_start_loc.tolist(), list[Tensor](), list[Tensor]()
    for i, slot in enumerate(cache_indices.tolist()):
        before = conv_states[slot] if has_initial_state[i] else torch.zeros_like(conv_states[slot])
        seen.append(torch.cat([before, x[:, starts[i] : starts[i + 1]]], dim=1))
        joined, kernel = seen[-1][None], weight[:, None]
        outputs.append(torch.conv1d(joined, kernel, bias, groups=len(weight))[0])
        conv_states[slot] = seen[-1][:, -before.shape[1] :]
    copied = get_attn_backend().linear_attn_backend.forward_metadata
    if copied.has_mamba_track_mask:
        lasts = copied.track_conv_indices[:, -1].tolist()  # the last token of what is copied
        for i, last in zip(copied.mamba_track_mask_indices.tolist(), lasts, strict=True):
            first = last + 1 - starts[i]  # of the state, in what the request has seen
            state = seen[i][:, first : first + conv_states.shape[2]]
            conv_states[copied.mamba_track_indices[i]] = state
    return torch.cat(outputs, dim=1)


def convolve_step(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: None,
    conv_state_indices: Tensor,
) -> Tensor:
    """A decode step: float [requests, channels]."""
    seen = torch.cat([conv_state[conv_state_indices], x[:, :, None]], dim=2)
    conv_state[conv_state_indices] = seen[:, :, 1:]
    out = (seen * weight).sum(dim=2)
    return out if bias is None else out + bias


class ShortConv(lfm2.Lfm2ShortConv):  # type: ignore[misc]  # untyped base
    """Copies states in decode steps, too."""

    def forward(self, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        output: Tensor = super().forward(hidden_states, forward_batch)
        mask = forward_batch.mamba_track_mask
        if forward_batch.forward_mode.is_decode() and mask is not None:
            states = get_attn_backend().conv_state_metadata(self.layer_idx, forward_batch)
            conv = states.layer_cache.conv[0]
            conv[forward_batch.mamba_track_indices[mask]] = conv[states.cache_indices[mask]]
        return output


class Lfm2ForCausalLM(lfm2.Lfm2ForCausalLM):  # type: ignore[misc]  # untyped base
    """Nothing is added."""


class FalconH1ForCausalLM(Lfm2ForCausalLM):
    """The same by another name."""


lfm2.causal_conv1d_fn, lfm2.causal_conv1d_update = convolve, convolve_step
lfm2.Lfm2ShortConv = ShortConv
EntryClass = [Lfm2ForCausalLM, FalconH1ForCausalLM]
