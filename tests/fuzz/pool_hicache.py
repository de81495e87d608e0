"""HiCache of a ``World``: SGLang's second level of the tree, in a host memory of its own.

What it loads arrives at the latest that can be: when the forward pass begins that reads it, or when
somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def add_second_level(world: Any, params: Any, ratio: float, write_policy: str) -> None:
    """Give the world's tree a host memory.

    Args:
        ratio: of its tokens to those of the pool.
    """
    from sglang.srt.runtime_context import get_context

    from sgl_skipkv.cpu.platform import serve_hicache

    serve_hicache()
    get_context().override(
        "test.hicache",
        hicache_ratio=ratio,
        hicache_size=0,
        hicache_io_backend="direct",
        hicache_mem_layout="layer_first",
        hicache_write_policy=write_policy,
    )
    world.tree_cache.init_hicache(None, params)
    controller = world.tree_cache.cache_controller
    controller.load_fence_stream = controller.write_fence_stream = world.forward_stream
    engine = controller.l2_transfer_engine
    engine.device_to_host_stream = engine.host_to_device_stream = CopyStream()
    world.loads = Loads(engine.submit_host_to_device, world)
    engine.submit_host_to_device = world.loads.submit
    for event in controller.layer_done_counter.events:
        event.load_events[-1] = world.loads


class CopyStream:
    """A stream of HiCache. What it copies to host memory it copies at once."""

    def wait_stream(self, other: Any) -> None:
        other.run()

    def synchronize(self) -> None:
        pass


class Load:
    """A load to the device, and the event behind it.

    Args:
        copy: does it.
    """

    def __init__(self, copy: Callable[[], Any]) -> None:
        self._copy: Callable[[], Any] | None = copy

    def run(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()

    def query(self) -> bool:
        return self._copy is None

    def synchronize(self) -> None:
        self.run()


class Loads:
    """All loads, one after the other; also the event that SGLang has for the last layer of one.

    Attributes:
        last: the newest one.
    """

    def __init__(self, submit: Callable[..., Any], world: Any) -> None:
        self._submit, self._world = submit, world
        self.last = Load(lambda: None)

    def submit(self, transfers: list[Any], **how: Any) -> Any:
        """Instead of ``L2TransferEngine.submit_host_to_device``."""
        from sglang.srt.mem_cache.l2_transfer import TransferCompletion

        def copy() -> None:
            self._submit(transfers, **how)
            for transfer in transfers:
                self._world.book_loaded(transfer.device_indices.tolist())

        self.last.run()
        self.last = Load(copy)
        if not self._world.forward_stream.late:
            self.last.run()
        return TransferCompletion(None, self.last, False)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        self.last.run()
