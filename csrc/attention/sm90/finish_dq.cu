// Turns the sums of dQ, which lie as accumulators do in registers, into the gradient of q: times the softmax scale.
// Compile-time: HEAD_DIM, DTYPE.

#include "tiles.cuh"

using T = DTYPE;
constexpr int kColumns = HEAD_DIM / 2;  // of a warpgroup

enum Store { kStoreHalf = 0, kStoreFloat = 1, kAddFloat = 2, kAddHalf = 3 };

struct FinishParams {
  const float4* sums;  // [num_heads, units of 16 rows, 2 halves, kColumns / 8, 32 threads]
  void* dq;
  i64 dq_row, dq_head;  // strides, elements
  int num_rows, blocks, units, store;
  float scale;
};

// One block: 64 rows of one head.
extern "C" __global__ void __launch_bounds__(256) ffa_finish_dq(const __grid_constant__ FinishParams p) {
  const int thread = threadIdx.x % 128, lane = thread % 32, half = threadIdx.x / 128;
  const int head = blockIdx.x / p.blocks, block = blockIdx.x - head * p.blocks;
  const i64 unit = static_cast<i64>(head) * p.units + block * 4 + thread / 32;
  const float4* sums = p.sums + (unit * 2 + half) * (kColumns / 8 * 32) + lane;
  const int row = block * 64 + thread / 32 * 16 + lane / 4;
  const bool add = p.store >= kAddFloat, wide = p.store == kStoreFloat || p.store == kAddFloat;
#pragma unroll
  for (int g = 0; g < kColumns / 32; ++g) {
    float4 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __ldcs(sums + (4 * g + j) * 32);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool valid = row + 8 * r < p.num_rows;
      const i64 at = (row + 8 * r) * p.dq_row + head * p.dq_head + half * kColumns + 32 * g;
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float a = p.scale * (r ? x[j].z : x[j].x), b = p.scale * (r ? x[j].w : x[j].y);
        const i64 column = at + 8 * j + 2 * (lane % 4);
        if (wide) {
          float2* to = reinterpret_cast<float2*>(static_cast<float*>(p.dq) + column);
          if (valid) *to = add ? make_float2(to->x + a, to->y + b) : make_float2(a, b);
          continue;
        }
        if (add && valid) {
          const u32 old = *reinterpret_cast<const u32*>(static_cast<u16*>(p.dq) + column);
          a += T::low(old), b += T::high(old);
        }
        word[j] = T::pack(a, b);
      }
      if (wide) continue;
      transpose_quad(word, lane);
      if (valid)
        *reinterpret_cast<uint4*>(static_cast<u16*>(p.dq) + at + 8 * (lane % 4)) =
            make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}
