"""The steering vector's file: what is written is read, and each kind of bad file is one error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from refusals import assert_refused
from vector_files import GOOD, WIDTH, WRONG, origin, write

from sgl_skipkv.cli.steering_extract import ClassStatistics, class_statistics_of
from sgl_skipkv.config import SettingError
from sgl_skipkv.steering.vector import SteeringVector


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_is_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    make, word = WRONG[kind]
    make(path)
    with assert_refused("steering_vector", word):
        SteeringVector.load(str(path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_saved_is_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    write(tmp_path / "v.safetensors", {"vector": GOOD.to(dtype)})
    loaded = SteeringVector.load(str(tmp_path / "v.safetensors"))
    assert torch.equal(loaded.values, GOOD) and loaded.values.dtype == torch.float32
    assert loaded.origin == origin() and loaded.origin.keywords == "Wait,again"
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


def test_statistics_are_those_of_the_thoughts() -> None:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 6, 4, generator=draw, dtype=torch.float64)  # layers, delimiters, D
    at = {10: 0, 20: 1, 30: 2, 40: 3, 50: 4, 60: 5}
    labelled = [(10, 1), (20, 0), (30, 1), (35, 0), (40, 0), (60, 1)]  # 35 is no delimiter
    first = class_statistics_of(hidden, at, iter(labelled[:3]))
    both = first + class_statistics_of(hidden, at, iter(labelled[3:]))
    execution, other = hidden[:, [0, 2, 5]], hidden[:, [1, 3]]
    assert both.count.tolist() == [2, 3]
    difference = execution.mean(dim=1) - other.mean(dim=1)
    torch.testing.assert_close(both.difference(), difference)
    spread = sum(part.var(dim=1, correction=0).sum(dim=1) for part in (execution, other)) / 2
    torch.testing.assert_close(both.separation(), difference.norm(dim=1) / spread.sqrt())


def test_an_empty_class_divides_by_nothing() -> None:
    empty = ClassStatistics(
        torch.zeros(2, 1, 3).double(), torch.zeros(2, 1).double(), torch.tensor([0, 0])
    )
    assert empty.difference().isfinite().all() and empty.separation().isfinite().all()
