"""For the trace alone: which later sentence each sentence is most similar to, and how similar.

A compaction needs the highest cosine of each sentence only, and its kernel keeps no partner
(``kernels/sentence_redundancy.py``). A server with a trace looks the partner up, in the same
vectors, before the compaction moves them. The CPU reads it with what was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_skipkv.eviction.compaction import Plan
from sgl_skipkv.kernels.on_device import started_copy
from sgl_skipkv.recording.recorder import Recorder
from sgl_skipkv.request.parts import Compared

_EPS: Final = 1e-8  # as in the kernel
_ROWS: Final = 512  # of similarities at once: a table may have thousands of entries


def note_similar(plans: Sequence[Plan], recorder: Recorder) -> None:
    """Start the copy of each sentence's most similar later sentence, and of their cosine.

    ``partner[i] = argmax over j > i of cosine(v_i, v_j)``, over all entries of the request's table,
    as ``SentenceTable.compare`` compares them.

    Args:
        plans: that are not applied yet; those without a sentence table are left alone.

    Raises:
        torch.OutOfMemoryError: nothing that a compaction reads has changed.
    """
    for plan in plans:
        if plan.table is None or len(plan.table.known) < 2:
            continue
        state, used = plan.state, len(plan.table.known)
        vectors = recorder.sentences.vectors[state.held.track_id, :used]
        unit = F.normalize(vectors.float(), dim=-1, eps=_EPS)
        best = [_best_later(unit, first) for first in range(0, used, _ROWS)]
        copy, copied = started_copy(torch.cat(best, dim=1))
        state.sentences.compared = Compared(plan.table.known, copy, copied)


def _best_later(unit: Tensor, first: int) -> Tensor:
    """float64 [2, rows], which holds both exactly: cosine and entry of the best partner behind each
    of the entries from ``first`` on.

    Args:
        unit: float32 [entries, D], normalised vectors.
    """
    rows = unit[first : first + _ROWS]
    similarity = rows @ unit[first:].T
    earlier = torch.ones_like(similarity, dtype=torch.bool).tril()
    cosine, partner = similarity.masked_fill(earlier, -1.0).max(dim=1)
    return torch.stack([cosine.double(), (partner + first).double()])
