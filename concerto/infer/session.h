// One sequence through the model with a key-value cache: the same segments that train, forward only. Memory is planned
// by a dry run and taken once.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "concerto/model/stage.h"

namespace concerto {

class InferenceSession {
 public:
  // At most `capacity` tokens in the sequence, at most `chunk` of them in one pass (longer prompts run in chunks).
  InferenceSession(const Stage& stage, const ParameterStore& store, const Backend& backend, ThreadPool& pool,
                   int64_t capacity, int64_t chunk);
  ~InferenceSession();

  // Appends tokens and returns the logits of what follows the last of them: [vocab] in the stat type, valid until the
  // next call. Bug if the sequence grows over the capacity.
  View extend(std::span<const int32_t> tokens);
  void reset() { cache_.past = 0; }
  int64_t length() const { return cache_.past; }
  int64_t capacity() const { return capacity_; }
  int64_t bytes() const;

 private:
  View forward(std::span<const int32_t> tokens);
  View run_units();
  View head(View normed);

  const Stage& stage_;
  const ParameterStore& store_;
  Context context_;
  int64_t capacity_, chunk_;
  Buffer cache_memory_;
  std::vector<View> k_, v_;
  KvCache cache_;
  RouterMemory router_;
  LossSums losses_;
  Tokens tokens_;
  std::vector<int32_t> positions_, doc_offsets_;
  int64_t room_ = 0;  // of an expert: nothing is dropped
  std::vector<UnitSaved> units_;
  Arena turns_[2], scratch_, logits_;
  ParamRef head_weight_, head_bias_;
};

}  // namespace concerto
