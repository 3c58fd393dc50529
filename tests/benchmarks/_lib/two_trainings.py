"""Two trainings of stock Megatron in one process, the second with more layers of experts. A script."""

import sys

from benchmarks._lib.trainer import TrainingSession

if __name__ == "__main__":
    session, argv = TrainingSession(keeps_groups=True), sys.argv[1:]
    for layers in ("1", "2"):
        print("losses", *session.run([*argv, "--num-layers", layers]).losses.values(), flush=True)
