#include <algorithm>

#include "concerto/base/error.h"
#include "concerto/schedule/action.h"

namespace concerto {

Schedule build_schedule(const std::string& name, int64_t micro_batches, bool together) {
  Schedule s;
  s.name = name;
  s.micro_batches = micro_batches;
  s.slots = together ? micro_batches : std::min<int64_t>(micro_batches, 1);
  if (name != "1f1b" && name != "zero_bubble")
    throw Error(ErrorCode::kConfig, "parallel.schedule", fmt::format("'{}' is not a schedule", name),
                "Use 1f1b or zero_bubble.");
  s.split = name == "zero_bubble";
  for (int32_t m = 0; m < micro_batches && together; ++m) s.actions.push_back({ActionKind::kForward, m});
  for (int32_t m = 0; m < micro_batches; ++m) {
    if (!together) s.actions.push_back({ActionKind::kForward, m});
    if (s.split) {
      s.actions.push_back({ActionKind::kBackwardInput, m});
      s.actions.push_back({ActionKind::kBackwardWeight, m});
    } else {
      s.actions.push_back({ActionKind::kBackward, m});
    }
  }
  return s;
}

bool is_compute(ActionKind kind) { return kind <= ActionKind::kBackwardWeight; }

std::string action_text(const Action& a) {
  static constexpr const char* kLetters[] = {"F", "B", "I", "W", "SF", "RF", "SB", "RB"};
  const std::string text = kLetters[static_cast<size_t>(a.kind)] + std::to_string(a.micro_batch);
  return a.chunk == 0 ? text : text + "." + std::to_string(a.chunk);
}

void validate_schedule(const Schedule& s) {
  enum State : uint8_t { kWaiting, kForwarded, kInputDone, kFinished };
  std::vector<State> state(static_cast<size_t>(s.micro_batches), kWaiting);
  int64_t alive = 0;
  for (size_t i = 0; i < s.actions.size(); ++i) {
    const Action& a = s.actions[i];
    CHECK(is_compute(a.kind) && a.micro_batch >= 0 && a.micro_batch < s.micro_batches,
          "action {} {}: no such action of one stage", i, action_text(a));
    State& now = state[static_cast<size_t>(a.micro_batch)];
    const State wanted = a.kind == ActionKind::kForward          ? kWaiting
                         : a.kind == ActionKind::kBackwardWeight ? kInputDone
                                                                 : kForwarded;
    CHECK(now == wanted, "action {} {} comes before its cause or twice", i, action_text(a));
    CHECK(s.split || (a.kind != ActionKind::kBackwardInput && a.kind != ActionKind::kBackwardWeight),
          "action {} {} in a schedule that is not split", i, action_text(a));
    CHECK(!s.split || a.kind != ActionKind::kBackward, "action {} {} in a split schedule", i, action_text(a));
    switch (a.kind) {
      case ActionKind::kForward:
        now = kForwarded;
        ++alive;
        break;
      case ActionKind::kBackwardInput:
        now = kInputDone;
        break;
      case ActionKind::kBackward:
      case ActionKind::kBackwardWeight:
        now = kFinished;
        --alive;
        break;
      default:
        break;
    }
    CHECK(alive <= s.slots, "action {} {}: {} micro-batches in flight, {} slots", i, action_text(a), alive, s.slots);
  }
  for (size_t m = 0; m < state.size(); ++m) CHECK(state[m] == kFinished, "micro-batch {} is never finished", m);
}

std::string schedule_text(const Schedule& s) {
  std::string text;
  for (const Action& a : s.actions) text += (text.empty() ? "" : " ") + action_text(a);
  return text;
}

}  // namespace concerto
