// Greedy assignment of chunks to ranks: the starts that swaps repair.
#pragma once

#include <functional>
#include <numeric>
#include <queue>

#include "traffic.hpp"

namespace magi {

// `chunks` by decreasing area; stable.
inline Ints by_falling_area(Ints chunks, const Int* area) {
  std::stable_sort(chunks.begin(), chunks.end(), [area](Int a, Int b) { return area[a] > area[b]; });
  return chunks;
}

inline Ints all_by_falling_area(const Int* area, Int num_chunks) {
  Ints chunks(num_chunks);
  std::iota(chunks.begin(), chunks.end(), 0);
  return by_falling_area(std::move(chunks), area);
}

// The least loaded rank with room, the first in a tie. Changed loads are pushed again.
class LeastLoaded {
 public:
  void push(Int load, Int rank) { heap_.push({load, rank}); }

  Int top(const Ints& load, const Ints& room) {
    while (room[heap_.top().second] == 0 || load[heap_.top().second] != heap_.top().first) heap_.pop();
    return heap_.top().second;
  }

 private:
  using Entry = std::pair<Int, Int>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> heap_;
};

// Largest chunk first, each to the least loaded rank with room.
inline Ints min_heap(const Int* area, Int num_chunks, Ints room) {
  LeastLoaded least;
  Ints load(room.size(), 0), rank(num_chunks);
  for (Int r = 0; r < static_cast<Int>(room.size()); ++r) least.push(0, r);
  for (Int chunk : all_by_falling_area(area, num_chunks)) {
    const Int r = least.top(load, room);
    rank[chunk] = r, load[r] += area[chunk], --room[r];
    least.push(load[r], r);
  }
  return rank;
}

// Places the chunks that `rank` leaves open (-1): where the fewest new keys must be fetched, loads up to `most`.
class Placing {
 public:
  Placing(const Traffic& traffic, const Int* area, const Int* capacity, Int cp_size, const Int* start)
      : t_(traffic), area_(area), rank_(start, start + t_.num_chunks), load_(cp_size, 0), saved_(cp_size, 0) {
    room_.assign(capacity, capacity + cp_size);
    has_.resize(t_.num_blocks);
    for (Int i = 0; i < t_.num_chunks; ++i)
      if (rank_[i] >= 0) take(i, rank_[i]);
    for (Int r = 0; r < cp_size; ++r) least_.push(load_[r], r);
  }

  Ints run(Int most) {
    Ints open;
    for (Int i = 0; i < t_.num_chunks; ++i)
      if (rank_[i] < 0) open.push_back(i);
    for (Int chunk : by_falling_area(std::move(open), area_)) {
      rank_[chunk] = choose(chunk, most);
      take(chunk, rank_[chunk]);
      least_.push(load_[rank_[chunk]], rank_[chunk]);
    }
    return rank_;
  }

 private:
  struct Part {
    Int rank, rows;  // rows of a block that the rank holds or fetches
  };

  Int choose(Int chunk, Int most) {
    touched_.clear();
    for (const Int* b = t_.begin(chunk); b != t_.end(chunk); ++b) {
      for (const Part& part : has_[*b]) {
        if (saved_[part.rank] == 0) touched_.push_back(part.rank);
        saved_[part.rank] += part.rows;
      }
    }
    Int best = -1;
    for (Int r : touched_) {
      if (room_[r] == 0 || load_[r] + area_[chunk] > most) continue;
      if (best < 0 || better(r, best)) best = r;
    }
    for (Int r : touched_) saved_[r] = 0;
    return best < 0 ? least_.top(load_, room_) : best;
  }

  bool better(Int a, Int b) const {
    if (saved_[a] != saved_[b]) return saved_[a] > saved_[b];
    return load_[a] != load_[b] ? load_[a] < load_[b] : a < b;
  }

  void take(Int chunk, Int rank) {
    for (const Int* b = t_.begin(chunk); b != t_.end(chunk); ++b) part(*b, rank) = t_.block_rows[*b];
    const Int own = t_.block[chunk];
    Int& rows = part(own, rank);
    rows = std::min(t_.block_rows[own], rows + t_.chunk_rows[chunk]);
    load_[rank] += area_[chunk], --room_[rank];
  }

  Int& part(Int block, Int rank) {
    for (Part& p : has_[block])
      if (p.rank == rank) return p.rows;
    has_[block].push_back({rank, 0});
    return has_[block].back().rows;
  }

  const Traffic& t_;
  const Int* area_;
  Ints rank_, load_, room_, saved_, touched_;
  std::vector<std::vector<Part>> has_;
  LeastLoaded least_;
};

}  // namespace magi
