// Attention over lists of latent keys (MLA with absorbed heads), backward, for sm_90a: values are the first elements of
// keys. A work item is that of the forward (latent_tiles.cuh); its Q and dO stay in shared memory.
//
// A producer warpgroup gathers a block of 64 keys (cp.async) into one buffer. The first consumer warpgroup computes
// S = Q K^T and P, the second one dP = dO V^T and, with P from shared memory, dS. Then each computes half of the
// columns of dQ += dS K, in registers, after which the buffer is free. The third one computes the contribution to the
// gradient of the keys, dS^T Q, to which P^T dO is added in the columns of the values, 32 columns at a time, and adds
// it to fp32 sums in device memory, or with STORED stores it in 16 bits for sparse_sums.cu, which adds it key by key.
// That takes longest, so the other two are a block ahead, up to P. The producer has the rows of these sums brought into
// the L2 cache, where Q, dO and dQ, which are read or written once, are to stay short.
//
// Compile-time: STORED (0 or 1), DTYPE (Bf16 or Fp16).

#include "latent_tiles.cuh"

using T = DTYPE;
template <typename>
constexpr bool kIsFp16 = false;
template <>
constexpr bool kIsFp16<Fp16> = true;

constexpr int kDim = kPanels * kPanel, kValues = kBehind * kPanel;
constexpr int kRest = kPanel / 2;                      // columns of a warpgroup behind the values
constexpr int kPart = 128, kParts = kColumns / kPart;  // columns of dQ in an instruction: 256 need too many registers
constexpr int kProducerRegisters = 32, kConsumerRegisters = 208, kAdderRegisters = 64;
static_assert(kProducerRegisters + 2 * kConsumerRegisters + kAdderRegisters == 4 * 128);

// Named barriers. 0 is __syncthreads.
enum NamedBarrier : u32 {
  kProbsFree = 1,  // the third warpgroup has read P and dS
  kProbsWritten,   // by the first one, which has also read dS of the block before
  kDsWritten,      // by the second one, for the first
  kBothWritten,    // P and dS, for the third one
};
constexpr u32 kPair = 2 * kWarpgroupThreads;  // threads of any two warpgroups

struct LatentBackwardParams {
  TensorMap q, dout;
  const u16* kv;
  const int* entries;  // of the lists: indices of keys; invalid ones are skipped
  const float *lse, *delta;
  u16* dq;
  // [key heads, num_keys, kDim]. Columns are permuted: in every 16, those of thread t of a row (2t, 2t + 1, 2t + 8,
  // 2t + 9) are adjacent.
  float* sums;
  // Or with STORED what each query gives to each key of its list, summed over the heads of an item: [key heads, parts,
  // queries, list_places, kDim]. In every 32 columns those of thread t (8j + 2t, 8j + 2t + 1, j = 0 to 3) are adjacent.
  u16* given;
  i64 pack_places;            // of all queries: list_places times their number
  i64 entry_row, entry_list;  // strides of entries between queries, and between lists: 0 if key heads share them
  i64 kv_row, kv_head, lse_row, lse_head, delta_row, delta_head, dq_row, dq_head;  // strides, elements
  int topk, list_places, num_keys;        // list_places: topk rounded up to blocks
  int num_items, heads_kv, group, parts;  // group: query heads of a key head; parts: items of these
  float scale, scale_log2;
  // In fp16 P and dS, which contains the softmax scale, are times 2^shift, and gradients times `unit`, the inverse: dS
  // alone would vanish where gradients are small. In bf16 0 and 1.
  float shift, unit;
  int together;  // if not 0, items begin together: times a block in keep_together
  int* counter;  // two words; zero between launches, see leave()
};

struct Shared {
  alignas(kSwizzleAtomBytes) u16 q[kPanels][64][kPanel];
  u16 dout[kBehind][64][kPanel];
  u16 k[kPanels][kWidth][kPanel];
  u16 p[64][kPanel], ds[64][kPanel];  // of a block
  alignas(16) Item item;
  int head_kv;         // of the item
  int key[2][kWidth];  // of blocks in turn; -1: none
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
  for (int i = 0; i < kPanels; ++i) load_box_once(smem_address(s.q[i]), &p.q, i * kPanel, item.head, item.row, bar);
#pragma unroll
  for (int i = 0; i < kBehind; ++i)
    load_box_once(smem_address(s.dout[i]), &p.dout, i * kPanel, item.head, item.row, bar);
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
    if (warp == 0 && lane == 0) {
      if (p.together) {
        atomicAdd(p.counter, 1);
        keep_together(p.counter, number, p.num_items, p.together * item.blocks);
      }
      load_rows(p, s, item, head_kv, rows_parity);
    }
    __syncwarp();
    const u16* keys = p.kv + head_kv * p.kv_head;
    int first = 0;
#pragma unroll 1
    do {
      int key = lane < 16 && first + slot < count ? __ldg(list + first + slot) : -1;
      if (static_cast<u32>(key) >= static_cast<u32>(p.num_keys)) key = -1;
      barrier_wait(smem_address(&s.empty), parity ^ 1);
      if (lane < 16) s.key[parity][slot] = key;
      parity ^= 1;
      __syncwarp();
      if (lane == 0) barrier_arrive(smem_address(&s.full));
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const u16* from =
            key_at(keys, __shfl_sync(0xffffffffu, key, 4 * i + lane / 8), p.num_keys, p.kv_row, chunk * 8);
#pragma unroll
        for (int j = 0; j < kPanels; ++j) copy_chunk(to + i * 16 * kPanelRowBytes + j * kPanelBytes, from + j * kPanel);
      }
      copies_arrive(smem_address(&s.full));
      // Whole rows of sums, before parts of them are added to.
      if (!STORED && key >= 0)
        prefetch_bytes(p.sums + (static_cast<i64>(head_kv) * p.num_keys + key) * kDim, kDim * sizeof(float));
      first += kWidth;
    } while (first < count);
  }
  if (warp == 0 && lane == 0) {
    load_rows(p, s, {0, 0, 0, 0}, 0, rows_parity);
    if (p.together) leave(p.counter);
  }
}

// ---- consumers ----

// An element of a gradient.
DEVICE float finished(const LatentBackwardParams& p, float x) { return kIsFp16<T> ? x * p.unit : x; }

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

// The next work item; waits for its rows. All of it is 0 if there is none.
DEVICE Item next_item(Shared& s, u32& parity) {
  barrier_wait(smem_address(&s.rows_full), parity);
  parity ^= 1;
  return {uniform(s.item.row), uniform(s.item.head), uniform(s.item.heads), uniform(s.item.blocks)};
}

// The first or second warpgroup: of dQ it has columns kOwn * kColumns to (kOwn + 1) * kColumns of the values, and half
// of those behind.
template <int kOwn>
struct Consumer {
  const LatentBackwardParams& p;
  Shared& s;
  const int lane, row;  // of this thread: its first accumulator row
  const u32 store_at;
  const Operand probs, ds;
  u32 parity = 0;

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

  // P of S, times 2^shift. `lse` is in base 2, less the shift; inf where all of P is 0.
  DEVICE void form_probs(float (&scores)[kWidth / 2], const float (&lse)[2]) {
    u32 packed[kWidth / 4];
    const int* key = s.key[parity ^ 1];
    const u32 seen[2] = {__ballot_sync(0xffffffffu, key[lane] >= 0), __ballot_sync(0xffffffffu, key[32 + lane] >= 0)};
    hide_unseen(scores, seen, lane);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) scores[i] = exp2_fast(fmaf(scores[i], p.scale_log2, -lse[(i >> 1) & 1]));
    pack_pairs<T>(packed, scores);
    named_sync(kProbsFree, kPair);
    store(smem_address(s.p), packed);
    named_arrive(kProbsWritten, kPair);
  }

  // dS, times the softmax scale and 2^shift, of dP.
  DEVICE void form_ds(const float (&scores)[kWidth / 2], const float (&delta)[2]) {
    named_sync(kProbsWritten, kPair);
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) {
      u32 x[4];
      load_matrices_x4(smem_address(s.p) + (store_at ^ (i << 5)), x);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* dp = scores + 8 * i + 2 * j;
        const float d = delta[j & 1];
        x[j] = T::pack(T::low(x[j]) * (p.scale * (dp[0] - d)), T::high(x[j]) * (p.scale * (dp[1] - d)));
      }
      store_matrices_x4(smem_address(s.ds) + (store_at ^ (i << 5)), x[0], x[1], x[2], x[3]);
    }
    fence_async_proxy();
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
          word[j] = T::pack(finished(p, x[0]), finished(p, x[1]));
        }
        transpose_quad(word, lane);  // so that each thread stores 16 bytes
        if (row + 8 * r < item.heads)
          __stcs(reinterpret_cast<uint4*>(to + 32 * g + 8 * (lane % 4)),
                 make_uint4(word[0], word[1], word[2], word[3]));
      }
    }
  }

  // What this warpgroup needs of the rows: lse as for form_probs, or delta.
  DEVICE void load_stats(float (&stats)[2], const Item& item) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const i64 head = item.head + row + 8 * r, query = item.row;
      stats[r] = kOwn == 0 ? kInfinity : 0.f;
      if (row + 8 * r >= item.heads) continue;
      if constexpr (kOwn == 0) {
        const float x = __ldg(p.lse + query * p.lse_row + head * p.lse_head);
        stats[r] = x == -kInfinity ? kInfinity : x * kLog2e - p.shift;
      } else {
        stats[r] = __ldg(p.delta + query * p.delta_row + head * p.delta_head);
      }
    }
  }

  DEVICE void attend(const Item& item) {
    float dq[kParts][kPart / 2], dq_rest[kRest / 2], stats[2];
#pragma unroll
    for (int i = 0; i < kParts * kPart / 2; ++i) dq[i / (kPart / 2)][i % (kPart / 2)] = 0.f;
#pragma unroll
    for (int i = 0; i < kRest / 2; ++i) dq_rest[i] = 0.f;
    load_stats(stats, item);
#pragma unroll 1
    for (int block = 0; block < item.blocks; ++block) {
      float scores[kWidth / 2];
      issue_logits(scores);
      wgmma_wait<0>();
      fence_operand(scores);
      if constexpr (kOwn == 0) {
        form_probs(scores, stats);
      } else {
        form_ds(scores, stats);
        named_arrive(kBothWritten, kPair);
      }
      named_sync(kDsWritten, kPair);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        issue_dq<kPart>(dq[i], ds, Operand(smem_address(s.k[kOwn * kHalf + i * kPart / kPanel]), kPanelBytes));
      issue_dq<kRest>(dq_rest, ds, Operand(smem_address(s.k[kBehind]) + kOwn * kRest * 2, kPanelBytes));
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kParts; ++i) fence_operand(dq[i]);
      fence_operand(dq_rest);
      release(s.empty, lane);
    }
    release(s.rows_empty, lane);
#pragma unroll
    for (int i = 0; i < kParts; ++i) store_dq<kPart>(dq[i], item, kOwn * kColumns + i * kPart);
    store_dq<kRest>(dq_rest, item, kValues + kOwn * kRest);
  }

  DEVICE void run() {
    u32 rows_parity = 0;
#pragma unroll 1
    while (true) {
      const Item item = next_item(s, rows_parity);
      if (item.blocks == 0) break;
      attend(item);
    }
    if constexpr (kOwn == 0) named_sync(kProbsFree, kPair);  // the last arrival
  }
};

// The third warpgroup.
struct Adder {
  const LatentBackwardParams& p;
  Shared& s;
  const int lane, row;  // of this thread: its first accumulator row
  const Operand probs, ds;
  u32 parity = 0;
  int key[2][2];          // of its rows, and those of the lane with which it exchanges: of the even one, of the odd one
  float* sums = nullptr;  // of the key head, from this thread's columns on
  u16* given = nullptr;   // of the block, from this thread's first row and columns on

  DEVICE Adder(const LatentBackwardParams& p, Shared& s, int warp, int lane)
      : p(p), s(s), lane(lane), row(warp * 16 + lane / 4), probs(smem_address(s.p)), ds(smem_address(s.ds)) {}

  // Columns of half a panel.
  DEVICE void issue(float (&part)[kRest / 2], int half) const {
    const u32 offset = half % 2 * kRest * 2;
    wgmma_fence();
    issue_part<kRest>(part, ds, Operand(smem_address(s.q[half / 2]) + offset, kPanelBytes), false);
    if (half < 2 * kBehind)
      issue_part<kRest>(part, probs, Operand(smem_address(s.dout[half / 2]) + offset, kPanelBytes), true);
    wgmma_commit();
  }

  DEVICE void add(const float (&part)[kRest / 2], int half) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x[2][4];
      exchange_halves(x, part + 2 * r, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        add_global_v4(key[r][i] >= 0, sums + static_cast<i64>(key[r][i]) * kDim + half * kRest, x[i][0], x[i][1],
                      x[i][2], x[i][3]);
    }
  }

  // Also stores what is given to keys that are none, which nobody reads.
  DEVICE void store(const float (&part)[kRest / 2], int half) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* two = part + 4 * j + 2 * r;
        word[j] = T::pack(finished(p, two[0]), finished(p, two[1]));
      }
      __stcs(reinterpret_cast<uint4*>(given + 8 * r * kDim + half * kRest),
             make_uint4(word[0], word[1], word[2], word[3]));
    }
  }

  DEVICE void pass_on(float (&part)[kRest / 2], int half) const {
    if constexpr (STORED) {
      store(part, half);
    } else {
#pragma unroll
      for (int i = 0; i < kRest / 2; ++i) part[i] = finished(p, part[i]);
      add(part, half);
    }
  }

  DEVICE void finish_block(bool last) {
    float even[kRest / 2], odd[kRest / 2];
    named_sync(kBothWritten, kPair);
    if (!STORED) {
#pragma unroll
      for (int i = 0; i < 4; ++i) key[i / 2][i % 2] = s.key[parity][(row & ~1) + i / 2 * 8 + i % 2];
      parity ^= 1;
    }
    issue(even, 0);
#pragma unroll
    for (int half = 0; half < 2 * kPanels - 2; half += 2) {
      issue(odd, half + 1);
      wgmma_wait<1>();
      fence_operand(even);
      pass_on(even, half);
      issue(even, half + 2);
      wgmma_wait<1>();
      fence_operand(odd);
      pass_on(odd, half + 1);
    }
    issue(odd, 2 * kPanels - 1);
    wgmma_wait<1>();
    fence_operand(even);
    pass_on(even, 2 * kPanels - 2);
    wgmma_wait<0>();
    fence_operand(odd);
    named_arrive(kProbsFree, kPair);
    if (last) release(s.rows_empty, lane);
    pass_on(odd, 2 * kPanels - 1);
    if (STORED) given += kWidth * kDim;
  }

  DEVICE void run() {
    u32 rows_parity = 0;
    named_arrive(kProbsFree, kPair);
#pragma unroll 1
    while (true) {
      const Item item = next_item(s, rows_parity);
      if (item.blocks == 0) break;
      const int head_kv = uniform(s.head_kv);
      if constexpr (STORED) {
        const int pack = head_kv * p.parts + (item.head - head_kv * p.group) / 64;
        const i64 place = pack * p.pack_places + static_cast<i64>(item.row) * p.list_places + row;
        given = p.given + place * kDim + 8 * (lane % 4);
      } else {
        sums = p.sums + static_cast<i64>(head_kv) * p.num_keys * kDim + 4 * (lane % 8);
      }
#pragma unroll 1
      for (int block = 0; block < item.blocks; ++block) finish_block(block + 1 == item.blocks);
    }
  }
};

extern "C" __global__ void __launch_bounds__(4 * kWarpgroupThreads, 1)
    ffa_latent_backward(const __grid_constant__ LatentBackwardParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    init_buffer(s.rows_full, s.rows_empty, 12);
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
  } else if (warpgroup == 3) {
    registers_shrink<kAdderRegisters>();
    Adder(p, s, warp, lane).run();
  } else {
    registers_grow<kConsumerRegisters>();
    if (warpgroup == 1)
      Consumer<0>(p, s, warp, lane).run();
    else
      Consumer<1>(p, s, warp, lane).run();
  }
}
