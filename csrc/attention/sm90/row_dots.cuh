// rowsum(dout * out). A few lanes share a row of a head, 16 bytes each; a thread loads several rows at once to hide the
// memory latency.
#pragma once

#include "../../common/ptx.cuh"

constexpr int kThreads = 256;

struct RowPairs {
  const u32* dout;
  const u32* out;
  i64 dout_row, dout_head, out_row, out_head;  // strides, elements
};

template <typename T, int kHeadDimV>
struct RowDots {
  static constexpr int kPieces = kHeadDimV / 8;  // of a row, 16 bytes each
  static constexpr int kLanes = kPieces > 16 ? 32 : kPieces > 8 ? 16 : kPieces > 4 ? 8 : kPieces > 2 ? 4 : kPieces;
  static constexpr int kRowsAtOnce = 4;              // of a thread
  static constexpr int kStride = kThreads / kLanes;  // rows that a thread block loads at once
  static constexpr int kBlockRows = kRowsAtOnce * kStride;

  // Computes items `begin` to `begin` + kBlockRows of `count` rows of heads: where(i, row, head) gives row and
  // head of item i, and one lane calls store(i, sum).
  template <typename Where, typename Store>
  static DEVICE void compute(const RowPairs& p, u32 begin, u32 count, Where where, Store store) {
    const int lane = threadIdx.x % kLanes;
    const u32 first = begin + threadIdx.x / kLanes;
    uint4 x[kRowsAtOnce], y[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const u32 item = first + i * kStride;
      x[i] = y[i] = make_uint4(0, 0, 0, 0);
      if (item >= count || lane >= kPieces) continue;
      i64 row, head;
      where(item, row, head);
      x[i] = __ldcs(reinterpret_cast<const uint4*>(p.dout + (row * p.dout_row + head * p.dout_head) / 2) + lane);
      y[i] = __ldcs(reinterpret_cast<const uint4*>(p.out + (row * p.out_row + head * p.out_head) / 2) + lane);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const u32 a[4] = {x[i].x, x[i].y, x[i].z, x[i].w}, b[4] = {y[i].x, y[i].y, y[i].z, y[i].w};
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = T::low(b[j]), high = T::high(b[j]);
        // An output of 0 contributes 0 even if its gradient is NaN or inf.
        sum += (low == 0.f ? 0.f : low * T::low(a[j])) + (high == 0.f ? 0.f : high * T::high(a[j]));
      }
#pragma unroll
      for (int j = kLanes / 2; j > 0; j /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, j);
      const u32 item = first + i * kStride;
      if (lane == 0 && item < count) store(item, sum);
    }
  }
};
