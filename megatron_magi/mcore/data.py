"""The data sets of a GPT: indexed, blended, mock, fill-in-the-middle, or conversations (SFT)."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_magi.mcore import seams


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Megatron's data set configuration for a command line."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    options: dict[str, Any] = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": get_tokenizer(),
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "object_storage_cache_path": args.object_storage_cache_path,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "allow_ambiguous_pad_tokens": args.allow_ambiguous_pad_tokens,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "sequences_per_dataset": sequences_per_dataset,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        # Conversations are padded to multiples of twice this; plans need no such padding.
        "context_parallel_size": 1 if args.magi_attention else args.context_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "sequence_parallel_size": args.tensor_model_parallel_size if args.sequence_parallel else 0,
        "hybrid_context_parallel": args.hybrid_context_parallel,
        "inter_document_masking": args.dataloader_inter_document_masking,
    }
    options = seams.named("core.datasets.gpt_dataset:GPTDatasetConfig", **options)
    if not args.fim_data:
        return GPTDatasetConfig(**options)
    from megatron.training.datasets.fim_dataset import GPTFIMDatasetConfig

    tokens = {name: getattr(args, f"fim_{name}_token") for name in ("prefix", "middle", "suffix", "pad", "eod")}
    same = ("fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix")
    return GPTFIMDatasetConfig(**options, fim_extra_tokens=tokens, **{name: getattr(args, name) for name in same})


def _dataset_class(args: Namespace) -> type:
    if args.sft:
        from megatron.training.datasets.sft_dataset import SFTDataset

        return SFTDataset
    if args.mock_data:
        return MockGPTDataset
    if args.fim_data:
        from megatron.training.datasets.fim_dataset import GPTFIMDataset

        return GPTFIMDataset
    return GPTDataset


def make_dataset_provider(
    is_built_on_rank: Callable[[int | None], bool],
    prepare: Callable[[], None] | None = None,
    own: Callable[[Sequence[int]], Sequence[Any]] | None = None,
) -> Callable:
    """The function that Megatron's trainer asks for the data sets.

    Args:
        is_built_on_rank: from the virtual pipeline stage, does this rank read batches?
        prepare: called before, on all ranks together: the one place that is given to us between the
            set-up of process groups and the first step, of which pipeline stages have their own.
        own: called instead of building what the command line names, on the ranks that read batches.
    """

    def provide(num_samples: Sequence[int], vp_stage: int | None = None) -> list[Any]:
        args = get_args()
        if prepare is not None:
            prepare()
        if own is not None:
            return _checked(own(list(num_samples)), args) if is_built_on_rank(vp_stage) else [None, None, None]
        print_rank_0("> building data sets")
        builder = BlendedMegatronDatasetBuilder(
            _dataset_class(args), list(num_samples), lambda: is_built_on_rank(vp_stage), dataset_config(args)
        )
        return builder.build()

    # Megatron's mark of a provider that is called on every rank.
    provide.is_distributed = True
    return provide


def _checked(found: Any, args: Namespace) -> list[Any]:
    """What a user's function returned.

    Raises:
        ValueError: not three data sets that have a length, without which Megatron's loaders cannot shuffle and resume.
    """
    if not isinstance(found, Sequence) or len(found) != 3:
        what = f"{len(found)}" if isinstance(found, Sequence) else f"a {type(found).__name__}"
        raise ValueError(f"dataset_provider: expected training, validation and test data sets (or None), got {what}")
    for data_set in found:
        if data_set is not None and not hasattr(data_set, "__len__") and args.dataloader_type != "external":
            raise ValueError(
                f"dataset_provider: a {type(data_set).__name__} has no length; return a data set with __len__ and "
                "__getitem__, or give --dataloader-type external and return iterators of microbatches"
            )
    return list(found)
