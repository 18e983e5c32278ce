// The field table of a run: every setting but the model's own, the rules between settings, and names of other systems
// that have no equal here.
#pragma once

#include <string>
#include <vector>

#include "concerto/config/field.h"

namespace concerto {

struct SectionInfo {
  std::string name, help;
};
const std::vector<SectionInfo>& run_sections();        // in the order of the file
const std::vector<Field<RunConfig>>& run_fields();     // section by section; `backend` is a setting of the top level
const std::vector<Rule<RunConfig>>& run_rules();       // of every run
const std::vector<Rule<RunConfig>>& parallel_rules();  // those of them about the plan
const std::vector<Rule<RunConfig>>& training_rules();  // of `train` only

// The backend that a word means: GPUs by any name ("gpu", "cuda:0") are "cuda", which says that it is planned, where
// the nearest spelling would be "cpu". Any other word is itself.
std::string backend_word(const std::string& text);

// A name of ERNIEKit, PaddleFormers or Megatron whose meaning no single setting has, with what to write instead.
struct ForeignName {
  std::string name, advice;
};
const std::vector<ForeignName>& foreign_names();

}  // namespace concerto
