"""The ways that a plan lists: where they are to run, and the command of each."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.calls.plan_settings import PlanSettings
from kvtool.documents.plan import PlanDocument
from kvtool.documents.ways import Device, Way
from kvtool.errors import UsageError
from kvtool.model_shape import has_key_biases
from kvtool.planning.bytes import Text
from kvtool.planning.losses import Losses, packaged
from kvtool.planning.machine import advice, remedies
from kvtool.planning.parameters import BITS, Bits, weights_bytes
from kvtool.planning.plan import PlannableLayers
from kvtool.planning.ways import Room, list_ways
from kvtool.policies.grammar import parse_policy
from kvtool.policies.policy import Policy
from kvtool.sizes import Budget, bytes_in_words

if TYPE_CHECKING:
    from kvtool.documents.memory import ModelShape
    from kvtool.model_shape import LayerShape


@dataclass(frozen=True)
class WaysRun:
    """The ways of one request: where they run, and what their order rests on."""

    settings: PlanSettings
    room: Room
    losses: Losses

    def ways(self) -> list[Way]:
        """List them."""
        return list_ways(self.room, self.losses, self._spell)

    def device(self) -> Device | None:
        """Return the device that is planned for, None for none in particular."""
        room = self.room
        if room.memory is None:
            return None
        return Device(memory=room.memory, weights=room.weights_bytes)

    def placed(self, plan: PlanDocument) -> PlanDocument:
        """Return a plan with its device in it."""
        return plan.model_copy(update={"device": self.device()})

    def listed(self, plan: PlanDocument, ways: list[Way]) -> PlanDocument:
        """Return a plan with its device and the ways in it."""
        more = {"ways": ways, "ways_source": self.losses.source}
        return self.placed(plan).model_copy(update=more)

    def best(self, ways: list[Way]) -> tuple[Policy, Budget | None]:
        """Return the policy and budget of the first way; None: it keeps everything.

        Raises:
            UsageError: none fits.
        """
        if not ways or not ways[0].fits:
            raise self.refusal(parse_policy("keydiff"))
        first = ways[0]
        policy = parse_policy(first.policy, imports=False)
        if not policy.takes_budget:
            return policy, None
        return policy, Budget(tokens=first.reads or first.tokens)

    def budget(self, policy: Policy) -> Budget | None:
        """Return the largest budget of a policy on the device; None: it keeps everything.

        Raises:
            UsageError: it does not fit.
        """
        tokens = self.room.budget(policy)
        if tokens is None:
            raise self.refusal(policy)
        return Budget(tokens=tokens) if policy.takes_budget else None

    def check(self, policy: Policy, tokens: int) -> None:
        """Refuse a budget that does not fit on the device.

        Raises:
            UsageError: it does not.
        """
        room = self.room
        if room.memory is not None and room.least_peak(policy, tokens) > room.memory:
            raise self.refusal(policy, tokens)

    def refusal(self, policy: Policy, tokens: int | None = None) -> UsageError:
        """Say by how much a policy does not fit on the device, and what would."""
        room = self.room
        tokens = tokens or min(policy.min_budget, room.text.prompt)
        run = room.run(policy, tokens, "block")
        needs = run.needs(room.bits)
        there = f"{bytes_in_words(room.weights_bytes)} of {bytes_in_words(room.memory or 0)}"
        said = advice(needs, remedies(run, room.bits))
        return UsageError(f"the weights take {there}, and `{policy}` {said}")

    def _spell(self, policy: Policy, tokens: int | None, prefill: str) -> str:
        settings = self.settings
        words = ["kvtool", "generate"]
        given = {
            "-m": settings.model,
            "--revision": settings.revision,
            "--dtype": settings.dtype,
            "--device": settings.device,
            "--device-map": settings.device_map,
            "--quantize": self.room.bits,
            "-p": str(policy),
            "-b": None if tokens is None else str(tokens),
            "--prefill": prefill if prefill == "block" else None,
            "-n": self.room.text.new or None,
        }
        for flag, value in given.items():
            words += [] if value is None else [flag, str(value)]
        return shlex.join([*words, *settings.trusting()])


def find_ways(
    settings: PlanSettings,
    model: ModelShape,
    layers: list[LayerShape | None],
    config: Any,
    text: Text,
    *,
    size: int | None,
    losses: Losses | None = None,
) -> WaysRun:
    """Return the ways to run a model where the settings say.

    Args:
        config: of the model.
        size: bytes of the cache.
        losses: what their order rests on; None: the package's own.

    Raises:
        UsageError: a memory is given, and the model's weights cannot be counted; a model without a
            layer whose budget is free.
    """
    PlannableLayers.of(model, text.prompt, layers)  # refuses a model without free layers
    memory, dtype = settings.device_memory, model.dtype or "auto"
    bits = settings.quantize
    known: dict[Bits | None, int] = {}
    if memory is not None:
        known = _weights(settings, config, dtype)
        if bits not in known:
            raise UsageError(
                f"--memory: the weights of `{model.id}` cannot be counted from its configuration",
                hint="--bytes SIZE plans for the cache alone",
            )
    room = Room(config, dtype, layers, text, size, memory, known, bits)
    return WaysRun(settings, room, losses or packaged(key_biases=has_key_biases(config)))


def _weights(settings: PlanSettings, config: Any, dtype: str) -> dict[Bits | None, int]:
    """Return the bytes of the weights by how they are stored, as far as they can be counted."""
    found = {each: weights_bytes(config, dtype, each) for each in (None, *BITS)}
    if all(count is None for count in found.values()):  # no family that is known by its sizes
        from kvtool.models.placement import weight_bytes

        where = settings.checkpoint() if settings.model is not None else {}
        for each in (None, *BITS):
            name = settings.model
            found[each] = weight_bytes(config, dtype, where, bits=each, name=name)
    return {each: count for each, count in found.items() if count is not None}
