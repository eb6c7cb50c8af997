"""Answer with llama.cpp, in the environment in which its package is installed.

    PYTHON -I recipes/benchmarks/llama_cpp_side.py SETTINGS

SETTINGS is JSON: the GGUF file, tokens of the context, the type of stored keys and values, threads,
whether a full context drops its older half, and whether flash attention is off. Each line of input
is JSON as well: the tokens of a prompt and how many to decode. It is answered by a line: seconds of
the prompt, milliseconds of a decoded token, and the most memory the process ever held; or why it
was refused. Exits with 3 and the reason in one line where the package cannot be imported. Imports
nothing of kvtool.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

try:
    import xllamacpp as llama
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(3)

KEEP = 4  # tokens at the start that a shift of the context leaves


def start(settings):
    """A server in this process, which reads one prompt at a time and reuses none."""
    params = llama.CommonParams()
    params.model.path = settings["file"]
    params.n_ctx = settings["context"]
    params.n_parallel = 1
    params.cache_type_k = params.cache_type_v = getattr(
        llama.ggml_type, f"GGML_TYPE_{settings['bits'].upper()}"
    )
    params.ctx_shift = settings["shift"]
    if settings["flash"] is False:
        params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_keep = KEEP
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.verbosity = -1
    return llama.Server(params)


def peak_mib():
    """The most memory of this process since it began; `getrusage` would count its parent's."""
    status = Path("/proc/self/status").read_text()
    [kib] = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(kib) / 1024


def answer(server, asked):
    """What a request took."""
    request = {
        "prompt": asked["tokens"],
        "n_predict": asked["new"],
        "ignore_eos": True,
        "temperature": 0,
        "cache_prompt": False,
        "return_tokens": True,
    }
    try:
        given = server.handle_completions(request)
    except RuntimeError as error:
        return {"refused": str(error)}
    given = given if isinstance(given, dict) else json.loads(given)
    if "timings" not in given:
        return {"refused": given["error"]["message"]}
    timings = given["timings"]
    if (timings["prompt_n"], timings["predicted_n"]) != (len(asked["tokens"]), asked["new"]):
        return {"refused": f"read {timings['prompt_n']}, wrote {timings['predicted_n']}"}
    return {
        "prompt_s": timings["prompt_ms"] / 1e3,
        "decode_ms": timings["predicted_per_token_ms"],
        "peak_mib": peak_mib(),
    }


server = start(json.loads(sys.argv[1]))
print(json.dumps({"ready": llama.__version__, "cpu": llama.get_system_info()}), flush=True)
for line in sys.stdin:
    print(json.dumps(answer(server, json.loads(line))), flush=True)
