"""What racecheck makes of the barriers that the Hopper kernels use, in a kernel too small to hide a mistake.

Usage: compute-sanitizer --tool racecheck python -m benchmarks.sanitize.ring MODE     (0 to 5, see sanitize/ring.cu)
"""

from __future__ import annotations

import argparse
import ctypes

import torch

from megatron_magi.cuda import build as hopper_build
from megatron_magi.cuda import driver as hopper_driver

ROUNDS, WORDS = 16, 32


class RingParams(ctypes.Structure):
    _fields_ = [("into", ctypes.c_void_p), ("out", ctypes.c_void_p), ("rounds", ctypes.c_int32)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", type=int, choices=range(6))
    mode = parser.parse_args().mode
    image, _ = hopper_build.compile_kernel("../benchmarks/sanitize/ring.cu", (f"MODE={mode}",))
    device = torch.device("cuda", 0)
    kernel = hopper_driver.load_kernel(image, "ffa_sanitize_ring", 96, 0, device)
    given = torch.randint(0, 1000, (ROUNDS, WORDS), dtype=torch.int32, device=device)
    out = torch.empty(WORDS, dtype=torch.int32, device=device)
    params = RingParams(given.data_ptr(), out.data_ptr(), ROUNDS)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    config = hopper_driver.LaunchConfig(kernel, 1)
    config.stream = torch.cuda.current_stream().cuda_stream
    kernel.launch(ctypes.addressof(config), pointers)
    torch.cuda.synchronize()
    print("mode", mode, "right" if torch.equal(out, given.sum(0, dtype=torch.int32)) else "WRONG SUMS")


if __name__ == "__main__":
    main()
