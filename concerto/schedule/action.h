// A training step as data: what one rank does, in order. Two readers play the list: the executor on tensors, the
// simulator on costs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace concerto {

enum class ActionKind : uint8_t {
  kForward,         // F: one micro-batch through a stage
  kBackward,        // B: gradients of activations and weights, unit by unit
  kBackwardInput,   // I: gradients of activations only
  kBackwardWeight,  // W: what I left to do
  kSendForward,     // activations to the next virtual stage
  kRecvForward,
  kSendBackward,  // their gradients to the one before
  kRecvBackward,
};

struct Action {
  ActionKind kind;
  int32_t micro_batch = 0;
  int32_t chunk = 0;  // virtual stage on this rank
  bool operator==(const Action&) const = default;
};

bool is_compute(ActionKind kind);          // F, B, I or W: no send, no receive
std::string action_text(const Action& a);  // "F3", "I0", of chunk 1 "F3.1"; sends "SF3", "SB3", receives "RF3", "RB3"

struct Schedule {
  std::string name;
  int64_t micro_batches = 0;
  int64_t slots = 0;   // micro-batches in flight at once, at most: slot = position of a micro-batch among those alive
  bool split = false;  // uses I and W
  std::vector<Action> actions;
};

// One stage: `1f1b` plays F B of each micro-batch in turn; `zero_bubble` plays F I W. `together`: all F first, for
// routing_unit global, whose losses, capacity and drops want every micro-batch before any backward. Error(kConfig) for
// an unknown name.
Schedule build_schedule(const std::string& name, int64_t micro_batches, bool together = false);

// Each action after its causes, each exactly once, I and W in a split schedule and B in any other, never more than
// `slots` micro-batches in flight. Bug naming the first action that breaks a rule.
void validate_schedule(const Schedule& schedule);

std::string schedule_text(const Schedule& schedule);  // "F0 B0 F1 B1"

}  // namespace concerto
