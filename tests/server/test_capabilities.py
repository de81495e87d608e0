"""Every row of the capability matrix that a server is asked about: it refuses what it says."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from capability_rows import nested, on_a_server, row_named
from sglang.srt import environ, runtime_context
from sglang.srt.plugins import load_plugins
from sglang.test.test_utils import published_topology

from sgl_skipkv.config import ENV_CONFIG, SettingError
from sgl_skipkv.kernels import on_device
from sgl_skipkv.patches.engine import model_side, retraction, vocabulary
from sgl_skipkv.patches.startup import capabilities, flags
from sgl_skipkv.patches.startup.capabilities import CAPABILITIES
from sgl_skipkv.patches.startup.setting_kinds import Setting, Switch

SETTINGS = [row for row in CAPABILITIES if type(row.check) is Setting]
SWITCHES = [row for row in CAPABILITIES if isinstance(row.check, Switch)]


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)
def test_a_setting_is_refused_unless_it_is_off(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for off in row.check.off:
        on_a_server(monkeypatch, row.check.path, off)
        assert row.check(None) is None
    for other in (2, "something else"):
        on_a_server(monkeypatch, row.check.path, other)
        name = row.check.path.split(".")[-1]
        assert row.check(None) == f"{row.check.reason} ({name}={other})"


@pytest.mark.parametrize("row", SWITCHES, ids=lambda row: row.name)
def test_a_switch_of_the_scheduler_is_refused(row: Any) -> None:
    for value in (False, True):
        assert isinstance(row.check(nested(row.check.attribute, value)), str) == value


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"pp_size": 2}, "pipeline parallel (pp_size=2)"),
        ({"tp_size": 2, "attn_dp_size": 2}, None),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, None),
        ({"tp_size": 2, "attn_dp_size": 2, "moe_dense_tp_size": 1}, None),
        (
            {"tp_size": 4, "attn_dp_size": 2, "moe_dense_tp_size": 1},
            "dense layers of one rank (moe_dense_tp_size=1)",
        ),
        (
            {"tp_size": 2, "moe_dense_tp_size": 1},
            "dense layers of one rank (moe_dense_tp_size=1)",
        ),
        (
            {
                **{"tp_size": 2, "attn_dp_size": 2},
                "enable_dp_attention_local_control_broadcast": True,
            },
            "local control broadcast (enable_dp_attention_local_control_broadcast=True)",
        ),
        (
            {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "deepep"},
            "expert parallel with all-to-all (moe_a2a_backend=deepep)",
        ),
        ({"tp_size": 2, "ep_size": 2}, None),
        (
            {"tp_size": 2, "enable_layernorm_sp": True},
            "layernorm sequence parallel (enable_layernorm_sp=True)",
        ),
        ({"tp_size": 2, "dcp_size": 2}, "decode context parallel (dcp_size=2)"),
        ({"dp_size": 2}, None),
        ({}, None),
    ],
)
def test_how_a_model_may_be_spread(arguments: dict[str, Any], reason: str | None) -> None:
    """With SGLang's own arguments, resolved: known before pools exist, and refused by name."""
    load_plugins()  # the platform that ``device="cpu"`` needs
    device = {"device": "cpu", "attention_backend": "torch_native"}
    with published_topology(role="scheduler", **device, **arguments):
        missing = capabilities.missing_capabilities(None, settings_only=True)
    assert reason in missing if reason is not None else missing == []


def test_a_tokenizer_without_a_vocabulary_is_refused() -> None:
    """As SGLang's own class of tiktoken files is: our code would end the scheduler with it."""
    check = row_named("--skip-tokenizer-init").check
    for tokenizer, reason in (
        (object(), "object without get_vocab"),
        (SimpleNamespace(get_vocab=dict), None),
    ):
        assert check(SimpleNamespace(tokenizer=tokenizer)) == reason


def serving_tokenizer_at(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    """A scheduler of ``--skip-tokenizer-init``, whose ``--tokenizer-path`` this is."""
    how = {"tokenizer_mode": "auto", "tokenizer_backend": "huggingface"}
    serving = SimpleNamespace(tokenizer_path=str(path), **how)
    model = SimpleNamespace(trust_remote_code=False, revision=None)
    monkeypatch.setattr(runtime_context, "get_serving", lambda: serving)
    monkeypatch.setattr(runtime_context, "get_model", lambda: model)
    return SimpleNamespace(tokenizer=None)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
def test_a_skipped_tokenizer_is_loaded(
    family: str, model_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a model's that reads images, which SGLang takes from its processor."""
    scheduler = serving_tokenizer_at(monkeypatch, model_folder(family))
    assert row_named("--skip-tokenizer-init").check(scheduler) is None
    loaded = vocabulary.tokenizer_of(scheduler)
    assert all(loaded.get_vocab()[piece] == i for i, piece in enumerate(tiny_models.PIECES))
    assert vocabulary.tokenizer_of(scheduler) is loaded and scheduler.tokenizer is None
    assert vocabulary.tokenizer_of(SimpleNamespace(tokenizer="SGLang's")) == "SGLang's"


def test_a_skipped_tokenizer_that_cannot_be_loaded_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the reason, and whatever loading it raises: nobody may have asked to evict."""
    check = row_named("--skip-tokenizer-init").check
    said = "--skip-tokenizer-init, and no tokenizer could be loaded: "
    (tmp_path / "config.json").write_text("{}")
    reason = check(serving_tokenizer_at(monkeypatch, tmp_path))
    assert reason.startswith(f"{said}{tmp_path}: ") and len(reason.splitlines()) == 1
    assert check(serving_tokenizer_at(monkeypatch, tmp_path / "none.json")).startswith(said)
    (tmp_path / "tokenizer.json").write_text("[]")
    assert check(serving_tokenizer_at(monkeypatch, tmp_path)).startswith(said)


def test_tokenizer_workers_need_an_sglang_whose_workers_load_plugins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = row_named("several tokenizer workers").check
    for knows, workers, refused in ((True, 2, False), (False, 1, False), (False, 2, True)):
        names = {"SGLANG_HTTP_SERVER_APP_PATH": None} if knows else {}
        monkeypatch.setattr(environ, "envs", SimpleNamespace(**names))
        on_a_server(monkeypatch, "serving.tokenizer_worker_num", workers)
        said = "several tokenizer workers (tokenizer_worker_num=2), which load no plugin"
        assert (check(None) or "").startswith(said) == refused
        assert refused or check(None) is None


def test_steering_beside_offloaded_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_server(monkeypatch, "exec.offload.cpu_offload_gb", 0)
    model_side._refuse_offloaded_layers("steering_vector")
    on_a_server(monkeypatch, "exec.offload.cpu_offload_gb", 2)
    with pytest.raises(SettingError, match="steering_vector: expected no --cpu-offload-gb"):
        model_side._refuse_offloaded_layers("steering_vector")


def read(*given: str) -> dict[str, Any]:
    """What the flags of a server say, before it has loaded anything."""
    parser, server_args = argparse.ArgumentParser(), SimpleNamespace()
    flags.add_flags(None, parser)
    flags.read_flags(server_args, object, parser.parse_args([*given]))
    settings: dict[str, Any] = server_args._skipkv
    return settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--kv-policy distict --kv-budget 64", "kv_policy: expected a policy name, got 'distict'"),
        ("--kv-budget 8", "kv_budget: expected an integer in [13, "),
        ("--kv-interval 16 --kv-interval-min 64", "kv_interval: expected an integer in [64, "),
        ("--skipkv-trace missing/t.jsonl", "trace: expected a file that can be appended to"),
        ("--kv-reuse off", "kv_reuse: expected one of false, keep, budget, got 'off'"),
    ],
)
def test_what_needs_no_model_is_refused_before_it_is_loaded(
    given: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"sgl_skipkv: {re.escape(message)}"):
        read(*given.split())
    assert not [*tmp_path.iterdir()]


def test_traces_are_checked_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of each replica its own, and no other file; of several nodes none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link.jsonl").symlink_to("not yet there")
    (tmp_path / "t.dp1.jsonl").mkdir()
    parser = argparse.ArgumentParser()
    flags.add_flags(None, parser)
    for trace, server, refused in (
        ("t.jsonl", {}, None),
        ("link.jsonl", {}, None),
        ("n" * 9999, {}, None),  # as far as this looks
        ("t.jsonl", {"dp_size": 2}, "t.dp1.jsonl (a folder)"),
        ("no/t.jsonl", {"dp_size": 2}, "no/t.dp0.jsonl (no such folder)"),
        ("no/t.jsonl", {"nnodes": 2}, None),
        ("file/t.jsonl", {}, "file/t.jsonl (no such folder)"),
        (".", {}, ". (a folder)"),
        (".", {"dp_size": 2}, "trace: expected the name of a file, got '.'"),
        ("a\0b", {}, "not a file name"),
    ):
        arguments = parser.parse_args(["--skipkv-trace", trace])
        ends = pytest.raises(SystemExit, match=re.escape(refused or ""))
        with contextlib.nullcontext() if refused is None else ends:
            flags.read_flags(SimpleNamespace(**server), object, arguments)


def test_flags_win_before_anything_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only the environment would make wrong is right with the flag."""
    for environment, given in (
        ({"kv_params": {"decay": 0.5}}, "--kv-policy gkv"),
        ({"kv_interval_min": 256}, "--kv-interval 512"),
    ):
        monkeypatch.setenv(ENV_CONFIG, json.dumps(environment))
        flags.settings_or_exit()  # what each process does when it loads the plugin
        assert read(*given.split()).keys() > environment.keys()


@pytest.mark.parametrize("text", ["false", "False"])
def test_a_flag_can_say_false(text: str) -> None:
    """As Python and JSON write it, and a YAML file either way."""
    assert read("--kv-reuse", text) == {"kv_reuse": False}
    assert read("--kv-reuse", "keep", "--skipkv-trace", "t") == {"kv_reuse": "keep", "trace": "t"}


def test_an_encoder_does_not_start_with_our_flags() -> None:
    for given, starts in ((None, True), ("rkv", False)):
        parser = argparse.ArgumentParser()
        flags.add_flags(None, parser)
        arguments = parser.parse_args([] if given is None else ["--kv-policy", given])
        server_args = SimpleNamespace(encoder_only=True)
        refused = pytest.raises(SystemExit, match="refused: --encoder-only")
        with contextlib.nullcontext() if starts else refused:
            flags.read_flags(server_args, object, arguments)


@pytest.mark.parametrize(
    ("policy", "priorities", "staying", "order"),
    [
        ("default", (5, 1, 1), (), [2, 0, 1]),
        ("priority", (5, 1, 1), (), [0, 2, 1]),
        ("priority", (None, None, None), (), [2, 0, 1]),
        ("default", (5, 1, 1), (1,), [1, 2, 0]),
        ("default", (5, 1, 1), (1, 2), [2, 1, 0]),
        ("priority", (1, 5, 5), (1, 2), [2, 1, 0]),
    ],
)
def test_whom_a_full_pool_retracts_last(
    policy: str, priorities: Any, staying: Any, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third row has just been compacted and would have to be recomputed: it stays as long as
    its equals, and priorities go before that. Where it cannot be recomputed it stays longest."""
    on_a_server(monkeypatch, "schedule.retraction_policy", policy)
    monkeypatch.setattr(retraction, "must_stay", lambda _: [reqs[i] for i in staying])
    ahead = SimpleNamespace(compacted_ahead=lambda state, generated: state.compacted)
    runtime = SimpleNamespace(compactor=ahead)
    states = [SimpleNamespace(runtime=runtime, compacted=i == 2) for i in range(3)]
    reqs = [
        SimpleNamespace(output_ids=[], priority=priority, skipkv=state)
        for priority, state in zip(priorities, states, strict=True)
    ]
    assert retraction.order_victims([0, 1, 2], reqs) == order
    assert retraction.order_victims([0], reqs[:1]) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("encoder-decoder", "encoder-decoder (model_config.is_encoder_decoder)"),
        (
            "routers by modality",
            "routers by modality (model_config.requires_mm_token_modalities)",
        ),
        ("n-gram embeddings", "n-gram embeddings (model_config.use_ngram_embedding)"),
        ("engram layers", "engram layers (model_config.use_engram)"),
    ],
)
def test_what_docs_models_names(name: str, said: str) -> None:
    check = row_named(name).check
    assert check(nested(check.attribute, True)) == said


def test_mrope_on_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check = row_named("mrope with --rl-on-policy-target").check
    for target, axes in (("fsdp", True), (None, True), ("fsdp", False)):
        on_a_server(monkeypatch, "exec.deterministic.rl_on_policy_target", target)
        refused = check(nested("model_config.model_is_mrope", axes))
        said = "mrope with --rl-on-policy-target"
        assert refused == (said if target and axes else None)


def test_hicache_on_a_decode_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check = row_named("HiCache on a decode server").check
    assert check is not None
    for mode, enabled in (("decode", False), ("prefill", True), ("null", True), ("decode", True)):
        on_a_server(monkeypatch, "disagg.disaggregation_mode", mode)
        refused = check(SimpleNamespace(enable_hierarchical_cache=enabled))
        expected = "HiCache on a decode server" if mode == "decode" and enabled else None
        assert refused == expected


def test_what_kv_reuse_is_refused_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (row for row in CAPABILITIES if row.name == "kv_reuse")
    assert row.supported == "per request" and row.check is None
    zmq = '{"publisher": "zmq"}'
    for disabled, events, storage, mode in (
        *((False, None, None, "null"), (True, None, None, "null")),
        *((False, zmq, None, "null"), (False, None, "file", "null")),
        *((False, None, None, "prefill"), (True, None, None, "decode")),
    ):
        on_a_server(monkeypatch, "disagg.disaggregation_mode", mode)
        on_a_server(monkeypatch, "observability.kv_events_config", events)
        on_a_server(monkeypatch, "memory.hicache_storage_backend", storage)
        for hybrid, drafts in ((False, False), (True, False), (False, True)):
            scheduler = SimpleNamespace(disable_radix_cache=disabled, is_hybrid_ssm=hybrid)
            scheduler.spec_algorithm = SimpleNamespace(is_eagle=lambda drafts=drafts: drafts)
            scheduler.page_size = 16
            missing = capabilities.missing_for_reuse(scheduler)
            beside = events is not None, storage is not None, mode != "null", hybrid, drafts
            assert len(missing) == disabled + sum(beside)
            assert all(reason.startswith("kv_reuse with") for reason in missing)


def test_rocm_is_untested_and_so_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (row for row in CAPABILITIES if row.name == "ROCm")
    assert row.supported == "no" and row.why == "untested: unavailable" and row.check is not None
    assert row.check(None) is None
    monkeypatch.setattr(torch.version, "hip", "7.0.1")
    assert row.check(None) == "ROCm 7.0.1: untested"


def test_most_rows_are_of_these_kinds() -> None:
    assert len(SETTINGS) >= 14 and len(SWITCHES) >= 8


@pytest.mark.parametrize(
    ("ranks", "needed_for", "of_runner"),
    [
        (1, None, {}),
        (1, "a GPU", {"device": "cuda"}),
        (1, "CUDA graphs", {"decode_cuda_graph_runner": object()}),
        (1, "CUDA graphs", {"prefill_cuda_graph_runner": object()}),
        (2, "tensor parallel (tp_size=2)", {}),
        (2, "a GPU and tensor parallel (tp_size=2)", {"device": "cuda"}),
    ],
)
def test_where_eviction_must_be_enabled_at_start(
    ranks: int, needed_for: str | None, of_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is missing is made while a server serves."""
    eager = object()
    runner = SimpleNamespace(device="cpu", eager_runner=eager, decode_cuda_graph_runner=None)
    runner.prefill_cuda_graph_runner = eager
    vars(runner).update(of_runner)
    on_a_server(monkeypatch, "parallel.tp_size", ranks)

    def refused(**settings: Any) -> str | None:
        server_args = SimpleNamespace(_skipkv=settings, is_embedding=False)
        worker = SimpleNamespace(model_runner=runner)
        return row_named("GPU").check(SimpleNamespace(server_args=server_args, tp_worker=worker))

    assert refused(kv_policy="distinct") is None
    if needed_for is None:
        assert refused() is None
    else:
        said = f"eviction was not enabled at start, which is needed for {needed_for} ("
        reason = refused() or ""
        assert reason.startswith(said)
        assert "--kv-policy distinct" in reason and "SGL_SKIPKV_CONFIG" in reason


def test_a_prefill_that_records_is_no_replay() -> None:
    side = SimpleNamespace(records_prefill=True)
    graphs = SimpleNamespace(model_runner=SimpleNamespace(skipkv=side))
    asked: list[Any] = []

    def original(graph_runner: Any, forward_batch: Any) -> bool:
        asked.append(forward_batch)
        return True

    assert not model_side.run_recorded_prefill_eagerly(original, graphs, 1) and not asked
    side.records_prefill = False
    assert model_side.run_recorded_prefill_eagerly(original, graphs, 2)
    del graphs.model_runner.skipkv
    assert model_side.run_recorded_prefill_eagerly(original, graphs, 3) and asked == [2, 3]


def test_register_limits_are_of_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, device = {80: 168, 90: 128}, torch.device("cuda")
    assert on_device.register_limit(limits, torch.device("cpu")) == {}
    for capability, limit in (((9, 0), 128), ((8, 9), 168), ((12, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        expected = {} if limit is None else {"maxnreg": limit}
        assert on_device.register_limit(limits, device) == expected
