// Sparse attention backward for sm_90a, dK and dV, by lists of the blocks of queries that see a block of keys. A work
// item is such a block of keys of one key head, with its list or a part of it: long lists are cut by ranges of queries.
// SMs process the first parts of all lists, then the second ones, so that they read the same queries at about the same
// time (L2 cache); partial sums wait in device memory for the next part. Adjacent parts of a short list are merged.
//
// K and V of the item stay in shared memory, dK and dV in registers. A step is 64 accumulator rows (sparse_tiles.cuh)
// of a listed block of queries, with transposed scores as in backward.cu. A consumer warpgroup owns 64 keys. For blocks
// of 128 keys two warpgroups share an item and process every step. For blocks of 64 keys each has its own items,
// buffers and producer, so that one computes while the other is in the prologue or epilogue of an item.
//
// With ADD_DQ also dQ, as in backward.cu: dS goes through shared memory, each warpgroup computes half the columns of dQ
// of the previous step, and a warp adds them to fp32 sums in device memory. Without ADD_DQ the kernel is deterministic:
// parts of a list are added in order.
//
// Compile-time: HEAD_DIM, K_BLOCK (64 or 128), ADD_DQ (0 or 1, of 128 keys), DTYPE (Bf16 or Fp16).

#include "../../common/wgmma.cuh"
#include "gradients.cuh"
#include "row_products.cuh"
#include "softmax.cuh"
#include "sparse_tiles.cuh"

constexpr int kHeadDim = HEAD_DIM, kGroups = 2, kStep = 64;
constexpr int kTileKeys = K_BLOCK, kMembers = kTileKeys / kStep;  // a team: the warpgroups that share items
constexpr int kTeams = kGroups / kMembers;
// Buffers of a team. Those of dO are released earlier than those of Q.
constexpr int kQStages = ADD_DQ || kTeams > 1 ? 3 : 4, kDoutStages = kTeams > 1 ? 2 : kQStages;
constexpr int kHalf = kHeadDim / 2;
constexpr u32 kPieceFloats = kHalf * 16;  // a piece: 16 accumulator rows, half the columns, in accumulator layout
constexpr int kBlockThreads = kWarpgroupThreads * (kGroups + 1);
constexpr bool kDqSharesDp = kHalf == kWarpgroupRows;  // dQ and dP use the same registers
static_assert(kTeams == 1 || !ADD_DQ);
using T = DTYPE;

// Registers of a thread. Together they are all that the block was launched with.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kProducerRegisters + kGroups * kConsumerRegisters == 168 * (kGroups + 1));

// Flags at the end of an item, with kLastStep: earlier parts left sums; the item has no entries.
enum : int { kSumsThere = 8, kAddsNothing = 16 };
constexpr int kHeadShift = 5;  // bit position of the key head in these flags

// Named barriers, each for one warpgroup: the first of kGroups, or of two pairs of, successive ids.
enum NamedBarrier : u32 {
  kStagingFree = 1,                       // its staging buffer has been read, by the warp that reduces it
  kStagingFull = kStagingFree + kGroups,  // its staging buffer is written
  kDsWritten = kStagingFull + kGroups,    // its dS is written: one for each of two buffers of dS
};
constexpr u32 kReduceThreads = kWarpgroupThreads + kWarpThreads;  // a consumer warpgroup and its reduce warp

struct SparseKeysParams {
  TensorMap q, k, v, dout;
  SparseTiles tiles;  // lists are of blocks of queries, [lists of heads, blocks of keys]; offsets: one array
  // [packs, stats_rows, heads of a tile]: lse times log2 e. A block of queries has stats_block rows, so that it begins
  // at a multiple of 16 bytes.
  const float *lse, *delta;
  // [packs, 2 halves, units] pieces; a unit is 16 accumulator rows; each block of queries has block_units
  float* dq_sums;
  void *dk, *dv;
  i64 dk_row, dk_head, dv_row, dv_head;  // strides, elements
  i64 stats_rows;
  float4* part_sums;  // [sum_heads, pieces of keys, kMembers, dK and dV, head_dim / 8, 128 threads]
  u32* parts_done;    // [as many, pieces of keys, kMembers, 4 warps] of zeros; neither is read of one part
  // Without ADD_DQ: most parts of a list; blocks of queries (`window`) and average steps of a part, at least; key heads
  // that have their own memory for partial sums.
  int parts, window, least_steps, sum_heads;
  int stats_block, units, block_units;
  float scale, scale_log2;
};

// Buffers of a team.
struct Buffers {
  alignas(kSwizzleAtomBytes) u16 k[kHeadDim / kPanel][kTileKeys][kPanel];
  u16 v[kHeadDim / kPanel][kTileKeys][kPanel];
  u16 q[kQStages][kHeadDim / kPanel][kWarpgroupRows][kPanel];
  u16 dout[kDoutStages][kHeadDim / kPanel][kWarpgroupRows][kPanel];
};

// Barriers and step descriptions of a team.
struct alignas(16) State {
  float lse[kQStages][kWarpgroupRows], delta[kDoutStages][kWarpgroupRows];
  int4 info[kQStages];  // flags, first query, past-the-last query of the block, number of the keys;
                        // at the end: flags, part, the next part, number of the keys
  u64 kv_full, kv_empty;
  u64 q_full[kQStages], q_empty[kQStages], dout_full[kDoutStages], dout_empty[kDoutStages];
  int sums[kQStages];  // piece of dq_sums, the first half
  int4 item;           // description passed at the end of the item that is being loaded
};

struct Shared {
  Buffers buffers[kTeams];
  float staging[kGroups][ADD_DQ ? 4 * kPieceFloats : 1];
  u16 ds[2][ADD_DQ ? kGroups : 1][ADD_DQ ? kWarpgroupRows : 1][ADD_DQ ? kStep : 1];
  State states[kTeams];
  int staged_piece[kGroups];  // of the staging buffer; -1: the end
};

constexpr u32 kBytesK = sizeof(Buffers::k);
constexpr u32 kBytesQ = sizeof(Buffers::q) / kQStages;
constexpr u32 kBytesRow = kWarpgroupRows * sizeof(float);

// ---- producers: one thread of each team ----

struct Loader {
  const SparseKeysParams& p;
  Buffers& b;
  State& s;
  PipelineState<kQStages> q_stage;
  PipelineState<kDoutStages> dout_stage;
  u32 kv_parity = 1;

  DEVICE void keys(int piece, int head_kv) {
    const u32 bar = smem_address(&s.kv_full);
    barrier_wait(smem_address(&s.kv_empty), kv_parity);
    kv_parity ^= 1;
    barrier_expect_bytes(bar, 2 * kBytesK);
    for (int i = 0; i < kTileKeys; i += kPiece) {
      load_panels<kHeadDim / kPanel>(&p.k, smem_address(b.k) + i * kPanelRowBytes, kTileKeys * kPanelRowBytes,
                                     piece * kTileKeys + i, head_kv, bar);
      load_panels<kHeadDim / kPanel>(&p.v, smem_address(b.v) + i * kPanelRowBytes, kTileKeys * kPanelRowBytes,
                                     piece * kTileKeys + i, head_kv, bar);
    }
  }

  DEVICE u32 acquire_q(const int4& info) {
    barrier_wait(smem_address(&s.q_empty[q_stage.index]), q_stage.parity ^ 1);
    s.info[q_stage.index] = info;
    return smem_address(&s.q_full[q_stage.index]);
  }

  // Loads 64 accumulator rows of a block of queries, from `acc_row` on.
  DEVICE void step(const SparseTiles& t, int block, int pack, int acc_row) {
    const int piece = s.item.w;
    pack += (s.item.x >> kHeadShift) * t.packs;
    const int first_row = block * t.query_block, past_row = min(t.num_rows, first_row + t.query_block);
    const int row = first_row + (acc_row >> t.log2_heads),
              head = (pack << t.log2_heads) + (acc_row & (1 << t.log2_heads) - 1);
    const int past_key = (piece + 1) * kTileKeys;
    const bool hides =
        past_row - row << t.log2_heads < kWarpgroupRows || row + t.reach < past_key || past_key > t.num_keys;
    u32 bar = acquire_q(make_int4(hides ? kHidesKeys : 0, row, past_row, piece));
    if (ADD_DQ) s.sums[q_stage.index] = 2 * pack * p.units + block * p.block_units + acc_row / 16;
    const i64 stats = (pack * p.stats_rows + static_cast<i64>(block) * p.stats_block << t.log2_heads) + acc_row;
    barrier_expect_bytes(bar, kBytesQ + kBytesRow);
    load_panels<kHeadDim / kPanel>(&p.q, smem_address(b.q[q_stage.index]), kWarpgroupRows * kPanelRowBytes, row, head,
                                   bar);
    load_bytes(smem_address(s.lse[q_stage.index]), p.lse + stats, kBytesRow, bar);
    q_stage.advance();
    bar = smem_address(&s.dout_full[dout_stage.index]);
    barrier_wait(smem_address(&s.dout_empty[dout_stage.index]), dout_stage.parity ^ 1);
    barrier_expect_bytes(bar, kBytesQ + kBytesRow);
    load_panels<kHeadDim / kPanel>(&p.dout, smem_address(b.dout[dout_stage.index]), kWarpgroupRows * kPanelRowBytes,
                                   row, head, bar);
    load_bytes(smem_address(s.delta[dout_stage.index]), p.delta + stats, kBytesRow, bar);
    dout_stage.advance();
  }

  DEVICE void arrive_info(const int4& info) {
    barrier_arrive(acquire_q(info));
    q_stage.advance();
  }
};

// volatile, so that it is recomputed at each use and occupies no register of the producer.
DEVICE int own_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Number of entries of an ascending list that are below `number`. Called by a whole warp.
DEVICE int entries_below(const int* list, int count, int number) {
  int first = 0, past = count;
  while (first < past) {
    const int stride = (past - first + 31) / 32, at = first + own_lane() * stride;
    const u32 below = __ballot_sync(0xffffffffu, at < past && __ldg(list + at) < number);
    const int found = __popc(below);
    past = min(past, first + found * stride);
    if (found) first += (found - 1) * stride + 1;
  }
  return first;
}

// Teams take items from one atomic counter, each after the list of its previous item has been loaded. No deadlock: an
// item waits only for sums of items with lower indices. Of all items that have been taken and are not finished, the one
// with the lowest index waits for nothing, as all lower ones are finished; its team is resident on an SM and works on
// this item first, as it takes items in ascending order. A part without entries also waits and signals the next, so
// this holds for any list. If first items were assigned by block index instead, an item could wait for a block that
// gets no SM while other kernels occupy it. A second team waits up to 10 us until every SM has taken an item.
DEVICE void produce(const SparseKeysParams& p, Buffers& b, State& s, int team) {
  const SparseTiles& t = p.tiles;
  for (int i = 0; team > 0 && i < 100 && load_relaxed(t.counter) < gridDim.x; ++i) sleep_ns(100);
  Loader loader{p, b, s};
  const int most_parts = ADD_DQ ? 1 : p.parts;
  const int steps = t.packs * (((t.query_block << t.log2_heads) + kWarpgroupRows - 1) / kWarpgroupRows);  // of an entry
  while (true) {
    int item = 0;
    if (own_lane() == 0) item = atomicAdd(t.counter, 1);
    item = uniform(item);
    if (item >= t.num_items) break;
    const int pieces = (t.num_keys + kTileKeys - 1) / kTileKeys;
    const int row = item / pieces, piece = item - row * pieces, first_key = piece * kTileKeys;
    const int head_kv = row / most_parts, part = row - head_kv * most_parts;
    const int list = (t.list_heads > 1 ? head_kv * t.key_blocks : 0) + first_key / t.key_block;
    const i64 begin = t.offsets ? offset_at(t, list) : list * t.list_step;
    const int count = t.offsets ? offset_at(t, list + 1) - static_cast<int>(begin) : __ldg(t.counts + list);
    const int* at = t.entries + begin;
    int next = 1, before = 0, left = count;
    if (!ADD_DQ && most_parts > 1) {
      int width = 1;
      while (width < most_parts && count * steps < p.least_steps * (most_parts / width)) width *= 2;
      if (part % width) continue;
      next = min(most_parts, part + width);
      before = entries_below(at, count, part * p.window);
      left = next == most_parts ? count - before : entries_below(at + before, count - before, next * p.window);
    }
    if (own_lane() == 0) {
      const int flags = (before ? kSumsThere : 0) | (left ? 0 : kAddsNothing);
      s.item = make_int4(kLastStep | flags | head_kv << kHeadShift, part, next, piece);  // saves registers
      at += before;
      bool loaded = false;
      for (; left > 0; --left) {
        const int block = __ldg(at++);
        const int rows = min(t.num_rows - block * t.query_block, t.query_block);
        if (static_cast<u32>(block) >= t.query_blocks) continue;  // an invalid entry
        if (block * t.query_block + rows - 1 + t.reach <= s.item.w * kTileKeys) continue;
        if (!loaded) loader.keys(s.item.w, s.item.x >> kHeadShift);
        loaded = true;
        for (int pack = 0; pack < t.packs; ++pack)
          for (int acc_row = 0; acc_row < rows << t.log2_heads; acc_row += kWarpgroupRows)
            loader.step(t, block, pack, acc_row);
      }
      loader.arrive_info(s.item);
    }
    __syncwarp();
  }
  if (own_lane() == 0) {
    loader.arrive_info(make_int4(kNoMoreSteps, 0, 0, 0));
    // Like leave(), but counts teams.
    if (atomicAdd(t.counter + 1, 1) == kTeams * static_cast<int>(gridDim.x) - 1) t.counter[0] = t.counter[1] = 0;
  }
}

// ---- two warps, one for each consumer warpgroup, that add staging buffers to the sums in device memory ----

DEVICE void reduce_staged(const SparseKeysParams& p, Shared& s, int warpgroup) {
  while (true) {
    named_arrive(kStagingFree + warpgroup, kReduceThreads);
    named_sync(kStagingFull + warpgroup, kReduceThreads);
    const int piece = s.staged_piece[warpgroup];
    if (piece < 0) break;
    if (threadIdx.x % 32 == 0) {
      add_floats(p.dq_sums + static_cast<i64>(piece) * kPieceFloats, smem_address(s.staging[warpgroup]),
                 4 * kPieceFloats * sizeof(float));
      bulk_wait_read();
    }
    __syncwarp();
  }
  bulk_wait();
}

// ---- consumers ----

// acc[64 rows, kHalf] = ds[64 rows, 128 keys] * keys[128 keys, kHalf]
DEVICE void issue_dq(float (&acc)[kHalf / 2], const Operand& a, const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kTileKeys / 16; ++i)
    Wgmma<T, kHalf>::template ss<0, 1>(acc, a.at(columns_step(i, kWarpgroupRows)), b.at(rows_step(i)), i > 0);
  wgmma_commit();
}

struct Consumer {
  const SparseKeysParams& p;
  Shared& s;
  Buffers& b;
  State& state;
  const int warpgroup, lane, key;  // key: first of this thread's, of the item
  PipelineState<kQStages> q_stage;
  PipelineState<kDoutStages> dout_stage;
  u32 kv_parity = 0;
  PipelineState<2> buffer;  // of dS
  int previous = -1;        // piece of dQ of the previous step, not added yet; -1: none
  u32 ds_store = 0;

  DEVICE Consumer(const SparseKeysParams& p, Shared& s, int warpgroup)
      : p(p),
        s(s),
        b(s.buffers[warpgroup / kMembers]),
        state(s.states[warpgroup / kMembers]),
        warpgroup(warpgroup),
        lane(threadIdx.x % 32),
        key(warpgroup % kMembers * kStep + threadIdx.x % kWarpgroupThreads / kWarpThreads * 16 +
            threadIdx.x % kWarpThreads / 4) {
    // stmatrix: lane L gives the address of row L % 8 of matrix L / 8. Matrices 1 and 3 are 8 keys further, 2 and 3 are
    // 8 accumulator rows further.
    const int chunk = threadIdx.x % kWarpgroupThreads / kWarpThreads * 2 + lane / 8 % 2;
    if (ADD_DQ)
      ds_store =
          smem_address(s.ds[0][warpgroup]) + (lane / 16 * 8 + lane % 8) * kPanelRowBytes + ((chunk ^ lane % 8) << 4);
    opaque(ds_store);
  }

  // This warpgroup's half of the columns of the keys, for dQ.
  DEVICE Operand keys_half() const {
    return Operand(
        smem_address(b.k) + warpgroup * kHalf / kPanel * kTileKeys * kPanelRowBytes + warpgroup * kHalf % kPanel * 2,
        kTileKeys * kPanelRowBytes);
  }

  // Waits for the other warpgroup's dS of the previous step; it has then also finished reading dS of the one before.
  DEVICE void sync_ds_written() const {
    named_sync(kDsWritten + 2 * buffer.index + 1 - warpgroup, kWarpgroupThreads * kGroups);
  }

  DEVICE void reduce_dq(const float (&dq)[kHalf / 2]) const {
    constexpr u32 kVectorBytes = kWarpThreads * sizeof(float4);  // written by a warp at a time: 8 columns
    named_sync(kStagingFree + warpgroup, kReduceThreads);
    const u32 staging = smem_address(s.staging[warpgroup]) +
                        threadIdx.x % kWarpgroupThreads / kWarpThreads * (kPieceFloats * sizeof(float)) +
                        lane * sizeof(float4);
#pragma unroll
    for (int i = 0; i < kHalf / 8; ++i)
      store_shared_v4(staging + i * kVectorBytes, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    if (threadIdx.x % kWarpgroupThreads == 0) s.staged_piece[warpgroup] = previous;
    fence_async_proxy();
    named_arrive(kStagingFull + warpgroup, kReduceThreads);
  }

  // dQ of the last step of an item.
  DEVICE void reduce_last_dq() {
    float dq[kHalf / 2];
    sync_ds_written();
    issue_dq(dq, Operand(smem_address(s.ds[buffer.index])), keys_half());
    wgmma_wait<0>();
    fence_operand(dq);
    reduce_dq(dq);
    previous = -1;
  }

  DEVICE void step(float (&dk)[kHeadDim / 2], float (&dv)[kHeadDim / 2], int flags) {
    float scores_t[kWarpgroupRows / 2], dp_t[kWarpgroupRows / 2], own[kDqSharesDp ? 1 : kHalf / 2];
    u32 probs_t[kWarpgroupRows / 4], ds_t[kWarpgroupRows / 4];
    const int piece = ADD_DQ ? uniform(state.sums[q_stage.index]) + warpgroup * p.units : 0;
    const u32 row = warpgroup % kMembers * kStep * kPanelRowBytes;
    issue_scores<T, kHeadDim, kWarpgroupRows, kTileKeys>(scores_t, Operand(smem_address(b.k) + row),
                                                         Operand(smem_address(b.q[q_stage.index])));
    barrier_wait(smem_address(&state.dout_full[dout_stage.index]), dout_stage.parity);
    issue_scores<T, kHeadDim, kWarpgroupRows, kTileKeys>(dp_t, Operand(smem_address(b.v) + row),
                                                         Operand(smem_address(b.dout[dout_stage.index])));
    u32 values = smem_address(state.lse[q_stage.index]) + lane % 4 * 8;
    float2 two[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) two[j] = load_shared_v2(values + 32 * j);
    wgmma_wait<1>();
    fence_operand(scores_t);
    if (flags & kHidesKeys) {
      const int4 info = state.info[q_stage.index];
      int2 bounds[2];
      const int past = info.z - info.y << p.tiles.log2_heads;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int number = info.w * kTileKeys + key + 8 * r;
        const int first =
            number < p.tiles.num_keys ? number - p.tiles.reach + 1 - info.y : kWarpgroupRows;  // that sees it
        bounds[r] = make_int2(min(max(first, 0), kWarpgroupRows) << p.tiles.log2_heads, past);
      }
      apply_mask(scores_t, 2 * (lane % 4), bounds);
    }
#pragma unroll
    for (int i = 0; i < kWarpgroupRows / 2; ++i)
      scores_t[i] = exp2_fast(fmaf(scores_t[i], p.scale_log2, i % 2 ? -two[i / 4].y : -two[i / 4].x));
    pack_pairs<T>(probs_t, scores_t);
    issue_weighted<T, kHeadDim, kWarpgroupRows>(
        dv, probs_t, Operand(smem_address(b.dout[dout_stage.index]), kWarpgroupRows * kPanelRowBytes));
    values = smem_address(state.delta[dout_stage.index]) + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) two[j] = load_shared_v2(values + 32 * j);
    wgmma_wait<1>();  // dP
    fence_operand(dp_t);
#pragma unroll
    for (int i = 0; i < kWarpgroupRows / 4; ++i)
      ds_t[i] = T::pack(scores_t[2 * i] * (dp_t[2 * i] - two[i / 2].x),
                        scores_t[2 * i + 1] * (dp_t[2 * i + 1] - two[i / 2].y));
    auto& dq = choose<kDqSharesDp>(dp_t, own);  // to save registers
    if constexpr (ADD_DQ) {
      if (previous >= 0) sync_ds_written();
      const Operand before(smem_address(s.ds[buffer.index]));
      buffer.advance();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_transposed_x4(ds_store + buffer.index * (sizeof(Shared::ds) / 2) + rows_step(i), ds_t[4 * i],
                            ds_t[4 * i + 1], ds_t[4 * i + 2], ds_t[4 * i + 3]);
      // In an item's first step the operand is stale and the result is not used: ptxas serializes all wgmmas if one is
      // on one side of a branch.
      issue_dq(dq, before, keys_half());
    }
    issue_weighted<T, kHeadDim, kWarpgroupRows>(
        dk, ds_t, Operand(smem_address(b.q[q_stage.index]), kWarpgroupRows * kPanelRowBytes));
    if constexpr (ADD_DQ) fence_async_proxy();
    wgmma_wait<1>();  // dV, dQ
    if constexpr (ADD_DQ) {
      fence_operand(dq);
      named_arrive(kDsWritten + 2 * buffer.index + warpgroup, kWarpgroupThreads * kGroups);
      if (previous >= 0) reduce_dq(dq);
      previous = piece;
    }
    release(state.dout_empty[dout_stage.index], lane);
    dout_stage.advance();
    wgmma_wait<0>();
    fence_operand(probs_t);
    fence_operand(ds_t);
    fence_operand(dv);
    fence_operand(dk);
  }

  // Adds the partial sums of one accumulator.
  DEVICE static void add_sums(float (&acc)[kHeadDim / 2], const float4* sums) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      const float4 other = __ldcg(sums + kWarpgroupThreads * i);
      acc[4 * i] += other.x, acc[4 * i + 1] += other.y, acc[4 * i + 2] += other.z, acc[4 * i + 3] += other.w;
    }
  }

  DEVICE static void put_sums(const float (&acc)[kHeadDim / 2], float4* sums) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i)
      __stcg(sums + kWarpgroupThreads * i, make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
  }

  // Adds the partial sums of earlier parts. Returns whether this was the last part; if not, the sums are left for the
  // next part. Key heads whose indices differ by a multiple of sum_heads share the memory of sums, one after another:
  // the counter in `parts_done` grows by p.parts with each.
  DEVICE bool whole(float (&dk)[kHeadDim / 2], float (&dv)[kHeadDim / 2], int head_kv, const int4& item) {
    if (ADD_DQ || p.parts == 1) return true;
    constexpr int kSize = kHeadDim / 8 * kWarpgroupThreads;
    const int pieces = (p.tiles.num_keys + kTileKeys - 1) / kTileKeys;
    const bool last = item.z == p.parts, adds = !(item.x & kAddsNothing);
    const i64 at = static_cast<i64>(head_kv % p.sum_heads * pieces + item.w) * kMembers + warpgroup % kMembers;
    float4* sums = p.part_sums + 2 * at * kSize + threadIdx.x % kWarpgroupThreads;
    u32* done = p.parts_done + at * 4 + threadIdx.x % kWarpgroupThreads / kWarpThreads;
    const u32 begin = head_kv / p.sum_heads * p.parts;
    while (load_acquire_gpu(done) < begin + item.y) sleep_ns(100);
    if (item.x & kSumsThere && (last || adds)) add_sums(dk, sums), add_sums(dv, sums + kSize);
    if (!last && adds) put_sums(dk, sums), put_sums(dv, sums + kSize);
    __syncwarp();
    if (lane == 0) store_release_gpu(done, begin + item.z);
    return last;
  }

  DEVICE void store(const float (&acc)[kHeadDim / 2], void* to, i64 row_stride, i64 head_stride, float factor,
                    int head_kv, int first_key) const {
    const i64 first = first_key + key;
    const bool valid[2] = {first < p.tiles.num_keys, first + 8 < p.tiles.num_keys};
    store_gradient_as<T, kHeadDim, kStoreHalf>(to, first * row_stride + head_kv * head_stride, 8 * row_stride, valid,
                                               acc, factor, lane);
  }

  DEVICE void run() {
    while (true) {
      float dk[kHeadDim / 2], dv[kHeadDim / 2];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
      bool waited = false;
      int flags;
      int4 item;
      while (true) {
        barrier_wait(smem_address(&state.q_full[q_stage.index]), q_stage.parity);
        flags = uniform(state.info[q_stage.index].x);
        if (flags & kNoMoreSteps) break;
        if (flags & kLastStep) {
          item = state.info[q_stage.index];
        } else {
          if (!waited) barrier_wait(smem_address(&state.kv_full), kv_parity);
          waited = true;
          step(dk, dv, flags);
        }
        release(state.q_empty[q_stage.index], lane);
        q_stage.advance();
        if (flags & kLastStep) break;
      }
      if (flags & kNoMoreSteps) break;
      if constexpr (ADD_DQ)
        if (previous >= 0) reduce_last_dq();
      if (waited) release(state.kv_empty, lane), kv_parity ^= 1;
      const int head_kv = flags >> kHeadShift, first_key = item.w * kTileKeys;
      if (!whole(dk, dv, head_kv, item)) continue;
      store(dk, p.dk, p.dk_row, p.dk_head, p.scale, head_kv, first_key);
      store(dv, p.dv, p.dv_row, p.dv_head, 1.f, head_kv, first_key);
    }
    if (!ADD_DQ) return;
    named_sync(kStagingFree + warpgroup, kReduceThreads);
    if (threadIdx.x % kWarpgroupThreads == 0) s.staged_piece[warpgroup] = -1;
    __syncwarp();
    named_arrive(kStagingFull + warpgroup, kReduceThreads);
  }
};

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    ffa_sparse_backward_keys(const __grid_constant__ SparseKeysParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (State& state : s.states) {
      init_buffer(state.kv_full, state.kv_empty, 4 * kMembers);
      init_buffers(state.q_full, state.q_empty, 4 * kMembers);
      init_buffers(state.dout_full, state.dout_empty, 4 * kMembers);
    }
    barrier_init_fence();
  }
  __syncthreads();
  await_earlier_kernels();
  if (threadIdx.x < kWarpgroupThreads) {
    registers_shrink<kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp < kTeams) {
      produce(p, s.buffers[warp], s.states[warp], warp);
    } else if (ADD_DQ && (warp == 1 || warp == 2))
      reduce_staged(p, s, warp - 1);
  } else {
    registers_grow<kConsumerRegisters>();
    Consumer(p, s, uniform(threadIdx.x / kWarpgroupThreads) - 1).run();
  }
}
