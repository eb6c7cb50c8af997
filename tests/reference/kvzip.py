"""KVzip by plain loops: one softmax after another, and one sorted list of all that may stay."""

import math


def weights(queries, keys, group, scale, prompt, sinks, chunk, lengths=None, hidden=None):
    """The highest weight on each token of a chunk, by KV head.

    Args:
        queries: of each query head, a vector for each token of the repetition.
        keys: of each KV head, a vector for each token of the prompt and of the repetition.
        prompt: tokens of the prompt.
        chunk: positions that are repeated.
        lengths: of each query head, how long it makes each token of the prompt (KVzip+).
        hidden: how long the hidden state of each token of the repetition is.
    """
    found = []
    for head in range(len(keys)):
        best = dict.fromkeys(chunk, 0.0)
        for member in range(head * group, (head + 1) * group):
            for i, query in enumerate(queries[member]):
                seen = [*range(sinks), *chunk, *range(prompt, prompt + i + 1)]
                logits = [dot(query, keys[head][j]) * scale for j in seen]
                top = max(logits)
                whole = sum(math.exp(logit - top) for logit in logits)
                for j, logit in zip(seen, logits, strict=True):
                    if j in best:
                        weight = math.exp(logit - top) / whole
                        if lengths is not None:
                            weight *= lengths[member][j] / hidden[i]
                        best[j] = max(best[j], weight)
        found.append(best)
    return found


def length(rows, value):
    """How long a matrix, by its rows, makes a vector."""
    return math.sqrt(sum(dot(row, value) ** 2 for row in rows))


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def kept(scores, prompt, budget):
    """The positions that stay, by layer and head, where all compete.

    Args:
        scores: of each layer and head, a number for each position that was repeated; all others
            stay.
        budget: tokens of a head in the mean.
    """
    heads = [(layer, head) for layer in range(len(scores)) for head in range(len(scores[layer]))]
    stay = {
        place: [j for j in range(prompt) if j not in scores[place[0]][place[1]]] for place in heads
    }
    ranked = sorted(
        (-score, position, layer, head)
        for layer, head in heads
        for position, score in scores[layer][head].items()
    )
    free = budget * len(heads) - sum(map(len, stay.values()))
    for _, position, layer, head in ranked[:free]:
        stay[layer, head].append(position)
    return {place: sorted(positions) for place, positions in stay.items()}
