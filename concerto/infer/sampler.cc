#include "concerto/infer/sampler.h"

#include <algorithm>
#include <cmath>

#include "concerto/base/error.h"
#include "concerto/base/rng.h"

namespace concerto {

int32_t Sampler::choose(View logits, int64_t position) {
  const int64_t n = logits.elements();
  const auto at = [&](int64_t i) {
    return logits.dtype == DType::kF64 ? static_cast<float>(logits.as<double>()[i]) : logits.as<float>()[i];
  };
  int64_t best = 0;
  bool is_number = !std::isnan(at(0));
  for (int64_t i = 1; i < n; ++i) {
    if (at(i) > at(best)) best = i;
    is_number &= !std::isnan(at(i));
  }
  if (!is_number || std::isinf(at(best)))
    throw Error(
        ErrorCode::kNumeric, "logits",
        fmt::format("not finite at position {}: the model's weights or values in it are NaN or infinite", position),
        "Look for the tensor with `concerto checkpoint verify`.");
  if (options_.temperature <= 0) return static_cast<int32_t>(best);

  candidates_.clear();
  double total = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double p = std::exp((static_cast<double>(at(i)) - at(best)) / options_.temperature);
    total += p;
    candidates_.emplace_back(static_cast<float>(p), static_cast<int32_t>(i));
  }
  // Largest first; equal ones by id, so that the order does not depend on the sort.
  std::sort(candidates_.begin(), candidates_.end(),
            [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
  double kept = 0;
  size_t count = 0;
  while (count < candidates_.size() && (count == 0 || kept < options_.top_p * total))
    kept += candidates_[count++].first;
  double draw = Rng(options_.seed, "sample").uniform(static_cast<uint64_t>(position)) * kept;
  for (size_t i = 0; i < count; ++i) {
    draw -= candidates_[i].first;
    if (draw < 0) return candidates_[i].second;
  }
  return candidates_[count - 1].second;
}

}  // namespace concerto
