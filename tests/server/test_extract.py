"""``skipkv steering extract``: the vector is what a Hugging Face forward gives, and it goes on."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import Fleet
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sgl_skipkv.cli.main import main
from sgl_skipkv.cli.steering_extract import Extraction
from sgl_skipkv.config import SettingError
from sgl_skipkv.steering.vector import SteeringVector

ROOT = Path(__file__).resolve().parents[2]
MODELS = [ROOT / "examples" / name for name in ("reasoner", "wanderer")]
LAYERS, TRACES = 4, 6


def solutions(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Traces of the bundled model, as its training data has them."""
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "reasoner"))
    from problems import heldout_problem, solution_text
    from vocabulary import prompt_text

    problems = [heldout_problem("easy", index) for index in range(TRACES)]
    return [{"prompt": prompt_text(p.prompt), "output": solution_text(p)} for p in problems]


def hidden_by_hand(traces: list[dict[str, str]], take: str) -> tuple[torch.Tensor, list[int]]:
    """float64 [layers, D], mean before (or after) thoughts without a keyword minus those with one;
    and how many there are with one and without."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS[0])
    model = AutoModelForCausalLM.from_pretrained(MODELS[0], dtype=torch.float32).eval()
    outputs: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda module, args, output, number=number: outputs.update({number: output})
        )
    classes: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for trace in traces:
        prompt, output = (tokenizer.encode(trace[key]) for key in ("prompt", "output"))
        with torch.no_grad():
            model(torch.tensor([prompt + output]))
        texts, start = [tokenizer.decode([token]) for token in output], 0
        for stop, text in enumerate(texts, 1):
            if not text.endswith("\n\n"):
                continue
            thought = "".join(texts[start:stop])
            wanders = any(word in thought for word in ("Wait", "Alternatively", "again"))
            at = len(prompt) + (start if take == "before" else stop) - 1
            if start or take == "after":  # the prompt ends with one line end, not with two
                hidden = [outputs[layer][0, at] for layer in range(LAYERS)]
                classes[wanders].append(torch.stack(hidden).double())
            start = stop
    difference = torch.stack(classes[False]).mean(0) - torch.stack(classes[True]).mean(0)
    return difference, [len(classes[True]), len(classes[False])]


@pytest.mark.server
@pytest.mark.slow
def test_the_vector_is_the_difference_of_the_models_own_hidden_states(
    fleet: Fleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    traces, server = solutions(monkeypatch), fleet.ready("extracting")
    run = Extraction(str(MODELS[0]), tmp_path / "work")
    # The fleet started it, in a folder of its own.
    monkeypatch.setattr(run, "_server", lambda most_tokens: contextlib.nullcontext(server))
    monkeypatch.setattr(run, "_captured", server.log_path.parent / "captured")
    statistics = run.from_traces(traces)
    expected, counts = hidden_by_hand(traces, "before")
    assert statistics.count.tolist() == counts and min(counts) >= 10
    torch.testing.assert_close(statistics.difference(), expected, atol=5e-3, rtol=1e-4)
    other_side, _ = hidden_by_hand(traces, "after")
    assert (statistics.difference() - other_side).abs().max() > 10  # it would have been seen

    # Nothing is left to do, so the second run starts no server and gives the same.
    server.assert_clean()
    monkeypatch.setattr(run, "_server", lambda most_tokens: pytest.fail("a server was started"))
    assert torch.equal(run.from_traces(traces).difference(), statistics.difference())

    layers = run.report()
    assert [layer.layer for layer in layers] == list(range(LAYERS))
    assert all(-1 <= layer.split_cosine <= 1 and layer.separation > 0 for layer in layers)
    vector = run.vector(layers[1])
    assert torch.equal(vector.values, statistics.difference()[1].float())
    assert (vector.origin.layer, vector.origin.traces) == (1, TRACES)

    # The command itself, on the finished folder: it writes the same and warns of the few thoughts.
    file, out = tmp_path / "traces.jsonl", tmp_path / "v.safetensors"
    file.write_text("".join(json.dumps(trace) + "\n" for trace in traces))
    command = ["steering", "extract", "--model-path", str(MODELS[0]), "--traces", str(file)]
    main([*command, "--work", str(run.work), "--layer", "1", "-o", str(out)])
    assert f"warning: a class has only {min(counts)} thoughts" in capsys.readouterr().out
    assert torch.equal(SteeringVector.load(str(out)).values, vector.values)
    main([*command, "--work", str(run.work), "--layer", "1", "-o", str(out), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [told["nonexecution_thoughts"], told["execution_thoughts"]] == counts
    assert [one["written"] for one in told["layers"]] == [n == 1 for n in range(LAYERS)]

    # The sums of these traces are nobody else's.
    with pytest.raises(SettingError, match="work: expected a folder of the same model, traces"):
        run.from_traces(traces[1:])
    with pytest.raises(SettingError, match="work: expected a folder of the same model, traces"):
        run.from_prompts([trace["prompt"] for trace in traces], max_new_tokens=1)
    assert len(list((run.work / "sums").iterdir())) == TRACES

    # Other keywords are another way to label the same traces.
    other = Extraction(str(MODELS[0]), run.work, keywords=["Wait"])
    monkeypatch.setattr(other, "_server", lambda most_tokens: pytest.fail("a server is needed"))
    with pytest.raises(pytest.fail.Exception, match="a server is needed"):
        other.from_traces(traces)
    assert not list((run.work / "sums").iterdir())


@pytest.mark.server
@pytest.mark.slow
def test_a_stopped_generation_goes_on(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traces and sums of the first run stay; a line cut by the stop is generated again."""
    traces, server = solutions(monkeypatch), fleet.ready("extracting")
    asked: list[str] = []

    def post(path: str, body: dict[str, Any]) -> Any:
        asked.append("capture" if "custom_params" in body["sampling_params"] else "generate")
        return type(server).post(server, path, body)

    monkeypatch.setattr(server, "post", post)
    texts = [trace["prompt"] for trace in traces]
    run = Extraction(str(MODELS[0]), tmp_path / "work")
    monkeypatch.setattr(run, "_server", lambda most_tokens: contextlib.nullcontext(server))
    monkeypatch.setattr(run, "_captured", server.log_path.parent / "captured")
    statistics = run.from_prompts(texts, max_new_tokens=200)
    assert sorted(asked) == ["capture"] * TRACES + ["generate"] * TRACES

    lines = (run.work / "traces.jsonl").read_text()
    (run.work / "traces.jsonl").write_text(lines[:-20])  # what a kill leaves
    sums = sorted((run.work / "sums").iterdir())
    sums[0].unlink()
    asked.clear()
    again = run.from_prompts(texts, max_new_tokens=200)
    assert sorted(asked) == ["capture", "generate"]
    assert torch.equal(again.count, statistics.count)
    # The radix cache holds the trace now, so its prefill is cut elsewhere and rounds otherwise. A
    # thought that is missing or counted twice changes the sums by far more.
    torch.testing.assert_close(again.total, statistics.total, rtol=1e-4, atol=5e-3)
    assert (statistics.total / statistics.count[:, None, None]).abs().max() > 1
    monkeypatch.undo()
    server.assert_clean()


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
        (["--prompts", "none.jsonl"], "prompts: expected readable JSONL"),
        (["--traces", "numbers.jsonl"], "traces: expected objects with prompt, output"),
        (["--prompts", "prompts.jsonl", "--keywords", "Hmm"], "keywords: expected words that are"),
        (["--prompts", "unnamed.jsonl"], "prompts: expected a prompt in every line"),
        (["--prompts", "prompts.jsonl", "--layer", "4"], "layer: expected auto or a number in [0"),
        (["--prompts", "prompts.jsonl", "--layer", "best"], "layer: expected auto or a number"),
        (["--prompts", "prompts.jsonl", "-o", "no/v.safetensors"], "out: expected a file in a fol"),
        (["--prompts", "prompts.jsonl", "--delimiters", "foo"], "invalid choice: 'foo'"),
        (["--prompts", "prompts.jsonl", "--model-path", "none"], "model-path: expected a folder"),
        (["--prompts", "latin.jsonl"], "prompts: expected readable JSONL"),
        (["--prompts", "long.jsonl"], "prompts: expected at most 32765 tokens each"),
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
    Path("long.jsonl").write_text(json.dumps({"prompt": "1 " * 40000}) + "\n")
    Path("latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    Path("unnamed.jsonl").write_text('{"question": "x"}\n')
    command = ["steering", "extract", "--model-path", str(MODELS[0]), "-o", "v.safetensors"]
    with pytest.raises(SystemExit) as caught:
        main([*command, *arguments])
    assert caught.value.code == 2 and message in capsys.readouterr().err
    assert not Path("v.safetensors").exists()
