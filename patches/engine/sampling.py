"""Seeded sampling: a token's noise depends on its logical position, not on its row length.

With ``--enable-deterministic-inference`` SGLang samples with seeds. A decode step uses the
positions of the forward pass, which ``forward.prepare_forward`` has set to logical ones. A prefill
uses the row length. Where a compacted row is restored or decodes in it, that is less than the
position.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_SHIFTS = "skipkv_shifts"


def note_shifts(sampling_info: Any, shifts: Tensor | None) -> None:
    """Set what ``shift_positions`` adds to each request's position; None for nothing."""
    if sampling_info is not None:
        needed = shifts is not None and sampling_info.sampling_seed is not None
        setattr(sampling_info, _SHIFTS, shifts if needed else None)


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
    """BEFORE ``Sampler.forward``: ``positions`` of a prefill are computed for sampling only."""
    shifts = getattr(sampling_info, _SHIFTS, None)
    if shifts is not None:
        positions.add_(shifts)
