"""``skipkv doctor --model``: what would work with a model, before anything of it is loaded."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgl_skipkv.cli.tables import print_json


def show_model(path: Path, console: Console, *, as_json: bool) -> int:
    """Print whether eviction, steering and each policy work with the model; 1 if eviction does not.

    Raises:
        SettingError: no config.json, or one that SGLang does not take for a model.
    """
    from sgl_skipkv.patches.startup.model_check import check_model

    report = check_model(path)
    if as_json:
        values = {**vars(report), "measures_queries": report.measures_queries}
        if not report.reasons:
            values["least_budget_tokens"] = report.least_budget_tokens
        print_json(values)
        return int(bool(report.reasons))
    cached = "latent" if report.attention == "MLA" else "KV heads"
    heads = f"{report.query_heads} query heads, {report.kv_heads} {cached} of {report.head_dim}"
    tested = "[green]yes[/]: docs/models.md" if report.tested else "[yellow]no[/]"
    table = Table(title=escape(str(path)), title_justify="left", show_header=False)
    table.add_row("type", f"{report.architecture} ({report.model_type})")
    table.add_row("attention", f"{report.attention}: {report.layers} layers, {heads}")
    if report.state_layers:
        kept = "no kv_reuse; a retracted request is recomputed"
        table.add_row("state instead of KV", f"{report.state_layers} layers, untouched: {kept}")
    table.add_row("tested against the masking oracle", tested)
    for reason in report.reasons:
        table.add_row("eviction", f"[red]no[/]: {escape(reason)}")
    if not report.reasons:
        table.add_row("eviction", "[green]yes[/], as far as the file tells")
        least = f"{report.least_budget_tokens} tokens"
        if report.window_tokens:
            least += f": each compaction keeps the window of {report.window_tokens}"
        table.add_row("least kv_budget", least)
        queries = "[green]yes[/]" if report.measures_queries else "[red]no[/]: 400"
        turned = f"{report.attention}, rope {report.rotation}"
        table.add_row("policies triattention, expected", f"{queries} ({turned})")
        steering = "[green]yes[/]" if report.steered else "[red]no[/]: not tested on such layers"
        table.add_row("steering", steering)
    console.print(table)
    if report.reasons:
        console.print("[bold red]eviction cannot work[/] with this model.")
        return 1
    console.print("A server checks its pool, its layers and their attention when it starts.")
    return 0
