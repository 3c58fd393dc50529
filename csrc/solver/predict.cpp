// Predicted times of dispatches, and the number of stages; equivalent to `predict_all` of
// megatron_magi/plan/predict.py, without queries that travel, and `choose_degrees` of megatron_magi/plan/degree.py.
// Results are equal to the last bit: operations are in the order in which these do them.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

using Int = std::int64_t;

struct Limit {
  double bytes, keys;
};

// Rates, costs of kernels, and shape of the attention; `megatron_magi/plan/cpp_predict.py` has the same fields.
struct Model {
  double forward_tflops, backward_tflops, tile_columns, tile_rows, launch_us[2], memory_gbytes_per_s;
  double collective_us, gbytes_per_s, far_collective_us, far_gbytes_per_s, hidden;
  double host_us[2], host_stage_us[2], host_one_way_us;
  double num_sms, tail, tile[2], tall_tile[2], tall_keys, key_tile, query_block, dq_tile, dq_block;
  double most_packed, short_rows, most_forward_bytes;
  double heads, heads_kv, dk, dv, row_bytes;
  double stage_tflops, stage_gbytes_per_s, stage_latency_us;
  Int given_degree, max_degree, at_once;  // -1: the degree is chosen
  Int num_limits[2];                      // of a kernel for dq: without packed heads, and with them
  const Limit* limits[2];

  double memory_us(double bytes_a_row, double rows) const {
    return rows * (bytes_a_row * heads) / (memory_gbytes_per_s * 1e3);
  }

  double with_tail(double items) const { return 1 + tail * num_sms / std::max(items, 1.0); }

  double attend_us(double area) const { return 2.0 * area * heads * (dk + dv) / (stage_tflops * 1e6); }

  double fetch_us(double rows) const { return rows * row_bytes / (stage_gbytes_per_s * 1e3); }
};

// `predict._Stage` of one rank.
struct Stage {
  double area, rows, keys, row_edges, key_edges, starts, tallest;

  Stage with_fetched(const Stage& other) const {
    return {area + other.area,
            std::max(rows, other.rows),
            keys + other.keys,
            row_edges + other.row_edges,
            key_edges + other.key_edges,
            std::max(starts, other.starts),
            std::max(tallest, other.tallest)};
  }
};

// `predict._Steps` of a rank.
struct Steps {
  const Model& m;
  double num_rows;
  bool is_staged;

  double packed(const Stage& s) const {
    return s.starts > 1 && num_rows < m.short_rows * s.starts ? m.most_packed : 1.0;
  }

  double forward(const Stage& s, bool adds) const {
    const double packs = packed(s);
    const bool is_tall = packs > 1 || s.area >= m.tall_keys * num_rows;
    const double *tile = is_tall ? m.tall_tile : m.tile, height = tile[0], block = tile[1];
    const double columns = s.row_edges * (height / packs) / 2 + s.rows * (block / 2 + m.tile_columns);
    const double flops = (s.area + columns) * (2.0 * m.heads * (m.dk + m.dv));
    const double merged = is_staged ? m.memory_us((adds ? 8.0 : 2.0) * m.dv, s.rows) : 0.0;
    const double tail = m.with_tail(s.rows * m.heads / height);
    return flops * tail / (m.forward_tflops * 1e6) + merged + (s.area > 0 ? m.launch_us[0] : 0.0);
  }

  double backward(const Stage& s, bool adds) const {
    const double packs = packed(s);
    const bool separate = has_separate_dq(s, packs);
    const double packed = separate ? packs : 1.0, block = m.query_block / packed;
    const double rows = s.key_edges * (m.key_tile / 2) + s.keys * (block / 2 + m.tile_rows / packed);
    const double columns = s.row_edges * (m.dq_tile / packed / 2) + s.rows * (m.dq_block / 2 + m.tile_columns);
    const double width = (separate ? 2.0 : 3.0) * m.dk + 2.0 * m.dv;
    const double queries = separate ? (s.area + columns) * (2.0 * m.dk + m.dv) : 0.0;
    const double heads = separate ? m.heads_kv : m.heads;
    const double longest = (s.tallest + block / 2 + m.tile_rows / packed) * (m.key_tile * m.num_sms) / heads;
    const double tail = m.with_tail(s.keys * heads / m.key_tile);
    const double products = std::max((s.area + rows) * tail, longest) * width + queries * tail;
    const double gradient = ((separate ? 0.0 : 8.0) + (adds ? 8.0 : is_staged ? 4.0 : 2.0)) * m.dk;
    const double us = products * (2.0 * m.heads) / (m.backward_tflops * 1e6) + m.memory_us(1.0, num_rows) * gradient;
    return s.area > 0 ? us + m.launch_us[1] : 0.0;
  }

  double ends_us(bool is_backward) const {
    const double cast = is_staged ? 6.0 * (is_backward ? m.dk : m.dv) : 0.0;
    return m.memory_us(cast + (is_backward ? 4.0 * m.dv : 0.0), num_rows);
  }

 private:
  bool has_separate_dq(const Stage& s, double packs) const {
    const double keys = s.area / num_rows, bytes = 4 * num_rows * m.heads * m.dk;
    const int of = packs > 1;
    return std::any_of(m.limits[of], m.limits[of] + m.num_limits[of],
                       [&](const Limit& limit) { return bytes >= limit.bytes && keys < limit.keys; });
  }
};

// `predict._pass_us` of a rank.
double pass_us(double own, double fetched, double fetch, double reduce, Int degree, double hidden) {
  if (!degree) return own;
  const double attend = fetched / static_cast<double>(degree), delay = (1 - hidden) * std::min(own, fetch);
  double computed = own + delay, arrived = fetch + delay, returned = 0;
  for (Int stage = 1; stage <= degree; ++stage) {
    double begin = std::max(computed, arrived);
    if (stage < degree) {
      const double late = (1 - hidden) * std::min(attend, fetch);
      begin += late, arrived = std::max(arrived, computed) + fetch + late;
    }
    computed = begin + attend;
    returned = std::max(computed, returned) + reduce;
  }
  return std::max(computed, returned);
}

// `degree.step_us` for one number of stages.
double stages_us(const Model& m, const Int* local, const Int* remote, const Int* rows, Int cp_size, Int degree) {
  double slowest[2] = {0, 0};
  for (int pass = 0; pass < 2; ++pass)
    for (Int r = 0; r < cp_size; ++r) {
      const double stages = static_cast<double>(degree), work = pass ? 2.5 : 1.0;
      const double travel = m.fetch_us(static_cast<double>(rows[r]) / stages);
      const double attend = work * m.attend_us(static_cast<double>(remote[r]) / stages);
      double computed = work * m.attend_us(static_cast<double>(local[r])) + m.stage_latency_us, fetched = travel;
      for (Int stage = 1; stage <= degree; ++stage) {
        const double start = std::max(computed, fetched);
        fetched = std::max(fetched, computed) + travel;
        computed = start + attend + m.stage_latency_us;
      }
      const double us = pass ? computed + travel : computed;
      slowest[pass] = r ? std::max(slowest[pass], us) : us;
    }
  return slowest[0] + slowest[1];
}

Int choose_degree(const Model& m, const Int* local, const Int* remote, const Int* rows, Int cp_size) {
  if (std::all_of(rows, rows + cp_size, [](Int count) { return !count; })) return 0;
  if (m.given_degree >= 0) return std::max<Int>(m.given_degree, 1);
  Int best = 1;
  double shortest = 0;
  for (Int degree = 1; degree <= m.max_degree; ++degree) {
    const double us = stages_us(m, local, remote, rows, cp_size, degree);
    if (degree == 1 || us < shortest) best = degree, shortest = us;
  }
  return best;
}

// Counts of a dispatch: int64 [9, 2, cp_size], the fields of `Counts`.
struct Dispatch {
  const Model& m;
  const Int* counts;
  Int cp_size;
  double num_rows;

  Int count(int field, int place, Int rank) const { return counts[(2 * field + place) * cp_size + rank]; }
  Int received(Int rank) const { return count(7, 0, rank) + count(7, 1, rank); }
  Int sent(Int rank) const { return count(8, 0, rank) + count(8, 1, rank); }

  Stage stage(int place, Int rank) const {
    const auto of = [&](int field) { return static_cast<double>(count(field, place, rank)); };
    return {of(0), of(1), of(2), of(3), of(4), of(5), of(6)};
  }

  // Of rows that come (field 7) and go (8), or the other way round.
  double transfer_us(Int rank, Int stages) const {
    if (!stages) return 0.0;
    double volume[2];
    for (int place = 0; place < 2; ++place)
      volume[place] = static_cast<double>(std::max(count(7, place, rank), count(8, place, rank))) *
                      (m.row_bytes / (static_cast<double>(stages) * 1e3));
    const double near = m.collective_us + volume[0] / m.gbytes_per_s;
    const double far = m.far_collective_us + volume[1] / m.far_gbytes_per_s;
    return volume[1] > 0 ? std::max(near, far) : near;
  }

  // `predict.Prediction` in `out`: step, device, forward, backward, degree, host, rows.
  void predict(double* out) const {
    std::vector<Int> rows(cp_size);
    Int total = 0, most = 0, far = 0;
    for (Int r = 0; r < cp_size; ++r) {
      rows[r] = received(r);
      total += rows[r], most = std::max(most, rows[r]), far += count(7, 1, r);
    }
    const Int chosen = choose_degree(m, counts, counts + cp_size, rows.data(), cp_size);
    const bool at_once = chosen > 0 && !far && m.at_once;  // kernels wait for rows of their own node only
    const bool is_small = cp_size <= 2 || static_cast<double>(most) * m.row_bytes <= m.most_forward_bytes;
    const bool one[2] = {at_once && is_small, at_once};
    const Int degree = one[0] ? 1 : chosen;
    double step_us = 0, host_us = 0, device_us[2];
    for (int pass = 0; pass < 2; ++pass) {
      double device_max = 0, host_max = 0, both_max = 0;
      for (Int r = 0; r < cp_size; ++r) {
        const double device = device_of(r, pass, one[pass], degree);
        const double saved = rows[r] > 0 && sent(r) > 0 ? 0.0 : m.host_one_way_us;
        const double host =
            m.host_us[pass] + static_cast<double>(one[pass] ? 0 : degree) * (m.host_stage_us[pass] - saved);
        device_max = r ? std::max(device_max, device) : device;
        host_max = r ? std::max(host_max, host) : host;
        both_max = r ? std::max(both_max, std::max(device, host)) : std::max(device, host);
      }
      device_us[pass] = device_max, step_us += both_max, host_us += host_max;
    }
    const double found[] = {
        step_us, device_us[0] + device_us[1], device_us[0], device_us[1], static_cast<double>(chosen),
        host_us, static_cast<double>(total)};
    std::copy(found, found + 7, out);
  }

 private:
  double device_of(Int rank, bool is_backward, bool one, Int degree) const {
    const Steps steps{m, num_rows, degree > 0 && !one};
    const Stage own = stage(0, rank), fetched = stage(1, rank);
    const auto attend = [&](const Stage& s, bool adds) {
      return is_backward ? steps.backward(s, adds) : steps.forward(s, adds);
    };
    const double fetch = transfer_us(rank, one ? 1 : degree), reduce = is_backward ? fetch : 0.0;
    double device;
    if (one) {
      const double busy = attend(own.with_fetched(fetched), false);
      device = std::max(busy, fetch) + (1 - m.hidden) * std::min(busy, fetch) + reduce;
    } else {
      device = pass_us(attend(own, false), attend(fetched, true), fetch, reduce, degree, m.hidden);
    }
    return device + steps.ends_us(is_backward);
  }
};

}  // namespace

// `counts`: [num_dispatches, 9, 2, cp_size]; `num_rows`: [num_dispatches]; `out`: [num_dispatches, 7].
extern "C" __attribute__((visibility("default"))) void magi_predict(const Model* model, const Int* counts,
                                                                    const Int* num_rows, Int num_dispatches,
                                                                    Int cp_size, double* out) {
  for (Int d = 0; d < num_dispatches; ++d, counts += 18 * cp_size, out += 7)
    Dispatch{*model, counts, cp_size, static_cast<double>(num_rows[d])}.predict(out);
}

// `local`, `remote`, `rows`: [cp_size].
extern "C" __attribute__((visibility("default"))) Int magi_degree(const Model* model, const Int* local,
                                                                  const Int* remote, const Int* rows, Int cp_size) {
  return choose_degree(*model, local, remote, rows, cp_size);
}
