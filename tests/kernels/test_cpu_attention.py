"""The CPU platform's attention against SGLang's own."""

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
    query_heads: int,
    kv_heads: int,
    lengths: list[int],
    dtype: torch.dtype,
    new: list[int] | None = None,
) -> dict[str, Any]:
    """Of a decode step, or of a prefill of so many ``new`` tokens per request."""
    draw = torch.Generator().manual_seed(query_heads + len(lengths))
    queries = len(lengths) if new is None else sum(new)
    table = torch.randint(SLOTS, (ROWS, COLUMNS), generator=draw, dtype=torch.int32)
    given = {
        "query": torch.randn(queries, query_heads, 16, generator=draw, dtype=dtype),
        "k_cache": torch.randn(SLOTS, kv_heads, 16, generator=draw, dtype=dtype),
        "v_cache": torch.randn(SLOTS, kv_heads, 16, generator=draw, dtype=dtype),
        "req_to_token": table,
        "req_pool_indices": torch.randperm(ROWS, generator=draw)[: len(lengths)],
        "seq_lens": torch.tensor(lengths),
    }
    if new is not None:
        given["extend_seq_lens"] = torch.tensor(new)
        given["extend_prefix_lens"] = torch.tensor(lengths) - given["extend_seq_lens"]
    return given


def attended(backend: type, given: dict[str, Any], **options: Any) -> torch.Tensor:
    output = torch.full_like(given["query"], torch.nan)  # every element has to be written
    grouped = given["query"].shape[1] != given["k_cache"].shape[1]
    prefill = "extend_seq_lens" in given
    settings = {"scaling": 0.2, "enable_gqa": grouped, "causal": prefill, **options}
    one = backend.__new__(backend)
    run = one._run_sdpa_forward_extend if prefill else one._run_sdpa_forward_decode
    run(output=output, **given, **settings)
    return output


def assert_as_exact_as_stock(given: dict[str, Any]) -> None:
    """Error against float64 at most twice that of SGLang's own backend."""
    exact = attended(TorchNativeAttnBackend, given)
    single = {
        name: value.float() if value.is_floating_point() else value for name, value in given.items()
    }
    stock = (attended(TorchNativeAttnBackend, single) - exact).abs().max()
    ours = (attended(GroupedTorchAttnBackend, single) - exact).abs().max()
    assert ours <= max(2 * stock, 1e-6)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    ("lengths", "new"),
    [
        *(([1], None), ([7, 120, 1, 33], None), ([120] * 8, None)),
        *(([40, 120, 33], new) for new in ([1, 1, 1], [5, 120, 20], [40, 7, 33])),
    ],
    ids=str,
)
def test_it_is_the_stock_one(
    heads: tuple[int, int], lengths: list[int], new: list[int] | None
) -> None:
    """Decode steps; prefills from nothing, behind cached tokens, and both in one batch."""
    assert_as_exact_as_stock(inputs(*heads, lengths, torch.float64, new))


@pytest.mark.parametrize("new", [None, [30, 9]], ids=["decode", "prefill"])
def test_what_it_does_not_do_itself_is_left_to_the_stock_one(new: list[int] | None) -> None:
    given = inputs(4, 2, [40, 9], torch.float32, new)
    others = [{"sliding_window_size": 8}, {"encoder_lens": torch.tensor([3, 2])}]
    if new is not None:
        others.append({"causal": False})
    for options in others:
        ours = attended(GroupedTorchAttnBackend, given, **options)
        assert torch.equal(ours, attended(TorchNativeAttnBackend, given, **options))
        assert not torch.equal(ours, attended(GroupedTorchAttnBackend, given))


@pytest.mark.parametrize("new", [None, [20, 30, 7]], ids=["decode", "prefill"])
def test_a_result_does_not_depend_on_the_neighbours(new: list[int] | None) -> None:
    given = inputs(4, 2, [120, 30, 77], torch.float32, new)
    together = attended(GroupedTorchAttnBackend, given).split(new or [1, 1, 1])
    queries = given["query"].split(new or [1, 1, 1])
    per_request = {"req_pool_indices", "seq_lens", "extend_prefix_lens", "extend_seq_lens"}
    for i in range(3):
        one = {name: v[i : i + 1] if name in per_request else v for name, v in given.items()}
        assert torch.equal(
            attended(GroupedTorchAttnBackend, {**one, "query": queries[i]}), together[i]
        )


def test_the_platform_uses_it_under_the_name_that_sglang_knows() -> None:
    current_platform.init_backend()
    assert ATTENTION_BACKENDS["torch_native"] is GroupedTorchAttnBackend
