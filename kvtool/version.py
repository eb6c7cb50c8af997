"""The version of the package, where every subpackage can read it."""

VERSION = "0.2.0.dev0"
