"""``skipkv doctor``: versions, platform, every hook's state, every capability, one verdict."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_models import FAMILIES, WITH_VISION
from transformers import AutoConfig

from sgl_skipkv.cli.doctor import show
from sgl_skipkv.cli.main import main
from sgl_skipkv.patches.registry import HOOKS, function_of, of_version
from sgl_skipkv.patches.startup import hook_bodies
from sgl_skipkv.patches.startup.capabilities import CAPABILITIES


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


VERSION = metadata.version("sglang")
OURS = of_version(HOOKS, VERSION)
#: hooks whose functions doctor shall take for changed: one hash is another, one was never recorded
CHANGED = [OURS[0].target, OURS[-1].target]


@pytest.fixture(scope="module")
def doctor(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    hashes = json.loads(hook_bodies.FILE.read_text())
    hashes[VERSION][CHANGED[0]] = "0" * 12
    del hashes[VERSION][CHANGED[1]]
    file = tmp_path_factory.mktemp("doctor") / "hook_bodies.json"
    file.write_text(json.dumps(hashes))
    command = (
        "import sys, pathlib; from sgl_skipkv.patches.startup import hook_bodies; "
        f"hook_bodies.FILE = pathlib.Path({str(file)!r}); "
        "from sgl_skipkv.cli.main import main; sys.exit(main(['doctor', '--json']))"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_it_names_everything(doctor: subprocess.CompletedProcess[str]) -> None:
    """As JSON, and as the tables that are made of it."""
    assert doctor.returncode == 0, doctor.stderr[-2000:]
    found = json.loads(doctor.stdout)
    assert (found["state"], found["problems"]) == ("ready", [])
    console = Console(width=300, file=io.StringIO(), record=True)
    show(found, console)
    printed = console.export_text()
    for package in ("sglang", "torch", "transformers"):
        assert metadata.version(package) == found["versions"][package]
        assert metadata.version(package) in printed
    assert "skipkv_cpu" in printed and found["warnings"] == []
    lines = printed.splitlines()
    for hook in OURS:
        line = next(line for line in lines if hook.target in line and hook.why in line)
        changed = hook.target in CHANGED
        assert (f"body changed since {VERSION}" if changed else " ok ") in line
    for row in CAPABILITIES:
        line = next(line for line in lines if row.name in line and row.why in line)
        assert f" {row.supported} " in line
    assert "ready" in printed
    states = {one["hook"]: one["state"] for one in found["hooks"]}
    assert states == {hook.target: "changed" if hook.target in CHANGED else "ok" for hook in OURS}
    assert [one["feature"] for one in found["capabilities"]] == [row.name for row in CAPABILITIES]


def test_it_says_so_where_no_server_can_start() -> None:
    """SGLang finds no device, and the platform without one was not asked for."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "SGLANG_PLATFORM": ""}
    command = (
        "import sys; from sgl_skipkv.cli.main import main; sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", command],
        **{"capture_output": True, "text": True, "timeout": 300, "check": False},
        env={**os.environ, **hidden},
    )
    (warning,) = json.loads(done.stdout)["warnings"]
    assert "no accelerator" in warning and "SGLANG_PLATFORM=skipkv_cpu" in warning


class _Proxy(BaseHTTPRequestHandler):
    """Something on the way that lists a model for whoever has its key, and then answers nothing."""

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == "Bearer secret"
        body = b'{"data": [{"id": "m"}]}' if allowed else b"{}"
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.send_error(503 if "Authorization" in self.headers else 401)


def test_an_endpoint_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{proxy.server_port}"
        assert main(["doctor", "--url", url + "/", "--api-key", "secret"]) == 1
        assert capsys.readouterr().out.count("status 503") == 9
        assert main(["doctor", "--url", url, "--api-key", "secret", "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert found["arrive"] is False and len(found["budgets"]) == 9
        assert all("status 503" in one["text"] for one in found["budgets"])
        _assert_no_endpoint(url, "status 401", capsys)
        proxy.shutdown()
    _assert_no_endpoint(url, "nothing listens there", capsys)
    for address in ("127.0.0.1", "localhost:30000"):
        _assert_no_endpoint(address, "no http:// in front", capsys)


def _assert_no_endpoint(url: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--url", url])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "url: expected the address of a running server or router" in message
    assert f"got '{url} ({why})'; choices: " in message


SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 3, "vocab_size": 64},
}
WITH_LATENTS: dict[str, Any] = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": None},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "linear_attn_config": {
        **{"kda_layers": [1, 2], "full_attn_layers": [3]},
        **{"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4},
    },
}
#: type, architecture, more of its config, and what is said of it
CANNOT: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    (
        *(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            {"num_key_value_heads": 4, "index_topk": 64, "index_head_dim": 128},
        ),
        "sparse attention (an indexer beside the latents)",
    ),
    ("gemma2", "Gemma2ForCausalLM", {}, "capped attention logits (at 50.0)"),
    ("gemma3_text", "Gemma3ForCausalLM", {}, "full attention (3 of 3 layers, window 4096)"),
    (
        *("mamba", "MambaForCausalLM", {}),
        "linear attention, Mamba, short convolutions (no layer with KV)",
    ),
    (
        *("kimi_linear", "KimiLinearForCausalLM", WITH_LATENTS),
        "linear attention, Mamba, short convolutions (MLA in the other layers)",
    ),
    ("bert", "BertModel", {}, "embedding models (BertModel)"),
    (
        *("glm_image", "GlmImageForConditionalGeneration", {}),
        "generated images (GlmImageForConditionalGeneration)",
    ),
)


# Transformers does not know one of them, and changes fields of the others.
NOT_BY_TRANSFORMERS = ("kimi_linear", "qwen3_next", "nemotron_h")


def write_config(folder: Path, kind: str, architecture: str, **more: Any) -> Path:
    """A config.json and nothing else."""
    if kind in NOT_BY_TRANSFORMERS:
        values = {"model_type": kind, "architectures": [architecture], **SIZES, **more}
        (folder / "config.json").write_text(json.dumps(values))
        return folder
    config = AutoConfig.for_model(kind, **{**SIZES, **more})
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


# A qwen2 and a qwen3_moe of other sizes.
LEFT_OUT = ("for_a_gpu", "for_four_ranks")
WITH_WINDOWS = ("gemma3", "gpt_oss")
LAYERS = {"gemma3": 4, "gpt_oss": 4, "lfm2": 2, "qwen3_next": 2}  # with attention
NOT_STEERED = ("olmo2", "granite", "gemma", "gemma3", "deepseek_v3", "lfm2", "qwen3_next")


@pytest.mark.parametrize("kind", [one for one in FAMILIES if one not in LEFT_OUT])
def test_a_model_that_was_tested(kind: str, model_folder: Any, capsys: Any) -> None:
    folder = model_folder(kind)
    assert main(["doctor", "--model", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for path in (folder, folder / "config.json"):
        assert main(["doctor", "--model", str(path)]) == 0
    printed = capsys.readouterr().out
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    latent, layers = kind == "deepseek_v3", LAYERS.get(kind, 3)
    cached = "1 latent of 32" if latent else "2 KV heads of 16"
    assert architecture in printed and f"{layers} layers, 4 query heads, {cached}" in printed
    assert ("no: 400 (MLA, rope yarn)" in printed) == latent
    assert ("no: 400 (heads, rope mrope)" in printed) == (kind in WITH_VISION)
    least = "13 tokens"
    if kind in WITH_WINDOWS:
        least = "37 tokens: each compaction keeps the window of 32"
    assert re.search(rf"least kv_budget +│ {least}", printed)
    assert least.startswith(f"{found['least_budget_tokens']} ") and found["layers"] == layers
    assert found["reasons"] == [] and found["architecture"] == architecture
    assert "yes: docs/models.md" in printed and "yes, as far as the file tells" in printed
    steered = re.search(r"steering +│ yes", printed) is not None
    assert steered == (kind not in NOT_STEERED)
    state_layers = 2 if kind in ("lfm2", "qwen3_next") else 0
    assert found["state_layers"] == state_layers
    assert ("2 layers, untouched: no kv_reuse" in printed) == bool(state_layers)


@pytest.mark.parametrize(
    ("kind", "architecture", "more", "said"), CANNOT, ids=lambda x: str(x)[:20]
)
def test_a_model_that_cannot_evict(
    *, kind: str, architecture: str, more: dict[str, Any], said: str, tmp_path: Path, capsys: Any
) -> None:
    folder = write_config(tmp_path, kind, architecture, **more)
    assert main(["doctor", "--model", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert said in printed and "eviction cannot work" in printed and "steering" not in printed


def test_layers_with_a_state_beside_layers_with_kv(tmp_path: Path, capsys: Any) -> None:
    """Of Qwen3-Next every fourth layer has KV; of Falcon-H1 every layer has both, and of Nemotron-H
    some have neither."""
    whole = {"num_hidden_layers": 8, "full_attention_interval": 4}
    for kind, architecture, more, layers, state_layers in (
        ("qwen3_next", "Qwen3NextForCausalLM", whole, 2, 6),
        ("falcon_h1", "FalconH1ForCausalLM", {}, 3, 3),
        (
            *("nemotron_h", "NemotronHForCausalLM"),
            *({"num_hidden_layers": 6, "hybrid_override_pattern": "M-M*-M"}, 1, 3),
        ),
    ):
        (folder := tmp_path / kind).mkdir()
        write_config(folder, kind, architecture, **more)
        assert main(["doctor", "--model", str(folder), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["layers"], found["state_layers"]) == (layers, state_layers)
        assert found["reasons"] == [] and found["tested"] == (kind == "qwen3_next")


def test_a_type_that_was_not_tested_and_a_rotation_that_does_not_turn_back(
    tmp_path: Path, capsys: Any
) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = write_config(tmp_path, "mixtral", "MixtralForCausalLM", rope_parameters=scaling)
    assert main(["doctor", "--model", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "no: 400 (heads, rope dynamic)" in printed and "no: not tested on such layers" in printed


@pytest.mark.parametrize("text", [None, "no JSON", "{}", '{"model_type": "no-such-type"}'])
def test_a_file_that_is_no_model(text: str | None, tmp_path: Path, capsys: Any) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--model", str(tmp_path)])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "model: expected the folder of a model, or its config.json, got " in message
    assert "choices: a " in message


def test_a_path_without_a_config(tmp_path: Path, capsys: Any) -> None:
    """A file of another name, and the name of a model of a hub, each with what would help."""
    (tmp_path / "c.json").write_text("{}")
    for path, said in (
        (tmp_path / "c.json", "a file of another name; choices: the same file, named config.json"),
        ("Qwen/Qwen3-0.6B", "which is not there; choices: a local folder that has a config.json"),
    ):
        with pytest.raises(SystemExit):
            main(["doctor", "--model", str(path)])
        assert said in " ".join(capsys.readouterr().err.split())


def test_every_seam_names_what_uses_it() -> None:
    """Hooks are resolved when they are installed; those of the kind "use" only here."""
    for hook in HOOKS:
        assert callable(function_of(hook)), hook


def test_the_matrix_covers_what_sglang_offers() -> None:
    names = " ".join(row.name.lower() for row in CAPABILITIES)
    for feature in (
        *("backend", "page size", "mla", "sliding window", "linear attention", "speculative"),
        *("mixed chunk", "disaggregation", "pd multiplexing"),
        *("tensor parallel", "data parallel", "pipeline", "dp attention", "expert parallel"),
        *("hicache", "lmcache"),
        *("hisparse", "session", "beam", "canary", "quantised kv"),
    ):
        assert feature in names, feature
    assert all(row.why for row in CAPABILITIES)
    assert {row.supported for row in CAPABILITIES} == {"yes", "not run", "per request", "no"}
