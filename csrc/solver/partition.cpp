// What the ranks of a dispatch compute and fetch, and the part of one rank: equal to megatron_magi/plan/partition.py,
// exchange.py and chunks.py. A function that begins a result returns its sizes; another writes it to memory of the
// caller, and ends it.
#include <numeric>
#include <tuple>

#include "bands.hpp"

#define MAGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace magi {
namespace {

// Runs of tokens, or ranges that ranks fetch, by columns as Python has them.
struct Columns {
  const Int *start, *end, *rank, *at;  // `at`: row of the first token, of the rank's tensors or of its buffer
  Int count;

  Range range(Int i) const { return {start[i], end[i]}; }
};

// The ranges, ascending and disjoint, that end after `at`: index of the first.
Int after(const Ranges& ranges, Int at) {
  return std::upper_bound(ranges.begin(), ranges.end(), at, [](Int x, const Range& r) { return x < r.end; }) -
         ranges.begin();
}

Int size(const Ranges& ranges) { return static_cast<Int>(ranges.size()); }

// Ranges in any order, which may overlap: rows that others share with them, counted once for each range.
class Overlaps {
 public:
  void add(const Range& range) { edges_[0].push_back(range.begin), edges_[1].push_back(range.end); }

  void finish() {
    for (Int side : {0, 1}) {
      std::sort(edges_[side].begin(), edges_[side].end());
      sums_[side].assign(edges_[side].size() + 1, 0);
      std::partial_sum(edges_[side].begin(), edges_[side].end(), sums_[side].begin() + 1);
    }
  }

  Int within(const Range& range) const { return before(range.end) - before(range.begin); }

 private:
  Int before(Int at) const { return behind(0, at) - behind(1, at); }

  Int behind(Int side, Int at) const {
    const Int count = std::lower_bound(edges_[side].begin(), edges_[side].end(), at) - edges_[side].begin();
    return count * at - sums_[side][count];
  }

  Ints edges_[2], sums_[2];
};

Overlaps overlaps(const Columns& some, Int below) {  // of ranks below
  Overlaps out;
  for (Int i = 0; i < some.count; ++i)
    if (some.rank[i] < below) out.add(some.range(i));
  out.finish();
  return out;
}

struct Partition {
  Bands pieces;
  Ints run, dst, start, end;

  Partition(const Band* bands, Int num_bands, const Columns& runs, const Columns& queries, Int cp_size, Int* rows,
            Int* own_area, Int* all_area) {
    std::vector<Ranges> needed(cp_size), own(cp_size);
    for (Int i = 0; i < runs.count; ++i) own[runs.rank[i]].push_back(runs.range(i));
    Ints bounds(queries.start, queries.start + queries.count);
    bounds.push_back(queries.count ? queries.end[queries.count - 1] : 0);
    const Bands all(bands, bands + num_bands);
    cut_rows(all, bounds, [&](const Band& piece, Int segment) {
      pieces.push_back(piece), run.push_back(segment);
      const Int rank = queries.rank[segment];
      needed[rank].push_back({piece.k0, piece.k1});
      all_area[rank] += area(piece);
      for (Int i = after(own[rank], piece.k0); i < size(own[rank]) && own[rank][i].begin < piece.k1; ++i) {
        Band part = piece;
        part.k0 = std::max(part.k0, own[rank][i].begin), part.k1 = std::min(part.k1, own[rank][i].end);
        own_area[rank] += area(part);
      }
    });
    for (Int r = 0; r < cp_size; ++r)
      for (Range rest : merged(std::move(needed[r]))) {
        for (Int i = after(own[r], rest.begin); i < size(own[r]) && own[r][i].begin < rest.end; ++i) {
          if (rest.begin < own[r][i].begin) add(r, {rest.begin, own[r][i].begin});
          rest.begin = own[r][i].end;
        }
        if (rest.begin < rest.end) add(r, rest);
      }
    for (std::size_t i = 0; i < dst.size(); ++i) rows[dst[i]] += end[i] - start[i];
  }

 private:
  void add(Int rank, const Range& range) {
    // Of runs that touch, as rows may not ascend with tokens, nothing lies between.
    dst.push_back(rank), start.push_back(range.begin), end.push_back(range.end);
  }
};

// A piece of a range on one run.
struct Piece {
  Int peer, row, length, place;
  bool operator<(const Piece& other) const { return std::tie(peer, row) < std::tie(other.peer, other.row); }
};

class Exchange {
 public:
  Ints send_index, owner_rows, order;  // `order` is empty where rows arrive in the order of the buffer
  bool in_order = true;

  // `splits`: [4, num_ranks]: send_splits, recv_splits, first_there, first_back; `most`: of rows, received, sent.
  Exchange(const Columns& ranges, const Columns& runs, Int rank, Int num_ranks, Int* splits, Int* most) {
    std::vector<Piece> sent, got;
    Ranges held;
    for (Int i = 0; i < runs.count; ++i) held.push_back(runs.range(i));
    Ranges own;
    Ints own_run;
    for (Int i = 0; i < runs.count; ++i)
      if (runs.rank[i] == rank) own.push_back(runs.range(i)), own_run.push_back(i);
    for (Int i = 0; i < ranges.count; ++i) {
      for (Int j = after(own, ranges.start[i]); j < size(own) && own[j].begin < ranges.end[i]; ++j)
        meet(ranges, i, runs, own_run[j], ranges.rank[i], sent);
      if (ranges.rank[i] != rank) continue;
      for (Int j = after(held, ranges.start[i]); j < runs.count && runs.start[j] < ranges.end[i]; ++j)
        meet(ranges, i, runs, j, runs.rank[j], got);
    }
    send_index = rows_of(sent, splits), owner_rows = rows_of(got, splits + num_ranks);
    put_in_order(got);
    Ints received(num_ranks), gone(num_ranks);
    const Overlaps before = overlaps(runs, rank), ahead = overlaps(ranges, rank);
    const Overlaps all_runs = overlaps(runs, num_ranks), all_ranges = overlaps(ranges, num_ranks);
    for (Int i = 0; i < ranges.count; ++i) {
      splits[2 * num_ranks + ranges.rank[i]] += before.within(ranges.range(i));
      received[ranges.rank[i]] += all_runs.within(ranges.range(i));
    }
    for (Int i = 0; i < runs.count; ++i) {
      splits[3 * num_ranks + runs.rank[i]] += ahead.within(runs.range(i));
      gone[runs.rank[i]] += all_ranges.within(runs.range(i));
    }
    most[0] = most_rows(ranges, runs);
    most[1] = *std::max_element(received.begin(), received.end());
    most[2] = *std::max_element(gone.begin(), gone.end());
  }

 private:
  static void meet(const Columns& ranges, Int i, const Columns& runs, Int j, Int peer, std::vector<Piece>& out) {
    const Int start = std::max(ranges.start[i], runs.start[j]), end = std::min(ranges.end[i], runs.end[j]);
    if (start < end)
      out.push_back({peer, runs.at[j] + start - runs.start[j], end - start, ranges.at[i] + start - ranges.start[i]});
  }

  static Ints rows_of(std::vector<Piece>& pieces, Int* splits) {
    std::stable_sort(pieces.begin(), pieces.end());
    Ints out;
    for (const Piece& piece : pieces) {
      splits[piece.peer] += piece.length;
      for (Int i = 0; i < piece.length; ++i) out.push_back(piece.row + i);
    }
    return out;
  }

  // Received row of each row of the buffer.
  void put_in_order(const std::vector<Piece>& got) {
    Ints by_place(got.size()), first(got.size());
    std::iota(by_place.begin(), by_place.end(), Int{0});
    std::stable_sort(by_place.begin(), by_place.end(), [&](Int a, Int b) { return got[a].place < got[b].place; });
    in_order = std::is_sorted(by_place.begin(), by_place.end());
    if (in_order) return;
    for (std::size_t i = 1; i < got.size(); ++i) first[i] = first[i - 1] + got[i - 1].length;
    for (Int i : by_place)
      for (Int j = 0; j < got[i].length; ++j) order.push_back(first[i] + j);
  }

  static Int most_rows(const Columns& ranges, const Columns& runs) {
    Ranges sorted;
    for (Int i = 0; i < ranges.count; ++i) sorted.push_back(ranges.range(i));
    std::sort(sorted.begin(), sorted.end());
    Int most = 0;
    Ints reach;
    for (const Range& range : sorted) reach.push_back(std::max(reach.empty() ? range.end : reach.back(), range.end));
    for (Int i = 0; i < runs.count; ++i) {
      const Int last = std::lower_bound(sorted.begin(), sorted.end(), Range{runs.end[i], 0}) - sorted.begin() - 1;
      if (last < 0) continue;
      const Int rows = std::min(reach[last], runs.end[i]) - runs.start[i];
      if (rows > 0) most = std::max(most, runs.at[i] + rows);
    }
    return most;
  }
};

struct Local {
  Int stage;
  Band band;

  auto key() const { return std::tie(stage, band.q0, band.q1, band.k0); }
  bool touches(const Local& next) const {
    const Band &a = band, &b = next.band;
    return stage == next.stage && a.q0 == b.q0 && a.q1 == b.q1 && a.d_lo == b.d_lo && a.d_hi == b.d_hi && a.k1 == b.k0;
  }
};

void shift(Band& band, Int by_q, Int by_k) {
  band.q0 += by_q, band.q1 += by_q, band.k0 += by_k, band.k1 += by_k;
  if (band.d_lo != -kNoDiagonal) band.d_lo += by_k - by_q;
  if (band.d_hi != kNoDiagonal) band.d_hi += by_k - by_q;
}

// Where keys lie on a rank: its own, or those that a stage fetches.
struct Place {
  Range tokens;
  Int at, stage;
  bool operator<(const Place& other) const { return tokens < other.tokens; }
};

// Bands of one rank in local coordinates.
std::vector<Local> localise(const Band* bands, const Int* run, Int num_bands, const Columns& queries,
                            const Columns* places, Int num_stages, Int rank) {
  std::vector<Place> sorted;
  for (Int stage = 0; stage < num_stages; ++stage)
    for (Int i = 0; i < places[stage].count; ++i)
      if (places[stage].rank[i] == rank) sorted.push_back({places[stage].range(i), places[stage].at[i], stage});
  std::stable_sort(sorted.begin(), sorted.end());
  Ranges held;
  for (const Place& place : sorted) held.push_back(place.tokens);
  std::vector<Local> found, out;
  for (Int i = 0; i < num_bands; ++i) {
    if (queries.rank[run[i]] != rank) continue;
    for (Int j = after(held, bands[i].k0); j < size(held) && held[j].begin < bands[i].k1; ++j) {
      Local one{sorted[j].stage, bands[i]};
      one.band.k0 = std::max(one.band.k0, held[j].begin), one.band.k1 = std::min(one.band.k1, held[j].end);
      if (!one.band.tighten()) continue;
      shift(one.band, queries.at[run[i]] - queries.start[run[i]], sorted[j].at - held[j].begin);
      found.push_back(one);
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const Local& a, const Local& b) { return a.key() < b.key(); });
  for (const Local& one : found) {
    if (!out.empty() && out.back().touches(one))
      out.back().band.k1 = one.band.k1;
    else
      out.push_back(one);
  }
  return out;
}

struct Needs {
  Ints first, needed;
  Int group = 1;

  Needs(const Band* bands, Int num_bands, const Int* bounds, Int num_chunks, Int cells_group, Int most_needs,
        Int* areas) {
    const Ints edges(bounds, bounds + num_chunks + 1);
    std::vector<Ranges> of_chunk(num_chunks);
    const Bands all(bands, bands + num_bands);
    Int visits = 0;
    cut_rows(all, edges, [&](const Band& piece, Int chunk) {
      areas[chunk] += area(piece);
      const Int low = std::upper_bound(edges.begin(), edges.end(), piece.k0) - edges.begin() - 1;
      const Int high = std::lower_bound(edges.begin(), edges.end(), piece.k1) - edges.begin();
      of_chunk[chunk].push_back({low, high}), visits += high - low;
    });
    group = std::max({Int{1}, cells_group, ceil_div(visits, most_needs)});
    first.push_back(0);
    for (Ranges& ranges : of_chunk) {
      for (Range& range : ranges) range = {range.begin / group, (range.end - 1) / group + 1};
      for (const Range& range : merged(std::move(ranges)))
        for (Int block = range.begin; block < range.end; ++block) needed.push_back(block);
      first.push_back(static_cast<Int>(needed.size()));
    }
  }
};

void copy(const Ints& from, Int* to) { std::copy(from.begin(), from.end(), to); }

}  // namespace
}  // namespace magi

using magi::Band;
using magi::Columns;
using magi::Int;

// `counts` receives the numbers of pieces and of ranges; `totals`: [3, cp_size], zeros: rows that ranks fetch, and
// visible pairs with own and with all keys.
MAGI_EXPORT magi::Partition* magi_partition_begin(const Band* bands, Int num_bands, const Columns* runs,
                                                  const Columns* queries, Int cp_size, Int* totals, Int* counts) {
  auto* part =
      new magi::Partition(bands, num_bands, *runs, *queries, cp_size, totals, totals + cp_size, totals + 2 * cp_size);
  counts[0] = static_cast<Int>(part->pieces.size()), counts[1] = static_cast<Int>(part->dst.size());
  return part;
}

MAGI_EXPORT void magi_partition_end(magi::Partition* part, Band* pieces, Int* run, Int* ranges) {
  std::copy(part->pieces.begin(), part->pieces.end(), pieces);
  const Int count = static_cast<Int>(part->dst.size());
  magi::copy(part->run, run), magi::copy(part->dst, ranges), magi::copy(part->start, ranges + count);
  magi::copy(part->end, ranges + 2 * count);
  delete part;
}

// `counts` receives the numbers of sent and received rows, and whether received rows are not in order; `splits` and
// `most` as in `Exchange`, zeros.
MAGI_EXPORT magi::Exchange* magi_exchange_begin(const Columns* ranges, const Columns* runs, Int rank, Int num_ranks,
                                                Int* splits, Int* most, Int* counts) {
  auto* made = new magi::Exchange(*ranges, *runs, rank, num_ranks, splits, most);
  counts[0] = static_cast<Int>(made->send_index.size()), counts[1] = static_cast<Int>(made->owner_rows.size());
  counts[2] = !made->in_order;
  return made;
}

MAGI_EXPORT void magi_exchange_end(magi::Exchange* made, Int* send_index, Int* owner_rows, Int* order) {
  magi::copy(made->send_index, send_index), magi::copy(made->owner_rows, owner_rows), magi::copy(made->order, order);
  delete made;
}

// `places`: this rank's runs, and the ranges of each remote stage; `ends` receives the number of bands up to each,
// [num_stages], zeros.
MAGI_EXPORT std::vector<magi::Local>* magi_localise_begin(const Band* bands, const Int* run, Int num_bands,
                                                          const Columns* queries, const Columns* places, Int num_stages,
                                                          Int rank, Int* ends) {
  auto* made = new std::vector(magi::localise(bands, run, num_bands, *queries, places, num_stages, rank));
  for (const magi::Local& one : *made) ++ends[one.stage];
  std::partial_sum(ends, ends + num_stages, ends);
  return made;
}

MAGI_EXPORT void magi_localise_end(std::vector<magi::Local>* made, Band* bands) {
  for (const magi::Local& one : *made) *bands++ = one.band;
  delete made;
}

// `areas`: [num_chunks], zeros; `counts` receives the number of needed blocks, and of chunks in a block.
MAGI_EXPORT magi::Needs* magi_needs_begin(const Band* bands, Int num_bands, const Int* bounds, Int num_chunks,
                                          Int cells_group, Int most_needs, Int* areas, Int* counts) {
  auto* made = new magi::Needs(bands, num_bands, bounds, num_chunks, cells_group, most_needs, areas);
  counts[0] = static_cast<Int>(made->needed.size()), counts[1] = made->group;
  return made;
}

MAGI_EXPORT void magi_needs_end(magi::Needs* made, Int* first, Int* needed) {
  magi::copy(made->first, first), magi::copy(made->needed, needed);
  delete made;
}
