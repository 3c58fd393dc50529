// Counts of what the ranks of a dispatch compute and send; equal to megatron_magi/plan/counts.py.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace {

using Int = std::int64_t;
constexpr Int kNoDiagonal = Int{1} << 40;

struct Band {
  Int q0, q1, k0, k1, lo, hi;  // query q sees key k if both are in range and lo <= k - q < hi
};

// Makes a band tight: removes rows and keys without visible pairs, and diagonals that cut nothing. It must not be
// empty.
void tighten(Band& b) {
  b.q0 = std::max(b.q0, b.k0 - b.hi + 1), b.q1 = std::min(b.q1, b.k1 - b.lo);
  b.k0 = std::max(b.k0, b.q0 + b.lo), b.k1 = std::min(b.k1, b.q1 - 1 + b.hi);
  if (b.q1 - 1 + b.lo <= b.k0) b.lo = -kNoDiagonal;
  if (b.q0 + b.hi >= b.k1) b.hi = kNoDiagonal;
}

// Sum of first + i for start <= i < stop.
Int ramp(Int first, Int start, Int stop) { return (stop - start) * first + (stop - start) * (start + stop - 1) / 2; }

// Number of visible pairs of a tight band, or of a part of its keys; at least one.
Int area(const Band& b) {
  const Int q0 = std::max(b.q0, b.k0 - b.hi + 1), rows = std::min(b.q1, b.k1 - b.lo) - q0;
  const Int high = std::max<Int>(0, b.k1 - b.hi - q0), low = std::min(rows, b.k0 - b.lo - q0);
  const Int ends = ramp(q0 + b.hi, 0, high) + (rows - high) * b.k1;
  const Int begins = low * b.k0 + ramp(q0 + b.lo, low, rows);
  return ends - begins;
}

struct Span {
  Int begin, end;
};

// Spans in any order, which may overlap. Totals over many ranks give what these exchange with each other without
// iterating over pairs of ranks.
class Spans {
 public:
  void add(const Span& span) { begins_.push_back(span.begin), ends_.push_back(span.end); }

  void finish() {
    for (auto [edges, sums] : {std::pair{&begins_, &begin_sums_}, std::pair{&ends_, &end_sums_}}) {
      std::sort(edges->begin(), edges->end());
      sums->assign(edges->size() + 1, 0);
      std::partial_sum(edges->begin(), edges->end(), sums->begin() + 1);
    }
  }

  // Sum over these spans of the keys that each shares with `span`.
  Int within(const Span& span) const { return before(span.end) - before(span.begin); }

 private:
  // Keys of a span before `at`: those after its begin, minus those after its end.
  Int before(Int at) const { return behind(begins_, begin_sums_, at) - behind(ends_, end_sums_, at); }

  static Int behind(const std::vector<Int>& edges, const std::vector<Int>& sums, Int at) {
    const Int count = std::lower_bound(edges.begin(), edges.end(), at) - edges.begin();
    return count * at - sums[count];
  }

  std::vector<Int> begins_, ends_, begin_sums_, end_sums_;
};

class Counting {
 public:
  // `host`: the rank that computes the queries of each chunk; `out`: [9, 2, cp_size], zeros.
  Counting(const Int* bounds, const Int* rank, const Int* host, Int num_chunks, Int cp_size, Int ranks_per_node,
           Int* out)
      : cp_size_(cp_size), ranks_per_node_(ranks_per_node), out_(out), own_(cp_size), needed_(cp_size) {
    for (Int i = 0; i < num_chunks; ++i) {
      if (i && rank[i] == rank[i - 1] && host[i] == host[i - 1])
        queries_.back().end = bounds[i + 1];
      else
        queries_.push_back({bounds[i], bounds[i + 1]}), host_.push_back(host[i]);
      if (i && rank[i] == rank[i - 1]) {
        runs_.back().end = own_[rank[i]].back().end = bounds[i + 1];
        continue;
      }
      runs_.push_back({bounds[i], bounds[i + 1]}), rank_.push_back(rank[i]);
      own_[rank[i]].push_back(runs_.back());
    }
    for (Int place : {0, 1}) first_[place].resize(cp_size), changes_[place].resize(cp_size);
  }

  // A tight band: every row in its range sees a key, every key is seen.
  void add(const Band& band) {
    for (Int i = after(queries_, band.q0); i < static_cast<Int>(queries_.size()) && queries_[i].begin < band.q1; ++i) {
      Band piece = band;
      piece.q0 = std::max(piece.q0, queries_[i].begin), piece.q1 = std::min(piece.q1, queries_[i].end);
      tighten(piece), add_piece(piece, host_[i]);
    }
  }

  void finish() {
    for (Int place : {0, 1})
      for (Int r = 0; r < cp_size_; ++r) {
        auto& first = first_[place][r];
        std::sort(first.begin(), first.end());
        cell(5, place, r) = std::unique(first.begin(), first.end()) - first.begin();
        auto& changes = changes_[place][r];
        std::sort(changes.begin(), changes.end());
        Int rows = 0, most = 0;
        for (const auto& change : changes) most = std::max(most, rows += change.second);
        cell(6, place, r) = most;
      }
    count_travel();
  }

 private:
  // The first of `spans`, which are ascending, that ends after `at`.
  static Int after(const std::vector<Span>& spans, Int at) {
    return std::upper_bound(spans.begin(), spans.end(), at, [](Int x, const Span& s) { return x < s.end; }) -
           spans.begin();
  }

  Int& cell(Int what, Int place, Int rank) { return out_[(what * 2 + place) * cp_size_ + rank]; }

  void add_piece(const Band& piece, Int rank) {
    needed_[rank].push_back({piece.k0, piece.k1});
    const auto& own = own_[rank];
    Span near{piece.k0, piece.k1}, far = near;
    Int near_area = 0, near_keys = 0;
    for (Int i = after(own, piece.k0); i < static_cast<Int>(own.size()) && own[i].begin < piece.k1; ++i) {
      Band part = piece;
      part.k0 = std::max(part.k0, own[i].begin), part.k1 = std::min(part.k1, own[i].end);
      if (!near_keys) {
        near.begin = part.k0;
        if (part.k0 == piece.k0) far.begin = part.k1;
      }
      near.end = part.k1;
      if (part.k1 == piece.k1) far.end = part.k0;
      near_area += area(part), near_keys += part.k1 - part.k0;
    }
    add_place(piece, rank, 0, near, near_area, near_keys);
    add_place(piece, rank, 1, far, area(piece) - near_area, piece.k1 - piece.k0 - near_keys);
  }

  void add_place(Band seen, Int rank, Int place, Span span, Int pairs, Int keys) {
    seen.k0 = span.begin, seen.k1 = span.end;
    if (!keys) return;
    tighten(seen);
    const Int rows = seen.q1 - seen.q0, edges = (seen.lo != -kNoDiagonal) + (seen.hi != kNoDiagonal);
    const Int values[] = {pairs, rows, keys, rows * edges, keys * edges};
    for (Int what = 0; what < 5; ++what) cell(what, place, rank) += values[what];
    first_[place][rank].push_back(seen.q0);
    const Int see_a_key = std::min(rows, seen.hi - seen.lo);
    changes_[place][rank].push_back({seen.k0, see_a_key}), changes_[place][rank].push_back({seen.k1, -see_a_key});
  }

  void count_travel() {
    const Int num_nodes = (cp_size_ - 1) / ranks_per_node_ + 1;
    Spans all;
    std::vector<Spans> held(num_nodes), fetched(num_nodes);
    for (std::size_t i = 0; i < runs_.size(); ++i) held[rank_[i] / ranks_per_node_].add(runs_[i]);
    for (Spans& spans : held) spans.finish();
    for (Int r = 0; r < cp_size_; ++r)
      for (const Span& span : from_others(r)) {
        const Int node = r / ranks_per_node_, near = held[node].within(span);
        cell(7, 0, r) += near, cell(7, 1, r) += span.end - span.begin - near;
        all.add(span), fetched[node].add(span);
      }
    all.finish();
    for (Spans& spans : fetched) spans.finish();
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      const Int near = fetched[rank_[i] / ranks_per_node_].within(runs_[i]);
      cell(8, 0, rank_[i]) += near, cell(8, 1, rank_[i]) += all.within(runs_[i]) - near;
    }
  }

  // The keys that a rank needs and does not hold.
  std::vector<Span> from_others(Int rank) {
    auto& needed = needed_[rank];
    const auto& own = own_[rank];
    std::sort(needed.begin(), needed.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    std::vector<Span> out;
    for (std::size_t i = 0; i < needed.size();) {
      Span rest = needed[i];
      for (++i; i < needed.size() && needed[i].begin <= rest.end; ++i) rest.end = std::max(rest.end, needed[i].end);
      for (Int j = after(own, rest.begin); j < static_cast<Int>(own.size()) && own[j].begin < rest.end; ++j) {
        if (rest.begin < own[j].begin) out.push_back({rest.begin, own[j].begin});
        rest.begin = own[j].end;
      }
      if (rest.begin < rest.end) out.push_back(rest);
    }
    return out;
  }

  Int cp_size_, ranks_per_node_;
  Int* out_;
  std::vector<Span> runs_, queries_;
  std::vector<Int> rank_, host_;
  std::vector<std::vector<Span>> own_, needed_;
  std::vector<std::vector<Int>> first_[2];
  std::vector<std::vector<std::pair<Int, Int>>>
      changes_[2];  // (key, change in the number of rows that see keys from there on)
};

}  // namespace

// `bands`: [num_bands, 6], tight; `rank`, `host`: [num_dispatches, num_chunks]; `out`: [num_dispatches, 9, 2, cp_size],
// the fields of Counts.
extern "C" __attribute__((visibility("default"))) void magi_count(const Int* bands, Int num_bands, const Int* bounds,
                                                                  const Int* rank, const Int* host, Int num_chunks,
                                                                  Int num_dispatches, Int cp_size, Int ranks_per_node,
                                                                  Int* out) {
  std::fill(out, out + 18 * cp_size * num_dispatches, 0);
  for (Int d = 0; d < num_dispatches; ++d, rank += num_chunks, host += num_chunks, out += 18 * cp_size) {
    Counting counting(bounds, rank, host, num_chunks, cp_size, ranks_per_node, out);
    for (Int i = 0; i < num_bands; ++i) {
      const Int* b = bands + 6 * i;
      counting.add({b[0], b[1], b[2], b[3], b[4], b[5]});
    }
    counting.finish();
  }
}
