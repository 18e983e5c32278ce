// What is wrong between the tensors that somebody wants and those that files hold, all named in one message.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "concerto/tensor/view.h"

namespace concerto {

class TensorFaults {
 public:
  // `wants`: who asks for the tensors: "the run", "the config".
  explicit TensorFaults(std::string wants) : wants_(std::move(wants)) {}

  void missing(std::string_view name, const Shape& want);
  void extra(std::string_view name, const Shape& have);
  void wrong_shape(std::string_view name, const Shape& have, const Shape& want);
  void wrong_dtype(std::string_view name, std::string_view have, std::string_view want);
  void wrong_expert(std::string_view name, int have, int want);
  void add(std::string line) { lines_.push_back(std::move(line)); }

  bool empty() const { return lines_.empty(); }
  // "WHAT (N faults):" and a line each; of very many (another model altogether) the first 50.
  std::string text(std::string_view what) const;

 private:
  std::string wants_;
  std::vector<std::string> lines_;
};

}  // namespace concerto
