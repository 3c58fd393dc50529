// Shared by the two kernels of the backward in parts: backward_keys.cu for dK and dV, backward_queries.cu for dQ.
//
// For head dim 256, dK and dV of 64 keys take half of an SM's registers, which leaves none for dQ. For any head dim, dQ
// accumulated in device memory depends on the order of additions, so it is not deterministic. Here two kernels compute
// dK with dV, and dQ; both need S and dP: seven products instead of five. In return gradients stay in registers until
// they are written, once, unless a group of query heads is split to occupy idle SMs.
#pragma once

#include "tiles.cuh"

struct BackwardPartParams {
  TensorMap q, k, v;
#if STREAM_KV
  TensorMap k_remote, v_remote;
#endif
  TensorMap dout, dq_map;
  TilePlan plan;       // of keys: the transposed mask; of queries: the mask
  const float* lse;    // [num_heads, stats_row]: times log2 e
  const float* delta;  // [num_heads, stats_row]: negated
  void *dq, *dk, *dv;
  int* counter;                                           // two words; zero between launches, see leave()
  i64 dq_row, dq_head, dk_row, dk_head, dv_row, dv_head;  // strides, elements
  // num_heads and group count packed query heads as one, with their rows interleaved (load_packed); lse and delta have
  // these rows, and so has the plan of the kernel for keys.
  int num_tiles, num_heads, group, stats_row, store;
  int splits;        // for keys: parts into which a group of query heads is split
  int heads_inner;   // for keys: 1: each block for all query heads, then the next block; 0: head by head
  int head_section;  // for queries: heads of a section, see section_item(); packed heads count as one
  float scale, scale_log2, softcap_factor;
  int log2_packed;  // see row_tiles.cuh
  int long_blocks;  // for queries: blocks of a segment from which on its keys and values exceed the L2 cache
#if STREAM_KV
  ArrivalBarrier arrival_barrier;
#endif
};

// Derivative of the softcap, given the tanh; 0 for -inf, a masked logit.
DEVICE float softcap_slope(float x) { return fmaxf(fmaf(-x, x, 1.f), 0.f); }
