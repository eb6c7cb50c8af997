"""Table of the features of layers: a line for each, and one for when layers are cut."""

from __future__ import annotations

import sys

from kvtool.cache.features.cache_part import CachePart, CacheParts
from kvtool.cache.features.calidrop import Calibration
from kvtool.cache.features.cuts import Deferred, HeadBudgets
from kvtool.cache.features.held_queries import HeldQueries
from kvtool.cache.features.merge_memory import MergeMemory
from kvtool.cache.features.queries import LastQueries, Moments, QueryWindow
from kvtool.cache.features.repetition import Repetition
from kvtool.cache.features.rope_shift import RopeShift
from kvtool.cache.features.shown import HiddenNumbers, Parents, Projection
from kvtool.cache.features.sparse_index import SparseIndex
from kvtool.cache.features.surprisal import Surprisals
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import CutSchedule, LayerSite, Part
from kvtool.policies.policy import Policy

FEATURES: tuple[type[Part], ...] = (
    Calibration,
    MergeMemory,
    SparseIndex,
    HeadBudgets,
    Deferred,
    HeldQueries,
    CutSchedule,
    QueryWindow,
    RopeShift,
    Moments,
    Parents,
    Projection,
    HiddenNumbers,
    LastQueries,  # whose blocks may be stored at once, so behind those that look at them
)


OF_CACHES: tuple[type[CachePart], ...] = (Repetition, Surprisals)
"""The features that keep something for all layers of a cache."""


def features_of(policy: Policy) -> list[Part | type[CachePart]]:
    """Return what a policy's features keep in a layer that none of them skips, and in a cache."""
    parts: list[Part | type[CachePart]] = [*make_parts(LayerSite(policy, sys.maxsize))]
    return parts + [feature for feature in OF_CACHES if feature.serves(policy)]


def make_parts(site: LayerSite) -> list[Part]:
    """Make what the features of a layer's policy keep beside its slots."""
    made = [feature.make(site) for feature in FEATURES]
    return [part for part in made if part is not None]


def make_cache_parts(layers: list[SlotLayer], policy: Policy) -> CacheParts:
    """Make what the features of a cache's policy keep for all its layers."""
    made = [feature.make(layers, policy) for feature in OF_CACHES]
    return CacheParts(part for part in made if part is not None)
