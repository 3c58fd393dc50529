// Hosts of queries that travel; equal to `spread` of megatron_magi/plan/travel.py.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace {

using Int = std::int64_t;
using Ints = std::vector<Int>;

// Runs of queries that move as a whole; arrays of `num` elements.
struct Blocks {
  Int num, cp_size;
  const Int *home, *rows, *area, *low, *high;
};

struct Weights {
  Int query, key, far, ranks_per_node, most_hosts, fixed_rows;
};

// What all assignments start from; prices are found when they are asked for.
class Start {
 public:
  Start(const Blocks& blocks, const Weights& weights)
      : b(blocks), w(weights), of_home(blocks.cp_size), price_(blocks.cp_size), held_(blocks.cp_size) {
    for (Int i = 0; i < b.num; ++i)
      if (b.area[i] > 0) of_home[b.home[i]].push_back(i);
    for (Int r = 0; r < b.cp_size; ++r) node.push_back(r / w.ranks_per_node);
  }

  // Cost of the keys before each block that a rank neither holds nor fetches.
  const Ints& price(Int host) {
    Ints& price = price_[host];
    if (!price.empty()) return price;
    auto& held = held_[host];
    held.resize(b.num), price.resize(b.num + 1);
    for (Int i = 0; i < b.num; ++i) held[i] = b.home[i] == host;
    cover(held, of_home[host].begin(), of_home[host].end());
    update(price, held, host, 0);
    return price;
  }

  const std::vector<char>& held(Int host) const { return held_[host]; }

  // Adds the keys that blocks need to those that a rank holds or fetches; returns the first that may be new.
  Int cover(std::vector<char>& held, Ints::const_iterator first, Ints::const_iterator last) const {
    Int low = b.num, high = 0;
    for (auto i = first; i != last; ++i) low = std::min(low, b.low[*i]), high = std::max(high, b.high[*i]);
    if (low >= high) return b.num;
    Ints change(high - low + 1);
    for (; first != last; ++first) ++change[b.low[*first] - low], --change[b.high[*first] - low];
    for (Int i = low, depth = 0; i < high; ++i)
      if ((depth += change[i - low]) > 0) held[i] = 1;
    return low;
  }

  // Prices from a block on.
  void update(Ints& price, const std::vector<char>& held, Int host, Int from) const {
    const Int near = w.key, far = w.key * w.far, here = node[host];
    for (Int i = from; i < b.num; ++i)
      price[i + 1] = price[i] + (held[i] ? 0 : b.rows[i] * (node[b.home[i]] == here ? near : far));
  }

  const Blocks b;
  const Weights w;
  std::vector<Ints> of_home;
  Ints node;

 private:
  std::vector<Ints> price_;
  std::vector<std::vector<char>> held_;
};

class Spreading {
 public:
  Spreading(Start& start, Int target, bool near, const Int* load, Int* host)
      : start_(start),
        b_(start.b),
        w_(start.w),
        target_(target),
        near_(near),
        host_(host),
        load_(load, load + b_.cp_size),
        last_(b_.cp_size, -1),
        left_(start.of_home),
        price_(b_.cp_size),
        held_(b_.cp_size) {
    std::copy(b_.home, b_.home + b_.num, host_);
  }

  void run() {
    std::vector<char> open(b_.cp_size);
    for (Int r = 0; r < b_.cp_size; ++r) open[r] = load_[r] > target_;
    while (true) {
      Int rank = -1;
      for (Int r = 0; r < b_.cp_size; ++r)
        if (open[r] && (rank < 0 || load_[r] > load_[rank])) rank = r;
      if (rank < 0) return;
      open[rank] = give(rank) && load_[rank] > target_;
    }
  }

 private:
  Int node(Int rank) const { return start_.node[rank]; }

  // Gives one run of a rank's blocks away; false if no other has room for any.
  bool give(Int rank) {
    const Ints hosts = hosts_for(rank);
    const Ints& left = left_[rank];
    const Int num = left.size(), excess = load_[rank] - target_;
    if (hosts.empty() || !num) return false;
    Ints area(num + 1), rows(num + 1), stop(num), needed(num), below(num), above(num), more(num);
    for (Int i = 0; i < num; ++i) area[i + 1] = area[i] + b_.area[left[i]], rows[i + 1] = rows[i] + b_.rows[left[i]];
    for (Int i = num - 1; i >= 0; --i) stop[i] = i + 1 < num && left[i + 1] == left[i] + 1 ? stop[i + 1] : i + 1;
    for (Int i = 0, e = 0; i < num; ++i) {
      while (e <= num && area[e] < area[i] + excess) ++e;
      needed[i] = std::min(e, stop[i]);
    }
    for (Int i = 0; i < num; ++i) {
      const Int low = b_.low[left[i]], high = b_.high[left[i]];
      const Int before_low = i ? b_.low[left[i - 1]] : low, before_high = i ? b_.high[left[i - 1]] : low;
      below[i] = std::max(low, std::min(high, before_low)), above[i] = std::min(high, std::max(low, before_high));
    }
    double best = 0;
    Int best_host = -1, best_start = 0, best_end = 0;
    for (const Int host : hosts) {
      const Ints& price = price_of(host);
      const Int room = target_ - load_[host], far = node(host) == node(rank) ? 1 : w_.far;
      Int sum = 0;
      for (Int i = 0; i < num; ++i) {
        const Int low = b_.low[left[i]], high = b_.high[left[i]];
        more[i] = sum += price[below[i]] - price[low] + price[high] - price[above[i]];
      }
      for (Int i = 0, e = 0; i < num; ++i) {
        while (e < num && area[e + 1] <= area[i] + room) ++e;
        const Int end = std::min(e, needed[i]);
        if (end <= i) continue;
        const Int keys = price[b_.high[left[i]]] - price[b_.low[left[i]]] + more[end - 1] - more[i];
        const Int cost = (rows[end] - rows[i] + w_.fixed_rows) * w_.query * far + keys;
        const double ratio = static_cast<double>(cost) / static_cast<double>(area[end] - area[i]);
        if (best_host < 0 || ratio < best) best = ratio, best_host = host, best_start = i, best_end = end;
      }
    }
    if (best_host < 0) return false;
    move(rank, best_host, best_start, best_end, area[best_end] - area[best_start]);
    return true;
  }

  // Adds a rank to those with the smallest areas, in order of these and then of ranks; ranks come ascending.
  void insert(Ints& least, Int rank) const {
    const Int num = least.size();
    if (num == w_.most_hosts && load_[least.back()] <= load_[rank]) return;
    if (num < w_.most_hosts)
      least.push_back(rank);
    else
      least.back() = rank;
    for (auto i = least.end() - 1; i != least.begin() && load_[*(i - 1)] > load_[*i]; --i) std::swap(*(i - 1), *i);
  }

  // Ranks that are compared, ascending.
  Ints hosts_for(Int rank) const {
    Ints some, inside;
    for (Int r = 0; r < b_.cp_size; ++r) {
      insert(some, r);
      if (node(r) == node(rank)) insert(inside, r);
    }
    some.insert(some.end(), inside.begin(), inside.end());
    for (Int r = std::max<Int>(rank - 1, 0); r < std::min(rank + 2, b_.cp_size); ++r) some.push_back(r);
    if (last_[rank] >= 0) some.push_back(last_[rank]);
    std::sort(some.begin(), some.end());
    some.erase(std::unique(some.begin(), some.end()), some.end());
    std::erase_if(some, [&](Int r) { return load_[r] >= target_ || r == rank || (near_ && node(r) != node(rank)); });
    return some;
  }

  const Ints& price_of(Int host) { return price_[host].empty() ? start_.price(host) : price_[host]; }

  void move(Int rank, Int host, Int start, Int end, Int area) {
    Ints& left = left_[rank];
    const auto first = left.begin() + start, stop = left.begin() + end;
    for (auto i = first; i != stop; ++i) host_[*i] = host;
    load_[rank] -= area, load_[host] += area, last_[rank] = host;
    if (price_[host].empty()) price_[host] = start_.price(host), held_[host] = start_.held(host);
    start_.update(price_[host], held_[host], host, start_.cover(held_[host], first, stop));
    left.erase(first, stop);
  }

  Start& start_;
  const Blocks& b_;
  const Weights& w_;
  Int target_;
  bool near_;
  Int* host_;
  Ints load_, last_;
  std::vector<Ints> left_, price_;
  std::vector<std::vector<char>> held_;
};

}  // namespace

// `weights`: those of `Weights`, then MOST_HOSTS and FIXED_ROWS; `targets`, `near`: [num_aims]; `load`: [cp_size];
// `hosts`: [num_aims, num_blocks].
extern "C" __attribute__((visibility("default"))) void magi_spread(Int num_blocks, Int cp_size, const Int* home,
                                                                   const Int* rows, const Int* area, const Int* low,
                                                                   const Int* high, const Int* weights,
                                                                   const Int* targets, const Int* near, Int num_aims,
                                                                   const Int* load, Int* hosts) {
  const Blocks blocks{num_blocks, cp_size, home, rows, area, low, high};
  Start start(blocks, {weights[0], weights[1], weights[2], weights[3], weights[4], weights[5]});
  for (Int i = 0; i < num_aims; ++i) Spreading(start, targets[i], near[i] != 0, load, hosts + i * num_blocks).run();
}
