// What kernels of the backward in parts share: one for dK and dV, one for dQ.
//
// Of a head of 256 columns, the gradients of 64 keys fill half of an SM's registers, and nothing is left for dQ;
// and of any head, sums of dQ in device memory depend on the order in which SMs come. So dK with dV, and dQ, are
// computed by two kernels, which both need S and dP: seven products instead of five. In return gradients stay in
// registers until they are written once, unless a group of query heads is split for the sake of idle SMs.
//
// Compile-time: HEAD_DIM, HEAD_DIM_V, DTYPE (Bf16 or Fp16), SOFTCAP (0 or 1), CAPTURED (0 or 1: mask_numbers.cuh).
#pragma once

#include "../../common/wgmma.cuh"
#include "gradients.cuh"
#include "softmax.cuh"
#include "tiles.cuh"

constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kGroups = 2;  // consumer warpgroups
constexpr int kRows = 64;   // rows of a warpgroup's accumulators
using T = DTYPE;

#include "row_products.cuh"

struct BackwardPartParams {
  TensorMap q, k, v;
#if GATED
  TensorMap k_remote, v_remote;
#endif
  TensorMap dout, dq_map;
  TilePlan plan;       // of keys: the transposed mask; of queries: the mask
  const float* lse;    // [num_heads, stats_row]: times log2 e
  const float* delta;  // [num_heads, stats_row]: negated
  void *dq, *dk, *dv;
  int* counter;                                           // three words, zero before and after
  i64 dq_row, dq_head, dk_row, dk_head, dv_row, dv_head;  // strides, elements
  // num_heads and group count query heads packed together as one, which has as many times the rows, interleaved: the
  // statistics are of these rows, and for keys the plan (load_packed).
  int num_tiles, num_heads, group, stats_row, store;
  int splits;        // of a group of query heads, for keys
  int heads_inner;   // for keys: a block is visited for all query heads before the next block, not head by head
  int head_section;  // for queries: heads that are worked on together, counted likewise
  float scale, scale_log2, softcap_factor;
  int log2_packed;  // see row_tiles.cuh
  int long_blocks;  // for queries: of which the keys and values exceed the L2 cache
#if GATED
  Gate gate;
#endif
};

// The derivative of the softcap where its tanh is x; 0 where x is -inf, that is hidden.
DEVICE float softcap_slope(float x) { return fmaxf(fmaf(-x, x, 1.f), 0.f); }
