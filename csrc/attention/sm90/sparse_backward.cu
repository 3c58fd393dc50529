// Sparse attention backward for sm_90a, for lists of single keys. A work item is a tile of 128 places
// (sparse_tiles.cuh), which iterates over the keys of its list in steps of 64. dQ of the tile is accumulated in
// registers; its contributions to dK and dV of a step are computed at once and added to sums in device memory.
//
// A consumer warpgroup owns 64 places: S, dP, and dQ += dS K with dS from registers. P and dS of all 128 places also go
// through shared memory, for dV = P^T dO, which the first warpgroup computes, and dK = dS^T Q, computed by the second.
// These and dQ of a step are issued with S of the next, which overlaps with adding to the sums; dP then reuses their
// registers.
//
// The sums are fp32, or with FIXED fixed-point numbers of 64 bits, whose sum does not depend on the order of additions.
//
// Compile-time: HEAD_DIM, FIXED (0 or 1), DTYPE (Bf16 or Fp16).

#include "../../common/wgmma.cuh"
#include "softmax.cuh"

#define INDEXED 1
constexpr int kHeadDim = HEAD_DIM, kGroups = 2, kStep = 64, kStages = 2;
using T = DTYPE;

#include "row_products.cuh"
#include "sparse_backward_tiles.cuh"

struct Shared : TileBuffers {
  alignas(1024) u16 probs[2][kGroups][kPlaces][kStep];
  u16 ds[2][kGroups][kPlaces][kStep];
  alignas(16) int index[kStages][kStep];  // indices of keys in the order of the list, -1 for none
};

constexpr u32 kBytesRows = sizeof(Shared::q) / kGroups;

// ---- producers ----

struct Loader {
  const SparseBackwardParams& p;
  Shared& s;
  const int warp, lane;
  Ring<kStages> ring;
  u32 rows_parity = 1;

  DEVICE void queries(const Tile& tile) {
    if (warp == 0 && lane == 0) load_queries(p, s, tile, rows_parity);
    rows_parity ^= 1;
  }

  DEVICE void step(const Tile& tile, int flags, int index) {
    const bool seen = static_cast<u32>(index) < static_cast<u32>(p.tiles.num_keys);
    const u32 bits = __ballot_sync(0xffffffffu, seen);
    const u32 bar = smem_address(&s.full[ring.index]);
    barrier_wait(smem_address(&s.empty[ring.index]), ring.parity ^ 1);
    share_numbers(s.index[ring.index], warp, lane, seen ? index : -1);
    if (lane == 0) {
      if (warp == 0) describe(s.info[ring.index], tile, flags);
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
    copies_arrive(bar);
  }
};

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
  const int warpgroup, lane, row_of_warpgroup;  // row_of_warpgroup: first of this thread's two rows, of 64
  Places places;
  Ring<kStages> ring;
  Ring<2> buffer;  // of P and dS
  u32 rows_parity = 0;
  int flags = 0;
  u32 store_at;

  DEVICE Consumer(const SparseBackwardParams& p, Shared& s, int warpgroup)
      : p(p),
        s(s),
        warpgroup(warpgroup),
        lane(threadIdx.x % 32),
        row_of_warpgroup(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
        places(warpgroup, p.tiles.log2_heads) {
    store_at = (threadIdx.x % 128 / 32 * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
    keep(store_at);
  }

  DEVICE void wait_keys() const {
    barrier_wait(smem_address(&s.full[ring.index]), ring.parity);
    fence_async_proxy();
  }

  DEVICE void issue_s(float (&x)[kStep / 2]) const {
    issue_logits<kHeadDim, kStep>(x, Operand(smem_address(s.q[warpgroup])), Operand(smem_address(s.k[ring.index])));
  }

  DEVICE void store(u32 smem, const u32 (&x)[kStep / 4]) const {
#pragma unroll
    for (int i = 0; i < kStep / 16; ++i)
      store_matrices_x4(smem + (store_at ^ (i << 5)), x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }

  // Waits for S, the last wgmma in flight, and computes P and dS; both warpgroups may read them after a barrier.
  DEVICE void form_ds(float (&x)[kStep / 2], u32 (&ds)[kStep / 4]) {
    float y[kStep / 2];
    issue_logits<kHeadDim, kStep>(y, Operand(smem_address(s.dout[warpgroup])), Operand(smem_address(s.v[ring.index])));
    buffer.advance();
    wgmma_wait<1>();
    pin(x);
    hide_unseen(x, s.info[ring.index], lane);
    u32 probs[kStep / 4];
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) x[i] = exp2_fast(fmaf(x[i], p.scale_log2, -places.lse[(i >> 1) & 1]));
    pack_pairs(probs, x);
    store(smem_address(s.probs[buffer.index][warpgroup]), probs);
    wgmma_wait<0>();
    pin(y);
#pragma unroll
    for (int i = 0; i < kStep / 4; ++i)
      ds[i] = T::pack(x[2 * i] * (y[2 * i] - places.delta[i & 1]), x[2 * i + 1] * (y[2 * i + 1] - places.delta[i & 1]));
    store(smem_address(s.ds[buffer.index][warpgroup]), ds);
    fence_async_proxy();
  }

  DEVICE void issue_gradients(float (&dq)[kHeadDim / 2], float (&part)[kHeadDim / 2], const u32 (&ds)[kStep / 4],
                              int stage) {
    named_sync(1, 256);
    issue_weighted<kHeadDim, kStep>(dq, ds, Operand(smem_address(s.k[stage]), kStep * 128));
    const u32 left = warpgroup ? smem_address(s.ds[buffer.index]) : smem_address(s.probs[buffer.index]);
    const u32 right = warpgroup ? smem_address(s.q) : smem_address(s.dout);
    issue_key_gradient(part, Operand(left), Operand(right, kPlaces * 128));
  }

  // Keys of this thread's two rows of a contribution to dK or dV; negative for none.
  DEVICE int2 keys_of(int stage) const {
    return make_int2(s.index[stage][entry_of_row(row_of_warpgroup)],
                     s.index[stage][entry_of_row(row_of_warpgroup + 8)]);
  }

  DEVICE void add_part(const float (&part)[kHeadDim / 2], const int2& keys, int head_kv) const {
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

  DEVICE void run() {
    while (true) {
      wait_keys();
      const int4 item = *reinterpret_cast<const int4*>(&s.info[ring.index]);
      flags = uniform(item.x);
      if (flags & kNoMoreSteps) break;
      const int first_row = item.y, head_rows = item.z, head_kv = item.w;
      places.load_stats(p, first_row, head_rows);
      barrier_wait(smem_address(&s.rows_full), rows_parity);
      rows_parity ^= 1;
      float dq[kHeadDim / 2], part[kHeadDim / 2], x[kStep / 2];
      u32 ds[kStep / 4];
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dq[i] = 0.f;
      issue_s(x);
      form_ds(x, ds);
      // At the start of each iteration dS of the step is in registers and no wgmma is in flight: ptxas serializes all
      // wgmmas if one is in flight across the back edge of the loop.
      while (true) {
        // kLastStep always ends the loop; see sparse_forward.cu.
        if (flags & kLastStep) {
          if (p.tiles.num_items >= 0) break;
          flags = uniform(flags + 1);
        }
        const int now = ring.index;
        const int2 keys = keys_of(now);
        issue_gradients(dq, part, ds, now);
        ring.advance();
        wait_keys();
        issue_s(x);
        flags = uniform(s.info[ring.index].flags);
        wgmma_wait<1>();
        pin(dq);
        pin(ds);
        pin(part);
        release(s.empty[now], lane);
        add_part(part, keys, head_kv);
        form_ds(x, ds);  // dP reuses the registers of the part
      }
      const int2 keys = keys_of(ring.index);
      issue_gradients(dq, part, ds, ring.index);
      wgmma_wait<0>();
      pin(dq);
      pin(ds);
      pin(part);
      release(s.empty[ring.index], lane);
      release(s.rows_empty, lane);
      ring.advance();
      add_part(part, keys, head_kv);
      places.store_dq(p, dq, first_row, head_rows, lane);
    }
  }
};

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    ffa_sparse_backward(const __grid_constant__ SparseBackwardParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) s.init(kArrivals);
  __syncthreads();
  await_earlier_kernels();
  if (threadIdx.x < 128) {
    registers_shrink<56>();  // together with registers_grow: all registers of the block
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    Loader loader{p, s, warp, lane};
    walk_indices(p.tiles, loader, warp, lane);
  } else {
    registers_grow<224>();
    Consumer(p, s, uniform(threadIdx.x / 128) - 1).run();
  }
}
