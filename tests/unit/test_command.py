"""``skipkv`` itself: its version, and how it ends where nobody reads on or someone interrupts."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from requests import exceptions
from rich.console import Console
from urllib3.exceptions import NameResolutionError

import sgl_skipkv
from sgl_skipkv.cli import doctor
from sgl_skipkv.cli.main import main
from sgl_skipkv.cli.no_answer import why_no_answer

NAME = "managers.data_parallel_controller.DataParallelController.launch_dp_schedulers"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"skipkv {sgl_skipkv.__version__}\n"


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    assert main(["doctor"]) == 130


def test_a_reader_that_has_gone() -> None:
    """As ``head`` does; 64 KiB fit into a pipe that nobody reads."""
    code = (
        "import sys; from sgl_skipkv.cli import doctor, main; "
        "doctor.examine = lambda: {'state': 'ready', 'much': 'x' * 1_000_000}; "
        "sys.exit(main.main(['doctor', '--json']))"
    )
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def report(**more: Any) -> dict[str, Any]:
    hook = {"hook": NAME, "kind": "after", "state": "ok", "text": "ok", "why": "a reason " * 9}
    return {
        **{"versions": {}, "platform": None, "device": "d", "hooks": [hook]},
        **{"capabilities": [], "policies": []},
        **{"warnings": [], "problems": [], **more},
    }


@pytest.mark.parametrize(("terminal", "width"), [(True, 80), (False, 110)])
def test_doctor_cuts_no_name(*, terminal: bool, width: int) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, record=True)
    doctor.show(report(), console)
    printed = console.export_text()
    cells = [line.split("│")[1].strip() for line in printed.splitlines() if "│" in line]
    assert NAME in "".join(cells) and "…" not in printed
    assert max(map(len, printed.splitlines())) == width


def test_doctor_hides_what_sglang_warns_of(tmp_path: Path) -> None:
    """Warnings of its modules, while they are imported; not those of others."""
    code = (
        "import sys, warnings; from sgl_skipkv.cli import doctor, main\n"
        "def examine():\n"
        "    for name in ('sglang.srt.layers.awq', 'other'):\n"
        "        warnings.warn_explicit('!' + name, UserWarning, name + '.py', 1, module=name)\n"
        "    return {'state': 'ready'}\n"
        "doctor.examine = examine\n"
        "sys.exit(main.main(['doctor', '--json']))"
    )
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "!other" in done.stderr and "!sglang" not in done.stderr


WORDS = (
    (exceptions.MissingSchema("x"), "no http:// in front"),
    (exceptions.InvalidSchema("x"), "no http:// in front"),
    (exceptions.SSLError("x"), "no TLS that is trusted"),
    (exceptions.ConnectTimeout("x"), "no answer in time"),
    (exceptions.ConnectionError(), "the connection failed or was closed"),
    (exceptions.JSONDecodeError("x", "y", 0), "its answer is no JSON"),
    (exceptions.ContentDecodingError("x"), "no HTTP answer"),
)


@pytest.mark.parametrize(("error", "words"), WORDS, ids=repr)
def test_why_nothing_answered(error: exceptions.RequestException, words: str) -> None:
    assert why_no_answer(error) == words


def test_a_host_that_has_no_name() -> None:
    reason = NameResolutionError("no-such-host", None, OSError())  # type: ignore[arg-type]
    pool = Exception()
    pool.reason = reason  # type: ignore[attr-defined]
    assert why_no_answer(exceptions.ConnectionError(pool)) == "no host of that name"


@pytest.mark.slow
def test_the_quickstart_says_what_is_wrong() -> None:
    """A line that is not there, a server that is not there, and an address that is none."""
    example = Path(__file__).resolve().parents[2] / "examples" / "quickstart.py"
    code = (
        "import contextlib, runpy, sys\n"
        "for more in (['--problem', '100000'], ['--url', 'http://127.0.0.1:9'], ['--url', 'x']):\n"
        f"    sys.argv = [{str(example)!r}, *more]\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert [error.partition(": expected")[0].rpartition("--")[2] for error in errors] == [
        *("problem", "url", "url")
    ]
    assert errors[0].endswith("got 100000") and "got http://127.0.0.1:9: " in errors[1]
