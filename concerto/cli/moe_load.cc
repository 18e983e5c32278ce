#include "concerto/cli/moe_load.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "concerto/base/error.h"
#include "concerto/base/rng.h"

namespace concerto {
namespace {

constexpr Skew kSkews[] = {Skew::kEven, Skew::kZipf, Skew::kOne};

// `rows` shared out by weight to whole numbers, none above `cap`; what a full one cannot take goes to the others.
std::vector<int64_t> share_out(const std::vector<double>& weights, int64_t rows, int64_t cap) {
  const size_t n = weights.size();
  std::vector<char> full(n, 0);
  double left = static_cast<double>(rows), weight = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (size_t e = 0; e < n; ++e) {  // largest weight first: nobody fills up after one that does not
    if (left * weights[e] < static_cast<double>(cap) * weight) break;
    full[e] = 1;
    left -= static_cast<double>(cap);
    weight -= weights[e];
  }
  std::vector<int64_t> out(n);
  double sum = 0;
  int64_t given = 0;
  for (size_t e = 0; e < n; ++e) {
    sum += full[e] ? static_cast<double>(cap) : left * weights[e] / weight;
    const int64_t end = std::llround(sum);
    out[e] = std::min(cap, end - given);
    given += out[e];
  }
  for (size_t e = 0; given < rows; e = (e + 1) % n)  // what rounding left over
    if (out[e] < cap) ++out[e], ++given;
  return out;
}

}  // namespace

const char* skew_name(Skew skew) {
  switch (skew) {
    case Skew::kEven:
      return "even";
    case Skew::kZipf:
      return "zipf";
    case Skew::kOne:
      return "one";
  }
  return "?";
}

Skew skew_by_name(std::string_view name) {
  for (const Skew s : kSkews)
    if (name == skew_name(s)) return s;
  throw Error(ErrorCode::kUsage, "--skew", fmt::format("'{}' is no skew", name), "Use even, zipf or one.");
}

std::vector<int64_t> expert_loads(Skew skew, int64_t tokens, int64_t experts, int64_t top_k) {
  CHECK(tokens > 0 && top_k >= 1 && top_k <= experts, "{} tokens choose {} of {} experts", tokens, top_k, experts);
  std::vector<double> weights(static_cast<size_t>(experts), 1.0);
  if (skew == Skew::kZipf)
    for (size_t e = 0; e < weights.size(); ++e) weights[e] = 1.0 / static_cast<double>(e + 1);
  if (skew != Skew::kOne) return share_out(weights, tokens * top_k, tokens);
  std::vector<int64_t> loads{tokens};
  if (experts > 1) {
    weights.pop_back();
    const auto rest = share_out(weights, tokens * (top_k - 1), tokens);
    loads.insert(loads.end(), rest.begin(), rest.end());
  }
  return loads;
}

std::vector<int32_t> chosen_experts(const std::vector<int64_t>& loads, int64_t tokens, int64_t top_k, uint64_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(tokens));
  std::iota(order.begin(), order.end(), int64_t{0});
  const Rng rng(seed, "bench routing");
  for (int64_t i = tokens - 1; i > 0; --i)
    std::swap(order[static_cast<size_t>(i)],
              order[static_cast<size_t>(rng.below(static_cast<uint64_t>(i), static_cast<uint64_t>(i + 1)))]);
  // All choices in a line, expert by expert; a token takes those `tokens` apart. An expert has at most `tokens` in a
  // row, so no token meets it twice.
  std::vector<int32_t> chosen(static_cast<size_t>(tokens * top_k));
  int64_t at = 0;
  for (size_t e = 0; e < loads.size(); ++e)
    for (int64_t i = 0; i < loads[e]; ++i, ++at)
      chosen[static_cast<size_t>(order[static_cast<size_t>(at % tokens)] * top_k + at / tokens)] =
          static_cast<int32_t>(e);
  CHECK(at == tokens * top_k, "{} choices for {} tokens of {}", at, tokens, top_k);
  return chosen;
}

}  // namespace concerto
