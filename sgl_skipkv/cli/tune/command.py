"""``skipkv tune``: compares budgets on a user's own prompts, and recommends one."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import requests
from rich.console import Console
from rich.markup import escape

from sgl_skipkv import policy
from sgl_skipkv.cli.files import load_tokenizer
from sgl_skipkv.cli.no_answer import why_no_answer
from sgl_skipkv.cli.progress import progress, step
from sgl_skipkv.cli.prompts import Prompt, read_prompts
from sgl_skipkv.cli.server_process import (
    Endpoint,
    HTTPFailure,
    ServerProcess,
    exit_on_sigterm,
    pool_flags,
    server_flags,
)
from sgl_skipkv.cli.tables import print_json
from sgl_skipkv.cli.tune.budgets import (
    given_settings,
    least_tokens,
    resolved,
    shared_settings,
)
from sgl_skipkv.cli.tune.compare import Comparison
from sgl_skipkv.cli.tune.figure import check_figure, draw
from sgl_skipkv.cli.tune.runs import FULL, Run, Runner, Setting
from sgl_skipkv.cli.tune.show import Report, sentences, table
from sgl_skipkv.config import ServerConfig, SettingError

#: for a start; on a new GPU libraries compile their kernels first
_START_S = 900
#: of the log of a server that did not start
_LOG_LINES = 12


class NotStarted(Exception):
    """The server did not start; the message has the end of its log."""


def run_tune(arguments: argparse.Namespace, console: Console) -> int:
    """Compare, print, draw; 1 if the server refused a request or went away."""
    kv_params = _checked(arguments)
    tokenizer = load_tokenizer("model-path", arguments.model_path)
    prompts, repeated = read_prompts(
        arguments.prompts, tokenizer, arguments.problems, arguments.suffix
    )
    if arguments.budgets is not None:
        longest = max(len(prompt.ids) for prompt in prompts)
        given_settings(arguments.policies, arguments.budgets, kv_params, longest)
    try:
        with _server(arguments, prompts) as server:
            runner = Runner(
                server,
                arguments.url is None,
                prompts,
                kv_params,
                arguments.max_new_tokens,
                arguments.parallel or len(prompts),
                logprobs=prompts[0].answer is None,
            )
            report = compare(runner, arguments, _of_repeated(repeated, arguments.prompts))
    except NotStarted as error:
        why = escape(str(error))
        console.print(f"[bold red]the server did not start[/]: {why}", soft_wrap=True)
        return 1
    except HTTPFailure as error:
        console.print(f"[bold red]refused[/] by the server: {escape(str(error))}", soft_wrap=True)
        return 1
    except requests.RequestException as error:
        console.print(f"[bold red]no answer[/] from the server: {why_no_answer(error)}")
        return 1
    _show(report, arguments, console)
    return 0


def _show(report: Report, arguments: argparse.Namespace, console: Console) -> None:
    """Print first: a figure that cannot be written costs no more than itself."""
    if arguments.json:
        print_json(as_json(report, arguments))
    else:
        console.print(table(report))
        for line in sentences(report):
            console.print(line, markup=False, highlight=False)
    if arguments.figure is not None:
        draw(report, arguments.figure)
        if not arguments.json:
            console.print(str(arguments.figure), soft_wrap=True, markup=False, highlight=False)


def _of_repeated(lines: int, path: Path) -> list[str]:
    """What is said of lines that were left out, if any were."""
    if not lines:
        return []
    count = "1 line" if lines == 1 else f"{lines} lines"
    return [f"Left out: {count} of {path} whose prompt is that of an earlier line."]


def compare(runner: Runner, arguments: argparse.Namespace, notes: Sequence[str]) -> Report:
    """Run the full cache, every setting, and the full cache once more."""
    n, start = len(runner.prompts), time.monotonic()
    with progress() as bar:
        step(f"{FULL}: {n} prompts")
        task = bar.add_task(str(FULL), total=n, unit="answers")
        first = runner.run(FULL, lambda _: bar.advance(task))
        lengths = [len(output.ids) for output in first.outputs]
        full_tokens = median(lengths)
        settings, too_small = _settings(runner, arguments, full_tokens)
        # As if every setting wrote as many tokens as the full cache.
        task = bar.add_task("", total=sum(lengths) * (len(settings) + 1), unit="tokens")
        runs: list[Run] = []
        for setting in (*settings, FULL):
            count = f"{len(runs) + 1} of {len(settings) + 1}"
            bar.update(task, description=f"{setting} ({count})")
            step(f"{setting} ({count}), after {time.monotonic() - start:,.0f} s")
            runs.append(runner.run(setting, lambda i: bar.advance(task, lengths[i])))
    policies = len({setting.policy for setting in settings})
    comparison = Comparison(runner.prompts, first, runs[-1], policies, timed=runner.owned)
    rows = [comparison.row(run) for run in (first, *runs)]
    tolerance = arguments.tolerance_points / 100
    return Report(comparison, rows, full_tokens, tolerance, [*notes, *too_small])


def _settings(
    runner: Runner, arguments: argparse.Namespace, full_tokens: float
) -> tuple[list[Setting], list[str]]:
    """What is compared with the full cache, and a sentence for each share that is left out."""
    policies, kv_params = arguments.policies, runner.kv_params
    longest = max(len(prompt.ids) for prompt in runner.prompts)
    if arguments.budgets is not None:
        return given_settings(policies, arguments.budgets, kv_params, longest), []
    leasts = {policy: least_tokens(policy, kv_params, longest) for policy in policies}
    return shared_settings(leasts, arguments.shares, full_tokens)


def as_json(report: Report, arguments: argparse.Namespace) -> dict[str, Any]:
    """What ``--json`` prints."""
    chosen = report.chosen
    return {
        "model": arguments.model_path,
        "prompts": len(report.comparison.prompts),
        "score": "right answers" if report.comparison.keyed else "equal tokens",
        "full_output_tokens_p50": report.full_tokens,
        "tolerance_points": arguments.tolerance_points,
        "rows": [asdict(row) for row in report.rows],
        "recommended": None if chosen is None else asdict(chosen),
        "sentences": sentences(report),
    }


def _checked(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check what can be checked before a server starts; the parameters of the policies."""
    for name, least in (("problems", 2), ("max_new_tokens", 1), ("parallel", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            field = name.replace("_", "-")
            raise SettingError(field, f"an integer of {least} or more", value, "a larger one")
    if not 0 < arguments.tolerance_points < 100:
        expected = "a number of points in (0, 100)"
        raise SettingError("tolerance-points", expected, arguments.tolerance_points, "10, or 2")
    for share in arguments.shares:
        if not 0 < share <= 1:
            raise SettingError("shares", "numbers in (0, 1]", share, "such as 0.25 0.5")
    for flag in arguments.server_flags:
        if "=" not in flag:
            raise SettingError("server-flags", "NAME=VALUE", flag, "such as max-total-tokens=65536")
    if len({*arguments.policies}) < len(arguments.policies):
        raise SettingError("policies", "each name once", arguments.policies, "two names")
    try:
        kv_params = json.loads(arguments.kv_params)
    except (RecursionError, ValueError) as error:
        raise SettingError("kv-params", "a JSON object", str(error), '{"interval": 32}') from error
    if not isinstance(kv_params, dict):
        raise SettingError("kv-params", "a JSON object", kv_params, '{"interval": 32}')
    for name in arguments.policies:
        if not policy.policy_class(name).evicts:
            evicting = ", ".join(
                name for name in policy.built_in() if policy.policy_class(name).evicts
            )
            raise SettingError("policies", "policies that evict", name, evicting)
        for budget in arguments.budgets or [ServerConfig().kv_budget_max]:
            resolved(Setting(name, budget), kv_params)
    if arguments.figure is not None:
        check_figure(arguments.figure)
    return kv_params


@contextlib.contextmanager
def _server(arguments: argparse.Namespace, prompts: Sequence[Prompt]) -> Iterator[Endpoint]:
    if arguments.url is not None:
        server = Endpoint(arguments.url, arguments.api_key)
        try:
            server.get("/v1/models")
        except (requests.RequestException, HTTPFailure) as error:
            why = str(error) if isinstance(error, HTTPFailure) else why_no_answer(error)
            got, choices = f"{arguments.url} ({why})", "such as http://127.0.0.1:30000"
            raise SettingError("url", "the address of a running server", got, choices) from error
        yield server
        return
    parallel = arguments.parallel or len(prompts)
    longest = max(len(prompt.ids) for prompt in prompts) + arguments.max_new_tokens
    flags = [
        *pool_flags(parallel, longest),
        *("--max-running-requests", str(parallel)),
        *("--kv-policy", arguments.policies[0]),  # enables eviction at start
        *server_flags(arguments.server_flags),
    ]
    exit_on_sigterm()
    step("starting a server")
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(arguments.model_path, Path(folder), flags, captures=True) as server,
    ):
        yield _started(server)


def _started(server: ServerProcess) -> Endpoint:
    """The server when it is ready.

    Raises:
        NotStarted: it has ended, or is not ready in time.
    """
    try:
        return server.wait_ready(_START_S)
    except (RuntimeError, TimeoutError) as error:
        why, *log = str(error).splitlines()
        raise NotStarted("\n".join([why, *log[-_LOG_LINES:]])) from error
