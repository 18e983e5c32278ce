#include "tests/support/tiny_model.h"

#include <cmath>

#include "concerto/base/rng.h"
#include "concerto/tensor/values.h"

namespace concerto::test {

ModelConfig tiny_dense() {
  ModelConfig c;
  c.model_type = ModelType::kErnie45;
  c.vocab_size = 40;
  c.hidden_size = 16;
  c.intermediate_size = 24;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 8;
  c.tie_word_embeddings = true;
  return c;
}

ModelConfig tiny_moe() {
  ModelConfig c = tiny_dense();
  c.model_type = ModelType::kErnie45Moe;
  c.num_hidden_layers = 3;
  c.tie_word_embeddings = false;
  c.moe_num_experts = 8;
  c.moe_k = 3;
  c.moe_intermediate_size = 12;
  c.moe_num_shared_experts = 2;
  c.moe_layer_start_index = 1;
  c.output_router_logits = true;
  c.router_aux_loss_coef = 0.05;
  return c;
}

void fill_random(ParameterStore& store, uint64_t seed) {
  std::vector<float> values;
  for (int i = 0; i < store.size(); ++i) {
    const TensorSpec& s = store.specs()[static_cast<size_t>(i)];
    const Rng rng(seed, s.name);
    double mean = 0, deviation = 0.2;
    if (s.role == TensorRole::kNorm) mean = 1;
    if (s.role == TensorRole::kRouter) deviation = 1;  // choices with a margin
    if (s.role == TensorRole::kCorrectionBias) deviation = 0.05;
    values.resize(static_cast<size_t>(s.shape.elements()));
    for (size_t j = 0; j < values.size(); ++j) values[j] = static_cast<float>(mean + deviation * rng.normal(j));
    store.set(i, values.data());
  }
}

MicroBatch random_batch(const ModelConfig& c, const Rows& rows, uint64_t seed) {
  const Rng rng(seed, "tokens");
  const auto vocab = static_cast<uint64_t>(c.vocab_size) - 1;  // without the padding token, whose row gets no gradient
  uint64_t at = 0;
  MicroBatch b;
  b.doc_offsets = b.row_offsets = {0};
  const auto depth = static_cast<size_t>(c.num_nextn_predict_layers);
  std::vector<std::vector<int32_t>> ahead_ids(depth), ahead_targets(depth);
  for (const auto& documents : rows) {
    for (const int length : documents) {
      std::vector<int32_t> ids, targets;
      for (int t = 0; t < length; ++t) ids.push_back(1 + static_cast<int32_t>(rng.below(at++, vocab)));
      for (int t = 0; t < length; ++t)
        targets.push_back(t + 1 < length && rng.below(at++, 6) != 0 ? ids[static_cast<size_t>(t) + 1] : kIgnoreIndex);
      for (int t = 0; t < length; ++t) {
        b.token_ids.push_back(ids[static_cast<size_t>(t)]);
        b.targets.push_back(targets[static_cast<size_t>(t)]);
        b.positions.push_back(t);
        for (size_t d = 0; d < depth; ++d) {
          const size_t next = static_cast<size_t>(t) + 1 + d;
          const bool inside = next < static_cast<size_t>(length);
          ahead_ids[d].push_back(inside ? ids[next] : 0);
          ahead_targets[d].push_back(inside ? targets[next] : kIgnoreIndex);
        }
      }
      b.doc_offsets.push_back(static_cast<int32_t>(b.tokens()));
    }
    b.row_offsets.push_back(static_cast<int32_t>(b.tokens()));
  }
  for (size_t d = 0; d < depth; ++d) {
    b.mtp_token_ids.insert(b.mtp_token_ids.end(), ahead_ids[d].begin(), ahead_ids[d].end());
    b.mtp_targets.insert(b.mtp_targets.end(), ahead_targets[d].begin(), ahead_targets[d].end());
  }
  return b;
}

MicroBatch joined(std::span<const MicroBatch> parts) {
  MicroBatch all;
  all.doc_offsets = all.row_offsets = {0};
  int64_t depth = 0;
  for (const MicroBatch& p : parts) {
    const auto base = static_cast<int32_t>(all.tokens());
    if (p.tokens() > 0) depth = static_cast<int64_t>(p.mtp_targets.size()) / p.tokens();
    for (const auto field : {&MicroBatch::token_ids, &MicroBatch::positions, &MicroBatch::targets})
      (all.*field).insert((all.*field).end(), (p.*field).begin(), (p.*field).end());
    for (const auto field : {&MicroBatch::doc_offsets, &MicroBatch::row_offsets})
      for (size_t i = 1; i < (p.*field).size(); ++i) (all.*field).push_back(base + (p.*field)[i]);
  }
  for (int64_t d = 0; d < depth; ++d)
    for (const MicroBatch& p : parts)
      for (const auto field : {&MicroBatch::mtp_token_ids, &MicroBatch::mtp_targets}) {
        const auto begin = (p.*field).begin() + d * p.tokens();
        (all.*field).insert((all.*field).end(), begin, begin + p.tokens());
      }
  return all;
}

TinyRun::TinyRun(const ModelConfig& c, const Backend& backend, ThreadPool& pool, DType dtype, const Plan& plan)
    : config(c),
      store(tensor_specs(c), dtype, StoreUse::kTrain),
      stage(c, store, plan.recompute, plan.max_tokens, plan.routing.unit),
      executor(stage, store, backend, pool,
               {.max_tokens = plan.max_tokens,
                .split = build_pipeline({.name = plan.schedule}).split,
                .slots = {plan.slots},
                .loss_average = plan.loss_average,
                .token_balance_seqlen = plan.token_balance_seqlen,
                .routing = plan.routing,
                .poison = plan.poison}),
      pool_(pool),
      schedule_(plan.schedule),
      routing_(plan.routing) {
  fill_random(store, 7);
}

const StepOutput& TinyRun::step(std::span<const MicroBatch> batches) {
  return step(build_pipeline({.name = schedule_,
                              .micro_batches = static_cast<int64_t>(batches.size()),
                              .together = routing_.unit == RoutingUnit::kGlobal}),
              batches);
}

const StepOutput& TinyRun::step(const PipelineSchedule& schedule, std::span<const MicroBatch> batches) {
  store.clear_gradients(pool_);
  executor.run(schedule, batches, output);
  return output;
}

Tensors TinyRun::gradients() const {
  Tensors all;
  for (int i = 0; i < store.size(); ++i)
    all[store.specs()[static_cast<size_t>(i)].name] = to_doubles(store.gradient(i));
  return all;
}

double TinyRun::total_loss() const {
  double total = output.loss() + config.router_z_loss_coef * output.z_loss();
  if (balance_loss(config, routing_) != BalanceLoss::kNone) total += config.router_aux_loss_coef * output.aux_loss();
  const int depth = static_cast<int>(config.num_nextn_predict_layers);
  for (int m = 0; m < depth; ++m) total += config.mtp_loss_scaling_factor / depth * output.loss(m + 1);
  return total;
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference) / (norm > 0 ? std::sqrt(norm) : 1.0);
}

Distance distance(const Tensors& a, const Tensors& b) {
  Distance worst;
  if (a.size() != b.size()) return {INFINITY, "the number of tensors"};
  for (const auto& [name, values] : a) {
    const auto it = b.find(name);
    const double d = it == b.end() ? INFINITY : distance(values, it->second);
    if (std::isnan(d)) return {d, name};
    if (d > worst.value) worst = {d, name};
  }
  return worst;
}

}  // namespace concerto::test
