"""What steering costs: throughput of steered requests over that of the same requests without
steering.

    python -m bench.steering.cost --model-path examples/wanderer

One server; the same load goes to it steered and not steered in turn, with the same number of
tokens. The row holds the median of the paired ratios and its 95% bootstrap interval.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.lib.pairs import load, measure, parser_of
from sgl_skipkv.cli.server_process import ServerProcess


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--vector", type=Path, help="default: steering.safetensors beside it")
    parser.add_argument("--steering", type=float, default=0.1)
    arguments = parser.parse_args()
    model = Path(arguments.model_path).resolve()
    vector = (arguments.vector or model / "steering.safetensors").resolve()
    flags = ["--max-total-tokens", "16384", "--steering-vector", str(vector)]
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(model, Path(folder) / "server", flags) as server,
    ):
        server.wait_ready()
        ways = {
            "steered": load(server, arguments, steering=arguments.steering),
            "plain": load(server, arguments, steering=False),
        }
        metric = "throughput of steered calls over the same calls not steered"
        print(measure("steering_cost", metric, ways, arguments))


if __name__ == "__main__":
    main()
