"""Every kind of input that is tried."""

from tests.fuzz.caches import DamagedCaches, MetadataAlone, SealedCaches
from tests.fuzz.documents import Plans, Profiles, Recipes, Sources, TurnFiles
from tests.fuzz.fields import Lines, PlanFields, ProfileFields, RecipeFields, RunFields
from tests.fuzz.policies import Flags, Policies, Sizes
from tests.fuzz.runs import RunFolders

KINDS = (
    Policies,
    Sizes,
    Flags,
    Sources,
    Recipes,
    Plans,
    Profiles,
    TurnFiles,
    DamagedCaches,
    MetadataAlone,
    SealedCaches,
    RunFolders,
    PlanFields,
    ProfileFields,
    RecipeFields,
    Lines,
    RunFields,
)
