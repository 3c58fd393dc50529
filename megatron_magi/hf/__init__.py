"""Hugging Face: ``attn_implementation="magi"`` for models of transformers, context parallelism in the Trainer.

The only package that imports transformers and accelerate; importing it registers the attention (`registration`).
`parallel` is context parallelism in a loop, accelerate and the Trainer; `shard` is a batch over ranks.
"""

import importlib

try:
    importlib.import_module("transformers")
    importlib.import_module("accelerate")
except ImportError as error:
    raise ImportError(
        f"megatron_magi.hf: needs transformers and accelerate; pip install '.[hf]' in a checkout: {error}"
    ) from error

from megatron_magi.hf.parallel import MagiParallelismConfig, context_parallel
from megatron_magi.hf.registration import register
from megatron_magi.hf.rollouts import log_probs
from megatron_magi.hf.shard import Shard, shard_batch

__all__ = ["MagiParallelismConfig", "Shard", "context_parallel", "log_probs", "register", "shard_batch"]

register()
