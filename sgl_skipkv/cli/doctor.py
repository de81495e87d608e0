"""``skipkv doctor``: versions, platform, hooks and the capability matrix of this environment."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import warnings
from contextlib import redirect_stdout
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from sgl_skipkv.cli.doctor_model import show_model
from sgl_skipkv.cli.doctor_url import check_endpoint
from sgl_skipkv.cli.tables import Column, facts_of, print_json, table_of
from sgl_skipkv.config import SettingError

#: columns of a file or a pipe, which has no width of its own
LEAST_WIDTH: Final = 110
#: of a missing package
CHOICES: Final = "the environment of your server, or pip install 'sgl-skipkv[sglang]'"
_PACKAGES: Final = ("sgl-skipkv", "sglang", "torch", "triton", "transformers", "flashinfer-python")
_HOOK_COLOURS: Final = {"ok": "", "changed": "yellow", "wrong": "red"}
_CAPABILITY_COLOURS: Final = {
    **{"yes": "green", "no": "red"},
    **dict.fromkeys(("not run", "per request"), "yellow"),
}


def add_doctor(commands: Any, tables: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    checks = commands.add_parser(
        "doctor", parents=[tables], help="versions, platform, hooks and supported SGLang features"
    )
    checks.set_defaults(run=doctor)
    instead = checks.add_mutually_exclusive_group()
    instead.add_argument(
        "--url", help="check a running server or router instead: do budgets reach it?"
    )
    instead.add_argument(
        "--model", type=Path, help="check a model instead: its config.json or the folder"
    )
    checks.add_argument("--api-key", help="for --url, where the server asks for one")


def doctor(arguments: argparse.Namespace, console: Console) -> int:
    """Print versions, platform, hooks and the capability matrix; 0 if every hook applies.

    With a URL: whether budgets arrive there. With a model: whether eviction can work with it.
    """
    if arguments.url is not None:
        return check_endpoint(arguments.url, arguments.api_key, console, as_json=arguments.json)
    with warnings.catch_warnings():
        # SGLang warns while it is imported of what this machine lacks, whoever asks for what.
        warnings.filterwarnings("ignore", category=UserWarning, module="sglang")
        if arguments.model is not None:
            return show_model(arguments.model, console, as_json=arguments.json)
        report = examine()
    if arguments.json:
        print_json(report)
    else:
        show(report, console)
    return 0 if report["state"] == "ready" else 1


def examine() -> dict[str, Any]:
    """What this environment has, and whether eviction is ready as far as can be said without a
    server."""
    versions = {name: version_of(name) for name in _PACKAGES}
    versions["python"] = platform.python_version()
    report: dict[str, Any] = {"state": "unavailable", "problems": [], "warnings": []}
    report |= {"versions": versions, "platform": os.environ.get("SGLANG_PLATFORM") or None}
    report |= {"device": None, "hooks": [], "capabilities": [], "policies": []}
    if find_spec("sglang") is None:
        report["problems"] = [f"no SGLang here; choices: {CHOICES}"]
        return report
    from sgl_skipkv.patches import registry
    from sgl_skipkv.patches.startup.capabilities import CAPABILITIES, no_device, platform_name
    from sgl_skipkv.patches.startup.hook_bodies import hook_states
    from sgl_skipkv.policy import installed

    states, problems = hook_states()
    report["device"] = platform_name()
    report["hooks"] = [
        {
            "hook": hook_state.hook.target,
            "kind": hook_state.hook.kind,
            "state": hook_state.state,
            "text": hook_state.text,
            "why": hook_state.hook.why,
        }
        for hook_state in states
    ]
    report["capabilities"] = [
        {"feature": row.name, "supported": row.supported, "why": row.why} for row in CAPABILITIES
    ]
    report["policies"] = [_of_package(name) for name in installed.entries()]
    warnings_found = registry.opened_for(metadata.version("sglang")), no_device()
    report["warnings"] = [warning for warning in warnings_found if warning is not None]
    report["problems"] = problems
    report["state"] = "unavailable" if problems else "ready"
    return report


def _of_package(name: str) -> dict[str, str | None]:
    """A policy that another package registers, or why it cannot be used."""
    from sgl_skipkv.policy import built_in, installed, policy_class  # need torch

    row = {"policy": name, "package": installed.owners(name), "keeps": None, "problem": None}
    if name in built_in():
        ours = f"{name} is a policy of sgl_skipkv, which is used; the package's is not"
        return row | {"problem": ours}
    try:
        with redirect_stdout(sys.stderr):  # what its module prints is no part of the JSON
            return row | {"keeps": policy_class(name).keeps}
    except SettingError as error:
        return row | {"problem": str(error.got)}


def version_of(package: str) -> str | None:
    """The installed version; None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def show(report: dict[str, Any], console: Console) -> None:
    """The same as tables."""
    if not console.is_terminal:
        console.width = max(console.width, LEAST_WIDTH)
    facts = {name: version or "not installed" for name, version in report["versions"].items()}
    facts["SGLANG_PLATFORM"] = report["platform"] or "not set"
    if report["device"] is not None:
        facts["platform"] = report["device"]
    console.print(facts_of("versions", facts))
    if report["device"] is None:
        console.print(f"[bold red]unavailable[/]: {escape(report['problems'][0])}")
        return
    hooks = [
        {**hook, "state": Text(hook["text"], _HOOK_COLOURS[hook["state"]])}
        for hook in report["hooks"]
    ]
    columns = Column("hook", "hook"), Column("kind", "kind"), Column("state", "state", lambda t: t)
    table = table_of("hooks", (*columns, Column("why", "why")), hooks)
    table.columns[0].overflow = "fold"  # names without a space: they would be cut
    console.print(table)
    supported = Column(
        "supported", "supported", lambda word: f"[{_CAPABILITY_COLOURS[word]}]{word}[/]"
    )
    columns = Column("feature", "feature"), supported, Column("why", "why")
    console.print(table_of("capabilities", columns, report["capabilities"]))
    if report["policies"]:
        rows = [
            {**row, "keeps": Text(row["keeps"] or "") + Text(row["problem"] or "", "red")}
            for row in report["policies"]
        ]
        keeps = Column("keeps", "keeps", lambda text: text)
        columns = Column("policy", "policy"), Column("package", "package"), keeps
        console.print(table_of("policies of other packages", columns, rows))
    for warning in report["warnings"]:
        console.print(f"[bold yellow]warning[/]: {escape(warning)}")
    if report["problems"]:
        console.print("[bold red]unavailable[/]: " + "; ".join(report["problems"]))
        console.print("A server still starts; requests with a budget get HTTP 400.")
    else:
        console.print(
            "[bold green]ready[/] as far as can be checked without a server: each server checks "
            "its configuration at start and reports its state in /server_info and in the log."
        )
