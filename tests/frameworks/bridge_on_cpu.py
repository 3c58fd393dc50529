"""The example of Megatron Bridge on CPUs, with Megatron's local layers. A script.

Transformer Engine, which Bridge imports whatever the layers are, is names alone (`te_names`). Arguments: Bridge's
folder, the example, the model.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_magi.mcore import install

FOLDER, EXAMPLE, NAME = sys.argv[1:4]
sys.argv = sys.argv[:1]
sys.path += [FOLDER, str(Path(__file__).parent)]
install()

import te_names  # noqa: E402
import torch.distributed as dist  # noqa: E402

LOCAL = {
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "moe_permute_fusion": False,
    "moe_grouped_gemm": False,
    "persist_layer_norm": False,
    "use_cpu_initialization": True,
}


if __name__ == "__main__":
    te_names.provide()
    train = runpy.run_path(EXAMPLE)["train"]
    from megatron.bridge.models.gpt_provider import local_layer_spec

    dist.init_process_group("gloo")
    train(NAME, transformer_layer_spec=local_layer_spec, **LOCAL)
