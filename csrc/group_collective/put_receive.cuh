// Receives rows from this rank's slot: RowCopier copies them, RowAdder adds them to rows of the result.
#pragma once

#include "numbers.cuh"
#include "put.cuh"

// Rows of this rank's slot, for one receiving thread. The flag of a chunk is read once.
struct SlotReader {
  const Peers& peers;
  const Route& route;
  u32 call, shift;
  u64 slot;
  i64 row_bytes;
  int from = 0, seen_from = -1;
  u32 seen_chunk = ~0u;

  DEVICE SlotReader(const PutParams& p, const Chunks& c, u32 call)
      : peers(p.peers),
        route(c.route),
        call(call),
        shift(static_cast<u32>(p.chunk_shift)),
        slot(p.peers.data[p.peers.rank] + call % kSlots * p.peers.slot_bytes),
        row_bytes(p.to.row_bytes) {}

  // Waits until a row has arrived; false on timeout.
  DEVICE bool await_row(i64 row) {
    while (row >= route.comes[from + 1]) ++from;
    while (row < route.comes[from]) --from;
    const u32 chunk = static_cast<u32>(row >> shift);
    if (from == seen_from && chunk == seen_chunk) return true;
    if (!await(peers, &peers.control[peers.rank]->published[from][chunk], from, call, kPull)) return false;
    seen_from = from;
    seen_chunk = chunk;
    return true;
  }
  DEVICE u64 address(i64 row) const { return slot + row * row_bytes; }
};

// Calls `move` for the units of a received row, tensor by tensor: a thread has every `lanes`-th unit, `loads` of them
// in each call. All lanes make the same number of calls, also with units past the end, as `move` may use shuffles.
template <class Move>
DEVICE void for_units(const SlotRows& s, int lane, int lanes, int loads, const Move& move) {
  for (int k = 0; k < kMaxTensors; ++k) {
    const int begin = s.begin[k], units = (k + 1 < kMaxTensors ? s.begin[k + 1] : s.units) - begin;
    for (int unit = 0; unit < units; unit += loads * lanes) move(k, begin, unit + lane, units);
  }
}

constexpr u32 kMostRows = 4;  // rows that a warp receives at a time

// A row of the result, and the rows of the slot that are copied or added to it.
struct Result {
  u32 row = 0, first = 0, past = 0;  // slot rows order[first] to order[past - 1]
};

// After a timeout. All bits set is NaN in every floating-point type.
template <typename Into>
DEVICE void fill_nan(const SlotRows& s, u32 row, int lane, int lanes) {
  Into nothing;
  memset(&nothing, 0xff, sizeof(nothing));
  for_units(s, lane, lanes, 1, [&](int tensor, int, int unit, int units) {
    if (unit < units) reinterpret_cast<Into*>(s.rows[tensor] + row * s.stride[tensor])[unit] = nothing;
  });
}

template <typename Unit>
struct RowCopier {
  using Into = Unit;

  template <class PartAt>
  static DEVICE void take_row(const SlotRows& s, const SlotReader& slot, const Result& r, int lane, int lanes,
                              const PartAt& part_at) {
    const u64 from = slot.address(part_at(r.first));
    for_units(s, lane, lanes, kLoads, [&](int tensor, int begin, int unit, int units) {
      const Unit* in = reinterpret_cast<const Unit*>(from) + begin;
      Unit* out = reinterpret_cast<Unit*>(s.rows[tensor] + r.row * s.stride[tensor]);
      Unit value[kLoads];
#pragma unroll
      for (int l = 0; l < kLoads; ++l) value[l] = in[min(unit + l * lanes, units - 1)];
#pragma unroll
      for (int l = 0; l < kLoads; ++l)
        if (unit + l * lanes < units) out[unit + l * lanes] = value[l];
    });
  }
};

constexpr int kSumLoads = 2;  // of a thread that adds rows

// AddendType, ResultType: element types; kElements: elements of an access.
template <typename AddendType, typename ResultType, int kElements>
struct RowAdder {
  using From = Vector<AddendType, kElements>;
  using Into = Vector<ResultType, kElements>;
  using Sum = Accumulator<AddendType, ResultType>;

  template <int kParts>
  static DEVICE void add_parts(Sum (&sum)[kSumLoads][kElements], const u64 (&from)[2], int unit, int lanes, int units) {
    From part[kParts][kSumLoads];
#pragma unroll
    for (int m = 0; m < kParts; ++m)
#pragma unroll
      for (int l = 0; l < kSumLoads; ++l)
        part[m][l] = reinterpret_cast<const From*>(from[m])[min(unit + l * lanes, units - 1)];
#pragma unroll
    for (int m = 0; m < kParts; ++m)
#pragma unroll
      for (int l = 0; l < kSumLoads; ++l)
#pragma unroll
        for (int j = 0; j < kElements; ++j) sum[l][j] += element(part[m][l], j);
  }

  // Adds the slot rows of a result to it, in order. `part_at(k)`: order[k].
  template <class PartAt>
  static DEVICE void take_row(const SlotRows& s, const SlotReader& slot, const Result& r, int lane, int lanes,
                              const PartAt& part_at) {
    for_units(s, lane, lanes, kSumLoads, [&](int tensor, int begin, int unit, int units) {
      Into* into = reinterpret_cast<Into*>(s.rows[tensor] + r.row * s.stride[tensor]);
      Into value[kSumLoads];
#pragma unroll
      for (int l = 0; l < kSumLoads; ++l) value[l] = into[min(unit + l * lanes, units - 1)];
      Sum sum[kSumLoads][kElements];
#pragma unroll
      for (int l = 0; l < kSumLoads; ++l)
#pragma unroll
        for (int j = 0; j < kElements; ++j) sum[l][j] = widen(value[l].at[j]);
      const i64 offset = static_cast<i64>(begin) * sizeof(From);
      u32 k = r.first;
      for (; k + 2 <= r.past; k += 2)
        add_parts<2>(sum, {slot.address(part_at(k)) + offset, slot.address(part_at(k + 1)) + offset}, unit, lanes,
                     units);
      if (k < r.past) add_parts<1>(sum, {slot.address(part_at(k)) + offset}, unit, lanes, units);
#pragma unroll
      for (int l = 0; l < kSumLoads; ++l) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) value[l].at[j] = Narrow<ResultType, Sum>::of(sum[l][j]);
        if (unit + l * lanes < units) into[unit + l * lanes] = value[l];
      }
    });
  }
};

// Receives rows. A few lanes, up to a warp, share a row. If it is a whole warp, its lanes look up several results at
// once, prefetched two iterations ahead, and wait in parallel for the rows that these need, as each acquire of a flag
// invalidates the SM's L1 cache.
template <class Receiver>
DEVICE void take(const PutParams& p, const Chunks& c, u32 call, i64 thread, i64 num_threads) {
  const SlotRows& s = p.to;
  const int log2_lanes = s.log2_lanes, lanes = 1 << log2_lanes, lane = static_cast<int>(thread) & (lanes - 1);
  const u32 count = static_cast<u32>(c.route.num_results), step = static_cast<u32>(num_threads >> log2_lanes);
  const u32 run = lanes < 32 ? 1 : max(1u, min(count / (2 * step), kMostRows));
  const SideBySide runs(p.peers, (count + run - 1) / run);
  SlotReader slot(p, c, call);
  bool failed = false;
  const auto of = [](const i64* table, u32 i) { return table == nullptr ? i : static_cast<u32>(table[i]); };
  const auto find = [&](u32 j) {
    Result r;
    if (j >= runs.end() || (lanes == 32 && lane >= run)) return r;
    const u32 i = static_cast<u32>(runs.at(j)) * run + (lanes == 32 ? lane : 0);
    if (i < count) r = {of(p.rows, i), of(p.starts, i), of(p.starts, i + 1)};
    return r;
  };
  const auto find_part = [&](const Result& r) {
    if (lanes < 32) return 0u;
    const u32 k = __shfl_sync(~0u, r.first, 0) + lane;
    return k < __reduce_max_sync(~0u, r.past) ? of(p.order, k) : 0u;
  };
  u32 j = static_cast<u32>(thread >> log2_lanes);
  Result next = find(j), after = find(j + step);
  u32 next_part = find_part(next);
  for (; j < runs.end(); j += step) {
    const Result now = next;
    const u32 part = next_part;
    next = after;
    after = find(j + 2 * step);
    next_part = find_part(next);
    if (lanes < 32) {
      for (u32 k = now.first; k < now.past && !failed; ++k) failed = !slot.await_row(of(p.order, k));
      if (now.first == now.past) continue;
      if (failed)
        fill_nan<typename Receiver::Into>(s, now.row, lane, lanes);
      else
        Receiver::take_row(s, slot, now, lane, lanes, [&](u32 k) { return of(p.order, k); });
      continue;
    }
    const u32 first = __shfl_sync(~0u, now.first, 0), past = __reduce_max_sync(~0u, now.past);
    for (u32 k = first + lane; k < past && !failed; k += 32)
      failed = !slot.await_row(k < first + 32 ? part : of(p.order, k));
    failed = __any_sync(~0u, failed);
    __syncwarp();  // orders one lane's acquire before the reads of all lanes
    for (u32 i = 0; i < run; ++i) {
      const Result r{__shfl_sync(~0u, now.row, i), __shfl_sync(~0u, now.first, i), __shfl_sync(~0u, now.past, i)};
      if (r.first == r.past) continue;
      if (failed)
        fill_nan<typename Receiver::Into>(s, r.row, lane, 32);
      else
        Receiver::take_row(s, slot, r, lane, 32,
                           [&](u32 k) { return k < first + 32 ? __shfl_sync(~0u, part, k - first) : of(p.order, k); });
    }
  }
}
