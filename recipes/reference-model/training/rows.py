"""Training rows: filler with facts in it, then as many questions as fit.

Only answers count in full. Filler counts a little, which keeps the model a language model; facts
and questions are random and count nothing.
"""

from dataclasses import dataclass, field

import numpy as np

from kvtool.models.reference import facts, frequent
from kvtool.models.reference.facts import Question
from kvtool.models.reference.filler import Filler
from kvtool.models.reference.steps_task import draw_trace, longest_within
from kvtool.models.reference.vocabulary import BOS, EOS, SPECIAL, TOKENS, encode

FILLER_WEIGHT = 0.1
DECISION_WEIGHT = 3.0  # how a part of an answer begins and ends; the rest is copying
END_WEIGHT = 0.1
RANKING = encode("\n Question: What are the most common words? Answer: The most common words are")
_RECAP = encode("\n Recap:")
_MOST_ASKED = 35  # tokens of a question for frequent words and its answer
_FILLER_COUNTED = 0.3  # share of filler sentences in the loss: the rest would teach little more


@dataclass(frozen=True)
class Mixture:
    """What rows are made of; the shares of kinds of rows need not add up to one.

    `echo` rows repeat random tokens, the quickest way to learn to look a token up.
    """

    echo: float = 0.0
    needles: float = 0.3
    several_values: float = 0.2
    routes: float = 0.1
    variables: float = 0.2
    everything: float = 0.15
    frequent: float = 0.05
    trace: float = 0.0
    shortest_code: int = 5
    longest_code: int = 7
    recap: float = 0.25

    def draw_kind(self, rng: np.random.Generator) -> str:
        """Draw the kind of one row."""
        kinds = (
            "echo",
            "needles",
            "several_values",
            "routes",
            "variables",
            "everything",
            "frequent",
            "trace",
        )
        shares = np.array([getattr(self, kind) for kind in kinds])
        return kinds[rng.choice(len(kinds), p=shares / shares.sum())]


@dataclass
class Row:
    """Tokens, each with the weight of predicting it; `ends` are the last tokens of answers."""

    ids: list[int] = field(default_factory=lambda: [BOS])
    weights: list[float] = field(default_factory=lambda: [0.0])
    ends: list[int] = field(default_factory=list)

    def add(self, ids: list[int], weight: float | list[float] = 0.0) -> None:
        """Append tokens with one weight for all or one for each."""
        self.ids += ids
        self.weights += weight if isinstance(weight, list) else [weight] * len(ids)

    def ask(self, question: Question, *, end: bool) -> None:
        """Append a question and its answer; `end` teaches to stop after it."""
        before = [facts.COMMA, *question.answer]
        pairs = zip(before, question.answer, strict=False)
        weights = [
            DECISION_WEIGHT if facts.COMMA in pair or pair[1] == facts.STOP else 1.0
            for pair in pairs
        ]
        self.add(question.prompt)
        self.add(question.answer, weights)
        if end:
            self.ends.append(len(self.ids) - 1)


_TRACE_WORDS = 6, 17  # from, and below which
_ECHOED = np.arange(len(SPECIAL), len(TOKENS))  # bytes too: nowhere else are they seen


def _echo(rng: np.random.Generator, tokens: int) -> Row:
    """Draw random tokens in short pieces, then the same pieces in another order."""
    row = Row()
    length = int(rng.integers(3, tokens // 4))
    pieces = [
        rng.choice(_ECHOED, length, replace=False).tolist() for _ in range(tokens // (2 * length))
    ]
    for piece in pieces:
        row.add(piece)
    for index in rng.permutation(len(pieces)):
        row.add(pieces[index], [0.0, *[1.0] * (length - 1)])
    return row


def _restate(key: int, value: list[int]) -> Question:
    """State a fact once more, as part of a recap: a question without its question."""
    whole = facts.needle(key, value)
    return Question(whole[: -len(value) - 1], whole[-len(value) - 1 :])


def _frequent(rng: np.random.Generator, tokens: int) -> Row:
    """Draw a list of words, asked about at several points."""
    row = Row()
    row.add(frequent.HEAD)
    segments = max(1, min(int(rng.integers(2, 7)), tokens // 60))
    distinct = int(rng.integers(10, 60))
    room = max(segments, tokens - len(frequent.HEAD) - segments * _MOST_ASKED - 1)
    words, indices = frequent.draw_list(rng, room, distinct, 1.5 + rng.random())
    counts = np.zeros(distinct)
    for segment in np.array_split(indices, segments):
        counts += np.bincount(segment, minlength=distinct)
        row.add(words[segment].tolist())
        row.add([facts.STOP])
        more = (RANKING, 8) if rng.random() < 0.5 else ()  # to show more of the order
        question, weights = frequent.ask_frequent(words, counts, *more)
        row.add(question.prompt)
        row.add(question.answer, weights)
        row.ends.append(len(row.ids) - 1)
    return row


def _trace(rng: np.random.Generator, tokens: int) -> Row:
    """Draw a problem that is solved step by step, of half of the row to all of it."""
    words = int(rng.integers(*_TRACE_WORDS))
    most = longest_within(tokens, words)
    problem = draw_trace(rng, int(rng.integers((most + 1) // 2, most + 1)), words)
    row = Row()
    row.ask(Question(encode(problem.context + problem.question), encode(problem.answer)), end=True)
    return row


@dataclass
class _Plan:
    """Facts to plant in a row and the questions about them, recapped ones first."""

    groups: list[list[list[int]]] = field(default_factory=list)
    recap: list[Question] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)


def _draw_value(rng: np.random.Generator, mixture: Mixture, kind: str) -> list[int]:
    if kind == "code":
        return facts.code(rng, mixture.shortest_code, mixture.longest_code)
    return facts.nouns(rng, 1 if kind == "word" else facts.LONGEST_PHRASE)


def _plan_needles(plan: _Plan, rng: np.random.Generator, mixture: Mixture, keys: list[int]) -> None:
    """Plan one value for each key; asked one by one, in small groups or recapped."""
    kind = ("code", "word", "phrase", "mixed")[rng.choice(4, p=(0.55, 0.15, 0.1, 0.2))]
    kinds = ("code", "phrase") if kind == "mixed" else (kind,)
    needles = [(key, _draw_value(rng, mixture, kinds[rng.integers(len(kinds))])) for key in keys]
    plan.groups += [[facts.needle(*needle)] for needle in needles]
    needles = [needles[index] for index in rng.permutation(len(needles))]
    if len(needles) > 1 and rng.random() < mixture.recap:
        count = max(1, int(len(needles) * rng.uniform(0.3, 1.0)))
        plan.recap = [_restate(*needle) for needle in needles[:count]]
        needles = needles[count:]
    groupable = kind in ("code", "word")
    while needles:
        count = int(rng.integers(2, 5)) if groupable and rng.random() < 0.25 else 1
        asked, needles = needles[:count], needles[count:]
        if len(asked) > 1:
            names, values = zip(*asked, strict=True)
            plan.questions.append(facts.ask_several_keys(list(names), list(values)))
        else:
            plan.questions.append(facts.ask_value(*asked[0]))


def _plan_several_values(
    plan: _Plan, rng: np.random.Generator, mixture: Mixture, keys: list[int]
) -> None:
    """Plan two to four values for each key."""
    for key in keys:
        # words are short, so a row holds more of the hard choice: which value comes next
        kind = "word" if rng.random() < 0.6 else "code"
        values = [_draw_value(rng, mixture, kind) for _ in range(int(rng.integers(2, 5)))]
        plan.groups.append([facts.needle(key, value) for value in values])
        plan.questions.append(facts.ask_all_values(key, values))


def _plan_chains(
    plan: _Plan, rng: np.random.Generator, mixture: Mixture, *, routes: int, variables: int
) -> None:
    """Plan routes of two to six names, and values that pass through one to six variables."""
    lengths = rng.integers(2, 7, routes).tolist() + rng.integers(1, 7, variables).tolist()
    names = rng.choice(facts.VARIABLE_IDS, sum(lengths), replace=False).tolist()
    for index, length in enumerate(lengths):
        chain, names = names[:length], names[length:]
        if index < routes:
            plan.groups.append(facts.route(chain))
            plan.questions.append(facts.ask_route(chain))
            continue
        value = _draw_value(rng, mixture, "word" if rng.random() < 0.3 else "code")
        plan.groups.append(facts.assignments(value, chain))
        plan.questions.append(facts.ask_variables(value, chain))


def _draw_plan(rng: np.random.Generator, mixture: Mixture, kind: str, tokens: int) -> _Plan:
    """Draw facts that, with their questions, take a random share of the row."""
    room = max(40, int(tokens * rng.uniform(0.05, 0.55)))
    keys = rng.permutation(facts.NOUN_IDS).tolist()
    per_needle = 10 + mixture.longest_code // 2
    plan = _Plan()
    if kind == "needles":
        _plan_needles(plan, rng, mixture, keys[: max(1, min(120, room // per_needle))])
    elif kind == "several_values":
        several = max(1, min(12, room // 36))
        _plan_several_values(plan, rng, mixture, keys[:several])
        others = max(0, min(60, (room - 36 * several) // 15))
        _plan_needles(plan, rng, mixture, keys[several : several + others])
    elif kind in ("routes", "variables"):
        chains = max(1, min(15, room // 32))
        routes = chains if kind == "routes" else int(rng.random() < 0.2)
        _plan_chains(plan, rng, mixture, routes=routes, variables=chains - routes)
    else:
        _plan_needles(plan, rng, mixture, keys[: max(1, min(30, room // 60))])
        several = int(rng.integers(0, 3)) if tokens > 200 else 0
        _plan_several_values(plan, rng, mixture, keys[30 : 30 + several])
        chains = max(1, min(4, room // 120))
        _plan_chains(plan, rng, mixture, routes=chains // 2, variables=chains - chains // 2)
    return plan


def _choose(
    rng: np.random.Generator, questions: list[Question], room: int, share: int
) -> list[Question]:
    """Take questions in random order while they fit; the first may exceed `share`."""
    chosen: list[Question] = []
    for index in rng.permutation(len(questions)):
        length = len(questions[index].prompt) + len(questions[index].answer)
        if length <= room and (length <= share or not chosen):
            chosen.append(questions[index])
            room, share = room - length, share - length
    return chosen


def _planted(rng: np.random.Generator, tokens: int, filler: Filler, plan: _Plan) -> Row:
    row = Row()
    room = tokens - 1 - sum(len(sentence) for group in plan.groups for sentence in group)
    share = tokens if tokens <= 300 else int(tokens * rng.uniform(0.15, 0.5))
    recap = plan.recap
    while recap and sum(len(item.prompt) + len(item.answer) for item in recap) + 3 > room:
        recap = recap[: len(recap) // 2]
    if recap:
        room -= sum(len(item.prompt) + len(item.answer) for item in recap) + len(_RECAP)
    questions = _choose(rng, plan.questions, room, share)
    room -= sum(len(question.prompt) + len(question.answer) for question in questions)
    for sentence, is_fact in facts.scatter(rng, filler.take(rng, max(0, room)), plan.groups):
        counted = not is_fact and rng.random() < _FILLER_COUNTED
        row.add(sentence, FILLER_WEIGHT if counted else 0.0)
    recap_first = rng.random() < 0.5
    if not recap_first:
        for question in questions:
            row.ask(question, end=True)
    if recap:
        row.add(_RECAP)
        for item in recap:
            row.ask(item, end=False)
    if recap_first:
        for question in questions:
            row.ask(question, end=True)
    return row


def draw_row(rng: np.random.Generator, tokens: int, filler: Filler, mixture: Mixture) -> Row:
    """Draw one row of about `tokens` tokens."""
    kind = mixture.draw_kind(rng)
    if kind == "echo":
        return _echo(rng, tokens)
    if kind == "frequent":
        return _frequent(rng, tokens)
    if kind == "trace":
        return _trace(rng, tokens)
    return _planted(rng, tokens, filler, _draw_plan(rng, mixture, kind, tokens))


def draw_batch(
    rng: np.random.Generator, rows: int, tokens: int, filler: Filler, mixture: Mixture
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw a batch of rows, padded or cut at the end.

    Returns:
        ids, the token to predict after each, and the weight of that prediction, each
        (rows, tokens).
    """
    ids = np.zeros((rows, tokens), np.int64)
    targets = np.zeros((rows, tokens), np.int64)
    weights = np.zeros((rows, tokens), np.float32)
    for index in range(rows):
        row = draw_row(rng, tokens, filler, mixture)
        length = min(tokens, len(row.ids))
        ids[index, :length] = row.ids[:length]
        targets[index, : length - 1] = row.ids[1:length]
        weights[index, : length - 1] = row.weights[1:length]
        for end in row.ends:
            if end < length:
                targets[index, end], weights[index, end] = EOS, END_WEIGHT
    return ids, targets, weights
