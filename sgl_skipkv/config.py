"""Server settings, and the error message for every wrong setting or key.

``ServerConfig`` holds the settings from flags, config file and environment. ``build`` turns a
pydantic error into a ``SettingError``, whose message has four parts in every API: the field, the
expected value, the given value, and the valid choices.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from zlib import crc32

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

ENV_CONFIG = "SGL_SKIPKV_CONFIG"
CPU_PLATFORM = "skipkv_cpu"
METRIC_PREFIX = "sglang:skipkv_"
CONFIG_FILE_LIMIT_BYTES = 1 << 20
BUDGET_LIMIT_TOKENS = 2**31 - 1

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60


def copy_of(variable: str) -> str:
    """The name to which SGLang copies this variable of the environment, as it does, with a warning,
    for every name that begins with ``SGL_``."""
    return variable.replace("SGL_", "SGLANG_", 1)


def variable_of(variable: str, environ: Mapping[str, str]) -> str:
    """The name under which the operator set this variable: its own, or that of SGLang's warning."""
    return variable if environ.get(variable) else copy_of(variable)


class SettingError(ValueError):
    """A client or an operator set a wrong value.

    ``kv_budget: expected an integer in [13, 2147483647], got 0; choices: any integer in that range,
    or leave it out for the server default``
    """

    def __init__(self, field: str, expected: str, got: object, choices: str) -> None:
        self.field, self.expected, self.got, self.choices = field, expected, got, choices
        super().__init__(f"{field}: expected {expected}, got {brief(got)}; choices: {choices}")


class Unabridged(str):
    """A given value that an error message shows whole: what an operator typed, and a reason."""


def brief(value: object) -> str:
    """The value for an error message: at most 80 characters of a client's input."""
    if isinstance(value, Unabridged):
        return str(value)
    try:
        text = _repr.repr(value)
    except ValueError:  # Python does not print an integer of more than 4,300 digits
        text = "a longer integer than can be printed"
    return text if len(text) <= 80 else text[:77] + "..."


#: control characters, which a log or a terminal would obey, but for line ends and tabs
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10}, "\N{REPLACEMENT CHARACTER}")
LIMIT_NAME = 200


def printable(text: str) -> str:
    """What someone else wrote, for a terminal."""
    return text.translate(_CONTROLS)


def name_of(rid: str) -> str:
    """A request's id for logs, messages and the trace: at most 200 characters in one line, and a
    checksum where that is not the id. A client may choose it, and each line of the trace has it."""
    name = printable(rid[:LIMIT_NAME]).replace("\n", " ").replace("\t", " ")
    return name if name == rid else f"{name}~{crc32(rid.encode('utf-8', 'surrogatepass')):08x}"


def why_unopened(error: OSError | ValueError) -> str:
    """Why a path cannot be opened; ``ValueError`` comes from an invalid file name."""
    return getattr(error, "strerror", None) or "not a file name"


class Settings(BaseModel):
    """Base of all settings classes: frozen, strict types, no unknown names, no NaN, no infinity."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )


BudgetTokens = Annotated[int, Field(ge=1, le=BUDGET_LIMIT_TOKENS)]
#: names of the rules by which tokens close a sentence (``recording/sentences.py``)
Preset = Literal["paper", "math", "code", "any-newline"]
MemoryBytes = Annotated[int, Field(ge=0, le=1 << 60)]


class ServerConfig(Settings):
    """The settings of one server, from flags, a JSON file or ``SGL_SKIPKV_CONFIG``.

    Every field is optional. Any field that is set enables eviction at start, so a server that
    cannot evict refuses to start (docs/design.md, "three states"). The help of a command-line flag
    shows a field's ``description``.
    """

    kv_budget: BudgetTokens | None = Field(
        None, description="KV tokens kept for what a request generates"
    )
    kv_policy: str = Field("distinct", description="default eviction policy")
    kv_params: dict[str, Any] = {}  # default parameters of kv_policy
    kv_interval: int = Field(
        128, ge=8, le=65536, description="generated tokens between two compactions of a request"
    )
    kv_budget_max: BudgetTokens = Field(
        BUDGET_LIMIT_TOKENS, description="largest kv_budget that a request may set"
    )
    kv_interval_min: int = Field(
        8, ge=8, le=65536, description="smallest interval that a request may set"
    )
    protect_prompt: bool = True  # false: the prompt may be evicted too
    count_prompt: bool = False  # true: the budget includes the prompt
    kv_reuse: Literal[False, "keep", "budget"] = Field(
        False, description="default kv_reuse of a request with a budget"
    )
    # Host memory for what is known of finished requests, beside their KV.
    kv_reuse_bytes: MemoryBytes = 256 << 20
    delimiters: Preset = "math"  # which tokens close a sentence
    steering_vector: str | None = Field(None, description="safetensors file with a steering vector")
    steering: float | None = Field(
        None, description="default steering strength alpha_0; absent: no steering by default"
    )
    steering_gamma: float = Field(
        0.02, ge=0, le=10, description="added to the strength per non-execution sentence"
    )
    # Largest absolute steering strength that a request may set.
    steering_max: float = Field(10.0, ge=0, le=1000)
    # Internal: folder for hidden states of `skipkv steering extract`.
    steering_capture: str | None = None
    trace: str | None = Field(
        None,
        description=(
            "append one JSON line per compaction, restore, recomputation and finish to this file"
        ),
    )
    explorer: bool = Field(False, description="serve the trace, with its text, at /skipkv")
    query_text: str | None = Field(
        None, description="text file on which the model's heads are measured at start"
    )
    # Recent queries recorded per request; the largest `window`.
    query_window: int = Field(8, ge=1, le=1024)
    # Most recent sentences that are compared per request.
    max_sentences: int = Field(256, ge=8, le=65536)
    # Requests with recording that can run at once; others wait. 0: no step records.
    max_tracked_requests: int = Field(256, ge=0, le=65536)
    # Host memory for the KV of retracted requests, down to a power of two; 0: none.
    retraction_backup_bytes: MemoryBytes = 1 << 30
    # Device memory of one compaction's workspace; larger batches are split.
    compaction_work_bytes: MemoryBytes = 96 << 20
    check_ledger: bool = False  # verify kept + freed = old at compactions; waits for the device
    poison_evicted: bool = False  # fill the KV of evicted slots with NaN, to expose wrong reads
    # Compare the kept sets of all ranks (tensor parallelism); ends the server if they differ.
    check_agreement: bool = False
    required: bool = False  # true: refuse to start unless eviction is ready

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.kv_budget is not None and self.kv_budget > self.kv_budget_max:
            expected = f"an integer in [1, kv_budget_max = {self.kv_budget_max}]"
            choices = "a smaller kv_budget or a larger kv_budget_max"
            raise SettingError("kv_budget", expected, self.kv_budget, choices)
        if self.explorer and self.trace is None:
            expected = "false, because no trace is given"
            raise SettingError("explorer", expected, True, "name a trace too (--skipkv-trace FILE)")
        if self.steering is not None and self.steering_vector is None:
            expected = "nothing, because no steering_vector is given"
            raise SettingError("steering", expected, self.steering, "name a steering_vector too")
        if self.steering is not None and abs(self.steering) > self.steering_max:
            limit = self.steering_max
            expected = f"a number in [{-limit:g}, {limit:g}], within steering_max"
            choices = "a weaker steering or a larger steering_max"
            raise SettingError("steering", expected, self.steering, choices)
        return self

    @property
    def enabled(self) -> bool:
        """Whether eviction is enabled at start: at least one setting was given, or ``required``."""
        return self.required or bool(self.model_fields_set - {"required"})

    def given(self) -> dict[str, Any]:
        """The settings that the operator made, as JSON has them."""
        return self.model_dump(mode="json", exclude_unset=True)

    @property
    def defaults_apply(self) -> bool:
        """Whether a request without any key has a budget or is steered."""
        return self.kv_budget is not None or self.steering is not None


def load_server_config(
    flags: Mapping[str, Any] | None = None,
    *,
    config_file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServerConfig:
    """One server's settings. Flags override a file; a file given by flag replaces the environment,
    whose ``SGL_SKIPKV_CONFIG``, or else ``SGLANG_SKIPKV_CONFIG``, is JSON or a path.

    Raises:
        SettingError: unreadable file, bad JSON, unknown name, wrong type or range.
    """
    given = os.environ if environ is None else environ
    name = variable_of(ENV_CONFIG, given)
    text = given.get(name, "").strip()
    if config_file is not None:
        values = _read_config_file("--skipkv-config", config_file)
    elif text.startswith("{"):
        values = _parse_json(name, text)
    elif text:
        values = _read_config_file(name, text)
    else:
        return build(ServerConfig, flags or {})
    # A file or object without settings also enables eviction.
    return build(ServerConfig, {**values, **(flags or {})} or {"required": True})


def _read_config_file(field: str, name: str) -> dict[str, Any]:
    expected = f"a readable JSON file of at most {CONFIG_FILE_LIMIT_BYTES} bytes"
    choices = "a path to a file, or inline JSON in the environment variable"
    try:
        with Path(name).open("rb") as file:  # a pipe or a device has no size
            data = file.read(CONFIG_FILE_LIMIT_BYTES + 1)
        if len(data) > CONFIG_FILE_LIMIT_BYTES:
            raise SettingError(field, expected, f"more in {name}", choices)
        return _parse_json(f"{field} ({name})", data.decode())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingError(field, expected, f"{why}: {name}", choices) from error


def _parse_json(field: str, text: str) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in values:
                raise SettingError(field, "each name once", name, "remove one of the two")
            values[name] = value
        return values

    try:
        values = json.loads(text, object_pairs_hook=no_duplicates)
    except SettingError:
        raise
    except (RecursionError, ValueError) as error:  # no JSON; nested too deep; a number too long
        raise SettingError(field, "a JSON object", str(error), "see docs/settings.md") from error
    if not isinstance(values, dict):
        raise SettingError(field, "a JSON object", values, "see docs/settings.md")
    return values


M = TypeVar("M", bound=Settings)


def build(model: type[M], values: Mapping[str, Any], *, prefix: str = "") -> M:
    """Validate ``values`` into ``model``; the first error becomes a ``SettingError``.

    ``prefix`` comes before the field's name in the message, for nested objects (``kv_params.``).
    """
    for name in values:
        if name not in model.model_fields:
            known = ", ".join(sorted(model.model_fields)) or "none"
            field = brief(name).strip("'\"")
            raise SettingError(f"{prefix}{field}", "a known name", name, known)
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, SettingError):
            raise cause from None
        name = str(detail["loc"][0]) if detail["loc"] else model.__name__
        expected, choices = describe(model, name)
        raise SettingError(f"{prefix}{name}", expected, detail["input"], choices) from None


_TYPES = {
    "integer": "an integer",
    "number": "a finite number",
    "boolean": "true or false",
    "string": "a string",
    "object": "an object",
}


def describe(model: type[Settings], name: str) -> tuple[str, str]:
    """A field's expected value and valid choices, as text, from its schema."""
    schema: dict[str, Any] = model.model_json_schema()["properties"][name]
    options = [entry for entry in schema.get("anyOf", [schema]) if entry.get("type") != "null"]
    entry = {**schema, **options[0]}
    if "enum" in entry:
        choices = ", ".join("false" if value is False else str(value) for value in entry["enum"])
        return f"one of {choices}", choices
    expected = _TYPES.get(str(entry.get("type")), "a valid value")
    least = f"[{entry['minimum']}" if "minimum" in entry else f"({entry.get('exclusiveMinimum')}"
    if least == "(None" or "maximum" not in entry:
        return expected, f"{expected}, or leave it out for the default"
    expected = f"{expected} in {least}, {entry['maximum']}]"
    return expected, "any value in that range, or leave it out for the default"
