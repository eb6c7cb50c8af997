"""The version of the package, where every subpackage can read it."""

VERSION = "0.1.0"
