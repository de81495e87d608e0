"""Hooks into the startup of a server: flags, readiness and the gate for requests."""

from __future__ import annotations

from sgl_skipkv.patches.hook import Hook, after, around

STARTUP_HOOKS: tuple[Hook, ...] = (
    after(
        "server_args.ServerArgs.add_cli_args(parser)",
        "startup.flags:add_flags",
        "flags on launch_server",
    ),
    after(
        "server_args.ServerArgs.from_cli_args(cls, args)",
        "startup.flags:read_flags",
        "settings reach every process with ServerArgs",
    ),
    after(
        "managers.scheduler.Scheduler.__init__(self, server_args, port_args)",
        "startup.bind:bind",
        "decide the state from the resolved runtime",
    ),
    after(
        "managers.scheduler.Scheduler.get_init_info(self)",
        "startup.bind:report",
        "the main process learns the state",
    ),
    after(
        "managers.data_parallel_controller.DataParallelController.get_init_info(self)",
        "startup.replicas:report_all",
        "with --dp-size the schedulers' states end here",
        "0.5.23",
    ),
    after(
        "entrypoints.engine.Engine._set_startup_time(tokenizer_manager, scheduler_init_result, "
        "startup_tic)",
        "startup.open_gate:open_gate",
        "refuse to start, or accept requests with our keys",
    ),
    after(
        "managers.tokenizer_manager.TokenizerManager.set_startup_time(self, startup_time)",
        "startup.open_gate:open_worker",
        "the workers of --tokenizer-worker-num accept requests with our keys",
    ),
)
"""Also installed where eviction is not supported."""

MEMORY_HOOKS: tuple[Hook, ...] = (
    around(
        "managers.scheduler.Scheduler.init_memory_pools(self)",
        "startup.bind:reserve",
        "allocate buffers before the pool is sized, hook the model before graphs are captured",
    ),
)
"""Installed together with the hooks into the engine."""
