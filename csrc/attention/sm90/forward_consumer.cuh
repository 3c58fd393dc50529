// The main loop of a consumer warpgroup of the forward, of dense and of sparse attention: for each work item S = Q K^T,
// online softmax, out += P V over its blocks of keys. The first scores of the next item are computed while the output
// is written.
#pragma once

#include "row_products.cuh"
#include "softmax.cuh"
#include "tiles.cuh"

// Kernel says how the kernels differ:
//   Element, kHeadDim, kHeadDimV, kWidth: the element type, head dims, and keys of a block;
//   kGroups, kKStages, kVStages, kQStages: consumer warpgroups; buffers of keys, of values, of queries;
//   kBytesK, kBytesV, kBytesQ: of a buffer; of the queries of a warpgroup;
//   kLast, kEnd: flags of an item's last block, and of what follows all items, whose scores are computed but not used;
//   kGathersKeys: keys and values are gathered by threads, not loaded by TMA;
//   kStagesOutput: if stages_output(p), the output is staged in the buffer of its queries;
//   Rows, tiles(p): rows of a thread, and what they are made of;
//   num_items(p): never negative, which the compiler does not know;
//   k_full(s), k_empty(s), q_barrier(stage, warpgroup): mbarriers of keys; index of that of queries;
//   flags(s, stage), first_row(s, stage), head_rows(s, stage): of the block in a buffer of keys, and of its item;
//   mask, finish: softcap and mask; the epilogue of an item.
template <typename Kernel, typename Params, typename Shared>
DEVICE void attend(const Params& p, Shared& s, int warpgroup) {
  using T = typename Kernel::Element;
  constexpr int kHeadDim = Kernel::kHeadDim, kHeadDimV = Kernel::kHeadDimV, kWidth = Kernel::kWidth;
  const int lane = threadIdx.x % 32;
  const typename Kernel::Rows own_rows(Kernel::tiles(p), warpgroup);
  u32 leads = lane == 0;
  opaque(leads);
  auto release = [&](u32 barrier) {
    if (leads) barrier_arrive(barrier);
  };
  PipelineState<Kernel::kKStages> k_stage;
  PipelineState<Kernel::kVStages> v_stage;
  PipelineState<Kernel::kQStages> q_stage;
  // 32-bit address arithmetic, which stays in uniform registers.
  auto nth = [](const void* first, u32 bytes, int index) { return smem_address(first) + index * bytes; };
  int flags;  // of the block whose scores were issued last
  float scores[kWidth / 2];
  auto wait_rows = [](u32 barrier, u32 parity) {
    barrier_wait(barrier, parity);
    if (Kernel::kGathersKeys) fence_async_proxy();
  };
  auto wait_k = [&] { wait_rows(nth(Kernel::k_full(s), 8, k_stage.index), k_stage.parity); };
  auto wait_v = [&] { wait_rows(nth(s.v_full, 8, v_stage.index), v_stage.parity); };
  auto wait_q = [&] { barrier_wait(nth(s.q_full, 8, Kernel::q_barrier(q_stage.index, warpgroup)), q_stage.parity); };
  auto release_k = [&] {
    release(nth(Kernel::k_empty(s), 8, k_stage.index));
    k_stage.advance();
  };
  auto release_v = [&] {
    release(nth(s.v_empty, 8, v_stage.index));
    v_stage.advance();
  };
  auto queries = [&] { return nth(s.q, Kernel::kBytesQ, q_stage.index * Kernel::kGroups + warpgroup); };
  auto keys = [&] { return nth(s.k, Kernel::kBytesK, k_stage.index); };
  auto values = [&] { return Operand(nth(s.v, Kernel::kBytesV, v_stage.index), kWidth * kPanelRowBytes); };
  auto mask = [&](float (&x)[kWidth / 2]) { Kernel::mask(p, s, x, flags, k_stage.index, own_rows, warpgroup, lane); };
  auto again = [&](float (&x)[kWidth / 2]) {
    recompute_scores<T, kHeadDim, kWidth>(x, queries(), keys(),
                                          threadIdx.x % kWarpgroupThreads / kWarpThreads * 16 + lane / 4, lane);
    mask(x);
  };
  const bool look = p.max_logits != nullptr;
  const bool stages = Kernel::stages_output(p);
  int leaving = -1;  // stage of queries that is still in use, possibly by the TMA store of the output; -1: none
  auto release_q = [&] {
    if (leaving < 0) return;
    if (lane == 0) bulk_wait_read();
    __syncwarp();
    release(nth(s.q_empty, 8, Kernel::q_barrier(leaving, warpgroup)));
    leaving = -1;
  };

  wait_k();
  wait_q();
  issue_scores<T, kHeadDim, kWidth>(scores, Operand(queries()), Operand(keys()));
  __syncwarp();
  flags = uniform(Kernel::flags(s, k_stage.index));
  wgmma_wait<0>();
  fence_operand(scores);
  while (!(flags & Kernel::kEnd)) {
    // Here the scores of the item's first block are complete.
    const int first_row = Kernel::first_row(s, k_stage.index), head_rows = Kernel::head_rows(s, k_stage.index);
    __syncwarp();
    float out[kHeadDimV / 2], rescale[2];
    u32 probs[kWidth / 4];
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) out[i] = 0.f;
    Softmax softmax;
    softmax.reset();
    mask(scores);
    softmax.update(scores, p.scale_log2, rescale, look, again);
    release_k();
    if (Kernel::kStagesOutput) release_q();
    pack_pairs<T>(probs, scores);
    const Operand q(queries());
    while (true) {
      // kLast always ends the loop. As the loop's condition, the compiler would rotate the loop and duplicate the test,
      // after which ptxas runs out of registers and serializes the wgmmas.
      if (flags & Kernel::kLast) {
        if (Kernel::num_items(p) >= 0) break;
        flags = uniform(flags + 1);
      }
      const Operand k(keys()), v = values();
      wait_k();
      issue_scores<T, kHeadDim, kWidth>(scores, q, k);
      wait_v();
      issue_weighted<T, kHeadDimV, kWidth>(out, probs, v);
      flags = uniform(Kernel::flags(s, k_stage.index));
      wgmma_wait<1>();
      fence_operand(scores);
      mask(scores);
      const bool grown = softmax.update(scores, p.scale_log2, rescale, look, again);
      order_before_wait(softmax.sum[0] + softmax.sum[1]);
      release_k();
      wgmma_wait<0>();
      fence_operand(out);
      fence_operand(probs);
      release_v();
      if (grown) {
#pragma unroll
        for (int i = 0; i < kHeadDimV / 2; ++i) out[i] *= rescale[(i >> 1) & 1];
      }
      pack_pairs<T>(probs, scores);
    }
    // Each warp stages its output in the rows of its own queries, which only its own part of a wgmma reads. Values that
    // differ between warps go through `uniform`: after branches that may diverge, ptxas would not keep indices of
    // stages and descriptors in uniform registers.
    u32 staging = 0;
    if constexpr (Kernel::kStagesOutput) {
      const bool staged = uniform(stages && own_rows.warp_within(p, head_rows >> 16));
      staging = staged ? queries() + uniform(threadIdx.x % kWarpgroupThreads / kWarpThreads) * 16 * kPanelRowBytes : 0;
      leaving = q_stage.index;
      if (!staging) release_q();
    } else {
      release(nth(s.q_empty, 8, Kernel::q_barrier(q_stage.index, warpgroup)));
    }
    q_stage.advance();
    const Operand v = values();
    wait_v();
    issue_weighted<T, kHeadDimV, kWidth>(out, probs, v);
    const Operand next_q(queries()), next_k(keys());
    wait_k();
    wait_q();
    issue_scores<T, kHeadDim, kWidth>(scores, next_q, next_k);
    flags = uniform(Kernel::flags(s, k_stage.index));
    wgmma_wait<1>();
    fence_operand(out);
    fence_operand(probs);
    release_v();
    Kernel::finish(p, out, softmax, staging, own_rows, first_row, head_rows, lane);
    wgmma_wait<0>();
    fence_operand(scores);
  }
  if (Kernel::kStagesOutput && lane == 0) bulk_wait_read();
}
