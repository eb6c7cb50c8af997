"""One case with the real engine, inside its environment: see `__main__.py`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from recipes.benchmarks.vllm.cases import CASES, NEW_TOKENS, Case

MEMORY = 2 * 2**30  # bytes of the engine's cache
TIE = 1e-4  # of log-probabilities
CONNECTOR = "kvtool.engines.vllm.connector"
ALONE = "blocks-of-32"


def transfer(folder: Path) -> dict:
    """The engine's setting that names the connector."""
    return {
        "kv_connector": "KvtoolConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"folder": str(folder / "exported")},
    }


class Engine:
    """An engine in this process (its workers, too, where there is one rank)."""

    def __init__(self, case: Case, model: str, folder: Path) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        blocks = {} if case.blocks is None else {"num_gpu_blocks_override": case.blocks}
        begun = time.time()
        self.llm = LLM(
            model,
            dtype="float32",
            max_model_len=6144 if case.model == "smollm2" else 2048,
            block_size=case.block,
            enforce_eager=True,
            tensor_parallel_size=case.ranks,
            kv_cache_memory_bytes=MEMORY,
            kv_transfer_config=transfer(folder),
            disable_log_stats=False,
            **blocks,
        )
        self.start_s = time.time() - begun
        self.folder, self.count = folder, 0

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def used(self) -> int:
        """Blocks that running requests hold."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - pool.get_num_free_blocks()

    def answer(self, prompts: list[list[int]], tokens: int = NEW_TOKENS, **more: Any) -> list[dict]:
        """Answer prompts together: tokens, their likeliest ones, and when the first came."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=tokens, logprobs=5, ignore_eos=True, **more
        )
        engine, ended, first = self.llm.llm_engine, {}, {}
        begun, cpu, peak = time.perf_counter(), time.process_time(), 0
        names = []
        for ids in prompts:
            self.count += 1
            names.append(str(self.count))
            engine.add_request(names[-1], {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for out in engine.step():
                own = out.request_id.split("-")[0]
                if out.outputs[0].token_ids and own not in first:
                    first[own] = time.perf_counter() - begun, time.process_time() - cpu
                if out.finished:
                    ended[own] = out
            peak = max(peak, self.used())
        self.spent = {
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.perf_counter() - begun,
            "first_token_s": max((each[0] for each in first.values()), default=None),
            "first_token_cpu_s": max((each[1] for each in first.values()), default=None),
            "peak_blocks": peak,
        }
        return [_answer(ended[name]) for name in names]


def _answer(out: Any) -> dict:
    said = out.outputs[0]
    tops = [
        {str(token): each.logprob for token, each in place.items()} for place in said.logprobs or []
    ]
    return {"tokens": list(said.token_ids), "top": tops, "reason": said.finish_reason}


def compare(answer: dict, expected: list[dict]) -> tuple[bool, float]:
    """Whether an answer is the expected one, and by how much log-probabilities differ.

    Tokens may differ where the two likeliest are closer than a tie; what follows is not compared.
    """
    worst = 0.0
    for token, top, wanted in zip(answer["tokens"], answer["top"], expected, strict=False):
        shared = top.keys() & wanted["top"].keys()
        worst = max([worst, *(abs(top[each] - wanted["top"][each]) for each in shared)])
        if token != wanted["token"]:
            best = wanted["top"][str(wanted["token"])]
            return best - wanted["top"].get(str(token), -1e9) < TIE, worst
    return len(answer["tokens"]) >= min(len(expected), NEW_TOKENS), worst


def _judge(answers: list[dict], asked: list[dict]) -> dict:
    found = [compare(one, each["answer"]) for one, each in zip(answers, asked, strict=True)]
    right = sum(equal for equal, _ in found)
    return {"right": right, "of": len(found), "worst_logprob": max(worst for _, worst in found)}


# ---- what is tried


def mixed(engine: Engine, books: list[dict], case: Case) -> dict:
    """All questions about three caches and one text in a batch, twice: loaded, then shared."""
    asked = [each for book in books for each in book["asked"]]
    asked = [asked[i] for i in sorted(range(len(asked)), key=lambda i: i * 7 % len(asked))]
    text = list(range(20, 60))
    first = engine.answer([*(each["ids"] for each in asked), text])
    again = engine.answer([*(each["ids"] for each in asked), text])
    alone = engine.answer([asked[0]["ids"]]) + engine.answer([text])
    return {
        **_judge(first[:-1], asked),
        "again": _judge(again[:-1], asked),
        "text_unharmed": alone[1]["tokens"] == first[-1]["tokens"] == again[-1]["tokens"],
        "alone_as_in_batch": alone[0]["tokens"] == first[0]["tokens"],
    }


def vanish(engine: Engine, books: list[dict], case: Case) -> dict:
    """A file goes away and comes back; its neighbour in the batch has to be answered throughout."""
    gone, kept = books[0], books[1]
    file = engine.folder / "exported" / f"{gone['name']}.safetensors"
    away = file.with_suffix(".away")
    both = [gone["asked"][0]["ids"], kept["asked"][0]["ids"]]
    engine.llm.reset_prefix_cache()
    file.rename(away)
    try:
        refused = engine.answer(both)
        twice = engine.answer(both)
    finally:
        away.rename(file)
    back = engine.answer(both)
    wanted = [gone["asked"][0], kept["asked"][0]]
    return {
        "reasons": [one[0]["reason"] for one in (refused, twice)],
        "tokens_of_refused": [len(one[0]["tokens"]) for one in (refused, twice)],
        "neighbour_right": [_judge(one[1:], wanted[1:])["right"] for one in (refused, twice)],
        "back": _judge(back, wanted),
    }


def refused(engine: Engine, books: list[dict], case: Case) -> dict:
    """Requests that are refused, each beside one that is answered."""
    good, slots = books[0]["asked"][1], len(books[0]["asked"][0]["ids"])
    ids = good["ids"]
    name = {"extra_args": {"kv_transfer_params": {"kvtool": "gone"}}}
    right = {"extra_args": {"kv_transfer_params": {"kvtool": books[0]["name"]}}}
    other = [*ids[:100], *books[1]["asked"][0]["ids"][100:]]
    found = {
        "prompt_logprobs": engine.answer([ids], prompt_logprobs=1)[0]["reason"],
        "unknown name": engine.answer([ids], **name)[0]["reason"],
        "name and text": engine.answer([list(range(50))], **name)[0]["reason"],
        "other ids behind": engine.answer([other])[0]["reason"],
        "no question": engine.answer([ids[:256]])[0]["reason"],
        "slots": slots,
    }
    found["right name"] = _judge(engine.answer([ids], **right), [good])
    found["after all"] = _judge(engine.answer([ids]), [good])
    return found


def preempted(engine: Engine, books: list[dict], case: Case) -> dict:
    """More than fits, so that requests lose their blocks and load their cache again."""
    asked = [each for book in books for each in book["asked"]] * 2
    long = 200
    engine.llm.reset_prefix_cache()
    before = _preemptions(engine)
    together = engine.answer([each["ids"] for each in asked], tokens=long)
    count = _preemptions(engine) - before
    apart = [engine.answer([each["ids"]], tokens=long)[0] for each in asked[: len(asked) // 2]]
    same = sum(
        one["tokens"] == other["tokens"] for one, other in zip(together, apart * 2, strict=True)
    )
    return {"preemptions": count, "same": same, "of": len(asked), **_judge(together, asked)}


def _preemptions(engine: Engine) -> int:
    metrics = {each.name: getattr(each, "value", 0) for each in engine.llm.get_metrics()}
    return int(metrics.get("vllm:num_preemptions", 0))


def cost(engine: Engine, books: list[dict], case: Case) -> dict:
    """What questions over one text cost: compressed, and the full prompt cold and warm."""
    asked, tokens, found = books[0]["asked"], 32, {}
    eight = (asked * 2)[:8]
    engine.answer([list(range(20, 60))], tokens=tokens)  # what an engine does once
    for key in ("ids", "full"):
        for count, which in ((1, asked[:1]), (8, eight)):
            for state in ("cold", "warm"):
                if state == "cold":
                    engine.llm.reset_prefix_cache()
                engine.answer([each[key] for each in which], tokens=tokens)
                rate = count * tokens / engine.spent["cpu_s"]
                found[f"{key}, {count}, {state}"] = engine.spent | {"tokens_per_cpu_s": rate}
    found["prompt_tokens"] = {key: len(asked[0][key]) for key in ("ids", "full")}
    found["compress_cpu_s"] = books[0]["cpu_s"]
    return found


def http(model: str, folder: Path, books: list[dict]) -> dict:
    """The OpenAI server: completions, streams, chats and refusals by the openai client."""
    import openai

    port = 8765
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--dtype", "float32", "--max-model-len", "6144", "--block-size", "32"]
    command += ["--enforce-eager", "--port", str(port), "--served-model-name", "m"]
    command += ["--host", "127.0.0.1", "--kv-cache-memory-bytes", str(MEMORY)]
    command += ["--kv-transfer-config", json.dumps(transfer(folder))]
    log = folder / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=600
        )
        begun = time.time()
        while True:
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                if server.poll() is not None or time.time() - begun > 1500:
                    raise RuntimeError(log.read_text()[-2000:]) from None
                time.sleep(2)
        return {"start_s": time.time() - begun, **_ask_server(client, openai, books)}
    finally:
        server.terminate()
        server.wait(60)


def _ask_server(client: Any, openai: Any, books: list[dict]) -> dict:
    asked = [book["asked"][i] for book in books for i in (0, 1)]
    common = {"model": "m", "max_tokens": NEW_TOKENS, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True}

    def ask(ids: list[int], **changes: Any) -> Any:
        settings = common | {"prompt": ids, "extra_body": more} | changes
        return client.completions.create(**settings).choices[0]

    def first_token(ids: list[int]) -> float:
        """Seconds to the first token of a streamed answer."""
        begun = time.perf_counter()
        parts = client.completions.create(prompt=ids, stream=True, **common)
        next(part for part in parts if part.choices and part.choices[0].text)
        return time.perf_counter() - begun

    def status(**changes: Any) -> str:
        try:
            done = ask(ids, **changes)
        except openai.APIStatusError as error:
            return f"{error.status_code}: {str(error)[:160]}"
        return f"200: {done.finish_reason}, {done.text!r}"

    ids, full, named = asked[0]["ids"], asked[0]["full"], books[0]["name"]
    waits = {"compressed, cold": first_token(ids), "compressed, warm": first_token(ids)}
    waits |= {"full, cold": first_token(full), "full, warm": first_token(full)}
    answers = [ask(each["ids"]) for each in asked]
    judged = [
        {"tokens": each.token_ids, "top": [{}] * NEW_TOKENS, "reason": ""} for each in answers
    ]
    parts = client.completions.create(
        prompt=ids, stream=True, extra_body={"ignore_eos": True}, **common
    )
    chat = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "unused"}],
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "kv_transfer_params": {"prompt_token_ids": ids}},
    )
    found = {
        "first_token_s": waits,
        **_judge(judged, asked),
        "streamed_as_whole": "".join(p.choices[0].text for p in parts if p.choices)
        == answers[0].text,
        "chat_as_completion": chat.choices[0].message.content == answers[0].text,
        "text": answers[0].text,
        "right_name": ask(ids, extra_body=more | {"kv_transfer_params": {"kvtool": named}}).text
        == answers[0].text,
        "unknown_name": status(extra_body={"kv_transfer_params": {"kvtool": "gone"}}),
        "echo_logprobs": status(echo=True, logprobs=1),
        "no_question": status(prompt=ids[:256]),
        "right_after_refusals": ask(ids).token_ids == answers[0].token_ids,
    }
    del found["worst_logprob"]
    return found


def main(name: str, model: str, folder: str, result: str) -> None:
    case, books = CASES[name], json.loads((Path(folder) / "expected.json").read_text())
    begun = time.process_time()
    if case.tried == ("http",):
        found: dict = {"http": http(model, Path(folder), books)}
    else:
        engine = Engine(case, model, Path(folder))
        found = {"start_s": engine.start_s}
        for tried in case.tried:
            found[tried] = globals()[tried](engine, books, case)
            print(name, tried, json.dumps(found[tried]), file=sys.stderr, flush=True)
    from importlib.metadata import distributions

    import torch
    import transformers

    vllm = {each.name: each.version for each in distributions() if each.name.startswith("vllm")}
    found["cpu_s"] = time.process_time() - begun
    found["versions"] = {
        **vllm,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    Path(result).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
