// Attention over lists of latent keys (MLA with absorbed heads), forward, for sm_90a: values are the first kValues
// elements of keys. A work item is a query with up to 64 of the query heads of a key head, over the keys of its list.
//
// A producer warpgroup gathers 64 keys of the list at a time into one of two buffers (cp.async). Of all blocks of an
// SM, one after another, even ones are in the first buffer and belong to the first consumer warpgroup, odd ones to the
// second: the owner computes S = Q K^T and the softmax, and hands P and the references of its exponentials to the other
// one. Each warpgroup holds half of the columns of the output and adds P V over all blocks, its own and the other's. So
// while one has its softmax, the other one's products and its own with the block before fill the tensor cores.
//
// A buffer has two parts: the owner's half of the values with the elements behind the values, which the owner releases
// with its own P V, and the other half, which the other warpgroup releases while it has its own softmax.
//
// Compile-time: DTYPE (Bf16 or Fp16).

#include "latent_tiles.cuh"

using T = DTYPE;

constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;
static_assert(kProducerRegisters + 2 * kConsumerRegisters == 3 * 168);

struct LatentForwardParams {
  TensorMap q;
  const u16* kv;
  const int* entries;  // of the lists: indices of keys; invalid ones are skipped
  u16* out;
  float* lse;
  float* max_logits;          // [heads], updated by atomic_max_logit; or null
  const float* sink_lse;      // or null
  i64 entry_row, entry_list;  // strides of entries between queries, and between lists: 0 if key heads share them
  i64 kv_row, kv_head, out_row, out_head, lse_row, lse_head, sink_row, sink_head;  // strides, elements
  int topk, num_keys;
  int num_items, heads_kv, group, parts;  // group: query heads of a key head; parts: items of these
  float scale_log2, logit_scale;
};

struct Shared {
  alignas(kSwizzleAtomBytes) u16 q[kPanels][64][kPanel];
  u16 k[2][kPanels][kWidth][kPanel];
  u16 p[64][kPanel];     // of the last block; its next writer has read it
  float reference[64];   // of p, likewise
  float sums[2][2][64];  // of exponentials, by item's parity and warpgroup
  alignas(16) Item item;
  u32 seen[2][2];  // bits of visible keys of a buffer
  u64 q_full, q_empty, p_full[2];
  u64 full[2][2], empty[2][2];  // of a buffer's parts
};

// ---- producer ----

// Eight threads copy a row's part in a panel; a thread has rows t, t + 16, t + 32 and t + 48, with the same swizzle.
struct Gather {
  static constexpr int kRows = 4, kStep = kWidth / kRows;
  const int row, chunk;
  const u16* at[kRows];
  int index[kRows];

  DEVICE explicit Gather(int thread) : row(thread / 8), chunk(thread % 8) {}

  DEVICE void look(const int* list, int count, int block) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int entry = block * kWidth + row + i * kStep;
      index[i] = entry < count ? __ldg(list + entry) : -1;
    }
  }

  DEVICE void aim(const LatentForwardParams& p, const u16* keys) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) at[i] = key_at(keys, index[i], p.num_keys, p.kv_row, chunk * 8);
  }

  template <int kCount>
  DEVICE void copy(u32 buffer, int panel) const {
    const u32 to = buffer + panel * kPanelBytes + row * kPanelRowBytes + ((chunk ^ row % 8) << 4);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const u16* from = at[i] + panel * kPanel;
#pragma unroll
      for (int j = 0; j < kCount; ++j) copy_chunk(to + j * kPanelBytes + i * kStep * kPanelRowBytes, from + j * kPanel);
    }
  }
};

DEVICE Item item_of(const LatentForwardParams& p, int number, int& head_kv) {
  const int part = number % p.parts, rest = number / p.parts;
  head_kv = rest % p.heads_kv;
  return {rest / p.heads_kv, head_kv * p.group + part * 64, min(64, p.group - part * 64), 0};
}

// Called by one thread.
DEVICE void load_queries(const LatentForwardParams& p, Shared& s, const Item& item, u32 parity) {
  const u32 bar = smem_address(&s.q_full);
  barrier_wait(smem_address(&s.q_empty), parity ^ 1);
  s.item = item;
  if (item.blocks == 0) {
    barrier_arrive(bar);
    return;
  }
  barrier_expect_bytes(bar, sizeof(s.q));
#pragma unroll
  for (int i = 0; i < kPanels; ++i) load_box(smem_address(s.q[i]), &p.q, i * kPanel, item.head, item.row, bar);
}

DEVICE void produce(const LatentForwardParams& p, Shared& s, int warp, int lane) {
  Gather gather(warp * kWarpThreads + lane);
  const bool leads = warp == 0 && lane == 0;
  PipelineState<2> buffer;
  u32 q_parity = 0;
  for (int number = blockIdx.x; number < p.num_items; number += gridDim.x, q_parity ^= 1) {
    int head_kv;
    Item item = item_of(p, number, head_kv);
    const int* list = p.entries + item.row * p.entry_row + head_kv * p.entry_list;
    const int count = trimmed(list, p.topk, p.num_keys, lane);
    item.blocks = max(1, (count + kWidth - 1) / kWidth);
    if (leads) load_queries(p, s, item, q_parity);
    __syncwarp();
    const u16* keys = p.kv + head_kv * p.kv_head;
    gather.look(list, count, 0);
    for (int block = 0; block < item.blocks; ++block) {
      gather.aim(p, keys);
      gather.look(list, count, block + 1);
      const int b = buffer.index;
      const u32 smem = smem_address(s.k[b]);
      u32 seen[2] = {0, 0};
      if (warp == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int entry = block * kWidth + i * 32 + lane;
          const int key = entry < count ? __ldg(list + entry) : -1;
          seen[i] = __ballot_sync(0xffffffffu, static_cast<u32>(key) < static_cast<u32>(p.num_keys));
        }
      }
      barrier_wait(smem_address(&s.empty[b][0]), buffer.parity ^ 1);
      if (leads) {
        s.seen[b][0] = seen[0], s.seen[b][1] = seen[1];
        barrier_arrive(smem_address(&s.full[b][0]));
      }
      gather.copy<kHalf>(smem, b * kHalf);
      gather.copy<1>(smem, kBehind);
      copies_arrive(smem_address(&s.full[b][0]));
      barrier_wait(smem_address(&s.empty[b][1]), buffer.parity ^ 1);
      gather.copy<kHalf>(smem, (b ^ 1) * kHalf);
      copies_arrive(smem_address(&s.full[b][1]));
      buffer.advance();
    }
  }
  if (leads) load_queries(p, s, {0, 0, 0, 0}, q_parity);
}

// ---- consumers ----

// Makes exponentials and sums relative to the other warpgroup's references, which are never lower. Returns whether the
// output must be multiplied by `rescale`; uniform in a warp.
DEVICE bool adopt(Softmax& softmax, const float (&reference)[64], int row, float (&rescale)[2]) {
  bool changed = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float next = reference[row + 8 * r], own = softmax.reference[r];
    changed |= next != own;
    rescale[r] = own == -kInfinity ? 0.f : exp2_fast(own - next);
    softmax.sum[r] *= rescale[r];
    softmax.reference[r] = next;
  }
  return __any_sync(0xffffffffu, changed);
}

DEVICE void multiply(float (&out)[kColumns / 2], const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) out[i] *= rescale[(i >> 1) & 1];
}

// out += P V of the other warpgroup's block, P in shared memory.
DEVICE void issue_handed(float (&out)[kColumns / 2], const Operand& p, const Operand& v) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kWidth / 16; ++i)
    Wgmma<T, kColumns>::template ss<0, 1>(out, p.at(columns_step(i, 64)), v.at(rows_step(i)), 1);
  wgmma_commit();
}

struct Consumer {
  const LatentForwardParams& p;
  Shared& s;
  const int own, warp, lane, row;  // warpgroup; of this thread: its first accumulator row
  const u32 leads;
  const Operand q_own, q_other, q_behind, k_own, k_other, k_behind, v_own, v_handed, probs;
  u32 own_parity = 0, handed_parity = 0;

  DEVICE Consumer(const LatentForwardParams& p, Shared& s, int own, int warp, int lane)
      : p(p),
        s(s),
        own(own),
        warp(warp),
        lane(lane),
        row(warp * 16 + lane / 4),
        leads(lane == 0),
        q_own(smem_address(s.q) + own * kHalf * kPanelBytes),
        q_other(smem_address(s.q) + (own ^ 1) * kHalf * kPanelBytes),
        q_behind(smem_address(s.q[kBehind])),
        k_own(smem_address(s.k[own]) + own * kHalf * kPanelBytes),
        k_other(smem_address(s.k[own]) + (own ^ 1) * kHalf * kPanelBytes),
        k_behind(smem_address(s.k[own][kBehind])),
        v_own(smem_address(s.k[own]) + own * kHalf * kPanelBytes, kPanelBytes),
        v_handed(smem_address(s.k[own ^ 1]) + own * kHalf * kPanelBytes, kPanelBytes),
        probs(smem_address(s.p)) {}

  DEVICE void release(u64& barrier) const {
    if (leads) barrier_arrive(smem_address(&barrier));
  }

  DEVICE void issue_logits(float (&scores)[kWidth / 2]) {
    barrier_wait(smem_address(&s.full[own][0]), own_parity);
    fence_async_proxy();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHalf * 4; ++i)
      Wgmma<T, kWidth>::template ss<0, 0>(scores, q_own.at(columns_step(i, 64)), k_own.at(columns_step(i, 64)), i > 0);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      Wgmma<T, kWidth>::template ss<0, 0>(scores, q_behind.at(columns_step(i, 64)), k_behind.at(columns_step(i, 64)),
                                          1);
    barrier_wait(smem_address(&s.full[own][1]), own_parity);
    fence_async_proxy();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHalf * 4; ++i)
      Wgmma<T, kWidth>::template ss<0, 0>(scores, q_other.at(columns_step(i, 64)), k_other.at(columns_step(i, 64)), 1);
    wgmma_commit();
    own_parity ^= 1;
  }

  // The other warpgroup's block: begins to add its part of the output.
  DEVICE void take(float (&out)[kColumns / 2], float (&scores)[kWidth / 2], Softmax& softmax) {
    float rescale[2];
    barrier_wait(smem_address(&s.p_full[own ^ 1]), handed_parity);
    handed_parity ^= 1;
    fence_async_proxy();
    if (adopt(softmax, s.reference, row, rescale)) {
      wgmma_wait<0>();
      fence_operand(scores);
      multiply(out, rescale);
      fence_operand(out);
    }
    issue_handed(out, probs, v_handed);
  }

  // Hands P and its references to the other warpgroup.
  DEVICE void hand(const u32 (&x)[kWidth / 4], const Softmax& softmax) {
    const u32 at = smem_address(s.p) + (warp * 16 + lane % 16) * kPanelRowBytes + ((lane / 16 ^ lane % 8) << 4);
    __syncwarp();  // all lanes have read the references that are overwritten
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i)
      store_matrices_x4(at ^ (i << 5), x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    if (lane % 4 == 0) s.reference[row] = softmax.reference[0], s.reference[row + 8] = softmax.reference[1];
    fence_async_proxy();
    __syncwarp();
    release(s.p_full[own]);
  }

  DEVICE void finish(float (&out)[kColumns / 2], const Softmax& softmax, const Item& item, int parity) {
    float sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = softmax.sum[r];
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
      if (lane % 4 == 0) s.sums[parity][own][row + 8 * r] = sum[r];
    }
    named_sync(1, 2 * kWarpgroupThreads);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = s.sums[parity][0][row + 8 * r] + s.sums[parity][1][row + 8 * r];
      const bool any = total > 0.f, valid = row + 8 * r < item.heads;
      const i64 head = item.head + row + 8 * r, query = item.row;
      float lse = any ? (softmax.reference[r] + log2_fast(total)) * kLn2 : -kInfinity;
      float factor = any ? reciprocal_fast(total) : 0.f;
      if (p.sink_lse && valid) {
        const float of_keys = lse;
        lse = log_add(lse, __ldg(p.sink_lse + query * p.sink_row + head * p.sink_head));
        factor *= weight(of_keys, lse);
      }
      if (valid && own == 0 && lane % 4 == 0) p.lse[query * p.lse_row + head * p.lse_head] = lse;
      if (p.max_logits) {
        const float top = quad_max(softmax.max[r]);
        if (valid && lane % 4 == 0 && top > -kInfinity) atomic_max_logit(p.max_logits + head, top * p.logit_scale);
      }
      u16* to = p.out + query * p.out_row + head * p.out_head + own * kColumns;
#pragma unroll
      for (int g = 0; g < kColumns / 32; ++g) {
        u32 word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* x = out + 4 * (4 * g + j) + 2 * r;
          word[j] = T::pack(x[0] * factor, x[1] * factor);
        }
        transpose_quad(word, lane);  // so that each thread stores 16 bytes
        if (valid)
          *reinterpret_cast<uint4*>(to + 32 * g + 8 * (lane % 4)) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }

  // `first`: who owns the item's first block.
  DEVICE void attend(const Item& item, int first, int parity) {
    float out[kColumns / 2], scores[kWidth / 2], rescale[2];
    u32 packed[kWidth / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) out[i] = 0.f;
    Softmax softmax;
    softmax.reset();
    int block = first ^ own;
    if (block >= item.blocks) release(s.q_empty);
#pragma unroll 1
    for (; block < item.blocks; block += 2) {
      issue_logits(scores);
      if (block > 0) {
        take(out, scores, softmax);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      fence_operand(scores);
      if (block + 2 >= item.blocks) release(s.q_empty);
      hide_unseen(scores, s.seen[own], lane);
      const bool grown = softmax.update(scores, p.scale_log2, rescale, true, [](float (&)[kWidth / 2]) {});
      pack_pairs<T>(packed, scores);
      wgmma_wait<0>();
      fence_operand(out);
      if (block > 0) release(s.empty[own ^ 1][1]);
      hand(packed, softmax);
      if (grown) multiply(out, rescale);
      issue_weighted<T, kColumns, kWidth>(out, packed, v_own);
      wgmma_wait<0>();
      fence_operand(out);
      fence_operand(packed);
      release(s.empty[own][0]);
    }
    if (block == item.blocks) {  // the last is the other's
      take(out, scores, softmax);
      wgmma_wait<0>();
      fence_operand(out);
      release(s.empty[own ^ 1][1]);
    }
    finish(out, softmax, item, parity);
  }
};

DEVICE void consume(const LatentForwardParams& p, Shared& s, int own) {
  Consumer consumer(p, s, own, uniform(threadIdx.x % kWarpgroupThreads / kWarpThreads), threadIdx.x % kWarpThreads);
  int first = 0, parity = 0;
#pragma unroll 1
  while (true) {
    barrier_wait(smem_address(&s.q_full), parity);
    const Item item = {uniform(s.item.row), uniform(s.item.head), uniform(s.item.heads), uniform(s.item.blocks)};
    if (item.blocks == 0) return;
    consumer.attend(item, first, parity);
    first = first + item.blocks & 1;
    parity ^= 1;
  }
}

extern "C" __global__ void __launch_bounds__(3 * kWarpgroupThreads, 1)
    ffa_latent_forward(const __grid_constant__ LatentForwardParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    init_buffer(s.q_full, s.q_empty, 8);
    for (int b = 0; b < 2; ++b) {
      barrier_init(smem_address(&s.p_full[b]), 4);
      for (int part = 0; part < 2; ++part) {
        barrier_init(smem_address(&s.full[b][part]), kWarpgroupThreads + (part == 0));
        barrier_init(smem_address(&s.empty[b][part]), 4);
      }
    }
    barrier_init_fence();
  }
  __syncthreads();
  await_earlier_kernels();
  const int warpgroup = uniform(threadIdx.x / kWarpgroupThreads);
  if (warpgroup == 0) {
    registers_shrink<kProducerRegisters>();
    produce(p, s, uniform(threadIdx.x / kWarpThreads), threadIdx.x % kWarpThreads);
  } else {
    registers_grow<kConsumerRegisters>();
    consume(p, s, warpgroup - 1);
  }
}
