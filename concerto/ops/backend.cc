#include "concerto/ops/backend.h"

#include <string>

namespace concerto {

void check_backend(const Backend& backend, DType compute) {
  const std::string type(dtype_name(compute));
  if (!backend.has(compute))
    throw Error(ErrorCode::kUnsupported, "backend", fmt::format("{} has no {} kernels", backend.name, type),
                "Use another training.dtype, or backend: ref.");
  const auto need = [&](auto kernel, const char* op) {
    if (!kernel)
      throw Error(ErrorCode::kUnsupported, "backend",
                  fmt::format("{} has no kernel for {} in {}", backend.name, op, type), "Use backend: ref.");
  };
  need(backend.linear.forward, "linear_forward");
  need(backend.linear.backward_input, "linear_backward_input");
  need(backend.linear.backward_weight, "linear_backward_weight");
  need(backend.grouped_linear.forward, "grouped_linear_forward");
  need(backend.grouped_linear.backward_input, "grouped_linear_backward_input");
  need(backend.grouped_linear.backward_weight, "grouped_linear_backward_weight");
  need(backend.rms_norm.forward, "rms_norm_forward");
  need(backend.rms_norm.backward_input, "rms_norm_backward_input");
  need(backend.rms_norm.backward_weight, "rms_norm_backward_weight");
  need(backend.rope.apply, "rope_apply");
  need(backend.attention.forward, "attention_forward");
  need(backend.attention.backward, "attention_backward");
  need(backend.attention.cached, "attention_cached");
  need(backend.swiglu.forward, "swiglu_forward");
  need(backend.swiglu.backward, "swiglu_backward");
  need(backend.embedding.forward, "embedding_forward");
  need(backend.embedding.backward_weight, "embedding_backward_weight");
  need(backend.router.logits, "router_logits");
  need(backend.router.select, "router_select");
  need(backend.router.select_backward, "router_select_backward");
  need(backend.router.logits_backward_input, "router_logits_backward_input");
  need(backend.router.logits_backward_weight, "router_logits_backward_weight");
  need(backend.routing.scores, "routing_scores");
  need(backend.routing.choose, "routing_choose");
  need(backend.routing.drop, "routing_drop");
  need(backend.routing.weights, "routing_weights");
  need(backend.routing.sums, "routing_sums");
  need(backend.routing.balance, "routing_balance");
  need(backend.routing.backward, "routing_backward");
  need(backend.routing.orthogonal_loss, "orthogonal_loss");
  need(backend.routing.orthogonal_step, "orthogonal_step");
  need(backend.routing.bias_update, "bias_update");
  need(backend.routing.clear_dropped, "clear_dropped");
  need(backend.routing.pad_dispatch, "pad_dispatch");
  need(backend.routing.pad_combine, "pad_combine");
  need(backend.permute.make_plan, "make_dispatch_plan");
  need(backend.permute.gather, "gather_rows");
  need(backend.permute.gather_backward, "gather_rows_backward");
  need(backend.permute.combine, "combine_rows");
  need(backend.permute.scatter_slots, "scatter_slots");
  need(backend.permute.gather_slots, "gather_slots");
  need(backend.cross_entropy.apply, "cross_entropy");
  need(backend.cross_entropy.share, "cross_entropy_share");
  need(backend.cross_entropy.of_shares, "cross_entropy_of_shares");
  need(backend.elementwise.add, "add");
  need(backend.elementwise.cast, "cast");
  need(backend.elementwise.sum_squares, "sum_squares");
  need(backend.optimizer.adamw, "adamw_step");
  need(backend.optimizer.lamb_norms, "lamb_step (norms)");
  need(backend.optimizer.lamb_apply, "lamb_step (apply)");
}

}  // namespace concerto
