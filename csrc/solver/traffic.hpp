// Rows that ranks have to fetch, counted in whole blocks of keys.
#pragma once

#include "shards.hpp"

namespace magi {

// The blocks that each chunk needs: views of arrays of the caller.
struct Traffic {
  Int num_chunks, num_blocks;
  const Int* first;       // [num_chunks + 1]
  const Int* needed;      // [first[num_chunks]], ascending for each chunk
  const Int* block;       // [num_chunks]: where the chunk lies
  const Int* chunk_rows;  // [num_chunks]
  const Int* block_rows;  // [num_blocks]

  const Int* begin(Int chunk) const { return needed + first[chunk]; }
  const Int* end(Int chunk) const { return needed + first[chunk + 1]; }
};

// For each rank and block how many of its chunks need the block, and how many rows of it the rank holds.
class Holdings {
 public:
  Holdings(const Traffic& traffic, Int cp_size) : t_(traffic), cp_size_(cp_size), cells_(cp_size * t_.num_blocks) {}

  // Starts anew; `before` is what it was last started with and swapped to, empty the first time.
  void restart(const Ints& before, const Ints& rank) {
    for (Int i = 0; i < static_cast<Int>(before.size()); ++i) add(before[i], i, -1);
    fetched = 0;
    for (Int i = 0; i < t_.num_chunks; ++i) {
      for (const Int* b = t_.begin(i); b != t_.end(i); ++b)
        if (cell(rank[i], *b).users == 0) fetched += t_.block_rows[*b];
      add(rank[i], i, 1);
    }
    for (Int i = 0; i < t_.num_chunks; ++i)
      if (cell(rank[i], t_.block[i]).users > 0) fetched -= t_.chunk_rows[i];
  }

  void swap(const Ints& rank, Int one, Int other) {
    fetched += swap_cost(rank, one, other);
    add(rank[one], one, -1), add(rank[one], other, 1);
    add(rank[other], other, -1), add(rank[other], one, 1);
  }

  // Change in the rows that the ranks of two chunks fetch together, if these are swapped.
  Int swap_cost(const Ints& rank, Int one, Int other) const {
    return side_cost(rank[one], one, other) + side_cost(rank[other], other, one);
  }

  // The rank, other than `rank`, that holds or fetches the most of the blocks that `chunk` needs.
  Int nearest(Int chunk, Int rank) const {
    Int best = -1, most = -1;
    for (Int r = 0; r < cp_size_; ++r) {
      if (r == rank) continue;
      Int rows = 0;
      for (const Int* b = t_.begin(chunk); b != t_.end(chunk); ++b) {
        const Cell& c = cell(r, *b);
        if (c.users > 0 || c.held > 0) rows += t_.block_rows[*b];
      }
      if (rows > most) best = r, most = rows;
    }
    return best;
  }

  Int fetched = 0;

 private:
  struct Cell {
    std::int32_t users = 0, held = 0;
  };

  const Cell& cell(Int rank, Int block) const { return cells_[rank * t_.num_blocks + block]; }
  Int missing(const Cell& c, Int block) const { return c.users > 0 ? t_.block_rows[block] - c.held : 0; }

  void add(Int rank, Int chunk, std::int32_t sign) {
    Cell* row = &cells_[rank * t_.num_blocks];
    for (const Int* b = t_.begin(chunk); b != t_.end(chunk); ++b) row[*b].users += sign;
    row[t_.block[chunk]].held += sign * static_cast<std::int32_t>(t_.chunk_rows[chunk]);
  }

  Int change(Int rank, Int block, std::int32_t users, Int out, Int into) const {
    const Cell& before = cell(rank, block);
    Cell after{before.users + users, before.held};
    if (block == t_.block[out]) after.held -= static_cast<std::int32_t>(t_.chunk_rows[out]);
    if (block == t_.block[into]) after.held += static_cast<std::int32_t>(t_.chunk_rows[into]);
    return missing(after, block) - missing(before, block);
  }

  // Change for `rank` when it gives `out` and gets `into`.
  Int side_cost(Int rank, Int out, Int into) const {
    const Int *a = t_.begin(out), *b = t_.begin(into), *a_end = t_.end(out), *b_end = t_.end(into);
    bool saw_out = false, saw_into = t_.block[out] == t_.block[into];
    Int cost = 0;
    while (a != a_end || b != b_end) {
      const bool gives = b == b_end || (a != a_end && *a <= *b), gets = a == a_end || (b != b_end && *b <= *a);
      const Int block = gives ? *a : *b;
      cost += change(rank, block, static_cast<std::int32_t>(gets) - static_cast<std::int32_t>(gives), out, into);
      saw_out |= block == t_.block[out], saw_into |= block == t_.block[into];
      a += gives, b += gets;
    }
    if (!saw_out) cost += change(rank, t_.block[out], 0, out, into);
    if (!saw_into) cost += change(rank, t_.block[into], 0, out, into);
    return cost;
  }

  const Traffic& t_;
  Int cp_size_;
  std::vector<Cell> cells_;
};

}  // namespace magi
