"""The file of a steering vector: safetensors with one tensor named ``vector`` and its metadata.

No other format is read, because loading safetensors runs no code. Every problem with a file becomes
a one-line error that names the cause, at start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sgl_skipkv.config import Preset, SettingError, Settings, why_unopened

FIELD: Final = "steering_vector"
FILE_LIMIT_BYTES: Final = 64 << 20
_CHOICES: Final = "a file that `skipkv steering extract` wrote for this model"
_DTYPES: Final = ("F32", "F16", "BF16")


class Origin(Settings):
    """A vector's metadata, every value a string in the file.

    Attributes:
        model: name of the model that the vector was extracted from.
        hidden_size, layer: of that model; the vector is added to the output of this layer.
        keywords: separated by commas; a sentence with one of them is non-execution.
        delimiters: preset of the tokens that close a sentence, at which the vector is added.
        traces, execution_thoughts, nonexecution_thoughts: how many the means were taken over.
        split_cosine: between the vectors of two halves of the traces; near 1 for a stable vector.
        separation: distance of the two means over the standard deviation within them.
    """

    format: Literal["skipkv-steering-1"] = "skipkv-steering-1"
    model: str
    hidden_size: int = Field(ge=1)
    layer: int = Field(ge=0)
    keywords: str = Field(min_length=1)
    delimiters: Preset
    traces: int = Field(ge=1)
    execution_thoughts: int = Field(ge=1)
    nonexecution_thoughts: int = Field(ge=1)
    split_cosine: float = Field(ge=-1, le=1)
    separation: float = Field(ge=0)
    date: str


@dataclass(frozen=True)
class SteeringVector:
    """``v = mean(execution) - mean(non-execution)`` at one layer, float32 [hidden_size].

    Source: SkipKV (arXiv 2512.07993) section 4.2, after SEAL (arXiv 2504.07986).
    """

    values: Tensor
    origin: Origin

    @classmethod
    def load(cls, name: str) -> SteeringVector:
        """Read and check a file.

        Raises:
            SettingError: a path with ``..`` or a link out of its folder, not a regular file, too
                large, not safetensors, other tensors than one ``vector``, a wrong dtype or shape, a
                number that is not finite, or wrong metadata.
        """
        path = Path(name)
        if ".." in path.parts:
            raise _error("a path without ..", name)
        try:
            size = path.stat().st_size
        except (OSError, ValueError) as error:
            raise _error("a readable file", f"{why_unopened(error)}: {name}") from error
        if path.resolve().parent != path.parent.resolve():
            raise _error("a file, or a link within its folder", f"{name} -> {path.resolve()}")
        try:
            if not path.is_file() or size > FILE_LIMIT_BYTES:
                got = f"{name} ({size} bytes)"
                raise _error(f"a regular file of at most {FILE_LIMIT_BYTES} bytes", got)
            with safe_open(path, framework="pt") as file:
                names, metadata = list(file.keys()), file.metadata() or {}
                if names != ["vector"]:
                    raise _error("one tensor named vector", f"{names} in {name}")
                dtype = file.get_slice("vector").get_dtype()
                if dtype not in _DTYPES:
                    raise _error(f"a tensor of dtype {', '.join(_DTYPES)}", f"{dtype} in {name}")
                values = file.get_tensor("vector").float()
        except OSError as error:
            raise _error("a readable file", f"{error.strerror}: {name}") from error
        except SafetensorError as error:
            raise _error("a safetensors file", f"{name} ({error})") from error
        try:
            origin = Origin.model_validate_strings(metadata)
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            got = f"{'.'.join(map(str, detail['loc']))}: {detail['msg']} in {name}"
            raise _error("metadata of a steering vector", got) from error
        if values.shape != (origin.hidden_size,):
            expected = f"shape [{origin.hidden_size}], the hidden_size in its metadata"
            raise _error(expected, f"{list(values.shape)} in {name}")
        if not values.isfinite().all() or not values.any():
            raise _error("finite numbers, not all of them 0", name)
        return cls(values, origin)

    def save(self, path: Path) -> None:
        metadata = {key: str(value) for key, value in self.origin.model_dump().items()}
        save_file({"vector": self.values.contiguous()}, path, metadata)

    def check_model(self, hidden_size: int, layers: int) -> None:
        """Refuse a vector that does not fit the model.

        Raises:
            SettingError: with both numbers.
        """
        origin = self.origin
        if origin.hidden_size != hidden_size:
            expected = f"hidden_size {hidden_size}, the model's"
            raise _error(expected, f"a vector of hidden_size {origin.hidden_size}")
        if origin.layer >= layers:
            expected = f"a layer in [0, {layers - 1}], the model's"
            raise _error(expected, f"a vector of layer {origin.layer}")


def _error(expected: str, got: str) -> SettingError:
    return SettingError(FIELD, expected, got, _CHOICES)
