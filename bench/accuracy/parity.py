"""Policies against kvpress's presses of the same names, on the same keys, values and queries.

    uv venv peer && uv pip install --python peer/bin/python 'kvpress>=0.5,<0.6'
    python -m bench.accuracy.parity --peer-python peer/bin/python

kvpress scores right traces of the bundled model and writes down what it saw; then the policies
score that. kvpress has one set per layer and KV head, this package one set for all, so the mean of
its scores over both is compared. One row per policy in bench/rows/parity.csv: the largest
difference of two scores as a part of the largest score, and how many of the kept sets at a quarter
of the candidates are the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from bench.lib.forced import forced_model, reasoner_trace
from bench.lib.record import append_row
from bench.lib.serving import BUNDLED
from sgl_skipkv.cli.progress import track
from sgl_skipkv.policy import make_policy
from sgl_skipkv.policy.inputs.query_centres import QueryCentres, Rotation
from sgl_skipkv.policy.inputs.score_input import ScoreInput

WINDOW, SINK = 8, 4
POLICIES = {"keydiff": "KeyDiffPress", "expected": "ExpectedAttentionPress"}
KEPT_SHARE = 0.25


def seen_by(tensors: dict[str, Tensor], trace: int, rotation: Rotation) -> ScoreInput:
    """What a compaction behind the last token of this trace would look at."""
    layers = 1 + max(int(name.split(".")[1]) for name in tensors)

    def tensor(name: str, layer: int) -> Tensor:
        return tensors[f"{trace}.{layer}.{name}"]

    queries = torch.stack([tensor("queries", layer).flip(0) for layer in range(layers)])
    tokens = len(tensor("keys", 0))
    return ScoreInput(
        positions=torch.arange(tokens),
        prompt_tokens=0,
        keep_tokens=tokens,
        layers=layers,
        keys=lambda layer: tensor("keys", layer),
        queries=lambda: queries,
        values=lambda layer: tensor("values", layer),
        reach=torch.ones(layers, tensor("keys", 0).shape[1]),
        scale=queries.shape[-1] ** -0.5,
        sentences=None,
        seed=0,
        logical_tokens=tokens,
        centres=QueryCentres.measured(rotation, queries),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", type=Path, required=True)
    parser.add_argument("--levels", nargs="+", default=["easy", "medium", "hard"])
    parser.add_argument("--problems", type=int, default=8, help="of each level")
    arguments = parser.parse_args()
    forced = forced_model(BUNDLED)
    traces = [
        reasoner_trace(forced, level, index)[0]
        for level in arguments.levels
        for index in range(arguments.problems)
    ]
    with tempfile.TemporaryDirectory() as folder:
        request = {"model_path": str(BUNDLED), "traces": traces, "window": WINDOW}
        request["out"] = str(Path(folder) / "seen.safetensors")
        script = Path(__file__).with_name("parity_kvpress.py")
        subprocess.run(
            [arguments.peer_python, script], input=json.dumps(request), text=True, check=True
        )
        tensors = load_file(request["out"])
    config = AutoConfig.from_pretrained(BUNDLED)
    bands = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    rotation = Rotation.of(config.rope_parameters["rope_theta"] ** -bands, config.head_dim)
    for name, press in POLICIES.items():
        policy = make_policy(name, window=WINDOW, sink=SINK, protect_prompt=False)
        largest, same = 0.0, 0
        for trace in track(range(len(traces)), name):
            inputs = seen_by(tensors, trace, rotation)
            first, stop = policy.candidates(inputs)
            ours = policy.scores(inputs)[first:stop]
            parts = [tensors[f"{trace}.{layer}.{name}"] for layer in range(inputs.layers)]
            theirs = torch.stack(parts).mean(dim=0)[first:stop]
            largest = max(largest, float((ours - theirs).abs().max() / theirs.abs().max()))
            kept = [
                scores.topk(int(KEPT_SHARE * (stop - first))).indices for scores in (ours, theirs)
            ]
            same += {*kept[0].tolist()} == {*kept[1].tolist()}
        append_row(
            "parity",
            {
                "policy": name,
                "press": press,
                "traces": len(traces),
                "largest_difference": f"{largest:.1e}",
                "same_kept_sets": same,
            },
        )


if __name__ == "__main__":
    main()
