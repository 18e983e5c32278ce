#include <algorithm>
#include <map>

#include "concerto/base/error.h"
#include "concerto/schedule/play.h"

namespace concerto {
namespace {

constexpr int kKinds = static_cast<int>(ActionKind::kRecvBackward) + 1;

// One rank's list by itself.
class ListCheck {
 public:
  ListCheck(const PipelineSchedule& s, int rank)
      : s_(s), rank_(rank), done_(static_cast<size_t>(s.chunks * s.micro_batches) * kKinds, false), alive_(s.chunks) {}

  void run() {
    const std::vector<Action>& list = s_.ranks[rank_];
    for (index_ = 0; index_ < list.size(); ++index_) {
      const Action& a = list[index_];
      CHECK(static_cast<int>(a.kind) < kKinds && a.chunk >= 0 && a.chunk < s_.chunks && a.micro_batch >= 0 &&
                a.micro_batch < s_.micro_batches,
            "rank {}, action {}: no such kind, chunk or micro-batch", rank_, index_);
      CHECK(belongs(a.kind, a.chunk), "{} has no place on this rank in this schedule", place());
      CHECK(!done(a.kind, a), "{} is there twice", place());
      check_causes(a);
      count(a);
      done_[at(a.kind, a)] = true;
    }
    for (int32_t c = 0; c < s_.chunks; ++c)
      for (int32_t m = 0; m < s_.micro_batches; ++m)
        for (int k = 0; k < kKinds; ++k) {
          const Action a{static_cast<ActionKind>(k), m, c};
          CHECK(!belongs(a.kind, c) || done(a.kind, a), "rank {}: {} is missing", rank_, action_text(a));
        }
  }

 private:
  std::string place() const { return place_text(s_, rank_, index_); }
  size_t at(ActionKind kind, const Action& a) const {
    return static_cast<size_t>((a.chunk * s_.micro_batches + a.micro_batch) * kKinds + static_cast<int>(kind));
  }
  bool done(ActionKind kind, const Action& a) const { return done_[at(kind, a)]; }

  bool belongs(ActionKind kind, int chunk) const {
    switch (kind) {
      case ActionKind::kForward:
        return true;
      case ActionKind::kBackward:
        return !s_.split;
      case ActionKind::kBackwardInput:
      case ActionKind::kBackwardWeight:
        return s_.split;
      case ActionKind::kSendForward:
      case ActionKind::kRecvBackward:
        return s_.sends(rank_, chunk);
      case ActionKind::kRecvForward:
      case ActionKind::kSendBackward:
        return s_.receives(rank_, chunk);
    }
    return false;
  }

  void check_causes(const Action& a) const {
    const ActionKind input = s_.split ? ActionKind::kBackwardInput : ActionKind::kBackward;
    switch (a.kind) {
      case ActionKind::kForward:
        if (belongs(ActionKind::kRecvForward, a.chunk)) return wants(ActionKind::kRecvForward, a);
        return wants_neighbour(ActionKind::kForward, a, -1);
      case ActionKind::kSendForward:
      case ActionKind::kRecvBackward:
        return wants(ActionKind::kForward, a);
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        wants(ActionKind::kForward, a);
        if (belongs(ActionKind::kRecvBackward, a.chunk)) return wants(ActionKind::kRecvBackward, a);
        return wants_neighbour(input, a, 1);
      case ActionKind::kSendBackward:
        return wants(input, a);
      case ActionKind::kBackwardWeight:
        wants(input, a);
        if (belongs(ActionKind::kRecvBackward, a.chunk)) return;
        return wants_neighbour(ActionKind::kBackwardWeight, a, 1);  // which reads what lies in this slot
      case ActionKind::kRecvForward:
        return;
    }
  }
  void wants(ActionKind kind, const Action& a) const {
    CHECK(done(kind, a), "{} comes before its cause {}", place(), action_text({kind, a.micro_batch, a.chunk}));
  }
  // The same micro-batch in the virtual stage before or after, on this rank too.
  void wants_neighbour(ActionKind kind, const Action& a, int step) const {
    const int v = s_.virtual_stage(rank_, a.chunk) + step;
    if (v >= 0 && v < s_.stages()) wants(kind, {kind, a.micro_batch, s_.chunk_of(v)});
  }

  void count(const Action& a) {
    int64_t& alive = alive_[a.chunk];
    const bool takes = belongs(ActionKind::kRecvForward, a.chunk) ? a.kind == ActionKind::kRecvForward
                                                                  : a.kind == ActionKind::kForward;
    if (takes) ++alive;
    if (a.kind == ActionKind::kBackward || a.kind == ActionKind::kBackwardWeight) --alive;
    CHECK(alive <= s_.slots[rank_][a.chunk], "{}: {} micro-batches of chunk {} in flight, {} slots", place(), alive,
          a.chunk, s_.slots[rank_][a.chunk]);
  }

  const PipelineSchedule& s_;
  const int rank_;
  size_t index_ = 0;
  std::vector<bool> done_;      // [chunk][micro-batch][kind]
  std::vector<int64_t> alive_;  // [chunk]
};

// Forwards of a chunk stand side by side, and every forward before every backward.
void check_together(const PipelineSchedule& s, int rank) {
  const std::vector<Action>& list = s.ranks[rank];
  std::vector<int64_t> run(s.chunks, 0);
  for (size_t i = 0; i < list.size(); ++i) {
    const Action& a = list[i];
    if (a.kind == ActionKind::kForward) {
      const bool goes_on = i > 0 && list[i - 1].kind == a.kind && list[i - 1].chunk == a.chunk;
      CHECK(run[a.chunk] == 0 || goes_on, "{} stands apart from the other forwards of its chunk",
            place_text(s, rank, i));
      ++run[a.chunk];
    }
    CHECK((a.kind != ActionKind::kBackward && a.kind != ActionKind::kBackwardInput) ||
              std::all_of(run.begin(), run.end(), [&](int64_t n) { return n == s.micro_batches; }),
          "{} comes before the forwards of all micro-batches", place_text(s, rank, i));
  }
}

// What a rank sends another in one direction is received in the order of the sends.
void check_ways(const PipelineSchedule& s) {
  struct Message {
    int stage;  // that sends
    int32_t micro_batch;
    bool operator==(const Message&) const = default;
  };
  using Way = std::pair<int, int>;  // from rank, to rank
  for (const bool forward : {true, false}) {
    const ActionKind send = forward ? ActionKind::kSendForward : ActionKind::kSendBackward;
    const ActionKind receive = forward ? ActionKind::kRecvForward : ActionKind::kRecvBackward;
    const int step = forward ? 1 : -1;
    std::map<Way, std::vector<Message>> sent;
    for (int rank = 0; rank < s.pp; ++rank)
      for (const Action& a : s.ranks[rank]) {
        if (a.kind != send) continue;
        const int v = s.virtual_stage(rank, a.chunk);
        sent[{rank, s.rank_of(v + step)}].push_back({v, a.micro_batch});
      }
    std::map<Way, size_t> received;
    for (int rank = 0; rank < s.pp; ++rank)
      for (size_t i = 0; i < s.ranks[rank].size(); ++i) {
        const Action& a = s.ranks[rank][i];
        if (a.kind != receive) continue;
        const int v = s.virtual_stage(rank, a.chunk) - step;
        const Way way{s.rank_of(v), rank};
        const Message next = sent[way][received[way]++];
        CHECK(next == (Message{v, a.micro_batch}), "{}: what comes next from rank {} is {}", place_text(s, rank, i),
              way.first, action_text({send, next.micro_batch, s.chunk_of(next.stage)}));
      }
  }
}

}  // namespace

void validate_pipeline(const PipelineSchedule& s) {
  CHECK(s.pp >= 1 && s.chunks >= 1 && s.micro_batches >= 0 && (!s.v_shape || s.chunks == 2));
  CHECK(s.ranks.size() == static_cast<size_t>(s.pp) && s.slots.size() == s.ranks.size());
  for (const auto& slots : s.slots) CHECK(slots.size() == static_cast<size_t>(s.chunks));
  for (int rank = 0; rank < s.pp; ++rank) {
    ListCheck(s, rank).run();
    if (s.together) check_together(s, rank);
  }
  check_ways(s);
  play_pipeline(s, {}, true);
  const std::vector<int64_t> peaks = peak_in_flight(s);
  for (int rank = 0; rank < s.pp; ++rank)
    CHECK(peaks[rank] <= in_flight_bound(s, rank), "rank {}: {} micro-batches in flight; {} has at most {}", rank,
          peaks[rank], s.name, in_flight_bound(s, rank));
}

}  // namespace concerto
