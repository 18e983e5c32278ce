// Which layers a pipeline stage takes. Layers stand in the order of the model, the embedding with the first virtual
// stage, final norm, head, loss and multi-token prediction with the last; stages need not be equal and may be empty.
#pragma once

#include <cstdint>
#include <vector>

#include "concerto/arch/shard.h"

namespace concerto {

// Forward FLOPs of a token in the matrix products: 2 x the weights that it meets (moe_k experts, the shared ones and the
// router in a MoE layer). Attention scores are left out: they are the same in every layer, and small beside the products
// up to tens of thousands of tokens.
int64_t layer_forward_flops(const ModelConfig& config, int64_t layer);
int64_t head_forward_flops(
    const ModelConfig& config);  // with all of multi-token prediction, whose depths end in the head

// `virtual_stages` spans that cover the model. `layers_by_hand`: how many layers each takes (Bug unless there is one
// number a stage and they sum to the model's layers); empty: balanced, so that the greatest forward cost of a stage is the
// least there can be, then the sum of squares of the costs, then the early stages, which keep most micro-batches, take the
// fewest layers.
std::vector<StageSpan> split_stages(const ModelConfig& config, int virtual_stages,
                                    const std::vector<int64_t>& layers_by_hand = {});

// Those of one pipeline rank, in the order of the model: the virtual stages with the given numbers.
std::vector<StageSpan> stages_of(const std::vector<StageSpan>& all, const std::vector<int>& numbers);

}  // namespace concerto
