"""``skipkv steering extract``: the vector is what a Hugging Face forward gives, and it goes on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import STEERING_KEYWORDS
from safetensors.torch import load_file
from tiny_models import LETTERS, LINE_ENDS
from transformers import AutoModelForCausalLM, AutoTokenizer

from sgl_skipkv.cli import main
from sgl_skipkv.extract import Extraction
from sgl_skipkv.steering_vector import SteeringVector

ROOT = Path(__file__).resolve().parent.parent
MODELS = [ROOT / "examples" / name for name in ("reasoner", "wanderer")]
LAYERS, TRACES = 3, 6


def made_up_traces() -> list[dict[str, str]]:
    """Letters and line ends; ``a`` and ``b`` are the keywords, and every other line has one."""
    rng = random.Random(2)
    traces = []
    for _ in range(TRACES):
        lines = []
        for number in range(12):
            letters = rng.choices(LETTERS[2:], k=rng.randint(2, 7))
            if number % 2:
                letters.insert(rng.randrange(len(letters)), rng.choice(STEERING_KEYWORDS))
            lines.append("".join(letters) + rng.choice(LINE_ENDS))
        traces.append({"prompt": "xyz\n", "output": "".join(lines)})
    return traces


def hidden_by_hand(model_path: Path, traces: list[dict[str, str]], take: str) -> torch.Tensor:
    """float64 [layers, D]: mean before (or after) lines without a keyword, minus those with one."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    outputs: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda module, args, output, number=number: outputs.update({number: output})
        )
    classes: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for trace in traces:
        prompt = tokenizer.encode(trace["prompt"], add_special_tokens=False)
        output = tokenizer.encode(trace["output"], add_special_tokens=False)
        with torch.no_grad():
            model(torch.tensor([prompt + output]))
        texts, start = [tokenizer.decode([token]) for token in output], 0
        for stop, text in enumerate(texts, 1):
            if text not in LINE_ENDS:
                continue
            wanders = bool(set(STEERING_KEYWORDS) & set(texts[start:stop]))
            at = len(prompt) + (start if take == "before" else stop) - 1
            hidden = [outputs[layer][0, at] for layer in range(LAYERS)]
            classes[wanders].append(torch.stack(hidden).double())
            start = stop
    return torch.stack(classes[False]).mean(0) - torch.stack(classes[True]).mean(0)


@pytest.mark.server
def test_the_vector_is_the_difference_of_the_models_own_hidden_states(
    model_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, traces = model_folder("qwen2"), made_up_traces()
    run = Extraction(
        str(model),
        tmp_path / "work",
        keywords=STEERING_KEYWORDS,
        preset="any-newline",
        thoughts="line",
        server_flags=["--max-total-tokens", "8192", "--chunked-prefill-size", "64"],
    )
    moments = run.run(run.give_traces(traces), max_new_tokens=1)
    assert moments.count.tolist() == [TRACES * 6, TRACES * 6]
    expected = hidden_by_hand(model, traces, "before")
    torch.testing.assert_close(moments.difference(), expected, atol=2e-3, rtol=1e-3)
    other_side = hidden_by_hand(model, traces, "after")
    assert (moments.difference() - other_side).abs().max() > 0.1  # it would have been seen

    # Nothing is left to do, so the second run starts no server and gives the same.
    monkeypatch.setattr(Extraction, "_server", lambda self: pytest.fail("a server was started"))
    again = run.run([trace["prompt"] for trace in traces], max_new_tokens=1)
    assert torch.equal(again.difference(), moments.difference())

    layers = run.report()
    assert [layer.layer for layer in layers] == list(range(LAYERS))
    assert all(-1 <= layer.split_cosine <= 1 and layer.separation > 0 for layer in layers)
    vector = run.vector(layers[1])
    assert torch.equal(vector.values, moments.difference()[1].float())
    assert (vector.origin.layer, vector.origin.traces) == (1, TRACES)


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_the_shipped_vectors_belong_to_their_models(folder: Path) -> None:
    vector = SteeringVector.load(str(folder / "steering.safetensors"))
    weights = load_file(folder / "model.safetensors")
    layers = {name.split(".")[2] for name in weights if name.startswith("model.layers.")}
    vector.check_model(weights["model.norm.weight"].shape[0], len(layers))
    assert vector.origin.model == folder.name and vector.origin.traces == 100
    assert vector.origin.split_cosine > 0.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "none.jsonl"], "file: expected readable JSONL"),
        (["--traces", "numbers.jsonl"], "file: expected objects with prompt, output"),
        (["--prompts", "prompts.jsonl", "--keywords", "Hmm"], "keywords: expected words that are"),
        (["--prompts", "unnamed.jsonl"], "prompts: expected prompt or problem"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("numbers.jsonl").write_text("1\n")
    Path("prompts.jsonl").write_text('{"prompt": "x"}\n')
    Path("unnamed.jsonl").write_text('{"question": "x"}\n')
    command = ["steering", "extract", "--model-path", str(MODELS[0]), "-o", "v.safetensors"]
    with pytest.raises(SystemExit) as caught:
        main([*command, *arguments])
    assert caught.value.code == 2 and message in capsys.readouterr().err
    assert not Path("v.safetensors").exists()
