"""Megatron Bridge builds models that attend by plan: the example trains on two ranks as on one.

The wheel lies in a folder of its own (`make test-frameworks`): its dependencies are not installed.
"""

import re
from pathlib import Path

import pytest

import megatron_magi
from megatron_magi.testing.megatron_launch import launch
from tests.frameworks.page import blocks

ROOT = Path(megatron_magi.__file__).parents[1]
FOLDER = ROOT / "build/frameworks/megatron_bridge/site-packages"
EXAMPLE = ROOT / "examples/megatron_bridge.py"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="megatron-bridge is not there: make test-frameworks")


def test_the_example_has_forty_lines():
    assert len([line for line in EXAMPLE.read_text().splitlines() if line]) <= 40


def test_the_lines_of_the_page_are_the_examples():
    page = blocks("megatron.md", "## Without the command line: Megatron Bridge, verl")[0]
    lines = {line.partition("  #")[0].strip() for line in page.splitlines()} - {"..."}
    assert len(lines) >= 7 and lines <= {line.strip() for line in EXAMPLE.read_text().splitlines()}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_models_of_bridge_train_on_two_ranks_as_on_one(name):
    script = str(Path(__file__).with_name("bridge_on_cpu.py"))
    losses = []
    for num_ranks in (1, 2):
        run = launch([str(FOLDER), str(EXAMPLE), name], num_ranks, script=script)
        assert (
            f"> attention by megatron_magi: torch (correct, but slow), context parallelism {num_ranks}"
            in run.outputs[0]
        )
        losses.append([float(loss) for loss in re.findall(r"tokens: loss (\S+)", run.outputs[0])])
    assert len(set(losses[0])) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
