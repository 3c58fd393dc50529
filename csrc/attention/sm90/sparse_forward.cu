// Sparse attention forward for sm_90a. A work item is a tile of 64 or 128 accumulator rows (sparse_tiles.cuh) over all
// keys of its list.
//
// As in forward.cu, a producer streams keys and values through shared memory and each consumer warpgroup owns 64
// own_rows. A step has 64 keys for each warpgroup: pieces of blocks, loaded by TMA, or single keys, gathered by four
// warps (cp.async). With tiles of 64 accumulator rows two thread blocks share an SM.
//
// Compile-time: HEAD_DIM, GROUPS (1 or 2 consumer warpgroups), INDEXED (0: lists of blocks; 1: of single keys), DTYPE
// (Bf16 or Fp16).

#include "../../common/wgmma.cuh"
#include "forward_consumer.cuh"
#include "sparse_tiles.cuh"

constexpr int kHeadDim = HEAD_DIM, kGroups = GROUPS, kStep = 64 * GROUPS;
constexpr int kKStages = INDEXED ? 3 : 2, kStages = 2;
constexpr int kBlockThreads = kWarpgroupThreads * (kGroups + 1);
using T = DTYPE;
using Gather = KeyGather<kHeadDim, kStep>;

// Registers of a thread. Together they are all that the block was launched with: 256 threads of 128 twice on an SM, or
// 384 of 168.
constexpr int kProducerRegisters = INDEXED ? 56 : 40;
constexpr int kConsumerRegisters = (kGroups == 1 ? 216 : 232) - (INDEXED ? 16 / kGroups : 0);
static_assert(kProducerRegisters + kGroups * kConsumerRegisters == (kGroups == 1 ? 128 : 168) * (kGroups + 1));

struct SparseForwardParams {
  TensorMap q, k, v;
  SparseTiles tiles;
  const u16 *keys, *values;  // where they are gathered
  u16* out;
  float* lse;
  float* max_logits;      // [heads], updated by atomic_max_logit; or null
  const float* sink_lse;  // or null
  int k_row, v_row;       // strides, elements
  i64 k_head, v_head, out_row, out_head, lse_row, lse_head, sink_row, sink_head;  // strides, elements
  float scale_log2, logit_scale;
};

struct Shared {
  alignas(kSwizzleAtomBytes) u16 q[kStages][kGroups][kHeadDim / kPanel][kWarpgroupRows][kPanel];
  u16 k[kKStages][kHeadDim / kPanel][kStep][kPanel];
  u16 v[kStages][kHeadDim / kPanel][kStep][kPanel];
  u64 q_full[kStages], q_empty[kStages];
  u64 k_full[kKStages], k_empty[kKStages], v_full[kStages], v_empty[kStages];
  alignas(16) StepInfo info[kKStages];
  int numbers[INDEXED ? 2 : 1][kStep];  // indices of the keys of this step and of the previous one
};

constexpr u32 kBytesQ = sizeof(Shared::q) / (kStages * kGroups);
constexpr u32 kBytesK = sizeof(Shared::v) / kStages;

// ---- producers ----

struct Loader {
  const SparseForwardParams& p;
  Shared& s;
  const int warp, lane;
  PipelineState<kKStages> k_stage;
  PipelineState<kStages> q_stage, v_stage;
  // Values are loaded after the keys of the next step, even of the next item: the consumers need them in this order.
  int4 earlier = make_int4(0, 0, 0, 0);  // blocks: first keys
  int earlier_head = -1, slot = 0;       // slot: of the numbers

  DEVICE void queries(const Tile& tile) {
    if (warp == 0 && lane == 0) {
      const u32 bar = smem_address(&s.q_full[q_stage.index]);
      barrier_wait(smem_address(&s.q_empty[q_stage.index]), q_stage.parity ^ 1);
      barrier_expect_bytes(bar, kGroups * kBytesQ);
#pragma unroll
      for (int w = 0; w < kGroups; ++w)
        load_tile_rows<kHeadDim>(&p.q, smem_address(s.q[q_stage.index][w]), p.tiles, tile, w, bar);
    }
    q_stage.advance();
  }

  // Blocks.
  DEVICE void step(const Tile& tile, int flags, const int4& keys) {
    if (lane == 0) {
      const u32 bar = smem_address(&s.k_full[k_stage.index]);
      barrier_wait(smem_address(&s.k_empty[k_stage.index]), k_stage.parity ^ 1);
      describe(s.info[k_stage.index], tile, flags);
      *reinterpret_cast<int4*>(s.info[k_stage.index].keys) = keys;
      barrier_expect_bytes(bar, kBytesK);
      load_pieces<kHeadDim, kStep>(&p.k, smem_address(s.k[k_stage.index]), keys, tile.head_kv, bar);
      load_values();
    } else if (earlier_head >= 0) {
      v_stage.advance();
    }
    k_stage.advance();
    earlier = keys, earlier_head = tile.head_kv;
  }

  DEVICE void load_values() {
    if (earlier_head < 0) return;
    barrier_wait(smem_address(&s.v_empty[v_stage.index]), v_stage.parity ^ 1);
    const u32 bar = smem_address(&s.v_full[v_stage.index]);
    barrier_expect_bytes(bar, kBytesK);
    load_pieces<kHeadDim, kStep>(&p.v, smem_address(s.v[v_stage.index]), earlier, earlier_head, bar);
    v_stage.advance();
  }

  // Single keys. The copies are asynchronous; no thread waits for them here.
  DEVICE void step(const Tile& tile, int flags, int index) {
    const bool seen = static_cast<u32>(index) < static_cast<u32>(p.tiles.num_keys);
    const u32 bits = __ballot_sync(0xffffffffu, seen), bar = smem_address(&s.k_full[k_stage.index]);
    Gather::share_indices(s.numbers[slot], warp, lane, seen ? index : -1);
    barrier_wait(smem_address(&s.k_empty[k_stage.index]), k_stage.parity ^ 1);
    if (lane == 0) {
      if (warp == 0) describe(s.info[k_stage.index], tile, flags);
      s.info[k_stage.index].keys[warp] = static_cast<int>(bits);
      barrier_arrive(bar);
    }
    gather(smem_address(s.k[k_stage.index]), p.keys + tile.head_kv * p.k_head, p.k_row, slot, bar);
    k_stage.advance();
    gather_values();
    slot ^= 1;
    earlier_head = tile.head_kv;
  }

  DEVICE void gather_values() {
    if (earlier_head < 0) return;
    barrier_wait(smem_address(&s.v_empty[v_stage.index]), v_stage.parity ^ 1);
    gather(smem_address(s.v[v_stage.index]), p.values + earlier_head * p.v_head, p.v_row, slot ^ 1,
           smem_address(&s.v_full[v_stage.index]));
    v_stage.advance();
  }

  DEVICE void gather(u32 smem, const u16* rows, int row_stride, int slot, u32 bar) const {
    Gather::copy_rows(smem + Gather::offset(warp, lane), rows + lane % Gather::kChunks * 8, row_stride, s.numbers[slot],
                      warp, lane);
    copies_arrive(bar);
  }

  // The consumers compute scores of this step but do not use them.
  DEVICE void end() {
    if (INDEXED)
      gather_values();
    else if (lane == 0)
      load_values();
    const u32 bar = smem_address(&s.k_full[k_stage.index]);
    if (lane == 0) {
      barrier_wait(smem_address(&s.k_empty[k_stage.index]), k_stage.parity ^ 1);
      if (warp == 0) {
        s.info[k_stage.index].flags = kNoMoreSteps;
        barrier_wait(smem_address(&s.q_empty[q_stage.index]), q_stage.parity ^ 1);
        barrier_arrive(smem_address(&s.q_full[q_stage.index]));
      }
      barrier_arrive(bar);
    }
    __syncwarp();
    if (INDEXED) copies_arrive(bar);
  }
};

DEVICE void produce(const SparseForwardParams& p, Shared& s, int warp, int lane) {
  Loader loader{p, s, warp, lane};
#if INDEXED
  walk_key_lists<kGroups, kHeadDim, kStep, false>(p.tiles, loader, warp, lane);
#else
  if (warp == 0) walk_block_lists<kGroups, kStep>(p.tiles, loader, lane);
#endif
}

// ---- consumers ----

DEVICE void store_item(const SparseForwardParams& p, const float (&acc)[kHeadDim / 2], const Softmax& softmax,
                       const SparseThreadRows& own_rows, int first_row, int head_rows, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = softmax.sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const bool any = sum > 0.f;
    float lse = any ? (softmax.reference[r] + log2_fast(sum)) * kLn2 : -kInfinity;
    float factor = any ? reciprocal_fast(sum) : 0.f;
    const i64 row = first_row + own_rows.row[r], head = (head_rows & 0xffff) + own_rows.head[r];
    const bool valid = own_rows.row[r] < head_rows >> 16;
    if (p.sink_lse && valid) {
      const float own = lse;
      lse = log_add(lse, __ldg(p.sink_lse + row * p.sink_row + head * p.sink_head));
      factor *= weight(own, lse);
    }
    if (valid && lane % 4 == 0) p.lse[row * p.lse_row + head * p.lse_head] = lse;
    if (p.max_logits) {
      const float top = quad_max(softmax.max[r]);
      if (valid && lane % 4 == 0 && top > -kInfinity) atomic_max_logit(p.max_logits + head, top * p.logit_scale);
    }
    u16* out = p.out + row * p.out_row + head * p.out_head;
#pragma unroll
    for (int g = 0; g < kHeadDim / 32; ++g) {
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* x = acc + 4 * (4 * g + j) + 2 * r;
        word[j] = T::pack(x[0] * factor, x[1] * factor);
      }
      transpose_quad(word, lane);  // so that each thread stores 16 bytes
      if (valid)
        *reinterpret_cast<uint4*>(out + 32 * g + 8 * (lane % 4)) = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

// Masks keys of a step that a row does not see.
DEVICE void hide_keys(float (&x)[kStep / 2], const StepInfo& info, const SparseTiles& p,
                      const SparseThreadRows& own_rows, int lane) {
  if (INDEXED) {
    Gather::hide_unseen(x, info, lane);
    return;
  }
  hide_pieces<kStep>(x, info, lane, [&](int r) { return min(p.num_keys, info.first_row + own_rows.row[r] + p.reach); });
}

// For the consumers' loop, see forward_consumer.cuh.
struct Kernel {
  using Element = T;
  using Rows = SparseThreadRows;
  static constexpr int kHeadDim = ::kHeadDim, kHeadDimV = ::kHeadDim, kWidth = kStep, kGroups = ::kGroups;
  static constexpr int kKStages = ::kKStages, kVStages = ::kStages, kQStages = ::kStages;
  static constexpr u32 kBytesQ = ::kBytesQ, kBytesK = ::kBytesK, kBytesV = ::kBytesK;
  static constexpr int kLast = kLastStep, kEnd = kNoMoreSteps;
  static constexpr bool kStagesOutput = false, kGathersKeys = INDEXED;

  static DEVICE const SparseTiles& tiles(const SparseForwardParams& p) { return p.tiles; }
  static DEVICE int num_items(const SparseForwardParams& p) { return p.tiles.num_items; }
  static DEVICE bool stages_output(const SparseForwardParams&) { return false; }
  static DEVICE const void* k_full(const Shared& s) { return s.k_full; }
  static DEVICE const void* k_empty(const Shared& s) { return s.k_empty; }
  static DEVICE int q_barrier(int stage, int) { return stage; }
  static DEVICE int flags(const Shared& s, int stage) { return s.info[stage].flags; }
  static DEVICE int first_row(const Shared& s, int stage) { return s.info[stage].first_row; }
  static DEVICE int head_rows(const Shared& s, int stage) { return s.info[stage].head_rows; }

  static DEVICE void mask(const SparseForwardParams& p, const Shared& s, float (&scores)[kStep / 2], int flags,
                          int stage, const SparseThreadRows& own_rows, int, int lane) {
    if (INDEXED || flags & kHidesKeys) hide_keys(scores, s.info[stage], p.tiles, own_rows, lane);
    __syncwarp();  // all lanes have read before one of them releases the step
  }

  static DEVICE void finish(const SparseForwardParams& p, const float (&out)[kHeadDim / 2], const Softmax& softmax, u32,
                            const SparseThreadRows& own_rows, int first_row, int head_rows, int lane) {
    store_item(p, out, softmax, own_rows, first_row, head_rows, lane);
  }
};

extern "C" __global__ void __launch_bounds__(kBlockThreads, 3 - kGroups)
    ffa_sparse_forward(const __grid_constant__ SparseForwardParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    init_buffers(s.q_full, s.q_empty, 4 * kGroups);
    for (int i = 0; i < kKStages; ++i) {
      barrier_init(smem_address(&s.k_full[i]), kKeyArrivals<INDEXED>);
      barrier_init(smem_address(&s.k_empty[i]), 4 * kGroups);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(smem_address(&s.v_full[i]), INDEXED ? kWarpgroupThreads : 1);
      barrier_init(smem_address(&s.v_empty[i]), 4 * kGroups);
    }
    barrier_init_fence();
  }
  __syncthreads();
  await_earlier_kernels();
  if (threadIdx.x < kWarpgroupThreads) {
    registers_shrink<kProducerRegisters>();
    produce(p, s, uniform(threadIdx.x / 32), threadIdx.x % 32);
  } else {
    registers_grow<kConsumerRegisters>();
    attend<Kernel>(p, s, uniform(threadIdx.x / kWarpgroupThreads) - 1);
  }
}
