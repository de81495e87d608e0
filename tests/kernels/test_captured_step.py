"""What a CUDA graph would contain of us: the hooks' tensor operations, replayed on fixed memory.

A graph replays launches, not Python: the same operations on the same addresses, whatever the Python
state is by then. ``Tape`` does that on the CPU, for the plain torch of a step and for its kernels,
interpreted; where there is a GPU, a real graph does. SGLang's own attention layer, residual stream
and forward batch pass through the hooks as on a server; the recorded step is replayed with other
rows, tokens and positions in its buffers, padded rows among them, and must leave what eager steps
leave.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_ops import NUMBER_COPY, host_read
from kernels_on_cpu import as_one_each, on_triton
from test_steering import GAMMA, NEWLINES, VOCABULARY, classes
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton_tools import DEVICES
from vector_files import origin

from sgl_skipkv.recording.recorder import ModelShape, Recorder
from sgl_skipkv.recording.sentences import PRESETS, Delimiters
from sgl_skipkv.steering.steerer import Steerer
from sgl_skipkv.steering.vector import SteeringVector

CPU = torch.device("cpu")
LAYERS, HEADS, HEAD_DIM, WIDTH, WINDOW = 3, 2, 4, 5, 4
TABLE_ROWS, TRACKS, ROWS, STEPS = 6, 3, 4, 120
BUFFERS = ("input_ids", "req_pool_indices", "seq_lens", "out_cache_loc")
CHAIN = 3
#: all that a GPU's decode graph holds of us: a write per layer, behind one of them the vector, and
#: at the end the sentences
STEP = [f"_{name}_kernel" for name in ("ring_write", "ring_write", "steering_add", "ring_write",
                                       "sentence_step")]  # fmt: skip
#: of a step that verifies drafts: sentences of the step before it come first
VERIFY_STEP = ["_sentence_step_kernel"] * CHAIN + ["_ring_write_kernel"] * LAYERS


class Tape(TorchDispatchMode):
    """Record tensor operations; ``replay`` runs them again into the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Callable[[], None]] = []
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = host_read(func, args)
        assert read is None, f"{read} in a captured step"
        # A graph does not contain the Python value that a tensor was made of.
        assert func._schema.name != NUMBER_COPY, "a new tensor in a captured step"
        out = func(*args, **(kwargs or {}))

        def again() -> None:
            new = func(*args, **(kwargs or {}))
            if func._schema.is_mutable:
                return
            for was, now in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(was, Tensor) and was.data_ptr() != now.data_ptr():
                    was.copy_(now)

        self._operations.append(again)
        return out

    def launched(self, name: str, again: Callable[[], None]) -> None:
        self.kernels.append(name)
        self._operations.append(again)

    def replay(self) -> None:
        for again in self._operations:
            again()


class Graph:
    """A real CUDA graph of a step."""

    def __init__(self, step: Callable[[], None]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # kernels are compiled and loaded before a capture
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            step()

    def replay(self) -> None:
        self._graph.replay()


class Layer(nn.Module):
    """A decoder layer as far as the hooks can see: attention is asked, the residual goes on."""

    def __init__(self, number: int) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention

        super().__init__()
        self.attention = RadixAttention(HEADS, HEAD_DIM, 1.0, HEADS, number)

    def forward(self, positions: Tensor, hidden: Tensor, forward_batch: Any) -> Tensor:
        from sgl_skipkv.patches.engine.forward import record_queries

        width = HEADS * HEAD_DIM
        queries = forward_batch.residual_stream.residual.sum(dim=1, keepdim=True).expand(-1, width)
        record_queries(self.attention, queries * (1 + self.attention.layer_id), None, None,
                       forward_batch)  # fmt: skip
        return hidden


class World:
    """One server's device side: the buffers of a step, the tables, the hooked layers.

    Args:
        chain_tokens: of a step that verifies drafts, and nobody is steered; 0: it decodes.
    """

    def __init__(
        self, device: torch.device = CPU, tracks: int = TRACKS, chain_tokens: int = 0
    ) -> None:
        from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        from sgl_skipkv.patches.engine.model_side import attach
        from sgl_skipkv.patches.engine.steering import attach_steering

        self.recorder = Recorder(
            ModelShape(LAYERS, HEADS, HEAD_DIM, WIDTH),
            track_count=tracks,
            query_window=WINDOW,
            max_sentences=5,
            delimiters=Delimiters(NEWLINES, len(VOCABULARY)),
            dtype=torch.float32,
            device=device,
            chain_tokens=chain_tokens,
        )
        self.tokens = ROWS * max(chain_tokens, 1)
        vector = SteeringVector(torch.arange(WIDTH).float() + 1, origin())
        self.steerer = Steerer(vector, classes(), GAMMA, device=device)
        self.recorder.use_rows(TABLE_ROWS)
        self.steerer.use_rows(TABLE_ROWS)
        self.model = nn.Module()
        self.model.model = nn.Module()
        self.model.model.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))
        attach(self.model, self.recorder)
        if not chain_tokens:
            attach_steering(self.model.model.layers, self.steerer)
        zeros = torch.zeros(ROWS, dtype=torch.int64, device=device)
        self.batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY if chain_tokens else ForwardMode.DECODE,
            batch_size=ROWS,
            **{name: zeros.clone() for name in BUFFERS},
            seq_lens_sum=0,
        )
        self.batch.input_ids = torch.zeros(self.tokens, dtype=torch.int64, device=device)
        self.batch.positions = self.batch.input_ids.clone()
        self.hidden = torch.zeros(self.tokens, WIDTH, device=device)
        self.batch.residual_stream = ResidualStream(self.hidden.clone())

    def step(self) -> None:
        from sgl_skipkv.patches.engine.forward import record_hidden

        for layer in self.model.model.layers:
            layer(self.batch.positions, self.hidden, self.batch)
        processor = SimpleNamespace(skipkv=self.recorder)
        record_hidden(processor, self.batch.input_ids, self.hidden)

    def fill(self, rows: list[int], tokens: list[int], positions: list[int], draw: Any) -> None:
        """What the next step reads, into the fixed buffers."""
        for buffer, values in (
            (self.batch.req_pool_indices, rows),
            (self.batch.input_ids, tokens),
            (self.batch.positions, positions),
        ):
            buffer.copy_(torch.tensor(values))
        self.hidden.copy_(torch.randn(self.tokens, WIDTH, generator=draw))
        self.batch.residual_stream.residual.copy_(torch.randn(self.tokens, WIDTH, generator=draw))

    def tables(self) -> dict[str, Tensor]:
        """Everything that a later compaction or step reads; track 0 and row 0 are nobody's."""
        sentences = self.recorder.sentences
        names = ("total", "length", "index", "after_delimiter", "vectors")
        return {
            "queries": self.recorder.queries.data[:, 1:],
            **{name: getattr(sentences, name)[1:] for name in names},
            "nonexecution": self.steerer._tables["nonexecution"][1:],
            "keyword_seen": self.steerer._tables["keyword_seen"][1:],
            "thinking": self.steerer._tables["thinking"][1:],
        }


@pytest.fixture(params=["torch", "kernels", *(["cuda"] if "cuda" in DEVICES else [])])
def runs_as(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[0], ids=["decodes"])
def chain_tokens(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def captured(
    runs_as: str, chain_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[World, World, Tape | Graph]]:
    """A world whose step was captured before any request existed, as SGLang captures its graphs,
    and one that runs eager steps."""
    from sglang.srt.model_executor.runner_utils import capture_mode

    device = torch.device("cuda" if runs_as == "cuda" else "cpu")
    world, tape = World(device, chain_tokens=chain_tokens), Tape()
    world.recorder.reserve()
    with on_triton() if runs_as == "kernels" else nullcontext():
        with monkeypatch.context() as patch:
            patch.setattr(capture_mode, "is_capture_mode", True)
            if runs_as == "cuda":
                replayed: Tape | Graph = Graph(world.step)
            else:
                with as_one_each(tape.launched), tape:
                    world.step()
                replayed = tape
        assert world.recorder.current is None
        step = VERIFY_STEP if chain_tokens else STEP
        assert tape.kernels == (step if runs_as == "kernels" else [])
        yield world, World(device, chain_tokens=chain_tokens), replayed


def test_without_tracks_a_captured_step_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.runner_utils import capture_mode

    world, tape = World(tracks=0), Tape()
    monkeypatch.setattr(capture_mode, "is_capture_mode", True)
    with on_triton(), as_one_each(tape.launched), tape:
        world.step()
    assert tape.kernels == ["_steering_add_kernel"]


def test_replays_do_what_eager_steps_do(captured: tuple[World, World, Tape | Graph]) -> None:
    """Requests come and go between the steps; padded rows show row 0 of the page table."""
    (graph, eager, tape), rng = captured, random.Random(3)
    worlds = (graph, eager)
    running: dict[int, int] = {}  # row -> position; track = row
    steered = set()
    for number in range(STEPS):
        if rng.random() < 0.3 and len(running) < TRACKS:
            row = rng.choice([row for row in range(1, TRACKS + 1) if row not in running])
            running[row] = rng.randrange(50)
            for world in worlds:
                world.recorder.start(row, row, PRESETS["math"])
                if row != 2:
                    schedule = world.steerer.schedule(0.5, [])
                    schedule.thinks = True
                    world.steerer.start(row, schedule)
            steered.add(row)
        elif rng.random() < 0.1 and running:
            row, _ = running.popitem()
            for world in worlds:
                world.recorder.track_of_row[row] = 0
                world.steerer.stop(row)
        rows = [*running, *[0] * (ROWS - len(running))]
        tokens = [rng.randrange(len(VOCABULARY)) for _ in range(ROWS)]
        positions = [*running.values(), *[0] * (ROWS - len(running))]
        for world in worlds:
            draw = torch.Generator().manual_seed(number)
            world.fill(rows, tokens, positions, draw)
        tape.replay()
        eager.steerer.steered_requests = len(running)
        eager.recorder.current = eager.recorder.decode_recording(
            eager.batch.req_pool_indices, eager.batch.positions
        )
        eager.step()
        moved = [world.batch.residual_stream.residual for world in worlds]
        assert torch.equal(moved[0], moved[1]), number
        other = eager.tables()
        for name, table in graph.tables().items():
            assert torch.equal(table, other[name]), f"{name} after step {number}"
        running = {row: position + 1 for row, position in running.items()}
    assert len(steered) == TRACKS and eager.recorder.sentences.index.max() >= 5
    assert (eager.steerer._tables["nonexecution"] > 0).any()


@pytest.mark.parametrize("chain_tokens", [CHAIN], indirect=True, ids=["verifies"])
def test_replays_of_steps_that_verify_drafts(captured: tuple[World, World, Tape | Graph]) -> None:
    """How many tokens a step accepts is seen in the positions of the next one."""
    (graph, eager, tape), rng = captured, random.Random(3)
    running: dict[int, int] = {}  # row -> position of its next token; track = row
    for number in range(STEPS // 2):
        if rng.random() < 0.3 and len(running) < TRACKS:
            row = rng.choice([row for row in range(1, TRACKS + 1) if row not in running])
            running[row] = rng.randrange(50)
            for world in (graph, eager):
                world.recorder.start(row, row, PRESETS["math"])
        elif rng.random() < 0.1 and running:
            row, _ = running.popitem()
            for world in (graph, eager):
                world.recorder.track_of_row[row] = 0
        rows = [*running, *[0] * (ROWS - len(running))]
        tokens = [rng.randrange(len(VOCABULARY)) for _ in range(graph.tokens)]
        firsts = [*running.values(), *[0] * (ROWS - len(running))]
        positions = [first + i for first in firsts for i in range(CHAIN)]
        for world in (graph, eager):
            world.fill(rows, tokens, positions, torch.Generator().manual_seed(number))
        tape.replay()
        eager.recorder.records_decode = bool(running)
        eager.step()
        other, chains = eager.tables(), eager.recorder.chains
        for name, table in graph.tables().items():
            assert torch.equal(table, other[name]), f"{name} after step {number}"
        assert torch.equal(graph.recorder.chains.first[1:], chains.first[1:])
        running = {row: first + rng.randint(1, CHAIN) for row, first in running.items()}
    assert eager.recorder.sentences.index.max() >= 5 and eager.recorder.queries.data[:, 1:].any()


def test_a_step_that_looks_at_the_python_state_is_not_captured() -> None:
    """The proof that the test above can fail: a step recorded outside a capture replays nothing."""
    world, tape = World(), Tape()
    with tape:
        world.step()
    draw = torch.Generator().manual_seed(0)
    world.recorder.start(1, 1, PRESETS["math"])
    world.fill([1, 0, 0, 0], [0] * ROWS, [0] * ROWS, draw)
    tape.replay()
    assert not world.recorder.queries.data.any()
    for operation in (lambda t: t.sum().item(), lambda t: torch.tensor([1.0]) + t):
        with pytest.raises(AssertionError, match="in a captured step"), Tape():
            operation(torch.ones(3))
