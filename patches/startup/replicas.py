"""Data parallelism: ``--dp-size`` starts replicas, each with a pool of its own.

So has each attention group of ``--attn-dp-size``, which SGLang counts as a replica, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sgl_skipkv.config import SettingError


def report_all(result: dict[str, Any], controller: Any) -> None:
    """AFTER ``DataParallelController.get_init_info``: pass on the states of all replicas.

    A replica that reported none leaves it out of the result: the main process refuses every key.
    """
    with controller._scheduler_init_info_lock:
        reports = [info.get("skipkv") for info in controller._scheduler_init_infos]
    if reports and None not in reports:
        reasons = [reason for report in reports for reason in report["reasons"]]
        result["skipkv"] = {**reports[0], "reasons": list(dict.fromkeys(reasons))}


def trace_path(name: str) -> str:
    """The trace file of this scheduler: replica 1 of ``trace.jsonl`` writes ``trace.dp1.jsonl``.

    The replica's number is the ``dp_rank`` of SGLang's metrics, which one replica alone lacks.
    """
    from sglang.srt.runtime_context import get_parallel

    replica = get_parallel().dp_rank
    return name if replica is None else _path_of(name, replica)


def trace_paths(name: str, server_args: Any) -> dict[str, str]:
    """The trace files of a server, under the names of its replicas; one alone has the name ""."""
    # SGLang moves ``--dp-size`` to the other of the two if it comes with --enable-dp-attention.
    replicas = max(getattr(server_args, size, 1) for size in ("dp_size", "attn_dp_size"))
    if replicas == 1:
        return {"": name}
    return {f"dp{replica}": _path_of(name, replica) for replica in range(replicas)}


def _path_of(name: str, replica: int) -> str:
    path = Path(name)
    if not path.name:
        raise SettingError("trace", "the name of a file", name, "a writable path")
    return str(path.with_name(f"{path.stem}.dp{replica}{path.suffix}"))
