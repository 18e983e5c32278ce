#include "concerto/schedule/action.h"

namespace concerto {

bool is_compute(ActionKind kind) { return kind <= ActionKind::kBackwardWeight; }

std::string action_text(const Action& a) {
  static constexpr const char* kLetters[] = {"F", "B", "I", "W", "SF", "RF", "SB", "RB"};
  const std::string text = kLetters[static_cast<size_t>(a.kind)] + std::to_string(a.micro_batch);
  return a.chunk == 0 ? text : text + "." + std::to_string(a.chunk);
}

std::string list_text(const std::vector<Action>& list) {
  std::string text;
  for (const Action& a : list) text += (text.empty() ? "" : " ") + action_text(a);
  return text;
}

}  // namespace concerto
