"""The example of Megatron Bridge on CPUs. A script. Arguments: Bridge's folder, the example, the model."""

from __future__ import annotations

import runpy
import sys

from megatron_magi.mcore import install

FOLDER, EXAMPLE, NAME = sys.argv[1:4]
sys.argv = sys.argv[:1]
sys.path.append(FOLDER)
install()

import torch.distributed as dist  # noqa: E402

from tests.frameworks.bridge_layers import LOCAL, stand_in  # noqa: E402

if __name__ == "__main__":
    stand_in()
    train = runpy.run_path(EXAMPLE)["train"]
    from megatron.bridge.models.gpt_provider import local_layer_spec

    dist.init_process_group("gloo")
    train(NAME, transformer_layer_spec=local_layer_spec, **LOCAL)
