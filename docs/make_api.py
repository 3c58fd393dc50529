"""Writes docs/api.md from signatures and docstrings: ``python docs/make_api.py``. A test holds the page to it."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import megatron_magi

ROOT = Path(megatron_magi.__file__).resolve().parents[1]
HEAD = """# API

For those who write their own training loop and look up a function.

The public functions and classes, each linked to its source. Docstrings have all arguments, shapes, dtypes and errors:
`help(megatron_magi.api.calc_attn)`. Further names, for code written for MagiAttention, are in
[migration](migration.md#names-that-are-here); the fields of `MagiConfig` are in
[configuration](configuration.md#magiconfig). (This page is made by `python docs/make_api.py`.)
"""
# Title, page that explains it, and by module the names in the order of the page.
SECTIONS = [
    ("Context-parallel attention", "own_loop.md", {"megatron_magi.api": [
        "magi_attn_flex_key", "magi_attn_varlen_key", "make_flex_key_for_new_mask_after_dispatch",
        "make_varlen_key_for_new_mask_after_dispatch", "dispatch", "get_position_ids", "calc_attn",
        "calc_block_sparse_attn", "calc_index_sparse_attn", "calc_latent_sparse_attn", "selected_key_share",
        "undispatch", "roll", "clear_cache", "make_static_key", "StaticKey", "AttnForwardMeta"]}),
    ("Attention on one device", "own_loop.md#attention-on-one-device", {
        "megatron_magi": [
            "slice_attention", "block_sparse_attention", "index_sparse_attention", "latent_sparse_attention"],
        "megatron_magi.api": ["flex_flash_attn_func"]}),
    ("Masks", "masks.md", {
        "megatron_magi.mask": ["AttnMask"],
        "megatron_magi.mask.builders": [
            "full", "causal", "varlen", "from_eod_positions", "sliding_window", "block_causal", "prefix_lm",
            "prefix_tree", "block_sparse"]}),
    ("Plans and batches that are planned ahead", "own_loop.md#planning-ahead", {
        "megatron_magi": ["make_plan", "distributed_attention"],
        "megatron_magi.plan": ["given_dispatch"],
        "megatron_magi.attention": ["AttnShape", "prepare_batch", "PreparedBatch", "StaticPlans"]}),
    ("Packing and rollouts", "rollouts.md", {"megatron_magi.packing": [
        "BalancedSampler", "causal_area", "causal_work", "make_prefix_tree", "PrefixTree"]}),
    ("Megatron", "megatron.md", {
        "megatron_magi.mcore": ["install"], "megatron_magi.mcore.entry": ["main"],
        "megatron_magi.mcore.core_models": ["with_magi", "attend_by_plan", "dispatcher_of"],
        "megatron_magi.mcore.tree_segments": ["key_of_segments"],
        "megatron_magi.mcore.dataset_writer": ["write_indexed_dataset"],
        "megatron_magi.mask.microbatch": ["Microbatch"]}),
    ("transformers and accelerate", "hugging_face.md", {"megatron_magi.hf": [
        "MagiParallelismConfig", "context_parallel", "shard_batch", "Shard", "log_probs"]}),
    ("Under MagiAttention's names", "migration.md", {"megatron_magi": ["as_magi_attention"],
        "megatron_magi.extensions": ["dsa_attn_func"]}),
    ("Sinks for other kernels", "own_loop.md#sinks-for-other-kernels", {"megatron_magi.extensions": [
        "sdpa_func_with_sink", "attention_with_sink", "Kernel"]}),
    ("Profiling", "troubleshooting.md#profile-mode", {"megatron_magi.profiling": ["reset", "summary", "rows"]}),
]  # fmt: skip


INTERNAL = {
    "packed", "bands_untightened", "digest", "layer_mask", "rank_plan", "table_backend",
    "cp_enabled", "non_dp_dim_names", "dp_shard_cp_dim_names", "dp_cp_dim_names",
}  # fmt: skip
"""Members of classes that other parts of the package use."""


def arguments(function: object) -> str:
    """Arguments of a function with their defaults, without types."""
    described = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in described.parameters.values() if p.name != "self"]
    return re.sub(r"<class '(\w+)'>", r"\1", str(inspect.Signature(parameters)))


def first_sentence(thing: object) -> str:
    """Of a docstring, in one line."""
    paragraph = " ".join(inspect.getdoc(thing).split("\n\n")[0].split())
    return paragraph.replace("``", "`").replace("|", "\\|")


def members(kind: type) -> Iterator[str]:
    """Public methods and properties that a class itself defines and documents."""
    for name, member in vars(kind).items():
        if name.startswith("_") or name in INTERNAL or not inspect.getdoc(member):
            continue
        if isinstance(member, property | functools.cached_property):
            yield name
        elif isinstance(member, classmethod | staticmethod) or inspect.isfunction(member):
            yield name + arguments(getattr(kind, name))


def row(name: str, thing: object) -> str:
    """A row of a table: the name with its source, the arguments, the docstring's beginning, a class's members."""
    source = Path(inspect.getsourcefile(inspect.unwrap(thing))).resolve().relative_to(ROOT).as_posix()
    text = first_sentence(thing)
    if inspect.isclass(thing):
        further = ", ".join(f"`{member}`" for member in members(thing))
        return f"| [`{name}`](../{source}) | {text}{' Has ' + further + '.' if further else ''} |"
    return f"| [`{name}`](../{source}) | `{arguments(thing)}` {text} |"


def page() -> str:
    """The text of docs/api.md."""
    parts = [HEAD]
    for title, explained, modules in SECTIONS:
        parts.append(f"## {title}\n\n[Explained here]({explained}).\n")
        for module, names in modules.items():
            things = importlib.import_module(module)
            rows = [row(name, getattr(things, name)) for name in names]
            parts.append("\n".join([f"| `{module}` | |", "| --- | --- |", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (Path(__file__).parent / "api.md").write_text(page())
