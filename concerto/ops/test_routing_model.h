// Tests only: routing as the reference's text says it (3.3-3.5, 4.1, 4.2, 5.2), in f64, one unit at a time, without a
// thought for speed. Written apart from the kernels: sorts where they count, and whole lists where they keep sums.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

namespace concerto::test::model {

using Row = std::vector<double>;
using Matrix = std::vector<Row>;
using Ids = std::vector<std::vector<int>>;

inline Row softmax(const Row& z) {
  const double top = *std::max_element(z.begin(), z.end());
  Row p;
  for (double v : z) p.push_back(std::exp(v - top));
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& v : p) v /= sum;
  return p;
}

inline Row scores(const Row& z, bool sigmoid, int groups) {
  Row p;
  if (sigmoid) {
    for (double v : z) p.push_back(1 / (1 + std::exp(-v)));
    return p;
  }
  const size_t width = z.size() / static_cast<size_t>(groups);
  for (size_t g = 0; g < z.size(); g += width) {
    const Row part = softmax(Row(z.begin() + static_cast<long>(g), z.begin() + static_cast<long>(g + width)));
    p.insert(p.end(), part.begin(), part.end());
  }
  return p;
}

// The k largest, largest first, ties to the lower index.
inline std::vector<int> best(const Row& s, int k) {
  std::vector<int> order(s.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return s[static_cast<size_t>(a)] > s[static_cast<size_t>(b)]; });
  order.resize(static_cast<size_t>(k));
  return order;
}

// One expert of each of k groups, by p over the group's largest p, plus bias.
inline std::vector<int> best_of_groups(const Row& p, const Row& bias, int k, double (*round)(double)) {
  std::vector<int> ids;
  const size_t width = p.size() / static_cast<size_t>(k);
  for (size_t g = 0; g < p.size(); g += width) {
    const double top = *std::max_element(p.begin() + static_cast<long>(g), p.begin() + static_cast<long>(g + width));
    Row s;
    for (size_t e = g; e < g + width; ++e) s.push_back(round(round(p[e] / top) + bias[e]));
    ids.push_back(static_cast<int>(g) + best(s, 1)[0]);
  }
  return ids;
}

// What the second choice of a token is made by: the larger the better; the first choice is at minus infinity.
inline Row second_by_logits(Row z, int first) {
  z[static_cast<size_t>(first)] = -std::numeric_limits<double>::infinity();
  return z;
}
inline Row second_by_bias(const Row& z, const Row& bias, int first) {
  Row s = softmax(second_by_logits(z, first));
  for (size_t e = 0; e < s.size(); ++e) s[e] += bias[e];
  return second_by_logits(s, first);
}
// Sinkhorn-2Gate over the tokens of a unit.
inline Matrix second_by_sinkhorn(const Matrix& z, const std::vector<int>& first, double temp, long capacity,
                                 bool uniform_when_full) {
  const size_t tokens = z.size(), experts = z.empty() ? 0 : z[0].size();
  Row room(experts), old(tokens);
  Matrix p;
  for (size_t e = 0; e < experts; ++e)
    room[e] = static_cast<double>(std::max(0L, capacity - std::count(first.begin(), first.end(), static_cast<int>(e))));
  const double all = std::accumulate(room.begin(), room.end(), 0.0);
  for (double& c : room) c = all == 0 && uniform_when_full ? 1.0 / static_cast<double>(experts) : c / all;
  for (size_t t = 0; t < tokens; ++t) {
    Row row = second_by_logits(z[t], first[t]);
    for (double& v : row) v /= temp;
    p.push_back(softmax(row));
  }
  for (int round = 0; round < 10; ++round) {
    bool settled = true;
    Row sums;
    for (size_t t = 0; t < tokens; ++t) {
      sums.push_back(std::accumulate(p[t].begin(), p[t].end(), 0.0));
      settled = settled && std::fabs(old[t] - sums[t]) < 1e-8;
    }
    old = sums;
    if (settled) break;
    for (size_t t = 0; t < tokens; ++t)
      for (double& v : p[t]) v *= 1.0 / static_cast<double>(tokens) / (sums[t] + 1e-8);
    for (size_t e = 0; e < experts; ++e) {
      double column = 0;
      for (size_t t = 0; t < tokens; ++t) column += p[t][e];
      for (size_t t = 0; t < tokens; ++t) p[t][e] *= room[e] / (column + 1e-8);
    }
  }
  for (size_t t = 0; t < tokens; ++t) {
    for (double& v : p[t])
      if (std::isnan(v)) v = 0;
    p[t] = second_by_logits(p[t], first[t]);
  }
  return p;
}

// Slot of each (token, choice) or -1: the claims of an expert in line, the first C of them served.
inline Ids slots(const Ids& ids, long capacity, bool rank_major, bool reverse) {
  std::vector<std::tuple<long, long, int, int>> line;  // sort keys, then token and choice
  const int tokens = static_cast<int>(ids.size());
  for (int t = 0; t < tokens; ++t)
    for (int j = 0; j < static_cast<int>(ids[static_cast<size_t>(t)].size()); ++j) {
      const long at = reverse ? tokens - 1 - t : t;
      line.push_back(rank_major ? std::tuple{static_cast<long>(j), at, t, j}
                                : std::tuple{at, static_cast<long>(j), t, j});
    }
  std::sort(line.begin(), line.end());
  Ids result;
  for (const auto& row : ids) result.emplace_back(row.size(), -1);
  for (size_t i = 0; i < line.size(); ++i) {
    const auto [a, b, t, j] = line[i];
    const int expert = ids[static_cast<size_t>(t)][static_cast<size_t>(j)];
    long ahead = 0;
    for (size_t before = 0; before < i; ++before) {
      const auto [c, d, t2, j2] = line[before];
      ahead += ids[static_cast<size_t>(t2)][static_cast<size_t>(j2)] == expert;
    }
    if (ahead < capacity) result[static_cast<size_t>(t)][static_cast<size_t>(j)] = static_cast<int>(ahead);
  }
  return result;
}

inline Row weights(const Row& p, const std::vector<int>& ids, const std::vector<int>& slots, bool normalize,
                   double norm_min) {
  Row w;
  for (size_t j = 0; j < ids.size(); ++j) w.push_back(slots[j] < 0 ? 0.0 : p[static_cast<size_t>(ids[j])]);
  const double sum = std::max(std::accumulate(w.begin(), w.end(), 0.0), norm_min);
  for (double& v : w) v /= normalize ? sum : 1.0;
  return w;
}

// E * sum_e f_e P_e (over k for groups), with sigmoid rows made to sum to 1.
inline double balance_loss(Matrix p, const std::vector<long>& counts, bool sigmoid, int groups) {
  if (p.empty()) return 0;
  const double tokens = static_cast<double>(p.size());
  double loss = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    double mean = 0;
    for (const Row& row : p) mean += row[e] / (sigmoid ? std::accumulate(row.begin(), row.end(), 0.0) : 1.0) / tokens;
    loss += static_cast<double>(counts[e]) / tokens * mean;
  }
  return loss * static_cast<double>(counts.size()) / groups;
}

inline double z_sum(const Matrix& z) {
  double sum = 0;
  for (const Row& row : z) {
    double exps = 0;
    for (double v : row) exps += std::exp(v);
    sum += std::log(exps) * std::log(exps);
  }
  return sum;
}

inline double orthogonal(Matrix w, size_t blocks) {
  const size_t width = w.size() / blocks;
  double sum = 0;
  for (Row& row : w) {
    const double norm = std::max(std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0)), 1e-12);
    for (double& v : row) v /= norm;
  }
  for (size_t b = 0; b < blocks; ++b)
    for (size_t i = b * width; i < (b + 1) * width; ++i)
      for (size_t j = b * width; j < (b + 1) * width; ++j) {
        const double g = std::inner_product(w[i].begin(), w[i].end(), w[j].begin(), 0.0) - (i == j);
        sum += g * g;
      }
  return sum / static_cast<double>(blocks * width * width);
}

}  // namespace concerto::test::model
