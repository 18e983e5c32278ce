// A training step as data: what one rank does, in order. Two readers play the list: the executor on tensors, the
// simulator on costs. Lists are made and checked for all ranks of a pipeline together: pipeline.h.
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
std::string list_text(const std::vector<Action>& list);  // "F0 SF0 RB0 B0"

}  // namespace concerto
