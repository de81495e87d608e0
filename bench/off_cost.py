"""What the plugin costs a server that nobody asked to evict: throughput with it over without it.

    python bench/off_cost.py --model-path examples/reasoner

Two servers of the same configuration run side by side, one with the plugin and one where SGLang
never loads it; the same load goes to the one and the other in turn, so both see the same machine.
The row holds the median of the paired ratios and its 95% bootstrap interval.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from pairs import load, measure, parser_of

from sgl_skipkv.server_process import ServerProcess


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    flags = ["--max-total-tokens", "16384"]
    model = Path(arguments.model_path).resolve()
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(model, Path(folder) / "with", flags) as ours,
        ServerProcess(model, Path(folder) / "without", flags, {"SGLANG_PLUGINS": "none"}) as plain,
    ):
        servers = {"with": ours.wait_ready(), "without": plain.wait_ready()}
        ways = {way: load(server, arguments) for way, server in servers.items()}
        metric = "throughput with the plugin loaded and no budget over without the plugin"
        print(measure("off_cost", metric, ways, arguments))


if __name__ == "__main__":
    main()
