// Turns the sums of dQ into the gradient of q: times the softmax scale.
// Compile-time: HEAD_DIM, DTYPE.
#pragma once

#include "gradients.cuh"

struct FinishParams {
  const float4* sums;  // [num_heads, 2 halves, units] pieces
  void* dq;
  i64 dq_row, dq_head;  // strides, elements
  int num_rows, blocks, units, store;
  float scale;
};

// What a block of 256 threads does: 64 rows of one head.
DEVICE void finish_dq(const FinishParams& p, int number) {
  constexpr int kColumns = HEAD_DIM / 2;  // of a piece
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, half = threadIdx.x / 128;
  const int head = number / p.blocks, block = number - head * p.blocks;
  const i64 piece = (2 * static_cast<i64>(head) + half) * p.units + 4 * block + warp;
  const int row = block * 64 + warp * 16 + lane / 4;
  const bool valid[2] = {row < p.num_rows, row + 8 < p.num_rows};
  finish_piece<DTYPE, kColumns>(p.sums + piece * (kColumns / 8 * 32), p.dq,
                                row * p.dq_row + head * p.dq_head + half * kColumns, p.dq_row, valid, p.store, p.scale,
                                lane);
}
