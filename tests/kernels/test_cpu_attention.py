"""The CPU platform's decode attention against SGLang's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.platforms import current_platform

from sgl_skipkv.cpu.attention import GroupedTorchAttnBackend

SLOTS, ROWS, COLUMNS = 400, 8, 120


def inputs(
    query_heads: int, kv_heads: int, lengths: list[int], dtype: torch.dtype
) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(query_heads + len(lengths))
    batch = len(lengths)
    table = torch.randint(SLOTS, (ROWS, COLUMNS), generator=draw, dtype=torch.int32)
    return {
        "query": torch.randn(batch, query_heads, 16, generator=draw, dtype=dtype),
        "k_cache": torch.randn(SLOTS, kv_heads, 16, generator=draw, dtype=dtype),
        "v_cache": torch.randn(SLOTS, kv_heads, 16, generator=draw, dtype=dtype),
        "req_to_token": table,
        "req_pool_indices": torch.randperm(ROWS, generator=draw)[:batch],
        "seq_lens": torch.tensor(lengths),
    }


def attended(backend: type, given: dict[str, Any], **options: Any) -> torch.Tensor:
    output = torch.full_like(given["query"], torch.nan)  # every element has to be written
    grouped = given["query"].shape[1] != given["k_cache"].shape[1]
    settings = {"scaling": 0.2, "enable_gqa": grouped, "causal": False, **options}
    backend.__new__(backend)._run_sdpa_forward_decode(output=output, **given, **settings)
    return output


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", [[1], [7, 120, 1, 33], [120] * 8])
def test_a_decode_step_is_the_stock_one(heads: tuple[int, int], lengths: list[int]) -> None:
    """Error against float64 at most twice that of SGLang's own backend."""
    exact = attended(TorchNativeAttnBackend, inputs(*heads, lengths, torch.float64))
    given = inputs(*heads, lengths, torch.float64)
    single = {
        name: value.float() if value.is_floating_point() else value for name, value in given.items()
    }
    stock = (attended(TorchNativeAttnBackend, single) - exact).abs().max()
    ours = (attended(GroupedTorchAttnBackend, single) - exact).abs().max()
    assert ours <= max(2 * stock, 1e-6)


def test_what_it_does_not_do_itself_is_left_to_the_stock_one() -> None:
    given = inputs(4, 2, [40, 9], torch.float32)
    for options in ({"sliding_window_size": 8}, {"encoder_lens": torch.tensor([3, 2])}):
        ours = attended(GroupedTorchAttnBackend, given, **options)
        assert torch.equal(ours, attended(TorchNativeAttnBackend, given, **options))
        assert not torch.equal(ours, attended(GroupedTorchAttnBackend, given))


def test_a_result_does_not_depend_on_the_neighbours() -> None:
    given = inputs(4, 2, [120, 30, 77], torch.float32)
    together = attended(GroupedTorchAttnBackend, given)
    for i in range(3):
        per_request = ("query", "req_pool_indices", "seq_lens")
        one = {name: v[i : i + 1] if name in per_request else v for name, v in given.items()}
        assert torch.equal(attended(GroupedTorchAttnBackend, one)[0], together[i])


def test_the_platform_uses_it_under_the_name_that_sglang_knows() -> None:
    current_platform.init_backend()
    assert ATTENTION_BACKENDS["torch_native"] is GroupedTorchAttnBackend
