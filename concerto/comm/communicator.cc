#include <algorithm>
#include <utility>

#include "concerto/comm/action_log.h"
#include "concerto/comm/communicator.h"

namespace concerto {

static thread_local CommAction doing;

std::string CommAction::text() const {
  if (!action) return {};
  std::string text = action;
  if (layer >= 0) text += fmt::format(" of layer {}", layer);
  if (micro_batch >= 0) text += fmt::format(", micro-batch {}", micro_batch);
  if (inside) text += fmt::format(", in {}", inside);
  return text;
}

CommScope::CommScope(const char* action, int64_t micro_batch, int layer) : around_(doing) {
  doing.inside = around_.action;
  doing.action = action;
  if (micro_batch >= 0) doing.micro_batch = micro_batch;
  if (layer >= 0) doing.layer = layer;
  ActionLog::note_scope(doing);
}

CommScope::~CommScope() { doing = around_; }

const CommAction& CommScope::current() { return doing; }

static thread_local double patience = 0;

CommPatience::CommPatience(double seconds) : around_(patience) { patience = std::max(patience, seconds); }

CommPatience::~CommPatience() { patience = around_; }

double CommPatience::seconds() { return patience; }

PeerError::PeerError(std::string where, int rank, const std::string& reason)
    : Error(ErrorCode::kComm, std::move(where), fmt::format("rank {} ended the job: {}", rank, reason)), rank(rank) {}

}  // namespace concerto
