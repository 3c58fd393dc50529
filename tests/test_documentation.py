"""The documentation's examples run, and its links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

import megatron_magi

ROOT = Path(megatron_magi.__file__).parents[1]
PAGES = ["README.md", "docs/user_guide.md", "docs/migration.md", "docs/environment.md", "CONTRIBUTING.md"]
HF_PAGES = ["docs/hugging_face.md", "docs/rollouts.md"]


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def run_blocks(rank, num_ranks, page):
    """All blocks of a page in one namespace, as a reader would type them."""
    torch.manual_seed(0)
    names = {"__name__": "example"}
    for block in python_blocks(page):
        exec(compile(block, page, "exec"), names)
    return sorted(names)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)])
def test_examples_run_on_two_ranks(ranks, page):
    names = ranks(2, run_blocks, page)
    assert "plan" in names[0] or "stats" in names[0]


def run_pages(rank, num_ranks, pages):
    return [run_blocks(rank, num_ranks, page) for page in pages]


@pytest.mark.ranks(2)
def test_examples_with_transformers_run_on_two_ranks(ranks):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")
    assert all("loss" in names for pages in ranks(2, run_pages, HF_PAGES) for names in pages)


@pytest.mark.parametrize("page", PAGES + HF_PAGES)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target


def test_every_builder_is_in_the_user_guide():
    from megatron_magi.mask import builders

    page = (ROOT / "docs/user_guide.md").read_text()
    small = {"cu_seqlens_from_eod", "window_slices"}
    assert [name for name in builders.__all__ if name not in small and f"`{name}`" not in page] == []
