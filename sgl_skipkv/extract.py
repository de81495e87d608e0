"""``skipkv steering extract``: from prompts to a steering vector, through a real server.

Three steps, each of which can be stopped and goes on where it was (everything is in one work
folder): generate traces; send each back as a prompt and take the hidden states at its delimiters;
take the difference of the means.
"""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from sgl_skipkv.config import SettingError
from sgl_skipkv.kernels.reference import KEYWORD, THINK_END
from sgl_skipkv.sentences import PRESETS, Delimiters, SentenceTracker, newline_tokens
from sgl_skipkv.server_process import ServerProcess
from sgl_skipkv.steering import TokenClasses
from sgl_skipkv.steering_vector import Origin, SteeringVector, cosine

KEYWORDS = ("Wait", "Alternatively", "again")
#: fewer thoughts than this in a class, and the command warns
FEW_THOUGHTS = 100
Take = Literal["before", "after"]
Thoughts = Literal["paragraph", "line"]


@dataclass(frozen=True)
class Moments:
    """Sums over the thoughts of one or many traces; [2] is (non-execution, execution).

    Attributes:
        total: float64 [2, layers, D], sum of hidden states.
        squares: float64 [2, layers], sum of their squared norms.
        count: int64 [2], thoughts.
    """

    total: Tensor
    squares: Tensor
    count: Tensor

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.total + other.total, self.squares + other.squares, self.count + other.count
        )

    def difference(self) -> Tensor:
        """``mean(execution) - mean(non-execution)``, float64 [layers, D]."""
        means = self.total / self.count.clamp_min(1)[:, None, None]
        return means[1] - means[0]

    def separation(self) -> Tensor:
        """Distance of the means over the standard deviation within the classes, float64 [layers].

        With ``|x|`` the norm over D: ``|m1 - m0| / sqrt(mean over classes of E|x|^2 - |m|^2)``.
        """
        means = self.total / self.count.clamp_min(1)[:, None, None]
        within = self.squares / self.count.clamp_min(1)[:, None] - means.square().sum(dim=2)
        spread: Tensor = within.clamp_min(0).mean(dim=0).sqrt().clamp_min(1e-12)
        distance: Tensor = self.difference().norm(dim=1)
        return distance / spread


@dataclass(frozen=True)
class LayerReport:
    """How good the vector of one layer is."""

    layer: int
    separation: float
    split_cosine: float
    norm: float


class Extraction:
    """One run of the command.

    Args:
        model_path: folder or name.
        work: folder for traces and sums; the same one again goes on.
        keywords: a thought with one of these tokens is non-execution.
        preset: of the delimiters.
        thoughts: what is labelled ends with a blank line (``paragraph``, as in SEAL) or with any
            delimiter (``line``). A blank line and a line's end are different tokens, so means over
            both would mostly differ by which token it was.
        take: the hidden state of the delimiter ``before`` a thought, which is where steering acts
            and decides what follows, or ``after`` it.
    """

    def __init__(
        self,
        model_path: str,
        work: Path,
        *,
        keywords: Sequence[str] = KEYWORDS,
        preset: str = "math",
        thoughts: Thoughts = "paragraph",
        take: Take = "before",
        server_flags: Sequence[str] = (),
        parallel: int = 32,
    ) -> None:
        self.model_path, self.work = model_path, work
        self.keywords, self.preset = tuple(keywords), preset
        self.thoughts, self.take = thoughts, take
        self.parallel = parallel
        self._server_flags = list(server_flags)
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._config = AutoConfig.from_pretrained(model_path)
        newlines = newline_tokens(self.tokenizer)
        self._delimiters = Delimiters(newlines, self._config.vocab_size)
        ends = newlines
        if thoughts == "paragraph":
            ends = [(token, text) for token, text in newlines if text.endswith("\n\n")]
        self._ends = Delimiters(ends, self._config.vocab_size)
        self.classes = TokenClasses(self.tokenizer, self._delimiters, preset, self.keywords)
        self._traces, self._sums = work / "traces.jsonl", work / "sums"
        self._captured = work / "captured"

    def run(self, prompts: Sequence[str], max_new_tokens: int) -> Moments:
        """Generate what is missing, capture what is missing, add everything up."""
        for folder in (self._sums, self._captured):
            folder.mkdir(parents=True, exist_ok=True)
        self._same_settings()
        done = {int(path.stem) for path in self._sums.glob("*.safetensors")}
        traces = {trace["number"]: trace for trace in self._read_traces()}
        if len(done) < len(prompts) or len(traces) < len(prompts):
            with self._server() as server:
                self._generate(server, prompts, traces, max_new_tokens)
                todo = [traces[number] for number in sorted(traces) if number not in done]
                self._each(todo, "hidden states", lambda trace: self._capture(server, trace))
        return self.moments()

    def give_traces(self, traces: Sequence[Mapping[str, str]]) -> list[str]:
        """Use traces that exist: each has ``prompt`` (as sent to the model) and ``output``.

        Returns:
            their prompts, for ``run``, which finds nothing left to generate.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        with self._traces.open("w") as file:
            for number, trace in enumerate(traces):
                ids = {
                    name: self.tokenizer(trace[key], add_special_tokens=False)["input_ids"]
                    for name, key in (("prompt_ids", "prompt"), ("output_ids", "output"))
                }
                file.write(json.dumps({"number": number, **ids}) + "\n")
        return [trace["prompt"] for trace in traces]

    def moments(self, part: int | None = None) -> Moments:
        """Of all traces, or of the even (0) or odd (1) ones."""
        layers, hidden = self._config.num_hidden_layers, self._config.hidden_size
        zeros = torch.zeros(2, layers, hidden, dtype=torch.float64)
        found = Moments(zeros, zeros[..., 0].clone(), torch.zeros(2, dtype=torch.int64))
        for path in sorted(self._sums.glob("*.safetensors")):
            if part is None or int(path.stem) % 2 == part:
                found += Moments(**load_file(path))
        return found

    def report(self) -> list[LayerReport]:
        """Separation and stability of every layer's vector."""
        whole = self.moments()
        difference, separation = whole.difference(), whole.separation()
        even, odd = (self.moments(part).difference() for part in (0, 1))
        return [
            LayerReport(
                layer,
                float(separation[layer]),
                cosine(even[layer], odd[layer]),
                float(difference[layer].norm()),
            )
            for layer in range(len(separation))
        ]

    def vector(self, chosen: LayerReport) -> SteeringVector:
        """The vector of one layer, with its metadata.

        Raises:
            SettingError: one of the classes is empty.
        """
        whole = self.moments()
        nonexecution, execution = whole.count.tolist()
        if not execution or not nonexecution:
            got = f"{execution} execution and {nonexecution} non-execution thoughts"
            raise SettingError("keywords", "thoughts of both classes", got, "other keywords")
        origin = Origin.model_validate(
            {
                "model": Path(self.model_path).name,
                "hidden_size": self._config.hidden_size,
                "layer": chosen.layer,
                "keywords": ",".join(self.keywords),
                "delimiters": self.preset,
                "traces": len(list(self._sums.glob("*.safetensors"))),
                "execution_thoughts": execution,
                "nonexecution_thoughts": nonexecution,
                "split_cosine": round(min(max(chosen.split_cosine, -1.0), 1.0), 4),
                "separation": round(chosen.separation, 4),
                "date": datetime.date.today().isoformat(),
            }
        )
        return SteeringVector(whole.difference()[chosen.layer].float(), origin)

    # -- the steps ------------------------------------------------------------------------------

    def _server(self) -> ServerProcess:
        config = self.work / "skipkv.json"
        settings = {"steering_capture": str(self._captured.resolve()), "delimiters": self.preset}
        config.write_text(json.dumps(settings))
        # A prefix from the cache has no forward pass to take hidden states from.
        flags = ["--skipkv-config", str(config.resolve()), "--disable-radix-cache"]
        folder = self.work / "server"
        return ServerProcess(self.model_path, folder, [*flags, *self._server_flags]).wait_ready(600)

    def _generate(
        self,
        server: ServerProcess,
        prompts: Sequence[str],
        traces: dict[int, dict[str, Any]],
        max_new_tokens: int,
    ) -> None:
        todo = [number for number in range(len(prompts)) if number not in traces]

        def generate(number: int) -> None:
            ids = self._prompt_ids(prompts[number])
            body = {
                "input_ids": ids,
                "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
            }
            output_ids = server.post("/generate", body)["output_ids"]
            traces[number] = {"number": number, "prompt_ids": ids, "output_ids": output_ids}
            with self._traces.open("a") as file:
                file.write(json.dumps(traces[number]) + "\n")

        self._each(todo, "traces", generate)

    def _capture(self, server: ServerProcess, trace: Mapping[str, Any]) -> None:
        number = trace["number"]
        params = {"max_new_tokens": 1, "custom_params": {"steering_capture": number}}
        ids = [*trace["prompt_ids"], *trace["output_ids"]]
        server.post("/generate", {"input_ids": ids, "sampling_params": params})
        path = self._captured / f"{number}.safetensors"
        found = load_file(path)
        at = {
            position: i
            for i, position in enumerate(found["positions"].tolist())
            if self._ends.closes(ids[position], PRESETS[self.preset])
        }
        moments = sum_sentences(found["hidden"].double(), at, self._labelled(trace))
        save_file(vars(moments), self._sums / f"{number:06d}.safetensors")
        path.unlink()

    def _labelled(self, trace: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
        """(position of the delimiter, 1 for execution) of each thought of the thinking part."""
        prompt, output = len(trace["prompt_ids"]), trace["output_ids"]
        thought = next((i for i, t in enumerate(output) if self.classes[t] & THINK_END), None)
        tracker = SentenceTracker(self._ends, self.preset)
        tracker.feed(output[:thought])
        for start, stop in tracker.closed:
            is_execution = not any(self.classes[t] & KEYWORD for t in output[start:stop])
            # Several delimiters may end a thought; what precedes the next one is the last of them.
            position = prompt + (start if self.take == "before" else stop) - 1
            yield position, int(is_execution)

    def _prompt_ids(self, prompt: str) -> list[int]:
        if self.tokenizer.chat_template:
            prompt = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        ids: list[int] = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return ids

    def _each(self, items: Sequence[Any], what: str, work: Any) -> None:
        with ThreadPoolExecutor(self.parallel) as pool:
            for _ in track(pool.map(work, items), what, total=len(items)):
                pass

    def _read_traces(self) -> list[dict[str, Any]]:
        if not self._traces.exists():
            return []
        whole, end, _ = self._traces.read_text().rpartition("\n")
        self._traces.write_text(whole + end)  # the last line may have been cut by a stop
        return [json.loads(line) for line in whole.splitlines()]

    def _same_settings(self) -> None:
        """Sums that were made with other settings must not be added to."""
        path = self.work / "settings.json"
        settings = [self.model_path, *self.keywords, self.preset, self.thoughts, self.take]
        if path.exists() and json.loads(path.read_text()) != settings:
            shutil.rmtree(self._sums)
            self._sums.mkdir()
        path.write_text(json.dumps(settings))


def sum_sentences(
    hidden: Tensor, at: Mapping[int, int], labelled: Iterator[tuple[int, int]]
) -> Moments:
    """Moments of one trace.

    Args:
        hidden: float64 [layers, delimiters, D].
        at: position -> index of the delimiter; a thought whose delimiter is none is left out.
        labelled: (position, 1 for execution, else 0) of every thought.
    """
    layers, _, width = hidden.shape
    total = torch.zeros(2, layers, width, dtype=torch.float64)
    squares = torch.zeros(2, layers, dtype=torch.float64)
    count = torch.zeros(2, dtype=torch.int64)
    for position, label in labelled:
        if position in at:
            state = hidden[:, at[position]]
            total[label] += state
            squares[label] += state.square().sum(dim=1)
            count[label] += 1
    return Moments(total, squares, count)
