"""Every picture of the documents is drawn anew, by the command that made it, from the results that it shows."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks._lib.results import RESULTS

ROOT = RESULTS.parents[1]
CURRENT = RESULTS / "current"
ATTENTION = ("kernels.bench_attention", "--plot", "attention.csv", "attention_windows.csv", "attention_again.csv",
             "--charts", "OUT")  # fmt: skip
SPARSE = ("kernels.bench_sparse", "--draw")
COMMANDS = {
    "attention_forward": ATTENTION, "attention_backward": ATTENTION, "attention_summary": ATTENTION,
    "sparse_lists": (*SPARSE, "sparse_blocks.csv", "sparse_index.csv"), "sparse_masks": (*SPARSE, "sparse_masks.csv"),
    "group_collective_2gpu": (
        "collectives.bench_group_collective", "--csv", "group_collective_2gpu.csv", "--chart", "PNG"
    ),
    "layouts_predicted": (
        "planning.simulate", "--layouts", "--from", "layouts_predicted.csv", "--chart", "PNG"
    ),
    "simulate": ("planning.simulate", "--from", "simulate.csv", "--chart", "PNG"),
    "predict_2gpu": ("planning.bench_predict", "--from", "predict_2gpu.csv", "--chart", "PNG"),
    **{
        name: ("distributed.bench_methods", "--plot", f"{name}.csv", "--chart", "PNG")
        for name in ("distributed_ways_2gpu", "distributed_ways_4gpu", "distributed_ways_8gpu")
    },
    **{
        name: ("training.bench_speed", "--draw", f"{name}.csv", "PNG")
        for name in ("training_speed_h200_2gpu", "training_speed_4gpu")
    },
}  # fmt: skip
"""Modules of `benchmarks` and arguments by picture; files are those of the results."""
ELSEWHERE = {
    "docs/images/idea.png": "tests/test_documentation.py", "docs/images/dispatch.png": "tests/test_documentation.py",
    "docs/images/tiles.png": "tests/test_documentation.py", "docs/images/timeline.png": "tests/test_documentation.py",
    "docs/images/convergence.png": "tests/pretrain_scripts/test_convergence_curves.py",
}  # fmt: skip
"""Pictures that other tests draw; the gallery of masks too."""


def test_every_picture_of_a_page_is_drawn_by_a_test() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    shown = {
        (page.parent / target).resolve().relative_to(ROOT).as_posix()
        for page in pages
        for target in re.findall(r"\]\(([^)#]*\.png)\)", page.read_text())
    }
    gallery = {picture for picture in shown if picture.startswith("docs/images/masks/")}
    assert shown - gallery == {f"benchmarks/results/current/{name}.png" for name in COMMANDS} | set(ELSEWHERE)
    assert all((ROOT / name).exists() for name in (*shown, *ELSEWHERE.values()))


@pytest.mark.parametrize("name", ["attention_summary", *(name for name in COMMANDS if COMMANDS[name] != ATTENTION)])
def test_a_picture_is_drawn_from_its_results(name: str, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install megatron_magi[demo]")
    module, *arguments = COMMANDS[name]
    for argument in (a for a in arguments if a.endswith(".csv")):
        shutil.copy(CURRENT / argument, tmp_path)  # a command may draw beside the first
    places = {"OUT": str(tmp_path), "PNG": str(tmp_path / f"{name}.png")}
    arguments = [str(tmp_path / a) if a.endswith(".csv") else places.get(a, a) for a in arguments]
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    ends = pytest.raises(SystemExit) if name == "predict_2gpu" else nullcontext()  # it exits with its judgement
    with ends:
        importlib.import_module(f"benchmarks.{module}").main()
    same = [n for n, command in COMMANDS.items() if command == COMMANDS[name]]
    assert all((tmp_path / f"{n}.png").stat().st_size > 10_000 for n in same)
