"""`python -m kvtool`, which is how torchrun and accelerate start the command.

With `--version` alone it says more than the command does, which answers without importing torch.
"""

import sys

from kvtool.cli.main import run

if sys.argv[1:] == ["--version"]:
    from kvtool.cli.versions import versions

    sys.stdout.write(versions())
else:
    run()
