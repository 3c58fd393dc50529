"""The part of the suite that depends on Megatron, under another version of it.

``python tests/megatron_versions.py --version 0.18.2`` installs that megatron-core alone into ``build/megatron`` and
puts it first on ``PYTHONPATH``; ``--tree DIR`` takes a source tree and compiles its dataset helper. ``--out FILE``
writes which feature passed, with the largest relative differences of losses and gradient norms, as JSON; ``--commit``
goes into it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "megatron"
_PARITY, _FEATURE = (
    f"tests/e2e/test_loss_parity.py::test_{name}"
    for name in ("loss_curve_equals_stock_on_one_rank", "feature_at_cp2_equals_stock_on_one_rank")
)
_HYBRID = "tests/e2e/test_hybrid.py::test_loss_curve_equals_stock_on_one_rank"
_PACKED = "tests/e2e/test_sample_packing.py::test_packed_samples_train_as_stock_trains_padded_ones"
_HYBRID_WAYS = "tests/e2e/test_hybrid_ways.py::test_"
_SILENT = "tests/e2e/test_silent_bugs.py::test_"

FEATURES = {
    "seams": "tests/mcore/test_seams.py::test_installed_megatron_is_as_the_table_says",
    "repairs": "tests/mcore/test_wheel_repairs.py",
    "arguments refused": "tests/e2e/test_errors.py::test_command_line_is_refused[attention_dropout]",
    "CP 1, MLA under TP 2": f"{_SILENT}rotary_key_of_latent_attention_gets_the_gradient_of_all_heads"
    "[queries-sequence_parallel]",
    "CP 2": f"{_PARITY}[cp2]",
    "CP 3, odd length": f"{_PARITY}[cp3_length_that_does_not_divide]",
    "CP 4": f"{_PARITY}[cp4]",
    "CP 2, two sequences": f"{_PARITY}[cp2_two_sequences_a_microbatch]",
    "TP 2, SP": f"{_PARITY}[tp2_sp_cp2]",
    "PP 2": f"{_PARITY}[pp2_cp2]",
    "interleaved PP 2, full recomputation": f"{_PARITY}[interleaved_pp2_cp2_full_recompute]",
    "DP 2, distributed optimizer": f"{_PARITY}[dp2_cp2_distributed_optimizer_overlapped]",
    "per-token loss": f"{_PARITY}[cp2_per_token_loss]",
    "windows": f"{_FEATURE}[windows_in_every_other_layer]",
    "sinks": "tests/e2e/test_loss_parity.py::test_large_sink_trains_as_on_one_rank[cp2]",
    "MTP": f"{_FEATURE}[multi_token_prediction]",
    "MLA": f"{_FEATURE}[mla]",
    "experts, EP 2": f"{_FEATURE}[experts_ep2]",
    "expert bias, losses of the router, padding": f"{_SILENT}padding_is_no_token_to_any_loss_of_the_router[per_token]",
    "YaRN": f"{_FEATURE}[yarn]",
    "packed documents, MTP": f"{_SILENT}multi_token_prediction_in_packed_documents_is_that_of_one_rank",
    "conversations": f"{_SILENT}evaluations_of_conversations_are_means_over_tokens_not_over_ranks",
    "checkpoint, CP 2 to stock": "tests/e2e/test_checkpoint.py::test_training_resumes_under_another_parallelism"
    "[cp2_to_stock]",
    "packed samples, CP 2": f"{_PACKED}[dp2_cp2]",
    "packed samples, PP 2": f"{_PACKED}[pp2_cp2]",
    "hybrid, CP 2": f"{_HYBRID}[cp2]",
    "hybrid, experts": f"{_HYBRID}[cp2_experts]",
    "hybrid, MTP": f"{_HYBRID}[multi_token_prediction]",
    "hybrid, MLA": f"{_HYBRID}[latent_attention]",
    "hybrid, interleaved PP 2, full recomputation": f"{_HYBRID}[interleaved_pp2_cp2_full_recompute]",
    "hybrid, masks by layer, as a GPT": f"{_HYBRID_WAYS}masks_of_layers_count_all_letters_and_train_as_those_of_a_gpt",
    "hybrid, from a checkpoint of a GPT": f"{_HYBRID_WAYS}checkpoint_of_a_gpt_goes_on_as_a_hybrid_model[dense]",
}
"""Of each feature its test."""

ABSENT = {
    "0.18": {
        "YaRN": "no --yarn-original-max-position-embeddings",
        "packed documents, MTP": "no --dataloader-inter-document-masking",
        "hybrid, MLA": "no letter for it",
        "hybrid, interleaved PP 2, full recomputation": "Megatron's builder refuses it",
        "hybrid, from a checkpoint of a GPT": "Megatron does not translate it while it loads",
    },
}
"""Of a release, what it does not have, or what does not work with it, and why."""


def main() -> int:
    """Exit status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--version", help="of megatron-core on PyPI")
    source.add_argument("--tree", type=Path, help="a source tree: the folder that has the folder megatron")
    parser.add_argument("--commit", default="", help="of the source tree, for the results")
    parser.add_argument("--out", type=Path, help="a file for results")
    options, rest = parser.parse_known_args()
    tree = compiled(options.tree.resolve()) if options.tree else install(options.version)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    version = found_version(environment)
    if options.version and version != options.version:
        raise RuntimeError(f"asked for megatron-core {options.version}, an import would take {version}")
    absent = next((rows for release, rows in ABSENT.items() if version.startswith(f"{release}.")), {})
    tests = {feature: test for feature, test in FEATURES.items() if feature not in absent}
    BUILD.mkdir(parents=True, exist_ok=True)
    report = BUILD / f"report-{version}.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        "junit_family=xunit1",
        f"--junit-xml={report}",
        *tests.values(),
        *rest,
    ]
    print(f"megatron-core {version} in {tree}", flush=True)
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if options.out:
        cells = {**{feature: f"not run: {why}" for feature, why in absent.items()}, **read(report, tests)}
        about = {
            "version": version,
            "commit": options.commit,
            "date": f"{datetime.date.today()}",
            "device": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
            "command": " ".join(["python", *sys.argv]),
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**about, "features": cells}, indent=1) + "\n")
    return status


def install(version: str) -> Path:
    """The folder with that megatron-core and nothing else."""
    folder = BUILD / version
    if not (folder / "megatron").exists():
        fetch(f"megatron-core=={version}", folder)
    return folder


def fetch(requirement: str, folder: Path) -> None:
    """Installs one package, without what it needs."""
    own = ROOT / ".uv" / "bin" / "uv"
    uv = str(own) if own.exists() else shutil.which("uv")
    if uv is None:
        raise RuntimeError("uv: not found; run make setup")
    options = ["--no-deps", "--python", sys.executable, "--target", str(folder)]
    subprocess.run([uv, "pip", "install", "-q", *options, requirement], check=True)


def compiled(tree: Path) -> Path:
    """A source tree, with its dataset helper."""
    folder = tree / "megatron" / "core" / "datasets"
    if not list(folder.glob("helpers_cpp*.so")):
        fetch("pybind11", BUILD / "pybind11")
        headers = f"-I{sysconfig.get_path('include')} -I{BUILD / 'pybind11' / 'pybind11' / 'include'}"
        output = folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
        options = ["-O3", "-shared", "-std=c++17", "-fPIC", *headers.split(), "-o", str(output)]
        subprocess.run(["c++", *options, str(folder / "helpers.cpp")], check=True)
    return tree


def found_version(environment: dict[str, str]) -> str:
    """The version that the tests will import."""
    code = "from megatron_magi.mcore.versions import found_version; print(found_version())"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


def read(report: Path, tests: dict[str, str]) -> dict[str, str]:
    """Of each feature ``passed`` or ``failed``, and figures, from pytest's report."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    cells = {}
    for feature, test in tests.items():
        path, _, name = test.partition("::")
        module = path.removesuffix(".py").replace("/", ".")
        mine = [c for c in cases if c.get("classname") == module and (not name or c.get("name") == name)]
        bad = any(c.find(kind) is not None for c in mine for kind in ("failure", "error"))
        skipped = any(c.find("skipped") is not None for c in mine)
        figures = [f"{p.get('name')} {p.get('value')}" for c in mine for p in c.iter("property")]
        state = "failed" if bad or not mine else "passed" if not skipped else "passed or skipped"
        cells[feature] = ", ".join([state, *figures])
    return cells


if __name__ == "__main__":
    sys.exit(main())
