#include "concerto/checkpoint/tensor_faults.h"

#include <fmt/format.h>

#include <algorithm>

namespace concerto {

void TensorFaults::missing(std::string_view name, const Shape& want) {
  add(fmt::format("missing: {} {}", name, want.str()));
}

void TensorFaults::extra(std::string_view name, const Shape& have) {
  add(fmt::format("extra: {} {}", name, have.str()));
}

void TensorFaults::wrong_shape(std::string_view name, const Shape& have, const Shape& want) {
  add(fmt::format("wrong shape: {} is {}, {} wants {}", name, have.str(), wants_, want.str()));
}

void TensorFaults::wrong_dtype(std::string_view name, std::string_view have, std::string_view want) {
  add(fmt::format("wrong dtype: {} is {}, {} wants {}", name, have, wants_, want));
}

void TensorFaults::wrong_expert(std::string_view name, int have, int want) {
  add(fmt::format("wrong expert: {} belongs to expert {}, {} wants {}", name, have, wants_, want));
}

std::string TensorFaults::text(std::string_view what) const {
  constexpr size_t kMostLines = 50;
  std::string text = fmt::format("{} ({} fault{}):", what, lines_.size(), lines_.size() == 1 ? "" : "s");
  for (size_t i = 0; i < std::min(lines_.size(), kMostLines); ++i) text += "\n  " + lines_[i];
  if (lines_.size() > kMostLines) text += fmt::format("\n  ... and {} more", lines_.size() - kMostLines);
  return text;
}

}  // namespace concerto
