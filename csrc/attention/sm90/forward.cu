// Attention forward for sm_90a: a persistent, warp-specialized kernel. A work item is a tile of 128 or 192 query rows
// of one head, or of several heads that share their keys (row_tiles.cuh), over all of its keys.
//
// A producer thread streams keys and values through shared memory; a prefetch thread loads the queries of the next
// item. Two or three consumer warpgroups own 64 rows each and do not synchronize with each other, so the softmax of one
// overlaps with the wgmmas of another. Prologue and epilogue overlap across items: the first scores of the next item
// are computed while the output is written, through shared memory (staging.cuh).
//
// The mask of a tile is a list of segments: a range of key blocks, and for each row the interval of keys it sees. The
// mask is applied only to blocks outside the sub-range that all rows see completely.
//
// Compile-time: HEAD_DIM, HEAD_DIM_V, GROUPS (consumer warpgroups), BLOCK_N, STAGES (of keys and of values), Q_STAGES
// (of queries), STAGED (0 or 1: the output is staged in the buffer of its queries, which needs Q_STAGES 2), DTYPE (Bf16
// or Fp16), SOFTCAP (0 or 1), STREAM_KV (0 or 1: keys from a given index on are in separate tensors and arrive while
// the kernel runs: arrivals.cuh), CAPTURED (0 or 1: mask_numbers.cuh).

#include "../../common/wgmma.cuh"
#include "forward_consumer.cuh"
#include "row_tiles.cuh"
#include "staging.cuh"

constexpr int kGroups = GROUPS;  // consumer warpgroups
constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V, kBlockN = BLOCK_N;
constexpr int kStages = STAGES, kQStages = Q_STAGES;
constexpr int kBlockThreads = kWarpgroupThreads * (kGroups + 1);
constexpr int kBehind = 1 << 30;  // a key out of bounds: TMA fills zeros

// Registers of a thread. Together they are all that the block was launched with: 512 threads of 128, 384 of 168. The
// producer gets what the consumers can spare without serialising products; with 24 or 32 it spills to the stack, which
// costs up to 2 % of the forward. Three consumer warpgroups with heads of 64 have nothing to spare.
constexpr int kProducerRegisters = kGroups == 2 ? 40 : kHeadDim > 64 ? 56 : 32;
constexpr int kConsumerRegisters = ((kGroups == 2 ? 504 : 512) - kProducerRegisters) / kGroups;
static_assert(kConsumerRegisters % 8 == 0, "setmaxnreg takes multiples of 8");
using T = DTYPE;

struct ForwardParams {
  TensorMap q, k, v;
#if STREAM_KV
  TensorMap k_remote, v_remote;
#endif
  TensorMap out_map;
  TilePlan plan;
  void* out;
  float* lse;
  float* max_logits;      // [num_heads], updated by atomic_max_logit; or null
  const float* sink_lse;  // or null
  int* counter;           // three words; zero between launches, see leave()
  i64 out_row, out_head;  // strides, elements
  i64 lse_row, lse_head;
  i64 sink_row, sink_head;
  // num_heads, group and head_section count packed heads as one.
  int num_tiles, num_heads, group, head_section;
  float scale_log2;          // softmax scale * log2 e, or softcap * log2 e
  float softcap_factor;      // softmax scale / softcap
  float logit_scale;         // of max_logits
  int accumulate, out_fp32;  // accumulate: merge into the partial out and lse of earlier keys
  int log2_packed;           // see row_tiles.cuh
  int long_blocks;           // blocks from which on the keys and values exceed the L2 cache
#if STREAM_KV
  ArrivalBarrier arrival_barrier;
#endif
};

struct Shared {
  alignas(kSwizzleAtomBytes)
      u16 q[kQStages][kGroups][kHeadDim / kPanel][kWarpgroupRows][kPanel];  // also staging for the output
  u16 k[kStages][kHeadDim / kPanel][kBlockN][kPanel];
  u16 v[kStages][kHeadDimV / kPanel][kBlockN][kPanel];
  u64 q_full[kQStages][kGroups], q_empty[kQStages][kGroups];
  u64 v_full[kStages], v_empty[kStages];
  KvPipeline<kGroups, kStages> blocks;
  TileInfoPipeline segments;
};

constexpr u32 kBytesQ = sizeof(Shared::q) / (kQStages * kGroups);
constexpr u32 kBytesK = sizeof(Shared::k) / kStages;
constexpr u32 kBytesV = sizeof(Shared::v) / kStages;

// ---- producer: one thread ----

struct Loader {
  const ForwardParams& p;
  Shared& s;
  PipelineState<kStages> k_stage, v_stage;
  int previous = 0, previous_head = -1;  // block whose values are still to be loaded; head -1: none
#if STREAM_KV
  ArrivalWaiter waiter;
#endif

  DEVICE void load_v(int key, int head) {
    const u32 bar = smem_address(&s.v_full[v_stage.index]);
    barrier_wait(smem_address(&s.v_empty[v_stage.index]), v_stage.parity ^ 1);
    barrier_expect_bytes(bar, kBytesV);
    load_panels<kHeadDimV / kPanel>(&OF_KEY(p, key, v), smem_address(s.v[v_stage.index]), kBlockN * kPanelRowBytes,
                                    row_of_key(p, key), head, bar);
    v_stage.advance();
  }

  // Values are loaded after the keys of the next block, even of the next item: the consumers need them in this order.
  DEVICE void later(int key, int head) {
    if (previous_head >= 0) load_v(previous, previous_head);
    previous = key, previous_head = head;
  }

  DEVICE void block(int key, int head_kv, int flags, int segment, const int4& item) {
    const u32 bar = arrive_keys(s.blocks, k_stage, p, key, flags, segment, item, kBytesK);
#if STREAM_KV
    waiter.await(p.arrival_barrier, NUM_ARRIVING(p), key - p.arrival_barrier.first + kBlockN);
#endif
    load_panels<kHeadDim / kPanel>(&OF_KEY(p, key, k), smem_address(s.k[k_stage.index]), kBlockN * kPanelRowBytes,
                                   row_of_key(p, key), head_kv, bar);
    k_stage.advance();
    later(key, head_kv);
  }

  // A block without keys: the key buffer keeps its old contents.
  DEVICE void skip_k(int flags, const int4& item) {
    const u32 bar = acquire_block(s.blocks, k_stage, 0, flags, item);
    if (flags & kMasked) {  // all rows see nothing
      for (int i = 0; i < kGroups * kWarpgroupRows; ++i) s.blocks.bounds[k_stage.index][i] = make_int2(0, 0);
      fence_async_proxy();
    }
    barrier_arrive(bar);
    k_stage.advance();
  }

  DEVICE void nothing(const int4& item) {
    skip_k(kMasked | kLast, item);
    later(kBehind, 0);  // zeros times zeros
  }
};

DEVICE void produce(const ForwardParams& p, Shared& s) {
  prefetch_map(&p.k);
  prefetch_map(&p.v);
#if STREAM_KV
  prefetch_map(&p.k_remote);
  prefetch_map(&p.v_remote);
#endif
  Loader loader{p, s};
  walk_blocks<kGroups, STREAM_KV>(p, s.segments, loader);
  loader.later(0, -1);
  loader.skip_k(kEnd, make_int4(0, 0, 0, 0));  // consumers compute its scores but do not use them
  // So that kernels after this one on the stream also come after get_rows.cu.
  if (STREAM_KV) await_earlier_kernels();
}

// Called by the prefetch thread: loads the queries of an item as soon as a buffer is free. Without `load`, the buffer
// keeps its old contents.
struct QueryLoader {
  const ForwardParams& p;
  Shared& s;
  PipelineState<kQStages> stage;

  DEVICE void operator()(int row, int head, bool load) {
#pragma unroll 1
    for (int w = 0; w < kGroups; ++w) {
      const u32 bar = smem_address(&s.q_full[stage.index][w]);
      barrier_wait(smem_address(&s.q_empty[stage.index][w]), stage.parity ^ 1);
      if (load) {
        barrier_expect_bytes(bar, kBytesQ);
        load_panels<kHeadDim / kPanel>(&p.q, smem_address(s.q[stage.index][w]), kWarpgroupRows * kPanelRowBytes, row,
                                       head, bar);
        row += tile_rows<kGroups>(p) / kGroups;
      } else {
        barrier_arrive(bar);
      }
    }
    stage.advance();
  }
};

DEVICE void find_queries(const ForwardParams& p, Shared& s) {
  prefetch_map(&p.q);
  prefetch_map(&p.out_map);
  QueryLoader load{p, s};
  prefetch_items<STREAM_KV>(p, s.segments, load);
}

// ---- consumers ----

// Stores the two rows of this thread, `row` and `row + step`: factor * acc, and with kAdd plus prior * the old output.
template <bool kFloat, bool kAdd>
DEVICE void store_rows(const ForwardParams& p, const float (&acc)[kHeadDimV / 2], const float (&factor)[2],
                       const float (&prior)[2], int row, int step, int end_row, int head, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = row + step * r;
    const bool valid = at < end_row;
    const bool add = kAdd && prior[r] > 0.f;  // if 0, the old output may be NaN
    const i64 offset = at * p.out_row + head * p.out_head;
    float* out32 = static_cast<float*>(p.out) + offset + 2 * (lane % 4);
    u16* out16 = static_cast<u16*>(p.out) + offset;
#pragma unroll
    for (int g = 0; g < kHeadDimV / 32; ++g) {
      u32 word[4];
      float2 old[4];
#pragma unroll
      for (int j = 0; j < (kAdd ? 4 : 0); ++j) {
        const int column = 32 * g + 8 * j;
        u32 both = 0;
        old[j] = make_float2(0.f, 0.f);
        if (kFloat && add) old[j] = *reinterpret_cast<float2*>(out32 + column);
        if (!kFloat && add) both = *reinterpret_cast<u32*>(out16 + column + 2 * (lane % 4));
        if (!kFloat) old[j] = make_float2(T::low(both), T::high(both));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = 32 * g + 8 * j, i = 4 * (4 * g + j) + 2 * r;
        float x = acc[i] * factor[r], y = acc[i + 1] * factor[r];
        if (kAdd) x += old[j].x * prior[r], y += old[j].y * prior[r];
        if (!kFloat)
          word[j] = T::pack(x, y);
        else if (valid)
          *reinterpret_cast<float2*>(out32 + column) = make_float2(x, y);
      }
      if (!kFloat) {
        transpose_quad(word, lane);  // so that each thread stores 16 bytes
        if (valid)
          *reinterpret_cast<uint4*>(out16 + 32 * g + 8 * (lane % 4)) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}

// One branch selects a specialized function: branches for each element would take a fifth of the time of an item with
// few blocks.
DEVICE void store_output(const ForwardParams& p, const float (&acc)[kHeadDimV / 2], const float (&factor)[2],
                         const float (&prior)[2], int row, int step, int end_row, int head, int lane) {
  if (!p.accumulate && !p.out_fp32)
    store_rows<false, false>(p, acc, factor, prior, row, step, end_row, head, lane);
  else if (!p.accumulate)
    store_rows<true, false>(p, acc, factor, prior, row, step, end_row, head, lane);
  else if (!p.out_fp32)
    store_rows<false, true>(p, acc, factor, prior, row, step, end_row, head, lane);
  else
    store_rows<true, true>(p, acc, factor, prior, row, step, end_row, head, lane);
}

// Epilogue: normalizes, adds the sink, merges with earlier partial results, stores output and lse. `staging`: staging
// buffer of this warp, all of whose rows are then in the tile; 0: direct stores.
DEVICE void store_item(const ForwardParams& p, const float (&acc)[kHeadDimV / 2], const Softmax& softmax, u32 staging,
                       int row, int step, int end_row, int head, int lane) {
  float factor[2], lse[2], prior[2] = {0.f, 0.f};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = softmax.sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const bool any = sum > 0.f;
    lse[r] = any ? (softmax.reference[r] + log2_fast(sum)) * kLn2 : -kInfinity;
    factor[r] = any ? reciprocal_fast(sum) : 0.f;
  }
  if (p.sink_lse || p.accumulate) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row + step * r;
      const float own = lse[r];
      if (at < end_row) {
        if (p.sink_lse) lse[r] = log_add(lse[r], __ldg(p.sink_lse + at * p.sink_row + head * p.sink_head));
        if (p.accumulate) {
          const float before = p.lse[at * p.lse_row + head * p.lse_head];
          lse[r] = log_add(lse[r], before);
          prior[r] = weight(before, lse[r]);
        }
      }
      factor[r] *= weight(own, lse[r]);
    }
    __syncwarp();  // all threads of a row have read its lse before one of them writes it
  }
  if (staging)
    store_staged<T, kHeadDimV>(&p.out_map, staging, kWarpgroupRows * kPanelRowBytes, acc, factor, row, head, lane);
  if (lane % 4 == 0) {
    float* to = p.lse + row * p.lse_row + head * p.lse_head;
    if (row < end_row) *to = lse[0];
    if (row + step < end_row) to[step * p.lse_row] = lse[1];
  }
  if (p.max_logits) {
    float top = row < end_row ? softmax.max[0] : -kInfinity;
    if (row + step < end_row) top = fmaxf(top, softmax.max[1]);
    const int heads_end = 4 << p.log2_packed;  // lanes before it: four for each head
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, top, i);
      if (i >= heads_end || i < 4) top = fmaxf(top, other);
    }
    if (lane < heads_end && lane % 4 == 0 && top > -kInfinity)
      atomic_max_logit(p.max_logits + head, top * p.logit_scale);
  }
  if (!staging) store_output(p, acc, factor, prior, row, step, end_row, head, lane);
}

// For the consumers' loop, see forward_consumer.cuh.
struct Kernel {
  using Element = T;
  using Rows = ThreadRows;
  static constexpr int kHeadDim = ::kHeadDim, kHeadDimV = ::kHeadDimV, kWidth = kBlockN, kGroups = ::kGroups;
  static constexpr int kKStages = ::kStages, kVStages = ::kStages, kQStages = ::kQStages;
  static constexpr u32 kBytesQ = ::kBytesQ, kBytesK = ::kBytesK, kBytesV = ::kBytesV;
  static constexpr int kLast = ::kLast, kEnd = ::kEnd;
  static constexpr bool kStagesOutput = true, kGathersKeys = false;

  static DEVICE const ForwardParams& tiles(const ForwardParams& p) { return p; }
  static DEVICE int num_items(const ForwardParams& p) { return p.num_tiles; }
  static DEVICE bool stages_output(const ForwardParams& p) { return STAGED && !p.accumulate && !p.out_fp32; }
  static DEVICE const void* k_full(const Shared& s) { return s.blocks.full; }
  static DEVICE const void* k_empty(const Shared& s) { return s.blocks.empty; }
  static DEVICE int q_barrier(int stage, int warpgroup) { return stage * kGroups + warpgroup; }
  static DEVICE int flags(const Shared& s, int stage) { return s.blocks.info[stage].y; }
  static DEVICE int first_row(const Shared& s, int stage) { return s.blocks.info[stage].z; }
  static DEVICE int head_rows(const Shared& s, int stage) { return s.blocks.info[stage].w; }

  static DEVICE void mask(const ForwardParams& p, const Shared& s, float (&scores)[kBlockN / 2], int flags, int stage,
                          const ThreadRows& own_rows, int warpgroup, int lane) {
    if (SOFTCAP) apply_softcap(scores, p.softcap_factor);
    if (flags & (1 << warpgroup)) {
      const int2* of_row = s.blocks.bounds[stage] + own_rows.row;
      const int2 bounds[2] = {of_row[0], of_row[own_rows.step]};
      apply_mask(scores, s.blocks.info[stage].x + 2 * (lane % 4), bounds);
      __syncwarp();  // all lanes have read before one of them releases the block
    }
  }

  static DEVICE void finish(const ForwardParams& p, const float (&out)[kHeadDimV / 2], const Softmax& softmax,
                            u32 staging, const ThreadRows& own_rows, int first_row, int head_rows, int lane) {
    store_item(p, out, softmax, staging, first_row + own_rows.row, own_rows.step, first_row + (head_rows >> 16),
               (head_rows & 0xffff) + own_rows.head, lane);
  }
};

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1) ffa_forward(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(kSwizzleAtomBytes) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQStages; ++i) init_buffers(s.q_full[i], s.q_empty[i], 4);
    init_buffers(s.blocks.full, s.blocks.empty, 4 * kGroups);
    init_buffers(s.v_full, s.v_empty, 4 * kGroups);
    init_buffers(s.segments.full, s.segments.empty, 1);
    barrier_init_fence();
  }
  __syncthreads();
  // With STREAM_KV this kernel overlaps get_rows.cu; all else that it reads was written before that kernel started.
  if (!STREAM_KV) await_earlier_kernels();
  if (threadIdx.x < kWarpgroupThreads) {
    registers_shrink<kProducerRegisters>();
    if (threadIdx.x == 0) produce(p, s);
    if (threadIdx.x == 32) find_queries(p, s);
  } else {
    registers_grow<kConsumerRegisters>();
    attend<Kernel>(p, s, uniform(threadIdx.x / kWarpgroupThreads) - 1);
  }
}
