#include "concerto/schedule/pipeline.h"

#include <algorithm>
#include <limits>

#include "concerto/base/error.h"
#include "concerto/schedule/orders.h"
#include "concerto/schedule/play.h"

namespace concerto {

int PipelineSchedule::rank_of(int virtual_stage) const {
  return v_shape && virtual_stage >= pp ? 2 * pp - 1 - virtual_stage : virtual_stage % pp;
}
int PipelineSchedule::chunk_of(int virtual_stage) const { return virtual_stage / pp; }
int PipelineSchedule::virtual_stage(int rank, int chunk) const {
  return v_shape && chunk == 1 ? 2 * pp - 1 - rank : chunk * pp + rank;
}
bool PipelineSchedule::receives(int rank, int chunk) const {
  const int v = virtual_stage(rank, chunk);
  return v > 0 && rank_of(v - 1) != rank;
}
bool PipelineSchedule::sends(int rank, int chunk) const {
  const int v = virtual_stage(rank, chunk);
  return v + 1 < stages() && rank_of(v + 1) != rank;
}

namespace {

[[noreturn]] void refuse(const char* key, std::string what, std::string fix) {
  throw Error(ErrorCode::kConfig, fmt::format("parallel.{}", key), std::move(what), std::move(fix));
}

void check_options(const PipelineOptions& o) {
  CHECK(o.pp >= 1 && o.vpp >= 1 && o.micro_batches >= 0);
  CHECK(o.micro_batches <= std::numeric_limits<int32_t>::max());
  if (o.name == "interleaved") {
    if (o.vpp == 1 && o.pp > 1)
      refuse("vpp", "interleaved with one virtual stage a rank has nothing to interleave",
             "Set vpp to 2 or more, or schedule to 1f1b");
    return;
  }
  if (o.name != "1f1b" && o.name != "zero_bubble" && o.name != "zero_bubble_v")
    refuse("schedule", fmt::format("'{}' is not a schedule", o.name),
           "Use 1f1b, interleaved, zero_bubble or zero_bubble_v");
  const int chunks = o.name == "zero_bubble_v" ? 2 : 1;
  if (o.vpp != 1 && o.vpp != chunks)
    refuse("vpp", fmt::format("{} virtual stages a rank: {} has {}", o.vpp, o.name, chunks),
           "Set vpp to 1, or schedule to interleaved");
}

bool known(const std::string& name) {
  return name == "1f1b" || name == "interleaved" || name == "zero_bubble" || name == "zero_bubble_v";
}

void add_transfers(PipelineSchedule& s, int rank) {
  std::vector<Action> out;
  const auto receive = [&](const Action& a) {
    if (a.kind == ActionKind::kForward && s.receives(rank, a.chunk))
      out.push_back({ActionKind::kRecvForward, a.micro_batch, a.chunk});
    if ((a.kind == ActionKind::kBackward || a.kind == ActionKind::kBackwardInput) && s.sends(rank, a.chunk))
      out.push_back({ActionKind::kRecvBackward, a.micro_batch, a.chunk});
  };
  const auto send = [&](const Action& a) {
    if (a.kind == ActionKind::kForward && s.sends(rank, a.chunk))
      out.push_back({ActionKind::kSendForward, a.micro_batch, a.chunk});
    if ((a.kind == ActionKind::kBackward || a.kind == ActionKind::kBackwardInput) && s.receives(rank, a.chunk))
      out.push_back({ActionKind::kSendBackward, a.micro_batch, a.chunk});
  };
  const std::vector<Action> computes = std::move(s.ranks[rank]);
  for (auto first = computes.begin(); first != computes.end();) {
    auto end = first + 1;
    if (s.together && first->kind == ActionKind::kForward)
      while (end != computes.end() && end->kind == first->kind && end->chunk == first->chunk) ++end;
    std::for_each(first, end, receive);
    out.insert(out.end(), first, end);
    std::for_each(first, end, send);
    first = end;
  }
  s.ranks[rank] = std::move(out);
}

}  // namespace

PipelineSchedule complete_pipeline(PipelineSchedule s) {
  for (int rank = 0; rank < s.pp; ++rank) add_transfers(s, rank);
  s.slots = play_pipeline(s, {}, false).slots_wanted;
  return s;
}

PipelineSchedule build_pipeline(const PipelineOptions& o) {
  check_options(o);
  PipelineSchedule s;
  s.name = o.name;
  s.pp = o.pp;
  s.v_shape = o.name == "zero_bubble_v";
  s.chunks = s.v_shape ? 2 : o.vpp;
  s.micro_batches = o.micro_batches;
  s.split = o.name.starts_with("zero_bubble");
  s.together = o.together;
  order_computes(s);
  return complete_pipeline(std::move(s));
}

std::vector<int64_t> peak_in_flight(const PipelineSchedule& s) {
  std::vector<int64_t> peaks;
  for (const std::vector<Action>& list : s.ranks) {
    int64_t alive = 0, peak = 0;
    for (const Action& a : list) {
      if (a.kind == ActionKind::kForward) peak = std::max(peak, ++alive);
      if (a.kind == ActionKind::kBackward || a.kind == ActionKind::kBackwardWeight) --alive;
    }
    peaks.push_back(peak);
  }
  return peaks;
}

int64_t in_flight_bound(const PipelineSchedule& s, int rank) {
  const int64_t all = s.micro_batches * s.chunks;
  if (s.together || !known(s.name)) return all;
  if (s.name != "interleaved") return std::min<int64_t>(all, s.chunks * s.pp);
  const int64_t group = interleaved_groups(s.micro_batches, s.pp).back();
  return std::min<int64_t>(all, 2 * (s.pp - rank - 1) + (s.chunks - 1) * group + 1);
}

}  // namespace concerto
