"""What one attention group decides for itself, on SGLang's own arguments and functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from capability_rows import row_named
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler_components import dp_attn
from sglang.srt.plugins import load_plugins
from sglang.test.test_utils import published_topology

from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.patches.engine.dp_attention import vote_against_prefill_graph
from sgl_skipkv.patches.engine.model_side import _refuse_attention_groups, _track_count
from sgl_skipkv.patches.engine.waiting import wants_to_evict
from sgl_skipkv.patches.startup.measurements import text_ids
from sgl_skipkv.patches.startup.replicas import trace_paths

DEVICE = {"device": "cpu", "attention_backend": "torch_native"}


def batch_of(*states: object) -> Any:
    mode = SimpleNamespace(is_idle=lambda: True)
    return SimpleNamespace(
        reqs=[SimpleNamespace(skipkv=state) for state in states], forward_mode=mode
    )


@pytest.mark.parametrize(
    ("batch", "votes_for_graph"),
    [(None, True), (batch_of(), True), (batch_of(None), True), (batch_of(None, "state"), False)],
)
def test_no_prefill_graph_for_a_step_with_a_budgeted_request(
    batch: Any, votes_for_graph: bool
) -> None:
    """One rank's vote decides for all; the others' are SGLang's own."""
    vote = dp_attn._local_prefill_cuda_graph_vote
    original = getattr(vote, "__wrapped__", vote)  # where a test has installed the plugin
    asked = {"local_batch": batch, "coordinated_prefill": True, "breakable_prefill": True}
    unread = ("num_tokens", "prefill_graph_runner", "spec_algorithm", "model_config")
    asked |= dict.fromkeys(unread)
    assert vote_against_prefill_graph(original, **asked) == votes_for_graph


@pytest.mark.parametrize(
    ("arguments", "most_running", "tracks"),
    [
        ({}, 64, 64),
        ({"tp_size": 4}, 64, 64),
        ({"tp_size": 4, "attn_dp_size": 2}, 64, 32),
        ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 4, 1),
        ({"tp_size": 4, "attn_dp_size": 2}, 1024, 256),
        ({"tp_size": 4, "attn_dp_size": 2}, None, 256),
    ],
)
def test_a_group_records_for_the_requests_that_it_may_run(
    arguments: dict[str, Any], most_running: int | None, tracks: int
) -> None:
    load_plugins()  # the platform that ``device="cpu"`` needs
    with published_topology(role="scheduler", **DEVICE, **arguments):
        assert _track_count(ServerConfig(), most_running) == tracks


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({}, ["trace.jsonl"]),
        ({"dp_size": 1, "attn_dp_size": 1}, ["trace.jsonl"]),
        ({"dp_size": 2, "attn_dp_size": 1}, ["trace.dp0.jsonl", "trace.dp1.jsonl"]),
        ({"dp_size": 1, "attn_dp_size": 2}, ["trace.dp0.jsonl", "trace.dp1.jsonl"]),
    ],
)
def test_a_group_has_a_trace_as_a_replica_has(sizes: dict[str, int], names: list[str]) -> None:
    """``dp_size`` is given, or where SGLang has moved it to."""
    assert [*trace_paths("trace.jsonl", SimpleNamespace(**sizes)).values()] == names


@pytest.mark.parametrize(
    ("arguments", "chunk", "tokens"),
    [
        ({}, 64, 1024),
        ({"tp_size": 8, "attn_dp_size": 8}, None, 1024),
        ({"tp_size": 8, "attn_dp_size": 8}, 1024, 1024),
        ({"tp_size": 8, "attn_dp_size": 8}, 512, 512),
        ({"tp_size": 8, "attn_dp_size": 8}, 64, 256),
    ],
)
def test_groups_measure_no_more_at_once_than_they_prefill(
    arguments: dict[str, Any], chunk: int | None, tokens: int
) -> None:
    """Together; but enough to tell how far heads look."""
    load_plugins()
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(size=4096),
        chunked_prefill_size=chunk,
        model_config=SimpleNamespace(context_len=4096),
        tokenizer=SimpleNamespace(encode=lambda text: [*range(len(text))]),
    )
    with published_topology(role="scheduler", **DEVICE, **arguments):
        assert len(text_ids(scheduler, ServerConfig())) == tokens


def test_hidden_states_are_captured_without_groups_only() -> None:
    """A whole hidden state between layers is a gather over all groups."""
    load_plugins()
    with published_topology(role="scheduler", **DEVICE, tp_size=2):
        _refuse_attention_groups("steering_capture")
    groups = {"tp_size": 2, "attn_dp_size": 2}
    with (
        published_topology(role="scheduler", **DEVICE, **groups),
        pytest.raises(SettingError, match=r"steering_capture: expected no DP attention beside it"),
    ):
        _refuse_attention_groups("steering_capture")


@pytest.mark.parametrize("groups", [1, 2])
def test_results_that_come_late_are_refused_beside_groups(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of one group is launched behind the result that ends its request."""
    load_plugins()
    check = row_named("consecutive prefills without overlap").check
    with published_topology(role="scheduler", **DEVICE, tp_size=2, attn_dp_size=groups):
        assert check(None) is None
        with envs.SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP.override(True):
            assert (check(None) is None) == (groups == 1)


@pytest.mark.parametrize(
    ("evicts", "output_ids", "to_finish", "wants"),
    [
        (True, [], None, True),
        (False, [], None, False),
        (True, [5], None, False),
        (True, [], "refused", False),
    ],
)
def test_who_waits_for_new_weights(
    evicts: bool, output_ids: list[int], to_finish: str | None, wants: bool
) -> None:
    state = SimpleNamespace(settings=SimpleNamespace(evicts=evicts))
    req = SimpleNamespace(skipkv=state, output_ids=output_ids, to_finish=to_finish)
    assert wants_to_evict(req) == wants
    assert not wants_to_evict(SimpleNamespace(output_ids=[], to_finish=None))
