// The step of a whole pipeline as data: a list of actions for every pipeline rank, made by one of the builders, checked
// before any step, drawn by the printers. One rank is a pipeline of one stage.
//
// A rank holds `chunks` virtual stages. Virtual stage v of the model's pp * chunks:
//   1f1b, zero_bubble   chunks = 1, v = rank
//   interleaved         v = chunk * pp + rank
//   zero_bubble_v       chunks = 2; chunk 0: v = rank; chunk 1: v = 2 pp - 1 - rank (first and last stage share a rank)
// Between neighbouring virtual stages on two ranks stand a send and a receive; on one rank, none: there the slot of the
// neighbouring chunk takes what is passed on.
//
// What a list means to who plays it:
// - A receive blocks until its send has started. A send starts and blocks nobody, but its memory belongs to it until it
//   is received.
// - A micro-batch takes a slot of its chunk when its activations are received (RF; without a receive: at F), and leaves
//   it after its B or W. The slot that was left first is taken first; who takes it waits until the gradients that were
//   sent from it (SB) have been received.
// - Of neighbouring stages on one rank the later one has done its W first: it reads what the other has passed on where it
//   lies, in the other's slot.
// - What one rank sends another arrives in the order of the sends, activations and gradients each on a way of their own:
//   with two chunks both may travel from one rank to another, in an order that is not that of their receives.
// The validator plays all lists together by these rules, on a transport without buffers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "concerto/schedule/action.h"

namespace concerto {

struct PipelineOptions {
  std::string name = "1f1b";  // 1f1b | interleaved | zero_bubble | zero_bubble_v
  int pp = 1;                 // ranks
  int vpp = 1;  // virtual stages of a rank: interleaved only; zero_bubble_v has two, whether 1 or 2 stands here
  int64_t micro_batches = 1;
  bool together = false;  // routing_unit global: every forward of a rank's chunk before any backward
};

struct PipelineSchedule {
  std::string name;
  int pp = 1, chunks = 1;
  bool v_shape = false;
  int64_t micro_batches = 0;
  bool split = false;  // uses I and W
  bool together =
      false;  // all forwards of a chunk stand side by side (receives before, sends after), before any backward
  std::vector<std::vector<Action>> ranks;
  std::vector<std::vector<int64_t>> slots;  // [rank][chunk]: micro-batches that there is room for at once

  int stages() const { return pp * chunks; }
  int rank_of(int virtual_stage) const;
  int chunk_of(int virtual_stage) const;
  int virtual_stage(int rank, int chunk) const;
  // Whether rank and chunk get their activations from another rank, and whether they pass them on to one; gradients go
  // the same ways back.
  bool receives(int rank, int chunk) const;
  bool sends(int rank, int chunk) const;
};

// Any number of micro-batches, fewer than stages included (then with more bubble). One rank plays each micro-batch to
// its end in turn.
//   1f1b           pp - 1 - rank forwards ahead, then one forward, one backward.
//   interleaved    Megatron's (Narayanan et al. 2021, arXiv:2104.04473). Micro-batches go through a rank's chunks in
//                  groups of pp; where pp does not divide their number, in groups of equal size, one more or less, of
//                  at least pp; fewer than 2 pp are one group.
//   zero_bubble    ZB-H1 (Qi et al. 2023, arXiv:2401.10241): rank r does the W of a micro-batch r backwards later.
//   zero_bubble_v  Qi et al. 2024 (arXiv:2405.15362), with I and W of chunk 0 before the next forward.
// Error(kConfig): an unknown name; interleaved with vpp 1 and pp > 1; vpp > 1 for a schedule that has no such chunks.
PipelineSchedule build_pipeline(const PipelineOptions& options);

// For lists that hold compute actions only, in any order that can be played: puts in the receives, directly before what
// needs them, and the sends, directly after what made them (together: before and after the forwards of a chunk), and
// counts the slots: so many that none makes anybody wait, where every F, I and W takes equally long.
PipelineSchedule complete_pipeline(PipelineSchedule compute);

// Each action after its causes and exactly once, sends meet receives in order, no deadlock, never more micro-batches in
// flight than `slots`, and those within in_flight_bound. Bug naming rank and action.
void validate_pipeline(const PipelineSchedule& schedule);

// [rank]: micro-batches in flight at once, from F to the end of B or W, each counted once a chunk, at the worst moment.
std::vector<int64_t> peak_in_flight(const PipelineSchedule& schedule);
// The most that peak_in_flight may be on a rank, by the schedule's name: pp for 1f1b and zero_bubble, 2 pp for
// zero_bubble_v (chunks are half a stage), 2 (pp - rank - 1) + (chunks - 1) g + 1 for interleaved in groups of g; all
// micro-batches of all chunks if together, or if the name is none of these.
int64_t in_flight_bound(const PipelineSchedule& schedule, int rank);

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
// The least bubble that the kind of schedule can have within its memory, in closed form: idle / (idle + busy), where a
// rank is busy for m (F + I + W) a chunk and idle, with m >= p, for
//   1f1b, interleaved   (p - 1) (F + I + W)
//   zero_bubble         (p - 1) max(I, F + I - W)
//   zero_bubble_v       (p - 1) F                     F, I, W of half a stage; more if (p - 1) I > (2 p - 1) W
// times of a virtual stage. From 2 p micro-batches on, build_pipeline reaches it at F = I = W.
double bubble_bound(const PipelineOptions& options, const StageTimes& times = {});

// A grid: a line a rank, a column a unit of time, in at most 120 columns; it says so when it has to leave out.
std::string pipeline_text(const PipelineSchedule& schedule);
std::string pipeline_svg(const PipelineSchedule& schedule, const StageTimes& times = {});

}  // namespace concerto
