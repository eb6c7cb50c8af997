"""Compare policies on a text of your own: how close does each stay to the full cache's answer?

    python recipes/examples/compare_policies.py                 # a text made here
    python recipes/examples/compare_policies.py TEXT.txt MODEL  # yours, cut to 1024 tokens

prints

    policy@budget    agreement  of full
    full                  1.00    100%
    streaming@128         0.88     13%
    streaming@256         0.88     25%
    snapkv@128            0.98     19%
    snapkv@256            1.00     31%
    h2o@128               0.94     13%
    h2o@256               0.98     25%
    h2o+caote@128         0.97     13%
    h2o+caote@256         1.00     25%
    roco@128              0.98     13%
    roco@256              1.00     25%
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from compress_a_book import write_book

import kvtool

POLICIES = ("streaming", "snapkv", "h2o", "h2o+caote", "roco")


def compare(text: Path, model: str | None, folder: Path) -> None:
    """Print the share of the full cache's answer that each policy expects, token by token."""
    results = kvtool.evaluate(
        model,
        folder,
        tasks="fidelity",
        data={"fidelity": str(text)},
        policies=POLICIES,
        budgets=[128, 256],
        lengths=1024,
        samples=1,
    )
    print("policy@budget    agreement  of full")
    for result in results.results:
        held = result.cost.kv_bytes / result.cost.full_bytes
        print(f"{result.arm:16} {result.value:9.2f} {held:7.0%}")


def main() -> None:
    """Take the text and the model of the command line, or make a text."""
    with TemporaryDirectory() as folder:
        text, model = Path(folder) / "text.txt", None
        if len(sys.argv) > 1:
            text = Path(sys.argv[1])
            model = sys.argv[2] if len(sys.argv) > 2 else None
        else:
            text.write_text(write_book(), encoding="utf-8")
        compare(text, model, Path(folder) / "run")


if __name__ == "__main__":
    main()
