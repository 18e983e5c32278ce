// How the chunked head + loss (ops/cross_entropy.h) cuts its tokens.
#pragma once

#include <cstdint>

#include "concerto/ops/cross_entropy.h"

namespace concerto {

// Tokens whose logits head_loss makes at a time. Depends on the vocabulary only.
int64_t head_loss_chunk(int64_t vocab);

// head_loss with another loss: `fn` is called with the arguments that cross_entropy would get, chunk after chunk of
// `rows` tokens.
struct ChunkLoss {
  void (*fn)(const void* self, const Context& ctx, const CrossEntropy& args) = nullptr;
  const void* self = nullptr;
};
void head_loss_in_chunks(const Context& ctx, const HeadLoss& args, int64_t rows, ChunkLoss loss);

}  // namespace concerto
