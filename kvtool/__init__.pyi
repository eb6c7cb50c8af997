"""What kvtool offers, with every keyword of its calls: read by editors and type checkers only."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kvtool.cache.entry.build import attach as attach
from kvtool.cache.entry.build import build_cache as build_cache
from kvtool.cache.files.load import load_cache as load_cache
from kvtool.cache.files.save import save_cache as save_cache
from kvtool.cache.hooks.attach import detach as detach
from kvtool.cache.whole.cache import KVCache
from kvtool.calls.auto_policy import compressed as compressed
from kvtool.calls.check_policy import check_policy as check_policy
from kvtool.calls.evaluate import load_results as load_results
from kvtool.documents.generation import ExportDocument, GenerationDocument
from kvtool.documents.plan import PlanDocument
from kvtool.documents.profile import ProfileDocument
from kvtool.documents.results import ResultsDocument
from kvtool.errors import KvtoolError as KvtoolError
from kvtool.errors import PolicyError as PolicyError
from kvtool.errors import UsageError as UsageError
from kvtool.policies.grammar import parse_policy as parse_policy
from kvtool.policies.policy import Policy
from kvtool.sizes import Budget
from kvtool.watcher import Watcher

__version__: str

def generate(
    model: Any = None,
    prompt: str | None = None,
    policy: Policy | str = ...,
    budget: Budget | str | int | float | None = None,
    *,
    tokenizer: Any = None,
    on_text: Callable[[str], object] | None = None,
    watcher: Watcher | None = None,
    trust_remote_code: bool = False,
    seed: int | None = None,
    revision: str | None = None,
    dtype: Any = None,
    device: str | None = None,
    device_map: str | None = None,
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] | None = None,
    quantize: Literal["8bit", "4bit"] | None = None,
    device_memory: str | None = None,
    strict: bool = False,
    tensor_parallel: bool | None = None,
    plan: PlanDocument | Mapping[str, Any] | str | Path | None = None,
    allocator: str | None = None,
    prompt_file: str | Path | None = None,
    system: str | None = None,
    chat_template: Literal["auto", "on", "off"] = "auto",
    prefill: str | None = None,
    save: str | Path | None = None,
    show: str | Path | None = None,
    turns: Sequence[Any] | str | Path | None = None,
    cache: KVCache | str | Path | None = None,
    later: bool = False,
    max_new_tokens: int | str | None = None,
    temperature: float | None = None,
    stop: str | Sequence[str] = (),
    compare_full: bool = False,
    compile: bool | None = None,
    graphs: bool = True,
) -> GenerationDocument: ...
def compress(
    model: Any = None,
    prompt: str | None = None,
    policy: Policy | str = ...,
    budget: Budget | str | int | float | None = None,
    *,
    tokenizer: Any = None,
    watcher: Watcher | None = None,
    trust_remote_code: bool = False,
    seed: int | None = None,
    revision: str | None = None,
    dtype: Any = None,
    device: str | None = None,
    device_map: str | None = None,
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] | None = None,
    quantize: Literal["8bit", "4bit"] | None = None,
    device_memory: str | None = None,
    strict: bool = False,
    tensor_parallel: bool | None = None,
    plan: PlanDocument | Mapping[str, Any] | str | Path | None = None,
    allocator: str | None = None,
    prompt_file: str | Path | None = None,
    system: str | None = None,
    chat_template: Literal["auto", "on", "off"] = "auto",
    prefill: str | None = None,
    save: str | Path | None = None,
    show: str | Path | None = None,
    max_new_tokens: int | str | None = None,
    export_vllm: str | Path | None = None,
    export_llamacpp: str | Path | None = None,
) -> KVCache: ...
def export(
    cache: KVCache | str | Path,
    save: str | Path,
    *,
    to: Literal["vllm", "llamacpp", "mlx"] = "vllm",
    model: Any = None,
    tokenizer: Any = None,
    dtype: Any = None,
    engine_version: str | int | None = None,
    type: Literal["f16", "f32", "q8_0", "q4_0"] | None = None,
    flash_attention: bool = True,
    streams: int = 1,
    watcher: Watcher | None = None,
) -> ExportDocument: ...
def plan(
    source: Any = None,
    *,
    tokens: int | str | None = None,
    model: Any = None,
    watcher: Watcher | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    dtype: Any = None,
    quantize: Literal["8bit", "4bit"] | None = None,
    ratio: float | str | None = None,
    bytes: int | str | None = None,
    memory: int | str | None = None,
    context: int | str | None = None,
    max_new_tokens: int | str | None = None,
    batch: int = 1,
    policy: Policy | str | None = None,
    allocator: str | None = None,
    curves: str | None = None,
    min_tokens: int | str | None = None,
    recommend: Any = None,
    guarantee: float | None = None,
) -> PlanDocument: ...
def profile(
    model: Any = None,
    texts: Sequence[str] | None = None,
    *,
    metrics: str | Sequence[str] = ...,
    tokenizer: Any = None,
    budgets: Sequence[int | float | str] | None = None,
    heads: str | Path | None = None,
    watcher: Watcher | None = None,
    trust_remote_code: bool = False,
    seed: int | None = None,
    revision: str | None = None,
    dtype: Any = None,
    device: str | None = None,
    device_map: str | None = None,
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] | None = None,
    quantize: Literal["8bit", "4bit"] | None = None,
    data: str = "builtin",
    samples: int = 8,
    tokens: int | str = "1024",
    decode: int | str = "128",
    policy: str | None = None,
) -> ProfileDocument: ...
def evaluate(
    recipe: Any = None,
    folder: str | Path | None = None,
    *,
    tasks: str | Sequence[str] = (),
    policies: str | Sequence[Any] = (),
    budgets: str | int | float | Sequence[str | int | float] = (),
    model: Any = None,
    tokenizer: Any = None,
    data: Mapping[str, str] | None = None,
    fail_under: Mapping[str, float] | None = None,
    compare: str | Sequence[str] = (),
    watcher: Watcher | None = None,
    trust_remote_code: bool = False,
    seed: int | None = None,
    revision: str | None = None,
    dtype: Any = None,
    device: str | None = None,
    device_map: str | None = None,
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] | None = None,
    quantize: Literal["8bit", "4bit"] | None = None,
    device_memory: str | None = None,
    strict: bool = False,
    tensor_parallel: bool | None = None,
    allocator: str | None = None,
    prefill: str | None = None,
    max_drop: float | None = None,
    within: float | None = None,
    guarantee: float | None = None,
    continue_on_error: bool = True,
    overwrite: bool = False,
    query_agnostic: bool = False,
    keep_question: bool = False,
    shared_prefill: bool = False,
    answers: Literal["decoded", "scored"] | None = None,
    batch: int | None = None,
    chat_template: Literal["auto", "on", "off"] | None = None,
    max_length: int | None = None,
    truncate: Literal["middle", "left", "error"] | None = None,
    graphs: bool = True,
    baseline: bool | None = None,
    lengths: Any = None,
    depths: Any = None,
    samples: int | None = None,
    limit: int | None = None,
    prompts: str | None = None,
) -> ResultsDocument: ...
