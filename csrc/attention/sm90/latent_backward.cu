// Attention over lists of latent keys (MLA with absorbed heads), backward, for sm_90a: values are the first elements of
// keys. A work item is that of the forward (latent_tiles.cuh); its Q and dO stay in shared memory.
//
// A producer warpgroup gathers a block of 64 keys (cp.async) into one buffer. The first consumer warpgroup computes
// S = Q K^T and P, the second one dP = dO V^T and, with P from shared memory, dS. Then each computes half of the
// columns of dQ += dS K, in registers, after which the buffer is free: the next keys arrive while both compute the
// contribution to the gradient of the keys, dS^T Q, to which P^T dO is added in the columns of the values, 64 columns
// at a time, and add it to fp32 sums in device memory. The last 64 are added beside S and dP of the next block.
//
// Compile-time: DTYPE (Bf16 or Fp16).

#include "latent_tiles.cuh"

using T = DTYPE;

constexpr int kDim = kPanels * kPanel, kValues = kBehind * kPanel;
constexpr int kRest = kPanel / 2;  // columns of a warpgroup behind the values
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kProducerRegisters + 2 * kConsumerRegisters == 3 * 168);

// Named barriers. 0 is __syncthreads.
enum NamedBarrier : u32 {
  kProbsFree = 1,  // the second warpgroup has read P
  kProbsWritten,   // by the first one, which has also read dS of the block before
  kDsWritten,      // by the second one
};
constexpr u32 kConsumers = 2 * kWarpgroupThreads;

struct LatentBackwardParams {
  TensorMap q, dout;
  const u16* kv;
  const int* entries;  // of the lists: indices of keys; invalid ones are skipped
  const float *lse, *delta;
  u16* dq;
  // [key heads, num_keys, kDim]. Columns are permuted: in every 16, those of thread t of a row (2t, 2t + 1, 2t + 8,
  // 2t + 9) are adjacent.
  float* sums;
  i64 entry_row, entry_list;  // strides of entries between queries, and between lists: 0 if key heads share them
  i64 kv_row, kv_head, lse_row, lse_head, delta_row, delta_head, dq_row, dq_head;  // strides, elements
  int topk, num_keys;
  int num_items, heads_kv, group, parts;  // group: query heads of a key head; parts: items of these
  float scale, scale_log2;
};

struct Shared {
  alignas(kSwizzleAtomBytes) u16 q[kPanels][64][kPanel];
  u16 dout[kBehind][64][kPanel];
  u16 k[kPanels][kWidth][kPanel];
  u16 p[64][kPanel], ds[64][kPanel];  // of a block
  alignas(16) Item item;
  int head_kv;      // of the item
  int key[kWidth];  // of the buffer; -1: none
  u64 rows_full, rows_empty, full, empty;
};

// ---- producer ----

// Called by one thread.
DEVICE void load_rows(const LatentBackwardParams& p, Shared& s, const Item& item, int head_kv, u32 parity) {
  const u32 bar = smem_address(&s.rows_full);
  barrier_wait(smem_address(&s.rows_empty), parity ^ 1);
  s.item = item, s.head_kv = head_kv;
  if (item.blocks == 0) {
    barrier_arrive(bar);
    return;
  }
  barrier_expect_bytes(bar, sizeof(s.q) + sizeof(s.dout));
#pragma unroll
  for (int i = 0; i < kPanels; ++i) load_box(smem_address(s.q[i]), &p.q, i * kPanel, item.head, item.row, bar);
#pragma unroll
  for (int i = 0; i < kBehind; ++i) load_box(smem_address(s.dout[i]), &p.dout, i * kPanel, item.head, item.row, bar);
}

// Eight threads copy a row; warp w copies rows 4 w to 4 w + 3 of every 16, whose keys its first 16 lanes hold.
DEVICE void produce(const LatentBackwardParams& p, Shared& s, int warp, int lane) {
  const int slot = warp * 4 + lane % 4 + lane / 4 * 16, row = warp * 4 + lane / 8, chunk = lane % 8;
  const u32 to = smem_address(s.k) + row * kPanelRowBytes + ((chunk ^ row % 8) << 4);
  u32 rows_parity = 0, parity = 0;
#pragma unroll 1
  for (int number = blockIdx.x; number < p.num_items; number += gridDim.x, rows_parity ^= 1) {
    int head_kv;
    Item item = item_of(p, number, head_kv);
    const int* list = p.entries + item.row * p.entry_row + head_kv * p.entry_list;
    const int count = trimmed(list, p.topk, p.num_keys, lane);
    item.blocks = max(1, (count + kWidth - 1) / kWidth);
    if (warp == 0 && lane == 0) load_rows(p, s, item, head_kv, rows_parity);
    __syncwarp();
    const u16* keys = p.kv + head_kv * p.kv_head + chunk * 8;
#pragma unroll 1
    for (int block = 0; block < item.blocks; ++block) {
      const int entry = block * kWidth + slot;
      int key = lane < 16 && entry < count ? __ldg(list + entry) : -1;
      if (static_cast<u32>(key) >= static_cast<u32>(p.num_keys)) key = -1;
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {  // lines of 128 bytes into the L2 cache: one for each thread, and the last
        const int index = max(__shfl_sync(0xffffffffu, key, 4 * i + lane / 8), 0);
        const u16* line = keys + index * p.kv_row + chunk * (kPanel - 8);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
        if (chunk == 7) asm volatile("prefetch.global.L2 [%0];" ::"l"(line + kPanel));
      }
      barrier_wait(smem_address(&s.empty), parity ^ 1);
      parity ^= 1;
      if (lane < 16) s.key[slot] = key;
      __syncwarp();
      if (lane == 0) barrier_arrive(smem_address(&s.full));
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int index = max(__shfl_sync(0xffffffffu, key, 4 * i + lane / 8), 0);
        const u16* from = keys + index * p.kv_row;
#pragma unroll
        for (int j = 0; j < kPanels; ++j) copy_chunk(to + i * 16 * kPanelRowBytes + j * kPanelBytes, from + j * kPanel);
      }
      copies_arrive(smem_address(&s.full));
    }
  }
  if (warp == 0 && lane == 0) load_rows(p, s, {0, 0, 0, 0}, 0, rows_parity);
}

// ---- consumers ----

// Predicated: in a branch ptxas would wait for the wgmmas in flight.
DEVICE void add_global_v4(bool adds, float* p, float a, float b, float c, float d) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %0, 0;\n@adds red.global.add.v4.f32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
          static_cast<int>(adds)),
      "l"(p), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}

// acc[64 heads, kN] += dS[64 heads, 64 keys] K[64 keys, kN]
template <int kN>
DEVICE void issue_dq(float (&acc)[kN / 2], const Operand& ds, const Operand& k) {
#pragma unroll
  for (int i = 0; i < kWidth / 16; ++i)
    Wgmma<T, kN>::template ss<0, 1>(acc, ds.at(columns_step(i, 64)), k.at(rows_step(i)), 1);
}

// acc[64 keys, kN] (+)= x[64 heads, 64 keys]^T rows[64 heads, kN]
template <int kN>
DEVICE void issue_part(float (&acc)[kN / 2], const Operand& x, const Operand& rows, bool adds) {
#pragma unroll
  for (int i = 0; i < 64 / 16; ++i)
    Wgmma<T, kN>::template ss<1, 1>(acc, x.at(rows_step(i)), rows.at(rows_step(i)), adds || i > 0);
}

// Of warpgroup kOwn: it has columns kOwn * kColumns to (kOwn + 1) * kColumns of the values, and half of those behind.
template <int kOwn>
struct Consumer {
  const LatentBackwardParams& p;
  Shared& s;
  const int lane, row;  // of this thread: its first accumulator row
  const u32 store_at;
  const Operand probs, ds;
  u32 parity = 0;
  int key[2];             // of accumulator rows of a part of the gradient of keys
  float* sums = nullptr;  // of the key head, from this thread's columns on

  DEVICE Consumer(const LatentBackwardParams& p, Shared& s, int warp, int lane)
      : p(p),
        s(s),
        lane(lane),
        row(warp * 16 + lane / 4),
        store_at((warp * 16 + lane % 16) * kPanelRowBytes + ((lane / 16 ^ lane % 8) << 4)),
        probs(smem_address(s.p)),
        ds(smem_address(s.ds)) {}

  // Issues S, or dP.
  DEVICE void issue_logits(float (&scores)[kWidth / 2]) {
    barrier_wait(smem_address(&s.full), parity);
    parity ^= 1;
    fence_async_proxy();
    if constexpr (kOwn == 0)
      issue_scores<T, kDim, kWidth>(scores, Operand(smem_address(s.q)), Operand(smem_address(s.k)));
    else
      issue_scores<T, kValues, kWidth>(scores, Operand(smem_address(s.dout)), Operand(smem_address(s.k)));
  }

  DEVICE void store(u32 smem, const u32 (&x)[kWidth / 4]) const {
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i)
      store_matrices_x4(smem + (store_at ^ (i << 5)), x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    fence_async_proxy();
  }

  // P of S. `lse` is in base 2; inf where all of P is 0.
  DEVICE void form_probs(float (&scores)[kWidth / 2], const float (&lse)[2]) {
    u32 packed[kWidth / 4];
    const u32 seen[2] = {__ballot_sync(0xffffffffu, s.key[lane] >= 0),
                         __ballot_sync(0xffffffffu, s.key[32 + lane] >= 0)};
    hide_unseen(scores, seen, lane);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) scores[i] = exp2_fast(fmaf(scores[i], p.scale_log2, -lse[(i >> 1) & 1]));
    pack_pairs<T>(packed, scores);
    named_sync(kProbsFree, kConsumers);
    store(smem_address(s.p), packed);
    named_arrive(kProbsWritten, kConsumers);
  }

  // dS, times the softmax scale, of dP.
  DEVICE void form_ds(const float (&scores)[kWidth / 2], const float (&delta)[2]) {
    u32 packed[kWidth / 4];
    named_sync(kProbsWritten, kConsumers);
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) load_matrices_x4(smem_address(s.p) + (store_at ^ (i << 5)), packed + 4 * i);
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) {
      const float x = p.scale * (scores[2 * i] - delta[i & 1]), y = p.scale * (scores[2 * i + 1] - delta[i & 1]);
      packed[i] = T::pack(T::low(packed[i]) * x, T::high(packed[i]) * y);
    }
    store(smem_address(s.ds), packed);
  }

  DEVICE void issue_values_part(float (&part)[kPanel / 2], int i) const {
    const int panel = kOwn * kHalf + i;
    wgmma_fence();
    issue_part<kPanel>(part, ds, Operand(smem_address(s.q[panel]), kPanelBytes), false);
    issue_part<kPanel>(part, probs, Operand(smem_address(s.dout[panel]), kPanelBytes), true);
    wgmma_commit();
  }

  template <int kN>
  DEVICE void add(const float (&part)[kN / 2], int column) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* to = sums + static_cast<i64>(key[r]) * kDim + column;
#pragma unroll
      for (int j = 0; j < kN / 16; ++j) {
        const float* x = part + 8 * j + 2 * r;
        add_global_v4(key[r] >= 0, to + 16 * j, x[0], x[1], x[4], x[5]);
      }
    }
  }

  DEVICE void add_values(const float (&part)[kPanel / 2], int i) const {
    add<kPanel>(part, (kOwn * kHalf + i) * kPanel);
  }

  template <int kN>
  DEVICE void store_dq(const float (&dq)[kN / 2], const Item& item, int column) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const i64 head = item.head + row + 8 * r;
      u16* to = p.dq + item.row * p.dq_row + head * p.dq_head + column;
#pragma unroll
      for (int g = 0; g < kN / 32; ++g) {
        u32 word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* x = dq + 4 * (4 * g + j) + 2 * r;
          word[j] = T::pack(x[0], x[1]);
        }
        transpose_quad(word, lane);  // so that each thread stores 16 bytes
        if (row + 8 * r < item.heads)
          *reinterpret_cast<uint4*>(to + 32 * g + 8 * (lane % 4)) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }

  // What this warpgroup needs of the rows: lse in base 2, or delta.
  DEVICE void load_stats(float (&stats)[2], const Item& item) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const i64 head = item.head + row + 8 * r, query = item.row;
      stats[r] = kOwn == 0 ? kInfinity : 0.f;
      if (row + 8 * r >= item.heads) continue;
      if constexpr (kOwn == 0) {
        const float x = __ldg(p.lse + query * p.lse_row + head * p.lse_head);
        stats[r] = x == -kInfinity ? kInfinity : x * kLog2e;
      } else {
        stats[r] = __ldg(p.delta + query * p.delta_row + head * p.delta_head);
      }
    }
  }

  DEVICE void attend(const Item& item) {
    float dq[kColumns / 2], dq_rest[kRest / 2], stats[2], last[kPanel / 2];
#pragma unroll
    for (int i = 0; i < kPanel / 2; ++i) last[i] = 0.f;
    key[0] = key[1] = -1;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) dq[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kRest / 2; ++i) dq_rest[i] = 0.f;
    load_stats(stats, item);
#pragma unroll 1
    for (int block = 0; block < item.blocks; ++block) {
      float scores[kWidth / 2], rest[kRest / 2];
      issue_logits(scores);
      add_values(last, 3);
      key[0] = s.key[row], key[1] = s.key[row + 8];
      wgmma_wait<0>();
      fence_operand(scores);
      if constexpr (kOwn == 0)
        form_probs(scores, stats);
      else
        form_ds(scores, stats);
      named_sync(kDsWritten, kConsumers);

      wgmma_fence();
      issue_dq<kColumns>(dq, ds, Operand(smem_address(s.k[kOwn * kHalf]), kPanelBytes));
      issue_dq<kRest>(dq_rest, ds, Operand(smem_address(s.k[kBehind]) + kOwn * kRest * 2, kPanelBytes));
      wgmma_commit();
      wgmma_fence();
      issue_part<kRest>(rest, ds, Operand(smem_address(s.q[kBehind]) + kOwn * kRest * 2, kPanelBytes), false);
      wgmma_commit();
      wgmma_wait<1>();
      fence_operand(dq);
      fence_operand(dq_rest);
      release(s.empty, lane);
      float first[kPanel / 2];
      issue_values_part(first, 0);
      wgmma_wait<1>();
      fence_operand(rest);
      add<kRest>(rest, kValues + kOwn * kRest);
      wgmma_wait<0>();
      fence_operand(first);
      add_values(first, 0);
#pragma unroll
      for (int i = 1; i < kHalf; ++i) {
        float part[kPanel / 2];
        issue_values_part(part, i);
        wgmma_wait<0>();
        fence_operand(part);
        if (i < 3)
          add_values(part, i);
        else
#pragma unroll
          for (int j = 0; j < kPanel / 2; ++j) last[j] = part[j];
      }
      if constexpr (kOwn == 1) named_arrive(kProbsFree, kConsumers);
    }
    release(s.rows_empty, lane);
    add_values(last, 3);
    store_dq<kColumns>(dq, item, kOwn * kColumns);
    store_dq<kRest>(dq_rest, item, kValues + kOwn * kRest);
  }

  DEVICE void run() {
    u32 rows_parity = 0;
    if constexpr (kOwn == 1) named_arrive(kProbsFree, kConsumers);
#pragma unroll 1
    while (true) {
      barrier_wait(smem_address(&s.rows_full), rows_parity);
      const Item item = {uniform(s.item.row), uniform(s.item.head), uniform(s.item.heads), uniform(s.item.blocks)};
      if (item.blocks == 0) break;
      sums = p.sums + static_cast<i64>(uniform(s.head_kv)) * p.num_keys * kDim + 4 * (lane % 4);
      attend(item);
      rows_parity ^= 1;
    }
    if constexpr (kOwn == 0) named_sync(kProbsFree, kConsumers);  // the last arrival
  }
};

extern "C" __global__ void __launch_bounds__(3 * kWarpgroupThreads, 1)
    ffa_latent_backward(const __grid_constant__ LatentBackwardParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    init_buffer(s.rows_full, s.rows_empty, 8);
    barrier_init(smem_address(&s.full), kWarpgroupThreads + 4);
    barrier_init(smem_address(&s.empty), 8);
    barrier_init_fence();
  }
  __syncthreads();
  await_earlier_kernels();
  const int warpgroup = uniform(threadIdx.x / kWarpgroupThreads);
  const int warp = uniform(threadIdx.x % kWarpgroupThreads / kWarpThreads), lane = threadIdx.x % kWarpThreads;
  if (warpgroup == 0) {
    registers_shrink<kProducerRegisters>();
    produce(p, s, warp, lane);
  } else {
    registers_grow<kConsumerRegisters>();
    if (warpgroup == 1)
      Consumer<0>(p, s, warp, lane).run();
    else
      Consumer<1>(p, s, warp, lane).run();
  }
}
