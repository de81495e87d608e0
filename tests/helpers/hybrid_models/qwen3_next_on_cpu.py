"""SGLang's own Qwen3-Next, whose linear attention runs in plain torch, token by token: its kernels
are of a GPU. Everything else is SGLang's, as in ``lfm2_on_cpu.py``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models import qwen2_moe, qwen3_next
from torch import Tensor, nn


class GatedDeltaRule(RadixLinearAttention):  # type: ignore[misc]  # untyped base
    """Reads and writes a request's states, and copies those that SGLang asks for."""

    def forward(self, forward_batch: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        backend = get_attn_backend().linear_attn_backend
        step, pool = backend.forward_metadata, backend.req_to_token_pool
        (conv_states,), states = (
            (cache := pool.mamba2_layer_cache(self.layer_id)).conv,
            cache.temporal,
        )
        starts, copied_after = step.query_start_loc.tolist(), dict[int, int]()
        if forward_batch.forward_mode.is_decode():
            begun = [True] * len(starts[1:])
            if forward_batch.mamba_track_mask is not None:
                copied_after = dict.fromkeys(
                    forward_batch.mamba_track_mask.nonzero()[:, 0].tolist(), 1
                )
        else:
            begun = [tokens > 0 for tokens in forward_batch.extend_prefix_lens_cpu]
            if step.has_mamba_track_mask:
                rows, lasts = step.mamba_track_mask_indices, step.track_conv_indices[:, -1]
                pairs = zip(rows.tolist(), lasts.tolist(), strict=True)
                copied_after = {row: last + 1 - starts[row] for row, last in pairs}
        beta, decay = b.float().sigmoid(), -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        output = mixed_qkv.new_zeros(len(mixed_qkv), self.num_v_heads, self.head_v_dim)
        for i, slot in enumerate(step.mamba_cache_indices.tolist()):
            mine = slice(starts[i], starts[i + 1])
            if not begun[i]:
                conv_states[slot], states[slot] = 0.0, 0.0
            seen = torch.cat([conv_states[slot], mixed_qkv[mine].T], dim=1)
            channels, width = conv_states[slot].shape
            kernel = self.conv_weights[:, None]
            mixed = F.silu(torch.conv1d(seen[None], kernel, self.bias, groups=channels))[0].T
            q, k, v = mixed.float().split((self.q_dim, self.k_dim, self.v_dim), dim=1)
            q, k = (_unit(part.unflatten(1, (-1, self.head_k_dim))) for part in (q, k))
            groups = self.num_v_heads // self.num_k_heads
            q, k = (part.repeat_interleave(groups, dim=1) for part in (q, k))
            v = v.unflatten(1, (-1, self.head_v_dim))
            state = states[slot].float()  # [Hv, value, key]
            for t in range(len(v)):
                at = mine.start + t
                state = state * decay[at].exp()[:, None, None]
                missing = (v[t] - (state * k[t][:, None]).sum(dim=2)) * beta[at][:, None]
                state = state + missing[:, :, None] * k[t][:, None]
                output[at] = (state * q[t][:, None]).sum(dim=2) / self.head_k_dim**0.5
                if copied_after.get(i) == t + 1:
                    copy = forward_batch.mamba_track_indices[i]
                    conv_states[copy], states[copy] = seen[:, t + 1 : t + 1 + width], state
            conv_states[slot], states[slot] = seen[:, -width:], state
        return output[None]


class GatedNorm(nn.Module):
    """RMS norm, times SiLU of a gate."""

    def __init__(self, width: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) * F.silu(gate)


def add_gated(x: Tensor, gate: Tensor, shared: Tensor, output: Tensor) -> None:
    """To the output of the routed experts, that of the shared one."""
    output += (x @ gate).sigmoid()[:, None] * shared


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


class _TorchOfACpu:
    """The module ``torch``, where the norm does not ask for the current GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def get_device_module(self) -> Any:
        return torch.cpu


class Qwen3NextForCausalLM(qwen3_next.Qwen3NextForCausalLM):  # type: ignore[misc]  # untyped base
    """Nothing is added."""


qwen3_next.torch = _TorchOfACpu()
qwen2_moe.fused_gate_sigmoid_mul_add = add_gated
qwen3_next.RadixLinearAttention, qwen3_next.FusedRMSNormGated = GatedDeltaRule, GatedNorm
EntryClass = Qwen3NextForCausalLM
