#include <algorithm>

#include "concerto/base/error.h"
#include "concerto/schedule/play.h"

namespace concerto {

PipelineTiming time_pipeline(const PipelineSchedule& schedule, const StageTimes& times) {
  PlayedPipeline played = play_pipeline(schedule, times, true);
  PipelineTiming timing{.ranks = std::move(played.ranks), .length = played.length};
  double busy = 0;
  for (auto& spans : timing.ranks) {
    std::erase_if(spans, [](const PipelineTiming::Span& s) { return !is_compute(s.action.kind); });
    for (const PipelineTiming::Span& s : spans) busy += s.end - s.begin;
  }
  if (played.length > 0) timing.bubble = 1 - busy / (schedule.pp * played.length);
  return timing;
}

namespace {

// Idle time that no order can spare the rank that has least, with every forward before any backward. Each chunk waits
// for all of the chunk before, and backward starts pp - 1 ranks away.
double idle_together(const PipelineOptions& o, const StageTimes& t, int chunks) {
  const bool split = o.name.starts_with("zero_bubble");
  const double m = static_cast<double>(o.micro_batches), away = o.pp - 1;
  return m * chunks * away * t.forward + away * (t.backward_input + (split ? 0 : t.backward_weight));
}

double idle_time(const PipelineOptions& o, const StageTimes& t) {
  const double away = o.pp - 1, k = static_cast<double>(std::min<int64_t>(o.micro_batches, o.pp));
  const double f = t.forward, i = t.backward_input, w = t.backward_weight;
  // The last rank starts `away` forwards late, and the first ends as many input backwards and a W after the last rank's
  // last input backward; until then the last rank has W to do of the micro-batches that it may have in flight.
  if (o.name == "zero_bubble_v") return std::max(away * f, away * (f + i) + w - 2 * k * w);
  // The first rank, too, waits: its k forwards and its first I fill not all of the way there and back.
  if (o.name == "zero_bubble") return std::max(away * i + (o.pp - k) * f, away * (f + i) + w - k * w);
  return away * (f + i + w);  // all that the last rank does lies between pp - 1 forwards and as many backwards
}

}  // namespace

double bubble_bound(const PipelineOptions& o, const StageTimes& t) {
  if (o.micro_batches == 0 || o.pp == 1) return 0;
  const int chunks = o.name == "zero_bubble_v" ? 2 : o.vpp;
  const double idle = o.together ? idle_together(o, t, chunks) : idle_time(o, t);
  const double busy =
      static_cast<double>(o.micro_batches) * chunks * (t.forward + t.backward_input + t.backward_weight);
  return idle / (busy + idle);
}

}  // namespace concerto
