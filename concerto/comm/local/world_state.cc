#include "concerto/comm/local/world_state.h"

#include <algorithm>

#include "concerto/comm/local/local_group.h"

namespace concerto {

WorldState::WorldState(int ranks, const LocalOptions& options)
    : options_(options), ended_(static_cast<size_t>(ranks)), last_(static_cast<size_t>(ranks)) {
  constexpr size_t kUsualName = 64;
  for (Last& last : last_) last.group.reserve(kUsualName);
  for (int r = 0; r < ranks; ++r) delays_.emplace_back(options.delay_seed, r, options.most_delay_seconds);
}

void WorldState::abort(int rank, const std::string& why) {
  std::unique_lock lock(mutex_);
  if (aborted_by_ < 0) {
    aborted_by_ = rank;
    reason_ = why;
    aborted_.store(true);
    wake_all();
  }
  drained_.wait(lock, [&] { return working_.load() == 0; });
}

int WorldState::aborted_by() const {
  const std::lock_guard lock(mutex_);
  return aborted_by_;
}

void WorldState::throw_aborted(const std::string& where) {
  std::unique_lock lock(mutex_);
  drained_.wait(lock, [&] { return working_.load() == 0; });
  throw PeerError(where, aborted_by_, reason_);
}

void WorldState::fail(int rank, const std::string& where, const std::string& what, const std::string& fix) {
  Error error(ErrorCode::kComm, where, what, fix);
  abort(rank, error.what());
  if (aborted_by() != rank) throw_aborted(where);
  throw error;
}

void WorldState::end_rank(int rank) {
  const std::lock_guard lock(mutex_);
  ended_[static_cast<size_t>(rank)].store(true);
  wake_all();
}

bool WorldState::begin_work() {
  working_.fetch_add(1);
  if (!aborted_.load()) return true;
  end_work();
  return false;
}

void WorldState::end_work() {
  if (working_.fetch_sub(1) != 1 || !aborted_.load()) return;
  const std::lock_guard lock(mutex_);
  drained_.notify_all();
}

void WorldState::note(int rank, ActionPhase phase, const std::string& group, const Operation& operation,
                      int world_peer) {
  ActionLog::note(phase, group, operation, world_peer);
  Last& last = last_[static_cast<size_t>(rank)];
  const std::lock_guard lock(last.mutex);
  last.group = group;
  last.kind = operation.kind;
  last.number = operation.number;
  last.action = operation.action;
  last.world_peer = world_peer;
  last.waits = phase == ActionPhase::kWait;
}

std::string WorldState::last(int rank) const {
  const Last& last = last_[static_cast<size_t>(rank)];
  const std::lock_guard lock(last.mutex);
  if (last.number == 0) return "has asked for nothing yet";
  const std::string action = last.action.text();
  return fmt::format("{} {}{}{}", last.waits ? "waits in" : "came last to",
                     describe_operation(last.group, last.kind, last.world_peer, last.number),
                     action.empty() ? "" : ", in ", action);
}

void WorldState::add_group(LocalGroup* group) {
  const std::lock_guard lock(mutex_);
  groups_.push_back(group);
}

void WorldState::remove_group(LocalGroup* group) {
  const std::lock_guard lock(mutex_);
  std::erase(groups_, group);
}

void WorldState::wake_all() {
  for (LocalGroup* group : groups_) group->wake_all();
}

void WorldState::delay(int rank) { delays_[static_cast<size_t>(rank)].sleep(); }

}  // namespace concerto
