"""A prompt read once into a compressed cache, in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.calls.fitting import estimate_run, with_budget
from kvtool.calls.from_python import UNSAID, Unsaid, from_python, takes
from kvtool.calls.request import (
    Request,
    choose_policy,
    configuration,
    read_prefill,
    typed_prompt,
)
from kvtool.calls.resolve import resolve_settings
from kvtool.calls.settings import CompressionSettings
from kvtool.errors import UsageError
from kvtool.transformers_versions import check_transformers
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.cache.whole.cache import KVCache
    from kvtool.documents.generation import CompressionDocument
    from kvtool.documents.plan import PlanDocument
    from kvtool.policies.policy import Policy
    from kvtool.sizes import Budget


@takes(CompressionSettings)
def compress(
    model: Any = None,
    prompt: str | None = None,
    policy: Policy | str | Unsaid = UNSAID,
    budget: Budget | str | int | float | None = None,
    *,
    tokenizer: Any = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> KVCache:
    """Read a prompt once and keep its compressed cache.

    The cache knows its text: `kvtool.generate(model, question, cache=cache)` goes on from it, and
    inside `with cache.rollback():` leaves it as it was. A loaded model goes on to run kvtool's
    attention, which its cache needs; `kvtool.detach` gives it its own back.

    Args:
        model: a folder, a hub ID or a loaded model (then with its `tokenizer`); None is the
            bundled reference model.
        policy, budget: as for `kvtool.build_cache`.
        save: the file that the cache is written to as well.
        export_vllm, export_llamacpp: folders to which it is exported, under the name of that file
            or the prompt's.
        show: the page that says which tokens are kept; `cache.show()` returns it.
        max_new_tokens: that will follow the prompt, questions included; only a model whose RoPE
            depends on the length of the text needs to know.
        plan: a plan or a recipe as a document, its data or its file.
        watcher: takes notes and progress; None: no caller does.

    `settings` are those of `CompressionSettings`; each is what the option of `kvtool compress` with
    its name is.

    Raises:
        UsageError: settings that are wrong or do not go together.
        KvtoolError: a model that cannot be read or used, a file that cannot be written.
    """
    asked = from_python(
        CompressionSettings,
        "compress",
        model,
        tokenizer,
        prompt=prompt,
        policy=policy,
        budget=budget,
        **settings,
    )
    watcher = Watcher() if watcher is None else watcher
    resolved = resolve_settings(asked, "kvtool compress")
    return prepare_compression(*resolved, watcher).run(watcher)[0]


@dataclass(frozen=True)
class CompressionRun:
    """A compression that is all checked, as far as that goes without the model."""

    settings: CompressionSettings
    request: Request

    def describe(self) -> dict[str, Any]:
        """Return what a dry run prints."""
        memory = estimate_run(self.settings, self.request, 0)
        return configuration(self.settings, self.request) | {"memory": memory}

    def run(self, watcher: Watcher) -> tuple[KVCache, CompressionDocument]:
        """Load the model, read the prompt and save the cache as asked for."""
        source, shows = self.settings.source(), watcher.shows_progress
        watcher.note_any(source.note())
        with source.attached(note=watcher.note, progress=shows, keep=True) as loaded:
            from kvtool.calls.conversation import read_prompt

            return read_prompt(self.settings, self.request, loaded, watcher)


def prepare_compression(
    settings: CompressionSettings, plan: PlanDocument | None, watcher: Watcher
) -> CompressionRun:
    """Check everything that can be checked before the model is loaded.

    Args:
        settings, plan: resolved, by which a bad recipe is refused before this file is imported.

    Raises:
        UsageError, KvtoolError: as `compress`.
    """
    check_transformers()
    settings.check_output()
    settings.source().check()
    if settings.policy is None:
        raise UsageError("no policy", hint="--policy h2o+caote; `kvtool policies` lists them")
    prompt, source = typed_prompt(settings)
    if prompt is None:
        raise UsageError("no prompt", hint="--prompt TEXT or --prompt-file FILE")
    policy, budget = choose_policy(settings, plan, watcher)
    prefill = read_prefill(settings, policy)
    request = Request(prompt, source, policy, budget, prefill, plan)
    request = with_budget(settings, request, watcher, settings.new_tokens, later=True)
    if settings.export_paths:
        from kvtool.engines.virtual_prompt import refuse_policy

        for engine in settings.export_paths:
            refuse_policy(request.policy, engine)
    return CompressionRun(settings, request)
