"""Seeded sampling: a token's noise is drawn for its position, not for the length of its row.

SGLang samples with seeds where ``--enable-deterministic-inference`` is on. In a decode step it goes
by the positions of the forward pass, which ``forward.prepare_forward`` has made the logical ones;
after a prefill it goes by the length of the row, which is shorter where a compacted row came back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_SHIFTS = "skipkv_shifts"


def note_shifts(sampling_info: Any, shifts: Tensor | None) -> None:
    """Of a forward pass: how far each request's position is from its row length; None for not."""
    if sampling_info is not None:
        wanted = shifts is not None and sampling_info.sampling_seed is not None
        setattr(sampling_info, _SHIFTS, shifts if wanted else None)


def shift_positions(
    sampler: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: Any,
    token_ids_logprobs: Any,
    positions: Tensor,
    **kwargs: Any,
) -> None:
    """BEFORE ``Sampler.forward``: after a prefill ``positions`` is SGLang's own, made for this."""
    shifts = getattr(sampling_info, _SHIFTS, None)
    if shifts is not None:
        positions.add_(shifts)
