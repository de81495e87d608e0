"""The ``skipkv`` command: doctor, top, trace, view, tune, report, steering."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from rich.console import Console

from sgl_skipkv.cli.doctor import CHOICES, add_doctor, version_of
from sgl_skipkv.cli.report import add_report
from sgl_skipkv.cli.steering import add_steering
from sgl_skipkv.cli.top import add_top
from sgl_skipkv.cli.trace import add_trace
from sgl_skipkv.cli.tune.arguments import add_tune
from sgl_skipkv.cli.view import add_view
from sgl_skipkv.config import SettingError

# What this package takes from SGLang's environment and does not install by itself.
_OF_SGLANG = ("sglang", "torch", "transformers", "triton", "safetensors")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="skipkv", description="A KV budget for SGLang requests.")
    version = f"%(prog)s {version_of('sgl-skipkv')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)
    tables = argparse.ArgumentParser(add_help=False)
    tables.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_doctor(commands, tables)
    add_trace(commands)
    add_top(commands, tables)
    add_view(commands)
    add_tune(commands)
    add_report(commands, tables)
    add_steering(commands, tables)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments, Console(soft_wrap=False)) or 0
    except SettingError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads the output has gone, such as ``head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OF_SGLANG:
            raise
        expected = f"the package {package}, which comes with SGLang"
        got = "an environment without it"
        if error.name != package and find_spec(package) is not None:  # another version of it
            expected, got = error.name or package, f"{package} {version_of(package)} without it"
        parser.error(str(SettingError(arguments.command, expected, got, CHOICES)))
