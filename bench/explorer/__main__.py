"""What the explorer's page takes in a browser, at a length that a reasoning model writes.

python -m bench.explorer             # headless Chromium (apt install chromium; make explorer)
python -m bench.explorer --record    # and write the rows
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench.explorer.browser import Watched, browser, why_not
from bench.explorer.synthetic import write_trace
from bench.lib.record import append_row
from sgl_skipkv.cli.progress import track
from sgl_skipkv.cli.view import write_page
from sgl_skipkv.explorer.page import page_of
from sgl_skipkv.explorer.text import pieces

MODEL = Path(__file__).resolve().parents[2] / "examples" / "reasoner"
STEPS = 40

#: resolves with the ms from the start of the navigation to the first frame with the request's text
_DRAWN = """() => new Promise((resolve) => {
  const wait = () => document.querySelector(".panel .sentence")
    ? requestAnimationFrame(() => requestAnimationFrame(() => resolve(performance.now())))
    : requestAnimationFrame(wait);
  wait();
})"""
_PAINTED = """() => new Promise((resolve) => {
  const told = (list) => list.getEntriesByName("first-contentful-paint")
    .forEach((entry) => resolve(entry.startTime));
  new PerformanceObserver(told).observe({ type: "paint", buffered: true });
})"""
#: the ms of a step, from the slider's event to the frame that shows it
_STEP = """async (to) => {
  const slider = document.querySelector("#slider");
  await new Promise((resolve) => requestAnimationFrame(resolve));
  const start = performance.now();
  slider.value = to;
  slider.dispatchEvent(new Event("input"));
  await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  return performance.now() - start;
}"""


def measured(running: Any, page: Path, numbers: str) -> dict[str, float]:
    watched = Watched(running, f"{page.as_uri()}#{numbers}")
    drawn = watched.page.evaluate(_DRAWN)
    painted = watched.page.evaluate(_PAINTED)
    times, cpu_times = stepped(watched)
    assert not watched.faults and not watched.requests, (watched.faults, watched.requests)
    watched.close()
    return {
        "first_paint_ms": round(painted),
        "text_painted_ms": round(drawn),
        "step_ms_p50": round(median(times), 1),
        "step_ms_max": round(max(times), 1),
        "step_cpu_ms_p50": round(median(cpu_times), 1),
        "step_cpu_ms_max": round(max(cpu_times), 1),
        "machine_load": round(os.getloadavg()[0], 1),
    }


def stepped(watched: Watched) -> tuple[list[float], list[float]]:
    """The ms of each step until its frame, and of those the ms that the main thread computed,
    in which other programs on the machine have no part. Steps go from end to end and between."""
    page, last = watched.page, int(watched.page.get_attribute("#slider", "max"))
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def computed_ms() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return 1000 * next(one["value"] for one in metrics if one["name"] == "TaskDuration")

    times, cpu_times = [], []
    for i in range(STEPS):
        before = computed_ms()
        to = (0, last)[i // 2 % 2] if i % 2 else i * last // STEPS
        times.append(page.evaluate(_STEP, to))
        cpu_times.append(computed_ms() - before)
    return times, cpu_times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--record", action="store_true", help="append to bench/rows/explorer.csv")
    arguments = parser.parse_args()
    if (why := why_not()) is not None:
        parser.error(why)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows, empty_bytes = [], len(page_of({"requests": []}).encode())
    with tempfile.TemporaryDirectory() as folder, browser() as running:
        for tokens in track(arguments.tokens, "pages"):
            trace, page = Path(folder) / f"{tokens}.jsonl", Path(folder) / f"{tokens}.html"
            write_trace(trace, tokenizer, tokens, kv_budget=min(1024, tokens // 4))
            write_page(trace, page, partial(pieces, tokenizer))
            for numbers in ("1", "1,2,3"):
                rows.append(
                    {
                        "tokens": tokens,
                        "side_by_side": len(numbers.split(",")),
                        "page_bytes": empty_bytes,
                        "data_bytes": page.stat().st_size - empty_bytes,
                        **measured(running, page, numbers),
                        "chromium": running.version,
                    }
                )
    table = Table(*rows[0], title="the explorer's page", title_justify="left")
    for row in rows:
        table.add_row(*map(str, row.values()))
        if arguments.record:
            append_row("explorer", row)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
