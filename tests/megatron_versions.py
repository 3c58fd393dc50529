"""The part of the suite that depends on Megatron, under another version of it.

``python tests/megatron_versions.py --version 0.18.2`` installs that megatron-core alone into ``build/megatron`` and
puts it first on ``PYTHONPATH``; ``--tree DIR`` takes a source tree and compiles its dataset helper. ``--all`` runs
`FURTHER` too, in about twice the time. ``--out FILE`` writes which feature passed, with the largest relative
differences of losses and gradient norms, as JSON; ``--commit`` goes into it. `table` is what docs/megatron_versions.md
shows of these files.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
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

_LINEAR = "tests/e2e/test_linear_layers.py::test_"
_SPARSE = "tests/e2e/test_sparse_attention.py::test_loss_curve_equals_stock_on_one_rank"
_SCRIPT = "tests/e2e/test_user_script.py::test_"
_CORE = "tests/e2e/test_core_models.py::test_dispatched_microbatches_of_any_length_train_as_stock_on_one_rank"
_SAMPLES = "tests/e2e/test_sample_packing.py::test_"

FURTHER = {
    "hybrid, CP 1": f"{_HYBRID}[cp1]",
    "hybrid, CP 4": f"{_HYBRID}[cp4]",
    "hybrid, experts, CP 1": f"{_HYBRID}[cp1_experts]",
    "hybrid, experts, CP 4": f"{_HYBRID}[cp4_experts]",
    "hybrid, as a GPT": "tests/e2e/test_hybrid.py::test_hybrid_of_attention_and_mlps_trains_as_a_gpt",
    "hybrid, TP 2, SP": f"{_HYBRID}[tp2_sp_cp2]",
    "hybrid, PP 2": f"{_HYBRID}[pp2_cp2]",
    "hybrid, interleaved PP 2, MTP": f"{_HYBRID}[interleaved_pp2_cp2_multi_token_prediction]",
    "hybrid, DP 2, distributed optimizer": f"{_HYBRID}[dp2_cp2_distributed_optimizer_overlapped]",
    "hybrid, experts, EP 2, selective recomputation": f"{_HYBRID}[ep2_cp2_experts_selective_recompute]",
    "hybrid, MTP, per-token loss": f"{_HYBRID}[multi_token_prediction_per_token_loss]",
    "hybrid, windows": f"{_HYBRID}[windows]",
    "hybrid, sinks": f"{_HYBRID}[learnable_sinks]",
    "hybrid, packed parameters made anew by keyword": f"{_HYBRID}[packed_params_made_anew]",
    "hybrid, documents of the data loader": f"{_HYBRID_WAYS}documents_from_the_data_loader_equal_documents_from_eod",
    "hybrid, batches prepared by workers": f"{_HYBRID_WAYS}batches_of_workers_train_bit_by_bit_as_those_planned"
    "_in_the_step",
    "hybrid, checkpoint, CP 2 to stock": f"{_HYBRID_WAYS}training_resumes_under_another_parallelism[cp2_to_stock]",
    "hybrid, experts, from a checkpoint of a GPT": f"{_HYBRID_WAYS}checkpoint_of_a_gpt_goes_on_as_a_hybrid_model"
    "[experts]",
    "Mamba, CP 2": f"{_LINEAR}loss_curve_equals_stock_on_one_rank[mamba_cp2]",
    "gated delta nets, CP 2": f"{_LINEAR}loss_curve_equals_stock_on_one_rank[cp2]",
    "linear layers, documents": f"{_LINEAR}loss_curve_equals_stock_on_one_rank[cp2_documents]",
    "sparse attention, CP 1": f"{_SPARSE}[cp1]",
    "sparse attention, CP 2": f"{_SPARSE}[cp2_full_recompute]",
    "sparse attention, TP 2, SP": f"{_SPARSE}[tp2_sp_cp2]",
    "sparse attention, PP 2": f"{_SPARSE}[pp2_cp2]",
    "sparse attention, GPT": f"{_SPARSE}[gpt_cp2]",
    "packed samples, hybrid, MTP": f"{_SAMPLES}packed_samples_of_a_hybrid_model_with_multi_token_prediction_train_as_"
    "padded_ones",
    "packed samples, interleaved PP 2": f"{_SAMPLES}interleaved_stages_run_packed_samples_as_one_rank_runs_them_padded",
    "a script of one's own": f"{_SCRIPT}own_loss_of_a_script_equals_that_of_one_rank[cp2]",
    "a hybrid model's script of one's own": f"{_SCRIPT}hybrid_model_of_a_script_equals_that_of_one_rank",
    "models without the command line": f"{_CORE}[dense]",
    "models without the command line, experts": f"{_CORE}[experts]",
}
"""More features, which ``--all`` runs."""

ABSENT = {
    "0.18": {
        "YaRN": "no --yarn-original-max-position-embeddings",
        "packed documents, MTP": "no --dataloader-inter-document-masking",
        "hybrid, MLA": "no letter for it",
        "hybrid, interleaved PP 2, full recomputation": "Megatron's builder refuses it",
        "hybrid, from a checkpoint of a GPT": "Megatron does not translate it while it loads",
        "hybrid, interleaved PP 2, MTP": "Megatron's builder refuses it",
        "hybrid, documents of the data loader": "no --dataloader-inter-document-masking",
        "hybrid, batches prepared by workers": "MTP with full recomputation is a TypeError in Megatron",
        "hybrid, experts, from a checkpoint of a GPT": "Megatron does not translate it while it loads",
        **dict.fromkeys(("gated delta nets, CP 2", "linear layers, documents"), "refused: gated delta nets need 0.19"),
        **dict.fromkeys(
            (f"sparse attention, {way}" for way in ("CP 1", "CP 2", "TP 2, SP", "PP 2", "GPT")),
            "refused: it needs 0.19",
        ),
        **dict.fromkeys(
            ("a script of one's own", "a hybrid model's script of one's own"), "the script that is tested is 0.19's"
        ),
    },
}
"""Of a release, what it does not have, or what does not work with it, and why."""


def main() -> int:
    """Exit status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--version", help="of megatron-core on PyPI")
    source.add_argument("--tree", type=Path, help="a source tree: the folder that has the folder megatron")
    parser.add_argument("--all", action="store_true", help="features of FURTHER too")
    parser.add_argument("--commit", default="", help="of the source tree, for the results")
    parser.add_argument("--out", type=Path, help="a file for results")
    options, rest = parser.parse_known_args()
    tree = compiled(options.tree.resolve()) if options.tree else install(options.version)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    version = found_version(environment)
    if options.version and version != options.version:
        raise RuntimeError(f"asked for megatron-core {options.version}, an import would take {version}")
    absent = next((rows for release, rows in ABSENT.items() if version.startswith(f"{release}.")), {})
    features = {**FEATURES, **FURTHER} if options.all else FEATURES
    tests = {feature: test for feature, test in features.items() if feature not in absent}
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
        cells = {
            **{feature: f"not run: {why}" for feature, why in absent.items() if feature in features},
            **read(report, tests),
        }
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


def table(folder: Path = ROOT / "benchmarks" / "results" / "megatron") -> str:
    """The results of all versions as a table in Markdown; what is absent with the reason."""
    found = {path.stem: json.loads(path.read_text())["features"] for path in sorted(folder.glob("*.json"))}
    head = [["feature", *found], ["---"] * (1 + len(found))]
    rows = [[name, *(_cell(features[name]) for features in found.values())] for name in (*FEATURES, *FURTHER)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (*head, *rows))


def _cell(result: str) -> str:
    return re.sub(r"losses (\S+), grad_norms (\S+)", r"\1; \2", result.removeprefix("not run: "))


if __name__ == "__main__":
    sys.exit(main())
