// How the chunked head + loss (ops/cross_entropy.h) cuts its tokens.
#pragma once

#include <cstdint>

namespace concerto {

// Tokens whose logits head_loss makes at a time. Depends on the vocabulary only.
int64_t head_loss_chunk(int64_t vocab);

}  // namespace concerto
