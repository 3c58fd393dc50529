// Sums of gradients lie in pieces, 16 rows and kColumns columns as a warp's accumulators lie in registers. Here a warp
// turns one into rows of a gradient.
#pragma once

#include "tiles.cuh"

enum Store { kStoreHalf = 0, kStoreFloat = 1, kAddFloat = 2, kAddHalf = 3 };

// `to`: the first column of row lane / 4; the other row of this thread is 8 below. Piece and gradient are read and
// written once.
template <typename T, int kColumns>
DEVICE void finish_piece(const float4* piece, void* to, i64 at, i64 row_stride, const bool (&valid)[2], int store,
                         float scale, int lane) {
  const bool add = store >= kAddFloat, wide = store == kStoreFloat || store == kAddFloat;
#pragma unroll
  for (int g = 0; g < kColumns / 32; ++g) {
    float4 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __ldcs(piece + (4 * g + j) * 32 + lane);
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
