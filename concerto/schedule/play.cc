#include "concerto/schedule/play.h"

#include <algorithm>
#include <optional>

#include "concerto/base/error.h"

namespace concerto {
namespace {

constexpr double kNever = -1;

// What has happened to a micro-batch in a virtual stage, and when.
struct Times {
  double forward = kNever, backward = kNever;  // F; B or I: ended
  double sent_forward = kNever, sent_backward = kNever;
  double received = kNever;  // its gradients, by the virtual stage before
};

// The slots of a chunk on one rank, first left, first taken.
struct SlotQueue {
  std::vector<int32_t> left;     // micro-batches in the order in which they left their slots
  std::vector<double> left_at;   // end of their last action
  std::vector<double> taken_at;  // without waiting for a slot
  int64_t taken() const { return static_cast<int64_t>(taken_at.size()); }
};

class Player {
 public:
  Player(const PipelineSchedule& s, const StageTimes& times, bool heed_slots)
      : s_(s), times_(times), heed_slots_(heed_slots), state_(static_cast<size_t>(s.stages() * s.micro_batches)) {
    queues_.assign(s.pp, std::vector<SlotQueue>(s.chunks));
    clock_.assign(s.pp, 0);
    played_.ranks.resize(s.pp);
  }

  PlayedPipeline play() {
    while (one_round()) {
    }
    for (int rank = 0; rank < s_.pp; ++rank)
      CHECK(next(rank) == s_.ranks[rank].size(), "the pipeline stands still: {}", who_waits());
    played_.length = *std::max_element(clock_.begin(), clock_.end());
    if (!heed_slots_) count_slots();
    return std::move(played_);
  }

 private:
  size_t next(int rank) const { return played_.ranks[rank].size(); }
  Times& at(int stage, int32_t m) { return state_[static_cast<size_t>(stage * s_.micro_batches + m)]; }

  // What can happen stays possible whatever else happens first, so that any order of ranks leads to the same end.
  bool one_round() {
    bool moved = false;
    for (int rank = 0; rank < s_.pp; ++rank)
      for (; next(rank) < s_.ranks[rank].size(); moved = true) {
        const Action& a = s_.ranks[rank][next(rank)];
        const std::optional<double> begin = ready(rank, a);
        if (!begin) break;
        do_action(rank, a, std::max(clock_[rank], *begin));
      }
    return moved;
  }

  // The earliest time at which the world lets an action begin; none: what it waits for has not happened.
  std::optional<double> ready(int rank, const Action& a) {
    const int v = s_.virtual_stage(rank, a.chunk);
    const auto when = [](double t) { return t == kNever ? std::nullopt : std::optional(t); };
    switch (a.kind) {
      case ActionKind::kRecvForward:
        return later(when(at(v - 1, a.micro_batch).sent_forward), slot_free(rank, a));
      case ActionKind::kForward:
        if (s_.receives(rank, a.chunk)) return 0;
        return later(v > 0 ? when(at(v - 1, a.micro_batch).forward) : 0, slot_free(rank, a));
      case ActionKind::kRecvBackward:
        return when(at(v + 1, a.micro_batch).sent_backward);
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        if (v + 1 == s_.stages() || s_.sends(rank, a.chunk)) return 0;
        return when(at(v + 1, a.micro_batch).backward);
      case ActionKind::kBackwardWeight:
      case ActionKind::kSendForward:
      case ActionKind::kSendBackward:
        return 0;
    }
    return std::nullopt;
  }
  static std::optional<double> later(std::optional<double> a, std::optional<double> b) {
    if (!a || !b) return std::nullopt;
    return std::max(*a, *b);
  }

  std::optional<double> slot_free(int rank, const Action& a) {
    const SlotQueue& q = queues_[rank][a.chunk];
    const int64_t old = q.taken() - s_slots(rank, a.chunk);
    if (old < 0) return 0;
    if (old >= static_cast<int64_t>(q.left.size())) return std::nullopt;
    return released(rank, a.chunk, static_cast<size_t>(old));
  }
  int64_t s_slots(int rank, int chunk) const { return heed_slots_ ? s_.slots[rank][chunk] : s_.micro_batches; }

  // When the i-th slot that was left is there for another.
  std::optional<double> released(int rank, int chunk, size_t i) {
    const SlotQueue& q = queues_[rank][chunk];
    if (!s_.receives(rank, chunk)) return q.left_at[i];  // its gradients were not sent
    const double received = at(s_.virtual_stage(rank, chunk), q.left[i]).received;
    if (received == kNever) return std::nullopt;
    return std::max(q.left_at[i], received);
  }

  void do_action(int rank, const Action& a, double begin) {
    const int v = s_.virtual_stage(rank, a.chunk);
    SlotQueue& q = queues_[rank][a.chunk];
    const double end = begin + duration(a.kind);
    Times& here = at(v, a.micro_batch);
    switch (a.kind) {
      case ActionKind::kRecvForward:
        q.taken_at.push_back(begin);
        break;
      case ActionKind::kForward:
        if (!s_.receives(rank, a.chunk)) q.taken_at.push_back(begin);
        here.forward = end;
        break;
      case ActionKind::kSendForward:
        here.sent_forward = end;
        break;
      case ActionKind::kRecvBackward:
        at(v + 1, a.micro_batch).received = end;
        break;
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        here.backward = end;
        break;
      case ActionKind::kSendBackward:
        here.sent_backward = end;
        break;
      case ActionKind::kBackwardWeight:
        break;
    }
    if (a.kind == ActionKind::kBackward || a.kind == ActionKind::kBackwardWeight) {
      q.left.push_back(a.micro_batch);
      q.left_at.push_back(end);
    }
    played_.ranks[rank].push_back({a, begin, end});
    clock_[rank] = end;
  }

  double duration(ActionKind kind) const {
    if (kind == ActionKind::kForward) return times_.forward;
    if (kind == ActionKind::kBackward) return times_.backward_input + times_.backward_weight;
    if (kind == ActionKind::kBackwardInput) return times_.backward_input;
    if (kind == ActionKind::kBackwardWeight) return times_.backward_weight;
    return 0;
  }

  // With k slots, the i-th taking waits for the (i - k)-th leaving: the least k that makes none wait.
  void count_slots() {
    played_.slots_wanted.assign(s_.pp, std::vector<int64_t>(s_.chunks, 0));
    for (int rank = 0; rank < s_.pp; ++rank)
      for (int chunk = 0; chunk < s_.chunks; ++chunk) {
        const SlotQueue& q = queues_[rank][chunk];
        int64_t& k = played_.slots_wanted[rank][chunk];
        for (int64_t i = 0; i < q.taken(); ++i)
          while (i >= k && (k == 0 || *released(rank, chunk, static_cast<size_t>(i - k)) > q.taken_at[i])) ++k;
      }
  }

  std::string who_waits() {
    std::string text;
    for (int rank = 0; rank < s_.pp; ++rank) {
      if (next(rank) == s_.ranks[rank].size()) continue;
      const Action& a = s_.ranks[rank][next(rank)];
      const bool takes = a.kind == ActionKind::kRecvForward || a.kind == ActionKind::kForward;
      const bool slot = takes && !slot_free(rank, a);
      text += fmt::format("{}{} waits for {}", text.empty() ? "" : "; ", place_text(s_, rank, next(rank)),
                          slot ? fmt::format("one of its {} slots", s_.slots[rank][a.chunk]) : cause_text(rank, a));
    }
    return text;
  }
  std::string cause_text(int rank, const Action& a) const {
    const int v = s_.virtual_stage(rank, a.chunk);
    const auto of = [&](int stage, ActionKind kind) {
      return fmt::format("rank {}'s {}", s_.rank_of(stage), action_text({kind, a.micro_batch, s_.chunk_of(stage)}));
    };
    if (a.kind == ActionKind::kRecvForward) return of(v - 1, ActionKind::kSendForward);
    if (a.kind == ActionKind::kRecvBackward) return of(v + 1, ActionKind::kSendBackward);
    if (a.kind == ActionKind::kForward) return of(v - 1, ActionKind::kForward);
    return of(v + 1, s_.split ? ActionKind::kBackwardInput : ActionKind::kBackward);
  }

  const PipelineSchedule& s_;
  const StageTimes& times_;
  const bool heed_slots_;
  std::vector<Times> state_;                    // [virtual stage][micro-batch]
  std::vector<std::vector<SlotQueue>> queues_;  // [rank][chunk]
  std::vector<double> clock_;
  PlayedPipeline played_;
};

}  // namespace

std::string place_text(const PipelineSchedule& s, int rank, size_t index) {
  return fmt::format("rank {}, action {} {}", rank, index, action_text(s.ranks[rank][index]));
}

PlayedPipeline play_pipeline(const PipelineSchedule& schedule, const StageTimes& times, bool heed_slots) {
  return Player(schedule, times, heed_slots).play();
}

}  // namespace concerto
