// The chunks of each rank, sorted by area, and its load.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

namespace magi {

using Int = std::int64_t;
using Ints = std::vector<Int>;

struct Chunk {
  Int area;
  Int index;
  bool operator<(const Chunk& other) const { return area != other.area ? area < other.area : index < other.index; }
};

// Evenly spaced samples of many, at most `few`: positions 0, step, 2 * step, ...
template <typename T>
std::vector<T> some(const std::vector<T>& candidates, Int few) {
  const Int count = static_cast<Int>(candidates.size());
  const Int step = std::max<Int>(1, count / few);
  std::vector<T> out;
  for (Int i = 0; i < count && static_cast<Int>(out.size()) < few; i += step) out.push_back(candidates[i]);
  return out;
}

class Shards {
 public:
  Shards(const Ints& ranks, const Int* areas, Int cp_size)
      : rank(ranks), load(cp_size, 0), area(areas), chunks_(cp_size) {
    for (Int i = 0; i < static_cast<Int>(rank.size()); ++i) {
      chunks_[rank[i]].push_back({area[i], i});
      load[rank[i]] += area[i];
    }
    for (auto& row : chunks_) std::sort(row.begin(), row.end());
    for (Int r = 0; r < cp_size; ++r) order_.insert({load[r], r});
  }

  // The most loaded rank, the first in a tie.
  Int fullest() const { return order_.lower_bound({max_load(), 0})->second; }
  Int max_load() const { return order_.rbegin()->first; }
  // Ranks by increasing load; stable.
  const std::set<std::pair<Int, Int>>& order() const { return order_; }
  const std::vector<Chunk>& chunks(Int rank) const { return chunks_[rank]; }

  // For each partner and each chunk of rank `top`, in order, the two chunks there that balance the two ranks best:
  // `visit(m, p, at, after)` gets the later of the two, and the larger load of the two ranks when either is swapped,
  // the earlier one first. Partners come by rising load; it ends with those that leave more than `most` in any case.
  template <typename Visit>
  void best_swaps(Int top, const Ints& partners, const Int& most, Visit visit) const {
    const auto& mine = chunks_[top];
    for (Int p = 0; p < static_cast<Int>(partners.size()); ++p) {
      const auto& theirs = chunks_[partners[p]];
      const Int count = static_cast<Int>(theirs.size()), other = load[partners[p]], half = (load[top] - other) / 2;
      if (load[top] - half > most) return;
      Int at = 0;  // the wanted area rises with the chunk
      for (Int m = 0; m < static_cast<Int>(mine.size()); ++m) {
        const Int wanted = mine[m].area - half;
        while (at < count && theirs[at].area < wanted) ++at;
        Int after[2];
        for (Int side : {0, 1}) {
          const Int moved = mine[m].area - theirs[std::clamp<Int>(at - 1 + side, 0, count - 1)].area;
          after[side] = std::max(load[top] - moved, other + moved);
        }
        visit(m, p, at, after);
      }
    }
  }

  // Chunks of rank `other` that `chunk` can be swapped with, so that no load exceeds `limit`.
  Ints swaps_within(Int chunk, Int other, Int limit) const {
    const auto& theirs = chunks_[other];
    const Int low = lower(theirs, load[other] + area[chunk] - limit);
    const Int high = lower(theirs, limit - load[rank[chunk]] + area[chunk] + 1);
    Ints out;
    for (Int i = low; i < high; ++i) out.push_back(theirs[i].index);
    return out;
  }

  void swap(Int one, Int other) {
    const Int delta = area[one] - area[other];
    replace(chunks_[rank[one]], one, other);
    replace(chunks_[rank[other]], other, one);
    change_load(rank[one], -delta);
    change_load(rank[other], delta);
    std::swap(rank[one], rank[other]);
  }

  Ints rank;        // of each chunk
  Ints load;        // of each rank
  const Int* area;  // of each chunk

 private:
  static Int lower(const std::vector<Chunk>& row, Int area) {
    return std::lower_bound(row.begin(), row.end(), Chunk{area, -1}) - row.begin();
  }

  void change_load(Int rank, Int by) {
    order_.erase({load[rank], rank});
    load[rank] += by;
    order_.insert({load[rank], rank});
  }

  void replace(std::vector<Chunk>& row, Int out, Int into) {
    row.erase(std::lower_bound(row.begin(), row.end(), Chunk{area[out], out}));
    const Chunk chunk{area[into], into};
    row.insert(std::lower_bound(row.begin(), row.end(), chunk), chunk);
  }

  std::set<std::pair<Int, Int>> order_;
  std::vector<std::vector<Chunk>> chunks_;
};

}  // namespace magi
