"""What the compiler makes of every kernel: registers, spilled bytes and shared memory per variant.

    python -m bench.kernels.compile            # a table
    python -m bench.kernels.compile --record   # the same, added to bench/rows/compile.csv

Needs no GPU: Triton's own ptxas assembles for any architecture, and its cuobjdump says what the
machine code uses. A spill is local memory or a stack frame; a kernel that fits has neither.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.kernels.compile_case import CompileCase
from bench.kernels.compile_cases import CASES
from bench.lib.record import append_row
from sgl_skipkv.cli.progress import track

ARCHITECTURES = (80, 90, 100)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


def all_cases(names: Sequence[str] = ()) -> Iterator[tuple[str, CompileCase]]:
    """Kernel module and variant, of every module or of the named ones."""
    for kernel in names or CASES:
        for case in CASES[kernel]():
            yield kernel, case


def compiled(case: CompileCase, architecture: int) -> Any:
    """Triton's compiled kernel, from its cache where nothing changed."""
    arguments = case.function.arg_names
    types = {name: case.signature.get(name, "constexpr") for name in arguments}
    aligned = [
        i for i, name in enumerate(arguments) if types[name].startswith("*") or name in case.aligned
    ]
    source = ASTSource(
        case.function,
        types,
        dict(case.constexprs),
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    if architecture in case.max_registers:
        options["maxnreg"] = case.max_registers[architecture]
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def resources(kernel: str, case: CompileCase, architecture: int) -> dict[str, Any]:
    """What one variant uses on one architecture.

    Raises:
        ValueError: the variant names arguments that the kernel does not have, or leaves some out.
    """
    named, arguments = {*case.signature, *case.constexprs}, set(case.function.arg_names)
    if named != arguments or set(case.aligned) - named:
        raise ValueError(f"{kernel} {case.name}: expected arguments {arguments}, got {named}")
    made = compiled(case, architecture)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ((registers, stack, local),) = _USAGE.findall(text)
    return {
        "kernel": kernel,
        "case": case.name,
        "function": case.function.__name__,
        "architecture": f"sm_{architecture}",
        "registers": int(registers),
        "spilled_bytes": max(int(stack), int(local)),
        "shared_bytes": made.metadata.shared,
        "warps": case.num_warps,
        "stages": case.num_stages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kernels", nargs="*", choices=CASES, default=list(CASES), metavar="MODULE"
    )
    parser.add_argument("--architectures", nargs="*", type=int, default=ARCHITECTURES)
    parser.add_argument("--record", action="store_true", help="add the rows to compile.csv")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    arguments = parser.parse_args()
    for kernel, case in track([*all_cases(arguments.kernels)], "kernels"):
        for architecture in arguments.architectures:
            row = resources(kernel, case, architecture)
            if arguments.record:
                append_row("compile", {**row, "triton": triton.__version__})
            print(json.dumps(row) if arguments.json else "  ".join(map(str, row.values())))


if __name__ == "__main__":
    main()
