// Adds what queries give to gradients of single keys (sparse_backward.cu, latent_backward.cu), key by key, in fp32. A
// warp has a key, or of long rows a third of its columns; those that many lists name are left to all warps of a thread
// block together.
//
// Compile-time: HEAD_DIM, GRADIENTS (2: dV and dK; 1: that of latent keys), DTYPE (Bf16 or Fp16).

#include "tiles.cuh"

using T = DTYPE;
constexpr int kThreads = 256, kWarps = kThreads / kWarpThreads;
constexpr int kRow = GRADIENTS * HEAD_DIM / 8;       // pieces of 16 bytes of what a query gives
constexpr int kParts = kRow > kWarpThreads ? 3 : 1;  // warps of a key
constexpr int kLanes = kRow / kParts;                // that read a part of what one query gives, a piece each
constexpr int kAtOnce = kWarpThreads / kLanes;       // queries that a warp reads in an instruction
constexpr int kAhead = 8;                            // such instructions in flight
constexpr int kMany = 64;                            // places of a key that a warp adds alone
static_assert(kAtOnce == 1 || (kAtOnce == 2 && kWarpThreads % kLanes == 0));
static_assert(kRow % kParts == 0 && kLanes % 4 == 0);

struct SparseSumsParams {
  const uint4* given;                         // see SparseBackwardParams
  const int *starts, *places;                 // of the places of each key, [lists, keys] and one more; places
  float4* sums;                               // between parts of the queries: [key heads, keys, gradients]
  u16 *dk, *dv;                               // dv: or the one gradient
  i64 dk_row, dk_head, dv_row, dv_head;       // strides, elements
  i64 pack_places;                            // of all queries
  int num_keys, heads_kv, list_heads, packs;  // packs: of a key head
  int reads_sums, writes_sums;                // writes_sums: instead of dK and dV
};

struct Key {
  int head, key;
  int first;       // piece of the part
  int begin, end;  // of its places; equal behind the last key
};

DEVICE Key key_of(const SparseSumsParams& p, i64 item) {
  const int part = item % kParts;
  item /= kParts;
  if (item >= static_cast<i64>(p.heads_kv) * p.num_keys) return {0, -1, 0, 0, 0};
  const int head = item / p.num_keys, key = item % p.num_keys;
  const int* starts = p.starts + (p.list_heads > 1 ? item : key);
  return {head, key, part * kLanes, __ldg(starts), __ldg(starts + 1)};
}

// Adds what is given at places begin to end. With two queries an instruction each half of the warp has a sum of its
// own. Lanes that have no piece read what the first ones do.
DEVICE void add_places(float (&sum)[8], const SparseSumsParams& p, const Key& of, int begin, int end, int lane) {
  const uint4* given = p.given + of.head * p.packs * p.pack_places * kRow + of.first + lane % kLanes;
  const int ahead = kAtOnce == 2 ? lane / kLanes : 0;
  for (int first = begin; first < end; first += kWarpThreads) {
    const int count = min(kWarpThreads, end - first);
    const int place = lane < count ? __ldg(p.places + first + lane) : 0;
#pragma unroll 1
    for (int i = 0; i < count; i += kAhead * kAtOnce) {
#pragma unroll 1
      for (int pack = 0; pack < p.packs; ++pack) {
        uint4 x[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const int at = i + j * kAtOnce + ahead;
          const i64 from = pack * p.pack_places + __shfl_sync(0xffffffffu, place, at % kWarpThreads);
          x[j] = at < count ? __ldcs(given + from * kRow) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const u32 word[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
          for (int n = 0; n < 4; ++n) sum[2 * n] += T::low(word[n]), sum[2 * n + 1] += T::high(word[n]);
        }
      }
    }
  }
}

// Called by all lanes of a warp.
DEVICE void finish(float (&sum)[8], const SparseSumsParams& p, const Key& of, int lane) {
  const int at = of.first + lane % kLanes, column = at % (HEAD_DIM / 8) * 8;
  const bool of_values = at < HEAD_DIM / 8;
  if (kAtOnce == 2)
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], kLanes % kWarpThreads);
  float4* sums = p.sums + ((static_cast<i64>(of.head) * p.num_keys + of.key) * kRow + at) * 2;
  if (p.reads_sums) {
    const float4 a = __ldcs(sums), b = __ldcs(sums + 1);
    sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
    sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
    __syncwarp();  // both halves have read
  }
  if (p.writes_sums) {
    if (lane >= kLanes) return;
    __stcs(sums, make_float4(sum[0], sum[1], sum[2], sum[3]));
    __stcs(sums + 1, make_float4(sum[4], sum[5], sum[6], sum[7]));
    return;
  }
  u32 word[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) word[j] = T::pack(sum[2 * j], sum[2 * j + 1]);
  transpose_quad(word, lane);
  u16* to = of_values ? p.dv + of.key * p.dv_row + of.head * p.dv_head : p.dk + of.key * p.dk_row + of.head * p.dk_head;
  if (lane < kLanes) *reinterpret_cast<uint4*>(to + column) = make_uint4(word[0], word[1], word[2], word[3]);
}

extern "C" __global__ void __launch_bounds__(kThreads, 4) ffa_sparse_sums(const __grid_constant__ SparseSumsParams p) {
  __shared__ float parts[kWarps][8][kWarpThreads];
  await_earlier_kernels();
  const int warp = uniform(threadIdx.x / kWarpThreads), lane = threadIdx.x % kWarpThreads;
  const i64 first = static_cast<i64>(blockIdx.x) * kWarps;
  const Key own = key_of(p, first + warp);
  const int count = own.end - own.begin;
  const bool changes = count > 0 || !p.reads_sums || !p.writes_sums;
  if (own.key >= 0 && changes && count <= kMany) {
    float sum[8] = {};
    add_places(sum, p, own, own.begin, own.end, lane);
    finish(sum, p, own, lane);
  }
  if (!__syncthreads_or(count > kMany)) return;
#pragma unroll 1
  for (int i = 0; i < kWarps; ++i) {
    const Key of = key_of(p, first + i);
    if (of.end - of.begin <= kMany) continue;
    const int each = (of.end - of.begin + kWarps - 1) / kWarps, begin = min(of.end, of.begin + warp * each);
    float sum[8] = {};
    add_places(sum, p, of, begin, min(of.end, begin + each), lane);
#pragma unroll
    for (int j = 0; j < 8; ++j) parts[warp][j][lane] = sum[j];
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        for (int w = 1; w < kWarps; ++w) sum[j] += parts[w][j][lane];
      finish(sum, p, of, lane);
    }
    __syncthreads();
  }
}
