"""The runtime with its Triton kernels, interpreted: the same kept sets and tables as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_on_cpu import KERNELS, on_triton
from pool_steering import make_steerer
from synthetic import HIDDEN, PROMPT, TEXTS, SyntheticServer, served, unlike
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from triton_tools import triton_type, variant

from bench.kernels.compile import all_cases
from sgl_skipkv.config import ServerConfig
from sgl_skipkv.eviction.warm_up import compiled_windows, warm_up
from sgl_skipkv.policy.inputs.paged_cache import PagedCache
from sgl_skipkv.recording.recorder import Recording
from sgl_skipkv.recording.sentences import Delimiters
from sgl_skipkv.request.state import RequestState

#: requests of one launch that ask for different things
ASKED: list[tuple[str, dict[str, Any]]] = [
    *((name, {"window": 4}) for name in ("skipkv", "rkv", "snapkv", "skipkv+", "h2o", "rpc")),
    *(("rkv", {}), ("rkv", {"kernel": 1}), ("rkv", {"threshold": -0.1}), ("tova", {})),
    *(("skipkv", {"threshold": 0.9, "kernel": 15}), ("rpc", {}), ("rpc", {"kernel": 31})),
    *(("raas", {"alpha": 0.02}), ("lazy", {"alpha": 0.02})),
    *(("gkv", {"window": 4}), ("crystal", {"alpha": 0.3}), ("keydiff", {})),
    *(("expected", {}), ("expected", {"horizon": 3, "window": 3})),
    *(("triattention", {}), ("triattention", {"sink": 0, "window": 1})),
    *(("vase", {"window": 4}), ("vase", {"large": 0.5, "kernel": 31})),
    *(("distinct", {}), ("distinct", {"ending": 2, "recent": 0})),
    *(("rkv", {"quotas": True}), ("keydiff", {"quotas": True, "window": 4})),
]
FUNCTIONS = {
    value.fn.__name__: value
    for module in KERNELS
    for value in vars(module).values()
    if isinstance(value, JITFunction)
}


def history(steps: int) -> tuple[list[list[list[int]]], dict[str, torch.Tensor]]:
    """Kept positions of every compaction of every request, and what was recorded."""
    server = SyntheticServer(check_ledger=False, rows=len(ASKED), tracks=len(ASKED))
    calls = unlike(server, ASKED, kv_budget=24)
    for _ in range(steps):
        server.decode(*calls)
    sentences = server.recorder.sentences
    redundancy = [call.state.sentences.redundancy for call in calls]
    tables = {
        "queries": server.recorder.queries.data[:, 1:],
        **{name: getattr(sentences, name)[1:] for name in ("total", "length", "index", "vectors")},
        "redundancy": torch.cat([known.values for known in redundancy if known is not None]),
    }
    return [call.compactions for call in calls], tables


@pytest.mark.slow
def test_kept_sets_and_tables_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And types of all arguments of a launch, None and other constants among them, are those of a
    compiled variant: any other would be compiled in a server, with spills that no test has seen."""
    variants = [case for _, case in all_cases()]

    def types(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        given = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
        named = [(name, triton_type(given[name])) for name in kernel.arg_names if name in given]
        return (kernel.fn.__name__, *named)

    def every_other(state: RequestState) -> frozenset[int]:
        return frozenset(range(0, len(state.sentences.live), 2))

    monkeypatch.setattr(RequestState, "input_sentences", every_other)
    expected, tables = history(62)
    with on_triton():
        launched = seen_launches(monkeypatch, types)
        found, recorded = history(62)
    assert found == expected and all(len(one) >= 3 for one in found)
    for name in ("queries", "length", "index"):
        assert torch.equal(recorded[name], tables[name]), name
    for name in ("total", "vectors", "redundancy"):
        torch.testing.assert_close(recorded[name], tables[name], atol=1e-5, rtol=1e-5)
    compiled = {case.function.fn.__name__ for case in variants}
    assert {name for name, *_ in launched} == compiled - {"_steering_add_kernel", "_move_kv_kernel"}
    for name, *given in launched:
        of_kernel = [case for case in variants if case.function.fn.__name__ == name]
        assert any(all(has(case, *one) for one in given) for case in of_kernel), (name, given)


def launched_variants(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """What Triton would compile for all launches from here on."""
    return seen_launches(
        monkeypatch, lambda kernel, *how: variant(FUNCTIONS[kernel.fn.__name__], *how)
    )


def seen_launches(
    monkeypatch: pytest.MonkeyPatch, what: Callable[..., Any]
) -> set[tuple[Any, ...]]:
    """``what`` of kernel, arguments and options, for all launches from here on."""
    launched: set[tuple[Any, ...]] = set()
    run = InterpretedFunction.run

    def spied(self: Any, *arguments: Any, **options: Any) -> Any:
        launched.add(what(self, arguments, options))
        return run(self, *arguments, **options)

    monkeypatch.setattr(InterpretedFunction, "run", spied)
    return launched


@pytest.mark.slow
def test_a_server_compiles_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``warm_up`` no step and no compaction launches a variant that was not launched before:
    requests alone and together, rows of any length, prompts and windows that differ."""
    with on_triton():
        launched = launched_variants(monkeypatch)
        server = SyntheticServer(check_ledger=False)
        recorder = server.recorder
        before = [table.clone() for table in recorder.sentences.tables().values()]
        cache = PagedCache.of(
            list(server.pool_keys), server.req_to_token, v_layers=list(server.pool_values)
        )
        assert cache is not None
        steerer = make_steerer(Delimiters(TEXTS, 28), HIDDEN, 4, server.device)
        width = server.req_to_token.shape[1]
        warm_up(recorder, cache, compiled_windows(server.config), steerer, width=width)
        for was, now in zip(before, recorder.sentences.tables().values(), strict=True):
            assert torch.equal(was[1:], now[1:]), "more than scratch"
        assert not recorder.queries.data.any() and not server.req_to_token.any()
        warm, compactions = set(launched), 0
        for seed in range(4):
            prompts = [(3,) * (PROMPT + 7 * i + seed) for i in range(seed + 1)]
            names = (
                ("skipkv", "rkv", "snapkv", "skipkv+") if seed % 2 else ("tova", "h2o", "distinct")
            )
            windows = (4, 3 + seed, 7, 4)
            calls = [
                served(
                    server,
                    **{"seed": seed, "prompt": prompt, "kv_policy": name, "kv_budget": 24},
                    kv_params={"window": window},
                )
                for prompt, name, window in zip(prompts, names, windows, strict=False)
            ]
            for _ in range(62):
                server.decode(*calls)
            compactions += sum(len(call.compactions) for call in calls)
            for call in calls:
                server.finish(call)
        steerer.start(2, steerer.schedule(1.0, []))
        steerer.decode(torch.zeros(3, HIDDEN), torch.arange(3), torch.tensor([4, 21, 5]))
        assert steerer._tables["nonexecution"][0] == 0
    assert compactions > 20
    assert launched == warm
    others = {"widened", "_query_offsets", "_logits", "_move_kv_kernel"}  # called; of larger pages
    assert {name for name, *_ in warm} == set(FUNCTIONS) - others


def test_recomputed_tokens_take_one_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: 16 and others, and behind any token of their pass."""
    recorder = SyntheticServer(check_ledger=False).recorder
    none, hidden = (
        torch.zeros(0, dtype=torch.int64),
        torch.randn(40, recorder.sentences.total.shape[1]),
    )
    with on_triton():
        launched = launched_variants(monkeypatch)
        for first, stop in ((2, 9), (5, 21), (0, 2)):
            of_track = torch.tensor([1]), slice(first, stop)
            replay = Recording(none, none, tokens=none, generated=(of_track,))
            recorder.record_hidden(replay, torch.arange(40), hidden)
    assert recorder.sentences.length[1] + recorder.sentences.index[1] > 0
    assert len(launched) == 1


def test_windows_that_are_compiled_at_the_start() -> None:
    assert compiled_windows(ServerConfig(kv_policy="rkv")) == {1, 2, 3, 4, 5, 6, 7, 8}
    large = ServerConfig(kv_params={"window": 64}, query_window=128)
    assert compiled_windows(large) == {*range(1, 33), 64}


def has(case: Any, name: str, type_: str) -> bool:
    """Whether a compiled variant takes this argument as it is passed."""
    if name in case.constexprs:
        return triton_type(case.constexprs[name]) == type_
    return case.signature[name] == type_ or (case.signature[name], type_) == ("i64", "i32")
