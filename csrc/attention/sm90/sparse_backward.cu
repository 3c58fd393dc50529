// Sparse attention backward for sm_90a: one work item is a tile of 128 places (sparse_tiles.cuh), which goes over the
// keys of its list in steps of 64 single keys, or of 128 keys of blocks. dQ of the tile stays in registers; what the
// tile adds to dK and dV of a step is computed at once, and added to fp32 sums in device memory.
//
// A consumer warpgroup owns 64 places: S, dP, and dQ += dS K with dS from registers. P and dS of all 128 places also go
// through shared memory, for dV = P^T dO, which the first warpgroup computes, and dK = dS^T Q, which the second does.
// These and dQ of a step run with S of the next, under which the sums are added. dP comes after, in their registers.
//
// That is for lists of single keys. Of blocks the kernel computes dQ alone, and sparse_backward_keys.cu the rest.
//
// With FIXED the sums are integers of 64 bits, of numbers times a scale: they do not depend on the order of additions.
//
// Compile-time: HEAD_DIM, INDEXED (0 or 1), FIXED (0 or 1, of single keys), DTYPE (Bf16 or Fp16).

#include "../../common/wgmma.cuh"
#include "softmax.cuh"

constexpr int kHeadDim = HEAD_DIM, kGroups = 2, kStep = INDEXED ? 64 : 128, kStages = 2;
using T = DTYPE;

#include "row_products.cuh"
#include "sparse_tiles.cuh"

struct SparseBackwardParams {
  TensorMap q, k, v, dout;
  SparseTiles tiles;
  const u16 *keys, *values;  // where they are gathered
  const float *lse, *delta;  // [rows, heads]
  u16* dq;
  // [key heads, sum_rows, columns]: sums without the softmax scale. Of every 16 columns, thread t of a row has 2t, 2t +
  // 1, 2t + 8 and 2t + 9 together.
  void *dk_sums, *dv_sums;                                                        // float, or with FIXED i64
  const float* fixed_scales;                                                      // FIXED: of dk_sums and dv_sums
  int k_row, v_row;                                                               // strides, elements
  i64 k_head, v_head, lse_row, lse_head, delta_row, delta_head, dq_row, dq_head;  // strides, elements
  i64 sum_rows;
  float scale, scale_log2;
};

constexpr int kKept = INDEXED ? 2 : 1;  // buffers of P and of dS; of blocks nobody reads them

struct Shared {
  alignas(1024) u16 q[kGroups][kHeadDim / kPanel][kPlaces][kPanel];
  u16 dout[kGroups][kHeadDim / kPanel][kPlaces][kPanel];
  u16 k[kStages][kHeadDim / kPanel][kStep][kPanel];
  u16 v[kStages][kHeadDim / kPanel][kStep][kPanel];
  u16 probs[kKept][INDEXED ? kGroups : 1][INDEXED ? kPlaces : 1][kStep];
  u16 ds[kKept][INDEXED ? kGroups : 1][INDEXED ? kPlaces : 1][kStep];
  u64 rows_full, rows_empty;
  u64 full[kStages], empty[kStages];
  StepInfo info[kStages];
  alignas(16) int index[kStages][kStep];  // INDEXED: numbers of keys in the order of the list, -1 for none
};

constexpr u32 kBytesRows = sizeof(Shared::q) / kGroups;
constexpr u32 kBytesK = sizeof(Shared::k) / kStages;

// ---- producers ----

struct Loader {
  const SparseBackwardParams& p;
  Shared& s;
  const int warp, lane;
  Ring<kStages> ring;
  u32 rows_parity = 1;

  DEVICE void queries(const Tile& tile) {
    if (warp == 0 && lane == 0) {
      const u32 bar = smem_address(&s.rows_full);
      barrier_wait(smem_address(&s.rows_empty), rows_parity);
      barrier_expect_bytes(bar, 2 * kGroups * kBytesRows);
#pragma unroll
      for (int w = 0; w < kGroups; ++w) {
        const int row = tile.first_row + (w * kPlaces >> p.tiles.log2_heads);
        const int head = tile.head + (w * kPlaces & (1 << p.tiles.log2_heads) - 1);
        load_panels<kHeadDim / kPanel>(&p.q, smem_address(s.q[w]), kPlaces * 128, row, head, bar);
        load_panels<kHeadDim / kPanel>(&p.dout, smem_address(s.dout[w]), kPlaces * 128, row, head, bar);
      }
    }
    rows_parity ^= 1;
  }

  DEVICE void describe(const Tile& tile, int flags) const {
    *reinterpret_cast<int4*>(&s.info[ring.index]) =
        make_int4(flags, tile.first_row, tile.head | tile.past_row - tile.first_row << 16, tile.head_kv);
  }

  // Blocks.
  DEVICE void step(const Tile& tile, int flags, const int4& keys) {
    if (lane == 0) {
      const u32 bar = smem_address(&s.full[ring.index]);
      barrier_wait(smem_address(&s.empty[ring.index]), ring.parity ^ 1);
      describe(tile, flags);
      *reinterpret_cast<int4*>(s.info[ring.index].keys) = keys;
      barrier_expect_bytes(bar, 2 * kBytesK);
      load_pieces(&p.k, smem_address(s.k[ring.index]), keys, tile.head_kv, bar);
      load_pieces(&p.v, smem_address(s.v[ring.index]), keys, tile.head_kv, bar);
    }
    ring.advance();
  }

  // Single keys.
  DEVICE void step(const Tile& tile, int flags, int index) {
    const bool seen = static_cast<u32>(index) < static_cast<u32>(p.tiles.num_keys);
    const u32 bits = __ballot_sync(0xffffffffu, seen);
    const u32 bar = smem_address(&s.full[ring.index]);
    barrier_wait(smem_address(&s.empty[ring.index]), ring.parity ^ 1);
    share_numbers(s.index[ring.index], warp, lane, seen ? index : -1);
    if (lane == 0) {
      if (warp == 0) describe(tile, flags);
      s.info[ring.index].keys[warp] = static_cast<int>(bits);
      barrier_arrive(bar);
    }
    const u32 place = gather_place(warp, lane);
    const int column = lane % kChunks * 8, (&numbers)[kStep] = s.index[ring.index];
    gather_rows(smem_address(s.k[ring.index]) + place, p.keys + tile.head_kv * p.k_head + column, p.k_row, numbers,
                warp, lane);
    gather_rows(smem_address(s.v[ring.index]) + place, p.values + tile.head_kv * p.v_head + column, p.v_row, numbers,
                warp, lane);
    copies_arrive(bar);
    ring.advance();
  }

  DEVICE void end() {
    const u32 bar = smem_address(&s.full[ring.index]);
    if (lane == 0) {
      barrier_wait(smem_address(&s.empty[ring.index]), ring.parity ^ 1);
      if (warp == 0) s.info[ring.index].flags = kNoMoreSteps;
      barrier_arrive(bar);
    }
    __syncwarp();
    if (INDEXED) copies_arrive(bar);
  }
};

DEVICE void produce(const SparseBackwardParams& p, Shared& s, int warp, int lane) {
  Loader loader{p, s, warp, lane};
#if INDEXED
  walk_indices(p.tiles, loader, warp, lane);
#else
  if (warp == 0) walk_blocks(p.tiles, loader, lane);
#endif
}

// ---- consumers ----

DEVICE void add_global_v4(float* p, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

DEVICE void add_fixed(i64* p, float x, float scale) {
  asm volatile("red.global.add.u64 [%0], %1;" ::"l"(p), "l"(__float2ll_rn(x * scale)) : "memory");
}

// acc[kStep, kHeadDim] = a[128 places, kStep]^T * b[128 places, kHeadDim]
DEVICE void issue_key_gradient(float (&acc)[kHeadDim / 2], const Operand& a, const Operand& b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kGroups * kPlaces / 16; ++i)
    Wgmma<T, kHeadDim>::template ss<1, 1>(acc, a.at(i * 16 * 128), b.at((i / 4) * kBytesRows + (i % 4) * 16 * 128),
                                          i > 0);
  wgmma_commit();
}

struct Consumer {
  const SparseBackwardParams& p;
  Shared& s;
  const int warpgroup, lane, row_of_warpgroup;  // row: the first that this thread has of 64
  Ring<kStages> ring;
  Ring<2> buffer;  // of P and dS
  u32 rows_parity = 0;
  int flags = 0, row[2], head[2];  // of this thread's places, in the tile
  float lse[2], delta[2];
  u32 store_at;

  DEVICE Consumer(const SparseBackwardParams& p, Shared& s, int warpgroup)
      : p(p),
        s(s),
        warpgroup(warpgroup),
        lane(threadIdx.x % 32),
        row_of_warpgroup(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int place = warpgroup * kPlaces + row_of_warpgroup + 8 * r;
      row[r] = place >> p.tiles.log2_heads, head[r] = place & (1 << p.tiles.log2_heads) - 1;
    }
    store_at = (threadIdx.x % 128 / 32 * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
    keep(store_at);
  }

  // Rows that are none of the tile's weigh nothing, nor do those that see nothing.
  DEVICE void load_stats(int first_row, int head_rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const i64 at_row = first_row + row[r], at_head = (head_rows & 0xffff) + head[r];
      lse[r] = kInfinity, delta[r] = 0.f;
      if (row[r] < head_rows >> 16) {
        const float x = __ldg(p.lse + at_row * p.lse_row + at_head * p.lse_head);
        lse[r] = x == -kInfinity ? kInfinity : x * kLog2e;
        delta[r] = __ldg(p.delta + at_row * p.delta_row + at_head * p.delta_head);
      }
    }
  }

  DEVICE void hide_keys(float (&x)[kStep / 2], const StepInfo& info) const {
    if (INDEXED) {
      hide_unseen(x, info, lane);
      return;
    }
    hide_pieces(x, info, lane, [&](int r) { return min(p.tiles.num_keys, info.first_row + row[r] + p.tiles.reach); });
  }

  DEVICE void wait_keys() const {
    barrier_wait(smem_address(&s.full[ring.index]), ring.parity);
    if (INDEXED) fence_async_proxy();
  }

  DEVICE void issue_s(float (&x)[kStep / 2]) const {
    issue_logits<kHeadDim, kStep>(x, Operand(smem_address(s.q[warpgroup])), Operand(smem_address(s.k[ring.index])));
  }

  DEVICE void store(u32 smem, const u32 (&x)[kStep / 4]) const {
#pragma unroll
    for (int i = 0; i < kStep / 16; ++i)
      store_matrices_x4(smem + (store_at ^ (i << 5)), x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }

  // P and dS of the step whose S is the last product under way; both are there for all after a barrier.
  DEVICE void form_ds(float (&x)[kStep / 2], u32 (&ds)[kStep / 4]) {
    float y[kStep / 2];
    issue_logits<kHeadDim, kStep>(y, Operand(smem_address(s.dout[warpgroup])), Operand(smem_address(s.v[ring.index])));
    buffer.advance();
    wgmma_wait<1>();
    pin(x);
    if (INDEXED || flags & kHidesKeys) hide_keys(x, s.info[ring.index]);
    u32 probs[kStep / 4];
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) x[i] = exp2_fast(fmaf(x[i], p.scale_log2, -lse[(i >> 1) & 1]));
    pack_pairs(probs, x);
    if (INDEXED) store(smem_address(s.probs[buffer.index][warpgroup]), probs);
    wgmma_wait<0>();
    pin(y);
#pragma unroll
    for (int i = 0; i < kStep / 4; ++i)
      ds[i] = T::pack(x[2 * i] * (y[2 * i] - delta[i & 1]), x[2 * i + 1] * (y[2 * i + 1] - delta[i & 1]));
    if (INDEXED) store(smem_address(s.ds[buffer.index][warpgroup]), ds);
    if (INDEXED) fence_async_proxy();
  }

  DEVICE void issue_gradients(float (&dq)[kHeadDim / 2], float (&part)[kHeadDim / 2], const u32 (&ds)[kStep / 4],
                              int stage) {
    if (INDEXED) named_sync(1, 256);
    issue_weighted<kHeadDim, kStep>(dq, ds, Operand(smem_address(s.k[stage]), kStep * 128));
    if (!INDEXED) return;
    const u32 left = warpgroup ? smem_address(s.ds[buffer.index]) : smem_address(s.probs[buffer.index]);
    const u32 right = warpgroup ? smem_address(s.q) : smem_address(s.dout);
    issue_key_gradient(part, Operand(left), Operand(right, kPlaces * 128));
  }

  // Keys of the two rows that this thread has of a part; negative for none.
  DEVICE int2 keys_of(int stage) const {
    return make_int2(s.index[stage][entry_of_row(row_of_warpgroup)],
                     s.index[stage][entry_of_row(row_of_warpgroup + 8)]);
  }

  DEVICE void add_part(const float (&part)[kHeadDim / 2], const int2& keys, int head_kv) const {
    if (!INDEXED) return;
    void* sums = warpgroup ? p.dk_sums : p.dv_sums;
    const float scale = FIXED ? __ldg(p.fixed_scales + 1 - warpgroup) : 1.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = r ? keys.y : keys.x;
      if (key < 0) continue;
      const i64 at = (head_kv * p.sum_rows + key) * kHeadDim + 4 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kHeadDim / 16; ++j) {
        const float* x = part + 8 * j + 2 * r;
        if constexpr (FIXED) {
          i64* to = static_cast<i64*>(sums) + at + 16 * j;
          add_fixed(to, x[0], scale), add_fixed(to + 1, x[1], scale);
          add_fixed(to + 2, x[4], scale), add_fixed(to + 3, x[5], scale);
        } else {
          add_global_v4(static_cast<float*>(sums) + at + 16 * j, x[0], x[1], x[4], x[5]);
        }
      }
    }
  }

  DEVICE void store_dq(const float (&dq)[kHeadDim / 2], int first_row, int head_rows) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      u16* to = p.dq + (first_row + row[r]) * p.dq_row + ((head_rows & 0xffff) + head[r]) * p.dq_head;
#pragma unroll
      for (int g = 0; g < kHeadDim / 32; ++g) {
        u32 word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* x = dq + 4 * (4 * g + j) + 2 * r;
          word[j] = T::pack(x[0] * p.scale, x[1] * p.scale);
        }
        transpose_quad(word, lane);
        if (row[r] < head_rows >> 16)
          *reinterpret_cast<uint4*>(to + 32 * g + 8 * (lane % 4)) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }

  DEVICE void run() {
    while (true) {
      wait_keys();
      const int4 item = *reinterpret_cast<const int4*>(&s.info[ring.index]);
      flags = uniform(item.x);
      if (flags & kNoMoreSteps) break;
      const int first_row = item.y, head_rows = item.z, head_kv = item.w;
      load_stats(first_row, head_rows);
      barrier_wait(smem_address(&s.rows_full), rows_parity);
      rows_parity ^= 1;
      float dq[kHeadDim / 2], part[kHeadDim / 2], x[kStep / 2];
      u32 ds[kStep / 4];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dq[i] = 0.f;
      issue_s(x);
      form_ds(x, ds);
      // The loop opens with dS of its step in registers and no product under way: the assembler would serialise all
      // products if one crossed the place where the loop closes.
      while (true) {
        // This always ends the loop; see sparse_forward.cu.
        if (flags & kLastStep) {
          if (p.tiles.num_items >= 0) break;
          flags = uniform(flags + 1);
        }
        const int now = ring.index;
        const int2 keys = INDEXED ? keys_of(now) : make_int2(-1, -1);
        issue_gradients(dq, part, ds, now);
        ring.advance();
        wait_keys();
        issue_s(x);
        flags = uniform(s.info[ring.index].flags);
        wgmma_wait<1>();
        pin(dq);
        pin(ds);
        if (INDEXED) pin(part);
        release(s.empty[now], lane);
        add_part(part, keys, head_kv);
        form_ds(x, ds);  // registers are scarce: dP takes those of the part
      }
      const int2 keys = INDEXED ? keys_of(ring.index) : make_int2(-1, -1);
      issue_gradients(dq, part, ds, ring.index);
      wgmma_wait<0>();
      pin(dq);
      pin(ds);
      if (INDEXED) pin(part);
      release(s.empty[ring.index], lane);
      release(s.rows_empty, lane);
      ring.advance();
      add_part(part, keys, head_kv);
      store_dq(dq, first_row, head_rows);
    }
  }
};

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    ffa_sparse_backward(const __grid_constant__ SparseBackwardParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    init_buffer(s.rows_full, s.rows_empty, 4 * kGroups);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(smem_address(&s.full[i]), kArrivals);
      barrier_init(smem_address(&s.empty[i]), 4 * kGroups);
    }
    barrier_init_fence();
  }
  __syncthreads();
  await_earlier_kernels();
  if (threadIdx.x < 128) {
    registers_shrink<INDEXED ? 56 : 40>();  // together all that the block was launched with
    produce(p, s, uniform(threadIdx.x / 32), threadIdx.x % 32);
  } else {
    registers_grow<INDEXED ? 224 : 232>();
    Consumer(p, s, uniform(threadIdx.x / 128) - 1).run();
  }
}
