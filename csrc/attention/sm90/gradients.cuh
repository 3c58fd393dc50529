// Epilogues of the backward: gradients are written from accumulators, or from fp32 sums of them in device memory.
#pragma once

#include "tiles.cuh"

enum Store { kStoreHalf = 0, kStoreFloat = 1, kAddFloat = 2, kAddHalf = 3 };

template <typename T, int kColumns, Store store>
DEVICE void store_gradient_as(void* to, i64 offset, i64 step, const bool (&valid)[2], const float (&acc)[kColumns / 2],
                              float factor, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const i64 at = offset + r * step;
    float* out32 = static_cast<float*>(to) + at + 2 * (lane % 4);
    u16* out16 = static_cast<u16*>(to) + at;
#pragma unroll
    for (int g = 0; g < kColumns / 32; ++g) {
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x = factor * acc[4 * (4 * g + j) + 2 * r], y = factor * acc[4 * (4 * g + j) + 2 * r + 1];
        const int column = 32 * g + 8 * j;
        if (store == kAddFloat) {
          if (valid[r]) add_global_v2(out32 + column, x, y);
        } else if (store == kStoreFloat) {
          if (valid[r]) *reinterpret_cast<float2*>(out32 + column) = make_float2(x, y);
        } else {
          if (store == kAddHalf && valid[r]) {
            const u32 old = *reinterpret_cast<const u32*>(out16 + column + 2 * (lane % 4));
            x += T::low(old), y += T::high(old);
          }
          word[j] = T::pack(x, y);
        }
      }
      if (store == kStoreHalf || store == kAddHalf) {
        transpose_quad(word, lane);
        if (valid[r])
          *reinterpret_cast<uint4*>(out16 + 32 * g + 8 * (lane % 4)) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}

// Stores or adds the accumulators of 64 rows, times `factor`. `offset`: element offset of this thread's first row; the
// second is `step` elements further. One branch selects a specialized function: branches for each element would take a
// third of the time of an item with few blocks.
template <typename T, int kColumns>
DEVICE void store_gradient(int store, void* to, i64 offset, i64 step, const bool (&valid)[2],
                           const float (&acc)[kColumns / 2], float factor, int lane) {
  if (store == kStoreHalf)
    store_gradient_as<T, kColumns, kStoreHalf>(to, offset, step, valid, acc, factor, lane);
  else if (store == kStoreFloat)
    store_gradient_as<T, kColumns, kStoreFloat>(to, offset, step, valid, acc, factor, lane);
  else if (store == kAddFloat)
    store_gradient_as<T, kColumns, kAddFloat>(to, offset, step, valid, acc, factor, lane);
  else
    store_gradient_as<T, kColumns, kAddHalf>(to, offset, step, valid, acc, factor, lane);
}

// A warp converts sums of 16 rows and kColumns columns to rows of a gradient. `sums`(i): this thread's elements of the
// i-th 8 columns, in the layout of accumulators. `at`: element offset of the first column of row lane / 4; the other
// row of this thread is 8 rows below.
template <typename T, int kColumns, typename Sums>
DEVICE void postprocess_rows(const Sums& sums, void* to, i64 at, i64 row_stride, const bool (&valid)[2], int store,
                             float scale, int lane) {
  const bool add = store >= kAddFloat, wide = store == kStoreFloat || store == kAddFloat;
#pragma unroll
  for (int g = 0; g < kColumns / 32; ++g) {
    float4 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = sums(4 * g + j);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const i64 first = at + 8 * r * row_stride + 32 * g;
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float a = scale * (r ? x[j].z : x[j].x), b = scale * (r ? x[j].w : x[j].y);
        const i64 column = first + 8 * j + 2 * (lane % 4);
        if (wide) {
          float2* two = reinterpret_cast<float2*>(static_cast<float*>(to) + column);
          if (valid[r]) *two = add ? make_float2(two->x + a, two->y + b) : make_float2(a, b);
          continue;
        }
        if (add && valid[r]) {
          const u32 old = *reinterpret_cast<const u32*>(static_cast<u16*>(to) + column);
          a += T::low(old), b += T::high(old);
        }
        word[j] = T::pack(a, b);
      }
      if (wide) continue;
      transpose_quad(word, lane);
      if (valid[r])
        *reinterpret_cast<uint4*>(static_cast<u16*>(to) + first + 8 * (lane % 4)) =
            make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

// The same for sums stored in pieces, in the layout of a warp's accumulators. They are read once, hence __ldcs.
template <typename T, int kColumns>
DEVICE void postprocess_piece(const float4* piece, void* to, i64 at, i64 row_stride, const bool (&valid)[2], int store,
                              float scale, int lane) {
  postprocess_rows<T, kColumns>([&](int i) { return __ldcs(piece + i * 32 + lane); }, to, at, row_stride, valid, store,
                                scale, lane);
}
