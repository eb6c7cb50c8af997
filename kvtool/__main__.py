"""`python -m kvtool`, which is how torchrun and accelerate start the command."""

from kvtool.cli.main import run

run()
