// Rows of several tensors that are copied together, with the same row index in each. A few threads share a row.
#pragma once

#include "../common/ptx.cuh"

constexpr int kMaxTensors = 4;
constexpr int kInFlight = 4;  // loads that a thread issues before its first store

struct RowTensors {
  u64 from[kMaxTensors], to[kMaxTensors];                // addresses of row 0
  i64 from_stride[kMaxTensors], to_stride[kMaxTensors];  // bytes
  int units[kMaxTensors];                                // units of a row
  int num_tensors, log2_lanes;                           // lanes: the threads that share a row
};

// Rows of one thread: the first one and the step to the next, and the thread's lane.
struct RowWalk {
  i64 row, step;
  int lane, lanes;
};

DEVICE RowWalk my_rows(int log2_lanes) {
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int lanes = 1 << log2_lanes;
  return {thread >> log2_lanes, static_cast<i64>(gridDim.x) * blockDim.x >> log2_lanes,
          static_cast<int>(threadIdx.x) & (lanes - 1), lanes};
}
