// The step of a whole pipeline as data: a list of actions for every pipeline rank, made by one of the builders, checked
// before any step, drawn by the printers. One rank is a pipeline of one stage.
//
// A rank holds `chunks` virtual stages. Virtual stage v of the model's pp * chunks:
//   1f1b, zero_bubble   chunks = 1, v = rank
//   interleaved         v = chunk * pp + rank
//   zero_bubble_v       chunks = 2; chunk 0: v = rank; chunk 1: v = 2 pp - 1 - rank (first and last stage share a rank)
// Between neighbouring virtual stages on two ranks stand a send and a receive; on one rank, none.
//
// What a list means to who plays it: a receive blocks until its send has started; a send starts and blocks nobody, but
// its memory belongs to it until it is received; a slot is reused by a forward only when its last backward's send has
// been received. The validator plays all lists together by these rules, on a transport without buffers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "concerto/schedule/action.h"

namespace concerto {

struct PipelineOptions {
  std::string name = "1f1b";  // 1f1b | interleaved | zero_bubble | zero_bubble_v
  int pp = 1;                 // ranks
  int vpp = 1;                // virtual stages of a rank: interleaved only; zero_bubble_v has two
  int64_t micro_batches = 1;
  bool together = false;  // routing_unit global: every forward of a rank's chunk before any backward
};

struct PipelineSchedule {
  std::string name;
  int pp = 1, chunks = 1;
  bool v_shape = false;
  int64_t micro_batches = 0;
  bool split = false;     // uses I and W
  bool together = false;  // all forwards of a chunk stand side by side, before any backward
  std::vector<std::vector<Action>> ranks;
  std::vector<std::vector<int64_t>> slots;  // [rank][chunk]: micro-batches in flight at most

  int stages() const { return pp * chunks; }
  int rank_of(int virtual_stage) const;
  int chunk_of(int virtual_stage) const;
  int virtual_stage(int rank, int chunk) const;
};

// Error(kConfig): an unknown name, or a combination that cannot be (interleaved with vpp 1 and pp > 1; micro-batches
// that a builder cannot take) with what to write instead.
PipelineSchedule build_pipeline(const PipelineOptions& options);

// Each action after its causes and exactly once, sends meet receives, no deadlock, never more micro-batches in flight
// than `slots`, and those within the schedule's published bound. Bug naming rank and action.
void validate_pipeline(const PipelineSchedule& schedule);

// Time in units where a stage's forward, input backward and weight backward take the given times, and sends none.
struct StageTimes {
  double forward = 1, backward_input = 1, backward_weight = 1;  // of one virtual stage
};
struct PipelineTiming {
  struct Span {
    Action action;
    double begin = 0, end = 0;
  };
  std::vector<std::vector<Span>> ranks;  // compute actions only
  double length = 0;
  double bubble = 0;  // idle share of the ranks: 1 - busy / (pp * length)
};
PipelineTiming time_pipeline(const PipelineSchedule& schedule, const StageTimes& times = {});
// The least bubble that the kind of schedule can have, in closed form (1f1b: (p - 1) / (m + p - 1), ...).
double bubble_bound(const PipelineOptions& options, const StageTimes& times = {});

std::string pipeline_text(const PipelineSchedule& schedule);  // a grid: a line a rank, a column a unit of time
std::string pipeline_svg(const PipelineSchedule& schedule, const StageTimes& times = {});

}  // namespace concerto
