"""``skipkv steering extract``: extracts a steering vector from prompts, with a real server.

It generates traces, sends each one back as a prompt to capture the hidden states at its delimiters,
and computes the difference of the class means. All results are in one work folder, so a stopped run
can be resumed.
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
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file
from torch.nn.functional import cosine_similarity
from transformers import AutoConfig

from sgl_skipkv.cli.files import load_tokenizer
from sgl_skipkv.cli.progress import track
from sgl_skipkv.cli.server_process import ServerProcess, pool_flags, server_flags
from sgl_skipkv.config import Preset, SettingError
from sgl_skipkv.kernels.reference import KEYWORD, THINK_END
from sgl_skipkv.recording.sentences import PRESETS, Delimiters, SentenceTracker, newline_tokens
from sgl_skipkv.steering.class_statistics import ClassStatistics, class_statistics_of
from sgl_skipkv.steering.steerer import TokenClasses
from sgl_skipkv.steering.vector import Origin, SteeringVector

KEYWORDS = ("Wait", "Alternatively", "again")
#: the command warns if a class has fewer thoughts
FEW_THOUGHTS = 100
#: requests at a time
_PARALLEL = 32


@dataclass(frozen=True)
class LayerReport:
    """The quality of one layer's vector."""

    layer: int
    separation: float
    split_cosine: float
    norm: float


class Extraction:
    """One run of the command.

    Args:
        model_path: folder or name.
        work: folder for traces and sums; a run with the same folder is resumed.
        keywords: a thought with one of these tokens is non-execution.
        preset: of the delimiters.
        thoughts: a thought ends at a blank line (``paragraph``, as in SEAL) or at any delimiter
            (``line``). A blank line and a newline are different tokens, so means over both would
            mostly show the difference between the tokens.
        take: the hidden state of the delimiter ``before`` a thought, where steering is applied, or
            ``after`` it.
    """

    def __init__(
        self,
        model_path: str,
        work: Path,
        *,
        keywords: Sequence[str] = KEYWORDS,
        preset: Preset = "math",
        thoughts: Literal["paragraph", "line"] = "paragraph",
        take: Literal["before", "after"] = "before",
        server_flags: Sequence[str] = (),
    ) -> None:
        self.model_path, self.work = model_path, work
        self.keywords, self.preset, self.take = tuple(keywords), preset, take
        self._server_flags = server_flags
        self.tokenizer = load_tokenizer("model-path", model_path)
        config = AutoConfig.from_pretrained(model_path)
        self.layers: int = config.num_hidden_layers
        self._hidden_size: int = config.hidden_size
        # Of a trace with its prompt: the capture adds one token.
        self._limit_tokens: int = config.max_position_embeddings - 2
        self._labels = [*keywords, preset, thoughts, take]
        newlines = newline_tokens(self.tokenizer)
        delimiters = Delimiters(newlines, config.vocab_size)
        self.classes = TokenClasses(self.tokenizer, delimiters, preset, self.keywords)
        end = "\n\n" if thoughts == "paragraph" else ""
        ends = [(token, text) for token, text in newlines if text.endswith(end)]
        self._ends = Delimiters(ends, config.vocab_size)
        self._traces, self._sums = work / "traces.jsonl", work / "sums"
        self._captured = work / "captured"
        self._writing = threading.Lock()

    def from_prompts(self, prompts: Sequence[str], max_new_tokens: int) -> ClassStatistics:
        """Generate missing traces, capture missing hidden states, return the sums.

        Args:
            prompts: as sent to the model.

        Raises:
            SettingError: the work folder belongs to other traces, or a prompt is too long.
        """
        ids = [self._ids(prompt) for prompt in prompts]
        longest = _longest("prompts", ids, self._limit_tokens - 1)
        self._begin({"prompts": ids, "max_new_tokens": max_new_tokens})
        outputs = self._read_outputs()
        traces = [
            {"number": number, "prompt_ids": prompt_ids, "output_ids": outputs.get(number)}
            for number, prompt_ids in enumerate(ids)
        ]
        most_tokens = min(longest + max_new_tokens, self._limit_tokens)
        return self._finish(traces, most_tokens, max_new_tokens)

    def from_traces(self, given: Sequence[Mapping[str, str]]) -> ClassStatistics:
        """Like ``from_prompts``, for given traces: ``prompt`` (as sent to the model), ``output``.

        Raises:
            SettingError: the work folder belongs to other traces, or one is longer than the model's
                context.
        """
        texts = [(self._ids(trace["prompt"]), self._ids(trace["output"])) for trace in given]
        longest = _longest("traces", [p + o for p, o in texts], self._limit_tokens)
        traces = [
            {"number": number, "prompt_ids": prompt, "output_ids": output}
            for number, (prompt, output) in enumerate(texts)
        ]
        self._begin({"traces": traces})
        return self._finish(traces, longest)

    def statistics(self, part: int | None = None) -> ClassStatistics:
        """The sums of all traces, or of the even (0) or odd (1) ones."""
        paths = sorted(self._sums.glob("*.safetensors"))
        chosen = [path for path in paths if part is None or int(path.stem) % 2 == part]
        sums = (ClassStatistics(**load_file(path)) for path in chosen)
        return sum(sums, ClassStatistics.zeros(self.layers, self._hidden_size))

    def report(self) -> list[LayerReport]:
        """Separation and stability of every layer's vector."""
        statistics = self.statistics()
        even, odd = (self.statistics(part).difference().float() for part in (0, 1))
        cosines, norms = cosine_similarity(even, odd, dim=1), statistics.difference().norm(dim=1)
        columns = (statistics.separation().tolist(), cosines.tolist(), norms.tolist())
        return [LayerReport(*row) for row in zip(range(self.layers), *columns, strict=True)]

    def vector(self, chosen: LayerReport) -> SteeringVector:
        """The vector of one layer, with its metadata.

        Raises:
            SettingError: one of the classes is empty.
        """
        statistics = self.statistics()
        nonexecution, execution = statistics.count.tolist()
        if not execution or not nonexecution:
            got = f"{execution} execution and {nonexecution} non-execution thoughts"
            raise SettingError("keywords", "thoughts of both classes", got, "other keywords")
        origin = Origin(
            model=Path(self.model_path).name,
            hidden_size=self._hidden_size,
            layer=chosen.layer,
            keywords=",".join(self.keywords),
            delimiters=self.preset,
            traces=len(self._done()),
            execution_thoughts=execution,
            nonexecution_thoughts=nonexecution,
            split_cosine=round(min(max(chosen.split_cosine, -1.0), 1.0), 4),
            separation=round(chosen.separation, 4),
            date=datetime.date.today().isoformat(),
        )
        return SteeringVector(statistics.difference()[chosen.layer].float(), origin)

    # -- the steps ------------------------------------------------------------------------------

    def _begin(self, source: Mapping[str, object]) -> None:
        """Bind the work folder to these traces, and delete sums with other labels."""
        for folder in (self._sums, self._captured):
            folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps([self.model_path, source])
        traces = hashlib.sha256(text.encode()).hexdigest()
        path = self.work / "settings.json"
        saved = json.loads(path.read_text()) if path.exists() else {"traces": traces}
        if saved["traces"] != traces:
            expected = "a folder of the same model, traces or prompts, and max-new-tokens"
            choices = "another folder, an empty one, or the arguments of its first run"
            raise SettingError("work", expected, str(self.work), choices)
        if saved.get("labels") != self._labels:  # the traces remain valid
            shutil.rmtree(self._sums)
            self._sums.mkdir()
        settings = json.dumps({"traces": traces, "labels": self._labels})
        _write_whole(path, lambda partial: partial.write_text(settings))

    def _finish(
        self, traces: Sequence[dict[str, Any]], most_tokens: int, max_new_tokens: int = 0
    ) -> ClassStatistics:
        """The sums of all traces; starts a server if results are missing."""
        missing = [trace for trace in traces if trace["output_ids"] is None]
        if missing or len(self._done()) < len(traces):
            with self._server(most_tokens) as server:
                server.wait_ready(600)
                self._each(missing, "traces", partial(self._generate, server, max_new_tokens))
                done = self._done()
                todo = [trace for trace in traces if trace["number"] not in done]
                self._each(todo, "hidden states", partial(self._capture, server))
        return self.statistics()

    def _done(self) -> set[int]:
        return {int(path.stem) for path in self._sums.glob("*.safetensors")}

    def _server(self, most_tokens: int) -> ServerProcess:
        """``most_tokens``: length of the longest trace with its prompt."""
        config = self.work / "skipkv.json"
        settings = {"steering_capture": str(self._captured.resolve()), "delimiters": self.preset}
        config.write_text(json.dumps(settings))
        # Tokens of a cached prefix are not computed, so they have no hidden states to capture.
        flags = ["--skipkv-config", str(config.resolve()), "--disable-radix-cache"]
        flags += pool_flags(_PARALLEL, most_tokens) + server_flags(self._server_flags)
        return ServerProcess(self.model_path, self.work / "server", flags)

    def _generate(self, server: ServerProcess, max_new_tokens: int, trace: dict[str, Any]) -> None:
        ids = trace["prompt_ids"]
        max_new_tokens = min(max_new_tokens, self._limit_tokens - len(ids))
        params = {"temperature": 0, "max_new_tokens": max_new_tokens}
        answer = server.post("/generate", {"input_ids": ids, "sampling_params": params})
        trace["output_ids"] = answer["output_ids"]
        with self._writing, self._traces.open("a") as file:
            file.write(json.dumps(trace) + "\n")

    def _capture(self, server: ServerProcess, trace: Mapping[str, Any]) -> None:
        number = trace["number"]
        params = {"max_new_tokens": 1, "custom_params": {"steering_capture": number}}
        ids = [*trace["prompt_ids"], *trace["output_ids"]]
        server.post("/generate", {"input_ids": ids, "sampling_params": params})
        path = self._captured / f"{number}.safetensors"
        captured = load_file(path)
        closes = partial(self._ends.closes, preset_bit=PRESETS[self.preset])
        positions = enumerate(captured["positions"].tolist())
        at = {position: i for i, position in positions if closes(ids[position])}
        statistics = class_statistics_of(captured["hidden"].double(), at, self._labelled(trace))
        sums = self._sums / f"{number:06d}.safetensors"
        _write_whole(sums, lambda partial: save_file(vars(statistics), partial))
        path.unlink()

    def _labelled(self, trace: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
        """(position of the delimiter, 1 for execution) of each thought of the thinking part."""
        prompt, output = len(trace["prompt_ids"]), trace["output_ids"]
        thinking = next((i for i, t in enumerate(output) if self.classes[t] & THINK_END), None)
        tracker = SentenceTracker(self._ends, self.preset)
        tracker.feed(output[:thinking])
        for start, stop in tracker.closed:
            is_execution = not any(self.classes[t] & KEYWORD for t in output[start:stop])
            # Several delimiters may end a thought: the last one precedes the next thought.
            position = prompt + (start if self.take == "before" else stop) - 1
            yield position, int(is_execution)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _each(self, traces: Sequence[Any], what: str, work: Callable[[Any], None]) -> None:
        with ThreadPoolExecutor(_PARALLEL) as pool:
            for _ in track(pool.map(work, traces), what, len(traces)):
                pass

    def _read_outputs(self) -> dict[int, list[int]]:
        """Output token ids by number of the trace."""
        if not self._traces.exists():
            return {}
        whole, end, _ = self._traces.read_text().rpartition("\n")
        self._traces.write_text(whole + end)  # a stopped run may have cut the last line
        traces = map(json.loads, whole.splitlines())
        return {trace["number"]: trace["output_ids"] for trace in traces}


def _longest(field: str, sequences: Sequence[Sequence[int]], limit_tokens: int) -> int:
    longest = max(map(len, sequences))
    if longest > limit_tokens:
        expected = f"at most {limit_tokens} tokens each, which fit the model's context"
        raise SettingError(field, expected, longest, f"shorter {field}")
    return longest


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: to another name, then rename it."""
    partial = path.with_suffix(".partial")
    write(partial)
    partial.replace(path)
