"""Hidden states at sentence delimiters, for `skipkv steering extract`.

A server started with ``steering_capture`` writes one file for each request whose ``custom_params``
have ``steering_capture: N``: the output of each decoder layer at the delimiter tokens of its
prompt. The command sends complete traces as prompts, so one prefill computes every hidden state.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from sgl_skipkv.patches.engine.mixed_chunks import decoding_rows
from sgl_skipkv.patches.engine.steering import decoder_layers
from sgl_skipkv.recording.sentences import PRESETS, Delimiters

MARK = "steering_capture"


class _Part(NamedTuple):
    """One request's delimiters within a prefill."""

    number: int
    tokens: list[int]
    positions: list[int]
    last: bool


class HiddenCapture:
    """Collects hidden states over the chunks of a prompt, then writes ``NUMBER.safetensors``."""

    def __init__(self, model: Any, folder: str, delimiters: Delimiters, preset: str) -> None:
        self._folder, self._delimiters, self._bit = Path(folder), delimiters, PRESETS[preset]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._parts: list[_Part] = []
        self._collected: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self._positions: dict[int, list[int]] = defaultdict(list)
        layers = decoder_layers(model)
        self._layers = len(layers)
        for number, layer in enumerate(layers):
            layer.register_forward_hook(partial(self._collect, number))

    @property
    def pending(self) -> bool:
        """Whether the prefill that is being launched has delimiters to collect."""
        return bool(self._parts)

    def begin(self, batch: Any) -> None:
        """A prefill is about to be launched."""
        self._parts, offset = [], 0
        prefilled = len(batch.reqs) - decoding_rows(batch)
        columns = (batch.reqs, batch.prefix_lens, batch.extend_lens)
        for req, first, count in zip(*(part[:prefilled] for part in columns), strict=True):
            marks = req.sampling_params.custom_params or {}
            if type(marks.get(MARK)) is int:
                ids = req.origin_input_ids
                closes = [
                    i
                    for i in range(first, min(first + count, len(ids)))
                    if self._delimiters.closes(ids[i], self._bit)
                ]
                tokens = [offset + i - first for i in closes]
                self._parts.append(_Part(marks[MARK], tokens, closes, first + count >= len(ids)))
            offset += count

    def _collect(self, number: int, layer: Any, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the decoder layer with this number."""
        from sglang.srt.layers.layer_boundary.residual.batch import snapshot

        _, _, forward_batch = args
        if not self._parts or not forward_batch.forward_mode.is_extend():
            return
        hidden = snapshot(output, forward_batch)
        for part in self._parts:
            self._collected[part.number, number].append(hidden[part.tokens].float().cpu())
        if number == self._layers - 1:
            self._finish()

    def _finish(self) -> None:
        for part in self._parts:
            self._positions[part.number] += part.positions
            if part.last:
                keys = [(part.number, layer) for layer in range(self._layers)]
                hidden = torch.stack([torch.cat(self._collected.pop(key)) for key in keys])
                positions = torch.tensor(self._positions.pop(part.number), dtype=torch.int64)
                tensors = {"hidden": hidden, "positions": positions}
                save_file(tensors, self._folder / f"{part.number}.safetensors")
        self._parts = []
