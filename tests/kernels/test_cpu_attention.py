"""The CPU platform's attention against SGLang's own."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
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


def attended(
    backend: type, given: dict[str, Any], mapping: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """mapping: of the row's slots to those of the pool of window layers; None: it has none."""
    output = torch.full_like(given["query"], torch.nan)  # every element has to be written
    grouped = given["query"].shape[1] != given["k_cache"].shape[1]
    prefill = "extend_seq_lens" in given
    settings = {"scaling": 0.2, "enable_gqa": grouped, "causal": prefill, **options}
    one = backend.__new__(backend)
    one.use_sliding_window_kv_pool = mapping is not None
    one.token_to_kv_pool = SimpleNamespace(translate_loc_from_full_to_swa=partial(_mapped, mapping))
    run = one._run_sdpa_forward_extend if prefill else one._run_sdpa_forward_decode
    run(output=output, **given, **settings)
    return output


def assert_as_exact_as_stock(given: dict[str, Any], **options: Any) -> None:
    """Error against float64 at most twice that of SGLang's own backend."""
    exact = attended(TorchNativeAttnBackend, given, **options)
    single = {
        name: value.float() if value.is_floating_point() else value for name, value in given.items()
    }
    stock = (attended(TorchNativeAttnBackend, single, **options) - exact).abs().max()
    ours = (attended(GroupedTorchAttnBackend, single, **options) - exact).abs().max()
    assert ours <= max(2 * stock, 1e-6)


def _mapped(mapping: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return mapping[slots]


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


@pytest.mark.parametrize("window", [0, 1, 8, 200])
@pytest.mark.parametrize("new", [None, [40, 120, 33], [5, 120, 20]], ids=str)
def test_a_window_is_the_stock_one(new: list[int] | None, window: int) -> None:
    given = inputs(4, 2, [40, 120, 33], torch.float64, new)
    assert_as_exact_as_stock(given, sliding_window_size=window)


@pytest.mark.parametrize("new", [None, [5, 120, 20]], ids=["decode", "prefill"])
def test_a_window_is_read_in_its_own_pool(new: list[int] | None) -> None:
    """Its slots are others, and layers that see everything read the row's own."""
    given = inputs(4, 2, [40, 120, 33], torch.float64, new)
    mapping = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))
    moved = {**given}
    for name in ("k_cache", "v_cache"):
        moved[name] = torch.empty_like(given[name])
        moved[name][mapping] = given[name]
    window = {"sliding_window_size": 8}
    expected = attended(GroupedTorchAttnBackend, given, **window)
    found = attended(GroupedTorchAttnBackend, moved, mapping=mapping, **window)
    assert torch.equal(found, expected)
    whole = attended(GroupedTorchAttnBackend, given, mapping=mapping)
    assert torch.equal(whole, attended(GroupedTorchAttnBackend, given))


def with_sinks(given: dict[str, Any], sinks: torch.Tensor, window: int | None) -> torch.Tensor:
    """The formula, query by query and head by head: the sink takes weight and gives nothing."""
    news = given.get("extend_seq_lens", torch.ones_like(given["seq_lens"])).tolist()
    heads, found, queries = len(sinks), [], iter(given["query"])
    lengths = zip(given["req_pool_indices"], given["seq_lens"].tolist(), news, strict=True)
    for row, length, new in lengths:
        for last in range(length - new, length):
            first = 0 if window is None else max(last - window, 0)
            slots, query = given["req_to_token"][row, first : last + 1].long(), next(queries)
            for head in range(heads):
                kv_head = head * given["k_cache"].shape[1] // heads
                weights = (given["k_cache"][slots, kv_head] @ query[head] * 0.2).exp()
                values = given["v_cache"][slots, kv_head]
                found.append(weights @ values / (weights.sum() + sinks[head].exp()))
    return torch.stack(found).view(-1, heads, 16)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("new", [None, [40, 120, 33], [5, 7, 20]], ids=str)
def test_sinks_take_weight_and_give_nothing(new: list[int] | None, window: int | None) -> None:
    """Through the methods that a layer calls. float32 is off by rounding only."""
    exact = inputs(4, 2, [40, 120, 33], torch.float64, new)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 5.0], dtype=torch.float64)
    given = {name: v.float() if v.is_floating_point() else v for name, v in exact.items()}
    for numbers, limit in ((exact, 1e-12), (given, 2e-6)):
        output = called(numbers, sinks=sinks.to(numbers["query"].dtype), window=window)
        assert (output - with_sinks(exact, sinks, window)).abs().max() < limit
    plain = called(exact, sinks=None, window=window)
    assert not torch.allclose(plain, with_sinks(exact, sinks, window), atol=1e-2)
    nothing = torch.full_like(sinks, -torch.inf)
    assert torch.allclose(called(exact, sinks=nothing, window=window), plain, atol=1e-12)


def called(given: dict[str, Any], sinks: torch.Tensor | None, window: int | None) -> torch.Tensor:
    """What the backend answers an attention layer."""
    one = GroupedTorchAttnBackend.__new__(GroupedTorchAttnBackend)
    one.use_sliding_window_kv_pool = False
    one.token_to_kv_pool = SimpleNamespace(
        get_key_buffer=lambda layer: given["k_cache"],
        get_value_buffer=lambda layer: given["v_cache"],
    )
    one.req_to_token_pool = SimpleNamespace(req_to_token=given["req_to_token"])
    sizes = {"qk_head_dim": 16, "v_head_dim": 16, "tp_q_head_num": 4, "tp_k_head_num": 2}
    layer = SimpleNamespace(
        **sizes,
        **{"layer_id": 0, "scaling": 0.2, "is_cross_attention": False, "attn_type": None},
        sliding_window_size=-1 if window is None else window,
    )
    names = ("req_pool_indices", "seq_lens", "extend_prefix_lens", "extend_seq_lens")
    batch = SimpleNamespace(**{name: given.get(name) for name in names})
    batch.out_cache_loc = batch.encoder_lens = None
    forward = one.forward_extend if "extend_seq_lens" in given else one.forward_decode
    query = given["query"].flatten(1)
    answer = forward(query, None, None, layer, batch, save_kv_cache=False, sinks=sinks)
    assert one._sinks is None  # the next layer has its own
    return answer.view(-1, 4, 16)


def test_sinks_that_nobody_can_count_are_refused() -> None:
    given = inputs(4, 2, [40, 9], torch.float32)
    given["k_cache"] = given["k_cache"].bfloat16()
    with pytest.raises(NotImplementedError, match="attention sinks"):
        called(given, sinks=torch.zeros(4), window=None)


@pytest.mark.parametrize("new", [None, [30, 9]], ids=["decode", "prefill"])
def test_what_it_does_not_do_itself_is_left_to_the_stock_one(new: list[int] | None) -> None:
    given = inputs(4, 2, [40, 9], torch.float32, new)
    others: list[dict[str, Any]] = [{"encoder_lens": torch.tensor([3, 2])}]
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
