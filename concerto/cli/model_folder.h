// What --model names.
#pragma once

#include <string>

namespace concerto {

// The Hugging Face folder behind `path`: itself, or the `model` that a finished run left in its folder. Error(kModel)
// says how to get one where a run has only checkpoints.
std::string model_folder(const std::string& path);

}  // namespace concerto
