// All lists of a pipeline played together, by the rules of pipeline.h, on clocks instead of tensors.
#pragma once

#include "concerto/schedule/pipeline.h"

namespace concerto {

// "rank 3, action 17 RF5", for errors.
std::string place_text(const PipelineSchedule& schedule, int rank, size_t index);

struct PlayedPipeline {
  std::vector<std::vector<PipelineTiming::Span>> ranks;  // sends and receives too
  double length = 0;
  // [rank][chunk]: slots that make nobody wait at these times; only where play was told to heed no slots.
  std::vector<std::vector<int64_t>> slots_wanted;
};

// Bug where the lists cannot be played to their ends: names every rank that waits, and for what. Each action must be
// there once and in order on its rank (validate_pipeline looks before it plays).
PlayedPipeline play_pipeline(const PipelineSchedule& schedule, const StageTimes& times, bool heed_slots);

}  // namespace concerto
