"""Cells of an experiment through real servers: what every accuracy figure and ablation is made of.

A cell is one setting, run on every problem. Its generations go to a log that is not committed and
its summary to a row, so a sweep that was stopped repeats nothing: not a finished cell, and on the
same machine not a finished generation of the same code. Requests of different cells share the
servers' batches, which is what per-call budgets are for.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from bench.lib.accuracy import accuracy_columns
from bench.lib.record import append_row, recorded
from sgl_skipkv.cli.progress import progress
from sgl_skipkv.cli.tune.grading import is_right

SAMPLED = {"temperature": 0.6, "top_p": 0.95}
GREEDY = {"temperature": 0}
#: seconds that one answer may take: a trace of 4,000 tokens beside 63 others, on two cores
ANSWER_S = 3600.0
PACKAGE = Path(__file__).resolve().parents[2] / "sgl_skipkv"
#: its folders that answers come from
ANSWERING = ("cpu", "eviction", "kernels", "policy", "recording", "request", "steering")


@cache
def code() -> str:
    """A digest of what answers come from; a commit that changes something else leaves it alone."""
    versions = [metadata.version(name) for name in ("sglang", "torch")]
    digest = hashlib.sha256(" ".join(versions).encode())
    for path in sorted(path for name in ANSWERING for path in (PACKAGE / name).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Problem:
    id: str
    level: str
    text: str
    answer: str | int


@dataclass(frozen=True)
class Cell:
    """One setting on one level.

    Attributes:
        kv_budget: tokens; None for no budget.
        kv_params: parameters of the policy, as JSON with sorted keys.
        seeds: answers per problem; 1 when greedy.
    """

    level: str
    policy: str
    kv_budget: int | None = None
    kv_params: str = "{}"
    sampling: str = "greedy"
    seeds: int = 1

    def sampling_params(self, max_new_tokens: int, seed: int) -> dict[str, Any]:
        chosen = GREEDY if self.sampling == "greedy" else {**SAMPLED, "sampling_seed": seed}
        return {
            **chosen,
            "max_new_tokens": max_new_tokens,
            "kv_policy": self.policy,
            "kv_budget": self.kv_budget,
            "kv_params": json.loads(self.kv_params),
        }


class Poster(Protocol):
    """A server that answers."""

    def post(self, path: str, body: Mapping[str, Any], timeout: float = ...) -> Any: ...


@dataclass
class Sweep:
    """Run cells, each once.

    Attributes:
        name: of the file of rows.
        servers: asked in turn.
        parallel: requests in flight at each of them.
        problems: of every level that a cell names.
        expected_tokens: level -> mean trace, for the time that is left.
        labels: columns of every row of this sweep, put before the cell's.
        log: generations, one JSON line each; those of other code are left alone and not used.
        cell_type: class of the cells; its fields are columns.
        measures: of one generation's text, name -> number; their means are columns.
    """

    name: str
    servers: Sequence[Poster]
    parallel: int
    problems: Mapping[str, Sequence[Problem]]
    max_new_tokens: int
    log: Path
    labels: Mapping[str, str | int] = field(default_factory=dict)
    expected_tokens: Mapping[str, float] = field(default_factory=dict)
    cell_type: type[Cell] = Cell
    measures: Callable[[Problem, str], Mapping[str, float]] = lambda problem, text: {}

    def run(self, cells: Iterable[Cell]) -> None:
        """Append a row for every cell that has none yet, as soon as its last answer is there."""
        finished = {self._key(row) for row in recorded(self.name)}
        unique = dict.fromkeys(cells)
        todo = [cell for cell in unique if self._key(self._columns(cell)) not in finished]
        answers = self._logged()
        tasks = [
            (cell, problem, seed)
            for cell in todo
            for problem in self.problems[cell.level]
            for seed in range(cell.seeds)
        ]
        weight = {level: round(self.expected_tokens.get(level, 1)) for level in self.problems}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with (
            self.log.open("a") as log,
            progress() as bar,
            ThreadPoolExecutor(self.parallel * len(self.servers)) as pool,
        ):
            total = sum(weight[cell.level] for cell, _, _ in tasks)
            advance = partial(bar.advance, bar.add_task(self.name, total=total, unit="tokens"))
            missing: dict[Cell, int] = defaultdict(int)
            for cell, _, _ in tasks:
                missing[cell] += 1
            running: dict[Future[dict[str, Any]], tuple[Cell, Problem, int]] = {}
            for task in tasks:
                if self._identity(*task) in answers:
                    self._answered(task[0], missing, answers, advance, weight)
                else:
                    running[pool.submit(self._ask, len(running), *task)] = task
            try:
                for future in as_completed(running):
                    cell, problem, _ = task = running[future]
                    reply = future.result()
                    answer = {"key": self._identity(*task), "code": code()}
                    answer |= _digest(reply, problem)
                    answer["measures"] = self.measures(problem, reply["text"])
                    log.write(json.dumps(answer) + "\n")
                    log.flush()
                    answers[answer["key"]] = answer
                    self._answered(cell, missing, answers, advance, weight)
            finally:  # whatever ended it: what has not begun is left for the next run
                pool.shutdown(wait=False, cancel_futures=True)

    def baseline(self) -> dict[str, dict[str, str]]:
        """Level -> row of FullKV, greedy, which tells what a share of the trace is."""
        cells = {level: self.cell_type(level, "full") for level in self.problems}
        self.run(cells.values())
        rows = {self._key(row): row for row in recorded(self.name)}
        full = {level: rows[self._key(self._columns(cell))] for level, cell in cells.items()}
        self.expected_tokens = {level: float(row["output_tokens"]) for level, row in full.items()}
        return full

    def _ask(self, number: int, cell: Cell, problem: Problem, seed: int) -> dict[str, Any]:
        body = {
            "text": problem.text,
            "sampling_params": cell.sampling_params(self.max_new_tokens, seed),
        }
        server = self.servers[number % len(self.servers)]
        answer: dict[str, Any] = server.post("/generate", body, ANSWER_S)
        return answer

    def _answered(
        self,
        cell: Cell,
        missing: dict[Cell, int],
        answers: Mapping[str, Mapping[str, Any]],
        advance: Callable[[int], None],
        weight: Mapping[str, int],
    ) -> None:
        advance(weight[cell.level])
        missing[cell] -= 1
        if missing[cell] == 0:
            keys = [
                self._identity(cell, problem, seed)
                for problem in self.problems[cell.level]
                for seed in range(cell.seeds)
            ]
            append_row(self.name, {**self._columns(cell), **summary([answers[k] for k in keys])})

    def _columns(self, cell: Cell) -> dict[str, str | int]:
        fields = {name: "" if value is None else value for name, value in asdict(cell).items()}
        problems = len(self.problems[cell.level])
        sizes = {"problems": problems, "max_new_tokens": self.max_new_tokens}
        return {**self.labels, **fields, **sizes}

    def _key(self, row: Mapping[str, str | int]) -> tuple[str, ...]:
        fields = self.cell_type.__dataclass_fields__
        names = (*self.labels, *fields, "problems", "max_new_tokens")
        return tuple(str(row[name]) for name in names)

    def _identity(self, cell: Cell, problem: Problem, seed: int) -> str:
        labels = [f"{name}={value}" for name, value in self.labels.items()]
        fields = [*labels, *asdict(cell).values(), self.max_new_tokens, problem.id, seed]
        return "|".join(map(str, fields))

    def _logged(self) -> dict[str, dict[str, Any]]:
        if not self.log.exists():
            return {}
        written, end, _ = self.log.read_text().rpartition("\n")
        self.log.write_text(written + end)  # a line without its end was being written at the stop
        answers = map(json.loads, written.splitlines())
        return {one["key"]: one for one in answers if one.get("code") == code()}


def _digest(answer: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
    """What a row needs of an answer."""
    info = answer["meta_info"]
    cut_off = info["finish_reason"]["type"] == "length"
    return {
        "right": not cut_off and is_right(answer["text"], problem.answer),
        "prompt_tokens": info["prompt_tokens"],
        "output_tokens": info["completion_tokens"],
        "cut_off": cut_off,
        **{
            name: info["skipkv"][name]
            for name in ("mean_kv_tokens", "peak_kv_tokens", "compactions", "evicted_sentences")
        },
    }


def summary(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A cell's columns: accuracy with its interval, lengths, memory, and that evictions happened.

    KV tokens are the request's own, without the prompt; ``peak_kv_tokens`` is the mean over
    requests of each request's peak and ``peak_kv_tokens_max`` the largest. ``length_limited``
    counts outputs that ran into ``max_new_tokens``; they are wrong.
    """

    def mean(name: str) -> float:
        return round(sum(answer[name] for answer in answers) / len(answers), 1)

    measured: dict[str, list[float]] = defaultdict(list)
    for answer in answers:
        for name, value in answer.get("measures", {}).items():
            measured[name].append(value)
    right = sum(answer["right"] for answer in answers)
    return {
        "answers": len(answers),
        **accuracy_columns(right, len(answers)),
        "prompt_tokens": mean("prompt_tokens"),
        "output_tokens": mean("output_tokens"),
        "length_limited": sum(answer["cut_off"] for answer in answers),
        "mean_kv_tokens": mean("mean_kv_tokens"),
        "peak_kv_tokens": mean("peak_kv_tokens"),
        "peak_kv_tokens_max": max(answer["peak_kv_tokens"] for answer in answers),
        "compactions": sum(answer["compactions"] for answer in answers),
        "evicted_sentences": sum(answer["evicted_sentences"] for answer in answers),
        **{name: round(sum(values) / len(values), 4) for name, values in measured.items()},
    }
