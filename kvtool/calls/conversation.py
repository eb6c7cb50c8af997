"""Read a prompt or one turn after another with a loaded model, and put into a document what came.

The beginning of all that is only needed once a model is loaded: torch comes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvtool.cache.files.load import load_cache
from kvtool.cache.files.save import save_cache
from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.report import CacheReport
from kvtool.calls.export import write_exported
from kvtool.calls.needle import NEEDLE, compare_needle
from kvtool.calls.request import Request, spell_budget
from kvtool.calls.settings import CompressionSettings, GenerationSettings, PromptSettings
from kvtool.documents.files import expand, write_text
from kvtool.documents.generation import (
    CacheSection,
    CompileSection,
    CompressionDocument,
    CompressionTiming,
    Fidelity,
    GenerationDocument,
    GenerationTiming,
    PlanSection,
    TurnSection,
)
from kvtool.documents.messages import Turns, UserTurn
from kvtool.engines.targets import Target
from kvtool.engines.virtual_prompt import refuse_model
from kvtool.errors import UsageError
from kvtool.generation import Compressed, Conversation, Generation, compress, generate
from kvtool.generation.fidelity import join_fidelities
from kvtool.generation.graphs import StepsReport
from kvtool.generation.reading import reading
from kvtool.identity import config_hash
from kvtool.models.chat import continued_ids, template_of
from kvtool.models.load import Loaded
from kvtool.models.notes import length_note
from kvtool.planning.bytes import Text
from kvtool.planning.plan_in_use import beyond_plan, held_by_plan
from kvtool.planning.rocketkv_stages import planned_stages
from kvtool.policies.allocate.split import tokens_for_prompt
from kvtool.sizes import parse_prefill
from kvtool.transformers_versions import cache_argument
from kvtool.watcher import Listener, Watcher
from kvtool.weights_hash import weights_hash

if TYPE_CHECKING:
    from kvtool.report.kept.text import KeptText

# ---- before the prompt is read


def encode(loaded: Loaded, text: str, *, first: bool, source: str) -> Tensor:
    """Return the (1, n) token ids of a prompt; special tokens come with a first prompt only."""
    tokenizer = loaded.tokenizer
    ids = tokenizer(text)["input_ids"] if first else continued_ids(tokenizer, text)
    if not ids:
        raise UsageError(f"the prompt from {source} is empty for this tokenizer")
    return torch.tensor([ids], device=loaded.model.device)


def note_text(
    cache: KVCache, config: PreTrainedConfig, tokens: int, new_tokens: int, watcher: Watcher
) -> bool:
    """Say where a further text is going to leave the positions that the model was trained for.

    Args:
        cache: what is there already; one that numbers tokens by their place in it runs out of
            positions in a long block only.
        tokens: of the further text before an answer.
        new_tokens: of the longest answer.

    Returns:
        Whether it may leave them.
    """
    if not cache.renumbers:
        note = length_note(config, max(cache.tokens_seen()) + tokens, new_tokens)
    else:
        block, first = min(tokens, cache.block or tokens), cache.first_layer
        kept = first.slots.kept if first.is_initialized else 0
        note = length_note(config, kept + block, 0)
    watcher.note_any(note)
    return note is not None


def open_cache(settings: GenerationSettings, request: Request, loaded: Loaded) -> KVCache:
    """Return the cache to go on from, or an empty one."""
    cache = settings.cache
    if cache is None:
        return request.new_cache(loaded.model, record=settings.show is not None)
    if isinstance(cache, str):
        cache = load_cache(expand(cache), loaded.model)
    else:
        _check_fits(cache, loaded)
    if settings.show is not None:
        cache.record()
    if settings.prefill is not None:
        cache.read_in_blocks(parse_prefill(request.prefill))
    return cache


def _check_fits(cache: KVCache, loaded: Loaded) -> None:
    """Refuse a cache of another model (configuration, weights, dtype), and one of several texts."""
    made_for, model = cache.link.model(), loaded.model
    if made_for is not model:
        other = config_hash(cache.config) != config_hash(model.config.get_text_config(decoder=True))
        if not other and made_for is not None:
            other = weights_hash(made_for) != weights_hash(model)
        if other:
            raise UsageError(f"the cache is that of another model, not of `{loaded.name}`")
    if cache.first_layer.batch_size > 1:
        raise UsageError(
            f"the cache holds {cache.first_layer.batch_size} texts, and one is gone on from",
            hint=f"model.generate(**inputs, {cache_argument()}=cache) takes batches",
        )


def begin(
    settings: PromptSettings,
    loaded: Loaded,
    cache: KVCache,
    system: str | None,
    watcher: Watcher,
) -> Conversation | None:
    """Return what puts the prompt into the chat template, None where it goes in unchanged.

    So it does without a template, with it off, and behind a cached text that went in unchanged.
    """
    template = template_of(loaded.tokenizer)
    wanted = settings.template
    if wanted == "auto" and template and cache.chat is None and cache.get_seq_length() > 0:
        if settings.prompt is not None or settings.prompt_file is not None:
            watcher.note(
                "chat template: none, as in the cached text (--chat-template on: a message)"
            )
        return None
    if system is None and (wanted == "off" or (wanted == "auto" and not template)):
        return None
    talk = Conversation(loaded.model, loaded.tokenizer, cache, wanted, system)
    _note_template(watcher)
    return talk


def _note_template(watcher: Watcher) -> None:
    watcher.note("chat template: the model's, around what the user says (--chat-template off)")


# ---- a prompt that is compressed


def read_prompt(
    settings: CompressionSettings, request: Request, loaded: Loaded, watcher: Watcher
) -> tuple[KVCache, CompressionDocument]:
    """Read a prompt into a cache, save, export and show it as asked for, and say what is held."""
    model, text = loaded.model, request.prompt or ""
    for engine in settings.export_paths:
        refuse_model(model, engine)
    cache = request.new_cache(model, record=settings.show is not None)
    talk = begin(settings, loaded, cache, settings.system, watcher)
    if talk is None:
        ids = encode(loaded, text, first=True, source=request.source)
    else:
        ids = talk.context_ids(text)
    request.check_length(ids.shape[1], watcher)
    note_text(cache, model.config, ids.shape[1], 0, watcher)
    cache.expect_length(ids.shape[1] + settings.new_tokens)
    with reading(model, ids.shape[1], watcher):
        if talk is None:
            result = compress(model, cache, ids, tokenizer=loaded.tokenizer)
        else:
            result = talk.read(text)
    if settings.save_path is not None:
        last = {"input_ids": result.input_ids, "next_logits": result.next_logits}
        save_cache(cache, settings.save_path, model=model, model_name=loaded.name, **last)
    for engine, path in settings.export_paths.items():
        names = {"model_name": loaded.name, "tokenizer": loaded.tokenizer}
        write_exported(cache, path, watcher, Target(to=engine), model=model, **names)
        watcher.note(f"exported {path}")
    if settings.show is not None:
        show_texts(settings, [lay_out(loaded, cache, 0, None)], watcher)
    held = CacheSection.taken_from(cache.report())
    planned = _plan_in_use(request, loaded, result.prompt_tokens, 0, watcher)
    request.note_bytes(held, watcher)
    document = CompressionDocument(
        model=loaded.name,
        policy=str(request.policy),
        budget=spell_budget(request.budget),
        prefill=cache.prefill,
        prompt_tokens=result.prompt_tokens,
        saved=str(settings.save_path or next(iter(settings.export_paths.values()), None)),
        cache=held,
        plan=planned,
        timing=CompressionTiming(prefill_s=result.prefill_s),
    )
    return cache, document


# ---- an answer, or several


@dataclass(frozen=True)
class Generated:
    """What was generated, and the cache at its end.

    Attributes:
        stopped: whether a caller has ended it before it was done.
    """

    document: GenerationDocument
    settings: GenerationSettings
    request: Request
    cache: KVCache
    loaded: Loaded
    stopped: bool

    @property
    def kept(self) -> KeptText:
        """What the cache holds of its text, whose last tokens were generated."""
        last = self.document.turns[-1] if self.document.turns else self.document
        return lay_out(self.loaded, self.cache, last.new_tokens, last.text.strip())

    def finish(self, watcher: Watcher) -> None:
        """Save and show the cache as asked for; say what bytes came to, and judge the needle."""
        settings = self.settings
        self.request.note_bytes(self.document.cache, watcher)
        path = settings.save_path
        if path is not None:
            save_cache(self.cache, path, model=self.loaded.model, model_name=self.loaded.name)
            watcher.note(f"saved {path}")
        if settings.show is not None:
            show_texts(settings, [self.kept], watcher)
        alone = settings.loaded is None and not settings.tensor_parallel
        if self.request.source == NEEDLE and watcher.listens and alone and not self.stopped:
            shown = settings.show is not None
            compare_needle(self.request, self.document, self._answer_anew, watcher, shown=shown)

    def _answer_anew(self, request: Request) -> GenerationDocument:
        """Answer the prompt in another cache."""
        settings = replace(self.settings, compare_full=False, compile=False, cache=None, show=None)
        return generated(settings, request, None, self.loaded, Watcher(), Listener()).document


def generated(
    settings: GenerationSettings,
    request: Request,
    turns: Turns | None,
    loaded: Loaded,
    watcher: Watcher,
    listener: Listener,
) -> Generated:
    """Answer one prompt, or go on from a cache without one; or answer every turn."""
    cache = open_cache(settings, request, loaded)
    if turns is None:
        document = _answer(settings, request, loaded, cache, watcher, listener)
    else:
        document = _converse(settings, request, turns, loaded, cache, watcher, listener)
    return Generated(document, settings, request, cache, loaded, listener.has_enough)


def _answer(
    settings: GenerationSettings,
    request: Request,
    loaded: Loaded,
    cache: KVCache,
    watcher: Watcher,
    listener: Listener,
) -> GenerationDocument:
    talk = begin(settings, loaded, cache, settings.system, watcher)
    prompt_ids, tokens = None, 0
    if request.prompt is not None:
        if talk is None:
            first = cache.get_seq_length() == 0
            prompt_ids = encode(loaded, request.prompt, first=first, source=request.source)
        else:
            prompt_ids = talk.turn_ids(request.turn)
        tokens = prompt_ids.shape[1]
    if settings.cache is None:
        request.check_length(tokens, watcher)
    note_text(cache, loaded.model.config, tokens, settings.new_tokens, watcher)
    planned = _plan_in_use(request, loaded, tokens, settings.new_tokens, watcher)
    drawing = settings.drawing() | listener.hears()
    with reading(loaded.model, tokens, watcher):
        if talk is None:
            result = generate(loaded.model, loaded.tokenizer, cache, prompt_ids, **drawing)
        elif request.prompt is None:
            result = talk.answer(**drawing)
        else:
            result = talk.say(request.turn, **drawing)
    listener.on_answer(result.text[0])
    return _document(request, loaded, cache.prefill, [result], result.report, planned)


_SHOWN = 80  # characters of a turn on stderr
_AROUND, _SAID_NOTHING = 8, "."  # tokens of a template between turns; a turn without a question


def _converse(
    settings: GenerationSettings,
    request: Request,
    turns: Turns,
    loaded: Loaded,
    cache: KVCache,
    watcher: Watcher,
    listener: Listener,
) -> GenerationDocument:
    """Read the prompt, if there is one, and answer every turn; text is heard as it is said."""
    system = turns.system or settings.system
    talk = Conversation(loaded.model, loaded.tokenizer, cache, settings.template, system)
    if talk.in_template:
        _note_template(watcher)
        talk.foresee(turns.turns, request.prompt)
    _expect(talk, turns, request.prompt, settings.new_tokens)
    read, answered, noted = [], [], False
    if request.prompt is not None:
        with reading(loaded.model, talk.context_ids(request.prompt).shape[1], watcher):
            read.append(talk.read(request.prompt))
    for i, turn in enumerate(turns.turns):
        watcher.note(f"turn {i + 1}: {_shorten(turn.text or turn.answer or '')}")
        tokens, config = talk.turn_ids(turn).shape[1], loaded.model.config
        noted = noted or note_text(cache, config, tokens, settings.new_tokens, watcher)
        if turn.answer is not None:
            read.append(talk.hear(turn))
            continue
        with reading(loaded.model, tokens, watcher):
            answer = talk.say(turn, **settings.drawing(i), **listener.hears())
        answered.append((turn, answer))
        listener.on_answer(answer.text[0])
        if listener.has_enough:
            break
    held = cache.report(of_all_processes=True)
    new = max(answered[-1][1].new_tokens - 1, 0) if answered and turn.answer is None else 0
    tokens = held.tokens_seen - new
    planned = _plan_in_use(request, loaded, tokens, settings.new_tokens, watcher)
    answers = [answer for _, answer in answered]
    document = _document(request, loaded, cache.prefill, answers, held, planned, read)
    fidelity = join_fidelities([(each.fidelity, each.new_tokens) for each in answers])
    return document.model_copy(
        update={
            "fidelity": None if fidelity is None else Fidelity.taken_from(fidelity),
            "turns": [_turn(*pair) for pair in answered],
        }
    )


def _expect(talk: Conversation, turns: Turns, prompt: str | None, new_tokens: int) -> None:
    """Say how long the whole conversation may get, for a RoPE that depends on the length."""
    cache = talk.cache
    if cache.link.rope is None or cache.get_seq_length() > 0:
        return
    length = 0 if prompt is None else talk.context_ids(prompt).shape[1] + _AROUND
    for turn in turns.turns:
        said = talk.turn_ids(turn if turn.text else replace(turn, text=_SAID_NOTHING))
        length += said.shape[1] + _AROUND + (new_tokens if turn.answer is None else 0)
    cache.expect_length(length)


def _shorten(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN - 3]}..."


# ---- what there is to say of it


def _plan_in_use(
    request: Request, loaded: Loaded, tokens: int, new: int, watcher: Watcher
) -> PlanSection | None:
    """Return what is taken from the plan for a prompt; say where more is held than it says."""
    plan, policy, text = request.plan, request.policy, Text(tokens, new)
    if plan is None or not policy.takes_budget:
        return None
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    held = held_by_plan(plan, policy, loaded.model.config, dtype, text)
    beyond = beyond_plan(plan, held, text)
    if beyond is not None:
        watcher.note(f"note: after this {beyond}")
    stages = planned_stages(plan, policy, tokens)
    return PlanSection.of(plan, tokens_for_prompt(plan, tokens), stages, held)


def _document(
    request: Request,
    loaded: Loaded,
    prefill: str | None,
    answers: Sequence[Generation],
    held: CacheReport,
    plan: PlanSection | None,
    read: Sequence[Compressed] = (),
) -> GenerationDocument:
    """Put answers into a document."""
    steps = [each.steps for each in answers if each.steps is not None]
    return GenerationDocument(
        model=loaded.name,
        policy=str(request.policy),
        budget=spell_budget(request.budget),
        prefill=prefill,
        prompt_tokens=sum(each.prompt_tokens for each in answers)
        + sum(each.prompt_tokens for each in read),
        new_tokens=sum(each.new_tokens for each in answers),
        text="\n".join(each.text[0] for each in answers),
        token_ids=[token for each in answers for token in each.token_ids[0]],
        cache=CacheSection.taken_from(held),
        plan=plan,
        timing=_timing(answers, sum(each.prefill_s for each in read)),
        fidelity=_fidelity(answers[0]) if answers else None,
        compiled=CompileSection(**asdict(sum(steps, StepsReport()))) if steps else None,
    )


def _fidelity(answer: Generation) -> Fidelity | None:
    return None if answer.fidelity is None else Fidelity.taken_from(answer.fidelity)


def _turn(turn: UserTurn, answer: Generation) -> TurnSection:
    return TurnSection(
        user=turn.text,
        prompt_tokens=answer.prompt_tokens,
        new_tokens=answer.new_tokens,
        text=answer.text[0],
        token_ids=answer.token_ids[0],
        cache=CacheSection.taken_from(answer.report),
        timing=_timing([answer]),
        fidelity=_fidelity(answer),
    )


def _timing(answers: Sequence[Generation], before: float = 0.0) -> GenerationTiming:
    # the first new token of an answer comes from its prompt's own forward
    steps = sum(answer.new_tokens - 1 for answer in answers)
    decode_s = sum(answer.decode_s for answer in answers)
    return GenerationTiming(
        prefill_s=before + sum(answer.prefill_s for answer in answers),
        decode_s=decode_s,
        decode_tokens_per_s=steps / decode_s if steps > 0 and decode_s > 0 else None,
    )


# ---- the kept text


def lay_out(loaded: Loaded, cache: KVCache, new_tokens: int, answer: str | None) -> KeptText:
    """Return the kept text of a cache, the last of whose tokens were generated, as `answer`."""
    from kvtool.report.kept.text import kept_text

    known = cache.input_ids
    prompt = None if known is None or not new_tokens else known.shape[1] - new_tokens
    return kept_text(cache, loaded.tokenizer, prompt_tokens=prompt, answer=answer)


def show_texts(
    settings: PromptSettings,
    texts: Sequence[KeptText],
    watcher: Watcher,
    full_answer: str | None = None,
) -> None:
    """Write the page of kept texts, or show them on the terminal.

    Args:
        full_answer: of the full cache, where that was asked for.

    Raises:
        KvtoolError: the page cannot be written.
    """
    if settings.show_path is None:
        watcher.show_kept(texts)
        return
    from kvtool.report.kept.text import kept_page

    write_text(settings.show_path, kept_page(texts, full_answer))
    watcher.note(f"kept text in {settings.show_path}")
