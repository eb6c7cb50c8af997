"""The help of a command: panels of options with the usual ones first, and examples."""

from __future__ import annotations

from typing import Any

PANELS: dict[str, tuple[str, ...]] = {
    "Model": ("model", "device", "dtype", "quantize"),
    "Policy and budget": (
        *("policy", "budget", "budgets", "prefill", "allocator", "baseline", "ratio", "bytes"),
        *("curves", "min_tokens", "recommend", "guarantee", "allow_policies"),
    ),
    "Prompt": (
        *("prompt", "prompt_file", "turns", "cache", "system", "chat_template"),
        *("tasks", "lengths", "samples", "depths", "limit", "data", "query_agnostic", "answers"),
        *("max_length", "truncate", "metrics", "tokens", "decode", "context"),
        *("batch", "longest_prompt", "prompts", "memory", "skip_bad"),
    ),
    "Answer": ("max_new_tokens", "temperature", "stop", "compare_full", "compile", "graphs"),
    "Output": (
        *("output", "format", "save", "show", "export_vllm", "export_llamacpp", "to"),
        *("engine_version", "type", "flash_attention", "streams", "plot", "plots", "stream"),
        *("overwrite", "quiet", "progress"),
    ),
}
"""The options of each panel in their order; all others are in the last one."""

_REST = "More"

EXAMPLES: dict[str, tuple[str, ...]] = {
    "generate": (
        "kvtool generate -p h2o+caote",
        'kvtool generate -m smollm2 -p h2o+caote -b 512 --prompt-file book.txt --prompt "Who?"',
        'kvtool generate --cache book.kv.safetensors --prompt "Who killed him?"',
    ),
    "compress": (
        "kvtool compress -p kvzip -b 25% --prompt-file book.txt --save book.kv.safetensors",
        "kvtool compress -p snapkv -b 512 --prompt-file book.txt --save a.safetensors --show -",
        "kvtool compress -p h2o -b 512 --prompt-file book.txt --save a.safetensors --dry-run",
    ),
    "policies": (
        "kvtool policies",
        "kvtool policies h2o+caote",
        "kvtool policies my_package.my_module:MyScore --check",
    ),
    "profile": (
        "kvtool profile -o profile.json",
        "kvtool profile -m smollm2 --samples 2 -o profile.json",
        "kvtool profile --metrics answer_loss -p h2o --data niah -o loss.json",
    ),
    "plan-budget": (
        "kvtool plan-budget -m smollm2 --bytes 64MiB --context 4K -f text",
        "kvtool plan-budget profile.json -b 512 --allocator pyramid -o plan.yaml",
        "kvtool plan-budget -m smollm2 -p h2o --memory 4GiB --context 4K",
    ),
    "eval": (
        "kvtool eval -t niah -p h2o,snapkv -b 64,128 --lengths 512 --samples 4",
        "kvtool eval recipes/quick.yaml -o runs/quick",
        "kvtool eval -t niah -p h2o+caote,h2o -b 64 --compare h2o+caote,h2o --dry-run",
    ),
    "serve": (
        "kvtool serve -p h2o+caote -b 256",
        "kvtool serve -m smollm2 -p snapkv -b 512 --memory 2GiB",
        "kvtool serve --cache book.kv.safetensors --port 9000",
    ),
    "convert": (
        "kvtool convert model.gguf folder",
        "kvtool convert model.gguf folder --dtype float16",
        "kvtool generate -m folder -p h2o",
    ),
    "export": (
        "kvtool export book.kv.safetensors --to vllm --save exported/book.safetensors",
        "kvtool export book.kv.safetensors --to llamacpp --save slots/book.bin",
        "kvtool compress -p h2o --prompt-file book.txt --save a.kv.safetensors --export-vllm out",
    ),
}
"""Commands that a reader of a help may copy."""


def write_options(parameters: list[Any], context: Any, formatter: Any) -> None:
    """Write arguments, and options by panel."""
    rows: dict[str, list[tuple[str, str]]] = {}
    places = {name: (panel, i) for panel, names in PANELS.items() for i, name in enumerate(names)}
    last = (_REST, 0)
    for each in sorted(parameters, key=lambda each: places.get(each.name, last)[1]):
        row = each.get_help_record(context)
        if row is not None:
            argument = each.param_type_name == "argument"
            panel = "Arguments" if argument else places.get(each.name, last)[0]
            rows.setdefault(panel, []).append(row)
    for panel in ("Arguments", *PANELS, _REST):
        if panel in rows:
            with formatter.section(panel):
                formatter.write_dl(rows[panel])


def write_examples(command: str, parameters: list[Any], formatter: Any) -> None:
    """Write the examples of a command, and which variables set defaults."""
    if command in EXAMPLES:
        with formatter.section("Examples"):
            for line in EXAMPLES[command]:
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")
    variables = [each.envvar for each in parameters if getattr(each, "envvar", None)]
    if variables:
        stronger = "Options, recipes and plans"
        if all(each.name != "recipe" for each in parameters):
            stronger = "Options"
        listed = " and ".join(filter(None, [", ".join(variables[:-1]), variables[-1]]))
        formatter.write_paragraph()
        formatter.write_text(f"Defaults come from {listed}. {stronger} override them.")
