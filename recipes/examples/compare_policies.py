"""Compare policies on a text of your own: how close does each stay to the full cache's answer?

    python recipes/examples/compare_policies.py                 # built-in texts
    python recipes/examples/compare_policies.py TEXT.txt MODEL  # yours, cut to 1024 tokens

prints

    policy@budget    agreement  of full
    full                  1.00    100%
    streaming@128         0.39     13%
    streaming@256         0.56     26%
    snapkv@128            0.70     15%
    snapkv@256            0.80     29%
    h2o@128               0.64     13%
    h2o@256               0.93     26%
    h2o+caote@128         0.66     13%
    h2o+caote@256         0.95     26%
    roco@128              0.80     13%
    roco@256              0.94     26%
"""

from __future__ import annotations

import sys
from tempfile import TemporaryDirectory

import kvtool

POLICIES = ("streaming", "snapkv", "h2o", "h2o+caote", "roco")


def compare(text: str | None, model: str | None, folder: str) -> None:
    """Print the share of the full cache's answer that each policy expects, token by token."""
    results = kvtool.evaluate(
        model,
        folder,
        tasks="fidelity",
        data={} if text is None else {"fidelity": text},
        policies=POLICIES,
        budgets=[128, 256],
        lengths=1024,
        samples=4 if text is None else 1,
    )
    print("policy@budget    agreement  of full")
    for result in results.results:
        held = result.cost.kv_bytes / result.cost.full_bytes
        print(f"{result.variant:16} {result.value:9.2f} {held:7.0%}")


def main() -> None:
    """Take the text and the model of the command line; without a text, some that are built in."""
    text, model = [*sys.argv[1:3], None, None][:2]
    with TemporaryDirectory() as folder:
        compare(text, model, folder)


if __name__ == "__main__":
    main()
