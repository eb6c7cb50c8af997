"""Find the policies that installed packages add to kvtool's, by their entry points.

A package declares `[project.entry-points."kvtool.policies"]` with lines `name = "module:Class"`.
Entry points are read when a policy has a name that kvtool does not know, and when all are listed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from kvtool.errors import KvtoolError, UsageError, in_one_line
from kvtool.policies.outside import build_outside
from kvtool.policies.parts import Score
from kvtool.policies.spelling import read_part, split_outside
from kvtool.policies.table import BASES, MODIFIERS, REFUSED, About, Entry, describe_base
from kvtool.policies.table import about as about_known

GROUP = "kvtool.policies"


@dataclass(frozen=True)
class Installed:
    """A name that a package adds.

    Attributes:
        place: of its class, `module:Class`.
        package: its name and version.
    """

    name: str
    place: str
    package: str

    def build(self, arguments: str, *, imports: bool) -> Score:
        """Make the score.

        Raises:
            UsageError: the package declares no class of scores, or one that cannot be made.
        """
        try:
            return build_outside(self.place, arguments, imports=imports)
        except UsageError as error:
            message = f"policy `{self.name}` of package {self.package}: {error}"
            raise UsageError(message) from None


@cache
def installed() -> dict[str, Installed]:
    """Return the names that packages add, in lower case; of two of one name, the first."""
    from importlib.metadata import entry_points

    found: dict[str, Installed] = {}
    for each in entry_points(group=GROUP):
        package = "(unknown)" if each.dist is None else f"{each.dist.name} {each.dist.version}"
        name = each.name.strip().lower()
        found.setdefault(name, Installed(name, "".join(each.value.split()), package))
    return found


def installed_base(name: str) -> Installed | None:
    """Return the policy that a package adds under a name; None where kvtool has one itself."""
    key = name.strip().lower()
    if ":" in key or key in BASES or key in MODIFIERS or key in REFUSED:
        return None
    return installed().get(key)


def placed(policies: str) -> str:
    """Return a policy, or a list of them, with modules and classes in place of installed names.

    >>> placed("h2o(recent=8)+caote, m:Mine")
    'h2o(recent=8)+caote,m:Mine'
    """
    found = []
    for text in split_outside(policies, ","):
        base, *modifiers = split_outside(text.strip(), "+")
        try:
            name, arguments = read_part(base)
        except UsageError:
            return policies
        if (known := installed_base(name)) is not None:
            base = known.place + (f"({arguments})" if arguments else "")
        found.append("+".join([base, *modifiers]))
    return ",".join(found)


def about(name: str) -> About:
    """Find a policy or modifier by its name, also one that a package adds.

    Raises:
        UsageError: there is none of this name.
    """
    known = installed_base(split_outside(name, "+")[0].partition("(")[0])
    if known is None:
        return about_known(name)
    known.build("", imports=True)
    one = about_known(known.place)
    return replace(one, entry=replace(one.entry, name=known.name, origin=known.package))


def describe_installed() -> tuple[list[Entry], list[str]]:
    """List the policies that packages add, and say in a line each which cannot be used."""
    entries, warnings = [], []
    for each in installed().values():
        if installed_base(each.name) is None:
            warnings.append(
                f"policy `{each.name}` of package {each.package} has a name of kvtool's"
            )
            continue
        try:
            base = type(each.build("", imports=True))
            entries.append(replace(describe_base(each.name, base), origin=each.package))
        except KvtoolError as error:
            warnings.append(str(error).splitlines()[0])
        except Exception as error:
            warnings.append(f"policy `{each.name}` of package {each.package}: {in_one_line(error)}")
    return entries, warnings
