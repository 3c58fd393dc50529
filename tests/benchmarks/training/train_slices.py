"""One step of each slice of a large model, in narrow layers. A script: the prefix of a data set, then what follows."""

import sys
from pathlib import Path

from benchmarks._lib.llama import MODELS, model_args
from benchmarks._lib.trainer import TrainingSession
from benchmarks.training.bench_speed import Run, run_args
from megatron_magi.testing.megatron_launch import device_args

NARROW = {"--hidden-size": 64, "--ffn-hidden-size": 64, "--num-attention-heads": 2, "--num-query-groups": 2,
          "--kv-channels": 32, "--num-workers": 0}  # fmt: skip
NARROW_EXPERTS = {"--num-experts": 16, "--moe-ffn-hidden-size": 32}

if __name__ == "__main__":
    session = TrainingSession(keeps_groups=True)
    data, *others = sys.argv[1:]
    for name, model in MODELS.items():
        if not name.endswith("_2_layers"):
            continue
        narrow = {**NARROW, **(NARROW_EXPERTS if model.experts else {})}
        args = [*model_args(128, Path(data), 1, model), *run_args(Run("documents", 64, "magi", model)), *device_args()]
        numbers = [str(item) for pair in narrow.items() for item in pair]
        training = session.run([*args, *numbers, "--no-bias-swiglu-fusion", *others])
        print(f"slice {name} {len(training.step_ms)} steps, losses", *training.losses.values(), flush=True)
