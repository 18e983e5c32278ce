#include "concerto/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace concerto {
namespace {

double progress(int64_t step, int64_t from, int64_t to) {
  if (to <= from) return step > from ? 1.0 : 0.0;
  return std::clamp(static_cast<double>(step - from) / static_cast<double>(to - from), 0.0, 1.0);
}

double decay_ratio(const OptimizerSection& o, int64_t steps, int64_t step) {
  const double q = progress(step, o.warmup_steps, steps);
  switch (o.schedule) {
    case LrSchedule::kConstant:
      return 1.0;
    case LrSchedule::kLinear:
      return 1.0 - q;
    case LrSchedule::kCosine:
      return std::max(0.0, 0.5 * (1.0 + std::cos(2.0 * std::numbers::pi * o.num_cycles * q)));
    case LrSchedule::kWsd: {
      const int64_t stable =
          o.wsd_stable_steps >= 0 ? o.wsd_stable_steps : static_cast<int64_t>(0.9 * static_cast<double>(steps));
      if (step <= stable) return 1.0;
      const double d = progress(step, std::max(stable, o.warmup_steps), steps);
      return o.wsd_decay == WsdDecay::kHalfLife ? (std::pow(0.05, d) - 0.05) / 0.95 : 1.0 - std::sqrt(d);
    }
  }
  return 1.0;
}

}  // namespace

double learning_rate(const OptimizerSection& o, int64_t steps, int64_t step) {
  if (step <= o.warmup_steps) return o.lr * static_cast<double>(step) / static_cast<double>(o.warmup_steps);
  return o.min_lr + (o.lr - o.min_lr) * decay_ratio(o, steps, step);
}

}  // namespace concerto
