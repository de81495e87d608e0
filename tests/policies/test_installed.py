"""Policies of other packages: what is found, and how what cannot be used is refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packages import OWN_POLICY, install, install_example
from rank_world import on_ranks
from refusals import assert_refused
from synthetic import BUDGET, DELIMITER, INTERVAL, PROMPT, SyntheticServer, served

from sgl_skipkv import policy
from sgl_skipkv.cli.main import main
from sgl_skipkv.config import ServerConfig
from sgl_skipkv.patches.startup import parallel
from sgl_skipkv.policy import installed
from sgl_skipkv.ranks import Ranks
from sgl_skipkv.request.settings import check_server_defaults, resolve_request

ROOT = OWN_POLICY.parents[1]
MODULES = ("broken", "first", "second", "package", "openings")
NAMED = (
    "from sgl_skipkv.policy import Policy, PolicyParams\n\nclass Own(Policy):\n    name = 'own'\n"
)
HEAD = NAMED + "    def scores(self, inputs): return inputs.positions.float()\n"
PARAMS = "class P(PolicyParams):\n    {}\n\nclass Own(Own):\n    Params = P\n"


def forget() -> None:
    """What this process has read and imported of other packages."""
    installed.entries.cache_clear()
    installed.load.cache_clear()
    for module in MODULES:
        sys.modules.pop(module, None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that Python imports from."""
    place = tmp_path / "packages"
    place.mkdir()
    monkeypatch.syspath_prepend(str(place))
    forget()
    yield place
    forget()


def test_without_other_packages_there_are_the_built_in_ones() -> None:
    assert policy.names() == policy.built_in() and not installed.entries()


def test_the_example_keeps_the_openings_of_sentences(folder: Path, tmp_path: Path) -> None:
    """Of each closed sentence the first two tokens stay, then the newest up to the budget."""
    install_example(folder, tmp_path)
    assert policy.names() == (*policy.built_in(), "openings")
    server = SyntheticServer()
    parameters = {"opening": 2, "window": 1, "sink": 0}
    call = served(server, kv_policy="openings", kv_params=parameters)
    (before, *_) = server.compacting(call, 60)
    closed = [p for p in before if p >= PROMPT and call.tokens[p - PROMPT] == DELIMITER]
    starts = [PROMPT, *(stop + 1 for stop in closed[:-1])]
    openings = {start + i for start in starts for i in range(2)}
    newest = [p for p in before if p >= PROMPT and p not in openings]
    newest = newest[len(openings) - BUDGET :]
    assert len(openings) >= 16 and len(before) == PROMPT + BUDGET + INTERVAL
    assert call.compactions[0] == [*range(PROMPT), *sorted(openings.union(newest))]


def test_its_parameters_are_checked_as_ours(folder: Path, tmp_path: Path) -> None:
    install_example(folder, tmp_path)
    with assert_refused("kv_params.opening", "[1, 64]"):
        policy.make_policy("openings", opening=0)
    with assert_refused("kv_params.openning", "opening"):
        policy.make_policy("openings", openning=1)
    quotas = policy.make_policy("openings", quotas=True)
    assert quotas.params.quotas and quotas.name == "openings"
    check_server_defaults(ServerConfig(kv_policy="openings", kv_params={"opening": 8}), 0)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_module", "fails to import, ModuleNotFoundError; see the log"),
        ("raise SystemError('x')", "fails to import, SystemError; see the log"),
        ("", "fails to import, AttributeError; see the log"),
        ("Own = 3", "is no subclass of sgl_skipkv.policy.Policy"),
        ("class Own: name = 'own'", "is no subclass of sgl_skipkv.policy.Policy"),
        (HEAD.replace("'own'", "'other'"), "has another name: 'other'"),
        (HEAD.replace("name", "other"), "has another name: None"),
        (f"{HEAD}    Params = dict", "has Params that are no subclass of sgl_skipkv.policy.P"),
        (f"{HEAD}    over_ranks = 'sum'", "has over_ranks 'sum', not one of mean, max, None"),
        (f"{HEAD}    attention_over = 'all'", "has attention_over 'all', not one of mean, group"),
        (f"{HEAD}    need_queries = True", "has need_queries; perhaps needs_queries is meant"),
        (f"{HEAD}    def budget_after(self, *a): return 9", "overrides budget_after, which the s"),
        (f"{HEAD}    needs_track = False", "overrides needs_track, which the scheduler reads"),
        (f"{HEAD}    needs_query = True", "has needs_query; perhaps needs_queries is meant"),
        (f"{HEAD}    keeps = 5", "has keeps 5, not a text"),
        (NAMED, "has neither scores nor scores_together"),
        (
            HEAD.replace("import Policy", "import JointPolicy as Policy"),
            "has no scores_together, as a JointPolicy needs",
        ),
        (f"{HEAD}    def __init__(self): pass", "cannot be made without parameters, TypeError"),
        (HEAD + PARAMS.format("must: int"), "cannot be made without parameters, ValidationErr"),
        (HEAD + PARAMS.format("many: list[int] = [1]"), "cannot be made without parameters, Type"),
        (HEAD + PARAMS.format("interval: int = 3"), "has another type or range for interval"),
        ("raise SystemExit(3)", "fails to import, SystemExit; see the log"),
    ],
)
def test_what_is_no_policy_is_refused(
    folder: Path, source: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It affects the requests that name it, and a server that has it as a default; the import is
    tried once."""
    install(folder, "broken", {"own": "broken:Own"}, source)
    for _ in range(2):
        with assert_refused("kv_policy", f"broken:Own of package broken {why}"):
            resolve_request({"kv_policy": "own", "kv_budget": 64}, ServerConfig())
    raised = why.startswith(("fails to import", "cannot be made"))
    assert caplog.text.count("Traceback") == raised
    with assert_refused("kv_policy", "broken:Own"):
        check_server_defaults(ServerConfig(kv_policy="own"), 0)
    for name in policy.built_in():
        keys = {"kv_policy": name, "kv_budget": 64}
        assert resolve_request(keys, ServerConfig()) is not None
    with assert_refused("kv_policy", "records nothing"):  # lists policies
        resolve_request({"kv_policy": "rkv", "kv_budget": 64}, ServerConfig(max_tracked_requests=0))


def test_a_name_that_two_packages_register_is_refused(folder: Path) -> None:
    """None is chosen by the order of installation. A name of ours stays ours."""
    install(folder, "first", {"own": "first:Own", "distinct": "first:Own"}, HEAD)
    install(folder, "second", {"own": "second:Own"}, HEAD)
    assert policy.names() == (*policy.built_in(), "own")
    with assert_refused("kv_policy", "several packages register it: first and second"):
        policy.make_policy("own")
    assert type(policy.make_policy("distinct")).__module__ == "sgl_skipkv.policy.distinct"
    check_server_defaults(ServerConfig(), 0)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "    def scores_together(self, requests): raise KeyError('mine')",
            "KeyError: 'mine'",
        ),
        (
            "    def scores(self, inputs): return inputs.positions.float().to('meta')",
            r"scores of policy own: expected float32 \[\d+\] on cpu, got .* on meta",
        ),
        (
            "    needs_attention = True\n    def initial_statistics(self, positions):\n"
            "        return {'seen': positions.float()}\n"
            "    def follow(self, statistics, seen): return {'other': statistics['seen']}",
            r"statistics of policy own: expected seen of float32 \[\d+\] on cpu, got {'other'",
        ),
        (
            "    needs_attention = True\n    def initial_statistics(self, positions):\n"
            "        return {'seen': positions.float()}\n"
            "    def follow(self, statistics, seen): return {'seen': statistics['seen'][1:]}",
            r"statistics of policy own: expected seen of float32 \[\d+\] on cpu, got {'seen'",
        ),
        (
            "    needs_attention = True\n    def initial_statistics(self, positions):\n"
            "        return {'seen': positions}\n    def follow(self, statistics, seen):\n"
            "        statistics['seen'] = statistics['seen'][1:]\n        return statistics",
            r"statistics of policy own: expected seen of float32 .* got {'seen': 'torch.int64 \[",
        ),
        ("    def protected_tail(self, kv_budget): return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_goes_wrong_ends_its_request_alone(
    folder: Path, source: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(folder, "package", {"own": "package:Own"}, HEAD + source)
    server = SyntheticServer()
    call, other = (served(server, kv_policy=name, rid=name) for name in ("own", "streaming"))
    for _ in range(70):
        server.decode(*(one for one in (call, other) if one.state.failure is None))
    assert call.state.failure is not None and "error of the plugin" in call.state.failure
    assert re.search(said, caplog.text)
    assert other.state.failure is None and len(other.compactions) > 1


def test_both_kinds_of_sentences_are_the_compared_ones(folder: Path) -> None:
    """``needs_sentences`` has the similarity, with ``needs_spans`` too."""
    told = "    def scores(self, inputs):\n        SEEN.append(inputs.sentences.redundancy)\n"
    told += "        return inputs.positions.float()\n"
    needs = "    needs_queries = needs_sentences = needs_spans = True\n"
    install(folder, "package", {"own": "package:Own"}, f"SEEN = []\n{NAMED}{needs}{told}")
    server = SyntheticServer()
    server.run(served(server, kv_policy="own"), 60)
    seen = sys.modules["package"].SEEN
    assert seen and max(float(one.max()) for one in seen if len(one)) > 0


def reasons_of_rank(ranks: Ranks, folder: Path) -> list[str]:
    """What one rank of two is told, of which the last finds the packages of the folder."""
    parallel.all_ranks = lambda: SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD)
    if ranks.index == 1:
        sys.path.insert(0, str(folder))
    return parallel.reasons_of_ranks(["of rank 1"] if ranks.index else [])


def test_ranks_with_other_policies_cannot_evict(tmp_path: Path) -> None:
    """A request that one of them refuses would let the others wait."""
    forget()
    assert on_ranks(2, reasons_of_rank, tmp_path) == [["of rank 1"]] * 2
    install(tmp_path, "package", {"own": "package:Own"}, HEAD)
    odd = "own = package:Own (package 1.0)"
    reasons = ["of rank 1", f"policies that are not the same for every rank: {odd}"]
    assert on_ranks(2, reasons_of_rank, tmp_path) == [reasons] * 2


def test_doctor_lists_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_example(folder, tmp_path)
    install(folder, "broken", {"own": "broken:Own", "rkv": "broken:Own"}, "import no_such_module")
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("policies of other packages"))
    table = "\n".join(lines[at:])
    row = re.search(r"openings +│ openings-policy +│ (.*)", table)
    assert row is not None and "the first tokens of every sentence" in row[1]
    assert re.search(r"own +│ broken +│ broken:Own of package broken fails to import", table)
    assert re.search(r"rkv +│ broken +│ rkv is a policy of sgl_skipkv, which is used", table)
    assert "ready" in table  # nothing else minds


def shown() -> list[str]:
    """The blocks of code of the page on policies."""
    page = (ROOT / "docs" / "write-a-policy.md").read_text()
    return [block.partition("\n")[2] for block in page.split("```")[1::2]]


def test_the_page_shows_the_example() -> None:
    for file in ("openings.py", "pyproject.toml"):
        source = (OWN_POLICY / file).read_text()
        assert any(len(block) > 90 and block in source for block in shown()), file


def test_the_inputs_of_the_page_can_be_scored(folder: Path, tmp_path: Path) -> None:
    install_example(folder, tmp_path)
    (block,) = (block for block in shown() if "inputs = ScoreInput(" in block)
    names: dict[str, Any] = {"torch": torch}
    exec(block, names)
    scores = policy.make_policy("openings", opening=2).scores(names["inputs"])
    begins = torch.tensor([0, 0, 1, 1, 0, 1, 1, 0])
    assert torch.equal(scores, begins + torch.arange(8) / 8)
    for name in ("snapkv", "keydiff", "distinct"):
        assert policy.make_policy(name, window=4).scores(names["inputs"]).shape == (8,)


def test_the_statistics_of_the_page_are_h2os(folder: Path) -> None:
    (block,) = (block for block in shown() if "def initial_statistics" in block)
    head = "import torch\nfrom sgl_skipkv.policy import Policy, ScoreInput, Statistics, Steps\n"
    install(folder, "package", {"received": "package:Received"}, head + block)
    kept = []
    for name in ("received", "h2o"):
        server = SyntheticServer()
        call = served(
            server, kv_policy=name, kv_params={"window": 20} if name == "received" else {}
        )
        server.run(call, 60)
        kept.append(call.compactions)
    assert kept[0] == kept[1] and kept[0]


def test_parameters_that_cannot_be_hashed_are_refused(folder: Path) -> None:
    """Policies of requests are grouped by them, and histories are looked up by them."""
    own = PARAMS.format("layers: list[int] | None = None")
    install(folder, "package", {"own": "package:Own"}, HEAD + own)
    assert policy.make_policy("own").name == "own"
    with assert_refused("kv_params of own", "tuples instead of lists"):
        policy.make_policy("own", layers=[1, 2])
