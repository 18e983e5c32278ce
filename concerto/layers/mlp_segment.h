// SwiGLU MLPs. `Mlp` is the bare map down(silu(gate x) * up x); MlpSegment is the dense half of a layer, hidden +
// mlp(norm(hidden)); SharedExpertsSegment is the MLP that every token of a MoE layer passes (reference 3.4), on the
// stream the router has normed.
#pragma once

#include "concerto/layers/linear_layer.h"

namespace concerto {

struct MlpSaved {
  View gate_up;  // [T, 2 F]; becomes its gradient in backward_input
  View act;      // [T, F], made again in backward_input
};

struct Mlp {
  LinearLayer gate_up, down;
  TensorShard shard;  // of the width F
  Mlp() = default;
  Mlp(const ParameterStore& store, const std::string& prefix, const TensorShard& shard);  // "model.layers.0.mlp."
  // x, dy: all rows [T, H]; y, dx: own rows [T_r, H].
  void forward(const SegmentContext& ctx, View x, View y, MlpSaved& s, Arena& arena) const;
  void backward_input(const SegmentContext& ctx, View dy, View dx, bool accumulate, MlpSaved& s, Arena& arena) const;
  void backward_weight(const SegmentContext& ctx, View x, View dy, View own_dy, MlpSaved& s) const;
};

class MlpSegment final : public Segment {
 public:
  MlpSegment(const ParameterStore& store, const ModelConfig& config, const std::string& prefix, std::string name,
             int layer, const TensorShard& shard = {});
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;
  void backward_weight(const SegmentContext& ctx, Saved& saved) const override;

 private:
  NormLayer norm_;
  Mlp mlp_;
};

class SharedExpertsSegment final : public Segment {
 public:
  SharedExpertsSegment(const ParameterStore& store, const ModelConfig& config, const std::string& prefix, int layer,
                       const TensorShard& shard = {});
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;
  void backward_weight(const SegmentContext& ctx, Saved& saved) const override;

 private:
  Mlp mlp_;
};

}  // namespace concerto
