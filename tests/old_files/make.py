"""Make the files that later versions have to read, and note what the code that made them does next.

    python -m tests.old_files.make

rewrites `data/`. Only run it where the form of files is to change: what it guards is that files
made by the code of 2026-11-22 (4ae17f3) are still read, and read rightly.
"""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file

from kvtool.cli.main import main

DATA = Path(__file__).parent / "data"
TEXT = (
    "The secret code for falcon: 7429103. The old lamp was near the school. "
    "The secret code for tiger: 55812. A small dog ran."
)
SHORT = TEXT[: TEXT.index(" The secret code for tiger")]
QUESTION = " The secret code for falcon:"

# by name of the file: policy, budget, text, further options; the kept tokens differ a lot, and so
# do the numbers that a policy writes beside it
CACHES: dict[str, tuple[str, int | None, str, tuple[str, ...]]] = {
    "h2o-caote": ("h2o+caote", 20, TEXT, ()),
    "h2o-caote-blocks": ("h2o+caote", 16, TEXT, ("--prefill", "block:7")),
    "roco": ("roco", 14, TEXT, ()),
    "d2o": ("d2o", 14, TEXT, ()),
    "rocketkv": ("rocketkv(window=4,kernel=3)", 16, TEXT, ()),
    "rocketkv-mt": ("rocketkv-mt(window=4,kernel=3)", 16, SHORT, ()),
    "snapkv-ada": ("snapkv(window=4)+ada", 14, TEXT, ()),
    "h2o-ada": ("h2o+ada", 14, TEXT, ()),
    "streaming-cache-positions": ("streaming(positions=cache)", 14, TEXT, ()),
    "h2o-calidrop": ("h2o+calidrop(theta1=0.4,theta2=0.6)", 12, SHORT, ()),
    "snapkv-calidrop": ("snapkv(window=4)+calidrop(store=int8)", 12, SHORT, ()),
    "streaming-cam": ("streaming+cam", 12, TEXT, ()),
    "pyramidinfer": ("pyramidinfer(min_context=2,sinks=1)", 12, TEXT, ()),
    "pyramidkv": ("pyramidkv(window=4)", 12, TEXT, ()),
    "duoattention": ("duoattention", 20, TEXT, ()),
    "sirllm": ("sirllm(sinks=2)", 14, TEXT, ()),
    "quest": ("quest", 12, SHORT, ()),
}
NEW_BEFORE = 5  # tokens generated before the cache is saved
EVAL = (
    *(
        "eval",
        "-q",
        "-t",
        "niah,fidelity",
        "-p",
        "h2o+caote,snapkv(window=4),quest",
        "-b",
        "32,25%",
    ),
    *("--lengths", "192", "--depths", "0,100", "--samples", "1", "--no-plots"),
)


def run(*arguments: str) -> None:
    """Run a command; its exit code must be 0."""
    code = main(arguments)
    if code:
        raise SystemExit(f"kvtool {' '.join(arguments)}: exit code {code}")


def make_cache(name: str, path: Path, scratch: Path) -> None:
    """Compress a text, generate a few tokens, save."""
    policy, budget, text, options = CACHES[name]
    bounded = () if budget is None else ("-b", str(budget))
    run(
        *("generate", "-q", "--prompt", text, "-p", policy, *bounded, *options),
        *("-n", str(NEW_BEFORE), "--save", str(path), "-f", "json", "-o", str(scratch)),
    )


def go_on(path: Path, scratch: Path) -> dict:
    """What a saved cache does next: by itself, and asked a question.

    Returns:
        For each of the two, the tokens, the report without seconds and, by name, dtype, shape and
        sum of the magnitudes of all tensors of the cache as it is saved then.
    """
    found = {}
    for what, options in (("alone", ()), ("asked", ("--prompt", QUESTION))):
        then, told = scratch / "then.safetensors", scratch / "told.json"
        run(
            *("generate", "-q", "--cache", str(path), *options, "-n", "14"),
            *("--save", str(then), "-f", "json", "-o", str(told)),
        )
        document = json.loads(told.read_text())
        found[what] = {
            "token_ids": document["token_ids"],
            "policy": document["policy"],
            "budget": document["budget"],
            "cache": document["cache"],
            "positions": positions(then),
            "tensors": tensors(then),
        }
    return found


def positions(path: Path) -> list:
    """Kept positions by layer and KV head."""
    stored = load_file(path)
    layers = sorted(
        (name for name in stored if name.endswith(".positions")),
        key=lambda name: int(name.split(".")[1]),
    )
    return [stored[name][0].tolist() for name in layers]


def tensors(path: Path) -> dict[str, list]:
    """Dtype, shape and sum of magnitudes by name."""
    return {
        name: [str(tensor.dtype), list(tensor.shape), round(float(tensor.double().abs().sum()), 3)]
        for name, tensor in sorted(load_file(path).items())
    }


def make() -> None:
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir()
    with TemporaryDirectory() as folder:
        scratch = Path(folder)
        expected = {}
        for name in CACHES:
            path = DATA / f"{name}.safetensors"
            make_cache(name, path, scratch / "made.json")
            expected[name] = go_on(path, scratch)
    lines = (f"{json.dumps(name)}: {json.dumps(then)}" for name, then in expected.items())
    (DATA / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    run(
        *("profile", "-q", "--samples", "1", "--tokens", "128", "--decode", "8"),
        *("-o", str(DATA / "profile.yaml")),
    )
    run(
        *("plan-budget", "-q", str(DATA / "profile.yaml"), "-b", "24", "--context", "192"),
        *("-o", str(DATA / "plan.yaml")),
    )
    run(*EVAL, "-o", str(DATA / "run"), "-f", "json")
    for name in ("report.html", ".lock"):  # written, never read
        (DATA / "run" / name).unlink()


if __name__ == "__main__":
    make()
