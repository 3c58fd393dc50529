// Prepares the backward: transposes lse and delta to [heads, rows], or for packs of 2, 4 or 8 heads to [packs, rows,
// heads of a pack], and zeroes the sums to which it adds. CAPTURED: if another mask is loaded than the forward read, it
// makes them, and with them all gradients, NaN, and tells the host.
//
// Compile-time: CAPTURED (mask_numbers.cuh), DELTA (0 or 1: also computes delta, see row_dots.cuh; then HEAD_DIM_V,
// DTYPE).

#include "../../common/ptx.cuh"
#include "mask_numbers.cuh"
#include "row_dots.cuh"

#ifndef DELTA
#define DELTA 0
#endif

#if DELTA
using Dots = RowDots<DTYPE, HEAD_DIM_V>;
#endif

// Rows and heads of a thread block. With DELTA fewer heads: more blocks hide the memory latency better.
constexpr int kLog2Rows = 5, kTileRows = 1 << kLog2Rows, kTileHeads = DELTA ? 8 : 32;

struct PreprocessParams {
  const float* lse;
  float* delta;             // input; with DELTA an output, or null
  float* lse_out;           // [packs, stats_row]: times log2 e; or lse and delta, split, 16 bytes a row
  float* delta_out;         // [packs, stats_row]: negated
  float4 *sums, *key_sums;  // to be zeroed
  i64 num_sums, num_key_sums;
  i64 lse_row, lse_head, delta_row, delta_head;
  int num_rows, num_heads, stats_row;  // stats_row: rows with their padding, times the heads of a pack
  int log2_packed;
  float split;     // factor of lse if lse and delta are split into three bf16 terms (SPLIT_STATS); 0: not split
  int concurrent;  // 1: runs concurrently with the preceding kernel and uses none of its results: that kernel started
                   // after all inputs were complete. Kernels that wait for the end of this one wait for both
#if CAPTURED
  const MaskNumbers* numbers;  // num_key_sums is then per tile
  const i64* read;             // MaskNumbers::content when the forward ran
  int* failed;                 // in memory of the host
#endif
#if DELTA
  const u32 *dout, *out;
  i64 dout_row, dout_head, out_row, out_head;  // strides, elements
#endif
};

// Three bf16 terms whose sum has the precision of fp32. Clamped, as inf times the zeros of the other operand is NaN.
DEVICE uint2 split_in_three(float x) {
  x = fminf(fmaxf(x, -3e38f), 3e38f);
  u32 term[3];
  for (int i = 0; i < 3; ++i) {
    term[i] = Bf16::pack(x, 0.f);
    x -= Bf16::low(term[i]);
  }
  return make_uint2(term[0] | term[1] << 16, term[2]);
}

DEVICE void fill_zeros(float4* to, i64 count) {
  const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
    to[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// Whether another mask is loaded than the forward read.
DEVICE bool is_other_mask(const PreprocessParams& p) {
#if CAPTURED
  return *p.read != __ldg(&p.numbers->content);
#else
  return false;
#endif
}

// One thread block: kTileRows rows of kTileHeads heads.
DEVICE void transpose_stats(const PreprocessParams& p, int row0, int head0) {
  const bool is_other = is_other_mask(p);
  __shared__ float2 tile[kTileRows][kTileHeads + 1];
  for (int i = threadIdx.x; i < kTileRows * kTileHeads; i += 256) {
    const int row = row0 + i / kTileHeads, head = head0 + i % kTileHeads;
    float2 v = make_float2(0.f, 0.f);
    if (row < p.num_rows && head < p.num_heads) {
      const float lse = p.lse[row * p.lse_row + head * p.lse_head];
      // lse is -inf (a row without visible keys) or uninitialized: any finite value will do, as all its logits are
      // -inf. lse is inf (an infinite sink): all probabilities are 0.
      v.x = lse > -1e30f && lse < 1e30f ? lse * 1.4426950408889634f : lse > 0.f ? __int_as_float(0x7f800000) : 0.f;
#if !DELTA
      v.y = -p.delta[row * p.delta_row + head * p.delta_head];
#endif
    }
    tile[i / kTileHeads][i % kTileHeads] = v;
  }
#if DELTA
  __syncthreads();
  const u32 heads = min(kTileHeads, p.num_heads - head0);
  const u32 count = min(kTileRows, max(p.num_rows - row0, 0)) * heads;
  for (u32 begin = 0; begin < count; begin += Dots::kBlockRows)
    Dots::compute(
        {p.dout, p.out, p.dout_row, p.dout_head, p.out_row, p.out_head}, begin, count,
        [&](u32 item, i64& row, i64& head) { row = row0 + item / heads, head = head0 + item % heads; },
        [&](u32 item, float sum) {
          const u32 row = item / heads, head = item % heads;
          tile[row][head].y = -sum;
          if (p.delta) p.delta[(row0 + row) * p.delta_row + (head0 + head) * p.delta_head] = sum;
        });
#endif
  __syncthreads();
  for (int i = threadIdx.x; i < kTileRows * kTileHeads; i += 256) {
    const int pack = i >> kLog2Rows + p.log2_packed, in_pack = i - (pack << kLog2Rows + p.log2_packed);
    const int row = in_pack >> p.log2_packed, head = (pack << p.log2_packed) + in_pack - (row << p.log2_packed);
    if (head0 + head >= p.num_heads) continue;
    const i64 at = static_cast<i64>((head0 >> p.log2_packed) + pack) * p.stats_row + (row0 << p.log2_packed) + in_pack;
    const float lse = is_other ? __int_as_float(0x7fffffff) : tile[row][head].x, delta = tile[row][head].y;
    if (p.split != 0.f) {
      const uint2 b = split_in_three(delta);
      const uint2 a = is_other ? make_uint2(0x7fff7fff, 0x7fff) : split_in_three(p.split * lse);
      reinterpret_cast<uint4*>(p.lse_out)[at] = make_uint4(a.x, a.y | b.x << 16, b.x >> 16 | b.y << 16, 0);
    } else {
      p.lse_out[at] = lse;
      p.delta_out[at] = delta;
    }
  }
}

// Blocks past the last row and head only zero the sums. Reads are issued before the zeros, which would delay them.
extern "C" __global__ void __launch_bounds__(256) ffa_preprocess(const __grid_constant__ PreprocessParams p) {
  if (!p.concurrent) {
    await_earlier_kernels();
    let_next_kernel_start();
  }
  const int tiles = p.stats_row >> kLog2Rows + p.log2_packed;
  const int sections = (p.num_heads + kTileHeads - 1) / kTileHeads;
  const int block = blockIdx.x;
  if (block < tiles * sections) transpose_stats(p, block / sections * kTileRows, block % sections * kTileHeads);
  fill_zeros(p.sums, p.num_sums);
#if CAPTURED
  if (block == 0 && threadIdx.x == 0 && is_other_mask(p)) *static_cast<volatile int*>(p.failed) = 1;
  fill_zeros(p.key_sums, p.num_key_sums * __ldg(&p.numbers->num_split));
#else
  fill_zeros(p.key_sums, p.num_key_sums);
#endif
  if (!p.concurrent) return;
  // TMA of the next kernel reads the statistics and adds to the sums: orders these writes before the async proxy.
  asm volatile("fence.proxy.async;" ::: "memory");
  __threadfence();
  __syncthreads();
  let_next_kernel_start();
  if (blockIdx.x == gridDim.x - 1) await_earlier_kernels();  // one block is enough
}
