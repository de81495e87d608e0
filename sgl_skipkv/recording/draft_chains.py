"""Speculative decoding: the tokens that a step verifies, until it is known which are accepted.

A step verifies a chain of each request: its newest token and the drafts behind it. Only accepted
tokens belong to a sentence. How many those are is seen in the next step, on the device: there the
request goes on at the first position behind them.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from sgl_skipkv.recording.sentence_table import SentenceTable

#: position of no token: a chain that begins here has no token before any other
_NOWHERE: Final = 1 << 62


class DraftChains:
    """The last chain of every tracked request. One row per track id, as in ``SentenceTable``.

    Attributes:
        first: int64 [tracks + 1], logical position of the chain's first token.
        token_ids: int64 [chain, tracks + 1]; hidden: float [chain, tracks + 1, D].
    """

    def __init__(
        self,
        tracks: int,
        chain_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sizes = chain_tokens, tracks + 1
        self.first = torch.full((tracks + 1,), _NOWHERE, dtype=torch.int64, device=device)
        self.token_ids = torch.zeros(sizes, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(*sizes, hidden_size, dtype=dtype, device=device)

    def reset(self, track: int) -> None:
        """The track has no chain."""
        self.first[track].fill_(_NOWHERE)  # an assignment would wait for the device

    def add_accepted(self, tracks: Tensor, positions: Tensor, sentences: SentenceTable) -> None:
        """Add the tokens before ``positions`` to the sentences, one after the other. Graph-safe.

        Args:
            tracks: int64 [B], no track twice but 0. positions: int64 [B].
        """
        accepted, token_ids = positions - self.first[tracks], self.token_ids[:, tracks]
        places = torch.arange(len(token_ids), device=tracks.device)
        of_accepted = torch.where(accepted > places[:, None], tracks, 0)  # track 0 is never read
        for step in zip(of_accepted, token_ids, self.hidden[:, tracks], strict=True):
            sentences.step(*step)
        self.first[tracks] = positions

    def keep(self, tracks: Tensor, token_ids: Tensor, hidden: Tensor) -> None:
        """The chains that begin at the positions of the last ``add_accepted``. Graph-safe.

        Args:
            tracks: int64 [B]. token_ids: int64 [B chain], chain after chain.
            hidden: float [B chain, D].
        """
        calls = tracks.shape[0]
        self.token_ids[:, tracks] = token_ids.view(calls, -1).t()
        chains = hidden.view(calls, -1, hidden.shape[1]).transpose(0, 1)
        self.hidden[:, tracks] = chains.to(self.hidden.dtype)
