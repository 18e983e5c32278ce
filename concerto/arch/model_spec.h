// The model as data: the list of its tensors under their Hugging Face names (reference 7.1), and counts of parameters
// and FLOPs. Read by all, written by none: the parameter store, initialisation, optimizer, checkpoints, HF import and
// export and the planner take names, shapes and roles from here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "concerto/config/model_config.h"
#include "concerto/tensor/view.h"

namespace concerto {

enum class TensorRole {
  kEmbedding,
  kHead,
  kNorm,
  kBias,
  kAttentionIn /* q, k, v */,
  kAttentionOut /* o */,
  kMlpIn /* gate, up */,
  kMlpDown,
  kSharedIn,
  kSharedDown,
  kExpertIn,
  kExpertDown,
  kRouter,
  kCorrectionBias,
  kMtpProjection
};

// Which ranks hold the same slice of a tensor (groups of topology/mesh.h): their gradients are summed, and one of them owns it.
enum class Replicas {
  kDp,         // cut by tp
  kKv,         // dp, and the tp ranks that share key/value heads
  kStage,      // all of a pipeline stage: norms, router, biases added after a sum over tp
  kEdp,        // routed experts
  kEmbedding,  // like kDp, on the first and on the last stage (tied head, multi-token prediction); the first owns it
};

struct TensorSpec {
  std::string name;  // as in the safetensors file
  Shape shape;       // as in the file: linear weights [out, in], correction bias [1, E]; of a shard: its own
  TensorRole role;
  int layer = -1;   // decoder layer; -1 outside; MTP blocks: num_hidden_layers + depth
  int expert = -1;  // global expert id; -1: not a routed expert
  bool keep_f32 =
      false;  // router weight and correction bias: fp32 in files and in compute, whatever the dtype (reference 9)
  bool trainable = true;  // false: the correction bias, which no gradient touches
  // Specs that follow each other with the same `fused` (>= 0) lie without a gap in the parameter store and can be
  // viewed as one matrix of their summed dim 0: q|k|v, gate|up, and (rank 3) the gate|up or the down of all experts of
  // a layer.
  int fused = -1;
  Shape full_shape = {};  // of the whole tensor; rank 0: `shape` is
  int cut_dim = -1;       // which dim of it is cut; -1: none
  int64_t cut_begin = 0;  // where the shard begins in it
  Replicas replicas = Replicas::kDp;
  const Shape& whole() const { return full_shape.rank() > 0 ? full_shape : shape; }
  bool decays_as_matrix() const { return shape.rank() >= 2 && role != TensorRole::kCorrectionBias; }
};

// Every tensor of the model in a fixed order: embedding, layers in order, final norm, head (if untied), MTP.
std::vector<TensorSpec> tensor_specs(const ModelConfig& config);

int64_t parameter_count(const ModelConfig& config);  // trainable elements, tied head once
int64_t active_parameter_count(
    const ModelConfig& config);  // of one token: head once (or tied embedding as head), k experts, no embedding look-up

// FLOPs of forward + backward for one token of a sequence of `seq` tokens:
// 6 * active parameters (router and shared experts in, embedding look-up out) + 6 * layers * seq * heads * head_dim
// (causal) + 6 * depths of multi-token prediction * vocabulary * hidden (each depth goes through the head again).
double flops_per_token(const ModelConfig& config, int64_t seq);

// Standard deviation of a tensor's initial normal distribution (reference 8); 0 for zeros; norms start at one.
double init_std(const ModelConfig& config, const TensorSpec& spec, Init method);

}  // namespace concerto
