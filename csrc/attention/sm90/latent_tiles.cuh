// Shared by the kernels of attention over lists of latent keys: work items and what loads and hides keys. A work
// item is a query with up to 64 of the query heads of a key head, over the keys of its list, in blocks of 64.
//
// Template parameter: Params, of the kernel.
#pragma once

#include "row_products.cuh"
#include "softmax.cuh"
#include "sparse_tiles.cuh"

constexpr int kPanels = 9, kHalf = 4;       // panels of a key; of half of its values
constexpr int kBehind = 2 * kHalf;          // the panel behind the values
constexpr int kWidth = 64, kColumns = 256;  // keys of a block; columns of values of a warpgroup
constexpr u32 kPanelBytes = 64 * kPanelRowBytes;

struct Item {
  int row, head, heads, blocks;  // query; first query head and their number; blocks of its list, 0: no more items
};

template <typename Params>
DEVICE Item item_of(const Params& p, int number, int& head_kv) {
  const int part = number % p.parts, rest = number / p.parts;
  head_kv = rest % p.heads_kv;
  return {rest / p.heads_kv, head_kv * p.group + part * 64, min(64, p.group - part * 64), 0};
}

// Elements of a key from `column` on; zeros if there is no such key.
DEVICE const u16* key_at(const u16* keys, int index, int num_keys, i64 stride, int column) {
  const bool seen = static_cast<u32>(index) < static_cast<u32>(num_keys);
  return (seen ? keys + index * stride : reinterpret_cast<const u16*>(absent_row)) + column;
}

// Copies 16 bytes, and has what is around them brought into the L2 cache.
DEVICE void copy_chunk(u32 smem, const u16* global) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}

DEVICE void hide_unseen(float (&scores)[kWidth / 2], const u32 (&seen)[2], int lane) {
  const u32 words[2] = {seen[0], seen[1]};
  if ((words[0] & words[1]) == 0xffffffffu) return;
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) {
    const int column = 8 * (i / 4) + (i & 1);
    if (!(words[column / 32] >> 2 * (lane % 4) & 1u << column % 32)) scores[i] = -kInfinity;
  }
}
