"""What layers keep beside their slots: a line for each feature, and one for when they are cut."""

from __future__ import annotations

from kvtool.cache.features.calidrop import Calibration
from kvtool.cache.features.deferred_cut import Deferred
from kvtool.cache.features.head_budgets import HeadBudgets
from kvtool.cache.features.merge_memory import MergeMemory
from kvtool.cache.features.parents import Parents
from kvtool.cache.features.queries import LastQueries, Moments, QueryWindow
from kvtool.cache.features.rope_shift import RopeShift
from kvtool.cache.features.sparse_index import SparseIndex
from kvtool.cache.slots.cut_schedule import CutSchedule
from kvtool.cache.slots.part import LayerSite, Part

FEATURES: tuple[type[Part], ...] = (
    Calibration,
    MergeMemory,
    SparseIndex,
    HeadBudgets,
    Deferred,
    LastQueries,
    CutSchedule,
    QueryWindow,
    RopeShift,
    Moments,
    Parents,
)


def make_parts(site: LayerSite) -> list[Part]:
    """Make what the features of a layer's policy keep beside its slots."""
    made = [feature.make(site) for feature in FEATURES]
    return [part for part in made if part is not None]
