"""Settings declared once: a field, the flag that sets it, and its place in a recipe.

A field of a command's settings is declared by `flag`. The sections of a recipe that flags
set are declared here too: schemas inherit them, and `as_flags` turns them into options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, MISSING, asdict, dataclass, field, fields, make_dataclass, replace
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from kvtool.errors import UsageError


@dataclass(frozen=True)
class Flag:
    """How a setting is given: on the command line, in a recipe and in Python.

    Attributes:
        names: of the option, parted by spaces; empty for an argument.
        key: its place in a recipe, such as `model.dtype`; None: a recipe does not hold it.
        sets: what the option without a value sets there; None: its value.
        python: the keyword of the Python call, where it is not the field's name; None: there is
            none.
        typed: the type on the command line, where it is not the field's.
        env: the variable of the environment that gives a default.
        after: the option that it follows in a help, where it is not the field before.
        counts: whether an answer depends on it, and its fingerprint has it from nowhere else.
        later: whether files of earlier versions lack it.
    """

    names: str = ""
    _: KW_ONLY
    metavar: str | None = None
    help: str = ""
    min: float | None = None
    max: float | None = None
    key: str | None = None
    sets: Any = None
    python: str | None = ""
    typed: Any = None
    env: str | None = None
    after: str | None = None
    counts: bool = True
    later: bool = False

    @property
    def name(self) -> str:
        """Return the option's name as a name of Python."""
        return self.names.split()[0].split("/")[0].removeprefix("--").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether the option takes no value and has no opposite."""
        return self.sets is not None


def flag(usage: str, help: str, *, default: Any = None, **more: Any) -> Any:
    """Declare the field of a setting with its flag.

    Args:
        usage: the option as a help shows it (`--budget -b=SIZE`), or the argument (`FOLDER`).
        more: further attributes of `Flag`.
    """
    names, _, metavar = usage.partition("=") if usage.startswith("-") else ("", "", usage)
    metadata = {"flag": Flag(names, metavar=metavar or None, help=help, **more)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """A field that has a flag.

    Attributes:
        type: of its values, without the flag.
        default: its default, made anew where it is a list.
    """

    name: str
    flag: Flag
    type: Any
    default: Any

    @property
    def typed(self) -> Any:
        """Return its type on the command line: text where text will do, or several texts."""
        if self.flag.typed is not None:
            return self.flag.typed
        kinds = get_args(self.type) if get_origin(self.type) in (Union, UnionType) else ()
        return str | None if str in kinds else self.type


def settings_of(kind: type) -> Iterator[Setting]:
    """Yield the settings of a dataclass in the order of its fields, its bases' first."""
    types = get_type_hints(kind)
    for each in fields(kind):
        if "flag" in each.metadata:
            factory = each.default_factory
            default = each.default if factory is MISSING else factory()
            yield Setting(each.name, each.metadata["flag"], types[each.name], default)


def as_flags(section: type, leave_out: Sequence[str] = (), *, under: str) -> type:
    """Return the options that set the section of a recipe at `under`; None sets nothing."""
    made: list[Any] = []
    for each in settings_of(section):
        if each.name in leave_out:
            continue
        own = replace(each.flag, key=f"{under}.{each.name}")
        kind, default = (bool, False) if own.is_switch else (each.typed | None, None)
        made.append((own.name, kind, field(default=default, metadata={"flag": own})))
    return make_dataclass(
        f"{section.__name__}Flags",
        made,
        init=False,  # what inherits the fields makes all of these for itself
        repr=False,
        eq=False,
        frozen=True,
        kw_only=True,
        namespace={"__module__": section.__module__},
    )


class _NotEmpty:
    """Lets a schema refuse an empty text."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "min_length": 1}


Name = Annotated[str, _NotEmpty()]
_UNSET = object()
Template = Literal["auto", "on", "off"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class ModelFields:
    """How a model runs: the keys of a recipe's `model` beside its `id`."""

    revision: Name | None = flag("--revision=REV", "Branch, tag or commit of a model on the hub.")
    dtype: Dtype = flag(
        "--dtype",
        "auto: the checkpoint's on a GPU, float32 on a CPU.  [default: auto]",
        env="KVTOOL_DTYPE",
        default="auto",
    )
    device: Name = flag(
        "--device=auto|cpu|cuda[:i]|..",
        "Where the model runs; other devices of torch (mps, xpu ..) are untested.  [default: auto]",
        env="KVTOOL_DEVICE",
        default="auto",
    )
    device_map: Name | None = flag(
        "--device-map=MAP", "Spread layers over devices, as in transformers (auto ..)."
    )
    tensor_parallel: bool = flag(
        "--tensor-parallel",
        "Split every layer over the processes that torchrun started.",
        after="allocator",
        default=False,
    )
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = flag(
        "--attn-implementation", "Attention kernel.  [default: auto]", default="auto"
    )
    quantize: Literal["8bit", "4bit"] | None = flag(
        "--quantize --weights",
        "Store the weights of linear layers in fewer bits, with bitsandbytes.",
        later=True,
    )


MODEL_SETTINGS = tuple(each.name for each in fields(ModelFields))
"""Keys of a recipe's `model` beside its `id`."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How prompts are put: what a recipe's `eval` and the protocol of a run share.

    `query_aware: None` leaves it to the task, `max_length: None` is what the model was trained for.
    """

    query_aware: bool | None = flag(
        "--query-agnostic", "Compress the context before the question is known.", sets=False
    )
    keep_question: bool = flag(
        "--keep-question",
        "With it, keep the question whole beside the budget.",
        sets=True,
        later=True,
        default=False,
    )
    shared_prefill: bool = flag(
        "--shared-prefill",
        "Read each prompt once for all variants that can share the run; its seconds are "
        "then those of all together.",
        sets=True,
        after="prefill",
        later=True,
        default=False,
    )
    answers: Literal["decoded", "scored"] = flag(
        "--answers",
        "scored: feed the right answer, mostly in one run, in place of decoding one; adds "
        "its NLL.  [default: decoded]",
        later=True,
        default="decoded",
    )
    batch: int | None = flag(
        "--batch=N",
        "Decode the answers of up to N samples in one batch, as far as memory allows.  "
        "[default: 16 where answers are chains of steps, else 1]",
        min=1,
        counts=False,
        later=True,
    )
    chat_template: Template = flag(
        "--chat-template", "Put prompts into the model's chat template.", default="auto"
    )
    max_length: int | None = flag(
        "--max-length=N", "Cut longer prompts to N tokens.", typed=str | None
    )
    truncate: Literal["middle", "left", "error"] = flag(
        "--truncate", "Where long prompts are cut.  [default: middle]", default="middle"
    )

    @property
    def template(self) -> Template:
        """Whether prompts go into the model's chat template."""
        return self.chat_template

    def check(self) -> None:
        """Refuse to keep a question that is read with its context, and the like: `UsageError`."""
        if self.keep_question and self.query_aware is not False:
            raise UsageError(
                "--keep-question keeps a question that comes after the context was compressed",
                hint="--query-agnostic --keep-question, or query_aware: false in a recipe",
            )
        if self.shared_prefill and (self.batch or 1) > 1:
            raise UsageError(
                "--shared-prefill measures one sample under all variants, --batch many under one",
                hint="leave out one of them",
            )


@dataclass(frozen=True, kw_only=True)
class Protocol(Asking):
    """How prompts are put and answers are drawn, the same in all of a run.

    None leaves it to the task.

    Attributes:
        temperature: 0 takes the most likely token.
        stop: texts that end an answer, on top of the task's own.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def identity(self) -> dict[str, Any]:
        """Return the fields that distinguish measurements, and later ones only if set."""
        plain, given = _later(type(self)), asdict(self)
        left_out = {each.name for each in settings_of(type(self)) if not each.flag.counts}
        told = [name for name in given if given[name] != plain.get(name, _UNSET)]
        return {name: given[name] for name in told if name not in left_out}


def _later(kind: type) -> dict[str, Any]:
    """Return the defaults of settings that files of earlier versions lack."""
    return {each.name: each.default for each in settings_of(kind) if each.flag.later}


def as_entry(kind: type) -> type:
    """Return the fields of a kind of settings as a file holds them, for a schema to inherit.

    A file must hold all of them but those that earlier versions lack, which come last.
    """
    later, hints = _later(kind), get_type_hints(kind, include_extras=True)
    names = sorted((each.name for each in fields(kind)), key=lambda name: name in later)
    annotations = {name: hints[name] for name in names}
    return type(f"{kind.__name__}Fields", (), {"__annotations__": annotations, **later})
