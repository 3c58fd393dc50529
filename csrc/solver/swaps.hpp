// Pair swaps of chunks, for balance or for fewer rows to fetch.
#pragma once

#include "placing.hpp"

namespace magi {

// Limits of the search, passed by the caller, so that they are defined only once.
struct Limits {
  Int swaps_per_chunk, partners, swaps_tried, gathering_passes;
};

class Repair {
 public:
  Repair(Shards& shards, Holdings* holdings, const Limits& limits) : s_(shards), h_(holdings), l_(limits) {}

  // Swaps until the largest load is at most `target` or no swap helps; `passed` is called before and after each.
  template <typename Passed>
  void run(Int target, Passed passed) {
    passed();
    for (Int left = l_.swaps_per_chunk * static_cast<Int>(s_.rank.size()); left > 0; --left) {
      const Int top = s_.fullest();
      if (s_.load[top] <= target || !choose(top, target)) return;
      if (h_) h_->swap(s_.rank, mine_, partner_);
      s_.swap(mine_, partner_);
      passed();
    }
  }

 private:
  // Sets the chunks to swap; false if no swap lowers the larger of the two loads.
  bool choose(Int top, Int target) {
    auto next = s_.order().begin();
    for (Int count : {l_.partners, static_cast<Int>(s_.load.size())}) {
      partners_.clear();
      for (; next != s_.order().end() && static_cast<Int>(partners_.size()) < count; ++next)
        if (next->second != top) partners_.push_back(next->second);
      if (choose_among(top, target)) return true;
    }
    return false;
  }

  bool choose_among(Int top, Int target) {
    if (!h_) return choose_lowest(top);
    const Int num_partners = static_cast<Int>(partners_.size()), before = s_.load[top], none = INT64_MAX;
    place_.resize(s_.chunks(top).size() * num_partners), after_.resize(2 * place_.size());
    s_.best_swaps(top, partners_, none, [&](Int m, Int p, Int at, const Int* after) {
      const Int i = m * num_partners + p;
      place_[i] = at, after_[2 * i] = after[0], after_[2 * i + 1] = after[1];
    });
    if (after_.empty()) return false;
    const Int best = std::min_element(after_.begin(), after_.end()) - after_.begin();
    if (after_[best] >= before) return false;
    const Int enough = std::max(target, (after_[best] + before) / 2);
    good_.clear();
    for (Int i = 0; i < static_cast<Int>(after_.size()); ++i)
      if (after_[i] <= enough) good_.push_back(i);
    Int least = INT64_MAX, cheapest = best;
    for (Int i : some(good_, l_.swaps_tried)) {
      take(top, i);
      const Int cost = h_->swap_cost(s_.rank, mine_, partner_);
      if (cost < least) least = cost, cheapest = i;
    }
    take(top, cheapest);
    return true;
  }

  // The swap that lowers the larger of two loads most, of equal ones that of the first chunk, then partner, then side.
  bool choose_lowest(Int top) {
    Int least = s_.load[top], first = -1;
    s_.best_swaps(top, partners_, least, [&](Int m, Int p, Int at, const Int* after) {
      for (Int side : {0, 1}) {
        const Int i = 2 * (m * static_cast<Int>(partners_.size()) + p) + side;
        if (after[side] < least || (after[side] == least && i < first))
          least = after[side], first = i, take(top, m, p, at, side);
      }
    });
    return first >= 0;
  }

  // The chunks of candidate i of `after_`.
  void take(Int top, Int i) {
    const Int num_partners = static_cast<Int>(partners_.size());
    take(top, i / 2 / num_partners, i / 2 % num_partners, place_[i / 2], i % 2);
  }

  void take(Int top, Int m, Int p, Int at, Int side) {
    const auto& theirs = s_.chunks(partners_[p]);
    mine_ = s_.chunks(top)[m].index;
    partner_ = theirs[std::clamp<Int>(at - 1 + side, 0, static_cast<Int>(theirs.size()) - 1)].index;
  }

  Shards& s_;
  Holdings* h_;
  Limits l_;
  Ints partners_, place_, after_, good_;
  Int mine_ = 0, partner_ = 0;
};

// Swaps chunks to ranks that have their keys, while that reduces the rows to fetch and no load exceeds `limit`.
inline void gather(Shards& shards, Holdings& holdings, Int limit, const Limits& limits) {
  const Ints order = all_by_falling_area(shards.area, static_cast<Int>(shards.rank.size()));
  for (Int pass = 0; pass < limits.gathering_passes; ++pass) {
    const Int before = holdings.fetched;
    for (Int chunk : order) {
      const Int other = holdings.nearest(chunk, shards.rank[chunk]);
      Int best = -1, least = 0;
      for (Int partner : some(shards.swaps_within(chunk, other, limit), limits.swaps_tried)) {
        const Int cost = holdings.swap_cost(shards.rank, chunk, partner);
        if (cost < least) best = partner, least = cost;
      }
      if (best < 0) continue;
      holdings.swap(shards.rank, chunk, best);
      shards.swap(chunk, best);
    }
    if (holdings.fetched == before) return;
  }
}

}  // namespace magi
