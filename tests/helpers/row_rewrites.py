"""One row of a page table, rewritten in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_skipkv.eviction.page_table import RowRewrite
from sgl_skipkv.eviction.select import Ranges, Selection, select_together


def compact_row(
    table: Tensor, row: int, row_tokens: int, selection: Selection, *, check: bool = False
) -> Tensor:
    """Rewrite one row in place; int64 [evicted], the slots that it gives up."""
    rewrite = RowRewrite(table, [row], [selection], [torch.arange(row_tokens)], check=check)
    rewrite.write()
    return rewrite.vacated[0]


def select(scores: Tensor, protected: Ranges, keep_tokens: int) -> Selection:
    """``select_together`` for one request."""
    [selection], _ = select_together([scores], [protected], [keep_tokens])
    return selection
