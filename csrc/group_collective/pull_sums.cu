// Adds partial rows that peers publish to the rows they belong to, in the order of ranks: each result is read once and
// written once. NaN is added where a rank does not come.

#include "numbers.cuh"
#include "peers.cuh"

struct PullSumsParams {
  Peers peers;
  SlotRows into;      // units: VECTOR elements; in the slot of FROM
  const i64* rows;    // [*count]: row of the result
  const i64* starts;  // [*count + 1]: contributions of the i-th are at places[starts[i]] to places[starts[i + 1] - 1]
  const i64* places;
  const i64* count;
  i64 chunk_shift;
};

constexpr int kLoads = 4;

DEVICE void add_parts(const SlotRows& s, Pull& pull, i64 row, const i64* places, i64 count, int lane, int lanes,
                      bool& failed) {
  using From = Vector<FROM>;
  using Into = Vector<INTO>;
  for (int unit = lane; unit < s.units; unit += kLoads * lanes) {
    Sum sum[kLoads][VECTOR];
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (unit + i * lanes < s.units) {
        const Into before = *reinterpret_cast<const Into*>(address_of(s, row, unit + i * lanes, sizeof(Into)));
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sum[i][j] = widen(before.at[j]);
      }
    for (i64 k = 0; k < count; ++k) {
      const u64 address = failed ? 0 : pull.await_row(places[k]);
      failed = address == 0;
      if (failed) break;
      const From* from = reinterpret_cast<const From*>(address);
      From part[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (unit + i * lanes < s.units) part[i] = from[unit + i * lanes];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
#pragma unroll
        for (int j = 0; j < VECTOR; ++j)
          if (unit + i * lanes < s.units) sum[i][j] += widen(part[i].at[j]);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (unit + i * lanes < s.units) {
        Into after;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j)
          after.at[j] = Narrow<INTO, Sum>::of(failed ? static_cast<Sum>(__int_as_float(0x7fffffff)) : sum[i][j]);
        *reinterpret_cast<Into*>(address_of(s, row, unit + i * lanes, sizeof(Into))) = after;
      }
  }
}

extern "C" __global__ void __launch_bounds__(512, 2) magi_pull_sums(const __grid_constant__ PullSumsParams p) {
  const u32 call = p.peers.control[p.peers.rank]->calls_pulled + 1;
  const RowWalk walk = my_rows(p.into.log2_lanes);
  const i64 num_rows = *p.count;
  const int run = length_of_runs(walk, num_rows);
  Pull pull(p.peers, call, static_cast<int>(p.chunk_shift), p.into.row_bytes);
  bool failed = false;
  for (i64 first = walk.row * run; first < num_rows; first += walk.step * run)
    for (i64 i = first; i < first + run && i < num_rows; ++i)
      add_parts(p.into, pull, p.rows[i], p.places + p.starts[i], p.starts[i + 1] - p.starts[i], walk.lane, walk.lanes,
                failed);
  end_pull(p.peers, call);
}
