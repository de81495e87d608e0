"""Several ranks as real processes that gather over gloo, each with its part of the heads."""

from __future__ import annotations

import faulthandler
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sgl_skipkv.ranks import Ranks

#: after which a rank that waits for another gives up
PATIENCE_S = 20
Work = Callable[..., Any]


def on_ranks(size: int, work: Work, *args: Any) -> list[Any]:
    """What ``work(ranks, *args)`` returns on each rank, or the exception that it raises."""
    forked = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [forked.Pipe(duplex=False) for _ in range(size)]
        rest = (size, Path(folder) / "store", work, args)
        started = [
            forked.Process(target=_run, args=(rank, pipe[1], *rest))
            for rank, pipe in enumerate(pipes)
        ]
        for process in started:
            process.start()
        for _, sent in pipes:
            sent.close()
        try:
            return [_received(pipe) for pipe, _ in pipes]
        finally:
            for process in started:
                process.kill()
                process.join()


def _received(pipe: Any) -> Any:
    if not pipe.poll(6 * PATIENCE_S):
        return TimeoutError("a rank neither ended nor failed")
    try:
        return pipe.recv()
    except EOFError as gone:
        return gone


def _run(rank: int, sent: Any, size: int, store: Path, work: Work, args: Sequence[Any]) -> None:
    faulthandler.disable()  # gloo aborts a rank that gathers too much: some tests make it
    torch.set_num_threads(1)
    shared, patience = dist.FileStore(str(store), size), timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=size, timeout=patience)
    groups = [dist.new_group(backend="gloo", timeout=patience) for _ in range(2)]
    try:
        result = work(Ranks(*groups), *args)
    except (RuntimeError, ValueError, AssertionError) as error:
        traceback.print_exc()
        result = error
    sent.send(result)
