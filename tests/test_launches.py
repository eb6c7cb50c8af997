"""Launches of a compiled step, in the code that torch's compiler writes for an H200."""

import json
import subprocess
import sys

import pytest

from recipes.benchmarks.launches import BOUNDS, LayerLaunches, find_launches, table
from tests.tiers import first

CODE = """
def call(self, args):
    # Topologically Sorted Source Nodes: [linear_4], Original ATen: [aten.mm]
    extern_kernels.mm(arg0_1, arg1_1, out=buf0)
    # Topologically Sorted Source Nodes: [hidden_states_7, hidden_states_8, add], Original ATen: []
    triton_poi_fused_add_0.run(buf0, 4096, stream=stream0)
    buf1 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf0, arg2_1, arg3_1)
    buf2 = buf1[0]
    assert_size_stride(buf2, (1, 8, 1, 128), (1024, 128, 128, 1), 'torch.ops.aten.flash')
    buf3 = torch.ops.kvtool.attend_and_evict.default(buf2, arg4_1)
    triton_poi_fused_add_1.run(buf3, 4096, stream=stream0)
    buf4.copy_(buf3, False)
    del buf3
    return (buf4, )
"""
MODULE = [sys.executable, "-m", "recipes.benchmarks.launches"]


def test_each_line_that_launches_counts_under_its_kind():
    kinds = [launch.kind for launch in find_launches("triton_not_called.run(x)" + CODE)]
    assert kinds == ["product", "triton", "flash", "flash", "kvtool", "kvtool", "triton", "aten"]
    names = [launch.name for launch in find_launches(CODE)]
    assert names[0] == "mm: linear"
    assert names[1] == "hidden_states add"
    assert names[2:4] == ["_scaled_dot_product_flash_attention"] * 2


def test_operators_count_as_the_kernels_that_they_launch():
    token = "torch.ops.kvtool.decode_token.default(x, by_values={})"
    lines = [token.format(False), token.format(True), "torch.ops.kvtool.page_scores.default(x)"]
    found = [len(find_launches(f"def call(self):\n    buf0 = {line}")) for line in lines]
    assert found == [2, 3, 1]


def test_the_table_shows_each_kind_and_what_there_is():
    line = LayerLaunches("h2o", 512, 1, 3, {"triton": 3}, {"triton a": 1, "triton b": 2})
    assert "| h2o | 3 | 3 |" in table([line])
    assert f"| {BOUNDS['h2o']} |" in table([line])
    assert " 2 triton b" in table([line])


def counted(*arguments):
    run = subprocess.run([*MODULE, "--json", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("policy", first(1, ["h2o", *(each for each in BOUNDS if each != "h2o")]))
def test_a_layer_launches_no_more_than_the_table_allows(policy):
    """With every product inside a Triton kernel."""
    pytest.importorskip("triton")
    (line,) = counted("--policies", policy)
    assert line["total"] <= BOUNDS[policy]
    assert line["total"] == sum(line["counts"].values()) == sum(line["launches"].values())
    assert not any(name.startswith("product: mm") for name in line["launches"])


@pytest.mark.exhaustive
def test_products_of_several_rows_remain_those_of_cublas():
    pytest.importorskip("triton")
    (line,) = counted("--policies", "static", "--rows", "4")
    assert line["counts"]["product"] == 7
    assert line["counts"]["flash"] == 2
