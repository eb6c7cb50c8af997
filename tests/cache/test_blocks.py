"""Which of several open `kvtool.compressed` blocks a call of `generate` belongs to."""

import asyncio
import contextlib
import contextvars
import threading

import pytest
from transformers import DynamicCache

import kvtool
from tests.models_for_tests import peaky_model, random_ids


@pytest.fixture(scope="module")
def model():
    return peaky_model("llama")


@pytest.fixture(autouse=True)
def no_block_is_left(model):
    yield
    assert "generate" not in vars(model)


IDS = random_ids(30)


def ran(model) -> str:
    """The policy and budget that a call has run."""
    out = model.generate(IDS, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    cache = out.past_key_values
    if isinstance(cache, DynamicCache):
        return "nothing"
    return f"{cache.policy}@{cache.budget}"


def together(*coroutines):
    async def gather():
        return await asyncio.gather(*coroutines, return_exceptions=True)

    return asyncio.run(gather())


async def turns(count=3):
    for _ in range(count):
        await asyncio.sleep(0)


async def ask(model, policy, budget, call=None):
    with kvtool.compressed(model, policy, budget):
        await turns()
        found = ran(model) if call is None else await call()
        await turns()
        return found


def test_coroutines_run_the_policy_of_their_own_block(model):
    asked = [("h2o", 16), ("streaming", 8), ("tova", 9)]
    found = together(*(ask(model, *each) for each in asked))
    assert found == [f"{policy}@{budget}" for policy, budget in asked]


def test_blocks_inside_blocks_of_coroutines(model):
    async def nested(outer, inner):
        with kvtool.compressed(model, outer, 16):
            found = [await ask(model, inner, 8)]
            await turns()
            task = asyncio.ensure_future(ask_here(model))
            return [*found, ran(model), await task]

    async def ask_here(model):
        await turns(1)
        return ran(model)

    found = together(nested("h2o", "tova"), nested("streaming", "roco"))
    assert found == [
        ["tova@8", "h2o@16", "h2o@16"],
        ["roco@8", "streaming@16", "streaming@16"],
    ]


def test_to_thread_takes_the_block_along_and_an_executor_is_refused(model):
    def in_thread():
        return asyncio.to_thread(ran, model)

    def in_executor():
        return asyncio.get_running_loop().run_in_executor(None, ran, model)

    def with_context():
        copied = contextvars.copy_context()
        return asyncio.get_running_loop().run_in_executor(None, copied.run, ran, model)

    asked = [("h2o", 16, in_thread), ("streaming", 8, in_thread), ("tova", 9, with_context)]
    assert together(*(ask(model, *each) for each in asked)) == ["h2o@16", "streaming@8", "tova@9"]

    done = []

    async def both():  # blocks stay open until both calls have ended
        try:
            return await in_executor()
        except kvtool.UsageError as error:
            return error
        finally:
            done.append(True)
            while len(done) < 2:
                await asyncio.sleep(0.001)

    for error in together(ask(model, "h2o", 16, both), ask(model, "streaming", 8, both)):
        assert isinstance(error, kvtool.UsageError)
        assert "h2o at 16, streaming at 8" in str(error)
        assert "asyncio.to_thread" in error.hint
    same = together(ask(model, "h2o", 16, in_executor), ask(model, "h2o", 16, in_executor))
    assert same == ["h2o@16", "h2o@16"]
    assert together(ask(model, "h2o", 16, in_executor)) == ["h2o@16"]


def test_a_coroutine_outside_of_any_block_is_not_given_the_one_of_another(model):
    async def outside():
        await turns(1)
        return ran(model)

    inside, refused = together(ask(model, "h2o", 16), outside())
    assert inside == "h2o@16"
    assert isinstance(refused, kvtool.UsageError)
    assert "outside of the open kvtool.compressed block" in str(refused)
    assert "by h2o at 16: its own has ended, or is another task's" in str(refused)

    async def wants_all():
        with kvtool.compressed(model, "full"):
            return await outside()

    assert together(ask(model, "h2o", 16), wants_all()) == ["h2o@16", "full@None"]


def test_a_task_that_outlives_its_block_gets_no_other(model):
    async def late(begin):
        await begin.wait()
        return ran(model)

    async def main():
        begin = asyncio.Event()
        with kvtool.compressed(model, "h2o", 16):
            task, other = asyncio.create_task(late(begin)), asyncio.create_task(late(begin))
            thread = asyncio.create_task(asyncio.to_thread(waiting.wait, 10))
            await turns()
        with kvtool.compressed(model, "tova", 9):
            begin.set()
            with pytest.raises(kvtool.UsageError, match="tova at 9"):
                await task
            await asyncio.wait([other])
            waiting.set()
            await thread
        return other.exception()

    waiting = threading.Event()
    assert isinstance(asyncio.run(main()), kvtool.UsageError)

    async def alone():
        begin = asyncio.Event()
        with kvtool.compressed(model, "h2o", 16):
            task = asyncio.create_task(late(begin))
            await turns()
        begin.set()
        return await task

    assert asyncio.run(alone()) == "nothing"
    kvtool.attach(model, policy="roco", budget=11)
    try:
        assert asyncio.run(alone()) == "roco@11"
    finally:
        kvtool.detach(model)


def test_a_thread_that_outlives_its_block_is_not_given_another(model):
    found, go_on = [], threading.Event()

    def late():
        go_on.wait(10)
        try:
            found.append(ran(model))
        except kvtool.UsageError as error:
            found.append(str(error))

    with kvtool.compressed(model, "h2o", 16):
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(late,))
        thread.start()
    with kvtool.compressed(model, "tova", 9):
        go_on.set()
        thread.join()
    assert "outside of the open kvtool.compressed block" in found[0]


def test_a_thread_gets_the_innermost_of_blocks_inside_blocks(model):
    found = []
    with kvtool.compressed(model, "h2o", 16), kvtool.compressed(model, "tova", 9):
        thread = threading.Thread(target=lambda: found.append(ran(model)))
        thread.start()
        thread.join()
    assert found == ["tova@9"]


# ---- generators, which share the context of whoever drives them


def answers(model, policy, budget, count=2):
    with kvtool.compressed(model, policy, budget):
        for _ in range(count):
            yield ran(model)


def test_generators_in_turn_run_the_policy_of_their_own_block(model):
    pairs = list(zip(answers(model, "h2o", 16), answers(model, "tova", 9), strict=True))
    assert pairs == [("h2o@16", "tova@9")] * 2


def test_beside_suspended_generators(model):
    first, second = answers(model, "h2o", 16), answers(model, "tova", 9)
    next(first)
    with kvtool.compressed(model, "roco", 11):
        next(second)
        assert ran(model) == "roco@11"
    with pytest.raises(kvtool.UsageError, match="h2o at 16, tova at 9"):
        ran(model)
    second.close()
    assert ran(model) == "h2o@16"
    assert next(first) == "h2o@16"
    first.close()


def test_context_managers_of_ones_own(model):
    @contextlib.contextmanager
    def small():
        with kvtool.compressed(model, "tova", 9):
            yield

    @contextlib.asynccontextmanager
    async def small_too():
        with small():
            yield

    with kvtool.compressed(model, "h2o", 16):
        with small():
            assert ran(model) == "tova@9"
        with contextlib.ExitStack() as stack:
            stack.enter_context(small())
            assert ran(model) == "tova@9"
        assert ran(model) == "h2o@16"

    async def main():
        with kvtool.compressed(model, "h2o", 16):
            async with small_too():
                await turns()
                inner = ran(model)
            return inner, ran(model)

    assert together(main(), ask(model, "roco", 11)) == [("tova@9", "h2o@16"), "roco@11"]

    @kvtool.compressed(model, "streaming", 8)
    def decorated():
        return ran(model)

    assert decorated() == "streaming@8"
