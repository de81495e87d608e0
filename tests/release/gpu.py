"""Every check and measurement that needs a GPU, one after the other: make gpu

    python tests/release/gpu.py                                     all of it, about half an hour
    python tests/release/gpu.py --only kernels off --out FOLDER     some steps; --list names them

In an order that counts: a time means nothing if an earlier step fails. A step that fails or runs
past its limit does not keep the next one from running. FOLDER gets a log of each step and the rows,
and all of it once more as ``gpu.tar.gz``. What the rows mean: docs/performance.md, "Measured on a
GPU".
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Command = tuple[str, ...]
#: stands for a folder that a server loads as a 7B model without its weights
MODEL = "MODEL"

PYTEST = ("-P", "-m", "pytest", "-q", "--continue-on-collection-errors", "-k", "cuda or GPU")
REPEATED = "tests/kernels/test_repeated_launches.py"
KERNEL_TESTS = (
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/kernels/test_kernel_*.py")),
    *(f"tests/kernels/test_{name}.py" for name in ("paged_keys", "captured_step", "backends")),
    *("tests/unit/test_no_host_sync.py", "tests/unit/test_host_memory.py", REPEATED),
)


def sanitizer(tool: str) -> Command:
    checked = ("compute-sanitizer", "--error-exitcode", "1", "--tool", tool)
    return (*checked, "python", *PYTEST, REPEATED)


def decode(*more: str) -> Command:
    shape = ("--lengths", "16384", "--kv-budgets", "1024", "--policy", "distinct")
    return ("python", "-m", "bench.decode", *shape, *more)


def server_flags(graphs: str, *more: str) -> Command:
    """Of a server of 7B shapes, with CUDA graphs of decode steps of these batch sizes."""
    config = f'{{"decode":{{"bs":[{graphs}]}},"prefill":{{"backend":"disabled"}}}}'
    backends = ("attention-backend=flashinfer", "sampling-backend=pytorch")
    graph_flag = f"cuda-graph-config={config}"
    return (
        *("--server-flags", "load-format=dummy", *backends, "watchdog-timeout=1200"),
        *(*more, graph_flag),
    )


def serving(only: str, *more: str) -> Command:
    load = ("--prompt-tokens", "128")
    return ("python", "-m", "bench.serving", "--only", only, "--model-path", MODEL, *load, *more)


def steady(way: str, warm_up_s: int, seconds: int) -> Command:
    """Full memory, as much as 80 GB leave, and requests of 16K tokens at every age."""
    graphs = "1,8,16,32,48,64,80,96,112,128,160,192,256,384,448,480,512,544,576,640,768,896"
    pool = ("max-total-tokens=620000", "max-running-requests=896", "decode-log-interval=20")
    return serving(
        *("steady", "--kv-budgets", "1024", "--tokens", "16384", "--tracked-requests", "896"),
        *("--ways", way, "--warm-up-s", str(warm_up_s), "--seconds", str(seconds)),
        *server_flags(graphs, *pool),
    )


DRAFT_TESTS = ("tests/server/test_drafts_gpu.py", "tests/server/test_oracle_gpu.py")

#: name -> seconds after which it is ended, and the command
STEPS: dict[str, tuple[int, Command]] = {
    "kernel-tests": (300, ("python", *PYTEST, *KERNEL_TESTS)),
    "memcheck": (120, sanitizer("memcheck")),
    "racecheck": (120, sanitizer("racecheck")),
    "synccheck": (120, sanitizer("synccheck")),
    "oracle": (500, ("python", *PYTEST, "tests/server/test_oracle_gpu.py", "-k", "plain")),
    "drafts": (900, ("python", *PYTEST, *DRAFT_TESTS, "-k", "drafts")),
    "kernels": (
        150,
        ("python", "-m", "bench.kernels", "--shapes", "large", "--without-reference"),
    ),
    "decode": (250, decode()),
    "compactions": (200, decode("--batch", "64", "--measurements", "2")),
    "off": (
        500,
        (
            *("python", "-m", "bench.serving.off_cost", "--model-path", MODEL),
            *server_flags("1,2,4,8,16"),
        ),
    ),
    "ample": (
        500,
        serving(
            *("ample", "--kv-budgets", "256", "--pool-tokens", "90000", "--calls", "64"),
            *("--tokens", "512", "--rounds", "4", *server_flags("8,16,32,48,64")),
        ),
    ),
    "steady-full": (300, steady("full", 30, 10)),
    "steady-budget": (400, steady("budgets", 46, 12)),
}


def run(name: str, out: Path) -> bool:
    """Run a step; whether it ended with 0 within its limit."""
    limit_s, command = STEPS[name]
    stands_for = {"python": sys.executable, MODEL: str(out / "model")}
    environment = {**os.environ, "BENCH_ROWS": str(out / "rows")}
    if command[0] == "compute-sanitizer":
        environment |= {"REPEATS": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.monotonic()
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [stands_for.get(part, part) for part in command],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            result = f"exit status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            result = f"ended after its limit of {limit_s} s"
            process.send_signal(signal.SIGINT)  # so that it stops its servers
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    print(f"{name:14}{time.monotonic() - start:5.0f} s  {result}", flush=True)
    return result == "exit status 0"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=list(STEPS), choices=STEPS, metavar="STEP")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-run")
    parser.add_argument("--list", action="store_true", help="the steps; run nothing")
    arguments = parser.parse_args()
    if arguments.list:
        for name in arguments.only:
            print(f"{name:14}{shlex.join(STEPS[name][1])}")
        return 0
    out = arguments.out.resolve()
    (out / "rows").mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        shapes = [sys.executable, "-m", "bench.serving.shapes", str(out / "model")]
        subprocess.run(shapes, cwd=ROOT, check=True)
    passed = [run(name, out) for name in arguments.only]
    with tarfile.open(out / "gpu.tar.gz", "w:gz") as packed:
        for path in (out / "rows", *sorted(out.glob("*.log"))):
            packed.add(path, path.name)
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
