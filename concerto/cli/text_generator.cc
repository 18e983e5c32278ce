#include "concerto/cli/text_generator.h"

#include <algorithm>

namespace concerto {
namespace {

// How much of the end of `text` may be the beginning of a stop text and must wait.
size_t held_back(const std::string& text, const std::vector<std::string>& stops) {
  size_t most = 0;
  for (const std::string& stop : stops)
    for (size_t n = std::min(stop.size() - 1, text.size()); n > most; --n)
      if (text.compare(text.size() - n, n, stop, 0, n) == 0) most = n;
  return most;
}

size_t find_stop(const std::string& text, const std::vector<std::string>& stops) {
  size_t first = std::string::npos;
  for (const std::string& stop : stops) first = std::min(first, text.find(stop));
  return first;
}

}  // namespace

Generated generate_text(InferenceSession& session, const Tokenizer& tokenizer, std::span<const int32_t> prompt,
                        int32_t eos_id, const GenerateOptions& options,
                        const std::function<void(std::string_view)>& emit) {
  Generated out{.text = {}, .prompt_tokens = static_cast<int64_t>(prompt.size()), .finish = "length"};
  Sampler sampler(options.sampler);
  StreamDecoder decoder(tokenizer);
  size_t shown = 0;
  const auto show = [&](size_t end) {
    if (end <= shown) return;
    emit(std::string_view(out.text).substr(shown, end - shown));
    shown = end;
  };
  View logits = session.extend(prompt);
  while (out.new_tokens < options.max_tokens) {
    const int32_t id = sampler.choose(logits, session.length());
    if (id == eos_id) {
      out.finish = "eos";
      break;
    }
    ++out.new_tokens;
    out.text += decoder.push(id);
    if (const size_t at = find_stop(out.text, options.stop); at != std::string::npos) {
      out.text.resize(at);
      out.finish = "stop";
      show(at);
      return out;
    }
    show(out.text.size() - held_back(out.text, options.stop));
    if (out.new_tokens == options.max_tokens || session.length() == session.capacity()) break;
    logits = session.extend({&id, 1});
  }
  out.text += decoder.finish();
  show(out.text.size());
  return out;
}

std::vector<int32_t> prompt_tokens(const Tokenizer& tokenizer, const ModelConfig& config, const std::string& prompt,
                                   bool chat) {
  if (chat) {
    const ChatMessage message{"user", prompt};
    return tokenizer.encode_chat({&message, 1});
  }
  std::vector<int32_t> ids = tokenizer.encode(prompt);
  const int64_t bos = tokenizer.bos_id() >= 0 ? tokenizer.bos_id() : config.bos_token_id;
  if (ids.empty() && bos >= 0) ids.push_back(static_cast<int32_t>(bos));
  if (ids.empty())
    throw Error(ErrorCode::kUsage, "--prompt", "is empty, and the tokenizer has no begin token", "Give a prompt.");
  return ids;
}

}  // namespace concerto
