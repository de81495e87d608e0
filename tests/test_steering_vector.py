"""The steering vector's file: what is written is read, and each kind of bad file is one error."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_steering import WIDTH, origin

from sgl_skipkv.config import SettingError
from sgl_skipkv.extract import Moments, sum_sentences
from sgl_skipkv.steering_vector import FILE_LIMIT_BYTES, SteeringVector

METADATA = {key: str(value) for key, value in origin().model_dump().items()}
GOOD = torch.arange(1.0, WIDTH + 1)


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: Any = METADATA) -> Path:
    save_file(tensors, path, metadata)
    return path


def with_header(path: Path, header: bytes, length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)
    return path


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in METADATA.items() if key != name}


# name -> (how to make the file, a word of the message)
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda p: None, "No such file"),
    "a folder": (lambda p: p.mkdir(), "a regular file"),
    "empty": (lambda p: p.write_bytes(b""), "a safetensors file"),
    "text": (lambda p: p.write_text("alpha: 1"), "a safetensors file"),
    "a pickle": (lambda p: torch.save({"vector": GOOD}, p), "a safetensors file"),
    "truncated header": (lambda p: with_header(p, b'{"vec', 4000), "a safetensors file"),
    "header longer than the file": (lambda p: with_header(p, b"{}", 2**40), "a safetensors file"),
    "header is no JSON": (lambda p: with_header(p, b"not json"), "a safetensors file"),
    "data missing": (
        lambda p: with_header(
            p,
            json.dumps(
                {"vector": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}
            ).encode(),
        ),
        "a safetensors file",
    ),
    "too large": (
        lambda p: p.open("wb").truncate(FILE_LIMIT_BYTES + 1),
        "at most",
    ),
    "another tensor": (lambda p: write(p, {"v": GOOD}), "one tensor named vector"),
    "two tensors": (lambda p: write(p, {"vector": GOOD, "w": GOOD + 1}), "one tensor named vector"),
    "integers": (lambda p: write(p, {"vector": GOOD.long()}), "got 'I64"),
    "doubles": (lambda p: write(p, {"vector": GOOD.double()}), "got 'F64"),
    "not a number": (lambda p: write(p, {"vector": GOOD / 0 * 0}), "finite"),
    "infinite": (lambda p: write(p, {"vector": GOOD / 0}), "finite"),
    "all zero": (lambda p: write(p, {"vector": GOOD * 0}), "not all of them 0"),
    "another width": (lambda p: write(p, {"vector": torch.ones(7)}), "shape [5]"),
    "two dimensions": (lambda p: write(p, {"vector": GOOD[None]}), "shape [5]"),
    "no metadata": (lambda p: write(p, {"vector": GOOD}, None), "metadata"),
    "no layer": (lambda p: write(p, {"vector": GOOD}, without("layer")), "layer"),
    "a layer in words": (
        lambda p: write(p, {"vector": GOOD}, {**METADATA, "layer": "two"}),
        "layer",
    ),
    "a negative layer": (
        lambda p: write(p, {"vector": GOOD}, {**METADATA, "layer": "-1"}),
        "layer",
    ),
    "an unknown preset": (
        lambda p: write(p, {"vector": GOOD}, {**METADATA, "delimiters": "lines"}),
        "delimiters",
    ),
    "another format": (
        lambda p: write(p, {"vector": GOOD}, {**METADATA, "format": "v2"}),
        "format",
    ),
    "an unknown name": (lambda p: write(p, {"vector": GOOD}, {**METADATA, "code": "x"}), "code"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    make, word = BAD[kind]
    make(path)
    with pytest.raises(SettingError) as caught:
        SteeringVector.load(str(path))
    message = str(caught.value)
    assert message.startswith("steering_vector: expected ") and "; choices: " in message
    assert word in message and "\n" not in message and len(message) < 500


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_saved_is_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    write(tmp_path / "v.safetensors", {"vector": GOOD.to(dtype)})
    loaded = SteeringVector.load(str(tmp_path / "v.safetensors"))
    assert torch.equal(loaded.values, GOOD) and loaded.values.dtype == torch.float32
    assert loaded.origin == origin() and loaded.keywords == ("Wait", "again")
    loaded.save(tmp_path / "w.safetensors")
    assert SteeringVector.load(str(tmp_path / "w.safetensors")).origin == origin()


def test_another_model_is_refused_with_both_numbers() -> None:
    vector = SteeringVector(GOOD, origin())
    vector.check_model(hidden_size=WIDTH, layers=2)
    with pytest.raises(SettingError, match=r"hidden_size 4096.*hidden_size 5"):
        vector.check_model(hidden_size=4096, layers=2)
    with pytest.raises(SettingError, match=r"a layer in \[0, 0\].*layer 1"):
        vector.check_model(hidden_size=WIDTH, layers=1)


# -- the means that a vector is made of


def test_moments_are_those_of_the_thoughts() -> None:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 6, 4, generator=draw, dtype=torch.float64)  # layers, delimiters, D
    at = {10: 0, 20: 1, 30: 2, 40: 3, 50: 4, 60: 5}
    labelled = [(10, 1), (20, 0), (30, 1), (35, 0), (40, 0), (60, 1)]  # 35 is no delimiter
    first = sum_sentences(hidden, at, iter(labelled[:3]))
    both = first + sum_sentences(hidden, at, iter(labelled[3:]))
    execution, other = hidden[:, [0, 2, 5]], hidden[:, [1, 3]]
    assert both.count.tolist() == [2, 3]
    difference = execution.mean(dim=1) - other.mean(dim=1)
    torch.testing.assert_close(both.difference(), difference)
    for layer in range(3):
        spread = [
            sum(float((x - part[layer].mean(0)).square().sum()) for x in part[layer])
            / len(part[layer])
            for part in (execution, other)
        ]
        expected = float(difference[layer].norm()) / (sum(spread) / 2) ** 0.5
        assert float(both.separation()[layer]) == pytest.approx(expected)


def test_an_empty_class_divides_by_nothing() -> None:
    empty = Moments(torch.zeros(2, 1, 3).double(), torch.zeros(2, 1).double(), torch.tensor([0, 0]))
    assert empty.difference().isfinite().all() and empty.separation().isfinite().all()
