"""``skipkv steering extract``: from prompts to a steering vector, through a real server.

Three steps, each of which can be stopped and goes on where it was (everything is in one work
folder): generate traces; send each back as a prompt and take the hidden states at its delimiters;
take the difference of the means.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from sgl_skipkv.cli.server_process import ServerProcess
from sgl_skipkv.cli.tokenizer_files import load_tokenizer
from sgl_skipkv.config import SettingError
from sgl_skipkv.kernels.reference import KEYWORD, THINK_END
from sgl_skipkv.recording.sentences import PRESETS, Delimiters, SentenceTracker, newline_tokens
from sgl_skipkv.steering.class_statistics import ClassStatistics, class_statistics_of
from sgl_skipkv.steering.steerer import TokenClasses
from sgl_skipkv.steering.vector import Origin, SteeringVector, cosine

KEYWORDS = ("Wait", "Alternatively", "again")
#: fewer thoughts than this in a class, and the command warns
FEW_THOUGHTS = 100
#: KV pool on a CPU, whose memory SGLang would otherwise take most of
_CPU_POOL_TOKENS = 65536
Take = Literal["before", "after"]
Thoughts = Literal["paragraph", "line"]


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
        self.tokenizer = load_tokenizer("model-path", model_path)
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
        self._writing = threading.Lock()

    @property
    def layers(self) -> int:
        layers: int = self._config.num_hidden_layers
        return layers

    def from_prompts(self, prompts: Sequence[str], max_new_tokens: int) -> ClassStatistics:
        """Generate the traces that are missing, capture what is missing, add everything up.

        Raises:
            SettingError: the work folder belongs to other traces, or a prompt leaves no room.
        """
        ids = [self._prompt_ids(prompt) for prompt in prompts]
        limit_tokens = self._config.max_position_embeddings - 2  # of a trace; the capture adds one
        longest = _longest("prompts", ids, limit_tokens - 1)
        self._begin({"prompts": ids, "max_new_tokens": max_new_tokens})
        traces = self._read_traces()

        def work(server: ServerProcess) -> None:
            todo = [number for number in range(len(ids)) if number not in traces]

            def generate(number: int) -> None:
                new_tokens = min(max_new_tokens, limit_tokens - len(ids[number]))
                traces[number] = self._generate(server, number, ids[number], new_tokens)

            self._each(todo, "traces", generate)
            self._capture_all(server, traces)

        most_tokens = min(longest + max_new_tokens, limit_tokens)
        return self._finish(len(ids), traces, most_tokens, work)

    def from_traces(self, given: Sequence[Mapping[str, str]]) -> ClassStatistics:
        """Capture and add up traces that exist: ``prompt`` (as sent to the model) and ``output``.

        Raises:
            SettingError: the work folder belongs to other traces, or one is longer than the model's
                context.
        """
        traces: dict[int, dict[str, Any]] = {
            number: {"number": number, **self._trace_ids(trace)}
            for number, trace in enumerate(given)
        }
        whole = [[*trace["prompt_ids"], *trace["output_ids"]] for trace in traces.values()]
        most_tokens = _longest("traces", whole, self._config.max_position_embeddings - 2)
        self._begin({"traces": list(traces.values())})
        return self._finish(
            len(traces), traces, most_tokens, lambda server: self._capture_all(server, traces)
        )

    def moments(self, part: int | None = None) -> ClassStatistics:
        """Of all traces, or of the even (0) or odd (1) ones."""
        layers, hidden = self.layers, self._config.hidden_size
        zeros = torch.zeros(2, layers, hidden, dtype=torch.float64)
        found = ClassStatistics(zeros, zeros[..., 0].clone(), torch.zeros(2, dtype=torch.int64))
        for path in sorted(self._sums.glob("*.safetensors")):
            if part is None or int(path.stem) % 2 == part:
                found += ClassStatistics(**load_file(path))
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
                "traces": len(self._done()),
                "execution_thoughts": execution,
                "nonexecution_thoughts": nonexecution,
                "split_cosine": round(min(max(chosen.split_cosine, -1.0), 1.0), 4),
                "separation": round(chosen.separation, 4),
                "date": datetime.date.today().isoformat(),
            }
        )
        return SteeringVector(whole.difference()[chosen.layer].float(), origin)

    # -- the steps ------------------------------------------------------------------------------

    def _begin(self, source: Mapping[str, object]) -> None:
        """Claim the work folder for these traces, and drop sums that were made in another way."""
        for folder in (self._sums, self._captured):
            folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps([self.model_path, source])
        traces = hashlib.sha256(text.encode()).hexdigest()
        labels = [*self.keywords, self.preset, self.thoughts, self.take]
        path = self.work / "settings.json"
        found = json.loads(path.read_text()) if path.exists() else {"traces": traces}
        if found["traces"] != traces:
            raise SettingError(
                "work",
                "a folder of the same model, traces or prompts, and max-new-tokens",
                str(self.work),
                "another folder, an empty one, or what the folder was begun with",
            )
        if found.get("labels") != labels:  # the traces are as good as before
            shutil.rmtree(self._sums)
            self._sums.mkdir()
        settings = json.dumps({"traces": traces, "labels": labels})
        _write_whole(path, lambda partial: partial.write_text(settings))

    def _finish(
        self,
        count: int,
        traces: Mapping[int, Mapping[str, Any]],
        most_tokens: int,
        work: Callable[[ServerProcess], None],
    ) -> ClassStatistics:
        """The sums of all traces, with a server if one is still needed."""
        if len(self._done()) < count or len(traces) < count:
            with self._server(most_tokens) as server:
                work(server.wait_ready(600))
        return self.moments()

    def _done(self) -> set[int]:
        return {int(path.stem) for path in self._sums.glob("*.safetensors")}

    def _server(self, most_tokens: int) -> ServerProcess:
        """``most_tokens``: of the longest trace, with its prompt."""
        config = self.work / "skipkv.json"
        settings = {"steering_capture": str(self._captured.resolve()), "delimiters": self.preset}
        config.write_text(json.dumps(settings))
        # A prefix from the cache has no forward pass to take hidden states from.
        flags = ["--skipkv-config", str(config.resolve()), "--disable-radix-cache"]
        if not torch.cuda.is_available():
            pool_tokens = max(_CPU_POOL_TOKENS, 2 * most_tokens)
            flags += ["--max-total-tokens", str(min(pool_tokens, self.parallel * most_tokens))]
        return ServerProcess(self.model_path, self.work / "server", [*flags, *self._server_flags])

    def _generate(
        self, server: ServerProcess, number: int, ids: list[int], max_new_tokens: int
    ) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": max_new_tokens}
        answer = server.post("/generate", {"input_ids": ids, "sampling_params": params})
        trace = {"number": number, "prompt_ids": ids, "output_ids": answer["output_ids"]}
        with self._writing, self._traces.open("a") as file:
            file.write(json.dumps(trace) + "\n")
        return trace

    def _capture_all(self, server: ServerProcess, traces: Mapping[int, Mapping[str, Any]]) -> None:
        done = self._done()
        todo = [traces[number] for number in sorted(traces) if number not in done]
        self._each(todo, "hidden states", lambda trace: self._capture(server, trace))

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
        moments = class_statistics_of(found["hidden"].double(), at, self._labelled(trace))
        sums = self._sums / f"{number:06d}.safetensors"
        _write_whole(sums, lambda partial: save_file(vars(moments), partial))
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

    def _read_traces(self) -> dict[int, dict[str, Any]]:
        if not self._traces.exists():
            return {}
        whole, end, _ = self._traces.read_text().rpartition("\n")
        self._traces.write_text(whole + end)  # the last line may have been cut by a stop
        return {trace["number"]: trace for trace in map(json.loads, whole.splitlines())}

    def _trace_ids(self, trace: Mapping[str, str]) -> dict[str, list[int]]:
        return {
            name: self.tokenizer(trace[key], add_special_tokens=False)["input_ids"]
            for name, key in (("prompt_ids", "prompt"), ("output_ids", "output"))
        }


def _longest(field: str, sequences: Sequence[Sequence[int]], limit_tokens: int) -> int:
    longest = max(map(len, sequences))
    if longest > limit_tokens:
        expected = f"at most {limit_tokens} tokens each, which fit the model's context"
        raise SettingError(field, expected, longest, f"shorter {field}")
    return longest


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let a file appear with all of its content or not at all."""
    partial = path.with_suffix(".partial")
    write(partial)
    partial.replace(path)
