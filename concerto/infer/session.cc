#include "concerto/infer/session.h"

#include <algorithm>

namespace concerto {

InferenceSession::InferenceSession(const Stage& stage, const ParameterStore& store, const Backend& backend,
                                   ThreadPool& pool, int64_t capacity, int64_t chunk)
    : stage_(stage), store_(store), capacity_(capacity), chunk_(std::min(chunk, capacity)) {
  const ModelConfig& c = stage.config();
  CHECK(chunk_ > 0);
  check_backend(backend, store.compute());
  context_ = {.backend = &backend, .pool = &pool, .scratch = &scratch_};
  head_weight_ = store.ref(c.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight");
  head_bias_ = store.ref("lm_head.bias");
  positions_.resize(static_cast<size_t>(capacity_));
  doc_offsets_ = {0, 0};

  const int64_t layers = c.num_hidden_layers, cols = c.num_key_value_heads * c.head_dim;
  const int64_t bytes = align_up(capacity_ * cols * dtype_bytes(store.compute()));
  cache_memory_ = Buffer(2 * layers * bytes);
  for (int64_t l = 0; l < layers; ++l) {
    k_.emplace_back(cache_memory_.data() + 2 * l * bytes, Shape{capacity_, cols}, store.compute());
    v_.emplace_back(cache_memory_.data() + (2 * l + 1) * bytes, Shape{capacity_, cols}, store.compute());
  }
  cache_ = {.k = k_.data(), .v = v_.data()};
  router_ = RouterMemory(c, {.layers = static_cast<int64_t>(stage.moe_layers().size()), .stat = store.stat()});
  units_.resize(stage.units().size());
  for (size_t u = 0; u < units_.size(); ++u) units_[u].segments.resize(stage.units()[u].segments.size());

  context_.dry_run = true;
  cache_.past = capacity_ - chunk_;  // the longest attention
  tokens_ = {.ids = View(nullptr, {chunk_}, DType::kI32),
             .positions = View(nullptr, {chunk_}, DType::kI32),
             .doc_offsets = View(nullptr, {2}, DType::kI32),
             .count = chunk_,
             .local = {0, chunk_},
             .units = {.offsets = View(nullptr, {2}, DType::kI32), .capacity = View(nullptr, {1}, DType::kI64)}};
  head(run_units().rows_range(chunk_ - 1, 1));
  context_.dry_run = false;
  cache_.past = 0;
  constexpr int64_t kScratchSlack = 1 << 20;  // kernels may round their scratch differently for fewer rows
  for (Arena& a : turns_) a = Arena(a.high_water());
  logits_ = Arena(logits_.high_water());
  scratch_ = Arena(scratch_.high_water() + kScratchSlack);
}

InferenceSession::~InferenceSession() = default;

int64_t InferenceSession::bytes() const {
  return cache_memory_.bytes() + turns_[0].capacity() + turns_[1].capacity() + scratch_.capacity() +
         logits_.capacity() + router_.bytes();
}

View InferenceSession::run_units() {
  const SegmentContext ctx{
      .ops = context_, .tokens = &tokens_, .losses = &losses_, .router = &router_.stats, .cache = &cache_};
  Acts acts;
  for (size_t i = 0; i < stage_.units().size(); ++i) {
    const Unit& unit = stage_.units()[i];
    if (unit.training_only) continue;
    Arena* arena = &turns_[i % 2];
    arena->reset();
    unit_forward(unit, ctx, acts, units_[i], {arena, arena, nullptr});
  }
  return acts.normed;
}

View InferenceSession::head(View normed) {
  logits_.reset();
  const View w = store_.weight(head_weight_);
  const View logits = logits_.take({1, w.rows()}, store_.stat());
  linear_forward(context_, {.x = normed,
                            .w = w,
                            .bias = store_.weight(head_bias_),
                            .y = logits,
                            .packed = store_.packed(context_, head_weight_)});
  return logits.reshape({w.rows()});
}

View InferenceSession::forward(std::span<const int32_t> tokens) {
  const auto n = static_cast<int64_t>(tokens.size());
  for (int64_t i = 0; i < n; ++i) positions_[static_cast<size_t>(i)] = static_cast<int32_t>(cache_.past + i);
  doc_offsets_[1] = static_cast<int32_t>(n);
  room_ = n;
  tokens_ = {
      .ids = View(const_cast<int32_t*>(tokens.data()), {n}, DType::kI32),
      .positions = View(positions_.data(), {n}, DType::kI32),
      .doc_offsets = View(doc_offsets_.data(), {2}, DType::kI32),
      .count = n,
      .local = {0, n},
      .units = {.offsets = View(doc_offsets_.data(), {2}, DType::kI32), .capacity = View(&room_, {1}, DType::kI64)}};
  const View normed = run_units();
  cache_.past += n;
  return normed.rows_range(n - 1, 1);
}

View InferenceSession::extend(std::span<const int32_t> tokens) {
  CHECK(!tokens.empty());
  CHECK(cache_.past + static_cast<int64_t>(tokens.size()) <= capacity_, "{} + {} tokens, capacity {}", cache_.past,
        tokens.size(), capacity_);
  View last;
  for (size_t at = 0; at < tokens.size(); at += static_cast<size_t>(chunk_))
    last = forward(tokens.subspan(at, std::min(static_cast<size_t>(chunk_), tokens.size() - at)));
  return head(last);
}

}  // namespace concerto
