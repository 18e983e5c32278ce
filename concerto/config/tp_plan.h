// `base_model_tp_plan` of a config.json: Hugging Face's and the older remote code's map from module names to words that
// say how tensor parallel ranks cut them (reference 4). Our splits are fixed (reference 7.5), so a plan decides nothing:
// it passes where it names these splits, or copies that give the same numbers, and is refused where it names others.
#pragma once

#include <string>
#include <vector>

#include "concerto/config/field.h"

namespace concerto {

struct TpPlanReading {
  std::vector<Problem> problems;
  std::string note;  // what became of the plan; empty: there was nothing in it
};
TpPlanReading read_tp_plan(const Value& plan);

// For the docs: "colwise", ...
std::vector<std::string> tp_plan_words();

}  // namespace concerto
