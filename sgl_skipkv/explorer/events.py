"""The lines of a trace that the explorer reads, checked: a file may hold anything."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

Tokens = Annotated[int, Field(ge=0, lt=1 << 53)]  # a JavaScript number holds these exactly
Span = tuple[Tokens, Tokens]


_Value = bool | int | FiniteFloat | str | None


class Event(BaseModel):
    """What every line has. Names that the explorer does not show are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    rid: str


class Compact(Event):
    """A compaction; ``similar`` is aligned with ``evicted_sentences``."""

    policy: str
    prompt_tokens: Tokens
    generated: Tokens
    before: Tokens
    after: Tokens
    kept: list[Tokens]
    evicted_sentences: list[Span] = []
    similar: list[tuple[Tokens, Tokens, float] | None] = []


class Recompute(Event):
    """The request's KV is computed anew: nothing is evicted any more."""

    generated: Tokens


class Continues(BaseModel):
    """The request whose history another one went on from."""

    rid: str
    tokens: Tokens


class Finish(Event):
    """The end of a request; a trace of an older version has no spans."""

    policy: str
    prompt_tokens: Tokens
    output_ids: list[Tokens]
    kv_budget: Tokens | None = None
    finish_reason: str | None = None
    compactions: Tokens = 0
    evicted_tokens: Tokens = 0
    kv_tokens: Tokens | None = None
    peak_kv_tokens: Tokens = 0
    mean_kv_tokens: float | None = None
    full_kv_tokens: Tokens = 0
    sentences: Tokens = 0
    evicted_sentences: Tokens = 0
    sentence_spans: list[Span] = []
    kv_params: dict[str, _Value | list[_Value]] = {}
    kv_reuse: str | None = None
    continues: Continues | None = None


#: a line of a trace that the explorer shows
TraceEvent = Compact | Recompute | Finish

_KINDS: dict[str, TypeAdapter[Any]] = {
    "compact": TypeAdapter(Compact),
    "recompute": TypeAdapter(Recompute),
    "finish": TypeAdapter(Finish),
}


def event_of(line: object) -> TraceEvent | None:
    """The event of a decoded line; None for a kind that the explorer does not show.

    Raises:
        ValueError: no event of a trace.
    """
    kind = line.get("event") if isinstance(line, dict) else None
    if not isinstance(line, dict) or not isinstance(kind, str):
        raise ValueError("a line that is no event")
    if kind not in _KINDS:
        return None
    try:
        event: TraceEvent = _KINDS[kind].validate_python(line, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"][:3]))
        raise ValueError(f"{kind}.{where}: {first['msg']}") from None
    return event
