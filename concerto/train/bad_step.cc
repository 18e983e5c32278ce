#include "concerto/train/bad_step.h"

#include <cmath>
#include <numeric>

#include "concerto/tensor/values.h"

namespace concerto {

std::string LossGuard::judge(double loss, double grad_norm) {
  const auto print = [](double x) {
    return std::isnan(x) ? std::string("nan") : fmt::format("{}", x);
  };  // -nan says no more
  if (!std::isfinite(loss)) return "the loss is " + print(loss);
  if (!std::isfinite(grad_norm)) return "the gradient norm is " + print(grad_norm);
  if (factor_ > 0 && history_.size() >= kEnough) {
    const double mean = std::accumulate(history_.begin(), history_.end(), 0.0) / static_cast<double>(history_.size());
    if (loss > factor_ * mean)
      return fmt::format("the loss is {:.4g}, over {} times the mean {:.4g} of the last {}", loss, factor_, mean,
                         history_.size());
  }
  if (history_.size() == kWindow) history_.erase(history_.begin());
  history_.push_back(loss);
  return {};
}

void LossGuard::restore(std::vector<double> history) {
  if (history.size() > kWindow) history.erase(history.begin(), history.end() - kWindow);
  history_.assign(history.begin(), history.end());
}

namespace {

class FirstBad final : public Observer {
 public:
  bool wants_logits() const override { return false; }
  void record(const std::string& name, View value) override {
    if (first_.empty() && !all_finite(value)) first_ = name;
  }
  const std::string& first() const { return first_; }

 private:
  std::string first_;
};

}  // namespace

// What is not finite spreads to all that is computed after it: backward goes from the last tensor to the first.
std::string first_bad_gradient(const ParameterStore& store) {
  for (int i = store.size(); i-- > 0;)
    if ((store.gradients_of() == GradientsOf::kAll || store.updates(i)) && !all_finite(store.gradient(i)))
      return "gradient of " + store.specs()[static_cast<size_t>(i)].name;
  return {};
}

std::string first_bad_tensor(Executor& executor, const ParameterStore& store,
                             std::span<const MicroBatch> micro_batches) {
  FirstBad bad;
  executor.set_observer(&bad);
  std::string found;
  for (size_t m = 0; m < micro_batches.size() && found.empty(); ++m) {
    StepOutput ignored;
    executor.evaluate(micro_batches[m], ignored);
    if (!bad.first().empty()) found = fmt::format("{} (micro-batch {})", bad.first(), m);
  }
  executor.set_observer(nullptr);
  if (found.empty()) found = first_bad_gradient(store);
  return found.empty() ? "none: every activation and gradient is finite" : found;
}

}  // namespace concerto
