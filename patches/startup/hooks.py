"""Hooks into the startup of a server: flags, readiness and the gate for requests."""

from __future__ import annotations

from sgl_skipkv.patches.hook import Hook

_SCHEDULER = "managers.scheduler.Scheduler"

STARTUP_HOOKS: tuple[Hook, ...] = (
    Hook(
        "server_args.ServerArgs.add_cli_args",
        "after",
        "(parser)",
        "startup.flags:add_flags",
        "flags on launch_server",
    ),
    Hook(
        "server_args.ServerArgs.from_cli_args",
        "after",
        "(cls, args)",
        "startup.flags:read_flags",
        "settings reach every process with ServerArgs",
    ),
    Hook(
        f"{_SCHEDULER}.__init__",
        "after",
        "(self, server_args, port_args)",
        "startup.bind:bind",
        "decide the state from the resolved runtime",
    ),
    Hook(
        f"{_SCHEDULER}.get_init_info",
        "after",
        "(self)",
        "startup.bind:report",
        "the main process learns the state",
    ),
    Hook(
        "entrypoints.engine.Engine._set_startup_time",
        "after",
        "(tokenizer_manager, scheduler_init_result, startup_tic)",
        "startup.open_gate:open_gate",
        "refuse to start, or accept requests with our keys",
    ),
)
"""Also installed where eviction is not supported."""

MEMORY_HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_SCHEDULER}.init_memory_pools",
        "around",
        "(self)",
        "startup.bind:reserve",
        "allocate buffers before the pool is sized, hook the model before graphs are captured",
    ),
)
"""Installed together with the hooks into the engine."""
