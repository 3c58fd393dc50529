"""What the Hopper kernels cost on an H100 and an H200, for predictions; and the sizes by which they are chosen.

Like the numbers of `megatron_magi.backends.sm90.tuning`, sizes were fitted on an H200. This module needs no torch.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_magi.cost_model import KernelCosts, Rates

KERNELS = KernelCosts(
    num_sms=132,
    tail=0.31,
    forward_tile=(128, 128),
    tall_forward_tile=(192, 64),
    tall_tile_keys={(64, 64): (100, 100), (128, 128): (0, 4000)},
    key_tile=128,
    query_block=64,
    dq_tile=128,
    dq_block=96,
    most_packed_heads=8,
    short_rows=4096,
    separate_dq_packed=((256 << 20, 800), (128 << 20, 480), (64 << 20, 200)),
    separate_dq=((256 << 20, 650), (128 << 20, 450)),
    most_forward_bytes=64 << 20,
    stage_tflops=500.0,
    stage_latency_us=40.0,
)
"""One launch up to 64 MB: on 4 H100s it is faster than stages with up to 30 MB, and takes 4 to 8 % longer with 100 and
400 MB (`one_launch_4gpu.csv`)."""

H100 = Rates(
    device="H100",
    forward_tflops=763.0,
    backward_tflops=621.0,
    tile_columns=94.6,
    tile_rows=2.09,
    forward_us=34.0,
    backward_us=16.1,
    memory_gbytes_per_s=2900.0,
    collective_us=37.1,
    gbytes_per_s=250.0,
    far_collective_us=146.0,
    far_gbytes_per_s=50.0,
    ranks_per_node=8,
    hidden=0.455,
    host_forward_us=115.0,
    host_backward_us=180.0,
    host_stage_forward_us=215.0,
    host_stage_backward_us=610.0,
    host_one_way_us=115.0,
)
"""Memory: measured by `calibrate` on 2 H100s. Bytes inside a node: by bench_group_collective.py of
benchmarks/collectives on 8. The host: by bench_new_masks.py of benchmarks/distributed on two. Between nodes: by
assumption, a link of 400 Gbit/s a GPU. The others: fitted to the steps in predict_2gpu.csv and
distributed_ways_{2,4,8}gpu.csv, of H100s."""

H200 = replace(H100, device="H200")
"""An H100's: with these the steps of 4 H200s in benchmarks/results/current/distributed_4gpu.csv are predicted."""
