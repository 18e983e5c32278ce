// Final norm, head and cross entropy. Hidden passes through unchanged; the normed stream goes out too (MTP may read
// it). In training the loss, its gradient and the head's weight gradient are made in one chunked pass in backward_input
// (fuses_weight), so that the logits of a chunk are made once; forward alone computes the loss when no backward
// follows, and the last logits when text is generated.
//
// Tensor parallel ranks hold slices of the vocabulary; each has the loss sum of all tokens.
#pragma once

#include "concerto/layers/linear_layer.h"
#include "concerto/ops/head_loss.h"

namespace concerto {

class HeadSegment final : public Segment {
 public:
  // depth -1: the main loss (index 0 of LossSums); m: MTP depth m (index m + 1), which shares norm and head
  // (reference 5.4).
  HeadSegment(const ParameterStore& store, const ModelConfig& config, int depth, const TensorShard& shard = {});
  void forward(const SegmentContext& ctx, const Acts& in, Acts& out, Saved& saved) const override;
  void backward_input(const SegmentContext& ctx, const Acts& dout, Acts& din, Saved& saved) const override;
  void backward_weight(const SegmentContext& ctx, Saved& saved) const override;

 private:
  View targets(const SegmentContext& ctx) const;
  View loss_sum(const SegmentContext& ctx) const;
  void loss(const SegmentContext& ctx, const HeadLoss& args) const;
  void loss_of_slices(const Context& ctx, const CrossEntropy& args) const;
  void observe_logits(const SegmentContext& ctx, View normed) const;
  void observe_slices(const SegmentContext& ctx, View own_normed) const;
  NormLayer norm_;
  LinearLayer head_;
  int depth_;
  TensorShard shard_;
  int64_t vocab_, begin_;  // of the whole; first id of the slice
};

}  // namespace concerto
