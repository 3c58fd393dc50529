// Attention backward for sm_90a: a persistent, warp-specialized kernel. A work item is a tile of 128 keys of one key
// head, with one or all query heads of its group, or with some query blocks of one head.
//
// dK and dV of the item are accumulated in registers over all its queries. A consumer warpgroup owns 64 keys and
// computes transposed scores, so that the register fragments of P and dS are directly the first operands of the wgmmas
// for dV and dK. dS is written to shared memory, transposed, for dQ = dS K, of which each warpgroup computes half the
// columns. What is accumulated in device memory (dQ of every block; dK and dV if the query heads of a group are split
// into items) goes through shared memory to a warp that adds it by TMA reduction; dK and dV of head dim 128, for which
// shared memory is too small, and dQ of head dim 64 are added from registers. The tile plan is that of the transposed
// mask: rows are keys, columns are queries.
//
// For every query block a warpgroup issues S and dP, then dV, dQ of the previous block, dK. As dQ lags a block behind,
// it rarely waits for dS of the other warpgroup, and the warpgroups run out of phase: while one computes exponentials
// and dS, the tensor cores work for the other. dV overlaps with computing dS, and handing over dQ with dK. The softmax
// scale is not in dS; it multiplies dQ and dK in the epilogue.
//
// SPLIT_STATS: lse and delta are subtracted by the tensor cores: each is split into three bf16 terms, which are extra
// columns of Q and dO, multiplied by ones. Otherwise each warp loads them from shared memory, which limits the kernel.
//
// Head dim 64 leaves registers for operands that are constant over the item (RegisterOperands): keys for S, values for
// dP, and transposed keys for dQ, of which a warpgroup then computes half the queries, transposed. All wgmmas of a
// block are issued together, with S and dP of the next block: the warpgroups alternate (warp_scheduler_sync,
// warp_scheduler_arrive), and while the wgmmas of one run, the other computes exponentials and dS without waiting for
// wgmmas of its own.
//
// Compile-time: HEAD_DIM, HEAD_DIM_V, DTYPE (Bf16 or Fp16), SOFTCAP (0 or 1), STAGES, ADD_DQ (0 or 1: accumulates dQ,
// in an order that is not deterministic), SPLIT_STATS (0 or 1), STREAM_KV (0 or 1: keys from a given index on are in
// separate tensors, with gradients of their own, and arrive while the kernel runs; no tile has both kinds), CAPTURED (0
// or 1: mask_numbers.cuh).

#include "../../common/wgmma.cuh"
#include "gradients.cuh"
#include "softmax.cuh"
#include "tiles.cuh"

constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;
constexpr int kStages = STAGES;  // buffers of q, and of dout
constexpr int kGroups = 2;       // consumer warpgroups
constexpr int kBlockThreads = kWarpgroupThreads * (kGroups + 1);
constexpr int kKeys = 64;  // keys of a warpgroup
constexpr int kTileKeys = kGroups * kKeys;
constexpr int kQueries = 64;  // queries of a block
constexpr int kDqColumns = kHeadDim / kGroups;
constexpr u32 kPieceFloats = kDqColumns * 16;  // a piece: 16 rows and half the columns, the accumulators of one warp
constexpr bool kDqSharesDp = kDqColumns == kQueries;  // dQ and dP use the same registers
constexpr bool kSplit = SPLIT_STATS;
constexpr bool kRegisterOperands = kHeadDim == 64 && ADD_DQ;  // constant operands are in registers, see above
constexpr int kDsBuffers = kRegisterOperands ? 3 : 2;
static_assert(kHeadDim == kHeadDimV && !(kSplit && SOFTCAP));
using T = DTYPE;

// Named barriers, each for one warpgroup: the first of kGroups, or of kDsBuffers pairs, successive ids.
enum NamedBarrier : u32 {
  kStagingFree = 1,                              // its staging buffer has been read, by the warp that reduces it
  kStagingFull = kStagingFree + kGroups,         // its staging buffer is written
  kDsWritten = kStagingFull + kGroups,           // its dS is written: one for each buffer of dS
  kWarpScheduler = kDsWritten + 2 * kDsBuffers,  // it may issue its wgmmas
};
constexpr u32 kReduceThreads = kWarpgroupThreads + kWarpThreads;  // a consumer warpgroup and its reduce warp

// Registers of a thread. Together they are all that the block was launched with.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kProducerRegisters + kGroups * kConsumerRegisters == 168 * (kGroups + 1));

// Sums are stored in pieces: 16 rows and half the columns in the layout of a warp's accumulators. With
// kRegisterOperands those of dQ are transposed: four pieces of 16 columns for every 16 queries.
struct BackwardParams {
  TensorMap q, k, v;
#if STREAM_KV
  TensorMap k_remote, v_remote;
#endif
  TensorMap dout;
  TilePlan plan;
  // Work items in the order in which they start: tile; first query head | number of query heads << 16; first query
  // block, and number of query blocks, 0 for all.
  const int4* items;
  // Packed query heads count as one, with their rows interleaved (load_packed). The plan, lse and delta have these
  // rows.
  const float* lse;    // [num_heads, stats_row]: times log2 e; with SPLIT_STATS both lse and delta, 16 bytes a row
  const float* delta;  // [num_heads, stats_row]: -delta
  float* dq;           // sums: [num_heads, 2 halves of the columns, units] pieces
  float* key_sums;     // sums: [tiles, key heads, dk and dv, 2 halves, 8 units] pieces, of tiles whose heads are split
  void *dk, *dv;
  int* counter;                          // two words; zero between launches, see leave()
  i64 dk_row, dk_head, dv_row, dv_head;  // strides, elements
  int num_items, group, heads_kv;
  int heads_inner, stats_row, units, store;  // units: stats_row / 16
  float scale, scale_log2, softcap_factor;
  int log2_packed;  // log2 of the number of packed query heads; 0 with ADD_DQ
#if STREAM_KV
  int store_remote;
  void *dk_remote, *dv_remote;  // strides are those of dk and dv
  ArrivalBarrier arrival_barrier;
#endif
};

struct Item {
  int row, rows;  // keys of the tile; row -1: no more items
  int first_segment, past_segment;
  int head, heads;  // query heads
  int tile;
  int first_block, blocks;  // query blocks: the first, and how many, 0 for all
  int unused[3];
  DEVICE bool empty() const { return first_segment >= past_segment; }
};

// Description of a query block, from the producer to the consumers.
struct BlockInfo {
  int column;          // first query
  int piece;           // of its sums of dQ, in the first half
  int segment_masked;  // 4 * segment | a bit for each warpgroup that applies the mask
  int last;            // 1: the last block of the item
};

struct Shared {
  alignas(kSwizzleAtomBytes) u16 k[kHeadDim / kPanel][kTileKeys][kPanel];
  u16 v[kHeadDimV / kPanel][kTileKeys][kPanel];
  u16 q[kStages][kHeadDim / kPanel][kQueries][kPanel];
  u16 dout[kStages][kHeadDimV / kPanel][kQueries][kPanel];
  u16 ds[kDsBuffers][kGroups][kQueries][kKeys];
  // Staging buffers: what is to be added to sums in device memory, dQ, or with kRegisterOperands dK and dV.
  alignas(16) float staging[kGroups][4][kRegisterOperands ? 4 * kPieceFloats : kPieceFloats];
  float lse[kStages][kQueries], delta[kStages][kQueries];
  // SPLIT_STATS: 16 extra columns of Q and dO, in two halves of 8, and the constants that they are multiplied by, for S
  // and for dP.
  alignas(128) u16 stats[kStages][2][kSplit ? kQueries : 8][8], ones[2][2][kSplit ? kKeys : 8][8];
  u64 kv_full, kv_empty;
  u64 q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages];
  u64 item_full[2], item_empty[2];
  Item item[2], next_item;          // next_item is used by the producer only
  int reduce_piece[kGroups];        // to which a staging buffer is to be added, the first of four; -1: the end
  int4 info[kStages];               // BlockInfo
  int2 bounds[kStages][kTileKeys];  // of a masked block: first and past-the-last query that sees each key
};

constexpr u32 kBytesKV = sizeof(Shared::k) + sizeof(Shared::v);
constexpr u32 kBytesQ = sizeof(Shared::q) / kStages;
constexpr u32 kBytesDout = sizeof(Shared::dout) / kStages;
constexpr u32 kSplitStatsBytes = 16;  // of a query
constexpr u32 kBytesRow = kQueries * (kSplit ? kSplitStatsBytes : sizeof(float));
constexpr u32 kBytesBounds = sizeof(Shared::bounds) / kStages;

DEVICE Item load_item(const BackwardParams& p, int index) {
  if (index >= OF_MASK(p, num_items)) return {-1};
  const int4 item = __ldg(p.items + index), tile = __ldg(p.plan.tiles + item.x);
  return {tile.x, tile.w, tile.y, tile.z, item.y & 0xffff, item.y >> 16, item.x, item.z, item.w};
}

// ---- producer: one thread ----

DEVICE void produce(const BackwardParams& p, Shared& s) {
  prefetch_map(&p.q);
  prefetch_map(&p.k);
  prefetch_map(&p.v);
  prefetch_map(&p.dout);
#if STREAM_KV
  prefetch_map(&p.k_remote);
  prefetch_map(&p.v_remote);
  ArrivalWaiter waiter;
#endif
  PipelineState<kStages> stage;
  PipelineState<2> slot;
  u32 kv_parity = 1;
  s.next_item = load_item(p, STREAM_KV ? atomicAdd(p.counter, 1) : blockIdx.x);
  while (true) {
    barrier_wait(smem_address(&s.item_empty[slot.index]), slot.parity ^ 1);
    const Item& item = s.item[slot.index] = s.next_item;  // valid while its blocks are loaded
    barrier_arrive(smem_address(&s.item_full[slot.index]));
    slot.advance();
    if (item.row < 0) break;
    auto fetch_next = [&] { s.next_item = load_item(p, (STREAM_KV ? 0 : gridDim.x) + atomicAdd(p.counter, 1)); };
    if (item.empty()) {
      fetch_next();
      continue;
    }
    const int head_kv = item.head / p.group;
    barrier_wait(smem_address(&s.kv_empty), kv_parity);
    kv_parity ^= 1;
    const u32 kv = smem_address(&s.kv_full);
    barrier_expect_bytes(kv, kBytesKV);
#if STREAM_KV
    // Also for hidden keys behind the tile, which are loaded with it: NaN in memory that they have not yet filled would
    // reach dQ (0 * NaN).
    waiter.await(p.arrival_barrier, NUM_ARRIVING(p), item.row - p.arrival_barrier.first + kTileKeys);
#endif
    load_panels<kHeadDim / kPanel>(&OF_KEY(p, item.row, k), smem_address(s.k), kTileKeys * kPanelRowBytes,
                                   row_of_key(p, item.row), head_kv, kv);
    load_panels<kHeadDimV / kPanel>(&OF_KEY(p, item.row, v), smem_address(s.v), kTileKeys * kPanelRowBytes,
                                    row_of_key(p, item.row), head_kv, kv);
    int segment = item.first_segment, n = item.first_block, h = 0, left = item.blocks;
    while (n > 0 && n >= __ldg(p.plan.segments + 2 * segment).y) n -= __ldg(p.plan.segments + 2 * segment++).y;
    bool first = true, last = false;
    while (!last) {
      const int4 range = __ldg(p.plan.segments + 2 * segment), more = __ldg(p.plan.segments + 2 * segment + 1);
      const int row = range.x + n * STEP_OF(p.plan), head = item.head + h;
      const int masked = (n < range.z || n >= range.w ? 1 : 0) | (n < more.x || n >= more.y ? 2 : 0);
      int4 info =
          make_int4(row, 2 * head * p.units + (kRegisterOperands ? 2 : 1) * (row / 16), 4 * segment + masked, 0);
      if (!OF_MASK(p, heads_inner) || ++h == item.heads) {
        if (OF_MASK(p, heads_inner)) h = 0;
        if (++n == range.y) {
          n = 0;
          if (++segment == item.past_segment) {
            segment = item.first_segment;
            last = OF_MASK(p, heads_inner) || ++h == item.heads;
          }
        }
      }
      if (--left == 0) last = true;
      info.w = last;
      const int i = stage.index;
      u32 bar = smem_address(&s.q_full[i]);
      barrier_wait(smem_address(&s.q_empty[i]), stage.parity ^ 1);
      s.info[i] = info;
      barrier_expect_bytes(bar, kBytesQ + kBytesRow + (masked ? kBytesBounds : 0));
      if (masked)
        load_bytes(smem_address(s.bounds[i]), p.plan.bounds + static_cast<i64>(info.z / 4) * kTileKeys, kBytesBounds,
                   bar);
      load_packed<kHeadDim / kPanel>(&p.q, smem_address(s.q[i]), kQueries * kPanelRowBytes, row, head, p.log2_packed,
                                     bar);
      const i64 at = static_cast<i64>(head) * p.stats_row + row;
      load_bytes(smem_address(kSplit ? (void*)s.stats[i][0] : s.lse[i]), p.lse + (kSplit ? 4 * at : at), kBytesRow,
                 bar);
      bar = smem_address(&s.dout_full[i]);
      barrier_wait(smem_address(&s.dout_empty[i]), stage.parity ^ 1);
      barrier_expect_bytes(bar, kBytesDout + (kSplit ? 0 : kBytesRow));
      load_packed<kHeadDimV / kPanel>(&p.dout, smem_address(s.dout[i]), kQueries * kPanelRowBytes, row, head,
                                      p.log2_packed, bar);
      if (!kSplit) load_bytes(smem_address(s.delta[i]), p.delta + at, kBytesRow, bar);
      stage.advance();
      if (first) fetch_next();  // early, to hide its latency
      first = false;
    }
  }
  let_next_kernel_start();
  leave(p.counter);
  // So that kernels after this one on the stream also come after get_rows.cu.
  if (STREAM_KV) await_earlier_kernels();
}

// ---- two warps, one for each consumer warpgroup, that add staging buffers to the sums in device memory ----

DEVICE void reduce_staged(const BackwardParams& p, Shared& s, int warpgroup) {
  const u32 free = kStagingFree + warpgroup, full = kStagingFull + warpgroup;
  while (true) {
    named_arrive(free, kReduceThreads);
    named_sync(full, kReduceThreads);
    const int piece = s.reduce_piece[warpgroup];
    if (piece < 0) break;
    if (threadIdx.x % 32 == 0) {
      if (kRegisterOperands) {
        float* sums = p.key_sums + static_cast<i64>(piece) * kPieceFloats;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          add_floats(sums + i * kTileKeys / 16 * kPieceFloats, smem_address(s.staging[warpgroup][i]),
                     4 * kPieceFloats * sizeof(float));
      } else {
        add_floats(p.dq + static_cast<i64>(piece) * kPieceFloats, smem_address(s.staging[warpgroup]),
                   4 * kPieceFloats * sizeof(float));
      }
      bulk_wait_read();
    }
    __syncwarp();
  }
  bulk_wait();
}

// ---- consumers ----

// Descriptor of an operand of 64 rows and 16 columns without swizzle: two halves of 8 columns, in core matrices of 8
// rows.
constexpr int kCoreRowBytes = 16;  // of a core matrix
DEVICE u64 narrow_operand(const void* p) {
  u64 d;
  const u32 low = uniform(descriptor_low(smem_address(p), kKeys * kCoreRowBytes));
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "n"(descriptor_units(8 * kCoreRowBytes)));
  return d;
}

// acc[64 keys, 64 queries] = a[64 keys, kColumns] * b[64 queries, kColumns]^T; with SPLIT_STATS + ones * stats^T
template <int kColumns>
DEVICE void issue_scores_t(float (&acc)[kQueries / 2], const Operand& a, const Operand& b, const void* ones,
                           const void* stats) {
  wgmma_fence();
  if (kSplit) Wgmma<T, kQueries>::template ss<0, 0>(acc, narrow_operand(ones), narrow_operand(stats), 0);
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i)
    Wgmma<T, kQueries>::template ss<0, 0>(acc, a.at(columns_step(i, kTileKeys)), b.at(columns_step(i, kQueries)),
                                          kSplit || i > 0);
  wgmma_commit();
}

// The same with the first operand in registers.
template <int kColumns>
DEVICE void issue_scores_t(float (&acc)[kQueries / 2], const u32 (&a)[kColumns / 4], const Operand& b, const void* ones,
                           const void* stats) {
  wgmma_fence();
  if (kSplit) Wgmma<T, kQueries>::template ss<0, 0>(acc, narrow_operand(ones), narrow_operand(stats), 0);
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i)
    Wgmma<T, kQueries>::template rs<0>(acc, a + 4 * i, b.at(columns_step(i, kQueries)), kSplit || i > 0);
  wgmma_commit();
}

// acc[64 keys, kColumns] += a[64 keys, 64 queries] * b[64 queries, kColumns]
template <int kColumns>
DEVICE void issue_key_gradient(float (&acc)[kColumns / 2], const u32 (&a)[kQueries / 4], const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kQueries / 16; ++i) Wgmma<T, kColumns>::template rs<1>(acc, a + 4 * i, b.at(rows_step(i)), 1);
  wgmma_commit();
}

// acc[64 queries, kDqColumns] = ds[64 queries, 128 keys] * keys[128 keys, kDqColumns]
DEVICE void issue_dq(float (&acc)[kDqColumns / 2], const Operand& a, const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kTileKeys / 16; ++i)
    Wgmma<T, kDqColumns>::template ss<0, 1>(acc, a.at(columns_step(i, kQueries)), b.at(rows_step(i)), i > 0);
  wgmma_commit();
}

// acc[64 columns, half the queries] = a[64 columns, 128 keys] * ds[half the queries, 128 keys]^T; for head dim 64
DEVICE void issue_transposed_dq(float (&acc)[kDqColumns / 2], const u32 (&a)[kTileKeys / 4], const Operand& ds) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kTileKeys / 16; ++i)
    Wgmma<T, kDqColumns>::template rs<0>(acc, a + 4 * i, ds.at(columns_step(i, kQueries)), i > 0);
  wgmma_commit();
}

// Operands in registers that are constant over an item (kRegisterOperands).
struct RegisterOperands {
  u32 k[kHeadDim / 4], v[kHeadDimV / 4], k_t[kTileKeys / 4];
};

struct Consumer {
  const BackwardParams& p;
  Shared& s;
  const int warpgroup, lane, row;  // row: first of this thread's two keys in the tile; the second is row + 8
  PipelineState<kStages> stage;
  PipelineState<kDsBuffers> buffer;  // of dS
  u32 kv_parity = 0;
  const Operand k_half;
  u32 ds_store;

  DEVICE Consumer(const BackwardParams& p, Shared& s, int warpgroup)
      : p(p),
        s(s),
        warpgroup(warpgroup),
        lane(threadIdx.x % 32),
        row(warpgroup * kKeys + threadIdx.x % kWarpgroupThreads / kWarpThreads * 16 + threadIdx.x % kWarpThreads / 4),
        k_half(smem_address(s.k) + warpgroup * kDqColumns / kPanel * kTileKeys * kPanelRowBytes +
                   warpgroup * kDqColumns % kPanel * 2,
               kTileKeys * kPanelRowBytes) {
    // stmatrix: lane L gives the address of row L % 8 of matrix L / 8. Matrices 1 and 3 are 8 keys further, 2 and 3 are
    // 8 queries further.
    const int chunk = threadIdx.x % kWarpgroupThreads / kWarpThreads * 2 + lane / 8 % 2;
    ds_store =
        smem_address(s.ds[0][warpgroup]) + (lane / 16 * 8 + lane % 8) * kPanelRowBytes + ((chunk ^ (lane % 8)) << 4);
    opaque(ds_store);
  }

  // Loads one value for each of this thread's queries.
  DEVICE void load_values(float2 (&x)[8], u32 values) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = load_shared_v2(values + 32 * j);
  }

  static DEVICE BlockInfo uniform_info(const int4& x) {
    return {uniform(x.x), uniform(x.y), uniform(x.z), uniform(x.w)};
  }

  DEVICE BlockInfo block_info() const { return uniform_info(s.info[stage.index]); }

  // Issues S of the block; with kOfValues dP, from values and dout.
  template <bool kOfValues>
  DEVICE void issue_scores(float (&acc)[32]) {
    issue_scores_t<kHeadDim>(acc, Operand(smem_address(kOfValues ? s.v : s.k) + warpgroup * kKeys * kPanelRowBytes),
                             Operand(smem_address(kOfValues ? s.dout[stage.index] : s.q[stage.index])),
                             s.ones[kOfValues], s.stats[stage.index]);
  }

  // Issues S and dP.
  DEVICE void issue_scores_and_dp(float (&scores_t)[32], float (&dp_t)[32], const RegisterOperands& operands) {
    const void* stats = s.stats[stage.index];
    issue_scores_t<kHeadDim>(scores_t, operands.k, Operand(smem_address(s.q[stage.index])), s.ones[0], stats);
    issue_scores_t<kHeadDim>(dp_t, operands.v, Operand(smem_address(s.dout[stage.index])), s.ones[1], stats);
  }

  // Issues dQ from buffer `index` of dS.
  DEVICE void issue_dq_t(float (&dq_t)[kDqColumns / 2], int index, const RegisterOperands& operands) {
    issue_transposed_dq(dq_t, operands.k_t,
                        Operand(smem_address(s.ds[index]) + warpgroup * (kQueries / 2) * kPanelRowBytes));
  }

  // ldmatrix: lane L gives the address of row L % 8 of matrix L / 8. Matrices 1 and 3 are the lower rows of an operand,
  // 2 and 3 its right columns.
  DEVICE void load_operands(RegisterOperands& operands) {
    const int low = lane / 8 % 2, right = lane / 16, at = lane % 8,
              warp = threadIdx.x % kWarpgroupThreads / kWarpThreads;
    const u32 own = (warpgroup * kKeys + warp * 16 + low * 8 + at) * kPanelRowBytes;
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      const u32 column = ((2 * i + right) ^ at) << 4;
      load_matrices_x4(smem_address(s.k) + own + column, operands.k + 4 * i);
      load_matrices_x4(smem_address(s.v) + own + column, operands.v + 4 * i);
    }
    const u32 transposed = smem_address(s.k) + (right * 8 + at) * kPanelRowBytes + (((2 * warp + low) ^ at) << 4);
#pragma unroll
    for (int i = 0; i < kTileKeys / 16; ++i) load_transposed_x4(transposed + rows_step(i), operands.k_t + 4 * i);
  }

  DEVICE void form_probs(float (&scores_t)[32], const float2 (&lse)[8], const BlockInfo& info) {
    if (SOFTCAP) apply_softcap(scores_t, p.softcap_factor);
    if (info.segment_masked & (1 << warpgroup)) {
      const int2* of_key = s.bounds[stage.index] + row;
      const int2 bounds[2] = {of_key[0], of_key[8]};
      apply_mask(scores_t, info.column + 2 * (lane % 4), bounds);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float2 two = lse[i / 4];
      const float x = kSplit ? scores_t[i] * p.scale_log2 : fmaf(scores_t[i], p.scale_log2, i % 2 ? -two.y : -two.x);
      scores_t[i] = exp2_fast(x);
    }
  }

  DEVICE void pack(u32 (&packed)[16], const float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) packed[i] = T::pack(x[2 * i], x[2 * i + 1]);
  }

  // dS = P * (dP - delta). `values`: shared memory address of lse of this thread's first two queries.
  DEVICE void form_ds(const float (&probs_t)[32], const float (&dp_t)[32], const float2 (&delta)[8], u32 values,
                      u32 (&ds_t)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 two = delta[i / 2];
      float x = probs_t[2 * i] * (kSplit ? dp_t[2 * i] : dp_t[2 * i] + two.x);
      float y = probs_t[2 * i + 1] * (kSplit ? dp_t[2 * i + 1] : dp_t[2 * i + 1] + two.y);
      if (SOFTCAP) {
        const float2 lse = load_shared_v2(values + i / 2 * 32);
        x *= slope_of_cap(probs_t[2 * i], lse.x), y *= slope_of_cap(probs_t[2 * i + 1], lse.y);
      }
      ds_t[i] = T::pack(x, y);
    }
  }

  // Derivative of the softcap. The logit is recovered from the probability: keeping it would take 32 registers.
  DEVICE float slope_of_cap(float prob, float lse) const {
    const float capped = fmaxf((log2_fast(prob) + lse) * (1.f / p.scale_log2), -1.f);
    return 1.f - capped * capped;
  }

  DEVICE void store_ds(const u32 (&ds_t)[16]) {
    const u32 base = ds_store + buffer.index * (sizeof(Shared::ds) / kDsBuffers);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store_transposed_x4(base + rows_step(i), ds_t[4 * i], ds_t[4 * i + 1], ds_t[4 * i + 2], ds_t[4 * i + 3]);
  }

  // Writes accumulators of half the columns, from kFirst on, to a staging buffer.
  template <int kFirst, int N>
  DEVICE void write_staging(const float (&acc)[N], const void* to) {
    const u32 staging = smem_address(to) +
                        threadIdx.x % kWarpgroupThreads / kWarpThreads * kPieceFloats * sizeof(float) +
                        lane * sizeof(float4);
#pragma unroll
    for (int i = 0; i < kDqColumns / 8; ++i)
      store_shared_v4(staging + i * kWarpThreads * sizeof(float4), acc[kFirst + 4 * i], acc[kFirst + 4 * i + 1],
                      acc[kFirst + 4 * i + 2], acc[kFirst + 4 * i + 3]);
  }

  // Passes a staging buffer to the warp that adds it; the fence makes writes to it visible to TMA.
  DEVICE void arrive_staging_full(int piece) {
    if (threadIdx.x % kWarpgroupThreads == 0) s.reduce_piece[warpgroup] = piece;
    fence_async_proxy();
    named_arrive(kStagingFull + warpgroup, kReduceThreads);
  }

  DEVICE void reduce_dq(const float (&dq)[kDqColumns / 2], int piece) {
    named_sync(kStagingFree + warpgroup, kReduceThreads);
    write_staging<0>(dq, s.staging[warpgroup]);
    arrive_staging_full(piece);
  }

  // Adds transposed dQ: four pieces of 16 columns for every 16 queries.
  DEVICE void add_dq_t(const float (&dq_t)[kDqColumns / 2], int piece) {
    constexpr int kFloats = 16 * 16;  // of such a piece
    float* sums = p.dq + static_cast<i64>(piece) * kPieceFloats +
                  threadIdx.x % kWarpgroupThreads / kWarpThreads * kFloats + 4 * lane;
#pragma unroll
    for (int i = 0; i < kDqColumns / 8; ++i)
      add_global_v4(sums + i / 2 * 4 * kFloats + i % 2 * 4 * kWarpThreads, dq_t[4 * i], dq_t[4 * i + 1],
                    dq_t[4 * i + 2], dq_t[4 * i + 3]);
  }

  // Adds accumulators of half the columns, from kFirst on, to sums in device memory. `sums`: this thread's in a piece.
  template <int kFirst, int N>
  DEVICE void add_half(const float (&acc)[N], float* sums) {
#pragma unroll
    for (int i = 0; i < kDqColumns / 8; ++i)
      add_global_v4(sums + 4 * kWarpThreads * i, acc[kFirst + 4 * i], acc[kFirst + 4 * i + 1], acc[kFirst + 4 * i + 2],
                    acc[kFirst + 4 * i + 3]);
  }

  // Waits for the other warpgroup's dS of the previous block. It has then also finished reading dS of the block before
  // that, whose buffer may be overwritten.
  DEVICE void sync_ds_written() {
    named_sync(kDsWritten + 2 * buffer.index + 1 - warpgroup, kWarpgroupThreads * kGroups);
  }

  DEVICE void arrive_ds_written() {
    named_arrive(kDsWritten + 2 * buffer.index + warpgroup, kWarpgroupThreads * kGroups);
  }

  DEVICE void warp_scheduler_sync() { named_sync(kWarpScheduler + warpgroup, kWarpgroupThreads * kGroups); }

  DEVICE void warp_scheduler_arrive() { named_arrive(kWarpScheduler + 1 - warpgroup, kWarpgroupThreads * kGroups); }

  // One query block, with dQ of the previous one. Returns whether there is a next block.
  DEVICE bool step(float (&dk)[kHeadDim / 2], float (&dv)[kHeadDimV / 2], int& previous) {
    const int now = stage.index;
    float scores_t[32], dp_t[32], own[kDqSharesDp ? 1 : kDqColumns / 2];
    auto& dq = choose<kDqSharesDp>(dp_t, own);  // to save registers
    u32 probs_t[16], ds_t[16];
    barrier_wait(smem_address(&s.q_full[now]), stage.parity);
    issue_scores<false>(scores_t);
    const BlockInfo info = block_info();
    const u32 values = smem_address(s.lse[now]) + lane % 4 * 8;
    float2 lse[8], delta[8];
    if (!kSplit) load_values(lse, values);
    barrier_wait(smem_address(&s.dout_full[now]), stage.parity);
    issue_scores<true>(dp_t);
    wgmma_wait<1>();  // S
    fence_operand(scores_t);
    // Always true. ptxas moves nothing across a branch, and would otherwise sink the exponentials below the next wait.
    if (info.piece >= 0) form_probs(scores_t, lse, info), pack(probs_t, scores_t);
    issue_key_gradient<kHeadDimV>(dv, probs_t, Operand(smem_address(s.dout[now]), kQueries * kPanelRowBytes));
    if (!kSplit) load_values(delta, values + sizeof(Shared::lse));
    wgmma_wait<1>();  // dP
    fence_operand(dp_t);
    form_ds(scores_t, dp_t, delta, values, ds_t);
    if constexpr (ADD_DQ) {
      if (previous >= 0) sync_ds_written();
      const int before = buffer.index;
      buffer.advance();
      store_ds(ds_t);
      // For the first block the operand is stale and the result is not used: ptxas serializes all wgmmas if one is on
      // one side of a branch.
      issue_dq(dq, Operand(smem_address(s.ds[before])), k_half);
    }
    issue_key_gradient<kHeadDim>(dk, ds_t, Operand(smem_address(s.q[now]), kQueries * kPanelRowBytes));
    if constexpr (ADD_DQ) fence_async_proxy();
    wgmma_wait<1>();  // dV, dQ
    fence_operand(probs_t);
    fence_operand(dv);
    release(s.dout_empty[now], lane);
    if constexpr (ADD_DQ) {
      fence_operand(dq);
      arrive_ds_written();
      if (previous >= 0) reduce_dq(dq, previous);
      previous = info.piece + warpgroup * p.units;
    }
    wgmma_wait<0>();  // dK
    fence_operand(ds_t);
    fence_operand(dk);
    release(s.q_empty[now], lane);
    stage.advance();
    return !info.last;
  }

  // All query blocks of one work item.
  DEVICE void accumulate(float (&dk)[kHeadDim / 2], float (&dv)[kHeadDimV / 2]) {
    int previous = -1;  // piece of dQ of the previous block; -1: none
    while (step(dk, dv, previous)) {
    }
    if constexpr (ADD_DQ) {
      float dq[kDqColumns / 2];
      sync_ds_written();
      issue_dq(dq, Operand(smem_address(s.ds[buffer.index])), k_half);
      wgmma_wait<0>();
      fence_operand(dq);
      release(s.kv_empty, lane);
      reduce_dq(dq, previous);
    } else {
      release(s.kv_empty, lane);
    }
  }

  // The same with kRegisterOperands. At the start of a block its S and dP are complete and no wgmma is in flight:
  // shared memory accesses and exponentials would have to wait for it.
  DEVICE void accumulate_from_registers(float (&dk)[kHeadDim / 2], float (&dv)[kHeadDimV / 2]) {
    RegisterOperands operands;
    load_operands(operands);
    release(s.kv_empty, lane);
    float scores_t[32], dp_t[32], dq_t[kDqColumns / 2];
    auto is_there = [&](const PipelineState<kStages>& block) {
      return barrier_test(smem_address(&s.q_full[block.index]), block.parity) &
             barrier_test(smem_address(&s.dout_full[block.index]), block.parity);
    };
    auto await = [&] {
      barrier_wait(smem_address(&s.q_full[stage.index]), stage.parity);
      barrier_wait(smem_address(&s.dout_full[stage.index]), stage.parity);
    };
    await();
    BlockInfo info = block_info();
    issue_scores_and_dp(scores_t, dp_t, operands);
    wgmma_wait<0>();
    fence_operand(scores_t), fence_operand(dp_t), fence_operand(operands.k), fence_operand(operands.v);
    int before = -1;  // piece of dQ of the previous block; -1: none
    bool is_last;
    do {
      const int now = stage.index, of_before = buffer.index;
      is_last = info.last;
      const u32 values = smem_address(s.lse[now]) + lane % 4 * 8;
      float2 lse[8], delta[8];
      if (!kSplit) load_values(lse, values);
      form_probs(scores_t, lse, info);
      if (!kSplit) load_values(delta, values + sizeof(Shared::lse));
      PipelineState<kStages> next = stage;
      next.advance();
      const bool is_next = is_there(next);  // tested early, to hide the latency
      u32 probs_t[16], ds_t[16];
      form_ds(scores_t, dp_t, delta, values, ds_t);
      pack(probs_t, scores_t);
      buffer.advance();
      store_ds(ds_t);
      fence_async_proxy();
      if (is_last) arrive_ds_written();
      stage.advance();
      if (!is_last && !is_next) await();
      warp_scheduler_sync();  // also implies that the other warpgroup's dS of the previous block is written
      issue_key_gradient<kHeadDimV>(dv, probs_t, Operand(smem_address(s.dout[now]), kQueries * kPanelRowBytes));
      issue_key_gradient<kHeadDim>(dk, ds_t, Operand(smem_address(s.q[now]), kQueries * kPanelRowBytes));
      // dQ in the first block, and S and dP in the last one, have stale operands and are not used: ptxas serializes all
      // wgmmas if one is on one side of a branch.
      issue_dq_t(dq_t, of_before, operands);
      wgmma_wait<1>();  // dV, dK
      fence_operand(probs_t), fence_operand(ds_t), fence_operand(dv), fence_operand(dk);
      issue_scores_and_dp(scores_t, dp_t, operands);
      wgmma_wait<2>();  // dQ: the other warpgroup may overwrite its buffer of dS after it next issues
      fence_operand(dq_t), fence_operand(operands.k_t);
      warp_scheduler_arrive();
      const int4 next_info = s.info[stage.index];  // after the last block: stale, not used
      release(s.q_empty[now], lane);
      release(s.dout_empty[now], lane);
      if (before >= 0) add_dq_t(dq_t, before);
      before = info.piece + 4 * warpgroup;
      wgmma_wait<0>();
      fence_operand(scores_t), fence_operand(dp_t), fence_operand(operands.k), fence_operand(operands.v);
      info = uniform_info(next_info);
    } while (!is_last);
    sync_ds_written();
    issue_dq_t(dq_t, buffer.index, operands);
    wgmma_wait<0>();
    fence_operand(dq_t), fence_operand(operands.k_t);
    add_dq_t(dq_t, before);
  }

  // Adds dK and dV of an item that has only some of the query heads of its group.
  DEVICE void add_key_gradients(const Item& item, const float (&dk)[kHeadDim / 2], const float (&dv)[kHeadDimV / 2]) {
    constexpr int kHalf = kDqColumns / 2, kUnits = kTileKeys / 16;
    const int head_kv = item.head / p.group;
    const int piece = (item.tile * p.heads_kv + head_kv) * 4 * kUnits + 4 * warpgroup;
    if constexpr (kRegisterOperands) {
      named_sync(kStagingFree + warpgroup, kReduceThreads);
      write_staging<0>(dk, s.staging[warpgroup][0]);
      write_staging<kHalf>(dk, s.staging[warpgroup][1]);
      write_staging<0>(dv, s.staging[warpgroup][2]);
      write_staging<kHalf>(dv, s.staging[warpgroup][3]);
      arrive_staging_full(piece);
      return;
    }
    float* sums =
        p.key_sums + static_cast<i64>(piece + threadIdx.x % kWarpgroupThreads / kWarpThreads) * kPieceFloats + 4 * lane;
    add_half<0>(dk, sums);
    add_half<kHalf>(dk, sums + kUnits * kPieceFloats);
    add_half<0>(dv, sums + 2 * kUnits * kPieceFloats);
    add_half<kHalf>(dv, sums + 3 * kUnits * kPieceFloats);
  }

  DEVICE void store_key_gradients(const Item& item, const float (&dk)[kHeadDim / 2], const float (&dv)[kHeadDimV / 2]) {
    const i64 key = row_of_key(p, item.row) + row;
    const int head_kv = item.head / p.group;
    const bool valid[2] = {row < item.rows, row + 8 < item.rows};
    store_gradient<T, kHeadDim>(OF_KEY(p, item.row, store), OF_KEY(p, item.row, dk),
                                key * p.dk_row + head_kv * p.dk_head, 8 * p.dk_row, valid, dk, p.scale, lane);
    store_gradient<T, kHeadDimV>(OF_KEY(p, item.row, store), OF_KEY(p, item.row, dv),
                                 key * p.dv_row + head_kv * p.dv_head, 8 * p.dv_row, valid, dv, 1.f, lane);
  }

  DEVICE void run() {
    PipelineState<2> slot;
    if (kRegisterOperands && warpgroup == 1) warp_scheduler_arrive();
    while (true) {
      barrier_wait(smem_address(&s.item_full[slot.index]), slot.parity);
      // Kept in shared memory until the gradients are written, to save registers.
      const Item& item = s.item[slot.index];
      if (item.row < 0) break;
      float dk[kHeadDim / 2], dv[kHeadDimV / 2];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = 0.f;
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] = 0.f;
      if (!item.empty()) {
        barrier_wait(smem_address(&s.kv_full), kv_parity);
        kv_parity ^= 1;
        if constexpr (kRegisterOperands)
          accumulate_from_registers(dk, dv);
        else
          accumulate(dk, dv);
      }
      if (item.heads < p.group) {
        if (!kRegisterOperands || !item.empty()) add_key_gradients(item, dk, dv);
      } else if (!item.empty() || p.store != kAddFloat)
        store_key_gradients(item, dk, dv);
      release(s.item_empty[slot.index], lane);
      slot.advance();
    }
    if (kRegisterOperands && warpgroup == 0) warp_scheduler_sync();
    named_sync(kStagingFree + warpgroup, kReduceThreads);
    if (threadIdx.x % kWarpgroupThreads == 0) s.reduce_piece[warpgroup] = -1;
    __syncwarp();
    named_arrive(kStagingFull + warpgroup, kReduceThreads);
  }
};

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1) ffa_backward(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    init_buffer(s.kv_full, s.kv_empty, 4 * kGroups);
    init_buffers(s.q_full, s.q_empty, 4 * kGroups);
    init_buffers(s.dout_full, s.dout_empty, 4 * kGroups);
    init_buffers(s.item_full, s.item_empty, 4 * kGroups);
    barrier_init_fence();
  }
  if (kSplit) {
    for (int i = threadIdx.x; i < 2 * 8 * kKeys; i += blockDim.x) {
      for (int stage = 0; stage < kStages; ++stage) s.stats[stage][1][0][i % (8 * kQueries)] = 0;
      const int what = i / (8 * kKeys), column = i % 8;
      s.ones[what][0][0][i % (8 * kKeys)] = column / 3 == what ? T::pack(1.f, 0.f) : 0;
      s.ones[what][1][0][i % (8 * kKeys)] = 0;
    }
    fence_async_proxy();
  }
  __syncthreads();
  // With STREAM_KV this kernel overlaps get_rows.cu; all else that it reads was written before that kernel
  // started.
  if (!STREAM_KV) await_earlier_kernels();
  if (threadIdx.x < kWarpgroupThreads) {
    registers_shrink<kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (threadIdx.x == 0)
      produce(p, s);
    else if (warp == 1 || warp == 2)
      reduce_staged(p, s, warp - 1);
  } else {
    registers_grow<kConsumerRegisters>();
    Consumer(p, s, uniform(threadIdx.x / kWarpgroupThreads) - 1).run();
  }
}
