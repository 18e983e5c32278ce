// Continues a text: tokenizer, session and sampler in one loop.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "concerto/data/tokenizer.h"
#include "concerto/infer/sampler.h"
#include "concerto/infer/session.h"

namespace concerto {

struct GenerateOptions {
  int64_t max_tokens = 128;
  std::vector<std::string> stop;  // the text ends before the first of these
  SamplerOptions sampler;
};

struct Generated {
  std::string text;
  int64_t prompt_tokens = 0, new_tokens = 0;
  std::string finish;  // "eos" | "stop" | "length"
};

// `emit` gets whole characters as they come, and never a part of a stop text.
Generated generate_text(InferenceSession& session, const Tokenizer& tokenizer, std::span<const int32_t> prompt,
                        int32_t eos_id, const GenerateOptions& options,
                        const std::function<void(std::string_view)>& emit);

// The prompt's tokens, or bos for an empty prompt; with `chat` those of the prompt as a user's message in the
// tokenizer's template. Never empty: Error(kUsage) where there is no bos either.
std::vector<int32_t> prompt_tokens(const Tokenizer& tokenizer, const ModelConfig& config, const std::string& prompt,
                                   bool chat);

}  // namespace concerto
