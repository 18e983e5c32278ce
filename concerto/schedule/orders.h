// What the builders decide: the order of the compute actions of each rank.
#pragma once

#include "concerto/schedule/pipeline.h"

namespace concerto {

// Fills ranks of a schedule whose other fields (but slots) are set; names as in PipelineOptions.
void order_computes(PipelineSchedule& schedule);

// Groups in which micro-batches go through the chunks of an interleaved rank: sizes, in order.
std::vector<int64_t> interleaved_groups(int64_t micro_batches, int pp);

}  // namespace concerto
