"""Tables of accuracy: the comparison of policies, its ablations, and what explains them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from bench.lib.policies import compared
from bench.lib.record import recorded
from bench.lib.table_text import Row, budget, parameters, table

LEVELS = ("easy", "medium", "hard")
#: of the sampled levels: ours, and the best published ones
SAMPLED = ("distinct", "skipkv", "skipkv+", "rkv", "streaming")


def demo() -> str:
    rows = recorded("demo")
    header = ["`kv_budget`", "right", "output tokens", "peak KV tokens of a request", "compactions"]
    header += ["evicted sentences", "peak running requests", "tokens/s"]
    lines = [
        [
            budget(row),
            f"{row['right']} of {row['problems']}",
            f"{int(row['output_tokens']):,}",
            f"{int(row['peak_kv_tokens']):,}",
            row["compactions"],
            row["evicted_sentences"],
            row["peak_running"],
            row["tokens_per_s"],
        ]
        for row in rows
    ]
    return table(header, lines, rows, "demo")


def accuracy(row: Row) -> str:
    """Accuracy in percent, with its interval."""
    return f"{100 * float(row['accuracy']):.1f} [{accuracy_ends(row)}]"


def accuracy_ends(row: Row) -> str:
    """The ends of that interval."""
    return ", ".join(f"{100 * float(row[f'wilson_{side}']):.0f}" for side in ("low", "high"))


def share_of_trace(row: Row, full: Row) -> int:
    """Budget in percent of the mean trace of FullKV."""
    return round(100 * int(row["kv_budget"]) / float(full["output_tokens"]))


def comparison(
    levels: tuple[str, ...], sampling: str = "greedy", policies: Collection[str] | None = None
) -> str:
    """Level and policy down, budgets across, of these policies or of all."""
    rows = [
        row
        for row in recorded("accuracy")
        if row["level"] in levels and row["sampling"] == sampling and row["model"] == "reasoner"
    ]
    most = max(int(row["problems"]) for row in rows)
    rows = [row for row in rows if int(row["problems"]) == most]
    lines, shares = [], (8, 15, 25, 35, 50)
    for level in levels:
        here = [row for row in rows if row["level"] == level]
        full = next(row for row in here if row["policy"] == "full")
        lines.append([level, f"FullKV ({float(full['output_tokens']):,.0f} tokens)"])
        lines[-1] += [accuracy(full), *[""] * (len(shares) - 1)]
        for policy in compared() if policies is None else policies:
            cells = {
                share_of_trace(row, full): accuracy(row) for row in here if row["policy"] == policy
            }
            if cells:
                lines.append([level, f"`{policy}`", *(cells.get(share, "-") for share in shares)])
    header = ["level", "policy", *(f"budget {share}%" for share in shares)]
    return table(header, lines, rows, "accuracy")


def unseen() -> str:
    """Answers of the default at a quarter of the trace: problems of the tables, and of none."""
    fresh = recorded("unseen_answers")
    known = [row for row in recorded("accuracy") if row["model"] == "reasoner"]
    known = [row for row in known if (row["sampling"], row["problems"]) == ("greedy", "200")]
    header = ["level", "FullKV, problems of the tables", "others"]
    header += ["`distinct`, problems of the tables", "others"]
    lines = []
    for level in LEVELS:
        lines.append([level])
        for policy, share in (("full", None), ("distinct", 25)):
            for rows in (known, fresh):
                here = [row for row in rows if row["level"] == level]
                full = next(row for row in here if row["policy"] == "full")
                (row,) = (
                    row
                    for row in here
                    if row["policy"] == policy
                    and (share is None or share_of_trace(row, full) == share)
                )
                lines[-1].append(f"{row['right']} of {row['answers']} [{accuracy_ends(row)}]")
    return table(header, lines, fresh, "unseen_answers")


def ablation(label: Callable[[Row], str | None], first: str) -> str:
    """The rows that ``label`` names, as settings down and budgets across."""
    named = [(label(row), row) for row in recorded("ablations")]
    full = next(row for _, row in named if row["policy"] == "full")
    chosen = [(name, row) for name, row in named if name is not None]
    shares = sorted({share_of_cache(row, full) for _, row in chosen})
    lines = []
    for name in dict.fromkeys(name for name, _ in chosen):
        cells = {share_of_cache(row, full): accuracy(row) for other, row in chosen if other == name}
        lines.append([name, *(cells.get(share, "-") for share in shares)])
    header = [first, *(f"budget {share}%" for share in shares)]
    lines.append(["FullKV", accuracy(full), *[""] * (len(shares) - 1)])
    return table(header, lines, [row for _, row in chosen], "ablations")


def share_of_cache(row: Row, full: Row) -> int:
    """Budget in percent of the mean trace, without a prompt that it counts."""
    counted = float(full["prompt_tokens"]) if parameters(row).get("count_prompt") else 0.0
    return round(100 * (int(row["kv_budget"]) - counted) / float(full["output_tokens"]))


def components() -> str:
    names = {
        ("random", ()): "nothing (`random`)",
        ("rkv", ()): "tokens only (`rkv`)",
        ("skipkv", ()): "+ sentences (`skipkv`)",
        ("skipkv+", (("ending", 0),)): "+ recent tokens (`skipkv+`, `ending` 0)",
        ("skipkv+", (("recent", 0),)): "+ endings, no recent tokens (`skipkv+`, `recent` 0)",
        ("skipkv+", ()): "+ both (`skipkv+`)",
        ("skipkv+", (("sigma", 0), ("tau", 1), ("threshold", 1))): (
            "both without any score (`skipkv+`, `tau` 1, `sigma` 0, `threshold` 1)"
        ),
    }

    def label(row: Row) -> str | None:
        params = parameters(row)
        if params.pop("interval", None) != 32:
            return None
        if params.get("tau") == 0.85:
            del params["tau"]
        return names.get((row["policy"], tuple(params.items())))

    return ablation(label, "what decides")


def prompt() -> str:
    def label(row: Row) -> str | None:
        params = parameters(row)
        base = params.pop("interval", None) == 32 and params.pop("tau", 0.85) == 0.85
        free = params.pop("count_prompt", False) and not params.pop("protect_prompt", True)
        loose = row["kv_budget"] and (free or (not params and int(row["kv_budget"]) > 300))
        if not base or params or not loose:
            return None
        return f"`{row['policy']}`, " + ("evictable and counted" if free else "pinned")

    return ablation(label, "prompt")


def thresholds() -> str:
    def label(row: Row) -> str | None:
        params = parameters(row)
        plain = row["policy"] == "skipkv" and params.pop("interval", None) == 32
        tau, sigma = params.pop("tau", 0.95), params.pop("sigma", 0.1)
        loose = row["kv_budget"] and int(row["kv_budget"]) > 300
        return f"`tau` {tau}, `sigma` {sigma}" if plain and loose and not params else None

    return ablation(label, "`skipkv`")


def interval() -> str:
    def label(row: Row) -> str | None:
        params = parameters(row)
        tokens, tau = params.pop("interval", None), params.pop("tau", None)
        loose = row["kv_budget"] and int(row["kv_budget"]) > 300
        if params or tau != 0.85 or not loose or not row["policy"].startswith("skipkv"):
            return None
        return f"`{row['policy']}`, `interval` {tokens}"

    return ablation(label, "policy")


def batch_size() -> str:
    rows = recorded("batch_size")
    header = ["policy", "batch", "right", "compactions", "same kept sets as alone", "same outputs"]
    lines = [
        [
            f"`{row['policy']}`",
            row["batch"],
            accuracy(row),
            row["compactions"],
            f"{row['same_kept_sets_as_alone']} of {row['problems']}",
            f"{row['same_outputs_as_alone']} of {row['problems']}",
        ]
        for row in rows
    ]
    return table(header, lines, rows, "batch_size")


def layers() -> str:
    rows = recorded("layers")
    header = ["layer", "shared set that it would have chosen", "attention lost: one set for all"]
    header += ["its own set", "a set per head"]
    names = ("overlap", "lost_shared", "lost_per_layer", "lost_per_head")
    lines = [[row["layer"], *(f"{100 * float(row[name]):.1f}%" for name in names)] for row in rows]
    return table(header, lines, rows, "layers")


def needed_tokens() -> str:
    rows = recorded("needed_tokens")
    header = ["kept of old sentences", "tokens before the delimiter", "and the delimiter"]
    header += ["recent tokens", "old tokens kept, per trace", "wrong next tokens, per trace"]
    names = ("sentences", "tokens_before_delimiter", "with_delimiter", "recent_tokens")
    lines = [[row[name] for name in (*names, "old_tokens", "wrong_tokens")] for row in rows]
    return table(header, lines, rows, "needed_tokens")


def peer() -> str:
    rows = recorded("peer")
    header = ["package", "policy", "`kv_budget`", "requests at once", "right", "output tokens"]
    header += ["tokens/s"]
    lines = [
        [
            row["package"],
            f"`{row['policy']}`",
            budget(row),
            row["requests_at_once"],
            accuracy(row),
            row["output_tokens"],
            row["tokens_per_s"],
        ]
        for row in rows
    ]
    return table(header, lines, rows, "peer")


def parity() -> str:
    rows = recorded("parity")
    header = ["policy", "kvpress", "traces", "largest difference", "same kept sets"]
    lines = [
        [
            f"`{row['policy']}`",
            f"`{row['press']}`",
            row["traces"],
            row["largest_difference"],
            f"{row['same_kept_sets']} of {row['traces']}",
        ]
        for row in rows
    ]
    return table(header, lines, rows, "parity")


def similarity() -> str:
    rows = recorded("similarity")
    header = ["pair of sentences", "pairs", "cosine, 1st percentile", "median", "99th"]
    lines = [
        [row["pair"], row["pairs"], row["cosine_p1"], row["cosine_p50"], row["cosine_p99"]]
        for row in rows
    ]
    return table(header, lines, rows, "similarity")
